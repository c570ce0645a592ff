//! The hand-over for the rest of the daemon: shared, with a clock, and with a short wait for a grant that is about to
//! arrive. Decides nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gantry_api::{Deviation, DeviceId, Holder, PodUid, ResourceName};
use gantry_topology::choice::Table;
use jiff::Timestamp;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::{
    Basis, Devices, GrantRefusal, Handover, Listing, Note, NumaListing, ObservedPod, PlanMatch, PodName,
    Request, Ticket, WaitFor,
};
use crate::inventory::Inventory;
use crate::observe::{AllocationOutcome, Observations, PreferenceOutcome};

/// The longest wait for a pod while the pod watch works. The watch was measured to be at most 6 ms behind kubelet on an
/// idle machine, and up to 100 ms with all processors busy. Kubelet admits no other pod meanwhile.
const POD_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest wait for a pod while the wait will probably fail, and for the choice table.
const SHORT_TIMEOUT: Duration = Duration::from_millis(100);
/// How long waits stay short after a failed wait, because kubelet may allocate for many deleted pods in a row.
const CAUTION: Duration = Duration::from_secs(30);

/// A shared hand-over.
#[derive(Debug)]
pub struct SharedHandover {
    handover: Mutex<Handover>,
    observed: Arc<Observations>,
    /// Whether grants are possible.
    grants: bool,
    /// Counts changes; wakes waiting calls and the publisher.
    changes: watch::Sender<u64>,
    served: Notify,
    /// Counts the PodResources lists that freed devices.
    freed: watch::Sender<u64>,
    /// When a wait for a pod last failed.
    failed_wait: Mutex<Option<Instant>>,
    /// The CPUs of the last PodResources list.
    numa: Mutex<NumaListing>,
    /// Receives notes in addition to the log.
    notes: Option<mpsc::Sender<Note>>,
}

impl SharedHandover {
    /// Shares a new hand-over. `notes` receives events for the operator; `None` without a cluster, and then there are
    /// no grants either.
    pub fn new(handover: Handover, observed: Arc<Observations>, notes: Option<mpsc::Sender<Note>>) -> Self {
        Self {
            handover: Mutex::new(handover),
            observed,
            grants: notes.is_some(),
            changes: watch::Sender::new(0),
            served: Notify::new(),
            freed: watch::Sender::new(0),
            failed_wait: Mutex::new(None),
            numa: Mutex::default(),
            notes,
        }
    }

    /// The preferred devices of each container of a call. Waits for a grant that is about to arrive.
    pub async fn prefer(&self, requests: Vec<Request>) -> Vec<Devices> {
        let began = Instant::now();
        let mut changes = self.changes.subscribe();
        let answers = loop {
            let waited = began.elapsed();
            let lost = self.observed.is_cluster_lost();
            let for_pods = self.pod_timeout(lost).saturating_sub(waited);
            let for_table = SHORT_TIMEOUT.saturating_sub(waited);
            let wait_for = WaitFor { pods: !for_pods.is_zero(), table: !for_table.is_zero() };
            if let Some(answers) = self.lock().prefer(&requests, wait_for) {
                break answers;
            }
            // Time is over or the state changed: try again in both cases.
            let left = if wait_for.table { for_table } else { for_pods };
            tokio::select! {
                _ = changes.changed() => {}
                () = tokio::time::sleep(left) => {}
                () = self.observed.cluster_lost(), if !lost => {}
            }
        };
        let waited = began.elapsed();
        if waited >= POD_TIMEOUT {
            *self.failed_wait() = Some(Instant::now());
        }
        for (request, answer) in requests.iter().zip(&answers) {
            let outcome = match answer.basis {
                Basis::Granted => PreferenceOutcome::Granted,
                Basis::Unplanned => PreferenceOutcome::Unplanned,
                Basis::Unknown => PreferenceOutcome::Unknown,
                Basis::Forced => PreferenceOutcome::Forced,
            };
            self.observed.preferred(&request.resource, outcome, waited);
            debug!(resource = %request.resource, size = request.size, offered = request.offered.len(), ?outcome, ?waited, "preferred allocation");
            if self.grants && answer.basis == Basis::Unknown {
                info!(resource = %request.resource, size = request.size, ?waited, "kubelet allocates for an unknown pod");
            }
        }
        answers.into_iter().map(|answer| answer.devices).collect()
    }

    /// How long to wait for an unknown pod: not at all without a working pod watch.
    fn pod_timeout(&self, cluster_lost: bool) -> Duration {
        if !self.grants {
            Duration::ZERO
        } else if cluster_lost || self.failed_wait().is_some_and(|at| at.elapsed() < CAUTION) {
            SHORT_TIMEOUT
        } else {
            POD_TIMEOUT
        }
    }

    /// Records that kubelet was served exactly `set`.
    pub fn allocated(&self, resource: &ResourceName, set: Vec<DeviceId>) {
        let set: Devices = set.into_iter().collect();
        let served = self.change(|handover| handover.allocate(resource, &set, Timestamp::now()));
        let outcome = match served {
            PlanMatch::Granted => AllocationOutcome::Granted,
            PlanMatch::Unplanned => AllocationOutcome::Unplanned,
            PlanMatch::Deviation => AllocationOutcome::Deviation,
        };
        self.observed.allocated(resource, outcome);
        debug!(%resource, devices = set.len(), ?outcome, "allocated");
        self.served.notify_one();
    }

    /// Waits for the next [`SharedHandover::allocated`]; returns at once if there was one since the last wait.
    pub async fn allocation_served(&self) {
        self.served.notified().await;
    }

    /// Records that PodResources no longer lists a holder.
    pub fn devices_freed(&self) {
        self.freed.send_modify(|count| *count += 1);
    }

    /// Counts [`SharedHandover::devices_freed`].
    pub fn freed(&self) -> watch::Receiver<u64> {
        self.freed.subscribe()
    }

    pub fn inventory(&self, inventory: &Inventory) {
        self.change(|handover| handover.inventory(inventory));
    }

    /// Sets the choice table of the machine; `None` while it is built.
    pub fn table(&self, table: Option<Arc<Table>>) {
        self.change(|handover| handover.table(table));
    }

    /// Sets all pods of the node, and the holders that an earlier run of this plugin published.
    pub fn sync(&self, pods: Vec<ObservedPod>, earlier: &[Holder]) {
        self.change(|handover| {
            handover.sync(pods);
            handover.adopt(earlier);
        });
    }

    /// Records a pod that was added or changed.
    pub fn observe(&self, pod: ObservedPod) {
        self.change(|handover| handover.observe(pod));
    }

    /// Records a pod that is not kept.
    pub fn refused(&self, pod: PodName, refusal: GrantRefusal) {
        self.change(|handover| handover.refused(pod, refusal));
    }

    /// Records that a pod left the watch.
    pub fn remove_pod(&self, uid: &PodUid, finished: bool) {
        self.change(|handover| handover.remove_pod(uid, finished));
    }

    /// Records a new kubelet.
    pub fn kubelet_restarted(&self) {
        self.change(Handover::kubelet_restarted);
    }

    /// Records that a PodResources call begins.
    pub fn listing_begins(&self) -> Ticket {
        self.lock().listing_begins()
    }

    /// Records the result of a PodResources call.
    pub fn listed(&self, ticket: Ticket, listing: Listing, numa: NumaListing) {
        // First, so that no status lacks the CPUs of a pod that it shows as listed.
        *self.numa.lock().unwrap_or_else(PoisonError::into_inner) = numa;
        self.change(|handover| handover.listed(ticket, listing, Timestamp::now()));
    }

    /// The CPUs of the last PodResources list.
    pub fn numa(&self) -> NumaListing {
        self.numa.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The deleted pods with processes to check.
    pub fn quarantined(&self) -> Vec<PodUid> {
        self.lock().quarantined()
    }

    /// Records that no process of this pod is left.
    pub fn processes_gone(&self, uid: &PodUid) {
        self.change(|handover| handover.processes_gone(uid));
    }

    /// The holders, the latest deviations, and the number of deviations.
    pub fn status_snapshot(&self) -> (Vec<Holder>, Vec<Deviation>, u64) {
        let handover = self.lock();
        (handover.holders(), handover.deviations(), handover.deviations_total())
    }

    /// Whether the pods of the node are known.
    pub fn is_synced(&self) -> bool {
        self.lock().is_synced()
    }

    /// Whether PodResources was read and the devices are known.
    pub fn has_listing(&self) -> bool {
        self.lock().has_listing()
    }

    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn change<T>(&self, change: impl FnOnce(&mut Handover) -> T) -> T {
        let (result, notes, quarantined) = {
            let mut handover = self.lock();
            let result = change(&mut handover);
            (result, handover.notes(), handover.quarantined_devices())
        };
        self.observed.metrics().quarantined(quarantined);
        for note in notes {
            self.report(note);
        }
        self.changes.send_modify(|count| *count += 1);
        result
    }

    fn report(&self, note: Note) {
        let metrics = self.observed.metrics();
        match &note {
            Note::Refused { pod, refusal } => {
                metrics.refused_grant();
                warn!(%pod, %refusal, "grant ignored");
            }
            Note::Deviated { pod, deviation } => {
                metrics.deviation();
                let pod = pod.as_ref().map(tracing::field::display);
                warn!(pod, allocated = ?deviation.allocated, granted = ?deviation.granted, "kubelet allocated another set than granted");
            }
            Note::Swapped { pods: [one, other], resource } => {
                metrics.swap();
                info!(%one, %other, %resource, "two pods hold each other's sets; their grants were exchanged");
            }
            Note::Quarantined { pod, devices } => {
                info!(%pod, devices, "pod deleted while it held devices; they stay in quarantine until its processes are gone");
            }
            Note::Released { pod } => {
                info!(%pod, "the processes of the deleted pod are gone; its devices are free");
            }
        }
        if let Some(notes) = &self.notes
            && notes.try_send(note).is_err()
        {
            debug!("the queue of Events is full; this note is only logged");
        }
    }

    fn failed_wait(&self) -> MutexGuard<'_, Option<Instant>> {
        self.failed_wait.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Handover> {
        // No code panics while it holds the lock, so a poisoned lock is still valid.
        self.handover.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
