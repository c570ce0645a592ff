//! Why members wait that kube-scheduler never asks about.

use gantry_api::Reason;

use super::world::{World, bound, member, membership, place};
use crate::protocol::GangEvent;
use crate::protocol::{Answer, Member, Placement, Stage, WaitReason};

fn why(world: &World, pod: &str) -> Option<WaitReason> {
    world.gangs.wait_reason(&pod.into())
}

#[test]
fn they_are_told_what_filter_would_answer() {
    let mut world = World::new();
    world.see(member("a0", membership("a", 2)));
    let Answer::Wait(answer) = world.answer("a0") else {
        panic!("one of two is there");
    };
    assert_eq!(answer.reason, Reason::WaitingForMembers);
    assert_eq!(why(&world, "a0"), Some(answer));
    world.see(Member { stage: Stage::Gated { by: None }, ..member("a1", membership("a", 3)) });
    let told = why(&world, "a1").unwrap();
    assert!(told.is_invalid(), "{told:?}");
    assert_eq!(Some(told), why(&world, "a0"));
}

#[test]
fn nobody_waits_for_its_gang_who_has_a_place_or_is_of_none() {
    let mut world = World::new();
    assert_eq!(why(&world, "nobody"), None);
    world.members("a", 2, 2);
    assert!(why(&world, "a0").is_some_and(|why| !why.is_invalid()));
    world.plan();
    assert_eq!(why(&world, "a0"), None);
    world.see(bound(member("b0", membership("b", 2)), "n0"));
    assert_eq!(why(&world, "b0"), None);
    world.see(Member { elsewhere: Some("another-scheduler".into()), ..member("b1", membership("b", 2)) });
    assert_eq!(why(&world, "b1"), None);
}

#[test]
fn a_member_waits_for_those_who_have_to_leave_its_place() {
    let mut world = World::new();
    world.members("a", 1, 1);
    let wanted = world.next().expect("a gang wants a plan");
    let placement =
        Placement { places: vec![place("n0", "g0")], victims: vec!["victim".into()], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    let Answer::Wait(answer) = world.answer("a0") else {
        panic!("its place is not free yet");
    };
    assert_eq!(answer.reason, Reason::WaitingForVictims);
    assert_eq!(why(&world, "a0"), Some(answer));
}
