use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_gang::protocol::Stage;
use gantry_gang::{Misfit, NodeFacts};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::fixtures::{GPU, facts, pod, watched};
use crate::pod::{OtherPod, ParsedPod, Reader};

fn spec(spec: Value) -> SlimSpec {
    serde_json::from_value(spec).unwrap()
}

fn load(written: Value) -> Resources {
    spec(written).load(None, &watched())
}

fn needs(written: Value) -> Needs {
    labelled(&[], written)
}

fn labelled(labels: &[(&str, &str)], written: Value) -> Needs {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    let metadata = ObjectMeta {
        namespace: Some("ml".to_owned()),
        labels: Some(labels.collect()),
        ..ObjectMeta::default()
    };
    spec(written).needs(None, &watched(), &metadata, &mut TextInterner::default())
}

fn other_pod(pod: Value) -> OtherPod {
    match Reader::new(watched()).read(serde_json::from_value(pod).unwrap()) {
        Some(ParsedPod::OtherPod(other_pod)) => *other_pod,
        other => panic!("{other:?}"),
    }
}

fn container(cpu: &str) -> Value {
    json!({"name": "c", "resources": {"requests": {"cpu": cpu}}})
}

fn sidecar(cpu: &str) -> Value {
    json!({"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": cpu}}})
}

#[test]
fn pod_request_sums_containers_as_kube_scheduler_does() {
    for (written, milli) in [
        (json!({"containers": [container("1"), container("500m")]}), 1500),
        // The init container is alone.
        (json!({"initContainers": [container("4")], "containers": [container("1")]}), 4000),
        // A sidecar lives on beside the app, and beside init containers that come after it.
        (json!({"initContainers": [sidecar("1"), container("4")], "containers": [container("1")]}), 5000),
        (json!({"initContainers": [container("4"), sidecar("1")], "containers": [container("1")]}), 4000),
        (json!({"initContainers": [sidecar("1"), sidecar("1")], "containers": [container("1")]}), 3000),
        // The word of the pod as a whole, and overhead, which comes on top.
        (json!({"containers": [container("1")], "resources": {"requests": {"cpu": "3"}}}), 3000),
        (json!({"containers": [container("1")], "overhead": {"cpu": "250m"}}), 1250),
        // A limit without a request is a request.
        (json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "2"}}}]}), 2000),
        (
            json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "2"}, "requests": {"cpu": "1"}}}]}),
            1000,
        ),
    ] {
        assert_eq!(load(written.clone()).milli_cpu, milli, "{written}");
    }
}

#[test]
fn resized_container_counts_its_largest_request() {
    let load = |cpu: &str, allocated: &str, actual: &str, reason: &str| {
        let pod = json!({
            "metadata": {"name": "a", "uid": "a"},
            "spec": {"nodeName": "n", "containers": [container(cpu)]},
            "status": {
                "conditions": [{"type": "PodResizePending", "status": "True", "reason": reason}],
                "containerStatuses": [{"name": "c", "allocatedResources": {"cpu": allocated}, "resources": {"requests": {"cpu": actual}}}],
            },
        });
        other_pod(pod).load.milli_cpu
    };
    // Up, and down: what was asked before is given back once it is.
    assert_eq!(load("4", "2", "2", "Deferred"), 4000);
    assert_eq!(load("1", "2", "3", "Deferred"), 3000);
    // What can never be granted is not counted.
    assert_eq!(load("400", "2", "2", "Infeasible"), 2000);
}

#[test]
fn devices_are_not_among_the_amounts_and_everything_else_is() {
    let load = load(json!({"containers": [{"name": "c", "resources": {"requests": {
        "cpu": "1", "memory": "2Gi", "ephemeral-storage": "1Mi", "hugepages-2Mi": "4Mi", "example.com/nic": "1", GPU: "4", "nvidia.com/mig-1g.10gb": "1",
    }}}]}));
    assert_eq!(
        load,
        Resources {
            milli_cpu: 1000,
            memory: 2 << 30,
            ephemeral: 1 << 20,
            pods: 1,
            others: BTreeMap::from([("example.com/nic".into(), 1), ("hugepages-2Mi".into(), 4 << 20)]),
        }
    );
}

#[test]
fn selectors_tolerations_and_affinity_are_read_as_written() {
    let needs = needs(json!({
        "nodeSelector": {"zone": "a"},
        "tolerations": [
            {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "k", "value": "v"},
            {"key": "k", "operator": "Lt", "value": "5"},
            {"key": "k", "operator": "Lt", "value": "five"},
            {"key": "k", "operator": "Like", "value": "5"},
        ],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "gen", "operator": "Gt", "values": ["3"]}]},
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]},
                ]},
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 7, "preference": {"matchExpressions": [{"key": "rack", "operator": "Exists"}]}},
                ],
            },
        },
        "containers": [],
    }));
    let node = |labels: &[(&str, &str)]| NodeFacts {
        name: "n2".into(),
        labels: labels.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
        ..NodeFacts::default()
    };
    assert_eq!(needs.admits(&node(&[("zone", "a"), ("gen", "4")])), Ok(()));
    assert_eq!(needs.admits(&node(&[("zone", "a"), ("gen", "3")])), Err(Misfit::Affinity));
    assert_eq!(needs.admits(&node(&[("gen", "4")])), Err(Misfit::Affinity));
    assert_eq!(needs.prefers(&node(&[("rack", "1")])), 7);
    // Those that say nothing that can be understood bear nothing.
    let tolerated: Vec<&TolerationValue> =
        needs.tolerations.iter().map(|toleration| &toleration.value).collect();
    assert_eq!(
        tolerated,
        [&TolerationValue::Any, &TolerationValue::Equal("v".into()), &TolerationValue::Below(5)]
    );
}

#[test]
fn affinity_without_terms_or_with_unknown_operator_matches_none() {
    for required in [
        json!({"nodeSelectorTerms": []}),
        json!({"nodeSelectorTerms": [{}]}),
        json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Like", "values": ["1"]}]}]}),
    ] {
        let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}});
        let needs = needs(json!({"affinity": affinity, "containers": []}));
        let mut node = NodeFacts::default();
        node.labels.insert("a".into(), "1".into());
        assert_eq!(needs.admits(&node), Err(Misfit::Affinity), "{required}");
    }
}

#[test]
fn terms_about_other_pods_find_by_namespace_and_labels() {
    let term = |term: Value| {
        let needs = needs(json!({"containers": [], "affinity": {"podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [term],
        }}}));
        needs.apart_from.first().cloned()
    };
    let labels = BTreeMap::from([(Arc::from("app"), Arc::from("a"))]);
    let selector =
        json!({"matchLabels": {"app": "a"}, "matchExpressions": [{"key": "app", "operator": "Exists"}]});
    for (written, here, elsewhere) in [
        (json!({"topologyKey": "k", "labelSelector": selector}), true, false),
        (json!({"topologyKey": "k", "labelSelector": selector, "namespaces": ["web"]}), false, true),
        (json!({"topologyKey": "k", "labelSelector": selector, "namespaceSelector": {}}), true, true),
        (json!({"topologyKey": "k", "labelSelector": {}}), true, false),
        (json!({"topologyKey": "k"}), false, false),
        (json!({"topologyKey": "k", "labelSelector": {"matchLabels": {"app": "b"}}}), false, false),
    ] {
        let term = term(written.clone()).unwrap();
        assert_eq!(term.finds("ml", "ml", &labels), here, "{written}");
        assert_eq!(term.finds("ml", "web", &labels), elsewhere, "{written}");
    }
    let by_label =
        json!({"topologyKey": "k", "labelSelector": {}, "namespaceSelector": {"matchLabels": {"team": "a"}}});
    assert_eq!(term(by_label), None);
}

#[test]
fn namespace_selector_by_name_label_is_resolved() {
    let term = |selector: Value| {
        let term = json!({"topologyKey": "k", "labelSelector": {}, "namespaceSelector": selector});
        let terms =
            json!({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}});
        needs(terms).together_with.pop()
    };
    let name = "kubernetes.io/metadata.name";
    let named = term(json!({"matchLabels": {name: "web"}})).unwrap();
    assert!(named.finds("ml", "web", &BTreeMap::new()));
    assert!(!named.finds("ml", "ml", &BTreeMap::new()), "nor its own, if that is not named");
    let either = json!({"matchExpressions": [{"key": name, "operator": "In", "values": ["web", "ml"]}]});
    assert!(term(either).unwrap().finds("ml", "ml", &BTreeMap::new()));
    let others = json!({"matchExpressions": [{"key": name, "operator": "NotIn", "values": ["web"]}]});
    assert_eq!(term(others), None);
    let mixed = json!({"matchLabels": {name: "web", "team": "a"}});
    assert_eq!(term(mixed), None);
}

#[test]
fn namespaces_beside_unknown_selector_count_for_anti_affinity() {
    // A selector over other labels may select further namespaces. The named ones suffice to keep pods apart,
    // but not to bring them together.
    let term = json!({"topologyKey": "k", "labelSelector": {}, "namespaces": ["web"],
        "namespaceSelector": {"matchLabels": {"team": "a"}}});
    let both = json!({"requiredDuringSchedulingIgnoredDuringExecution": [term]});
    let needs = needs(json!({"affinity": {"podAffinity": both, "podAntiAffinity": both}}));
    assert_eq!(needs.together_with, [], "those it must be with may be in namespaces of team a");
    assert!(needs.apart_from[0].finds("ml", "web", &BTreeMap::new()));
    let named = json!({"topologyKey": "k", "labelSelector": {}, "namespaces": ["web"],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ml"}}});
    let named = json!({"requiredDuringSchedulingIgnoredDuringExecution": [named]});
    let needs = self::needs(json!({"affinity": {"podAffinity": named}}));
    let found = |namespace| needs.together_with[0].finds("ml", namespace, &BTreeMap::new());
    assert!(found("web") && found("ml") && !found("other"));
}

#[test]
fn host_ports_of_containers_and_sidecars_are_taken() {
    let needs = needs(json!({
        "initContainers": [
            {"name": "i", "ports": [{"hostPort": 1}]},
            {"name": "s", "restartPolicy": "Always", "ports": [{"hostPort": 2, "protocol": "UDP", "hostIP": "10.0.0.1"}]},
        ],
        "containers": [{"name": "c", "ports": [{"containerPort": 80}, {"hostPort": 3}, {"hostPort": 3}]}],
    }));
    assert_eq!(needs.host_ports, [("TCP".into(), "0.0.0.0".into(), 3), ("UDP".into(), "10.0.0.1".into(), 2)]);
}

#[test]
fn pod_preempted_by_kube_scheduler_is_detected_by_condition() {
    let mut written = pod("p", 1);
    written["status"]["conditions"] =
        json!([{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]);
    assert!(facts(&written).preempted);
    written["status"]["conditions"][0]["reason"] = "EvictionByEvictionAPI".into();
    assert!(!facts(&written).preempted);
}

#[test]
fn how_far_a_pod_is_shows_in_gates_node_and_phase() {
    let mut written = pod("a", 1);
    assert_eq!(facts(&written).stage, Stage::Pending);
    written["spec"]["schedulingGates"] = json!([{"name": "gantry.dev/gang"}]);
    assert_eq!(facts(&written).stage, Stage::Gated { by: None });
    written["spec"]["schedulingGates"] = json!([{"name": "gantry.dev/gang"}, {"name": "other"}]);
    assert_eq!(facts(&written).stage, Stage::Gated { by: Some("other".into()) });
    written["spec"]["schedulingGates"] = json!([]);
    written["spec"]["nodeName"] = "n".into();
    assert_eq!(facts(&written).stage, Stage::Bound("n".into()));
    written["status"]["phase"] = "Succeeded".into();
    assert_eq!(facts(&written).stage, Stage::Succeeded);
    written["status"]["phase"] = "Failed".into();
    assert_eq!(facts(&written).stage, Stage::Failed);
    assert!(facts(&written).terminal);
}

#[test]
fn priority_policy_deletion_and_gang_are_read() {
    let mut written = pod("a", 1);
    let plain = facts(&written);
    assert_eq!((plain.priority, plain.preempts, plain.leaving), (0, true, false));
    assert_eq!(plain.membership, None);
    assert_eq!(plain.created(), 1_767_225_600);
    written["spec"]["priority"] = 1000.into();
    written["spec"]["preemptionPolicy"] = "Never".into();
    written["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z".into();
    written["metadata"]["annotations"] = json!({"gantry.dev/gang": "train", "gantry.dev/gang-min": "4"});
    let marked = facts(&written);
    assert_eq!((marked.priority, marked.preempts, marked.leaving), (1000, false, true));
    assert_eq!((plain.ends, marked.ends), (None, Some(1_767_225_630)));
    assert_eq!(&*marked.membership.unwrap().key.name, "train");
}

#[test]
fn pod_without_devices_shares_profile_and_load() {
    let mut reader = Reader::new(watched());
    let mut web = |name: &str| {
        let pod = json!({
            "metadata": {"name": name, "namespace": "web", "uid": name, "labels": {"app": "web"}},
            "spec": {"nodeName": "n", "containers": [container("1")]},
        });
        match reader.read(serde_json::from_value(pod).unwrap()) {
            Some(ParsedPod::OtherPod(other_pod)) => other_pod,
            other => panic!("{other:?}"),
        }
    };
    let (one, two) = (web("one"), web("two"));
    assert_eq!(one.stage, Stage::Bound("n".into()));
    assert_eq!(&*one.profile.namespace, "web");
    assert!(Arc::ptr_eq(&one.profile, &two.profile) && Arc::ptr_eq(&one.load, &two.load));
}

#[test]
fn a_member_without_devices_says_its_gang_too() {
    let launcher = other_pod(json!({
        "metadata": {"name": "l", "namespace": "ml", "uid": "l", "annotations": {"gantry.dev/gang": "train", "gantry.dev/gang-min": "4"}},
        "spec": {"priority": 5, "containers": [container("1")]},
    }));
    assert_eq!(launcher.stage, Stage::Pending);
    assert_eq!(launcher.priority, 5);
    assert_eq!(&*launcher.membership.unwrap().key.name, "train");
}

proptest! {
    /// Playing the containers' lives through: nothing ever runs that was not asked for, and at some moment all of it runs.
    #[test]
    fn the_request_is_the_most_that_ever_runs_at_once(
        inits in prop::collection::vec((any::<bool>(), 0i64..9), 0..5),
        apps in prop::collection::vec(0i64..9, 0..4),
    ) {
        let written = json!({
            "initContainers": inits.iter().map(|(is_sidecar, cpu)| if *is_sidecar { sidecar(&cpu.to_string()) } else { container(&cpu.to_string()) }).collect::<Vec<_>>(),
            "containers": apps.iter().map(|cpu| container(&cpu.to_string())).collect::<Vec<_>>(),
        });
        let mut moments = vec![0];
        let mut running = 0;
        for (is_sidecar, cpu) in &inits {
            moments.push(running + cpu);
            if *is_sidecar {
                running += cpu;
            }
        }
        moments.push(running + apps.iter().sum::<i64>());
        prop_assert_eq!(load(written).milli_cpu, moments.into_iter().max().unwrap() * 1000);
    }
}

#[test]
fn spread_constraints_are_read_unless_schedule_anyway() {
    let zone = json!({
        "maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "minDomains": 3,
        "labelSelector": {"matchLabels": {"app": "x"}}, "matchLabelKeys": ["hash", "absent"],
        "nodeAffinityPolicy": "Ignore", "nodeTaintsPolicy": "Honor",
    });
    let host = json!({
        "maxSkew": 1, "topologyKey": "host", "whenUnsatisfiable": "DoNotSchedule",
    });
    let soft = json!({
        "maxSkew": 1, "topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway",
    });
    let needs =
        labelled(&[("app", "x"), ("hash", "7")], json!({"topologySpreadConstraints": [zone, soft, host]}));
    let is = |key: &str, value: &str| Requirement {
        key: key.into(),
        operator: Operator::In,
        values: vec![value.into()],
    };
    let none = Requirement { key: "".into(), operator: Operator::In, values: Vec::new() };
    assert_eq!(
        needs.spread,
        [
            Spread {
                selector: vec![is("app", "x"), is("hash", "7")],
                topology_key: "zone".into(),
                max_skew: 2,
                min_domains: 3,
                by_affinity: false,
                by_taints: true,
            },
            Spread {
                selector: vec![none],
                topology_key: "host".into(),
                max_skew: 1,
                min_domains: 1,
                by_affinity: true,
                by_taints: false,
            },
        ]
    );
}
