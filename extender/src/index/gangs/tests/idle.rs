//! Places that are kept for lost members: whoever is of higher priority has them before anybody is stopped.

use super::*;
use crate::fixtures::facts;
use crate::wire::Offer;

/// Gang `lo` of two, of so many GPUs each, one of whose members is lost and leaves nothing behind: the node of who is left, and that of the
/// place.
fn short(cluster: &Cluster, gpus: u32) -> [String; 2] {
    let pods = members("lo", 2, gpus);
    create(cluster, &pods);
    let nodes = bind_all(cluster, &pods);
    cluster.gone(&bound(pods[1].clone(), &nodes[1], 1, None));
    cluster.wait(7);
    write_down(cluster);
    [nodes[0].clone(), nodes[1].clone()]
}

/// Members of a gang, of eight GPUs and a priority each.
fn ranked(gang: &str, count: u32, priority: i32) -> Vec<Value> {
    let mut pods = members(gang, count, 8);
    for pod in &mut pods {
        pod["spec"]["priority"] = priority.into();
    }
    pods
}

fn single(gpus: u32, priority: i32) -> Value {
    let mut pod = pod("single", gpus);
    pod["spec"]["priority"] = priority.into();
    pod
}

fn evicted(cluster: &Cluster) -> Vec<PodUid> {
    let work = cluster.store.update(|index| index.take_work());
    let evicted = work.into_iter().filter_map(|work| match work {
        Work::Evict { pods, .. } => Some(pods),
        _ => None,
    });
    evicted.flatten().collect()
}

fn reason(cluster: &Cluster, gang: &str) -> std::sync::Arc<str> {
    let view = cluster.store.read(|index| index.gang_view("default", gang));
    view.unwrap().reason
}

/// The node that a pod by itself is let on though it does not fit there as it is.
fn let_on(cluster: &Cluster, pod: &Value) -> Option<NodeName> {
    let facts = facts(pod);
    let request = facts.request.clone().unwrap();
    cluster
        .store
        .read(|index| index.idle_node(&facts.uid, facts.priority, &request, &|_| true))
}

#[test]
fn a_gang_of_higher_priority_has_the_place_and_nobody_is_stopped_for_it() {
    let cluster = two_nodes();
    let [_, idle] = short(&cluster, 8);
    create(&cluster, &ranked("vip", 1, 10));
    assert_eq!(node(&cluster, "vip-0"), idle);
    assert!(evicted(&cluster).is_empty());
    assert_eq!(phase(&cluster, "lo"), GangPhase::Degraded);
    assert_eq!(
        &*reason(&cluster, "lo"),
        "gang default/lo lacks 1 of 2 members; the place of a lost member went to gang default/vip, of higher priority"
    );
    // Who comes for the lost member waits for room like any other.
    create(&cluster, &[member("lo-1b", 8, "lo", 2)]);
    assert!(matches!(answer(&cluster, "lo-1b"), Answer::Wait(_)));
    cluster.add("o", &bridged());
    assert_eq!(node(&cluster, "lo-1b"), "o");
    assert!(
        !reason(&cluster, "lo").contains("vip"),
        "{}",
        reason(&cluster, "lo")
    );
}

#[test]
fn where_others_have_to_go_besides_the_place_goes_first() {
    let cluster = two_nodes();
    let [left, idle] = short(&cluster, 8);
    create(&cluster, &ranked("hi", 2, 10));
    assert_eq!(phase(&cluster, "hi"), GangPhase::Preempting);
    assert_eq!(evicted(&cluster), ["lo-0".into()]);
    assert_eq!(
        (cluster.free(&left), cluster.free(&idle)),
        (String::new(), String::new())
    );
}

#[test]
fn the_place_goes_before_a_pod_of_lower_priority_elsewhere() {
    let cluster = two_nodes();
    let [_, idle] = short(&cluster, 8);
    cluster.add("o", &bridged());
    let mut low = bound(pod("low", 8), "o", 1, Some("0-7"));
    low["spec"]["priority"] = (-10).into();
    cluster.pod(&low);
    create(&cluster, &ranked("vip", 1, 10));
    assert_eq!(node(&cluster, "vip-0"), idle);
    assert!(evicted(&cluster).is_empty());
}

#[test]
fn a_gang_of_no_higher_priority_waits_and_the_replacement_has_the_place() {
    let cluster = two_nodes();
    let [_, idle] = short(&cluster, 8);
    create(&cluster, &ranked("equal", 1, 0));
    cluster.wait(5);
    assert!(matches!(answer(&cluster, "equal-0"), Answer::Wait(_)));
    create(&cluster, &[member("lo-1b", 8, "lo", 2)]);
    assert_eq!(node(&cluster, "lo-1b"), idle);
    // Nor does a gang that is more important, once somebody has come for it.
    let mut never = ranked("never", 1, 10);
    never[0]["spec"]["preemptionPolicy"] = "Never".into();
    create(&cluster, &never);
    assert!(matches!(answer(&cluster, "never-0"), Answer::Wait(_)));
    assert_eq!(node(&cluster, "lo-1b"), idle);
}

#[test]
fn a_gang_that_waits_already_has_the_place_once_its_devices_are_given_back() {
    let cluster = two_nodes();
    let pods = members("lo", 2, 8);
    create(&cluster, &pods);
    let nodes = bind_all(&cluster, &pods);
    // It has nobody stopped, and what is kept without a pod it may have.
    let mut never = ranked("never", 1, 10);
    never[0]["spec"]["preemptionPolicy"] = "Never".into();
    create(&cluster, &never);
    cluster.wait(2);
    cluster.gone(&bound(pods[1].clone(), &nodes[1], 1, None));
    assert!(matches!(answer(&cluster, "never-0"), Answer::Wait(_)));
    cluster.wait(8);
    assert_eq!(node(&cluster, "never-0"), nodes[1]);
}

#[test]
fn nobody_is_stopped_while_the_devices_of_the_place_are_given_back() {
    let cluster = two_nodes();
    let pods = members("lo", 2, 8);
    create(&cluster, &pods);
    let nodes = bind_all(&cluster, &pods);
    cluster.gone(&bound(pods[1].clone(), &nodes[1], 1, None));
    create(&cluster, &ranked("vip", 1, 10));
    assert_eq!(evicted(&cluster), []);
    cluster.wait(8);
    assert_eq!(evicted(&cluster), []);
    assert_eq!(node(&cluster, "vip-0"), nodes[1]);
}

#[test]
fn a_decided_gang_of_higher_priority_that_is_short_is_made_whole_with_it() {
    let cluster = two_nodes();
    cluster.add("o", &bridged()).add("p", &bridged());
    let pods = ranked("hi", 2, 10);
    create(&cluster, &pods);
    let nodes = bind_all(&cluster, &pods);
    let [_, idle] = short(&cluster, 8);
    // Its node is gone, and its place with it.
    cluster.store.update(|index| index.node_deleted(&nodes[1]));
    cluster.gone(&bound(pods[1].clone(), &nodes[1], 1, None));
    let mut again = pods[1].clone();
    again["metadata"]["name"] = "hi-1b".into();
    again["metadata"]["uid"] = "hi-1b".into();
    create(&cluster, &[again]);
    assert_eq!(node(&cluster, "hi-1b"), idle);
    assert!(evicted(&cluster).is_empty());
}

#[test]
fn a_pod_by_itself_of_higher_priority_has_the_place_when_it_comes() {
    let cluster = two_nodes();
    let [_, idle] = short(&cluster, 8);
    let equal = single(8, 0);
    cluster.pod(&equal);
    assert_eq!(let_on(&cluster, &equal), None);
    admit(&cluster, "single", &idle).unwrap_err();
    let high = single(8, 10);
    cluster.pod(&high);
    assert_eq!(let_on(&cluster, &high), Some(idle.as_str().into()));
    assert!(!reason(&cluster, "lo").contains("single"), "it may not come");
    let admitted = admit(&cluster, "single", &idle).unwrap();
    assert!(matches!(admitted, Admitted::Single(Reserved::Grant { .. })));
    assert_eq!(
        &*reason(&cluster, "lo"),
        "gang default/lo lacks 1 of 2 members; the place of a lost member went to pod default/single, of higher priority"
    );
    create(&cluster, &[member("lo-1b", 8, "lo", 2)]);
    assert!(matches!(answer(&cluster, "lo-1b"), Answer::Wait(_)));
}

#[tokio::test]
async fn filter_lets_a_pod_by_itself_of_higher_priority_on_the_node_of_the_place_and_no_other() {
    let cluster = two_nodes();
    let [_, idle] = short(&cluster, 8);
    let service = crate::service::tests::service(&cluster);
    let passed = |priority: i32, nodes: [&str; 2]| {
        let body = json!({"Pod": single(8, priority), "Nodes": null, "NodeNames": nodes});
        let answer = service.filter(&serde_json::to_vec(&body).unwrap()).unwrap();
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        answer["NodeNames"].clone()
    };
    assert_eq!(passed(10, ["m", "n"]), json!([idle]));
    assert_eq!(passed(0, ["m", "n"]), json!([]));
    assert_eq!(passed(10, ["x", "y"]), json!([]), "it is not offered");
    // A node with room goes first.
    cluster.add("o", &bridged());
    assert_eq!(passed(10, ["m", "o"]), json!(["o"]));
}

#[test]
fn no_more_places_are_given_back_to_a_pod_than_it_takes() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    let pods = members("lo", 3, 2);
    create(&cluster, &pods);
    bind_all(&cluster, &pods);
    cluster.pod(&bound(pod("other", 2), "n", 1, Some(&cluster.free("n"))));
    for pod in &pods[1..] {
        cluster.gone(&bound(pod.clone(), "n", 1, None));
    }
    cluster.wait(7);
    let high = single(1, 10);
    cluster.pod(&high);
    admit(&cluster, "single", "n").unwrap();
    let kept = cluster.store.read(|index| index.gang_totals().places);
    assert_eq!(kept, 1);
}

#[test]
fn a_pod_by_itself_that_waits_is_woken_for_the_place() {
    for (priority, woken) in [(10, 1), (0, 0)] {
        let cluster = two_nodes();
        let pods = members("lo", 2, 8);
        create(&cluster, &pods);
        let nodes = bind_all(&cluster, &pods);
        let waits = single(8, priority);
        cluster.pod(&waits);
        cluster.park("single", crate::fixtures::request(8));
        cluster.gone(&bound(pods[1].clone(), &nodes[1], 1, None));
        cluster.wait(7);
        let called = cluster.store.update(|index| index.take_wakeable(10));
        assert_eq!(called.len(), woken, "{priority}");
    }
}

#[test]
fn kube_schedulers_preemption_counts_on_the_place_and_waits_for_its_devices() {
    let cluster = two_nodes();
    let pods = members("lo", 2, 4);
    let pods: Vec<Value> = pods
        .into_iter()
        .map(|mut pod| {
            // One on each node.
            pod["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": "40"});
            pod
        })
        .collect();
    create(&cluster, &pods);
    let nodes = bind_all(&cluster, &pods);
    let mut beside = bound(pod("beside", 4), &nodes[1], 1, Some(&cluster.free(&nodes[1])));
    beside["spec"]["priority"] = 0.into();
    cluster.pod(&beside);
    let mut elsewhere = bound(pod("elsewhere", 4), &nodes[0], 1, Some(&cluster.free(&nodes[0])));
    elsewhere["spec"]["priority"] = 5.into();
    cluster.pod(&elsewhere);
    cluster.pod(&single(8, 10));
    cluster.gone(&bound(pods[1].clone(), &nodes[1], 1, None));
    let offer = || {
        vec![Offer {
            node: nodes[1].clone(),
            victims: vec!["beside".to_owned()],
            budgets_broken: 0,
        }]
    };
    let request = crate::fixtures::request(8);
    let ask = |request: &crate::request::Request, offers| {
        let uid = "single".into();
        cluster
            .store
            .update(|index| index.preemptable(&uid, request, 10, offers))
    };
    let four = crate::fixtures::request(4);
    assert_eq!(ask(&four, offer()), [], "the place itself is free in a moment");
    cluster.wait(7);
    assert_eq!(ask(&request, offer()), offer());
}
