//! The account of one node's devices: intent (grants, binds in flight) united with truth (what kubelet and the plugin report).
//! A device is free only if it is healthy and nobody at all may hold it. Pure: the same facts in any order give the same account.

use std::sync::Arc;

use gantry_api::{DeviceId, Grant, NodeName, PodUid, ResourceName};
use gantry_topology::set::GpuSet;

use crate::kind::Kind;
use crate::pod::PodFacts;

/// What a node has, as its plugin published it.
#[derive(Debug, Clone, PartialEq)]
pub struct Inventory {
    /// The kind of its machine.
    pub kind: Arc<Kind>,
    /// One per managed resource that it serves.
    pub pools: Vec<Pool>,
    /// Who holds what, by the plugin's word.
    pub holders: Vec<Held>,
    /// Devices that must not be given out, with the reason.
    pub sick: Vec<Sick>,
    /// Why the plugin does not serve, or does not know the truth, while it says so: the reason of its condition. What would be bound
    /// there now kubelet would refuse for good.
    pub not_ready: Option<Arc<str>>,
}

/// The devices of one resource: at most one per GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// The resource.
    pub resource: ResourceName,
    /// Device IDs by GPU index.
    pub devices: Vec<Option<DeviceId>>,
    /// GPUs that have a device.
    pub gpus: GpuSet,
    /// Those of them that are healthy.
    pub healthy: GpuSet,
}

/// A holder, by the plugin's word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Its UID, if the plugin knows it.
    pub uid: Option<PodUid>,
    /// Index into [`Inventory::pools`].
    pub pool: usize,
    /// The GPUs.
    pub gpus: GpuSet,
    /// The pod is gone, its processes perhaps not.
    pub quarantined: bool,
}

/// A GPU that must not be given out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Sick {
    /// Its index.
    pub gpu: u8,
    /// Why.
    pub reason: Arc<str>,
}

impl Pool {
    /// The GPUs of some devices, and how many of them the pool does not know.
    pub fn gpus_of<'a>(&self, devices: impl IntoIterator<Item = &'a DeviceId>) -> (GpuSet, usize) {
        let mut gpus = GpuSet::EMPTY;
        let mut unknown = 0;
        for device in devices {
            match self
                .devices
                .iter()
                .position(|known| known.as_ref() == Some(device))
            {
                Some(gpu) => gpus = gpus.with(gpu),
                None => unknown += 1,
            }
        }
        (gpus, unknown)
    }
}

impl Inventory {
    /// The pool of a resource.
    pub fn pool(&self, resource: &str) -> Option<(usize, &Pool)> {
        self.pools
            .iter()
            .enumerate()
            .find(|(_, pool)| pool.resource.as_str() == resource)
    }
}

/// Devices set aside for a bind whose pod does not show them yet. By resource, so that it survives a change of inventory.
pub type Devices = Vec<(ResourceName, Vec<DeviceId>)>;

/// Who holds what on a node, and what is left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    /// By pool.
    pub pools: Vec<Balance>,
    /// What each live pod holds by pool, in bind order.
    pub pods: Vec<(PodUid, Vec<GpuSet>)>,
    /// What is wrong, sorted by pod.
    pub faults: Vec<Fault>,
}

/// One pool's devices by what keeps them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Balance {
    /// Live pods.
    pub held: GpuSet,
    /// Binds in flight.
    pub reserved: GpuSet,
    /// Pods that are gone, whose processes perhaps are not.
    pub leaving: GpuSet,
    /// Nobody, and healthy.
    pub free: GpuSet,
}

/// An intent that cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
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
/// `pods` are the live pods bound to it, in bind order (see [`PodFacts::order`]); `reserved` the binds in flight; `leaving` what
/// pods held that went without their end being seen.
///
/// 1. What kubelet reports is true. A pod it reports in full, by UID, holds exactly that: its grant is spent, however the sets
///    went round among pods (two pods that got each other's sets are swapped by this).
/// 2. A pod it reports in part, or by name only, holds that and its grant.
/// 3. Where grants overlap, or kubelet gave a granted device to another pod, the older grant and kubelet win. The loser is held to
///    take as many others, the best that are free: what the plugin would choose for it.
/// 4. So does a pod without a grant that may be followed. Thus every live pod counts for as many devices as it asks for.
/// 5. While the plugin does not serve, nothing is free.
pub fn settle(
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
            .map(|pod| (pod.uid.clone(), vec![GpuSet::EMPTY; pools]))
            .collect(),
        faults: Vec::new(),
    };
    let truths = Truths::collect(inventory, pods);
    for (index, pool) in inventory.pools.iter().enumerate() {
        let claims = claims(node, pool, pods, &mut account.faults);
        let balance = &mut account.pools[index];
        balance.reserved = masks(pool, reserved);
        balance.leaving = masks(pool, leaving) | truths.leaving[index];
        settle_pool(
            &inventory.kind,
            (index, pool),
            pods,
            &claims,
            &truths,
            balance,
            &mut account.pods,
            &mut account.faults,
        );
        if inventory.not_ready.is_some() {
            account.pools[index].free = GpuSet::EMPTY;
        }
    }
    account.faults.sort_unstable();
    account
}

fn masks(pool: &Pool, sets: &[&Devices]) -> GpuSet {
    sets.iter()
        .flat_map(|set| set.iter())
        .filter(|(resource, _)| *resource == pool.resource)
        .fold(GpuSet::EMPTY, |all, (_, devices)| all | pool.gpus_of(devices).0)
}

/// What kubelet and the plugin report, sorted out among the live pods.
struct Truths {
    /// By pod, then pool.
    pods: Vec<Vec<Truth>>,
    /// By pool: held by somebody who is no live pod.
    leaving: Vec<GpuSet>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Truth {
    /// The plugin's word, by UID.
    by_uid: GpuSet,
    /// The plugin's word by name only, or the pod's own status. A name may still be that of a pod before this one.
    besides: GpuSet,
}

impl Truths {
    fn collect(inventory: &Inventory, pods: &[&PodFacts]) -> Self {
        let pools = inventory.pools.len();
        let mut truths = Self {
            pods: vec![vec![Truth::default(); pools]; pods.len()],
            leaving: vec![GpuSet::EMPTY; pools],
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
                        truth.by_uid = truth.by_uid | held.gpus;
                    } else {
                        truth.besides = truth.besides | held.gpus;
                    }
                }
                _ => truths.leaving[held.pool] = truths.leaving[held.pool] | held.gpus,
            }
        }
        for (pod, truth) in pods.iter().zip(&mut truths.pods) {
            for (pool, truth) in inventory.pools.iter().zip(truth) {
                let reported = pod
                    .allocated
                    .iter()
                    .filter(|(resource, _)| *resource == pool.resource)
                    .map(|(_, device)| device);
                truth.besides = truth.besides | pool.gpus_of(reported).0;
            }
        }
        truths
    }
}

/// What each pod's grant gives it of a pool, if the grant may be followed; what is wrong otherwise.
fn claims(node: &NodeName, pool: &Pool, pods: &[&PodFacts], faults: &mut Vec<Fault>) -> Vec<Option<GpuSet>> {
    let mut claim = |pod: &PodFacts| {
        let text = pod.grant.as_deref()?;
        let asked = usize::try_from(pod.devices(pool.resource.as_str())).unwrap_or(usize::MAX);
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
        let (gpus, unknown) = pool.gpus_of(&devices);
        if unknown > 0 {
            fault(
                FaultKind::UnknownDevices,
                format!(
                    "grant names {unknown} devices of {} that the node does not have",
                    pool.resource
                ),
            );
        }
        Some(gpus)
    };
    pods.iter().map(|pod| claim(pod)).collect()
}

#[expect(
    clippy::too_many_arguments,
    reason = "one pool's view of what settle() has collected"
)]
fn settle_pool(
    kind: &Kind,
    (index, pool): (usize, &Pool),
    pods: &[&PodFacts],
    claims: &[Option<GpuSet>],
    truths: &Truths,
    balance: &mut Balance,
    held: &mut [(PodUid, Vec<GpuSet>)],
    faults: &mut Vec<Fault>,
) {
    let truth = |pod: usize| truths.pods[pod][index];
    let known = |pod: usize| truth(pod).by_uid | truth(pod).besides;
    let all_true = (0..pods.len()).fold(GpuSet::EMPTY, |all, pod| all | known(pod));
    let mut missing = Vec::new();
    let mut granted = GpuSet::EMPTY;
    for (pod, facts) in pods.iter().enumerate() {
        let asked = usize::try_from(facts.devices(pool.resource.as_str())).unwrap_or(usize::MAX);
        let mut holds = known(pod);
        let complete = truth(pod).by_uid.len() >= asked && truth(pod).besides.is_subset(truth(pod).by_uid);
        if !complete && let Some(claim) = claims[pod] {
            let others = (all_true - known(pod)) | granted;
            if !(claim & others).is_empty() {
                faults.push(Fault {
                    pod: facts.uid.clone(),
                    kind: FaultKind::Displaced,
                    words: format!(
                        "pod {}/{}: GPU {} of its grant is another pod's",
                        facts.namespace,
                        facts.name,
                        claim & others
                    ),
                });
            }
            holds = holds | (claim - others);
        }
        granted = granted | holds;
        held[pod].1[index] = holds;
        if holds.len() < asked {
            missing.push((pod, asked - holds.len()));
        }
    }
    let taken = granted | balance.reserved | balance.leaving;
    let mut free = pool.healthy - taken;
    for (pod, count) in missing {
        // Fewer may be left than it lacks: then it lacks them on the node, too.
        let expected = kind.best(free, count.min(free.len())).unwrap_or(GpuSet::EMPTY);
        held[pod].1[index] = held[pod].1[index] | expected;
        granted = granted | expected;
        free = free - expected;
    }
    balance.held = granted;
    balance.free = free;
}

#[cfg(test)]
mod tests;
