//! What a node offers besides the devices that Gantry accounts: amounts, labels, taints. Exact whole numbers in Kubernetes' base units.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Amounts of what nodes have and pods need. Resources that Gantry accounts as devices are not among them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Resources {
    /// CPU in thousandths of a core.
    pub milli_cpu: i64,
    /// Memory in bytes.
    pub memory: i64,
    /// Ephemeral storage in bytes.
    pub ephemeral: i64,
    /// Pods.
    pub pods: i64,
    /// Everything else, in its own base unit.
    pub others: BTreeMap<Arc<str>, i64>,
}

/// What a node says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Its name.
    pub name: Arc<str>,
    /// Its labels.
    pub labels: BTreeMap<Arc<str>, Arc<str>>,
    /// Its taints.
    pub taints: Vec<Taint>,
    /// `spec.unschedulable`.
    pub unschedulable: bool,
    /// `status.allocatable`.
    pub allocatable: Resources,
}

/// A taint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Taint {
    /// Its key.
    pub key: Arc<str>,
    /// Its value, perhaps empty.
    pub value: Arc<str>,
    /// What it does.
    pub effect: TaintEffect,
}

/// What a taint does to pods that do not bear it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TaintEffect {
    /// New ones do not come.
    NoSchedule,
    /// They come where nothing else is left.
    PreferNoSchedule,
    /// They are sent away.
    NoExecute,
}
