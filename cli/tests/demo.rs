//! The demo from end to end. It checks itself; these tests check its exit code and summary, and that it leaves neither
//! files nor processes.
#![cfg(feature = "demo")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::command;
use tempfile::TempDir;

/// Generous timeout.
const PATIENCE: Duration = Duration::from_secs(60);

/// A temporary folder for one demo, to see what it leaves there.
fn place() -> TempDir {
    tempfile::Builder::new().prefix("demo").tempdir().unwrap()
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().next().is_none()
}

/// Processes whose command line names the folder.
fn processes_in(folder: &Path) -> Vec<String> {
    let name = folder.display().to_string();
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("cmdline")).ok())
        .filter(|line| line.contains(&name))
        .collect()
}

/// Waits until the demo of `child` has printed a line that contains `text`.
fn read_until(child: &mut Child, text: &str) -> BufReader<std::process::ChildStdout> {
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut all = String::new();
    loop {
        let start = all.len();
        if lines.read_line(&mut all).unwrap() == 0 {
            panic!("ended before {text:?}:\n{all}");
        }
        if all[start..].contains(text) {
            return lines;
        }
    }
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

#[test]
fn demo_passes_its_checks_and_leaves_nothing() {
    let place = place();
    let output = command(&["demo"]).env("TMPDIR", place.path()).output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.contains("checks passed in"), "{stdout}");
    assert!(!stdout.contains('\x1b'), "no colours where there is no terminal");
    for scene in [
        "whole -> ",
        "quad -> ",
        "pair -> ",
        "single -> ",
        "bypass -> a40",
        "careful -> a40",
        "patient -> ",
        "all 4 of train run on hgx",
        "tune waits and holds nothing",
        "all 4 of tune run on ",
    ] {
        assert!(stdout.contains(scene), "{scene:?} in\n{stdout}");
    }
    assert!(is_empty(place.path()));
    assert_eq!(processes_in(place.path()), [""; 0]);
}

#[test]
fn watching_demo_shuts_down_on_an_interrupt() {
    let place = place();
    let mut child =
        command(&["demo", "--watch"]).env("TMPDIR", place.path()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = read_until(&mut child, "Watching");
    signal(&child, Signal::INT);
    let status = child.wait().unwrap();
    drop(lines);
    assert!(status.success(), "{status}");
    assert!(is_empty(place.path()));
    assert_eq!(processes_in(place.path()), [""; 0]);
}

#[test]
fn interrupted_demo_cleans_up_and_fails() {
    let place = place();
    let mut child = command(&["demo"]).env("TMPDIR", place.path()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = read_until(&mut child, "Ready after");
    signal(&child, Signal::TERM);
    let status = child.wait().unwrap();
    drop(lines);
    assert_eq!(status.code(), Some(1));
    assert!(is_empty(place.path()));
    assert_eq!(processes_in(place.path()), [""; 0]);
}

#[test]
fn daemons_end_when_the_demo_is_killed() {
    let place = place();
    let mut child =
        command(&["demo", "--watch"]).env("TMPDIR", place.path()).stdout(Stdio::piped()).spawn().unwrap();
    drop(read_until(&mut child, "Ready after"));
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !processes_in(place.path()).is_empty() {
        assert!(Instant::now() < deadline, "still running: {:?}", processes_in(place.path()));
        std::thread::sleep(Duration::from_millis(20));
    }
}
