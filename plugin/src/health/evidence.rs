//! Collects what speaks for the replacement of a board: Xids, remapped rows, resets. Pure; continues from what an earlier run
//! stored.

use std::collections::BTreeMap;

use gantry_api::{GpuEvidence, RemappedRowsEvidence, ResetEvidence, XidEvidence};
use gantry_topology::{GpuUuid, Machine};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::Class;
use crate::nvml::RemappedRows;

/// The evidence of all GPUs.
#[derive(Debug, Clone, Default)]
pub struct EvidenceLog {
    gpus: BTreeMap<GpuUuid, GpuEvidence>,
    /// Whether something was added that should be stored at once: an Xid that is new to its GPU, remapped rows, a reset. A
    /// broken application raises the same Xid thousands of times.
    is_urgent: bool,
}

impl EvidenceLog {
    /// Counts an Xid, with its class by the operator's selection; `None` if it is not watched.
    pub fn record_xid(&mut self, gpu: &GpuUuid, (xid, judged): (u64, Option<Class>), now: Timestamp) {
        let judged = judged.map_or_else(String::new, |class| class.to_string());
        let xids = &mut self.entry(gpu, now).xids;
        if let Some(known) = xids.iter_mut().find(|known| known.xid == xid) {
            known.count = known.count.saturating_add(1);
            known.last = Time(now);
            known.judged = judged;
            return;
        }
        xids.push(XidEvidence { xid, count: 1, last: Time(now), judged });
        limit(xids);
        self.is_urgent = true;
    }

    /// Records the remapped rows of a GPU.
    pub fn record_rows(&mut self, gpu: &GpuUuid, rows: RemappedRows, now: Timestamp) {
        let found = (rows.corrected, rows.uncorrected, rows.failed);
        let known = self.gpus.get(gpu).and_then(|entry| entry.remapped_rows.as_ref());
        let known = known.map(|known| (known.correctable, known.uncorrectable, known.failed));
        if known.unwrap_or_default() == found {
            return;
        }
        self.entry(gpu, now).remapped_rows = Some(RemappedRowsEvidence {
            correctable: rows.corrected,
            uncorrectable: rows.uncorrected,
            failed: rows.failed,
            since: Time(now),
        });
        self.is_urgent = true;
    }

    /// Counts a reset that ended faults.
    pub fn record_reset(&mut self, gpu: &GpuUuid, now: Timestamp) {
        let resets = &mut self.entry(gpu, now).resets;
        let count = resets.as_ref().map_or(0, |resets| resets.count).saturating_add(1);
        *resets = Some(ResetEvidence { count, last: Time(now) });
        self.is_urgent = true;
    }

    /// Adds what an earlier run stored.
    pub fn adopt(&mut self, stored: Vec<GpuEvidence>) {
        for one in stored {
            let Ok(gpu) = one.gpu.parse::<GpuUuid>() else {
                continue;
            };
            let Some(entry) = self.gpus.get_mut(&gpu) else {
                self.gpus.insert(gpu, one);
                continue;
            };
            entry.since = entry.since.clone().min(one.since);
            entry.serial = entry.serial.take().or(one.serial);
            for before in one.xids {
                match entry.xids.iter_mut().find(|known| known.xid == before.xid) {
                    Some(known) => known.count = known.count.saturating_add(before.count),
                    None => entry.xids.push(before),
                }
            }
            limit(&mut entry.xids);
            entry.resets = match (entry.resets.take(), one.resets) {
                (Some(now), Some(before)) => {
                    Some(ResetEvidence { count: now.count.saturating_add(before.count), ..now })
                }
                (now, before) => now.or(before),
            };
            let same = |rows: &RemappedRowsEvidence| (rows.correctable, rows.uncorrectable, rows.failed);
            entry.remapped_rows = match (entry.remapped_rows.take(), one.remapped_rows) {
                (Some(now), Some(before)) if same(&now) == same(&before) => Some(before),
                (now, before) => now.or(before),
            };
        }
        self.is_urgent = true;
    }

    /// Whether something should be stored at once.
    pub fn is_urgent(&self) -> bool {
        self.is_urgent
    }

    /// The evidence in stored form, by GPU, with the serial numbers of this machine.
    pub fn entries(&mut self, machine: Option<&Machine>) -> Vec<GpuEvidence> {
        self.is_urgent = false;
        let gpus = machine.map_or(&[][..], Machine::gpus);
        let present = |gpu: &GpuUuid| gpus.iter().find(|known| known.uuid.as_ref() == Some(gpu));
        for (gpu, entry) in &mut self.gpus {
            if let Some(serial) = present(gpu).and_then(|known| known.serial.clone()) {
                entry.serial = Some(serial);
            }
        }
        while self.gpus.len() > GpuEvidence::MAX_GPUS {
            let first = self.gpus.iter().min_by_key(|(gpu, entry)| (present(gpu).is_some(), entry.last().0));
            let Some(gpu) = first.map(|(gpu, _)| gpu.clone()) else {
                break;
            };
            self.gpus.remove(&gpu);
        }
        self.gpus.values().cloned().collect()
    }

    fn entry(&mut self, gpu: &GpuUuid, now: Timestamp) -> &mut GpuEvidence {
        self.gpus.entry(gpu.clone()).or_insert_with(|| GpuEvidence {
            gpu: gpu.to_string(),
            serial: None,
            since: Time(now),
            xids: Vec::new(),
            remapped_rows: None,
            resets: None,
        })
    }
}

/// Keeps the latest Xids, by number.
fn limit(xids: &mut Vec<XidEvidence>) {
    xids.sort_by_key(|xid| std::cmp::Reverse(xid.last.0));
    xids.truncate(GpuEvidence::MAX_XIDS);
    xids.sort_by_key(|xid| xid.xid);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn gpu(name: &str) -> GpuUuid {
        name.parse().unwrap()
    }

    fn rows(uncorrected: u32, failed: bool) -> RemappedRows {
        RemappedRows { corrected: 0, uncorrected, pending: false, failed }
    }

    fn xids(entry: &GpuEvidence) -> Vec<(u64, u64, i64)> {
        entry.xids.iter().map(|xid| (xid.xid, xid.count, xid.last.0.as_second())).collect()
    }

    /// A healthy node stores nothing.
    #[test]
    fn gpu_without_incident_has_no_evidence() {
        let mut log = EvidenceLog::default();
        log.record_rows(&gpu("GPU-a"), rows(0, false), at(1));
        assert_eq!(log.entries(None), []);
    }

    #[test]
    fn restart_continues_the_counts() {
        let mut before = EvidenceLog::default();
        before.record_xid(&gpu("GPU-a"), (79, None), at(1));
        before.record_xid(&gpu("GPU-a"), (48, None), at(2));
        before.record_rows(&gpu("GPU-a"), rows(1, false), at(2));
        before.record_reset(&gpu("GPU-a"), at(3));
        before.record_xid(&gpu("GPU-b"), (13, None), at(3));
        // The next run counts before the API server responds.
        let mut after = EvidenceLog::default();
        after.record_rows(&gpu("GPU-a"), rows(1, false), at(9));
        after.record_xid(&gpu("GPU-a"), (79, None), at(10));
        after.record_reset(&gpu("GPU-a"), at(11));
        after.adopt(before.entries(None));
        assert!(after.is_urgent());
        let stored = after.entries(None);
        assert_eq!(stored.len(), 2);
        assert_eq!(xids(&stored[0]), [(48, 1, 2), (79, 2, 10)]);
        assert_eq!(stored[0].since, Time(at(1)));
        assert_eq!(stored[0].resets, Some(ResetEvidence { count: 2, last: Time(at(11)) }));
        assert_eq!(stored[0].remapped_rows.as_ref().unwrap().since, Time(at(2)), "unchanged since then");
        assert_eq!(xids(&stored[1]), [(13, 1, 3)]);
    }

    #[test]
    fn repeated_xid_is_not_urgent() {
        let mut log = EvidenceLog::default();
        log.record_xid(&gpu("GPU-a"), (13, None), at(1));
        assert!(log.is_urgent());
        log.entries(None);
        log.record_xid(&gpu("GPU-a"), (13, None), at(2));
        assert!(!log.is_urgent());
        log.record_rows(&gpu("GPU-a"), rows(1, true), at(3));
        assert!(log.is_urgent());
        let entries = log.entries(None);
        assert_eq!(xids(&entries[0]), [(13, 2, 2)]);
        assert!(entries[0].remapped_rows.as_ref().unwrap().failed);
    }

    /// Rules of remediation count Xids that leave the GPU healthy, unless the operator's selection excludes them.
    #[test]
    fn xid_has_its_class_by_the_last_selection() {
        let mut log = EvidenceLog::default();
        log.record_xid(&gpu("GPU-a"), (94, Some(Class::Application)), at(1));
        assert_eq!(log.entries(None)[0].xids[0].judged, "application");
        log.record_xid(&gpu("GPU-a"), (94, None), at(2));
        assert_eq!(log.entries(None)[0].xids[0].judged, "");
    }

    #[test]
    fn latest_xids_and_present_gpus_are_kept() {
        let mut log = EvidenceLog::default();
        for xid in 1..=100 {
            log.record_xid(&gpu("GPU-a"), (xid, None), at(i64::try_from(xid).unwrap()));
        }
        let kept = xids(&log.entries(None)[0]);
        assert_eq!((kept.len(), kept[0].0, kept[31].0), (32, 69, 100));

        let present = gantry_topology::Gpu {
            uuid: Some(gpu("GPU-a")),
            serial: Some("165".to_owned()),
            ..Default::default()
        };
        let machine = Machine::new(gantry_topology::MachineParts {
            paths: gantry_topology::PathMatrix::from_fn(1, |_, _| gantry_topology::PathClass::Sys),
            gpus: vec![present],
            ..Default::default()
        });
        for other in 0..200 {
            log.record_xid(&gpu(&format!("GPU-b{other}")), (79, None), at(1000 + other));
        }
        let kept = log.entries(Some(&machine.unwrap()));
        assert_eq!(kept.len(), GpuEvidence::MAX_GPUS);
        assert_eq!((kept[0].gpu.as_str(), kept[0].serial.as_deref()), ("GPU-a", Some("165")));
        assert!(kept.iter().any(|entry| entry.gpu == "GPU-b199"));
        assert!(kept.iter().all(|entry| entry.gpu != "GPU-b0"));
    }
}
