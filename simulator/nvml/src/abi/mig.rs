//! MIG devices as clients read them: mode, handles, ids, attributes. What instances a GPU has stands in the machine file and
//! the control state; [`super::instances`] and [`super::compute`] make and destroy them.

use std::ffi::c_uint;

use gantry_topology::MigAttributes;
use nvml_wrapper_sys::bindings as sys;

use super::args::Out;
use super::call::{Call, MigTarget, Subject};
use super::handle::Device;
use super::status::Status;
use crate::control::MigChange;
use crate::facts;

impl MigTarget<'_> {
    /// What the device has. The machine file's word counts; what it leaves out is the product's.
    pub(super) fn attributes(self) -> MigAttributes {
        let facts = self.gpu.facts;
        let of_product = || {
            let profiles = facts.profiles.as_ref()?;
            facts::attributes(profiles, &facts.product, &self.instance.profile, &self.compute.profile)
        };
        self.compute.attributes.or_else(of_product).unwrap_or_default()
    }
}

/// The mode as NVML counts it.
fn mode(enabled: bool) -> c_uint {
    if enabled { sys::NVML_DEVICE_MIG_ENABLE } else { sys::NVML_DEVICE_MIG_DISABLE }
}

fn attributes(call: &Call, device: Device, out: Out<sys::nvmlDeviceAttributes_t>) -> Result<(), Status> {
    // The header: "currently only supports MIG device handles".
    let Subject::Mig(mig) = call.subject(device)? else {
        return Err(Status::NOT_SUPPORTED);
    };
    let has = mig.attributes();
    out.put(sys::nvmlDeviceAttributes_t {
        multiprocessorCount: has.multiprocessors,
        sharedCopyEngineCount: has.copy_engines,
        sharedDecoderCount: has.decoders,
        sharedEncoderCount: has.encoders,
        sharedJpegCount: has.jpeg,
        sharedOfaCount: has.ofa,
        gpuInstanceSliceCount: has.gpu_slices,
        computeInstanceSliceCount: has.compute_slices,
        memorySizeMB: has.memory_mib,
    })
}

nvml! {
    fn nvmlDeviceGetMigMode(device: Device, current: Out<c_uint>, pending: Out<c_uint>) |call| {
        let gpu = call.gpu(device)?;
        if gpu.facts.profiles.is_none() {
            return Err(Status::NOT_SUPPORTED);
        }
        pending.check()?;
        current.put(mode(gpu.mig_enabled()))?;
        pending.put(mode(gpu.mig_enabled()))
    }

    fn nvmlDeviceSetMigMode(device: Device, wanted: c_uint, activation: Out<sys::nvmlReturn_t>) |call| {
        let gpu = call.gpu(device)?;
        if gpu.facts.profiles.is_none() {
            return Err(Status::NOT_SUPPORTED);
        }
        activation.check()?;
        let enable = match wanted {
            sys::NVML_DEVICE_MIG_ENABLE => true,
            sys::NVML_DEVICE_MIG_DISABLE => false,
            _ => return Err(Status::INVALID_ARGUMENT),
        };
        call.change_mig(gpu, &MigChange::Mode(enable))?;
        activation.put(sys::nvmlReturn_enum_NVML_SUCCESS)
    }

    fn nvmlDeviceIsMigDeviceHandle(device: Device, is_mig: Out<c_uint>) |call| {
        is_mig.put(match call.subject(device)? {
            Subject::Gpu(_) => 0,
            Subject::Mig(_) => 1,
        })
    }

    fn nvmlDeviceGetMaxMigDeviceCount(device: Device, count: Out<c_uint>) |call| {
        // Zero where MIG is not enabled, the header says.
        let gpu = call.gpu(device)?;
        let most = gpu.facts.profiles.as_ref().map_or(0, |profiles| profiles.compute_slices());
        count.put(if gpu.mig_enabled() { c_uint::from(most) } else { 0 })
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Device, index: c_uint, mig: Out<Device>) |call| {
        let gpu = call.gpu(device)?;
        mig.check()?;
        let found = gpu.mig_devices().nth(index as usize).ok_or(Status::NOT_FOUND)?;
        mig.put(Device::mig(found.place()))
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig: Device, parent: Out<Device>) |call| {
        parent.put(Device::whole(call.mig(mig)?.gpu.facts.index))
    }

    fn nvmlDeviceGetGpuInstanceId(device: Device, id: Out<c_uint>) |call| {
        id.put(call.mig(device)?.instance.id)
    }

    fn nvmlDeviceGetComputeInstanceId(device: Device, id: Out<c_uint>) |call| {
        id.put(call.mig(device)?.compute.id)
    }

    fn nvmlDeviceGetAttributes(device: Device, out: Out<sys::nvmlDeviceAttributes_t>) |call| {
        attributes(call, device, out)
    }

    fn nvmlDeviceGetAttributes_v2(device: Device, out: Out<sys::nvmlDeviceAttributes_t>) |call| {
        attributes(call, device, out)
    }
}
