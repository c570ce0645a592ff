//! Counts of Xids per GPU for metrics, including those without consequences. The NVML thread writes them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use gantry_topology::GpuUuid;

/// Counts of Xids since the daemon started. Clones share the counts.
#[derive(Debug, Clone, Default)]
pub struct XidCounts(Arc<Mutex<BTreeMap<(GpuUuid, u64), u64>>>);

impl XidCounts {
    /// Counts one Xid and returns the new count.
    pub fn count(&self, gpu: &GpuUuid, xid: u64) -> u64 {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry((gpu.clone(), xid)).or_default();
        *count += 1;
        *count
    }

    /// All counts: GPU, Xid, count.
    pub fn all(&self) -> Vec<(GpuUuid, u64, u64)> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts
            .iter()
            .map(|((gpu, xid), count)| (gpu.clone(), *xid, *count))
            .collect()
    }
}
