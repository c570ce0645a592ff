//! How the decision is written: when it is written again, dropped or given up, and that nothing overtakes it.

use gantry_api::{DecidedReservation, Decision, GangPhase, GangStatus, Reason};

use super::super::world::{World, key, member, membership, uid};
use super::committing;
use crate::protocol::GangEvent;
use crate::protocol::{Arrival, BindEnd, CommitFailure};

fn shows(decision: &Decision) -> GangStatus {
    GangStatus {
        name: "a".to_owned(),
        integration: "Annotation".to_owned(),
        decision: Some(decision.clone()),
        ..GangStatus::default()
    }
}

fn shows_none() -> GangStatus {
    GangStatus { name: "a".to_owned(), integration: "Annotation".to_owned(), ..GangStatus::default() }
}

#[test]
fn decision_after_write_conflict_is_read_from_the_object() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::Committed {
        gang: &key("a"),
        decision: &decision.id,
        result: Err(CommitFailure::Conflict),
    });
    assert_eq!(world.arrive("a0", "n0"), Arrival::Wait);
    assert_eq!(world.take_work(), []);
    world.show("a", shows(&decision));
    assert!(matches!(world.arrive("a0", "n0"), Arrival::Go(_)));
}

#[test]
fn members_wait_while_the_object_lacks_their_decision() {
    // etcd was restored to a backup: the object is gone, or is from before the decision. A process that takes over now would know
    // nothing of the decision, so no member is bound before it is written again.
    for gone in [true, false] {
        let (mut world, decision) = committing();
        world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
        world.show("a", shows(&decision));
        assert!(matches!(world.arrive("a0", "n0"), Arrival::Go(_)));
        world.gangs.take_statuses();
        if gone {
            world.handle(GangEvent::ObjectGone { namespace: "default", name: "a" });
        } else {
            world.show("a", shows_none());
        }
        assert_eq!(world.arrive("a1", "n1"), Arrival::Wait, "gone: {gone}");
        // A Binding of unknown outcome is not repeated either.
        world.handle(GangEvent::BindEnded { pod: &uid("a0"), outcome: BindEnd::Unsure });
        assert!(!world.gangs.view(&key("a")).unwrap().is_written(&uid("a0")));
        assert_eq!(world.arrive("a0", "n0"), Arrival::Wait, "gone: {gone}");
        let (_, status) = world.gangs.take_statuses().pop().unwrap();
        assert_eq!(status.decision, Some(decision.clone()), "it is written again");
        world.show("a", shows(&decision));
        assert!(world.gangs.view(&key("a")).unwrap().is_written(&uid("a0")));
        for (pod, node) in [("a0", "n0"), ("a1", "n1")] {
            assert!(matches!(world.arrive(pod, node), Arrival::Go(_)));
        }
    }
}

#[test]
fn a_decision_that_certainly_was_not_written_is_written_again() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::Committed {
        gang: &key("a"),
        decision: &decision.id,
        result: Err(CommitFailure::Conflict),
    });
    world.show("a", shows_none());
    assert_eq!(world.commit().1, decision);
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    assert_eq!(world.phase("a"), GangPhase::Binding);
}

#[test]
fn unwritten_decision_is_dropped_after_members_withdrew() {
    // A conflict, and an object without the decision, prove that it was not written.
    let (mut world, decision) = committing();
    world.handle(GangEvent::Disconnected { pod: &uid("a0") });
    world.handle(GangEvent::Committed {
        gang: &key("a"),
        decision: &decision.id,
        result: Err(CommitFailure::Conflict),
    });
    world.show("a", shows_none());
    assert_eq!(world.take_work(), []);
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    world.come("a0");
    assert_ne!(world.commit().1.id, decision.id);
}

#[test]
fn refused_decision_releases_reservations_and_backs_off() {
    let (mut world, decision) = committing();
    world.reserved();
    let why = CommitFailure::Refused("Gang \"a..b\" is invalid".into());
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Err(why) });
    assert_eq!(world.reserved(), [""; 0], "others may have its devices");
    assert_eq!(world.phase("a"), GangPhase::Backoff);
    assert_eq!(world.reason("a"), Reason::Backoff);
    assert!(matches!(world.arrive("a0", "n0"), Arrival::Refuse(why) if why.reason == Reason::Backoff));
    assert_eq!(world.status("a").failed_attempts, 1);
    world.pass(3);
    world.plan();
    world.come_all("a", 2);
    assert_ne!(world.write().id, decision.id);
    assert_eq!(world.phase("a"), GangPhase::Binding);
}

#[test]
fn status_before_late_write_result_is_published_again() {
    // The watch shows the decision before its write returns. The writer drops a status that is older than
    // that result.
    let (mut world, decision) = committing();
    // The watch is quicker than the answer.
    world.show("a", shows(&decision));
    for uid in ["a0", "a1"] {
        world.bind(uid);
    }
    for uid in ["a0", "a1"] {
        world.gone(uid);
    }
    let last = |world: &mut World| world.gangs.take_statuses().pop();
    let (_, said) = last(&mut world).unwrap();
    assert_eq!((said.phase, said.decision.as_ref()), (GangPhase::Finished, None));
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    let again = last(&mut world).map(|(_, status)| status);
    assert_eq!(again, Some(said), "whoever writes drops what is older than the answer");
}

#[test]
fn a_decision_that_may_stand_is_not_given_up_for_a_refusal() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::Committed {
        gang: &key("a"),
        decision: &decision.id,
        result: Err(CommitFailure::Unknown),
    });
    world.show("a", shows_none());
    assert_eq!(world.commit().1, decision);
    let why = CommitFailure::Refused("gangs is forbidden".into());
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Err(why) });
    assert_eq!(world.phase("a"), GangPhase::Committing);
    assert_eq!(world.reason("a"), Reason::DecisionRejected);
    assert_eq!(world.commit().1, decision, "nobody would show it otherwise");
    world.show("a", shows(&decision));
    assert_eq!(world.phase("a"), GangPhase::Binding, "the first write has come through");
}

#[test]
fn decision_with_unknown_write_result_is_written_again() {
    // The first write may still take effect, so the same decision is written again until the object shows it.
    let (mut world, decision) = committing();
    world.handle(GangEvent::Disconnected { pod: &uid("a0") });
    world.handle(GangEvent::Committed {
        gang: &key("a"),
        decision: &decision.id,
        result: Err(CommitFailure::Unknown),
    });
    world.show("a", shows_none());
    assert_eq!(world.commit().1, decision, "the first write may still come");
    world.pass(1000);
    assert_eq!(world.phase("a"), GangPhase::Committing, "its places are not given up");
    world.show("a", shows(&decision));
    assert_eq!(world.phase("a"), GangPhase::Binding, "it has come");
}

#[test]
fn a_decision_of_another_process_is_taken_up_instead() {
    let (mut world, ours) = committing();
    let theirs = Decision {
        id: "theirs".to_owned(),
        reservations: ours
            .reservations
            .iter()
            .zip(["m0", "m1"])
            .map(|(slot, node)| DecidedReservation { node: node.into(), ..slot.clone() })
            .collect(),
        ..ours.clone()
    };
    world.handle(GangEvent::Committed {
        gang: &key("a"),
        decision: &ours.id,
        result: Err(CommitFailure::Conflict),
    });
    world.show("a", shows(&theirs));
    assert_eq!(world.phase("a"), GangPhase::Binding);
    assert_eq!(world.gangs.view(&key("a")).unwrap().decision_id(), Some("theirs"));
    assert!(matches!(world.arrive("a0", "n0"), Arrival::Refuse(_)));
    assert!(matches!(world.come("a0"), Arrival::Go(placed) if placed.node.as_str() == "m0"));
}

#[test]
fn no_status_overtakes_the_decision() {
    let (mut world, decision) = committing();
    assert_eq!(world.gangs.take_statuses(), []);
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    assert_eq!(world.status("a").decision, Some(decision));
}

#[test]
fn a_decision_that_is_overwritten_or_deleted_is_written_again() {
    let (mut world, decision) = committing();
    world.handle(GangEvent::Committed { gang: &key("a"), decision: &decision.id, result: Ok(()) });
    world.status("a");
    assert_eq!(world.gangs.take_statuses(), []);
    world.show("a", shows_none());
    assert_eq!(world.status("a").decision, Some(decision.clone()));
    world.handle(GangEvent::ObjectGone { namespace: "default", name: "a" });
    assert_eq!(world.status("a").decision, Some(decision));
}

#[test]
fn overwritten_reservation_is_written_again() {
    let mut world = World::new();
    world.bound_gang("a", 2, 2);
    world.write_down();
    world.gone("a0");
    let before = world.status("a");
    world.show("a", before.clone());
    world.see(member("a2", membership("a", 2)));
    assert_eq!(world.come("a2"), Arrival::Wait, "it is not written down yet");
    let status = world.status("a");
    // What was said before is shown late: what is said now is on its way.
    world.show("a", before.clone());
    assert_eq!(world.gangs.take_statuses(), []);
    world.show("a", status);
    world.show("a", before);
    assert_eq!(world.come("a2"), Arrival::Wait, "somebody has overwritten it");
    world.write_down();
    assert!(matches!(world.come("a2"), Arrival::Go(_)));
}
