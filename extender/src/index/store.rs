//! The index with its lock and its published snapshot. Decisions read the snapshot and never wait; whoever has news takes the lock, feeds
//! the index and publishes. Gangs are planned under the same lock: by whoever brings news ([`Store::update`]), and never by a call about a
//! pod by itself, which only notes something ([`Store::note`]) and leaves the plans to [`Store::plan`]; such a call waits, if at all, for
//! the change that is being made just then. The only reader of the clock on the index's behalf.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use gantry_gang::GangKey;
use gantry_gang::protocol::Now;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::Index;
use crate::snapshot::Snapshot;

/// Gangs planned in the tail of one change; the rest has its turn right after it, so that nobody waits for all of them.
const PLANS: usize = 2;
/// Plan times kept until somebody takes them.
const TIMES: usize = 4096;

/// Tells the time.
pub type Clock = Box<dyn Fn() -> Now + Send + Sync>;

/// The shared index.
pub struct Store {
    index: Mutex<Index>,
    snapshot: ArcSwap<Snapshot>,
    clock: Clock,
    gained: Notify,
    called: Notify,
    deferred: Notify,
    work: Notify,
    unplanned: Notify,
    notifiers: Mutex<HashMap<Arc<GangKey>, Arc<Notify>>>,
    plan_times: Mutex<Vec<Duration>>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

/// The time of this machine.
pub fn system_clock() -> Now {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Now {
        at: Instant::now(),
        unix: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
    }
}

impl Store {
    /// Shares an index, by the time of this machine.
    pub fn new(index: Index) -> Self {
        Self::with_clock(index, Box::new(system_clock))
    }

    /// Shares an index, by another clock.
    pub fn with_clock(mut index: Index, clock: Clock) -> Self {
        index.at(clock());
        index.publish();
        Self {
            snapshot: ArcSwap::new(Arc::clone(index.snapshot())),
            index: Mutex::new(index),
            clock,
            gained: Notify::new(),
            called: Notify::new(),
            deferred: Notify::new(),
            work: Notify::new(),
            unplanned: Notify::new(),
            notifiers: Mutex::default(),
            plan_times: Mutex::default(),
        }
    }

    /// The cluster now.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    /// Changes the index, plans gangs that can be planned, and publishes what follows.
    pub fn update<R>(&self, change: impl FnOnce(&mut Index) -> R) -> R {
        let mut index = self.lock();
        index.at((self.clock)());
        let result = change(&mut index);
        self.follow_up(&mut index);
        result
    }

    /// Changes the index and publishes what follows, for somebody who waits for an answer that no plan of a gang has a part in: what can be
    /// planned now is left to [`Store::plan`].
    pub fn note<R>(&self, change: impl FnOnce(&mut Index) -> R) -> R {
        let mut index = self.lock();
        index.at((self.clock)());
        let result = change(&mut index);
        let changed = index.publish();
        self.tell(&mut index, changed);
        result
    }

    /// Whether a change has panicked midway: nobody reads or changes the index any more.
    pub fn is_broken(&self) -> bool {
        self.index.is_poisoned()
    }

    /// Reads the index.
    pub fn read<R>(&self, look: impl FnOnce(&Index) -> R) -> R {
        look(&self.lock())
    }

    /// Waits until GPUs came free while pods are parked.
    pub async fn gained(&self) {
        self.gained.notified().await;
    }

    /// Waits until members of gangs are to be woken ([`Index::take_called`]).
    pub async fn called(&self) {
        self.called.notified().await;
    }

    /// Waits until members of gangs are to be bound though nobody calls for them ([`Index::take_deferred`]).
    pub async fn deferred(&self) {
        self.deferred.notified().await;
    }

    /// Waits until there is work for gangs, or statuses of gangs to be written ([`Index::take_work`], [`Index::take_statuses`]).
    pub async fn work(&self) {
        self.work.notified().await;
    }

    /// Plans what changes and notes left unplanned, until `shutdown`.
    pub async fn plan(&self, shutdown: CancellationToken) {
        while shutdown
            .run_until_cancelled(self.unplanned.notified())
            .await
            .is_some()
        {
            self.update(|_| ());
            tokio::task::yield_now().await;
        }
    }

    /// What is notified whenever a gang's standing changes.
    pub fn notifier(&self, gang: &Arc<GangKey>) -> Arc<Notify> {
        let mut notifiers = self.notifiers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notifier) = notifiers.get(gang) {
            return Arc::clone(notifier);
        }
        notifiers.retain(|_, notifier| Arc::strong_count(notifier) > 1);
        let notifier = Arc::new(Notify::new());
        notifiers.insert(Arc::clone(gang), Arc::clone(&notifier));
        notifier
    }

    /// Takes how long each plan took since the last call.
    pub fn take_plan_times(&self) -> Vec<Duration> {
        std::mem::take(&mut self.plan_times.lock().unwrap_or_else(PoisonError::into_inner))
    }

    #[expect(
        clippy::expect_used,
        reason = "a panic midway may have left a device with two pods; whatever comes by ends too, the watches among it and with them the \
                  process, and the next one builds the index anew"
    )]
    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index
            .lock()
            .expect("a change of the index has panicked; it is built anew by the next process")
    }

    fn follow_up(&self, index: &mut Index) {
        let mut changed = index.publish();
        let mut planned = 0;
        while planned < PLANS {
            let began = Instant::now();
            if !index.plan_next() {
                break;
            }
            self.planned(began.elapsed());
            changed |= index.publish();
            planned += 1;
        }
        self.tell(index, changed);
    }

    /// Shows the snapshot, if it is another one, and rings for all there is to do.
    fn tell(&self, index: &mut Index, changed: bool) {
        if changed {
            self.snapshot.store(Arc::clone(index.snapshot()));
        }
        for gang in index.take_moved() {
            let notifiers = self.notifiers.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(notifier) = notifiers.get(&gang) {
                notifier.notify_waiters();
            }
        }
        for (due, notify) in [
            (index.has_gains(), &self.gained),
            (index.has_called(), &self.called),
            (index.has_deferred(), &self.deferred),
            (index.has_work(), &self.work),
            (index.has_unplanned(), &self.unplanned),
        ] {
            if due {
                notify.notify_one();
            }
        }
    }

    fn planned(&self, took: Duration) {
        let mut times = self.plan_times.lock().unwrap_or_else(PoisonError::into_inner);
        if times.len() < TIMES {
            times.push(took);
        }
    }
}

#[cfg(test)]
mod tests;
