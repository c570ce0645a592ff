//! Any bytes as a pod of the extender's watch.
#![no_main]

#[path = "../../extender/tests/fuzz/entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|pod: &[u8]| {
    entry::pods(pod);
});
