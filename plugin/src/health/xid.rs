//! Counts of Xids. Their classes are in [`gantry_api::xid`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use gantry_topology::GpuUuid;

/// Counts of Xids per GPU since the daemon started, for metrics; Xids without consequences included. The NVML thread writes
/// them. Clones share the counts.
#[derive(Debug, Clone, Default)]
pub struct XidCounts(Arc<Mutex<XidCounters>>);

#[derive(Debug, Default)]
struct XidCounters {
    counts: BTreeMap<(GpuUuid, u64), u64>,
    last: BTreeMap<GpuUuid, u64>,
}

impl XidCounts {
    /// Counts one Xid and returns the new count.
    pub fn count(&self, gpu: &GpuUuid, xid: u64) -> u64 {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counted.last.insert(gpu.clone(), xid);
        let count = counted.counts.entry((gpu.clone(), xid)).or_default();
        *count += 1;
        *count
    }

    /// All counts: GPU, Xid, count.
    pub fn all(&self) -> Vec<(GpuUuid, u64, u64)> {
        let counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counted.counts.iter().map(|((gpu, xid), count)| (gpu.clone(), *xid, *count)).collect()
    }

    /// The last Xid of each GPU that had one.
    pub fn last(&self) -> BTreeMap<GpuUuid, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).last.clone()
    }
}
