//! Gangs in the extender: what the pure half (crate `gantry-gang`) says, on this cluster. `terrain` is what a plan is made from.

pub mod owners;
pub mod plan;
pub mod preempt;
pub mod terrain;
