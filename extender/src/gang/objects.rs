//! `Gang` objects from the watch. The newest version of each is kept: a late event must not replace a newer version.
//! `writer` writes them. Decides nothing.

mod requests;
mod spec;
mod writer;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use gantry_api::{Decision, Gang, GangSpec, GangStatus};
use gantry_gang::protocol::Object;
use serde::Deserialize;

pub use writer::run;

use crate::partial_object::PartialObject;

/// Label with the component that created an object.
const MANAGED_BY: &str = "app.kubernetes.io/managed-by";

/// Namespace and name of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    /// Namespace.
    pub namespace: Arc<str>,
    /// Name.
    pub name: Arc<str>,
}

/// A Gang of which only the metadata is parsed.
pub type PartialGang = PartialObject<Gang>;

impl PartialGang {
    /// Its name and content. `None` for a value that is not an object.
    pub fn read(self) -> Option<(Name, Object)> {
        let Self { metadata, spec, status, .. } = self;
        let name = Name { namespace: metadata.namespace?.into(), name: metadata.name?.into() };
        let spec = spec::read(&name.name, &spec);
        let labels = metadata.labels.unwrap_or_default();
        let made = labels.get(MANAGED_BY).is_some_and(|by| by == gantry_api::names::EXTENDER);
        let object = Object {
            uid: metadata.uid.unwrap_or_default().into(),
            resource_version: metadata.resource_version.unwrap_or_default().into(),
            ours: made && spec.as_ref().is_ok_and(|spec| *spec == GangSpec::default()),
            spec,
            status: status.map(|status| read_status(&name, &status)).unwrap_or_default(),
        };
        Some((name, object))
    }
}

/// Reads the decision of a status that cannot be read whole: an unreadable field beside it must not lose it.
fn read_status(name: &Name, status: &serde_json::Value) -> GangStatus {
    GangStatus::deserialize(status).unwrap_or_else(|error| {
        let Name { namespace, name } = name;
        tracing::warn!(gang = %name, %namespace, %error, "status cannot be read");
        GangStatus {
            decision: status.get("decision").and_then(|decision| Decision::deserialize(decision).ok()),
            ..GangStatus::default()
        }
    })
}

/// The newest known version of each object, from the watch or from the response to a write.
#[derive(Debug, Default)]
pub struct Objects(Mutex<BTreeMap<Name, Object>>);

impl Objects {
    /// Records a version and returns the newest one: an event of the watch may be older than the last write.
    pub fn saw(&self, name: &Name, object: Object) -> Object {
        self.change(|objects| match objects.get(name) {
            Some(known) if is_older(&object, known) => known.clone(),
            _ => {
                objects.insert(name.clone(), object.clone());
                object
            }
        })
    }

    /// Records a deletion. `false` if a new object of the same name is known.
    pub fn gone(&self, name: &Name, uid: &str) -> bool {
        self.change(|objects| {
            if objects.get(name).is_some_and(|known| *known.uid != *uid) {
                return false;
            }
            objects.remove(name);
            true
        })
    }

    /// The newest known version.
    pub fn get(&self, name: &Name) -> Option<Object> {
        self.change(|objects| objects.get(name).cloned())
    }

    /// Forgets every object before a new list.
    pub fn clear(&self) {
        self.change(BTreeMap::clear);
    }

    fn change<R>(&self, change: impl FnOnce(&mut BTreeMap<Name, Object>) -> R) -> R {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Whether it is an earlier version of the same object. Versions are increasing numbers; any other text is not
/// compared.
fn is_older(object: &Object, than: &Object) -> bool {
    let number = |object: &Object| object.resource_version.parse::<u64>().ok();
    object.uid == than.uid && number(object).zip(number(than)).is_some_and(|(object, than)| object < than)
}

#[cfg(test)]
mod tests;
