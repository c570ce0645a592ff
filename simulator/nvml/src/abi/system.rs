//! The library as a whole: initialisation and shutdown, versions, the texts of return codes, processes by name.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings::{self as sys, nvmlReturn_t};

use super::args::{OutPointer, Status, fixed, text};
use super::call::run_outside;
use super::handle::Device;
use crate::library::StartError;

const fn slot(name: &str) -> usize {
    crate::names::slot_of(name)
}

fn start(slot: usize) -> nvmlReturn_t {
    run_outside(slot, |library, state| {
        library.start(state).map_err(|error| match error {
            StartError::DriverGone => Status::DRIVER_NOT_LOADED,
            StartError::Machine(_) => Status::UNKNOWN,
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlInit() -> nvmlReturn_t {
    const SLOT: usize = slot("nvmlInit");
    start(SLOT)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    const SLOT: usize = slot("nvmlInit_v2");
    start(SLOT)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> nvmlReturn_t {
    const SLOT: usize = slot("nvmlInitWithFlags");
    start(SLOT)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    const SLOT: usize = slot("nvmlShutdown");
    run_outside(SLOT, |library, _| if library.stop() { Ok(()) } else { Err(Status::UNINITIALIZED) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlErrorString(result: nvmlReturn_t) -> *const c_char {
    text(result).as_ptr()
}

nvml! {
    fn nvmlSystemGetDriverVersion(version: OutPointer<c_char>, length: c_uint) |call| {
        version.put_text(length, call.state.driver.version.as_ref().unwrap_or(&call.facts().driver))
    }

    fn nvmlSystemGetNVMLVersion(version: OutPointer<c_char>, length: c_uint) |call| {
        // NVML's own version is the driver's behind the major version of CUDA.
        let nvml = format!("{}.{}", call.facts().cuda / 1000, call.facts().driver);
        version.put_text(length, &nvml)
    }

    fn nvmlSystemGetCudaDriverVersion
    | nvmlSystemGetCudaDriverVersion_v2(version: OutPointer<c_int>) |call| {
        version.put(call.facts().cuda)
    }

    fn nvmlSystemGetDriverBranch(branch: OutPointer<sys::nvmlSystemDriverBranchInfo_t>, length: c_uint) |call| {
        branch.check_version(1)?;
        let major = call.facts().driver.split('.').next().unwrap_or_default().to_owned();
        let name = format!("r{major}_00");
        if length as usize <= name.len() {
            return Err(Status::INSUFFICIENT_SIZE);
        }
        let mut answer = branch.get()?;
        answer.branch = fixed(&name);
        branch.put(answer)
    }

    fn nvmlSystemGetProcessName(pid: c_uint, name: OutPointer<c_char>, length: c_uint) |call| {
        let mut processes = call.state.gpus.values().flat_map(|gpu| &gpu.processes);
        if !processes.any(|process| process.pid == pid) {
            return Err(Status::NOT_FOUND);
        }
        name.put_text(length, &format!("process-{pid}"))
    }

    fn nvmlSystemGetTopologyGpuSet(cpu: c_uint, count: OutPointer<c_uint>, devices: OutPointer<Device>) |call| {
        let present = call.session.present.iter().filter_map(|index| call.facts().gpus.get(*index));
        let near = present.filter(|gpu| gpu.cpus.contains(&cpu));
        let near: Vec<Device> = near.map(|gpu| Device::whole(gpu.index)).collect();
        put_set(count, devices, &near)
    }

    fn nvmlGetExcludedDeviceCount(count: OutPointer<c_uint>) |_| {
        count.put(0)
    }
}

/// Writes a set of GPUs: a count of zero asks how many there are, another is filled up to.
pub(super) fn put_set(
    count: OutPointer<c_uint>,
    devices: OutPointer<Device>,
    set: &[Device],
) -> Result<(), Status> {
    let there = c_uint::try_from(set.len()).unwrap_or(c_uint::MAX);
    let asked = count.get()?;
    if asked == 0 {
        return count.put(there);
    }
    devices.check()?;
    let filled = asked.min(there);
    devices.put_all(set.get(..filled as usize).unwrap_or(set))?;
    count.put(filled)
}
