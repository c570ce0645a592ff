//! Devices that a pod will most likely get, between prioritize and bind. They count in scores only: a bind may take
//! them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::PodUid;
use gantry_api::placement::ComparedNodes;

use super::node_table::Renumbering;
use gantry_planner::devices::DeviceSet;
use gantry_planner::layout::Layout;
use gantry_planner::request::Request;
use gantry_planner::snapshot::{Hold, NodeIx};

/// How long a hold lasts.
pub const HOLD: Duration = Duration::from_secs(30);
/// Holds kept at most. Beyond that, scores do not account for pods on their way; nothing else suffers.
const MAX_HOLDS: usize = 4096;

/// Devices on hold, by pod.
#[derive(Debug, Default)]
pub(super) struct Holds {
    by_pod: HashMap<PodUid, HeldRequest>,
    /// The part that snapshots show.
    shared: Arc<HashMap<PodUid, Hold>>,
    changed: bool,
}

/// What a hold is for, and until when.
#[derive(Debug)]
struct HeldRequest {
    until: Instant,
    request: Arc<Request>,
    layouts: Vec<Layout>,
    /// The nodes among which this one was chosen.
    compared: Option<ComparedNodes>,
}

impl Holds {
    pub(super) fn is_full(&self) -> bool {
        self.by_pod.len() >= MAX_HOLDS
    }

    pub(super) fn insert(
        &mut self,
        now: Instant,
        uid: PodUid,
        hold: Hold,
        (request, layouts): (Arc<Request>, Vec<Layout>),
    ) {
        let until = now + HOLD;
        let held = HeldRequest { until, request, layouts, compared: None };
        self.by_pod.insert(uid.clone(), held);
        Arc::make_mut(&mut self.shared).insert(uid, hold);
        self.changed = true;
    }

    /// Records the nodes among which that of a pod's hold was chosen.
    pub(super) fn record_compared(&mut self, uid: &PodUid, compared: ComparedNodes) {
        if let Some(held) = self.by_pod.get_mut(uid) {
            held.compared = Some(compared);
        }
    }

    /// The nodes among which `node` was chosen for a pod, if that is known.
    pub(super) fn compared(&self, uid: &PodUid, node: NodeIx) -> Option<&ComparedNodes> {
        self.of(uid, node)?;
        self.by_pod.get(uid)?.compared.as_ref()
    }

    /// Removes the hold of a pod; the node that it was on.
    pub(super) fn remove(&mut self, uid: &PodUid) -> Option<NodeIx> {
        self.by_pod.remove(uid)?;
        let hold = Arc::make_mut(&mut self.shared).remove(uid)?;
        self.changed = true;
        Some(hold.node)
    }

    /// Removes all holds on a node; a bind that comes later chooses again.
    pub(super) fn remove_on(&mut self, node: NodeIx) {
        let held = self.shared.iter().filter(|(_, hold)| hold.node == node);
        let pods: Vec<PodUid> = held.map(|(uid, _)| uid.clone()).collect();
        for uid in pods {
            self.remove(&uid);
        }
    }

    pub(super) fn expired(&self, now: Instant) -> Vec<PodUid> {
        let expired = self.by_pod.iter().filter(|(_, held)| held.until <= now);
        expired.map(|(uid, _)| uid.clone()).collect()
    }

    /// What a pod with a hold asks for.
    pub(super) fn request(&self, uid: &str) -> Option<Arc<Request>> {
        self.by_pod.get(uid).map(|held| Arc::clone(&held.request))
    }

    /// The hold of a pod on a node.
    pub(super) fn of(&self, uid: &PodUid, node: NodeIx) -> Option<&Hold> {
        self.shared.get(uid).filter(|hold| hold.node == node)
    }

    /// The layouts on hold for a pod that asks for exactly this.
    pub(super) fn layouts(&self, uid: &PodUid, request: &Request) -> Option<&[Layout]> {
        let held = self.by_pod.get(uid)?;
        (*held.request == *request).then_some(&held.layouts)
    }

    /// Devices on hold on a node, by pool.
    pub(super) fn on(&self, node: NodeIx) -> Vec<DeviceSet> {
        let mut held: Vec<DeviceSet> = Vec::new();
        for hold in self.shared.values().filter(|hold| hold.node == node) {
            held.resize(held.len().max(hold.devices.len()), DeviceSet::EMPTY);
            for (held, more) in held.iter_mut().zip(&hold.devices) {
                held.add(more);
            }
        }
        held
    }

    pub(super) fn shared(&self) -> Arc<HashMap<PodUid, Hold>> {
        Arc::clone(&self.shared)
    }

    /// Whether holds changed since this was last called.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Nodes have new numbers.
    pub(super) fn renumber(&mut self, renumbering: &Renumbering) {
        let mut holds = HashMap::new();
        for (uid, hold) in self.shared.iter() {
            if let Some(node) = renumbering.get(&hold.node) {
                let devices = hold.devices.clone();
                holds.insert(uid.clone(), Hold { node: *node, devices });
            }
        }
        self.by_pod.retain(|uid, _| holds.contains_key(uid));
        self.shared = Arc::new(holds);
    }
}
