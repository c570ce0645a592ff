//! The clocks of GPUs that GpuNodes report.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gantry_api::{GpuClock, NodeName};
use serde::Deserialize;

use crate::index::PartialGpuNode;

/// The clock of a GPU that a pod holds and that computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Clock {
    /// Its index on the node.
    pub(crate) index: usize,
    /// Its model.
    pub(crate) model: String,
    /// In percent of the highest one.
    pub(crate) percent: u8,
    /// What holds it down.
    pub(crate) limits: Vec<String>,
}

#[derive(Deserialize)]
struct Spec {
    machine: MachineSpec,
}

#[derive(Deserialize)]
struct MachineSpec {
    #[serde(default)]
    gpus: Vec<GpuSpec>,
}

#[derive(Deserialize)]
struct GpuSpec {
    #[serde(default)]
    index: u8,
    #[serde(default)]
    uuid: Option<String>,
    #[serde(default)]
    model: Option<String>,
}

#[derive(Default, Deserialize)]
struct Status {
    #[serde(default)]
    clocks: Vec<GpuClock>,
}

/// The clocks of a GpuNode; none if it cannot be read.
fn read(node: &PartialGpuNode) -> Vec<Clock> {
    let clocks = node.status.as_ref().and_then(|status| Status::deserialize(status).ok()).unwrap_or_default();
    if clocks.clocks.is_empty() {
        return Vec::new();
    }
    let Ok(spec) = Spec::deserialize(&node.spec) else {
        return Vec::new();
    };
    let clock = |clock: GpuClock| {
        let mut gpus = spec.machine.gpus.iter();
        let gpu = gpus.find(|gpu| gpu.uuid.as_ref() == Some(&clock.gpu))?;
        Some(Clock {
            index: gpu.index.into(),
            model: gpu.model.clone().unwrap_or_default(),
            percent: clock.sm_percent,
            limits: clock.limits,
        })
    };
    clocks.clocks.into_iter().filter_map(clock).collect()
}

/// The clocks of all nodes that report some.
#[derive(Debug, Default)]
pub(crate) struct ClusterClocks(Mutex<BTreeMap<NodeName, Arc<Vec<Clock>>>>);

impl ClusterClocks {
    fn nodes(&self) -> MutexGuard<'_, BTreeMap<NodeName, Arc<Vec<Clock>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A GpuNode was observed.
    pub(crate) fn observe(&self, name: &NodeName, node: &PartialGpuNode) {
        let clocks = read(node);
        let mut nodes = self.nodes();
        match clocks.is_empty() {
            true => nodes.remove(name),
            false => nodes.insert(name.clone(), Arc::new(clocks)),
        };
    }

    /// A GpuNode is gone.
    pub(crate) fn forget(&self, name: &NodeName) {
        self.nodes().remove(name);
    }

    /// Forgets nodes that a complete list does not name.
    pub(crate) fn retain(&self, names: &HashSet<NodeName>) {
        self.nodes().retain(|known, _| names.contains(known));
    }

    /// All nodes.
    pub(crate) fn all(&self) -> BTreeMap<NodeName, Arc<Vec<Clock>>> {
        self.nodes().clone()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn clocks_have_index_and_model_of_their_gpu() {
        let node = |clocks: serde_json::Value| -> PartialGpuNode {
            serde_json::from_value(json!({
                "metadata": {"name": "n"},
                "spec": {"machine": {"gpus": [{"index": 0}, {"index": 1, "uuid": "GPU-b", "model": "H100"}]}},
                "status": {"clocks": clocks},
            }))
            .unwrap()
        };
        let all = ClusterClocks::default();
        let name = NodeName::from("n");
        all.observe(&name, &node(json!([{"gpu": "GPU-b", "smPercent": 50, "limits": ["power-cap"]}, {"gpu": "GPU-x", "smPercent": 100}])));
        let clock =
            Clock { index: 1, model: "H100".to_owned(), percent: 50, limits: vec!["power-cap".to_owned()] };
        assert_eq!(*all.all()[&name], [clock]);
        all.observe(&name, &node(json!([])));
        assert!(all.all().is_empty());
        all.observe(&name, &node(json!("nothing")));
        assert!(all.all().is_empty());
    }
}
