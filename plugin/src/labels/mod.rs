//! The node's labels: those of NVIDIA's gpu-feature-discovery under `nvidia.com/`, and ours under `gantry.dev/`. [`labels`]
//! computes them, purely; [`Labeller`] keeps them written. A label that cannot be written stops nothing else.
//!
//! ```text
//! inventory, config, host facts -> labels() -> NodeFeature object | features.d file | the Node itself
//! ```
//!
//! Equal facts give equal labels: nothing depends on the order in which anything was found. `docs/labels.md` lists every key.

mod driver;
mod host;
mod name;
mod products;
mod resource;
mod run;
mod settings;
mod topology;
mod vgpu;
pub mod write;

use gantry_topology::Gpu;

use crate::inventory::Inventory;
use crate::offer::{drives_a_screen, leaves};
use gantry_config::Config;

pub use host::{Host, HostOptions, PciClass, Vgpu};
pub use name::{LONGEST, LabelName, Labels, value, value_with};
pub use run::{Access, Labeller};
pub use settings::{Identity, LabelsArgs, Place, Settings, Target};
pub use vgpu::HostDriver;

/// Domain of the labels that NVIDIA's gpu-feature-discovery writes.
const NVIDIA: &str = "nvidia.com";

/// The input of [`labels`].
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// GPUs and links, and the devices that kubelet is offered.
    pub inventory: &'a Inventory,
    /// How MIG devices are advertised and devices shared.
    pub config: &'a Config,
    /// What NVML does not report.
    pub host: &'a Host,
    /// Whether the devices' health is watched; otherwise no label is about health.
    pub watched: bool,
    /// Unix time of `nvidia.com/gfd.timestamp`; `None` for no such label.
    pub timestamp: Option<i64>,
}

/// The labels of a node. A node without GPUs that its lists allow has only the timestamp and the labels about the host of virtual GPUs;
/// gpu-feature-discovery does not label the machine type of such a node either.
pub fn labels(facts: &Facts<'_>) -> Labels {
    let mut set = Set::default();
    if let Some(timestamp) = facts.timestamp {
        set.nvidia("gfd.timestamp", timestamp);
    }
    driver::vgpu(&mut set, facts.host);
    let machine = &facts.inventory.machine;
    // A GPU that the lists exclude is ignored: a pod that a label attracts would not get it.
    let gpus = machine.gpus().iter();
    let gpus = gpus.filter(|gpu| leaves(facts.config, gpu) && !drives_a_screen(gpu));
    let gpus: Vec<&Gpu> = gpus.collect();
    if gpus.is_empty() {
        return set.0;
    }
    driver::machine(&mut set, facts.host);
    driver::versions(&mut set, machine.host());
    driver::gpus(&mut set, &gpus, facts.host);
    let products = products::all(&gpus);
    resource::label(&mut set, facts, &products);
    topology::label(&mut set, facts, &gpus, &products);
    set.0
}

/// The labels so far.
#[derive(Debug, Default)]
struct Set(Labels);

impl Set {
    /// Sets a label of NVIDIA's.
    fn nvidia(&mut self, name: &str, text: impl ToString) {
        self.put(NVIDIA, name, text);
    }

    /// Removes a label of NVIDIA's, if there is one.
    fn without_nvidia(&mut self, name: &str) {
        self.0.remove(&LabelName::new(NVIDIA, name));
    }

    /// Sets a label of ours.
    fn ours(&mut self, name: &str, text: impl ToString) {
        self.put(gantry_api::names::GROUP, name, text);
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "numbers and texts alike, without a sign at every call"
    )]
    fn put(&mut self, domain: &str, name: &str, text: impl ToString) {
        self.0.insert(LabelName::new(domain, name), value(&text.to_string()));
    }
}
