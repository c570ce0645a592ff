//! A real Kubernetes on one machine, for the end-to-end tests and for people who want to play with one.
//!
//! Real etcd, control plane, kubelets and containerds run in namespaces of their own. Nothing here knows how the
//! daemons of the project decide; it only starts them where an operator would.

pub mod cluster;
pub mod components;
pub mod controllers;
mod error;
mod forward;
pub mod gantry;
pub mod hardware;
mod host;
mod image;
pub mod peer;
mod pki;
pub mod podresources;
mod sandbox;
pub mod service;
mod settings;
mod wait;

pub use cluster::{Cluster, ClusterOptions, NodeOptions};
pub use error::{Error, Result};
pub use forward::forward;
pub use host::{Unsupported, supported};
pub use image::BUSYBOX_IMAGE;
pub use sandbox::{Daemon, Program, Sandbox};
pub use wait::until;
