//! The rules of CDI, as its reference implementation checks them.

use std::collections::BTreeSet;

use serde_json::Value;

/// The names of a specification's devices.
pub(super) fn names(text: &str) -> Vec<String> {
    let spec: Value = serde_json::from_str(text).unwrap();
    let devices = spec["devices"].as_array().unwrap().iter();
    devices.map(|device| device["name"].as_str().unwrap().to_owned()).collect()
}

/// Holds a specification's text against the rules.
pub(super) fn check(text: &str) {
    let spec: Value = serde_json::from_str(text).unwrap();
    keys(&spec, &["cdiVersion", "kind", "containerEdits", "devices"]);
    let (vendor, class) = spec["kind"].as_str().unwrap().split_once('/').unwrap();
    assert!(is_word(vendor, "-_.", false) && is_word(class, "-_", false), "{vendor} {class}");
    let devices = spec["devices"].as_array().unwrap();
    assert!(!devices.is_empty(), "a specification needs a device");
    let mut seen = BTreeSet::new();
    let mut newest = edits_version(&spec["containerEdits"]);
    for device in devices {
        keys(device, &["name", "containerEdits"]);
        let name = device["name"].as_str().unwrap();
        assert!(is_word(name, "-_.:", true), "{name}");
        assert!(seen.insert(name), "{name} twice");
        let edits = &device["containerEdits"];
        assert!(!edits.as_object().unwrap().is_empty(), "{name} adds nothing");
        newest = newest.max(edits_version(edits));
        if name.starts_with(|first: char| first.is_ascii_digit()) {
            newest = newest.max("0.5.0");
        }
    }
    assert_eq!(spec["cdiVersion"], newest, "the oldest version that knows the content");
}

fn edits_version(edits: &Value) -> &'static str {
    let mut version = "0.3.0";
    if edits.is_null() {
        return version;
    }
    keys(edits, &["env", "deviceNodes", "mounts", "hooks", "additionalGids"]);
    let list = |name: &str| edits[name].as_array().cloned().unwrap_or_default();
    for variable in list("env") {
        assert!(variable.as_str().unwrap().find('=').unwrap() > 0);
    }
    for node in list("deviceNodes") {
        keys(&node, &["path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "gid"]);
        assert!(node["path"].as_str().unwrap().starts_with("/dev/"));
        assert!(node["permissions"].as_str().unwrap().bytes().all(|byte| b"rwm".contains(&byte)));
        assert_eq!(node["type"].is_null(), node["major"].is_null());
        if !node["hostPath"].is_null() {
            version = "0.5.0";
        }
    }
    for mount in list("mounts") {
        keys(&mount, &["hostPath", "containerPath", "options"]);
        for end in ["hostPath", "containerPath"] {
            assert!(mount[end].as_str().unwrap().starts_with('/'), "{mount}");
        }
    }
    for hook in list("hooks") {
        keys(&hook, &["hookName", "path", "args"]);
        assert_eq!(hook["hookName"], "createContainer");
        assert!(hook["path"].as_str().unwrap().starts_with('/'));
    }
    if list("additionalGids").is_empty() {
        return version;
    }
    assert!(list("additionalGids").iter().all(|gid| *gid != 0));
    "0.7.0"
}

fn keys(value: &Value, known: &[&str]) {
    for key in value.as_object().unwrap().keys() {
        assert!(known.contains(&key.as_str()), "CDI knows no {key} here");
    }
}

fn is_word(text: &str, more: &str, digit_first: bool) -> bool {
    let first = text.chars().next().unwrap();
    (first.is_ascii_alphabetic() || digit_first && first.is_ascii_digit())
        && text.ends_with(|last: char| last.is_ascii_alphanumeric())
        && text.chars().all(|char| char.is_ascii_alphanumeric() || more.contains(char))
}
