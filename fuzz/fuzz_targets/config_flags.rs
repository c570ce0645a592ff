//! Arbitrary texts as values of flags or variables: the first byte selects the setting, zero bytes separate the values.
#![no_main]

#[path = "../../config/tests/fuzz/entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|input: (u8, &str)| {
    let (of, text) = input;
    let texts: Vec<String> = text.split('\0').map(str::to_owned).collect();
    entry::flags(&texts, of & 1 == 0, of & 2 == 0);
});
