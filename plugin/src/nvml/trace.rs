//! The NVML call under way, for a watchdog on another thread: a driver may never return from one.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Records the call under way. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct CallTrace(Arc<Mutex<Option<TracedCall>>>);

/// A call that has not returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TracedCall {
    name: &'static str,
    /// Index of the GPU it is about, if it is about one.
    gpu: Option<u32>,
    /// When it began.
    pub since: Instant,
}

/// Ends the record of a call when dropped.
pub(super) struct CallGuard<'a>(&'a CallTrace);

impl CallTrace {
    /// The call under way; `None` between calls.
    pub fn now(&self) -> Option<TracedCall> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, name: &'static str, gpu: Option<u32>) -> CallGuard<'_> {
        self.set(Some(TracedCall { name, gpu, since: Instant::now() }));
        CallGuard(self)
    }

    fn set(&self, call: Option<TracedCall>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = call;
    }
}

impl TracedCall {
    /// Whether this is the initialisation of NVML.
    pub fn is_initialisation(&self) -> bool {
        self.name == super::INIT
    }
}

impl fmt::Display for TracedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.gpu {
            Some(gpu) => write!(f, "{} on GPU {gpu}", self.name),
            None => f.write_str(self.name),
        }
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_is_traced_until_it_returns() {
        let trace = CallTrace::default();
        let watched = trace.clone();
        let call = trace.begin("nvmlDeviceGetName", Some(3));
        assert_eq!(watched.now().unwrap().to_string(), "nvmlDeviceGetName on GPU 3");
        drop(call);
        assert_eq!(watched.now(), None);
    }
}
