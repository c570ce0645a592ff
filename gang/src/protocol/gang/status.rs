//! The phase of a gang, the cause of it, and the status of its object: computed from its state and members. Changes nothing.

use std::time::Instant;

use gantry_api::{ConditionType, GangPhase, GangStatus, ObjectMessage, PodUid, Reason};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use super::super::agreement::Resolution;
use super::super::decision::StandingDecision;
use super::super::members::{Class, Count, TrackedMember};
use super::super::reasons::{
    Cause, MissingReservations, NoRepair, Refusal, UncountedMembers, Validity, WaitReason,
};
use super::super::report::ReasonKind;
use super::super::types::{Blocker, Moment, Settings};
use super::{Gang, MAX_DECISION_BYTES, State, planning};
use crate::key::Integration;
use crate::terms::{Authority, Fault, Repair};

/// The condition of a gang for which something is not permitted.
pub const BLOCKED: &str = ConditionType::Blocked.as_str();
/// The condition of a gang that kube-scheduler does not schedule as a whole.
pub const GROUP_SCHEDULED: &str = ConditionType::PodGroupScheduled.as_str();
/// The condition of a gang with members that run slower than the rest.
pub const MEMBERS_SLOW: &str = ConditionType::MembersSlow.as_str();

/// PodGroups of a tree that its condition names.
const MAX_LISTED_GROUPS: usize = 4;

/// Members that the status lists as bound without a reservation: the object has to stay below etcd's limit of a request.
const MAX_UNRESERVED: usize = 1_000;

/// Since when each condition is as it is.
pub(super) type Transitions = [Option<(bool, i64)>; 11];

/// What people see of the state and the members.
pub(super) fn phase(gang: &Gang, now: Instant) -> GangPhase {
    let count = gang.count();
    match &gang.state {
        State::Over { .. } => GangPhase::Finished,
        State::Restarting { .. } | State::Awaiting(_) => GangPhase::Degraded,
        State::Reserved(barrier) if barrier.has_victims() => GangPhase::Preempting,
        State::Reserved(_) => GangPhase::Reserved,
        State::Committing(_) => GangPhase::Committing,
        State::Decided(decided) => {
            let satisfied = gang.minimum().is_met(Count::settled);
            let lost = gang.slots().lost().next().is_some();
            if count.alive() == 0 && !lost {
                GangPhase::Finished
            } else if satisfied || decided.was_bound() && !gang.is_repaired() {
                GangPhase::Bound
            } else if decided.was_bound() || lost {
                GangPhase::Degraded
            } else {
                GangPhase::Binding
            }
        }
        State::Open if gang.agreement.is_invalid() => GangPhase::Invalid,
        State::Open if count.alive() == 0 && count.of(Class::Completed) > 0 => GangPhase::Finished,
        State::Open if gang.are_independent() => match gang.minimum().is_met(Count::settled) {
            true => GangPhase::Bound,
            false => GangPhase::Pending,
        },
        State::Open if gang.is_bound_without_slots() => GangPhase::Bound,
        // It needs no reservation: its members ask for no devices, and are scheduled by themselves.
        State::Open if gang.minimum().is_met(Count::settled) && gang.members().unplaced().is_empty() => {
            GangPhase::Binding
        }
        State::Open if !gang.minimum().is_met(Count::exist) || gang.waits_for_rest(now) => GangPhase::Pending,
        State::Open if gang.attempts.is_paused(now) => GangPhase::Backoff,
        State::Open => GangPhase::Queued,
    }
}

/// The kind of the reason that holds for pods that wait.
pub(super) fn reason_kind(gang: &Gang, now: Instant) -> ReasonKind {
    let phase = phase(gang, now);
    let names_refusal =
        matches!(phase, GangPhase::Queued | GangPhase::Binding | GangPhase::Bound | GangPhase::Degraded);
    match (phase, gang.agreement.resolution()) {
        (GangPhase::Pending, Resolution::Unknown(why)) => ReasonKind::Unknown(why.clone()),
        // Siblings show the same count.
        (GangPhase::Pending, _) => {
            let count = gang.count();
            ReasonKind::Pending { exist: count.exist(), withheld: count.withheld() }
        }
        (phase, _) if names_refusal && gang.attempts.refusal().is_some() => ReasonKind::Refused(phase),
        (phase, _) => ReasonKind::Phase(phase),
    }
}

/// Why pods wait.
pub(super) fn wait_reason(gang: &Gang, now: Instant) -> WaitReason {
    cause(gang, now).of_pods(&gang.key, other_integrations(gang).as_deref())
}

/// Why a gang that needs `min` members is refused: `placed` of them take `bytes` in its decision.
pub(super) fn too_large(min: u32, placed: usize, bytes: usize) -> Refusal {
    // Rounded, so that it stays the same wherever it is planned.
    let each = bytes.checked_div(placed).unwrap_or(bytes).div_ceil(10).max(1) * 10;
    Refusal::DecisionTooLarge { members: min.max(1), each, most: MAX_DECISION_BYTES / each }
}

pub(super) fn cause(gang: &Gang, now: Instant) -> Cause {
    let count = gang.count();
    let min = gang.minimum().total;
    let terms = gang.agreement.working_terms();
    if let Some(terms) = terms.filter(|_| gang.are_independent()) {
        return Cause::NotAGang { source: terms.decided_by.clone() };
    }
    let completed = count.of(Class::Completed);
    match phase(gang, now) {
        GangPhase::Pending => pending(gang, now),
        GangPhase::Invalid => Cause::Invalid(faults(gang)),
        GangPhase::Queued if gang.is_kept_gated() => {
            Cause::GatesStay(gang.blockers.why(Blocker::Gates).cloned().unwrap_or_else(|| "".into()))
        }
        GangPhase::Queued => match gang.attempts.refusal() {
            None => Cause::WaitingForTurn,
            Some(refusal) => Cause::Refused(refusal.clone()),
        },
        GangPhase::Backoff => {
            gang.attempts.pause().map_or(Cause::WaitingForTurn, |(_, why)| Cause::Backoff(why.clone()))
        }
        GangPhase::Preempting => match gang.barrier() {
            Some(barrier) if barrier.are_victims_terminating() => Cause::VictimsTerminating,
            _ => Cause::WaitingForVictims { blocked: gang.blockers.of_removal() },
        },
        GangPhase::Reserved => Cause::WaitingForArrival {
            arrived: count.ready().min(min),
            min,
            domain: gang.site.domain.clone(),
        },
        GangPhase::Committing => {
            let rejected = match &gang.state {
                State::Committing(commit) => commit.refused(),
                _ => None,
            };
            rejected.map_or(Cause::WritingDecision, |why| Cause::DecisionRejected(why.clone()))
        }
        GangPhase::Binding => Cause::Binding { bound: count.bound().min(min), min, rest: rest(gang, now) },
        GangPhase::Bound => bound(gang),
        GangPhase::Degraded => degraded(gang, now),
        GangPhase::Finished => Cause::Finished { completed },
    }
}

fn pending(gang: &Gang, now: Instant) -> Cause {
    let count = gang.count();
    // A member exists whether or not something keeps it from arriving.
    let exist = count.exist() + count.withheld();
    let members = gang.members();
    let uncounted = UncountedMembers {
        gated: members.first_gate().map(|gate| (gate.clone(), count.of(Class::Foreign))),
        rejected: members
            .first_rejected()
            .map(|(pod, why)| (pod.clone(), why.clone(), count.of(Class::Rejected))),
        invalid: count.of(Class::Faulty),
        elsewhere: gang.members().elsewhere().map(|(by, count)| (by.into(), count)).collect(),
    };
    let terms = match gang.agreement.resolution() {
        Resolution::Terms(terms) => terms,
        Resolution::Unknown(why) => return Cause::UnknownSize { why: why.clone(), exist, uncounted },
        Resolution::Invalid(_) => return Cause::Invalid(faults(gang)),
    };
    let min = terms.min;
    if gang.minimum().is_met(Count::exist) && gang.waits_for_rest(now) {
        return Cause::WaitingForMoreMembers { exist, total: terms.total, min, uncounted };
    }
    let source = terms.decided_by.clone();
    if exist >= min {
        let groups = gang.minimum().open_groups().map(|quorum| quorum.leaves().into_iter().collect());
        let mut roles = groups.as_ref().unwrap_or(&terms.by_role).iter();
        let short = roles.find_map(|(role, min)| {
            let count = gang.members().count_of(role);
            let exist = count.exist() + count.withheld();
            (exist < *min).then(|| (role.clone(), exist, *min))
        });
        if let Some((role, exist, min)) = short {
            return Cause::WaitingForRole { role, exist, min, source, uncounted };
        }
        if count.withheld() > 0 {
            return Cause::MembersWithheld { exist, min, uncounted };
        }
    }
    Cause::WaitingForMembers { exist, min, source, unread: terms.unread.clone(), uncounted }
}

fn faults(gang: &Gang) -> Vec<Fault> {
    gang.agreement.faults().cloned().collect()
}

fn bound(gang: &Gang) -> Cause {
    let count = gang.count();
    let (min, settled, bound) = (gang.minimum().total, count.settled(), count.bound());
    if settled < min {
        let why = match (gang.agreement.finished_owner(), gang.agreement.suspended_owner()) {
            (Some(owner), _) => NoRepair::OwnerFinished(owner.clone()),
            (None, Some(owner)) => NoRepair::OwnerSuspended(owner.clone()),
            (None, None) => NoRepair::Policy,
        };
        return Cause::BelowMinimum { settled, min, why };
    }
    let waiting = gang.members().unplaced().len();
    if waiting == 0 {
        return Cause::Bound { bound, min, completed: count.of(Class::Completed) };
    }
    let rest = match gang.attempts.refusal() {
        _ if gang.agreement.is_invalid() => MissingReservations::Invalid(faults(gang)),
        Some(refusal) => MissingReservations::Refused(refusal.clone()),
        None => MissingReservations::Turn,
    };
    Cause::WaitingForSurplus { bound, waiting, rest }
}

/// Why missing members of a decided gang have no reservation.
fn rest(gang: &Gang, now: Instant) -> MissingReservations {
    let pause = gang.attempts.pause().filter(|(until, _)| now < *until);
    match (pause, gang.attempts.refusal()) {
        _ if gang.members().unplaced().is_empty() => MissingReservations::None,
        (Some((_, why)), _) => MissingReservations::Backoff(why.clone()),
        (None, Some(refusal)) => MissingReservations::Refused(refusal.clone()),
        (None, None) => MissingReservations::None,
    }
}

fn degraded(gang: &Gang, now: Instant) -> Cause {
    if let Some(succession) = gang.succession() {
        let (kept, exist) = (gang.slots().len(), gang.count().exist());
        return Cause::OwnerRestarts { owner: succession.owner().clone(), kept, exist };
    }
    if let State::Restarting { to, .. } = &gang.state {
        let old = gang.members().old_present();
        return Cause::Restarting { old, to: to.clone(), blocked: gang.blockers.of_removal() };
    }
    let count = gang.count();
    Cause::MembersLost {
        missing: gang.minimum().missing(Count::settled),
        min: gang.minimum().total,
        bound: count.bound(),
        completed: count.of(Class::Completed),
        kept: gang.slots().lost().count(),
        restarts: gang.repair() == Repair::Restart,
        gave_to: gang.decided().and_then(StandingDecision::gave_to).cloned(),
        rest: rest(gang, now),
    }
}

/// The status of the object, without the decision.
pub(super) fn status(gang: &mut Gang, now: Moment, settings: &Settings) -> GangStatus {
    let phase = phase(gang, now.at);
    let kept_until = gang.succession_ends_at(now, settings);
    let (reason, message) = match (cause(gang, now.at), kept_until) {
        (cause, Some(until)) => cause.of_gang_until(until),
        (cause, None) => cause.of_gang(),
    };
    let conditions = conditions(gang, (reason, &message), now.unix);
    let message = match unscheduled(gang) {
        Some(why) => ObjectMessage::new(format!("{message}; {why}")).into(),
        None => message,
    };
    let count = gang.count();
    // The terms that hold: a pod that contradicts a gang which is decided changes nothing of it.
    let terms = match &gang.state {
        State::Decided(_) => gang.agreement.working_terms(),
        _ => gang.agreement.resolved(),
    };
    let waits = !matches!(phase, GangPhase::Bound | GangPhase::Finished);
    GangStatus {
        phase,
        integration: gang.key.integration.as_str().to_owned(),
        incarnation: gang.key.incarnation.to_string(),
        name: gang.key.name.to_string(),
        decided_by: terms.map(|terms| terms.decided_by.to_string()).unwrap_or_default(),
        min: gang.minimum().total,
        members: count.alive() + count.of(Class::Completed),
        bound: count.bound(),
        completed: count.of(Class::Completed),
        completed_by_role: gang.members().completed_by_role(),
        domain: gang.site.domain.to_string(),
        rails: gang.site.rails.to_string(),
        compared: gang.site.compared.clone(),
        waiting_since: waits.then(|| time(gang.waiting_since)),
        bound_at: gang.bound_at.map(time),
        restarting: matches!(gang.state, State::Restarting { .. }),
        continuation: gang.succession().map(|succession| succession.continuation(kept_until)),
        failed_attempts: gang.attempts.failed(),
        unreserved: unreserved(gang),
        decision: None,
        conditions,
        reason: Some(reason),
        message,
    }
}

/// Members that neither a reservation nor a grant shows to be such.
fn unreserved(gang: &Gang) -> Vec<PodUid> {
    let counts = |member: &TrackedMember| {
        let pod = member.pod();
        let began = matches!(gang.members().class(member), Class::Bound | Class::Completed);
        began && member.slot().is_none() && pod.shape.is_some() && pod.holds.is_empty()
    };
    let mut uids = gang.members().uids(counts);
    uids.truncate(MAX_UNRESERVED);
    uids
}

fn conditions(gang: &mut Gang, now: (Reason, &str), unix: i64) -> Vec<Condition> {
    let validity = validity(gang);
    let valid = validity.holds();
    let (valid_reason, valid_message) = validity.state();
    let reserved = gang.has_slots() || gang.minimum().is_met(Count::settled);
    let bound = match gang.state {
        State::Open => gang.minimum().is_met(Count::began),
        _ => gang.minimum().is_met(Count::settled),
    };
    let (reason, message) = (now.0, || now.1.to_owned());
    let ambiguous = other_integrations(gang).map(|others| {
        let message = format!("integration {}; {others}", gang.key.integration);
        (ConditionType::AmbiguousMembership, true, Reason::SeveralIntegrations, message)
    });
    let blocked = gang.blockers.first().map(|(blocker, why)| {
        let reason = match blocker {
            Blocker::Gates | Blocker::Removal => Reason::MissingPermission,
            Blocker::Budget => Reason::DisruptionBudget,
        };
        (ConditionType::Blocked, true, reason, why.to_string())
    });
    let all = [
        Some((ConditionType::Valid, valid, valid_reason, valid_message)),
        Some((ConditionType::Reserved, reserved, reason, message())),
        Some((ConditionType::Bound, bound, reason, message())),
        spares(gang).map(|(holds, reason, message)| (ConditionType::Spares, holds, reason, message)),
        ambiguous,
        blocked,
        unscheduled(gang)
            .map(|message| (ConditionType::PodGroupScheduled, false, Reason::GroupNotScheduled, message)),
        tree(gang).map(|message| (ConditionType::CompositePodGroup, true, Reason::PlacedTogether, message)),
        rollout(gang).map(|message| (ConditionType::Rollout, true, Reason::RevisionWaits, message)),
        gang.is_awaiting().then(|| (ConditionType::ReservationKept, true, Reason::OwnerRestarts, message())),
        gang.slow_members
            .as_ref()
            .map(|members| (ConditionType::MembersSlow, true, Reason::MemberSlow, members.to_string())),
    ];
    let mut conditions = Vec::with_capacity(all.len());
    for (since, condition) in gang.transitions.iter_mut().zip(all) {
        let Some((kind, holds, reason, message)) = condition else {
            *since = None;
            continue;
        };
        let unchanged = since.filter(|(before, _)| *before == holds);
        let (_, changed) = *since.insert(unchanged.unwrap_or((holds, unix)));
        conditions.push(Condition {
            last_transition_time: time(changed),
            message: ObjectMessage::new(message).into(),
            observed_generation: None,
            reason: reason.to_string(),
            status: if holds { "True" } else { "False" }.to_owned(),
            type_: kind.to_string(),
        });
    }
    conditions
}

/// How many spare reservations it has of those that it asks for, if any, while it has reservations.
fn spares(gang: &Gang) -> Option<(bool, Reason, String)> {
    let wanted = gang.spares_wanted().filter(|wanted| *wanted > 0 && gang.has_slots())?;
    let have = gang.slots().spares().len();
    let is_lacking = gang.members().roles_with_slots().any(|role| gang.spares_of(role) < wanted);
    let of = match gang.members().roles_with_slots().count() {
        0 | 1 => wanted.to_string(),
        roles => format!("{} ({wanted} for each of {roles} roles)", wanted.saturating_mul(roles)),
    };
    let kept = format!("{have} of {of} spare reservations are kept for replacements of members");
    Some(match is_lacking {
        false => (true, Reason::SparesReserved, kept),
        true => {
            let more = "the gang does not wait for the others, which are planned once devices come free";
            (false, Reason::SparesMissing, format!("{kept}; {more}"))
        }
    })
}

/// Why kube-scheduler does not schedule the group, or one of its tree, as the condition of that states, while it is not bound.
fn unscheduled(gang: &Gang) -> Option<String> {
    let (owner, why) = gang.agreement.unscheduled().filter(|_| !gang.minimum().is_met(Count::settled))?;
    Some(format!("kube-scheduler reports of {owner}: {why}"))
}

/// That it is a tree of groups, and how many of their pods are there, if it is one. The first groups are named.
fn tree(gang: &Gang) -> Option<String> {
    let terms = gang.agreement.working_terms()?;
    let leaves = terms.quorum.as_ref()?.leaves();
    let (owner, facts) = gang.agreement.declaring_owner()?;
    let mut groups: Vec<String> = leaves
        .iter()
        .take(MAX_LISTED_GROUPS)
        .map(|(role, min)| {
            let count = gang.members().count_of(role);
            format!("{role} has {} of {min} pods", count.exist() + count.withheld())
        })
        .collect();
    if leaves.len() > MAX_LISTED_GROUPS {
        groups.push(format!("{} more", leaves.len() - MAX_LISTED_GROUPS));
    }
    let needed = facts.min.unwrap_or(1);
    Some(format!("{owner} needs {needed} of its groups, each as a whole: {}", groups.join(", ")))
}

/// That members of the next revision wait, if they do.
fn rollout(gang: &Gang) -> Option<String> {
    gang.decided()?;
    let waiting = planning::next_revision(gang).len();
    (waiting > 0).then(|| {
        let (members, wait) = match waiting {
            1 => ("1 member".to_owned(), "waits"),
            waiting => (format!("{waiting} members"), "wait"),
        };
        format!(
            "{members} of the next revision of a Deployment or StatefulSet {wait}, and get devices together; members that a rollout creates later are placed by themselves"
        )
    })
}

/// That other integrations claim its pods too, if they do.
fn other_integrations(gang: &Gang) -> Option<String> {
    let others = gang.agreement.other_integrations();
    let others: Vec<&str> = others.map(Integration::as_str).collect();
    let (last, others) = others.split_last()?;
    Some(match others {
        [] => format!("{last} names its pods too and is ignored"),
        others => format!("{} and {last} name its pods too and are ignored", others.join(", ")),
    })
}

fn validity(gang: &Gang) -> Validity {
    if gang.agreement.is_invalid() {
        return Validity::Invalid(faults(gang));
    }
    if gang.count().alive() == 0 && gang.has_begun() {
        // Nothing states its size any more, and nothing has to.
        return Validity::Ended;
    }
    let (min, repair) = (gang.minimum().total, gang.repair());
    match gang.agreement.resolution() {
        Resolution::Unknown(why) => Validity::Unknown(why.clone()),
        Resolution::Terms(terms) if terms.min != min => {
            let by_object = terms.authority == Authority::Object;
            Validity::MinimumChanged { from: min, to: terms.min, by_object }
        }
        Resolution::Terms(terms) if terms.repair != repair => {
            Validity::RepairChanged { from: repair.as_str(), to: terms.repair.as_str() }
        }
        Resolution::Terms(_) if gang.count().of(Class::Faulty) > 0 => {
            Validity::InvalidMember(gang.members().first_fault().unwrap_or_default())
        }
        Resolution::Terms(terms) if !terms.lowered.is_empty() => Validity::Lowered(terms.lowered.clone()),
        Resolution::Terms(terms) => Validity::Valid { source: terms.decided_by.clone() },
        Resolution::Invalid(_) => Validity::Invalid(faults(gang)),
    }
}

pub(super) fn time(unix: i64) -> Time {
    Time(Timestamp::from_second(unix).unwrap_or(Timestamp::UNIX_EPOCH))
}
