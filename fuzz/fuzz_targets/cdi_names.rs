//! Any text as the CDI kind, and any as what the driver calls a GPU.
#![no_main]

#[path = "../../plugin/tests/fuzz/entry/mod.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|text: &str| {
    let (kind, uuid) = text.split_once('\0').unwrap_or((text, text));
    entry::cdi::names(kind, uuid);
});
