//! MIG mode and MIG devices of a GPU, as NVML returns them. Discovery works out profile names and placements
//! that NVML does not return.

use std::collections::BTreeMap;

use gantry_topology::{MigAttributes, MigUuid};
use nvml_wrapper_sys::bindings as sys;

use super::call::{check, symbol};
use super::{Device, NvmlError};

/// MIG mode of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigMode {
    /// Whether it is on.
    pub current: bool,
    /// Whether it will be on after the next reset of the GPU.
    pub pending: bool,
}

/// Ids of a MIG device on its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct MigIds {
    /// GPU instance.
    pub gpu_instance: u32,
    /// Compute instance in it.
    pub compute_instance: u32,
}

/// Location of a GPU instance on its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// First memory unit.
    pub start: u32,
    /// Memory units.
    pub size: u32,
}

/// A GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstanceInfo {
    /// Id of its profile, as in `nvidia-smi mig -lgip`. The number is specific to the product.
    pub profile: u32,
    /// Its location.
    pub placement: Placement,
}

/// One MIG device of a GPU: a compute instance.
#[derive(Clone, Copy)]
pub struct MigDevice<'nvml>(Device<'nvml>);

impl<'nvml> Device<'nvml> {
    /// MIG mode. GPUs without MIG return `NotSupported`.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn mig_mode(&self) -> Result<MigMode, NvmlError> {
        let (name, function) = symbol!(self.nvml.table, nvmlDeviceGetMigMode)?;
        let (mut current, mut pending) = (sys::NVML_DEVICE_MIG_DISABLE, sys::NVML_DEVICE_MIG_DISABLE);
        // SAFETY: the handle came from the NVML that `self` borrows; both out-pointers are locals of the declared type.
        check(name, Some(self.index), unsafe {
            function(self.handle, &raw mut current, &raw mut pending)
        })?;
        Ok(MigMode {
            current: current == sys::NVML_DEVICE_MIG_ENABLE,
            pending: pending == sys::NVML_DEVICE_MIG_ENABLE,
        })
    }

    /// The MIG devices, in NVML's order. Empty indices are skipped.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn mig_devices(&self) -> Result<Vec<MigDevice<'nvml>>, NvmlError> {
        let count = self.get(symbol!(self.nvml.table, nvmlDeviceGetMaxMigDeviceCount)?, 0)?;
        let (name, function) = symbol!(self.nvml.table, nvmlDeviceGetMigDeviceHandleByIndex)?;
        let mut devices = Vec::new();
        // Bounds the loop: no GPU has more MIG devices.
        for index in 0..count.min(MOST_MIG_DEVICES) {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the declared type.
            let code = unsafe { function(self.handle, index, &raw mut handle) };
            match check(name, Some(self.index), code) {
                Ok(()) => devices.push(MigDevice(Device { handle, ..*self })),
                // Empty; some drivers return an invalid index instead.
                Err(error) if error.is_nothing_there() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(devices)
    }

    /// Profile and location of GPU instance `id`. Some drivers require privileges (`NoPermission`).
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn gpu_instance(&self, id: u32) -> Result<InstanceInfo, NvmlError> {
        let (name, function) = symbol!(self.nvml.table, nvmlDeviceGetGpuInstanceById)?;
        let mut instance = std::ptr::null_mut();
        // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the declared type.
        check(name, Some(self.index), unsafe {
            function(self.handle, id, &raw mut instance)
        })?;
        let (name, function) = symbol!(self.nvml.table, nvmlGpuInstanceGetInfo)?;
        let mut info = sys::nvmlGpuInstanceInfo_t {
            device: std::ptr::null_mut(),
            id: 0,
            profileId: 0,
            placement: sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 },
        };
        // SAFETY: the instance came from the call above; the out-pointer is a local of the declared type.
        check(name, Some(self.index), unsafe {
            function(instance, &raw mut info)
        })?;
        Ok(InstanceInfo {
            profile: info.profileId,
            placement: Placement {
                start: info.placement.start,
                size: info.placement.size,
            },
        })
    }

    /// NVML's profile numbers (`NVML_GPU_INSTANCE_PROFILE_*`, the same on every product) by profile id. Numbers
    /// that the driver or the product lacks are left out.
    ///
    /// # Errors
    /// The library lacks the call, the GPU is lost or the driver gone.
    pub fn profile_numbers(&self) -> Result<BTreeMap<u32, u32>, NvmlError> {
        let (name, function) = symbol!(self.nvml.table, nvmlDeviceGetGpuInstanceProfileInfo)?;
        let mut numbers = BTreeMap::new();
        for number in 0..sys::NVML_GPU_INSTANCE_PROFILE_COUNT {
            let mut info = sys::nvmlGpuInstanceProfileInfo_t {
                id: 0,
                isP2pSupported: 0,
                sliceCount: 0,
                instanceCount: 0,
                multiprocessorCount: 0,
                copyEngineCount: 0,
                decoderCount: 0,
                encoderCount: 0,
                jpegCount: 0,
                ofaCount: 0,
                memorySizeMB: 0,
            };
            // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the declared type.
            let code = unsafe { function(self.handle, number, &raw mut info) };
            match check(name, Some(self.index), code) {
                Ok(()) => _ = numbers.insert(info.id, number),
                Err(error) if error.is_gpu_lost() || error.is_driver_gone() => return Err(error),
                Err(_) => {}
            }
        }
        Ok(numbers)
    }
}

impl MigDevice<'_> {
    /// The UUID, `MIG-...`.
    ///
    /// # Errors
    /// The code that NVML returned, or an answer that makes no sense.
    pub fn uuid(&self) -> Result<MigUuid, NvmlError> {
        let symbol = symbol!(self.0.nvml.table, nvmlDeviceGetUUID)?;
        let uuid = self.0.get_text(symbol)?;
        uuid.parse()
            .map_err(|_| self.0.nonsense(symbol.0, uuid, "MIG device UUID"))
    }

    /// The name. It ends with the profile of the compute instance: `NVIDIA A100-SXM4-40GB MIG 3g.20gb`. The
    /// suffix of the GPU instance (`+me`) is not in it.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn name(&self) -> Result<String, NvmlError> {
        self.0.name()
    }

    /// Its GPU instance and compute instance.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn ids(&self) -> Result<MigIds, NvmlError> {
        let table = &self.0.nvml.table;
        Ok(MigIds {
            gpu_instance: self.0.get(symbol!(table, nvmlDeviceGetGpuInstanceId)?, 0)?,
            compute_instance: self.0.get(symbol!(table, nvmlDeviceGetComputeInstanceId)?, 0)?,
        })
    }

    /// Engines and memory.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn attributes(&self) -> Result<MigAttributes, NvmlError> {
        let blank = sys::nvmlDeviceAttributes_t {
            multiprocessorCount: 0,
            sharedCopyEngineCount: 0,
            sharedDecoderCount: 0,
            sharedEncoderCount: 0,
            sharedJpegCount: 0,
            sharedOfaCount: 0,
            gpuInstanceSliceCount: 0,
            computeInstanceSliceCount: 0,
            memorySizeMB: 0,
        };
        let answer = self
            .0
            .get(symbol!(self.0.nvml.table, nvmlDeviceGetAttributes_v2)?, blank)?;
        Ok(MigAttributes {
            multiprocessors: answer.multiprocessorCount,
            gpu_slices: answer.gpuInstanceSliceCount,
            compute_slices: answer.computeInstanceSliceCount,
            copy_engines: answer.sharedCopyEngineCount,
            decoders: answer.sharedDecoderCount,
            encoders: answer.sharedEncoderCount,
            jpeg: answer.sharedJpegCount,
            ofa: answer.sharedOfaCount,
            memory_mib: answer.memorySizeMB,
        })
    }
}

/// Upper bound of MIG devices of one GPU.
const MOST_MIG_DEVICES: u32 = 64;
