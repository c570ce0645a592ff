//! From the decision on: how it is written, that there is only forward, and what becomes of lost members.

mod binding;
mod growing;
mod lost;
mod nodes;
mod over;
mod restart;
mod spares;
mod writing;

use gantry_api::Decision;

use super::world::World;
use crate::protocol::Work;

/// Gang `a` of two members, of which two are needed, whose decision is being written.
fn committing() -> (World, Decision) {
    let mut world = World::new();
    world.members("a", 2, 2);
    world.plan();
    world.come_all("a", 2);
    let (_, decision) = world.commit();
    (world, decision)
}

fn deleted(world: &mut World) -> Vec<String> {
    let deleted = world.take_work().into_iter().filter_map(|work| match work {
        Work::Delete { pods, .. } => Some(pods),
        _ => None,
    });
    deleted.flatten().map(|uid| uid.to_string()).collect()
}
