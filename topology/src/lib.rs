//! The machine as a graph, the bandwidth of its links, and the choice of GPUs on it.
//!
//! Pure functions on values: no I/O, async, clock or unsafe. Both daemons, the simulator and the command line use this
//! crate for every decision about devices; it depends on no other crate of the project.
#![forbid(unsafe_code)]

pub mod bandwidth;
pub mod choice;
pub mod collective;
pub mod draw;
pub mod graph;
pub mod machine;
pub mod mig;
pub mod nics;
pub mod read;
pub mod set;

pub use bandwidth::Rates;
pub use choice::{Choice, MachineKind, Purpose, Table, Tables};
pub use collective::{Collective, LinkClass};
pub use graph::MachineGraph;
pub use machine::{
    ComputeInstance, Degradation, Fabric, Gpu, GpuInstance, GpuUuid, Host, IdList, Link, Machine,
    MachineError, MachineParts, Mig, MigAttributes, MigUuid, Nic, NvLinkBundle, NvLinkPorts, PathClass,
    PathMatrix, PcieAddress, PcieLink, PeerRefusal, PeerStatus, Throttle,
};
pub use nics::NicSet;
pub use read::{ReadError, read};
pub use set::{GpuSet, GpuSetError};
