//! One pod of the node as the hand-over sees it: what its containers ask for in kubelet's own order, what its grant says of
//! each, and what is known of what each got. Reads grants; believes none that does not fit the pod.

use std::collections::BTreeMap;

use gantry_api::{ContainerShare, DeviceId, Grant, GrantError, NodeName, PodUid, ResourceName};

use super::{Devices, PodName};

/// A pod as the watch shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSeen {
    /// UID.
    pub uid: PodUid,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// When it was created, in seconds: the order in which a kubelet that starts admits pods.
    pub created: i64,
    /// Resource version, which counts the writes to the cluster.
    pub revision: u64,
    /// The grant annotation, as it stands.
    pub grant: Option<String>,
    /// Extended resources its containers ask for, in the order kubelet allocates: init containers, then the others.
    pub asks: Vec<Ask>,
    /// Whether kubelet has admitted it (its status has a start time).
    pub started: bool,
}

/// What one container asks of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// The container.
    pub container: String,
    /// The resource.
    pub resource: ResourceName,
    /// How many devices.
    pub count: usize,
}

/// Why a grant is not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Unreadable, or made for another pod or node.
    #[error(transparent)]
    Unreadable(#[from] GrantError),
    /// A container that asks for devices is not in it, or it has one that does not ask.
    #[error("the grant and the pod disagree on container {container:?}: {problem}")]
    Mismatch {
        /// The container.
        container: String,
        /// What differs.
        problem: String,
    },
    /// A device this node does not have.
    #[error("device {device} of {resource} is not on this node")]
    UnknownDevice {
        /// The device.
        device: DeviceId,
        /// The resource.
        resource: ResourceName,
    },
    /// A device that an older grant names, or that another pod holds with a grant.
    #[error("device {device} belongs to the grant of pod {other}")]
    Overlap {
        /// The device.
        device: DeviceId,
        /// The pod whose grant came first.
        other: PodUid,
    },
}

/// A pod and what is known of it.
#[derive(Debug, Clone)]
pub(super) struct Pod {
    pub(super) name: PodName,
    /// Place in kubelet's order, the lower the earlier.
    pub(super) rank: u64,
    pub(super) created: i64,
    pub(super) started: bool,
    pub(super) steps: Vec<Step>,
    /// What an earlier run of the plugin published that it holds: the only trace of an init container that got another set than
    /// granted.
    pub(super) remembered: BTreeMap<ResourceName, Devices>,
    /// Why the annotation is no grant; fixed at first sight.
    pub(super) malformed: Option<Refusal>,
    /// Why the grant does not stand beside the others; settled anew after each change.
    pub(super) refused: Option<Refusal>,
    /// Whether a refusal was told.
    pub(super) told: bool,
}

/// One container's devices of one resource: kubelet allocates step by step.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) container: String,
    pub(super) resource: ResourceName,
    pub(super) count: usize,
    /// What the grant says; `None` without one.
    pub(super) share: Option<Share>,
    /// What it got, by Allocate or by the truth.
    pub(super) allocated: Option<Devices>,
    /// Whether the truth lists it with `allocated` now.
    pub(super) listed: bool,
    /// The kubelet in whose time this was last known to be held.
    pub(super) epoch: u64,
    /// The set it is to get: its grant's, or another of equal size where that is taken. Settled anew after each change.
    pub(super) assigned: Option<Devices>,
    /// Whether a difference from its grant was told.
    pub(super) told: bool,
}

/// A container's part of a grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Share {
    /// Exactly these.
    Exactly(Devices),
    /// Some of what the pod's init containers held.
    OfHeld,
}

impl Pod {
    pub(super) fn new(seen: PodSeen, node: &NodeName, rank: u64, epoch: u64) -> Self {
        let mut pod = Self {
            name: PodName {
                namespace: seen.namespace,
                name: seen.name,
                uid: seen.uid,
            },
            rank,
            created: seen.created,
            started: seen.started,
            steps: seen
                .asks
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
                    told: false,
                })
                .collect(),
            remembered: BTreeMap::new(),
            malformed: None,
            refused: None,
            told: false,
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

    /// Takes over what may change in a pod's life; false if nothing did. A grant may not: it comes with the binding.
    pub(super) fn update(&mut self, seen: &PodSeen, epoch: u64) -> bool {
        if seen.started == self.started {
            return false;
        }
        self.started = seen.started;
        for step in &mut self.steps {
            step.epoch = epoch;
        }
        true
    }

    fn read_grant(&mut self, annotation: &str, node: &NodeName) -> Result<(), Refusal> {
        let grant = Grant::parse(annotation, &self.name.uid, node)?;
        let mismatch = |container: &str, problem: String| {
            Err(Refusal::Mismatch {
                container: container.to_owned(),
                problem,
            })
        };
        let resources = grant.resources();
        for container in grant.containers {
            let step = self.steps.iter_mut().find(|step| {
                step.container == container.name
                    && step.resource == container.resource
                    && step.share.is_none()
            });
            let Some(step) = step else {
                return mismatch(&container.name, format!("it asks for no {}", container.resource));
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
                    format!("{count} of {} granted, {} asked", container.resource, step.count),
                );
            }
            step.share = Some(share);
        }
        match self
            .steps
            .iter()
            .find(|step| step.share.is_none() && resources.contains(&step.resource))
        {
            Some(step) => mismatch(&step.container, format!("nothing of {} granted", step.resource)),
            None => Ok(()),
        }
    }

    /// Whether its grant stands.
    pub(super) fn is_granted(&self) -> bool {
        self.malformed.is_none() && self.refused.is_none()
    }

    /// Whether kubelet is known to have given it something.
    pub(super) fn has_evidence(&self) -> bool {
        self.started || self.steps.iter().any(|step| step.allocated.is_some())
    }

    /// What it holds for its life, by resource: init containers' devices stay with the pod.
    pub(super) fn held(&self) -> BTreeMap<ResourceName, Devices> {
        let mut held = self.remembered.clone();
        for step in &self.steps {
            if let Some(devices) = self.holds(step) {
                held.entry(step.resource.clone())
                    .or_default()
                    .extend(devices.iter().cloned());
            }
        }
        held
    }

    /// What it holds of one resource.
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

    /// What a step holds: what it got, or, once kubelet has admitted the pod unseen, what it was to get.
    pub(super) fn holds<'s>(&self, step: &'s Step) -> Option<&'s Devices> {
        step.allocated
            .as_ref()
            .or_else(|| step.assigned.as_ref().filter(|_| self.started))
    }

    /// Whether kubelet may still ask for this step: it has not been served, or not by this kubelet.
    pub(super) fn is_open(&self, step: &Step, epoch: u64) -> bool {
        if step.allocated.is_none() && !self.started {
            return true;
        }
        // A new kubelet that lost its checkpoint asks again, but only the grant can say for which set.
        step.epoch < epoch && !step.listed && (step.allocated.is_some() || step.assigned.is_some())
    }

    /// What others are kept off for the sake of this step: the set due, or what a grant names though not all of it can be had.
    pub(super) fn claims<'s>(&self, step: &'s Step) -> Option<&'s Devices> {
        self.due(step).or(match &step.share {
            Some(Share::Exactly(granted)) if self.is_granted() => Some(granted),
            _ => None,
        })
    }

    /// The set a step is to be given when it is asked for.
    pub(super) fn due<'s>(&self, step: &'s Step) -> Option<&'s Devices> {
        step.allocated.as_ref().or(step.assigned.as_ref())
    }
}
