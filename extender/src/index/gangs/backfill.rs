//! Backfill reservation: nodes kept free for the first gang of the queue once it has waited longer than its patience, so that backfill does
//! not delay it further. After a stretch the nodes are open again for as long, so that a gang that never fits does not idle them for ever.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use gantry_gang::GangKey;
use gantry_gang::protocol::PlanRequest;
use gantry_planner::plan;

use crate::index::Index;
use crate::index::node_table::Renumbering;
use gantry_planner::snapshot::{BackfillReservation, NodeIx, Standing};

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
}

impl Index {
    /// A gang that is not hopeless was refused. For the first of the queue nodes may have to be kept free.
    pub(super) fn refused(&mut self, wanted: &PlanRequest) {
        let backfill = &mut self.gangs.backfill;
        match &mut backfill.head {
            Some(head) if head.gang == wanted.gang => {
                backfill.due |= head.wanted.is_none();
                head.wanted = Some(wanted.clone());
            }
            Some(_) => {}
            // The first of the queue is not known yet.
            None => backfill.due = true,
        }
    }

    /// The backfill reservation for decisions about single pods: while a deadlock is resolved, that of the gang to be completed.
    pub(in crate::index) fn kept(&self) -> Option<Arc<BackfillReservation>> {
        let deadlock = self.gangs.deadlock.reservation();
        deadlock.or(self.gangs.backfill.kept.as_ref()).cloned()
    }

    /// The backfill reservation that excludes a gang. A degraded gang is ahead of all pending ones, so only the one of a deadlock excludes it.
    pub(super) fn kept_from(&self, wanted: &PlanRequest) -> Option<&BackfillReservation> {
        let deadlock = self.gangs.deadlock.reservation().map(|kept| &**kept);
        let kept = match deadlock {
            Some(_) => deadlock,
            None => self.gangs.backfill.kept.as_deref().filter(|_| !wanted.completes),
        };
        kept.filter(|kept| *kept.gang != *wanted.gang && wanted.priority <= kept.priority)
    }

    /// Keeps nodes free for the first gang of the queue, or opens them.
    pub(in crate::index) fn keep_backfill(&mut self) {
        if !std::mem::take(&mut self.gangs.backfill.due) || !self.gangs.leading || !self.is_synced() {
            return;
        }
        let next = self.gangs.core.head(self.now);
        let known = self.gangs.backfill.head.as_ref();
        if known.map(|head| &head.gang) != next.as_ref().map(|(gang, _)| gang) {
            self.release_backfill();
            self.gangs.backfill.head =
                next.map(|(gang, since)| Head { gang, since, wanted: None, began: None });
            // Its request is recorded when it is planned again.
            self.gangs.gained();
            return;
        }
        let (now, options) = (self.now, self.options);
        let Some(head) = &mut self.gangs.backfill.head else {
            return;
        };
        let waits = now.unix.saturating_sub(head.since);
        let patience = i64::try_from(options.patience.as_secs()).unwrap_or(i64::MAX);
        if head.wanted.is_none() || waits < patience {
            return;
        }
        let began = *head.began.get_or_insert(now.at);
        let passed = now.at.saturating_duration_since(began).as_secs();
        let open = passed / options.drain.as_secs().max(1) % 2 == 1;
        if open {
            self.open_kept();
        } else if !self.keeps_well() {
            self.open_kept();
            self.reserve_backfill();
        }
    }

    /// Whether nodes are kept free and all of them still serve.
    fn keeps_well(&self) -> bool {
        self.gangs.backfill.kept.as_ref().is_some_and(|kept| {
            kept.nodes()
                .all(|node| matches!(self.published.standing(node), Standing::Ours(class) if class.withheld.is_none()))
        })
    }

    fn reserve_backfill(&mut self) {
        let Some(head) = &self.gangs.backfill.head else {
            return;
        };
        let Some(wanted) = &head.wanted else {
            return;
        };
        let nodes = self.on_terrain(None, |input| plan::backfill_nodes(input, wanted));
        if nodes.is_empty() {
            return;
        }
        let kept = BackfillReservation::new(Arc::clone(&head.gang), wanted.priority, nodes);
        self.gangs.backfill.log(&kept);
        self.gangs.backfill.kept = Some(Arc::new(kept));
        self.changed = true;
    }

    /// Opens the nodes. Pods that were refused because of it are worth another plan.
    fn open_kept(&mut self) {
        if let Some(kept) = self.gangs.backfill.kept.take() {
            self.open(&kept);
        }
    }

    pub(super) fn open(&mut self, kept: &BackfillReservation) {
        for node in kept.nodes() {
            self.unschedulable.gained(node);
        }
        self.gangs.gained();
        self.changed = true;
    }

    /// The queue has no first gang any more.
    pub(super) fn release_backfill(&mut self) {
        self.open_kept();
        self.gangs.backfill.head = None;
    }
}
