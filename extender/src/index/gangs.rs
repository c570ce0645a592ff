//! Gangs in the index: pods become members, planned places are kept from everybody else, gangs are planned on the snapshot just published.
//! What gangs may and must do is the state machine's word (crate `gantry-gang`); here it is fed and obeyed. No I/O, no clock.
//!
//! ```text
//! pods, owners, Gang objects (members.rs) ──> protocol ──> places (places.rs) ──> ledger
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

/// What the index knows of gangs.
#[derive(Debug)]
pub(super) struct GangIndex {
    core: Gangs,
    /// What came of events and is not carried out yet.
    effects: Effects,
    settings: Settings,
    /// Whether this process decides. One that stands by is fed all the same, but keeps no places and says nothing.
    leading: bool,
    /// Whether gangs are planned.
    planning: bool,
    /// The process only looks: since when something waits, or is reserved, only the extender knows.
    only_looks: bool,
    /// Whether the state machine was told that all lists were complete.
    synced: bool,
    /// Pods that the state machine was told of.
    told: BTreeSet<PodUid>,
    /// Pods that were seen to wait for a scheduler that calls the extender, also while another process led: they are members, whichever
    /// client binds them.
    seen_waiting: BTreeSet<PodUid>,
    reported: HashMap<PodUid, members::ReportedPod>,
    /// Members that the watch has shown to be gone, and when.
    departed: HashMap<PodUid, Instant>,
    /// Members that a bind has found gone, and when, which the watch has not shown yet.
    found_gone: HashMap<PodUid, Instant>,
    owners: HashMap<OwnerRef, Option<Arc<OwnerFacts>>>,
    objects: BTreeMap<(Arc<str>, Arc<str>), Object>,
    shapes: shapes::Shapes,
    /// Where each place that is kept lies.
    places: HashMap<(Arc<GangKey>, u32), NodeIx>,
    /// Those of them that are spare and that no member has.
    spares: BTreeSet<(Arc<GangKey>, u32)>,
    /// Nodes whose places must be looked at: something about them changed.
    suspects: BTreeSet<NodeIx>,
    /// Since when plugins of nodes with places do not serve.
    troubled: HashMap<NodeIx, Instant>,
    /// Since when slots lack CPUs or memory of their NUMA nodes, by gang and number.
    without_numa: HashMap<(Arc<GangKey>, u32), Instant>,
    /// Where devices for gangs that do not fit come from.
    reclaim: reclaim::Reclaim,
    offers: plan_input::Offers,
    backfill: backfill::Backfill,
    deadlock: deadlock::Deadlock,
    /// Members to be woken, in the order in which they are called: kube-scheduler brings them in that order, and those of one gang belong
    /// together.
    called: IndexSet<PodUid>,
    /// Members to be bound though nobody calls for them.
    deferred: Vec<PodUid>,
    work: Vec<protocol::Work>,
    statuses: BTreeMap<Arc<GangKey>, GangStatus>,
    moved: BTreeSet<Arc<GangKey>>,
    /// The phase of each gang that those who wait for it were told of.
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

    /// Handles an event. What comes of it is carried out by [`Index::collect_gangs`].
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

    /// The totals, labels or taints of nodes changed: the texts of refusals may be wrong.
    pub(super) fn reshaped(&mut self) {
        self.reclaim.reshape();
    }

    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        // A node with places is not gone, so each has a number.
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

    /// The needs of pods that only a call of kube-scheduler speaks of.
    pub(super) fn reported_needs(&self) -> impl Iterator<Item = &Needs> {
        self.reported.values().map(|reported| &*reported.pod.needs)
    }
}

impl Index {
    /// Sets what gangs go by. Before anything is fed.
    pub fn set_gangs(&mut self, settings: Settings) {
        self.gangs = GangIndex::new(settings);
    }

    /// Whether this process decides.
    pub fn is_leading(&self) -> bool {
        self.gangs.leading
    }

    /// This process decides from now on: gangs are taken up from what the cluster shows, decisions that were written included.
    pub fn lead(&mut self) {
        if !self.gangs.leading {
            self.gangs.leading = true;
            self.start_over();
        }
    }

    /// This process no longer decides: places of gangs that are not decided are given up, and nothing is answered, planned or ordered until
    /// [`Index::lead`].
    pub fn stand_down(&mut self) {
        if self.gangs.leading {
            self.gangs.leading = false;
            self.start_over();
        }
    }

    /// Forgets what was made of gangs and makes it anew from what the cluster shows. All that is still to be done is said again.
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
