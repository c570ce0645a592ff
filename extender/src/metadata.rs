//! Reads of an object's metadata what is used, and nothing else. Anybody who may write a pod may write any time into it, such as one of the
//! year 10000 into `managedFields`: a field nobody needs must not stop the list of all objects.

use gantry_api::names;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

/// Reads metadata for `#[serde(deserialize_with)]`: names, UID, version, our own annotation and the times that can be read. A deletion
/// time that cannot be read is the epoch: the object is being deleted all the same.
///
/// # Errors
/// Names, UID or version that are no strings.
pub fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let kept = Kept::deserialize(deserializer)?;
    let grant = kept.annotations.and_then(|annotations| annotations.grant);
    Ok(ObjectMeta {
        name: kept.name,
        namespace: kept.namespace,
        uid: kept.uid,
        resource_version: kept.resource_version,
        annotations: grant.map(|grant| [(names::GRANT_ANNOTATION.to_owned(), grant)].into()),
        creation_timestamp: kept.creation_timestamp.and_then(Written::time),
        deletion_timestamp: kept
            .deletion_timestamp
            .map(|written| written.time().unwrap_or(Time(Timestamp::UNIX_EPOCH))),
        ..ObjectMeta::default()
    })
}

/// Reads a time for `#[serde(deserialize_with)]`; `None` if it is none, or none that can be read.
///
/// # Errors
/// Only what is no JSON at all.
pub fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Time>, D::Error> {
    Ok(Option::<Written>::deserialize(deserializer)?.and_then(Written::time))
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Kept {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    annotations: Option<Annotations>,
    creation_timestamp: Option<Written>,
    deletion_timestamp: Option<Written>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Annotations {
    /// [`names::GRANT_ANNOTATION`].
    #[serde(rename = "gantry.dev/grant")]
    grant: Option<String>,
}

/// A time as it is written.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    Other(IgnoredAny),
}

impl Written {
    fn time(self) -> Option<Time> {
        match self {
            Self::Text(text) => text.parse().ok().map(Time),
            Self::Other(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_used_is_kept_and_no_time_fails_the_object() {
        let written = json!({
            "name": "a", "namespace": "ml", "uid": "u", "resourceVersion": "7", "labels": {"app": "a"},
            "annotations": {names::GRANT_ANNOTATION: "{}", "other": "text"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "deletionTimestamp": "9999-12-31T23:59:59Z",
            "managedFields": [{"manager": "m", "time": "9999-12-31T23:59:59Z"}],
        });
        let kept = read(written).unwrap();
        assert_eq!(
            kept,
            ObjectMeta {
                name: Some("a".to_owned()),
                namespace: Some("ml".to_owned()),
                uid: Some("u".to_owned()),
                resource_version: Some("7".to_owned()),
                annotations: Some([(names::GRANT_ANNOTATION.to_owned(), "{}".to_owned())].into()),
                creation_timestamp: Some(Time("2026-01-01T00:00:00Z".parse().unwrap())),
                deletion_timestamp: Some(Time(Timestamp::UNIX_EPOCH)),
                ..ObjectMeta::default()
            }
        );
        let none =
            read(json!({"creationTimestamp": 7, "deletionTimestamp": null, "annotations": null})).unwrap();
        assert_eq!(none, ObjectMeta::default());
    }

    #[test]
    fn a_time_that_cannot_be_read_is_none() {
        assert_eq!(time(json!("9999-12-31T23:59:59Z")).unwrap(), None);
        assert_eq!(time(json!("soon")).unwrap(), None);
        assert_eq!(time(json!(null)).unwrap(), None);
        assert!(time(json!("2026-01-01T00:00:00Z")).unwrap().is_some());
    }
}
