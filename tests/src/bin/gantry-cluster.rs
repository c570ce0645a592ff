//! `gantry-cluster`: brings a real Kubernetes up on this machine, for tests and to play with, and takes it down.
//! A thin layer of arguments over the library.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use gantry_api::names::GPU_RESOURCE;
use gantry_e2e::{Cluster, ClusterOptions, NodeOptions, gantry};

/// A real Kubernetes on this machine: control plane, kubelets and containerd in namespaces of their own.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The folder that holds everything of the cluster.
    #[arg(long, global = true, env = "GANTRY_CLUSTER_DIR", default_value = "/tmp/gantry-cluster")]
    folder: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Bring a cluster up and leave it running.
    Up {
        /// The number of nodes.
        #[arg(long, default_value_t = 3)]
        nodes: usize,
        /// The loopback port of the API server.
        #[arg(long, default_value_t = 16443)]
        port: u16,
        /// A machine file for each node's simulated GPUs, in the nodes' order; three unlike ones if none is given.
        #[arg(long, value_name = "FILE")]
        machine: Vec<PathBuf>,
        /// Stock Kubernetes, without GPUs and without the project's daemons.
        #[arg(long, conflicts_with = "machine")]
        plain: bool,
    },
    /// End the cluster and remove all of it.
    Down,
    /// Show what runs.
    Status,
    /// Run kubectl against the cluster.
    Kubectl {
        /// kubectl's arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run a command on a node, or in `control`.
    Exec {
        /// The node's name.
        node: String,
        /// The command.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<String>,
    },
    /// Carry a loopback port into the cluster's network (started by `up`).
    #[command(hide = true)]
    Forward {
        /// The port, the same on both sides.
        #[arg(long)]
        port: u16,
        /// The process whose network namespace is used; the forwarder ends with it.
        #[arg(long)]
        owner: i32,
    },
    /// Act as the cluster's DNS (started by `up`).
    #[command(hide = true)]
    Names {
        /// Where to listen.
        #[arg(long)]
        listen: SocketAddr,
    },
    /// Act as NVIDIA's container runtime (started by containerd).
    #[command(hide = true)]
    Runtime {
        /// The folder of the node's simulated GPUs.
        #[arg(long)]
        hardware: PathBuf,
        /// Arguments of runc.
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Play a Service in front of several daemons (started by scenarios).
    #[command(hide = true)]
    Service {
        /// Where to listen.
        #[arg(long)]
        listen: SocketAddr,
        /// Where a backend listens; it is asked for /readyz.
        #[arg(long)]
        backend: Vec<SocketAddr>,
    },
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Command::Forward { port, owner } = &arguments.command {
        return gantry_e2e::forward(*port, *owner).context("forwarding the API server's port");
    }
    if let Command::Service { listen, backend } = &arguments.command {
        return gantry_e2e::service::serve(*listen, backend).context("playing a Service");
    }
    if let Command::Names { listen } = &arguments.command {
        return gantry_e2e::names::serve(*listen).context("acting as DNS");
    }
    if let Command::Runtime { hardware, args } = &arguments.command {
        return gantry_e2e::gpu_runtime::run(hardware, args).context("acting as a container runtime");
    }
    tokio::runtime::Runtime::new()?.block_on(run(arguments))
}

async fn run(arguments: Arguments) -> Result<()> {
    let folder = arguments.folder;
    match arguments.command {
        Command::Up { nodes, port, machine, plain } => {
            let mut options = ClusterOptions::new(std::env::current_exe()?);
            options.nodes = (1..=nodes).map(|number| NodeOptions::new(&format!("node-{number}"))).collect();
            options.folder = folder;
            options.port = port;
            let cluster = if plain {
                Cluster::up(options).await?
            } else {
                let binary = gantry::binary().context("no gantry program here: cargo build -p gantry")?;
                let path = std::env::temp_dir().join("gantry-cluster-scheduler.yaml");
                gantry::write_scheduler_config(&binary, GPU_RESOURCE, &path)?;
                options.scheduler_config = Some(path);
                let cluster = Cluster::up(options).await?;
                cluster.install(&gantry::manifests()).await?;
                let machines = if machine.is_empty() { gantry::unlike_machines() } else { machine };
                cluster.start_gantry(&binary, &machines).await?;
                cluster
            };
            say(&status(&cluster).await?);
        }
        Command::Down => Cluster::down_in(&folder).await?,
        Command::Status => say(&status(&Cluster::attach(&folder).await?).await?),
        Command::Kubectl { args } => {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            say(&Cluster::attach(&folder).await?.kubectl(&args).await?);
        }
        Command::Exec { node, command } => {
            let cluster = Cluster::attach(&folder).await?;
            let sandbox = if node == "control" { cluster.control() } else { cluster.node(&node)?.sandbox() };
            let command: Vec<&str> = command.iter().map(String::as_str).collect();
            say(&sandbox.exec(&command).await?);
        }
        Command::Forward { .. }
        | Command::Service { .. }
        | Command::Names { .. }
        | Command::Runtime { .. } => {}
    }
    Ok(())
}

async fn status(cluster: &Cluster) -> Result<String> {
    let mut text = format!("kubeconfig: {}\n", cluster.kubeconfig().display());
    text += &format!("try:        KUBECONFIG={} kubectl get nodes\n", cluster.kubeconfig().display());
    text += "or:         cargo xtask cluster kubectl get nodes\n\n";
    let nodes = cluster.nodes().iter().map(gantry_e2e::cluster::Node::sandbox);
    for sandbox in std::iter::once(cluster.control()).chain(nodes) {
        text += &format!("{} (logs in {})\n", sandbox.name(), sandbox.folder().join("log").display());
        for name in sandbox.programs() {
            let state = if sandbox.daemon(&name)?.is_running() { "running" } else { "ended" };
            text += &format!("  {name}: {state}\n");
        }
    }
    Ok(text + "\n" + &cluster.kubectl(&["get", "nodes", "-o", "wide"]).await?)
}

#[allow(clippy::print_stdout, reason = "what the command was asked for")]
fn say(text: &str) {
    print!("{text}");
}
