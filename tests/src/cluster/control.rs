//! The control plane: etcd, kube-apiserver, kube-controller-manager and kube-scheduler in one sandbox.
//! They are started with the settings a test cluster needs and otherwise as they come.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Command;

use super::{ClusterOptions, Node};
use crate::components::Components;
use crate::error::file;
use crate::pki::Authority;
use crate::sandbox::{Process, Program, Sandbox, launch};
use crate::settings::{self, CONTROL_ADDRESS, NAMES_ADDRESS, SCHEDULER_KUBECONFIG, SERVICE_ADDRESS};
use crate::wait::until;
use crate::{Cluster, Daemon, Result, names};

const API_LIMIT: Duration = Duration::from_secs(60);

/// Starts the control plane and waits until its API answers. Returns the forwarder's process.
pub(super) async fn start(
    control: &Sandbox,
    components: &Components,
    authority: &Authority,
    options: &ClusterOptions,
) -> Result<Process> {
    let folder = &options.folder;
    let server = format!("https://127.0.0.1:{}", options.port);
    authority.server(
        "kube-apiserver",
        &["127.0.0.1", CONTROL_ADDRESS, SERVICE_ADDRESS, "localhost", "kubernetes.default.svc"],
    )?;
    authority.client("kubelet-client", "kube-apiserver", Some("system:masters"))?;
    authority.kubeconfig(&folder.join("kubeconfig"), &server, "admin", Some("system:masters"))?;
    let manager = "system:kube-controller-manager";
    authority.kubeconfig(&folder.join("controller-manager.conf"), &server, manager, None)?;
    let scheduler = control.file(SCHEDULER_KUBECONFIG);
    authority.kubeconfig(&scheduler, &server, "system:kube-scheduler", None)?;

    control.run(etcd(components, control)).await?;
    let api = control.run(api_server(components, &folder.join("pki"), options.port)).await?;
    let forwarder = forwarder(options, control)?;
    wait_for_api(control, &api, folder).await?;
    let manager = controller_manager(components, folder);
    control.run(manager).await?;
    control.run(kube_scheduler(components, &scheduler_config(options)?)).await?;
    let listen = format!("--listen={NAMES_ADDRESS}:53");
    control.run(Program::new(names::NAMES, &options.tool, ["names", &listen])).await?;
    Ok(forwarder)
}

/// Waits until the API server is ready.
pub(super) async fn wait_for_api(control: &Sandbox, api: &Daemon, folder: &Path) -> Result<()> {
    let kubeconfig = folder.join("kubeconfig").display().to_string();
    until("kube-apiserver ready", API_LIMIT, async || {
        api.check().map_err(|error| error.to_string())?;
        let probe = ["kubectl", "--kubeconfig", &kubeconfig, "get", "--raw", "/readyz"];
        control.exec(&probe).await.map(drop).map_err(|error| error.to_string())
    })
    .await
}

fn etcd(components: &Components, control: &Sandbox) -> Program {
    let data = control.folder().join("etcd").display().to_string();
    Program::new(
        "etcd",
        components.path("etcd"),
        [
            "--data-dir",
            &data,
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--initial-advertise-peer-urls=http://127.0.0.1:2380",
            "--initial-cluster=default=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
    )
}

fn api_server(components: &Components, pki: &Path, port: u16) -> Program {
    let pki = |name: &str| pki.join(name).display().to_string();
    Program::new(
        "kube-apiserver",
        components.path("kube-apiserver"),
        [
            "--etcd-servers=http://127.0.0.1:2379".to_owned(),
            format!("--secure-port={port}"),
            "--bind-address=0.0.0.0".to_owned(),
            format!("--advertise-address={CONTROL_ADDRESS}"),
            "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
            format!("--client-ca-file={}", pki("ca.crt")),
            format!("--tls-cert-file={}", pki("kube-apiserver.crt")),
            format!("--tls-private-key-file={}", pki("kube-apiserver.key")),
            format!("--service-account-key-file={}", pki("sa.pub")),
            format!("--service-account-signing-key-file={}", pki("sa.key")),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
            format!("--kubelet-certificate-authority={}", pki("ca.crt")),
            format!("--kubelet-client-certificate={}", pki("kubelet-client.crt")),
            format!("--kubelet-client-key={}", pki("kubelet-client.key")),
            // No front proxy exists here; the other components only expect that the setting is published.
            format!("--requestheader-client-ca-file={}", pki("ca.crt")),
            "--requestheader-allowed-names=nobody".to_owned(),
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
            // Without kube-proxy, webhooks are reached at the addresses of their pods.
            "--enable-aggregator-routing=true".to_owned(),
            "--allow-privileged=true".to_owned(),
        ]
        .into_iter()
        .chain(components.kubernetes().api_server_args()),
    )
}

fn controller_manager(components: &Components, folder: &Path) -> Program {
    let kubeconfig = folder.join("controller-manager.conf").display().to_string();
    let pki = |name: &str| folder.join("pki").join(name).display().to_string();
    Program::new(
        "kube-controller-manager",
        components.path("kube-controller-manager"),
        [
            format!("--kubeconfig={kubeconfig}"),
            format!("--authentication-kubeconfig={kubeconfig}"),
            format!("--authorization-kubeconfig={kubeconfig}"),
            format!("--service-account-private-key-file={}", pki("sa.key")),
            format!("--root-ca-file={}", pki("ca.crt")),
            "--use-service-account-credentials=true".to_owned(),
            "--leader-elect=false".to_owned(),
            "--kube-api-qps=200".to_owned(),
            "--kube-api-burst=400".to_owned(),
        ],
    )
}

impl Cluster {
    /// Stops the cluster's kube-scheduler and starts one on a node with that configuration, as kubeadm does on a node of
    /// the control plane.
    ///
    /// # Errors
    /// A file cannot be written, or a program does not stop or start.
    pub async fn move_scheduler(&self, node: &Node, config: &str) -> Result<Daemon> {
        self.program("kube-scheduler")?.stop().await?;
        let theirs = self.control().file(SCHEDULER_KUBECONFIG);
        let text = fs::read_to_string(&theirs).map_err(file("read", &theirs))?;
        let port = self.port();
        let text =
            text.replace(&format!("https://127.0.0.1:{port}"), &format!("https://{CONTROL_ADDRESS}:{port}"));
        let kubeconfig = node.sandbox().file(SCHEDULER_KUBECONFIG);
        if let Some(folder) = kubeconfig.parent() {
            fs::create_dir_all(folder).map_err(file("create", folder))?;
        }
        fs::write(&kubeconfig, text).map_err(file("write", &kubeconfig))?;
        let path = node.sandbox().folder().join("kube-scheduler-config.yaml");
        fs::write(&path, config).map_err(file("write", &path))?;
        let components = Components::locate_or_build()?;
        node.sandbox().run(kube_scheduler(&components, &path)).await
    }
}

fn kube_scheduler(components: &Components, config: &Path) -> Program {
    Program::new(
        "kube-scheduler",
        components.path("kube-scheduler"),
        [
            format!("--config={}", config.display()),
            format!("--authentication-kubeconfig={SCHEDULER_KUBECONFIG}"),
            format!("--authorization-kubeconfig={SCHEDULER_KUBECONFIG}"),
        ],
    )
}

/// kube-scheduler's configuration file: that of the options, or the stock one.
fn scheduler_config(options: &ClusterOptions) -> Result<PathBuf> {
    if let Some(config) = &options.scheduler_config {
        return Ok(config.clone());
    }
    let path = options.folder.join("kube-scheduler-config.yaml");
    fs::write(&path, settings::stock_scheduler().to_string()).map_err(file("write", &path))?;
    Ok(path)
}

/// Starts the program that brings this machine's loopback port to the API server.
fn forwarder(options: &ClusterOptions, control: &Sandbox) -> Result<Process> {
    let log = options.folder.join("control/log/forwarder.log");
    let mut command = Command::new(&options.tool);
    command
        .args(["forward", "--port", &options.port.to_string()])
        .args(["--owner", &control.init_pid().to_string()]);
    launch(command, &log)
}
