//! Helpers for raw NVML calls. Each passes pointers to its own locals only.

use std::ffi::{c_char, c_uint};

use nvml_wrapper_sys::bindings as sys;

use super::{Code, Device, NvmlError};

/// Name and function pointer of a table entry, or the error that the library lacks it.
macro_rules! symbol {
    ($table:expr, $function:ident) => {
        match &$table.$function {
            Ok(function) => Ok((stringify!($function), *function)),
            Err(_) => Err($crate::nvml::NvmlError::Missing {
                call: stringify!($function),
            }),
        }
    };
}
pub(super) use symbol;

/// A call on one GPU that fills one value.
pub(super) type Getter<T> = unsafe extern "C" fn(sys::nvmlDevice_t, *mut T) -> sys::nvmlReturn_t;
/// A call on one GPU that fills a text.
pub(super) type TextGetter =
    unsafe extern "C" fn(sys::nvmlDevice_t, *mut c_char, c_uint) -> sys::nvmlReturn_t;
/// A call on one NVLink of one GPU that fills one value.
pub(super) type LinkGetter<T> = unsafe extern "C" fn(sys::nvmlDevice_t, c_uint, *mut T) -> sys::nvmlReturn_t;

/// The return code of a call as a result.
pub(super) fn check(call: &'static str, gpu: Option<u32>, code: sys::nvmlReturn_t) -> Result<(), NvmlError> {
    if code == sys::nvmlReturn_enum_NVML_SUCCESS {
        Ok(())
    } else {
        Err(NvmlError::Call {
            call,
            gpu,
            code: Code::of(code),
        })
    }
}

/// Size of the longest text that NVML returns (96 bytes), rounded up.
const TEXT: usize = 128;

/// The text that `fill` writes into a buffer of the given length.
pub(super) fn text_of(
    call: &'static str,
    gpu: Option<u32>,
    fill: impl FnOnce(*mut c_char, c_uint) -> sys::nvmlReturn_t,
) -> Result<String, NvmlError> {
    let mut buffer: [c_char; TEXT] = [0; TEXT];
    check(call, gpu, fill(buffer.as_mut_ptr(), TEXT as c_uint))?;
    Ok(text(&buffer))
}

/// A C text: up to the first NUL, or to the end of the array.
pub(super) fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars
        .iter()
        .map(|c| c.to_ne_bytes()[0])
        .take_while(|byte| *byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

impl Device<'_> {
    /// Calls `function`, which fills `value`. Versioned structs must come in with their version set.
    pub(super) fn get<T>(
        &self,
        (call, function): (&'static str, Getter<T>),
        mut value: T,
    ) -> Result<T, NvmlError> {
        // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the type the call declares.
        check(call, Some(self.index), unsafe {
            function(self.handle, &raw mut value)
        })?;
        Ok(value)
    }

    /// Calls `function`, which fills a text.
    pub(super) fn get_text(&self, (call, function): (&'static str, TextGetter)) -> Result<String, NvmlError> {
        // SAFETY: the handle came from the NVML that `self` borrows; `text_of` hands over a buffer and its true length.
        text_of(call, Some(self.index), |buffer, length| unsafe {
            function(self.handle, buffer, length)
        })
    }

    /// Calls `function` on NVLink `link`, which fills `value`.
    pub(super) fn get_link<T>(
        &self,
        (call, function): (&'static str, LinkGetter<T>),
        link: u8,
        mut value: T,
    ) -> Result<T, NvmlError> {
        // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the type the call declares.
        check(call, Some(self.index), unsafe {
            function(self.handle, c_uint::from(link), &raw mut value)
        })?;
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_ends_at_first_nul_or_array_end() {
        let chars = |text: &[u8]| text.iter().map(|b| b.cast_signed() as c_char).collect::<Vec<_>>();
        assert_eq!(text(&chars(b"GPU-1\0junk")), "GPU-1");
        assert_eq!(text(&chars(b"full")), "full");
        assert_eq!(text(&chars(b"\0")), "");
    }
}
