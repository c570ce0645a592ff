//! What a pod needs of a node in addition to the devices that Gantry accounts, as kube-scheduler will judge it. Values; the
//! extender reads them from pods.

mod admit;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use admit::Misfit;

use crate::resources::{Resources, TaintEffect};

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
    /// With what.
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
    /// The value.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn port(protocol: &str, address: &str, number: u16) -> HostPort {
        (protocol.into(), address.into(), number)
    }

    #[test]
    fn ports_collide_as_kube_scheduler_counts_them() {
        let http = |address: &str| [port("TCP", address, 80)];
        for (a, b, collide) in [
            ("0.0.0.0", "0.0.0.0", true),
            ("0.0.0.0", "10.0.0.1", true),
            ("", "10.0.0.1", true),
            ("", "0.0.0.0", true),
            ("0.0.0.0", "::", true),
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("::", "::", true),
            ("::", "10.0.0.1", false),
            ("::", "::1", false),
        ] {
            assert_eq!(ports_collide(&http(a), &http(b)), collide, "{a} {b}");
            assert_eq!(ports_collide(&http(b), &http(a)), collide, "{b} {a}");
        }
        assert!(!ports_collide(&http(""), &[port("UDP", "", 80)]));
        assert!(!ports_collide(&http(""), &[port("TCP", "", 81)]));
        assert!(!ports_collide(&http(""), &[]));
    }
}
