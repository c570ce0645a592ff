//! What lies between a decision and the pod that shows it: holds (prioritize has named a winner, bind has not come) and reservations
//! (bind is on its way, or done and not yet seen). Reservations take devices; holds only count in scores. How they begin stands in
//! `reserve`; here is how they go on and end.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::PodUid;

use super::entry::Entry;
use super::reserve::Target;
use super::{Index, UNSURE};
use crate::devices::DeviceSet;
use crate::layout::Layout;
use crate::ledger::Devices;
use crate::pod::PodFacts;
use crate::request::Request;
use crate::snapshot::{Hold, NodeIx};

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
    pub(super) uid: PodUid,
    pub(super) plan: String,
    pub(super) annotation: Arc<str>,
    pub(super) devices: Devices,
    /// So many calls are on their way.
    pub(super) calls: u32,
    /// What those that have ended came to. One that fails later takes nothing of that back.
    pub(super) came: Came,
}

/// How far a bind has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Came {
    /// No call has done anything.
    Nothing,
    /// Nobody knows; given up at that time.
    Unsure(Instant),
    /// Bound at that time; the watch will show it.
    Bound(Instant),
}

/// A hold with its time limit and what it is for.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) until: Instant,
    pub(super) request: Arc<Request>,
    pub(super) layouts: Vec<Layout>,
}

/// Holds, and what names plans.
#[derive(Debug)]
pub(super) struct Binds {
    pub(super) run: String,
    pub(super) plans: u64,
    pub(super) pending: HashMap<PodUid, Pending>,
    pub(super) holds: Arc<HashMap<PodUid, Hold>>,
    /// Where each pod has reservations: one node, or several after binds of unknown outcome.
    pub(super) reserved: HashMap<PodUid, Vec<NodeIx>>,
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

    /// Devices held on a node, by pool.
    pub(super) fn held_on(&self, node: NodeIx) -> Vec<DeviceSet> {
        let mut held = Vec::new();
        for hold in self.holds.values().filter(|hold| hold.node == node) {
            add(&mut held, &hold.devices);
        }
        held
    }

    pub(super) fn drop_hold(&mut self, uid: &PodUid) -> Option<NodeIx> {
        self.pending.remove(uid)?;
        let hold = Arc::make_mut(&mut self.holds).remove(uid)?;
        Some(hold.node)
    }

    /// Forgets what is held on a node; binds that come choose anew.
    pub(super) fn drop_holds_on(&mut self, node: NodeIx) {
        let there = self.holds.iter().filter(|(_, hold)| hold.node == node);
        let pods: Vec<PodUid> = there.map(|(uid, _)| uid.clone()).collect();
        for uid in pods {
            self.drop_hold(&uid);
        }
    }

    pub(super) fn expired_holds(&self, now: Instant) -> Vec<PodUid> {
        let expired = self.pending.iter().filter(|(_, pending)| pending.until <= now);
        expired.map(|(uid, _)| uid.clone()).collect()
    }

    pub(super) fn renumber(&mut self, renumbered: &HashMap<NodeIx, NodeIx>) {
        let mut holds = HashMap::new();
        for (uid, hold) in self.holds.iter() {
            if let Some(node) = renumbered.get(&hold.node) {
                let devices = hold.devices.clone();
                holds.insert(uid.clone(), Hold { node: *node, devices });
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
            if entry.reservations[position].calls == 0 {
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
            .filter(|reservation| reservation.calls == 0)
            .filter(|reservation| matches!(reservation.came, Came::Bound(at) if at < since))
            .filter(|reservation| !seen.contains(reservation.uid.as_str()))
            .map(|reservation| reservation.uid.clone())
            .collect();
        for uid in gone {
            self.deleted(now, &uid, entries, dirty);
        }
    }

    /// Gives up what no pod has come to show by facts of `contact`: binds of unknown outcome, and binds whose pod is gone (it went while
    /// its bind was in flight). Such a pod may have started. Returns the pods whose binds
    /// can be taken not to have happened.
    pub(super) fn expire(
        &mut self,
        now: Instant,
        contact: Instant,
        pods: &HashMap<PodUid, Arc<PodFacts>>,
        entries: &mut [Entry],
        dirty: &mut Vec<NodeIx>,
    ) -> Vec<PodUid> {
        let mut unsure = Vec::new();
        for (number, entry) in (0..).zip(entries) {
            let expired = entry.reservations.extract_if(.., |known| match known.came {
                _ if known.calls > 0 => false,
                Came::Nothing => true,
                Came::Bound(at) => at + UNSURE <= contact && !pods.contains_key(&known.uid),
                Came::Unsure(until) => until <= contact,
            });
            for reservation in expired {
                if matches!(reservation.came, Came::Bound(_)) {
                    entry.leaving.push((now, reservation.devices));
                }
                self.unreserve(&reservation.uid, NodeIx(number));
                dirty.push(NodeIx(number));
                if matches!(reservation.came, Came::Unsure(_)) {
                    unsure.push(reservation.uid);
                }
            }
        }
        unsure
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
    pub(super) fn position(&self, uid: &PodUid) -> Option<usize> {
        self.reservations
            .iter()
            .position(|reservation| reservation.uid == *uid)
    }
}

fn add(held: &mut Vec<DeviceSet>, more: &[DeviceSet]) {
    held.resize(held.len().max(more.len()), DeviceSet::EMPTY);
    for (held, more) in held.iter_mut().zip(more) {
        held.add(more);
    }
}

impl Index {
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
        reservation.calls = reservation.calls.saturating_sub(1);
        match (outcome, reservation.came) {
            (Outcome::Bound, _) => reservation.came = Came::Bound(now),
            (_, Came::Bound(_)) => {}
            (Outcome::Unsure, _) => reservation.came = Came::Unsure(now + UNSURE),
            (Outcome::Failed, Came::Nothing) if reservation.calls == 0 => {
                entry.reservations.remove(position);
                self.binds.unreserve(&target.uid, ix);
            }
            (Outcome::Failed, _) => {}
        }
        self.dirty.push(ix);
    }
}
