//! The memory of the extender, in a process of its own: the daemon with its HTTP server, against an API server that
//! has the fattest object of each field, alone, in numbers, and made and deleted in turn. Nothing exceeds the memory
//! limit of the manifests, and honest pods are filtered and bound meanwhile.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    unsafe_code,
    missing_docs
)]

mod api;
mod heap;

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{Api, BUDGETS, CLAIMS, GANGS, GPU_NODES, NODES, Object, PODS, VOLUMES};
use clap::{Args as _, FromArgMatches};
use gantry_planner::fixtures::switched;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

const MIB: usize = 1024 * 1024;
/// What may be in use of the limit of 512 MiB in the manifests. The rest is for the program and fragmentation.
const BUDGET: usize = 384 * MIB;
const GPU: &str = "nvidia.com/gpu";
/// Fat objects of each kind, at once.
const MANY: usize = 12;
/// The devices of a deleted pod are not free at once.
const NODES_IN_ALL: usize = 40;

struct Extender {
    api: Arc<Api>,
    port: u16,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<anyhow::Result<()>>,
    _folder: tempfile::TempDir,
}

impl Extender {
    async fn start(api: &Arc<Api>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("kubeconfig");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": api.url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        std::fs::write(&kubeconfig, config.to_string()).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let command = gantry_extender::Args::augment_args(clap::Command::new("extender"));
        let listen = format!("--listen=127.0.0.1:{port}");
        let words = ["extender", &listen, "--kubeconfig", kubeconfig.to_str().unwrap()];
        let args = gantry_extender::Args::from_arg_matches(&command.get_matches_from(words)).unwrap();
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(gantry_extender::run(args, shutdown.clone()));
        let extender = Self { api: Arc::clone(api), port, shutdown, task, _folder: folder };
        let began = Instant::now();
        while !extender.get("/readyz").await.starts_with("HTTP/1.1 200") {
            assert!(
                began.elapsed() < Duration::from_secs(120),
                "not ready: {}",
                extender.get("/readyz").await
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        extender
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.task.await.unwrap().unwrap();
    }

    async fn send(&self, request: String) -> String {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)).await else {
            return String::new();
        };
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        answer
    }

    async fn get(&self, path: &str) -> String {
        self.send(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await
    }

    async fn post(&self, path: &str, body: &Value) -> Value {
        let body = body.to_string();
        let answer = self
            .send(format!(
                "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            ))
            .await;
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap_or_default().1)
            .unwrap_or_else(|_| panic!("{answer}"))
    }

    async fn filter(&self, pod: &Value) -> Value {
        let nodes: Vec<String> = (0..NODES_IN_ALL).map(|number| format!("n{number}")).collect();
        self.post("/filter", &json!({"Pod": pod, "NodeNames": nodes})).await
    }

    /// An honest pod is filtered and bound at any time.
    async fn serves(&self, number: usize) {
        let name = format!("honest-{number}");
        let honest = pod("honest", &name, 1);
        self.api.set(PODS, Object::plain(&honest));
        let answer = self.filter(&honest).await;
        let nodes = answer["NodeNames"].as_array().unwrap_or_else(|| panic!("{answer}"));
        let target = json!({"PodName": name, "PodNamespace": "honest", "PodUID": name, "Node": nodes[0]});
        let bound = self.post("/bind", &target).await;
        assert_eq!(bound["Error"].as_str().unwrap_or_default(), "", "{bound}");
        assert!(self.api.written("Binding").iter().any(|binding| binding["metadata"]["name"] == *name));
        self.api.delete(PODS, |known| known != format!("honest/{name}"));
    }

    /// A value of the metrics.
    async fn metric(&self, name: &str) -> usize {
        let page = self.get("/metrics").await;
        let lines = page.lines().filter(|line| line.starts_with(name));
        lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<usize>().unwrap()).sum()
    }

    /// Until the watches have caught up: nothing that is kept changes any more.
    async fn settled(&self) {
        let (mut last, mut equal) = ((0, 0), 0);
        while equal < 3 {
            tokio::time::sleep(Duration::from_millis(1000)).await;
            let refusals = self.metric("gantry_extender_object_refusals_total").await;
            let now = (self.metric("gantry_extender_object_bytes{").await, refusals);
            equal = if now == last { equal + 1 } else { 0 };
            last = now;
        }
    }
}

fn pod(namespace: &str, name: &str, gpus: u32) -> Value {
    json!({
        "metadata": {"name": name, "namespace": namespace, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {GPU: gpus.to_string()}}}]},
        "status": {"phase": "Pending"},
    })
}

fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    let (path, field) = pointer.rsplit_once('/').unwrap();
    let mut at = &mut object;
    for step in path.split('/').filter(|step| !step.is_empty()) {
        at = match step.parse::<usize>() {
            Ok(index) => &mut at[index],
            Err(_) => &mut at[step],
        };
    }
    at[field] = value;
    object
}

/// Every field of a pod with the items that fill it to about 1.4 MiB, which etcd still takes.
fn fields() -> Vec<(&'static str, Value, &'static str, usize)> {
    let selector = json!({"matchExpressions": [{"key": "a", "operator": "In", "values": ["@"]}]});
    let map = || json!({"@": 0});
    vec![
        (
            "/spec/affinity",
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "In", "values": ["@"]}]}]}}}),
            "\"value-#\"",
            90_000,
        ),
        (
            "/spec/affinity",
            json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": ["@"]}}),
            r##"{"weight":1,"preference":{"matchExpressions":[{"key":"k#","operator":"Exists"}]}}"##,
            16_000,
        ),
        (
            "/spec/affinity",
            json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": ["@"]}}),
            r##"{"topologyKey":"k#","labelSelector":{}}"##,
            30_000,
        ),
        (
            "/spec/affinity",
            json!({"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            [{"topologyKey": "a", "labelSelector": selector}]}}),
            "\"value-#\"",
            90_000,
        ),
        ("/spec/tolerations", json!(["@"]), r##"{"key":"k#","operator":"Exists"}"##, 30_000),
        // Empty ones: three bytes of JSON, and a hundred as a value.
        ("/spec/tolerations", json!(["@"]), "{}", 450_000),
        (
            "/spec/topologySpreadConstraints",
            json!(["@"]),
            r##"{"topologyKey":"k#","maxSkew":1,"whenUnsatisfiable":"DoNotSchedule"}"##,
            16_000,
        ),
        (
            "/spec/volumes",
            json!(["@"]),
            r##"{"name":"v#","persistentVolumeClaim":{"claimName":"c#"}}"##,
            20_000,
        ),
        ("/spec/schedulingGates", json!(["@"]), r##"{"name":"example.com/g#"}"##, 45_000),
        (
            "/spec/initContainers",
            json!(["@"]),
            r##"{"name":"c#","resources":{"limits":{"nvidia.com/gpu":"1"}},"ports":[{"hostPort":80}]}"##,
            15_000,
        ),
        ("/spec/nodeSelector", map(), r##""example.com/key-#":"v""##, 50_000),
        ("/metadata/labels", map(), r##""example.com/key-#":"v""##, 50_000),
        ("/spec/containers/0/resources/requests", map(), r##""example.com/key-#":"1""##, 50_000),
        ("/spec/overhead", map(), r##""example.com/key-#":"1""##, 50_000),
        ("/metadata/annotations", json!({"gantry.dev/gang": "@"}), "name-#,", 20_000),
        ("/metadata/annotations", json!({"gantry.dev/grant": "@"}), "name-#,", 20_000),
        (
            "/metadata/ownerReferences",
            json!(["@"]),
            r##"{"apiVersion":"batch/v1","kind":"Job","name":"j#","uid":"u","controller":true}"##,
            16_000,
        ),
        ("/status/conditions", json!(["@"]), r##"{"type":"t#","status":"True","message":"m"}"##, 30_000),
        (
            "/status/containerStatuses",
            json!(["@"]),
            r##"{"name":"c#","allocatedResourcesStatus":[{"name":"nvidia.com/gpu","resources":[{"resourceID":"r#"}]}]}"##,
            12_000,
        ),
        // What is not read may be as long as it likes.
        ("/spec/containers/0/env", json!(["@"]), r##"{"name":"E#","value":"x"}"##, 50_000),
        ("/metadata/managedFields", json!(["@"]), r##"{"manager":"m#"}"##, 60_000),
    ]
}

/// An object with a field filled.
fn fat(object: Value, (pointer, value, item, count): &(&'static str, Value, &'static str, usize)) -> Object {
    Object::new(&with(object, pointer, value.clone()), item, *count)
}

fn node(name: &str) -> (Value, Value) {
    let devices: Vec<Value> = (0..8)
        .map(|gpu| json!({"id": format!("GPU-{name}-{gpu}"), "resource": GPU, "gpu": gpu, "healthy": true}))
        .collect();
    (
        json!({"metadata": {"name": name, "uid": name}, "status": {"allocatable": {GPU: "8", "cpu": "64", "pods": "110"}}}),
        json!({
            "metadata": {"name": name, "uid": name}, "spec": {"machine": switched()},
            "status": {"devices": devices, "holders": []},
        }),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fat_objects_stay_within_the_memory_limit() {
    let api = Api::start().await;
    for number in 0..NODES_IN_ALL {
        let (node, gpu_node) = node(&format!("n{number}"));
        api.set(NODES, Object::plain(&node));
        api.set(GPU_NODES, Object::plain(&gpu_node));
    }
    // They are there before the extender starts, as after its death.
    let fields = fields();
    for (number, field) in fields.iter().enumerate() {
        for copy in 0..3 {
            api.set(PODS, fat(pod("tenant", &format!("p{number}-{copy}"), 1), field));
        }
    }
    let extender = Extender::start(&api).await;
    let started = heap::take_peak();
    eprintln!("start with fat pods: peak {} MiB, in use {} MiB", started / MIB, heap::used() / MIB);
    assert!(started < BUDGET, "{} MiB", started / MIB);
    extender.serves(0).await;
    refused_pod_is_reported(&extender).await;
    api.delete(PODS, |_| false);
    extender.settled().await;
    let empty = heap::used();

    // Each field in numbers, made and deleted in turn.
    for (group, some) in fields.chunks(7).enumerate() {
        for (number, field) in some.iter().enumerate() {
            for copy in 0..MANY {
                let gpus = u32::from(copy % 2 == 0);
                let mut fat_pod = pod("tenant", &format!("f{group}-{number}-{copy}"), gpus);
                if copy % 3 == 0 {
                    fat_pod = with(fat_pod, "/spec/nodeName", "n1".into());
                }
                api.set(PODS, fat(fat_pod, field));
            }
        }
        extender.serves(1 + group).await;
        extender.settled().await;
        extender.serves(101 + group).await;
        api.delete(PODS, |_| false);
        extender.settled().await;
        let peak = heap::take_peak();
        eprintln!("fields {group}: peak {} MiB", peak / MIB);
        assert!(peak < BUDGET, "fields {group}: {} MiB", peak / MIB);
    }
    // Sweeps follow the deletions after some seconds, later on a busy machine.
    let began = Instant::now();
    let left = loop {
        let left = heap::used().saturating_sub(empty);
        if left < 24 * MIB || began.elapsed() > Duration::from_secs(120) {
            break left;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    eprintln!(
        "after all are deleted: {} KiB more than before, {} MiB resident",
        left / 1024,
        heap::resident() / MIB
    );
    assert!(left < 24 * MIB, "{} MiB are not freed", left / MIB);

    other_kinds(&api, &extender).await;
    full(&api, &extender).await;
    freed(&api, &extender, empty).await;
    extender.stop().await;
}

/// The Event and the scheduler's message state why a pod is refused.
async fn refused_pod_is_reported(extender: &Extender) {
    let reported = |name: &str| {
        let events = extender.api.written("Event");
        events.into_iter().find(|event| event["regarding"]["name"] == *name)
    };
    let event = loop {
        match reported("p0-0") {
            Some(event) => break event,
            None => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    };
    assert_eq!(event["reason"], "ObjectTooLarge");
    let answer = extender.filter(&pod("tenant", "p0-0", 1)).await;
    let why = answer["FailedAndUnresolvableNodes"]["n0"].as_str().unwrap_or_else(|| panic!("{answer}"));
    assert!(why.contains("takes more than 64 KiB"), "{why}");
}

/// The fattest objects of every other kind that is watched.
async fn other_kinds(api: &Api, extender: &Extender) {
    let named = |name: String| json!({"metadata": {"name": name, "namespace": "tenant", "uid": name}, "spec": {}, "status": {}});
    let bound = json!({"volumeName": "v"});
    let objects: [(&'static str, Value, &'static str, Value, &'static str, usize); 9] = [
        (NODES, json!({}), "/metadata/labels", json!({"@": 0}), r##""example.com/key-#":"v""##, 50_000),
        (NODES, json!({}), "/spec/taints", json!(["@"]), r##"{"key":"k#","effect":"NoSchedule"}"##, 30_000),
        (
            GPU_NODES,
            json!({}),
            "/status/devices",
            json!(["@"]),
            r##"{"id":"GPU-#","resource":"nvidia.com/gpu","gpu":0,"healthy":true}"##,
            16_000,
        ),
        (GANGS, json!({}), "/spec/minMember", json!(["@"]), "1", 600_000),
        (GANGS, json!({}), "/status/message", json!(["@"]), "{}", 400_000),
        (
            BUDGETS,
            json!({}),
            "/spec/selector",
            json!({"matchExpressions": [{"key": "a", "operator": "In", "values": ["@"]}]}),
            "\"value-#\"",
            90_000,
        ),
        (CLAIMS, bound, "/spec/accessModes", json!(["@"]), "\"m#\"", 150_000),
        (
            VOLUMES,
            json!({}),
            "/spec/nodeAffinity",
            json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "In", "values": ["@"]}]}]}}),
            "\"value-#\"",
            90_000,
        ),
        (
            VOLUMES,
            json!({}),
            "/spec/nodeAffinity",
            json!({"required": {"nodeSelectorTerms": ["@"]}}),
            "{}",
            400_000,
        ),
    ];
    for (number, (kind, spec, pointer, value, item, count)) in objects.into_iter().enumerate() {
        for copy in 0..MANY {
            let object = with(named(format!("o{number}-{copy}")), "/spec", spec.clone());
            api.set(kind, fat(object, &(pointer, value.clone(), item, count)));
        }
    }
    extender.settled().await;
    extender.serves(200).await;
    for kind in [NODES, GPU_NODES, GANGS, BUDGETS, CLAIMS, VOLUMES] {
        api.delete(kind, |name| name.starts_with("/n"));
    }
    extender.settled().await;
    extender.serves(201).await;
    let peak = heap::take_peak();
    eprintln!("other kinds: peak {} MiB", peak / MIB);
    assert!(peak < BUDGET, "{} MiB", peak / MIB);
}

/// Pods just below the limit of one, of more namespaces than fit.
async fn full(api: &Api, extender: &Extender) {
    let before = heap::used();
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
        {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "In", "values": ["@"]}]}]}}});
    for namespace in 0..8 {
        for number in 0..500 {
            let name = format!("{namespace}-{number}");
            let item = format!("\"{name}-#\"");
            let pod = with(pod(&format!("full-{namespace}"), &name, 1), "/spec/affinity", affinity.clone());
            api.set(PODS, Object::new(&pod, &item, 560));
        }
        extender.settled().await;
    }
    let kept = extender.metric("gantry_extender_object_bytes{").await;
    let limit = extender.metric("gantry_extender_object_bytes_limit ").await;
    let used = heap::used() - before;
    let peak = heap::take_peak();
    eprintln!(
        "full: {} of {} MiB by count, {} MiB in use, peak {} MiB, {} MiB resident, refused {}",
        kept / MIB,
        limit / MIB,
        used / MIB,
        peak / MIB,
        heap::resident() / MIB,
        extender.metric("gantry_extender_refused_objects{").await
    );
    assert!(kept > limit / 2, "the test fills it");
    assert!(peak < BUDGET, "{} MiB", peak / MIB);
    extender.serves(300).await;
}

/// What was kept of pods is freed when they are gone. Sweeps follow the deletions after some seconds.
async fn freed(api: &Api, extender: &Extender, empty: usize) {
    api.delete(PODS, |_| false);
    let began = Instant::now();
    let left = || heap::used().saturating_sub(empty);
    while left() > 24 * MIB && began.elapsed() < Duration::from_secs(120) {
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    extender.settled().await;
    eprintln!("then deleted: {} MiB more than before, {} MiB resident", left() / MIB, heap::resident() / MIB);
    assert!(left() < 24 * MIB, "{} MiB are not freed", left() / MIB);
}
