//! Pods that wait: refused by our filter (parked in kube-scheduler, which no change of ours wakes by itself), or refused by
//! kube-scheduler's own count (which never asks us, so that we must say why). Remembers who; what to do about them is decided elsewhere.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{NodeName, PodUid, ResourceName};
use gantry_gang::protocol::Stage;

use crate::decide::{self, ForeignNodes};
use crate::pod::PodFacts;
use crate::request::Request;
use crate::snapshot::{NodeIx, Promise, Promised, Standing};

/// Parked pods remembered at most; those beyond are woken by kube-scheduler's own flush after five minutes.
const MAX_PARKED: usize = 10_000;

/// How long a pod waits for devices of a pod that is gone, before others are stopped for it: longer than it takes by far to give them back,
/// unless a process does not end.
pub(super) const AWAITED: Duration = Duration::from_secs(10);

/// How long it waits so in all, where again and again somebody else gets what is given back.
const AWAITED_IN_ALL: Duration = Duration::from_secs(60);

/// A pod that our filter refused on every node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parked {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// What it asks for.
    pub request: Arc<Request>,
    /// The snapshot it was refused on.
    pub generation: u64,
}

/// A pod of which kube-scheduler's own count found too few devices everywhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Short {
    /// The pod.
    pub pod: PodUid,
    /// The resources it lacks.
    pub resources: Vec<ResourceName>,
}

#[derive(Debug, Default)]
pub(super) struct Waiting {
    parked: HashMap<PodUid, Parked>,
    short: HashMap<PodUid, Short>,
    /// Members of gangs that a gate of ours alone keeps from kube-scheduler.
    gated: BTreeSet<PodUid>,
    /// Pods that wait for devices to be given back, rather than that others be stopped for them, and since when.
    awaiting: HashMap<PodUid, Instant>,
    /// Pods by themselves for which kube-scheduler makes room, and where; and until when that counts though it has taken it back.
    nominated: HashMap<PodUid, (NodeName, Option<Instant>)>,
    /// Where it does so no longer for some pod.
    denominated: Vec<NodeName>,
    /// It does so for others than the snapshot shows.
    promised: bool,
    gained: Gained,
    /// The snapshot that shows the newest gain.
    gained_at: u64,
    gain_unpublished: bool,
}

/// Where devices came free while pods were parked.
#[derive(Debug, Default)]
struct Gained {
    nodes: HashSet<NodeIx>,
    /// It may have been anywhere.
    anywhere: bool,
}

impl Gained {
    fn is_empty(&self) -> bool {
        !self.anywhere && self.nodes.is_empty()
    }
}

impl Waiting {
    /// A pod as it is now, and whether it goes by itself.
    pub(super) fn observe(&mut self, now: Instant, pod: &PodFacts, by_itself: bool) {
        if pod.node.is_none() && !pod.insufficient.is_empty() {
            let short = Short {
                pod: pod.uid.clone(),
                resources: pod.insufficient.clone(),
            };
            self.short.insert(pod.uid.clone(), short);
        } else {
            self.short.remove(&pod.uid);
        }
        if pod.claim.is_some() && is_kept_by_us(&pod.stage) {
            self.gated.insert(pod.uid.clone());
        } else {
            self.gated.remove(&pod.uid);
        }
        // The node that a member is told is its gang's word, not kube-scheduler's.
        if let Some(node) = pod.nominated.as_ref().filter(|_| by_itself) {
            let before = self.nominated.insert(pod.uid.clone(), (node.clone(), None));
            let before = before.map(|(before, _)| before);
            self.promised |= before.as_ref() != Some(node);
            self.denominated.extend(before.filter(|before| before != node));
        } else if let Some((_, until)) = self.nominated.get_mut(&pod.uid) {
            // It does so when our filter refuses the pod, which it does until the devices are given back: a moment after their pods are
            // gone.
            until.get_or_insert(now + AWAITED);
        }
    }

    /// Pods for which kube-scheduler makes room, and where.
    pub(super) fn nominated(&self) -> impl Iterator<Item = (&PodUid, &NodeName)> {
        self.nominated.iter().map(|(uid, (node, _))| (uid, node))
    }

    /// Where room is made for some pod no longer, since this was last asked.
    fn take_denominated(&mut self, now: Instant) -> Vec<NodeName> {
        let over = |until: &Option<Instant>| until.is_some_and(|until| now >= until);
        let gone = self.nominated.extract_if(|_, (_, until)| over(until));
        self.denominated.extend(gone.map(|(_, (node, _))| node));
        self.promised |= !self.denominated.is_empty();
        std::mem::take(&mut self.denominated)
    }

    /// Whether room is made for others than when this was last asked.
    pub(super) fn take_promised(&mut self) -> bool {
        std::mem::take(&mut self.promised)
    }

    pub(super) fn forget(&mut self, uid: &PodUid) {
        self.parked.remove(uid);
        self.short.remove(uid);
        self.gated.remove(uid);
        self.awaiting.remove(uid);
        let nominated = self.nominated.remove(uid);
        self.denominated.extend(nominated.map(|(node, _)| node));
    }

    /// Whether a pod is still to wait for devices that are to be given back, if there are such.
    pub(super) fn awaits(&mut self, now: Instant, uid: &PodUid, are_there: bool) -> bool {
        if !are_there {
            self.awaiting.remove(uid);
            return false;
        }
        let since = *self.awaiting.entry(uid.clone()).or_insert(now);
        now.saturating_duration_since(since) < AWAITED_IN_ALL
    }

    /// Others are stopped for a pod: for what they leave it waits anew.
    pub(super) fn has_stopped(&mut self, uid: &PodUid) {
        self.awaiting.remove(uid);
    }

    pub(super) fn park(&mut self, uid: PodUid, parked: Parked) {
        if self.parked.len() < MAX_PARKED || self.parked.contains_key(&uid) {
            self.parked.insert(uid, parked);
        }
    }

    /// The node on which room is made for a pod.
    pub(super) fn nominated_for(&self, uid: &PodUid) -> Option<&NodeName> {
        self.nominated.get(uid).map(|(node, _)| node)
    }

    pub(super) fn unpark(&mut self, uid: &PodUid) {
        self.parked.remove(uid);
    }

    pub(super) fn is_parked(&self, uid: &str) -> bool {
        self.parked.contains_key(uid)
    }

    pub(super) fn gained(&mut self, node: NodeIx) {
        // Nobody waits: nothing to remember.
        if !self.parked.is_empty() && !self.gained.anywhere {
            self.gained.nodes.insert(node);
        }
        self.gain_unpublished = true;
    }

    pub(super) fn published(&mut self, generation: u64) {
        if std::mem::take(&mut self.gain_unpublished) {
            self.gained_at = generation;
        }
    }

    pub(super) fn renumber(&mut self, renumbered: &HashMap<NodeIx, NodeIx>) {
        self.gained.nodes = self
            .gained
            .nodes
            .iter()
            .filter_map(|node| renumbered.get(node).copied())
            .collect();
    }
}

/// Whether a gate of ours alone keeps a pod from kube-scheduler.
fn is_kept_by_us(stage: &Stage) -> bool {
    *stage == Stage::Gated { by_us_alone: true }
}

impl super::Index {
    /// Room that is being made for pods by themselves, for decisions about others.
    pub(super) fn promised(&self) -> Option<Arc<Promised>> {
        let promise = |(uid, node): (&PodUid, &NodeName)| {
            let pod = self.pods.get(uid)?;
            let request = pod.request.as_ref().ok()?;
            Some(Promise {
                node: self.names.get(node.as_str())?,
                priority: pod.priority,
                request: request.of(&self.managed.managed()),
            })
        };
        Promised::new(self.waiting.nominated().filter_map(promise).collect())
    }

    /// Whether room is made for some pod no longer. Others that were kept off for it are worth another look.
    pub(super) fn promises_end(&mut self) -> bool {
        let nodes = self.waiting.take_denominated(self.now.at);
        for node in nodes.iter().filter_map(|node| self.names.get(node.as_str())) {
            self.waiting.gained(node);
        }
        !nodes.is_empty()
    }

    /// A pod was refused on every node by the snapshot of `parked.generation`.
    pub fn park(&mut self, uid: PodUid, parked: Parked) {
        let gained_since = parked.generation < self.waiting.gained_at;
        self.waiting.park(uid, parked);
        if gained_since {
            // It was decided on a snapshot that was outdated before the answer was out: look at every node.
            self.waiting.gained.anywhere = true;
        }
    }

    /// Parks a pod again whose wake failed, as one that has seen all gains so far; its new generation. `None` if the pod is gone or bound:
    /// then there is nothing to wake.
    pub fn repark(&mut self, uid: PodUid, mut parked: Parked) -> Option<u64> {
        let waits = self.pods.get(&uid).is_some_and(|pod| pod.node.is_none());
        if !waits || self.waiting.is_parked(uid.as_str()) {
            return None;
        }
        parked.generation = self.generation;
        self.waiting.park(uid, parked);
        Some(self.generation)
    }

    /// Takes a pod that [`Index::repark`] has parked, to wake it once more. `None` if it was tried or refused since, or fits nowhere now.
    pub fn retake(&mut self, uid: &PodUid, generation: u64) -> Option<Parked> {
        let parked = self.waiting.parked.get(uid)?;
        let mut nodes = (0u32..).map(NodeIx).take(self.entries.len());
        if parked.generation != generation
            || !nodes.any(|node| self.fits_beside_promised(node, self.priority_of(uid), &parked.request))
        {
            return None;
        }
        self.waiting.parked.remove(uid)
    }

    /// A pod that was parked has nodes to go to.
    pub fn unpark(&mut self, uid: &PodUid) {
        self.waiting.unpark(uid);
    }

    /// Whether a pod is parked.
    pub fn is_parked(&self, uid: &str) -> bool {
        self.waiting.is_parked(uid)
    }

    /// Whether GPUs came free while pods are parked.
    pub fn has_gains(&self) -> bool {
        !self.waiting.gained.is_empty()
    }

    /// Takes the parked pods, at most `limit`, that were refused before GPUs came free on a node that fits them now: those of the highest
    /// priority, the longest parked first. The others have their turn a moment later, or what was freed for one pod would be taken by
    /// another.
    pub fn take_wakeable(&mut self, limit: usize) -> Vec<(PodUid, Parked)> {
        let gained = std::mem::take(&mut self.waiting.gained);
        let mut hopes = Hopes::new(self, &gained);
        let mut woken: Vec<(PodUid, Parked)> = self
            .waiting
            .parked
            .iter()
            .filter(|(_, parked)| parked.generation < self.waiting.gained_at)
            .filter(|(uid, parked)| hopes.has(uid, &parked.request))
            .map(|(uid, parked)| (uid.clone(), parked.clone()))
            .collect();
        let priority = |uid: &PodUid| self.priority_of(uid);
        woken.sort_by_cached_key(|(uid, parked)| (Reverse(priority(uid)), parked.generation, uid.clone()));
        let highest = woken.first().map(|(uid, _)| priority(uid));
        let first = woken
            .iter()
            .take_while(|(uid, _)| Some(priority(uid)) == highest)
            .count();
        if woken.len() > first.min(limit) {
            // The rest has its turn when these have theirs.
            self.waiting.gained = gained;
            woken.truncate(first.min(limit));
        }
        for (uid, _) in &woken {
            self.waiting.unpark(uid);
        }
        woken
    }

    /// Pods that kube-scheduler's own count refuses.
    pub fn short(&self) -> Vec<Short> {
        self.waiting.short.values().cloned().collect()
    }

    /// Members of gangs that a gate of ours alone keeps from kube-scheduler, which so tells them nothing.
    pub fn gated(&self) -> Vec<PodUid> {
        let other_pods = self.claiming_other_pods().into_iter();
        let other_pods = other_pods.filter(|pod| is_kept_by_us(&pod.stage));
        let gated = self.waiting.gated.iter().cloned();
        gated.chain(other_pods.map(|pod| pod.uid.clone())).collect()
    }

    fn priority_of(&self, uid: &PodUid) -> i32 {
        self.pods.get(uid).map_or(0, |pod| pod.priority)
    }

    /// Whether a request fits on a node beside what is promised to pods of higher priority there.
    fn fits_beside_promised(&self, node: NodeIx, priority: i32, request: &Request) -> bool {
        let leaves = |promised: &Arc<Promised>| match self.published.standing(node) {
            Standing::Ours(class) => promised.leaves(node, class, priority, request),
            Standing::Foreign { .. } | Standing::Gone => true,
        };
        self.fits(node, request) && self.published.promised.as_ref().is_none_or(leaves)
    }

    fn fits(&self, node: NodeIx, request: &Request) -> bool {
        let Some(entry) = self.entries.get(node.0 as usize) else {
            return false;
        };
        let Some(inventory) = &entry.inventory else {
            // Its devices are not ours to count; kube-scheduler counts them.
            return self.options.foreign == ForeignNodes::Allow
                && request
                    .asks
                    .iter()
                    .all(|ask| entry.advertises(&ask.resource).unwrap_or(0) >= ask.devices);
        };
        request.asks.iter().all(|ask| {
            let Some((index, pool)) = inventory.pool(ask.resource.as_str()) else {
                return false;
            };
            let balance = entry.account.pools.get(index);
            balance.is_some_and(|balance| balance.free.len() >= ask.devices as usize)
                && decide::too_many(pool.max_request, ask).is_none()
        })
    }
}

/// Which parked pods have somewhere to go now. Thousands of them ask for the same at the same priority: each such pair is looked at once.
struct Hopes<'a> {
    index: &'a super::Index,
    nodes: Vec<NodeIx>,
    fits: HashMap<(i32, &'a Request), bool>,
}

impl<'a> Hopes<'a> {
    fn new(index: &'a super::Index, gained: &Gained) -> Self {
        let nodes: Vec<NodeIx> = match gained.anywhere {
            true => (0u32..).map(NodeIx).take(index.entries.len()).collect(),
            false => gained.nodes.iter().copied().collect(),
        };
        Self {
            index,
            nodes,
            fits: HashMap::new(),
        }
    }

    fn has(&mut self, uid: &PodUid, request: &'a Request) -> bool {
        let Self { index, nodes, fits } = self;
        let priority = index.priority_of(uid);
        *fits.entry((priority, request)).or_insert_with(|| {
            let mut nodes = nodes.iter();
            nodes.any(|node| index.fits_beside_promised(*node, priority, request))
        })
    }
}
