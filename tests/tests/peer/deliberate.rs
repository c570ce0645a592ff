//! Where Gantry's plugin means to differ from NVIDIA's k8s-device-plugin 0.20.0, and why. A difference that is not here
//! fails the tests, and so does a row that no longer makes one.

use gantry_e2e::peer::Deliberate;

/// The rows; the first that fits counts.
pub(crate) const ROWS: &[Deliberate] = &[
    Deliberate {
        case: "*",
        item: "* allocate unknown: refused",
        ours: Some("invalid allocation request for *: invalid request: unknown device: GPU-unknown; *"),
        reason: "NVIDIA's words, and after them what may have happened",
    },
    Deliberate {
        case: "*",
        item: "CDI device all",
        ours: Some("/dev/nvidia0,*"),
        reason: "for people who run a container by hand; kubelet is never told of it",
    },
    Deliberate {
        case: "*one_only: true*",
        item: "* refused",
        ours: Some("*maximum request size for shared resources is 1; found *: request 1 of *"),
        reason: "NVIDIA's words, and after them what to do",
    },
    Deliberate {
        case: "*",
        item: "* device nodes repeated",
        ours: None,
        reason: "each node once, however many of the devices are on that GPU",
    },
    Deliberate {
        case: "*, [(*mig: None*",
        item: "nvidia.com/gpu device GPU-*",
        ours: None,
        reason: "a GPU that is cut serves no work as a whole one, so it is not offered as one",
    },
    Deliberate {
        case: "*, [(*mig: None*",
        item: "nvidia.com/gpu allocate all: env NVIDIA_VISIBLE_DEVICES",
        ours: Some("GPU-*"),
        reason: "all that are offered are fewer then",
    },
];
