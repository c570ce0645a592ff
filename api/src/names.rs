//! Every annotation, label and resource name that people or the daemons write. One place, so that the documentation and the
//! code cannot part.

/// API group of the custom resources, and the prefix of all annotations and labels.
pub const GROUP: &str = "gantry.dev";

/// Written by the extender, in the Binding: the exact devices of each container of the pod. Never set it by hand.
pub const GRANT_ANNOTATION: &str = "gantry.dev/grant";

/// The extended resource that whole GPUs are advertised as.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";

/// Domain of the resources that the extender manages.
pub const RESOURCE_DOMAIN: &str = "nvidia.com";

/// Component name in Events and in `kubectl describe`.
pub const EXTENDER: &str = "gantry-extender";

/// Component name of the node daemon in Events.
pub const PLUGIN: &str = "gantry-plugin";
