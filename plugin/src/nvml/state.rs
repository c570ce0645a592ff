//! State of one GPU: memory errors, repairs that wait for a reset, and the action that the driver requests. The
//! health module judges it.

use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError as WrapperError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper_sys::bindings as sys;
use nvml_wrapper_sys::bindings::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;

use super::call::{check, symbol};
use super::{Device, NvmlError};

/// Memory rows that are, or will be, replaced by spare ones (Ampere and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemappedRows {
    /// Some rows wait for a reset.
    pub pending: bool,
    /// A row could not be replaced.
    pub failed: bool,
}

/// The action that the driver requests to recover a GPU (drivers 560 and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryAction {
    /// Nothing.
    None,
    /// A reset of the GPU.
    Reset,
    /// A reboot of the node.
    Reboot,
    /// End all peer-to-peer traffic.
    DrainPeers,
    /// End all work, then reset the GPU.
    DrainAndReset,
    /// An action newer than this build.
    Other(u32),
}

impl Device<'_> {
    /// Uncorrected memory errors since the driver was loaded or the GPU was reset.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` without ECC.
    pub fn uncorrected_errors(&self) -> Result<u64, NvmlError> {
        self.call("nvmlDeviceGetTotalEccErrors", |device| {
            device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile)
        })
    }

    /// Remapped rows.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` before Ampere.
    pub fn remapped_rows(&self) -> Result<RemappedRows, NvmlError> {
        // Raw: nvml-wrapper has no such call.
        let (name, function) = symbol!(self.nvml, nvmlDeviceGetRemappedRows)?;
        let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
        // SAFETY: the handle came from the NVML that `self` borrows; all out-pointers are locals of the declared type.
        check(name, Some(self.index), unsafe {
            function(self.handle, &raw mut corrected, &raw mut uncorrected, &raw mut pending, &raw mut failed)
        })?;
        Ok(RemappedRows { pending: pending != 0, failed: failed != 0 })
    }

    /// Whether memory pages wait for a driver reload to be retired.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` from Ampere on.
    pub fn retirement_pending(&self) -> Result<bool, NvmlError> {
        self.call("nvmlDeviceGetRetiredPagesPendingStatus", |device| device.are_pages_pending_retired())
    }

    /// The action that the driver requests to recover the GPU.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` or `InvalidArgument` from drivers without this field.
    pub fn recovery_action(&self) -> Result<RecoveryAction, NvmlError> {
        let call = "nvmlDeviceGetFieldValues";
        let field = FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION);
        let action = self.call(call, |device| {
            // One value is returned per field.
            let value = device.field_values_for(&[field])?.pop();
            value.ok_or(WrapperError::NoData)??.value
        })?;
        let action = match action {
            SampleValue::U32(action) => action,
            other => return Err(self.unexpected(call, format!("{other:?}"), "an unsigned integer")),
        };
        Ok(match action {
            sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_NONE => RecoveryAction::None,
            sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_GPU_RESET => RecoveryAction::Reset,
            sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_NODE_REBOOT => RecoveryAction::Reboot,
            sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_DRAIN_P2P => {
                RecoveryAction::DrainPeers
            }
            sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET => {
                RecoveryAction::DrainAndReset
            }
            other => RecoveryAction::Other(other),
        })
    }
}
