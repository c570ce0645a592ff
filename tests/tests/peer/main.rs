//! Gantry's plugin as the replacement of NVIDIA's k8s-device-plugin: the same paths, flags and config file, the same
//! kubelet, and the same answers but for those listed in `deliberate.rs`. NVIDIA's side is its documented surface and,
//! where the environment names a folder with its program in `GANTRY_NVIDIA_BIN`, the program itself.
#![allow(clippy::print_stderr, reason = "a test program talks on the terminal")]

mod cases;
mod deliberate;
mod faults;
mod parts;

use std::process::ExitCode;

use anyhow::{Context, Result};
use gantry_e2e::peer::{self, Plugin};
use libtest_mimic::{Arguments, Failed, Trial};

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let unsupported = peer::supported().err();
    if let Some(why) = &unsupported {
        eprintln!("the plugin's tests in a mount namespace are skipped: {why:#}");
    }
    let nvidia = Plugin::nvidia();
    if nvidia.is_none() {
        eprintln!("GANTRY_NVIDIA_BIN is not set: tests against NVIDIA's program are skipped");
    }
    let skipped = unsupported.is_some();
    let mut trials = vec![
        trial("same_answers_as_documented", skipped, cases::same_as_documented),
        trial("same_answers_as_nvidias_program", skipped || nvidia.is_none(), {
            let nvidia = nvidia.clone();
            async move || cases::same_as_program(&nvidia.context("no program")?).await
        }),
        trial("the_documented_surface_is_the_programs", skipped || nvidia.is_none(), {
            let nvidia = nvidia.clone();
            async move || cases::documented_is_true(&nvidia.context("no program")?).await
        }),
    ];
    let stories = || faults::all().into_iter().chain(parts::all());
    for story in stories() {
        let play = async move || (story.play)(Plugin::gantry()?).await;
        trials.push(trial(story.name, skipped, play));
    }
    for story in stories() {
        let plugin = nvidia.clone();
        let name = format!("nvidia::{}", story.name);
        let play = async move || story.with_nvidias_program(plugin.context("no program")?).await;
        trials.push(trial(name, skipped || nvidia.is_none(), play));
    }
    trials.push(trial("page_has_every_story", false, async move || faults::in_page(stories())));
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(
    name: impl Into<String>,
    skipped: bool,
    test: impl AsyncFnOnce() -> Result<()> + Send + 'static,
) -> Trial {
    let run = move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Failed::from(error.to_string()))?;
        runtime.block_on(test()).map_err(|error| Failed::from(format!("{error:#}")))
    };
    Trial::test(name, run).with_ignored_flag(skipped)
}
