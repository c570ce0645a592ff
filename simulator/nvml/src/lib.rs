//! A simulated `libnvidia-ml.so.1`, driven by a machine file.
//!
//! Built as a shared library it serves any NVML client: it looks for `machine.yaml` beside itself (or where
//! `GANTRY_SIM_MACHINE` says), so that several machines can live in one process. Linked as a Rust library it offers
//! [`control`], which changes a machine while clients run on it; [`companion`], which lays down the `/proc`, `/sys` and `/dev`
//! entries that NVML alone does not give; and [`install()`], which puts all of it into one folder.
//!
//! ```text
//! machine.yaml -> facts (everything NVML reports, filled in) -> library -> abi (the C functions) -> any NVML client
//! Controller -> control.yaml + control.shm ------------------^
//! ```
//!
//! The simulator depends only on the machine graph of the project, and is independent of its client.
#![allow(
    unsafe_code,
    reason = "the C ABI of NVML, and memory shared between processes; each block says why it is sound"
)]

mod abi;
pub mod companion;
pub mod control;
pub mod facts;
mod install;
mod library;
pub mod names;

pub use install::{
    InstallError, Installed, LIBRARY_NAME, MACHINE_FILE, Placed, install, install_text, library_path, place,
};
