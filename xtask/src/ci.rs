//! The steps of CI, in the order in which a mistake is cheapest to learn of.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::counts::Counts;
use crate::run::{cargo, output, root, run, run_into, run_reading, target};
use crate::{generate, mutants, words};

/// Everything, ending on the counts of all tests.
pub(crate) fn all() -> Result<()> {
    step("formatting", fmt)?;
    step("lints", lint)?;
    step("generated files", || generate::run(true))?;
    step("licences and bans", deny)?;
    let mut programs = step("build", build)?;
    // End-to-end tests wait most of the time, and the others compute.
    let mut beside = vec![tests()];
    for name in BESIDE {
        let program = programs.remove(name).with_context(|| format!("{END_TO_END} has no test {name}"))?;
        beside.push(end_to_end(&program));
    }
    let log = target()?.join("ci-tests.log");
    let others = std::thread::spawn({
        let log = log.clone();
        move || run_into(&log, beside)
    });
    let mut counts =
        step("end-to-end tests, with the other tests beside them", || each(&programs, end_to_end))?;
    let succeeded = others.join().map_err(|_| anyhow!("the tests ended with a panic"))??;
    counts += step("tests", || {
        let output = std::fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
        Ok(replay(&String::from_utf8_lossy(&output), succeeded))
    })?;
    counts.conclude()
}

/// End-to-end tests that run after the tests without a cluster and beside the scenarios, so that both take equally long.
const BESIDE: [&str; 2] = ["docs", IMAGE];

/// Pods of the scenarios in which many come and go.
const PODS: &str = "300";
/// Seconds of each of the soak test's nodes, and the numbers of random schedules and of those of the whole extender.
const SOAK_SECONDS: &str = "600";
const SCHEDULES: &str = "100000";
const SHELL_SCHEDULES: &str = "300";

/// What takes too long for every commit, ending on the counts of its tests.
pub(crate) fn nightly(first: u64) -> Result<()> {
    let programs = build()?;
    let mut counts = step("all scenarios", || {
        let mut scenarios = end_to_end(&programs[SCENARIOS]);
        counted(scenarios.env("GANTRY_PODS", PODS).arg("--include-ignored"))
    })?;
    counts +=
        step("all tests of the image", || counted(end_to_end(&programs[IMAGE]).arg("--include-ignored")))?;
    counts += step("soak test", || {
        run(&mut cargo(&["build", "--locked", "--package", "gantry"]))?;
        let mut soak = cargo(&["test", "--locked", "--package", "gantry-e2e", "--test", "soak"]);
        counted(soak.env("GANTRY_SOAK_SECONDS", SOAK_SECONDS).args(["--", "--nocapture"]))
    })?;
    for (test, count) in [("schedules", SCHEDULES), ("shell", SHELL_SCHEDULES)] {
        counts += step(&format!("random schedules: {test}"), || {
            let words = ["test", "--locked", "--release", "--package", "gantry-extender", "--test", test];
            let mut schedules = cargo(&words);
            schedules.env("GANTRY_FIRST", first.to_string()).env("GANTRY_SCHEDULES", count);
            counted(schedules.args(["--", "--nocapture"]))
        })?;
    }
    counts.conclude()
}

/// `cargo fmt --check`.
pub(crate) fn fmt() -> Result<()> {
    run(&mut cargo(&["fmt", "--all", "--check"]))
}

/// The language lint, whether mutants apply, the dependencies of pure crates and of the shipped program, and clippy with
/// warnings denied.
pub(crate) fn lint() -> Result<()> {
    words::check()?;
    mutants::check()?;
    pure_crates()?;
    shipped_program()?;
    run(&mut cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))
}

/// Packages that the shipped program must not contain.
const FAKES: [&str; 3] = ["gantry-demo", "gantry-nvml-sim", "gantry-sim-cluster"];

/// Crates that only compute, and packages by which I/O, async or a clock would enter them.
const PURE: [&str; 5] = ["gantry-topology", "gantry-smi", "gantry-gang", "gantry-planner", "gantry-map"];
const IMPURE: [&str; 4] = ["hyper", "kube-client", "mio", "tokio"];

/// Checks that `gantry` compiles without its default features, as in the image, and contains no simulator.
fn shipped_program() -> Result<()> {
    let package = ["--package", "gantry", "--no-default-features"];
    run(cargo(&["check", "--locked"]).args(package))?;
    depends_on_none(&package, &FAKES)
}

/// Checks that the crates without I/O depend on no package that does I/O.
fn pure_crates() -> Result<()> {
    PURE.iter().try_for_each(|package| depends_on_none(&["--package", package], &IMPURE))
}

/// Fails if one of the `excluded` packages is in the dependency tree of `package`, the arguments that select it.
fn depends_on_none(package: &[&str], excluded: &[&str]) -> Result<()> {
    let tree = output(cargo(&["tree", "--locked", "--edges=normal", "--prefix=none"]).args(package))?;
    let mut names = tree.lines().filter_map(|line| line.split(' ').next());
    if let Some(found) = names.find(|name| excluded.contains(name)) {
        let package = package.join(" ");
        bail!(
            "{found} is a dependency that is excluded there: `cargo tree {package} --invert {found}` shows why"
        );
    }
    Ok(())
}

/// The package of the end-to-end tests, and its test that has the scenarios.
const END_TO_END: &str = "gantry-e2e";
const SCENARIOS: &str = "e2e";
/// Its test of the daemons as pods of the image.
const IMAGE: &str = "image";

/// Builds everything that tests are or start, and returns the end-to-end tests' programs by name. All packages are built
/// together: cargo would build the dependencies of a selection of them again, with other features.
pub(crate) fn build() -> Result<BTreeMap<String, PathBuf>> {
    let mut command =
        cargo(&["build", "--workspace", "--locked", "--message-format=json-render-diagnostics"]);
    let messages = output(command.args(TARGETS))?;
    let mut programs = BTreeMap::new();
    for line in messages.lines() {
        let message: serde_json::Value = serde_json::from_str(line).context("the messages of cargo build")?;
        let package = message["package_id"].as_str().unwrap_or_default();
        let is_test = package.contains(&format!("#{END_TO_END}@")) && message["profile"]["test"] == true;
        if let (true, Some(program)) = (is_test, message["executable"].as_str()) {
            let name = message["target"]["name"].as_str().unwrap_or_default();
            programs.insert(name.to_owned(), program.into());
        }
    }
    ensure!(programs.contains_key(SCENARIOS), "cargo built no test {SCENARIOS} of {END_TO_END}");
    Ok(programs)
}

/// What is built: all but the benchmarks, and without examples in comments, of which there are none.
const TARGETS: [&str; 4] = ["--lib", "--bins", "--tests", "--examples"];

/// The tests that need no cluster.
fn tests() -> Command {
    let mut command = cargo(&["test", "--workspace", "--exclude", END_TO_END, "--no-fail-fast", "--locked"]);
    command.args(TARGETS);
    command
}

/// All tests that need no cluster. Counts failures instead of stopping at them.
pub(crate) fn test() -> Result<Counts> {
    build()?;
    counted(&mut tests())
}

/// The variable that names the end-to-end tests' version of Kubernetes.
const KUBERNETES: &str = "GANTRY_KUBERNETES";

/// The versions of Kubernetes that scenarios can run on, such as `1.34`. The first is that of CI.
pub(crate) fn kubernetes_versions() -> Vec<&'static str> {
    let go_mod = include_str!("../../tests/components/kubernetes/go.mod");
    let default = go_mod.lines().filter_map(|line| line.trim().strip_prefix("k8s.io/kubernetes v"));
    let others = include_str!("../../tests/components/kubernetes/releases").lines();
    let releases = default.chain(others.filter_map(|release| release.strip_prefix('v')));
    releases.filter_map(|release| Some(release.rsplit_once('.')?.0)).collect()
}

/// The scenarios on a real Kubernetes, those with `filter` in their name. Without a filter and a version, also the other
/// end-to-end tests.
pub(crate) fn e2e(filter: Option<&str>, kubernetes: Option<&str>) -> Result<Counts> {
    let mut programs = build()?;
    programs.retain(|name, _| filter.or(kubernetes).is_none() || name == SCENARIOS);
    each(&programs, |program| {
        let mut command = end_to_end(program);
        command.args(filter).envs(kubernetes.map(|version| (KUBERNETES, version)));
        command
    })
}

/// Runs programs one after the other.
fn each(programs: &BTreeMap<String, PathBuf>, command: impl Fn(&Path) -> Command) -> Result<Counts> {
    let mut counts = Counts::default();
    for (name, program) in programs {
        counts += step(name, || counted(&mut command(program)))?;
    }
    Ok(counts)
}

/// A program of the end-to-end tests, as cargo starts it.
fn end_to_end(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root().join("tests"));
    command
}

/// Licences, bans and sources. The advisory database is the public pipeline's part.
pub(crate) fn deny() -> Result<()> {
    let program = tool("cargo-deny", CARGO_DENY)?;
    run(Command::new(program).current_dir(root()).args(["check", "bans", "licenses", "sources"]))
}

/// The version of cargo-deny that checks licences and bans.
const CARGO_DENY: &str = "0.20.2";

/// Where built tools are kept between runs: `$GANTRY_CACHE` or `~/.cache/gantry`.
pub(crate) fn cache() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("GANTRY_CACHE") {
        return Ok(folder.into());
    }
    let home = std::env::var_os("HOME").context("neither GANTRY_CACHE nor HOME is set")?;
    Ok(PathBuf::from(home).join(".cache/gantry"))
}

/// Path of a tool of crates.io, which is installed if it is not there yet: not optimised, which takes longer to build
/// than its runs.
pub(crate) fn tool(name: &str, version: &str) -> Result<PathBuf> {
    let folder = cache()?.join("tools").join(format!("{name}-{version}"));
    let program = folder.join("bin").join(name);
    if !program.exists() {
        let folder = folder.to_str().context("the cache folder's path is not UTF-8")?;
        run(&mut cargo(&["install", name, "--debug", "--locked", "--version", version, "--root", folder]))?;
    }
    Ok(program)
}

/// Every benchmark there is.
pub(crate) const BENCHMARKS: [&str; 8] =
    ["choice", "decisions", "latency", "plans", "gangs", "socket", "scheduler", "peer"];

/// Benchmarks of whole programs: these measure what is shipped. It takes minutes to link, so others make do with the
/// `bench` profile's.
const OF_RELEASES: [&str; 2] = ["socket", "peer"];

/// Names the program to measure, which is built otherwise.
const PROGRAM: &str = "GANTRY_BINARY";

/// One benchmark, with arguments of its own, or all of them. They start programs, so those are built first.
pub(crate) fn bench(name: Option<&str>, args: &[String]) -> Result<()> {
    let build = |profile, package| {
        let words = ["build", "--profile", profile, "--locked", "--package", package];
        run(&mut cargo(&words))
    };
    build("bench", "gantry-e2e")?;
    // Last: both profiles put it in the same place.
    let of_release = name.is_none_or(|name| OF_RELEASES.contains(&name));
    let mut command = cargo(&["bench", "--workspace", "--locked"]);
    if std::env::var_os(PROGRAM).is_none() {
        build(if of_release { "release" } else { "bench" }, "gantry")?;
        command.env(PROGRAM, target()?.join("release/gantry"));
    }
    match name {
        Some(name) => command.args(["--bench", name]),
        None => command.arg("--benches"),
    };
    if !args.is_empty() {
        command.arg("--").args(args);
    }
    run(&mut command)
}

/// Brings the cluster of the end-to-end tests up or down.
pub(crate) fn cluster(args: &[String]) -> Result<()> {
    build()?;
    let mut command = cargo(&["run", "--quiet", "--package", "gantry-e2e", "--bin", "gantry-cluster", "--"]);
    command.args(args);
    run(&mut command)
}

fn counted(command: &mut Command) -> Result<Counts> {
    let mut counts = Counts::default();
    let succeeded = run_reading(command, |line| counts.read(line))?;
    Ok(counts.of_run(succeeded))
}

/// Prints the output of tests that have ended, and counts them.
fn replay(output: &str, succeeded: bool) -> Counts {
    println!("{output}");
    let mut counts = Counts::default();
    output.lines().for_each(|line| counts.read(line));
    counts.of_run(succeeded)
}

fn step<T>(name: &str, task: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("\n== {name}");
    let start = Instant::now();
    let outcome = task();
    println!("== {name}: {:.0} s", start.elapsed().as_secs_f64());
    outcome
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn nightly_and_support_page_have_every_release() {
        let versions = kubernetes_versions();
        assert!(versions.iter().all(|version| version.starts_with("1.")), "{versions:?}");
        let nightly = std::fs::read_to_string(root().join(".github/workflows/ci.yml")).unwrap();
        let matrix = format!("kubernetes: [\"{}\"]", versions[1..].join("\", \""));
        assert!(nightly.contains(&matrix), "the nightly job lacks {matrix}");
        let page = std::fs::read_to_string(root().join("docs/project/support.md")).unwrap();
        for release in include_str!("../../tests/components/kubernetes/releases").lines() {
            let cell = format!("| {} |", release.trim_start_matches('v'));
            assert!(page.contains(&cell), "docs/project/support.md has no row {cell}");
        }
    }

    #[test]
    fn benchmarks_match_the_manifests() {
        let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
        let (_, members) = manifest.split_once("members = [").unwrap();
        let (members, _) = members.split_once(']').unwrap();
        let mut there = BTreeSet::new();
        for member in members.split('"').skip(1).step_by(2) {
            let manifest = std::fs::read_to_string(root().join(member).join("Cargo.toml")).unwrap();
            let targets = manifest.split("[[bench]]\nname = \"").skip(1);
            there.extend(targets.map(|rest| rest.split('"').next().unwrap().to_owned()));
        }
        assert_eq!(there, BENCHMARKS.map(str::to_owned).into());
    }
}
