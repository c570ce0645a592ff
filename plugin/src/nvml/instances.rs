//! GPU instances and their compute instances. Raw throughout: nvml-wrapper has no instances.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings as sys;

use super::device::{check, symbol};
use super::{Code, Device, NvmlError, Placement};

/// Upper bound of placements and instances of one profile.
pub(super) const MAX_INSTANCES: usize = 64;

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

impl<'nvml> GpuInstance<'nvml> {
    /// The GPU instance of a handle that NVML returned for the GPU.
    pub(super) fn of_handle(
        device: Device<'nvml>,
        handle: sys::nvmlGpuInstance_t,
    ) -> Result<Self, NvmlError> {
        let (name, function) = symbol!(device.nvml, nvmlGpuInstanceGetInfo)?;
        let mut info = sys::nvmlGpuInstanceInfo_t {
            device: std::ptr::null_mut(),
            id: 0,
            profileId: 0,
            placement: sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 },
        };
        let _call = device.nvml.trace.begin(name, Some(device.index));
        // SAFETY: the instance came from the NVML that `device` borrows; the out-pointer is a local of the declared type.
        check(name, Some(device.index), unsafe { function(handle, &raw mut info) })?;
        let placement = Placement { start: info.placement.start, size: info.placement.size };
        Ok(Self { device, handle, id: info.id, profile: info.profileId, placement })
    }

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
pub(super) fn is_no_profile(error: &NvmlError) -> bool {
    matches!(error.code(), Some(Code::NotSupported | Code::InvalidArgument | Code::NotFound))
}
