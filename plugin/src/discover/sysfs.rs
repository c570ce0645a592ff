//! Reads sysfs: positions of PCI devices, NUMA nodes, RDMA adapters. A missing file means "unknown", never an
//! error. Symbolic links are followed within the tree, which may be at any path.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use gantry_topology::{IdList, Nic, PathClass, PcieAddress};

use super::Warnings;

/// A sysfs tree.
pub(super) struct Sysfs {
    root: PathBuf,
}

/// PCI class of an NVSwitch: a bridge of another kind.
const NVSWITCH_CLASS: &str = "0x068000";
const NVIDIA_VENDOR: &str = "0x10de";

impl Sysfs {
    pub(super) fn at(root: &Path) -> Self {
        // Resolved once, so that resolved device paths can be checked to be inside. Without a root there are no
        // devices.
        let root = fs::canonicalize(root).unwrap_or_else(|_| root.to_owned());
        Self { root }
    }

    /// Position of the PCI device; `None` if sysfs does not have it.
    pub(super) fn position(&self, address: &PcieAddress) -> Option<PciePosition> {
        self.position_of(&self.pci(address), self.numa_node(address))
    }

    /// NUMA node of a PCI device; `None` if the kernel has none (it writes -1).
    pub(super) fn numa_node(&self, address: &PcieAddress) -> Option<u32> {
        self.read(&self.pci(address).join("numa_node"))?.parse().ok()
    }

    /// Whether the kernel reports a NUMA node for this device, -1 included.
    pub(super) fn has_numa(&self, address: &PcieAddress) -> bool {
        self.read(&self.pci(address).join("numa_node")).is_some()
    }

    /// The kernel's number of this device's binding to its driver. A binding keeps its number; until the next
    /// reboot no other binding gets it. A new number means that the driver was reloaded, or the device was
    /// unbound or removed from the bus.
    pub(super) fn binding(&self, address: &PcieAddress) -> Option<u64> {
        fs::symlink_metadata(self.pci(address).join("driver")).ok().map(|link| link.ino())
    }

    /// Addresses of the PCI devices bound to NVIDIA's driver.
    pub(super) fn bound(&self) -> BTreeSet<String> {
        let entries = names(&self.root.join("bus/pci/drivers/nvidia"));
        let addresses = entries.into_iter().filter(|name| name.parse::<PcieAddress>().is_ok());
        addresses.collect()
    }

    /// CPUs near a PCI device.
    pub(super) fn local_cpus(&self, address: &PcieAddress) -> Option<IdList> {
        self.read(&self.pci(address).join("local_cpulist"))?.parse().ok()
    }

    /// Whether a PCI device is an NVSwitch; `None` if sysfs does not have it.
    pub(super) fn is_nvswitch(&self, address: &PcieAddress) -> Option<bool> {
        Some(self.read(&self.pci(address).join("class"))? == NVSWITCH_CLASS)
    }

    /// Whether an NVSwitch is on the bus. Other vendors have devices of its class.
    pub(super) fn has_nvswitch(&self) -> bool {
        let devices = self.root.join("bus/pci/devices");
        let is = |device: &Path, fact: &str, value: &str| {
            self.read(&device.join(fact)).is_some_and(|is| is == value)
        };
        names(&devices)
            .iter()
            .map(|name| devices.join(name))
            .any(|device| is(&device, "class", NVSWITCH_CLASS) && is(&device, "vendor", NVIDIA_VENDOR))
    }

    /// NUMA nodes of the machine; empty if sysfs does not show them.
    pub(super) fn numa_nodes(&self) -> Vec<u32> {
        let number = |name: &String| name.strip_prefix("node")?.parse().ok();
        let all = names(&self.root.join("devices/system/node"));
        all.iter().filter_map(number).collect()
    }

    /// The RDMA adapters on PCIe, in natural order (`mlx5_2` before `mlx5_10`). Virtual functions are left out:
    /// they share the path of their physical function.
    pub(super) fn rdma_devices(&self, warnings: &mut Warnings) -> Vec<Nic> {
        let class = self.root.join("class/infiniband");
        let mut names = names(&class);
        names.sort_by_cached_key(|name| natural(name));
        names
            .into_iter()
            .filter_map(|name| {
                let device = class.join(&name).join("device");
                if device.join("physfn").exists() {
                    return None;
                }
                let bus_id = fs::canonicalize(&device).ok()?.file_name()?.to_str()?.parse::<PcieAddress>();
                let Ok(bus_id) = bus_id else {
                    warnings.add(format!("RDMA device {name} is left out: it is not on PCIe"));
                    return None;
                };
                let numa = self.numa_node(&bus_id).and_then(|node| u16::try_from(node).ok());
                Some(Nic { name, device: None, bus_id: Some(bus_id), numa })
            })
            .collect()
    }

    fn pci(&self, address: &PcieAddress) -> PathBuf {
        self.root.join("bus/pci/devices").join(address.as_str())
    }

    fn position_of(&self, device: &Path, numa: Option<u32>) -> Option<PciePosition> {
        let resolved = resolved(device)?;
        let inside = resolved.strip_prefix(&self.root).ok()?.to_str()?;
        PciePosition::parse(inside.strip_prefix("devices/")?, numa)
    }

    fn read(&self, path: &Path) -> Option<String> {
        fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
    }
}

/// Target of one of the kernel's links. The kernel writes targets without further links, so one read is enough;
/// general path resolution costs twenty reads per device.
fn resolved(link: &Path) -> Option<PathBuf> {
    let Ok(target) = fs::read_link(link) else {
        return fs::canonicalize(link).ok();
    };
    let mut path = link.parent()?.to_owned();
    for part in target.components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            // An absolute target was not written by the kernel.
            Component::RootDir | Component::Prefix(_) => return fs::canonicalize(link).ok(),
        }
    }
    path.exists().then_some(path)
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

/// A sort key for natural order: digits in names compare as numbers.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut key = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, tail) = rest.split_at(digits);
        let end = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
        let (number, tail) = tail.split_at(end);
        key.push((text.to_owned(), number.parse().unwrap_or(0)));
        rest = tail;
    }
    key
}

/// A device's position in the PCIe tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PciePosition {
    /// The host bridge, `pci0000:00`, with its parents.
    root: String,
    /// Bridges from the host bridge down to the device.
    bridges: Vec<PcieAddress>,
    /// The device itself.
    device: PcieAddress,
    /// NUMA node, if the kernel has one.
    numa: Option<u32>,
}

impl PciePosition {
    /// Parses a device's resolved path below `/sys/devices`, such as `pci0000:00/0000:00:01.0/0000:01:00.0`;
    /// `None` if it is not a PCI device.
    pub(super) fn parse(path: &str, numa: Option<u32>) -> Option<Self> {
        let words: Vec<&str> = path.split('/').filter(|word| !word.is_empty()).collect();
        // Behind VMD or Hyper-V's virtual bus a second host bridge is below the first: the last one counts.
        let root = words.iter().rposition(|word| is_host_bridge(word))?;
        let (above, below) = words.split_at(root + 1);
        let mut addresses =
            below.iter().map_while(|word| word.parse::<PcieAddress>().ok()).collect::<Vec<_>>();
        Some(Self { root: above.join("/"), device: addresses.pop()?, bridges: addresses, numa })
    }

    fn same_slot(&self, other: &Self) -> bool {
        let slot = |place: &Self| place.device.as_str().rsplit_once('.').map(|(slot, _)| slot.to_owned());
        slot(self) == slot(other)
    }
}

fn is_host_bridge(word: &str) -> bool {
    word.strip_prefix("pci").and_then(|rest| rest.split_once(':')).is_some_and(|(domain, bus)| {
        let hex = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        hex(domain) && hex(bus)
    })
}

/// The distance class of two devices in nvidia-smi's terms. `single_node`: the machine has at most one NUMA
/// node, so a device without a known node is on it.
pub(super) fn class(a: &PciePosition, b: &PciePosition, single_node: bool) -> PathClass {
    if a.root != b.root {
        return match (a.numa, b.numa) {
            (Some(a), Some(b)) if a == b => PathClass::Node,
            (Some(_), Some(_)) => PathClass::Sys,
            _ if single_node => PathClass::Node,
            _ => PathClass::Sys,
        };
    }
    let common = a.bridges.iter().zip(&b.bridges).take_while(|(a, b)| a == b).count();
    if common == 0 {
        // Two functions of one device on the root bus never leave the device.
        return if a.same_slot(b) && a.bridges.is_empty() && b.bridges.is_empty() {
            PathClass::Pix
        } else {
            PathClass::Phb
        };
    }
    // Below the shared bridge, a device on the same switch has exactly one more bridge: the switch's downstream
    // port.
    let own = (a.bridges.len() - common).max(b.bridges.len() - common);
    if own <= 1 { PathClass::Pix } else { PathClass::Pxb }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A tree with one two-port adapter, one virtual function of it, and one software adapter.
    fn tree() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let bus = root.join("bus/pci/devices");
        let class = root.join("class/infiniband");
        fs::create_dir_all(&bus).unwrap();
        fs::create_dir_all(&class).unwrap();
        for (name, function) in [("mlx5_10", "0"), ("mlx5_2", "1"), ("mlx5_20", "2")] {
            let address = format!("0000:c1:00.{function}");
            let device = format!("devices/pci0000:c0/0000:c0:01.1/{address}");
            fs::create_dir_all(root.join(&device)).unwrap();
            fs::write(root.join(&device).join("numa_node"), "1\n").unwrap();
            symlink(format!("../../../{device}"), bus.join(&address)).unwrap();
            fs::create_dir_all(class.join(name)).unwrap();
            symlink(format!("../../../{device}"), class.join(name).join("device")).unwrap();
        }
        symlink("../0000:c1:00.0", root.join("devices/pci0000:c0/0000:c0:01.1/0000:c1:00.2/physfn")).unwrap();
        let soft = root.join("devices/virtual/net/dummy0");
        fs::create_dir_all(&soft).unwrap();
        fs::create_dir_all(class.join("rxe0")).unwrap();
        symlink(soft, class.join("rxe0/device")).unwrap();
        folder
    }

    #[test]
    fn rdma_adapters_are_in_natural_order() {
        let folder = tree();
        let sysfs = Sysfs::at(folder.path());
        let mut warnings = Warnings::default();
        let nics = sysfs.rdma_devices(&mut warnings);
        let names: Vec<&str> = nics.iter().map(|nic| nic.name.as_str()).collect();
        assert_eq!(names, ["mlx5_2", "mlx5_10"], "virtual functions and software are left out");
        assert_eq!(nics[0].bus_id.as_ref().unwrap().as_str(), "0000:c1:00.1");
        assert_eq!(nics[0].numa, Some(1));
        assert_eq!(warnings.0, ["RDMA device rxe0 is left out: it is not on PCIe"]);
        let [a, b] = [0, 1].map(|nic: usize| sysfs.position(nics[nic].bus_id.as_ref().unwrap()).unwrap());
        assert_eq!(class(&a, &b, false), PathClass::Pix);
    }

    #[test]
    fn missing_sysfs_gives_nothing() {
        let sysfs = Sysfs::at(Path::new("/nonexistent"));
        let address = "0000:07:00.0".parse().unwrap();
        assert_eq!(sysfs.position(&address), None);
        assert_eq!(sysfs.numa_node(&address), None);
        assert!(!sysfs.has_numa(&address));
        assert_eq!(sysfs.numa_nodes(), [0_u32; 0]);
        let mut warnings = Warnings::default();
        assert!(sysfs.rdma_devices(&mut warnings).is_empty());
        assert!(warnings.0.is_empty());
    }

    #[test]
    fn numa_node_minus_one_is_unknown() {
        let folder = tree();
        let address = "0000:c1:00.0".parse().unwrap();
        let file = folder.path().join("bus/pci/devices/0000:c1:00.0/numa_node");
        fs::write(file, "-1\n").unwrap();
        let sysfs = Sysfs::at(folder.path());
        assert_eq!(sysfs.numa_node(&address), None);
        assert!(sysfs.has_numa(&address));
    }

    #[test]
    fn new_binding_has_new_number() {
        let folder = tree();
        let address = "0000:c1:00.0".parse().unwrap();
        let device = folder.path().join("bus/pci/devices/0000:c1:00.0");
        let sysfs = Sysfs::at(folder.path());
        assert_eq!(sysfs.binding(&address), None, "bound to no driver");
        symlink("../../../bus/pci/drivers/nvidia", device.join("driver")).unwrap();
        let first = sysfs.binding(&address);
        assert!(first.is_some() && sysfs.binding(&address) == first);
        symlink("../../../bus/pci/drivers/nvidia", device.join("new")).unwrap();
        fs::rename(device.join("new"), device.join("driver")).unwrap();
        assert_ne!(sysfs.binding(&address), first);
    }

    fn position(path: &str, numa: Option<u32>) -> PciePosition {
        PciePosition::parse(path, numa).unwrap()
    }

    const GPU: &str = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:08.0/0000:03:00.0";

    #[test]
    fn devices_on_one_switch_are_pix() {
        let gpu = position(GPU, Some(0));
        let beside = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:10.0/0000:04:00.0";
        assert_eq!(class(&gpu, &position(beside, Some(0)), false), PathClass::Pix);
    }

    #[test]
    fn ports_of_one_adapter_are_pix() {
        let [a, b] = ["0000:c1:00.0", "0000:c1:00.1"]
            .map(|device| position(&format!("pci0000:c0/0000:c0:01.1/{device}"), Some(1)));
        assert_eq!(class(&a, &b, false), PathClass::Pix);
        let [a, b] =
            ["0000:00:05.0", "0000:00:05.1"].map(|device| position(&format!("pci0000:00/{device}"), None));
        assert_eq!(class(&a, &b, false), PathClass::Pix);
    }

    #[test]
    fn devices_on_switches_below_one_switch_are_pxb() {
        let below = |port: &str, device: &str| {
            let switch = "pci0000:00/0000:00:01.0/0000:01:00.0";
            position(
                &format!(
                    "{switch}/0000:02:{port}.0/0000:{device}0:00.0/0000:{device}1:01.0/0000:{device}2:00.0"
                ),
                Some(0),
            )
        };
        assert_eq!(class(&below("08", "1"), &below("09", "2"), false), PathClass::Pxb);
        // One of them directly on the upper switch.
        assert_eq!(class(&below("09", "1"), &position(GPU, Some(0)), false), PathClass::Pxb);
    }

    #[test]
    fn root_ports_of_one_host_bridge_are_phb() {
        let other = position("pci0000:00/0000:00:03.0/0000:05:00.0", Some(0));
        assert_eq!(class(&position(GPU, Some(0)), &other, false), PathClass::Phb);
        let [a, b] =
            ["0000:00:05.0", "0000:00:06.0"].map(|device| position(&format!("pci0000:00/{device}"), None));
        assert_eq!(class(&a, &b, true), PathClass::Phb, "as in most virtual machines");
    }

    #[test]
    fn host_bridges_are_node_or_sys_by_numa() {
        let far = |numa| position("pci0000:80/0000:80:01.0/0000:81:00.0", numa);
        let gpu = |numa| position(GPU, numa);
        assert_eq!(class(&gpu(Some(0)), &far(Some(0)), false), PathClass::Node);
        assert_eq!(class(&gpu(Some(0)), &far(Some(1)), false), PathClass::Sys);
        assert_eq!(class(&gpu(None), &far(Some(1)), false), PathClass::Sys);
        assert_eq!(class(&gpu(None), &far(None), true), PathClass::Node);
    }

    #[test]
    fn path_class_is_symmetric() {
        let paths = [
            (GPU, Some(0)),
            ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:10.0/0000:04:00.0", Some(0)),
            ("pci0000:00/0000:00:03.0/0000:05:00.0", Some(0)),
            ("pci0000:80/0000:80:01.0/0000:81:00.0", Some(1)),
            ("pci0000:80/0000:80:05.0", None),
        ];
        for a in paths {
            for b in paths {
                let (a, b) = (position(a.0, a.1), position(b.0, b.1));
                assert_eq!(class(&a, &b, false), class(&b, &a, false));
            }
        }
    }

    #[test]
    fn innermost_host_bridge_counts() {
        let vmd = position("pci0000:64/0000:64:00.5/pci10000:00/10000:00:02.0/10000:01:00.0", Some(0));
        assert_eq!(vmd.root, "pci0000:64/0000:64:00.5/pci10000:00");
        assert_eq!(vmd.device.as_str(), "10000:01:00.0");
        let azure = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:01/47505500-0001/pci0001:00/0001:00:00.0";
        assert_eq!(position(azure, None).device.as_str(), "0001:00:00.0");
        assert_eq!(PciePosition::parse("virtual/net/lo", None), None);
        assert_eq!(PciePosition::parse("pci0000:00", None), None);
    }
}
