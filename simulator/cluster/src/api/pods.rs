//! The API server's rules for pods: defaults, the checks that matter to a scheduler, binding, and grace periods.

use serde_json::{Value, json};

use super::meta;
use super::request::ApiError;

const DEFAULT_GRACE_SECONDS: u64 = 30;

/// Fills in what clients leave out and checks what would otherwise surprise later.
///
/// # Errors
/// [`ApiError::Invalid`] for a pod without containers or with requests of an extended resource that differ from the
/// limits.
pub(super) fn default_and_check(what: &str, pod: &mut Value) -> Result<(), ApiError> {
    let invalid = |problem: String| ApiError::Invalid { what: what.to_owned(), problem };
    let spec = meta::entry(pod, "spec");
    for (field, value) in [
        ("schedulerName", json!("default-scheduler")),
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(DEFAULT_GRACE_SECONDS)),
    ] {
        spec.entry(field).or_insert(value);
    }
    if spec.get("containers").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        return Err(invalid("spec.containers: Required value".into()));
    }
    for list in ["initContainers", "containers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            default_requests(container).map_err(invalid)?;
        }
    }
    meta::entry(pod, "status").entry("phase").or_insert(json!("Pending"));
    Ok(())
}

/// Limits are requests where no request is given, and extended resources cannot be overcommitted.
fn default_requests(container: &mut Value) -> Result<(), String> {
    for amounts in ["/resources/limits", "/resources/requests"] {
        container.pointer_mut(amounts).into_iter().for_each(canonical);
    }
    let limits = container["resources"]["limits"].as_object().cloned().unwrap_or_default();
    let mut requests = container["resources"]["requests"].as_object().cloned().unwrap_or_default();
    for (name, limit) in &limits {
        requests.entry(name.clone()).or_insert_with(|| limit.clone());
    }
    for (name, request) in &requests {
        if name.contains('/') && limits.get(name) != Some(request) {
            return Err(format!(
                "spec.containers.resources.limits[{name}]: must equal the request ({request}) of an extended resource"
            ));
        }
    }
    if !requests.is_empty() {
        meta::entry(container, "resources").insert("requests".into(), Value::Object(requests));
    }
    Ok(())
}

/// Quantities that a client wrote as numbers, as text: so they are kept and given back.
fn canonical(amounts: &mut Value) {
    for amount in amounts.as_object_mut().into_iter().flat_map(|all| all.values_mut()) {
        if let Value::Number(number) = amount {
            *amount = number.to_string().into();
        }
    }
}

/// A pod once bound stays where it is.
///
/// # Errors
/// [`ApiError::Invalid`] if an update moves it.
pub(super) fn check_update(what: &str, before: &Value, after: &Value) -> Result<(), ApiError> {
    if before["spec"]["nodeName"] == after["spec"]["nodeName"] {
        return Ok(());
    }
    Err(ApiError::Invalid {
        what: what.to_owned(),
        problem: "spec.nodeName: Forbidden: may not be changed; use the binding subresource".into(),
    })
}

/// The pod as a Binding makes it.
///
/// # Errors
/// [`ApiError::Conflict`] for a pod that is assigned, being deleted or gated; [`ApiError::Invalid`] without a target.
pub(super) fn bound(what: &str, pod: &Value, binding: &Value) -> Result<Value, ApiError> {
    let name = meta::text(pod, "name");
    let conflict = |problem: String| ApiError::Conflict { what: what.to_owned(), problem };
    let node = binding["target"]["name"].as_str().filter(|name| !name.is_empty());
    let Some(node) = node else {
        return Err(ApiError::Invalid {
            what: what.to_owned(),
            problem: "target.name: Required value".into(),
        });
    };
    if !meta::text(pod, "deletionTimestamp").is_empty() {
        return Err(conflict(format!("pod {name} is being deleted, cannot be assigned to a host")));
    }
    if let Some(current) = pod["spec"]["nodeName"].as_str().filter(|current| !current.is_empty()) {
        return Err(conflict(format!("pod {name} is already assigned to node {current:?}")));
    }
    if pod["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty()) {
        return Err(conflict(format!("pod {name} has non-empty .spec.schedulingGates")));
    }
    let mut pod = pod.clone();
    for field in ["annotations", "labels"] {
        if binding["metadata"][field].is_object() {
            let carried = json!({"metadata": {field: binding["metadata"][field]}});
            meta::merge(&mut pod, &carried, false);
        }
    }
    meta::entry(&mut pod, "spec").insert("nodeName".into(), node.into());
    let scheduled = json!({"status": {"conditions": [{
        "type": "PodScheduled",
        "status": "True",
        "reason": null,
        "message": null,
        "lastTransitionTime": meta::now(),
    }]}});
    meta::merge(&mut pod, &scheduled, true);
    Ok(pod)
}

/// The node a pod is bound to. Other kinds have none.
pub(crate) fn node_of(pod: &Value) -> Option<&str> {
    pod["spec"]["nodeName"].as_str().filter(|node| !node.is_empty())
}

/// How long a deleted pod may take: nothing if no kubelet has to end it.
pub(crate) fn grace_seconds(pod: &Value, asked: Option<u64>) -> u64 {
    let ended = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    if node_of(pod).is_none() || ended {
        return 0;
    }
    let own = pod["spec"]["terminationGracePeriodSeconds"].as_u64();
    asked.or(own).unwrap_or(DEFAULT_GRACE_SECONDS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numeric_quantity_is_returned_as_text() {
        let mut pod =
            json!({"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 2, "cpu": 0.5}}}]}});
        default_and_check("pod p", &mut pod).unwrap();
        let amounts = json!({"nvidia.com/gpu": "2", "cpu": "0.5"});
        let resources = &pod["spec"]["containers"][0]["resources"];
        assert_eq!(*resources, json!({"limits": amounts, "requests": amounts}));
    }

    #[test]
    fn pod_without_requests_is_unchanged() {
        let mut pod = json!({"spec": {"containers": [{"name": "c"}]}});
        default_and_check("pod p", &mut pod).unwrap();
        assert_eq!(pod["spec"]["containers"], json!([{"name": "c"}]));
    }
}
