//! What a GPU and the kernel say of the GPU's state at one moment. A few cheap questions; what is not answered stays unknown,
//! and whether the GPU has no such thing or the question failed is told apart.

use gantry_topology::PcieAddress;

use super::sysfs::Sysfs;
use crate::health::{Failed, Vitals};
use crate::nvml::{Code, Device, NvmlError};

/// Reads the vitals of one GPU.
///
/// # Errors
/// When the GPU or the driver is gone. Anything else that fails is unknown.
pub(super) fn read(
    device: Device<'_>,
    bus_id: Option<&PcieAddress>,
    sysfs: &Sysfs,
) -> Result<Vitals, NvmlError> {
    let (uncorrected, uncorrected_failed) = answer(device.uncorrected_errors())?;
    let (rows, rows_failed) = answer(device.remapped_rows())?;
    let (repair_pending, pending_failed) = match rows {
        Some(rows) => (Some(rows.pending), false),
        // Rows or pages: which of them it has is what it did not say.
        None if rows_failed => (None, true),
        None => answer(device.retirement_pending())?,
    };
    let (action, action_failed) = answer(device.recovery_action())?;
    Ok(Vitals {
        uncorrected,
        remaps_rows: rows.is_some(),
        repair_pending,
        repair_failed: rows.map(|rows| rows.failed),
        action,
        binding: bus_id.and_then(|address| sysfs.binding(address)),
        failed: Failed {
            uncorrected: uncorrected_failed,
            repair: pending_failed,
            action: action_failed,
        },
    })
}

/// The answer, and whether the question failed. A GPU or a driver that does not know the question has answered it.
fn answer<T>(answer: Result<T, NvmlError>) -> Result<(Option<T>, bool), NvmlError> {
    match answer {
        Ok(value) => Ok((Some(value), false)),
        Err(error) if error.is_gpu_lost() || error.is_driver_gone() => Err(error),
        Err(error) => {
            let is_unknown = error.is_unsupported() || error.code() == Some(Code::InvalidArgument);
            Ok((None, !is_unknown))
        }
    }
}
