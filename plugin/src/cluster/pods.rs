//! Follows the pods of this node in the order in which the API server wrote them, which is the order in which kubelet admits them. Of each
//! pod only what the hand-over needs is kept.
//!
//! Metadata alone is not enough: the requests of a pod distinguish pods that bypass the scheduler from pods without devices, and its status
//! shows whether kubelet has admitted it.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use gantry_api::slim::{self, ReadsAnnotation};
use gantry_api::{Holder, NodeName, PodUid, ResourceName, names, quantity};
use gantry_runtime::chain;
use gantry_runtime::watch::{PAGE, Selection, watch};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::watcher::{Error, Event};
use kube::{Client, Resource};
use serde::Deserialize;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{Cluster, RETRY, previous_status};
use crate::handover::{ContainerRequest, Handover, ObservedPod, PodName};

/// Seconds after which a watch is renewed, well before [`super::READ_TIMEOUT`].
const RENEW: u32 = 30;
/// A watch that has not failed for this long counts as working, even without events.
const QUIET: Duration = Duration::from_secs(2);

/// The part of a pod that is read.
#[derive(Deserialize, Resource)]
#[resource(inherit = Pod)]
struct NodePod {
    #[serde(deserialize_with = "slim::metadata::<Grants, _>")]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    init_containers: Vec<Container>,
    containers: Vec<Container>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Container {
    name: String,
    resources: Resources,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Resources {
    limits: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    start_time: Option<String>,
}

/// Of the annotations, the grant is read.
struct Grants;

impl ReadsAnnotation for Grants {
    fn reads(name: &str) -> bool {
        name == names::GRANT_ANNOTATION
    }
}

/// Follows until `shutdown`.
pub(super) async fn follow(client: Client, cluster: Cluster, shutdown: CancellationToken) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = run(client, cluster) => {}
    }
}

async fn run(client: Client, cluster: Cluster) {
    let mut earlier = Some(published_holders(&client, &cluster).await);
    loop {
        let client = match &cluster.pod_kubeconfig {
            Some(path) => cluster.connected(Some(path)).await,
            None => client.clone(),
        };
        match follow_with(&client, &cluster, &mut earlier).await {
            End::Outdated => info!("the credential for pods is no longer valid; reading it again"),
            End::Watch => {
                warn!("the watch of pods ended; grants are no longer followed");
                cluster.observed.cluster(false);
                return;
            }
        }
    }
}

/// Why a watch of pods ended.
enum End {
    /// The API server no longer accepts the credential. kubelet replaces its certificate before it expires.
    Outdated,
    /// The watch itself, which does not happen.
    Watch,
}

async fn follow_with(client: &Client, cluster: &Cluster, earlier: &mut Option<Vec<Holder>>) -> End {
    let fields = format!("spec.nodeName={},status.phase!=Succeeded,status.phase!=Failed", cluster.node);
    let selection = Selection { fields, renew: RENEW, page: Some(PAGE) };
    let mut stream = std::pin::pin!(watch::<NodePod>(client.clone(), selection));
    let mut backoff = RETRY;
    let mut listing = PodList::default();
    let mut reachable = None;
    let mut begun = false;
    loop {
        let event = tokio::select! {
            event = stream.next() => event,
            // A list without a response is not a watch.
            () = tokio::time::sleep(QUIET), if reachable == Some(false) && !begun => {
                reachable = Some(true);
                cluster.observed.cluster(true);
                backoff.reset();
                info!("the watch of pods works again");
                continue;
            }
        };
        let Some(event) = event else {
            return End::Watch;
        };
        // Comes before every list, also before one that fails, so it does not show that the API server responds.
        begun = matches!(event, Ok(Event::Init));
        match event {
            Ok(event) => {
                if !begun && reachable != Some(true) {
                    reachable = Some(true);
                    cluster.observed.cluster(true);
                    backoff.reset();
                }
                take(event, cluster, &mut listing, earlier);
            }
            Err(error) => {
                match response_of(&error) {
                    Some(status) => cluster.observed.pods_refused(status.message.clone()),
                    None => cluster.observed.cluster(false),
                }
                if reachable != Some(false) {
                    warn!(
                        error = %chain(&error),
                        "the watch of pods failed; known grants stay valid, trying again"
                    );
                }
                reachable = Some(false);
                if cluster.pod_kubeconfig.is_some()
                    && response_of(&error).is_some_and(|status| status.code == 401)
                {
                    tokio::time::sleep(backoff.fail()).await;
                    return End::Outdated;
                }
                loop {
                    tokio::time::sleep(backoff.fail()).await;
                    match tokio::time::timeout(
                        gantry_runtime::CONNECT,
                        gantry_runtime::check_api_server(client),
                    )
                    .await
                    {
                        Ok(Ok(())) => break,
                        Ok(Err(error)) => debug!(error = %chain(&error), "the API server does not respond"),
                        Err(_) => debug!("the API server does not respond in time"),
                    }
                }
            }
        }
    }
}

/// The response of the API server that refuses a list or a watch; `None` if it does not respond, or ends a watch.
fn response_of(error: &Error) -> Option<&kube::core::Status> {
    match error {
        Error::InitialListFailed(kube::Error::Api(status))
        | Error::WatchStartFailed(kube::Error::Api(status))
        | Error::WatchError(status) => Some(status.as_ref()),
        _ => None,
    }
}

/// The pods of a list that has begun.
#[derive(Default)]
struct PodList {
    pods: Vec<ObservedPod>,
    bytes: usize,
}

impl PodList {
    fn push(&mut self, pod: ObservedPod, cluster: &Cluster) {
        if let Some(pod) = within_limit(pod, Handover::MAX_BYTES - self.bytes, cluster) {
            self.bytes += pod.bytes();
            self.pods.push(pod);
        }
    }
}

/// The pod, unless its requests and its grant are too large to be kept.
fn within_limit(pod: ObservedPod, left: usize, cluster: &Cluster) -> Option<ObservedPod> {
    let Err(refusal) = pod.check_size(left) else {
        return Some(pod);
    };
    let name = PodName { namespace: pod.namespace, name: pod.name, uid: pod.uid };
    cluster.handover.refused(name, refusal);
    None
}

fn take(event: Event<NodePod>, cluster: &Cluster, list: &mut PodList, earlier: &mut Option<Vec<Holder>>) {
    let observed = |pod| observed_pod(pod, &cluster.node);
    match event {
        Event::Init => *list = PodList::default(),
        Event::InitApply(pod) => {
            if let Some(pod) = observed(pod) {
                list.push(pod, cluster);
            }
        }
        Event::InitDone => {
            let pods = std::mem::take(list).pods;
            info!(pods = pods.len(), "pods of this node that ask for devices listed");
            cluster.handover.sync(pods, &earlier.take().unwrap_or_default());
        }
        Event::Apply(pod) => {
            if let Some(pod) = observed(pod).and_then(|pod| within_limit(pod, Handover::MAX_BYTES, cluster)) {
                cluster.handover.observe(pod);
            }
        }
        Event::Delete(pod) => {
            if let Some(uid) = &pod.metadata.uid {
                // Without a deletion timestamp the pod left the selector because its containers have ended.
                let finished = pod.metadata.deletion_timestamp.is_none();
                cluster.handover.remove_pod(&PodUid::from(uid.as_str()), finished);
            }
        }
    }
}

/// The holders that an earlier process published. The pods, too, need the API server to respond.
async fn published_holders(client: &Client, cluster: &Cluster) -> Vec<Holder> {
    let mut warned = false;
    let failed = |error: &kube::Error| {
        cluster.observed.cluster(false);
        if !std::mem::replace(&mut warned, true) {
            warn!(
                error = %chain(error),
                "the API server does not respond; serving by topology until it does"
            );
        }
    };
    let previous = previous_status::read(client, &cluster.node, failed).await;
    previous.map(|previous| previous.holders).unwrap_or_default()
}

/// A pod as input of the hand-over; `None` if it requests no extended resource and has no grant.
fn observed_pod(pod: NodePod, node: &NodeName) -> Option<ObservedPod> {
    let NodePod { metadata, spec, status } = pod;
    let requests: Vec<ContainerRequest> = spec
        .init_containers
        .iter()
        .chain(&spec.containers)
        .flat_map(|container| {
            container.resources.limits.iter().filter_map(|(resource, limit)| {
                let count = quantity::count(limit).ok().filter(|count| *count > 0)?;
                is_extended(resource).then(|| ContainerRequest {
                    container: container.name.clone(),
                    resource: ResourceName::from(resource.as_str()),
                    count: count as usize,
                })
            })
        })
        .collect();
    let grant = metadata.annotations.and_then(|mut read| read.remove(names::GRANT_ANNOTATION));
    if requests.is_empty() && grant.is_none() {
        return None;
    }
    let Some(uid) = metadata.uid else {
        debug!(%node, name = metadata.name, "a pod without a UID is ignored");
        return None;
    };
    Some(ObservedPod {
        uid: PodUid::from(uid),
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
        created: metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
        revision: metadata.resource_version.as_ref().and_then(|version| version.parse().ok()).unwrap_or(0),
        grant,
        requests,
        started: status.start_time.is_some(),
    })
}

/// Kubernetes' rule: a qualified name outside its own domains.
fn is_extended(resource: &str) -> bool {
    resource.contains('/') && !resource.contains("kubernetes.io/")
}

#[cfg(test)]
mod tests;
