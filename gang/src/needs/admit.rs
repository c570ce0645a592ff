//! Whether a node takes a pod, by everything but amounts and other pods: as kube-scheduler's NodeUnschedulable, TaintToleration and
//! NodeAffinity plugins see it, and VolumeBinding where a volume can be reached. It says no where they do, or a plan would be refused by
//! them.

use std::fmt;
use std::sync::Arc;

use super::{Needs, NodeTerm, Operator, Requirement, Spread, Toleration, TolerationValue};
use crate::resources::{NodeFacts, Taint, TaintEffect};

/// The taint that `spec.unschedulable` stands for.
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
/// What a taint that is not tolerated, but only keeps off where others are left, weighs against the weights of preferred affinity (1 to 100).
const AVOIDED: i64 = 100;

/// Why a node does not take a pod. Reads as kube-scheduler says it.
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
