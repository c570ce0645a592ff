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
    for (text, named) in [
        ("kind: Deployment", "Deployment"),
        ("replicas: 2", "migStrategy"),
        ("kind: DaemonSet\nmetadata: {name: fluentd}", "fluentd"),
        ("kind: ConfigMap\ndata: {a: \"[\"}", "data.a"),
        ("config: {map: {a: 1}}", "config.map.a"),
    ] {
        let wrong = migrated(text).unwrap_err();
        assert!(wrong.contains(named), "{wrong}");
    }
}

#[test]
fn configuration_that_is_not_served_is_an_error() {
    let text = "config:\n  map:\n    shared: |\n      version: v1\n      sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n";
    let wrong = migrated(text).unwrap_err();
    assert!(wrong.contains("shared") && wrong.contains("MPS"), "{wrong}");
    let wrong = migrated("migStrategy: mixd").unwrap_err();
    assert!(wrong.contains("mixed"), "{wrong}");
}
