//! Why a pod is on its node, or why it waits: every node, and the pods that would have to end there for it to fit. For
//! `gantry explain`; nothing is decided or changed here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, LazyLock};

use gantry_api::placement::ComparedFabric;
use gantry_api::xid::Table;
use gantry_api::{DeviceId, NodeName, Placement, PodUid, Reason, ResourceName, names};
use gantry_gang::protocol::{Stage, WithheldReason};
use gantry_gang::{GangKey, Misfit, Needs, NodeFacts, Resources};
use serde::{Deserialize, Serialize};

use super::facts::Facts;
use super::gangs::ReservationHolders;
use super::least_set::least_set;
use super::node::Node;
use super::victim_search::fits_without;
use super::{GangReservations, GangViews};
use crate::pod::PodFacts;
use gantry_planner::decide::{self, ForeignNodes, NodeRefusal};
use gantry_planner::devices::DeviceSet;
use gantry_planner::inventory::Pool;
use gantry_planner::request::Request;
use gantry_planner::snapshot::{Class, NOMINATED, NodeIx};

/// The report on a pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PodReport {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// What it asks for: `4 nvidia.com/gpu`.
    pub asks: String,
    /// The gang it belongs to, with its phase and reason by its Gang object: `gang ml/train: Queued: waits for room:
    /// ...`.
    pub gang: Option<Arc<str>>,
    /// Why that gang waits.
    pub gang_reason: Option<Reason>,
    /// Of a bound member: the domains that were compared when its gang was planned, if any were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang_compared: Option<Arc<ComparedFabric>>,
    /// While it waits: other gangs that have reservations and are not decided, so that only the extender knows the
    /// reservations: `namespace/name`.
    pub gangs_with_undecided_reservations: Vec<String>,
    /// Its scheduler, if it waits and that scheduler does not call Gantry.
    pub scheduled_by: Option<Arc<str>>,
    /// The scheduling gate that keeps it from every scheduler.
    pub gate: Option<Arc<str>>,
    /// Its node, and the devices that it holds there.
    pub bound: Option<PodNode>,
    /// Every node, best first, while it waits.
    pub nodes: Vec<NodeReport>,
}

/// The node of a pod.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PodNode {
    /// The node.
    pub node: NodeName,
    /// What it holds by the ledger: what kubelet reports, or else what it was granted.
    pub devices: Vec<DeviceId>,
    /// The same as text: `GPU 0-3`.
    pub words: String,
    /// Those of its GPUs that are unhealthy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unhealthy: Vec<UnhealthyGpu>,
    /// Why there, by the pod's annotation. Not kept in the index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
}

/// What a node is to a pod that waits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeReport {
    /// The node.
    pub node: NodeName,
    /// Why the pod does not fit there now; absent if it does.
    pub lacks: Option<String>,
    /// The same for programs.
    pub lack: Option<FitFailure>,
    /// GB/s that a collective of its worst-off container would reach there, if it has two GPUs or more and fits.
    pub bandwidth_gbs: Option<f64>,
    /// Pods that would have to end for it to fit, with the least loss; empty if it fits, or if no end of pods helps.
    pub would_have_to_end: Vec<String>,
    /// Reservations there of gangs that are decided, if the pod does not fit.
    pub reserved_for_gangs: Vec<GangReservations>,
    /// GPUs there that are unhealthy, wholly or in part, if the pod does not fit and asks for their resources.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unhealthy: Vec<UnhealthyGpu>,
}

/// A GPU that is unhealthy, wholly or in part. Not one that is cordoned only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnhealthyGpu {
    /// Its index.
    pub gpu: u8,
    /// Why.
    pub reason: Arc<str>,
    /// The Xids among the causes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub xids: Vec<XidReport>,
}

/// An Xid, with what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct XidReport {
    /// Its number.
    pub xid: u64,
    /// What the operator should do, by NVIDIA's catalog; absent for an Xid of applications.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response: Option<Arc<str>>,
}

/// Why a pod does not fit on a node: what no end of pods changes first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all_fields = "camelCase")]
#[expect(missing_docs, reason = "the fields name what they hold")]
pub enum FitFailure {
    /// No Gantry plugin runs there.
    NoPlugin,
    /// No Node object exists.
    NoNode,
    /// The node is cordoned.
    Cordoned,
    /// The pod does not tolerate a taint.
    Taint { key: Arc<str> },
    /// The node selector, or required node affinity.
    NodeAffinity,
    /// A volume of the pod cannot be reached from there.
    Volume,
    /// Affinity or anti-affinity to pods, or host ports.
    PodAffinity,
    /// The plugin does not serve.
    PluginNotReady { reason: Arc<str> },
    /// Another program marks the node.
    Withheld { mark: Arc<str> },
    /// The node does not serve the resource.
    NotServed { resource: ResourceName },
    /// A container asks for more than kubelet gives to one.
    TooMany { text: String },
    /// Too few devices are free. Those that are idle and reserved are not.
    Devices { free: usize, reserved: usize, asked: u32, text: String },
    /// Enough devices are free, but not as the pod or kubelet requires them.
    Unmet { text: String },
    /// Too little is left of a resource other than devices.
    Resource { text: String },
    /// The node is reserved for the first gang of the queue.
    BackfillReservation { gang: String },
    /// Other pods are preempted there for a pod of higher priority.
    Nominated,
}

impl From<Misfit> for FitFailure {
    fn from(misfit: Misfit) -> Self {
        match misfit {
            Misfit::Unschedulable => Self::Cordoned,
            Misfit::Taint { key, .. } => Self::Taint { key },
            Misfit::Affinity => Self::NodeAffinity,
            Misfit::Volume => Self::Volume,
        }
    }
}

impl From<NodeRefusal> for FitFailure {
    fn from(refusal: NodeRefusal) -> Self {
        let text = refusal.of_one_node();
        match refusal {
            NodeRefusal::Withheld(WithheldReason::ByPlugin(reason)) => Self::PluginNotReady { reason },
            NodeRefusal::Withheld(WithheldReason::ByMark(mark)) => Self::Withheld { mark },
            NodeRefusal::NotServed(resource) => Self::NotServed { resource },
            NodeRefusal::TooMany { .. } => Self::TooMany { text },
            NodeRefusal::Short(counts) => {
                Self::Devices { free: counts.free, reserved: counts.reserved, asked: counts.asked, text }
            }
            NodeRefusal::Unmet(_) | NodeRefusal::Cpus { .. } => Self::Unmet { text },
        }
    }
}

impl fmt::Display for FitFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPlugin => f.write_str("no Gantry plugin runs there"),
            Self::NoNode => f.write_str("no Node object"),
            Self::Cordoned => f.write_str("the node is cordoned"),
            Self::Taint { key } => write!(f, "the pod does not tolerate taint {key}"),
            Self::NodeAffinity => f.write_str("the pod's node selector or affinity does not match"),
            Self::Volume => f.write_str("a volume of the pod cannot be reached from there"),
            Self::PodAffinity => {
                f.write_str("affinity or anti-affinity to other pods, or host ports rule it out")
            }
            Self::PluginNotReady { reason } => WithheldReason::ByPlugin(Arc::clone(reason)).fmt(f),
            Self::Withheld { mark } => WithheldReason::ByMark(Arc::clone(mark)).fmt(f),
            Self::NotServed { resource } => write!(f, "does not serve {resource}"),
            Self::TooMany { text }
            | Self::Devices { text, .. }
            | Self::Unmet { text }
            | Self::Resource { text } => f.write_str(text),
            Self::BackfillReservation { gang } => write!(f, "reserved for gang {gang}, which waits"),
            Self::Nominated => f.write_str(NOMINATED),
        }
    }
}

impl FitFailure {
    /// Why the labels, the taints or the volumes of a node rule a pod out; `facts` are those of the node.
    pub(super) fn of_node(facts: Option<&Arc<NodeFacts>>, needs: &Needs) -> Option<Self> {
        facts.map_or(Some(Self::NoNode), |facts| needs.admits(facts).err().map(Self::from))
    }

    /// Whether the node's labels, taints or volumes rule the pod out, so that the end of pods changes nothing.
    pub fn is_misfit(&self) -> bool {
        matches!(self, Self::Cordoned | Self::Taint { .. } | Self::NodeAffinity | Self::Volume | Self::NoNode)
    }
}

impl PodReport {
    /// Reports on a pod, at first without the nodes of one that waits ([`InspectedNodes`]).
    ///
    /// # Errors
    /// What the pod asks for cannot be read: why.
    pub(super) fn new(facts: &Facts, gangs: GangViews<'_>, pod: &PodFacts) -> Result<Self, String> {
        let request = pod.request.as_ref().map_err(ToString::to_string)?;
        let asks = request.asks.iter();
        let asks: Vec<String> = asks.map(|ask| format!("{} {}", ask.devices, ask.resource)).collect();
        let bound = pod.node.as_ref().map(|node| PodNode::of(facts, pod, node));
        let gang = gangs.goes_with(&pod.uid).map(|key| &**key);
        Ok(Self {
            namespace: Arc::clone(&pod.namespace),
            name: Arc::clone(&pod.name),
            asks: asks.join(", "),
            gang: gang.and_then(|key| gangs.in_few_words(key)),
            gang_reason: gang.and_then(|key| gangs.reason_of(key)),
            gang_compared: gang.filter(|_| bound.is_some()).and_then(|key| gangs.compared_for(key)),
            gangs_with_undecided_reservations: match bound {
                Some(_) => Vec::new(),
                None => gangs.with_places(gang),
            },
            scheduled_by: facts.schedulers.other_scheduler_of(pod),
            gate: match &pod.stage {
                Stage::Gated { by } => Some(by.clone().unwrap_or_else(|| names::GANG_GATE.into())),
                _ => None,
            },
            bound,
            nodes: Vec::new(),
        })
    }

    /// Sets the nodes, the best first.
    pub(crate) fn set_nodes(&mut self, mut nodes: Vec<NodeReport>) {
        let worth = |node: &NodeReport| (node.lacks.is_some(), node.would_have_to_end.len());
        nodes.sort_by(|a, b| {
            let bandwidth = |node: &NodeReport| node.bandwidth_gbs.unwrap_or_default();
            // A node that no end of pods helps comes last.
            let helpless = |node: &NodeReport| node.lacks.is_some() && node.would_have_to_end.is_empty();
            (helpless(a), worth(a))
                .cmp(&(helpless(b), worth(b)))
                .then(bandwidth(b).total_cmp(&bandwidth(a)))
                .then_with(|| a.node.cmp(&b.node))
        });
        self.nodes = nodes;
    }
}

impl PodNode {
    /// What a pod holds of its node.
    pub(super) fn of(facts: &Facts, pod: &PodFacts, node: &NodeName) -> Self {
        let mut devices = Vec::new();
        let mut words = Vec::new();
        let mut unhealthy = Vec::new();
        if let Some(entry) = facts.nodes.by_name(node.as_str())
            && let Some(held) = entry.held_by(&pod.uid)
        {
            let pools = entry.pools().zip(held);
            for ((pool, _), held) in pools.filter(|(_, held)| !held.is_empty()) {
                devices.extend(pool.ids_of(held));
                words.push(pool.describe(held));
                let faulty = (held - &pool.healthy).iter().filter_map(|device| pool.gpu_of(device)).collect();
                unhealthy.extend(unhealthy_gpus(entry, pool, Some(&faulty)));
            }
        }
        Self { node: node.clone(), devices, words: words.join(", "), unhealthy, placement: None }
    }
}

/// The unhealthy GPUs of a pool, or those among `only`, with their Xids. Not those that are cordoned only.
fn unhealthy_gpus(node: &Node, pool: &Pool, only: Option<&BTreeSet<usize>>) -> Vec<UnhealthyGpu> {
    static TABLE: LazyLock<Table> = LazyLock::new(Table::built_in);
    let Some(inventory) = node.inventory() else {
        return Vec::new();
    };
    let faults =
        pool.faults.iter().filter(|fault| only.is_none_or(|only| only.contains(&usize::from(fault.gpu))));
    let unhealthy = faults.filter_map(|fault| {
        let cordon = inventory.cordons.iter().find(|cordon| cordon.gpu == usize::from(fault.gpu));
        let reason = match cordon {
            Some(cordon) => cordon.fault.clone()?,
            None => Arc::clone(&fault.reason),
        };
        let own = inventory.xids.iter().filter(|known| known.gpu == fault.gpu);
        let xids =
            own.map(|known| XidReport { xid: known.xid, response: TABLE.response(known.xid).map(Arc::from) });
        Some(UnhealthyGpu { gpu: fault.gpu, reason, xids: xids.collect() })
    });
    unhealthy.collect()
}

/// Some nodes, as a pod that waits finds them.
#[derive(Debug)]
pub(crate) struct InspectedNodes {
    /// The nodes, in no order.
    pub(crate) nodes: Vec<NodeReport>,
    /// The number of the next node to be looked at; `None` after the last one.
    pub(crate) next: Option<u32>,
    /// Grows when numbers of nodes change: then all nodes must be looked at again.
    pub(crate) renumbered: u64,
}

impl InspectedNodes {
    /// Looks at nodes for a pod that waits, from number `from` on, `most` at a time.
    pub(super) fn of(
        facts: &Facts,
        gangs: GangViews<'_>,
        holders: ReservationHolders<'_>,
        pod: &PodFacts,
        (from, most): (u32, usize),
    ) -> Self {
        let (_, renumbered) = facts.nodes.revisions();
        let mut inspected = Self { nodes: Vec::new(), next: None, renumbered };
        let Ok(request) = &pod.request else {
            return inspected;
        };
        let gang = gangs.goes_with(&pod.uid).map(|key| &**key);
        let inspection = Inspection { facts, gangs, holders, pod, request, gang };
        let excluded = facts.resources.barred(&pod.needs, &[]);
        let is_excluded = |node: NodeIx| {
            let only = excluded.only.as_ref();
            excluded.nodes.binary_search(&node).is_ok()
                || only.is_some_and(|only| only.binary_search(&node).is_err())
        };
        for (looked, (number, node)) in facts.nodes.iter().skip(from as usize).enumerate() {
            if looked >= most {
                inspected.next = Some(number.0);
                break;
            }
            inspected.nodes.extend(inspection.look(number, node, is_excluded(number)));
        }
        inspected
    }
}

/// What a pod holds of a node.
struct PodHolding<'h> {
    uid: &'h PodUid,
    /// By pool.
    sets: &'h [DeviceSet],
    devices: usize,
    /// `None`: it is known from kubelet only.
    pod: Option<&'h Arc<PodFacts>>,
}

/// Pods of a node that end together: one, or the members of a gang.
struct EvictionGroup<'h> {
    gang: Option<&'h Arc<GangKey>>,
    /// How many, on all nodes.
    pods: usize,
    /// What they hold of this node.
    held: Vec<PodHolding<'h>>,
}

impl EvictionGroup<'_> {
    fn devices(&self) -> usize {
        self.held.iter().map(|held| held.devices).sum()
    }

    fn priority(&self) -> Option<i32> {
        self.held.iter().map(|held| held.pod.map(|pod| pod.priority)).max().flatten()
    }
}

/// Looks at nodes for one pod that waits.
struct Inspection<'i> {
    facts: &'i Facts,
    gangs: GangViews<'i>,
    holders: ReservationHolders<'i>,
    pod: &'i PodFacts,
    request: &'i Request,
    gang: Option<&'i GangKey>,
}

impl Inspection<'_> {
    fn look(&self, number: NodeIx, node: &Node, is_excluded: bool) -> Option<NodeReport> {
        let report = |lack: Option<FitFailure>| NodeReport {
            node: node.name().clone(),
            lacks: lack.as_ref().map(ToString::to_string),
            lack,
            bandwidth_gbs: None,
            would_have_to_end: Vec::new(),
            reserved_for_gangs: Vec::new(),
            unhealthy: Vec::new(),
        };
        let misfit = FitFailure::of_node(self.facts.resources.facts(number), &self.pod.needs);
        let Some(class) = node.exact(&[]) else {
            // A node without any GPUs is left out.
            let advertised = node.advertised()?;
            let any = self.request.asks.iter().any(|ask| {
                let count = advertised.iter().find(|(resource, _)| *resource == ask.resource);
                count.is_some_and(|(_, count)| *count > 0)
            });
            let refused = self.facts.options.foreign == ForeignNodes::Refuse;
            return any.then(|| report(misfit.or(refused.then_some(FitFailure::NoPlugin))));
        };
        if misfit.is_some() {
            return Some(report(misfit));
        }
        if is_excluded {
            return Some(report(Some(FitFailure::PodAffinity)));
        }
        let resources = &self.pod.needs.resources;
        let left = self.facts.resources.get(number).map(|room| &room.left);
        let score = match decide::judge(&class, self.request) {
            Ok(()) => decide::score(&class, self.request, &[], self.facts.options.policy).ok_or_else(|| {
                FitFailure::Unmet { text: "the devices that are free do not fit the containers".to_owned() }
            }),
            Err(refusal) => Err(refusal.into()),
        };
        let short = left.and_then(|left| left.fits(resources).err());
        let lack = match (score, short) {
            (Err(lack), _) => lack,
            (Ok(_), Some(lack)) => FitFailure::Resource { text: lack.short() },
            (Ok((score, _)), None) => {
                let mut found = report(self.reserved_otherwise(number, &class));
                let megabytes = score.megabytes_per_second();
                #[expect(clippy::cast_precision_loss, reason = "bandwidths are far below 2^52 MB/s")]
                let gbs = megabytes as f64 / 1e3;
                found.bandwidth_gbs = (megabytes > 0 && found.lack.is_none()).then_some(gbs);
                return Some(found);
            }
        };
        let mut found = report(Some(lack));
        found.reserved_for_gangs = self.holders.decided_on(node, self.gang);
        found.would_have_to_end = self.would_have_to_end(node, &class, left);
        let asked = node.pools().map(|(pool, _)| pool);
        let asked = asked.filter(|pool| self.request.asks.iter().any(|ask| ask.resource == pool.resource));
        found.unhealthy = asked.flat_map(|pool| unhealthy_gpus(node, pool, None)).collect();
        Some(found)
    }

    /// What keeps the pod off a node where it fits: a backfill reservation, or pods that kube-scheduler preempts for
    /// another.
    fn reserved_otherwise(&self, node: NodeIx, class: &Class) -> Option<FitFailure> {
        if self.gang.is_some() {
            return None;
        }
        if let Some(kept) = self.gangs.reservation_against(node, self.pod.priority) {
            return Some(FitFailure::BackfillReservation { gang: kept.gang.to_string() });
        }
        let promised = self.facts.published.promised.as_ref()?;
        let leaves = promised.leaves(node, class, self.pod.priority, self.request);
        (!leaves && self.pod.nominated.is_none()).then_some(FitFailure::Nominated)
    }

    /// Pods that would have to end for the pod to fit on a node: the lowest priorities, then the fewest devices, then
    /// the fewest pods. Of a gang that keeps the reservations of lost members all members are named together.
    fn would_have_to_end(&self, node: &Node, class: &Class, left: Option<&Resources>) -> Vec<String> {
        let mut gangs: BTreeMap<&Arc<GangKey>, Vec<PodHolding<'_>>> = BTreeMap::new();
        let mut ending: Vec<EvictionGroup<'_>> = Vec::new();
        for (uid, sets) in node.holders() {
            let held = self.held(uid, sets);
            match self.gangs.goes_with(uid) {
                // Other members of its gang are to run with it.
                Some(gang) if Some(&**gang) == self.gang => {}
                Some(gang) => gangs.entry(gang).or_default().push(held),
                None => ending.push(EvictionGroup { gang: None, pods: 1, held: vec![held] }),
            }
        }
        for (gang, held) in gangs {
            match self.gangs.may_lose(gang, held.len()) {
                true => {
                    let each =
                        held.into_iter().map(|held| EvictionGroup { gang: None, pods: 1, held: vec![held] });
                    ending.extend(each);
                }
                false => {
                    let pods = self.gangs.bound_members(gang).len();
                    ending.push(EvictionGroup { gang: Some(gang), pods, held });
                }
            }
        }
        // Of many the largest are taken, so that few have to end.
        ending.sort_by_key(|ending| {
            (std::cmp::Reverse(ending.devices()), ending.held.first().map(|held| held.uid.clone()))
        });
        let cost = |set: &[usize]| {
            let ended = set.iter().map(|at| &ending[*at]);
            let devices: usize = ended.clone().map(EvictionGroup::devices).sum();
            let pods: usize = ended.clone().map(|ending| ending.pods).sum();
            (ended.map(EvictionGroup::priority).max(), devices, pods)
        };
        let some = |set: &[usize]| set.iter().flat_map(|at| &ending[*at].held).collect::<Vec<_>>();
        let ended = least_set(ending.len(), cost, |set| self.would_fit(class, left, &some(set)));
        let ended = ended.unwrap_or_default().into_iter().map(|at| &ending[at]);
        ended.flat_map(|ending| self.names_of(ending)).collect()
    }

    fn names_of(&self, ending: &EvictionGroup<'_>) -> Vec<String> {
        match ending.gang {
            Some(gang) => self.gangs.bound_members(gang),
            None => {
                let pods = ending.held.iter().filter_map(|held| held.pod);
                pods.map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect()
            }
        }
    }

    fn held<'h>(&'h self, uid: &'h PodUid, sets: &'h [DeviceSet]) -> PodHolding<'h> {
        let devices = sets.iter().map(DeviceSet::len).sum();
        PodHolding { uid, sets, devices, pod: self.facts.pods.get(uid) }
    }

    fn would_fit(&self, class: &Class, left: Option<&Resources>, ended: &[&PodHolding<'_>]) -> bool {
        let back = ended.iter().map(|held| (held.sets, held.pod.map_or(&[][..], |pod| pod.numa())));
        let back: Vec<_> = back.collect();
        let has_resources = left.is_none_or(|left| {
            let mut left = left.clone();
            let pods = ended.iter().filter_map(|held| held.pod);
            pods.for_each(|pod| left.add(&pod.needs.resources));
            left.fits(&self.pod.needs.resources).is_ok()
        });
        has_resources && fits_without(class, self.request, &back, self.facts.options.policy)
    }
}

#[cfg(test)]
mod tests;
