//! What the pods of a gang declare, each value once with the number of pods that declare it: kept up to date pod by pod, so that to settle
//! the terms costs the same whether two pods disagree or ten thousand do. Only the few that are reported can be iterated.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Fault, Rails, Repair, TopologyRequest};
use crate::key::Integration;
use crate::membership::{ArrivalTime, JobRef, Membership, OwnerRef, Size, TopologyHint};

/// Most values of a kind that are reported at once.
pub(super) const MAX_LISTED: usize = 8;

/// Declared values, in their order, and how many pods declare each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tally<T>(BTreeMap<T, u32>);

impl<T> Default for Tally<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Ord + Clone> Tally<T> {
    /// One more declares it. Whether it is the first.
    fn add(&mut self, thing: &T) -> bool {
        if let Some(count) = self.0.get_mut(thing) {
            *count = count.saturating_add(1);
            return false;
        }
        self.0.insert(thing.clone(), 1);
        true
    }

    /// One less declares it. Whether it was the last.
    fn remove(&mut self, thing: &T) -> bool {
        let Some(count) = self.0.get_mut(thing) else {
            return false;
        };
        *count = count.saturating_sub(1);
        let last = *count == 0;
        if last {
            self.0.remove(thing);
        }
        last
    }

    /// One more or one less declares it. Whether it is declared now and was not before, or the other way round.
    fn turn(&mut self, thing: &T, more: bool) -> bool {
        if more { self.add(thing) } else { self.remove(thing) }
    }

    fn count(&self, thing: &T) -> u32 {
        self.0.get(thing).copied().unwrap_or_default()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn first(&self) -> Option<&T> {
        self.0.keys().next()
    }

    pub(super) fn last(&self) -> Option<&T> {
        self.0.keys().next_back()
    }

    /// The first of them, as many as are reported.
    pub(super) fn few(&self) -> impl Iterator<Item = &T> {
        self.0.keys().take(MAX_LISTED).inspect(|_| work::note())
    }
}

impl Tally<Arc<str>> {
    /// The first of them that are not in `known`, which is sorted, as many as are reported: no more is iterated than these and `known`.
    pub(super) fn beyond(&self, known: &[Arc<str>]) -> impl Iterator<Item = &Arc<str>> {
        let strange = self.0.keys().filter(|thing| known.binary_search(thing).is_err());
        strange.take(MAX_LISTED)
    }

    pub(super) fn has(&self, thing: &str) -> bool {
        self.0.contains_key(thing)
    }
}

/// What the pods of one gang declare. Their ranks are no part of it, nor is their order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodDeclarations {
    pods: u32,
    pub(super) object_name: String,
    pub(super) stated: Tally<u32>,
    /// How many state a number.
    stating: u32,
    pub(super) places: Tally<&'static str>,
    /// How many want as many as their owner states.
    pub(super) all: u32,
    pub(super) totals: Tally<u32>,
    pub(super) owners: Tally<OwnerRef>,
    /// The paths from the root of a tree of groups to its PodGroups ([`Membership::tree`]).
    pub(super) trees: Tally<Vec<OwnerRef>>,
    creators: Tally<OwnerRef>,
    pub(super) roles: Tally<Arc<str>>,
    /// Pods that ask for no devices, by their roles.
    light: Tally<Arc<str>>,
    light_pods: u32,
    pub(super) levels: Tally<TopologyRequest>,
    pub(super) hints: Tally<TopologyHint>,
    pub(super) slices: Tally<u32>,
    pub(super) most: Tally<u32>,
    pub(super) rails: Tally<Rails>,
    pub(super) spares: Tally<u32>,
    pub(super) repairs: Tally<Repair>,
    pub(super) arrivals: Tally<ArrivalTime>,
    pub(super) restart_holds: Tally<Duration>,
    pub(super) checkpointed: Tally<bool>,
    pub(super) faults: Tally<Fault>,
    also: Tally<Integration>,
    makers: Tally<JobRef>,
    /// Pods that any of them made.
    made: u32,
}

impl PodDeclarations {
    /// What some pods declare.
    pub fn by<'a>(memberships: impl IntoIterator<Item = &'a Membership>) -> Self {
        let mut declared = Self::default();
        for membership in memberships {
            declared.add(membership);
        }
        declared
    }

    /// Adds the declaration of a pod. Whether anything in it is new.
    pub fn add(&mut self, membership: &Membership) -> bool {
        if self.object_name.is_empty() {
            self.object_name = membership.key.object_name();
        }
        self.pods = self.pods.saturating_add(1);
        self.turn_made(membership, true) | self.turn(membership, true)
    }

    /// Removes the declaration of a pod. Whether anything in it is not declared any more.
    pub fn remove(&mut self, membership: &Membership) -> bool {
        self.pods = self.pods.saturating_sub(1);
        self.turn_made(membership, false) | self.turn(membership, false)
    }

    /// A declaring pod has ended well: its declaration holds on, but it is no longer one that its maker has. Whether that makes a
    /// difference.
    pub fn end(&mut self, membership: &Membership) -> bool {
        self.turn_made(membership, false)
    }

    /// It has not ended after all, or is about to be removed like any other.
    pub fn unend(&mut self, membership: &Membership) -> bool {
        self.turn_made(membership, true)
    }

    /// With `more` a declaring pod asks for no devices; without, one that did is no longer there.
    pub fn lighten(&mut self, membership: &Membership, more: bool) {
        self.light.turn(&membership.role, more);
        count(&mut self.light_pods, more);
    }

    /// Whether a pod of this role asks for no devices.
    pub fn has_light(&self, role: &Arc<str>) -> bool {
        self.light.count(role) > 0
    }

    /// How many members ask for no devices. If no pod of a role asks for any, all that the owner states of it count, otherwise its pods
    /// without devices one by one.
    pub(super) fn light(&self, by_role: &[(Arc<str>, u32)]) -> u32 {
        by_role.iter().fold(self.light_pods, |sum, (role, count)| {
            let light = self.light.count(role);
            if light == 0 || light < self.roles.count(role) {
                return sum;
            }
            sum.saturating_sub(light).saturating_add(*count)
        })
    }

    fn turn(&mut self, membership: &Membership, more: bool) -> bool {
        let mut turned = self.places.turn(&membership.size_source, more);
        match membership.size {
            Size::Stated { min, total } => {
                turned |= self.stated.turn(&min, more);
                count(&mut self.stating, more);
                turned |= total.is_some_and(|total| self.totals.turn(&total, more));
            }
            Size::All => {
                let before = self.all;
                count(&mut self.all, more);
                turned |= before == 0 || self.all == 0;
            }
            Size::Undeclared => {}
        }
        turned |= turn(&mut self.owners, membership.owner.as_ref(), more);
        let tree = Some(&membership.tree).filter(|tree| !tree.is_empty());
        turned |= turn(&mut self.trees, tree, more);
        turned |= turn(&mut self.creators, membership.creator.as_ref(), more);
        turned |= self.roles.turn(&membership.role, more);
        let options = &membership.options;
        turned |= turn(&mut self.levels, options.level.as_ref(), more);
        turned |= turn(&mut self.hints, options.hint.as_ref(), more);
        turned |= turn(&mut self.slices, options.slice.as_ref(), more);
        turned |= turn(&mut self.most, options.max.as_ref(), more);
        turned |= turn(&mut self.rails, options.rails.as_ref(), more);
        turned |= turn(&mut self.spares, options.spares.as_ref(), more);
        turned |= turn(&mut self.repairs, options.repair.as_ref(), more);
        turned |= turn(&mut self.arrivals, options.arrival.as_ref(), more);
        turned |= turn(&mut self.restart_holds, options.restart_hold.as_ref(), more);
        turned |= turn(&mut self.checkpointed, options.checkpointed.as_ref(), more);
        turned |= turn(&mut self.faults, &membership.faults, more);
        turned | turn(&mut self.also, &membership.also, more)
    }

    fn turn_made(&mut self, membership: &Membership, more: bool) -> bool {
        let Some(maker) = &membership.maker else {
            return false;
        };
        count(&mut self.made, more);
        self.makers.turn(maker, more)
    }

    /// There is no declaration.
    pub fn is_empty(&self) -> bool {
        self.pods == 0
    }

    /// The object that declares the size of the gang: the root of a tree of groups. Of several the first by name.
    pub fn owner(&self) -> Option<&OwnerRef> {
        let root = self.trees.first().and_then(|path| path.first());
        root.or_else(|| self.owners.first())
    }

    /// The object that creates the pods, where another one states the size of the gang: if it is one object that creates all of them.
    pub fn creator(&self) -> Option<&OwnerRef> {
        let all = self.creators.first().filter(|creator| self.creators.count(creator) == self.pods);
        all.filter(|_| self.creators.len() == 1)
    }

    /// The paths from the root of its tree of groups to the PodGroups that have pods; no more than `most`.
    pub fn trees(&self, most: usize) -> impl Iterator<Item = &[OwnerRef]> {
        self.trees.0.keys().take(most).inspect(|_| work::note()).map(Vec::as_slice)
    }

    /// How many PodGroups of its tree of groups have pods.
    pub fn groups(&self) -> usize {
        self.trees.len()
    }

    /// The other conventions that name the pods too, in the order in which they would be asked.
    pub fn also(&self) -> impl Iterator<Item = Integration> {
        // There are no more than there are conventions.
        self.also.0.keys().copied()
    }

    /// Several jobs made the pods that have not ended.
    pub fn is_mixed(&self) -> bool {
        self.makers.len() > 1
    }

    /// The first of the jobs that made the pods, and how many there are.
    pub fn makers(&self) -> (impl Iterator<Item = &JobRef>, usize) {
        (self.makers.few(), self.makers.len())
    }

    /// How many pods jobs made that have not ended.
    pub fn made(&self) -> u32 {
        self.made
    }

    /// Pods state how many members are needed.
    pub fn states_size(&self) -> bool {
        self.stating > 0 || self.all > 0
    }

    /// Some of the pods state how many members are needed, and others do not.
    pub(super) fn some_state(&self) -> bool {
        self.stating > 0 && self.stating < self.pods
    }
}

/// One more, or one less.
fn count(number: &mut u32, more: bool) {
    *number = match more {
        true => number.saturating_add(1),
        false => number.saturating_sub(1),
    };
}

fn turn<'a, T: Ord + Clone + 'a>(
    tally: &mut Tally<T>,
    things: impl IntoIterator<Item = &'a T>,
    more: bool,
) -> bool {
    let mut turned = false;
    for thing in things {
        turned |= tally.turn(thing, more);
    }
    turned
}

/// How much was looked at: what a test holds against the number of pods.
pub(crate) mod work {
    #[cfg(test)]
    thread_local! {
        static LOOKED_AT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    }

    pub(crate) fn note() {
        #[cfg(test)]
        LOOKED_AT.with(|looked| looked.set(looked.get() + 1));
    }

    /// Things looked at since the last time, by this thread.
    #[cfg(test)]
    pub(crate) fn take() -> u64 {
        LOOKED_AT.with(|looked| looked.replace(0))
    }
}
