//! The extender API of kube-scheduler (`k8s.io/kube-scheduler/extender/v1`), as it goes over the wire. Go's structs carry no JSON
//! tags, so names are PascalCase outside and the API's own camelCase inside. Requests borrow from the body. No decisions here.

mod answer;
mod pod_text;
mod preempt;
mod text;

use gantry_api::quantity;
use serde::Deserialize;
use serde_json::value::RawValue;

pub use answer::{bind_answer, filter_answer, filter_error, priorities_answer};
pub use pod_text::pod_text;
pub use preempt::{ExtenderPreemptionArgs, Offer, preemption_answer};
pub use text::{Quantities, Text};

use gantry_planner::decide::Candidates;
use gantry_planner::request::{Container, ContainerKind, CpuAndMemory};

/// `ExtenderArgs`: the body of filter and prioritize.
#[derive(Debug, Deserialize)]
pub struct ExtenderArgs<'a> {
    /// The pod to place.
    #[serde(rename = "Pod", alias = "pod", borrow)]
    pub pod: Pod<'a>,
    /// Whole nodes: kube-scheduler with `nodeCacheCapable: false`, or a simulation that invents nodes.
    #[serde(rename = "Nodes", alias = "nodes", borrow, default)]
    pub nodes: Option<NodeList<'a>>,
    /// Names of nodes, with `nodeCacheCapable: true`.
    #[serde(rename = "NodeNames", alias = "nodenames", alias = "nodeNames", borrow, default)]
    pub node_names: Option<Vec<Text<'a>>>,
}

/// `ExtenderBindingArgs`: the body of bind.
#[derive(Debug, Deserialize)]
pub struct ExtenderBindingArgs<'a> {
    /// Name of the pod.
    #[serde(rename = "PodName", alias = "podName", borrow)]
    pub pod_name: Text<'a>,
    /// Its namespace.
    #[serde(rename = "PodNamespace", alias = "podNamespace", borrow)]
    pub pod_namespace: Text<'a>,
    /// Its UID.
    #[serde(rename = "PodUID", alias = "podUID", borrow)]
    pub pod_uid: Text<'a>,
    /// The node that kube-scheduler chose.
    #[serde(rename = "Node", alias = "node", borrow)]
    pub node: Text<'a>,
}

/// `v1.NodeList`, items untouched: those that pass are sent back as they came.
#[derive(Debug, Deserialize)]
pub struct NodeList<'a> {
    /// The nodes.
    #[serde(borrow, default)]
    pub items: Option<Vec<&'a RawValue>>,
}

/// What of a `v1.Node` matters here.
#[derive(Debug, Deserialize)]
pub struct Node<'a> {
    /// Its metadata.
    #[serde(borrow)]
    pub metadata: Metadata<'a>,
    /// Its status.
    #[serde(borrow, default)]
    pub status: Option<NodeStatus<'a>>,
}

/// What of a `v1.NodeStatus` matters here.
#[derive(Debug, Deserialize)]
pub struct NodeStatus<'a> {
    /// What pods may use.
    #[serde(borrow, default)]
    pub allocatable: Option<Quantities<'a>>,
}

/// What of a `v1.Pod` matters here.
#[derive(Debug, Deserialize)]
pub struct Pod<'a> {
    /// Its metadata.
    #[serde(borrow)]
    pub metadata: Metadata<'a>,
    /// Its spec.
    #[serde(borrow, default)]
    pub spec: Option<PodSpec<'a>>,
}

/// What of `v1.ObjectMeta` matters here.
#[derive(Debug, Default, Deserialize)]
pub struct Metadata<'a> {
    /// Name.
    #[serde(borrow, default)]
    pub name: Option<Text<'a>>,
    /// Namespace.
    #[serde(borrow, default)]
    pub namespace: Option<Text<'a>>,
    /// UID.
    #[serde(borrow, default)]
    pub uid: Option<Text<'a>>,
    /// Annotations.
    #[serde(borrow, default)]
    pub annotations: Option<Quantities<'a>>,
}

/// What of a `v1.PodSpec` matters here.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec<'a> {
    /// Containers that run before the app containers.
    #[serde(borrow, default)]
    pub init_containers: Option<Vec<PodContainer<'a>>>,
    /// App containers.
    #[serde(borrow, default)]
    pub containers: Option<Vec<PodContainer<'a>>>,
    /// What the pod as a whole asks for.
    #[serde(borrow, default)]
    pub resources: Option<Resources<'a>>,
    /// Its priority, as admission has worked it out.
    #[serde(default)]
    pub priority: Option<i32>,
    /// Who is to place it.
    #[serde(borrow, default)]
    pub scheduler_name: Option<Text<'a>>,
}

/// What of a `v1.Container` matters here.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodContainer<'a> {
    /// Its name.
    #[serde(borrow, default)]
    pub name: Option<Text<'a>>,
    /// `Always` in an init container makes it a sidecar.
    #[serde(borrow, default)]
    pub restart_policy: Option<Text<'a>>,
    /// What it asks for.
    #[serde(borrow, default)]
    pub resources: Option<Resources<'a>>,
}

/// `v1.ResourceRequirements`.
#[derive(Debug, Default, Deserialize)]
pub struct Resources<'a> {
    /// Upper limits: what kubelet allocates devices by.
    #[serde(borrow, default)]
    pub limits: Option<Quantities<'a>>,
    /// Requests: what kube-scheduler counts. The API server keeps both equal for devices.
    #[serde(borrow, default)]
    pub requests: Option<Quantities<'a>>,
}

/// The nodes of one call, in the form in which kube-scheduler sent them.
#[derive(Debug)]
pub enum CandidateNodes<'a> {
    /// By name.
    Names(Vec<Text<'a>>),
    /// As objects.
    Objects(Vec<NodeObject<'a>>),
}

/// A node as an object, sent back unchanged if it passes.
#[derive(Debug)]
pub struct NodeObject<'a> {
    /// The object.
    pub raw: &'a str,
    /// Its fields that a decision reads.
    pub node: Node<'a>,
}

impl Candidates for CandidateNodes<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Names(names) => names.len(),
            Self::Objects(nodes) => nodes.len(),
        }
    }

    fn name(&self, position: usize) -> &str {
        let name = match self {
            Self::Names(names) => names.get(position),
            Self::Objects(nodes) => nodes.get(position).and_then(|object| object.node.metadata.name.as_ref()),
        };
        name.map_or("", Text::as_str)
    }

    fn are_objects(&self) -> bool {
        matches!(self, Self::Objects(_))
    }

    fn advertised(&self, position: usize, resource: &str) -> Option<u32> {
        let Self::Objects(nodes) = self else {
            return None;
        };
        let allocatable = nodes.get(position)?.node.status.as_ref()?.allocatable.as_ref()?;
        quantity::count(allocatable.get(resource)?).ok()
    }
}

impl PodSpec<'_> {
    /// Every resource that a container asks for, some more than once.
    pub fn resources(&self) -> impl Iterator<Item = &str> {
        let containers = [&self.init_containers, &self.containers];
        containers
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|container| container.resources.as_ref())
            .flat_map(|resources| [&resources.limits, &resources.requests])
            .flatten()
            .flat_map(Quantities::names)
    }

    /// The containers with what each asks of `resource`, in kubelet's order.
    pub fn containers_asking<'s>(&'s self, resource: &'s str) -> impl Iterator<Item = Container<'s>> {
        self.in_order().map(move |(container, kind)| Container {
            name: container.name(),
            kind,
            quantity: container.resources.as_ref().and_then(|resources| resources.of(resource)),
        })
    }

    /// What each container asks of CPU and memory, in kubelet's order. Empty if the pod has resources as a whole: kubelet's
    /// static CPU manager passes over it.
    pub fn cpu_and_memory(&self) -> impl Iterator<Item = CpuAndMemory<'_>> + Clone {
        let whole = self.resources.iter().flat_map(|resources| [&resources.limits, &resources.requests]);
        let counts = whole.flatten().all(|quantities| quantities.names().next().is_none());
        self.in_order().filter(move |_| counts).map(|(container, kind)| {
            let of = |name| {
                let resources = container.resources.as_ref();
                resources.map_or((None, None), |resources| resources.limit_and_request(name))
            };
            CpuAndMemory { name: container.name(), kind, cpu: of("cpu"), memory: of("memory") }
        })
    }

    /// The containers as kubelet runs them.
    fn in_order(&self) -> impl Iterator<Item = (&PodContainer<'_>, ContainerKind)> + Clone {
        let inits = self.init_containers.iter().flatten().map(|container| {
            let sidecar = container.restart_policy.as_ref().is_some_and(|policy| policy.as_str() == "Always");
            (container, if sidecar { ContainerKind::Sidecar } else { ContainerKind::Init })
        });
        inits.chain(self.containers.iter().flatten().map(|container| (container, ContainerKind::App)))
    }
}

impl PodContainer<'_> {
    fn name(&self) -> &str {
        self.name.as_ref().map_or("", Text::as_str)
    }
}

impl Resources<'_> {
    fn of(&self, resource: &str) -> Option<&str> {
        let (limit, request) = self.limit_and_request(resource);
        limit.or(request)
    }

    fn limit_and_request(&self, resource: &str) -> (Option<&str>, Option<&str>) {
        (
            self.limits.as_ref().and_then(|limits| limits.get(resource)),
            self.requests.as_ref().and_then(|requests| requests.get(resource)),
        )
    }
}

#[cfg(test)]
mod tests;
