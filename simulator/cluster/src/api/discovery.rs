//! The documents by which clients learn what is served: version, groups, resources.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::KUBERNETES_VERSION;
use super::error::ApiError;
use super::kinds::{KINDS, Kind};
use super::request::Discovery;

/// The document asked for.
///
/// # Errors
/// [`ApiError::NotFound`] for a group or version that is not served.
pub(super) fn document(ask: &Discovery) -> Result<Value, ApiError> {
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
    if kind.group.is_empty() {
        format!("api/{}", kind.version)
    } else {
        format!("apis/{}/{}", kind.group, kind.version)
    }
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
