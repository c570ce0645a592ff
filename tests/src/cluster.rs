//! A cluster: a control plane and nodes, each a sandbox of its own, joined by a bridge inside the control plane's.
//! All that it makes lies in one folder; bringing one up there first clears what an earlier one left.

mod cgroups;
mod control;
mod network;
mod node;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::{Deserialize, Serialize};

pub use node::Node;

use crate::components::Components;
use crate::error::file;
use crate::host::{self, eprint_line};
use crate::pki::Authority;
use crate::sandbox::{Process, Sandbox, tail};
use crate::settings::Place;
use crate::wait::until;
use crate::{Daemon, Error, Result, image};

const READY_LIMIT: Duration = Duration::from_secs(90);
const PORT_LIMIT: Duration = Duration::from_secs(10);

/// What a cluster is to be.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// The folder for everything. Its last part names the cluster's cgroups.
    pub folder: PathBuf,
    /// The loopback port on which the API server is reached.
    pub port: u16,
    /// The `gantry-cluster` program, which forwards that port into the cluster's network.
    pub tool: PathBuf,
    /// The nodes.
    pub nodes: Vec<NodeOptions>,
    /// kube-scheduler's configuration file; none for the stock one.
    pub scheduler_config: Option<PathBuf>,
    /// The `gantry` program for pods: the nodes have its image, and a container runtime that gives GPUs to containers.
    pub pods: Option<PathBuf>,
}

impl ClusterOptions {
    /// Three plain nodes in the folder `$GANTRY_CLUSTER_DIR`, or `/tmp/gantry-cluster`.
    #[must_use]
    pub fn new(tool: impl Into<PathBuf>) -> Self {
        Self {
            folder: default_folder(),
            port: 16443,
            tool: tool.into(),
            nodes: (1..=3).map(|number| NodeOptions::new(&format!("node-{number}"))).collect(),
            scheduler_config: None,
            pods: None,
        }
    }
}

/// The default folder of a cluster.
#[must_use]
pub fn default_folder() -> PathBuf {
    std::env::var_os("GANTRY_CLUSTER_DIR").map_or_else(|| "/tmp/gantry-cluster".into(), PathBuf::from)
}

/// What a node is to be.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// The node's name.
    pub name: String,
    /// Labels it registers with.
    pub labels: Vec<(String, String)>,
}

impl NodeOptions {
    /// A node without labels.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), labels: Vec::new() }
    }
}

/// What a later process needs to find a cluster again.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    nodes: Vec<String>,
    port: u16,
    forwarder: Option<Process>,
}

/// A running cluster.
#[derive(Clone)]
pub struct Cluster {
    folder: PathBuf,
    port: u16,
    control: Sandbox,
    nodes: Vec<Node>,
    client: Client,
}

impl Cluster {
    /// Brings a cluster up and waits until all its nodes are ready.
    ///
    /// # Errors
    /// The machine cannot run one, or a part of it does not start; the error names the log to read.
    pub async fn up(options: ClusterOptions) -> Result<Self> {
        host::supported()?;
        host::install_missing()?;
        let components = Components::locate_or_build()?;
        Self::down_in(&options.folder).await?;

        let folder = &options.folder;
        fs::create_dir_all(folder).map_err(file("create", folder))?;
        let names: Vec<String> = options.nodes.iter().map(|node| node.name.clone()).collect();
        let record = |forwarder| Record { nodes: names.clone(), port: options.port, forwarder };
        write_record(folder, &record(None))?;
        let images = folder.join("images.tar");
        image::write(&images, options.pods.as_deref(), &components)?;
        let authority = Authority::create(&folder.join("pki"))?;

        let path = search_path(&components);
        let control = Sandbox::start(&folder.join("control"), &path).await?;
        network::bridge(&control, options.port).await?;
        let forwarder = control::start(&control, &components, &authority, &options).await?;
        write_record(folder, &record(Some(forwarder)))?;
        let client = client_from(&folder.join("kubeconfig")).await?;
        let log = folder.join("control/log/forwarder.log");
        until("the API server's port on this machine", PORT_LIMIT, async || {
            let answer = client.apiserver_version().await.map(drop);
            answer.map_err(|error| format!("{error}; {}", tail(&log)))
        })
        .await?;

        let shared = node::Shared {
            folder,
            port: options.port,
            components: &components,
            authority: &authority,
            control: &control,
            images: &images,
            runtime: options.pods.as_ref().map(|_| options.tool.as_path()),
            path: &path,
        };
        let starting = options
            .nodes
            .iter()
            .enumerate()
            .map(|(index, node)| Node::start(&shared, Place(index + 1), node));
        let nodes = futures::future::try_join_all(starting).await?;
        let cluster = Self { folder: folder.clone(), port: options.port, control, nodes, client };
        cluster.wait_until_ready().await?;
        eprint_line(&format!("cluster of {} nodes is up in {}", cluster.nodes.len(), folder.display()));
        Ok(cluster)
    }

    /// Finds the running cluster of a folder.
    ///
    /// # Errors
    /// [`Error::NoCluster`] where there is none.
    pub async fn attach(folder: &Path) -> Result<Self> {
        let record = read_record(folder).ok_or_else(|| Error::NoCluster(folder.to_path_buf()))?;
        let control =
            Sandbox::attach(&folder.join("control")).map_err(|_| Error::NoCluster(folder.to_path_buf()))?;
        let nodes = record.nodes.iter().map(|name| Node::attach(folder, name)).collect::<Result<_>>()?;
        let client = client_from(&folder.join("kubeconfig")).await?;
        Ok(Self { folder: folder.to_path_buf(), port: record.port, control, nodes, client })
    }

    /// Ends the cluster and removes its folder.
    ///
    /// # Errors
    /// Something of it does not go away.
    pub async fn down(self) -> Result<()> {
        Self::down_in(&self.folder).await
    }

    /// Ends whatever cluster stands in the folder, whole or half, and removes the folder.
    ///
    /// # Errors
    /// Something of it does not go away.
    pub async fn down_in(folder: &Path) -> Result<()> {
        let Some(record) = read_record(folder) else {
            return Ok(());
        };
        if let Some(forwarder) = record.forwarder {
            forwarder.end("forwarder", rustix::process::Signal::KILL, READY_LIMIT).await?;
        }
        for name in record.nodes.iter().map(String::as_str).chain(["control"]) {
            Sandbox::end(&folder.join(name)).await?;
        }
        cgroups::remove(&cgroup_name(folder)).await?;
        fs::remove_dir_all(folder).map_err(file("remove", folder))
    }

    /// A client with an administrator's rights.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// The administrator's kubeconfig, for programs outside the cluster's namespaces.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    /// The API server's port, on this machine's loopback and in the cluster's network.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder of everything.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The control plane's sandbox.
    #[must_use]
    pub fn control(&self) -> &Sandbox {
        &self.control
    }

    /// A program of the control plane: `etcd`, `kube-apiserver`, `kube-controller-manager`, `kube-scheduler`.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn program(&self, name: &str) -> Result<Daemon> {
        self.control.daemon(name)
    }

    /// Starts a program of the control plane again as it was; of kube-apiserver, waits until it answers.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start_again(&self, name: &str) -> Result<Daemon> {
        let daemon = self.control.run_again(name).await?;
        if name == "kube-apiserver" {
            control::wait_for_api(&self.control, &daemon, &self.folder).await?;
        }
        Ok(daemon)
    }

    /// All nodes, in their order.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node with that name.
    ///
    /// # Errors
    /// There is none.
    pub fn node(&self, name: &str) -> Result<&Node> {
        self.nodes.iter().find(|node| node.name() == name).ok_or_else(|| Error::UnknownProgram {
            name: name.to_owned(),
            sandbox: "the cluster".to_owned(),
            known: self.nodes.iter().map(Node::name).collect::<Vec<_>>().join(", "),
        })
    }

    /// Runs kubectl with an administrator's rights and returns what it prints.
    ///
    /// # Errors
    /// kubectl's own.
    pub async fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.kubectl_with_input(args, "").await
    }

    /// The same with a text on standard input, as for `apply -f -`.
    ///
    /// # Errors
    /// kubectl's own.
    pub async fn kubectl_with_input(&self, args: &[&str], input: &str) -> Result<String> {
        let kubeconfig = self.kubeconfig().display().to_string();
        let argv = [&["kubectl", "--kubeconfig", &kubeconfig][..], args].concat();
        self.control.exec_with_input(&argv, input).await
    }

    /// Gives the nodes of a cluster without it Gantry's own image, as chart and manifests name it.
    ///
    /// # Errors
    /// The image cannot be made, or a node does not accept it.
    pub async fn import_gantry(&self, program: &Path) -> Result<()> {
        let archive = self.folder.join("gantry.tar");
        image::write_own(&archive, program)?;
        let images = archive.display().to_string();
        for node in &self.nodes {
            node.exec(&["ctr", "--namespace", "k8s.io", "images", "import", &images]).await?;
        }
        fs::remove_file(&archive).map_err(file("remove", &archive))
    }

    /// Waits until every node is ready for pods: Ready, and the start-up taints gone.
    ///
    /// # Errors
    /// Not in time, or a program that is needed has ended.
    pub async fn wait_until_ready(&self) -> Result<()> {
        let api: Api<NodeObject> = Api::all(self.client());
        for node in &self.nodes {
            until(format!("{} ready", node.name()), READY_LIMIT, async || {
                for name in node.sandbox().programs() {
                    node.sandbox()
                        .daemon(&name)
                        .and_then(|daemon| daemon.check())
                        .map_err(|e| e.to_string())?;
                }
                let object = api.get(node.name()).await.map_err(|error| error.to_string())?;
                readiness(&object)
            })
            .await?;
        }
        Ok(())
    }
}

fn readiness(node: &NodeObject) -> std::result::Result<(), String> {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready");
    match ready {
        Some(condition) if condition.status == "True" => {}
        Some(condition) => return Err(condition.message.clone().unwrap_or_default()),
        None => return Err("no Ready condition yet".to_owned()),
    }
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    match taints.into_iter().find(|taint| taint.key.starts_with("node.kubernetes.io/")) {
        Some(taint) => Err(format!("taint {}", taint.key)),
        None => Ok(()),
    }
}

/// The cluster's name in the cgroup hierarchies.
fn cgroup_name(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn search_path(components: &Components) -> String {
    format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", components.folder().display())
}

async fn client_from(kubeconfig: &Path) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

fn write_record(folder: &Path, record: &Record) -> Result<()> {
    let path = folder.join("cluster.json");
    let text =
        serde_json::to_vec_pretty(record).map_err(|source| Error::Json { path: path.clone(), source })?;
    fs::write(&path, text).map_err(file("write", &path))
}

fn read_record(folder: &Path) -> Option<Record> {
    serde_json::from_slice(&fs::read(folder.join("cluster.json")).ok()?).ok()
}
