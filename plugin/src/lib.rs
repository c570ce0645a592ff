//! The node daemon: GPU discovery, the device plugin and the hand-over to kubelet.
//!
//! ```text
//! NVML -> hardware -> offer (by the config) -> inventory -> kubelet's servers, CDI, GpuNode, metrics
//! pods of the node (grants) -> handover <- kubelet: GetPreferredAllocation, Allocate, PodResources
//! handover -> responses to kubelet, holders and deviations in GpuNode.status
//! ```

#![allow(missing_docs, reason = "one program: a comment stands only where it adds to the name")]

pub mod allocate;
pub mod args;
pub mod cdi;
pub mod cluster;
pub mod discover;
pub mod handover;
pub mod health;
pub mod inventory;
pub mod kubelet;
pub mod kubelet_config;
pub mod labels;
pub mod nccl;
pub mod nvml;
pub mod observe;
pub mod offer;
pub mod telemetry;

mod daemon;
mod processes;
mod root;
mod watchdog;

pub use args::Args;
pub use daemon::{run, run_with, serve};
pub use watchdog::WatchdogTiming;
