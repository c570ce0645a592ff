//! Time slicing: a shared unit becomes one device per replica. Every unit is offered once, shared or not.

use std::collections::{BTreeMap, BTreeSet};

use gantry_api::{DeviceHealth, DeviceId, ResourceName};

use super::NamedUnit;
use crate::inventory::Device;
use gantry_config::{DeviceRef, MOST_DEVICES, ReplicatedDevices, ReplicatedResource, TimeSlicing};

/// Why replicas of a GPU are unhealthy that one process at a time may use, as NVIDIA's MPS leaves it.
const EXCLUSIVE: &str = "compute mode EXCLUSIVE_PROCESS: a second container could not use CUDA on the shared GPU; run nvidia-smi -c DEFAULT";

/// The devices of all units. The first entry that names a unit counts. Devices of an entry that are missing or shared already go to
/// `problems`.
pub(super) fn devices(
    units: &[NamedUnit<'_>],
    slicing: Option<&TimeSlicing>,
    problems: &mut Vec<String>,
) -> Vec<Device> {
    let entries = slicing.map_or(&[][..], |slicing| &slicing.resources);
    let rename_by_default = slicing.is_some_and(|slicing| slicing.rename_by_default);
    // The entry that shares each unit.
    let mut shared: Vec<Option<&ReplicatedResource>> = vec![None; units.len()];
    for (position, entry) in entries.iter().enumerate() {
        let mut report = |problem: String| {
            problems.push(format!("sharing.timeSlicing.resources[{position}] ({}): {problem}", entry.name));
        };
        let of_resource: Vec<usize> =
            (0..units.len()).filter(|unit| units[*unit].resource == entry.name).collect();
        if of_resource.is_empty() {
            report("this node has no such resource".to_owned());
            continue;
        }
        let here: Vec<usize> = match &entry.devices {
            ReplicatedDevices::All | ReplicatedDevices::Count(_) => of_resource,
            ReplicatedDevices::Listed(list) => {
                for device in list {
                    if !of_resource.iter().any(|unit| means(device, &units[*unit])) {
                        report(format!("none of its devices here is {device}"));
                    }
                }
                let is_listed = |unit: &usize| list.iter().any(|device| means(device, &units[*unit]));
                of_resource.into_iter().filter(is_listed).collect()
            }
        };
        let open = here.iter().copied().filter(|unit| shared[*unit].is_none());
        let meant: Vec<usize> = match entry.devices {
            ReplicatedDevices::All | ReplicatedDevices::Listed(_) => open.collect(),
            ReplicatedDevices::Count(count) => open.take(usize::from(count)).collect(),
        };
        if let ReplicatedDevices::Count(count) = entry.devices
            && meant.len() < usize::from(count)
        {
            report(format!("{count} devices are to be shared, {} are there", meant.len()));
        } else if meant.is_empty() && !here.is_empty() {
            report("all devices it names are shared by an earlier entry".to_owned());
        }
        for unit in meant {
            shared[unit] = Some(entry);
        }
    }
    let most = u16::try_from(MOST_DEVICES / units.len().max(1)).unwrap_or(u16::MAX);
    for (position, entry) in entries.iter().enumerate() {
        if entry.replicas > most && shared.iter().flatten().any(|used| std::ptr::eq(*used, entry)) {
            problems.push(format!(
                "sharing.timeSlicing.resources[{position}] ({}): {} replicas of each of {} devices are more than the {MOST_DEVICES} devices that a GpuNode in etcd holds; {most} are offered",
                entry.name, entry.replicas, units.len()
            ));
        }
    }
    let mut devices = Vec::with_capacity(units.len());
    for (named, shared) in units.iter().zip(shared) {
        match shared {
            None => devices.push(device(named, named.resource.clone(), None)),
            Some(entry) => {
                let resource = renamed(entry, rename_by_default);
                devices
                    .extend((0..entry.replicas.min(most)).map(|k| device(named, resource.clone(), Some(k))));
            }
        }
    }
    report_mixtures(&devices, problems);
    devices
}

/// The resource of an entry's devices.
fn renamed(entry: &ReplicatedResource, by_default: bool) -> ResourceName {
    match &entry.rename {
        Some(name) => name.clone(),
        None if by_default => format!("{}.shared", entry.name).into(),
        None => entry.name.clone(),
    }
}

fn device(named: &NamedUnit<'_>, resource: ResourceName, replica: Option<u16>) -> Device {
    let unit = named.unit;
    Device {
        id: match replica {
            Some(k) => DeviceId::replica(unit.id.as_str(), k),
            None => unit.id.clone(),
        },
        resource,
        gpu: unit.gpu,
        nvml_index: unit.nvml_index,
        uuid: unit.id.to_string(),
        health: match replica {
            Some(_) if unit.exclusive && unit.health.healthy => {
                DeviceHealth { healthy: false, reason: Some(EXCLUSIVE.to_owned()) }
            }
            _ => unit.health.clone(),
        },
        minor: unit.minor,
        numa: unit.numa,
        slice: unit.slice.clone(),
        replica,
    }
}

/// Whether a configuration means this unit. A GPU's index or UUID means all of its MIG devices too.
fn means(device: &DeviceRef, named: &NamedUnit<'_>) -> bool {
    match device {
        DeviceRef::Gpu(gpu) => named.gpu.index == *gpu,
        DeviceRef::Mig(gpu, index) => {
            let slice = named.unit.slice.as_ref();
            named.gpu.index == *gpu && slice.is_some_and(|slice| slice.index == *index)
        }
        DeviceRef::Uuid(uuid) => {
            let is = |own: &str| own.eq_ignore_ascii_case(uuid);
            is(named.unit.id.as_str()) || named.gpu.uuid.as_ref().is_some_and(|own| is(own.as_str()))
        }
    }
}

/// Reports names of different devices: shared and unshared, GPUs and MIG devices, or several profiles. A pod that requests such a name
/// cannot know which it gets. With the strategy `single` only the first can happen.
fn report_mixtures(devices: &[Device], problems: &mut Vec<String>) {
    let mut resources: BTreeMap<&ResourceName, Mixture<'_>> = BTreeMap::new();
    for device in devices {
        let mixture = resources.entry(&device.resource).or_default();
        mixture.shared |= device.replica.is_some();
        mixture.unshared |= device.replica.is_none();
        match &device.slice {
            Some(slice) => _ = mixture.profiles.insert(&slice.profile),
            None => mixture.whole = true,
        }
    }
    for (resource, mixture) in resources {
        if mixture.shared && mixture.unshared {
            problems.push(format!(
                "sharing.timeSlicing: {resource} names both shared devices and others; give the shared ones a rename"
            ));
        }
        let profiles: Vec<&str> = mixture.profiles.into_iter().collect();
        let what = match (mixture.whole, profiles.len()) {
            (true, 1..) => format!("whole GPUs and MIG devices ({})", profiles.join(", ")),
            (false, 2..) => format!("MIG devices of several profiles ({})", profiles.join(", ")),
            _ => continue,
        };
        problems.push(format!(
            "{resource} names {what}, and a pod cannot know which it gets; name them apart in resources.mig, or in a rename of sharing.timeSlicing"
        ));
    }
}

/// The devices of one name.
#[derive(Default)]
struct Mixture<'d> {
    shared: bool,
    unshared: bool,
    /// Whether whole GPUs are among them.
    whole: bool,
    /// Profiles of the MIG devices among them.
    profiles: BTreeSet<&'d str>,
}
