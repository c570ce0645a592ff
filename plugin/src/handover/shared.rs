//! The hand-over as the rest of the daemon uses it: shared, with a clock, with the short wait for a grant that is on its way.
//! No decision is made here.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gantry_api::{Deviation, DeviceId, Holder, PodUid, ResourceName};
use gantry_topology::choice::Table;
use jiff::Timestamp;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::{Basis, Devices, Handover, Listing, Note, Patience, PodSeen, Request, Served, Ticket};
use crate::inventory::Inventory;
use crate::observe::{AllocationOutcome, Observed, PreferenceOutcome};

/// The longest wait for a pod while the watch of pods works. On an idle machine it was seen to lose against kubelet by 6 ms at most, on
/// one whose processors were all busy by up to 100 ms; kubelet admits nothing else meanwhile.
const POD_PATIENCE: Duration = Duration::from_secs(1);
/// The longest wait for a pod while that is likely to be in vain, and for the choice table.
const PATIENCE: Duration = Duration::from_millis(100);
/// For so long after a wait in vain the next ones are short: kubelet asks for each of many pods that were deleted meanwhile, too.
const WARY: Duration = Duration::from_secs(30);

/// One hand-over, shared.
#[derive(Debug)]
pub struct SharedHandover {
    handover: Mutex<Handover>,
    observed: Arc<Observed>,
    /// Whether grants can come at all.
    grants: bool,
    /// Counts changes: wakes those who wait for a grant, and the publisher.
    changes: watch::Sender<u64>,
    served: Notify,
    /// Counts the listings by which devices came free.
    freed: watch::Sender<u64>,
    /// When a pod was last waited for in vain.
    vain: Mutex<Option<Instant>>,
    /// Where notes go, besides the log.
    notes: Option<mpsc::Sender<Note>>,
}

impl SharedHandover {
    /// Shares a new hand-over. `notes` is where they are told of further; it is there if a cluster is, and so may grants be.
    pub fn new(handover: Handover, observed: Arc<Observed>, notes: Option<mpsc::Sender<Note>>) -> Self {
        Self {
            handover: Mutex::new(handover),
            observed,
            grants: notes.is_some(),
            changes: watch::Sender::new(0),
            served: Notify::new(),
            freed: watch::Sender::new(0),
            vain: Mutex::new(None),
            notes,
        }
    }

    /// The preferred devices of each container of a call. Waits for a grant that is on its way.
    pub async fn prefer(&self, requests: Vec<Request>) -> Vec<Devices> {
        let began = Instant::now();
        let mut changes = self.changes.subscribe();
        let answers = loop {
            let waited = began.elapsed();
            let lost = self.observed.is_cluster_lost();
            let for_pods = self.pod_patience(lost).saturating_sub(waited);
            let for_table = PATIENCE.saturating_sub(waited);
            let patience = Patience {
                pods: !for_pods.is_zero(),
                table: !for_table.is_zero(),
            };
            if let Some(answers) = self.lock().prefer(&requests, patience) {
                break answers;
            }
            // Out of time or changed: asked again either way.
            let left = if patience.table { for_table } else { for_pods };
            tokio::select! {
                _ = changes.changed() => {}
                () = tokio::time::sleep(left) => {}
                () = self.observed.cluster_lost(), if !lost => {}
            }
        };
        let waited = began.elapsed();
        if waited >= POD_PATIENCE {
            *self.vain() = Some(Instant::now());
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
                info!(resource = %request.resource, size = request.size, ?waited, "kubelet asks for a pod that is not known here");
            }
        }
        answers.into_iter().map(|answer| answer.devices).collect()
    }

    /// How long a pod that asks and is not known yet is waited for: not at all where no cluster can show it.
    fn pod_patience(&self, cluster_lost: bool) -> Duration {
        if !self.grants {
            Duration::ZERO
        } else if cluster_lost || self.vain().is_some_and(|at| at.elapsed() < WARY) {
            PATIENCE
        } else {
            POD_PATIENCE
        }
    }

    /// Kubelet has been served exactly `set`.
    pub fn allocated(&self, resource: &ResourceName, set: Vec<DeviceId>) {
        let set: Devices = set.into_iter().collect();
        let served = self.change(|handover| handover.allocate(resource, &set, Timestamp::now()));
        let outcome = match served {
            Served::Granted => AllocationOutcome::Granted,
            Served::Unplanned => AllocationOutcome::Unplanned,
            Served::Deviation => AllocationOutcome::Deviation,
        };
        self.observed.allocated(resource, outcome);
        debug!(%resource, devices = set.len(), ?outcome, "allocated");
        self.served.notify_one();
    }

    /// Waits for the next [`SharedHandover::allocated`]; at once if there was one since the last wait.
    pub async fn allocation_served(&self) {
        self.served.notified().await;
    }

    /// Kubelet no longer lists somebody as a holder.
    pub fn devices_freed(&self) {
        self.freed.send_modify(|count| *count += 1);
    }

    /// Counts [`SharedHandover::devices_freed`].
    pub fn freed(&self) -> watch::Receiver<u64> {
        self.freed.subscribe()
    }

    /// The devices changed.
    pub fn inventory(&self, inventory: &Inventory) {
        self.change(|handover| handover.inventory(inventory));
    }

    /// The choice table of the machine, or that there is none yet.
    pub fn table(&self, table: Option<Arc<Table>>) {
        self.change(|handover| handover.table(table));
    }

    /// All pods of the node, and what an earlier run of this plugin published of holders.
    pub fn sync(&self, pods: Vec<PodSeen>, earlier: &[Holder]) {
        self.change(|handover| {
            handover.sync(pods);
            handover.adopt(earlier);
        });
    }

    /// A pod came or changed.
    pub fn seen(&self, pod: PodSeen) {
        self.change(|handover| handover.seen(pod));
    }

    /// A pod left.
    pub fn gone(&self, uid: &PodUid, finished: bool) {
        self.change(|handover| handover.gone(uid, finished));
    }

    /// A new kubelet is there.
    pub fn kubelet_restarted(&self) {
        self.change(Handover::kubelet_restarted);
    }

    /// Kubelet is about to be asked who holds what.
    pub fn listing_begins(&self) -> Ticket {
        self.lock().listing_begins()
    }

    /// Kubelet's answer.
    pub fn listed(&self, ticket: Ticket, listing: Listing) {
        self.change(|handover| handover.listed(ticket, listing, Timestamp::now()));
    }

    /// The deleted pods whose processes must be looked for.
    pub fn quarantined(&self) -> Vec<PodUid> {
        self.lock().quarantined()
    }

    /// Nothing of this pod runs any more.
    pub fn processes_gone(&self, uid: &PodUid) {
        self.change(|handover| handover.processes_gone(uid));
    }

    /// Who holds what, the last deviations, and how many there were.
    pub fn account(&self) -> (Vec<Holder>, Vec<Deviation>, u64) {
        let handover = self.lock();
        (
            handover.holders(),
            handover.deviations(),
            handover.deviations_total(),
        )
    }

    /// Whether the pods of the node are known.
    pub fn is_synced(&self) -> bool {
        self.lock().is_synced()
    }

    /// Whether kubelet has said who holds the devices there are.
    pub fn is_told(&self) -> bool {
        self.lock().is_told()
    }

    /// Counts changes.
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
            self.tell(note);
        }
        self.changes.send_modify(|count| *count += 1);
        result
    }

    fn tell(&self, note: Note) {
        let metrics = self.observed.metrics();
        match &note {
            Note::Refused { pod, refusal } => {
                metrics.refused_grant();
                warn!(%pod, %refusal, "grant ignored");
            }
            Note::Deviated { pod, deviation } => {
                metrics.deviation();
                let pod = pod.as_ref().map(tracing::field::display);
                warn!(pod, allocated = ?deviation.allocated, granted = ?deviation.granted, "kubelet chose otherwise than granted");
            }
            Note::Swapped {
                pods: [one, other],
                resource,
            } => {
                metrics.swap();
                info!(%one, %other, %resource, "two pods hold each other's sets; their grants are exchanged");
            }
            Note::Quarantined { pod, devices } => {
                info!(%pod, devices, "deleted while it held devices; kept apart until its processes are gone");
            }
            Note::Released { pod } => info!(%pod, "its processes are gone, its devices are free"),
        }
        if let Some(notes) = &self.notes
            && notes.try_send(note).is_err()
        {
            debug!("too many notes at once, one is in the log only");
        }
    }

    fn vain(&self) -> MutexGuard<'_, Option<Instant>> {
        self.vain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Handover> {
        // No code panics while it holds the lock; a poisoned one is as good as any.
        self.handover.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
