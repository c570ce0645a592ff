//! NVML's event sets: waiting for an Xid. An event keeps the ids of the MIG instances it is confined to. No judgement here.

use std::ffi::{c_uint, c_ulonglong};
use std::time::Duration;

use nvml_wrapper_sys::bindings as sys;

use super::call::{check, symbol};
use super::device::instance;
use super::{Code, Device, Nvml, NvmlError};

/// Registrations of GPUs for Xid events; freed when dropped.
pub struct EventSet<'nvml> {
    nvml: &'nvml Nvml,
    set: sys::nvmlEventSet_t,
    /// Whom the handles in events belong to.
    registered: Vec<Device<'nvml>>,
}

/// An Xid that the driver raised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Index of the GPU, as it was registered; `None` if the driver names none that was.
    pub gpu: Option<u32>,
    /// The Xid.
    pub xid: u64,
    /// GPU instance it is confined to, on a GPU in MIG mode.
    pub gpu_instance: Option<u32>,
    /// Compute instance it is confined to, on a GPU in MIG mode.
    pub compute_instance: Option<u32>,
}

const XID: c_ulonglong = sys::nvmlEventTypeXidCriticalError as c_ulonglong;

impl<'nvml> EventSet<'nvml> {
    pub(super) fn create(nvml: &'nvml Nvml) -> Result<Self, NvmlError> {
        let (name, function) = symbol!(nvml.table, nvmlEventSetCreate)?;
        let mut set = std::ptr::null_mut();
        // SAFETY: `nvml` is initialised; the out-pointer is a local of the declared type.
        check(name, None, unsafe { function(&raw mut set) })?;
        Ok(Self {
            nvml,
            set,
            registered: Vec::new(),
        })
    }

    /// Adds `device`'s Xids to what is waited for. A failure leaves the set as it was.
    ///
    /// # Errors
    /// The code NVML answered with; `NotSupported` for a GPU that raises no events.
    pub fn register(&mut self, device: Device<'nvml>) -> Result<(), NvmlError> {
        let supported = device.get(symbol!(self.nvml.table, nvmlDeviceGetSupportedEventTypes)?, 0)?;
        let (name, function) = symbol!(self.nvml.table, nvmlDeviceRegisterEvents)?;
        let code = if supported & XID == 0 {
            sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED
        } else {
            // SAFETY: handle and set came from the NVML that `self` borrows.
            unsafe { function(device.handle, XID, self.set) }
        };
        check(name, Some(device.index), code)?;
        self.registered.push(device);
        Ok(())
    }

    /// Whether no GPU is registered: there is nothing to wait for.
    pub fn is_empty(&self) -> bool {
        self.registered.is_empty()
    }

    /// The next event; `None` if there was none for `timeout`.
    ///
    /// # Errors
    /// The code NVML answered with. The driver or a GPU may be gone then: do not wait again at once.
    pub fn wait(&self, timeout: Duration) -> Result<Option<Event>, NvmlError> {
        let (name, function) = symbol!(self.nvml.table, nvmlEventSetWait_v2)?;
        let mut data = sys::nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: c_uint::MAX,
            computeInstanceId: c_uint::MAX,
        };
        let timeout = c_uint::try_from(timeout.as_millis()).unwrap_or(c_uint::MAX);
        // SAFETY: the set came from the NVML that `self` borrows; the out-pointer is a local of the declared type.
        let answer = check(name, None, unsafe { function(self.set, &raw mut data, timeout) });
        match answer {
            Err(error) if error.code() == Some(Code::Timeout) => return Ok(None),
            answer => answer?,
        }
        // Nothing else was registered for; a driver that sends more is not heard.
        Ok((data.eventType & XID != 0).then(|| Event {
            gpu: self
                .registered
                .iter()
                .find(|device| device.handle == data.device)
                .map(Device::index),
            xid: data.eventData,
            gpu_instance: instance(data.gpuInstanceId),
            compute_instance: instance(data.computeInstanceId),
        }))
    }
}

impl Drop for EventSet<'_> {
    fn drop(&mut self) {
        if let Ok((_, free)) = symbol!(self.nvml.table, nvmlEventSetFree) {
            // SAFETY: made by `create`, freed once; a failure (the driver is gone) leaves nothing to free.
            unsafe {
                free(self.set);
            }
        }
    }
}
