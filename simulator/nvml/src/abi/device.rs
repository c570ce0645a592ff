//! Which GPUs there are, and which each one is: handles, identity, product.

use std::ffi::{c_char, c_int, c_uint};

use gantry_topology::machine::split_profile;
use nvml_wrapper_sys::bindings as sys;

use super::args::{In, Out};
use super::call::{Call, MigTarget, Subject, Target};
use super::handle::Device;
use super::status::Status;
use crate::facts::{Address, GpuFacts};

/// The handle of the first GPU that `wanted` holds for.
fn find(call: &Call, device: Out<Device>, wanted: impl Fn(&GpuFacts) -> bool) -> Result<(), Status> {
    device.check()?;
    let mut present = call.session.present.iter().copied();
    let found = present.find(|index| call.facts().gpus.get(*index).is_some_and(&wanted));
    alive(call, found.ok_or(Status::NOT_FOUND)?, device)
}

fn by_index(call: &Call, index: usize, device: Out<Device>) -> Result<(), Status> {
    device.check()?;
    let found = call.session.present.get(index).ok_or(Status::INVALID_ARGUMENT)?;
    alive(call, *found, device)
}

/// The handle of a GPU that is not lost.
fn alive(call: &Call, index: usize, device: Out<Device>) -> Result<(), Status> {
    let _alive: Target<'_> = call.gpu_at(index).ok_or(Status::INVALID_ARGUMENT)??;
    device.put(Device::whole(index))
}

/// The GPU or MIG device of a UUID, distinguished by its first letters.
fn by_uuid(call: &Call, uuid: &str, device: Out<Device>) -> Result<(), Status> {
    if !uuid.starts_with("MIG-") {
        return find(call, device, |gpu| gpu.uuid.eq_ignore_ascii_case(uuid));
    }
    device.check()?;
    let gpus = (0..call.facts().gpus.len()).filter_map(|index| call.gpu_at(index));
    // A lost GPU does not answer for its instances.
    let found = gpus
        .flatten()
        .flat_map(Target::mig_devices)
        .find(|mig| mig.compute.uuid.as_str().eq_ignore_ascii_case(uuid));
    device.put(Device::mig(found.ok_or(Status::NOT_FOUND)?.place()))
}

fn by_address(call: &Call, text: In<c_char>, device: Out<Device>) -> Result<(), Status> {
    let address = Address::parse(&text.text()?).ok_or(Status::INVALID_ARGUMENT)?;
    find(call, device, |gpu| gpu.address.same_slot(address))
}

fn count(call: &Call, count: Out<c_uint>) -> Result<(), Status> {
    count.put(c_uint::try_from(call.session.present.len()).unwrap_or(c_uint::MAX))
}

/// The sixteen bytes of a UUID, dashes and prefix left out.
fn uuid_bytes(uuid: &str) -> Option<[u8; 16]> {
    let digits: Vec<u32> = uuid
        .strip_prefix("GPU-")?
        .chars()
        .filter(|c| *c != '-')
        .map(|c| c.to_digit(16))
        .collect::<Option<_>>()?;
    let bytes = digits.chunks(2).map(|pair| match *pair {
        [high, low] => u8::try_from(high << 4 | low).ok(),
        _ => None,
    });
    bytes.collect::<Option<Vec<u8>>>()?.try_into().ok()
}

nvml! {
    fn nvmlDeviceGetCount(out: Out<c_uint>) |call| { count(call, out) }

    fn nvmlDeviceGetCount_v2(out: Out<c_uint>) |call| { count(call, out) }

    fn nvmlDeviceGetHandleByIndex(index: c_uint, device: Out<Device>) |call| {
        by_index(call, index as usize, device)
    }

    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<Device>) |call| {
        by_index(call, index as usize, device)
    }

    fn nvmlDeviceGetHandleByUUID(uuid: In<c_char>, device: Out<Device>) |call| {
        let uuid = uuid.text()?;
        if !uuid.starts_with("GPU-") && !uuid.starts_with("MIG-") {
            return Err(Status::INVALID_ARGUMENT);
        }
        by_uuid(call, &uuid, device)
    }

    fn nvmlDeviceGetHandleByUUIDV(uuid: Out<sys::nvmlUUID_t>, device: Out<Device>) |call| {
        uuid.check_version(1)?;
        let uuid = uuid.get()?;
        match uuid.type_ {
            sys::nvmlUUIDType_t_NVML_UUID_TYPE_ASCII => {
                // SAFETY: the type word says which member of the union the caller has filled; both are bytes.
                let bytes = unsafe { uuid.value.str_ };
                let text: String = bytes.iter().map(|c| *c as u8).take_while(|c| *c != 0).map(char::from).collect();
                by_uuid(call, &text, device)
            }
            sys::nvmlUUIDType_t_NVML_UUID_TYPE_BINARY => {
                // SAFETY: as above.
                let bytes = unsafe { uuid.value.bytes };
                find(call, device, |gpu| uuid_bytes(&gpu.uuid) == Some(bytes))
            }
            _ => Err(Status::INVALID_ARGUMENT),
        }
    }

    fn nvmlDeviceGetHandleBySerial(serial: In<c_char>, device: Out<Device>) |call| {
        let serial = serial.text()?;
        find(call, device, |gpu| gpu.serial == serial)
    }

    fn nvmlDeviceGetHandleByPciBusId(address: In<c_char>, device: Out<Device>) |call| {
        by_address(call, address, device)
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(address: In<c_char>, device: Out<Device>) |call| {
        by_address(call, address, device)
    }

    fn nvmlDeviceGetName(device: Device, name: Out<c_char>, length: c_uint) |call| {
        match call.subject(device)? {
            Subject::Gpu(gpu) => name.put_text(length, &gpu.facts.model),
            // Named after the compute instance, without the `+me` of its GPU instance.
            Subject::Mig(mig) => {
                let (profile, _) = split_profile(&mig.compute.profile);
                name.put_text(length, &format!("{} MIG {profile}", mig.gpu.facts.model))
            }
        }
    }

    fn nvmlDeviceGetUUID(device: Device, uuid: Out<c_char>, length: c_uint) |call| {
        match call.subject(device)? {
            Subject::Gpu(gpu) => uuid.put_text(length, &gpu.facts.uuid),
            Subject::Mig(mig) => uuid.put_text(length, mig.compute.uuid.as_str()),
        }
    }

    fn nvmlDeviceGetIndex(device: Device, index: Out<c_uint>) |call| {
        match call.subject(device)? {
            Subject::Gpu(gpu) => {
                let position = call.session.present.iter().position(|present| *present == gpu.facts.index);
                index.put(position.and_then(|position| c_uint::try_from(position).ok()).ok_or(Status::UNKNOWN)?)
            }
            Subject::Mig(mig) => {
                let own = mig.place();
                let position = mig.gpu.mig_devices().position(|other| other.place() == own);
                index.put(position.and_then(|position| c_uint::try_from(position).ok()).ok_or(Status::UNKNOWN)?)
            }
        }
    }

    fn nvmlDeviceGetMinorNumber(device: Device, minor: Out<c_uint>) |call| {
        // A MIG device has no node of its own: it is reached through its GPU's.
        let (Subject::Gpu(gpu) | Subject::Mig(MigTarget { gpu, .. })) = call.subject(device)?;
        minor.put(gpu.facts.minor)
    }

    fn nvmlDeviceGetSerial(device: Device, serial: Out<c_char>, length: c_uint) |call| {
        serial.put_text(length, &call.gpu(device)?.facts.serial)
    }

    fn nvmlDeviceGetBrand(device: Device, brand: Out<sys::nvmlBrandType_t>) |call| {
        brand.put(call.gpu(device)?.facts.product.brand)
    }

    fn nvmlDeviceGetArchitecture(device: Device, architecture: Out<sys::nvmlDeviceArchitecture_t>) |call| {
        architecture.put(call.gpu(device)?.facts.product.architecture)
    }

    fn nvmlDeviceGetCudaComputeCapability(device: Device, major: Out<c_int>, minor: Out<c_int>) |call| {
        let (known_major, known_minor) = call.gpu(device)?.facts.compute_capability;
        minor.check()?;
        major.put(c_int::from(known_major))?;
        minor.put(c_int::from(known_minor))
    }

    fn nvmlDeviceGetModuleId(device: Device, module: Out<c_uint>) |call| {
        let gpu = call.gpu(device)?;
        // Modules on a baseboard count from 1; a card in a slot is no module.
        let on_baseboard = gpu.facts.model.contains("SXM") || call.facts().switches.len() > 1;
        module.put(if on_baseboard { c_uint::from(gpu.key()) + 1 } else { 0 })
    }

    fn nvmlDeviceGetBoardId(device: Device, board: Out<c_uint>) |call| {
        let address = call.gpu(device)?.facts.address;
        board.put(address.domain << 16 | c_uint::from(address.bus) << 8)
    }

    fn nvmlDeviceGetMultiGpuBoard(device: Device, multi: Out<c_uint>) |call| {
        call.gpu(device)?;
        multi.put(0)
    }

    fn nvmlDeviceOnSameBoard(first: Device, second: Device, same: Out<c_int>) |call| {
        let (first, second) = (call.gpu(first)?, call.gpu(second)?);
        same.put(c_int::from(first.key() == second.key()))
    }

    fn nvmlDeviceGetBoardPartNumber(device: Device, part: Out<c_char>, length: c_uint) |call| {
        part.put_text(length, &format!("900-2{:04X}-0000-000", call.gpu(device)?.facts.product.device_id))
    }

    fn nvmlDeviceGetVbiosVersion(device: Device, version: Out<c_char>, length: c_uint) |call| {
        version.put_text(length, &format!("90.02.{:02X}.00.00", call.gpu(device)?.facts.product.architecture))
    }

    fn nvmlDeviceGetNumGpuCores(device: Device, cores: Out<c_uint>) |call| {
        cores.put(call.gpu(device)?.facts.product.cores.1)
    }

    fn nvmlDeviceGetMemoryBusWidth(device: Device, width: Out<c_uint>) |call| {
        width.put(call.gpu(device)?.facts.product.memory_bus)
    }

    fn nvmlDeviceGetDisplayMode(device: Device, mode: Out<sys::nvmlEnableState_t>) |call| {
        call.gpu(device)?;
        mode.put(sys::nvmlEnableState_enum_NVML_FEATURE_DISABLED)
    }

    fn nvmlDeviceGetDisplayActive(device: Device, active: Out<sys::nvmlEnableState_t>) |call| {
        call.gpu(device)?;
        active.put(sys::nvmlEnableState_enum_NVML_FEATURE_DISABLED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_has_sixteen_bytes() {
        let bytes = uuid_bytes("GPU-00112233-4455-6677-8899-aabbccddeeff").unwrap();
        assert_eq!((bytes[0], bytes[1], bytes[15]), (0x00, 0x11, 0xff));
        assert_eq!(uuid_bytes("GPU-123"), None);
        assert_eq!(uuid_bytes("MIG-00112233-4455-6677-8899-aabbccddeeff"), None);
    }
}
