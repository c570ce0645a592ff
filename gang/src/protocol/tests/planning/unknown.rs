//! Pods and gangs that nobody knows.

use super::super::world::{World, key, uid};
use crate::protocol::{Arrival, BindEnd, Placement};

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
    world.gangs.unfit(now, &"n0".into());
    world.gangs.object_gone(now, "default", "x");
    assert_eq!(world.arrive("x", "n0"), Arrival::Single);
    assert_eq!(world.take_work(), []);
    assert_eq!(world.gangs.take_statuses(), []);
}
