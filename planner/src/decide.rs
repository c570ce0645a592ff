//! Filter and prioritize for one pod over one snapshot. Pure: the work is done once per class of alike nodes; a node
//! costs one lookup by name.

mod filter;
mod prioritize;

pub use filter::{FilterVerdict, NodeRefusal, PoolShortage, filter, judge, node_line, too_many};
pub use prioritize::{Score, Winner, megabytes, prioritize, score};

use std::time::Duration;

use crate::snapshot::{NodeIx, Snapshot};

/// What to do with nodes that publish no inventory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum ForeignNodes {
    /// Let them pass without accounting, behind all nodes with an inventory. Their devices may come from another
    /// vendor's plugin or DRA, and kube-scheduler has counted them.
    #[default]
    Allow,
    /// Refuse them.
    Refuse,
}

/// Which of equally fast nodes to take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Policy {
    /// The node that loses least, then the fullest: large free groups stay whole.
    #[default]
    Pack,
    /// The emptiest: neighbours share less power, air and network.
    Spread,
}

/// Options of the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Nodes without an inventory.
    pub foreign: ForeignNodes,
    /// Equally good nodes.
    pub policy: Policy,
    /// How long the first gang of the queue waits before nodes are reserved for it.
    pub patience: Duration,
    /// How long nodes stay reserved for it at a stretch; then they are open for as long.
    pub drain: Duration,
    /// Whether a member's node is written to `status.nominatedNodeName`, so that kube-scheduler tries it first.
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

/// The nodes of one question, in the order in which they were sent.
pub trait Candidates {
    /// How many there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name of one; empty where there is none.
    fn name(&self, position: usize) -> &str;

    /// Whether whole node objects were sent, not names.
    fn are_objects(&self) -> bool;

    /// How many devices of a resource a node object advertises; `None` without an object or without the resource.
    fn advertised(&self, position: usize, resource: &str) -> Option<u32>;
}

/// The candidates' numbers in a snapshot, found once per request.
pub fn locate(snapshot: &Snapshot, candidates: &impl Candidates) -> Vec<Option<NodeIx>> {
    snapshot.find_all((0..candidates.len()).map(|position| candidates.name(position)))
}

/// Whether a candidate is a node object that the snapshot does not have. Then the question is a simulation and must
/// leave no trace.
pub fn is_simulation(candidates: &impl Candidates, nodes: &[Option<NodeIx>]) -> bool {
    candidates.are_objects() && nodes.iter().any(Option::is_none)
}

#[cfg(test)]
mod tests;
