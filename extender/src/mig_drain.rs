//! Drains GPUs for MIG layouts. The plugin lists the GPUs of its GpuNode that wait for the pods that hold them, and keeps
//! new pods from them. A label of the Node allows it. The leader evicts the holders within disruption budgets, gangs as
//! a whole. Nothing is recorded: the Node and its GpuNode have all that the next leader needs.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{GpuNode, MigDrain, NodeName, Reason, names};
use gantry_runtime::events::{self, EventRecorder};
use gantry_runtime::{Backoff, chain};
use gantry_topology::GpuUuid;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use serde::Deserialize;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::event;
use crate::eviction::{self, EvictionOutcome, Group};
use crate::index::{PartialGpuNode, Store, read_part};
use crate::metrics::Metrics;
use crate::per_node::{self, FromGpuNode, PerNode};

/// Pause between two looks at the requests.
const TICK: Duration = Duration::from_secs(2);
/// Pauses between two attempts on a GPU: longer ones while something holds it back.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(300));
/// Time limit of one attempt on the GPUs of a node.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Most groups of pods that are evicted in [`RATE_TIME`] in the whole cluster.
const MAX_GROUPS: usize = 8;
/// See [`MAX_GROUPS`].
const RATE_TIME: Duration = Duration::from_secs(60);
/// Most different obstacles of a GPU that are reported.
const MAX_REPORTED: usize = 8;
/// The manifest of the rights, and the value of the chart for it.
const RIGHTS: &str = "extender-mig-drain.yaml (extender.migDrain of the chart)";

/// What the plugin of a node requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DrainRequest {
    /// The layout.
    layout: String,
    /// The GPUs.
    gpus: Vec<Target>,
}

/// A GPU that is to be drained.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    /// Its index on the node.
    index: u8,
    /// Its UUID.
    uuid: GpuUuid,
}

/// The requests of all nodes.
pub(crate) type ClusterDrains = PerNode<DrainRequest>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    #[serde(default)]
    mig_drain: Option<MigDrain>,
}

impl FromGpuNode for DrainRequest {
    fn read(node: &PartialGpuNode) -> Option<Self> {
        let status = node.status.as_ref()?;
        // Nearly no node has a request, and the status can be large.
        if !status.get().contains("\"migDrain\"") {
            return None;
        }
        let MigDrain { layout, gpus } = read_part::<Status>(status).ok()?.mig_drain?;
        let all = per_node::gpus(node)?.into_iter();
        let wanted = all.filter_map(|gpu| Some(Target { index: gpu.index, uuid: gpu.uuid? }));
        let wanted: Vec<Target> =
            wanted.filter(|gpu| gpus.iter().any(|uuid| uuid == gpu.uuid.as_str())).collect();
        (!wanted.is_empty()).then_some(Self { layout, gpus: wanted })
    }
}

/// The attempts on a GPU.
struct Attempts {
    next: Instant,
    pauses: Backoff,
    /// Obstacles that were reported.
    reported: BTreeSet<String>,
}

/// Evicts the pods that hold requested GPUs.
pub(crate) struct MigDrainer {
    client: Client,
    store: Arc<Store>,
    requests: Arc<ClusterDrains>,
    metrics: Arc<Metrics>,
    recorder: EventRecorder,
    attempts: HashMap<(NodeName, GpuUuid), Attempts>,
    /// When groups were evicted.
    evicted: VecDeque<Instant>,
}

impl MigDrainer {
    pub(crate) fn new(
        client: Client,
        store: Arc<Store>,
        requests: Arc<ClusterDrains>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let recorder = event::recorder(client.clone());
        let (attempts, evicted) = (HashMap::new(), VecDeque::new());
        Self { client, store, requests, metrics, recorder, attempts, evicted }
    }

    /// Drains until `until`.
    pub(crate) async fn run(mut self, until: CancellationToken) {
        let work = async {
            loop {
                tokio::time::sleep(TICK).await;
                // Gangs are evicted as a whole: all of their members must be known.
                if self.store.snapshot().synced {
                    self.drain_due().await;
                }
            }
        };
        until.run_until_cancelled(work).await;
    }

    /// Makes the next attempt on every GPU that is due.
    async fn drain_due(&mut self) {
        let requests = self.requests.all();
        self.attempts.retain(|(node, gpu), _| {
            requests.get(node).is_some_and(|request| request.gpus.iter().any(|target| target.uuid == *gpu))
        });
        for (node, request) in &requests {
            let now = Instant::now();
            let is_due = |target: &&Target| {
                let attempts = self.attempts.get(&(node.clone(), target.uuid.clone()));
                attempts.is_none_or(|attempts| attempts.next <= now)
            };
            let due: Vec<&Target> = request.gpus.iter().filter(is_due).collect();
            if due.is_empty() {
                continue;
            }
            if !self.admits_group() {
                return;
            }
            let drained = tokio::time::timeout(TIMEOUT, self.drain_node(node, &request.layout, &due)).await;
            let why = match drained {
                Ok(Ok(())) => continue,
                Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
                    format!("the extender lacks the rights of {RIGHTS}")
                }
                Ok(Err(kube::Error::Api(status))) => status.message.clone(),
                Ok(Err(error)) => chain(&error),
                Err(_) => format!("the API server does not respond within {} s", TIMEOUT.as_secs()),
            };
            for target in due {
                self.hold_back(node, (&request.layout, target), &why).await;
                self.pause(node, target, true);
            }
        }
    }

    async fn drain_node(&mut self, node: &NodeName, layout: &str, due: &[&Target]) -> kube::Result<()> {
        if !self.is_allowed(node, layout).await? {
            due.iter().for_each(|target| self.pause(node, target, false));
            return Ok(());
        }
        let Some(found) = Api::<GpuNode>::all(self.client.clone()).get_opt(node.as_str()).await? else {
            return Ok(());
        };
        for target in due {
            if is_withheld(&found, layout, target) && !self.drain_gpu(node, &found, (layout, target)).await? {
                // The rate admits no further group now.
                return Ok(());
            }
        }
        Ok(())
    }

    /// Whether the Node's labels still choose the layout and allow the drain. The GpuNode may be out of date: its plugin may
    /// have ended.
    async fn is_allowed(&self, node: &NodeName, layout: &str) -> kube::Result<bool> {
        let node = Api::<Node>::all(self.client.clone()).get_metadata_opt(node.as_str()).await?;
        let labels = node.and_then(|node| node.metadata.labels).unwrap_or_default();
        let has = |name: &str, value: &str| labels.get(name).is_some_and(|known| known == value);
        Ok(has(names::MIG_DRAIN_LABEL, "true") && has(names::MIG_LAYOUT_LABEL, layout))
    }

    /// Evicts the holders of a GPU, as far as they may be evicted now. Returns false where the rate does not admit more.
    async fn drain_gpu(
        &mut self,
        node: &NodeName,
        found: &GpuNode,
        (layout, target): (&str, &Target),
    ) -> kube::Result<bool> {
        let reported = eviction::reported_holders(found, &target.uuid);
        let units = eviction::units(found, &target.uuid);
        let known = self.store.read(|index| index.holder_groups(node.as_str(), &units));
        let groups = eviction::groups(&self.client, &known, &reported).await?;
        let budgets = eviction::budgets(&self.client, &groups).await?;
        let mut is_held_back = false;
        for group in groups.iter().filter(|group| group.pods.iter().any(|pod| !pod.leaving)) {
            let refused = eviction::refused([group], false).err().map(|refusal| refusal.text);
            if let Some(why) = refused.or_else(|| eviction::blocked(group, &budgets)) {
                self.hold_back(node, (layout, target), &format!("{group} stays: {why}")).await;
                is_held_back = true;
            } else if self.admits_group() {
                self.evicted.push_back(Instant::now());
                is_held_back |= !self.evict_group(node, (layout, target), group).await?;
            } else {
                return Ok(false);
            }
        }
        self.pause(node, target, is_held_back);
        Ok(true)
    }

    /// Whether the rate admits another group.
    fn admits_group(&mut self) -> bool {
        let now = Instant::now();
        while self.evicted.front().is_some_and(|at| now.duration_since(*at) >= RATE_TIME) {
            self.evicted.pop_front();
        }
        self.evicted.len() < MAX_GROUPS
    }

    /// Evicts the pods of a group. Returns false if a budget protects one of them.
    async fn evict_group(
        &mut self,
        node: &NodeName,
        (layout, target): (&str, &Target),
        group: &Group,
    ) -> kube::Result<bool> {
        let mut is_done = true;
        for pod in group.pods.iter().filter(|pod| !pod.leaving) {
            match eviction::evict(&self.client, pod, false).await? {
                EvictionOutcome::Done => {
                    let about = event::pod(&pod.namespace, &pod.name, &pod.uid);
                    let text =
                        format!("GPU {} of {node} is drained for the MIG layout {layout}", target.index);
                    self.recorder.record(about, event::message(Reason::GpuDrained, true, text)).await;
                }
                EvictionOutcome::Gone => {}
                EvictionOutcome::Blocked(why) => {
                    self.hold_back(node, (layout, target), &format!("{pod} stays: {why}")).await;
                    is_done = false;
                }
            }
        }
        if is_done {
            self.metrics.mig_drain("evicted");
            let text = format!("MIG layout {layout}: GPU {}: {group} is evicted", target.index);
            self.publish(node, Reason::GpuDrained, false, &text).await;
        }
        Ok(is_done)
    }

    /// Reports once what holds a GPU back.
    async fn hold_back(&mut self, node: &NodeName, (layout, target): (&str, &Target), why: &str) {
        let text = format!("MIG layout {layout}: GPU {}: {why}", target.index);
        let reported = &mut self.attempts_on(node, target).reported;
        if reported.len() < MAX_REPORTED && reported.insert(text.clone()) {
            self.metrics.mig_drain("held_back");
            self.publish(node, Reason::MigDrainHeldBack, true, &text).await;
        }
    }

    /// Sets when the next attempt on a GPU is due.
    fn pause(&mut self, node: &NodeName, target: &Target, is_held_back: bool) {
        let attempts = self.attempts_on(node, target);
        if !is_held_back {
            attempts.pauses.reset();
        }
        attempts.next = Instant::now() + attempts.pauses.fail();
    }

    fn attempts_on(&mut self, node: &NodeName, target: &Target) -> &mut Attempts {
        let new = || Attempts { next: Instant::now(), pauses: PAUSES, reported: BTreeSet::new() };
        self.attempts.entry((node.clone(), target.uuid.clone())).or_insert_with(new)
    }

    /// Publishes an Event on a Node, and logs it.
    async fn publish(&mut self, node: &NodeName, reason: Reason, warning: bool, text: &str) {
        tracing::info!(%node, %reason, "{text}");
        let about = events::cluster_object(("v1", "Node"), node.as_str(), node.as_str());
        self.recorder.record(about, event::message(reason, warning, text)).await;
    }
}

/// Whether a GpuNode still requests the drain of a GPU, and new pods do not get the GPU.
fn is_withheld(node: &GpuNode, layout: &str, target: &Target) -> bool {
    let Some(status) = &node.status else {
        return false;
    };
    let is_requested =
        |drain: &MigDrain| drain.layout == layout && drain.gpus.iter().any(|gpu| gpu == target.uuid.as_str());
    let units = eviction::units(node, &target.uuid);
    let mut devices = status.devices.iter().filter(|device| units.contains(device.id.unit()));
    status.mig_drain.as_ref().is_some_and(is_requested) && devices.all(|device| !device.health.healthy)
}

#[cfg(test)]
mod tests;
