//! Writes the node's `GpuNode`: the machine when it changes, the account when it changes, never oftener than a few times a
//! second. The only writer of that object.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{GpuNode, GpuNodeSpec, GpuNodeStatus, NodeName, names};
use gantry_topology::Machine;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{GetParams, Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{Cluster, Pauses, status};
use crate::inventory::{Inventory, State};
use crate::recurring::{Recurring, chain};

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
        let mut changes = self.cluster.desk.changes();
        let mut inventories = self.cluster.inventory.clone();
        let mut readiness = self.cluster.observed.changes();
        let mut diagnoses = self.cluster.sickbay.diagnosis();
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
        let desk = &self.cluster.desk;
        let told = || desk.is_told() || self.cluster.observed.readiness().pod_resources == Some(false);
        // Nor may what is wrong replace the faults that an earlier run stored before they were taken in.
        let adopted = self.cluster.sickbay.now().adopted;
        adopted && desk.is_synced() && (inventory.state != State::Ready || told())
    }

    /// The account as it is now.
    fn current(&self, inventory: &Inventory) -> GpuNodeStatus {
        status::status(
            inventory,
            &self.cluster.desk,
            &self.cluster.sickbay.now(),
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
        let stored = self.api.get_opt(self.cluster.node.as_str()).await?;
        Ok(stored.map_or_else(
            || Arc::clone(&inventory.machine),
            |stored| Arc::new(stored.spec.machine),
        ))
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
        self.api
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
        self.api
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
mod tests {
    use gantry_topology::{Gpu, MachineParts, PathClass, PathMatrix};
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::Value;
    use tower_test::mock;

    use super::*;
    use crate::handover::{Desk, Handover};
    use crate::inventory::Sickbay;
    use crate::observe::Observed;
    use crate::recurring::log::Log;

    /// Whether the GpuNode counts as lost where the Node, then it, are answered so.
    async fn lost(node: (u16, Value), gpu_node: (u16, Value)) -> Result<bool, kube::Error> {
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        let answers = async move {
            while let Some((request, send)) = api.next_request().await {
                let uri = request.uri();
                assert_eq!(uri.query(), Some("&resourceVersion=0"), "from memory");
                let (code, answer) = match uri.path() {
                    "/api/v1/nodes/node-1" => &node,
                    "/apis/gantry.dev/v1alpha1/gpunodes/node-1" => &gpu_node,
                    other => panic!("{other}"),
                };
                let body = Body::from(answer.to_string().into_bytes());
                send.send_response(Response::builder().status(*code).body(body).unwrap());
            }
        };
        tokio::spawn(answers);
        let client = Client::new(service, "default");
        is_lost(&Api::all(client.clone()), &Api::all(client), &"node-1".into()).await
    }

    fn node(uid: &str) -> (u16, Value) {
        let metadata = json!({"name": "node-1", "uid": uid});
        (
            200,
            json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": metadata}),
        )
    }

    fn owned_by(uid: Option<&str>) -> (u16, Value) {
        let (code, mut answer) = node("g");
        let owner = uid.map(|uid| json!({"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": uid}));
        answer["metadata"]["ownerReferences"] = owner.into_iter().collect();
        (code, answer)
    }

    fn refused(code: u16, reason: &str) -> (u16, Value) {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code});
        (code, status)
    }

    #[tokio::test]
    async fn a_gpunode_that_is_gone_or_goes_with_an_earlier_node_is_lost() {
        let gone = || refused(404, "NotFound");
        let forbidden = || refused(403, "Forbidden");
        for (node, gpu_node, expected) in [
            (node("second"), owned_by(Some("second")), false),
            (node("second"), gone(), true),
            (node("second"), owned_by(Some("first")), true),
            (node("second"), owned_by(None), true),
            // No Node, no GpuNode.
            (gone(), gone(), false),
            (gone(), owned_by(Some("first")), false),
            (forbidden(), owned_by(None), false),
            (forbidden(), gone(), true),
        ] {
            let case = format!("{node:?} {gpu_node:?}");
            assert_eq!(lost(node, gpu_node).await.unwrap(), expected, "{case}");
        }
        let away = || refused(503, "ServiceUnavailable");
        lost(away(), gone()).await.unwrap_err();
        lost(node("second"), away()).await.unwrap_err();
    }

    /// A publisher of a node without a driver.
    fn publisher(client: Client) -> Publisher {
        let observed = Arc::new(Observed::default());
        let handover = Handover::new("node-1".into());
        let absent = Inventory::absent("no driver");
        let cluster = Cluster {
            node: "node-1".into(),
            kubeconfig: None,
            inventory: tokio::sync::watch::channel(Arc::new(absent)).1,
            desk: Arc::new(Desk::new(handover, Arc::clone(&observed), None)),
            observed,
            sickbay: Sickbay::of_nobody(),
        };
        Publisher::new(client, cluster)
    }

    /// Publishes what is lost to an API server where the Node is answered so and an earlier run has published a machine, and what
    /// that server was then sent.
    async fn publish_lost(code: u16, answer: Value) -> (Result<(), kube::Error>, Vec<Value>) {
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        let (sent, mut received) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some((request, send)) = api.next_request().await {
                let (parts, body) = request.into_parts();
                let (code, body) = match (parts.method.as_str(), parts.uri.path()) {
                    ("GET", "/api/v1/nodes/node-1") => (code, answer.clone()),
                    ("GET", _) => (200, stored()),
                    _ => {
                        let body = body.collect_bytes().await.unwrap();
                        let body: Value = serde_json::from_slice(&body).unwrap();
                        sent.send(body.clone()).unwrap();
                        (200, body)
                    }
                };
                let body = Body::from(body.to_string().into_bytes());
                send.send_response(Response::builder().status(code).body(body).unwrap());
            }
        });
        let mut publisher = publisher(Client::new(service, "default"));
        publisher.forget();
        let published = publisher.publish().await;
        drop(publisher);
        let mut all = Vec::new();
        while let Ok(body) = received.try_recv() {
            all.push(body);
        }
        (published, all)
    }

    /// What an earlier run has published.
    fn stored() -> Value {
        let machine = Machine::new(MachineParts {
            gpus: vec![Gpu::default()],
            paths: PathMatrix::from_fn(1, |_, _| PathClass::Pix),
            ..MachineParts::default()
        })
        .unwrap();
        serde_json::to_value(GpuNode::new("node-1", GpuNodeSpec { machine })).unwrap()
    }

    #[tokio::test]
    async fn a_lost_gpunode_goes_with_the_node_again_also_without_a_driver_and_keeps_its_machine() {
        let (code, answer) = node("second");
        let (published, sent) = publish_lost(code, answer).await;
        published.unwrap();
        assert_eq!(sent[0]["metadata"]["ownerReferences"][0]["uid"], "second");
        assert_eq!(sent[0]["spec"], stored()["spec"]);
    }

    #[tokio::test]
    async fn without_knowing_the_node_nothing_is_written_unless_it_may_not_be_read() {
        for (code, reason) in [
            (429, "TooManyRequests"),
            (503, "ServiceUnavailable"),
            (401, "Unauthorized"),
        ] {
            let (code, answer) = refused(code, reason);
            let (published, sent) = publish_lost(code, answer).await;
            published.unwrap_err();
            assert_eq!(sent, Vec::<Value>::new(), "{code}");
        }
        let (code, answer) = refused(403, "Forbidden");
        let (published, sent) = publish_lost(code, answer).await;
        published.unwrap();
        assert_eq!(sent[0]["metadata"].get("ownerReferences"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_is_away_is_asked_again_but_not_complained_of_each_time() {
        const REFUSALS: usize = 50;
        let log = Log::default();
        let _here = log.listen();
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        let shutdown = CancellationToken::new();
        let enough = shutdown.clone();
        tokio::spawn(async move {
            for _ in 0..REFUSALS {
                let (_, send) = api.next_request().await.unwrap();
                let (code, answer) = refused(503, "ServiceUnavailable");
                let body = Body::from(answer.to_string().into_bytes());
                send.send_response(Response::builder().status(code).body(body).unwrap());
            }
            enough.cancel();
        });
        let mut publisher = publisher(Client::new(service, "default"));
        publisher.forget();
        publisher.run(shutdown).await;
        let told = log.of("cannot publish the GpuNode");
        assert!((1..REFUSALS / 5).contains(&told), "{told} of {REFUSALS}");
    }

    #[test]
    fn nodes_do_not_all_look_at_once() {
        let mut pauses: Vec<Duration> = (0..100)
            .map(|number| between(&format!("node-{number}").as_str().into()))
            .collect();
        pauses.sort_unstable();
        assert!(pauses[0] >= LOOK - SPREAD / 2 && pauses[99] <= LOOK + SPREAD / 2);
        assert!(pauses[90] - pauses[10] > SPREAD / 2);
    }
}
