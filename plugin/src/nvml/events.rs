//! NVML event sets: waits for Xids and changes of the MIG configuration. An event keeps the ids of the MIG
//! instances to which it is confined.
//!
//! Raw calls: nvml-wrapper drops the MIG ids of events, and frees the whole set when one registration fails.

use std::ffi::{c_uint, c_ulonglong};
use std::time::Duration;

use nvml_wrapper_sys::bindings as sys;

use super::device::instance;
use super::device::{check, symbol};
use super::{Code, Device, Nvml, NvmlError};

/// GPUs registered for events; freed when dropped.
pub struct EventSet<'nvml> {
    nvml: &'nvml Nvml,
    set: sys::nvmlEventSet_t,
    /// Index of each registered device handle.
    registered: Vec<Device<'nvml>>,
}

/// An event reported by the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Index of the GPU at registration; `None` if the driver names no registered GPU.
    pub gpu: Option<u32>,
    pub kind: EventKind,
    /// GPU instance to which it is confined, on a GPU in MIG mode.
    pub gpu_instance: Option<u32>,
    /// Compute instance to which it is confined, on a GPU in MIG mode.
    pub compute_instance: Option<u32>,
}

/// The type of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// An Xid was raised.
    Xid(u64),
    /// The GPU's MIG mode or instances changed.
    MigConfig,
}

const MIG: c_ulonglong = sys::nvmlEventMigConfigChange as c_ulonglong;
const XID: c_ulonglong = sys::nvmlEventTypeXidCriticalError as c_ulonglong;

impl<'nvml> EventSet<'nvml> {
    pub(super) fn create(nvml: &'nvml Nvml) -> Result<Self, NvmlError> {
        let (name, function) = symbol!(nvml, nvmlEventSetCreate)?;
        let _call = nvml.trace.begin(name, None);
        let mut set = std::ptr::null_mut();
        // SAFETY: `nvml` is initialised; the out-pointer is a local of the declared type.
        check(name, None, unsafe { function(&raw mut set) })?;
        Ok(Self { nvml, set, registered: Vec::new() })
    }

    /// Registers `device` for Xids, and for MIG configuration changes if it supports them. On failure the set
    /// is unchanged.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` for a GPU without events.
    pub fn register(&mut self, device: Device<'nvml>) -> Result<(), NvmlError> {
        let supported = device.get(symbol!(self.nvml, nvmlDeviceGetSupportedEventTypes)?, 0)?;
        let (name, function) = symbol!(self.nvml, nvmlDeviceRegisterEvents)?;
        let register = |kinds: c_ulonglong| {
            let _call = self.nvml.trace.begin(name, Some(device.index));
            // SAFETY: handle and set came from the NVML that `self` borrows.
            check(name, Some(device.index), unsafe { function(device.handle, kinds, self.set) })
        };
        match supported & (XID | MIG) {
            kinds if kinds & XID == 0 => {
                check(name, Some(device.index), sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED)?;
            }
            // Some drivers list MIG events as supported but reject the registration; Xids still work there.
            kinds => register(kinds).or_else(|error| match error.is_driver_gone() || kinds == XID {
                true => Err(error),
                false => register(XID),
            })?,
        }
        self.registered.push(device);
        Ok(())
    }

    /// Whether no GPU is registered, so that there is nothing to wait for.
    pub fn is_empty(&self) -> bool {
        self.registered.is_empty()
    }

    /// The next event; `None` after `timeout` without one.
    ///
    /// # Errors
    /// The code that NVML returned. The driver or a GPU may be gone: do not wait again immediately.
    pub fn wait(&self, timeout: Duration) -> Result<Option<Event>, NvmlError> {
        let (name, function) = symbol!(self.nvml, nvmlEventSetWait_v2)?;
        let mut data = sys::nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: c_uint::MAX,
            computeInstanceId: c_uint::MAX,
        };
        let _call = self.nvml.trace.begin(name, None);
        let timeout = c_uint::try_from(timeout.as_millis()).unwrap_or(c_uint::MAX);
        // SAFETY: the set came from the NVML that `self` borrows; the out-pointer is a local of the declared type.
        let answer = check(name, None, unsafe { function(self.set, &raw mut data, timeout) });
        match answer {
            Err(error) if error.code() == Some(Code::Timeout) => return Ok(None),
            answer => answer?,
        }
        // No other types are registered; any other event is ignored.
        let kind = match data.eventType {
            kind if kind & XID != 0 => EventKind::Xid(data.eventData),
            kind if kind & MIG != 0 => EventKind::MigConfig,
            _ => return Ok(None),
        };
        Ok(Some(Event {
            gpu: self.registered.iter().find(|device| device.handle == data.device).map(Device::index),
            kind,
            gpu_instance: instance(data.gpuInstanceId),
            compute_instance: instance(data.computeInstanceId),
        }))
    }
}

impl Drop for EventSet<'_> {
    fn drop(&mut self) {
        if let Ok((_, free)) = symbol!(self.nvml, nvmlEventSetFree) {
            // SAFETY: made by `create`, freed once; a failure (the driver is gone) leaves nothing to free.
            unsafe {
                free(self.set);
            }
        }
    }
}
