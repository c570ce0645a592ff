//! What other programs mark on a Node: NVIDIA's GPU operator while it upgrades the driver or changes the MIG layout, and
//! NVSentinel for a fault. New pods get no GPU of a marked node. Taints and `unschedulable` need nothing here:
//! kube-scheduler and the plans of gangs follow them.

use std::sync::Arc;

use gantry_api::names::MIG_LAYOUT_STATE_LABEL;

use super::objects::SlimNode;

/// The state of the GPU operator's upgrade of the driver, for containers and for virtual machines.
const DRIVER_UPGRADES: [&str; 2] =
    ["nvidia.com/gpu-driver-upgrade-state", "nvidia.com/vgpu-driver-upgrade-state"];
/// The states in which the operator has begun with the node and not ended. A node that waits for its turn is in use.
const UPGRADING: [&str; 10] = [
    "cordon-required",
    "wait-for-jobs-required",
    "pod-deletion-required",
    "drain-required",
    "node-maintenance-required",
    "post-maintenance-required",
    "pod-restart-required",
    "validation-required",
    "uncordon-required",
    "upgrade-failed",
];
/// Beginning of the labels by which the operator's components choose nodes.
const COMPONENTS: &str = "nvidia.com/gpu.deploy.";
/// The values by which the operator stops its components on a node, each with what it does meanwhile.
const PAUSES: [(&str, &str); 3] = [
    ("paused-for-driver-upgrade", "the driver is upgraded"),
    ("paused-for-vgpu-change", "the vGPU configuration is changed"),
    ("paused-for-mig-change", "the MIG layout is changed"),
];
/// The state of NVSentinel's repair of the node. Without a repair there is no label.
const SENTINEL_STATE: &str = "dgxc.nvidia.com/nvsentinel-state";
/// By one of these labels with the value `false` the operator excludes a node from NVSentinel.
const SENTINEL_MANAGES: [&str; 2] =
    ["k8saas.nvidia.com/ManagedByNVSentinel", "nvsentinel.dgxc.nvidia.com/managed"];
/// The conditions by which NVSentinel reports a fatal fault of GPUs or NVSwitches.
const SENTINEL_CONDITIONS: [&str; 16] = [
    "GpuMemWatch",
    "GpuThermalWatch",
    "GpuPcieWatch",
    "GpuPowerWatch",
    "GpuInforomWatch",
    "GpuSmWatch",
    "GpuNvlinkWatch",
    "GpuMcuWatch",
    "GpuPmuWatch",
    "GpuDriverWatch",
    "GpuAllWatch",
    "SysLogsXIDError",
    "SysLogsSXIDError",
    "SysLogsGPUFallenOff",
    "NVSwitchFatalError",
    "NVSwitchDown",
];

/// What another program does with a node, by its mark. The text names the mark and not each of its states:
/// kube-scheduler retries a refused pod when the text of its refusal changes.
pub fn mark(node: &SlimNode) -> Option<Arc<str>> {
    let labels = || node.metadata.labels.iter().flatten();
    let label = |key: &str| {
        let labels = node.metadata.labels.as_ref();
        labels.and_then(|labels| labels.get(key)).map(String::as_str).unwrap_or_default()
    };
    if let Some(key) = DRIVER_UPGRADES.into_iter().find(|key| UPGRADING.contains(&label(key))) {
        return Some(text("the driver is upgraded", "label", key));
    }
    let pause = PAUSES.into_iter().find_map(|(value, what)| {
        let mut paused = labels().filter(|(key, known)| key.starts_with(COMPONENTS) && *known == value);
        paused.next().map(|(key, _)| text(what, "label", key))
    });
    if pause.is_some() {
        return pause;
    }
    // `pending` is no mark: Gantry's plugin writes it too, and withholds the GPUs that wait for their layout itself.
    if label(MIG_LAYOUT_STATE_LABEL) == "rebooting" {
        return Some(text("the node reboots for its MIG layout", "label", MIG_LAYOUT_STATE_LABEL));
    }
    if SENTINEL_MANAGES.into_iter().any(|key| label(key) == "false") {
        return None;
    }
    if !label(SENTINEL_STATE).is_empty() {
        return Some(text("NVSentinel repairs the node", "label", SENTINEL_STATE));
    }
    let fault = SENTINEL_CONDITIONS.into_iter().find(|condition| node.has_condition(condition));
    fault.map(|condition| text("NVSentinel reports a fault", "condition", condition))
}

fn text(what: &str, kind: &str, mark: &str) -> Arc<str> {
    format!("{what} ({kind} {mark})").into()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(labels: &Value, conditions: &Value) -> Option<String> {
        let node = json!({"metadata": {"name": "n", "labels": labels}, "status": {"conditions": conditions}});
        mark(&serde_json::from_value(node).unwrap()).map(|text| text.to_string())
    }

    fn labelled(key: &str, value: &str) -> Option<String> {
        of(&json!({ key: value }), &json!([]))
    }

    #[test]
    fn node_is_marked_while_its_driver_is_upgraded() {
        for state in UPGRADING {
            assert_eq!(
                labelled("nvidia.com/gpu-driver-upgrade-state", state).as_deref(),
                Some("the driver is upgraded (label nvidia.com/gpu-driver-upgrade-state)"),
                "{state}"
            );
        }
        for state in ["", "upgrade-done", "upgrade-required", "of-a-later-release"] {
            assert_eq!(labelled("nvidia.com/gpu-driver-upgrade-state", state), None, "{state}");
        }
    }

    #[test]
    fn node_is_marked_while_components_are_paused() {
        for (value, _) in PAUSES {
            for component in ["device-plugin", "client", "dcgm"] {
                assert!(labelled(&format!("nvidia.com/gpu.deploy.{component}"), value).is_some(), "{value}");
            }
        }
        assert_eq!(labelled("nvidia.com/gpu.deploy.device-plugin", "true"), None);
        assert_eq!(labelled("example.com/gpu.deploy.device-plugin", "paused-for-mig-change"), None);
    }

    #[test]
    fn node_that_reboots_for_mig_is_marked() {
        for (state, is_marked) in
            [("pending", false), ("rebooting", true), ("success", false), ("failed", false)]
        {
            assert_eq!(labelled("nvidia.com/mig.config.state", state).is_some(), is_marked, "{state}");
        }
    }

    #[test]
    fn faults_of_nvsentinel_count_unless_node_is_excluded() {
        let condition = |type_: &str, status: &str| json!([{"type": type_, "status": status}]);
        assert!(labelled("dgxc.nvidia.com/nvsentinel-state", "draining").is_some());
        assert_eq!(
            of(&json!({}), &condition("GpuMemWatch", "True")).as_deref(),
            Some("NVSentinel reports a fault (condition GpuMemWatch)")
        );
        assert_eq!(of(&json!({}), &condition("GpuMemWatch", "False")), None);
        assert_eq!(of(&json!({}), &condition("GpuMemWatch", "Unknown")), None);
        assert_eq!(of(&json!({}), &condition("Ready", "True")), None);
        for key in SENTINEL_MANAGES {
            assert_eq!(of(&json!({ key: "false" }), &condition("GpuMemWatch", "True")), None, "{key}");
            assert!(of(&json!({ key: "true" }), &condition("GpuMemWatch", "True")).is_some(), "{key}");
        }
    }
}
