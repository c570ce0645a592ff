//! Which GPUs and MIG devices there are, and which each one is: handles, identity, product, MIG mode. The MIG layout of a
//! GPU is in the machine file and the control state; [`super::instances`] and [`super::compute`] change it.

use std::ffi::{c_char, c_int, c_uint};

use gantry_topology::MigAttributes;
use gantry_topology::machine::split_profile;
use nvml_wrapper_sys::bindings as sys;

use super::args::{In, OutPointer, Status};
use super::call::{Call, MigTarget, Subject, Target};
use super::handle::Device;
use crate::control::MigChange;
use crate::facts::{self, Address, GpuFacts};

/// The handle of the first GPU that `wanted` holds for.
fn find(call: &Call, device: OutPointer<Device>, wanted: impl Fn(&GpuFacts) -> bool) -> Result<(), Status> {
    device.check()?;
    let mut present = call.session.present.iter().copied();
    let found = present.find(|index| call.facts().gpus.get(*index).is_some_and(&wanted));
    alive(call, found.ok_or(Status::NOT_FOUND)?, device)
}

fn by_index(call: &Call, index: usize, device: OutPointer<Device>) -> Result<(), Status> {
    device.check()?;
    let found = call.session.present.get(index).ok_or(Status::INVALID_ARGUMENT)?;
    alive(call, *found, device)
}

/// The handle of a GPU that is not lost.
fn alive(call: &Call, index: usize, device: OutPointer<Device>) -> Result<(), Status> {
    call.obey(index)?;
    let _alive: Target<'_> = call.gpu_at(index).ok_or(Status::INVALID_ARGUMENT)??;
    device.put(Device::whole(index))
}

/// The GPU or MIG device of a UUID, distinguished by its first letters.
fn by_uuid(call: &Call, uuid: &str, device: OutPointer<Device>) -> Result<(), Status> {
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

fn by_address(call: &Call, text: In<c_char>, device: OutPointer<Device>) -> Result<(), Status> {
    let address = Address::parse(&text.text()?).ok_or(Status::INVALID_ARGUMENT)?;
    find(call, device, |gpu| gpu.address.same_slot(address))
}

fn count(call: &Call, count: OutPointer<c_uint>) -> Result<(), Status> {
    let present = c_uint::try_from(call.session.present.len()).unwrap_or(c_uint::MAX);
    count.put(call.state.driver.count.unwrap_or(present))
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

nvml_get! {
    nvmlDeviceGetBrand: sys::nvmlBrandType_t = |gpu| gpu.facts.product.brand;
    nvmlDeviceGetArchitecture: sys::nvmlDeviceArchitecture_t = |gpu| gpu.facts.product.architecture;
    nvmlDeviceGetMultiGpuBoard: c_uint = |_| 0;
    nvmlDeviceGetNumGpuCores: c_uint = |gpu| gpu.facts.product.cores.1;
    nvmlDeviceGetMemoryBusWidth: c_uint = |gpu| gpu.facts.product.memory_bus;
    nvmlDeviceGetDisplayMode: sys::nvmlEnableState_t = |_| sys::nvmlEnableState_enum_NVML_FEATURE_DISABLED;
    nvmlDeviceGetDisplayActive: sys::nvmlEnableState_t = |_| sys::nvmlEnableState_enum_NVML_FEATURE_DISABLED;
}

nvml! {
    fn nvmlDeviceGetCount | nvmlDeviceGetCount_v2(out: OutPointer<c_uint>) |call| { count(call, out) }

    fn nvmlDeviceGetHandleByIndex | nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: OutPointer<Device>) |call| {
        by_index(call, index as usize, device)
    }

    fn nvmlDeviceGetHandleByUUID(uuid: In<c_char>, device: OutPointer<Device>) |call| {
        let uuid = uuid.text()?;
        if !uuid.starts_with("GPU-") && !uuid.starts_with("MIG-") {
            return Err(Status::INVALID_ARGUMENT);
        }
        by_uuid(call, &uuid, device)
    }

    fn nvmlDeviceGetHandleByUUIDV(uuid: OutPointer<sys::nvmlUUID_t>, device: OutPointer<Device>) |call| {
        uuid.check_version(1)?;
        let uuid = uuid.get()?;
        match uuid.type_ {
            sys::nvmlUUIDType_t_NVML_UUID_TYPE_ASCII => {
                // SAFETY: the type word states which member of the union the caller has filled; both are bytes.
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

    fn nvmlDeviceGetHandleBySerial(serial: In<c_char>, device: OutPointer<Device>) |call| {
        let serial = serial.text()?;
        find(call, device, |gpu| gpu.serial == serial)
    }

    fn nvmlDeviceGetHandleByPciBusId
    | nvmlDeviceGetHandleByPciBusId_v2(address: In<c_char>, device: OutPointer<Device>) |call| {
        by_address(call, address, device)
    }

    fn nvmlDeviceGetName(device: Device, name: OutPointer<c_char>, length: c_uint) |call| {
        match call.subject(device)? {
            Subject::Gpu(gpu) => {
                let reported = gpu.reported(|facts| facts.name.as_deref());
                name.put_text(length, reported.unwrap_or(&gpu.facts.model))
            }
            // Named after the compute instance, without the `+me` of its GPU instance.
            Subject::Mig(mig) => {
                let (profile, _) = split_profile(&mig.compute.profile);
                name.put_text(length, &format!("{} MIG {profile}", mig.gpu.facts.model))
            }
        }
    }

    fn nvmlDeviceGetUUID(device: Device, uuid: OutPointer<c_char>, length: c_uint) |call| {
        match call.subject(device)? {
            Subject::Gpu(gpu) => {
                let reported = gpu.reported(|facts| facts.uuid.as_deref());
                uuid.put_text(length, reported.unwrap_or(&gpu.facts.uuid))
            }
            Subject::Mig(mig) => uuid.put_text(length, mig.compute.uuid.as_str()),
        }
    }

    fn nvmlDeviceGetIndex(device: Device, index: OutPointer<c_uint>) |call| {
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

    fn nvmlDeviceGetMinorNumber(device: Device, minor: OutPointer<c_uint>) |call| {
        // A MIG device has no node of its own: it is reached through its GPU's.
        let (Subject::Gpu(gpu) | Subject::Mig(MigTarget { gpu, .. })) = call.subject(device)?;
        minor.put(gpu.reported(|facts| facts.minor).unwrap_or(gpu.facts.minor))
    }

    fn nvmlDeviceGetSerial(device: Device, serial: OutPointer<c_char>, length: c_uint) |call| {
        serial.put_text(length, &call.gpu(device)?.facts.serial)
    }

    fn nvmlDeviceGetCudaComputeCapability(device: Device, major: OutPointer<c_int>, minor: OutPointer<c_int>) |call| {
        let (known_major, known_minor) = call.gpu(device)?.facts.compute_capability;
        minor.check()?;
        major.put(c_int::from(known_major))?;
        minor.put(c_int::from(known_minor))
    }

    fn nvmlDeviceGetModuleId(device: Device, module: OutPointer<c_uint>) |call| {
        let gpu = call.gpu(device)?;
        // Modules on a baseboard count from 1; a card in a slot is no module.
        let on_baseboard = gpu.facts.model.contains("SXM") || call.facts().switches.len() > 1;
        module.put(if on_baseboard { c_uint::from(gpu.key()) + 1 } else { 0 })
    }

    fn nvmlDeviceGetBoardId(device: Device, board: OutPointer<c_uint>) |call| {
        let address = call.gpu(device)?.facts.address;
        board.put(address.domain << 16 | c_uint::from(address.bus) << 8)
    }

    fn nvmlDeviceOnSameBoard(first: Device, second: Device, same: OutPointer<c_int>) |call| {
        let (first, second) = (call.gpu(first)?, call.gpu(second)?);
        same.put(c_int::from(first.key() == second.key()))
    }

    fn nvmlDeviceGetBoardPartNumber(device: Device, part: OutPointer<c_char>, length: c_uint) |call| {
        part.put_text(length, &format!("900-2{:04X}-0000-000", call.gpu(device)?.facts.product.device_id))
    }

    fn nvmlDeviceGetVbiosVersion(device: Device, version: OutPointer<c_char>, length: c_uint) |call| {
        version.put_text(length, &format!("90.02.{:02X}.00.00", call.gpu(device)?.facts.product.architecture))
    }
}

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

fn attributes(
    call: &Call,
    device: Device,
    out: OutPointer<sys::nvmlDeviceAttributes_t>,
) -> Result<(), Status> {
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
    fn nvmlDeviceGetMigMode(device: Device, current: OutPointer<c_uint>, pending: OutPointer<c_uint>) |call| {
        let gpu = call.gpu(device)?;
        if gpu.facts.profiles.is_none() {
            return Err(Status::NOT_SUPPORTED);
        }
        pending.check()?;
        current.put(mode(gpu.mig_enabled()))?;
        pending.put(mode(gpu.mig_enabled_after_reset()))
    }

    fn nvmlDeviceSetMigMode(device: Device, wanted: c_uint, activation: OutPointer<sys::nvmlReturn_t>) |call| {
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
        let applied = call.change_mig(gpu, &MigChange::Mode(enable))?;
        activation.put(match applied.mig.enabled == enable {
            true => sys::nvmlReturn_enum_NVML_SUCCESS,
            false => sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED,
        })
    }

    fn nvmlDeviceIsMigDeviceHandle(device: Device, is_mig: OutPointer<c_uint>) |call| {
        is_mig.put(match call.subject(device)? {
            Subject::Gpu(_) => 0,
            Subject::Mig(_) => 1,
        })
    }

    fn nvmlDeviceGetMaxMigDeviceCount(device: Device, count: OutPointer<c_uint>) |call| {
        // Zero where MIG is not enabled, as the header states.
        let gpu = call.gpu(device)?;
        let most = gpu.facts.profiles.as_ref().map_or(0, |profiles| profiles.compute_slices());
        count.put(if gpu.mig_enabled() { c_uint::from(most) } else { 0 })
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Device, index: c_uint, mig: OutPointer<Device>) |call| {
        let gpu = call.gpu(device)?;
        mig.check()?;
        let found = gpu.mig_devices().nth(index as usize).ok_or(Status::NOT_FOUND)?;
        mig.put(Device::mig(found.place()))
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig: Device, parent: OutPointer<Device>) |call| {
        parent.put(Device::whole(call.mig(mig)?.gpu.facts.index))
    }

    fn nvmlDeviceGetGpuInstanceId(device: Device, id: OutPointer<c_uint>) |call| {
        id.put(call.mig(device)?.instance.id)
    }

    fn nvmlDeviceGetComputeInstanceId(device: Device, id: OutPointer<c_uint>) |call| {
        id.put(call.mig(device)?.compute.id)
    }

    fn nvmlDeviceGetAttributes | nvmlDeviceGetAttributes_v2(device: Device, out: OutPointer<sys::nvmlDeviceAttributes_t>) |call| {
        attributes(call, device, out)
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
