//! The GPUs of a cluster and their holders at one moment: a model of the objects that any user can read, and its pictures.
//! Pure.
//!
//! The source is the GpuNodes: each names the holders of its devices and the faults. Gangs add the reservations of
//! members that are not bound yet, and the gang of each pod.
#![forbid(unsafe_code)]

mod strip;
mod svg;
mod text;

use std::collections::HashMap;
use std::sync::Arc;

use gantry_api::{Cordons, DeviceId, Gang, GpuNode, Grant, HolderState, Provenance};
use gantry_topology::{GpuSet, Machine};
use kube::ResourceExt as _;
use serde::Serialize;

pub use strip::{LEGEND, Letters, all_holders, names, strip};
pub use svg::svg;
pub use text::{Page, text, totals};

/// The nodes with GPUs, by name.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ClusterMap {
    /// Sorted by domain and name.
    pub nodes: Vec<NodeMap>,
}

/// One node.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeMap {
    /// Its name.
    pub name: String,
    /// The part of the fabric that it is in, such as `rack r1`; empty where none is known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// The models of its GPUs.
    pub model: String,
    /// Its best link, such as `NV18`.
    pub links: String,
    /// Why its plugin does not serve, if it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_ready: Option<String>,
    /// New pods are kept off it: `spec.unschedulable` of the Node, where that is known.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub cordoned: bool,
    /// GPUs without holder, reservation, cordon or fault.
    pub free_gpus: usize,
    /// By index.
    pub gpus: Vec<GpuMap>,
    /// The hardware.
    #[serde(skip)]
    pub machine: Arc<Machine>,
}

/// One GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuMap {
    /// What the map shows of it.
    pub state: GpuState,
    /// Devices that kubelet counts on it: 1 for a whole GPU, more for MIG devices and replicas.
    pub devices: u32,
    /// The pods on it, in order of their names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<PodOnGpu>,
    /// A deleted pod whose name is not known any more may still run on it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// What is wrong with it or with one of its MIG devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unhealthy: Option<String>,
    /// That the operator cordoned it, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cordoned: Option<String>,
    /// The gang for which it, or a part of it, is reserved: `namespace/name`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_for: Option<String>,
}

/// A pod that has devices on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodOnGpu {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its gang, in the same namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gang: Option<String>,
    /// How many devices of the GPU.
    pub devices: u32,
    /// How it has them.
    pub hold: Hold,
}

/// How a pod has a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Hold {
    /// Granted; kubelet has not allocated it yet.
    Granted,
    /// Allocated to its containers.
    Held,
    /// The pod is deleted; its processes may still run.
    Leaving,
}

/// What a map shows of a GPU. Of several states the first in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum GpuState {
    /// It, or a device on it, has a fault.
    Unhealthy,
    /// The operator cordoned it, or it is free on a cordoned node: new pods do not get it.
    Cordoned,
    /// A deleted pod may still run on it.
    Leaving,
    /// Pods have all devices on it.
    Held,
    /// Pods have some of the devices on it.
    PartlyHeld,
    /// It is reserved for a member of a gang.
    Reserved,
    /// None of these.
    #[default]
    Free,
}

impl GpuState {
    /// Every state, in the order of a legend.
    pub const ALL: [Self; 7] = [
        Self::Free,
        Self::Held,
        Self::PartlyHeld,
        Self::Reserved,
        Self::Leaving,
        Self::Cordoned,
        Self::Unhealthy,
    ];

    /// The state in words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Held => "held",
            Self::PartlyHeld => "partly held",
            Self::Reserved => "reserved",
            Self::Leaving => "leaving",
            Self::Cordoned => "cordoned",
            Self::Unhealthy => "unhealthy",
        }
    }
}

impl ClusterMap {
    /// Combines the objects. `domain` is the part of the fabric of a node.
    pub fn of(gpu_nodes: &[GpuNode], gangs: &[Gang], domain: impl Fn(&str) -> String) -> Self {
        let members = Members::of(gangs);
        let mut nodes: Vec<NodeMap> =
            gpu_nodes.iter().map(|node| NodeMap::of(node, domain(&node.name_any()), &members)).collect();
        nodes.sort_by(|a, b| (&a.domain, &a.name).cmp(&(&b.domain, &b.name)));
        Self { nodes }
    }

    /// A node by name.
    pub fn node(&self, name: &str) -> Option<&NodeMap> {
        self.nodes.iter().find(|node| node.name == name)
    }
}

/// The pods of gangs, and the reservations of those that are not bound.
#[derive(Default)]
struct Members<'g> {
    /// By namespace and name of the pod.
    gangs: HashMap<(String, &'g str), String>,
    /// By node: gang and devices.
    reserved: HashMap<&'g str, Vec<(String, &'g [DeviceId])>>,
}

impl<'g> Members<'g> {
    fn of(gangs: &'g [Gang]) -> Self {
        let mut members = Self::default();
        for gang in gangs {
            let namespace = gang.namespace().unwrap_or_default();
            let Some(status) = &gang.status else {
                continue;
            };
            for place in status.decision.iter().flat_map(|decision| &decision.reservations) {
                if !place.pod_name.is_empty() {
                    members.gangs.insert((namespace.clone(), &place.pod_name), status.name.clone());
                }
                let on_node = members.reserved.entry(place.node.as_str()).or_default();
                for devices in &place.devices {
                    on_node.push((format!("{namespace}/{}", status.name), &devices.ids));
                }
            }
        }
        members
    }
}

impl NodeMap {
    /// A node of which nothing is known but its hardware. To be completed by [`NodeMap::cordon`],
    /// [`NodeMap::add_device`], [`NodeMap::add_pod`], [`NodeMap::reserve`], and at last [`NodeMap::settle`].
    pub fn new(name: String, machine: Arc<Machine>) -> Self {
        Self {
            name,
            domain: String::new(),
            model: String::new(),
            links: machine.best_link(),
            not_ready: None,
            cordoned: false,
            free_gpus: 0,
            gpus: vec![GpuMap::default(); machine.gpus().len()],
            machine,
        }
    }

    fn of(node: &GpuNode, domain: String, members: &Members<'_>) -> Self {
        let status = node.status.clone().unwrap_or_default();
        let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready");
        let not_ready = ready.filter(|ready| ready.status == "False").map(|ready| ready.reason.clone());
        let mut map = Self {
            domain,
            model: status.summary.model.clone(),
            links: status.summary.links.clone(),
            not_ready,
            ..Self::new(node.name_any(), Arc::new(node.spec.machine.clone()))
        };
        let cordons = Cordons::of(node.metadata.annotations.as_ref());
        for (index, gpu) in Arc::clone(&map.machine).gpus().iter().enumerate() {
            if let Some(cordon) = gpu.uuid.as_ref().and_then(|uuid| cordons.get(uuid)) {
                map.cordon(index, &cordon.to_string());
            }
        }
        let mut places = map.whole_gpus();
        for device in &status.devices {
            places.insert(device.id.clone(), usize::from(device.gpu));
            let fault =
                (!device.health.healthy).then(|| device.health.reason.as_deref().unwrap_or("unhealthy"));
            map.add_device(usize::from(device.gpu), fault);
        }
        for holder in &status.holders {
            let hold = match (holder.state, holder.provenance) {
                (HolderState::Quarantined, _) => Hold::Leaving,
                (HolderState::Live, Provenance::Granted) => Hold::Granted,
                (HolderState::Live, _) => Hold::Held,
            };
            let gang = members.gangs.get(&(holder.namespace.clone(), &*holder.pod)).cloned();
            for device in &holder.devices {
                let pod = PodOnGpu {
                    namespace: holder.namespace.clone(),
                    name: holder.pod.clone(),
                    gang: gang.clone(),
                    devices: 1,
                    hold,
                };
                if let Some(gpu) = places.get(device) {
                    map.add_pod(*gpu, pod);
                }
            }
        }
        for (gang, devices) in members.reserved.get(&*map.name).into_iter().flatten() {
            for place in devices.iter().filter_map(|device| places.get(device)) {
                map.reserve(*place, gang);
            }
        }
        map.settle();
        map
    }

    /// The operator cordoned a GPU; why.
    pub fn cordon(&mut self, gpu: usize, reason: &str) {
        if let Some(gpu) = self.gpus.get_mut(gpu) {
            gpu.cordoned = Some(reason.to_owned());
        }
    }

    /// One more device of a GPU, with its fault if it has one. The plugin publishes devices of a cordoned GPU as
    /// unhealthy with that reason, which is no fault.
    pub fn add_device(&mut self, gpu: usize, fault: Option<&str>) {
        if let Some(gpu) = self.gpus.get_mut(gpu) {
            gpu.devices += 1;
            if let Some(fault) = fault.filter(|fault| gpu.cordoned.as_deref() != Some(*fault)) {
                gpu.unhealthy.get_or_insert_with(|| fault.to_owned());
            }
        }
    }

    /// A deleted pod whose name is not known may still run on a GPU.
    pub fn set_leaving(&mut self, gpu: usize) {
        if let Some(gpu) = self.gpus.get_mut(gpu) {
            gpu.leaving = true;
        }
    }

    /// A GPU, or a part of it, is reserved for a gang. Has no effect where pods have all of it.
    pub fn reserve(&mut self, gpu: usize, gang: &str) {
        if let Some(gpu) = self.gpus.get_mut(gpu)
            && gpu.held() < gpu.devices.max(1)
        {
            gpu.reserved_for.get_or_insert_with(|| gang.to_owned());
        }
    }

    /// Adds the devices of a grant that the GpuNode does not show yet.
    pub fn add_grant(&mut self, namespace: &str, pod: &str, grant: &Grant, resource: &str) {
        if self.gpus.iter().any(|gpu| gpu.is_held_by(pod)) {
            return;
        }
        let places = self.whole_gpus();
        for device in grant.held(resource) {
            let (namespace, name) = (namespace.to_owned(), pod.to_owned());
            let pod = PodOnGpu { namespace, name, gang: None, devices: 1, hold: Hold::Granted };
            if let Some(gpu) = places.get(&device) {
                self.add_pod(*gpu, pod);
            }
        }
        self.settle();
    }

    /// A pod has devices of a GPU.
    pub fn add_pod(&mut self, gpu: usize, pod: PodOnGpu) {
        let Some(gpu) = self.gpus.get_mut(gpu) else {
            return;
        };
        let same = |known: &&mut PodOnGpu| {
            known.hold == pod.hold && (&known.namespace, &known.name) == (&pod.namespace, &pod.name)
        };
        match gpu.pods.iter_mut().find(same) {
            Some(known) => known.devices += pod.devices,
            None => gpu.pods.push(pod),
        }
    }

    /// The GPUs by UUID: kubelet's ID of a whole GPU.
    fn whole_gpus(&self) -> HashMap<DeviceId, usize> {
        let uuids = self.machine.gpus().iter().enumerate();
        uuids.filter_map(|(index, gpu)| Some((gpu.uuid.as_ref()?.as_str().into(), index))).collect()
    }

    /// Computes the states from everything that was added.
    pub fn settle(&mut self) {
        for gpu in &mut self.gpus {
            gpu.pods.sort_unstable();
            gpu.state = match gpu.state() {
                GpuState::Free if self.cordoned => GpuState::Cordoned,
                state => state,
            };
        }
        self.free_gpus = self.free().len();
    }

    /// The GPUs without holder, reservation, cordon or fault.
    pub fn free(&self) -> GpuSet {
        self.set(|gpu| gpu.state == GpuState::Free)
    }

    /// The GPUs that match.
    pub fn set(&self, wanted: impl Fn(&GpuMap) -> bool) -> GpuSet {
        let gpus = self.gpus.iter().enumerate();
        gpus.filter(|(_, gpu)| wanted(gpu)).fold(GpuSet::EMPTY, |set, (index, _)| set.with(index))
    }

    /// The GPUs with these UUIDs.
    pub fn of_ids<'a>(&self, ids: impl IntoIterator<Item = &'a str>) -> GpuSet {
        let places = self.whole_gpus();
        let found = ids.into_iter().filter_map(|id| places.get(&DeviceId::from(id)).copied());
        found.fold(GpuSet::EMPTY, GpuSet::with)
    }
}

impl GpuMap {
    /// Devices that pods have.
    pub fn held(&self) -> u32 {
        self.pods.iter().map(|pod| pod.devices).sum()
    }

    /// Whether a pod of this name has devices on it.
    pub fn is_held_by(&self, pod: &str) -> bool {
        self.pods.iter().any(|known| known.name == pod)
    }

    /// Whether a pod of this name has devices on it in this way.
    pub fn has(&self, pod: &str, hold: Hold) -> bool {
        self.pods.iter().any(|known| known.name == pod && known.hold == hold)
    }

    /// Whether a deleted pod may still run on it.
    pub fn is_leaving(&self) -> bool {
        self.leaving || self.pods.iter().any(|pod| pod.hold == Hold::Leaving)
    }

    fn state(&self) -> GpuState {
        if self.unhealthy.is_some() {
            GpuState::Unhealthy
        } else if self.cordoned.is_some() {
            GpuState::Cordoned
        } else if self.is_leaving() {
            GpuState::Leaving
        } else if self.held() > 0 && self.held() >= self.devices {
            GpuState::Held
        } else if self.held() > 0 {
            GpuState::PartlyHeld
        } else if self.reserved_for.is_some() {
            GpuState::Reserved
        } else {
            GpuState::Free
        }
    }
}

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests;
