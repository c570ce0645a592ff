//! The response to Allocate: environment, mounts, device nodes and CDI names for the devices that kubelet has chosen. A pure function
//! of the devices and of a snapshot; no call reads a file, and the set of devices is never changed.

mod answer;
mod nodes;

use std::path::Path;
use std::sync::Arc;

use gantry_proto::deviceplugin::ContainerAllocateResponse;
use thiserror::Error;
use tokio::sync::watch;
use tracing::warn;

use crate::cdi::{self, Entries};
use crate::inventory::Device;
use gantry_config::Config;

pub use answer::{VISIBLE_DEVICES, answer};
pub use nodes::{Facts, Nodes};
pub(crate) use nodes::{IMEX_CHANNEL, capability_node, gpu_node};

/// Everything that a response depends on in addition to the devices, at one moment. Its CDI names are on disk: a configuration that
/// needs them takes effect once they are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    /// The configuration.
    pub config: Arc<Config>,
    /// The device nodes that exist.
    pub nodes: Arc<Nodes>,
    /// The names that a runtime can resolve.
    pub entries: Arc<Entries>,
}

impl Access {
    /// The state before any specification is written. `dev` is where this process sees `/dev`.
    ///
    /// # Errors
    /// When `config` cannot be served on this host: see [`check`].
    pub fn at_start(config: &Arc<Config>, dev: &Path) -> Result<Self, NoImexChannel> {
        let nodes = cdi::nodes(config, dev);
        check(config, &nodes)?;
        Ok(Self { config: Arc::clone(config), nodes: Arc::new(nodes), entries: Arc::default() })
    }
}

/// The required import/export memory channel does not exist.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "imex.required is true, but there is no /dev/{IMEX_CHANNEL}; load the driver with NVreg_CreateImexChannel0=1, or set imex.required to false to serve without it"
)]
pub struct NoImexChannel;

/// Whether `config` can be served with these nodes.
///
/// # Errors
/// When a required channel does not exist. A channel that is not required is left out of the responses.
pub fn check(config: &Config, nodes: &Nodes) -> Result<(), NoImexChannel> {
    if config.imex.channel && config.imex.required && !nodes.has_imex_channel() {
        return Err(NoImexChannel);
    }
    Ok(())
}

/// Whether `config` can be served on this host as it is now. `dev` is where this process sees `/dev`.
///
/// # Errors
/// The reason as text: see [`check`].
pub fn fits(config: &Config, dev: &Path) -> Result<(), String> {
    check(config, &cdi::nodes(config, dev)).map_err(|error| error.to_string())
}

/// Makes the responses to Allocate from the latest snapshot.
#[derive(Debug)]
pub struct Responder {
    access: watch::Receiver<Arc<Access>>,
}

impl Responder {
    /// A responder that follows these snapshots.
    pub const fn new(access: watch::Receiver<Arc<Access>>) -> Self {
        Self { access }
    }

    /// The response for one container that uses exactly `devices`.
    pub fn respond(&self, devices: &[&Device]) -> ContainerAllocateResponse {
        let access = Arc::clone(&self.access.borrow());
        if access.config.device_list_strategy.iter().any(|strategy| strategy.is_cdi()) {
            for device in devices {
                if !access.entries.have(device) {
                    warn!(device = %device.id, "no CDI specification has this device: the container does not get it by CDI");
                }
            }
        }
        answer(&access, devices)
    }
}

#[cfg(test)]
mod tests;
