//! The samples of the pages and of manifests/samples: each is YAML; objects of Kubernetes have the fields of its API and no
//! others; pod templates are pods, wherever they are; and every annotation and label of Gantry is one that it reads.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::path::{Path, PathBuf};

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, PodSpec, ResourceQuota};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Files below a folder with this extension.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|it| it == extension) {
            found.push(path);
        }
    }
    found
}

/// The blocks of YAML of a page, without the indentation of a list.
fn blocks(page: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for line in page.lines() {
        let text = line.trim_start();
        match &mut open {
            None if text == "```yaml" => open = Some((line.len() - text.len(), String::new())),
            None => {}
            Some(_) if text == "```" => blocks.extend(open.take().map(|(_, block)| block)),
            Some((indent, block)) => {
                block.push_str(line.get(*indent..).unwrap_or_default());
                block.push('\n');
            }
        }
    }
    assert!(open.is_none(), "a block is not closed");
    blocks
}

/// Every document of the samples, with its place.
fn documents() -> Vec<(String, Value)> {
    let mut texts = Vec::new();
    for path in files(&root().join("docs"), "md") {
        for (number, block) in blocks(&std::fs::read_to_string(&path).unwrap()).into_iter().enumerate() {
            texts.push((format!("{}, block {}", path.display(), number + 1), block));
        }
    }
    for path in files(&root().join("manifests/samples"), "yaml") {
        texts.push((path.display().to_string(), std::fs::read_to_string(&path).unwrap()));
    }
    let documents = texts.into_iter().flat_map(|(place, text)| {
        let parsed: Result<Vec<Value>, _> = serde_saphyr::from_multiple(&text);
        let parsed = parsed.unwrap_or_else(|error| panic!("{place}: {error}\n{text}"));
        parsed.into_iter().map(move |document| (place.clone(), document))
    });
    documents.collect()
}

/// Checks that a type has every field of a value.
fn is_a<T: DeserializeOwned + Serialize>(place: &str, value: &Value) {
    let typed: T =
        serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{place}: {error}\n{value:#}"));
    let kept = serde_json::to_value(&typed).unwrap();
    lost(place, "", value, &kept);
}

/// Fails for a field that a type does not have: it is gone after reading and writing.
fn lost(place: &str, path: &str, value: &Value, kept: &Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let path = format!("{path}.{name}");
                assert!(!kept[name].is_null() || is_empty(field), "{place}: {path} is no field of the API");
                lost(place, &path, field, &kept[name]);
            }
        }
        Value::Array(items) => {
            for (number, item) in items.iter().enumerate() {
                lost(place, &format!("{path}[{number}]"), item, &kept[number]);
            }
        }
        _ => {}
    }
}

fn is_empty(value: &Value) -> bool {
    value.is_null() || value.as_object().is_some_and(serde_json::Map::is_empty)
}

/// Calls `check` with every object within a value.
fn each<'a>(value: &'a Value, check: &mut impl FnMut(&'a Value)) {
    check(value);
    let inner: Vec<&Value> = match value {
        Value::Object(fields) => fields.values().collect(),
        Value::Array(items) => items.iter().collect(),
        _ => Vec::new(),
    };
    for value in inner {
        each(value, check);
    }
}

/// The annotations that users may set, by `api/src/names.rs`.
fn known_annotations() -> Vec<&'static str> {
    let source = include_str!("../../api/src/names.rs");
    let names = source.split("_ANNOTATION: &str = \"").skip(1);
    names.map(|rest| rest.split('"').next().unwrap()).collect()
}

#[test]
fn every_sample_is_yaml_with_known_fields() {
    let documents = documents();
    let mut kinds = std::collections::BTreeSet::new();
    for (place, document) in &documents {
        let kind = (document["apiVersion"].as_str(), document["kind"].as_str());
        match kind {
            (Some("v1"), Some("Pod")) => is_a::<Pod>(place, document),
            (Some("v1"), Some("ResourceQuota")) => is_a::<ResourceQuota>(place, document),
            // A fragment of a Job shows the annotations only.
            (Some("batch/v1"), Some("Job")) if document["spec"]["template"]["spec"].is_object() => {
                is_a::<Job>(place, document);
            }
            _ => {}
        }
        kinds.extend(document["kind"].as_str().map(str::to_owned));
        each(document, &mut |value| {
            if value["containers"].is_array() {
                is_a::<PodSpec>(place, &without_others(value));
            }
        });
    }
    for kind in [
        "Pod",
        "Job",
        "JobSet",
        "LeaderWorkerSet",
        "PyTorchJob",
        "MPIJob",
        "RayCluster",
        "TrainJob",
        "InferenceService",
    ] {
        assert!(kinds.contains(kind), "{kind} has no sample");
    }
}

/// A pod template without what its controller reads and kubelet does not.
fn without_others(spec: &Value) -> Value {
    let mut spec = spec.clone();
    if let Some(spec) = spec.as_object_mut() {
        spec.remove("annotations");
    }
    spec
}

#[test]
fn samples_have_only_annotations_that_gantry_reads() {
    let known = known_annotations();
    assert!(known.contains(&"gantry.dev/gang-min"), "{known:?}");
    for (place, document) in documents() {
        each(&document, &mut |value| {
            let Some(fields) = value.as_object() else {
                return;
            };
            for (name, value) in fields.iter().filter(|(name, _)| name.starts_with("gantry.dev/")) {
                let is_label =
                    ["gantry.dev/gpu", "gantry.dev/mig", "gantry.dev/scheduler"].contains(&name.as_str());
                assert!(is_label || known.contains(&name.as_str()), "{place}: {name} is not known");
                assert!(value.is_string(), "{place}: the value of {name} is {value}, and must be a text");
            }
        });
    }
}

/// A plugin's configuration within values of the chart is one that the plugin accepts.
#[test]
fn configurations_in_samples_are_accepted() {
    let mut count = 0;
    for (place, document) in documents() {
        for (name, config) in document["plugin"]["configs"].as_object().into_iter().flatten() {
            let mut config = config.clone();
            config["version"] = "v1".into();
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), config.to_string()).unwrap();
            let run = std::process::Command::new(env!("CARGO_BIN_EXE_gantry"))
                .args(["plugin", "--check-config"])
                .arg(file.path())
                .env_clear()
                .output()
                .unwrap();
            assert!(run.status.success(), "{place}: {name}: {}", String::from_utf8_lossy(&run.stderr));
            count += 1;
        }
    }
    assert!(count >= 2, "{count} configurations");
}
