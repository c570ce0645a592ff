//! Facts for labels that NVML does not report: machine type, PCI classes, virtual GPUs. Reads files; a missing file means "unknown",
//! never an error.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use gantry_topology::PcieAddress;

use super::vgpu::{self, HostDriver};

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
    /// Anything else.
    Other,
}

/// A virtual GPU.
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
            && let Some(driver) = vgpu::read(&bytes)
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
