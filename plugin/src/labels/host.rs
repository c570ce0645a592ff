//! Facts for labels that NVML does not report: machine type, PCI classes, virtual GPUs. Reads files; a missing file means "unknown",
//! never an error.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use gantry_topology::PcieAddress;

/// Where the facts are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostOptions {
    /// File with the machine's type; an empty path: none.
    pub machine_type_file: PathBuf,
    /// Where `/sys` is read.
    pub sys_root: PathBuf,
}

/// Facts for labels that NVML does not report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Host {
    /// The machine's type as its firmware (DMI) names it; `None` if unknown.
    pub machine_type: Option<String>,
    /// PCI classes of NVIDIA's devices, GPUs and others, by address.
    pub classes: BTreeMap<PcieAddress, PciClass>,
    /// The virtual GPU of lowest address, if there is one.
    pub vgpu: Option<Vgpu>,
}

/// The purpose of a PCI device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PciClass {
    /// A 3D controller (0x0302), without displays.
    Compute,
    /// A VGA controller (0x0300).
    Display,
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vgpu {
    /// The driver of the host, if the virtual GPU reports it.
    pub driver: Option<HostDriver>,
}

/// NVIDIA's PCI vendor id.
const VENDOR: &str = "0x10de";
/// Bytes read of a file that has one line.
const MOST_OF_A_LINE: u64 = 4096;

impl Host {
    /// Reads all of it.
    pub fn read(options: &HostOptions) -> Self {
        let mut host = Self { machine_type: line(&options.machine_type_file), ..Self::default() };
        let mut devices: Vec<PathBuf> = fs::read_dir(options.sys_root.join("bus/pci/devices"))
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect();
        devices.sort();
        for device in devices {
            host.device(&device);
        }
        host
    }

    fn device(&mut self, folder: &Path) {
        if line(&folder.join("vendor")).as_deref() != Some(VENDOR) {
            return;
        }
        let address = folder.file_name().and_then(|name| name.to_str()?.parse().ok());
        let class = line(&folder.join("class"));
        if let (Some(address), Some(class)) = (address, class) {
            self.classes.insert(address, PciClass::of(&class));
        }
        if self.vgpu.is_none()
            && let Ok(bytes) = fs::read(folder.join("config"))
            && let Some(driver) = read_driver(&bytes)
        {
            self.vgpu = Some(Vgpu { driver });
        }
    }
}

impl PciClass {
    /// From what sysfs writes: class, subclass and interface, `0x030200`.
    fn of(text: &str) -> Self {
        match text {
            "0x030200" => Self::Compute,
            "0x030000" => Self::Display,
            _ => Self::Other,
        }
    }
}

/// The trimmed text of a small file; `None` if there is none. Bytes that are not UTF-8 become characters that labels drop.
fn line(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    let file = fs::File::open(path).ok()?;
    file.take(MOST_OF_A_LINE).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Driver of the host of a virtual GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostDriver {
    /// Version, e.g. `460.16`.
    pub version: String,
    /// Branch, e.g. `r460_00`.
    pub branch: String,
}

/// Required bytes of configuration space; a process without CAP_SYS_ADMIN can read only 64.
const CONFIGURATION: usize = 256;

/// The status register, its "has capabilities" bit, and the offset of the first capability (PCI Local Bus 3.0, 6.1).
const STATUS: usize = 0x06;
const HAS_CAPABILITIES: u8 = 0x10;
const FIRST: usize = 0x34;
/// The capability id for vendors.
const VENDOR_CAPABILITY: u8 = 0x09;
/// NVIDIA's capability: a mark, then records of number, length and content.
const MARK: &[u8] = b"VF";
const MARK_AT: usize = 3;
const RECORDS: usize = 5;
/// Length of each of the two texts in record 0.
const TEXT: usize = 10;

/// The host driver of a virtual GPU, if it reports one, by its configuration space; the outer `None`: no virtual GPU.
fn read_driver(configuration: &[u8]) -> Option<Option<HostDriver>> {
    let capability = vendor_capability(configuration)?;
    (capability.get(MARK_AT..RECORDS) == Some(MARK)).then(|| host_driver(capability))
}

/// The first vendor capability. `None` if the chain has a cycle or leaves the space.
fn vendor_capability(configuration: &[u8]) -> Option<&[u8]> {
    let byte = |at: usize| configuration.get(at).copied();
    if configuration.len() < CONFIGURATION || byte(STATUS)? & HAS_CAPABILITIES == 0 {
        return None;
    }
    let mut at = usize::from(byte(FIRST)?);
    // The space has room for no more.
    for _ in 0..CONFIGURATION {
        match (at, byte(at)?) {
            (0, _) | (_, 0xff) => return None,
            (_, VENDOR_CAPABILITY) => {
                let length = usize::from(byte(at + 2)?);
                return configuration.get(at..at + length);
            }
            _ => at = usize::from(byte(at + 1)?),
        }
    }
    None
}

fn host_driver(capability: &[u8]) -> Option<HostDriver> {
    let mut at = RECORDS;
    while *capability.get(at)? != 0 {
        match *capability.get(at + 1)? {
            0 => return None,
            length => at += usize::from(length),
        }
    }
    let text = |from: usize| {
        let bytes = capability.get(from..from + TEXT)?;
        let text = String::from_utf8_lossy(bytes);
        Some(text.trim_matches('\0').to_owned())
    };
    Some(HostDriver { version: text(at + 2)?, branch: text(at + 2 + TEXT)? })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A configuration space with these capabilities behind one another: id, then content from the third byte on.
    fn space(capabilities: &[(u8, &[u8])]) -> Vec<u8> {
        let mut space = vec![0; CONFIGURATION];
        space[STATUS] = HAS_CAPABILITIES;
        let mut at = 0x40;
        space[FIRST] = 0x40;
        for (position, (id, content)) in capabilities.iter().enumerate() {
            let next = at + content.len() + 3;
            space[at] = *id;
            space[at + 1] = if position + 1 < capabilities.len() { next as u8 } else { 0 };
            space[at + 2] = content.len() as u8 + 3;
            space[at + 3..next].copy_from_slice(content);
            at = next;
        }
        space
    }

    const DRIVER: &[u8] = b"VF\x00\x16460.16\0\0\0\0r460_00\0\0\0";

    #[test]
    fn virtual_gpu_reports_host_driver() {
        let space = space(&[(0x05, &[1, 2, 3]), (VENDOR_CAPABILITY, DRIVER)]);
        let driver = HostDriver { version: "460.16".into(), branch: "r460_00".into() };
        assert_eq!(read_driver(&space), Some(Some(driver)));
    }

    #[test]
    fn records_before_the_driver_are_skipped() {
        let content = [b"VF\x02\x04xx", &DRIVER[2..]].concat();
        let found = read_driver(&space(&[(VENDOR_CAPABILITY, &content)])).unwrap().unwrap();
        assert_eq!(found.version, "460.16");
    }

    #[test]
    fn virtual_gpu_without_driver_record_is_recognised() {
        assert_eq!(read_driver(&space(&[(VENDOR_CAPABILITY, b"VF\x05\x00")])), Some(None));
        assert_eq!(read_driver(&space(&[(VENDOR_CAPABILITY, b"VF\x00\x16460")])), Some(None));
    }

    #[test]
    fn passed_through_gpu_is_not_virtual() {
        assert_eq!(read_driver(&space(&[(0x01, &[0; 5]), (VENDOR_CAPABILITY, b"\x14\x01")])), None);
        assert_eq!(read_driver(&space(&[])), None);
        assert_eq!(read_driver(&space(&[(VENDOR_CAPABILITY, DRIVER)])[..64]), None);
        let mut circle = space(&[(0x05, &[0])]);
        circle[0x41] = 0x40;
        assert_eq!(read_driver(&circle), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(mut space in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Some(status) = space.get_mut(STATUS) {
                *status |= HAS_CAPABILITIES;
            }
            let _ = read_driver(&space);
        }
    }
}
