//! Why a gang is where it is, or why it waits: what was tried at each level of the fabric, what is missing, who is ahead of it, and whose
//! end would let it fit. For people; nothing is decided or changed here.

use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::GangKey;
use gantry_gang::protocol::PlanRequest;
use gantry_planner::plan::{self, Explanation};
use gantry_planner::preempt;
use serde::Serialize;

use super::standing::GangStanding;
use super::withheld::PlacesKept;
use crate::index::Index;

/// What is to be said of a gang.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GangReport {
    /// The gang.
    #[serde(flatten)]
    pub gang: GangStanding,
    /// Gangs that are planned before it, the first first: `namespace/name`.
    pub ahead: Vec<String>,
    /// What a plan of now tried for the members that it has no place for; absent if all have one.
    pub tried: Option<Explanation>,
    /// Pods that would have to end for it to fit, whole gangs at a time and with as little loss as can be; empty if it fits, or if no end
    /// of pods helps.
    pub would_have_to_end: Vec<String>,
    /// Places that are kept for other gangs, which are decided; empty if all of its members have one.
    pub places_kept: Vec<PlacesKept>,
}

impl Index {
    /// What is to be said of the newest gang of a name, or of the name of a Gang object. `queue` is the order of those that wait
    /// ([`Index::gangs_in_line`]).
    pub fn inspect_gang(&self, queue: &[Arc<GangKey>], namespace: &str, name: &str) -> Option<GangReport> {
        let view = self.gangs_named(namespace, name).into_iter().next()?;
        let key = view.key();
        let gang = self.standing(view, queue);
        let ahead = gang.position.map_or(0, |position| position.saturating_sub(1));
        let ahead = queue.iter().take(ahead).map(ToString::to_string);
        let ahead = ahead.collect();
        let wanted = self.gangs.core.plan_request(key);
        let wanted = wanted.filter(|wanted| !wanted.members.is_empty());
        let tried = wanted
            .as_ref()
            .map(|wanted| self.on_terrain(Some(wanted), |input| plan::explain(input, wanted)));
        let would_have_to_end = match (&wanted, &tried) {
            (Some(wanted), Some(tried)) if !tried.hopeless => self.in_the_way(wanted),
            _ => Vec::new(),
        };
        let places_kept = tried.as_ref().map(|_| self.places_kept(key));
        Some(GangReport {
            gang,
            ahead,
            tried,
            would_have_to_end,
            places_kept: places_kept.unwrap_or_default(),
        })
    }

    /// Whether an object that says how large a gang is has not been read yet.
    pub fn owners_unread(&self) -> bool {
        self.gangs
            .core
            .watched_owners()
            .iter()
            .any(|wanted| wanted.unread)
    }

    /// What gangs of a namespace are called.
    pub fn gang_names(&self, namespace: &str) -> Vec<String> {
        let keys = self.gangs.core.views().map(|view| view.key());
        let mut names: Vec<String> = keys
            .filter(|key| *key.namespace == *namespace)
            .map(|key| key.name.to_string())
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Whose end would let a gang fit, whatever their priority and budgets.
    fn in_the_way(&self, wanted: &PlanRequest) -> Vec<String> {
        let wanted = PlanRequest {
            priority: i32::MAX,
            // A gang that is decided needs none at a time; whose end lets in one more is of interest all the same.
            must: wanted.must.max(1),
            ..wanted.clone()
        };
        let placement = self.among_occupants(&wanted, |mut occupants| {
            for occupant in &mut occupants {
                occupant.budgets.clear();
                occupant.priority = occupant.priority.min(i32::MAX - 1);
            }
            self.on_terrain(Some(&wanted), |input| {
                preempt::preempt(input, &wanted, &occupants)
            })
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
