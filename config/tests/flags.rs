//! Every setting as flag, variable and key of the file, and their precedence.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;

use gantry_config::settings::{Kind, Program, SETTINGS, Setting};
use gantry_config::{Config, Overrides, Problems, Strictness, json_schema, load};
use serde_json::{Value, json};

/// The value of a setting in the effective configuration.
fn effective(config: &Config, key: &str) -> Value {
    let file = serde_json::to_value(config.to_file()).unwrap();
    key.split('.').fold(file, |value, name| value[name].clone())
}

fn overrides(env: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Overrides, Problems> {
    let env: BTreeMap<&str, &str> = env.iter().copied().collect();
    Overrides::read(
        Program::Plugin,
        |name| env.get(name).map(|text| (*text).to_owned()),
        |setting| {
            let given = flags.iter().filter(|(flag, _)| setting.flags.contains(flag));
            given.map(|(_, text)| (*text).to_owned()).collect()
        },
    )
}

fn config(file: &str, env: &[(&str, &str)], flags: &[(&str, &str)]) -> Config {
    let overrides = overrides(env, flags).unwrap_or_else(|problems| panic!("{problems}"));
    match load("config.yaml", file, overrides.layers(), Strictness::Strict) {
        Ok(loaded) => loaded.config,
        Err(problems) => panic!("{problems}"),
    }
}

/// Three texts of a setting with different values, each with its value in the file. None is the default, if there are enough.
fn samples(setting: &Setting) -> Vec<(String, Value)> {
    let texts = |texts: &[&str]| texts.iter().map(|text| ((*text).to_owned(), json!(text))).collect();
    match (setting.key, setting.kind) {
        (_, Kind::Bool) => vec![("true".to_owned(), json!(true)), ("false".to_owned(), json!(false))],
        (_, Kind::Numbers) => vec![("0".to_owned(), json!([0]))],
        ("flags.migStrategy", _) => texts(&["single", "mixed", "none"]),
        ("flags.plugin.deviceIDStrategy", _) => texts(&["index", "uuid"]),
        ("flags.plugin.sharedDevicesAllocationPolicy", _) => texts(&["packed", "distributed"]),
        ("flags.gfd.sleepInterval", _) => texts(&["1h", "90s", "infinite"]),
        ("flags.plugin.deviceListStrategy", _) => ["cdi-cri", "volume-mounts", "cdi-annotations"]
            .map(|word| (word.to_owned(), json!([word])))
            .to_vec(),
        ("flags.plugin.cdiFeatureFlags", _) => ["disable-nvsandboxutils", "disable-ipc-discoverer"]
            .map(|word| (word.to_owned(), json!([word])))
            .to_vec(),
        ("flags.plugin.cdiDisableHooks", _) => {
            ["all", "chmod"].map(|word| (word.to_owned(), json!([word]))).to_vec()
        }
        ("flags.plugin.cdiAnnotationPrefix", _) => texts(&["first.io/", "second.io/", "third.io/"]),
        _ => texts(&["/first", "/second", "/third"]),
    }
}

/// Settings that are read and have no effect.
const WITHOUT_EFFECT: [&str; 2] = ["flags.mpsRoot", "flags.deviceDiscoveryStrategy"];

fn file(key: &str, value: &Value) -> String {
    let nested = key.rsplit('.').fold(value.clone(), |value, name| json!({ name: value }));
    nested.to_string()
}

#[test]
fn precedence_is_flag_variable_file_default() {
    let mut tried = 0;
    for setting in SETTINGS.iter().filter(|setting| !WITHOUT_EFFECT.contains(&setting.key)) {
        let key = setting.key;
        let samples = samples(setting);
        let default = effective(&Config::default(), key);
        // Every choice of sources, and of the value of each.
        for sources in 0..8 {
            for shift in 0..samples.len() {
                let at = |index: usize| &samples[(index + shift) % samples.len()];
                let (in_file, in_env, in_flag) = (at(0), at(1), at(2));
                let text = if sources & 1 == 0 { "{}".to_owned() } else { file(key, &in_file.1) };
                for (name, flag) in
                    setting.env.iter().flat_map(|name| setting.flags.iter().map(move |flag| (name, flag)))
                {
                    let env = [(*name, in_env.0.as_str())];
                    let flags = [(*flag, in_flag.0.as_str())];
                    let config = config(
                        &text,
                        if sources & 2 == 0 { &[] } else { &env },
                        if sources & 4 == 0 { &[] } else { &flags },
                    );
                    let topmost = match sources {
                        4.. => Some(in_flag),
                        2.. => Some(in_env),
                        1 => Some(in_file),
                        _ => None,
                    };
                    let expected = topmost.map_or(default.clone(), |(text, value)| match key {
                        "flags.gfd.sleepInterval" => json!(text),
                        _ => value.clone(),
                    });
                    assert_eq!(effective(&config, key), expected, "{key} {sources:03b} {name} --{flag}");
                    tried += 1;
                }
            }
        }
    }
    assert!(tried > 500, "{tried}");
}

#[test]
fn settings_table_has_the_true_defaults() {
    let driver_root = effective(&Config::default(), "flags.nvidiaDevRoot");
    assert_eq!(driver_root, "/");
    for setting in SETTINGS.iter() {
        let said = effective(&Config::default(), setting.key);
        let text = match &said {
            Value::Array(list) => list.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(","),
            Value::Bool(value) => value.to_string(),
            Value::String(text) => text.clone(),
            _ => String::new(),
        };
        match setting.key {
            "flags.nvidiaDevRoot" => assert_eq!(setting.default, "the driver root"),
            "flags.plugin.sharedDevicesAllocationPolicy" => {
                assert_eq!(setting.default, "distributed, for MIG devices packed");
            }
            "flags.deviceDiscoveryStrategy" => assert_eq!(setting.default, "auto"),
            key => assert_eq!(setting.default, text, "{key}"),
        }
    }
}

#[test]
fn settings_table_covers_keys_with_flags_exactly() {
    fn leaves(at: &str, schema: &Value, found: &mut Vec<String>) {
        for (key, schema) in schema["properties"].as_object().unwrap() {
            let at = format!("{at}.{key}");
            match schema["properties"].is_object() {
                true => leaves(&at, schema, found),
                false => found.push(at),
            }
        }
    }
    let schema = json_schema();
    let mut keys = Vec::new();
    leaves("flags", &schema["properties"]["flags"], &mut keys);
    leaves("imex", &schema["properties"]["imex"], &mut keys);
    keys.sort();
    let mut table: Vec<String> = SETTINGS.iter().map(|setting| setting.key.to_owned()).collect();
    table.sort();
    assert_eq!(keys, table);
}

#[test]
fn booleans_are_read_as_go_reads_them() {
    for (text, value) in [("1", true), ("T", true), ("TRUE", true), ("f", false), ("0", false), ("", false)] {
        let config = config("", &[("FAIL_ON_INIT_ERROR", text)], &[]);
        assert_eq!(config.fail_on_init_error, value, "{text:?}");
    }
    for text in ["yes", "on", "2", "tRUE"] {
        let error = overrides(&[("GDS_ENABLED", text)], &[]).unwrap_err().to_string();
        assert_eq!(error, format!("environment: GDS_ENABLED: {text:?} is not allowed; write true or false"));
    }
}

#[test]
fn empty_variable_is_unset_except_output_file() {
    let config = config(
        "flags: {migStrategy: mixed, gfd: {outputFile: /x}}",
        &[
            ("MIG_STRATEGY", ""),
            ("DEVICE_LIST_STRATEGY", ""),
            ("IMEX_CHANNEL_IDS", ""),
            ("GFD_OUTPUT_FILE", ""),
        ],
        &[],
    );
    let mixed = load("", "flags: {migStrategy: mixed, gfd: {outputFile: \"\"}}", &[], Strictness::Strict);
    assert_eq!(config, mixed.unwrap().config);
}

#[test]
fn first_set_variable_and_last_flag_count() {
    let twins = [("NVIDIA_CDI_HOOK_PATH", "/first"), ("NVIDIA_CTK_PATH", "/second")];
    let path = |env: &[(&str, &str)], flags: &[(&str, &str)]| config("", env, flags).cdi_hook_path;
    assert_eq!(path(&twins, &[]).to_str(), Some("/first"));
    assert_eq!(path(&twins[1..], &[]).to_str(), Some("/second"));
    let empty = [("NVIDIA_CDI_HOOK_PATH", ""), twins[1]];
    assert_eq!(path(&empty, &[]).to_str(), Some("/second"));
    let flags = [("nvidia-ctk-path", "/third"), ("nvidia-cdi-hook-path", "/fourth")];
    assert_eq!(path(&twins, &flags).to_str(), Some("/fourth"));
}

#[test]
fn plugin_variable_precedes_gfd_variable() {
    let both = config(
        "",
        &[
            ("GFD_MIG_STRATEGY", "single"),
            ("MIG_STRATEGY", "mixed"),
            ("GFD_FAIL_ON_INIT_ERROR", "true"),
            ("FAIL_ON_INIT_ERROR", "false"),
        ],
        &[],
    );
    assert_eq!(effective(&both, "flags.migStrategy"), "mixed");
    assert_eq!(effective(&both, "flags.failOnInitError"), false);
    let twin = config("", &[("GFD_MIG_STRATEGY", "single")], &[]);
    assert_eq!(effective(&twin, "flags.migStrategy"), "single");
}

#[test]
fn lists_take_commas_and_several_flags() {
    let strategies =
        |env: &[(&str, &str)], flags: &[(&str, &str)]| config("", env, flags).device_list_strategy.len();
    assert_eq!(strategies(&[("DEVICE_LIST_STRATEGY", "envvar, cdi-cri")], &[]), 2);
    let flags = [("device-list-strategy", "envvar"), ("device-list-strategy", "cdi-cri,volume-mounts")];
    assert_eq!(strategies(&[], &flags), 3);
}

#[test]
fn former_word_for_device_nodes_passes_them() {
    for word in ["device-nodes", "pass-device-specs"] {
        let alone = config("", &[], &[("device-list-strategy", word)]);
        assert!(alone.pass_device_specs);
        assert_eq!(alone.device_list_strategy, Config::default().device_list_strategy);
        let both = config("", &[("DEVICE_LIST_STRATEGY", &format!("cdi-cri,{word}"))], &[]);
        assert!(both.pass_device_specs && both.device_list_strategy.len() == 1);
    }
}

#[test]
fn wrong_flag_or_variable_is_named() {
    let error = overrides(
        &[("MIG_STRATEGY", "mixd"), ("IMEX_CHANNEL_IDS", "0,1")],
        &[
            ("device-list-strategy", "cdi-cir"),
            ("sleep-interval", "1 hour"),
            ("device-discovery-strategy", "tegra"),
            ("cdi-disable-hooks", "chmd"),
            ("cdi-feature-flags", "disable-ipc-discoverr"),
        ],
    )
    .unwrap_err();
    let said: Vec<String> = error.list.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(said.join("\n"));
    assert_eq!(error.source, "command line and environment");
    for (env, flags, source) in [
        (&[("MIG_STRATEGY", "mixd")][..], &[][..], "environment: MIG_STRATEGY"),
        (&[], &[("mig-strategy", "mixd")], "command line: --mig-strategy"),
    ] {
        let error = overrides(env, flags).unwrap_err().to_string();
        let words = "\"mixd\" is not allowed; allowed: none, single, mixed; did you mean \"mixed\"?";
        assert_eq!(error, format!("{source}: {words}"));
    }
}

#[test]
fn wrong_file_value_is_an_error_despite_a_flag() {
    let overrides = overrides(&[], &[("mig-strategy", "mixed")]).unwrap();
    let wrong = load("config.yaml", "flags: {migStrategy: mixd}", overrides.layers(), Strictness::Strict);
    let problems = wrong.unwrap_err().list;
    assert_eq!((problems[0].line, problems[0].at.as_str()), (Some(1), "flags.migStrategy"));
}

/// The settings of NVIDIA's k8s-device-plugin and gpu-feature-discovery v0.20.0, written down from what they document and do, not from
/// our table: key, flags, variables, default, another value as text, and that value as the file has it.
type Row = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
    &'static str,
    &'static str,
    &'static str,
);

#[rustfmt::skip]
const NVIDIA: &[Row] = &[
    ("flags.migStrategy", &["mig-strategy"], &["MIG_STRATEGY", "GFD_MIG_STRATEGY"], "none", "mixed", "mixed"),
    ("flags.failOnInitError", &["fail-on-init-error"], &["FAIL_ON_INIT_ERROR", "GFD_FAIL_ON_INIT_ERROR"], "true", "false", "false"),
    ("flags.nvidiaDriverRoot", &["nvidia-driver-root", "driver-root"], &["NVIDIA_DRIVER_ROOT"], "/", "/x", "/x"),
    ("flags.nvidiaDevRoot", &["nvidia-dev-root", "dev-root"], &["NVIDIA_DEV_ROOT"], "/", "/x", "/x"),
    ("flags.gdrcopyEnabled", &["gdrcopy-enabled"], &["GDRCOPY_ENABLED"], "false", "true", "true"),
    ("flags.gdsEnabled", &["gds-enabled"], &["GDS_ENABLED"], "false", "true", "true"),
    ("flags.mofedEnabled", &["mofed-enabled"], &["MOFED_ENABLED"], "false", "true", "true"),
    ("flags.mpsRoot", &["mps-root"], &["MPS_ROOT"], "\"\"", "/run/nvidia/mps", "/run/nvidia/mps"),
    ("flags.deviceDiscoveryStrategy", &["device-discovery-strategy"], &["DEVICE_DISCOVERY_STRATEGY"], "auto", "nvml", "nvml"),
    ("flags.useNodeFeatureAPI", &["use-node-feature-api"], &["GFD_USE_NODE_FEATURE_API", "USE_NODE_FEATURE_API"], "true", "false", "false"),
    ("flags.plugin.passDeviceSpecs", &["pass-device-specs"], &["PASS_DEVICE_SPECS"], "false", "true", "true"),
    ("flags.plugin.deviceListStrategy", &["device-list-strategy"], &["DEVICE_LIST_STRATEGY"], "envvar", "volume-mounts", "volume-mounts"),
    ("flags.plugin.deviceIDStrategy", &["device-id-strategy"], &["DEVICE_ID_STRATEGY"], "uuid", "index", "index"),
    ("flags.plugin.cdiAnnotationPrefix", &["cdi-annotation-prefix"], &["CDI_ANNOTATION_PREFIX"], "cdi.k8s.io/", "x.io/", "x.io/"),
    ("flags.plugin.nvidiaCTKPath", &["nvidia-cdi-hook-path", "nvidia-ctk-path"], &["NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"], "/usr/bin/nvidia-ctk", "/x", "/x"),
    ("flags.plugin.containerDriverRoot", &["driver-root-ctr-path", "container-driver-root"], &["DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"], "/driver-root", "/x", "/x"),
    ("flags.plugin.sharedDevicesAllocationPolicy", &["shared-devices-allocation-policy"], &["SHARED_DEVICES_ALLOCATION_POLICY"], "distributed", "packed", "packed"),
    ("flags.gfd.oneshot", &["oneshot"], &["GFD_ONESHOT"], "false", "true", "true"),
    ("flags.gfd.noTimestamp", &["no-timestamp"], &["GFD_NO_TIMESTAMP"], "false", "true", "true"),
    ("flags.gfd.sleepInterval", &["sleep-interval"], &["GFD_SLEEP_INTERVAL"], "60s", "infinite", "infinite"),
    ("flags.gfd.outputFile", &["output-file", "output"], &["GFD_OUTPUT_FILE"], "/etc/kubernetes/node-feature-discovery/features.d/gfd", "/x", "/x"),
    ("flags.gfd.machineTypeFile", &["machine-type-file"], &["GFD_MACHINE_TYPE_FILE"], "/sys/class/dmi/id/product_name", "/x", "/x"),
    ("imex.channelIDs", &["imex-channel-ids"], &["IMEX_CHANNEL_IDS"], "[]", "0", "[0]"),
    ("imex.required", &["imex-required"], &["IMEX_REQUIRED"], "false", "true", "true"),
];

#[test]
fn nvidia_settings_have_key_flags_variables_default() {
    for (key, flags, variables, default, text, value) in NVIDIA {
        let in_file = |value: &str| {
            let depth = key.split('.').count();
            let file = format!("{}: {value}{}", key.replace('.', ": {"), "}".repeat(depth - 1));
            config(&file, &[], &[])
        };
        let said = in_file(value);
        // Said outright it holds for MIG devices too, for which it says nothing there.
        if *key != "flags.plugin.sharedDevicesAllocationPolicy" {
            assert_eq!(in_file(default), Config::default(), "{key}: {default}");
        }
        if !WITHOUT_EFFECT.contains(key) {
            assert_ne!(said, Config::default(), "{key}: {value}");
        }
        for variable in *variables {
            assert_eq!(config("", &[(variable, text)], &[]), said, "{variable}");
        }
        for flag in *flags {
            let known = SETTINGS.iter().any(|setting| setting.flags.contains(flag));
            assert!(known, "--{flag}");
            assert_eq!(config("", &[], &[(flag, text)]), said, "--{flag}");
        }
    }
    // These have flags only there, and keys here.
    for (flag, variable) in
        [("cdi-feature-flags", "CDI_FEATURE_FLAGS"), ("cdi-disable-hooks", "CDI_DISABLE_HOOKS")]
    {
        let setting = SETTINGS.iter().find(|setting| setting.flags == [flag]).unwrap();
        assert_eq!((&setting.env[..], setting.default), (&[variable][..], ""));
    }
}
