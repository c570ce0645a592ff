//! Gangs in the index: pods become members, reserved devices are withheld from other pods, gangs are planned on the snapshot that was
//! published last.
//! The state machine (crate `gantry-gang`) decides; this module gives it events and carries out its commands. No I/O, no clock.
//!
//! ```text
//! pods, owners, Gang objects (members.rs) ──> protocol ──> reservations (places.rs) ──> ledger
//!                  plans (planning.rs) <──────┘   └──> answers (verbs.rs), work (work.rs), views (view.rs)
//! ```

mod backfill;
mod deadlock;
mod members;
mod places;
mod plan_input;
mod planning;
mod reclaim;
mod report;
mod shapes;
mod spares;
mod standing;
mod verbs;
mod view;
mod withheld;
mod work;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{GangPhase, GangStatus, PodUid};
use gantry_gang::protocol::{self, Effects, GangEvent, Gangs, Now, Object, Reply, Settings};
use gantry_gang::{GangKey, Needs, OwnerFacts, OwnerRef};
use indexmap::IndexSet;

pub use report::GangReport;
pub use standing::{GangStanding, ReportedStatus, Trial};
pub use verbs::{Awaited, Belongs};
pub use view::{GangTotals, GangView, MemberStage, MemberView, PlaceView};
pub use withheld::GangReservations;
pub use work::Called;

use super::Index;
use super::node_table::Renumbering;
use gantry_planner::snapshot::NodeIx;

/// The state of gangs in the index.
#[derive(Debug)]
pub(super) struct GangIndex {
    core: Gangs,
    /// Results of events that are not carried out yet.
    effects: Effects,
    settings: Settings,
    /// Whether this process decides. A standby replica gets all events too, but keeps no reservations and publishes nothing.
    leading: bool,
    /// Whether gangs are planned.
    planning: bool,
    /// The process only looks: the times of waiting and of reservations are known to the extender alone.
    only_looks: bool,
    /// Whether the state machine has received that all lists are complete.
    synced: bool,
    /// Pods that the state machine knows.
    told: BTreeSet<PodUid>,
    /// Pods that waited for a scheduler that calls the extender, also while another process led: they are members, whichever
    /// client binds them.
    seen_waiting: BTreeSet<PodUid>,
    reported: HashMap<PodUid, members::ReportedPod>,
    /// Members that the watch has shown as deleted, with the time.
    departed: HashMap<PodUid, Instant>,
    /// Members that a bind found deleted and the watch still shows, with the time.
    found_gone: HashMap<PodUid, Instant>,
    owners: HashMap<OwnerRef, Option<Arc<OwnerFacts>>>,
    objects: BTreeMap<(Arc<str>, Arc<str>), Object>,
    shapes: shapes::Shapes,
    /// The node of each reservation.
    places: HashMap<(Arc<GangKey>, u32), NodeIx>,
    /// Spare reservations without a member.
    spares: BTreeSet<(Arc<GangKey>, u32)>,
    /// Nodes that changed: their reservations must be checked.
    suspects: BTreeSet<NodeIx>,
    /// The time since which plugins of nodes with reservations do not serve.
    troubled: HashMap<NodeIx, Instant>,
    /// The time since which slots lack CPUs or memory of their NUMA nodes, by gang and number.
    without_numa: HashMap<(Arc<GangKey>, u32), Instant>,
    /// Finds victims for gangs that do not fit.
    reclaim: reclaim::Reclaim,
    offers: plan_input::Offers,
    backfill: backfill::Backfill,
    deadlock: deadlock::Deadlock,
    /// Members to be activated, in the order in which they are called: kube-scheduler tries them in that order, and those of one gang belong
    /// together.
    called: IndexSet<PodUid>,
    /// Members to be bound although kube-scheduler does not call for them.
    deferred: Vec<PodUid>,
    work: Vec<protocol::Work>,
    statuses: BTreeMap<Arc<GangKey>, GangStatus>,
    moved: BTreeSet<Arc<GangKey>>,
    /// The last phase of each gang that its waiting binds have received.
    announced: BTreeMap<Arc<GangKey>, GangPhase>,
}

impl GangIndex {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            core: Gangs::new(settings.clone()),
            effects: Effects::default(),
            settings,
            leading: true,
            planning: true,
            only_looks: false,
            synced: false,
            told: BTreeSet::new(),
            seen_waiting: BTreeSet::new(),
            reported: HashMap::new(),
            departed: HashMap::new(),
            found_gone: HashMap::new(),
            owners: HashMap::new(),
            objects: BTreeMap::new(),
            shapes: shapes::Shapes::default(),
            places: HashMap::new(),
            spares: BTreeSet::new(),
            suspects: BTreeSet::new(),
            troubled: HashMap::new(),
            without_numa: HashMap::new(),
            reclaim: reclaim::Reclaim::default(),
            offers: plan_input::Offers::default(),
            backfill: backfill::Backfill::default(),
            deadlock: deadlock::Deadlock::default(),
            called: IndexSet::new(),
            deferred: Vec::new(),
            work: Vec::new(),
            statuses: BTreeMap::new(),
            moved: BTreeSet::new(),
            announced: BTreeMap::new(),
        }
    }

    /// The reservations on a node must be checked: something about it changed.
    pub(super) fn suspect(&mut self, node: NodeIx) {
        self.suspects.insert(node);
    }

    /// Handles an event. [`Index::collect_gangs`] carries out its results.
    fn handle(&mut self, now: Now, event: GangEvent<'_>) -> Reply {
        let effects = self.core.handle(now, event);
        self.effects.extend(effects)
    }

    /// Devices came free, or nodes changed: refused gangs are planned again.
    pub(super) fn gained(&mut self) {
        self.reclaim.grow();
    }

    /// Disruption budgets allow more: refused gangs are planned again soon.
    pub(super) fn unprotected(&mut self) {
        self.reclaim.budgets_grew();
    }

    /// The totals, labels or taints of nodes changed: the texts of refusals may be outdated.
    pub(super) fn reshaped(&mut self) {
        self.reclaim.reshape();
    }

    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        // A node with reservations is in the table, so each has a number.
        self.places.retain(|_, node| match renumbering.get(node) {
            Some(new) => {
                *node = *new;
                true
            }
            None => false,
        });
        self.suspects = self.suspects.iter().filter_map(|node| renumbering.get(node).copied()).collect();
        self.troubled = self
            .troubled
            .iter()
            .filter_map(|(node, since)| Some((*renumbering.get(node)?, *since)))
            .collect();
        self.backfill.renumber(renumbering);
        self.deadlock.renumber(renumbering);
        // Recorded again soon.
        self.offers.clear();
    }

    /// Whether this process is a command that only looks.
    pub(super) fn only_looks(&self) -> bool {
        self.only_looks
    }

    /// The needs of pods that are known from a call of kube-scheduler only.
    pub(super) fn reported_needs(&self) -> impl Iterator<Item = &Needs> {
        self.reported.values().map(|reported| &*reported.pod.needs)
    }
}

impl Index {
    /// Sets the settings of gangs. Called before any event.
    pub fn set_gangs(&mut self, settings: Settings) {
        self.gangs = GangIndex::new(settings);
    }

    /// Whether this process decides.
    pub fn is_leading(&self) -> bool {
        self.gangs.leading
    }

    /// This process decides from now on: gangs are adopted from what the cluster shows, written decisions included.
    pub fn lead(&mut self) {
        if !self.gangs.leading {
            self.gangs.leading = true;
            self.start_over();
        }
    }

    /// This process no longer decides: reservations of undecided gangs are released, and no call is answered and no gang planned until
    /// [`Index::lead`].
    pub fn stand_down(&mut self) {
        if self.gangs.leading {
            self.gangs.leading = false;
            self.start_over();
        }
    }

    /// Forgets the state of gangs and builds it again from what the cluster shows. Work that is not done yet is produced again.
    fn start_over(&mut self) {
        self.drop_places();
        self.end_deadlock();
        self.release_backfill();
        let gangs = &mut self.gangs;
        gangs.moved.extend(gangs.core.views().map(|view| Arc::clone(view.key())));
        let (counts, _) = gangs.core.continuations();
        gangs.core = Gangs::new(gangs.settings.clone()).counting_from(counts);
        gangs.effects = Effects::default();
        gangs.synced = false;
        gangs.told.clear();
        gangs.reported.clear();
        gangs.found_gone.clear();
        gangs.called.clear();
        gangs.deferred.clear();
        gangs.offers.clear();
        gangs.work.clear();
        gangs.statuses.clear();
        gangs.announced.clear();
        gangs.reclaim.restart();
        if gangs.leading {
            self.tell_all();
        }
    }
}

#[cfg(test)]
mod tests;
