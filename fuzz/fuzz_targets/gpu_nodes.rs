//! Any bytes as a GpuNode of the extender's watch.
#![no_main]

#[path = "../../extender/tests/fuzz/entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|node: &[u8]| {
    entry::gpu_nodes(node);
});
