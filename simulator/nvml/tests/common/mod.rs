//! What the tests share: a machine of `simulator/machines` installed into a folder of its own, and its library loaded.
#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "a module of each test file, which uses a part of it"
)]

use std::ffi::{CStr, c_char, c_uint};
use std::path::{Path, PathBuf};

use gantry_nvml_sim::{PlacedMachine, place};
use nvml_wrapper_sys::bindings as sys;

/// The machine files of the project.
pub const MACHINES: [&str; 15] = [
    "a100-1x-mig",
    "a30-4x-mig",
    "a40-8x-bridged",
    "b200-8x-mig",
    "dgx-a100",
    "dgx-a100-mig",
    "dgx1-v100",
    "dgx2-16x-v100",
    "h200-1x-vm",
    "h200-8x-mig",
    "hgx-h100",
    "hgx-h100-mig",
    "l4-4x-pcie",
    "rtx-pro-6000-4x-mig",
    "workstation-2x",
];

pub fn machines_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../machines")
}

/// A machine in a folder that goes when this is dropped.
pub struct Simulated {
    pub installed: PlacedMachine,
    folder: tempfile::TempDir,
}

impl Simulated {
    pub fn new(machine: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = machines_folder().join(format!("{machine}.yaml"));
        Self {
            installed: place(&std::fs::read_to_string(&file).unwrap(), &file, folder.path()).unwrap(),
            folder,
        }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The library, initialised.
    pub fn start(&self) -> Raw {
        let raw = self.load();
        assert_eq!(raw.init(), OK);
        raw
    }

    /// The library, loaded and no more.
    pub fn load(&self) -> Raw {
        Raw::load(&self.installed.library)
    }
}

pub const OK: u32 = sys::nvmlReturn_enum_NVML_SUCCESS;
pub const UNINITIALIZED: u32 = sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED;
pub const INVALID_ARGUMENT: u32 = sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
pub const NOT_SUPPORTED: u32 = sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
pub const NOT_FOUND: u32 = sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
pub const INSUFFICIENT_SIZE: u32 = sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
pub const DRIVER_NOT_LOADED: u32 = sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED;
pub const TIMEOUT: u32 = sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT;
pub const GPU_IS_LOST: u32 = sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST;
pub const VERSION_MISMATCH: u32 = sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
pub const UNKNOWN: u32 = sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN;

/// The version word of a versioned struct.
pub fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}

/// A loaded library, called without anybody between.
pub struct Raw(pub sys::NvmlLib);

/// Calls a function of the table: `call!(raw, nvmlName(arguments))`.
#[macro_export]
macro_rules! call {
    ($raw:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let function = *$raw.0.$name.as_ref().unwrap();
        // SAFETY: pointers are to locals of the declared types, or null where the test means it.
        unsafe {
            function($($argument),*)
        }
    }};
}

impl Raw {
    pub fn load(library: &Path) -> Self {
        // SAFETY: it is our own library; loading it runs no code of its own.
        let table = unsafe { sys::NvmlLib::new(library) };
        Self(table.unwrap())
    }

    pub fn init(&self) -> u32 {
        call!(self, nvmlInit_v2())
    }

    pub fn shutdown(&self) -> u32 {
        call!(self, nvmlShutdown())
    }

    pub fn count(&self) -> Result<u32, u32> {
        let mut count: c_uint = 0;
        result(call!(self, nvmlDeviceGetCount_v2(&raw mut count)), count)
    }

    pub fn device(&self, index: u32) -> Result<sys::nvmlDevice_t, u32> {
        let mut device = std::ptr::null_mut();
        let code = call!(self, nvmlDeviceGetHandleByIndex_v2(index, &raw mut device));
        result(code, device)
    }

    pub fn uuid(&self, device: sys::nvmlDevice_t) -> Result<String, u32> {
        let mut buffer: [c_char; 96] = [0; 96];
        let code = call!(self, nvmlDeviceGetUUID(device, buffer.as_mut_ptr(), 96));
        result(code, text(&buffer))
    }

    pub fn event_set(&self) -> sys::nvmlEventSet_t {
        let mut set = std::ptr::null_mut();
        assert_eq!(call!(self, nvmlEventSetCreate(&raw mut set)), OK);
        set
    }

    /// An event set that listens to Xids of all GPUs.
    pub fn listening(&self) -> sys::nvmlEventSet_t {
        let set = self.event_set();
        for index in 0..self.count().unwrap() {
            let types = u64::from(sys::nvmlEventTypeXidCriticalError);
            let device = self.device(index).unwrap();
            assert_eq!(call!(self, nvmlDeviceRegisterEvents(device, types, set)), OK);
        }
        set
    }

    pub fn wait(&self, set: sys::nvmlEventSet_t, milliseconds: u32) -> Result<sys::nvmlEventData_t, u32> {
        let mut data = sys::nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: 0,
            computeInstanceId: 0,
        };
        result(call!(self, nvmlEventSetWait_v2(set, &raw mut data, milliseconds)), data)
    }
}

pub fn result<T>(code: u32, value: T) -> Result<T, u32> {
    if code == OK { Ok(value) } else { Err(code) }
}

/// The text in a buffer that C has filled.
pub fn text(buffer: &[c_char]) -> String {
    assert!(buffer.contains(&0), "no final zero");
    // SAFETY: a zero stands within the buffer.
    let text = unsafe { CStr::from_ptr(buffer.as_ptr()) };
    text.to_str().unwrap().to_owned()
}
