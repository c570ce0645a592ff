//! Builds the status of the `GpuNode` from inventory, hand-over and readiness. Pure.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::Arc;

use gantry_api::{
    ConditionType, DeviceHealth, DeviceId, DeviceStatus, GpuClock, GpuNodeStatus, GpuProblem, Holder,
    HolderState, ObjectMessage, Provenance, Reason, ResourceKind, ResourceStatus, SharingPolicy, Slice,
};
use gantry_topology::Throttle;
use gantry_topology::machine::models;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::handover::SharedHandover;
use crate::health::{Cause, Extent};
use crate::inventory::{Device, Diagnosis, Inventory, State};
use crate::observe::Readiness;
use gantry_config::SharedDevices;

/// The status to publish. `before` is the last one: an unchanged condition keeps its time.
pub(super) fn status(
    (inventory, offered): (&Inventory, &Inventory),
    handover: &SharedHandover,
    diagnosis: &Diagnosis,
    readiness: &Readiness,
    (before, earlier): (Option<&GpuNodeStatus>, &[GpuProblem]),
    now: Timestamp,
) -> GpuNodeStatus {
    let (holders, deviations, deviations_total) = handover.status_snapshot();
    let inventory = &*with_troubles(inventory, diagnosis);
    let inventory = &*as_offered(inventory, offered);
    let resources = resources(inventory, &held(inventory, &holders));
    let clocks = clocks(inventory, &holders, diagnosis);
    let mut conditions = vec![ready(inventory, readiness, handover.is_synced(), before, now)];
    conditions.extend(cordoned(inventory, diagnosis).map(|condition| dated(condition, before, now)));
    if diagnosis.nvml_closed {
        let text = Reason::NvmlClosed.text().to_owned();
        let condition = condition(ConditionType::NvmlClosed, true, Reason::NvmlClosed, text);
        conditions.push(dated(condition, before, now));
    }
    GpuNodeStatus {
        summary: summary(inventory, &holders, &resources),
        resources,
        devices: inventory
            .devices
            .iter()
            .map(|device| DeviceStatus {
                id: device.id.clone(),
                resource: device.resource.clone(),
                gpu: device.gpu,
                slice: device.slice.as_ref().map(|slice| Slice {
                    profile: slice.profile.clone(),
                    start: slice.start,
                    size: slice.size,
                }),
                replica: device.replica,
                health: bounded(&device.health),
            })
            .collect(),
        holders,
        // Not of the inventory: the publisher adds them.
        cpus: Vec::new(),
        memory: Vec::new(),
        deviations,
        deviations_total,
        faults: diagnosis.faults.iter().map(|fault| fault.0.clone()).collect(),
        clocks,
        mig_drain: None,
        evidence: diagnosis.evidence.clone(),
        problems: problems(inventory, diagnosis, before.map_or(earlier, |before| &before.problems), now),
        plugin_version: env!("CARGO_PKG_VERSION").to_owned(),
        conditions,
    }
}

/// What is wrong with the GPUs apart from Xids. `before` has those that were published last: a problem that lasts keeps
/// its time, and none ends before the GPUs were read.
fn problems(
    inventory: &Inventory,
    diagnosis: &Diagnosis,
    before: &[GpuProblem],
    now: Timestamp,
) -> Vec<GpuProblem> {
    if !(diagnosis.known && diagnosis.adopted) {
        return before.to_vec();
    }
    let mut found: BTreeMap<(String, String), bool> = BTreeMap::new();
    let troubles = diagnosis.troubles.iter().map(|trouble| (trouble, true));
    for (trouble, unhealthy) in troubles.chain(diagnosis.notices.iter().map(|notice| (notice, false))) {
        let Some(gpu) = trouble.gpu.uuid().filter(|_| !matches!(trouble.cause, Cause::Xid(_))) else {
            continue;
        };
        *found.entry((gpu.to_string(), trouble.cause.to_string())).or_default() |= unhealthy;
    }
    for gpu in inventory.machine.gpus() {
        if let (Some(uuid), Some(throttle)) = (&gpu.uuid, gpu.throttle) {
            let cause = match throttle {
                Throttle::Thermal => "throttled-thermal",
                Throttle::PowerBrake => "throttled-power-brake",
                Throttle::Hardware => "throttled-hardware",
            };
            found.entry((uuid.to_string(), cause.to_owned())).or_default();
        }
    }
    let problem = |((gpu, cause), unhealthy): ((String, String), bool)| {
        let known = before.iter().find(|known| known.gpu == gpu && known.cause == cause);
        let since = known.map_or(Time(now), |known| known.since.clone());
        GpuProblem { gpu, cause, unhealthy, since }
    };
    found.into_iter().take(GpuNodeStatus::MAX_PROBLEMS).map(problem).collect()
}

/// The clocks of the GPUs that pods hold: those of others are compared with nothing.
fn clocks(inventory: &Inventory, holders: &[Holder], diagnosis: &Diagnosis) -> Vec<GpuClock> {
    let held = held_gpus(inventory, holders);
    let gpus = inventory.machine.gpus().iter().filter(|gpu| held.contains(&gpu.index));
    let uuids: HashSet<&str> = gpus.filter_map(|gpu| Some(gpu.uuid.as_ref()?.as_str())).collect();
    diagnosis.clocks.iter().filter(|clock| uuids.contains(clock.gpu.as_str())).cloned().collect()
}

/// The health with its reason as long as a message of an object may be: an object has thousands of devices.
fn bounded(health: &DeviceHealth) -> DeviceHealth {
    let reason = health.reason.as_ref().map(|reason| ObjectMessage::new(reason.as_str()).into());
    DeviceHealth { healthy: health.healthy, reason }
}

/// The inventory, with every device unhealthy that kubelet is offered as unhealthy: containers could not use it on this
/// node.
fn as_offered<'a>(inventory: &'a Inventory, offered: &Inventory) -> Cow<'a, Inventory> {
    let unusable = offered.devices.iter().filter(|device| !device.health.healthy);
    let unusable: HashMap<&DeviceId, &DeviceHealth> =
        unusable.map(|device| (&device.id, &device.health)).collect();
    let is_hit = |device: &Device| device.health.healthy && unusable.contains_key(&device.id);
    if !inventory.devices.iter().any(is_hit) || inventory.machine != offered.machine {
        return Cow::Borrowed(inventory);
    }
    let mut changed = inventory.clone();
    for device in &mut changed.devices {
        if let Some(health) = unusable.get(&device.id).filter(|_| device.health.healthy) {
            device.health = (*health).clone();
        }
    }
    Cow::Owned(changed)
}

/// The inventory, with every device unhealthy that the diagnosis reports: the diagnosis is newer, and such a device
/// must not be granted.
fn with_troubles<'a>(inventory: &'a Inventory, diagnosis: &Diagnosis) -> Cow<'a, Inventory> {
    let mut inventory = Cow::Borrowed(inventory);
    let machine = Arc::clone(&inventory.machine);
    let cordoned = diagnosis.cordoned.iter().map(|(gpu, reason)| (Some(gpu), Extent::Gpu, reason));
    let troubles =
        diagnosis.troubles.iter().map(|trouble| (trouble.gpu.uuid(), trouble.extent, &trouble.reason));
    for (uuid, extent, reason) in troubles.chain(cordoned) {
        let gpus = machine.gpus().iter();
        let mut of_trouble = gpus.filter(|gpu| gpu.uuid.is_some() && gpu.uuid.as_ref() == uuid);
        let Some(index) = of_trouble.next().map(|gpu| gpu.index) else {
            continue;
        };
        for at in 0..inventory.devices.len() {
            let device = &inventory.devices[at];
            let slice = device.slice.as_ref();
            let part = slice.map(|slice| (slice.gpu_instance, slice.compute_instance));
            if device.gpu == index && device.health.healthy && extent.touches(part) {
                inventory.to_mut().devices[at].health =
                    DeviceHealth { healthy: false, reason: Some(reason.clone()) };
            }
        }
    }
    inventory
}

/// The status of a plugin that stops in order.
pub(super) fn stopped(mut status: GpuNodeStatus, now: Timestamp) -> GpuNodeStatus {
    let ready = ConditionType::Ready;
    let condition = condition(ready, false, Reason::Stopped, Reason::Stopped.text().to_owned());
    status.conditions.retain(|known| known.type_ != ready.as_str());
    status.conditions.insert(0, dated(condition, None, now));
    // A layout goes on with the next run.
    status.mig_drain = None;
    status
}

fn ready(
    inventory: &Inventory,
    readiness: &Readiness,
    synced: bool,
    before: Option<&GpuNodeStatus>,
    now: Timestamp,
) -> Condition {
    let (ready, reason, mut message) = match readiness.summary() {
        (reason @ (Reason::NoDevices | Reason::NotRegistered), text) => (false, reason, text),
        _ if !synced => (false, Reason::PodsUnknown, Reason::PodsUnknown.text().to_owned()),
        (reason, text) => (true, reason, text),
    };
    for excluded in &inventory.excluded {
        let _ = write!(message, "; GPU {} is not served: {}", excluded.gpu, excluded.reason);
    }
    for problem in &inventory.problems {
        let _ = write!(message, "; configuration: {problem}");
    }
    dated(condition(ConditionType::Ready, ready, reason, message), before, now)
}

/// The condition that names the cordoned GPUs; `None` without one.
fn cordoned(inventory: &Inventory, diagnosis: &Diagnosis) -> Option<Condition> {
    let gpus = inventory.machine.gpus().iter();
    let words = gpus.filter_map(|gpu| {
        let reason = diagnosis.cordoned.get(gpu.uuid.as_ref()?)?;
        Some(format!("GPU {} {reason}", gpu.index))
    });
    let words: Vec<String> = words.collect();
    let set = || condition(ConditionType::GpusCordoned, true, Reason::GpuCordoned, words.join("; "));
    (!words.is_empty()).then(set)
}

fn condition(type_: ConditionType, holds: bool, reason: Reason, message: String) -> Condition {
    Condition {
        type_: type_.to_string(),
        status: if holds { "True" } else { "False" }.to_owned(),
        reason: reason.to_string(),
        message: ObjectMessage::new(message).into(),
        observed_generation: None,
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
    }
}

fn dated(mut condition: Condition, before: Option<&GpuNodeStatus>, now: Timestamp) -> Condition {
    let since = before
        .and_then(|status| status.conditions.iter().find(|known| known.type_ == condition.type_))
        .filter(|known| known.status == condition.status)
        .map(|known| known.last_transition_time.clone());
    condition.last_transition_time = since.unwrap_or(Time(now));
    condition
}

/// The device IDs that are held or in quarantine, by their names at the time of allocation.
fn in_use(holders: &[Holder]) -> impl Iterator<Item = &DeviceId> {
    holders
        .iter()
        .filter(|holder| holder.provenance != Provenance::Granted || holder.state == HolderState::Quarantined)
        .flat_map(|holder| &holder.devices)
}

/// The devices that are in use. An ID from before a configuration change is mapped to the present devices of its GPU or
/// MIG device: all replicas for a whole, one for a replica that no longer exists.
fn held<'i>(inventory: &'i Inventory, holders: &[Holder]) -> Vec<&'i Device> {
    let mut units: HashMap<&str, Vec<&Device>> = HashMap::new();
    for device in &inventory.devices {
        units.entry(&device.uuid).or_default().push(device);
    }
    let mut held: HashSet<&DeviceId> = HashSet::new();
    for id in in_use(holders) {
        let of_unit = units.get(id.unit()).map_or(&[][..], Vec::as_slice);
        let is_whole = id.unit() == id.as_str();
        match of_unit.iter().find(|device| device.id == *id) {
            Some(device) => held.extend([&device.id]),
            None if is_whole => held.extend(of_unit.iter().map(|device| &device.id)),
            None => held.extend(of_unit.last().map(|device| &device.id)),
        }
    }
    let devices = inventory.devices.iter();
    devices.filter(|device| held.contains(&device.id)).collect()
}

/// The GPUs with devices in use, by index.
fn held_gpus(inventory: &Inventory, holders: &[Holder]) -> BTreeSet<u8> {
    let places = inventory.whereabouts();
    in_use(holders).filter_map(|id| places.get(id.unit()).copied()).collect()
}

/// The resources with their terms and counts.
fn resources(inventory: &Inventory, held: &[&Device]) -> Vec<ResourceStatus> {
    inventory
        .resources
        .iter()
        .map(|(name, terms)| {
            let devices = || inventory.devices.iter().filter(|device| device.resource == *name);
            let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
            ResourceStatus {
                name: name.clone(),
                kind: match (terms.replicated, terms.slices) {
                    (true, _) => ResourceKind::Shared,
                    (false, true) => ResourceKind::Mig,
                    (false, false) => ResourceKind::Gpu,
                },
                sharing: match terms.sharing {
                    SharedDevices::Distributed => SharingPolicy::Distributed,
                    SharedDevices::Packed => SharingPolicy::Packed,
                },
                replicas: devices()
                    .filter_map(|device| device.replica)
                    .max()
                    .map_or(1, |last| last.saturating_add(1)),
                max_request: terms.fail_requests_greater_than_one.then_some(1),
                devices: count(devices().count()),
                healthy: count(devices().filter(|device| device.health.healthy).count()),
                held: count(held.iter().filter(|device| device.resource == *name).count()),
            }
        })
        .collect()
}

fn summary(
    inventory: &Inventory,
    holders: &[Holder],
    resources: &[ResourceStatus],
) -> gantry_api::gpunode::Summary {
    let machine = &inventory.machine;
    let gpus = machine.gpus().len();
    let unhealthy = inventory.devices.iter().filter(|device| !device.health.healthy);
    // Unreachable from the start: no device of them is offered.
    let nameless = machine.gpus().iter().filter(|gpu| gpu.uuid.is_none());
    let unhealthy_gpus: BTreeSet<u8> =
        unhealthy.map(|device| device.gpu).chain(nameless.map(|gpu| gpu.index)).collect();
    let held = held_gpus(inventory, holders);
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    gantry_api::gpunode::Summary {
        model: models(machine.gpus().iter().map(|gpu| gpu.model.as_deref().unwrap_or_default())),
        links: machine.best_link(),
        gpus: count(gpus),
        healthy: if inventory.state == State::Ready {
            count(gpus - unhealthy_gpus.len().min(gpus))
        } else {
            0
        },
        held: count(held.len()),
        devices: ResourceStatus::line(resources),
    }
}

#[cfg(test)]
mod tests;
