//! The devices that kubelet is offered, and their resource names: [`offer`], a pure function of hardware and configuration.
//! GPUs that the configuration does not fit are left out with a reason; the others are served.

mod follow;
mod naming;
mod pattern;
mod selection;
mod sharing;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_topology::Gpu;

use crate::inventory::{Device, Hardware, Inventory, LeftOut, State, Terms, Unit};
use gantry_config::{Config, SharedDevices};

pub use follow::follow;
pub(crate) use selection::leaves;

use naming::Naming;
use selection::Selection;

/// A unit and its resource before sharing.
struct Named<'h> {
    gpu: &'h Gpu,
    unit: &'h Unit,
    resource: ResourceName,
}

/// The inventory for kubelet that `config` makes of `hardware`.
pub fn offer(hardware: &Hardware, config: &Config) -> Inventory {
    match &hardware.state {
        State::Starting => return Inventory::starting(),
        State::Absent(reason) => return Inventory::absent(reason.clone()),
        State::Ready => {}
    }
    let mut problems = Vec::new();
    let mut left_out = BTreeSet::new();
    let mut candidates = Vec::new();
    let selection = Selection::new(config, &hardware.machine, &hardware.units, &mut problems);
    for gpu in hardware.machine.gpus().iter().filter(|gpu| !drives_a_screen(gpu)) {
        let mut leave_out = |reason| {
            left_out.insert(LeftOut {
                gpu: gpu.index,
                reason,
            })
        };
        if gpu.uuid.is_none() {
            leave_out("NVML reports no UUID for it, so that no container could be given it".to_owned());
            continue;
        }
        if let Err(reason) = selection.gpu(gpu) {
            leave_out(reason);
            continue;
        }
        let mut units = Vec::new();
        for unit in hardware.units.iter().filter(|unit| unit.gpu == gpu.index) {
            match selection.unit(gpu, unit) {
                Ok(()) => units.push(unit),
                Err(reason) => {
                    leave_out(reason);
                }
            }
        }
        candidates.push((gpu, units));
    }
    let naming = Naming::new(config, &hardware.mig_unknown, &candidates, &mut problems);
    let mut named = Vec::new();
    for (gpu, units) in candidates {
        if let Err(reason) = naming.serves(gpu, &units) {
            left_out.insert(LeftOut {
                gpu: gpu.index,
                reason,
            });
            continue;
        }
        named.extend(units.into_iter().map(|unit| Named {
            gpu,
            unit,
            resource: naming.resource(gpu, unit),
        }));
    }
    let devices = sharing::devices(&named, config.time_slicing.as_ref(), &mut problems);
    Inventory {
        resources: terms(&devices, config),
        left_out: left_out.into_iter().collect(),
        problems,
        ..Inventory::ready(Arc::clone(&hardware.machine), devices)
    }
}

/// Whether this is the small board that drives the screen of a DGX Station. It is not for computing.
pub(crate) fn drives_a_screen(gpu: &Gpu) -> bool {
    gpu.model
        .as_deref()
        .is_some_and(|model| matches!(model, "DGX Display" | "NVIDIA DGX Display"))
}

fn terms(devices: &[Device], config: &Config) -> BTreeMap<ResourceName, Terms> {
    let mut resources: BTreeMap<ResourceName, Terms> = BTreeMap::new();
    for device in devices {
        let terms = resources.entry(device.resource.clone()).or_default();
        terms.replicated |= device.replica.is_some();
        terms.slices |= device.slice.is_some();
    }
    for terms in resources.values_mut() {
        terms.sharing = match (terms.replicated, terms.slices) {
            (true, _) => config.shared_devices.unwrap_or_default(),
            // MIG devices that are not shared are packed, so that GPUs stay whole, unless the configuration differs.
            (false, true) => config.shared_devices.unwrap_or(SharedDevices::Packed),
            (false, false) => SharedDevices::Distributed,
        };
        let refuses = |slicing: &gantry_config::TimeSlicing| slicing.fail_requests_greater_than_one;
        terms.fail_requests_greater_than_one =
            terms.replicated && config.time_slicing.as_ref().is_some_and(refuses);
    }
    resources
}

#[cfg(test)]
mod tests;
