use gantry_api::placement::ComparedFabric;
use gantry_api::{DecidedReservation, Decision};
use http::{Request, Response};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::client::Body;
use serde_json::json;
use tower_test::mock;

use super::*;

fn status(phase: GangPhase, reason: Reason, bound: u32) -> GangStatus {
    GangStatus {
        phase,
        reason: Some(reason),
        message: reason.text().into(),
        min: 8,
        members: 8,
        bound,
        domain: "rack r7".into(),
        ..GangStatus::default()
    }
}

/// The Event of the reservation names the domains that lost, in at most 250 bytes.
#[test]
fn reservation_event_names_the_next_best_domain() {
    let compared: ComparedFabric =
        serde_json::from_value(json!({"members": 8, "levels": [{"level": "rack", "domains": 12,
        "holding": 5, "used": 1, "chosen": "rack r7",
        "others": [{"domain": "rack r3", "reason": "LeftOver", "value": 4, "chosenValue": 0}]}]}))
        .unwrap();
    let compared = Some(Arc::new(compared));
    let reserved = GangStatus {
        message: "devices are reserved for 8 members in rack r7: 0 of 8 have arrived".into(),
        compared: compared.clone(),
        ..status(GangPhase::Reserved, Reason::WaitingForArrival, 0)
    };
    let note = |before: Option<&GangStatus>, now: &GangStatus| message(before, now).unwrap().note.to_string();
    assert_eq!(
        note(None, &reserved),
        "devices are reserved for 8 members in rack r7: 0 of 8 have arrived. The best of 5 racks that hold the gang; next rack r3: room for 4 more members instead of 0"
    );
    let queued = status(GangPhase::Queued, Reason::InsufficientResources, 0);
    let binding = GangStatus { compared, ..status(GangPhase::Binding, Reason::Binding, 3) };
    insta::assert_snapshot!(note(Some(&queued), &binding), @"devices are reserved in rack r7. The best of 5 racks that hold the gang; next rack r3: room for 4 more members instead of 0");
    let long = GangStatus { message: "m".repeat(200), ..reserved };
    assert!(note(None, &long).len() <= gantry_api::MAX_MESSAGE);
}

fn restarting() -> GangStatus {
    GangStatus { restarting: true, ..status(GangPhase::Degraded, Reason::Restarting, 0) }
}

#[test]
fn each_step_has_one_event_and_counts_have_none() {
    let story = [
        status(GangPhase::Pending, Reason::WaitingForMembers, 0),
        status(GangPhase::Queued, Reason::InsufficientResources, 0),
        status(GangPhase::Queued, Reason::InsufficientResources, 0),
        status(GangPhase::Reserved, Reason::WaitingForArrival, 0),
        status(GangPhase::Reserved, Reason::WaitingForArrival, 0),
        status(GangPhase::Committing, Reason::WritingDecision, 0),
        status(GangPhase::Binding, Reason::Binding, 3),
        status(GangPhase::Bound, Reason::Bound, 8),
        status(GangPhase::Degraded, Reason::MembersLost, 7),
        status(GangPhase::Degraded, Reason::MembersLost, 7),
        status(GangPhase::Bound, Reason::Bound, 8),
        status(GangPhase::Degraded, Reason::MembersLost, 7),
        restarting(),
        restarting(),
    ];
    let mut before = None;
    let mut told = Vec::new();
    for now in &story {
        told.extend(message(before, now).map(|message| message.reason));
        before = Some(now);
    }
    let wanted = [
        Reason::GangWaiting,
        Reason::GangReserved,
        Reason::GangBound,
        Reason::MemberLost,
        Reason::GangBound,
        Reason::MemberLost,
        Reason::GangRestarting,
    ];
    assert_eq!(told, wanted);
}

#[test]
fn gang_bound_at_once_has_one_reservation_event() {
    let (events, mut mailbox) = Events::new();
    let story = [
        status(GangPhase::Queued, Reason::WaitingForTurn, 0),
        status(GangPhase::Binding, Reason::Binding, 0),
        status(GangPhase::Binding, Reason::Binding, 3),
        status(GangPhase::Bound, Reason::Bound, 8),
    ];
    for steps in story.windows(2) {
        events.gang_moved(&train(), Some(&steps[0]), &steps[1]);
    }
    let told = [
        ("GangReserved", "devices are reserved in rack r7".to_owned()),
        ("GangBound", "8 of 8 members are bound in rack r7".to_owned()),
    ];
    assert_eq!(mailbox.taken(), told);
    // So is one that begins anew.
    let lost = status(GangPhase::Degraded, Reason::MembersLost, 0);
    events.gang_moved(&train(), Some(&lost), &story[1]);
    assert_eq!(mailbox.taken(), told[..1]);
    // One whose members ask for no devices has none.
    let nowhere = GangStatus { domain: String::new(), ..status(GangPhase::Binding, Reason::Binding, 0) };
    events.gang_moved(&train(), None, &nowhere);
    assert_eq!(mailbox.taken(), []);
}

#[test]
fn bound_event_tells_apart_members_without_devices() {
    let (events, mut mailbox) = Events::new();
    let binding = status(GangPhase::Binding, Reason::Binding, 1);
    let three = GangStatus { members: 3, bound: 3, ..bound() };
    events.gang_moved(&train(), Some(&binding), &three);
    let note = "3 of 3 members are bound, those with devices in rack r7";
    assert_eq!(mailbox.taken(), [("GangBound", note.to_owned())]);
}

#[test]
fn events_without_object_keep_order_and_last_of_each_reason() {
    let name = Name { namespace: "ml".into(), name: "train".into() };
    let message = |reason, note: &str| event::message(reason, false, note);
    let mut awaiting = AwaitingObject::default();
    let until = Instant::now() + OBJECT_TIMEOUT;
    awaiting.add(name.clone(), message(Reason::GangWaiting, "first"), until);
    awaiting.add(name.clone(), message(Reason::GangReserved, "then"), until);
    awaiting.add(name.clone(), message(Reason::GangWaiting, "again"), until);
    awaiting.add(name.clone(), message(Reason::GangBound, "at last"), until);
    let told: Vec<_> = awaiting.take(&name).into_iter().map(|message| message.note).collect();
    let told: Vec<&str> = told.iter().map(|note| &**note).collect();
    assert_eq!(told, ["then", "again", "at last"]);
    assert_eq!(awaiting.take(&name), []);
}

fn train() -> GangKey {
    GangKey {
        namespace: "ml".into(),
        name: "train".into(),
        integration: gantry_gang::Integration::Annotation,
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
        spare: false,
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
        ..status(GangPhase::Bound, Reason::Bound, 2)
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
    all.filter(|(_, message)| message.reason.as_str() == reason)
        .map(|(about, message)| match about {
            EventTarget::Gang(name) => (format!("gang {}", name.name), message.note.into()),
            EventTarget::Pod { name, .. } => (format!("pod {name}"), message.note.into()),
        })
        .collect()
}

#[test]
fn ambiguous_membership_is_reported_once_when_bound() {
    let message = "its pods go by Annotation; Volcano names them too and is passed over";
    let mut contested = bound();
    contested.conditions = vec![condition(AMBIGUOUS_MEMBERSHIP, true, "SeveralIntegrations", message)];
    let before = status(GangPhase::Binding, Reason::Binding, 1);
    let told = told(&[before, contested.clone(), contested], "AmbiguousMembership");
    let note = format!("gang train: {message}");
    assert_eq!(told, [("pod a".into(), note.clone()), ("pod b".into(), note)]);
}

#[test]
fn changed_terms_of_a_bound_gang_are_reported_once() {
    let with = |holds, reason, message| {
        let mut status = bound();
        status.conditions = vec![condition(VALID, holds, reason, message)];
        status
    };
    let message = "the minimum is 5 now and was 2 when it was decided";
    let changed = with(false, "MinimumChanged", message);
    let good = with(true, "Valid", "as annotation gantry.dev/gang-min of its pods says");
    let story = [good.clone(), changed.clone(), changed.clone(), good];
    let note = format!("gang train goes on as it is: {message}");
    let all = ["gang train", "pod a", "pod b"].map(|of| (of.to_owned(), note.clone()));
    assert_eq!(told(&story, "GangInvalid"), all);
    // A process that begins with it has not seen it change.
    assert_eq!(told(std::slice::from_ref(&changed), "GangInvalid"), []);
    let unknown = with(false, "UnknownSize", "PodGroup train was not read yet");
    assert_eq!(told(&[changed, unknown], "GangInvalid"), []);
}

#[test]
fn gang_of_one_is_in_the_singular() {
    let one = |phase, reason, bound| GangStatus { min: 1, members: 1, ..status(phase, reason, bound) };
    let binding = one(GangPhase::Binding, Reason::Binding, 0);
    let told = message(Some(&binding), &one(GangPhase::Bound, Reason::Bound, 1));
    assert_eq!(&*told.unwrap().note, "1 of 1 member is bound in rack r7");
}

/// Writes an Event of a pod while the API server returns these codes in turn and then the last for ever; how many were published and how
/// many failed in the end.
async fn outcomes(codes: &'static [u16]) -> (u64, u64) {
    let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
    tokio::spawn(async move {
        let mut codes = codes.iter().copied();
        let mut last = 500;
        while let Some((request, send)) = api.next_request().await {
            last = codes.next().unwrap_or(last);
            let body = request.into_body().collect_bytes().await.unwrap().to_vec();
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": last});
            let body = if last == 201 { body } else { status.to_string().into_bytes() };
            send.send_response(Response::builder().status(last).body(Body::from(body)).unwrap());
        }
    });
    let (events, mailbox) = Events::new();
    let metrics = Arc::new(Metrics::new());
    let stop = CancellationToken::new();
    let client = Client::new(service, "default");
    let task = tokio::spawn(run(client, Arc::default(), mailbox, Arc::clone(&metrics), stop.clone()));
    let message = event::message(Reason::Preempted, true, "evicted");
    events.pod(&"ml".into(), &"p".into(), &"p".into(), message);
    // Nothing comes after that.
    tokio::time::sleep(Duration::from_secs(120)).await;
    stop.cancel();
    task.await.unwrap();
    let count = |outcome| metrics.events.get_or_create(&Outcome { outcome }).get();
    (count("published"), count("failed"))
}

#[tokio::test(start_paused = true)]
async fn event_is_counted_once_by_how_it_ended() {
    assert_eq!(outcomes(&[201]).await, (1, 0));
    assert_eq!(outcomes(&[429, 503, 504, 500, 201]).await, (1, 0));
    assert_eq!(outcomes(&[504, 409]).await, (1, 0));
    assert_eq!(outcomes(&[503]).await, (0, 1));
    assert_eq!(outcomes(&[403]).await, (0, 1));
}

#[test]
fn lowered_request_is_reported_once() {
    let (events, mut mailbox) = Events::new();
    let plain = status(GangPhase::Queued, Reason::WaitingForTurn, 0);
    let words = "annotation gantry.dev/gang-arrival-seconds: 900 s is above the operator's limit";
    let valid = condition("Valid", true, Reason::RequestLowered.as_str(), words);
    let lowered = GangStatus { conditions: vec![valid], ..plain.clone() };
    let expected = ("RequestLowered", words.to_owned());
    events.gang_moved(&train(), None, &lowered);
    assert!(mailbox.taken().contains(&expected));
    events.gang_moved(&train(), Some(&lowered), &lowered);
    assert_eq!(mailbox.taken(), []);
    events.gang_moved(&train(), Some(&plain), &lowered);
    assert_eq!(mailbox.taken(), [expected]);
}
