//! The allocator. Without glibc nothing is done.
#![allow(unsafe_code, reason = "the allocator is a C library")]

/// Returns free pages of the heap to the kernel: after large drops, what is free lies between what is in use.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes a number only; the allocator locks its heaps and leaves allocated memory alone.
    unsafe {
        libc::malloc_trim(0);
    }
}
