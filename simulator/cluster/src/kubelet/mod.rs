//! A kubelet stand-in for one node: registration of device plugins, admission in bind order, pod resources, pod status.
//! Its containers are no processes. Everything it has lies in one folder, so that many fit on one machine.

mod containers;
mod devices;
mod plugins;
mod pod;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use gantry_proto::KUBELET_SOCKET;
use gantry_proto::deviceplugin::registration_server::RegistrationServer;
use gantry_proto::podresources::pod_resources_lister_server::PodResourcesListerServer;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use serde_json::{Map, Value, json};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

pub use containers::{OUTLIVE, Process, RUN_FOR};

use crate::api::KUBERNETES_VERSION;
use crate::mirror::{Delta, Mirror};
use containers::Cgroup;
use plugins::{Plugins, PodResourcesService, RegistrationService};
use pod::{DesiredState, PodWorker};

/// The longest path of a unix socket on Linux.
const MAX_SOCKET_PATH: usize = 107;

/// A running kubelet. It ends when its token is cancelled.
#[derive(Debug, Clone)]
pub struct Kubelet {
    folders: Folders,
    processes: Arc<Mutex<Processes>>,
}

/// Admitted pods, by UID.
type Processes = BTreeMap<String, AdmittedPod>;

/// What the containers of a pod were given, and the means to end them.
#[derive(Debug, Clone)]
struct AdmittedPod {
    processes: Vec<Process>,
    killed: CancellationToken,
}

/// Where a kubelet keeps what it shares with a device plugin.
#[derive(Debug, Clone)]
pub struct Folders {
    /// Holds kubelet.sock and the plugins' sockets.
    pub device_plugins: PathBuf,
    pub pod_resources_socket: PathBuf,
    /// Stands for `/sys/fs/cgroup`.
    pub cgroups: PathBuf,
}

/// Why a kubelet did not start.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// A socket's path does not fit.
    #[error(
        "socket path {path} has {length} bytes, at most {MAX_SOCKET_PATH} are possible; use a shorter folder"
    )]
    PathTooLong { path: PathBuf, length: usize },
    /// A folder or socket could not be made.
    #[error("{path}")]
    Folder { path: PathBuf, source: io::Error },
    /// The Node could not be created.
    #[error("node {node} not created")]
    Node { node: String, source: kube::Error },
}

impl Folders {
    /// The folders of a node under `root`, with short names: socket paths are limited.
    pub fn under(root: &Path) -> Self {
        Self {
            device_plugins: root.join("plugins"),
            pod_resources_socket: root.join("pods").join(KUBELET_SOCKET),
            cgroups: root.join("cgroup"),
        }
    }
}

impl Kubelet {
    /// Starts the kubelet of node `name` in folder `root` and creates its Node with `labels`.
    ///
    /// # Errors
    /// See [`KubeletError`].
    pub async fn start(
        client: Client,
        name: &str,
        labels: &BTreeMap<String, String>,
        root: &Path,
        stop: CancellationToken,
    ) -> Result<Self, KubeletError> {
        let folders = Folders::under(root);
        let plugins = Arc::new(Plugins::new(&folders.device_plugins, stop.clone()));
        let registration = listen(&folders.device_plugins.join(KUBELET_SOCKET))?;
        let pod_resources = listen(&folders.pod_resources_socket)?;
        Cgroup::lay_out(&folders.cgroups)
            .map_err(|source| KubeletError::Folder { path: folders.cgroups.clone(), source })?;
        create_node(&client, name, labels)
            .await
            .map_err(|source| KubeletError::Node { node: name.to_owned(), source })?;

        let services =
            Server::builder().add_service(RegistrationServer::new(RegistrationService(Arc::clone(&plugins))));
        serve(services, registration, stop.clone());
        let services = Server::builder()
            .add_service(PodResourcesListerServer::new(PodResourcesService(Arc::clone(&plugins))));
        serve(services, pod_resources, stop.clone());

        let kubelet = Self { folders, processes: Arc::default() };
        let own_pods = watcher::Config::default().fields(&format!("spec.nodeName={name}"));
        let worker = Worker {
            pods: Mirror::new(Api::all(client.clone()), own_pods),
            client: client.clone(),
            plugins: Arc::clone(&plugins),
            cgroups: kubelet.folders.cgroups.clone(),
            workers: BTreeMap::new(),
            processes: Arc::clone(&kubelet.processes),
        };
        let publish = publish_devices(client, name.to_owned(), plugins);
        tokio::spawn(async move {
            tokio::select! {
                () = worker.run() => {}
                () = publish => {}
                () = stop.cancelled() => {}
            }
        });
        Ok(kubelet)
    }

    /// Where it keeps what it shares with a plugin.
    pub fn folders(&self) -> &Folders {
        &self.folders
    }

    /// What the containers of a pod were given; empty if it was never admitted here.
    pub fn processes(&self, uid: &str) -> Vec<Process> {
        self.admitted(uid).map(|pod| pod.processes).unwrap_or_default()
    }

    /// Ends the processes of a deleted pod that outlive it.
    pub fn kill(&self, uid: &str) {
        if let Some(pod) = self.admitted(uid) {
            pod.killed.cancel();
        }
    }

    fn admitted(&self, uid: &str) -> Option<AdmittedPod> {
        let processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        processes.get(uid).cloned()
    }
}

/// The pod loop: one event at a time, so that pods are admitted in the order they were bound.
struct Worker {
    pods: Mirror<Pod>,
    client: Client,
    plugins: Arc<Plugins>,
    cgroups: PathBuf,
    workers: BTreeMap<String, watch::Sender<DesiredState>>,
    processes: Arc<Mutex<Processes>>,
}

impl Worker {
    async fn run(mut self) {
        loop {
            match self.pods.next().await {
                Delta::Synced => {}
                Delta::Set { now, .. } => self.pod_seen(now).await,
                Delta::Gone(pod) => {
                    let uid = pod.uid().unwrap_or_default();
                    if let Some(worker) = self.workers.remove(&uid) {
                        worker.send_replace(DesiredState::Gone);
                    }
                    // Kubelet frees the devices of a pod that is gone from the API at once, whatever its processes do.
                    self.plugins.with_devices(|devices| devices.release(&uid));
                }
            }
        }
    }

    async fn pod_seen(&mut self, pod: Arc<Pod>) {
        let uid = pod.uid().unwrap_or_default();
        let ended = matches!(
            pod.status.as_ref().and_then(|status| status.phase.as_deref()),
            Some("Succeeded" | "Failed")
        );
        let deleted = pod.metadata.deletion_timestamp.is_some();
        match self.workers.get(&uid) {
            Some(worker) if deleted => {
                worker.send_if_modified(|desired| {
                    std::mem::replace(desired, DesiredState::End) == DesiredState::Run
                });
            }
            Some(_) => {}
            None if ended => {}
            None => self.admit(&uid, pod).await,
        }
    }

    async fn admit(&mut self, uid: &str, pod: Arc<Pod>) {
        let processes = match pod::admit(&self.plugins, &pod).await {
            Ok(processes) => processes,
            Err(refusal) => {
                tracing::debug!(pod = pod.name_any(), ?refusal, "pod refused");
                self.plugins.with_devices(|devices| devices.release(uid));
                pod::refuse(&self.client, &pod, &refusal).await;
                return;
            }
        };
        let cgroup = Cgroup::create(&self.cgroups, uid, &processes)
            .inspect_err(|error| tracing::warn!(%error, pod = pod.name_any(), "no control group"))
            .ok();
        let admitted = AdmittedPod { processes: processes.clone(), killed: CancellationToken::new() };
        let killed = admitted.killed.clone();
        let mut all = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(uid.to_owned(), admitted);
        drop(all);
        let deleted = pod.metadata.deletion_timestamp.is_some();
        let (worker, desired) = watch::channel(if deleted { DesiredState::End } else { DesiredState::Run });
        self.workers.insert(uid.to_owned(), worker);
        let worker = PodWorker {
            client: self.client.clone(),
            plugins: Arc::clone(&self.plugins),
            pod,
            processes,
            cgroup,
            desired,
            killed,
        };
        tokio::spawn(worker.run());
    }
}

/// A node's resources other than devices.
const CPUS: u32 = 64;
const MEMORY: &str = "512Gi";
const PODS: u32 = 110;

/// Creates the node.
///
/// # Errors
/// The API server refuses, or is not there.
async fn create_node(client: &Client, name: &str, labels: &BTreeMap<String, String>) -> kube::Result<()> {
    let amounts = json!({"cpu": CPUS.to_string(), "memory": MEMORY, "pods": PODS.to_string()});
    let mut all_labels = labels.clone();
    all_labels.insert("kubernetes.io/hostname".into(), name.to_owned());
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": all_labels},
        "status": {
            "capacity": amounts, "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
            "nodeInfo": {
                "kubeletVersion": KUBERNETES_VERSION, "operatingSystem": "linux", "architecture": std::env::consts::ARCH,
                "bootID": "", "containerRuntimeVersion": "sim://1", "kernelVersion": "", "kubeProxyVersion": "",
                "machineID": "", "osImage": "", "systemUUID": "",
            },
        },
    }))
    .map_err(kube::Error::SerdeError)?;
    let nodes: Api<Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &node).await.map(drop)
}

/// Writes device counts to the node whenever they change.
async fn publish_devices(client: Client, name: String, plugins: Arc<Plugins>) {
    let nodes: Api<Node> = Api::all(client);
    let mut changes = plugins.changes();
    while changes.changed().await.is_ok() {
        let counts = plugins.with_devices(|devices| devices.counts());
        let amounts = |pick: fn(&(usize, usize)) -> usize| -> Map<String, Value> {
            let amounts =
                counts.iter().map(|(resource, count)| (resource.clone(), pick(count).to_string().into()));
            amounts.collect()
        };
        let patch = json!({"status": {"capacity": amounts(|count| count.0), "allocatable": amounts(|count| count.1)}});
        if let Err(error) = nodes.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
            tracing::warn!(%error, node = name, "node status not written");
        }
    }
}

fn make_folder(path: &Path) -> Result<(), KubeletError> {
    std::fs::create_dir_all(path).map_err(|source| KubeletError::Folder { path: path.to_owned(), source })
}

fn listen(socket: &Path) -> Result<UnixListener, KubeletError> {
    let length = socket.as_os_str().as_bytes().len();
    if length > MAX_SOCKET_PATH {
        return Err(KubeletError::PathTooLong { path: socket.to_owned(), length });
    }
    if let Some(folder) = socket.parent() {
        make_folder(folder)?;
    }
    UnixListener::bind(socket).map_err(|source| KubeletError::Folder { path: socket.to_owned(), source })
}

fn serve(services: tonic::transport::server::Router, listener: UnixListener, stop: CancellationToken) {
    tokio::spawn(async move {
        let incoming = UnixListenerStream::new(listener);
        tokio::select! {
            result = services.serve_with_incoming(incoming) => tracing::debug!(?result, "socket closed"),
            () = stop.cancelled() => {}
        }
    });
}
