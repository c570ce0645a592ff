//! The clocks of GPUs that GpuNodes report.

use gantry_api::GpuClock;
use serde::Deserialize;

use crate::index::{PartialGpuNode, read_part};
use crate::per_node::{self, FromGpuNode, GpuSpec, PerNode};

/// The clock of a GPU that a pod holds and that computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Clock {
    /// Its index on the node.
    pub(crate) index: usize,
    /// Its model.
    pub(crate) model: String,
    /// In percent of the highest one.
    pub(crate) percent: u8,
    /// Power draw in percent of the enforced limit, if the GPU has a meter.
    pub(crate) power: Option<u8>,
    /// What holds it down.
    pub(crate) limits: Vec<String>,
}

#[derive(Deserialize)]
struct Status {
    #[serde(default)]
    clocks: Vec<GpuClock>,
}

/// The clocks that a node reports.
#[derive(Debug)]
pub(crate) struct NodeClocks(pub(crate) Vec<Clock>);

impl FromGpuNode for NodeClocks {
    fn read(node: &PartialGpuNode) -> Option<Self> {
        let Status { clocks } = read_part(node.status.as_ref()?).ok()?;
        if clocks.is_empty() {
            return None;
        }
        let gpus = per_node::gpus(node)?;
        let clock = |clock: GpuClock| {
            let is_it = |gpu: &&GpuSpec| gpu.uuid.as_ref().is_some_and(|uuid| uuid.as_str() == clock.gpu);
            let gpu = gpus.iter().find(is_it)?;
            Some(Clock {
                index: gpu.index.into(),
                model: gpu.model.clone().unwrap_or_default(),
                percent: clock.sm_percent,
                power: clock.power_percent,
                limits: clock.limits,
            })
        };
        let clocks: Vec<Clock> = clocks.into_iter().filter_map(clock).collect();
        (!clocks.is_empty()).then_some(Self(clocks))
    }
}

/// The clocks of all nodes that report some.
pub(crate) type ClusterClocks = PerNode<NodeClocks>;

#[cfg(test)]
mod tests {
    use gantry_api::NodeName;
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
        all.observe(&name, &node(json!([{"gpu": "GPU-b", "smPercent": 50, "powerPercent": 90, "limits": ["power-cap"]}, {"gpu": "GPU-x", "smPercent": 100}])));
        let clock = Clock {
            index: 1,
            model: "H100".to_owned(),
            percent: 50,
            power: Some(90),
            limits: vec!["power-cap".to_owned()],
        };
        assert_eq!(all.all()[&name].0, [clock]);
        all.observe(&name, &node(json!([])));
        assert!(all.all().is_empty());
        all.observe(&name, &node(json!("nothing")));
        assert!(all.all().is_empty());
    }
}
