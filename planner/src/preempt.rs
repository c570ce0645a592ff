//! Which units (gangs, or pods by themselves) would have to end so that a gang fits: as little loss as can be, and none that could be left
//! out. Pure; evicts nobody.
//!
//! # Least loss
//!
//! 1. Only units of lower priority that may be evicted; the highest priority among the victims as low as can be.
//! 2. The fewest units, then the fewest that are not checkpointed, then the fewest GPUs, then the youngest.
//!
//! Several orders of giving up are tried: by loss, the largest first, which is fewer, and where those would free more than is wanted, the
//! smallest first. Of each the shortest beginning that makes room is found, what the plan would not touch is spared, then everybody who can
//! be, the dearest first; the best outcome is taken. Where disruption budgets do not allow all that may be evicted to go together, this is
//! done within sets that they do allow.

mod budgets;
mod whatif;

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::Resources;
use gantry_gang::protocol::{Devices, Placement, Refused, Wanted};

use self::budgets::Sets;
use self::whatif::WhatIf;
use super::input::{EFFORT, PlanInput};
use super::plan::{fits, plan};
use crate::snapshot::NodeIx;

/// So many nodes are looked at in all tries of one search to spare victims; more may have to go on a large cluster than would be needed.
const SPARED: usize = 1 << 19;

/// What is stopped as a whole: a gang, or a pod by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occupant {
    /// Its pods, all of them.
    pub pods: Vec<OccupantPod>,
    /// The highest priority of its pods.
    pub priority: i32,
    /// When it began, in seconds since 1970.
    pub since: i64,
    /// It can be stopped at little loss.
    pub checkpointed: bool,
    /// The budgets (PodDisruptionBudgets) that its pods count against. Empty: nobody minds.
    pub budgets: Vec<Budget>,
}

/// One pod of it that is on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OccupantPod {
    /// Its UID.
    pub uid: PodUid,
    /// Where it is.
    pub node: NodeIx,
    /// Its devices, but for those that are kept for somebody else when it is gone.
    pub devices: Devices,
    /// What else it takes of the node.
    pub resources: Resources,
}

/// What a unit needs of a budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budget {
    /// Namespace and name, or whatever tells it from others.
    pub name: Arc<str>,
    /// Pods that it allows to be disrupted now, all units together.
    pub allowed: u32,
    /// Pods of the unit that count against it.
    pub pods: u32,
}

impl Occupant {
    fn devices(&self) -> usize {
        let pods = self.pods.iter().flat_map(|pod| &pod.devices);
        pods.map(|(_, ids)| ids.len()).sum()
    }

    /// What its end would cost, besides its priority: who costs least goes first.
    fn cost(&self) -> (i32, bool, Reverse<i64>, usize) {
        (
            self.priority,
            !self.checkpointed,
            Reverse(self.since),
            self.devices(),
        )
    }

    /// What tells it from others of equal cost.
    fn name(&self) -> Option<&PodUid> {
        self.pods.iter().map(|pod| &pod.uid).min()
    }
}

/// Whether a gang fits once a unit is gone.
pub fn fits_without(input: &PlanInput<'_>, wanted: &Wanted, gone: &Occupant) -> bool {
    WhatIf::new(input, &[gone]).without(&[gone], |input| fits(input, wanted))
}

/// What is found where some units have given back what they have already.
pub fn beside<T>(input: &PlanInput<'_>, gone: &[&Occupant], then: impl FnOnce(&PlanInput<'_>) -> T) -> T {
    match gone {
        [] => then(input),
        gone => WhatIf::new(input, gone).without(gone, then),
    }
}

/// A plan that does not depend on what tries before it have taken of the effort for all.
fn plan_anew(input: &PlanInput<'_>, wanted: &Wanted) -> Result<Placement, Refused> {
    let left = input.effort.replace(EFFORT);
    let planned = plan(input, wanted);
    input.effort.set(left);
    planned
}

/// Where a gang goes once some of those are gone who may go for it, in this order, and which of them; `None` if it does not fit without all
/// of them. Nobody goes who is nowhere where it would lie.
pub fn make_way(
    input: &PlanInput<'_>,
    wanted: &Wanted,
    spares: &[&Occupant],
) -> Option<(Vec<usize>, Placement)> {
    let cluster = WhatIf::new(input, spares);
    let placed = |gone: &[&Occupant]| cluster.without(gone, |input| plan_anew(input, wanted)).ok();
    let holds = |gone: &[&Occupant]| cluster.without(gone, |input| fits(input, wanted));
    let count = shortest(spares.len(), |count| holds(&spares[..count]))?;
    let mut go: Vec<usize> = (0..count).collect();
    let mut placement = placed(&spares[..count])?;
    let used: BTreeSet<&str> = placement.places.iter().map(|place| place.node.as_str()).collect();
    let names = &input.snapshot.names;
    let near = |at: &usize| {
        let mut pods = spares[*at].pods.iter();
        pods.any(|pod| {
            names
                .name(pod.node)
                .is_some_and(|name| used.contains(name.as_str()))
        })
    };
    let fewer: Vec<usize> = go.iter().copied().filter(near).collect();
    if fewer.len() < go.len() {
        let gone: Vec<&Occupant> = fewer.iter().map(|at| spares[*at]).collect();
        if let Some(found) = placed(&gone) {
            (go, placement) = (fewer, found);
        }
    }
    Some((go, placement))
}

/// Where a gang goes once its victims are gone; `None` if there is no way. Without victims if it fits as it is.
pub fn preempt(input: &PlanInput<'_>, wanted: &Wanted, occupants: &[Occupant]) -> Option<Placement> {
    if let Ok(placement) = plan_anew(input, wanted) {
        return Some(placement);
    }
    let may_go = |occupant: &&Occupant| {
        let mut budgets = occupant.budgets.iter();
        let lower = occupant.priority < wanted.priority && !occupant.pods.is_empty();
        lower && budgets.all(|budget| budget.pods <= budget.allowed)
    };
    let mut lower: Vec<&Occupant> = occupants.iter().filter(may_go).collect();
    lower.sort_by(|a, b| a.cost().cmp(&b.cost()).then_with(|| a.name().cmp(&b.name())));
    let cluster = WhatIf::new(input, &lower);
    let sets = Sets {
        cluster: &cluster,
        wanted,
        tries: Tries::new(SPARED / cluster.nodes().max(1)),
    };
    let room = |victims: &[&Occupant]| sets.room(victims);

    // Up to which priority units must be looked at.
    let priorities: BTreeSet<i32> = lower.iter().map(|occupant| occupant.priority).collect();
    let priorities: Vec<i32> = priorities.into_iter().collect();
    let up_to = |priority: i32| {
        let some = lower.iter().copied();
        let some: Vec<&Occupant> = some.filter(|occupant| occupant.priority <= priority).collect();
        sets.within(&some)
    };
    let first = shortest(priorities.len(), |count| {
        count > 0 && !up_to(priorities[count - 1]).is_empty()
    })?;
    let candidates = up_to(priorities[first - 1]);

    let outcome = |order: Vec<_>| {
        let count = shortest(order.len(), |count| room(&order[..count]))?;
        let mut victims = order[..count].to_vec();
        // Whoever is nowhere where the gang would go is spared at once.
        let near = sets.near(&victims)?;
        if room(&near) {
            victims = near;
        }
        victims.sort_by(|a, b| b.cost().cmp(&a.cost()).then_with(|| b.name().cmp(&a.name())));
        Some(spare(&victims, &room, &sets.tries))
    };
    let orders = candidates.iter().flat_map(|candidates| {
        let mut largest = candidates.clone();
        largest.sort_by(|a, b| {
            let key = |occupant: &Occupant| (Reverse(occupant.devices()), occupant.cost());
            key(a).cmp(&key(b)).then_with(|| a.name().cmp(&b.name()))
        });
        [candidates.clone(), largest]
    });
    let mut victims = orders.filter_map(outcome).min_by_key(|victims| loss(victims))?;
    // Where more comes free than is wanted, somebody smaller may do; else it would be tried for nothing.
    if devices_of(&victims) > devices_wanted(input, wanted) {
        let smallest = candidates.into_iter().filter_map(|mut candidates| {
            candidates.sort_by_key(|occupant| occupant.devices());
            outcome(candidates)
        });
        victims = smallest.chain([victims]).min_by_key(|victims| loss(victims))?;
    }
    let mut placement = cluster.without(&victims, |input| plan_anew(input, wanted)).ok()?;
    placement.victims = victims
        .iter()
        .flat_map(|victim| &victim.pods)
        .map(|pod| pod.uid.clone())
        .collect();
    placement.victims.sort();
    Some(placement)
}

fn devices_of(victims: &[&Occupant]) -> usize {
    victims.iter().map(|victim| victim.devices()).sum()
}

fn devices_wanted(input: &PlanInput<'_>, wanted: &Wanted) -> usize {
    let shapes = wanted.members.iter();
    let shapes = shapes.filter_map(|member| input.shape(member.shape));
    let asks = shapes.flat_map(|shape| &shape.request.asks);
    asks.map(|ask| ask.devices as usize).sum()
}

/// What victims cost together.
fn loss(victims: &[&Occupant]) -> impl Ord + use<> {
    (
        victims.iter().map(|victim| victim.priority).max(),
        victims.len(),
        victims.iter().filter(|victim| !victim.checkpointed).count(),
        devices_of(victims),
        Reverse(victims.iter().map(|victim| victim.since).min()),
        victims
            .iter()
            .filter_map(|victim| victim.name().cloned())
            .collect::<Vec<_>>(),
    )
}

/// The least number up to `most` that will do, where every larger one does too.
fn shortest(most: usize, will_do: impl Fn(usize) -> bool) -> Option<usize> {
    if !will_do(most) {
        return None;
    }
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low) / 2;
        if will_do(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Some(high)
}

/// How often it is tried to spare somebody, in one search: each costs a plan, while nothing else is decided.
#[derive(Debug)]
struct Tries(Cell<usize>);

impl Tries {
    fn new(tries: usize) -> Self {
        Self(Cell::new(tries))
    }

    /// One less; false if there was none.
    fn another(&self) -> bool {
        let left = self.0.get();
        self.0.set(left.saturating_sub(1));
        left > 0
    }
}

/// Those of them that must go: one after the other is spared, in the order given, if there is room without, as long as there are tries.
fn spare<'o>(
    victims: &[&'o Occupant],
    room: &impl Fn(&[&Occupant]) -> bool,
    tries: &Tries,
) -> Vec<&'o Occupant> {
    let mut kept = victims.to_vec();
    let mut size = kept.len();
    let mut at = 0;
    // Whole stretches at once while that goes well.
    while at < kept.len() && tries.another() {
        size = size.clamp(1, kept.len() - at);
        let mut fewer = kept.clone();
        fewer.drain(at..at + size);
        if room(&fewer) {
            kept = fewer;
            size *= 2;
        } else if size == 1 {
            at += 1;
        } else {
            size /= 2;
        }
    }
    kept
}

#[cfg(test)]
mod tests;
