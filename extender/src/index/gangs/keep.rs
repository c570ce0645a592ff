//! Nodes kept for the gang that is next: when it has waited longer than its patience, what others would put there would only make it wait
//! longer. Bounded: after a stretch the nodes are open again for as long, so that a gang that cannot be served does not idle them for ever.

use std::sync::Arc;
use std::time::Instant;

use gantry_gang::GangKey;
use gantry_gang::protocol::Wanted;
use gantry_planner::plan;

use crate::index::Index;
use crate::index::node_table::Renumbering;
use crate::snapshot::{KeptNodes, Standing};

/// What is kept, and for whom.
#[derive(Debug, Default)]
pub(super) struct Keep {
    head: Option<Head>,
    kept: Option<Arc<KeptNodes>>,
    /// Time to look again.
    due: bool,
}

/// The gang that is next.
#[derive(Debug)]
struct Head {
    gang: Arc<GangKey>,
    /// Since when it waits, in seconds since 1970.
    since: i64,
    /// What it asked for when it was refused last.
    wanted: Option<Wanted>,
    /// When nodes were kept for it first.
    began: Option<Instant>,
}

impl Keep {
    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        if let Some(kept) = &self.kept {
            self.kept = Some(Arc::new(kept.renumbered(renumbering)));
        }
    }

    /// Time has passed.
    pub(super) fn look_again(&mut self) {
        self.due = true;
    }
}

impl Index {
    /// A gang was refused: if it is the one that is next, nodes may have to be kept for it.
    pub(super) fn refused(&mut self, wanted: &Wanted, hopeless: bool) {
        if hopeless {
            return;
        }
        let keep = &mut self.gangs.keep;
        match &mut keep.head {
            Some(head) if head.gang == wanted.gang => {
                keep.due |= head.wanted.is_none();
                head.wanted = Some(wanted.clone());
            }
            Some(_) => {}
            // Whoever it is, it is looked for.
            None => keep.due = true,
        }
    }

    /// The nodes kept, for decisions about pods that belong to no gang. While others go for a gang, it is that one's.
    pub(in crate::index) fn kept(&self) -> Option<Arc<KeptNodes>> {
        let way = self.gangs.way.as_ref().map(|way| &way.kept);
        way.or(self.gangs.keep.kept.as_ref()).cloned()
    }

    /// The nodes that are kept from a gang. From one that lacks members of its minimum none but what others leave for its like: it is ahead
    /// of all that have nothing yet.
    pub(super) fn kept_from(&self, wanted: &Wanted) -> Option<&KeptNodes> {
        let way = self.gangs.way.as_ref().map(|way| &*way.kept);
        let kept = match way {
            Some(_) => way,
            None => self.gangs.keep.kept.as_deref().filter(|_| !wanted.completes),
        };
        kept.filter(|kept| *kept.gang != *wanted.gang && wanted.priority <= kept.priority)
    }

    /// Keeps nodes for the gang that is next, or opens them.
    pub(in crate::index) fn keep_for_the_head(&mut self) {
        if !std::mem::take(&mut self.gangs.keep.due) || !self.gangs.leading || !self.is_synced() {
            return;
        }
        let next = self.gangs.core.head(self.now);
        let known = self.gangs.keep.head.as_ref();
        if known.map(|head| &head.gang) != next.as_ref().map(|(gang, _)| gang) {
            self.release_keep();
            self.gangs.keep.head = next.map(|(gang, since)| Head {
                gang,
                since,
                wanted: None,
                began: None,
            });
            // What it asks for is said when it is planned again.
            self.gangs.gained();
            return;
        }
        let (now, options) = (self.now, self.options);
        let Some(head) = &mut self.gangs.keep.head else {
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
            self.earmark();
        }
    }

    /// Whether nodes are kept and all of them can still serve.
    fn keeps_well(&self) -> bool {
        self.gangs.keep.kept.as_ref().is_some_and(|kept| {
            kept.nodes()
                .all(|node| matches!(self.published.standing(node), Standing::Ours(class) if class.not_ready.is_none()))
        })
    }

    fn earmark(&mut self) {
        let Some(head) = &self.gangs.keep.head else {
            return;
        };
        let Some(wanted) = &head.wanted else {
            return;
        };
        let nodes = self.on_terrain(None, |input| plan::backfill_nodes(input, wanted));
        if nodes.is_empty() {
            return;
        }
        let kept = KeptNodes::new(Arc::clone(&head.gang), wanted.priority, nodes);
        tracing::info!(gang = %kept.gang, nodes = kept.nodes().count(), "nodes kept for the gang that is next");
        self.gangs.keep.kept = Some(Arc::new(kept));
        self.changed = true;
    }

    /// Opens what is kept. Pods that were refused for it are worth another look.
    fn open_kept(&mut self) {
        if let Some(kept) = self.gangs.keep.kept.take() {
            self.open(&kept);
        }
    }

    pub(super) fn open(&mut self, kept: &KeptNodes) {
        for node in kept.nodes() {
            self.unschedulable.gained(node);
        }
        self.gangs.gained();
        self.changed = true;
    }

    /// Nobody is next any more.
    pub(super) fn release_keep(&mut self) {
        self.open_kept();
        self.gangs.keep.head = None;
    }
}
