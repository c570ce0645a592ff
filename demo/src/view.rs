//! The state of the cluster's GPUs at one moment, read from GpuNodes and grants only, as any user could.

use gantry_api::{GpuNode, Grant, names};
use gantry_map::ClusterMap;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

/// Combines GpuNodes and the grants of pods, which GpuNodes show a moment later.
pub(crate) fn view(gpu_nodes: &[GpuNode], pods: &[Pod]) -> ClusterMap {
    let mut map = ClusterMap::of(gpu_nodes, &[], |_| String::new());
    for (pod, grant) in pods.iter().filter_map(|pod| Some((pod, grant(pod)?))) {
        if let Some(node) = map.nodes.iter_mut().find(|node| node.name == grant.node.as_str()) {
            let namespace = pod.namespace().unwrap_or_default();
            node.add_grant(&namespace, &pod.name_any(), &grant, names::GPU_RESOURCE);
        }
    }
    map
}

/// The grant of a live pod that is bound.
pub(crate) fn grant(pod: &Pod) -> Option<Grant> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return None;
    }
    let node = pod.spec.as_ref()?.node_name.as_deref()?;
    let annotation = pod.annotations().get(names::GRANT_ANNOTATION)?;
    Grant::parse(annotation, &pod.uid()?.into(), &node.into()).ok()
}
