//! Who goes first: preemption, and nodes kept for the gang that is next.

use super::*;
use crate::index::Disruptions;

#[test]
fn higher_gang_preempts_a_lower_one_as_a_whole() {
    let cluster = two_nodes();
    let low = members("low", 2, 8);
    create(&cluster, &low);
    let nodes = bind_all(&cluster, &low);
    let mut high = members("high", 1, 8);
    high[0]["spec"]["priority"] = 10.into();
    create(&cluster, &high);
    assert_eq!(phase(&cluster, "high"), GangPhase::Preempting);
    let work = cluster.store.update(|index| index.take_work());
    let evicted = work.into_iter().find_map(|work| match work {
        Work::Evict { pods, .. } => Some(pods),
        _ => None,
    });
    assert_eq!(evicted, Some(vec!["low-0".into(), "low-1".into()]));
    // What comes free is kept for it: a single pod does not get it.
    for (pod, node) in low.iter().zip(&nodes) {
        cluster.gone(&bound(pod.clone(), node, 1, None));
    }
    cluster.wait(6);
    let place = node(&cluster, "high-0");
    cluster.pod(&pod("single", 8));
    assert!(admit(&cluster, "single", &place).is_err());
    admit(&cluster, "high-0", &place).unwrap();
    commit(&cluster);
    assert_eq!(granted(&admit(&cluster, "high-0", &place).unwrap()).len(), 8);
}

/// The pods that are to be evicted by now.
fn evicted(cluster: &Cluster) -> Option<Vec<PodUid>> {
    let work = cluster.store.update(|index| index.take_work());
    work.into_iter().find_map(|work| match work {
        Work::Evict { pods, .. } => Some(pods),
        _ => None,
    })
}

#[test]
fn gang_being_bound_is_not_evicted_in_part() {
    let cluster = two_nodes();
    let low = members("low", 2, 8);
    create(&cluster, &low);
    let nodes = [node(&cluster, "low-0"), node(&cluster, "low-1")];
    admit(&cluster, "low-0", &nodes[0]).unwrap();
    admit(&cluster, "low-1", &nodes[1]).unwrap();
    commit(&cluster);
    let bindings = [0, 1].map(|number| admit(&cluster, &format!("low-{number}"), &nodes[number]).unwrap());
    show(&cluster, &low[0], &nodes[0], &bindings[0]);
    let mut high = members("high", 1, 8);
    high[0]["spec"]["priority"] = 10.into();
    create(&cluster, &high);
    assert_eq!(evicted(&cluster), None, "the other Binding is on its way");
    show(&cluster, &low[1], &nodes[1], &bindings[1]);
    cluster.wait(1);
    assert_eq!(evicted(&cluster), Some(vec!["low-0".into(), "low-1".into()]));
}

#[test]
fn gang_preempts_a_lower_pod_once_it_is_bound() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    let low = pod("low", 8);
    cluster.pod(&low);
    admit(&cluster, "low", "n").unwrap();
    let mut high = members("high", 1, 8);
    high[0]["spec"]["priority"] = 10.into();
    create(&cluster, &high);
    assert_eq!(evicted(&cluster), None, "its Binding is on its way");
    cluster.pod(&bound(low, "n", 1, Some("0-7")));
    cluster.wait(1);
    assert_eq!(evicted(&cluster), Some(vec!["low".into()]));
}

#[test]
fn victim_with_a_long_grace_period_is_waited_for() {
    let cluster = two_nodes();
    let single = |name: &str, node: &str| bound(pod(name, 8), node, 1, Some("0-7"));
    let (left, right) = (single("left", "m"), single("right", "n"));
    cluster.pod(&left).pod(&right);
    let mut high = members("high", 1, 8);
    high[0]["spec"]["priority"] = 10.into();
    create(&cluster, &high);
    let stopped = evicted(&cluster).unwrap();
    assert_eq!(stopped.len(), 1);
    let stopped = match stopped[0].as_str() {
        "left" => left,
        _ => right,
    };
    let ending = ending(&cluster, stopped, 1800);
    for _ in 0..30 {
        cluster.wait(60);
        assert_eq!(phase(&cluster, "high"), GangPhase::Preempting);
        assert_eq!(evicted(&cluster), None);
    }
    cluster.gone(&ending).wait(6);
    assert_eq!(phase(&cluster, "high"), GangPhase::Reserved);
}

/// The pod on its way out, for so many seconds more.
fn ending(cluster: &Cluster, mut pod: Value, left: i64) -> Value {
    let by = cluster.store.read(|index| index.now()).unix + left;
    let by = k8s_openapi::jiff::Timestamp::from_second(by).unwrap();
    pod["metadata"]["deletionTimestamp"] = by.to_string().into();
    cluster.pod(&pod);
    pod
}

#[test]
fn new_leader_keeps_freed_devices_for_the_preemptor() {
    let cluster = two_nodes();
    let single = |name: &str, node: &str| bound(pod(name, 8), node, 1, Some("0-7"));
    let (left, right) = (single("left", "m"), single("right", "n"));
    cluster.pod(&left).pod(&right);
    let mut high = members("high", 2, 8);
    for pod in &mut high {
        pod["spec"]["priority"] = 10.into();
    }
    create(&cluster, &high);
    assert_eq!(evicted(&cluster).map(|pods| pods.len()), Some(2));
    let (left, right) = (ending(&cluster, left, 1800), ending(&cluster, right, 1800));
    write_down(&cluster);
    cluster.store.update(|index| index.stand_down());
    cluster.store.update(|index| index.lead());
    assert_eq!(phase(&cluster, "high"), GangPhase::Preempting);
    assert_eq!(evicted(&cluster), None, "they are on their way out");

    cluster.gone(&left).wait(6);
    cluster.pod(&pod("vulture", 8));
    assert!(admit(&cluster, "vulture", "m").is_err());
    cluster.wait(600);
    assert_eq!(phase(&cluster, "high"), GangPhase::Preempting);
    cluster.gone(&right).wait(6);
    assert_eq!(phase(&cluster, "high"), GangPhase::Reserved);
}

#[test]
fn devices_of_pods_that_end_by_themselves_are_not_kept() {
    let cluster = two_nodes();
    let single = |name: &str, node: &str| bound(pod(name, 8), node, 1, Some("0-7"));
    let (left, right) = (single("left", "m"), single("right", "n"));
    let (left, _) = (ending(&cluster, left, 1800), ending(&cluster, right, 1800));
    create(&cluster, &members("waits", 2, 8));
    assert_eq!(phase(&cluster, "waits"), GangPhase::Queued);
    write_down(&cluster);
    cluster.store.update(|index| index.stand_down());
    cluster.store.update(|index| index.lead());
    assert_eq!(phase(&cluster, "waits"), GangPhase::Queued);
    cluster.gone(&left).wait(6);
    cluster.pod(&pod("passes", 8));
    assert!(admit(&cluster, "passes", "m").is_ok());
}

#[test]
fn a_member_that_has_not_come_to_its_place_goes_with_its_gang() {
    let cluster = two_nodes();
    let low = members("low", 2, 8);
    create(&cluster, &low);
    let nodes = bind_all(&cluster, &low);
    cluster.gone(&bound(low[1].clone(), &nodes[1], 1, None));
    create(&cluster, &[member("low-1b", 8, "low", 2)]);
    assert_eq!(node(&cluster, "low-1b"), nodes[1]);
    let mut high = members("high", 1, 8);
    high[0]["spec"]["priority"] = 10.into();
    create(&cluster, &high);
    assert_eq!(evicted(&cluster), Some(vec!["low-0".into(), "low-1b".into()]));
}

#[test]
fn a_member_on_a_node_without_a_plugin_goes_with_its_gang() {
    let cluster = two_nodes();
    let low = members("low", 2, 8);
    create(&cluster, &low);
    bind_all(&cluster, &low);
    cluster.store.update(|index| index.inventory_deleted("n"));
    let mut high = members("high", 1, 8);
    high[0]["spec"]["priority"] = 10.into();
    create(&cluster, &high);
    assert_eq!(evicted(&cluster), Some(vec!["low-0".into(), "low-1".into()]));
}

#[test]
fn gang_is_not_planned_on_devices_of_a_nominated_pod() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    let low = bound(pod("low", 8), "n", 1, Some("0-7"));
    cluster.pod(&low);
    let mut high = pod("high", 6);
    high["spec"]["priority"] = 10.into();
    high["status"]["nominatedNodeName"] = "n".into();
    cluster.pod(&high);
    create(&cluster, &members("a", 1, 4));
    let mut small = members("s", 1, 2);
    small[0]["spec"]["priority"] = 10.into();
    create(&cluster, &small);
    cluster.gone(&low);
    cluster.wait(6);
    assert_eq!(phase(&cluster, "s"), GangPhase::Reserved, "beside the pod");
    assert_eq!(phase(&cluster, "a"), GangPhase::Queued);
    // kube-scheduler gives that up, as it does at once if the devices are not given back when it looks.
    high["status"]["nominatedNodeName"] = Value::Null;
    cluster.pod(&high);
    cluster.wait(6);
    assert_eq!(phase(&cluster, "a"), GangPhase::Queued);
    cluster.wait(6);
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
}

#[test]
fn a_gang_that_must_not_preempt_waits() {
    let cluster = two_nodes();
    let low = members("low", 2, 8);
    create(&cluster, &low);
    bind_all(&cluster, &low);
    let mut high = members("high", 1, 8);
    high[0]["spec"]["priority"] = 10.into();
    high[0]["spec"]["preemptionPolicy"] = "Never".into();
    create(&cluster, &high);
    assert_eq!(phase(&cluster, "high"), GangPhase::Queued);
}

#[test]
fn a_gang_that_has_waited_long_has_nodes_kept_for_it_a_while() {
    let cluster = Cluster::new(Options {
        patience: std::time::Duration::from_secs(60),
        drain: std::time::Duration::from_secs(300),
        ..Options::default()
    });
    cluster.add("m", &bridged()).add("n", &bridged());
    cluster.pod(&bound(pod("x", 1), "m", 1, Some("0")));
    create(&cluster, &members("a", 2, 8));
    assert!(cluster.store.snapshot().kept.is_none());
    cluster.wait(30).wait(31);
    let kept = cluster.store.snapshot().kept.clone().unwrap();
    assert_eq!(kept.words(), "node(s) reserved for gang default/a, which waits");
    assert_eq!(kept.nodes().count(), 2);
    // Later gangs are not placed there either.
    create(&cluster, &members("b", 1, 1));
    let Answer::Wait(why) = answer(&cluster, "b-0") else {
        panic!("it has a reservation");
    };
    assert_eq!(why.reason, Reason::NodesReserved);
    // Bounded: open for as long again.
    cluster.wait(301);
    assert!(cluster.store.snapshot().kept.is_none());
    assert!(matches!(answer(&cluster, "b-0"), Answer::Node(_)));
    cluster.wait(300);
    assert!(cluster.store.snapshot().kept.is_some());
}

#[test]
fn refusal_text_is_stable_on_a_full_cluster() {
    let cluster = two_nodes();
    for (at, node) in [(1, "m"), (2, "n")] {
        for gpu in 0..8 {
            let name = format!("{node}{gpu}");
            cluster.pod(&bound(pod(&name, 1), node, at, Some(&gpu.to_string())));
        }
    }
    create(&cluster, &members("g", 2, 2));
    let words = |cluster: &Cluster| (phase(cluster, "g"), answer(cluster, "g-0"));
    let before = words(&cluster);
    assert_eq!(before.0, GangPhase::Queued);
    let mut left = 4;
    for (at, node, gpu) in [(1, "m", 0), (1, "m", 1), (2, "n", 4), (2, "n", 5)] {
        assert_eq!(words(&cluster), before, "{left} GPUs short");
        let mut ended = bound(pod(&format!("{node}{gpu}"), 1), node, at, Some(&gpu.to_string()));
        ended["status"]["phase"] = "Succeeded".into();
        cluster.pod(&ended);
        cluster.wait(6);
        left -= 1;
    }
    assert_eq!(words(&cluster).0, GangPhase::Reserved);
}

/// A bound gang `run` of two, and node `m` kept for a gang that has nothing. With the members of `run`, and where they are.
fn beside_kept() -> (Cluster, Vec<Value>, Vec<String>) {
    let cluster = Cluster::new(Options::default());
    for (at, node) in [(1, "n"), (2, "o")] {
        cluster.add(node, &bridged());
        cluster.pod(&bound(pod(&format!("{node}-most"), 5), node, at, Some("3-7")));
    }
    let run = members("run", 2, 3);
    create(&cluster, &run);
    let nodes = bind_all(&cluster, &run);
    cluster.add("m", &bridged());
    cluster.pod(&bound(pod("x", 1), "m", 3, Some("0")));
    create(&cluster, &members("head", 1, 8));
    cluster.wait(61);
    let snapshot = cluster.store.snapshot();
    let kept: Vec<_> = snapshot.kept.as_ref().unwrap().nodes().collect();
    assert_eq!(kept, [snapshot.find("m").unwrap()]);
    (cluster, run, nodes)
}

#[test]
fn refusal_is_renewed_after_the_backfill_reservation_ends() {
    let (cluster, _, _) = beside_kept();
    let why = |cluster: &Cluster| {
        let view = cluster.store.read(|index| index.gang_view("default", "late"));
        view.unwrap().reason
    };
    create(&cluster, &members("late", 1, 4));
    assert_eq!(why(&cluster), Reason::NodesReserved);
    let mut ended = bound(pod("x", 1), "m", 3, Some("0"));
    ended["status"]["phase"] = "Succeeded".into();
    cluster.pod(&ended);
    cluster.wait(6);
    assert_eq!(node(&cluster, "head-0"), "m");
    cluster.wait(2);
    assert_ne!(why(&cluster), Reason::NodesReserved);
}

/// How often there was more room so far.
fn room(cluster: &Cluster) -> u64 {
    cluster.store.read(|index| index.gangs.reclaim.growth())
}

#[test]
fn a_member_that_takes_its_place_leaves_no_more_room_to_others() {
    let cluster = two_nodes();
    let pods = members("a", 2, 4);
    create(&cluster, &pods);
    let before = room(&cluster);
    let nodes = bind_all(&cluster, &pods);
    cluster.wait(2);
    assert_eq!(room(&cluster), before);
    // Their end does.
    for (pod, node) in pods.iter().zip(&nodes) {
        cluster.gone(&bound(pod.clone(), node, 1, None));
    }
    cluster.wait(6);
    assert!(room(&cluster) > before);
}

#[test]
fn larger_budget_triggers_planning_once_a_second() {
    let cluster = two_nodes();
    let tell = |all: &[(&str, u32)]| {
        let budgets = all.iter().map(|(name, allowed)| Disruptions {
            namespace: "default".into(),
            name: (*name).into(),
            selector: Some(Vec::new()),
            allowed: *allowed,
        });
        let budgets = budgets.collect();
        cluster.store.update(|index| index.budgets_seen(Some(budgets)));
    };
    tell(&[("a", 5), ("b", 5)]);
    cluster.wait(1);
    let mut before = room(&cluster);
    let mut grown = || {
        let now = room(&cluster);
        now - std::mem::replace(&mut before, now)
    };
    tell(&[("a", 4), ("b", 5)]);
    tell(&[("a", 4), ("b", 0), ("c", 7)]);
    cluster.wait(1);
    assert_eq!(grown(), 0);
    for allowed in 1..5 {
        tell(&[("a", 4), ("b", allowed), ("c", 7)]);
    }
    cluster.wait(2);
    assert_eq!(grown(), 1);
    tell(&[("b", 4), ("c", 7)]);
    cluster.wait(1);
    assert_eq!(grown(), 1, "one is gone");
}

/// A member is lost with its node.
fn lose(cluster: &Cluster, member: &Value, node: &str) {
    cluster.store.update(|index| index.node_deleted(node));
    cluster.gone(&bound(member.clone(), node, 1, None));
}

#[test]
fn bound_gang_repair_uses_backfill_nodes() {
    let (cluster, run, nodes) = beside_kept();
    create(&cluster, &[member("run-2", 3, "run", 2)]);
    assert!(matches!(answer(&cluster, "run-2"), Answer::Wait(_)));
    lose(&cluster, &run[1], &nodes[1]);
    create(&cluster, &[member("run-3", 3, "run", 2)]);
    assert_eq!(node(&cluster, "run-2"), "m");
    assert!(matches!(answer(&cluster, "run-3"), Answer::Wait(_)));
}

#[test]
fn bound_gang_repair_prefers_nodes_outside_the_backfill() {
    let (cluster, run, nodes) = beside_kept();
    cluster.add("p", &plain(3));
    lose(&cluster, &run[1], &nodes[1]);
    create(&cluster, &[member("run-2", 3, "run", 2)]);
    assert_eq!(node(&cluster, "run-2"), "p");
}
