//! Reads Nodes and GpuNodes as the API server sends them into what the index keeps. What contradicts itself is read as "no such
//! device", never as a free one.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::{DeviceStatus, GpuNode, GpuNodeSpec, GpuNodeStatus, HolderState, Provenance, ResourceName};
use gantry_topology::{Gpu, GpuSet, Machine, MachineParts};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use crate::kind::{Kind, Kinds};
use crate::ledger::{Held, Inventory, Pool, Sick};
use crate::{metadata, quantity};

/// Longest reason kept of a sick GPU or a plugin that is not ready, in bytes.
const MAX_REASON: usize = 200;

/// Reads a GpuNode for `resources`. One that cannot be read is a node of ours that serves nothing: the fault of one must not
/// stop the others, nor must its GPUs be given out unaccounted.
pub fn inventory(resources: &[ResourceName], node: LooseGpuNode, kinds: &mut Kinds) -> Option<Inventory> {
    let name = node.metadata.name.unwrap_or_default();
    let spec: Result<GpuNodeSpec, _> = serde_json::from_value(node.spec);
    let status = node
        .status
        .map(serde_json::from_value::<GpuNodeStatus>)
        .transpose();
    match (spec, status) {
        (Ok(spec), Ok(status)) => {
            let kind = kinds.of(&spec.machine);
            Some(account_for(resources, spec.machine.gpus(), status.as_ref(), kind))
        }
        (Err(error), _) | (_, Err(error)) => {
            tracing::warn!(node = %name, %error, "GpuNode cannot be read; its GPUs are not given out");
            let none = Machine::new(MachineParts::default()).ok()?;
            Some(account_for(resources, none.gpus(), None, kinds.of(&none)))
        }
    }
}

fn account_for(
    resources: &[ResourceName],
    machine: &[Gpu],
    status: Option<&GpuNodeStatus>,
    kind: Arc<Kind>,
) -> Inventory {
    let devices = status.map_or(&[][..], |status| status.devices.as_slice());
    let mut sick: Vec<Sick> = Vec::new();
    let mut pools: Vec<Pool> = Vec::new();
    for resource in resources {
        let mut pool = Pool {
            resource: resource.clone(),
            devices: vec![None; kind.gpus()],
            gpus: GpuSet::EMPTY,
            healthy: GpuSet::EMPTY,
        };
        for device in devices.iter().filter(|device| device.resource == *resource) {
            let gpu = usize::from(device.gpu);
            let named = machine.get(gpu).and_then(|gpu| gpu.uuid.as_ref());
            // Spec and status are two writes. Between them a device may be said to be on a GPU that is now another.
            let other_gpu = machine.iter().any(|gpu| {
                gpu.uuid.as_ref().map(|uuid| uuid.as_str()) == Some(device.id.as_str())
                    && named != gpu.uuid.as_ref()
            });
            match pool.devices.get_mut(gpu) {
                Some(slot) if slot.is_none() && !other_gpu => *slot = Some(device.id.clone()),
                // Beyond the machine, on another GPU, or one of several on one GPU: a share, which is not placed by sets of GPUs.
                _ => continue,
            }
            pool.gpus = pool.gpus.with(gpu);
            if device.health.healthy {
                pool.healthy = pool.healthy.with(gpu);
            } else if sick.iter().all(|known| known.gpu != device.gpu) {
                sick.push(Sick {
                    gpu: device.gpu,
                    reason: reason(device),
                });
            }
        }
        let shares = devices
            .iter()
            .filter(|device| device.resource == *resource)
            .count()
            > pool.gpus.len();
        if shares {
            // A pool of which part cannot be accounted is not accounted at all.
            pool.healthy = GpuSet::EMPTY;
        }
        if !pool.gpus.is_empty() {
            pools.push(pool);
        }
    }
    sick.sort_by_key(|sick| sick.gpu);
    let holders = status.map_or(&[][..], |status| status.holders.as_slice());
    let holders = holders
        .iter()
        // What is only granted is our own word; the pod's annotation says it better.
        .filter(|holder| holder.provenance != Provenance::Granted || holder.state == HolderState::Quarantined)
        .filter_map(|holder| {
            let (index, pool) = pools
                .iter()
                .enumerate()
                .find(|(_, pool)| pool.resource == holder.resource)?;
            let (gpus, _) = pool.gpus_of(&holder.devices);
            Some(Held {
                namespace: holder.namespace.clone(),
                pod: holder.pod.clone(),
                uid: holder.uid.clone(),
                pool: index,
                gpus,
                quarantined: holder.state == HolderState::Quarantined,
            })
        })
        .collect();
    let not_ready = status
        .and_then(|status| {
            status
                .conditions
                .iter()
                .find(|condition| condition.type_ == "Ready")
        })
        .filter(|condition| condition.status == "False")
        .map(|condition| bounded(&condition.reason));
    Inventory {
        kind,
        pools,
        holders,
        sick,
        not_ready,
    }
}

fn reason(device: &DeviceStatus) -> Arc<str> {
    bounded(device.health.reason.as_deref().unwrap_or_default())
}

fn bounded(reason: &str) -> Arc<str> {
    if reason.is_empty() {
        return "no reason given".into();
    }
    let mut end = MAX_REASON.min(reason.len());
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason[..end].into()
}

/// A GpuNode whose fields are not read yet: the watch must go on when one is malformed.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct LooseGpuNode {
    /// Its metadata.
    #[serde(default, deserialize_with = "metadata::read")]
    pub metadata: ObjectMeta,
    /// Its spec.
    #[serde(default)]
    pub spec: serde_json::Value,
    /// Its status.
    #[serde(default)]
    pub status: Option<serde_json::Value>,
}

impl kube::Resource for LooseGpuNode {
    type DynamicType = ();
    type Scope = kube::core::ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        <GpuNode as kube::Resource>::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        <GpuNode as kube::Resource>::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        <GpuNode as kube::Resource>::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        <GpuNode as kube::Resource>::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// A node as far as it is read from the API server.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct SlimNode {
    /// Its metadata.
    #[serde(default, deserialize_with = "metadata::read")]
    pub metadata: ObjectMeta,
    /// Its status.
    #[serde(default)]
    pub status: SlimNodeStatus,
}

/// What is read of a node's status.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct SlimNodeStatus {
    allocatable: BTreeMap<String, String>,
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

/// What kubelet advertises of `resources` on a node.
pub fn advertised(resources: &[ResourceName], node: &SlimNode) -> Vec<(ResourceName, u32)> {
    resources
        .iter()
        .filter_map(|resource| {
            let written = node.status.allocatable.get(resource.as_str())?;
            Some((resource.clone(), quantity::count(written).ok()?))
        })
        .collect()
}
