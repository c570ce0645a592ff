//! `gantry plugin --check-config` as a pipeline uses it: 0 and what is in effect, or 1 and everything that is wrong.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use support::{command, gantry, machine};

fn check(text: &str, more: &[&str]) -> support::Run {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    std::fs::write(&file, text).unwrap();
    let flag = format!("--check-config={}", file.display());
    let mut run = gantry(&[&["plugin", &flag], more].concat());
    run.stderr = run.stderr.replace(folder.path().to_str().unwrap(), "");
    run
}

#[test]
fn a_good_file_is_printed_in_full_and_what_is_printed_is_good() {
    let run = check("flags: {migStrategy: mixed}", &["--fail-on-init-error=false"]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    assert!(
        run.stdout
            .contains("migStrategy: mixed\n  failOnInitError: false\n"),
        "{}",
        run.stdout
    );
    assert_eq!(check(&run.stdout, &[]).stdout, run.stdout);
}

#[test]
fn a_bad_file_is_told_line_by_line() {
    let run = check(
        "flags:\n  migStratgy: mixed\nsharing:\n  timeSlicing:\n    resources:\n    - {name: gpu, replicas: 1}\n",
        &[],
    );
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    insta::assert_snapshot!(run.stderr);
    let lenient = check("flags: {migStratgy: mixed}", &["--lenient-config"]);
    assert_eq!(lenient.code, 0);
    assert!(
        lenient
            .stderr
            .contains("warning: /config.yaml: line 1: flags.migStratgy"),
        "{}",
        lenient.stderr
    );
}

#[test]
fn a_bad_variable_is_a_bad_command_line_and_says_where_it_was_set() {
    let mut run = command(&["plugin", "--check-config=/dev/null"]);
    let run = run.env("MIG_STRATEGY", "mixd").output().unwrap();
    assert_eq!(run.status.code(), Some(2));
    let said = String::from_utf8(run.stderr).unwrap();
    assert!(
        said.contains("environment: MIG_STRATEGY: \"mixd\" is not allowed"),
        "{said}"
    );
}

#[test]
fn what_a_node_would_only_warn_of_is_told_before_too() {
    let run = check(
        "sharing: {timeSlicing: {resources: [{name: gpu, devices: [0], replicas: 2}]}}",
        &[],
    );
    assert_eq!(run.code, 0);
    assert!(
        run.stderr
            .contains("warning: /config.yaml: line 1: sharing.timeSlicing.resources[0].devices: "),
        "{}",
        run.stderr
    );
}

#[test]
fn a_config_map_is_read_key_by_key() {
    let manifest = |shared: &str| {
        format!(
            "apiVersion: v1
kind: Namespace
metadata: {{name: gpu}}
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: device-plugin-config, namespace: gpu}}
data:
  mixed: |
    flags: {{migStrategy: mixed}}
    devices: {{deny: [0]}}
  shared.yaml: |
    sharing:
      timeSlicing:
        resources: [{shared}]
"
        )
    };
    let run = check(&manifest("{name: gpu, replicas: 2, devices: [1]}"), &[]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let documents: Vec<&str> = run.stdout.split("---\n").collect();
    assert_eq!(documents.len(), 3);
    assert!(documents[1].contains("/config.yaml, mixed\n") && documents[1].contains("migStrategy: mixed"));
    assert!(documents[2].contains("/config.yaml, shared.yaml\n") && documents[2].contains("replicas: 2"));
    assert!(
        run.stderr.contains(
            "warning: /config.yaml, shared.yaml: line 3: sharing.timeSlicing.resources[0].devices: "
        ),
        "{}",
        run.stderr
    );

    let wrong = manifest("{name: gpu, replicas: 1}").replace("migStrategy", "migStratgy");
    let run = check(&wrong, &[]);
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    for told in [
        "/config.yaml, mixed: not served:\n  line 1: flags.migStratgy: ",
        "/config.yaml, shared.yaml: not served:\n  line 3: sharing.timeSlicing.resources[0].replicas: ",
    ] {
        assert!(run.stderr.contains(told), "{}", run.stderr);
    }
    let run = check("kind: ConfigMap\nmetadata: {name: x}\n", &[]);
    assert_eq!(run.code, 1);
    assert!(
        run.stderr
            .contains("/config.yaml: the ConfigMap has no configuration")
    );
}

#[test]
fn a_file_that_is_not_there_is_an_error() {
    let run = gantry(&["plugin", "--check-config=/nowhere/config.yaml"]);
    assert_eq!(run.code, 1);
    assert!(
        run.stderr.contains("/nowhere/config.yaml: cannot be read"),
        "{}",
        run.stderr
    );
}

#[test]
fn the_labeller_takes_its_config_file_from_either_variable() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    std::fs::write(&file, "flags: {migStrategy: none, gfd: {noTimestamp: true}}\n").unwrap();
    let machine = machine("hgx-h100.yaml");
    for variable in ["CONFIG_FILE", "GFD_CONFIG_FILE"] {
        let output = command(&["labels", "--from", &machine])
            .env(variable, &file)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("nvidia.com/gpu.count=8"), "{variable}: {text}");
        assert!(!text.contains("nvidia.com/gfd.timestamp"), "{variable}: {text}");
    }
    let output = command(&["labels", "-from", &machine, "-no-timestamp"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("nvidia.com/gpu.count=8") && !text.contains("timestamp"),
        "{text}"
    );
}
