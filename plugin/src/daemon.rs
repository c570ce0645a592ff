//! Wires the daemon: starts its tasks in order and stops them in order. Kubelet is served from the first
//! inventory on; pods, PodResources and the choice table may arrive later.

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
use crate::cluster::{Cluster, connect, report_problems};
use crate::handover::{Handover, Listing, SharedHandover};
use crate::inventory::{Diagnoses, Hardware, Inventory, NvmlThread, Settings, State, Timing};
use crate::kubelet::{Kubelet, poll_pod_resources};
use crate::labels::{self, Identity, Labeller};
use crate::nccl::{self, TopologyFiles};
use crate::observe::{self, Observations};
use crate::telemetry::{SamplerSource, SamplerTiming, Samples};
use crate::watchdog::{Watchdog, WatchdogTiming};
use crate::{allocate, cdi, offer, processes};
use gantry_config::Config;
use gantry_config::source::{self, Report};

/// Notes queued for the API server. Notes over the limit appear in the log only.
const MAX_QUEUED_NOTES: usize = 256;

/// Longest delay before NVML is opened and devices are offered to kubelet, while the state of an earlier run is still
/// being read.
const ADOPTION_TIMEOUT: Duration = Duration::from_millis(250);

/// Time from the start until the plugin is registered, the machine is read and the choice table is built.
const STARTUP: Duration = Duration::from_secs(10);

/// Runs the node daemon until `shutdown`: finds the GPUs, serves kubelet, follows grants, publishes the node's
/// status.
///
/// Returns when all tasks have ended, at most about 2 s after `shutdown`. One runtime thread is enough.
///
/// # Errors
/// When the options contradict each other, the NVML thread cannot be started, or a task panicked. A missing
/// driver, kubelet or API server is not an error: the daemon waits for it, and readiness reports it.
pub async fn run(args: Args, shutdown: CancellationToken) -> anyhow::Result<()> {
    run_with(args, WatchdogTiming::default(), shutdown).await
}

/// Returns the memory that the startup freed to the kernel, once the startup is over.
async fn trim_after_startup(shutdown: CancellationToken) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = tokio::time::sleep(STARTUP) => gantry_runtime::memory::trim(),
    }
}

/// [`run`] with other time limits for a driver that hangs or fails.
///
/// # Errors
/// As [`run`].
pub async fn run_with(args: Args, timing: WatchdogTiming, shutdown: CancellationToken) -> anyhow::Result<()> {
    gantry_runtime::memory::use_one_heap();
    let (found, hardware) = Hardware::channel();
    let (publish, inventory) = Inventory::channel();
    let (report, reports) = watch::channel(Report::default());
    let observed = Arc::new(Observations::default());
    observed.count_configurations(reports.clone());
    let node = node_name(&args)?;
    let samples = args.dcgm_metrics.then(|| {
        let interval = Duration::from_secs(args.dcgm_interval.into());
        let samples = Samples::new(SamplerTiming::every(interval));
        observed.sampled_by(samples.clone(), &node);
        samples
    });
    let following = TaskTracker::new();
    let from = args.source(async || connect(args.kubeconfig.as_deref()).await).await?;
    // A configuration selected by a node label may arrive late. Until then probes are served and problems are
    // reported, but no device: with default settings kubelet would allocate whole GPUs that are to be shared.
    let mut tasks = Tasks::new(shutdown.clone());
    tasks.spawn(observe::serve(args.listen, Arc::clone(&observed), shutdown.clone()));
    tasks.spawn(forward_reports(reports.clone(), Arc::clone(&observed), shutdown.clone()));
    if !args.no_cluster {
        let kubeconfig = args.kubeconfig.clone();
        tasks.spawn(report_problems(node, kubeconfig, reports, shutdown.clone()));
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
        fabric_mode: args.fabric_mode,
    };
    let checks = args.health_checks();
    let publish_hardware = found.clone();
    let in_cluster = !args.no_cluster;
    let limit = if in_cluster { ADOPTION_TIMEOUT } else { Duration::ZERO };
    let nvml_thread = NvmlThread::start_after_adoption(&settings, checks, Timing::default(), found, limit)
        .context("starting the NVML thread")?;
    observed.count_xids(nvml_thread.xids());
    if let Some(samples) = samples {
        tasks.spawn(close_with(samples.clone(), nvml_thread.diagnoses(), shutdown.clone()));
        let source = SamplerSource { library: args.nvml_library.clone(), config: config.clone() };
        let (adopted, shutdown) = (nvml_thread.diagnoses(), shutdown.clone());
        tasks.spawn(async move {
            adopted.adopted(limit).await;
            // Whether NVML stays closed is known before the sampler opens it.
            samples.keep_nvml_closed(adopted.now().nvml_closed);
            if let Err(error) = samples.run(source, shutdown).await {
                tracing::error!("no thread can be started, so /metrics/dcgm stays empty: {error}");
            }
        });
    }
    tasks.spawn(trim_after_startup(shutdown.clone()));
    let diagnoses = nvml_thread.diagnoses();
    let watchdog = Watchdog {
        heartbeat: nvml_thread.heartbeat(),
        diagnoses: diagnoses.clone(),
        marker: nvml_thread.marker(),
        publish: publish_hardware,
        observed: Arc::clone(&observed),
        timing,
    };
    tasks.spawn(watchdog.run(shutdown.clone()));
    let adopted = diagnoses.clone();
    let offering = offer::follow(hardware, config.clone(), publish, shutdown.clone());
    tasks.spawn(async move {
        // Waits, so that a GPU in quarantine is not offered as healthy before its stored fault is adopted.
        if in_cluster {
            adopted.adopted(ADOPTION_TIMEOUT).await;
        }
        offering.await;
    });
    observed.diagnoses(diagnoses.clone());
    let served = serve_observed(args, config, inventory, (observed, diagnoses), tasks, shutdown).await;
    drop(nvml_thread);
    served
}

/// [`run`] with an inventory supplied by the caller.
///
/// # Errors
/// As [`run`].
pub async fn serve(
    args: Args,
    inventory: watch::Receiver<Arc<Inventory>>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let (_configure, config) = watch::channel(Arc::new(args.config_now()?.config));
    let observed = Arc::new(Observations::default());
    let mut tasks = Tasks::new(shutdown.clone());
    tasks.spawn(observe::serve(args.listen, Arc::clone(&observed), shutdown.clone()));
    let context = (observed, Diagnoses::none());
    serve_observed(args, config, inventory, context, tasks, shutdown).await
}

/// Runs the serving tasks in addition to `tasks`, until all have ended.
async fn serve_observed(
    args: Args,
    config: watch::Receiver<Arc<Config>>,
    inventory: watch::Receiver<Arc<Inventory>>,
    (observed, diagnoses): (Arc<Observations>, Diagnoses),
    mut tasks: Tasks,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let node = node_name(&args)?;
    observed.configured_by(config.clone());
    let labels = args.labels.labels.place(&config.borrow().gfd);
    if args.no_cluster && labels.is_some_and(labels::Place::needs_cluster) {
        anyhow::bail!(
            "--labels names a target in the cluster, but --no-cluster is set; use --labels=file, which needs no cluster"
        )
    }
    if args.no_cluster && args.mig_layouts.is_some() {
        anyhow::bail!(
            "--mig-layouts needs the cluster, where a label of the node chooses the layout, but --no-cluster is set"
        )
    }
    info!(%node, directory = %args.device_plugin_dir.display(), "starting");
    let (note, notes) = mpsc::channel(MAX_QUEUED_NOTES);
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
        proc_root: args.proc_root.clone(),
        nccl: TopologyFiles::at(&args.nccl_root),
    };
    let started_with = Access::at_start(&config.borrow(), &args.dev_root)?;
    let (access, answers) = watch::channel(Arc::new(started_with));
    tasks.spawn(follow_inventory(
        inventory.clone(),
        Arc::clone(&handover),
        Arc::clone(&observed),
        shutdown.clone(),
    ));
    let (list, listings) = watch::channel(Listing::default());
    tasks.spawn(nccl::maintain(
        writer.nccl.clone(),
        listings,
        inventory.clone(),
        answers.clone(),
        shutdown.clone(),
    ));
    tasks.spawn(poll_pod_resources(
        (args.pod_resources_socket.clone(), args.kubelet_config.is_some()),
        Arc::clone(&handover),
        Arc::clone(&observed),
        list,
        shutdown.clone(),
    ));
    tasks.spawn(processes::watch(args.cgroup_root.clone(), Arc::clone(&handover), shutdown.clone()));
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
    let (pass, passed) = Inventory::channel();
    tasks.spawn(observe::follow_health(
        passed.clone(),
        diagnoses.clone(),
        Arc::clone(&observed),
        shutdown.clone(),
    ));
    if !args.no_cluster {
        let cluster = Cluster {
            node,
            kubeconfig: args.kubeconfig.clone(),
            pod_kubeconfig: args.pod_kubeconfig.clone(),
            kubelet_config: args.kubelet_config.as_deref().map(absolute),
            sys_root: args.sys_root.clone(),
            mig_layouts: args.mig_layouts.clone(),
            inventory: inventory.clone(),
            offered: passed.clone(),
            handover: Arc::clone(&handover),
            observed: Arc::clone(&observed),
            diagnoses,
        };
        tasks.spawn_group(cluster.run(notes, shutdown.clone()));
    }
    let channels = cdi::Channels { inventory, config, passed: pass, access };
    tasks.spawn(writer.gate(channels, Arc::clone(&observed), shutdown.clone()));
    let kubelet = Kubelet {
        directory: absolute(&args.device_plugin_dir),
        socket: args.kubelet_socket().as_deref().map(absolute),
        inventory: passed,
        handover,
        responder: Arc::new(Responder::new(answers, TopologyFiles::at(&args.nccl_root))),
        observed,
    };
    tasks.spawn_group(kubelet.run(shutdown));
    tasks.join_all().await?;
    info!("stopped");
    Ok(())
}

/// Closes NVML of the sampler whenever the NVML thread closes its own.
async fn close_with(samples: Samples, diagnoses: Diagnoses, shutdown: CancellationToken) {
    let mut diagnosis = diagnoses.diagnosis();
    loop {
        let closed = diagnosis.borrow_and_update().nvml_closed;
        samples.keep_nvml_closed(closed);
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = diagnosis.changed() => if changed.is_err() { return },
        }
    }
}

/// Passes the state of the configuration to readiness.
async fn forward_reports(
    mut reports: watch::Receiver<Report>,
    observed: Arc<Observations>,
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
                "no node name: set NODE_NAME through the downward API (fieldPath: spec.nodeName), pass --node-name, or use --no-cluster"
            )
        }
    }
}

/// Passes every inventory to the hand-over and the metrics, and builds the choice table of each new machine in
/// the background.
async fn follow_inventory(
    mut inventories: watch::Receiver<Arc<Inventory>>,
    handover: Arc<SharedHandover>,
    observed: Arc<Observations>,
    shutdown: CancellationToken,
) {
    let mut built_for: Option<Arc<Machine>> = None;
    loop {
        let inventory = Arc::clone(&inventories.borrow_and_update());
        handover.inventory(&inventory);
        // Kubelet gets the new list before the metrics are updated.
        tokio::task::yield_now().await;
        observed.inventory(&inventory);
        let machine = &inventory.machine;
        if inventory.state == State::Ready && built_for.as_ref() != Some(machine) {
            handover.table(None);
            let building = Arc::clone(machine);
            // Building a table for 16 GPUs takes 0.1 s, which would delay kubelet.
            match tokio::task::spawn_blocking(move || Table::build(&building)).await {
                Ok(table) => {
                    debug!(gpus = machine.gpus().len(), "choice table built");
                    handover.table(Some(Arc::new(table)));
                    built_for = Some(Arc::clone(machine));
                }
                Err(error) => {
                    tracing::error!(%error, "cannot build the choice table; device sets are chosen by index");
                }
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = inventories.changed() => if changed.is_err() { return },
        }
    }
}

/// A socket address must be absolute, independent of the working directory.
fn absolute(path: &Path) -> std::path::PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
