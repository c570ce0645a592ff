//! Installations of NVIDIA's plugin in every form, and what becomes of them.

use super::*;

fn migrated(text: &str) -> Result<String, String> {
    let mut migration = Migration::default();
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    for document in &documents {
        migration.add(document)?;
    }
    migration.finish().map_err(|error| error.to_string())
}

#[test]
fn values_of_the_plugins_chart_are_carried_over() {
    insta::assert_snapshot!(migrated(include_str!("samples/plugin-values.yaml")).unwrap());
}

/// With configurations the settings of the chart stay variables, because they take precedence over each of them.
#[test]
fn settings_beside_configurations_become_variables() {
    let text = "migStrategy: mixed\ndeviceListStrategy: [envvar, cdi-cri]\nconfig: {name: my-configs, default: a100}\n";
    insta::assert_snapshot!(migrated(text).unwrap());
}

#[test]
fn cluster_policy_is_carried_over() {
    insta::assert_snapshot!(migrated(include_str!("samples/cluster-policy.yaml")).unwrap());
}

/// The operator's values have the form of the ClusterPolicy's spec.
#[test]
fn operator_values_equal_the_cluster_policy() {
    let policy: Value = serde_saphyr::from_str(include_str!("samples/cluster-policy.yaml")).unwrap();
    let values = serde_saphyr::to_string(&policy["spec"]).unwrap();
    assert_eq!(migrated(&values).unwrap(), migrated(include_str!("samples/cluster-policy.yaml")).unwrap());
}

#[test]
fn daemon_set_and_config_map_are_carried_over() {
    insta::assert_snapshot!(migrated(include_str!("samples/daemonset.yaml")).unwrap());
}

/// A chart with both would be refused.
/// The comments of a file of values.
fn comments(values: &str) -> String {
    let lines = values.lines().filter(|line| line.trim_start().starts_with('#'));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn configurations_of_the_operator_replace_their_config_map() {
    let text = "devicePlugin:\n  config:\n    create: true\n    name: slices\n    data:\n      any: |\n        version: v1\ndriver: {enabled: false}\n";
    let values = migrated(text).unwrap();
    assert!(values.contains("any:") && !values.contains("existingConfigMap"), "{values}");
    assert!(!values.contains("driverRoot"), "{values}");
}

#[test]
fn list_is_read_as_its_items() {
    let item: Value = serde_saphyr::from_str(include_str!("samples/cluster-policy.yaml")).unwrap();
    let list = json!({"kind": "List", "items": [item]}).to_string();
    assert_eq!(migrated(&list).unwrap(), migrated(include_str!("samples/cluster-policy.yaml")).unwrap());
}

#[test]
fn other_files_are_refused() {
    let files = [
        "kind: Deployment",
        "replicas: 2",
        "kind: DaemonSet\nmetadata: {name: fluentd}",
        "kind: ConfigMap\ndata: {a: \"[\"}",
        "config: {map: {a: 1}}",
    ];
    insta::assert_snapshot!(files.map(|text| migrated(text).unwrap_err()).join("\n"), @r"
    Deployment is not migrated; give values of a chart, a ClusterPolicy, a DaemonSet or a ConfigMap
    these are no values of NVIDIA's plugin or of the GPU operator; expected one of migStrategy, failOnInitError, deviceListStrategy, deviceIDStrategy, config, gfd, compatWithCPUManager, nvidiaDriverRoot, mps, operator, driver, toolkit, dcgm, dcgmExporter, migManager, validator, daemonsets
    the DaemonSet fluentd has no container of NVIDIA's plugin or gpu-feature-discovery
    data.a: no YAML: unclosed bracket '[' at line 1, column 1
    config.map.a is no text
    ");
}

#[test]
fn configuration_that_is_not_served_is_an_error() {
    let text = "config:\n  map:\n    shared: |\n      version: v1\n      sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n";
    insta::assert_snapshot!(migrated(text).unwrap_err(), @r"
    the configuration shared cannot be served:
      line 2: sharing.mps: MPS is not served by this plugin; share GPUs with sharing.timeSlicing, or cut them with MIG
    ");
    insta::assert_snapshot!(migrated("migStrategy: mixd").unwrap_err(), @r#"
    the configuration default cannot be served:
      line 2: flags.migStrategy: "mixd" is not allowed; allowed: none, single, mixed; did you mean "mixed"?
    "#);
}

/// NVIDIA's plugin reads flags like Go's programs: a value may be the next word.
#[test]
fn flag_takes_its_value_from_the_next_word() {
    let set = |args: &str, rest: &str| {
        migrated(&format!(
            "kind: DaemonSet\nmetadata: {{name: ds}}\nspec: {{template: {{spec: {{containers: [{{image: k8s-device-plugin, \
             command: [/usr/bin/nvidia-device-plugin], args: [{args}]{rest}}}]}}}}}}\n"
        ))
        .unwrap()
    };
    let values = set("--mig-strategy, mixed, --pass-device-specs, -fail-on-init-error=false", "");
    for line in ["migStrategy: mixed", "passDeviceSpecs: true", "failOnInitError: false"] {
        assert!(values.contains(line), "{line}: {values}");
    }
    insta::assert_snapshot!(comments(&values), @r"
    # Values of charts/gantry, made by `gantry migrate`.
    #
    # Before you install:
    #   kubectl delete the DaemonSets of NVIDIA's plugin and gpu-feature-discovery
    ");
    let values =
        set("--device-list-strategy=envvar, --device-list-strategy, cdi-cri, --mig-strategy=none", "");
    assert!(values.contains("deviceListStrategy:\n          - envvar\n          - cdi-cri"), "{values}");
    let values = set("--mig-strategy=single, --new, x, --other, -v, stray, --mig-strategy", "");
    insta::assert_snapshot!(comments(&values), @r"
    # Values of charts/gantry, made by `gantry migrate`.
    #
    # Before you install:
    #   kubectl delete the DaemonSets of NVIDIA's plugin and gpu-feature-discovery
    #
    # Not carried over:
    #   ds, --new x: see plugin.extraArgs
    #   ds, --other: see plugin.extraArgs
    #   ds, -v stray: see plugin.extraArgs
    #   ds, --mig-strategy: it has no value
    ");
    let values = set(
        "--nvidia-driver-root, /b, --mig-strategy=mixed",
        ", env: [{name: NVIDIA_DRIVER_ROOT, value: /a}, {name: MIG_STRATEGY, value: none}]",
    );
    assert!(values.contains("driverRoot: /b") && values.contains("migStrategy: mixed"), "{values}");
}

#[test]
fn nothing_of_a_daemon_set_is_dropped_silently() {
    let text = r#"
kind: DaemonSet
metadata: {name: ds}
spec:
  updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 10%, maxSurge: 0}}
  template:
    metadata: {annotations: {team: ml, kubectl.kubernetes.io/restartedAt: x}}
    spec:
      hostNetwork: true
      dnsPolicy: ClusterFirst
      priorityClassName: mine
      containers:
      - image: nvcr.io/nvidia/k8s-device-plugin:v0.17.1
        name: ctr
        command: [sh, -c, "exec nvidia-device-plugin --mig-strategy=mixed"]
        env:
        - {name: MIG_STRATEGY, valueFrom: {configMapKeyRef: {name: a, key: b}}}
        - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        envFrom: [{configMapRef: {name: plugin-env}}, {secretRef: {name: plugin-secret}}]
      volumes:
      - {name: dp, hostPath: {path: /var/snap/microk8s/common/var/lib/kubelet/device-plugins/}}
      - {name: cdi, hostPath: {path: /var/run/cdi}}
      - {name: more, hostPath: {path: /opt/more}}
"#;
    let values = migrated(text).unwrap();
    assert!(values.contains("kubeletRoot: /var/snap/microk8s/common/var/lib/kubelet\n"), "{values}");
    assert!(values.contains("maxUnavailable: 10%"), "{values}");
    insta::assert_snapshot!(comments(&values), @r#"
    # Values of charts/gantry, made by `gantry migrate`.
    #
    # Before you install:
    #   kubectl delete the DaemonSets of NVIDIA's plugin and gpu-feature-discovery
    #
    # Not carried over:
    #   ds, variable MIG_STRATEGY: its value comes from {"configMapKeyRef":{"key":"b","name":"a"}}; if Gantry reads it, write it into plugin.extraEnv
    #   ds, envFrom configMapRef plugin-env: the variables in it are unknown here; write those that Gantry reads into plugin.extraEnv
    #   ds, envFrom secretRef plugin-secret: the variables in it are unknown here; write those that Gantry reads into plugin.extraEnv
    #   ds, "sh" in the command: only flags of NVIDIA's plugin are read
    #   ds, -c exec nvidia-device-plugin --mig-strategy=mixed: see plugin.extraArgs
    #   ds, hostPath /opt/more: the chart has no such volume; see plugin.kubeletRoot and plugin.driverRoot
    #   hostNetwork: the plugin needs no network of the host
    #   priorityClassName: the plugin has system-node-critical; see plugin.priorityClassName
    #   annotation team of the pod: see plugin.podAnnotations
    "#);
    for line in ["NODE_NAME", "dnsPolicy", "/var/run/cdi", "name: ", "restartedAt"] {
        assert!(!values.contains(line), "{line}: {values}");
    }
    let own = text.replace("/var/snap/microk8s/common", "");
    assert!(!migrated(&own).unwrap().contains("kubeletRoot:"));
}

/// The operator derives variables of its plugin from other parts of the ClusterPolicy.
#[test]
fn parts_of_the_policy_that_affect_the_plugin_are_listed() {
    let text = "kind: ClusterPolicy\nspec:\n  cdi: {enabled: true, default: true}\n  gds: {enabled: true}\n  gdrcopy: {enabled: false}\n  \
                devicePlugin: {enabled: true, env: [{name: MIG_STRATEGY, valueFrom: {fieldRef: {fieldPath: x}}}], hostNetwork: true}\n  \
                daemonsets: {priorityClassName: mine, updateStrategy: RollingUpdate, labels: {a: b}}\n";
    let values = migrated(text).unwrap();
    insta::assert_snapshot!(comments(&values), @r#"
    # Values of charts/gantry, made by `gantry migrate`.
    #
    # Before you install:
    #   set devicePlugin.enabled=false and gfd.enabled=false in the GPU operator; its other parts stay as they are
    #
    # Not carried over:
    #   devicePlugin, variable MIG_STRATEGY: its value comes from {"fieldRef":{"fieldPath":"x"}}; if Gantry reads it, write it into plugin.extraEnv
    #   cdi.enabled: the operator has its plugin use CDI; set flags.plugin.deviceListStrategy in plugin.configs
    #   gds.enabled: to give containers GPUDirect Storage set flags.gdsEnabled in plugin.configs
    #   daemonsets.priorityClassName: the plugin has system-node-critical; see plugin.priorityClassName
    #   devicePlugin.hostNetwork: the chart has no such value
    #   daemonsets.labels: the chart has no such value
    "#);
    assert!(!values.contains("gdrcopy") && !values.contains("updateStrategy"), "{values}");
}
