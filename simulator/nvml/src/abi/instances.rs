//! GPU instances: their profiles and placements, making and destroying them. [`super::compute`] has those of compute instances.

use std::ffi::{c_char, c_uint};

use gantry_topology::mig::{MigLayout, Product as Profiles, Profile};
use gantry_topology::{GpuInstance as Instance, Mig};
use nvml_wrapper_sys::bindings as sys;

use super::args::{In, OutPointer, Status, fixed, struct_version};
use super::call::{Call, Target, digest};
use super::handle::{Device, GpuInstance, InstanceHandle};
use crate::control::MigChange;

/// A GPU instance that a call is about: it exists, and its GPU is not lost.
#[derive(Clone, Copy)]
pub(super) struct TargetInstance<'a> {
    pub(super) gpu: Target<'a>,
    pub(super) instance: &'a Instance,
    pub(super) profiles: &'a Profiles,
    pub(super) profile: &'a Profile,
}

impl Call {
    /// The GPU instance behind a handle.
    pub(super) fn gpu_instance(&self, handle: GpuInstance) -> Result<TargetInstance<'_>, Status> {
        let place = handle.place().ok_or(Status::INVALID_ARGUMENT)?;
        let gpu = self.gpu_at(place.gpu).ok_or(Status::INVALID_ARGUMENT)??;
        let instances = gpu.gpu_instances();
        let instance = instances
            .into_iter()
            .find(|instance| place_of(gpu, instance) == place)
            .ok_or(Status::INVALID_ARGUMENT)?;
        found(gpu, instance)
    }
}

fn found<'a>(gpu: Target<'a>, instance: &'a Instance) -> Result<TargetInstance<'a>, Status> {
    let profiles = profiles(gpu)?;
    Ok(TargetInstance {
        gpu,
        instance,
        profiles,
        profile: profiles.profile(&instance.profile).ok_or(Status::UNKNOWN)?,
    })
}

/// What the handle of a GPU instance holds.
pub(super) fn place_of(gpu: Target<'_>, instance: &Instance) -> InstanceHandle {
    InstanceHandle {
        gpu: gpu.facts.index,
        gpu_instance: instance.id,
        compute_instance: 0,
        digest: digest(&format!("{}@{}", instance.profile, instance.start)),
    }
}

fn profiles(gpu: Target<'_>) -> Result<&Profiles, Status> {
    gpu.facts.profiles.as_ref().ok_or(Status::NOT_SUPPORTED)
}

/// The profile of an id, on a GPU that has MIG mode on.
fn by_id(gpu: Target<'_>, id: c_uint) -> Result<&Profile, Status> {
    let profiles = profiles(gpu)?;
    if !gpu.mig_enabled() {
        return Err(Status::NOT_SUPPORTED);
    }
    profiles.profile_by_id(id).ok_or(Status::INVALID_ARGUMENT)
}

/// The profile of NVML's number.
fn by_number(gpu: Target<'_>, number: c_uint) -> Result<&Profile, Status> {
    if number >= sys::NVML_GPU_INSTANCE_PROFILE_COUNT {
        return Err(Status::INVALID_ARGUMENT);
    }
    profiles(gpu)?.profile_by_nvml(number).ok_or(Status::NOT_SUPPORTED)
}

fn multiprocessors(gpu: Target<'_>, profile: &Profile) -> Result<c_uint, Status> {
    let attributes =
        crate::facts::attributes(profiles(gpu)?, &gpu.facts.product, &profile.name, &profile.name);
    Ok(attributes.map_or(0, |attributes| attributes.multiprocessors))
}

/// The name as nvidia-smi prints it.
pub(super) fn printed<const N: usize>(name: &str) -> [c_char; N] {
    fixed(&format!("MIG {name}"))
}

/// What NVML reports of a profile, in the struct of its newest version.
fn info(gpu: Target<'_>, profile: &Profile) -> Result<sys::nvmlGpuInstanceProfileInfo_v3_t, Status> {
    let engines = profile.engines;
    Ok(sys::nvmlGpuInstanceProfileInfo_v3_t {
        version: struct_version::<sys::nvmlGpuInstanceProfileInfo_v3_t>(3),
        id: profile.id,
        sliceCount: c_uint::from(profile.compute),
        instanceCount: c_uint::from(profile.max_instances),
        multiprocessorCount: multiprocessors(gpu, profile)?,
        copyEngineCount: engines.copy,
        decoderCount: engines.decoders,
        encoderCount: engines.encoders,
        jpegCount: engines.jpeg,
        ofaCount: engines.ofa,
        memorySizeMB: profile.memory_mib,
        name: printed(&profile.name),
        capabilities: if profile.name.ends_with("+gfx") {
            sys::NVML_GPU_INSTANCE_PROFILE_CAPS_GFX
        } else {
            0
        },
    })
}

fn put_info(
    gpu: Target<'_>,
    profile: &Profile,
    out: OutPointer<sys::nvmlGpuInstanceProfileInfo_v2_t>,
) -> Result<(), Status> {
    const V2: c_uint = struct_version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2);
    const V3: c_uint = struct_version::<sys::nvmlGpuInstanceProfileInfo_v3_t>(3);
    let version = out.version()?;
    let info = info(gpu, profile)?;
    match version {
        V2 => out.put(of_version!(info => sys::nvmlGpuInstanceProfileInfo_v2_t {
                id, sliceCount, instanceCount, multiprocessorCount, copyEngineCount, decoderCount,
                encoderCount, jpegCount, ofaCount, memorySizeMB, name
            }, version: V2, isP2pSupported: 0)),
        V3 => out.cast().put(info),
        _ => Err(Status::VERSION_MISMATCH),
    }
}

/// The legal placements, whatever is taken.
fn placements(profile: &Profile) -> Vec<sys::nvmlGpuInstancePlacement_t> {
    let starts = profile.starts.iter();
    starts
        .map(|start| sys::nvmlGpuInstancePlacement_t {
            start: c_uint::from(*start),
            size: c_uint::from(profile.size),
        })
        .collect()
}

/// Writes a list as the older functions do: into room the caller knows to be enough, or nowhere if only the count is asked for.
pub(super) fn put_trusting<T: Copy>(
    out: OutPointer<T>,
    count: OutPointer<c_uint>,
    items: &[T],
) -> Result<(), Status> {
    count.put(c_uint::try_from(items.len()).unwrap_or(c_uint::MAX))?;
    if out.check().is_ok() {
        out.put_all(items)?;
    }
    Ok(())
}

fn create(
    call: &Call,
    device: Device,
    profile: c_uint,
    start: Option<u8>,
    out: OutPointer<GpuInstance>,
) -> Result<(), Status> {
    let gpu = call.gpu(device)?;
    by_id(gpu, profile)?;
    out.check()?;
    let applied = call.change_mig(gpu, &MigChange::CreateGpu { profile, start })?;
    let made = |mig: &Mig, id: u32| mig.instances.iter().find(|instance| instance.id == id).cloned();
    let (id, _) = applied.made.ok_or(Status::UNKNOWN)?;
    let instance = made(&applied.mig, id).ok_or(Status::UNKNOWN)?;
    out.put(GpuInstance::at(place_of(gpu, &instance)))
}

/// The instance as C sees it; the same layout as `nvmlGpuInstanceInfo_t`, its handle a number.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct InstanceInfo {
    device: Device,
    id: c_uint,
    profile: c_uint,
    placement: sys::nvmlGpuInstancePlacement_t,
}

const _: () = assert!(size_of::<InstanceInfo>() == size_of::<sys::nvmlGpuInstanceInfo_t>());

nvml! {
    fn nvmlDeviceGetGpuInstanceProfileInfo(
        device: Device,
        number: c_uint,
        out: OutPointer<sys::nvmlGpuInstanceProfileInfo_t>,
    ) |call| {
        let gpu = call.gpu(device)?;
        let info = info(gpu, by_number(gpu, number)?)?;
        out.put(of_version!(info => sys::nvmlGpuInstanceProfileInfo_t {
                id, sliceCount, instanceCount, multiprocessorCount, copyEngineCount, decoderCount,
                encoderCount, jpegCount, ofaCount, memorySizeMB
            }, isP2pSupported: 0))
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoV(
        device: Device,
        number: c_uint,
        out: OutPointer<sys::nvmlGpuInstanceProfileInfo_v2_t>,
    ) |call| {
        let gpu = call.gpu(device)?;
        put_info(gpu, by_number(gpu, number)?, out)
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(
        device: Device,
        id: c_uint,
        out: OutPointer<sys::nvmlGpuInstanceProfileInfo_v2_t>,
    ) |call| {
        let gpu = call.gpu(device)?;
        let profile = profiles(gpu)?.profile_by_id(id).ok_or(Status::NOT_SUPPORTED)?;
        put_info(gpu, profile, out)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements(
        device: Device,
        id: c_uint,
        out: OutPointer<sys::nvmlGpuInstancePlacement_t>,
        count: OutPointer<c_uint>,
    ) |call| {
        let profile = profiles(call.gpu(device)?)?.profile_by_id(id).ok_or(Status::INVALID_ARGUMENT)?;
        put_trusting(out, count, &placements(profile))
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        device: Device,
        id: c_uint,
        out: OutPointer<sys::nvmlGpuInstancePlacement_t>,
        count: OutPointer<c_uint>,
    ) |call| {
        let profile = profiles(call.gpu(device)?)?.profile_by_id(id).ok_or(Status::INVALID_ARGUMENT)?;
        if out.check().is_err() {
            return put_trusting(out, count, &placements(profile));
        }
        out.put_list(count, &placements(profile))
    }

    fn nvmlDeviceGetGpuInstanceRemainingCapacity(device: Device, id: c_uint, count: OutPointer<c_uint>) |call| {
        let gpu = call.gpu(device)?;
        let profile = by_id(gpu, id)?;
        let mig = gpu.layout().cloned().unwrap_or_default();
        let layout = MigLayout::of(profiles(gpu)?, &mig, "mig").map_err(|_| Status::UNKNOWN)?;
        count.put(c_uint::from(layout.remaining(profile)))
    }

    fn nvmlDeviceCreateGpuInstance(device: Device, id: c_uint, out: OutPointer<GpuInstance>) |call| {
        create(call, device, id, None, out)
    }

    fn nvmlDeviceCreateGpuInstanceWithPlacement(
        device: Device,
        id: c_uint,
        placement: In<sys::nvmlGpuInstancePlacement_t>,
        out: OutPointer<GpuInstance>,
    ) |call| {
        let placement = placement.get()?;
        let profile = by_id(call.gpu(device)?, id)?;
        if placement.size != c_uint::from(profile.size) {
            return Err(Status::INVALID_ARGUMENT);
        }
        let start = u8::try_from(placement.start).map_err(|_| Status::INVALID_ARGUMENT)?;
        create(call, device, id, Some(start), out)
    }

    fn nvmlGpuInstanceDestroy(instance: GpuInstance) |call| {
        let found = call.gpu_instance(instance)?;
        call.change_mig(found.gpu, &MigChange::DestroyGpu { id: found.instance.id })?;
        Ok(())
    }

    fn nvmlDeviceGetGpuInstances(
        device: Device,
        id: c_uint,
        out: OutPointer<GpuInstance>,
        count: OutPointer<c_uint>,
    ) |call| {
        let gpu = call.gpu(device)?;
        let profile = by_id(gpu, id)?;
        let instances = gpu.gpu_instances().into_iter();
        let of_profile: Vec<GpuInstance> = instances
            .filter(|instance| instance.profile == profile.name)
            .map(|instance| GpuInstance::at(place_of(gpu, instance)))
            .collect();
        out.check()?;
        put_trusting(out, count, &of_profile)
    }

    fn nvmlDeviceGetGpuInstanceById(device: Device, id: c_uint, out: OutPointer<GpuInstance>) |call| {
        let gpu = call.gpu(device)?;
        if !gpu.mig_enabled() {
            return Err(Status::NOT_SUPPORTED);
        }
        let instances = gpu.gpu_instances();
        let instance = instances.iter().find(|instance| instance.id == id).ok_or(Status::NOT_FOUND)?;
        out.put(GpuInstance::at(place_of(gpu, instance)))
    }

    fn nvmlGpuInstanceGetInfo(instance: GpuInstance, out: OutPointer<InstanceInfo>) |call| {
        let found = call.gpu_instance(instance)?;
        out.put(InstanceInfo {
            device: Device::whole(found.gpu.facts.index),
            id: found.instance.id,
            profile: found.profile.id,
            placement: sys::nvmlGpuInstancePlacement_t {
                start: c_uint::from(found.instance.start),
                size: c_uint::from(found.instance.size),
            },
        })
    }
}
