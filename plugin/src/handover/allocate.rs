//! Allocate: attributes the set that kubelet chose to a pod. Never refuses or changes the set: it finds the step that
//! the set belongs to, or records a deviation.

use gantry_api::{PodUid, ResourceName};
use jiff::Timestamp;

use super::pod::{Pod, Share, Step};
use super::truth::Unattributed;
use super::{Devices, Handover};

/// How an allocated set relates to the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// It is a pod's grant.
    Granted,
    /// For a pod without a grant: the set that was preferred, or one that kubelet reuses without a question.
    Unplanned,
    /// Kubelet chose another set than granted or preferred.
    Deviation,
}

type StepRef = (PodUid, usize);

impl Handover {
    /// Records that kubelet allocates exactly `set`.
    pub fn allocate(&mut self, resource: &ResourceName, set: &Devices, now: Timestamp) -> Served {
        // An empty set belongs to no pod.
        if set.is_empty() {
            return Served::Unplanned;
        }
        let advised = self
            .outstanding
            .iter()
            .position(|answer| answer.resource == *resource && answer.set == *set)
            .map(|position| self.outstanding.remove(position));
        self.end_unattributed(resource, set, advised.is_some());
        let served = match advised {
            Some(answer) => self.record_preferred(answer.step, resource, set),
            None => {
                let departed = self.outstanding.iter().any(|answer| answer.resource == *resource);
                self.outstanding.retain(|answer| answer.resource != *resource);
                self.attribute_other(resource, set, departed, now)
            }
        };
        self.settle();
        served
    }

    fn record_preferred(&mut self, step: Option<StepRef>, resource: &ResourceName, set: &Devices) -> Served {
        let Some(place) = step.filter(|place| self.step(place).is_some()) else {
            self.unattribute(resource, set);
            return Served::Unplanned;
        };
        let granted =
            self.step(&place).is_some_and(|(pod, step)| pod.is_granted() && granted_as(pod, step, set));
        self.consume(&place, set);
        if granted { Served::Granted } else { Served::Unplanned }
    }

    /// Attributes a set that does not match the last preference, or that had none.
    fn attribute_other(
        &mut self,
        resource: &ResourceName,
        set: &Devices,
        departed: bool,
        now: Timestamp,
    ) -> Served {
        let epoch = self.epoch;
        // Grants are disjoint: an equal set identifies its pod, in any order.
        if let Some(place) = self.find(resource, |pod, step| {
            pod.is_open(step, epoch) && pod.due(step).is_some_and(|due| due == set)
        }) {
            self.consume(&place, set);
            return Served::Granted;
        }
        // Kubelet lost the devices of a container and allocates again.
        if let Some(place) = self.find(resource, |_, step| step.allocated.as_ref() == Some(set)) {
            let granted = self.step(&place).is_some_and(|(_, step)| step.share.is_some());
            self.consume(&place, set);
            return if granted { Served::Granted } else { Served::Unplanned };
        }
        // Kubelet reuses a pod's init devices without a question: the set is then part of what one pod holds.
        if let Some(place) = self.find(resource, |pod, step| {
            pod.is_open(step, epoch) && step.count == set.len() && set.is_subset(&pod.held_of(resource))
        }) {
            let planned = self
                .step(&place)
                .is_some_and(|(pod, step)| pod.is_granted() && matches!(step.share, Some(Share::OfHeld)));
            let exact =
                self.step(&place).is_some_and(|(_, step)| matches!(step.share, Some(Share::Exactly(_))));
            if exact {
                return self.deviates(Some(place), resource, set, now);
            }
            self.consume(&place, set);
            return if planned { Served::Granted } else { Served::Unplanned };
        }
        // Only a kubelet that lost its state allocates again for a running pod; that is no basis for a guess.
        let presumed = self
            .find(resource, |pod, step| !pod.started && pod.is_open(step, epoch) && step.count == set.len());
        let granted = presumed
            .as_ref()
            .and_then(|place| self.step(place))
            .is_some_and(|(pod, step)| pod.is_granted() && step.share.is_some());
        if granted || departed {
            return self.deviates(presumed, resource, set, now);
        }
        match presumed {
            Some(place) => self.consume(&place, set),
            None => self.unattribute(resource, set),
        }
        Served::Unplanned
    }

    fn deviates(
        &mut self,
        place: Option<StepRef>,
        resource: &ResourceName,
        set: &Devices,
        now: Timestamp,
    ) -> Served {
        let step = place.as_ref().and_then(|place| self.step(place));
        let granted = step.and_then(|(pod, step)| pod.due(step)).cloned();
        let pod = step.map(|(pod, _)| pod.name.clone());
        let deviation =
            self.deviation(now, resource, set, granted.as_ref(), pod.as_ref().map(|pod| &pod.uid));
        self.deviate(pod, deviation);
        match place {
            Some(place) => {
                self.consume(&place, set);
                if let Some(step) = self.step_mut(&place) {
                    step.reported = true;
                }
            }
            None => self.unattribute(resource, set),
        }
        Served::Deviation
    }

    /// Records that a step got `set`. Kubelet serves the containers of a pod in order, so earlier open steps will not
    /// be served any more.
    fn consume(&mut self, (uid, position): &StepRef, set: &Devices) {
        let epoch = self.epoch;
        let Some(resource) =
            self.pods.get(uid).and_then(|pod| pod.steps.get(*position)).map(|step| step.resource.clone())
        else {
            return;
        };
        self.attribute(&(uid.clone(), *position), &resource, set);
        let Some(pod) = self.pods.get_mut(uid) else { return };
        for (at, step) in pod.steps.iter_mut().enumerate() {
            if at == *position {
                step.allocated = Some(set.clone());
                step.epoch = epoch;
            } else if at < *position && step.resource == resource && step.allocated.is_none() {
                step.allocated = step.assigned.clone();
                step.epoch = epoch;
            }
        }
    }

    /// Ends unattributed sets that overlap `set`: kubelet never allocates a held device, so their pods have ended. Init
    /// containers' devices are reused only within a pod, without a question.
    fn end_unattributed(&mut self, resource: &ResourceName, set: &Devices, asked: bool) {
        self.unattributed.retain(|known| {
            let handed_on = !asked && known.set != *set && set.is_subset(&known.set);
            known.resource != *resource || known.set.is_disjoint(set) || handed_on
        });
    }

    /// Records `set` as held by an unknown pod. Without PodResources only this limit ends such sets: the oldest are
    /// dropped.
    pub(super) fn unattribute(&mut self, resource: &ResourceName, set: &Devices) {
        let ticket = self.truth.now();
        self.unattributed.retain(|known| known.resource != *resource || known.set != *set);
        if self.unattributed.len() >= Unattributed::MOST {
            self.unattributed.remove(0);
        }
        self.unattributed.push(Unattributed { resource: resource.clone(), set: set.clone(), ticket });
    }

    fn find(&self, resource: &ResourceName, wanted: impl Fn(&Pod, &Step) -> bool) -> Option<StepRef> {
        self.in_order().into_iter().find_map(|pod| {
            pod.steps
                .iter()
                .position(|step| step.resource == *resource && wanted(pod, step))
                .map(|position| (pod.name.uid.clone(), position))
        })
    }

    fn step(&self, (uid, position): &StepRef) -> Option<(&Pod, &Step)> {
        let pod = self.pods.get(uid)?;
        Some((pod, pod.steps.get(*position)?))
    }

    pub(super) fn step_mut(&mut self, (uid, position): &StepRef) -> Option<&mut Step> {
        self.pods.get_mut(uid)?.steps.get_mut(*position)
    }
}

fn granted_as(pod: &Pod, step: &Step, set: &Devices) -> bool {
    match &step.share {
        Some(Share::Exactly(_)) => pod.due(step) == Some(set),
        Some(Share::OfHeld) => true,
        None => false,
    }
}
