//! What is kept of a pod: a few hundred bytes of the several kilobytes the API server sends. Pods that ask for nothing that is
//! watched are not kept at all.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::{DeviceId, Grant, NodeName, PodUid, ResourceName, names};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;

use crate::metadata;
use crate::request::{Container, ContainerKind, Request, RequestError};
use crate::watched::Watched;

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
    /// Where it is bound.
    pub node: Option<NodeName>,
    /// The grant annotation, unread: whoever may edit pods may write one. Cut short beyond what any grant may be.
    pub grant: Option<Arc<str>>,
    /// When it was bound, to the second, and when it was created.
    pub bound_and_created: (Option<Timestamp>, Option<Timestamp>),
    /// Phase `Succeeded` or `Failed`: kubelet has given its devices back.
    pub terminal: bool,
    /// Every container of it has ended, as far as its status tells. It may start again unless the pod is being deleted.
    pub stopped: bool,
    /// Devices that kubelet says its app containers have (`allocatedResourcesStatus`).
    pub allocated: Vec<(ResourceName, DeviceId)>,
    /// Resources it asks for of which kube-scheduler's own count found too few the last time.
    pub insufficient: Vec<ResourceName>,
}

impl PodFacts {
    /// Keeps what matters of a pod; `None` if it asks for nothing that is watched.
    pub fn read(watched: &Watched, pod: SlimPod) -> Option<Self> {
        let asked = watched.among(pod.spec.resources());
        if asked.is_empty() {
            return None;
        }
        let request = Request::read_what_can_be(&asked, |resource| pod.spec.asking(resource)).map(Arc::new);
        if matches!(&request, Ok(request) if request.is_empty()) {
            return None;
        }
        let mut metadata = pod.metadata;
        let status = pod.status.unwrap_or_default();
        let grant = metadata
            .annotations
            .as_mut()
            .and_then(|annotations| annotations.remove(names::GRANT_ANNOTATION));
        let scheduled = status
            .conditions
            .iter()
            .find(|condition| condition.type_ == "PodScheduled");
        let bound_at = scheduled
            .filter(|condition| condition.status == "True")
            .and_then(|condition| condition.last_transition_time.as_ref());
        Some(Self {
            uid: metadata.uid?.into(),
            namespace: metadata.namespace.unwrap_or_default().into(),
            name: metadata.name.unwrap_or_default().into(),
            request,
            node: pod
                .spec
                .node_name
                .as_deref()
                .filter(|node| !node.is_empty())
                .map(NodeName::from),
            grant: grant.map(|text| bounded(text).into()),
            bound_and_created: (
                bound_at.map(|time| time.0),
                metadata.creation_timestamp.map(|time| time.0),
            ),
            terminal: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
            stopped: status.stopped(pod.spec.containers.len()),
            allocated: status.allocated(watched),
            insufficient: scheduled.map_or_else(Vec::new, |condition| condition.insufficient(&asked)),
        })
    }

    /// Whether it is bound and has not ended.
    pub fn is_live(&self) -> bool {
        self.node.is_some() && !self.terminal
    }

    /// Devices it asks of a resource; 0 if what it asks cannot be read.
    pub fn devices(&self, resource: &str) -> u32 {
        self.request
            .as_ref()
            .map_or(0, |request| request.devices(resource))
    }

    /// Bind order, as far as the API tells after a restart: by the second of binding, then creation, then UID.
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

/// A pod as far as it is read from the API server.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct SlimPod {
    /// Its metadata.
    #[serde(default, deserialize_with = "metadata::read")]
    pub metadata: ObjectMeta,
    /// Its spec.
    #[serde(default)]
    pub spec: SlimSpec,
    /// Its status.
    #[serde(default)]
    pub status: Option<SlimStatus>,
}

impl SlimPod {
    /// What it asks of the resources that are watched.
    ///
    /// # Errors
    /// The first quantity that is no count of devices.
    pub fn request(&self, watched: &Watched) -> Result<Request, RequestError> {
        let asked = watched.among(self.spec.resources());
        Request::read_what_can_be(&asked, |resource| self.spec.asking(resource))
    }

    /// Where it is bound.
    pub fn node(&self) -> Option<&str> {
        self.spec.node_name.as_deref().filter(|node| !node.is_empty())
    }
}

impl kube::Resource for SlimPod {
    type DynamicType = ();
    type Scope = kube::core::NamespaceResourceScope;

    fn kind((): &()) -> std::borrow::Cow<'_, str> {
        "Pod".into()
    }

    fn group((): &()) -> std::borrow::Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> std::borrow::Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> std::borrow::Cow<'_, str> {
        "pods".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// What is read of a pod's spec.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SlimSpec {
    node_name: Option<String>,
    init_containers: Vec<SlimContainer>,
    containers: Vec<SlimContainer>,
}

impl SlimSpec {
    /// Every resource that a container asks for, some more than once.
    fn resources(&self) -> impl Iterator<Item = &str> {
        let containers = self.init_containers.iter().chain(&self.containers);
        containers
            .flat_map(|container| [&container.resources.limits, &container.resources.requests])
            .flat_map(|quantities| quantities.keys().map(String::as_str))
    }

    fn asking<'a>(&'a self, resource: &'a str) -> impl Iterator<Item = Container<'a>> {
        let inits = self.init_containers.iter().map(|container| {
            let sidecar = container.restart_policy.as_deref() == Some("Always");
            (
                container,
                if sidecar {
                    ContainerKind::Sidecar
                } else {
                    ContainerKind::Init
                },
            )
        });
        let apps = self
            .containers
            .iter()
            .map(|container| (container, ContainerKind::App));
        inits.chain(apps).map(move |(container, kind)| Container {
            name: &container.name,
            kind,
            quantity: container.resources.of(resource),
        })
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct SlimContainer {
    name: String,
    restart_policy: Option<String>,
    resources: SlimResources,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct SlimResources {
    limits: BTreeMap<String, String>,
    requests: BTreeMap<String, String>,
}

impl SlimResources {
    fn of(&self, resource: &str) -> Option<&str> {
        self.limits
            .get(resource)
            .or_else(|| self.requests.get(resource))
            .map(String::as_str)
    }
}

/// What is read of a pod's status.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SlimStatus {
    phase: Option<String>,
    conditions: Vec<SlimCondition>,
    init_container_statuses: Vec<SlimContainerStatus>,
    container_statuses: Vec<SlimContainerStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct SlimCondition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
    reason: Option<String>,
    message: Option<String>,
    #[serde(deserialize_with = "metadata::time")]
    last_transition_time: Option<Time>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct SlimContainerStatus {
    state: SlimState,
    allocated_resources_status: Vec<SlimAllocated>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct SlimState {
    running: Option<serde::de::IgnoredAny>,
    terminated: Option<serde::de::IgnoredAny>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct SlimAllocated {
    name: String,
    resources: Vec<SlimDevice>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct SlimDevice {
    #[serde(rename = "resourceID")]
    resource_id: String,
}

impl SlimStatus {
    /// App containers have all ended, and no init container or sidecar runs.
    fn stopped(&self, app_containers: usize) -> bool {
        self.container_statuses.len() >= app_containers
            && self
                .container_statuses
                .iter()
                .all(|status| status.state.terminated.is_some())
            && self
                .init_container_statuses
                .iter()
                .all(|status| status.state.running.is_none())
    }

    fn allocated(&self, watched: &Watched) -> Vec<(ResourceName, DeviceId)> {
        let mut devices = Vec::new();
        for allocated in self
            .container_statuses
            .iter()
            .chain(&self.init_container_statuses)
            .flat_map(|status| &status.allocated_resources_status)
        {
            if watched.covers(&allocated.name) {
                let resource = ResourceName::from(allocated.name.as_str());
                let ids = allocated
                    .resources
                    .iter()
                    .map(|device| device.resource_id.as_str());
                devices.extend(ids.map(|id| (resource.clone(), DeviceId::from(id))));
            }
        }
        devices.sort_unstable();
        devices
    }
}

impl SlimCondition {
    /// kube-scheduler writes `Insufficient nvidia.com/gpu` for what its own count refuses.
    fn insufficient(&self, resources: &[ResourceName]) -> Vec<ResourceName> {
        if self.status != "False" || self.reason.as_deref() != Some("Unschedulable") {
            return Vec::new();
        }
        let message = self.message.as_deref().unwrap_or_default();
        resources
            .iter()
            .filter(|resource| {
                let words = format!("Insufficient {resource}");
                message
                    .match_indices(&words)
                    .any(|(at, _)| ends(&message[at + words.len()..]))
            })
            .cloned()
            .collect()
    }
}

/// Whether a resource's name ends here: `nvidia.com/gpu` is not what `Insufficient nvidia.com/gpu.shared` speaks of.
fn ends(rest: &str) -> bool {
    rest.is_empty() || rest == "." || rest.starts_with(',') || rest.starts_with(". ")
}

#[cfg(test)]
mod tests;
