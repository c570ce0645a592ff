//! A device plugin as a node runs it, with kubelet and hardware simulated: what is needed to hold Gantry's plugin and NVIDIA's
//! k8s-device-plugin side by side. Both see the same paths and the same environment; neither is told that it is tested.

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
