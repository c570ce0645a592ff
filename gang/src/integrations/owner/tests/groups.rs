//! PodGroups and Workloads.

use super::*;
use crate::membership::Disruption;

#[test]
fn kubernetes_pod_group_is_a_gang_with_a_minimum_or_none_at_all() {
    let gang = of(
        OwnerKind::PodGroup,
        json!({
            "workloadRef": {"workloadName": "train", "templateName": "workers"},
            "schedulingPolicy": {"gang": {"minCount": 4}},
            "schedulingConstraints": {"topology": [{"key": "topology.kubernetes.io/rack"}]},
        }),
    );
    assert_eq!(sizes(&gang), (Some(4), None));
    assert_eq!(&*gang.source, "spec.schedulingPolicy.gang.minCount");
    assert_eq!(gang.options.level, level("topology.kubernetes.io/rack", true));
    let basic = of(OwnerKind::PodGroup, json!({"schedulingPolicy": {"basic": {}}}));
    assert_eq!(sizes(&basic), (Some(1), None));
    assert!(basic.singles && !gang.singles);
    assert_eq!(sizes(&of(OwnerKind::PodGroup, json!({}))), (None, None));
    let both = of(OwnerKind::PodGroup, json!({"schedulingPolicy": {"basic": {}, "gang": {"minCount": 0}}}));
    assert_eq!(
        faults(&both),
        [
            "spec.schedulingPolicy of PodGroup train: schedulingPolicy is both gang and basic: it is one of them"
        ]
    );
}

/// The PodGroup that the Job controller of Kubernetes 1.37 makes of `spec.scheduling`. Without a policy it is basic.
#[test]
fn pod_group_of_a_job_states_the_minimum_of_the_job() {
    let of_job = |policy: Value| {
        let object = json!({
            "metadata": {
                "name": "train",
                "uid": "u2",
                "ownerReferences": [
                    {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u1", "controller": true},
                    {"apiVersion": "scheduling.k8s.io/v1beta1", "kind": "Workload", "name": "train-5f9", "uid": "u3"},
                ],
            },
            "spec": {
                "workloadRef": {"workloadName": "train-5f9", "templateName": "pgt-0"},
                "schedulingPolicy": policy,
                "disruptionMode": {"all": {}},
            },
            "status": {"conditions": [{"type": "PodGroupInitiallyScheduled", "status": "True"}]},
        });
        read(OwnerKind::PodGroup, "", &object)
    };
    let gang = of_job(json!({"gang": {"minCount": 4}}));
    assert_eq!((sizes(&gang), gang.singles, faults(&gang).len()), ((Some(4), None), false, 0));
    assert_eq!((gang.disruption, gang.scheduled_whole), (Some(Disruption::All), true));
    let basic = of_job(json!({"basic": {}}));
    assert_eq!((sizes(&basic), basic.singles), ((Some(1), None), true));
}

#[test]
fn a_workload_has_groups_of_its_own() {
    let spec = json!({"podGroups": [
        {"name": "workers", "policy": {"gang": {"minCount": 8}}},
        {"name": "driver", "policy": {"basic": {}}},
    ]});
    let workers = part_of(OwnerKind::Workload, "workers", spec.clone());
    assert_eq!(
        (sizes(&workers).0, &*workers.source),
        (Some(8), "spec.podGroups[workers].policy.gang.minCount")
    );
    assert_eq!(
        faults(&part_of(OwnerKind::Workload, "worker", spec)),
        [
            "spec.podGroups of Workload train: no group worker, which its pods name; there are workers, driver; did you mean `workers`?"
        ]
    );
}

#[test]
fn a_pod_group_of_coscheduling_says_how_long_members_may_take() {
    let group = json!({
        "metadata": {"name": "train", "annotations": {"gang.scheduling.koordinator.sh/total-number": "6"}},
        "spec": {"minMember": 4, "scheduleTimeoutSeconds": 30},
    });
    let facts = read(OwnerKind::CoschedulingPodGroup, "", &group);
    assert_eq!(
        (sizes(&facts), facts.options.arrival.map(|arrival| arrival.time)),
        ((Some(4), Some(6)), Some(std::time::Duration::from_secs(30)))
    );
    assert_eq!(sizes(&of(OwnerKind::CoschedulingPodGroup, json!({}))).0, Some(1), "each for itself");
}

#[test]
fn a_number_that_is_none_is_told_as_it_stands() {
    for (value, told) in [
        (json!(-3), "-3 is no whole number from 0 on"),
        (json!(2.5), "2.5 is no whole number from 0 on"),
        (json!([4]), "[4] is no whole number from 0 on"),
        (json!("4"), "\"4\" is a text: a whole number from 0 on is asked for"),
        (json!(5_000_000_000_u64), "5000000000 is too large: at most 4294967295 is read"),
        (json!(u64::MAX), "18446744073709551615 is too large: at most 4294967295 is read"),
    ] {
        let facts = of(OwnerKind::CoschedulingPodGroup, json!({"minMember": value}));
        assert_eq!(facts.min, None);
        assert_eq!(faults(&facts), [format!("spec.minMember of PodGroup train: {told}")]);
    }
    let long = of(OwnerKind::CoschedulingPodGroup, json!({"minMember": "x\n".repeat(900)}));
    let words = faults(&long).join("");
    assert!(words.len() < 300 && !words.contains('\n'), "{words}");
}

#[test]
fn a_pod_group_of_volcano_may_want_so_many_of_each_task() {
    let spec = |min: u32| json!({"minMember": min, "minTaskMember": {"ps": 1, "worker": 4}});
    let facts = of(OwnerKind::VolcanoPodGroup, spec(5));
    assert_eq!((sizes(&facts).0, roles(&facts)), (Some(5), vec![("ps", 1), ("worker", 4)]));
    assert_eq!(roles(&of(OwnerKind::VolcanoPodGroup, spec(3))), [], "as Volcano itself");
    let tiers = |mode: &str| {
        let spec = json!({"minMember": 4, "networkTopology": {"mode": mode, "highestTierName": "rack"}});
        of(OwnerKind::VolcanoPodGroup, spec).options.level
    };
    assert_eq!((tiers("hard"), tiers("soft")), (level("rack", true), level("rack", false)));
    let parts = json!({"minMember": 8, "subGroupPolicy": [
        {"name": "tp", "subGroupSize": 4, "networkTopology": {"mode": "hard", "highestTierName": "rack"}},
    ]});
    let parts = of(OwnerKind::VolcanoPodGroup, parts).options;
    assert_eq!((parts.level, parts.slice), (level("rack", true), Some(4)));
    let counted = |more: Value| {
        let mut spec = json!({"subGroupPolicy": [
            {"name": "prefill", "subGroupSize": 4, "minSubGroups": 2}, {"name": "decode", "subGroupSize": 2, "minSubGroups": 1}, {"name": "spare", "subGroupSize": 8},
        ]});
        add(&mut spec, more);
        let facts = of(OwnerKind::VolcanoPodGroup, spec);
        (facts.min, facts.source.to_string())
    };
    assert_eq!(counted(json!({})), (Some(10), "spec.subGroupPolicy".to_owned()));
    assert_eq!(counted(json!({"minMember": 4})).0, Some(10));
    assert_eq!(counted(json!({"minMember": 12})), (Some(12), "spec.minMember".to_owned()));
}

#[test]
fn the_leaves_of_kais_sub_groups_have_the_pods() {
    let tree = |more: Value| {
        let mut spec = json!({"subGroups": [
            {"name": "prefill"},
            {"name": "leader", "parent": "prefill", "minMember": 1},
            {"name": "workers", "parent": "prefill", "minMember": 3},
            {"name": "decode", "minMember": 2},
        ]});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        of(OwnerKind::KaiPodGroup, spec)
    };
    let all = tree(
        json!({"topologyConstraint": {"topology": "t", "requiredTopologyLevel": "rack", "preferredTopologyLevel": "host"}}),
    );
    assert_eq!((sizes(&all).0, roles(&all)), (Some(6), vec![("decode", 2), ("leader", 1), ("workers", 3)]));
    assert_eq!(all.options.level, level("rack", true));
    let any_two = tree(json!({"minSubGroup": 2}));
    assert_eq!((sizes(&any_two).0, roles(&any_two)), (Some(3), vec![]));
    assert_eq!(sizes(&of(OwnerKind::KaiPodGroup, json!({"minMember": 8}))).0, Some(8));
}

#[test]
fn kai_minimum_is_the_greater_of_group_and_sub_groups() {
    // The field that gives the greater number is named as its source.
    let of_both = |min: u32| {
        let groups = json!([{"name": "a", "minMember": 2}, {"name": "b", "minMember": 4}]);
        let facts = of(OwnerKind::KaiPodGroup, json!({"minMember": min, "subGroups": groups}));
        (sizes(&facts).0, facts.source.to_string())
    };
    assert_eq!(of_both(1), (Some(6), "spec.subGroups".to_owned()));
    assert_eq!(of_both(6), (Some(6), "spec.minMember".to_owned()));
    assert_eq!(of_both(8), (Some(8), "spec.minMember".to_owned()));
    let groups = json!([{"name": "a", "minMember": 2}, {"name": "b", "minMember": 4}]);
    let with = |min: u32| {
        let spec = json!({"minMember": min, "minSubGroup": 1, "subGroups": groups});
        of(OwnerKind::KaiPodGroup, spec)
    };
    assert_eq!(sizes(&with(0)).0, Some(2), "0 says nothing");
    assert_eq!(
        faults(&with(6)),
        [
            "spec.minMember of PodGroup train: minSubGroup is given too: so many pods are needed, or so many sub-groups; remove one of the two"
        ]
    );
}

#[test]
fn pod_gang_needs_the_minimum_of_each_clique() {
    let spec = json!({
        "podgroups": [
            {"name": "llm-0-prefill", "minReplicas": 2, "podReferences": [{"name": "a"}, {"name": "b"}, {"name": "c"}]},
            {"name": "llm-0-decode", "minReplicas": 1, "podReferences": []},
        ],
        "topologyConstraint": {"packConstraint": {"required": "topology.kubernetes.io/rack"}},
    });
    let facts = of(OwnerKind::PodGang, spec);
    assert_eq!(
        (sizes(&facts), roles(&facts)),
        ((Some(3), None), vec![("llm-0-decode", 1), ("llm-0-prefill", 2)])
    );
    assert_eq!(facts.options.level, level("topology.kubernetes.io/rack", true));
    // Its operator fills it in a moment later.
    assert_eq!(sizes(&of(OwnerKind::PodGang, json!({"podgroups": []}))), (None, None));
    let wrong = json!({"podgroups": [{"name": "a", "minReplicas": "two"}]});
    assert_eq!(faults(&of(OwnerKind::PodGang, wrong)).len(), 1);
}

#[test]
fn kubernetes_pod_group_states_policy_and_why_it_waits() {
    let with = |condition: &str, policy: &str, status: &str| {
        let object = json!({
            "metadata": {"name": "train"},
            "spec": {"schedulingPolicy": {"gang": {"minCount": 4}}, "preemptionPolicy": policy},
            "status": {"conditions": [
                {"type": "DisruptionTarget", "status": "False", "message": "another"},
                {"type": condition, "status": status, "reason": "SchedulerError",
                 "message": "all pods should have the same priority"},
            ]},
        });
        let facts = read(OwnerKind::PodGroup, "", &object);
        assert_eq!(facts.scheduled_whole, condition != "Another", "{condition} {status}");
        (facts.never_preempts, facts.unscheduled.map(|why| why.to_string()))
    };
    assert_eq!(with("Another", "Never", "False"), (true, None));
    let of = |policy: &str, status: &str| with("PodGroupInitiallyScheduled", policy, status);
    let why = Some("all pods should have the same priority".to_owned());
    assert_eq!(of("Never", "False"), (true, why.clone()));
    // Its name in Kubernetes 1.36.
    assert_eq!(with("PodGroupScheduled", "Never", "False"), (true, why.clone()));
    assert_eq!(of("PreemptLowerPriority", "False"), (false, why));
    assert_eq!(of("Never", "True"), (true, None));
}

#[test]
fn pods_of_a_kubernetes_pod_group_are_evicted_singly_by_default() {
    let of = |mode: Value| {
        let mut spec = json!({"schedulingPolicy": {"gang": {"minCount": 4}}});
        if !mode.is_null() {
            spec["disruptionMode"] = mode;
        }
        let facts = super::of(OwnerKind::PodGroup, spec);
        (facts.disruption, faults(&facts))
    };
    for mode in [Value::Null, json!({"single": {}}), json!("Pod"), json!({"single": {}, "all": null})] {
        assert_eq!(of(mode), (Some(Disruption::Single), vec![]));
    }
    for mode in [json!({"all": {}}), json!("PodGroup")] {
        assert_eq!(of(mode), (Some(Disruption::All), vec![]));
    }
    let wrong =
        [json!({"single": {}, "all": {}}), json!({}), json!(["all"]), json!({"al": {}}), json!("all")].map(
            |mode| {
                let (disruption, faults) = of(mode.clone());
                assert_eq!(disruption, None, "{mode}");
                faults.join("; ")
            },
        );
    insta::assert_snapshot!(wrong.join("\n"), @r#"
    spec.disruptionMode of PodGroup train: exactly one of single and all is asked for
    spec.disruptionMode of PodGroup train: exactly one of single and all is asked for
    spec.disruptionMode of PodGroup train: exactly one of single and all is asked for
    spec.disruptionMode of PodGroup train: no mode "al"; there are single, all; did you mean `all`?
    spec.disruptionMode of PodGroup train: no mode "all"; there are Pod, PodGroup
    "#);
    assert_eq!(super::of(OwnerKind::VolcanoPodGroup, json!({"minMember": 4})).disruption, None);
}

#[test]
fn kubernetes_pod_group_may_have_several_constraints() {
    let of = |topology: Value| {
        let spec = json!({
            "parentCompositePodGroupName": "tree",
            "schedulingPolicy": {"gang": {"minCount": 4}},
            "schedulingConstraints": {"topology": topology},
        });
        super::of(OwnerKind::PodGroup, spec)
    };
    let two = of(json!([{"key": "zone"}, {"key": "rack"}]));
    assert_eq!(
        (two.levels.as_slice(), &two.options.level),
        (["zone".into(), "rack".into()].as_slice(), &None)
    );
    assert_eq!((faults(&two), two.parent.as_deref()), (vec![], Some("tree")));
    assert_eq!(of(json!([{"key": "rack"}])).options.level, level("rack", true));
    assert_eq!(of(json!([])).levels, Vec::<std::sync::Arc<str>>::new());
    let nine = Value::from(vec![json!({"key": "zone"}); 9]);
    let wrong = [json!([{"key": "zone"}, {}]), json!([{"key": 3}]), nine].map(|wrong| {
        let faults = faults(&of(wrong));
        assert_eq!(faults.len(), 1, "{faults:?}");
        faults[0].clone()
    });
    insta::assert_snapshot!(wrong.join("\n"), @r"
    spec.schedulingConstraints.topology of PodGroup train: a constraint has no key, or one that is no text
    spec.schedulingConstraints.topology of PodGroup train: a constraint has no key, or one that is no text
    spec.schedulingConstraints.topology of PodGroup train: 9 constraints are too many: at most 8 are read
    ");
}
