//! How often each Xid was raised on each GPU, those that change nothing included: for metrics. Written by the owner of the
//! inventory, read by anyone.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use gantry_topology::GpuUuid;

/// Counts of Xids since the daemon started. Clones share the counts.
#[derive(Debug, Clone, Default)]
pub struct XidCounts(Arc<Mutex<BTreeMap<(GpuUuid, u64), u64>>>);

impl XidCounts {
    /// Counts one.
    pub fn count(&self, gpu: &GpuUuid, xid: u64) -> u64 {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry((gpu.clone(), xid)).or_default();
        *count += 1;
        *count
    }

    /// All counts: GPU, Xid, how often.
    pub fn all(&self) -> Vec<(GpuUuid, u64, u64)> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts
            .iter()
            .map(|((gpu, xid), count)| (gpu.clone(), *xid, *count))
            .collect()
    }
}
