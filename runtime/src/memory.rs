//! glibc's allocator. Without glibc nothing is done.
#![allow(unsafe_code, reason = "the allocator is configured by C functions")]

/// Makes all threads allocate from one heap instead of one heap per thread, for a daemon whose threads seldom allocate
/// at the same time. Must be called before the first thread is started.
pub fn use_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call takes numbers only and is allowed at any time; existing heaps stay in use.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Returns free pages of the heap to the kernel: after large drops, what is free lies between what is in use.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call takes a number only; the allocator locks its heaps and leaves allocated memory alone.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heap_settings_keep_allocated_memory() {
        use_one_heap();
        let allocated = vec![7u8; 1 << 20];
        drop(vec![1u8; 1 << 20]);
        trim();
        assert!(allocated.iter().all(|byte| *byte == 7));
    }
}
