use std::sync::Arc;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::devices::DeviceSet;
use crate::fixtures::{
    Cluster, bound, bridged, cut_node, gpu_node, holder, kind, plain, pod, pod_of, quarantined, request,
    request_of, set, shared_node, slices, switched,
};
use crate::kind::{Kind, Sharing, Spot};
use crate::request::Request;
use crate::shape::{Parts, Shape};
use crate::snapshot::{Class, Pool, Remembered};

fn named<'a>(names: &[&'a str]) -> Candidates<'a> {
    Candidates::Names(names.iter().map(|name| Text::from(*name)).collect())
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
    let passed = answer
        .passed
        .iter()
        .map(|&position| names[position as usize].to_owned())
        .collect();
    let refused = answer.refused.iter().map(|&(position, reason)| {
        format!(
            "{}: {}",
            names[position as usize], answer.reasons[reason as usize]
        )
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
fn a_node_whose_plugin_is_not_ready_is_refused_with_the_plugins_reason() {
    let cluster = cluster(&[("n", &bridged(), "0-7")]);
    let mut node = gpu_node("n", &bridged());
    node["status"]["conditions"] = json!([{
        "type": "Ready", "status": "False", "reason": "NotRegistered", "message": "no answer since 12:00:03",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]);
    cluster.inventory(&node);
    let (_, refused) = filtered(&cluster, Options::default(), &request(2), &["n"]);
    assert_eq!(
        refused,
        ["n: node(s) whose GPU plugin is not ready: NotRegistered"]
    );
    // One that has nothing to serve any more is no node without GPUs.
    node["status"]["devices"] = json!([]);
    cluster.inventory(&node);
    let (_, refused) = filtered(&cluster, Options::default(), &request(2), &["n"]);
    assert_eq!(
        refused,
        ["n: node(s) whose GPU plugin is not ready: NotRegistered"]
    );
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
             2 not yet given back by pods that are gone"
        ]
    );
}

#[test]
fn a_foreign_node_passes_behind_ours_or_is_refused_as_the_operator_chose() {
    let cluster = cluster(&[("ours", &bridged(), "0")]);
    cluster.node("foreign", 8);
    let both = ["foreign", "ours"];
    assert_eq!(filtered(&cluster, Options::default(), &request(1), &both).0, both);
    assert_eq!(best(&cluster, 1, &both).as_deref(), Some("ours"));
    assert_eq!(best(&cluster, 1, &["foreign"]), None);
    let strict = Options {
        foreign: ForeignNodes::Refuse,
        ..Options::default()
    };
    let (passed, refused) = filtered(&cluster, strict, &request(1), &both);
    assert_eq!(passed, ["ours"]);
    assert_eq!(refused, ["foreign: node(s) without a Gantry plugin"]);
}

#[test]
fn an_unknown_name_is_refused_and_an_unknown_object_is_a_simulation() {
    let cluster = cluster(&[]);
    let (_, refused) = filtered(&cluster, Options::default(), &request(1), &["new"]);
    assert_eq!(refused, ["new: node(s) not known to Gantry yet"]);

    let snapshot = cluster.store.snapshot();
    for (gpus, passes) in [("8", true), ("3", false)] {
        let raw =
            json!({"metadata": {"name": "template"}, "status": {"allocatable": {"nvidia.com/gpu": gpus}}})
                .to_string();
        let candidates = Candidates::Nodes(vec![NodeObject {
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
    let cluster = cluster(&[
        ("a", &plain(8), "0-7"),
        ("b", &bridged(), "1,2,4,5"),
        ("c", &bridged(), "1,2,5,6"),
    ]);
    assert_eq!(best(&cluster, 2, &["a", "b", "c"]).as_deref(), Some("b"));
}

#[test]
fn a_switched_pair_beats_a_bridged_one() {
    let cluster = cluster(&[("a", &bridged(), "0-7"), ("b", &switched(), "0-7")]);
    assert_eq!(best(&cluster, 2, &["a", "b"]).as_deref(), Some("b"));
}

#[test]
fn a_single_gpu_goes_where_it_breaks_nothing() {
    let cluster = cluster(&[
        ("a", &bridged(), "0-7"),
        ("b", &bridged(), "0,2,3"),
        ("c", &switched(), "0-7"),
    ]);
    assert_eq!(best(&cluster, 1, &["a", "b", "c"]).as_deref(), Some("b"));
}

#[test]
fn of_equal_nodes_the_first_name_wins_whatever_their_order() {
    let cluster = cluster(&[
        ("b", &bridged(), "0-7"),
        ("a", &bridged(), "0-7"),
        ("c", &bridged(), "0-7"),
    ]);
    for order in [["a", "b", "c"], ["c", "b", "a"], ["b", "a", "c"]] {
        assert_eq!(best(&cluster, 4, &order).as_deref(), Some("a"));
    }
}

#[test]
fn spread_takes_the_emptier_of_equally_fast_nodes_and_pack_the_fuller() {
    let cluster = cluster(&[("a", &plain(8), "0,1"), ("b", &plain(8), "0-7")]);
    let by = |policy| {
        let options = Options {
            policy,
            ..Options::default()
        };
        winner(&cluster, options, "new", &request(1), &["a", "b"])
    };
    assert_eq!(by(Policy::Spread).as_deref(), Some("b"));
    assert_eq!(by(Policy::Pack).as_deref(), Some("a"));
}

#[test]
fn gpus_on_their_way_to_another_pod_are_left_alone_while_there_are_others() {
    let cluster = cluster(&[("a", &bridged(), "0,1"), ("b", &bridged(), "0,1")]);
    let now = cluster.now();
    cluster
        .store
        .update(|index| index.hold(now, &"first".into(), &request(2), "a"));
    assert_eq!(
        (cluster.free("a").as_str(), cluster.open("a").as_str()),
        ("0,1", "")
    );
    assert_eq!(best(&cluster, 2, &["a", "b"]).as_deref(), Some("b"));
    // The hold is no bar where nothing else is left, and none to its own pod.
    assert_eq!(
        filtered(&cluster, Options::default(), &request(2), &["a"]).0,
        ["a"]
    );
    assert_eq!(best(&cluster, 2, &["a"]).as_deref(), Some("a"));
    let own = winner(&cluster, Options::default(), "first", &request(2), &["b", "a"]);
    assert_eq!(own.as_deref(), Some("a"));
}

const SHARED: &str = "nvidia.com/gpu.shared";
const MIG: &str = "nvidia.com/mig-1g.10gb";

#[test]
fn a_container_that_asks_for_more_than_kubelet_gives_to_one_is_refused_before_kubelet_fails_its_pod() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 0);
    let mut node = shared_node("n", &bridged(), SHARED, 4);
    node["status"]["resources"][0]["maxRequest"] = 1.into();
    cluster.inventory(&node);
    let refused = |devices| filtered(&cluster, Options::default(), &request_of(SHARED, devices), &["n"]).1;
    assert_eq!(refused(1), [""; 0]);
    assert_eq!(
        refused(2),
        ["n: node(s) where nvidia.com/gpu.shared gives a container 1 at most, container main asks for 2"]
    );
    cluster.pod(&pod_of("a", SHARED, 2));
    let bind = cluster
        .store
        .update(|index| index.reserve(&crate::fixtures::target("a", "n"), None));
    assert_eq!(
        bind.unwrap_err().to_string(),
        "node n: nvidia.com/gpu.shared gives a container 1 at most, container main asks for 2"
    );
}

/// What a pod that asks for `devices` of a resource would be granted on a node, by ID.
fn granted(cluster: &Cluster, node: &str, resource: &str, devices: u32) -> Vec<String> {
    cluster.pod(&pod_of("probe", resource, devices));
    let target = crate::fixtures::target("probe", node);
    let reserved = cluster
        .store
        .update(|index| index.reserve(&target, None))
        .unwrap();
    let now = cluster.now();
    cluster
        .store
        .update(|index| index.finish(now, &target, crate::index::Outcome::Failed));
    let crate::index::Reserved::Grant { annotation, .. } = reserved else {
        panic!("{reserved:?}");
    };
    let grant: gantry_api::Grant = serde_json::from_str(&annotation).unwrap();
    grant.held(resource).iter().map(ToString::to_string).collect()
}

/// Nodes of which two GPUs are cut in four each, with some of the slices held.
fn cut(nodes: &[(&str, &[&str])]) -> Cluster {
    let cluster = Cluster::new(Options::default());
    for (name, held) in nodes {
        cluster.node(name, 6);
        let slices: Vec<(u8, u8)> = (6..8)
            .flat_map(|gpu| (0..4).map(move |start| (gpu, start)))
            .collect();
        let mut node = cut_node(name, &bridged(), MIG, 1, &slices);
        let mut holder = holder(name, "other", None, "");
        holder["resource"] = MIG.into();
        holder["devices"] = held.iter().map(|slice| format!("MIG-{name}-{slice}")).collect();
        node["status"]["holders"] = json!([holder]);
        cluster.inventory(&node);
    }
    cluster
}

#[test]
fn a_slice_is_taken_where_the_gpu_is_in_use_anyway() {
    let cluster = cut(&[("a", &[]), ("b", &["7-0"]), ("c", &[])]);
    let best = |devices| {
        winner(
            &cluster,
            Options::default(),
            "new",
            &request_of(MIG, devices),
            &["a", "b", "c"],
        )
    };
    assert_eq!(best(1).as_deref(), Some("b"));
    let given = granted(&cluster, "b", MIG, 1);
    assert!(given[0].starts_with("MIG-b-7-"), "{given:?}");
    // Whole GPUs are another matter.
    let whole = winner(&cluster, Options::default(), "new", &request(2), &["a", "b", "c"]);
    assert_eq!(whole.as_deref(), Some("a"));
}

#[test]
fn a_gpu_that_is_cut_by_another_resource_counts_as_cut() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 0);
    let half = "nvidia.com/mig-3g.40gb";
    let mut node = cut_node("n", &bridged(), MIG, 1, &[(6, 0), (7, 0)]);
    let halves = [6, 7].map(|gpu| {
        json!({"id": format!("HALF-{gpu}"), "gpu": gpu, "slice": {"profile": "x", "start": 4, "size": 4}})
    });
    node = crate::fixtures::publish(node, json!({"name": half, "kind": "Mig"}), halves.to_vec());
    assert_eq!(
        {
            cluster.inventory(&node);
            granted(&cluster, "n", MIG, 1)
        },
        ["MIG-n-6-0"]
    );
    let mut holder = holder("n", "other", None, "");
    holder["resource"] = half.into();
    holder["devices"] = json!(["HALF-7"]);
    node["status"]["holders"] = json!([holder]);
    cluster.inventory(&node);
    assert_eq!(granted(&cluster, "n", MIG, 1), ["MIG-n-7-0"]);
}

#[test]
fn replicas_are_laid_as_the_resource_says() {
    for (policy, expected) in [("Distributed", "GPU-n-1::0"), ("Packed", "GPU-n-0::1")] {
        let cluster = Cluster::new(Options::default());
        cluster.node("n", 0);
        let mut node = shared_node("n", &bridged(), SHARED, 2);
        node["status"]["resources"][0]["sharing"] = policy.into();
        let mut holder = holder("n", "other", None, "");
        holder["resource"] = SHARED.into();
        holder["devices"] = json!(["GPU-n-0::0"]);
        node["status"]["holders"] = json!([holder]);
        cluster.inventory(&node);
        assert_eq!(granted(&cluster, "n", SHARED, 1), [expected]);
    }
}

#[test]
fn nodes_that_differ_in_which_replicas_are_held_are_alike() {
    let cluster = Cluster::new(Options::default());
    for (name, replica) in [("a", 0), ("b", 2)] {
        cluster.node(name, 0);
        let mut node = shared_node(name, &bridged(), SHARED, 3);
        let mut holder = holder(name, "other", None, "");
        holder["resource"] = SHARED.into();
        holder["devices"] = json!([format!("GPU-{name}-5::{replica}")]);
        node["status"]["holders"] = json!([holder]);
        cluster.inventory(&node);
    }
    let snapshot = cluster.store.snapshot();
    let class = |name| snapshot.class(snapshot.find(name).unwrap());
    assert_eq!(class("a"), class("b"));
}

#[test]
fn a_replica_on_its_way_to_a_pod_does_not_count_against_that_pod() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 0);
    let mut node = shared_node("n", &plain(1), SHARED, 3);
    let mut holder = holder("n", "other", None, "");
    holder["resource"] = SHARED.into();
    holder["devices"] = json!(["GPU-n-0::0"]);
    node["status"]["holders"] = json!([holder]);
    cluster.inventory(&node);
    let (now, request) = (cluster.now(), request_of(SHARED, 2));
    cluster
        .store
        .update(|index| index.hold(now, &"first".into(), &request, "n"));
    let snapshot = cluster.store.snapshot();
    let scored = |uid: &str| {
        let candidates = named(&["n"]);
        let nodes = locate(&snapshot, &candidates);
        prioritize(&snapshot, Options::default(), uid, &request, &candidates, &nodes)
            .map(|winner| winner.score)
    };
    // The same GPU, but another's claim on it.
    assert!(scored("first") > scored("second"));
    assert!(scored("second").is_some());
}

#[test]
fn a_resource_is_managed_once_a_node_publishes_it_and_no_longer_than_that() {
    let cluster = Cluster::new(Options::default());
    let managed = |cluster: &Cluster| cluster.store.snapshot().managed.contains(SHARED);
    assert!(!managed(&cluster));
    cluster.node("n", 0);
    cluster.inventory(&shared_node("n", &bridged(), SHARED, 2));
    assert!(managed(&cluster));
    cluster.inventory(&gpu_node("n", &bridged()));
    assert!(!managed(&cluster));
    assert!(cluster.store.snapshot().managed.contains(crate::fixtures::GPU));
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
        let Some(most) = free
            .subsets(devices)
            .map(|set| (kind.bandwidth(set) * 1e3).round() as u64)
            .max()
        else {
            continue;
        };
        let chosen = kind.best(free, devices).unwrap();
        assert_eq!((kind.bandwidth(chosen) * 1e3).round() as u64, most);
        let bandwidth = if devices > 1 { most } else { 0 };
        let lost = (kind.stranded(free, chosen) * 1e9).round() as i64;
        let left = i64::try_from((free - chosen).len()).unwrap();
        let key = if spread {
            (bandwidth, left, -lost)
        } else {
            (bandwidth, -lost, -left)
        };
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

/// A pool that is all of a machine's parts, with some of them free.
fn pool_of(shape: Shape, free: DeviceSet) -> Pool {
    Pool {
        resource: MIG.into(),
        devices: free.len(),
        shape,
        max_request: None,
        open: free.clone(),
        free,
        unhealthy: 0,
        sick: Vec::new(),
        leaving: 0,
        advertised: None,
    }
}

fn class_of(kind: &Arc<Kind>, pool: Pool) -> Class {
    Class {
        kind: Arc::clone(kind),
        pools: vec![pool],
        not_ready: None,
        scores: Remembered::default(),
    }
}

/// The GPUs of which something is in use.
fn in_use(spots: &[Spot], free: &DeviceSet) -> Vec<u8> {
    let used = spots
        .iter()
        .enumerate()
        .filter(|(device, _)| !free.contains(*device));
    used.map(|(_, spot)| spot.gpu).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// What is left out of a class, which of several replicas are free, changes no score; and what is chosen exists.
    #[test]
    fn alike_replicas_make_no_difference(
        gpus in 1u8..5,
        of_each in 1usize..5,
        bits in any::<u32>(),
        devices in 1u32..5,
        packed in any::<bool>(),
    ) {
        let spots: Vec<Spot> = (0..gpus)
            .flat_map(|gpu| std::iter::repeat_n(Spot { gpu, slice: None }, of_each))
            .collect();
        let sharing = if packed { Sharing::Packed } else { Sharing::Distributed };
        let shape = Shape::Parts(Arc::new(Parts::new(spots.clone(), sharing)));
        let free: DeviceSet = (0..spots.len()).filter(|device| bits & (1 << device) != 0).collect();
        let kind = kind(&bridged());
        let scored = |free: DeviceSet| {
            let class = class_of(&kind, pool_of(shape.clone(), free));
            score(&class, &request_of(MIG, devices), &[], Policy::Pack)
        };
        let (exact, alike) = (scored(free.clone()), scored(shape.canonical(&free)));
        prop_assert_eq!(exact.is_some(), free.len() >= devices as usize);
        prop_assert_eq!(exact.as_ref().map(|(score, _)| *score), alike.map(|(score, _)| score));
        if let Some((_, layouts)) = exact {
            prop_assert_eq!(layouts[0].devices.len(), devices as usize);
            prop_assert!(layouts[0].devices.is_subset(&free));
        }
    }

    /// Over all nodes and all their free slices: while a slice is free on a GPU that is cut by use, none is taken from a whole one.
    #[test]
    fn no_whole_gpu_is_cut_while_a_cut_one_serves(nodes in prop::collection::vec(0u32..4096, 1..5)) {
        let cut: Vec<(u8, u8, u8)> = (0..3).flat_map(|gpu| (0..4).map(move |start| (gpu, start, 1))).collect();
        let shape = slices(&cut);
        let Shape::Parts(parts) = &shape else { unreachable!() };
        let kind = kind(&bridged());
        let mut best: Option<(Score, bool)> = None;
        let (mut any, mut possible) = (false, false);
        for bits in nodes {
            let free: DeviceSet = (0..12).filter(|device| bits & (1 << device) != 0).collect();
            let used = in_use(parts.spots(), &free);
            let cut_by_use = |device: usize| used.contains(&parts.spots()[device].gpu);
            possible |= free.iter().any(cut_by_use);
            any |= !free.is_empty();
            let class = class_of(&kind, pool_of(shape.clone(), free.clone()));
            if let Some((score, layouts)) = score(&class, &request_of(MIG, 1), &[], Policy::Pack) {
                let device = layouts[0].devices.iter().next().unwrap();
                if best.as_ref().is_none_or(|(known, _)| score > *known) {
                    best = Some((score, cut_by_use(device)));
                }
            }
        }
        prop_assert_eq!(best.is_some(), any);
        if let Some((_, cut_by_use)) = best {
            prop_assert_eq!(cut_by_use, possible);
        }
    }
}
