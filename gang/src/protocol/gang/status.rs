//! What people read of a gang: its phase, the status of its object, and the message for its pods that wait. A message changes only when what
//! it states does: kube-scheduler tries a pod again whenever its message changes. Changes nothing.

use std::sync::Arc;
use std::time::Instant;

use gantry_api::{GangPhase, GangStatus, NodeName};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use super::super::agreement::Resolution;
use super::super::members::{Class, Count};
use super::super::report::ReasonKind;
use super::super::types::{Blocker, Now, Refusal};
use super::{Gang, MAX_DECISION_BYTES, State, planning};
use crate::counted::{are, exist as verb, members};
use crate::integrations::value::truncate;
use crate::key::{GangKey, Integration};
use crate::terms::Repair;

/// The condition of a gang with pods that several integrations claim.
const AMBIGUOUS_MEMBERSHIP: &str = "AmbiguousMembership";
/// The condition of a gang for which something is not permitted.
pub const BLOCKED: &str = "Blocked";

/// Longest reason and message of a status, and longest message for pods, in bytes: kube-scheduler gets the last for every node.
const MAX_REASON: usize = 700;
const MAX_MESSAGE: usize = 4096;
const MAX_POD_MESSAGE: usize = 1024;

/// Since when each condition is as it is.
pub(super) type Transitions = [Option<(bool, i64)>; 5];

/// The state of a gang in words.
struct Summary {
    /// Between the gang's name and the reason.
    joint: &'static str,
    /// In a few words.
    reason: String,
    /// At length.
    message: String,
}

impl Summary {
    /// A reason that continues a sentence about the gang: `waits its turn`.
    fn is(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            joint: " ",
            reason: short(reason.into(), MAX_REASON),
            message: short(message.into(), MAX_MESSAGE),
        }
    }

    /// A reason that stands for itself: `2 of 4 members exist`.
    fn because(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { joint: ": ", ..Self::is(reason, message) }
    }

    /// With more to the reason.
    fn and(self, more: &str) -> Self {
        Self { reason: short(self.reason + more, MAX_REASON), ..self }
    }
}

/// What people see of the state and the members.
pub(super) fn phase(gang: &Gang, now: Instant) -> GangPhase {
    let count = gang.count();
    match &gang.state {
        State::Over { .. } => GangPhase::Finished,
        State::Restarting { .. } => GangPhase::Degraded,
        State::Reserved(barrier) if barrier.has_victims() => GangPhase::Preempting,
        State::Reserved(_) => GangPhase::Reserved,
        State::Committing(_) => GangPhase::Committing,
        State::Decided(decided) => {
            let satisfied = gang.enough(Count::settled);
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
        State::Open if gang.are_independent() => match gang.enough(Count::settled) {
            true => GangPhase::Bound,
            false => GangPhase::Pending,
        },
        State::Open if gang.is_bound_without_slots() => GangPhase::Bound,
        // It needs no reservation: its members ask for no devices, and are scheduled by themselves.
        State::Open if gang.enough(Count::settled) && gang.members().unplaced().is_empty() => {
            GangPhase::Binding
        }
        State::Open if !gang.enough(Count::exist) || gang.waits_for_rest(now) => GangPhase::Pending,
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
        (phase, _) if names_refusal && gang.attempts.refusal().is_some() => ReasonKind::Refused(phase),
        (phase, _) => ReasonKind::Phase(phase),
    }
}

/// The message for pods that wait.
pub(super) fn pod_message(gang: &Gang, now: Instant) -> String {
    let summary = summary(gang, now);
    let mut message = format!("gang {}{}{}", gang.key, summary.joint, summary.reason);
    if let Some(others) = other_integrations(gang) {
        message.push_str(&format!(" (it goes by {}; {others})", gang.key.integration));
    }
    short(message, MAX_POD_MESSAGE)
}

/// The message for a member if its node is not offered.
pub(super) fn node_not_offered(gang: &GangKey, node: &NodeName) -> Arc<str> {
    format!("gang {gang}: node {node}, where it is to go, is not offered").into()
}

/// The message for a member that comes to another node than its slot's.
pub(super) fn reserved_elsewhere(gang: &GangKey, node: &NodeName) -> Arc<str> {
    format!("gang {gang}: the pod's place is on node {node} now").into()
}

/// Why pods of a gang are deleted; `to`: the gang that it yields to.
pub(super) fn restart_note(gang: &GangKey, to: Option<&GangKey>) -> Arc<str> {
    match to {
        Some(to) => format!("gang {gang} gives way to gang {to} and is restarted"),
        None => format!("gang {gang} has lost a member and is restarted"),
    }
    .into()
}

/// How many members arrived within the time limit.
pub(super) fn arrived_in_time(ready: u32, min: u32) -> String {
    format!("{ready} of {} came in time", members(min))
}

/// Why a gang that needs `min` members is refused: `placed` of them take `bytes` in its decision.
pub(super) fn too_large(min: u32, placed: usize, bytes: usize) -> Refusal {
    // Rounded, so that it stays the same wherever it is planned.
    let each = bytes.checked_div(placed).unwrap_or(bytes).div_ceil(10).max(1) * 10;
    let most = MAX_DECISION_BYTES / each;
    let reason = format!(
        "its decision cannot be written: {} members take about {each} bytes each, and {MAX_DECISION_BYTES} bytes, {most} such members, are the most there may be",
        min.max(1)
    );
    let message = format!(
        "{reason}: every reservation is written into the Gang with its devices before the first member is bound, and etcd takes no object above 1.5 MiB; make it several gangs of {most} members or fewer, or give each pod more devices"
    );
    Refusal { reason: reason.into(), message: message.into(), hopeless: true }
}

/// What keeps pods from being removed that have to go, if anything does.
pub(super) fn why_pods_stay(gang: &Gang) -> String {
    let blockers = [Blocker::Removal, Blocker::Budget];
    let why = blockers.iter().filter_map(|blocker| gang.blockers.get(blocker));
    why.map(|why| format!("; {why}")).collect()
}

fn summary(gang: &Gang, now: Instant) -> Summary {
    let count = gang.count();
    let min = gang.min();
    let terms = gang.agreement.working_terms();
    if let Some(terms) = terms.filter(|_| gang.are_independent()) {
        return Summary::is(
            "is no gang: each of its pods goes by itself",
            format!("as {} says", terms.decided_by),
        );
    }
    match phase(gang, now) {
        GangPhase::Pending => pending(gang, now).and(&scheduled_elsewhere(gang)),
        GangPhase::Invalid => invalid(gang),
        GangPhase::Queued if gang.is_kept_gated() => Summary::is(
            "waits until its scheduling gates can be removed",
            gang.blockers.get(&Blocker::Gates).map_or("", |why| why),
        ),
        GangPhase::Queued => match gang.attempts.refusal() {
            None => Summary::is("waits its turn", "it is planned as soon as those before it are"),
            Some(refusal) => Summary::is(refused(refusal), &*refusal.message),
        },
        GangPhase::Backoff => {
            let why = gang.attempts.pause().map_or("", |(_, why)| why);
            Summary::is(
                format!("is tried again soon: {why}"),
                "the wait doubles with every attempt that fails",
            )
        }
        GangPhase::Preempting => match gang.barrier() {
            Some(barrier) if barrier.are_victims_terminating() => Summary::is(
                "waits for pods that are ending",
                "all its victims are terminating, as slowly as their grace periods allow; their devices are kept for it",
            ),
            _ => Summary::is(
                "waits for pods that have to go for it",
                format!("their devices are kept for it{}", why_pods_stay(gang)),
            ),
        },
        GangPhase::Reserved => {
            let ready = count.ready().min(min);
            let message = format!("{ready} of {} {} ready to be bound", members(min), are(min));
            let reason = match count.of(Class::Waiting) {
                0 => "is on its way",
                _ => "has its places",
            };
            Summary::is(reason, message)
        }
        GangPhase::Committing => committing(gang),
        GangPhase::Binding => with_why(
            gang,
            now,
            "is being bound".to_owned(),
            format!("{} of {min} bound{}", count.bound().min(min), ended_well(count)),
        ),
        GangPhase::Bound => bound(gang),
        GangPhase::Degraded => degraded(gang, now),
        GangPhase::Finished => {
            let message = match planning::completed(gang) {
                0 => "it has no members any more".to_owned(),
                ended => format!("{ended} of its members ended well"),
            };
            Summary::is("has ended", message)
        }
    }
}

fn pending(gang: &Gang, now: Instant) -> Summary {
    let count = gang.count();
    let exist = count.exist();
    let back = kept_back(count);
    let terms = match gang.agreement.resolution() {
        Resolution::Terms(terms) => terms,
        Resolution::Unknown(why) => {
            let message = format!("{} {}{back}", members(exist), verb(exist));
            return Summary::because(why.to_string(), message);
        }
        Resolution::Invalid(_) => return invalid(gang),
    };
    if gang.enough(Count::exist) && gang.waits_for_rest(now) {
        let Some(total) = terms.total else {
            return Summary::because(
                format!("{exist} members of several jobs exist"),
                "they are enough; more may come any moment, and then the jobs have one name for two gangs",
            );
        };
        return Summary::because(
            format!("{exist} of {} {}", members(total), verb(total)),
            format!("{} are enough; the rest may come any moment", terms.min),
        );
    }
    let decided_by = format!("as {} says{back}", terms.decided_by);
    if exist >= terms.min {
        let short = terms.by_role.iter().find_map(|(role, min)| {
            let there = gang.members().count_of(role).exist();
            let words = || format!("{there} of {} of role {role} {}", members(*min), verb(*min));
            (there < *min).then(words)
        });
        if let Some(reason) = short {
            return Summary::because(reason, decided_by);
        }
    }
    let mut reason = format!("{exist} of {} {}", members(terms.min), verb(terms.min));
    if let Some(owner) = &terms.unread {
        reason.push_str(&format!(
            "; {owner}, which may start some of its pods before the others, does not exist or may not be read"
        ));
    }
    Summary::because(reason, decided_by)
}

/// How many members other schedulers place, if any.
fn scheduled_elsewhere(gang: &Gang) -> String {
    let by = gang.members().elsewhere();
    by.map(|(by, count)| format!("; scheduled by {by}: {count}")).collect()
}

fn invalid(gang: &Gang) -> Summary {
    let faults: Vec<String> = gang.agreement.faults().map(ToString::to_string).collect();
    let first = faults.first().cloned().unwrap_or_default();
    Summary::is(format!("is not valid: {first}"), faults.join("; "))
}

fn committing(gang: &Gang) -> Summary {
    let refused = match &gang.state {
        State::Committing(commit) => commit.refused(),
        _ => None,
    };
    match refused {
        None => Summary::is("is being decided", "the decision is being written"),
        Some(why) => Summary::is(
            format!("cannot be decided: {why}"),
            "the decision is written again: an earlier write of it may have come through",
        ),
    }
}

fn bound(gang: &Gang) -> Summary {
    let count = gang.count();
    let min = gang.min();
    let settled = count.settled();
    if settled < min {
        let why = match gang.agreement.owner() {
            Some(owner) if gang.agreement.is_owner_finished() => format!("{owner} has ended or is gone"),
            Some(owner) if gang.agreement.is_owner_suspended() => format!("{owner} is suspended"),
            _ => "repair: ignore".to_owned(),
        };
        return Summary::is(
            format!("runs with {settled} of {}", members(min)),
            format!("lost members are not replaced ({why})"),
        );
    }
    let bound = format!("{} bound{}, {min} needed", count.bound(), ended_well(count));
    let waiting = gang.members().unplaced().len();
    if waiting == 0 {
        return Summary::is("is bound", bound);
    }
    let reason = match gang.attempts.refusal() {
        _ if gang.agreement.is_invalid() => {
            let invalid = invalid(gang);
            let reason = format!("is bound; for more members it {}", invalid.reason);
            return Summary::is(reason, invalid.message);
        }
        Some(refusal) => format!("is bound; waits for room for more members: {}", refusal.reason),
        None => "is bound; more members wait their turn".to_owned(),
    };
    Summary::is(reason, format!("{bound}, {waiting} waiting"))
}

/// The words for a decided gang that misses members, with why those that wait have no slot.
fn with_why(gang: &Gang, now: Instant, mut reason: String, mut message: String) -> Summary {
    let pause = gang.attempts.pause().filter(|(until, _)| now < *until);
    if let Some(to) = gang.decided().and_then(|decided| decided.gave_to()) {
        reason.push_str(&format!("; the place of a lost member went to {to}, of higher priority"));
    }
    if gang.members().unplaced().is_empty() {
        // The missing members do not wait for a slot.
    } else if let Some((_, why)) = pause {
        reason.push_str(&format!("; is tried again soon: {why}"));
    } else if let Some(refusal) = gang.attempts.refusal() {
        reason.push_str(&format!("; {}", refused(refusal)));
        message.push_str(&format!("; {}", refusal.message));
    }
    Summary::is(reason, message)
}

fn degraded(gang: &Gang, now: Instant) -> Summary {
    if let State::Restarting { to, .. } = &gang.state {
        let old = gang.members().old_present();
        let mut message = format!("earlier members that are not gone yet: {old}");
        if let Some(to) = to {
            message.push_str(&format!(
                "; it gives way to gang {to}: both had lost members, and each held what the other lacked"
            ));
        }
        message.push_str(&why_pods_stay(gang));
        return Summary::is("is being restarted", message);
    }
    let count = gang.count();
    let missing = gang.missing(Count::settled);
    let kept = gang.slots().lost().count();
    let slots = match (kept, gang.repair()) {
        (0, _) => "no place is kept for them any more".to_owned(),
        (_, Repair::Restart) => "it is restarted".to_owned(),
        (1, _) => "1 place is kept for a replacement".to_owned(),
        (kept, _) => format!("{kept} places are kept for replacements"),
    };
    with_why(
        gang,
        now,
        format!("lacks {missing} of {}", members(gang.min())),
        format!("{} bound{}; {slots}", count.bound(), ended_well(count)),
    )
}

fn refused(refusal: &Refusal) -> String {
    let how = if refusal.hopeless { "cannot fit" } else { "waits for room" };
    format!("{how}: {}", refusal.reason)
}

fn ended_well(count: &Count) -> String {
    match count.of(Class::Completed) {
        0 => String::new(),
        ended => format!(", {ended} ended well"),
    }
}

fn kept_back(count: &Count) -> String {
    let mut more = String::new();
    let foreign = count.of(Class::Foreign);
    if foreign > 0 {
        more.push_str(&format!("; kept back by scheduling gates that Gantry does not remove: {foreign}"));
    }
    let faulty = count.of(Class::Faulty);
    if faulty > 0 {
        more.push_str(&format!("; not valid: {faulty}"));
    }
    more
}

/// At most so many bytes of a text.
fn short(text: String, most: usize) -> String {
    if text.len() <= most {
        return text;
    }
    truncate(text.into(), most).to_string()
}

/// The status of the object, without the decision.
pub(super) fn status(gang: &mut Gang, now: Now) -> GangStatus {
    let summary = summary(gang, now.at);
    let phase = phase(gang, now.at);
    let conditions = conditions(gang, &summary, phase, now.unix);
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
        min: gang.min(),
        members: count.alive() + count.of(Class::Completed),
        bound: count.bound(),
        completed: count.of(Class::Completed),
        domain: gang.domain.to_string(),
        waiting_since: waits.then(|| time(gang.waiting_since)),
        bound_at: gang.bound_at.map(time),
        restarting: matches!(gang.state, State::Restarting { .. }),
        failed_attempts: gang.attempts.failed(),
        decision: None,
        conditions,
        reason: summary.reason,
        message: summary.message,
    }
}

fn conditions(gang: &mut Gang, summary: &Summary, phase: GangPhase, unix: i64) -> Vec<Condition> {
    let (valid, valid_reason, valid_message) = validity(gang);
    let reserved = gang.has_slots() || gang.enough(Count::settled);
    let bound = match gang.state {
        State::Open => gang.enough(Count::began),
        _ => gang.enough(Count::settled),
    };
    let phase = format!("{phase:?}");
    let ambiguous = other_integrations(gang).map(|others| {
        let message = format!("its pods go by {}; {others}", gang.key.integration);
        let reason = "SeveralIntegrations".to_owned();
        (AMBIGUOUS_MEMBERSHIP, true, reason, message)
    });
    let blocked = gang.blockers.iter().next().map(|(blocker, why)| {
        let reason = match blocker {
            Blocker::Gates | Blocker::Removal => "MissingPermission",
            Blocker::Budget => "DisruptionBudget",
        };
        (BLOCKED, true, reason.to_owned(), why.to_string())
    });
    let all = [
        Some(("Valid", valid, valid_reason.to_owned(), valid_message)),
        Some(("Reserved", reserved, phase.clone(), summary.reason.clone())),
        Some(("Bound", bound, phase, summary.reason.clone())),
        ambiguous,
        blocked,
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
            message,
            observed_generation: None,
            reason,
            status: if holds { "True" } else { "False" }.to_owned(),
            type_: kind.to_owned(),
        });
    }
    conditions
}

/// That other integrations claim its pods too, if they do.
fn other_integrations(gang: &Gang) -> Option<String> {
    let others = gang.agreement.other_integrations();
    let others: Vec<&str> = others.map(Integration::as_str).collect();
    let (last, others) = others.split_last()?;
    Some(match others {
        [] => format!("{last} names them too and is passed over"),
        others => format!("{} and {last} name them too and are passed over", others.join(", ")),
    })
}

fn validity(gang: &Gang) -> (bool, &'static str, String) {
    if gang.agreement.is_invalid() {
        return (false, "Invalid", invalid(gang).message);
    }
    let min = gang.min();
    match gang.agreement.resolution() {
        Resolution::Unknown(why) => (false, "Unknown", why.to_string()),
        Resolution::Terms(terms) if terms.min != min => {
            let message = format!(
                "the minimum is {} now and was {min} when it was decided; the new one holds when it is restarted",
                terms.min
            );
            (false, "MinimumChanged", message)
        }
        Resolution::Terms(terms) if terms.repair != gang.repair() => {
            let message = format!(
                "repair is {} now and was {} when it was decided; the new one holds when it is restarted",
                terms.repair.as_str(),
                gang.repair().as_str()
            );
            (false, "RepairChanged", message)
        }
        Resolution::Terms(_) if gang.count().of(Class::Faulty) > 0 => {
            let fault = gang.members().first_fault();
            (false, "InvalidMember", fault.unwrap_or_default())
        }
        Resolution::Terms(terms) => (true, "Valid", format!("as {} says", terms.decided_by)),
        Resolution::Invalid(_) => (false, "Invalid", invalid(gang).message),
    }
}

fn time(unix: i64) -> Time {
    Time(Timestamp::from_second(unix).unwrap_or(Timestamp::UNIX_EPOCH))
}
