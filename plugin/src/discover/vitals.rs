//! What a GPU and the kernel say of the GPU's state at one moment. A few cheap questions; what is not answered stays unknown.

use gantry_topology::PcieAddress;

use super::sysfs::Sysfs;
use crate::health::Vitals;
use crate::nvml::{Device, NvmlError};

/// Reads the vitals of one GPU.
///
/// # Errors
/// When the GPU or the driver is gone. Anything else that fails is unknown.
pub(super) fn read(
    device: Device<'_>,
    bus_id: Option<&PcieAddress>,
    sysfs: &Sysfs,
) -> Result<Vitals, NvmlError> {
    let rows = answer(device.remapped_rows())?;
    Ok(Vitals {
        uncorrected: answer(device.uncorrected_errors())?,
        remaps_rows: rows.is_some(),
        repair_pending: match rows {
            Some(rows) => Some(rows.pending),
            None => answer(device.retirement_pending())?,
        },
        repair_failed: rows.map(|rows| rows.failed),
        action: answer(device.recovery_action())?,
        binding: bus_id.and_then(|address| sysfs.binding(address)),
    })
}

fn answer<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_gpu_lost() || error.is_driver_gone() => Err(error),
        Err(_) => Ok(None),
    }
}
