//! Spare reservations on nodes: whose devices are lent to which pods, and how members get them back.

use std::sync::Arc;

use super::*;
use crate::fixtures::{quarantined, request};
use crate::index::{CalledPod, SchedulingCall};
use crate::wire::{CandidateNodes, Text};

const NODES: [&str; 3] = ["m", "n", "o"];

/// A pod of a priority with so many GPUs.
fn single(name: &str, gpus: u32, priority: i32) -> Value {
    let mut pod = pod(name, gpus);
    pod["spec"]["priority"] = priority.into();
    pod
}

/// Members of gang `a` of eight GPUs each, of priority 10, with a spare reservation.
fn crew(count: u32, min: u32) -> Vec<Value> {
    let members = (0..count).map(|number| {
        let mut pod = member(&format!("a-{number}"), 8, "a", min);
        pod["spec"]["priority"] = 10.into();
        pod["metadata"]["annotations"][names::GANG_SPARES_ANNOTATION] = "1".into();
        pod
    });
    members.collect()
}

/// Three nodes: two with the members of a bound gang, one with its spare reservation. Returns the latter.
fn bound_with_spare() -> (Cluster, Vec<Value>, String) {
    let cluster = Cluster::new(Options::default());
    for node in NODES {
        cluster.add(node, &bridged());
    }
    let pods = crew(2, 2);
    create(&cluster, &pods);
    let nodes = bind_all(&cluster, &pods);
    let spare = NODES.into_iter().find(|node| !nodes.iter().any(|used| used == node)).unwrap();
    assert_eq!(cluster.free(spare), "", "no pod of its own priority gets it");
    write_down(&cluster);
    (cluster, pods, spare.to_owned())
}

/// The nodes that filter returns for a pod.
fn filtered(cluster: &Cluster, pod: &Value) -> Vec<&'static str> {
    let snapshot = cluster.store.snapshot();
    let gpus = pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"].as_str().unwrap();
    let call = SchedulingCall {
        uid: pod["metadata"]["uid"].as_str().unwrap(),
        namespace: "default",
        name: pod["metadata"]["name"].as_str().unwrap(),
        scheduler: "default-scheduler",
        priority: i32::try_from(pod["spec"]["priority"].as_i64().unwrap()).unwrap(),
        request: Arc::clone(&request(gpus.parse().unwrap())),
        snapshot: &snapshot,
        read_pod: &CalledPod::default,
    };
    let candidates = CandidateNodes::Names(NODES.iter().map(|name| Text::from(*name)).collect());
    let answer = cluster.store.filter(&call, &candidates).unwrap();
    answer.passed.iter().map(|position| NODES[*position as usize]).collect()
}

/// Binds a single pod, and shows it with its grant.
fn bind_single(cluster: &Cluster, pod: &Value, node: &str) -> Result<Value, BindError> {
    let uid = pod["metadata"]["uid"].as_str().unwrap();
    let BindStep::Single(BindGrant::Grant { annotation, .. }) = admit(cluster, uid, node)? else {
        panic!("{uid} gets no grant");
    };
    let now = cluster.now();
    cluster.store.update(|index| index.finish(now, &target(uid, node), Outcome::Bound));
    let mut shown = bound(pod.clone(), node, 1, None);
    shown["metadata"]["annotations"] = json!({"gantry.dev/grant": &*annotation});
    cluster.pod(&shown);
    Ok(shown)
}

fn evicted(cluster: &Cluster) -> Vec<String> {
    let work = cluster.store.update(|index| index.take_work());
    let evicted = work.into_iter().filter_map(|work| match work {
        Work::Evict { pods, by } => {
            assert_eq!(&*by.name, "a");
            Some(pods)
        }
        _ => None,
    });
    evicted.flatten().map(|uid| uid.to_string()).collect()
}

fn totals(cluster: &Cluster) -> [usize; 2] {
    cluster.store.read(|index| index.gang_totals().spares)
}

#[test]
fn spare_is_lent_to_single_pods_of_lower_priority_only() {
    let (cluster, _, spare) = bound_with_spare();
    assert_eq!(totals(&cluster), [1, 0]);
    for (name, priority, lent) in [("equal", 10, false), ("higher", 11, false), ("lower", 9, true)] {
        let pod = single(name, 4, priority);
        cluster.pod(&pod);
        let nodes = if lent { vec![&*spare] } else { Vec::new() };
        assert_eq!(filtered(&cluster, &pod), nodes, "{name}");
        if !lent {
            let error = bind_single(&cluster, &pod, &spare).unwrap_err();
            assert!(matches!(error, BindError::NotFree { .. }), "{error:?}");
        }
    }
    let lower = single("lower", 4, 9);
    bind_single(&cluster, &lower, &spare).unwrap();
    assert_eq!(totals(&cluster), [0, 1]);
    // The other half is lent to another pod, and no more than that.
    let second = single("second", 4, 0);
    cluster.pod(&second);
    assert_eq!(filtered(&cluster, &second), [&*spare]);
    bind_single(&cluster, &second, &spare).unwrap();
    let third = single("third", 1, 0);
    cluster.pod(&third);
    assert!(filtered(&cluster, &third).is_empty());
    assert!(bind_single(&cluster, &third, &spare).is_err());
    cluster.wait(5);
    assert_eq!(phase(&cluster, "a"), GangPhase::Bound);
    assert_eq!((totals(&cluster), evicted(&cluster)), ([0, 1], Vec::new()));
    let view = cluster.store.read(|index| index.gang_view("default", "a")).unwrap();
    let lent: Vec<_> =
        view.places.iter().filter(|place| place.spare).flat_map(|place| &place.lent_to).collect();
    assert_eq!(lent.iter().map(|name| &***name).collect::<Vec<_>>(), ["default/lower", "default/second"]);
}

#[test]
fn free_devices_go_before_lent_ones() {
    let cluster = Cluster::new(Options::default());
    for node in NODES {
        cluster.add(node, &bridged());
    }
    let pods = crew(1, 1);
    create(&cluster, &pods);
    bind_all(&cluster, &pods);
    let pod = single("x", 8, 0);
    cluster.pod(&pod);
    let passed = filtered(&cluster, &pod);
    assert_eq!(passed.len(), 1);
    assert_eq!(cluster.free(passed[0]).len(), 15);
    bind_single(&cluster, &pod, passed[0]).unwrap();
    let next = single("y", 8, 0);
    cluster.pod(&next);
    let lent = filtered(&cluster, &next);
    assert_eq!(lent.len(), 1);
    assert_eq!(cluster.free(lent[0]), "", "there is only the spare one left");
}

#[test]
fn gang_that_never_preempts_lends_nothing() {
    let cluster = Cluster::new(Options::default());
    for node in NODES {
        cluster.add(node, &bridged());
    }
    let mut pods = crew(2, 2);
    pods[1]["spec"]["preemptionPolicy"] = "Never".into();
    create(&cluster, &pods);
    bind_all(&cluster, &pods);
    assert_eq!(totals(&cluster), [1, 0]);
    let pod = single("lower", 4, 0);
    cluster.pod(&pod);
    assert!(filtered(&cluster, &pod).is_empty());
}

#[test]
fn replacement_gets_the_lent_spare_once_its_borrower_is_gone() {
    let (cluster, pods, spare) = bound_with_spare();
    let borrower = single("borrower", 4, 0);
    cluster.pod(&borrower);
    let borrower = bind_single(&cluster, &borrower, &spare).unwrap();
    // A GPU of the first member dies, and its controller makes another pod.
    let view = cluster.store.read(|index| index.gang_view("default", "a")).unwrap();
    let place = view.places.iter().find(|place| place.pod.as_ref().is_some_and(|pod| pod.as_str() == "a-0"));
    let place = place.unwrap();
    let mut sick = gpu_node(place.node.as_str(), &bridged());
    sick["status"]["devices"][3]["healthy"] = false.into();
    sick["status"]["devices"][3]["reason"] = "Xid 79".into();
    cluster.inventory(&sick);
    let mut lost = bound(pods[0].clone(), place.node.as_str(), 1, None);
    lost["status"]["phase"] = "Failed".into();
    cluster.pod(&lost);
    cluster.gone(&lost);
    assert_eq!(evicted(&cluster), Vec::<String>::new(), "no member needs it yet");
    let mut replacement = crew(1, 2).remove(0);
    replacement["metadata"]["uid"] = "a-0b".into();
    replacement["metadata"]["name"] = "a-0b".into();
    create(&cluster, &[replacement.clone()]);
    assert_eq!(evicted(&cluster), ["borrower"]);
    assert!(cluster.store.read(|index| {
        let gang = index.gangs().of_pod(&"a-0b".into()).unwrap().clone();
        index.gangs().waits_for(&gang, &"borrower".into())
    }));
    // No pod is lent it any more.
    let next = single("next", 4, 0);
    cluster.pod(&next);
    assert!(!filtered(&cluster, &next).contains(&&*spare));
    assert_eq!(node(&cluster, "a-0b"), spare);
    write_down(&cluster);
    let waits = admit(&cluster, "a-0b", &spare);
    assert!(matches!(waits, Ok(BindStep::Wait(_))), "{waits:?}");
    let mut ended = borrower;
    ended["status"]["phase"] = "Failed".into();
    cluster.pod(&ended);
    cluster.gone(&ended);
    let admitted = admit(&cluster, "a-0b", &spare).unwrap();
    assert_eq!(granted(&admitted).len(), 8);
    show(&cluster, &replacement, &spare, &admitted);
    assert_eq!(phase(&cluster, "a"), GangPhase::Bound);
    assert_eq!(totals(&cluster), [0, 0]);
}

#[test]
fn next_process_knows_spare_and_borrower() {
    let (before, _, spare) = bound_with_spare();
    let borrower = single("borrower", 4, 0);
    before.pod(&borrower);
    bind_single(&before, &borrower, &spare).unwrap();
    before.store.update(|index| index.stand_down());
    before.store.update(|index| index.lead());
    before.wait(5);
    assert_eq!(phase(&before, "a"), GangPhase::Bound);
    assert_eq!(totals(&before), [0, 1]);
    assert_eq!(evicted(&before), Vec::<String>::new());
}

#[test]
fn quarantined_device_of_a_spare_is_not_lent() {
    let (cluster, _, spare) = bound_with_spare();
    let mut node = gpu_node(&spare, &bridged());
    node["status"]["holders"] = json!([quarantined(crate::fixtures::holder(&spare, "old", None, "0-3"))]);
    cluster.inventory(&node);
    let pod = single("x", 8, 0);
    cluster.pod(&pod);
    assert!(filtered(&cluster, &pod).is_empty());
    let half = single("y", 4, 0);
    cluster.pod(&half);
    assert_eq!(filtered(&cluster, &half), [&*spare]);
}
