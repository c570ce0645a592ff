//! Two gangs that run have each lost a member, and each holds what the other lacks.

use super::*;
use crate::index::Disruptions;

/// A gang of two, bound; its pods and where they are.
fn runs(cluster: &Cluster, gang: &str, priority: i32) -> ([Value; 2], [String; 2]) {
    let pods = [0, 1].map(|number| pod_of_gang(gang, number, priority));
    create(cluster, &pods);
    let names = [0, 1].map(|number| format!("{gang}-{number}"));
    let nodes = [0, 1].map(|number| node(cluster, &names[number]));
    for (pod, node) in names.iter().zip(&nodes) {
        admit(cluster, pod, node).unwrap();
    }
    commit(cluster);
    write_down(cluster);
    for number in 0..2 {
        bind(cluster, &pods[number], &names[number], &nodes[number]);
    }
    assert_eq!(phase(cluster, gang), GangPhase::Bound);
    (pods, nodes)
}

fn pod_of_gang(gang: &str, number: u32, priority: i32) -> Value {
    let mut pod = member(&format!("{gang}-{number}"), 8, gang, 2);
    pod["spec"]["priority"] = priority.into();
    pod["metadata"]["labels"] = json!({"app": gang});
    pod
}

fn bind(cluster: &Cluster, pod: &Value, name: &str, node: &str) {
    let admitted = admit(cluster, name, node).unwrap();
    let (now, target) = (cluster.now(), target(name, node));
    cluster.store.update(|index| {
        index.bind_ended(&name.into(), BindEnd::Bound);
        index.finish(now, &target, Outcome::Bound);
    });
    show(cluster, pod, node, &admitted);
}

/// Gangs `a` and `b`, of these priorities, run on four nodes; two of those are lost, one of each gang, and each gets a pod for the one that
/// it has lost.
fn each_short(priorities: [i32; 2]) -> (Cluster, [(Value, String); 2]) {
    let cluster = Cluster::new(Options::default());
    for name in ["m", "n", "o", "p"] {
        cluster.add(name, &bridged());
    }
    budget(&cluster, 2);
    let gangs = ["a", "b"];
    let run = [0, 1].map(|at| runs(&cluster, gangs[at], priorities[at]));
    let left = run.map(|([first, second], [node, lost])| {
        cluster.store.update(|index| index.node_deleted(&lost));
        cluster.gone(&bound(second, &lost, 1, None));
        (first, node)
    });
    for (gang, priority) in gangs.into_iter().zip(priorities) {
        create(&cluster, &[pod_of_gang(gang, 2, priority)]);
        assert_eq!(phase(&cluster, gang), GangPhase::Degraded);
    }
    cluster.store.update(|index| index.take_work());
    (cluster, left)
}

/// A disruption budget of each gang that allows so many pods to go.
fn budget(cluster: &Cluster, allowed: i32) {
    let read = |app: &str| {
        let object = json!({
            "metadata": {"namespace": "default", "name": app},
            "spec": {"selector": {"matchLabels": {"app": app}}},
            "status": {"disruptionsAllowed": allowed, "currentHealthy": 2, "desiredHealthy": 0, "expectedPods": 2},
        });
        Disruptions::read(&serde_json::from_value(object).unwrap())
    };
    let budgets = ["a", "b"].map(read).into();
    cluster.store.update(|index| index.budgets_seen(Some(budgets)));
}

/// The gangs whose pods were to be evicted since the last look, and for whom.
fn giving_way(cluster: &Cluster) -> Vec<(String, String)> {
    let work = cluster.store.update(|index| index.take_work());
    let given = work.into_iter().filter_map(|work| match work {
        Work::EvictRest { of, to, .. } => Some((of.name.to_string(), to?.name.to_string())),
        _ => None,
    });
    given.collect()
}

/// The way from `b` to `a`.
fn b_to_a() -> Vec<(String, String)> {
    vec![("b".to_owned(), "a".to_owned())]
}

#[test]
fn one_goes_as_a_whole_and_the_other_is_whole() {
    let (cluster, [_, (b, node_of_b)]) = each_short([0, 0]);
    cluster.wait(590);
    assert_eq!(giving_way(&cluster), [], "a place is kept so long");
    cluster.wait(20);
    assert_eq!(giving_way(&cluster), b_to_a());
    // Somebody else would have what comes free.
    create(&cluster, &members("c", 1, 8));
    cluster.pod(&pod("single", 8));
    cluster.gone(&bound(b, &node_of_b, 1, None));
    cluster.wait(6);
    assert_eq!(phase(&cluster, "c"), GangPhase::Queued);
    assert_eq!(node(&cluster, "a-2"), node_of_b);
    write_down(&cluster);
    bind(&cluster, &pod_of_gang("a", 2, 0), "a-2", &node_of_b);
    assert_eq!(phase(&cluster, "a"), GangPhase::Bound);
    // What replaced the one that was lost goes too, and the gang begins anew.
    cluster.gone(&pod_of_gang("b", 2, 0));
    create(&cluster, &[pod_of_gang("b", 3, 0), pod_of_gang("b", 4, 0)]);
    assert_eq!(phase(&cluster, "b"), GangPhase::Queued);
    cluster.add("q", &bridged()).add("r", &bridged()).wait(3);
    cluster.add("s", &bridged()).wait(3);
    assert_eq!(phase(&cluster, "c"), GangPhase::Reserved);
    assert_eq!(phase(&cluster, "b"), GangPhase::Reserved);
    assert_eq!(giving_way(&cluster), []);
}

#[test]
fn freed_devices_are_kept_until_the_gang_is_whole() {
    let (cluster, [_, (b, node_of_b)]) = each_short([0, 0]);
    cluster.wait(610);
    let kept = || {
        let snapshot = cluster.store.snapshot();
        let node = snapshot.find(&node_of_b).unwrap();
        snapshot.kept.as_ref().is_some_and(|kept| kept.has(node))
    };
    assert!(kept());
    cluster.gone(&bound(b, &node_of_b, 1, None));
    cluster.gone(&pod_of_gang("b", 2, 0));
    cluster.wait(6);
    write_down(&cluster);
    bind(&cluster, &pod_of_gang("a", 2, 0), "a-2", &node_of_b);
    cluster.wait(2);
    assert!(!kept());
}

#[test]
fn what_is_left_and_cannot_be_taken_is_open_again_after_a_while() {
    let (cluster, [_, (b, node_of_b)]) = each_short([0, 0]);
    cluster.wait(610);
    giving_way(&cluster);
    cluster.gone(&bound(b, &node_of_b, 1, None));
    cluster.gone(&pod_of_gang("b", 2, 0));
    // Its owner does not make it again.
    cluster.gone(&pod_of_gang("a", 2, 0));
    cluster.wait(6);
    create(&cluster, &members("c", 1, 8));
    assert_eq!(phase(&cluster, "c"), GangPhase::Queued);
    cluster.wait(70);
    assert_eq!(phase(&cluster, "c"), GangPhase::Reserved);
}

#[test]
fn gang_of_lower_priority_yields() {
    let (cluster, _) = each_short([0, 5]);
    cluster.wait(610);
    assert_eq!(giving_way(&cluster), [("a".to_owned(), "b".to_owned())]);
}

#[test]
fn nobody_gives_way_where_that_makes_nobody_whole() {
    // What `a` lacks fits on no node.
    let (cluster, _) = each_short([5, 0]);
    cluster.gone(&pod_of_gang("a", 2, 5));
    let mut large = pod_of_gang("a", 3, 5);
    large["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "16".into();
    create(&cluster, &[large]);
    cluster.wait(700);
    assert_eq!(giving_way(&cluster), []);
}

#[test]
fn gang_protected_by_budgets_does_not_yield() {
    let (cluster, _) = each_short([0, 0]);
    budget(&cluster, 0);
    cluster.wait(700);
    assert_eq!(giving_way(&cluster), []);
    cluster.store.update(|index| index.budgets_seen(None));
    cluster.wait(70);
    assert_eq!(giving_way(&cluster), []);
    budget(&cluster, 2);
    cluster.wait(70);
    assert_eq!(giving_way(&cluster), b_to_a(), "as soon as they allow it");
}
