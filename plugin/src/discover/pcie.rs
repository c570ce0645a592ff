//! Position of a device on PCIe, and the distance of two devices in nvidia-smi's classes, computed from sysfs
//! paths. Pure; [`super::sysfs`] reads the paths.

use gantry_topology::{PathClass, PcieAddress};

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
    use super::*;

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
