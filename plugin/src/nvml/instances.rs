//! Changes of a GPU's MIG layout: the mode, and GPU instances with their compute instances. Nothing is decided here.
//!
//! Raw throughout, except the mode: nvml-wrapper has no instances.

use std::ffi::c_uint;

use gantry_topology::machine::MAX_MEMORY_UNITS;
use gantry_topology::mig::{Engines, Profile};
use nvml_wrapper_sys::bindings as sys;

use super::device::{check, symbol, version};
use super::{Code, Device, NvmlError, Placement};

/// Upper bound of placements and instances of one profile.
const MAX_INSTANCES: usize = 64;

/// A GPU instance of a GPU.
#[derive(Clone, Copy)]
pub struct GpuInstance<'nvml> {
    device: Device<'nvml>,
    handle: sys::nvmlGpuInstance_t,
    /// The driver's id of it.
    pub id: u32,
    /// Id of its profile.
    pub profile: u32,
    pub placement: Placement,
}

/// A compute instance of a GPU instance.
#[derive(Clone, Copy)]
pub struct ComputeInstance<'nvml> {
    device: Device<'nvml>,
    handle: sys::nvmlComputeInstance_t,
    /// Compute slices.
    pub slices: u8,
}

/// A profile of compute instances in one GPU instance.
#[derive(Clone, Copy)]
struct ComputeProfile {
    id: c_uint,
    slices: u8,
    count: usize,
}

impl<'nvml> Device<'nvml> {
    /// Turns MIG mode on or off. False: the driver does so at the next reset of the GPU.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn set_mig_mode(&self, enable: bool) -> Result<bool, NvmlError> {
        // The activation status is a code of NVML: anything but success waits for a reset.
        let activation = self.call("nvmlDeviceSetMigMode", |device| device.set_mig_mode(enable))?;
        Ok(activation == sys::nvmlReturn_enum_NVML_SUCCESS)
    }

    /// The PCI device id with that of the vendor, such as `0x20B010DE`.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn pci_id(&self) -> Result<u32, NvmlError> {
        Ok(self.call("nvmlDeviceGetPciInfo_v3", |device| device.pci_info())?.pci_device_id)
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
        let (name, function) = symbol!(self.nvml, nvmlDeviceGetGpuInstanceProfileInfoV)?;
        // SAFETY: a struct of integers, for which all zeros is a value.
        let mut info: sys::nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
        info.version = version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2);
        {
            let _call = self.nvml.trace.begin(name, Some(self.index));
            // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the version set in it.
            check(name, Some(self.index), unsafe { function(self.handle, number, &raw mut info) })?;
        }
        let printed: Vec<u8> =
            info.name.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
        let printed = String::from_utf8_lossy(&printed);
        let placements = self.possible_placements(info.id)?;
        let small = |what, value: c_uint| {
            u8::try_from(value).map_err(|_| self.unexpected(name, format!("{value} {what}"), "at most 255"))
        };
        let size = placements.first().map_or(0, |placement| placement.size);
        let within = |placement: &Placement| {
            placement.size == size && size > 0 && placement.start + size <= u32::from(MAX_MEMORY_UNITS)
        };
        if !placements.iter().all(within) {
            let returned = format!("{placements:?} for profile {}", info.id);
            return Err(self.unexpected(
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
        let (name, function) = symbol!(self.nvml, nvmlDeviceGetGpuInstancePossiblePlacements_v2)?;
        let mut found = [sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 }; MAX_INSTANCES];
        let mut count = MAX_INSTANCES as c_uint;
        let _call = self.nvml.trace.begin(name, Some(self.index));
        // SAFETY: the handle came from the NVML that `self` borrows; `found` holds `count` entries.
        let code = unsafe { function(self.handle, profile, found.as_mut_ptr(), &raw mut count) };
        check(name, Some(self.index), code)?;
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
            let (name, function) = symbol!(self.nvml, nvmlDeviceGetGpuInstances)?;
            // As many as the driver reports as possible, and never less than it may write.
            let mut found = [std::ptr::null_mut(); 256];
            let mut count = c_uint::from(profile.max_instances);
            {
                let _call = self.nvml.trace.begin(name, Some(self.index));
                // SAFETY: the handle came from the NVML that `self` borrows; NVML writes at most the number of instances that the
                // profile allows, which is below 256.
                let code = unsafe { function(self.handle, profile.id, found.as_mut_ptr(), &raw mut count) };
                check(name, Some(self.index), code)?;
            }
            for handle in found.into_iter().take(count as usize) {
                instances.push(self.instance_of(handle)?);
            }
        }
        Ok(instances)
    }

    /// The GPU instance of a handle that NVML returned for this GPU.
    pub(super) fn instance_of(
        &self,
        handle: sys::nvmlGpuInstance_t,
    ) -> Result<GpuInstance<'nvml>, NvmlError> {
        let (name, function) = symbol!(self.nvml, nvmlGpuInstanceGetInfo)?;
        let mut info = sys::nvmlGpuInstanceInfo_t {
            device: std::ptr::null_mut(),
            id: 0,
            profileId: 0,
            placement: sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 },
        };
        let _call = self.nvml.trace.begin(name, Some(self.index));
        // SAFETY: the instance came from the NVML that `self` borrows; the out-pointer is a local of the declared type.
        check(name, Some(self.index), unsafe { function(handle, &raw mut info) })?;
        let placement = Placement { start: info.placement.start, size: info.placement.size };
        Ok(GpuInstance { device: *self, handle, id: info.id, profile: info.profileId, placement })
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
        let (name, function) = symbol!(self.nvml, nvmlDeviceCreateGpuInstanceWithPlacement)?;
        let at = sys::nvmlGpuInstancePlacement_t { start: placement.start, size: placement.size };
        let mut handle = std::ptr::null_mut();
        {
            let _call = self.nvml.trace.begin(name, Some(self.index));
            // SAFETY: the handle came from the NVML that `self` borrows; both pointers are to locals of the declared types.
            let code = unsafe { function(self.handle, profile, &raw const at, &raw mut handle) };
            check(name, Some(self.index), code)?;
        }
        self.instance_of(handle)
    }
}

impl<'nvml> GpuInstance<'nvml> {
    /// Its compute instances.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn compute_instances(&self) -> Result<Vec<ComputeInstance<'nvml>>, NvmlError> {
        let mut instances = Vec::new();
        for profile in self.compute_profiles()? {
            let (name, function) = symbol!(self.device.nvml, nvmlGpuInstanceGetComputeInstances)?;
            let mut found = [std::ptr::null_mut(); MAX_INSTANCES];
            let mut count = profile.count.min(MAX_INSTANCES) as c_uint;
            let _call = self.device.nvml.trace.begin(name, Some(self.device.index));
            // SAFETY: the instance came from the NVML that its device borrows; NVML writes at most the number of instances that
            // the profile allows, which is checked to be at most 64.
            let code = unsafe { function(self.handle, profile.id, found.as_mut_ptr(), &raw mut count) };
            check(name, Some(self.device.index), code)?;
            let found = found.into_iter().take(count as usize);
            instances.extend(found.map(|handle| ComputeInstance {
                device: self.device,
                handle,
                slices: profile.slices,
            }));
        }
        Ok(instances)
    }

    fn compute_profiles(&self) -> Result<Vec<ComputeProfile>, NvmlError> {
        let (name, function) = symbol!(self.device.nvml, nvmlGpuInstanceGetComputeInstanceProfileInfo)?;
        let mut profiles = Vec::new();
        for number in 0..sys::NVML_COMPUTE_INSTANCE_PROFILE_COUNT {
            // SAFETY: a struct of integers, for which all zeros is a value.
            let mut info: sys::nvmlComputeInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
            let _call = self.device.nvml.trace.begin(name, Some(self.device.index));
            let engines = sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;
            // SAFETY: the instance came from the NVML that its device borrows; the out-pointer is a local of the declared type.
            let code = unsafe { function(self.handle, number, engines, &raw mut info) };
            match check(name, Some(self.device.index), code) {
                Ok(()) => {}
                Err(error) if is_no_profile(&error) => continue,
                Err(error) => return Err(error),
            }
            let (count, slices) = (info.instanceCount as usize, u8::try_from(info.sliceCount).ok());
            let Some(slices) = slices.filter(|_| count <= MAX_INSTANCES) else {
                let returned = format!("{count} instances of {} slices", info.sliceCount);
                return Err(self.device.unexpected(name, returned, "at most 64 instances of 255 slices"));
            };
            profiles.push(ComputeProfile { id: info.id, slices, count });
        }
        Ok(profiles)
    }

    /// Creates a compute instance of so many slices, where the driver finds a place.
    ///
    /// # Errors
    /// The code that NVML returned: `InsufficientResources` without a place, `NotSupported` without such a profile.
    pub fn create_compute_instance(&self, slices: u8) -> Result<(), NvmlError> {
        let (name, function) = symbol!(self.device.nvml, nvmlGpuInstanceCreateComputeInstance)?;
        let profiles = self.compute_profiles()?;
        let gpu = Some(self.device.index);
        let profile = profiles.iter().find(|profile| profile.slices == slices);
        let profile = profile.ok_or(NvmlError::Call { call: name, gpu, code: Code::NotSupported })?;
        let mut made = std::ptr::null_mut();
        let _call = self.device.nvml.trace.begin(name, gpu);
        // SAFETY: the instance came from the NVML that its device borrows; the out-pointer is a local of the declared type.
        check(name, gpu, unsafe { function(self.handle, profile.id, &raw mut made) })
    }

    /// Destroys the instance, which must have no compute instance.
    ///
    /// # Errors
    /// The code that NVML returned: `InUse` if it has one.
    pub fn destroy(self) -> Result<(), NvmlError> {
        let (name, function) = symbol!(self.device.nvml, nvmlGpuInstanceDestroy)?;
        let _call = self.device.nvml.trace.begin(name, Some(self.device.index));
        // SAFETY: the instance came from the NVML that its device borrows; the handle is not used afterwards.
        check(name, Some(self.device.index), unsafe { function(self.handle) })
    }
}

impl ComputeInstance<'_> {
    /// Destroys the instance.
    ///
    /// # Errors
    /// The code that NVML returned: `InUse` if a process runs in it.
    pub fn destroy(self) -> Result<(), NvmlError> {
        let (name, function) = symbol!(self.device.nvml, nvmlComputeInstanceDestroy)?;
        let _call = self.device.nvml.trace.begin(name, Some(self.device.index));
        // SAFETY: the instance came from the NVML that its device borrows; the handle is not used afterwards.
        check(name, Some(self.device.index), unsafe { function(self.handle) })
    }
}

/// Whether the product or the driver lacks the profile.
fn is_no_profile(error: &NvmlError) -> bool {
    matches!(error.code(), Some(Code::NotSupported | Code::InvalidArgument | Code::NotFound))
}
