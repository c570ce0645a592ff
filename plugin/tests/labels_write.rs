//! Labels written to an API server and to a file: the requests for a given state of both, and for failures. The server is a script that
//! records each request.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "support/log.rs"]
mod log;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gantry_api::{DeviceHealth, DeviceId};
use gantry_config::{Config, Gfd};
use gantry_plugin::inventory::{Absence, Device, Inventory};
use gantry_plugin::labels::{Access, Identity, LabelName, Labeller, Labels, Target, write};
use gantry_plugin::observe::Observations;
use gantry_topology::{Gpu, Machine, MachineParts, PathClass, PathMatrix};
use http::{Request, Response};
use jiff::Timestamp;
use kube::Client;
use kube::client::Body;
use log::Log;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tower_test::mock;

/// A long limit for a machine under load; events come within milliseconds or a few seconds.
const SOON: Duration = Duration::from_secs(60);

/// A recorded request: method, path with query, body.
type Seen = (String, String, Value);

/// An API server that responds by a function, and its recorded requests.
#[derive(Clone)]
struct Server {
    client: Client,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    fn new(answer: impl FnMut(&Seen) -> (u16, Value) + Send + 'static) -> Self {
        let (service, handle) = mock::pair::<Request<Body>, Response<Body>>();
        let seen = Arc::new(Mutex::new(Vec::new()));
        tokio::spawn(serve(handle, answer, Arc::clone(&seen)));
        Self { client: Client::new(service, "gantry-system"), seen }
    }

    fn observe(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    fn writes(&self) -> Vec<Seen> {
        self.observe().into_iter().filter(|(method, ..)| method != "GET").collect()
    }
}

async fn serve(
    mut handle: mock::Handle<Request<Body>, Response<Body>>,
    mut answer: impl FnMut(&Seen) -> (u16, Value),
    seen: Arc<Mutex<Vec<Seen>>>,
) {
    while let Some((request, send)) = handle.next_request().await {
        let (parts, body) = request.into_parts();
        let body = body.collect_bytes().await.unwrap();
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let request = (parts.method.to_string(), parts.uri.to_string(), body);
        let (code, text) = answer(&request);
        seen.lock().unwrap().push(request);
        let text = match text {
            Value::String(plain) => plain.into_bytes(),
            json => serde_json::to_vec(&json).unwrap(),
        };
        send.send_response(Response::builder().status(code).body(Body::from(text)).unwrap());
    }
}

fn status(code: u16, message: &str) -> (u16, Value) {
    let reason = match code {
        404 => "NotFound",
        _ => "",
    };
    let status = json!({"reason": reason, "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code});
    (code, status)
}

fn identity(pod: Option<&str>) -> Identity {
    Identity { node: "node-1".into(), namespace: None, pod: pod.map(str::to_owned) }
}

fn labels(entries: &[(&str, &str)]) -> Labels {
    let entries = entries.iter();
    entries.map(|(name, value)| (LabelName::new("nvidia.com", name), (*value).to_owned())).collect()
}

const OBJECTS: &str = "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/gantry-system/nodefeatures";
const OBJECT: &str =
    "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/gantry-system/nodefeatures/nvidia-features-for-node-1";

/// The object as an API server keeps it.
fn object(labels: &Value) -> Value {
    json!({
        "apiVersion": "nfd.k8s-sigs.io/v1alpha1",
        "kind": "NodeFeature",
        "metadata": {
            "name": "nvidia-features-for-node-1",
            "namespace": "gantry-system",
            "resourceVersion": "41",
            "labels": {"nfd.node.kubernetes.io/node-name": "node-1"},
        },
        "spec": {"features": {}, "labels": labels},
    })
}

#[tokio::test]
async fn node_feature_is_owned_by_daemonset_and_pod() {
    let server = Server::new(|(method, path, body)| match (method.as_str(), path.as_str()) {
        ("GET", path) if path.starts_with("/api/v1/namespaces/gantry-system/pods/plugin-x") => (
            200,
            json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {
                "name": "plugin-x", "uid": "pod-uid", "ownerReferences": [
                    {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "plugin", "uid": "set-uid",
                     "controller": true, "blockOwnerDeletion": true},
                ],
            }}),
        ),
        ("GET", _) => status(404, "not found"),
        _ => (201, body.clone()),
    });
    let labels = labels(&[("gpu.count", "8")]);
    write::to_node_feature(&server.client, &identity(Some("plugin-x")), &labels).await.unwrap();
    let writes = server.writes();
    let (method, path, body) = &writes[0];
    assert_eq!((method.as_str(), path.as_str()), ("POST", format!("{OBJECTS}?").as_str()));
    insta::assert_snapshot!(serde_json::to_string_pretty(body).unwrap());
}

#[tokio::test]
async fn pod_without_daemonset_owns_nothing() {
    let server = Server::new(|(method, path, body)| match method.as_str() {
        "GET" if path.contains("/pods/") => (
            200,
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "job-x", "uid": "u", "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": "j"},
            ]}}),
        ),
        "GET" => status(404, "not found"),
        _ => (201, body.clone()),
    });
    write::to_node_feature(&server.client, &identity(Some("job-x")), &labels(&[])).await.unwrap();
    assert_eq!(server.writes()[0].2["metadata"].get("ownerReferences"), None);
}

#[tokio::test]
async fn unreadable_pod_keeps_owners_of_node_feature() {
    for (code, replaced) in [(429, 0), (500, 0), (503, 0), (403, 1), (404, 1)] {
        let stale = object(&json!({"nvidia.com/gpu.count": "8"}));
        let server = Server::new(move |(method, path, body)| match method.as_str() {
            "GET" if path.contains("/pods/") => status(code, "the pod cannot be read"),
            "GET" => (200, stale.clone()),
            _ => (200, body.clone()),
        });
        let (identity, labels) = (identity(Some("plugin-x")), labels(&[("gpu.count", "4")]));
        let wrote = write::to_node_feature(&server.client, &identity, &labels).await;
        assert_eq!(wrote.is_ok(), replaced > 0, "{code}");
        assert_eq!(server.writes().len(), replaced, "{code}");
    }
}

#[tokio::test]
async fn missing_owner_is_logged_once() {
    let log = Log::default();
    let _here = log.listen();
    let stored = Mutex::new(None);
    let server = Server::new(move |(method, path, body)| {
        let mut stored = stored.lock().unwrap();
        match method.as_str() {
            "GET" if path.contains("/pods/") => status(403, "pods is forbidden"),
            "GET" => stored.clone().map_or_else(|| status(404, "not found"), |object| (200, object)),
            _ => {
                *stored = Some(body.clone());
                (200, body.clone())
            }
        }
    });
    let access = Access::Client(server.client.clone());
    let scene = Scene::start_as(identity(Some("plugin-x")), Target::NodeFeature, access, config(None));
    for gpus in 1..=3 {
        scene.inventory.send_replace(inventory(gpus, true));
        eventually("the object", || server.writes().len() == usize::from(gpus)).await;
    }
    scene.end().await;
    assert_eq!(log.of("the NodeFeature has no owner"), 1);
}

#[tokio::test]
async fn oneshot_in_the_daemon_is_logged_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gfd");
    let once = |oneshot, gpus: usize| {
        let mut config = config(Some(&file));
        config.gfd.oneshot = oneshot;
        config.gfd.sleep_interval = Some(Duration::from_secs(60 * gpus as u64));
        config
    };
    for (oneshot, reported) in [(false, 0), (true, 1)] {
        let log = Log::default();
        let _here = log.listen();
        let access = Access::Kubeconfig(None);
        let scene = Scene::start(Target::File, access, once(oneshot, 1));
        for gpus in 1..=3 {
            scene.config.send_replace(Arc::new(once(oneshot, gpus)));
            scene.inventory.send_replace(inventory(u8::try_from(gpus).unwrap(), true));
            let count = format!("gpu.count={gpus}\n");
            eventually("the file", || std::fs::read_to_string(&file).is_ok_and(|text| text.contains(&count)))
                .await;
        }
        scene.end().await;
        assert_eq!(log.of("oneshot has no effect"), reported, "{oneshot}");
    }
}

#[tokio::test]
async fn changed_node_feature_is_replaced_whole() {
    let stale = object(&json!({"nvidia.com/gpu.count": "8", "nvidia.com/mig-1g.5gb.count": "7"}));
    let server = Server::new(move |(method, _, body)| match method.as_str() {
        "GET" => (200, stale.clone()),
        _ => (200, body.clone()),
    });
    write::to_node_feature(&server.client, &identity(None), &labels(&[("gpu.count", "8")])).await.unwrap();
    let writes = server.writes();
    let (method, path, body) = &writes[0];
    assert_eq!((method.as_str(), path.as_str()), ("PUT", format!("{OBJECT}?").as_str()));
    assert_eq!(body["spec"]["labels"], json!({"nvidia.com/gpu.count": "8"}));
    assert_eq!(body["metadata"]["resourceVersion"], "41");
}

#[tokio::test]
async fn current_node_feature_is_not_written() {
    let server = Server::new(|_| (200, object(&json!({"nvidia.com/gpu.count": "8"}))));
    write::to_node_feature(&server.client, &identity(None), &labels(&[("gpu.count", "8")])).await.unwrap();
    assert_eq!(server.writes(), []);
}

#[tokio::test]
async fn missing_node_feature_discovery_is_explained() {
    // The response of an API server without the CRD, in plain text.
    let server = Server::new(|_| (404, "404 page not found\n".into()));
    let wrote = write::to_node_feature(&server.client, &identity(None), &labels(&[])).await;
    insta::assert_snapshot!(wrote.unwrap_err());
    let server = Server::new(|_| status(403, "nodefeatures is forbidden"));
    let wrote = write::to_node_feature(&server.client, &identity(None), &labels(&[])).await;
    insta::assert_snapshot!(wrote.unwrap_err());
}

#[tokio::test]
async fn node_labels_are_applied_by_own_field_manager() {
    let server =
        Server::new(|_| (200, json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"}})));
    write::to_node(&server.client, &identity(None), &labels(&[("gpu.count", "8")])).await.unwrap();
    let (method, path, body) = server.observe().remove(0);
    assert_eq!(method, "PATCH");
    assert!(path.starts_with("/api/v1/nodes/node-1?"), "{path}");
    assert!(path.contains("fieldManager=gantry-labels") && path.contains("force=true"), "{path}");
    assert_eq!(
        body,
        json!({"apiVersion": "v1", "kind": "Node",
               "metadata": {"name": "node-1", "labels": {"nvidia.com/gpu.count": "8"}}})
    );
}

/// The right to label Nodes is in another manifest than that for NodeFeatures.
#[tokio::test]
async fn forbidden_node_labels_name_their_manifest() {
    let server = Server::new(|_| status(403, "nodes is forbidden"));
    let wrote = write::to_node(&server.client, &identity(None), &labels(&[])).await;
    insta::assert_snapshot!(wrote.unwrap_err(), @"the API server forbids it (nodes is forbidden): apply manifests/labels-node.yaml, which grants the permissions for labels");
}

/// This number of GPUs of one product.
fn inventory(gpus: u8, healthy: bool) -> Arc<Inventory> {
    let uuid = |index: u8| format!("GPU-{index:08x}");
    let devices = (0..gpus)
        .map(|gpu| Device {
            id: DeviceId::from(uuid(gpu)),
            resource: "nvidia.com/gpu".into(),
            gpu,
            nvml_index: Some(gpu),
            uuid: uuid(gpu),
            health: DeviceHealth { healthy, reason: None },
            minor: None,
            numa: None,
            slice: None,
            replica: None,
        })
        .collect();
    let machine = Machine::new(MachineParts {
        gpus: (0..gpus)
            .map(|index| Gpu {
                index,
                uuid: Some(uuid(index).parse().unwrap()),
                model: Some("NVIDIA L4".into()),
                ..Gpu::default()
            })
            .collect(),
        paths: PathMatrix::from_fn(gpus.into(), |_, _| PathClass::Sys),
        ..MachineParts::default()
    });
    Arc::new(Inventory::ready(Arc::new(machine.unwrap()), devices))
}

/// A labeller at work.
struct Scene {
    inventory: watch::Sender<Arc<Inventory>>,
    config: watch::Sender<Arc<Config>>,
    observed: Arc<Observations>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Scene {
    fn start(target: Target, access: Access, config: Config) -> Self {
        Self::start_as(identity(None), target, access, config)
    }

    fn start_as(identity: Identity, target: Target, access: Access, config: Config) -> Self {
        Self::start_with(identity, target, access, config, SOON)
    }

    /// A labeller that accepts after `patience` that a node has no GPU.
    fn start_with(
        identity: Identity,
        target: Target,
        access: Access,
        config: Config,
        patience: Duration,
    ) -> Self {
        let inventory = watch::Sender::new(Arc::new(Inventory::starting()));
        let config = watch::Sender::new(Arc::new(config));
        let observed = Arc::<Observations>::default();
        let stop = CancellationToken::new();
        let labeller = Labeller {
            target,
            identity,
            sys_root: "/nowhere".into(),
            access,
            inventory: inventory.subscribe(),
            config: config.subscribe(),
            observed: Arc::clone(&observed),
        };
        let task = tokio::spawn(labeller.run_with(stop.clone(), patience));
        Self { inventory, config, observed, stop, task }
    }

    async fn end(self) {
        self.stop.cancel();
        tokio::time::timeout(SOON, self.task).await.unwrap().unwrap();
    }
}

fn config(file: Option<&Path>) -> Config {
    Config {
        gfd: Gfd { no_timestamp: true, output_file: file.map(Path::to_owned), ..Gfd::default() },
        ..Config::default()
    }
}

/// Waits until the condition holds.
async fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let wait = async {
        while !so() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(SOON, wait).await.unwrap_or_else(|_| panic!("waited {SOON:?} for {what}"));
}

#[tokio::test]
async fn labels_file_follows_changes_and_stays_at_end() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["gfd", "other"].map(|name| folder.path().join(name));
    let holds = |path: &Path, line: &str| std::fs::read_to_string(path).unwrap_or_default().contains(line);
    let scene = Scene::start(Target::File, Access::Kubeconfig(None), config(Some(&first)));
    scene.inventory.send_replace(inventory(2, true));
    eventually("labels", || holds(&first, "nvidia.com/gpu.count=2\n")).await;
    scene.inventory.send_replace(inventory(2, false));
    eventually("a change", || holds(&first, "gantry.dev/gpu.healthy=0\n")).await;
    scene.config.send_replace(Arc::new(config(Some(&second))));
    eventually("the other file", || holds(&second, "nvidia.com/gpu.count=2\n")).await;
    eventually("the former file to go", || !first.exists()).await;
    let observed = Arc::clone(&scene.observed);
    eventually("readiness to say so", || observed.readiness().labels == Some(true)).await;
    scene.end().await;
    assert!(second.exists());
}

#[tokio::test]
async fn labels_move_between_file_and_object_with_config() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gfd");
    let stored = Arc::new(Mutex::new(None));
    let kept = Arc::clone(&stored);
    let refusals = Arc::new(AtomicUsize::new(2));
    let refused = Arc::clone(&refusals);
    let server = Server::new(move |(method, _, body)| {
        let mut stored = kept.lock().unwrap();
        match (method.as_str(), stored.clone()) {
            ("GET", Some(object)) => (200, object),
            ("GET", None) => status(404, "not found"),
            ("DELETE", _)
                if refused
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                    .is_ok() =>
            {
                status(500, "etcd is away")
            }
            ("DELETE", _) => {
                *stored = None;
                (200, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}))
            }
            _ => {
                *stored = Some(body.clone());
                (201, body.clone())
            }
        }
    });
    let stands = || stored.lock().unwrap().is_some();
    let by = |use_node_feature_api| {
        let mut config = config(Some(&path));
        config.gfd.use_node_feature_api = use_node_feature_api;
        config
    };
    let scene = Scene::start(Target::Gfd, Access::Client(server.client.clone()), by(false));
    scene.inventory.send_replace(inventory(2, true));
    eventually("the file", || path.exists()).await;
    assert_eq!(server.observe(), []);
    for _ in 0..2 {
        scene.config.send_replace(Arc::new(by(true)));
        eventually("the object alone", || stands() && !path.exists()).await;
        assert!(server.writes()[0].1.contains("nodefeatures"), "{:?}", server.writes());
        // The object is deleted although the API server refuses at first; otherwise its labels would be published forever.
        scene.config.send_replace(Arc::new(by(false)));
        eventually("the file alone", || path.exists() && !stands()).await;
    }
    assert_eq!(refusals.load(Ordering::Relaxed), 0);
    scene.end().await;
    assert!(path.exists());
}

#[tokio::test]
async fn refused_object_is_not_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gfd");
    let server = Server::new(|_| status(403, "nodefeatures is forbidden"));
    let mut first = config(Some(&path));
    first.gfd.use_node_feature_api = true;
    let mut second = config(Some(&path));
    second.gfd.use_node_feature_api = false;
    let scene = Scene::start(Target::Gfd, Access::Client(server.client.clone()), first);
    scene.inventory.send_replace(inventory(2, true));
    let observed = Arc::clone(&scene.observed);
    eventually("the failure", || observed.readiness().labels == Some(false)).await;
    scene.config.send_replace(Arc::new(second));
    eventually("the file", || observed.readiness().labels == Some(true)).await;
    assert!(path.exists());
    assert!(server.writes().is_empty(), "{:?}", server.writes());
    scene.end().await;
}

#[tokio::test]
async fn timestamp_is_of_config_even_if_writes_failed() {
    let folder = tempfile::tempdir().unwrap();
    let in_the_way = folder.path().join("file");
    std::fs::write(&in_the_way, "").unwrap();
    let path = folder.path().join("gfd");
    let into = |file: &Path| {
        let mut config = config(Some(file));
        config.gfd.no_timestamp = false;
        config
    };
    // No file can be made below a file.
    let scene = Scene::start(Target::File, Access::Kubeconfig(None), into(&in_the_way.join("gfd")));
    scene.inventory.send_replace(inventory(2, true));
    let observed = Arc::clone(&scene.observed);
    eventually("the failure", || observed.readiness().labels == Some(false)).await;
    let failed = Timestamp::now().as_second();
    eventually("the next second", || Timestamp::now().as_second() > failed).await;
    let changed = Timestamp::now().as_second();
    scene.config.send_replace(Arc::new(into(&path)));
    eventually("the file", || path.exists()).await;
    let text = std::fs::read_to_string(&path).unwrap();
    let mut lines = text.lines();
    let since = lines.find_map(|line| line.strip_prefix("nvidia.com/gfd.timestamp="));
    let since: i64 = since.unwrap().parse().unwrap();
    assert!(since >= changed, "{since} is of before {changed}");
    scene.end().await;
}

#[tokio::test]
async fn refused_labels_are_logged_and_retried() {
    let away = Arc::new(AtomicBool::new(true));
    let is_away = Arc::clone(&away);
    let server = Server::new(move |_| match is_away.load(Ordering::Relaxed) {
        true => status(500, "etcd is away"),
        false => (200, json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"}})),
    });
    let scene = Scene::start(Target::Node, Access::Client(server.client.clone()), config(None));
    scene.inventory.send_replace(inventory(1, true));
    let observed = Arc::clone(&scene.observed);
    eventually("the failure", || observed.readiness().labels == Some(false)).await;
    assert!(observed.readiness().degraded().iter().any(|text| text.contains("labels")));
    away.store(false, Ordering::Relaxed);
    eventually("the next attempt", || observed.readiness().labels == Some(true)).await;
    scene.end().await;
    assert!(server.writes().len() >= 2);
}

#[tokio::test]
async fn nothing_is_written_before_gpus_are_known_or_if_off() {
    let server = Server::new(|_| status(500, "nobody should ask"));
    let scene = Scene::start(Target::Node, Access::Client(server.client.clone()), config(None));
    scene.inventory.send_replace(Arc::new(Inventory::absent("no driver")));
    scene.end().await;
    let off = Scene::start(Target::Off, Access::Client(server.client.clone()), config(None));
    tokio::time::timeout(SOON, off.task).await.unwrap().unwrap();
    assert_eq!(server.observe(), []);
}

/// The labels of an earlier run, which stay until the GPUs are known.
const EARLIER: &str = "nvidia.com/gpu.count=8\n";

#[tokio::test]
async fn node_without_gpus_loses_labels_after_a_while() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gfd");
    std::fs::write(&file, EARLIER).unwrap();
    let patience = Duration::from_millis(1500);
    let started = Instant::now();
    let scene = Scene::start_with(
        identity(None),
        Target::File,
        Access::Kubeconfig(None),
        config(Some(&file)),
        patience,
    );
    let none = Arc::new(Inventory::absent(Absence::NoGpu));
    scene.inventory.send_replace(none);
    eventually("the labels to go", || std::fs::read_to_string(&file).unwrap().is_empty()).await;
    assert!(started.elapsed() >= patience);
    scene.inventory.send_replace(inventory(2, true));
    eventually("labels", || std::fs::read_to_string(&file).unwrap().contains("nvidia.com/gpu.count=2\n"))
        .await;
    scene.end().await;
}

#[tokio::test]
async fn short_driver_absence_keeps_labels() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gfd");
    std::fs::write(&file, EARLIER).unwrap();
    let scene = Scene::start_with(
        identity(None),
        Target::File,
        Access::Kubeconfig(None),
        config(Some(&file)),
        Duration::from_millis(2500),
    );
    // Away for longer than the patience; then there without GPUs, away again, and there without GPUs: each for less.
    for (state, millis) in [
        (Absence::from("no driver"), 4000),
        (Absence::NoGpu, 1500),
        (Absence::from("no driver"), 1500),
        (Absence::NoGpu, 1500),
    ] {
        let inventory = Inventory::absent(state.clone());
        scene.inventory.send_replace(Arc::new(inventory));
        tokio::time::sleep(Duration::from_millis(millis)).await;
        assert_eq!(std::fs::read_to_string(&file).unwrap(), EARLIER, "{state}");
    }
    scene.end().await;
}
