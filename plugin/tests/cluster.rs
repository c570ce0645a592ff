//! The daemon, a kubelet and an API server over real sockets: from a grant in a Binding to the status of the GpuNode.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::{ContainerGrant, ContainerShare, GpuNode, GpuNodeStatus, Grant, HolderState, Provenance};
use gantry_plugin::inventory::Inventory;
use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use support::{FakeKubelet, Node, Plugin, Truth, soon, uuid};
use tokio_util::sync::CancellationToken;

const NODE: &str = "node-1";

/// A node in a cluster.
struct Scene {
    node: Node,
    client: Client,
    truth: Truth,
    kubelet: FakeKubelet,
    stop: CancellationToken,
}

impl Scene {
    async fn new(gpus: u8) -> Self {
        let stop = CancellationToken::new();
        let api = ApiServer::start(&ApiOptions::default(), stop.clone()).await.unwrap();
        let node = Node::new(gpus);
        let kubeconfig = node.directory.path().join("kubeconfig");
        std::fs::write(&kubeconfig, api.kubeconfig()).unwrap();
        let client = api.client().unwrap();
        let node = node.with(|args| {
            args.no_cluster = false;
            args.kubeconfig = Some(kubeconfig);
        });
        Self { truth: node.truth(), kubelet: node.kubelet(), node, client, stop }
    }

    async fn boot(&mut self) -> Plugin {
        self.node.boot();
        let plugin = self.kubelet.plugin().await;
        self.account("the first account", |_| true).await;
        plugin
    }

    fn pods(&self) -> Api<Pod> {
        Api::default_namespaced(self.client.clone())
    }

    /// Creates a pod with one container and binds it with a grant of these GPUs.
    async fn bind(&self, name: &str, gpus: &[u8]) {
        let uid = self.create(name, gpus.len()).await;
        let grant = Grant {
            version: Grant::VERSION,
            plan: format!("plan-{name}"),
            pod: uid.as_str().into(),
            node: NODE.into(),
            containers: vec![ContainerGrant {
                name: "app".into(),
                resource: "nvidia.com/gpu".into(),
                share: ContainerShare::Devices(gpus.iter().map(|gpu| uuid(*gpu).into()).collect()),
            }],
        };
        self.binding(name, &grant.to_annotation().unwrap()).await;
        // The wait for a grant is not part of these tests.
        self.account("the grant", |status| held(status, name).len() == gpus.len()).await;
    }

    async fn create(&self, name: &str, gpus: usize) -> String {
        let pod = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {"containers": [{
                "name": "app",
                "image": "none",
                "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}},
            }]},
        }));
        let created = self.pods().create(&PostParams::default(), &pod.unwrap()).await;
        created.unwrap().metadata.uid.unwrap()
    }

    async fn binding(&self, name: &str, annotation: &str) {
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "annotations": {"gantry.dev/grant": annotation}},
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
        });
        let request = http::Request::post(format!("/api/v1/namespaces/default/pods/{name}/binding"))
            .header("content-type", "application/json")
            .body(serde_json::to_vec(&binding).unwrap());
        let answer: serde_json::Value = self.client.request(request.unwrap()).await.unwrap();
        assert_eq!(answer["status"], "Success", "{answer}");
    }

    /// Waits until the published status satisfies the condition.
    async fn account(&self, what: &str, wanted: impl Fn(&GpuNodeStatus) -> bool) -> GpuNodeStatus {
        let api = Api::<GpuNode>::all(self.client.clone());
        let reached = async {
            loop {
                if let Some(status) = api.get_opt(NODE).await.unwrap().and_then(|node| node.status)
                    && wanted(&status)
                {
                    return status;
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        soon(what, reached).await
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn ids(gpus: impl IntoIterator<Item = u8>) -> Vec<String> {
    gpus.into_iter().map(uuid).collect()
}

fn texts(ids: &[String]) -> Vec<&str> {
    ids.iter().map(String::as_str).collect()
}

fn held(status: &GpuNodeStatus, pod: &str) -> BTreeSet<String> {
    status
        .holders
        .iter()
        .filter(|holder| holder.pod == pod)
        .flat_map(|holder| holder.devices.iter().map(ToString::to_string))
        .collect()
}

#[tokio::test]
async fn grant_in_binding_reaches_container_and_status() {
    let mut scene = Scene::new(8).await;
    let mut plugin = scene.boot().await;
    scene.bind("job", &[5, 6]).await;
    let all = ids(0..8);
    let chosen = plugin.prefer(&texts(&all), &[], 2).await;
    assert_eq!(chosen, ids([5, 6]).into_iter().collect());
    let answer = plugin.allocate(&[&uuid(6), &uuid(5)]).await.unwrap();
    assert_eq!(answer.envs["NVIDIA_VISIBLE_DEVICES"], ids([6, 5]).join(","), "in the order asked");
    scene.truth.set("job", "app", ids([5, 6]));
    let status = scene
        .account("the truth", |status| {
            status.holders.iter().any(|holder| holder.provenance == Provenance::PodResources)
        })
        .await;
    assert_eq!(held(&status, "job"), chosen);
    let pod = scene.pods().get("job").await.unwrap();
    assert_eq!(status.holders[0].uid.as_ref().map(ToString::to_string), pod.metadata.uid);
    assert_eq!((status.summary.gpus, status.summary.healthy, status.summary.held), (8, 8, 2));
    assert_eq!(status.summary.links, "NV4");
    assert_eq!(status.deviations_total, 0);
}

#[tokio::test]
async fn unplanned_pod_avoids_granted_devices() {
    let mut scene = Scene::new(4).await;
    let mut plugin = scene.boot().await;
    scene.bind("planned", &[0, 1]).await;
    scene.create("stray", 2).await;
    // As with spec.nodeName set by hand: bound without a plan.
    scene.binding("stray", "").await;
    scene.account("both pods", |status| held(status, "planned").len() == 2).await;
    let all = ids(0..4);
    let first = plugin.prefer(&texts(&all), &[], 2).await;
    plugin.allocate(&first.iter().map(String::as_str).collect::<Vec<_>>()).await.unwrap();
    let rest: Vec<String> = all.into_iter().filter(|id| !first.contains(id)).collect();
    let second = plugin.prefer(&texts(&rest), &[], 2).await;
    assert_eq!((first, second), (ids([0, 1]).into_iter().collect(), ids([2, 3]).into_iter().collect()));
}

#[tokio::test]
async fn forged_grant_writes_event() {
    let mut scene = Scene::new(4).await;
    let _plugin = scene.boot().await;
    scene.create("forged", 2).await;
    scene.binding("forged", r#"{"version": 9}"#).await;
    let events = Api::<Event>::default_namespaced(scene.client.clone());
    let reported = async {
        loop {
            let list = events.list(&ListParams::default()).await.unwrap();
            if let Some(event) =
                list.items.into_iter().find(|event| event.reason.as_deref() == Some("GrantRefused"))
            {
                return event;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    let event = soon("an Event", reported).await;
    assert_eq!(event.regarding.unwrap().name.as_deref(), Some("forged"));
    insta::assert_snapshot!(event.note.unwrap(), @"the annotation gantry.dev/grant is ignored: grant is not readable: missing field `plan` at line 1 column 14");
}

#[tokio::test]
async fn missing_driver_is_reported_in_status_and_probes() {
    let mut scene = Scene::new(2).await;
    let address = scene.node.listen();
    let ready = Arc::clone(&scene.node.inventory.borrow());
    scene.node.inventory.send_replace(Arc::new(Inventory::absent("libnvidia-ml.so.1 is not on this node")));
    scene.node.boot();
    let status = scene.account("an account", |_| true).await;
    let condition = &status.conditions[0];
    assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "NoDevices"));
    let (code, text) = get(address, "/readyz").await;
    assert_eq!(code, 503);
    assert_eq!(text, "not ready: no devices: libnvidia-ml.so.1 is not on this node\n");
    assert_eq!(get(address, "/healthz").await.0, 200);
    // Rollouts use this probe: this process has nothing left to do on this node.
    assert_eq!(get(address, "/settledz").await, (200, text));
    // The driver appears.
    scene.node.inventory.send_replace(ready);
    scene.kubelet.registration().await;
    scene
        .account("readiness", |status| status.conditions[0].status == "True" && status.devices.len() == 2)
        .await;
    assert_eq!(get(address, "/readyz").await, (200, "ready\n".to_owned()));
    let (_, metrics) = get(address, "/metrics").await;
    assert!(
        metrics.contains(r#"gantry_plugin_devices{resource="nvidia.com/gpu",state="healthy"} 2"#),
        "{metrics}"
    );
    assert!(metrics.contains("gantry_plugin_registrations_total{"), "{metrics}");
}

#[tokio::test]
async fn no_api_server_serves_by_topology() {
    let mut scene = Scene::new(4).await;
    scene.stop.cancel();
    let address = scene.node.listen();
    scene.node.boot();
    let mut plugin = scene.kubelet.plugin().await;
    let all = ids([1, 2, 3]);
    plugin.comes_to_prefer(&texts(&all), 2, ids([2, 3]).into_iter().collect()).await;
    let reported = async {
        loop {
            let (code, text) = get(address, "/readyz").await;
            if code == 200 && text.contains("degraded: the API server does not respond") {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    soon("readiness to say so", reported).await;
    scene.node.stop().await;
}

#[tokio::test]
async fn force_deleted_pod_is_quarantined_while_running() {
    let mut scene = Scene::new(4).await;
    let mut plugin = scene.boot().await;
    scene.bind("job", &[0, 1]).await;
    let all = ids(0..4);
    plugin.prefer(&texts(&all), &[], 2).await;
    plugin.allocate(&[&uuid(0), &uuid(1)]).await.unwrap();
    let uid = scene.pods().get("job").await.unwrap().metadata.uid.unwrap();
    let group = scene.node.directory.path().join(format!("cgroup/pids/kubepods/pod{uid}"));
    std::fs::create_dir_all(&group).unwrap();
    std::fs::write(group.join("cgroup.procs"), "77\n").unwrap();
    scene.pods().delete("job", &DeleteParams::default().grace_period(0)).await.unwrap();
    let quarantined = |status: &GpuNodeStatus| {
        status
            .holders
            .iter()
            .any(|holder| holder.state == HolderState::Quarantined && holder.devices.len() == 2)
    };
    scene.account("the quarantine", quarantined).await;
    // Kubelet offers them at once, but they are not preferred.
    assert_eq!(plugin.prefer(&texts(&all), &[], 2).await, ids([2, 3]).into_iter().collect());
    // The plugin restarts while the process keeps running.
    scene.node.stop().await;
    scene.node.boot();
    scene.kubelet.registration().await;
    scene
        .account("readiness again", |status| status.conditions[0].status == "True" && quarantined(status))
        .await;
    std::fs::remove_file(group.join("cgroup.procs")).unwrap();
    std::fs::remove_dir(&group).unwrap();
    scene.account("the release", |status| status.holders.is_empty()).await;
}

#[tokio::test]
async fn restarted_plugin_restores_holders() {
    let mut scene = Scene::new(4).await;
    let mut plugin = scene.boot().await;
    scene.bind("job", &[2, 3]).await;
    let all = ids(0..4);
    plugin.prefer(&texts(&all), &[], 2).await;
    plugin.allocate(&[&uuid(2), &uuid(3)]).await.unwrap();
    scene.truth.set("job", "app", ids([2, 3]));
    let running = json!({"status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}});
    let parameters = PatchParams::default();
    scene.pods().patch_status("job", &parameters, &Patch::Merge(running)).await.unwrap();
    scene.node.stop().await;
    let stopped = scene.account("the farewell", |status| status.conditions[0].reason == "Stopped").await;
    assert_eq!(held(&stopped, "job"), ids([2, 3]).into_iter().collect());
    scene.node.boot();
    let mut plugin = scene.kubelet.plugin().await;
    let status = scene.account("readiness again", |status| status.conditions[0].status == "True").await;
    assert_eq!(held(&status, "job"), ids([2, 3]).into_iter().collect());
    scene.bind("next", &[1]).await;
    let answer = plugin.prefer(&texts(&ids(0..2)), &[], 1).await;
    assert_eq!(answer, ids([1]).into_iter().collect());
}

#[tokio::test]
async fn deleted_gpunode_is_written_again_on_change() {
    let mut scene = Scene::new(2).await;
    let _plugin = scene.boot().await;
    let api = Api::<GpuNode>::all(scene.client.clone());
    api.delete(NODE, &DeleteParams::default()).await.unwrap();
    scene.bind("job", &[0]).await;
    let status = scene.account("the account", |status| !held(status, "job").is_empty()).await;
    assert_eq!(status.devices.len(), 2);
    assert_eq!(api.get(NODE).await.unwrap().spec.machine.gpus().len(), 2);
}

#[tokio::test]
async fn first_status_contains_pod_resources() {
    let mut scene = Scene::new(2).await;
    scene.truth.set("static", "app", ids([1]));
    scene.node.boot();
    let status = scene.account("the first account", |_| true).await;
    assert_eq!(held(&status, "static"), ids([1]).into_iter().collect());
}

#[tokio::test]
async fn reregistered_node_owns_its_gpunode_again() {
    let mut scene = Scene::new(2).await;
    let nodes = Api::<k8s_openapi::api::core::v1::Node>::all(scene.client.clone());
    let register = || async {
        let node = serde_json::from_value(json!({"metadata": {"name": NODE}})).unwrap();
        let created = nodes.create(&PostParams::default(), &node).await.unwrap();
        created.metadata.uid.unwrap()
    };
    let api = Api::<GpuNode>::all(scene.client.clone());
    let owner = || async {
        let owners = api.get(NODE).await.unwrap().metadata.owner_references;
        owners.unwrap_or_default().into_iter().next().map(|owner| owner.uid)
    };
    let first = register().await;
    let _plugin = scene.boot().await;
    assert_eq!(owner().await, Some(first));
    nodes.delete(NODE, &DeleteParams::default()).await.unwrap();
    let second = register().await;
    // As the garbage collector does, because the owner is gone.
    api.delete(NODE, &DeleteParams::default()).await.unwrap();
    scene.bind("job", &[0]).await;
    scene.account("the account", |status| !held(status, "job").is_empty()).await;
    assert_eq!(owner().await, Some(second));
    // The same without a change, and without the garbage collector.
    nodes.delete(NODE, &DeleteParams::default()).await.unwrap();
    let third = register().await;
    let owned = async {
        while owner().await.as_ref() != Some(&third) {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    // Checked every 15 seconds.
    let waited = tokio::time::timeout(std::time::Duration::from_secs(90), owned).await;
    waited.expect("the GpuNode goes with the third Node");
}

#[tokio::test]
async fn no_driver_keeps_earlier_quarantine() {
    let mut scene = Scene::new(2).await;
    let mut plugin = scene.boot().await;
    scene.bind("job", &[0]).await;
    plugin.prefer(&texts(&ids(0..2)), &[], 1).await;
    plugin.allocate(&[&uuid(0)]).await.unwrap();
    let uid = scene.pods().get("job").await.unwrap().metadata.uid.unwrap();
    let group = scene.node.directory.path().join(format!("cgroup/pids/kubepods/pod{uid}"));
    std::fs::create_dir_all(&group).unwrap();
    std::fs::write(group.join("cgroup.procs"), "77\n").unwrap();
    let now = DeleteParams::default().grace_period(0);
    scene.pods().delete("job", &now).await.unwrap();
    let quarantined = |status: &GpuNodeStatus| {
        let mut holders = status.holders.iter();
        holders.any(|holder| holder.state == HolderState::Quarantined)
    };
    scene.account("the quarantine", quarantined).await;
    scene.node.stop().await;
    let lost = Inventory::absent("libnvidia-ml.so.1 is not on this node");
    scene.node.inventory.send_replace(Arc::new(lost));
    scene.node.boot();
    // Every status on the way, not only the last.
    let status = scene
        .account("the loss", |status| {
            assert!(quarantined(status), "{status:?}");
            status.conditions[0].reason == "NoDevices"
        })
        .await;
    assert!(quarantined(&status));
}

/// A bare HTTP GET, retried until the server listens.
async fn get(address: std::net::SocketAddr, path: &str) -> (u16, String) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let connect = async {
        loop {
            match tokio::net::TcpStream::connect(address).await {
                Ok(stream) => return stream,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            }
        }
    };
    let mut stream = soon("a listener", connect).await;
    let request = format!("GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    (code, body.to_owned())
}
