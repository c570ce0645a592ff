mod besides;
mod deferred;
mod elsewhere;
mod extras;
mod giving_way;
mod idle;
mod kept;
mod order;
mod preemption;
mod report;
mod restart;
mod singly;
mod spares;
mod stuck;
mod truth;
mod unlearned;

use gantry_api::{GangPhase, GangSpec, NodeName, PodUid, Reason, names};
use gantry_gang::protocol::{Answer, BindEnd, Object, Work};
use gantry_gang::{OwnerKind, OwnerRef, integrations};
use serde_json::{Value, json};

use crate::fixtures::{Cluster, bound, bridged, gpu_node, member, plain, pod, target};
use crate::index::{BindError, BindGrant, BindStep, Outcome, Source};
use gantry_planner::decide::Options;

/// Two nodes of eight GPUs.
fn two_nodes() -> Cluster {
    let cluster = Cluster::new(Options::default());
    cluster.add("m", &bridged()).add("n", &bridged());
    cluster
}

/// Members `a-0`, `a-1`, ... of gang `a`, all of which are needed.
fn members(gang: &str, count: u32, gpus: u32) -> Vec<Value> {
    (0..count).map(|number| member(&format!("{gang}-{number}"), gpus, gang, count)).collect()
}

fn create(cluster: &Cluster, pods: &[Value]) {
    for pod in pods {
        cluster.pod(pod);
    }
    // Gangs of which not all is known wait a moment for the rest.
    cluster.wait(2);
}

fn answer(cluster: &Cluster, pod: &str) -> Answer {
    cluster.store.update(|index| index.answer(&PodUid::from(pod), &|_| true))
}

#[test]
fn a_gang_that_asks_for_one_node_lies_on_one_node_or_waits() {
    let named = |annotation: &str, gang: &str, count: u32| {
        let mut pods = members(gang, count, 4);
        for pod in &mut pods {
            pod["metadata"]["annotations"][annotation] = "kubernetes.io/hostname".into();
        }
        pods
    };
    let cluster = two_nodes();
    create(&cluster, &named("gantry.dev/gang-required-level", "a", 2));
    assert_eq!(node(&cluster, "a-0"), node(&cluster, "a-1"));
    create(&cluster, &named("gantry.dev/gang-required-level", "b", 3));
    let Answer::Wait(why) = answer(&cluster, "b-0") else {
        panic!("two nodes have room, and one has not");
    };
    assert_eq!(why.reason, Reason::CannotFit);
    create(&cluster, &named("gantry.dev/gang-preferred-level", "c", 2));
    assert_eq!(node(&cluster, "c-0"), node(&cluster, "c-1"));
}

#[test]
fn an_owner_may_ask_for_one_node_too() {
    let native = json!({"spec": {
        "schedulingPolicy": {"gang": {"minCount": 3}},
        "schedulingConstraints": {"topology": [{"key": "kubernetes.io/hostname"}]},
    }});
    let kai = json!({"spec": {
        "minMember": 3, "topologyConstraint": {"requiredTopologyLevel": "kubernetes.io/hostname"},
    }});
    for (kind, object) in [(OwnerKind::PodGroup, native), (OwnerKind::KaiPodGroup, kai)] {
        let cluster = two_nodes();
        for number in 0..3 {
            let mut pod = pod(&format!("a-{number}"), 4);
            match kind {
                OwnerKind::PodGroup => pod["spec"]["schedulingGroup"] = json!({"podGroupName": "a"}),
                _ => pod["metadata"]["annotations"] = json!({"pod-group-name": "a"}),
            }
            cluster.pod(&pod);
        }
        let owner = OwnerRef { kind, namespace: "default".into(), name: "a".into(), part: "".into() };
        let facts = integrations::read(kind, "", &object);
        cluster.store.update(|index| index.owner_seen(&owner, Some(facts.into())));
        cluster.wait(2);
        let Answer::Wait(why) = answer(&cluster, "a-0") else {
            panic!("two nodes have room, and one has not");
        };
        assert_eq!(why.reason, Reason::CannotFit);
        // A node with more room comes.
        cluster.add("o", &plain(16));
        cluster.wait(2);
        let nodes: Vec<String> = (0..3).map(|number| node(&cluster, &format!("a-{number}"))).collect();
        assert_eq!(nodes, ["o"; 3]);
    }
}

/// The node that filter answers.
fn node(cluster: &Cluster, pod: &str) -> String {
    match answer(cluster, pod) {
        Answer::Node(node) => node.to_string(),
        other => panic!("{pod}: {other:?}"),
    }
}

fn admit(cluster: &Cluster, pod: &str, node: &str) -> Result<BindStep, BindError> {
    cluster.store.bind(&target(pod, node), None)
}

fn phase(cluster: &Cluster, gang: &str) -> GangPhase {
    let view = cluster.store.read(|index| index.gang_view("default", gang));
    view.unwrap().phase
}

/// A node of two NUMA nodes with four GPUs and four allocatable CPUs each, where kubelet refuses what spans both.
fn numa_node(name: &str, held: [u32; 2]) -> Value {
    let mut parts = bridged().into_parts();
    for gpu in &mut parts.gpus {
        gpu.numa = Some(if gpu.index < 4 { "0" } else { "1" }.parse().unwrap());
    }
    let mut node = gpu_node(name, &gantry_topology::Machine::new(parts).unwrap());
    node["spec"]["kubelet"] = json!({"policy": "single-numa-node"});
    let cpus = |node: usize| json!({"node": node, "total": 5, "allocatable": 4, "held": held[node]});
    node["status"]["cpus"] = json!([cpus(0), cpus(1)]);
    node
}

/// The same Guaranteed pods with three CPUs each.
fn guaranteed(mut pods: Vec<Value>) -> Vec<Value> {
    for pod in &mut pods {
        let limits = &mut pod["spec"]["containers"][0]["resources"]["limits"];
        limits["cpu"] = "3".into();
        limits["memory"] = "1Gi".into();
    }
    pods
}

/// The members' CPUs are on different NUMA nodes. Those of the first one are set aside for it when the second is bound.
#[test]
fn members_have_their_cpus_on_their_numa_node() {
    let cluster = Cluster::new(Options::default());
    cluster.node("n", 8).inventory(&numa_node("n", [0, 0]));
    let pods = guaranteed(members("a", 2, 1));
    create(&cluster, &pods);
    bind_all(&cluster, &pods);
    let free = cluster.free("n").replace(',', "").chars().filter(|gpu| *gpu < '4').count();
    assert_eq!(free, 3, "{}", cluster.free("n"));
}

/// Pods without GPUs may take the CPUs after the plan, and keep them.
#[test]
fn slots_without_cpus_move_after_a_while() {
    let cluster = Cluster::new(Options::default());
    for name in ["m", "n"] {
        cluster.node(name, 8).inventory(&numa_node(name, [0, 0]));
    }
    create(&cluster, &guaranteed(members("a", 2, 1)));
    let first = node(&cluster, "a-0");
    cluster.inventory(&numa_node(&first, [4, 4])).wait(5);
    // They come free in time.
    cluster.inventory(&numa_node(&first, [0, 0])).wait(5);
    cluster.inventory(&numa_node(&first, [4, 4])).wait(25);
    assert_eq!(node(&cluster, "a-0"), first);
    // Before the members' time to arrive is over.
    cluster.wait(8);
    assert_ne!(node(&cluster, "a-0"), first);
}

/// Writes the decision that is to be written, as the API server would take it.
fn commit(cluster: &Cluster) {
    let work = cluster.store.update(|index| index.take_work());
    let mut commits = work.into_iter().filter_map(|work| match work {
        Work::Commit { gang, decision } => Some((gang, decision)),
        _ => None,
    });
    let (gang, decision) = commits.next().unwrap();
    assert!(commits.next().is_none());
    cluster.store.update(|index| index.committed(&gang, &decision.id, Ok(())));
}

/// Writes the statuses there are, as the API server would take them and the watch show them.
fn write_down(cluster: &Cluster) {
    let statuses = cluster.store.update(|index| index.take_statuses());
    for (number, (gang, status)) in statuses.into_iter().enumerate() {
        let object = Object {
            uid: "object".into(),
            resource_version: number.to_string().into(),
            ours: true,
            spec: Ok(gantry_api::GangSpec::default()),
            status,
        };
        cluster.store.update(|index| index.gang_object_seen("default", &gang.object_name(), object));
    }
}

/// The GPUs of a member's grant.
fn granted(admitted: &BindStep) -> Vec<String> {
    let BindStep::Member(BindGrant::Grant { annotation, .. }) = admitted else {
        panic!("{admitted:?}");
    };
    let grant: gantry_api::Grant = serde_json::from_str(annotation).unwrap();
    let held = grant.held("nvidia.com/gpu");
    held.iter().map(ToString::to_string).collect()
}

/// Shows the pod as its grant says.
fn show(cluster: &Cluster, pod: &Value, node: &str, admitted: &BindStep) {
    let BindStep::Member(BindGrant::Grant { annotation, .. }) = admitted else {
        panic!("{admitted:?}");
    };
    let mut shown = bound(pod.clone(), node, 1, None);
    shown["metadata"]["annotations"]["gantry.dev/grant"] = (**annotation).into();
    cluster.pod(&shown);
}

#[test]
fn a_gang_has_its_place_as_a_whole_once_enough_members_exist() {
    let cluster = two_nodes();
    let pods = members("a", 4, 4);
    create(&cluster, &pods[..3]);
    assert!(matches!(answer(&cluster, "a-0"), Answer::Wait(_)));
    assert_eq!((cluster.free("m").len(), cluster.free("n").len()), (15, 15));
    create(&cluster, &pods[3..]);
    assert_eq!((cluster.free("m"), cluster.free("n")), (String::new(), String::new()));
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
    let mut nodes: Vec<String> = (0..4).map(|number| node(&cluster, &format!("a-{number}"))).collect();
    nodes.sort();
    assert_eq!(nodes, ["m", "m", "n", "n"]);
}

#[test]
fn what_is_kept_for_a_gang_no_single_pod_gets() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 2, 8));
    cluster.pod(&pod("single", 1));
    let error = admit(&cluster, "single", "n").unwrap_err();
    assert!(matches!(&error, BindError::NotFree { node, .. } if node.as_str() == "n"), "{error:?}");
}

#[test]
fn a_gang_that_does_not_fit_keeps_nothing() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 3, 8));
    assert!(matches!(answer(&cluster, "a-0"), Answer::Wait(_)));
    assert_eq!((cluster.free("m").len(), cluster.free("n").len()), (15, 15));
    // Room comes: it is planned at once, and its members that are parked are woken; the others are in kube-scheduler's queue.
    cluster.add("o", &bridged());
    assert_eq!(cluster.free("o"), "");
    let called = cluster.store.update(|index| index.take_called(10));
    let called: Vec<&str> = called.iter().map(|(uid, _)| uid.as_str()).collect();
    assert_eq!(called, ["a-0"]);
}

#[test]
fn members_wait_at_the_barrier_and_get_reserved_devices() {
    let cluster = two_nodes();
    let pods = members("a", 4, 4);
    create(&cluster, &pods);
    let nodes: Vec<String> = (0..4).map(|number| node(&cluster, &format!("a-{number}"))).collect();
    for number in 0..4 {
        let admitted = admit(&cluster, &format!("a-{number}"), &nodes[number]);
        assert!(matches!(admitted, Ok(BindStep::Wait(_))), "{admitted:?}");
    }
    commit(&cluster);
    let mut all = Vec::new();
    for number in 0..4 {
        let uid = format!("a-{number}");
        let admitted = admit(&cluster, &uid, &nodes[number]).unwrap();
        // Asked again it answers the same.
        assert_eq!(admit(&cluster, &uid, &nodes[number]).unwrap(), admitted);
        all.extend(granted(&admitted));
        let now = cluster.now();
        cluster.store.update(|index| {
            index.finish(now, &target(&uid, &nodes[number]), Outcome::Bound);
            index.bind_ended(&uid.as_str().into(), BindEnd::Bound);
        });
        show(&cluster, &pods[number], &nodes[number], &admitted);
    }
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 16);
    assert_eq!(phase(&cluster, "a"), GangPhase::Bound);
    assert_eq!((cluster.free("m"), cluster.free("n")), (String::new(), String::new()));
    let totals = cluster.store.read(|index| index.gang_totals());
    assert_eq!(totals.places, 0);
}

#[test]
fn a_member_that_leaves_the_barrier_is_not_there_any_more() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 2, 8));
    let nodes = [node(&cluster, "a-0"), node(&cluster, "a-1")];
    admit(&cluster, "a-0", &nodes[0]).unwrap();
    cluster.store.update(|index| index.withdraw(&"a-0".into()));
    assert!(matches!(admit(&cluster, "a-1", &nodes[1]), Ok(BindStep::Wait(_))));
    assert!(cluster.store.update(|index| index.take_work()).is_empty());
    // It comes again.
    assert!(matches!(admit(&cluster, "a-0", &nodes[0]), Ok(BindStep::Wait(_))));
    commit(&cluster);
    assert!(matches!(admit(&cluster, "a-0", &nodes[0]), Ok(BindStep::Member(_))));
}

#[test]
fn a_place_whose_device_falls_sick_is_planned_anew() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 1, 4));
    let first = node(&cluster, "a-0");
    let other = if first == "m" { "n" } else { "m" };
    let mut sick = gpu_node(&first, &bridged());
    for device in sick["status"]["devices"].as_array_mut().unwrap() {
        device["healthy"] = false.into();
        device["reason"] = "Xid 79".into();
    }
    cluster.inventory(&sick);
    assert_eq!(node(&cluster, "a-0"), other);
    assert_eq!(cluster.free(&first), "");
    assert_eq!(cluster.free(other).len(), 7);
}

#[test]
fn reservation_lost_while_committing_moves_no_other_gang() {
    let cluster = two_nodes();
    cluster.pod(&bound(pod("x", 8), "n", 1, Some("0-7")));
    create(&cluster, &members("a", 1, 4));
    create(&cluster, &members("b", 1, 4));
    let place = node(&cluster, "a-0");
    assert_eq!(node(&cluster, "b-0"), place);
    // The decision is being written.
    assert!(matches!(admit(&cluster, "a-0", &place), Ok(BindStep::Wait(_))));
    let view = cluster.store.read(|index| index.gang_view("default", "a")).unwrap();
    let mut sick = gpu_node(&place, &bridged());
    for device in sick["status"]["devices"].as_array_mut().unwrap() {
        if view.places[0].devices.iter().any(|id| device["id"] == id.as_str()) {
            device["healthy"] = false.into();
            device["reason"] = "Xid 79".into();
        }
    }
    cluster.store.update(|index| index.take_moved());
    cluster.inventory(&sick);
    cluster.pod(&pod("y", 1));
    let moved = cluster.store.update(|index| index.take_moved());
    assert!(moved.iter().all(|gang| *gang.name != *"b"), "{moved:?}");
    assert_eq!(node(&cluster, "b-0"), place);
}

#[test]
fn a_place_on_a_node_that_is_gone_is_planned_anew() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 1, 4));
    let first = node(&cluster, "a-0");
    cluster.store.update(|index| index.node_deleted(&first));
    assert_ne!(node(&cluster, "a-0"), first);
}

#[test]
fn devices_that_kubelet_gave_away_end_the_reservation() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 1, 8));
    let first = node(&cluster, "a-0");
    // Somebody set its node by hand, and kubelet gave it what was free to kubelet.
    cluster.pod(&bound(pod("rude", 1), &first, 1, None));
    let mut truth = gpu_node(&first, &bridged());
    truth["status"]["holders"] = json!([crate::fixtures::holder(&first, "rude", Some("rude"), "3")]);
    cluster.inventory(&truth);
    assert_ne!(node(&cluster, "a-0"), first);
}

#[test]
fn members_that_a_list_does_not_name_are_gone() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 2, 8));
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
    cluster.list(Source::Pods, |cluster| {
        cluster.pod(&members("a", 2, 8)[0]);
    });
    cluster.wait(1);
    assert!(matches!(answer(&cluster, "a-0"), Answer::Wait(_)));
    assert_eq!((cluster.free("m").len(), cluster.free("n").len()), (15, 15));
}

#[test]
fn a_pod_that_only_a_call_speaks_of_counts_but_not_for_long() {
    let cluster = two_nodes();
    let pods = members("a", 2, 8);
    create(&cluster, &pods[..1]);
    let facts = crate::fixtures::facts(&pods[1]);
    cluster.store.update(|index| index.observe_called(facts));
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
    cluster.wait(20);
    assert_ne!(phase(&cluster, "a"), GangPhase::Reserved);
    assert_eq!((cluster.free("m").len(), cluster.free("n").len()), (15, 15));
}

#[test]
fn late_call_does_not_revive_a_deleted_pod() {
    let cluster = two_nodes();
    let pods = members("a", 2, 8);
    create(&cluster, &pods);
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
    for pod in &pods {
        cluster.gone(pod);
    }
    for pod in &pods {
        let facts = crate::fixtures::facts(pod);
        cluster.store.update(|index| index.observe_called(facts));
    }
    cluster.wait(1);
    assert_eq!((cluster.free("m").len(), cluster.free("n").len()), (15, 15));
    // No more than the time that such a call may take.
    cluster.wait(120);
    let kept = cluster.store.read(|index| index.gangs.members.departed());
    assert_eq!(kept, 0);
}

#[test]
fn bound_member_stays_in_its_gang_without_its_annotation() {
    for word in [None, Some("none"), Some("b")] {
        let cluster = two_nodes();
        let pods = members("a", 2, 8);
        create(&cluster, &pods);
        let nodes = bind_all(&cluster, &pods);
        let mut edited = bound(pods[0].clone(), &nodes[0], 1, None);
        match word {
            Some(word) => edited["metadata"]["annotations"][names::GANG_ANNOTATION] = word.into(),
            None => edited["metadata"]["annotations"] = json!({}),
        }
        cluster.pod(&edited);
        cluster.wait(7);
        assert_eq!(phase(&cluster, "a"), GangPhase::Bound, "{word:?}");
        // Nor is it taken for lost once it has ended.
        edited["status"]["phase"] = "Succeeded".into();
        cluster.pod(&edited);
        cluster.wait(7);
        assert_eq!(phase(&cluster, "a"), GangPhase::Bound, "{word:?}");
    }
}

#[test]
fn former_leader_does_not_bind_a_waiting_member() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 2, 8));
    let node = node(&cluster, "a-0");
    assert!(matches!(admit(&cluster, "a-0", &node), Ok(BindStep::Wait(_))));
    cluster.store.update(|index| index.stand_down());
    // It is notified, and it asks again before its call is dropped.
    let error = admit(&cluster, "a-0", &node).unwrap_err();
    assert!(matches!(error, BindError::Gang(_)), "{error:?}");
}

/// Binds all of a gang whose members have their places; where each is.
fn bind_all(cluster: &Cluster, pods: &[Value]) -> Vec<String> {
    let uids: Vec<&str> = pods.iter().map(|pod| pod["metadata"]["uid"].as_str().unwrap()).collect();
    let nodes: Vec<String> = uids.iter().map(|uid| node(cluster, uid)).collect();
    for (uid, node) in uids.iter().zip(&nodes) {
        admit(cluster, uid, node).unwrap();
    }
    commit(cluster);
    for ((uid, node), pod) in uids.iter().zip(&nodes).zip(pods) {
        let admitted = admit(cluster, uid, node).unwrap();
        let now = cluster.now();
        cluster.store.update(|index| {
            index.finish(now, &target(uid, node), Outcome::Bound);
            index.bind_ended(&PodUid::from(*uid), BindEnd::Bound);
        });
        show(cluster, pod, node, &admitted);
    }
    nodes
}

#[test]
fn replacement_gets_the_reservation_of_the_lost_member() {
    let cluster = two_nodes();
    let pods = members("a", 2, 8);
    create(&cluster, &pods);
    let nodes = bind_all(&cluster, &pods);
    let lost = bound(pods[1].clone(), &nodes[1], 1, None);
    cluster.gone(&lost);
    let replacement = member("a-1b", 8, "a", 2);
    create(&cluster, &[replacement]);
    assert_eq!(node(&cluster, "a-1b"), nodes[1]);
    // The processes of the pod that was deleted may live on for a while.
    assert!(matches!(admit(&cluster, "a-1b", &nodes[1]), Ok(BindStep::Wait(_))));
    cluster.wait(6);
    let Ok(BindStep::Wait(awaited)) = admit(&cluster, "a-1b", &nodes[1]) else {
        panic!("its place is not written down as its own");
    };
    assert_eq!(awaited.why.as_deref(), Some("its reservation is not written to the Gang yet"));
    let notifier = cluster.store.notifier(&awaited.gang);
    let mut notified = std::pin::pin!(notifier.notified());
    assert!(!notified.as_mut().enable());
    write_down(&cluster);
    assert!(notified.as_mut().enable(), "who waits for that hears of it");
    let admitted = admit(&cluster, "a-1b", &nodes[1]).unwrap();
    assert_eq!(granted(&admitted).len(), 8);
}

#[test]
fn reservations_keep_their_nodes_after_renumbering() {
    let cluster = Cluster::new(Options::default());
    for number in 0..600 {
        cluster.node(&format!("gone-{number}"), 0);
    }
    cluster.add("n", &bridged());
    create(&cluster, &members("a", 1, 8));
    for number in 0..600 {
        cluster.store.update(|index| index.node_deleted(&format!("gone-{number}")));
    }
    assert!(cluster.store.snapshot().names.len() < 600);
    assert_eq!(cluster.free("n"), "");
    admit(&cluster, "a-0", "n").unwrap();
    commit(&cluster);
    assert_eq!(granted(&admit(&cluster, "a-0", "n").unwrap()).len(), 8);
}

#[test]
fn devices_allocated_by_kube_scheduler_are_left_to_it() {
    let cluster = two_nodes();
    let mut pods = members("a", 2, 2);
    for pod in &mut pods {
        let limits = &mut pod["spec"]["containers"][0]["resources"]["limits"];
        limits["deviceclass.resource.kubernetes.io/rdma"] = "1".into();
    }
    create(&cluster, &pods);
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
}

#[test]
fn a_gang_counts_what_else_its_members_need() {
    let cluster = two_nodes();
    let mut pods = members("a", 2, 1);
    for pod in &mut pods {
        // More than half of a node each.
        pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": "40"});
    }
    create(&cluster, &pods);
    assert_ne!(node(&cluster, "a-0"), node(&cluster, "a-1"));
    // Nothing of that kind fits beside them.
    let mut more = members("b", 1, 1);
    more[0]["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": "40"});
    create(&cluster, &more);
    assert!(matches!(answer(&cluster, "b-0"), Answer::Wait(_)));
    // The gang goes, and with it what it kept.
    for pod in &pods {
        cluster.gone(pod);
    }
    assert!(matches!(answer(&cluster, "b-0"), Answer::Node(_)));
}
