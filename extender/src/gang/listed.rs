//! Watches an optional kind of object and forwards its events. A missing permission is logged once. Decides nothing.

use std::sync::Arc;

use futures::StreamExt;
use gantry_runtime::chain;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, ResourceExt};
use tokio_util::sync::CancellationToken;

use crate::object_memory::{Kind, ObjectMemory, ObjectRef};
use crate::watch::stream::{self, ReceivedObject, StreamedObject};

/// Namespace (empty for cluster-scoped objects) and name.
pub(super) type Key = (Arc<str>, Arc<str>);

/// A change of the objects.
pub(super) enum Change<V> {
    /// The complete list.
    All(Vec<(Key, V)>),
    /// An object was created or changed.
    Is(Key, V),
    /// An object was deleted.
    Gone(Key),
}

/// Texts for the log.
pub(super) struct LogTexts {
    /// The kind that is watched.
    pub(super) what: &'static str,
    /// The effect of a missing permission, and the manifest that grants it.
    pub(super) without: &'static str,
}

/// Watches until `shutdown`.
pub(super) async fn follow<K, V>(
    api: Api<K>,
    (kind, memory): (Kind, &Arc<ObjectMemory>),
    words: LogTexts,
    read: impl Fn(&K) -> Option<V>,
    refused: impl Fn(&str) -> Option<(Key, V)>,
    mut apply: impl FnMut(Change<V>),
    shutdown: CancellationToken,
) where
    K: StreamedObject,
{
    let mut events =
        stream::events(api, kind, Arc::clone(memory), stream::in_pages()).default_backoff().boxed();
    let key = |object: &K| -> Key {
        let namespace = object.namespace().unwrap_or_default();
        (namespace.into(), object.name_any().into())
    };
    // What is kept of an object; `Err` if nothing is.
    let found = |received: ReceivedObject<K>| -> Result<(Key, V), Key> {
        let key = key(&received.object);
        let about = ObjectRef::of(kind, &received.object);
        let Some(value) = read(&received.object).filter(|_| received.bytes.is_some()) else {
            if received.bytes.is_some() {
                memory.release(kind, &about.uid);
                return Err(key);
            }
            let _ = memory.admit(&about, None);
            return refused(&key.0).ok_or(key);
        };
        match memory.admit(&about, received.bytes) {
            Ok(()) => Ok((key, value)),
            Err(_) => refused(&key.0).ok_or(key),
        }
    };
    let mut listing = Vec::new();
    // The last logged error. The same error is logged once.
    let mut reported: Option<WatchFailure> = None;
    while let Some(Some(event)) = shutdown.run_until_cancelled(events.next()).await {
        match event {
            // No event yet.
            Ok(Event::Init) => listing = Vec::new(),
            Ok(event) => {
                reported = None;
                match event {
                    Event::Init => {}
                    Event::InitApply(object) => listing.extend(found(object).ok()),
                    Event::InitDone => apply(Change::All(std::mem::take(&mut listing))),
                    Event::Apply(object) => apply(match found(object) {
                        Ok((key, value)) => Change::Is(key, value),
                        Err(key) => Change::Gone(key),
                    }),
                    Event::Delete(object) => {
                        memory.release(kind, &ObjectRef::of(kind, &object.object).uid);
                        apply(Change::Gone(key(&object.object)));
                    }
                }
            }
            Err(error) => {
                let trouble = WatchFailure::of(&error);
                let error = chain(&error);
                match trouble {
                    _ if reported == Some(trouble) => {
                        tracing::debug!(what = words.what, %error, "still cannot be followed");
                    }
                    WatchFailure::Forbidden => {
                        tracing::info!("{} may not be listed: {}", words.what, words.without);
                    }
                    WatchFailure::Other => {
                        tracing::warn!(%error, "{} cannot be followed, trying again", words.what);
                    }
                }
                reported = Some(trouble);
            }
        }
    }
}

/// Why the objects cannot be watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WatchFailure {
    /// The permission is missing, by the operator's choice.
    Forbidden,
    Other,
}

impl WatchFailure {
    fn of(error: &watcher::Error) -> Self {
        let cause = match error {
            watcher::Error::InitialListFailed(cause) | watcher::Error::WatchStartFailed(cause) => cause,
            _ => return Self::Other,
        };
        match cause {
            kube::Error::Api(status) if status.code == 403 => Self::Forbidden,
            _ => Self::Other,
        }
    }
}
