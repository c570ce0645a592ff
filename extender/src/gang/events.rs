//! What people are told of gangs as it happens: Events on the Gang and on pods, in words of members and GPUs. Bounded: what cannot be
//! written in time is left out, for the Gang's status says the same.

mod writer;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{GangPhase, GangStatus, PodUid, names};
use gantry_gang::GangKey;
use gantry_gang::protocol::RESTARTING;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime, ObjectMeta};
use kube::Client;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::objects::{Name, Objects};
use crate::explain::event_name;
use crate::metrics::Metrics;
use writer::Writer;

/// The condition of a gang whose pods several conventions name.
const CONTESTED: &str = "Contested";
/// The condition that tells whether what is said of a gang holds.
const VALID: &str = "Valid";
/// Events that wait to be written.
const WAITING: usize = 1024;
/// How long an Event waits for its gang's object.
const EARLY: Duration = Duration::from_secs(60);
/// Longest note the API server takes is 1,024 bytes.
const MAX_NOTE: usize = 1000;
/// So often it is looked whether objects are there for which Events wait.
const LOOK: Duration = Duration::from_secs(1);

/// Something to tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tiding {
    /// In CamelCase, such as `GangPlaced`.
    pub(crate) reason: &'static str,
    /// Something is wrong.
    pub(crate) warning: bool,
    /// In words.
    pub(crate) note: String,
}

/// What a tiding is about.
#[derive(Debug, Clone, PartialEq, Eq)]
enum About {
    Gang(Name),
    Pod {
        namespace: Arc<str>,
        name: Arc<str>,
        uid: PodUid,
    },
}

/// Where tidings go.
#[derive(Debug, Clone)]
pub struct Events(Sender<(About, Tiding)>);

/// The other end.
#[derive(Debug)]
pub struct Mailbox(Receiver<(About, Tiding)>);

impl Events {
    /// A way for tidings.
    pub fn new() -> (Self, Mailbox) {
        let (sender, receiver) = channel(WAITING);
        (Self(sender), Mailbox(receiver))
    }

    /// A gang has another status.
    pub(super) fn gang_moved(&self, gang: &GangKey, before: Option<&GangStatus>, now: &GangStatus) {
        if let Some(tiding) = tiding(before, now) {
            self.gang(gang, tiding);
        }
        let unheeded = unheeded(before, now);
        if let Some(tiding) = &unheeded {
            self.gang(gang, tiding.clone());
        }
        for tiding in contested(before, now).into_iter().chain(unheeded) {
            for (name, uid) in members(now) {
                self.pod(&gang.namespace, &name, &uid, tiding.clone());
            }
        }
    }

    /// Tells of a gang.
    pub(super) fn gang(&self, gang: &GangKey, tiding: Tiding) {
        let name = Name {
            namespace: Arc::clone(&gang.namespace),
            name: gang.object_name().into(),
        };
        self.tell(About::Gang(name), tiding);
    }

    /// Tells of a pod.
    pub(crate) fn pod(&self, namespace: &Arc<str>, name: &Arc<str>, uid: &PodUid, tiding: Tiding) {
        let about = About::Pod {
            namespace: Arc::clone(namespace),
            name: Arc::clone(name),
            uid: uid.clone(),
        };
        self.tell(about, tiding);
    }

    fn tell(&self, about: About, tiding: Tiding) {
        // Full: the status says it too.
        let _ = self.0.try_send((about, tiding));
    }
}

#[cfg(test)]
impl Mailbox {
    /// Reason and note of what has come so far.
    pub(super) fn taken(&mut self) -> Vec<(&'static str, String)> {
        std::iter::from_fn(|| self.0.try_recv().ok())
            .map(|(_, tiding)| (tiding.reason, tiding.note))
            .collect()
    }
}

/// What there is to tell when a gang's status changes: only steps, not every count.
fn tiding(before: Option<&GangStatus>, now: &GangStatus) -> Option<Tiding> {
    let phase = before.map(|before| before.phase);
    let same_words = before.is_some_and(|before| before.reason == now.reason);
    let again = phase == Some(now.phase);
    let say = |reason, warning, note: String| {
        let note = joined(note, &now.message);
        Some(Tiding {
            reason,
            warning,
            note,
        })
    };
    match now.phase {
        GangPhase::Planned if !again => {
            let place = format!("{} members have places in {}", now.min, place(now));
            say("GangPlaced", false, place)
        }
        GangPhase::Bound
            if phase.is_some_and(|phase| phase < GangPhase::Bound || phase == GangPhase::Repairing) =>
        {
            let again = if phase == Some(GangPhase::Repairing) {
                "whole again: "
            } else {
                ""
            };
            let note = format!(
                "{again}{} of {} members are bound in {}",
                now.bound,
                now.members,
                place(now)
            );
            Some(Tiding {
                reason: "GangBound",
                warning: false,
                note,
            })
        }
        GangPhase::Queued | GangPhase::Backoff if !(again && same_words) => {
            say("GangWaits", false, now.reason.clone())
        }
        GangPhase::Invalid if !(again && same_words) => say("GangInvalid", true, now.reason.clone()),
        GangPhase::Preempting if !again => say("Preempting", false, now.reason.clone()),
        GangPhase::Repairing if !again => say("MemberLost", true, now.reason.clone()),
        GangPhase::Repairing if !same_words && now.reason == RESTARTING => {
            say("GangRestarts", true, now.reason.clone())
        }
        _ => None,
    }
}

/// Its members are told once, when they are bound, that another convention names them too. Those that wait read it in why they do.
fn contested(before: Option<&GangStatus>, now: &GangStatus) -> Option<Tiding> {
    let told = before.is_none_or(is_bound) || !is_bound(now);
    let condition = condition_of(now, CONTESTED).filter(|_| !told)?;
    Some(Tiding {
        reason: "GangContested",
        warning: false,
        note: format!("gang {}: {}", now.name, condition.message),
    })
}

/// What is said of a gang that is bound contradicts what it was bound by, and changes nothing. Gangs that wait say so in why they do.
fn unheeded(before: Option<&GangStatus>, now: &GangStatus) -> Option<Tiding> {
    let valid = condition_of(now, VALID).filter(|valid| valid.status == "False" && is_bound(now))?;
    let known = before.and_then(|before| condition_of(before, VALID));
    // What was not known when it was bound is no news.
    let told = known.is_none_or(|known| known.status == "False" && known.message == valid.message);
    (!told && valid.reason != "Unknown").then(|| Tiding {
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
    let slots = status.decision.iter().flat_map(|decision| &decision.slots);
    slots.filter_map(|slot| Some((slot.pod_name.as_str().into(), slot.pod.clone()?)))
}

/// What is said in few words and at length, as one. The message often begins with what the few words end with: that is said once.
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
    // Of a gang whose object is not there yet: told as soon as it is.
    let mut early: BTreeMap<Name, (Tiding, Instant)> = BTreeMap::new();
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
            Ok(Some((About::Gang(name), tiding))) => {
                if early.len() < WAITING || early.contains_key(&name) {
                    early.insert(name, (tiding, Instant::now() + EARLY));
                }
            }
            Ok(Some((about @ About::Pod { .. }, tiding))) => {
                let now = jiff::Timestamp::now();
                writer.write(event(&about, String::new(), tiding, now)).await;
            }
            Err(_) => {}
        }
        writer.again().await;
        let here: Vec<(Name, String)> = early
            .keys()
            .filter_map(|name| Some((name.clone(), objects.get(name)?.uid.to_string())))
            .collect();
        for (name, uid) in here {
            if let Some((tiding, _)) = early.remove(&name) {
                let now = jiff::Timestamp::now();
                writer.write(event(&About::Gang(name), uid, tiding, now)).await;
            }
        }
        // Its object was never made, or is gone: the next of the name is another gang.
        let now = Instant::now();
        early.retain(|_, (_, until)| now < *until);
    }
}

fn event(about: &About, uid: String, tiding: Tiding, now: jiff::Timestamp) -> Event {
    let (api_version, kind, namespace, name, uid) = match about {
        About::Gang(Name { namespace, name }) => ("gantry.dev/v1alpha1", "Gang", namespace, name, uid),
        About::Pod { namespace, name, uid } => ("v1", "Pod", namespace, name, uid.to_string()),
    };
    let mut note = tiding.note;
    if note.len() > MAX_NOTE {
        let end = (0..=MAX_NOTE).rev().find(|end| note.is_char_boundary(*end));
        note.truncate(end.unwrap_or_default());
        note.push_str(" ...");
    }
    Event {
        metadata: ObjectMeta {
            name: Some(event_name(name, now)),
            namespace: Some(namespace.to_string()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(now)),
        action: Some("Scheduling".to_owned()),
        reason: Some(tiding.reason.to_owned()),
        type_: Some(if tiding.warning { "Warning" } else { "Normal" }.to_owned()),
        note: Some(note),
        regarding: Some(ObjectReference {
            api_version: Some(api_version.to_owned()),
            kind: Some(kind.to_owned()),
            namespace: Some(namespace.to_string()),
            name: Some(name.to_string()),
            uid: Some(uid),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(names::EXTENDER.to_owned()),
        reporting_instance: Some(names::EXTENDER.to_owned()),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use gantry_api::{DecidedSlot, Decision};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    fn status(phase: GangPhase, reason: &str, bound: u32) -> GangStatus {
        GangStatus {
            phase,
            reason: reason.into(),
            min: 8,
            members: 8,
            bound,
            domain: "rack r7".into(),
            ..GangStatus::default()
        }
    }

    #[test]
    fn every_step_is_told_once_and_counts_are_not() {
        let story = [
            status(GangPhase::Collecting, "5 of 8 members exist", 0),
            status(GangPhase::Queued, "waits for room: no rack has 64 GPUs free", 0),
            status(GangPhase::Queued, "waits for room: no rack has 64 GPUs free", 0),
            status(GangPhase::Planned, "has its places", 0),
            status(GangPhase::Planned, "is on its way", 0),
            status(GangPhase::Committing, "is being decided", 0),
            status(GangPhase::Binding, "is being bound", 3),
            status(GangPhase::Bound, "is bound", 8),
            status(GangPhase::Repairing, "keeps a place for a lost member", 7),
            status(GangPhase::Repairing, "lacks 1 of 8 members", 7),
            status(GangPhase::Bound, "is bound", 8),
            status(GangPhase::Repairing, "lacks 1 of 8 members", 7),
            status(GangPhase::Repairing, RESTARTING, 0),
            status(GangPhase::Repairing, RESTARTING, 0),
        ];
        let mut before = None;
        let mut told = Vec::new();
        for now in &story {
            told.extend(tiding(before, now).map(|tiding| format!("{} {}", tiding.reason, tiding.note)));
            before = Some(now);
        }
        let wanted = [
            "GangWaits waits for room: no rack has 64 GPUs free",
            "GangPlaced 8 members have places in rack r7",
            "GangBound 8 of 8 members are bound in rack r7",
            "MemberLost keeps a place for a lost member",
            "GangBound whole again: 8 of 8 members are bound in rack r7",
            "MemberLost lacks 1 of 8 members",
            "GangRestarts is being started anew",
        ];
        assert_eq!(told, wanted);
    }

    fn condition(kind: &str, holds: bool, reason: &str, message: &str) -> Condition {
        Condition {
            last_transition_time: Time(Timestamp::UNIX_EPOCH),
            message: message.into(),
            observed_generation: None,
            reason: reason.into(),
            status: if holds { "True" } else { "False" }.into(),
            type_: kind.into(),
        }
    }

    /// A gang `train` of two that is bound, and one place that is kept.
    fn bound() -> GangStatus {
        let slot = |pod: Option<&str>| DecidedSlot {
            node: "n".into(),
            devices: Vec::new(),
            ordinal: None,
            rank: None,
            role: String::new(),
            pod: pod.map(PodUid::from),
            pod_name: pod.unwrap_or_default().to_owned(),
        };
        GangStatus {
            name: "train".into(),
            decision: Some(Decision {
                id: "d".into(),
                revision: 0,
                min: 2,
                domain: String::new(),
                slots: vec![slot(Some("a")), slot(Some("b")), slot(None)],
            }),
            ..status(GangPhase::Bound, "is bound", 2)
        }
    }

    /// What is told while a gang has one status after the other: of whom, and the note, for this reason.
    fn told(story: &[GangStatus], reason: &str) -> Vec<(String, String)> {
        let (events, mut mailbox) = Events::new();
        let gang = GangKey {
            namespace: "ml".into(),
            name: "train".into(),
            dialect: gantry_gang::Dialect::Annotation,
            incarnation: "".into(),
        };
        let mut before = None;
        for now in story {
            events.gang_moved(&gang, before, now);
            before = Some(now);
        }
        let all = std::iter::from_fn(|| mailbox.0.try_recv().ok());
        all.filter(|(_, tiding)| tiding.reason == reason)
            .map(|(about, tiding)| match about {
                About::Gang(name) => (format!("gang {}", name.name), tiding.note),
                About::Pod { name, .. } => (format!("pod {name}"), tiding.note),
            })
            .collect()
    }

    #[test]
    fn members_that_several_conventions_name_are_told_so_once_when_they_are_bound() {
        let message = "its pods go by Annotation; Volcano names them too and is passed over";
        let mut contested = bound();
        contested.conditions = vec![condition(CONTESTED, true, "SeveralConventions", message)];
        let before = status(GangPhase::Binding, "is being bound", 1);
        let told = told(&[before, contested.clone(), contested], "GangContested");
        let note = format!("gang train: {message}");
        assert_eq!(told, [("pod a".into(), note.clone()), ("pod b".into(), note)]);
    }

    #[test]
    fn a_bound_gang_and_its_members_are_told_once_that_what_is_said_of_it_now_does_not_hold() {
        let with = |holds, reason, message| {
            let mut status = bound();
            status.conditions = vec![condition(VALID, holds, reason, message)];
            status
        };
        let message = "the minimum is 5 now and was 2 when it was decided";
        let changed = with(false, "MinimumChanged", message);
        let good = with(
            true,
            "Valid",
            "as annotation gantry.dev/gang-min of its pods says",
        );
        let story = [good.clone(), changed.clone(), changed.clone(), good];
        let note = format!("gang train goes on as it is: {message}");
        let all = ["gang train", "pod a", "pod b"].map(|of| (of.to_owned(), note.clone()));
        assert_eq!(told(&story, "GangInvalid"), all);
        // A process that begins with it has not seen it change.
        assert_eq!(told(std::slice::from_ref(&changed), "GangInvalid"), []);
        let unknown = with(false, "Unknown", "PodGroup train was not read yet");
        assert_eq!(told(&[changed, unknown], "GangInvalid"), []);
    }

    #[test]
    fn what_stands_in_both_words_is_said_once() {
        for (note, message, wanted) in [
            ("is bound", "", "is bound"),
            ("is bound", "8 bound", "is bound: 8 bound"),
            (
                "waits for room: no rack",
                "no rack: 3 of 8 fit",
                "waits for room: no rack: 3 of 8 fit",
            ),
            ("is not valid: level: no", "level: no", "is not valid: level: no"),
        ] {
            assert_eq!(joined(note.into(), message), wanted);
        }
    }

    #[test]
    fn a_note_is_cut_to_what_the_api_server_takes() {
        let about = About::Gang(Name {
            namespace: "ml".into(),
            name: "train".into(),
        });
        let tiding = Tiding {
            reason: "GangWaits",
            warning: false,
            note: "ä".repeat(900),
        };
        let event = event(&about, "u".into(), tiding, jiff::Timestamp::UNIX_EPOCH);
        assert!(event.note.unwrap().len() <= 1024);
        assert_eq!(event.regarding.unwrap().kind.as_deref(), Some("Gang"));
    }
}
