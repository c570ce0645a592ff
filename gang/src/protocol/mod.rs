//! The life of gangs: members come, the whole gets a place, members arrive at a barrier, the decision is written, all are bound, losses are
//! repaired. A state machine: facts and time in, answers and work out. It neither plans nor touches devices: places are given to it.

mod types;

pub use types::{
    Answer, Arrival, Devices, Member, Place, Placed, Placement, Refused, ShapeId, Stage, Wanted,
    WantedMember, Work,
};
