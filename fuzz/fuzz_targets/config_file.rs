//! Any text as a config file.
#![no_main]

#[path = "../../plugin/tests/fuzz/entry/mod.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|text: &str| entry::config::file(text));
