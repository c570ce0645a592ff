//! Pods and gangs that nobody knows.

use super::super::world::{World, key, uid};
use crate::protocol::GangEvent;
use crate::protocol::{Arrival, BindEnd, Placement};

#[test]
fn calls_about_unknown_pods_and_gangs_mean_nothing() {
    let mut world = World::new();
    world.handle(GangEvent::Disconnected { pod: &uid("x") });
    world.handle(GangEvent::MemberGone { pod: &uid("x") });
    world.handle(GangEvent::VictimGone { pod: &uid("x") });
    world.handle(GangEvent::BindEnded { pod: &uid("x"), outcome: BindEnd::Bound });
    world.handle(GangEvent::Committed { gang: &key("x"), decision: "id", result: Ok(()) });
    world.handle(GangEvent::Planned { gang: &key("x"), result: Ok(Placement::default()) });
    world.handle(GangEvent::NodeLost { node: &"n0".into() });
    world.handle(GangEvent::ObjectGone { namespace: "default", name: "x" });
    assert_eq!(world.arrive("x", "n0"), Arrival::Single);
    assert_eq!(world.take_work(), []);
    assert_eq!(world.gangs.take_statuses(), []);
}
