//! One pod of the node: the requests of its containers in kubelet's order, its grant, and the devices it got. Parses
//! grants, and rejects a grant that does not fit the pod.

use std::collections::BTreeMap;

use gantry_api::{ContainerShare, DeviceId, Grant, GrantError, NodeName, PodUid, ResourceName};

use super::{Devices, Handover, PodName};

/// Memory of a device ID in a set, in addition to its text.
const DEVICE_BYTES: usize = 64;

/// A pod as the watch shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedPod {
    pub uid: PodUid,
    pub namespace: String,
    pub name: String,
    /// Creation time in seconds: a new kubelet admits pods in this order.
    pub created: i64,
    /// Resource version, which orders the writes to the cluster.
    pub revision: u64,
    /// The grant annotation, unparsed.
    pub grant: Option<String>,
    /// Extended resources of its containers, in kubelet's order of allocation: init containers first.
    pub requests: Vec<ContainerRequest>,
    /// Whether kubelet has admitted it (its status has a start time).
    pub started: bool,
}

impl ObservedPod {
    /// Most bytes kept of one pod: the largest grant, and as much for the requests.
    pub const MAX_BYTES: usize = 2 * Grant::MAX_BYTES;

    /// The memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        let requests = self
            .requests
            .iter()
            .map(|ask| size_of::<ContainerRequest>() + ask.container.len() + ask.resource.as_str().len());
        let names = self.uid.as_str().len() + self.namespace.len() + self.name.len();
        size_of::<Self>() + names + self.grant.as_ref().map_or(0, String::len) + requests.sum::<usize>()
    }

    /// # Errors
    /// It takes more than `left`, what is left for the pods of the node, or more than a pod may.
    pub(crate) fn check_size(&self, left: usize) -> Result<(), GrantRefusal> {
        let bytes = self.bytes();
        if bytes > Self::MAX_BYTES {
            return Err(GrantRefusal::OverLimit { bytes, max: Self::MAX_BYTES, of: "a pod" });
        }
        over_node_limit(bytes, left)
    }
}

/// # Errors
/// A pod of this size takes more than is left for the pods of the node.
pub(super) fn over_node_limit(bytes: usize, left: usize) -> Result<(), GrantRefusal> {
    let refusal = GrantRefusal::OverLimit { bytes, max: Handover::MAX_BYTES, of: "all pods of a node" };
    if bytes > left { Err(refusal) } else { Ok(()) }
}

/// One container's request for one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRequest {
    pub container: String,
    pub resource: ResourceName,
    pub count: usize,
}

/// Why a grant is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrantRefusal {
    /// Unreadable, or made for another pod or node.
    #[error(transparent)]
    Unreadable(#[from] GrantError),
    /// A container that requests devices is missing, or one that requests none is present.
    #[error("the grant does not match container {container:?}: {problem}")]
    Mismatch { container: String, problem: String },
    /// A device that this node does not have.
    #[error("device {device} of {resource} is not on this node")]
    UnknownDevice { device: DeviceId, resource: ResourceName },
    /// A device in an older grant, or held by another pod by its grant.
    #[error("device {device} belongs to the grant of pod {other}")]
    Overlap {
        device: DeviceId,
        /// The pod with the first grant.
        other: PodUid,
    },
    /// Pod or node exceed the memory that the plugin keeps for them.
    #[error("requests and grant take {bytes} bytes; at most {max} are kept of {of}")]
    OverLimit {
        /// Size of the pod.
        bytes: usize,
        max: usize,
        /// What the limit is for.
        of: &'static str,
    },
}

/// The state of one pod.
#[derive(Debug, Clone)]
pub(super) struct Pod {
    pub(super) name: PodName,
    /// Rank in kubelet's order; lower is earlier.
    pub(super) rank: u64,
    pub(super) created: i64,
    pub(super) started: bool,
    pub(super) steps: Vec<Step>,
    /// Devices that an earlier run of the plugin published for it: the only trace of an init container that got another
    /// set than granted.
    pub(super) remembered: BTreeMap<ResourceName, Devices>,
    /// Why the annotation is invalid; set when the pod is first seen.
    pub(super) malformed: Option<GrantRefusal>,
    /// Why the grant conflicts with others; recomputed after each change.
    pub(super) refused: Option<GrantRefusal>,
    /// Whether the refusal was reported.
    pub(super) reported: bool,
}

/// One container's devices of one resource: kubelet allocates step by step.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) container: String,
    pub(super) resource: ResourceName,
    pub(super) count: usize,
    /// The granted share; `None` without a grant.
    pub(super) share: Option<Share>,
    /// The devices it got, by Allocate or PodResources.
    pub(super) allocated: Option<Devices>,
    /// Whether PodResources lists it with `allocated` now.
    pub(super) listed: bool,
    /// The kubelet at which this was last known to be held.
    pub(super) epoch: u64,
    /// The set to allocate: the grant's, or another of equal size if that is taken. Recomputed after each change.
    pub(super) assigned: Option<Devices>,
    /// Whether a difference from its grant was reported.
    pub(super) reported: bool,
}

/// A container's share of a grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Share {
    Exactly(Devices),
    /// Some of the devices that the pod's init containers held.
    OfHeld,
}

impl Pod {
    pub(super) fn new(seen: ObservedPod, node: &NodeName, rank: u64, epoch: u64) -> Self {
        let mut pod = Self {
            name: PodName { namespace: seen.namespace, name: seen.name, uid: seen.uid },
            rank,
            created: seen.created,
            started: seen.started,
            steps: seen
                .requests
                .into_iter()
                .filter(|ask| ask.count > 0)
                .map(|ask| Step {
                    container: ask.container,
                    resource: ask.resource,
                    count: ask.count,
                    share: None,
                    allocated: None,
                    listed: false,
                    epoch,
                    assigned: None,
                    reported: false,
                })
                .collect(),
            remembered: BTreeMap::new(),
            malformed: None,
            refused: None,
            reported: false,
        };
        if let Some(annotation) = seen.grant
            && let Err(refusal) = pod.read_grant(&annotation, node)
        {
            pod.malformed = Some(refusal);
            for step in &mut pod.steps {
                step.share = None;
            }
        }
        pod
    }

    /// Updates what may change in a pod; false if nothing did. A grant never changes, because it is written with the
    /// binding.
    pub(super) fn update(&mut self, seen: &ObservedPod, epoch: u64) -> bool {
        if seen.started == self.started {
            return false;
        }
        self.started = seen.started;
        for step in &mut self.steps {
            step.epoch = epoch;
        }
        true
    }

    fn read_grant(&mut self, annotation: &str, node: &NodeName) -> Result<(), GrantRefusal> {
        let grant = Grant::parse(annotation, &self.name.uid, node)?;
        let mismatch = |container: &str, problem: String| {
            Err(GrantRefusal::Mismatch { container: container.to_owned(), problem })
        };
        let resources = grant.resources();
        for container in grant.containers {
            let step = self.steps.iter_mut().find(|step| {
                step.container == container.name
                    && step.resource == container.resource
                    && step.share.is_none()
            });
            let Some(step) = step else {
                return mismatch(&container.name, format!("it requests no {}", container.resource));
            };
            let (share, count) = match container.share {
                ContainerShare::Devices(devices) => {
                    let count = devices.len();
                    (Share::Exactly(devices.into_iter().collect()), count)
                }
                ContainerShare::AnyOfHeld(count) => {
                    (Share::OfHeld, usize::try_from(count).unwrap_or(usize::MAX))
                }
            };
            if count != step.count {
                return mismatch(
                    &container.name,
                    format!("{count} of {} granted, {} requested", container.resource, step.count),
                );
            }
            step.share = Some(share);
        }
        match self.steps.iter().find(|step| step.share.is_none() && resources.contains(&step.resource)) {
            Some(step) => mismatch(&step.container, format!("nothing of {} granted", step.resource)),
            None => Ok(()),
        }
    }

    /// The memory that it takes, without the devices of this node that it holds.
    pub(super) fn bytes(&self) -> usize {
        let steps = self.steps.iter().map(|step| {
            let granted = match &step.share {
                Some(Share::Exactly(devices)) => {
                    devices.iter().map(|id| DEVICE_BYTES + id.as_str().len()).sum()
                }
                _ => 0,
            };
            size_of::<Step>() + step.container.len() + step.resource.as_str().len() + granted
        });
        let name = &self.name;
        let names = name.uid.as_str().len() + name.namespace.len() + name.name.len();
        size_of::<Self>() + names + steps.sum::<usize>()
    }

    /// Whether its grant is valid.
    pub(super) fn is_granted(&self) -> bool {
        self.malformed.is_none() && self.refused.is_none()
    }

    /// Whether kubelet is known to have allocated devices to it.
    pub(super) fn has_evidence(&self) -> bool {
        self.started || self.steps.iter().any(|step| step.allocated.is_some())
    }

    /// The devices it holds while it lives, by resource: init containers' devices stay with the pod.
    pub(super) fn held(&self) -> BTreeMap<ResourceName, Devices> {
        let mut held = self.remembered.clone();
        for step in &self.steps {
            if let Some(devices) = self.holds(step) {
                held.entry(step.resource.clone()).or_default().extend(devices.iter().cloned());
            }
        }
        held
    }

    /// The devices it holds of one resource.
    pub(super) fn held_of(&self, resource: &ResourceName) -> Devices {
        self.steps
            .iter()
            .filter(|step| step.resource == *resource)
            .filter_map(|step| self.holds(step))
            .chain(self.remembered.get(resource))
            .flatten()
            .cloned()
            .collect()
    }

    /// The devices a step holds: what it got, or its set due if kubelet admitted the pod unseen.
    pub(super) fn holds<'s>(&self, step: &'s Step) -> Option<&'s Devices> {
        step.allocated.as_ref().or_else(|| step.assigned.as_ref().filter(|_| self.started))
    }

    /// Whether kubelet may still allocate for this step: it was not served, or not by this kubelet.
    pub(super) fn is_open(&self, step: &Step, epoch: u64) -> bool {
        if step.allocated.is_none() && !self.started {
            return true;
        }
        // A new kubelet without checkpoint allocates again, but only the grant can identify the set.
        step.epoch < epoch && !step.listed && (step.allocated.is_some() || step.assigned.is_some())
    }

    /// The devices reserved for this step: its set due, or all devices in its grant even if some are unavailable.
    pub(super) fn claims<'s>(&self, step: &'s Step) -> Option<&'s Devices> {
        self.due(step).or(match &step.share {
            Some(Share::Exactly(granted)) if self.is_granted() => Some(granted),
            _ => None,
        })
    }

    /// The set to allocate to a step.
    pub(super) fn due<'s>(&self, step: &'s Step) -> Option<&'s Devices> {
        step.allocated.as_ref().or(step.assigned.as_ref())
    }
}
