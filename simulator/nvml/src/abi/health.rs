//! Memory and its health: sizes, ECC errors, remapped rows, retired pages.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings as sys;

use super::args::{OutPointer, Status, struct_version};
use super::call::{MigTarget, Subject, Target};
use super::handle::Device;
use crate::control::{Ecc, PageRetirement, Recovery, RowRemapping};

const MIB: u64 = 1 << 20;
const ENABLED: sys::nvmlEnableState_t = sys::nvmlEnableState_enum_NVML_FEATURE_ENABLED;
const DISABLED: sys::nvmlEnableState_t = sys::nvmlEnableState_enum_NVML_FEATURE_DISABLED;

/// Sizes in bytes. The driver keeps about one percent for itself.
struct Sizes {
    total: u64,
    reserved: u64,
    used: u64,
}

impl Sizes {
    fn of(gpu: Target<'_>) -> Self {
        let total =
            gpu.reported(|facts| facts.memory_mib).unwrap_or(gpu.facts.memory_mib).saturating_mul(MIB);
        let reserved = total / 100 / MIB * MIB;
        let processes = gpu.unusual().map_or(&[][..], |state| &state.processes);
        let used: u64 = processes.iter().map(|process| process.memory_mib * MIB).sum();
        Self { total, reserved, used: used.min(total - reserved) }
    }
}

impl Sizes {
    /// Sizes of a GPU or of a MIG device: the memory of its GPU instance, which its compute instances share.
    fn of_subject(subject: Subject<'_>) -> Self {
        match subject {
            Subject::Gpu(gpu) => Self::of(gpu),
            Subject::Mig(mig) => Self::of_instance(mig),
        }
    }

    fn of_instance(mig: MigTarget<'_>) -> Self {
        let total = mig.attributes().memory_mib * MIB;
        let all = Subject::Gpu(mig.gpu).processes();
        let here = all.filter(|process| process.gpu_instance == Some(mig.instance.id));
        let used: u64 = here.map(|process| process.memory_mib * MIB).sum();
        Self { total, reserved: 0, used: used.min(total) }
    }
}

impl Target<'_> {
    /// ECC counts, if the board counts.
    pub(super) fn ecc(self) -> Result<Ecc, Status> {
        if self.facts.product.ecc {
            Ok(self.unusual().map(|state| state.ecc).unwrap_or_default())
        } else {
            Err(Status::NOT_SUPPORTED)
        }
    }

    /// What is recommended to do about the GPU, as NVML counts it.
    pub(super) fn recovery(self) -> sys::nvmlDeviceGpuRecoveryAction_t {
        match self.unusual().map(|state| state.recovery).unwrap_or_default() {
            Recovery::None => sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_NONE,
            Recovery::GpuReset => sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_GPU_RESET,
            Recovery::NodeReboot => sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_NODE_REBOOT,
            Recovery::DrainP2p => sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_DRAIN_P2P,
            Recovery::DrainAndReset => {
                sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET
            }
        }
    }

    /// Remapped rows: Ampere and later boards with ECC have them.
    pub(super) fn remapped(self) -> Result<RowRemapping, Status> {
        self.ecc()?;
        if self.facts.compute_capability < (8, 0) {
            return Err(Status::NOT_SUPPORTED);
        }
        Ok(self.unusual().map(|state| state.remapped).unwrap_or_default())
    }

    /// Retired pages: boards before Ampere with ECC have them.
    pub(super) fn retired(self) -> Result<PageRetirement, Status> {
        self.ecc()?;
        if self.facts.compute_capability >= (8, 0) {
            return Err(Status::NOT_SUPPORTED);
        }
        Ok(self.unusual().map(|state| state.retired.clone()).unwrap_or_default())
    }
}

/// The count that an error type and a counter type name.
fn ecc_count(ecc: Ecc, error: c_uint, counter: c_uint) -> Result<u64, Status> {
    match (counter, error) {
        (sys::nvmlEccCounterType_enum_NVML_VOLATILE_ECC, 0) => Ok(ecc.volatile_corrected),
        (sys::nvmlEccCounterType_enum_NVML_VOLATILE_ECC, 1) => Ok(ecc.volatile_uncorrected),
        (sys::nvmlEccCounterType_enum_NVML_AGGREGATE_ECC, 0) => Ok(ecc.aggregate_corrected),
        (sys::nvmlEccCounterType_enum_NVML_AGGREGATE_ECC, 1) => Ok(ecc.aggregate_uncorrected),
        _ => Err(Status::INVALID_ARGUMENT),
    }
}

fn pages(gpu: Target<'_>, cause: sys::nvmlPageRetirementCause_t) -> Result<Vec<u64>, Status> {
    let retired = gpu.retired()?;
    match cause {
        sys::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS => {
            Ok(retired.single_bit)
        }
        sys::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR => {
            Ok(retired.double_bit)
        }
        _ => Err(Status::INVALID_ARGUMENT),
    }
}

nvml! {
    fn nvmlDeviceGetMemoryInfo(device: Device, memory: OutPointer<sys::nvmlMemory_t>) |call| {
        let sizes = Sizes::of_subject(call.subject(device)?);
        // The first version counts what the driver keeps as used.
        let used = sizes.used + sizes.reserved;
        memory.put(sys::nvmlMemory_t {
            total: sizes.total,
            free: sizes.total - used,
            used,
        })
    }

    fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: OutPointer<sys::nvmlMemory_v2_t>) |call| {
        memory.check_version(2)?;
        let sizes = Sizes::of_subject(call.subject(device)?);
        memory.put(sys::nvmlMemory_v2_t {
            version: struct_version::<sys::nvmlMemory_v2_t>(2),
            total: sizes.total,
            reserved: sizes.reserved,
            free: sizes.total - sizes.reserved - sizes.used,
            used: sizes.used,
        })
    }

    fn nvmlDeviceGetBAR1MemoryInfo(device: Device, memory: OutPointer<sys::nvmlBAR1Memory_t>) |call| {
        let total = call.gpu(device)?.facts.product.bar1_mib * MIB;
        memory.put(sys::nvmlBAR1Memory_t {
            bar1Total: total,
            bar1Free: total - MIB,
            bar1Used: MIB,
        })
    }

    fn nvmlDeviceGetEccMode(
        device: Device,
        current: OutPointer<sys::nvmlEnableState_t>,
        pending: OutPointer<sys::nvmlEnableState_t>,
    ) |call| {
        call.gpu(device)?.ecc()?;
        pending.check()?;
        current.put(ENABLED)?;
        pending.put(ENABLED)
    }

    fn nvmlDeviceGetDefaultEccMode(device: Device, mode: OutPointer<sys::nvmlEnableState_t>) |call| {
        call.gpu(device)?.ecc()?;
        mode.put(ENABLED)
    }

    fn nvmlDeviceGetTotalEccErrors(
        device: Device,
        error: sys::nvmlMemoryErrorType_t,
        counter: sys::nvmlEccCounterType_t,
        count: OutPointer<c_ulonglong>,
    ) |call| {
        count.put(ecc_count(call.gpu(device)?.ecc()?, error, counter)?)
    }

    fn nvmlDeviceGetDetailedEccErrors(
        device: Device,
        error: sys::nvmlMemoryErrorType_t,
        counter: sys::nvmlEccCounterType_t,
        counts: OutPointer<sys::nvmlEccErrorCounts_t>,
    ) |call| {
        let total = ecc_count(call.gpu(device)?.ecc()?, error, counter)?;
        // Every error of the simulator happens in device memory.
        counts.put(sys::nvmlEccErrorCounts_t {
            l1Cache: 0,
            l2Cache: 0,
            deviceMemory: total,
            registerFile: 0,
        })
    }

    fn nvmlDeviceGetMemoryErrorCounter(
        device: Device,
        error: sys::nvmlMemoryErrorType_t,
        counter: sys::nvmlEccCounterType_t,
        location: sys::nvmlMemoryLocation_t,
        count: OutPointer<c_ulonglong>,
    ) |call| {
        let total = ecc_count(call.gpu(device)?.ecc()?, error, counter)?;
        match location {
            sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_DEVICE_MEMORY => count.put(total),
            other if other < sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_COUNT => count.put(0),
            _ => Err(Status::INVALID_ARGUMENT),
        }
    }

    fn nvmlDeviceGetRemappedRows(
        device: Device,
        corrected: OutPointer<c_uint>,
        uncorrected: OutPointer<c_uint>,
        pending: OutPointer<c_uint>,
        failed: OutPointer<c_uint>,
    ) |call| {
        let rows = call.gpu(device)?.remapped()?;
        for place in [corrected, uncorrected, pending, failed] {
            place.check()?;
        }
        corrected.put(rows.corrected)?;
        uncorrected.put(rows.uncorrected)?;
        pending.put(c_uint::from(rows.pending))?;
        failed.put(c_uint::from(rows.failed))
    }

    fn nvmlDeviceGetRowRemapperHistogram(
        device: Device,
        values: OutPointer<sys::nvmlRowRemapperHistogramValues_t>,
    ) |call| {
        let rows = call.gpu(device)?.remapped()?;
        // As many banks as an A100 has; each remapped row is taken from a bank of its own.
        let banks: c_uint = 640;
        let touched = rows.corrected.saturating_add(rows.uncorrected).min(banks);
        values.put(sys::nvmlRowRemapperHistogramValues_t {
            max: banks - touched,
            high: touched,
            partial: 0,
            low: 0,
            none: 0,
        })
    }

    fn nvmlDeviceGetRetiredPages(
        device: Device,
        cause: sys::nvmlPageRetirementCause_t,
        count: OutPointer<c_uint>,
        addresses: OutPointer<c_ulonglong>,
    ) |call| {
        addresses.put_list(count, &pages(call.gpu(device)?, cause)?)
    }

    fn nvmlDeviceGetRetiredPages_v2(
        device: Device,
        cause: sys::nvmlPageRetirementCause_t,
        count: OutPointer<c_uint>,
        addresses: OutPointer<c_ulonglong>,
        times: OutPointer<c_ulonglong>,
    ) |call| {
        let pages = pages(call.gpu(device)?, cause)?;
        addresses.put_list(count, &pages)?;
        times.put_all(&vec![0; pages.len()])
    }

    fn nvmlDeviceGetRetiredPagesPendingStatus(device: Device, pending: OutPointer<sys::nvmlEnableState_t>) |call| {
        let waits = call.gpu(device)?.retired()?.pending;
        pending.put(if waits { ENABLED } else { DISABLED })
    }
}
