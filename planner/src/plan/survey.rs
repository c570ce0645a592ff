//! The members of each shape that every node takes, and the quality of the devices that they would have there.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use gantry_gang::fabric::Domain;
use gantry_gang::protocol::{Obstacle, PlanRequest, ShapeId};
use gantry_gang::{DomainIx, Fabric, Resources};

use super::demand::Demand;
use super::devices_left::DevicesLeft;
use super::rules::{NearRule, Rules, Separation};
use super::skew::Skew;
use crate::decide;
use crate::devices::DeviceSet;
use crate::input::{NodeResources, PlacementRules, PlanInput, Shape};
use crate::kind::Spot;
use crate::layout::{Layout, Offer};
use crate::numa::NumaNode;
use crate::placement::PlacementRequest;
use crate::quality::{Quality, QualitySum};
use crate::request::{Ask, Request};
use crate::snapshot::{Class, NodeIx, NodeState, Pool};

/// Which devices count as free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FreeRule {
    /// Devices that no pod has or is about to get.
    Open,
    /// Devices that no pod has: single pods between prioritize and bind would go elsewhere.
    Free,
    /// The same, as if devices that are idle and reserved were free.
    Unreserved,
    /// The same as [`FreeRule::Free`], as if every plugin served.
    Served,
    /// Every healthy device, as if the node were empty.
    Empty,
}

/// The members that every node takes.
pub(super) struct Survey<'a> {
    pub(super) input: PlanInput<'a>,
    pub(super) counting: FreeRule,
    pub(super) fabric: &'a Fabric,
    pub(super) shapes: Vec<&'a Shape>,
    pub(super) rules: Rules,
    /// The spread constraints.
    pub(super) skews: Arc<[Skew]>,
    /// By class and shape; only for classes of nodes that could take a member.
    classes: Vec<Vec<ClassCapacity>>,
    /// By node and shape: the most by everything but devices.
    limits: Vec<u32>,
    /// By shape: the least quality of members at each step, the best first; `None`: every member counts.
    tiers: Vec<Vec<Option<Quality>>>,
    /// The steps at which as much is had of what the members prefer, the most first.
    grades: Vec<Range<usize>>,
    /// A search ended without a proof that nothing fits. Shared by the surveys made of this one.
    gave_up: Rc<Cell<bool>>,
}

impl<'a> Survey<'a> {
    /// `None` if a shape is not known.
    pub(super) fn new(
        input: PlanInput<'a>,
        wanted: &PlanRequest,
        shapes: &[ShapeId],
        counting: FreeRule,
    ) -> Option<Self> {
        let shapes: Vec<&Shape> = shapes.iter().map(|shape| input.shape(*shape)).collect::<Option<_>>()?;
        let needs: Vec<_> = shapes.iter().map(|shape| &*shape.needs).collect();
        let nodes = input.snapshot.nodes.len();
        let mut survey = Self {
            input,
            counting,
            fabric: input.fabric,
            rules: Rules::of(&needs),
            skews: Arc::default(),
            classes: vec![Vec::new(); input.snapshot.classes.len()],
            limits: vec![0; nodes * shapes.len()],
            tiers: Vec::new(),
            grades: Vec::new(),
            gave_up: Rc::default(),
            shapes,
        };
        survey.limit(wanted);
        survey.rate();
        Some(survey)
    }

    fn nodes(&self) -> impl Iterator<Item = NodeIx> + use<> {
        (0..u32::try_from(self.input.snapshot.nodes.len()).unwrap_or(u32::MAX)).map(NodeIx)
    }

    /// The survey with other spread constraints.
    pub(super) fn with_skews(&self, skews: Arc<[Skew]>) -> Self {
        Self {
            input: self.input,
            counting: self.counting,
            fabric: self.fabric,
            shapes: self.shapes.clone(),
            rules: self.rules.clone(),
            skews,
            classes: self.classes.clone(),
            limits: self.limits.clone(),
            tiers: self.tiers.clone(),
            grades: self.grades.clone(),
            gave_up: Rc::clone(&self.gave_up),
        }
    }

    /// A search ends without a proof.
    pub(super) fn give_up(&self) {
        self.gave_up.set(true);
    }

    /// Whether a search finds nothing, and that is a proof.
    pub(super) fn refutes<T>(&self, search: impl FnOnce(&Self) -> Option<T>) -> bool {
        self.gave_up.set(false);
        search(self).is_none() && !self.gave_up.get()
    }

    /// The size of a shape, smallest first: devices, CPU, memory.
    pub(super) fn size(&self, slot: usize) -> (u64, i64, i64) {
        self.shapes.get(slot).map_or((0, 0, 0), |shape| {
            let devices = shape.request.asks.iter().map(|ask| u64::from(ask.devices)).sum();
            (devices, shape.needs.resources.milli_cpu, shape.needs.resources.memory)
        })
    }

    /// Whether members of any of some shapes may be on a node, as far as its labels and taints are concerned.
    pub(super) fn admits(&self, node: NodeIx, counts: &[u32]) -> bool {
        let facts = self.input.rooms.get(node.0 as usize).and_then(|room| room.facts.as_ref());
        facts.is_some_and(|facts| {
            let mut wanted = self.shapes.iter().zip(counts).filter(|(_, count)| **count > 0);
            wanted.any(|(shape, _)| shape.needs.admits(facts).is_ok())
        })
    }

    /// Whether rules among members go beyond the node.
    pub(super) fn relates(&self) -> bool {
        self.rules.spreads() || !self.skews.is_empty() || self.rules.open().is_some()
    }

    /// Whether members have rules about each other's nodes.
    pub(super) fn minds(&self) -> bool {
        self.relates() || self.rules.any()
    }

    /// The survey of some nodes alone.
    pub(super) fn within(&self, nodes: &[NodeIx]) -> Self {
        let mut within = self.with_skews(Arc::clone(&self.skews));
        let slots = self.shapes.len();
        for (number, limits) in (0u32..).zip(within.limits.chunks_mut(slots.max(1))) {
            if !nodes.contains(&NodeIx(number)) {
                limits.fill(0);
            }
        }
        within
    }

    /// By domain and shape: members that its nodes take, each shape by itself.
    pub(super) fn sums(&self, tier: usize) -> Vec<u32> {
        let slots = self.shapes.len();
        self.bottom_up(slots, |node, into| {
            for (slot, sum) in into.iter_mut().enumerate() {
                *sum = sum.saturating_add(self.takes(node, slot, tier));
            }
        })
    }

    /// Free devices by domain: of the pools that the gang asks for, on nodes that take any of it.
    pub(super) fn loose(&self) -> Vec<u32> {
        let tier = self.lowest_tier();
        self.bottom_up(1, |node, into| {
            if (0..self.shapes.len()).any(|slot| self.takes(node, slot, tier) > 0) {
                into[0] = into[0].saturating_add(self.free_devices(node));
            }
        })
    }

    fn bottom_up(&self, width: usize, of_node: impl Fn(NodeIx, &mut [u32])) -> Vec<u32> {
        let mut sums = vec![0u32; self.fabric.domains.len() * width];
        for (index, domain) in self.fabric.domains.iter().enumerate().rev() {
            for node in &domain.nodes {
                of_node(NodeIx(*node), &mut sums[index * width..(index + 1) * width]);
            }
            if let Some(parent) = domain.parent {
                for at in 0..width {
                    let own = sums[index * width + at];
                    if let Some(above) = sums.get_mut(parent.0 as usize * width + at) {
                        *above = above.saturating_add(own);
                    }
                }
            }
        }
        sums
    }

    /// Resources that a node has left, other than devices.
    pub(super) fn left(&self, node: NodeIx) -> Option<&'a Resources> {
        let room: &NodeResources = self.input.rooms.get(node.0 as usize)?;
        let facts = room.facts.as_ref()?;
        Some(match self.counting {
            FreeRule::Empty => &facts.allocatable,
            FreeRule::Open | FreeRule::Free | FreeRule::Unreserved | FreeRule::Served => &room.left,
        })
    }

    /// The value of a node's label.
    pub(super) fn label(&self, node: NodeIx, key: &str) -> Option<&'a Arc<str>> {
        let room: &NodeResources = self.input.rooms.get(node.0 as usize)?;
        room.facts.as_ref()?.labels.get(key)
    }

    /// How much a shape prefers a node, by preferred affinity and taints.
    pub(super) fn likes(&self, node: NodeIx, slot: usize) -> i64 {
        let facts = self.input.rooms.get(node.0 as usize).and_then(|room| room.facts.as_ref());
        let shape = self.shapes.get(slot);
        facts.zip(shape).map_or(0, |(facts, shape)| shape.needs.prefers(facts))
    }

    pub(super) fn class(&self, node: NodeIx) -> Option<&'a Class> {
        match self.input.snapshot.node_state(node) {
            NodeState::Ours(class) => Some(class),
            NodeState::Foreign { .. } | NodeState::Gone => None,
        }
    }

    /// The pools that the gang asks for, each once.
    fn pools(&self, class: &'a Class) -> impl Iterator<Item = &'a Pool> {
        class.pools.iter().filter(|pool| {
            let asked = |shape: &&Shape| shape.request.devices(pool.resource.as_str()) > 0;
            self.shapes.iter().any(asked)
        })
    }

    /// Whether any devices that the gang asks for are idle and reserved.
    pub(super) fn has_reserved(&self) -> bool {
        self.nodes().any(|node| {
            let class = self.class(node);
            class.is_some_and(|class| self.pools(class).any(|pool| pool.reserved > 0))
        })
    }

    /// Free devices of the pools that the gang asks for.
    pub(super) fn free_devices(&self, node: NodeIx) -> u32 {
        let class = self.class(node);
        let pools = class.into_iter().flat_map(|class| self.pools(class));
        let free: usize = pools.map(|pool| available(pool, self.counting)).sum();
        u32::try_from(free).unwrap_or(u32::MAX)
    }

    /// Whether none of the pools that the gang asks for is in use.
    pub(super) fn is_fresh(&self, node: NodeIx) -> bool {
        let class = self.class(node);
        class
            .is_some_and(|class| self.pools(class).all(|pool| available(pool, self.counting) == pool.devices))
    }

    /// Whether a node is within a domain.
    pub(super) fn lies_in(&self, node: NodeIx, domain: DomainIx) -> bool {
        let mut at = self.fabric.of_node.get(node.0 as usize).copied();
        while let Some(next) = at {
            if next == domain {
                return true;
            }
            at = self.domain(next).and_then(|domain| domain.parent);
        }
        false
    }

    /// A domain by its number.
    pub(super) fn domain(&self, domain: DomainIx) -> Option<&'a Domain> {
        self.fabric.domains.get(domain.0 as usize)
    }

    pub(super) fn name(&self, node: NodeIx) -> &'a str {
        self.input.snapshot.names.name(node).map_or("", |name| name.as_str())
    }
}

/// How many devices of a pool count as free.
pub(super) fn available(pool: &Pool, counting: FreeRule) -> usize {
    match counting {
        FreeRule::Open => pool.open.len(),
        FreeRule::Free => pool.free.len(),
        FreeRule::Unreserved => pool.free.len() + pool.reserved,
        FreeRule::Served => pool.free.len() + pool.unserved,
        FreeRule::Empty => pool.devices.saturating_sub(pool.unhealthy),
    }
}

// How many members each node takes by devices, and at which quality. Works per class of alike nodes.

/// Qualities kept apart while the same is had of what members prefer; the rest counts as the lowest.
const MOST_TIERS: usize = 8;
/// Sets of preferences kept apart; the rest counts as the last.
const MOST_GRADES: usize = 8;

/// Members of one shape that a class takes.
#[derive(Debug, Clone, Default)]
struct ClassCapacity {
    /// Members by devices alone.
    members: u32,
    /// Quality of the devices of each next member, falling; empty if members exchange and prefer nothing.
    reach: Vec<Quality>,
}

impl Survey<'_> {
    /// Works out the classes that matter.
    fn rate(&mut self) {
        let slots = self.shapes.len();
        for (number, class) in self.input.snapshot.nodes.iter().enumerate() {
            let limits = &self.limits[number * slots..(number + 1) * slots];
            let class = class.0 as usize;
            if limits.iter().all(|limit| *limit == 0) || !self.classes[class].is_empty() {
                continue;
            }
            if let Some(NodeState::Ours(of)) = self.input.snapshot.classes.get(class).map(|class| &**class) {
                self.classes[class] =
                    self.shapes.iter().map(|shape| of_class(of, shape, self.counting)).collect();
            }
        }
        let by_slot: Vec<Vec<Vec<Option<Quality>>>> = (0..slots).map(|slot| self.steps(slot)).collect();
        self.tiers = vec![Vec::new(); slots];
        self.grades.clear();
        // Steps of several shapes are taken together, so each has as many.
        for grade in 0..by_slot.iter().map(Vec::len).max().unwrap_or(1) {
            let own = by_slot.iter().map(|grades| grades.get(grade).map_or(&[None][..], |own| own));
            let own: Vec<&[Option<Quality>]> = own.collect();
            let steps = own.iter().map(|own| own.len()).max().unwrap_or(1);
            for (tiers, own) in self.tiers.iter_mut().zip(&own) {
                tiers.extend((0..steps).map(|step| own.get(step).or(own.last()).copied().flatten()));
            }
            let start = self.grades.last().map_or(0, |last| last.end);
            self.grades.push(start..start + steps);
        }
    }

    /// The qualities that members of a shape can have, by what is had of their preferences, the best first.
    fn steps(&self, slot: usize) -> Vec<Vec<Option<Quality>>> {
        let reached = self.classes.iter().filter_map(|class| class.get(slot));
        let reached: BTreeSet<Quality> = reached.flat_map(|of| of.reach.iter().copied()).collect();
        let mut grades: Vec<Vec<Option<Quality>>> = Vec::new();
        let mut last: Option<Quality> = None;
        for quality in reached.into_iter().rev() {
            let differs = last.is_none_or(|last| last.preferences != quality.preferences);
            if differs && grades.len() < MOST_GRADES {
                grades.push(Vec::new());
            }
            last = Some(quality);
            if let Some(grade) = grades.last_mut() {
                grade.truncate(MOST_TIERS - 2);
                grade.push(last);
            }
        }
        let all = grades.last_mut().filter(|grade| self.all_reach(slot, grade.last().copied().flatten()));
        match all.and_then(|grade| grade.last_mut()) {
            // No member is worse than this.
            Some(lowest) => *lowest = None,
            None => match grades.last_mut() {
                Some(grade) => grade.push(None),
                None => grades.push(vec![None]),
            },
        }
        grades
    }

    fn all_reach(&self, slot: usize, tier: Option<Quality>) -> bool {
        self.classes.iter().filter_map(|class| class.get(slot)).all(|of| {
            of.members as usize == of.reach.len()
                && of.reach.last().is_none_or(|last| tier.is_none_or(|tier| *last >= tier))
        })
    }

    /// The steps of quality at which as much is had of what the members prefer, the most first.
    pub(in crate::plan) fn grades(&self) -> &[Range<usize>] {
        &self.grades
    }

    /// The grade of a step.
    pub(in crate::plan) fn grade(&self, tier: usize) -> usize {
        self.grades.iter().position(|grade| grade.contains(&tier)).unwrap_or(0)
    }

    /// How many steps of quality there are.
    pub(in crate::plan) fn tiers(&self) -> usize {
        self.grades.last().map_or(1, |last| last.end)
    }

    /// The step at which everything that fits counts.
    pub(in crate::plan) fn lowest_tier(&self) -> usize {
        self.tiers().saturating_sub(1)
    }

    /// Members of a shape that a node takes at the quality of a step or better.
    pub(in crate::plan) fn takes(&self, node: NodeIx, slot: usize, tier: usize) -> u32 {
        let limit = self.limits.get(node.0 as usize * self.shapes.len() + slot);
        let limit = limit.copied().unwrap_or(0);
        if limit == 0 {
            return 0;
        }
        let Some(of) = self.of_class(node, slot) else {
            return 0;
        };
        let members = match self.tiers[slot].get(tier) {
            Some(Some(least)) => {
                u32::try_from(of.reach.partition_point(|reach| reach >= least)).unwrap_or(u32::MAX)
            }
            Some(None) | None => of.members,
        };
        limit.min(members)
    }

    /// The quality of the devices of each member of a shape that a node takes, falling; empty if members exchange and
    /// prefer nothing.
    pub(in crate::plan) fn reached(&self, node: NodeIx, slot: usize) -> &[Quality] {
        let limit = self.limits.get(node.0 as usize * self.shapes.len() + slot).copied().unwrap_or(0);
        let reach = self.of_class(node, slot).map_or(&[][..], |of| &of.reach);
        &reach[..reach.len().min(limit as usize)]
    }

    fn of_class(&self, node: NodeIx, slot: usize) -> Option<&ClassCapacity> {
        self.classes.get(self.input.snapshot.class(node)?.0 as usize)?.get(slot)
    }

    /// Why the devices of a node serve fewer members of a shape than `most`, for which their number suffices.
    pub(in crate::plan) fn device_obstacle(&self, node: NodeIx, slot: usize, most: u32) -> Option<Obstacle> {
        let (class, shape) = (self.class(node)?, self.shapes.get(slot)?);
        let members = self.of_class(node, slot)?.members;
        if members >= most {
            return None;
        }
        let request = Request::clone(&shape.request).placed(PlacementRequest::default());
        let without_terms = Shape { request: Arc::new(request), needs: Arc::clone(&shape.needs) };
        Some(match fitting(class, &without_terms, self.counting, most) > members {
            true => Obstacle::PlacementTerms,
            false => Obstacle::TopologyManager,
        })
    }
}

fn of_class(class: &Class, shape: &Shape, counting: FreeRule) -> ClassCapacity {
    let mut of = ClassCapacity::default();
    if !matches!(counting, FreeRule::Empty | FreeRule::Served) && class.withheld.is_some() {
        return of;
    }
    let mut members = u32::MAX;
    for ask in &shape.request.asks {
        let Some((_, pool)) = class.pool(ask.resource.as_str()) else {
            return of;
        };
        if decide::too_many(pool.max_request, ask).is_some() || ask.devices == 0 {
            return of;
        }
        let free = u32::try_from(available(pool, counting)).unwrap_or(u32::MAX);
        members = members.min(free / ask.devices);
    }
    of.members = if shape.request.asks.is_empty() { 0 } else { members };
    if shape.request.asks.iter().any(|ask| is_particular(class, ask)) {
        of.members = fitting(class, shape, counting, of.members);
    }
    let exchanges = shape.request.asks.iter().any(|ask| ask.most().is_some_and(|(_, devices)| devices > 1));
    if (exchanges || shape.request.placement.has_preferences())
        && matches!(counting, FreeRule::Open | FreeRule::Free)
    {
        of.reach = reach(class, shape, counting, of.members);
    }
    of
}

/// Whether not every set of free devices serves an ask.
fn is_particular(class: &Class, ask: &Ask) -> bool {
    let is_aligned = class.pool(ask.resource.as_str()).is_some_and(|(_, pool)| pool.alignment.is_some());
    is_aligned || ask.containers.iter().any(|container| !container.terms.is_empty())
}

/// How many members, of `most`, get devices as they and kubelet require them, one after the other.
fn fitting(class: &Class, shape: &Shape, counting: FreeRule, most: u32) -> u32 {
    let free = |pool: &Pool| match counting {
        FreeRule::Open => pool.open.clone(),
        FreeRule::Free => pool.free.clone(),
        // Which devices these are is not known of a class.
        FreeRule::Unreserved | FreeRule::Served if pool.free.len() == available(pool, counting) => {
            pool.free.clone()
        }
        _ if matches!(pool.shape, crate::shape::Shape::Whole) => DeviceSet::range(0, class.kind.gpus()),
        _ => DeviceSet::range(0, pool.devices),
    };
    let alignments = class.pools.iter().map(|pool| {
        let alignment = pool.alignment.as_deref()?;
        let is_known = match counting {
            FreeRule::Open | FreeRule::Free => true,
            FreeRule::Unreserved | FreeRule::Served => pool.free.len() == available(pool, counting),
            FreeRule::Empty => false,
        };
        Some(match is_known || !alignment.counts_numa() {
            true => Cow::Borrowed(alignment),
            false => Cow::Owned(alignment.with_free(NumaNode::unoccupied)),
        })
    });
    let mut left =
        DevicesLeft { class, free: class.pools.iter().map(free).collect(), alignments: alignments.collect() };
    let fitting = (0..most).take_while(|_| left.assign(&shape.request).is_some());
    u32::try_from(fitting.count()).unwrap_or(u32::MAX)
}

/// The quality of each next member's devices, never rising.
fn reach(class: &Class, shape: &Shape, counting: FreeRule, members: u32) -> Vec<Quality> {
    let mut free: Vec<DeviceSet> = class
        .pools
        .iter()
        .map(|pool| if counting == FreeRule::Open { pool.open.clone() } else { pool.free.clone() })
        .collect();
    let cuts: Vec<Vec<Spot>> = shape.request.asks.iter().map(|ask| class.cut_for(ask)).collect();
    let mut reach: Vec<Quality> = Vec::new();
    for _ in 0..members {
        let mut gathered = QualitySum::new(&shape.request.placement);
        let each = shape.request.asks.iter().zip(&cuts).map(|(ask, cut)| {
            let (index, pool) = class.pool(ask.resource.as_str())?;
            Some((index, Offer { site: class.site(pool, cut).for_gangs(), free: free.get(index)?, ask }))
        });
        let each = each.collect::<Option<Vec<_>>>().unwrap_or_default();
        let (indices, offers): (Vec<usize>, Vec<Offer<'_>>) = each.into_iter().unzip();
        let Some(layouts) = Layout::best_of_all(&offers).filter(|layouts| !layouts.is_empty()) else {
            return reach;
        };
        for (offer, layout) in offers.iter().zip(&layouts) {
            gathered.add(offer.site, layout);
        }
        for (index, layout) in indices.into_iter().zip(&layouts) {
            free[index].remove(&layout.devices);
        }
        if !gathered.exchanges() && !shape.request.placement.has_preferences() {
            return Vec::new();
        }
        let quality = gathered.quality(class);
        reach.push(reach.last().map_or(quality, |last| quality.min(*last)));
    }
    reach
}

// How many members of each shape a node takes by everything but devices: resources left, labels and taints, existing
// pods, and the gang's own rules.

impl Survey<'_> {
    /// By node and shape: members by everything but devices.
    fn limit(&mut self, wanted: &PlanRequest) {
        let without = wanted.without.iter();
        let without: BTreeSet<NodeIx> =
            without.filter_map(|node| self.input.snapshot.find(node.as_str())).collect();
        let slots = self.shapes.len();
        let mut limits = std::mem::take(&mut self.limits);
        let mut counted = Vec::with_capacity(slots);
        let mut near = Vec::with_capacity(slots);
        for (slot, shape) in self.shapes.iter().enumerate() {
            let mut barred = match self.counting {
                FreeRule::Empty if shape.needs.together_with.is_empty() => PlacementRules::default(),
                FreeRule::Empty => {
                    PlacementRules { near: self.input.barred(shape).near, ..PlacementRules::default() }
                }
                _ => self.input.barred(shape),
            };
            counted.push(std::mem::take(&mut barred.counted));
            near.push(std::mem::take(&mut barred.near));
            for (number, state) in (0u32..).zip(&self.input.snapshot.nodes) {
                let node = NodeIx(number);
                let class = self.input.snapshot.classes.get(state.0 as usize);
                let Some(NodeState::Ours(_)) = class.map(|class| &**class) else {
                    continue;
                };
                let Some(left) = self.left(node) else { continue };
                let facts = self.input.rooms.get(number as usize).and_then(|room| room.facts.as_ref());
                let kept_off = without.contains(&node)
                    || barred.nodes.binary_search(&node).is_ok()
                    || barred.only.as_ref().is_some_and(|only| only.binary_search(&node).is_err())
                    || facts.is_none_or(|facts| shape.needs.admits(facts).is_err());
                if kept_off {
                    continue;
                }
                let mut limit = left.times(&shape.needs.resources);
                if self.rules.one_a_node(slot) {
                    limit = limit.min(1);
                }
                limits[number as usize * slots + slot] = limit;
            }
        }
        self.limits = limits;
        let needs: Vec<_> = self.shapes.iter().map(|shape| &*shape.needs).collect();
        self.skews = Skew::all(&needs, &counted, self.input.rooms).into();
        self.part(wanted);
        self.draw(wanted, near);
    }

    /// Excludes what members cannot share with members that have a reservation, bound or not.
    fn part(&mut self, wanted: &PlanRequest) {
        let mut siblings: BTreeMap<Option<ShapeId>, BTreeSet<NodeIx>> = BTreeMap::new();
        for sibling in &wanted.placed {
            let node = self.input.snapshot.find(sibling.node.as_str());
            siblings.entry(sibling.shape).or_default().extend(node);
        }
        for (slot, shape) in self.shapes.clone().into_iter().enumerate() {
            for (other, nodes) in &siblings {
                // A member without a known shape is taken to be alike.
                let known = other.and_then(|other| self.input.shape(other));
                let apart = Separation::of(&shape.needs, &known.unwrap_or(shape).needs);
                if apart.nodes {
                    self.keep(slot, |_, node| !nodes.contains(&node));
                }
                for key in apart.keys {
                    let taken: BTreeSet<_> = nodes.iter().filter_map(|node| self.label(*node, key)).collect();
                    self.keep(slot, |survey, node| {
                        survey.label(node, key).is_none_or(|value| !taken.contains(value))
                    });
                }
            }
        }
    }

    /// Excludes a shape from nodes that do not pass.
    fn keep(&mut self, slot: usize, passes: impl Fn(&Self, NodeIx) -> bool) {
        let mut limits = std::mem::take(&mut self.limits);
        let slots = self.shapes.len();
        for number in 0..limits.len() / slots.max(1) {
            let node = NodeIx(u32::try_from(number).unwrap_or(u32::MAX));
            if limits[number * slots + slot] > 0 && !passes(self, node) {
                limits[number * slots + slot] = 0;
            }
        }
        self.limits = limits;
    }
}

// Required pod affinity: which nodes are near pods that exist, and which label values a gang can share with itself.

impl Survey<'_> {
    /// The affinity rules of the shapes. `outside`: by shape and term, the nodes near pods outside the gang.
    fn draw(&mut self, wanted: &PlanRequest, outside: Vec<Vec<Vec<NodeIx>>>) {
        let shapes = self.shapes.clone();
        for ((slot, shape), outside) in shapes.iter().enumerate().zip(outside) {
            let needs = &shape.needs;
            let draws = |other: &Shape| needs.is_drawn_to(&other.needs.namespace, &other.needs.labels);
            let to: Vec<bool> = shapes.iter().map(|other| draws(other)).collect();
            // Members count from the moment they have a reservation.
            let siblings = wanted.placed.iter().filter(|sibling| {
                let shape = sibling.shape.and_then(|shape| self.input.shape(shape));
                shape.is_some_and(draws)
            });
            let siblings: Vec<NodeIx> =
                siblings.filter_map(|sibling| self.input.snapshot.find(sibling.node.as_str())).collect();
            let mut rules: Vec<NearRule> = Vec::new();
            for (number, term) in needs.together_with.iter().enumerate() {
                let key = &term.topology_key;
                self.keep(slot, |survey, node| survey.label(node, key).is_some());
                let mut there: BTreeSet<NodeIx> =
                    outside.get(number).into_iter().flatten().copied().collect();
                let values: BTreeSet<&Arc<str>> =
                    siblings.iter().filter_map(|node| self.label(*node, key)).collect();
                if !values.is_empty() {
                    let near =
                        |node: &NodeIx| self.label(*node, key).is_some_and(|value| values.contains(value));
                    there.extend(self.nodes().filter(near));
                }
                if rules.iter().all(|rule| rule.key != *key) {
                    rules.push(NearRule {
                        slot,
                        key: Arc::clone(key),
                        to: to.clone(),
                        there,
                        starts: false,
                        settled: false,
                    });
                }
            }
            let starts = to[slot] && rules.iter().all(|rule| rule.there.is_empty());
            for rule in rules {
                let others = rule.to.iter().any(|to| *to);
                match self.counting {
                    // The pods that it must be near may be anywhere then.
                    FreeRule::Empty if !others || !rule.there.is_empty() => {}
                    // Pods outside the gang match, so no member can be the first.
                    _ if self.counting != FreeRule::Empty
                        && (!others || rule.is_among_its_like() && !starts) =>
                    {
                        self.keep(slot, |_, node| rule.there.contains(&node));
                    }
                    _ => self.rules.near.push(NearRule { starts, ..rule }),
                }
            }
        }
    }

    /// The nodes by value of a rule's label, where enough members fit that would share it.
    pub(in crate::plan) fn values(&self, rule: usize, demand: &Demand<'_>) -> Vec<Vec<NodeIx>> {
        let (slots, linked, all) = (self.shapes.len(), self.rules.linked(rule), demand.all());
        let Some(near) = self.rules.near.get(rule) else {
            return Vec::new();
        };
        let mut values: BTreeMap<&Arc<str>, Vec<NodeIx>> = BTreeMap::new();
        for node in self.nodes() {
            let limits = &self.limits[node.0 as usize * slots..][..slots];
            let takes = limits.iter().zip(&linked).any(|(limit, linked)| *linked && *limit > 0);
            if let Some(value) = self.label(node, &near.key).filter(|_| takes) {
                values.entry(value).or_default().push(node);
            }
        }
        let tier = self.lowest_tier();
        let enough = |nodes: &Vec<NodeIx>| {
            let of = |slot: usize| match linked[slot] {
                true => nodes
                    .iter()
                    .fold(0u32, |sum, node| sum.saturating_add(self.takes(*node, slot, tier)))
                    .min(all[slot]),
                false => all[slot],
            };
            (0..slots).map(of).sum::<u32>() >= demand.must
        };
        // Of alike nodes one is enough, if no member is elsewhere.
        let mut known = BTreeSet::new();
        let mut differs = |nodes: &Vec<NodeIx>| match nodes[..] {
            [node] if linked.iter().all(|linked| *linked) => {
                let limits = &self.limits[node.0 as usize * slots..][..slots];
                known.insert((self.input.snapshot.class(node).map(|class| class.0), limits))
            }
            _ => true,
        };
        values.into_values().filter(|nodes| differs(nodes) && enough(nodes)).collect()
    }

    /// The survey with all members that would share a rule's label value confined to some nodes.
    pub(in crate::plan) fn kept_to(&self, rule: usize, nodes: &[NodeIx]) -> Self {
        let mut kept = self.with_skews(Arc::clone(&self.skews));
        let (slots, linked) = (self.shapes.len(), self.rules.linked(rule));
        for slot in (0..slots).filter(|slot| linked[*slot]) {
            for limit in kept.limits.iter_mut().skip(slot).step_by(slots) {
                *limit = 0;
            }
            for node in nodes {
                let at = node.0 as usize * slots + slot;
                kept.limits[at] = self.limits[at];
            }
        }
        kept.rules.settle(rule, &linked);
        kept
    }

    /// Whether kube-scheduler admits members of a shape on a node only once members that they must be near are bound.
    /// Shapes that select themselves need not wait, unless a member without rules matches: once it is bound, no member
    /// can be the first.
    pub(in crate::plan) fn follows(&self, node: NodeIx, slot: usize) -> bool {
        let near = &self.rules.near;
        let anchors = |rule: &NearRule| {
            let mut to = rule.to.iter().enumerate().filter(|(_, to)| **to);
            to.any(|(other, _)| near.iter().all(|near| near.slot != other))
        };
        let mut own = near.iter().filter(|rule| rule.slot == slot);
        own.any(|rule| !rule.there.contains(&node) && (!rule.starts || anchors(rule)))
    }
}
