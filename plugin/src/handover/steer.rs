//! GetPreferredAllocation: which of the offered devices the pod should get. Identifies the pod by kubelet's order, and
//! avoids granted and quarantined devices for all other pods while alternatives exist.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use gantry_api::{DeviceId, PodUid, ResourceName};
use gantry_config::SharedDevices;
use gantry_topology::choice::Table;
use gantry_topology::choice::devices::{Sharing, Spot, Units};

use super::pod::{Pod, Share, Step};
use super::{Devices, Handover};
use crate::inventory::{Device, Inventory};

/// Kubelet's request for one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub resource: ResourceName,
    /// The devices that kubelet may allocate.
    pub offered: Devices,
    /// The devices that kubelet will allocate in any case.
    pub must: Devices,
    /// Number of devices, those included.
    pub size: usize,
}

/// The result for one [`Request`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preference {
    pub devices: Devices,
    pub basis: Basis,
}

/// Why a set was preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// It is the pod's grant.
    Granted,
    /// The pod has no grant, or none that can still be allocated.
    Unplanned,
    /// No known pod matches the request.
    Unknown,
    /// No devices were left outside live grants, quarantine and other pods' devices.
    Forced,
}

/// What a call may wait for before it returns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WaitFor {
    /// A pod that the watch is about to show.
    pub pods: bool,
    /// The choice table of the machine.
    pub table: bool,
}

/// A response without an Allocate so far.
#[derive(Debug, Clone)]
pub(super) struct PendingResponse {
    pub(super) resource: ResourceName,
    pub(super) set: Devices,
    /// The step that it was meant for: pod and position.
    pub(super) step: Option<(PodUid, usize)>,
}

/// The step that most likely matches the request.
struct Candidate {
    step: (PodUid, usize),
    fit: StepMatch,
}

/// How an open step matches an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum StepMatch {
    /// This is its set, and kubelet can allocate it.
    Set(Devices),
    /// It has no set: any will do.
    Any,
    /// It has a set that kubelet cannot allocate: a device is unhealthy, or held by another pod.
    Broken,
    No,
}

impl Handover {
    /// The preferences for the containers of one call. `None` if something is missing that `wait_for` allows to wait
    /// for: call again after the next change. Kubelet admits no other pod meanwhile.
    pub fn prefer(&mut self, requests: &[Request], wait_for: WaitFor) -> Option<Vec<Preference>> {
        let mut answered: Vec<PendingResponse> = Vec::new();
        let mut answers = Vec::with_capacity(requests.len());
        for request in requests {
            let candidate = self.candidate(request, &answered);
            let waits = match candidate.as_ref().map(|candidate| &candidate.fit) {
                Some(StepMatch::Set(_)) => false,
                Some(StepMatch::Any) => wait_for.table && self.table.is_none(),
                // The pod's deletion may be pending as well as its creation.
                Some(StepMatch::Broken | StepMatch::No) | None => {
                    wait_for.pods || (wait_for.table && self.table.is_none())
                }
            };
            if waits {
                return None;
            }
            let (preference, step) = match candidate {
                Some(Candidate { step, fit: StepMatch::Set(devices) }) => {
                    (Preference { devices, basis: Basis::Granted }, Some(step))
                }
                Some(Candidate { step, .. }) => (self.outside(request, Some(&step)), Some(step)),
                None => (self.outside(request, None), None),
            };
            answered.push(PendingResponse {
                resource: request.resource.clone(),
                set: preference.devices.clone(),
                step,
            });
            answers.push(preference);
        }
        // A response without Allocate is stale: kubelet admits one pod at a time.
        self.outstanding.retain(|old| answered.iter().all(|new| new.resource != old.resource));
        self.outstanding.extend(answered);
        Some(answers)
    }

    /// The first pod in kubelet's order with an open step of this resource and size. Steps that were never served come
    /// first, because a kubelet without checkpoint does not allocate again for running containers; of these, the next
    /// step in the order of the pod. If the pod's set is unavailable it still is the pod: taking the next pod's set
    /// would shift all pods after it.
    fn candidate(&self, request: &Request, answered: &[PendingResponse]) -> Option<Candidate> {
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
                    if fit != StepMatch::No {
                        return Some(Candidate { step: (pod.name.uid.clone(), position), fit });
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
        answered: &[PendingResponse],
    ) -> impl Iterator<Item = (usize, &'p Step)> {
        let epoch = self.epoch;
        pod.steps.iter().enumerate().filter(move |(position, step)| {
            let in_this_call = answered.iter().any(|other| {
                other.step.as_ref().is_some_and(|(uid, at)| *uid == pod.name.uid && at == position)
            });
            step.resource == request.resource && pod.is_open(step, epoch) && !in_this_call
        })
    }

    fn fit(&self, pod: &Pod, step: &Step, request: &Request) -> StepMatch {
        if let Some(due) = pod.due(step) {
            return if !request.must.is_subset(due) {
                StepMatch::No
            } else if due.is_subset(&request.offered) {
                StepMatch::Set(due.clone())
            } else if pod.started || step.allocated.is_some() {
                // Its devices are held by the pod itself, so kubelet does not offer them.
                StepMatch::No
            } else {
                StepMatch::Broken
            };
        }
        // Devices that must be included were left by the pod's init containers: they identify the pod.
        let held = pod.held_of(&request.resource);
        if !request.must.is_subset(&held) {
            return StepMatch::No;
        }
        if step.share == Some(Share::OfHeld) && pod.is_granted() {
            let free: Devices = held.intersection(&request.offered).cloned().collect();
            return if free.len() >= request.size {
                StepMatch::Set(self.choose(request, &free))
            } else {
                StepMatch::No
            };
        }
        StepMatch::Any
    }

    /// The best set outside all live grants and quarantined devices; if too few are left, the least harmful others.
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
                steps().filter_map(|step| pod.holds(step)).chain(pod.remembered.get(resource)).flatten(),
            );
            pending.push(steps().filter_map(|step| pod.claims(step)).flatten().collect());
        }
        let quarantined: Vec<&DeviceId> = self
            .quarantine
            .values()
            .filter_map(|quarantined| quarantined.sets.get(resource))
            .flatten()
            .collect();
        let unattributed =
            self.unattributed.iter().filter(|known| known.resource == *resource).flat_map(|known| &known.set);
        held.extend(unattributed);
        let elsewhere = self.held_elsewhere(resource);
        let renamed = held_by_another_name(&request.offered, &elsewhere);
        let mut free = request.offered.clone();
        let taken = held.iter().chain(&quarantined).chain(&renamed);
        for device in taken.chain(pending.iter().flatten()) {
            free.remove(*device);
        }
        let own_pod: Devices =
            step.and_then(|(uid, _)| self.pods.get(uid)).map(|pod| pod.held_of(resource)).unwrap_or_default();
        free.extend(own_pod.intersection(&request.offered).cloned());
        free.extend(request.must.intersection(&request.offered).cloned());
        let basis = if step.is_some() { Basis::Unplanned } else { Basis::Unknown };
        if free.len() >= request.size {
            return Preference { devices: self.choose_beside(request, &free, &elsewhere), basis };
        }
        // Too few devices. Ascending harm: the pod's own grant; devices that only this plugin still believes to be
        // held; devices of processes that are about to end; grants, the youngest first, with pods furthest from
        // admission; at last GPUs that a pod holds whole.
        let tiers = [own.into_iter().flatten().collect(), held, quarantined]
            .into_iter()
            .chain(pending.into_iter().rev())
            .chain([renamed]);
        for tier in tiers {
            free.extend(tier.into_iter().filter(|device| request.offered.contains(*device)).cloned());
            if free.len() >= request.size {
                break;
            }
        }
        Preference { devices: self.choose_beside(request, &free, &elsewhere), basis: Basis::Forced }
    }

    fn choose(&self, request: &Request, free: &Devices) -> Devices {
        self.choose_beside(request, free, &self.held_elsewhere(&request.resource))
    }

    /// The best set of `free`, given the result of [`Self::held_elsewhere`].
    fn choose_beside(&self, request: &Request, free: &Devices, elsewhere: &[&DeviceId]) -> Devices {
        let Some(devices) = self.devices.get(&request.resource) else {
            return Devices::new();
        };
        let spot = |device: &&DeviceId| self.whereabouts.get(device.unit()).copied();
        let elsewhere: Vec<Spot> = elsewhere.iter().filter_map(spot).collect();
        let table = self.table.as_deref();
        devices.choose(table, &elsewhere, free, &request.must, request.size)
    }

    /// Devices of other resources that are held or due: on the same GPUs, or allocated before a configuration change
    /// renamed them, which kubelet does not know.
    fn held_elsewhere(&self, resource: &ResourceName) -> Vec<&DeviceId> {
        let Some(devices) = self.devices.get(resource) else {
            return Vec::new();
        };
        let holders = self.known_holders();
        let held = holders.keys().copied();
        let steps = self.pods.values().flat_map(|pod| pod.steps.iter().map(move |step| (pod, step)));
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

/// Offered names of GPUs and MIG devices that were allocated as a whole before a configuration change shared them, or
/// in part before it made them whole: kubelet does not know these holders.
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

/// The devices of one resource as input of the choice.
#[derive(Debug, Clone, Default)]
pub(super) struct ChoiceInput {
    /// In inventory order.
    ids: Vec<DeviceId>,
    spots: Vec<Spot>,
    positions: HashMap<DeviceId, u16>,
    sharing: Sharing,
}

/// The devices of every resource of an inventory.
pub(super) fn choosable(inventory: &Inventory) -> BTreeMap<ResourceName, ChoiceInput> {
    let mut resources: BTreeMap<ResourceName, ChoiceInput> = BTreeMap::new();
    for device in &inventory.devices {
        let resource = resources.entry(device.resource.clone()).or_default();
        // Kubelet's messages hold fewer devices than u16.
        if let Ok(position) = u16::try_from(resource.ids.len()) {
            resource.positions.insert(device.id.clone(), position);
            resource.ids.push(device.id.clone());
            resource.spots.push(spot(device));
        }
    }
    for (name, resource) in &mut resources {
        let terms = inventory.resources.get(name).copied().unwrap_or_default();
        resource.sharing = match terms.sharing {
            SharedDevices::Distributed => Sharing::Distributed,
            SharedDevices::Packed => Sharing::Packed,
        };
    }
    resources
}

/// Position of every GPU and MIG device by UUID, independent of its resource.
pub(super) fn whereabouts(inventory: &Inventory) -> HashMap<String, Spot> {
    let devices = inventory.devices.iter();
    devices.map(|device| (device.uuid.clone(), spot(device))).collect()
}

fn spot(device: &Device) -> Spot {
    Spot {
        gpu: device.gpu,
        slice: device.slice.as_ref().map(|slice| Units { start: slice.start, size: slice.size }),
    }
}

impl ChoiceInput {
    /// Whether `device` is one of the devices.
    pub(super) fn contains(&self, device: &DeviceId) -> bool {
        self.positions.contains_key(device)
    }

    /// The best `size` devices of `free` that include all of `must`; fewer if there are not enough. Devices outside
    /// `free` are in use, and so are those in `elsewhere`.
    pub(super) fn choose(
        &self,
        table: Option<&Table>,
        elsewhere: &[Spot],
        free: &Devices,
        must: &Devices,
        size: usize,
    ) -> Devices {
        // Devices that must be included are returned even if they are unknown.
        let unknown = must.iter().filter(|device| !self.contains(device));
        let mut chosen: Devices = unknown.take(size).cloned().collect();
        let chosen_of = |spots: &[Spot]| {
            gantry_topology::choice::devices::choose(
                table,
                spots,
                &self.positions(free),
                &self.positions(must),
                size - chosen.len(),
                self.sharing,
            )
        };
        let positions = if elsewhere.is_empty() {
            chosen_of(&self.spots)
        } else {
            chosen_of(&[self.spots.as_slice(), elsewhere].concat())
        };
        let ids = positions.iter().filter_map(|position| self.ids.get(usize::from(*position)));
        chosen.extend(ids.cloned());
        chosen
    }

    fn positions(&self, devices: &Devices) -> Vec<u16> {
        let mut positions: Vec<u16> =
            devices.iter().filter_map(|device| self.positions.get(device)).copied().collect();
        positions.sort_unstable();
        positions
    }
}
