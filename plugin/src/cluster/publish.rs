//! Writes the node's `GpuNode`: the machine when it changes, the account when it changes, never oftener than a few times a
//! second. The only writer of that object.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{GpuNode, GpuNodeSpec, GpuNodeStatus, NodeName, names};
use gantry_runtime::chain;
use gantry_topology::Machine;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DynamicObject, GetParams, Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{Cluster, Pauses, earlier, status};
use crate::inventory::{Inventory, State};
use crate::recurring::Recurring;

/// Shortest time between two writes of the account. The first change after a pause is written at once.
const SHORTEST: Duration = Duration::from_millis(200);
/// From a change until it is written: kubelet, whose question has made it, gets its answer first, for both are the work of one thread.
const GATHER: Duration = Duration::from_millis(2);
/// The object is written again after this time even if nothing changed, should somebody have deleted or changed it.
const REPEAT: Duration = Duration::from_secs(300);
/// Between two looks whether the object is still there and goes with the Node that there is now: where it is missing the node's devices
/// are granted to nobody. Two objects' metadata, which the API server has in memory.
const LOOK: Duration = Duration::from_secs(15);
/// By how much at most that differs from node to node, for many are started at once.
const SPREAD: Duration = Duration::from_secs(4);
/// Longest time a single write may take.
const DEADLINE: Duration = Duration::from_secs(10);
/// The same when the plugin is leaving.
const LAST_DEADLINE: Duration = Duration::from_secs(1);

/// The writer and what it last wrote.
pub(super) struct Publisher {
    api: Api<GpuNode>,
    /// The same, as JSON: what another version has written is replaced, and need not be understood for that.
    objects: Api<DynamicObject>,
    nodes: Api<Node>,
    cluster: Cluster,
    machine: Option<Arc<Machine>>,
    status: Option<GpuNodeStatus>,
    /// Whether the object has to be written whatever was written last.
    anew: bool,
    /// The Node as last read.
    owner: Option<OwnerReference>,
}

impl Publisher {
    pub(super) fn new(client: Client, cluster: Cluster) -> Self {
        Self {
            api: Api::all(client.clone()),
            objects: earlier::objects(client.clone()),
            nodes: Api::all(client),
            cluster,
            machine: None,
            status: None,
            anew: false,
            owner: None,
        }
    }

    /// Publishes until `shutdown`, and then that the plugin has left.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let mut changes = self.cluster.handover.changes();
        let mut inventories = self.cluster.inventory.clone();
        let mut readiness = self.cluster.observed.changes();
        let mut diagnoses = self.cluster.diagnoses.diagnosis();
        let mut pauses = Pauses::default();
        let mut unpublished = Recurring::default();
        let mut repeat = Instant::now() + REPEAT;
        let between = between(&self.cluster.node);
        let mut look = Instant::now() + between;
        loop {
            changes.mark_unchanged();
            inventories.mark_unchanged();
            readiness.mark_unchanged();
            diagnoses.mark_unchanged();
            let published = tokio::select! {
                published = tokio::time::timeout(DEADLINE, self.publish()) => published,
                // What is being written is waited for a little, for it must not come after the last word.
                () = passed(&shutdown, LAST_DEADLINE) => break,
            };
            let wait = match published {
                Ok(Ok(())) => {
                    pauses.reset();
                    unpublished.over();
                    None
                }
                Ok(Err(error)) => {
                    let pause = pauses.next();
                    if unpublished.tells(&chain(&error), Instant::now().into_std()) {
                        warn!(
                            error = &error as &dyn std::error::Error,
                            ?pause,
                            "cannot publish the GpuNode, trying again"
                        );
                    }
                    Some(pause)
                }
                Err(_) => {
                    if unpublished.tells("no answer", Instant::now().into_std()) {
                        warn!(after = ?DEADLINE, "the API server takes no GpuNode, trying again");
                    }
                    Some(pauses.next())
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = tokio::time::sleep(wait.unwrap_or(SHORTEST)) => {}
            }
            if wait.is_some() {
                continue;
            }
            tokio::select! {
                () = shutdown.cancelled() => break,
                _ = changes.changed() => {}
                _ = inventories.changed() => {}
                _ = readiness.changed() => {}
                _ = diagnoses.changed() => {}
                () = tokio::time::sleep_until(repeat) => {
                    repeat = Instant::now() + REPEAT;
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
                            info!("the GpuNode is gone, or was of an earlier Node of this name; it is written anew");
                            self.forget();
                        }
                        Ok(Ok(false)) => {}
                        Ok(Err(error)) => debug!(%error, "cannot look for the own GpuNode"),
                        Err(_) => debug!("cannot look for the own GpuNode in time"),
                    }
                }
            }
            tokio::time::sleep(GATHER).await;
        }
        self.leave().await;
    }

    /// All of it is written anew.
    fn forget(&mut self) {
        self.anew = true;
        self.status = None;
    }

    /// Whether what was written has to be written anew, for the object is gone or about to be.
    async fn is_lost(&self) -> Result<bool, kube::Error> {
        if self.machine.is_none() && self.status.is_none() {
            return Ok(false);
        }
        is_lost(&self.nodes, &self.api, &self.cluster.node).await
    }

    /// Writes what differs from what was last written.
    async fn publish(&mut self) -> Result<(), kube::Error> {
        let inventory = Arc::clone(&self.cluster.inventory.borrow());
        if inventory.state == State::Starting {
            return Ok(());
        }
        if inventory.state == State::Ready {
            if self.anew || self.machine.as_ref() != Some(&inventory.machine) {
                self.write_machine(&inventory.machine).await?;
            }
        } else if self.anew {
            // Without a driver too: an object that goes with no Node that there is would be collected.
            let machine = self.published(&inventory).await?;
            self.write_machine(&machine).await?;
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
        debug!(holders = status.holders.len(), "account published");
        self.status = Some(status);
        Ok(())
    }

    /// Whether what is known of holders may replace what an earlier run published, quarantines and all: once that and the pods
    /// have been read, and kubelet has said who holds what, or does not say it.
    fn knows_holders(&self, inventory: &Inventory) -> bool {
        let handover = &self.cluster.handover;
        let told = || handover.is_told() || self.cluster.observed.readiness().pod_resources == Some(false);
        // Nor may what is wrong replace the faults that an earlier run stored before they were taken in.
        let adopted = self.cluster.diagnoses.now().adopted;
        adopted && handover.is_synced() && (inventory.state != State::Ready || told())
    }

    /// The account as it is now.
    fn current(&self, inventory: &Inventory) -> GpuNodeStatus {
        status::status(
            inventory,
            &self.cluster.handover,
            &self.cluster.diagnoses.now(),
            &self.cluster.observed.readiness(),
            self.status.as_ref(),
            Timestamp::now(),
        )
    }

    /// The machine as it was last written, if need be by an earlier run: without a driver nothing better is known.
    async fn published(&self, inventory: &Inventory) -> Result<Arc<Machine>, kube::Error> {
        if let Some(machine) = &self.machine {
            return Ok(Arc::clone(machine));
        }
        let stored = self.objects.get_opt(self.cluster.node.as_str()).await?;
        let machine = stored.and_then(|stored| Machine::deserialize(&stored.data["spec"]["machine"]).ok());
        Ok(machine.map_or_else(|| Arc::clone(&inventory.machine), Arc::new))
    }

    async fn write_machine(&mut self, machine: &Arc<Machine>) -> Result<(), kube::Error> {
        self.find_owner().await?;
        let mut node = GpuNode::new(
            self.cluster.node.as_str(),
            GpuNodeSpec {
                machine: (**machine).clone(),
            },
        );
        node.metadata.owner_references = self.owner.clone().map(|owner| vec![owner]);
        let apply = json!({
            "apiVersion": GpuNode::api_version(&()),
            "kind": GpuNode::kind(&()),
            "metadata": node.metadata,
            "spec": node.spec,
        });
        self.objects
            .patch(self.cluster.node.as_str(), &parameters(), &Patch::Apply(&apply))
            .await?;
        info!(gpus = machine.gpus().len(), "machine published");
        self.machine = Some(Arc::clone(machine));
        self.anew = false;
        Ok(())
    }

    async fn write_status(&self, status: &GpuNodeStatus) -> Result<(), kube::Error> {
        let apply = json!({
            "apiVersion": GpuNode::api_version(&()),
            "kind": GpuNode::kind(&()),
            "metadata": {"name": self.cluster.node},
            "status": status,
        });
        self.objects
            .patch_status(self.cluster.node.as_str(), &parameters(), &Patch::Apply(&apply))
            .await?;
        Ok(())
    }

    /// The Node, so that the `GpuNode` goes with it. Asked for with every write: a Node that was deleted and registered again
    /// has another UID, and an object with the old one would be collected as garbage. Without the right to read it the object
    /// stays behind. Any other failure is tried again: an object without its owner would be as lost.
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
                debug!(message, known, "the Node cannot be read");
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
            Ok(Ok(())) => debug!("leaving published"),
            Ok(Err(error)) => debug!(%error, "leaving could not be published"),
            Err(_) => debug!("leaving could not be published in time"),
        }
    }
}

/// The pause between two looks, of each node another.
fn between(node: &NodeName) -> Duration {
    let mut hasher = std::hash::DefaultHasher::new();
    node.hash(&mut hasher);
    let spread = u64::try_from(SPREAD.as_millis()).unwrap_or(u64::MAX);
    LOOK - SPREAD / 2 + Duration::from_millis(hasher.finish() % spread)
}

/// Whether the `GpuNode` is missing, or does not go with the Node that there is now: the garbage collector takes it then. A Node that is
/// gone takes its `GpuNode` with it, and none is wanted. Answers may be a little old, by which one that was just written is written again.
async fn is_lost(nodes: &Api<Node>, api: &Api<GpuNode>, name: &NodeName) -> Result<bool, kube::Error> {
    let any = GetParams::any();
    let uid = match nodes.get_metadata_opt_with(name.as_str(), &any).await {
        Ok(None) => return Ok(false),
        Ok(Some(node)) => node.metadata.uid,
        // Without the right to read it the object goes with no Node.
        Err(kube::Error::Api(status)) if status.code == 403 => None,
        Err(error) => return Err(error),
    };
    let Some(found) = api.get_metadata_opt_with(name.as_str(), &any).await? else {
        return Ok(true);
    };
    let mut owners = found.metadata.owner_references.iter().flatten();
    Ok(uid.is_some_and(|uid| !owners.any(|owner| owner.uid == uid)))
}

/// Comes back so long after `shutdown`.
async fn passed(shutdown: &CancellationToken, time: Duration) {
    shutdown.cancelled().await;
    tokio::time::sleep(time).await;
}

fn parameters() -> PatchParams {
    PatchParams::apply(names::PLUGIN).force()
}

#[cfg(test)]
mod tests;
