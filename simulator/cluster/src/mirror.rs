//! A watched collection by UID that reports changes, like an informer of client-go. A list after a broken watch is
//! turned into the same changes, so that readers see one history.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;

/// The objects of one kind as last seen.
pub(crate) struct Mirror<K> {
    objects: BTreeMap<String, Arc<K>>,
    stream: Pin<Box<dyn Stream<Item = Result<watcher::Event<K>, watcher::Error>> + Send>>,
    /// UIDs of a list in progress.
    listed: Vec<String>,
    /// Changes not yet reported.
    pending: Vec<Delta<K>>,
}

/// One change.
#[derive(Debug)]
pub(crate) enum Delta<K> {
    /// An object came or changed.
    Set {
        /// As it was, if it was there.
        before: Option<Arc<K>>,
        now: Arc<K>,
    },
    /// An object went; this is its last state.
    Gone(Arc<K>),
    /// The first list is complete.
    Synced,
}

impl<K> Mirror<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    /// Watches what `config` selects.
    pub(crate) fn new(api: Api<K>, config: watcher::Config) -> Self {
        Self {
            objects: BTreeMap::new(),
            stream: watcher::watcher(api, config).default_backoff().boxed(),
            listed: Vec::new(),
            pending: Vec::new(),
        }
    }

    /// The objects, by UID.
    pub(crate) fn objects(&self) -> &BTreeMap<String, Arc<K>> {
        &self.objects
    }

    /// The next change. Safe to drop and call again.
    pub(crate) async fn next(&mut self) -> Delta<K> {
        loop {
            if let Some(delta) = self.pending.pop() {
                return delta;
            }
            match self.stream.next().await {
                Some(Ok(event)) => self.take(event),
                Some(Err(error)) => tracing::debug!(%error, "watch broken, trying again"),
                // The watcher never ends by itself.
                None => std::future::pending().await,
            }
        }
    }

    fn take(&mut self, event: watcher::Event<K>) {
        match event {
            watcher::Event::Init => self.listed.clear(),
            watcher::Event::InitApply(object) => {
                self.listed.extend(object.uid());
                self.set(object);
            }
            watcher::Event::Apply(object) => self.set(object),
            watcher::Event::Delete(object) => {
                let Some(uid) = object.uid() else { return };
                self.objects.remove(&uid);
                self.pending.push(Delta::Gone(Arc::new(object)));
            }
            watcher::Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                let lost: Vec<String> =
                    self.objects.keys().filter(|uid| !listed.contains(uid)).cloned().collect();
                self.pending.push(Delta::Synced);
                for uid in lost {
                    self.pending.extend(self.objects.remove(&uid).map(Delta::Gone));
                }
            }
        }
    }

    fn set(&mut self, object: K) {
        let Some(uid) = object.uid() else { return };
        let now = Arc::new(object);
        let before = self.objects.insert(uid, Arc::clone(&now));
        let unchanged =
            before.as_ref().is_some_and(|before| before.resource_version() == now.resource_version());
        if !unchanged {
            self.pending.push(Delta::Set { before, now });
        }
    }
}
