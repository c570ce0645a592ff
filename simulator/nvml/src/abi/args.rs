//! Arguments and return codes as C passes them. All reading and writing through a client's pointers happens here, under one contract, NVML's
//! own: a pointer is null or points to a value of its type that stays valid through the call.

use std::ffi::{CStr, c_char, c_uint};

use nvml_wrapper_sys::bindings as sys;
use sys::nvmlReturn_t;

use crate::control::MigRefusal;

/// A pointer to where an answer goes. Only a C caller makes one, and so vouches for it.
#[repr(transparent)]
pub struct OutPointer<T>(*mut T);

impl<T> Clone for OutPointer<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for OutPointer<T> {}

impl<T> OutPointer<T> {
    /// Refuses a null pointer.
    pub(crate) fn check(self) -> Result<(), Status> {
        if self.0.is_null() { Err(Status::INVALID_ARGUMENT) } else { Ok(()) }
    }

    /// Writes the answer.
    pub(crate) fn put(self, value: T) -> Result<(), Status> {
        self.check()?;
        // SAFETY: not null, so by the contract of this module valid for a write of `T`.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Reads what the caller has put there.
    pub(crate) fn get(self) -> Result<T, Status>
    where
        T: Copy,
    {
        self.check()?;
        // SAFETY: not null, so by the contract of this module a valid `T`; every type used here is plain C data.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Checks the version that stands at the head of a versioned struct: its size and the number `version`.
    pub(crate) fn check_version(self, version: c_uint) -> Result<(), Status> {
        if self.version()? == struct_version::<T>(version) { Ok(()) } else { Err(Status::VERSION_MISMATCH) }
    }

    /// The version word at the head of a versioned struct.
    pub(crate) fn version(self) -> Result<c_uint, Status> {
        self.check()?;
        // SAFETY: not null; versioned structs begin with an unsigned int, and no more than that is read.
        Ok(unsafe { self.0.cast::<c_uint>().read_unaligned() })
    }

    /// The same memory as another struct: an older or newer version, as its version field shows.
    pub(crate) fn cast<U>(self) -> OutPointer<U> {
        OutPointer(self.0.cast())
    }

    /// The memory right behind this value, as another type.
    pub(crate) fn behind<U>(self) -> Result<OutPointer<U>, Status> {
        self.check()?;
        // SAFETY: not null; the caller of a struct with a head of `T` vouches for what follows it.
        Ok(OutPointer(unsafe { self.0.add(1) }.cast()))
    }

    /// Writes `items` from here on.
    pub(crate) fn put_all(self, items: &[T]) -> Result<(), Status>
    where
        T: Copy,
    {
        if items.is_empty() {
            return Ok(());
        }
        self.check()?;
        for (position, item) in items.iter().enumerate() {
            // SAFETY: the caller of an NVML list function vouches for as many items as it announces, and no more are
            // written than were announced.
            unsafe { self.0.add(position).write_unaligned(*item) };
        }
        Ok(())
    }

    /// The places of an array of `count` items.
    pub(crate) fn each(self, count: usize) -> Result<impl Iterator<Item = Self>, Status> {
        self.check()?;
        // SAFETY: the caller vouches for `count` items, so every place is within its array.
        Ok((0..count).map(move |position| Self(unsafe { self.0.add(position) })))
    }

    /// Writes a list as NVML does: `count` states how much fits and receives how much there is.
    pub(crate) fn put_list(self, count: OutPointer<c_uint>, items: &[T]) -> Result<(), Status>
    where
        T: Copy,
    {
        let room = count.get()? as usize;
        count.put(c_uint::try_from(items.len()).unwrap_or(c_uint::MAX))?;
        if room < items.len() {
            return Err(Status::INSUFFICIENT_SIZE);
        }
        self.put_all(items)
    }
}

impl OutPointer<c_char> {
    /// Writes a text and its final zero into a buffer of `length` bytes.
    pub(crate) fn put_text(self, length: c_uint, text: &str) -> Result<(), Status> {
        self.check()?;
        if (length as usize) <= text.len() {
            return Err(Status::INSUFFICIENT_SIZE);
        }
        self.put_all(&chars(text))
    }
}

/// A pointer to something the caller gives. Only a C caller makes one, and so vouches for it.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Reads what the caller gives.
    pub(crate) fn get(self) -> Result<T, Status> {
        if self.0.is_null() {
            return Err(Status::INVALID_ARGUMENT);
        }
        // SAFETY: not null, so by the contract of this module a valid `T`; every type used here is plain C data.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

impl In<c_char> {
    /// Reads a text that ends with zero.
    pub(crate) fn text(self) -> Result<String, Status> {
        if self.0.is_null() {
            return Err(Status::INVALID_ARGUMENT);
        }
        // SAFETY: not null, so by NVML's contract a text that ends with zero.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map(str::to_owned).map_err(|_| Status::INVALID_ARGUMENT)
    }
}

/// NVML's version word of a struct: its size, and a number in the top byte.
pub(crate) const fn struct_version<T>(version: c_uint) -> c_uint {
    size_of::<T>() as c_uint | version << 24
}

/// A text as C characters, final zero included.
pub(crate) fn chars(text: &str) -> Vec<c_char> {
    text.bytes().chain([0]).map(|byte| byte as c_char).collect()
}

/// A text in a buffer of fixed size, cut to fit, the rest zero.
pub(crate) fn fixed<const N: usize>(text: &str) -> [c_char; N] {
    let mut buffer = [0; N];
    for (place, byte) in buffer.iter_mut().take(N - 1).zip(text.bytes()) {
        *place = byte as c_char;
    }
    buffer
}

/// A code other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) nvmlReturn_t);

impl Status {
    pub(crate) const UNINITIALIZED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    pub(crate) const INVALID_ARGUMENT: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    pub(crate) const NOT_SUPPORTED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    pub(crate) const NOT_FOUND: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND);
    pub(crate) const INSUFFICIENT_SIZE: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    pub(crate) const DRIVER_NOT_LOADED: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
    pub(crate) const TIMEOUT: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT);
    pub(crate) const GPU_IS_LOST: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
    pub(crate) const VERSION_MISMATCH: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    pub(crate) const NO_PERMISSION: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
    pub(crate) const IN_USE: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_IN_USE);
    pub(crate) const INSUFFICIENT_RESOURCES: Self =
        Self(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES);
    pub(crate) const UNKNOWN: Self = Self(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN);

    /// The code of a refused change of MIG.
    pub(crate) fn of_refusal(refusal: &MigRefusal) -> Self {
        match refusal {
            MigRefusal::NotSupported(_) | MigRefusal::Disabled => Self::NOT_SUPPORTED,
            MigRefusal::InUse(_) => Self::IN_USE,
            MigRefusal::NotFound(_) => Self::NOT_FOUND,
            MigRefusal::Invalid(_) => Self::INVALID_ARGUMENT,
            MigRefusal::NoRoom(_) => Self::INSUFFICIENT_RESOURCES,
        }
    }
}

/// What `nvmlErrorString` returns for a code.
pub(crate) fn text(code: nvmlReturn_t) -> &'static CStr {
    match code {
        sys::nvmlReturn_enum_NVML_SUCCESS => c"Success",
        sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED => c"Uninitialized",
        sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => c"Invalid Argument",
        sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => c"Not Supported",
        sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => c"Insufficient Permissions",
        sys::nvmlReturn_enum_NVML_ERROR_ALREADY_INITIALIZED => c"Already Initialized",
        sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND => c"Not Found",
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE => c"Insufficient Size",
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_POWER => c"Insufficient External Power",
        sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => c"Driver Not Loaded",
        sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => c"Timeout",
        sys::nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE => c"Interrupt Request Issue",
        sys::nvmlReturn_enum_NVML_ERROR_LIBRARY_NOT_FOUND => c"NVML Shared Library Not Found",
        sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => c"Function Not Found",
        sys::nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM => c"Corrupted infoROM",
        sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST => c"GPU is lost",
        sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => c"GPU requires reset",
        sys::nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM => c"The operating system has blocked the request.",
        sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH => {
            c"RM has detected an NVML/RM version mismatch."
        }
        sys::nvmlReturn_enum_NVML_ERROR_IN_USE => c"In use by another client",
        sys::nvmlReturn_enum_NVML_ERROR_MEMORY => c"Insufficient Memory",
        sys::nvmlReturn_enum_NVML_ERROR_NO_DATA => c"No data",
        sys::nvmlReturn_enum_NVML_ERROR_VGPU_ECC_NOT_SUPPORTED => {
            c"The requested vgpu operation is not available on target device, because ECC is enabled"
        }
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES => c"Insufficient resources",
        sys::nvmlReturn_enum_NVML_ERROR_FREQ_NOT_SUPPORTED => c"Frequency not supported",
        sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH => c"Argument version mismatch",
        sys::nvmlReturn_enum_NVML_ERROR_DEPRECATED => c"Deprecated functionality",
        sys::nvmlReturn_enum_NVML_ERROR_NOT_READY => c"System not ready",
        sys::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND => c"GPU not found",
        sys::nvmlReturn_enum_NVML_ERROR_INVALID_STATE => c"Invalid state",
        sys::nvmlReturn_enum_NVML_ERROR_RESET_TYPE_NOT_SUPPORTED => c"Reset type not supported",
        _ => c"Unknown Error",
    }
}
