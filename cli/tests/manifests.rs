//! What the manifests tell the extender, and others of it: options that it takes, and ports where it is.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use clap::Parser;
use serde_json::{Value, json};

const BESIDE: &str = include_str!("../../manifests/extender.yaml");
const BEHIND: &str = include_str!("../../manifests/extender-service.yaml");

#[derive(Parser)]
struct Extender {
    #[command(flatten)]
    args: gantry_extender::Args,
}

/// The one object of this kind and name.
fn object(yaml: &str, kind: &str, name: &str) -> Value {
    let objects: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap();
    let mut found = objects
        .into_iter()
        .filter(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    let object = found.next().unwrap();
    assert!(found.next().is_none());
    object
}

/// The extender's pod, and what its arguments mean.
fn pod(yaml: &str) -> (Value, gantry_extender::Args) {
    let pod = object(yaml, "Deployment", "gantry-extender")["spec"]["template"]["spec"].clone();
    let container = &pod["containers"][0];
    let mut words: Vec<String> = serde_json::from_value(container["args"].clone()).unwrap();
    // The pod's address, in a variable.
    let variables = container["env"].as_array().map_or(&[][..], Vec::as_slice);
    if variables
        .iter()
        .any(|known| known["name"] == "GANTRY_LEADER_ADDRESS")
    {
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
fn the_service_for_metrics_leads_to_a_port_that_all_extenders_open_to_the_network() {
    let service = object(BESIDE, "Service", "gantry-extender");
    let port = &service["spec"]["ports"][0];
    assert_eq!(port["targetPort"], "metrics");
    for manifest in [BESIDE, BEHIND] {
        let (pod, args) = pod(manifest);
        let open = args.metrics_listen.unwrap();
        assert!(open.ip().is_unspecified(), "{open}");
        assert_eq!(declared(&pod, "metrics")["containerPort"], open.port());
        assert_eq!(port["port"], open.port());
        let labels =
            &object(manifest, "Deployment", "gantry-extender")["spec"]["template"]["metadata"]["labels"];
        assert_eq!(service["spec"]["selector"], *labels);
    }
}

#[test]
fn ports_of_the_node_are_declared_and_probes_lead_to_where_verbs_are_served() {
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
            let strategy = &object(manifest, "Deployment", "gantry-extender")["spec"]["strategy"];
            assert_eq!(
                strategy["rollingUpdate"]["maxSurge"],
                json!(0),
                "the port is taken"
            );
        }
    }
}
