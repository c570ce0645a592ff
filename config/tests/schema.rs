//! The file's JSON schema against the reader: the reader refuses what the schema refuses, and the schema has every rule about the form of
//! one value, so that an editor reports it first.

#![allow(clippy::unwrap_used, clippy::panic)]

use gantry_config::{Strictness, json_schema, load};
use regex_lite::Regex;
use serde_json::Value;

/// Whether `schema` takes `value`, as far as the file's schema goes: a word of it that is not known here ends the test.
fn takes(schema: &Value, value: &Value) -> bool {
    schema.as_object().unwrap().iter().all(|(word, rule)| {
        let list = || rule.as_array().unwrap();
        match word.as_str() {
            "$schema" | "title" | "description" | "default" | "examples" | "format" => true,
            "type" => match rule {
                Value::Array(kinds) => kinds.iter().any(|kind| is_a(value, kind)),
                kind => is_a(value, kind),
            },
            "const" => rule == value,
            "enum" => list().contains(value),
            "anyOf" => list().iter().any(|schema| takes(schema, value)),
            "oneOf" => list().iter().filter(|schema| takes(schema, value)).count() == 1,
            "not" => !takes(rule, value),
            "minimum" => value.as_f64().is_none_or(|number| number >= rule.as_f64().unwrap()),
            "maximum" => value.as_f64().is_none_or(|number| number <= rule.as_f64().unwrap()),
            "minLength" => text(value).is_none_or(|length| length >= rule.as_u64().unwrap()),
            "maxLength" => text(value).is_none_or(|length| length <= rule.as_u64().unwrap()),
            "pattern" => {
                let pattern = Regex::new(rule.as_str().unwrap()).unwrap();
                value.as_str().is_none_or(|text| pattern.is_match(text))
            }
            "minItems" => items(value).is_none_or(|count| count >= rule.as_u64().unwrap()),
            "maxItems" => items(value).is_none_or(|count| count <= rule.as_u64().unwrap()),
            "items" => value.as_array().into_iter().flatten().all(|item| takes(rule, item)),
            "required" => list()
                .iter()
                .all(|key| value.as_object().is_none_or(|map| map.contains_key(key.as_str().unwrap()))),
            "properties" => rule.as_object().unwrap().iter().all(|(key, schema)| {
                let below = value.as_object().and_then(|map| map.get(key));
                below.is_none_or(|below| takes(schema, below))
            }),
            "additionalProperties" => {
                assert_eq!(rule, &Value::Bool(false));
                let known = schema["properties"].as_object().unwrap();
                let mut keys = value.as_object().into_iter().flatten();
                keys.all(|(key, _)| known.contains_key(key))
            }
            word => panic!("{word} is not known here"),
        }
    })
}

fn is_a(value: &Value, kind: &Value) -> bool {
    match kind.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        kind => panic!("{kind} is not known here"),
    }
}

fn text(value: &Value) -> Option<u64> {
    value.as_str().map(|text| text.chars().count() as u64)
}

fn items(value: &Value) -> Option<u64> {
    value.as_array().map(|list| list.len() as u64)
}

/// What the schema and what the program say of a file in JSON.
fn both(file: &str) -> (bool, bool) {
    let value = serde_json::from_str(file).unwrap_or_else(|error| panic!("{file}: {error}"));
    let read = load("config.json", file, &[], Strictness::Strict);
    (takes(&json_schema(), &value), read.is_ok())
}

fn share(name: &str) -> String {
    format!(r#"{{"sharing": {{"timeSlicing": {{"resources": [{{"name": "{name}", "replicas": 2}}]}}}}}}"#)
}

fn sleep(interval: &str) -> String {
    format!(r#"{{"flags": {{"gfd": {{"sleepInterval": "{interval}"}}}}}}"#)
}

#[test]
fn schema_refuses_values_of_wrong_form() {
    let names = ["amd.com/gpu", "nvidia.com/GPU", "mig-1g.10gb+me", "", "-gpu", "gpu.", "a b", "nvidia.com/"];
    let intervals = ["60 s", "", "s", ".s", "1.2.3s", "-1s", "1d", "infinity", "60s "];
    let mut files: Vec<String> = names.map(share).to_vec();
    files.extend(intervals.map(sleep));
    files.extend(
        [
            r#"{"sharing": {"timeSlicing": {"resources": []}}}"#,
            r#"{"sharing": {"mps": {"resources": [{"name": "gpu", "replicas": 2}]}}}"#,
            r#"{"sharing": {"mps": {"resources": []}}}"#,
            r#"{"resources": {"gpus": [{"pattern": "*", "name": "amd.com/gpu"}]}}"#,
            r#"{"flags": {"colour": "red"}}"#,
        ]
        .map(str::to_owned),
    );
    for file in files {
        assert_eq!(both(&file), (false, false), "{file}");
    }
}

#[test]
fn schema_accepts_what_the_reader_accepts() {
    let names = ["gpu", "nvidia.com/gpu", "mig-1g.10gb.me", "mig-1g.10gb", "0", "a--b", "gpu.shared"];
    let intervals = [
        "60s",
        "+60s",
        "1m30.5s",
        "1h15m",
        ".5s",
        "5.s",
        "60000000000",
        "+60000000000",
        "infinite",
        "2000ms",
        "2000000us",
        "2000000µs",
        "2000000μs",
    ];
    let mut files: Vec<String> = names.map(share).to_vec();
    files.extend(intervals.map(sleep));
    files.extend(
        [
            "{}",
            r#"{"version": "v1", "sharing": {"mps": null}, "resources": null}"#,
            r#"{"flags": {"gfd": {"sleepInterval": 60000000000}}}"#,
            r#"{"flags": {"gfd": {"sleepInterval": null}}}"#,
            r#"{"sharing": {"timeSlicing": {"resources": [{"name": "gpu", "rename": "nvidia.com/half", "replicas": 2.0}]}}}"#,
        ]
        .map(str::to_owned),
    );
    for file in files {
        assert_eq!(both(&file), (true, true), "{file}");
    }
}
