//! The state of a gang as the extender has written it to the Gang object, beside the result of planning it now, for
//! commands that only look. The two are never mixed.

use std::borrow::Cow;
use std::sync::Arc;

use gantry_api::placement::ComparedFabric;
use gantry_api::{GangPhase, GangStatus, Reason};
use gantry_gang::protocol::{BLOCKED, GROUP_SCHEDULED, MEMBERS_SLOW};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};

use super::{GangView, MemberView, PlaceView};

/// The state of a gang.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangState {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// What its pods call it.
    pub name: Arc<str>,
    /// Name of its Gang object.
    pub object: String,
    /// The integration by which its pods form a gang.
    pub integration: Cow<'static, str>,
    /// The state that the extender has written; absent if it has written none.
    pub status: Option<ReportedStatus>,
    /// The result of planning it now, in its turn; absent if it is decided or bound.
    pub if_planned_now: Option<Trial>,
    /// What states its size, if known.
    pub decided_by: Option<Arc<str>>,
    /// Members that are useful only together; 0 while that is not known.
    pub min: u32,
    /// Members that exist, or have ended well.
    pub exist: u32,
    /// The highest priority of its members that take devices.
    pub priority: i32,
    /// Since when it waits, in seconds since 1970; absent if it does not.
    pub waiting_since: Option<i64>,
    /// When its minimum was bound, in seconds since 1970.
    pub bound_at: Option<i64>,
    /// Its position in the queue of waiting gangs, from 1; absent if it has a reservation, or does not wait as far as
    /// is known here.
    pub position: Option<usize>,
    /// Its members, by rank, then name.
    pub members: Vec<MemberView>,
    /// Its reservations: decided ones, and those that it would get if it were planned now.
    pub reservations: Vec<PlaceView>,
}

/// The state that the extender has written to the status of the Gang object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedStatus {
    /// Its phase.
    pub phase: GangPhase,
    /// The reason for the phase; absent if another version of Gantry wrote it.
    pub reason: Option<Reason>,
    /// The reason with its facts.
    pub message: String,
    /// The part of the fabric that holds it; empty without a reservation.
    pub domain: String,
    /// The rails that it uses; empty if none were chosen.
    pub rails: String,
    /// Why there: the domains that were compared when it was planned, if any were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared: Option<Arc<ComparedFabric>>,
    /// Failed attempts since it was last bound.
    pub failed_attempts: u32,
    /// An action that is blocked for it, and the remedy.
    pub blocked: Option<String>,
    /// Members that run slower than the rest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow_members: Option<String>,
    /// Why kube-scheduler does not schedule the group, or one of its tree, as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_scheduled: Option<String>,
}

/// The result of planning a gang now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trial {
    /// Its phase after that.
    pub phase: GangPhase,
    /// The reason for the phase.
    pub reason: Reason,
    /// The reason with its facts.
    pub message: String,
    /// The refusal, if it would have no reservation.
    pub refused: Option<String>,
    /// The part of the fabric that would hold it; empty without a reservation.
    pub domain: Arc<str>,
    /// The rails that it would use; empty if none would be chosen.
    pub rails: Arc<str>,
    /// It would have a backfill reservation.
    pub has_backfill_reservation: bool,
}

impl GangState {
    /// The state of a gang. `settled`: it is decided or bound.
    pub(super) fn new(view: GangView, status: Option<&GangStatus>, settled: bool) -> Self {
        let GangView {
            namespace,
            name,
            object,
            integration,
            decided_by,
            phase,
            reason,
            message,
            refused,
            min,
            exist,
            priority,
            waiting_since,
            bound_at,
            position,
            has_nodes_kept,
            domain,
            rails,
            compared: _,
            mut members,
            places,
        } = view;
        for member in &mut members {
            let mut places = places.iter();
            let place = places.find(|place| place.pod.as_ref() == Some(&member.uid));
            if place.is_some_and(|place| !place.decided && !place.bound) {
                // The reservation names the node.
                member.node = None;
            }
        }
        let waits = bound_at.is_none().then_some(waiting_since);
        let by_object = status.map(|status| status.decided_by.as_str());
        let by_object = by_object.filter(|decided_by| !decided_by.is_empty());
        Self {
            namespace,
            name,
            object,
            integration: integration.into(),
            status: status.map(reported),
            if_planned_now: (!settled).then_some(Trial {
                phase,
                reason,
                message,
                refused,
                domain,
                rails,
                has_backfill_reservation: has_nodes_kept,
            }),
            decided_by: decided_by.or_else(|| by_object.map(Arc::from)),
            min: if min > 0 { min } else { status.map_or(0, |status| status.min) },
            exist,
            priority,
            waiting_since: status.map_or(waits, |status| unix(status.waiting_since.as_ref())),
            bound_at: status.map_or(bound_at, |status| unix(status.bound_at.as_ref())),
            position,
            members,
            reservations: places,
        }
    }
}

/// Whether a gang has an undecided reservation.
pub(super) const fn has_place(phase: GangPhase) -> bool {
    matches!(phase, GangPhase::Preempting | GangPhase::Reserved | GangPhase::Committing)
}

fn reported(status: &GangStatus) -> ReportedStatus {
    let message = |type_: &str, state: &str| {
        let holds = |condition: &&Condition| condition.type_ == type_ && condition.status == state;
        status.conditions.iter().find(holds).map(|condition| condition.message.clone())
    };
    ReportedStatus {
        phase: status.phase,
        reason: status.reason,
        message: status.message.clone(),
        domain: status.domain.clone(),
        rails: status.rails.clone(),
        compared: status.compared.clone(),
        failed_attempts: status.failed_attempts,
        blocked: message(BLOCKED, "True"),
        slow_members: message(MEMBERS_SLOW, "True"),
        not_scheduled: message(GROUP_SCHEDULED, "False"),
    }
}

fn unix(time: Option<&Time>) -> Option<i64> {
    time.map(|time| time.0.as_second())
}
