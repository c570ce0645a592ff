//! The cluster around the extenders. Its nodes admit pods, end them, and publish the devices that each pod holds, as kubelet
//! and plugin do. A record of all changes of pods and Gangs shows whether a run was correct.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt as _;
use gantry_api::{Gang, GpuNode, Grant, names};
use gantry_planner::fixtures::switched;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};

use crate::dice::Dice;

pub(crate) const GPU: &str = "nvidia.com/gpu";
/// GPUs of a node.
pub(crate) const GPUS: u32 = 8;

/// A pod as the record has it.
#[derive(Debug, Clone)]
struct Recorded {
    name: String,
    node: Option<String>,
    devices: BTreeSet<String>,
    gang: Option<String>,
}

/// What the API server was told.
#[derive(Debug, Default)]
struct Told {
    /// Pods that exist, by UID.
    pods: BTreeMap<String, Recorded>,
    /// Members that were bound, by UID: gang, and version of the Binding.
    bound: BTreeMap<String, (String, u64)>,
    /// By gang and UID of the pod: the version of the Gang in which its decision first names the pod.
    decided: BTreeMap<(String, String), u64>,
    faults: Vec<String>,
}

/// The record.
#[derive(Debug, Default, Clone)]
pub(crate) struct Record(Arc<(Mutex<Told>, Notify)>);

impl Record {
    fn change<T>(&self, change: impl FnOnce(&mut Told) -> T) -> T {
        let result = change(&mut self.0.0.lock().unwrap());
        self.0.1.notify_waiters();
        result
    }

    fn saw(&self, pod: &Pod) {
        let uid = pod.uid().unwrap_or_default();
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let version = pod.resource_version().and_then(|version| version.parse().ok()).unwrap_or(0);
        let devices = granted(pod);
        let gang = pod.annotations().get(names::GANG_ANNOTATION).cloned();
        self.change(|told| {
            let before = told.pods.get(&uid);
            let is_bound_now = node.is_some() && before.is_none_or(|before| before.node.is_none());
            let name = pod.name_any();
            if is_bound_now {
                if devices.is_empty() {
                    told.faults.push(format!("{name} is bound without a grant"));
                }
                for (other, known) in &told.pods {
                    let shared: Vec<&String> = known.devices.intersection(&devices).collect();
                    if *other != uid && !shared.is_empty() {
                        told.faults.push(format!("{name} and {} have {shared:?}", known.name));
                    }
                }
                if let Some(gang) = &gang {
                    told.bound.insert(uid.clone(), (gang.clone(), version));
                }
            }
            told.pods.insert(uid, Recorded { name, node, devices, gang });
        });
    }

    fn lost(&self, uid: &str) {
        self.change(|told| told.pods.remove(uid));
    }

    fn saw_gang(&self, gang: &Gang) {
        let Some(status) = &gang.status else { return };
        let version = gang.resource_version().and_then(|version| version.parse().ok()).unwrap_or(0);
        self.change(|told| {
            for pod in status.decision.iter().flat_map(gantry_api::Decision::pods) {
                told.decided.entry((status.name.clone(), pod.to_string())).or_insert(version);
            }
        });
    }

    /// How many of these pods exist, and how many of them are bound.
    pub(crate) fn count(&self, uids: &BTreeSet<String>) -> (usize, usize) {
        let told = self.0.0.lock().unwrap();
        let known: Vec<&Recorded> = uids.iter().filter_map(|uid| told.pods.get(uid)).collect();
        (known.len(), known.iter().filter(|pod| pod.node.is_some()).count())
    }

    /// Waits until something changes.
    pub(crate) async fn changed(&self) {
        // What is notified in between is seen at the next look.
        let _ = tokio::time::timeout(Duration::from_secs(1), self.0.1.notified()).await;
    }

    /// What should not have happened, so far.
    pub(crate) fn faults(&self) -> Vec<String> {
        let told = self.0.0.lock().unwrap();
        let undecided = told.bound.iter().filter(|(uid, (gang, bound))| {
            told.decided.get(&(gang.clone(), (*uid).clone())).is_none_or(|decided| decided >= bound)
        });
        let undecided =
            undecided.map(|(uid, (gang, _))| format!("{uid} of {gang} was bound before its decision"));
        told.faults.iter().cloned().chain(undecided).collect()
    }

    /// The pods that wait and run, for messages.
    pub(crate) fn state(&self) -> String {
        let told = self.0.0.lock().unwrap();
        let lines = told.pods.values().map(|pod| format!("{} of {:?}: {:?}", pod.name, pod.gang, pod.node));
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// The nodes, and the record.
pub(crate) struct Cluster {
    pub(crate) client: Client,
    pub(crate) record: Record,
}

impl Cluster {
    /// Creates nodes and starts what follows the cluster.
    pub(crate) async fn start(client: Client, nodes: usize, seed: u64) -> Self {
        for number in 0..nodes {
            create_node(&client, &node_name(number)).await;
        }
        let record = Record::default();
        let (pods, events) = mpsc::unbounded_channel();
        tokio::spawn(follow_pods(client.clone(), record.clone(), pods));
        tokio::spawn(follow_gangs(client.clone(), record.clone()));
        let kubelets = Kubelets { client: client.clone(), holders: BTreeMap::new(), dice: Dice::new(seed) };
        tokio::spawn(kubelets.run(events));
        Self { client, record }
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }
}

/// The devices of the pod's grant.
fn granted(pod: &Pod) -> BTreeSet<String> {
    let grant = pod.annotations().get(names::GRANT_ANNOTATION);
    let grant = grant.and_then(|text| serde_json::from_str::<Grant>(text).ok());
    grant.iter().flat_map(|grant| grant.held(GPU)).map(|device| device.to_string()).collect()
}

fn node_name(number: usize) -> String {
    format!("n{number}")
}

fn device(node: &str, gpu: u32) -> String {
    format!("GPU-{node}-{gpu}")
}

async fn create_node(client: &Client, name: &str) {
    let amounts = json!({"cpu": "64", "memory": "256Gi", "pods": "100", GPU: GPUS.to_string()});
    let node = json!({"metadata": {"name": name}, "status": {"allocatable": amounts, "capacity": amounts}});
    let nodes = Api::<Node>::all(client.clone());
    nodes.create(&PostParams::default(), &serde_json::from_value(node.clone()).unwrap()).await.unwrap();
    nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(&node)).await.unwrap();
    let gpu_node = json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode",
        "metadata": {"name": name}, "spec": {"machine": switched()},
    });
    let gpu_nodes = Api::<GpuNode>::all(client.clone());
    gpu_nodes.create(&PostParams::default(), &serde_json::from_value(gpu_node).unwrap()).await.unwrap();
    publish(client, name, &[]).await;
}

/// Writes the status of a GpuNode, as its plugin does.
async fn publish(client: &Client, node: &str, holders: &[Value]) {
    let devices: Vec<Value> = (0..GPUS)
        .map(|gpu| json!({"id": device(node, gpu), "resource": GPU, "gpu": gpu, "healthy": true}))
        .collect();
    let status = json!({"status": {"devices": devices, "holders": holders}});
    let gpu_nodes = Api::<GpuNode>::all(client.clone());
    gpu_nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
}

async fn follow_pods(client: Client, record: Record, pods: mpsc::UnboundedSender<Pod>) {
    let mut events = std::pin::pin!(watcher::watcher(Api::<Pod>::all(client), watcher::Config::default()));
    while let Some(event) = events.next().await {
        match event.unwrap() {
            Event::Apply(pod) | Event::InitApply(pod) => {
                record.saw(&pod);
                let _ = pods.send(pod);
            }
            Event::Delete(pod) => record.lost(&pod.uid().unwrap_or_default()),
            Event::Init | Event::InitDone => {}
        }
    }
}

async fn follow_gangs(client: Client, record: Record) {
    let mut events = std::pin::pin!(watcher::watcher(Api::<Gang>::all(client), watcher::Config::default()));
    while let Some(event) = events.next().await {
        if let Event::Apply(gang) | Event::InitApply(gang) = event.unwrap() {
            record.saw_gang(&gang);
        }
    }
}

/// The kubelets and plugins of all nodes, one thing at a time.
struct Kubelets {
    client: Client,
    /// By node and UID of the pod: its entry in the GpuNode.
    holders: BTreeMap<(String, String), Value>,
    dice: Dice,
}

impl Kubelets {
    async fn run(mut self, mut events: mpsc::UnboundedReceiver<Pod>) {
        while let Some(pod) = events.recv().await {
            let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { continue };
            let key = (node, pod.uid().unwrap_or_default());
            let is_known = self.holders.contains_key(&key);
            if pod.metadata.deletion_timestamp.is_some() {
                self.end(&pod, &key).await;
            } else if !is_known {
                self.admit(&pod, &key).await;
            }
        }
    }

    async fn pause(&mut self, most: u64) {
        tokio::time::sleep(Duration::from_millis(self.dice.range(1, most))).await;
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn admit(&mut self, pod: &Pod, key: &(String, String)) {
        let holder = json!({
            "namespace": "default", "pod": pod.name_any(), "uid": key.1, "resource": GPU, "devices": granted(pod),
            "provenance": "PodResources", "state": "Live",
        });
        self.holders.insert(key.clone(), holder);
        self.pause(50).await;
        let status = json!({"status": {"phase": "Running"}});
        // It may be gone already.
        let _ =
            self.pods().patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(&status)).await;
        self.publish(&key.0).await;
    }

    async fn end(&mut self, pod: &Pod, key: &(String, String)) {
        self.pause(300).await;
        let _ = self.pods().delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await;
        if self.holders.remove(key).is_some() {
            self.pause(200).await;
            self.publish(&key.0).await;
        }
    }

    async fn publish(&self, node: &str) {
        let holders = self.holders.iter().filter(|((of, _), _)| of == node);
        let holders: Vec<Value> = holders.map(|(_, holder)| holder.clone()).collect();
        publish(&self.client, node, &holders).await;
    }
}
