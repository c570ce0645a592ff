//! What events and failures mean for a GPU's health. Pure: tables, the operator's exceptions and the record of what happened;
//! NVML is asked elsewhere, and who is told is decided elsewhere.
//!
//! | what happened | what follows | what ends it |
//! |---|---|---|
//! | application Xid | counted, nothing else | - |
//! | resettable, fatal or MIG-instance Xid | GPU unhealthy | the driver was reloaded, or the GPU was lost and answers again (either resets it) |
//! | link Xid | links are read again; GPU unhealthy if the link needs a reset of the GPU | as above |
//! | GPU lost | GPU unhealthy | the GPU answers again |
//! | driver gone | all GPUs unhealthy | the driver is back and the machine was read again |
//!
//! The record lives as long as the daemon. After a restart NVML's own state decides: a GPU that cannot be reached is unhealthy.

mod book;
mod checks;
mod counts;
mod xid;

pub use book::{Book, Fault, Outage};
pub use checks::{HealthChecks, HealthChecksError};
pub use counts::XidCounts;
pub use xid::{Class, Table, Xid};
