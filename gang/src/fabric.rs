//! The fabric above the node as a tree, made of node labels: which nodes share a switch, a rack, a zone. Which labels, from the
//! largest domain to the smallest, is configuration.

mod levels;

use std::collections::HashMap;
use std::sync::Arc;

pub(crate) use levels::NODE;
pub use levels::{Level, Levels, LevelsError, Scope, UnknownLevel};

use crate::room::NodeFacts;

/// Number of a domain in its [`Fabric`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainIx(pub u32);

/// The tree of domains. The root, number 0, is the whole cluster and stands above the first level.
///
/// Numbers go level by level, in a level by parent, under one parent by name: equal clusters have equal numbers, and domains of one
/// level are neighbours in number as they are in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fabric {
    /// The levels as configured. A level whose label no node carries has no domains and is passed over in the tree.
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
    /// The label's value; the node's name if `unlabelled`.
    pub name: Arc<str>,
    /// It is one node without the label: a domain by itself, so that strangers never count as neighbours.
    pub unlabelled: bool,
    /// The domain it lies in; the root has none.
    pub parent: Option<DomainIx>,
    /// The domains directly in it, by name.
    pub children: Vec<DomainIx>,
    /// The nodes directly in it (only in the smallest domains), by number.
    pub nodes: Vec<u32>,
}

impl Default for Fabric {
    fn default() -> Self {
        Self::build(Levels::default(), [])
    }
}

impl Fabric {
    /// Builds the tree. Nodes are numbered as they come; `None` is one that is gone.
    ///
    /// The same value under two parents is two domains: racks may be called 1 in every zone.
    pub fn build<'a>(levels: Levels, nodes: impl IntoIterator<Item = Option<&'a NodeFacts>>) -> Self {
        let nodes: Vec<Option<&NodeFacts>> = nodes.into_iter().collect();
        let mut fabric = Self {
            levels,
            domains: vec![Domain {
                level: None,
                name: "cluster".into(),
                unlabelled: false,
                parent: None,
                children: Vec::new(),
                nodes: Vec::new(),
            }],
            of_node: vec![Self::ROOT; nodes.len()],
        };
        let labels: Vec<Arc<str>> = fabric
            .levels
            .0
            .iter()
            .map(|level| Arc::clone(&level.label))
            .collect();
        for (level, label) in labels.iter().enumerate() {
            let values: Vec<Option<&Arc<str>>> = nodes
                .iter()
                .map(|node| node.and_then(|node| node.labels.get(label)))
                .collect();
            if values.iter().any(Option::is_some) {
                fabric.divide(level, &nodes, &values);
            }
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

    /// Divides the smallest domains so far by one more label.
    fn divide(&mut self, level: usize, nodes: &[Option<&NodeFacts>], values: &[Option<&Arc<str>>]) {
        /// A domain to be: in which it lies, its name, whether it is a node by itself.
        type Part<'a> = (DomainIx, &'a Arc<str>, bool);
        let mut parts: HashMap<Part<'_>, u32> = HashMap::new();
        // The part of every node, by the order of discovery first.
        let mut part_of = Vec::with_capacity(nodes.len());
        for ((node, value), parent) in nodes.iter().zip(values).zip(&self.of_node) {
            part_of.push(node.map(|node| {
                let part = (*parent, value.unwrap_or(&node.name), value.is_none());
                let next = u32::try_from(parts.len()).unwrap_or(u32::MAX);
                *parts.entry(part).or_insert(next)
            }));
        }
        let mut sorted: Vec<(Part<'_>, u32)> = parts.into_iter().collect();
        sorted.sort_unstable();
        let mut numbers = vec![Self::ROOT; sorted.len()];
        for ((parent, name, unlabelled), discovered) in sorted {
            let number = DomainIx(u32::try_from(self.domains.len()).unwrap_or(u32::MAX));
            if let Some(place) = numbers.get_mut(discovered as usize) {
                *place = number;
            }
            if let Some(parent) = self.domains.get_mut(parent.0 as usize) {
                parent.children.push(number);
            }
            self.domains.push(Domain {
                level: Some(level),
                name: Arc::clone(name),
                unlabelled,
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
        self.path(smallest).find(|domain| {
            self.domain(*domain)
                .is_some_and(|domain| domain.level == Some(level))
        })
    }

    /// The smallest domain that two lie in. Every step up goes to a smaller number.
    pub fn common(&self, one: DomainIx, other: DomainIx) -> DomainIx {
        let up = |domain: DomainIx| {
            self.domain(domain)
                .and_then(|domain| domain.parent)
                .unwrap_or(Self::ROOT)
        };
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

    /// A domain for people: `rack r7`, `cluster`; `node n3` for a node that is a domain by itself.
    pub fn words(&self, domain: DomainIx) -> String {
        let Some(domain) = self.domain(domain) else {
            return "cluster".to_owned();
        };
        match domain.level.and_then(|level| self.levels.0.get(level)) {
            Some(_) if domain.unlabelled => format!("node {}", domain.name),
            Some(level) => format!("{} {}", level.name, domain.name),
            None => "cluster".to_owned(),
        }
    }
}

impl Levels {
    /// Whether a node lies in the same domains by both facts, so that a fabric built of one holds for the other.
    pub fn agree(&self, one: Option<&NodeFacts>, other: Option<&NodeFacts>) -> bool {
        match (one, other) {
            (None, None) => true,
            (Some(one), Some(other)) => self
                .0
                .iter()
                .all(|level| one.labels.get(&level.label) == other.labels.get(&level.label)),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
