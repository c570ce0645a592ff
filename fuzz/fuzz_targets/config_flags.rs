//! Any texts as the values of every flag or variable: the first byte says of which, zero bytes part the texts.
#![no_main]

#[path = "../../plugin/tests/fuzz/entry/mod.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|input: (u8, &str)| {
    let (of, text) = input;
    let texts: Vec<String> = text.split('\0').map(str::to_owned).collect();
    entry::config::flags(&texts, of & 1 == 0, of & 2 == 0);
});
