//! Every annotation, label and resource name that people or the daemons write. One place, so that the documentation and the
//! code cannot part.

/// API group of the custom resources, and the prefix of all annotations and labels.
pub const GROUP: &str = "gantry.dev";

/// Written by the extender, in the Binding: the exact devices of each container of the pod. Never set it by hand.
pub const GRANT_ANNOTATION: &str = "gantry.dev/grant";

/// Type of the condition that the extender writes into the status of a pod that waits, when GPUs came free for it: the write makes
/// kube-scheduler try the pod again, and its time says when that was last.
pub const GPUS_FREED_CONDITION: &str = "gantry.dev/GpusFreed";

/// On a pod (or the template of a controller): the name of the gang it belongs to. Pods of one namespace with the same name are one gang.
/// `none` keeps a pod out of the gang that another convention would make of it.
pub const GANG_ANNOTATION: &str = "gantry.dev/gang";

/// On a pod: how many members are useful only together: a number, or `all` where the owner says how many there are. Without
/// [`GANG_ANNOTATION`], on a pod of a Job, the Job is the gang.
pub const GANG_MIN_ANNOTATION: &str = "gantry.dev/gang-min";

/// On a pod: members at most; those beyond wait.
pub const GANG_MAX_ANNOTATION: &str = "gantry.dev/gang-max";

/// On a pod: the level of the fabric that must hold the gang, by name or node label. Rather wait than go beyond it.
pub const GANG_REQUIRED_LEVEL_ANNOTATION: &str = "gantry.dev/gang-required-level";

/// On a pod: the level of the fabric that should hold the gang.
pub const GANG_PREFERRED_LEVEL_ANNOTATION: &str = "gantry.dev/gang-preferred-level";

/// On a pod: members come in slices of this size, each in one domain of the level.
pub const GANG_SLICE_ANNOTATION: &str = "gantry.dev/gang-slice-size";

/// On a pod: what to do when a member of the bound gang is lost: `hold`, `restart` or `ignore`.
pub const GANG_REPAIR_ANNOTATION: &str = "gantry.dev/gang-repair";

/// On a pod: seconds its gang's members may take to arrive once the gang has a place.
pub const GANG_ARRIVAL_ANNOTATION: &str = "gantry.dev/gang-arrival-seconds";

/// On a pod: its rank, where the controller does not number its pods.
pub const GANG_RANK_ANNOTATION: &str = "gantry.dev/gang-rank";

/// On a pod: `true` if it can be stopped at little loss; such gangs are preempted first.
pub const CHECKPOINTED_ANNOTATION: &str = "gantry.dev/checkpointed";

/// A scheduling gate that keeps members of a gang out of kube-scheduler's queue until enough of them exist; the extender removes it.
pub const GANG_GATE: &str = "gantry.dev/gang";

/// What kube-scheduler is called in `spec.schedulerName` where nobody says another name.
pub const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// The extended resource that whole GPUs are advertised as.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";

/// Domain of the resources that the extender manages.
pub const RESOURCE_DOMAIN: &str = "nvidia.com";

/// Component name in Events and in `kubectl describe`.
pub const EXTENDER: &str = "gantry-extender";

/// Annotation that a person sets on a `GpuNode` to end the quarantine of GPUs whose reset cannot be proved: a GPU's UUID, several
/// with commas, or `all`. The plugin ends it, says so in an Event on the Node, and removes the annotation.
pub const LIFT_QUARANTINE_ANNOTATION: &str = "gantry.dev/lift-quarantine";

/// Type of the condition that the plugin writes into the status of its Node: whether every GPU is healthy.
pub const GPU_HEALTHY_CONDITION: &str = "GPUHealthy";

/// Component name of the node daemon in Events.
pub const PLUGIN: &str = "gantry-plugin";

/// Component name under which labels are put on the Node itself, so that those no longer true are taken away.
pub const LABELLER: &str = "gantry-labels";

/// The labels of ours on a node, beside those of NVIDIA's gpu-feature-discovery. Names without the domain, which is [`GROUP`].
pub mod labels {
    /// Islands of two or more GPUs joined by NVLink.
    pub const NVLINK_ISLANDS: &str = "nvlink.islands";
    /// GPUs of the largest island; 1 where no NVLink joins any.
    pub const NVLINK_SIZE: &str = "nvlink.size";
    /// NVLink version of the largest island.
    pub const NVLINK_GENERATION: &str = "nvlink.generation";
    /// GB/s in one direction that every GPU of the largest island has in NVLinks, by the data sheet.
    pub const NVLINK_BANDWIDTH: &str = "nvlink.bandwidth";
    /// UUID of the multi-node NVLink domain of most GPUs.
    pub const FABRIC_DOMAIN: &str = "fabric.domain";
    /// Clique in that domain of most GPUs.
    pub const FABRIC_CLIQUE: &str = "fabric.clique";
    /// NUMA nodes that have GPUs.
    pub const NUMA_NODES: &str = "gpu.numa-nodes";
    /// GPUs of which every device served is healthy.
    pub const HEALTHY: &str = "gpu.healthy";
    /// Before a product's name: how many GPUs of it there are.
    pub const COUNT_OF: &str = "gpu-count.";
    /// Before a product's name: memory of one of its GPUs, in MiB.
    pub const MEMORY_OF: &str = "gpu-memory.";
}

/// Whether this may name a namespace or a Service: an RFC 1123 label.
pub fn is_label(text: &str) -> bool {
    text.len() <= 63 && is_part(text)
}

/// Whether this may name an object: an RFC 1123 subdomain, labels of any length with dots between them.
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
    fn names_are_those_that_the_api_server_takes() {
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
