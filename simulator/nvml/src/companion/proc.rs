//! `/proc`: the NVIDIA driver's entries for itself and each GPU, and the model of the CPU.

use super::CompanionError;
use super::caps::{CAPS, IMEX};
use super::dev::{NVIDIA, NVSWITCH, UVM};
use super::files::Files;
use crate::facts::Facts;

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

pub(super) fn write(files: &mut Files, facts: &Facts) -> Result<(), CompanionError> {
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
