//! `Gang` objects: read from the watch, and the newest version of each kept, for what comes late must not undo what is known. Written by
//! `writer`. Decides nothing.

mod requests;
mod spec;
mod writer;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use gantry_api::{Decision, Gang, GangSpec, GangStatus};
use gantry_gang::protocol::Object;
use serde::Deserialize;

pub use writer::run;

use crate::loose::Loose;

/// Says who made an object.
const MANAGED_BY: &str = "app.kubernetes.io/managed-by";

/// Namespace and name of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
}

/// A Gang whose fields are not read yet.
pub type LooseGang = Loose<Gang>;

impl LooseGang {
    /// Its name, and what it says. `None` for what is no object.
    pub fn read(self) -> Option<(Name, Object)> {
        let Self {
            metadata,
            spec,
            status,
            ..
        } = self;
        let name = Name {
            namespace: metadata.namespace?.into(),
            name: metadata.name?.into(),
        };
        let spec = spec::read(&name.name, &spec);
        let labels = metadata.labels.unwrap_or_default();
        let made = labels
            .get(MANAGED_BY)
            .is_some_and(|by| by == gantry_api::names::EXTENDER);
        let object = Object {
            uid: metadata.uid.unwrap_or_default().into(),
            resource_version: metadata.resource_version.unwrap_or_default().into(),
            ours: made && spec.as_ref().is_ok_and(|spec| *spec == GangSpec::default()),
            spec,
            status: status
                .map(|status| read_status(&name, &status))
                .unwrap_or_default(),
        };
        Some((name, object))
    }
}

/// A status that cannot be read whole is read as far as it binds: what was decided must not be lost over a word beside it.
fn read_status(name: &Name, status: &serde_json::Value) -> GangStatus {
    GangStatus::deserialize(status).unwrap_or_else(|error| {
        let Name { namespace, name } = name;
        tracing::warn!(gang = %name, %namespace, %error, "status cannot be read");
        GangStatus {
            decision: status
                .get("decision")
                .and_then(|decision| Decision::deserialize(decision).ok()),
            ..GangStatus::default()
        }
    })
}

/// The newest version known of each object, by the watch or by an answer to a write.
#[derive(Debug, Default)]
pub struct Objects(Mutex<BTreeMap<Name, Object>>);

impl Objects {
    /// A version was seen. Returns the newest there is: what a watch brings may be older than what was written meanwhile.
    pub fn saw(&self, name: &Name, object: Object) -> Object {
        self.change(|objects| match objects.get(name) {
            Some(known) if is_older(&object, known) => known.clone(),
            _ => {
                objects.insert(name.clone(), object.clone());
                object
            }
        })
    }

    /// An object was deleted. `false` if another of the same name is known by now.
    pub fn gone(&self, name: &Name, uid: &str) -> bool {
        self.change(|objects| {
            if objects.get(name).is_some_and(|known| *known.uid != *uid) {
                return false;
            }
            objects.remove(name);
            true
        })
    }

    /// The newest version known.
    pub fn get(&self, name: &Name) -> Option<Object> {
        self.change(|objects| objects.get(name).cloned())
    }

    /// What is known may be old: everything is read anew.
    pub fn clear(&self) {
        self.change(BTreeMap::clear);
    }

    fn change<R>(&self, change: impl FnOnce(&mut BTreeMap<Name, Object>) -> R) -> R {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Whether it is an earlier version of the same object. Versions are numbers that grow; what is no number says nothing.
fn is_older(object: &Object, than: &Object) -> bool {
    let number = |object: &Object| object.resource_version.parse::<u64>().ok();
    object.uid == than.uid
        && number(object)
            .zip(number(than))
            .is_some_and(|(object, than)| object < than)
}

#[cfg(test)]
mod tests;
