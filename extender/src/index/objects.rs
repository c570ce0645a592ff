//! Parses Nodes and GpuNodes from the API server for the index. A device with contradicting facts counts as absent,
//! never as free.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::{
    Cordons, DeviceStatus, GpuFault, GpuNode, GpuNodeSpec, GpuNodeStatus, Holder, HolderState, NumaNodeCpus,
    NumaNodeMemory, Provenance, ResourceName, SharingPolicy, quantity,
};
use gantry_gang::{NodeFacts, Resources, Taint};
use gantry_topology::{Gpu, Machine, MachineParts};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::bounded::{self, Identity, ReadError};
use crate::metadata;
use crate::object_memory;
use crate::partial_object::PartialObject;
use crate::pod::{self, TextInterner};
use crate::watch::stream::StreamedObject;
use crate::watched::WatchedResources;
use gantry_planner::inventory::{CordonedGpu, Device, GpuXid, Inventory, Pool, ReportedHolder};
use gantry_planner::kind::{Kind, Kinds, Sharing, Spot, Units};
use gantry_planner::numa::{NumaCpus, NumaMemory, NumaNode};

/// Longest reason that is kept of an unhealthy device or a plugin that is not ready, in bytes.
const MAX_REASON: usize = 200;

/// Parses a GpuNode. A malformed one is a node with an inventory that serves nothing: it must not block the others, nor
/// must its GPUs be handed out without a ledger.
pub fn inventory(watched: &WatchedResources, node: PartialGpuNode, kinds: &mut Kinds) -> Option<Inventory> {
    let cordons = Cordons::of(node.metadata.annotations.as_ref());
    let name = node.metadata.name.unwrap_or_default();
    let spec: Result<GpuNodeSpec, _> = read_part(&node.spec);
    let status = node.status.map(|status| read_part::<GpuNodeStatus>(&status)).transpose();
    match (spec, status) {
        (Ok(spec), Ok(status)) => {
            let kind = kinds.of(&spec.machine);
            let mut inventory = account_for(watched, (spec.machine.gpus(), &cordons), status.as_ref(), kind);
            let numa: Vec<Option<u32>> = spec.machine.gpus().iter().map(numa_node).collect();
            let Inventory { pools, numa: nodes, unaligned, .. } = &mut inventory;
            match &spec.kubelet {
                Some(kubelet) => pools.iter_mut().for_each(|pool| pool.align(kubelet, &numa, nodes)),
                None => *unaligned = Some(numa),
            }
            Some(inventory)
        }
        (Err(error), _) | (_, Err(error)) => {
            tracing::warn!(node = %name, %error, "GpuNode cannot be read; its GPUs are not given out");
            let none = Machine::new(MachineParts::default()).ok()?;
            Some(account_for(watched, (none.gpus(), &cordons), None, kinds.of(&none)))
        }
    }
}

fn account_for(
    watched: &WatchedResources,
    (machine, cordons): (&[Gpu], &Cordons),
    status: Option<&GpuNodeStatus>,
    kind: Arc<Kind>,
) -> Inventory {
    let published = status.map_or(&[][..], |status| status.devices.as_slice());
    let mut by_resource: BTreeMap<&ResourceName, Vec<&DeviceStatus>> = BTreeMap::new();
    for device in published {
        if watched.covers(device.resource.as_str()) {
            by_resource.entry(&device.resource).or_default().push(device);
        }
    }
    let terms = status.map_or(&[][..], |status| status.resources.as_slice());
    let pools: Vec<Pool> = by_resource
        .into_iter()
        .map(|(resource, devices)| {
            let terms = terms.iter().find(|terms| terms.name == *resource);
            let unshared_slice = |device: &&DeviceStatus| device.slice.is_some() && device.replica.is_none();
            let sharing = match terms.map(|terms| terms.sharing) {
                Some(SharingPolicy::Packed) => Sharing::Packed,
                // The default of the plugin.
                None if devices.iter().any(unshared_slice) => Sharing::Packed,
                Some(SharingPolicy::Distributed) | None => Sharing::Distributed,
            };
            let max_request = terms.and_then(|terms| terms.max_request);
            let misplaced = devices.iter().any(|device| on_other_gpu(machine, device));
            let devices = devices.into_iter().map(|device| read_device(device, machine, cordons)).collect();
            let mut pool = Pool::new(resource.clone(), kind.gpus(), sharing, max_request, devices);
            if misplaced {
                pool.withhold();
            }
            pool
        })
        .filter(|pool| !pool.all.is_empty())
        .collect();
    let holders = status.map_or(&[][..], |status| status.holders.as_slice());
    let holders = holders
        .iter()
        // A device that is only granted is known better from the annotation of the pod.
        .filter(|holder| holder.provenance != Provenance::Granted || holder.state == HolderState::Quarantined)
        .flat_map(|holder| held(&pools, holder))
        .collect();
    let not_ready = status
        .and_then(|status| status.conditions.iter().find(|condition| condition.type_ == "Ready"))
        .filter(|condition| condition.status == "False")
        .map(|condition| shortened(&condition.reason));
    let models = machine.iter().map(|gpu| gpu.model.as_deref().unwrap_or_default().into()).collect();
    let cost = watched.cost(machine.iter().map(|gpu| gpu.model.as_deref().unwrap_or_default()), &kind);
    let cordons = cordoned_gpus(machine, cordons, published);
    let numa = status.map_or_else(Vec::new, numa_nodes);
    let xids = xids(machine, status.map_or(&[][..], |status| status.faults.as_slice()));
    Inventory { kind, pools, holders, numa, unaligned: None, not_ready, cordons, xids, models, cost }
}

/// The Xids of faults, sorted by GPU and number.
fn xids(machine: &[Gpu], faults: &[GpuFault]) -> Vec<GpuXid> {
    let known = faults.iter().filter_map(|fault| {
        let is = |gpu: &Gpu| gpu.uuid.as_ref().is_some_and(|uuid| uuid.as_str() == fault.gpu);
        Some(GpuXid { gpu: u8::try_from(machine.iter().position(is)?).ok()?, xid: fault.xid })
    });
    let mut xids: Vec<GpuXid> = known.collect();
    // Instances of one GPU may have the same.
    xids.sort_by_key(|known| (known.gpu, known.xid));
    xids.dedup();
    xids
}

fn cordoned_gpus(machine: &[Gpu], cordons: &Cordons, published: &[DeviceStatus]) -> Vec<CordonedGpu> {
    let cordoned = machine.iter().enumerate().filter_map(|(gpu, known)| {
        let reason = cordons.get(known.uuid.as_ref()?)?.to_string();
        let faults =
            published.iter().filter(|device| usize::from(device.gpu) == gpu && !device.health.healthy);
        let mut faults = faults.map(|device| device.health.reason.as_deref().unwrap_or_default());
        // The plugin publishes devices of a cordoned GPU as unhealthy.
        let fault = faults.find(|fault| *fault != reason).map(shortened);
        Some(CordonedGpu { gpu, reason: shortened(&reason), fault })
    });
    cordoned.collect()
}

/// The CPUs and the memory of each NUMA node, sorted by its number.
fn numa_nodes(status: &GpuNodeStatus) -> Vec<NumaNode> {
    let mut nodes: BTreeMap<u32, NumaNode> = BTreeMap::new();
    let empty = |node| NumaNode { node, ..NumaNode::default() };
    for NumaNodeCpus { node, total, allocatable, held, core } in status.cpus.iter().copied() {
        let free = allocatable.saturating_sub(held);
        nodes.entry(node).or_insert_with(|| empty(node)).cpus =
            NumaCpus { total, allocatable, free, core: core.unwrap_or(0) };
    }
    for NumaNodeMemory { node, allocatable_bytes, held_bytes, group } in &status.memory {
        nodes.entry(*node).or_insert_with(|| empty(*node)).memory = NumaMemory {
            allocatable: *allocatable_bytes,
            free: allocatable_bytes.saturating_sub(*held_bytes),
            group: group.iter().copied().collect(),
        };
    }
    nodes.into_values().collect()
}

/// The NUMA node of a GPU that the plugin registers with kubelet.
fn numa_node(gpu: &Gpu) -> Option<u32> {
    gpu.numa.as_ref().and_then(|nodes| nodes.iter().next())
}

/// The devices of a holder, by pool.
fn held(pools: &[Pool], holder: &Holder) -> Vec<ReportedHolder> {
    let of_pool = |(index, pool): (usize, &Pool)| {
        let devices = pool.taken(&holder.resource, &holder.devices);
        (!devices.is_empty()).then(|| ReportedHolder {
            namespace: holder.namespace.clone(),
            pod: holder.pod.clone(),
            uid: holder.uid.clone(),
            pool: index,
            devices,
            quarantined: holder.state == HolderState::Quarantined,
            provenance: holder.provenance,
        })
    };
    pools.iter().enumerate().filter_map(of_pool).collect()
}

/// A device. One of a cordoned GPU is unhealthy, also before its plugin has read the cordon.
fn read_device(device: &DeviceStatus, machine: &[Gpu], cordons: &Cordons) -> Device {
    let reason = || shortened(device.health.reason.as_deref().unwrap_or_default());
    let uuid = machine.get(usize::from(device.gpu)).and_then(|gpu| gpu.uuid.as_ref());
    let cordon = uuid.and_then(|uuid| cordons.get(uuid));
    Device {
        id: device.id.clone(),
        spot: Spot {
            gpu: device.gpu,
            slice: device.slice.as_ref().map(|slice| Units { start: slice.start, size: slice.size }),
        },
        replica: device.replica,
        fault: match cordon {
            Some(cordon) if device.health.healthy => Some(shortened(&cordon.to_string())),
            _ => (!device.health.healthy).then(reason),
        },
    }
}

/// Spec and status are two writes. Between them a device may refer to a GPU whose number changed.
fn on_other_gpu(machine: &[Gpu], device: &DeviceStatus) -> bool {
    let id = device.id.unit();
    let is = |gpu: &Gpu| {
        let slices = gpu.mig.iter().flat_map(|mig| &mig.instances);
        gpu.uuid.as_ref().is_some_and(|uuid| uuid.as_str() == id)
            || slices.flat_map(|instance| &instance.compute).any(|slice| slice.uuid.as_str() == id)
    };
    let found = machine.iter().position(is);
    found.is_some_and(|gpu| gpu != usize::from(device.gpu))
}

fn shortened(reason: &str) -> Arc<str> {
    if reason.is_empty() {
        return "no reason given".into();
    }
    let mut end = MAX_REASON.min(reason.len());
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason[..end].into()
}

/// A GpuNode of which only the metadata is parsed.
pub type PartialGpuNode = PartialObject<GpuNode, Box<RawValue>>;

/// Reads the spec or the status of a GpuNode.
///
/// # Errors
/// It is malformed, or would take too much memory.
pub(crate) fn read_part<T: DeserializeOwned>(part: &RawValue) -> Result<T, ReadError> {
    let (value, _) = bounded::read(part.get().as_bytes(), object_memory::Kind::GpuNode.read_limit())?;
    Ok(value)
}

/// The parts of a Node that are used.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct SlimNode {
    /// Its metadata.
    #[serde(default, deserialize_with = "metadata::read")]
    pub metadata: ObjectMeta,
    /// Its spec.
    #[serde(default)]
    pub spec: SlimNodeSpec,
    /// Its status.
    #[serde(default)]
    pub status: SlimNodeStatus,
}

/// The parts of a Node's spec that are used.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct SlimNodeSpec {
    unschedulable: bool,
    taints: Vec<SlimTaint>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct SlimTaint {
    key: String,
    value: String,
    effect: String,
}

/// The parts of a Node's status that are used.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct SlimNodeStatus {
    allocatable: BTreeMap<String, String>,
    conditions: Vec<SlimCondition>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct SlimCondition {
    r#type: String,
    status: String,
}

impl SlimNode {
    /// Whether a condition of its status is `True`.
    pub(super) fn has_condition(&self, name: &str) -> bool {
        self.status.conditions.iter().any(|known| known.r#type == name && known.status == "True")
    }
}

impl kube::Resource for SlimNode {
    type DynamicType = ();
    type Scope = kube::core::ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Node".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "nodes".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl StreamedObject for SlimNode {
    fn least(identity: Identity, _: &[u8]) -> Self {
        Self { metadata: identity.into(), ..Self::default() }
    }
}

/// What kubelet advertises of the watched resources, by name.
pub fn advertised(watched: &WatchedResources, node: &SlimNode) -> Vec<(ResourceName, u32)> {
    let allocatable = node.status.allocatable.iter();
    allocatable
        .filter(|(resource, _)| watched.covers(resource))
        .filter_map(|(resource, written)| Some((resource.as_str().into(), quantity::count(written).ok()?)))
        .collect()
}

/// The labels, taints and resources of a node without devices.
pub fn described(watched: &WatchedResources, node: &SlimNode, words: &mut TextInterner) -> NodeFacts {
    let mut allocatable = Resources::default();
    for (resource, written) in &node.status.allocatable {
        if !watched.covers(resource) {
            allocatable.add_written(resource, written);
        }
    }
    let labels = node.metadata.labels.iter().flatten();
    let labels = labels.map(|(key, value)| (words.of(key), words.of(value))).collect();
    let taints = node.spec.taints.iter().filter_map(|taint| {
        Some(Taint {
            key: words.of(&taint.key),
            value: words.of(&taint.value),
            effect: pod::effect(&taint.effect)?,
        })
    });
    NodeFacts {
        name: node.metadata.name.as_deref().unwrap_or_default().into(),
        labels,
        taints: taints.collect(),
        unschedulable: node.spec.unschedulable,
        allocatable: allocatable.capped(),
    }
}
