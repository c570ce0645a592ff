//! The cluster of the demo: a folder, simulated machines, the embedded API server with scheduler and kubelets, and the
//! real daemons. Started in this order, ended in reverse.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use gantry_api::{GpuNode, names};
use gantry_map::ClusterMap;
use gantry_nvml_sim::control::Controller;
use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use gantry_sim_cluster::kubelet::{Folders, Kubelet};
use gantry_sim_cluster::scheduler::{self, ExtenderConfig};
use gantry_topology::{Machine, Table};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use serde::Deserialize;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

use crate::daemon::{Daemon, own_address};
use crate::screen::Screen;
use crate::view::view;

/// Node names and the machine each one is.
const MACHINES: [(&str, &str, &str); 4] = [
    ("hgx", "hgx-h100.yaml", include_str!("../../simulator/machines/hgx-h100.yaml")),
    ("dgx1", "dgx1-v100.yaml", include_str!("../../simulator/machines/dgx1-v100.yaml")),
    ("a40", "a40-8x-bridged.yaml", include_str!("../../simulator/machines/a40-8x-bridged.yaml")),
    ("desk", "workstation-2x.yaml", include_str!("../../simulator/machines/workstation-2x.yaml")),
];

/// The file operators give kube-scheduler; the demo's scheduler takes its extender entry from it.
const SCHEDULER_CONFIG: &str = include_str!("../../manifests/kube-scheduler-config.yaml");

/// Timeout of every wait; generous, for slow machines.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Interval between two looks at a condition.
const LOOK: Duration = Duration::from_millis(15);

/// The running cluster.
pub(crate) struct Cluster {
    pub(crate) client: Client,
    pub(crate) nodes: BTreeMap<String, DemoNode>,
    pub(crate) kubeconfig: PathBuf,
    pub(crate) url: String,
    daemons: Vec<Daemon>,
    extender: SocketAddr,
    stop: CancellationToken,
    /// The last field: dropped after everything that uses the folder.
    folder: TempDir,
}

/// One simulated machine as a node.
pub(crate) struct DemoNode {
    pub(crate) machine: Machine,
    pub(crate) table: Table,
    pub(crate) kubelet: Kubelet,
    pub(crate) control: Controller,
}

#[derive(Deserialize)]
struct SchedulerConfig {
    extenders: Vec<ExtenderConfig>,
}

impl Cluster {
    /// Starts everything and waits until it is ready.
    pub(crate) async fn build(screen: Screen) -> anyhow::Result<Self> {
        let folder = folder()?;
        let root = folder.path();
        let logs = root.join("logs");
        std::fs::create_dir(&logs).with_context(|| format!("creating {}", logs.display()))?;
        let stop = CancellationToken::new();

        screen.line("Starting an API server, a scheduler loop and four kubelets in this process ...");
        let api = ApiServer::start(&ApiOptions::default(), stop.clone())
            .await
            .context("starting the API server")?;
        let kubeconfig = root.join("kubeconfig");
        std::fs::write(&kubeconfig, api.kubeconfig())
            .with_context(|| format!("writing {}", kubeconfig.display()))?;
        let client = api.client()?;
        let extender = own_address()?;
        let mut cluster = Self {
            client: client.clone(),
            nodes: BTreeMap::new(),
            kubeconfig,
            url: api.url(),
            daemons: Vec::new(),
            extender,
            stop: stop.clone(),
            folder,
        };
        for (name, file, text) in MACHINES {
            cluster.add_node(name, file, text).await?;
        }

        screen
            .line("Starting the real daemons as processes: one `gantry extender`, four `gantry plugin` ...");
        cluster.start_daemons(&logs)?;
        tokio::spawn(scheduler::run(client, extender_entry(extender)?, stop));
        cluster.ready().await?;
        Ok(cluster)
    }

    async fn add_node(&mut self, name: &str, file: &str, text: &str) -> anyhow::Result<()> {
        let home = self.folder.path().join(name);
        let installed = gantry_nvml_sim::install_text(text, Path::new(file), &home)
            .with_context(|| format!("installing the simulated machine {file}"))?;
        let machine: Machine =
            serde_saphyr::from_str(text).map_err(|error| anyhow::anyhow!("machine file {file}: {error}"))?;
        let labels = BTreeMap::from([("gantry.dev/gpu".to_owned(), "true".to_owned())]);
        let kubelet = Kubelet::start(self.client.clone(), name, &labels, &home, self.stop.clone())
            .await
            .with_context(|| format!("starting the kubelet of {name}"))?;
        let node =
            DemoNode { table: Table::build(&machine), machine, kubelet, control: installed.controller };
        self.nodes.insert(name.to_owned(), node);
        Ok(())
    }

    fn start_daemons(&mut self, logs: &Path) -> anyhow::Result<()> {
        let kubeconfig = self.kubeconfig.display().to_string();
        let arguments = [
            "extender".to_owned(),
            format!("--kubeconfig={kubeconfig}"),
            format!("--listen={}", self.extender),
        ];
        self.daemons.push(Daemon::start("extender", &arguments, logs)?);
        for (name, node) in &self.nodes {
            let home = self.folder.path().join(name);
            let folders = node.kubelet.folders();
            let path = |option: &str, path: &Path| format!("--{option}={}", path.display());
            let arguments = [
                "plugin".to_owned(),
                format!("--node-name={name}"),
                format!("--kubeconfig={kubeconfig}"),
                // Not scraped here: any free port.
                "--listen=127.0.0.1:0".to_owned(),
                path("device-plugin-dir", &folders.device_plugins),
                path("pod-resources-socket", &folders.pod_resources_socket),
                path("cgroup-root", &folders.cgroups),
                path("nvml-library", &home.join(gantry_nvml_sim::LIBRARY_NAME)),
                path("proc-root", &home.join("root/proc")),
                path("sys-root", &home.join("root/sys")),
                path("container-dev-root", &home.join("root/dev")),
                path("cdi-root", &home.join("cdi")),
            ];
            self.daemons.push(Daemon::start(&format!("plugin-{name}"), &arguments, logs)?);
        }
        Ok(())
    }

    /// Waits until every node advertises its GPUs and has a GpuNode, and the extender is ready and has read all of
    /// them.
    async fn ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for daemon in &mut self.daemons {
                daemon.check()?;
            }
            let missing = self.missing().await?;
            let Some(first) = missing.first() else {
                return Ok(());
            };
            if Instant::now() > deadline {
                let logs: Vec<String> = self
                    .daemons
                    .iter()
                    .map(|daemon| format!("--- {}\n{}", daemon.name(), daemon.tail()))
                    .collect();
                anyhow::bail!("not ready after {} s: {first}\n{}", PATIENCE.as_secs(), logs.join("\n"));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn missing(&self) -> anyhow::Result<Vec<String>> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let nodes = nodes.list(&ListParams::default()).await.context("listing nodes")?;
        let view = self.view().await?;
        let mut missing = Vec::new();
        for (name, node) in &self.nodes {
            let wanted = node.machine.gpus().len().to_string();
            let object = nodes.items.iter().find(|object| object.name_any() == *name);
            let allocatable = object.and_then(|object| object.status.as_ref()?.allocatable.clone());
            let gpus = allocatable.and_then(|amounts| amounts.get(names::GPU_RESOURCE).cloned());
            if gpus.is_none_or(|gpus| gpus.0 != wanted) {
                missing.push(format!("node {name} does not offer {wanted} GPUs"));
            } else if view.node(name).is_none_or(|seen| seen.free().len() != node.machine.gpus().len()) {
                missing.push(format!("GpuNode {name} does not show {wanted} healthy GPUs"));
            }
        }
        // It has its own watch: what stands in the API may not have reached it yet.
        let all: usize = self.nodes.values().map(|node| node.machine.gpus().len()).sum();
        match free_for_extender(self.extender).await {
            None => missing.push("the extender is not ready".into()),
            Some(free) if free != all => missing.push(format!("the extender knows {free} of {all} GPUs")),
            Some(_) => {}
        }
        Ok(missing)
    }

    /// The present state of the cluster's GPUs.
    pub(crate) async fn view(&self) -> anyhow::Result<ClusterMap> {
        let gpu_nodes: Api<GpuNode> = Api::all(self.client.clone());
        let gpu_nodes = gpu_nodes.list(&ListParams::default()).await.context("listing GpuNodes")?;
        let pods = self.pods().list(&ListParams::default()).await.context("listing pods")?;
        Ok(view(&gpu_nodes.items, &pods.items))
    }

    /// Whether the extender counts as many GPUs as free as are seen to be.
    pub(crate) async fn extender_agrees(&self, view: &ClusterMap) -> bool {
        let free = view.nodes.iter().map(|node| node.free().len()).sum();
        free_for_extender(self.extender).await == Some(free)
    }

    /// The pods of the demo.
    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// The value of `look` once it has one; `None` if that takes too long.
    pub(crate) async fn wait<T>(
        &self,
        mut look: impl AsyncFnMut() -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<Option<T>> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(value) = look().await? {
                return Ok(Some(value));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(None)
    }

    /// Ends the daemons, then the cluster, then removes the folder unless `keep` is set.
    ///
    /// # Errors
    /// The first thing that did not end as it should; everything is taken down all the same.
    pub(crate) async fn take_down(self, keep: bool) -> anyhow::Result<()> {
        let ends = futures::future::join_all(self.daemons.into_iter().map(Daemon::stop)).await;
        self.stop.cancel();
        let path = self.folder.path().to_owned();
        if keep {
            let path = self.folder.keep();
            Screen::of_stdout().line(format!("Kept {}", path.display()));
            return ends.into_iter().collect();
        }
        let removed = self.folder.close().with_context(|| format!("removing {}", path.display()));
        ends.into_iter().collect::<anyhow::Result<()>>().and(removed)
    }
}

/// A folder whose sockets have paths short enough, in the usual place for temporary files or else in /tmp.
fn folder() -> anyhow::Result<TempDir> {
    // The longest socket is a node's pod resources or plugin socket; leave some room for the plugin's own name.
    const ROOM: usize = 60;
    let usual = std::env::temp_dir();
    let deepest = Folders::under(&usual.join("gantry-xxxxxx").join("node"));
    let place = if deepest.pod_resources_socket.as_os_str().len() + ROOM / 2 > 107 {
        PathBuf::from("/tmp")
    } else {
        usual
    };
    tempfile::Builder::new()
        .prefix("gantry-")
        .tempdir_in(&place)
        .with_context(|| format!("creating a folder in {}; TMPDIR may name another place", place.display()))
}

fn extender_entry(address: SocketAddr) -> anyhow::Result<ExtenderConfig> {
    let config: SchedulerConfig = serde_saphyr::from_str(SCHEDULER_CONFIG)
        .map_err(|error| anyhow::anyhow!("kube-scheduler-config.yaml: {error}"))?;
    let mut entry =
        config.extenders.into_iter().next().context("kube-scheduler-config.yaml has no extender")?;
    entry.url_prefix = format!("http://{address}");
    Ok(entry)
}

/// How many devices the extender counts as free; `None` if it is not ready.
async fn free_for_extender(address: SocketAddr) -> Option<usize> {
    const FREE: &str = "gantry_extender_devices{state=\"free\"} ";
    get(address, "/readyz").await.filter(|answer| answer.starts_with("HTTP/1.1 200"))?;
    let metrics = get(address, "/metrics").await?;
    metrics.lines().find_map(|line| line.strip_prefix(FREE)?.trim().parse().ok())
}

/// The whole answer to a GET.
async fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = tokio::net::TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer)
}
