//! No text from outside makes the configuration reader panic or loop.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod entry;

use proptest::prelude::*;

use entry::{file as read, flags};

/// Scalars that are valid for some key, almost valid, or never valid.
fn scalar() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(vec![
            "true",
            "no",
            "~",
            "0",
            "-1",
            "2",
            "65536",
            "1e300",
            ".inf",
            "4.0",
            "mixed",
            "mixd",
            "[]",
            "{}",
            "all",
            "v1",
            "\"0:1\"",
            "[0, \"1:2\"]",
            "GPU-0",
            "0000:3b:00.0",
            "gpu",
            "amd.com/gpu",
            "60s",
            "infinite",
            "cdi-cri",
            "*a",
            "&a b",
            "!!int x",
            "\"\\u0000\"",
            "|",
            "nvidia.com/a.b",
        ])
        .prop_map(str::to_owned),
        "[ -~]{0,12}",
        any::<String>(),
    ]
}

/// Files of known and unknown keys, nested at random.
fn file() -> impl Strategy<Value = String> {
    let key = prop::sample::select(vec![
        "version",
        "flags",
        "plugin",
        "gfd",
        "migStrategy",
        "migstrategy",
        "deviceListStrategy",
        "sleepInterval",
        "imex",
        "channelIDs",
        "sharing",
        "timeSlicing",
        "mps",
        "resources",
        "gpus",
        "mig",
        "pattern",
        "name",
        "rename",
        "devices",
        "replicas",
        "renameByDefault",
        "allow",
        "deny",
        "cdiDisableHooks",
        "other",
        "<<",
        "? x",
    ]);
    let leaf = scalar();
    let tree = leaf.prop_recursive(6, 40, 4, move |inner| {
        prop_oneof![
            prop::collection::vec((key.clone(), inner.clone()), 0..5).prop_map(|entries| {
                let inside: Vec<String> =
                    entries.iter().map(|(key, value)| format!("{key}: {value}")).collect();
                format!("{{{}}}", inside.join(", "))
            }),
            prop::collection::vec(inner, 0..4).prop_map(|list| format!("[{}]", list.join(", "))),
        ]
    });
    let top = prop::sample::select(vec!["flags", "sharing", "resources", "imex", "devices", "version", "{x"]);
    prop::collection::vec((top, tree), 0..4)
        .prop_map(|entries| entries.iter().map(|(key, value)| format!("{key}: {value}\n")).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    #[test]
    fn any_text_is_read_or_refused(text in any::<String>()) {
        read(&text);
    }

    #[test]
    fn any_file_of_known_keys_is_read_or_refused(text in file()) {
        read(&text);
    }

    #[test]
    fn any_flag_and_variable_is_read_or_refused(
        texts in prop::collection::vec(scalar(), 1..4),
        flag in any::<bool>(),
        lenient in any::<bool>(),
    ) {
        flags(&texts, flag, lenient);
    }
}

#[test]
fn deep_and_repeated_input_ends() {
    read(&"[".repeat(100_000));
    read(&format!("a: {}", "{a: ".repeat(5_000)));
    read(&"x: 1\n".repeat(10_000));
    let wrong = "- {name: amd.com/gpu, replicas: 0, devices: none}\n".repeat(2_000);
    read(&format!("sharing:\n timeSlicing:\n  resources:\n{}", wrong.replace("- ", "  - ")));
    let aliases: String = (1..30).map(|n| format!("a{n}: &a{n} [*a{}, *a{}]\n", n - 1, n - 1)).collect();
    read(&format!("a0: &a0 x\n{aliases}"));
}
