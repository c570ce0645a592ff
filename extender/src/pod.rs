//! What is kept of a pod: a few hundred bytes of the several kilobytes the API server sends. Pods that ask for something that is watched
//! are kept with what they ask for; of others, what they take of their node.

mod needs;
mod other_pod;
mod reader;
mod slim;

use std::cmp::Ordering;
use std::sync::Arc;

use gantry_api::{DeviceId, Grant, NodeName, PodUid, ResourceName, names};
use gantry_gang::integrations::{self, Controller, PodView, WorkloadRef};
use gantry_gang::protocol::Stage;
use gantry_gang::{Membership, Needs};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;

pub(crate) use needs::{effect, requirement};
pub use other_pod::{OtherPod, PodProfile};
pub use reader::{Interner, ParsedPod, Reader, TextInterner};
pub use slim::{SlimPod, SlimSpec, SlimStatus};

use crate::watched::WatchedResources;
use gantry_planner::placement::WrittenRequest;
use gantry_planner::request::{NumaDemand, Request, RequestError};

/// A pod that asks for resources that are watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    /// Its UID.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// What it asks for.
    pub request: Result<Arc<Request>, RequestError>,
    /// The annotations that request something of its devices.
    pub written: Arc<WrittenRequest>,
    /// Where it is bound.
    pub node: Option<NodeName>,
    /// The grant annotation, unread: whoever may edit pods may write one. Cut short beyond what any grant may be.
    pub grant: Option<Arc<str>>,
    /// When it was bound, to the second, and when it was created.
    pub bound_and_created: (Option<Timestamp>, Option<Timestamp>),
    /// Phase `Succeeded` or `Failed`: kubelet has given its devices back.
    pub terminal: bool,
    /// Kubelet's Topology Manager refused it.
    pub refused_by_topology: bool,
    /// How far it is, and where.
    pub stage: Stage,
    /// It is being deleted.
    pub leaving: bool,
    /// While it is: when it has to be gone, its grace period being over, in seconds since 1970.
    pub ends: Option<i64>,
    /// While it waits: the node on which kube-scheduler makes room for it.
    pub nominated: Option<NodeName>,
    /// kube-scheduler stops it for another pod: its `DisruptionTarget` condition states it.
    pub preempted: bool,
    /// Every container of it has ended, as far as its status reports. It may start again unless the pod is being deleted.
    pub stopped: bool,
    /// Devices that its app containers have as reported by kubelet (`allocatedResourcesStatus`).
    pub allocated: Vec<(ResourceName, DeviceId)>,
    /// Resources it asks for of which kube-scheduler's own count found too few the last time.
    pub insufficient: Vec<ResourceName>,
    /// kube-scheduler has tried it in vain.
    pub refused: bool,
    /// kube-scheduler's last message about nodes that it does not take; kept for members of gangs.
    pub scheduler_message: Option<Arc<str>>,
    /// kube-scheduler rejects it before it calls the extender: the reason it gives; kept for members of gangs.
    pub rejected: Option<Arc<str>>,
    /// What it declares of its gang.
    pub membership: Option<Arc<Membership>>,
    /// Its claims of volumes, by name; kept for members of gangs.
    pub volume_claims: Vec<Arc<str>>,
    /// What it needs of a node besides the devices. Its labels are among it only as far as terms are about them.
    pub needs: Arc<Needs>,
    /// Its namespace and labels, and what else concerns pods near it.
    pub profile: Arc<PodProfile>,
    /// `spec.priority`.
    pub priority: i32,
    /// Whether others may be preempted for it: its `preemptionPolicy` is not `Never`.
    pub preempts: bool,
    /// `spec.schedulerName`: who is to place it.
    pub scheduler: Arc<str>,
}

impl Reader {
    /// What a pod asks of the resources that are watched; `None` if it is nothing.
    fn request(&self, pod: &SlimPod) -> Option<Result<Arc<Request>, RequestError>> {
        let asked = self.watched.among(pod.spec.resources());
        if asked.is_empty() {
            return None;
        }
        let request = pod.spec.request(&asked);
        let annotations = pod.metadata.annotations.iter().flatten();
        let annotations = annotations.map(|(name, text)| (name.as_str(), text.as_str()));
        let defaults = self.watched.placement(pod.metadata.namespace.as_deref().unwrap_or_default());
        let is_bound = pod.node().is_some();
        let placed = |request: Request| match request.clone().placed_by(annotations, defaults) {
            // The annotations of a bound pod have no effect: what it holds must not become unknown by an edit.
            Err(_) if is_bound => Ok(request),
            placed => placed,
        };
        let request = request.and_then(placed).map(Arc::new);
        let nothing = matches!(&request, Ok(request) if request.is_empty());
        (!nothing).then_some(request)
    }

    fn facts(&mut self, pod: SlimPod, request: Result<Arc<Request>, RequestError>) -> Option<PodFacts> {
        let (stage, membership, profile) = (stage(&pod), membership(&pod), self.profile_of(&pod));
        let needs = pod.spec.needs(pod.status.as_ref(), &self.watched, &pod.metadata, &mut self.words);
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let volume_claims = match &membership {
            Some(_) => pod.spec.volume_claims(name, &mut self.words),
            None => Vec::new(),
        };
        let scheduler = pod.spec.scheduler_name.as_deref();
        let scheduler = self.words.of(scheduler.unwrap_or(names::DEFAULT_SCHEDULER));
        let asked = self.watched.among(pod.spec.resources());
        let written = written(&pod.metadata);
        let mut metadata = pod.metadata;
        let status = pod.status.unwrap_or_default();
        let grant =
            metadata.annotations.as_mut().and_then(|annotations| annotations.remove(names::GRANT_ANNOTATION));
        let scheduled = status.conditions.iter().find(|condition| condition.type_ == "PodScheduled");
        let bound_at = scheduled
            .filter(|condition| condition.status == "True")
            .and_then(|condition| condition.last_transition_time.as_ref());
        Some(PodFacts {
            uid: metadata.uid?.into(),
            namespace: Arc::clone(&profile.namespace),
            name: metadata.name.unwrap_or_default().into(),
            request,
            written,
            node: pod.spec.node_name.as_deref().filter(|node| !node.is_empty()).map(NodeName::from),
            grant: grant.map(|text| bounded(text).into()),
            bound_and_created: (bound_at.map(|time| time.0), metadata.creation_timestamp.map(|time| time.0)),
            terminal: matches!(stage, Stage::Succeeded | Stage::Failed),
            refused_by_topology: status.is_refused_by_topology(),
            stage,
            leaving: metadata.deletion_timestamp.is_some(),
            ends: metadata.deletion_timestamp.map(|time| time.0.as_second()),
            nominated: status
                .nominated_node_name
                .as_deref()
                .filter(|node| !node.is_empty() && pod.spec.node_name.is_none())
                .map(NodeName::from),
            preempted: status.conditions.iter().any(slim::SlimCondition::is_preemption),
            stopped: status.stopped(pod.spec.containers.len()),
            allocated: status.allocated(&self.watched),
            insufficient: scheduled.map_or_else(Vec::new, |condition| condition.insufficient(&asked)),
            refused: scheduled.is_some_and(slim::SlimCondition::was_tried),
            scheduler_message: scheduled
                .filter(|_| membership.is_some())
                .and_then(slim::SlimCondition::own_words)
                .map(|words| self.words.of(&words)),
            rejected: scheduled
                .filter(|_| membership.is_some())
                .and_then(slim::SlimCondition::rejection)
                .map(|words| self.words.of(words)),
            membership,
            volume_claims,
            needs: self.needs.one(needs),
            profile,
            priority: pod.spec.priority,
            preempts: pod.spec.preempts(),
            scheduler,
        })
    }
}

impl PodFacts {
    /// Keeps what matters of a pod; `None` if it asks for nothing that is watched. Whoever reads many has a [`Reader`].
    pub fn read(watched: &WatchedResources, pod: SlimPod) -> Option<Self> {
        let mut reader = Reader::new(watched.clone());
        let request = reader.request(&pod)?;
        reader.facts(pod, request)
    }

    /// When it was created, in seconds since 1970; 0 if that is not known.
    pub fn created(&self) -> i64 {
        self.bound_and_created.1.map_or(0, Timestamp::as_second)
    }

    /// Whether it is bound and has not ended.
    pub fn is_live(&self) -> bool {
        self.node.is_some() && !self.terminal
    }

    /// Devices it asks of a resource; 0 if what it asks cannot be read.
    pub fn devices(&self, resource: &str) -> u32 {
        self.request.as_ref().map_or(0, |request| request.devices(resource))
    }

    /// What its containers have of certain NUMA nodes.
    pub fn numa(&self) -> &[NumaDemand] {
        self.request.as_ref().map_or(&[], |request| request.numa())
    }

    /// Bind order, as far as the API shows it after a restart: by the second of binding, then creation, then UID.
    pub fn order(&self, other: &Self) -> Ordering {
        let key = |pod: &Self| {
            let (bound, created) = pod.bound_and_created;
            (bound.is_none(), bound, created)
        };
        key(self).cmp(&key(other)).then_with(|| self.uid.cmp(&other.uid))
    }
}

/// Longer than any grant, it is refused whatever follows; the rest need not be kept.
fn bounded(mut text: String) -> String {
    let mut end = Grant::MAX_BYTES + 1;
    while !text.is_char_boundary(end.min(text.len())) {
        end -= 1;
    }
    text.truncate(end);
    text
}

/// The annotations that request something of a pod's devices.
fn written(metadata: &ObjectMeta) -> Arc<WrittenRequest> {
    let annotations = metadata.annotations.iter().flatten();
    Arc::new(WrittenRequest::of(annotations.map(|(name, text)| (name.as_str(), text.as_str()))))
}

/// How far a pod is, and where.
fn stage(pod: &SlimPod) -> Stage {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    match (phase, pod.node()) {
        (Some("Succeeded"), _) => Stage::Succeeded,
        (Some("Failed"), _) => Stage::Failed,
        (_, Some(node)) => Stage::Bound(node.into()),
        _ if pod.spec.scheduling_gates.is_empty() => Stage::Pending,
        _ => Stage::Gated {
            by: pod
                .spec
                .scheduling_gates
                .iter()
                .find(|gate| gate.name != names::GANG_GATE)
                .map(|gate| gate.name.as_str().into()),
        },
    }
}

/// What a pod declares of its gang.
fn membership(pod: &SlimPod) -> Option<Arc<Membership>> {
    let metadata = &pod.metadata;
    let owners = metadata.owner_references.iter().flatten();
    let mut controllers = owners.filter(|owner| owner.controller == Some(true)).map(|owner| Controller {
        api_version: &owner.api_version,
        kind: &owner.kind,
        name: &owner.name,
        uid: &owner.uid,
    });
    let workload = pod.spec.workload_ref.as_ref().map(|written| WorkloadRef {
        name: &written.name,
        pod_group: &written.pod_group,
        replica_key: written.pod_group_replica_key.as_deref(),
    });
    let group = pod.spec.scheduling_group.as_ref();
    let view = PodView {
        namespace: metadata.namespace.as_deref().unwrap_or_default(),
        name: metadata.name.as_deref().unwrap_or_default(),
        uid: metadata.uid.as_deref().unwrap_or_default(),
        labels: metadata.labels.as_ref(),
        annotations: metadata.annotations.as_ref(),
        controller: controllers.next(),
        scheduling_group: group.and_then(|group| group.pod_group_name.as_deref()),
        workload,
    };
    integrations::membership(&view).map(Arc::new)
}

/// When an object was created, in seconds since 1970; 0 if that is not known.
fn seconds(metadata: &ObjectMeta) -> i64 {
    metadata.creation_timestamp.as_ref().map_or(0, |created| created.0.as_second())
}

#[cfg(test)]
mod tests;
