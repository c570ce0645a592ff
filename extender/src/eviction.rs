//! Empties a GPU: the pods that hold it, in the groups that end together, and their eviction within disruption budgets.
//! For `gantry drain gpu` and for the rules of remediation.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use gantry_api::GpuNode;
use gantry_topology::GpuUuid;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::{Eviction, PodDisruptionBudget};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions};
use kube::api::{ListParams, PostParams};
use kube::core::{Selector, SelectorExt as _};
use kube::{Api, Client};

use crate::index::HolderGroup;
use crate::metadata::MIRROR_ANNOTATION;

/// Pods that a text names.
const NAMED: usize = 8;

/// A pod that has to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Its labels, by which disruption budgets select it.
    pub labels: BTreeMap<String, String>,
    /// It is being deleted.
    pub leaving: bool,
    /// A controller makes another one.
    pub controlled: bool,
    /// It comes from a file on its node.
    pub fixed: bool,
}

/// Pods that go together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Their gang: `namespace/name`.
    pub gang: Option<String>,
    /// The pods.
    pub pods: Vec<Holder>,
}

/// A disruption budget.
#[derive(Debug, Clone)]
pub struct Budget {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Matches no pod if it cannot be read: the API server refuses the eviction then.
    pub selector: Option<Selector>,
    /// How many of its pods may be disrupted now.
    pub allowed: i32,
}

/// The result of an eviction.
#[derive(Debug, PartialEq, Eq)]
pub enum EvictionOutcome {
    /// The pod is being deleted.
    Done,
    /// It was gone, or another pod has its name.
    Gone,
    /// A disruption budget does not allow it now.
    Blocked(String),
}

/// What the IDs of a GPU's devices begin with ([`DeviceId::unit`]): its UUID and those of its MIG devices. Empty if the node
/// does not have the GPU. An index would not do: it changes when another GPU leaves the node, and of two views of the node
/// one may be older.
///
/// [`DeviceId::unit`]: gantry_api::DeviceId::unit
pub fn units<'n>(node: &'n GpuNode, gpu: &GpuUuid) -> BTreeSet<&'n str> {
    let Some(found) = node.spec.machine.gpus().iter().find(|known| known.uuid.as_ref() == Some(gpu)) else {
        return BTreeSet::new();
    };
    let devices = node.status.iter().flat_map(|status| &status.devices);
    let own = devices.filter(|device| device.gpu == found.index).map(|device| device.id.unit());
    own.chain(found.uuid.as_ref().map(GpuUuid::as_str)).collect()
}

/// The pods that hold devices of a GPU, by its plugin's report: namespace and name.
pub fn reported_holders(node: &GpuNode, gpu: &GpuUuid) -> BTreeSet<(String, String)> {
    let units = units(node, gpu);
    let holders = node.status.iter().flat_map(|status| &status.holders);
    let holders = holders.filter(|holder| holder.devices.iter().any(|device| units.contains(device.unit())));
    holders.map(|holder| (holder.namespace.clone(), holder.pod.clone())).collect()
}

/// The pods that hold a GPU now: those that the ledger knows, with their gangs, and others that the plugin reports.
///
/// # Errors
/// A pod cannot be read.
pub async fn groups(
    client: &Client,
    known: &[HolderGroup],
    reported: &BTreeSet<(String, String)>,
) -> kube::Result<Vec<Group>> {
    let mut groups = Vec::new();
    let mut named = BTreeSet::new();
    for holders in known {
        let mut group = Group { gang: holders.gang.clone(), pods: Vec::new() };
        for pod in &holders.pods {
            named.insert((pod.namespace.to_string(), pod.name.to_string()));
            group.pods.extend(holder(client, &pod.namespace, &pod.name, Some(pod.uid.as_str())).await?);
        }
        groups.push(group);
    }
    for (namespace, pod) in reported.difference(&named) {
        let pods = holder(client, namespace, pod, None).await?.into_iter().collect();
        groups.push(Group { gang: None, pods });
    }
    groups.retain(|group| !group.pods.is_empty());
    Ok(groups)
}

/// A pod, unless it is gone or another one has its name.
///
/// # Errors
/// It cannot be read.
pub async fn holder(
    client: &Client,
    namespace: &str,
    name: &str,
    uid: Option<&str>,
) -> kube::Result<Option<Holder>> {
    let api = Api::<Pod>::namespaced(client.clone(), namespace);
    let Some(metadata) = api.get_metadata_opt(name).await?.map(|pod| pod.metadata) else {
        return Ok(None);
    };
    let known = metadata.uid.unwrap_or_default();
    if uid.is_some_and(|uid| uid != known) {
        return Ok(None);
    }
    let owners = metadata.owner_references.iter().flatten();
    Ok(Some(Holder {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: known,
        labels: metadata.labels.unwrap_or_default(),
        leaving: metadata.deletion_timestamp.is_some(),
        controlled: owners.into_iter().any(|owner| owner.controller == Some(true)),
        fixed: metadata.annotations.is_some_and(|all| all.contains_key(MIRROR_ANNOTATION)),
    }))
}

/// The budgets of the namespaces of some groups.
///
/// # Errors
/// They cannot be read.
pub async fn budgets(client: &Client, groups: &[Group]) -> kube::Result<Vec<Budget>> {
    let pods = groups.iter().flat_map(|group| &group.pods);
    let spaces: BTreeSet<&String> = pods.map(|pod| &pod.namespace).collect();
    let mut all = Vec::new();
    for space in spaces {
        let api = Api::<PodDisruptionBudget>::namespaced(client.clone(), space);
        let found = api.list(&ListParams::default()).await?;
        all.extend(found.into_iter().map(|budget| Budget {
            namespace: space.clone(),
            name: budget.metadata.name.unwrap_or_default(),
            selector: budget.spec.and_then(|spec| spec.selector?.try_into().ok()),
            allowed: budget.status.map_or(0, |status| status.disruptions_allowed),
        }));
    }
    Ok(all)
}

/// The body of an eviction of the pod with this UID. kube's own gives the options a name that the API server does not read.
pub(crate) fn request(name: &str, uid: &str, dry_run: bool) -> Eviction {
    Eviction {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        delete_options: Some(DeleteOptions {
            dry_run: dry_run.then(|| vec!["All".to_owned()]),
            preconditions: Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None }),
            ..DeleteOptions::default()
        }),
    }
}

/// Evicts a pod with its own grace period, or checks whether it could be evicted now.
///
/// # Errors
/// The API server refuses the eviction for another cause than a budget, or does not respond.
pub async fn evict(client: &Client, pod: &Holder, dry_run: bool) -> kube::Result<EvictionOutcome> {
    let eviction = request(&pod.name, &pod.uid, dry_run);
    let params = PostParams { dry_run, ..PostParams::default() };
    let api = Api::<Pod>::namespaced(client.clone(), &pod.namespace);
    match api.create_subresource::<_, serde_json::Value>("eviction", &pod.name, &params, &eviction).await {
        Ok(_) => Ok(EvictionOutcome::Done),
        Err(kube::Error::Api(status)) if status.code == 429 => {
            let causes = status.details.iter().flat_map(|details| &details.causes);
            let causes: Vec<&str> = causes.map(|cause| cause.message.as_str()).collect();
            Ok(EvictionOutcome::Blocked(
                format!("{} {}", status.message, causes.join("; ")).trim().to_owned(),
            ))
        }
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(EvictionOutcome::Gone),
        Err(error) => Err(error),
    }
}

/// Why a group cannot go as a whole now: the first budget that covers more of its pods than it allows to be disrupted.
pub fn blocked(group: &Group, budgets: &[Budget]) -> Option<String> {
    budgets.iter().find_map(|budget| {
        let covers = |pod: &&Holder| {
            let selector = budget.selector.as_ref();
            pod.namespace == budget.namespace
                && selector.is_some_and(|selector| selector.matches(&pod.labels))
        };
        let covered = group.pods.iter().filter(|pod| !pod.leaving).filter(covers).count();
        let allowed = usize::try_from(budget.allowed).unwrap_or(0);
        (covered > allowed).then(|| {
            format!(
                "the disruption budget {}/{} allows {allowed} of {covered} disruptions now",
                budget.namespace, budget.name
            )
        })
    })
}

/// Why evictions of some pods would not help.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The pods, and why.
    pub text: String,
    /// Whether the pods could be evicted nevertheless.
    pub force_helps: bool,
}

/// Refuses pods that an eviction would not move: kubelet starts a static pod again, and nothing replaces a pod without a
/// controller, which `force` accepts.
///
/// # Errors
/// The pods, and why.
pub fn refused<'g>(groups: impl IntoIterator<Item = &'g Group>, force: bool) -> Result<(), Refusal> {
    let pods: Vec<&Holder> =
        groups.into_iter().flat_map(|group| &group.pods).filter(|pod| !pod.leaving).collect();
    let named = |is: fn(&Holder) -> bool| -> Vec<String> {
        pods.iter().filter(|pod| is(pod)).map(ToString::to_string).collect()
    };
    let fixed = named(|pod| pod.fixed);
    if !fixed.is_empty() {
        let text = format!(
            "{} comes from a file on its node, and kubelet starts it again: remove the file",
            some(&fixed)
        );
        return Err(Refusal { text, force_helps: false });
    }
    let alone = named(|pod| !pod.controlled);
    if !alone.is_empty() && !force {
        let text = format!("no controller replaces {}", some(&alone));
        return Err(Refusal { text, force_helps: true });
    }
    Ok(())
}

/// The first names, and how many more.
pub fn some(names: &[String]) -> String {
    match names.len() {
        count if count > NAMED => format!("{} and {} more", names[..NAMED].join(", "), count - NAMED),
        _ => names.join(", "),
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pods: Vec<String> = self.pods.iter().map(ToString::to_string).collect();
        match &self.gang {
            Some(gang) => write!(f, "gang {gang} ({})", some(&pods)),
            None => write!(f, "pod {}", some(&pods)),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use proptest::prelude::*;
    use serde_json::json;
    use tower_test::mock;

    use super::*;
    use crate::fixtures::{gpu_node, plain};

    /// The first GPU leaves the node: the second one has its index then.
    #[test]
    fn holders_are_those_of_the_uuid_and_not_of_the_index() {
        let uuids = ["GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"];
        let of = |gpus: &[&str], gpu: &str| {
            let replica = |gpu: &str| format!("{gpu}::0");
            let devices = (0..).zip(gpus).map(|(index, gpu): (u8, _)| {
                json!({"id": replica(gpu), "resource": "nvidia.com/gpu", "gpu": index, "healthy": true})
            });
            let holders = uuids.iter().zip(["a", "b"]).map(|(gpu, pod)| {
                json!({"namespace": "default", "pod": pod, "resource": "nvidia.com/gpu",
                    "devices": [replica(gpu)], "provenance": "PodResources", "state": "Live"})
            });
            let mut node = gpu_node("n", &plain(gpus.len()));
            node["status"] = json!({"devices": Vec::from_iter(devices), "holders": Vec::from_iter(holders)});
            for (known, gpu) in node["spec"]["machine"]["gpus"].as_array_mut().unwrap().iter_mut().zip(gpus) {
                known["uuid"] = (*gpu).into();
            }
            let node: GpuNode = serde_json::from_value(node).unwrap();
            let holders = reported_holders(&node, &gpu.parse().unwrap()).into_iter();
            holders.map(|(_, pod)| pod).collect::<String>()
        };
        assert_eq!(uuids.map(|gpu| of(&uuids, gpu)), ["a", "b"]);
        assert_eq!(uuids.map(|gpu| of(&uuids[1..], gpu)), ["", "b"]);
    }

    fn pod(name: &str, app: &str) -> Holder {
        Holder {
            namespace: "research".to_owned(),
            name: name.to_owned(),
            uid: name.to_owned(),
            labels: [("app".to_owned(), app.to_owned())].into(),
            leaving: false,
            controlled: true,
            fixed: false,
        }
    }

    fn budget(app: &str, allowed: i32) -> Budget {
        let selector = Selector::from_iter([("app".to_owned(), app.to_owned())]);
        let (namespace, name) = ("research".to_owned(), format!("{app}-budget"));
        Budget { namespace, name, selector: Some(selector), allowed }
    }

    /// What the API server receives for an eviction.
    async fn request(dry_run: bool) -> (String, serde_json::Value) {
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        let received = tokio::spawn(async move {
            let (request, send) = api.next_request().await.unwrap();
            let (parts, body) = request.into_parts();
            let body = body.collect_bytes().await.unwrap();
            let created = serde_json::json!({"kind": "Status", "apiVersion": "v1", "status": "Success"});
            let created = Body::from(created.to_string().into_bytes());
            send.send_response(Response::builder().status(201).body(created).unwrap());
            (format!("{} {}", parts.method, parts.uri), serde_json::from_slice(&body).unwrap())
        });
        let client = Client::new(service, "default");
        assert_eq!(evict(&client, &pod("a", "x"), dry_run).await.unwrap(), EvictionOutcome::Done);
        received.await.unwrap()
    }

    /// Another pod of this name is not evicted, the grace period is the pod's, and a dry run evicts nothing.
    #[tokio::test]
    async fn eviction_names_the_uid_and_the_dry_run() {
        let (line, body) = request(false).await;
        assert_eq!(line, "POST /api/v1/namespaces/research/pods/a/eviction?");
        assert_eq!(body["deleteOptions"], serde_json::json!({"preconditions": {"uid": "a"}}));
        let (line, body) = request(true).await;
        assert_eq!(line, "POST /api/v1/namespaces/research/pods/a/eviction?&dryRun=All");
        assert_eq!(body["deleteOptions"]["dryRun"], serde_json::json!(["All"]));
    }

    fn gang(pods: Vec<Holder>) -> Group {
        Group { gang: Some("research/train".to_owned()), pods }
    }

    #[test]
    fn gang_waits_until_its_budget_allows_all_of_it() {
        let group = gang(vec![pod("a", "train"), pod("b", "train"), pod("c", "other")]);
        let why = |allowed| blocked(&group, &[budget("train", allowed), budget("eval", 0)]);
        assert_eq!(
            why(1).as_deref(),
            Some("the disruption budget research/train-budget allows 1 of 2 disruptions now")
        );
        assert_eq!(why(2), None);
        // Pods that end already need no budget.
        let mut group = group.clone();
        group.pods[0].leaving = true;
        assert_eq!(blocked(&group, &[budget("train", 1)]), None);
        let elsewhere = Budget { namespace: "default".to_owned(), ..budget("train", 0) };
        assert_eq!(blocked(&group, &[elsewhere]), None);
    }

    #[test]
    fn pods_that_eviction_does_not_move_are_refused() {
        let alone = Holder { controlled: false, ..pod("a", "x") };
        let fixed = Holder { fixed: true, ..pod("b", "x") };
        let text = |pods: Vec<Holder>, force| refused(&[gang(pods)], force).map_err(|refusal| refusal.text);
        assert_eq!(
            text(vec![alone.clone(), pod("c", "x")], false),
            Err("no controller replaces research/a".to_owned())
        );
        assert_eq!(text(vec![alone.clone()], true), Ok(()));
        insta::assert_snapshot!(text(vec![fixed], true).unwrap_err(), @"research/b comes from a file on its node, and kubelet starts it again: remove the file");
        assert_eq!(text(vec![Holder { leaving: true, ..alone }], false), Ok(()));
    }

    proptest! {
        /// A group is evicted exactly if every budget allows all of its pods that it covers.
        #[test]
        fn group_goes_if_every_budget_allows_it(
            apps in proptest::collection::vec((0..3usize, any::<bool>()), 0..6),
            allowed in proptest::collection::vec(-1..6i32, 3),
        ) {
            let names = ["x", "y", "z"];
            let pods = apps.iter().enumerate().map(|(at, (app, leaving))| {
                Holder { leaving: *leaving, ..pod(&at.to_string(), names[*app]) }
            });
            let group = gang(pods.collect());
            let budgets: Vec<Budget> =
                names.iter().zip(&allowed).map(|(app, allowed)| budget(app, *allowed)).collect();
            let fits = allowed.iter().enumerate().all(|(app, allowed)| {
                let wanted = apps.iter().filter(|(of, leaving)| *of == app && !leaving).count();
                i32::try_from(wanted).unwrap() <= (*allowed).max(0)
            });
            prop_assert_eq!(blocked(&group, &budgets).is_none(), fits);
        }
    }
}
