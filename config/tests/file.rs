//! Config files: the configuration that they give, and the errors for wrong ones.

#![allow(clippy::unwrap_used, clippy::panic)]

use gantry_config::{
    Config, DeviceIdStrategy, DeviceRef, Fault, LoadedConfig, MigStrategy, Problem, Problems,
    ReplicatedDevices, Selector, SharedDevices, Strategy, Strictness, load,
};

fn read(text: &str) -> Config {
    read_with(text, Strictness::Strict).config
}

fn read_with(text: &str, strictness: Strictness) -> LoadedConfig {
    load("config.yaml", text, &[], strictness).unwrap_or_else(|problems| panic!("{problems}"))
}

fn wrong(text: &str) -> Problems {
    match load("config.yaml", text, &[], Strictness::Strict) {
        Ok(loaded) => panic!("accepted: {:?}", loaded.config),
        Err(problems) => problems,
    }
}

#[test]
fn empty_file_gives_the_defaults() {
    for text in [
        "",
        "\n",
        "# nothing\n",
        "---\n",
        "version: v1\n",
        "{}",
        "version: \"\"\n",
        "flags:\nsharing:\n",
        "flags:\n  migStrategy:\nsharing: {mps: }\nresources: {gpus: }\n",
        "---\n---\n",
        "# nothing\n...\n",
    ] {
        assert_eq!(read(text), Config::default(), "{text:?}");
    }
}

#[test]
fn every_key_is_read() {
    let config = read(
        r#"
version: v1
flags:
  migStrategy: mixed
  failOnInitError: false
  nvidiaDriverRoot: /run/nvidia/driver
  nvidiaDevRoot: /dev-root
  gdrcopyEnabled: true
  gdsEnabled: true
  mofedEnabled: true
  mpsRoot: /run/nvidia/mps
  deviceDiscoveryStrategy: nvml
  useNodeFeatureAPI: false
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [cdi-cri, envvar, cdi-cri]
    deviceIDStrategy: index
    cdiAnnotationPrefix: my.io/
    nvidiaCTKPath: /usr/local/bin/nvidia-ctk
    containerDriverRoot: /host
    sharedDevicesAllocationPolicy: packed
    cdiFeatureFlags: [disable-nvsandboxutils]
    cdiDisableHooks: [all]
    podMetrics: true
    ncclTopology: true
  gfd:
    oneshot: true
    noTimestamp: true
    sleepInterval: infinite
    outputFile: ""
    machineTypeFile: /machine
resources:
  gpus:
    - {pattern: "NVIDIA A100*", name: a100}
  mig:
    - {pattern: "1g.10gb", name: nvidia.com/small}
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
      - {name: gpu, rename: nvidia.com/half, devices: [0, "1:2", GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c], replicas: 2}
      - {name: nvidia.com/mig-1g.10gb, devices: 3, replicas: 4}
imex: {channelIDs: [0], required: true}
devices:
  allow: [0, "1", GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c, "00000000:3B:00.0", "NVIDIA A100*"]
  deny: ["NVIDIA DGX Display", "07:00.0"]
"#,
    );
    assert_eq!(config.mig_strategy, MigStrategy::Mixed);
    assert!(!config.fail_on_init_error && config.pass_device_specs);
    assert_eq!(config.driver_root.to_str(), Some("/run/nvidia/driver"));
    assert_eq!(config.dev_root.to_str(), Some("/dev-root"));
    assert_eq!(config.container_driver_root.to_str(), Some("/host"));
    assert!(config.gdrcopy && config.gds && config.mofed);
    assert_eq!(config.device_list_strategy, [Strategy::Envvar, Strategy::CdiCri]);
    assert_eq!(config.device_id_strategy, DeviceIdStrategy::Index);
    assert_eq!(config.cdi_annotation_prefix, "my.io/");
    assert_eq!(config.cdi_hook_path.to_str(), Some("/usr/local/bin/nvidia-ctk"));
    assert_eq!(config.shared_devices, Some(SharedDevices::Packed));
    assert_eq!((config.cdi_feature_flags.len(), config.cdi_disabled_hooks.len()), (1, 1));
    let gfd = &config.gfd;
    assert!(gfd.oneshot && gfd.no_timestamp && !gfd.use_node_feature_api);
    assert_eq!((gfd.sleep_interval, &gfd.output_file), (None, &None));
    assert_eq!(gfd.machine_type_file.to_str(), Some("/machine"));
    assert_eq!(config.gpu_patterns[0].name.as_str(), "nvidia.com/a100");
    assert_eq!(config.mig_patterns[0].pattern, "1g.10gb");
    let sharing = config.time_slicing.as_ref().unwrap();
    assert!(sharing.rename_by_default && sharing.fail_requests_greater_than_one);
    let first = &sharing.resources[0];
    assert_eq!((first.name.as_str(), first.replicas), ("nvidia.com/gpu", 2));
    assert_eq!(first.rename.as_ref().unwrap().as_str(), "nvidia.com/half");
    assert_eq!(
        first.devices,
        ReplicatedDevices::Listed(vec![
            DeviceRef::Gpu(0),
            DeviceRef::Mig(1, 2),
            DeviceRef::Uuid("GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c".into())
        ])
    );
    assert_eq!(sharing.resources[1].devices, ReplicatedDevices::Count(3));
    assert!(config.imex.channel && config.imex.required);
    assert_eq!(
        config.allow,
        [
            Selector::Index(0),
            Selector::Index(1),
            Selector::Uuid("GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c".into()),
            Selector::BusId("0000:3b:00.0".parse().unwrap()),
            Selector::Model("NVIDIA A100*".into()),
        ]
    );
    assert_eq!(
        config.deny,
        [Selector::Model("NVIDIA DGX Display".into()), Selector::BusId("0000:07:00.0".parse().unwrap()),]
    );
    // What is printed reads the same, in both forms.
    assert_eq!(read(&config.to_json()), config);
    assert_eq!(read(&config.to_yaml().unwrap()), config);
    insta::assert_snapshot!(config.to_yaml().unwrap());
}

#[test]
fn misplaced_key_names_its_right_place() {
    for (text, at, belongs) in [
        ("flags: {renameByDefault: true}", "flags.renameByDefault", "sharing.timeSlicing.renameByDefault"),
        (
            "sharing: {renameByDefault: true}",
            "sharing.renameByDefault",
            "sharing.timeSlicing.renameByDefault",
        ),
        (
            "flags: {deviceListStrategy: envvar}",
            "flags.deviceListStrategy",
            "flags.plugin.deviceListStrategy",
        ),
        ("flags: {passDeviceSpecs: true}", "flags.passDeviceSpecs", "flags.plugin.passDeviceSpecs"),
        ("flags: {plugin: {migStrategy: mixed}}", "flags.plugin.migStrategy", "flags.migStrategy"),
        ("flags: {gfd: {migStrategy: mixed}}", "flags.gfd.migStrategy", "flags.migStrategy"),
        ("migStrategy: mixed", "migStrategy", "flags.migStrategy"),
        ("timeSlicing: {resources: []}", "timeSlicing", "sharing.timeSlicing"),
        (
            "sharing: {timeSlicing: {replicas: 2, resources: [{name: gpu, replicas: 2}]}}",
            "sharing.timeSlicing.replicas",
            "sharing.timeSlicing.resources[].replicas",
        ),
        (
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, renameByDefault: true}]}}",
            "sharing.timeSlicing.resources[0].renameByDefault",
            "sharing.timeSlicing.renameByDefault",
        ),
        ("flags: {pattern: x}", "flags.pattern", "resources.gpus[].pattern or resources.mig[].pattern"),
    ] {
        assert_eq!(unknown_key(&wrong(text).list), (at, belongs.split(" or ").collect(), None), "{text}");
        if let Ok(lenient) = load("x", text, &[], Strictness::Lenient) {
            assert_eq!(unknown_key(&lenient.warnings).1, belongs.split(" or ").collect::<Vec<_>>(), "{text}");
        }
    }
    insta::assert_snapshot!(wrong("flags: {pattern: x}"), @"config.yaml: line 1: flags.pattern: there is no such key; allowed: deviceDiscoveryStrategy, failOnInitError, gdrcopyEnabled, gdsEnabled, gfd, migStrategy, mofedEnabled, mpsRoot, nvidiaDevRoot, nvidiaDriverRoot, plugin, useNodeFeatureAPI; it belongs at resources.gpus[].pattern or resources.mig[].pattern");
    // Nothing is sent where it would be refused, and a slip is sent to its neighbour.
    assert_eq!(unknown_key(&wrong("mps: {}").list), ("mps", Vec::new(), None));
    let slip = wrong("flags: {migStratgy: mixed}").list;
    assert_eq!(unknown_key(&slip), ("flags.migStratgy", Vec::new(), Some("migStrategy")));
}

/// The place of the first problem, an unknown key, with the places where it belongs and the nearest key.
fn unknown_key(problems: &[Problem]) -> (&str, Vec<&str>, Option<&str>) {
    match &problems[0].fault {
        Fault::UnknownKey { belongs, nearest, .. } => {
            (&problems[0].at, belongs.iter().map(String::as_str).collect(), nearest.as_deref())
        }
        other => panic!("{other}"),
    }
}

#[test]
fn node_feature_api_is_read_under_flags_and_gfd() {
    let right = "flags: {useNodeFeatureAPI: false}";
    assert!(!read(right).gfd.use_node_feature_api);
    assert_eq!(read("flags: {gfd: {useNodeFeatureAPI: false}}"), read(right));
    assert_eq!(
        wrong("flags:\n  gfd:\n    useNodeFeatureAPI: maybe\n").to_string(),
        "config.yaml: line 3: flags.gfd.useNodeFeatureAPI: string \"maybe\" is not allowed; write true or false"
    );
    let both = "flags: {useNodeFeatureAPI: true, gfd: {useNodeFeatureAPI: false}}";
    assert_eq!(wrong(both).list[0].at, "flags.gfd.useNodeFeatureAPI");
}

#[test]
fn device_root_defaults_to_driver_root() {
    let config = read("flags: {nvidiaDriverRoot: /run/nvidia/driver}");
    assert_eq!(config.dev_root, config.driver_root);
    assert_eq!(read("flags: {nvidiaDriverRoot: \"\"}"), Config::default());
}

#[test]
fn mig_profile_as_resource_name_suggests_the_resource() {
    let text = |name: &str| {
        "flags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: \"NAME\", replicas: 2}]}}"
            .replace("NAME", name)
    };
    let names = [
        "1g.10gb+me",
        "mig-1g.10gb+me",
        "nvidia.com/mig-1g.24gb+gfx",
        "MIG 1g.5gb",
        "MIG-1c.2g.20gb",
        "1g.24gb+me.all",
        "GPU 1",
    ];
    insta::assert_snapshot!(names.map(|name| wrong(&text(name)).list[0].fault.to_string()).join("\n"), @r#"
    "1g.10gb+me" is no resource name; after nvidia.com/ lower-case letters, digits, - and . are allowed, with a letter or digit at both ends of every part; did you mean "nvidia.com/mig-1g.10gb.me"?
    "mig-1g.10gb+me" is no resource name; after nvidia.com/ lower-case letters, digits, - and . are allowed, with a letter or digit at both ends of every part; did you mean "nvidia.com/mig-1g.10gb.me"?
    "nvidia.com/mig-1g.24gb+gfx" is no resource name; after nvidia.com/ lower-case letters, digits, - and . are allowed, with a letter or digit at both ends of every part; did you mean "nvidia.com/mig-1g.24gb.gfx"?
    "MIG 1g.5gb" is no resource name; after nvidia.com/ lower-case letters, digits, - and . are allowed, with a letter or digit at both ends of every part; did you mean "nvidia.com/mig-1g.5gb"?
    "MIG-1c.2g.20gb" is no resource name; after nvidia.com/ lower-case letters, digits, - and . are allowed, with a letter or digit at both ends of every part; did you mean "nvidia.com/mig-1c.2g.20gb"?
    "1g.24gb+me.all" is no resource name; after nvidia.com/ lower-case letters, digits, - and . are allowed, with a letter or digit at both ends of every part; did you mean "nvidia.com/mig-1g.24gb.me.all"?
    "GPU 1" is no resource name; after nvidia.com/ lower-case letters, digits, - and . are allowed, with a letter or digit at both ends of every part
    "#);
    let warning = |name| read_with(&text(name), Strictness::Strict).warnings[0].fault.to_string();
    insta::assert_snapshot!(["1g.10gb", "1g.24gb-me"].map(warning).join("\n"), @r#"
    no device is called nvidia.com/1g.10gb before it is shared, so that this entry has no effect; allowed: nvidia.com/gpu, nvidia.com/mig-<profile>; did you mean "nvidia.com/mig-1g.10gb"?
    no device is called nvidia.com/1g.24gb-me before it is shared, so that this entry has no effect; allowed: nvidia.com/gpu, nvidia.com/mig-<profile>; did you mean "nvidia.com/mig-1g.24gb-me"?
    "#);
}

#[test]
fn json_and_yaml_give_the_same_config() {
    let yaml = "flags:\n  migStrategy: single\n  plugin:\n    deviceListStrategy: volume-mounts\n";
    let json = r#"{"flags": {"migStrategy": "single", "plugin": {"deviceListStrategy": ["volume-mounts"]}}}"#;
    assert_eq!(read(yaml), read(json));
    assert_eq!(read("flags: {failOnInitError: no}"), read("flags: {failOnInitError: false}"));
}

#[test]
fn bare_sleep_interval_is_nanoseconds_raised_to_1s() {
    let loaded = read_with("flags: {gfd: {sleepInterval: 60}}", Strictness::Strict);
    assert_eq!(loaded.config.gfd.sleep_interval.unwrap().as_secs(), 1);
    assert_eq!(
        loaded.warnings[0].to_string(),
        "line 1: flags.gfd.sleepInterval: 60ns is too short (a bare number is nanoseconds); 1s is used"
    );
    for minute in ["60000000000", "60000000000.0", "6e10", "6E+10"] {
        let interval = read(&format!("flags: {{gfd: {{sleepInterval: {minute}}}}}")).gfd.sleep_interval;
        assert_eq!(interval.unwrap().as_secs(), 60, "{minute}");
    }
}

#[test]
fn lenient_warns_of_unknown_keys_and_ignores_case() {
    let text = "flags: {migstrategy: mixed, colour: red}\nflags: {MigStrategy: single, colour: red}\n";
    let loaded = read_with(text, Strictness::Lenient);
    assert_eq!(loaded.config.mig_strategy, MigStrategy::Single);
    assert_eq!(loaded.warnings.len(), 1);
    assert_eq!(loaded.warnings[0].at, "flags.colour");
    // A value that cannot be is a mistake all the same.
    assert!(load("x", "flags: {migStrategy: some}", &[], Strictness::Lenient).is_err());
}

#[test]
fn time_slicing_keys_are_case_sensitive_when_lenient() {
    let text = "sharing: {TimeSlicing: {renamebydefault: true, failrequestsgreaterthanone: true, resources: [{name: gpu, replicas: 2, Rename: x}]}}";
    let loaded = read_with(text, Strictness::Lenient);
    let slicing = loaded.config.time_slicing.unwrap();
    assert!(!slicing.rename_by_default && !slicing.fail_requests_greater_than_one);
    assert_eq!(slicing.resources[0].rename, None);
    let reported: Vec<&str> = loaded.warnings.iter().map(|warning| warning.at.as_str()).collect();
    assert_eq!(reported.len(), 3, "{reported:?}");
    assert!(reported[1].ends_with(".renamebydefault"), "{reported:?}");
    let nameless = "sharing: {timeSlicing: {resources: [{Name: gpu, replicas: 2}]}}";
    assert!(load("x", nameless, &[], Strictness::Lenient).is_err());
}

#[test]
fn second_document_with_content_is_reported() {
    let first = "---\nflags: {migStrategy: mixed}\n";
    let mixed = read(first);
    assert_eq!(mixed.mig_strategy, MigStrategy::Mixed);
    for end in ["---\n", "---", "...\n", "--- # the end\n\n---\n"] {
        let loaded = read_with(&format!("{first}{end}"), Strictness::Strict);
        assert_eq!((loaded.config, loaded.warnings), (mixed.clone(), vec![]), "{end:?}");
    }
    let two = format!("{first}---\n\nflags: {{migStrategy: single}}\n");
    let reported = "line 5: another YAML document begins here (after --- or ...), and only the first one counts; a config file is one document";
    assert_eq!(wrong(&two).to_string(), format!("config.yaml: {reported}"));
    let loaded = read_with(&two, Strictness::Lenient);
    assert_eq!(loaded.config, mixed);
    assert_eq!(loaded.warnings.iter().map(ToString::to_string).collect::<Vec<_>>(), [reported]);
    insta::assert_snapshot!(wrong(&two.replace("mixed", "mixd")), @r#"config.yaml: 2 problems: line 2: flags.migStrategy: "mixd" is not allowed; allowed: none, single, mixed; did you mean "mixed"?; line 5: another YAML document begins here (after --- or ...), and only the first one counts; a config file is one document"#);
}

/// Whether a warning is of an entry that shares a name that no device has.
fn is_of_unknown_name(warning: &Problem) -> bool {
    warning.at.ends_with("].name")
}

#[test]
fn sharing_of_unserved_mig_devices_warns() {
    let text = "sharing: {timeSlicing: {resources: [{name: mig-1g.10gb, replicas: 2}]}}";
    assert_eq!(read_with(text, Strictness::Strict).warnings.len(), 1);
    let mixed = format!("{text}\nflags: {{migStrategy: mixed}}");
    assert!(read_with(&mixed, Strictness::Strict).warnings.is_empty());

    // Names that the file gives to MIG devices are theirs under single too.
    let named = "resources: {mig: [{pattern: 1g.10gb, name: small}]}
sharing: {timeSlicing: {resources: [{name: small, replicas: 2}]}}";
    let warnings = |strategy: &str| {
        let text = format!("{named}\nflags: {{migStrategy: {strategy}}}");
        let reported = read_with(&text, Strictness::Strict).warnings;
        reported.iter().filter(|reported| is_of_unknown_name(reported)).count()
    };
    assert_eq!(["none", "single", "mixed"].map(warnings), [1, 0, 0]);
    let single = format!("{text}\nflags: {{migStrategy: single}}");
    assert_eq!(read_with(&single, Strictness::Strict).warnings.len(), 1);
}

#[test]
fn sharing_of_unknown_name_warns() {
    let warnings = |name: &str| {
        let text = format!(
            "flags: {{migStrategy: mixed}}
resources: {{gpus: [{{pattern: \"*A100*\", name: a100}}], mig: [{{pattern: 1g.5gb, name: small}}]}}
sharing: {{timeSlicing: {{resources: [{{name: {name}, replicas: 2}}]}}}}"
        );
        let reported = read_with(&text, Strictness::Strict).warnings;
        let reported = reported.iter().filter(|reported| is_of_unknown_name(reported));
        reported.map(ToString::to_string).collect::<Vec<_>>()
    };
    for (name, nearest) in [
        ("gpus", "; did you mean \"nvidia.com/gpu\"?"),
        ("gpu.shared", "; did you mean \"nvidia.com/gpu\"?"),
        ("a10", "; did you mean \"nvidia.com/a100\"?"),
        ("small.shared", "; did you mean \"nvidia.com/small\"?"),
        ("something-else", ""),
    ] {
        assert_eq!(
            warnings(name),
            [format!(
                "line 3: sharing.timeSlicing.resources[0].name: no device is called nvidia.com/{name} before it is shared, so that this entry has no effect; allowed: nvidia.com/gpu, nvidia.com/mig-<profile>, nvidia.com/a100, nvidia.com/small{nearest}"
            )]
        );
    }
    for name in ["gpu", "mig-1g.5gb", "mig-3g.20gb", "a100", "small"] {
        assert!(warnings(name).is_empty(), "{name}");
    }
}

#[test]
fn sharing_by_name_that_a_star_pattern_replaced_warns() {
    let warnings = |strategy: &str, pattern: &str, name: &str| {
        let text = format!(
            "flags: {{migStrategy: {strategy}}}
resources: {{gpus: [{{pattern: \"{pattern}\", name: {name}}}]}}
sharing: {{timeSlicing: {{resources: [{{name: gpu, replicas: 2}}]}}}}"
        );
        let reported = read_with(&text, Strictness::Strict).warnings;
        let reported = reported.iter().filter(|reported| is_of_unknown_name(reported));
        reported.map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(
        warnings("none", "*", "a100"),
        [
            "line 3: sharing.timeSlicing.resources[0].name: no device is called nvidia.com/gpu before it is shared, so that this entry has no effect; allowed: nvidia.com/a100, nvidia.com/mig-<profile>; did you mean \"nvidia.com/a100\"?"
        ]
    );
    assert_eq!(warnings("single", "*", "a100").len(), 1, "MIG devices are called as their GPUs are");
    for (strategy, pattern, name) in [("none", "*A100*", "a100"), ("none", "*", "gpu")] {
        assert!(warnings(strategy, pattern, name).is_empty(), "{strategy}, {pattern}, {name}");
    }
}

#[test]
fn keys_that_nvidia_ignores_are_warned_of() {
    let warnings = |text: &str| {
        let warnings = read_with(text, Strictness::Strict).warnings;
        warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let text = "flags: {migStrategy: mixed}
resources:
  gpus:
  - {pattern: \"*A100*\", name: gpu-a100}
  - {pattern: \"*\", name: gpu-other}
  mig:
  - {pattern: 1g.10gb+me, name: small}
sharing:
  timeSlicing:
    resources:
    - {name: gpu-a100, rename: half, devices: [0], replicas: 2}
    - {name: small, rename: small.shared, replicas: 2}
";
    assert_eq!(
        warnings(text),
        [
            "line 3: resources.gpus: NVIDIA's plugin ignores this key; here it is applied",
            "line 6: resources.mig: NVIDIA's plugin ignores this key; here it is applied",
            "line 11: sharing.timeSlicing.resources[0].rename: NVIDIA's plugin ignores this key; here it is applied",
            "line 11: sharing.timeSlicing.resources[0].devices: NVIDIA's plugin ignores this key; here it is applied",
            "line 12: sharing.timeSlicing.resources[1].rename: NVIDIA's plugin ignores this key; here it is applied",
        ]
    );
    for same in [
        "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, rename: nvidia.com/gpu.shared, devices: all, replicas: 2}]}}",
        "sharing: {timeSlicing: {resources: [{name: gpu, rename: gpu, replicas: 2}]}}",
    ] {
        assert!(warnings(same).is_empty(), "{same}: {:?}", warnings(same));
    }
}

#[test]
fn mig_profile_spellings_are_one_pattern() {
    let twice =
        "resources: {mig: [{pattern: 1g.5gb+me, name: small}, {pattern: MIG 1g.5gb.me, name: other}]}";
    insta::assert_snapshot!(wrong(twice), @r#"config.yaml: line 1: resources.mig[1].pattern: "MIG 1g.5gb.me" never counts: resources.mig[0] matches all of it first"#);
    insta::assert_snapshot!(wrong("resources: {mig: [{pattern: \"MIG \", name: small}]}"), @"config.yaml: line 1: resources.mig[0].pattern: an empty pattern matches nothing; * matches everything");
}

#[test]
fn number_with_leading_zero_is_octal() {
    let replicas = |text: &str| {
        let config =
            read(&format!("sharing: {{timeSlicing: {{resources: [{{name: gpu, replicas: {text}}}]}}}}"));
        config.time_slicing.unwrap().resources[0].replicas
    };
    assert_eq!([replicas("010"), replicas("10"), replicas("0x10"), replicas("08")], [8, 10, 16, 8]);
    let text = read("resources: {gpus: [{pattern: \"010\", name: gpu}]}");
    assert_eq!(read(&text.to_yaml().unwrap()), text, "text stays text");
}

#[test]
fn annotation_prefix_and_host_paths_are_checked() {
    for good in ["cdi.k8s.io/", "example.com/a.b_", "\"\""] {
        read(&format!("flags: {{plugin: {{cdiAnnotationPrefix: {good}}}}}"));
    }
    let refused = |key: &str, value: &str| {
        let end = "}".repeat(key.matches('{').count());
        wrong(&format!("flags: {{{key}{value:?}{end}}}")).to_string()
    };
    let bad = ["Bad Prefix!!", "cdi.k8s.io", "/", "a/b/", "cdi..io/", "cdi.k8s.io/-", "cdi.k8s.io/toolong"];
    insta::assert_snapshot!(
        bad.map(|bad| refused("plugin: {cdiAnnotationPrefix: ", bad)).join("\n"),
        @r#"
    config.yaml: line 1: flags.plugin.cdiAnnotationPrefix: "Bad Prefix!!" begins no annotation; write a domain and a slash, such as cdi.k8s.io/
    config.yaml: line 1: flags.plugin.cdiAnnotationPrefix: "cdi.k8s.io" begins no annotation; write a domain and a slash, such as cdi.k8s.io/
    config.yaml: line 1: flags.plugin.cdiAnnotationPrefix: "/" begins no annotation; write a domain and a slash, such as cdi.k8s.io/
    config.yaml: line 1: flags.plugin.cdiAnnotationPrefix: "a/b/" begins no annotation; write a domain and a slash, such as cdi.k8s.io/
    config.yaml: line 1: flags.plugin.cdiAnnotationPrefix: "cdi..io/" begins no annotation; write a domain and a slash, such as cdi.k8s.io/
    config.yaml: line 1: flags.plugin.cdiAnnotationPrefix: "cdi.k8s.io/-" begins no annotation; write a domain and a slash, such as cdi.k8s.io/
    config.yaml: line 1: flags.plugin.cdiAnnotationPrefix: "cdi.k8s.io/toolong" begins no annotation; write a domain and a slash, such as cdi.k8s.io/
    "#
    );
    let keys = ["nvidiaDriverRoot: ", "nvidiaDevRoot: ", "plugin: {nvidiaCTKPath: "];
    for key in keys {
        let close = if key.contains('{') { "}" } else { "" };
        read(&format!("flags: {{{key}/x{close}}}"));
    }
    insta::assert_snapshot!(keys.map(|key| refused(key, "relative/path")).join("\n"), @r#"
    config.yaml: line 1: flags.nvidiaDriverRoot: "relative/path" is not an absolute path of the host, which runtimes require: begin it with /
    config.yaml: line 1: flags.nvidiaDevRoot: "relative/path" is not an absolute path of the host, which runtimes require: begin it with /
    config.yaml: line 1: flags.plugin.nvidiaCTKPath: "relative/path" is not an absolute path of the host, which runtimes require: begin it with /
    "#);
}

#[test]
fn alias_bomb_is_refused_with_a_plain_message() {
    let bomb: String = (1..30).map(|n| format!("a{n}: &a{n} [*a{}, *a{}]\n", n - 1, n - 1)).collect();
    insta::assert_snapshot!(
        wrong(&format!("a0: &a0 x\n{bomb}")),
        @"config.yaml: line 15: not well-formed: it has more than 50000 keys and values, all aliases (*name) written out"
    );
    insta::assert_snapshot!(
        wrong(&format!("a: {}", "[".repeat(100))),
        @"config.yaml: line 1: not well-formed: it is nested more than 32 levels deep"
    );
    let words = format!("devices:\n  deny: [{}]\n", "0, ".repeat(60_000));
    insta::assert_snapshot!(
        wrong(&words),
        @"config.yaml: line 2: not well-formed: it has more than 50000 keys and values, all aliases (*name) written out"
    );
}

#[test]
fn errors_name_place_and_allowed_values() {
    let mut report = String::new();
    for text in [
        "flags:\n  migStratgy: mixed\n",
        "flags: {migStrategy: mixd}",
        "flags: {migStrategy: 5}",
        "flags: {failOnInitError: \"maybe\"}",
        "flags: 5",
        "version: v2",
        "version: 1",
        "colour: red",
        "flags:\n  plugin:\n    deviceListStrategy: [envvar, cdi-cir]\n",
        "flags: {plugin: {deviceListStrategy: []}}",
        "flags: {plugin: {cdiDisableHooks: all}}",
        "flags: {plugin: {deviceIDStrategy: uid}}",
        "flags: {plugin: {deviceIDStrategy: [uuid]}}",
        "flags: {deviceDiscoveryStrategy: tegra}",
        "flags: {plugin: {cdiDisableHooks: [update-ldcach]}}",
        "flags: {gfd: {sleepInterval: 60 s}}",
        "imex: {channelIDs: [0, 1]}",
        "sharing: {timeSlicing: {}}",
        "sharing:\n  timeSlicing:\n",
        "sharing:\n  timeSlicing:\n    resources:\n    - name: gpu\n      replicas: 2\n      rename:\n      devices:\n",
        "sharing: {timeSlicing: {resources: []}}",
        "sharing:\n  timeSlicing:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: 1\n",
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: \"4\"}]}}",
        "sharing: {timeSlicing: {resources: {name: gpu, replicas: 4}}}",
        "sharing: {timeSlicing: {resources: gpu}}",
        "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu}]}}",
        "sharing: {timeSlicing: {resources: [{name: amd.com/gpu, replicas: 2}]}}",
        "sharing: {timeSlicing: {resources: [{name: GPU, replicas: 2}]}}",
        "sharing: {timeSlicing: {resources: [{name: a123456789b123456789c123456789d123456789e123456789f1234, replicas: 2}]}}",
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: none}]}}",
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0, zero]}]}}",
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 0}]}}",
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: nvidia.com/gpu, replicas: 4}]}}",
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0, 1]}, {name: gpu, replicas: 4, devices: [1]}]}}",
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0, 0]}]}}",
        "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}",
        "resources: {gpus: [{pattern: \"*\", name: gpu}, {pattern: A100, name: a100}]}",
        "resources: {gpus: [{pattern: A100}]}",
        "devices: {deny: [-1, true]}",
        "devices: {deny: [\"4:0\", \"07:00\"]}",
        "devices: {deny: [f91de5ca-1a2b-3c4d-5e6f-0123456789ab]}",
        "devices: {deny: [gpu-f91de5ca-1a2b-3c4d-5e6f-0123456789ab]}",
        "devices: {allow: [Mig-f91de5ca-1a2b-3c4d-5e6f-0123456789ab]}",
        "devices: {deny: GPU-f91de5ca-1a2b-3c4d-5e6f-0123456789ab}",
        "devices: {deny: [GPU-zzz]}",
        "devices: {allow: [MIG-GPU-f91de5ca-1a2b-3c4d-5e6f-0123456789ab/7]}",
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [GPU-zzz]}]}}",
        "flags: {migStrategy: single}\nflags: {}\n",
        "flags: [\n",
        "- a\n- b\n",
        "hello",
    ] {
        report.push_str(&format!("{}\n=> {}\n\n", text.trim_end(), wrong(text)));
    }
    insta::assert_snapshot!(report);
}

#[test]
fn all_problems_are_reported_in_file_order() {
    let problems = wrong(
        "flags:\n  migStratgy: mixed\n  failOnInitError: perhaps\nsharing:\n  timeSlicing:\n    resources:\n    - {name: amd.com/gpu, replicas: 1}\n    - {name: gpu, replicas: 70000}\n",
    );
    insta::assert_snapshot!(problems.list.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
    let problems = wrong(
        "flags:\n  migStrategy: mixd\n  nvidiaDriverRoot: x\nsharing:\n  mps: {resources: [{name: gpu, replicas: 1}]}\n  timeSlicing:\n    resources:\n    - {name: gpu, replicas: 1}\n    - {name: gpu, replicas: 2}\n    - {name: gpu, replicas: 4}\nresources:\n  gpus:\n  - {pattern: A, name: B}\n  - {pattern: \"*\", name: gpu}\n  - {pattern: C, name: c}\n",
    );
    let reported: Vec<String> = problems.list.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(reported.join("\n"));
}

#[test]
fn many_problems_are_listed_up_to_a_limit() {
    let unknown: String = (0..2_000).map(|key| format!("key{key}: 1\n")).collect();
    let problems = wrong(&unknown).list;
    assert_eq!(problems.len(), 33);
    assert_eq!(problems[31].at, "key31");
    let last = problems[32].to_string();
    assert_eq!(last, "line 33: more problems follow from here on, which are not listed");
}

/// Once a warning for each entry listed all names, which took gigabytes and minutes.
#[test]
fn warnings_on_thousands_of_names_are_bounded() {
    let patterns: String =
        (0..3_000).map(|name| format!("  - {{pattern: model {name}, name: model-{name}}}\n")).collect();
    let entries: String =
        (0..3_000).map(|name| format!("    - {{name: other-{name}, replicas: 2}}\n")).collect();
    let text = format!("sharing:\n  timeSlicing:\n    resources:\n{entries}resources:\n  gpus:\n");
    let loaded =
        read_with(&format!("{text}  - {{pattern: \"*\", name: nvidia.com/gpu}}\n"), Strictness::Strict);
    assert_eq!(loaded.warnings.len(), 33);
    insta::assert_snapshot!(loaded.warnings[0], @"line 4: sharing.timeSlicing.resources[0].name: no device is called nvidia.com/other-0 before it is shared, so that this entry has no effect; allowed: nvidia.com/gpu, nvidia.com/mig-<profile>");
    let all = read_with(&format!("{text}{patterns}"), Strictness::Strict);
    assert_eq!((all.warnings.len(), all.config.gpu_patterns.len()), (33, 3_000));
    // One name that nothing has, among thousands that there are.
    let one = format!(
        "sharing: {{timeSlicing: {{resources: [{{name: model-2999x, replicas: 2}}]}}}}\nresources:\n  mig:\n{patterns}"
    );
    let warnings = read_with(&one, Strictness::Strict).warnings;
    insta::assert_snapshot!(warnings[0], @r#"line 1: sharing.timeSlicing.resources[0].name: no device is called nvidia.com/model-2999x before it is shared, so that this entry has no effect; allowed: nvidia.com/gpu, nvidia.com/mig-<profile>, nvidia.com/model-0, nvidia.com/model-1, nvidia.com/model-2, nvidia.com/model-3, nvidia.com/model-4, nvidia.com/model-5, nvidia.com/model-6, nvidia.com/model-7, nvidia.com/model-8, nvidia.com/model-9, nvidia.com/model-10, nvidia.com/model-11, nvidia.com/model-12, nvidia.com/model-13, nvidia.com/model-14, nvidia.com/model-15, nvidia.com/model-16, nvidia.com/model-17, nvidia.com/model-18, nvidia.com/model-19, nvidia.com/model-20, nvidia.com/model-21, nvidia.com/model-22, nvidia.com/model-23, nvidia.com/model-24, nvidia.com/model-25, nvidia.com/model-26, nvidia.com/model-27, nvidia.com/model-28, nvidia.com/model-29, nvidia.com/model-30 and 2969 more; did you mean "nvidia.com/model-29"?"#);
}

#[test]
fn uuid_must_be_complete() {
    let uuid = "f91de5ca-1a2b-3c4d-5e6f-0123456789AB";
    for good in [format!("GPU-{uuid}"), format!("MIG-{uuid}"), format!("MIG-GPU-{uuid}/7/0")] {
        let text = format!(
            "devices: {{allow: [{good}]}}\nsharing: {{timeSlicing: {{resources: [{{name: gpu, replicas: 2, devices: [{good}]}}]}}}}"
        );
        assert_eq!(read(&text).allow, [Selector::Uuid(good)]);
    }
    let mut reported = Vec::new();
    for bad in [
        "GPU-bad".to_owned(),
        "GPU-".to_owned(),
        "MIG-7".to_owned(),
        format!("GPU-{}", &uuid[1..]),
        format!("GPU-{uuid}0"),
        format!("GPU-{}", uuid.replace('-', "")),
        format!("GPU-{}", uuid.replace('f', "g")),
        format!("GPU-{uuid}/7/0"),
        format!("MIG-GPU-{uuid}"),
        format!("MIG-GPU-{uuid}/7/"),
        format!("MIG-GPU-{uuid}/7/0/1"),
        format!("MIG-GPU-{uuid}/a/0"),
        format!("MIG-GPU-{}/7/0", &uuid[1..]),
    ] {
        let faults = [
            format!("devices: {{allow: [{bad}]}}"),
            format!("devices: {{deny: [{bad}]}}"),
            format!(
                "sharing: {{timeSlicing: {{resources: [{{name: gpu, replicas: 2, devices: [{bad}]}}]}}}}"
            ),
        ]
        .map(|text| wrong(&text).list.remove(0).fault);
        assert!(faults.iter().all(|fault| *fault == faults[0]), "{faults:?}");
        reported.push(faults[0].to_string());
    }
    insta::assert_snapshot!(reported.join("\n"), @r#"
    "GPU-bad" is no UUID of a GPU; write it in full, as nvidia-smi -L prints it: GPU- and 8-4-4-4-12 hexadecimal digits
    "GPU-" is no UUID of a GPU; write it in full, as nvidia-smi -L prints it: GPU- and 8-4-4-4-12 hexadecimal digits
    "MIG-7" is no UUID of a MIG device; write it in full, as nvidia-smi -L prints it: MIG- and 8-4-4-4-12 hexadecimal digits
    "GPU-91de5ca-1a2b-3c4d-5e6f-0123456789AB" is no UUID of a GPU; write it in full, as nvidia-smi -L prints it: GPU- and 8-4-4-4-12 hexadecimal digits
    "GPU-f91de5ca-1a2b-3c4d-5e6f-0123456789AB0" is no UUID of a GPU; write it in full, as nvidia-smi -L prints it: GPU- and 8-4-4-4-12 hexadecimal digits
    "GPU-f91de5ca1a2b3c4d5e6f0123456789AB" is no UUID of a GPU; write it in full, as nvidia-smi -L prints it: GPU- and 8-4-4-4-12 hexadecimal digits
    "GPU-g91de5ca-1a2b-3c4d-5e6g-0123456789AB" is no UUID of a GPU; write it in full, as nvidia-smi -L prints it: GPU- and 8-4-4-4-12 hexadecimal digits
    "GPU-f91de5ca-1a2b-3c4d-5e6f-0123456789AB/7/0" is no UUID of a GPU; write it in full, as nvidia-smi -L prints it: GPU- and 8-4-4-4-12 hexadecimal digits
    "MIG-GPU-f91de5ca-1a2b-3c4d-5e6f-0123456789AB" is no UUID of a MIG device; write it in full, as nvidia-smi -L prints it: MIG- and 8-4-4-4-12 hexadecimal digits
    "MIG-GPU-f91de5ca-1a2b-3c4d-5e6f-0123456789AB/7/" is no UUID of a MIG device; write it in full, as nvidia-smi -L prints it: MIG- and 8-4-4-4-12 hexadecimal digits
    "MIG-GPU-f91de5ca-1a2b-3c4d-5e6f-0123456789AB/7/0/1" is no UUID of a MIG device; write it in full, as nvidia-smi -L prints it: MIG- and 8-4-4-4-12 hexadecimal digits
    "MIG-GPU-f91de5ca-1a2b-3c4d-5e6f-0123456789AB/a/0" is no UUID of a MIG device; write it in full, as nvidia-smi -L prints it: MIG- and 8-4-4-4-12 hexadecimal digits
    "MIG-GPU-91de5ca-1a2b-3c4d-5e6f-0123456789AB/7/0" is no UUID of a MIG device; write it in full, as nvidia-smi -L prints it: MIG- and 8-4-4-4-12 hexadecimal digits
    "#);
}

#[test]
fn empty_device_list_means_all_devices() {
    let text = "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: []}]}}";
    let loaded = read_with(text, Strictness::Strict);
    let sharing = loaded.config.time_slicing.as_ref().unwrap();
    assert_eq!(sharing.resources[0].devices, ReplicatedDevices::All);
    let reported: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        reported,
        [
            "line 1: sharing.timeSlicing.resources[0].devices: the list is empty, which means all devices, as with NVIDIA's plugin; leave the key out instead"
        ]
    );
    let twice = "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: []}, {name: gpu, replicas: 4, devices: [1]}]}}";
    insta::assert_snapshot!(wrong(twice), @"config.yaml: line 1: sharing.timeSlicing.resources[1].devices: nvidia.com/gpu is shared by sharing.timeSlicing.resources[0] already; to share its devices differently, list them in both entries");
}

#[test]
fn wrong_entry_causes_no_error_in_another() {
    for text in [
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}",
        "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: none}, {name: gpu, replicas: 4, devices: [1]}]}}",
        "resources: {gpus: [{pattern: A, name: B}, {pattern: A, name: a}]}",
        "sharing: {timeSlicing: {resources: 5}}",
        "sharing: 5",
    ] {
        assert_eq!(wrong(text).list.len(), 1, "{text}: {}", wrong(text));
    }
}
