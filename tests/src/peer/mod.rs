//! A device plugin on a node with simulated kubelet and hardware, to compare Gantry's plugin with NVIDIA's
//! k8s-device-plugin. Both get the same paths and environment, as in production.

mod bare;
mod documented;
mod facts;
mod kubelet;
mod node;
mod setting;

pub use documented::documented;
pub use facts::{Deliberate, Difference, Facts, differences, observe, unexplained};
pub use kubelet::{Kubelet, List, Registered, Served};
pub use node::{Node, Plugin, Process, supported};
pub use setting::{Mig, Setting, Sharing, Strategy};
