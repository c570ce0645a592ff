//! The cluster's simulated GPUs and the project's daemons on them: three unlike machines, a plugin on each, the
//! extender. Started by the first scenario that needs them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use gantry_api::GpuNode;
use gantry_api::names::GPU_RESOURCE;
use gantry_e2e::hardware::Hardware;
use gantry_e2e::{Cluster, Sandbox, gantry, podresources, until};
use gantry_topology::{Collective, GpuSet, Machine, Purpose, Rates, Table};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::Api;

const READY_LIMIT: Duration = Duration::from_secs(180);
/// Where the manifests probe the daemons.
const PLUGIN_READY: &str = "http://127.0.0.1:9410/readyz";
const EXTENDER_READY: &str = "http://127.0.0.1:8010/readyz";

/// Device IDs by node.
pub(crate) type Free = BTreeMap<String, BTreeSet<String>>;

/// The machines and their facts.
pub(crate) struct Gpus {
    binary: PathBuf,
    hardware: Mutex<BTreeMap<String, Hardware>>,
    machines: BTreeMap<String, Known>,
    /// Nodes on which the plugin runs with changed arguments.
    altered: Mutex<BTreeSet<String>>,
}

/// A machine as its own node published it, and its tables.
struct Known {
    machine: Machine,
    links: Collective,
    table: Table,
}

impl Gpus {
    /// Puts the simulated GPUs in place, starts the daemons, and waits until the scheduler could use them.
    pub(crate) async fn start(cluster: &Cluster) -> Result<Self> {
        let binary = gantry::binary().context("no gantry beside this test: cargo build -p gantry")?;
        let hardware = cluster.start_gantry(&binary, &gantry::unlike_machines()).await?;
        let names = cluster.nodes().iter().map(|node| node.name().to_owned());
        let hardware = Mutex::new(names.zip(hardware).collect());
        let mut gpus = Self { binary, hardware, machines: BTreeMap::new(), altered: Mutex::default() };
        gpus.wait_until_ready(cluster).await?;
        let published: Api<GpuNode> = Api::all(cluster.client());
        for node in cluster.nodes() {
            let machine = published.get(node.name()).await?.spec.machine;
            let links = Collective::new(&machine, &Rates::of(&machine));
            let table = Table::build(&machine);
            gpus.machines.insert(node.name().to_owned(), Known { machine, links, table });
        }
        Ok(gpus)
    }

    /// Restarts a node's plugin with additional arguments until the scenario is over.
    pub(crate) async fn restart_plugin(&self, cluster: &Cluster, node: &str, extra: &[&str]) -> Result<()> {
        self.alter_plugin(cluster, node, extra).await?;
        self.wait_until_ready(cluster).await
    }

    /// The same, also if the plugin never gets ready that way.
    pub(crate) async fn alter_plugin(&self, cluster: &Cluster, node: &str, extra: &[&str]) -> Result<()> {
        let node = cluster.node(node)?;
        node.program(gantry::PLUGIN)?.stop().await?;
        let mut args = self.hardware().get(node.name()).map(Hardware::plugin_args).unwrap_or_default();
        args.extend(extra.iter().map(|arg| (*arg).to_owned()));
        cluster.start_plugin(node, &self.binary, &args).await?;
        self.note_altered(node.name(), !extra.is_empty());
        Ok(())
    }

    /// Restarts a node's plugin in another mode until the scenario is over, on other GPUs if `hardware` names some.
    /// Waits until kubelet and the API server count exactly `offered` of each resource.
    pub(crate) async fn serve(
        &self,
        cluster: &Cluster,
        node: &str,
        hardware: Option<&Hardware>,
        extra: &[String],
        offered: &[(&str, usize)],
    ) -> Result<()> {
        let node = cluster.node(node)?;
        node.program(gantry::PLUGIN)?.stop().await?;
        let mut args = match hardware {
            Some(hardware) => hardware.plugin_args(),
            None => self.hardware().get(node.name()).map(Hardware::plugin_args).unwrap_or_default(),
        };
        args.extend_from_slice(extra);
        cluster.start_plugin(node, &self.binary, &args).await?;
        self.note_altered(node.name(), true);
        self.counts(cluster, node.name(), offered).await
    }

    /// Waits until kubelet and the API server count exactly so many of each resource on a node.
    pub(crate) async fn counts(
        &self,
        cluster: &Cluster,
        node: &str,
        offered: &[(&str, usize)],
    ) -> Result<()> {
        let nodes: Api<NodeObject> = Api::all(cluster.client());
        let node = cluster.node(node)?;
        until(format!("{} offers {offered:?}", node.name()), READY_LIMIT, async || {
            ready(node.sandbox(), PLUGIN_READY).await.map_err(|error| format!("plugin: {error}"))?;
            let object = nodes.get(node.name()).await.map_err(|error| error.to_string())?;
            let allocatable = object.status.and_then(|status| status.allocatable).unwrap_or_default();
            for (resource, count) in offered {
                let kubelets = podresources::allocatable(node, resource).await;
                let kubelets = kubelets.map_err(|error| error.to_string())?.len();
                let api = allocatable.get(*resource).map_or("0", |quantity| quantity.0.as_str());
                if kubelets != *count || api != count.to_string() {
                    return Err(format!(
                        "{resource}: {kubelets} with kubelet, {api} in the API, {count} wanted"
                    ));
                }
            }
            Ok(())
        })
        .await?;
        Ok(())
    }

    /// Gives the plugins that a scenario altered their usual arguments again, and waits until all is ready.
    pub(crate) async fn restore(&self, cluster: &Cluster) -> Result<()> {
        let altered = self.altered.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for node in altered {
            self.alter_plugin(cluster, &node, &[]).await?;
        }
        self.wait_until_ready(cluster).await
    }

    /// Waits until the plugin has advertised all GPUs to every kubelet, the API server and the scheduler have observed
    /// them, and the extender is ready.
    pub(crate) async fn wait_until_ready(&self, cluster: &Cluster) -> Result<()> {
        let nodes: Api<NodeObject> = Api::all(cluster.client());
        let published: Api<GpuNode> = Api::all(cluster.client());
        for node in cluster.nodes() {
            until(format!("GPUs of {}", node.name()), READY_LIMIT, async || {
                ready(node.sandbox(), PLUGIN_READY).await.map_err(|error| format!("plugin: {error}"))?;
                let gpu_node = published.get(node.name()).await.map_err(|error| error.to_string())?;
                let gpus = gpu_node.spec.machine.gpus().len();
                let kubelets = podresources::allocatable(node, GPU_RESOURCE).await;
                let kubelets = kubelets.map_err(|error| error.to_string())?.len();
                let object = nodes.get(node.name()).await.map_err(|error| error.to_string())?;
                let allocatable = object.status.and_then(|status| status.allocatable).unwrap_or_default();
                let offered = allocatable.get(GPU_RESOURCE).map_or("none", |quantity| quantity.0.as_str());
                if kubelets == gpus && offered == gpus.to_string() {
                    Ok(())
                } else {
                    Err(format!("of {gpus}: {kubelets} with kubelet, {offered} in the API"))
                }
            })
            .await?;
        }
        until("extender ready", READY_LIMIT, async || ready(cluster.control(), EXTENDER_READY).await).await?;
        Ok(())
    }

    /// All devices of all nodes.
    pub(crate) fn all(&self) -> Free {
        let ids = |known: &Known| (0..known.machine.gpus().len()).map(|gpu| known.id(gpu)).collect();
        self.machines.iter().map(|(node, known)| (node.clone(), ids(known))).collect()
    }

    /// The highest bandwidth that `size` of the free GPUs of one node reach, anywhere: by trying every set.
    pub(crate) fn best_bandwidth(&self, free: &Free, size: usize) -> u32 {
        let on_node = |(node, free): (&String, &BTreeSet<String>)| {
            let known = self.machines.get(node)?;
            known.set(free).subsets(size).map(|set| known.links.ring(set)).max()
        };
        free.iter().filter_map(on_node).max().unwrap_or_default()
    }

    /// The bandwidth that a set of one node's devices reaches.
    pub(crate) fn bandwidth(&self, node: &str, devices: &BTreeSet<String>) -> Result<u32> {
        let known = self.machines.get(node).context("no such node")?;
        Ok(known.links.ring(known.set(devices)))
    }

    /// The set that the tables choose on a node.
    pub(crate) fn chosen(&self, free: &Free, node: &str, size: usize) -> Result<BTreeSet<String>> {
        let known = self.machines.get(node).context("no such node")?;
        let offered = known.set(free.get(node).context("nothing free there")?);
        let choice = known.table.best(offered, size, Purpose::Local).context("too few free")?;
        Ok(choice.gpus.iter().map(|gpu| known.id(gpu)).collect())
    }

    fn note_altered(&self, node: &str, is_altered: bool) {
        let mut altered = self.altered.lock().unwrap_or_else(PoisonError::into_inner);
        altered.remove(node);
        altered.extend(is_altered.then(|| node.to_owned()));
    }

    fn hardware(&self) -> MutexGuard<'_, BTreeMap<String, Hardware>> {
        self.hardware.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn ready(place: &Sandbox, url: &str) -> gantry_e2e::Result<String> {
    place.exec(&["busybox", "wget", "-q", "-O", "-", url]).await
}

impl Known {
    fn id(&self, gpu: usize) -> String {
        let uuid = self.machine.gpus().get(gpu).and_then(|gpu| gpu.uuid.as_ref());
        uuid.map(ToString::to_string).unwrap_or_default()
    }

    fn set(&self, devices: &BTreeSet<String>) -> GpuSet {
        let held = |gpu: &usize| devices.contains(&self.id(*gpu));
        (0..self.machine.gpus().len()).filter(held).fold(GpuSet::EMPTY, GpuSet::with)
    }
}
