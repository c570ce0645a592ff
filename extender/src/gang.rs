//! Gangs in the extender: what the pure half (crate `gantry-gang`) says, on this cluster. `input` is what a plan is made from.
//! `objects` reads and writes the Gang objects, `work` does to pods what gangs need, `events` tells people.

pub mod budgets;
pub mod events;
mod listed;
pub mod objects;
pub mod owners;
pub mod volumes;
pub mod work;
