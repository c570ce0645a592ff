//! Why a pod is on its node, or why it waits: every node, and the pods that would have to end there for it to fit. For
//! `gantry explain`; nothing is decided or changed here.

use std::sync::Arc;

use gantry_api::{DeviceId, NodeName, Placement, PodUid};
use gantry_gang::{GangKey, InsufficientResource, Misfit};
use serde::Serialize;

use super::least_set::least_set;
use super::node::Node;
use super::victim_search::fits_without;
use super::{Index, PlacesKept};
use crate::pod::PodFacts;
use gantry_planner::decide::{self, ForeignNodes};
use gantry_planner::devices::DeviceSet;
use gantry_planner::request::Request;
use gantry_planner::snapshot::Class;

/// The report on a pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    /// Other gangs that have reservations and are not decided, so that only the extender knows the reservations:
    /// `namespace/name`.
    pub places_kept_for: Vec<String>,
    /// Its scheduler, if it waits and that scheduler does not call Gantry.
    pub scheduled_by: Option<Arc<str>>,
    /// Its node, and the devices that it holds there.
    pub bound: Option<Bound>,
    /// Every node, best first, while it waits.
    pub nodes: Vec<NodeReport>,
}

/// The node of a pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bound {
    /// The node.
    pub node: NodeName,
    /// What it holds by the ledger: what kubelet reports, or else what it was granted.
    pub devices: Vec<DeviceId>,
    /// The same as text: `GPU 0-3`.
    pub words: String,
    /// Why there, by the pod's annotation. Not kept in the index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
}

/// What a node is to a pod that waits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeReport {
    /// The node.
    pub node: NodeName,
    /// Why the pod does not fit there now; absent if it does.
    pub lacks: Option<String>,
    /// GB/s that a collective of its worst-off container would reach there, if it has two GPUs or more and fits.
    pub bandwidth_gbs: Option<f64>,
    /// Pods that would have to end for it to fit, with the least loss; empty if it fits, or if no end of pods helps.
    pub would_have_to_end: Vec<String>,
    /// Reservations there of gangs that are decided, if the pod does not fit.
    pub places_kept: Vec<PlacesKept>,
}

impl Index {
    /// Reports on a pod.
    ///
    /// # Errors
    /// What the pod asks for cannot be read: why.
    pub fn inspect(&self, pod: &PodFacts) -> Result<PodReport, String> {
        let request = pod.request.as_ref().map_err(ToString::to_string)?;
        let asks = request.asks.iter();
        let asks: Vec<String> = asks.map(|ask| format!("{} {}", ask.devices, ask.resource)).collect();
        let bound = pod.node.as_ref().map(|node| self.bound(pod, node));
        let gang = self.goes_with(&pod.uid).map(|key| &**key);
        let inspection = Inspection { index: self, pod, request, gang };
        Ok(PodReport {
            namespace: Arc::clone(&pod.namespace),
            name: Arc::clone(&pod.name),
            asks: asks.join(", "),
            gang: gang.and_then(|key| self.in_few_words(key)),
            places_kept_for: self.with_places(gang),
            scheduled_by: self.schedulers.other_scheduler_of(pod),
            nodes: match bound {
                Some(_) => Vec::new(),
                None => inspection.nodes(),
            },
            bound,
        })
    }

    fn bound(&self, pod: &PodFacts, node: &NodeName) -> Bound {
        let mut devices = Vec::new();
        let mut words = Vec::new();
        if let Some(entry) = self.nodes.by_name(node.as_str())
            && let Some(held) = entry.held_by(&pod.uid)
        {
            let pools = entry.pools().zip(held);
            for ((pool, _), held) in pools.filter(|(_, held)| !held.is_empty()) {
                devices.extend(pool.ids_of(held));
                words.push(pool.describe(held));
            }
        }
        Bound { node: node.clone(), devices, words: words.join(", "), placement: None }
    }
}

/// Looks at every node for one pod that waits.
struct Inspection<'i> {
    index: &'i Index,
    pod: &'i PodFacts,
    request: &'i Request,
    gang: Option<&'i GangKey>,
}

impl Inspection<'_> {
    /// All nodes, best first.
    fn nodes(&self) -> Vec<NodeReport> {
        let nodes = self.index.nodes.iter();
        let mut nodes: Vec<NodeReport> = nodes.filter_map(|(_, node)| self.look(node)).collect();
        for node in nodes.iter_mut().filter(|node| node.lacks.is_none()) {
            node.lacks = self.insufficient_resource(&node.node);
            node.bandwidth_gbs = node.bandwidth_gbs.filter(|_| node.lacks.is_none());
        }
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
        nodes
    }

    fn look(&self, node: &Node) -> Option<NodeReport> {
        let report = |lacks: Option<String>| NodeReport {
            node: node.name().clone(),
            lacks,
            bandwidth_gbs: None,
            would_have_to_end: Vec::new(),
            places_kept: Vec::new(),
        };
        let Some(class) = node.exact(&[]) else {
            // A node without any GPUs is left out.
            let advertised = node.advertised()?;
            let any = self.request.asks.iter().any(|ask| {
                let count = advertised.iter().find(|(resource, _)| *resource == ask.resource);
                count.is_some_and(|(_, count)| *count > 0)
            });
            let refused = self.index.options.foreign == ForeignNodes::Refuse;
            return any.then(|| report(refused.then(|| "no Gantry plugin runs there".to_owned())));
        };
        let policy = self.index.options.policy;
        let mut found = match decide::judge(&class, self.request) {
            Ok(()) => match decide::score(&class, self.request, &[], policy) {
                Some((score, _)) => {
                    let mut found = report(None);
                    let megabytes = score.megabytes_per_second();
                    #[expect(clippy::cast_precision_loss, reason = "bandwidths are far below 2^52 MB/s")]
                    let gbs = megabytes as f64 / 1e3;
                    found.bandwidth_gbs = (megabytes > 0).then_some(gbs);
                    return Some(found);
                }
                None => report(Some("the devices that are free do not fit the containers".to_owned())),
            },
            Err(miss) => report(Some(miss.of_one_node())),
        };
        found.places_kept = self.index.places_kept_on(node, self.gang);
        found.would_have_to_end = self.would_have_to_end(node, &class);
        Some(found)
    }

    /// Pods that would have to end for the pod to fit on a node: the lowest priorities, then the fewest devices, then
    /// the fewest pods.
    fn would_have_to_end(&self, node: &Node, class: &Class) -> Vec<String> {
        // Other members of its gang are to run with it.
        let is_sibling =
            |uid: &PodUid| self.gang.is_some() && self.index.goes_with(uid).map(|key| &**key) == self.gang;
        let pods = node.holders().iter();
        let mut held: Vec<&(PodUid, Vec<DeviceSet>)> = pods.filter(|(uid, _)| !is_sibling(uid)).collect();
        // Of many the largest are taken, so that few have to end.
        held.sort_by_key(|(uid, sets)| (std::cmp::Reverse(devices_in(sets)), uid.clone()));
        let priority = |uid: &PodUid| self.index.pods.get(uid).map(|pod| pod.priority);
        let cost = |set: &[usize]| {
            let devices: usize = set.iter().map(|at| devices_in(&held[*at].1)).sum();
            (set.iter().map(|at| priority(&held[*at].0)).max(), devices, set.len())
        };
        let some = |set: &[usize]| set.iter().map(|at| held[*at]).collect::<Vec<_>>();
        let ended = least_set(held.len(), cost, |set| self.would_fit(class, &some(set)));
        let ended = some(&ended.unwrap_or_default()).into_iter();
        let pods = ended.filter_map(|(uid, _)| self.index.pods.get(uid));
        pods.map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect()
    }

    /// What a node that has the devices lacks otherwise.
    fn insufficient_resource(&self, node: &NodeName) -> Option<String> {
        let node = self.index.resources.get(self.index.nodes.find(node.as_str())?)?;
        let needs = &self.pod.needs;
        let misfit = needs.admits(node.facts.as_ref()?).err();
        misfit.map(misfit_reason).or_else(|| {
            let lack = node.left.fits(&needs.resources).err();
            lack.as_ref().map(InsufficientResource::short)
        })
    }

    fn would_fit(&self, class: &Class, ended: &[&(PodUid, Vec<DeviceSet>)]) -> bool {
        let sets: Vec<&[DeviceSet]> = ended.iter().map(|(_, sets)| sets.as_slice()).collect();
        fits_without(class, self.request, &sets, self.index.options.policy)
    }
}

fn devices_in(sets: &[DeviceSet]) -> usize {
    sets.iter().map(DeviceSet::len).sum()
}

/// What of a node does not match the pod.
fn misfit_reason(misfit: Misfit) -> String {
    match misfit {
        Misfit::Unschedulable => "the node is cordoned".to_owned(),
        Misfit::Taint { key, .. } => format!("the pod does not tolerate taint {key}"),
        Misfit::Affinity => "the pod's node selector or affinity does not match".to_owned(),
        Misfit::Volume => "a volume of the pod cannot be reached from there".to_owned(),
    }
}

#[cfg(test)]
mod tests;
