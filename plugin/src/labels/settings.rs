//! The settings of the labels. Defaults are those of NVIDIA's gpu-feature-discovery, except that nothing is written by default: beside
//! that program two would write the same labels.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use gantry_api::NodeName;

use gantry_config::Gfd;

/// Where labels go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// Nowhere: no labels are made
    #[default]
    Off,
    /// Where NVIDIA's gpu-feature-discovery, so configured, writes them: node-feature, or file where useNodeFeatureAPI is false
    Gfd,
    /// A NodeFeature object, which node-feature-discovery makes labels of
    NodeFeature,
    /// A file in node-feature-discovery's features.d, or standard output
    File,
    /// The Node itself, without node-feature-discovery
    Node,
}

impl Target {
    /// The place with this configuration; `None` for [`Target::Off`].
    pub const fn place(self, gfd: &Gfd) -> Option<Place> {
        match self {
            Self::Off => None,
            Self::Gfd if gfd.use_node_feature_api => Some(Place::NodeFeature),
            Self::Gfd | Self::File => Some(Place::File),
            Self::NodeFeature => Some(Place::NodeFeature),
            Self::Node => Some(Place::Node),
        }
    }
}

/// A place that labels are written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A NodeFeature object.
    NodeFeature,
    /// A file, or standard output.
    File,
    /// The Node itself.
    Node,
}

impl Place {
    /// Whether an API server is needed.
    pub const fn needs_cluster(self) -> bool {
        matches!(self, Self::NodeFeature | Self::Node)
    }
}

/// The options of the daemon about labels that gpu-feature-discovery does not have.
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

/// How labels are computed and where they go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Where they go.
    pub place: Place,
    /// The file of [`Place::File`]; `None`: standard output.
    pub output_file: Option<PathBuf>,
    /// Whether a label has the time at which this configuration took effect.
    pub timestamp: bool,
    /// Interval at which unchanged labels are written again; `None`: never.
    pub interval: Option<Duration>,
    /// File that names the machine's type; an empty path: none.
    pub machine_type_file: PathBuf,
}

impl Settings {
    /// From the option `--labels` and `flags.gfd` of the configuration, which may change while the daemon runs. `None` if no
    /// labels are written.
    pub fn of(target: Target, gfd: &Gfd) -> Option<Self> {
        Some(Self {
            place: target.place(gfd)?,
            output_file: gfd.output_file.clone(),
            timestamp: !gfd.no_timestamp,
            interval: gfd.sleep_interval,
            machine_type_file: gfd.machine_type_file.clone(),
        })
    }
}

/// The node of the labels, and the pod that writes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The node.
    pub node: NodeName,
    /// Namespace of the pod this runs in, and of the NodeFeature object (`NAMESPACE`); `None`: that of the service account or
    /// kubeconfig.
    pub namespace: Option<String>,
    /// The pod this runs in (`POD_NAME`); `None` if unknown: the object then has no owner.
    pub pod: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_place_follows_gfd_unless_named() {
        let place = |target: Target, use_node_feature_api| {
            target.place(&Gfd { use_node_feature_api, ..Gfd::default() })
        };
        assert_eq!(place(Target::Gfd, true), Some(Place::NodeFeature));
        assert_eq!(place(Target::Gfd, false), Some(Place::File));
        for use_node_feature_api in [true, false] {
            assert_eq!(place(Target::Off, use_node_feature_api), None);
            assert_eq!(place(Target::NodeFeature, use_node_feature_api), Some(Place::NodeFeature));
            assert_eq!(place(Target::File, use_node_feature_api), Some(Place::File));
            assert_eq!(place(Target::Node, use_node_feature_api), Some(Place::Node));
        }
    }
}
