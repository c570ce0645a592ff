//! The response to Allocate: environment, mounts, device nodes and CDI names for the devices that kubelet has chosen. A pure function
//! of the devices and of a snapshot, and the set of devices is never changed. The one file that a call writes is the NCCL
//! topology of its GPUs, if the configuration asks for it.

mod nodes;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

use gantry_config::{Config, Strategy};
use gantry_proto::deviceplugin::{CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount};
use thiserror::Error;
use tokio::sync::watch;
use tracing::warn;

use crate::cdi::{self, Class, Entries, runtime_id};
use crate::inventory::Device;
use crate::nccl::{self, Topology, TopologyFiles};

pub use nodes::{Facts, NodeFlaw, Nodes};
pub(crate) use nodes::{IMEX_CHANNEL, capability_node, gpu_node};

/// Everything that a response depends on in addition to the devices, at one moment. Its CDI names are on disk: a configuration that
/// needs them takes effect once they are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    pub config: Arc<Config>,
    /// The device nodes that exist.
    pub nodes: Arc<Nodes>,
    /// The names that a runtime can resolve.
    pub entries: Arc<Entries>,
    /// The topology of the machine for NCCL, if containers get it.
    pub topology: Option<Arc<Topology>>,
}

impl Access {
    /// The state before any specification is written. `dev` is where this process sees `/dev`.
    ///
    /// # Errors
    /// When `config` cannot be served on this host: see [`check`].
    pub fn at_start(config: &Arc<Config>, dev: &Path) -> Result<Self, NoImexChannel> {
        let nodes = cdi::nodes(config, dev);
        check(config, &nodes)?;
        Ok(Self { config: Arc::clone(config), nodes: Arc::new(nodes), ..Self::default() })
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
    nccl: TopologyFiles,
}

impl Responder {
    /// A responder that follows these snapshots, with the topology files for NCCL.
    pub const fn new(access: watch::Receiver<Arc<Access>>, nccl: TopologyFiles) -> Self {
        Self { access, nccl }
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
        let mut response = answer(&access, devices);
        if let Some(topology) = &access.topology {
            self.add_topology(topology, devices, &mut response);
        }
        response
    }

    /// Adds the topology file of the devices' GPUs, and the order of their rails. Without the file the container is
    /// served all the same: NCCL then reads `/sys`.
    fn add_topology(
        &self,
        topology: &Topology,
        devices: &[&Device],
        response: &mut ContainerAllocateResponse,
    ) {
        let gpus = Topology::gpus(devices.iter().copied());
        if let Some(rails) = topology.rails(&gpus) {
            response.envs.insert(nccl::RAILS.to_owned(), rails);
        }
        match self.nccl.write(topology, &gpus) {
            Ok(Some(path)) => {
                response.envs.insert(nccl::TOPO_FILE.to_owned(), nccl::CONTAINER_FILE.to_owned());
                response.mounts.push(Mount {
                    container_path: nccl::CONTAINER_FILE.to_owned(),
                    host_path: path.display().to_string(),
                    read_only: true,
                });
            }
            Ok(None) => {}
            Err(error) => {
                let path = self.nccl.path(&gpus);
                warn!(path = %path.display(), %error, "an NCCL topology file cannot be written: the container does not get it");
            }
        }
    }
}

/// Read by the NVIDIA container runtime: the GPUs a container sees.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Read by the NVIDIA container runtime: the import/export memory channels a container sees.
const IMEX_CHANNELS: &str = "NVIDIA_IMEX_CHANNELS";
/// Where the NVIDIA container runtime looks for mounts that stand for devices.
const MOUNTS: &str = "/var/run/nvidia-container-devices";
/// The only channel in use.
const CHANNEL: &str = "0";

/// The response for one container that uses exactly `devices`. Replicas of one device count once.
pub fn answer(access: &Access, devices: &[&Device]) -> ContainerAllocateResponse {
    let config = &*access.config;
    let mut ids: Vec<String> =
        devices.iter().map(|device| runtime_id(device, config.device_id_strategy)).collect();
    let mut seen = BTreeSet::new();
    ids.retain(|id| seen.insert(id.clone()));
    let channel = config.imex.channel && access.nodes.has_imex_channel();
    let is_on = |strategy| config.device_list_strategy.contains(&strategy);

    let mut response =
        ContainerAllocateResponse { envs: extras(config), ..ContainerAllocateResponse::default() };
    if is_on(Strategy::Envvar) {
        response.envs.insert(VISIBLE_DEVICES.to_owned(), ids.join(","));
        if channel {
            response.envs.insert(IMEX_CHANNELS.to_owned(), CHANNEL.to_owned());
        }
    }
    if is_on(Strategy::VolumeMounts) {
        // Replaces the list: a runtime configured for mounts trusts nothing else.
        response.envs.insert(VISIBLE_DEVICES.to_owned(), MOUNTS.to_owned());
        response.mounts = mounts(&ids, channel);
    }
    if is_on(Strategy::CdiAnnotations) || is_on(Strategy::CdiCri) {
        let names = qualified(access, devices, channel);
        if is_on(Strategy::CdiAnnotations) && !names.is_empty() {
            let names = names.join(",");
            response.annotations.insert(annotation_key(&config.cdi_annotation_prefix, &names), names);
        }
        if is_on(Strategy::CdiCri) {
            response.cdi_devices = names.into_iter().map(|name| CdiDevice { name }).collect();
        }
    }
    // With CDI alone the nodes are in the specification.
    if config.pass_device_specs && config.device_list_strategy.iter().any(|strategy| !strategy.is_cdi()) {
        response.devices = specs(access, devices, channel);
    }
    response
}

/// What the NVIDIA runtime adds to GPUs, whether or not the host has it.
fn extras(config: &Config) -> BTreeMap<String, String> {
    [(config.gdrcopy, "NVIDIA_GDRCOPY"), (config.gds, "NVIDIA_GDS"), (config.mofed, "NVIDIA_MOFED")]
        .into_iter()
        .filter(|(on, _)| *on)
        .map(|(_, name)| (name.to_owned(), "enabled".to_owned()))
        .collect()
}

fn mounts(ids: &[String], channel: bool) -> Vec<Mount> {
    let mount =
        |container_path| Mount { container_path, host_path: "/dev/null".to_owned(), read_only: false };
    let devices = ids.iter().map(|id| mount(format!("{MOUNTS}/{id}")));
    let channel = channel.then(|| mount(format!("{MOUNTS}/imex/{CHANNEL}")));
    devices.chain(channel).collect()
}

/// The CDI names that a specification has: a runtime fails the container on any other.
fn qualified(access: &Access, devices: &[&Device], channel: bool) -> Vec<String> {
    let config = &*access.config;
    let mut names: Vec<String> = Vec::new();
    for device in devices {
        if let Some(name) = access.entries.gpu(device)
            && !names.contains(&name)
        {
            names.push(name);
        }
    }
    let others = [
        (channel, Class::ImexChannel, CHANNEL),
        (config.gdrcopy, Class::Gdrcopy, crate::cdi::ALL),
        (config.gds, Class::Gds, crate::cdi::ALL),
        (config.mofed, Class::Mofed, crate::cdi::ALL),
    ];
    names.extend(
        others
            .into_iter()
            .filter(|(on, ..)| *on)
            .filter_map(|(_, class, name)| access.entries.qualified(class, name)),
    );
    names
}

/// A key that differs for other names: kubelet unites the annotations of all resources of a container, and one of two equal keys
/// would be lost.
fn annotation_key(prefix: &str, names: &str) -> String {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, names).hash(&mut hasher);
        hasher.finish()
    };
    let (first, second) = (half(0), half(1));
    format!(
        "{prefix}nvidia-device-plugin_{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        first >> 32,
        first >> 16 & 0xffff,
        first & 0xffff,
        second >> 48,
        second & 0xffff_ffff_ffff
    )
}

/// The nodes that kubelet passes itself: control nodes, GPUs, MIG capabilities, the channel; each once and in this order.
fn specs(access: &Access, devices: &[&Device], channel: bool) -> Vec<DeviceSpec> {
    let gpus: BTreeSet<u32> = devices.iter().filter_map(|device| device.minor).collect();
    let capabilities: BTreeSet<u32> =
        devices.iter().filter_map(|device| device.slice.as_ref()?.caps).flatten().collect();
    access
        .nodes
        .control()
        .map(str::to_owned)
        .chain(gpus.into_iter().map(gpu_node))
        .chain(capabilities.into_iter().map(capability_node))
        .chain(channel.then(|| IMEX_CHANNEL.to_owned()))
        .map(|name| DeviceSpec {
            host_path: access.config.dev_root.join("dev").join(&name).display().to_string(),
            container_path: format!("/dev/{name}"),
            permissions: "rw".to_owned(),
        })
        .collect()
}

#[cfg(test)]
mod tests;
