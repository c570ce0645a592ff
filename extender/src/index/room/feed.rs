//! Events of nodes and pods for the rooms, and what the rest of the index asks of them. Keeps nothing itself.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use gantry_api::{NodeName, PodUid};
use gantry_gang::protocol::Stage;
use gantry_gang::{Fabric, Levels, Needs, NodeFacts};
use gantry_planner::input::{Barred, Room};

use super::{Load, Stoppable, There};
use crate::index::{Index, Source};
use crate::pod::{OtherPod, PodFacts, PodProfile};
use crate::snapshot::NodeIx;

impl Index {
    /// Sets the levels of the fabric. Before anything is fed.
    pub fn set_fabric(&mut self, levels: Levels) {
        self.rooms.fabric.levels = levels;
        self.rooms.stale = true;
    }

    /// What a node says of itself was seen.
    pub fn node_described(&mut self, facts: Arc<NodeFacts>) {
        let name = NodeName::from(&*facts.name);
        let node = self.node(&name);
        self.describe(node, Some(facts));
    }

    /// A node is gone.
    pub(in crate::index) fn node_gone(&mut self, node: NodeIx) {
        self.describe(node, None);
    }

    fn describe(&mut self, node: NodeIx, facts: Option<Arc<NodeFacts>>) {
        let entry = self.entries.get(node.0 as usize);
        let has_devices = entry.is_some_and(|entry| entry.inventory.is_some());
        if self.rooms.describe(node, facts) && has_devices {
            self.gangs.reshaped();
        }
    }

    /// A pod that asks for nothing that is watched was seen.
    pub fn other_pod_applied(&mut self, mut pod: OtherPod) {
        self.seen(Source::Pods, pod.uid.as_str());
        self.keep_claim(&pod.uid, &mut pod.claim);
        let node = match &pod.stage {
            Stage::Bound(node) => Some(self.node(node)),
            _ => None,
        };
        self.tell_other_pod(&pod);
        // One that is nowhere concerns nobody but its gang, and one that has ended concerns the gang still.
        if node.is_none() && pod.claim.is_none() {
            self.rooms.remove(&pod.uid);
            return;
        }
        let there = There {
            node,
            load: Load::Alone(Arc::clone(&pod.load)),
            profile: Arc::clone(&pod.profile),
            watched: false,
            claiming: None,
            stoppable: Stoppable::of(&pod),
        };
        let uid = pod.uid.clone();
        let claiming = pod.claim.is_some().then(|| Arc::new(pod));
        self.rooms.put(uid, There { claiming, ..there });
    }

    /// A pod that asks for nothing that is watched was deleted.
    pub fn other_pod_gone(&mut self, uid: &PodUid) {
        self.depart(uid);
        self.tell_gone(uid);
        self.rooms.remove(uid);
    }

    /// A list of all pods is complete: those that it does not name are gone.
    pub(in crate::index) fn other_pods_listed(&mut self, seen: &HashSet<Arc<str>>) {
        let gone: Vec<PodUid> = self
            .rooms
            .pods
            .iter()
            .filter(|(uid, there)| !there.watched && !seen.contains(uid.as_str()))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in gone {
            self.other_pod_gone(&uid);
        }
    }

    /// A pod that asks for what is watched, as it is now. Completes its needs.
    pub(in crate::index) fn room_pod(&mut self, pod: &mut PodFacts) {
        self.complete(pod);
        if pod.terminal {
            self.rooms.remove(&pod.uid);
            return;
        }
        let node = pod.node.clone().map(|node| self.node(&node));
        let there = There {
            node,
            load: Load::Among(Arc::clone(&pod.needs)),
            profile: Arc::clone(&pod.profile),
            watched: true,
            claiming: None,
            stoppable: None,
        };
        self.rooms.put(pod.uid.clone(), there);
    }

    /// Adds to a pod's needs where its volumes can be reached, and those of its labels that terms are about.
    pub(in crate::index) fn complete(&mut self, pod: &mut PodFacts) {
        let volumes = self.volumes.of(pod);
        pod.needs = self.rooms.completed(&pod.needs, &pod.profile, volumes);
    }

    /// A pod that asks for what is watched is gone.
    pub(in crate::index) fn room_gone(&mut self, uid: &PodUid) {
        self.rooms.remove(uid);
    }

    /// A place for a pod with these needs is kept on a node.
    pub fn room_take(&mut self, node: NodeIx, needs: &Needs) {
        self.rooms.room(node).left.sub(&needs.resources);
    }

    /// It is not kept any more.
    pub fn room_give(&mut self, node: NodeIx, needs: &Needs) {
        self.rooms.room(node).left.add(&needs.resources);
        self.rooms.gained.insert(node);
    }

    /// It is not kept any more, for its pod is there and takes as much.
    pub(in crate::index) fn room_pass_on(&mut self, node: NodeIx, needs: &Needs) {
        self.rooms.room(node).left.add(&needs.resources);
    }

    /// Brings rooms and fabric up to date, and needs of which it has turned out which labels terms are about, or where volumes are. Before
    /// anything is planned.
    pub(in crate::index) fn settle_rooms(&mut self) {
        self.rooms.forget(self.gangs.heard_needs());
        let (labels, volumes) = (
            std::mem::take(&mut self.rooms.relabelled),
            self.volumes.take_changed(),
        );
        if labels || volumes {
            let waiting: Vec<PodFacts> = self
                .pods
                .values()
                .filter(|pod| pod.node.is_none() && (labels || !pod.volume_claims.is_empty()))
                .map(|pod| PodFacts::clone(pod))
                .collect();
            for mut pod in waiting {
                let before = Arc::clone(&pod.needs);
                self.complete(&mut pod);
                if pod.needs != before {
                    self.take_pod(pod);
                    // A gang that was refused for what was known then.
                    self.gangs.gained();
                }
            }
        }
        // While nodes are listed there are more with every batch.
        let listing = self.relists.contains_key(&Source::Nodes);
        if self.rooms.settle(self.entries.len(), !listing) {
            // Nodes that came while they were listed were in no domain that a gang could have been planned in.
            self.gangs.reshaped();
        }
    }

    /// Whether more fits on any node with devices than when this was last asked: what was refused may be tried again.
    pub fn room_gained(&mut self) -> bool {
        let gained = std::mem::take(&mut self.rooms.gained);
        gained.iter().any(|node| {
            let entry = self.entries.get(node.0 as usize);
            entry.is_some_and(|entry| entry.inventory.is_some())
        })
    }

    /// Nodes on which less may fit than when this was last asked, and whether it is by what they say of themselves.
    pub(in crate::index) fn take_narrowed(&mut self) -> BTreeMap<NodeIx, bool> {
        std::mem::take(&mut self.rooms.narrowed)
    }

    /// What nodes have besides devices, by number, as of the last publication but for places taken or given since.
    pub fn rooms(&self) -> &[Room] {
        &self.rooms.rooms
    }

    /// The fabric as of the last publication.
    pub fn fabric(&self) -> &Fabric {
        &self.rooms.fabric
    }

    /// The other pods that belong to gangs, by UID.
    pub fn claiming_other_pods(&self) -> Vec<Arc<OtherPod>> {
        let pods = self.rooms.pods.values();
        let mut claiming: Vec<Arc<OtherPod>> = pods.filter_map(|there| there.claiming.clone()).collect();
        claiming.sort_unstable_by(|a, b| a.uid.cmp(&b.uid));
        claiming
    }

    /// Another pod that belongs to a gang.
    pub fn claiming_other_pod(&self, uid: &PodUid) -> Option<&Arc<OtherPod>> {
        self.rooms.pods.get(uid)?.claiming.as_ref()
    }

    /// Another pod that may be stopped by itself: its namespace and name.
    pub(in crate::index) fn loose_address(&self, uid: &PodUid) -> Option<(Arc<str>, Arc<str>)> {
        let there = self.rooms.pods.get(uid)?;
        let what = there.stoppable.as_deref()?;
        Some((Arc::clone(&there.profile.namespace), Arc::clone(&what.name)))
    }

    /// The priority of a pod that asks for nothing that is watched, if it may be stopped by itself.
    pub(in crate::index) fn priority_of_other(&self, uid: &PodUid) -> Option<i32> {
        let there = self.rooms.pods.get(uid)?;
        there.stoppable.as_ref().map(|what| what.priority)
    }

    /// What of a pod that is on a node, or asks for devices, concerns others.
    pub(in crate::index) fn profile(&self, uid: &PodUid) -> Option<&PodProfile> {
        self.rooms.pods.get(uid).map(|there| &*there.profile)
    }

    /// Which nodes the pods that are there keep a pod with these needs from.
    pub fn barred(&self, needs: &Needs) -> Barred {
        self.rooms.barred(needs, &[])
    }

    /// The same as if some pods were gone.
    pub fn barred_without(&self, needs: &Needs, gone: &[&PodUid]) -> Barred {
        self.rooms.barred(needs, gone)
    }
}
