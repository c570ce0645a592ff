//! The verbs on objects: create, update, patch, delete, bind, with the rules for metadata, preconditions, finalizers
//! and graceful deletion that the daemons rely on. No HTTP here.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::kinds::Kind;
use super::request::{ApiError, Part, PatchKind};
use super::store::{Key, Store, Write};
use super::view::{STORED_VERSION, to_stored};
use super::{meta, pods};

/// The verbs, over a store.
#[derive(Debug)]
pub(super) struct Objects {
    /// Where everything is kept.
    pub store: Store,
}

/// What a delete may ask for.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct DeleteOptions {
    /// Seconds the pod may take; 0 removes it at once.
    pub grace_period_seconds: Option<u64>,
    /// What must be true of the object.
    pub preconditions: Preconditions,
}

/// What must be true of an object for a write to happen. Empty holds always.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Preconditions {
    pub uid: Option<String>,
    /// Its revision.
    pub resource_version: Option<String>,
}

impl Preconditions {
    /// Those that `metadata` of a written object states.
    pub(super) fn of(object: &Value) -> Self {
        let stated = |field| Some(meta::text(object, field).to_owned()).filter(|text| !text.is_empty());
        Self { uid: stated("uid"), resource_version: stated("resourceVersion") }
    }

    /// Checks them against an object.
    ///
    /// # Errors
    /// [`ApiError::Conflict`] that names both sides.
    pub(super) fn check(&self, what: &str, object: &Value) -> Result<(), ApiError> {
        let conflict = |problem| ApiError::Conflict { what: what.to_owned(), problem };
        let actual = meta::text(object, "uid");
        if let Some(uid) = self.uid.as_deref().filter(|uid| *uid != actual) {
            return Err(conflict(format!(
                "Precondition failed: UID in precondition: {uid}, UID in object meta: {actual}"
            )));
        }
        let actual = meta::text(object, "resourceVersion");
        if self.resource_version.as_deref().is_some_and(|version| version != actual) {
            return Err(conflict(
                "the object has been modified; please apply your changes to the latest version and try again"
                    .into(),
            ));
        }
        Ok(())
    }
}

impl Objects {
    /// Creates an object.
    ///
    /// # Errors
    /// Invalid or unnamed objects, a missing namespace, a name that is taken.
    pub(super) fn create(
        &self,
        kind: &'static Kind,
        namespace: &str,
        mut object: Value,
        dry_run: bool,
    ) -> Result<Arc<Value>, ApiError> {
        check_type(kind, &object)?;
        if meta::text(&object, "name").is_empty() && !meta::text(&object, "generateName").is_empty() {
            let suffix: String = meta::new_uid().chars().take(5).collect();
            let name = format!("{}{suffix}", meta::text(&object, "generateName"));
            meta::set_text(&mut object, "name", name);
        }
        let key = self.place(kind, namespace, meta::text(&object, "name"))?;
        let what = describe(kind, &key.name);
        if kind.namespaced {
            let given = meta::text(&object, "namespace");
            if !given.is_empty() && given != namespace {
                return Err(ApiError::BadRequest(format!(
                    "the namespace of the object ({given}) does not match the namespace on the request ({namespace})"
                )));
            }
            meta::set_text(&mut object, "namespace", namespace.to_owned());
        }
        object = to_stored(kind, object);
        if kind.storage == "pods" {
            pods::default_and_check(&what, &mut object)?;
        }
        let fresh = initial(kind, object);
        self.store.write(&key, dry_run, |before| match before {
            Some(_) => Err(ApiError::AlreadyExists(what)),
            None => Ok(Write::Put(fresh)),
        })
    }

    /// Replaces an object or its status.
    ///
    /// # Errors
    /// No such object, invalid content, a precondition in its metadata.
    pub(super) fn replace(
        &self,
        kind: &'static Kind,
        key: &Key,
        part: Part,
        object: Value,
        dry_run: bool,
    ) -> Result<Arc<Value>, ApiError> {
        check_type(kind, &object)?;
        let object = to_stored(kind, object);
        let what = describe(kind, &key.name);
        self.store.write(key, dry_run, |before| {
            let before = before.ok_or_else(|| ApiError::NotFound(what.clone()))?;
            Preconditions::of(&object).check(&what, before)?;
            updated(kind, &what, part, before, object)
        })
    }

    /// Changes an object or its status. Apply makes the object if it is missing.
    ///
    /// # Errors
    /// No such object, invalid content, a precondition in its metadata.
    pub(super) fn patch(
        &self,
        kind: &'static Kind,
        key: &Key,
        part: Part,
        (form, patch): (PatchKind, &Value),
        dry_run: bool,
    ) -> Result<Arc<Value>, ApiError> {
        if !patch.is_object() {
            return Err(ApiError::BadRequest("a patch must be a JSON object".into()));
        }
        let what = describe(kind, &key.name);
        if form == PatchKind::Apply && part == Part::Main && self.store.get(key).is_none() {
            check_name(patch, &key.name)?;
            return self.create(kind, &key.namespace, patch.clone(), dry_run);
        }
        self.store.write(key, dry_run, |before| {
            let before = before.ok_or_else(|| ApiError::NotFound(what.clone()))?;
            Preconditions::of(patch).check(&what, before)?;
            let mut object = before.clone();
            if form == PatchKind::Apply {
                check_name(patch, &key.name)?;
                apply(&mut object, patch);
            } else {
                meta::merge(&mut object, patch, form == PatchKind::Strategic);
            }
            updated(kind, &what, part, before, object)
        })
    }

    /// Deletes an object. A bound pod gets its grace period unless that is 0; an object with finalizers waits for them.
    /// A watcher of a bound pod always sees the deletion timestamp before the removal. It can thus distinguish a
    /// deleted pod from one that left the watch.
    ///
    /// # Errors
    /// No such object, a precondition.
    pub(crate) fn delete(
        &self,
        kind: &'static Kind,
        key: &Key,
        options: &DeleteOptions,
        dry_run: bool,
    ) -> Result<Arc<Value>, ApiError> {
        let what = describe(kind, &key.name);
        let grace = |pod: &Value| match kind.storage {
            "pods" => pods::grace_seconds(pod, options.grace_period_seconds),
            _ => 0,
        };
        let marked = self.store.write(key, dry_run, |before| {
            let before = before.ok_or_else(|| ApiError::NotFound(what.clone()))?;
            options.preconditions.check(&what, before)?;
            let mut object = before.clone();
            if meta::text(before, "deletionTimestamp").is_empty() {
                meta::set_text(&mut object, "deletionTimestamp", meta::now());
                bump_generation(&mut object);
            }
            if kind.storage == "pods" {
                meta::set(&mut object, "deletionGracePeriodSeconds", grace(before).into());
            }
            let waits = grace(before) > 0 || has_finalizers(before);
            if waits || pods::node_of(before).is_some() {
                Ok(Write::Put(object))
            } else {
                Ok(Write::Remove(object))
            }
        })?;
        let gone_or_waits = pods::node_of(&marked).is_none() || grace(&marked) > 0 || has_finalizers(&marked);
        if gone_or_waits || dry_run {
            return Ok(marked);
        }
        let same = Preconditions { uid: Some(meta::text(&marked, "uid").to_owned()), resource_version: None };
        self.store.write(key, dry_run, |before| {
            let before = before.ok_or_else(|| ApiError::NotFound(what.clone()))?;
            same.check(&what, before)?;
            Ok(Write::Remove(before.clone()))
        })
    }

    /// Binds a pod: `nodeName`, the Binding's annotations and labels and the PodScheduled condition, in one write.
    ///
    /// # Errors
    /// No such pod, or a conflict: already assigned, being deleted, gated, another UID or revision.
    pub(super) fn bind(&self, key: &Key, binding: &Value, dry_run: bool) -> Result<(), ApiError> {
        let what = format!("pods/binding {:?}", key.name);
        self.store.write(key, dry_run, |before| {
            let before = before.ok_or_else(|| ApiError::NotFound(format!("pods {:?}", key.name)))?;
            Preconditions::of(binding).check(&what, before)?;
            pods::bound(&what, before, binding).map(Write::Put)
        })?;
        Ok(())
    }

    /// The place of an object.
    ///
    /// # Errors
    /// A missing name or namespace.
    pub(super) fn place(&self, kind: &'static Kind, namespace: &str, name: &str) -> Result<Key, ApiError> {
        if name.is_empty() || name.len() > 253 || name.contains('/') {
            return Err(ApiError::Invalid {
                what: kind.kind.to_owned(),
                problem: format!("metadata.name: {name:?} must be 1 to 253 characters without '/'"),
            });
        }
        let in_namespaces =
            Key { storage: "namespaces", namespace: String::new(), name: namespace.to_owned() };
        if kind.namespaced && self.store.get(&in_namespaces).is_none() {
            return Err(ApiError::NotFound(format!("namespaces {namespace:?}")));
        }
        Ok(Key { storage: kind.storage, namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

/// `pods "a"`: how messages name an object.
pub(super) fn describe(kind: &Kind, name: &str) -> String {
    format!("{} {name:?}", kind.qualified())
}

fn check_type(kind: &Kind, object: &Value) -> Result<(), ApiError> {
    if !object.is_object() {
        return Err(ApiError::BadRequest("an object must be a JSON object".into()));
    }
    let fits = |field: &str, expected: &str| match object[field].as_str() {
        // Clients may omit what the path contains.
        None | Some("") => true,
        Some(found) => found == expected,
    };
    if fits("kind", kind.kind) && fits("apiVersion", &kind.api_version()) {
        return Ok(());
    }
    Err(ApiError::BadRequest(format!(
        "{} {} was sent where {} {} belongs",
        object["apiVersion"],
        object["kind"],
        kind.api_version(),
        kind.kind
    )))
}

fn check_name(patch: &Value, name: &str) -> Result<(), ApiError> {
    match meta::text(patch, "name") {
        found if found == name => Ok(()),
        found => Err(ApiError::BadRequest(format!(
            "the name of the object ({found}) does not match the name on the URL ({name})"
        ))),
    }
}

/// A new object as it is stored: with server-set metadata, and without status if the status is a subresource. Pods and
/// nodes keep theirs in this cluster, because their creator simulates the machine.
fn initial(kind: &Kind, mut object: Value) -> Value {
    meta::set_text(&mut object, "uid", meta::new_uid());
    meta::set_text(&mut object, "creationTimestamp", meta::now());
    meta::unset(&mut object, "deletionTimestamp");
    meta::unset(&mut object, "managedFields");
    if kind.status {
        meta::set(&mut object, "generation", 1.into());
        if kind.group == gantry_api::names::GROUP
            && let Some(map) = object.as_object_mut()
        {
            map.remove("status");
        }
    }
    stamp_type(kind, &mut object);
    object
}

/// `before` updated to `object`, through the main resource or the status.
fn updated(kind: &Kind, what: &str, part: Part, before: &Value, object: Value) -> Result<Write, ApiError> {
    let mut next = match part {
        Part::Status => {
            let mut next = before.clone();
            if let (Some(map), Some(status)) = (next.as_object_mut(), object.get("status")) {
                map.insert("status".into(), status.clone());
            }
            next
        }
        Part::Main | Part::Binding => {
            let mut next = object;
            if kind.status
                && let Some(map) = next.as_object_mut()
            {
                match before.get("status") {
                    Some(status) => map.insert("status".into(), status.clone()),
                    None => map.remove("status"),
                };
            }
            next
        }
    };
    for field in [
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "namespace",
        "name",
        "resourceVersion",
    ] {
        match before["metadata"].get(field) {
            Some(value) => meta::set(&mut next, field, value.clone()),
            None => meta::unset(&mut next, field),
        }
    }
    meta::unset(&mut next, "managedFields");
    stamp_type(kind, &mut next);
    if kind.storage == "pods" {
        pods::check_update(what, before, &next)?;
    }
    if before.get("spec") != next.get("spec") && kind.status {
        bump_generation(&mut next);
    }
    let ending = !meta::text(&next, "deletionTimestamp").is_empty();
    if ending && has_finalizers(before) && !has_finalizers(&next) {
        return Ok(Write::Remove(next));
    }
    Ok(Write::Put(next))
}

/// Server-side apply by a single applier: `spec` and `status` are replaced, metadata is merged. Field ownership is not
/// tracked, because every part of an object has one writer here.
fn apply(object: &mut Value, patch: &Value) {
    meta::merge(object, &serde_json::json!({"metadata": patch["metadata"]}), false);
    for part in ["spec", "status"] {
        if let (Some(value), Some(map)) = (patch.get(part), object.as_object_mut()) {
            map.insert(part.into(), value.clone());
        }
    }
}

fn has_finalizers(object: &Value) -> bool {
    object["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty())
}

fn bump_generation(object: &mut Value) {
    let generation = object["metadata"]["generation"].as_u64().unwrap_or(0) + 1;
    meta::set(object, "generation", generation.into());
}

fn stamp_type(kind: &Kind, object: &mut Value) {
    let version = if kind.storage == "events" { STORED_VERSION.to_owned() } else { kind.api_version() };
    if let Some(map) = object.as_object_mut() {
        map.insert("apiVersion".into(), version.into());
        map.insert("kind".into(), kind.kind.into());
    }
}
