//! kube-scheduler's preemption for a single pod: which of the nodes that it offers really have the devices once the
//! victims are gone, and which further victims that takes. No gang is broken for a single pod where another node will
//! do. Nothing is changed here.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gantry_api::PodUid;
use gantry_gang::GangKey;

use super::GangViews;
use super::disruption_budgets::Allowance;
use super::facts::Facts;
use super::least_set::least_set;
use super::node::Node;
use super::unschedulable_queue::AWAITED;
use crate::pod::PodFacts;
use crate::wire::Offer;
use gantry_planner::decide;
use gantry_planner::devices::DeviceSet;
use gantry_planner::inventory::Pool;
use gantry_planner::request::{NumaDemand, Request};
use gantry_planner::snapshot::{Class, NodeIx};

/// A search for the victims of one single pod.
pub(super) struct VictimSearch<'i> {
    facts: &'i Facts,
    gangs: GangViews<'i>,
    request: &'i Request,
    priority: i32,
}

impl<'i> VictimSearch<'i> {
    pub(super) fn new(facts: &'i Facts, gangs: GangViews<'i>, request: &'i Request, priority: i32) -> Self {
        Self { facts, gangs, request, priority }
    }

    /// Of the nodes that kube-scheduler offers those that help, each with its victims: those that were named, and
    /// others of lower priority if the devices require it, with as few disruption budgets broken as possible.
    pub(super) fn choose(&self, offers: Vec<Offer>) -> Vec<Offer> {
        let offers = offers.into_iter();
        let mut found: Vec<(usize, Offer)> = offers.filter_map(|offer| self.victims_on(offer)).collect();
        // Fewest budgets broken, as kube-scheduler would choose; then fewest gangs, which it cannot know.
        let cost = |(gangs, offer): &(usize, Offer)| (offer.budgets_broken, *gangs);
        let least = found.iter().map(cost).min();
        found.retain(|one| Some(cost(one)) == least);
        found.into_iter().map(|(_, offer)| offer).collect()
    }

    /// Whether a node that takes the pod has enough devices once deleted pods have released theirs. kube-scheduler no
    /// longer sees such pods: it counts their devices as free, and as filter still refuses them it would have others
    /// stopped, node after node. The devices that came free on the node before would then be open to any pod, for
    /// kube-scheduler nominates one node only. On that node pods that are being deleted count too: kube-scheduler does
    /// not see them either.
    pub(super) fn comes_free(&self, uid: &PodUid) -> bool {
        let Some(pod) = self.facts.pods.get(uid) else {
            return false;
        };
        let nominated = self.facts.unschedulable.nominated_for(uid);
        let mut nodes = self.facts.nodes.iter();
        nodes.any(|(number, node)| self.comes_free_on(pod, (number, node), nominated == Some(node.name())))
    }

    fn comes_free_on(&self, pod: &PodFacts, (number, node): (NodeIx, &Node), is_nominated: bool) -> bool {
        let Some(inventory) = node.inventory() else {
            return false;
        };
        let Self { facts, gangs, request, priority } = *self;
        let now = facts.clock.now().at;
        let returning = node.returning(|since| now.saturating_duration_since(since) < AWAITED);
        let pools = inventory.pools.iter().zip(&returning);
        let mut leaving: Vec<DeviceSet> = pools.map(|(pool, ids)| pool.find(ids).0).collect();
        if is_nominated {
            leaving = self.with_leaving((number, node), leaving);
        }
        if leaving.iter().all(DeviceSet::is_empty) || gangs.reservation_against(number, priority).is_some() {
            return false;
        }
        let labels = facts.resources.facts(number);
        let class = || node.exact(&[]);
        labels.is_none_or(|labels| pod.needs.admits(labels).is_ok())
            && class().is_some_and(|class| {
                // Of pods that are gone the CPUs are unknown.
                let unknown: &[NumaDemand] = &NumaDemand::UNKNOWN;
                let back = [(leaving.as_slice(), unknown)];
                fits_without(&class, request, &back, facts.options.policy)
            })
    }

    /// The devices that pods release on a node, by pool: `returning`, and those of pods that are being deleted.
    fn with_leaving(&self, (number, node): (NodeIx, &Node), returning: Vec<DeviceSet>) -> Vec<DeviceSet> {
        let pods = node.occupancy().pods().iter();
        let leaving = pods.filter_map(|uid| self.facts.pods.get(uid)).filter(|pod| pod.leaving);
        leaving.filter_map(|pod| self.released_by(pod, number)).fold(returning, |returning, mut own| {
            own.iter_mut().zip(&returning).for_each(|(own, set)| own.add(set));
            own
        })
    }

    /// The healthy devices that the end of a pod releases on its node, by pool, without those that are reserved for
    /// gangs.
    fn released_by(&self, pod: &PodFacts, node: NodeIx) -> Option<Vec<DeviceSet>> {
        let node = self.facts.nodes.get(node)?;
        let devices = node.released_by(&pod.uid, self.gangs.goes_with(&pod.uid))?;
        let inventory = node.inventory()?;
        let of = |pool: &Pool| devices.iter().find(|(resource, _)| *resource == pool.resource);
        let set = |pool| of(pool).map(|(_, ids)| &pool.find(ids).0 & &pool.healthy);
        let pools = inventory.pools.iter();
        Some(pools.map(|pool| set(pool).unwrap_or_default()).collect())
    }

    /// How many gangs the end of some pods breaks. One that loses only members beyond its minimum goes on.
    fn gangs_broken(&self, victims: &[&str]) -> usize {
        let mut gangs: BTreeMap<&GangKey, Vec<PodUid>> = BTreeMap::new();
        for uid in victims.iter().map(|uid| PodUid::from(*uid)) {
            if let Some(gang) = self.gangs.goes_with(&uid) {
                gangs.entry(gang).or_default().push(uid);
            }
        }
        gangs.into_iter().filter(|(gang, uids)| !self.gangs.goes_on_without(gang, uids)).count()
    }

    fn breaks(&self, allowance: &mut Allowance<'_>, uid: &str) -> bool {
        allowance.breaks(self.facts.resources.profile(&PodUid::from(uid)))
    }

    /// Whether a pod may be preempted: not if its gang has the priority of the request or a higher one, whatever its own is. Such a gang
    /// would get the devices back at once.
    fn may_go(&self, uid: &PodUid) -> bool {
        let gang = self.gangs.goes_with(uid).and_then(|gang| self.gangs.priority_of(gang));
        gang.is_none_or(|priority| priority < self.priority)
    }

    /// The victims on one node, and how many gangs they break; `None` if no end of pods of lower priority helps.
    fn victims_on(&self, offer: Offer) -> Option<(usize, Offer)> {
        let Self { facts, gangs, request, priority } = *self;
        let number = facts.nodes.find(&offer.node)?;
        let node = facts.nodes.get(number)?;
        let Some(class) = node.exact(&[]) else {
            // Nothing is known of a foreign node; kube-scheduler has counted.
            return (!offer.victims.is_empty()).then(|| (self.gangs_broken(&offer.uids()), offer));
        };
        let may_go = |uid: &String| self.may_go(&PodUid::from(uid.as_str()));
        if gangs.reservation_against(number, priority).is_some() || !offer.victims.iter().all(may_go) {
            return None;
        }
        let held = |pod: &'i PodFacts| Some((pod, self.released_by(pod, number)?));
        let named = offer.uids().into_iter().filter_map(|uid| held(facts.pods.get(uid)?));
        let named: Vec<(&PodFacts, Vec<DeviceSet>)> = named.collect();
        // kube-scheduler has counted the victims that it names.
        let mut with_named = facts.budgets.allowance();
        for uid in &offer.victims {
            self.breaks(&mut with_named, uid);
        }
        let others: Vec<(&PodFacts, Vec<DeviceSet>)> = self
            .other_victims(node, &offer.victims, with_named.clone())
            .into_iter()
            .filter_map(held)
            .collect();
        let fits = |set: &[usize]| {
            let pods = named.iter().chain(set.iter().map(|at| &others[*at]));
            let back: Vec<_> = pods.map(|(pod, devices)| (devices.as_slice(), pod.numa())).collect();
            fits_without(&class, request, &back, facts.options.policy)
        };
        let broken = |set: &[usize]| {
            let mut allowance = with_named.clone();
            set.iter().filter(|at| self.breaks(&mut allowance, others[**at].0.uid.as_str())).count()
        };
        // Budgets and gangs come first, as between nodes; then the least loss, as for a gang.
        let cost = |set: &[usize]| {
            let more = set.iter().map(|at| others[*at].0.uid.as_str());
            let all: Vec<&str> = offer.uids().into_iter().chain(more).collect();
            let priority = set.iter().map(|at| others[*at].0.priority).max();
            let sets = set.iter().flat_map(|at| &others[*at].1);
            let devices: usize = sets.map(DeviceSet::len).sum();
            (broken(set), self.gangs_broken(&all), priority, devices, set.len())
        };
        let added = least_set(others.len(), cost, fits)?;
        let budgets_broken = offer.budgets_broken.saturating_add_unsigned(broken(&added) as u64);
        let added = added.iter().map(|at| others[*at].0.uid.as_str().to_owned());
        let mut victims: Vec<String> = offer.victims.iter().cloned().chain(added).collect();
        // kube-scheduler takes the priority of the first victim for the highest on the node, and prefers nodes by it.
        // Unknown victims stay in front, in the order in which they were named.
        victims.sort_by_key(|uid| Reverse(self.priority_of(uid).unwrap_or(i32::MAX)));
        let offer = Offer { victims, budgets_broken, node: offer.node };
        (!offer.victims.is_empty()).then(|| (self.gangs_broken(&offer.uids()), offer))
    }

    /// Other pods of lower priority on a node: single pods first, then the least important and the youngest; but before
    /// them all pods that no budget protects, given that those before them are stopped too.
    fn other_victims(
        &self,
        node: &Node,
        named: &[String],
        mut allowance: Allowance<'_>,
    ) -> Vec<&'i PodFacts> {
        let pods = node.occupancy().pods().iter();
        let pods = pods.filter_map(|uid| self.facts.pods.get(uid));
        let mut others: Vec<&'i PodFacts> = pods
            .map(|pod| &**pod)
            .filter(|pod| pod.priority < self.priority && !pod.leaving && self.may_go(&pod.uid))
            .filter(|pod| named.iter().all(|known| known != pod.uid.as_str()))
            .collect();
        others.sort_by_key(|pod| {
            let gang = self.gangs.goes_with(&pod.uid).is_some();
            (gang, pod.priority, Reverse(pod.created()), pod.uid.clone())
        });
        let (protected, free): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|pod| self.breaks(&mut allowance, pod.uid.as_str()));
        free.into_iter().chain(protected).collect()
    }

    fn priority_of(&self, uid: &str) -> Option<i32> {
        let uid = PodUid::from(uid);
        let known = self.facts.pods.get(&uid).map(|pod| pod.priority);
        known.or_else(|| Some(self.facts.resources.preemptible(&uid)?.pod.priority))
    }
}

/// Whether a request fits on a class once pods release their devices, by pool, and their exclusive CPUs.
pub(super) fn fits_without(
    class: &Class,
    request: &Request,
    back: &[(&[DeviceSet], &[NumaDemand])],
    policy: decide::Policy,
) -> bool {
    // Most sets of pods are too small, which is known without a copy of the class.
    let enough = request.asks.iter().all(|ask| {
        class.pool(ask.resource.as_str()).is_some_and(|(index, pool)| {
            let released = back.iter().filter_map(|(devices, _)| devices.get(index));
            pool.free.len() + released.map(DeviceSet::len).sum::<usize>() >= ask.devices as usize
        })
    });
    if !enough {
        return false;
    }
    let mut class = class.clone();
    for (devices, numa) in back {
        class.release(devices, numa);
    }
    decide::judge(&class, request).is_ok() && decide::score(&class, request, &[], policy).is_some()
}

#[cfg(test)]
mod tests;
