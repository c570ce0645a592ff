//! Spare slots: planned with the members or after them, taken by replacements, lent and reclaimed, kept over a restart of the process.

use gantry_api::{GangPhase, Reason};

use super::super::world::{World, bound, key, member, membership, place, released, uid};
use crate::membership::Membership;
use crate::protocol::{
    Answer, GangEvent, Member, Placement, PlanRequest, Reservation, Settings, Stage, Work,
};

fn with_spares(min: u32, spares: u32) -> Membership {
    let mut membership = membership("a", min);
    membership.options.spares = Some(spares);
    membership
}

/// Plans the next gang: members on `n0`, `n1`, ..., and spare ones at these nodes and GPUs.
fn plan(world: &mut World, spares: &[(&str, &str)]) -> PlanRequest {
    let wanted = world.next().expect("a gang wants a plan");
    let places = (0..wanted.members.len()).map(|at| place(&format!("n{at}"), &format!("g{at}")));
    let placement = Placement {
        places: places.collect(),
        spares: spares.iter().map(|(node, gpu)| place(node, gpu)).collect(),
        domain: "rack r7".into(),
        ..Placement::default()
    };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    wanted
}

/// Gang `a` of two bound members on `n0` and `n1`, with the spare slots that a plan found.
fn bound_with(spares: u32, found: &[(&str, &str)]) -> World {
    let mut world = World::new();
    for number in 0..2 {
        world.see(member(&format!("a{number}"), with_spares(2, spares)));
    }
    let wanted = plan(&mut world, found);
    assert_eq!((wanted.members.len(), wanted.must, wanted.spares.len()), (2, 2, spares as usize));
    world.come_all("a", 2);
    let decision = world.write();
    assert_eq!(decision.reservations.iter().filter(|slot| slot.spare).count(), found.len());
    assert!(decision.reservations.iter().all(|slot| slot.spare == slot.pod.is_none()));
    for number in 0..2 {
        world.bind(&format!("a{number}"));
    }
    assert_eq!(world.phase("a"), GangPhase::Bound);
    world.take_work();
    world
}

fn condition(world: &mut World) -> (String, String) {
    let status = world.status("a");
    let found = status.conditions.iter().find(|condition| condition.type_ == "Spares").expect("a condition");
    (found.reason.clone(), found.message.clone())
}

/// Member `a0` is gone with its node, and `a2` comes for it.
fn replace(world: &mut World) {
    world.handle(GangEvent::NodeLost { node: &"n0".into() });
    world.gone("a0");
    world.handle(GangEvent::NodeLost { node: &"n0".into() });
    world.see(member("a2", with_spares(2, 1)));
}

#[test]
fn gang_is_bound_without_its_spares_and_gets_them_later() {
    let mut world = bound_with(2, &[]);
    let (reason, message) = condition(&mut world);
    assert_eq!(reason, "SparesMissing");
    insta::assert_snapshot!(message, @"0 of 2 spare reservations are kept for replacements of members; the gang does not wait for the others, which are planned once devices come free");
    let wanted = plan(&mut world, &[("n5", "s0")]);
    assert_eq!((wanted.members.len(), wanted.must, wanted.spares.len(), wanted.placed.len()), (0, 0, 2, 2));
    assert_eq!(world.reserved(), ["s0"]);
    let wanted = world.refuse();
    assert_eq!(wanted.spares.len(), 1, "the one that is missing still");
    assert_eq!(world.next(), None, "nothing has come free since");
    world.room += 1;
    plan(&mut world, &[("n6", "s1")]);
    assert_eq!(world.reserved(), ["s0", "s1"]);
    insta::assert_snapshot!(condition(&mut world).1, @"2 of 2 spare reservations are kept for replacements of members");
    world.room += 1;
    assert_eq!(world.next(), None);
}

#[test]
fn replacement_takes_the_spare_without_a_plan() {
    let mut world = bound_with(1, &[("n5", "s0")]);
    replace(&mut world);
    assert_eq!(world.woken(), ["a2"]);
    assert_eq!(world.bind("a2"), "n5");
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert!(world.reserved().is_empty());
    // The next spare one is planned as soon as the gang is whole.
    let wanted = plan(&mut world, &[("n6", "s1")]);
    assert_eq!((wanted.members.len(), wanted.spares.len()), (0, 1));
    assert_eq!(condition(&mut world).0, Reason::SparesReserved.to_string());
}

#[test]
fn borrowers_are_evicted_once_a_member_has_the_spare() {
    let mut world = bound_with(1, &[("n5", "s0")]);
    let held = |world: &mut World, pods: &[&str], ends: Option<i64>| {
        let slots: Vec<u32> = {
            let view = world.gangs.view(&key("a")).unwrap();
            view.slots().filter(|slot| slot.spare).map(|slot| slot.slot).collect()
        };
        let pods = pods.iter().map(|pod| uid(pod)).collect();
        for slot in slots {
            world.handle(GangEvent::SlotHeld { gang: &key("a"), slot, pods: &pods, ends });
        }
    };
    held(&mut world, &["b"], None);
    assert_eq!(world.take_work(), [], "while no member has it, its devices are lent");
    replace(&mut world);
    world.take_work();
    held(&mut world, &["b"], None);
    let evicts = |pod: &str| Work::Evict { pods: vec![uid(pod)], by: key("a").into() };
    assert_eq!(world.take_work(), [evicts("b")]);
    held(&mut world, &["b"], None);
    assert_eq!(world.take_work(), [], "it was ordered already");
    held(&mut world, &["b", "c"], None);
    assert_eq!(world.take_work(), [evicts("c")]);
    let victims: Vec<String> =
        world.gangs.view(&key("a")).unwrap().victims().map(ToString::to_string).collect();
    assert_eq!(victims, ["b", "c"]);
    held(&mut world, &[], None);
    assert_eq!(world.woken(), ["a2"]);
    assert_eq!(world.gangs.view(&key("a")).unwrap().victims().count(), 0);
    assert_eq!(world.bind("a2"), "n5");
}

#[test]
fn member_is_planned_elsewhere_where_a_borrower_stays() {
    for (ends, patience) in [(None, 120), (Some(1_600), 720)] {
        let mut world = bound_with(1, &[("n5", "s0")]);
        let at = world.now().unix;
        replace(&mut world);
        let slot = world.gangs.view(&key("a")).unwrap().slots().find(|slot| slot.spare).unwrap().slot;
        let (pods, ends) = ([uid("b")].into(), ends.map(|ends: i64| ends - 1_000 + at));
        world.handle(GangEvent::SlotHeld { gang: &key("a"), slot, pods: &pods, ends });
        world.pass(patience - 1);
        assert_eq!(world.reserved(), ["s0"]);
        world.pass(1);
        assert!(world.reserved().is_empty());
        assert_eq!(world.plan_from(7).members.len(), 1);
        assert_eq!(world.node("a2"), "n7");
    }
}

#[test]
fn spare_of_a_lost_node_is_planned_again() {
    let mut world = bound_with(1, &[("n5", "s0")]);
    world.handle(GangEvent::NodeLost { node: &"n5".into() });
    assert!(world.reserved().is_empty());
    assert_eq!(world.phase("a"), GangPhase::Bound);
    world.room += 1;
    assert_eq!(plan(&mut world, &[("n6", "s1")]).spares.len(), 1);
    // Before the decision, a spare one that is lost costs the members nothing.
    let mut world = World::new();
    for number in 0..2 {
        world.see(member(&format!("a{number}"), with_spares(2, 1)));
    }
    plan(&mut world, &[("n5", "s0")]);
    world.handle(GangEvent::NodeLost { node: &"n5".into() });
    assert_eq!((world.phase("a"), world.reserved()), (GangPhase::Reserved, vec!["g0".into(), "g1".into()]));
}

#[test]
fn spares_outlive_the_process() {
    let mut world = bound_with(1, &[("n5", "s0")]);
    let status = world.status("a");
    let mut next = World::with(Settings::default());
    for number in 0..2 {
        next.see(bound(member(&format!("a{number}"), with_spares(2, 1)), &format!("n{number}")));
    }
    next.show("a", status);
    next.handle(GangEvent::Synced);
    assert_eq!(next.reserved(), ["s0"]);
    assert_eq!(next.phase("a"), GangPhase::Bound);
    assert_eq!(next.next(), None, "it has what it asks for");
    replace(&mut next);
    assert_eq!(next.bind("a2"), "n5");
}

#[test]
fn member_beyond_the_minimum_takes_no_spare() {
    let mut world = bound_with(1, &[("n5", "s0")]);
    world.see(member("a2", with_spares(2, 1)));
    assert!(matches!(world.answer("a2"), Answer::Wait(_)));
    assert_eq!(world.reserved(), ["s0"]);
}

#[test]
fn spares_go_to_gangs_of_higher_priority_and_when_not_asked_for() {
    let mut world = bound_with(1, &[("n5", "s0")]);
    let slots = world.gangs.view(&key("a")).unwrap().orphaned().map(|slot| slot.slot).collect();
    let to = "gang ns/b".into();
    let event = GangEvent::ReleaseOrphaned { gang: &key("a"), slots: &slots, to: &to };
    assert_eq!(released(world.handle(event)), 1);
    assert!(world.reserved().is_empty());
    let mut world = bound_with(1, &[("n5", "s0")]);
    let spec = gantry_api::GangSpec { spares: Some(0), ..Default::default() };
    let status = world.status("a");
    let object = crate::protocol::Object { spec: Ok(spec), ..world.object(status) };
    world.handle(GangEvent::ObjectSeen { namespace: "default", name: "a", object: Box::new(object) });
    assert!(world.reserved().is_empty());
    // All of it is gone: nothing is kept for it.
    let mut world = bound_with(1, &[("n5", "s0")]);
    world.gone("a0");
    world.gone("a1");
    assert!(world.reserved().is_empty());
}

#[test]
fn spares_are_released_when_all_members_have_ended() {
    let mut world = bound_with(1, &[("n5", "s0")]);
    for (pod, node) in [("a0", "n0"), ("a1", "n1")] {
        assert_eq!(world.reserved(), ["s0"], "{pod} may be lost");
        let mut ended = bound(member(pod, with_spares(2, 1)), node);
        ended.stage = Stage::Succeeded;
        world.see(ended);
    }
    assert_eq!(world.phase("a"), GangPhase::Finished);
    assert!(world.reserved().is_empty());
    assert_eq!(world.next(), None);
}

#[test]
fn spare_of_a_role_with_lost_members_is_kept() {
    // One worker has ended, and the other is lost. No minimum of the workers is known.
    let of_role = |pod: &str, role: &str| {
        let membership = Membership { role: role.into(), ..with_spares(3, 1) };
        member(pod, membership)
    };
    let mut world = World::new();
    for (pod, role) in [("a0", "master"), ("a1", "worker"), ("a2", "worker")] {
        world.see(of_role(pod, role));
    }
    let wanted = world.next().unwrap();
    assert_eq!(wanted.members.len(), 3);
    let places = wanted.members.iter().enumerate().map(|(at, member)| Reservation {
        role: member.role.clone(),
        ..place(&format!("n{at}"), &format!("g{at}"))
    });
    let spare = Reservation { role: "worker".into(), ..place("n5", "s0") };
    let found = Placement { places: places.collect(), spares: vec![spare], ..Placement::default() };
    world.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(found) });
    world.come_all("a", 3);
    world.write();
    let node = ["a0", "a1", "a2"].map(|pod| world.bind(pod));
    let ended = Member { stage: Stage::Succeeded, ..bound(of_role("a1", "worker"), &node[1]) };
    world.see(ended);
    assert_eq!(world.reserved(), ["s0"]);
    world.handle(GangEvent::NodeLost { node: &node[2].as_str().into() });
    world.gone("a2");
    assert_eq!(world.reserved(), ["g2", "s0"], "its replacement is about to come");
}

/// A member loses its devices to another pod.
fn preempt(world: &mut World, pod: &str, node: &str, spares: u32) {
    let pod = bound(member(pod, with_spares(2, spares)), node);
    world.see(crate::protocol::Member { preempted: true, leaving: true, ..pod });
}

#[test]
fn spares_replace_all_members_where_there_are_enough() {
    let mut world = bound_with(2, &[("n5", "s0"), ("n6", "s1")]);
    world.see(member("a2", with_spares(2, 2)));
    world.see(member("a3", with_spares(2, 2)));
    preempt(&mut world, "a0", "n0", 2);
    preempt(&mut world, "a1", "n1", 2);
    assert_eq!(world.reserved(), ["s0", "s1"]);
    let nodes: std::collections::BTreeSet<String> = ["a2", "a3"].map(|pod| world.bind(pod)).into();
    assert_eq!(nodes, ["n5".to_owned(), "n6".to_owned()].into());
}

#[test]
fn gang_that_lost_all_members_is_planned_as_a_whole() {
    // Its spare ones go with it, and must not make it come back member by member.
    let mut world = bound_with(1, &[("n5", "s0")]);
    preempt(&mut world, "a0", "n0", 1);
    preempt(&mut world, "a1", "n1", 1);
    world.see(member("a2", with_spares(2, 1)));
    world.see(member("a3", with_spares(2, 1)));
    assert!(world.reserved().is_empty());
    world.pass(10);
    let wanted = world.next().unwrap();
    assert_eq!((wanted.members.len(), wanted.must, wanted.spares.len()), (2, 2, 1));
}
