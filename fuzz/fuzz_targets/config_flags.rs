//! Any text as the value of every flag or variable. `plugin/tests/config_fuzz.rs` runs the same on generated input.
#![no_main]

use gantry_plugin::config::{Overrides, Strictness, load};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (bool, &str)| {
    let (flag, text) = input;
    let read = Overrides::read(
        |_| (!flag).then(|| text.to_owned()),
        |_| if flag { vec![text.to_owned()] } else { Vec::new() },
    );
    if let Ok(overrides) = read {
        assert!(load("file", "", overrides.layers(), Strictness::Strict).is_ok());
    }
});
