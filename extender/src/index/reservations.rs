//! What lies between a decision and the pod that shows it. A hold begins when prioritize names a winner, and counts in
//! scores only. A reservation begins with bind, takes its devices, and ends when the pod shows the Binding or the bind
//! is known to have failed. Nothing is written to the cluster here.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::placement::{ComparedNodes, GangPlacement};
use gantry_api::{Grant, GrantError, NodeName, Placement, PodUid};
use gantry_gang::protocol::WithheldReason;

use super::holds::Holds;
use super::node::Node;
use super::node_table::{NodeTable, Renumbering};
use super::occupancy::BindReservation;
use super::pod_store::PodStore;
use crate::ledger::Devices;
use gantry_planner::decide::{self, Policy};
use gantry_planner::devices::DeviceSet;
use gantry_planner::layout::{Layout, Offer};
use gantry_planner::placement::SetTerms;
use gantry_planner::request::Request;
use gantry_planner::snapshot::{Class, Hold, NodeIx};
use gantry_topology::LinkClass;

/// A pod and the node that kube-scheduler chose for it.
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
#[derive(Debug, Clone, PartialEq)]
pub enum BindGrant {
    /// The pod is on that node already: an earlier bind has done it.
    AlreadyBound,
    /// No grant: the pod asks for no managed resource, or Gantry does not manage the node.
    Plain,
    /// This grant; its devices are reserved until [`Index::finish`](super::Index::finish).
    Grant {
        /// [`Grant::plan`].
        plan: String,
        /// The annotation.
        annotation: Arc<str>,
        /// Why this node and these devices.
        placement: Arc<Placement>,
    },
}

/// What became of a Binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It exists.
    Bound,
    /// It does not and will not exist.
    Failed,
    /// Unknown.
    Unsure,
}

/// Why a bind must not be tried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// The pod is not in the cache, and the caller does not provide what it asks for.
    #[error("pod {0} is not known")]
    UnknownPod(PodUid),
    /// The UID belongs to another pod.
    #[error("pod UID {uid} is that of {actual}, not of {asked}")]
    OtherName {
        /// The UID.
        uid: PodUid,
        /// Namespace and name of the pod that has it.
        actual: String,
        /// Namespace and name in the call.
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
    /// The gang of the pod does not allow it, for this reason.
    #[error("{0}")]
    Gang(Arc<str>),
    /// The devices are not free any more.
    #[error("node {node}: {reason}")]
    NotFree {
        /// The node.
        node: NodeName,
        /// In terms of GPUs.
        reason: String,
    },
    /// The grant cannot be written.
    #[error("grant cannot be written")]
    Grant(#[source] GrantError),
}

impl BindError {
    pub(super) fn no_such_node(target: &Target) -> Self {
        Self::NoSuchNode(target.node.clone())
    }

    pub(super) fn not_free(target: &Target, reason: impl Into<String>) -> Self {
        Self::NotFree { node: target.node.clone(), reason: reason.into() }
    }
}

/// What the devices of a granted pod reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GrantedSet {
    /// The least class of the links between them; `None` if no container has two GPUs or more.
    pub link: Option<LinkClass>,
    /// Whether they have the link and the bandwidth that the pod prefers; `None` without a preference.
    pub is_preferred: Option<bool>,
}

impl GrantedSet {
    fn of(layouts: &[Layout], preferred: &SetTerms) -> Self {
        let link = layouts.iter().filter_map(|layout| layout.class).min();
        let gbs = layouts.iter().filter_map(|layout| layout.gbs).fold(f64::INFINITY, f64::min);
        let is_met = || preferred.are_met(link.unwrap_or(LinkClass::NvLink), gbs);
        Self { link, is_preferred: preferred.are_of_links().then(is_met) }
    }
}

/// Holds, and which nodes have binds of which pods.
#[derive(Debug)]
pub(super) struct Reservations {
    /// Distinguishes the plans of this process from those of an earlier one.
    run: String,
    plans: u64,
    /// What was granted so far.
    granted: BTreeMap<GrantedSet, u64>,
    holds: Holds,
    /// The nodes that have a bind of a pod: one, or several after binds of unknown outcome.
    binds: HashMap<PodUid, Vec<NodeIx>>,
}

impl Reservations {
    pub(super) fn new(run: String) -> Self {
        Self { run, plans: 0, granted: BTreeMap::new(), holds: Holds::default(), binds: HashMap::new() }
    }

    /// How often a set was granted so far, by what its devices reach.
    pub(super) fn granted(&self) -> &BTreeMap<GrantedSet, u64> {
        &self.granted
    }

    pub(super) fn holds(&self) -> &Holds {
        &self.holds
    }

    /// Whether a bind of a pod is in flight, or done and not yet shown by the pod.
    pub(super) fn has_bind(&self, uid: &PodUid) -> bool {
        self.binds.contains_key(uid)
    }

    /// Sorted UIDs of the pods that have binds.
    pub(super) fn pods_with_binds(&self) -> Vec<PodUid> {
        let mut pods: Vec<PodUid> = self.binds.keys().cloned().collect();
        pods.sort_unstable();
        pods
    }

    /// Holds the best devices of a node for a pod: free ones, or else with those that are `lent` to it.
    pub(super) fn hold(
        &mut self,
        now: Instant,
        nodes: &mut NodeTable,
        (uid, node): (&PodUid, NodeIx),
        request: &Arc<Request>,
        (policy, lent): (Policy, &[DeviceSet]),
    ) {
        let Some(entry) = nodes.get(node).filter(|_| !self.holds.is_full()) else {
            return;
        };
        let Some(layouts) = best_layouts(entry, &self.holds.on(node), request, &[], policy, lent) else {
            return;
        };
        let devices = by_pool(entry, request, &layouts);
        let hold = Hold { node, devices };
        self.holds.insert(now, uid.clone(), hold, (Arc::clone(request), layouts));
        nodes.mark(node);
    }

    /// Records the nodes among which that of a pod's hold was chosen.
    pub(super) fn record_compared(&mut self, uid: &PodUid, compared: ComparedNodes) {
        self.holds.record_compared(uid, compared);
    }

    /// Drops the hold of a pod.
    pub(super) fn drop_hold(&mut self, nodes: &mut NodeTable, uid: &PodUid) {
        if let Some(node) = self.holds.remove(uid) {
            nodes.mark(node);
        }
    }

    /// Drops all holds on a node.
    pub(super) fn drop_holds_on(&mut self, node: NodeIx) {
        self.holds.remove_on(node);
    }

    /// Drops holds that have lasted too long.
    pub(super) fn expire_holds(&mut self, now: Instant, nodes: &mut NodeTable) {
        for uid in self.holds.expired(now) {
            self.drop_hold(nodes, &uid);
        }
    }

    /// The grant of an earlier bind of the same pod to the same node: either may succeed. One more call is in flight
    /// for it then.
    ///
    /// # Errors
    /// The plugin of the node does not serve; or kubelet may have given the devices to another pod meanwhile, for instance
    /// in place of some that became unhealthy. The first Binding cannot be recalled, but it must not be tried again.
    pub(super) fn repeat(
        nodes: &mut NodeTable,
        node: NodeIx,
        target: &Target,
    ) -> Result<Option<BindGrant>, BindError> {
        let entry = nodes.get(node).ok_or_else(|| BindError::no_such_node(target))?;
        if let Some(reason) = entry.not_ready() {
            return Err(BindError::not_free(
                target,
                WithheldReason::ByPlugin(Arc::clone(reason)).to_string(),
            ));
        }
        Self::still_granted(entry, target)?;
        let occupancy = nodes.occupancy_mut(node);
        Ok(occupancy.and_then(|occupancy| occupancy.repeat_bind(&target.uid)))
    }

    /// Whether a Binding that was sent may be sent once more.
    ///
    /// # Errors
    /// Kubelet reports the devices of the grant as those of another pod, or the GpuNode does not list them: then kubelet's
    /// report about them is not known.
    pub(super) fn still_granted(node: &Node, target: &Target) -> Result<(), BindError> {
        let Some(bind) = node.occupancy().bind_of(&target.uid) else {
            return Ok(());
        };
        let why = if !node.lists(bind.devices()) {
            "its GpuNode does not list what the pod was granted"
        } else if node.has_given_away(target, bind.devices()) {
            "kubelet has given what the pod was granted to another"
        } else {
            return Ok(());
        };
        Err(BindError::not_free(target, why))
    }

    /// The layouts on hold for a pod if they are still free, or else the best that is; those that are `lent` to it only
    /// where the free ones are too few.
    ///
    /// # Errors
    /// [`BindError::NotFree`].
    pub(super) fn choose(
        &self,
        nodes: &NodeTable,
        node: NodeIx,
        target: &Target,
        request: &Request,
        (policy, lent): (Policy, &[DeviceSet]),
    ) -> Result<Vec<Layout>, BindError> {
        let entry = nodes.get(node).ok_or_else(|| BindError::no_such_node(target))?;
        let hold = self.holds.of(&target.uid, node);
        if let (Some(hold), Some(layouts)) = (hold, self.holds.layouts(&target.uid, request))
            && are_free(entry, &hold.devices, lent)
            && have_numa(entry, request, layouts)
        {
            return Ok(layouts.to_vec());
        }
        let own = hold.map_or(&[][..], |hold| hold.devices.as_slice());
        let best = best_layouts(entry, &self.holds.on(node), request, own, policy, lent);
        best.ok_or_else(|| BindError::not_free(target, shortage(entry, request)))
    }

    /// Reserves the devices of layouts for a bind and writes its grant. `gang`: where the gang of a member was placed.
    ///
    /// # Errors
    /// See [`BindError`]; then nothing is reserved.
    pub(super) fn grant(
        &mut self,
        nodes: &mut NodeTable,
        node: NodeIx,
        target: &Target,
        request: &Request,
        layouts: &[Layout],
        gang: Option<GangPlacement>,
    ) -> Result<BindGrant, BindError> {
        self.plans += 1;
        let plan = format!("{}-{}", self.run, self.plans);
        let (annotation, devices) = write_grant(nodes.get(node), target, request, layouts, &plan)?;
        let compared = self.holds.compared(&target.uid, node).cloned();
        let placement = Placement::new(explain(nodes.get(node), request, layouts), compared);
        let placement = Arc::new(placement.of_gang(gang));
        let granted = BindGrant::Grant { plan, annotation, placement };
        if let Some(occupancy) = nodes.occupancy_mut(node) {
            let (uid, numa) = (target.uid.clone(), request.numa().to_vec());
            occupancy.begin_bind(BindReservation::new(uid, granted.clone(), devices, numa));
            self.binds.entry(target.uid.clone()).or_default().push(node);
            *self.granted.entry(GrantedSet::of(layouts, &request.placement.preferred)).or_default() += 1;
        }
        self.drop_hold(nodes, &target.uid);
        Ok(granted)
    }

    /// A bind with a grant ended.
    pub(super) fn finish(&mut self, now: Instant, nodes: &mut NodeTable, target: &Target, outcome: Outcome) {
        let Some(node) = nodes.find(target.node.as_str()) else {
            return;
        };
        let occupancy = nodes.occupancy_mut(node);
        if occupancy.is_some_and(|occupancy| occupancy.end_bind(now, &target.uid, outcome)) {
            self.forget(&target.uid, node);
        }
    }

    /// The pod shows where it is bound: every bind of it is done, or never will be.
    pub(super) fn pod_bound(&mut self, nodes: &mut NodeTable, uid: &PodUid) {
        for node in self.binds.remove(uid).unwrap_or_default() {
            if let Some(occupancy) = nodes.occupancy_mut(node) {
                occupancy.remove_bind(uid);
            }
        }
    }

    /// The pod was deleted.
    pub(super) fn pod_deleted(&mut self, now: Instant, nodes: &mut NodeTable, uid: &PodUid) {
        for node in self.binds.get(uid).cloned().unwrap_or_default() {
            let occupancy = nodes.occupancy_mut(node);
            if occupancy.is_some_and(|occupancy| occupancy.delete_bind(now, uid)) {
                self.forget(uid, node);
            }
        }
    }

    /// A list of all pods, begun at `since`, is complete: pods that were bound before and are not in it were deleted.
    /// Returns those that are in it and were bound before, though nothing has shown them bound.
    pub(super) fn pods_listed(
        &mut self,
        now: Instant,
        nodes: &mut NodeTable,
        since: Instant,
        listed: &HashSet<Arc<str>>,
    ) -> Vec<PodUid> {
        let bound = nodes.iter().flat_map(|(_, node)| node.occupancy().bound_before(since));
        let (unbound, missing): (Vec<PodUid>, Vec<PodUid>) =
            bound.cloned().partition(|uid| listed.contains(uid.as_str()));
        for uid in missing {
            self.pod_deleted(now, nodes, &uid);
        }
        unbound
    }

    /// Gives up binds that no pod shows by facts as new as `contact`. Returns the pods of those that can be taken not
    /// to have happened.
    pub(super) fn expire(
        &mut self,
        now: Instant,
        contact: Instant,
        nodes: &mut NodeTable,
        pods: &PodStore,
    ) -> Vec<PodUid> {
        let mut unsure = Vec::new();
        for (node, bind) in nodes.expire_binds(now, contact, pods) {
            self.forget(&bind.uid, node);
            if bind.was_unsure {
                unsure.push(bind.uid);
            }
        }
        unsure
    }

    fn forget(&mut self, uid: &PodUid, node: NodeIx) {
        if let Some(nodes) = self.binds.get_mut(uid) {
            nodes.retain(|known| *known != node);
            if nodes.is_empty() {
                self.binds.remove(uid);
            }
        }
    }

    /// Whether holds changed since this was last called.
    pub(super) fn take_changed(&mut self) -> bool {
        self.holds.take_changed()
    }

    /// Nodes have new numbers.
    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        self.holds.renumber(renumbering);
        for nodes in self.binds.values_mut() {
            let known = nodes.iter().filter_map(|node| renumbering.get(node).copied());
            *nodes = known.collect();
        }
    }
}

fn are_free(node: &Node, devices: &[DeviceSet], lent: &[DeviceSet]) -> bool {
    devices.iter().enumerate().all(|(index, devices)| {
        let pool = node.pool(index);
        pool.is_some_and(|pool| match lent.get(index) {
            Some(lent) => devices.is_subset(&(&pool.free | lent)),
            None => devices.is_subset(&pool.free),
        })
    })
}

/// Whether the CPUs and the memory that layouts need are still free: a hold keeps none.
fn have_numa(node: &Node, request: &Request, layouts: &[Layout]) -> bool {
    if !node.counts(request.numa()) {
        return true;
    }
    let Some(class) = node.exact(&[]) else {
        return false;
    };
    let pools = request.asks.iter().map(|ask| class.pool(ask.resource.as_str()).map(|(_, pool)| pool));
    let Some(pools) = pools.collect::<Option<Vec<_>>>() else {
        return true;
    };
    let free: Vec<DeviceSet> =
        pools.iter().zip(layouts).map(|(pool, layout)| &pool.free | &layout.devices).collect();
    let offers = request.asks.iter().zip(&pools).zip(&free);
    let offers = offers.map(|((ask, pool), free)| Offer { site: class.site(pool, &[]), free, ask });
    Offer::are_admitted(&offers.collect::<Vec<_>>(), layouts)
}

/// The best layouts for a request on a node, without devices that are on hold for other pods. `own`: those on hold for
/// this one.
fn best_layouts(
    node: &Node,
    held: &[DeviceSet],
    request: &Request,
    own: &[DeviceSet],
    policy: Policy,
    lent: &[DeviceSet],
) -> Option<Vec<Layout>> {
    let best = |class: Class| {
        decide::judge(&class, request).ok()?;
        decide::score(&class, request, own, policy).map(|(_, layouts)| layouts)
    };
    let with_lent = || if lent.is_empty() { None } else { best(node.exact_with(held, lent)?) };
    best(node.exact(held)?).or_else(with_lent)
}

/// Why a request does not fit on a node.
fn shortage(node: &Node, request: &Request) -> String {
    let Some(class) = node.exact(&[]) else {
        return "no inventory".to_owned();
    };
    decide::judge(&class, request).err().map_or_else(
        || "the devices that are free do not fit the containers".to_owned(),
        |miss| miss.of_one_node(),
    )
}

fn by_pool(node: &Node, request: &Request, layouts: &[Layout]) -> Vec<DeviceSet> {
    let Some(inventory) = node.inventory() else {
        return Vec::new();
    };
    let mut devices = vec![DeviceSet::EMPTY; inventory.pools.len()];
    for (ask, layout) in request.asks.iter().zip(layouts) {
        if let Some((pool, _)) = inventory.pool(ask.resource.as_str()) {
            devices[pool].add(&layout.devices);
        }
    }
    devices
}

/// Why these layouts, one sentence per resource. `node` still counts their devices as free.
fn explain(node: Option<&Node>, request: &Request, layouts: &[Layout]) -> Vec<String> {
    let Some(class) = node.and_then(|node| node.exact(&[])) else {
        return Vec::new();
    };
    let sentences = request.asks.iter().zip(layouts).filter_map(|(ask, layout)| {
        let (index, pool) = class.pool(ask.resource.as_str())?;
        let cut = class.cut_beside(index);
        // A reservation of the pod's gang is not free to others.
        let mut free = pool.free.clone();
        free.add(&layout.devices);
        Some(class.site(pool, &cut).explain(&free, &layout.devices))
    });
    sentences.collect()
}

/// The annotation that grants layouts, and their devices.
fn write_grant(
    node: Option<&Node>,
    target: &Target,
    request: &Request,
    layouts: &[Layout],
    plan: &str,
) -> Result<(Arc<str>, Devices), BindError> {
    let inventory = node.and_then(Node::inventory);
    let mut containers = Vec::new();
    let mut devices: Devices = Vec::new();
    for (ask, layout) in request.asks.iter().zip(layouts) {
        let pool = inventory.and_then(|inventory| inventory.pool(ask.resource.as_str()));
        let grants = pool.and_then(|(_, pool)| layout.grants(ask, pool.ids()));
        let (Some((_, pool)), Some(grants)) = (pool, grants) else {
            return Err(BindError::no_such_node(target));
        };
        containers.extend(grants);
        devices.push((ask.resource.clone(), pool.ids_of(&layout.devices)));
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
