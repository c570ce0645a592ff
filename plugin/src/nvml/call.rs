//! Helpers for NVML calls: through nvml-wrapper, or raw through its function table where nvml-wrapper is wrong or has no
//! such call. The raw helpers pass pointers to their own locals only.

use std::ffi::c_uint;

use nvml_wrapper::error::NvmlError as WrapperError;
use nvml_wrapper_sys::bindings as sys;

use super::{Code, Device, NvmlError};

/// Name and function pointer of a raw call, or the error that the library lacks it.
macro_rules! symbol {
    ($nvml:expr, $function:ident) => {
        match &$nvml.library.lib().$function {
            Ok(function) => Ok((stringify!($function), *function)),
            Err(_) => Err($crate::nvml::NvmlError::Missing { call: stringify!($function) }),
        }
    };
}
pub(super) use symbol;

/// A call on one GPU that fills one value.
pub(super) type Getter<T> = unsafe extern "C" fn(sys::nvmlDevice_t, *mut T) -> sys::nvmlReturn_t;
/// A call on one NVLink of one GPU that fills one value.
pub(super) type LinkGetter<T> = unsafe extern "C" fn(sys::nvmlDevice_t, c_uint, *mut T) -> sys::nvmlReturn_t;

/// The return code of a call as a result.
pub(super) fn check(call: &'static str, gpu: Option<u32>, code: sys::nvmlReturn_t) -> Result<(), NvmlError> {
    if code == sys::nvmlReturn_enum_NVML_SUCCESS {
        Ok(())
    } else {
        Err(NvmlError::Call { call, gpu, code: Code::of(code) })
    }
}

/// The result of a call through nvml-wrapper, with the call and its GPU added to the error.
pub(super) fn wrapped<T>(
    call: &'static str,
    gpu: Option<u32>,
    result: Result<T, WrapperError>,
) -> Result<T, NvmlError> {
    result.map_err(|error| match error {
        WrapperError::FailedToLoadSymbol(_) => NvmlError::Missing { call },
        WrapperError::Utf8Error(error) => {
            NvmlError::Answer { call, gpu, answer: error.to_string(), expected: "UTF-8 text" }
        }
        error => NvmlError::Call { call, gpu, code: Code::of(error.into()) },
    })
}

impl<'nvml> Device<'nvml> {
    /// Calls `function` of nvml-wrapper, which makes the NVML call `call`.
    pub(super) fn call<T>(
        &self,
        call: &'static str,
        function: impl FnOnce(&nvml_wrapper::Device<'nvml>) -> Result<T, WrapperError>,
    ) -> Result<T, NvmlError> {
        // SAFETY: the handle came from the NVML that `self` borrows.
        let device = unsafe { nvml_wrapper::Device::new(self.handle, &self.nvml.library) };
        wrapped(call, Some(self.index), function(&device))
    }

    /// Calls `function`, which fills `value`. Versioned structs must come in with their version set.
    pub(super) fn get<T>(
        &self,
        (call, function): (&'static str, Getter<T>),
        mut value: T,
    ) -> Result<T, NvmlError> {
        // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the type the call declares.
        check(call, Some(self.index), unsafe { function(self.handle, &raw mut value) })?;
        Ok(value)
    }

    /// Calls `function` on NVLink `link`, which fills `value`.
    pub(super) fn get_link<T>(
        &self,
        (call, function): (&'static str, LinkGetter<T>),
        link: u8,
        mut value: T,
    ) -> Result<T, NvmlError> {
        // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the type the call declares.
        check(call, Some(self.index), unsafe { function(self.handle, c_uint::from(link), &raw mut value) })?;
        Ok(value)
    }
}
