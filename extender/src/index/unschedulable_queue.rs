//! Pods that wait for devices: refused by filter on every node, or by kube-scheduler's own count before it calls an
//! extender. kube-scheduler retries a refused pod on events that it can observe; a device that comes free late is not
//! one of them, so pods have to be activated. This type remembers the pods and where devices came free; which of them
//! fit is decided elsewhere.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{NodeName, PodUid, ResourceName};
use gantry_gang::protocol::Stage;

use super::node_table::Renumbering;
use crate::pod::PodFacts;
use gantry_planner::request::Request;
use gantry_planner::snapshot::NodeIx;

/// Unschedulable pods remembered at most; kube-scheduler's own flush retries the others after five minutes. Once there
/// are as many, the namespace with most of them gives way.
const MAX_PODS: usize = 10_000;

/// How long a pod waits for devices of a deleted pod before others are stopped for it: much longer than it takes to
/// release them, unless a process does not end.
pub(super) const AWAITED: Duration = Duration::from_secs(10);

/// The same in total, where other pods get the released devices again and again.
const AWAITED_IN_ALL: Duration = Duration::from_secs(60);

/// A pod that filter refused on every node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnschedulablePod {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// What it asks for.
    pub request: Arc<Request>,
    /// The snapshot that the refusal is based on.
    pub generation: u64,
}

/// A pod for which kube-scheduler's own count finds too few devices on every node. No extender is called for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InsufficientPod {
    /// The pod.
    pub pod: PodUid,
    /// The resources that are insufficient.
    pub resources: Vec<ResourceName>,
}

/// Pods that wait for devices, and where devices came free meanwhile.
#[derive(Debug, Default)]
pub(super) struct UnschedulableQueue {
    pods: HashMap<PodUid, UnschedulablePod>,
    /// How many of them each namespace has.
    by_namespace: BTreeMap<Arc<str>, usize>,
    insufficient: HashMap<PodUid, InsufficientPod>,
    /// Members of gangs that only a scheduling gate of Gantry keeps from kube-scheduler.
    gated: BTreeSet<PodUid>,
    /// Pods that wait for devices to be released instead of having others stopped, and since when.
    awaiting: HashMap<PodUid, Instant>,
    /// Nodes that kube-scheduler nominated for single pods.
    nominated: HashMap<PodUid, Nomination>,
    /// Nodes with a nomination less than before.
    denominated: Vec<NodeName>,
    /// The nominations differ from those of the snapshot.
    nominations_changed: bool,
    gains: Gains,
    /// The snapshot that shows the newest gain.
    gained_at: u64,
    gain_unpublished: bool,
}

/// A node that kube-scheduler nominated, and until when that counts although it was withdrawn.
#[derive(Debug)]
struct Nomination {
    node: NodeName,
    until: Option<Instant>,
}

/// Where devices came free while pods were unschedulable.
#[derive(Debug, Default)]
pub(super) struct Gains {
    nodes: HashSet<NodeIx>,
    /// It may have been on any node.
    anywhere: bool,
}

impl Gains {
    fn is_empty(&self) -> bool {
        !self.anywhere && self.nodes.is_empty()
    }

    /// The nodes; `None` if it may have been any.
    pub(super) fn nodes(&self) -> Option<&HashSet<NodeIx>> {
        (!self.anywhere).then_some(&self.nodes)
    }
}

impl UnschedulableQueue {
    /// The pod as it is now. `is_single`: it is scheduled by itself, not with a gang.
    pub(super) fn observe(&mut self, now: Instant, pod: &PodFacts, is_single: bool) {
        if pod.node.is_none() && !pod.insufficient.is_empty() {
            let insufficient = InsufficientPod { pod: pod.uid.clone(), resources: pod.insufficient.clone() };
            self.insufficient.insert(pod.uid.clone(), insufficient);
        } else {
            self.insufficient.remove(&pod.uid);
        }
        if pod.membership.is_some() && is_gated_by_us(&pod.stage) {
            self.gated.insert(pod.uid.clone());
        } else {
            self.gated.remove(&pod.uid);
        }
        // The node that a member of a gang is nominated for comes from its gang, not from kube-scheduler.
        if let Some(node) = pod.nominated.as_ref().filter(|_| is_single) {
            let node = node.clone();
            let before = self.nominated.insert(pod.uid.clone(), Nomination { node, until: None });
            let before = before.map(|before| before.node);
            self.nominations_changed |= before.as_ref() != pod.nominated.as_ref();
            self.denominated.extend(before.filter(|before| pod.nominated.as_ref() != Some(before)));
        } else if let Some(nomination) = self.nominated.get_mut(&pod.uid) {
            // kube-scheduler withdraws it when filter refuses the pod, which lasts until the devices are released: a
            // moment after their pods are gone.
            nomination.until.get_or_insert(now + AWAITED);
        }
    }

    /// The pod is bound, gone or not for a scheduler that calls this extender.
    pub(super) fn forget(&mut self, uid: &PodUid) {
        self.remove(uid);
        self.insufficient.remove(uid);
        self.gated.remove(uid);
        self.awaiting.remove(uid);
        let nominated = self.nominated.remove(uid);
        self.denominated.extend(nominated.map(|nominated| nominated.node));
    }

    /// The pods that kube-scheduler nominated a node for, and the nodes.
    pub(super) fn nominated(&self) -> impl Iterator<Item = (&PodUid, &NodeName)> {
        self.nominated.iter().map(|(uid, nomination)| (uid, &nomination.node))
    }

    /// The node that kube-scheduler nominated for a pod.
    pub(super) fn nominated_for(&self, uid: &PodUid) -> Option<&NodeName> {
        self.nominated.get(uid).map(|nomination| &nomination.node)
    }

    /// Nodes that lost a nomination since this was last called.
    pub(super) fn take_denominated(&mut self, now: Instant) -> Vec<NodeName> {
        let over = |until: &Option<Instant>| until.is_some_and(|until| now >= until);
        let gone = self.nominated.extract_if(|_, nomination| over(&nomination.until));
        self.denominated.extend(gone.map(|(_, nomination)| nomination.node));
        self.nominations_changed |= !self.denominated.is_empty();
        std::mem::take(&mut self.denominated)
    }

    /// Whether nominations changed since this was last called.
    pub(super) fn take_nominations_changed(&mut self) -> bool {
        std::mem::take(&mut self.nominations_changed)
    }

    /// Whether a pod still waits for devices that are being released, if there `are` such.
    pub(super) fn awaits(&mut self, now: Instant, uid: &PodUid, are: bool) -> bool {
        if !are {
            self.awaiting.remove(uid);
            return false;
        }
        let since = *self.awaiting.entry(uid.clone()).or_insert(now);
        now.saturating_duration_since(since) < AWAITED_IN_ALL
    }

    /// Pods are stopped for this one: it waits again for the devices that they leave.
    pub(super) fn has_victims(&mut self, uid: &PodUid) {
        self.awaiting.remove(uid);
    }

    /// Adds a pod that filter refused on every node.
    pub(super) fn add(&mut self, uid: PodUid, pod: UnschedulablePod) {
        let is_outdated = pod.generation < self.gained_at;
        self.insert(uid, pod);
        // The snapshot was outdated before the answer was sent: devices may have come free on any node since.
        self.gains.anywhere |= is_outdated;
    }

    /// Adds a pod again after its activation failed, as one that every gain so far is known for. False if it was added
    /// meanwhile.
    pub(super) fn requeue(&mut self, uid: PodUid, pod: UnschedulablePod) -> bool {
        let is_new = !self.contains(uid.as_str());
        if is_new {
            self.insert(uid, pod);
        }
        is_new
    }

    fn insert(&mut self, uid: PodUid, pod: UnschedulablePod) {
        self.remove(&uid);
        if self.pods.len() >= MAX_PODS && !self.make_way(&pod.namespace) {
            return;
        }
        *self.by_namespace.entry(Arc::clone(&pod.namespace)).or_default() += 1;
        self.pods.insert(uid, pod);
    }

    /// Drops the pod that was refused last of the namespace with most pods. False if that is `namespace`.
    fn make_way(&mut self, namespace: &Arc<str>) -> bool {
        let Some((most, _)) = self.by_namespace.iter().max_by_key(|(_, pods)| **pods) else {
            return false;
        };
        if most == namespace {
            return false;
        }
        let of_most = self.pods.iter().filter(|(_, pod)| pod.namespace == *most);
        let last = of_most.max_by_key(|(uid, pod)| (pod.generation, *uid)).map(|(uid, _)| uid.clone());
        last.is_some_and(|last| self.remove(&last).is_some())
    }

    pub(super) fn get(&self, uid: &PodUid) -> Option<&UnschedulablePod> {
        self.pods.get(uid)
    }

    pub(super) fn contains(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    pub(super) fn remove(&mut self, uid: &PodUid) -> Option<UnschedulablePod> {
        let pod = self.pods.remove(uid)?;
        if let Some(pods) = self.by_namespace.get_mut(&pod.namespace) {
            *pods -= 1;
            if *pods == 0 {
                self.by_namespace.remove(&pod.namespace);
            }
        }
        Some(pod)
    }

    /// Devices came free on a node.
    pub(super) fn gained(&mut self, node: NodeIx) {
        if !self.pods.is_empty() && !self.gains.anywhere {
            self.gains.nodes.insert(node);
        }
        self.gain_unpublished = true;
    }

    /// Whether devices came free while pods were unschedulable.
    pub(super) fn has_gains(&self) -> bool {
        !self.gains.is_empty()
    }

    pub(super) fn take_gains(&mut self) -> Gains {
        std::mem::take(&mut self.gains)
    }

    /// A snapshot was published.
    pub(super) fn published(&mut self, generation: u64) {
        if std::mem::take(&mut self.gain_unpublished) {
            self.gained_at = generation;
        }
    }

    /// Pods that were refused before the newest gain.
    pub(super) fn refused_before_gain(&self) -> impl Iterator<Item = (&PodUid, &UnschedulablePod)> {
        let gained_at = self.gained_at;
        self.pods.iter().filter(move |(_, pod)| pod.generation < gained_at)
    }

    /// Takes the pods of the highest priority, at most `limit`, the longest waiting first. The others have their turn a
    /// moment later, or they would take what came free for these; `gains` are kept for them.
    pub(super) fn take_first(
        &mut self,
        mut fitting: Vec<(i32, PodUid)>,
        limit: usize,
        gains: Gains,
    ) -> Vec<(PodUid, UnschedulablePod)> {
        let generation = |uid: &PodUid| self.get(uid).map(|pod| pod.generation);
        fitting.sort_by_cached_key(|(priority, uid)| (Reverse(*priority), generation(uid), uid.clone()));
        let highest = fitting.first().map(|(priority, _)| *priority);
        let of_highest = fitting.iter().filter(|(priority, _)| Some(*priority) == highest);
        let first = of_highest.count().min(limit);
        if fitting.len() > first {
            self.gains = gains;
        }
        let first = fitting.into_iter().take(first);
        first
            .filter_map(|(_, uid)| {
                let pod = self.remove(&uid)?;
                Some((uid, pod))
            })
            .collect()
    }

    /// Pods that filter refused on every node.
    pub(super) fn refused(&self) -> impl Iterator<Item = (&PodUid, &UnschedulablePod)> {
        self.pods.iter()
    }

    /// Pods for which kube-scheduler's own count finds too few devices.
    pub(super) fn insufficient(&self) -> Vec<InsufficientPod> {
        self.insufficient.values().cloned().collect()
    }

    /// Members of gangs that only a scheduling gate of Gantry keeps from kube-scheduler.
    pub(super) fn gated(&self) -> impl Iterator<Item = &PodUid> {
        self.gated.iter()
    }

    /// Nodes have new numbers.
    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        let nodes = self.gains.nodes.iter();
        self.gains.nodes = nodes.filter_map(|node| renumbering.get(node).copied()).collect();
    }
}

/// Whether only a scheduling gate of Gantry keeps a pod from kube-scheduler.
pub(super) fn is_gated_by_us(stage: &Stage) -> bool {
    *stage == Stage::Gated { by: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(namespace: &str) -> UnschedulablePod {
        UnschedulablePod {
            namespace: namespace.into(),
            name: "p".into(),
            request: Arc::default(),
            generation: 1,
        }
    }

    #[test]
    fn full_queue_has_room_for_other_namespaces() {
        let mut queue = UnschedulableQueue::default();
        for number in 0..MAX_PODS + 10 {
            queue.add(format!("many-{number:05}").into(), pod("many"));
        }
        for number in 0..100 {
            queue.add(format!("few-{number}").into(), pod("few"));
        }
        assert_eq!(queue.pods.len(), MAX_PODS);
        assert!((0..100).all(|number| queue.contains(&format!("few-{number}"))));
        assert!(queue.contains("many-00000"), "the last that were refused give way");
        assert_eq!(queue.by_namespace.values().sum::<usize>(), MAX_PODS);
        queue.forget(&"few-0".into());
        queue.add("many-x".into(), pod("many"));
        assert!(queue.contains("many-x"));
    }
}
