use gantry_gang::protocol::Settings;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::fixtures::{Cluster, bound, bridged, member, pod, target};
use crate::index::{BindGrant, BindStep};
use gantry_planner::decide::Options;

fn status(phase: GangPhase, since: Option<i64>, bound_at: Option<i64>) -> GangStatus {
    let time = |second| Time(Timestamp::from_second(second).unwrap());
    GangStatus {
        phase,
        waiting_since: since.map(time),
        bound_at: bound_at.map(time),
        ..GangStatus::default()
    }
}

fn page(metrics: &Metrics, cluster: &Cluster) -> String {
    let memory = cluster.store.memory();
    let reading = cluster.store.read(|index| GaugeReading::of(index, memory));
    metrics.page_of(&reading, None, true)
}

/// The value of a series, whatever stands beside it.
fn value<'p>(page: &'p str, series: &str) -> Option<&'p str> {
    let name = format!("gantry_extender_{series} ");
    page.lines().find_map(|line| line.strip_prefix(&name))
}

fn assert_values(page: &str, expected: &[(&str, &str)]) {
    for (series, expected) in expected {
        assert_eq!(value(page, series), Some(*expected), "{series} in\n{page}");
    }
}

#[test]
fn gang_step_counts_once_and_wait_at_the_first_bind() {
    let metrics = Metrics::new();
    let waits = |phase| status(phase, Some(1_000), None);
    let bound = status(GangPhase::Bound, None, Some(1_095));
    // It has lost a member, and is whole again.
    let repairs = status(GangPhase::Degraded, Some(2_000), Some(1_095));
    let life = [
        waits(GangPhase::Pending),
        waits(GangPhase::Invalid),
        waits(GangPhase::Pending),
        waits(GangPhase::Queued),
        waits(GangPhase::Queued),
        waits(GangPhase::Preempting),
        waits(GangPhase::Reserved),
        waits(GangPhase::Backoff),
        waits(GangPhase::Reserved),
        waits(GangPhase::Committing),
        waits(GangPhase::Binding),
        bound.clone(),
        bound.clone(),
        repairs,
        bound,
        status(GangPhase::Finished, None, Some(1_095)),
    ];
    metrics.gang_moved(None, &life[0]);
    for steps in life.windows(2) {
        metrics.gang_moved(Some(&steps[0]), &steps[1]);
    }
    let page = page(&metrics, &Cluster::new(Options::default()));
    assert_values(
        &page,
        &[
            (r#"gang_steps_total{outcome="invalid"}"#, "1"),
            (r#"gang_steps_total{outcome="queued"}"#, "1"),
            (r#"gang_steps_total{outcome="preempting"}"#, "1"),
            (r#"gang_steps_total{outcome="reserved"}"#, "2"),
            (r#"gang_steps_total{outcome="backoff"}"#, "1"),
            (r#"gang_steps_total{outcome="bound"}"#, "1"),
            (r#"gang_steps_total{outcome="degraded"}"#, "1"),
            (r#"gang_steps_total{outcome="finished"}"#, "1"),
            ("gang_wait_seconds_count", "1"),
            ("gang_wait_seconds_sum", "95.0"),
            (r#"gang_wait_seconds_bucket{le="60.0"}"#, "0"),
            (r#"gang_wait_seconds_bucket{le="120.0"}"#, "1"),
        ],
    );
    let steps = page.lines().filter(|line| line.contains("gang_steps_total{"));
    assert_eq!(steps.count(), 8, "no step has a name of its own besides\n{page}");
}

#[test]
fn gang_found_bound_has_no_wait() {
    let metrics = Metrics::new();
    metrics.gang_moved(None, &status(GangPhase::Bound, None, Some(1_095)));
    let page = page(&metrics, &Cluster::new(Options::default()));
    assert_values(&page, &[("gang_wait_seconds_count", "0")]);
    assert_eq!(value(&page, r#"gang_steps_total{outcome="bound"}"#), None);
}

#[test]
fn gauges_tell_what_gangs_there_are_and_what_is_kept_for_them() {
    let cluster = Cluster::new(Options { patience: Duration::ZERO, ..Options::default() });
    cluster.store.update(|index| index.set_gangs(Settings::default()));
    let create = |pods: &[Value]| {
        for pod in pods {
            cluster.pod(pod);
        }
        cluster.wait(2);
    };
    cluster.add("c", &bridged());
    create(&[member("placed-0", 5, "placed", 2), member("placed-1", 2, "placed", 2)]);
    create(&[member("few-0", 1, "few", 2)]);
    create(&[member("torn-0", 1, "torn", 2), member("torn-1", 1, "torn", 3)]);
    cluster.add("a", &bridged()).add("b", &bridged());
    cluster.pod(&bound(pod("holder", 1), "a", 1, Some("0")));
    create(&[member("next-0", 8, "next", 2), member("next-1", 8, "next", 2)]);
    cluster.wait(2);
    let metrics = Metrics::new();
    let kept = cluster.store.read(|index| index.gang_totals().kept_nodes);
    assert!(kept > 0);
    assert_values(
        &page(&metrics, &cluster),
        &[
            (r#"gangs{phase="reserved"}"#, "1"),
            (r#"gangs{phase="pending"}"#, "1"),
            (r#"gangs{phase="invalid"}"#, "1"),
            (r#"gangs{phase="queued"}"#, "1"),
            (r#"gangs{phase="bound"}"#, "0"),
            (r#"waiting_gangs{reason="WaitingForMembers"}"#, "1"),
            ("gang_reservations", "2"),
            ("gang_reserved_devices", "7"),
            ("backfill_reserved_nodes", &kept.to_string()),
            (r#"devices{state="reserved"}"#, "7"),
            ("leader", "1"),
        ],
    );
    let waiting = |page: &str| -> u32 {
        let lines = page.lines().filter(|line| line.starts_with("gantry_extender_waiting_gangs{"));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u32>().ok()).sum()
    };
    assert_eq!(waiting(&page(&metrics, &cluster)), 2, "few and next");
    // A gauge falls again.
    for name in ["next-0", "next-1"] {
        cluster.gone(&member(name, 8, "next", 2));
    }
    cluster.wait(2);
    let page = page(&metrics, &cluster);
    assert_values(&page, &[(r#"gangs{phase="queued"}"#, "0"), ("backfill_reserved_nodes", "0")]);
    assert_eq!(waiting(&page), 1, "a reason without gangs has no series");
}

/// One node is partly held, one partly reserved and one free; gangs of two phases wait. Time counts as long as this replica
/// leads, and no longer for one scrape than the limit.
#[test]
fn idle_time_is_counted_by_cause_while_leading() {
    let cluster = Cluster::new(Options { patience: Duration::ZERO, ..Options::default() });
    cluster.store.update(|index| index.set_gangs(Settings::default()));
    cluster.add("c", &bridged());
    for pod in [member("placed-0", 5, "placed", 2), member("placed-1", 2, "placed", 2)] {
        cluster.pod(&pod);
    }
    cluster.wait(2).add("a", &bridged()).add("b", &bridged());
    cluster.pod(&bound(pod("holder", 1), "a", 1, Some("0")));
    for pod in [member("next-0", 8, "next", 2), member("next-1", 8, "next", 2)] {
        cluster.pod(&pod);
    }
    cluster.pod(&member("few-0", 1, "few", 2));
    cluster.wait(2);
    let metrics = Metrics::new();
    let start = Instant::now();
    let page = |after: u64, leads: bool| {
        let memory = cluster.store.memory();
        let reading = cluster.store.read(|index| GaugeReading::of(index, memory));
        metrics.page_at(start + Duration::from_secs(after), &reading, None, leads)
    };
    let model = bridged().gpus()[0].model.clone().unwrap_or_default();
    let idle = |cause, namespace| {
        format!("idle_gpu_seconds_total{{cause=\"{cause}\",namespace=\"{namespace}\",model=\"{model}\"}}")
    };
    let namespace = pod("holder", 1)["metadata"]["namespace"].as_str().unwrap().to_owned();
    let waiting = format!("waiting_device_seconds_total{{namespace=\"{namespace}\"}}");
    let expect = |page: &str, seconds: u32| {
        let times = |gpus: u32| format!("{:.1}", f64::from(gpus * seconds));
        assert_values(
            page,
            &[
                (&idle("free", ""), &times(8)),
                (&idle("fragment", ""), &times(1 + 7)),
                (&idle("reserved", &namespace), &times(7)),
                (&waiting, &times(16 + 1)),
            ],
        );
    };
    expect(&page(0, true), 0);
    let second = page(10, true);
    expect(&second, 10);
    let resource = "nvidia.com/gpu";
    assert_values(
        &second,
        &[
            (&format!("waiting_devices{{namespace=\"{namespace}\"}}"), "17"),
            (&format!("free_sets{{resource=\"{resource}\",devices=\"1\"}}"), "16"),
            (&format!("free_sets{{resource=\"{resource}\",devices=\"4\"}}"), "3"),
            (&format!("free_sets{{resource=\"{resource}\",devices=\"8\"}}"), "1"),
            (&format!("free_sets{{resource=\"{resource}\",devices=\"16\"}}"), "0"),
        ],
    );
    expect(&page(60, false), 10);
    expect(&page(70, true), 20);
    expect(&page(7_000, true), 320);
}

#[test]
fn names_over_the_limit_are_counted_as_other() {
    let mut admitted = SeriesNames::default();
    let names: Vec<String> = (0..4).map(|name| admitted.name(&format!("team-{name}"), 2)).collect();
    assert_eq!(names, ["team-0", "team-1", "other", "other"]);
    assert_eq!((admitted.name("team-1", 2), admitted.name("", 2)), ("team-1".to_owned(), String::new()));
}

#[test]
fn granted_sets_count_by_link_and_preference() {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged());
    let mut prefers = pod("prefers", 2);
    prefers["metadata"]["annotations"] = json!({"gantry.dev/preferred-link": "nvlink"});
    let mut wants_more = pod("wants-more", 4);
    wants_more["metadata"]["annotations"] = json!({"gantry.dev/preferred-link": "nvlink"});
    for (pod, name) in [(prefers, "prefers"), (wants_more, "wants-more"), (pod("one", 1), "one")] {
        cluster.pod(&pod);
        let step = cluster.store.bind(&target(name, "a"), None);
        assert!(matches!(step, Ok(BindStep::Single(BindGrant::Grant { .. }))), "{name}: {step:?}");
    }
    let metrics = Metrics::new();
    let values = [
        ("granted_sets_total{link=\"nvlink\",preference=\"met\"}", "1"),
        ("granted_sets_total{link=\"numa\",preference=\"unmet\"}", "1"),
        ("granted_sets_total{link=\"single\",preference=\"none\"}", "1"),
    ];
    // Reading them twice counts them once.
    for _ in 0..2 {
        assert_values(&page(&metrics, &cluster), &values);
    }
}
