//! Compute instances: their profiles and placements within a GPU instance, making and destroying them.

use std::ffi::c_uint;

use gantry_topology::ComputeInstance as Compute;
use gantry_topology::machine::split_profile;
use gantry_topology::mig::{compute_starts, legal_compute};
use nvml_wrapper_sys::bindings as sys;

use super::args::{In, OutPointer, Status, struct_version};
use super::call::{Call, MigTarget};
use super::handle::{ComputeInstance, Device, GpuInstance};
use super::instances::{TargetInstance, place_of, printed, put_trusting};
use crate::control::{MigChange, compute_room, placements_of, slices_of};
use crate::facts;

/// The engines of a GPU instance are shared by all of its compute instances: NVML knows no other way.
const SHARED: c_uint = sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;

/// Slices of NVML's compute instance profiles; number and id are the same.
const PROFILES: [(c_uint, u8); 5] = [
    (sys::NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE, 1),
    (sys::NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE, 2),
    (sys::NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE, 3),
    (sys::NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE, 4),
    (sys::NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE, 7),
];

/// The slices of a profile that instances of `found` have.
fn slices(found: TargetInstance<'_>, profile: c_uint) -> Result<u8, Status> {
    if profile >= sys::NVML_COMPUTE_INSTANCE_PROFILE_COUNT {
        return Err(Status::INVALID_ARGUMENT);
    }
    PROFILES
        .iter()
        .find(|(number, _)| *number == profile)
        .map(|(_, slices)| *slices)
        .filter(|slices| legal_compute(found.profile.compute).any(|legal| legal == *slices))
        .ok_or(Status::NOT_SUPPORTED)
}

/// Name of the MIG device of so many slices.
fn name(found: TargetInstance<'_>, slices: u8) -> String {
    if slices == found.profile.compute {
        found.profile.name.clone()
    } else {
        format!("{slices}c.{}", found.profile.name)
    }
}

/// NVML's description of a compute instance profile, in its newest version.
fn info(
    found: TargetInstance<'_>,
    profile: c_uint,
    engines: c_uint,
) -> Result<sys::nvmlComputeInstanceProfileInfo_v3_t, Status> {
    let slices = slices(found, profile)?;
    if engines != SHARED {
        return Err(Status::INVALID_ARGUMENT);
    }
    let name = name(found, slices);
    let product = &found.gpu.facts.product;
    let has =
        facts::attributes(found.profiles, product, &found.profile.name, &name).ok_or(Status::UNKNOWN)?;
    let count = compute_starts(found.profile.compute, slices).len();
    Ok(sys::nvmlComputeInstanceProfileInfo_v3_t {
        version: struct_version::<sys::nvmlComputeInstanceProfileInfo_v3_t>(3),
        id: profile,
        sliceCount: c_uint::from(slices),
        instanceCount: c_uint::try_from(count).unwrap_or(c_uint::MAX),
        multiprocessorCount: has.multiprocessors,
        sharedCopyEngineCount: has.copy_engines,
        sharedDecoderCount: has.decoders,
        sharedEncoderCount: has.encoders,
        sharedJpegCount: has.jpeg,
        sharedOfaCount: has.ofa,
        // No `+me` or the like: that is the GPU instance's.
        name: printed(split_profile(&name).0),
        capabilities: if found.profile.name.ends_with("+gfx") {
            sys::NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX
        } else {
            0
        },
    })
}

fn handle(found: TargetInstance<'_>, compute: &Compute) -> ComputeInstance {
    let device = MigTarget { gpu: found.gpu, instance: found.instance, compute };
    ComputeInstance::at(device.place())
}

fn create(
    call: &Call,
    instance: GpuInstance,
    profile: c_uint,
    start: Option<u8>,
    out: OutPointer<ComputeInstance>,
) -> Result<(), Status> {
    let found = call.gpu_instance(instance)?;
    let slices = slices(found, profile)?;
    out.check()?;
    let change = MigChange::CreateCompute { gpu_instance: found.instance.id, slices, start };
    let applied = call.change_mig(found.gpu, &change)?;
    let (gpu_instance, id) = applied.made.ok_or(Status::UNKNOWN)?;
    let instances = applied.mig.instances.iter();
    let made = instances
        .filter(|instance| instance.id == gpu_instance)
        .flat_map(|instance| &instance.compute)
        .find(|compute| Some(compute.id) == id)
        .ok_or(Status::UNKNOWN)?;
    out.put(handle(found, made))
}

/// The MIG device of a compute instance's handle.
fn device_of(call: &Call, instance: ComputeInstance) -> Result<MigTarget<'_>, Status> {
    let place = instance.place().ok_or(Status::INVALID_ARGUMENT)?;
    let gpu = call.gpu_at(place.gpu).ok_or(Status::INVALID_ARGUMENT)??;
    gpu.mig_devices().find(|device| device.place() == place).ok_or(Status::INVALID_ARGUMENT)
}

/// The instance as C sees it; the same layout as `nvmlComputeInstanceInfo_t`, its handles numbers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct InstanceInfo {
    device: Device,
    gpu_instance: GpuInstance,
    id: c_uint,
    profile: c_uint,
    placement: sys::nvmlComputeInstancePlacement_t,
}

const _: () = assert!(size_of::<InstanceInfo>() == size_of::<sys::nvmlComputeInstanceInfo_t>());

fn put_instance(call: &Call, instance: ComputeInstance, out: OutPointer<InstanceInfo>) -> Result<(), Status> {
    let device = device_of(call, instance)?;
    let parent = GpuInstance::at(place_of(device.gpu, device.instance));
    let found = call.gpu_instance(parent)?;
    let placements_of = placements_of(found.profile, found.instance);
    let (_, start, slices) =
        placements_of.into_iter().find(|(id, ..)| *id == device.compute.id).ok_or(Status::UNKNOWN)?;
    let profile = PROFILES.iter().find(|(_, of)| *of == slices);
    out.put(InstanceInfo {
        device: Device::whole(device.gpu.facts.index),
        gpu_instance: parent,
        id: device.compute.id,
        profile: profile.ok_or(Status::UNKNOWN)?.0,
        placement: sys::nvmlComputeInstancePlacement_t {
            start: c_uint::from(start),
            size: c_uint::from(slices),
        },
    })
}

nvml! {
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
        instance: GpuInstance,
        profile: c_uint,
        engines: c_uint,
        out: OutPointer<sys::nvmlComputeInstanceProfileInfo_t>,
    ) |call| {
        let info = info(call.gpu_instance(instance)?, profile, engines)?;
        out.put(of_version!(info => sys::nvmlComputeInstanceProfileInfo_t {
                id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount,
                sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount
            }))
    }

    fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
        instance: GpuInstance,
        profile: c_uint,
        engines: c_uint,
        out: OutPointer<sys::nvmlComputeInstanceProfileInfo_v2_t>,
    ) |call| {
        const V2: c_uint = struct_version::<sys::nvmlComputeInstanceProfileInfo_v2_t>(2);
        const V3: c_uint = struct_version::<sys::nvmlComputeInstanceProfileInfo_v3_t>(3);
        let info = info(call.gpu_instance(instance)?, profile, engines)?;
        match out.version()? {
            V2 => out.put(of_version!(info => sys::nvmlComputeInstanceProfileInfo_v2_t {
                id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount,
                sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount, name
            }, version: V2)),
            V3 => out.cast().put(info),
            _ => Err(Status::VERSION_MISMATCH),
        }
    }

    fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
        instance: GpuInstance,
        profile: c_uint,
        count: OutPointer<c_uint>,
    ) |call| {
        let found = call.gpu_instance(instance)?;
        let room = compute_room(found.profile, found.instance, slices(found, profile)?);
        count.put(c_uint::try_from(room).unwrap_or(c_uint::MAX))
    }

    fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        instance: GpuInstance,
        profile: c_uint,
        out: OutPointer<sys::nvmlComputeInstancePlacement_t>,
        count: OutPointer<c_uint>,
    ) |call| {
        let found = call.gpu_instance(instance)?;
        let slices = slices(found, profile)?;
        let starts = compute_starts(found.profile.compute, slices).into_iter();
        let placements: Vec<sys::nvmlComputeInstancePlacement_t> = starts
            .map(|start| sys::nvmlComputeInstancePlacement_t {
                start: c_uint::from(start),
                size: c_uint::from(slices),
            })
            .collect();
        if out.check().is_err() {
            return put_trusting(out, count, &placements);
        }
        out.put_list(count, &placements)
    }

    fn nvmlGpuInstanceCreateComputeInstance(
        instance: GpuInstance,
        profile: c_uint,
        out: OutPointer<ComputeInstance>,
    ) |call| {
        create(call, instance, profile, None, out)
    }

    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        instance: GpuInstance,
        profile: c_uint,
        placement: In<sys::nvmlComputeInstancePlacement_t>,
        out: OutPointer<ComputeInstance>,
    ) |call| {
        let placement = placement.get()?;
        let found = call.gpu_instance(instance)?;
        let slices = slices(found, profile)?;
        let start = u8::try_from(placement.start).map_err(|_| Status::INVALID_ARGUMENT)?;
        let legal = compute_starts(found.profile.compute, slices).contains(&start);
        if placement.size != c_uint::from(slices) || !legal {
            return Err(Status::INVALID_ARGUMENT);
        }
        create(call, instance, profile, Some(start), out)
    }

    fn nvmlComputeInstanceDestroy(instance: ComputeInstance) |call| {
        let device = device_of(call, instance)?;
        let change = MigChange::DestroyCompute {
            gpu_instance: device.instance.id,
            id: device.compute.id,
        };
        call.change_mig(device.gpu, &change)?;
        Ok(())
    }

    fn nvmlGpuInstanceGetComputeInstances(
        instance: GpuInstance,
        profile: c_uint,
        out: OutPointer<ComputeInstance>,
        count: OutPointer<c_uint>,
    ) |call| {
        let found = call.gpu_instance(instance)?;
        let wanted = slices(found, profile)?;
        let all = found.instance.compute.iter();
        let of_profile: Vec<ComputeInstance> = all
            .filter(|compute| slices_of(found.profile, &compute.profile) == wanted)
            .map(|compute| handle(found, compute))
            .collect();
        out.check()?;
        put_trusting(out, count, &of_profile)
    }

    fn nvmlGpuInstanceGetComputeInstanceById(
        instance: GpuInstance,
        id: c_uint,
        out: OutPointer<ComputeInstance>,
    ) |call| {
        let found = call.gpu_instance(instance)?;
        let compute = found.instance.compute.iter().find(|compute| compute.id == id);
        out.put(handle(found, compute.ok_or(Status::NOT_FOUND)?))
    }

    fn nvmlComputeInstanceGetInfo | nvmlComputeInstanceGetInfo_v2(instance: ComputeInstance, out: OutPointer<InstanceInfo>) |call| {
        put_instance(call, instance, out)
    }
}
