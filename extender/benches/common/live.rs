//! A cluster as the extender's index has it, fed as the watches feed it, for the benchmark of gangs.

use std::time::Instant;

use gantry_api::{GpuNode, GpuNodeSpec, GpuNodeStatus, NodeName, names};
use gantry_extender::index::{self, Index, Source, Store};
use gantry_extender::pod::{ParsedPod, Reader};
use gantry_extender::watched::WatchedResources;
use gantry_planner::decide::Options;
use gantry_planner::kind::Kinds;
use serde_json::{Value, json};

use gantry_planner::fixtures::switched;

/// Nodes of eight GPUs and what has come to them.
pub(crate) struct Live {
    pub(crate) store: Store,
    reader: Reader,
}

impl Live {
    pub(crate) fn new(nodes: u32) -> Self {
        let watched = WatchedResources::new([names::GPU_RESOURCE.into()]);
        let mut index = Index::new(Options::default(), &watched, "bench".into());
        let (now, mut kinds) = (Instant::now(), Kinds::default());
        for source in Source::ALL {
            index.list_begins(now, source);
        }
        for number in 0..nodes {
            let name = NodeName::from(format!("n{number}"));
            index.node_applied(&name, vec![(names::GPU_RESOURCE.into(), 8)]);
            index.node_described(facts(number, 0).into());
            let mut node = GpuNode::new(name.as_str(), GpuNodeSpec { machine: switched(), kubelet: None });
            let ids = (0..8).map(|gpu| gpu_id(number, gpu));
            let devices = ids.enumerate().map(
                |(gpu, id)| json!({"id": id, "resource": names::GPU_RESOURCE, "gpu": gpu, "healthy": true}),
            );
            let devices: Vec<Value> = devices.collect();
            let status: Option<GpuNodeStatus> = serde_json::from_value(json!({"devices": devices})).ok();
            node.status = status;
            let node = serde_json::to_value(&node).and_then(serde_json::from_value);
            if let Some(inventory) = index::inventory(&watched, node.unwrap_or_default(), &mut kinds) {
                index.inventory_applied(&name, inventory);
            }
        }
        for source in Source::ALL {
            index.list_ends(now, source);
        }
        Self { store: Store::new(index), reader: Reader::new(watched) }
    }

    /// Pods that the watch shows at once.
    pub(crate) fn show(&mut self, pods: impl Iterator<Item = Value>) {
        let pods: Vec<ParsedPod> =
            pods.filter_map(|pod| self.reader.read(serde_json::from_value(pod).ok()?)).collect();
        self.store.update(|index| {
            for pod in pods {
                match pod {
                    ParsedPod::Facts(pod) => index.pod_applied(*pod),
                    ParsedPod::OtherPod(pod) => index.other_pod_applied(*pod),
                }
            }
        });
    }

    /// Plans all that is to be planned. How many times.
    pub(crate) fn plan(&self) -> u32 {
        let mut count = 0;
        while self.store.update(Index::plan_next) {
            count += 1;
        }
        count
    }
}

/// What a node reports of itself, with one label that may change.
pub(crate) fn facts(number: u32, label: u32) -> gantry_gang::NodeFacts {
    gantry_gang::NodeFacts {
        name: format!("n{number}").into(),
        labels: [("kubernetes.io/hostname", format!("n{number}")), ("changes", label.to_string())]
            .map(|(name, value)| (name.into(), value.into()))
            .into(),
        allocatable: gantry_gang::Resources {
            milli_cpu: 192_000,
            memory: 2 << 40,
            ephemeral: 1 << 40,
            pods: 110,
            ..gantry_gang::Resources::default()
        },
        ..gantry_gang::NodeFacts::default()
    }
}

fn gpu_id(node: u32, gpu: u32) -> String {
    format!("GPU-{node}-{gpu}")
}

/// A pod of so many GPUs.
pub(crate) fn pod(name: &str, gpus: u32) -> Value {
    let asked = json!({names::GPU_RESOURCE: gpus.to_string()});
    json!({
        "metadata": {"name": name, "namespace": "ml", "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{"name": "main", "resources": {"limits": asked, "requests": asked}}]},
        "status": {"phase": "Pending"},
    })
}

/// One of a gang of which so many are needed.
pub(crate) fn member(gang: &str, number: u32, min: u32, gpus: u32) -> Value {
    let mut pod = pod(&format!("{gang}-{number}"), gpus);
    pod["metadata"]["annotations"] =
        json!({names::GANG_ANNOTATION: gang, names::GANG_MIN_ANNOTATION: min.to_string()});
    pod
}

/// The pod on a node.
pub(crate) fn bound(mut pod: Value, node: u32) -> Value {
    pod["spec"]["nodeName"] = format!("n{node}").into();
    pod["status"]["conditions"] =
        json!([{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
    pod
}
