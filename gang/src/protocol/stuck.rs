//! Decided gangs that have been short of their minimum for long, though all members are there to be whole: each may hold what another
//! lacks, and none of them ever run. One that goes as a whole lets another be whole. Who that is, is said by whoever knows what lies where.

use std::sync::Arc;
use std::time::Instant;

use super::Gangs;
use super::gang::{Env, Gang, State};
use super::members::Count;
use super::standing::after;
use super::types::{Now, PlanRequest, Settings};
use super::view::View;
use crate::key::GangKey;

/// A decided gang lacks a place for members of its minimum.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shortage {
    since: Instant,
    /// For longer than a place of it would have been kept.
    long: bool,
}

/// A gang that is stuck, to look at.
#[derive(Clone)]
pub struct DeadlockedGang<'a> {
    /// The gang.
    pub gang: View<'a>,
    /// What would make it whole: all of it, or it is as stuck as before.
    pub wanted: PlanRequest,
    /// It would not be whole if nothing else were there.
    pub hopeless: bool,
}

impl Gang {
    /// Whether it lacks a place for a member of its minimum, after the decision.
    pub(super) fn is_short(&self) -> bool {
        matches!(self.state, State::Decided(_)) && self.missing(Count::placed) > 0
    }

    /// Notes since when it is short. Once that is long it is planned again, so that it is seen to be stuck.
    pub(super) fn follow_lack(&mut self, env: &Env<'_>) {
        let short = self.is_short();
        let State::Decided(decided) = &mut self.state else {
            return;
        };
        if !short {
            decided.lack = None;
            decided.gave_to = None;
            return;
        }
        let lack = decided.lack.get_or_insert(Shortage {
            since: env.now.at,
            long: false,
        });
        if !lack.long && env.now.at >= after(lack.since, env.settings.hold) {
            lack.long = true;
            self.tries.considered = None;
        }
    }

    /// When it will have been short for long.
    pub(super) fn lack_ends(&self, settings: &Settings) -> Option<Instant> {
        let State::Decided(decided) = &self.state else {
            return None;
        };
        let lack = decided.lack.filter(|lack| !lack.long)?;
        Some(after(lack.since, settings.hold))
    }

    /// What would make it whole, if it has been short for long, has the members for it and was refused. Not of a gang that goes on without.
    fn deadlocked(&self) -> Option<(PlanRequest, bool)> {
        let State::Decided(decided) = &self.state else {
            return None;
        };
        let refused = self.tries.refused.as_ref()?;
        if !decided.lack.is_some_and(|lack| lack.long) || !self.is_short() || !self.is_repaired() {
            return None;
        }
        let wanted = self.to_be_whole(self.wanted()?);
        (wanted.members.len() >= wanted.must as usize).then_some((wanted, refused.hopeless))
    }
}

impl Gangs {
    /// The gangs that are stuck, in the order in which they are completed.
    pub fn deadlocked(&self) -> Vec<DeadlockedGang<'_>> {
        let now = self.clock.map(|now| now.at);
        let waiting = self.planable.iter().filter_map(|key| self.gangs.get(key));
        let stuck = waiting.filter_map(|gang| {
            let (wanted, hopeless) = gang.deadlocked()?;
            let gang = View { gang, now: now? };
            Some(DeadlockedGang {
                gang,
                wanted,
                hopeless,
            })
        });
        let mut stuck: Vec<DeadlockedGang<'_>> = stuck.collect();
        stuck.sort_by_cached_key(|stuck| {
            let turn = stuck.gang.gang.turn();
            (turn.in_need(), Arc::clone(stuck.gang.key()))
        });
        stuck
    }

    /// A gang that is stuck goes as a whole, so that another can be whole. Its next life begins when the last member is gone.
    pub fn give_way(&mut self, now: Now, gang: &GangKey, to: &GangKey) {
        self.of_gang(now, gang, |gang, env| {
            if gang.deadlocked().is_some() {
                gang.give_way(env, Arc::new(to.clone()));
            }
        });
    }
}
