//! From the first member to the last binding, when nothing goes wrong.

use gantry_api::{GangPhase, Reason};

use super::world::{World, bound, member, membership, uid};
use crate::protocol::GangEvent;
use crate::protocol::{Answer, Arrival, BindEnd};

#[test]
fn a_gang_collects_is_planned_arrives_is_decided_and_bound() {
    let mut world = World::new();

    world.see(member("a0", membership("a", 2)));
    assert_eq!(world.phase("a"), GangPhase::Pending);
    assert_eq!(world.waits("a0"), Reason::WaitingForMembers);
    assert_eq!(world.next(), None);

    world.see(member("a1", membership("a", 2)));
    assert_eq!(world.phase("a"), GangPhase::Queued);
    assert_eq!(world.waits("a0"), Reason::WaitingForTurn);

    let wanted = world.plan();
    assert_eq!((wanted.must, wanted.members.len()), (2, 2));
    assert_eq!(world.phase("a"), GangPhase::Reserved);
    assert_eq!(world.woken(), ["a0", "a1"]);
    assert_eq!(world.reserved(), ["a-g0", "a-g1"]);

    assert_eq!(world.come("a0"), Arrival::Wait);
    assert_eq!(world.take_work(), []);
    assert_eq!(world.come("a1"), Arrival::Wait);
    assert_eq!(world.phase("a"), GangPhase::Committing);
    assert_eq!(world.arrive("a0", "n0"), Arrival::Wait);

    let decision = world.write();
    assert_eq!((decision.min, decision.reservations.len()), (2, 2));
    assert_eq!(decision.domain, "rack r7");
    assert_eq!(world.phase("a"), GangPhase::Binding);

    for (pod, node) in [("a0", "n0"), ("a1", "n1")] {
        let Arrival::Go(placed) = world.arrive(pod, node) else {
            panic!("{pod} may go");
        };
        assert_eq!(placed.node.as_str(), node);
        world.handle(GangEvent::BindEnded { pod: &uid(pod), outcome: BindEnd::Bound });
    }
    assert_eq!(world.phase("a"), GangPhase::Bound);
    assert_eq!(world.reserved(), ["a-g0", "a-g1"], "until the pods are seen to be bound");
    world.see(bound(member("a0", membership("a", 2)), "n0"));
    world.see(bound(member("a1", membership("a", 2)), "n1"));
    assert_eq!(world.reserved(), Vec::<String>::new());
    assert_eq!(world.answer("stranger"), Answer::Single);
}
