//! A cluster of any size and a request about all of it, for the benchmarks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{GpuNode, GpuNodeSpec, GpuNodeStatus, names};
use gantry_extender::bind::Binder;
use gantry_extender::decide::Options;
use gantry_extender::index::{self, Index, Source, Store};
use gantry_extender::kind::Kinds;
use gantry_extender::service::Service;
use gantry_extender::watched::Watched;
use gantry_topology::{Gpu, Machine, MachineParts, NvLinkBundle, NvLinkPorts, PathClass, PathMatrix};
use serde_json::json;

/// A node's name as clouds give them.
pub(crate) fn node_name(number: usize) -> String {
    format!("gpu-worker-{number:05}.cluster-a.example.internal")
}

/// A service over `nodes` nodes of eight GPUs, three kinds, each with another set of GPUs taken.
pub(crate) fn service(nodes: usize) -> Service {
    let watched = Watched::new([names::GPU_RESOURCE.into()]);
    let mut index = Index::new(Options::default(), &watched, "bench".into());
    let mut kinds = Kinds::default();
    let now = Instant::now();
    for source in Source::ALL {
        index.list_begins(now, source);
    }
    let machines = [switched(), bridged(), plain()];
    for number in 0..nodes {
        let name = node_name(number).as_str().into();
        index.node_applied(&name, vec![(names::GPU_RESOURCE.into(), 8)]);
        // Spread over all masks, a fifth of the GPUs taken.
        let taken = (number * 37 % 256) & (number * 91 % 256) & 0xff;
        let node = gpu_node(name.as_str(), &machines[number % 3], taken);
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
        binder: Binder::new(
            client,
            Arc::clone(&store),
            watched.clone(),
            Duration::from_secs(1),
        ),
        store,
        watched,
        options: Options::default(),
        metrics: Arc::default(),
    }
}

/// What kube-scheduler sends about all nodes, names only. Every request is of another pod, as in life.
pub(crate) fn body(nodes: usize, gpus: u32, pod: usize) -> Vec<u8> {
    let names: Vec<String> = (0..nodes).map(node_name).collect();
    let body = json!({
        "Pod": {
            "metadata": {"name": format!("train-{pod}"), "namespace": "ml", "uid": format!("7bd4b3a0-5d5c-4f0c-9f0e-{pod:012}")},
            "spec": {"containers": [{
                "name": "train", "image": "train:1",
                "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}, "requests": {"nvidia.com/gpu": gpus.to_string()}},
            }]},
            "status": {"phase": "Pending"},
        },
        "Nodes": null,
        "NodeNames": names,
    });
    serde_json::to_vec(&body).unwrap_or_default()
}

fn gpu_node(name: &str, machine: &Machine, taken: usize) -> index::LooseGpuNode {
    let id = |gpu: usize| format!("GPU-{name}-{gpu}");
    let devices: Vec<_> = (0..8)
        .map(|gpu| json!({"id": id(gpu), "resource": "nvidia.com/gpu", "gpu": gpu, "healthy": true}))
        .collect();
    let held: Vec<String> = (0..8).filter(|gpu| taken & (1 << gpu) != 0).map(id).collect();
    let holders = json!([{
        "namespace": "ml", "pod": "other", "resource": "nvidia.com/gpu", "devices": held, "provenance": "PodResources",
    }]);
    let status: GpuNodeStatus =
        serde_json::from_value(json!({"devices": devices, "holders": holders})).unwrap_or_default();
    let mut node = GpuNode::new(
        name,
        GpuNodeSpec {
            machine: machine.clone(),
        },
    );
    node.status = Some(status);
    serde_json::to_value(&node)
        .and_then(serde_json::from_value)
        .unwrap_or_default()
}

fn machine(shape: impl FnOnce(&mut MachineParts)) -> Machine {
    let mut parts = MachineParts {
        gpus: (0..8)
            .map(|index| Gpu {
                index,
                ..Gpu::default()
            })
            .collect(),
        paths: PathMatrix::from_fn(8, |a, b| {
            if a / 4 == b / 4 {
                PathClass::Node
            } else {
                PathClass::Sys
            }
        }),
        ..MachineParts::default()
    };
    shape(&mut parts);
    match Machine::new(parts) {
        Ok(machine) => machine,
        Err(error) => unreachable!("{error}"),
    }
}

fn switched() -> Machine {
    machine(|parts| {
        for gpu in &mut parts.gpus {
            gpu.nvlink = Some(NvLinkPorts {
                version: Some(4),
                switch_links: 18,
            });
        }
    })
}

fn bridged() -> Machine {
    machine(|parts| {
        parts.nvlinks = (0..4)
            .map(|pair| NvLinkBundle {
                gpus: [2 * pair, 2 * pair + 1],
                links: 4,
            })
            .collect();
    })
}

fn plain() -> Machine {
    machine(|_| {})
}
