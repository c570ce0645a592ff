//! A MIG layout by a label of the node: the whole daemon against the simulated library, an API server and kubelet's
//! list of holders, over real sockets.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;
mod support;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use gantry_api::{GpuNode, GpuNodeStatus, MigDrain, names};
use gantry_plugin::WatchdogTiming;
use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use k8s_openapi::api::core::v1::Node as KubeNode;
use k8s_openapi::api::events::v1::Event;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use sim::Sim;
use support::{Node, Truth, soon};
use tokio_util::sync::CancellationToken;

const NODE: &str = "node-1";
const SMALL: &str = "nvidia.com/mig-1g.5gb";
const LARGE: &str = "nvidia.com/mig-3g.20gb";

const LAYOUTS: &str = r#"
version: v1
mig-configs:
  small: [{devices: all, mig-enabled: true, mig-devices: {"1g.5gb": 7}}]
  large: [{devices: all, mig-enabled: true, mig-devices: {"3g.20gb": 2}}]
  too-large: [{devices: all, mig-enabled: true, mig-devices: {"3g.20gb": 3}}]
  half-large: [{devices: [0, 1, 2, 3], mig-enabled: true, mig-devices: {"3g.20gb": 2}}]
  off: [{devices: all, mig-enabled: false}]
"#;

struct Scene {
    sim: Sim,
    node: Node,
    client: Client,
    truth: Truth,
    layouts: PathBuf,
    daemon: Option<(CancellationToken, tokio::task::JoinHandle<anyhow::Result<()>>)>,
    stop: CancellationToken,
}

impl Scene {
    /// A node with eight A100-40GB, MIG off.
    async fn start() -> Self {
        let stop = CancellationToken::new();
        let api = ApiServer::start(&ApiOptions::default(), stop.clone()).await.unwrap();
        let sim = Sim::of("dgx-a100");
        let node = Node::new(1);
        let kubeconfig = node.directory.path().join("kubeconfig");
        let layouts = node.directory.path().join("layouts.yaml");
        let config = node.directory.path().join("config.yaml");
        std::fs::write(&kubeconfig, api.kubeconfig()).unwrap();
        std::fs::write(&layouts, LAYOUTS).unwrap();
        std::fs::write(&config, "version: v1\nflags: {migStrategy: mixed}\n").unwrap();
        let node = node.with(|args| {
            args.no_cluster = false;
            args.kubeconfig = Some(kubeconfig);
            args.mig_layouts = Some(layouts.clone());
            args.config.config_file = Some(config.display().to_string());
            sim.use_in(args);
        });
        let client = api.client().unwrap();
        let object = serde_json::from_value(json!({"metadata": {"name": NODE}})).unwrap();
        Api::<KubeNode>::all(client.clone()).create(&PostParams::default(), &object).await.unwrap();
        let mut scene = Self { sim, truth: node.truth(), node, client, layouts, daemon: None, stop };
        scene.launch();
        scene
    }

    fn launch(&mut self) {
        let shutdown = CancellationToken::new();
        let run =
            gantry_plugin::run_with(self.node.args().clone(), WatchdogTiming::default(), shutdown.clone());
        self.daemon = Some((shutdown, tokio::spawn(run)));
    }

    async fn end(&mut self) {
        let (shutdown, daemon) = self.daemon.take().unwrap();
        shutdown.cancel();
        soon("the daemon's end", daemon).await.unwrap().unwrap();
    }

    async fn label(&self, layout: Option<&str>) {
        self.set_label(names::MIG_LAYOUT_LABEL, layout).await;
    }

    async fn set_label(&self, name: &str, value: Option<&str>) {
        let api = Api::<KubeNode>::all(self.client.clone());
        let patch = json!({"metadata": {"labels": {name: value}}});
        api.patch_metadata(NODE, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    async fn state(&self, wanted: Option<&str>) {
        let api = Api::<KubeNode>::all(self.client.clone());
        let wait = async {
            loop {
                let node = api.get_metadata(NODE).await.unwrap();
                let labels = node.metadata.labels.unwrap_or_default();
                if labels.get(names::MIG_LAYOUT_STATE_LABEL).map(String::as_str) == wanted {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        soon(&format!("the state {wanted:?}"), wait).await;
    }

    async fn event(&self, reason: &str, part: &str) -> String {
        let events = Api::<Event>::all(self.client.clone());
        let wait = async {
            loop {
                let all = events.list(&ListParams::default()).await.unwrap();
                let notes = all.items.into_iter().filter(|event| event.reason.as_deref() == Some(reason));
                let mut notes = notes.filter_map(|event| event.note);
                if let Some(note) = notes.find(|note| note.contains(part)) {
                    return note;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        soon(&format!("the Event {reason} with {part}"), wait).await
    }

    async fn status(&self, what: &str, holds: impl Fn(&GpuNodeStatus) -> bool) -> GpuNodeStatus {
        support::gpu_node_status(&self.client, NODE, what, holds).await
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Number of healthy devices by resource.
fn offered(status: &GpuNodeStatus) -> BTreeMap<String, usize> {
    let mut offered = BTreeMap::new();
    for device in status.devices.iter().filter(|device| device.health.healthy) {
        *offered.entry(device.resource.to_string()).or_default() += 1;
    }
    offered
}

fn only(resource: &str, count: usize) -> BTreeMap<String, usize> {
    [(resource.to_owned(), count)].into()
}

/// Idle GPUs change at once; one that a pod holds is closed and waits; the pod's device is not touched.
#[tokio::test(flavor = "multi_thread")]
async fn layout_follows_the_label_and_waits_for_holders() {
    let mut scene = Scene::start().await;
    scene.status("eight whole GPUs", |status| offered(status) == only("nvidia.com/gpu", 8)).await;
    scene.label(Some("small")).await;
    let small = scene.status("56 slices", |status| offered(status) == only(SMALL, 56)).await;
    scene.state(Some("success")).await;
    assert_eq!(scene.event("MigLayoutApplied", "small").await, "MIG layout small: in place on 8 GPUs");

    // A pod holds a slice of GPU 3.
    let held = small.devices.iter().find(|device| device.gpu == 3).unwrap().id.to_string();
    scene.truth.set("train", "main", [held.clone()]);
    scene.status("the holder", |status| !status.holders.is_empty()).await;
    scene.label(Some("large")).await;
    let is_changed = |status: &GpuNodeStatus| offered(status) == only(LARGE, 14);
    let waiting = scene.status("the other seven GPUs", is_changed).await;
    scene.state(Some("pending")).await;
    let closed: Vec<_> = waiting.devices.iter().filter(|device| device.gpu == 3).collect();
    assert_eq!(closed.len(), 7);
    for device in closed {
        assert_eq!(device.health.reason.as_deref(), Some("waits for the MIG layout large"));
    }
    let note = scene.event("MigLayoutWaits", "GPU 3: held by").await;
    insta::assert_snapshot!(note, @"MIG layout large: GPUs 0, 1, 2, 4, 5, 6, 7: about to be changed; GPU 3: held by default/train");

    // A new process goes on.
    scene.end().await;
    scene.launch();
    scene.state(Some("pending")).await;
    scene.truth.remove("train");
    scene.status("the last GPU", |status| offered(status) == only(LARGE, 16)).await;
    scene.state(Some("success")).await;

    scene.label(Some("off")).await;
    scene.status("whole GPUs again", |status| offered(status) == only("nvidia.com/gpu", 8)).await;
    scene.state(Some("success")).await;
    scene.label(None).await;
    scene.state(None).await;
    scene.end().await;
}

/// What cannot be made leaves the GPUs as they are, offered.
#[tokio::test(flavor = "multi_thread")]
async fn impossible_layout_fails_with_its_reason() {
    let mut scene = Scene::start().await;
    scene.label(Some("too-large")).await;
    scene.state(Some("failed")).await;
    let note = scene.event("MigLayoutFailed", "too-large").await;
    insta::assert_snapshot!(note, @"MIG layout too-large: GPUs 0, 1, 2, 3, 4, 5, 6, 7: A100-40GB cannot hold 3x 3g.20gb: beside 3g.20gb at 0, 3g.20gb at 4, no placement is left for 3g.20gb, which may start at 0, 4; alone, a GPU holds 2 of it");
    scene.label(Some("smal")).await;
    let note = scene.event("MigLayoutFailed", "smal").await;
    insta::assert_snapshot!(note, @r#"MIG layout smal: there is no layout "smal", did you mean "small"?; there are: half-large, large, off, small, too-large"#);
    scene.status("eight whole GPUs", |status| offered(status) == only("nvidia.com/gpu", 8)).await;

    // The driver refuses: what was there is offered again.
    scene.sim.installed.controller.fail_call("nvmlGpuInstanceCreateComputeInstance", 4, None).unwrap();
    scene.label(Some("small")).await;
    let note = scene.event("MigLayoutFailed", "no permission").await;
    insta::assert_snapshot!(note, @"MIG layout small: GPU 0: nvmlGpuInstanceCreateComputeInstance on GPU 0 failed: no permission; MIG needs CAP_SYS_ADMIN and NVIDIA_MIG_MONITOR_DEVICES=all in a container: label the node gantry.dev/mig=true (manifests/plugin-mig.yaml); the former MIG...");
    scene.status("eight whole GPUs", |status| offered(status) == only("nvidia.com/gpu", 8)).await;
    scene.state(Some("failed")).await;

    std::fs::write(&scene.layouts, "version: v1\nmig-configs: {small: []}\n").unwrap();
    scene.label(Some("large")).await;
    scene.event("MigLayoutFailed", "mig-configs.small: is empty").await;
    scene.end().await;
}

/// Only held GPUs of the layout are listed, only while the label allows it, and with the reason of another value.
#[tokio::test(flavor = "multi_thread")]
async fn drain_label_lists_held_gpus_until_it_is_gone() {
    let mut scene = Scene::start().await;
    scene.label(Some("small")).await;
    let small = scene.status("56 slices", |status| offered(status) == only(SMALL, 56)).await;
    let held = |gpu: u8| small.devices.iter().find(|device| device.gpu == gpu).unwrap().id.to_string();
    scene.truth.set("train", "main", [held(3)]);
    scene.truth.set("eval", "main", [held(5)]);
    scene.status("the holders", |status| status.holders.len() == 2).await;
    scene.set_label(names::MIG_DRAIN_LABEL, Some("yes")).await;
    scene.label(Some("half-large")).await;
    let note = scene.event("MigLayoutWaits", "GPU 3: held by").await;
    insta::assert_snapshot!(note, @r#"MIG layout half-large: gantry.dev/mig-drain is "yes", allowed: "true", "false"; no pod is evicted; GPUs 0, 1, 2: about to be changed; GPU 3: held by default/train"#);
    let waiting = scene.status("the other three GPUs", |status| offered(status).get(LARGE) == Some(&6)).await;
    assert_eq!(waiting.mig_drain, None);

    scene.set_label(names::MIG_DRAIN_LABEL, Some("true")).await;
    let is_drained = |status: &GpuNodeStatus| status.mig_drain.is_some();
    let drained = scene.status("the drain", is_drained).await;
    let gpu = drained.devices.iter().find(|device| device.gpu == 3 && !device.health.healthy);
    assert!(gpu.is_some(), "GPU 3 is not withheld");
    let api = Api::<GpuNode>::all(scene.client.clone());
    let machine = api.get(NODE).await.unwrap().spec.machine;
    let uuid = machine.gpus().iter().find(|gpu| gpu.index == 3).unwrap().uuid.clone().unwrap();
    let wanted = MigDrain { layout: "half-large".to_owned(), gpus: vec![uuid.to_string()] };
    assert_eq!(drained.mig_drain, Some(wanted.clone()), "GPU 5 is not of the layout");

    // A plugin that ends asks for nothing; the next one goes on.
    scene.end().await;
    assert_eq!(api.get(NODE).await.unwrap().status.unwrap().mig_drain, None);
    scene.launch();
    scene.status("the drain again", |status| status.mig_drain == Some(wanted.clone())).await;
    scene.set_label(names::MIG_DRAIN_LABEL, None).await;
    scene.status("no drain", |status| status.mig_drain.is_none()).await;
    scene.set_label(names::MIG_DRAIN_LABEL, Some("true")).await;
    scene.status("the drain", is_drained).await;
    scene.truth.remove("train");
    let large = scene.status("the last GPU", |status| offered(status).get(LARGE) == Some(&8)).await;
    assert_eq!(large.mig_drain, None);
    scene.state(Some("success")).await;
    scene.end().await;
}
