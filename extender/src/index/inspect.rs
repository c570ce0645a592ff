//! Why a pod is where it is, or why it waits: every node looked at, and what would have to end there for the pod to fit. For people;
//! nothing is decided or changed here.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_api::{DeviceId, NodeName, PodUid};
use gantry_gang::{GangKey, Misfit, Needs};
use gantry_planner::plan::short;
use serde::Serialize;

use super::victims::fits_without;
use super::{Index, PlacesKept};
use crate::decide::{self, ForeignNodes};
use crate::devices::DeviceSet;
use crate::pod::PodFacts;
use crate::request::Request;
use crate::snapshot::{Class, NodeIx};

/// What is to be said of a pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PodReport {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// What it asks for: `4 nvidia.com/gpu`.
    pub asks: String,
    /// The gang it belongs to, and in a few words how that stands by its Gang object: `gang ml/train: Queued: waits for room: ...`.
    pub gang: Option<Arc<str>>,
    /// Other gangs that have places which only the extender knows, for they are not decided: `namespace/name`.
    pub places_kept_for: Vec<String>,
    /// The scheduler that is to place it, if it waits and that is none that asks Gantry.
    pub scheduled_by: Option<Arc<str>>,
    /// Where it is, and what it has there.
    pub bound: Option<Bound>,
    /// Every node, best first, while it waits.
    pub nodes: Vec<NodeReport>,
}

/// Where a pod is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bound {
    /// The node.
    pub node: NodeName,
    /// What it holds there by the account: what kubelet reports, or else what it was granted.
    pub devices: Vec<DeviceId>,
    /// The same in words: `GPU 0-3`.
    pub words: String,
}

/// A node to a pod that waits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeReport {
    /// The node.
    pub node: NodeName,
    /// Why the pod does not fit there now; absent if it does.
    pub lacks: Option<String>,
    /// GB/s that a collective of its worst-off container would reach there, if it has two GPUs or more and fits.
    pub bandwidth_gbs: Option<f64>,
    /// Pods, as few as possible, that would have to end for it to fit; empty if it fits, or if no end of pods helps.
    pub would_have_to_end: Vec<String>,
    /// Places there that are kept for gangs which are decided, if the pod does not fit.
    pub places_kept: Vec<PlacesKept>,
}

impl Index {
    /// The pod of a name.
    pub fn find_pod(&self, namespace: &str, name: &str) -> Option<&Arc<PodFacts>> {
        let mut named = self
            .pods
            .values()
            .filter(|pod| *pod.namespace == *namespace && *pod.name == *name);
        named.next()
    }

    /// The pods of a namespace.
    pub fn pod_names(&self, namespace: &str) -> Vec<String> {
        let pods = self.pods.values().filter(|pod| *pod.namespace == *namespace);
        let mut names: Vec<String> = pods.map(|pod| pod.name.to_string()).collect();
        names.sort_unstable();
        names
    }

    /// The namespaces that have pods.
    pub fn namespaces(&self) -> BTreeSet<Arc<str>> {
        self.pods.values().map(|pod| Arc::clone(&pod.namespace)).collect()
    }

    /// What is to be said of a pod.
    ///
    /// # Errors
    /// What the pod asks for cannot be read: in words.
    pub fn inspect(&self, pod: &PodFacts) -> Result<PodReport, String> {
        let request = pod.request.as_ref().map_err(ToString::to_string)?;
        let asks: Vec<String> = request
            .asks
            .iter()
            .map(|ask| format!("{} {}", ask.devices, ask.resource))
            .collect();
        let bound = pod.node.as_ref().map(|node| self.bound(pod, node));
        let gang = self.goes_with(&pod.uid).map(|key| &**key);
        let mut nodes = Vec::new();
        if bound.is_none() {
            nodes = (0u32..)
                .map(NodeIx)
                .take(self.entries.len())
                .filter_map(|node| self.look(node, request, gang))
                .collect();
            for node in nodes.iter_mut().filter(|node| node.lacks.is_none()) {
                node.lacks = self.lack_of_rest(&node.node, &pod.needs);
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
        }
        Ok(PodReport {
            namespace: Arc::clone(&pod.namespace),
            name: Arc::clone(&pod.name),
            asks: asks.join(", "),
            gang: gang.and_then(|key| self.in_few_words(key)),
            places_kept_for: self.with_places(gang),
            scheduled_by: self.elsewhere(pod),
            bound,
            nodes,
        })
    }

    fn bound(&self, pod: &PodFacts, node: &NodeName) -> Bound {
        let entry = self.names.get(node.as_str());
        let entry = entry.and_then(|ix| self.entries.get(ix.0 as usize));
        let mut devices = Vec::new();
        let mut words = Vec::new();
        if let Some(entry) = entry
            && let Some(inventory) = &entry.inventory
            && let Some((_, held)) = entry.account.pods.iter().find(|(uid, _)| *uid == pod.uid)
        {
            for (pool, held) in inventory
                .pools
                .iter()
                .zip(held)
                .filter(|(_, held)| !held.is_empty())
            {
                devices.extend(pool.ids_of(held));
                words.push(pool.describe(held));
            }
        }
        Bound {
            node: node.clone(),
            devices,
            words: words.join(", "),
        }
    }

    fn look(&self, ix: NodeIx, request: &Request, gang: Option<&GangKey>) -> Option<NodeReport> {
        let entry = self.entries.get(ix.0 as usize)?;
        let report = |lacks: Option<String>| NodeReport {
            node: entry.name.clone(),
            lacks,
            bandwidth_gbs: None,
            would_have_to_end: Vec::new(),
            places_kept: Vec::new(),
        };
        let Some(class) = entry.exact(&[]) else {
            // A node without GPUs of anybody is nothing to speak of.
            let advertised = entry.advertised.as_ref()?;
            let any = request.asks.iter().any(|ask| {
                let count = advertised.iter().find(|(resource, _)| *resource == ask.resource);
                count.is_some_and(|(_, count)| *count > 0)
            });
            let refused = self.options.foreign == ForeignNodes::Refuse;
            return any.then(|| report(refused.then(|| "no Gantry plugin runs there".to_owned())));
        };
        let fits = |class: &Class| decide::judge(class, request).map_err(|miss| miss.of_one_node());
        let mut found = match fits(&class) {
            Ok(()) => match decide::score(&class, request, &[], self.options.policy) {
                Some((score, _)) => {
                    let mut found = report(None);
                    let megabytes = score.megabytes_per_second();
                    #[expect(clippy::cast_precision_loss, reason = "bandwidths are far below 2^52 MB/s")]
                    let gbs = megabytes as f64 / 1e3;
                    found.bandwidth_gbs = (megabytes > 0).then_some(gbs);
                    return Some(found);
                }
                None => report(Some(
                    "the devices that are free do not fit the containers".to_owned(),
                )),
            },
            Err(words) => report(Some(words)),
        };
        found.places_kept = self.places_kept_on(entry, gang);
        // Siblings are what it is to complete.
        let sibling = |uid: &PodUid| gang.is_some() && self.goes_with(uid).map(|key| &**key) == gang;
        let pods = entry.account.pods.iter();
        let mut held: Vec<&(PodUid, Vec<DeviceSet>)> = pods.filter(|(uid, _)| !sibling(uid)).collect();
        // The largest first, so that few have to end; then those that turn out not to be needed are let off.
        held.sort_by_key(|(uid, sets)| {
            let devices: usize = sets.iter().map(DeviceSet::len).sum();
            (std::cmp::Reverse(devices), uid.clone())
        });
        let mut ended = 0;
        while ended < held.len() && !self.would_fit(&class, request, &held[..ended]) {
            ended += 1;
        }
        if self.would_fit(&class, request, &held[..ended]) {
            let mut victims: Vec<_> = held[..ended].to_vec();
            let mut at = 0;
            while at < victims.len() {
                let spared = victims.remove(at);
                if !self.would_fit(&class, request, &victims) {
                    victims.insert(at, spared);
                    at += 1;
                }
            }
            found.would_have_to_end = victims
                .iter()
                .filter_map(|(uid, _)| self.pods.get(uid))
                .map(|pod| format!("{}/{}", pod.namespace, pod.name))
                .collect();
        }
        Some(found)
    }

    /// What a node that has the devices lacks for a pod besides them.
    fn lack_of_rest(&self, node: &NodeName, needs: &Needs) -> Option<String> {
        let room = self.rooms().get(self.names.get(node.as_str())?.0 as usize)?;
        let misfit = needs.admits(room.facts.as_ref()?).err();
        misfit.map(misfits).or_else(|| {
            let lack = room.left.fits(&needs.resources).err();
            lack.as_ref().map(short)
        })
    }

    fn would_fit(&self, class: &Class, request: &Request, ended: &[&(PodUid, Vec<DeviceSet>)]) -> bool {
        let sets: Vec<&[DeviceSet]> = ended.iter().map(|(_, sets)| sets.as_slice()).collect();
        fits_without(class, request, &sets, self.options.policy)
    }
}

/// What of a node is not as a pod wants it.
fn misfits(misfit: Misfit) -> String {
    match misfit {
        Misfit::Unschedulable => "the node is cordoned".to_owned(),
        Misfit::Taint { key, .. } => format!("the pod does not tolerate taint {key}"),
        Misfit::Affinity => "the pod's node selector or affinity does not match".to_owned(),
        Misfit::Volume => "a volume of the pod cannot be reached from there".to_owned(),
    }
}

#[cfg(test)]
mod tests;
