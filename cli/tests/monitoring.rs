//! The alerts, recording rules and dashboards of the chart: every query is PromQL over metrics that the daemons serve
//! (docs/metrics.md, which another test compares with them), and every alert has its section in docs/runbooks.md.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use gantry_plugin::telemetry::Field;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::ConfigMap;
use promql_parser::parser;
use promql_parser::parser::{Expr, VectorSelector};
use promql_parser::util::{ExprVisitor, walk_expr};
use serde::Deserialize;
use serde_json::Value;

const METRICS: &str = include_str!("../../docs/metrics.md");
const RUNBOOKS: &str = include_str!("../../docs/runbooks.md");
const RULES: &str = include_str!("../../charts/gantry/files/alerts.yaml");

#[derive(Deserialize)]
struct Rules {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    record: Option<String>,
    alert: Option<String>,
    expr: String,
    #[serde(rename = "for")]
    _lasts: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

fn rules() -> Vec<Rule> {
    let rules: Rules = serde_saphyr::from_str(RULES).unwrap();
    rules.groups.into_iter().flat_map(|group| group.rules).collect()
}

/// The metrics of docs/metrics.md with their labels, as a query names them.
fn served() -> BTreeMap<String, BTreeSet<String>> {
    let mut served = BTreeMap::new();
    for row in METRICS.lines().filter(|line| line.starts_with("| `gantry_")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let name = cells[0].trim_matches('`');
        let labels = cells[2].split(',').map(|label| label.trim().trim_matches('`').to_owned());
        let mut labels: BTreeSet<String> = labels.filter(|label| !label.is_empty()).collect();
        if cells[1] == "histogram" {
            labels.insert("le".to_owned());
            for part in ["bucket", "sum", "count"] {
                served.insert(format!("{name}_{part}"), labels.clone());
            }
        } else {
            served.insert(name.to_owned(), labels);
        }
    }
    let labels = [
        "gpu",
        "UUID",
        "pci_bus_id",
        "device",
        "modelName",
        "Hostname",
        "GPU_I_PROFILE",
        "GPU_I_ID",
        "container",
        "namespace",
        "pod",
    ];
    for field in Field::ALL {
        served.insert(field.name().to_owned(), labels.map(str::to_owned).into());
    }
    served
}

/// Collects the selectors of a query.
#[derive(Default)]
struct Selectors(Vec<VectorSelector>);

impl ExprVisitor for Selectors {
    type Error = ();

    fn pre_visit(&mut self, expr: &Expr) -> Result<bool, ()> {
        match expr {
            Expr::VectorSelector(selector) => self.0.push(selector.clone()),
            Expr::MatrixSelector(matrix) => self.0.push(matrix.vs.clone()),
            _ => {}
        }
        Ok(true)
    }
}

/// Checks that a query is PromQL over served metrics and recorded series, and selects by labels that they have.
fn check(query: &str, place: &str) {
    let expr = parser::parse(query).unwrap_or_else(|error| panic!("{place}: {query}: {error}"));
    let mut selectors = Selectors::default();
    walk_expr(&mut selectors, &expr).unwrap();
    let recorded = rules().into_iter().filter_map(|rule| rule.record);
    // Made from the prices in the chart's values.
    let recorded: BTreeSet<String> = recorded.chain(["gantry:gpu_price:per_hour".to_owned()]).collect();
    let served = served();
    assert!(!selectors.0.is_empty(), "{place}: {query} selects nothing");
    for selector in selectors.0 {
        let name = selector.name.unwrap_or_else(|| panic!("{place}: {query} selects without a name"));
        let Some(labels) = served.get(&name) else {
            assert!(recorded.contains(&name), "{place}: {name} is neither served nor recorded");
            continue;
        };
        for matcher in &selector.matchers.matchers {
            assert!(labels.contains(&matcher.name), "{place}: {name} has no label {}", matcher.name);
        }
    }
}

#[test]
fn rules_query_metrics_that_are_served() {
    for rule in rules() {
        let name = rule.record.clone().or_else(|| rule.alert.clone()).unwrap();
        check(&rule.expr, &name);
        if let Some(record) = rule.record {
            assert!(record.starts_with("gantry:"), "{record}");
        }
    }
}

#[test]
fn every_alert_has_a_severity_a_summary_and_a_runbook() {
    let mut alerts = BTreeSet::new();
    for rule in rules().into_iter().filter(|rule| rule.alert.is_some()) {
        let alert = rule.alert.unwrap();
        assert!(["page", "ticket"].contains(&rule.labels["severity"].as_str()), "{alert}");
        assert!(!rule.annotations["summary"].is_empty(), "{alert}");
        let anchor = format!("runbooks.md#{}", alert.to_lowercase());
        assert_eq!(rule.annotations["runbook_url"], anchor);
        let section = RUNBOOKS.split(&format!("\n## {alert}\n")).nth(1);
        let section = section.unwrap_or_else(|| panic!("no runbook of {alert}"));
        let section = section.split("\n## ").next().unwrap();
        for part in ["**Means:**", "**Look at:**", "**Do:**"] {
            assert!(section.contains(part), "the runbook of {alert} lacks {part}");
        }
        alerts.insert(alert);
    }
    let sections: BTreeSet<String> =
        RUNBOOKS.lines().filter_map(|line| line.strip_prefix("## ")).map(str::to_owned).collect();
    assert_eq!(sections, alerts, "sections and alerts");
}

#[test]
fn dashboards_query_metrics_that_are_served() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/gantry/files/dashboards");
    let mut queries = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let board: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert_eq!(board["uid"], name);
        for panel in board["panels"].as_array().unwrap() {
            let title = panel["title"].as_str().unwrap();
            for target in panel["targets"].as_array().unwrap() {
                // A value in place of an empty result is no selector.
                let query = target["expr"].as_str().unwrap().replace(" or vector(0)", "");
                check(&query, &format!("{name}, {title}"));
                queries += 1;
            }
        }
    }
    assert!(queries > 30, "{queries}");
}

/// The queries of docs/metrics.md, such as the join with dcgm-exporter's series, are PromQL over documented metrics.
#[test]
fn documented_queries_are_valid() {
    let blocks: Vec<&str> =
        METRICS.split("```promql\n").skip(1).filter_map(|block| block.split("```").next()).collect();
    assert!(blocks.len() >= 4, "{} queries", blocks.len());
    for block in blocks {
        check(block, "docs/metrics.md");
    }
}

/// The samples for autoscalers: each object is of a known type, the two halves of the first agree, queries are valid.
#[test]
fn autoscaler_samples_are_valid() {
    let hpa = include_str!("../../docs/samples/hpa.yaml");
    let (adapter, scaler) = hpa.split_once("\n---\n").unwrap();
    let adapter: ConfigMap = serde_saphyr::from_str(adapter).unwrap();
    let adapter: Value = serde_saphyr::from_str(&adapter.data.unwrap()["config.yaml"]).unwrap();
    let rule = &adapter["rules"][0];
    check(rule["seriesQuery"].as_str().unwrap(), "the adapter's series");
    let query = rule["metricsQuery"].as_str().unwrap();
    let query = query.replace("<<.GroupBy>>", "pod").replace("<<.Series>>", "DCGM_FI_DEV_GPU_UTIL");
    check(&query.replace("<<.LabelMatchers>>", "namespace=\"a\""), "the adapter's query");
    // What the type does not have is lost on the way back.
    let written: Value = serde_saphyr::from_str(scaler).unwrap();
    let scaler: HorizontalPodAutoscaler = serde_saphyr::from_str(scaler).unwrap();
    assert_eq!(serde_json::to_value(&scaler).unwrap(), written);
    let metric = &scaler.spec.unwrap().metrics.unwrap()[0];
    assert_eq!(metric.pods.as_ref().unwrap().metric.name, rule["name"]["as"]);
    let keda: Value = serde_saphyr::from_str(include_str!("../../docs/samples/keda.yaml")).unwrap();
    assert_eq!(keda["kind"], "ScaledObject");
    let query = |trigger: usize| keda["spec"]["triggers"][trigger]["metadata"]["query"].as_str().unwrap();
    check(query(0), "the scaler's query");
    // The application's own metric.
    parser::parse(query(1)).unwrap();
}
