//! The index with its lock and its published snapshot. Decisions read the snapshot and never wait; whoever has news takes the lock,
//! feeds the index and publishes.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use tokio::sync::Notify;

use super::Index;
use crate::snapshot::Snapshot;

/// The shared index.
#[derive(Debug)]
pub struct Store {
    index: Mutex<Index>,
    snapshot: ArcSwap<Snapshot>,
    gained: Notify,
}

impl Store {
    /// Shares an index.
    pub fn new(mut index: Index) -> Self {
        let snapshot = index.publish().unwrap_or_default();
        Self {
            index: Mutex::new(index),
            snapshot: ArcSwap::from_pointee(snapshot),
            gained: Notify::new(),
        }
    }

    /// The cluster now.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    /// Changes the index and publishes what follows.
    pub fn update<R>(&self, change: impl FnOnce(&mut Index) -> R) -> R {
        // A poisoned lock is one whose holder panicked. The index holds no broken promises between two calls; go on.
        let mut index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut index);
        if let Some(snapshot) = index.publish() {
            self.snapshot.store(Arc::new(snapshot));
        }
        if index.has_gains() {
            self.gained.notify_one();
        }
        result
    }

    /// Reads the index.
    pub fn read<R>(&self, look: impl FnOnce(&Index) -> R) -> R {
        look(&self.index.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until GPUs came free while pods are parked.
    pub async fn gained(&self) {
        self.gained.notified().await;
    }
}
