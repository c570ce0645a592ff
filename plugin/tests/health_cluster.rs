//! A broken GPU in the cluster, and the state that survives a daemon restart: the whole daemon against the simulated
//! library and an API server over real sockets.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;
mod support;

use std::time::Duration;

use gantry_api::{GpuNode, GpuNodeStatus, names};
use gantry_plugin::WatchdogTiming;
use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use k8s_openapi::api::core::v1::{Node as KubeNode, NodeCondition};
use k8s_openapi::api::events::v1::Event;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use sim::Sim;
use support::door::Door;
use support::probes::a_moment;
use support::{Node, own_address, soon};
use tokio_util::sync::CancellationToken;

const NODE: &str = "node-1";

/// A node with the real daemon, NVML included.
struct Scene {
    sim: Sim,
    node: Node,
    client: Client,
    /// The daemon's connection to the API server.
    door: Door,
    daemon: Option<(CancellationToken, tokio::task::JoinHandle<anyhow::Result<()>>)>,
    stop: CancellationToken,
}

/// Whether a status is that of the present run: the run before leaves its devices, and the reason `Stopped`.
fn is_of_this_run(status: &GpuNodeStatus) -> bool {
    status.conditions.iter().all(|condition| condition.reason != "Stopped")
}

/// Whether the plugin has closed NVML.
fn is_closed(status: &GpuNodeStatus) -> bool {
    status.conditions.iter().any(|known| known.type_ == names::NVML_CLOSED_CONDITION)
}

impl Scene {
    /// Four L4, of which GPU 1 has an Xid 79; then the plugin was asked to close NVML, and shows this status.
    async fn with_closed_nvml() -> (Self, GpuNodeStatus) {
        let mut scene = Self::of("l4-4x-pcie").await;
        scene.start().await;
        scene.sim.installed.controller.raise_xid(1, 79).unwrap();
        scene.account("a fault", |status| !status.faults.is_empty()).await;
        let until = jiff::Timestamp::now() + jiff::SignedDuration::from_mins(5);
        scene.annotate(names::NVML_CLOSED_ANNOTATION, Some(&until.to_string())).await;
        let closed = scene.account("closed NVML", is_closed).await;
        (scene, closed)
    }

    async fn of(machine: &str) -> Self {
        let stop = CancellationToken::new();
        let api = ApiServer::start(&ApiOptions::default(), stop.clone()).await.unwrap();
        let sim = Sim::of(machine);
        let random = sim.installed.layout.proc.join("sys/kernel/random");
        std::fs::create_dir_all(&random).unwrap();
        std::fs::write(random.join("boot_id"), "boot-1\n").unwrap();
        let node = Node::new(1);
        let kubeconfig = node.directory.path().join("kubeconfig");
        let server = api.url();
        let address = own_address();
        let behind = api.kubeconfig().replace(&server, &format!("http://{address}"));
        std::fs::write(&kubeconfig, behind).unwrap();
        let server = server.trim_start_matches("http://").parse().unwrap();
        let door = Door::open(address, server).await;
        let node = node.with(|args| {
            args.no_cluster = false;
            args.kubeconfig = Some(kubeconfig);
            sim.use_in(args);
        });
        let client = api.client().unwrap();
        let nodes = Api::<KubeNode>::all(client.clone());
        let object = serde_json::from_value(json!({"metadata": {"name": NODE}})).unwrap();
        nodes.create(&PostParams::default(), &object).await.unwrap();
        Self { sim, node, client, door, daemon: None, stop }
    }

    fn launch(&mut self) {
        self.launch_with(WatchdogTiming::default());
    }

    fn launch_with(&mut self, timing: WatchdogTiming) {
        let shutdown = CancellationToken::new();
        let run = gantry_plugin::run_with(self.node.args().clone(), timing, shutdown.clone());
        self.daemon = Some((shutdown, tokio::spawn(run)));
    }

    async fn start(&mut self) {
        self.launch();
        self.account("a ready account", |status| is_of_this_run(status) && !status.devices.is_empty()).await;
    }

    async fn stop(&mut self) {
        let (shutdown, daemon) = self.daemon.take().unwrap();
        shutdown.cancel();
        soon("the daemon's end", daemon).await.unwrap().unwrap();
    }

    async fn account(&self, what: &str, holds: impl Fn(&GpuNodeStatus) -> bool) -> GpuNodeStatus {
        support::gpu_node_status(&self.client, NODE, what, holds).await
    }

    async fn condition(&self, status: &str) -> NodeCondition {
        let nodes = Api::<KubeNode>::all(self.client.clone());
        let wait = async {
            loop {
                let node = nodes.get(NODE).await.unwrap();
                let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
                let ours = |condition: &NodeCondition| {
                    condition.type_ == names::GPU_HEALTHY_CONDITION && condition.status == status
                };
                if let Some(condition) = conditions.into_iter().find(ours) {
                    return condition;
                }
                a_moment().await;
            }
        };
        soon("the Node's condition", wait).await
    }

    async fn annotate(&self, name: &str, value: Option<&str>) {
        let api = Api::<GpuNode>::all(self.client.clone());
        let annotate = json!({"metadata": {"annotations": {name: value}}});
        api.patch_metadata(NODE, &PatchParams::default(), &Patch::Merge(annotate)).await.unwrap();
    }

    /// Whether the published status still has a fault of this GPU, read from the status that also has a later fault of
    /// GPU 3.
    async fn holds_against(&self, gpu: usize) -> bool {
        self.sim.installed.controller.raise_xid(3, 79).unwrap();
        let against =
            |status: &GpuNodeStatus, uuid: &str| status.faults.iter().any(|fault| fault.gpu == uuid);
        let account = self.account("a later fault", |status| against(status, self.sim.uuid(3))).await;
        against(&account, self.sim.uuid(gpu))
    }

    async fn event(&self, reason: &str) -> String {
        let events = Api::<Event>::all(self.client.clone());
        let wait = async {
            loop {
                let all = events.list(&ListParams::default()).await.unwrap();
                let mut found = all.items.into_iter().filter(|event| event.reason.as_deref() == Some(reason));
                if let Some(event) = found.next() {
                    let about = event.regarding.unwrap();
                    assert_eq!((about.kind.as_deref(), about.name.as_deref()), (Some("Node"), Some(NODE)));
                    return event.note.unwrap_or_default();
                }
                a_moment().await;
            }
        };
        soon(reason, wait).await
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn unhealthy(status: &GpuNodeStatus) -> Vec<(&str, &str)> {
    let devices = status.devices.iter().filter(|device| !device.health.healthy);
    devices.map(|device| (device.id.as_str(), device.health.reason.as_deref().unwrap_or_default())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn quarantine_is_published_survives_restart_and_is_lifted() {
    let mut scene = Scene::of("l4-4x-pcie").await;
    scene.start().await;
    let healthy = scene.condition("True").await;
    assert_eq!(healthy.reason.as_deref(), Some("GpusHealthy"));

    let gpu = scene.sim.uuid(2).to_owned();
    scene.sim.installed.controller.raise_xid(2, 79).unwrap();
    let reported = scene
        .account("an unhealthy GPU", |status| !unhealthy(status).is_empty() && !status.faults.is_empty())
        .await;
    let reason = "Xid 79: GPU has fallen off the bus";
    assert_eq!(unhealthy(&reported), [(gpu.as_str(), reason)]);
    let fault = reported.faults.first().unwrap();
    assert_eq!((fault.gpu.as_str(), fault.xid, fault.class.as_str()), (gpu.as_str(), 79, "fatal"));
    assert_eq!(fault.boot_id, "boot-1");
    let condition = scene.condition("False").await;
    assert_eq!(condition.reason.as_deref(), Some("GpuUnhealthy"));
    let response = "drain the node and reboot it; replace the board if it repeats";
    assert_eq!(scene.event("GpuUnhealthy").await, format!("{gpu}: {reason}. Response: {response}"));

    scene.stop().await;
    scene.start().await;
    // Served again, with the fault: the first status of the new run already has it.
    let again = scene.account("the second run's account", is_of_this_run).await;
    assert_eq!(unhealthy(&again), [(gpu.as_str(), reason)]);
    assert_eq!(again.faults, reported.faults);

    let api = Api::<GpuNode>::all(scene.client.clone());
    let annotate = json!({"metadata": {"annotations": {names::LIFT_QUARANTINE_ANNOTATION: gpu}}});
    api.patch_metadata(NODE, &PatchParams::default(), &Patch::Merge(annotate)).await.unwrap();
    let lifted = scene
        .account("a healthy GPU", |status| unhealthy(status).is_empty() && status.faults.is_empty())
        .await;
    assert_eq!(lifted.devices.len(), 4);
    assert!(scene.event("GpuQuarantineLifted").await.contains(&gpu));
    let node = api.get_metadata(NODE).await.unwrap();
    let annotations = node.metadata.annotations.unwrap_or_default();
    assert!(!annotations.contains_key(names::LIFT_QUARANTINE_ANNOTATION), "{annotations:?}");
    scene.condition("True").await;
    scene.stop().await;
}

/// A GPU can be reset only while no process has NVML open. Its plugin closes NVML on request, goes on serving, and reads the
/// GPUs again.
#[tokio::test(flavor = "multi_thread")]
async fn nvml_is_closed_on_request_and_opened_again() {
    let (mut scene, closed) = Scene::with_closed_nvml().await;
    assert_eq!((unhealthy(&closed).len(), closed.devices.len()), (1, 4));
    let calls = scene.sim.installed.controller.calls();
    assert_eq!(calls.of("nvmlShutdown"), calls.of("nvmlInit_v2"));
    // Found when it is read again.
    scene.sim.installed.controller.update_gpu(2, |gpu| gpu.lost = true).unwrap();
    scene.annotate(names::NVML_CLOSED_ANNOTATION, None).await;
    let opened = scene.account("open NVML", |status| !is_closed(status)).await;
    assert_eq!(unhealthy(&opened).len(), 2, "{:?}", unhealthy(&opened));
    // The operator confirms the reset.
    let gpu = scene.sim.uuid(1).to_owned();
    scene.annotate(names::LIFT_QUARANTINE_ANNOTATION, Some(&gpu)).await;
    let lifted = scene.account("no fault", |status| status.faults.is_empty()).await;
    let entry = lifted.evidence.iter().find(|entry| entry.gpu == gpu).unwrap();
    assert_eq!(entry.resets.as_ref().map(|resets| resets.count), Some(1));
    scene.stop().await;
}

/// A plugin that ends in the middle of a reset is started again: the next one does not open NVML before the reset is over.
#[tokio::test(flavor = "multi_thread")]
async fn plugin_started_during_reset_keeps_nvml_closed() {
    let (mut scene, _) = Scene::with_closed_nvml().await;
    scene.stop().await;
    let before = scene.sim.installed.controller.calls();
    scene.launch();
    // Longer than a plugin waits for the API server at its start.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let meanwhile = scene.sim.installed.controller.calls().since(&before);
    assert_eq!(meanwhile.total(), 0, "{:?}", meanwhile.by_name());
    scene.annotate(names::NVML_CLOSED_ANNOTATION, None).await;
    let is_read = |status: &GpuNodeStatus| is_of_this_run(status) && !is_closed(status);
    let opened = scene.account("open NVML", is_read).await;
    assert_eq!((unhealthy(&opened).len(), opened.faults.len()), (1, 1), "{:?}", unhealthy(&opened));
    scene.stop().await;
}

/// A GPU fails again before the reset is confirmed: its quarantine stays, and the Event says so.
#[tokio::test(flavor = "multi_thread")]
async fn lift_after_reset_reports_gpu_that_failed_again() {
    let (mut scene, _) = Scene::with_closed_nvml().await;
    scene.annotate(names::NVML_CLOSED_ANNOTATION, None).await;
    scene.account("open NVML", |status| !is_closed(status)).await;
    scene.sim.installed.controller.raise_xid(1, 79).unwrap();
    assert!(scene.holds_against(1).await);
    let gpu = scene.sim.uuid(1).to_owned();
    scene.annotate(names::LIFT_QUARANTINE_ANNOTATION, Some(&gpu)).await;
    let note = scene.event("QuarantineLiftOutdated").await;
    assert!(note.starts_with(&format!("the quarantine of {gpu} stays: ")), "{note}");
    let after = scene.account("a status", |_| true).await;
    assert!(after.faults.iter().any(|fault| fault.gpu == gpu), "{:?}", after.faults);
    scene.stop().await;
}

/// A board that fails again and again: Xids, remapped rows and resets add up over a restart of the plugin, by serial number.
#[tokio::test(flavor = "multi_thread")]
async fn evidence_of_a_board_adds_up_over_restart() {
    let mut scene = Scene::of("dgx-a100").await;
    scene.start().await;
    let uuid = scene.sim.uuid(2).to_owned();
    let fail = |scene: &Scene| {
        let failed = scene.sim.installed.controller.update_gpu(2, |gpu| {
            gpu.remapped.pending = true;
            gpu.remapped.uncorrected += 1;
        });
        failed.unwrap();
        scene.sim.installed.controller.raise_xid(2, 95).unwrap();
    };
    let reset = |scene: &Scene| {
        scene.sim.installed.controller.update_gpu(2, |gpu| gpu.remapped.pending = false).unwrap();
    };
    let quiet = scene.account("a first status", |_| true).await;
    assert_eq!(quiet.evidence, []);
    for round in 1..=2 {
        fail(&scene);
        let broken = scene.account("a fault", |status| !status.faults.is_empty()).await;
        assert_eq!(broken.evidence.len(), 1);
        reset(&scene);
        let healed = |status: &GpuNodeStatus| {
            let resets = status.evidence.first().and_then(|entry| entry.resets.as_ref());
            resets.is_some_and(|resets| resets.count == round)
        };
        let entry = scene.account("a counted reset", healed).await.evidence.remove(0);
        assert_eq!(
            (entry.gpu.as_str(), entry.serial.as_deref()),
            (uuid.as_str(), Some(&*scene.sim.installed.facts.gpus[2].serial))
        );
        let xids: Vec<(u64, u64)> = entry.xids.iter().map(|xid| (xid.xid, xid.count)).collect();
        assert_eq!(xids, [(95, round)]);
        assert_eq!(u64::from(entry.remapped_rows.unwrap().uncorrectable), round);
        scene.stop().await;
        scene.start().await;
    }
    scene.stop().await;
}

/// An operator cordons with kubectl alone. The plugin withholds the GPU, also after a restart, until it is uncordoned.
#[tokio::test(flavor = "multi_thread")]
async fn cordon_by_annotation_holds_over_restart_until_removed() {
    let mut scene = Scene::of("l4-4x-pcie").await;
    scene.start().await;
    let gpu = scene.sim.uuid(2).to_owned();
    let annotation = format!("{}{gpu}", names::CORDON_ANNOTATION_PREFIX);
    scene.annotate(&annotation, Some("the fan fails")).await;
    let cordoned = scene.account("a cordoned GPU", |status| !unhealthy(status).is_empty()).await;
    assert_eq!(unhealthy(&cordoned), [(gpu.as_str(), "cordoned: the fan fails")]);
    let condition = cordoned.conditions.iter().find(|known| known.type_ == names::GPUS_CORDONED_CONDITION);
    let condition = condition.unwrap();
    assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("True", "GpuCordoned"));
    assert_eq!(condition.message, "GPU 2 cordoned: the fan fails");
    assert_eq!(scene.event("GpuCordoned").await, format!("{gpu}: cordoned: the fan fails"));

    scene.annotate(&annotation, None).await;
    let back = scene.account("an uncordoned GPU", |status| unhealthy(status).is_empty()).await;
    assert!(back.conditions.iter().all(|known| known.type_ != names::GPUS_CORDONED_CONDITION));
    assert!(scene.event("GpuUncordoned").await.starts_with(&gpu));

    // Set while the plugin is down: the first status of the next run has it.
    scene.stop().await;
    scene.annotate(&annotation, Some("the fan fails")).await;
    scene.start().await;
    let again = scene.account("the second run's account", is_of_this_run).await;
    assert_eq!(unhealthy(&again), [(gpu.as_str(), "cordoned: the fan fails")]);
    scene.annotate(&annotation, None).await;
    scene.account("an uncordoned GPU", |status| unhealthy(status).is_empty()).await;

    let elsewhere = format!("{}GPU-elsewhere", names::CORDON_ANNOTATION_PREFIX);
    scene.annotate(&elsewhere, Some("typo")).await;
    insta::assert_snapshot!(scene.event("CordonInvalid").await, @"the annotation gantry.dev/cordon-GPU-elsewhere cordons nothing: its name ends in no UUID of this node's GPUs");
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_lift_annotation_writes_event() {
    let mut scene = Scene::of("l4-4x-pcie").await;
    scene.start().await;
    scene.sim.installed.controller.raise_xid(1, 46).unwrap();
    scene.account("a fault", |status| !status.faults.is_empty()).await;
    let api = Api::<GpuNode>::all(scene.client.clone());
    let annotate = json!({"metadata": {"annotations": {names::LIFT_QUARANTINE_ANNOTATION: "gpu 1"}}});
    api.patch_metadata(NODE, &PatchParams::default(), &Patch::Merge(annotate)).await.unwrap();
    let note = scene.event("QuarantineLiftInvalid").await;
    insta::assert_snapshot!(note, @r#"invalid annotation gantry.dev/lift-quarantine: "gpu 1" is not a GPU UUID; write all, or UUIDs such as GPU-5ab8..., separated by commas"#);
    assert!(scene.holds_against(1).await);
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn annotation_older_than_fault_lifts_nothing() {
    let mut scene = Scene::of("l4-4x-pcie").await;
    scene.start().await;
    let api = Api::<GpuNode>::all(scene.client.clone());
    let annotate = json!({"metadata": {"annotations": {names::LIFT_QUARANTINE_ANNOTATION: "all"}}});
    api.patch_metadata(NODE, &PatchParams::default(), &Patch::Merge(annotate)).await.unwrap();
    scene.sim.installed.controller.raise_xid(1, 79).unwrap();
    let note = scene.event("QuarantineLiftOutdated").await;
    insta::assert_snapshot!(note, @r#"the annotation gantry.dev/lift-quarantine="all" was set before the fault and lifts nothing; set it again to lift the quarantine"#);
    assert!(scene.holds_against(1).await);
    let node = api.get_metadata(NODE).await.unwrap();
    assert_eq!(node.metadata.annotations.unwrap_or_default().len(), 0);
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_driver_is_in_status() {
    let mut scene = Scene::of("l4-4x-pcie").await;
    scene.sim.installed.controller.unload_driver().unwrap();
    scene.launch();
    let account = scene.account("an account", |_| true).await;
    let condition = account.conditions.first().unwrap();
    assert_eq!(
        (condition.status.as_str(), condition.reason.as_str()),
        ("False", "NoDevices"),
        "{}",
        condition.message
    );
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_api_server_does_not_delay_shutdown() {
    let mut scene = Scene::of("l4-4x-pcie").await;
    scene.start().await;
    scene.condition("True").await;
    scene.door.block();
    // Three requests are pending: the status, the Event with the condition, the check for a lift.
    scene.sim.installed.controller.raise_xid(2, 79).unwrap();
    scene.door.is_tried(3).await;
    scene.stop().await;
}

/// A GPU breaks while the API server restarts. Its Event is written afterwards, with the time of the fault.
#[tokio::test(flavor = "multi_thread")]
async fn health_event_outlasts_api_server_that_is_away() {
    let mut scene = Scene::of("l4-4x-pcie").await;
    scene.start().await;
    scene.condition("True").await;
    scene.door.shut();
    scene.sim.installed.controller.raise_xid(2, 79).unwrap();
    // Longer than the attempts for an Event that is not kept.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let back = jiff::Timestamp::now();
    scene.door.reopen();
    let gpu = scene.sim.uuid(2);
    assert!(scene.event("GpuUnhealthy").await.starts_with(&format!("{gpu}: Xid 79")));
    let events = Api::<Event>::all(scene.client.clone()).list(&ListParams::default()).await.unwrap();
    let of_fault = events.items.iter().filter(|event| event.reason.as_deref() == Some("GpuUnhealthy"));
    let times: Vec<_> = of_fault.map(|event| event.event_time.as_ref().unwrap().0).collect();
    assert!(matches!(times[..], [at] if at < back), "{times:?}, back at {back}");
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gpu_off_bus_from_start_makes_node_unhealthy() {
    let mut scene = Scene::of("l4-4x-pcie").await;
    scene.sim.installed.controller.lose_gpu(2).unwrap();
    scene.start().await;
    let condition = scene.condition("False").await;
    assert_eq!(condition.reason.as_deref(), Some("GpuUnhealthy"));
    let note = scene.event("GpuUnhealthy").await;
    assert_eq!(note.split(": ").take(2).collect::<Vec<_>>(), ["GPU 2", "GPU lost"], "{note}");
    let account = scene.account("an account", |_| true).await;
    assert_eq!((account.summary.gpus, account.summary.healthy), (4, 3));
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_driver_makes_node_unhealthy() {
    let mut scene = Scene::of("workstation-2x").await;
    scene.launch_with(WatchdogTiming {
        check: Duration::from_millis(50),
        silent_after: Duration::from_secs(2),
        restart_after: Duration::from_secs(3600),
    });
    scene.condition("True").await;
    let controller = &scene.sim.installed.controller;
    let slow = Duration::from_secs(6);
    controller.slow_call("nvmlEventSetWait_v2", slow).unwrap();
    let condition = scene.condition("False").await;
    assert_eq!(condition.reason.as_deref(), Some("GpuUnhealthy"));
    assert!(condition.message.unwrap_or_default().contains(scene.sim.uuid(0)));
    controller.clear_rule("nvmlEventSetWait_v2").unwrap();
    scene.condition("True").await;
    scene.stop().await;
}
