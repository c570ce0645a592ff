//! A real Kubernetes on one machine, for the end-to-end tests and for interactive use.
//!
//! Real etcd, control plane, kubelets and containerds run in namespaces. This crate starts Gantry's daemons as an
//! operator would, and is independent of their decisions.

pub mod browser;
pub mod cluster;
pub mod components;
pub mod controllers;
mod error;
mod forward;
pub mod gantry;
pub mod gpu_runtime;
pub mod hardware;
pub mod helm;
pub mod history;
mod host;
mod image;
mod keda;
mod kubernetes;
pub mod kueue;
pub mod names;
mod own_scheduler;
pub mod pages;
pub mod peer;
mod pki;
pub mod podresources;
pub mod prometheus;
mod sandbox;
pub mod service;
mod settings;
mod wait;

pub use cluster::{Cluster, ClusterOptions, Node, NodeOptions};
pub use error::{Error, Result};
pub use forward::forward;
pub use host::{Unsupported, supported};
pub use image::{BUSYBOX_IMAGE, SCHEDULER_IMAGE};
pub use kubernetes::{COMPOSITE_GATES, Feature, Kubernetes};
pub use sandbox::{Daemon, Program, Sandbox};
pub use wait::until;
