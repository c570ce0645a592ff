//! A cluster of any size and a request about all of it, for the benchmarks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{
    GpuNode, GpuNodeSpec, GpuNodeStatus, KubeletTopology, NodeName, TopologyManagerPolicy, names,
};
use gantry_extender::bind::Binder;
use gantry_extender::index::{self, Index, Source, Store};
use gantry_extender::service::Service;
use gantry_extender::watched::WatchedResources;
use gantry_planner::decide::Options;
use gantry_planner::fixtures::{bridged, plain, switched};
use gantry_planner::kind::Kinds;
use gantry_topology::Machine;
use serde_json::json;

/// A node's name as clouds give them.
pub(crate) fn node_name(number: usize) -> String {
    format!("gpu-worker-{number:05}.cluster-a.example.internal")
}

/// What the nodes of a cluster serve.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fleet {
    /// Eight whole GPUs.
    Whole,
    /// The same on two NUMA nodes, of which kubelet gives CPUs and memory to containers. Pods are Guaranteed.
    Aligned,
    /// Eight GPUs of seven MIG devices each.
    Mig,
    /// Eight GPUs shared by four each.
    Shared,
}

impl Fleet {
    /// The resource.
    pub(crate) fn resource(self) -> &'static str {
        match self {
            Self::Whole | Self::Aligned => names::GPU_RESOURCE,
            Self::Mig => "nvidia.com/mig-1g.10gb",
            Self::Shared => "nvidia.com/gpu.shared",
        }
    }

    /// The devices of a node.
    fn devices(self, node: &str) -> Vec<serde_json::Value> {
        let each = match self {
            Self::Whole | Self::Aligned => 1,
            Self::Mig => 7,
            Self::Shared => 4,
        };
        let all = (0..8).flat_map(|gpu| (0..each).map(move |part| (gpu, part)));
        let device = |(gpu, part): (usize, usize)| {
            let mut device = json!({"resource": self.resource(), "gpu": gpu, "healthy": true});
            match self {
                Self::Whole | Self::Aligned => device["id"] = format!("GPU-{node}-{gpu}").into(),
                Self::Mig => {
                    device["id"] = format!("MIG-{node}-{gpu}-{part}").into();
                    device["slice"] = json!({"profile": "1g.10gb", "start": part, "size": 1});
                }
                Self::Shared => {
                    device["id"] = format!("GPU-{node}-{gpu}::{part}").into();
                    device["replica"] = part.into();
                }
            }
            device
        };
        all.map(device).collect()
    }

    /// A machine as it is in the cluster.
    fn machine(self, machine: Machine) -> Machine {
        let Self::Aligned = self else {
            return machine;
        };
        let mut parts = machine.clone().into_parts();
        for gpu in &mut parts.gpus {
            gpu.numa = if gpu.index < 4 { "0" } else { "1" }.parse().ok();
        }
        Machine::new(parts).unwrap_or(machine)
    }

    /// What its kubelets report in addition. No two nodes have as much free.
    fn aligned(self, number: usize) -> (Option<KubeletTopology>, serde_json::Value) {
        let Self::Aligned = self else {
            return (None, json!({}));
        };
        let kubelet =
            KubeletTopology { policy: TopologyManagerPolicy::SingleNumaNode, ..KubeletTopology::default() };
        let cpus = |node: usize| json!({"node": node, "total": 64, "allocatable": 64, "held": number % 40});
        let memory = |node: usize| {
            let held = (number + node) << 20;
            json!({"node": node, "allocatableBytes": 512u64 << 30, "heldBytes": held, "group": [node]})
        };
        (Some(kubelet), json!({"cpus": [cpus(0), cpus(1)], "memory": [memory(0), memory(1)]}))
    }
}

/// A service over `nodes` nodes of eight GPUs, three kinds, each with another set of devices taken.
pub(crate) fn service(fleet: Fleet, nodes: usize) -> Service {
    let watched = WatchedResources::new([names::GPU_RESOURCE.into()]);
    let mut index = Index::new(Options::default(), &watched, "bench".into());
    let mut kinds = Kinds::default();
    let now = Instant::now();
    for source in Source::ALL {
        index.list_begins(now, source);
    }
    let machines = [switched(), bridged(), plain(8)].map(|machine| fleet.machine(machine));
    for number in 0..nodes {
        let name = NodeName::from(node_name(number));
        let devices = fleet.devices(name.as_str());
        let advertised = u32::try_from(devices.len()).unwrap_or(u32::MAX);
        index.node_applied(&name, vec![(fleet.resource().into(), advertised)]);
        // Spread over all masks, a fifth of the devices taken.
        let taken = (number * 37 % 256) & (number * 91 % 256) & 0xff;
        let is_taken = |device: usize| match fleet {
            Fleet::Whole | Fleet::Aligned => taken & (1 << device) != 0,
            // No two nodes alike.
            Fleet::Mig | Fleet::Shared => ((number + 1) * 2_654_435_761 + device * 40_503) >> 7 & 7 < 2,
        };
        let held = devices.iter().enumerate().filter(|(device, _)| is_taken(*device));
        let held: Vec<_> = held.map(|(_, device)| device["id"].clone()).collect();
        let mut node = gpu_node(name.as_str(), fleet.resource(), &machines[number % 3], &devices, &held);
        let (kubelet, status) = fleet.aligned(number);
        node["spec"]["kubelet"] = json!(kubelet);
        if let (Some(status), Some(more)) = (node["status"].as_object_mut(), status.as_object()) {
            status.extend(more.clone());
        }
        let node = serde_json::from_value(node).unwrap_or_default();
        if let Some(inventory) = index::inventory(&watched, node, &mut kinds) {
            index.inventory_applied(&name, inventory);
        }
    }
    for source in Source::ALL {
        index.list_ends(now, source);
    }
    let store = Arc::new(Store::new(index));
    let (mock, _api) =
        tower_test::mock::pair::<http::Request<kube::client::Body>, http::Response<kube::client::Body>>();
    let client = kube::Client::new(mock, "default");
    Service {
        binder: Binder::new(client, Arc::clone(&store), watched.clone(), Duration::from_secs(1)),
        store,
        watched,
        metrics: Arc::default(),
    }
}

/// What kube-scheduler sends about all nodes, names only. Every request is of another pod, as in life.
pub(crate) fn body(fleet: Fleet, nodes: usize, devices: u32, pod: usize) -> Vec<u8> {
    let mut asked = json!({fleet.resource(): devices.to_string()});
    if matches!(fleet, Fleet::Aligned) {
        asked["cpu"] = "8".into();
        asked["memory"] = "64Gi".into();
    }
    let names: Vec<String> = (0..nodes).map(node_name).collect();
    let pod = json!({
        "metadata": {"name": format!("train-{pod}"), "namespace": "ml", "uid": format!("7bd4b3a0-5d5c-4f0c-9f0e-{pod:012}")},
        "spec": {"containers": [{
            "name": "train", "image": "train:1",
            "resources": {"limits": asked, "requests": asked},
        }]},
        "status": {"phase": "Pending"},
    });
    // In kube-scheduler's order: the pod is read a second time if the watch has not shown it, and stands first.
    format!(r#"{{"Pod":{pod},"Nodes":null,"NodeNames":{}}}"#, json!(names)).into_bytes()
}

fn gpu_node(
    name: &str,
    resource: &str,
    machine: &Machine,
    devices: &[serde_json::Value],
    held: &[serde_json::Value],
) -> serde_json::Value {
    let holders = json!([{
        "namespace": "ml", "pod": "other", "resource": resource, "devices": held, "provenance": "PodResources",
    }]);
    let status: GpuNodeStatus =
        serde_json::from_value(json!({"devices": devices, "holders": holders})).unwrap_or_default();
    let mut node = GpuNode::new(name, GpuNodeSpec { machine: machine.clone(), kubelet: None });
    node.status = Some(status);
    serde_json::to_value(&node).unwrap_or_default()
}
