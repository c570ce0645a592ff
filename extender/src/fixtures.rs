//! A small cluster for tests, fed through the same readers as the real one: JSON as the API server sends it.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use gantry_api::{Grant, NodeName, PodUid, names};
use gantry_gang::protocol::Moment;
use gantry_gang::{NodeFacts, Resources};
pub(crate) use gantry_planner::fixtures::*;
use gantry_topology::{GpuSet, Machine};
use serde_json::{Value, json};

use crate::index::{self, Index, Source, Store, Target};
use crate::pod::{ParsedPod, PodFacts, Reader};
use crate::watched::WatchedResources;
use gantry_planner::decide::Options;
use gantry_planner::devices::DeviceSet;
use gantry_planner::kind::Kinds;
use gantry_planner::request::Request;

pub(crate) fn watched() -> WatchedResources {
    WatchedResources::new([GPU.into()])
}

pub(crate) fn device(node: &str, gpu: usize) -> String {
    format!("GPU-{node}-{gpu}")
}

pub(crate) fn devices(node: &str, gpus: GpuSet) -> Vec<String> {
    gpus.iter().map(|gpu| device(node, gpu)).collect()
}

/// A GpuNode as the API server sends it: all healthy, nobody holds anything.
pub(crate) fn gpu_node(name: &str, machine: &Machine) -> Value {
    let devices: Vec<Value> = (0..machine.gpus().len())
        .map(|gpu| json!({"id": device(name, gpu), "resource": GPU, "gpu": gpu, "healthy": true}))
        .collect();
    json!({
        "metadata": {"name": name},
        "spec": {"machine": machine},
        "status": {"devices": devices, "holders": []},
    })
}

/// The devices of a GpuNode's resource, in place of all it had of it, with its terms.
pub(crate) fn publish(mut node: Value, terms: Value, devices: Vec<Value>) -> Value {
    let resource = terms["name"].clone();
    let status = &mut node["status"];
    let known = status["devices"].as_array_mut().unwrap();
    known.retain(|device| device["resource"] != resource);
    known.extend(devices.into_iter().map(|mut device| {
        device["resource"] = resource.clone();
        device["healthy"] = true.into();
        device
    }));
    if status["resources"].is_null() {
        status["resources"] = json!([]);
    }
    status["resources"].as_array_mut().unwrap().push(terms);
    node
}

/// A GpuNode whose GPUs are all shared under `resource`.
pub(crate) fn shared_node(name: &str, machine: &Machine, resource: &str, replicas: usize) -> Value {
    let mut node = gpu_node(name, machine);
    node["status"]["devices"] = json!([]);
    let each = (0..machine.gpus().len()).flat_map(|gpu| (0..replicas).map(move |replica| (gpu, replica)));
    let devices = each.map(|(gpu, replica)| {
        json!({"id": format!("{}::{replica}", device(name, gpu)), "gpu": gpu, "replica": replica})
    });
    let terms = json!({"name": resource, "kind": "Shared", "replicas": replicas});
    publish(node, terms, devices.collect())
}

/// A GpuNode with `resource` for MIG devices: by GPU and first memory unit, each of `size` units. Its GPUs that are not
/// cut are whole.
pub(crate) fn cut_node(
    name: &str,
    machine: &Machine,
    resource: &str,
    size: u8,
    slices: &[(u8, u8)],
) -> Value {
    let mut node = gpu_node(name, machine);
    let whole = node["status"]["devices"].as_array_mut().unwrap();
    whole.retain(|device| slices.iter().all(|(gpu, _)| device["gpu"] != *gpu));
    let devices = slices.iter().map(|(gpu, start)| {
        json!({"id": format!("MIG-{name}-{gpu}-{start}"), "gpu": gpu,
            "slice": {"profile": "x", "start": start, "size": size}})
    });
    publish(node, json!({"name": resource, "kind": "Mig", "sharing": "Packed"}), devices.collect())
}

/// A holder of a GpuNode's status.
pub(crate) fn holder(node: &str, pod: &str, uid: Option<&str>, gpus: &str) -> Value {
    json!({
        "namespace": "default", "pod": pod, "uid": uid, "resource": GPU,
        "devices": devices(node, set(gpus)), "provenance": "PodResources", "state": "Live",
    })
}

pub(crate) fn quarantined(mut holder: Value) -> Value {
    holder["state"] = "Quarantined".into();
    holder
}

/// What a node has for pods besides devices.
pub(crate) fn allocatable() -> Resources {
    Resources { milli_cpu: 64_000, memory: 1 << 40, ephemeral: 1 << 40, pods: 110, ..Resources::default() }
}

/// A pod of one container, pending. Its UID is its name.
pub(crate) fn pod(name: &str, gpus: u32) -> Value {
    pod_of(name, GPU, gpus)
}

/// The same for devices of any resource.
pub(crate) fn pod_of(name: &str, resource: &str, devices: u32) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {resource: devices.to_string()}}}]},
        "status": {"phase": "Pending"},
    })
}

/// A pod that declares that it belongs to a gang of `min` members, pending. Its UID is its name.
pub(crate) fn member(name: &str, gpus: u32, gang: &str, min: u32) -> Value {
    let mut pod = pod(name, gpus);
    pod["metadata"]["annotations"] =
        json!({names::GANG_ANNOTATION: gang, names::GANG_MIN_ANNOTATION: min.to_string()});
    pod
}

/// The pod bound to a node at second `at`, with a grant of some GPUs.
pub(crate) fn bound(mut pod: Value, node: &str, at: u32, gpus: Option<&str>) -> Value {
    pod["spec"]["nodeName"] = node.into();
    pod["status"]["conditions"] = json!([{
        "type": "PodScheduled", "status": "True", "lastTransitionTime": format!("2026-01-01T00:{:02}:{:02}Z", at / 60, at % 60),
    }]);
    if let Some(gpus) = gpus {
        let uid: PodUid = pod["metadata"]["uid"].as_str().unwrap().into();
        pod["metadata"]["annotations"] = json!({names::GRANT_ANNOTATION: grant(&uid, node, set(gpus))});
    }
    pod
}

/// The annotation that grants `gpus` of `node` to the single container of a pod.
pub(crate) fn grant(uid: &PodUid, node: &str, gpus: GpuSet) -> String {
    let ids = devices(node, gpus).into_iter().map(Into::into).collect();
    Grant {
        version: Grant::VERSION,
        plan: "p".into(),
        pod: uid.clone(),
        node: node.into(),
        containers: vec![gantry_api::ContainerGrant {
            name: "main".into(),
            resource: GPU.into(),
            share: gantry_api::ContainerShare::Devices(ids),
        }],
    }
    .to_annotation()
    .unwrap()
}

pub(crate) fn facts(pod: &Value) -> PodFacts {
    PodFacts::read(&watched(), serde_json::from_value(pod.clone()).unwrap()).unwrap()
}

pub(crate) fn target(pod: &str, node: &str) -> Target {
    Target { uid: pod.into(), namespace: "default".into(), name: pod.into(), node: node.into() }
}

/// A cluster behind a store.
pub(crate) struct Cluster {
    pub(crate) store: Arc<Store>,
    pub(crate) now: Arc<Mutex<Instant>>,
    kinds: Mutex<Kinds>,
}

/// When clusters begin, in seconds since 1970: at the start of 2026, when all pods were created.
pub(crate) const BEGIN: i64 = 1_767_225_600;

impl Cluster {
    /// Lists have been read and were empty.
    pub(crate) fn new(options: Options) -> Self {
        let cluster = Self::cold(options);
        for source in Source::ALL {
            cluster.list(source, |_| {});
        }
        // The API server has answered for a while.
        let now = cluster.now();
        for ago in (0..=20).rev() {
            let contact = now - std::time::Duration::from_secs(ago);
            cluster.store.update(|index| index.tick(now, contact));
        }
        cluster
    }

    /// Nothing has been read.
    pub(crate) fn cold(options: Options) -> Self {
        let begin = Instant::now();
        let now = Arc::new(Mutex::new(begin));
        let shown = Arc::clone(&now);
        let clock = move || {
            let at = *shown.lock().unwrap();
            let passed = at.saturating_duration_since(begin).as_secs();
            let unix = BEGIN + i64::try_from(passed).unwrap();
            Moment { at, unix }
        };
        let index = Index::new(options, &watched(), "run".into());
        Self { store: Arc::new(Store::with_clock(index, Box::new(clock))), now, kinds: Mutex::default() }
    }

    pub(crate) fn now(&self) -> Instant {
        *self.now.lock().unwrap()
    }

    pub(crate) fn list(&self, source: Source, fill: impl FnOnce(&Self)) {
        let now = self.now();
        self.store.update(|index| index.list_begins(now, source));
        fill(self);
        self.store.update(|index| index.list_ends(now, source));
    }

    /// A node with a Gantry plugin.
    pub(crate) fn add(&self, name: &str, machine: &Machine) -> &Self {
        self.node(name, u32::try_from(machine.gpus().len()).unwrap());
        self.inventory(&gpu_node(name, machine))
    }

    pub(crate) fn node(&self, name: &str, advertised: u32) -> &Self {
        let facts =
            Arc::new(NodeFacts { name: name.into(), allocatable: allocatable(), ..NodeFacts::default() });
        self.store.update(|index| {
            index.node_described(facts);
            index.node_applied(&name.into(), vec![(GPU.into(), advertised)]);
        });
        self
    }

    pub(crate) fn inventory(&self, node: &Value) -> &Self {
        let name: NodeName = node["metadata"]["name"].as_str().unwrap().into();
        let node = serde_json::from_value(node.clone()).unwrap();
        let inventory = index::inventory(&watched(), node, &mut self.kinds.lock().unwrap()).unwrap();
        self.store.update(|index| index.inventory_applied(&name, inventory));
        self
    }

    pub(crate) fn pod(&self, pod: &Value) -> &Self {
        let facts = facts(pod);
        self.store.update(|index| index.pod_applied(facts));
        self
    }

    /// A pod that asks for nothing that is watched.
    pub(crate) fn other_pod(&self, pod: &Value) -> &Self {
        let read = serde_json::from_value(pod.clone()).unwrap();
        match Reader::new(watched()).read(read) {
            Some(ParsedPod::OtherPod(pod)) => self.store.update(|index| index.other_pod_applied(*pod)),
            other => panic!("{other:?}"),
        }
        self
    }

    pub(crate) fn gone(&self, pod: &Value) -> &Self {
        let (now, facts) = (self.now(), facts(pod));
        let uid = facts.uid.clone();
        self.store.update(|index| index.pod_deleted(now, &uid, Some(facts)));
        self
    }

    /// A pod is refused everywhere, as things are now.
    pub(crate) fn park(&self, name: &str, request: Arc<Request>) -> &Self {
        let parked = index::UnschedulablePod {
            namespace: "default".into(),
            name: name.into(),
            request,
            generation: self.store.snapshot().generation,
        };
        self.store.update(|index| index.add_unschedulable(name.into(), parked));
        self
    }

    /// Lets time pass, with the API server answering all the while.
    pub(crate) fn wait(&self, seconds: u64) -> &Self {
        for _ in 0..seconds {
            let now = self.now() + std::time::Duration::from_secs(1);
            *self.now.lock().unwrap() = now;
            self.store.update(|index| index.tick(now, now));
        }
        self
    }

    /// Time passes, and the API server answers nobody until the end of it.
    pub(crate) fn stall(&self, seconds: u64) -> &Self {
        let before = self.now();
        let now = before + std::time::Duration::from_secs(seconds);
        *self.now.lock().unwrap() = now;
        self.store.update(|index| index.tick(now, before));
        self.store.update(|index| index.tick(now, now));
        self
    }

    /// GPUs of a node that nobody has.
    pub(crate) fn free(&self, node: &str) -> String {
        self.free_of(node, GPU)
    }

    /// Free devices of a resource on a node, those that nothing distinguishes from the first.
    pub(crate) fn free_of(&self, node: &str, resource: &str) -> String {
        self.pool(node, resource, |pool| pool.free.clone())
    }

    /// GPUs of a node that nobody has nor is about to get.
    pub(crate) fn open(&self, node: &str) -> String {
        self.pool(node, GPU, |pool| pool.open.clone())
    }

    fn pool(
        &self,
        node: &str,
        resource: &str,
        of: impl Fn(&gantry_planner::snapshot::Pool) -> DeviceSet,
    ) -> String {
        let snapshot = self.store.snapshot();
        match snapshot.node_state(snapshot.find(node).unwrap()) {
            gantry_planner::snapshot::NodeState::Ours(class) => {
                of(class.pool(resource).unwrap().1).to_string()
            }
            other => panic!("{node} is {other:?}"),
        }
    }
}
