//! `gantry labels`: computes the labels of a node once, by the daemon's function, and prints them or writes them to the
//! daemon's destination.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use gantry_config::source::{self, Source};
use gantry_config::{ApiRate, Config, Gfd, GfdOverrides, Leniency};
use gantry_plugin::discover::DiscoverError;
use gantry_plugin::inventory::{Absence, Hardware};
use gantry_plugin::labels::{
    Facts, Host, HostOptions, Identity, LabelName, Labels, Place, Target, labels, write,
};
use gantry_plugin::offer::offer;
use gantry_topology::mig::Catalogue;
use gantry_topology::{Gpu, Machine, Mig};

use crate::runtime::{BadInput, print};
use crate::topo::source::SourceArgs;
use crate::visible::Visible;

/// Options of `gantry labels`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Prints sorted lines key=value, as in a features file of node-feature-discovery. Health is omitted,
because it needs observation over time. The settings of gpu-feature-discovery apply, and labels
are made once, as with --oneshot. With --fail-on-init-error=false a node without NVML or GPUs gets
the labels of a node without GPUs. For a machine file that does not say whether its GPUs support
MIG, their product decides.

Examples:
  gantry labels                                       of this node, through NVML
  gantry labels --from machine.yaml --no-timestamp    of a machine file
  gantry labels --to gfd                              where gpu-feature-discovery writes
  gantry labels --mig-strategy mixed --to node --node-name node-1 --kubeconfig ~/.kube/config

Exit codes: 0 done, 1 failed, 2 bad input.")]
pub(crate) struct LabelsArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// Config file in the format of NVIDIA's k8s-device-plugin; the daemon's [env: CONFIG_FILE too]
    #[arg(long, env = "GFD_CONFIG_FILE", value_name = "FILE")]
    config_file: Option<PathBuf>,

    /// Treatment of unknown keys.
    #[command(flatten)]
    leniency: Leniency,

    /// Write the labels instead of printing them
    #[arg(long, value_name = "WHERE")]
    to: Option<LabelTarget>,

    /// Name of the node to label, for --to=node-feature and --to=node
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

    /// NVIDIA's limits on requests to the API server.
    #[command(flatten)]
    _api_rate: ApiRate,

    /// The settings of gpu-feature-discovery.
    #[command(flatten)]
    settings: GfdOverrides,
}

/// Where labels are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LabelTarget {
    /// The destination of NVIDIA's gpu-feature-discovery with this configuration: node-feature, or file if
    /// useNodeFeatureAPI is false
    Gfd,
    /// A NodeFeature object, which node-feature-discovery makes labels of
    NodeFeature,
    /// A file in node-feature-discovery's features.d
    File,
    /// The Node itself, without node-feature-discovery
    Node,
}

impl LabelTarget {
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
        None => print(&Visible::new(&write::features(&labels))),
        Some(Place::File) => Ok(write::to_file(&labels, config.gfd.output_file.as_deref())?),
        Some(Place::NodeFeature) => {
            let identity = identity(&args)?;
            let client = write::connect(args.kubeconfig.as_deref()).await?;
            if let Some(reason) = write::to_node_feature(&client, &identity, &labels).await? {
                tracing::warn!("{reason}");
            }
            Ok(())
        }
        Some(Place::Node) => {
            let identity = identity(&args)?;
            let client = write::connect(args.kubeconfig.as_deref()).await?;
            Ok(write::to_node(&client, &identity, &labels).await?)
        }
    }
}

/// The config file with variables and options laid over it, as the daemon reads it.
fn config(args: &LabelsArgs) -> anyhow::Result<Config> {
    // The plugin's variable; clap supports one per option.
    let other = || std::env::var_os("CONFIG_FILE").map(PathBuf::from);
    let file = args.config_file.clone().or_else(other);
    let source = Source {
        place: file
            .filter(|path| !path.as_os_str().is_empty())
            .map_or(source::ConfigLocation::Flags, source::ConfigLocation::File),
        layers: args.settings.layers().to_vec(),
        strictness: args.leniency.strictness(),
        gpu_resource: None,
    };
    let loaded = source.now()?;
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    Ok(loaded.config)
}

fn made(args: &LabelsArgs, config: &Config) -> anyhow::Result<Labels> {
    let mut unknown = false;
    let hardware = match args.source.machine() {
        Err(error) => {
            let Some(absence) = absence(&error).filter(|_| !config.fail_on_init_error) else {
                return Err(error);
            };
            tracing::warn!(
                "these are the labels of a node without GPUs: {}",
                gantry_runtime::chain(error.as_ref())
            );
            Hardware::absent(absence)
        }
        Ok(mut machine) => {
            // NVML reports whether each GPU supports MIG.
            if args.source.sys_root().is_none() {
                (machine, unknown) = with_mig(machine)?;
            }
            Hardware::of(Arc::new(machine))
        }
    };
    // A machine file does not describe this host.
    let host = args.source.sys_root().map(|sys_root| {
        Host::read(&HostOptions {
            machine_type_file: config.gfd.machine_type_file.clone(),
            sys_root: sys_root.to_owned(),
        })
    });
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut labels = labels(&Facts {
        inventory: &offer(&hardware, config),
        config,
        host: &host.unwrap_or_default(),
        watched: false,
        timestamp: (!config.gfd.no_timestamp).then(|| i64::try_from(now.as_secs()).unwrap_or(i64::MAX)),
    });
    let capable = LabelName::new("nvidia.com", "mig.capable");
    if unknown && labels.get(&capable).is_some_and(|value| value == "false") {
        labels.remove(&capable);
    }
    Ok(labels)
}

/// The reason why there are no GPUs, if the error is one: NVML does not work, or finds none.
fn absence(error: &anyhow::Error) -> Option<Absence> {
    match error.downcast_ref()? {
        error @ (DiscoverError::Nvml(_) | DiscoverError::VersionMismatch { .. } | DiscoverError::NoGpu) => {
            Some(error.into())
        }
        _ => None,
    }
}

/// Marks the GPUs whose product supports MIG. Returns true with the machine if that is unknown for one of them.
fn with_mig(machine: Machine) -> anyhow::Result<(Machine, bool)> {
    let products = Catalogue::built_in();
    let mut parts = machine.into_parts();
    let mut unknown = false;
    for gpu in parts.gpus.iter_mut().filter(|gpu| gpu.mig.is_none()) {
        match products.of(gpu) {
            Some(_) => gpu.mig = Some(Mig::default()),
            None => unknown |= !predates_mig(gpu),
        }
    }
    Ok((Machine::new(parts)?, unknown))
}

/// Whether no GPU of its generation supports MIG: generations before Ampere, and the smaller chips of Ampere and Ada.
/// Later generations have products with MIG that the table of placements lacks.
fn predates_mig(gpu: &Gpu) -> bool {
    let capability = gpu.compute_capability.as_deref().unwrap_or_default();
    let parts = capability.split_once('.');
    let parts = parts.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parts.is_some_and(|(major, minor): (u8, u8)| major < 8 || (major == 8 && minor > 0))
}

fn identity(args: &LabelsArgs) -> anyhow::Result<Identity> {
    let node = args.node_name.as_deref().ok_or_else(|| {
        BadInput(anyhow!(
            "--to=node-feature and --to=node need the node's name; set NODE_NAME by the downward API (fieldPath: spec.nodeName), or give --node-name"
        ))
    })?;
    Ok(Identity { node: node.into(), namespace: args.namespace.clone(), pod: args.pod_name.clone() })
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn node_without_gpus_in_nvml_is_absent() {
        let failed = |error: DiscoverError| Err::<(), _>(error).context("cannot read this node's machine");
        let none = failed(DiscoverError::NoGpu).unwrap_err();
        assert_eq!(absence(&none), Some(Absence::NoGpu));
        assert_eq!(absence(&BadInput(anyhow!("no such file")).into()), None);
    }
}
