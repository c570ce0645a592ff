//! The ledger of one node's devices: intent (grants, binds in flight) united with truth (what kubelet and the plugin
//! report). A device is free only if it is healthy and no pod can hold it. Pure: the same facts in any order give the
//! same ledger.

use gantry_api::{DeviceId, Grant, NodeName, PodUid, ResourceName};

use crate::pod::PodFacts;
use gantry_planner::devices::DeviceSet;
use gantry_planner::inventory::{Inventory, Pool};
use gantry_planner::site::Site;

/// Devices by resource and ID, which stay valid when the inventory changes.
pub(crate) type Devices = Vec<(ResourceName, Vec<DeviceId>)>;

/// The devices of one node: what each pod holds, and what is left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ledger {
    /// By pool.
    pub pools: Vec<PoolLedger>,
    /// What each live pod holds by pool, in bind order.
    pub pods: Vec<(PodUid, Vec<DeviceSet>)>,
    /// Intents that cannot be followed, sorted by pod.
    pub faults: Vec<Fault>,
}

/// The devices of one pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PoolLedger {
    /// Held by live pods.
    pub held: DeviceSet,
    /// Reserved for binds in flight and for gangs.
    pub reserved: DeviceSet,
    /// Of deleted pods that may still have processes.
    pub leaving: DeviceSet,
    /// Healthy, and neither held, reserved nor leaving.
    pub free: DeviceSet,
}

/// An intent that cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Fault {
    /// The pod.
    pub pod: PodUid,
    /// What is wrong.
    pub kind: FaultKind,
    /// The same as text.
    pub words: String,
}

/// Why an intent cannot be followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultKind {
    /// The annotation is not a grant for this pod on this node: another client wrote, copied or changed it.
    Void,
    /// It names devices that the node does not have.
    UnknownDevices,
    /// It gives another number of devices than the pod asks for.
    Size,
    /// Another pod holds some of its devices, by an older grant or by kubelet's report.
    Displaced,
}

impl Ledger {
    /// Computes the ledger of a node.
    ///
    /// `pods` are the live pods bound to it, in bind order (see [`PodFacts::order`]); `reserved` the devices of binds
    /// in flight and of gangs; `leaving` those of pods that disappeared before their end was observed.
    ///
    /// 1. What kubelet reports is true. A pod that is reported in full, by UID, holds exactly that and its grant is
    ///    spent, also when pods got each other's sets (this swaps them).
    /// 2. A pod that is reported in part, or by name only, holds that and its grant.
    /// 3. Where grants overlap, or kubelet gave a granted device to another pod, the older grant and kubelet win. The
    ///    loser is taken to hold as many other devices, the best that are free: the ones that the plugin would choose
    ///    for it.
    /// 4. The same applies to a pod without a valid grant. So every live pod counts for as many devices as it asks for.
    pub(crate) fn settle(
        node: &NodeName,
        inventory: &Inventory,
        pods: &[&PodFacts],
        reserved: &[&Devices],
        leaving: &[&Devices],
    ) -> Self {
        let pools = inventory.pools.len();
        let mut ledger = Self {
            pools: vec![PoolLedger::default(); pools],
            pods: pods.iter().map(|pod| (pod.uid.clone(), vec![DeviceSet::EMPTY; pools])).collect(),
            faults: Vec::new(),
        };
        let reports = Reports::collect(inventory, pods);
        for (index, pool) in inventory.pools.iter().enumerate() {
            let granted = grants(node, (index, pool), pods, &reports, &mut ledger.faults);
            let pool_ledger = &mut ledger.pools[index];
            pool_ledger.reserved = sets(pool, reserved);
            pool_ledger.leaving = &sets(pool, leaving) | &reports.leaving[index];
            settle_pool(
                pool.site(&inventory.kind),
                (index, pool),
                pods,
                &granted,
                &reports,
                pool_ledger,
                &mut ledger.pods,
                &mut ledger.faults,
            );
        }
        ledger.faults.sort_unstable();
        ledger
    }

    /// Makes nothing free: new pods get no device of the node.
    pub(crate) fn withhold(&mut self) {
        self.pools.iter_mut().for_each(|pool| pool.free = DeviceSet::EMPTY);
    }
}

fn sets(pool: &Pool, sets: &[&Devices]) -> DeviceSet {
    let mut all = DeviceSet::EMPTY;
    for (resource, devices) in sets.iter().flat_map(|set| set.iter()) {
        all.add(&pool.taken(resource, devices));
    }
    all
}

/// What kubelet and the plugin report, by live pod.
struct Reports {
    /// By pod, then pool.
    pods: Vec<Vec<Report>>,
    /// By pool: held by anything but a live pod.
    leaving: Vec<DeviceSet>,
}

#[derive(Debug, Clone, Default)]
struct Report {
    /// Reported by the plugin with the UID of the pod.
    by_uid: DeviceSet,
    /// Reported by name only, or by the pod's own status. The name may still be that of an earlier pod.
    by_name: DeviceSet,
}

impl Report {
    /// Whether kubelet reports all that a pod asks for by UID, and nothing else by name.
    fn is_complete(&self, asked: usize) -> bool {
        self.by_uid.len() >= asked && self.by_name.is_subset(&self.by_uid)
    }
}

impl Reports {
    fn collect(inventory: &Inventory, pods: &[&PodFacts]) -> Self {
        let pools = inventory.pools.len();
        let mut reports = Self {
            pods: vec![vec![Report::default(); pools]; pods.len()],
            leaving: vec![DeviceSet::EMPTY; pools],
        };
        for held in &inventory.holders {
            let holder = pods.iter().position(|pod| held.is_of(&pod.uid, &pod.namespace, &pod.name));
            match holder {
                Some(pod) if !held.quarantined => {
                    let report = &mut reports.pods[pod][held.pool];
                    if held.uid.is_some() {
                        report.by_uid.add(&held.devices);
                    } else {
                        report.by_name.add(&held.devices);
                    }
                }
                _ => reports.leaving[held.pool].add(&held.devices),
            }
        }
        for (pod, report) in pods.iter().zip(&mut reports.pods) {
            for (pool, report) in inventory.pools.iter().zip(report) {
                let reported = pod
                    .allocated
                    .iter()
                    .filter(|(resource, _)| *resource == pool.resource)
                    .map(|(_, device)| device);
                report.by_name.add(&pool.find(reported).0);
            }
        }
        reports
    }
}

fn asked_of(pod: &PodFacts, pool: &Pool) -> usize {
    usize::try_from(pod.devices(pool.resource.as_str())).unwrap_or(usize::MAX)
}

/// What the grant of each pod gives it of a pool. A grant that cannot be followed is a fault. Spent grants are not
/// read: most pods have one, and this runs on every change of the node.
fn grants(
    node: &NodeName,
    (index, pool): (usize, &Pool),
    pods: &[&PodFacts],
    reports: &Reports,
    faults: &mut Vec<Fault>,
) -> Vec<Option<DeviceSet>> {
    let mut grant_of = |number: usize, pod: &PodFacts| {
        let text = pod.grant.as_deref()?;
        let asked = asked_of(pod, pool);
        if reports.pods[number][index].is_complete(asked) {
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
                format!("grant gives {} of {}, {asked} are asked for", devices.len(), pool.resource),
            );
            return None;
        }
        let (devices, unknown) = pool.find(&devices);
        if unknown > 0 {
            fault(
                FaultKind::UnknownDevices,
                format!("grant names {unknown} devices of {} that the node does not have", pool.resource),
            );
        }
        Some(devices)
    };
    let numbered = pods.iter().enumerate();
    numbered.map(|(number, pod)| grant_of(number, pod)).collect()
}

#[expect(clippy::too_many_arguments, reason = "one pool's part of what settle() has collected")]
fn settle_pool(
    site: Site<'_>,
    (index, pool): (usize, &Pool),
    pods: &[&PodFacts],
    grants: &[Option<DeviceSet>],
    reports: &Reports,
    ledger: &mut PoolLedger,
    held: &mut [(PodUid, Vec<DeviceSet>)],
    faults: &mut Vec<Fault>,
) {
    let report = |pod: usize| &reports.pods[pod][index];
    let known = |pod: usize| &report(pod).by_uid | &report(pod).by_name;
    let mut all_reported = DeviceSet::EMPTY;
    (0..pods.len()).for_each(|pod| all_reported.add(&known(pod)));
    let mut missing = Vec::new();
    let mut granted = DeviceSet::EMPTY;
    for (pod, facts) in pods.iter().enumerate() {
        let asked = asked_of(facts, pool);
        let mut holds = known(pod);
        if let Some(grant) = &grants[pod] {
            let others = &(&all_reported - &holds) | &granted;
            let lost = grant & &others;
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
            holds.add(&(grant - &others));
        }
        granted.add(&holds);
        if holds.len() < asked {
            missing.push((pod, asked - holds.len()));
        }
        held[pod].1[index] = holds;
    }
    let mut free = pool.healthy.clone();
    for taken in [&granted, &ledger.reserved, &ledger.leaving] {
        free.remove(taken);
    }
    for (pod, count) in missing {
        // Fewer may be free than it lacks: then the node lacks them as well.
        let expected = site.best(&free, count.min(free.len())).unwrap_or_default();
        held[pod].1[index].add(&expected);
        granted.add(&expected);
        free.remove(&expected);
    }
    ledger.held = granted;
    ledger.free = free;
}

#[cfg(test)]
mod tests;
