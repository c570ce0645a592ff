//! The chart, with the real helm 3 and 4: what it renders, what it refuses, and what it leaves in a real cluster.
//!
//! Where there is no Go, or the machine cannot run pods, the tests concerned count as ignored, never as passed.
#![allow(clippy::print_stderr, reason = "a test program talks on the terminal")]

mod cluster;
mod faults;
mod render;

use std::process::ExitCode;

use anyhow::Result;
use gantry_e2e::helm::Helm;
use libtest_mimic::{Arguments, Failed, Trial};

/// The release, and the namespace that the guards and the manifests name by default.
const RELEASE: &str = "gantry";
const NAMESPACE: &str = gantry_e2e::gantry::NAMESPACE;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // The clusters have the same addresses.
    arguments.test_threads = Some(1);
    let unsupported = if arguments.list { None } else { gantry_e2e::supported().err() };
    if let Some(why) = &unsupported {
        eprintln!("tests of the chart are skipped: {why}");
    }
    let trials = [
        ("both_helms_accept_the_chart", render::both_helms_accept_the_chart as fn() -> Result<()>),
        ("wrong_values_are_refused_by_name", render::wrong_values_are_refused_by_name),
        ("good_values_of_the_extender_are_accepted", render::good_values_of_the_extender_are_accepted),
        ("each_shape_has_its_objects", render::each_shape_has_its_objects),
        ("webhook_has_the_rule_of_the_policy", render::webhook_has_the_rule_of_the_policy),
        ("webhook_takes_the_secret_of_the_operator", render::webhook_takes_the_secret_of_the_operator),
        ("values_reach_the_pods", render::values_reach_the_pods),
        ("page_is_off_by_default_and_on_loopback", render::page_is_off_by_default_and_on_loopback),
        ("page_on_the_network_has_port_and_policy", render::page_on_the_network_has_port_and_policy),
        ("rules_and_dashboards_are_those_of_the_files", render::rules_and_dashboards_are_those_of_the_files),
        ("policies_know_further_resources", render::policies_know_further_resources),
        ("migrated_values_are_accepted", render::migrated_values_are_accepted),
        ("kustomizations_equal_the_chart", render::kustomizations_equal_the_chart),
        ("release_comes_and_goes_without_remains", cluster::release_comes_and_goes_without_remains),
        ("own_scheduler_grants_devices", cluster::own_scheduler_grants_devices),
        ("doctor_finds_planted_faults", faults::doctor_finds_planted_faults),
    ];
    let trials = trials.map(|(name, test)| {
        Trial::test(name, move || test().map_err(|error| Failed::from(format!("{error:#}"))))
            .with_ignored_flag(unsupported.is_some())
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

/// Both major versions.
fn helms() -> Result<[Helm; 2]> {
    Ok([Helm::locate_or_build(3)?, Helm::locate_or_build(4)?])
}
