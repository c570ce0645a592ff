//! MIG: every GPU that could be cut has it disabled. Instances are not simulated yet; the functions about them answer that
//! they are not supported, as on a GPU whose MIG mode is off.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings as sys;

use super::args::Out;
use super::handle::Device;
use super::status::Status;

nvml! {
    fn nvmlDeviceGetMigMode(device: Device, current: Out<c_uint>, pending: Out<c_uint>) |call| {
        if !call.gpu(device)?.facts.product.mig {
            return Err(Status::NOT_SUPPORTED);
        }
        pending.check()?;
        current.put(sys::NVML_DEVICE_MIG_DISABLE)?;
        pending.put(sys::NVML_DEVICE_MIG_DISABLE)
    }

    fn nvmlDeviceIsMigDeviceHandle(device: Device, is_mig: Out<c_uint>) |call| {
        call.gpu(device)?;
        is_mig.put(0)
    }

    fn nvmlDeviceGetMaxMigDeviceCount(device: Device, count: Out<c_uint>) |call| {
        // Zero where MIG is not enabled, the header says.
        call.gpu(device)?;
        count.put(0)
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Device, _index: c_uint, mig: Out<Device>) |call| {
        call.gpu(device)?;
        mig.check()?;
        Err(Status::NOT_FOUND)
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig: Device, _parent: Out<Device>) |call| {
        call.gpu(mig)?;
        Err(Status::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetGpuInstanceId(device: Device, _id: Out<c_uint>) |call| {
        call.gpu(device)?;
        Err(Status::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetComputeInstanceId(device: Device, _id: Out<c_uint>) |call| {
        call.gpu(device)?;
        Err(Status::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetAttributes(device: Device, _attributes: Out<sys::nvmlDeviceAttributes_t>) |call| {
        // The header: "currently only supports MIG device handles".
        call.gpu(device)?;
        Err(Status::NOT_SUPPORTED)
    }

    fn nvmlDeviceGetAttributes_v2(device: Device, _attributes: Out<sys::nvmlDeviceAttributes_t>) |call| {
        call.gpu(device)?;
        Err(Status::NOT_SUPPORTED)
    }
}
