//! What is fuzzed: a function of any input for each door to the outside. It panics where what must hold does not. `fuzz/` runs them
//! under a fuzzer, the tests beside this folder on generated input.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each target uses its part of this; what must hold and does not is a panic"
)]

pub mod cdi;
pub mod kubelet;
