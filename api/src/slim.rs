//! The little that both daemons read of pods and of the metadata of other objects. Users may write any time into an object, such as one of
//! the year 10000 into `managedFields`: a field that is not needed must not stop the list of all objects.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// Which annotations a daemon reads; others may be long and are passed over.
pub trait ReadsAnnotation {
    /// Whether it reads this one.
    fn reads(name: &str) -> bool;
}

/// Reads metadata for `#[serde(deserialize_with)]`: names, UID, version, labels, the controlling owner, annotations that `A` reads, and the
/// times that can be parsed. A deletion time that cannot be parsed is the epoch, for the object is being deleted.
///
/// # Errors
/// Names, UID or version are not strings.
pub fn metadata<'de, A: ReadsAnnotation, D: Deserializer<'de>>(reader: D) -> Result<ObjectMeta, D::Error> {
    let read = Metadata::<A>::deserialize(reader)?;
    let owners = read.owner_references.into_iter().flatten();
    let controllers: Vec<OwnerReference> =
        owners.filter(|owner| owner.controller == Some(true)).map(Owner::reference).collect();
    Ok(ObjectMeta {
        name: read.name,
        namespace: read.namespace,
        uid: read.uid,
        resource_version: read.resource_version,
        labels: read.labels,
        owner_references: (!controllers.is_empty()).then_some(controllers),
        annotations: read.annotations.map(|read| read.0).filter(|read| !read.is_empty()),
        creation_timestamp: read.creation_timestamp.and_then(WrittenTime::time),
        deletion_timestamp: read
            .deletion_timestamp
            .map(|written| written.time().unwrap_or(Time(Timestamp::UNIX_EPOCH))),
        ..ObjectMeta::default()
    })
}

/// Reads a time for `#[serde(deserialize_with)]`; `None` if it cannot be parsed.
///
/// # Errors
/// The text is not JSON.
pub fn time<'de, D: Deserializer<'de>>(reader: D) -> Result<Option<Time>, D::Error> {
    Ok(Option::<WrittenTime>::deserialize(reader)?.and_then(WrittenTime::time))
}

/// A container of a pod.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SlimContainer {
    /// Its name.
    pub name: String,
    /// `Always` makes an init container a sidecar.
    pub restart_policy: Option<String>,
    /// What it asks for.
    pub resources: SlimResources,
    /// Its ports.
    pub ports: Vec<SlimPort>,
}

impl SlimContainer {
    /// Of an init container: whether it lives as long as the pod.
    pub fn is_sidecar(&self) -> bool {
        self.restart_policy.as_deref() == Some("Always")
    }
}

/// Quantities of resources, as written.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SlimResources {
    /// Limits.
    pub limits: BTreeMap<String, String>,
    /// Requests.
    pub requests: BTreeMap<String, String>,
}

impl SlimResources {
    /// The limit or else the request of a resource.
    pub fn of(&self, resource: &str) -> Option<&str> {
        self.limits.get(resource).or_else(|| self.requests.get(resource)).map(String::as_str)
    }

    /// The request of each resource, which is its limit where there is none: the API server writes it so.
    pub fn asked(&self) -> BTreeMap<&str, &str> {
        let both = self.limits.iter().chain(&self.requests);
        both.map(|(name, written)| (name.as_str(), written.as_str())).collect()
    }
}

/// A port of a container.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SlimPort {
    /// The port that it takes of its node; 0 for none.
    pub host_port: u16,
    /// The node's address at which it takes that.
    #[serde(rename = "hostIP")]
    pub host_ip: String,
    /// TCP, UDP or SCTP.
    pub protocol: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", bound = "A: ReadsAnnotation")]
struct Metadata<A> {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<Annotations<A>>,
    owner_references: Option<Vec<Owner>>,
    creation_timestamp: Option<WrittenTime>,
    deletion_timestamp: Option<WrittenTime>,
}

/// The annotations that `A` reads.
struct Annotations<A>(BTreeMap<String, String>, PhantomData<A>);

impl<'de, A: ReadsAnnotation> Deserialize<'de> for Annotations<A> {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct Read<A>(PhantomData<A>);

        impl<'de, A: ReadsAnnotation> Visitor<'de> for Read<A> {
            type Value = Annotations<A>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of annotations")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Annotations<A>, M::Error> {
                let mut read = BTreeMap::new();
                while let Some(Name(name)) = map.next_key()? {
                    if A::reads(&name) {
                        read.insert(name.into_owned(), map.next_value()?);
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(Annotations(read, PhantomData))
            }
        }

        reader.deserialize_map(Read(PhantomData))
    }
}

/// A key, borrowed where that is possible.
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
    fn reference(self) -> OwnerReference {
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
enum WrittenTime {
    Text(String),
    Other(IgnoredAny),
}

impl WrittenTime {
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
    use crate::names;

    struct Read;

    impl ReadsAnnotation for Read {
        fn reads(name: &str) -> bool {
            [names::GRANT_ANNOTATION, names::GANG_ANNOTATION].contains(&name)
        }
    }

    #[test]
    fn metadata_is_read_whatever_its_times_are() {
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
        let read = metadata::<Read, _>(written).unwrap();
        assert_eq!(
            read,
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
        let none = metadata::<Read, _>(
            json!({"creationTimestamp": 7, "deletionTimestamp": null, "annotations": null}),
        )
        .unwrap();
        assert_eq!(none, ObjectMeta::default());
    }

    #[test]
    fn unparsable_time_is_none() {
        assert_eq!(time(json!("9999-12-31T23:59:59Z")).unwrap(), None);
        assert_eq!(time(json!("soon")).unwrap(), None);
        assert_eq!(time(json!(null)).unwrap(), None);
        assert!(time(json!("2026-01-01T00:00:00Z")).unwrap().is_some());
    }
}
