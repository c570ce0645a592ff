//! What kube-scheduler decides by itself before it asks any extender: enough of each resource, taints, node selectors,
//! cordons. The texts of refusals are kube-scheduler's.

use std::collections::BTreeMap;

use gantry_api::quantity;
use k8s_openapi::api::core::v1::{Container, Node, Pod, PodSpec, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;

/// Resource amounts, in thousandths.
pub(super) type Amounts = BTreeMap<String, u128>;

/// What a pod needs of each resource: its apps and sidecars together, or its hungriest init container.
pub(super) fn requests(spec: &PodSpec) -> Amounts {
    let mut sidecars = Amounts::new();
    let mut peak = Amounts::new();
    for container in spec.init_containers.iter().flatten() {
        let own = of_container(container);
        if container.restart_policy.as_deref() == Some("Always") {
            add(&mut sidecars, &own);
            raise(&mut peak, &sidecars);
        } else {
            let mut at_once = sidecars.clone();
            add(&mut at_once, &own);
            raise(&mut peak, &at_once);
        }
    }
    let mut total = sidecars;
    for container in &spec.containers {
        add(&mut total, &of_container(container));
    }
    raise(&mut total, &peak);
    add(&mut total, &Amounts::from([("pods".to_owned(), 1000)]));
    total
}

pub(super) fn add(sum: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        *sum.entry(name.clone()).or_default() += amount;
    }
}

/// Every reason for which `node`, of which `used` is taken, cannot take a pod; none if it can.
pub(super) fn refusals(pod: &PodSpec, asked: &Amounts, node: &Node, used: &Amounts) -> Vec<String> {
    let spec = node.spec.clone().unwrap_or_default();
    let tolerations = pod.tolerations.as_deref().unwrap_or_default();
    if spec.unschedulable == Some(true) {
        return vec!["node(s) were unschedulable".into()];
    }
    for taint in spec.taints.iter().flatten() {
        let hard = matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
        if hard && !tolerations.iter().any(|toleration| tolerates(toleration, taint)) {
            let value = taint.value.as_deref().unwrap_or_default();
            return vec![format!("node(s) had untolerated taint {{{}: {value}}}", taint.key)];
        }
    }
    let wanted = pod.node_selector.iter().flatten();
    if wanted.into_iter().any(|(key, value)| node.labels().get(key) != Some(value)) {
        return vec!["node(s) didn't match Pod's node affinity/selector".into()];
    }
    let allocatable = allocatable(node);
    asked
        .iter()
        .filter(|(_, amount)| **amount > 0)
        .filter(|(name, amount)| {
            let taken = used.get(*name).copied().unwrap_or(0);
            taken + **amount > allocatable.get(*name).copied().unwrap_or(0)
        })
        .map(|(name, _)| match name.as_str() {
            "pods" => "Too many pods".to_owned(),
            name => format!("Insufficient {name}"),
        })
        .collect()
}

/// 0 to 100: how empty a node would be in CPU and memory (the default LeastAllocated strategy).
pub(super) fn emptiness(asked: &Amounts, node: &Node, used: &Amounts) -> u128 {
    let allocatable = allocatable(node);
    let score = |name: &str| {
        let all = allocatable.get(name).copied().unwrap_or(0);
        let taken = used.get(name).copied().unwrap_or(0) + asked.get(name).copied().unwrap_or(0);
        (all.saturating_sub(taken) * 100).checked_div(all).unwrap_or(0)
    };
    u128::midpoint(score("cpu"), score("memory"))
}

fn allocatable(node: &Node) -> Amounts {
    let status = node.status.clone().unwrap_or_default();
    status.allocatable.into_iter().flatten().map(|(name, quantity)| (name, thousandths(&quantity))).collect()
}

/// Thousandths of a quantity; 0 for a text that is not one.
fn thousandths(quantity: &Quantity) -> u128 {
    let amount = quantity::thousandths(&quantity.0).unwrap_or(0);
    u128::try_from(amount).unwrap_or(0)
}

fn of_container(container: &Container) -> Amounts {
    let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    requests.into_iter().flatten().map(|(name, quantity)| (name.clone(), thousandths(quantity))).collect()
}

fn raise(peak: &mut Amounts, other: &Amounts) {
    for (name, amount) in other {
        let entry = peak.entry(name.clone()).or_default();
        *entry = (*entry).max(*amount);
    }
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    let effect_fits = effect.is_empty() || effect == taint.effect;
    let key_fits = key == taint.key || (key.is_empty() && toleration.operator.as_deref() == Some("Exists"));
    let value_fits = toleration.operator.as_deref() == Some("Exists")
        || toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default();
    effect_fits && key_fits && value_fits
}

/// Whether a pod is interesting for resources on a node at all.
pub(super) fn is_live(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    !matches!(phase, Some("Succeeded" | "Failed"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(value: serde_json::Value) -> PodSpec {
        serde_json::from_value(value).unwrap()
    }

    fn gpus(count: u32) -> serde_json::Value {
        json!({"requests": {"nvidia.com/gpu": count.to_string()}})
    }

    #[test]
    fn init_container_counts_only_beyond_apps_and_sidecars() {
        let pod = spec(json!({
            "initContainers": [
                {"name": "i", "resources": gpus(3)},
                {"name": "s", "restartPolicy": "Always", "resources": gpus(1)},
                {"name": "j", "resources": gpus(3)},
            ],
            "containers": [{"name": "a", "resources": gpus(2)}],
        }));
        assert_eq!(requests(&pod)["nvidia.com/gpu"], 4000);
    }

    #[test]
    fn refusal_names_every_insufficient_resource() {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "1", "nvidia.com/gpu": "8", "pods": "10"}},
        }))
        .unwrap();
        let pod = spec(
            json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "2", "nvidia.com/gpu": "4"}}}]}),
        );
        let used = Amounts::from([("nvidia.com/gpu".to_owned(), 5000)]);
        let asked = requests(&pod);
        assert_eq!(refusals(&pod, &asked, &node, &used), ["Insufficient cpu", "Insufficient nvidia.com/gpu"]);
        assert_eq!(refusals(&pod, &asked, &node, &Amounts::new()), ["Insufficient cpu"]);
    }

    #[test]
    fn a_taint_needs_a_toleration() {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "n"}, "spec": {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]},
            "status": {"allocatable": {"pods": "10"}},
        }))
        .unwrap();
        let mut pod = spec(json!({"containers": [{"name": "a"}]}));
        let asked = requests(&pod);
        assert_eq!(
            refusals(&pod, &asked, &node, &Amounts::new()),
            ["node(s) had untolerated taint {gpu: yes}"]
        );
        pod.tolerations =
            Some(vec![serde_json::from_value(json!({"key": "gpu", "operator": "Exists"})).unwrap()]);
        assert_eq!(refusals(&pod, &asked, &node, &Amounts::new()), [""; 0]);
    }
}
