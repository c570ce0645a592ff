//! The commands of README.md and docs/, run on a real cluster in the order of each page, as a reader runs them: with the
//! real kubectl and helm, the chart, and Gantry's daemons as pods of its image.
#![allow(clippy::print_stderr, reason = "a test program talks on the terminal")]

mod commands;
mod reader;
mod stage;
mod stories;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result};
use libtest_mimic::{Arguments, Failed, Trial};

use stage::Stage;
use stories::{STORIES, Story};

fn main() -> Result<ExitCode> {
    let mut arguments = Arguments::from_args();
    // The stories share the cluster.
    arguments.test_threads = Some(1);
    let unsupported = if arguments.list { None } else { gantry_e2e::supported().err() };
    if let Some(why) = &unsupported {
        eprintln!("stories of the pages are skipped: {why}");
    }
    let checks = [
        ("every_command_is_run_or_listed", commands::every_command_is_run_or_listed as fn() -> Result<()>),
        ("listed_commands_parse", commands::listed_commands_parse),
    ];
    let mut trials: Vec<Trial> = checks
        .map(|(name, check)| {
            Trial::test(name, move || check().map_err(|error| Failed::from(format!("{error:#}"))))
        })
        .into();
    let theater = Arc::new(Theater { runtime: tokio::runtime::Runtime::new()?, stage: Mutex::new(None) });
    trials.extend(STORIES.iter().map(|story| {
        let theater = Arc::clone(&theater);
        let play = move || theater.play(story).map_err(|error| Failed::from(format!("{error:#}")));
        Trial::test(story.page, play).with_ignored_flag(unsupported.is_some())
    }));
    let conclusion = libtest_mimic::run(&arguments, trials);
    theater.clear()?;
    Ok(conclusion.exit_code())
}

/// The cluster, brought up by the first story.
struct Theater {
    runtime: tokio::runtime::Runtime,
    stage: Mutex<Option<Stage>>,
}

impl Theater {
    fn play(&self, story: &Story) -> Result<()> {
        let mut place = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        self.runtime.block_on(async {
            let start = Instant::now();
            let stage = match place.take() {
                Some(stage) => place.insert(stage),
                None => place.insert(Stage::up().await.context("bringing the cluster up")?),
            };
            let outcome = stage.play(story).await;
            // On the line of the test, before what became of it.
            eprint!("{:.1} s, ", start.elapsed().as_secs_f64());
            outcome
        })
    }

    fn clear(&self) -> Result<()> {
        let stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner).take();
        match stage {
            Some(stage) if std::env::var_os("GANTRY_E2E_KEEP").is_some() => {
                eprintln!("cluster left up: KUBECONFIG={}", stage.kubeconfig().display());
                Ok(())
            }
            Some(stage) => self.runtime.block_on(stage.down()),
            None => Ok(()),
        }
    }
}
