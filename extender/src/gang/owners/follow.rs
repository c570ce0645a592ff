//! One watch of one kind of object that the API server may or may not serve, and questions about single objects of it. I/O only.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use gantry_gang::OwnerKind;
use gantry_gang::integrations::{STATUS, api, is_object_name};
use gantry_runtime::chain;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ApiResource;
use kube::core::DynamicResourceScope;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::sync::mpsc;

use super::table::OwnerKey;
use crate::bounded::Identity;
use crate::object_memory::{Kind, ObjectMemory, ObjectRef};
use crate::watch::stream::{self, ReceivedObject, StreamedObject};

/// Before a kind that is not served is looked for again.
const ABSENT: Duration = Duration::from_secs(10);
/// Before an API server that did not answer is asked again.
const AGAIN: Duration = Duration::from_secs(1);
/// Time limit of a question about one object: others wait for it.
const ANSWER: Duration = Duration::from_secs(5);

/// What a watch reports.
#[derive(Debug)]
pub(super) enum WatchReport {
    /// It is served there, and a list begins.
    Begins(OwnerKind, ApiResource),
    /// The list is complete.
    Ends(OwnerKind),
    /// An object.
    Seen(OwnerKey, Value),
    /// An object that is no more.
    Gone(OwnerKey),
    /// The kind is not served, or may not be read.
    Absent(OwnerKind),
}

/// Watches a kind until the receiver of `sender` is dropped.
pub(super) async fn follow(
    client: Client,
    kind: OwnerKind,
    memory: Arc<ObjectMemory>,
    sender: mpsc::Sender<WatchReport>,
) {
    let mut reported = false;
    loop {
        let absent = match served(&client, kind).await {
            Ok(Some(resource)) => {
                let ended = watch_at(&client, (kind, resource), &memory, &sender, &mut reported).await;
                if sender.is_closed() {
                    return;
                }
                ended
            }
            Ok(None) => true,
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(
                    kind = api(kind).kind,
                    error,
                    "cannot detect whether a kind of owner is served; retrying"
                );
                false
            }
        };
        if absent && sender.send(WatchReport::Absent(kind)).await.is_err() {
            return;
        }
        let pause = tokio::time::sleep(if absent { ABSENT } else { AGAIN });
        tokio::select! {
            () = pause => {}
            () = sender.closed() => return,
        }
    }
}

/// Where the kind is served: the best of the versions there are.
async fn served(client: &Client, kind: OwnerKind) -> Result<Option<ApiResource>, kube::Error> {
    let wanted = api(kind);
    for (group, version) in wanted.versions {
        let api_version = format!("{group}/{version}");
        let list = match client.list_api_group_resources(&api_version).await {
            Ok(list) => list,
            Err(error) if refused(&error) => continue,
            Err(error) => return Err(error),
        };
        if list.resources.iter().any(|resource| resource.name == wanted.plural) {
            return Ok(Some(ApiResource {
                group: (*group).to_owned(),
                version: (*version).to_owned(),
                api_version,
                kind: wanted.kind.to_owned(),
                plural: wanted.plural.to_owned(),
            }));
        }
    }
    Ok(None)
}

/// Watches until the kind is no longer served or may not be read (`true`), or the receiver is dropped. `reported`: the missing right is in
/// the log.
async fn watch_at(
    client: &Client,
    (kind, resource): (OwnerKind, ApiResource),
    memory: &Arc<ObjectMemory>,
    sender: &mpsc::Sender<WatchReport>,
    reported: &mut bool,
) -> bool {
    let objects: Api<Slim> = Api::all_with(client.clone(), &resource);
    let mut events = stream::events(objects, Kind::Owner, Arc::clone(memory), stream::in_pages())
        .default_backoff()
        .boxed();
    loop {
        let event = tokio::select! {
            event = events.next() => event,
            () = sender.closed() => return false,
        };
        let news = match event {
            Some(Ok(Event::Init)) => WatchReport::Begins(kind, resource.clone()),
            Some(Ok(Event::InitDone)) => {
                *reported = false;
                WatchReport::Ends(kind)
            }
            Some(Ok(Event::Apply(object) | Event::InitApply(object))) => {
                let place = object.object.place(kind);
                WatchReport::Seen(place, taken(object, &resource, memory))
            }
            Some(Ok(Event::Delete(object))) => WatchReport::Gone(object.object.place(kind)),
            Some(Err(error)) => {
                let absent = match &error {
                    watcher::Error::InitialListFailed(cause) | watcher::Error::WatchStartFailed(cause) => {
                        refused(cause)
                    }
                    _ => false,
                };
                let error = chain(&error);
                if absent {
                    // A right that was left out is an operator's choice; the status of each gang that needs it reports this.
                    if !*reported {
                        tracing::info!(kind = %resource.kind, error, "owners of this kind cannot be read; they are looked for again");
                    }
                    *reported = true;
                    return true;
                }
                tracing::warn!(kind = %resource.kind, error, "watch of owners failed, trying again");
                continue;
            }
            None => return false,
        };
        if sender.send(news).await.is_err() {
            return false;
        }
    }
}

/// Asks for one object: `Ok(None)` if there is none, or it may not be read; `Err` if nobody knows. What can be no name is written into no
/// path: it might lead elsewhere.
pub(super) async fn ask(
    client: &Client,
    resource: &ApiResource,
    place: &OwnerKey,
    memory: &ObjectMemory,
) -> Result<Option<Value>, ()> {
    let (_, namespace, name) = place;
    if !is_object_name(name) {
        return Ok(None);
    }
    let objects: Api<Slim> = Api::namespaced_with(client.clone(), namespace, resource);
    let path = format!("{}/{name}", objects.resource_url());
    let answer = stream::get::<Slim>(client, &path, Kind::Owner, memory);
    let error = match tokio::time::timeout(ANSWER, answer).await {
        Ok(Ok(object)) => return Ok(object.map(|object| taken(object, resource, memory))),
        Ok(Err(error)) if refused(&error) => return Ok(None),
        Ok(Err(error)) => chain(&error),
        Err(_) => "no answer in time".to_owned(),
    };
    tracing::warn!(kind = %resource.kind, %namespace, %name, error, "cannot read the owner of a gang, trying again");
    Err(())
}

/// What is read of an object. One that is too large is reported, and counts as one without a spec.
fn taken(received: ReceivedObject<Slim>, resource: &ApiResource, memory: &ObjectMemory) -> Value {
    if received.bytes.is_none() {
        let about = ObjectRef::of(Kind::Owner, &received.object);
        let api = Some((resource.api_version.clone(), resource.kind.clone()));
        let _ = memory.admit(&ObjectRef { api, ..about }, None);
    }
    received.object.object
}

/// It is not there, or not for us.
fn refused(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 403 | 404))
}

/// An object of any kind, of which what is read is kept: labels, managed fields and most of the status, which may be long and may hold
/// anything, are not.
#[derive(Debug, Clone)]
struct Slim {
    metadata: ObjectMeta,
    object: Value,
}

impl Slim {
    fn place(&self, kind: OwnerKind) -> OwnerKey {
        let of = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
        (kind, of(&self.metadata.namespace), of(&self.metadata.name))
    }
}

impl<'de> Deserialize<'de> for Slim {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Whole {
            #[serde(default)]
            metadata: Map<String, Value>,
            #[serde(default)]
            spec: Value,
            #[serde(default)]
            status: Value,
        }
        let mut whole = Whole::deserialize(deserializer)?;
        let text = |field: &str| match whole.metadata.get(field) {
            Some(Value::String(text)) => Some(text.clone()),
            _ => None,
        };
        let metadata = ObjectMeta {
            name: text("name"),
            namespace: text("namespace"),
            uid: text("uid"),
            resource_version: text("resourceVersion"),
            ..ObjectMeta::default()
        };
        let mut kept = Map::new();
        for field in ["name", "uid", "annotations"] {
            if let Some(value) = whole.metadata.remove(field) {
                kept.insert(field.to_owned(), value);
            }
        }
        let mut object = Map::new();
        object.insert("metadata".to_owned(), Value::Object(kept));
        object.insert("spec".to_owned(), whole.spec);
        let mut status = Map::new();
        for field in STATUS {
            if let Some(value) = whole.status.get_mut(field) {
                status.insert(field.to_owned(), value.take());
            }
        }
        object.insert("status".to_owned(), Value::Object(status));
        Ok(Self { metadata, object: Value::Object(object) })
    }
}

impl StreamedObject for Slim {
    fn least(identity: Identity, _: &[u8]) -> Self {
        let object = serde_json::json!({"metadata": {"name": identity.name}});
        Self { metadata: identity.into(), object }
    }
}

impl kube::Resource for Slim {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(resource: &ApiResource) -> Cow<'_, str> {
        resource.kind.as_str().into()
    }

    fn group(resource: &ApiResource) -> Cow<'_, str> {
        resource.group.as_str().into()
    }

    fn version(resource: &ApiResource) -> Cow<'_, str> {
        resource.version.as_str().into()
    }

    fn api_version(resource: &ApiResource) -> Cow<'_, str> {
        resource.api_version.as_str().into()
    }

    fn plural(resource: &ApiResource) -> Cow<'_, str> {
        resource.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
