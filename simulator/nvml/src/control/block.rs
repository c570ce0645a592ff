//! The shared-memory part of the control channel: a small file mapped by every process that takes part. It counts
//! calls, and its change number wakes waiting processes. Holds no state of the machine.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::facts::fnv;
use crate::names::NAMES;

/// What the file holds. Only atomics: several processes read and write it at once.
#[repr(C)]
struct SharedBlock {
    /// Which build's list of names the counters follow; 0 until the file is made ready.
    names: AtomicU64,
    /// How often the control state has changed; a futex.
    changes: AtomicU32,
    _pad: AtomicU32,
    /// How often each function has been called, by slot.
    calls: [AtomicU64; NAMES.len()],
}

/// The mapped file.
pub(crate) struct Block {
    shared: NonNull<SharedBlock>,
    /// Kept open for its lock; absent where the file could not be opened and the memory is this process's own.
    file: Option<File>,
}

// SAFETY: `shared` points to memory that lives as long as the `Block` and is only ever reached through atomics.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// Maps the file at `path`. The file is created if it is missing or was left by another build of the library.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        loop {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
            let lock = Lock::take(&file)?;
            let size = size_of::<SharedBlock>() as u64;
            if file.metadata()?.len() == 0 {
                file.set_len(size)?;
            }
            let ours = file.metadata()?.len() == size && same_file(&file, path)?;
            if ours {
                drop(lock);
                let block = Self { shared: map(Some(&file))?, file: Some(file) };
                let names = names_of_this_build();
                let found =
                    block.shared().names.compare_exchange(0, names, Ordering::AcqRel, Ordering::Acquire);
                if found.is_ok() || found == Err(names) {
                    return Ok(block);
                }
            }
            std::fs::remove_file(path).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
        }
    }

    /// Private memory, for a library in a folder that cannot be written.
    pub(crate) fn private() -> io::Result<Self> {
        Ok(Self { shared: map(None)?, file: None })
    }

    /// How often the control state has changed.
    pub(crate) fn changes(&self) -> u32 {
        self.shared().changes.load(Ordering::Acquire)
    }

    /// Wakes every process after a change of the control state.
    pub(crate) fn announce_change(&self) {
        self.shared().changes.fetch_add(1, Ordering::AcqRel);
        // SAFETY: the word lives as long as `self`; FUTEX_WAKE reads no other argument.
        unsafe {
            libc::syscall(libc::SYS_futex, self.shared().changes.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        }
    }

    /// Sleeps until the number of changes is no longer `seen`, for `timeout` at most. May return early.
    pub(crate) fn wait_for_change(&self, seen: u32, timeout: Duration) {
        let timeout = libc::timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // SAFETY: the word lives as long as `self`, and `timeout` lives through the call.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.shared().changes.as_ptr(),
                libc::FUTEX_WAIT,
                seen,
                std::ptr::from_ref(&timeout),
            );
        }
    }

    /// Counts a call; returns how many came before it.
    pub(crate) fn count_call(&self, slot: usize) -> u64 {
        self.shared().calls.get(slot).map_or(0, |calls| calls.fetch_add(1, Ordering::Relaxed))
    }

    /// How often each function has been called, by slot.
    pub(crate) fn calls(&self) -> Vec<u64> {
        let calls = self.shared().calls.iter();
        calls.map(|calls| calls.load(Ordering::Relaxed)).collect()
    }

    /// Keeps other processes from changing the control state until dropped.
    pub(crate) fn lock(&self) -> io::Result<Option<Lock<'_>>> {
        self.file.as_ref().map(Lock::take).transpose()
    }

    fn shared(&self) -> &SharedBlock {
        // SAFETY: `map` returned it, aligned and large enough; it is unmapped only when `self` is dropped.
        unsafe { self.shared.as_ref() }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size, and no reference to it outlives `self`.
        unsafe {
            libc::munmap(self.shared.as_ptr().cast(), size_of::<SharedBlock>());
        }
    }
}

/// An exclusive lock on the file, between processes and between openings of it in one process.
pub(crate) struct Lock<'a>(&'a File);

impl<'a> Lock<'a> {
    fn take(file: &'a File) -> io::Result<Self> {
        file.lock()?;
        Ok(Self(file))
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        // Closing the file frees the lock too, so a failure here leaves nothing locked for good.
        let _ = self.0.unlock();
    }
}

fn map(file: Option<&File>) -> io::Result<NonNull<SharedBlock>> {
    let (flags, descriptor) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    // SAFETY: a new mapping at an address of the kernel's choice; the file, if any, is at least this large.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size_of::<SharedBlock>(),
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            descriptor,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))
}

/// Whether `path` still names the file that was opened.
fn same_file(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match std::fs::metadata(path) {
        Ok(named) => Ok((opened.dev(), opened.ino()) == (named.dev(), named.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn names_of_this_build() -> u64 {
    NAMES.iter().fold(1, |hash, name| fnv(name, hash)).max(1)
}
