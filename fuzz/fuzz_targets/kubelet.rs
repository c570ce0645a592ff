//! Any bytes as a call of kubelet's to the real service.
#![no_main]

#[path = "../../plugin/tests/fuzz/entry/mod.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|input: &[u8]| entry::kubelet::bytes(input));
