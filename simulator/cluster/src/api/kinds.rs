//! The resources that the API server serves: names, scope, subresources, and the fields a selector may name. A closed
//! list, so that a daemon asking for anything else gets the 404 a real API server would give without the CRD. Clients
//! learn of them from the discovery documents.

use std::collections::BTreeMap;

use gantry_api::names::GROUP;
use serde_json::{Value, json};

use super::KUBERNETES_VERSION;
use super::request::{ApiError, Discovery};

/// One served resource in one group and version.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// API group, empty for the core group.
    pub group: &'static str,
    /// Version served.
    pub version: &'static str,
    /// `kind` of its objects.
    pub kind: &'static str,
    /// Plural name, as in paths.
    pub plural: &'static str,
    /// Short name for people.
    pub short: &'static str,
    /// Whether objects live in a namespace.
    pub namespaced: bool,
    /// Whether `status` is written through a subresource only.
    pub status: bool,
    /// Where objects are kept: two kinds with the same storage are two views of the same objects.
    pub storage: &'static str,
    /// Fields that a field selector may use, in addition to name and namespace.
    pub fields: &'static [&'static str],
}

/// Everything served. Leases and the custom resources are in their own groups, Events in two.
pub(super) static KINDS: [Kind; 9] = [
    Kind { status: true, fields: &["status.phase"], ..cluster_kind("", "Namespace", "namespaces", "ns") },
    Kind { status: true, fields: &["spec.unschedulable"], ..cluster_kind("", "Node", "nodes", "no") },
    kind("", "ConfigMap", "configmaps", "cm"),
    Kind {
        status: true,
        fields: &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "status.phase",
            "status.nominatedNodeName",
        ],
        ..kind("", "Pod", "pods", "po")
    },
    Kind {
        fields: &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "reason",
            "type",
        ],
        ..kind("", "Event", "events", "ev")
    },
    Kind { fields: &["reason", "type"], ..kind("events.k8s.io", "Event", "events", "ev") },
    kind("coordination.k8s.io", "Lease", "leases", ""),
    Kind { version: "v1alpha1", status: true, ..cluster_kind(GROUP, "GpuNode", "gpunodes", "gn") },
    Kind { version: "v1alpha1", status: true, ..kind(GROUP, "Gang", "gangs", "") },
];

/// A kind of namespaced objects without a status.
const fn kind(group: &'static str, kind: &'static str, plural: &'static str, short: &'static str) -> Kind {
    Kind {
        group,
        version: "v1",
        kind,
        plural,
        short,
        namespaced: true,
        status: false,
        storage: plural,
        fields: &[],
    }
}

/// A kind of objects without a namespace.
const fn cluster_kind(
    group: &'static str,
    name: &'static str,
    plural: &'static str,
    short: &'static str,
) -> Kind {
    Kind { namespaced: false, ..kind(group, name, plural, short) }
}

impl Kind {
    /// `apiVersion` of its objects.
    pub(super) fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_owned()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// The kind served at `group`, `version` and `plural`.
    pub(super) fn find(group: &str, version: &str, plural: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.group == group && kind.version == version && kind.plural == plural)
    }

    /// `pods`, or `gpunodes.gantry.dev`: how messages name the resource.
    pub(super) fn qualified(&self) -> String {
        if self.group.is_empty() { self.plural.to_owned() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// Whether a field selector may name `field`.
    pub(super) fn selectable(&self, field: &str) -> bool {
        field == "metadata.name"
            || (self.namespaced && field == "metadata.namespace")
            || self.fields.contains(&field)
    }
}

/// The document asked for.
///
/// # Errors
/// [`ApiError::NotFound`] for a group or version that is not served.
pub(super) fn discover(ask: &Discovery) -> Result<Value, ApiError> {
    match ask {
        Discovery::Version => {
            let numbers: Vec<&str> = KUBERNETES_VERSION.trim_start_matches('v').split('.').collect();
            Ok(json!({
                "major": numbers.first(), "minor": numbers.get(1), "gitVersion": format!("{KUBERNETES_VERSION}+gantry.sim"),
                "platform": "linux",
            }))
        }
        Discovery::Health => Ok(json!("ok")),
        Discovery::OpenApi { of: None } => Ok(open_api_index()),
        Discovery::OpenApi { of: Some((group, version)) } => open_api(group, version),
        Discovery::CoreVersions => Ok(json!({"kind": "APIVersions", "versions": ["v1"]})),
        Discovery::Groups => Ok(groups()),
        Discovery::Resources { group, version } => resources(group, version),
    }
}

fn groups() -> Value {
    let versions: BTreeMap<&str, &str> =
        KINDS.iter().filter(|kind| !kind.group.is_empty()).map(|kind| (kind.group, kind.version)).collect();
    let groups: Vec<Value> = versions
        .into_iter()
        .map(|(group, version)| {
            let version = json!({"groupVersion": format!("{group}/{version}"), "version": version});
            json!({"name": group, "versions": [version], "preferredVersion": version})
        })
        .collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

fn resources(group: &str, version: &str) -> Result<Value, ApiError> {
    let served: Vec<&Kind> =
        KINDS.iter().filter(|kind| kind.group == group && kind.version == version).collect();
    let Some(first) = served.first() else {
        return Err(ApiError::NotFound(format!("API group {group}/{version}")));
    };
    let mut list = Vec::new();
    for kind in &served {
        let short: Vec<&str> = Some(kind.short).filter(|short| !short.is_empty()).into_iter().collect();
        list.push(json!({
            "name": kind.plural, "singularName": kind.kind.to_lowercase(), "namespaced": kind.namespaced, "kind": kind.kind,
            "shortNames": short, "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
        }));
        if kind.status {
            list.push(json!({
                "name": format!("{}/status", kind.plural), "singularName": "", "namespaced": kind.namespaced, "kind": kind.kind,
                "verbs": ["get", "patch", "update"],
            }));
        }
        if kind.storage == "pods" {
            list.push(json!({
                "name": "pods/binding", "singularName": "", "namespaced": true, "kind": "Binding", "verbs": ["create"],
            }));
        }
    }
    Ok(json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": first.api_version(), "resources": list,
    }))
}

fn path(kind: &Kind) -> String {
    let root = if kind.group.is_empty() { "api" } else { "apis" };
    format!("{root}/{}", kind.api_version())
}

fn open_api_index() -> Value {
    let paths: BTreeMap<String, Value> = KINDS
        .iter()
        .map(|kind| (path(kind), json!({"serverRelativeURL": format!("/openapi/v3/{}", path(kind))})))
        .collect();
    json!({"paths": paths})
}

/// An empty OpenAPI document: the server checks fields itself, so that kubectl does not.
fn open_api(group: &str, version: &str) -> Result<Value, ApiError> {
    let paths: BTreeMap<String, Value> = KINDS
        .iter()
        .filter(|kind| kind.group == group && kind.version == version)
        .map(|kind| {
            let place = if kind.namespaced { "namespaces/{namespace}/" } else { "" };
            let patch = json!({"patch": {
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "responses": {},
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": {"group": kind.group, "version": kind.version, "kind": kind.kind},
            }});
            (format!("/{}/{place}{}/{{name}}", path(kind), kind.plural), patch)
        })
        .collect();
    if paths.is_empty() {
        return Err(ApiError::NotFound(format!("API group {group}/{version}")));
    }
    let info = json!({"title": "Gantry's embedded cluster", "version": KUBERNETES_VERSION});
    Ok(json!({"openapi": "3.0.0", "info": info, "paths": paths}))
}
