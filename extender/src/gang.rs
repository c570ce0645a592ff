//! Gangs on this cluster, as the crate `gantry-gang` decides them: `objects` reads and writes the Gang objects, `owners` follows
//! the owners, `work` carries out actions on pods, `events` publishes Events.

pub mod budgets;
pub mod events;
mod listed;
pub mod objects;
pub mod owners;
pub mod volumes;
pub mod work;
