//! The fabric above the node as a tree, made of node labels: which nodes share a switch, a rack, a zone. Which labels, from the
//! largest domain to the smallest, is configuration.

mod levels;

use std::collections::HashMap;
use std::sync::Arc;

pub use levels::NODE;
pub use levels::{Level, Levels, LevelsError, Scope, UnknownLevel};

use crate::resources::NodeFacts;

/// Number of a domain in its [`Fabric`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainIx(pub u32);

/// The tree of domains. The root, number 0, is the whole cluster and stands above the first level.
///
/// Numbers go level by level, in a level by parent, under one parent by what they are called: equal clusters have equal numbers, and
/// domains of one level are neighbours in number as they are in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fabric {
    /// The levels as configured. A level has no domains, and is skipped in the tree, if no node carries its label.
    pub levels: Levels,
    /// Every domain; parents before children.
    pub domains: Vec<Domain>,
    /// The smallest domain of each node, by the number that the caller gave it. The root for a node that is gone.
    pub of_node: Vec<DomainIx>,
}

/// A part of the fabric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain {
    /// Which level it is of: an index into [`Levels`]; `None` for the whole cluster.
    pub level: Option<usize>,
    /// What people call it within its level: the label's value; `rack r1` and the node's name for nodes that lack the label.
    pub name: Arc<str>,
    /// What its nodes have in common.
    pub by: DomainIdentity,
    /// The domain it lies in; the root has none.
    pub parent: Option<DomainIx>,
    /// The domains directly in it, by name.
    pub children: Vec<DomainIx>,
    /// The nodes directly in it (only in the smallest domains), by number.
    pub nodes: Vec<u32>,
}

/// What makes nodes one domain of a level. Strangers never count as neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DomainIdentity {
    /// The value of the level's label. The whole cluster counts as such.
    Label,
    /// They lack that label and share the value of this smaller level's, of those that they have the largest: whichever domain of the level
    /// it is that they are in, they are in it together.
    Smaller(usize),
    /// It is one node that has neither the label nor that of a smaller level.
    Node,
}

/// Of a node at a level: the level's label if it has it, or else that of the next smaller level of which it has one. The level, and the
/// value.
type Mark<'a> = Option<(usize, &'a Arc<str>)>;

impl Default for Fabric {
    fn default() -> Self {
        Self::build(Levels::default(), [])
    }
}

impl Fabric {
    /// Builds the tree. Nodes are numbered as they come; `None` is one that is gone.
    ///
    /// The same value under two parents is two domains: racks may be called 1 in every zone. Two nodes share a domain of a level if at it,
    /// or at a smaller one, they share a label's value and agree about all labels above: both have the same value or neither has one.
    pub fn build<'a>(levels: Levels, nodes: impl IntoIterator<Item = Option<&'a NodeFacts>>) -> Self {
        let nodes: Vec<Option<&NodeFacts>> = nodes.into_iter().collect();
        let mut fabric = Self {
            levels,
            domains: vec![Domain {
                level: None,
                name: "cluster".into(),
                by: DomainIdentity::Label,
                parent: None,
                children: Vec::new(),
                nodes: Vec::new(),
            }],
            of_node: vec![Self::ROOT; nodes.len()],
        };
        let mut levels: Vec<(usize, Vec<Mark<'_>>)> = Vec::new();
        for (level, made_by) in fabric.levels.0.iter().enumerate().rev() {
            let below = levels.last().map(|(_, marks)| marks);
            let marks = nodes.iter().enumerate().map(|(number, node)| {
                let value = node.and_then(|node| node.labels.get(&made_by.label));
                let own = value.map(|value| (level, value));
                own.or_else(|| *below?.get(number)?)
            });
            let marks: Vec<Mark<'_>> = marks.collect();
            if marks.iter().flatten().any(|(by, _)| *by == level) {
                levels.push((level, marks));
            }
        }
        for (level, marks) in levels.iter().rev() {
            fabric.divide(*level, &nodes, marks);
        }
        for (number, node) in (0..).zip(&nodes) {
            if let (Some(_), Some(domain)) = (node, fabric.of_node.get(number as usize))
                && let Some(domain) = fabric.domains.get_mut(domain.0 as usize)
            {
                domain.nodes.push(number);
            }
        }
        fabric
    }

    /// Divides the smallest domains so far by one more level.
    fn divide(&mut self, level: usize, nodes: &[Option<&NodeFacts>], marks: &[Mark<'_>]) {
        /// A domain to be: in which it lies, what it is called, what its nodes have in common.
        type Part<'a> = (DomainIx, &'a Arc<str>, DomainIdentity);
        let mut parts: HashMap<Part<'_>, u32> = HashMap::new();
        // The part of every node, by the order of discovery first.
        let mut part_of = Vec::with_capacity(nodes.len());
        for ((node, mark), parent) in nodes.iter().zip(marks).zip(&self.of_node) {
            part_of.push(node.map(|node| {
                let part = match *mark {
                    Some((by, value)) if by == level => (*parent, value, DomainIdentity::Label),
                    Some((by, value)) => (*parent, value, DomainIdentity::Smaller(by)),
                    None => (*parent, &node.name, DomainIdentity::Node),
                };
                let next = u32::try_from(parts.len()).unwrap_or(u32::MAX);
                *parts.entry(part).or_insert(next)
            }));
        }
        let mut sorted: Vec<(Part<'_>, u32)> = parts.into_iter().collect();
        sorted.sort_unstable();
        let mut numbers = vec![Self::ROOT; sorted.len()];
        for ((parent, name, by), discovered) in sorted {
            let number = DomainIx(u32::try_from(self.domains.len()).unwrap_or(u32::MAX));
            if let Some(place) = numbers.get_mut(discovered as usize) {
                *place = number;
            }
            if let Some(parent) = self.domains.get_mut(parent.0 as usize) {
                parent.children.push(number);
            }
            let smaller = match by {
                DomainIdentity::Smaller(smaller) => self.levels.0.get(smaller),
                DomainIdentity::Label | DomainIdentity::Node => None,
            };
            self.domains.push(Domain {
                level: Some(level),
                name: smaller
                    .map_or_else(|| Arc::clone(name), |smaller| format!("{} {name}", smaller.name).into()),
                by,
                parent: Some(parent),
                children: Vec::new(),
                nodes: Vec::new(),
            });
        }
        for (place, part) in self.of_node.iter_mut().zip(part_of) {
            if let Some(number) = part.and_then(|part| numbers.get(part as usize)) {
                *place = *number;
            }
        }
    }

    /// The whole cluster.
    pub const ROOT: DomainIx = DomainIx(0);

    /// A domain by its number.
    pub fn domain(&self, domain: DomainIx) -> Option<&Domain> {
        self.domains.get(domain.0 as usize)
    }

    /// Whether a level divides anything: any node carries its label.
    pub fn in_use(&self, level: usize) -> bool {
        self.domains.iter().any(|domain| domain.level == Some(level))
    }

    /// The domains of a level, by number; none if the level is not in use.
    pub fn of_level(&self, level: usize) -> impl Iterator<Item = DomainIx> {
        (0..)
            .zip(&self.domains)
            .filter(move |(_, domain)| domain.level == Some(level))
            .map(|(number, _)| DomainIx(number))
    }

    /// The domains that a domain lies in: itself first, the whole cluster last.
    pub fn path(&self, domain: DomainIx) -> impl Iterator<Item = DomainIx> {
        std::iter::successors(Some(domain), |domain| self.domain(*domain)?.parent)
    }

    /// The domain of a level that a node lies in; `None` if the level is not in use or the node is not known.
    pub fn of_node_at(&self, node: u32, level: usize) -> Option<DomainIx> {
        let smallest = *self.of_node.get(node as usize)?;
        self.path(smallest)
            .find(|domain| self.domain(*domain).is_some_and(|domain| domain.level == Some(level)))
    }

    /// The smallest domain that two lie in. Every step up goes to a smaller number.
    pub fn common(&self, one: DomainIx, other: DomainIx) -> DomainIx {
        let up =
            |domain: DomainIx| self.domain(domain).and_then(|domain| domain.parent).unwrap_or(Self::ROOT);
        let (mut one, mut other) = (one, other);
        while one != other {
            if one > other {
                one = up(one);
            } else {
                other = up(other);
            }
        }
        one
    }

    /// All nodes in a domain, neighbours in the tree next to each other.
    pub fn nodes_in(&self, domain: DomainIx) -> Vec<u32> {
        let mut found = Vec::new();
        let mut open = vec![domain];
        while let Some(domain) = open.pop().and_then(|domain| self.domain(domain)) {
            found.extend(&domain.nodes);
            open.extend(domain.children.iter().rev());
        }
        found
    }

    /// A domain for people: `rack r7`, `cluster`; for nodes that lack the label `zone of rack r7` or `node n3`.
    pub fn words(&self, domain: DomainIx) -> String {
        let Some(domain) = self.domain(domain) else {
            return "cluster".to_owned();
        };
        let level = domain.level.and_then(|level| self.levels.0.get(level));
        match (level, domain.by) {
            (Some(level), DomainIdentity::Label) => format!("{} {}", level.name, domain.name),
            (Some(level), DomainIdentity::Smaller(_)) => format!("{} of {}", level.name, domain.name),
            (Some(_), DomainIdentity::Node) => format!("node {}", domain.name),
            (None, _) => "cluster".to_owned(),
        }
    }
}

impl Levels {
    /// Whether a node lies in the same domains by both facts, so that a fabric built of one holds for the other.
    pub fn agree(&self, one: Option<&NodeFacts>, other: Option<&NodeFacts>) -> bool {
        match (one, other) {
            (None, None) => true,
            (Some(one), Some(other)) => {
                self.0.iter().all(|level| one.labels.get(&level.label) == other.labels.get(&level.label))
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
