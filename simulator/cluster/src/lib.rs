//! An embedded cluster for `gantry demo` and for tests that need no Kubernetes: an in-memory API server, a scheduler
//! loop that speaks the extender protocol, and a simulated kubelet per node.
//!
//! It replaces Kubernetes for the two real daemons, without a difference that they could observe. It makes none of
//! their decisions: like kubelet it chooses devices at random only. Everything listens on loopback or in one folder.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "a comment says what a name does not")]

pub mod api;
pub mod kubelet;
mod mirror;
pub mod scheduler;
