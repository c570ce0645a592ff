use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use gantry_planner::decide::Options;
use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock;

use super::*;
use crate::fixtures::{Cluster, bound, gpu_node, member, plain, pod};

/// What an API server has and received.
#[derive(Default)]
struct Api {
    labels: BTreeMap<String, String>,
    /// The GpuNode of `n`.
    gpu_node: Value,
    /// By name.
    pods: BTreeMap<String, Value>,
    /// Labels `app` of pods, and disruptions allowed.
    budgets: BTreeMap<String, i32>,
    forbids_evictions: bool,
    /// Names.
    evicted: Vec<String>,
    /// Kinds of the objects, reasons and notes.
    events: Vec<(String, String, String)>,
}

impl Api {
    fn respond(&mut self, method: &Method, path: &str, body: &Value) -> (u16, Value) {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let status = |code: u16, message: &str| {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                "message": message, "reason": ""});
            (code, status)
        };
        match (method.as_str(), &parts[..]) {
            ("GET", ["api", "v1", "nodes", "n"]) => {
                let kind = json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"});
                (200, merged(kind, json!({"metadata": {"name": "n", "labels": self.labels}})))
            }
            ("GET", ["apis", "gantry.dev", _, "gpunodes", "n"]) => {
                let kind = json!({"kind": "GpuNode", "apiVersion": "gantry.dev/v1alpha1"});
                (200, merged(kind, self.gpu_node.clone()))
            }
            ("GET", ["api", "v1", "namespaces", "default", "pods", name]) => match self.pods.get(*name) {
                Some(pod) => (200, pod.clone()),
                None => status(404, "not found"),
            },
            ("GET", [.., "default", "poddisruptionbudgets"]) => {
                let items = self.budgets.iter().map(|(app, allowed)| {
                    json!({"metadata": {"name": app, "namespace": "default"},
                        "spec": {"selector": {"matchLabels": {"app": app}}},
                        "status": {"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1,
                            "expectedPods": 1}})
                });
                let kind =
                    json!({"kind": "PodDisruptionBudgetList", "apiVersion": "policy/v1", "metadata": {}});
                (200, merged(kind, json!({"items": items.collect::<Vec<_>>()})))
            }
            ("POST", [.., "eviction"]) if self.forbids_evictions => status(403, "forbidden"),
            ("POST", [.., name, "eviction"]) => {
                self.evicted.push((*name).to_owned());
                if let Some(pod) = self.pods.get_mut(*name) {
                    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
                }
                (201, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}))
            }
            ("POST", [.., "events"]) => {
                let text = |field: &Value| field.as_str().unwrap_or_default().to_owned();
                self.events.push((
                    text(&body["regarding"]["kind"]),
                    text(&body["reason"]),
                    text(&body["note"]),
                ));
                (201, body.clone())
            }
            _ => status(404, path),
        }
    }
}

fn merged(mut kind: Value, rest: Value) -> Value {
    if let (Value::Object(kind), Value::Object(rest)) = (&mut kind, rest) {
        kind.extend(rest);
    }
    kind
}

/// A node of four GPUs with a layout that waits for GPU 1.
struct Scene {
    api: Arc<Mutex<Api>>,
    cluster: Cluster,
    drainer: MigDrainer,
}

fn uuid(gpu: usize) -> String {
    format!("GPU-{gpu}")
}

impl Scene {
    /// Pods, each with its GPUs.
    fn new(pods: &[(Value, &str)], drained: &[usize]) -> Self {
        let cluster = Cluster::new(Options::default());
        cluster.add("n", &plain(4)).add("m", &plain(4));
        let labels = [("nvidia.com/mig.config", "half"), ("gantry.dev/mig-drain", "true")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let mut api = Api { labels: labels.into(), ..Api::default() };
        for (at, (pod, gpus)) in pods.iter().enumerate() {
            let mut given = bound(pod.clone(), "n", u32::try_from(at).unwrap(), Some(*gpus));
            if let Some(own) = pod["metadata"]["annotations"].as_object() {
                given["metadata"]["annotations"].as_object_mut().unwrap().extend(own.clone());
            }
            cluster.pod(&given);
            let name = pod["metadata"]["name"].as_str().unwrap();
            let metadata = json!({"name": name, "namespace": "default", "uid": name, "labels": {"app": name},
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r",
                    "controller": true}]});
            let kind = json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"});
            api.pods.insert(name.to_owned(), merged(kind, json!({ "metadata": metadata })));
        }
        let mut node = gpu_node("n", &plain(4));
        for gpu in 0..4 {
            node["spec"]["machine"]["gpus"][gpu]["uuid"] = uuid(gpu).into();
        }
        for gpu in drained {
            node["status"]["devices"][gpu]["healthy"] = false.into();
        }
        let gpus: Vec<String> = drained.iter().map(|gpu| uuid(*gpu)).collect();
        node["status"]["migDrain"] = json!({"layout": "half", "gpus": gpus});
        api.gpu_node = node;
        let api = Arc::new(Mutex::new(api));
        let (service, mut requests) = mock::pair::<Request<Body>, Response<Body>>();
        let server = Arc::clone(&api);
        tokio::spawn(async move {
            while let Some((request, send)) = requests.next_request().await {
                let (parts, body) = request.into_parts();
                let body = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap_or_default();
                let answer = server.lock().unwrap().respond(&parts.method, parts.uri.path(), &body);
                let text = Body::from(answer.1.to_string().into_bytes());
                send.send_response(Response::builder().status(answer.0).body(text).unwrap());
            }
        });
        let (client, requests) = (Client::new(service, "default"), Arc::<ClusterDrains>::default());
        let drainer = MigDrainer::new(client, Arc::clone(&cluster.store), requests, Arc::default());
        Self { api, cluster, drainer }
    }

    fn change(&self, change: impl FnOnce(&mut Api)) {
        change(&mut self.api.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The pods that are evicted when the watch shows the GpuNode and the attempts of `seconds` were made, by name.
    async fn evicted_after(&mut self, seconds: u64) -> Vec<String> {
        self.change(|api| api.evicted.clear());
        for _ in 0..seconds {
            let node = self.api.lock().unwrap().gpu_node.clone();
            self.drainer.requests.observe(&"n".into(), &serde_json::from_value(node).unwrap());
            self.drainer.drain_due().await;
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let mut evicted = self.api.lock().unwrap().evicted.clone();
        evicted.sort();
        evicted
    }

    fn notes(&self, reason: &str) -> Vec<String> {
        let api = self.api.lock().unwrap();
        let of_nodes = api.events.iter().filter(|(kind, known, _)| kind == "Node" && known == reason);
        of_nodes.map(|(_, _, note)| note.clone()).collect()
    }
}

/// The neighbour on GPU 2 and its pod are not touched, and no pod is evicted twice.
#[tokio::test(start_paused = true)]
async fn requested_gpu_is_drained_and_no_other() {
    let mut scene = Scene::new(&[(pod("a", 1), "1"), (pod("b", 1), "2")], &[1]);
    assert_eq!(scene.evicted_after(100).await, ["a"]);
    assert_eq!(scene.notes("GpuDrained"), ["MIG layout half: GPU 1: pod default/a is evicted"]);
    let api = scene.api.lock().unwrap();
    let of_pod = ["Pod", "GpuDrained", "GPU 1 of n is drained for the MIG layout half"].map(str::to_owned);
    assert!(api.events.contains(&of_pod.into()), "{:?}", api.events);
}

#[tokio::test(start_paused = true)]
async fn budget_holds_drain_back_until_it_allows_it() {
    let mut scene = Scene::new(&[(pod("a", 1), "1")], &[1]);
    scene.change(|api| {
        api.budgets.insert("a".to_owned(), 0);
    });
    assert_eq!(scene.evicted_after(120).await, [""; 0]);
    let why = "MIG layout half: GPU 1: pod default/a stays: the disruption budget default/a allows 0 of 1 disruptions now";
    assert_eq!(scene.notes("MigDrainHeldBack"), [why]);
    scene.change(|api| {
        api.budgets.insert("a".to_owned(), 1);
    });
    assert_eq!(scene.evicted_after(301).await, ["a"]);
}

/// The gang has another member on a GPU that is not drained. A budget for one of them protects both.
#[tokio::test(start_paused = true)]
async fn gang_is_drained_as_a_whole() {
    let gang = |name: &str| member(name, 1, "g", 2);
    let mut scene = Scene::new(&[(gang("g-0"), "1"), (gang("g-1"), "3"), (pod("c", 1), "0")], &[1]);
    scene.change(|api| {
        api.budgets.insert("g-1".to_owned(), 0);
    });
    assert_eq!(scene.evicted_after(60).await, [""; 0]);
    scene.change(|api| api.budgets.clear());
    assert_eq!(scene.evicted_after(301).await, ["g-0", "g-1"]);
}

/// Nothing replaces it, or kubelet starts it again.
#[tokio::test(start_paused = true)]
async fn pod_without_controller_is_not_evicted() {
    let mut scene = Scene::new(&[(pod("a", 1), "1")], &[1]);
    scene.change(|api| api.pods.get_mut("a").unwrap()["metadata"]["ownerReferences"] = json!([]));
    assert_eq!(scene.evicted_after(60).await, [""; 0]);
    let why = "MIG layout half: GPU 1: pod default/a stays: no controller replaces default/a";
    assert_eq!(scene.notes("MigDrainHeldBack"), [why]);
}

/// The GpuNode may be older than the labels, and its plugin may have ended.
#[tokio::test(start_paused = true)]
async fn labels_of_the_node_must_allow_the_drain() {
    for (label, value) in [
        ("gantry.dev/mig-drain", "false"),
        ("gantry.dev/mig-drain", "True"),
        ("nvidia.com/mig.config", "other"),
    ] {
        let mut scene = Scene::new(&[(pod("a", 1), "1")], &[1]);
        scene.change(|api| drop(api.labels.insert(label.to_owned(), value.to_owned())));
        assert_eq!(scene.evicted_after(60).await, [""; 0], "{label}={value}");
        scene.change(|api| drop(api.labels.remove(label)));
        assert_eq!(scene.evicted_after(60).await, [""; 0], "without {label}");
    }
}

/// A replacement could get a GPU that is not withheld yet.
#[tokio::test(start_paused = true)]
async fn gpu_is_withheld_before_it_is_drained() {
    let mut scene = Scene::new(&[(pod("a", 1), "1")], &[1]);
    scene.change(|api| api.gpu_node["status"]["devices"][1]["healthy"] = true.into());
    assert_eq!(scene.evicted_after(60).await, [""; 0]);
    scene.change(|api| api.gpu_node["status"]["devices"][1]["healthy"] = false.into());
    assert_eq!(scene.evicted_after(20).await, ["a"]);
}

/// A new leader continues from the GpuNode; a request that is gone ends the drain.
#[tokio::test(start_paused = true)]
async fn drain_ends_with_its_request() {
    let mut scene = Scene::new(&[(pod("a", 1), "1")], &[1]);
    scene.change(|api| drop(api.gpu_node["status"].as_object_mut().unwrap().remove("migDrain")));
    assert_eq!(scene.evicted_after(60).await, [""; 0]);
    assert!(scene.drainer.requests.all().is_empty());
    // The watch is behind.
    scene.change(|api| api.gpu_node["status"]["migDrain"] = json!({"layout": "half", "gpus": [uuid(1)]}));
    let node = scene.api.lock().unwrap().gpu_node.clone();
    scene.drainer.requests.observe(&"n".into(), &serde_json::from_value(node).unwrap());
    scene.change(|api| api.gpu_node["status"]["migDrain"] = Value::Null);
    scene.drainer.drain_due().await;
    assert_eq!(scene.api.lock().unwrap().evicted, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn missing_right_is_reported_once() {
    let mut scene = Scene::new(&[(pod("a", 1), "1")], &[1]);
    scene.change(|api| api.forbids_evictions = true);
    assert_eq!(scene.evicted_after(120).await, [""; 0]);
    let why = "MIG layout half: GPU 1: the extender lacks the rights of extender-mig-drain.yaml (extender.migDrain of the chart)";
    assert_eq!(scene.notes("MigDrainHeldBack"), [why]);
    scene.change(|api| api.forbids_evictions = false);
    assert_eq!(scene.evicted_after(301).await, ["a"]);
}

/// Pods of one GPU, as many as a shared GPU may have.
#[tokio::test(start_paused = true)]
async fn groups_are_evicted_at_a_limited_rate() {
    let mut scene = Scene::new(&[], &[1]);
    let names: Vec<String> = (0..MAX_GROUPS + 3).map(|at| format!("p-{at:02}")).collect();
    scene.change(|api| {
        let holders = names.iter().map(|name| {
            json!({"namespace": "default", "pod": name, "uid": name, "resource": "nvidia.com/gpu",
                "devices": ["GPU-n-1"], "provenance": "PodResources", "state": "Live"})
        });
        api.gpu_node["status"]["holders"] = holders.collect();
        for name in &names {
            let metadata = json!({"name": name, "namespace": "default", "uid": name, "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]});
            let kind = json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"});
            api.pods.insert(name.clone(), merged(kind, json!({ "metadata": metadata })));
        }
    });
    assert_eq!(scene.evicted_after(50).await, names[..MAX_GROUPS]);
    assert_eq!(scene.evicted_after(30).await, names[MAX_GROUPS..]);
    assert!(scene.cluster.store.snapshot().synced);
}
