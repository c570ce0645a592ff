//! Writes the node's `GpuNode`: machine and status when they change, at most a few times per second. The only writer of
//! that object.

use std::borrow::Cow;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{GpuNode, GpuNodeSpec, GpuNodeStatus, GpuProblem, MigDrain, NodeName, names};
use gantry_runtime::chain;
use gantry_topology::Machine;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DynamicObject, GetParams, Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::previous_status::{self, PreviousStatus};
use super::{Cluster, RETRY, numa, status};
use crate::inventory::{Inventory, State};
use crate::kubelet_config::{self, KubeletConfig};
use gantry_runtime::LogThrottle;

/// Shortest interval of two writes of the status. The first change after a pause is written at once.
const MIN_INTERVAL: Duration = Duration::from_millis(200);
/// Delay of a write after a change, so that kubelet gets the response to the call that caused it first on the same
/// thread.
const WRITE_DELAY: Duration = Duration::from_millis(2);
/// Interval at which the object is written without changes, in case it was deleted or modified.
const REFRESH_INTERVAL: Duration = Duration::from_secs(300);
/// Interval of checks that the object exists and belongs to the present Node; without it no devices of this node are
/// granted. Reads the metadata of two objects, which the API server has in memory.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);
/// Largest difference of that interval between nodes, which are often started at the same time.
const CHECK_SPREAD: Duration = Duration::from_secs(4);
/// Time limit of a single write.
const DEADLINE: Duration = Duration::from_secs(10);
/// Time limit of the last write at shutdown.
const LAST_DEADLINE: Duration = Duration::from_secs(1);
/// Fields of the status without which it is published, if the definition in the cluster does not have them yet.
const NEW_FIELDS: [&str; 5] = ["evidence", "cpus", "memory", "clocks", "migDrain"];

/// The writer, with the state last written.
pub(super) struct Publisher {
    api: Api<GpuNode>,
    /// The machine as JSON: one written by another version is replaced without being parsed.
    objects: Api<DynamicObject>,
    nodes: Api<Node>,
    cluster: Cluster,
    /// The GPUs that are to be drained for a MIG layout.
    drain: watch::Receiver<Option<MigDrain>>,
    machine: Option<Arc<Machine>>,
    /// Kubelet's Topology Manager as last read.
    kubelet: Option<KubeletConfig>,
    /// Throttles failures to read it.
    kubelet_log: LogThrottle,
    status: Option<GpuNodeStatus>,
    /// Whether the definition in the cluster lacks fields, which is logged once.
    has_old_definition: bool,
    /// Problems that an earlier run published; `None` before they were read.
    earlier: Option<Vec<GpuProblem>>,
    /// Whether the object must be written even without changes.
    rewrite: bool,
    /// The Node as last read.
    owner: Option<OwnerReference>,
}

impl Publisher {
    pub(super) fn new(client: Client, cluster: Cluster, drain: watch::Receiver<Option<MigDrain>>) -> Self {
        Self {
            api: Api::all(client.clone()),
            objects: previous_status::objects(client.clone()),
            nodes: Api::all(client),
            cluster,
            drain,
            machine: None,
            kubelet: None,
            kubelet_log: LogThrottle::default(),
            status: None,
            has_old_definition: false,
            earlier: None,
            rewrite: false,
            owner: None,
        }
    }

    /// Publishes until `shutdown`, and then the stopped condition.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let mut changes = self.cluster.handover.changes();
        let mut inventories = self.cluster.inventory.clone();
        let mut offered = self.cluster.offered.clone();
        let mut readiness = self.cluster.observed.changes();
        let mut diagnoses = self.cluster.diagnoses.diagnosis();
        let mut drain = self.drain.clone();
        let mut backoff = RETRY;
        let mut unpublished = LogThrottle::default();
        let mut repeat = Instant::now() + REFRESH_INTERVAL;
        let between = between(&self.cluster.node);
        let mut look = Instant::now() + between;
        loop {
            changes.mark_unchanged();
            inventories.mark_unchanged();
            offered.mark_unchanged();
            readiness.mark_unchanged();
            diagnoses.mark_unchanged();
            drain.mark_unchanged();
            let published = tokio::select! {
                published = tokio::time::timeout(DEADLINE, self.publish()) => published,
                // A pending write may finish shortly, because it must not follow the last one.
                () = passed(&shutdown, LAST_DEADLINE) => break,
            };
            let wait = match published {
                Ok(Ok(())) => {
                    backoff.reset();
                    unpublished.reset();
                    None
                }
                Ok(Err(error)) => {
                    let pause = backoff.fail();
                    if unpublished.should_log(&chain(&error), Instant::now().into_std()) {
                        warn!(
                            error = %chain(&error),
                            ?pause,
                            "cannot publish the GpuNode, trying again"
                        );
                    }
                    Some(pause)
                }
                Err(_) => {
                    if unpublished.should_log("no response", Instant::now().into_std()) {
                        warn!(after = ?DEADLINE, "the API server does not respond to a write of the GpuNode, trying again");
                    }
                    Some(backoff.fail())
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = tokio::time::sleep(wait.unwrap_or(MIN_INTERVAL)) => {}
            }
            if wait.is_some() {
                continue;
            }
            tokio::select! {
                () = shutdown.cancelled() => break,
                _ = changes.changed() => {}
                _ = inventories.changed() => {}
                // Its sender may end before the others.
                Ok(()) = offered.changed() => {}
                _ = readiness.changed() => {}
                _ = diagnoses.changed() => {}
                // Its sender exists only where layouts are applied.
                Ok(()) = drain.changed() => {}
                () = tokio::time::sleep_until(repeat) => {
                    repeat = Instant::now() + REFRESH_INTERVAL;
                    self.forget();
                }
                () = tokio::time::sleep_until(look) => {
                    let looked = tokio::select! {
                        () = shutdown.cancelled() => break,
                        looked = tokio::time::timeout(DEADLINE, self.is_lost()) => looked,
                    };
                    look = Instant::now() + between;
                    match looked {
                        Ok(Ok(true)) => {
                            info!("the GpuNode is missing or belongs to an earlier Node of this name; writing it again");
                            self.forget();
                        }
                        Ok(Ok(false)) => {}
                        Ok(Err(error)) => debug!(error = %chain(&error), "cannot read the GpuNode of this node"),
                        Err(_) => debug!("reading the GpuNode of this node timed out"),
                    }
                }
            }
            tokio::time::sleep(WRITE_DELAY).await;
        }
        self.leave().await;
    }

    /// Makes the next publication write everything.
    fn forget(&mut self) {
        self.rewrite = true;
        self.status = None;
    }

    /// Whether the written object is missing or about to be garbage-collected.
    async fn is_lost(&self) -> Result<bool, kube::Error> {
        if self.machine.is_none() && self.status.is_none() {
            return Ok(false);
        }
        is_lost(&self.nodes, &self.api, &self.cluster.node).await
    }

    /// Writes what differs from the state last written.
    async fn publish(&mut self) -> Result<(), kube::Error> {
        let inventory = Arc::clone(&self.cluster.inventory.borrow());
        if inventory.state == State::Starting {
            return Ok(());
        }
        self.read_kubelet_config();
        if inventory.state == State::Ready {
            if self.rewrite || self.machine.as_ref() != Some(&inventory.machine) {
                self.write_machine(&inventory.machine).await?;
            }
        } else if self.rewrite {
            // Without a driver too: an object without a present Node as owner would be collected.
            let machine = self.published(&inventory).await?;
            self.write_machine(&machine).await?;
        }
        if self.earlier.is_none() {
            self.earlier = Some(self.earlier_problems().await?);
        }
        let status = self.current(&inventory);
        if !self.knows_holders(&inventory) || self.status.as_ref() == Some(&status) {
            return Ok(());
        }
        match self.write_status(&status).await {
            Err(kube::Error::Api(answer)) if answer.code == 404 => {
                self.write_machine(&inventory.machine).await?;
                self.write_status(&status).await?;
            }
            written => written?,
        }
        debug!(holders = status.holders.len(), "status published");
        self.status = Some(status);
        Ok(())
    }

    /// Whether the holders may replace those of an earlier run, including its quarantine: only after that status and
    /// the pods were read, and PodResources was read or is unavailable.
    fn knows_holders(&self, inventory: &Inventory) -> bool {
        let handover = &self.cluster.handover;
        let is_reconciled =
            || handover.has_listing() || self.cluster.observed.readiness().pod_resources == Some(false);
        // The same holds for faults stored by an earlier run until they were adopted.
        let adopted = self.cluster.diagnoses.now().adopted;
        adopted && handover.is_synced() && (inventory.state != State::Ready || is_reconciled())
    }

    /// The problems that an earlier run published. Without the right to read them they begin now.
    async fn earlier_problems(&self) -> Result<Vec<GpuProblem>, kube::Error> {
        match self.objects.get_opt(self.cluster.node.as_str()).await {
            Ok(found) => Ok(found.map(|node| PreviousStatus::of(&node).problems).unwrap_or_default()),
            Err(kube::Error::Api(answer)) if answer.code == 403 => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    fn current(&self, inventory: &Inventory) -> GpuNodeStatus {
        let mut status = status::status(
            (inventory, &self.cluster.offered.borrow().clone()),
            &self.cluster.handover,
            &self.cluster.diagnoses.now(),
            &self.cluster.observed.readiness(),
            (self.status.as_ref(), self.earlier.as_deref().unwrap_or_default()),
            Timestamp::now(),
        );
        status.mig_drain = self.drain.borrow().clone();
        let Some(kubelet) = &self.kubelet else {
            return status;
        };
        let listing = self.cluster.handover.numa();
        if kubelet.refuses_by_cpus() {
            status.cpus = numa::cpus(&listing, &self.cluster.sys_root, kubelet);
        }
        if kubelet.refuses_by_memory() {
            status.memory = numa::memory(&listing);
        }
        status
    }

    /// The machine as last written, possibly by an earlier run: nothing better is known without a driver.
    async fn published(&self, inventory: &Inventory) -> Result<Arc<Machine>, kube::Error> {
        if let Some(machine) = &self.machine {
            return Ok(Arc::clone(machine));
        }
        let stored = self.objects.get_opt(self.cluster.node.as_str()).await?;
        let machine = stored.and_then(|stored| Machine::deserialize(&stored.data["spec"]["machine"]).ok());
        Ok(machine.map_or_else(|| Arc::clone(&inventory.machine), Arc::new))
    }

    /// Reads kubelet's configuration file again: kubelet may have been restarted with another one. While it cannot be used, the
    /// last one stays published.
    fn read_kubelet_config(&mut self) {
        let Some(path) = &self.cluster.kubelet_config else {
            return;
        };
        match kubelet_config::read(path) {
            Ok(read) => {
                self.kubelet_log.reset();
                self.rewrite |= self.kubelet.as_ref().map(|known| &known.topology) != Some(&read.topology);
                self.kubelet = Some(read);
            }
            Err(error) => {
                if self.kubelet_log.should_log(&chain(&error), Instant::now().into_std()) {
                    warn!(
                        path = %path.display(),
                        error = %chain(&error),
                        "kubelet's configuration cannot be used; pods may get devices that its Topology Manager refuses"
                    );
                }
            }
        }
    }

    async fn write_machine(&mut self, machine: &Arc<Machine>) -> Result<(), kube::Error> {
        self.find_owner().await?;
        let owners = self.owner.clone().map(|owner| vec![owner]);
        let kubelet = self.kubelet.as_ref().map(|kubelet| kubelet.topology.clone());
        let spec = GpuNodeSpec { machine: (**machine).clone(), kubelet };
        let node = self.cluster.node.as_str();
        let applied = AppliedGpuNode { spec: Some(&spec), ..AppliedGpuNode::new(node, owners) };
        self.api.patch_metadata(node, &parameters(), &Patch::Apply(&applied)).await?;
        info!(gpus = machine.gpus().len(), "machine published");
        self.machine = Some(Arc::clone(machine));
        self.rewrite = false;
        Ok(())
    }

    async fn write_status(&mut self, status: &GpuNodeStatus) -> Result<(), kube::Error> {
        match self.apply_status(status).await {
            Err(error) if lacks_new_field(&error) => {
                if !std::mem::replace(&mut self.has_old_definition, true) {
                    warn!(
                        error = %chain(&error),
                        "the definition of GpuNodes is older than this plugin; evidence, CPUs, memory, clocks and drains for MIG layouts are not published; \
                         apply manifests/crds.yaml of this version"
                    );
                }
                let known = GpuNodeStatus {
                    evidence: Vec::new(),
                    cpus: Vec::new(),
                    memory: Vec::new(),
                    clocks: Vec::new(),
                    mig_drain: None,
                    ..status.clone()
                };
                self.apply_status(&known).await
            }
            applied => applied,
        }
    }

    async fn apply_status(&self, status: &GpuNodeStatus) -> Result<(), kube::Error> {
        let node = self.cluster.node.as_str();
        let applied = AppliedGpuNode { status: Some(status), ..AppliedGpuNode::new(node, None) };
        self.api.patch_metadata(&format!("{node}/status"), &parameters(), &Patch::Apply(&applied)).await?;
        Ok(())
    }

    /// Reads the Node as owner of the `GpuNode`, before every write: a Node that was deleted and registered again has
    /// another UID, and an object with the old UID would be garbage-collected. Without the permission to read it, the
    /// object has no owner. Any other failure is retried, because an object without an owner would be lost too.
    async fn find_owner(&mut self) -> Result<(), kube::Error> {
        match self.nodes.get_metadata_opt(self.cluster.node.as_str()).await {
            Ok(node) => {
                let uid = node.and_then(|node| node.metadata.uid);
                self.owner = uid.map(|uid| OwnerReference {
                    api_version: Node::api_version(&()).into_owned(),
                    kind: Node::kind(&()).into_owned(),
                    name: self.cluster.node.to_string(),
                    uid,
                    controller: None,
                    block_owner_deletion: None,
                });
            }
            Err(kube::Error::Api(answer)) if answer.code == 403 => {
                let (message, known) = (&answer.message, self.owner.is_some());
                debug!(message, known, "cannot read the Node");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn leave(&mut self) {
        if self.status.is_none() {
            return;
        }
        let inventory = Arc::clone(&self.cluster.inventory.borrow());
        let last = status::stopped(self.current(&inventory), Timestamp::now());
        match tokio::time::timeout(LAST_DEADLINE, self.write_status(&last)).await {
            Ok(Ok(())) => debug!("stopped condition published"),
            Ok(Err(error)) => debug!(error = %chain(&error), "cannot publish the stopped condition"),
            Err(_) => debug!("publishing the stopped condition timed out"),
        }
    }
}

/// The applied part of the object. It is written without a tree of JSON values, and only metadata is requested back: the
/// status of a node with very many devices takes several MiB.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct AppliedGpuNode<'a> {
    api_version: Cow<'static, str>,
    kind: Cow<'static, str>,
    metadata: ObjectMeta,
    #[serde(skip_serializing_if = "Option::is_none")]
    spec: Option<&'a GpuNodeSpec>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'a GpuNodeStatus>,
}

impl AppliedGpuNode<'_> {
    fn new(node: &str, owner_references: Option<Vec<OwnerReference>>) -> Self {
        let metadata = ObjectMeta { name: Some(node.to_owned()), owner_references, ..ObjectMeta::default() };
        let (api_version, kind) = (GpuNode::api_version(&()), GpuNode::kind(&()));
        Self { api_version, kind, metadata, spec: None, status: None }
    }
}

/// The interval of checks, different for each node.
fn between(node: &NodeName) -> Duration {
    let mut hasher = std::hash::DefaultHasher::new();
    node.hash(&mut hasher);
    let spread = u64::try_from(CHECK_SPREAD.as_millis()).unwrap_or(u64::MAX);
    CHECK_INTERVAL - CHECK_SPREAD / 2 + Duration::from_millis(hasher.finish() % spread)
}

/// Whether the `GpuNode` is missing, or does not belong to the present Node, so that the garbage collector removes it.
/// If the Node is gone, no `GpuNode` is needed. Cached reads may be slightly outdated; then an object that was just
/// written is written again.
async fn is_lost(nodes: &Api<Node>, api: &Api<GpuNode>, name: &NodeName) -> Result<bool, kube::Error> {
    let any = GetParams::any();
    let uid = match nodes.get_metadata_opt_with(name.as_str(), &any).await {
        Ok(None) => return Ok(false),
        Ok(Some(node)) => node.metadata.uid,
        // Without the permission to read the Node, the object has no owner.
        Err(kube::Error::Api(status)) if status.code == 403 => None,
        Err(error) => return Err(error),
    };
    let Some(found) = api.get_metadata_opt_with(name.as_str(), &any).await? else {
        return Ok(true);
    };
    let mut owners = found.metadata.owner_references.iter().flatten();
    Ok(uid.is_some_and(|uid| !owners.any(|owner| owner.uid == uid)))
}

/// Returns this time after `shutdown`.
async fn passed(shutdown: &CancellationToken, time: Duration) {
    shutdown.cancelled().await;
    tokio::time::sleep(time).await;
}

/// Whether the definition of GpuNodes in the cluster lacks one of [`NEW_FIELDS`]. Server-side apply refuses unknown fields; no
/// code but its text shows which.
fn lacks_new_field(error: &kube::Error) -> bool {
    let kube::Error::Api(answer) = error else {
        return false;
    };
    // Fields of evidence and of clocks.
    let inner = ["judged", "powerPercent"];
    NEW_FIELDS
        .iter()
        .chain(&inner)
        .any(|field| answer.message.contains(&format!(".{field}: field not declared in schema")))
}

fn parameters() -> PatchParams {
    PatchParams::apply(names::PLUGIN).force()
}

#[cfg(test)]
mod tests;
