//! Follows a kind of object that the extender can do without: what it is told of is told on, and a right that is missing is said once.
//! Decides nothing.

use std::fmt::Debug;
use std::sync::Arc;

use futures::StreamExt;
use gantry_runtime::chain;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Api, ResourceExt};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use crate::watch::WATCH_SECONDS;

/// Namespace, empty for objects of the cluster, and name.
pub(super) type Key = (Arc<str>, Arc<str>);

/// What has become of the objects.
pub(super) enum Change<V> {
    /// These are all there are.
    All(Vec<(Key, V)>),
    /// One is there, as it is now.
    Is(Key, V),
    /// One is gone.
    Gone(Key),
}

/// Words for the log.
pub(super) struct Words {
    /// What is followed.
    pub(super) what: &'static str,
    /// What is not done where they may not be listed, and what gives the right.
    pub(super) without: &'static str,
}

/// Watches until `shutdown`.
pub(super) async fn follow<K, V>(
    api: Api<K>,
    words: Words,
    read: impl Fn(&K) -> V,
    mut tell: impl FnMut(Change<V>),
    shutdown: CancellationToken,
) where
    K: kube::Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let config = watcher::Config::default().timeout(WATCH_SECONDS);
    let mut events = watch(api, config).default_backoff().boxed();
    let key = |object: &K| -> Key {
        let namespace = object.namespace().unwrap_or_default();
        (namespace.into(), object.name_any().into())
    };
    let mut listing = Vec::new();
    // Why it was said last that they cannot be followed: what lasts is said once.
    let mut said: Option<Trouble> = None;
    while let Some(Some(event)) = shutdown.run_until_cancelled(events.next()).await {
        match event {
            // Nothing has come yet.
            Ok(Event::Init) => listing = Vec::new(),
            Ok(event) => {
                said = None;
                match event {
                    Event::Init => {}
                    Event::InitApply(object) => listing.push((key(&object), read(&object))),
                    Event::InitDone => tell(Change::All(std::mem::take(&mut listing))),
                    Event::Apply(object) => tell(Change::Is(key(&object), read(&object))),
                    Event::Delete(object) => tell(Change::Gone(key(&object))),
                }
            }
            Err(error) => {
                let trouble = Trouble::of(&error);
                let error = chain(&error);
                match trouble {
                    _ if said == Some(trouble) => {
                        tracing::debug!(what = words.what, %error, "still cannot be followed");
                    }
                    Trouble::Forbidden => {
                        tracing::info!("{} may not be listed: {}", words.what, words.without);
                    }
                    Trouble::Other => {
                        tracing::warn!(%error, "{} cannot be followed, trying again", words.what);
                    }
                }
                said = Some(trouble);
            }
        }
    }
}

/// Why they cannot be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    /// The right is missing: that is an operator's choice, and no fault.
    Forbidden,
    Other,
}

impl Trouble {
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
