//! The cluster as the extender sees it, for a command that reads it once: the same watches and the same index, without
//! the tasks that write.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use gantry_api::{Gang, GpuNode, NodeName, Placement, ResourceName, names};
use gantry_gang::integrations::is_object_name;
use gantry_gang::protocol::Settings;
use gantry_gang::{Ceilings, GangKey, Levels};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::ListParams;
use kube::{Api, Client, Resource};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::gang::{budgets, owners};
use crate::index::{Index, Store};
use crate::lease::Leadership;
use crate::object_memory::{Kind, ObjectMemory};
use crate::pod::SlimPod;
use crate::watch::{self, ApiHealth, Extent, Watches, stream};
use crate::watched::WatchedResources;
use gantry_planner::decide::Options;
use gantry_planner::placement::PlacementDefaults;

/// Period of the checks whether everything is listed.
const LOOK: Duration = Duration::from_millis(20);

/// Longest time without a response of the API server, at first and while the cluster is listed.
const REACH: Duration = Duration::from_secs(10);
/// Period of the checks whether the API server responds, and longest time of one.
const CHECK: Duration = Duration::from_secs(1);
/// Longest time to read the owners of gangs once everything else is listed: a kind that is not served is never read.
const OWNERS: Duration = Duration::from_secs(3);
/// Gangs planned at most: more than any queue has.
const PLANS: usize = 10_000;
/// `--object-memory` here, in MiB.
const OBJECT_MIB: u32 = 4096;

/// The options of the extender that change its decisions.
#[derive(Debug, Clone, Default)]
pub struct Terms {
    /// Resources that are managed in addition to those that nodes publish.
    pub resources: Vec<ResourceName>,
    /// The options of decisions.
    pub options: Options,
    /// The levels of the fabric.
    pub fabric: Levels,
    /// The most that a gang may ask of others.
    pub ceilings: Ceilings,
    /// Whether it removes the scheduling gate of Gantry.
    pub gates: bool,
    /// The schedulers that call it.
    pub schedulers: Vec<Arc<str>>,
    /// What pods ask for where their annotations do not state it.
    pub defaults: PlacementDefaults,
    /// GPU models, the cheapest first.
    pub model_cost_order: Vec<String>,
}

/// The cluster as it was read.
pub struct OfflineCluster {
    /// The cluster, with the reservations of decided gangs.
    pub store: Arc<Store>,
    /// The gangs that wait, in the order in which they are planned.
    pub queue: Vec<Arc<GangKey>>,
}

impl OfflineCluster {
    /// Plans the gangs that wait, as the extender would if it had planned none yet.
    pub fn plan(&self) {
        self.store.update(|index| index.set_planning(true));
        for _ in 0..PLANS {
            if !self.store.update(Index::plan_next) {
                break;
            }
        }
    }
}

/// The node that a pod is bound to; `None` if there is no such pod, or while it waits.
///
/// # Errors
/// The pod cannot be read.
pub async fn node_of(client: &Client, namespace: &str, pod: &str) -> anyhow::Result<Option<NodeName>> {
    // Other text would lead to another path of the API.
    if !is_object_name(namespace) || !is_object_name(pod) {
        return Ok(None);
    }
    let path = format!("{}/{pod}", SlimPod::url_path(&(), Some(namespace)));
    let memory = ObjectMemory::of_mib(OBJECT_MIB);
    let pod = stream::get::<SlimPod>(client, &path, Kind::Pod, &memory).await;
    let pod = pod.map_err(|error| unreadable("pods", error))?;
    Ok(pod.and_then(|pod| pod.object.node().map(NodeName::from)))
}

/// Lists a cluster, or a part of it, into an index. The client must tolerate a silence of [`watch::SILENCE`]. Gangs that wait are not planned before
/// [`OfflineCluster::plan`].
///
/// # Errors
/// The API server does not respond for ten seconds, or the cluster cannot be listed within `limit`: then the log has the reason.
pub async fn look(
    client: Client,
    terms: Terms,
    extent: Extent,
    limit: Duration,
) -> anyhow::Result<OfflineCluster> {
    let may_list_budgets = reach(&client).await?;
    let watched =
        WatchedResources::new(terms.resources).with_placement(terms.defaults, terms.model_cost_order);
    let mut index = Index::new(terms.options, &watched, "offline".to_owned());
    index.set_fabric(terms.fabric.clone());
    index.set_schedulers(terms.schedulers);
    index.set_gangs(Settings {
        levels: terms.fabric,
        ceilings: terms.ceilings,
        gates: terms.gates,
        ..Settings::default()
    });
    index.set_planning(false);
    index.only_look();
    // As much as the operator may have allowed the extender.
    let store = Arc::new(Store::new(index).with_memory(ObjectMemory::of_mib(OBJECT_MIB)));
    let shutdown = CancellationToken::new();
    let watches = Watches {
        gpu_health: None,
        gpu_clocks: None,
        mig_drains: Arc::default(),
        extent,
        watched,
        store: Arc::clone(&store),
        health: ApiHealth::new(),
        objects: Arc::default(),
        leadership: Arc::new(Leadership::always()),
        metrics: Arc::default(),
    };
    let watching = tokio::spawn(watch::run(client.clone(), watches, shutdown.clone()));
    let (budgets_client, checked) = (client.clone(), client.clone());
    let (wanted, seen) = (Arc::clone(&store), Arc::clone(&store));
    let owners = tokio::spawn(owners::run(
        client,
        move || wanted.read(Index::watched_owners),
        move |owner, facts| seen.update(|index| index.owner_seen(owner, facts)),
        Arc::clone(store.memory()),
        shutdown.clone(),
    ));
    // While they are unknown every pod counts as protected.
    store.update(|index| index.budgets_seen(None));
    let budgets = may_list_budgets
        .then(|| tokio::spawn(budgets::run(budgets_client, Arc::clone(&store), shutdown.clone())));
    let listed = async {
        while !store.snapshot().synced {
            tokio::time::sleep(LOOK).await;
        }
    };
    let listed = async {
        tokio::select! {
            listed = tokio::time::timeout(limit, listed) => listed.with_context(|| {
                format!(
                    "pods, nodes, GpuNodes and Gangs cannot all be listed within {} s; may you list them, and is Gantry installed?",
                    limit.as_secs()
                )
            }),
            () = silence(&checked) => Err(unresponsive()),
        }
    };
    let listed = listed.await;
    if listed.is_ok() {
        let read = async {
            while store.read(|index| index.owners_unread() || may_list_budgets && !index.knows_budgets()) {
                tokio::time::sleep(LOOK).await;
            }
        };
        // The report names owners that are unread by then.
        let _ = tokio::time::timeout(OWNERS, read).await;
    }
    shutdown.cancel();
    watching.await.context("the watches panicked")?;
    owners.await.context("the watch of owners panicked")?;
    if let Some(budgets) = budgets {
        budgets.await.context("the watch of disruption budgets panicked")?;
    }
    listed?;
    let queue = store.read(Index::gangs_in_line);
    Ok(OfflineCluster { store, queue })
}

/// Why a pod has its node and devices, by its annotation; `None` if it has none that can be read.
///
/// # Errors
/// The pod cannot be read.
pub async fn placement(client: Client, namespace: &str, pod: &str) -> anyhow::Result<Option<Placement>> {
    let metadata = Api::<Pod>::namespaced(client, namespace).get_metadata_opt(pod).await;
    let metadata = metadata.map_err(|error| unreadable("pods", error))?;
    let annotations = metadata.and_then(|pod| pod.metadata.annotations).unwrap_or_default();
    let text = annotations.get(names::PLACEMENT_ANNOTATION);
    Ok(text.and_then(|text| serde_json::from_str(text).ok()))
}

/// Waits until the API server has not responded for [`REACH`].
async fn silence(client: &Client) {
    let mut responded = Instant::now();
    while responded.elapsed() < REACH {
        tokio::time::sleep(CHECK).await;
        let check = tokio::time::timeout(CHECK, gantry_runtime::check_api_server(client)).await;
        // An error is a response, too.
        if matches!(check, Ok(Ok(()) | Err(kube::Error::Api(_)))) {
            responded = Instant::now();
        }
    }
}

fn unresponsive() -> anyhow::Error {
    anyhow::anyhow!("the API server does not respond within {} s", REACH.as_secs())
}

/// Lists one object of every kind that is needed, so that an error is reported at once and not after many retries. Returns whether
/// disruption budgets may be listed, too.
async fn reach(client: &Client) -> anyhow::Result<bool> {
    let pods = Api::<Pod>::all(client.clone());
    let nodes = Api::<Node>::all(client.clone());
    let gpu_nodes = Api::<GpuNode>::all(client.clone());
    let gangs = Api::<Gang>::all(client.clone());
    let budgets = Api::<PodDisruptionBudget>::all(client.clone());
    let one = ListParams::default().limit(1);
    let asked = async {
        (
            pods.list_metadata(&one).await.map(drop),
            nodes.list_metadata(&one).await.map(drop),
            gpu_nodes.list_metadata(&one).await.map(drop),
            gangs.list_metadata(&one).await.map(drop),
            budgets.list_metadata(&one).await.is_ok(),
        )
    };
    let answers = tokio::time::timeout(REACH, asked).await.map_err(|_| unresponsive())?;
    answers.0.map_err(|error| unreadable("pods", error))?;
    answers.1.map_err(|error| unreadable("nodes", error))?;
    answers.2.map_err(|error| unreadable("gpunodes.gantry.dev", error))?;
    answers.3.map_err(|error| unreadable("gangs.gantry.dev", error))?;
    Ok(answers.4)
}

fn unreadable(kind: &str, error: kube::Error) -> anyhow::Error {
    match error {
        kube::Error::Api(status) if status.code == 404 => {
            anyhow::anyhow!(
                "the cluster has no {kind}: is Gantry installed there (kubectl apply -k manifests)?"
            )
        }
        kube::Error::Api(status) if matches!(status.code, 401 | 403) => {
            anyhow::anyhow!("you may not list {kind}: {}", status.message)
        }
        kube::Error::Api(status) => anyhow::anyhow!("{kind} cannot be listed: {}", status.message),
        error => anyhow::anyhow!("the API server cannot be reached: {}", gantry_runtime::chain(&error)),
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;
    use tower_test::mock;

    use super::*;

    /// Nothing is listed before the timeout of the whole, which is far longer.
    #[tokio::test(start_paused = true)]
    async fn api_server_lost_during_listing_ends_the_look() {
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        let client = Client::new(service, "default");
        let answers = tokio::spawn(async move {
            let mut unanswered = Vec::new();
            while let Some((request, send)) = api.next_request().await {
                // The first request of each kind is for one object.
                if request
                    .uri()
                    .query()
                    .is_some_and(|query| query.contains("limit=1&") || query.ends_with("limit=1"))
                {
                    let none = json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": []});
                    send.send_response(Response::new(Body::from(none.to_string().into_bytes())));
                } else {
                    unanswered.push(send);
                }
            }
        });
        let began = Instant::now();
        let ended = look(client, Terms::default(), Extent::AtOnce, Duration::from_secs(30)).await;
        let error = ended.err().unwrap().to_string();
        assert_eq!(error, "the API server does not respond within 10 s");
        let seconds = began.elapsed().as_secs();
        assert!((10..15).contains(&seconds), "{seconds} s");
        answers.abort();
    }

    #[tokio::test]
    async fn only_names_of_objects_are_asked_for() {
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        let client = Client::new(service, "default");
        let answers = tokio::spawn(async move {
            let (request, send) = api.next_request().await.unwrap();
            let pod = json!({"metadata": {"name": "a"}, "spec": {"nodeName": "n"}});
            send.send_response(Response::new(Body::from(pod.to_string().into_bytes())));
            request.uri().to_string()
        });
        for (namespace, pod) in
            [("ml", "a/log"), ("ml", "a b"), ("ml", "../../nodes"), ("ml/x", "a"), ("ml", "")]
        {
            assert_eq!(node_of(&client, namespace, pod).await.unwrap(), None);
        }
        assert_eq!(node_of(&client, "ml", "a").await.unwrap(), Some("n".into()));
        assert_eq!(answers.await.unwrap(), "/api/v1/namespaces/ml/pods/a");
    }
}
