//! Backfill reservation: nodes kept free for the first gang of the queue once it has waited longer than its patience, so that backfill does
//! not delay it further. After a stretch the nodes are open again for as long, so that a gang that never fits does not idle them for ever.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use gantry_gang::GangKey;
use gantry_gang::protocol::PlanRequest;
use gantry_planner::plan;

use super::machine::Machine;
use super::plan_input::PlanSource;
use crate::index::node_table::Renumbering;
use gantry_planner::snapshot::{BackfillReservation, NodeIx, NodeState, Snapshot};

/// The first gang of the queue, and the nodes kept free for it.
#[derive(Debug, Default)]
pub(super) struct Backfill {
    head: Option<Head>,
    kept: Option<Arc<BackfillReservation>>,
    /// Time to check again.
    due: bool,
    /// The nodes that the log names, by gang: only changes are logged.
    logged: BTreeMap<Arc<GangKey>, Vec<NodeIx>>,
}

/// Gangs whose nodes the log remembers.
const MOST_LOGGED: usize = 64;

/// The first gang of the queue.
#[derive(Debug)]
struct Head {
    gang: Arc<GangKey>,
    /// The start of its wait, in seconds since 1970.
    since: i64,
    /// Its last refused request.
    wanted: Option<PlanRequest>,
    /// When nodes were first kept free for it.
    began: Option<Instant>,
}

/// The backfill reservations that exist.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct BackfillReservations<'a> {
    /// That of the gang to which others yield in a deadlock.
    pub(super) deadlock: Option<&'a Arc<BackfillReservation>>,
    /// That of the first gang of the queue.
    pub(super) head: Option<&'a Arc<BackfillReservation>>,
}

impl<'a> BackfillReservations<'a> {
    /// The one for decisions about single pods: while a deadlock is resolved, that of the gang to be completed.
    pub(super) fn for_singles(self) -> Option<&'a Arc<BackfillReservation>> {
        self.deadlock.or(self.head)
    }

    /// The one that excludes a gang. A degraded gang is ahead of all pending ones, so only the one of a deadlock excludes it.
    pub(super) fn against(self, wanted: &PlanRequest) -> Option<&'a BackfillReservation> {
        let kept = match self.deadlock {
            Some(_) => self.deadlock,
            None => self.head.filter(|_| !wanted.completes),
        };
        let kept = kept.map(|kept| &**kept);
        kept.filter(|kept| *kept.gang != *wanted.gang && wanted.priority <= kept.priority)
    }
}

/// What a check of the backfill reservation changed.
#[derive(Debug, Default)]
pub(super) struct BackfillChange {
    /// The reservation that ended.
    pub(super) opened: Option<Arc<BackfillReservation>>,
    /// The queue has another first gang. Its request is recorded when it is planned again.
    pub(super) has_new_head: bool,
    /// Nodes are reserved.
    pub(super) has_reserved: bool,
}

impl Backfill {
    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        if let Some(kept) = &self.kept {
            self.kept = Some(Arc::new(kept.renumbered(renumbering)));
        }
    }

    /// Logs the nodes of a reservation if they are others than the last time.
    fn log(&mut self, kept: &BackfillReservation) {
        let nodes: Vec<NodeIx> = kept.nodes().collect();
        if self.logged.get(&kept.gang) == Some(&nodes) {
            return;
        }
        tracing::info!(gang = %kept.gang, nodes = nodes.len(), "nodes kept free for the first gang of the queue");
        if self.logged.len() >= MOST_LOGGED {
            self.logged.clear();
        }
        self.logged.insert(Arc::clone(&kept.gang), nodes);
    }

    /// Time passes.
    pub(super) fn tick(&mut self) {
        self.due = true;
    }

    /// The reservation of the first gang of the queue.
    pub(super) fn reservation(&self) -> Option<&Arc<BackfillReservation>> {
        self.kept.as_ref()
    }

    /// A gang that is not hopeless was refused. For the first of the queue nodes may have to be kept free.
    pub(super) fn refused(&mut self, wanted: &PlanRequest) {
        match &mut self.head {
            Some(head) if head.gang == wanted.gang => {
                self.due |= head.wanted.is_none();
                head.wanted = Some(wanted.clone());
            }
            Some(_) => {}
            // The first of the queue is not known yet.
            None => self.due = true,
        }
    }

    /// Whether it is time to check again.
    pub(super) fn take_due(&mut self) -> bool {
        std::mem::take(&mut self.due)
    }

    /// Keeps nodes free for the first gang of the queue, or opens them. `source` is for plans without regard to backfill reservations.
    pub(super) fn check(&mut self, machine: &Machine, source: PlanSource<'_>) -> BackfillChange {
        let facts = source.facts();
        let (now, options) = (facts.clock.now(), facts.options);
        let next = machine.gangs().head(now);
        let known = self.head.as_ref();
        if known.map(|head| &head.gang) != next.as_ref().map(|(gang, _)| gang) {
            let opened = self.release();
            self.head = next.map(|(gang, since)| Head { gang, since, wanted: None, began: None });
            return BackfillChange { opened, has_new_head: true, has_reserved: false };
        }
        let Some(head) = &mut self.head else {
            return BackfillChange::default();
        };
        let waits = now.unix.saturating_sub(head.since);
        let patience = i64::try_from(options.patience.as_secs()).unwrap_or(i64::MAX);
        if head.wanted.is_none() || waits < patience {
            return BackfillChange::default();
        }
        let began = *head.began.get_or_insert(now.at);
        let passed = now.at.saturating_duration_since(began).as_secs();
        let open = passed / options.drain.as_secs().max(1) % 2 == 1;
        if open {
            BackfillChange { opened: self.kept.take(), ..BackfillChange::default() }
        } else if !self.keeps_well(&facts.published) {
            let opened = self.kept.take();
            BackfillChange { opened, has_new_head: false, has_reserved: self.reserve(source) }
        } else {
            BackfillChange::default()
        }
    }

    /// Whether nodes are kept free and all of them still serve.
    fn keeps_well(&self, snapshot: &Snapshot) -> bool {
        self.kept.as_ref().is_some_and(|kept| {
            kept.nodes().all(
                |node| matches!(snapshot.node_state(node), NodeState::Ours(class) if class.withheld.is_none()),
            )
        })
    }

    /// Reserves nodes for the first gang of the queue. False if there are none.
    fn reserve(&mut self, source: PlanSource<'_>) -> bool {
        let Some(head) = &self.head else {
            return false;
        };
        let Some(wanted) = &head.wanted else {
            return false;
        };
        let nodes = source.with_input(None, |input| plan::backfill_nodes(input, wanted));
        if nodes.is_empty() {
            return false;
        }
        let kept = BackfillReservation::new(Arc::clone(&head.gang), wanted.priority, nodes);
        self.log(&kept);
        self.kept = Some(Arc::new(kept));
        true
    }

    /// The queue has no first gang any more. Returns its reservation, if it had one.
    pub(super) fn release(&mut self) -> Option<Arc<BackfillReservation>> {
        self.head = None;
        self.kept.take()
    }
}
