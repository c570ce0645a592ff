use std::sync::Arc;

use proptest::prelude::*;

use super::*;

fn required(key: &str, operator: Operator, values: &[&str]) -> Requirement {
    Requirement { key: key.into(), operator, values: values.iter().map(|value| (*value).into()).collect() }
}

fn labels(term: Vec<Requirement>) -> NodeTerm {
    NodeTerm { labels: term, names: Vec::new() }
}

fn names(term: Vec<Requirement>) -> NodeTerm {
    NodeTerm { labels: Vec::new(), names: term }
}

fn node(with: &[(&str, &str)]) -> NodeFacts {
    NodeFacts {
        name: "n1".into(),
        labels: with.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
        ..NodeFacts::default()
    }
}

fn taint(key: &str, value: &str, effect: TaintEffect) -> Taint {
    Taint { key: key.into(), value: value.into(), effect }
}

fn tolerate(key: &str, value: Option<&str>, effect: Option<TaintEffect>) -> Toleration {
    Toleration {
        key: key.into(),
        value: value.map_or(TolerationValue::Any, |value| TolerationValue::Equal(value.into())),
        effect,
    }
}

#[test]
fn a_cordoned_node_takes_only_who_bears_the_taint_it_stands_for() {
    let mut cordoned = node(&[]);
    cordoned.unschedulable = true;
    let mut needs = Needs::default();
    assert_eq!(needs.admits(&cordoned).unwrap_err().to_string(), "node(s) were unschedulable");
    needs.tolerations = vec![tolerate(UNSCHEDULABLE, None, Some(TaintEffect::NoExecute))];
    assert_eq!(needs.admits(&cordoned), Err(Misfit::Unschedulable));
    needs.tolerations = vec![tolerate("", None, None)];
    assert_eq!(needs.admits(&cordoned), Ok(()));
}

#[test]
fn taints_are_borne_by_key_value_and_effect() {
    let mut tainted = node(&[]);
    tainted.taints = vec![
        taint("soft", "", TaintEffect::PreferNoSchedule),
        taint("nvidia.com/gpu", "present", TaintEffect::NoSchedule),
    ];
    for (toleration, tolerated) in [
        (tolerate("nvidia.com/gpu", None, None), true),
        (tolerate("nvidia.com/gpu", Some("present"), None), true),
        (tolerate("nvidia.com/gpu", Some(""), None), false),
        (tolerate("nvidia.com/gpu", None, Some(TaintEffect::NoSchedule)), true),
        (tolerate("nvidia.com/gpu", None, Some(TaintEffect::NoExecute)), false),
        (tolerate("", None, None), true),
        (tolerate("other", None, None), false),
    ] {
        let needs = Needs { tolerations: vec![toleration.clone()], ..Needs::default() };
        assert_eq!(needs.admits(&tainted).is_ok(), tolerated, "{toleration:?}");
    }
    assert_eq!(
        Needs::default().admits(&tainted).unwrap_err().to_string(),
        "node(s) had untolerated taint {nvidia.com/gpu: present}"
    );
}

#[test]
fn a_taint_that_is_a_number_is_borne_above_or_below_a_limit() {
    let mut rated = node(&[]);
    for (value, above, below) in
        [("950", true, false), ("900", false, false), ("7", false, true), ("", false, false)]
    {
        rated.taints = vec![taint("service-level", value, TaintEffect::NoSchedule)];
        for (tolerated, admitted) in
            [(TolerationValue::Above(900), above), (TolerationValue::Below(900), below)]
        {
            let toleration = Toleration { key: "service-level".into(), value: tolerated, effect: None };
            let needs = Needs { tolerations: vec![toleration], ..Needs::default() };
            assert_eq!(needs.admits(&rated).is_ok(), admitted, "{value}");
        }
    }
}

#[test]
fn of_the_affinity_terms_one_must_hold_and_the_selector_besides() {
    let there = node(&[("zone", "a"), ("gpus", "8")]);
    let needs = |selector: &[(&str, &str)], affinity: Vec<NodeTerm>| Needs {
        selector: selector.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
        affinity,
        ..Needs::default()
    };
    for (needs, admitted) in [
        (needs(&[("zone", "a")], vec![]), true),
        (needs(&[("zone", "b")], vec![]), false),
        (needs(&[("zone", "a")], vec![labels(vec![required("gpus", Operator::Gt, &["8"])])]), false),
        (needs(&[], vec![labels(vec![required("gpus", Operator::Gt, &["7"])])]), true),
        (needs(&[], vec![labels(vec![required("gpus", Operator::Lt, &["9", "10"])])]), false),
        (needs(&[], vec![labels(vec![required("zone", Operator::Lt, &["9"])])]), false),
        // A term without requirements holds nowhere, and two terms are alternatives.
        (needs(&[], vec![NodeTerm::default()]), false),
        (
            needs(
                &[],
                vec![NodeTerm::default(), names(vec![required("metadata.name", Operator::In, &["n1"])])],
            ),
            true,
        ),
        (needs(&[], vec![names(vec![required("metadata.name", Operator::NotIn, &["n1"])])]), false),
        (needs(&[], vec![names(vec![required("metadata.name", Operator::NotIn, &["n2"])])]), true),
        (needs(&[], vec![names(vec![required("metadata.name", Operator::In, &["n1", "n2"])])]), false),
        (needs(&[], vec![names(vec![required("metadata.uid", Operator::NotIn, &["n2"])])]), false),
    ] {
        assert_eq!(needs.admits(&there).is_ok(), admitted, "{needs:?}");
    }
}

#[test]
fn weights_add_up_and_a_soft_taint_costs_a_hundred() {
    let mut there = node(&[("zone", "a")]);
    let mut needs = Needs {
        preferred: vec![
            (30, labels(vec![required("zone", Operator::Exists, &[])])),
            (5, labels(vec![required("zone", Operator::In, &["a"])])),
            (7, labels(vec![required("zone", Operator::In, &["b"])])),
            (9, NodeTerm::default()),
        ],
        ..Needs::default()
    };
    assert_eq!(needs.prefers(&there), 35);
    there.taints = vec![taint("soft", "", TaintEffect::PreferNoSchedule)];
    assert_eq!(needs.prefers(&there), -65);
    needs.tolerations = vec![tolerate("soft", None, None)];
    assert_eq!(needs.prefers(&there), 35);
}

/// The rules once more, as the API's documentation has them, without sharing anything with what is tested.
fn naive(needs: &Needs, node: &NodeFacts) -> bool {
    let tolerated = |key: &str, value: &str, effect: TaintEffect| {
        for toleration in &needs.tolerations {
            let key_fits = &*toleration.key == key || toleration.key.is_empty();
            let value_fits = match &toleration.value {
                TolerationValue::Any => true,
                TolerationValue::Equal(known) => &**known == value,
                // Where the taint's value is a whole number at all.
                TolerationValue::Above(limit) => value.parse().is_ok_and(|value: i64| *limit < value),
                TolerationValue::Below(limit) => value.parse().is_ok_and(|value: i64| *limit > value),
            };
            let effect_fits = match toleration.effect {
                None => true,
                Some(known) => known == effect,
            };
            if key_fits && value_fits && effect_fits {
                return true;
            }
        }
        false
    };
    if node.unschedulable && !tolerated("node.kubernetes.io/unschedulable", "", TaintEffect::NoSchedule) {
        return false;
    }
    for taint in &node.taints {
        let hard = taint.effect == TaintEffect::NoSchedule || taint.effect == TaintEffect::NoExecute;
        if hard && !tolerated(&taint.key, &taint.value, taint.effect) {
            return false;
        }
    }
    for (key, value) in &needs.selector {
        if !node.labels.iter().any(|(label, is)| label == key && is == value) {
            return false;
        }
    }
    let holds = |term: &NodeTerm| {
        if term.labels.len() + term.names.len() == 0 {
            return false;
        }
        for wanted in &term.labels {
            let found: Vec<&Arc<str>> =
                node.labels.iter().filter(|(key, _)| **key == wanted.key).map(|(_, value)| value).collect();
            let one_of = found.iter().any(|value| wanted.values.iter().any(|other| *value == other));
            let numbers = |compare: &dyn Fn(i64, i64) -> bool| {
                found.len() == 1
                    && wanted.values.len() == 1
                    && match (found[0].parse(), wanted.values[0].parse()) {
                        (Ok(value), Ok(limit)) => compare(value, limit),
                        _ => false,
                    }
            };
            let good = match wanted.operator {
                Operator::In => one_of,
                Operator::NotIn => !one_of && !wanted.values.is_empty(),
                Operator::Exists => !found.is_empty() && wanted.values.is_empty(),
                Operator::DoesNotExist => found.is_empty() && wanted.values.is_empty(),
                Operator::Gt => numbers(&|value, limit| value > limit),
                Operator::Lt => numbers(&|value, limit| value < limit),
            };
            if !good {
                return false;
            }
        }
        term.names.iter().all(|wanted| match wanted.operator {
            Operator::In => wanted.values == [Arc::clone(&node.name)],
            Operator::NotIn => wanted.values.len() == 1 && wanted.values[0] != node.name,
            _ => false,
        })
    };
    needs.affinity.is_empty() || needs.affinity.iter().any(holds)
}

fn text(of: &'static [&'static str]) -> impl Strategy<Value = Arc<str>> {
    prop::sample::select(of).prop_map(Arc::from)
}

const KEYS: &[&str] = &["a", "b", "c"];
const VALUES: &[&str] = &["", "1", "2", "x"];

fn effect() -> impl Strategy<Value = TaintEffect> {
    prop::sample::select(vec![TaintEffect::NoSchedule, TaintEffect::PreferNoSchedule, TaintEffect::NoExecute])
}

fn requirement(
    keys: &'static [&'static str],
    values: &'static [&'static str],
) -> impl Strategy<Value = Requirement> {
    let operator = prop::sample::select(vec![
        Operator::In,
        Operator::NotIn,
        Operator::Exists,
        Operator::DoesNotExist,
        Operator::Gt,
        Operator::Lt,
    ]);
    (text(keys), operator, prop::collection::vec(text(values), 0..3))
        .prop_map(|(key, operator, values)| Requirement { key, operator, values })
}

prop_compose! {
    fn term()(
        labels in prop::collection::vec(requirement(KEYS, VALUES), 0..3),
        names in prop::collection::vec(requirement(&["metadata.name"], &["n1", "n2"]), 0..2),
    ) -> NodeTerm {
        NodeTerm { labels, names }
    }
}

fn tolerated() -> impl Strategy<Value = TolerationValue> {
    prop_oneof![
        Just(TolerationValue::Any),
        text(VALUES).prop_map(TolerationValue::Equal),
        (0..3i64).prop_map(TolerationValue::Above),
        (0..3i64).prop_map(TolerationValue::Below),
    ]
}

prop_compose! {
    fn any_needs()(
        selector in prop::collection::btree_map(text(KEYS), text(VALUES), 0..2),
        affinity in prop::collection::vec(term(), 0..3),
        tolerations in prop::collection::vec(
            (text(&["", "a", "b", "node.kubernetes.io/unschedulable"]), tolerated(), prop::option::of(effect())),
            0..4,
        ),
    ) -> Needs {
        Needs {
            selector,
            affinity,
            tolerations: tolerations.into_iter().map(|(key, value, effect)| Toleration { key, value, effect }).collect(),
            ..Needs::default()
        }
    }
}

prop_compose! {
    fn any_node()(
        labels in prop::collection::btree_map(text(KEYS), text(VALUES), 0..4),
        taints in prop::collection::vec((text(&["a", "b"]), text(VALUES), effect()), 0..2),
        unschedulable in prop::bool::weighted(0.2),
    ) -> NodeFacts {
        NodeFacts {
            name: "n1".into(),
            labels,
            taints: taints.into_iter().map(|(key, value, effect)| Taint { key, value, effect }).collect(),
            unschedulable,
            ..NodeFacts::default()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn admits_as_the_documentation_says(needs in any_needs(), node in any_node()) {
        prop_assert_eq!(needs.admits(&node).is_ok(), naive(&needs, &node));
    }
}

fn port(protocol: &str, address: &str, number: u16) -> HostPort {
    (protocol.into(), address.into(), number)
}

#[test]
fn ports_collide_as_kube_scheduler_counts_them() {
    let http = |address: &str| [port("TCP", address, 80)];
    for (a, b, collide) in [
        ("0.0.0.0", "0.0.0.0", true),
        ("0.0.0.0", "10.0.0.1", true),
        ("", "10.0.0.1", true),
        ("", "0.0.0.0", true),
        ("0.0.0.0", "::", true),
        ("10.0.0.1", "10.0.0.1", true),
        ("10.0.0.1", "10.0.0.2", false),
        ("::", "::", true),
        ("::", "10.0.0.1", false),
        ("::", "::1", false),
    ] {
        assert_eq!(ports_collide(&http(a), &http(b)), collide, "{a} {b}");
        assert_eq!(ports_collide(&http(b), &http(a)), collide, "{b} {a}");
    }
    assert!(!ports_collide(&http(""), &[port("UDP", "", 80)]));
    assert!(!ports_collide(&http(""), &[port("TCP", "", 81)]));
    assert!(!ports_collide(&http(""), &[]));
}
