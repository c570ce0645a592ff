//! Tracks the faults of each GPU and of NVML. Pure: events come in, health with a reason comes out, and equal
//! state gives equal reasons. A fault is cleared only on evidence of recovery.

use std::borrow::Cow;
use std::collections::BTreeMap;

use gantry_api::{Cordons, DeviceHealth, FaultEvidence, GpuFault};
use gantry_topology::{GpuUuid, Mig};
use jiff::Timestamp;

use super::fault::Part;
use super::fault::{Cause, ClearedFault, Loss, Outage, OutageKind, Proof, Trouble};
use super::{Class, Extent, Fault, HealthChecks, Table, Vitals};
use crate::nvml::ComputeMode;

/// The faults and problems of all GPUs and of NVML.
#[derive(Debug, Clone, Default)]
pub struct HealthTracker {
    gpus: BTreeMap<GpuUuid, Record>,
    outage: Option<Outage>,
    /// Whether the driver has been gone since NVML last worked.
    was_gone: bool,
    /// Faults cleared since [`HealthTracker::take_ended`].
    ended: Vec<ClearedFault>,
    /// GPUs that the operator cordoned.
    cordons: Cordons,
    /// GPUs that no pod may get while their MIG layout is about to change, each with the reason.
    closed: BTreeMap<GpuUuid, String>,
}

/// State of one GPU.
#[derive(Debug, Clone, Default)]
struct Record {
    /// By extent. For an equal extent the worst class stands, then the first fault, so that the reason does not
    /// flap.
    faults: BTreeMap<Extent, Fault>,
    /// When the latest fault was raised, whether it stands or a known one does.
    raised: Option<Timestamp>,
    lost: Option<Loss>,
    /// The latest successful reading of each value.
    vitals: Option<Vitals>,
    complaints: Vec<(Cause, String)>,
    /// What is wrong without making the GPU unhealthy.
    notices: Vec<(Cause, String)>,
    /// NVLinks that equal GPUs of the machine have up; `None` if links are not compared, as in MIG mode.
    peer_links: Option<u8>,
    /// The number of NVLinks that the operator accepted.
    accepted_links: Option<u8>,
    /// Most NVLinks seen up since the daemon started, the driver was reloaded, or the operator lifted the
    /// quarantine.
    links: u8,
    /// NVLinks up at the last reading.
    links_now: u8,
    /// A link Xid without a recovery action of the driver, and the remaining readings that may show that links
    /// went down with it.
    suspect: Option<(Fault, u8)>,
}

/// Readings after a link Xid that are checked for links that went down: the reading triggered by the Xid, and
/// one more in case NVML is late.
const READINGS: u8 = 2;

impl HealthTracker {
    /// Records a fault. For an equal part of a GPU the worst class stands, then the first fault. True if
    /// `fault` stands.
    pub fn record_fault(&mut self, gpu: &GpuUuid, mut fault: Fault) -> bool {
        let record = self.gpus.entry(gpu.clone()).or_default();
        if let Some(vitals) = &record.vitals {
            vitals.add_to(&mut fault.evidence);
        }
        record.raised = record.raised.max(Some(fault.since));
        let known = record.faults.get(&fault.extent);
        let stands = known.is_none_or(|known| known.class < fault.class);
        if stands {
            record.faults.insert(fault.extent, fault);
        }
        stands
    }

    /// Records a link Xid that is a fault only if the next readings show links down. The first of several
    /// stands.
    pub fn record_suspect(&mut self, gpu: &GpuUuid, fault: Fault) {
        let record = self.gpus.entry(gpu.clone()).or_default();
        let first = record.suspect.take().map_or(fault, |(first, _)| first);
        record.suspect = Some((first, READINGS));
    }

    /// Whether the GPU's driver reports recovery actions (560 and later).
    pub fn reports_recovery_action(&self, gpu: &GpuUuid) -> bool {
        let vitals = self.gpus.get(gpu).and_then(|record| record.vitals);
        vitals.is_some_and(|vitals| vitals.action.is_some())
    }

    /// Sets the vitals read just after the beginning of a fault. Earlier vitals may be from before a reset, and
    /// would clear the fault at once.
    pub fn set_initial_evidence(&mut self, gpu: &GpuUuid, extent: Extent, vitals: &Vitals) {
        let record = self.gpus.get_mut(gpu);
        if let Some(fault) = record.and_then(|record| record.faults.get_mut(&extent)) {
            fault.evidence = FaultEvidence::default();
            vitals.add_to(&mut fault.evidence);
        }
    }

    /// Sets the MIG device of a fault, if it differs from the one known when the fault began.
    pub fn set_mig_device(&mut self, gpu: &GpuUuid, extent: Extent, mig_device: &str) {
        let record = self.gpus.get_mut(gpu);
        if let Some(fault) = record.and_then(|record| record.faults.get_mut(&extent)) {
            fault.mig_device = Some(mig_device.to_owned());
        }
    }

    /// Adopts the faults that an earlier run stored in the same boot; faults of another boot are cleared. Each
    /// fault is judged by `table` and `checks` again, because its stored class may be due to an old setting;
    /// the stored class counts only for an Xid that `table` does not have. Known vitals may clear a fault at
    /// once.
    pub fn adopt(&mut self, stored: Vec<GpuFault>, boot_id: &str, table: &Table, checks: &HealthChecks) {
        for one in stored {
            // Without a boot id the faults stand.
            let rebooted = !boot_id.is_empty() && !one.boot_id.is_empty() && one.boot_id != boot_id;
            let Some((gpu, fault)) = Fault::read(one) else {
                continue;
            };
            if rebooted {
                self.end(&gpu, &fault, Proof::Rebooted);
                continue;
            }
            let class = match (table.get(fault.xid), fault.class) {
                // The class was raised for a reason outside the table: links went down, or the driver reports
                // no recovery actions.
                (Some(xid), Class::Link { reset: true }) if xid.class.touches_links() => fault.class,
                (Some(xid), _) => xid.class,
                (None, stored) => stored,
            };
            let judged = checks.judge(fault.xid, class);
            // Disabled, or no longer enabled: the operator ended it.
            let Some(class) = judged.filter(|class| class.is_unhealthy()) else {
                self.end(&gpu, &fault, Proof::Lifted);
                continue;
            };
            let record = self.gpus.entry(gpu.clone()).or_default();
            if let Some(proof) = record.vitals.and_then(|vitals| vitals.proof(&vitals, &fault.evidence)) {
                self.end(&gpu, &fault, proof);
                continue;
            }
            let known = record.faults.get(&fault.extent);
            if known.is_none_or(|known| known.class < class) {
                // A reset before the newer fault clears neither.
                let evidence = known.map_or(fault.evidence, |known| known.evidence);
                let fault = Fault { class, evidence, ..fault };
                record.faults.insert(fault.extent, fault);
            }
            if let Some(vitals) = record.vitals {
                self.examine(&gpu, vitals, vitals);
            }
        }
    }

    /// Records that a GPU cannot be reached. The first reason stands until it is reachable again.
    pub fn record_loss(&mut self, gpu: &GpuUuid, loss: Loss) {
        let record = self.gpus.entry(gpu.clone()).or_default();
        match &mut record.lost {
            Some(known) => known.off_bus |= loss.off_bus,
            None => record.lost = Some(loss),
        }
        // Old vitals are invalid, and new ones can prove a reset only by the evidence of the faults.
        record.vitals = None;
        record.complaints.clear();
        record.notices.clear();
    }

    /// Records that a GPU responds. If it was off the bus, it has been reset, and its faults are cleared.
    pub fn record_response(&mut self, gpu: &GpuUuid) {
        let Some(record) = self.gpus.get_mut(gpu) else {
            return;
        };
        if record.lost.take().is_some_and(|loss| loss.off_bus) {
            self.end_where(gpu, Proof::Responds, |_| true);
        }
    }

    /// Records the vitals of a GPU, and clears the faults that they prove to be over.
    pub fn record_vitals(&mut self, gpu: &GpuUuid, vitals: Vitals, checks: &HealthChecks) {
        let record = self.gpus.entry(gpu.clone()).or_default();
        let known = vitals.over(record.vitals.as_ref());
        record.vitals = Some(known);
        record.complaints = known.complaints(checks);
        record.notices = known.notices(checks);
        self.examine(gpu, vitals, known);
    }

    /// Records how many NVLinks equal GPUs of the machine have up; `None` if links are not compared.
    pub fn record_peer_links(&mut self, gpu: &GpuUuid, up: Option<u8>) {
        self.gpus.entry(gpu.clone()).or_default().peer_links = up;
    }

    /// Whether only one process at a time may compute on the GPU.
    pub fn is_exclusive(&self, gpu: &GpuUuid) -> bool {
        let vitals = self.gpus.get(gpu).and_then(|record| record.vitals);
        vitals.is_some_and(|vitals| vitals.compute_mode == Some(ComputeMode::Exclusive))
    }

    /// Records how many NVLinks of a GPU are up. Fewer than before turn a suspect link Xid into a fault, which
    /// is cleared once as many links are up again.
    pub fn record_links(&mut self, gpu: &GpuUuid, up: u8) {
        let record = self.gpus.entry(gpu.clone()).or_default();
        record.links = record.links.max(up);
        record.links_now = up;
        let most = record.links;
        match record.suspect.take() {
            Some((fault, _)) if up < most => {
                self.record_fault(gpu, fault);
            }
            Some((fault, readings)) if readings > 1 => record.suspect = Some((fault, readings - 1)),
            _ => {}
        }
        let record = self.gpus.entry(gpu.clone()).or_default();
        for fault in record.faults.values_mut() {
            if matches!(fault.class, Class::Link { .. }) && up < most {
                fault.evidence.links_before.get_or_insert(most);
            }
        }
        self.end_where(gpu, Proof::LinksUp, |fault| {
            let before = fault.evidence.links_before;
            matches!(fault.class, Class::Link { .. }) && before.is_some_and(|before| up >= before)
        });
    }

    /// Records the MIG layout of a GPU. Faults of removed MIG instances are cleared.
    pub fn record_mig_layout(&mut self, gpu: &GpuUuid, mig: Option<&Mig>) {
        self.end_where(gpu, Proof::InstanceGone, |fault| {
            !fault.extent.is_there(mig, fault.mig_device.as_deref())
        });
    }

    /// Sets the GPUs that the operator cordoned.
    pub fn set_cordons(&mut self, cordons: Cordons) {
        self.cordons = cordons;
    }

    /// Sets the GPUs that no pod may get while their MIG layout is about to change.
    pub fn set_closed(&mut self, gpus: BTreeMap<GpuUuid, String>) {
        self.closed = gpus;
    }

    /// Ends the quarantine of GPUs for which `chosen` holds, as the operator requested.
    pub fn lift(&mut self, chosen: impl Fn(&GpuUuid) -> bool) {
        let gpus: Vec<GpuUuid> = self.gpus.keys().filter(|gpu| chosen(gpu)).cloned().collect();
        for gpu in gpus {
            self.end_where(&gpu, Proof::Lifted, |_| true);
            // An operator accepts a GPU with fewer links for good: a later Xid does not count the
            // missing links again.
            if let Some(record) = self.gpus.get_mut(&gpu) {
                record.links = record.links_now;
                record.accepted_links = Some(record.links_now);
            }
        }
    }

    /// Ends the quarantine of GPUs for which `chosen` holds, because they were reset and then read from `opened` on. A reset
    /// does not show that NVLinks are repaired: faults with links that are still down stay. So do all faults of a GPU
    /// that raised one again.
    pub fn lift_after_reset(&mut self, opened: Timestamp, chosen: impl Fn(&GpuUuid) -> bool) {
        let is_over = |record: &Record| record.raised.is_none_or(|raised| raised < opened);
        let gpus = self.gpus.iter().filter(|(gpu, record)| chosen(gpu) && is_over(record));
        let gpus: Vec<(GpuUuid, u8)> = gpus.map(|(gpu, record)| (gpu.clone(), record.links_now)).collect();
        for (gpu, links_now) in gpus {
            self.end_where(&gpu, Proof::Lifted, |fault| {
                fault.evidence.links_before.is_none_or(|before| before <= links_now)
            });
        }
    }

    /// Records that NVML fails. The latest reason stands: with the driver back but NVML failing, the driver is
    /// not gone. The earlier absence of the driver still proves a reset once NVML works.
    pub fn record_outage(&mut self, outage: Outage) {
        self.was_gone |= outage.kind == OutageKind::DriverGone;
        self.outage = Some(outage);
    }

    /// Why NVML fails now.
    pub fn outage(&self) -> Option<&Outage> {
        self.outage.as_ref()
    }

    /// Records that a reading succeeded. If `events_work`, waiting for events does too, and only then does NVML
    /// count as working. If the driver was gone, every GPU has been reset; unreachable GPUs are recorded
    /// afterwards. True if the driver was gone.
    pub fn record_recovery(&mut self, registered: bool) -> bool {
        let reloaded = std::mem::take(&mut self.was_gone);
        if reloaded || registered {
            self.outage = None;
        }
        if reloaded {
            for gpu in self.gpus.keys().cloned().collect::<Vec<_>>() {
                self.end_where(&gpu, Proof::DriverReloaded, |_| true);
            }
            for record in self.gpus.values_mut() {
                record.lost = None;
                // Read before the reset.
                record.vitals = None;
                // The peer of a link may have been removed.
                record.links = 0;
                record.accepted_links = None;
            }
        }
        reloaded
    }

    /// Whether a part of a GPU may be allocated, and if not, why.
    pub fn health(&self, gpu: &GpuUuid, part: Part) -> DeviceHealth {
        let worst = match &self.outage {
            Some(outage) => Some(outage.reason.clone()),
            None => self.gpus.get(gpu).and_then(|record| {
                let troubles = record.troubles().filter(|(extent, ..)| extent.touches(part));
                worst(troubles).map(Cow::into_owned)
            }),
        };
        // What is wrong with a GPU matters more than that it is cordoned.
        let worst = worst.or_else(|| self.cordons.get(gpu).map(ToString::to_string));
        let worst = worst.or_else(|| self.closed.get(gpu).cloned());
        DeviceHealth { healthy: worst.is_none(), reason: worst }
    }

    /// All problems of these GPUs, by GPU and extent.
    pub fn troubles<'a>(&self, gpus: impl Iterator<Item = &'a GpuUuid>) -> Vec<Trouble> {
        let trouble = |gpu: &GpuUuid, extent, (cause, xid), reason: &str| Trouble {
            gpu: gpu.clone().into(),
            extent,
            cause,
            xid,
            reason: reason.to_owned(),
        };
        gpus.flat_map(|gpu| match &self.outage {
            Some(outage) => vec![trouble(gpu, Extent::Gpu, (outage.cause(), None), &outage.reason)],
            None => {
                let record = self.gpus.get(gpu);
                let troubles = record.into_iter().flat_map(Record::troubles);
                troubles.map(|(extent, kind, reason)| trouble(gpu, extent, kind, &reason)).collect()
            }
        })
        .collect()
    }

    /// What is wrong with these GPUs without making them unhealthy, by GPU.
    pub fn notices<'a>(&self, gpus: impl Iterator<Item = &'a GpuUuid>) -> Vec<Trouble> {
        if self.outage.is_some() {
            return Vec::new();
        }
        gpus.filter_map(|gpu| Some((gpu, self.gpus.get(gpu)?)))
            .flat_map(|(gpu, record)| {
                let notices = record.notices.iter().cloned().chain(record.links_down());
                notices.map(|(cause, reason)| Trouble {
                    gpu: gpu.clone().into(),
                    extent: Extent::Gpu,
                    cause,
                    xid: None,
                    reason,
                })
            })
            .collect()
    }

    /// Those of these GPUs that are cordoned, each with the reason.
    pub fn cordoned<'a>(&self, gpus: impl Iterator<Item = &'a GpuUuid>) -> BTreeMap<GpuUuid, String> {
        gpus.filter_map(|gpu| Some((gpu.clone(), self.cordons.get(gpu)?.to_string()))).collect()
    }

    /// The faults in stored form, by GPU and extent.
    pub fn faults(&self, boot_id: &str) -> Vec<GpuFault> {
        self.gpus
            .iter()
            .flat_map(|(gpu, record)| record.faults.values().map(|fault| fault.stored(gpu, boot_id)))
            .collect()
    }

    /// GPUs with faults.
    pub fn faulty(&self) -> impl Iterator<Item = &GpuUuid> {
        let gpus = self.gpus.iter();
        gpus.filter(|(_, record)| !record.faults.is_empty()).map(|(gpu, _)| gpu)
    }

    /// Returns the faults cleared since the last call.
    pub fn take_ended(&mut self) -> Vec<ClearedFault> {
        std::mem::take(&mut self.ended)
    }

    /// Checks vitals against the faults of a GPU. `known` has the latest known values in addition.
    fn examine(&mut self, gpu: &GpuUuid, vitals: Vitals, known: Vitals) {
        let Some(record) = self.gpus.get_mut(gpu) else {
            return;
        };
        let over: Vec<(Extent, Proof)> = record
            .faults
            .values()
            .filter_map(|fault| Some((fault.extent, vitals.proof(&known, &fault.evidence)?)))
            .collect();
        for fault in record.faults.values_mut() {
            vitals.add_to(&mut fault.evidence);
        }
        for (extent, proof) in over {
            self.end_where(gpu, proof, |fault| fault.extent == extent);
        }
    }

    fn end_where(&mut self, gpu: &GpuUuid, proof: Proof, over: impl Fn(&Fault) -> bool) {
        let Some(record) = self.gpus.get_mut(gpu) else {
            return;
        };
        let (gone, stay) = std::mem::take(&mut record.faults).into_iter().partition(|(_, fault)| over(fault));
        record.faults = stay;
        let gone: BTreeMap<Extent, Fault> = gone;
        for fault in gone.values() {
            self.end(gpu, fault, proof);
        }
    }

    fn end(&mut self, gpu: &GpuUuid, fault: &Fault, proof: Proof) {
        self.ended.push(ClearedFault { gpu: gpu.clone(), reason: fault.reason.clone(), proof });
    }
}

impl Record {
    /// The problems with their Xids, faults first.
    fn troubles(&self) -> impl Iterator<Item = (Extent, (Cause, Option<u64>), Cow<'_, str>)> {
        let faults = self.faults.values();
        let faults = faults
            .map(|fault| (fault.extent, (Cause::Xid(fault.class), Some(fault.xid)), self.reason(fault)));
        let lost = self.lost.iter().map(|loss| {
            let cause = if loss.off_bus { Cause::Lost } else { Cause::QueryFailed };
            (Extent::Gpu, (cause, None), Cow::from(&loss.reason))
        });
        let complaints = self.complaints.iter();
        let complaints = complaints.map(|(cause, reason)| (Extent::Gpu, (*cause, None), Cow::from(reason)));
        faults.chain(lost).chain(complaints)
    }

    /// The NVLinks that are down, unless a fault has them, the GPU is lost, or the operator accepted them.
    fn links_down(&self) -> Option<(Cause, String)> {
        let most = self.links.max(self.peer_links?);
        let now = self.links_now;
        let is_reported = self.faults.values().any(|fault| fault.class.touches_links());
        if now >= most || is_reported || self.lost.is_some() || self.accepted_links == Some(now) {
            return None;
        }
        let reason = format!(
            "{} of {most} NVLinks down; see nvidia-smi nvlink -s, dmesg and the log of nvidia-fabricmanager, then reset the GPUs",
            most - now
        );
        Some((Cause::LinksDown, reason))
    }

    /// The reason of a fault, with the number of links that are down for a link fault.
    fn reason<'a>(&self, fault: &'a Fault) -> Cow<'a, str> {
        match fault.evidence.links_before {
            Some(before) if fault.class.touches_links() && self.links_now < before => {
                Cow::from(format!("{}; {} of {before} NVLinks down", fault.reason, before - self.links_now))
            }
            _ => Cow::from(&fault.reason),
        }
    }
}

/// The reason of the worst cause; the first one of equals.
fn worst<'a>(
    troubles: impl Iterator<Item = (Extent, (Cause, Option<u64>), Cow<'a, str>)>,
) -> Option<Cow<'a, str>> {
    let mut worst: Option<(Cause, Cow<'_, str>)> = None;
    for (_, (cause, _), reason) in troubles {
        if worst.as_ref().is_none_or(|(known, _)| *known < cause) {
            worst = Some((cause, reason));
        }
    }
    worst.map(|(_, reason)| reason)
}

#[cfg(test)]
mod tests;
