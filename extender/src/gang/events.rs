//! Events of gangs, on the Gang and on its pods. Bounded: an Event that cannot be written in time is dropped, because the Gang's status
//! states the same.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{Decision, GangPhase, GangStatus, PodUid, Reason};
use gantry_gang::GangKey;
use gantry_gang::counted::{are, members as of_members};
use gantry_runtime::events::{EventWriter, Message};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Client;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::objects::{Name, Objects};
use crate::event;
use crate::metrics::{Metrics, Outcome};

/// The condition of a gang that several integrations name.
const AMBIGUOUS_MEMBERSHIP: &str = "AmbiguousMembership";
/// The condition whether the terms of a gang are valid.
const VALID: &str = "Valid";
/// Events that wait to be written.
const WAITING: usize = 1024;
/// Events written at once: those of the members of a large gang.
const BURST: u32 = 1024;
/// Events written per second after those.
const PER_SECOND: u32 = 20;
/// How long an Event waits for its gang's object.
const OBJECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of the checks whether those objects are there.
const LOOK: Duration = Duration::from_secs(1);

/// What a message is about.
#[derive(Debug, Clone, PartialEq, Eq)]
enum EventTarget {
    Gang(Name),
    Pod { namespace: Arc<str>, name: Arc<str>, uid: PodUid },
}

/// Queues messages.
#[derive(Debug, Clone)]
pub struct Events(Sender<(EventTarget, Message)>);

/// The receiving end of [`Events`].
#[derive(Debug)]
pub struct Mailbox(Receiver<(EventTarget, Message)>);

impl Events {
    /// A queue of messages.
    pub fn new() -> (Self, Mailbox) {
        let (sender, receiver) = channel(WAITING);
        (Self(sender), Mailbox(receiver))
    }

    /// Records the difference between two statuses of a gang.
    pub(super) fn gang_moved(&self, gang: &GangKey, before: Option<&GangStatus>, now: &GangStatus) {
        if let Some(message) = message(before, now) {
            self.gang(gang, message);
        }
        if let Some(message) = kept_over_restart(before, now) {
            self.gang(gang, message);
        }
        if let Some(message) = lowered(before, now) {
            self.gang(gang, message);
        }
        let ineffective = ineffective(before, now);
        if let Some(message) = &ineffective {
            self.gang(gang, message.clone());
        }
        for message in ambiguous(before, now).into_iter().chain(ineffective) {
            for (name, uid) in members(now) {
                self.pod(&gang.namespace, &name, &uid, message.clone());
            }
        }
    }

    /// Records an Event of a gang.
    pub(crate) fn gang(&self, gang: &GangKey, message: Message) {
        let name = Name { namespace: Arc::clone(&gang.namespace), name: gang.object_name().into() };
        self.queue(EventTarget::Gang(name), message);
    }

    /// Records an Event of a pod.
    pub(crate) fn pod(&self, namespace: &Arc<str>, name: &Arc<str>, uid: &PodUid, message: Message) {
        let about =
            EventTarget::Pod { namespace: Arc::clone(namespace), name: Arc::clone(name), uid: uid.clone() };
        self.queue(about, message);
    }

    fn queue(&self, about: EventTarget, message: Message) {
        // If the queue is full the message is dropped: the status states the same.
        let _ = self.0.try_send((about, message));
    }
}

#[cfg(test)]
impl Mailbox {
    /// Reason and note of what has come so far.
    pub(super) fn taken(&mut self) -> Vec<(&'static str, String)> {
        std::iter::from_fn(|| self.0.try_recv().ok())
            .map(|(_, message)| (message.reason.as_str(), message.note.into()))
            .collect()
    }
}

/// The Event of a change of status: only steps have one, counts do not.
fn message(before: Option<&GangStatus>, now: &GangStatus) -> Option<Message> {
    let phase = before.map(|before| before.phase);
    let again = phase == Some(now.phase);
    let same_reason = again && before.is_some_and(|before| before.reason == now.reason);
    let same_message = again && before.is_some_and(|before| before.message == now.message);
    let event = |reason, warning, note: String| Some(event::message(reason, warning, note));
    let status = |reason, warning| event(reason, warning, now.message.clone());
    match now.phase {
        GangPhase::Reserved if !again => {
            event(Reason::GangReserved, false, format!("{}{}", now.message, why_there(now)))
        }
        // It was decided before its reservation was visible.
        GangPhase::Binding if !phase.is_some_and(has_places) && !now.domain.is_empty() => {
            let note = format!("devices are reserved in {}{}", place(now), why_there(now));
            event(Reason::GangReserved, false, note)
        }
        GangPhase::Bound
            if phase.is_some_and(|phase| phase < GangPhase::Bound || phase == GangPhase::Degraded) =>
        {
            let again = if phase == Some(GangPhase::Degraded) { "whole again: " } else { "" };
            // Members without devices are on any node that kube-scheduler chose.
            let subset = match &now.decision {
                Some(decision) if held(decision) < now.bound => ", those with devices",
                _ => "",
            };
            let (all, verb) = (of_members(now.members), are(now.members));
            let note = format!("{again}{} of {all} {verb} bound{subset} in {}", now.bound, place(now));
            event(Reason::GangBound, false, note)
        }
        GangPhase::Queued | GangPhase::Backoff if !same_reason => status(Reason::GangWaiting, false),
        GangPhase::Invalid if !same_message => status(Reason::GangInvalid, true),
        GangPhase::Preempting if !again => status(Reason::Preempting, false),
        GangPhase::Degraded if !again && now.continuation.is_none() => status(Reason::MemberLost, true),
        GangPhase::Degraded if now.restarting && !before.is_some_and(|before| before.restarting) => {
            status(Reason::GangRestarting, true)
        }
        _ => None,
    }
}

/// Once, when a gang is bound: another integration names its members too. The message of waiting members has this.
fn ambiguous(before: Option<&GangStatus>, now: &GangStatus) -> Option<Message> {
    let reported = before.is_none_or(is_bound) || !is_bound(now);
    let condition = condition_of(now, AMBIGUOUS_MEMBERSHIP).filter(|_| !reported)?;
    Some(event::message(
        Reason::AmbiguousMembership,
        false,
        format!("gang {}: {}", now.name, condition.message),
    ))
}

/// Reservations are kept while the owner creates all members again, or no longer.
fn kept_over_restart(before: Option<&GangStatus>, now: &GangStatus) -> Option<Message> {
    let was_kept = before.is_some_and(|before| before.continuation.is_some());
    match (was_kept, &now.continuation) {
        (false, Some(_)) => Some(event::message(Reason::ReservationKept, false, now.message.clone())),
        // The members that take them have an Event of their own.
        (true, None) if !has_places(now.phase) && now.phase != GangPhase::Bound => {
            Some(event::message(Reason::ReservationReleased, false, now.message.clone()))
        }
        _ => None,
    }
}

/// A limit of the operator lowers what the gang asks for.
fn lowered(before: Option<&GangStatus>, now: &GangStatus) -> Option<Message> {
    let lowers = |valid: &&Condition| valid.reason == Reason::RequestLowered.as_str();
    let valid = condition_of(now, VALID).filter(lowers)?;
    let known = before.and_then(|before| condition_of(before, VALID)).filter(lowers);
    let is_new = known.is_none_or(|known| known.message != valid.message);
    is_new.then(|| event::message(Reason::RequestLowered, true, valid.message.clone()))
}

/// The terms of a bound gang have changed, which has no effect. The reason of waiting gangs has this.
fn ineffective(before: Option<&GangStatus>, now: &GangStatus) -> Option<Message> {
    let valid = condition_of(now, VALID).filter(|valid| valid.status == "False" && is_bound(now))?;
    let known = before.and_then(|before| condition_of(before, VALID));
    // A fault that was not known at the bind is not reported.
    let reported = known.is_none_or(|known| known.status == "False" && known.message == valid.message);
    (!reported && valid.reason != Reason::UnknownSize.as_str()).then(|| {
        event::message(
            Reason::GangInvalid,
            true,
            format!("gang {} goes on as it is: {}", now.name, valid.message),
        )
    })
}

fn is_bound(status: &GangStatus) -> bool {
    status.phase >= GangPhase::Bound
}

fn condition_of<'s>(status: &'s GangStatus, kind: &str) -> Option<&'s Condition> {
    let mut conditions = status.conditions.iter();
    conditions.find(|condition| condition.type_ == kind)
}

/// The members that have a reservation.
fn members(status: &GangStatus) -> impl Iterator<Item = (Arc<str>, PodUid)> {
    let slots = status.decision.iter().flat_map(|decision| &decision.reservations);
    slots.filter_map(|slot| Some((slot.pod_name.as_str().into(), slot.pod.clone()?)))
}

/// Whether a gang in this phase has had the Event of its reservation.
fn has_places(phase: GangPhase) -> bool {
    matches!(phase, GangPhase::Reserved | GangPhase::Committing | GangPhase::Binding)
}

/// Members that have a reservation.
fn held(decision: &Decision) -> u32 {
    let slots = decision.reservations.iter().filter(|slot| slot.pod.is_some());
    u32::try_from(slots.count()).unwrap_or(u32::MAX)
}

/// A second sentence: why the gang is in its part of the fabric.
fn why_there(status: &GangStatus) -> String {
    status.compared.as_ref().map_or_else(String::new, |compared| format!(". {compared}"))
}

fn place(status: &GangStatus) -> &str {
    match status.domain.as_str() {
        "" => "the cluster",
        domain => domain,
    }
}

/// Events of gangs that have no object yet: by gang, the last of each reason in order of arrival, and when they are dropped.
#[derive(Debug, Default)]
struct AwaitingObject(BTreeMap<Name, (Vec<Message>, Instant)>);

impl AwaitingObject {
    /// Keeps a message. There are few reasons, so a gang has few messages.
    fn add(&mut self, name: Name, message: Message, until: Instant) {
        if self.0.len() >= WAITING && !self.0.contains_key(&name) {
            return;
        }
        let (messages, end) = self.0.entry(name).or_insert_with(|| (Vec::new(), until));
        messages.retain(|known| known.reason != message.reason);
        messages.push(message);
        *end = until;
    }

    /// The gangs with messages.
    fn names(&self) -> impl Iterator<Item = &Name> {
        self.0.keys()
    }

    /// Takes the messages of a gang.
    fn take(&mut self, name: &Name) -> Vec<Message> {
        self.0.remove(name).map(|(messages, _)| messages).unwrap_or_default()
    }

    /// Drops messages that are due: the object was never made, or is gone, and the next one of the name is another gang.
    fn expire(&mut self, now: Instant) {
        self.0.retain(|_, (_, until)| now < *until);
    }
}

/// Writes Events until `shutdown`.
pub async fn run(
    client: Client,
    objects: Arc<Objects>,
    mut mailbox: Mailbox,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) {
    let mut awaiting = AwaitingObject::default();
    let mut writer = EventWriter::new(event::recorder(client), BURST, PER_SECOND);
    loop {
        let look = Instant::now() + LOOK;
        let until = writer.due().map_or(look, |due| due.min(look));
        let received = tokio::time::timeout_at(until, mailbox.0.recv());
        let Some(received) = shutdown.run_until_cancelled(received).await else {
            return;
        };
        match received {
            Ok(None) => return,
            Ok(Some((EventTarget::Gang(name), message))) => {
                awaiting.add(name, message, Instant::now() + OBJECT_TIMEOUT);
            }
            Ok(Some((EventTarget::Pod { namespace, name, uid }, message))) => {
                let pod = event::pod(&namespace, &name, uid.as_str());
                writer.write(pod, message).await;
            }
            Err(_) => {}
        }
        writer.retry().await;
        let here: Vec<(Name, String)> = awaiting
            .names()
            .filter_map(|name| Some((name.clone(), objects.get(name)?.uid.to_string())))
            .collect();
        for (name, uid) in here {
            for message in awaiting.take(&name) {
                let gang = event::gang(&name.namespace, &name.name, &uid);
                writer.write(gang, message).await;
            }
        }
        awaiting.expire(Instant::now());
        let (published, failed) = writer.take_counts();
        for (outcome, count) in [("published", published), ("failed", failed)] {
            metrics.events.get_or_create(&Outcome { outcome }).inc_by(count);
        }
    }
}

#[cfg(test)]
mod tests;
