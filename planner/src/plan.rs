//! Plans a whole gang: which members go where, down to the devices, or why the gang does not fit. Pure; reserves
//! nothing.
//!
//! # Objectives, in order
//!
//! 1. As many members as fit, never below the minimum. A preferred level that holds the minimum goes before the others.
//! 2. What the worst-off member has of what the pods **prefer of devices**: the model, the link and the bandwidth, the
//!    cost.
//! 3. The **narrowest** scope of the fabric: one node, one domain of the smallest level, and so on up.
//! 4. **Bandwidth** of the worst-off member inside its node, then its links.
//! 5. The same **rails** (NIC indices) on every node, see [`rails`].
//! 6. The **fewest domains** of the levels below (racks of a zone).
//! 7. The **least left over**: of the domains that hold the members the one with room for the fewest more, and within
//!    it, at each level down to the nodes, the fewest parts with the least left over. What is left over should be on
//!    nodes that are in use already; a member on one node goes where its rack is. In the smallest domains chosen this
//!    way members are as **level** as no more nodes allow, in whole slices if there are any: 16 and 16, not 18 and 14.
//! 8. What the pods **prefer of nodes** (affinity, taints), then the fewest free devices.
//! 9. The **names**: equal input gives equal decisions.
//!
//! Ranks follow the tree. Devices that no single pod is about to get are tried first, then all free ones.

mod assign_devices;
mod backfill;
mod capacity;
mod choose;
mod compare;
mod demand;
mod devices_left;
mod diagnosis;
mod fill;
mod pack;
mod rails;
mod rules;
mod scope;
mod skew;
mod slices;
mod spares;
mod split;
mod survey;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use gantry_gang::DomainIx;
use gantry_gang::protocol::{Devices, Placement, PlanRequest, Refusal, Reservation};
use gantry_gang::terms::Rails;

use self::choose::{Chooser, Rank, RunChoice};
use self::demand::{Demand, RankedMember};
use self::diagnosis::Views;
use self::fill::{Anchors, Run, counts};
use self::pack::nodes_of;
use self::rails::{Aim, NodeRails};
use self::scope::Bounds;
use self::slices::ordinals;
use self::survey::{FreeRule, Survey};
use super::input::PlanInput;
use crate::snapshot::NodeIx;

pub(super) use capacity::Capacity;
pub use diagnosis::{DeviceCounts, Diagnosis, LevelDiagnosis, unit};

/// Nodes found without the devices that their class has, before planning gives up.
const MOST_SURPRISES: usize = 4;

/// Single places tried as if they were empty, before all are.
const MOST_EMPTIED: usize = 8;

/// Plans a gang: of a tree of groups the first of its selections that fits.
///
/// # Errors
/// Why it does not fit; of a tree of groups why the first selection does not that would on an empty cluster.
pub fn plan(input: &PlanInput<'_>, wanted: &PlanRequest) -> Result<Placement, Refusal> {
    let mut refusal = match plan_selection(input, wanted) {
        Ok(placement) => return Ok(placement),
        Err(refusal) => refusal,
    };
    for other in &wanted.others {
        if other.spares.is_empty() && !refusal.is_hopeless() {
            // Why it does not fit makes no difference.
            if let Some(placement) = attempts(input, other, &Demand::of(other)) {
                return Ok(placement);
            }
            continue;
        }
        match plan_selection(input, other) {
            Ok(placement) => return Ok(placement),
            Err(found) if refusal.is_hopeless() && !found.is_hopeless() => refusal = found,
            Err(_) => {}
        }
    }
    Err(refusal)
}

/// Plans one selection of groups, or a gang that is no tree of groups.
fn plan_selection(input: &PlanInput<'_>, wanted: &PlanRequest) -> Result<Placement, Refusal> {
    if wanted.spares.is_empty() { plan_members(input, wanted) } else { spares::plan(input, wanted) }
}

/// Plans the members of a gang, without its spare reservations.
fn plan_members(input: &PlanInput<'_>, wanted: &PlanRequest) -> Result<Placement, Refusal> {
    let demand = Demand::of(wanted);
    if demand.most < demand.must || demand.most == 0 {
        let exist = u32::try_from(wanted.members.len()).unwrap_or(u32::MAX);
        return Err(Refusal::TooFewMembers { must: demand.must, exist });
    }
    match attempts(input, wanted, &demand) {
        Some(placement) => Ok(placement),
        None if is_short_of_rails(input, wanted, &demand) => {
            Err(Refusal::RailsTaken(Box::new(rails::shortage(input, wanted))))
        }
        None => Err(with_views(input, wanted, &demand, |views| diagnosis::refused(views, wanted))
            .unwrap_or(Refusal::UnknownRequest)),
    }
}

/// A placement, without devices that single pods are about to get where that will do.
fn attempts(input: &PlanInput<'_>, wanted: &PlanRequest, demand: &Demand<'_>) -> Option<Placement> {
    let countings = [FreeRule::Open, FreeRule::Free].into_iter();
    let is_possible = demand.most >= demand.must && demand.most > 0;
    countings.filter(|_| is_possible).find_map(|counting| attempt(input, wanted, demand, counting))
}

/// What a gang needs and what is there, level by level, whether it fits or not.
pub fn explain(input: &PlanInput<'_>, wanted: &PlanRequest) -> Diagnosis {
    let mut demand = Demand::of(wanted);
    // For an incomplete gang the existing members are looked at: the others are not missing for lack of resources.
    demand.must = demand.must.min(demand.most);
    with_views(input, wanted, &demand, Diagnosis::of).unwrap_or_default()
}

/// The nodes of a backfill reservation: those that would hold the minimum if nothing else were on them, where the
/// fewest devices are missing. Empty if the cluster could not hold it.
pub fn backfill_nodes(input: &PlanInput<'_>, wanted: &PlanRequest) -> Vec<NodeIx> {
    let demand = Demand::least_of(wanted);
    if demand.most < demand.must {
        return Vec::new();
    }
    with_views(input, wanted, &demand, |views| {
        let (now, empty) = (views.now, views.empty);
        let chosen = |survey: &Survey<'_>| choose(survey, views.anchors, &demand, views.bounds);
        let marked = backfill::nodes(now, empty, views.anchors, &demand, views.bounds);
        let hold = || !empty.minds() || chosen(&empty.within(&marked)).is_some();
        if !marked.is_empty() && hold() {
            return marked;
        }
        // Nodes are taken for each shape by itself. Members with affinity rules among each other may not fit on them
        // all the same.
        let candidates = backfill::candidates(now, empty, views.anchors, &demand, views.bounds).into_iter();
        let chosen = candidates
            .take(MOST_EMPTIED)
            .find_map(|place| chosen(&empty.within(&nodes_of(empty, place))))
            .or_else(|| chosen(empty));
        let chosen = chosen.map(|chosen| chosen.runs).unwrap_or_default();
        let nodes: BTreeSet<NodeIx> = chosen.iter().map(|run| run.node).collect();
        nodes.into_iter().collect()
    })
    .unwrap_or_default()
}

/// Whether at least the minimum fits.
pub(super) fn fits(input: &PlanInput<'_>, wanted: &PlanRequest) -> bool {
    let demand = Demand::least_of(wanted);
    if demand.most < demand.must || demand.must == 0 {
        return false;
    }
    match wanted.terms.rails {
        Rails::RequireSame => attempt(input, wanted, &demand, FreeRule::Free).is_some(),
        Rails::Any | Rails::Same => {
            Survey::new(*input, wanted, &demand.shapes, FreeRule::Free).is_some_and(|survey| {
                let anchors = Anchors::of(&survey, wanted);
                choose(&survey, &anchors, &demand, Bounds::of(&input.fabric.levels, wanted)).is_some()
            })
        }
    }
}

/// Whether a gang would fit if it did not require the same rails.
fn is_short_of_rails(input: &PlanInput<'_>, wanted: &PlanRequest, demand: &Demand<'_>) -> bool {
    wanted.terms.rails == Rails::RequireSame
        && on_any_rails(input, wanted, demand, FreeRule::Free, &Aim::default()).is_some()
}

fn with_views<T>(
    input: &PlanInput<'_>,
    wanted: &PlanRequest,
    demand: &Demand<'_>,
    then: impl FnOnce(&Views<'_, '_>) -> T,
) -> Option<T> {
    let now = Survey::new(*input, wanted, &demand.shapes, FreeRule::Free)?;
    let empty = Survey::new(*input, wanted, &demand.shapes, FreeRule::Empty)?;
    Some(then(&Views {
        anchors: &Anchors::of(&now, wanted),
        now: &now,
        empty: &empty,
        demand,
        bounds: Bounds::of(&input.fabric.levels, wanted),
    }))
}

fn attempt(
    input: &PlanInput<'_>,
    wanted: &PlanRequest,
    demand: &Demand<'_>,
    counting: FreeRule,
) -> Option<Placement> {
    let aim = Aim::of(input, wanted);
    let own = on_any_rails(input, wanted, demand, counting, &aim)?;
    let planned = rails::aligned(input, wanted, own, &aim, &|input, aim| {
        on_any_rails(input, wanted, demand, counting, aim)
    })?;
    let rails = rails::text(wanted.terms.rails, &planned.rails);
    Some(Placement { rails, ..planned.placement })
}

/// A plan, with what plans on different rails are compared by.
#[derive(Debug, Clone)]
struct RatedPlan {
    placement: Placement,
    /// Without the step of quality, which [`Self::slowest`] replaces.
    rank: Rank,
    /// The bandwidth of the slowest member within its node, MB/s.
    slowest: u64,
    /// The nodes of all members, also of those that have a reservation.
    nodes: Vec<NodeIx>,
    /// Of each of these nodes.
    rails: Vec<NodeRails>,
}

/// A plan that takes rails into account only to choose the devices of its nodes.
fn on_any_rails(
    input: &PlanInput<'_>,
    wanted: &PlanRequest,
    demand: &Demand<'_>,
    counting: FreeRule,
    aim: &Aim,
) -> Option<RatedPlan> {
    let mut wanted = wanted.clone();
    for _ in 0..MOST_SURPRISES {
        let survey = Survey::new(*input, &wanted, &demand.shapes, counting)?;
        let anchors = Anchors::of(&survey, &wanted);
        let bounds = Bounds::of(&input.fabric.levels, &wanted);
        let chosen = choose_by(&survey, &anchors, demand, bounds, true)?;
        match assign_devices::assign_devices(&survey, &chosen.runs, aim) {
            Ok(assigned) => {
                let (nodes, rails) = assigned.rails.into_iter().unzip();
                let placement = placement(&survey, &anchors, demand, &chosen.runs, assigned.devices);
                return Some(RatedPlan {
                    placement: Placement { compared: chosen.compared.map(Arc::new), ..placement },
                    rank: Rank { tier: 0, ..chosen.rank },
                    slowest: assigned.slowest,
                    nodes,
                    rails,
                });
            }
            Err(node) => wanted.without.push(survey.name(node).into()),
        }
    }
    None
}

/// The best choice. Where members must share the value of a label, the best over all its values; with several kinds of
/// members also over several values.
fn choose(survey: &Survey<'_>, anchors: &Anchors, demand: &Demand<'_>, bounds: Bounds) -> Option<RunChoice> {
    choose_by(survey, anchors, demand, bounds, false)
}

/// The same. `records`: with the domains that were compared. None are recorded if the gang has members elsewhere, or if its
/// members must share the value of a label.
fn choose_by(
    survey: &Survey<'_>,
    anchors: &Anchors,
    demand: &Demand<'_>,
    bounds: Bounds,
    records: bool,
) -> Option<RunChoice> {
    let records = records && anchors.is_empty() && survey.rules.open().is_none();
    let anyhow = || Chooser::new(survey, anchors).recording(records).choose(demand, bounds);
    let Some(rule) = survey.rules.open() else {
        return anyhow();
    };
    let mut best = match survey.rules.near[rule].is_among_its_like() {
        // Later members follow to the value of the first.
        true => None,
        false => anyhow(),
    };
    for nodes in survey.values(rule, demand) {
        if best.as_ref().is_some_and(|best| best.rank == Rank::best(demand.most)) {
            break;
        }
        let chosen = choose(&survey.kept_to(rule, &nodes), anchors, demand, bounds);
        let better = |chosen: &RunChoice| best.as_ref().is_none_or(|best| chosen.rank < best.rank);
        best = chosen.filter(better).or(best);
    }
    best
}

fn placement(
    survey: &Survey<'_>,
    anchors: &Anchors,
    demand: &Demand<'_>,
    runs: &[Run],
    devices: Vec<Vec<Devices>>,
) -> Placement {
    let slots = survey.shapes.len();
    let mut waiting: Vec<VecDeque<(u32, RankedMember<'_>)>> = vec![VecDeque::new(); slots];
    for (ordinal, asked) in ordinals(demand.wanted, demand.pick(&counts(runs, slots))) {
        waiting[asked.slot].push_back((ordinal, asked));
    }
    let (mut places, mut spares) = (Vec::new(), Vec::new());
    let mut all = anchors.clone();
    for (run, devices) in runs.iter().zip(devices) {
        for devices in devices {
            if let Some((ordinal, asked)) = waiting[run.slot].pop_front() {
                let is_spare = asked.member.uid.as_str().is_empty();
                if !is_spare {
                    all.add(survey, run.node);
                }
                let of_kind = if is_spare { &mut spares } else { &mut places };
                of_kind.push(Reservation {
                    shape: asked.member.shape,
                    node: survey.name(run.node).into(),
                    devices,
                    rank: asked.member.rank,
                    role: Arc::clone(&asked.member.role),
                    ordinal: Some(ordinal),
                    follows: survey.follows(run.node, run.slot),
                });
            }
        }
    }
    Placement { places, spares, domain: domain(survey, &all), ..Placement::default() }
}

/// The smallest domain that holds some nodes, as text: `node a`, `rack r7`, `3 racks of zone a`, `cluster`.
fn domain(survey: &Survey<'_>, nodes: &Anchors) -> Arc<str> {
    if let (Some(node), 1) = (nodes.nodes.first(), nodes.nodes.len()) {
        return format!("node {}", survey.name(*node)).into();
    }
    let holding = (0u32..).zip(&survey.fabric.domains).filter(|(number, _)| nodes.all_in(DomainIx(*number)));
    let Some((number, smallest)) = holding.last() else {
        return "cluster".into();
    };
    let level = |level: Option<usize>| {
        level.and_then(|level| survey.fabric.levels.0.get(level)).map(|level| &*level.name)
    };
    let used = smallest.children.iter().filter(|child| nodes.are_in(**child));
    let children = used.clone().count();
    let below = used.filter_map(|child| survey.domain(*child)).find_map(|child| level(child.level));
    let own = smallest.level.map(|_| survey.fabric.words(DomainIx(number)));
    match (below, own) {
        (Some(below), Some(own)) => format!("{children} {below}s of {own}").into(),
        (Some(below), None) => format!("{children} {below}s").into(),
        (None, Some(own)) => own.into(),
        (None, None) => "cluster".into(),
    }
}

#[cfg(test)]
pub(super) mod tests;
