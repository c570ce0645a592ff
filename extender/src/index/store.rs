//! The index with its lock and its published snapshot. Each verb of the extender API is one step under the lock
//! ([`Store::filter`], [`Store::prioritize`], [`Store::preempt`], [`Store::bind`]); events of the watches are another
//! ([`Store::update`]). Each step publishes a snapshot if it changed anything. Gangs are planned in the same step, but
//! never in one about a single pod, which waits for no plan: it leaves them to [`Store::plan`]. Only this type reads
//! the clock for the index.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use gantry_gang::GangKey;
use gantry_gang::protocol::Moment;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::verbs::FollowUp;
use super::{BindError, BindStep, Index, ReadPod, SchedulingCall, Target, UnavailableReason};
use crate::object_memory::ObjectMemory;
use crate::wire::{CandidateNodes, Offer};
use gantry_planner::decide::{self, FilterVerdict};
use gantry_planner::snapshot::Snapshot;

/// Gangs planned at the end of one step. The others are planned right after it, so that no caller waits for all of
/// them.
const PLANS: usize = 2;
/// Plan times kept until the metrics take them.
const TIMES: usize = 4096;

/// Returns the current time.
pub type Clock = Box<dyn Fn() -> Moment + Send + Sync>;

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
    memory: Arc<ObjectMemory>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("index", &self.index).finish_non_exhaustive()
    }
}

/// The time of this machine.
pub fn system_clock() -> Moment {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Moment { at: gantry_runtime::now(), unix: i64::try_from(since.as_secs()).unwrap_or(i64::MAX) }
}

impl Store {
    /// Shares an index, with the clock of this machine.
    pub fn new(index: Index) -> Self {
        Self::with_clock(index, Box::new(system_clock))
    }

    /// Shares an index, with another clock.
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
            memory: Arc::default(),
        }
    }

    /// Keeps objects within the limits of `memory`.
    #[must_use]
    pub fn with_memory(self, memory: ObjectMemory) -> Self {
        Self { memory: Arc::new(memory), ..self }
    }

    /// The memory that the objects of the index take.
    pub fn memory(&self) -> &Arc<ObjectMemory> {
        &self.memory
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

    /// Answers filter for a pod.
    ///
    /// # Errors
    /// See [`UnavailableReason`].
    pub fn filter(
        &self,
        call: &SchedulingCall<'_>,
        candidates: &CandidateNodes<'_>,
    ) -> Result<FilterVerdict, UnavailableReason> {
        let nodes = decide::locate(call.snapshot, candidates);
        self.step(|index| index.filter(call, candidates, &nodes))
    }

    /// Answers prioritize for a pod: the position of the best candidate, if there is one.
    ///
    /// # Errors
    /// See [`UnavailableReason`].
    pub fn prioritize(
        &self,
        call: &SchedulingCall<'_>,
        candidates: &CandidateNodes<'_>,
    ) -> Result<Option<u32>, UnavailableReason> {
        let nodes = decide::locate(call.snapshot, candidates);
        self.step(|index| index.prioritize(call, candidates, &nodes))
    }

    /// Answers preempt for a pod: the nodes that help it, each with its victims.
    ///
    /// # Errors
    /// See [`UnavailableReason`].
    pub fn preempt(
        &self,
        call: &SchedulingCall<'_>,
        offers: Vec<Offer>,
    ) -> Result<Vec<Offer>, UnavailableReason> {
        self.step(|index| index.preempt_single(call, offers))
    }

    /// The next step of a bind: devices are reserved for a single pod, or for a member of a decided gang. A repeated
    /// call gets the same grant. `read` is the pod where neither the watch nor a hold has it.
    ///
    /// # Errors
    /// See [`BindError`]; then nothing is reserved.
    pub fn bind(&self, target: &Target, read: Option<ReadPod>) -> Result<BindStep, BindError> {
        self.update(|index| index.bind(target, read))
    }

    /// One step of a verb, under one lock. Leadership and the lists may have changed since the caller checked them.
    fn step<R>(&self, step: impl FnOnce(&mut Index) -> (R, FollowUp)) -> Result<R, UnavailableReason> {
        let mut index = self.lock();
        index.decides()?;
        index.at((self.clock)());
        let (result, follow_up) = step(&mut index);
        match follow_up {
            FollowUp::Nothing => {}
            FollowUp::Publish => {
                let changed = index.publish();
                self.notify(&mut index, changed);
            }
            FollowUp::Plan => self.follow_up(&mut index),
        }
        Ok(result)
    }

    /// Whether a change panicked midway. The index is neither read nor changed any more then.
    pub fn is_broken(&self) -> bool {
        self.index.is_poisoned()
    }

    /// Reads the index.
    pub fn read<R>(&self, look: impl FnOnce(&Index) -> R) -> R {
        look(&self.lock())
    }

    /// Waits until devices came free while pods are unschedulable ([`Index::take_activatable`]).
    pub async fn gained(&self) {
        self.gained.notified().await;
    }

    /// Waits until members of gangs are to be activated ([`Index::take_called`]).
    pub async fn called(&self) {
        self.called.notified().await;
    }

    /// Waits until members of gangs are to be bound without a call of kube-scheduler ([`Index::take_deferred`]).
    pub async fn deferred(&self) {
        self.deferred.notified().await;
    }

    /// Waits until there is work for gangs, or statuses of gangs to be written ([`Index::take_work`],
    /// [`Index::take_statuses`]).
    pub async fn work(&self) {
        self.work.notified().await;
    }

    /// Plans the gangs that earlier steps left unplanned, until `shutdown`.
    pub async fn plan(&self, shutdown: CancellationToken) {
        while shutdown.run_until_cancelled(self.unplanned.notified()).await.is_some() {
            self.update(|_| ());
            tokio::task::yield_now().await;
        }
    }

    /// Is notified whenever the state of a gang changes.
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
        reason = "a panic midway may have left a device with two pods. Every caller ends too, among them the watches and with them the \
                  process; the next process builds the index again"
    )]
    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().expect("a change of the index has panicked; the next process builds it again")
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
        self.notify(index, changed);
    }

    /// Publishes the snapshot if it changed, and notifies the tasks that have work.
    fn notify(&self, index: &mut Index, changed: bool) {
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
