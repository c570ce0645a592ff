//! Publishes a new offer for every change of hardware or configuration.

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::offer;
use crate::inventory::{Hardware, Inventory};
use gantry_config::Config;

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
    for left_out in &now.left_out {
        if !before.left_out.contains(left_out) {
            tracing::warn!(gpu = left_out.gpu, "not served: {}", left_out.reason);
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
