//! What is said of gangs to people.

use super::*;
use crate::answers;

/// Whose end would let a gang fit.
fn would_have_to_end(cluster: &Cluster, gang: &str) -> Vec<String> {
    let report = cluster.store.read(|index| index.inspect_gang(&[], "default", gang));
    report.unwrap().would_have_to_end
}

#[test]
fn report_never_names_members_of_the_same_gang() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    create(&cluster, &[member("a-0", 4, "a", 1)]);
    bind_all(&cluster, &[member("a-0", 4, "a", 1)]);
    create(&cluster, &[member("a-1", 6, "a", 1)]);
    assert!(matches!(answer(&cluster, "a-1"), Answer::Wait(_)));
    assert_eq!(would_have_to_end(&cluster, "a"), Vec::<String>::new());

    // There is somebody whose end helps.
    cluster.add("m", &plain(6));
    cluster.pod(&bound(pod("x", 2), "m", 1, Some("0-1")));
    cluster.pod(&bound(pod("y", 2), "m", 2, Some("2-3")));
    assert_eq!(would_have_to_end(&cluster, "a"), ["default/x", "default/y"]);
}

#[test]
fn nobody_is_advised_to_end_siblings_of_a_pod_that_waits() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &bridged());
    create(&cluster, &[member("a-0", 4, "a", 1)]);
    bind_all(&cluster, &[member("a-0", 4, "a", 1)]);
    cluster.pod(&bound(pod("x", 1), "n", 1, Some("7")));
    cluster.pod(&bound(pod("y", 3), "n", 2, Some("4-6")));
    for (name, gpus, ends) in [("a-1", 4, vec!["default/x", "default/y"]), ("a-2", 6, vec![])] {
        create(&cluster, &[member(name, gpus, "a", 1)]);
        let report = answers::pod(&cluster.store, &["nvidia.com/gpu"], "default", name).unwrap();
        let ended = &report.nodes[0].would_have_to_end;
        let mut ended: Vec<&str> = ended.iter().map(String::as_str).collect();
        ended.sort_unstable();
        assert_eq!(ended, ends, "{name}");
    }
}

#[test]
fn a_gang_that_waits_is_told_which_are_planned_before_it() {
    let cluster = two_nodes();
    let mut there = bound(pod("x", 1), "m", 1, Some("0"));
    there["spec"]["priority"] = 20.into();
    cluster.pod(&there);
    let named = |gang: &str, priority: i32| {
        let mut pods = members(gang, 2, 8);
        for pod in &mut pods {
            pod["spec"]["priority"] = priority.into();
        }
        create(&cluster, &pods);
    };
    // Each is younger than the one before.
    for (gang, priority) in [("q1", 0), ("q2", 0), ("q3", 0), ("urgent", 10)] {
        named(gang, priority);
    }
    create(&cluster, &members("few", 2, 8)[..1]);
    let ahead = |gang: &str| {
        cluster.store.read(|index| {
            let queue = index.gangs_in_line();
            let report = index.inspect_gang(&queue, "default", gang).unwrap();
            (report.gang.position, report.ahead)
        })
    };
    assert_eq!(ahead("urgent"), (Some(1), vec![]));
    assert_eq!(ahead("q1"), (Some(2), vec!["default/urgent".to_owned()]));
    let (position, before) = ahead("q3");
    assert_eq!(position, Some(4));
    assert_eq!(before, ["default/urgent", "default/q1", "default/q2"]);
    assert_eq!(ahead("few"), (None, vec![]), "it is not in the queue yet");
    // Who has a place is ahead of nobody any more.
    cluster.gone(&there).wait(8);
    assert_eq!(phase(&cluster, "urgent"), GangPhase::Reserved);
    assert_eq!(ahead("q2"), (Some(2), vec!["default/q1".to_owned()]));
}
