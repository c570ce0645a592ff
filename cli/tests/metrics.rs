//! docs/metrics.md has the metrics that the daemons serve, and no others.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gantry_config::source::Report;
use gantry_extender::index::Index;
use gantry_extender::metrics::{
    Call, Decision, ExplainRequest, GaugeReading, Metrics, Outcome, PageRequest, RemediationStep, Verb, Write,
};
use gantry_extender::object_memory::ObjectMemory;
use gantry_extender::watched::WatchedResources;
use gantry_planner::decide::Options;
use gantry_plugin::health::XidCounts;
use gantry_plugin::observe::{AllocationOutcome, Observations, PreferenceOutcome};
use gantry_plugin::telemetry::Field;

const PAGE: &str = include_str!("../../docs/metrics.md");
const EXTENDER: &str = include_str!("../../extender/src/metrics.rs");
const PLUGIN: &str = include_str!("../../plugin/src/observe/metrics.rs");

/// A metric, as Prometheus sees it.
#[derive(Debug, PartialEq, Eq)]
struct Metric {
    kind: String,
    labels: BTreeSet<String>,
}

/// The names that a source registers. What has no series is not served, so a page alone does not tell.
fn registered(source: &str, prefix: &str) -> BTreeSet<String> {
    let calls = source.split(".register(").skip(1);
    let names = calls.map(|call| call.split('"').nth(1).unwrap());
    names.map(|name| format!("{prefix}{name}")).collect()
}

fn documented(prefix: &str) -> BTreeMap<String, Metric> {
    let words = |cell: &str| -> BTreeSet<String> {
        let words = cell.split(',').map(|word| word.trim().trim_matches('`').to_owned());
        words.filter(|word| !word.is_empty()).collect()
    };
    let rows = PAGE.lines().filter(|line| line.starts_with(&format!("| `{prefix}")));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind, labels, what] = cells[..] else {
            panic!("{row}");
        };
        assert!(!what.is_empty(), "{row}");
        let metric = Metric { kind: kind.to_owned(), labels: words(labels) };
        (name.trim_matches('`').to_owned(), metric)
    })
    .collect()
}

/// The metrics of a page in the text form.
fn served(page: &str) -> BTreeMap<String, Metric> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types
        .map(|declared| {
            let (name, kind) = declared.split_once(' ').unwrap();
            let series: Vec<String> = match kind {
                "counter" => vec![format!("{name}_total")],
                "histogram" => ["bucket", "sum", "count"].map(|end| format!("{name}_{end}")).into(),
                _ => vec![name.to_owned()],
            };
            let samples = page.lines().filter_map(|line| {
                let end = line.find(['{', ' '])?;
                let (of, rest) = line.split_at(end);
                series.iter().any(|name| name == of).then(|| labels(rest))
            });
            let labels = samples.flatten().collect();
            let name = if kind == "counter" { series[0].clone() } else { name.to_owned() };
            let metric = Metric { kind: kind.to_owned(), labels };
            (name, metric)
        })
        .collect()
}

/// Names of the labels in `{a="b",c="d"} 1`, but for a histogram's bounds.
fn labels(text: &str) -> BTreeSet<String> {
    let Some((inside, _)) = text.strip_prefix('{').and_then(|text| text.rsplit_once('}')) else {
        return BTreeSet::new();
    };
    let names = inside.split("\",").filter_map(|pair| pair.split_once("=\""));
    names.map(|(name, _)| name.to_owned()).filter(|name| name != "le").collect()
}

fn compare(prefix: &str, source: &str, page: &str) {
    let documented = documented(prefix);
    let said: BTreeSet<String> = documented
        .iter()
        .map(|(name, metric)| match metric.kind.as_str() {
            "counter" => name.strip_suffix("_total").unwrap().to_owned(),
            _ => name.clone(),
        })
        .collect();
    let there = registered(source, prefix);
    let undocumented: Vec<_> = there.difference(&said).collect();
    let gone: Vec<_> = said.difference(&there).collect();
    assert!(
        undocumented.is_empty() && gone.is_empty(),
        "docs/metrics.md does not have {undocumented:?}; no program serves {gone:?}"
    );
    for (name, metric) in served(page) {
        assert_eq!(documented[&name], metric, "{name}");
    }
}

#[test]
fn extender_metrics_are_documented() {
    let metrics = Metrics::new();
    let (verb, outcome) = ("filter", "some");
    metrics.calls.get_or_create(&Call { verb, code: 200 }).inc();
    metrics.seconds.get_or_create(&Verb { verb }).observe(0.1);
    metrics.decisions.get_or_create(&Decision { verb, outcome }).inc();
    metrics.gang_writes.get_or_create(&Write { verb, outcome }).inc();
    metrics.page_requests.get_or_create(&PageRequest { code: 200 }).inc();
    metrics.explain_requests.get_or_create(&ExplainRequest { code: 200 }).inc();
    for family in [
        &metrics.binds,
        &metrics.activations,
        &metrics.events,
        &metrics.gang_steps,
        &metrics.commits,
        &metrics.webhook_reviews,
    ] {
        family.get_or_create(&Outcome { outcome }).inc();
    }
    metrics.remediation_step(&RemediationStep { rule: "some".to_owned(), action: "cordon", outcome: "done" });
    metrics.remediation_reset("some", "healthy");
    metrics.mig_drain("evicted");
    let index = Index::new(Options::default(), &WatchedResources::new([]), "run".to_owned());
    let reading = GaugeReading::of(&index, &ObjectMemory::default());
    let page = metrics.page_of(&reading, None, true);
    // But for what a certificate brings.
    // And what nodes, waiting and granted pods and waiting gangs bring.
    assert_eq!(served(&page).len() + 8, registered(EXTENDER, "").len(), "others have a series");
    compare("gantry_extender_", EXTENDER, &page);
}

#[test]
fn plugin_metrics_are_documented() {
    let observed = Observations::default();
    let resource = "nvidia.com/gpu".into();
    observed.registered(&resource);
    observed.streams(&resource, 1);
    observed.cluster(true);
    observed.allocated(&resource, AllocationOutcome::Granted);
    observed.preferred(&resource, PreferenceOutcome::Granted, Duration::ZERO);
    let counts = XidCounts::default();
    counts.count(&"GPU-0badcafe".parse().unwrap(), 79);
    observed.count_xids(counts);
    let (_reporter, reports) = tokio::sync::watch::channel(Report::default());
    observed.count_configurations(reports);
    // But for what an inventory, a fault and a MIG layout bring.
    let page = observed.metrics().text().unwrap();
    assert_eq!(served(&page).len() + 7, registered(PLUGIN, "").len(), "others have a series");
    compare("gantry_plugin_", PLUGIN, &page);
}

#[test]
fn dcgm_metrics_are_documented() {
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `DCGM_"));
    let documented: Vec<(String, &str)> = rows
        .map(|row| {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            (format!("DCGM_{}", cells[0].trim_end_matches('`')), cells[1])
        })
        .collect();
    let served: Vec<(String, &str)> =
        Field::ALL.iter().map(|field| (field.name().to_owned(), field.kind())).collect();
    assert_eq!(documented, served);
}
