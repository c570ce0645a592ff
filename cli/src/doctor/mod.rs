//! `gantry doctor`: whether an installation works, one line per check, with the command that mends what fails. Reads the
//! cluster once; writes nothing.

mod answers;
mod checks;

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context as _, anyhow};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::cluster::{ClusterArgs, SystemArgs};
use crate::output;
use crate::runtime::{BadInput, print};
use crate::screen::Screen;
use crate::visible::Visible;

use answers::Answers;
use checks::{Outcome, Report};

/// Options of `gantry doctor`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  gantry doctor
  gantry doctor --scheduler-config /etc/kubernetes/kube-scheduler-config.yaml
  gantry doctor -o json

Exit codes: 0 no check failed, 1 a check failed or the cluster does not respond, 2 bad command line.")]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    cluster: ClusterArgs,

    #[command(flatten)]
    system: SystemArgs,

    /// kube-scheduler's configuration, where it cannot be read from the cluster
    #[arg(long, value_name = "FILE")]
    scheduler_config: Option<PathBuf>,

    /// Form of the output
    #[arg(long, short, value_enum, default_value_t, value_name = "FORM")]
    output: Form,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Form {
    /// A line per check.
    #[default]
    Text,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

/// Runs `gantry doctor`.
///
/// # Errors
/// A check failed, or the cluster does not respond.
pub(crate) async fn run(args: DoctorArgs) -> anyhow::Result<()> {
    let given = args.scheduler_config.as_deref().map(|path| {
        let text = std::fs::read_to_string(path)
            .map_err(|error| BadInput(anyhow!("cannot read {}: {error}", path.display())))?;
        let value: Value = serde_saphyr::from_str(&text)
            .map_err(|error| BadInput(anyhow!("{}: no YAML: {}", path.display(), error.without_snippet())))?;
        anyhow::Ok(value)
    });
    let given = given.transpose()?;
    let client = args.cluster.connect().await?;
    let answers = Answers::read(&client, &args.system.system_namespace)
        .await
        .context("the API server does not respond")?;
    let reports = checks::all(&answers, given.as_ref());
    let text = match args.output {
        Form::Text => output::wrapped(&text(&reports), Screen::line()),
        Form::Json => output::json(&document(&reports))?,
        Form::Yaml => output::yaml(&document(&reports))?,
    };
    print(&Visible::new(&text))?;
    let failed = reports.iter().filter(|report| report.outcome == Outcome::Failed).count();
    anyhow::ensure!(failed == 0, "{failed} of {} checks failed", reports.len());
    Ok(())
}

fn text(reports: &[Report]) -> String {
    let mut text = String::new();
    for report in reports {
        let word = match report.outcome {
            Outcome::Passed => "ok  ",
            Outcome::Warning => "warn",
            Outcome::Failed => "FAIL",
            Outcome::Unknown => "?   ",
        };
        // A String takes every write.
        let _ = writeln!(text, "{word} {:<20} {}", report.check, report.message);
        if let Some(fix) = &report.fix {
            let _ = writeln!(text, "     {:<20} -> {fix}", "");
        }
    }
    text
}

fn document(reports: &[Report]) -> Value {
    let checks: Vec<Value> = reports
        .iter()
        .map(|report| {
            json!({
                "check": report.check,
                "outcome": report.outcome.as_str(),
                "message": report.message,
                "fix": report.fix,
            })
        })
        .collect();
    let failed = reports.iter().filter(|report| report.outcome == Outcome::Failed).count();
    json!({"version": env!("CARGO_PKG_VERSION"), "failed": failed, "checks": checks})
}
