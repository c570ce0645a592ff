//! Nodes with whole GPUs, MIG devices and replicas played at random against the index: binds with every outcome,
//! kubelet giving other devices than granted, pods ending and vanishing, plugins saying what is true. At every step:
//! was a device granted twice?

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::fixtures::{Cluster, bound, bridged, cut_node, pod_of, publish, target};
use crate::index::{BindGrant, Outcome};
use gantry_planner::decide::Options;

const GPU: &str = "nvidia.com/gpu";
const MIG: &str = "nvidia.com/mig-1g.10gb";
const HALF: &str = "nvidia.com/mig-3g.40gb";
const SHARED: &str = "nvidia.com/gpu.shared";
const RESOURCES: [&str; 4] = [GPU, MIG, HALF, SHARED];
const NODES: [&str; 2] = ["n0", "n1"];

type Ids = BTreeSet<String>;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// A pod is created and bound, or the bind fails.
    Bind { node: usize, resource: usize, devices: u32, fails: bool },
    /// The watch delivers the newest state of a pod.
    Deliver(usize),
    /// A pod ends by itself.
    Finish(usize),
    /// Kubelet gave a pod that is not reported yet other devices than its grant says, of those nobody has.
    Deviate(usize),
    /// The plugin says what is true now.
    Publish(usize),
    /// The pod watch starts over with a list.
    Relist,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..2usize, 0..4usize, 1..4u32, prop::bool::weighted(0.2))
            .prop_map(|(node, resource, devices, fails)| Step::Bind { node, resource, devices, fails }),
        4 => any::<usize>().prop_map(Step::Deliver),
        3 => any::<usize>().prop_map(Step::Finish),
        2 => any::<usize>().prop_map(Step::Deviate),
        2 => (0..2usize).prop_map(Step::Publish),
        1 => Just(Step::Relist),
    ]
}

/// A pod as it really is.
struct Real {
    name: String,
    node: usize,
    resource: &'static str,
    devices: Ids,
    object: Value,
    ended: bool,
    /// Whether its grant or the plugin says what it holds.
    reported: bool,
    /// Whether the plugin does: from then on it keeps what it has.
    published: bool,
}

struct World {
    cluster: Cluster,
    pods: Vec<Real>,
    made: usize,
}

/// Node `n0` has three whole GPUs, two cut in four small slices and a half, three shared by two; `n1` is all shared by
/// three.
fn bare(node: usize) -> Value {
    let name = NODES[node];
    if node == 1 {
        return crate::fixtures::shared_node(name, &bridged(), SHARED, 3);
    }
    let small: Vec<(u8, u8)> = (3..5).flat_map(|gpu| (0..4).map(move |start| (gpu, start))).collect();
    let mut object = cut_node(name, &bridged(), MIG, 1, &small);
    let whole = object["status"]["devices"].as_array_mut().unwrap();
    whole.retain(|device| device["resource"] != GPU || device["gpu"].as_u64().unwrap() < 3);
    let halves = (3..5).map(|gpu| {
        json!({"id": format!("HALF-{gpu}"), "gpu": gpu, "slice": {"profile": "x", "start": 4, "size": 4}})
    });
    object = publish(object, json!({"name": HALF, "kind": "Mig"}), halves.collect());
    let replicas = (5..8).flat_map(|gpu| (0..2).map(move |replica| (gpu, replica)));
    let replicas = replicas
        .map(|(gpu, replica)| json!({"id": format!("G{gpu}::{replica}"), "gpu": gpu, "replica": replica}));
    let terms = json!({"name": SHARED, "kind": "Shared", "replicas": 2, "sharing": "Packed"});
    publish(object, terms, replicas.collect())
}

/// Every device of a resource on a node.
fn all(node: usize, resource: &str) -> Ids {
    let object = bare(node);
    let devices = object["status"]["devices"].as_array().unwrap().iter();
    devices
        .filter(|device| device["resource"] == resource)
        .map(|device| device["id"].as_str().unwrap().to_owned())
        .collect()
}

impl World {
    fn new() -> Self {
        let world = Self { cluster: Cluster::new(Options::default()), pods: Vec::new(), made: 0 };
        for (number, name) in NODES.into_iter().enumerate() {
            world.cluster.node(name, 0);
            world.cluster.inventory(&bare(number));
        }
        world
    }

    fn used(&self, node: usize, resource: &str) -> Ids {
        let alive = self.pods.iter().filter(|pod| !pod.ended && pod.node == node && pod.resource == resource);
        alive.flat_map(|pod| pod.devices.iter().cloned()).collect()
    }

    fn bind(
        &mut self,
        node: usize,
        resource: &'static str,
        devices: u32,
        fails: bool,
    ) -> Result<(), TestCaseError> {
        self.made += 1;
        let name = format!("p{}", self.made);
        let pending = pod_of(&name, resource, devices);
        self.cluster.pod(&pending);
        let target = target(&name, NODES[node]);
        let Ok(reserved) = self.cluster.store.update(|index| index.reserve(&target, None)) else {
            return Ok(());
        };
        let BindGrant::Grant { annotation, .. } = reserved else {
            // Nobody on this node serves it, and nobody else did: then it is not ours.
            prop_assert!(matches!(reserved, BindGrant::Plain));
            return Ok(());
        };
        let grant: gantry_api::Grant = serde_json::from_str(&annotation).unwrap();
        let given: Ids = grant.held(resource).iter().map(ToString::to_string).collect();
        prop_assert_eq!(given.len(), devices as usize);
        prop_assert!(given.is_subset(&all(node, resource)));
        let used = self.used(node, resource);
        // Kubelet may have given a device to somebody else a moment ago, which nobody has said yet.
        let unseen: Ids = self
            .pods
            .iter()
            .filter(|pod| pod.node == node && pod.resource == resource && !pod.reported)
            .flat_map(|pod| pod.devices.iter().cloned())
            .collect();
        let clash: Vec<_> = given.intersection(&used).filter(|id| !unseen.contains(*id)).collect();
        prop_assert!(clash.is_empty(), "{name} is granted {clash:?}, which others have");
        let outcome = if fails { Outcome::Failed } else { Outcome::Bound };
        let now = self.cluster.now();
        self.cluster.store.update(|index| index.finish(now, &target, outcome));
        if !fails {
            let at = u32::try_from(self.made).unwrap();
            let mut object = bound(pending, NODES[node], at, None);
            object["metadata"]["annotations"] = json!({"gantry.dev/grant": &*annotation});
            // What kubelet really gives: the grant, or others that are free where somebody else got them.
            let free: Vec<String> = all(node, resource).difference(&used).cloned().collect();
            let mut really: Ids = given.difference(&used).cloned().collect();
            really.extend(free.into_iter().filter(|id| !given.contains(id)).take(given.len() - really.len()));
            // Kubelet would fail a pod that it has too few devices for.
            prop_assert_eq!(really.len(), given.len());
            let reported = really == given;
            self.pods.push(Real {
                name,
                node,
                resource,
                devices: really,
                object,
                ended: false,
                reported,
                published: false,
            });
        }
        Ok(())
    }

    fn deviate(&mut self, pod: usize) {
        let (node, resource) = (self.pods[pod].node, self.pods[pod].resource);
        let free: Vec<String> = all(node, resource).difference(&self.used(node, resource)).cloned().collect();
        let pod = &mut self.pods[pod];
        if !pod.ended && !pod.published && free.len() >= pod.devices.len() {
            pod.devices = free.into_iter().take(pod.devices.len()).collect();
            pod.reported = false;
        }
    }

    fn publish(&mut self, node: usize) {
        let mut object = bare(node);
        let mut holders = Vec::new();
        for pod in self.pods.iter_mut().filter(|pod| pod.node == node && !pod.ended) {
            pod.reported = true;
            pod.published = true;
            holders.push(json!({
                "namespace": "default", "pod": pod.name, "uid": pod.name, "resource": pod.resource,
                "devices": pod.devices, "provenance": "PodResources",
            }));
        }
        object["status"]["holders"] = holders.into();
        self.cluster.inventory(&object);
    }

    fn relist(&mut self) {
        let pods = &self.pods;
        self.cluster.list(crate::index::Source::Pods, |cluster| {
            for pod in pods {
                cluster.pod(&pod.object);
            }
        });
    }

    fn play(&mut self, step: Step) -> Result<(), TestCaseError> {
        let pods = self.pods.len();
        match step {
            Step::Bind { node, resource, devices, fails } => {
                self.bind(node, RESOURCES[resource], devices, fails)?;
            }
            Step::Publish(node) => self.publish(node),
            Step::Relist => self.relist(),
            _ if pods == 0 => {}
            Step::Deliver(pod) => {
                self.cluster.pod(&self.pods[pod % pods].object);
            }
            Step::Finish(pod) => {
                let pod = &mut self.pods[pod % pods];
                pod.ended = true;
                pod.object["status"]["phase"] = "Succeeded".into();
            }
            Step::Deviate(pod) => self.deviate(pod % pods),
        }
        Ok(())
    }

    /// What every node grants, for comparison.
    fn answers(&self) -> BTreeMap<(&'static str, &'static str), String> {
        let mut answers = BTreeMap::new();
        let snapshot = self.cluster.store.snapshot();
        for name in NODES {
            let gantry_planner::snapshot::NodeState::Ours(class) =
                snapshot.node_state(snapshot.find(name).unwrap())
            else {
                continue;
            };
            for resource in RESOURCES {
                let request = crate::fixtures::request_of(resource, 2);
                answers.insert(
                    (name, resource),
                    format!(
                        "{:?}",
                        gantry_planner::decide::score(
                            class,
                            &request,
                            &[],
                            gantry_planner::decide::Policy::Pack
                        )
                    ),
                );
            }
        }
        answers
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_part_of_a_gpu_is_granted_twice_and_none_is_lost(steps in prop::collection::vec(step(), 1..50)) {
        let mut world = World::new();
        let mut again = World::new();
        for step in steps {
            world.play(step)?;
            again.play(step)?;
        }
        prop_assert_eq!(world.answers(), again.answers());
        // Once everybody has said what there is, all is free but what is used.
        world.relist();
        (0..NODES.len()).for_each(|node| world.publish(node));
        for (number, name) in NODES.into_iter().enumerate() {
            for resource in RESOURCES {
                let there = all(number, resource);
                if !there.is_empty() {
                    let free = there.len() - world.used(number, resource).len();
                    let seen = world.cluster.free_of(name, resource).split(',').filter(|word| !word.is_empty()).count();
                    prop_assert_eq!(seen, free, "{} of {}", resource, name);
                }
            }
        }
    }
}
