//! Rails: the NIC indices next to the GPUs that a gang uses on a node. Collectives over several nodes are fastest where
//! each node uses the same ones. Chooses devices, and if need be nodes, so that they are.
//!
//! Preferred rails only decide between plans of as many members, in as narrow a scope, at the same bandwidth of the
//! slowest member. Nodes are compared with those on which the gang uses as many GPUs. Required rails are the same on all
//! nodes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gantry_api::placement::CountedDevices;
use gantry_gang::protocol::{MemberGroup, PlanRequest, RailShortage};
use gantry_gang::terms::Rails;
use gantry_topology::{GpuSet, NicSet};

use super::RatedPlan;
use super::diagnosis::unit;
use crate::input::{ExactNode, PlanInput};
use crate::kind::Kind;
use crate::shape::Shape;
use crate::snapshot::{Class, NodeIx, NodeState, Snapshot};

/// Rails tried for a gang that requires the same.
const MOST_REQUIRED: usize = 32;
/// Rails tried for a gang that prefers the same, and nodes looked at over all of them.
const MOST_PREFERRED: usize = 8;
const PREFERRED_NODES: usize = 1 << 14;
/// Sets of GPUs looked at for the rails that are free.
const MOST_SETS: usize = 1 << 17;
/// Different rails that one text names.
const NAMED: usize = 2;

/// The rails that the devices of a plan should have.
#[derive(Debug, Clone, Default)]
pub(super) struct Aim {
    pub(super) rails: Target,
    /// The least bandwidth of a member, MB/s.
    pub(super) floor: u64,
    /// GPUs of members that have a reservation, by node.
    pub(super) taken: BTreeMap<NodeIx, GpuSet>,
}

/// The rails wanted on a node.
#[derive(Debug, Clone, Default)]
pub(super) enum Target {
    /// None in particular.
    #[default]
    Any,
    /// The same on every node.
    Only(NicSet),
    /// By the number of GPUs that the gang uses on the node.
    ByGpus(BTreeMap<usize, NicSet>),
}

impl Target {
    /// The rails of a node where the gang uses so many GPUs.
    pub(super) fn of(&self, gpus: usize) -> Option<NicSet> {
        match self {
            Self::Any => None,
            Self::Only(nics) => Some(*nics),
            Self::ByGpus(rails) => rails.get(&gpus).copied(),
        }
    }
}

impl Aim {
    /// Without rails, for a gang with these reservations.
    pub(super) fn of(input: &PlanInput<'_>, wanted: &PlanRequest) -> Self {
        let mut aim = Self::default();
        if wanted.terms.rails == Rails::Any {
            return aim;
        }
        for sibling in wanted.placed.iter().filter(|sibling| !sibling.devices.is_empty()) {
            let Some(node) = input.snapshot.find(sibling.node.as_str()) else { continue };
            let Some(exact) = (input.exact)(node) else { continue };
            let gpus: GpuSet = sibling
                .devices
                .iter()
                .filter_map(|(resource, ids)| Some((exact.class.pool(resource.as_str())?, ids)))
                .filter(|((_, pool), _)| matches!(pool.shape, Shape::Whole))
                .flat_map(|((index, _), ids)| {
                    let known = exact.ids.get(index).copied().unwrap_or_default();
                    known.iter().enumerate().filter_map(move |(device, id)| {
                        id.as_ref().is_some_and(|id| ids.contains(id)).then_some(device)
                    })
                })
                .collect();
            let taken = aim.taken.entry(node).or_default();
            *taken = *taken | gpus;
        }
        aim
    }

    fn towards(&self, rails: Target, floor: u64) -> Self {
        Self { rails, floor, taken: self.taken.clone() }
    }
}

/// The GPUs of a gang on one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NodeRails {
    pub(super) gpus: usize,
    /// Empty if they are not known.
    pub(super) nics: NicSet,
}

/// Whether the rails of a plan's nodes are as the policy wants them.
fn agree(policy: Rails, nodes: &[NodeRails]) -> bool {
    match policy {
        Rails::Any => true,
        Rails::Same => {
            let mut first: BTreeMap<usize, NicSet> = BTreeMap::new();
            nodes.iter().all(|node| *first.entry(node.gpus).or_insert(node.nics) == node.nics)
        }
        Rails::RequireSame => match nodes {
            [] | [_] => true,
            [first, rest @ ..] => !first.nics.is_empty() && rest.iter().all(|node| node.nics == first.nics),
        },
    }
}

/// How many nodes have the most frequent rails of the nodes with as many GPUs.
fn agreeing(nodes: &[NodeRails]) -> usize {
    let mut counts: BTreeMap<usize, BTreeMap<NicSet, usize>> = BTreeMap::new();
    for node in nodes {
        *counts.entry(node.gpus).or_default().entry(node.nics).or_default() += 1;
    }
    counts.values().filter_map(|rails| rails.values().max()).sum()
}

/// The rails of a plan, for people; empty for one node, and where no NICs are known.
pub(super) fn text(policy: Rails, nodes: &[NodeRails]) -> Arc<str> {
    if policy == Rails::Any || nodes.len() < 2 || nodes.iter().all(|node| node.nics.is_empty()) {
        return "".into();
    }
    let mut counts: BTreeMap<NicSet, usize> = BTreeMap::new();
    for node in nodes {
        *counts.entry(node.nics).or_default() += 1;
    }
    let mut counts: Vec<(NicSet, usize)> = counts.into_iter().collect();
    counts.sort_by_key(|(nics, count)| (Reverse(*count), *nics));
    if let [(nics, count)] = counts[..] {
        return format!("{} on all {count} nodes", named(nics)).into();
    }
    let of = |count: usize| if count == 1 { "1 node".to_owned() } else { format!("{count} nodes") };
    let others: usize = counts.iter().skip(NAMED).map(|(_, count)| count).sum();
    let shown = counts.iter().take(NAMED).map(|(nics, count)| format!("{} on {}", named(*nics), of(*count)));
    let mut shown: Vec<String> = shown.collect();
    if others > 0 {
        shown.push(format!("other NICs on {}", of(others)));
    }
    shown.join(", ").into()
}

fn named(nics: NicSet) -> String {
    match nics.len() {
        0 => "no known NIC".to_owned(),
        1 => format!("NIC {nics}"),
        _ => format!("NICs {nics}"),
    }
}

/// The plan with the rails that the gang prefers or requires, given its plan without regard to them. `plan` plans the
/// same members from another input or with another aim. `None` if required rails are not free.
pub(super) fn aligned(
    input: &PlanInput<'_>,
    wanted: &PlanRequest,
    own: RatedPlan,
    aim: &Aim,
    plan: &dyn Fn(&PlanInput<'_>, &Aim) -> Option<RatedPlan>,
) -> Option<RatedPlan> {
    let policy = wanted.terms.rails;
    if agree(policy, &own.rails) {
        return Some(own);
    }
    let is_required = policy == Rails::RequireSame;
    let as_good = |planned: &RatedPlan| planned.rank <= own.rank && planned.slowest >= own.slowest;
    // Other devices on the same nodes.
    let by_gpus = most_frequent(input, &own, aim);
    let realigned = plan(input, &aim.towards(by_gpus, own.slowest)).filter(as_good);
    if let Some(planned) = realigned.as_ref().filter(|planned| agree(policy, &planned.rails)) {
        return Some(planned.clone());
    }
    // Other nodes.
    let nodes = input.snapshot.nodes.len().max(1);
    let most = if is_required { MOST_REQUIRED } else { (PREFERRED_NODES / nodes).clamp(1, MOST_PREFERRED) };
    let mut best: Option<RatedPlan> = None;
    for (gpus, nics) in candidates(input, wanted, &own, aim).into_iter().take(most) {
        let floor = if is_required { 0 } else { own.slowest };
        let found =
            restricted(input, (gpus, nics), |input| plan(input, &aim.towards(Target::Only(nics), floor)));
        let Some(mut found) = found.filter(|found| agree(policy, &found.rails)) else {
            continue;
        };
        if let Some(compared) = &mut found.placement.compared {
            Arc::make_mut(compared).counted = CountedDevices::OnRails;
        }
        if as_good(&found) {
            return Some(found);
        }
        let key = |planned: &RatedPlan| (planned.rank, Reverse(planned.slowest));
        if is_required && best.as_ref().is_none_or(|best| key(&found) < key(best)) {
            best = Some(found);
        }
    }
    if is_required {
        return best;
    }
    let more = |planned: &RatedPlan| agreeing(&planned.rails) > agreeing(&own.rails);
    Some(realigned.filter(more).unwrap_or(own))
}

/// By the number of GPUs used on a node: the rails that most of the plan's nodes can have.
fn most_frequent(input: &PlanInput<'_>, own: &RatedPlan, aim: &Aim) -> Target {
    let mut sets = MOST_SETS;
    let mut classes: BTreeMap<(usize, u32), usize> = BTreeMap::new();
    let mut counts: BTreeMap<usize, HashMap<NicSet, usize>> = BTreeMap::new();
    for (node, rails) in own.nodes.iter().zip(&own.rails) {
        let fixed = aim.taken.get(node).is_some_and(|taken| !taken.is_empty());
        match input.snapshot.class(*node).filter(|_| !fixed) {
            Some(class) => *classes.entry((rails.gpus, class.0)).or_default() += 1,
            // The GPUs of members that have a reservation do not change.
            None => *counts.entry(rails.gpus).or_default().entry(rails.nics).or_default() += nodes_of(input),
        }
    }
    for ((gpus, class), nodes) in classes {
        let Some(NodeState::Ours(class)) = input.snapshot.classes.get(class as usize).map(|class| &**class)
        else {
            continue;
        };
        for nics in free_rails(class, gpus, &mut sets) {
            *counts.entry(gpus).or_default().entry(nics).or_default() += nodes;
        }
    }
    let best = |rails: HashMap<NicSet, usize>| {
        let rails = rails.into_iter().filter(|(nics, _)| !nics.is_empty());
        rails.max_by_key(|(nics, nodes)| (*nodes, Reverse(*nics))).map(|(nics, _)| nics)
    };
    Target::ByGpus(counts.into_iter().filter_map(|(gpus, rails)| Some((gpus, best(rails)?))).collect())
}

fn nodes_of(input: &PlanInput<'_>) -> usize {
    input.snapshot.nodes.len().max(1)
}

/// Rails that may be the same on all nodes, with the number of GPUs on them, those that are free on most nodes first.
fn candidates(
    input: &PlanInput<'_>,
    wanted: &PlanRequest,
    own: &RatedPlan,
    aim: &Aim,
) -> Vec<(usize, NicSet)> {
    if aim.taken.values().any(|taken| !taken.is_empty()) {
        let taken: BTreeSet<NodeIx> = aim.taken.keys().copied().collect();
        let fixed = own.nodes.iter().zip(&own.rails).filter(|(node, _)| taken.contains(node));
        let fixed: BTreeSet<NicSet> = fixed.map(|(_, rails)| rails.nics).collect();
        return fixed.into_iter().filter(|nics| !nics.is_empty()).map(|nics| (0, nics)).collect();
    }
    let counted = free_on_nodes(input, &sizes(input, wanted, own));
    // With one shape it is known how many members are on a node.
    let each = one_size(input, wanted);
    let enough = |((gpus, _), nodes): &((usize, NicSet), usize)| {
        each.is_none_or(|each| gpus / each.max(1) * nodes >= wanted.must as usize)
    };
    let mut found: Vec<((usize, NicSet), usize)> = counted.into_iter().filter(enough).collect();
    // The narrowest scope first: most GPUs on a node.
    found.sort_by_key(|((gpus, nics), nodes)| (Reverse(*gpus), Reverse(*nodes), *nics));
    found.into_iter().map(|(rails, _)| rails).collect()
}

/// The GPUs of a member, if all of the gang's members have as many.
fn one_size(input: &PlanInput<'_>, wanted: &PlanRequest) -> Option<usize> {
    let mut sizes = wanted.members.iter().map(|member| {
        let asks = &input.shape(member.shape)?.request.asks;
        let devices: u32 = asks.iter().map(|ask| ask.devices).sum();
        Some(devices as usize)
    });
    let first = sizes.next()??;
    sizes.all(|size| size == Some(first)).then_some(first)
}

/// Numbers of GPUs that the gang may use on each node.
fn sizes(input: &PlanInput<'_>, wanted: &PlanRequest, own: &RatedPlan) -> BTreeSet<usize> {
    let mut sizes: BTreeSet<usize> = own.rails.iter().map(|rails| rails.gpus).collect();
    if let (Rails::RequireSame, Some(each)) = (wanted.terms.rails, one_size(input, wanted)) {
        let most = input.snapshot.classes.iter().filter_map(|class| match &**class {
            NodeState::Ours(class) => Some(class.kind.gpus()),
            _ => None,
        });
        let most = most.max().unwrap_or(0);
        sizes.extend((1..).map(|members| members * each).take_while(|gpus| each > 0 && *gpus <= most));
    }
    sizes.retain(|gpus| *gpus > 0);
    sizes
}

/// By number of GPUs and rails: the nodes where they are free.
fn free_on_nodes(input: &PlanInput<'_>, sizes: &BTreeSet<usize>) -> HashMap<(usize, NicSet), usize> {
    let mut nodes_of_class = vec![0; input.snapshot.classes.len()];
    for class in &input.snapshot.nodes {
        if let Some(nodes) = nodes_of_class.get_mut(class.0 as usize) {
            *nodes += 1;
        }
    }
    let mut sets = MOST_SETS;
    let mut found: HashMap<(usize, NicSet), usize> = HashMap::new();
    for (class, nodes) in input.snapshot.classes.iter().zip(nodes_of_class) {
        let NodeState::Ours(class) = &**class else { continue };
        if nodes == 0 || class.withheld.is_some() {
            continue;
        }
        for gpus in sizes {
            for nics in free_rails(class, *gpus, &mut sets) {
                *found.entry((*gpus, nics)).or_default() += nodes;
            }
        }
    }
    found
}

/// The rails of all sets of so many free GPUs, as long as `sets` lasts.
fn free_rails(class: &Class, gpus: usize, sets: &mut usize) -> BTreeSet<NicSet> {
    let mut found = BTreeSet::new();
    for pool in class.pools.iter().filter(|pool| matches!(pool.shape, Shape::Whole)) {
        for set in pool.free.gpus().subsets(gpus) {
            if *sets == 0 {
                return found;
            }
            *sets -= 1;
            found.insert(class.kind.rails(set));
        }
    }
    found.remove(&NicSet::default());
    found
}

/// Plans as if only GPUs on some rails were free, and those only where there are at least so many and all of
/// the rails. GPUs that kubelet aligns stay: it chooses among all free ones.
fn restricted<T>(input: &PlanInput<'_>, rails: (usize, NicSet), then: impl FnOnce(&PlanInput<'_>) -> T) -> T {
    let mut kinds: HashMap<*const Kind, GpuSet> = HashMap::new();
    let classes = input.snapshot.classes.iter().map(|class| match &**class {
        NodeState::Ours(class) => {
            let on = *kinds.entry(Arc::as_ptr(&class.kind)).or_insert_with(|| on_rails(&class.kind, rails.1));
            let mut class = class.clone();
            restrict(&mut class, on, rails);
            Arc::new(NodeState::Ours(class))
        }
        _ => Arc::clone(class),
    });
    let classes = Arc::new(classes.collect());
    let snapshot = Snapshot { classes, ..input.snapshot.clone() };
    let exact = |node: NodeIx| {
        let mut exact: ExactNode<'_> = (input.exact)(node)?;
        let on = on_rails(&exact.class.kind, rails.1);
        restrict(&mut exact.class, on, rails);
        Some(exact)
    };
    then(&PlanInput {
        snapshot: &snapshot,
        rooms: input.rooms,
        fabric: input.fabric,
        shapes: input.shapes,
        barred: input.barred,
        gone: input.gone,
        exact: &exact,
        effort: input.effort,
    })
}

/// The GPUs of a machine with rails, all of them among `nics`.
fn on_rails(kind: &Kind, nics: NicSet) -> GpuSet {
    let is_on = |gpu: &usize| {
        let own = kind.rails(GpuSet::single(*gpu));
        !own.is_empty() && own.is_subset(nics)
    };
    (0..kind.gpus()).filter(is_on).collect()
}

fn restrict(class: &mut Class, on: GpuSet, (least, nics): (usize, NicSet)) {
    let kind = Arc::clone(&class.kind);
    for pool in &mut class.pools {
        if matches!(pool.shape, Shape::Whole) && pool.alignment.is_none() {
            for free in [&mut pool.free, &mut pool.open] {
                let left = free.gpus() & on;
                let serves = left.len() >= least && (least == 0 || kind.rails(left) == nics);
                *free = if serves { left } else { GpuSet::EMPTY }.into();
            }
        }
    }
}

/// What is free instead of the same rails for all members of a gang that would fit on any.
pub(super) fn shortage(input: &PlanInput<'_>, wanted: &PlanRequest) -> RailShortage {
    let mut groups: BTreeMap<Vec<(Arc<str>, u32)>, u32> = BTreeMap::new();
    for member in wanted.members.iter().take(wanted.must.max(1) as usize) {
        let asks = input.shape(member.shape).map(|shape| &shape.request.asks);
        let asks = asks.into_iter().flatten();
        let requests = asks.map(|ask| (unit(ask.resource.as_str()).into(), ask.devices)).collect();
        *groups.entry(requests).or_default() += 1;
    }
    let each = one_size(input, wanted);
    let sizes: BTreeSet<usize> = each.into_iter().collect();
    let found = free_on_nodes(input, &sizes).into_iter();
    let best = found.max_by_key(|((_, nics), nodes)| (*nodes, Reverse(*nics)));
    RailShortage {
        members: groups.into_iter().map(|(requests, count)| MemberGroup { count, requests }).collect(),
        best: best.map(|((_, nics), nodes)| (named(nics).into(), nodes)),
    }
}
