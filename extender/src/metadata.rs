//! Parses the metadata of an object that is used, and nothing else. A client that may write a pod may write any time
//! into it, such as the year 10000 into `managedFields`: an unused field must not fail the list of all objects.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use gantry_api::names;
use gantry_gang::dialect;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The annotation of pods that kubelet creates from files on its node.
pub(crate) const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// Parses metadata for `#[serde(deserialize_with)]`: names, UID, version, labels, the controlling owner, annotations of
/// grants, gangs and static pods, and the times that can be parsed. A deletion time that cannot be parsed is the epoch:
/// the object is being deleted all the same.
///
/// # Errors
/// A name, UID or version is no string.
pub(crate) fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let kept = KeptMetadata::deserialize(deserializer)?;
    let owners = kept.owner_references.into_iter().flatten();
    let controllers: Vec<OwnerReference> = owners
        .filter(|owner| owner.controller == Some(true))
        .map(Owner::kept)
        .collect();
    Ok(ObjectMeta {
        name: kept.name,
        namespace: kept.namespace,
        uid: kept.uid,
        resource_version: kept.resource_version,
        labels: kept.labels,
        owner_references: (!controllers.is_empty()).then_some(controllers),
        annotations: kept
            .annotations
            .map(|used| used.0)
            .filter(|used| !used.is_empty()),
        creation_timestamp: kept.creation_timestamp.and_then(Written::time),
        deletion_timestamp: kept
            .deletion_timestamp
            .map(|written| written.time().unwrap_or(Time(Timestamp::UNIX_EPOCH))),
        ..ObjectMeta::default()
    })
}

/// Parses a time for `#[serde(deserialize_with)]`; `None` if it is missing or malformed.
///
/// # Errors
/// Only for malformed JSON.
pub(crate) fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Time>, D::Error> {
    Ok(Option::<Written>::deserialize(deserializer)?.and_then(Written::time))
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct KeptMetadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<Annotations>,
    owner_references: Option<Vec<Owner>>,
    creation_timestamp: Option<Written>,
    deletion_timestamp: Option<Written>,
}

/// The annotations that are used; others, which may be long, are skipped.
#[derive(Default)]
struct Annotations(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Annotations {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Used;

        impl<'de> Visitor<'de> for Used {
            type Value = Annotations;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of annotations")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Annotations, A::Error> {
                let mut used = BTreeMap::new();
                while let Some(Name(name)) = map.next_key()? {
                    let known = [names::GRANT_ANNOTATION, MIRROR_ANNOTATION].contains(&&*name);
                    if known || dialect::reads(&name) {
                        used.insert(name.into_owned(), map.next_value()?);
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(Annotations(used))
            }
        }

        deserializer.deserialize_map(Used)
    }
}

/// A key, borrowed where possible.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Owner {
    api_version: String,
    kind: String,
    name: String,
    uid: String,
    controller: Option<bool>,
}

impl Owner {
    fn kept(self) -> OwnerReference {
        OwnerReference {
            api_version: self.api_version,
            kind: self.kind,
            name: self.name,
            uid: self.uid,
            controller: self.controller,
            block_owner_deletion: None,
        }
    }
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
            "annotations": {names::GRANT_ANNOTATION: "{}", names::GANG_ANNOTATION: "g", "other": "text"},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": "c"},
                {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "j", "controller": true, "blockOwnerDeletion": true},
            ],
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
                labels: Some([("app".to_owned(), "a".to_owned())].into()),
                annotations: Some(
                    [
                        (names::GRANT_ANNOTATION.to_owned(), "{}".to_owned()),
                        (names::GANG_ANNOTATION.to_owned(), "g".to_owned())
                    ]
                    .into()
                ),
                owner_references: Some(vec![OwnerReference {
                    api_version: "batch/v1".to_owned(),
                    kind: "Job".to_owned(),
                    name: "j".to_owned(),
                    uid: "j".to_owned(),
                    controller: Some(true),
                    block_owner_deletion: None,
                }]),
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
