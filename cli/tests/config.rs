//! `gantry plugin --check-config` as a pipeline uses it: 0 and what is in effect, or 1 and everything that is wrong.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use support::{command, gantry, machine, piped};

fn check(text: &str, more: &[&str]) -> support::Run {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    std::fs::write(&file, text).unwrap();
    let flag = format!("--check-config={}", file.display());
    let mut run = gantry(&[&["plugin", &flag], more].concat());
    run.stderr = run.stderr.replace(folder.path().to_str().unwrap(), "");
    run
}

#[test]
fn valid_file_prints_a_valid_full_configuration() {
    let run = check("flags: {migStrategy: mixed}", &["--fail-on-init-error=false"]);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    let printed: serde_json::Value = serde_saphyr::from_str(&run.stdout).unwrap();
    assert_eq!(printed["flags"]["migStrategy"], "mixed");
    assert_eq!(printed["flags"]["failOnInitError"], false);
    assert_eq!(check(&run.stdout, &[]).stdout, run.stdout);
}

#[test]
fn invalid_file_lists_errors_by_line() {
    let run = check(
        "flags:\n  migStratgy: mixed\nsharing:\n  timeSlicing:\n    resources:\n    - {name: gpu, replicas: 1}\n",
        &[],
    );
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    insta::assert_snapshot!(run.stderr);
    let lenient = check("flags: {migStratgy: mixed}", &["--lenient-config"]);
    assert_eq!(lenient.code, 0);
    insta::assert_snapshot!(lenient.stderr, @r#"gantry: warning: /config.yaml: line 1: flags.migStratgy: there is no such key; allowed: deviceDiscoveryStrategy, failOnInitError, gdrcopyEnabled, gdsEnabled, gfd, migStrategy, mofedEnabled, mpsRoot, nvidiaDevRoot, nvidiaDriverRoot, plugin, useNodeFeatureAPI; did you mean "migStrategy"?"#);
}

#[test]
fn invalid_variable_is_a_usage_error_and_names_it() {
    let mut run = command(&["plugin", "--check-config=/dev/null"]);
    let run = run.env("MIG_STRATEGY", "mixd").output().unwrap();
    assert_eq!(run.status.code(), Some(2));
    insta::assert_snapshot!(String::from_utf8(run.stderr).unwrap(), @r#"
    error: environment: MIG_STRATEGY: "mixd" is not allowed; allowed: none, single, mixed; did you mean "mixed"?


    Usage: gantry [OPTIONS] <COMMAND>

    For more information, try '--help'.
    "#);
}

#[test]
fn check_reports_warnings_of_a_node() {
    let run = check("sharing: {timeSlicing: {resources: [{name: gpu, devices: [0], replicas: 2}]}}", &[]);
    assert_eq!(run.code, 0);
    insta::assert_snapshot!(run.stderr, @"gantry: warning: /config.yaml: line 1: sharing.timeSlicing.resources[0].devices: NVIDIA's plugin ignores this key; here it is applied");
}

#[test]
fn config_map_is_checked_key_by_key() {
    let manifest = |shared: &str| {
        format!(
            "apiVersion: v1
kind: Namespace
metadata: {{name: gpu}}
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: device-plugin-config, namespace: gpu}}
data:
  mixed: |
    flags: {{migStrategy: mixed}}
    devices: {{deny: [0]}}
  shared.yaml: |
    sharing:
      timeSlicing:
        resources: [{shared}]
"
        )
    };
    let run = check(&manifest("{name: gpu, replicas: 2, devices: [1]}"), &[]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let documents: Vec<&str> = run.stdout.split("---\n").collect();
    assert_eq!(documents.len(), 3);
    assert!(
        documents[1].contains("/config.yaml, device-plugin-config/mixed\n")
            && documents[1].contains("migStrategy: mixed")
    );
    assert!(
        documents[2].contains("/config.yaml, device-plugin-config/shared.yaml\n")
            && documents[2].contains("replicas: 2")
    );
    insta::assert_snapshot!(run.stderr, @"gantry: warning: /config.yaml, device-plugin-config/shared.yaml: line 3: sharing.timeSlicing.resources[0].devices: NVIDIA's plugin ignores this key; here it is applied");

    let wrong = manifest("{name: gpu, replicas: 1}").replace("migStrategy", "migStratgy");
    let run = check(&wrong, &[]);
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    insta::assert_snapshot!(run.stderr, @r#"
    gantry: /config.yaml, device-plugin-config/mixed: not served:
      line 1: flags.migStratgy: there is no such key; allowed: deviceDiscoveryStrategy, failOnInitError, gdrcopyEnabled, gdsEnabled, gfd, migStrategy, mofedEnabled, mpsRoot, nvidiaDevRoot, nvidiaDriverRoot, plugin, useNodeFeatureAPI; did you mean "migStrategy"?
    /config.yaml, device-plugin-config/shared.yaml: not served:
      line 3: sharing.timeSlicing.resources[0].replicas: 1 replicas are not possible; write 2 to 65535, or leave the entry out for a device that is not shared
    "#);
    let run = check("kind: ConfigMap\nmetadata: {name: x}\n", &[]);
    assert_eq!(run.code, 1);
    insta::assert_snapshot!(run.stderr, @"gantry: /config.yaml: the ConfigMap has no configuration in data");
}

/// A ConfigMap with one key, as pools of nodes have them: the key is the same in each.
fn config_map(name: &str, key: &str, text: &str) -> String {
    let text = text.replace('\n', "\n    ");
    format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\ndata:\n  {key}: |\n    {text}\n")
}

const GOOD: &str = "version: v1\nflags: {migStrategy: none}";
const WRONG: &str = "version: v1\nsharing:\n  timeSlicing:\n    replicas: 8";

#[test]
fn config_maps_with_equal_keys_are_each_checked() {
    let (wrong, good) =
        (config_map("nvidia-a100", "config.yaml", WRONG), config_map("nvidia-t4", "config.yaml", GOOD));
    let [first, last] = [format!("{wrong}---\n{good}"), format!("{good}---\n{wrong}")].map(|both| {
        let run = check(&both, &[]);
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{both}");
        run.stderr
    });
    assert_eq!(first, last);
    insta::assert_snapshot!(first, @r"
    gantry: /config.yaml, nvidia-a100/config.yaml: not served:
      line 3: sharing.timeSlicing: resources is missing
      line 4: sharing.timeSlicing.replicas: there is no such key; allowed: failRequestsGreaterThanOne, renameByDefault, resources; it belongs at sharing.timeSlicing.resources[].replicas
    ");
    let list = format!(
        "apiVersion: v1\nkind: List\nitems:\n- {}\n- {}\n",
        good.trim_end().replace('\n', "\n  "),
        wrong.trim_end().replace('\n', "\n  ")
    );
    let run = check(&list, &[]);
    assert_eq!(run.code, 1);
    assert_eq!(run.stderr, first);
}

#[test]
fn other_config_map_is_named() {
    let other = config_map("hami", "device-config.yaml", "nvidia: {deviceSplitCount: 10}");
    let both = format!("{}---\n{other}", config_map("plugin", "any", GOOD));
    let run = check(&both, &[]);
    assert_eq!(run.code, 1);
    insta::assert_snapshot!(run.stderr, @r"
    gantry: /config.yaml, hami/device-config.yaml: not served:
      line 1: nvidia: there is no such key; allowed: devices, flags, imex, resources, sharing, version
    ");
    // What NVIDIA's MIG manager reads is known.
    let other = config_map("mig-parted", "config.yaml", "version: v1\nmig-configs: {}");
    let run = check(&format!("{}---\n{other}", config_map("plugin", "any", GOOD)), &[]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    insta::assert_snapshot!(run.stderr, @"gantry: warning: /config.yaml: the ConfigMap mig-parted has no configuration and is left out");
    let run = check(&other, &[]);
    assert_eq!(run.code, 1);
    insta::assert_snapshot!(run.stderr, @r"
    gantry: /config.yaml, mig-parted/config.yaml: not served:
      line 2: mig-configs: this is a configuration of NVIDIA's MIG manager (mig-parted), not of a device plugin
    ");
    // What cannot be one, such as a script or a number, is no configuration that failed, where another ConfigMap has
    // one.
    let other = config_map("exporter", "interval", "30000");
    let run = check(&format!("{}---\n{other}", config_map("plugin", "any", GOOD)), &[]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout.contains("/config.yaml, plugin/any\n"), "{}", run.stdout);
    insta::assert_snapshot!(run.stderr, @"gantry: warning: /config.yaml: the ConfigMap exporter has no configuration and is left out");
    let run = check(&other, &[]);
    assert_eq!(run.code, 1, "alone it is what was meant");
}

#[test]
fn other_manifest_kinds_are_named_with_the_config_key() {
    let release = "apiVersion: helm.toolkit.fluxcd.io/v2\nkind: HelmRelease\nmetadata: {name: n}\nspec:\n  values:\n    config: {map: {default: 'version: v1'}}\n";
    let values = "migStrategy: mixed\nconfig: {map: {default: 'version: v1'}}\n";
    let operator = "devicePlugin: {config: {create: true, data: {any: 'version: v1'}}}\n";
    let kindless = "apiVersion: v1\nmetadata: {name: n}\ndata: {any: 'version: v1'}\n";
    let slip = format!(
        "{}---\napiVersion: apps/v1\nkind: DaemonSet\nmetadata: {{labels: {{a: b, a: c}}}}\n",
        config_map("plugin", "any", GOOD)
    );
    let mut texts = String::new();
    for text in [
        release,
        values,
        operator,
        "apiVersion: helm.cattle.io/v1\nkind: HelmChart\nspec:\n  valuesContent: |\n    config:\n      default: shared\n      map:\n        shared: 'version: v1'\n",
        "apiVersion: argoproj.io/v1alpha1\nkind: Application\nspec:\n  source:\n    helm:\n      values: |\n        devicePlugin: {config: {data: {any: 'version: v1'}}}\n",
        "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nspec:\n  devicePlugin: {config: {name: slices, default: any}}\n  migManager: {config: {name: cuts}}\n",
        "devicePlugin: {config: {name: slices, default: any}}\nmig: {strategy: mixed}\n",
        "config: {name: '', map: {}, default: '', fallbackStrategies: [named]}\nmigStrategy: null\nresources: {}\n",
        "compatWithCPUManager: true\nmigStrategy: mixed\n",
        "$ cat <<EOF | kubectl apply -f -\napiVersion: v1\nkind: ConfigMap\ndata: {}\nEOF\n",
        kindless,
        "kind: DaemonSet\nspec: {}\n",
        &slip,
    ] {
        let run = check(text, &[]);
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{text}");
        texts.push_str(&run.stderr);
    }
    insta::assert_snapshot!(texts, @r"
    gantry: /config.yaml: this is a HelmRelease, no configuration and no ConfigMap; give the text under spec.values.config.map.default
    gantry: /config.yaml: these are values of a Helm chart, no configuration; give the text under config.map.default
    gantry: /config.yaml: these are values of a Helm chart, no configuration; give the text under devicePlugin.config.data.any
    gantry: /config.yaml: this is a HelmChart, no configuration and no ConfigMap; give the text under spec.valuesContent, and there under config.map.shared
    gantry: /config.yaml: this is an Application, no configuration and no ConfigMap; give the text under spec.source.helm.values, and there under devicePlugin.config.data.any
    gantry: /config.yaml: this is a ClusterPolicy, no configuration and no ConfigMap; give the manifest of the ConfigMap slices
    gantry: /config.yaml: these are values of a Helm chart, no configuration; give the manifest of the ConfigMap slices
    gantry: /config.yaml: these are values of a Helm chart, no configuration
    gantry: /config.yaml: these are values of a Helm chart, no configuration
    gantry: /config.yaml: line 2: the manifest is no YAML: mapping values are not allowed in this context
    gantry: /config.yaml: this has apiVersion, as Kubernetes' objects do, and no kind; the manifest of a ConfigMap says kind: ConfigMap
    gantry: /config.yaml: this is a DaemonSet, no configuration and no ConfigMap
    gantry: /config.yaml: line 11: the manifest is no YAML: duplicate mapping key: a
    ");
}

#[test]
fn pipe_is_checked() {
    let pipe = |text: &str| piped(&["plugin", "--check-config=-"], text);
    let run = pipe(&config_map("pool", "default", GOOD));
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stdout.contains("# standard input, pool/default"), "{}", run.stdout);
    let run = pipe("flags: {migStrategy: mixd}");
    assert_eq!(run.code, 1, "{}", run.stdout);
    insta::assert_snapshot!(run.stderr, @r#"
    gantry: standard input: not served:
      line 1: flags.migStrategy: "mixd" is not allowed; allowed: none, single, mixed; did you mean "mixed"?
    "#);
}

#[test]
fn missing_file_is_an_error() {
    let run = gantry(&["plugin", "--check-config=/nowhere/config.yaml"]);
    assert_eq!(run.code, 1);
    insta::assert_snapshot!(run.stderr, @"gantry: /nowhere/config.yaml: cannot be read: No such file or directory (os error 2)");
}

#[test]
fn labels_reads_config_file_from_either_variable() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    std::fs::write(&file, "flags: {migStrategy: none, gfd: {noTimestamp: true}}\n").unwrap();
    let machine = machine("hgx-h100.yaml");
    for variable in ["CONFIG_FILE", "GFD_CONFIG_FILE"] {
        let output = command(&["labels", "--from", &machine]).env(variable, &file).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("nvidia.com/gpu.count=8"), "{variable}: {text}");
        assert!(!text.contains("nvidia.com/gfd.timestamp"), "{variable}: {text}");
    }
    let output = command(&["labels", "-from", &machine, "-no-timestamp"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("nvidia.com/gpu.count=8") && !text.contains("timestamp"), "{text}");
}
