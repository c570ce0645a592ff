//! Any bytes as the body of a verb of the extender API.
#![no_main]

#[path = "../../extender/tests/fuzz/entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    entry::requests(body);
});
