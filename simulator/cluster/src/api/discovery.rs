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
        Discovery::CoreVersions => Ok(json!({"kind": "APIVersions", "versions": ["v1"]})),
        Discovery::Groups => Ok(groups()),
        Discovery::Resources { group, version } => resources(group, version),
    }
}

fn groups() -> Value {
    let versions: BTreeMap<&str, &str> = KINDS
        .iter()
        .filter(|kind| !kind.group.is_empty())
        .map(|kind| (kind.group, kind.version))
        .collect();
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
    let served: Vec<&Kind> = KINDS
        .iter()
        .filter(|kind| kind.group == group && kind.version == version)
        .collect();
    let Some(first) = served.first() else {
        return Err(ApiError::NotFound(format!("API group {group}/{version}")));
    };
    let mut list = Vec::new();
    for kind in &served {
        let short: Vec<&str> = Some(kind.short)
            .filter(|short| !short.is_empty())
            .into_iter()
            .collect();
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
