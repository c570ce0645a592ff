//! `gantry labels` in the place of NVIDIA's gpu-feature-discovery: with its flags, its variables and the same config
//! file.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use support::{Run, machine, piped, with};

fn labels(flags: &[&str], variables: &[(&str, &str)]) -> Run {
    let machine = machine("dgx-a100-mig.yaml");
    with(&[&["labels", "--from", &machine], flags].concat(), variables)
}

/// The labels that are printed, where nothing is wrong.
fn printed(flags: &[&str], variables: &[(&str, &str)]) -> String {
    let run = labels(flags, variables);
    assert_eq!(run.code, 0, "{flags:?} {variables:?}: {}", run.stderr);
    run.stdout
}

#[test]
fn booleans_have_gos_syntax() {
    let has_time = |flags: &[&str], variables: &[(&str, &str)]| {
        printed(flags, variables).contains("nvidia.com/gfd.timestamp=")
    };
    assert!(has_time(&[], &[]));
    for text in ["1", "t", "True", "true"] {
        assert!(!has_time(&[], &[("GFD_NO_TIMESTAMP", text)]), "{text}");
        let flag = format!("--no-timestamp={text}");
        assert!(!has_time(&[&flag], &[]), "{flag}");
    }
    assert!(!has_time(&["--no-timestamp"], &[]));
    for text in ["", "0", "false"] {
        assert!(has_time(&[], &[("GFD_NO_TIMESTAMP", text)]), "{text:?}");
    }
    assert!(has_time(&["--no-timestamp=false"], &[("GFD_NO_TIMESTAMP", "1")]));
    let wrong = labels(&[], &[("GFD_NO_TIMESTAMP", "maybe")]);
    assert_eq!(wrong.code, 2);
    insta::assert_snapshot!(wrong.stderr, @r#"
    error: environment: GFD_NO_TIMESTAMP: "maybe" is not allowed; write true or false


    Usage: gantry [OPTIONS] <COMMAND>

    For more information, try '--help'.
    "#);
}

#[test]
fn gfd_variable_precedes_plugin_variable_and_flag_both() {
    let strategy = |flags: &[&str], variables: &[(&str, &str)]| {
        let text = printed(flags, variables);
        let line = text.lines().find_map(|line| line.strip_prefix("nvidia.com/mig.strategy="));
        line.unwrap_or("none").to_owned()
    };
    let both = [("MIG_STRATEGY", "none"), ("GFD_MIG_STRATEGY", "mixed")];
    assert_eq!(strategy(&[], &both[..1]), "none");
    assert_eq!(strategy(&[], &both[1..]), "mixed");
    assert_eq!(strategy(&[], &both), "mixed");
    assert_eq!(strategy(&[], &[("MIG_STRATEGY", "mixed"), ("GFD_MIG_STRATEGY", "")]), "mixed");
    assert_eq!(strategy(&["--mig-strategy=single"], &both), "single");
}

#[test]
fn gfd_config_file_precedes_the_plugins() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, strategy: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("flags: {{migStrategy: {strategy}}}\n")).unwrap();
        path.display().to_string()
    };
    let (mixed, none) = (file("mixed", "mixed"), file("none", "none"));
    let is_mixed = |flags: &[&str], variables: &[(&str, &str)]| {
        printed(flags, variables).contains("nvidia.com/mig.strategy=mixed")
    };
    assert!(is_mixed(&[], &[("CONFIG_FILE", &mixed)]));
    assert!(is_mixed(&[], &[("GFD_CONFIG_FILE", &mixed)]));
    assert!(is_mixed(&[], &[("GFD_CONFIG_FILE", &mixed), ("CONFIG_FILE", &none)]));
    assert!(!is_mixed(&[], &[("GFD_CONFIG_FILE", &none), ("CONFIG_FILE", &mixed)]));
    assert!(is_mixed(&[], &[("GFD_CONFIG_FILE", ""), ("CONFIG_FILE", &mixed)]));
    let flag = format!("--config-file={mixed}");
    assert!(is_mixed(&[&flag], &[("GFD_CONFIG_FILE", &none)]));
}

#[test]
fn unknown_key_is_an_error_unless_lenient() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    std::fs::write(&path, "flags: {migStratgy: mixed}\n").unwrap();
    let file = format!("--config-file={}", path.display());
    let strict = labels(&[&file], &[]);
    assert_eq!(strict.code, 2);
    insta::assert_snapshot!(strict.stderr.replace(folder.path().to_str().unwrap(), ""), @r#"gantry: /config.yaml: line 1: flags.migStratgy: there is no such key; allowed: deviceDiscoveryStrategy, failOnInitError, gdrcopyEnabled, gdsEnabled, gfd, migStrategy, mofedEnabled, mpsRoot, nvidiaDevRoot, nvidiaDriverRoot, plugin, useNodeFeatureAPI; did you mean "migStrategy"?"#);
    printed(&[&file, "--lenient-config"], &[]);
    printed(&[&file], &[("GANTRY_LENIENT_CONFIG", "1")]);
}

#[test]
fn labels_are_written_to_gfds_destination() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("features.d/gfd");
    let file = path.display().to_string();
    let no_api = ("GFD_USE_NODE_FEATURE_API", "false");
    let run = labels(&["--to=gfd", "--oneshot"], &[no_api, ("GFD_OUTPUT_FILE", &file)]);
    assert_eq!((run.code, run.stdout.as_str()), (0, ""), "{}", run.stderr);
    let written = std::fs::read_to_string(&path).unwrap();
    assert!(written.contains("nvidia.com/gpu.count=8\n"), "{written}");
    // Standard output, as there.
    for to in ["--to=gfd", "--to=file"] {
        assert!(printed(&[to], &[no_api, ("GFD_OUTPUT_FILE", "")]).contains("nvidia.com/gpu.count=8\n"));
        assert!(printed(&[to, "-o", ""], &[no_api]).contains("nvidia.com/gpu.count=8\n"));
    }
    let config = folder.path().join("config.yaml");
    let text = format!("flags: {{useNodeFeatureAPI: false, gfd: {{outputFile: {file}}}}}\n");
    std::fs::write(&config, text).unwrap();
    std::fs::remove_file(&path).unwrap();
    printed(&["--to=gfd"], &[("CONFIG_FILE", config.to_str().unwrap())]);
    assert!(path.exists());
    // The object's owner has a name.
    let object = labels(&["--to=gfd"], &[]);
    assert_eq!(object.code, 2);
    assert!(object.stderr.contains("NODE_NAME"), "{}", object.stderr);
}

#[test]
fn every_gfd_flag_and_variable_is_accepted() {
    let flags = [
        "--mig-strategy=none",
        "--fail-on-init-error=false",
        "--oneshot",
        "--no-timestamp",
        "--sleep-interval=10s",
        "--output=/nowhere/gfd",
        "--machine-type-file=/nowhere",
        "--use-node-feature-api=false",
        "--device-discovery-strategy=nvml",
        "--driver-root-ctr-path=/driver-root",
        "--container-driver-root=/driver-root",
        "--kube-api-qps=5",
        "--kube-api-burst=10",
    ];
    let none = printed(&["--no-timestamp"], &[]);
    assert_eq!(printed(&flags, &[]), none);
    let variables = [
        ("GFD_MIG_STRATEGY", "none"),
        ("GFD_FAIL_ON_INIT_ERROR", "f"),
        ("GFD_ONESHOT", "1"),
        ("GFD_NO_TIMESTAMP", "T"),
        ("GFD_SLEEP_INTERVAL", "infinite"),
        ("GFD_OUTPUT_FILE", "/nowhere/gfd"),
        ("GFD_MACHINE_TYPE_FILE", ""),
        ("GFD_USE_NODE_FEATURE_API", "false"),
        ("DEVICE_DISCOVERY_STRATEGY", "auto"),
        ("DRIVER_ROOT_CTR_PATH", "/driver-root"),
        ("KUBECONFIG", ""),
        ("NAMESPACE", ""),
        ("KUBE_API_QPS", "2.5"),
        ("KUBE_API_BURST", "3"),
        // The plugin's alone, which gpu-feature-discovery does not read.
        ("DEVICE_LIST_STRATEGY", "nonsense"),
        ("PASS_DEVICE_SPECS", "nonsense"),
    ];
    assert_eq!(printed(&[], &variables), none);
}

#[test]
fn node_without_nvml_fails_by_fail_on_init_error() {
    let look = ["labels", "--nvml-library=/absent.so", "--no-timestamp"];
    let failed = with(&look, &[]);
    assert_eq!((failed.code, failed.stdout.as_str()), (1, ""));
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.yaml");
    std::fs::write(&config, "flags: {failOnInitError: false}\n").unwrap();
    let file = folder.path().join("gfd");
    std::fs::write(&file, "nvidia.com/gpu.count=8\n").unwrap();
    let to_file = [("GFD_OUTPUT_FILE", file.to_str().unwrap())];
    for (flags, variables) in [
        (vec!["--fail-on-init-error=false"], vec![]),
        (vec![], vec![("FAIL_ON_INIT_ERROR", "false")]),
        (vec![], vec![("GFD_FAIL_ON_INIT_ERROR", "0")]),
        (vec![], vec![("CONFIG_FILE", config.to_str().unwrap())]),
    ] {
        let run = with(&[&look[..], &flags].concat(), &variables);
        assert_eq!((run.code, run.stdout.as_str()), (0, ""), "{}", run.stderr);
        assert!(run.stderr.contains("without GPUs"), "{}", run.stderr);
        let timed = with(&[&look[..2], &flags].concat(), &variables);
        assert!(timed.stdout.starts_with("nvidia.com/gfd.timestamp="));
        assert_eq!(timed.stdout.lines().count(), 1, "{}", timed.stdout);
    }
    let written = with(&[&look[..], &["--to=file", "--fail-on-init-error=false"]].concat(), &to_file);
    assert_eq!(written.code, 0, "{}", written.stderr);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "");
    // What a file tells is no matter of a start.
    let absent = with(&["labels", "--from=/absent", "--fail-on-init-error=false"], &[]);
    assert_eq!(absent.code, 2, "{}", absent.stderr);
}

#[test]
fn mig_capability_defaults_to_the_product() {
    let capable = |gpu: &str| {
        let text = format!("gpus:\n  - {{index: 0, {gpu}}}\npaths: [[X]]\n");
        let run = piped(&["labels", "--from", "-", "--no-timestamp"], &text);
        assert_eq!(run.code, 0, "{gpu}: {}", run.stderr);
        let mut lines = run.stdout.lines();
        let reported = lines.find_map(|line| line.strip_prefix("nvidia.com/mig.capable="));
        reported.map(str::to_owned)
    };
    for (gpu, expected) in [
        ("model: NVIDIA H100 80GB HBM3", Some("true")),
        ("model: NVIDIA H100 80GB HBM3, computeCapability: \"9.0\"", Some("true")),
        ("model: NVIDIA L4, computeCapability: \"8.9\"", Some("false")),
        ("model: Tesla V100-SXM2-16GB, computeCapability: \"7.0\"", Some("false")),
        // Of these, nothing is known.
        ("model: NVIDIA L4", None),
        ("model: NVIDIA B999, computeCapability: \"10.7\"", None),
        ("uuid: GPU-f91de5ca-1a2b-3c4d-5e6f-0123456789ab", None),
    ] {
        assert_eq!(capable(gpu).as_deref(), expected, "{gpu}");
    }
}
