//! End-to-end tests on a real Kubernetes: one cluster for all scenarios of a run, one scenario at a time.
//!
//! `GANTRY_KUBERNETES=1.34` selects another version than that of CI. On it only the core scenarios run, or with a filter
//! those with it in their name. Long scenarios are ignored unless a filter or `--include-ignored` selects them.
//!
//! Where the machine cannot run pods every scenario counts as ignored, never as passed. `GANTRY_E2E_KEEP=1` leaves the
//! cluster up afterwards.
#![allow(clippy::print_stderr, reason = "a test program talks on the terminal")]

mod bed;
mod blocked_writes;
mod daemon_logs;
mod gangs;
mod gpus;
mod pods;
mod records;
mod scenarios;
mod views;

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, Result};
use gantry_e2e::Kubernetes;
use gantry_e2e::browser::chromium;
use libtest_mimic::{Arguments, Failed, Trial};

use bed::Bed;
use daemon_logs::Logs;
use scenarios::Scenario;

fn main() -> Result<ExitCode> {
    let mut arguments = Arguments::from_args();
    // The scenarios share the cluster and break parts of it.
    arguments.test_threads = Some(1);
    let unsupported = if arguments.list { None } else { gantry_e2e::supported().err() };
    if let Some(why) = &unsupported {
        eprintln!("end-to-end tests are skipped: {why}");
    }
    let no_browser = if arguments.list || unsupported.is_some() { None } else { chromium().err() };
    if let Some(why) = &no_browser {
        eprintln!("scenarios in a browser are skipped: {why}");
    }
    let kubernetes = Kubernetes::selected()?;
    let is_filtered = arguments.filter.is_some();
    let all_match = kubernetes.is_default()? || is_filtered;
    let stage = Arc::new(Stage::new()?);
    let trials = scenarios::all()
        .into_iter()
        .filter(|scenario| all_match || scenario.is_core)
        .map(|scenario| {
            let stage = Arc::clone(&stage);
            let name = scenario.name;
            let lacking = scenario.needs.filter(|feature| !kubernetes.has(*feature));
            let is_long = scenario.is_long;
            let lacks_browser = scenario.needs_browser && no_browser.is_some();
            let play = move || stage.play(&scenario).map_err(|error| Failed::from(format!("{error:#}")));
            let waits = is_long && !is_filtered;
            let is_ignored = unsupported.is_some() || lacking.is_some() || lacks_browser || waits;
            let trial = Trial::test(name, play).with_ignored_flag(is_ignored);
            match lacking {
                Some(feature) => trial.with_kind(format!("no {feature:?} in {kubernetes}")),
                None if waits => trial.with_kind("nightly"),
                None => trial,
            }
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    stage.clear()?;
    Ok(conclusion.exit_code())
}

/// The cluster, brought up by the first scenario that is really run.
struct Stage {
    runtime: tokio::runtime::Runtime,
    bed: Mutex<Option<Bed>>,
}

impl Stage {
    fn new() -> Result<Self> {
        let runtime = tokio::runtime::Runtime::new().context("tokio runtime")?;
        Ok(Self { runtime, bed: Mutex::new(None) })
    }

    fn play(&self, scenario: &Scenario) -> Result<()> {
        let mut place = self.bed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.runtime.block_on(async {
            let start = Instant::now();
            let bed = match place.take() {
                Some(bed) => place.insert(bed),
                None => place.insert(Bed::up().await.context("bringing the cluster up")?),
            };
            let ready = start.elapsed().as_secs_f64();
            let logs = Logs::of(bed.folder());
            let outcome = scenario.run(bed).await;
            let outcome = outcome.map_err(|error| {
                let said = logs.since(bed.folder());
                anyhow::anyhow!("{error:#}\nGantry's daemons said meanwhile:{said}")
            });
            let told = start.elapsed().as_secs_f64();
            let restored = bed.restore().await.context("restoring the cluster after the scenario");
            let all = start.elapsed().as_secs_f64();
            let (story, restoring) = (told - ready, all - told);
            // On the line of the test, before what became of it.
            eprint!("{ready:.1} + {story:.1} + {restoring:.1} s, ");
            outcome.and(restored).with_context(|| format!("logs: {}/*/log", bed.folder().display()))
        })
    }

    fn clear(&self) -> Result<()> {
        let bed = self.bed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        match bed {
            Some(bed) if std::env::var_os("GANTRY_E2E_KEEP").is_some() => {
                eprintln!("cluster left up: KUBECONFIG={}/kubeconfig", bed.folder().display());
                Ok(())
            }
            Some(bed) => self.runtime.block_on(bed.down()),
            None => Ok(()),
        }
    }
}
