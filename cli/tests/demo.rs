//! The demo from end to end, as a stranger runs it: it checks itself, so its exit code and summary tell all; here it is checked
//! that they do, and that it leaves nothing behind however it ends.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::command;
use tempfile::TempDir;

/// Far beyond what anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A folder of its own for each demo, so that what it leaves behind can be seen.
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
fn the_demo_passes_its_own_checks_and_leaves_nothing_behind() {
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
fn a_watching_demo_ends_in_order_on_an_interrupt() {
    let place = place();
    let mut child = command(&["demo", "--watch"])
        .env("TMPDIR", place.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = read_until(&mut child, "Watching");
    signal(&child, Signal::INT);
    let status = child.wait().unwrap();
    drop(lines);
    assert!(status.success(), "{status}");
    assert!(is_empty(place.path()));
    assert_eq!(processes_in(place.path()), [""; 0]);
}

#[test]
fn an_interrupted_demo_cleans_up_and_says_that_it_is_not_complete() {
    let place = place();
    let mut child = command(&["demo"])
        .env("TMPDIR", place.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = read_until(&mut child, "Ready after");
    signal(&child, Signal::TERM);
    let status = child.wait().unwrap();
    drop(lines);
    assert_eq!(status.code(), Some(1));
    assert!(is_empty(place.path()));
    assert_eq!(processes_in(place.path()), [""; 0]);
}

#[test]
fn the_daemons_end_with_a_demo_that_was_killed() {
    let place = place();
    let mut child = command(&["demo", "--watch"])
        .env("TMPDIR", place.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(read_until(&mut child, "Ready after"));
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !processes_in(place.path()).is_empty() {
        assert!(
            Instant::now() < deadline,
            "still there: {:?}",
            processes_in(place.path())
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}
