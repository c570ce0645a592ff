//! A real Prometheus scrapes the daemons as the chart's monitors say, and evaluates the chart's rules, the queries of its
//! dashboards and those of the documentation.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_e2e::hardware::Hardware;
use gantry_e2e::helm::{self, Helm};
use gantry_e2e::{Program, Sandbox, gantry, prometheus, until};
use gantry_nvml_sim::control::Activity;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};

use super::modes::{chosen, run_on};
use crate::bed::Bed;
use crate::gangs::GANG_LIMIT;
use crate::pods;

const PROMETHEUS: &str = "prometheus";
const LISTEN: &str = "127.0.0.1:9090";
/// The alert for a GPU waits for a minute.
const ALERT_LIMIT: Duration = Duration::from_secs(150);
/// The GPU has fallen off the bus.
const OFF_THE_BUS: u64 = 79;

/// Price of a GPU that computes, per hour.
const PRICE: f64 = 2.5;
/// Recorded series that have no value here: there is no deviation and no gang.
const WITHOUT_VALUE: [&str; 2] = ["gantry:deviations:ratio_1h", "gantry:gang_wait_seconds:p90_1h"];

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
    let watched = ["--dcgm-metrics", "--dcgm-interval=1", "--pod-metrics"].map(str::to_owned);
    gpus.serve(cluster, node.name(), Some(&hardware), &watched, &[("nvidia.com/gpu", 4)]).await?;
    let busy = &cluster.nodes()[1];
    let mut computing = Hardware::install_in(busy, &gantry::machine_file("hgx-h100"), "computing")?;
    gpus.serve(cluster, busy.name(), Some(&computing), &watched, &[("nvidia.com/gpu", 8)]).await?;
    let control = cluster.control();
    let model = computing.machine().gpus().first().and_then(|gpu| gpu.model.clone());
    start(bed, control, &model.context("a GPU has a model")?).await?;

    run_on(&api, "holds-two", "nvidia.com/gpu", 2, cluster.nodes()[0].name()).await?;
    let computes = run_on(&api, "computes", "nvidia.com/gpu", 2, busy.name()).await?;
    run_on(&api, "idles", "nvidia.com/gpu", 1, busy.name()).await?;
    work(bed, &computes, &mut computing).await?;
    // Enough GPUs are free for kube-scheduler's own count.
    let mut waits = chosen("waits", "nvidia.com/gpu", 3, node.name())?;
    let annotations = [("gantry.dev/required-link".to_owned(), "nvlink".to_owned())];
    waits.metadata.annotations = Some(annotations.into());
    api.create(&PostParams::default(), &waits).await?;
    is(control, "gantry:devices:by_state{state=\"held\"}", 5.0).await?;
    is(control, "gantry:devices:held_ratio", 0.25).await?;
    is(control, "gantry:waiting_devices:by_namespace{namespace=\"e2e-monitoring\"}", 3.0).await?;
    is(control, "gantry:free_sets:by_devices{devices=\"8\"}", 0.0).await?;
    is(control, "gantry:gangs:waiting", 0.0).await?;
    holders_are_named(control).await?;
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
    all_rules_were_evaluated(control).await?;
    // The unhealthy GPU is hot as well, so that the last documented query finds it.
    hardware.controller().set_temperature(1, 90)?;
    for text in documented()? {
        until(format!("a value of the documented query {text}"), GANG_LIMIT, async || {
            let values = query(control, &text).await?;
            if values.is_empty() { Err("no value".to_owned()) } else { Ok(()) }
        })
        .await?;
    }
    dashboards_are_evaluated(control).await
}

/// Both GPUs of the pod compute: one waits for its memory and for PCIe, the other does not.
async fn work(bed: &Bed, pod: &Pod, hardware: &mut Hardware) -> Result<()> {
    let held = pods::held(bed.cluster(), pod, "main").await?;
    let gpus = hardware.machine().gpus().iter().enumerate();
    let held = gpus.filter(|(_, gpu)| gpu.uuid.as_ref().is_some_and(|uuid| held.contains(uuid.as_str())));
    let indices: Vec<u8> = held.filter_map(|(index, _)| u8::try_from(index).ok()).collect();
    let [waits, runs] = indices[..] else {
        anyhow::bail!("the pod holds the GPUs {indices:?}");
    };
    let control = hardware.controller();
    let waiting = Activity {
        sm_active: Some(20),
        dram_active: Some(90),
        pcie_received: Some(16_000),
        ..Activity::default()
    };
    control.set_activity(waits, None, waiting)?;
    control.set_activity(runs, None, Activity { sm_active: Some(80), ..Activity::default() })?;
    for gpu in [waits, runs] {
        control.set_utilization(gpu, 50)?;
    }
    Ok(())
}

/// What the GPUs do has the holder's names, not the plugin's; what it costs follows from that.
async fn holders_are_named(control: &Sandbox) -> Result<()> {
    let held =
        |pod: &str| format!("count(DCGM_FI_DEV_GPU_UTIL{{namespace=\"e2e-monitoring\", pod=\"{pod}\"}})");
    is(control, &held("computes"), 2.0).await?;
    is(control, &held("idles"), 1.0).await?;
    is(control, "count(DCGM_FI_DEV_GPU_UTIL{pod=\"\"})", 9.0).await?;
    is(control, "sum(gantry_plugin_allocated_devices{namespace=\"e2e-monitoring\", pod=\"computes\"})", 2.0)
        .await?;
    is(control, "gantry:held_unused_gpus:by_namespace{namespace=\"e2e-monitoring\"}", 1.0).await?;
    is(control, "gantry:held_unused_cost:per_hour{namespace=\"e2e-monitoring\"}", PRICE).await?;
    is(control, "gantry:memory_bound_gpus:by_namespace{namespace=\"e2e-monitoring\"}", 1.0).await?;
    is(control, "sum(gantry:pcie_saturated_gpus:by_node)", 1.0).await
}

/// The queries of docs/metrics.md.
fn documented() -> Result<Vec<String>> {
    let page = std::fs::read_to_string(gantry::manifests().join("../docs/metrics.md"))?;
    let blocks = page.split("```promql\n").skip(1).filter_map(|block| block.split("```").next());
    let queries: Vec<String> = blocks.map(str::to_owned).collect();
    ensure!(queries.len() >= 4, "{queries:?}");
    Ok(queries)
}

/// Prometheus evaluates every query of the dashboards.
async fn dashboards_are_evaluated(control: &Sandbox) -> Result<()> {
    let mut queries = 0;
    for file in std::fs::read_dir(helm::chart().join("files/dashboards"))? {
        let path = file?.path();
        let board: Value = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
        let panels = board["panels"].as_array().context("a list of panels")?;
        for target in panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten() {
            let text = target["expr"].as_str().context("a query")?;
            let answer = query(control, text).await;
            answer.map_err(|error| anyhow::anyhow!("{}: {text}: {error}", path.display()))?;
            queries += 1;
        }
    }
    ensure!(queries > 60, "{queries} queries");
    Ok(())
}

/// What the chart makes for the Prometheus Operator.
struct Monitors {
    /// Groups of rules, with prices.
    rules: Value,
    plugin: Vec<Value>,
    extender: Vec<Value>,
}

impl Monitors {
    fn render(model: &str) -> Result<Self> {
        let price = format!("monitoring.rules.prices.{model}={PRICE}");
        let on = [
            "monitoring.podMonitor.enabled=true",
            "monitoring.serviceMonitor.enabled=true",
            "monitoring.rules.enabled=true",
            price.as_str(),
            "plugin.dcgmMetrics=true",
            "plugin.podMetrics=true",
            "scheduler.mode=own",
        ];
        let chart = helm::chart().display().to_string();
        let mut args = vec!["template", "gantry", &chart, "--show-only", "templates/monitoring.yaml"];
        args.extend(on.iter().flat_map(|value| ["--set", *value]));
        let text = Helm::locate_or_build(4)?.output(None, &args)?;
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text)?;
        let spec = |kind: &str| {
            let object = objects.iter().find(|object| object["kind"] == kind);
            object.map(|object| object["spec"].clone()).with_context(|| format!("the chart makes no {kind}"))
        };
        let list = |value: &Value| value.as_array().cloned().context("a list of endpoints");
        Ok(Self {
            rules: spec("PrometheusRule")?,
            plugin: list(&spec("PodMonitor")?["podMetricsEndpoints"])?,
            extender: list(&spec("ServiceMonitor")?["endpoints"])?,
        })
    }
}

/// A scrape configuration as the Prometheus Operator makes it of a monitor's endpoint. The labels of the targets are those
/// that it adds.
fn scrape_config(name: &str, endpoint: &Value, targets: &[(String, String)]) -> Result<Value> {
    let relabelings = endpoint["relabelings"].as_array().cloned().unwrap_or_default();
    for relabeling in &relabelings {
        let keys = relabeling.as_object().context("a relabeling")?.keys();
        // Others have different names in Prometheus' own configuration.
        ensure!(keys.clone().all(|key| key == "action" || key == "regex"), "{relabeling}");
    }
    let path = endpoint["path"].as_str().unwrap_or("/metrics");
    let targets: Vec<Value> = targets
        .iter()
        .map(|(address, pod)| {
            let labels = json!({ "namespace": "gantry-system", "pod": pod, "container": "gantry" });
            json!({ "targets": [address], "labels": labels })
        })
        .collect();
    Ok(json!({
        "job_name": format!("{name}{path}"),
        "metrics_path": path,
        "honor_labels": endpoint["honorLabels"].as_bool().unwrap_or(false),
        "relabel_configs": relabelings,
        "static_configs": targets,
    }))
}

/// Starts Prometheus with the chart's rules, a price for a model and all daemons as targets, and waits until it has scraped
/// each.
async fn start(bed: &Bed, control: &Sandbox, model: &str) -> Result<()> {
    let program = prometheus::locate_or_build(PROMETHEUS)?;
    let monitors = Monitors::render(model)?;
    let nodes: Api<Node> = Api::all(bed.client());
    let nodes = nodes.list(&ListParams::default()).await?;
    let addresses = nodes.iter().filter_map(|node| {
        let addresses = node.status.as_ref()?.addresses.as_ref()?;
        let internal = addresses.iter().find(|address| address.type_ == "InternalIP")?;
        let pod = format!("gantry-plugin-{}", node.metadata.name.as_deref()?);
        Some((format!("{}:9410", internal.address), pod))
    });
    let plugins: Vec<(String, String)> = addresses.collect();
    let extender = [("127.0.0.1:8011".to_owned(), "gantry-extender-0".to_owned())];
    let folder = control.folder().join(PROMETHEUS);
    std::fs::create_dir_all(&folder)?;
    let rules = folder.join("rules.yaml");
    std::fs::write(&rules, monitors.rules.to_string())?;
    let mut scrapes = Vec::new();
    for endpoint in &monitors.plugin {
        scrapes.push(scrape_config("plugin", endpoint, &plugins)?);
    }
    for endpoint in &monitors.extender {
        scrapes.push(scrape_config("extender", endpoint, &extender)?);
    }
    let config = json!({
        "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
        "rule_files": [rules],
        "scrape_configs": scrapes,
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
        // One plugin runs without metrics of the hardware, and has no such page.
        let up = query(control, "up{job!=\"plugin/metrics/dcgm\"} == 1").await?.len();
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
