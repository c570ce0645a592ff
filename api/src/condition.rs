//! The types of the conditions that Gantry writes: on its own objects, on Nodes and on pods.

use crate::described::described;

macro_rules! conditions {
    ($($(#[$doc:meta])* $name:ident: $kind:literal, $type_:literal => $text:literal,)*) => {
        described! {
            /// Type of a condition, with the object that has it and what it means while it is `True`.
            ConditionType { $($(#[$doc])* $name, $type_, $text;)* }
        }

        impl ConditionType {
            /// Kind of the objects that have it, such as `Gang`.
            pub const fn kind(self) -> &'static str {
                match self {
                    $(Self::$name => $kind,)*
                }
            }
        }
    };
}

conditions! {
    Valid: "Gang", "Valid" => "what the gang asks for is known and can be followed",
    Reserved: "Gang", "Reserved" => "devices are reserved for the members, or the minimum is bound",
    Bound: "Gang", "Bound" => "the minimum is bound",
    Spares: "Gang", "Spares" => "every spare reservation that the gang asks for is there",
    AmbiguousMembership: "Gang", "AmbiguousMembership" => "several integrations name the gang's pods, and the first one counts",
    Blocked: "Gang", "Blocked" => "a disruption budget or a missing permission holds back an action on a pod",
    PodGroupScheduled: "Gang", "PodGroupScheduled" => "never written; `False` while kube-scheduler does not schedule the PodGroup as a whole",
    CompositePodGroup: "Gang", "CompositePodGroup" => "the gang is a tree of PodGroups that are placed together",
    Rollout: "Gang", "Rollout" => "members of the next revision of a template wait for devices together",
    ReservationKept: "Gang", "ReservationKept" => "no member is left, and the reservations are kept while the owner creates all members again",
    MembersSlow: "Gang", "MembersSlow" => "GPUs of members run slower than those of the rest of the gang",
    Ready: "GpuNode", "Ready" => "the plugin is registered with kubelet, serves its devices and knows the pods of the node",
    /// Absent without a cordoned GPU.
    GpusCordoned: "GpuNode", "GPUsCordoned" => "GPUs of the node are cordoned",
    /// Stays until the plugin has read the GPUs again.
    NvmlClosed: "GpuNode", "NVMLClosed" => "the plugin keeps NVML closed, so that a GPU can be reset",
    GpuHealthy: "Node", "GPUHealthy" => "no GPU of the node is unhealthy",
    GpuFault: "Node", "GPUFault" => "a rule of remediation with the action `condition` matches a GPU",
    RebootRequested: "Node", "GPURebootRequested" => "a rule of remediation requests a reboot of the node",
    /// The write makes kube-scheduler try the pod again. Its time is that of the last activation.
    GpusFreed: "Pod", "gantry.dev/GpusFreed" => "the extender has had kube-scheduler try the pod again",
    /// Of Kubernetes; the API server sets it itself for a pod that is evicted.
    DisruptionTarget: "Pod", "DisruptionTarget" => "the pod is about to be deleted for the restart of its gang",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_condition_type_is_unique_with_one_sentence() {
        for (at, condition) in ConditionType::ALL.iter().enumerate() {
            let name = condition.as_str();
            assert!(ConditionType::ALL[..at].iter().all(|other| other.as_str() != name), "{name}");
            assert!(["Gang", "GpuNode", "Node", "Pod"].contains(&condition.kind()), "{name}");
            assert!(!condition.text().is_empty() && !condition.text().ends_with('.'), "{name}");
        }
    }
}
