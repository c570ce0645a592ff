//! The record of what is wrong with each GPU and with NVML as a whole. Pure bookkeeping: what happened comes in, health with a
//! reason comes out, and equal records give equal reasons. A fault leaves the record only with a proof.

use std::borrow::Cow;
use std::collections::BTreeMap;

use gantry_api::{DeviceHealth, FaultEvidence, GpuFault};
use gantry_topology::{GpuUuid, Mig};

use super::cause::{Cause, Ended, Loss, Outage, OutageKind, Proof, Trouble};
use super::fault::Part;
use super::{Class, Extent, Fault, HealthChecks, Table, Vitals};

/// What is wrong, by GPU and as a whole.
#[derive(Debug, Clone, Default)]
pub struct Book {
    gpus: BTreeMap<GpuUuid, Record>,
    outage: Option<Outage>,
    /// Whether the driver has been gone since NVML worked last.
    was_gone: bool,
    /// Faults that ended since they were last asked for.
    ended: Vec<Ended>,
}

/// What is wrong with one GPU.
#[derive(Debug, Clone, Default)]
struct Record {
    /// By extent; on equal extents the worst class, and of equals the first, so that the reason does not flap.
    faults: BTreeMap<Extent, Fault>,
    lost: Option<Loss>,
    /// What it last said, of each thing when it was last asked with success.
    vitals: Option<Vitals>,
    complaints: Vec<(Cause, String)>,
    /// Most NVLinks seen up since the daemon started, the driver was loaded anew, or a person lifted the quarantine.
    links: u8,
    /// NVLinks up at the last reading.
    links_now: u8,
    /// A link's Xid for which the driver asks nothing, and how many readings may still show that links went down with it.
    suspect: Option<(Fault, u8)>,
}

/// Readings that are held against a link's Xid: the one that it causes, and one more, should NVML be late to show a link down.
const READINGS: u8 = 2;

impl Book {
    /// Records a fault. Of several on the same part of a GPU the worst class stands, and of equals the first. True: this one stands.
    pub fn fault(&mut self, gpu: &GpuUuid, mut fault: Fault) -> bool {
        let record = self.gpus.entry(gpu.clone()).or_default();
        if let Some(vitals) = &record.vitals {
            vitals.add_to(&mut fault.evidence);
        }
        let known = record.faults.get(&fault.extent);
        let stands = known.is_none_or(|known| known.class < fault.class);
        if stands {
            record.faults.insert(fault.extent, fault);
        }
        stands
    }

    /// Records a link's Xid that is a fault only if links went down with it, which the next readings show. Of several the first stands.
    pub fn suspect(&mut self, gpu: &GpuUuid, fault: Fault) {
        let record = self.gpus.entry(gpu.clone()).or_default();
        let first = record.suspect.take().map_or(fault, |(first, _)| first);
        record.suspect = Some((first, READINGS));
    }

    /// Whether a GPU's driver tells what it asks for to bring the GPU back, as those from 560 on do.
    pub fn tells_wishes(&self, gpu: &GpuUuid) -> bool {
        let vitals = self.gpus.get(gpu).and_then(|record| record.vitals);
        vitals.is_some_and(|vitals| vitals.action.is_some())
    }

    /// Records what the GPU said when a fault had just begun. What it had said last may be from before a reset, which would prove this
    /// fault over at once.
    pub fn begins(&mut self, gpu: &GpuUuid, extent: Extent, vitals: &Vitals) {
        let record = self.gpus.get_mut(gpu);
        if let Some(fault) = record.and_then(|record| record.faults.get_mut(&extent)) {
            fault.evidence = FaultEvidence::default();
            vitals.add_to(&mut fault.evidence);
        }
    }

    /// Records in which MIG device a fault is: in another one than was known when it began.
    pub fn is_in(&mut self, gpu: &GpuUuid, extent: Extent, mig_device: &str) {
        let record = self.gpus.get_mut(gpu);
        if let Some(fault) = record.and_then(|record| record.faults.get_mut(&extent)) {
            fault.mig_device = Some(mig_device.to_owned());
        }
    }

    /// Takes in the faults that an earlier run recorded in the same boot; those of another boot are over. Each counts as its Xid would
    /// count now, by `table` and `checks`: the class that is stored may be due to a setting of then, and holds only for an Xid that
    /// `table` does not have. What is known of the GPUs now is held against them at once.
    pub fn adopt(&mut self, stored: Vec<GpuFault>, boot_id: &str, table: &Table, checks: &HealthChecks) {
        for one in stored {
            // Without a boot id nobody can tell: then they stand.
            let rebooted = !boot_id.is_empty() && !one.boot_id.is_empty() && one.boot_id != boot_id;
            let Some((gpu, fault)) = Fault::read(one) else {
                continue;
            };
            if rebooted {
                self.end(&gpu, &fault, Proof::Rebooted);
                continue;
            }
            let class = match (table.get(fault.xid), fault.class) {
                // What made it a fault is not in the table: that links went down, or that the driver says nothing.
                (Some(xid), Class::Link { reset: true }) if xid.class.touches_links() => fault.class,
                (Some(xid), _) => xid.class,
                (None, stored) => stored,
            };
            let judged = checks.judge(fault.xid, class);
            // Disabled since, or enabled no longer: an operator's way to end it.
            let Some(class) = judged.filter(|class| class.is_unhealthy()) else {
                self.end(&gpu, &fault, Proof::Lifted);
                continue;
            };
            let record = self.gpus.entry(gpu.clone()).or_default();
            if let Some(proof) = record
                .vitals
                .and_then(|vitals| vitals.proof(&vitals, &fault.evidence))
            {
                self.end(&gpu, &fault, proof);
                continue;
            }
            let known = record.faults.get(&fault.extent);
            if known.is_none_or(|known| known.class < class) {
                // A reset before the newer fault proves neither over.
                let evidence = known.map_or(fault.evidence, |known| known.evidence);
                let fault = Fault {
                    class,
                    evidence,
                    ..fault
                };
                record.faults.insert(fault.extent, fault);
            }
            if let Some(vitals) = record.vitals {
                self.examine(&gpu, vitals, vitals);
            }
        }
    }

    /// Records that a GPU cannot be reached. The first reason stands while it is out of reach.
    pub fn lost(&mut self, gpu: &GpuUuid, loss: Loss) {
        let record = self.gpus.entry(gpu.clone()).or_default();
        match &mut record.lost {
            Some(known) => known.off_bus |= loss.off_bus,
            None => record.lost = Some(loss),
        }
        // What it said last no longer holds, and what it says next may prove a reset only against the faults' evidence.
        record.vitals = None;
        record.complaints.clear();
    }

    /// Records that a GPU answers. If it was off the bus, it has been reset meanwhile: what was wrong before is over.
    pub fn answers(&mut self, gpu: &GpuUuid) {
        let Some(record) = self.gpus.get_mut(gpu) else {
            return;
        };
        if record.lost.take().is_some_and(|loss| loss.off_bus) {
            self.end_where(gpu, Proof::Answers, |_| true);
        }
    }

    /// Records what a GPU says of its state, and ends the faults that this proves to be over.
    pub fn vitals(&mut self, gpu: &GpuUuid, vitals: Vitals, checks: &HealthChecks) {
        let record = self.gpus.entry(gpu.clone()).or_default();
        let known = vitals.over(record.vitals.as_ref());
        record.vitals = Some(known);
        record.complaints = known.complaints(checks);
        self.examine(gpu, vitals, known);
    }

    /// Records how many NVLinks of a GPU are up. Fewer than before make a fault of a link's Xid; it is over once those that were up
    /// before are up again.
    pub fn links(&mut self, gpu: &GpuUuid, up: u8) {
        let record = self.gpus.entry(gpu.clone()).or_default();
        record.links = record.links.max(up);
        record.links_now = up;
        let most = record.links;
        match record.suspect.take() {
            Some((fault, _)) if up < most => {
                self.fault(gpu, fault);
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

    /// Records how a GPU is cut. A fault of a MIG instance that is gone is over with it.
    pub fn cut(&mut self, gpu: &GpuUuid, mig: Option<&Mig>) {
        self.end_where(gpu, Proof::InstanceGone, |fault| {
            !fault.extent.is_there(mig, fault.mig_device.as_deref())
        });
    }

    /// Ends the quarantine of GPUs for which `chosen` holds, because a person says so.
    pub fn lift(&mut self, chosen: impl Fn(&GpuUuid) -> bool) {
        let gpus: Vec<GpuUuid> = self.gpus.keys().filter(|gpu| chosen(gpu)).cloned().collect();
        for gpu in gpus {
            self.end_where(&gpu, Proof::Lifted, |_| true);
            // Who lets a GPU go on with fewer links does so for good: another Xid alone does not count them again.
            if let Some(record) = self.gpus.get_mut(&gpu) {
                record.links = record.links_now;
            }
        }
    }

    /// Records that nothing can be known. The latest reason is the one to act on: a driver that is back under an NVML that fails is not
    /// gone. That it was gone still proves a reset once NVML works.
    pub fn outage(&mut self, outage: Outage) {
        self.was_gone |= outage.kind == OutageKind::DriverGone;
        self.outage = Some(outage);
    }

    /// Why nothing can be known now.
    pub fn outage_now(&self) -> Option<&Outage> {
        self.outage.as_ref()
    }

    /// Records that NVML answers, and, if `hears`, that it can be waited for: only then does it work again after it failed. If the
    /// driver was gone, every GPU has been reset; those that do not answer are recorded next. True: it was.
    pub fn works(&mut self, hears: bool) -> bool {
        let reloaded = std::mem::take(&mut self.was_gone);
        if reloaded || hears {
            self.outage = None;
        }
        if reloaded {
            for gpu in self.gpus.keys().cloned().collect::<Vec<_>>() {
                self.end_where(&gpu, Proof::DriverReloaded, |_| true);
            }
            for record in self.gpus.values_mut() {
                record.lost = None;
                // Said before the reset.
                record.vitals = None;
                // What a link led to may have been taken out.
                record.links = 0;
            }
        }
        reloaded
    }

    /// Whether a part of a GPU may be given out, and if not, why.
    pub fn health(&self, gpu: &GpuUuid, part: Part) -> DeviceHealth {
        let worst = match &self.outage {
            Some(outage) => Some(outage.reason.clone()),
            None => self.gpus.get(gpu).and_then(|record| {
                let troubles = record.troubles().filter(|(extent, ..)| extent.touches(part));
                worst(troubles).map(Cow::into_owned)
            }),
        };
        DeviceHealth {
            healthy: worst.is_none(),
            reason: worst,
        }
    }

    /// Everything that is wrong with these GPUs, by GPU and extent.
    pub fn troubles<'a>(&self, gpus: impl Iterator<Item = &'a GpuUuid>) -> Vec<Trouble> {
        let trouble = |gpu: &GpuUuid, extent, cause, reason: &str| Trouble {
            gpu: gpu.clone().into(),
            extent,
            cause,
            reason: reason.to_owned(),
        };
        gpus.flat_map(|gpu| match &self.outage {
            Some(outage) => vec![trouble(gpu, Extent::Gpu, outage.cause(), &outage.reason)],
            None => {
                let record = self.gpus.get(gpu);
                let troubles = record.into_iter().flat_map(Record::troubles);
                troubles
                    .map(|(extent, cause, reason)| trouble(gpu, extent, cause, &reason))
                    .collect()
            }
        })
        .collect()
    }

    /// The faults as they are to be stored, by GPU and extent.
    pub fn faults(&self, boot_id: &str) -> Vec<GpuFault> {
        self.gpus
            .iter()
            .flat_map(|(gpu, record)| record.faults.values().map(|fault| fault.stored(gpu, boot_id)))
            .collect()
    }

    /// GPUs with faults.
    pub fn faulty(&self) -> impl Iterator<Item = &GpuUuid> {
        let gpus = self.gpus.iter();
        gpus.filter(|(_, record)| !record.faults.is_empty())
            .map(|(gpu, _)| gpu)
    }

    /// Faults that ended since this was last asked.
    pub fn ended(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.ended)
    }

    /// Holds what a GPU says against its faults, and what is `known` of it besides.
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
        let (gone, stay) = std::mem::take(&mut record.faults)
            .into_iter()
            .partition(|(_, fault)| over(fault));
        record.faults = stay;
        let gone: BTreeMap<Extent, Fault> = gone;
        for fault in gone.values() {
            self.end(gpu, fault, proof);
        }
    }

    fn end(&mut self, gpu: &GpuUuid, fault: &Fault, proof: Proof) {
        self.ended.push(Ended {
            gpu: gpu.clone(),
            reason: fault.reason.clone(),
            proof,
        });
    }
}

impl Record {
    /// What is wrong, faults first.
    fn troubles(&self) -> impl Iterator<Item = (Extent, Cause, Cow<'_, str>)> {
        let faults = self.faults.values();
        let faults = faults.map(|fault| (fault.extent, Cause::Xid(fault.class), self.reason(fault)));
        let lost = self
            .lost
            .iter()
            .map(|loss| (Extent::Gpu, Cause::Lost, Cow::from(&loss.reason)));
        let complaints = self.complaints.iter();
        let complaints = complaints.map(|(cause, reason)| (Extent::Gpu, *cause, Cow::from(reason)));
        faults.chain(lost).chain(complaints)
    }

    /// The reason of a fault, with the links that are down since a link's.
    fn reason<'a>(&self, fault: &'a Fault) -> Cow<'a, str> {
        match fault.evidence.links_before {
            Some(before) if fault.class.touches_links() && self.links_now < before => Cow::from(format!(
                "{}; {} of {before} NVLinks down",
                fault.reason,
                before - self.links_now
            )),
            _ => Cow::from(&fault.reason),
        }
    }
}

/// The reason of the worst cause, and of equals the first.
fn worst<'a>(troubles: impl Iterator<Item = (Extent, Cause, Cow<'a, str>)>) -> Option<Cow<'a, str>> {
    let mut worst: Option<(Cause, Cow<'_, str>)> = None;
    for (_, cause, reason) in troubles {
        if worst.as_ref().is_none_or(|(known, _)| *known < cause) {
            worst = Some((cause, reason));
        }
    }
    worst.map(|(_, reason)| reason)
}

#[cfg(test)]
#[path = "book_tests.rs"]
mod tests;
