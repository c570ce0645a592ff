//! `gantry doctor`: whether an installation works, one line per check, with the command that mends what fails. Reads the
//! cluster once; writes nothing.

mod answers;
mod checks;
mod rights;

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
        Form::Text => text(&reports, Screen::line()),
        Form::Json => output::json(&document(&reports))?,
        Form::Yaml => output::yaml(&document(&reports))?,
    };
    print(&Visible::new(&text))?;
    let failed = reports.iter().filter(|report| report.outcome == Outcome::Failed).count();
    anyhow::ensure!(failed == 0, "{failed} of {} checks failed", reports.len());
    Ok(())
}

/// A line per check, and below it the lines that mend it, which a shell reads as they are.
fn text(reports: &[Report], columns: Option<usize>) -> String {
    let mut text = String::new();
    for report in reports {
        let word = match report.outcome {
            Outcome::Passed => "ok  ",
            Outcome::Warning => "warn",
            Outcome::Failed => "FAIL",
            Outcome::Unknown => "?   ",
        };
        let line = format!("{word} {:<20} {}", report.check, report.message);
        let columns_of_line = columns.unwrap_or(usize::MAX);
        let indent = if columns_of_line < 2 * MESSAGE.len() { INDENT } else { MESSAGE };
        // Names stay whole.
        let options = textwrap::Options::new(columns_of_line)
            .break_words(false)
            .word_splitter(textwrap::WordSplitter::NoHyphenation)
            .subsequent_indent(indent);
        text.push_str(&textwrap::fill(&line, options));
        text.push('\n');
        for line in report.fix.iter().flat_map(|fix| fix.lines()) {
            for line in shell_lines(line, columns.map(|columns| columns.saturating_sub(INDENT.len()))) {
                // A String takes every write.
                let _ = writeln!(text, "{INDENT}{line}");
            }
        }
    }
    text
}

/// Indentation of what mends a check.
const INDENT: &str = "     ";
/// As wide as what precedes a message.
const MESSAGE: &str = "                          ";

/// A line for a shell as lines that fit, where its words allow it: a command continues after a backslash, a comment as
/// a further comment.
fn shell_lines(line: &str, columns: Option<usize>) -> Vec<String> {
    const CONTINUED: &str = " \\";
    let is_comment = line.starts_with("# ");
    let Some(columns) = columns.filter(|columns| line.len() > *columns) else {
        return vec![line.to_owned()];
    };
    let (begin, end) = if is_comment { ("# ", "") } else { ("  ", CONTINUED) };
    let mut lines = Vec::new();
    let mut current = String::new();
    let words = if is_comment { line.split(' ').collect() } else { shell_words(line) };
    for word in words {
        if !current.is_empty() && current.len() + 1 + word.len() + end.len() > columns {
            current.push_str(end);
            lines.push(std::mem::replace(&mut current, format!("{begin}{word}")));
        } else {
            if !current.is_empty() {
                current.push(' ');
            }
            current.push_str(word);
        }
    }
    lines.push(current);
    lines
}

/// The words of a line, as a shell separates them: quoted text stays in one word.
fn shell_words(line: &str) -> Vec<&str> {
    let mut quote = None;
    let is_separator = |char: char| {
        match quote {
            None if ['\'', '"'].contains(&char) => quote = Some(char),
            Some(open) if open == char => quote = None,
            _ => {}
        }
        char == ' ' && quote.is_none()
    };
    line.split(is_separator).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_commands_continue_as_a_shell_reads_them() {
        let command = "kubectl patch x -p '{\"a b\": \"c d\"}' --dry-run=client -o yaml | kubectl apply -f -";
        assert_eq!(shell_lines(command, None), [command]);
        assert_eq!(shell_lines(command, Some(200)), [command]);
        let lines = shell_lines(command, Some(40));
        insta::assert_snapshot!(lines.join("\n"), @r#"
        kubectl patch x -p '{"a b": "c d"}' \
          --dry-run=client -o yaml | kubectl \
          apply -f -
        "#);
        assert!(lines.iter().all(|line| line.len() <= 40), "{lines:#?}");
        let joined = lines.join("\n").replace("\\\n  ", "");
        assert_eq!(joined, command);
    }

    #[test]
    fn long_comments_stay_comments() {
        let lines =
            shell_lines("# the CRDs first, then the extender (it's newer), then the plugin", Some(30));
        assert!(lines.iter().all(|line| line.starts_with("# ") && line.len() <= 30), "{lines:#?}");
        let words = lines.iter().flat_map(|line| line[2..].split(' '));
        assert_eq!(words.count(), 11);
    }
}
