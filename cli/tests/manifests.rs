//! What the manifests tell the extender, and others of it: options that it takes, and ports where it is.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use clap::Parser;
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
fn host_ports_are_declared_and_probes_use_the_verb_port() {
    for manifest in [BESIDE, BEHIND] {
        let (pod, args) = pod(manifest);
        assert_eq!(declared(&pod, "verbs")["containerPort"], args.listen.port());
        for probe in ["livenessProbe", "readinessProbe"] {
            let asked = &pod["containers"][0][probe]["httpGet"];
            assert_eq!(asked["port"], args.listen.port(), "{probe}");
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
