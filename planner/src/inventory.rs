//! What a node has, as its plugin published it: pools of devices, their terms and holders. Values only: the extender
//! reads them from the API and accounts them in its ledger.

use std::collections::HashSet;
use std::sync::Arc;

use gantry_api::{DeviceId, KubeletTopology, PodUid, Provenance, ResourceName};
use gantry_topology::Purpose;

use crate::devices::DeviceSet;
use crate::kind::{Kind, Sharing, Spot};
use crate::numa::{Alignment, NumaNode};
use crate::shape::{self, Parts, Shape};
use crate::site::Site;

/// What a node has, as its plugin published it.
#[derive(Debug, Clone, PartialEq)]
pub struct Inventory {
    /// The kind of its machine.
    pub kind: Arc<Kind>,
    /// One per managed resource that it serves.
    pub pools: Vec<Pool>,
    /// The devices that pods hold, as the plugin reports it.
    pub holders: Vec<ReportedHolder>,
    /// The CPUs and the memory of each NUMA node, if kubelet refuses pods by them.
    pub numa: Vec<NumaNode>,
    /// The NUMA node of each GPU that kubelet knows, where the configuration of its Topology Manager is not known.
    pub unaligned: Option<Vec<Option<u32>>>,
    /// The reason of the condition by which the plugin does not serve, or cannot read the truth. Kubelet would refuse a
    /// pod bound there now for good.
    pub not_ready: Option<Arc<str>>,
    /// The GPUs that the operator cordoned. Their devices are unhealthy in the pools.
    pub cordons: Vec<CordonedGpu>,
    /// The Xids by which GPUs, or parts of them, are unhealthy.
    pub xids: Vec<GpuXid>,
    /// The models of its GPUs, by index.
    pub models: Arc<[Arc<str>]>,
    /// What such a node costs, for pods that ask for economy; less is cheaper.
    pub cost: u64,
}

/// The devices of one resource. No device is in two pools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    pub resource: ResourceName,
    /// Where its devices lie.
    pub shape: Shape,
    /// The most that one container may ask for. Kubelet would fail a pod that asks for more.
    pub max_request: Option<u32>,
    /// IDs by device.
    devices: Vec<Option<DeviceId>>,
    /// The devices in the order of their IDs, for binary search.
    by_id: Vec<u16>,
    /// Devices that exist.
    pub all: DeviceSet,
    /// Devices that exist and are healthy.
    pub healthy: DeviceSet,
    /// The faults of the others, by GPU.
    pub faults: Vec<GpuFault>,
    /// How kubelet aligns the devices, if it does.
    pub alignment: Option<Arc<Alignment>>,
}

/// A device as it was published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Kubelet's ID.
    pub id: DeviceId,
    /// Where it lies.
    pub spot: Spot,
    /// Whether it is a replica, and which.
    pub replica: Option<u16>,
    pub fault: Option<Arc<str>>,
}

/// A holder, as the plugin reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedHolder {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Its UID, if the plugin knows it.
    pub uid: Option<PodUid>,
    /// Index into [`Inventory::pools`].
    pub pool: usize,
    pub devices: DeviceSet,
    /// The pod is gone; its processes may still run.
    pub quarantined: bool,
    /// Where the plugin knows it from.
    pub provenance: Provenance,
}

impl ReportedHolder {
    /// Whether a pod holds them: by its UID if the plugin knows one, else by its name.
    pub fn is_of(&self, uid: &PodUid, namespace: &str, name: &str) -> bool {
        match &self.uid {
            Some(known) => known == uid,
            None => self.namespace == namespace && self.pod == name,
        }
    }
}

/// A GPU that the operator cordoned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CordonedGpu {
    /// Its index.
    pub gpu: usize,
    /// By which operator, and why.
    pub reason: Arc<str>,
    /// A fault that it has in addition.
    pub fault: Option<Arc<str>>,
}

/// An Xid by which a GPU, or a part of it, is unhealthy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuXid {
    /// The GPU's index.
    pub gpu: u8,
    pub xid: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GpuFault {
    /// Its index.
    pub gpu: u8,
    /// The fault.
    pub reason: Arc<str>,
}

/// Most devices of one pool.
pub const MAX_DEVICES: usize = u16::MAX as usize;

impl Pool {
    /// A pool of devices on a machine of `gpus` GPUs. If some devices cannot exist (beyond the machine, a repeated ID),
    /// the pool cannot be accounted and none of it is healthy.
    pub fn new(
        resource: ResourceName,
        gpus: usize,
        sharing: Sharing,
        max_request: Option<u32>,
        devices: Vec<Device>,
    ) -> Self {
        let published = devices.len();
        let mut ids = HashSet::new();
        let mut known: Vec<Device> = devices
            .into_iter()
            .filter(|device| usize::from(device.spot.gpu) < gpus && ids.insert(device.id.clone()))
            .collect();
        known.sort_by(|a, b| {
            let key = |device: &Device| (shape::order(&device.spot), device.replica);
            key(a).cmp(&key(b)).then_with(|| a.id.cmp(&b.id))
        });
        known.truncate(MAX_DEVICES);
        let accounted = known.len() == published;
        let whole = known.iter().all(|device| device.spot.slice.is_none() && device.replica.is_none())
            && known.windows(2).all(|pair| pair[0].spot.gpu != pair[1].spot.gpu);
        let places: Vec<usize> = if whole {
            known.iter().map(|device| usize::from(device.spot.gpu)).collect()
        } else {
            (0..known.len()).collect()
        };
        let shape = if whole {
            Shape::Whole
        } else {
            let spots = known.iter().map(|device| device.spot).collect();
            Shape::Parts(Arc::new(Parts::new(spots, sharing)))
        };
        let mut pool = Self {
            resource,
            shape,
            max_request,
            devices: vec![None; if whole { gpus } else { known.len() }],
            by_id: Vec::new(),
            all: DeviceSet::EMPTY,
            healthy: DeviceSet::EMPTY,
            faults: Vec::new(),
            alignment: None,
        };
        for (device, place) in known.into_iter().zip(places) {
            pool.all.insert(place);
            match device.fault {
                None => pool.healthy.insert(place),
                Some(reason) => pool.complain(device.spot.gpu, reason),
            }
            pool.by_id.extend(u16::try_from(place));
            if let Some(slot) = pool.devices.get_mut(place) {
                *slot = Some(device.id);
            }
        }
        let devices = &pool.devices;
        pool.by_id.sort_by_key(|&place| devices.get(usize::from(place)));
        if !accounted {
            pool.withhold();
        }
        pool
    }

    /// Applies the Topology Manager of the node's kubelet. `numa`: the NUMA node of each GPU that kubelet knows. All
    /// allocatable CPUs and memory count as free.
    pub fn align(&mut self, kubelet: &KubeletTopology, numa: &[Option<u32>], nodes: &[NumaNode]) {
        let alignment = Alignment::new(kubelet, &self.numa_of_devices(numa))
            .map(|alignment| alignment.counting(nodes).with_free(NumaNode::unoccupied));
        self.alignment = alignment.map(Arc::new);
    }

    fn numa_of_devices(&self, numa: &[Option<u32>]) -> Vec<Option<u32>> {
        let node = |device: usize| {
            self.id(device)?;
            numa.get(self.gpu_of(device)?).copied().flatten()
        };
        (0..self.devices.len()).map(node).collect()
    }

    /// Marks every device unhealthy.
    pub fn withhold(&mut self) {
        self.healthy = DeviceSet::EMPTY;
    }

    fn complain(&mut self, gpu: u8, reason: Arc<str>) {
        if self.faults.iter().all(|known| known.gpu != gpu) {
            self.faults.push(GpuFault { gpu, reason });
        }
    }

    /// The GPU of a device, by index.
    pub fn gpu_of(&self, device: usize) -> Option<usize> {
        match &self.shape {
            Shape::Whole => Some(device),
            Shape::Parts(parts) => parts.spots().get(device).map(|spot| usize::from(spot.gpu)),
        }
    }

    pub fn id(&self, device: usize) -> Option<&DeviceId> {
        self.devices.get(device)?.as_ref()
    }

    pub fn ids(&self) -> &[Option<DeviceId>] {
        &self.devices
    }

    pub fn ids_of(&self, devices: &DeviceSet) -> Vec<DeviceId> {
        devices.iter().filter_map(|device| self.id(device).cloned()).collect()
    }

    /// The devices of some IDs, and how many of those the pool does not know.
    pub fn find<'a>(&self, ids: impl IntoIterator<Item = &'a DeviceId>) -> (DeviceSet, usize) {
        let mut devices = DeviceSet::EMPTY;
        let mut unknown = 0;
        for id in ids {
            let known = self.by_id.binary_search_by(|&place| self.id(usize::from(place)).cmp(&Some(id)));
            match known.ok().and_then(|at| self.by_id.get(at)) {
                Some(&place) => devices.insert(usize::from(place)),
                None => unknown += 1,
            }
        }
        (devices, unknown)
    }

    /// The GPU or MIG device of an ID, or its replicas: the devices that a holder of that ID takes, whatever resource
    /// it is advertised as now.
    fn overlapping(&self, id: &DeviceId) -> DeviceSet {
        let of = id.unit();
        let id_at = |place: u16| self.id(usize::from(place)).map_or("", DeviceId::as_str);
        let from = self.by_id.partition_point(|&place| id_at(place) < of);
        let near = self.by_id.iter().skip(from);
        near.take_while(|place| id_at(**place).starts_with(of))
            .filter(|place| self.id(usize::from(**place)).is_some_and(|id| id.unit() == of))
            .map(|place| usize::from(*place))
            .collect()
    }

    /// The devices that a holder of some IDs of a resource takes. A GPU given out before it was shared, or under
    /// another name, is still in use with all that is made of it now.
    pub fn taken<'a>(
        &self,
        resource: &ResourceName,
        ids: impl IntoIterator<Item = &'a DeviceId>,
    ) -> DeviceSet {
        let mut devices = DeviceSet::EMPTY;
        for id in ids {
            match self.find([id]) {
                (known, 0) if self.resource == *resource => devices.add(&known),
                _ => devices.add(&self.overlapping(id)),
            }
        }
        devices
    }

    /// A set as text: `GPU 0,3`, or the IDs where a GPU has several devices.
    pub fn describe(&self, devices: &DeviceSet) -> String {
        match &self.shape {
            Shape::Whole => format!("GPU {devices}"),
            Shape::Parts(_) => {
                let ids: Vec<String> = self.ids_of(devices).iter().map(ToString::to_string).collect();
                ids.join(", ")
            }
        }
    }

    /// The pool on its machine.
    pub fn site<'a>(&'a self, kind: &'a Kind) -> Site<'a> {
        Site {
            kind,
            shape: &self.shape,
            cut: &[],
            purpose: Purpose::Local,
            models: &[],
            alignment: self.alignment.as_deref(),
        }
    }
}

impl Inventory {
    /// Aligns its devices as strictly as a kubelet may, if the configuration of its Topology Manager is not known.
    pub fn assume_alignment(&mut self) {
        let Some(numa) = self.unaligned.take() else {
            return;
        };
        for pool in &mut self.pools {
            pool.alignment = Alignment::assumed(&pool.numa_of_devices(&numa)).map(Arc::new);
        }
    }

    /// Whether it serves other devices than another inventory, or on other terms; health and holders do not count.
    pub fn serves_otherwise(&self, other: &Self) -> bool {
        let terms = |pool: &Pool| (pool.resource.clone(), pool.max_request, pool.alignment.clone());
        self.pools.len() != other.pools.len()
            || self.models != other.models
            || self
                .pools
                .iter()
                .zip(&other.pools)
                .any(|(a, b)| terms(a) != terms(b) || a.devices != b.devices)
    }

    /// Whether it has other totals than another: other terms, or another number of healthy devices.
    pub fn counts_otherwise(&self, other: &Self) -> bool {
        let mut pools = self.pools.iter().zip(&other.pools);
        self.serves_otherwise(other) || pools.any(|(a, b)| a.healthy.len() != b.healthy.len())
    }

    pub fn pool(&self, resource: &str) -> Option<(usize, &Pool)> {
        self.pools.iter().enumerate().find(|(_, pool)| pool.resource.as_str() == resource)
    }
}
