//! Arguments as C passes them. All reading and writing through a client's pointers happens here, under one contract, NVML's
//! own: a pointer is null or points to a value of its type that stays valid through the call.

use std::ffi::{CStr, c_char, c_uint};

use super::status::Status;

/// A pointer to where an answer goes. Only a C caller makes one, and so vouches for it.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
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
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
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

    /// Writes a list as NVML does: `count` says how much fits and gets how much there is.
    pub(crate) fn put_list(self, count: Out<c_uint>, items: &[T]) -> Result<(), Status>
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

impl Out<c_char> {
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
