//! Running commands: shown before they start, failed on a bad exit status, their output passed through as it comes.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map_or(manifest.clone(), PathBuf::from)
}

/// `cargo` as this process was started by, in the workspace root.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(args);
    command
}

/// Runs `command` to its end.
///
/// # Errors
/// It cannot be started, or exits with anything but 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    announce(command);
    let status = command
        .status()
        .with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{} ended with {status}", describe(command));
    }
    Ok(())
}

/// Runs `command`, passes its standard output through and gives each line of it to `line`. Returns whether it exited with 0.
///
/// # Errors
/// It cannot be started or read.
pub(crate) fn run_reading(command: &mut Command, mut line: impl FnMut(&str)) -> Result<bool> {
    announce(command);
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {:?}", command.get_program()))?;
    let output = child.stdout.take().context("no standard output")?;
    let mut terminal = std::io::stdout();
    for text in BufReader::new(output).split(b'\n') {
        let text = text.context("cannot read the output")?;
        terminal.write_all(&text)?;
        terminal.write_all(b"\n")?;
        line(&String::from_utf8_lossy(&text));
    }
    Ok(child.wait()?.success())
}

fn announce(command: &Command) {
    println!("\n$ {}", describe(command));
}

fn describe(command: &Command) -> String {
    let program = PathBuf::from(command.get_program());
    let mut words = vec![
        program
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
    ];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy().into_owned()));
    words.join(" ")
}
