//! What is fuzzed: the config file, flags and variables. `fuzz/` runs it under a fuzzer, the tests beside it on generated input. It panics
//! where an invariant does not hold.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each target uses its part of this; a broken invariant is a panic"
)]

use gantry_config::settings::Program;
use gantry_config::{Layer, Overrides, Strictness, load};

/// Any text as a config file, read strictly and leniently. An accepted one reads the same when it is written and read again.
pub fn file(text: &str) {
    for strictness in [Strictness::Strict, Strictness::Lenient] {
        match load("fuzz", text, &[], strictness) {
            Ok(loaded) => {
                let again = load("again", &loaded.config.to_json(), &[], Strictness::Strict);
                assert_eq!(again.unwrap().config, loaded.config);
                let yaml = loaded.config.to_yaml().unwrap();
                let again = load("yaml", &yaml, &[], Strictness::Strict);
                assert_eq!(again.unwrap().config, loaded.config);
            }
            Err(problems) => assert!(!problems.list.is_empty() && !problems.to_string().is_empty()),
        }
    }
}

/// Any texts as the values of every flag, or the first as the value of every variable. Accepted ones give a configuration.
pub fn flags(texts: &[String], flag: bool, lenient: bool) {
    let strictness = if lenient { Strictness::Lenient } else { Strictness::Strict };
    let read = Overrides::read(
        Program::Plugin,
        |_| (!flag).then(|| texts.first().cloned()).flatten(),
        |_| if flag { texts.to_vec() } else { Vec::new() },
    );
    let layers: &[Layer] = read.as_ref().map_or(&[], Overrides::layers);
    assert!(load("file", "", layers, strictness).is_ok());
}
