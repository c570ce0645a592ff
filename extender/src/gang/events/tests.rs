use gantry_api::{DecidedReservation, Decision};
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

fn restarting() -> GangStatus {
    GangStatus {
        restarting: true,
        ..status(GangPhase::Degraded, "is being started anew", 0)
    }
}

#[test]
fn every_step_is_told_once_and_counts_are_not() {
    let story = [
        status(GangPhase::Pending, "5 of 8 members exist", 0),
        status(GangPhase::Queued, "waits for room: no rack has 64 GPUs free", 0),
        status(GangPhase::Queued, "waits for room: no rack has 64 GPUs free", 0),
        status(GangPhase::Reserved, "has its places", 0),
        status(GangPhase::Reserved, "is on its way", 0),
        status(GangPhase::Committing, "is being decided", 0),
        status(GangPhase::Binding, "is being bound", 3),
        status(GangPhase::Bound, "is bound", 8),
        status(GangPhase::Degraded, "keeps a place for a lost member", 7),
        status(GangPhase::Degraded, "lacks 1 of 8 members", 7),
        status(GangPhase::Bound, "is bound", 8),
        status(GangPhase::Degraded, "lacks 1 of 8 members", 7),
        restarting(),
        restarting(),
    ];
    let mut before = None;
    let mut told = Vec::new();
    for now in &story {
        told.extend(message(before, now).map(|message| format!("{} {}", message.reason, message.note)));
        before = Some(now);
    }
    let wanted = [
        "GangWaiting waits for room: no rack has 64 GPUs free",
        "GangReserved its places are in rack r7",
        "GangBound 8 of 8 members are bound in rack r7",
        "MemberLost keeps a place for a lost member",
        "GangBound whole again: 8 of 8 members are bound in rack r7",
        "MemberLost lacks 1 of 8 members",
        "GangRestarting is being started anew",
    ];
    assert_eq!(told, wanted);
}

#[test]
fn a_gang_that_is_bound_at_once_is_told_to_have_its_places_once() {
    let (events, mut mailbox) = Events::new();
    let story = [
        status(GangPhase::Queued, "waits its turn", 0),
        status(GangPhase::Binding, "is being bound", 0),
        status(GangPhase::Binding, "is being bound", 3),
        status(GangPhase::Bound, "is bound", 8),
    ];
    for steps in story.windows(2) {
        events.gang_moved(&train(), Some(&steps[0]), &steps[1]);
    }
    let told = [
        ("GangReserved", "its places are in rack r7".to_owned()),
        ("GangBound", "8 of 8 members are bound in rack r7".to_owned()),
    ];
    assert_eq!(mailbox.taken(), told);
    // So is one that begins anew.
    let lost = status(GangPhase::Degraded, "lacks 8 of 8 members", 0);
    events.gang_moved(&train(), Some(&lost), &story[1]);
    assert_eq!(mailbox.taken(), told[..1]);
    // One whose members ask for no devices has none.
    let nowhere = GangStatus {
        domain: String::new(),
        ..status(GangPhase::Binding, "is being bound", 0)
    };
    events.gang_moved(&train(), None, &nowhere);
    assert_eq!(mailbox.taken(), []);
}

#[test]
fn members_without_devices_may_be_elsewhere_than_the_others() {
    let (events, mut mailbox) = Events::new();
    let binding = status(GangPhase::Binding, "is being bound", 1);
    let three = GangStatus {
        members: 3,
        bound: 3,
        ..bound()
    };
    events.gang_moved(&train(), Some(&binding), &three);
    let note = "3 of 3 members are bound, those with devices in rack r7";
    assert_eq!(mailbox.taken(), [("GangBound", note.to_owned())]);
}

#[test]
fn what_comes_before_the_object_is_told_in_order_each_reason_once() {
    let name = Name {
        namespace: "ml".into(),
        name: "train".into(),
    };
    let message = |reason, note: &str| Message {
        reason,
        warning: false,
        note: note.into(),
    };
    let mut early = Early::default();
    let until = Instant::now() + EARLY;
    early.add(name.clone(), message("GangWaiting", "first"), until);
    early.add(name.clone(), message("GangReserved", "then"), until);
    early.add(name.clone(), message("GangWaiting", "again"), until);
    early.add(name.clone(), message("GangBound", "at last"), until);
    let told: Vec<_> = early
        .take(&name)
        .into_iter()
        .map(|message| message.note)
        .collect();
    assert_eq!(told, ["then", "again", "at last"]);
    assert_eq!(early.take(&name), []);
}

fn train() -> GangKey {
    GangKey {
        namespace: "ml".into(),
        name: "train".into(),
        dialect: gantry_gang::Dialect::Annotation,
        incarnation: "".into(),
    }
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
    let slot = |pod: Option<&str>| DecidedReservation {
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
            reservations: vec![slot(Some("a")), slot(Some("b")), slot(None)],
        }),
        ..status(GangPhase::Bound, "is bound", 2)
    }
}

/// What is told while a gang has one status after the other: of whom, and the note, for this reason.
fn told(story: &[GangStatus], reason: &str) -> Vec<(String, String)> {
    let (events, mut mailbox) = Events::new();
    let mut before = None;
    for now in story {
        events.gang_moved(&train(), before, now);
        before = Some(now);
    }
    let all = std::iter::from_fn(|| mailbox.0.try_recv().ok());
    all.filter(|(_, message)| message.reason == reason)
        .map(|(about, message)| match about {
            About::Gang(name) => (format!("gang {}", name.name), message.note),
            About::Pod { name, .. } => (format!("pod {name}"), message.note),
        })
        .collect()
}

#[test]
fn members_that_several_conventions_name_are_told_so_once_when_they_are_bound() {
    let message = "its pods go by Annotation; Volcano names them too and is passed over";
    let mut contested = bound();
    contested.conditions = vec![condition(
        AMBIGUOUS_MEMBERSHIP,
        true,
        "SeveralIntegrations",
        message,
    )];
    let before = status(GangPhase::Binding, "is being bound", 1);
    let told = told(&[before, contested.clone(), contested], "AmbiguousMembership");
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
fn a_gang_of_one_is_told_in_the_singular() {
    let one = |phase, reason, bound| GangStatus {
        min: 1,
        members: 1,
        ..status(phase, reason, bound)
    };
    let binding = one(GangPhase::Binding, "is being bound", 0);
    let told = message(Some(&binding), &one(GangPhase::Bound, "is bound", 1));
    assert_eq!(told.unwrap().note, "1 of 1 member is bound in rack r7");
}
