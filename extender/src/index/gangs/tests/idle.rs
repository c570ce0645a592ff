//! Places that are kept for lost members: whoever is of higher priority has them before anybody is stopped.

use super::*;

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

fn reason(cluster: &Cluster, gang: &str) -> Reason {
    let view = cluster.store.read(|index| index.gang_view("default", gang));
    view.unwrap().reason
}

#[test]
fn higher_gang_takes_the_reservation_without_eviction() {
    let cluster = two_nodes();
    let [_, idle] = short(&cluster, 8);
    create(&cluster, &ranked("vip", 1, 10));
    assert_eq!(node(&cluster, "vip-0"), idle);
    assert!(evicted(&cluster).is_empty());
    assert_eq!(phase(&cluster, "lo"), GangPhase::Degraded);
    assert_eq!(reason(&cluster, "lo"), Reason::MembersLost);
    // Who comes for the lost member waits for room like any other.
    create(&cluster, &[member("lo-1b", 8, "lo", 2)]);
    assert!(matches!(answer(&cluster, "lo-1b"), Answer::Wait(_)));
    cluster.add("o", &bridged());
    assert_eq!(node(&cluster, "lo-1b"), "o");
}

#[test]
fn where_others_have_to_go_besides_the_place_goes_first() {
    let cluster = two_nodes();
    let [left, idle] = short(&cluster, 8);
    create(&cluster, &ranked("hi", 2, 10));
    assert_eq!(phase(&cluster, "hi"), GangPhase::Preempting);
    assert_eq!(evicted(&cluster), ["lo-0".into()]);
    assert_eq!((cluster.free(&left), cluster.free(&idle)), (String::new(), String::new()));
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
fn equal_gang_waits_and_the_replacement_is_placed() {
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
fn waiting_gang_takes_the_reservation_once_devices_return() {
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
fn no_eviction_while_reserved_devices_are_returned() {
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
fn higher_degraded_gang_is_completed_by_the_reservation() {
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

// A single pod of higher priority does not take a reservation: it waits until the hold ends.
#[test]
fn single_pod_waits_until_the_hold_ends() {
    let cluster = two_nodes();
    let [_, idle] = short(&cluster, 8);
    cluster.pod(&single(8, 10));
    cluster.park("single", crate::fixtures::request(8));
    let refused = admit(&cluster, "single", &idle).unwrap_err();
    assert!(matches!(refused, BindError::NotFree { .. }), "{refused:?}");
    cluster.wait(580);
    assert!(cluster.store.update(|index| index.take_activatable(10)).is_empty());
    cluster.wait(30);
    assert_eq!(cluster.store.update(|index| index.take_activatable(10)).len(), 1);
    admit(&cluster, "single", &idle).unwrap();
}
