//! Where Gantry's plugin means to differ from NVIDIA's k8s-device-plugin 0.20.0, and why. A difference that is not here fails
//! the tests, and so does a row that no longer makes one.

use gantry_e2e::peer::Deliberate;

/// The rows; the first that fits counts.
pub(crate) const ROWS: &[Deliberate] = &[
    Deliberate {
        item: "* socket",
        ours: Some("gantry-nvidia.com-*.sock"),
        reason: "kubelet reads nothing off it, and while one plugin replaces the other neither removes the other's socket",
    },
    Deliberate {
        item: "* allocate unknown: refused",
        ours: Some("*GPU-unknown*"),
        reason: "says which IDs are unknown under a code that means so, where NVIDIA's answers Unknown",
    },
    Deliberate {
        item: "* annotation key",
        ours: Some("cdi.k8s.io/gantry"),
        reason: "the key names the plugin that wrote it",
    },
    Deliberate {
        item: "CDI kind",
        ours: Some("gantry.dev/gpu"),
        reason: "two specifications of one kind contradict each other and the runtime then uses neither: \
                 NVIDIA's leaves its own behind; --cdi-kind sets another",
    },
    Deliberate {
        item: "CDI file",
        ours: Some("gantry.dev-gpu.json"),
        reason: "named after the kind, like NVIDIA's",
    },
];
