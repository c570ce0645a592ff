//! A real Prometheus scrapes the daemons and evaluates the chart's rules as they are.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_e2e::hardware::Hardware;
use gantry_e2e::{Program, Sandbox, gantry, prometheus, until};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};

use super::modes::{chosen, run_on};
use crate::bed::Bed;
use crate::gangs::GANG_LIMIT;

const PROMETHEUS: &str = "prometheus";
const LISTEN: &str = "127.0.0.1:9090";
/// The alert for a GPU waits for a minute.
const ALERT_LIMIT: Duration = Duration::from_secs(150);
/// The GPU has fallen off the bus.
const OFF_THE_BUS: u64 = 79;

/// Recorded series that have no value here: there is no deviation and no gang, and neither prices nor the load of GPUs are
/// configured.
const WITHOUT_VALUE: [&str; 5] = [
    "gantry:deviations:ratio_1h",
    "gantry:gang_wait_seconds:p90_1h",
    "gantry:held_unused_gpus:by_namespace",
    "gantry:idle_cost:per_hour",
    "gantry:held_unused_cost:per_hour",
];

pub(super) async fn prometheus_records_and_alerts(bed: &Bed) -> Result<()> {
    let outcome = recorded_and_alerted(bed).await;
    let control = bed.cluster().control();
    if let Ok(daemon) = control.daemon(PROMETHEUS) {
        daemon.kill().await?;
        control.forget(PROMETHEUS)?;
    }
    outcome
}

async fn recorded_and_alerted(bed: &Bed) -> Result<()> {
    let gpus = bed.gpus().await?;
    let cluster = bed.cluster();
    let api = bed.namespace("e2e-monitoring").await?;
    // Not the node's own GPUs, so that no fault is left on them.
    let node = &cluster.nodes()[2];
    let mut hardware = Hardware::install_in(node, &gantry::machine_file("l4-4x-pcie"), "alerting")?;
    gpus.serve(cluster, node.name(), Some(&hardware), &[], &[("nvidia.com/gpu", 4)]).await?;
    let control = cluster.control();
    start(bed, control).await?;

    run_on(&api, "holds-two", "nvidia.com/gpu", 2, cluster.nodes()[0].name()).await?;
    // Enough GPUs are free for kube-scheduler's own count.
    let mut waits = chosen("waits", "nvidia.com/gpu", 3, node.name())?;
    let annotations = [("gantry.dev/required-link".to_owned(), "nvlink".to_owned())];
    waits.metadata.annotations = Some(annotations.into());
    api.create(&PostParams::default(), &waits).await?;
    is(control, "gantry:devices:by_state{state=\"held\"}", 2.0).await?;
    is(control, "gantry:devices:held_ratio", 0.1).await?;
    is(control, "gantry:waiting_devices:by_namespace{namespace=\"e2e-monitoring\"}", 3.0).await?;
    is(control, "gantry:free_sets:by_devices{devices=\"8\"}", 1.0).await?;
    is(control, "gantry:gangs:waiting", 0.0).await?;
    for record in recorded()? {
        let is_without = WITHOUT_VALUE.contains(&record.as_str());
        if !is_without {
            until(format!("a value of {record}"), GANG_LIMIT, async || {
                let values = query(control, &record).await?;
                // A quantile of nothing, such as of a verb that was not called, is no number.
                if values.iter().any(|value| value.is_finite()) { Ok(()) } else { Err(format!("{values:?}")) }
            })
            .await?;
        }
    }
    ensure!(firing(control).await?.is_empty(), "alerts without a fault: {:?}", firing(control).await?);

    hardware.controller().raise_xid(1, OFF_THE_BUS)?;
    let sick = hardware.machine().gpus().get(1).and_then(|gpu| gpu.uuid.clone()).context("four GPUs")?;
    let alerts = until("the alert for the GPU", ALERT_LIMIT, async || {
        let alerts = firing(control).await.map_err(|error| format!("{error:#}"))?;
        if alerts.is_empty() { Err("none fires".to_owned()) } else { Ok(alerts) }
    })
    .await?;
    let [alert] = &alerts[..] else {
        anyhow::bail!("more than one alert for one GPU: {alerts:?}");
    };
    let (labels, annotations) = (&alert["labels"], &alert["annotations"]);
    ensure!(labels["alertname"] == "GantryGpuUnhealthy" && labels["gpu"] == sick.to_string(), "{alert}");
    ensure!(labels["severity"] == "ticket", "{alert}");
    let summary = annotations["summary"].as_str().unwrap_or_default();
    ensure!(summary.contains(&sick.to_string()) && !summary.contains("{{"), "{alert}");
    all_rules_were_evaluated(control).await
}

/// Starts Prometheus with the chart's file of rules and all daemons as targets, and waits until it has scraped each.
async fn start(bed: &Bed, control: &Sandbox) -> Result<()> {
    let program = prometheus::locate_or_build(PROMETHEUS)?;
    let nodes: Api<Node> = Api::all(bed.client());
    let nodes = nodes.list(&ListParams::default()).await?;
    let addresses = nodes.iter().filter_map(|node| {
        let addresses = node.status.as_ref()?.addresses.as_ref()?;
        let internal = addresses.iter().find(|address| address.type_ == "InternalIP")?;
        Some(format!("{}:9410", internal.address))
    });
    let plugins: Vec<String> = addresses.collect();
    let folder = control.folder().join(PROMETHEUS);
    std::fs::create_dir_all(&folder)?;
    let config = json!({
        "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
        "rule_files": [prometheus::rules()],
        "scrape_configs": [
            { "job_name": "extender", "static_configs": [{ "targets": ["127.0.0.1:8011"] }] },
            { "job_name": "plugin", "static_configs": [{ "targets": &plugins }] },
        ],
    });
    let path = folder.join("prometheus.yaml");
    std::fs::write(&path, config.to_string())?;
    let argument = |name: &str, value: &Path| format!("--{name}={}", value.display());
    let args = [
        argument("config.file", &path),
        argument("storage.tsdb.path", &folder.join("data")),
        format!("--web.listen-address={LISTEN}"),
    ];
    let daemon = control.run(Program::new(PROMETHEUS, program, args)).await?;
    until("all daemons scraped", GANG_LIMIT, async || {
        daemon.check().map_err(|error| error.to_string())?;
        let up = query(control, "up == 1").await?.len();
        if up == plugins.len() + 1 { Ok(()) } else { Err(format!("{up} are up")) }
    })
    .await?;
    Ok(())
}

/// The names of the recorded series.
fn recorded() -> Result<Vec<String>> {
    let rules: Value = serde_saphyr::from_str(&std::fs::read_to_string(prometheus::rules())?)?;
    let groups = rules["groups"].as_array().context("the file has groups")?;
    let all = groups.iter().flat_map(|group| group["rules"].as_array().into_iter().flatten());
    let names: Vec<String> = all.filter_map(|rule| Some(rule["record"].as_str()?.to_owned())).collect();
    ensure!(names.len() > WITHOUT_VALUE.len(), "{names:?}");
    Ok(names)
}

/// Waits until a query has one value, and that.
async fn is(control: &Sandbox, text: &str, expected: f64) -> Result<()> {
    until(format!("{text} = {expected}"), GANG_LIMIT, async || {
        let values = query(control, text).await?;
        match values[..] {
            [value] if (value - expected).abs() < 1e-9 => Ok(()),
            _ => Err(format!("{values:?}")),
        }
    })
    .await?;
    Ok(())
}

/// The values of a query now.
async fn query(control: &Sandbox, text: &str) -> std::result::Result<Vec<f64>, String> {
    let answer = api(control, &format!("query?query={}", encoded(text))).await;
    let answer = answer.map_err(|error| format!("{error:#}"))?;
    let samples = answer["result"].as_array().into_iter().flatten();
    Ok(samples.filter_map(|sample| sample["value"][1].as_str()?.parse().ok()).collect())
}

async fn firing(control: &Sandbox) -> Result<Vec<Value>> {
    let answer = api(control, "alerts").await?;
    let alerts = answer["alerts"].as_array().context("a list of alerts")?;
    Ok(alerts.iter().filter(|alert| alert["state"] == "firing").cloned().collect())
}

async fn all_rules_were_evaluated(control: &Sandbox) -> Result<()> {
    let answer = api(control, "rules").await?;
    let groups = answer["groups"].as_array().context("a list of groups")?;
    let rules: Vec<&Value> = groups.iter().filter_map(|group| group["rules"].as_array()).flatten().collect();
    ensure!(rules.len() > 30, "{} rules", rules.len());
    for rule in rules {
        ensure!(rule["health"] == "ok", "{}: {}", rule["name"], rule["lastError"]);
    }
    Ok(())
}

/// The data of an answer of Prometheus' HTTP API.
async fn api(control: &Sandbox, path: &str) -> Result<Value> {
    let url = format!("http://{LISTEN}/api/v1/{path}");
    let text = control.exec(&["busybox", "wget", "-q", "-O", "-", &url]).await?;
    let mut answer: Value = serde_json::from_str(&text)?;
    ensure!(answer["status"] == "success", "{text}");
    Ok(answer["data"].take())
}

/// A query as a part of a URL.
fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02x}")).collect()
}
