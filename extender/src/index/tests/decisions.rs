//! Filter and prioritize over the snapshots that the index publishes.

mod parts;

use proptest::prelude::*;
use serde_json::json;

use crate::fixtures::{
    Cluster, bound, bridged, gpu_node, holder, kind, plain, pod, quarantined, request, set, switched,
};
use crate::wire::{CandidateNodes, NodeObject, Text};
use gantry_planner::decide::*;
use gantry_planner::request::Request;

fn named<'a>(names: &[&'a str]) -> CandidateNodes<'a> {
    CandidateNodes::Names(names.iter().map(|name| Text::from(*name)).collect())
}

/// Filter by name: who passes, and why the others do not.
fn filtered(
    cluster: &Cluster,
    options: Options,
    request: &Request,
    names: &[&str],
) -> (Vec<String>, Vec<String>) {
    let snapshot = cluster.store.snapshot();
    let candidates = named(names);
    let nodes = locate(&snapshot, &candidates);
    let answer = filter(&snapshot, options, request, &candidates, &nodes);
    let passed = answer.passed.iter().map(|&position| names[position as usize].to_owned()).collect();
    let refused = answer.refused.iter().map(|&(position, reason)| {
        format!("{}: {}", names[position as usize], answer.reasons[reason as usize])
    });
    (passed, refused.collect())
}

fn winner(
    cluster: &Cluster,
    options: Options,
    uid: &str,
    request: &Request,
    names: &[&str],
) -> Option<String> {
    let snapshot = cluster.store.snapshot();
    let candidates = named(names);
    let nodes = locate(&snapshot, &candidates);
    let winner = prioritize(&snapshot, options, uid, request, &candidates, &nodes)?;
    Some(names[winner.position as usize].to_owned())
}

fn best(cluster: &Cluster, devices: u32, names: &[&str]) -> Option<String> {
    winner(cluster, Options::default(), "new", &request(devices), names)
}

#[test]
fn node_without_a_ready_plugin_is_refused_with_its_reason() {
    let cluster = cluster(&[("n", &bridged(), "0-7")]);
    let mut node = gpu_node("n", &bridged());
    node["status"]["conditions"] = json!([{
        "type": "Ready", "status": "False", "reason": "NotRegistered", "message": "no answer since 12:00:03",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]);
    cluster.inventory(&node);
    let (_, refused) = filtered(&cluster, Options::default(), &request(2), &["n"]);
    assert_eq!(refused, ["n: node(s) whose GPU plugin is not ready: NotRegistered"]);
    // One that has nothing to serve any more is no node without GPUs.
    node["status"]["devices"] = json!([]);
    cluster.inventory(&node);
    let (_, refused) = filtered(&cluster, Options::default(), &request(2), &["n"]);
    assert_eq!(refused, ["n: node(s) whose GPU plugin is not ready: NotRegistered"]);
}

/// The GPU operator upgrades the driver, for instance.
#[test]
fn marked_node_is_refused_until_mark_ends() {
    let cluster = cluster(&[("n", &bridged(), "0-7")]);
    let marked = |mark: Option<&str>| {
        cluster.store.update(|index| index.node_marked(&"n".into(), mark.map(Into::into)));
        filtered(&cluster, Options::default(), &request(2), &["n"])
    };
    let (passed, refused) = marked(Some("the driver is upgraded"));
    assert!(passed.is_empty());
    assert_eq!(refused, ["n: node(s) whose GPUs are withheld: the driver is upgraded"]);
    assert_eq!(cluster.store.read(|index| index.totals().1.marked), 1);
    let (passed, refused) = marked(None);
    assert_eq!((passed, refused), (vec!["n".to_owned()], vec![]));
}

/// The annotation counts before the plugin has read it, and for a plugin that is down.
#[test]
fn cordoned_gpu_is_not_chosen() {
    let cluster = cluster(&[("n", &bridged(), "0-1")]);
    let mut node = gpu_node("n", &bridged());
    node["spec"]["machine"]["gpus"][0]["uuid"] = "GPU-aa".into();
    node["metadata"]["annotations"] =
        json!({"gantry.dev/cordon-GPU-aa": "the fan fails", "gantry.dev/cordon-GPU-bb": "elsewhere"});
    cluster.inventory(&node);
    let (_, refused) = filtered(&cluster, Options::default(), &request(2), &["n"]);
    assert_eq!(refused.len(), 1);
    insta::assert_snapshot!(refused[0], @"n: node(s) with 1 of 8 GPUs free, 2 asked, 1 unhealthy (GPU 0: cordoned: the fan fails)");
    let (passed, refused) = filtered(&cluster, Options::default(), &request(1), &["n"]);
    assert_eq!((passed.len(), refused.len()), (1, 0));
    cluster.inventory(&gpu_node("n", &bridged()));
    let (passed, _) = filtered(&cluster, Options::default(), &request(2), &["n"]);
    assert_eq!(passed.len(), 1);
}

/// A cluster whose nodes have some GPUs free.
fn cluster(nodes: &[(&str, &gantry_topology::Machine, &str)]) -> Cluster {
    let cluster = Cluster::new(Options::default());
    for (number, (name, machine, free)) in nodes.iter().enumerate() {
        cluster.add(name, machine);
        let taken = gantry_topology::GpuSet::all(machine) - set(free);
        if !taken.is_empty() {
            let held = pod(&format!("held-{number}"), u32::try_from(taken.len()).unwrap());
            cluster.pod(&bound(held, name, 1, Some(&taken.to_string())));
        }
    }
    cluster
}

#[test]
fn a_refusal_speaks_of_gpus_and_alike_nodes_share_it() {
    let cluster = cluster(&[
        ("a", &bridged(), "0,1,2"),
        ("b", &bridged(), "3,4,5"),
        ("c", &switched(), "0-7"),
        ("d", &bridged(), ""),
    ]);
    let (passed, refused) = filtered(&cluster, Options::default(), &request(4), &["a", "b", "c", "d"]);
    assert_eq!(passed, ["c"]);
    assert_eq!(
        refused,
        [
            "a: node(s) with 3 of 8 GPUs free, 4 asked",
            "b: node(s) with 3 of 8 GPUs free, 4 asked",
            "d: node(s) with 0 of 8 GPUs free, 4 asked",
        ]
    );
}

#[test]
fn sick_gpus_and_those_of_vanished_pods_are_named() {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged());
    let mut node = gpu_node("a", &bridged());
    for (gpu, reason) in [(3, "Xid 79: GPU has fallen off the bus"), (5, "Xid 48")] {
        node["status"]["devices"][gpu]["healthy"] = false.into();
        node["status"]["devices"][gpu]["reason"] = reason.into();
    }
    node["status"]["holders"] = json!([quarantined(holder("a", "old", None, "0,1"))]);
    cluster.inventory(&node);
    let (_, refused) = filtered(&cluster, Options::default(), &request(8), &["a"]);
    assert_eq!(
        refused,
        [
            "a: node(s) with 4 of 8 GPUs free, 8 asked, 2 unhealthy (GPU 3: Xid 79: GPU has fallen off the bus; GPU 5: Xid 48), \
             2 not yet released by deleted pods"
        ]
    );
}

#[test]
fn node_without_inventory_passes_last_or_is_refused() {
    let cluster = cluster(&[("ours", &bridged(), "0")]);
    cluster.node("foreign", 8);
    let both = ["foreign", "ours"];
    assert_eq!(filtered(&cluster, Options::default(), &request(1), &both).0, both);
    assert_eq!(best(&cluster, 1, &both).as_deref(), Some("ours"));
    assert_eq!(best(&cluster, 1, &["foreign"]), None);
    let strict = Options { foreign: ForeignNodes::Refuse, ..Options::default() };
    let (passed, refused) = filtered(&cluster, strict, &request(1), &both);
    assert_eq!(passed, ["ours"]);
    assert_eq!(refused, ["foreign: node(s) without a Gantry plugin"]);
}

#[test]
fn unknown_name_is_refused_and_unknown_object_simulates() {
    let cluster = cluster(&[]);
    let (_, refused) = filtered(&cluster, Options::default(), &request(1), &["new"]);
    assert_eq!(refused, ["new: node(s) not known to Gantry yet"]);

    let snapshot = cluster.store.snapshot();
    for (gpus, passes) in [("8", true), ("3", false)] {
        let raw =
            json!({"metadata": {"name": "template"}, "status": {"allocatable": {"nvidia.com/gpu": gpus}}})
                .to_string();
        let candidates = CandidateNodes::Objects(vec![NodeObject {
            raw: &raw,
            node: serde_json::from_str(&raw).unwrap(),
        }]);
        let nodes = locate(&snapshot, &candidates);
        let answer = filter(&snapshot, Options::default(), &request(4), &candidates, &nodes);
        assert!(answer.simulated);
        assert_eq!(answer.passed.len(), usize::from(passes));
    }
}

#[test]
fn a_bridged_pair_beats_two_gpus_over_pcie() {
    let cluster =
        cluster(&[("a", &plain(8), "0-7"), ("b", &bridged(), "1,2,4,5"), ("c", &bridged(), "1,2,5,6")]);
    assert_eq!(best(&cluster, 2, &["a", "b", "c"]).as_deref(), Some("b"));
}

#[test]
fn a_switched_pair_beats_a_bridged_one() {
    let cluster = cluster(&[("a", &bridged(), "0-7"), ("b", &switched(), "0-7")]);
    assert_eq!(best(&cluster, 2, &["a", "b"]).as_deref(), Some("b"));
}

#[test]
fn a_single_gpu_goes_where_it_breaks_nothing() {
    let cluster = cluster(&[("a", &bridged(), "0-7"), ("b", &bridged(), "0,2,3"), ("c", &switched(), "0-7")]);
    assert_eq!(best(&cluster, 1, &["a", "b", "c"]).as_deref(), Some("b"));
}

#[test]
fn of_equal_nodes_the_first_name_wins_whatever_their_order() {
    let cluster = cluster(&[("b", &bridged(), "0-7"), ("a", &bridged(), "0-7"), ("c", &bridged(), "0-7")]);
    for order in [["a", "b", "c"], ["c", "b", "a"], ["b", "a", "c"]] {
        assert_eq!(best(&cluster, 4, &order).as_deref(), Some("a"));
    }
}

#[test]
fn spread_takes_the_emptier_node_and_pack_the_fuller() {
    let cluster = cluster(&[("a", &plain(8), "0,1"), ("b", &plain(8), "0-7")]);
    let by = |policy| {
        let options = Options { policy, ..Options::default() };
        winner(&cluster, options, "new", &request(1), &["a", "b"])
    };
    assert_eq!(by(Policy::Spread).as_deref(), Some("b"));
    assert_eq!(by(Policy::Pack).as_deref(), Some("a"));
}

#[test]
fn held_gpus_are_avoided_while_others_are_free() {
    let cluster = cluster(&[("a", &bridged(), "0,1"), ("b", &bridged(), "0,1")]);
    let now = cluster.now();
    cluster.store.update(|index| index.hold(now, &"first".into(), &request(2), "a"));
    assert_eq!((cluster.free("a").as_str(), cluster.open("a").as_str()), ("0,1", ""));
    assert_eq!(best(&cluster, 2, &["a", "b"]).as_deref(), Some("b"));
    // The hold is no bar where nothing else is left, and none to its own pod.
    assert_eq!(filtered(&cluster, Options::default(), &request(2), &["a"]).0, ["a"]);
    assert_eq!(best(&cluster, 2, &["a"]).as_deref(), Some("a"));
    let own = winner(&cluster, Options::default(), "first", &request(2), &["b", "a"]);
    assert_eq!(own.as_deref(), Some("a"));
}

/// The key, computed the long way: every node by itself, every set of its free GPUs tried.
fn oracle(
    nodes: &[(String, usize, u32)],
    machines: &[gantry_topology::Machine],
    devices: usize,
    spread: bool,
) -> Option<String> {
    let kinds: Vec<_> = machines.iter().map(kind).collect();
    let mut best: Option<((u64, i64, i64), &str)> = None;
    for (name, machine, free) in nodes {
        let kind = &kinds[*machine];
        let free = gantry_topology::GpuSet::from_bits(*free);
        // Over all sets: the bandwidth alone must be the most any set reaches.
        let Some(most) = free.subsets(devices).map(|set| (kind.bandwidth(set) * 1e3).round() as u64).max()
        else {
            continue;
        };
        let chosen = kind.best(free, devices).unwrap();
        assert_eq!((kind.bandwidth(chosen) * 1e3).round() as u64, most);
        let bandwidth = if devices > 1 { most } else { 0 };
        let lost = (kind.stranded(free, chosen) * 1e9).round() as i64;
        let left = i64::try_from((free - chosen).len()).unwrap();
        let key = if spread { (bandwidth, left, -lost) } else { (bandwidth, -lost, -left) };
        let better = match &best {
            None => true,
            Some((known, by)) => key > *known || (key == *known && name.as_str() < *by),
        };
        if better {
            best = Some((key, name));
        }
    }
    best.map(|(_, name)| name.to_owned())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn the_winner_is_the_best_by_the_whole_key(
        nodes in prop::collection::vec((0usize..3, 0u32..256), 1..12),
        devices in 1u32..7,
        spread in any::<bool>(),
    ) {
        let machines = [bridged(), switched(), plain(8)];
        let policy = if spread { Policy::Spread } else { Policy::Pack };
        let options = Options { policy, ..Options::default() };
        let cluster = Cluster::new(options);
        let mut known = Vec::new();
        for (number, (machine, free)) in nodes.iter().enumerate() {
            // Names that do not come in order.
            let name = format!("n{}", (number * 7) % 13);
            cluster.add(&name, &machines[*machine]);
            let taken = gantry_topology::GpuSet::first(8) - gantry_topology::GpuSet::from_bits(*free);
            if !taken.is_empty() {
                let held = pod(&format!("held-{number}"), u32::try_from(taken.len()).unwrap());
                cluster.pod(&bound(held, &name, 1, Some(&taken.to_string())));
            }
            known.push((name, *machine, *free));
        }
        let names: Vec<&str> = known.iter().map(|(name, _, _)| name.as_str()).collect();
        let (passed, refused) = filtered(&cluster, options, &request(devices), &names);
        for (name, _, free) in &known {
            prop_assert_eq!(passed.contains(name), free.count_ones() >= devices);
        }
        prop_assert_eq!(passed.len() + refused.len(), names.len());
        let found = winner(&cluster, options, "new", &request(devices), &names);
        prop_assert_eq!(found, oracle(&known, &machines, devices as usize, spread));
    }
}
