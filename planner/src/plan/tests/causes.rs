//! What members need besides devices, where it decides.

use std::sync::Arc;

use gantry_gang::NodeFacts;
use gantry_gang::needs::NodeTerm;

use super::*;

const GIB: i64 = 1 << 30;

/// An amount that a member asks for, of which a node has enough for one and not for two; the words for its lack.
struct Amount {
    asked: Resources,
    lack: &'static str,
}

fn amounts() -> Vec<Amount> {
    let one = || Resources { pods: 1, ..Resources::default() };
    vec![
        Amount { asked: Resources { milli_cpu: 40_000, ..one() }, lack: "Insufficient cpu" },
        Amount { asked: Resources { memory: 300 * GIB, ..one() }, lack: "Insufficient memory" },
        Amount { asked: Resources { ephemeral: 60 * GIB, ..one() }, lack: "Insufficient ephemeral-storage" },
        Amount { asked: Resources { pods: 60, ..Resources::default() }, lack: "Too many pods" },
        Amount {
            asked: Resources { others: [(Arc::from("example.com/rdma"), 3)].into(), ..one() },
            lack: "Insufficient example.com/rdma",
        },
    ]
}

/// Twelve nodes, each with five adapters.
fn with_adapters() -> World {
    let mut world = twelve();
    for node in 'a'..='l' {
        world.room(&node.to_string(), |facts, left| {
            let mut facts_too = facts.allocatable.clone();
            facts_too.others.insert("example.com/rdma".into(), 5);
            *left = facts_too.clone();
            facts.allocatable = facts_too;
        });
    }
    world
}

fn needing(world: &mut World, gpus: u32, asked: &Resources) -> ShapeId {
    let needs = Needs { resources: asked.clone(), ..Needs::default() };
    world.shape_of(gpus, needs)
}

/// Leaves a node nothing but room for pods that ask for nothing.
fn exhaust(world: &mut World, node: char, asked: &Resources) {
    world.room(&node.to_string(), |_, left| {
        left.milli_cpu -= if asked.milli_cpu > 0 { 64_000 } else { 0 };
        left.memory -= if asked.memory > 0 { 512 * GIB } else { 0 };
        left.ephemeral -= if asked.ephemeral > 0 { 100 * GIB } else { 0 };
        left.pods -= if asked.pods > 1 { 110 } else { 0 };
        if !asked.others.is_empty() {
            left.others.clear();
        }
    });
}

#[test]
fn node_takes_as_many_members_as_every_resource_allows() {
    for Amount { asked, lack } in amounts() {
        let mut world = with_adapters();
        let four = needing(&mut world, 4, &asked);
        let line = world.line(&gang(&[(2, four)]));
        assert_eq!(line, "rack r1: a[0,1,2,3] b[0,1,2,3]", "{lack}");
    }
}

#[test]
fn a_gang_goes_where_there_is_enough_of_each_amount() {
    for Amount { asked, lack } in amounts() {
        let mut world = with_adapters();
        let four = needing(&mut world, 4, &asked);
        for node in "abcdefgjkl".chars() {
            exhaust(&mut world, node, &asked);
        }
        let line = world.line(&gang(&[(2, four)]));
        assert_eq!(line, "rack r3: h[0,1,2,3] i[0,1,2,3]", "{lack}");
    }
}

#[test]
fn a_gang_that_one_amount_keeps_out_waits_and_is_told_of_it() {
    for Amount { asked, lack } in amounts() {
        let mut world = with_adapters();
        let four = needing(&mut world, 4, &asked);
        for node in "abcdefghijk".chars() {
            exhaust(&mut world, node, &asked);
        }
        let wanted = gang(&[(2, four)]);
        let refused = world.plan(&wanted).unwrap_err();
        assert!(!refused.is_hopeless(), "{lack}: on an empty cluster it fits");
        let levels = world.explain(&wanted).levels;
        let reasons: Vec<&str> =
            levels.iter().flat_map(|level| &level.reasons).map(|(reason, _)| reason.as_str()).collect();
        assert!(reasons.contains(&lack), "{lack}: {reasons:?}");
    }
}

fn requires(key: &str, operator: Operator, values: &[&str]) -> Requirement {
    Requirement { key: key.into(), operator, values: values.iter().map(|value| Arc::from(*value)).collect() }
}

fn term(labels: Vec<Requirement>) -> NodeTerm {
    NodeTerm { labels, names: Vec::new() }
}

#[test]
fn node_selectors_and_required_affinity_decide() {
    let label = |facts: &mut NodeFacts, key: &str, value: &str| {
        facts.labels.insert(key.into(), value.into());
    };
    let affinity = |affinity: Vec<NodeTerm>| Needs { affinity, ..Needs::default() };
    let selector = Needs { selector: [("disk".into(), "nvme".into())].into(), ..Needs::default() };
    let named = NodeTerm { labels: Vec::new(), names: vec![requires("metadata.name", Operator::In, &["h"])] };
    let generation = |operator, value: &str| term(vec![requires("generation", operator, &[value])]);
    let cases = [
        ("selector", selector),
        ("In", affinity(vec![term(vec![requires("disk", Operator::In, &["hdd", "nvme"])])])),
        ("Exists", affinity(vec![term(vec![requires("disk", Operator::Exists, &[])])])),
        ("Gt", affinity(vec![generation(Operator::Gt, "8")])),
        // Each node that one of them holds for, and no other.
        ("either", affinity(vec![named, term(vec![requires("only", Operator::Exists, &[])])])),
        (
            "both",
            affinity(vec![term(vec![
                requires("disk", Operator::Exists, &[]),
                requires("old", Operator::DoesNotExist, &[]),
            ])]),
        ),
    ];
    for (name, mut needs) in cases {
        let mut world = twelve();
        for node in 'a'..='l' {
            world.room(&node.to_string(), |facts, _| label(facts, "generation", "8"));
        }
        for node in ["h", "i"] {
            world.room(node, |facts, _| {
                label(facts, "disk", "nvme");
                label(facts, "generation", "9");
            });
        }
        world.room("i", |facts, _| label(facts, "only", ""));
        if name == "both" {
            world.room("a", |facts, _| {
                label(facts, "disk", "nvme");
                label(facts, "old", "");
            });
        }
        needs.resources.pods = 1;
        let eight = world.shape_of(8, needs);
        let line = world.line(&gang(&[(2, eight)]));
        assert_eq!(line, format!("rack r3: h[{ALL}] i[{ALL}]"), "{name}");
        let refused = world.plan(&gang(&[(3, eight)])).unwrap_err();
        assert!(refused.is_hopeless(), "{name}: there is no third such node");
    }
}

/// What keeps so many members off that need this besides one GPU each: whether also on an empty cluster, the nodes that
/// have the GPUs, and the obstacles.
fn obstacles(world: &mut World, members: u32, needs: Needs) -> (bool, Option<usize>, Vec<(Obstacle, usize)>) {
    let one = world.shape_of(1, needs);
    let shortage = world.shortage(&gang(&[(members, one)]));
    let (nodes, found) = shortage.obstacles.map(|all| (all.nodes, all.found)).unwrap_or_default();
    (shortage.hopeless, nodes, found)
}

#[test]
fn obstacles_other_than_devices_are_named() {
    let cpus = |milli_cpu: i64| Needs {
        resources: Resources { milli_cpu, pods: 1, ..Resources::default() },
        ..Needs::default()
    };
    let cpu = || Obstacle::Resource(gantry_gang::InsufficientResource::Cpu);
    // One member each, where eight GPUs are.
    let found = obstacles(&mut twelve(), 13, cpus(40_000));
    assert_eq!(found, (true, Some(12), vec![(cpu(), 12)]));
    let selects = Needs { selector: [("disk".into(), "nvme".into())].into(), ..Needs::default() };
    let found = obstacles(&mut twelve(), 2, selects.clone());
    assert_eq!(found, (true, Some(12), vec![(Obstacle::NodeAffinity, 12)]));
    let mut some = twelve();
    for node in ["a", "b", "c"] {
        some.room(node, |facts, _| {
            facts.labels.insert("disk".into(), "nvme".into());
        });
    }
    let both = Needs { resources: cpus(64_000).resources, ..selects };
    let found = obstacles(&mut some, 4, both);
    assert_eq!(found, (true, Some(12), vec![(Obstacle::NodeAffinity, 9), (cpu(), 3)]));
    // It would if others were not there: what they take is counted nowhere, for it changes all the time.
    let mut full = twelve();
    for node in 'a'..='l' {
        full.room(&node.to_string(), |_, left| left.milli_cpu = 1_000);
    }
    assert_eq!(obstacles(&mut full, 2, cpus(8_000)), (false, None, vec![(cpu(), 0)]));
}

#[test]
fn where_devices_decide_nothing_else_is_named() {
    let needs = Needs {
        resources: Resources { milli_cpu: 40_000, pods: 1, ..Resources::default() },
        ..Needs::default()
    };
    assert_eq!(obstacles(&mut twelve(), 97, needs), (true, None, Vec::new()));
}
