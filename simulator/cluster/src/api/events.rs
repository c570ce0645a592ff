//! Events have two faces, core/v1 and events.k8s.io/v1, over one stored object. It is stored as the core one and turned
//! at the door.

use serde_json::{Map, Value};

use super::kinds::Kind;

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
pub(super) fn to_shown(kind: &Kind, object: Value) -> Value {
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
