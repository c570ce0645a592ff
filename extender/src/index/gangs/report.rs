//! Why a gang is where it is, or why it waits: what was tried at each level of the fabric, what is missing, which gangs
//! are ahead, and which pods would have to end. Read only.

use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::GangKey;
use gantry_gang::protocol::{Gangs, PlanRequest};
use gantry_planner::plan::{self, Diagnosis};
use gantry_planner::preempt;
use serde::{Deserialize, Serialize};

use super::GangIndex;
use super::members::MemberTable;
use super::plan_input::PlanSource;
use super::reclaim::VictimCandidates;
use super::state::GangState;
use super::view::GangViews;
use super::withheld::{GangReservations, ReservationHolders};
use crate::index::facts::Facts;

/// A report about a gang.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GangReport {
    /// The gang.
    #[serde(flatten)]
    pub gang: GangState,
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

/// Looks for the causes of a gang's state.
#[derive(Debug, Clone, Copy)]
pub(in crate::index) struct GangInspection<'a> {
    gangs: &'a Gangs,
    members: &'a MemberTable,
    views: GangViews<'a>,
    source: PlanSource<'a>,
    holders: ReservationHolders<'a>,
}

impl<'a> GangInspection<'a> {
    pub(super) fn new(index: &'a GangIndex, facts: &'a Facts) -> Self {
        Self {
            gangs: index.machine.gangs(),
            members: &index.members,
            views: index.views(facts),
            source: index.plan_source(facts),
            holders: index.holders(facts),
        }
    }

    /// The report about the newest gang of a name, or of the name of a Gang object. `queue` is the order of waiting
    /// gangs ([`GangViews::in_line`]).
    pub(in crate::index) fn report(
        self,
        queue: &[Arc<GangKey>],
        namespace: &str,
        name: &str,
    ) -> Option<GangReport> {
        let view = self.views.named(namespace, name).into_iter().next()?;
        let key = view.key();
        let ahead = queue.iter().position(|waiting| waiting == key);
        let gang = self.views.state(key, ahead.map(|ahead| ahead + 1))?;
        let ahead = queue.iter().take(ahead.unwrap_or_default()).map(ToString::to_string).collect();
        let wanted = self.gangs.plan_request(key);
        let wanted = wanted.filter(|wanted| !wanted.members.is_empty());
        let explain =
            |wanted: &PlanRequest| self.source.with_input(Some(wanted), |input| plan::explain(input, wanted));
        let tried = wanted.as_ref().map(explain);
        let would_have_to_end = match (&wanted, &tried) {
            (Some(wanted), Some(tried)) if !tried.hopeless => self.in_the_way(wanted),
            _ => Vec::new(),
        };
        let reserved = tried.as_ref().map(|_| self.holders.decided(key));
        Some(GangReport {
            gang,
            ahead,
            tried,
            would_have_to_end,
            reserved_for_gangs: reserved.unwrap_or_default(),
        })
    }

    /// The pods whose end would let a gang fit, whatever their priority and budgets.
    fn in_the_way(self, wanted: &PlanRequest) -> Vec<String> {
        let wanted = PlanRequest {
            priority: i32::MAX,
            // A decided gang has no minimum left; an end that lets in one more member counts all the same.
            must: wanted.must.max(1),
            ..wanted.clone()
        };
        let candidates = VictimCandidates::new(self.gangs, self.source);
        let placement = candidates.least_loss(&wanted, |candidates| {
            let mut candidates = candidates.to_vec();
            for candidate in &mut candidates {
                candidate.budgets.clear();
                candidate.priority = candidate.priority.min(i32::MAX - 1);
            }
            self.source.with_input(Some(&wanted), |input| preempt::preempt(input, &wanted, &candidates))
        });
        let victims = placement.into_iter().flat_map(|placement| placement.victims);
        let mut names: Vec<String> = victims.filter_map(|uid| self.name_of(&uid)).collect();
        names.sort_unstable();
        names
    }

    fn name_of(self, uid: &PodUid) -> Option<String> {
        let (namespace, name) = self.members.address_of(self.source.facts(), uid)?;
        Some(format!("{namespace}/{name}"))
    }
}
