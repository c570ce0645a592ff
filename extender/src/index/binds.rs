//! What lies between a decision and the pod that shows it: holds (prioritize has named a winner, bind has not come) and reservations
//! (bind is on its way, or done and not yet seen). Reservations take devices; holds only count in scores.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{Grant, GrantError, NodeName, PodUid};
use gantry_topology::GpuSet;

use super::entry::Entry;
use super::{HOLD, Index, UNSURE};
use crate::decide::{self, ForeignNodes};
use crate::ledger::Devices;
use crate::plan::Layout;
use crate::pod::PodFacts;
use crate::request::Request;
use crate::snapshot::{Hold, NodeIx, Standing};

/// Holds kept at most. Beyond that scores know less of what is on its way; nothing else suffers.
const MAX_HOLDS: usize = 4096;

/// A pod and the node that kube-scheduler wants it on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// UID of the pod.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The node.
    pub node: NodeName,
}

/// What a bind may write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reserved {
    /// The pod is on that node already: an earlier bind has done it.
    AlreadyBound,
    /// Nothing to grant: the pod asks for nothing of ours, or the node is not ours to account.
    Plain,
    /// This grant; its devices are set aside until [`Index::finish`].
    Grant {
        /// [`Grant::plan`].
        plan: String,
        /// The annotation.
        annotation: Arc<str>,
    },
}

/// Why a bind may not be tried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// The cache does not have the pod and nobody has said what it asks for.
    #[error("pod {0} is not known")]
    UnknownPod(PodUid),
    /// The UID belongs to another pod.
    #[error("pod UID {uid} is that of {actual}, not of {asked}")]
    OtherName {
        /// The UID.
        uid: PodUid,
        /// Namespace and name of the pod that has it.
        actual: String,
        /// Namespace and name that were asked for.
        asked: String,
    },
    /// The pod is bound to another node.
    #[error("pod is bound to node {0} already")]
    BoundElsewhere(NodeName),
    /// No such node.
    #[error("node {0} does not exist")]
    NoSuchNode(NodeName),
    /// The node publishes no inventory and that is not allowed.
    #[error("node {0} has no Gantry plugin")]
    ForeignNode(NodeName),
    /// What the pod asks for cannot be read.
    #[error("{0}")]
    Request(String),
    /// The devices are not free any more.
    #[error("node {node}: {reason}")]
    NotFree {
        /// The node.
        node: NodeName,
        /// In words of GPUs.
        reason: String,
    },
    /// The grant cannot be written.
    #[error("grant cannot be written")]
    Grant(#[source] GrantError),
}

/// What became of a Binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It exists.
    Bound,
    /// It does not and will not.
    Failed,
    /// Nobody knows.
    Unsure,
}

/// Devices set aside for one bind.
#[derive(Debug)]
pub(super) struct Reservation {
    uid: PodUid,
    plan: String,
    annotation: Arc<str>,
    pub(super) devices: Devices,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// So many calls are on their way.
    InFlight(u32),
    /// Bound at that time; the watch will show it.
    Bound(Instant),
    /// Nobody knows; given up at that time.
    Unsure(Instant),
}

/// A hold with its time limit and what it is for.
#[derive(Debug)]
struct Pending {
    until: Instant,
    request: Arc<Request>,
    layouts: Vec<Layout>,
}

/// Holds, and what names plans.
#[derive(Debug)]
pub(super) struct Binds {
    run: String,
    plans: u64,
    pending: HashMap<PodUid, Pending>,
    holds: Arc<HashMap<PodUid, Hold>>,
    /// Where each pod has reservations: one node, or several after binds of unknown outcome.
    reserved: HashMap<PodUid, Vec<NodeIx>>,
}

impl Binds {
    pub(super) fn new(run: String) -> Self {
        Self {
            run,
            plans: 0,
            pending: HashMap::new(),
            holds: Arc::default(),
            reserved: HashMap::new(),
        }
    }

    pub(super) fn holds(&self) -> Arc<HashMap<PodUid, Hold>> {
        Arc::clone(&self.holds)
    }

    /// GPUs held on a node, by pool.
    pub(super) fn held_on(&self, node: NodeIx) -> Vec<GpuSet> {
        let mut held = Vec::new();
        for hold in self.holds.values().filter(|hold| hold.node == node) {
            add(&mut held, &hold.gpus);
        }
        held
    }

    pub(super) fn drop_hold(&mut self, uid: &PodUid) -> Option<NodeIx> {
        self.pending.remove(uid)?;
        let hold = Arc::make_mut(&mut self.holds).remove(uid)?;
        Some(hold.node)
    }

    pub(super) fn expired_holds(&self, now: Instant) -> Vec<PodUid> {
        let expired = self.pending.iter().filter(|(_, pending)| pending.until <= now);
        expired.map(|(uid, _)| uid.clone()).collect()
    }

    pub(super) fn renumber(&mut self, renumbered: &HashMap<NodeIx, NodeIx>) {
        let mut holds = HashMap::new();
        for (uid, hold) in self.holds.iter() {
            if let Some(node) = renumbered.get(&hold.node) {
                let gpus = hold.gpus.clone();
                holds.insert(uid.clone(), Hold { node: *node, gpus });
            }
        }
        self.pending.retain(|uid, _| holds.contains_key(uid));
        self.holds = Arc::new(holds);
        for nodes in self.reserved.values_mut() {
            *nodes = nodes
                .iter()
                .filter_map(|node| renumbered.get(node).copied())
                .collect();
        }
    }

    /// The pod shows where it is bound: whatever was on its way has arrived or never will.
    pub(super) fn settled(&mut self, uid: &PodUid, entries: &mut [Entry], dirty: &mut Vec<NodeIx>) {
        for node in self.reserved.remove(uid).unwrap_or_default() {
            if let Some(entry) = entries.get_mut(node.0 as usize) {
                entry.reservations.retain(|reservation| reservation.uid != *uid);
                dirty.push(node);
            }
        }
    }

    /// The pod is gone. A bind that is still in flight will be refused and says so itself; any other may have been done, and the
    /// pod may have started.
    pub(super) fn deleted(
        &mut self,
        now: Instant,
        uid: &PodUid,
        entries: &mut [Entry],
        dirty: &mut Vec<NodeIx>,
    ) {
        for node in self.reserved.get(uid).cloned().unwrap_or_default() {
            let Some(entry) = entries.get_mut(node.0 as usize) else {
                continue;
            };
            let Some(position) = entry.position(uid) else {
                continue;
            };
            if !matches!(entry.reservations[position].state, State::InFlight(_)) {
                let reservation = entry.reservations.remove(position);
                entry.leaving.push((now, reservation.devices));
                self.unreserve(uid, node);
                dirty.push(node);
            }
        }
    }

    /// A list of all pods, begun at `since`, is complete: pods bound before that and not in it are gone.
    pub(super) fn listed(
        &mut self,
        now: Instant,
        since: Instant,
        seen: &HashSet<Arc<str>>,
        entries: &mut [Entry],
        dirty: &mut Vec<NodeIx>,
    ) {
        let gone: Vec<PodUid> = entries
            .iter()
            .flat_map(|entry| &entry.reservations)
            .filter(|reservation| matches!(reservation.state, State::Bound(at) if at < since))
            .filter(|reservation| !seen.contains(reservation.uid.as_str()))
            .map(|reservation| reservation.uid.clone())
            .collect();
        for uid in gone {
            self.deleted(now, &uid, entries, dirty);
        }
    }

    /// Gives up what no pod has come to show by facts of `contact`: binds of unknown outcome, and binds whose pod is gone (it went while
    /// its bind was in flight). Such a pod may have started.
    pub(super) fn expire(
        &mut self,
        now: Instant,
        contact: Instant,
        pods: &HashMap<PodUid, Arc<PodFacts>>,
        entries: &mut [Entry],
        dirty: &mut Vec<NodeIx>,
    ) {
        for (number, entry) in (0..).zip(entries) {
            let expired = entry.reservations.extract_if(.., |known| match known.state {
                State::InFlight(_) => false,
                State::Bound(at) => at + UNSURE <= contact && !pods.contains_key(&known.uid),
                State::Unsure(until) => until <= contact,
            });
            for reservation in expired {
                if matches!(reservation.state, State::Bound(_)) {
                    entry.leaving.push((now, reservation.devices));
                }
                self.unreserve(&reservation.uid, NodeIx(number));
                dirty.push(NodeIx(number));
            }
        }
    }

    fn unreserve(&mut self, uid: &PodUid, node: NodeIx) {
        if let Some(nodes) = self.reserved.get_mut(uid) {
            nodes.retain(|known| *known != node);
            if nodes.is_empty() {
                self.reserved.remove(uid);
            }
        }
    }
}

impl Entry {
    fn position(&self, uid: &PodUid) -> Option<usize> {
        self.reservations
            .iter()
            .position(|reservation| reservation.uid == *uid)
    }
}

fn add(held: &mut Vec<GpuSet>, gpus: &[GpuSet]) {
    held.resize(held.len().max(gpus.len()), GpuSet::EMPTY);
    for (held, gpus) in held.iter_mut().zip(gpus) {
        *held = *held | *gpus;
    }
}

impl Index {
    /// Holds the best GPUs of `node` for a pod that prioritize, or a filter with one survivor, has most likely sent there. Replaces an
    /// earlier hold of the pod.
    pub fn hold(&mut self, now: Instant, uid: &PodUid, request: &Arc<Request>, node: &str) {
        self.drop_hold(uid);
        let bound = self.pods.get(uid).is_some_and(|pod| pod.node.is_some());
        let Some(ix) = self.names.get(node) else {
            return;
        };
        if bound || self.binds.pending.len() >= MAX_HOLDS {
            return;
        }
        self.refresh(ix);
        let Some(layouts) = self.lay(ix, request, &[]) else {
            return;
        };
        let gpus = self.by_pool(ix, request, &layouts);
        let pending = Pending {
            until: now + HOLD,
            request: Arc::clone(request),
            layouts,
        };
        self.binds.pending.insert(uid.clone(), pending);
        let hold = Hold { node: ix, gpus };
        Arc::make_mut(&mut self.binds.holds).insert(uid.clone(), hold);
        self.dirty.push(ix);
        self.changed = true;
    }

    /// What a pod asks for, if a hold remembers it.
    pub fn held_request(&self, uid: &str) -> Option<Arc<Request>> {
        self.binds
            .pending
            .get(uid)
            .map(|pending| Arc::clone(&pending.request))
    }

    /// Sets devices aside for a bind and writes its grant. `request` is what the pod asks for where neither the cache nor a hold
    /// knows. A repeated bind of the same pod to the same node gets the same grant, so that either may succeed.
    ///
    /// # Errors
    /// See [`BindError`]; then nothing is set aside.
    pub fn reserve(&mut self, target: &Target, request: Option<Arc<Request>>) -> Result<Reserved, BindError> {
        let request = self.check_pod(target, request)?;
        let Some(request) = request else {
            return Ok(Reserved::AlreadyBound);
        };
        let Some(ix) = self.names.get(target.node.as_str()) else {
            return Err(BindError::NoSuchNode(target.node.clone()));
        };
        // The account must be of this moment: facts that came since the last snapshot count.
        self.refresh(ix);
        let Some(entry) = self
            .entries
            .get_mut(ix.0 as usize)
            .filter(|entry| entry.advertised.is_some())
        else {
            return Err(BindError::NoSuchNode(target.node.clone()));
        };
        if request.is_empty() {
            return Ok(Reserved::Plain);
        }
        let Some(inventory) = &entry.inventory else {
            return match self.options.foreign {
                ForeignNodes::Allow => Ok(Reserved::Plain),
                ForeignNodes::Refuse => Err(BindError::ForeignNode(target.node.clone())),
            };
        };
        if let Some(reason) = &inventory.not_ready {
            return Err(BindError::NotFree {
                node: target.node.clone(),
                reason: decide::plugin_not_ready(reason),
            });
        }
        if let Some(known) = entry
            .reservations
            .iter_mut()
            .find(|known| known.uid == target.uid)
        {
            let users = if let State::InFlight(users) = known.state {
                users
            } else {
                0
            };
            known.state = State::InFlight(users + 1);
            return Ok(Reserved::Grant {
                plan: known.plan.clone(),
                annotation: Arc::clone(&known.annotation),
            });
        }
        let layouts = self.layouts_for(ix, target, &request)?;
        self.binds.plans += 1;
        let plan = format!("{}-{}", self.binds.run, self.binds.plans);
        let (annotation, devices) = self.write(ix, target, &request, &layouts, &plan)?;
        if let Some(entry) = self.entries.get_mut(ix.0 as usize) {
            entry.reservations.push(Reservation {
                uid: target.uid.clone(),
                plan: plan.clone(),
                annotation: Arc::clone(&annotation),
                devices,
                state: State::InFlight(1),
            });
            self.binds
                .reserved
                .entry(target.uid.clone())
                .or_default()
                .push(ix);
        }
        self.drop_hold(&target.uid);
        self.dirty.push(ix);
        Ok(Reserved::Grant { plan, annotation })
    }

    /// Tells what became of a bind that [`Index::reserve`] gave a grant to.
    pub fn finish(&mut self, now: Instant, target: &Target, outcome: Outcome) {
        let Some(ix) = self.names.get(target.node.as_str()) else {
            return;
        };
        let Some(entry) = self.entries.get_mut(ix.0 as usize) else {
            return;
        };
        let Some(position) = entry.position(&target.uid) else {
            return;
        };
        let reservation = &mut entry.reservations[position];
        let (others, bound) = match reservation.state {
            State::InFlight(users) => (users.saturating_sub(1), false),
            State::Bound(_) => (0, true),
            State::Unsure(_) => (0, false),
        };
        match outcome {
            Outcome::Bound => reservation.state = State::Bound(now),
            _ if bound => {}
            _ if others > 0 => reservation.state = State::InFlight(others),
            Outcome::Unsure => reservation.state = State::Unsure(now + UNSURE),
            Outcome::Failed => {
                entry.reservations.remove(position);
                self.binds.unreserve(&target.uid, ix);
            }
        }
        self.dirty.push(ix);
    }

    /// Checks what is known of the pod; what it asks for, or `None` if it is on that node already.
    fn check_pod(
        &self,
        target: &Target,
        request: Option<Arc<Request>>,
    ) -> Result<Option<Arc<Request>>, BindError> {
        if let Some(pod) = self.pods.get(&target.uid) {
            if *pod.namespace != *target.namespace || *pod.name != *target.name {
                return Err(BindError::OtherName {
                    uid: target.uid.clone(),
                    actual: format!("{}/{}", pod.namespace, pod.name),
                    asked: format!("{}/{}", target.namespace, target.name),
                });
            }
            return match (&pod.node, &pod.request) {
                (Some(node), _) if *node == target.node => Ok(None),
                (Some(node), _) => Err(BindError::BoundElsewhere(node.clone())),
                (None, Ok(request)) => Ok(Some(Arc::clone(request))),
                (None, Err(error)) => Err(BindError::Request(error.to_string())),
            };
        }
        let request = request.or_else(|| self.held_request(target.uid.as_str()));
        request.map_or_else(
            || Err(BindError::UnknownPod(target.uid.clone())),
            |request| Ok(Some(request)),
        )
    }

    /// The held layouts if they are still free, or else the best that is.
    fn layouts_for(&self, ix: NodeIx, target: &Target, request: &Request) -> Result<Vec<Layout>, BindError> {
        let hold = self.binds.holds.get(&target.uid).filter(|hold| hold.node == ix);
        if let (Some(hold), Some(pending)) = (hold, self.binds.pending.get(&target.uid))
            && *pending.request == *request
            && self.all_free(ix, &hold.gpus)
        {
            return Ok(pending.layouts.clone());
        }
        let own = hold.map_or(&[][..], |hold| hold.gpus.as_slice());
        self.lay(ix, request, own).ok_or_else(|| BindError::NotFree {
            node: target.node.clone(),
            reason: self.shortage(ix, request),
        })
    }

    fn all_free(&self, ix: NodeIx, gpus: &[GpuSet]) -> bool {
        let Some(entry) = self.entries.get(ix.0 as usize) else {
            return false;
        };
        gpus.iter().enumerate().all(|(pool, gpus)| {
            let balance = entry.account.pools.get(pool);
            balance.is_some_and(|balance| gpus.is_subset(balance.free))
        })
    }

    fn lay(&self, ix: NodeIx, request: &Request, own: &[GpuSet]) -> Option<Vec<Layout>> {
        let entry = self.entries.get(ix.0 as usize)?;
        match entry.standing(&self.binds.held_on(ix)) {
            Standing::Ours(class) => {
                decide::score(&class, request, own, self.options.policy).map(|(_, layouts)| layouts)
            }
            Standing::Gone | Standing::Foreign { .. } => None,
        }
    }

    fn shortage(&self, ix: NodeIx, request: &Request) -> String {
        let standing = self.entries.get(ix.0 as usize).map(|entry| entry.standing(&[]));
        let Some(Standing::Ours(class)) = standing else {
            return "no inventory".to_owned();
        };
        for ask in &request.asks {
            match class.pool(ask.resource.as_str()) {
                None => return format!("does not serve {}", ask.resource),
                Some((_, pool)) if pool.free.len() < ask.devices as usize => {
                    return decide::shortage(&class, pool, ask.devices);
                }
                Some(_) => {}
            }
        }
        "the GPUs that are free do not fit the containers".to_owned()
    }

    fn by_pool(&self, ix: NodeIx, request: &Request, layouts: &[Layout]) -> Vec<GpuSet> {
        let mut gpus = Vec::new();
        if let Some(inventory) = self
            .entries
            .get(ix.0 as usize)
            .and_then(|entry| entry.inventory.as_ref())
        {
            gpus = vec![GpuSet::EMPTY; inventory.pools.len()];
            for (ask, layout) in request.asks.iter().zip(layouts) {
                if let Some((pool, _)) = inventory.pool(ask.resource.as_str()) {
                    gpus[pool] = gpus[pool] | layout.gpus;
                }
            }
        }
        gpus
    }

    fn write(
        &self,
        ix: NodeIx,
        target: &Target,
        request: &Request,
        layouts: &[Layout],
        plan: &str,
    ) -> Result<(Arc<str>, Devices), BindError> {
        let inventory = self
            .entries
            .get(ix.0 as usize)
            .and_then(|entry| entry.inventory.as_ref());
        let mut containers = Vec::new();
        let mut devices: Devices = Vec::new();
        for (ask, layout) in request.asks.iter().zip(layouts) {
            let pool = inventory.and_then(|inventory| inventory.pool(ask.resource.as_str()));
            let grants = pool.and_then(|(_, pool)| layout.grants(ask, &pool.devices));
            let (Some((_, pool)), Some(grants)) = (pool, grants) else {
                return Err(BindError::NoSuchNode(target.node.clone()));
            };
            containers.extend(grants);
            let ids = layout
                .gpus
                .iter()
                .filter_map(|gpu| pool.devices.get(gpu).cloned().flatten());
            devices.push((ask.resource.clone(), ids.collect()));
        }
        // The plugin follows kubelet's order: all init containers before all app containers, whatever the resource.
        if request.asks.len() > 1 {
            containers.sort_by_key(|grant| request.order.iter().position(|name| **name == *grant.name));
        }
        let grant = Grant {
            version: Grant::VERSION,
            plan: plan.to_owned(),
            pod: target.uid.clone(),
            node: target.node.clone(),
            containers,
        };
        let annotation = grant.to_annotation().map_err(BindError::Grant)?;
        Ok((annotation.into(), devices))
    }
}
