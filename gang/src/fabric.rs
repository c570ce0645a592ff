//! The fabric above the node as a tree, made of node labels: which nodes share a switch, a rack, a zone. Which labels, from the
//! largest domain to the smallest, is configuration.

use std::sync::Arc;

/// The levels of the fabric, from the largest domain to the smallest. The node itself is the last, and is not among them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Levels(pub Vec<Level>);

/// One level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Level {
    /// What people call it, such as `rack`.
    pub name: Arc<str>,
    /// The node label whose value is the domain.
    pub label: Arc<str>,
}

/// Number of a domain in its [`Fabric`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainIx(pub u32);

/// The tree of domains. The root, number 0, is the whole cluster and stands above the first level.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fabric {
    /// The levels.
    pub levels: Levels,
    /// Every domain; parents before children.
    pub domains: Vec<Domain>,
    /// The smallest domain of each node, by the number that the caller gave it.
    pub of_node: Vec<DomainIx>,
}

/// A part of the fabric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain {
    /// Which level it is of: an index into [`Levels`]; `None` for the whole cluster.
    pub level: Option<usize>,
    /// The label's value. A node without the label is a domain by itself, so that strangers never count as neighbours.
    pub name: Arc<str>,
    /// The domain it lies in; the root has none.
    pub parent: Option<DomainIx>,
    /// The domains directly in it, by name.
    pub children: Vec<DomainIx>,
    /// The nodes directly in it (only in the smallest domains), by number.
    pub nodes: Vec<u32>,
}
