//! How objects are shown: whole, metadata only, or as the rows of a table, as the Accept header asks. Tables have the
//! usual columns of pods, nodes and events, and those that the custom resources declare. Events have two faces, core/v1
//! and events.k8s.io/v1, over one stored object.

use std::collections::BTreeMap;

use gantry_api::{Gang, GpuNode};
use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Map, Value, json};

use super::kinds::Kind;
use super::meta;

/// The forms an object can be shown in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The object.
    Whole,
    /// `PartialObjectMetadata`.
    Metadata,
    /// `Table`, what kubectl asks for.
    Table,
}

impl Form {
    /// The first form of the Accept header that is served.
    pub(super) fn accepted(accept: &str) -> Self {
        accept
            .split(',')
            .find_map(|wanted| match wanted {
                wanted if wanted.contains("as=PartialObjectMetadata") => Some(Self::Metadata),
                wanted if wanted.contains("as=Table") => Some(Self::Table),
                wanted if wanted.trim().starts_with("application/json") && !wanted.contains("as=") => {
                    Some(Self::Whole)
                }
                _ => None,
            })
            .unwrap_or(Self::Whole)
    }

    pub(super) fn object(self, kind: &'static Kind, object: &Value) -> Value {
        match self {
            Self::Whole => to_shown(kind, object.clone()),
            Self::Metadata => json!({
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": object["metadata"],
            }),
            Self::Table => table(kind, [object], ""),
        }
    }

    /// A list at `revision`.
    pub(super) fn list<'a>(
        self,
        kind: &'static Kind,
        objects: impl Iterator<Item = &'a Value>,
        revision: u64,
    ) -> Value {
        let revision = revision.to_string();
        if self == Self::Table {
            return table(kind, objects, &revision);
        }
        let items: Vec<Value> = objects.map(|object| self.object(kind, object)).collect();
        let (list_kind, version) = match self {
            Self::Metadata => ("PartialObjectMetadataList".to_owned(), "meta.k8s.io/v1".to_owned()),
            Self::Whole | Self::Table => (format!("{}List", kind.kind), kind.api_version()),
        };
        json!({
            "kind": list_kind,
            "apiVersion": version,
            "metadata": {"resourceVersion": revision},
            "items": items,
        })
    }

    /// A bookmark at `revision`; `end_of_initial` marks the end of the state that a streaming list begins with.
    pub(super) fn bookmark(self, kind: &'static Kind, revision: u64, end_of_initial: bool) -> Value {
        let (shown_kind, version) = match self {
            Self::Metadata => ("PartialObjectMetadata", "meta.k8s.io/v1".to_owned()),
            Self::Whole | Self::Table => (kind.kind, kind.api_version()),
        };
        let mut metadata = json!({"resourceVersion": revision.to_string(), "creationTimestamp": null});
        if end_of_initial && let Some(map) = metadata.as_object_mut() {
            map.insert("annotations".into(), json!({"k8s.io/initial-events-end": "true"}));
        }
        json!({"kind": shown_kind, "apiVersion": version, "metadata": metadata})
    }
}

/// `apiVersion` of a stored Event.
pub(super) const STORED_VERSION: &str = "v1";

/// Names that differ, events.k8s.io first.
const RENAMED: [(&str, &str); 6] = [
    ("regarding", "involvedObject"),
    ("note", "message"),
    ("reportingController", "reportingComponent"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedCount", "count"),
];

/// The stored form of an object of `kind`; other kinds are stored as they are.
pub(super) fn to_stored(kind: &Kind, object: Value) -> Value {
    if kind.group == "events.k8s.io" { rename(object, |new, old| (new, old), STORED_VERSION) } else { object }
}

/// A stored object as `kind` shows it.
fn to_shown(kind: &Kind, object: Value) -> Value {
    if kind.group == "events.k8s.io" {
        rename(object, |new, old| (old, new), "events.k8s.io/v1")
    } else {
        object
    }
}

fn rename(
    object: Value,
    direction: impl Fn(&'static str, &'static str) -> (&'static str, &'static str),
    version: &str,
) -> Value {
    let Value::Object(fields) = object else {
        return object;
    };
    let mut renamed: Map<String, Value> = fields
        .into_iter()
        .map(|(name, value)| {
            let target = RENAMED
                .iter()
                .map(|(new, old)| direction(new, old))
                .find(|(from, _)| *from == name)
                .map(|(_, to)| to.to_owned());
            (target.unwrap_or(name), value)
        })
        .collect();
    renamed.insert("apiVersion".into(), version.into());
    Value::Object(renamed)
}

/// One column: title, type, priority (0 is always shown), and how to fill it.
struct Column {
    name: String,
    kind: &'static str,
    priority: i32,
    cell: Cell,
}

enum Cell {
    Path(String),
    /// How long ago the time at this path was.
    Since(String),
    Age,
    LastSeen,
    Ready,
    Phase,
    NodeStatus,
}

/// The `Table` of some objects.
fn table<'a>(kind: &Kind, objects: impl IntoIterator<Item = &'a Value>, revision: &str) -> Value {
    let columns = columns(kind);
    let rows: Vec<Value> = objects
        .into_iter()
        .map(|object| {
            let cells: Vec<Value> = columns.iter().map(|column| column.cell.fill(object)).collect();
            json!({
                "cells": cells,
                "object": {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]},
            })
        })
        .collect();
    let definitions: Vec<Value> = columns
        .iter()
        .map(|column| {
            json!({
                "name": column.name, "type": column.kind, "format": if column.name == "Name" { "name" } else { "" },
                "description": "", "priority": column.priority,
            })
        })
        .collect();
    json!({
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": revision},
        "columnDefinitions": definitions,
        "rows": rows,
    })
}

fn columns(kind: &Kind) -> Vec<Column> {
    let column =
        |name: &str, priority, cell| Column { name: name.to_owned(), kind: "string", priority, cell };
    let path = |name: &str, path: &str| column(name, 0, Cell::Path(path.to_owned()));
    let name = path("Name", "metadata.name");
    let age = column("Age", 0, Cell::Age);
    match kind.plural {
        "pods" => vec![
            name,
            column("Ready", 0, Cell::Ready),
            column("Status", 0, Cell::Phase),
            age,
            column("Node", 1, Cell::Path("spec.nodeName".into())),
        ],
        "nodes" => vec![
            name,
            column("Status", 0, Cell::NodeStatus),
            age,
            path("Version", "status.nodeInfo.kubeletVersion"),
        ],
        "events" => vec![
            column("Last Seen", 0, Cell::LastSeen),
            path("Type", "type"),
            path("Reason", "reason"),
            path("Object", "involvedObject.name"),
            path("Message", "message"),
        ],
        "gpunodes" => std::iter::once(name).chain(declared(GpuNode::crd())).collect(),
        "gangs" => std::iter::once(name).chain(declared(Gang::crd())).collect(),
        _ => vec![name, age],
    }
}

/// The columns that a custom resource declares, with their JSON paths.
fn declared(resource: CustomResourceDefinition) -> impl Iterator<Item = Column> {
    let versions = resource.spec.versions;
    versions.into_iter().filter_map(|version| version.additional_printer_columns).flatten().map(|declared| {
        Column {
            kind: match declared.type_.as_str() {
                "integer" => "integer",
                "date" => "date",
                _ => "string",
            },
            priority: declared.priority.unwrap_or(0),
            cell: {
                let path = declared.json_path.trim_start_matches('.').to_owned();
                match declared.type_.as_str() {
                    "date" => Cell::Since(path),
                    _ => Cell::Path(path),
                }
            },
            name: declared.name,
        }
    })
}

impl Cell {
    fn fill(&self, object: &Value) -> Value {
        match self {
            Self::Path(path) => match at(object, path) {
                Value::Null => "<none>".into(),
                value => value.clone(),
            },
            // kubectl has no column for this of a custom resource.
            Self::Since(path) => match at(object, path).as_str() {
                None => "".into(),
                Some(time) => age(time).into(),
            },
            Self::Age => age(meta::text(object, "creationTimestamp")).into(),
            Self::LastSeen => {
                let times = [
                    &object["lastTimestamp"],
                    &object["eventTime"],
                    &object["metadata"]["creationTimestamp"],
                ];
                let time = times.into_iter().find_map(|time| time.as_str());
                age(time.unwrap_or_default()).into()
            }
            Self::Ready => {
                let statuses = object["status"]["containerStatuses"].as_array();
                let ready = statuses.into_iter().flatten().filter(|status| status["ready"] == true).count();
                let all = object["spec"]["containers"].as_array().map_or(0, Vec::len);
                format!("{ready}/{all}").into()
            }
            Self::Phase => pod_status(object).into(),
            Self::NodeStatus => {
                let conditions: BTreeMap<&str, &Value> = object["status"]["conditions"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(|condition| Some((condition["type"].as_str()?, &condition["status"])))
                    .collect();
                let ready = conditions.get("Ready").is_some_and(|status| *status == "True");
                if ready { "Ready" } else { "NotReady" }.into()
            }
        }
    }
}

/// The value at a path of names. `list[?(@.field=="text")]` is the first element of a list whose field has that text.
fn at<'a>(object: &'a Value, path: &str) -> &'a Value {
    let condition = path.split_once("[?(@.").and_then(|(list, rest)| {
        let (condition, rest) = rest.split_once(")].")?;
        let (field, text) = condition.split_once("==")?;
        Some((list, field, text.trim_matches('"'), rest))
    });
    let Some((list, field, text, rest)) = condition else {
        return path.split('.').fold(object, |value, part| &value[part]);
    };
    let mut elements = at(object, list).as_array().into_iter().flatten();
    elements.find(|element| element[field] == text).map_or(&Value::Null, |element| at(element, rest))
}

fn pod_status(pod: &Value) -> &str {
    if !meta::text(pod, "deletionTimestamp").is_empty() {
        return "Terminating";
    }
    let reason = pod["status"]["reason"].as_str();
    match (reason, pod["status"]["phase"].as_str()) {
        (Some(reason), _) => reason,
        (None, Some("Succeeded")) => "Completed",
        (None, phase) => phase.unwrap_or("Unknown"),
    }
}

/// `42s`, `7m`, `3h`: how long ago a time was.
fn age(created: &str) -> String {
    let Ok(created) = created.parse::<Timestamp>() else {
        return "<unknown>".into();
    };
    let seconds = Timestamp::now().duration_since(created).as_secs().max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        _ => format!("{}h", seconds / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_served_form_wins() {
        let kubectl = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
        assert_eq!(Form::accepted(kubectl), Form::Table);
        let kube = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
        assert_eq!(Form::accepted(kube), Form::Metadata);
        assert_eq!(Form::accepted("application/json, */*"), Form::Whole);
        assert_eq!(Form::accepted(""), Form::Whole);
    }

    #[test]
    fn pods_read_as_kubectl_shows_them() {
        let kind = Kind::find("", "v1", "pods").unwrap();
        let pod = json!({
            "metadata": {"name": "a"},
            "spec": {"nodeName": "n1", "containers": [{"name": "c"}]},
            "status": {"phase": "Running", "containerStatuses": [{"ready": true}]},
        });
        let table = table(kind, [&pod], "7");
        assert_eq!(table["rows"][0]["cells"], json!(["a", "1/1", "Running", "<unknown>", "n1"]));
    }

    #[test]
    fn waiting_column_is_empty_for_bound_gangs() {
        let kind = Kind::find("gantry.dev", "v1alpha1", "gangs").unwrap();
        let since = Timestamp::now() - jiff::SignedDuration::from_hours(5);
        let waits = json!({"metadata": {"name": "a"}, "status": {"phase": "Queued", "waitingSince": since.to_string()}});
        let bound = json!({"metadata": {"name": "b"}, "status": {"phase": "Bound"}});
        let table = table(kind, [&waits, &bound], "7");
        let titles = table["columnDefinitions"].as_array().unwrap();
        let waiting = titles.iter().position(|title| title["name"] == "Waiting").unwrap();
        assert_eq!(table["rows"][0]["cells"][waiting], "5h");
        assert_eq!(table["rows"][1]["cells"][waiting], "");
    }

    #[test]
    fn gpunodes_have_the_columns_they_declare() {
        let kind = Kind::find("gantry.dev", "v1alpha1", "gpunodes").unwrap();
        let ready = json!({"type": "Ready", "status": "True", "reason": "Serving"});
        let status = json!({"summary": {"model": "H100", "gpus": 8}, "conditions": [{"type": "GPUHealthy", "status": "False"}, ready]});
        let node = json!({"metadata": {"name": "n1"}, "status": status});
        let table = table(kind, [&node], "7");
        let titles = table["columnDefinitions"].as_array().unwrap();
        let cell = |title: &str| {
            let column = titles.iter().position(|column| column["name"] == title).unwrap();
            &table["rows"][0]["cells"][column]
        };
        assert_eq!(cell("Model"), "H100");
        assert_eq!(cell("GPUs"), 8);
        assert_eq!(cell("Ready"), "True");
        assert_eq!(cell("Reason"), "Serving");
    }
}
