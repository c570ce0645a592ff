//! What events and failures mean for a GPU's health. Pure: tables, the operator's exceptions and the record of what happened;
//! NVML is asked elsewhere, and who is told is decided elsewhere.
//!
//! | what happened | what follows | what ends it |
//! |---|---|---|
//! | application Xid | counted, nothing else | - |
//! | resettable or fatal Xid | GPU unhealthy, in quarantine | a proof that the GPU was reset |
//! | the same, or a MIG-instance Xid, in an event that names an instance, where `data/xid.csv` says that it is confined | the MIG devices in it unhealthy | the same, or the instance is gone or made anew |
//! | link Xid | links are read again; GPU unhealthy if the link needs a reset of the GPU, if links went down, or if the driver does not tell what it needs | the same, or the links that went down are up again |
//! | memory repair failed or waiting, uncorrected errors, the driver asks for a reset | GPU unhealthy | NVML says so no longer |
//! | GPU lost | GPU unhealthy | the GPU answers again |
//! | driver gone | all GPUs unhealthy | the driver is back and the machine was read again |
//!
//! A reset is proved by what NVML and the kernel show, see [`Proof`]: the driver went and came, the GPU was off the bus and answers,
//! the kernel's binding of the GPU to its driver is another, or what only a reset ends (the driver's wish, a repair that waits, the
//! volatile error count) was there and is over. NVML has no counter of resets; a GPU reset by `nvidia-smi --gpu-reset` that left no
//! such trace stays in quarantine until a person lifts it.
//!
//! A quarantine outlives the daemon: it is stored in `GpuNode.status` and adopted in the same boot.

mod book;
mod cause;
mod checks;
mod counts;
mod fault;
mod vitals;
mod xid;

pub use book::Book;
pub use cause::{Cause, Ended, GpuName, Loss, Outage, OutageKind, Proof, Trouble};
pub use checks::{HealthChecks, XidList, XidListError};
pub use counts::XidCounts;
pub use fault::{Extent, Fault, Part};
pub use vitals::{Failed, Vitals};
pub use xid::{Class, Table, Xid};
