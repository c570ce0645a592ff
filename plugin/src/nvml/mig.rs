//! MIG mode and MIG devices of a GPU, as NVML returns them. Discovery works out profile names and placements
//! that NVML does not return.

use std::collections::BTreeMap;

use gantry_topology::{MigAttributes, MigUuid};
use nvml_wrapper_sys::bindings as sys;

use super::device::{MAX_MEMORY, check, symbol};
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
    pub gpu_instance: u32,
    /// Compute instance in it.
    pub compute_instance: u32,
}

/// Location of a GPU instance on its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// First memory unit.
    pub start: u32,
    pub size: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstanceInfo {
    /// Id of its profile, as in `nvidia-smi mig -lgip`. The number is specific to the product.
    pub profile: u32,
    /// Its location.
    pub placement: Placement,
}

/// One MIG device of a GPU: a compute instance.
#[derive(Clone, Copy)]
pub struct MigDevice<'nvml>(pub(super) Device<'nvml>);

impl<'nvml> Device<'nvml> {
    /// MIG mode. GPUs without MIG return `NotSupported`.
    pub fn mig_mode(&self) -> Result<MigMode, NvmlError> {
        let mode = self.call("nvmlDeviceGetMigMode", |device| device.mig_mode())?;
        Ok(MigMode {
            current: mode.current == sys::NVML_DEVICE_MIG_ENABLE,
            pending: mode.pending == sys::NVML_DEVICE_MIG_ENABLE,
        })
    }

    /// The MIG devices, in NVML's order. Empty indices are skipped.
    pub fn mig_devices(&self) -> Result<Vec<MigDevice<'nvml>>, NvmlError> {
        // The most that there can be, in spite of the name.
        let count = self.call("nvmlDeviceGetMaxMigDeviceCount", |device| device.mig_device_count())?;
        let mut devices = Vec::new();
        // Bounds the loop: no GPU has more MIG devices.
        for index in 0..count.min(MAX_MIG_DEVICES) {
            match self.call("nvmlDeviceGetMigDeviceHandleByIndex", |device| device.mig_device_by_index(index))
            {
                Ok(device) => devices.push(MigDevice(Device {
                    // SAFETY: the handle stays with the NVML that `self` borrows, from which it came.
                    handle: unsafe { device.handle() },
                    ..*self
                })),
                // Empty; some drivers return an invalid index instead.
                Err(error) if error.is_nothing_there() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(devices)
    }

    /// Profile and location of GPU instance `id`. Some drivers require privileges (`NoPermission`).
    pub fn gpu_instance(&self, id: u32) -> Result<InstanceInfo, NvmlError> {
        // Raw: nvml-wrapper has no GPU instances.
        let (name, function) = symbol!(self.nvml, nvmlDeviceGetGpuInstanceById)?;
        let mut handle = std::ptr::null_mut();
        {
            let _call = self.nvml.trace.begin(name, Some(self.index));
            // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the declared type.
            check(name, Some(self.index), unsafe { function(self.handle, id, &raw mut handle) })?;
        }
        let instance = self.instance_of(handle)?;
        Ok(InstanceInfo { profile: instance.profile, placement: instance.placement })
    }

    /// NVML's profile numbers (`NVML_GPU_INSTANCE_PROFILE_*`, the same on every product) by profile id. Numbers
    /// that the driver or the product lacks are left out.
    ///
    /// # Errors
    /// The library lacks the call, the GPU is lost or the driver gone.
    pub fn profile_numbers(&self) -> Result<BTreeMap<u32, u32>, NvmlError> {
        let mut numbers = BTreeMap::new();
        for number in 0..sys::NVML_GPU_INSTANCE_PROFILE_COUNT {
            match self.call("nvmlDeviceGetGpuInstanceProfileInfo", |device| device.profile_info(number)) {
                Ok(info) => _ = numbers.insert(info.id, number),
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
    /// The code that NVML returned, or an unexpected value.
    pub fn uuid(&self) -> Result<MigUuid, NvmlError> {
        let call = "nvmlDeviceGetUUID";
        let uuid = self.0.call(call, |device| device.uuid())?;
        uuid.parse().map_err(|_| self.0.unexpected(call, uuid, "MIG device UUID"))
    }

    /// The name. It ends with the profile of the compute instance: `NVIDIA A100-SXM4-40GB MIG 3g.20gb`. The
    /// suffix of the GPU instance (`+me`) is not in it.
    pub fn name(&self) -> Result<String, NvmlError> {
        self.0.name()
    }

    /// Its GPU instance and compute instance.
    pub fn ids(&self) -> Result<MigIds, NvmlError> {
        // Raw: nvml-wrapper has neither.
        let nvml = self.0.nvml;
        Ok(MigIds {
            gpu_instance: self.0.get(symbol!(nvml, nvmlDeviceGetGpuInstanceId)?, 0)?,
            compute_instance: self.0.get(symbol!(nvml, nvmlDeviceGetComputeInstanceId)?, 0)?,
        })
    }

    /// Engines and memory.
    pub fn attributes(&self) -> Result<MigAttributes, NvmlError> {
        let attributes = self.0.call("nvmlDeviceGetAttributes_v2", |device| device.attributes())?;
        if attributes.memory_size_mb > MAX_MEMORY >> 20 {
            let returned = format!("{} MiB", attributes.memory_size_mb);
            return Err(self.0.unexpected(
                "nvmlDeviceGetAttributes_v2",
                returned,
                "at most 64 TiB of memory",
            ));
        }
        Ok(MigAttributes {
            multiprocessors: attributes.multiprocessor_count,
            gpu_slices: attributes.gpu_instance_slice_count,
            compute_slices: attributes.compute_instance_slice_count,
            copy_engines: attributes.shared_copy_engine_count,
            decoders: attributes.shared_decoder_count,
            encoders: attributes.shared_encoder_count,
            jpeg: attributes.shared_jpeg_count,
            ofa: attributes.shared_ofa_count,
            memory_mib: attributes.memory_size_mb,
        })
    }
}

/// Upper bound of MIG devices of one GPU.
const MAX_MIG_DEVICES: u32 = 64;
