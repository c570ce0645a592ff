//! MIG as C sees it: devices and their handles, instances made and destroyed, a cut that changes while clients look on.
#![allow(
    unsafe_code,
    clippy::macro_metavars_in_unsafe,
    clippy::unwrap_used,
    clippy::panic,
    reason = "the C functions are called as C calls them, each block says why it is sound; a test stops at what is wrong"
)]

use std::ffi::c_char;
use std::ptr::null_mut;

use gantry_nvml_sim::control::{ControlError, Process};
use gantry_topology::machine::split_profile;
use nvml_wrapper_sys::bindings as sys;

mod common;
use common::*;

const IN_USE: u32 = sys::nvmlReturn_enum_NVML_ERROR_IN_USE;
const NO_ROOM: u32 = sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES;

/// What clients ask of MIG, one answer each.
impl Raw {
    fn mig_mode(&self, gpu: u32) -> Result<(u32, u32), u32> {
        let (mut current, mut pending) = (9, 9);
        let device = self.device(gpu)?;
        let code = call!(self, nvmlDeviceGetMigMode(device, &raw mut current, &raw mut pending));
        result(code, (current, pending))
    }

    fn set_mig_mode(&self, gpu: u32, mode: u32) -> Result<(), u32> {
        let mut activation = 0;
        let device = self.device(gpu)?;
        result(call!(self, nvmlDeviceSetMigMode(device, mode, &raw mut activation)), ())
    }

    fn max_migs(&self, gpu: u32) -> u32 {
        let mut count = 99;
        let device = self.device(gpu).unwrap();
        assert_eq!(call!(self, nvmlDeviceGetMaxMigDeviceCount(device, &raw mut count)), OK);
        count
    }

    fn mig(&self, gpu: u32, index: u32) -> Result<sys::nvmlDevice_t, u32> {
        let mut mig = null_mut();
        let device = self.device(gpu)?;
        let code = call!(self, nvmlDeviceGetMigDeviceHandleByIndex(device, index, &raw mut mig));
        result(code, mig)
    }

    /// The MIG devices of a GPU, found as clients do: every index up to the most there may be.
    fn migs(&self, gpu: u32) -> Vec<sys::nvmlDevice_t> {
        let indices = 0..self.max_migs(gpu);
        let found = indices.filter_map(|index| match self.mig(gpu, index) {
            Ok(mig) => Some(mig),
            Err(code) => {
                assert_eq!(code, NOT_FOUND);
                None
            }
        });
        found.collect()
    }

    fn uuids(&self, gpu: u32) -> Vec<String> {
        self.migs(gpu).into_iter().map(|mig| self.uuid(mig).unwrap()).collect()
    }

    fn name(&self, device: sys::nvmlDevice_t) -> String {
        let mut buffer: [c_char; 96] = [0; 96];
        assert_eq!(call!(self, nvmlDeviceGetName(device, buffer.as_mut_ptr(), 96)), OK);
        text(&buffer)
    }

    fn names(&self, gpu: u32) -> Vec<String> {
        let names = self.migs(gpu).into_iter().map(|mig| self.name(mig));
        names.map(|name| name.split(" MIG ").nth(1).unwrap().to_owned()).collect()
    }

    fn attributes(&self, mig: sys::nvmlDevice_t) -> sys::nvmlDeviceAttributes_t {
        // SAFETY: plain numbers, for which zero is valid.
        let mut attributes = unsafe { std::mem::zeroed() };
        assert_eq!(call!(self, nvmlDeviceGetAttributes_v2(mig, &raw mut attributes)), OK);
        attributes
    }

    fn ids(&self, mig: sys::nvmlDevice_t) -> Result<(u32, u32), u32> {
        let (mut gpu, mut compute) = (99, 99);
        let code = call!(self, nvmlDeviceGetGpuInstanceId(mig, &raw mut gpu));
        result(code, ())?;
        let code = call!(self, nvmlDeviceGetComputeInstanceId(mig, &raw mut compute));
        result(code, (gpu, compute))
    }

    fn memory(&self, device: sys::nvmlDevice_t) -> u64 {
        // SAFETY: plain numbers, for which zero is valid.
        let mut memory: sys::nvmlMemory_t = unsafe { std::mem::zeroed() };
        assert_eq!(call!(self, nvmlDeviceGetMemoryInfo(device, &raw mut memory)), OK);
        memory.total
    }

    fn create(&self, gpu: u32, profile: u32) -> Result<sys::nvmlGpuInstance_t, u32> {
        let mut instance = null_mut();
        let device = self.device(gpu)?;
        result(call!(self, nvmlDeviceCreateGpuInstance(device, profile, &raw mut instance)), instance)
    }

    fn create_at(
        &self,
        gpu: u32,
        profile: u32,
        start: u32,
        size: u32,
    ) -> Result<sys::nvmlGpuInstance_t, u32> {
        let mut instance = null_mut();
        let placement = sys::nvmlGpuInstancePlacement_t { start, size };
        let device = self.device(gpu)?;
        let code = call!(
            self,
            nvmlDeviceCreateGpuInstanceWithPlacement(
                device,
                profile,
                &raw const placement,
                &raw mut instance
            )
        );
        result(code, instance)
    }

    fn create_compute(
        &self,
        instance: sys::nvmlGpuInstance_t,
        profile: u32,
    ) -> Result<sys::nvmlComputeInstance_t, u32> {
        let mut compute = null_mut();
        let code = call!(self, nvmlGpuInstanceCreateComputeInstance(instance, profile, &raw mut compute));
        result(code, compute)
    }

    fn instance_info(&self, instance: sys::nvmlGpuInstance_t) -> Result<(u32, u32, u32, u32), u32> {
        // SAFETY: numbers and a pointer, for which zero is valid.
        let mut info: sys::nvmlGpuInstanceInfo_t = unsafe { std::mem::zeroed() };
        let code = call!(self, nvmlGpuInstanceGetInfo(instance, &raw mut info));
        result(code, (info.id, info.profileId, info.placement.start, info.placement.size))
    }

    fn compute_info(&self, compute: sys::nvmlComputeInstance_t) -> Result<(u32, u32, u32, u32), u32> {
        // SAFETY: numbers and pointers, for which zero is valid.
        let mut info: sys::nvmlComputeInstanceInfo_t = unsafe { std::mem::zeroed() };
        let code = call!(self, nvmlComputeInstanceGetInfo_v2(compute, &raw mut info));
        result(code, (info.id, info.profileId, info.placement.start, info.placement.size))
    }

    fn remaining(&self, gpu: u32, profile: u32) -> Result<u32, u32> {
        let mut count = 99;
        let device = self.device(gpu)?;
        let code = call!(self, nvmlDeviceGetGpuInstanceRemainingCapacity(device, profile, &raw mut count));
        result(code, count)
    }
}

#[test]
fn mig_devices_are_those_of_the_machine_file() {
    for name in MACHINES {
        let simulated = Simulated::new(name);
        let raw = simulated.start();
        for (index, gpu) in (0_u32..).zip(simulated.installed.facts.machine().gpus()) {
            let Some(mig) = &gpu.mig else {
                assert_eq!(raw.mig_mode(index), Err(NOT_SUPPORTED), "{name}");
                assert_eq!(raw.migs(index), []);
                continue;
            };
            let mode = u32::from(mig.enabled);
            assert_eq!(raw.mig_mode(index), Ok((mode, mode)), "{name}");
            let mut written: Vec<_> = mig
                .instances
                .iter()
                .flat_map(|instance| {
                    let compute = instance.compute.iter();
                    compute.map(move |compute| (instance.id, compute.id, compute.uuid.to_string()))
                })
                .collect();
            written.sort();
            let found: Vec<_> = raw
                .migs(index)
                .into_iter()
                .map(|mig| {
                    let (gpu, compute) = raw.ids(mig).unwrap();
                    (gpu, compute, raw.uuid(mig).unwrap())
                })
                .collect();
            assert_eq!(found, written, "{name} GPU {index}");
        }
    }
}

#[test]
fn a_mig_device_tells_what_it_is_and_whose() {
    let simulated = Simulated::new("h200-8x-mig");
    let raw = simulated.start();
    let parent = raw.device(1).unwrap();
    let mig = raw.mig(1, 0).unwrap();
    let mut found = null_mut();
    assert_eq!(call!(raw, nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig, &raw mut found)), OK);
    assert_eq!(found, parent);
    let is_mig = |device| {
        let mut is_mig = 9;
        assert_eq!(call!(raw, nvmlDeviceIsMigDeviceHandle(device, &raw mut is_mig)), OK);
        is_mig
    };
    assert_eq!((is_mig(parent), is_mig(mig)), (0, 1));
    assert_eq!(raw.name(mig), "NVIDIA H200 MIG 1c.3g.71gb");
    assert_eq!(raw.names(1), ["1c.3g.71gb", "2c.3g.71gb", "1g.18gb", "1g.18gb", "1g.18gb"]);
    let has = raw.attributes(mig);
    assert_eq!((has.gpuInstanceSliceCount, has.computeInstanceSliceCount), (3, 1));
    assert_eq!((has.multiprocessorCount, has.memorySizeMB), (16, 71_424));
    assert_eq!(raw.memory(mig), 71_424 << 20);
    let number = |device, function: unsafe extern "C" fn(sys::nvmlDevice_t, *mut u32) -> u32| {
        let mut number = 99;
        // SAFETY: a handle and a pointer to a local.
        result(unsafe { function(device, &raw mut number) }, number)
    };
    let index = *raw.0.nvmlDeviceGetIndex.as_ref().unwrap();
    let minor = *raw.0.nvmlDeviceGetMinorNumber.as_ref().unwrap();
    assert_eq!((number(mig, index), number(mig, minor)), (Ok(0), Ok(1)));
    assert_eq!(number(raw.mig(1, 4).unwrap(), index), Ok(4));
}

#[test]
fn mig_device_is_named_after_its_compute_instance() {
    let simulated = Simulated::new("dgx-a100-mig");
    let raw = simulated.start();
    raw.set_mig_mode(0, 1).unwrap();
    let instance = raw.create(0, 20).unwrap();
    raw.create_compute(instance, 0).unwrap();
    assert_eq!(raw.names(0), ["1g.5gb"], "in an instance of 1g.5gb+me");
    let (_, profile, ..) = raw.instance_info(instance).unwrap();
    assert_eq!(profile, 20);
}

#[test]
fn functions_of_gpus_and_mig_devices_are_separate() {
    let simulated = Simulated::new("a100-1x-mig");
    let raw = simulated.start();
    let (gpu, mig) = (raw.device(0).unwrap(), raw.mig(0, 3).unwrap());
    let mut celsius = 0;
    assert_eq!(call!(raw, nvmlDeviceGetTemperature(mig, 0, &raw mut celsius)), NOT_SUPPORTED);
    assert_eq!(raw.ids(gpu), Err(INVALID_ARGUMENT));
    // SAFETY: plain numbers, for which zero is valid.
    let mut attributes: sys::nvmlDeviceAttributes_t = unsafe { std::mem::zeroed() };
    assert_eq!(call!(raw, nvmlDeviceGetAttributes_v2(gpu, &raw mut attributes)), NOT_SUPPORTED);
}

#[test]
fn a_mig_device_is_found_by_its_uuid() {
    let simulated = Simulated::new("a30-4x-mig");
    let raw = simulated.start();
    let mig = raw.mig(1, 2).unwrap();
    let uuid = std::ffi::CString::new(raw.uuid(mig).unwrap()).unwrap();
    let mut found = null_mut();
    assert_eq!(call!(raw, nvmlDeviceGetHandleByUUID(uuid.as_ptr(), &raw mut found)), OK);
    assert_eq!(found, mig);
    let unknown = c"MIG-00000000-0000-0000-0000-000000000000";
    assert_eq!(call!(raw, nvmlDeviceGetHandleByUUID(unknown.as_ptr(), &raw mut found)), NOT_FOUND);
}

#[test]
fn mig_mode_is_turned_on_and_off_but_not_under_instances() {
    let simulated = Simulated::new("dgx-a100");
    let raw = simulated.start();
    assert_eq!(raw.mig_mode(0), Ok((0, 0)));
    assert_eq!(raw.max_migs(0), 0);
    assert_eq!(raw.create(0, 19), Err(NOT_SUPPORTED), "MIG mode is off");
    assert_eq!(raw.set_mig_mode(0, 2), Err(INVALID_ARGUMENT));
    assert_eq!(raw.set_mig_mode(0, 1), Ok(()));
    assert_eq!((raw.mig_mode(0), raw.max_migs(0)), (Ok((1, 1)), 7));
    assert_eq!(raw.migs(0), []);
    let instance = raw.create(0, 19).unwrap();
    assert_eq!(raw.set_mig_mode(0, 0), Err(IN_USE));
    assert_eq!(call!(raw, nvmlGpuInstanceDestroy(instance)), OK);
    assert_eq!(raw.set_mig_mode(0, 0), Ok(()));
    assert_eq!(Simulated::new("l4-4x-pcie").start().set_mig_mode(0, 1), Err(NOT_SUPPORTED));
}

#[test]
fn gpu_is_split_only_into_what_fits() {
    let simulated = Simulated::new("dgx-a100");
    let raw = simulated.start();
    raw.set_mig_mode(3, 1).unwrap();
    let (one, three, four) = (19, 9, 5);
    assert_eq!((raw.remaining(3, one), raw.remaining(3, three)), (Ok(7), Ok(2)));
    let right = raw.create_at(3, three, 4, 4).unwrap();
    assert_eq!(raw.instance_info(right), Ok((2, three, 4, 4)));
    assert_eq!(raw.create_at(3, three, 4, 4), Err(NO_ROOM));
    assert_eq!(raw.create_at(3, three, 2, 4), Err(INVALID_ARGUMENT));
    assert_eq!(raw.create_at(3, three, 0, 3), Err(INVALID_ARGUMENT));
    assert_eq!(raw.create(3, 1234), Err(INVALID_ARGUMENT));
    let left = raw.create(3, four).unwrap();
    assert_eq!(raw.instance_info(left), Ok((1, four, 0, 4)));
    assert_eq!(raw.create(3, one), Err(NO_ROOM));
    assert_eq!(raw.remaining(3, one), Ok(0));
    let listed = |profile| {
        let mut found = [null_mut(); 8];
        let mut count = 0;
        let device = raw.device(3).unwrap();
        let code = call!(raw, nvmlDeviceGetGpuInstances(device, profile, found.as_mut_ptr(), &raw mut count));
        assert_eq!(code, OK);
        found[..count as usize].to_vec()
    };
    assert_eq!((listed(three), listed(four), listed(one)), (vec![right], vec![left], vec![]));
    let by_id = |id| {
        let mut found = null_mut();
        let device = raw.device(3).unwrap();
        result(call!(raw, nvmlDeviceGetGpuInstanceById(device, id, &raw mut found)), found)
    };
    assert_eq!((by_id(2), by_id(7)), (Ok(right), Err(NOT_FOUND)));
    assert_eq!(raw.migs(3), [], "a GPU instance alone is no device");
}

#[test]
fn compute_instances_part_a_gpu_instance() {
    let simulated = Simulated::new("dgx-a100");
    let raw = simulated.start();
    raw.set_mig_mode(0, 1).unwrap();
    let instance = raw.create(0, 9).unwrap();
    let two = raw.create_compute(instance, 1).unwrap();
    assert_eq!(raw.compute_info(two), Ok((0, 1, 0, 2)));
    let one = raw.create_compute(instance, 0).unwrap();
    assert_eq!(raw.compute_info(one), Ok((1, 0, 2, 1)));
    assert_eq!(raw.create_compute(instance, 0), Err(NO_ROOM));
    assert_eq!(raw.create_compute(instance, 3), Err(NOT_SUPPORTED), "4 slices of 3");
    assert_eq!(raw.create_compute(instance, 8), Err(INVALID_ARGUMENT));
    assert_eq!(raw.names(0), ["2c.3g.20gb", "1c.3g.20gb"]);
    assert_eq!(call!(raw, nvmlGpuInstanceDestroy(instance)), IN_USE);
    let mig = raw.mig(0, 0).unwrap();
    for compute in [one, two] {
        assert_eq!(call!(raw, nvmlComputeInstanceDestroy(compute)), OK);
    }
    assert_eq!(raw.uuid(mig), Err(INVALID_ARGUMENT));
    assert_eq!(call!(raw, nvmlComputeInstanceDestroy(one)), INVALID_ARGUMENT);
    assert_eq!(call!(raw, nvmlGpuInstanceDestroy(instance)), OK);
    assert_eq!(raw.instance_info(instance), Err(INVALID_ARGUMENT));
}

#[test]
fn profiles_are_told_in_every_version_of_the_struct() {
    let simulated = Simulated::new("hgx-h100");
    let raw = simulated.start();
    let device = raw.device(0).unwrap();
    // SAFETY: plain numbers, for which zero is valid.
    let mut first: sys::nvmlGpuInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
    let by_number = |number, info: &mut sys::nvmlGpuInstanceProfileInfo_t| {
        call!(raw, nvmlDeviceGetGpuInstanceProfileInfo(device, number, std::ptr::from_mut(info)))
    };
    let mut offered = Vec::new();
    for number in 0..sys::NVML_GPU_INSTANCE_PROFILE_COUNT {
        match by_number(number, &mut first) {
            OK => offered.push((number, first.id, first.sliceCount, first.instanceCount)),
            code => assert_eq!(code, NOT_SUPPORTED),
        }
    }
    assert_eq!(
        offered,
        [
            (0, 19, 1, 7),
            (1, 14, 2, 3),
            (2, 9, 3, 2),
            (3, 5, 4, 1),
            (4, 0, 7, 1),
            (7, 20, 1, 1),
            (9, 15, 1, 4)
        ]
    );
    assert_eq!(by_number(sys::NVML_GPU_INSTANCE_PROFILE_COUNT, &mut first), INVALID_ARGUMENT);
    // SAFETY: as above.
    let mut second: sys::nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
    second.version = version::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2);
    assert_eq!(call!(raw, nvmlDeviceGetGpuInstanceProfileInfoV(device, 2, &raw mut second)), OK);
    assert_eq!(
        (text(&second.name).as_str(), second.multiprocessorCount, second.memorySizeMB),
        ("MIG 3g.40gb", 60, 40_448)
    );
    // SAFETY: as above.
    let mut third: sys::nvmlGpuInstanceProfileInfo_v3_t = unsafe { std::mem::zeroed() };
    third.version = version::<sys::nvmlGpuInstanceProfileInfo_v3_t>(3);
    let place = |info: &mut sys::nvmlGpuInstanceProfileInfo_v3_t| std::ptr::from_mut(info).cast();
    assert_eq!(call!(raw, nvmlDeviceGetGpuInstanceProfileInfoV(device, 7, place(&mut third))), OK);
    assert_eq!((text(&third.name).as_str(), third.ofaCount), ("MIG 1g.10gb+me", 1));
    third.version = 7;
    assert_eq!(
        call!(raw, nvmlDeviceGetGpuInstanceProfileInfoV(device, 7, place(&mut third))),
        VERSION_MISMATCH
    );
}

#[test]
fn placements_are_counted_and_listed() {
    let simulated = Simulated::new("rtx-pro-6000-4x-mig");
    let raw = simulated.start();
    let device = raw.device(0).unwrap();
    let mut count = 0;
    let nowhere = null_mut();
    let code = call!(raw, nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, 14, nowhere, &raw mut count));
    assert_eq!((code, count), (OK, 4));
    let mut placements = [sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 }; 4];
    let code = call!(
        raw,
        nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, 14, placements.as_mut_ptr(), &raw mut count)
    );
    let found: Vec<_> = placements.iter().map(|placement| (placement.start, placement.size)).collect();
    assert_eq!((code, found), (OK, vec![(0, 3), (3, 3), (6, 3), (9, 3)]));
    let mut short = 2;
    let code = call!(
        raw,
        nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, 14, placements.as_mut_ptr(), &raw mut short)
    );
    assert_eq!((code, short), (INSUFFICIENT_SIZE, 4));
}

#[test]
fn layout_change_invalidates_handles_of_removed_instances() {
    let simulated = Simulated::new("dgx-a100-mig");
    let (raw, other) = (simulated.start(), simulated.start());
    let gpu = 5;
    assert_eq!(raw.names(gpu), ["3g.20gb", "3g.20gb"]);
    let (left, right) = (raw.mig(gpu, 0).unwrap(), raw.mig(gpu, 1).unwrap());
    let right_uuid = raw.uuid(right).unwrap();
    let controller = &simulated.installed.controller;
    controller.recut(5, &["3g.20gb@4", "2g.10gb", "1g.5gb", "1g.5gb"]).unwrap();
    assert_eq!(raw.uuid(left), Err(INVALID_ARGUMENT));
    assert_eq!(raw.uuid(right).as_ref(), Ok(&right_uuid), "it stayed where it was");
    let (mut names, mut seen) = (raw.names(gpu), other.names(gpu));
    names.sort();
    seen.sort();
    assert_eq!(names, ["1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb"]);
    assert_eq!(names, seen, "every client sees it");
    assert!(raw.uuids(gpu).contains(&right_uuid));
    let before = raw.uuids(gpu);
    controller.recut(5, &["7g.40gb"]).unwrap();
    assert_eq!(raw.names(gpu), ["7g.40gb"]);
    controller.recut(5, &["3g.20gb@4", "2g.10gb", "1g.5gb", "1g.5gb"]).unwrap();
    let again = raw.uuids(gpu);
    let same = before.iter().filter(|uuid| again.contains(uuid)).count();
    assert_eq!(same, 3, "all but the one whose UUID came from the machine file");
    controller.uncut(5).unwrap();
    assert_eq!((raw.mig_mode(gpu), raw.max_migs(gpu)), (Ok((0, 0)), 0));
    controller.reset().unwrap();
    assert_eq!(raw.uuid(right), Ok(right_uuid), "as the machine file says");
}

#[test]
fn invalid_layout_changes_nothing() {
    let simulated = Simulated::new("dgx-a100-mig");
    let raw = simulated.start();
    let before = raw.uuids(4);
    let refused = |pieces: &[&str]| match simulated.installed.controller.recut(4, pieces) {
        Err(error @ ControlError::Mig { .. }) => {
            let source = std::error::Error::source(&error).unwrap();
            source.to_string()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(
        refused(&["3g.20gb", "3g.20gb", "1g.5gb"]),
        "A100-40GB cannot be cut into 3g.20gb, 3g.20gb, 1g.5gb"
    );
    assert_eq!(refused(&["3g.20gb@2"]), "3g.20gb may start at 0, 4, not at 2");
    assert_eq!(
        refused(&["3g.40gb"]),
        "A100-40GB has no profile \"3g.40gb\"; it has 1g.5gb, 1g.5gb+me, 1g.10gb, 2g.10gb, 3g.20gb, 4g.20gb, 7g.40gb"
    );
    assert_eq!(
        refused(&["3g.20gb=x"]),
        "\"3g.20gb=x\": write a profile, with @ and the unit it starts at, with = and its compute instances, as in 3g.20gb@4=1c,2c"
    );
    assert_eq!(raw.uuids(4), before);
    assert!(matches!(
        simulated.installed.controller.recut(8, &[]),
        Err(ControlError::NoSuchGpu { gpu: 8, gpus: 8 })
    ));
}

#[test]
fn mig_change_raises_event() {
    let simulated = Simulated::new("dgx-a100");
    let raw = simulated.start();
    let set = raw.event_set();
    let device = raw.device(2).unwrap();
    let types = u64::from(sys::nvmlEventMigConfigChange);
    assert_eq!(call!(raw, nvmlDeviceRegisterEvents(device, types, set)), OK);
    simulated.installed.controller.recut(2, &["7g.40gb"]).unwrap();
    let heard = raw.wait(set, 120_000).unwrap();
    assert_eq!((heard.device, heard.eventType), (device, types));
}

#[test]
fn a_lost_gpu_takes_its_mig_devices_with_it() {
    let simulated = Simulated::new("hgx-h100-mig");
    let raw = simulated.start();
    let (lost, well) = (raw.mig(2, 0).unwrap(), raw.mig(3, 0).unwrap());
    simulated.installed.controller.lose_gpu(2).unwrap();
    assert_eq!(raw.uuid(lost), Err(GPU_IS_LOST));
    assert!(raw.uuid(well).is_ok());
}

#[test]
fn processes_in_an_instance_are_seen_there_and_keep_it() {
    let simulated = Simulated::new("a30-4x-mig");
    let raw = simulated.start();
    let process = |pid, place: Option<(u32, u32)>| Process {
        pid,
        memory_mib: 100,
        gpu_instance: place.map(|(gpu, _)| gpu),
        compute_instance: place.map(|(_, compute)| compute),
    };
    let (first, second) = (raw.mig(0, 0).unwrap(), raw.mig(0, 1).unwrap());
    let (place, other) = (raw.ids(first).unwrap(), raw.ids(second).unwrap());
    let controller = &simulated.installed.controller;
    controller.set_processes(0, vec![process(41, Some(place)), process(42, Some(other))]).unwrap();
    let seen = |device| -> Vec<(u32, u32, u32)> {
        // SAFETY: plain numbers, for which zero is valid.
        let mut found: [sys::nvmlProcessInfo_t; 8] = unsafe { std::mem::zeroed() };
        let mut count = 8;
        let code =
            call!(raw, nvmlDeviceGetComputeRunningProcesses_v3(device, &raw mut count, found.as_mut_ptr()));
        assert_eq!(code, OK);
        let found = found[..count as usize].iter();
        found.map(|process| (process.pid, process.gpuInstanceId, process.computeInstanceId)).collect()
    };
    assert_eq!(seen(first), [(41, place.0, place.1)]);
    assert_eq!(seen(raw.device(0).unwrap()), [(41, place.0, place.1), (42, other.0, other.1)]);
    let compute_of = |place: (u32, u32)| {
        let (mut instance, mut compute) = (null_mut(), null_mut());
        let device = raw.device(0).unwrap();
        assert_eq!(call!(raw, nvmlDeviceGetGpuInstanceById(device, place.0, &raw mut instance)), OK);
        let code = call!(raw, nvmlGpuInstanceGetComputeInstanceById(instance, place.1, &raw mut compute));
        assert_eq!(code, OK);
        compute
    };
    assert_eq!(call!(raw, nvmlComputeInstanceDestroy(compute_of(place))), IN_USE);
    controller.recut(0, &["2c.4g.24gb"]).unwrap_err();
    controller.recut(0, &["1g.6gb@1", "2g.12gb@2"]).unwrap();
    assert_eq!(seen(raw.device(0).unwrap()), [(42, other.0, other.1)], "processes go with their instance");
    controller.set_processes(0, Vec::new()).unwrap();
    assert_eq!(call!(raw, nvmlComputeInstanceDestroy(compute_of(other))), OK);
}

/// The name of a MIG device as NVIDIA's plugin works it out: it never asks for a name, but looks up the profiles of both
/// instances by their ids and takes the share of memory in eighths, rounded up.
fn worked_out(raw: &Raw, mig: sys::nvmlDevice_t) -> String {
    let mut parent = null_mut();
    let code = call!(raw, nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig, &raw mut parent));
    assert_eq!(code, OK);
    let (gpu_id, compute_id) = raw.ids(mig).unwrap();
    let (mut instance, mut compute) = (null_mut(), null_mut());
    assert_eq!(call!(raw, nvmlDeviceGetGpuInstanceById(parent, gpu_id, &raw mut instance)), OK);
    let code = call!(raw, nvmlGpuInstanceGetComputeInstanceById(instance, compute_id, &raw mut compute));
    assert_eq!(code, OK);
    let (_, profile, ..) = raw.instance_info(instance).unwrap();
    let (_, compute_profile, ..) = raw.compute_info(compute).unwrap();

    let number = (0..sys::NVML_GPU_INSTANCE_PROFILE_COUNT).find(|number| {
        // SAFETY: plain numbers, for which zero is valid.
        let mut info: sys::nvmlGpuInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
        match call!(raw, nvmlDeviceGetGpuInstanceProfileInfo(parent, *number, &raw mut info)) {
            OK => info.id == profile,
            code => {
                assert_eq!(code, NOT_SUPPORTED);
                false
            }
        }
    });
    let (slices, suffix) = match number.unwrap() {
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE | sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2 => (1, ""),
        sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE => (2, ""),
        sys::NVML_GPU_INSTANCE_PROFILE_3_SLICE => (3, ""),
        sys::NVML_GPU_INSTANCE_PROFILE_4_SLICE => (4, ""),
        sys::NVML_GPU_INSTANCE_PROFILE_7_SLICE => (7, ""),
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1 => (1, "+me"),
        sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1 => (2, "+me"),
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_GFX => (1, "+gfx"),
        sys::NVML_GPU_INSTANCE_PROFILE_2_SLICE_GFX => (2, "+gfx"),
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_NO_ME => (1, "-me"),
        sys::NVML_GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME => (1, "+me.all"),
        other => panic!("no machine file has profile {other}"),
    };
    let own = (0..sys::NVML_COMPUTE_INSTANCE_PROFILE_COUNT).find_map(|number| {
        // SAFETY: as above.
        let mut info: sys::nvmlComputeInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
        let code =
            call!(raw, nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, 0, &raw mut info));
        (code == OK && info.id == compute_profile).then_some(info.sliceCount)
    });
    let total = raw.memory(parent);
    let share = (raw.attributes(mig).memorySizeMB << 20) as f64 / total as f64;
    let gb = ((share * 8.0).ceil() / 8.0 * total.div_ceil(1 << 30) as f64).round();
    let part = match own.unwrap() {
        own if own == slices => String::new(),
        own => format!("{own}c."),
    };
    format!("{part}{slices}g.{gb}gb{suffix}")
}

#[test]
fn mig_names_equal_those_of_nvidias_plugin() {
    let mut seen = 0;
    for name in MACHINES {
        let simulated = Simulated::new(name);
        let raw = simulated.start();
        let machine = simulated.installed.facts.machine();
        let instances = machine.gpus().iter().flat_map(|gpu| &gpu.mig);
        let devices: Vec<_> =
            instances.flat_map(|mig| &mig.instances).flat_map(|instance| &instance.compute).collect();
        for gpu in 0..raw.count().unwrap() {
            for mig in raw.migs(gpu) {
                let uuid = raw.uuid(mig).unwrap();
                let written = devices.iter().find(|device| device.uuid.as_str() == uuid);
                let written = &written.unwrap().profile;
                assert_eq!(worked_out(&raw, mig), *written, "{name} GPU {gpu}");
                let told = raw.name(mig);
                let (_, told) = told.split_once(" MIG ").unwrap();
                assert_eq!(told, split_profile(written).0, "what the driver calls it");
                seen += 1;
            }
        }
    }
    assert!(seen > 100, "{seen} MIG devices");
}
