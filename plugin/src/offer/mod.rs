//! What of the hardware is offered to kubelet, and under which names: [`offer`], a pure function of hardware and configuration.
//! [`follow`] keeps its result current. Asks nobody, and a configuration that does not fit the node costs no GPU but those
//! it does not fit: they are left out with a reason, the rest is served.

use std::sync::Arc;

use gantry_api::{ResourceName, names};
use gantry_topology::Gpu;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::inventory::{Device, Hardware, Inventory, LeftOut, State, Unit};

/// What kubelet is to be told of `hardware` by `config`.
pub fn offer(hardware: &Hardware, config: &Config) -> Inventory {
    match &hardware.state {
        State::Starting => return Inventory::starting(),
        State::Absent(reason) => return Inventory::absent(reason.clone()),
        State::Ready => {}
    }
    let mut devices = Vec::new();
    let mut left_out = Vec::new();
    for gpu in hardware.machine.gpus() {
        // The small board that drives a DGX Station's screen is not for computing.
        if gpu
            .model
            .as_deref()
            .is_some_and(|model| model.ends_with("DGX Display"))
        {
            continue;
        }
        let units: Vec<&Unit> = hardware
            .units
            .iter()
            .filter(|unit| unit.gpu == gpu.index)
            .collect();
        match resource(gpu, &units, config) {
            Ok(resource) => devices.extend(units.into_iter().map(|unit| device(unit, resource.clone()))),
            Err(reason) => left_out.push(LeftOut {
                gpu: gpu.index,
                reason,
            }),
        }
    }
    Inventory {
        left_out,
        ..Inventory::ready(Arc::clone(&hardware.machine), devices)
    }
}

/// The resource of a GPU's devices, or why it has none.
fn resource(gpu: &Gpu, units: &[&Unit], config: &Config) -> Result<ResourceName, String> {
    if gpu.mig.as_ref().is_some_and(|mig| mig.enabled) {
        return Err("MIG is on, and no work runs on such a GPU but through its MIG devices".to_owned());
    }
    if units.is_empty() {
        return Err("NVML tells no UUID of it".to_owned());
    }
    let named = config.gpu_patterns.first().map(|pattern| pattern.name.clone());
    Ok(named.unwrap_or_else(|| names::GPU_RESOURCE.into()))
}

fn device(unit: &Unit, resource: ResourceName) -> Device {
    Device {
        id: unit.id.clone(),
        resource,
        gpu: unit.gpu,
        uuid: unit.id.to_string(),
        health: unit.health.clone(),
        minor: unit.minor,
        numa: unit.numa,
        slice: unit.slice.clone(),
        replica: None,
    }
}

/// Publishes the offer for every new hardware and configuration, until `shutdown` or until the hardware's owner is gone. A
/// configuration that nobody can change any more stays in force.
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
                tell(current, &now);
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

/// Logs what a person should know of a new offer and did not know before.
fn tell(before: &Inventory, now: &Inventory) {
    for left_out in now
        .left_out
        .iter()
        .filter(|left_out| !before.left_out.contains(left_out))
    {
        tracing::warn!(gpu = left_out.gpu, "not served: {}", left_out.reason);
    }
    for problem in now
        .problems
        .iter()
        .filter(|problem| !before.problems.contains(problem))
    {
        tracing::warn!("configuration: {problem}");
    }
}
