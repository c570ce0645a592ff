//! The unhealthy devices that kubelet is offered, for the log and for `/readyz`. One fault of many GPUs is one line.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::sync::Arc;

use gantry_api::DeviceId;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Observations;
use crate::health::GpuName;
use crate::inventory::{Device, Diagnoses, Diagnosis, Inventory, State};

/// Most reasons in the line of `/readyz`, and most lines of the log for one change.
const MAX_REASONS: usize = 8;
/// Most devices that one line of the log names.
const MAX_NAMES: usize = 8;

/// GPUs with unhealthy devices, by reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnhealthyGpus {
    /// Number of GPUs of the node.
    gpus: usize,
    by_reason: BTreeMap<String, BTreeSet<u8>>,
}

impl UnhealthyGpus {
    /// Those of `offered`, and the GPUs of `diagnosis` without a UUID, which have no device. A GPU that the operator cordoned is
    /// not unhealthy.
    fn of(offered: &Inventory, diagnosis: &Diagnosis) -> Self {
        if offered.state != State::Ready {
            return Self::default();
        }
        let mut by_reason: BTreeMap<String, BTreeSet<u8>> = BTreeMap::new();
        let cordons: BTreeSet<&String> = diagnosis.cordoned.values().collect();
        for (device, reason) in offered.devices.iter().filter_map(|device| Some((device, unhealthy(device)?)))
        {
            if !cordons.contains(reason) {
                by_reason.entry(reason.clone()).or_default().insert(device.gpu);
            }
        }
        for trouble in &diagnosis.troubles {
            if let GpuName::Index(index) = trouble.gpu {
                by_reason.entry(trouble.reason.clone()).or_default().insert(index);
            }
        }
        Self { gpus: offered.machine.gpus().len(), by_reason }
    }

    /// One line that counts them and names the first, without the reasons for which `is_known` is true; `None` if none is left.
    pub(super) fn line(&self, is_known: impl Fn(&str) -> bool) -> Option<String> {
        let mut left: Vec<(&String, &BTreeSet<u8>)> =
            self.by_reason.iter().filter(|(reason, _)| !is_known(reason)).collect();
        left.sort_by_key(|(_, gpus)| gpus.first().copied());
        let count = left.iter().flat_map(|(_, gpus)| *gpus).collect::<BTreeSet<_>>().len();
        if count == 0 {
            return None;
        }
        let mut line = format!("{count} of {} GPUs unhealthy: ", self.gpus);
        for (at, (reason, gpus)) in left.iter().take(MAX_REASONS).enumerate() {
            let between = if at == 0 { "" } else { "; " };
            let word = if gpus.len() == 1 { "GPU" } else { "GPUs" };
            let _ = write!(line, "{between}{word} {}: {reason}", listed(gpus.iter()));
        }
        if left.len() > MAX_REASONS {
            let _ = write!(line, "; {} more reasons", left.len() - MAX_REASONS);
        }
        Some(line)
    }
}

/// The reason for which a device is unhealthy.
fn unhealthy(device: &Device) -> Option<&String> {
    device.health.reason.as_ref().filter(|_| !device.health.healthy)
}

/// The first of these, and how many more.
fn listed<T: std::fmt::Display>(all: impl ExactSizeIterator<Item = T>) -> String {
    let more = all.len().saturating_sub(MAX_NAMES);
    let mut first: Vec<String> = all.take(MAX_NAMES).map(|one| one.to_string()).collect();
    if more > 0 {
        first.push(format!("{more} more"));
    }
    first.join(", ")
}

/// Logs devices with changed health, and records the unhealthy ones, until `shutdown`. A fault that is present at the start is a
/// change: kubelet was offered nothing before.
pub(crate) async fn follow_health(
    mut offered: watch::Receiver<Arc<Inventory>>,
    diagnoses: Diagnoses,
    observed: Arc<Observations>,
    shutdown: CancellationToken,
) {
    let mut diagnosis = diagnoses.diagnosis();
    let mut diagnosed = true;
    let mut before = Arc::new(Inventory::starting());
    loop {
        let now = Arc::clone(&offered.borrow_and_update());
        if !Arc::ptr_eq(&before, &now) {
            log_changes(&before, &now);
            before = Arc::clone(&now);
        }
        observed.unhealthy(UnhealthyGpus::of(&now, &diagnosis.borrow_and_update()));
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = offered.changed() => if changed.is_err() { return },
            changed = diagnosis.changed(), if diagnosed => diagnosed = changed.is_ok(),
        }
    }
}

/// Logs each reason for which devices became unhealthy, and the devices that are healthy again.
fn log_changes(before: &Inventory, now: &Inventory) {
    if now.state != State::Ready {
        return;
    }
    let known: HashMap<&DeviceId, Option<&String>> =
        before.devices.iter().map(|device| (&device.id, unhealthy(device))).collect();
    let mut failed: BTreeMap<&String, Vec<&Device>> = BTreeMap::new();
    let mut recovered = Vec::new();
    for device in &now.devices {
        let was = known.get(&device.id).copied().flatten();
        match unhealthy(device) {
            Some(reason) if was != Some(reason) => failed.entry(reason).or_default().push(device),
            None if was.is_some() => recovered.push(device),
            _ => {}
        }
    }
    for (reason, devices) in failed.iter().take(MAX_REASONS) {
        let (gpus, names) = named(devices);
        tracing::error!(gpus, devices = names, "unhealthy: {reason}");
    }
    if failed.len() > MAX_REASONS {
        let devices: usize = failed.values().skip(MAX_REASONS).map(Vec::len).sum();
        tracing::error!(devices, "unhealthy for {} more reasons", failed.len() - MAX_REASONS);
    }
    if !recovered.is_empty() {
        let (gpus, names) = named(&recovered);
        tracing::info!(gpus, devices = names, "healthy again");
    }
}

/// The GPUs of these devices, and the devices without their replicas.
fn named(devices: &[&Device]) -> (String, String) {
    let gpus: BTreeSet<u8> = devices.iter().map(|device| device.gpu).collect();
    let mut names: Vec<&str> = devices.iter().map(|device| device.uuid.as_str()).collect();
    names.dedup();
    (listed(gpus.iter()), listed(names.iter()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_counts_gpus_and_names_each_reason_once() {
        let gpus = |gpus: &[u8]| gpus.iter().copied().collect::<BTreeSet<u8>>();
        let by_reason =
            [("Xid 95".to_owned(), gpus(&[5])), ("fabric".to_owned(), gpus(&[0, 1, 2, 3, 4, 6, 7, 8, 9]))];
        let all = UnhealthyGpus { gpus: 16, by_reason: by_reason.into() };
        assert_eq!(
            all.line(|_| false).as_deref(),
            Some("10 of 16 GPUs unhealthy: GPUs 0, 1, 2, 3, 4, 6, 7, 8, 1 more: fabric; GPU 5: Xid 95")
        );
        let rest = all.line(|reason| reason == "fabric");
        assert_eq!(rest.as_deref(), Some("1 of 16 GPUs unhealthy: GPU 5: Xid 95"));
        assert_eq!(all.line(|_| true), None);
        let many = (0..100).map(|at| (format!("reason {at}"), gpus(&[1]))).collect();
        let line = UnhealthyGpus { gpus: 2, by_reason: many }.line(|_| false).unwrap();
        insta::assert_snapshot!(line, @"1 of 2 GPUs unhealthy: GPU 1: reason 0; GPU 1: reason 1; GPU 1: reason 10; GPU 1: reason 11; GPU 1: reason 12; GPU 1: reason 13; GPU 1: reason 14; GPU 1: reason 15; 92 more reasons");
    }
}
