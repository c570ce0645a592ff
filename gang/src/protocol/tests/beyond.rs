//! Gangs and members that are one too many: they wait, come in when others go, and one namespace's cannot keep out another's.

use gantry_api::GangPhase;

use super::world::{World, key, member, membership, uid};
use crate::protocol::{Arrival, Member, Settings, Stage};

fn world(max_gangs: usize, max_members: usize) -> World {
    let mut world = World::with(Settings {
        max_gangs,
        max_members,
        ..Settings::default()
    });
    world.gangs.synced(world.now());
    world
}

/// The only pod of a gang of that name in a namespace.
fn alone(namespace: &str, gang: &str) -> Member {
    let mut membership = membership(gang, 1);
    membership.key.namespace = namespace.into();
    member(&format!("{namespace}/{gang}"), membership)
}

/// How many gangs of a namespace are looked at.
fn kept(world: &World, namespace: &str) -> usize {
    let views = world.gangs.views();
    views.filter(|view| *view.key().namespace == *namespace).count()
}

#[test]
fn a_gang_too_many_waits_says_so_and_is_looked_at_once_another_is_over() {
    let mut world = world(1, 20);
    world.members("a", 2, 1);
    world.members("b", 2, 2);
    assert_eq!(
        world.waits("b0"),
        "more than 1 gangs are there: its own is looked at when there are fewer"
    );
    assert!(matches!(world.arrive("b0", "n0"), Arrival::Refuse(_)));
    assert_eq!(world.gangs.gang_of(&uid("b0")), None);
    world.gone("a0");
    world.gone("a1");
    world.pass(60);
    assert_eq!(world.phase("b"), GangPhase::Queued);
    assert!(
        world.woken().contains(&"b0".to_owned()),
        "what it was told no longer holds"
    );
    assert_eq!(world.waits("b0"), "gang default/b waits its turn");
}

#[test]
fn a_member_too_many_waits_says_so_and_counts_once_another_is_gone() {
    let mut world = world(10, 2);
    world.members("a", 4, 2);
    assert_eq!(
        world.waits("a2"),
        "its gang has 2 members, and no more are looked at: it is when there are fewer"
    );
    world.gone("a0");
    world.pass(1);
    assert_eq!(world.status("a").members, 2);
    assert_eq!(world.waits("a2"), "gang default/a waits its turn");
    assert!(
        world.waits("a3").starts_with("its gang has 2 members"),
        "its turn comes later"
    );
}

#[test]
fn a_gang_that_ends_as_a_whole_is_followed_by_those_of_its_pods_that_waited() {
    let mut world = world(10, 2);
    world.members("a", 3, 2);
    for pod in ["a0", "a1"] {
        let mut failed = member(pod, membership("a", 2));
        failed.stage = Stage::Failed;
        world.see(failed);
    }
    world.pass(60);
    assert_eq!(world.status("a").members, 1);
    assert!(world.waits("a2").ends_with("1 of 2 members exist"));
}

#[test]
fn pods_that_wait_and_go_leave_nothing_behind() {
    let mut world = world(1, 1);
    world.members("a", 2, 1);
    world.members("b", 2, 1);
    let mut failed = member("b0", membership("b", 1));
    failed.stage = Stage::Failed;
    world.see(failed);
    for pod in ["b0", "b1", "a0", "a1"] {
        world.gone(pod);
    }
    world.pass(60);
    world.gangs.assert_empty();
}

#[test]
fn a_namespace_leaves_room_for_every_other() {
    let mut world = world(100, 20);
    for number in 0..1_000 {
        world.see(alone("greedy", &format!("g{number}")));
    }
    assert_eq!(kept(&world, "greedy"), 50);
    assert_eq!(
        world.waits("greedy/g999"),
        "namespace greedy has its share of the 100 gangs that are looked at: this one is when it has fewer, in the order in which they came"
    );
    for namespace in ["b", "c", "d", "e"] {
        for number in 0..2 {
            world.see(alone(namespace, &format!("g{number}")));
        }
        assert_eq!(kept(&world, namespace), 2, "{namespace}");
    }
}

#[test]
fn those_that_waited_come_in_namespace_by_namespace_and_in_their_order() {
    let mut world = world(4, 20);
    for (namespace, gang) in [
        ("x", "1"),
        ("x", "2"),
        ("x", "3"),
        ("x", "4"),
        ("x", "5"),
        ("y", "1"),
        ("y", "2"),
        ("y", "3"),
        ("z", "1"),
        ("z", "2"),
    ] {
        world.see(alone(namespace, gang));
    }
    let kept_of = |world: &World| ["x", "y", "z"].map(|namespace| kept(world, namespace));
    assert_eq!(kept_of(&world), [2, 1, 1]);
    world.gone("x/1");
    world.pass(60);
    assert_eq!(kept_of(&world), [1, 1, 1], "none of three has more than are left");
    world.gone("y/1");
    world.pass(60);
    assert_eq!(kept_of(&world), [1, 1, 1]);
    assert!(
        world.gangs.gang_of(&uid("y/2")).is_some(),
        "whoever has fewest goes first"
    );
    for pod in ["x/2", "y/2", "z/1", "x/3"] {
        world.gone(pod);
        world.pass(60);
    }
    assert!(world.gangs.gang_of(&uid("z/2")).is_some());
    assert!(world.gangs.gang_of(&uid("x/4")).is_some());
}

#[test]
fn of_many_that_wait_a_few_come_in_at_a_time() {
    let mut world = world(1, 10_000);
    world.members("a", 1, 1);
    world.members("b", 2_500, 1);
    world.gone("a0");
    let start = world.now();
    world.passed += Settings::default().linger;
    world.gangs.tick(world.now());
    let count = |world: &World| world.gangs.view(&key("b")).unwrap().exist();
    assert_eq!(count(&world), 1_000);
    assert_eq!(world.gangs.next_due(), Some(world.now().at), "at once");
    world.gangs.tick(world.now());
    world.gangs.tick(world.now());
    assert_eq!(count(&world), 2_500);
    assert_ne!(world.gangs.next_due(), Some(start.at));
}

#[test]
fn what_is_decided_is_taken_up_however_many_gangs_there_are() {
    let mut before = World::new();
    before.members("b", 2, 2);
    before.plan();
    before.come_all("b", 2);
    before.write();
    let status = before.status("b");
    let mut world = World::with(Settings {
        max_gangs: 1,
        identity: "second".into(),
        ..Settings::default()
    });
    world.members("a", 1, 1);
    world.members("b", 2, 2);
    world.show("b", status);
    world.gangs.synced(world.now());
    assert_eq!(world.phase("b"), GangPhase::Binding);
    assert_eq!(world.reserved(), ["b-g0", "b-g1"]);
    assert_eq!(world.bind("b1"), "n1");
}
