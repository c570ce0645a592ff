//! Safe calls to NVML, NVIDIA's management library. Only this module and the allocator's of `runtime` contain `unsafe` code in the
//! daemons; it makes no decisions. An [`Nvml`] belongs to the thread that loaded it, and everything obtained from it borrows it.
//!
//! Calls go through nvml-wrapper. Where it is wrong or has no such call, the raw function of nvml-wrapper-sys is called, and
//! a comment gives the reason. The error of a call is the code that NVML returned.
#![allow(unsafe_code)]

mod device;
mod error;
mod events;
mod image;
mod instances;
mod mig;
mod telemetry;
mod trace;

use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use gantry_runtime::chain;
use gantry_topology::machine::MAX_GPUS;
use nvml_wrapper::error::NvmlError as WrapperError;

pub use device::Remote;
pub use device::{ComputeMode, Device, FabricHealth, FabricInfo, FabricStatus, FabricStep, Process};
pub use device::{RecoveryAction, RemappedRows};
pub use error::{Code, NvmlError};
pub use events::{Event, EventKind, EventSet};
pub use instances::{ComputeInstance, GpuInstance};
pub use mig::{InstanceInfo, MigControl, MigDevice, MigIds, MigMode, Placement};
pub use telemetry::{EccSpan, FieldValue, MemoryUse, ProfileSample, ProfilingMetric, Telemetry};
pub use trace::{CallTrace, TracedCall};

use device::wrapped;

const INIT: &str = "nvmlInit_v2";

/// A loaded and initialised NVML. Dropping it shuts NVML down and unloads the library, so that the next load
/// gets the library of a driver that was replaced meanwhile.
pub struct Nvml {
    library: nvml_wrapper::Nvml,
    trace: CallTrace,
    /// NVML is thread-safe, but one thread uses it: readings stay in order with the awaited events.
    _one_thread: PhantomData<*const ()>,
}

impl Nvml {
    /// Loads the library at `path` (a path, or a soname for the loader) and initialises it.
    ///
    /// # Errors
    /// When the library is incomplete, cannot be loaded, or finds no driver.
    pub fn load(path: &Path) -> Result<Self, NvmlError> {
        Self::load_traced(path, &CallTrace::default())
    }

    /// As [`Nvml::load`]; `trace` has the call under way.
    pub fn load_traced(path: &Path, trace: &CallTrace) -> Result<Self, NvmlError> {
        for file in candidates(path) {
            // A file that is missing is the loader's to report.
            match image::check(&file) {
                Ok(()) => break,
                Err(image::ImageError::Read(error)) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(NvmlError::Load { path: file, problem: error.to_string() });
                }
            }
        }
        let begun = trace.begin(INIT, None);
        let loaded = nvml_wrapper::Nvml::builder().lib_path(path.as_os_str()).init();
        drop(begun);
        match loaded {
            Ok(library) => Ok(Self { library, trace: trace.clone(), _one_thread: PhantomData }),
            Err(WrapperError::LibloadingError(error)) => {
                Err(NvmlError::Load { path: PathBuf::from(path), problem: chain(&error) })
            }
            Err(error) => wrapped(INIT, None, Err(error)),
        }
    }

    /// Number of GPUs that the driver counts, including unreachable ones.
    ///
    /// # Errors
    /// The code that NVML returned, or a number of GPUs that no node has.
    pub fn device_count(&self) -> Result<u32, NvmlError> {
        let call = "nvmlDeviceGetCount_v2";
        let count = self.call(call, None, |nvml| nvml.device_count())?;
        if count as usize > MAX_GPUS {
            let returned = count.to_string();
            return Err(NvmlError::Unexpected { call, gpu: None, returned, expected: EXPECTED_GPUS });
        }
        Ok(count)
    }

    /// The GPU at `index`, counted from 0 in PCIe order.
    ///
    /// # Errors
    /// The code that NVML returned; `GpuIsLost` for a GPU that fell off the bus.
    pub fn device(&self, index: u32) -> Result<Device<'_>, NvmlError> {
        let call = "nvmlDeviceGetHandleByIndex_v2";
        let device = self.call(call, Some(index), |nvml| nvml.device_by_index(index))?;
        Ok(Device {
            nvml: self,
            // SAFETY: the handle stays with `self`, from which it came.
            handle: unsafe { device.handle() },
            index,
        })
    }

    /// Version of the kernel driver, e.g. `570.124.06`.
    pub fn driver_version(&self) -> Result<String, NvmlError> {
        let version = self.call("nvmlSystemGetDriverVersion", None, |nvml| nvml.sys_driver_version())?;
        Ok(version.trim().to_owned())
    }

    /// Newest CUDA version that the driver supports: major and minor.
    pub fn cuda_version(&self) -> Result<(u32, u32), NvmlError> {
        let call = "nvmlSystemGetCudaDriverVersion_v2";
        let version = self.call(call, None, |nvml| nvml.sys_cuda_driver_version())?.unsigned_abs();
        Ok((version / 1000, version % 1000 / 10))
    }

    /// A new event set, with no GPU registered.
    pub fn event_set(&self) -> Result<EventSet<'_>, NvmlError> {
        EventSet::create(self)
    }

    /// Calls `function` of nvml-wrapper, which makes the NVML call `name`.
    fn call<'n, T>(
        &'n self,
        name: &'static str,
        gpu: Option<u32>,
        function: impl FnOnce(&'n nvml_wrapper::Nvml) -> Result<T, WrapperError>,
    ) -> Result<T, NvmlError> {
        let _call = self.trace.begin(name, gpu);
        wrapped(name, gpu, function(&self.library))
    }
}

/// What a driver can count; checked where the constant is used.
const EXPECTED_GPUS: &str = "at most 32 GPUs";
const _: () = assert!(MAX_GPUS == 32);

/// The files that the loader may take for `library`: the path itself, or for a name the folders of the loader's variable
/// and the usual ones. The first one that exists counts.
fn candidates(library: &Path) -> Vec<PathBuf> {
    if library.components().count() > 1 || library.is_absolute() {
        return vec![library.to_owned()];
    }
    let named = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let named = std::env::split_paths(&named).map(|folder| folder.join(library));
    let usual = crate::root::find_library(library, Path::new("/"));
    named.chain(usual.is_absolute().then_some(usual)).collect()
}
