//! Any text as a config file. What is accepted must read the same when written and read again.
//! `plugin/tests/config_fuzz.rs` runs the same on generated input, without a fuzzer.
#![no_main]

use gantry_plugin::config::{Strictness, load};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    for strictness in [Strictness::Strict, Strictness::Lenient] {
        if let Ok(loaded) = load("fuzz", text, &[], strictness) {
            let again = load("again", &loaded.config.to_json(), &[], Strictness::Strict);
            assert_eq!(again.map(|loaded| loaded.config), Ok(loaded.config));
        }
    }
});
