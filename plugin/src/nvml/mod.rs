//! Safe calls to NVML, NVIDIA's management library. Only this module and `footprint` contain `unsafe` code in the daemons; it makes no
//! decisions. An [`Nvml`] belongs to the thread that loaded it, and everything obtained from it borrows it.
//!
//! The calls go straight to the function table of nvml-wrapper-sys: of what discovery and health need, nvml-wrapper gets the
//! NVLink remote device type wrong, drops the MIG ids of events and cannot name a pair of GPUs, so one way for all is simpler.
#![allow(unsafe_code)]

mod call;
mod device;
mod error;
mod events;
mod find;
mod links;
mod mig;
mod state;

use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use gantry_runtime::chain;
use nvml_wrapper_sys::bindings as sys;

pub use device::{Device, FabricInfo, Process};
pub use error::{Code, NvmlError};
pub use events::{Event, EventKind, EventSet};
pub use find::find;
pub use links::Remote;
pub use mig::{InstanceInfo, MigDevice, MigIds, MigMode, Placement};
pub use state::{RecoveryAction, RemappedRows};

use call::{check, symbol, text_of};

/// A loaded and initialised NVML. Dropping it shuts NVML down and unloads the library, so that the next load
/// gets the library of a driver that was replaced meanwhile.
pub struct Nvml {
    table: sys::NvmlLib,
    /// NVML is thread-safe, but one thread uses it: readings stay in order with the awaited events.
    _one_thread: PhantomData<*const ()>,
}

impl Nvml {
    /// Loads the library at `path` (a path, or a soname for the loader) and initialises it.
    ///
    /// # Errors
    /// When the library cannot be loaded, or finds no driver.
    pub fn load(path: &Path) -> Result<Self, NvmlError> {
        // SAFETY: loading runs the library's initialisers, which NVML's contract allows any program to do.
        let table = unsafe { sys::NvmlLib::new(path) }.map_err(|problem| NvmlError::Load {
            path: PathBuf::from(path),
            problem: chain(&problem),
        })?;
        let (name, init) = symbol!(table, nvmlInit_v2)?;
        // SAFETY: nvmlInit_v2 takes nothing and may be called at any time.
        check(name, None, unsafe { init() })?;
        Ok(Self {
            table,
            _one_thread: PhantomData,
        })
    }

    /// Number of GPUs that the driver counts, including unreachable ones.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn device_count(&self) -> Result<u32, NvmlError> {
        let (name, function) = symbol!(self.table, nvmlDeviceGetCount_v2)?;
        let mut count = 0;
        // SAFETY: `self` is initialised; the out-pointer is a local of the declared type.
        check(name, None, unsafe { function(&raw mut count) })?;
        Ok(count)
    }

    /// The GPU at `index`, counted from 0 in PCIe order.
    ///
    /// # Errors
    /// The code that NVML returned; `GpuIsLost` for a GPU that fell off the bus.
    pub fn device(&self, index: u32) -> Result<Device<'_>, NvmlError> {
        let (name, function) = symbol!(self.table, nvmlDeviceGetHandleByIndex_v2)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `self` is initialised; the out-pointer is a local of the declared type.
        check(name, Some(index), unsafe { function(index, &raw mut handle) })?;
        Ok(Device {
            nvml: self,
            handle,
            index,
        })
    }

    /// Version of the kernel driver, e.g. `570.124.06`.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn driver_version(&self) -> Result<String, NvmlError> {
        let (name, function) = symbol!(self.table, nvmlSystemGetDriverVersion)?;
        // SAFETY: `self` is initialised; `text_of` hands over a buffer and its true length.
        text_of(name, None, |buffer, length| unsafe { function(buffer, length) })
    }

    /// Newest CUDA version that the driver supports: major and minor.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn cuda_version(&self) -> Result<(u32, u32), NvmlError> {
        let (name, function) = symbol!(self.table, nvmlSystemGetCudaDriverVersion_v2)?;
        let mut version = 0;
        // SAFETY: `self` is initialised; the out-pointer is a local of the declared type.
        check(name, None, unsafe { function(&raw mut version) })?;
        let version = version.unsigned_abs();
        Ok((version / 1000, version % 1000 / 10))
    }

    /// A new event set, with no GPU registered.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn event_set(&self) -> Result<EventSet<'_>, NvmlError> {
        EventSet::create(self)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        if let Ok((_, shutdown)) = symbol!(self.table, nvmlShutdown) {
            // SAFETY: initialised once in `load`; devices and event sets borrow `self`, so none is left. A failure leaves nothing
            // to do: the library goes either way.
            unsafe {
                shutdown();
            }
        }
    }
}
