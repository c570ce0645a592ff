//! Gangs that must go on though something went wrong midway, and calls that must not be made for nothing.

use std::pin::pin;

use gantry_gang::protocol::CommitFailure;

use super::*;

/// A gang of two on two nodes, decided; the node of each.
fn decided(cluster: &Cluster) -> [String; 2] {
    create(cluster, &members("a", 2, 8));
    let nodes = [node(cluster, "a-0"), node(cluster, "a-1")];
    for (number, node) in nodes.iter().enumerate() {
        admit(cluster, &format!("a-{number}"), node).unwrap();
    }
    commit(cluster);
    nodes
}

fn not_ready(cluster: &Cluster, node: &str) {
    let mut trouble = gpu_node(node, &bridged());
    trouble["status"]["conditions"] = json!([{
        "type": "Ready", "status": "False", "reason": "PluginStopped", "message": "the plugin has stopped",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]);
    cluster.inventory(&trouble);
}

/// What filter answers where kube-scheduler offers just these nodes.
fn answer_within(cluster: &Cluster, pod: &str, nodes: &[&str]) -> Answer {
    let snapshot = cluster.store.snapshot();
    let numbers: Vec<_> = nodes.iter().filter_map(|node| snapshot.find(node)).collect();
    cluster.store.update(|index| {
        let uid = PodUid::from(pod);
        let answer = index.answer(&uid, &|node| nodes.contains(&node.as_str()));
        index.offered(&uid, numbers.into_iter());
        answer
    })
}

#[test]
fn gang_is_planned_on_the_nodes_that_are_offered() {
    let cluster = Cluster::new(Options::default());
    for name in ["g", "h", "i", "j", "k", "l", "y", "z"] {
        cluster.add(name, &bridged());
    }
    create(&cluster, &members("a", 2, 8));
    // Its volumes, say, are where `y` and `z` are.
    for _ in 0..3 {
        assert!(matches!(answer_within(&cluster, "a-0", &["y", "z"]), Answer::Wait(_)));
    }
    let nodes = [node(&cluster, "a-0"), node(&cluster, "a-1")];
    assert_eq!(nodes, ["y", "z"], "and not, one after the other, on all the others");
}

#[test]
fn gang_is_planned_on_a_node_added_during_a_relist() {
    let cluster = Cluster::new(Options::default());
    cluster.add("m", &bridged());
    cluster.inventory(&gpu_node("n", &bridged()));
    create(&cluster, &members("a", 2, 8));
    assert_eq!(phase(&cluster, "a"), GangPhase::Queued);
    cluster.list(Source::Nodes, |cluster| {
        cluster.node("m", 8).node("n", 8);
    });
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
}

/// What one kind of members is offered says nothing of where the others can go.
#[test]
fn offered_nodes_restrict_one_shape_only() {
    let cluster = Cluster::new(Options::default());
    for (name, pool) in [("g", "a"), ("h", "b"), ("i", "b"), ("j", "b")] {
        cluster.add(name, &bridged());
        let node = cluster.store.snapshot().find(name).unwrap();
        cluster.store.update(|index| {
            let facts = index.facts.resources.nodes()[node.0 as usize].facts.as_deref();
            let mut facts = facts.unwrap().clone();
            facts.labels.insert("pool".into(), pool.into());
            index.node_described(facts.into());
        });
    }
    let (launcher, worker) = (member("a-0", 1, "a", 2), member("a-1", 8, "a", 2));
    let of_pool = |mut pod: Value, pool: &str| {
        pod["spec"]["nodeSelector"] = json!({"pool": pool});
        pod
    };
    create(&cluster, &[of_pool(launcher, "a"), of_pool(worker, "b")]);
    assert_eq!([node(&cluster, "a-0"), node(&cluster, "a-1")], ["g", "h"]);
    // Something that only kube-scheduler knows is wrong with `h` and `i`.
    for _ in 0..3 {
        answer_within(&cluster, "a-1", &["j"]);
    }
    assert_eq!([node(&cluster, "a-0"), node(&cluster, "a-1")], ["g", "j"]);
}

#[test]
fn a_gang_that_cannot_go_where_it_is_offered_waits_and_says_why() {
    let cluster = Cluster::new(Options::default());
    for name in ["g", "h", "z"] {
        cluster.add(name, &bridged());
    }
    let mut pods = members("a", 2, 8);
    for pod in &mut pods {
        pod["status"]["conditions"] = json!([{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/3 nodes are available: 1 gang default/a: node g, where it is to go, is not offered, \
                        2 node(s) had volume node affinity conflict. preemption: 0/3 nodes are available: 3 none.",
        }]);
    }
    create(&cluster, &pods);
    for _ in 0..3 {
        answer_within(&cluster, "a-0", &["z"]);
    }
    let Answer::Wait(why) = answer(&cluster, "a-0") else {
        panic!("no node of the plan is offered");
    };
    assert_eq!(why.reason, Reason::Backoff);
    // With all nodes again.
    cluster.wait(3);
    assert_eq!(node(&cluster, "a-0"), "g");
}

#[test]
fn member_with_a_lost_reservation_gets_another() {
    let cluster = two_nodes();
    let nodes = decided(&cluster);
    cluster.add("o", &bridged());
    not_ready(&cluster, &nodes[0]);
    // It comes, and its devices cannot be set aside: no Binding is on its way.
    assert!(matches!(admit(&cluster, "a-0", &nodes[0]), Ok(BindStep::Wait(_))));
    cluster.store.update(|index| index.withdraw(&"a-0".into()));
    cluster.store.update(|index| index.node_deleted(&nodes[0]));
    assert_eq!(node(&cluster, "a-0"), "o");
    write_down(&cluster);
    assert_eq!(granted(&admit(&cluster, "a-0", "o").unwrap()).len(), 8);
}

#[test]
fn member_with_an_expired_bind_may_move() {
    let cluster = two_nodes();
    let nodes = decided(&cluster);
    cluster.add("o", &bridged());
    admit(&cluster, "a-0", &nodes[0]).unwrap();
    let now = cluster.now();
    cluster.store.update(|index| {
        index.finish(now, &target("a-0", &nodes[0]), Outcome::Unsure);
        index.bind_ended(&"a-0".into(), BindEnd::Unsure);
    });
    cluster.store.update(|index| index.node_deleted(&nodes[0]));
    assert!(
        matches!(answer(&cluster, "a-0"), Answer::Node(node) if node.as_str() == nodes[0]),
        "it may be bound there"
    );
    cluster.wait(70);
    assert_eq!(node(&cluster, "a-0"), "o");
}

#[test]
fn member_listed_as_before_its_bind_is_bound_again() {
    // etcd was restored, and the watch has not shown what the bind found: that the pod is bound, or that it is gone.
    for end in [BindEnd::Bound, BindEnd::Gone] {
        let cluster = two_nodes();
        let nodes = decided(&cluster);
        admit(&cluster, "a-0", &nodes[0]).unwrap();
        let now = cluster.now();
        let outcome = if end == BindEnd::Bound { Outcome::Bound } else { Outcome::Failed };
        cluster.store.update(|index| {
            index.bind_ended(&"a-0".into(), end);
            index.finish(now, &target("a-0", &nodes[0]), outcome);
        });
        cluster.wait(1).list(Source::Pods, |cluster| {
            for pod in members("a", 2, 8) {
                cluster.pod(&pod);
            }
        });
        cluster.wait(6);
        assert_eq!(node(&cluster, "a-0"), nodes[0], "{end:?}");
        write_down(&cluster);
        assert_eq!(granted(&admit(&cluster, "a-0", &nodes[0]).unwrap()).len(), 8, "{end:?}");
    }
}

#[test]
fn a_decision_whose_object_is_gone_is_written_again() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 1, 8));
    let place = node(&cluster, "a-0");
    admit(&cluster, "a-0", &place).unwrap();
    let commits = |cluster: &Cluster| {
        let work = cluster.store.update(|index| index.take_work());
        let commits = work.into_iter().filter_map(|work| match work {
            Work::Commit { gang, decision } => Some((gang, decision)),
            _ => None,
        });
        commits.collect::<Vec<_>>()
    };
    let (gang, decision) = commits(&cluster).remove(0);
    // It could not be made, or somebody has deleted it; the read finds nothing that was not known to be gone.
    cluster.store.update(|index| index.committed(&gang, &decision.id, Err(CommitFailure::Unknown)));
    cluster.store.update(|index| index.gang_object_gone("default", &gang.object_name()));
    assert_eq!(commits(&cluster), [(gang, decision)]);
}

#[test]
fn those_who_wait_are_not_asked_again_for_each_that_comes() {
    let cluster = two_nodes();
    create(&cluster, &members("a", 4, 4));
    let nodes: Vec<String> = (0..4).map(|number| node(&cluster, &format!("a-{number}"))).collect();
    let Ok(BindStep::Wait(awaited)) = admit(&cluster, "a-0", &nodes[0]) else {
        panic!("it does not wait");
    };
    let notifier = cluster.store.notifier(&awaited.gang);
    let mut notified = pin!(notifier.notified());
    notified.as_mut().enable();
    for number in 1..4 {
        admit(&cluster, &format!("a-{number}"), &nodes[number]).unwrap();
        assert!(!notified.as_mut().enable(), "{number}");
    }
    commit(&cluster);
    assert!(notified.as_mut().enable(), "the gang is decided");
}

#[test]
fn a_place_that_a_sibling_really_has_is_planned_anew() {
    let cluster = Cluster::new(Options::default());
    cluster.add("m", &bridged());
    let pods = members("a", 2, 4);
    create(&cluster, &pods);
    admit(&cluster, "a-0", "m").unwrap();
    admit(&cluster, "a-1", "m").unwrap();
    commit(&cluster);
    let first = admit(&cluster, "a-0", "m").unwrap();
    // Kubelet gave it others than were granted: those that its sibling was to get.
    let others = match granted(&first)[0].ends_with('0') {
        true => "4,5,6,7",
        false => "0,1,2,3",
    };
    cluster.store.update(|index| index.bind_ended(&"a-0".into(), BindEnd::Bound));
    show(&cluster, &pods[0], "m", &first);
    let mut truth = gpu_node("m", &bridged());
    truth["status"]["holders"] = json!([crate::fixtures::holder("m", "a-0", Some("a-0"), others)]);
    cluster.inventory(&truth);
    write_down(&cluster);
    assert_eq!(node(&cluster, "a-1"), "m");
    write_down(&cluster);
    let second = granted(&admit(&cluster, "a-1", "m").unwrap());
    assert_eq!(second, granted(&first), "what is free now");
}

/// What a member is granted where its place may have to be written down first.
fn placed(cluster: &Cluster, pod: &str) -> BindStep {
    for _ in 0..4 {
        node(cluster, pod);
        match admit(cluster, pod, "m").unwrap() {
            BindStep::Wait(_) => write_down(cluster),
            admitted => return admitted,
        }
    }
    panic!("{pod} waits for ever");
}

fn bound_as(cluster: &Cluster, pod: &Value, admitted: &BindStep) {
    let uid = PodUid::from(pod["metadata"]["name"].as_str().unwrap());
    let now = cluster.now();
    cluster.store.update(|index| {
        index.finish(now, &target(uid.as_str(), "m"), Outcome::Bound);
        index.bind_ended(&uid, BindEnd::Bound);
    });
    show(cluster, pod, "m", admitted);
}

#[test]
fn overlapping_reservations_of_lost_members_do_not_block() {
    let cluster = Cluster::new(Options::default());
    cluster.add("m", &bridged());
    let pods = members("a", 4, 2);
    create(&cluster, &pods);
    for number in 0..4 {
        admit(&cluster, &format!("a-{number}"), "m").unwrap();
    }
    commit(&cluster);
    for number in [2, 3] {
        let admitted = placed(&cluster, &format!("a-{number}"));
        bound_as(&cluster, &pods[number], &admitted);
    }
    // Kubelet gives the first the devices of the second, which then gets what was granted to the first.
    let view = cluster.store.read(|index| index.gang_view("default", "a")).unwrap();
    let second = view.places.iter().find(|place| place.pod == Some("a-1".into()));
    let others = second.unwrap().words.trim_start_matches("GPU ").to_owned();
    let first = placed(&cluster, "a-0");
    bound_as(&cluster, &pods[0], &first);
    let mut truth = gpu_node("m", &bridged());
    truth["status"]["holders"] = json!([crate::fixtures::holder("m", "a-0", Some("a-0"), &others)]);
    cluster.inventory(&truth);
    let second = placed(&cluster, "a-1");
    assert_eq!(granted(&second), granted(&first));
    bound_as(&cluster, &pods[1], &second);
    write_down(&cluster);
    // Both are lost, and the places of both are kept for their replacements.
    for pod in &pods[..2] {
        cluster.gone(&bound(pod.clone(), "m", 1, None));
    }
    cluster.inventory(&gpu_node("m", &bridged()));
    cluster.wait(6);
    create(&cluster, &[member("a-0b", 2, "a", 4), member("a-1b", 2, "a", 4)]);
    let (third, fourth) = (placed(&cluster, "a-0b"), placed(&cluster, "a-1b"));
    let (third, fourth) = (granted(&third), granted(&fourth));
    assert!(third.iter().all(|id| !fourth.contains(id)), "{third:?} {fourth:?}");
}
