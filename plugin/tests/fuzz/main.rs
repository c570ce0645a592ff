//! The fuzz targets of `fuzz/` on generated input, without a fuzzer: no external input makes the daemon panic or return
//! an invalid response.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod entry;

mod cdi;
mod kubelet;
