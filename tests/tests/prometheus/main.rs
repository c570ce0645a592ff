//! The chart's alerts and recording rules, with the real promtool: they are valid, each alert fires where it should and
//! only there, and each recording rule has the value that it should have (rules.yaml).
//!
//! Where there is no Go the tests count as ignored, never as passed.
#![allow(clippy::print_stderr, reason = "a test program talks on the terminal")]

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, ExitCode, Output, Stdio};

use anyhow::{Context, Result, ensure};
use gantry_e2e::helm::{Helm, chart};
use gantry_e2e::prometheus;
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::Value;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let go = Command::new("go").arg("version").stdout(Stdio::null()).status();
    let is_unsupported = !arguments.list && !go.is_ok_and(|status| status.success());
    if is_unsupported {
        eprintln!("tests of the rules are skipped: no Go toolchain to build promtool with");
    }
    let trials = [
        ("rules_are_valid", rules_are_valid as fn() -> Result<()>),
        ("rendered_rules_are_valid", rendered_rules_are_valid),
        ("rules_pass_their_tests", rules_pass_their_tests),
        ("failed_rule_test_is_noticed", failed_rule_test_is_noticed),
        ("every_rule_has_its_tests", every_rule_has_its_tests),
    ];
    let trials = trials.map(|(name, test)| {
        Trial::test(name, move || test().map_err(|error| Failed::from(format!("{error:#}"))))
            .with_ignored_flag(is_unsupported)
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

fn rules_are_valid() -> Result<()> {
    succeeded(&prometheus::promtool(&["check", "rules", &prometheus::rules().display().to_string()])?)
}

/// The groups of the chart's PrometheusRule, with prices and complete links.
fn rendered_rules_are_valid() -> Result<()> {
    let helm = Helm::locate_or_build(4)?;
    let chart = chart().display().to_string();
    let on = [
        "monitoring.rules.enabled=true",
        "monitoring.rules.runbooks=https://example.com/",
        "monitoring.rules.prices.NVIDIA L4=0.5",
    ];
    let mut args = vec!["template", "gantry", &chart, "--show-only", "templates/monitoring.yaml"];
    args.extend(on.iter().flat_map(|value| ["--set", *value]));
    let rule: Value = serde_saphyr::from_str(&helm.output(None, &args)?)?;
    ensure!(rule["kind"] == "PrometheusRule", "{}", rule["kind"]);
    let groups = rule["spec"]["groups"].as_array().context("the rule has groups")?;
    ensure!(groups.iter().any(|group| group["name"] == "gantry-prices"), "no prices");
    let file = tempfile::NamedTempFile::new()?;
    serde_json::to_writer(&file, &rule["spec"])?;
    succeeded(&prometheus::promtool(&["check", "rules", &file.path().display().to_string()])?)
}

fn rules_pass_their_tests() -> Result<()> {
    succeeded(&prometheus::promtool(&["test", "rules", &prometheus::rule_tests().display().to_string()])?)
}

/// An alert that does not fire where a test expects it fails that test.
fn failed_rule_test_is_noticed() -> Result<()> {
    let tests = std::fs::read_to_string(prometheus::rule_tests())?;
    let name = "gantry_plugin_config_refused{instance=\"n1\"}', values: '1x20'";
    ensure!(tests.contains(name), "no test has {name}");
    let changed = tests
        .replace(name, &name.replace("1x20", "0x20"))
        .replace("../../../charts/gantry/files/alerts.yaml", &prometheus::rules().display().to_string());
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), changed)?;
    let output = prometheus::promtool(&["test", "rules", &file.path().display().to_string()])?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success() && said.contains("GantryConfigRefused"), "{said}");
    Ok(())
}

/// Each alert has a case that fires and one that does not, and each recorded series a test that names it.
fn every_rule_has_its_tests() -> Result<()> {
    let read = |path| -> Result<Value> { Ok(serde_saphyr::from_str(&std::fs::read_to_string(path)?)?) };
    let (rules, tests) = (read(prometheus::rules())?, read(prometheus::rule_tests())?);
    let each = |value: &Value, field: &str| value[field].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut cases: BTreeMap<String, BTreeSet<bool>> = BTreeMap::new();
    let mut series = BTreeSet::new();
    for test in each(&tests, "tests") {
        for case in each(&test, "alert_rule_test") {
            let fires = !each(&case, "exp_alerts").is_empty();
            cases.entry(text(&case["alertname"])).or_default().insert(fires);
        }
        for case in each(&test, "promql_expr_test") {
            ensure!(!each(&case, "exp_samples").is_empty(), "{} expects nothing", case["expr"]);
            series.insert(text(&case["expr"]));
        }
    }
    let all = each(&rules, "groups").into_iter().flat_map(|group| each(&group, "rules"));
    for rule in all {
        match rule["alert"].as_str() {
            Some(alert) => {
                let known = cases.remove(alert).unwrap_or_default();
                ensure!(known.len() == 2, "{alert} has no test that fires, or none that does not");
            }
            None => {
                let record = text(&rule["record"]);
                ensure!(series.remove(&record), "{record} has no test");
            }
        }
    }
    ensure!(cases.is_empty() && series.is_empty(), "tests of unknown rules: {cases:?}, {series:?}");
    Ok(())
}

fn succeeded(output: &Output) -> Result<()> {
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    Ok(())
}
