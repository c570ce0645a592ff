//! What the manifests tell the extender, and others of it: options that it takes, and ports where it is.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use clap::{Args as _, Parser};
use gantry_api::names::{EXTENDER_POLICIES, PLUGIN_POLICIES};
use serde_json::{Value, json};

const COMMON: &str = include_str!("../../manifests/extender.yaml");
const BESIDE: &str = include_str!("../../manifests/extender-node.yaml");
const BEHIND: &str = include_str!("../../manifests/extender-service.yaml");

#[derive(Parser)]
struct Extender {
    #[command(flatten)]
    args: gantry_extender::Args,
}

/// The one object of this kind and name.
fn object(yaml: &str, kind: &str, name: &str) -> Value {
    let objects: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap();
    let mut found =
        objects.into_iter().filter(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    let object = found.next().unwrap();
    assert!(found.next().is_none());
    object
}

/// What makes the extender's pods: a DaemonSet beside each kube-scheduler, a Deployment behind a Service.
fn workload(yaml: &str) -> Value {
    let kind = if yaml == BESIDE { "DaemonSet" } else { "Deployment" };
    object(yaml, kind, "gantry-extender")
}

/// The extender's pod, and what its arguments mean.
fn pod(yaml: &str) -> (Value, gantry_extender::Args) {
    let pod = workload(yaml)["spec"]["template"]["spec"].clone();
    let container = &pod["containers"][0];
    let mut words: Vec<String> = serde_json::from_value(container["args"].clone()).unwrap();
    // The pod's address, in a variable.
    let variables = container["env"].as_array().map_or(&[][..], Vec::as_slice);
    if variables.iter().any(|known| known["name"] == "GANTRY_LEADER_ADDRESS") {
        words.push("--leader-address=10.0.0.1".to_owned());
    }
    let args = Extender::try_parse_from(words).unwrap_or_else(|error| panic!("{error}"));
    (pod, args.args)
}

fn declared(pod: &Value, name: &str) -> Value {
    let ports = pod["containers"][0]["ports"].as_array().unwrap();
    ports.iter().find(|port| port["name"] == name).unwrap().clone()
}

#[test]
fn metrics_service_targets_a_port_of_all_extenders() {
    let service = object(COMMON, "Service", "gantry-extender");
    let port = &service["spec"]["ports"][0];
    assert_eq!(port["targetPort"], "metrics");
    for manifest in [BESIDE, BEHIND] {
        let (pod, args) = pod(manifest);
        let open = args.metrics_listen.unwrap();
        assert!(open.ip().is_unspecified(), "{open}");
        assert_eq!(declared(&pod, "metrics")["containerPort"], open.port());
        assert_eq!(port["port"], open.port());
        let labels = &workload(manifest)["spec"]["template"]["metadata"]["labels"];
        assert_eq!(service["spec"]["selector"], *labels);
    }
}

#[test]
fn host_ports_are_declared_and_probes_use_the_metrics_port() {
    for manifest in [BESIDE, BEHIND] {
        let (pod, args) = pod(manifest);
        assert_eq!(declared(&pod, "verbs")["containerPort"], args.listen.port());
        for probe in ["livenessProbe", "readinessProbe"] {
            // Callers of the verbs cannot keep probes from being answered.
            let port = &pod["containers"][0][probe]["httpGet"]["port"];
            let port =
                port.as_str().map_or(port.clone(), |name| declared(&pod, name)["containerPort"].clone());
            assert_eq!(port, args.metrics_listen.unwrap().port(), "{probe}");
        }
        if pod["hostNetwork"] == true {
            assert!(args.listen.ip().is_loopback() || args.tls.client_ca.is_some());
            for name in ["verbs", "metrics"] {
                let port = declared(&pod, name);
                assert_eq!(port["hostPort"], port["containerPort"], "{name}");
            }
            // The port is taken while the old one has it, and only a DaemonSet ends a node's old pod before it makes
            // the new one: a Deployment would wait for a new one elsewhere, which on a cluster of one control-plane
            // node never comes.
            let workload = workload(manifest);
            assert_eq!(workload["kind"], "DaemonSet");
            let update = &workload["spec"]["updateStrategy"]["rollingUpdate"];
            assert_eq!(*update, json!({"maxSurge": 0, "maxUnavailable": 1}));
        }
    }
}

/// kube-scheduler and the extender are in one pod, and agree on address, profile and metrics.
#[test]
fn own_scheduler_calls_the_extender_of_its_pod() {
    let own = include_str!("../../manifests/scheduler.yaml");
    let deployment = object(own, "Deployment", "gantry-scheduler");
    let containers = deployment["spec"]["template"]["spec"]["containers"].as_array().unwrap();
    let extender = containers.iter().find(|container| container["name"] == "extender").unwrap();
    let words: Vec<String> = serde_json::from_value(extender["args"].clone()).unwrap();
    let args = Extender::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).args;
    assert!(args.lease.leader_elect && args.listen.ip().is_loopback());
    assert_eq!(extender["ports"][0]["containerPort"], args.metrics_listen.unwrap().port());
    let map = object(own, "ConfigMap", "gantry-scheduler");
    let config = map["data"]["config.yaml"].as_str().unwrap();
    let config: Value = serde_saphyr::from_str(config).unwrap();
    assert_eq!(config["extenders"][0]["urlPrefix"], format!("http://{}", args.listen));
    assert_eq!(config["profiles"][0]["schedulerName"], args.schedulers[0]);
    // The entry of the cluster's kube-scheduler, but for every pod.
    let existing = include_str!("../../manifests/kube-scheduler-config.yaml");
    let mut existing: Value = serde_saphyr::from_str(existing).unwrap();
    assert!(existing["extenders"][0].as_object_mut().unwrap().remove("managedResources").is_some());
    assert_eq!(config["extenders"], existing["extenders"]);
    assert_eq!(config["percentageOfNodesToScore"], existing["percentageOfNodesToScore"]);
    let service = object(COMMON, "Service", "gantry-extender");
    assert_eq!(service["spec"]["selector"], deployment["spec"]["template"]["metadata"]["labels"]);
}

/// The chart allows the values that the programs allow.
#[test]
fn chart_allows_the_values_of_the_options() {
    let schema: Value = serde_json::from_str(include_str!("../../charts/gantry/values.schema.json")).unwrap();
    let allowed = |section: &str, name: &str| -> Vec<String> {
        let values = schema["properties"][section]["properties"][name]["enum"].clone();
        let values: Vec<String> = serde_json::from_value(values).unwrap();
        values.into_iter().filter(|value| !value.is_empty()).collect()
    };
    let possible = |command: clap::Command, option: &str| -> Vec<String> {
        let argument = command.get_arguments().find(|argument| argument.get_long() == Some(option)).unwrap();
        argument.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect()
    };
    let extender = || gantry_extender::Args::augment_args(clap::Command::new("extender"));
    assert_eq!(allowed("extender", "policy"), possible(extender(), "policy"));
    assert_eq!(allowed("extender", "foreignNodes"), possible(extender(), "foreign-nodes"));
    let plugin = gantry_plugin::Args::augment_args(clap::Command::new("plugin"));
    let mut labels = possible(plugin, "labels");
    let mut of_the_chart = allowed("plugin", "labels");
    labels.sort();
    of_the_chart.sort();
    assert_eq!(of_the_chart, labels);
    for (section, command) in [
        ("plugin", gantry_plugin::Args::augment_args(clap::Command::new("plugin"))),
        ("extender", extender()),
    ] {
        let items = &schema["properties"][section]["properties"]["extraArgs"]["items"];
        let pattern = items["pattern"].as_str().unwrap();
        let names = pattern.strip_prefix("^--(").and_then(|rest| rest.strip_suffix(")(=.*)?$")).unwrap();
        let names: Vec<&str> = names.split('|').collect();
        let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
        for name in shown.filter_map(clap::Arg::get_long) {
            assert!(names.contains(&name), "{section}.extraArgs lacks --{name}");
        }
    }
    // The error of the option lists the presets.
    let presets = gantry_gang::fabric::Levels::parse("?").unwrap_err().to_string();
    let presets = presets.split(['(', ')']).nth(1).unwrap();
    let fabric = schema["properties"]["extender"]["properties"]["fabric"]["pattern"].as_str().unwrap();
    assert!(presets.split(", ").count() > 5, "{presets}");
    for preset in presets.split(", ") {
        assert!(
            fabric.contains(&format!("({preset}|")) || fabric.contains(&format!("|{preset}|")),
            "{preset}"
        );
    }
    let chart: Value = serde_saphyr::from_str(include_str!("../../charts/gantry/Chart.yaml")).unwrap();
    assert_eq!(
        (&chart["version"], &chart["appVersion"]),
        (&json!(env!("CARGO_PKG_VERSION")), &json!(env!("CARGO_PKG_VERSION")))
    );
}

#[test]
fn kustomization_installs_one_kind_of_extender() {
    let kustomization: Value =
        serde_saphyr::from_str(include_str!("../../manifests/kustomization.yaml")).unwrap();
    let files: Vec<String> = serde_json::from_value(kustomization["resources"].clone()).unwrap();
    let has = |name: &str| files.iter().any(|file| file == name);
    assert!(has("extender.yaml") && has("extender-node.yaml") && !has("extender-service.yaml"));
}

/// Everything that names the namespace is reached by replacing the word, and the Lease follows the pods.
#[test]
fn lease_is_in_the_namespace_of_the_pods() {
    for manifest in [BESIDE, BEHIND] {
        let (pod, _) = pod(manifest);
        let variables = pod["containers"][0]["env"].as_array().unwrap();
        let namespace = json!({
            "name": "GANTRY_LEASE_NAMESPACE",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}},
        });
        assert!(variables.contains(&namespace), "{variables:?}");
    }
}

const GUARD: &str = include_str!("../../manifests/guard.yaml");
const PLUGIN: &str = include_str!("../../manifests/plugin.yaml");

/// The daemons look for the policies of the manifests, may read them, and each policy denies.
#[test]
fn daemons_look_for_the_policies_of_the_manifests() {
    let objects: Vec<Value> = serde_saphyr::from_multiple(GUARD).unwrap();
    let names = |kind: &str| -> Vec<&str> {
        let of_kind = objects.iter().filter(|object| object["kind"] == kind);
        of_kind.map(|object| object["metadata"]["name"].as_str().unwrap()).collect()
    };
    let policies = names("ValidatingAdmissionPolicy");
    assert_eq!(names("ValidatingAdmissionPolicyBinding"), policies);
    for name in &policies {
        let binding = object(GUARD, "ValidatingAdmissionPolicyBinding", name);
        assert_eq!(binding["spec"], json!({"policyName": name, "validationActions": ["Deny"]}));
        assert_eq!(object(GUARD, "ValidatingAdmissionPolicy", name)["spec"]["failurePolicy"], "Fail");
    }
    let mut expected = vec!["gantry-gang-annotations"];
    for (yaml, role, names) in [
        (COMMON, "gantry-extender", EXTENDER_POLICIES.as_slice()),
        (PLUGIN, "gantry-plugin", &PLUGIN_POLICIES),
    ] {
        let role = object(yaml, "ClusterRole", role);
        let mut rules = role["rules"].as_array().unwrap().iter();
        let rule = rules.find(|rule| rule["apiGroups"] == json!(["admissionregistration.k8s.io"])).unwrap();
        assert_eq!(rule["resourceNames"], json!(names));
        assert_eq!(rule["verbs"], json!(["get"]));
        expected.extend(names);
    }
    expected.sort_unstable();
    let mut policies = policies;
    policies.sort_unstable();
    assert_eq!(policies, expected);
}

/// The policies that restrict the extender to pods of Gantry have the same idea of them.
#[test]
fn extender_policies_agree_on_gantrys_pods() {
    let restart = include_str!("../../manifests/extender-restart.yaml");
    let variables = |yaml: &str, name: &str| {
        let policy = object(yaml, "ValidatingAdmissionPolicy", name);
        policy["spec"]["variables"].as_array().unwrap()[..2].to_vec()
    };
    assert_eq!(variables(GUARD, "gantry-extender-status"), variables(restart, "gantry-extender-delete"));
}

/// Rights that RBAC cannot narrow to what is needed are the operator's choice.
#[test]
fn kustomization_has_no_optional_rights() {
    let kustomization = include_str!("../../manifests/kustomization.yaml");
    for file in [
        "extender-restart.yaml",
        "extender-mig-drain.yaml",
        "gates.yaml",
        "plugin-config.yaml",
        "labels-node.yaml",
        "mig-layouts.yaml",
    ] {
        let lines: Vec<&str> = kustomization.lines().filter(|line| line.contains(file)).collect();
        assert!(lines.len() == 1 && lines[0].trim_start().starts_with('#'), "{file}: {lines:?}");
    }
}

/// The image runs as another user than root; the plugin's manifests name root, for kubelet's sockets.
#[test]
fn image_does_not_run_as_root() {
    let image = include_str!("../../Containerfile");
    let users: Vec<&str> = image.lines().filter_map(|line| line.strip_prefix("USER ")).collect();
    assert_eq!(users, ["65532:65532"]);
    for plugin in [PLUGIN, include_str!("../../manifests/plugin-mig.yaml")] {
        assert!(plugin.contains("runAsUser: 0"));
    }
}

/// A tag of an action can be moved to other code.
#[test]
fn actions_are_pinned_by_commit() {
    let pipelines =
        [include_str!("../../.github/workflows/ci.yml"), include_str!("../../.github/workflows/release.yml")];
    let lines = pipelines.iter().flat_map(|pipeline| pipeline.lines());
    let used: Vec<&str> = lines.filter_map(|line| line.trim().strip_prefix("- uses: ")).collect();
    assert!(used.len() > 10, "{used:?}");
    for action in used {
        let (_, rest) = action.split_once('@').unwrap();
        let (commit, version) = rest.split_once(" # v").unwrap_or_else(|| panic!("{action}"));
        assert!(commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit()), "{action}");
        assert!(version.starts_with(|first: char| first.is_ascii_digit()), "{action}");
    }
}
