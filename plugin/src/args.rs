//! What a person may set, as clap reads it. Defaults are what a DaemonSet on a stock node needs; every path can be moved, so
//! that tests and unusual distributions need no mount tricks.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args as ClapArgs;
use clap::builder::NonEmptyStringValueParser;
use gantry_api::ResourceName;
use gantry_proto::KUBELET_SOCKET;
use kube::Client;

use crate::config::ConfigArgs;
use crate::config::reference::Flag;
use crate::config::settings::SETTINGS;
use crate::config::source::{PerNode, Place, Source, SourceError};
use crate::config::value::Resource;
use crate::config::{self, ApiRate, Loaded, Overrides, Problems};
use crate::health::{HealthChecks, XidList};
use crate::labels::LabelsArgs;

/// Options of `gantry plugin`.
#[derive(Debug, Clone, ClapArgs)]
#[command(after_help = "\
Exit codes of --check-config: 0 if the file would be served; 1 if not, as where NVIDIA's plugin
ends on a wrong file; 2 if a flag or a variable is wrong.")]
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

    /// Serve by topology alone: no API server is asked for grants, none is told who holds what, and a quarantine (docs/health.md) ends
    /// with this process
    #[arg(long, conflicts_with = "kubeconfig")]
    pub no_cluster: bool,

    /// What NVIDIA's programs are told of requests to it.
    #[command(flatten)]
    pub api_rate: ApiRate,

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

    /// Path or name of NVIDIA's management library; a name is looked for below the container driver root first
    #[arg(long, value_name = "FILE", default_value = "libnvidia-ml.so.1")]
    pub nvml_library: PathBuf,

    /// Where this process reads /proc
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    pub proc_root: PathBuf,

    /// Where this process reads /sys
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    pub sys_root: PathBuf,

    /// Where this process reads /dev
    #[arg(long = "container-dev-root", value_name = "DIR", default_value = "/dev")]
    pub dev_root: PathBuf,

    /// Where this process reads the control groups, to see when a force-deleted pod's processes are gone
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/cgroup")]
    pub cgroup_root: PathBuf,

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

    /// Kubelet's registration socket; empty to serve without registering [default: kubelet.sock in the device plugin directory]
    #[arg(long, env = "KUBELET_SOCKET", value_name = "SOCKET")]
    pub kubelet_socket: Option<String>,

    /// Address of /metrics, /healthz, /readyz and /settledz
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:9410")]
    pub listen: SocketAddr,

    /// The extended resource of whole GPUs that no pattern of the config file matches [default: nvidia.com/gpu]
    #[arg(long, value_name = "NAME", value_parser = resource)]
    pub resource_name: Option<ResourceName>,

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

    /// Where the config file is.
    #[command(flatten)]
    pub config: ConfigArgs,

    /// What flags and environment say beside the file.
    #[command(flatten)]
    pub overrides: Overrides,

    /// Where the node's labels go.
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

    /// Everything that makes the configuration. `connect` gives a way to the API server and is called only where a label of the
    /// node decides.
    ///
    /// # Errors
    /// There is no way to the API server, or no node name where one is needed.
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
                    .context("no node name, whose label would name the configuration; give --node-name or set NODE_NAME")?;
                Place::PerNode(Box::new(PerNode {
                    configs,
                    node: node.into(),
                    label: self.config.config_label.clone(),
                    choice: self.config.choice(),
                    client: connect()
                        .await
                        .context("no way to the API server, which tells this node's configuration")?,
                }))
            }
            None => self.config.file().map_or(Place::Flags, Place::File),
        };
        Ok(self.source_at(place))
    }

    /// The configuration as it stands: of flags, environment and the config file, without looking at any label.
    ///
    /// # Errors
    /// The file cannot be read, or everything that is wrong with it.
    pub fn config_now(&self) -> Result<Loaded, SourceError> {
        let (source, text) = self.config_text()?;
        Ok(self.config_of(&source, &text)?)
    }

    /// What stands in the config file as it is, after what to call it in problems; nothing where there is none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn config_text(&self) -> Result<(String, String), SourceError> {
        self.source_at(self.config.file().map_or(Place::Flags, Place::File))
            .text_now()
    }

    /// The configuration that `text`, called `source` in problems, makes with flags and environment.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn config_of(&self, source: &str, text: &str) -> Result<Loaded, Problems> {
        self.source_at(Place::Flags).read(source, text)
    }

    fn source_at(&self, place: Place) -> Source {
        Source {
            place,
            layers: self.overrides.layers().to_vec(),
            strictness: self.config.leniency.strictness(),
            gpu_resource: self.resource_name.clone(),
        }
    }

    /// Which Xids count.
    pub fn health_checks(&self) -> HealthChecks {
        HealthChecks {
            disabled: self.disable_health_checks.clone(),
            enabled: self.enable_health_checks.clone(),
        }
    }
}

/// The reference of every flag, variable and key, as Markdown.
pub fn reference() -> String {
    let command = Args::augment_args(clap::Command::new("plugin"));
    let flags: Vec<Flag> = command
        .get_arguments()
        .filter(|argument| {
            !SETTINGS
                .iter()
                .any(|setting| setting.key == argument.get_id().as_str())
        })
        .map(|argument| Flag {
            name: format!("--{}", argument.get_long().unwrap_or_default()),
            env: argument.get_env().map(|name| name.to_string_lossy().into_owned()),
            default: argument
                .get_default_values()
                .first()
                .map(|value| value.to_string_lossy().into_owned()),
            help: argument.get_help().map_or(String::new(), ToString::to_string),
        })
        .collect();
    config::reference::reference(&flags)
}

fn resource(text: &str) -> Result<ResourceName, String> {
    Resource::try_from(text.to_owned()).map(|Resource(name)| name)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::config::source::{Configs, Fallback};
    use crate::config::{Config, Strictness};

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
    fn sockets_lie_where_kubelet_looks_or_where_they_are_told_to() {
        let places = |words: &[&str]| {
            let args = parse(&[&["--node-name=a"], words].concat()).unwrap();
            (args.device_plugin_dir.clone(), args.kubelet_socket())
        };
        let folder = PathBuf::from("/var/lib/kubelet/device-plugins");
        assert_eq!(places(&[]), (folder.clone(), Some(folder.join("kubelet.sock"))));
        let moved = PathBuf::from("/opt/kubelet/plugins");
        let told = places(&["--device-plugin-dir=/opt/kubelet/plugins"]);
        assert_eq!(told, (moved.clone(), Some(moved.join("kubelet.sock"))));
    }

    #[test]
    fn nvidias_flags_stand_beside_ours() {
        let args = parse(&[
            "--no-cluster",
            "--mig-strategy",
            "mixed",
            "--fail-on-init-error=false",
            "--pass-device-specs",
            "--device-list-strategy=envvar,cdi-cri",
            "--dev-root=/host",
            "--kubelet-socket=",
            "--no-timestamp",
            "-o",
            "/labels",
        ])
        .unwrap();
        let config = args.config_now().unwrap().config;
        assert!(config.pass_device_specs && !config.fail_on_init_error && config.gfd.no_timestamp);
        assert_eq!(config.device_list_strategy.len(), 2);
        assert_eq!(config.dev_root.to_str(), Some("/host"));
        assert_eq!(
            args.dev_root.to_str(),
            Some("/dev"),
            "where this process reads it"
        );
        assert_eq!(args.kubelet_socket(), None);
    }

    #[test]
    fn without_flags_kubelets_socket_is_in_its_directory_and_nothing_asks_the_cluster_for_a_config() {
        let args = parse(&["--no-cluster", "--device-plugin-dir=/plugins"]).unwrap();
        assert_eq!(args.kubelet_socket(), Some("/plugins/kubelet.sock".into()));
        assert_eq!(args.config_now().unwrap().config, Config::default());
        assert_eq!(args.config.configs(), None);
    }

    #[test]
    fn an_unknown_word_is_refused_with_the_nearest() {
        let error = parse(&["--no-cluster", "--device-list-strategy=cdi-cir"]).unwrap_err();
        assert!(error.to_string().contains("did you mean \"cdi-cri\"?"), "{error}");
        let error = parse(&["--no-cluster", "--resource-name=amd.com/gpu"]).unwrap_err();
        assert!(error.to_string().contains("nvidia.com"), "{error}");
    }

    #[test]
    fn the_name_of_whole_gpus_comes_after_the_patterns() {
        let args = parse(&["--no-cluster", "--resource-name=accelerator"]).unwrap();
        let patterns = args.config_now().unwrap().config.gpu_patterns;
        assert_eq!(patterns[0].pattern, "*");
        assert_eq!(patterns[0].name.as_str(), "nvidia.com/accelerator");
    }

    #[test]
    fn leniency_is_switched_as_every_other_boolean() {
        let strictness = |flag: &str| {
            let args = parse(&["--no-cluster", flag]).unwrap();
            args.config.leniency.strictness()
        };
        for flag in ["--lenient-config", "--lenient-config=1", "--lenient-config=True"] {
            assert_eq!(strictness(flag), Strictness::Lenient, "{flag}");
        }
        assert_eq!(strictness("--lenient-config="), Strictness::Strict);
        assert!(parse(&["--no-cluster", "--lenient-config=yes"]).is_err());
    }

    #[test]
    fn flags_of_nvidias_config_manager_go_by_their_own_names_too() {
        let ours = ["--config-dir=/configs", "--config-label=example.com/gpu"];
        let nvidias = ["--config-file-srcdir=/configs", "--node-label=example.com/gpu"];
        for [folder, label] in [ours, nvidias] {
            let args = parse(&["--node-name=a", folder, label]).unwrap();
            assert_eq!(args.config.configs(), Some(Configs::Folder("/configs".into())));
            assert_eq!(args.config.config_label, "example.com/gpu");
        }
    }

    #[test]
    fn bounds_on_requests_are_taken_as_numbers_and_for_nothing_else() {
        let args = parse(&["--no-cluster", "--kube-api-qps=0.5", "--kube-api-burst", "10"]).unwrap();
        assert_eq!(
            args.api_rate,
            ApiRate {
                kube_api_qps: Some(0.5),
                kube_api_burst: Some(10)
            }
        );
        for wrong in ["--kube-api-qps=few", "--kube-api-burst=1.5"] {
            let error = parse(&["--no-cluster", wrong]).unwrap_err().to_string();
            assert!(error.contains("invalid value"), "{error}");
        }
    }

    #[test]
    fn a_config_map_is_named_with_its_namespace() {
        let args = parse(&[
            "--node-name=a",
            "--config-map=gpu/configs",
            "--fallback-strategies=single, empty",
        ])
        .unwrap();
        assert_eq!(
            args.config.configs(),
            Some(Configs::ConfigMap {
                namespace: "gpu".into(),
                name: "configs".into()
            })
        );
        assert_eq!(
            args.config.choice().fallbacks,
            [Fallback::Single, Fallback::Empty]
        );
        for wrong in [
            "--config-map=configs",
            "--config-map=/x",
            "--fallback-strategies=first",
        ] {
            assert!(parse(&["--node-name=a", wrong]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_that_a_flag_names_goes_over_configurations_that_a_variable_names() {
        use clap::{CommandFactory, FromArgMatches};

        // A variable that cargo sets for every test.
        let by_variable = |ids: &[&'static str], words: &[&str]| {
            let command = ids.iter().fold(Command::command(), |command, id| {
                command.mut_arg(id, |argument| argument.env("CARGO_MANIFEST_DIR"))
            });
            let line = [&["plugin", "--node-name=a"], words].concat();
            let matches = command.try_get_matches_from(line).unwrap();
            Command::from_arg_matches(&matches).unwrap().args.config
        };
        let here = env!("CARGO_MANIFEST_DIR");
        let folder = Some(Configs::Folder(here.into()));

        let flag = by_variable(&["config_dir"], &["--config-file=deny.yaml"]);
        assert_eq!((flag.configs(), flag.unread()), (None, None));
        assert_eq!(flag.file(), Some("deny.yaml".into()));
        let empty = by_variable(&["config_dir"], &["--config-file="]);
        assert_eq!((empty.configs(), empty.unread()), (folder.clone(), None));

        let other = by_variable(&["config_file"], &["--config-map=gpu/configs"]);
        assert!(other.configs().is_some() && other.unread().is_none());

        let variables = by_variable(&["config_file", "config_dir"], &[]);
        assert_eq!(variables.configs(), folder);
        assert_eq!(
            variables.unread(),
            Some(format!(
                "CONFIG_FILE is not read: the node's label chooses from the folder {here}"
            ))
        );
        let flags = by_variable(&[], &["--config-file=x", "--config-map=gpu/configs"]);
        assert_eq!(
            flags.unread().as_deref(),
            Some("--config-file is not read: the node's label chooses from the ConfigMap gpu/configs")
        );
    }

    #[test]
    fn no_cluster_needs_no_node_name() {
        assert!(parse(&["--no-cluster"]).is_ok());
    }
}
