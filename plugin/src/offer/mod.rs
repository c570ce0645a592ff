//! The devices that kubelet is offered, and their resource names: [`offer`], a pure function of hardware and configuration.
//! GPUs that the configuration does not fit are left out with a reason; the others are served.

mod naming;
mod selection;
mod sharing;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::ResourceName;
use gantry_topology::Gpu;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::inventory::{Device, ExcludedGpu, Hardware, Inventory, State, Terms, Unit};
use gantry_config::{Config, SharedDevices};

pub(crate) use selection::leaves;

use naming::UnitNames;
use selection::Selection;

/// A unit and its resource before sharing.
struct NamedUnit<'h> {
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
    let mut excluded = BTreeSet::new();
    let mut candidates = Vec::new();
    let selection = Selection::new(config, &hardware.machine, &hardware.units, &mut problems);
    for gpu in hardware.machine.gpus().iter().filter(|gpu| !drives_a_screen(gpu)) {
        let mut exclude = |reason| excluded.insert(ExcludedGpu { gpu: gpu.index, reason });
        if gpu.uuid.is_none() {
            exclude("NVML reports no UUID for it, so that no container could be given it".to_owned());
            continue;
        }
        if let Err(reason) = selection.gpu(gpu) {
            exclude(reason);
            continue;
        }
        let mut units = Vec::new();
        for unit in hardware.units.iter().filter(|unit| unit.gpu == gpu.index) {
            match selection.unit(gpu, unit) {
                Ok(()) => units.push(unit),
                Err(reason) => {
                    exclude(reason);
                }
            }
        }
        candidates.push((gpu, units));
    }
    let naming = UnitNames::new(config, &hardware.mig_unknown, &candidates, &mut problems);
    let mut named = Vec::new();
    for (gpu, units) in candidates {
        if let Err(reason) = naming.serves(gpu, &units) {
            excluded.insert(ExcludedGpu { gpu: gpu.index, reason });
            continue;
        }
        named.extend(units.into_iter().map(|unit| NamedUnit {
            gpu,
            unit,
            resource: naming.resource(gpu, unit),
        }));
    }
    let devices = sharing::devices(&named, config.time_slicing.as_ref(), &mut problems);
    Inventory {
        resources: terms(&devices, config),
        excluded: excluded.into_iter().collect(),
        problems,
        ..Inventory::ready(Arc::clone(&hardware.machine), devices)
    }
}

/// Whether this is the small board that drives the screen of a DGX Station. It is not for computing.
pub(crate) fn drives_a_screen(gpu: &Gpu) -> bool {
    gpu.model.as_deref().is_some_and(|model| matches!(model, "DGX Display" | "NVIDIA DGX Display"))
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

/// Publishes the offer for every new hardware and configuration, until `shutdown` or until the hardware's sender is gone. The
/// configuration stays in force after its sender is gone.
pub async fn follow(
    mut hardware: watch::Receiver<Arc<Hardware>>,
    mut config: watch::Receiver<Arc<Config>>,
    publish: watch::Sender<Arc<Inventory>>,
    shutdown: CancellationToken,
) {
    let mut fixed = false;
    loop {
        let now = offer(&hardware.borrow_and_update(), &config.borrow_and_update());
        publish.send_if_modified(|current| {
            let changed = **current != now;
            if changed {
                log(current, &now);
                *current = Arc::new(now);
            }
            changed
        });
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = hardware.changed() => if changed.is_err() { return },
            changed = config.changed(), if !fixed => fixed = changed.is_err(),
        }
    }
}

/// Logs what is new in an offer: GPUs left out, problems, counts of devices.
fn log(before: &Inventory, now: &Inventory) {
    for excluded in &now.excluded {
        if !before.excluded.contains(excluded) {
            tracing::warn!(gpu = excluded.gpu, "not served: {}", excluded.reason);
        }
    }
    for problem in &now.problems {
        if !before.problems.contains(problem) {
            tracing::warn!("configuration: {problem}");
        }
    }
    for (resource, terms) in &now.resources {
        let count = |inventory: &Inventory| {
            let devices = inventory.devices.iter();
            devices.filter(|device| device.resource == *resource).count()
        };
        let devices = count(now);
        if devices != count(before) {
            tracing::info!(%resource, devices, replicated = terms.replicated, slices = terms.slices, "offered");
        }
    }
}

#[cfg(test)]
mod tests;
