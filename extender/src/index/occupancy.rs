//! What keeps the devices of one node: live pods, binds in flight, reservations of gangs, and a quarantine for pods
//! that disappeared. The ledger of the node is computed from this and from the inventory. Devices are named by resource
//! and ID, so that all of it survives a new inventory.

use std::sync::Arc;
use std::time::Instant;

use gantry_api::PodUid;
use gantry_gang::GangKey;
use gantry_gang::protocol::ShapeId;

use super::reservations::{BindGrant, Outcome};
use super::{QUARANTINE, QUARANTINE_AFTER_A_GAP, QUARANTINE_WITHOUT_TRUTH, UNSURE};
use crate::ledger::Devices;
use gantry_planner::request::NumaDemand;

/// What keeps the devices of one node.
#[derive(Debug, Default)]
pub(super) struct Occupancy {
    /// Live pods bound to the node.
    pods: Vec<PodUid>,
    /// Binds that no pod shows yet.
    binds: Vec<BindReservation>,
    gang_reservations: Vec<GangReservation>,
    /// Devices of pods that disappeared before their end was observed, and since when.
    quarantine: Vec<(Instant, Devices)>,
}

/// Devices reserved for one bind.
#[derive(Debug)]
pub(super) struct BindReservation {
    uid: PodUid,
    granted: BindGrant,
    devices: Devices,
    numa: Vec<NumaDemand>,
    /// Calls in flight.
    calls: u32,
    /// The furthest that any finished call came. A call that fails later does not revert it.
    progress: Progress,
}

/// How far a bind has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// No call has had an effect.
    Started,
    /// The outcome is unknown; given up at that time.
    Unsure(Instant),
    /// Bound at that time; the watch will show it.
    Bound(Instant),
}

/// A bind that was given up.
#[derive(Debug)]
pub(super) struct ExpiredBind {
    pub(super) uid: PodUid,
    /// Its outcome was unknown; it can be taken not to have happened.
    pub(super) was_unsure: bool,
}

/// Devices reserved for one member of a gang, until a pod shows that it has them or the gang releases them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GangReservation {
    pub(super) gang: Arc<GangKey>,
    /// Number of the gang's slot.
    pub(super) slot: u32,
    /// Shape of the members that it is for, if known.
    pub(super) shape: Option<ShapeId>,
    pub(super) devices: Devices,
    /// The member that it is assigned to.
    pub(super) pod: Option<PodUid>,
    /// It was planned as a spare one: its devices are lent while it is assigned to no member.
    pub(super) spare: bool,
}

impl BindReservation {
    /// A bind with its first call in flight.
    pub(super) fn new(uid: PodUid, granted: BindGrant, devices: Devices, numa: Vec<NumaDemand>) -> Self {
        Self { uid, granted, devices, numa, calls: 1, progress: Progress::Started }
    }

    pub(super) fn uid(&self) -> &PodUid {
        &self.uid
    }

    pub(super) fn devices(&self) -> &Devices {
        &self.devices
    }

    /// What the pod's containers need of certain NUMA nodes.
    pub(super) fn numa(&self) -> &[NumaDemand] {
        &self.numa
    }
}

impl Occupancy {
    /// The live pods bound to the node.
    pub(super) fn pods(&self) -> &[PodUid] {
        &self.pods
    }

    /// A pod is bound to the node; it counts while it is `live`.
    pub(super) fn set_pod(&mut self, uid: &PodUid, live: bool) {
        self.pods.retain(|known| known != uid);
        if live {
            self.pods.push(uid.clone());
        }
    }

    /// The bind of a pod.
    pub(super) fn bind_of(&self, uid: &PodUid) -> Option<&BindReservation> {
        self.binds.iter().find(|bind| bind.uid == *uid)
    }

    /// Binds in flight.
    pub(super) fn binds(&self) -> &[BindReservation] {
        &self.binds
    }

    /// The pods with binds that began before that of `uid`, and their devices.
    pub(super) fn binds_before(&self, uid: &PodUid) -> impl Iterator<Item = (&PodUid, &Devices)> {
        let earlier = self.binds.iter().take_while(move |bind| bind.uid != *uid);
        earlier.map(|bind| (&bind.uid, &bind.devices))
    }

    /// Devices of all binds, but for that of the pod `except`.
    pub(super) fn devices_in_binds(&self, except: Option<&str>) -> impl Iterator<Item = &Devices> {
        let binds = self.binds.iter().filter(move |bind| except != Some(bind.uid.as_str()));
        binds.map(|bind| &bind.devices)
    }

    pub(super) fn begin_bind(&mut self, bind: BindReservation) {
        self.binds.push(bind);
    }

    /// One more call is in flight for a bind; its grant.
    pub(super) fn repeat_bind(&mut self, uid: &PodUid) -> Option<BindGrant> {
        let bind = self.binds.iter_mut().find(|bind| bind.uid == *uid)?;
        bind.calls += 1;
        Some(bind.granted.clone())
    }

    /// A call of a bind ended. True if the devices are released.
    pub(super) fn end_bind(&mut self, now: Instant, uid: &PodUid, outcome: Outcome) -> bool {
        let Some(position) = self.binds.iter().position(|bind| bind.uid == *uid) else {
            return false;
        };
        let bind = &mut self.binds[position];
        bind.calls = bind.calls.saturating_sub(1);
        match (outcome, bind.progress) {
            (Outcome::Bound, _) => bind.progress = Progress::Bound(now),
            (_, Progress::Bound(_)) => {}
            (Outcome::Unsure, _) => bind.progress = Progress::Unsure(now + UNSURE),
            (Outcome::Failed, Progress::Started) if bind.calls == 0 => {
                self.binds.remove(position);
                return true;
            }
            (Outcome::Failed, _) => {}
        }
        false
    }

    /// The pod shows where it is bound: no bind of it is in flight any more.
    pub(super) fn remove_bind(&mut self, uid: &PodUid) {
        self.binds.retain(|bind| bind.uid != *uid);
    }

    /// The pod was deleted. A bind that is still in flight will be refused and reports that itself; any other may have
    /// been carried out and the pod may have started, so its devices go into quarantine. True if the bind is removed.
    pub(super) fn delete_bind(&mut self, now: Instant, uid: &PodUid) -> bool {
        let position = self.binds.iter().position(|bind| bind.uid == *uid);
        let Some(position) = position.filter(|position| self.binds[*position].calls == 0) else {
            return false;
        };
        let bind = self.binds.remove(position);
        self.quarantine.push((now, bind.devices));
        true
    }

    /// Pods that were bound before `since`, and that nothing has shown bound.
    pub(super) fn bound_before(&self, since: Instant) -> impl Iterator<Item = &PodUid> {
        let done = self.binds.iter().filter(|bind| bind.calls == 0);
        done.filter(move |bind| matches!(bind.progress, Progress::Bound(at) if at < since))
            .map(|bind| &bind.uid)
    }

    /// Gives up binds that no pod shows by facts as new as `contact`: those of unknown outcome, and those of pods that
    /// were deleted while the bind was in flight. Such a pod may have started.
    pub(super) fn expire_binds(
        &mut self,
        now: Instant,
        contact: Instant,
        is_known: impl Fn(&PodUid) -> bool,
    ) -> Vec<ExpiredBind> {
        let expired = self.binds.extract_if(.., |bind| match bind.progress {
            _ if bind.calls > 0 => false,
            Progress::Started => true,
            Progress::Bound(at) => at + UNSURE <= contact && !is_known(&bind.uid),
            Progress::Unsure(until) => until <= contact,
        });
        let mut given_up = Vec::new();
        for bind in expired {
            given_up.push(ExpiredBind {
                was_unsure: matches!(bind.progress, Progress::Unsure(_)),
                uid: bind.uid,
            });
            if matches!(bind.progress, Progress::Bound(_)) {
                self.quarantine.push((now, bind.devices));
            }
        }
        given_up
    }

    pub(super) fn gang_reservations(&self) -> &[GangReservation] {
        &self.gang_reservations
    }

    pub(super) fn add_gang_reservation(&mut self, reservation: GangReservation) {
        self.gang_reservations.push(reservation);
    }

    pub(super) fn remove_gang_reservation(&mut self, gang: &GangKey, slot: u32) -> Option<GangReservation> {
        let mut all = self.gang_reservations.iter();
        let position = all.position(|known| known.slot == slot && *known.gang == *gang)?;
        Some(self.gang_reservations.swap_remove(position))
    }

    /// Whether a reservation is assigned to no pod.
    pub(super) fn has_unassigned(&self) -> bool {
        self.gang_reservations.iter().any(|known| known.pod.is_none())
    }

    /// Devices of a pod that disappeared before its end was observed stay taken for a while.
    pub(super) fn quarantine(&mut self, now: Instant, devices: Devices) {
        self.quarantine.push((now, devices));
    }

    /// Ends the quarantine of devices once facts newer than its end are known and the plugin is `ready`: devices that
    /// it still reports as held are taken by that report. The API server has answered without a gap since `steady`;
    /// before, the plugin may not have been able to write. True if any quarantine ended.
    pub(super) fn end_quarantine(
        &mut self,
        now: Instant,
        contact: Instant,
        steady: Instant,
        ready: bool,
    ) -> bool {
        let before = self.quarantine.len();
        let reported = contact.saturating_duration_since(steady) >= QUARANTINE_AFTER_A_GAP;
        self.quarantine.retain(|(since, _)| {
            let over = reported && contact.saturating_duration_since(*since) >= QUARANTINE;
            let long_over = now.saturating_duration_since(*since) >= QUARANTINE_WITHOUT_TRUTH;
            !(over && (ready || long_over))
        });
        self.quarantine.len() != before
    }

    /// Devices of binds and gangs. Those that a member is being bound with are in both, and count once.
    pub(super) fn reserved(&self) -> Vec<&Devices> {
        let gangs = self.gang_reservations.iter().map(|known| &known.devices);
        self.devices_in_binds(None).chain(gangs).collect()
    }

    /// Devices in quarantine.
    pub(super) fn quarantined(&self) -> impl Iterator<Item = &Devices> {
        self.quarantine.iter().map(|(_, devices)| devices)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pods.is_empty()
            && self.binds.is_empty()
            && self.gang_reservations.is_empty()
            && self.quarantine.is_empty()
    }
}
