//! The C functions called as C calls them: every rule that a careless client breaks.
#![allow(
    unsafe_code,
    clippy::macro_metavars_in_unsafe,
    clippy::unwrap_used,
    clippy::panic,
    reason = "the C functions are called as C calls them, each block says why it is sound; a test stops at what is wrong"
)]

use std::ffi::{CString, c_uint, c_ulonglong};

use gantry_nvml_sim::names::NAMES;
use nvml_wrapper_sys::bindings as sys;

mod common;
use common::*;

#[test]
fn every_function_of_the_header_is_there() {
    let simulated = Simulated::new("workstation-2x");
    // SAFETY: our own library; symbols are looked up, not called.
    let library = unsafe { libloading::Library::new(&simulated.installed.library) }.unwrap();
    for name in NAMES {
        // SAFETY: as above.
        let symbol = unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) };
        assert!(symbol.is_ok(), "{name}");
    }
    assert!(NAMES.len() >= 425);
}

#[test]
fn calls_fail_before_init_and_after_the_last_shutdown() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.load();
    assert_eq!(raw.count(), Err(UNINITIALIZED));
    assert_eq!(raw.shutdown(), UNINITIALIZED);
    assert_eq!((raw.init(), raw.init()), (OK, OK));
    assert_eq!(raw.shutdown(), OK);
    assert_eq!(raw.count(), Ok(2), "one user is left");
    assert_eq!(raw.shutdown(), OK);
    assert_eq!(raw.count(), Err(UNINITIALIZED));
    let mut set = std::ptr::null_mut();
    assert_eq!(call!(raw, nvmlEventSetCreate(&raw mut set)), UNINITIALIZED);
}

#[test]
fn a_function_that_is_not_simulated_says_so() {
    let raw = Simulated::new("workstation-2x").start();
    let device = raw.device(0).unwrap();
    assert_eq!(call!(raw, nvmlDeviceSetPowerManagementLimit(device, 100)), NOT_SUPPORTED);
}

#[test]
fn forged_handles_and_null_pointers_are_errors() {
    let raw = Simulated::new("workstation-2x").start();
    let device = raw.device(0).unwrap();
    let forged = [
        std::ptr::null_mut(),
        std::ptr::without_provenance_mut(0xdead_beef),
        device.map_addr(|address| address + 1),
        device.map_addr(|address| address + (9 << 16)),
    ];
    for handle in forged {
        assert_eq!(raw.uuid(handle), Err(INVALID_ARGUMENT));
        assert_eq!(raw.wait(handle.cast(), 0).map(|_| ()), Err(INVALID_ARGUMENT));
    }
    assert_eq!(raw.wait(device.cast(), 0).map(|_| ()), Err(INVALID_ARGUMENT));
    assert_eq!(call!(raw, nvmlDeviceGetCount_v2(std::ptr::null_mut())), INVALID_ARGUMENT);
    assert_eq!(call!(raw, nvmlDeviceGetUUID(device, std::ptr::null_mut(), 96)), INVALID_ARGUMENT);
    assert_eq!(call!(raw, nvmlEventSetWait_v2(raw.event_set(), std::ptr::null_mut(), 0)), INVALID_ARGUMENT);
    let mut nothing = std::ptr::null_mut();
    assert_eq!(call!(raw, nvmlDeviceGetHandleByUUID(std::ptr::null(), &raw mut nothing)), INVALID_ARGUMENT);
}

#[test]
fn a_buffer_that_is_too_small_is_not_overrun() {
    let raw = Simulated::new("workstation-2x").start();
    let device = raw.device(0).unwrap();
    let mut buffer = [7; 96];
    assert_eq!(call!(raw, nvmlDeviceGetUUID(device, buffer.as_mut_ptr(), 40)), INSUFFICIENT_SIZE);
    assert!(buffer.iter().all(|byte| *byte == 7));
    assert_eq!(call!(raw, nvmlDeviceGetUUID(device, buffer.as_mut_ptr(), 41)), OK);
    assert_eq!(buffer[40], 0);
    assert_eq!(buffer[41], 7);
}

#[test]
fn lookups_tell_malformed_from_unknown() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.start();
    let by_uuid = |uuid: &str| {
        let (uuid, mut device) = (CString::new(uuid).unwrap(), std::ptr::null_mut());
        call!(raw, nvmlDeviceGetHandleByUUID(uuid.as_ptr(), &raw mut device))
    };
    assert_eq!(by_uuid(&simulated.installed.facts.gpus[1].uuid), OK);
    assert_eq!(by_uuid("GPU-00000000-0000-0000-0000-000000000000"), NOT_FOUND);
    assert_eq!(by_uuid("1"), INVALID_ARGUMENT);
    let by_bus = |bus: &str| {
        let (bus, mut device) = (CString::new(bus).unwrap(), std::ptr::null_mut());
        call!(raw, nvmlDeviceGetHandleByPciBusId_v2(bus.as_ptr(), &raw mut device))
    };
    assert_eq!(by_bus("00000000:0C:00.0"), OK);
    assert_eq!(by_bus("0000:0c:00.0"), OK);
    assert_eq!(by_bus("0000:7f:00.0"), NOT_FOUND);
    assert_eq!(by_bus("somewhere"), INVALID_ARGUMENT);
}

#[test]
fn a_gpu_is_found_by_its_uuid_in_text_and_in_bytes() {
    let simulated = Simulated::new("hgx-h100");
    let raw = simulated.start();
    let uuid = &simulated.installed.facts.gpus[5].uuid;
    let find = |kind: u32, value: sys::nvmlUUIDValue_t| {
        let question = sys::nvmlUUID_v1_t { version: version::<sys::nvmlUUID_v1_t>(1), type_: kind, value };
        let mut device = std::ptr::null_mut();
        let code = call!(raw, nvmlDeviceGetHandleByUUIDV(&raw const question, &raw mut device));
        result(code, device)
    };
    let mut letters = [0; 41];
    for (place, byte) in letters.iter_mut().zip(uuid.bytes()) {
        *place = byte as std::ffi::c_char;
    }
    let text = find(sys::nvmlUUIDType_t_NVML_UUID_TYPE_ASCII, sys::nvmlUUIDValue_t { str_: letters });
    assert_eq!(text, Ok(raw.device(5).unwrap()));
    let digits: String = uuid["GPU-".len()..].chars().filter(|c| *c != '-').collect();
    let number = u128::from_str_radix(&digits, 16).unwrap();
    let bytes = sys::nvmlUUIDValue_t { bytes: number.to_be_bytes() };
    assert_eq!(find(sys::nvmlUUIDType_t_NVML_UUID_TYPE_BINARY, bytes), Ok(raw.device(5).unwrap()));
}

#[test]
fn a_wrong_version_word_is_a_version_mismatch() {
    let raw = Simulated::new("hgx-h100").start();
    let device = raw.device(0).unwrap();
    // SAFETY: plain C data, for which zero is valid.
    let (mut memory, mut fabric): (sys::nvmlMemory_v2_t, sys::nvmlGpuFabricInfo_v3_t) =
        unsafe { std::mem::zeroed() };
    let memory_size = size_of::<sys::nvmlMemory_v2_t>() as u32;
    for wrong in [0, 2, memory_size | 1 << 24, memory_size | 3 << 24, (memory_size + 8) | 2 << 24] {
        memory.version = wrong;
        let code = call!(raw, nvmlDeviceGetMemoryInfo_v2(device, &raw mut memory));
        assert_eq!(code, VERSION_MISMATCH, "{wrong:#x}");
    }
    let fabric_size = size_of::<sys::nvmlGpuFabricInfo_v3_t>() as u32;
    for wrong in [0, 3, fabric_size | 1 << 24, fabric_size | 2 << 24, fabric_size | 4 << 24] {
        fabric.version = wrong;
        let code = call!(raw, nvmlDeviceGetGpuFabricInfoV(device, &raw mut fabric));
        assert_eq!(code, VERSION_MISMATCH, "{wrong:#x}");
    }
    memory.version = version::<sys::nvmlMemory_v2_t>(2);
    assert_eq!(call!(raw, nvmlDeviceGetMemoryInfo_v2(device, &raw mut memory)), OK);
}

#[test]
fn structs_have_the_layout_of_the_header() {
    // Sizes that the C compiler gives NVIDIA's structs on x86-64, and the version words that follow from them.
    assert_eq!(size_of::<sys::nvmlPciInfo_t>(), 68);
    assert_eq!(size_of::<sys::nvmlEventData_t>(), 32);
    assert_eq!(size_of::<sys::nvmlFieldValue_t>(), 40);
    assert_eq!(size_of::<sys::nvmlProcessInfo_v1_t>(), 16);
    assert_eq!(size_of::<sys::nvmlProcessInfo_v2_t>(), 24);
    assert_eq!(size_of::<sys::nvmlGpuFabricInfo_t>(), 28);
    assert_eq!(version::<sys::nvmlMemory_v2_t>(2), 0x0200_0028);
    assert_eq!(version::<sys::nvmlGpuFabricInfo_v2_t>(2), 0x0200_0024);
    assert_eq!(version::<sys::nvmlGpuFabricInfo_v3_t>(3), 0x0300_0028);
    assert_eq!(version::<sys::nvmlUUID_v1_t>(1), 0x0100_0034);
}

#[test]
fn the_old_pci_info_does_not_write_beyond_its_struct() {
    let raw = Simulated::new("dgx-a100").start();
    let device = raw.device(0).unwrap();
    let mut buffer = [0x55_u8; 68];
    // SAFETY: the library is ours, and the function has this signature.
    let code = unsafe {
        let library = raw
            .0
            .__library
            .get::<unsafe extern "C" fn(sys::nvmlDevice_t, *mut u8) -> u32>(b"nvmlDeviceGetPciInfo_v2");
        library.unwrap()(device, buffer.as_mut_ptr())
    };
    assert_eq!(code, OK);
    assert_eq!(&buffer[..12], b"0000:07:00.0");
    assert!(buffer[52..].iter().all(|byte| *byte == 0x55));
}

#[test]
fn lists_tell_how_much_room_they_need() {
    use gantry_nvml_sim::control::Process;
    let simulated = Simulated::new("workstation-2x");
    let processes = [41, 42].map(|pid| Process { pid, memory_mib: 100, ..Process::default() }).to_vec();
    simulated.installed.controller.set_processes(1, processes).unwrap();
    let raw = simulated.start();
    let device = raw.device(1).unwrap();
    let mut count: c_uint = 0;
    let list = |count: &mut c_uint, room: *mut sys::nvmlProcessInfo_t| {
        call!(raw, nvmlDeviceGetComputeRunningProcesses_v3(device, count, room))
    };
    assert_eq!(list(&mut count, std::ptr::null_mut()), INSUFFICIENT_SIZE);
    assert_eq!(count, 2);
    // SAFETY: plain C data, for which zero is valid.
    let mut found: [sys::nvmlProcessInfo_t; 2] = unsafe { std::mem::zeroed() };
    assert_eq!(list(&mut count, found.as_mut_ptr()), OK);
    assert_eq!(found.map(|process| process.pid), [41, 42]);
    assert_eq!(found[0].usedGpuMemory, 100 << 20);
    assert_eq!(found[0].gpuInstanceId, u32::MAX);
    let mut none = 0;
    assert_eq!(
        call!(
            raw,
            nvmlDeviceGetComputeRunningProcesses_v3(
                raw.device(0).unwrap(),
                &raw mut none,
                std::ptr::null_mut()
            )
        ),
        OK
    );
}

#[test]
fn event_types_beyond_what_the_gpu_reports_are_refused() {
    let raw = Simulated::new("workstation-2x").start();
    let device = raw.device(0).unwrap();
    let mut types: c_ulonglong = 0;
    assert_eq!(call!(raw, nvmlDeviceGetSupportedEventTypes(device, &raw mut types)), OK);
    assert_ne!(types & u64::from(sys::nvmlEventTypeXidCriticalError), 0);
    let ecc = u64::from(sys::nvmlEventTypeDoubleBitEccError);
    assert_eq!(types & ecc, 0, "a GeForce counts no ECC errors");
    let set = raw.event_set();
    assert_eq!(call!(raw, nvmlDeviceRegisterEvents(device, types | ecc, set)), NOT_SUPPORTED);
    assert_eq!(call!(raw, nvmlDeviceRegisterEvents(device, types, set)), OK);
    assert_eq!(call!(raw, nvmlEventSetFree(set)), OK);
    assert_eq!(call!(raw, nvmlEventSetFree(set)), INVALID_ARGUMENT);
    assert_eq!(call!(raw, nvmlDeviceRegisterEvents(device, types, set)), INVALID_ARGUMENT);
}

#[test]
fn a_machine_file_that_cannot_be_used_fails_the_initialisation() {
    let simulated = Simulated::new("workstation-2x");
    let raw = simulated.load();
    std::fs::write(&simulated.installed.machine_file, "gpus: [{index: 4}]\npaths: [X]\n").unwrap();
    assert_eq!(raw.init(), UNKNOWN);
    assert_eq!(raw.count(), Err(UNINITIALIZED));
    std::fs::remove_file(&simulated.installed.machine_file).unwrap();
    assert_eq!(raw.init(), UNKNOWN);
    std::fs::write(&simulated.installed.machine_file, "gpus: [{index: 0}]\npaths: [X]\n").unwrap();
    assert_eq!(raw.init(), OK);
    assert_eq!(raw.count(), Ok(1), "the file is read at each first initialisation");
}

#[test]
fn every_code_has_a_text() {
    let raw = Simulated::new("workstation-2x").load();
    let text = |code| {
        let pointer = call!(raw, nvmlErrorString(code));
        // SAFETY: the library answers with static texts.
        unsafe { std::ffi::CStr::from_ptr(pointer) }.to_str().unwrap().to_owned()
    };
    assert_eq!(text(OK), "Success");
    assert_eq!(text(GPU_IS_LOST), "GPU is lost");
    assert_eq!(text(123_456), "Unknown Error");
    let unknown = (1..31).filter(|code| text(*code) == "Unknown Error");
    assert_eq!(unknown.count(), 0);
}
