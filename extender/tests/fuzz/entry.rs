//! What is fuzzed: bodies of the extender API, pods, GpuNodes and grants. `fuzz/` runs it under a fuzzer, the test beside it on the seeds and
//! on changed seeds. It panics if an invariant is violated, and returns whether the input was accepted.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "each target uses its part of this; a broken invariant is a panic"
)]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gantry_api::{Grant, NodeName, PodUid};
use gantry_extender::bind::Binder;
use gantry_extender::index::{self, Index, PartialGpuNode, Source, Store};
use gantry_extender::metrics::Metrics;
use gantry_extender::pod::{ParsedPod, Reader, SlimPod};
use gantry_extender::service::Service;
use gantry_extender::watched::WatchedResources;
use gantry_gang::protocol::Moment;
use gantry_planner::decide::Options;
use gantry_planner::kind::Kinds;
use serde_json::Value;

const GPU_NODE: &str = include_str!("../../../fuzz/seeds/gpu_nodes/four");
const NODE: &str = r#"{"metadata": {"name": "n"}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}"#;
/// Devices of the node.
const GPUS: usize = 4;

fn watched() -> WatchedResources {
    WatchedResources::new(["nvidia.com/gpu".into()])
}

/// One node of four GPUs, all lists complete.
struct Cluster {
    store: Arc<Store>,
    now: Arc<Mutex<Instant>>,
}

impl Cluster {
    fn new() -> Self {
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = Arc::clone(&now);
        let clock = move || Moment { at: *clock.lock().unwrap(), unix: 1_767_225_600 };
        let index = Index::new(Options::default(), &watched(), "fuzz".into());
        let store = Arc::new(Store::with_clock(index, Box::new(clock)));
        let node = serde_json::from_str(NODE).unwrap();
        let inventory = serde_json::from_str(GPU_NODE).unwrap();
        let inventory = index::inventory(&watched(), inventory, &mut Kinds::default()).unwrap();
        let at = *now.lock().unwrap();
        store.update(|index| {
            Source::ALL.into_iter().for_each(|source| index.list_begins(at, source));
            index.node_applied(&"n".into(), index::advertised(&watched(), &node));
            index.inventory_applied(&"n".into(), inventory);
            Source::ALL.into_iter().for_each(|source| index.list_ends(at, source));
            index.tick(at, at);
        });
        Self { store, now }
    }

    fn wait(&self, seconds: u64) {
        for _ in 0..seconds {
            let now = *self.now.lock().unwrap() + Duration::from_secs(1);
            *self.now.lock().unwrap() = now;
            self.store.update(|index| index.tick(now, now));
        }
    }

    /// Devices that are free, held, reserved, of deleted pods and unhealthy.
    fn devices(&self) -> [usize; 5] {
        let totals = self.store.read(|index| index.totals().1);
        [totals.free, totals.held, totals.reserved, totals.leaving, totals.unhealthy]
    }

    fn pod(&self, pod: SlimPod) {
        match Reader::new(watched()).read(pod) {
            Some(ParsedPod::Facts(facts)) => self.store.update(|index| index.pod_applied(*facts)),
            Some(ParsedPod::OtherPod(pod)) => self.store.update(|index| index.other_pod_applied(*pod)),
            None => {}
        }
    }
}

/// Any bytes as the body of each verb. What is answered is JSON, and filter passes only nodes of the request.
pub fn requests(body: &[u8]) -> bool {
    let cluster = Cluster::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let _guard = runtime.enter();
    let refuse = tower::service_fn(|_: http::Request<kube::client::Body>| async {
        Err::<http::Response<kube::client::Body>, _>(std::io::Error::other("no API server"))
    });
    let client = kube::Client::new(refuse, "default");
    let service = Service {
        binder: Binder::new(client, Arc::clone(&cluster.store), watched(), Duration::from_secs(1)),
        store: Arc::clone(&cluster.store),
        watched: watched(),
        metrics: Arc::new(Metrics::new()),
    };
    let filtered = service.filter(body);
    let is_read = filtered.is_ok();
    if let Ok(answer) = filtered {
        let answer: Value = serde_json::from_slice(&answer).expect("filter answers in JSON");
        let asked: Value = serde_json::from_slice(body).expect("only JSON is answered");
        let asked = asked.to_string();
        for name in answer["NodeNames"].as_array().into_iter().flatten() {
            assert!(asked.contains(&name.to_string()), "{name} was not asked for");
        }
    }
    for answer in [service.prioritize(body), service.preempt(body)].into_iter().flatten() {
        serde_json::from_slice::<Value>(&answer).expect("the answer is JSON");
    }
    assert_eq!(cluster.devices()[0], GPUS, "no verb but bind takes devices");
    is_read
}

/// Any bytes as a pod of a watch, seen twice and deleted. No device is lost or counted twice, and all are free in the end.
pub fn pods(bytes: &[u8]) -> bool {
    let Ok(pod) = serde_json::from_slice::<SlimPod>(bytes) else {
        return false;
    };
    let cluster = Cluster::new();
    cluster.pod(pod.clone());
    let devices = cluster.devices();
    assert_eq!(devices.iter().sum::<usize>(), GPUS, "{devices:?}");
    cluster.pod(pod.clone());
    assert_eq!(cluster.devices(), devices, "what is seen again changes nothing");
    let uid = PodUid::from(pod.metadata.uid.as_deref().unwrap_or_default());
    let now = *cluster.now.lock().unwrap();
    cluster.store.update(|index| {
        index.pod_deleted(now, &uid, None);
        index.other_pod_gone(&uid);
    });
    cluster.wait(30);
    assert_eq!(cluster.devices()[0], GPUS, "{:?}", cluster.devices());
    true
}

/// Any bytes as a GpuNode. Whatever it says of holders, its devices are counted once, and the node may be replaced and deleted.
pub fn gpu_nodes(bytes: &[u8]) -> bool {
    let Ok(node) = serde_json::from_slice::<PartialGpuNode>(bytes) else {
        return false;
    };
    let Some(inventory) = index::inventory(&watched(), node, &mut Kinds::default()) else {
        return false;
    };
    let cluster = Cluster::new();
    let all: usize = inventory.pools.iter().map(|pool| pool.all.len()).sum();
    cluster.store.update(|index| index.inventory_applied(&"n".into(), inventory));
    let devices = cluster.devices();
    assert!(devices[0] <= all, "{devices:?} of {all}");
    cluster.store.update(|index| index.inventory_deleted("n"));
    assert_eq!(cluster.devices(), [0; 5]);
    true
}

/// Any text as the grant annotation of a bound pod. One that is accepted is written as it was read; none takes more devices than there are.
pub fn grants(text: &str) -> bool {
    let (uid, node) = (PodUid::from("p"), NodeName::from("n"));
    let parsed = Grant::parse(text, &uid, &node);
    let is_read = parsed.is_ok();
    if let Ok(grant) = parsed {
        let again = Grant::parse(&grant.to_annotation().unwrap(), &uid, &node);
        assert_eq!(again.unwrap(), grant);
    }
    let pod = serde_json::json!({
        "metadata": {"name": "p", "namespace": "default", "uid": "p", "annotations": {"gantry.dev/grant": text}},
        "spec": {"nodeName": "n", "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
        "status": {"phase": "Running"},
    });
    let cluster = Cluster::new();
    cluster.pod(serde_json::from_value(pod).unwrap());
    // A grant that cannot be followed counts as two other devices.
    assert_eq!(cluster.devices(), [2, 2, 0, 0, 0]);
    is_read
}
