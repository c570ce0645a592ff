//! Which units (gangs or single pods) have to end so that a gang fits, with the least loss. Pure; evicts nothing.
//!
//! # Least loss
//!
//! 1. Only units of lower priority that may be evicted; the highest priority among the victims as low as possible.
//! 2. The fewest units, then the fewest that are not checkpointed, then the fewest GPUs, then the youngest.
//!
//! Several orders are tried: by loss, the largest first, which is fewer, and, where those would free more than is
//! needed, the smallest first. In each, the shortest prefix that makes room is found, units outside the plan are
//! spared, then every unit that can be, the most costly first. The best result wins. Where disruption budgets do not
//! allow all units together, this is done within sets that they allow.

mod budgets;

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::Resources;
use gantry_gang::protocol::{Devices, Placement, PlanRequest, Refusal};

use self::budgets::Sets;
use super::input::{EFFORT, PlanInput};
use super::plan::{fits, plan};
use crate::devices::DeviceSet;
use crate::input::Exact;
use crate::shape::Shape;
use crate::snapshot::{NodeIx, Pool};

/// Nodes looked at over all attempts of one search to spare victims. On a large cluster more victims may go than
/// necessary.
const SPARED: usize = 1 << 19;

/// A unit that is evicted as a whole: a gang or a single pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VictimCandidate {
    /// Its pods, all of them.
    pub pods: Vec<CandidatePod>,
    /// The highest priority of its pods.
    pub priority: i32,
    /// When it began, in seconds since 1970.
    pub since: i64,
    /// It is checkpointed: its end loses little.
    pub checkpointed: bool,
    /// The disruption budgets that its pods count against; empty without any.
    pub budgets: Vec<Budget>,
}

/// One of its pods that is on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CandidatePod {
    pub uid: PodUid,
    /// Where it is.
    pub node: NodeIx,
    /// Its devices, without those that are reserved for another gang once it ends.
    pub devices: Devices,
    /// Its other resources.
    pub resources: Resources,
}

/// A unit's share of a disruption budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budget {
    /// Namespace and name, or another unique key.
    pub name: Arc<str>,
    /// Pods that it allows to be disrupted now, over all units.
    pub allowed: u32,
    /// Pods of the unit that count against it.
    pub pods: u32,
}

impl VictimCandidate {
    fn devices(&self) -> usize {
        let pods = self.pods.iter().flat_map(|pod| &pod.devices);
        pods.map(|(_, ids)| ids.len()).sum()
    }

    /// The cost of its end besides priority. The cheapest goes first.
    fn cost(&self) -> (i32, bool, Reverse<i64>, usize) {
        (self.priority, !self.checkpointed, Reverse(self.since), self.devices())
    }

    /// A tie-breaker for units of equal cost.
    fn name(&self) -> Option<&PodUid> {
        self.pods.iter().map(|pod| &pod.uid).min()
    }
}

/// Whether a gang fits once a unit is gone.
pub fn fits_without(input: &PlanInput<'_>, wanted: &PlanRequest, gone: &VictimCandidate) -> bool {
    WhatIf::new(input, &[gone]).without(&[gone], |input| fits(input, wanted))
}

/// The result of a search in which some units count as gone already.
pub fn with_released<T>(
    input: &PlanInput<'_>,
    gone: &[&VictimCandidate],
    then: impl FnOnce(&PlanInput<'_>) -> T,
) -> T {
    match gone {
        [] => then(input),
        gone => WhatIf::new(input, gone).without(gone, then),
    }
}

/// A plan independent of the effort that earlier attempts used.
fn plan_anew(input: &PlanInput<'_>, wanted: &PlanRequest) -> Result<Placement, Refusal> {
    let left = input.effort.replace(EFFORT);
    let planned = plan(input, wanted);
    input.effort.set(left);
    planned
}

/// Plans a gang without some of the units, which go in the given order. Returns which go; `None` if the gang does not
/// fit without all of them. Only units on nodes of the plan go.
pub fn plan_without_fewest(
    input: &PlanInput<'_>,
    wanted: &PlanRequest,
    spares: &[&VictimCandidate],
) -> Option<(Vec<usize>, Placement)> {
    let cluster = WhatIf::new(input, spares);
    let placed = |gone: &[&VictimCandidate]| cluster.without(gone, |input| plan_anew(input, wanted)).ok();
    let holds = |gone: &[&VictimCandidate]| cluster.without(gone, |input| fits(input, wanted));
    let count = shortest(spares.len(), |count| holds(&spares[..count]))?;
    let mut go: Vec<usize> = (0..count).collect();
    let mut placement = placed(&spares[..count])?;
    let used: BTreeSet<&str> = placement.places.iter().map(|place| place.node.as_str()).collect();
    let names = &input.snapshot.names;
    let near = |at: &usize| {
        let mut pods = spares[*at].pods.iter();
        pods.any(|pod| names.name(pod.node).is_some_and(|name| used.contains(name.as_str())))
    };
    let fewer: Vec<usize> = go.iter().copied().filter(near).collect();
    if fewer.len() < go.len() {
        let gone: Vec<&VictimCandidate> = fewer.iter().map(|at| spares[*at]).collect();
        if let Some(found) = placed(&gone) {
            (go, placement) = (fewer, found);
        }
    }
    Some((go, placement))
}

/// Plans a gang for the time when its victims are gone; without victims if it fits now. `None` if there is no way.
pub fn preempt(
    input: &PlanInput<'_>,
    wanted: &PlanRequest,
    candidates: &[VictimCandidate],
) -> Option<Placement> {
    if let Ok(placement) = plan_anew(input, wanted) {
        return Some(placement);
    }
    let may_go = |candidate: &&VictimCandidate| {
        let mut budgets = candidate.budgets.iter();
        let lower = candidate.priority < wanted.priority && !candidate.pods.is_empty();
        lower && budgets.all(|budget| budget.pods <= budget.allowed)
    };
    let mut lower: Vec<&VictimCandidate> = candidates.iter().filter(may_go).collect();
    lower.sort_by(|a, b| a.cost().cmp(&b.cost()).then_with(|| a.name().cmp(&b.name())));
    let cluster = WhatIf::new(input, &lower);
    let sets = Sets { cluster: &cluster, wanted, tries: SpareBudget::new(SPARED / cluster.nodes().max(1)) };
    let room = |victims: &[&VictimCandidate]| sets.room(victims);

    // Up to which priority units must be considered.
    let priorities: BTreeSet<i32> = lower.iter().map(|candidate| candidate.priority).collect();
    let priorities: Vec<i32> = priorities.into_iter().collect();
    let up_to = |priority: i32| {
        let some = lower.iter().copied();
        let some: Vec<&VictimCandidate> = some.filter(|candidate| candidate.priority <= priority).collect();
        sets.within(&some)
    };
    let first = shortest(priorities.len(), |count| count > 0 && !up_to(priorities[count - 1]).is_empty())?;
    let candidates = up_to(priorities[first - 1]);

    let outcome = |order: Vec<_>| {
        let count = shortest(order.len(), |count| room(&order[..count]))?;
        let mut victims = order[..count].to_vec();
        // Units that are on no node of the plan are spared at once.
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
            let key = |candidate: &VictimCandidate| (Reverse(candidate.devices()), candidate.cost());
            key(a).cmp(&key(b)).then_with(|| a.name().cmp(&b.name()))
        });
        [candidates.clone(), largest]
    });
    let mut victims = orders.filter_map(outcome).min_by_key(|victims| loss(victims))?;
    // If more comes free than is needed, a smaller unit may do; otherwise the attempt is useless.
    if devices_of(&victims) > devices_wanted(input, wanted) {
        let smallest = candidates.into_iter().filter_map(|mut candidates| {
            candidates.sort_by_key(|candidate| candidate.devices());
            outcome(candidates)
        });
        victims = smallest.chain([victims]).min_by_key(|victims| loss(victims))?;
    }
    let mut placement = cluster.without(&victims, |input| plan_anew(input, wanted)).ok()?;
    placement.victims = victims.iter().flat_map(|victim| &victim.pods).map(|pod| pod.uid.clone()).collect();
    placement.victims.sort();
    Some(placement)
}

fn devices_of(victims: &[&VictimCandidate]) -> usize {
    victims.iter().map(|victim| victim.devices()).sum()
}

fn devices_wanted(input: &PlanInput<'_>, wanted: &PlanRequest) -> usize {
    let shapes = wanted.members.iter();
    let shapes = shapes.filter_map(|member| input.shape(member.shape));
    let asks = shapes.flat_map(|shape| &shape.request.asks);
    asks.map(|ask| ask.devices as usize).sum()
}

/// The cost of all victims.
fn loss(victims: &[&VictimCandidate]) -> impl Ord + use<> {
    (
        victims.iter().map(|victim| victim.priority).max(),
        victims.len(),
        victims.iter().filter(|victim| !victim.checkpointed).count(),
        devices_of(victims),
        Reverse(victims.iter().map(|victim| victim.since).min()),
        victims.iter().filter_map(|victim| victim.name().cloned()).collect::<Vec<_>>(),
    )
}

/// The least number up to `most` that suffices, if every larger one does too.
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

/// Attempts to spare a victim in one search. Each costs a plan, and nothing else is decided meanwhile.
#[derive(Debug)]
struct SpareBudget(Cell<usize>);

impl SpareBudget {
    fn new(tries: usize) -> Self {
        Self(Cell::new(tries))
    }

    /// Takes one attempt; false if none was left.
    fn another(&self) -> bool {
        let left = self.0.get();
        self.0.set(left.saturating_sub(1));
        left > 0
    }
}

/// The units that must go: in the given order each is spared if the gang fits without its end, while attempts are left.
fn spare<'o>(
    victims: &[&'o VictimCandidate],
    room: &impl Fn(&[&VictimCandidate]) -> bool,
    tries: &SpareBudget,
) -> Vec<&'o VictimCandidate> {
    let mut kept = victims.to_vec();
    let mut size = kept.len();
    let mut at = 0;
    // Whole stretches at once while that succeeds.
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

// The cluster as it would be without some units: their devices and resources returned, their ports and affinity gone,
// everything else unchanged.

/// A plan's input, with the exact nodes of all units.
struct WhatIf<'t, 'a> {
    input: &'t PlanInput<'a>,
    exact: HashMap<NodeIx, Exact<'a>>,
}

impl<'t, 'a> WhatIf<'t, 'a> {
    fn new(input: &'t PlanInput<'a>, candidates: &[&VictimCandidate]) -> Self {
        let mut exact = HashMap::new();
        let pods = candidates.iter().flat_map(|candidate| &candidate.pods);
        for pod in pods.filter(|pod| !pod.devices.is_empty()) {
            if !exact.contains_key(&pod.node)
                && let Some(node) = (input.exact)(pod.node)
            {
                exact.insert(pod.node, node);
            }
        }
        Self { input, exact }
    }

    /// How many nodes there are.
    fn nodes(&self) -> usize {
        self.input.snapshot.nodes.len()
    }

    /// The result of a search without some units.
    fn without<T>(&self, victims: &[&VictimCandidate], then: impl FnOnce(&PlanInput<'_>) -> T) -> T {
        let mut rooms = self.input.rooms.to_vec();
        let mut changed: BTreeMap<NodeIx, Exact<'a>> = BTreeMap::new();
        for pod in victims.iter().flat_map(|victim| &victim.pods) {
            if let Some(room) = rooms.get_mut(pod.node.0 as usize) {
                room.left.add(&pod.resources);
            }
            if !pod.devices.is_empty()
                && let Some(exact) = self.exact.get(&pod.node)
            {
                give_back(changed.entry(pod.node).or_insert_with(|| exact.clone()), pod);
            }
        }
        let pods = victims.iter().flat_map(|victim| &victim.pods);
        let gone: Vec<&PodUid> = pods.map(|pod| &pod.uid).collect();
        let classes = changed.iter().map(|(node, exact)| (*node, &exact.class));
        let snapshot = self.input.snapshot.with(classes);
        let exact = |node: NodeIx| changed.get(&node).cloned().or_else(|| (self.input.exact)(node));
        then(&PlanInput {
            snapshot: &snapshot,
            rooms: &rooms,
            fabric: self.input.fabric,
            shapes: self.input.shapes,
            barred: self.input.barred,
            gone: &gone,
            exact: &exact,
            effort: self.input.effort,
        })
    }
}

/// Returns a pod's devices; those of an unhealthy GPU stay unavailable.
fn give_back(exact: &mut Exact<'_>, pod: &CandidatePod) {
    for (resource, ids) in &pod.devices {
        let Some(index) = exact.class.pools.iter().position(|pool| pool.resource == *resource) else {
            continue;
        };
        let known = exact.ids.get(index).copied().unwrap_or_default();
        let pool = &mut exact.class.pools[index];
        let back: DeviceSet = (0..known.len())
            .filter(|device| known[*device].as_ref().is_some_and(|id| ids.contains(id)))
            .filter(|device| !is_sick(pool, *device))
            .collect();
        pool.free.add(&back);
        pool.open.add(&back);
    }
}

fn is_sick(pool: &Pool, device: usize) -> bool {
    let gpu = match &pool.shape {
        Shape::Whole => u8::try_from(device).ok(),
        Shape::Parts(parts) => parts.spots().get(device).map(|spot| spot.gpu),
    };
    pool.faults.iter().any(|fault| Some(fault.gpu) == gpu)
}

#[cfg(test)]
mod tests;
