//! Decisions over an immutable snapshot of the cluster: which nodes fit a pod, which one is best, where a gang goes, which pods make way.
//!
//! ```text
//! devices, kind, shape, site   a set of devices, the machine it lies on, what it is worth
//! placement, numa, quality     the terms of pods and of kubelet for a set of devices, and how good it is for a pod
//! request, layout              what a pod asks for, and its devices on one machine
//! inventory, snapshot          what a node has; the cluster as classes of alike nodes
//! decide                       filter and prioritize for one pod
//! input, plan, preempt         a whole gang: its nodes and devices, or the victims that make room
//! ```
//!
//! Pure: no I/O, no async, no clock; the dependencies show it. The only locks guard two tables of remembered results, [`kind`] and
//! [`snapshot::ScoreCache`]. Equal input gives equal decisions.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "a doc comment says what the name does not")]

pub mod decide;
pub mod devices;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixtures;
pub mod input;
pub mod inventory;
pub mod kind;
pub mod layout;
pub mod numa;
pub mod placement;
pub mod plan;
pub mod preempt;
pub mod quality;
pub mod request;
pub mod shape;
pub mod site;
pub mod snapshot;
