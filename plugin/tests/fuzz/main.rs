//! Nothing from outside makes the daemon panic, and what it answers holds whatever it was asked: the entry functions of `fuzz/`, run
//! on generated input, without a fuzzer.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod entry;

mod cdi;
mod kubelet;
