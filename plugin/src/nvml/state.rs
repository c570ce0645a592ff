//! State of one GPU: memory errors, repairs that wait for a reset, and the action that the driver requests. The
//! health module judges it.

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
        let (name, function) = symbol!(self.nvml.table, nvmlDeviceGetTotalEccErrors)?;
        let mut count = 0;
        // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the declared type.
        check(name, Some(self.index), unsafe {
            function(
                self.handle,
                sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                sys::nvmlEccCounterType_enum_NVML_VOLATILE_ECC,
                &raw mut count,
            )
        })?;
        Ok(count)
    }

    /// Remapped rows.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` before Ampere.
    pub fn remapped_rows(&self) -> Result<RemappedRows, NvmlError> {
        let (name, function) = symbol!(self.nvml.table, nvmlDeviceGetRemappedRows)?;
        let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
        // SAFETY: the handle came from the NVML that `self` borrows; all out-pointers are locals of the declared type.
        check(name, Some(self.index), unsafe {
            function(
                self.handle,
                &raw mut corrected,
                &raw mut uncorrected,
                &raw mut pending,
                &raw mut failed,
            )
        })?;
        Ok(RemappedRows {
            pending: pending != 0,
            failed: failed != 0,
        })
    }

    /// Whether memory pages wait for a driver reload to be retired.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` from Ampere on.
    pub fn retirement_pending(&self) -> Result<bool, NvmlError> {
        let symbol = symbol!(self.nvml.table, nvmlDeviceGetRetiredPagesPendingStatus)?;
        let pending = self.get(symbol, sys::nvmlEnableState_enum_NVML_FEATURE_DISABLED)?;
        Ok(pending == sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED)
    }

    /// The action that the driver requests to recover the GPU.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` or `InvalidArgument` from drivers without this field.
    pub fn recovery_action(&self) -> Result<RecoveryAction, NvmlError> {
        let (name, function) = symbol!(self.nvml.table, nvmlDeviceGetFieldValues)?;
        let mut field = sys::nvmlFieldValue_t {
            fieldId: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
            scopeId: 0,
            timestamp: 0,
            latencyUsec: 0,
            valueType: sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT,
            nvmlReturn: sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED,
            value: sys::nvmlValue_t { ullVal: 0 },
        };
        // SAFETY: the handle came from the NVML that `self` borrows; the count matches the one field passed.
        check(name, Some(self.index), unsafe {
            function(self.handle, 1, &raw mut field)
        })?;
        check(name, Some(self.index), field.nvmlReturn)?;
        // SAFETY: every bit pattern is a number; the whole union was set to 0 before the call.
        let action = unsafe { field.value.uiVal };
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
