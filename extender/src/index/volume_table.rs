//! Which nodes can reach the volumes that pods claim. An unknown volume restricts no pod: kube-scheduler checks volumes
//! as well.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use gantry_gang::needs::NodeTerm;

use crate::pod::PodFacts;

/// Namespace and name.
pub(super) type ClaimKey = (Arc<str>, Arc<str>);
/// A node can reach a volume if one of these terms holds.
pub(super) type Reach = Arc<Vec<NodeTerm>>;

/// The volume of a claim, or what it waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeClaim {
    /// It is bound to the volume of this name.
    Bound(Arc<str>),
    /// It waits for a volume of this class.
    Waiting(Arc<str>),
}

/// What is known of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Volume {
    /// Where it can be reached; `None`: from every node.
    pub reach: Option<Reach>,
    /// The class of a local volume that was created in advance and that no claim has: the first consumer's node decides
    /// which of them a claim gets.
    pub free_of: Option<Arc<str>>,
}

/// Claims, and the volumes that not every node can reach.
#[derive(Debug, Default)]
pub(super) struct VolumeTable {
    claims: HashMap<ClaimKey, VolumeClaim>,
    reach: HashMap<Arc<str>, Reach>,
    /// Free local volumes by class.
    free: HashMap<Arc<str>, BTreeMap<Arc<str>, Reach>>,
    class_of: HashMap<Arc<str>, Arc<str>>,
    /// Where a claim of a class may get one of those.
    reach_of_class: HashMap<Arc<str>, Reach>,
    /// Something changed since the needs of pods were last completed.
    changed: bool,
}

impl VolumeTable {
    /// Where the volumes of a pod can be reached, by name of volume.
    pub(super) fn of(&self, pod: &PodFacts) -> Vec<Reach> {
        let claims = pod.volume_claims.iter();
        let claims = claims.filter_map(|claim| {
            let claim = (Arc::clone(&pod.namespace), Arc::clone(claim));
            self.claims.get(&claim)
        });
        let mut reach: Vec<(&Arc<str>, &Reach)> = claims
            .filter_map(|claim| match claim {
                VolumeClaim::Bound(volume) => self.reach.get_key_value(volume),
                VolumeClaim::Waiting(class) => self.reach_of_class.get_key_value(class),
            })
            .collect();
        reach.sort_unstable_by_key(|(volume, _)| *volume);
        let mut distinct: Vec<Reach> = Vec::new();
        for (_, reach) in reach {
            // VolumeTable of one zone ask for the same: members that have one each are alike.
            if !distinct.contains(reach) {
                distinct.push(Arc::clone(reach));
            }
        }
        distinct
    }

    /// Whether anything changed since this was last called.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// All claims, each with what is known of it.
    pub(super) fn set_claims(&mut self, claims: impl IntoIterator<Item = (ClaimKey, Option<VolumeClaim>)>) {
        let claims = claims.into_iter();
        self.claims = claims.filter_map(|(claim, volume)| Some((claim, volume?))).collect();
        self.changed = true;
    }

    /// A claim is bound, waits, or is gone.
    pub(super) fn set_claim(&mut self, claim: ClaimKey, volume: Option<VolumeClaim>) {
        self.changed |= self.claims.get(&claim) != volume.as_ref();
        match volume {
            Some(volume) => self.claims.insert(claim, volume),
            None => self.claims.remove(&claim),
        };
    }

    /// All volumes.
    pub(super) fn set_volumes(&mut self, volumes: impl Iterator<Item = (Arc<str>, Option<Volume>)>) {
        *self = Self { claims: std::mem::take(&mut self.claims), ..Self::default() };
        for (name, volume) in volumes {
            self.set_volume(name, volume);
        }
        self.changed = true;
    }

    /// A volume; `None`: it is gone.
    pub(super) fn set_volume(&mut self, name: Arc<str>, volume: Option<Volume>) {
        let Volume { reach, free_of } = volume.unwrap_or_default();
        self.changed |= self.reach.get(&name) != reach.as_ref();
        let class = free_of.filter(|_| reach.is_some());
        let before = match &class {
            Some(class) => self.class_of.insert(name.clone(), class.clone()),
            None => self.class_of.remove(&name),
        };
        if let Some(before) = before {
            if let Some(free) = self.free.get_mut(&before) {
                free.remove(&name);
            }
            self.join(&before);
        }
        if let (Some(class), Some(reach)) = (&class, &reach) {
            self.free.entry(class.clone()).or_default().insert(name.clone(), Arc::clone(reach));
            self.join(class);
        }
        match reach {
            Some(reach) => self.reach.insert(name, reach),
            None => self.reach.remove(&name),
        };
    }

    /// Puts together where a claim of a class may get a volume. With none left, kube-scheduler may know of one that was
    /// not seen yet.
    fn join(&mut self, class: &Arc<str>) {
        let free = self.free.get(class).filter(|free| !free.is_empty());
        let Some(free) = free else {
            self.free.remove(class);
            self.changed |= self.reach_of_class.remove(class).is_some();
            return;
        };
        let mut terms: Vec<NodeTerm> = Vec::new();
        let mut seen: HashSet<&NodeTerm> = HashSet::new();
        for term in free.values().flat_map(|reach| reach.iter()) {
            if seen.insert(term) {
                terms.push(term.clone());
            }
        }
        if self.reach_of_class.get(class).is_none_or(|known| **known != terms) {
            self.reach_of_class.insert(class.clone(), Arc::new(terms));
            self.changed = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use gantry_api::{PodUid, Reason};
    use gantry_gang::needs::{Operator, Requirement};
    use gantry_gang::protocol::{Answer, BindEnd, Work};
    use serde_json::{Value, json};

    use super::*;
    use crate::fixtures::{Cluster, bound, bridged, member, target};
    use crate::index::{BindGrant, BindStep, Outcome};
    use gantry_planner::decide::Options;

    fn only_on(node: &str) -> Option<Reach> {
        let required = Requirement {
            key: "kubernetes.io/hostname".into(),
            operator: Operator::In,
            values: vec![node.into()],
        };
        Some(Arc::new(vec![NodeTerm { labels: vec![required], names: Vec::new() }]))
    }

    fn fixed(node: &str) -> Option<Volume> {
        Some(Volume { reach: only_on(node), free_of: None })
    }

    /// A free local volume of class `local`.
    fn local(node: &str) -> Option<Volume> {
        Some(Volume { reach: only_on(node), free_of: Some("local".into()) })
    }

    fn has(volume: &str) -> Option<VolumeClaim> {
        Some(VolumeClaim::Bound(volume.into()))
    }

    fn claim(name: &str) -> ClaimKey {
        ("default".into(), name.into())
    }

    /// Nodes `m`, `n` and `o`.
    fn cluster() -> Cluster {
        let cluster = Cluster::new(Options::default());
        for name in ["m", "n", "o"] {
            cluster.add(name, &bridged());
            let label = ("kubernetes.io/hostname".into(), name.into());
            let facts = cluster.store.read(|index| {
                let node = index.facts.nodes.find(name).unwrap();
                index.facts.resources.nodes()[node.0 as usize].facts.clone().unwrap()
            });
            let mut facts = (*facts).clone();
            facts.labels.extend([label]);
            cluster.store.update(|index| index.node_described(Arc::new(facts)));
        }
        cluster
    }

    /// A member of gang `a` that claims a volume.
    fn claiming(name: &str, claim: &str) -> Value {
        let mut pod = member(name, 8, "a", 2);
        pod["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]);
        pod
    }

    /// A gang of two, each of which claims a volume of its own.
    fn create(cluster: &Cluster) {
        for name in ["a-0", "a-1"] {
            cluster.pod(&claiming(name, name));
        }
    }

    fn nodes(cluster: &Cluster) -> [Answer; 2] {
        cluster.wait(2);
        ["a-0", "a-1"].map(|pod| cluster.store.update(|index| index.answer(&PodUid::from(pod), &|_| true)))
    }

    fn on(nodes: [&str; 2]) -> [Answer; 2] {
        nodes.map(|node| Answer::Node(node.into()))
    }

    #[test]
    fn members_go_where_their_volumes_can_be_reached() {
        let cluster = cluster();
        cluster.store.update(|index| {
            let claims = ["a-0", "a-1"].map(|name| (claim(name), has(&format!("pv-{name}"))));
            index.volume_claims_listed(claims.into());
            index.volumes_listed([("pv-a-0".into(), fixed("o")), ("pv-a-1".into(), fixed("n"))].into_iter());
        });
        create(&cluster);
        assert_eq!(nodes(&cluster), on(["o", "n"]));
    }

    /// Local volumes that wait for their first consumer, on two of three nodes: planned there at once.
    #[test]
    fn members_go_where_local_volumes_are_free() {
        let cluster = cluster();
        cluster.store.update(|index| {
            let claims = ["a-0", "a-1"].map(|name| (claim(name), Some(VolumeClaim::Waiting("local".into()))));
            index.volume_claims_listed(claims.into());
            index.volumes_listed([("pv-n".into(), local("n")), ("pv-o".into(), local("o"))].into_iter());
        });
        create(&cluster);
        assert_eq!(nodes(&cluster), on(["n", "o"]));
    }

    /// A volume that another claim has got is of no use, and one that is released again is.
    #[test]
    fn local_volumes_count_while_no_claim_has_them() {
        let cluster = cluster();
        cluster.store.update(|index| {
            for name in ["a-0", "a-1"] {
                index.volume_claim_seen(claim(name), Some(VolumeClaim::Waiting("local".into())));
            }
            index.volume_seen("pv-n".into(), local("n"));
            index.volume_seen("pv-o".into(), local("o"));
            index.volume_seen("pv-o".into(), fixed("o"));
        });
        create(&cluster);
        assert!(matches!(nodes(&cluster), [Answer::Wait(_), Answer::Wait(_)]), "one node does not hold both");
        cluster.store.update(|index| index.volume_seen("pv-m".into(), local("m")));
        assert_eq!(nodes(&cluster), on(["m", "n"]));
    }

    #[test]
    fn volumes_that_can_be_reached_from_everywhere_keep_nobody_off() {
        let cluster = cluster();
        cluster.store.update(|index| {
            index.volume_claims_listed(vec![(claim("a-0"), has("pv")), (claim("a-1"), None)]);
            index.volumes_listed([("pv".into(), None)].into_iter());
        });
        create(&cluster);
        assert_eq!(nodes(&cluster), on(["m", "n"]));
    }

    #[test]
    fn a_gang_whose_volumes_are_where_it_does_not_fit_says_so() {
        let cluster = cluster();
        cluster.store.update(|index| {
            for name in ["a-0", "a-1"] {
                index.volume_claim_seen(claim(name), has("shared"));
            }
            index.volume_seen("shared".into(), fixed("o"));
        });
        create(&cluster);
        let [Answer::Wait(why), _] = nodes(&cluster) else {
            panic!("it has a place");
        };
        assert_eq!(why.reason, Reason::CannotFit);
        // It is planned again elsewhere.
        cluster.store.update(|index| index.volume_seen("shared".into(), None));
        assert_eq!(nodes(&cluster), on(["m", "n"]));
    }

    /// Binds the gang of two, whose claims get volumes on their nodes meanwhile. The pods as they are then.
    fn bind(cluster: &Cluster, nodes: [&str; 2]) -> [Value; 2] {
        let places = [("a-0", nodes[0]), ("a-1", nodes[1])];
        let admit = |(pod, node): (&str, &str)| {
            let admitted = cluster.store.bind(&target(pod, node), None);
            admitted.unwrap()
        };
        for place in places {
            admit(place);
        }
        for work in cluster.store.update(|index| index.take_work()) {
            if let Work::Commit { gang, decision } = work {
                cluster.store.update(|index| index.committed(&gang, &decision.id, Ok(())));
            }
        }
        places.map(|(pod, node)| {
            let BindStep::Member(BindGrant::Grant { annotation, .. }) = admit((pod, node)) else {
                panic!("{pod} has no place");
            };
            let now = cluster.now();
            cluster.store.update(|index| {
                index.volume_claim_seen(claim(pod), has(&format!("pv-{pod}")));
                index.volume_seen(format!("pv-{pod}").into(), fixed(node));
                index.finish(now, &target(pod, node), Outcome::Bound);
                index.bind_ended(&PodUid::from(pod), BindEnd::Bound);
            });
            let mut shown = bound(claiming(pod, pod), node, 1, None);
            shown["metadata"]["annotations"]["gantry.dev/grant"] = (*annotation).into();
            cluster.pod(&shown);
            shown
        })
    }

    #[test]
    fn replacement_gets_the_slot_that_reaches_its_volume() {
        // That of before, and another that has none yet.
        for of in ["a-1", "a-1b"] {
            let cluster = cluster();
            create(&cluster);
            assert_eq!(nodes(&cluster), on(["m", "n"]));
            let pods = bind(&cluster, ["m", "n"]);
            cluster.gone(&pods[1]);
            cluster.wait(7);
            cluster.pod(&claiming("a-1b", of));
            cluster.wait(2);
            let answer = cluster.store.update(|index| index.answer(&"a-1b".into(), &|_| true));
            assert_eq!(answer, Answer::Node("n".into()), "{of}");
        }
    }
}
