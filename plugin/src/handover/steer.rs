//! GetPreferredAllocation: which of the offered devices the asking container should get. Names the asking pod by kubelet's
//! order; keeps everybody else off granted and quarantined devices as long as anything else is left.

use std::collections::BTreeSet;

use gantry_api::{DeviceId, PodUid, ResourceName};
use gantry_topology::choice::devices::Spot;

use super::pod::{Pod, Share, Step};
use super::{Devices, Handover};

/// What kubelet asks for one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The resource.
    pub resource: ResourceName,
    /// The devices kubelet may give.
    pub offered: Devices,
    /// Those it will give in any case.
    pub must: Devices,
    /// How many it will give, those included.
    pub size: usize,
}

/// The answer to one [`Request`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preference {
    /// The devices.
    pub devices: Devices,
    /// Why these.
    pub basis: Basis,
}

/// Why a set was preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// It is the pod's grant.
    Granted,
    /// The asking pod has no grant, or none that can still be given.
    Unplanned,
    /// No pod is known that asks for this.
    Unknown,
    /// Nothing was left outside live grants, quarantine and what others hold.
    Forced,
}

/// What is worth waiting a moment for, instead of answering at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Patience {
    /// A pod that the watch is about to show.
    pub pods: bool,
    /// The choice table of the machine.
    pub table: bool,
}

/// An answer that waits for its Allocate.
#[derive(Debug, Clone)]
pub(super) struct Outstanding {
    pub(super) resource: ResourceName,
    pub(super) set: Devices,
    /// The step it was meant for: pod and position.
    pub(super) step: Option<(PodUid, usize)>,
}

/// The step that is most likely the asking one.
struct Candidate {
    step: (PodUid, usize),
    fit: Fit,
}

/// How an open step goes with an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Fit {
    /// This is its set, and kubelet can give it.
    Set(Devices),
    /// It has no set: any will do.
    Any,
    /// It has a set that kubelet cannot give: a device is sick, or somebody else has it.
    Broken,
    /// It cannot be the asking one.
    No,
}

impl Handover {
    /// Answers the containers of one call. `None` if something is missing that `patience` has time for: to be asked again after
    /// the next change. Kubelet admits nothing else meanwhile.
    pub fn prefer(&mut self, requests: &[Request], patience: Patience) -> Option<Vec<Preference>> {
        let mut answered: Vec<Outstanding> = Vec::new();
        let mut answers = Vec::with_capacity(requests.len());
        for request in requests {
            let candidate = self.candidate(request, &answered);
            let waits = match candidate.as_ref().map(|candidate| &candidate.fit) {
                Some(Fit::Set(_)) => false,
                Some(Fit::Any) => patience.table && self.table.is_none(),
                // Its end may be on its way here as well as the pod that asks.
                Some(Fit::Broken | Fit::No) | None => {
                    patience.pods || (patience.table && self.table.is_none())
                }
            };
            if waits {
                return None;
            }
            let (preference, step) = match candidate {
                Some(Candidate {
                    step,
                    fit: Fit::Set(devices),
                }) => (
                    Preference {
                        devices,
                        basis: Basis::Granted,
                    },
                    Some(step),
                ),
                Some(Candidate { step, .. }) => (self.outside(request, Some(&step)), Some(step)),
                None => (self.outside(request, None), None),
            };
            answered.push(Outstanding {
                resource: request.resource.clone(),
                set: preference.devices.clone(),
                step,
            });
            answers.push(preference);
        }
        // An answer that no Allocate followed is stale: kubelet admits one pod at a time.
        self.outstanding
            .retain(|old| answered.iter().all(|new| new.resource != old.resource));
        self.outstanding.extend(answered);
        Some(answers)
    }

    /// The first pod in kubelet's order with an open step of this resource and size: first those that were never served, for a kubelet
    /// that lost its checkpoint does not ask again for containers that run; of them those whose turn it is within their pod, then any. If
    /// it cannot be given its set it is still the one: taking the next pod's instead would shift every pod after it.
    fn candidate(&self, request: &Request, answered: &[Outstanding]) -> Option<Candidate> {
        let pods = self.in_order();
        let looks = [(false, 1), (false, usize::MAX), (true, 1), (true, usize::MAX)];
        for (again, depth) in looks {
            for pod in &pods {
                let open = self.open_steps(pod, request, answered);
                let open = open.filter(|(_, step)| (pod.started || step.allocated.is_some()) == again);
                for (position, step) in open.take(depth) {
                    if step.count != request.size {
                        continue;
                    }
                    let fit = self.fit(pod, step, request);
                    if fit != Fit::No {
                        return Some(Candidate {
                            step: (pod.name.uid.clone(), position),
                            fit,
                        });
                    }
                }
            }
        }
        None
    }

    fn open_steps<'p>(
        &self,
        pod: &'p Pod,
        request: &Request,
        answered: &[Outstanding],
    ) -> impl Iterator<Item = (usize, &'p Step)> {
        let epoch = self.epoch;
        pod.steps.iter().enumerate().filter(move |(position, step)| {
            let in_this_call = answered.iter().any(|other| {
                other
                    .step
                    .as_ref()
                    .is_some_and(|(uid, at)| *uid == pod.name.uid && at == position)
            });
            step.resource == request.resource && pod.is_open(step, epoch) && !in_this_call
        })
    }

    fn fit(&self, pod: &Pod, step: &Step, request: &Request) -> Fit {
        if let Some(due) = pod.due(step) {
            return if !request.must.is_subset(due) {
                Fit::No
            } else if due.is_subset(&request.offered) {
                Fit::Set(due.clone())
            } else if pod.started || step.allocated.is_some() {
                // Kubelet gives its devices to nobody: it has them.
                Fit::No
            } else {
                Fit::Broken
            };
        }
        // What must be included is what the pod's init containers left: it names the pod.
        let held = pod.held_of(&request.resource);
        if !request.must.is_subset(&held) {
            return Fit::No;
        }
        if step.share == Some(Share::OfHeld) && pod.is_granted() {
            let free: Devices = held.intersection(&request.offered).cloned().collect();
            return if free.len() >= request.size {
                Fit::Set(self.choose(request, &free))
            } else {
                Fit::No
            };
        }
        Fit::Any
    }

    /// The best set outside all live grants and quarantined devices; where too little is left, of what costs least.
    fn outside(&self, request: &Request, step: Option<&(PodUid, usize)>) -> Preference {
        let resource = &request.resource;
        let own = step.and_then(|(uid, position)| {
            let pod = self.pods.get(uid)?;
            pod.claims(pod.steps.get(*position)?)
        });
        let mut held: Vec<&DeviceId> = Vec::new();
        let mut pending: Vec<Vec<&DeviceId>> = Vec::new();
        for pod in self.in_order() {
            if step.is_some_and(|(uid, _)| *uid == pod.name.uid) {
                continue;
            }
            let steps = || pod.steps.iter().filter(|step| step.resource == *resource);
            held.extend(
                steps()
                    .filter_map(|step| pod.holds(step))
                    .chain(pod.remembered.get(resource))
                    .flatten(),
            );
            pending.push(steps().filter_map(|step| pod.claims(step)).flatten().collect());
        }
        let quarantined: Vec<&DeviceId> = self
            .quarantine
            .values()
            .filter_map(|quarantined| quarantined.sets.get(resource))
            .flatten()
            .collect();
        let unattributed = self
            .unattributed
            .iter()
            .filter(|known| known.resource == *resource)
            .flat_map(|known| &known.set);
        held.extend(unattributed);
        let elsewhere = self.held_elsewhere(resource);
        let renamed = held_by_another_name(&request.offered, &elsewhere);
        let mut free = request.offered.clone();
        let taken = held.iter().chain(&quarantined).chain(&renamed);
        for device in taken.chain(pending.iter().flatten()) {
            free.remove(*device);
        }
        let own_pod: Devices = step
            .and_then(|(uid, _)| self.pods.get(uid))
            .map(|pod| pod.held_of(resource))
            .unwrap_or_default();
        free.extend(own_pod.intersection(&request.offered).cloned());
        free.extend(request.must.intersection(&request.offered).cloned());
        let basis = if step.is_some() {
            Basis::Unplanned
        } else {
            Basis::Unknown
        };
        if free.len() >= request.size {
            return Preference {
                devices: self.choose_beside(request, &free, &elsewhere),
                basis,
            };
        }
        // Too little. The asking pod's own grant first, then what kubelet knows to be free though we do not yet, then devices
        // of processes that are about to end, then grants, the youngest first, whose pods are furthest from admission, and at last GPUs
        // that somebody holds whole.
        let tiers = [own.into_iter().flatten().collect(), held, quarantined]
            .into_iter()
            .chain(pending.into_iter().rev())
            .chain([renamed]);
        for tier in tiers {
            free.extend(
                tier.into_iter()
                    .filter(|device| request.offered.contains(*device))
                    .cloned(),
            );
            if free.len() >= request.size {
                break;
            }
        }
        Preference {
            devices: self.choose_beside(request, &free, &elsewhere),
            basis: Basis::Forced,
        }
    }

    fn choose(&self, request: &Request, free: &Devices) -> Devices {
        self.choose_beside(request, free, &self.held_elsewhere(&request.resource))
    }

    /// The best of `free`, given what [`Self::held_elsewhere`] found.
    fn choose_beside(&self, request: &Request, free: &Devices, elsewhere: &[&DeviceId]) -> Devices {
        let Some(devices) = self.devices.get(&request.resource) else {
            return Devices::new();
        };
        let spot = |device: &&DeviceId| self.whereabouts.get(device.unit()).copied();
        let elsewhere: Vec<Spot> = elsewhere.iter().filter_map(spot).collect();
        let table = self.table.as_deref();
        devices.choose(table, &elsewhere, free, &request.must, request.size)
    }

    /// The devices that somebody holds, or is about to get, and that are none of the resource's: other resources' on the same GPUs, and
    /// those given out before a changed configuration gave them other names, of which kubelet knows nothing.
    fn held_elsewhere(&self, resource: &ResourceName) -> Vec<&DeviceId> {
        let Some(devices) = self.devices.get(resource) else {
            return Vec::new();
        };
        let holders = self.known_holders();
        let held = holders.keys().copied();
        let steps = self
            .pods
            .values()
            .flat_map(|pod| pod.steps.iter().map(move |step| (pod, step)));
        let claimed = steps.flat_map(|(pod, step)| {
            let devices = pod.claims(step).into_iter().flatten();
            devices.map(move |device| (&step.resource, device))
        });
        let quarantined = self.quarantine.values().flat_map(|quarantined| {
            let sets = quarantined.sets.iter();
            sets.flat_map(|(resource, set)| set.iter().map(move |device| (resource, device)))
        });
        let unattributed = self
            .unattributed
            .iter()
            .flat_map(|known| known.set.iter().map(move |device| (&known.resource, device)));
        let elsewhere: BTreeSet<_> = held
            .chain(claimed)
            .chain(quarantined)
            .chain(unattributed)
            .filter(|(other, device)| *other != resource || !devices.contains(device))
            .collect();
        elsewhere.into_iter().map(|(_, device)| device).collect()
    }
}

/// What is offered of GPUs and MIG devices that somebody was given whole before a changed configuration shared them, or in part before it
/// made them whole again: kubelet knows nothing of these names any more.
fn held_by_another_name<'r>(offered: &'r Devices, elsewhere: &[&DeviceId]) -> Vec<&'r DeviceId> {
    if elsewhere.is_empty() {
        return Vec::new();
    }
    let is_whole = |device: &DeviceId| device.as_str() == device.unit();
    let whole = elsewhere.iter().filter(|device| is_whole(device));
    let whole: BTreeSet<&str> = whole.map(|device| device.unit()).collect();
    let any: BTreeSet<&str> = elsewhere.iter().map(|device| device.unit()).collect();
    let is_held = |device: &&DeviceId| {
        let units = if is_whole(device) { &any } else { &whole };
        units.contains(device.unit())
    };
    offered.iter().filter(is_held).collect()
}
