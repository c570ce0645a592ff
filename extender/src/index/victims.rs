//! kube-scheduler's preemption for a single pod: which of the nodes that it offers really have the devices once the victims are gone, and
//! whom else that takes. Gangs are never broken for one pod where another node will do. Nothing is changed here.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use gantry_api::PodUid;

use super::Index;
use super::waiting::AWAITED;
use crate::decide;
use crate::devices::DeviceSet;
use crate::inventory::Pool;
use crate::pod::PodFacts;
use crate::request::Request;
use crate::snapshot::{Class, NodeIx};
use crate::wire::Offer;

impl Index {
    /// Of the nodes that kube-scheduler offers for a pod of a priority those that help, each with its victims: those that were named, and
    /// others of lower priority if the devices want it, against as few disruption budgets as will do. A member of a gang is helped by
    /// nobody here: gangs are preempted for as a whole. Nor is a pod for which others have gone already, while their devices are not given
    /// back.
    pub fn preemptable(
        &mut self,
        uid: &PodUid,
        request: &Request,
        priority: i32,
        offers: Vec<Offer>,
    ) -> Vec<Offer> {
        if self.goes_with(uid).is_some() {
            return Vec::new();
        }
        let awaited = self.comes_free(uid, request, priority);
        let now = self.now().at;
        if self.waiting.awaits(now, uid, awaited) {
            return Vec::new();
        }
        let mut found: Vec<(usize, Offer)> = offers
            .into_iter()
            .filter_map(|offer| self.victims_on(request, priority, offer))
            .collect();
        // Fewest budgets broken, as kube-scheduler would choose; then fewest gangs, which it cannot know.
        let cost = |(gangs, offer): &(usize, Offer)| (offer.budgets_broken, *gangs);
        let least = found.iter().map(cost).min();
        found.retain(|one| Some(cost(one)) == least);
        if !found.is_empty() {
            self.waiting.has_stopped(uid);
        }
        found.into_iter().map(|(_, offer)| offer).collect()
    }

    /// Whether a node that takes the pod has enough devices once those that are gone have given theirs back. kube-scheduler no longer sees
    /// such pods: to it the devices are free, and as our filter still refuses them it would have others stopped, node after node. Each time
    /// the room made on the node before would be anybody's, for it nominates one node only. On that node the pods count too that are on
    /// their way out: as it asks, it no longer sees them, and will only have been told sooner.
    fn comes_free(&self, uid: &PodUid, request: &Request, priority: i32) -> bool {
        let Some(pod) = self.pods.get(uid) else {
            return false;
        };
        let now = self.now().at;
        let nominated = self.waiting.nominated_for(uid);
        (0..).zip(&self.entries).any(|(ix, entry)| {
            let Some(inventory) = &entry.inventory else {
                return false;
            };
            let returning = entry.returning(|since| now.saturating_duration_since(since) < AWAITED);
            let pools = inventory.pools.iter().zip(&returning);
            let mut leaving: Vec<DeviceSet> = pools.map(|(pool, ids)| pool.find(ids).0).collect();
            if nominated == Some(&entry.name) {
                leaving = self.with_leaving(NodeIx(ix), leaving);
            }
            if leaving.iter().all(DeviceSet::is_empty) || self.is_kept_from(NodeIx(ix), priority) {
                return false;
            }
            let facts = self.rooms().get(ix as usize).and_then(|room| room.facts.as_ref());
            facts.is_none_or(|facts| pod.needs.admits(facts).is_ok())
                && entry
                    .exact(&[])
                    .is_some_and(|class| fits_without(&class, request, &[&leaving], self.options.policy))
        })
    }

    /// What pods that are gone give back on a node, by pool, and what those give back that are on their way out.
    fn with_leaving(&self, node: NodeIx, returning: Vec<DeviceSet>) -> Vec<DeviceSet> {
        let there = self.entries.get(node.0 as usize).into_iter();
        let pods = there
            .flat_map(|entry| &entry.pods)
            .filter_map(|uid| self.pods.get(uid));
        let leaving = pods.filter(|pod| pod.leaving);
        leaving
            .filter_map(|pod| self.given_back(pod, node))
            .fold(returning, |returning, mut own| {
                own.iter_mut().zip(&returning).for_each(|(own, set)| own.add(set));
                own
            })
    }

    /// What a pod's end gives back on its node, by pool: not what is kept for gangs, which is theirs then, nor what is sick.
    fn given_back(&self, pod: &PodFacts, node: NodeIx) -> Option<Vec<DeviceSet>> {
        let devices = self.devices_of(pod, node)?;
        let inventory = self.entries.get(node.0 as usize)?.inventory.as_ref()?;
        let of = |pool: &Pool| devices.iter().find(|(resource, _)| *resource == pool.resource);
        let set = |pool| of(pool).map(|(_, ids)| &pool.find(ids).0 & &pool.healthy);
        Some(
            inventory
                .pools
                .iter()
                .map(|pool| set(pool).unwrap_or_default())
                .collect(),
        )
    }

    /// Whether filter keeps pods of a priority off a node whatever is free there: it is kept for a gang.
    pub(super) fn is_kept_from(&self, node: NodeIx, priority: i32) -> bool {
        let kept = self.kept();
        kept.is_some_and(|kept| priority <= kept.priority && kept.has(node))
    }

    /// The victims on one node, and how many gangs they belong to; `None` if no end of pods of lower priority helps.
    fn victims_on(&self, request: &Request, priority: i32, offer: Offer) -> Option<(usize, Offer)> {
        let ix = self.names.get(&offer.node)?;
        let entry = self.entries.get(ix.0 as usize)?;
        let gangs = |victims: &[String]| {
            let broken = victims
                .iter()
                .filter_map(|uid| self.goes_with(&PodUid::from(uid.as_str())));
            broken.collect::<BTreeSet<_>>().len()
        };
        let Some(class) = entry.exact(&[]) else {
            // Of a foreign node nothing is known; kube-scheduler has counted.
            return (!offer.victims.is_empty()).then(|| (gangs(&offer.victims), offer));
        };
        if self.is_kept_from(ix, priority) {
            return None;
        }
        let held = |uid: &String| self.given_back(self.pods.get(uid.as_str())?, ix);
        let fits = |victims: &[String]| {
            let sets: Vec<Vec<DeviceSet>> = victims.iter().filter_map(held).collect();
            let sets: Vec<&[DeviceSet]> = sets.iter().map(Vec::as_slice).collect();
            fits_without(&class, request, &sets, self.options.policy)
        };
        let mut victims = offer.victims.clone();
        let named = victims.len();
        // kube-scheduler has counted those that it names.
        let mut with_named = self.allowance();
        for uid in &victims {
            with_named.breaks(&PodUid::from(uid.as_str()));
        }
        if !fits(&victims) {
            let mut others: Vec<&PodFacts> = entry
                .pods
                .iter()
                .filter_map(|uid| self.pods.get(uid))
                .map(|pod| &**pod)
                .filter(|pod| pod.priority < priority && !pod.leaving)
                .filter(|pod| victims.iter().all(|known| known != pod.uid.as_str()))
                .collect();
            // Single pods first, the least important, the youngest.
            others.sort_by_key(|pod| {
                let gang = self.goes_with(&pod.uid).is_some();
                (gang, pod.priority, Reverse(pod.created()), pod.uid.clone())
            });
            // But before them all whom no budget protects, given that those before it go too.
            let mut allowance = with_named.clone();
            let (protected, free): (Vec<&PodFacts>, Vec<&PodFacts>) =
                others.into_iter().partition(|pod| allowance.breaks(&pod.uid));
            for other in free.into_iter().chain(protected) {
                victims.push(other.uid.as_str().to_owned());
                if fits(&victims) {
                    break;
                }
            }
            if !fits(&victims) {
                return None;
            }
            // Whom it does not take is let off, the protected first, then the most important.
            for at in (named..victims.len()).rev() {
                let spared = victims.remove(at);
                if !fits(&victims) {
                    victims.insert(at, spared);
                }
            }
        }
        let added = victims.iter().skip(named);
        let broken = added
            .filter(|uid| with_named.breaks(&PodUid::from(uid.as_str())))
            .count();
        let budgets_broken = offer.budgets_broken.saturating_add_unsigned(broken as u64);
        // kube-scheduler takes the first one's priority for the highest of the node's, and prefers nodes by it. Those that are not known
        // stay in front, in the order in which they were named.
        victims.sort_by_key(|uid| Reverse(self.victims_priority(uid).unwrap_or(i32::MAX)));
        let offer = Offer {
            victims,
            budgets_broken,
            node: offer.node,
        };
        (!offer.victims.is_empty()).then(|| (gangs(&offer.victims), offer))
    }
}

impl Index {
    fn victims_priority(&self, uid: &str) -> Option<i32> {
        let uid = PodUid::from(uid);
        let known = self.pods.get(&uid).map(|pod| pod.priority);
        known.or_else(|| self.priority_of_other(&uid))
    }
}

/// Whether a request fits on a class once some sets, each by pool, are given back.
pub(super) fn fits_without(
    class: &Class,
    request: &Request,
    back: &[&[DeviceSet]],
    policy: decide::Policy,
) -> bool {
    let mut class = class.clone();
    for sets in back {
        for (pool, set) in class.pools.iter_mut().zip(*sets) {
            pool.free.add(set);
            pool.open.add(set);
        }
    }
    decide::judge(&class, request).is_ok() && decide::score(&class, request, &[], policy).is_some()
}

#[cfg(test)]
mod tests;
