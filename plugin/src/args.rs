//! The options of the plugin, as clap reads them. The defaults suit a DaemonSet on a stock node. Every path can be set, for
//! tests and unusual distributions.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args as ClapArgs;
use clap::builder::NonEmptyStringValueParser;
use gantry_api::ResourceName;
use gantry_proto::KUBELET_SOCKET;
use kube::Client;

use crate::cdi::Kind;
use crate::health::{FabricCheck, HealthChecks, XidList};
use crate::labels::LabelsArgs;
use gantry_config::ConfigArgs;
use gantry_config::reference::Flag;
use gantry_config::settings::SETTINGS;
use gantry_config::source::{ConfigLocation, PerNode, Source, SourceError};
use gantry_config::value::Resource;
use gantry_config::{ApiRate, LoadedConfig, Overrides, Problems};

/// Options of `gantry plugin`.
#[derive(Debug, Clone, ClapArgs)]
#[command(
    args_override_self = true,
    after_help = "\
Exit codes of --check-config: 0: the configuration is valid; 1: the file is invalid (NVIDIA's
plugin exits on such a file); 2: a flag or a variable is invalid."
)]
pub struct Args {
    /// Name of this node in the cluster
    #[arg(
        long,
        env = "NODE_NAME",
        value_parser = NonEmptyStringValueParser::new(),
        required_unless_present_any = ["no_cluster", "check_config"]
    )]
    pub node_name: Option<String>,

    /// Kubeconfig file; without it the pod's service account is used
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Kubeconfig file for this node's pods, such as kubelet's, which can read no others; without it the other one is used
    #[arg(long, env = "GANTRY_POD_KUBECONFIG", value_name = "FILE")]
    pub pod_kubeconfig: Option<PathBuf>,

    /// Serve by topology only: no grants are read, no holders are published, and a quarantine (docs/health.md) ends with this process
    #[arg(long)]
    pub no_cluster: bool,

    /// Request rates that NVIDIA's programs accept.
    #[command(flatten)]
    pub api_rate: ApiRate,

    /// Kubelet's device plugin directory, with kubelet.sock and this plugin's sockets
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/device-plugins")]
    pub device_plugin_dir: PathBuf,

    /// Kubelet's pod resources socket, which lists the holders of devices
    #[arg(long, value_name = "SOCKET", default_value = "/var/lib/kubelet/pod-resources/kubelet.sock")]
    pub pod_resources_socket: PathBuf,

    /// Kubelet's configuration file as seen by this process. Its Topology Manager is published, and the CPUs and the memory that it aligns, so that no
    /// pod gets devices that kubelet would refuse. Without it the Topology Manager is unknown
    #[arg(long, env = "GANTRY_KUBELET_CONFIG", value_name = "FILE")]
    pub kubelet_config: Option<PathBuf>,

    /// Path or name of NVIDIA's management library; a name is searched below the container driver root first
    #[arg(long, value_name = "FILE", default_value = "libnvidia-ml.so.1")]
    pub nvml_library: PathBuf,

    /// Path of /proc in this process
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    pub proc_root: PathBuf,

    /// Path of /sys in this process
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    pub sys_root: PathBuf,

    /// Path of /dev in this process
    #[arg(long = "container-dev-root", value_name = "DIR", default_value = "/dev")]
    pub dev_root: PathBuf,

    /// Path of the control groups in this process, which show whether a force-deleted pod still has processes
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/cgroup")]
    pub cgroup_root: PathBuf,

    /// Directory for CDI specifications
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi")]
    pub cdi_root: PathBuf,

    /// Directory for NCCL topology files (--nccl-topology): the same path on the host and in this process
    #[arg(long, value_name = "DIR", default_value = "/var/lib/gantry/nccl")]
    pub nccl_root: PathBuf,

    /// Vendor and class of the CDI devices. Do not use nvidia.com/gpu if NVIDIA's toolkit writes a specification of that kind: the
    /// two would conflict, and the runtime would use neither
    #[arg(long, value_name = "VENDOR/CLASS", default_value = "k8s.device-plugin.nvidia.com/gpu")]
    pub cdi_kind: Kind,

    /// Kubelet's registration socket; empty to serve without registering [default: kubelet.sock in the device plugin directory]
    #[arg(long, env = "KUBELET_SOCKET", value_name = "SOCKET")]
    pub kubelet_socket: Option<String>,

    /// Listen address of /metrics, /healthz, /readyz and /settledz; without an address it is all of IPv4 and IPv6
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        default_value = ":9410",
        value_parser = gantry_runtime::listen::address
    )]
    pub listen: SocketAddr,

    /// Serve what the GPUs are doing at /metrics/dcgm, under the names of NVIDIA's dcgm-exporter (docs/metrics.md)
    #[arg(long, env = "GANTRY_DCGM_METRICS")]
    pub dcgm_metrics: bool,

    /// Seconds between two readings of the GPUs for /metrics/dcgm
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = clap::value_parser!(u32).range(1..=600))]
    pub dcgm_interval: u32,

    /// File with MIG layouts, as for NVIDIA's mig-parted. The node label nvidia.com/mig.config names the one that the GPUs of this
    /// node get (docs/how-to/mig-layouts.md). Without it, no layout is changed
    #[arg(long, env = "GANTRY_MIG_LAYOUTS", value_name = "FILE")]
    pub mig_layouts: Option<PathBuf>,

    /// Extended resource of whole GPUs that match no pattern of the config file [default: nvidia.com/gpu]
    #[arg(long, value_name = "NAME", value_parser = resource)]
    pub resource_name: Option<ResourceName>,

    /// Xids that do not make a GPU unhealthy: numbers separated by commas, or "all" to disable the checks
    #[arg(long, env = "DP_DISABLE_HEALTHCHECKS", value_name = "XIDS", default_value = "")]
    pub disable_health_checks: XidList,

    /// Xids that make a GPU unhealthy in any case: numbers separated by commas, or "all". If all checks are disabled, only these are
    /// enabled
    #[arg(long, env = "DP_ENABLE_HEALTHCHECKS", value_name = "XIDS", default_value = "")]
    pub enable_health_checks: XidList,

    /// What a GPU counts as that the NVLink fabric does not serve: its fabric manager has not started, has not finished or failed,
    /// and CUDA fails with error 802
    #[arg(long, env = "GANTRY_FABRIC_CHECK", value_enum, default_value = "unhealthy")]
    pub fabric_check: FabricCheck,

    /// Mode of the fabric manager. In mode 1 a registration in progress is normal [default: FABRIC_MODE in fabricmanager.cfg below the
    /// driver root]
    #[arg(long, env = "FABRIC_MODE", value_name = "0|1|2", value_parser = clap::value_parser!(u8).range(0..=2))]
    pub fabric_mode: Option<u8>,

    /// Location of the configuration.
    #[command(flatten)]
    pub config: ConfigArgs,

    /// Settings by flag and environment variable.
    #[command(flatten)]
    pub overrides: Overrides,

    /// Destination of the node's labels.
    #[command(flatten)]
    pub labels: LabelsArgs,
}

impl Args {
    /// Kubelet's socket to register with; `None` to serve without registering.
    pub fn kubelet_socket(&self) -> Option<PathBuf> {
        match self.kubelet_socket.as_deref() {
            Some("") => None,
            Some(socket) => Some(socket.into()),
            None => Some(self.device_plugin_dir.join(KUBELET_SOCKET)),
        }
    }

    /// The source of the configuration. `connect` connects to the API server; it is called only if a label of the node
    /// selects the configuration.
    ///
    /// # Errors
    /// No client of the API server can be made, or the node name is missing.
    pub async fn source<E>(&self, connect: impl AsyncFnOnce() -> Result<Client, E>) -> anyhow::Result<Source>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        if let Some(unread) = self.config.unread() {
            tracing::warn!("{unread}");
        }
        let place = match self.config.configs() {
            Some(configs) => {
                let node = self
                    .node_name
                    .as_deref()
                    .context("no node name: a label of the node selects the configuration; set NODE_NAME by the downward API (fieldPath: spec.nodeName), or give --node-name")?;
                ConfigLocation::PerNode(Box::new(PerNode {
                    configs,
                    node: node.into(),
                    label: self.config.config_label.clone(),
                    choice: self.config.choice(),
                    client: connect()
                        .await
                        .context("cannot connect to the API server, which has this node's configuration")?,
                }))
            }
            None => self.config.file().map_or(ConfigLocation::Flags, ConfigLocation::File),
        };
        Ok(self.source_at(place))
    }

    /// The present configuration of flags, environment and config file, without the node's label.
    ///
    /// # Errors
    /// The file cannot be read, or its problems.
    pub fn config_now(&self) -> Result<LoadedConfig, SourceError> {
        let (source, text) = self.config_text()?;
        Ok(self.config_of(&source, &text)?)
    }

    /// Name and text of the config file; an empty text without a file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn config_text(&self) -> Result<(String, String), SourceError> {
        self.source_at(self.config.file().map_or(ConfigLocation::Flags, ConfigLocation::File)).text_now()
    }

    /// The configuration of `text` with flags and environment. Problems name `source`.
    ///
    /// # Errors
    /// The problems of the text.
    pub fn config_of(&self, source: &str, text: &str) -> Result<LoadedConfig, Problems> {
        self.source_at(ConfigLocation::Flags).read(source, text)
    }

    fn source_at(&self, place: ConfigLocation) -> Source {
        Source {
            place,
            layers: self.overrides.layers().to_vec(),
            strictness: self.config.leniency.strictness(),
            gpu_resource: self.resource_name.clone(),
        }
    }

    /// The selection of Xids.
    pub fn health_checks(&self) -> HealthChecks {
        HealthChecks {
            disabled: self.disable_health_checks.clone(),
            enabled: self.enable_health_checks.clone(),
            fabric: self.fabric_check,
            ..HealthChecks::default()
        }
    }
}

/// The reference of every flag, variable and key, as Markdown.
pub fn reference() -> String {
    let command = Args::augment_args(clap::Command::new("plugin"));
    let flags: Vec<Flag> = command
        .get_arguments()
        .filter(|argument| !SETTINGS.iter().any(|setting| setting.key == argument.get_id().as_str()))
        .map(|argument| Flag {
            name: format!("--{}", argument.get_long().unwrap_or_default()),
            env: argument.get_env().map(|name| name.to_string_lossy().into_owned()),
            default: argument.get_default_values().first().map(|value| value.to_string_lossy().into_owned()),
            help: argument.get_help().map_or(String::new(), ToString::to_string),
        })
        .collect();
    gantry_config::reference::reference(&flags)
}

fn resource(text: &str) -> Result<ResourceName, String> {
    Resource::try_from(text.to_owned()).map(|Resource(name)| name)
}

#[cfg(test)]
mod tests;
