//! What a pod needs of a node in addition to the devices that Gantry accounts, as kube-scheduler will judge it. Values; the
//! extender reads them from pods.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::resources::{NodeFacts, Resources, Taint, TaintEffect};

/// What a pod needs of a node. Pods with equal needs share one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Needs {
    /// CPU, memory and the like; kube-scheduler's effective request.
    pub resources: Resources,
    /// `spec.nodeSelector`.
    pub selector: BTreeMap<Arc<str>, Arc<str>>,
    /// Required node affinity: one of these must hold; none means any node. A term without requirements holds nowhere.
    pub affinity: Vec<NodeTerm>,
    /// Where its volumes can be reached: for each that cannot be from everywhere, one of its terms must hold.
    pub volumes: Vec<Arc<Vec<NodeTerm>>>,
    /// Preferred node affinity, with weights 1 to 100.
    pub preferred: Vec<(i32, NodeTerm)>,
    /// `spec.tolerations`.
    pub tolerations: Vec<Toleration>,
    /// Pods it must not share a domain with.
    pub apart_from: Vec<PodTerm>,
    /// Pods it must share a domain with.
    pub together_with: Vec<PodTerm>,
    /// Pods that must lie evenly where it goes.
    pub spread: Vec<Spread>,
    /// Its own namespace and labels, by which the terms of others find it; kept only where terms are about.
    pub namespace: Arc<str>,
    /// See [`Self::namespace`].
    pub labels: Arc<BTreeMap<Arc<str>, Arc<str>>>,
    /// Ports of the host that it takes.
    pub host_ports: Vec<HostPort>,
}

/// A port of a host: protocol, address (`0.0.0.0` or empty for any), number.
pub type HostPort = (Arc<str>, Arc<str>, u16);

/// Whether two pods want the same port of one host, as kube-scheduler's NodePorts sees it: to it `0.0.0.0` alone stands for every address,
/// and `::` is an address like any other.
pub fn ports_collide(a: &[HostPort], b: &[HostPort]) -> bool {
    let any = |address: &str| address.is_empty() || address == "0.0.0.0";
    a.iter().any(|(protocol, address, port)| {
        b.iter().any(|(other, there, number)| {
            let meet = address == there || any(address) || any(there);
            port == number && protocol == other && meet
        })
    })
}

/// Requirements on a node's labels (and name) that must all hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct NodeTerm {
    /// `matchExpressions`.
    pub labels: Vec<Requirement>,
    /// `matchFields`, where only `metadata.name` exists.
    pub names: Vec<Requirement>,
}

/// One requirement on a label.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Requirement {
    /// The label.
    pub key: Arc<str>,
    /// What is required of it.
    pub operator: Operator,
    pub values: Vec<Arc<str>>,
}

/// What is required of a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operator {
    /// One of the values.
    In,
    /// None of them, or no such label.
    NotIn,
    /// Any value.
    Exists,
    /// No such label.
    DoesNotExist,
    /// A whole number above the value.
    Gt,
    /// A whole number below it.
    Lt,
}

/// A taint that is tolerated.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Toleration {
    /// The taint's key; empty for every key.
    pub key: Arc<str>,
    pub value: TolerationValue,
    /// The effect; `None` for any.
    pub effect: Option<TaintEffect>,
}

/// Which values of a taint are tolerated.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum TolerationValue {
    /// Any (`Exists`).
    Any,
    /// This one (`Equal`).
    Equal(Arc<str>),
    /// Whole numbers above this (`Gt`, where the cluster has it).
    Above(i64),
    /// Whole numbers below this (`Lt`).
    Below(i64),
}

/// Pods of its own namespace that must lie evenly over the domains of a node label: one of `spec.topologySpreadConstraints` with
/// `whenUnsatisfiable: DoNotSchedule`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Spread {
    /// What the labels of the pods that are counted must fulfil.
    pub selector: Vec<Requirement>,
    /// The node label that makes domains. A node without it takes no such pod.
    pub topology_key: Arc<str>,
    /// By how many its domain may have more of them than the domain with the fewest.
    pub max_skew: u32,
    /// Where there are fewer domains, the domain with the fewest counts as empty.
    pub min_domains: u32,
    /// Only nodes that the pod's selector and required affinity let it go to make domains (`nodeAffinityPolicy`).
    pub by_affinity: bool,
    /// Only nodes with taints that it tolerates make domains (`nodeTaintsPolicy`).
    pub by_taints: bool,
}

impl Spread {
    /// Whether it counts a pod. `of`: the namespace of the pod with the constraint.
    pub fn counts(&self, of: &str, namespace: &str, labels: &BTreeMap<Arc<str>, Arc<str>>) -> bool {
        of == namespace && self.selector.iter().all(|required| required.holds(labels.get(&required.key)))
    }
}

/// Pods of some namespaces with some labels, and the node label that makes domains.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PodTerm {
    /// What the pods' labels must fulfil.
    pub selector: Vec<Requirement>,
    /// Their namespaces; empty means the pod's own. `None`: every namespace.
    pub namespaces: Option<Vec<Arc<str>>>,
    /// The node label that makes domains.
    pub topology_key: Arc<str>,
}

impl Needs {
    /// Whether a pod is one that it must share domains with. Only those count that all terms find, and without terms there is none.
    pub fn is_drawn_to(&self, namespace: &str, labels: &BTreeMap<Arc<str>, Arc<str>>) -> bool {
        let mut terms = self.together_with.iter();
        let finds = |term: &PodTerm| term.finds(&self.namespace, namespace, labels);
        !self.together_with.is_empty() && terms.all(finds)
    }
}

impl PodTerm {
    /// Whether it finds a pod. `of`: the namespace of the pod with the term.
    pub fn finds(&self, of: &str, namespace: &str, labels: &BTreeMap<Arc<str>, Arc<str>>) -> bool {
        let here = match &self.namespaces {
            None => true,
            Some(named) if named.is_empty() => of == namespace,
            Some(named) => named.iter().any(|named| **named == *namespace),
        };
        here && self.selector.iter().all(|required| required.holds(labels.get(&required.key)))
    }
}

// Whether a node takes a pod, by everything but amounts and other pods: as kube-scheduler's NodeUnschedulable, TaintToleration and
// NodeAffinity plugins see it, and VolumeBinding where a volume can be reached. It refuses a node where they do, or they would refuse
// the plan.

/// The taint that `spec.unschedulable` stands for.
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
/// What a taint that is not tolerated, but only keeps off where others are left, weighs against the weights of preferred affinity (1 to 100).
const AVOIDED: i64 = 100;

/// Why a node does not take a pod, in the words of kube-scheduler.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Misfit {
    /// It is cordoned.
    Unschedulable,
    /// It has a taint that the pod does not bear.
    Taint {
        /// The taint's key.
        key: Arc<str>,
        /// Its value, perhaps empty.
        value: Arc<str>,
    },
    /// It is not what node selector or required node affinity ask for.
    Affinity,
    /// A volume of the pod cannot be reached from it.
    Volume,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unschedulable => f.write_str("node(s) were unschedulable"),
            Self::Taint { key, value } => write!(f, "node(s) had untolerated taint {{{key}: {value}}}"),
            Self::Affinity => f.write_str("node(s) didn't match Pod's node affinity/selector"),
            Self::Volume => f.write_str("node(s) didn't match PersistentVolume's node affinity"),
        }
    }
}

impl Needs {
    /// Whether a node takes the pod. Amounts ([`crate::Resources::fits`]) and other pods are not looked at.
    ///
    /// # Errors
    /// The first thing that keeps it off, in kube-scheduler's order.
    pub fn admits(&self, node: &NodeFacts) -> Result<(), Misfit> {
        if node.unschedulable && !self.bears(UNSCHEDULABLE, "", TaintEffect::NoSchedule) {
            return Err(Misfit::Unschedulable);
        }
        if let Some(taint) = self.unborne(node) {
            return Err(Misfit::Taint { key: taint.key.clone(), value: taint.value.clone() });
        }
        if !self.selects(node) {
            return Err(Misfit::Affinity);
        }
        let reached = |terms: &Arc<Vec<NodeTerm>>| terms.iter().any(|term| term.holds(node));
        if !self.volumes.iter().all(reached) {
            return Err(Misfit::Volume);
        }
        Ok(())
    }

    /// The first taint of a node that keeps the pod off.
    fn unborne<'n>(&self, node: &'n NodeFacts) -> Option<&'n Taint> {
        let mut taints = node.taints.iter();
        taints.find(|taint| taint.keeps_off() && !self.bears_taint(taint))
    }

    /// Whether a node is what node selector and required node affinity ask for.
    fn selects(&self, node: &NodeFacts) -> bool {
        let mut selector = self.selector.iter();
        selector.all(|(label, value)| node.labels.get(label) == Some(value))
            && (self.affinity.is_empty() || self.affinity.iter().any(|term| term.holds(node)))
    }

    /// Whether a node is part of a domain over which one of the pod's own constraints spreads: it has the labels of all of them, and is
    /// one that the policies of this one count.
    pub fn spreads_over(&self, spread: &Spread, node: &NodeFacts) -> bool {
        self.spread.iter().all(|other| node.labels.contains_key(&other.topology_key))
            && (!spread.by_affinity || self.selects(node))
            && (!spread.by_taints || self.unborne(node).is_none())
    }

    /// How much the pod would like a node that takes it: the weights of the preferred terms that hold, less 100 for each taint that keeps
    /// off where others are left.
    pub fn prefers(&self, node: &NodeFacts) -> i64 {
        let liked = self.preferred.iter().filter(|(_, term)| term.holds(node));
        let liked: i64 = liked.map(|(weight, _)| i64::from(*weight)).sum();
        let avoided = node.taints.iter().filter(|taint| !taint.keeps_off() && !self.bears_taint(taint));
        avoided.fold(liked, |liked, _| liked - AVOIDED)
    }

    fn bears_taint(&self, taint: &Taint) -> bool {
        self.bears(&taint.key, &taint.value, taint.effect)
    }

    fn bears(&self, key: &str, value: &str, effect: TaintEffect) -> bool {
        self.tolerations.iter().any(|toleration| toleration.bears(key, value, effect))
    }
}

impl Taint {
    /// Whether it keeps pods off that do not bear it, or else only makes other nodes better.
    pub fn keeps_off(&self) -> bool {
        self.effect != TaintEffect::PreferNoSchedule
    }
}

impl Toleration {
    fn bears(&self, key: &str, value: &str, effect: TaintEffect) -> bool {
        self.effect.is_none_or(|known| known == effect)
            && (self.key.is_empty() || *self.key == *key)
            && self.value.bears(value)
    }
}

impl TolerationValue {
    fn bears(&self, value: &str) -> bool {
        let number = || value.parse::<i64>().ok();
        match self {
            Self::Any => true,
            Self::Equal(known) => **known == *value,
            Self::Above(limit) => number().is_some_and(|value| value > *limit),
            Self::Below(limit) => number().is_some_and(|value| value < *limit),
        }
    }
}

impl NodeTerm {
    /// Whether it holds on a node. A term without requirements holds on none.
    pub fn holds(&self, node: &NodeFacts) -> bool {
        let some = !self.labels.is_empty() || !self.names.is_empty();
        let name = |required: &Requirement| {
            let known = *required.key == *"metadata.name" && required.values.len() == 1;
            let is = required.values.first() == Some(&node.name);
            match required.operator {
                Operator::In => known && is,
                Operator::NotIn => known && !is,
                _ => false,
            }
        };
        some && self.labels.iter().all(|required| required.holds(node.labels.get(&required.key)))
            && self.names.iter().all(name)
    }
}

impl Requirement {
    /// Whether it holds for the label's value, or for there being none. One that is not well formed holds for nothing.
    pub fn holds(&self, value: Option<&Arc<str>>) -> bool {
        let number = |text: &str| text.parse::<i64>().ok();
        let compared = |is: fn(i64, i64) -> bool| match (&*self.values, value) {
            ([limit], Some(value)) => {
                number(value).zip(number(limit)).is_some_and(|(value, limit)| is(value, limit))
            }
            _ => false,
        };
        match self.operator {
            Operator::In => value.is_some_and(|value| self.values.contains(value)),
            Operator::NotIn => {
                !self.values.is_empty() && value.is_none_or(|value| !self.values.contains(value))
            }
            Operator::Exists => value.is_some() && self.values.is_empty(),
            Operator::DoesNotExist => value.is_none() && self.values.is_empty(),
            Operator::Gt => compared(|value, limit| value > limit),
            Operator::Lt => compared(|value, limit| value < limit),
        }
    }
}

#[cfg(test)]
mod tests;
