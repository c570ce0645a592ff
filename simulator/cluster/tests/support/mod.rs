//! What the tests share: a cluster, pods, and waiting for what a pod becomes.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "tests; each test file uses its part of this one"
)]

use std::time::Duration;

use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, PostParams};
use kube::runtime::wait::{Condition, await_condition};
use serde_json::json;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Far beyond what anything here takes: a test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(30);

pub struct Cluster {
    pub client: Client,
    pub api: ApiServer,
    pub stop: CancellationToken,
    _guard: DropGuard,
}

impl Cluster {
    pub async fn start() -> Self {
        Self::with(&ApiOptions::default()).await
    }

    pub async fn with(options: &ApiOptions) -> Self {
        let stop = CancellationToken::new();
        let api = ApiServer::start(options, stop.clone()).await.unwrap();
        Self { client: api.client().unwrap(), api, stop: stop.clone(), _guard: stop.drop_guard() }
    }

    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    pub async fn create(&self, pod: serde_json::Value) -> Pod {
        let pod = serde_json::from_value(pod).unwrap();
        self.pods().create(&PostParams::default(), &pod).await.unwrap()
    }

    /// The pod once `condition` holds.
    pub async fn wait(&self, name: &str, condition: impl Condition<Pod>) -> Pod {
        let waiting = await_condition(self.pods(), name, condition);
        let outcome = tokio::time::timeout(PATIENCE, waiting).await;
        match outcome {
            Ok(found) => found.unwrap().unwrap_or_else(|| panic!("{name} is gone")),
            Err(_) => panic!("{name} never came to it: {:#?}", self.pods().get(name).await),
        }
    }
}

/// A pod that asks for GPUs.
pub fn gpu_pod(name: &str, gpus: u32) -> serde_json::Value {
    json!({
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [
            {"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": gpus.to_string()}}},
        ]},
    })
}

/// In this phase.
pub fn phase(wanted: &'static str) -> impl Condition<Pod> {
    move |pod: Option<&Pod>| {
        let phase = pod.and_then(|pod| pod.status.as_ref()?.phase.as_deref());
        phase == Some(wanted)
    }
}

/// A pod whose PodScheduled condition contains a text.
pub fn refused_with(text: &'static str) -> impl Condition<Pod> {
    move |pod: Option<&Pod>| scheduling_message(pod).is_some_and(|message| message.contains(text))
}

pub fn scheduling_message(pod: Option<&Pod>) -> Option<&str> {
    let conditions = pod?.status.as_ref()?.conditions.as_ref()?;
    let scheduled = conditions.iter().find(|condition| condition.type_ == "PodScheduled")?;
    scheduled.message.as_deref()
}
