//! Settings of the node labels, those of NVIDIA's GPU feature discovery.

use std::path::PathBuf;
use std::time::Duration;

/// How the labels are worked out and where they go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gfd {
    /// Whether labels are to be worked out once only; kept for the effective configuration, for the daemon goes on.
    pub oneshot: bool,
    /// Whether the label with the time is left out.
    pub no_timestamp: bool,
    /// How often labels are worked out again, 1 s or more; `None`: never.
    pub sleep_interval: Option<Duration>,
    /// File that the labels are written to; `None`: standard output.
    pub output_file: Option<PathBuf>,
    /// File that names the machine.
    pub machine_type_file: PathBuf,
    /// Whether the labels go into a `NodeFeature` object instead of the file.
    pub use_node_feature_api: bool,
}

impl Gfd {
    /// Shortest interval that is served: NVIDIA reads a bare `60` as 60 ns, which would keep a core busy.
    pub const SHORTEST: Duration = Duration::from_secs(1);
}

impl Default for Gfd {
    fn default() -> Self {
        Self {
            oneshot: false,
            no_timestamp: false,
            sleep_interval: Some(Duration::from_secs(60)),
            output_file: Some("/etc/kubernetes/node-feature-discovery/features.d/gfd".into()),
            machine_type_file: "/sys/class/dmi/id/product_name".into(),
            use_node_feature_api: true,
        }
    }
}
