//! The pods that hold a GPU, each with the rest of its gang: what must end for the GPU to come free. For `gantry drain`;
//! nothing is decided or changed here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::{NodeName, PodUid};
use gantry_gang::GangKey;

use super::GangViews;
use super::facts::Facts;
use crate::pod::PodFacts;

/// A pod with devices.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HolderPod {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Its UID.
    pub uid: PodUid,
    /// Where it is bound.
    pub node: NodeName,
}

/// Pods that end together: the bound members of a gang, or one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HolderGroup {
    /// The gang: `namespace/name`.
    pub gang: Option<String>,
    /// By name.
    pub pods: Vec<HolderPod>,
}

/// The members of gangs that hold devices of a node, each with a GPU of them, by the ledger.
pub(super) fn gang_gpus(
    facts: &Facts,
    gangs: GangViews<'_>,
    node: &str,
) -> Vec<(Arc<GangKey>, Arc<PodFacts>, usize)> {
    let Some(entry) = facts.nodes.by_name(node) else {
        return Vec::new();
    };
    let mut all = Vec::new();
    for (uid, held) in entry.holders() {
        let (Some(gang), Some(pod)) = (gangs.of_pod(uid), facts.pods.get(uid)) else {
            continue;
        };
        let devices = entry
            .pools()
            .zip(held)
            .flat_map(|((pool, _), held)| held.iter().filter_map(|device| pool.gpu_of(device)));
        let gpus: BTreeSet<usize> = devices.collect();
        all.extend(gpus.into_iter().map(|gpu| (Arc::clone(gang), Arc::clone(pod), gpu)));
    }
    all
}

impl HolderGroup {
    /// The pods that hold devices of a GPU: see [`Index::holder_groups`](super::Index::holder_groups).
    pub(super) fn of(facts: &Facts, gangs: GangViews<'_>, node: &str, units: &BTreeSet<&str>) -> Vec<Self> {
        let Some(entry) = facts.nodes.by_name(node) else {
            return Vec::new();
        };
        let holders = entry.holders().iter().filter(|(_, held)| {
            let mut pools = entry.pools().zip(held);
            pools.any(|((pool, _), held)| {
                held.iter().any(|device| pool.id(device).is_some_and(|id| units.contains(id.unit())))
            })
        });
        let mut members: BTreeMap<&Arc<GangKey>, Vec<HolderPod>> = BTreeMap::new();
        let mut all = Vec::new();
        for (uid, _) in holders {
            match gangs.goes_with(uid) {
                Some(gang) => drop(members.entry(gang).or_default()),
                None => {
                    let pods: Vec<HolderPod> =
                        facts.pods.get(uid).and_then(|pod| holder(pod)).into_iter().collect();
                    all.push(HolderGroup { gang: None, pods });
                }
            }
        }
        let bound = facts.pods.iter().filter(|pod| pod.is_live());
        for (gang, pod) in bound.filter_map(|pod| Some((gangs.goes_with(&pod.uid)?, holder(pod)?))) {
            if let Some(pods) = members.get_mut(gang) {
                pods.push(pod);
            }
        }
        all.extend(members.into_iter().map(|(gang, mut pods)| {
            pods.sort();
            HolderGroup { gang: Some(gang.to_string()), pods }
        }));
        all.retain(|group| !group.pods.is_empty());
        all.sort_by(|a, b| a.pods.cmp(&b.pods));
        all
    }
}

/// The pod, if it is bound.
fn holder(pod: &PodFacts) -> Option<HolderPod> {
    Some(HolderPod {
        namespace: Arc::clone(&pod.namespace),
        name: Arc::clone(&pod.name),
        uid: pod.uid.clone(),
        node: pod.node.clone()?,
    })
}

#[cfg(test)]
mod tests {
    use crate::fixtures::{Cluster, bound, member, plain, pod, pod_of, shared_node};
    use gantry_planner::decide::Options;

    fn names(cluster: &Cluster, node: &str, gpu: usize) -> Vec<(Option<String>, Vec<String>)> {
        let uuid = format!("GPU-{node}-{gpu}");
        let all = cluster.store.read(|index| index.holder_groups(node, &[&*uuid].into()));
        all.into_iter()
            .map(|one| (one.gang, one.pods.iter().map(|pod| pod.name.to_string()).collect()))
            .collect()
    }

    #[test]
    fn gpu_is_held_by_its_pods_alone() {
        let cluster = Cluster::new(Options::default());
        cluster.add("n", &plain(4)).add("m", &plain(4));
        cluster.pod(&bound(pod("a", 2), "n", 1, Some("0-1")));
        cluster.pod(&bound(pod("b", 1), "n", 2, Some("2")));
        cluster.pod(&bound(pod("c", 1), "m", 3, Some("0")));
        cluster.pod(&pod("waits", 1));
        assert_eq!(names(&cluster, "n", 0), [(None, vec!["a".to_owned()])]);
        assert_eq!(names(&cluster, "n", 2), [(None, vec!["b".to_owned()])]);
        assert_eq!(names(&cluster, "n", 3), []);
        assert_eq!(names(&cluster, "elsewhere", 0), []);
    }

    /// A gang is of no use without one of its members. Those that wait hold nothing.
    #[test]
    fn member_of_gang_stands_for_all_bound_members() {
        let cluster = Cluster::new(Options::default());
        cluster.add("n", &plain(4)).add("m", &plain(4));
        for (name, node) in [("g-0", "n"), ("g-1", "m")] {
            let mut pod = bound(pod(name, 2), node, 1, Some("0-1"));
            let annotations = pod["metadata"]["annotations"].as_object_mut().unwrap();
            let gang = member(name, 2, "g", 2)["metadata"]["annotations"].clone();
            annotations.extend(gang.as_object().unwrap().clone());
            cluster.pod(&pod);
        }
        cluster.pod(&member("g-2", 2, "g", 2));
        cluster.pod(&bound(pod("other", 1), "m", 2, Some("2")));
        let gang = (Some("default/g".to_owned()), vec!["g-0".to_owned(), "g-1".to_owned()]);
        let of_both = [names(&cluster, "n", 1), names(&cluster, "m", 0)];
        assert_eq!(of_both, [vec![gang.clone()], vec![gang]]);
    }

    /// By kubelet's report.
    #[test]
    fn every_holder_of_a_shared_gpu_is_named() {
        let cluster = Cluster::new(Options::default());
        let shared = "nvidia.com/gpu.shared";
        let mut node = shared_node("n", &plain(2), shared, 2);
        let held = [("a", "GPU-n-0::0"), ("b", "GPU-n-0::1"), ("c", "GPU-n-1::0")];
        let holders = held.map(|(pod, device)| {
            serde_json::json!({"namespace": "default", "pod": pod, "uid": pod, "resource": shared,
                "devices": [device], "provenance": "PodResources", "state": "Live"})
        });
        node["status"]["holders"] = serde_json::json!(holders);
        cluster.add("n", &plain(2)).inventory(&node);
        for (name, _) in held {
            cluster.pod(&bound(pod_of(name, shared, 1), "n", 1, None));
        }
        let of = |name: &str| (None, vec![name.to_owned()]);
        assert_eq!(names(&cluster, "n", 0), [of("a"), of("b")]);
        assert_eq!(names(&cluster, "n", 1), [of("c")]);
    }
}
