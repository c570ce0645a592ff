//! `gantry labels`: the labels of a node, once: printed for people and CI, or written where the daemon would write them. The same
//! function makes them as in the daemon.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, anyhow};
use clap::{Args, ValueEnum};
use gantry_plugin::config::{Config, Gfd, Layer, Strictness, load};
use gantry_plugin::inventory::Hardware;
use gantry_plugin::labels::{Facts, Host, HostOptions, Identity, Labels, Place, Target, labels, write};
use gantry_plugin::offer::offer;

use crate::runtime::BadInput;
use crate::topo::source::SourceArgs;

/// Options of `gantry labels`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Printed are lines key=value, sorted, as in a features file of node-feature-discovery. Health is not told: who looks once has not
watched it.

Examples:
  gantry labels                                       of this node, through NVML
  gantry labels --from machine.yaml --no-timestamp    of a machine file
  gantry labels --mig-strategy mixed --to node --node-name node-1 --kubeconfig ~/.kube/config

Exit codes: 0 done, 1 failed, 2 bad input.")]
pub(crate) struct LabelsArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// Config file in the format of NVIDIA's k8s-device-plugin; the daemon's [env: GFD_CONFIG_FILE too]
    #[arg(long, env = "CONFIG_FILE", value_name = "FILE")]
    config_file: Option<PathBuf>,

    /// How MIG devices are advertised: none, single or mixed [default: the config file's, or none]
    #[arg(long, env = "MIG_STRATEGY", value_name = "STRATEGY")]
    mig_strategy: Option<String>,

    /// Leave out nvidia.com/gfd.timestamp, which tells when the labels were made
    #[arg(long, env = "GFD_NO_TIMESTAMP")]
    no_timestamp: bool,

    /// File that names the machine's type [default: the config file's, or /sys/class/dmi/id/product_name]
    #[arg(long, env = "GFD_MACHINE_TYPE_FILE", value_name = "FILE")]
    machine_type_file: Option<PathBuf>,

    /// Write the labels instead of printing them
    #[arg(long, value_name = "WHERE")]
    to: Option<To>,

    /// The file of --to=file [default: the config file's, or node-feature-discovery's features.d/gfd]
    #[arg(
        long,
        short,
        visible_alias = "output",
        env = "GFD_OUTPUT_FILE",
        value_name = "FILE"
    )]
    output_file: Option<PathBuf>,

    /// Name of the node whose labels they are, for --to=node-feature and --to=node
    #[arg(long, env = "NODE_NAME")]
    node_name: Option<String>,

    /// Namespace of the NodeFeature object and of this pod [default: the service account's or the kubeconfig's]
    #[arg(long, env = "NAMESPACE")]
    namespace: Option<String>,

    /// Name of the pod this runs in: a DaemonSet's owns the NodeFeature object
    #[arg(long, env = "POD_NAME")]
    pod_name: Option<String>,

    /// Kubeconfig file; without it the pod's service account is used
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// Where labels are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum To {
    /// Where NVIDIA's gpu-feature-discovery, so configured, writes them: node-feature, or file where useNodeFeatureAPI is false
    Gfd,
    /// A NodeFeature object, which node-feature-discovery makes labels of
    NodeFeature,
    /// A file in node-feature-discovery's features.d
    File,
    /// The Node itself, without node-feature-discovery
    Node,
}

impl To {
    fn place(self, gfd: &Gfd) -> Option<Place> {
        let target = match self {
            Self::Gfd => Target::Gfd,
            Self::NodeFeature => Target::NodeFeature,
            Self::File => Target::File,
            Self::Node => Target::Node,
        };
        target.place(gfd)
    }
}

/// Runs `gantry labels`.
///
/// # Errors
/// When the machine or the config file cannot be read, or the labels cannot be written.
pub(crate) async fn run(args: LabelsArgs) -> anyhow::Result<()> {
    let config = config(&args).map_err(BadInput)?;
    let labels = made(&args, &config)?;
    match args.to.and_then(|to| to.place(&config.gfd)) {
        None => print(&labels),
        Some(Place::File) => {
            let path = args.output_file.as_deref().or(config.gfd.output_file.as_deref());
            Ok(write::file::write(
                &labels,
                path.filter(|path| *path != Path::new("")),
            )?)
        }
        Some(Place::NodeFeature) => {
            let identity = identity(&args)?;
            let client = write::connect(args.kubeconfig.as_deref()).await?;
            Ok(write::to_node_feature(&client, &identity, &labels).await?)
        }
        Some(Place::Node) => {
            let identity = identity(&args)?;
            let client = write::connect(args.kubeconfig.as_deref()).await?;
            Ok(write::to_node(&client, &identity, &labels).await?)
        }
    }
}

/// The config file with the options laid over it.
fn config(args: &LabelsArgs) -> anyhow::Result<Config> {
    // The variable of NVIDIA's gpu-feature-discovery; clap knows one per option.
    let other = || std::env::var_os("GFD_CONFIG_FILE").filter(|path| !path.is_empty());
    let file = args.config_file.clone().or_else(|| other().map(PathBuf::from));
    let (name, text) = match &file {
        Some(path) => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
            (name, text)
        }
        None => ("the options".to_owned(), String::new()),
    };
    let strategy = args.mig_strategy.as_deref().map(|strategy| Layer {
        key: "flags.migStrategy",
        origin: "--mig-strategy".to_owned(),
        value: strategy.into(),
    });
    let layers: Vec<Layer> = strategy.into_iter().collect();
    let loaded =
        load(&name, &text, &layers, Strictness::default()).map_err(|problems| anyhow!("{problems}"))?;
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    Ok(loaded.config)
}

fn made(args: &LabelsArgs, config: &Config) -> anyhow::Result<Labels> {
    let machine = Arc::new(args.source.machine()?);
    // What a machine file tells is not of this host.
    let host = args.source.sys_root().map(|sys_root| {
        let file = args
            .machine_type_file
            .as_ref()
            .unwrap_or(&config.gfd.machine_type_file);
        Host::read(&HostOptions {
            machine_type_file: file.clone(),
            sys_root: sys_root.to_owned(),
        })
    });
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let timestamped = !(args.no_timestamp || config.gfd.no_timestamp);
    Ok(labels(&Facts {
        inventory: &offer(&Hardware::of(machine), config),
        config,
        host: &host.unwrap_or_default(),
        watched: false,
        timestamp: timestamped.then(|| i64::try_from(now.as_secs()).unwrap_or(i64::MAX)),
    }))
}

fn identity(args: &LabelsArgs) -> anyhow::Result<Identity> {
    let node = args.node_name.as_deref().ok_or_else(|| {
        BadInput(anyhow!(
            "--to=node-feature and --to=node need the node's name; give --node-name or set NODE_NAME"
        ))
    })?;
    Ok(Identity {
        node: node.into(),
        namespace: args.namespace.clone(),
        pod: args.pod_name.clone(),
    })
}

fn print(labels: &Labels) -> anyhow::Result<()> {
    match io::stdout()
        .lock()
        .write_all(write::file::text(labels).as_bytes())
    {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}
