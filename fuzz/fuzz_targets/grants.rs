//! Any text as the grant annotation of a pod.
#![no_main]

#[path = "../../extender/tests/fuzz/entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|text: &str| {
    entry::grants(text);
});
