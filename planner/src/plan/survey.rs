//! The members of each shape that every node takes, and the bandwidth they would have there.

mod limit;
mod near;
mod rate;

use std::sync::Arc;

use gantry_gang::fabric::Domain;
use gantry_gang::protocol::{PlanRequest, ShapeId};
use gantry_gang::{DomainIx, Fabric, Resources};

use self::rate::OfClass;
use super::rules::Rules;
use super::skew::Skew;
use crate::input::{PlanInput, Room, Shape};
use crate::snapshot::{Class, NodeIx, Pool, Standing};

/// Which devices count as free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counting {
    /// Devices that no pod has or is about to get.
    Open,
    /// Devices that no pod has: single pods between prioritize and bind would go elsewhere.
    Free,
    /// Every healthy device, as if the node were empty.
    Empty,
}

/// The members that every node takes.
pub(super) struct Survey<'a> {
    pub(super) input: PlanInput<'a>,
    pub(super) counting: Counting,
    pub(super) fabric: &'a Fabric,
    pub(super) shapes: Vec<&'a Shape>,
    pub(super) rules: Rules,
    /// The spread constraints.
    pub(super) skews: Arc<[Skew]>,
    /// By class and shape; only for classes of nodes that could take a member.
    classes: Vec<Vec<OfClass>>,
    /// By node and shape: the most by everything but devices.
    limits: Vec<u32>,
    /// Bandwidths of members, MB/s, the highest first; the last is 0. By shape.
    tiers: Vec<Vec<u64>>,
}

impl<'a> Survey<'a> {
    /// `None` if a shape is not known.
    pub(super) fn new(
        input: PlanInput<'a>,
        wanted: &PlanRequest,
        shapes: &[ShapeId],
        counting: Counting,
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
            shapes,
        };
        survey.limit(wanted);
        survey.rate();
        Some(survey)
    }

    /// All nodes.
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
        }
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
        let room: &Room = self.input.rooms.get(node.0 as usize)?;
        let facts = room.facts.as_ref()?;
        Some(match self.counting {
            Counting::Empty => &facts.allocatable,
            Counting::Open | Counting::Free => &room.left,
        })
    }

    /// The value of a node's label.
    pub(super) fn label(&self, node: NodeIx, key: &str) -> Option<&'a Arc<str>> {
        let room: &Room = self.input.rooms.get(node.0 as usize)?;
        room.facts.as_ref()?.labels.get(key)
    }

    /// How much a shape prefers a node, by preferred affinity and taints.
    pub(super) fn likes(&self, node: NodeIx, slot: usize) -> i64 {
        let facts = self.input.rooms.get(node.0 as usize).and_then(|room| room.facts.as_ref());
        let shape = self.shapes.get(slot);
        facts.zip(shape).map_or(0, |(facts, shape)| shape.needs.prefers(facts))
    }

    /// The class of a node.
    pub(super) fn class(&self, node: NodeIx) -> Option<&'a Class> {
        match self.input.snapshot.standing(node) {
            Standing::Ours(class) => Some(class),
            Standing::Foreign { .. } | Standing::Gone => None,
        }
    }

    /// The pools that the gang asks for, each once.
    fn pools(&self, class: &'a Class) -> impl Iterator<Item = &'a Pool> {
        class.pools.iter().filter(|pool| {
            let asked = |shape: &&Shape| shape.request.devices(pool.resource.as_str()) > 0;
            self.shapes.iter().any(asked)
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

    /// The name of a node.
    pub(super) fn name(&self, node: NodeIx) -> &'a str {
        self.input.snapshot.names.name(node).map_or("", |name| name.as_str())
    }
}

/// How many devices of a pool count as free.
pub(super) fn available(pool: &Pool, counting: Counting) -> usize {
    match counting {
        Counting::Open => pool.open.len(),
        Counting::Free => pool.free.len(),
        Counting::Empty => pool.devices.saturating_sub(pool.unhealthy),
    }
}
