//! The task runner: everything CI does, each part by its own name. `cargo xtask --help` lists the tasks.
//!
//! Tasks call the tools a person would call, and print the commands they run. No task keeps state of its own.
#![expect(clippy::print_stdout, reason = "a task runner talks on the terminal")]

mod ci;
mod counts;
mod generate;
mod image;
mod mutants;
mod program;
mod reference;
mod release;
mod run;
mod runbooks;
mod site;
mod source;
mod words;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand};

/// Gantry's task runner.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Everything: formatting, lints, generated files, tests, end-to-end tests, licences and bans.
    Ci,
    /// Formatting check.
    Fmt,
    /// Clippy with warnings denied, the language lint (`words`), and the program without its default features.
    Lint,
    /// Reports excluded words in comments, messages and Markdown, retired public names, and long names of tests, by
    /// file and line.
    Words {
        /// Only files with this in their path.
        #[arg(default_value = "")]
        filter: String,
    },
    /// Unit and integration tests of every crate but the end-to-end ones.
    Test,
    /// Checks that the random schedules find planted faults (xtask/src/mutants/list.rs). Takes minutes.
    Mutants {
        /// Only mutants with this in their name.
        #[arg(default_value = "")]
        filter: String,
    },
    /// End-to-end tests on a real Kubernetes; the first run builds its components (CONTRIBUTING.md)
    E2e {
        /// Run only the scenarios with this in their name.
        filter: Option<String>,
        /// Run on this version of Kubernetes: the core scenarios, or with a filter those with it in their name.
        #[arg(long, value_name = "VERSION", value_parser = PossibleValuesParser::new(ci::kubernetes_versions()))]
        kubernetes: Option<String>,
    },
    /// Writes the generated files (manifests/, charts/gantry/values.schema.json and files/, docs/plugin-config.*, docs/reference/); with
    /// --check, only checks whether they are up to date.
    Generate {
        /// Change nothing; fail if a file differs.
        #[arg(long)]
        check: bool,
    },
    /// Licence, ban and source check of all dependencies (installs cargo-deny on the first run).
    Deny,
    /// Builds the image as an OCI archive and verifies it (docs/install.md).
    Image(image::ImageArgs),
    /// Builds and verifies everything that a release has, in one folder. Pushes nothing.
    Release(release::ReleaseArgs),
    /// Builds the site from docs/ and the pages of the root with mdBook (installs mdBook on the first run).
    Site(site::SiteArgs),
    /// Builds a release twice, the second time from nothing, and compares all files. Takes an hour.
    Reproduce,
    /// What takes too long for every commit, without mutants: all scenarios, the soak test, new random schedules. Takes
    /// hours.
    Nightly {
        /// Seed of the first random schedule.
        #[arg(long, default_value_t = 0)]
        first: u64,
    },
    /// Benchmarks, in the bench profile, and the program that socket and peer measure as it is shipped: all, or one by
    /// name.
    Bench {
        /// The benchmark.
        #[arg(value_parser = PossibleValuesParser::new(ci::BENCHMARKS))]
        name: Option<String>,
        /// Arguments of its own, such as --rounds 3.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, requires = "name")]
        args: Vec<String>,
    },
    /// A real Kubernetes of three simulated GPU nodes, left up for you to play with.
    Cluster {
        /// up, down or status, and their options.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        args: Vec<String>,
    },
}

fn main() -> Result<()> {
    match Cli::parse().task {
        Task::Ci => ci::all(),
        Task::Fmt => ci::fmt(),
        Task::Lint => ci::lint(),
        Task::Words { filter } => words::report(&filter),
        Task::Test => ci::test().and_then(|counts| counts.conclude()),
        Task::Mutants { filter } => mutants::find(&filter),
        Task::E2e { filter, kubernetes } => {
            ci::e2e(filter.as_deref(), kubernetes.as_deref()).and_then(|counts| counts.conclude())
        }
        Task::Generate { check } => generate::run(check),
        Task::Deny => ci::deny(),
        Task::Image(args) => image::run_task(&args),
        Task::Release(args) => release::run_task(&args),
        Task::Reproduce => release::reproduce(),
        Task::Site(args) => site::run_task(&args),
        Task::Nightly { first } => ci::nightly(first),
        Task::Bench { name, args } => ci::bench(name.as_deref(), &args),
        Task::Cluster { args } => ci::cluster(&args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_kubernetes_version_names_the_known_ones() {
        let parse = |version| Cli::try_parse_from(["xtask", "e2e", "--kubernetes", version, "gangs"]);
        let Task::E2e { filter, kubernetes } = parse("1.34").unwrap().task else {
            panic!("another task");
        };
        assert_eq!((filter.as_deref(), kubernetes.as_deref()), (Some("gangs"), Some("1.34")));
        let Err(error) = parse("1.29") else { panic!("1.29 is accepted") };
        assert!(error.to_string().contains("1.37, 1.36"), "{error}");
    }

    #[test]
    fn benchmark_arguments_follow_its_name() {
        for words in ["bench scheduler --rounds 3", "bench scheduler -- --rounds 3"] {
            let words = std::iter::once("xtask").chain(words.split(' '));
            let Task::Bench { name, args } = Cli::try_parse_from(words).unwrap().task else {
                panic!("another task");
            };
            assert_eq!(name.as_deref(), Some("scheduler"));
            assert_eq!(args, ["--rounds", "3"]);
        }
        assert!(Cli::try_parse_from(["xtask", "bench", "extender"]).is_err());
    }
}
