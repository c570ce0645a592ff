//! What people are told of gangs as it happens: Events on the Gang and on pods, in words of members and GPUs. Bounded:
//! what cannot be written in time is left out, for the Gang's status says the same.

mod early;
mod writer;

use std::sync::Arc;
use std::time::Duration;

use gantry_api::{Decision, GangPhase, GangStatus, PodUid};
use gantry_gang::GangKey;
use gantry_gang::counted::{are, members as of_members};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Client;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::objects::{Name, Objects};
use crate::event::{Message, Regarding, event};
use crate::metrics::Metrics;
use early::Early;
use writer::Writer;

/// The condition of a gang whose pods several conventions name.
const AMBIGUOUS_MEMBERSHIP: &str = "AmbiguousMembership";
/// The condition that tells whether what is said of a gang holds.
const VALID: &str = "Valid";
/// Events that wait to be written.
const WAITING: usize = 1024;
/// How long an Event waits for its gang's object.
const EARLY: Duration = Duration::from_secs(60);
/// So often it is looked whether objects are there for which Events wait.
const LOOK: Duration = Duration::from_secs(1);

/// What a message is about.
#[derive(Debug, Clone, PartialEq, Eq)]
enum About {
    Gang(Name),
    Pod {
        namespace: Arc<str>,
        name: Arc<str>,
        uid: PodUid,
    },
}

/// Where messages go.
#[derive(Debug, Clone)]
pub struct Events(Sender<(About, Message)>);

/// The other end.
#[derive(Debug)]
pub struct Mailbox(Receiver<(About, Message)>);

impl Events {
    /// A way for messages.
    pub fn new() -> (Self, Mailbox) {
        let (sender, receiver) = channel(WAITING);
        (Self(sender), Mailbox(receiver))
    }

    /// A gang has another status.
    pub(super) fn gang_moved(&self, gang: &GangKey, before: Option<&GangStatus>, now: &GangStatus) {
        if let Some(message) = message(before, now) {
            self.gang(gang, message);
        }
        let unheeded = unheeded(before, now);
        if let Some(message) = &unheeded {
            self.gang(gang, message.clone());
        }
        for message in contested(before, now).into_iter().chain(unheeded) {
            for (name, uid) in members(now) {
                self.pod(&gang.namespace, &name, &uid, message.clone());
            }
        }
    }

    /// Tells of a gang.
    pub(super) fn gang(&self, gang: &GangKey, message: Message) {
        let name = Name {
            namespace: Arc::clone(&gang.namespace),
            name: gang.object_name().into(),
        };
        self.tell(About::Gang(name), message);
    }

    /// Tells of a pod.
    pub(crate) fn pod(&self, namespace: &Arc<str>, name: &Arc<str>, uid: &PodUid, message: Message) {
        let about = About::Pod {
            namespace: Arc::clone(namespace),
            name: Arc::clone(name),
            uid: uid.clone(),
        };
        self.tell(about, message);
    }

    fn tell(&self, about: About, message: Message) {
        // Full: the status says it too.
        let _ = self.0.try_send((about, message));
    }
}

#[cfg(test)]
impl Mailbox {
    /// Reason and note of what has come so far.
    pub(super) fn taken(&mut self) -> Vec<(&'static str, String)> {
        std::iter::from_fn(|| self.0.try_recv().ok())
            .map(|(_, message)| (message.reason, message.note))
            .collect()
    }
}

/// What there is to tell when a gang's status changes: only steps, not every count.
fn message(before: Option<&GangStatus>, now: &GangStatus) -> Option<Message> {
    let phase = before.map(|before| before.phase);
    let same_words = before.is_some_and(|before| before.reason == now.reason);
    let again = phase == Some(now.phase);
    let say = |reason, warning, note: String| {
        let note = joined(note, &now.message);
        Some(Message {
            reason,
            warning,
            note,
        })
    };
    match now.phase {
        GangPhase::Reserved if !again => {
            say("GangReserved", false, format!("its places are in {}", place(now)))
        }
        // It was decided before anybody saw it planned.
        GangPhase::Binding if !phase.is_some_and(has_places) && !now.domain.is_empty() => {
            say("GangReserved", false, format!("its places are in {}", place(now)))
        }
        GangPhase::Bound
            if phase.is_some_and(|phase| phase < GangPhase::Bound || phase == GangPhase::Degraded) =>
        {
            let again = if phase == Some(GangPhase::Degraded) {
                "whole again: "
            } else {
                ""
            };
            // Others are wherever kube-scheduler found room for them.
            let whose = match &now.decision {
                Some(decision) if held(decision) < now.bound => ", those with devices",
                _ => "",
            };
            let (all, verb) = (of_members(now.members), are(now.members));
            let note = format!(
                "{again}{} of {all} {verb} bound{whose} in {}",
                now.bound,
                place(now)
            );
            Some(Message {
                reason: "GangBound",
                warning: false,
                note,
            })
        }
        GangPhase::Queued | GangPhase::Backoff if !(again && same_words) => {
            say("GangWaiting", false, now.reason.clone())
        }
        GangPhase::Invalid if !(again && same_words) => say("GangInvalid", true, now.reason.clone()),
        GangPhase::Preempting if !again => say("Preempting", false, now.reason.clone()),
        GangPhase::Degraded if !again => say("MemberLost", true, now.reason.clone()),
        GangPhase::Degraded if now.restarting && !before.is_some_and(|before| before.restarting) => {
            say("GangRestarting", true, now.reason.clone())
        }
        _ => None,
    }
}

/// Its members are told once, when they are bound, that another convention names them too. Those that wait read it in
/// why they do.
fn contested(before: Option<&GangStatus>, now: &GangStatus) -> Option<Message> {
    let told = before.is_none_or(is_bound) || !is_bound(now);
    let condition = condition_of(now, AMBIGUOUS_MEMBERSHIP).filter(|_| !told)?;
    Some(Message {
        reason: "AmbiguousMembership",
        warning: false,
        note: format!("gang {}: {}", now.name, condition.message),
    })
}

/// What is said of a gang that is bound contradicts what it was bound by, and changes nothing. Gangs that wait say so
/// in why they do.
fn unheeded(before: Option<&GangStatus>, now: &GangStatus) -> Option<Message> {
    let valid = condition_of(now, VALID).filter(|valid| valid.status == "False" && is_bound(now))?;
    let known = before.and_then(|before| condition_of(before, VALID));
    // What was not known when it was bound is no news.
    let told = known.is_none_or(|known| known.status == "False" && known.message == valid.message);
    (!told && valid.reason != "Unknown").then(|| Message {
        reason: "GangInvalid",
        warning: true,
        note: format!("gang {} goes on as it is: {}", now.name, valid.message),
    })
}

fn is_bound(status: &GangStatus) -> bool {
    status.phase >= GangPhase::Bound
}

fn condition_of<'s>(status: &'s GangStatus, kind: &str) -> Option<&'s Condition> {
    let mut conditions = status.conditions.iter();
    conditions.find(|condition| condition.type_ == kind)
}

/// The members that have a place.
fn members(status: &GangStatus) -> impl Iterator<Item = (Arc<str>, PodUid)> {
    let slots = status.decision.iter().flat_map(|decision| &decision.reservations);
    slots.filter_map(|slot| Some((slot.pod_name.as_str().into(), slot.pod.clone()?)))
}

/// What is said in few words and at length, as one. The message often begins with what the few words end with: that is
/// said once.
fn joined(note: String, message: &str) -> String {
    if message.is_empty() {
        return note;
    }
    let repeated = note.match_indices(": ").map(|(at, colon)| at + colon.len());
    let repeated = repeated.into_iter().find(|at| message.starts_with(&note[*at..]));
    match repeated {
        Some(at) => format!("{}{message}", &note[..at]),
        None => format!("{note}: {message}"),
    }
}

/// Whether a gang in this phase was told to have its places.
fn has_places(phase: GangPhase) -> bool {
    matches!(
        phase,
        GangPhase::Reserved | GangPhase::Committing | GangPhase::Binding
    )
}

/// Members that have places.
fn held(decision: &Decision) -> u32 {
    let slots = decision.reservations.iter().filter(|slot| slot.pod.is_some());
    u32::try_from(slots.count()).unwrap_or(u32::MAX)
}

fn place(status: &GangStatus) -> &str {
    match status.domain.as_str() {
        "" => "the cluster",
        domain => domain,
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
    let mut early = Early::default();
    let mut writer = Writer::new(client, metrics);
    loop {
        let look = Instant::now() + LOOK;
        let until = writer.due().map_or(look, |due| due.min(look));
        let received = tokio::time::timeout_at(until, mailbox.0.recv());
        let Some(received) = shutdown.run_until_cancelled(received).await else {
            return;
        };
        match received {
            Ok(None) => return,
            Ok(Some((About::Gang(name), message))) => {
                early.add(name, message, Instant::now() + EARLY);
            }
            Ok(Some((about @ About::Pod { .. }, message))) => {
                writer.write(event_about(&about, "", message)).await;
            }
            Err(_) => {}
        }
        writer.again().await;
        let here: Vec<(Name, String)> = early
            .names()
            .filter_map(|name| Some((name.clone(), objects.get(name)?.uid.to_string())))
            .collect();
        for (name, uid) in here {
            for message in early.take(&name) {
                writer
                    .write(event_about(&About::Gang(name.clone()), &uid, message))
                    .await;
            }
        }
        early.forget(Instant::now());
    }
}

fn event_about(about: &About, uid: &str, message: Message) -> Event {
    let regarding = match about {
        About::Gang(Name { namespace, name }) => Regarding::gang(namespace, name, uid),
        About::Pod { namespace, name, uid } => Regarding::pod(namespace, name, uid.as_str()),
    };
    event(regarding, message, jiff::Timestamp::now())
}

#[cfg(test)]
mod tests;
