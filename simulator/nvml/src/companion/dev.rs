//! `/dev`: the device nodes of the NVIDIA driver and of the network adapters.

use super::CompanionError;
use super::files::Files;
use crate::facts::Facts;

/// Major number of `/dev/nvidia*`, fixed since ever.
pub(super) const NVIDIA: u32 = 195;
/// Major number of `/dev/nvidia-uvm*`; real ones vary, as the kernel gives them out.
pub(super) const UVM: u32 = 511;
/// Major number of `/dev/nvidia-nvswitch*`; real ones vary too.
pub(super) const NVSWITCH: u32 = 510;
/// Major number of `/dev/infiniband/*`, and the minor of its first `uverbs`.
const INFINIBAND: (u32, u32) = (231, 192);

pub(super) fn write(files: &mut Files, facts: &Facts) -> Result<(), CompanionError> {
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
