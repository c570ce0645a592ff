//! Decisions over one snapshot: which nodes can take a pod, and which is best. Pure functions of the snapshot and the question;
//! work is done per class of alike nodes, per node there is one lookup by name. Nothing here reserves or remembers.

mod filter;
mod prioritize;
mod score;
mod words;

pub use filter::{Filtered, filter, judge, too_many};
pub use prioritize::{Winner, prioritize};
pub(crate) use score::megabytes;
pub use score::{Score, score};
pub use words::{Miss, node_line, plugin_not_ready};

use std::time::Duration;

use crate::snapshot::{NodeIx, Snapshot};
use crate::wire::{Node, Text};

/// What to do with nodes that publish no inventory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ForeignNodes {
    /// Let them pass unaccounted, behind all nodes with an inventory: their devices may come from elsewhere, such as another vendor's
    /// plugin or DRA, and kube-scheduler has counted them already.
    #[default]
    Allow,
    /// Refuse them.
    Refuse,
}

/// Which of equally fast nodes to take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Policy {
    /// The one that loses least by it, then the fullest: big holes stay whole.
    #[default]
    Pack,
    /// The emptiest: neighbours share less power, air and network.
    Spread,
}

/// What an operator chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Nodes without an inventory.
    pub foreign: ForeignNodes,
    /// Equally good nodes.
    pub policy: Policy,
    /// How long the gang that is next waits before nodes are kept for it.
    pub patience: Duration,
    /// How long nodes are kept for it at a stretch; then they are open for as long.
    pub drain: Duration,
    /// Whether members are told their node as `status.nominatedNodeName`, so that kube-scheduler tries it first.
    pub nominate: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            foreign: ForeignNodes::default(),
            policy: Policy::default(),
            patience: Duration::from_secs(60),
            drain: Duration::from_secs(600),
            nominate: false,
        }
    }
}

/// The nodes asked about, in the order asked.
#[derive(Debug)]
pub enum Candidates<'a> {
    /// By name.
    Names(Vec<Text<'a>>),
    /// As objects.
    Nodes(Vec<NodeObject<'a>>),
}

/// A node as an object, to be sent back untouched.
#[derive(Debug)]
pub struct NodeObject<'a> {
    /// The object.
    pub raw: &'a str,
    /// What of it matters.
    pub node: Node<'a>,
}

impl Candidates<'_> {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Names(names) => names.len(),
            Self::Nodes(nodes) => nodes.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name of one.
    pub fn name(&self, position: usize) -> &str {
        match self {
            Self::Names(names) => names.get(position).map_or("", Text::as_str),
            Self::Nodes(nodes) => nodes.get(position).map_or("", NodeObject::name),
        }
    }

    /// What an unknown one says it advertises of a resource, if it came as an object: a simulation's invention.
    fn invented(&self, position: usize, resource: &str) -> Option<u32> {
        let Self::Nodes(nodes) = self else {
            return None;
        };
        let allocatable = nodes.get(position)?.node.status.as_ref()?.allocatable.as_ref()?;
        gantry_api::quantity::count(allocatable.get(resource)?).ok()
    }

    /// Whether nodes came as objects.
    fn are_objects(&self) -> bool {
        matches!(self, Self::Nodes(_))
    }
}

impl NodeObject<'_> {
    fn name(&self) -> &str {
        self.node.metadata.name.as_ref().map_or("", Text::as_str)
    }
}

/// The candidates' numbers in a snapshot, found once per request.
pub fn locate(snapshot: &Snapshot, candidates: &Candidates<'_>) -> Vec<Option<NodeIx>> {
    match candidates {
        Candidates::Names(names) => snapshot.find_all(names.iter().map(|name| name.as_str())),
        Candidates::Nodes(nodes) => snapshot.find_all(nodes.iter().map(|node| node.name())),
    }
}

/// Whether a node among the candidates is a simulation's invention: such a question must leave no trace.
pub fn is_simulation(candidates: &Candidates<'_>, nodes: &[Option<NodeIx>]) -> bool {
    candidates.are_objects() && nodes.iter().any(Option::is_none)
}

#[cfg(test)]
mod tests;
