//! What a pod needs of a node, read from its spec as kube-scheduler reads it. Resources that are watched are left out: they are devices,
//! and accounted as such.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::slim::SlimContainer;
use gantry_gang::needs::{
    HostPort, NodeTerm, Operator, PodTerm, Requirement, Spread, Toleration, TolerationValue,
};
use gantry_gang::{Needs, Resources, TaintEffect};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::reader::TextInterner;
use super::slim::{
    SlimContainerStatus, SlimLabelSelector, SlimNodeTerm, SlimPodTerm, SlimRequirement, SlimSpec, SlimSpread,
    SlimStatus, SlimToleration,
};
use crate::watched::WatchedResources;

/// How resources begin that are claims of a device class (DRA): kube-scheduler allocates them, and no node lists them.
const DEVICE_CLASS: &str = "deviceclass.resource.kubernetes.io/";

/// The label by which every namespace has its own name.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

impl SlimSpec {
    /// What the pod needs, but for its own labels, which only matter where terms are about.
    pub(super) fn needs(
        &self,
        status: Option<&SlimStatus>,
        watched: &WatchedResources,
        metadata: &ObjectMeta,
        words: &mut TextInterner,
    ) -> Needs {
        let selector = self.node_selector.iter();
        let node = &self.affinity.node_affinity;
        let affinity = match &node.required {
            // A selector without terms holds nowhere, as does a term without requirements.
            Some(required) if required.node_selector_terms.is_empty() => vec![NodeTerm::default()],
            Some(required) => required.node_selector_terms.iter().map(|term| term.read(words)).collect(),
            None => Vec::new(),
        };
        Needs {
            resources: self.load(status, watched),
            selector: selector.map(|(key, value)| (words.of(key), words.of(value))).collect(),
            affinity,
            preferred: node
                .preferred
                .iter()
                .map(|preferred| (preferred.weight, preferred.preference.read(words)))
                .collect(),
            tolerations: self.tolerations.iter().filter_map(|toleration| toleration.read(words)).collect(),
            apart_from: self.apart_from(words),
            together_with: read_terms(&self.affinity.pod_affinity.required, NamespaceCoverage::Whole, words),
            // Which those can be reached from is the index's to know.
            volumes: Vec::new(),
            spread: self
                .spread
                .iter()
                .filter(|spread| spread.when_unsatisfiable == "DoNotSchedule")
                .map(|spread| spread.read(metadata.labels.as_ref(), words))
                .collect(),
            namespace: words.of(metadata.namespace.as_deref().unwrap_or_default()),
            labels: std::sync::Arc::default(),
            host_ports: self.host_ports(words),
        }
    }

    /// The pods it must not share a domain with.
    pub(super) fn apart_from(&self, words: &mut TextInterner) -> Vec<PodTerm> {
        read_terms(&self.affinity.pod_anti_affinity.required, NamespaceCoverage::Part, words)
    }

    /// Ports of the host that its containers and sidecars take.
    pub(super) fn host_ports(&self, words: &mut TextInterner) -> Vec<HostPort> {
        let sidecars = self.init_containers.iter().filter(|container| container.is_sidecar());
        let ports = self
            .containers
            .iter()
            .chain(sidecars)
            .flat_map(|container| &container.ports)
            .filter(|port| port.host_port != 0);
        let mut ports: Vec<HostPort> = ports
            .map(|port| {
                let protocol = or(&port.protocol, "TCP");
                let address = or(&port.host_ip, "0.0.0.0");
                (words.of(protocol), words.of(address), port.host_port)
            })
            .collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }

    /// The claims of its volumes, by name. Those made for the pod alone have its name and theirs.
    pub(super) fn volume_claims(&self, pod: &str, words: &mut TextInterner) -> Vec<Arc<str>> {
        let claims = self.volumes.iter().filter_map(|volume| {
            match (&volume.persistent_volume_claim, &volume.ephemeral) {
                (Some(claim), _) => Some(words.of(&claim.claim_name)),
                (None, Some(_)) => Some(words.of(&format!("{pod}-{}", volume.name))),
                (None, None) => None,
            }
        });
        claims.collect()
    }

    /// What the pod takes of a node: max(init containers, sidecars + app containers), as they run one after another, the amount of the
    /// pod as a whole where it states one, and overhead.
    pub(super) fn load(&self, status: Option<&SlimStatus>, watched: &WatchedResources) -> Resources {
        let mut lasting = Resources::default();
        let mut peak = Resources::default();
        for init in &self.init_containers {
            if init.is_sidecar() {
                let asked = taken(init, status, watched);
                lasting.add(&asked);
                peak.raise_to(&lasting);
            } else {
                let mut while_it_runs = lasting.clone();
                while_it_runs.add(&amounts(init.resources.asked(), watched));
                peak.raise_to(&while_it_runs);
            }
        }
        for app in &self.containers {
            lasting.add(&taken(app, status, watched));
        }
        lasting.raise_to(&peak);
        for (name, written) in self.resources.asked() {
            if name == "cpu" || name == "memory" || name.starts_with("hugepages-") {
                lasting.set_written(name, written);
            }
        }
        for (name, written) in self.overhead.iter().filter(|(name, _)| !watched.covers(name)) {
            lasting.add_written(name, written);
        }
        lasting.pods = 1;
        lasting.capped()
    }
}

fn or<'a>(written: &'a str, default: &'a str) -> &'a str {
    if written.is_empty() { default } else { written }
}

/// What a container asks for, or while it is being resized the most of that, of what the node has set aside for it, and of what it runs with.
fn taken(container: &SlimContainer, status: Option<&SlimStatus>, watched: &WatchedResources) -> Resources {
    let asked = amounts(container.resources.asked(), watched);
    let Some((status, own)) = status.and_then(|status| Some((status, status.of(&container.name)?))) else {
        return asked;
    };
    let mut taken = amounts(&own.allocated_resources, watched);
    taken.raise_to(&amounts(own.resources.asked(), watched));
    // A resize that can never be granted is not waited for.
    let grants = !status.resize_is_infeasible();
    if grants || taken == Resources::default() {
        taken.raise_to(&asked);
    }
    taken
}

impl SlimStatus {
    fn of(&self, container: &str) -> Option<&SlimContainerStatus> {
        let mut all = self.container_statuses.iter().chain(&self.init_container_statuses);
        all.find(|status| status.name == container)
    }

    fn resize_is_infeasible(&self) -> bool {
        self.conditions.iter().any(|condition| {
            condition.type_ == "PodResizePending" && condition.reason.as_deref() == Some("Infeasible")
        })
    }
}

/// Amounts as written, but for those of resources that are watched or no node's.
fn amounts<N: AsRef<str>, W: AsRef<str>>(
    written: impl IntoIterator<Item = (N, W)>,
    watched: &WatchedResources,
) -> Resources {
    let mut amounts = Resources::default();
    for (name, written) in written {
        let name = name.as_ref();
        if !watched.covers(name) && !name.starts_with(DEVICE_CLASS) {
            amounts.add_written(name, written.as_ref());
        }
    }
    amounts
}

impl SlimNodeTerm {
    fn read(&self, words: &mut TextInterner) -> NodeTerm {
        NodeTerm {
            labels: read_all(&self.match_expressions, words),
            names: read_all(&self.match_fields, words),
        }
    }
}

fn read_all(requirements: &[SlimRequirement], words: &mut TextInterner) -> Vec<Requirement> {
    requirements.iter().map(|requirement| requirement.read(words)).collect()
}

impl SlimRequirement {
    fn read(&self, words: &mut TextInterner) -> Requirement {
        requirement(&self.key, &self.operator, &self.values, words)
    }
}

/// A requirement on a label, as written. An operator that is not known holds for nothing, which is `In` without values.
pub(crate) fn requirement<'v>(
    key: &str,
    operator: &str,
    values: impl IntoIterator<Item = &'v String>,
    words: &mut TextInterner,
) -> Requirement {
    let known = match operator {
        "In" => Some(Operator::In),
        "NotIn" => Some(Operator::NotIn),
        "Exists" => Some(Operator::Exists),
        "DoesNotExist" => Some(Operator::DoesNotExist),
        "Gt" => Some(Operator::Gt),
        "Lt" => Some(Operator::Lt),
        _ => None,
    };
    let values = values.into_iter().filter(|_| known.is_some());
    Requirement {
        key: words.of(key),
        operator: known.unwrap_or(Operator::In),
        values: values.map(|value| words.of(value)).collect(),
    }
}

impl SlimToleration {
    /// `None` for an operator that is not known, and for a limit that is no number: it bears nothing.
    fn read(&self, words: &mut TextInterner) -> Option<Toleration> {
        let value = match self.operator.as_str() {
            "" | "Equal" => TolerationValue::Equal(words.of(&self.value)),
            "Exists" => TolerationValue::Any,
            "Gt" => TolerationValue::Above(self.value.parse().ok()?),
            "Lt" => TolerationValue::Below(self.value.parse().ok()?),
            _ => return None,
        };
        let effect = match self.effect.as_str() {
            "" => None,
            written => Some(effect(written)?),
        };
        Some(Toleration { key: words.of(&self.key), value, effect })
    }
}

/// What a taint does, as written.
pub(crate) fn effect(written: &str) -> Option<TaintEffect> {
    match written {
        "NoSchedule" => Some(TaintEffect::NoSchedule),
        "PreferNoSchedule" => Some(TaintEffect::PreferNoSchedule),
        "NoExecute" => Some(TaintEffect::NoExecute),
        _ => None,
    }
}

/// What has to be known of a term's namespaces to go by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NamespaceCoverage {
    /// All: others may be where it looks for company too.
    Whole,
    /// Some: it keeps away from these, whatever else it keeps away from.
    Part,
}

fn read_terms(terms: &[SlimPodTerm], known: NamespaceCoverage, words: &mut TextInterner) -> Vec<PodTerm> {
    terms.iter().filter_map(|term| term.read(known, words)).collect()
}

impl SlimPodTerm {
    /// `None` where its namespaces are chosen by labels other than the one that is their name: nobody here knows those. kube-scheduler
    /// judges such terms, and what it refuses is planned anew elsewhere.
    fn read(&self, known: NamespaceCoverage, words: &mut TextInterner) -> Option<PodTerm> {
        let mut named: Vec<_> = self.namespaces.iter().map(|name| words.of(name)).collect();
        let namespaces = match &self.namespace_selector {
            Some(selector) if selector.is_empty() => None,
            Some(selector) => {
                match selector.named_namespaces(words) {
                    Some(more) => named.extend(more),
                    None if known == NamespaceCoverage::Whole => return None,
                    None => {}
                }
                if named.is_empty() {
                    return None;
                }
                Some(named)
            }
            None => Some(named),
        };
        Some(PodTerm {
            selector: read_selector(self.label_selector.as_ref(), words),
            namespaces,
            topology_key: words.of(&self.topology_key),
        })
    }
}

impl SlimSpread {
    /// The values that the pod itself has of `matchLabelKeys` are part of the selector.
    fn read(&self, labels: Option<&BTreeMap<String, String>>, words: &mut TextInterner) -> Spread {
        let mut selector = read_selector(self.label_selector.as_ref(), words);
        let own = self.match_label_keys.iter().filter_map(|key| Some((key, labels?.get(key)?)));
        for (key, value) in own {
            let required =
                Requirement { key: words.of(key), operator: Operator::In, values: vec![words.of(value)] };
            // The API server may have written it there already.
            if !selector.contains(&required) {
                selector.push(required);
            }
        }
        let honors = |policy: &Option<String>, default: &str| policy.as_deref().unwrap_or(default) == "Honor";
        Spread {
            selector,
            topology_key: words.of(&self.topology_key),
            max_skew: self.max_skew.max(1),
            min_domains: self.min_domains.unwrap_or(1),
            by_affinity: honors(&self.node_affinity_policy, "Honor"),
            by_taints: honors(&self.node_taints_policy, "Ignore"),
        }
    }
}

/// No selector finds no pod.
fn read_selector(selector: Option<&SlimLabelSelector>, words: &mut TextInterner) -> Vec<Requirement> {
    match selector {
        Some(selector) => selector.read(words),
        None => vec![Requirement { key: words.of(""), operator: Operator::In, values: Vec::new() }],
    }
}

impl SlimLabelSelector {
    /// The namespaces that it finds, where it asks for nothing but their names, one of some.
    fn named_namespaces(&self, words: &mut TextInterner) -> Option<Vec<Arc<str>>> {
        let all = self.read(words);
        let first = all.first().filter(|first| first.operator == Operator::In)?;
        let by_name = all.iter().all(|required| *required.key == *NAMESPACE_NAME);
        let names = first.values.iter().filter(|name| all.iter().all(|required| required.holds(Some(name))));
        by_name.then(|| names.cloned().collect())
    }

    fn is_empty(&self) -> bool {
        self.match_labels.is_empty() && self.match_expressions.is_empty()
    }

    fn read(&self, words: &mut TextInterner) -> Vec<Requirement> {
        let equal = self.match_labels.iter().map(|(key, value)| Requirement {
            key: words.of(key),
            operator: Operator::In,
            values: vec![words.of(value)],
        });
        let mut all: Vec<Requirement> = equal.collect();
        all.extend(read_all(&self.match_expressions, words));
        all
    }
}

#[cfg(test)]
mod tests;
