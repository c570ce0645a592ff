//! The real Prometheus and promtool, built once per state of `components/prometheus`. The go.mod there has the version.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::{Error, Result, components, gantry};

/// Without the discovery of clouds, which is most of what there is to compile.
const TAGS: &str = "remove_all_sd";

/// The path of `prometheus` or `promtool`, built first where it is missing.
///
/// # Errors
/// There is no Go, or it does not build.
pub fn locate_or_build(program: &str) -> Result<PathBuf> {
    let package = format!("github.com/prometheus/prometheus/cmd/{program}");
    components::program("prometheus", &package, TAGS, &["go.mod", "go.sum"])
}

/// Runs promtool with these arguments.
///
/// # Errors
/// It cannot be built or started.
pub fn promtool(args: &[&str]) -> Result<Output> {
    let program = locate_or_build("promtool")?;
    let mut command = Command::new(&program);
    command.args(args);
    command.output().map_err(|source| Error::Start { program: program.display().to_string(), source })
}

/// The chart's alerts and recording rules.
#[must_use]
pub fn rules() -> PathBuf {
    gantry::manifests().join("../charts/gantry/files/alerts.yaml")
}

/// The tests of these rules.
#[must_use]
pub fn rule_tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/prometheus/rules.yaml")
}
