//! A pod as far as it is read from the API server. Only its form; what follows from it stands elsewhere.

use std::collections::BTreeMap;

use gantry_api::slim::{SlimContainer, SlimResources};
use gantry_api::{DeviceId, ResourceName, names};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;

use crate::bounded::{self, Identity};
use crate::metadata;
use crate::object_memory::Kind;
use crate::watch::stream::StreamedObject;
use crate::watched::WatchedResources;
use gantry_planner::request::{Container, ContainerKind, CpuAndMemory, Request, RequestError};

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
    pub fn request(&self, watched: &WatchedResources) -> Result<Request, RequestError> {
        self.spec.request(&watched.among(self.spec.resources()))
    }

    /// The position of Gantry's scheduling gate.
    pub(crate) fn gate(&self) -> Option<usize> {
        self.spec.scheduling_gates.iter().position(|gate| gate.name == names::GANG_GATE)
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

impl StreamedObject for SlimPod {
    /// Its node, its containers and its status, which are few: the devices that it has follow from them.
    fn least(identity: Identity, text: &[u8]) -> Self {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Least {
            metadata: LeastMetadata,
            spec: LeastSpec,
            status: Option<SlimStatus>,
        }
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        struct LeastMetadata {
            annotations: LeastAnnotations,
            deletion_timestamp: Option<String>,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct LeastAnnotations {
            #[serde(rename = "gantry.dev/grant")]
            grant: Option<String>,
        }
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        struct LeastSpec {
            node_name: Option<String>,
            init_containers: Vec<SlimContainer>,
            containers: Vec<SlimContainer>,
            priority: i32,
            scheduler_name: Option<String>,
        }
        let mut metadata = ObjectMeta::from(identity);
        let Ok((Least { metadata: written, spec, status }, _)) =
            bounded::read::<Least>(text, Kind::Pod.read_limit())
        else {
            return Self { metadata, ..Self::default() };
        };
        metadata.deletion_timestamp =
            written.deletion_timestamp.map(|time| time.parse().map_or(Time(Timestamp::UNIX_EPOCH), Time));
        metadata.annotations =
            written.annotations.grant.map(|grant| [(names::GRANT_ANNOTATION.to_owned(), grant)].into());
        let LeastSpec { node_name, init_containers, containers, priority, scheduler_name } = spec;
        let spec = SlimSpec {
            node_name,
            init_containers,
            containers,
            priority,
            scheduler_name,
            ..SlimSpec::default()
        };
        Self { metadata, spec, status }
    }
}

/// What is read of a pod's spec.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SlimSpec {
    pub(super) node_name: Option<String>,
    pub(super) init_containers: Vec<SlimContainer>,
    pub(super) containers: Vec<SlimContainer>,
    /// Of the pod as a whole.
    pub(super) resources: SlimResources,
    pub(super) overhead: BTreeMap<String, String>,
    pub(super) node_selector: BTreeMap<String, String>,
    pub(super) affinity: SlimAffinity,
    pub(super) tolerations: Vec<SlimToleration>,
    #[serde(rename = "topologySpreadConstraints")]
    pub(super) spread: Vec<SlimSpread>,
    pub(super) volumes: Vec<SlimVolume>,
    pub(super) priority: i32,
    pub(super) preemption_policy: Option<String>,
    pub(super) scheduler_name: Option<String>,
    pub(super) scheduling_gates: Vec<SlimGate>,
    pub(super) scheduling_group: Option<SlimSchedulingGroup>,
    pub(super) workload_ref: Option<SlimWorkloadRef>,
}

impl SlimSpec {
    /// Every resource that a container asks for, some more than once.
    pub(super) fn resources(&self) -> impl Iterator<Item = &str> {
        let containers = self.init_containers.iter().chain(&self.containers);
        containers
            .flat_map(|container| [&container.resources.limits, &container.resources.requests])
            .flat_map(|quantities| quantities.keys().map(String::as_str))
    }

    /// Whether others may be stopped for it.
    pub(super) fn preempts(&self) -> bool {
        self.preemption_policy.as_deref() != Some("Never")
    }

    /// What its containers ask of these resources.
    pub(super) fn request(&self, resources: &[ResourceName]) -> Result<Request, RequestError> {
        let asking = |resource| {
            self.in_order().map(move |(container, kind)| Container {
                name: &container.name,
                kind,
                quantity: container.resources.of(resource),
            })
        };
        let request = Request::read_what_can_be(resources, asking)?;
        // Kubelet's static managers pass over pods that have resources as a whole.
        if !self.resources.limits.is_empty() || !self.resources.requests.is_empty() {
            return Ok(request);
        }
        Ok(request.with_numa(&self.in_order().map(|(container, kind)| {
            let of = |name| {
                let SlimResources { limits, requests } = &container.resources;
                (limits.get(name).map(String::as_str), requests.get(name).map(String::as_str))
            };
            CpuAndMemory { name: &container.name, kind, cpu: of("cpu"), memory: of("memory") }
        })))
    }

    /// Its containers as kubelet runs them.
    fn in_order(&self) -> impl Iterator<Item = (&SlimContainer, ContainerKind)> + Clone {
        let inits = self.init_containers.iter().map(|container| {
            let kind = if container.is_sidecar() { ContainerKind::Sidecar } else { ContainerKind::Init };
            (container, kind)
        });
        inits.chain(self.containers.iter().map(|container| (container, ContainerKind::App)))
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct SlimGate {
    pub(super) name: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimSchedulingGroup {
    pub(super) pod_group_name: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimWorkloadRef {
    pub(super) name: String,
    pub(super) pod_group: String,
    pub(super) pod_group_replica_key: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct SlimToleration {
    pub(super) key: String,
    pub(super) operator: String,
    pub(super) value: String,
    pub(super) effect: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimAffinity {
    pub(super) node_affinity: SlimNodeAffinity,
    pub(super) pod_affinity: SlimPodAffinity,
    pub(super) pod_anti_affinity: SlimPodAffinity,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct SlimNodeAffinity {
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    pub(super) required: Option<SlimNodeSelector>,
    #[serde(rename = "preferredDuringSchedulingIgnoredDuringExecution")]
    pub(super) preferred: Vec<SlimPreference>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimNodeSelector {
    pub(super) node_selector_terms: Vec<SlimNodeTerm>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct SlimPreference {
    pub(super) weight: i32,
    pub(super) preference: SlimNodeTerm,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimNodeTerm {
    pub(super) match_expressions: Vec<SlimRequirement>,
    pub(super) match_fields: Vec<SlimRequirement>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct SlimRequirement {
    pub(super) key: String,
    pub(super) operator: String,
    pub(super) values: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct SlimPodAffinity {
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    pub(super) required: Vec<SlimPodTerm>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimPodTerm {
    pub(super) label_selector: Option<SlimLabelSelector>,
    pub(super) namespaces: Vec<String>,
    pub(super) namespace_selector: Option<SlimLabelSelector>,
    pub(super) topology_key: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimLabelSelector {
    pub(super) match_labels: BTreeMap<String, String>,
    pub(super) match_expressions: Vec<SlimRequirement>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimVolume {
    pub(super) name: String,
    pub(super) persistent_volume_claim: Option<SlimVolumeClaim>,
    pub(super) ephemeral: Option<serde::de::IgnoredAny>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimVolumeClaim {
    pub(super) claim_name: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimSpread {
    pub(super) max_skew: u32,
    pub(super) topology_key: String,
    pub(super) when_unsatisfiable: String,
    pub(super) label_selector: Option<SlimLabelSelector>,
    pub(super) min_domains: Option<u32>,
    pub(super) node_affinity_policy: Option<String>,
    pub(super) node_taints_policy: Option<String>,
    pub(super) match_label_keys: Vec<String>,
}

/// What is read of a pod's status.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SlimStatus {
    pub(super) phase: Option<String>,
    pub(super) reason: Option<String>,
    pub(super) nominated_node_name: Option<String>,
    pub(super) conditions: Vec<SlimCondition>,
    pub(super) init_container_statuses: Vec<SlimContainerStatus>,
    pub(super) container_statuses: Vec<SlimContainerStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimCondition {
    #[serde(rename = "type")]
    pub(super) type_: String,
    pub(super) status: String,
    pub(super) reason: Option<String>,
    message: Option<String>,
    #[serde(deserialize_with = "metadata::time")]
    pub(super) last_transition_time: Option<Time>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SlimContainerStatus {
    pub(super) name: String,
    state: SlimState,
    /// What the node has set aside for it, and what it runs with: after a resize not yet what the spec states.
    pub(super) allocated_resources: BTreeMap<String, String>,
    pub(super) resources: SlimResources,
    allocated_resources_status: Vec<SlimAllocation>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct SlimState {
    running: Option<serde::de::IgnoredAny>,
    terminated: Option<serde::de::IgnoredAny>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct SlimAllocation {
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
    /// Kubelet's Topology Manager refused the pod.
    pub(super) fn is_refused_by_topology(&self) -> bool {
        self.phase.as_deref() == Some("Failed") && self.reason.as_deref() == Some("TopologyAffinityError")
    }

    /// App containers have all ended, and no init container or sidecar runs.
    pub(super) fn stopped(&self, app_containers: usize) -> bool {
        self.container_statuses.len() >= app_containers
            && self.container_statuses.iter().all(|status| status.state.terminated.is_some())
            && self.init_container_statuses.iter().all(|status| status.state.running.is_none())
    }

    pub(super) fn allocated(&self, watched: &WatchedResources) -> Vec<(ResourceName, DeviceId)> {
        let mut devices = Vec::new();
        for allocated in self
            .container_statuses
            .iter()
            .chain(&self.init_container_statuses)
            .flat_map(|status| &status.allocated_resources_status)
        {
            if watched.covers(&allocated.name) {
                let resource = ResourceName::from(allocated.name.as_str());
                let ids = allocated.resources.iter().map(|device| device.resource_id.as_str());
                devices.extend(ids.map(|id| (resource.clone(), DeviceId::from(id))));
            }
        }
        devices.sort_unstable();
        devices
    }
}

impl SlimCondition {
    /// kube-scheduler stops the pod for another.
    pub(super) fn is_preemption(&self) -> bool {
        let reason = self.reason.as_deref();
        self.type_ == "DisruptionTarget" && self.status == "True" && reason == Some("PreemptionByScheduler")
    }

    /// Of `PodScheduled`: no node was found.
    pub(super) fn is_refusal(&self) -> bool {
        self.status == "False" && self.reason.as_deref() == Some("Unschedulable")
    }

    /// Of `PodScheduled`: kube-scheduler has tried the pod in vain, for whatever reason.
    pub(super) fn was_tried(&self) -> bool {
        self.status == "False" && self.reason.as_deref() != Some("SchedulingGated")
    }

    /// kube-scheduler writes `Insufficient nvidia.com/gpu` for what its own count refuses.
    pub(super) fn insufficient(&self, resources: &[ResourceName]) -> Vec<ResourceName> {
        if !self.is_refusal() {
            return Vec::new();
        }
        let message = self.message.as_deref().unwrap_or_default();
        resources
            .iter()
            .filter(|resource| {
                let words = format!("Insufficient {resource}");
                message.match_indices(&words).any(|(at, _)| ends(&message[at + words.len()..]))
            })
            .cloned()
            .collect()
    }

    /// What kube-scheduler itself reports of nodes that it does not take, without how many: `0/5 nodes are available: 2 node(s) had volume
    /// node affinity conflict, 3 gang a/b: ...`. The reasons of extenders are left out.
    pub(super) fn own_words(&self) -> Option<String> {
        if !self.is_refusal() {
            return None;
        }
        let (_, reasons) = self.message.as_deref()?.split_once(" nodes are available: ")?;
        let reasons = reasons.split(". ").next()?.trim_end_matches('.');
        let mut words: Vec<&str> = Vec::new();
        for part in reasons.split(", ") {
            let (count, reason) = part.split_once(' ').unwrap_or_default();
            let counted = !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit());
            if counted && OWN.iter().any(|own| reason.starts_with(own)) {
                words.push(reason);
            }
        }
        // How many there are of each changes their order.
        words.sort_unstable();
        words.dedup();
        words.truncate(MOST_WORDS);
        (!words.is_empty()).then(|| words.join(", "))
    }
}

impl SlimCondition {
    /// Why kube-scheduler rejects the pod whatever the node, before it calls an extender: `0/5 nodes are available: pod has
    /// unbound immediate PersistentVolumeClaims. preemption: ...`. Reasons of nodes begin with their number.
    pub(super) fn rejection(&self) -> Option<&str> {
        if !self.is_refusal() {
            return None;
        }
        let (_, reason) = self.message.as_deref()?.split_once(" nodes are available: ")?;
        let reason = reason.split(". ").next()?.trim_end_matches('.');
        let of_nodes = reason.starts_with(|first: char| first.is_ascii_digit());
        let end = reason.char_indices().map(|(at, _)| at).take_while(|at| *at <= MAX_REJECTION).last()?;
        let reason = if reason.len() > MAX_REJECTION { &reason[..end] } else { reason };
        (!of_nodes && !reason.is_empty()).then_some(reason)
    }
}

/// Bytes of a rejection that are passed on.
const MAX_REJECTION: usize = 120;
/// How the reasons of kube-scheduler's own plugins begin.
const OWN: [&str; 4] = ["node(s) ", "Insufficient ", "Too many pods", "node had "];
/// Reasons that are passed on.
const MOST_WORDS: usize = 6;

/// Whether a resource's name ends here: `nvidia.com/gpu` is not what `Insufficient nvidia.com/gpu.shared` speaks of.
fn ends(rest: &str) -> bool {
    rest.is_empty() || rest == "." || rest.starts_with(',') || rest.starts_with(". ")
}
