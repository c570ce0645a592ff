//! The account of one node's devices: intent (grants, binds in flight) united with truth (what kubelet and the plugin report).
//! A device is free only if it is healthy and nobody at all may hold it. Pure: the same facts in any order give the same account.

use gantry_api::{DeviceId, Grant, NodeName, PodUid, ResourceName};

use crate::devices::DeviceSet;
use crate::inventory::{Inventory, Pool};
use crate::pod::PodFacts;
use crate::site::Site;

/// Devices set aside for a bind whose pod does not show them yet. By resource, so that it survives a change of inventory.
pub(crate) type Devices = Vec<(ResourceName, Vec<DeviceId>)>;

/// Who holds what on a node, and what is left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Account {
    /// By pool.
    pub pools: Vec<Balance>,
    /// What each live pod holds by pool, in bind order.
    pub pods: Vec<(PodUid, Vec<DeviceSet>)>,
    /// What is wrong, sorted by pod.
    pub faults: Vec<Fault>,
}

/// One pool's devices by what keeps them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Balance {
    /// Live pods.
    pub held: DeviceSet,
    /// Binds in flight, and places kept for gangs.
    pub reserved: DeviceSet,
    /// Pods that are gone, whose processes perhaps are not.
    pub leaving: DeviceSet,
    /// Nobody, and healthy.
    pub free: DeviceSet,
}

/// An intent that cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Fault {
    /// The pod.
    pub pod: PodUid,
    /// What is wrong.
    pub kind: FaultKind,
    /// The same in words.
    pub words: String,
}

/// What can be wrong with an intent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultKind {
    /// The annotation is not a grant for this pod on this node: somebody wrote, copied or changed it.
    Void,
    /// It names devices that the node does not have.
    UnknownDevices,
    /// It gives another number of devices than the pod asks for.
    Size,
    /// Another pod holds some of its devices: an older grant, or by kubelet's word.
    Displaced,
}

/// Works out the account of a node.
///
/// `pods` are the live pods bound to it, in bind order (see [`PodFacts::order`]); `reserved` the binds in flight and the
/// places kept for gangs; `leaving` what pods held that went without their end being seen.
///
/// 1. What kubelet reports is true. A pod it reports in full, by UID, holds exactly that: its grant is spent, however the sets
///    went round among pods (two pods that got each other's sets are swapped by this).
/// 2. A pod it reports in part, or by name only, holds that and its grant.
/// 3. Where grants overlap, or kubelet gave a granted device to another pod, the older grant and kubelet win. The loser is held to
///    take as many others, the best that are free: what the plugin would choose for it.
/// 4. So does a pod without a grant that may be followed. Thus every live pod counts for as many devices as it asks for.
/// 5. While the plugin does not serve, nothing is free.
pub(crate) fn settle(
    node: &NodeName,
    inventory: &Inventory,
    pods: &[&PodFacts],
    reserved: &[&Devices],
    leaving: &[&Devices],
) -> Account {
    let pools = inventory.pools.len();
    let mut account = Account {
        pools: vec![Balance::default(); pools],
        pods: pods
            .iter()
            .map(|pod| (pod.uid.clone(), vec![DeviceSet::EMPTY; pools]))
            .collect(),
        faults: Vec::new(),
    };
    let truths = Truths::collect(inventory, pods);
    for (index, pool) in inventory.pools.iter().enumerate() {
        let claims = claims(node, (index, pool), pods, &truths, &mut account.faults);
        let balance = &mut account.pools[index];
        balance.reserved = sets(pool, reserved);
        balance.leaving = &sets(pool, leaving) | &truths.leaving[index];
        settle_pool(
            pool.site(&inventory.kind),
            (index, pool),
            pods,
            &claims,
            &truths,
            balance,
            &mut account.pods,
            &mut account.faults,
        );
        if inventory.not_ready.is_some() {
            account.pools[index].free = DeviceSet::EMPTY;
        }
    }
    account.faults.sort_unstable();
    account
}

fn sets(pool: &Pool, sets: &[&Devices]) -> DeviceSet {
    let mut all = DeviceSet::EMPTY;
    for (resource, devices) in sets.iter().flat_map(|set| set.iter()) {
        all.add(&pool.taken(resource, devices));
    }
    all
}

/// What kubelet and the plugin report, sorted out among the live pods.
struct Truths {
    /// By pod, then pool.
    pods: Vec<Vec<Truth>>,
    /// By pool: held by somebody who is no live pod.
    leaving: Vec<DeviceSet>,
}

#[derive(Debug, Clone, Default)]
struct Truth {
    /// The plugin's word, by UID.
    by_uid: DeviceSet,
    /// The plugin's word by name only, or the pod's own status. A name may still be that of a pod before this one.
    besides: DeviceSet,
}

impl Truth {
    /// Whether kubelet reports all that a pod asks for, by UID, and nothing else is said of it.
    fn is_complete(&self, asked: usize) -> bool {
        self.by_uid.len() >= asked && self.besides.is_subset(&self.by_uid)
    }
}

impl Truths {
    fn collect(inventory: &Inventory, pods: &[&PodFacts]) -> Self {
        let pools = inventory.pools.len();
        let mut truths = Self {
            pods: vec![vec![Truth::default(); pools]; pods.len()],
            leaving: vec![DeviceSet::EMPTY; pools],
        };
        for held in &inventory.holders {
            let holder = pods.iter().position(|pod| match &held.uid {
                Some(uid) => pod.uid == *uid,
                None => *pod.namespace == *held.namespace && *pod.name == *held.pod,
            });
            match holder {
                Some(pod) if !held.quarantined => {
                    let truth = &mut truths.pods[pod][held.pool];
                    if held.uid.is_some() {
                        truth.by_uid.add(&held.devices);
                    } else {
                        truth.besides.add(&held.devices);
                    }
                }
                _ => truths.leaving[held.pool].add(&held.devices),
            }
        }
        for (pod, truth) in pods.iter().zip(&mut truths.pods) {
            for (pool, truth) in inventory.pools.iter().zip(truth) {
                let reported = pod
                    .allocated
                    .iter()
                    .filter(|(resource, _)| *resource == pool.resource)
                    .map(|(_, device)| device);
                truth.besides.add(&pool.find(reported).0);
            }
        }
        truths
    }
}

fn asked_of(pod: &PodFacts, pool: &Pool) -> usize {
    usize::try_from(pod.devices(pool.resource.as_str())).unwrap_or(usize::MAX)
}

/// What each pod's grant gives it of a pool, if the grant may be followed; what is wrong otherwise. Grants that are spent are not read:
/// those of most pods, on every change of their node.
fn claims(
    node: &NodeName,
    (index, pool): (usize, &Pool),
    pods: &[&PodFacts],
    truths: &Truths,
    faults: &mut Vec<Fault>,
) -> Vec<Option<DeviceSet>> {
    let mut claim = |number: usize, pod: &PodFacts| {
        let text = pod.grant.as_deref()?;
        let asked = asked_of(pod, pool);
        if truths.pods[number][index].is_complete(asked) {
            return None;
        }
        let mut fault = |kind, words: String| {
            let fault = Fault {
                pod: pod.uid.clone(),
                kind,
                words: format!("pod {}/{}: {words}", pod.namespace, pod.name),
            };
            if !faults.contains(&fault) {
                faults.push(fault);
            }
        };
        let grant = match Grant::parse(text, &pod.uid, node) {
            Ok(grant) => grant,
            Err(error) => {
                fault(FaultKind::Void, error.to_string());
                return None;
            }
        };
        if !grant.resources().contains(&pool.resource) {
            return None;
        }
        let devices = grant.held(pool.resource.as_str());
        if devices.len() != asked {
            fault(
                FaultKind::Size,
                format!(
                    "grant gives {} of {}, {asked} are asked for",
                    devices.len(),
                    pool.resource
                ),
            );
            return None;
        }
        let (devices, unknown) = pool.find(&devices);
        if unknown > 0 {
            fault(
                FaultKind::UnknownDevices,
                format!(
                    "grant names {unknown} devices of {} that the node does not have",
                    pool.resource
                ),
            );
        }
        Some(devices)
    };
    let numbered = pods.iter().enumerate();
    numbered.map(|(number, pod)| claim(number, pod)).collect()
}

#[expect(
    clippy::too_many_arguments,
    reason = "one pool's view of what settle() has collected"
)]
fn settle_pool(
    site: Site<'_>,
    (index, pool): (usize, &Pool),
    pods: &[&PodFacts],
    claims: &[Option<DeviceSet>],
    truths: &Truths,
    balance: &mut Balance,
    held: &mut [(PodUid, Vec<DeviceSet>)],
    faults: &mut Vec<Fault>,
) {
    let truth = |pod: usize| &truths.pods[pod][index];
    let known = |pod: usize| &truth(pod).by_uid | &truth(pod).besides;
    let mut all_true = DeviceSet::EMPTY;
    (0..pods.len()).for_each(|pod| all_true.add(&known(pod)));
    let mut missing = Vec::new();
    let mut granted = DeviceSet::EMPTY;
    for (pod, facts) in pods.iter().enumerate() {
        let asked = asked_of(facts, pool);
        let mut holds = known(pod);
        if let Some(claim) = &claims[pod] {
            let others = &(&all_true - &holds) | &granted;
            let lost = claim & &others;
            if !lost.is_empty() {
                faults.push(Fault {
                    pod: facts.uid.clone(),
                    kind: FaultKind::Displaced,
                    words: format!(
                        "pod {}/{}: {} of its grant is another pod's",
                        facts.namespace,
                        facts.name,
                        pool.describe(&lost)
                    ),
                });
            }
            holds.add(&(claim - &others));
        }
        granted.add(&holds);
        if holds.len() < asked {
            missing.push((pod, asked - holds.len()));
        }
        held[pod].1[index] = holds;
    }
    let mut free = pool.healthy.clone();
    for taken in [&granted, &balance.reserved, &balance.leaving] {
        free.remove(taken);
    }
    for (pod, count) in missing {
        // Fewer may be left than it lacks: then it lacks them on the node, too.
        let expected = site.best(&free, count.min(free.len())).unwrap_or_default();
        held[pod].1[index].add(&expected);
        granted.add(&expected);
        free.remove(&expected);
    }
    balance.held = granted;
    balance.free = free;
}

#[cfg(test)]
mod tests;
