//! A node: containerd and kubelet in a sandbox of their own.
//! What a DaemonSet would run on the node is started here too, as processes of the same sandbox.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::{NodeOptions, cgroup_name, cgroups, network};
use crate::components::Components;
use crate::error::file;
use crate::host::RUNC;
use crate::pki::Authority;
use crate::settings::{self, CONTAINERD_SOCKET, CONTROL_ADDRESS, Place};
use crate::wait::until;
use crate::{Daemon, Error, Program, Result, Sandbox, gpu_runtime};

const CONTAINERD_LIMIT: Duration = Duration::from_secs(30);
/// Kubelet's configuration file, in the node's folder.
const KUBELET_CONFIG: &str = "kubelet.json";

/// A node of a cluster.
#[derive(Debug, Clone)]
pub struct Node {
    sandbox: Sandbox,
}

/// What all nodes of a cluster share while it comes up.
pub(super) struct Shared<'a> {
    pub(super) folder: &'a Path,
    pub(super) port: u16,
    pub(super) components: &'a Components,
    pub(super) authority: &'a Authority,
    pub(super) control: &'a Sandbox,
    pub(super) images: &'a Path,
    /// The program that acts as NVIDIA's container runtime, if the nodes have one.
    pub(super) runtime: Option<&'a Path>,
    pub(super) path: &'a str,
}

impl Node {
    /// Starts a node. It is ready some seconds later.
    pub(super) async fn start(shared: &Shared<'_>, place: Place, options: &NodeOptions) -> Result<Self> {
        let name = &options.name;
        let sandbox = Sandbox::start(&shared.folder.join(name), shared.path).await?;
        network::join(shared.control, &sandbox, place).await?;
        let cgroup = cgroups::create(&cgroup_name(shared.folder), name)?;

        let server = format!("https://{CONTROL_ADDRESS}:{}", shared.port);
        let pki = shared.folder.join("pki");
        let address = place.address();
        shared.authority.server(&format!("{name}-serving"), &[name, &address])?;
        let user = format!("system:node:{name}");
        let kubeconfig = sandbox.folder().join("kubelet.conf");
        shared.authority.kubeconfig(&kubeconfig, &server, &user, Some("system:nodes"))?;

        write(&sandbox.file("/etc/cni/net.d/10-gantry.conflist"), &settings::cni(place).to_string())?;
        let containerd_config = sandbox.folder().join("containerd.toml");
        let runtime = match shared.runtime {
            Some(tool) => gpu_runtime::install(sandbox.folder(), tool)?,
            None => RUNC.into(),
        };
        write(&containerd_config, &settings::containerd(&runtime))?;
        let kubelet_config = sandbox.folder().join(KUBELET_CONFIG);
        let kubernetes = shared.components.kubernetes();
        write(&kubelet_config, &settings::kubelet(kubernetes, name, &pki, &cgroup).to_string())?;

        let containerd = Program::new(
            "containerd",
            shared.components.path("containerd"),
            ["--config", &containerd_config.display().to_string(), "--log-level", "info"],
        );
        let node = Self { sandbox };
        let daemon = node.sandbox.run(containerd).await?;
        node.import(&daemon, shared.images).await?;

        let labels: Vec<String> =
            options.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let kubelet = Program::new(
            "kubelet",
            shared.components.path("kubelet"),
            [
                format!("--config={}", kubelet_config.display()),
                format!("--kubeconfig={}", kubeconfig.display()),
                format!("--hostname-override={name}"),
                format!("--node-ip={address}"),
                format!("--node-labels={}", labels.join(",")),
                "--v=2".to_owned(),
            ],
        );
        node.sandbox.run(kubelet).await?;
        Ok(node)
    }

    /// Finds a node that another process started.
    pub(super) fn attach(folder: &Path, name: &str) -> Result<Self> {
        Ok(Self { sandbox: Sandbox::attach(&folder.join(name))? })
    }

    /// The node's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.sandbox.name()
    }

    /// The node's namespaces and programs.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Runs a command on the node and returns what it prints.
    ///
    /// # Errors
    /// The command fails.
    pub async fn exec(&self, argv: &[&str]) -> Result<String> {
        self.sandbox.exec(argv).await
    }

    /// Starts a long-running program on the node, as a DaemonSet's container would run there.
    ///
    /// # Errors
    /// It cannot be started.
    pub async fn run(&self, program: Program) -> Result<Daemon> {
        self.sandbox.run(program).await
    }

    /// A program of the node: `kubelet`, `containerd`, or one that was started with [`Node::run`].
    ///
    /// # Errors
    /// There is none of that name.
    pub fn program(&self, name: &str) -> Result<Daemon> {
        self.sandbox.daemon(name)
    }

    /// Kills a program of the node and starts it again as it was.
    ///
    /// # Errors
    /// It does not end, or does not start.
    pub async fn restart(&self, name: &str) -> Result<Daemon> {
        self.program(name)?.kill().await?;
        self.sandbox.run_again(name).await
    }

    /// Kubelet's configuration file.
    #[must_use]
    pub fn kubelet_config(&self) -> PathBuf {
        self.sandbox.folder().join(KUBELET_CONFIG)
    }

    /// Changes fields of kubelet's configuration file and restarts kubelet.
    ///
    /// # Errors
    /// The file cannot be written, or kubelet does not start.
    pub async fn reconfigure_kubelet<V>(&self, fields: &[(&str, V)]) -> Result<()>
    where
        V: Clone + Into<Value>,
    {
        let path = self.kubelet_config();
        let text = fs::read(&path).map_err(file("read", &path))?;
        let mut config: Value =
            serde_json::from_slice(&text).map_err(|source| Error::Json { path: path.clone(), source })?;
        for (name, value) in fields {
            config[*name] = value.clone().into();
        }
        write(&path, &config.to_string())?;
        self.restart("kubelet").await.map(drop)
    }

    async fn import(&self, containerd: &Daemon, images: &Path) -> Result<()> {
        let images = images.display().to_string();
        until(format!("containerd of {}", self.name()), CONTAINERD_LIMIT, async || {
            containerd.check().map_err(|error| error.to_string())?;
            let version = ["ctr", "--address", CONTAINERD_SOCKET, "version"];
            self.exec(&version).await.map(drop).map_err(|error| error.to_string())
        })
        .await?;
        let import =
            ["ctr", "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io", "images", "import", &images];
        self.exec(&import).await.map(drop)
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(file("create", folder))?;
    }
    fs::write(path, text).map_err(file("write", path))
}
