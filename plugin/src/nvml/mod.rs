//! Safe calls to NVML, NVIDIA's management library. Only this module and the allocator's of `runtime` contain `unsafe` code in the
//! daemons; it makes no decisions. An [`Nvml`] belongs to the thread that loaded it, and everything obtained from it borrows it.
//!
//! Calls go through nvml-wrapper. Where it is wrong or has no such call, the raw function of nvml-wrapper-sys is called, and
//! a comment gives the reason. The error of a call is the code that NVML returned.
#![allow(unsafe_code)]

mod device;
mod error;
mod events;
mod mig;

use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use gantry_runtime::chain;
use nvml_wrapper::error::NvmlError as WrapperError;

pub use device::Remote;
pub use device::{Device, FabricInfo, Process};
pub use device::{RecoveryAction, RemappedRows};
pub use error::{Code, NvmlError};
pub use events::{Event, EventKind, EventSet};
pub use mig::{InstanceInfo, MigDevice, MigIds, MigMode, Placement};

use device::wrapped;

/// A loaded and initialised NVML. Dropping it shuts NVML down and unloads the library, so that the next load
/// gets the library of a driver that was replaced meanwhile.
pub struct Nvml {
    library: nvml_wrapper::Nvml,
    /// NVML is thread-safe, but one thread uses it: readings stay in order with the awaited events.
    _one_thread: PhantomData<*const ()>,
}

impl Nvml {
    /// Loads the library at `path` (a path, or a soname for the loader) and initialises it.
    ///
    /// # Errors
    /// When the library cannot be loaded, or finds no driver.
    pub fn load(path: &Path) -> Result<Self, NvmlError> {
        match nvml_wrapper::Nvml::builder().lib_path(path.as_os_str()).init() {
            Ok(library) => Ok(Self { library, _one_thread: PhantomData }),
            Err(WrapperError::LibloadingError(error)) => {
                Err(NvmlError::Load { path: PathBuf::from(path), problem: chain(&error) })
            }
            Err(error) => wrapped("nvmlInit_v2", None, Err(error)),
        }
    }

    /// Number of GPUs that the driver counts, including unreachable ones.
    pub fn device_count(&self) -> Result<u32, NvmlError> {
        wrapped("nvmlDeviceGetCount_v2", None, self.library.device_count())
    }

    /// The GPU at `index`, counted from 0 in PCIe order.
    ///
    /// # Errors
    /// The code that NVML returned; `GpuIsLost` for a GPU that fell off the bus.
    pub fn device(&self, index: u32) -> Result<Device<'_>, NvmlError> {
        let device = self.library.device_by_index(index);
        let device = wrapped("nvmlDeviceGetHandleByIndex_v2", Some(index), device)?;
        Ok(Device {
            nvml: self,
            // SAFETY: the handle stays with `self`, from which it came.
            handle: unsafe { device.handle() },
            index,
        })
    }

    /// Version of the kernel driver, e.g. `570.124.06`.
    pub fn driver_version(&self) -> Result<String, NvmlError> {
        let version = self.library.sys_driver_version();
        Ok(wrapped("nvmlSystemGetDriverVersion", None, version)?.trim().to_owned())
    }

    /// Newest CUDA version that the driver supports: major and minor.
    pub fn cuda_version(&self) -> Result<(u32, u32), NvmlError> {
        let version = self.library.sys_cuda_driver_version();
        let version = wrapped("nvmlSystemGetCudaDriverVersion_v2", None, version)?.unsigned_abs();
        Ok((version / 1000, version % 1000 / 10))
    }

    /// A new event set, with no GPU registered.
    pub fn event_set(&self) -> Result<EventSet<'_>, NvmlError> {
        EventSet::create(self)
    }
}
