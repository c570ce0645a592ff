//! The index against a recount: whatever came in whichever order, what is left, where pods are and whom they keep off
//! is what a look at the whole cluster says.

use std::collections::BTreeMap;
use std::time::Instant;

use gantry_gang::Levels;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::fixtures::{GPU, watched};
use crate::index::{Index, MembershipState, SlimNode, Source, described};
use crate::pod::{ParsedPod, Reader, TextInterner};
use gantry_planner::decide::Options;

const NODES: [&str; 4] = ["n0", "n1", "n2", "n3"];
const APPS: [&str; 2] = ["a", "b"];
const SPACES: [&str; 2] = ["ml", "web"];

/// A node as the API server has it.
#[derive(Debug, Clone)]
struct Node {
    zone: Option<&'static str>,
    cpu: u8,
    tainted: bool,
}

/// A pod as the API server has it.
#[derive(Debug, Clone)]
struct Pod {
    space: usize,
    app: usize,
    node: Option<usize>,
    ended: bool,
    cpu: u8,
    gpus: bool,
    apart: Option<Term>,
    together: Option<Term>,
    port: Option<u16>,
    /// To be spread over zones among the pods of this app.
    spread: Option<usize>,
}

/// A term about pods of one app.
#[derive(Debug, Clone, Copy)]
struct Term {
    app: usize,
    key: &'static str,
    everywhere: bool,
}

#[derive(Debug, Clone)]
enum Step {
    Node(usize, Option<Node>),
    Pod(usize, Option<Pod>),
    Relist,
    Take(usize, u8),
    Give,
}

fn term() -> impl Strategy<Value = Term> {
    let key = prop::sample::select(vec!["zone", "kubernetes.io/hostname"]);
    (0..APPS.len(), key, any::<bool>()).prop_map(|(app, key, everywhere)| Term { app, key, everywhere })
}

prop_compose! {
    fn pod()(
        (space, app, node, ended) in (0..SPACES.len(), 0..APPS.len(), prop::option::weighted(0.8, 0..NODES.len()), prop::bool::weighted(0.1)),
        (cpu, gpus) in (0..9u8, prop::bool::weighted(0.3)),
        apart in prop::option::weighted(0.3, term()),
        together in prop::option::weighted(0.3, term()),
        port in prop::option::weighted(0.3, 80..82u16),
        spread in prop::option::weighted(0.3, 0..APPS.len()),
    ) -> Pod {
        Pod { space, app, node, ended, cpu, gpus, apart, together, port, spread }
    }
}

prop_compose! {
    fn node()(zone in prop::option::of(prop::sample::select(vec!["x", "y"])), cpu in 0..99u8, tainted in any::<bool>()) -> Node {
        Node { zone, cpu, tainted }
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..NODES.len(), prop::option::weighted(0.8, node())).prop_map(|(name, node)| Step::Node(name, node)),
        8 => (0..8usize, prop::option::weighted(0.8, pod())).prop_map(|(name, pod)| Step::Pod(name, pod)),
        1 => Just(Step::Relist),
        1 => (0..NODES.len(), 1..9u8).prop_map(|(node, cpu)| Step::Take(node, cpu)),
        1 => Just(Step::Give),
    ]
}

impl Term {
    fn json(self) -> Value {
        let mut term =
            json!({"topologyKey": self.key, "labelSelector": {"matchLabels": {"app": APPS[self.app]}}});
        if self.everywhere {
            term["namespaceSelector"] = json!({});
        }
        term
    }

    fn finds(self, of: usize, pod: &Pod) -> bool {
        (self.everywhere || of == pod.space) && self.app == pod.app
    }
}

impl Pod {
    fn json(&self, uid: &str) -> Value {
        let mut requests = json!({"cpu": self.cpu.to_string()});
        if self.gpus {
            requests[GPU] = "1".into();
        }
        let spread = self.spread.iter().map(|app| {
            json!({
                "topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"app": APPS[*app]}},
            })
        });
        let spread: Vec<Value> = spread.collect();
        let terms = |term: &Option<Term>| json!({"requiredDuringSchedulingIgnoredDuringExecution": term.iter().map(|term| term.json()).collect::<Vec<_>>()});
        json!({
            "metadata": {"name": uid, "namespace": SPACES[self.space], "uid": uid, "labels": {"app": APPS[self.app], "index": uid}},
            "spec": {
                "nodeName": self.node.map(|node| NODES[node]),
                "containers": [{
                    "name": "c",
                    "resources": {"requests": requests},
                    "ports": self.port.iter().map(|port| json!({"hostPort": port})).collect::<Vec<_>>(),
                }],
                "affinity": {"podAntiAffinity": terms(&self.apart), "podAffinity": terms(&self.together)},
                "topologySpreadConstraints": spread,
            },
            "status": {"phase": if self.ended { "Succeeded" } else { "Running" }},
        })
    }
}

impl Node {
    fn facts(&self, name: &str) -> NodeFacts {
        let mut labels = json!({"kubernetes.io/hostname": name});
        if let Some(zone) = self.zone {
            labels["zone"] = zone.into();
        }
        let taints = if self.tainted { json!([{"key": "t", "effect": "NoSchedule"}]) } else { json!([]) };
        let node: SlimNode = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": labels},
            "spec": {"taints": taints},
            "status": {"allocatable": {"cpu": self.cpu.to_string(), "pods": "110", GPU: "8"}},
        }))
        .unwrap();
        described(&watched(), &node, &mut TextInterner::default())
    }

    fn domain(&self, name: usize, key: &str) -> Option<&'static str> {
        if key == "zone" { self.zone } else { Some(NODES[name]) }
    }
}

struct World {
    index: Index,
    reader: Reader,
    nodes: BTreeMap<usize, Node>,
    pods: BTreeMap<usize, Pod>,
    places: Vec<(usize, Needs)>,
    /// Every other pod is taken to be gone.
    thinned: bool,
}

fn uid(number: usize) -> String {
    format!("p{number}")
}

impl World {
    fn new() -> Self {
        let mut index = Index::new(Options::default(), &watched(), "run".into());
        index.set_fabric(Levels::parse("zone=zone").unwrap());
        Self {
            index,
            reader: Reader::new(watched()),
            nodes: BTreeMap::new(),
            pods: BTreeMap::new(),
            places: Vec::new(),
            thinned: false,
        }
    }

    fn show(&mut self, number: usize, gone: bool) {
        let Some(pod) = self.pods.get(&number) else {
            return;
        };
        let read = serde_json::from_value(pod.json(&uid(number))).unwrap();
        match (self.reader.read(read).unwrap(), gone) {
            (ParsedPod::Facts(pod), false) => self.index.pod_applied(*pod),
            (ParsedPod::Facts(pod), true) => {
                let uid = pod.uid.clone();
                self.index.pod_deleted(Instant::now(), &uid, Some(*pod));
            }
            (ParsedPod::OtherPod(pod), false) => self.index.other_pod_applied(*pod),
            (ParsedPod::OtherPod(pod), true) => self.index.other_pod_gone(&pod.uid),
        }
    }

    fn play(&mut self, step: Step) {
        match step {
            Step::Node(number, node) => {
                let name = NODES[number];
                match &node {
                    Some(node) => {
                        self.index.node_applied(&name.into(), vec![(GPU.into(), 8)]);
                        self.index.node_described(Arc::new(node.facts(name)));
                    }
                    None => self.index.node_deleted(name),
                }
                match node {
                    Some(node) => self.nodes.insert(number, node),
                    None => self.nodes.remove(&number),
                };
            }
            Step::Pod(number, Some(mut pod)) => {
                // What a pod asks for and its namespace never change, nor does its node once it has one.
                if let Some(known) = self.pods.get(&number) {
                    pod.gpus = known.gpus;
                    pod.space = known.space;
                    pod.node = known.node.or(pod.node);
                    pod.ended |= known.ended;
                }
                self.pods.insert(number, pod);
                self.show(number, false);
            }
            Step::Pod(number, None) => {
                self.show(number, true);
                self.pods.remove(&number);
            }
            Step::Relist => {
                // Every other pod is gone without a word.
                self.pods.retain(|number, _| number % 2 == 0);
                self.index.list_begins(Instant::now(), Source::Pods);
                let known: Vec<usize> = self.pods.keys().copied().collect();
                known.into_iter().for_each(|number| self.show(number, false));
                self.index.list_ends(Instant::now(), Source::Pods);
            }
            Step::Take(number, cpu) => {
                let mut needs = Needs::default();
                needs.resources.add_written("cpu", &cpu.to_string());
                let node = self.index.facts.nodes.number(&NODES[number].into());
                self.index.facts.resources.reserve(node, &needs);
                self.places.push((number, needs));
            }
            Step::Give => {
                if let Some((number, needs)) = self.places.pop() {
                    let node = self.index.facts.nodes.number(&NODES[number].into());
                    self.index.facts.resources.release(node, &needs);
                }
            }
        }
    }

    /// Live pods on nodes.
    fn there(&self) -> impl Iterator<Item = (usize, &Pod)> {
        let left = self.pods.iter().filter(|(number, _)| !self.thinned || *number % 2 == 1);
        let live = left.map(|(_, pod)| pod).filter(|pod| !pod.ended);
        live.filter_map(|pod| Some((pod.node?, pod)))
    }

    fn cpu_left(&self, number: usize) -> i64 {
        let all = self.nodes.get(&number).map_or(0, |node| i64::from(node.cpu));
        let pods = self.there().filter(|(node, _)| *node == number);
        let asked: i64 = pods.map(|(_, pod)| i64::from(pod.cpu)).sum();
        let kept = self.places.iter().filter(|(node, _)| *node == number);
        all * 1000 - asked * 1000 - kept.map(|(_, needs)| needs.resources.milli_cpu).sum::<i64>()
    }

    fn share(&self, one: usize, other: usize, key: &str) -> bool {
        let domain = |number: usize| self.nodes.get(&number)?.domain(number, key);
        domain(one).is_some() && domain(one) == domain(other)
    }

    /// Whether the pods that are there keep a new one from a node, asked one by one.
    fn is_barred(&self, new: &Pod, number: usize) -> bool {
        self.there().any(|(node, pod)| {
            let unwanted = |of: &Pod, other: &Pod| {
                of.apart.is_some_and(|term| term.finds(of.space, other) && self.share(node, number, term.key))
            };
            unwanted(pod, new)
                || unwanted(new, pod)
                || (node == number && new.port.is_some() && new.port == pod.port)
        })
    }

    /// Whether any of those is near that a new one must be with, if it must be with any.
    fn is_near(&self, new: &Pod, number: usize) -> Option<bool> {
        let term = new.together?;
        let mut friends = self.there().filter(|(_, pod)| term.finds(new.space, pod));
        Some(friends.any(|(node, _)| self.share(node, number, term.key)))
    }

    /// How many of the pods among which a new one is spread are on a node.
    fn counted(&self, new: &Pod, number: usize) -> Option<u32> {
        let app = new.spread?;
        let there = self.there().filter(|(node, _)| *node == number);
        let counted = there.filter(|(_, pod)| pod.app == app && pod.space == new.space);
        u32::try_from(counted.count()).ok()
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        self.index.publish();
        let numbers: Vec<(usize, NodeIx)> = NODES
            .iter()
            .enumerate()
            .filter_map(|(number, name)| Some((number, self.index.facts.nodes.find(name)?)))
            .collect();
        for (number, node) in &numbers {
            let room = &self.index.facts.resources.nodes()[node.0 as usize];
            prop_assert_eq!(room.left.milli_cpu, self.cpu_left(*number), "{}", NODES[*number]);
            let expected = self.nodes.get(number).map(|node| node.facts(NODES[*number]));
            prop_assert_eq!(room.facts.as_deref(), expected.as_ref());
        }
        let built = Fabric::build(
            Levels::parse("zone=zone").unwrap(),
            self.index.facts.resources.nodes().iter().map(|room| room.facts.as_deref()),
        );
        prop_assert_eq!(self.index.fabric(), &built);
        for thinned in [false, true] {
            self.thinned = thinned;
            self.check_barred(&numbers)?;
        }
        self.thinned = false;
        Ok(())
    }

    fn check_barred(&self, numbers: &[(usize, NodeIx)]) -> Result<(), TestCaseError> {
        let gone = self.pods.keys().filter(|number| self.thinned && *number % 2 == 0);
        let gone: Vec<PodUid> = gone.map(|number| uid(*number).as_str().into()).collect();
        let gone: Vec<&PodUid> = gone.iter().collect();
        for (number, new) in self.pods.iter().filter(|(_, pod)| pod.gpus && pod.node.is_none() && !pod.ended)
        {
            let needs = Arc::clone(&self.index.pod(&uid(*number)).unwrap().needs);
            let barred = self.index.facts.resources.barred(&needs, &gone);
            for (number, node) in numbers.iter().filter(|(number, _)| self.nodes.contains_key(number)) {
                let closed = barred.nodes.contains(node);
                prop_assert_eq!(closed, self.is_barred(new, *number), "{:?} on {}", new, NODES[*number]);
                let counted = barred.counted.first();
                let counted = counted.map(|counted| counted.get(node).copied().unwrap_or(0));
                prop_assert_eq!(counted, self.counted(new, *number));
                let near = barred.near.first().map(|near| near.contains(node));
                prop_assert_eq!(near, self.is_near(new, *number), "{:?} near {}", new, NODES[*number]);
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn what_is_kept_event_by_event_is_what_a_recount_says(steps in prop::collection::vec(step(), 1..40)) {
        let mut world = World::new();
        for step in steps {
            world.play(step);
            world.check()?;
        }
    }
}

fn world_of(pods: &[Pod]) -> World {
    let mut world = World::new();
    for number in 0..2 {
        let node = Node { zone: Some("x"), cpu: 8, tainted: false };
        world.play(Step::Node(number, Some(node)));
    }
    for (number, pod) in pods.iter().enumerate() {
        world.play(Step::Pod(number, Some(pod.clone())));
    }
    world.index.publish();
    world
}

const PLAIN: Pod = Pod {
    space: 0,
    app: 0,
    node: None,
    ended: false,
    cpu: 1,
    gpus: true,
    apart: None,
    together: None,
    port: None,
    spread: None,
};

/// A pod on the first node that wants none of another app in its zone.
fn shy() -> Pod {
    Pod { apart: Some(Term { app: 1, key: "zone", everywhere: true }), gpus: false, node: Some(0), ..PLAIN }
}

#[test]
fn index_label_of_members_does_not_change_their_needs() {
    let shy = shy();
    let world = world_of(&[PLAIN, PLAIN, shy]);
    let needs = |uid: &str| Arc::clone(&world.index.pod(uid).unwrap().needs);
    assert!(Arc::ptr_eq(&needs("p0"), &needs("p1")));
    // The label that the term is about is among them, though the term came later; the one they are numbered by is not.
    assert_eq!(*needs("p0").labels, BTreeMap::from([("app".into(), "a".into())]));
}

#[test]
fn pod_missing_from_list_is_gone_despite_changed_needs() {
    let mut world = world_of(&[PLAIN]);
    let now = Instant::now();
    world.index.list_begins(now, Source::Pods);
    // It has a label that no term was about before.
    let mut other = shy().json("x");
    other["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
        json!([{"topologyKey": "zone", "labelSelector": {"matchLabels": {"index": "1"}}}]);
    match world.reader.read(serde_json::from_value(other).unwrap()).unwrap() {
        ParsedPod::OtherPod(pod) => world.index.other_pod_applied(*pod),
        ParsedPod::Facts(_) => panic!("it asks for nothing that is watched"),
    }
    world.index.publish();
    assert_eq!(world.index.pod("p0").unwrap().needs.labels.len(), 1);
    world.index.list_ends(now, Source::Pods);
    assert!(world.index.pod("p0").is_none());
}

#[test]
fn labels_that_no_term_is_about_any_more_are_forgotten() {
    let shy = shy();
    let mut world = world_of(&[PLAIN, shy.clone()]);
    let show = |world: &mut World, uid: &str, label: &str, gone: bool| {
        let mut pod = shy.json(uid);
        pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
            json!([{"topologyKey": "zone", "labelSelector": {"matchLabels": {label: "1"}}}]);
        match world.reader.read(serde_json::from_value(pod).unwrap()).unwrap() {
            ParsedPod::OtherPod(pod) if gone => world.index.other_pod_gone(&pod.uid),
            ParsedPod::OtherPod(pod) => world.index.other_pod_applied(*pod),
            ParsedPod::Facts(_) => panic!("it asks for nothing that is watched"),
        }
        world.index.publish();
    };
    let labels = |world: &World| -> Vec<String> {
        let needs = &world.index.pod("p0").unwrap().needs;
        needs.labels.keys().map(ToString::to_string).collect()
    };
    show(&mut world, "x", "index", false);
    assert_eq!(labels(&world), ["app", "index"]);
    show(&mut world, "x", "index", true);
    for number in 0..500 {
        for gone in [false, true] {
            show(&mut world, &format!("run-{number}"), &format!("run-{number}"), gone);
            assert!(
                world.index.facts.resources.term_labels.len() <= crate::index::term_labels::MIN_LABELS + 1
            );
        }
    }
    assert_eq!(labels(&world), ["app"]);
    // It is about one again.
    show(&mut world, "x", "index", false);
    assert_eq!(labels(&world), ["app", "index"]);
}

#[test]
fn more_fits_when_a_pod_ends_on_a_node_with_devices() {
    let mut world = world_of(&[Pod { gpus: false, node: Some(0), ..PLAIN }]);
    let machine = crate::fixtures::gpu_node("n0", &crate::fixtures::bridged());
    let inventory = crate::index::inventory(
        &watched(),
        serde_json::from_value(machine).unwrap(),
        &mut Default::default(),
    );
    world.index.inventory_applied(&"n0".into(), inventory.unwrap());
    world.index.facts.take_resources_gained();
    world.play(Step::Pod(0, Some(Pod { gpus: false, node: Some(0), ..PLAIN })));
    assert!(!world.index.facts.take_resources_gained(), "nothing has changed");
    world.play(Step::Pod(0, Some(Pod { gpus: false, node: Some(0), ended: true, ..PLAIN })));
    assert!(world.index.facts.take_resources_gained());
    assert!(!world.index.facts.take_resources_gained(), "it is told once");
    world.play(Step::Pod(1, Some(Pod { gpus: false, node: Some(1), ..PLAIN })));
    world.play(Step::Pod(1, None));
    assert!(!world.index.facts.take_resources_gained(), "that node has no devices");
}

#[test]
fn overflowing_requests_leave_node_resources_intact() {
    let mut world = world_of(&[]);
    let mut greedy = Pod { gpus: false, node: Some(0), ..PLAIN }.json("greedy");
    greedy["spec"]["containers"] = json!(vec![greedy["spec"]["containers"][0].clone(); 3]);
    for container in greedy["spec"]["containers"].as_array_mut().unwrap() {
        container["resources"]["requests"] =
            json!({"cpu": "9E", "memory": "9E", "ephemeral-storage": "9E", "example.com/nic": "9E"});
    }
    let mut read = |uid: &str| {
        greedy["metadata"]["uid"] = uid.into();
        match world.reader.read(serde_json::from_value(greedy.clone()).unwrap()) {
            Some(ParsedPod::OtherPod(pod)) => *pod,
            other => panic!("{other:?}"),
        }
    };
    let pods: Vec<OtherPod> = (0..1000).map(|number| read(&format!("greedy{number}"))).collect();
    let left = |world: &World| {
        let node = world.index.facts.nodes.find("n0").unwrap();
        world.index.facts.resources.nodes()[node.0 as usize].left.clone()
    };
    let before = left(&world);
    for pod in pods.clone() {
        world.index.other_pod_applied(pod);
        assert!(left(&world).memory < 0 && left(&world).milli_cpu < 0);
    }
    for pod in &pods {
        world.index.other_pod_gone(&pod.uid);
    }
    assert_eq!(left(&world), before);
}

#[test]
fn pods_of_one_controller_are_of_one_kind() {
    let mut world = World::new();
    let node = Node { zone: None, cpu: 8, tainted: false };
    world.play(Step::Node(0, Some(node)));
    for number in 0..1000 {
        let mut pod = Pod { gpus: false, node: Some(0), ..PLAIN }.json(&uid(number));
        pod["metadata"]["labels"] = json!({"app": "web"});
        match world.reader.read(serde_json::from_value(pod).unwrap()) {
            Some(ParsedPod::OtherPod(pod)) => world.index.other_pod_applied(*pod),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(world.index.facts.resources.pods.len(), 1000);
    assert_eq!(world.index.facts.resources.affinity.profiles(), 1);
    assert!(world.index.facts.resources.members().is_empty());
}

#[test]
fn member_without_devices_stays_until_it_is_deleted() {
    let mut world = world_of(&[]);
    let mut launcher = Pod { gpus: false, ended: true, ..PLAIN }.json("l");
    launcher["metadata"]["annotations"] = json!({"gantry.dev/gang": "train", "gantry.dev/gang-min": "4"});
    match world.reader.read(serde_json::from_value(launcher).unwrap()) {
        Some(ParsedPod::OtherPod(pod)) => world.index.other_pod_applied(*pod),
        other => panic!("{other:?}"),
    }
    // It has ended, and is on no node: it counts all the same.
    assert_eq!(world.index.belongs("l"), MembershipState::Gang);
    assert_eq!(world.index.facts.resources.members().len(), 1);
    world.index.other_pod_gone(&"l".into());
    assert_ne!(world.index.belongs("l"), MembershipState::Gang);
    assert!(world.index.facts.resources.members().is_empty());
}

#[test]
fn numbers_that_are_given_up_take_nothing_along() {
    let stays = Pod {
        gpus: false,
        node: Some(1),
        apart: Some(Term { app: 0, key: "kubernetes.io/hostname", everywhere: true }),
        ..PLAIN
    };
    let mut world = World::new();
    let plain = Node { zone: Some("x"), cpu: 8, tainted: false };
    let passing: Vec<String> = (0..300).map(|number| format!("passing{number}")).collect();
    for name in &passing {
        world.index.node_applied(&name.as_str().into(), Vec::new());
        world.index.node_described(Arc::new(plain.facts(name)));
    }
    world.play(Step::Node(1, Some(plain.clone())));
    world.play(Step::Pod(0, Some(stays)));
    world.play(Step::Pod(1, Some(PLAIN)));
    // The node goes before its pods do.
    world.play(Step::Node(1, None));
    for name in &passing {
        world.index.node_deleted(name);
    }
    let before = world.index.facts.nodes.find("n1");
    world.index.publish();
    assert_ne!(world.index.facts.nodes.find("n1"), before, "it has another number now");
    world.check().unwrap();
    world.play(Step::Node(1, Some(plain)));
    world.check().unwrap();
    let needs = Arc::clone(&world.index.pod("p1").unwrap().needs);
    assert_eq!(
        world.index.facts.resources.barred(&needs, &[]).nodes,
        [world.index.facts.nodes.find("n1").unwrap()]
    );
}

#[test]
fn the_fabric_is_built_when_the_list_of_nodes_is_complete() {
    let mut world = World::new();
    let now = Instant::now();
    world.index.list_begins(now, Source::Nodes);
    let node = Node { zone: Some("x"), cpu: 8, tainted: false };
    world.play(Step::Node(0, Some(node)));
    world.index.publish();
    assert_eq!(world.index.fabric().domains.len(), 1);
    assert_eq!(world.index.fabric().of_node.len(), world.index.facts.resources.nodes().len());
    world.index.list_ends(now, Source::Nodes);
    world.index.publish();
    assert_eq!(world.index.fabric().domains.len(), 2);
}
