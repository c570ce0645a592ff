//! Pods that another scheduler is to place: before they are bound they take part in nothing.

use super::*;

/// Pods that a scheduler of that name is to place, with a priority.
fn of(scheduler: &str, priority: i32, mut pods: Vec<Value>) -> Vec<Value> {
    for pod in &mut pods {
        pod["spec"]["schedulerName"] = scheduler.into();
        pod["spec"]["priority"] = priority.into();
    }
    pods
}

#[test]
fn gang_of_another_scheduler_has_no_reservation() {
    let cluster = two_nodes();
    let theirs = of("koord-scheduler", 0, members("theirs", 2, 8));
    create(&cluster, &theirs);
    let view = cluster.store.read(|index| index.gang_view("default", "theirs")).unwrap();
    assert_eq!((view.reason, view.exist, view.min), (Reason::WaitingForMembers, 0, 2));
    assert_eq!(phase(&cluster, "theirs"), GangPhase::Pending);
    assert_eq!((cluster.free("m").len(), cluster.free("n").len()), (15, 15));
    // What they have once they are bound is theirs.
    for (pod, node) in theirs.into_iter().zip(["m", "n"]) {
        cluster.pod(&bound(pod, node, 1, Some("0-7")));
    }
    create(&cluster, &members("ours", 1, 1));
    assert_eq!(phase(&cluster, "ours"), GangPhase::Queued);
}

#[test]
fn gang_of_another_scheduler_never_preempts() {
    let cluster = two_nodes();
    let low = members("low", 2, 8);
    create(&cluster, &low);
    bind_all(&cluster, &low);
    create(&cluster, &of("koord-scheduler", 10, members("theirs", 2, 8)));
    cluster.wait(120);
    assert_eq!(cluster.store.update(|index| index.take_work()), []);
    assert!(cluster.store.snapshot().kept.is_none());
}

#[test]
fn pod_of_another_scheduler_is_ignored_until_bound() {
    let cluster = two_nodes();
    let mut theirs = of("koord-scheduler", 10, vec![pod("theirs", 8)]).remove(0);
    theirs["status"]["nominatedNodeName"] = "n".into();
    theirs["status"]["conditions"] = json!([{
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
    }]);
    cluster.pod(&theirs);
    assert!(cluster.store.snapshot().promised.is_none());
    assert_eq!(cluster.store.read(|index| index.insufficient_pods()), []);
    cluster.pod(&bound(theirs, "n", 1, Some("0-7")));
    assert_eq!(cluster.free("n"), "");
}

#[test]
fn scheduler_is_recorded_by_its_first_call() {
    let cluster = two_nodes();
    create(&cluster, &of("gpu-profile", 0, members("a", 2, 8)));
    assert_eq!(phase(&cluster, "a"), GangPhase::Pending);
    cluster.store.update(|index| index.record_scheduler("gpu-profile"));
    cluster.wait(1);
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
    create(&cluster, &of("koord-scheduler", 0, members("b", 1, 1)));
    assert_eq!(phase(&cluster, "b"), GangPhase::Pending);
}

#[test]
fn schedulers_that_are_named_bring_their_pods_and_others_do_not() {
    let cluster = two_nodes();
    cluster.store.update(|index| index.set_schedulers(["gpu-profile".into()]));
    create(&cluster, &of("gpu-profile", 0, members("a", 1, 8)));
    create(&cluster, &members("b", 1, 8));
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
    assert_eq!(phase(&cluster, "b"), GangPhase::Pending);
}

#[test]
fn pod_created_with_a_node_is_no_member() {
    let cluster = two_nodes();
    // Of a priority that others lack. They have the gang's name, a node, and no grant: no scheduler has brought them.
    let mut own = members("a", 3, 4);
    for brought in &mut own[1..] {
        brought["spec"]["priority"] = 1000.into();
        cluster.pod(&bound(brought.clone(), "n", 1, None));
    }
    cluster.pod(&own[0]);
    let view = || cluster.store.read(|index| index.gang_view("default", "a")).unwrap();
    assert_eq!(
        (view().phase, view().reason, view().priority),
        (GangPhase::Pending, Reason::WaitingForMembers, 0)
    );
    insta::assert_snapshot!(view().message, @"1 of 3 members exist; scheduled by spec.nodeName: 2; source: annotation gantry.dev/gang-min of its pods");
    // Nothing is held for them once they are gone, nor do they count when they have ended.
    for brought in &own[1..] {
        let mut ended = bound(brought.clone(), "n", 1, None);
        ended["status"]["phase"] = "Succeeded".into();
        cluster.pod(&ended);
    }
    assert_eq!((phase(&cluster, "a"), view().places.len()), (GangPhase::Pending, 0));
    assert_eq!((cluster.free("m").len(), cluster.free("n").len()), (15, 15));
}

#[test]
fn bound_pod_of_another_scheduler_is_no_member() {
    let cluster = two_nodes();
    let pods = members("a", 2, 2);
    cluster.pod(&bound(of("koord-scheduler", 5, pods[..1].to_vec()).remove(0), "n", 1, None));
    cluster.pod(&pods[1]);
    let view = cluster.store.read(|index| index.gang_view("default", "a")).unwrap();
    assert_eq!((view.reason, view.priority), (Reason::WaitingForMembers, 0));
    insta::assert_snapshot!(view.message, @"1 of 2 members exist; scheduled by koord-scheduler: 1; source: annotation gantry.dev/gang-min of its pods");
}

#[test]
fn member_bound_past_the_extender_counts_if_brought() {
    let cluster = two_nodes();
    let pods = members("a", 2, 2);
    cluster.pod(&pods[0]);
    cluster.pod(&bound(pods[0].clone(), "n", 1, None));
    cluster.pod(&pods[1]);
    assert_eq!(cluster.store.read(|index| index.gang_view("default", "a")).unwrap().exist, 2);
}

#[test]
fn decided_member_without_grant_counts_after_a_restart() {
    let cluster = two_nodes();
    let pods = members("a", 2, 2);
    create(&cluster, &pods);
    let nodes = bind_all(&cluster, &pods);
    write_down(&cluster);
    assert_eq!(phase(&cluster, "a"), GangPhase::Bound);
    cluster.store.update(|index| {
        index.stand_down();
        index.lead();
    });
    for (pod, node) in pods.iter().zip(&nodes) {
        cluster.pod(&bound(pod.clone(), node, 1, None));
    }
    cluster.wait(1);
    assert_eq!(phase(&cluster, "a"), GangPhase::Bound);
}

#[test]
fn member_bound_past_the_extender_counts_after_a_restart() {
    // Two of three were bound by a client that does not call the extender, and have ended. The next process finds them without a grant;
    // the object shows that they were members.
    let cluster = two_nodes();
    let mut pods = members("a", 4, 2);
    for pod in &mut pods {
        pod["metadata"]["annotations"]["gantry.dev/gang-min"] = "3".into();
        cluster.pod(pod);
    }
    for pod in &pods[..2] {
        cluster.pod(&bound(pod.clone(), "n", 1, None));
    }
    write_down(&cluster);
    let object = cluster.store.read(|index| index.gang_view("default", "a")).unwrap();
    assert_eq!(object.exist, 4);
    cluster.store.update(|index| {
        index.stand_down();
        index.lead();
    });
    for pod in &pods[..2] {
        let mut ended = bound(pod.clone(), "n", 1, None);
        ended["status"]["phase"] = "Succeeded".into();
        cluster.pod(&ended);
    }
    cluster.wait(1);
    assert_eq!(cluster.store.read(|index| index.gang_view("default", "a")).unwrap().exist, 4);
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
}

#[test]
fn standby_remembers_members_that_waited() {
    // This process stood by while the pods waited, and while another client bound one of them.
    let cluster = two_nodes();
    cluster.store.update(|index| index.stand_down());
    let pods = members("a", 2, 2);
    for pod in &pods {
        cluster.pod(pod);
    }
    cluster.pod(&bound(pods[0].clone(), "n", 1, None));
    cluster.store.update(|index| index.lead());
    cluster.wait(2);
    assert_eq!(cluster.store.read(|index| index.gang_view("default", "a")).unwrap().exist, 2);
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
}
