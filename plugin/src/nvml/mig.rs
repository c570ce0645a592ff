//! MIG mode, GPU instances and MIG devices of a GPU, as NVML returns and changes them. Discovery works out profile names
//! and placements that NVML does not return; nothing is decided here.

use std::collections::BTreeMap;
use std::ffi::c_uint;

use gantry_topology::machine::MAX_MEMORY_UNITS;
use gantry_topology::mig::{Engines, Profile};
use gantry_topology::{MigAttributes, MigUuid};
use nvml_wrapper_sys::bindings as sys;

use super::device::{MAX_MEMORY, check, symbol, version};
use super::instances::{MAX_INSTANCES, is_no_profile};
use super::{Device, GpuInstance, NvmlError};

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

/// The MIG layout of one GPU.
#[derive(Clone, Copy)]
pub struct MigControl<'nvml>(pub(super) Device<'nvml>);

impl<'nvml> MigControl<'nvml> {
    /// MIG mode. GPUs without MIG return `NotSupported`.
    pub fn mode(&self) -> Result<MigMode, NvmlError> {
        let mode = self.0.call("nvmlDeviceGetMigMode", |device| device.mig_mode())?;
        Ok(MigMode {
            current: mode.current == sys::NVML_DEVICE_MIG_ENABLE,
            pending: mode.pending == sys::NVML_DEVICE_MIG_ENABLE,
        })
    }

    /// The MIG devices, in NVML's order. Empty indices are skipped.
    pub fn devices(&self) -> Result<Vec<MigDevice<'nvml>>, NvmlError> {
        // The most that there can be, in spite of the name.
        let count = self.0.call("nvmlDeviceGetMaxMigDeviceCount", |device| device.mig_device_count())?;
        let mut devices = Vec::new();
        // Bounds the loop: no GPU has more MIG devices.
        for index in 0..count.min(MAX_MIG_DEVICES) {
            match self
                .0
                .call("nvmlDeviceGetMigDeviceHandleByIndex", |device| device.mig_device_by_index(index))
            {
                Ok(device) => devices.push(MigDevice(Device {
                    // SAFETY: the handle stays with the NVML that `self` borrows, from which it came.
                    handle: unsafe { device.handle() },
                    ..self.0
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
        let (name, function) = symbol!(self.0.nvml, nvmlDeviceGetGpuInstanceById)?;
        let mut handle = std::ptr::null_mut();
        {
            let _call = self.0.nvml.trace.begin(name, Some(self.0.index));
            // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the declared type.
            check(name, Some(self.0.index), unsafe { function(self.0.handle, id, &raw mut handle) })?;
        }
        let instance = GpuInstance::of_handle(self.0, handle)?;
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
            match self.0.call("nvmlDeviceGetGpuInstanceProfileInfo", |device| device.profile_info(number)) {
                Ok(info) => _ = numbers.insert(info.id, number),
                Err(error) if error.is_gpu_lost() || error.is_driver_gone() => return Err(error),
                Err(_) => {}
            }
        }
        Ok(numbers)
    }

    /// Turns MIG mode on or off. False: the driver does so at the next reset of the GPU.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn set_mode(&self, enable: bool) -> Result<bool, NvmlError> {
        // The activation status is a code of NVML: anything but success waits for a reset.
        let activation = self.0.call("nvmlDeviceSetMigMode", |device| device.set_mig_mode(enable))?;
        Ok(activation == sys::nvmlReturn_enum_NVML_SUCCESS)
    }

    /// The GPU instance profiles that the driver offers, with their placements. MIG mode must be on.
    ///
    /// # Errors
    /// The code that NVML returned, or an unexpected value.
    pub fn instance_profiles(&self) -> Result<Vec<Profile>, NvmlError> {
        let mut profiles = Vec::new();
        for number in 0..sys::NVML_GPU_INSTANCE_PROFILE_COUNT {
            match self.instance_profile(number) {
                Ok(profile) => profiles.push(profile),
                // The product or the driver does not have the profile.
                Err(error) if is_no_profile(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(profiles)
    }

    fn instance_profile(&self, number: c_uint) -> Result<Profile, NvmlError> {
        let (name, function) = symbol!(self.0.nvml, nvmlDeviceGetGpuInstanceProfileInfoV)?;
        // SAFETY: a struct of integers, for which all zeros is a value.
        let mut info: sys::nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
        info.version = version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2);
        {
            let _call = self.0.nvml.trace.begin(name, Some(self.0.index));
            // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the version set in it.
            check(name, Some(self.0.index), unsafe { function(self.0.handle, number, &raw mut info) })?;
        }
        let printed: Vec<u8> =
            info.name.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
        let printed = String::from_utf8_lossy(&printed);
        let placements = self.possible_placements(info.id)?;
        let small = |what, value: c_uint| {
            u8::try_from(value).map_err(|_| self.0.unexpected(name, format!("{value} {what}"), "at most 255"))
        };
        let size = placements.first().map_or(0, |placement| placement.size);
        let within = |placement: &Placement| {
            placement.size == size && size > 0 && placement.start + size <= u32::from(MAX_MEMORY_UNITS)
        };
        if !placements.iter().all(within) {
            let returned = format!("{placements:?} for profile {}", info.id);
            return Err(self.0.unexpected(
                "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
                returned,
                "placements of one size on the GPU",
            ));
        }
        Ok(Profile {
            name: printed.strip_prefix("MIG ").unwrap_or(&printed).to_owned(),
            id: info.id,
            nvml: number,
            compute: small("compute slices", info.sliceCount)?,
            size: small("memory units", size)?,
            memory_mib: info.memorySizeMB,
            multiprocessors: Some(info.multiprocessorCount),
            engines: Engines {
                copy: info.copyEngineCount,
                decoders: info.decoderCount,
                encoders: info.encoderCount,
                jpeg: info.jpegCount,
                ofa: info.ofaCount,
            },
            max_instances: small("instances", info.instanceCount)?,
            starts: placements.iter().filter_map(|placement| u8::try_from(placement.start).ok()).collect(),
        })
    }

    /// The places at which instances of a profile may lie, whatever is taken.
    fn possible_placements(&self, profile: u32) -> Result<Vec<Placement>, NvmlError> {
        let (name, function) = symbol!(self.0.nvml, nvmlDeviceGetGpuInstancePossiblePlacements_v2)?;
        let mut found = [sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 }; MAX_INSTANCES];
        let mut count = MAX_INSTANCES as c_uint;
        let _call = self.0.nvml.trace.begin(name, Some(self.0.index));
        // SAFETY: the handle came from the NVML that `self` borrows; `found` holds `count` entries.
        let code = unsafe { function(self.0.handle, profile, found.as_mut_ptr(), &raw mut count) };
        check(name, Some(self.0.index), code)?;
        let found = found.iter().take(count as usize);
        Ok(found.map(|found| Placement { start: found.start, size: found.size }).collect())
    }

    /// The GPU instances of these profiles, those without compute instances too.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn gpu_instances(&self, profiles: &[Profile]) -> Result<Vec<GpuInstance<'nvml>>, NvmlError> {
        let mut instances = Vec::new();
        for profile in profiles {
            let (name, function) = symbol!(self.0.nvml, nvmlDeviceGetGpuInstances)?;
            // As many as the driver reports as possible, and never less than it may write.
            let mut found = [std::ptr::null_mut(); 256];
            let mut count = c_uint::from(profile.max_instances);
            {
                let _call = self.0.nvml.trace.begin(name, Some(self.0.index));
                // SAFETY: the handle came from the NVML that `self` borrows; NVML writes at most the number of instances that the
                // profile allows, which is below 256.
                let code = unsafe { function(self.0.handle, profile.id, found.as_mut_ptr(), &raw mut count) };
                check(name, Some(self.0.index), code)?;
            }
            for handle in found.into_iter().take(count as usize) {
                instances.push(GpuInstance::of_handle(self.0, handle)?);
            }
        }
        Ok(instances)
    }

    /// Creates a GPU instance without compute instances.
    ///
    /// # Errors
    /// The code that NVML returned: `InsufficientResources` if the place is taken.
    pub fn create_gpu_instance(
        &self,
        profile: u32,
        placement: Placement,
    ) -> Result<GpuInstance<'nvml>, NvmlError> {
        let (name, function) = symbol!(self.0.nvml, nvmlDeviceCreateGpuInstanceWithPlacement)?;
        let at = sys::nvmlGpuInstancePlacement_t { start: placement.start, size: placement.size };
        let mut handle = std::ptr::null_mut();
        {
            let _call = self.0.nvml.trace.begin(name, Some(self.0.index));
            // SAFETY: the handle came from the NVML that `self` borrows; both pointers are to locals of the declared types.
            let code = unsafe { function(self.0.handle, profile, &raw const at, &raw mut handle) };
            check(name, Some(self.0.index), code)?;
        }
        GpuInstance::of_handle(self.0, handle)
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
