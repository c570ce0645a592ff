//! `/sys`: the PCI tree with its GPUs, NICs and NVSwitches, the NUMA nodes, the RDMA devices, the driver module.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use gantry_topology::PcieLink;

use super::CompanionError;
use super::files::Files;
use super::tree::{Endpoint, Tree};
use crate::facts::{Facts, GpuFacts, NicFacts, pci_ids};

/// PCI vendor id of Mellanox, and the device id of its ConnectX-6.
const MELLANOX: (u16, u16) = (0x15b3, 0x101b);
/// PCI ids of a bridge: Broadcom's PEX 88096 switch.
const BRIDGE: (u16, u16) = (0x1000, 0xc010);
/// PCI classes, with subclass and interface.
const CLASS_BRIDGE: u32 = 0x06_04_00;
const CLASS_OTHER_BRIDGE: u32 = 0x06_80_00;
const CLASS_VGA: u32 = 0x03_00_00;
const CLASS_3D: u32 = 0x03_02_00;
const CLASS_INFINIBAND: u32 = 0x02_07_00;

pub(super) fn write(files: &mut Files, facts: &Facts, tree: &Tree) -> Result<(), CompanionError> {
    let cpus = cpus_by_node(facts);
    let mut sysfs = Sysfs { files, cpus: &cpus, bridges: BTreeSet::new() };
    let (gpus, others) = tree.endpoints.split_at(facts.gpus.len());
    let (nics, switches) = others.split_at(facts.nics.len());
    for (gpu, endpoint) in facts.gpus.iter().zip(gpus) {
        sysfs.gpu(gpu, endpoint)?;
    }
    for (position, (nic, endpoint)) in facts.nics.iter().zip(nics).enumerate() {
        sysfs.nic(position, nic, endpoint)?;
    }
    for endpoint in switches {
        let ids = (pci_ids::NVIDIA, pci_ids::NVSWITCH);
        sysfs.device(endpoint, ids, CLASS_OTHER_BRIDGE, "nvidia-nvswitch")?;
    }
    sysfs.nodes(tree)?;
    sysfs.files.line("sys/module/nvidia/version", &facts.driver)?;
    sysfs.files.line("sys/module/nvidia/initstate", "live")
}

struct Sysfs<'a> {
    files: &'a mut Files,
    cpus: &'a BTreeMap<u32, BTreeSet<u32>>,
    bridges: BTreeSet<PathBuf>,
}

impl Sysfs<'_> {
    fn gpu(&mut self, gpu: &GpuFacts, endpoint: &Endpoint) -> Result<(), CompanionError> {
        let ids = (pci_ids::NVIDIA, gpu.product.device_id);
        let class = if gpu.product.display { CLASS_VGA } else { CLASS_3D };
        let folder = self.device(endpoint, ids, class, "nvidia")?;
        self.link_speed(&folder, gpu.pcie)
    }

    fn nic(&mut self, position: usize, nic: &NicFacts, endpoint: &Endpoint) -> Result<(), CompanionError> {
        let folder = self.device(endpoint, MELLANOX, CLASS_INFINIBAND, "mlx5_core")?;
        self.link_speed(&folder, PcieLink { generation: 4, width: 16 })?;
        let rdma = folder.join("infiniband").join(&nic.device);
        self.files.line(
            rdma.join("node_guid"),
            format_args!("0c42:a103:00{position:02x}:{:04x}", endpoint.address.bus),
        )?;
        self.files.line(rdma.join("node_type"), "1: CA")?;
        let port = rdma.join("ports/1");
        self.files.line(port.join("state"), "4: ACTIVE")?;
        self.files.line(port.join("phys_state"), "5: LinkUp")?;
        self.files.line(port.join("rate"), "200 Gb/sec (4X HDR)")?;
        self.files.line(port.join("link_layer"), "InfiniBand")?;
        let own_folder = Path::new("../..").join("..").join(endpoint.address.to_string());
        self.files.link(rdma.join("device"), &own_folder)?;
        let class = Path::new("sys/class/infiniband").join(&nic.device);
        self.files.link(class, &up_to_sys(2).join(below_sys(&rdma)))
    }

    /// Writes a device and the bridges above it; returns its folder.
    fn device(
        &mut self,
        endpoint: &Endpoint,
        ids: (u16, u16),
        class: u32,
        driver: &str,
    ) -> Result<PathBuf, CompanionError> {
        let mut folder = PathBuf::from("sys/devices");
        let (own, above) = match endpoint.path.split_last() {
            Some((own, above)) => (own.clone(), above),
            None => (endpoint.address.to_string(), &[][..]),
        };
        for (depth, part) in above.iter().enumerate() {
            folder.push(part);
            // The first is the host bridge, which is no PCI device.
            if depth > 0 && self.bridges.insert(folder.clone()) {
                self.bridge(&folder, part, endpoint.numa)?;
            }
        }
        folder.push(&own);
        self.identity(&folder, &own, ids, class, endpoint.numa)?;
        self.details(&folder, &own, ids, class, endpoint.numa, driver)?;
        Ok(folder)
    }

    /// The files of every PCI device, and its entry in `/sys/bus/pci`. Bridges have only these, because clients read no
    /// others.
    fn bridge(&mut self, folder: &Path, address: &str, numa: Option<u32>) -> Result<(), CompanionError> {
        self.identity(folder, address, BRIDGE, CLASS_BRIDGE, numa)
    }

    fn identity(
        &mut self,
        folder: &Path,
        address: &str,
        (vendor, device): (u16, u16),
        class: u32,
        numa: Option<u32>,
    ) -> Result<(), CompanionError> {
        let files = &mut *self.files;
        files.line(folder.join("vendor"), format_args!("0x{vendor:04x}"))?;
        files.line(folder.join("device"), format_args!("0x{device:04x}"))?;
        files.line(folder.join("class"), format_args!("0x{class:06x}"))?;
        match numa {
            Some(node) => files.line(folder.join("numa_node"), node)?,
            None => files.line(folder.join("numa_node"), -1)?,
        }
        let listed = Path::new("sys/bus/pci/devices").join(address);
        files.link(listed, &up_to_sys(3).join(below_sys(folder)))
    }

    /// What devices have beyond their identity.
    fn details(
        &mut self,
        folder: &Path,
        address: &str,
        (vendor, device): (u16, u16),
        class: u32,
        numa: Option<u32>,
        driver: &str,
    ) -> Result<(), CompanionError> {
        let cpus = numa.and_then(|node| self.cpus.get(&node)).map(ranges).unwrap_or_default();
        let files = &mut *self.files;
        files.line(folder.join("subsystem_vendor"), format_args!("0x{vendor:04x}"))?;
        files.line(folder.join("subsystem_device"), format_args!("0x{device:04x}"))?;
        files.line(folder.join("revision"), "0xa1")?;
        files.line(folder.join("enable"), 1)?;
        files.line(folder.join("local_cpulist"), cpus)?;
        files.file(
            folder.join("uevent"),
            &format!(
                "DRIVER={driver}\nPCI_CLASS={class:X}\nPCI_ID={vendor:04X}:{device:04X}\nPCI_SLOT_NAME={address}\n"
            ),
        )?;
        let depth = folder.components().count() - 1;
        let drivers = Path::new("bus/pci/drivers").join(driver);
        files.link(folder.join("driver"), &up_to_sys(depth).join(&drivers))?;
        files.folder(Path::new("sys").join(drivers))
    }

    fn link_speed(&mut self, folder: &Path, link: PcieLink) -> Result<(), CompanionError> {
        let speed = match link.generation {
            0 | 1 => "2.5 GT/s PCIe",
            2 => "5.0 GT/s PCIe",
            3 => "8.0 GT/s PCIe",
            4 => "16.0 GT/s PCIe",
            5 => "32.0 GT/s PCIe",
            6 => "64.0 GT/s PCIe",
            _ => "128.0 GT/s PCIe",
        };
        for (name, value) in [
            ("current_link_speed", speed.to_owned()),
            ("max_link_speed", speed.to_owned()),
            ("current_link_width", link.width.to_string()),
            ("max_link_width", link.width.to_string()),
        ] {
            self.files.line(folder.join(name), value)?;
        }
        Ok(())
    }

    /// The NUMA nodes and CPUs that any device is near.
    fn nodes(&mut self, tree: &Tree) -> Result<(), CompanionError> {
        let of_devices = tree.endpoints.iter().filter_map(|endpoint| endpoint.numa);
        let mut nodes: BTreeSet<u32> = of_devices.chain(self.cpus.keys().copied()).collect();
        if nodes.is_empty() {
            nodes.insert(0);
        }
        let system = Path::new("sys/devices/system");
        self.files.line(system.join("node/online"), ranges(&nodes))?;
        self.files.line(system.join("node/possible"), ranges(&nodes))?;
        for node in &nodes {
            let folder = system.join(format!("node/node{node}"));
            let cpus = self.cpus.get(node).map(ranges).unwrap_or_default();
            self.files.line(folder.join("cpulist"), cpus)?;
            let distances = nodes.iter().map(|other| if other == node { "10" } else { "21" });
            self.files.line(folder.join("distance"), distances.collect::<Vec<_>>().join(" "))?;
        }
        let cpus: BTreeSet<u32> = self.cpus.values().flatten().copied().collect();
        self.files.line(system.join("cpu/online"), ranges(&cpus))?;
        self.files.line(system.join("cpu/possible"), ranges(&cpus))
    }
}

/// The CPUs of each NUMA node, as far as its GPUs define them.
fn cpus_by_node(facts: &Facts) -> BTreeMap<u32, BTreeSet<u32>> {
    let mut nodes: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for gpu in &facts.gpus {
        if let Some(node) = gpu.numa {
            nodes.entry(node).or_default().extend(&gpu.cpus);
        }
    }
    nodes
}

/// Numbers as Linux writes them: `0-15,128-143`.
fn ranges(numbers: &BTreeSet<u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let written = runs
        .into_iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") });
    written.collect::<Vec<_>>().join(",")
}

/// From a link that lies `depth` folders below `/sys` up to `/sys`.
fn up_to_sys(depth: usize) -> PathBuf {
    std::iter::repeat_n("..", depth).collect()
}

fn below_sys(path: &Path) -> &Path {
    path.strip_prefix("sys").unwrap_or(path)
}
