//! What a person may set of the labels. Defaults are those of NVIDIA's gpu-feature-discovery, but that nothing is written unless
//! asked for: beside that program two would write the same labels.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use gantry_api::NodeName;

use crate::config::Gfd;

/// Where labels go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// Nowhere: no labels are made
    #[default]
    Off,
    /// A NodeFeature object, which node-feature-discovery makes labels of
    NodeFeature,
    /// A file in node-feature-discovery's features.d, or standard output
    File,
    /// The Node itself, without node-feature-discovery
    Node,
}

impl Target {
    /// Whether an API server is needed.
    pub const fn needs_cluster(self) -> bool {
        matches!(self, Self::NodeFeature | Self::Node)
    }

    /// Where NVIDIA's program, so configured, would write.
    pub const fn of(gfd: &Gfd) -> Self {
        match gfd.use_node_feature_api {
            true => Self::NodeFeature,
            false => Self::File,
        }
    }
}

/// The options of the daemon that are about labels and not among those of gpu-feature-discovery's configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct LabelsArgs {
    /// Where the labels of the node go
    #[arg(long, value_enum, value_name = "WHERE", default_value_t)]
    pub labels: Target,

    /// Namespace of the pod this runs in, and of the NodeFeature object [default: that of the service account or kubeconfig]
    #[arg(long, env = "NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,

    /// Name of the pod this runs in: its DaemonSet owns the NodeFeature object
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pub pod_name: Option<String>,
}

/// How labels are made and where they go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Where they go.
    pub target: Target,
    /// The file of [`Target::File`]; `None`: standard output.
    pub output_file: Option<PathBuf>,
    /// Whether there is a label that tells when this configuration came into force.
    pub timestamp: bool,
    /// How often they are written again though nothing has changed; `None`: never.
    pub interval: Option<Duration>,
    /// File that names the machine's type; an empty path: none.
    pub machine_type_file: PathBuf,
}

impl Settings {
    /// From the option `--labels` and what stands under `flags.gfd` of the configuration. The configuration may change while
    /// the daemon runs.
    pub fn of(target: Target, gfd: &Gfd) -> Self {
        Self {
            target,
            output_file: gfd.output_file.clone(),
            timestamp: !gfd.no_timestamp,
            interval: gfd.sleep_interval,
            machine_type_file: gfd.machine_type_file.clone(),
        }
    }
}

/// Whose labels they are, and who writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The node.
    pub node: NodeName,
    /// Namespace of the pod this runs in, and of the NodeFeature object (`NAMESPACE`); `None`: that of the service account or
    /// kubeconfig.
    pub namespace: Option<String>,
    /// The pod this runs in (`POD_NAME`); `None` where unknown: the object then has no owner.
    pub pod: Option<String>,
}
