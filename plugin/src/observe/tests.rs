use gantry_api::names;
use gantry_topology::{Gpu, Machine, MachineParts, PathClass, PathMatrix};

use super::*;
use crate::inventory::Hardware;
use crate::offer::offer;
use gantry_config::{Config, Selector};

#[test]
fn node_with_nothing_to_serve_is_settled_but_not_ready() {
    let starting = Readiness::default();
    assert!(!starting.is_settled(), "nothing is served yet");
    let nothing = Readiness { devices: Some("none of the 8 GPUs is served".into()), ..Readiness::default() };
    assert!(nothing.is_settled() && !nothing.missing().is_empty());
    // An update may be the reason for a configuration that never arrives.
    let awaited =
        Readiness { config: Configuration::Awaited(Some("there is no ConfigMap configs".into())), ..nothing };
    assert!(!awaited.is_settled());
    let refused = Readiness {
        registered: [(names::GPU_RESOURCE.into(), Registration::Unregistered)].into(),
        ..Readiness::default()
    };
    assert!(!refused.is_settled(), "kubelet may accept another process");
}

#[test]
fn all_gpus_left_out_gives_reason() {
    let missing = |gpus: u8, config: &Config| {
        let gpu = |index| Gpu { index, uuid: format!("GPU-{index}").parse().ok(), ..Gpu::default() };
        let parts = MachineParts {
            gpus: (0..gpus).map(gpu).collect(),
            paths: PathMatrix::from_fn(gpus.into(), |_, _| PathClass::Sys),
            ..MachineParts::default()
        };
        let hardware = Hardware::of(Arc::new(Machine::new(parts).unwrap()));
        let observed = Observations::default();
        observed.inventory(&offer(&hardware, config));
        observed.readiness().missing().remove(0)
    };
    let none = Config { allow: vec![Selector::Index(9)], ..Config::default() };
    assert_eq!(missing(4, &none), "no devices: none of the 4 GPUs is served: devices.allow does not name it");
    assert_eq!(
        missing(1, &none),
        "no devices: the GPU of this node is not served: devices.allow does not name it"
    );
    assert_eq!(missing(0, &none), "no devices: this node has no GPU");
    assert_eq!(missing(4, &Config::default()), "no resource is served yet");
}

#[test]
fn readiness_needs_devices_and_registration() {
    let mut readiness =
        Readiness { devices: Some("libnvidia-ml.so.1 is missing".into()), ..Readiness::default() };
    assert_eq!(readiness.missing(), ["no devices: libnvidia-ml.so.1 is missing"]);
    readiness.devices = None;
    assert_eq!(readiness.missing(), ["no resource is served yet"]);
    readiness.registered.insert("nvidia.com/gpu".into(), Registration::Unregistered);
    assert_eq!(readiness.missing(), ["nvidia.com/gpu is not registered with kubelet"]);
    readiness.registered.insert("nvidia.com/gpu".into(), Registration::Accepted);
    assert!(readiness.missing().is_empty());
}

#[test]
fn invalid_config_degrades_missing_config_is_not_ready() {
    let report =
        |loads, problem: Option<&str>| Report { loads, problem: problem.map(Arc::from), ..Report::default() };
    let observed = Observations::default();
    observed.registered(&"nvidia.com/gpu".into());
    let stands = |report: &Report| {
        observed.config(report);
        let readiness = observed.readiness();
        (readiness.missing(), readiness.degraded())
    };
    let (missing, _) = stands(&report(0, Some("no node")));
    assert_eq!(missing, ["no configuration yet, nothing is served: no node"]);
    let (missing, _) = stands(&report(0, None));
    assert_eq!(missing, ["no configuration yet, nothing is served: waiting for the API server"]);
    let (missing, degraded) = stands(&report(1, Some("a:1: x")));
    assert!(missing.is_empty(), "the GPUs are still served");
    assert_eq!(degraded, ["the configuration is invalid, the last valid one stays in effect: a:1: x"]);
    let (missing, degraded) = stands(&report(2, None));
    assert!(missing.is_empty() && degraded.is_empty());
}

#[test]
fn service_without_registration_counts_none() {
    let observed = Observations::default();
    observed.served(&"nvidia.com/gpu".into());
    assert!(!observed.metrics().text().unwrap().contains("gantry_plugin_registrations_total{"));
    observed.registered(&"nvidia.com/gpu".into());
    assert!(
        observed
            .metrics()
            .text()
            .unwrap()
            .contains(r#"registrations_total{resource="nvidia.com/gpu",outcome="accepted"} 1"#)
    );
}

#[test]
fn configurations_are_counted() {
    let observed = Observations::default();
    let (_reporter, reports) =
        watch::channel(Report { loads: 3, failures: 2, problem: Some("x".into()), ..Report::default() });
    observed.count_configurations(reports);
    let text = observed.metrics().text().unwrap();
    for line in [
        "gantry_plugin_config_loads_total 3",
        "gantry_plugin_config_failures_total 2",
        "gantry_plugin_config_refused 1",
    ] {
        assert!(text.lines().any(|of_text| of_text == line), "{line} in {text}");
    }
}

#[test]
fn xids_are_counted_by_gpu() {
    let observed = Observations::default();
    let counts = XidCounts::default();
    observed.count_xids(counts.clone());
    let gpu = "GPU-0badcafe".parse().unwrap();
    counts.count(&gpu, 79);
    counts.count(&gpu, 79);
    for _ in 0..2 {
        let text = observed.metrics().text().unwrap();
        assert!(text.contains(r#"gantry_plugin_xids_total{gpu="GPU-0badcafe",xid="79"} 2"#), "{text}");
    }
}

#[test]
fn unreachable_api_server_degrades_readiness() {
    let readiness = Readiness {
        registered: [("nvidia.com/gpu".into(), Registration::Accepted)].into(),
        cluster: Some(false),
        ..Readiness::default()
    };
    assert!(readiness.missing().is_empty());
    assert_eq!(readiness.degraded().len(), 1);
}

#[test]
fn report_lists_what_is_missing_and_degraded() {
    let mut readiness = Readiness {
        devices: Some("libnvidia-ml.so.1 is missing".into()),
        pod_resources: Some(false),
        ..Readiness::default()
    };
    assert_eq!(
        report(&readiness, false).unwrap_err().lines().collect::<Vec<_>>(),
        [
            "not ready: no devices: libnvidia-ml.so.1 is missing",
            "degraded: kubelet's pod resources cannot be read: holders are derived from grants and allocations only",
        ]
    );
    readiness.pod_resources = None;
    readiness.devices = None;
    assert_eq!(report(&readiness, true).unwrap(), "not ready: no resource is served yet");
}

#[test]
fn liveness_fails_only_when_a_restart_may_help() {
    let mut readiness = Readiness { nvml: Some("driver stopped".into()), ..Readiness::default() };
    assert_eq!(liveness(&readiness).unwrap(), "ok");
    readiness.dead = true;
    assert_eq!(liveness(&readiness).unwrap_err(), "a restart may help: driver stopped");
}
