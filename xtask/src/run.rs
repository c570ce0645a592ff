//! Running commands: shown before they start, failed on a bad exit status, their output passed through as it comes.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map_or(manifest.clone(), PathBuf::from)
}

/// Variables that cargo sets to describe the package of the program that it runs. Build scripts that read them would
/// run again, with everything built on them, whenever cargo is started by a task after it was started by hand, or vice
/// versa.
const OF_THIS_PACKAGE: [&str; 2] = ["CARGO_MANIFEST_", "CARGO_PKG_"];

/// `cargo` as this process was started by, in the workspace root.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(args);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if OF_THIS_PACKAGE.iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(&*name);
        }
    }
    command
}

/// The target directory.
///
/// # Errors
/// `cargo metadata` failed.
pub(crate) fn target() -> Result<PathBuf> {
    let described = output(&mut cargo(&["metadata", "--format-version=1", "--no-deps"]))?;
    let described: serde_json::Value = serde_json::from_str(&described).context("cargo metadata")?;
    let folder = described["target_directory"].as_str();
    Ok(folder.context("cargo metadata has no target_directory")?.into())
}

/// Runs `command` to its end.
///
/// # Errors
/// It cannot be started, or exits with anything but 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    announce(command);
    let status = command.status().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{} ended with {status}", describe(command));
    }
    Ok(())
}

/// Runs `command`, passes its standard output through and gives each line of it to `line`. Returns whether it exited
/// with 0.
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

/// Runs `commands` one after the other with their output in the file `log`. Returns whether all exited with 0.
///
/// # Errors
/// The file cannot be written, or a command cannot be started.
pub(crate) fn run_into(log: &Path, commands: impl IntoIterator<Item = Command>) -> Result<bool> {
    let file = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut succeeded = true;
    for mut command in commands {
        announce(&command);
        let share = || file.try_clone().context("cannot share the file");
        let status = command.stdout(share()?).stderr(share()?).status();
        let status = status.with_context(|| format!("cannot start {:?}", command.get_program()))?;
        succeeded &= status.success();
    }
    Ok(succeeded)
}

/// What `command` writes to its standard output.
///
/// # Errors
/// It cannot be started, exits with anything but 0, or writes no UTF-8.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if !output.status.success() {
        bail!("{} ended with {}", describe(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("the output of {}", describe(command)))
}

fn announce(command: &Command) {
    println!("\n$ {}", describe(command));
}

fn describe(command: &Command) -> String {
    let program = PathBuf::from(command.get_program());
    let mut words = vec![program.file_name().unwrap_or_default().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy().into_owned()));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_does_not_inherit_package_variables() {
        // Cargo sets these for tests, too.
        for name in ["CARGO_MANIFEST_DIR", "CARGO_PKG_NAME"] {
            assert!(std::env::var_os(name).is_some());
            let command = cargo(&["build"]);
            assert!(command.get_envs().any(|env| env == (name.as_ref(), None)), "{name}");
        }
    }
}
