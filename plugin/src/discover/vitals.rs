//! State of one GPU as the GPU and the kernel report it, read with a few cheap calls. A fact that cannot be
//! read stays unknown; "unsupported" and "failed" are distinguished.

use gantry_topology::PcieAddress;

use super::sysfs::Sysfs;
use crate::health::{Failed, Vitals};
use crate::nvml::{Code, Device, NvmlError};

/// Reads the vitals of one GPU.
///
/// # Errors
/// When the GPU or the driver is gone. Any other failure leaves the fact unknown.
pub(super) fn read(
    device: Device<'_>,
    bus_id: Option<&PcieAddress>,
    sysfs: &Sysfs,
) -> Result<Vitals, NvmlError> {
    let (uncorrected, uncorrected_failed) = answer(device.uncorrected_errors())?;
    let (rows, rows_failed) = answer(device.remapped_rows())?;
    let (repair_pending, pending_failed) = match rows {
        Some(rows) => (Some(rows.pending), false),
        // A GPU has rows or pages: the unsupported one of the two is not a failure.
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

/// The value, and whether the call failed. "Unsupported" is not a failure.
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
