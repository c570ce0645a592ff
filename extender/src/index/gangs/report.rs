//! Why a gang is where it is, or why it waits: what was tried at each level of the fabric, what is missing, which gangs
//! are ahead, and which pods would have to end. Read only.

use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::GangKey;
use gantry_gang::protocol::PlanRequest;
use gantry_planner::plan::{self, Diagnosis};
use gantry_planner::preempt;
use serde::{Deserialize, Serialize};

use super::standing::GangStanding;
use super::withheld::GangReservations;
use crate::index::Index;

/// A report about a gang.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GangReport {
    /// The gang.
    #[serde(flatten)]
    pub gang: GangStanding,
    /// Gangs planned before it, in that order: `namespace/name`.
    pub ahead: Vec<String>,
    /// What a plan would try now for members without a reservation; absent if every member has one.
    pub tried: Option<Diagnosis>,
    /// Pods that would have to end for it to fit, whole gangs at a time and with the least loss. Empty if it fits, or
    /// if no end of pods helps.
    pub would_have_to_end: Vec<String>,
    /// Reservations of other decided gangs; empty if all of its members have one.
    pub reserved_for_gangs: Vec<GangReservations>,
}

impl Index {
    /// The report about the newest gang of a name, or of the name of a Gang object. `queue` is the order of waiting
    /// gangs ([`Index::gangs_in_line`]).
    pub fn inspect_gang(&self, queue: &[Arc<GangKey>], namespace: &str, name: &str) -> Option<GangReport> {
        let view = self.gangs_named(namespace, name).into_iter().next()?;
        let key = view.key();
        let ahead = queue.iter().position(|waiting| waiting == key);
        let gang = self.standing(view, ahead.map(|ahead| ahead + 1));
        let ahead = queue.iter().take(ahead.unwrap_or_default()).map(ToString::to_string).collect();
        let wanted = self.gangs.core.plan_request(key);
        let wanted = wanted.filter(|wanted| !wanted.members.is_empty());
        let tried =
            wanted.as_ref().map(|wanted| self.on_terrain(Some(wanted), |input| plan::explain(input, wanted)));
        let would_have_to_end = match (&wanted, &tried) {
            (Some(wanted), Some(tried)) if !tried.hopeless => self.in_the_way(wanted),
            _ => Vec::new(),
        };
        let reserved = tried.as_ref().map(|_| self.reserved_for_gangs(key));
        Some(GangReport {
            gang,
            ahead,
            tried,
            would_have_to_end,
            reserved_for_gangs: reserved.unwrap_or_default(),
        })
    }

    /// Whether an object that states the size of a gang is still unread.
    pub fn owners_unread(&self) -> bool {
        self.gangs.core.watched_owners().iter().any(|wanted| wanted.unread)
    }

    /// A namespace that has a gang of this name.
    pub fn namespace_of_gang(&self, name: &str) -> Option<&Arc<str>> {
        let keys = self.gangs.core.views().map(|view| view.key());
        keys.filter(|key| *key.name == *name).map(|key| &key.namespace).min()
    }

    /// The names of the gangs of a namespace.
    pub fn gang_names(&self, namespace: &str) -> Vec<String> {
        let keys = self.gangs.core.views().map(|view| view.key());
        let mut names: Vec<String> =
            keys.filter(|key| *key.namespace == *namespace).map(|key| key.name.to_string()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The pods whose end would let a gang fit, whatever their priority and budgets.
    fn in_the_way(&self, wanted: &PlanRequest) -> Vec<String> {
        let wanted = PlanRequest {
            priority: i32::MAX,
            // A decided gang has no minimum left; an end that lets in one more member counts all the same.
            must: wanted.must.max(1),
            ..wanted.clone()
        };
        let placement = self.among_candidates(&wanted, |candidates| {
            let mut candidates = candidates.to_vec();
            for candidate in &mut candidates {
                candidate.budgets.clear();
                candidate.priority = candidate.priority.min(i32::MAX - 1);
            }
            self.on_terrain(Some(&wanted), |input| preempt::preempt(input, &wanted, &candidates))
        });
        let victims = placement.into_iter().flat_map(|placement| placement.victims);
        let mut names: Vec<String> = victims.filter_map(|uid| self.name_of(&uid)).collect();
        names.sort_unstable();
        names
    }

    fn name_of(&self, uid: &PodUid) -> Option<String> {
        let (namespace, name) = self.pod_address(uid)?;
        Some(format!("{namespace}/{name}"))
    }
}
