//! Running the binary as a person would.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "tests; each test file uses its part of this one"
)]

pub mod cluster;
pub mod terminal;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// What a run came to.
#[derive(Debug)]
pub struct Run {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// The command, without what the environment of the test might set.
pub fn command(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gantry"));
    command.args(words).stdin(Stdio::null()).env_clear();
    for kept in ["PATH", "TMPDIR", "LD_LIBRARY_PATH", "GANTRY_NVML_SIM"] {
        command.envs(std::env::var_os(kept).map(|value| (kept, value)));
    }
    command
}

/// Runs `gantry` to its end.
pub fn gantry(words: &[&str]) -> Run {
    with(words, &[])
}

/// Runs `gantry` to its end, with these variables.
pub fn with(words: &[&str], variables: &[(&str, &str)]) -> Run {
    came_to(command(words).envs(variables.iter().copied()).output().unwrap())
}

/// Runs `gantry` to its end, with this text on standard input.
pub fn piped(words: &[&str], text: &str) -> Run {
    let mut child =
        command(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    came_to(child.wait_with_output().unwrap())
}

fn came_to(output: Output) -> Run {
    Run {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A machine file of the simulator.
pub fn machine(name: &str) -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../simulator/machines");
    root.join(name).display().to_string()
}
