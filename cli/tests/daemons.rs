//! The daemons as an init system or kubelet runs them: what they refuse at once, how they log, how they stop.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{command, gantry};

#[test]
fn a_plugin_needs_to_know_its_node() {
    let run = gantry(&["plugin"]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("--node-name"), "{}", run.stderr);
}

#[test]
fn an_extender_without_its_kubeconfig_says_which_file_is_missing() {
    let run = gantry(&["extender", "--kubeconfig=/does/not/exist", "--listen=127.0.0.1:0"]);
    assert_eq!(run.code, 1);
    assert!(
        run.stderr.contains("gantry: kubeconfig /does/not/exist"),
        "{}",
        run.stderr
    );
}

#[test]
fn a_plugin_without_gpus_waits_logs_json_if_asked_and_stops_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = |option: &str, name: &str| format!("--{option}={}", folder.path().join(name).display());
    let arguments = [
        path("device-plugin-dir", "plugins"),
        path("pod-resources-socket", "pods.sock"),
        path("nvml-library", "absent.so"),
    ];
    let mut words = vec![
        "--log-format=json",
        "plugin",
        "--no-cluster",
        "--listen=127.0.0.1:0",
    ];
    words.extend(arguments.iter().map(String::as_str));
    let mut child = command(&words).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    // It has begun to work: signals are watched from before that.
    while next()["message"] != "starting" {}
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    while next()["message"] != "stopping" {}
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_daemon_started_by_another_process_ends_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let place = format!("--device-plugin-dir={}", folder.path().join("plugins").display());
    let words = [
        "--end-with-stdin",
        "plugin",
        "--no-cluster",
        "--listen=127.0.0.1:0",
        "--nvml-library=/absent.so",
        place.as_str(),
    ];
    let mut child = command(&words)
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}
