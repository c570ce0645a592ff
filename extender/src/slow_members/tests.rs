use gantry_gang::Integration;
use gantry_planner::decide::Options;

use super::*;
use crate::fixtures::{Cluster, bound, member, plain, pod};

fn key(pod: &str) -> MemberKey {
    let gang = GangKey {
        integration: Integration::Annotation,
        namespace: "a".into(),
        name: "g".into(),
        incarnation: "".into(),
    };
    (Arc::new(gang), pod.into())
}

/// A clock that falls for a moment is no straggler, and one Event about it is enough.
#[test]
fn member_is_named_once_after_a_while() {
    let after = Duration::from_secs(120);
    let mut known = SlowSince::default();
    let start = Instant::now();
    let mut at = |seconds: u64, slow: &[&str]| {
        let slow = slow
            .iter()
            .map(|pod| (key(pod), (Sign::Clock, Arc::from(format!("{pod}: {seconds}")))))
            .collect();
        let due = known.record(&slow, start + Duration::from_secs(seconds), after).len();
        (due, known.named().values().sum::<usize>())
    };
    assert_eq!(at(0, &["x"]), (0, 0));
    assert_eq!(at(60, &["x", "y"]), (0, 0));
    assert_eq!(at(119, &["y"]), (0, 0));
    assert_eq!(at(120, &["x", "y"]), (0, 0), "x is slow since now");
    assert_eq!(at(180, &["x", "y"]), (1, 1));
    assert_eq!(at(200, &["x", "y"]), (0, 1));
    assert_eq!(at(240, &["x"]), (1, 1));
    assert_eq!(at(250, &[]), (0, 0));
}

/// The text is that of the time when the member was named: the status of the Gang is not written for every clock.
#[test]
fn condition_of_gang_names_its_slow_members() {
    let mut known = SlowSince::default();
    let start = Instant::now();
    let mut at = |seconds: u64, slow: &[&str]| {
        let slow = slow
            .iter()
            .map(|pod| (key(pod), (Sign::Clock, Arc::from(format!("{pod}: {seconds}")))))
            .collect();
        known.record(&slow, start + Duration::from_secs(seconds), Duration::from_secs(60));
        known.of_gangs().into_values().map(|text| text.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(at(0, &["x"]), [""; 0]);
    assert_eq!(at(60, &["x", "y"]), ["x: 60"]);
    assert_eq!(at(70, &["x", "y"]), ["x: 60"]);
    assert_eq!(at(120, &["x", "y"]), ["x: 60; and 1 more member"]);
    assert_eq!(at(130, &["y"]), ["y: 120"]);
    assert_eq!(at(140, &[]), [""; 0]);
}

#[test]
fn named_members_are_counted_by_sign() {
    let mut known = SlowSince::default();
    let start = Instant::now();
    let slow: BTreeMap<_, _> = [("x", Sign::Power), ("y", Sign::Power), ("z", Sign::Throttle)]
        .map(|(pod, sign)| (key(pod), (sign, pod.into())))
        .into();
    known.record(&slow, start, Duration::from_secs(1));
    assert_eq!(known.signs(), BTreeMap::from([("clock", 0), ("power", 0), ("throttle", 0)]));
    known.record(&slow, start + Duration::from_secs(1), Duration::from_secs(1));
    assert_eq!(known.signs(), BTreeMap::from([("clock", 0), ("power", 2), ("throttle", 1)]));
}

/// Two members on one node and one on another; a pod beside them belongs to no gang.
#[test]
fn members_have_the_clocks_of_their_gpus() {
    let cluster = Cluster::new(Options::default());
    cluster.add("n", &plain(4)).add("m", &plain(4));
    for (name, node, gpus) in [("g-0", "n", "0-1"), ("g-1", "m", "0-1")] {
        let mut pod = bound(pod(name, 2), node, 1, Some(gpus));
        let annotations = pod["metadata"]["annotations"].as_object_mut().unwrap();
        let gang = member(name, 2, "g", 2)["metadata"]["annotations"].clone();
        annotations.extend(gang.as_object().unwrap().clone());
        cluster.pod(&pod);
    }
    cluster.pod(&bound(pod("other", 1), "m", 2, Some("2")));
    let clocks = ClusterClocks::default();
    for (node, uuid) in [("n", "a"), ("m", "b")] {
        let gpu = |index: u8| serde_json::json!({"index": index, "uuid": format!("GPU-{uuid}{index}"), "model": "H100"});
        let clock = |index: u8| serde_json::json!({"gpu": format!("GPU-{uuid}{index}"), "smPercent": 100 - 10 * index});
        let (gpus, clocks_of) = ([0, 1, 2, 3].map(gpu), [0, 1, 2].map(clock));
        let object = serde_json::json!({
            "metadata": {"name": node},
            "spec": {"machine": {"gpus": gpus}},
            "status": {"clocks": clocks_of},
        });
        clocks.observe(&node.into(), &serde_json::from_value(object).unwrap());
    }
    let found = members(&cluster.store, &clocks);
    let gangs: Vec<String> = found.keys().map(ToString::to_string).collect();
    assert_eq!(gangs, ["default/g"]);
    let members = found.values().flat_map(BTreeMap::values).map(|member| {
        let percents: Vec<u8> = member.gpus.iter().map(|gpu| gpu.clock.percent).collect();
        (member.pod.name.to_string(), percents)
    });
    let members: BTreeMap<String, Vec<u8>> = members.collect();
    assert_eq!(members, BTreeMap::from([("g-0".into(), vec![100, 90]), ("g-1".into(), vec![100, 90])]));
}
