//! Every annotation, label and resource name that users or the daemons write.

use crate::condition::ConditionType;

/// API group of the custom resources, and the prefix of all annotations and labels.
pub const GROUP: &str = "gantry.dev";

/// The exact devices of each container of a pod. The extender writes it with the Binding; it must not be set by hand.
pub const GRANT_ANNOTATION: &str = "gantry.dev/grant";

/// Why the pod has its node and devices, as JSON ([`Placement`](crate::Placement)). The extender writes it with the grant.
pub const PLACEMENT_ANNOTATION: &str = "gantry.dev/placement";

/// On the extender's Lease: the settings that change its decisions, as JSON. The leader writes it.
pub const SETTINGS_ANNOTATION: &str = "gantry.dev/settings";

/// Type of the condition that the extender writes into the status of an unschedulable pod when devices came free. The
/// write makes kube-scheduler try the pod again. Its time is that of the last activation.
pub const GPUS_FREED_CONDITION: &str = ConditionType::GpusFreed.as_str();

/// On an unschedulable pod: when the extender last made kube-scheduler try it again, written with
/// the condition `gantry.dev/GpusFreed`. kube-scheduler before 1.32 overlooks changes of the status alone.
pub const ACTIVATED_ANNOTATION: &str = "gantry.dev/activated-at";

/// On a pod (or a controller's template): the name of its gang. Pods of one namespace with the same name are one gang.
/// `none` excludes a pod from the gang that another integration would recognise.
pub const GANG_ANNOTATION: &str = "gantry.dev/gang";

/// On a pod: the minimum of members that are useful only together: a number, or `all` where the owner gives the number.
/// Without [`GANG_ANNOTATION`], on a pod of a Job, the Job is the gang.
pub const GANG_MIN_ANNOTATION: &str = "gantry.dev/gang-min";

/// On a pod: most members that are bound. More members wait.
pub const GANG_MAX_ANNOTATION: &str = "gantry.dev/gang-max";

/// On a pod: the level of the fabric that must hold the gang, by name or node label. The gang waits until one domain
/// holds it.
pub const GANG_REQUIRED_LEVEL_ANNOTATION: &str = "gantry.dev/gang-required-level";

/// On a pod: the level of the fabric that should hold the gang.
pub const GANG_PREFERRED_LEVEL_ANNOTATION: &str = "gantry.dev/gang-preferred-level";

/// On a pod: members per slice. Each slice is placed in one domain of the level.
pub const GANG_SLICE_ANNOTATION: &str = "gantry.dev/gang-slice-size";

/// On a pod: whether the gang's members take the same NIC indices on every node where these are free: `same` or `any`.
pub const GANG_RAILS_ANNOTATION: &str = "gantry.dev/gang-rails";

/// On a pod: whether the gang waits until its members have the same NIC indices on every node: `same` or `any`.
pub const GANG_REQUIRED_RAILS_ANNOTATION: &str = "gantry.dev/gang-required-rails";

/// On a pod: how many further reservations are planned with the gang, for replacements of its members. Pods of lower
/// priority may use their devices meanwhile.
pub const GANG_SPARES_ANNOTATION: &str = "gantry.dev/gang-spares";

/// On a pod: what to do when a member of the bound gang is lost: `hold`, `restart` or `ignore`.
pub const GANG_REPAIR_ANNOTATION: &str = "gantry.dev/gang-repair";

/// On a pod: seconds that the gang's members may take to arrive once devices are reserved for them.
pub const GANG_ARRIVAL_ANNOTATION: &str = "gantry.dev/gang-arrival-seconds";
/// Annotation: seconds that the reservation of the gang is kept while its owner creates all members again.
pub const GANG_RESTART_HOLD_ANNOTATION: &str = "gantry.dev/gang-restart-hold-seconds";

/// On a pod: its rank, where the controller does not number its pods.
pub const GANG_RANK_ANNOTATION: &str = "gantry.dev/gang-rank";

/// On a pod: `true` if it can be stopped at little loss. Such gangs are preempted first.
pub const CHECKPOINTED_ANNOTATION: &str = "gantry.dev/checkpointed";

/// On a pod: the least link that must join the GPUs of each container: `nvlink`, `pcie-switch`, `numa` or `any`.
pub const REQUIRED_LINK_ANNOTATION: &str = "gantry.dev/required-link";

/// On a pod: the least link that should join the GPUs of each container.
pub const PREFERRED_LINK_ANNOTATION: &str = "gantry.dev/preferred-link";

/// On a pod: the least GB/s that a collective over the GPUs of each container must reach.
pub const REQUIRED_BANDWIDTH_ANNOTATION: &str = "gantry.dev/required-bandwidth";

/// On a pod: the least GB/s that a collective over the GPUs of each container should reach.
pub const PREFERRED_BANDWIDTH_ANNOTATION: &str = "gantry.dev/preferred-bandwidth";

/// On a pod: `true` if it is to get the cheapest node that meets its request, not the fastest.
pub const ECONOMY_ANNOTATION: &str = "gantry.dev/economy";

/// On a pod: the GPU models that it can use, with commas, the best first.
pub const GPU_MODELS_ANNOTATION: &str = "gantry.dev/gpu-models";

/// On a pod: which of equally good nodes it gets: `pack` or `spread`.
pub const NODE_POLICY_ANNOTATION: &str = "gantry.dev/node-policy";

/// A scheduling gate that keeps members of a gang out of kube-scheduler's queue until enough of them exist; the
/// extender removes it.
pub const GANG_GATE: &str = "gantry.dev/gang";

/// The default of `spec.schedulerName`.
pub const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// The extended resource that whole GPUs are advertised as.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";

/// Domain of the resources that the extender manages.
pub const RESOURCE_DOMAIN: &str = "nvidia.com";

/// The admission policies of `manifests/guard.yaml` that the extender expects: those that narrow its rights, and those
/// that protect what it trusts.
pub const EXTENDER_POLICIES: [&str; 6] = [
    "gantry-grant",
    "gantry-binding",
    "gantry-gang-status",
    "gantry-extender-events",
    "gantry-extender-binding",
    "gantry-extender-status",
];

/// The admission policies of `manifests/guard.yaml` that narrow the plugin's rights.
pub const PLUGIN_POLICIES: [&str; 3] = ["gantry-gpunode", "gantry-node-status", "gantry-plugin-events"];

/// Label of a Node that chooses its MIG layout, as for NVIDIA's MIG manager. The operator sets it.
pub const MIG_LAYOUT_LABEL: &str = "nvidia.com/mig.config";

/// Label of a Node with the state of its MIG layout: `pending`, `success` or `failed`. The plugin writes it.
pub const MIG_LAYOUT_STATE_LABEL: &str = "nvidia.com/mig.config.state";

/// Label of a Node that allows to drain GPUs for the MIG layout: `true` or `false`. The operator sets it.
pub const MIG_DRAIN_LABEL: &str = "gantry.dev/mig-drain";

/// Component name in Events and in `kubectl describe`.
pub const EXTENDER: &str = "gantry-extender";

/// Annotation on a `GpuNode` by which the operator ends the quarantine of GPUs whose reset cannot be proved: a GPU's
/// UUID, several with commas, or `all`. The plugin ends the quarantine, records an Event on the Node, and removes the
/// annotation.
pub const LIFT_QUARANTINE_ANNOTATION: &str = "gantry.dev/lift-quarantine";

/// Beginning of an annotation on a `GpuNode` that cordons one of its GPUs; its UUID follows. The value is the reason
/// ([`Cordon`](crate::Cordon)). Devices of the GPU are not allocated while the annotation is there.
pub const CORDON_ANNOTATION_PREFIX: &str = "gantry.dev/cordon-";

/// Annotation on a `GpuNode`: the time until which its plugin keeps NVML closed, so that GPUs of the node can be reset. Such as
/// `2026-11-26T20:00:00Z`; at most 15 minutes from now. `gantry reset gpu` writes and removes it.
pub const NVML_CLOSED_ANNOTATION: &str = "gantry.dev/nvml-closed-until";

/// Annotation on a `GpuNode`: what rules of remediation have counted and done to its GPUs, as JSON. The extender writes
/// it; without it every fault that is there is acted on again.
pub const REMEDIATION_ANNOTATION: &str = "gantry.dev/remediation";

/// Name of the `PodTemplate`, and beginning of the names of the Jobs, by which rules of remediation reset GPUs. The Jobs
/// run with the service account of this name.
pub const RESET: &str = "gantry-reset";

/// Annotation on the pods of a Job that resets a GPU: the GPU, as `NODE/UUID`.
pub const RESET_GPU_ANNOTATION: &str = "gantry.dev/reset-gpu";

/// Annotation on the pods of a Job that resets a GPU: the name of the rule of remediation.
pub const RESET_RULE_ANNOTATION: &str = "gantry.dev/reset-rule";

/// Exit code of `gantry reset gpu`: a GPU is not drained, and nothing was done.
pub const RESET_NOT_DRAINED_EXIT: u8 = 3;

/// Exit code of `gantry reset gpu`: the driver's nvidia-smi did not reset the GPU.
pub const RESET_REFUSED_EXIT: u8 = 4;

/// Exit code of `gantry reset gpu`: the GPU was reset, and is not healthy.
pub const RESET_UNHEALTHY_EXIT: u8 = 5;

/// Key of the taint that a rule of remediation sets on a Node; the value is the name of the rule.
pub const REMEDIATION_TAINT: &str = "gantry.dev/gpu-fault";

/// Type of the condition of a Node that a rule of remediation sets.
pub const REMEDIATION_CONDITION: &str = ConditionType::GpuFault.as_str();

/// Type of the condition of a Node by which a rule of remediation requests a reboot.
pub const REBOOT_REQUESTED_CONDITION: &str = ConditionType::RebootRequested.as_str();

/// Type of the condition that the plugin writes into the status of its `GpuNode` while GPUs of it are cordoned.
pub const GPUS_CORDONED_CONDITION: &str = ConditionType::GpusCordoned.as_str();

/// Type of the condition that the plugin writes into the status of its `GpuNode` while it keeps NVML closed, and until it has
/// read the GPUs again.
pub const NVML_CLOSED_CONDITION: &str = ConditionType::NvmlClosed.as_str();

/// Type of the condition that the plugin writes into the status of its Node: whether every GPU is healthy.
pub const GPU_HEALTHY_CONDITION: &str = ConditionType::GpuHealthy.as_str();

/// Component name of the node daemon in Events.
pub const PLUGIN: &str = "gantry-plugin";

/// Field manager of labels on the Node. Labels that no longer apply are removed by it.
pub const LABELLER: &str = "gantry-labels";

/// Gantry's node labels, beside those of NVIDIA's gpu-feature-discovery. Names without the domain, which is [`GROUP`].
pub mod labels {
    /// Islands of two or more GPUs joined by NVLink.
    pub const NVLINK_ISLANDS: &str = "nvlink.islands";
    /// GPUs of the largest island; 1 without NVLink.
    pub const NVLINK_SIZE: &str = "nvlink.size";
    /// NVLink version of the largest island.
    pub const NVLINK_GENERATION: &str = "nvlink.generation";
    /// NVLink bandwidth of each GPU of the largest island, in GB/s and one direction, by the data sheet.
    pub const NVLINK_BANDWIDTH: &str = "nvlink.bandwidth";
    /// UUID of the multi-node NVLink domain of most GPUs.
    pub const FABRIC_DOMAIN: &str = "fabric.domain";
    /// Clique in that domain of most GPUs.
    pub const FABRIC_CLIQUE: &str = "fabric.clique";
    /// NUMA nodes that have GPUs.
    pub const NUMA_NODES: &str = "gpu.numa-nodes";
    /// GPUs with healthy devices only.
    pub const HEALTHY: &str = "gpu.healthy";
    /// Prefix of a product's name: number of its GPUs.
    pub const COUNT_OF: &str = "gpu-count.";
    /// Prefix of a product's name: memory of one of its GPUs, in MiB.
    pub const MEMORY_OF: &str = "gpu-memory.";
}

/// Whether `text` is an RFC 1123 label, the form of names of namespaces and Services.
pub fn is_label(text: &str) -> bool {
    text.len() <= 63 && is_part(text)
}

/// Whether `text` is an RFC 1123 subdomain, the form of names of most objects.
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_part)
}

fn is_part(text: &str) -> bool {
    let simple = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    let edge = |byte: Option<&u8>| byte.is_some_and(|byte| simple(*byte));
    edge(bytes.first()) && edge(bytes.last()) && bytes.iter().all(|byte| simple(*byte) || *byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_api_servers_rules() {
        for name in ["a", "gantry-system", "0-1"] {
            assert!(is_label(name) && is_subdomain(name), "{name}");
        }
        assert!(is_subdomain("gantry.example") && !is_label("gantry.example"));
        for name in ["", "A", "a_b", "-a", "a-", "a..b", ".a", "\u{e9}"] {
            assert!(!is_label(name) && !is_subdomain(name), "{name}");
        }
        assert!(!is_label(&"a".repeat(64)) && is_subdomain(&"a".repeat(253)));
        assert!(!is_subdomain(&"a".repeat(254)));
    }
}
