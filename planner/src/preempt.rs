//! Which pods and gangs have to end so that a gang fits, with the least loss. Pure; evicts nothing.
//!
//! # Least loss
//!
//! 1. Only pods of lower priority that disruption budgets allow to go together; the highest priority among the victims as
//!    low as possible, whatever else it costs.
//! 2. The fewest **devices**, then the fewest **pods**, then the fewest **gangs** that end as a whole.
//! 3. The fewest pods that are not beyond the minimum of their gang, then the fewest that are not checkpointed.
//! 4. Those of the lowest priority, then the youngest.
//!
//! Members beyond a gang's minimum go one by one; any other member only with all of its gang.
//!
//! The [`search`] is exact where the cluster allows it within [`STEPS`]. Where it does not, its best set and a greedy
//! choice ([`greedy`]) are rid of what can be spared, and the better one counts.

mod greedy;
mod loss;
mod parts;
mod relaxation;
mod search;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gantry_api::placement::CountedDevices;
use gantry_api::{PodUid, ResourceName};
use gantry_gang::Resources;
use gantry_gang::protocol::{Devices, Placement, PlanRequest, Refusal};

use self::greedy::GreedySearch;
use self::parts::{ChosenParts, Parts};
use self::search::Search;
use super::input::{EFFORT, PlanInput};
use super::plan::{fits, plan};
use crate::devices::DeviceSet;
use crate::input::ExactNode;
use crate::request::NumaDemand;
use crate::shape::Shape;
use crate::snapshot::{NodeIx, Pool};

/// Steps of one search: some tenths of a second.
const STEPS: u64 = 1 << 24;

/// A unit that is evicted as a whole, or of which members beyond a minimum are: a gang or a single pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VictimCandidate {
    /// Its pods, all of them. Of those that may go alone the first go first.
    pub pods: Vec<CandidatePod>,
    /// The highest priority of its pods.
    pub priority: i32,
    /// When it began, in seconds since 1970.
    pub since: i64,
    /// It is checkpointed: its end loses little.
    pub checkpointed: bool,
    pub is_gang: bool,
    pub surplus: Surplus,
    /// The disruption budgets that its pods count against; empty without any.
    pub budgets: Vec<Budget>,
}

/// How many pods of a unit may go while the others stay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Surplus {
    /// Of all its pods.
    pub pods: u32,
    /// Of each role ([`CandidatePod::role`]), where roles have minimums.
    pub by_role: Vec<u32>,
}

/// One of its pods that is on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CandidatePod {
    pub uid: PodUid,
    /// Where it is.
    pub node: NodeIx,
    /// Its devices, without those that are reserved for another gang once it ends.
    pub devices: Devices,
    /// What its containers have of certain NUMA nodes.
    pub numa: Vec<NumaDemand>,
    /// Its other resources.
    pub resources: Resources,
    /// Its role in its gang: an index into [`Surplus::by_role`].
    pub role: usize,
}

/// A unit's share of a disruption budget.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budget {
    /// Namespace and name, or another unique key.
    pub name: Arc<str>,
    /// Pods that it allows to be disrupted now, over all units.
    pub allowed: u32,
    /// The pods of the unit that count against it: indices into [`VictimCandidate::pods`].
    pub pods: Vec<u32>,
}

impl Budget {
    /// Whether it allows all of the unit to go.
    pub fn allows_whole(&self) -> bool {
        self.pods.len() <= self.allowed as usize
    }
}

impl CandidatePod {
    /// How many devices it has.
    fn count(&self) -> usize {
        self.devices.iter().map(|(_, ids)| ids.len()).sum()
    }
}

impl VictimCandidate {
    /// A tie-breaker for units of equal cost.
    fn name(&self) -> Option<&PodUid> {
        self.pods.iter().map(|pod| &pod.uid).min()
    }
}

/// Whether a gang fits once a unit is gone.
pub fn fits_without(input: &PlanInput<'_>, wanted: &PlanRequest, gone: &VictimCandidate) -> bool {
    ExactInput::new(input, &[gone]).without(&pods_of(&[gone]), |input| fits(input, wanted))
}

/// The result of a search in which some units count as gone already.
pub fn with_released<T>(
    input: &PlanInput<'_>,
    gone: &[&VictimCandidate],
    then: impl FnOnce(&PlanInput<'_>) -> T,
) -> T {
    match gone {
        [] => then(input),
        gone => ExactInput::new(input, gone).without(&pods_of(gone), then),
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
    let cluster = ExactInput::new(input, spares);
    let placed =
        |gone: &[&VictimCandidate]| cluster.without(&pods_of(gone), |input| plan_anew(input, wanted)).ok();
    let holds = |gone: &[&VictimCandidate]| cluster.without(&pods_of(gone), |input| fits(input, wanted));
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
    if !go.is_empty() {
        mark_displacing(&mut placement);
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
        let whole = candidate.budgets.iter().all(Budget::allows_whole);
        candidate.priority < wanted.priority
            && !candidate.pods.is_empty()
            && (whole || candidate.surplus.pods > 0)
    };
    let lower: Vec<&VictimCandidate> = candidates.iter().filter(may_go).collect();
    let cluster = ExactInput::new(input, &lower);
    let up_to = |priority: i32| {
        let some = lower.iter().copied().filter(|candidate| candidate.priority <= priority);
        some.collect::<Vec<_>>()
    };
    let room = |units: &[&VictimCandidate]| cluster.without(&pods_of(units), |input| fits(input, wanted));
    // Up to which priority units must be considered. Budgets may require more than the first of them.
    let priorities: BTreeSet<i32> = lower.iter().map(|candidate| candidate.priority).collect();
    let priorities: Vec<i32> = priorities.into_iter().collect();
    let first = shortest(priorities.len(), |count| count > 0 && room(&up_to(priorities[count - 1])))?;
    let mut steps = STEPS;
    let victims = priorities[first - 1..].iter().find_map(|priority| {
        let units = up_to(*priority);
        let parts = Parts::of(&units);
        let chosen = least(&cluster, wanted, &parts, &mut steps)?;
        Some(chosen.pods(&parts))
    })?;
    let mut placement = cluster.without(&victims, |input| plan_anew(input, wanted)).ok()?;
    placement.victims = victims.iter().map(|pod| pod.uid.clone()).collect();
    placement.victims.sort();
    mark_displacing(&mut placement);
    Some(placement)
}

/// The comparison of a placement counts what it displaces as free.
fn mark_displacing(placement: &mut Placement) {
    if let Some(compared) = &mut placement.compared {
        Arc::make_mut(compared).counted = CountedDevices::AfterPreemption;
    }
}

/// What goes of some units, with the least loss that is found.
fn least(
    cluster: &ExactInput<'_, '_>,
    wanted: &PlanRequest,
    parts: &Parts<'_>,
    steps: &mut u64,
) -> Option<ChosenParts> {
    // Where one priority takes all steps, the next still has some.
    let mut own = *steps / 2;
    *steps -= own;
    let mut search = Search::new(cluster, wanted, parts, &mut own);
    let (found, is_least) = search.run();
    if is_least {
        *steps += own;
        return found;
    }
    GreedySearch::new(cluster, wanted, parts).choose(found)
}

fn pods_of<'c>(units: &[&'c VictimCandidate]) -> Vec<&'c CandidatePod> {
    units.iter().flat_map(|unit| &unit.pods).collect()
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

// The cluster as it would be without some units: their devices, CPUs and resources returned, their ports and affinity gone,
// everything else unchanged.

/// A plan's input, with the exact nodes of all units.
struct ExactInput<'t, 'a> {
    input: &'t PlanInput<'a>,
    exact: HashMap<NodeIx, ExactNode<'a>>,
}

impl<'t, 'a> ExactInput<'t, 'a> {
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

    /// The result of a search without some pods.
    fn without<T>(&self, gone: &[&CandidatePod], then: impl FnOnce(&PlanInput<'_>) -> T) -> T {
        let mut rooms = self.input.rooms.to_vec();
        let mut changed: BTreeMap<NodeIx, ExactNode<'a>> = BTreeMap::new();
        for pod in gone {
            if let Some(room) = rooms.get_mut(pod.node.0 as usize) {
                room.left.add(&pod.resources);
            }
            if !pod.devices.is_empty()
                && let Some(exact) = self.exact.get(&pod.node)
            {
                give_back(changed.entry(pod.node).or_insert_with(|| exact.clone()), pod);
            }
        }
        let gone: Vec<&PodUid> = gone.iter().map(|pod| &pod.uid).collect();
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

/// Returns a pod's devices and exclusive CPUs.
fn give_back(exact: &mut ExactNode<'_>, pod: &CandidatePod) {
    let mut devices = vec![DeviceSet::EMPTY; exact.class.pools.len()];
    for (resource, returned) in returned(exact, pod) {
        let mut pools = devices.iter_mut().zip(&exact.class.pools);
        if let Some((devices, _)) = pools.find(|(_, pool)| pool.resource == *resource) {
            devices.add(&returned);
        }
    }
    exact.class.release(&devices, &pod.numa);
}

/// The devices that come free with the end of a pod, by resource. Those of an unhealthy GPU stay unavailable.
fn returned<'e>(
    exact: &'e ExactNode<'_>,
    pod: &'e CandidatePod,
) -> impl Iterator<Item = (&'e ResourceName, DeviceSet)> {
    pod.devices.iter().filter_map(|(resource, ids)| {
        let index = exact.class.pools.iter().position(|pool| pool.resource == *resource)?;
        let known = exact.ids.get(index).copied().unwrap_or_default();
        let pool = &exact.class.pools[index];
        let back = (0..known.len())
            .filter(|device| known[*device].as_ref().is_some_and(|id| ids.contains(id)))
            .filter(|device| !is_sick(pool, *device));
        Some((resource, back.collect()))
    })
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
