//! The state of the cluster's GPUs at one moment: their holders, unhealthy GPUs, withheld GPUs. Read from GpuNodes and
//! grants only, as any user could.

use std::collections::BTreeMap;

use gantry_api::{DeviceId, GpuNode, Grant, HolderState, names};
use gantry_topology::{GpuSet, Machine};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

/// All nodes, by name.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ClusterView {
    pub(crate) nodes: Vec<NodeView>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NodeView {
    pub(crate) name: String,
    pub(crate) machine: Machine,
    /// By index.
    pub(crate) gpus: Vec<GpuView>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GpuView {
    /// The pod that holds it.
    pub(crate) pod: Option<String>,
    pub(crate) hold: Hold,
    /// The reason, if it is unhealthy.
    pub(crate) unhealthy: Option<String>,
}

/// How a pod holds a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Free.
    #[default]
    None,
    /// Granted; kubelet has not allocated it yet.
    Granted,
    /// Allocated to its containers.
    Held,
    /// The pod is deleted; its processes may still run.
    Quarantined,
}

impl ClusterView {
    /// Combines GpuNodes and pods.
    pub(crate) fn of(gpu_nodes: &[GpuNode], pods: &[Pod]) -> Self {
        let mut nodes: Vec<NodeView> = gpu_nodes.iter().map(|node| NodeView::of(node, pods)).collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        Self { nodes }
    }

    pub(crate) fn node(&self, name: &str) -> Option<&NodeView> {
        self.nodes.iter().find(|node| node.name == name)
    }
}

impl NodeView {
    fn of(node: &GpuNode, pods: &[Pod]) -> Self {
        let machine = node.spec.machine.clone();
        let name = node.name_any();
        let mut gpus = vec![GpuView::default(); machine.gpus().len()];
        let index = indices(&machine);
        for pod in pods {
            let devices = grant(pod).filter(|grant| grant.node.as_str() == name);
            let devices = devices.map(|grant| grant.held(names::GPU_RESOURCE)).unwrap_or_default();
            hold(&mut gpus, &index, devices.iter(), &pod.name_any(), Hold::Granted);
        }
        let status = node.status.clone().unwrap_or_default();
        for holder in &status.holders {
            let state = match holder.state {
                HolderState::Live => Hold::Held,
                HolderState::Quarantined => Hold::Quarantined,
            };
            hold(&mut gpus, &index, holder.devices.iter(), &holder.pod, state);
        }
        for device in status.devices.iter().filter(|device| !device.health.healthy) {
            if let Some(gpu) = gpus.get_mut(usize::from(device.gpu)) {
                let reason = device.health.reason.clone();
                gpu.unhealthy = Some(reason.unwrap_or_else(|| "unhealthy".into()));
            }
        }
        Self { name, machine, gpus }
    }

    /// Healthy GPUs without a holder.
    pub(crate) fn free(&self) -> GpuSet {
        self.set(|gpu| gpu.hold == Hold::None && gpu.unhealthy.is_none())
    }

    /// The GPUs that match.
    pub(crate) fn set(&self, wanted: impl Fn(&GpuView) -> bool) -> GpuSet {
        let gpus = self.gpus.iter().enumerate();
        gpus.filter(|(_, gpu)| wanted(gpu)).fold(GpuSet::EMPTY, |set, (index, _)| set.with(index))
    }

    /// The GPUs with these UUIDs.
    pub(crate) fn of_ids<'a>(&self, ids: impl IntoIterator<Item = &'a str>) -> GpuSet {
        let index = indices(&self.machine);
        let found = ids.into_iter().filter_map(|id| index.get(id).copied());
        found.fold(GpuSet::EMPTY, GpuSet::with)
    }
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

fn indices(machine: &Machine) -> BTreeMap<&str, usize> {
    let uuids = machine.gpus().iter().enumerate();
    uuids.filter_map(|(index, gpu)| Some((gpu.uuid.as_ref()?.as_str(), index))).collect()
}

fn hold<'a>(
    gpus: &mut [GpuView],
    index: &BTreeMap<&str, usize>,
    devices: impl Iterator<Item = &'a DeviceId>,
    pod: &str,
    state: Hold,
) {
    for device in devices {
        if let Some(gpu) = index.get(device.as_str()).and_then(|index| gpus.get_mut(*index)) {
            gpu.pod = Some(pod.to_owned());
            gpu.hold = state;
        }
    }
}
