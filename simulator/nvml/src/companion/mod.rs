//! A machine's entries of `/proc`, `/sys` and `/dev`, written below a root of the caller's choice, which clients read
//! instead of `/`. Never touches the real ones.

mod files;
mod sysfs;
mod tree;

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use gantry_topology::Mig;
use gantry_topology::machine::MAX_GPUS;

use crate::facts::Facts;
use files::Files;

pub(crate) use files::is_laid_down;
pub use files::{MARK, remove};
pub use tree::{Endpoint, Misfit, Tree, class_between};

/// What was laid down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    pub root: PathBuf,
    /// Stands for `/proc`.
    pub proc: PathBuf,
    /// Stands for `/sys`.
    pub sys: PathBuf,
    /// Stands for `/dev`.
    pub dev: PathBuf,
    /// Whether `dev` holds character devices; if not, it holds regular files that state what they stand for.
    pub device_nodes: bool,
    /// Pairs of devices with a path class that no PCI tree can show. NVML still reports the class of the machine file.
    pub misfits: Vec<Misfit>,
}

/// Why the entries could not be laid down or removed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {path}")]
pub struct CompanionError {
    pub action: &'static str,
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

/// Lays down the entries of a machine under `root`, in place of any laid down there before.
///
/// # Errors
/// When something cannot be written.
pub fn lay_down(facts: &Facts, root: &Path) -> Result<Layout, CompanionError> {
    let tree = Tree::of(facts);
    let mut files = Files::begin(root)?;
    write_proc(&mut files, facts)?;
    sysfs::write(&mut files, facts, &tree)?;
    write_dev(&mut files, facts)?;
    write_capabilities(&mut files)?;
    let device_nodes = files.device_nodes;
    files.finish()?;
    let layouts: Vec<Option<&Mig>> = facts.gpus.iter().map(|gpu| gpu.mig.as_ref()).collect();
    apply_layouts(facts, &layouts, root)?;
    Ok(Layout {
        root: root.to_owned(),
        proc: root.join("proc"),
        sys: root.join("sys"),
        dev: root.join("dev"),
        device_nodes,
        misfits: tree.misfits,
    })
}

/// Brings the entries of MIG instances under `root` in line with `layouts`, by the GPU's index.
pub(crate) fn apply_layouts(
    facts: &Facts,
    layouts: &[Option<&Mig>],
    root: &Path,
) -> Result<(), CompanionError> {
    let mut files = Files::again(root);
    write_instances(&mut files, facts, layouts)?;
    files.replace()
}

/// Major number of `/dev/nvidia*`, fixed since ever.
const NVIDIA: u32 = 195;
/// Major number of `/dev/nvidia-uvm*`; real ones vary, as the kernel gives them out.
const UVM: u32 = 511;
/// Major number of `/dev/nvidia-nvswitch*`; real ones vary too.
const NVSWITCH: u32 = 510;
/// Major number of `/dev/infiniband/*`, and the minor of its first `uverbs`.
const INFINIBAND: (u32, u32) = (231, 192);

/// `/dev`: the device nodes of the NVIDIA driver and of the network adapters.
fn write_dev(files: &mut Files, facts: &Facts) -> Result<(), CompanionError> {
    for gpu in &facts.gpus {
        files.device(format!("dev/nvidia{}", gpu.minor), NVIDIA, gpu.minor)?;
    }
    files.device("dev/nvidiactl", NVIDIA, 255)?;
    files.device("dev/nvidia-modeset", NVIDIA, 254)?;
    files.device("dev/nvidia-uvm", UVM, 0)?;
    files.device("dev/nvidia-uvm-tools", UVM, 1)?;
    if !facts.switches.is_empty() {
        files.device("dev/nvidia-nvswitchctl", NVSWITCH, 255)?;
        for (minor, _) in (0..).zip(&facts.switches) {
            files.device(format!("dev/nvidia-nvswitch{minor}"), NVSWITCH, minor)?;
        }
    }
    let (major, first) = INFINIBAND;
    for (number, _) in (0..).zip(&facts.nics) {
        files.device(format!("dev/infiniband/uverbs{number}"), major, first + number)?;
    }
    Ok(())
}

/// The driver's parameters that clients look at, with their usual values.
const PARAMETERS: &str = "\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
InitializeSystemMemoryAllocations: 1
UsePageAttributeTable: 4294967295
EnableMSI: 1
EnablePCIeGen3: 0
MemoryPoolSize: 0
EnableUserNUMAManagement: 1
GpuBlacklist: \"\"
ExcludedGpus: \"\"
";

/// `/proc`: the NVIDIA driver's entries for itself and each GPU, and the model of the CPU.
fn write_proc(files: &mut Files, facts: &Facts) -> Result<(), CompanionError> {
    if let Some(cpu) = &facts.machine().host().cpu {
        files.file("proc/cpuinfo", &format!("processor\t: 0\nmodel name\t: {cpu}\n"))?;
    }
    files.file(
        "proc/driver/nvidia/version",
        &format!(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Simulated\nGCC version:  simulated\n",
            facts.driver
        ),
    )?;
    files.file("proc/driver/nvidia/params", PARAMETERS)?;
    for gpu in &facts.gpus {
        let content = format!(
            "Model: \t\t {model}\n\
             IRQ:   \t\t {irq}\n\
             GPU UUID: \t {uuid}\n\
             Video BIOS: \t 90.02.{architecture:02x}.00.00\n\
             Bus Type: \t PCIe\n\
             DMA Size: \t 47 bits\n\
             DMA Mask: \t 0x7fffffffffff\n\
             Bus Location: \t {address}\n\
             Device Minor: \t {minor}\n\
             GPU Firmware: \t {driver}\n\
             GPU Excluded:\t No\n",
            model = gpu.model,
            irq = 64 + gpu.index,
            uuid = gpu.uuid,
            architecture = gpu.product.architecture,
            address = gpu.address,
            minor = gpu.minor,
            driver = facts.driver,
        );
        files.file(format!("proc/driver/nvidia/gpus/{}/information", gpu.address), &content)?;
    }
    let mut devices =
        format!("Character devices:\n  1 mem\n{NVIDIA} nvidia\n{NVIDIA} nvidiactl\n{UVM} nvidia-uvm\n");
    devices.push_str(&format!("{CAPS} nvidia-caps\n{IMEX} nvidia-caps-imex-channels\n"));
    if !facts.switches.is_empty() {
        devices.push_str(&format!("{NVSWITCH} nvidia-nvswitch\n"));
    }
    files.file("proc/devices", &devices)
}

impl Layout {
    /// Takes away what was laid down.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn remove(&self) -> Result<(), CompanionError> {
        remove(&self.root)
    }
}

/// Major number of `/dev/nvidia-caps/*`; real ones vary, as the kernel gives them out.
const CAPS: u32 = 509;
/// Major number of `/dev/nvidia-caps-imex-channels/*`; real ones vary too.
const IMEX: u32 = 508;
/// Minor numbers of the capability to change MIG layouts, and of the one to watch all instances.
const CONFIG: u32 = 1;
const MONITOR: u32 = 2;
/// GPU instances, and compute instances in each, that the driver has numbers for.
const GPU_INSTANCES: u32 = 15;
const COMPUTE_INSTANCES: u32 = 8;

/// Minor number of a GPU instance's capability, and of a compute instance's: the driver numbers all that there could be.
fn minor(gpu: u32, gpu_instance: u32, compute_instance: Option<u32>) -> u32 {
    let of_gpu = MONITOR + 1 + gpu * GPU_INSTANCES * (COMPUTE_INSTANCES + 1);
    of_gpu + gpu_instance * (COMPUTE_INSTANCES + 1) + compute_instance.map_or(0, |id| id + 1)
}

fn access(minor: u32) -> String {
    format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
}

/// The driver's capabilities: access to `/dev/nvidia-caps/nvidia-capN` grants the use of one. These are there whatever the
/// MIG layout of a GPU: the numbers of all capabilities, those of MIG as a whole, and an IMEX channel.
fn write_capabilities(files: &mut Files) -> Result<(), CompanionError> {
    let mut minors = format!("config {CONFIG}\nmonitor {MONITOR}\n");
    for gpu in (0..).take(MAX_GPUS) {
        for gpu_instance in 0..GPU_INSTANCES {
            let number = minor(gpu, gpu_instance, None);
            // Writing to a text cannot fail.
            let _ = writeln!(minors, "gpu{gpu}/gi{gpu_instance}/access {number}");
            for compute in 0..COMPUTE_INSTANCES {
                let number = minor(gpu, gpu_instance, Some(compute));
                let _ = writeln!(minors, "gpu{gpu}/gi{gpu_instance}/ci{compute}/access {number}");
            }
        }
    }
    files.file("proc/driver/nvidia-caps/mig-minors", &minors)?;
    for (name, number) in [("config", CONFIG), ("monitor", MONITOR)] {
        files.file(format!("proc/driver/nvidia/capabilities/mig/{name}"), &access(number))?;
        files.device(format!("dev/nvidia-caps/nvidia-cap{number}"), CAPS, number)?;
    }
    files.file("proc/driver/nvidia/capabilities/fabric-imex-mgmt", &access(0))?;
    files.device("dev/nvidia-caps-imex-channels/channel0", IMEX, 0)
}

/// The instances of every GPU.
fn write_instances(files: &mut Files, facts: &Facts, layouts: &[Option<&Mig>]) -> Result<(), CompanionError> {
    for (gpu, layout) in facts.gpus.iter().zip(layouts) {
        let Some(mig) = layout.filter(|mig| mig.enabled) else {
            continue;
        };
        let folder = format!("proc/driver/nvidia/capabilities/gpu{}/mig", gpu.minor);
        files.folder(&folder)?;
        for instance in &mig.instances {
            let mut capability = |path: String, number: u32| {
                files.file(format!("{folder}/{path}/access"), &access(number))?;
                files.device(format!("dev/nvidia-caps/nvidia-cap{number}"), CAPS, number)
            };
            capability(format!("gi{}", instance.id), minor(gpu.minor, instance.id, None))?;
            for compute in &instance.compute {
                capability(
                    format!("gi{}/ci{}", instance.id, compute.id),
                    minor(gpu.minor, instance.id, Some(compute.id)),
                )?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
