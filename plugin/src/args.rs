//! What a person may set, as clap reads it. Defaults are what a DaemonSet on a stock node needs; every path can be moved, so
//! that tests and unusual distributions need no mount tricks.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueEnum};
use gantry_api::names;

use crate::health::{HealthChecks, XidList};

/// Options of `gantry plugin`.
#[derive(Debug, Clone, ClapArgs)]
pub struct Args {
    /// Name of this node in the cluster
    #[arg(long, env = "NODE_NAME", required_unless_present = "no_cluster")]
    pub node_name: Option<String>,

    /// Kubeconfig file; without it the pod's service account is used
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Serve by topology alone: no API server is asked for grants, and none is told who holds what
    #[arg(long, conflicts_with = "kubeconfig")]
    pub no_cluster: bool,

    /// Kubelet's device plugin directory, where its kubelet.sock is and this plugin's socket will be
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/device-plugins")]
    pub device_plugin_dir: PathBuf,

    /// Kubelet's pod resources socket: who holds which devices
    #[arg(
        long,
        value_name = "SOCKET",
        default_value = "/var/lib/kubelet/pod-resources/kubelet.sock"
    )]
    pub pod_resources_socket: PathBuf,

    /// Path or name of NVIDIA's management library
    #[arg(long, value_name = "FILE", default_value = "libnvidia-ml.so.1")]
    pub nvml_library: PathBuf,

    /// Where this process reads /proc
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    pub proc_root: PathBuf,

    /// Where this process reads /sys
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    pub sys_root: PathBuf,

    /// Where this process reads /dev
    #[arg(long, value_name = "DIR", default_value = "/dev")]
    pub dev_root: PathBuf,

    /// Host directory whose dev/ holds the device nodes that containers get
    #[arg(long, env = "NVIDIA_DRIVER_ROOT", value_name = "DIR", default_value = "/")]
    pub driver_root: PathBuf,

    /// Where this process reads the control groups, to see when a force-deleted pod's processes are gone
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/cgroup")]
    pub cgroup_root: PathBuf,

    /// How containers get their GPUs; several may be given, separated by commas
    #[arg(
        long,
        env = "DEVICE_LIST_STRATEGY",
        value_name = "STRATEGY",
        value_delimiter = ',',
        default_value = "envvar"
    )]
    pub device_list_strategy: Vec<Strategy>,

    /// Directory that CDI specifications are written to
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi")]
    pub cdi_root: PathBuf,

    /// Vendor and class of the CDI devices. Not nvidia.com/gpu where NVIDIA's toolkit writes a specification of that kind: the
    /// two would contradict each other, and the runtime would then use neither
    #[arg(
        long,
        value_name = "VENDOR/CLASS",
        default_value = "k8s.device-plugin.nvidia.com/gpu"
    )]
    pub cdi_kind: String,

    /// Address of /metrics, /healthz and /readyz
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:9410")]
    pub listen: SocketAddr,

    /// The extended resource that whole GPUs are advertised as
    #[arg(long, value_name = "NAME", default_value = names::GPU_RESOURCE)]
    pub resource_name: String,

    /// Xids that make no GPU unhealthy: numbers with commas, or "all" to watch none
    #[arg(
        long,
        env = "DP_DISABLE_HEALTHCHECKS",
        value_name = "XIDS",
        default_value = ""
    )]
    pub disable_health_checks: XidList,

    /// Xids that make a GPU unhealthy whatever else is said of them: numbers with commas, or "all". With all disabled, just these are
    /// watched
    #[arg(long, env = "DP_ENABLE_HEALTHCHECKS", value_name = "XIDS", default_value = "")]
    pub enable_health_checks: XidList,
}

impl Args {
    /// Which Xids count.
    pub fn health_checks(&self) -> HealthChecks {
        HealthChecks {
            disabled: self.disable_health_checks.clone(),
            enabled: self.enable_health_checks.clone(),
        }
    }
}

/// One way of giving a container its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Strategy {
    /// NVIDIA_VISIBLE_DEVICES, for the NVIDIA container runtime
    Envvar,
    /// Device nodes, passed by kubelet itself
    #[value(alias = "pass-device-specs")]
    DeviceNodes,
    /// CDI names in a container annotation, for runtimes before CDI was in the CRI
    CdiAnnotations,
    /// CDI names in the CRI, for containerd 1.7 and later
    CdiCri,
}

impl Strategy {
    /// Whether it needs a CDI specification on disk.
    pub const fn is_cdi(self) -> bool {
        matches!(self, Self::CdiAnnotations | Self::CdiCri)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    fn parse(words: &[&str]) -> Result<Args, clap::Error> {
        Command::try_parse_from([&["plugin"], words].concat()).map(|command| command.args)
    }

    #[test]
    fn health_checks_are_on_but_for_those_named() {
        let watched = |words: &[&str], xid| {
            let args = parse(&[&["--node-name=a"], words].concat()).unwrap();
            args.health_checks().watches(xid)
        };
        assert!(watched(&[], 79));
        let but = ["--disable-health-checks=48,79"];
        assert!(!watched(&but, 79) && watched(&but, 74));
        let just = ["--disable-health-checks=all", "--enable-health-checks=79"];
        assert!(watched(&just, 79) && !watched(&just, 74));
        let error = parse(&["--node-name=a", "--disable-health-checks=ecc"]).unwrap_err();
        assert!(
            error.to_string().contains("\"ecc\" is no health check"),
            "{error}"
        );
    }

    #[test]
    fn strategies_combine_and_nvidias_word_for_device_nodes_is_understood() {
        let args = parse(&["--node-name=a", "--device-list-strategy=envvar,pass-device-specs"]).unwrap();
        assert_eq!(
            args.device_list_strategy,
            [Strategy::Envvar, Strategy::DeviceNodes]
        );
    }

    #[test]
    fn an_unknown_strategy_is_refused_with_the_ones_there_are() {
        let error = parse(&["--node-name=a", "--device-list-strategy=cdi-cir"]).unwrap_err();
        assert!(error.to_string().contains("cdi-cri"), "{error}");
    }

    #[test]
    fn no_cluster_needs_no_node_name() {
        assert!(parse(&["--no-cluster"]).is_ok());
    }
}
