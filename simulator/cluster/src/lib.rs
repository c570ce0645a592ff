//! An embedded cluster for `gantry demo` and for tests that need no Kubernetes: an in-memory API server, a scheduler loop that
//! speaks the extender protocol, and a kubelet stand-in per node.
//!
//! It stands in for Kubernetes towards the two real daemons, as closely as they can tell. It decides nothing of theirs: no GPU
//! is ever chosen here except as kubelet itself would, at random. Everything listens on loopback or in one folder.
#![forbid(unsafe_code)]

pub mod api;
pub mod kubelet;
mod mirror;
pub mod scheduler;
