//! The JSON of the preempt verb: the victims that kube-scheduler proposes per node, and the victims that it is to
//! evict. Rarely called, so only the pod is borrowed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Pod;

/// `ExtenderPreemptionArgs`.
#[derive(Debug, Deserialize)]
pub struct ExtenderPreemptionArgs<'a> {
    /// The preemptor.
    #[serde(rename = "Pod", alias = "pod", borrow)]
    pub pod: Pod<'a>,
    /// Victims by node as whole pods: kube-scheduler with `nodeCacheCapable: false`.
    #[serde(rename = "NodeNameToVictims", alias = "nodeNameToVictims", default)]
    victims: Option<BTreeMap<String, Victims<WholePod>>>,
    /// Victims by node as UIDs.
    #[serde(rename = "NodeNameToMetaVictims", alias = "nodeNameToMetaVictims", default)]
    meta_victims: Option<BTreeMap<String, Victims<MetaPod>>>,
}

/// `Victims` and `MetaVictims`, which differ in how they identify a pod.
#[derive(Debug, Serialize, Deserialize)]
struct Victims<P> {
    #[serde(rename = "Pods", alias = "pods", default = "none")]
    pods: Option<Vec<P>>,
    #[serde(rename = "NumPDBViolations", alias = "numPDBViolations", default)]
    budgets_broken: i64,
}

fn none<P>() -> Option<Vec<P>> {
    None
}

#[derive(Debug, Serialize, Deserialize)]
struct MetaPod {
    #[serde(rename = "UID", alias = "uid")]
    uid: String,
}

/// The fields of a victim's `v1.Pod` that are read.
#[derive(Debug, Deserialize)]
struct WholePod {
    metadata: WholeMetadata,
}

#[derive(Debug, Deserialize)]
struct WholeMetadata {
    uid: String,
}

/// A node with its victims and violated budgets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The node.
    pub node: String,
    /// UIDs of the victims.
    pub victims: Vec<String>,
    /// Number of violated budgets.
    pub budgets_broken: i64,
}

impl Offer {
    /// UIDs of the victims.
    pub fn uids(&self) -> Vec<&str> {
        self.victims.iter().map(String::as_str).collect()
    }
}

impl ExtenderPreemptionArgs<'_> {
    /// The proposed victims by node. UIDs take precedence; kube-scheduler sends one of the two forms.
    pub fn offers(&mut self) -> Vec<Offer> {
        fn offers<P>(nodes: BTreeMap<String, Victims<P>>, uid: impl Fn(P) -> String) -> Vec<Offer> {
            let offer = |(node, victims): (String, Victims<P>)| Offer {
                node,
                victims: victims.pods.into_iter().flatten().map(&uid).collect(),
                budgets_broken: victims.budgets_broken,
            };
            nodes.into_iter().map(offer).collect()
        }
        match (self.meta_victims.take(), self.victims.take()) {
            (Some(nodes), _) => offers(nodes, |pod| pod.uid),
            (None, Some(nodes)) => offers(nodes, |pod| pod.metadata.uid),
            (None, None) => Vec::new(),
        }
    }
}

/// `ExtenderPreemptionResult`. Each node has at least one victim; kube-scheduler treats a node without one as an error.
///
/// # Errors
/// None in practice: the result has only strings and numbers.
pub fn preemption_answer(offers: Vec<Offer>) -> Result<Vec<u8>, serde_json::Error> {
    #[derive(Serialize)]
    struct Answer {
        #[serde(rename = "NodeNameToMetaVictims")]
        nodes: BTreeMap<String, Victims<MetaPod>>,
    }
    let nodes = offers.into_iter().map(|offer| {
        let pods = offer.victims.into_iter().map(|uid| MetaPod { uid }).collect();
        let victims = Victims { pods: Some(pods), budgets_broken: offer.budgets_broken };
        (offer.node, victims)
    });
    serde_json::to_vec(&Answer { nodes: nodes.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(node: &str, victims: &[&str], budgets_broken: i64) -> Offer {
        Offer {
            node: node.to_owned(),
            victims: victims.iter().map(|uid| (*uid).to_owned()).collect(),
            budgets_broken,
        }
    }

    #[test]
    fn victims_are_read_by_uid_or_from_whole_pods() {
        let by_uid = r#"{"Pod":{"metadata":{"uid":"p"}},"NodeNameToVictims":null,
            "NodeNameToMetaVictims":{"b":{"Pods":[{"UID":"1"},{"UID":"2"}],"NumPDBViolations":1},
            "a":{"Pods":null,"NumPDBViolations":0}}}"#;
        let mut args: ExtenderPreemptionArgs<'_> = serde_json::from_str(by_uid).unwrap();
        assert_eq!(args.offers(), [offer("a", &[], 0), offer("b", &["1", "2"], 1)]);
        let whole = r#"{"Pod":{"metadata":{"uid":"p"}},
            "NodeNameToVictims":{"a":{"Pods":[{"metadata":{"uid":"1","name":"x"},"spec":{}}],"NumPDBViolations":0}},
            "NodeNameToMetaVictims":null}"#;
        let mut args: ExtenderPreemptionArgs<'_> = serde_json::from_str(whole).unwrap();
        assert_eq!(args.offers(), [offer("a", &["1"], 0)]);
    }

    #[test]
    fn the_answer_is_as_kube_scheduler_reads_it() {
        let answer = preemption_answer(vec![offer("a", &["1"], 2)]).unwrap();
        assert_eq!(
            String::from_utf8(answer).unwrap(),
            r#"{"NodeNameToMetaVictims":{"a":{"Pods":[{"UID":"1"}],"NumPDBViolations":2}}}"#
        );
        assert_eq!(preemption_answer(Vec::new()).unwrap(), br#"{"NodeNameToMetaVictims":{}}"#);
    }
}
