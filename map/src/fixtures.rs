//! Objects of tests.

use gantry_api::{Gang, GpuNode};
use serde_json::{Value, json};

/// A GpuNode of a machine file, with whole GPUs, these holders (pod, first and last GPU) and unhealthy GPUs.
pub(crate) fn gpu_node(name: &str, file: &str, holders: &[(&str, &[usize])], unhealthy: &[usize]) -> GpuNode {
    let machine: gantry_topology::Machine = serde_saphyr::from_str(file).unwrap();
    let id = |gpu: usize| machine.gpus()[gpu].uuid.clone().map(|uuid| uuid.as_str().to_owned()).unwrap();
    let devices = (0..machine.gpus().len()).map(|gpu| {
        let mut device = json!({"id": id(gpu), "resource": "nvidia.com/gpu", "gpu": gpu, "healthy": true});
        if unhealthy.contains(&gpu) {
            device["healthy"] = false.into();
            device["reason"] = "Xid 79: GPU has fallen off the bus".into();
        }
        device
    });
    let devices: Vec<Value> = devices.collect();
    let holders: Vec<Value> = holders
        .iter()
        .map(|(pod, gpus)| holder(pod, &gpus.iter().map(|gpu| id(*gpu)).collect::<Vec<_>>()))
        .collect();
    serde_json::from_value(json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name},
        "spec": {"machine": machine},
        "status": {"summary": {"model": "V100", "links": "NV2"}, "devices": devices, "holders": holders},
    }))
    .unwrap()
}

pub(crate) fn holder(pod: &str, devices: &[String]) -> Value {
    json!({"namespace": "default", "pod": pod, "resource": "nvidia.com/gpu", "devices": devices, "provenance": "PodResources"})
}

/// A decided gang, whose members (pod, node, devices) have reservations.
pub(crate) fn gang(name: &str, members: &[(&str, &str, Vec<String>)]) -> Gang {
    let places: Vec<Value> = members
        .iter()
        .map(|(pod, node, ids)| json!({"node": node, "podName": pod, "devices": [{"resource": "nvidia.com/gpu", "ids": ids}]}))
        .collect();
    serde_json::from_value(json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "Gang", "metadata": {"name": name, "namespace": "default"},
        "spec": {},
        "status": {"name": name, "phase": "Binding", "decision": {"id": "d", "min": 1, "reservations": places}},
    }))
    .unwrap()
}
