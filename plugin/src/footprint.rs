//! Settings of glibc's allocator that keep the plugin's resident memory low. Without glibc they do nothing.
#![allow(unsafe_code, reason = "the allocator is configured by C functions")]

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Time from the start until the plugin is registered, the machine is read and the choice table is built.
const STARTUP: Duration = Duration::from_secs(10);

/// Makes all threads allocate from one heap instead of one heap per thread: the plugin's threads seldom allocate at the
/// same time. Must be called before the first thread is started.
pub(crate) fn use_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes numbers only and is allowed at any time; existing heaps stay in use.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Returns the memory that the startup freed to the kernel, once the startup is over.
pub(crate) async fn trim_after_startup(shutdown: CancellationToken) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = tokio::time::sleep(STARTUP) => trim_heap(),
    }
}

/// Returns free pages of the heap to the kernel.
pub(crate) fn trim_heap() {
    #[cfg(target_env = "gnu")]
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
        trim_heap();
        assert!(allocated.iter().all(|byte| *byte == 7));
    }
}
