//! Any text as a config file.
#![no_main]

#[path = "../../config/tests/fuzz/entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|text: &str| entry::file(text));
