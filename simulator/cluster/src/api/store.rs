//! The objects, their revisions, and a bounded history for watches. One lock, never held during I/O; every write gets
//! the next revision, as in etcd. The store is independent of HTTP and of the meaning of objects.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tokio::sync::watch;

use super::meta;
use super::request::ApiError;

/// Objects by place, and what happened to them lately.
#[derive(Debug)]
pub(super) struct Store {
    inner: Mutex<Inner>,
    revision: watch::Sender<u64>,
    history: usize,
}

/// Where an object lives.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// [`Kind::storage`](super::kinds::Kind::storage).
    pub storage: &'static str,
    /// Empty for objects without a namespace.
    pub namespace: String,
    pub name: String,
}

/// One write.
#[derive(Debug, Clone)]
pub(super) struct Change {
    /// The revision it made.
    pub revision: u64,
    /// What was written.
    pub key: Key,
    /// The object before, unless it was created.
    pub before: Option<Arc<Value>>,
    /// The object after; for a removal its last state, with the revision of the removal.
    pub object: Arc<Value>,
    /// Whether it was removed.
    pub removed: bool,
}

/// What a write makes of an object.
#[derive(Debug)]
pub(super) enum Write {
    /// This is its new state.
    Put(Value),
    /// It goes away; this is its last state.
    Remove(Value),
}

#[derive(Debug)]
struct Inner {
    revision: u64,
    objects: BTreeMap<Key, Arc<Value>>,
    changes: VecDeque<Change>,
    /// Watches may start at this revision or later.
    oldest: u64,
}

impl Store {
    /// An empty store that remembers the last `history` writes.
    pub(super) fn new(history: usize) -> Self {
        // Revision 0 means "any" in requests, so the first state has revision 1.
        let inner = Inner { revision: 1, objects: BTreeMap::new(), changes: VecDeque::new(), oldest: 1 };
        Self { inner: Mutex::new(inner), revision: watch::Sender::new(1), history }
    }

    /// One object.
    pub(super) fn get(&self, key: &Key) -> Option<Arc<Value>> {
        self.lock().objects.get(key).cloned()
    }

    /// All objects of a storage, sorted by namespace and name, in one namespace or all, and the revision of this state.
    pub(super) fn list(
        &self,
        storage: &'static str,
        namespace: Option<&str>,
    ) -> (Vec<(Key, Arc<Value>)>, u64) {
        let inner = self.lock();
        let from = Key { storage, namespace: namespace.unwrap_or_default().to_owned(), name: String::new() };
        let objects = inner
            .objects
            .range(from..)
            .take_while(|(key, _)| {
                key.storage == storage && namespace.is_none_or(|wanted| key.namespace == wanted)
            })
            .map(|(key, object)| (key.clone(), Arc::clone(object)))
            .collect();
        (objects, inner.revision)
    }

    /// Reads and writes one key in one step: `write` gets the present object and returns the new one. An unchanged
    /// object keeps its revision. With `dry_run` the result is returned and not stored.
    ///
    /// # Errors
    /// Those of `write`.
    pub(super) fn write(
        &self,
        key: &Key,
        dry_run: bool,
        write: impl FnOnce(Option<&Value>) -> Result<Write, ApiError>,
    ) -> Result<Arc<Value>, ApiError> {
        let mut inner = self.lock();
        let before = inner.objects.get(key).cloned();
        let (mut object, removed) = match write(before.as_deref())? {
            Write::Put(object) => (object, false),
            Write::Remove(object) => (object, true),
        };
        if let Some(same) = before.as_ref().filter(|before| !removed && ***before == object) {
            return Ok(Arc::clone(same));
        }
        let revision = inner.revision + 1;
        meta::set_text(&mut object, "resourceVersion", revision.to_string());
        let object = Arc::new(object);
        if dry_run {
            return Ok(object);
        }
        if removed {
            inner.objects.remove(key);
        } else {
            inner.objects.insert(key.clone(), Arc::clone(&object));
        }
        inner.revision = revision;
        inner.changes.push_back(Change {
            revision,
            key: key.clone(),
            before,
            object: Arc::clone(&object),
            removed,
        });
        while inner.changes.len() > self.history {
            if let Some(forgotten) = inner.changes.pop_front() {
                inner.oldest = forgotten.revision;
            }
        }
        drop(inner);
        self.revision.send_replace(revision);
        Ok(object)
    }

    /// The writes to a storage after revision `after`, and the revision up to which they are complete.
    ///
    /// # Errors
    /// [`ApiError::Gone`] if some of them are forgotten.
    pub(super) fn since(&self, storage: &'static str, after: u64) -> Result<(Vec<Change>, u64), ApiError> {
        let inner = self.lock();
        if after < inner.oldest {
            return Err(ApiError::Gone { asked: after, oldest: inner.oldest });
        }
        let start = inner.changes.partition_point(|change| change.revision <= after);
        let changes =
            inner.changes.range(start..).filter(|change| change.key.storage == storage).cloned().collect();
        Ok((changes, inner.revision))
    }

    /// The newest revision, to wait for later ones.
    pub(super) fn revisions(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }

    /// A panic of another thread leaves no half-written state behind (writes are pushed last), so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(name: &str) -> Key {
        Key { storage: "pods", namespace: "default".into(), name: name.into() }
    }

    fn put(store: &Store, name: &str, value: u32) -> Arc<Value> {
        let object = json!({"metadata": {"name": name}, "value": value});
        store
            .write(&key(name), false, |before| {
                let mut object = object;
                if let Some(before) = before {
                    meta::set_text(
                        &mut object,
                        "resourceVersion",
                        meta::text(before, "resourceVersion").into(),
                    );
                }
                Ok(Write::Put(object))
            })
            .unwrap()
    }

    #[test]
    fn changed_object_gets_next_revision_unchanged_none() {
        let store = Store::new(8);
        assert_eq!(meta::text(&put(&store, "a", 1), "resourceVersion"), "2");
        assert_eq!(meta::text(&put(&store, "b", 1), "resourceVersion"), "3");
        assert_eq!(meta::text(&put(&store, "a", 1), "resourceVersion"), "2");
        assert_eq!(meta::text(&put(&store, "a", 2), "resourceVersion"), "4");
        assert_eq!(store.list("pods", None).1, 4);
    }

    #[test]
    fn reader_behind_the_history_gets_an_error() {
        let store = Store::new(2);
        for value in 0..4 {
            put(&store, "a", value);
        }
        assert_eq!(store.since("pods", 3).unwrap().0.len(), 2);
        assert_eq!(store.since("pods", 2).unwrap_err(), ApiError::Gone { asked: 2, oldest: 3 });
    }

    #[test]
    fn dry_run_stores_nothing() {
        let store = Store::new(2);
        store.write(&key("a"), true, |_| Ok(Write::Put(json!({"metadata": {"name": "a"}})))).unwrap();
        assert_eq!(store.get(&key("a")), None);
        assert_eq!(store.list("pods", None).1, 1);
    }
}
