//! Fuzz targets: one function per external input. They panic if an invariant is violated. `fuzz/` runs them under a
//! fuzzer, the tests beside this folder on generated input.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each target uses its part of this; what must hold and does not is a panic"
)]

pub mod cdi;
pub mod kubelet;
