use serde_json::json;

use gantry_api::GangSpec;
use gantry_gang::Integration;

use super::*;

fn decision() -> Decision {
    Decision { id: "1".to_owned(), revision: 0, min: 2, domain: String::new(), reservations: Vec::new() }
}

#[test]
fn status_after_watch_event_survives_end_of_decision_write() {
    // A status that was queued after the watch showed the decision is newer than that write. The end of the
    // write does not drop it.
    let said = |decision| GangStatus { decision, ..GangStatus::default() };
    let mut writes = PendingWrites { status: Some(said(None)), ..PendingWrites::default() };
    writes.decided(&decision());
    assert_eq!(writes.status, None);
    // A place was lost meanwhile: its member waits until it is written down where it is to go.
    writes.status = Some(said(Some(decision())));
    writes.decided(&decision());
    assert_eq!(writes.status, Some(said(Some(decision()))));
}

#[test]
fn decision_without_earlier_status_names_its_gang() {
    // The decision may be the first status of the object. It identifies the gang, so that the next leader can
    // assign it.
    let gang = GangKey {
        namespace: "default".into(),
        name: "a".into(),
        integration: Integration::Annotation,
        incarnation: "1".into(),
    };
    let mut writes =
        PendingWrites { commit: Some((Arc::new(gang.clone()), decision())), ..PendingWrites::default() };
    // The object was made, and the write after that has failed.
    let made = Object {
        uid: "1".into(),
        resource_version: "1".into(),
        ours: true,
        spec: Ok(GangSpec::default()),
        status: GangStatus::default(),
    };
    let (_, status) = writes.next(Some(&made), true).unwrap();
    assert_eq!(status.decision, Some(decision()));
    assert_eq!(GangKey::of_status(&gang.namespace, &status), Some(gang));
}

/// By its conditions a bound gang is told what is said of it and does not hold.
#[test]
fn what_a_status_is_compared_with_has_its_conditions() {
    let valid = json!([{
        "type": "Valid", "status": "True", "reason": "Valid", "message": "as its pods say", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]);
    let status = GangStatus { conditions: serde_json::from_value(valid).unwrap(), ..GangStatus::default() };
    assert_eq!(step(&status).conditions, status.conditions);
    assert_eq!(status.conditions.len(), 1);
}
