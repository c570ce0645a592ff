//! The allow and deny lists: which GPUs and MIG devices may be served.

use gantry_topology::{Gpu, Machine};

use super::pattern;
use crate::inventory::Unit;
use gantry_config::{Config, Selector};

/// The lists of a configuration.
pub(super) struct Selection<'c> {
    allow: &'c [Selector],
    deny: &'c [Selector],
}

impl<'c> Selection<'c> {
    /// The lists of `config`. Entries that match nothing on this machine go to `problems`.
    pub(super) fn new(
        config: &'c Config,
        machine: &Machine,
        units: &[Unit],
        problems: &mut Vec<String>,
    ) -> Self {
        for (list, selectors) in [("allow", &config.allow), ("deny", &config.deny)] {
            for (position, selector) in selectors.iter().enumerate() {
                let gpus = || machine.gpus().iter().any(|gpu| means_gpu(selector, gpu));
                let slices = || units.iter().any(|unit| means_slice(selector, unit));
                if !gpus() && !slices() {
                    problems.push(format!(
                        "devices.{list}[{position}] ({}) matches nothing on this node",
                        text(selector)
                    ));
                }
            }
        }
        Self { allow: &config.allow, deny: &config.deny }
    }

    /// Whether the GPU may be served; otherwise the reason.
    pub(super) fn gpu(&self, gpu: &Gpu) -> Result<(), String> {
        match self.deny.iter().find(|selector| means_gpu(selector, gpu)) {
            Some(selector) => Err(format!("devices.deny names it ({})", text(selector))),
            None => Ok(()),
        }
    }

    /// Whether a unit of an allowed GPU may be served; otherwise the reason.
    pub(super) fn unit(&self, gpu: &Gpu, unit: &Unit) -> Result<(), String> {
        if self.deny.iter().any(|selector| means_slice(selector, unit)) {
            return Err(format!("devices.deny names its MIG device {}", unit.id));
        }
        let allows = |selector: &Selector| means_gpu(selector, gpu) || means_slice(selector, unit);
        if self.allow.is_empty() || self.allow.iter().any(allows) {
            return Ok(());
        }
        Err(match &unit.slice {
            Some(_) => format!("devices.allow does not name its MIG device {}", unit.id),
            None => "devices.allow does not name it".to_owned(),
        })
    }
}

/// Whether the lists of a configuration allow a GPU or one of its MIG devices. Other reasons not to serve it, such as a strategy or a
/// fault, are not considered.
pub(crate) fn leaves(config: &Config, gpu: &Gpu) -> bool {
    let named_in = |list: &[Selector]| list.iter().any(|selector| means_gpu(selector, gpu));
    if named_in(&config.deny) {
        return false;
    }
    let allowed = config.allow.is_empty() || named_in(&config.allow);
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let mut slices = instances.flat_map(|instance| &instance.compute).peekable();
    if slices.peek().is_none() {
        return allowed;
    }
    slices.any(|slice| {
        let named_in = |list: &[Selector]| list.iter().any(|selector| is_uuid(selector, slice.uuid.as_str()));
        !named_in(&config.deny) && (allowed || named_in(&config.allow))
    })
}

fn means_gpu(selector: &Selector, gpu: &Gpu) -> bool {
    match selector {
        Selector::Index(index) => gpu.index == *index,
        Selector::Uuid(uuid) => gpu.uuid.as_ref().is_some_and(|own| own.as_str().eq_ignore_ascii_case(uuid)),
        Selector::BusId(address) => gpu.bus_id.as_ref() == Some(address),
        // In any case: a deny list that missed a GPU for a capital letter would give it out.
        Selector::Model(model) => {
            let own = gpu.model.as_deref().unwrap_or_default();
            pattern::matches(&model.to_lowercase(), &own.to_lowercase())
        }
    }
}

fn means_slice(selector: &Selector, unit: &Unit) -> bool {
    unit.slice.is_some() && is_uuid(selector, unit.id.as_str())
}

fn is_uuid(selector: &Selector, own: &str) -> bool {
    matches!(selector, Selector::Uuid(uuid) if own.eq_ignore_ascii_case(uuid))
}

fn text(selector: &Selector) -> String {
    match selector {
        Selector::Index(index) => format!("GPU {index}"),
        Selector::Uuid(uuid) => uuid.clone(),
        Selector::BusId(address) => address.to_string(),
        Selector::Model(model) => format!("model {model:?}"),
    }
}
