//! Members beyond a minimum that have not come give way to gangs that need their places.

use super::*;
use crate::fixtures::facts;

/// Pods that become known at once, so that they are planned together.
fn together(cluster: &Cluster, pods: impl Iterator<Item = Value>) {
    let pods: Vec<_> = pods.map(|pod| facts(&pod)).collect();
    cluster.store.update(|index| {
        for pod in pods {
            index.pod_applied(pod);
        }
    });
    cluster.wait(2);
}

/// Members of eight GPUs each of a gang of which so many are needed.
fn elastic(cluster: &Cluster, gang: &str, count: u32, min: u32, priority: i32) {
    let pods = (0..count).map(|number| {
        let mut pod = member(&format!("{gang}-{number}"), 8, gang, min);
        pod["spec"]["priority"] = priority.into();
        pod
    });
    together(cluster, pods);
}

/// So many nodes of eight GPUs.
fn nodes(count: u32) -> Cluster {
    let cluster = Cluster::new(Options::default());
    for number in 0..count {
        cluster.add(&format!("n{number}"), &bridged());
    }
    cluster
}

/// Which of a gang's members have a node.
fn placed(cluster: &Cluster, gang: &str, count: u32) -> Vec<u32> {
    let has = |number: &u32| matches!(answer(cluster, &format!("{gang}-{number}")), Answer::Node(_));
    (0..count).filter(has).collect()
}

fn evicts(cluster: &Cluster) -> bool {
    let work = cluster.store.update(|index| index.take_work());
    work.iter().any(|work| matches!(work, Work::Evict { .. }))
}

#[test]
fn surplus_reservations_make_room_for_a_gang() {
    let cluster = nodes(4);
    elastic(&cluster, "a", 4, 1, 0);
    assert_eq!(placed(&cluster, "a", 4), [0, 1, 2, 3]);
    elastic(&cluster, "b", 2, 2, 0);
    assert_eq!(placed(&cluster, "b", 2), [0, 1]);
    assert_eq!(placed(&cluster, "a", 4), [0, 1], "the last ranks, and no more");
    assert_eq!(phase(&cluster, "a"), GangPhase::Reserved);
    // What is needed stays, and so does what would not be enough.
    elastic(&cluster, "c", 2, 2, 0);
    assert!(placed(&cluster, "c", 2).is_empty());
    assert_eq!(placed(&cluster, "a", 4), [0, 1]);
    assert_eq!(placed(&cluster, "b", 2), [0, 1]);
}

#[test]
fn releasable_reservations_are_counted_once_for_all_gangs() {
    let cluster = nodes(2);
    elastic(&cluster, "a", 2, 1, 0);
    assert_eq!(placed(&cluster, "a", 2), [0, 1]);
    // Too much even for what can be given back, and, with the nodes to come, only as far as numbers tell.
    let gangs = (0..20).flat_map(|number| [(format!("large{number}"), 9), (format!("small{number}"), 2)]);
    let pods = gangs.flat_map(|(gang, count)| {
        (0..count).map(move |number| member(&format!("{gang}-{number}"), 8, &gang, count))
    });
    together(&cluster, pods);
    let surveys = || cluster.store.read(|index| index.gangs.reclaim.surveys());
    for number in 0..20 {
        let before = surveys();
        cluster.add(&format!("p{number}"), &plain(1));
        cluster.wait(1);
        let times = surveys() - before;
        assert!(times <= 5, "{times} times for 40 gangs");
    }
    assert_eq!(placed(&cluster, "a", 2), [0, 1]);
}

#[test]
fn they_make_room_before_anybody_is_stopped() {
    let cluster = nodes(1);
    let mut low = bound(pod("low", 8), "n0", 1, Some("0-7"));
    low["spec"]["priority"] = (-10).into();
    cluster.pod(&low);
    cluster.add("n1", &bridged()).add("n2", &bridged());
    elastic(&cluster, "a", 2, 1, 0);
    assert_eq!(placed(&cluster, "a", 2), [0, 1]);
    elastic(&cluster, "b", 1, 1, 10);
    assert_eq!(placed(&cluster, "b", 1), [0]);
    assert_eq!(placed(&cluster, "a", 2), [0]);
    assert!(!evicts(&cluster));
}

#[test]
fn who_is_more_important_or_has_come_gives_nothing_back() {
    let cluster = nodes(2);
    elastic(&cluster, "a", 2, 1, 10);
    elastic(&cluster, "b", 1, 1, 0);
    assert_eq!(placed(&cluster, "a", 2), [0, 1]);
    assert!(placed(&cluster, "b", 1).is_empty());

    let cluster = nodes(2);
    elastic(&cluster, "a", 2, 2, 0);
    let extra = member("a-2", 8, "a", 2);
    cluster.add("n2", &bridged());
    for number in 0..2 {
        let name = format!("a-{number}");
        let there = node(&cluster, &name);
        admit(&cluster, &name, &there).unwrap();
    }
    commit(&cluster);
    write_down(&cluster);
    create(&cluster, &[extra]);
    let there = node(&cluster, "a-2");
    admit(&cluster, "a-2", &there).unwrap();
    elastic(&cluster, "b", 1, 1, 0);
    assert!(placed(&cluster, "b", 1).is_empty());
    assert_eq!(node(&cluster, "a-2"), there);
}

#[test]
fn slices_beyond_a_minimum_make_room_as_a_whole() {
    let cluster = nodes(4);
    let pods = (0..4).map(|number| {
        let mut pod = member(&format!("a-{number}"), 8, "a", 2);
        pod["metadata"]["annotations"]["gantry.dev/gang-slice-size"] = "2".into();
        pod["metadata"]["annotations"]["gantry.dev/gang-required-level"] = "rack".into();
        pod
    });
    cluster.store.update(|index| {
        let level = gantry_gang::Level { name: "rack".into(), label: "rack".into() };
        let levels = gantry_gang::Levels(vec![level]);
        index.set_fabric(levels.clone());
        index.set_gangs(gantry_gang::protocol::Settings {
            levels,
            ..gantry_gang::protocol::Settings::default()
        });
    });
    together(&cluster, pods);
    assert_eq!(placed(&cluster, "a", 4), [0, 1, 2, 3]);
    elastic(&cluster, "b", 1, 1, 0);
    assert_eq!(placed(&cluster, "b", 1), [0]);
    let left = placed(&cluster, "a", 4);
    assert_eq!(left, [0, 1], "not one of the second slice");
}
