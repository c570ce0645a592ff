//! The daemons as an init system or kubelet runs them: what they refuse at once, how they log, how they stop.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{command, gantry};

/// Far beyond what anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn plugin_requires_a_node_name() {
    let run = gantry(&["plugin"]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("--node-name"), "{}", run.stderr);
}

#[test]
fn extender_names_its_missing_kubeconfig() {
    let run = gantry(&["extender", "--kubeconfig=/does/not/exist", "--listen=127.0.0.1:0"]);
    assert_eq!(run.code, 1);
    insta::assert_snapshot!(run.stderr.splitn(3, ": ").take(2).collect::<Vec<_>>().join(": "), @"gantry: kubeconfig /does/not/exist cannot be used");
}

#[test]
fn plugin_without_gpus_waits_logs_json_and_stops() {
    let folder = tempfile::tempdir().unwrap();
    let path = |option: &str, name: &str| format!("--{option}={}", folder.path().join(name).display());
    let arguments = [
        path("device-plugin-dir", "plugins"),
        path("pod-resources-socket", "pods.sock"),
        path("nvml-library", "absent.so"),
    ];
    let mut words = vec!["--log-format=json", "plugin", "--no-cluster", "--listen=127.0.0.1:0"];
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

/// What a daemon logs as JSON.
struct Said(mpsc::Receiver<Value>);

impl Said {
    fn by(daemon: &mut Child) -> Self {
        let lines = BufReader::new(daemon.stderr.take().unwrap()).lines();
        let (send, said) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = send.send(serde_json::from_str(&line).unwrap());
            }
        });
        Self(said)
    }

    /// The next lines whose messages begin so, in whatever order they come.
    fn lines(&self, beginnings: &[&str]) -> Vec<Value> {
        let mut found = vec![Value::Null; beginnings.len()];
        while let Some(missing) = found.iter().position(Value::is_null) {
            let next = self.0.recv_timeout(PATIENCE);
            let line = next.unwrap_or_else(|error| panic!("{:?}: {error}", beginnings[missing]));
            let text = line["message"].as_str().unwrap();
            if let Some(place) = beginnings.iter().position(|beginning| text.starts_with(beginning)) {
                found[place] = line;
            }
        }
        found
    }
}

#[test]
fn hangup_reloads_the_config_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("mounted")).unwrap();
    let write = |strategy: &str| {
        std::fs::write(path("written"), format!("flags: {{migStrategy: {strategy}}}")).unwrap();
    };
    write("none");
    // Under another name no watch of the folder sees that it is written: what is read then is read for the signal, or a
    // while later.
    std::fs::hard_link(path("written"), path("mounted/config.yaml")).unwrap();
    let option = |option: &str, value: &str| format!("--{option}={}", path(value).display());
    let arguments = [
        option("config-file", "mounted/config.yaml"),
        option("device-plugin-dir", "plugins"),
        option("pod-resources-socket", "pods.sock"),
        option("nvml-library", "absent.so"),
        option("cdi-root", "cdi"),
    ];
    let mut words = vec!["--log-format=json", "plugin", "--no-cluster", "--listen=127.0.0.1:0"];
    words.extend(arguments.iter().map(String::as_str));
    let mut child = command(&words).stderr(Stdio::piped()).spawn().unwrap();
    let said = Said::by(&mut child);
    said.lines(&["starting"]);
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    write("mixed");
    kill_process(pid, Signal::HUP).unwrap();
    let lines = said.lines(&["SIGHUP: reading", "configuration in effect"]);
    let config = lines[1]["config"].as_str().unwrap();
    assert!(config.contains(r#""migStrategy":"mixed""#), "{config}");
    // What ends NVIDIA's plugin.
    write("mixd");
    kill_process(pid, Signal::HUP).unwrap();
    let lines = said.lines(&["SIGHUP: reading", "configuration refused"]);
    let problems = lines[1]["problems"].as_str().unwrap();
    assert!(problems.contains("mixd"), "{problems}");
    kill_process(pid, Signal::TERM).unwrap();
    said.lines(&["stopping"]);
    assert!(child.wait().unwrap().success());
}

/// Ends the daemon as kubelet does, and waits for it.
fn terminate(mut daemon: Child) -> std::process::ExitStatus {
    let pid = Pid::from_raw(i32::try_from(daemon.id()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(status) = daemon.try_wait().unwrap() {
            return status;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    daemon.kill().unwrap();
    panic!("it does not end when asked to");
}

#[test]
fn daemon_survives_a_closed_log() {
    let folder = tempfile::tempdir().unwrap();
    let plugins = format!("--device-plugin-dir={}", folder.path().join("plugins").display());
    let kubeconfig = folder.path().join("kubeconfig");
    let config = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "c", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    });
    std::fs::write(&kubeconfig, config.to_string()).unwrap();
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let plugin = ["plugin", "--no-cluster", "--listen=127.0.0.1:0", "--nvml-library=/absent.so", &plugins];
    let extender = ["extender", "--listen=127.0.0.1:0", &kubeconfig];
    for words in [&plugin[..], &extender] {
        // Whoever read it is gone.
        let mut daemon = command(words).stderr(Stdio::piped()).spawn().unwrap();
        let mut first = String::new();
        BufReader::new(daemon.stderr.take().unwrap()).read_line(&mut first).unwrap();
        // What it says from here on it says to nobody.
        std::thread::sleep(Duration::from_secs(2));
        assert!(daemon.try_wait().unwrap().is_none(), "{words:?} has ended");
        assert!(terminate(daemon).success(), "{words:?}");
        // The disk is full.
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut daemon = command(words).stderr(full).spawn().unwrap();
        std::thread::sleep(Duration::from_secs(2));
        assert!(daemon.try_wait().unwrap().is_none(), "{words:?} has ended");
        assert!(terminate(daemon).success(), "{words:?}");
    }
}

#[test]
fn daemon_ends_with_its_parent() {
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
    let mut child = command(&words).stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}
