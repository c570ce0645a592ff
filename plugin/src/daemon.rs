//! Wires the daemon: what runs, in which order it starts and ends. Serving kubelet waits for nothing but the first inventory:
//! pods, the truth and the choice table may come later.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use gantry_api::NodeName;
use gantry_runtime::supervise::Tasks;
use gantry_topology::Machine;
use gantry_topology::choice::Table;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info};

use crate::allocate::{Access, Responder};
use crate::args::Args;
use crate::cluster::{Cluster, connect, tell_of_problems};
use crate::handover::{Handover, SharedHandover};
use crate::inventory::{Diagnoses, Hardware, Inventory, Owner, Settings, State, Timing};
use crate::kubelet::{Kubelet, poll_pod_resources};
use crate::labels::{self, Identity, Labeller};
use crate::observe::{self, Observed};
use crate::watchdog::{Patience, Watchdog};
use crate::{allocate, cdi, offer, processes};
use gantry_config::Config;
use gantry_config::source::{self, Report};

/// Notes that may wait for the API server; what comes beyond is in the log only.
const NOTES: usize = 256;

/// Longest time that kubelet is not told of the GPUs because faults of an earlier run are not known yet.
const ADOPTION: Duration = Duration::from_millis(250);

/// Runs the node daemon until `shutdown`: finds the GPUs, serves kubelet, follows grants, publishes the node's account.
///
/// It comes back when everything is ended in order, at most about 2 s after `shutdown`. It needs one thread only.
///
/// # Errors
/// When the options contradict each other, a thread cannot be had, or a task has panicked: all ends in order then. A missing driver, kubelet or API server is no error: it
/// is waited for, and readiness says so.
pub async fn run(args: Args, shutdown: CancellationToken) -> anyhow::Result<()> {
    run_with(args, Patience::default(), shutdown).await
}

/// [`run`] with another patience with a driver that hangs or fails.
///
/// # Errors
/// As [`run`].
pub async fn run_with(args: Args, patience: Patience, shutdown: CancellationToken) -> anyhow::Result<()> {
    crate::footprint::use_one_heap();
    let (found, hardware) = Hardware::channel();
    let (publish, inventory) = Inventory::channel();
    let (report, reports) = watch::channel(Report::default());
    let observed = Arc::new(Observed::default());
    observed.count_configurations(reports.clone());
    let node = node_name(&args)?;
    let following = TaskTracker::new();
    let from = args
        .source(async || connect(args.kubeconfig.as_deref()).await)
        .await?;
    // A configuration that a label decides may be long in coming: probes answer meanwhile, and people are told. Nothing is served by
    // defaults instead: kubelet would give out whole what is to be shared.
    let mut tasks = Tasks::new(shutdown.clone());
    tasks.spawn(observe::serve(
        args.listen,
        Arc::clone(&observed),
        shutdown.clone(),
    ));
    tasks.spawn(follow_reports(
        reports.clone(),
        Arc::clone(&observed),
        shutdown.clone(),
    ));
    if !args.no_cluster {
        let kubeconfig = args.kubeconfig.clone();
        tasks.spawn(tell_of_problems(node, kubeconfig, reports, shutdown.clone()));
    }
    let dev = args.dev_root.clone();
    let fits = move |config: &Config| allocate::fits(config, &dev);
    let config = tokio::select! {
        config = source::follow(from, fits, report, &following, shutdown.clone()) => config?,
        () = tasks.join_failed() => None,
    };
    let Some(config) = config else {
        return Ok(tasks.join_all().await?);
    };
    let settings = Settings {
        nvml_library: args.nvml_library.clone(),
        config: config.clone(),
        proc_root: args.proc_root.clone(),
        sys_root: args.sys_root.clone(),
        dev_root: args.dev_root.clone(),
    };
    let checks = args.health_checks();
    let publish_hardware = found.clone();
    let owner = Owner::start(&settings, checks, Timing::default(), found)
        .context("starting the thread that owns NVML")?;
    observed.count_xids(owner.xids());
    tasks.spawn(crate::footprint::trim_after_startup(shutdown.clone()));
    let diagnoses = owner.diagnoses();
    let watchdog = Watchdog {
        heartbeat: owner.heartbeat(),
        diagnoses: diagnoses.clone(),
        marker: owner.marker(),
        publish: publish_hardware,
        observed: Arc::clone(&observed),
        patience,
    };
    tasks.spawn(watchdog.run(shutdown.clone()));
    let known = diagnoses.clone();
    let in_cluster = !args.no_cluster;
    let offering = offer::follow(hardware, config.clone(), publish, shutdown.clone());
    tasks.spawn(async move {
        // A GPU in quarantine must not be offered as healthy for the moment until it is known to be in it.
        if in_cluster {
            known.adopted(ADOPTION).await;
        }
        offering.await;
    });
    observed.diagnoses(diagnoses.clone());
    let served = serve_observed(args, config, inventory, (observed, diagnoses), tasks, shutdown).await;
    drop(owner);
    served
}

/// [`run`] with an inventory from elsewhere.
///
/// # Errors
/// As [`run`].
pub async fn serve(
    args: Args,
    inventory: watch::Receiver<Arc<Inventory>>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let (_configure, config) = watch::channel(Arc::new(args.config_now()?.config));
    let observed = Arc::new(Observed::default());
    let mut tasks = Tasks::new(shutdown.clone());
    tasks.spawn(observe::serve(
        args.listen,
        Arc::clone(&observed),
        shutdown.clone(),
    ));
    let beside = (observed, Diagnoses::of_nobody());
    serve_observed(args, config, inventory, beside, tasks, shutdown).await
}

/// Serves beside `tasks`, and waits for the end of all.
async fn serve_observed(
    args: Args,
    config: watch::Receiver<Arc<Config>>,
    inventory: watch::Receiver<Arc<Inventory>>,
    (observed, diagnoses): (Arc<Observed>, Diagnoses),
    mut tasks: Tasks,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let node = node_name(&args)?;
    let labels = args.labels.labels.place(&config.borrow().gfd);
    if args.no_cluster && labels.is_some_and(labels::Place::needs_cluster) {
        anyhow::bail!(
            "--labels names a place in the cluster, and --no-cluster says that there is none; --labels=file needs none"
        )
    }
    info!(%node, directory = %args.device_plugin_dir.display(), "starting");
    debug!(
        "a client that sends the socket's path as authority is refused by the HTTP/2 layer; kubelet 1.26 and later send localhost"
    );
    let (note, notes) = mpsc::channel(NOTES);
    let handover = Arc::new(SharedHandover::new(
        Handover::new(node.clone()),
        Arc::clone(&observed),
        (!args.no_cluster).then_some(note),
    ));
    let writer = cdi::Writer {
        root: args.cdi_root.clone(),
        kind: args.cdi_kind.clone(),
        dev_root: args.dev_root.clone(),
        sys_root: args.sys_root.clone(),
    };
    let started_with = Access::at_start(&config.borrow(), &args.dev_root)?;
    let (access, answers) = watch::channel(Arc::new(started_with));
    tasks.spawn(follow_inventory(
        inventory.clone(),
        Arc::clone(&handover),
        Arc::clone(&observed),
        shutdown.clone(),
    ));
    tasks.spawn(poll_pod_resources(
        args.pod_resources_socket.clone(),
        Arc::clone(&handover),
        Arc::clone(&observed),
        shutdown.clone(),
    ));
    tasks.spawn(processes::watch(
        args.cgroup_root.clone(),
        Arc::clone(&handover),
        shutdown.clone(),
    ));
    let labeller = Labeller {
        target: args.labels.labels,
        identity: Identity {
            node: node.clone(),
            namespace: args.labels.namespace.clone(),
            pod: args.labels.pod_name.clone(),
        },
        sys_root: args.sys_root.clone(),
        access: labels::Access::Kubeconfig(args.kubeconfig.clone()),
        inventory: inventory.clone(),
        config: config.clone(),
        observed: Arc::clone(&observed),
    };
    tasks.spawn(labeller.run(shutdown.clone()));
    if !args.no_cluster {
        let cluster = Cluster {
            node,
            kubeconfig: args.kubeconfig.clone(),
            inventory: inventory.clone(),
            handover: Arc::clone(&handover),
            observed: Arc::clone(&observed),
            diagnoses,
        };
        tasks.spawn_group(cluster.run(notes, shutdown.clone()));
    }
    let (pass, passed) = Inventory::channel();
    let channels = cdi::Channels {
        inventory,
        config,
        passed: pass,
        access,
    };
    tasks.spawn(writer.gate(channels, Arc::clone(&observed), shutdown.clone()));
    let kubelet = Kubelet {
        directory: absolute(&args.device_plugin_dir),
        socket: args.kubelet_socket().as_deref().map(absolute),
        inventory: passed,
        handover,
        responder: Arc::new(Responder::new(answers)),
        observed,
    };
    tasks.spawn_group(kubelet.run(shutdown));
    tasks.join_all().await?;
    info!("stopped");
    Ok(())
}

/// Tells readiness how the configuration stands.
async fn follow_reports(
    mut reports: watch::Receiver<Report>,
    observed: Arc<Observed>,
    shutdown: CancellationToken,
) {
    loop {
        observed.config(&reports.borrow_and_update());
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = reports.changed() => if changed.is_err() { return },
        }
    }
}

fn node_name(args: &Args) -> anyhow::Result<NodeName> {
    match (&args.node_name, args.no_cluster) {
        (Some(name), _) => Ok(NodeName::from(name.as_str())),
        (None, true) => Ok(NodeName::from("localhost")),
        (None, false) => {
            anyhow::bail!(
                "no node name; set NODE_NAME by the downward API (fieldPath: spec.nodeName), give --node-name, or serve with --no-cluster"
            )
        }
    }
}

/// Tells the hand-over and the metrics of every inventory, and makes the choice table of each new machine on the side.
async fn follow_inventory(
    mut inventories: watch::Receiver<Arc<Inventory>>,
    handover: Arc<SharedHandover>,
    observed: Arc<Observed>,
    shutdown: CancellationToken,
) {
    let mut tabulated: Option<Arc<Machine>> = None;
    loop {
        let inventory = Arc::clone(&inventories.borrow_and_update());
        handover.inventory(&inventory);
        // Kubelet is told before those who watch.
        tokio::task::yield_now().await;
        observed.inventory(&inventory);
        let machine = &inventory.machine;
        if inventory.state == State::Ready && tabulated.as_ref() != Some(machine) {
            handover.table(None);
            let tabulating = Arc::clone(machine);
            // 16 GPUs take a tenth of a second: long enough to be in kubelet's way.
            match tokio::task::spawn_blocking(move || Table::build(&tabulating)).await {
                Ok(table) => {
                    debug!(gpus = machine.gpus().len(), "choice table made");
                    handover.table(Some(Arc::new(table)));
                    tabulated = Some(Arc::clone(machine));
                }
                Err(error) => tracing::error!(%error, "no choice table: sets are chosen by index"),
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = inventories.changed() => if changed.is_err() { return },
        }
    }
}

/// A socket's address must be absolute whatever the working directory.
fn absolute(path: &Path) -> std::path::PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
