//! Groups whose object says that each of their pods goes by itself.

use super::*;

/// A pod of the basic PodGroup `g`.
fn basic(name: &str, gpus: u32, priority: i32) -> Value {
    let mut pod = pod(name, gpus);
    pod["spec"]["schedulingGroup"] = json!({"podGroupName": "g"});
    pod["spec"]["priority"] = priority.into();
    pod
}

/// Its object is read.
fn read(cluster: &Cluster) {
    let owner = OwnerRef {
        kind: OwnerKind::PodGroup,
        namespace: "default".into(),
        name: "g".into(),
        part: "".into(),
    };
    let object = json!({"spec": {"schedulingPolicy": {"basic": {}}}});
    let facts = integrations::read(OwnerKind::PodGroup, "", &object);
    cluster.store.update(|index| index.owner_seen(&owner, Some(facts.into())));
}

#[test]
fn pod_of_a_basic_group_is_scheduled_by_itself() {
    let cluster = two_nodes();
    create(&cluster, &[basic("a", 8, 0), basic("b", 8, 0), basic("c", 8, 0)]);
    assert!(matches!(answer(&cluster, "a"), Answer::Wait(_)));
    read(&cluster);
    cluster.wait(2);
    let woken = cluster.store.update(|index| index.take_called(10));
    let woken: Vec<&str> = woken.iter().map(|(uid, _)| uid.as_str()).collect();
    assert_eq!(woken, ["a"], "it was parked");
    for pod in ["a", "b", "c"] {
        assert_eq!(answer(&cluster, pod), Answer::Single);
    }
    assert_eq!((cluster.free("m").len(), cluster.free("n").len()), (15, 15));
    for (pod, node) in [("a", "m"), ("b", "n")] {
        assert!(matches!(admit(&cluster, pod, node), Ok(BindStep::Single(_))));
        cluster.pod(&bound(basic(pod, 8, 0), node, 1, Some("0-7")));
    }
    let view = cluster.store.read(|index| index.gang_view("default", "g"));
    assert_eq!(view.unwrap().reason, Reason::NotAGang);
}

#[test]
fn of_a_basic_group_one_pod_is_stopped_for_a_gang_and_not_all() {
    let cluster = two_nodes();
    for (pod, node) in [("a", "m"), ("b", "n")] {
        cluster.pod(&bound(basic(pod, 8, 0), node, 1, Some("0-7")));
    }
    read(&cluster);
    let mut high = members("high", 1, 8);
    high[0]["spec"]["priority"] = 10.into();
    create(&cluster, &high);
    let work = cluster.store.update(|index| index.take_work());
    let evicted = work.into_iter().find_map(|work| match work {
        Work::Evict { pods, .. } => Some(pods.len()),
        _ => None,
    });
    assert_eq!(evicted, Some(1));
}

#[test]
fn pod_of_a_basic_group_keeps_preempted_devices() {
    let cluster = two_nodes();
    create(&cluster, &[basic("first", 1, 0)]);
    read(&cluster);
    cluster.pod(&bound(basic("first", 1, 0), "m", 1, Some("0")));
    cluster.pod(&bound(pod("low", 8), "n", 1, Some("0-7")));
    let mut next = basic("next", 8, 10);
    cluster.pod(&next);
    let offer =
        crate::wire::Offer { node: "n".to_owned(), victims: vec!["low".to_owned()], budgets_broken: 0 };
    let asks = crate::fixtures::request(8);
    let offered =
        cluster.store.update(|index| index.preemptable(&"next".into(), &asks, 10, vec![offer.clone()]));
    assert_eq!(offered, [offer]);
    assert_eq!(cluster.store.read(|index| index.belongs("next")), crate::index::MembershipState::Single);
    next["status"]["nominatedNodeName"] = "n".into();
    cluster.pod(&next);
    assert!(cluster.store.snapshot().promised.is_some());
}
