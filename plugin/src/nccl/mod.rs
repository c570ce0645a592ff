//! What a container is given so that NCCL knows the place of its GPUs: a topology file of exactly these GPUs, and the
//! order of their rails. The text is a pure function of a snapshot of the PCIe tree, in the form that NCCL itself makes
//! of `/sys`, so that it also holds where the container does not see the host's `/sys`.
//!
//! A file has a PCIe tree without NVLinks, compute capabilities and ranks: NCCL adds those from NVML. It has the nearest
//! NICs of the GPUs; NCCL adds other NICs.

mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use gantry_topology::{Gpu, Machine, NicSet, PcieAddress};

pub use files::{TopologyFiles, maintain};

use crate::inventory::Device;

/// Read by NCCL: its topology file.
pub const TOPO_FILE: &str = "NCCL_TOPO_FILE";
/// The nearest NICs of each GPU of the container, in the order of the GPUs.
pub const RAILS: &str = "GANTRY_RAILS";
/// Path of the file in containers.
pub const CONTAINER_FILE: &str = "/etc/gantry/nccl-topology.xml";

/// Longest value of an attribute that NCCL reads.
const MAX_VALUE: usize = 250;
/// Most PCIe devices above one device.
const MAX_DEPTH: usize = 32;

/// The machine, and its PCIe tree by sysfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    machine: Arc<Machine>,
    /// GPUs, NICs and the switches above them, by address.
    devices: BTreeMap<String, PcieDevice>,
    /// CPUs of each NUMA node, as the kernel writes them.
    cpus: BTreeMap<String, String>,
    /// Attributes of the processor.
    processor: Vec<(&'static str, String)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct PcieDevice {
    above: Above,
    class: String,
    speed: String,
    width: u32,
}

/// What a device is below.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Above {
    Switch(String),
    /// A NUMA node, as the kernel writes it: -1 if it is unknown.
    Numa(String),
}

impl Topology {
    /// Reads the PCIe tree of a machine. `sys` and `proc` are where this process sees `/sys` and `/proc`.
    pub fn read(machine: &Arc<Machine>, sys: &Path, proc: &Path) -> Self {
        let mut topology = Self {
            machine: Arc::clone(machine),
            devices: BTreeMap::new(),
            cpus: BTreeMap::new(),
            processor: processor(proc),
        };
        let gpus = machine.gpus().iter().filter_map(|gpu| gpu.bus_id.as_ref());
        let nics = machine.nics().iter().filter_map(|nic| nic.bus_id.as_ref());
        for address in gpus.chain(nics) {
            if let Ok(path) = fs::canonicalize(sys.join("bus/pci/devices").join(address.as_str())) {
                topology.add(&path, MAX_DEPTH);
            }
        }
        let nodes = topology.devices.values().filter_map(|device| match &device.above {
            Above::Numa(node) => Some(node.clone()),
            Above::Switch(_) => None,
        });
        let nodes: BTreeSet<String> = nodes.collect();
        let cpus = nodes.into_iter().filter_map(|node| {
            let cpus = attribute(&sys.join(format!("devices/system/node/node{node}/cpumap")))?;
            Some((node, cpus))
        });
        topology.cpus = cpus.collect();
        topology
    }

    /// Adds a device and those above it. As NCCL does, takes a switch's upstream and downstream port as one: the device
    /// above is two steps up.
    fn add(&mut self, path: &Path, depth: usize) {
        let Some(address) = name(path).filter(|address| depth > 0 && !self.devices.contains_key(address))
        else {
            return;
        };
        let port = path.parent().filter(|port| is_device(port));
        let switch = port.and_then(Path::parent).filter(|switch| is_device(switch));
        let above = match switch.and_then(name) {
            Some(switch) => Above::Switch(switch),
            None => Above::Numa(attribute(&path.join("numa_node")).unwrap_or_else(|| "-1".to_owned())),
        };
        let both = |file: &str| {
            [Some(path), port]
                .into_iter()
                .flatten()
                .filter_map(|of| attribute(&of.join(file)))
                .collect::<Vec<_>>()
        };
        let gigatransfers = |text: &String| -> f64 {
            text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(f64::MAX)
        };
        let speeds = both("max_link_speed");
        let speed = speeds.into_iter().min_by(|a, b| gigatransfers(a).total_cmp(&gigatransfers(b)));
        let widths = both("max_link_width").into_iter().filter_map(|width| width.parse::<u32>().ok());
        let device = PcieDevice {
            above,
            class: attribute(&path.join("class")).unwrap_or_default(),
            speed: speed.unwrap_or_default(),
            width: widths.min().unwrap_or(0),
        };
        self.devices.insert(address, device);
        if let Some(switch) = switch {
            self.add(switch, depth - 1);
        }
    }

    /// The whole GPUs among some devices, by index; empty if one is a MIG device.
    pub fn gpus<'d>(devices: impl IntoIterator<Item = &'d Device>) -> BTreeSet<u8> {
        let mut gpus = BTreeSet::new();
        for device in devices {
            if device.slice.is_some() {
                return BTreeSet::new();
            }
            gpus.insert(device.gpu);
        }
        gpus
    }

    /// The topology file of some GPUs; `None` if the position of one of them is unknown, or without GPUs.
    pub fn xml(&self, gpus: &BTreeSet<u8>) -> Option<String> {
        let mut below: BTreeMap<Above, BTreeSet<&str>> = BTreeMap::new();
        for gpu in gpus {
            self.place(self.gpu(*gpu)?.bus_id.as_ref()?, &mut below)?;
        }
        let mut nics: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for nic in gpus.iter().flat_map(|gpu| NicSet::nearest(&self.machine, usize::from(*gpu)).iter()) {
            let Some(nic) = self.machine.nics().get(nic) else { continue };
            if let Some(address) = &nic.bus_id
                && self.place(address, &mut below).is_some()
            {
                let names = nics.entry(address.as_str()).or_default();
                if !names.contains(&nic.name.as_str()) {
                    names.push(&nic.name);
                }
            }
        }
        let mut text = "<system version=\"1\">\n".to_owned();
        for node in below.keys() {
            if let Above::Numa(numa) = node {
                let mut tag = format!("cpu numaid=\"{numa}\"");
                let affinity = self.cpus.get(numa).map(|cpus| ("affinity", cpus));
                let processor = self.processor.iter().map(|(key, value)| (*key, value));
                for (key, value) in affinity.into_iter().chain(processor) {
                    let _ = write!(tag, " {key}=\"{value}\"");
                }
                element(&mut text, 1, &tag, |text| self.children(text, 2, node, &below, &nics));
            }
        }
        text.push_str("</system>\n");
        (!gpus.is_empty()).then_some(text)
    }

    /// Records a device and those above it below what each is below.
    fn place<'t>(
        &'t self,
        address: &'t PcieAddress,
        below: &mut BTreeMap<Above, BTreeSet<&'t str>>,
    ) -> Option<()> {
        let mut address = address.as_str();
        loop {
            let (known, device) = self.devices.get_key_value(address)?;
            below.entry(device.above.clone()).or_default().insert(known);
            match &device.above {
                Above::Switch(switch) => address = switch,
                Above::Numa(_) => return Some(()),
            }
        }
    }

    fn children(
        &self,
        text: &mut String,
        depth: usize,
        of: &Above,
        below: &BTreeMap<Above, BTreeSet<&str>>,
        nics: &BTreeMap<&str, Vec<&str>>,
    ) {
        for address in below.get(of).into_iter().flatten() {
            let Some(PcieDevice { class, speed, width, .. }) = self.devices.get(*address) else { continue };
            let tag = format!(
                "pci busid=\"{address}\" class=\"{class}\" link_speed=\"{speed}\" link_width=\"{width}\""
            );
            element(text, depth, &tag, |text| {
                self.children(text, depth + 1, &Above::Switch((*address).to_owned()), below, nics);
                if let Some(names) = nics.get(address) {
                    element(text, depth + 1, "nic", |text| {
                        for name in names.iter().filter(|name| is_plain(name)) {
                            element(text, depth + 2, &format!("net name=\"{name}\""), |_| {});
                        }
                    });
                }
            });
        }
    }

    /// The names of the nearest NICs of each GPU, in the order of the GPUs: `mlx5_0,mlx5_1+mlx5_2,-`. `None` if no GPU
    /// has a NIC on its side of the link between sockets.
    pub fn rails(&self, gpus: &BTreeSet<u8>) -> Option<String> {
        let of = |gpu: &u8| {
            let nics = NicSet::nearest(&self.machine, usize::from(*gpu));
            let names = nics.iter().filter_map(|nic| self.machine.nics().get(nic));
            names.map(|nic| nic.name.as_str()).filter(|name| is_plain(name)).collect::<Vec<_>>().join("+")
        };
        let rails: Vec<String> = gpus.iter().map(of).collect();
        let known = rails.iter().any(|nics| !nics.is_empty());
        let or_none = |nics: &String| if nics.is_empty() { "-".to_owned() } else { nics.clone() };
        known.then(|| rails.iter().map(or_none).collect::<Vec<_>>().join(","))
    }

    /// All GPUs of the machine, by index.
    pub fn all(&self) -> BTreeSet<u8> {
        self.machine.gpus().iter().map(|gpu| gpu.index).collect()
    }

    /// Whether it is the topology of a machine.
    pub fn is_of(&self, machine: &Arc<Machine>) -> bool {
        Arc::ptr_eq(&self.machine, machine)
    }

    fn gpu(&self, index: u8) -> Option<&Gpu> {
        self.machine.gpus().get(usize::from(index))
    }
}

/// Writes an element with its content.
fn element(text: &mut String, depth: usize, tag: &str, content: impl FnOnce(&mut String)) {
    let mut inside = String::new();
    content(&mut inside);
    let name = tag.split(' ').next().unwrap_or_default();
    let indent = "  ".repeat(depth);
    let _ = match inside.as_str() {
        "" => writeln!(text, "{indent}<{tag}/>"),
        inside => writeln!(text, "{indent}<{tag}>\n{inside}{indent}</{name}>"),
    };
}

/// Attributes by which NCCL knows the processor. Without them it would take them from the container's own view, and only
/// for the GPU of one process.
fn processor(proc: &Path) -> Vec<(&'static str, String)> {
    let arch = match std::env::consts::ARCH {
        "aarch64" => "arm64",
        "powerpc64" => "ppc64",
        other => other,
    };
    let mut attributes = vec![("arch", arch.to_owned())];
    let Ok(info) = fs::read_to_string(proc.join("cpuinfo")) else {
        return attributes;
    };
    let value = |key: &str| {
        let mut lines = info.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(known, _)| known.trim() == key).map(|(_, value)| value.trim().to_owned())
    };
    if let Some(vendor) = value("vendor_id").filter(|vendor| is_plain(vendor)) {
        attributes.push(("vendor", vendor));
    }
    let number = |key: &str| value(key).and_then(|value| value.parse::<u32>().ok());
    if let (Some(family), Some(model)) = (number("cpu family"), number("model")) {
        // The kernel adds the extended family, NCCL puts it above the family.
        let family = if family > 15 { 15 + ((family - 15) << 4) } else { family };
        attributes.push(("familyid", family.to_string()));
        attributes.push(("modelid", model.to_string()));
    }
    attributes
}

fn name(path: &Path) -> Option<String> {
    Some(path.file_name()?.to_str()?.to_ascii_lowercase())
}

fn is_device(path: &Path) -> bool {
    name(path).is_some_and(|name| name.parse::<PcieAddress>().is_ok())
}

/// The content of a file of sysfs as the value of an attribute; `None` if it cannot be one.
fn attribute(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?.trim().to_owned();
    is_plain(&text).then_some(text)
}

/// Whether a text can be the value of an attribute as it is.
fn is_plain(text: &str) -> bool {
    let allowed = |char: char| char.is_ascii_alphanumeric() || " _-.,:/+".contains(char);
    !text.is_empty() && text.len() <= MAX_VALUE && text.chars().all(allowed)
}
