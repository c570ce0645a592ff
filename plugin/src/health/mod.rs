//! Judges events and failures: their effect on a GPU's health. Pure: the Xid table, the operator's selection
//! and the health tracker.
//!
//! | what happened | what follows | what ends it |
//! |---|---|---|
//! | application Xid | counted only | - |
//! | resettable or fatal Xid | GPU unhealthy, in quarantine | a proof that the GPU was reset |
//! | the same, or a MIG-instance Xid, from an event that names an instance, if `api/data/xid.csv` confines it | the MIG devices in it unhealthy | the same, or the instance is gone or replaced |
//! | link Xid | links are read again; GPU unhealthy if the link needs a reset of the GPU, if links went down, or if the driver does not report a recovery action | the same, or the links that went down are up again |
//! | memory repair failed or waiting, uncorrected errors, the driver requests a recovery action | GPU unhealthy | NVML no longer reports it |
//! | GPU lost, or a query of it fails | GPU unhealthy | the GPU responds again |
//! | the NVLink fabric does not serve the GPU, compute mode PROHIBITED | GPU unhealthy | NVML no longer reports it |
//! | NVLinks down without an Xid, a limited fabric | GPU degraded: reported, and allocated | NVML no longer reports it |
//! | driver gone | all GPUs unhealthy | the driver is back and the machine was read again |
//!
//! Evidence of a reset is what NVML and the kernel show, see [`Proof`]: the driver was reloaded; the GPU was
//! off the bus and responds again; the kernel's binding of the GPU to its driver changed; or a state that only
//! a reset ends is over (recovery action, pending repair, volatile error count). NVML has no reset counter: a
//! reset by `nvidia-smi --gpu-reset` without such a trace must be confirmed by the operator.
//!
//! A quarantine survives restarts of the daemon: it is stored in `GpuNode.status` and adopted in the same boot.

mod checks;
mod clocks;
mod evidence;
mod fault;
mod tracker;
mod vitals;
mod xid;

pub use checks::{FabricCheck, HealthChecks, XidList, XidListError};
pub use clocks::{ClockLog, ClockSample};
pub use evidence::EvidenceLog;
pub use fault::{
    Cause, ClearedFault, Extent, Fault, GpuName, Loss, Outage, OutageKind, Part, Proof, Trouble,
};
pub use gantry_api::xid::{Class, Table, Xid};
pub use tracker::HealthTracker;
pub use vitals::{FailedCalls, Vitals};
pub use xid::XidCounts;
