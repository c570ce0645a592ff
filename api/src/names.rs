//! Every annotation, label and resource name that people or the daemons write. One place, so that the documentation and the
//! code cannot part.

/// API group of the custom resources, and the prefix of all annotations and labels.
pub const GROUP: &str = "gantry.dev";

/// Written by the extender, in the Binding: the exact devices of each container of the pod. Never set it by hand.
pub const GRANT_ANNOTATION: &str = "gantry.dev/grant";

/// Type of the condition that the extender writes into the status of a pod that waits, when GPUs came free for it: the write makes
/// kube-scheduler try the pod again, and its time says when that was last.
pub const GPUS_FREED_CONDITION: &str = "gantry.dev/GpusFreed";

/// The extended resource that whole GPUs are advertised as.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";

/// Domain of the resources that the extender manages.
pub const RESOURCE_DOMAIN: &str = "nvidia.com";

/// Component name in Events and in `kubectl describe`.
pub const EXTENDER: &str = "gantry-extender";

/// Component name of the node daemon in Events.
pub const PLUGIN: &str = "gantry-plugin";
