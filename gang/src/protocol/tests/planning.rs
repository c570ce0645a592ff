//! The queue, refusals, back-off, time limits: what becomes of a gang before the decision.

use std::collections::BTreeSet;

use gantry_api::GangPhase;
use proptest::prelude::*;

use super::world::{World, claim, key, member, place, refused, uid, with_rank, with_repair};
use crate::claim::Claim;
use crate::fabric::{Level, Levels};
use crate::protocol::{Answer, Arrival, BindEnd, Hindrance, Placement, Refused, Settings, Wanted, Work};
use crate::terms::{LevelWish, Repair};

#[test]
fn a_refused_gang_is_planned_again_when_room_grows_or_it_changes() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.refuse("8 members of 4 GPUs do not fit together");
    assert_eq!(
        world.waits("a0"),
        "gang default/a waits for room: 8 members of 4 GPUs do not fit together"
    );
    assert_eq!(world.next(), None);
    world.pass(1000);
    assert_eq!(world.next(), None, "time alone makes no room");
    world.room += 1;
    world.refuse("8 members of 4 GPUs do not fit together");
    assert_eq!(world.next(), None);
    world.see(member("a2", claim("a", 2)));
    assert_eq!(world.next().unwrap().members.len(), 3);
}

#[test]
fn a_higher_priority_goes_first_and_others_fill_in_when_it_does_not_fit() {
    let mut world = World::new();
    world.members("a", 1, 1);
    let mut high = member("b0", claim("b", 1));
    high.priority = 10;
    world.see(high);
    assert_eq!(&*world.refuse("no room").gang.name, "b");
    assert_eq!(world.gangs.head(world.now()).unwrap().0.name.to_string(), "b");
    assert_eq!(&*world.plan().gang.name, "a", "behind the head");
    assert_eq!(world.next(), None);
}

#[test]
fn a_gang_that_can_never_fit_is_told_so_and_is_not_the_head() {
    let mut world = World::new();
    world.members("a", 1, 1);
    world.members("b", 1, 1);
    let wanted = world.next().unwrap();
    let hopeless = Refused {
        hopeless: true,
        ..refused("no node has 64 GPUs")
    };
    world.gangs.placed(world.now(), &wanted.gang, Err(hopeless));
    assert_eq!(
        world.waits("a0"),
        "gang default/a cannot fit: no node has 64 GPUs"
    );
    assert_eq!(world.gangs.head(world.now()).unwrap().0.name.to_string(), "b");
}

#[test]
fn a_plan_for_a_gang_that_has_changed_meanwhile_is_dropped() {
    let mut world = World::new();
    world.members("a", 2, 2);
    let wanted = world.next().unwrap();
    world.gone("a1");
    let placement = Placement {
        places: vec![place("n0", "g0"), place("n1", "g1")],
        ..Placement::default()
    };
    world.gangs.placed(world.now(), &wanted.gang, Ok(placement));
    assert_eq!(world.phase("a"), GangPhase::Collecting);
    assert_eq!(world.reserved(), Vec::<String>::new());
}

#[test]
fn a_device_that_is_kept_for_another_gang_is_not_given_twice() {
    let mut world = World::new();
    world.members("a", 1, 1);
    world.members("b", 1, 1);
    for gang in ["a", "b"] {
        let wanted = world.next().unwrap();
        assert_eq!(&*wanted.gang.name, gang);
        let placement = Placement {
            places: vec![place("n0", "g0")],
            ..Placement::default()
        };
        world.gangs.placed(world.now(), &wanted.gang, Ok(placement));
    }
    assert_eq!(world.phase("a"), GangPhase::Planned);
    assert_eq!(
        world.text("b"),
        "gang default/b waits for room: the plan was overtaken"
    );
    assert_eq!(world.reserved(), ["g0"]);
}

#[test]
fn too_few_places_are_none() {
    let mut world = World::new();
    world.members("a", 2, 2);
    let wanted = world.next().unwrap();
    let placement = Placement {
        places: vec![place("n0", "g0")],
        ..Placement::default()
    };
    world.gangs.placed(world.now(), &wanted.gang, Ok(placement));
    assert_eq!(world.phase("a"), GangPhase::Queued);
    assert_eq!(world.reserved(), Vec::<String>::new());
}

#[test]
fn members_get_the_places_of_their_ranks() {
    let mut world = World::new();
    for (pod, rank) in [("a0", 1), ("a1", 0)] {
        world.see(member(pod, with_rank(claim("a", 2), rank)));
    }
    let wanted = world.plan();
    let order: Vec<&str> = wanted.members.iter().map(|member| member.uid.as_str()).collect();
    assert_eq!(order, ["a1", "a0"]);
    assert_eq!((world.node("a0"), world.node("a1")), ("n1".into(), "n0".into()));
    assert_eq!(world.node("a0"), "n1", "asked again, the same");
}

#[test]
fn no_more_than_the_maximum_get_a_place() {
    let mut world = World::new();
    let mut said = claim("a", 1);
    said.wish.max = Some(2);
    for pod in ["a0", "a1", "a2"] {
        world.see(member(pod, said.clone()));
    }
    assert_eq!(world.plan().members.len(), 2);
    world.come("a0");
    world.write();
    assert_eq!(world.next(), None);
    assert!(matches!(world.answer("a2"), Answer::Wait(_)));
}

#[test]
fn a_gang_that_does_not_arrive_in_time_gives_all_back_and_waits_ever_longer() {
    let mut world = World::new();
    world.members("a", 2, 2);
    for (seconds, strikes) in [(2, 1), (4, 2), (8, 3)] {
        world.plan();
        world.come("a0");
        world.pass(59);
        assert_eq!(world.phase("a"), GangPhase::Planned);
        world.pass(1);
        assert_eq!(world.phase("a"), GangPhase::Backoff);
        assert_eq!(world.reserved(), Vec::<String>::new());
        assert_eq!(
            world.waits("a0"),
            "gang default/a is tried again soon: 1 of 2 members came in time"
        );
        assert!(matches!(world.arrive("a0", "n0"), Arrival::Refuse(_)));
        assert_eq!(world.status("a").strikes, strikes);
        world.pass(seconds - 1);
        assert_eq!(world.next(), None);
        world.pass(1);
    }
    for _ in 0..20 {
        world.plan();
        world.pass(60);
        world.pass(120);
    }
    assert_eq!(
        world.phase("a"),
        GangPhase::Queued,
        "never longer than the longest"
    );
}

#[test]
fn members_that_do_not_come_are_woken_once_more() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    assert_eq!(world.woken(), ["a0", "a1"]);
    world.come("a0");
    for wait in [10, 20] {
        world.pass(wait - 1);
        assert_eq!(world.woken(), Vec::<String>::new());
        world.pass(1);
        assert_eq!(world.woken(), ["a1"]);
    }
}

#[test]
fn a_member_that_is_being_told_to_wait_is_woken_once_more_when_it_has_been_told() {
    let mut world = World::new();
    world.members("a", 2, 3);
    world.waits("a0");
    world.pass(60);
    world.waits("a1");
    // The last one comes in the same moment.
    world.see(member("a2", claim("a", 3)));
    world.plan();
    assert_eq!(world.woken(), ["a0", "a1", "a2"]);
    world.pass(1);
    assert_eq!(world.woken(), Vec::<String>::new());
    world.pass(1);
    assert_eq!(world.woken(), ["a1"]);
    world.pass(9);
    assert_eq!(world.woken(), Vec::<String>::new());
}

#[test]
fn a_member_that_was_never_tried_is_in_the_queue_and_left_alone() {
    let mut world = World::new();
    world.members("a", 1, 2);
    let mut never_tried = member("a1", claim("a", 2));
    never_tried.refused = false;
    world.see(never_tried);
    world.plan();
    assert_eq!(world.woken(), ["a0"]);
    world.pass(10);
    assert_eq!(world.woken(), ["a0"], "the wake may have been lost");
}

#[test]
fn a_member_that_withdraws_no_longer_counts_and_finds_its_place_again() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    world.pass(55);
    world.gangs.withdraw(world.now(), &uid("a0"));
    assert_eq!(world.come("a1"), Arrival::Wait);
    assert_eq!(world.phase("a"), GangPhase::Planned);
    world.pass(14);
    assert_eq!(
        world.phase("a"),
        GangPhase::Planned,
        "a while longer, for its next try"
    );
    assert_eq!(world.come("a0"), Arrival::Wait);
    assert_eq!(world.phase("a"), GangPhase::Committing);
}

#[test]
fn withdrawing_again_and_again_does_not_keep_a_place_for_ever() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    for _ in 0..20 {
        world.come("a0");
        world.gangs.withdraw(world.now(), &uid("a0"));
        world.pass(4);
        if world.phase("a") == GangPhase::Backoff {
            break;
        }
    }
    assert_eq!(world.phase("a"), GangPhase::Backoff);
    assert_eq!(world.passed.as_secs(), 76, "60 s, and 15 s of grace");
}

#[test]
fn a_node_that_is_not_offered_is_exchanged_with_a_member_that_has_not_come() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    assert_eq!(world.answer_within("a0", &["n1"]), Answer::Node("n1".into()));
    assert_eq!(world.node("a1"), "n0");
    assert_eq!(world.arrive("a0", "n1"), Arrival::Wait);
    assert_eq!(world.arrive("a1", "n0"), Arrival::Wait);
    assert_eq!(world.phase("a"), GangPhase::Committing);
}

#[test]
fn after_some_misses_the_whole_is_planned_without_the_node() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.take_work();
    for _ in 0..2 {
        let text = "gang default/a: node n0, where it is to go, is not offered";
        assert_eq!(world.answer_within("a0", &["n7"]), Answer::Wait(text.into()));
        world.pass(1);
        assert!(
            world.woken().contains(&"a0".to_owned()),
            "the next offer may be another"
        );
    }
    assert_eq!(
        world.answer_within("a0", &["n7"]),
        Answer::Wait("gang default/a waits its turn".into())
    );
    assert_eq!(world.reserved(), Vec::<String>::new());
    let wanted = world.next().unwrap();
    assert_eq!(wanted.without, ["n0".into()]);
}

#[test]
fn while_others_come_a_member_whose_node_is_not_offered_yet_is_waited_for() {
    let mut world = World::new();
    world.members("a", 4, 4);
    world.plan();
    for other in ["a1", "a2", "a3"] {
        for _ in 0..2 {
            assert!(matches!(world.answer_within("a0", &["n7"]), Answer::Wait(_)));
        }
        world.come(other);
    }
    assert_eq!(world.phase("a"), GangPhase::Planned);
    assert_eq!(world.node("a0"), "n0");
}

#[test]
fn a_gang_that_is_tried_again_says_what_kube_scheduler_says() {
    let mut world = World::new();
    world.members("a", 1, 1);
    let said = "node(s) didn't match pod topology spread constraints";
    world.gangs.scheduler_says(&uid("a0"), &said.into());
    for _ in 0..4 {
        world.plan();
        for _ in 0..3 {
            world.answer_within("a0", &["n7"]);
        }
    }
    assert_eq!(
        world.text("a"),
        "gang default/a is tried again soon: kube-scheduler does not offer the planned nodes \
         (kube-scheduler says: node(s) didn't match pod topology spread constraints)"
    );
}

#[test]
fn after_some_such_plans_the_gang_waits() {
    let mut world = World::new();
    world.members("a", 1, 1);
    for _ in 0..4 {
        assert_eq!(world.phase("a"), GangPhase::Queued);
        world.plan();
        for _ in 0..3 {
            world.answer_within("a0", &["n7"]);
        }
    }
    assert_eq!(world.phase("a"), GangPhase::Backoff);
    assert_eq!(
        world.text("a"),
        "gang default/a is tried again soon: kube-scheduler does not offer the planned nodes"
    );
    world.pass(2);
    assert_eq!(world.next().unwrap().without, Vec::new(), "with a clean slate");
}

#[test]
fn a_gang_that_fits_only_on_a_node_that_was_not_offered_is_tried_there_again() {
    let mut world = World::new();
    world.members("a", 1, 1);
    world.plan();
    for _ in 0..3 {
        world.answer_within("a0", &["n7"]);
    }
    let wanted = world.refuse("no room without n0");
    assert_eq!(wanted.without, ["n0".into()]);
    assert_eq!(
        world.text("a"),
        "gang default/a is tried again soon: kube-scheduler does not offer the planned nodes"
    );
    world.pass(2);
    assert_eq!(world.next().unwrap().without, Vec::new());

    // A member that comes after the decision.
    let mut world = World::new();
    world.bound_gang_of("a", 2, &with_repair(claim("a", 2), Repair::Hold));
    world.gone("a1");
    world.gangs.unfit(world.now(), &"n1".into(), "gone");
    world.see(member("a2", with_repair(claim("a", 2), Repair::Hold)));
    world.plan_from(5);
    for _ in 0..3 {
        world.answer_within("a2", &["n7"]);
    }
    assert_eq!(world.refuse("no room without n5").without, ["n5".into()]);
    assert_eq!(world.next(), None);
    world.pass(2);
    assert_eq!(world.next().unwrap().without, Vec::new());
}

#[test]
fn a_node_lost_before_the_decision_means_a_new_plan_for_the_whole() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    world.gangs.unfit(world.now(), &"n7".into(), "gone");
    assert_eq!(world.phase("a"), GangPhase::Planned, "no concern of it");
    world.gangs.unfit(world.now(), &"n1".into(), "gone");
    assert_eq!(world.phase("a"), GangPhase::Queued);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert!(
        matches!(world.arrive("a0", "n0"), Arrival::Refuse(_)),
        "it stood at the barrier"
    );
    world.plan_from(2);
    assert_eq!(world.node("a0"), "n2");
}

#[test]
fn below_the_minimum_before_the_decision_all_is_given_back() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come("a0");
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Collecting);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.waits("a0"), "gang default/a: 1 of 2 members exist");
}

#[test]
fn a_member_beyond_the_minimum_that_goes_leaves_the_others_their_places() {
    let mut world = World::new();
    world.members("a", 3, 2);
    world.plan();
    world.gone("a1");
    assert_eq!(world.phase("a"), GangPhase::Planned);
    assert_eq!(world.reserved(), ["a-g0", "a-g2"]);
    world.come("a0");
    world.come("a2");
    assert_eq!(world.phase("a"), GangPhase::Committing);
}

#[test]
fn a_pod_made_anew_takes_the_place_of_the_one_before() {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.see(member("a2", claim("a", 2)));
    let wanted = world.next().unwrap();
    let placement = Placement {
        places: vec![place("n0", "g0"), place("n1", "g1")],
        ..Placement::default()
    };
    world.gangs.placed(world.now(), &wanted.gang, Ok(placement));
    assert!(matches!(world.answer("a2"), Answer::Wait(_)));
    world.take_work();
    world.gone("a0");
    assert_eq!(world.woken(), ["a2"]);
    assert_eq!(world.node("a2"), "n0");
}

/// The places of a gang that it can do without.
fn spares(world: &World, gang: &str) -> BTreeSet<u32> {
    let view = world.gangs.view(&key(gang)).unwrap();
    view.spares().map(|(_, spare)| spare.slot).collect()
}

#[test]
fn extras_come_and_go_without_the_gang() {
    let mut world = World::new();
    world.members("a", 4, 2);
    world.plan();
    world.come("a0");
    let extras = spares(&world, "a");
    assert_eq!(extras.len(), 2);
    assert_eq!(world.gangs.release_extras(world.now(), &key("a"), &extras), 2);
    assert_eq!(world.phase("a"), GangPhase::Planned);
    assert_eq!(world.reserved().len(), 2);
    assert_eq!(spares(&world, "a"), BTreeSet::new());
    assert_eq!(world.gangs.release_extras(world.now(), &key("a"), &extras), 0);
}

#[test]
fn the_last_ranks_are_given_back_first_and_none_that_a_role_needs() {
    let mut world = World::new();
    for rank in 0..4 {
        let claim = with_rank(claim("a", 2), rank);
        // The UIDs run the other way.
        world.see(member(&format!("a{}", 3 - rank), claim));
    }
    world.plan();
    let view = world.gangs.view(&key("a")).unwrap();
    let pods: Vec<&str> = view
        .spares()
        .map(|(_, spare)| spare.pod.unwrap().as_str())
        .collect();
    assert_eq!(pods, ["a0", "a1"]);
    assert_eq!(world.gangs.stocked().count(), 1);
}

/// Whoever takes over goes by the decision: it would keep places that somebody else has by then.
#[test]
fn places_that_stand_in_the_decision_are_not_given_back() {
    let mut world = World::new();
    world.members("a", 3, 2);
    world.plan();
    assert_eq!(spares(&world, "a").len(), 1);
    world.come("a0");
    world.come("a1");
    assert_eq!(world.phase("a"), GangPhase::Committing);
    assert_eq!(spares(&world, "a"), BTreeSet::new());
    world.write();
    assert_eq!(world.phase("a"), GangPhase::Binding);
    assert_eq!(spares(&world, "a"), BTreeSet::new());
}

/// A cluster of racks.
fn with_racks() -> World {
    let rack = Level {
        name: "rack".into(),
        label: "rack".into(),
    };
    let mut world = World::with(Settings {
        levels: Levels(vec![rack]),
        ..Settings::default()
    });
    world.gangs.synced(world.now());
    world
}

/// It wants slices of two members, each in one rack.
fn in_slices(mut claim: Claim) -> Claim {
    claim.wish.slice = Some(2);
    claim.wish.level = Some(LevelWish {
        level: "rack".into(),
        required: true,
    });
    claim
}

#[test]
fn a_slice_is_given_back_as_a_whole_or_not_at_all() {
    let mut world = with_racks();
    for rank in 0..4 {
        let claim = with_rank(in_slices(claim("a", 2)), rank);
        world.see(member(&format!("a{rank}"), claim));
    }
    world.plan();
    assert_eq!(spares(&world, "a").len(), 2);
    world.come("a3");
    assert_eq!(
        spares(&world, "a"),
        BTreeSet::new(),
        "of the second slice one is there"
    );
}

#[test]
fn members_without_devices_are_in_no_slice() {
    let mut world = with_racks();
    let claim = in_slices(claim("a", 5));
    let mut launcher = member("launcher", claim.clone());
    (launcher.shape, launcher.asks) = (None, [].into());
    world.see(launcher);
    for rank in 0..4 {
        world.see(member(&format!("a{rank}"), with_rank(claim.clone(), rank)));
    }
    let wanted = world.next().unwrap();
    assert_eq!(
        (wanted.must, wanted.members.len(), wanted.terms.slice),
        (4, 4, Some(2))
    );
    world.gone("launcher");
    assert!(
        world
            .text("a")
            .contains("slices of 2 members do not make up the 5"),
        "{}",
        world.text("a")
    );
    world.see(member("launcher", claim));
    assert!(
        world
            .text("a")
            .contains("slices of 2 members do not make up the 5"),
        "{}",
        world.text("a")
    );
}

/// Gang `a` is planned where `v0` was, for which `v0` and `v1` have to go.
fn preempts_both(world: &mut World) -> Wanted {
    world.members("a", 1, 1);
    let wanted = world.next().unwrap();
    let placement = Placement {
        places: vec![place("n0", "v-g0")],
        victims: vec![uid("v0"), uid("v1")],
        ..Placement::default()
    };
    world.gangs.placed(world.now(), &wanted.gang, Ok(placement));
    wanted
}

#[test]
fn pods_that_have_to_go_are_evicted_and_their_devices_wait_for_the_gang() {
    let mut world = World::new();
    world.bound_gang("v", 2, 2);
    let wanted = preempts_both(&mut world);
    assert_eq!(world.phase("a"), GangPhase::Preempting);
    let by = wanted.gang;
    let pods = vec![uid("v0"), uid("v1")];
    assert_eq!(world.take_work(), [Work::Evict { pods, by }]);
    assert_eq!(world.reserved(), ["v-g0"]);
    assert_eq!(
        world.waits("a0"),
        "gang default/a waits for pods that have to go for it"
    );
    for pod in ["v0", "v1"] {
        world.see(super::world::leaving(super::world::bound(
            member(pod, claim("v", 2)),
            "n0",
        )));
        world.gone(pod);
        assert_eq!(
            world.phase("a"),
            GangPhase::Preempting,
            "its devices may not be free yet"
        );
        world.gangs.victim_gone(world.now(), &uid(pod));
    }
    assert_eq!(world.phase("a"), GangPhase::Planned);
    assert_eq!(
        world.reserved(),
        ["v-g0"],
        "the gang that had to go keeps nothing"
    );
    assert_eq!(world.woken(), ["a0"]);
    assert_eq!(world.come("a0"), Arrival::Wait);
}

#[test]
fn a_gang_that_went_for_another_begins_anew_as_a_whole() {
    let mut world = World::new();
    world.bound_gang("v", 2, 2);
    preempts_both(&mut world);
    world.gone("v0");
    world.see(member("v2", claim("v", 2)));
    world.room += 1;
    assert_eq!(world.next(), None, "its replacements do not join one by one");
    world.gone("v1");
    assert_eq!(world.phase("v"), GangPhase::Collecting);
    world.see(member("v3", claim("v", 2)));
    assert_eq!(world.next().unwrap().must, 2);
}

#[test]
fn the_rest_of_a_gang_that_goes_for_another_is_evicted_and_deleted_only_if_it_asked_to_be_started_anew() {
    for (repair, evicted) in [
        (Repair::Hold, true),
        (Repair::Ignore, true),
        (Repair::Restart, false),
    ] {
        let mut world = World::new();
        world.bound_gang_of("v", 2, &with_repair(claim("v", 2), repair));
        preempts_both(&mut world);
        world.gone("v0");
        world.take_work();
        // A budget does not let the other go.
        world.pass(600);
        let pods = vec![uid("v1")];
        let rest = world.take_work().into_iter().find_map(|work| match work {
            Work::EvictRest { pods, of, .. } if *of == key("v") => Some((pods, true)),
            Work::Delete { pods, .. } => Some((pods, false)),
            _ => None,
        });
        assert_eq!(rest, Some((pods, evicted)), "{repair:?}");
    }
}

#[test]
fn pods_that_do_not_go_in_time_are_let_be() {
    let mut world = World::new();
    world.members("a", 1, 1);
    let wanted = world.next().unwrap();
    let placement = Placement {
        places: vec![place("n0", "g0")],
        victims: vec![uid("other")],
        ..Placement::default()
    };
    world.gangs.placed(world.now(), &wanted.gang, Ok(placement));
    world.pass(120);
    assert_eq!(world.phase("a"), GangPhase::Backoff);
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(
        world.text("a"),
        "gang default/a is tried again soon: pods that have to go for it did not go in time"
    );
}

#[test]
fn a_budget_in_the_way_is_told_by_whoever_waits_and_by_whoever_goes_in_part() {
    let why = "pod v1: it cannot be evicted yet: budget web";
    let budget = |world: &mut World, gang: &str| {
        world
            .gangs
            .hindered(world.now(), &key(gang), Hindrance::Budget, Some(why.into()));
    };
    let told = |world: &mut World, gang: &str| {
        let statuses = world.gangs.take_statuses();
        let (_, status) = statuses
            .into_iter()
            .rev()
            .find(|(of, _)| **of == key(gang))
            .unwrap();
        let hindered = status
            .conditions
            .iter()
            .find(|condition| condition.type_ == "Hindered");
        (status.message, hindered.map(|condition| condition.reason.clone()))
    };
    let in_the_way = Some("DisruptionBudget".to_owned());

    let mut world = preempting();
    budget(&mut world, "a");
    let waits = "their devices are kept for it";
    assert_eq!(
        told(&mut world, "a"),
        (format!("{waits}; {why}"), in_the_way.clone())
    );
    world.pass(120);
    assert_eq!(
        world.text("a"),
        format!("gang default/a is tried again soon: pods that have to go for it did not go in time; {why}")
    );
    assert_eq!(told(&mut world, "a").1, None, "nobody has to go any more");

    let mut world = preempting();
    budget(&mut world, "a");
    world.gangs.victim_gone(world.now(), &uid("slow"));
    assert_eq!(told(&mut world, "a").1, in_the_way, "one has to go yet");
    world.gangs.victim_gone(world.now(), &uid("quick"));
    assert_eq!(told(&mut world, "a").1, None, "all are gone");

    let mut world = World::new();
    world.bound_gang_of("v", 2, &claim("v", 2));
    preempts_both(&mut world);
    world.gone("v0");
    budget(&mut world, "v");
    let goes = "members of before that are not gone yet: 1";
    assert_eq!(told(&mut world, "v"), (format!("{goes}; {why}"), in_the_way));
    world.gone("v1");
    assert_eq!(told(&mut world, "v").1, None);
}

/// Gang `a` waits for two pods to go.
fn preempting() -> World {
    let mut world = World::new();
    world.members("a", 1, 1);
    let wanted = world.next().unwrap();
    let placement = Placement {
        places: vec![place("n0", "g0")],
        victims: vec![uid("slow"), uid("quick")],
        ..Placement::default()
    };
    world.gangs.placed(world.now(), &wanted.gang, Ok(placement));
    world.take_work();
    world
}

/// A pod is on its way out, with so many seconds left.
fn ends(world: &mut World, pod: &str, left: i64) {
    let by = world.now().unix + left;
    world.gangs.victim_ends(world.now(), &uid(pod), by);
}

#[test]
fn pods_that_take_their_time_to_end_are_waited_for_and_no_others_have_to_go() {
    let mut world = preempting();
    ends(&mut world, "slow", 600);
    assert_eq!(
        world.text("a"),
        "gang default/a waits for pods that have to go for it"
    );
    ends(&mut world, "quick", 30);
    insta::assert_snapshot!(world.text("a"), @"gang default/a waits for pods that are ending");
    world.pass(30);
    world.gangs.victim_gone(world.now(), &uid("quick"));
    world.pass(570 + 119);
    assert_eq!(world.phase("a"), GangPhase::Preempting);
    assert_eq!(world.reserved(), ["g0"]);
    assert_eq!(world.take_work(), []);
    world.gangs.victim_gone(world.now(), &uid("slow"));
    assert_eq!(world.phase("a"), GangPhase::Planned);
    assert_eq!(world.come("a0"), Arrival::Wait);
}

#[test]
fn what_others_leave_who_are_on_their_way_out_is_kept_for_a_gang_and_nobody_is_evicted_for_it() {
    let mut world = World::new();
    world.members("a", 1, 1);
    let wanted = world.next().unwrap();
    let placement = Placement {
        places: vec![place("n0", "g0")],
        leaving: [(uid("slow"), world.now().unix + 600)].into(),
        ..Placement::default()
    };
    world.gangs.placed(world.now(), &wanted.gang, Ok(placement));
    assert_eq!(world.take_work(), []);
    insta::assert_snapshot!(world.text("a"), @"gang default/a waits for pods that are ending");
    world.pass(719);
    assert_eq!(world.phase("a"), GangPhase::Preempting);
    assert_eq!(world.reserved(), ["g0"]);
    world.gangs.victim_gone(world.now(), &uid("slow"));
    assert_eq!(world.phase("a"), GangPhase::Planned);
    assert_eq!(world.woken(), ["a0"]);
}

#[test]
fn pods_that_are_late_by_their_own_word_are_let_be() {
    let mut world = preempting();
    world.gangs.victim_gone(world.now(), &uid("quick"));
    ends(&mut world, "slow", 600);
    world.pass(719);
    assert_eq!(world.phase("a"), GangPhase::Preempting);
    world.pass(1);
    assert_eq!(world.phase("a"), GangPhase::Backoff, "its node may be lost");
    assert_eq!(world.reserved(), Vec::<String>::new());
}

#[test]
fn nobody_is_waited_for_longer_than_an_hour_whatever_he_says() {
    let mut world = preempting();
    for pod in ["slow", "quick"] {
        world.gangs.victim_ends(world.now(), &uid(pod), i64::MAX);
    }
    world.pass(3719);
    assert_eq!(world.phase("a"), GangPhase::Preempting);
    world.pass(1);
    assert_eq!(world.phase("a"), GangPhase::Backoff);
}

#[test]
fn who_has_not_begun_to_go_in_time_is_let_be_though_the_others_have() {
    for left in [600, -1_000] {
        let mut world = preempting();
        ends(&mut world, "slow", left);
        if left < 0 {
            ends(&mut world, "quick", left);
        }
        world.pass(120);
        assert_eq!(world.phase("a"), GangPhase::Backoff);
    }
}

#[test]
fn the_namespace_that_holds_least_goes_first() {
    let mut world = World::new();
    world.members("a", 4, 1);
    world.plan();
    let mut early = member("b0", claim("b", 1));
    early.created = 1;
    world.see(early);
    world.pass(5);
    let mut other = claim("c", 1);
    other.key.namespace = "team".into();
    world.see(member("c0", other));
    let order: Vec<String> = world
        .gangs
        .queue(world.now())
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(order, ["team/c", "default/b"]);
}

#[test]
fn calls_about_unknown_pods_and_gangs_mean_nothing() {
    let mut world = World::new();
    let now = world.now();
    world.gangs.withdraw(now, &uid("x"));
    world.gangs.member_gone(now, &uid("x"));
    world.gangs.victim_gone(now, &uid("x"));
    world.gangs.bind_ended(now, &uid("x"), BindEnd::Bound);
    world.gangs.committed(now, &key("x"), "id", Ok(()));
    world.gangs.placed(now, &key("x"), Ok(Placement::default()));
    world.gangs.unfit(now, &"n0".into(), "gone");
    world.gangs.object_gone(now, "default", "x");
    assert_eq!(world.arrive("x", "n0"), Arrival::Single);
    assert_eq!(world.take_work(), []);
    assert_eq!(world.gangs.take_statuses(), []);
}

#[test]
fn gangs_that_cannot_be_planned_yet_are_not_looked_at_with_every_event() {
    let mut world = World::new();
    for number in 0..50 {
        world.members(&format!("g{number}-"), 1, 2);
    }
    world.room += 1;
    assert_eq!(world.next(), None);
    assert_eq!(world.gangs.untried.len(), 0);
    world.see(member("second", claim("g7-", 2)));
    assert_eq!(world.gangs.untried.len(), 1);
    assert_eq!(*world.plan().gang, key("g7-"));
}

proptest! {
    #[test]
    fn whoever_is_first_in_the_queue_and_was_not_tried_is_next(
        gangs in prop::collection::vec((0..3_u8, 0..2_i32, 0..4_u64, 1..4_u32), 1..12),
        fits in prop::collection::vec(any::<bool>(), 40),
        grows in prop::collection::vec(prop::bool::weighted(0.2), 40),
    ) {
        let mut world = World::new();
        let mut at = 0;
        for (number, (space, priority, after, members)) in gangs.iter().enumerate() {
            world.pass(*after);
            for _ in 0..*members {
                let mut claim = claim(&format!("g{number}"), *members);
                claim.key.namespace = format!("ns{space}").into();
                let mut pod = member(&format!("p{at}"), claim);
                pod.priority = *priority;
                world.see(pod);
                at += 1;
            }
        }
        for (fits, grows) in fits.into_iter().zip(grows) {
            world.room += u64::from(grows);
            if grows {
                // What was not tried since room grew is known once the next is asked for.
                world.gangs.untried = world.gangs.queue(world.now()).into_iter().collect();
            }
            let queue = world.gangs.queue(world.now());
            let first = queue.into_iter().find(|gang| world.gangs.untried.contains(gang));
            let next = world.next();
            prop_assert_eq!(next.as_ref().map(|wanted| &wanted.gang), first.as_ref());
            let Some(wanted) = next else { continue };
            let result = if fits {
                let places = wanted.members.iter();
                let places = places.map(|member| place("n0", member.uid.as_str()));
                Ok(Placement {
                    places: places.collect(),
                    ..Placement::default()
                })
            } else {
                Err(refused("no room"))
            };
            world.gangs.placed(world.now(), &wanted.gang, result);
        }
    }
}
