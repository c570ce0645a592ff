//! What is read of each kind of object.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{api, read};
use crate::claim::{OwnerFacts, OwnerKind};
use crate::terms::LevelWish;

const KINDS: [OwnerKind; 16] = [
    OwnerKind::PodGroup,
    OwnerKind::Workload,
    OwnerKind::CoschedulingPodGroup,
    OwnerKind::KoordinatorPodGroup,
    OwnerKind::VolcanoPodGroup,
    OwnerKind::KaiPodGroup,
    OwnerKind::LeaderWorkerSet,
    OwnerKind::JobSet,
    OwnerKind::PyTorchJob,
    OwnerKind::TfJob,
    OwnerKind::MpiJob,
    OwnerKind::XgBoostJob,
    OwnerKind::PaddleJob,
    OwnerKind::JaxJob,
    OwnerKind::RayCluster,
    OwnerKind::Job,
];

#[test]
fn the_manifest_gives_the_right_to_read_every_kind() {
    let manifest = include_str!("../../../../manifests/extender-owners.yaml");
    let listed = |line: &str, field: &str| -> Option<Vec<String>> {
        let (_, list) = line.trim().trim_start_matches("- ").split_once(field)?;
        let list = list.trim().trim_matches(['[', ']']);
        Some(list.split(", ").map(str::to_owned).collect())
    };
    let lines: Vec<&str> = manifest.lines().collect();
    let rules: Vec<(Vec<String>, Vec<String>)> = lines
        .windows(2)
        .filter_map(|pair| Some((listed(pair[0], "apiGroups:")?, listed(pair[1], "resources:")?)))
        .collect();
    assert!(!rules.is_empty());
    for kind in KINDS {
        let api = api(kind);
        for (group, _) in api.versions {
            let given = rules.iter().any(|(groups, resources)| {
                groups.iter().any(|of| of == group) && resources.iter().any(|of| of == api.plural)
            });
            assert!(given, "{} of {group}", api.plural);
        }
    }
}

fn part_of(kind: OwnerKind, part: &str, spec: Value) -> OwnerFacts {
    let mut object = json!({"metadata": {"name": "train"}});
    object["spec"] = spec;
    read(kind, part, &object)
}

fn of(kind: OwnerKind, spec: Value) -> OwnerFacts {
    part_of(kind, "", spec)
}

fn sizes(facts: &OwnerFacts) -> (Option<u32>, Option<u32>) {
    assert_eq!(facts.faults, [], "no fault was expected");
    (facts.min, facts.total)
}

fn roles(facts: &OwnerFacts) -> Vec<(&str, u32)> {
    facts
        .by_role
        .iter()
        .map(|(role, count)| (&**role, *count))
        .collect()
}

fn faults(facts: &OwnerFacts) -> Vec<String> {
    facts.faults.iter().map(ToString::to_string).collect()
}

fn level(name: &str, required: bool) -> Option<LevelWish> {
    Some(LevelWish {
        level: name.into(),
        required,
    })
}

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
    assert_eq!(&*gang.said, "spec.schedulingPolicy.gang.minCount");
    assert_eq!(gang.wish.level, level("topology.kubernetes.io/rack", true));
    let basic = of(OwnerKind::PodGroup, json!({"schedulingPolicy": {"basic": {}}}));
    assert_eq!(sizes(&basic), (Some(1), None));
    assert!(basic.singles && !gang.singles);
    assert_eq!(sizes(&of(OwnerKind::PodGroup, json!({}))), (None, None));
    let both = of(
        OwnerKind::PodGroup,
        json!({"schedulingPolicy": {"basic": {}, "gang": {"minCount": 0}}}),
    );
    assert_eq!(
        faults(&both),
        [
            "spec.schedulingPolicy of PodGroup train: schedulingPolicy is both gang and basic: it is one of them"
        ]
    );
}

#[test]
fn a_workload_has_groups_of_its_own() {
    let spec = json!({"podGroups": [
        {"name": "workers", "policy": {"gang": {"minCount": 8}}},
        {"name": "driver", "policy": {"basic": {}}},
    ]});
    let workers = part_of(OwnerKind::Workload, "workers", spec.clone());
    assert_eq!(
        (sizes(&workers).0, &*workers.said),
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
        (sizes(&facts), facts.wish.arrival),
        ((Some(4), Some(6)), Some(std::time::Duration::from_secs(30)))
    );
    assert_eq!(
        sizes(&of(OwnerKind::CoschedulingPodGroup, json!({}))).0,
        Some(1),
        "each for itself"
    );
}

#[test]
fn a_number_that_is_none_is_told_as_it_stands() {
    for (value, told) in [
        (json!(-3), "-3 is no whole number from 0 on"),
        (json!(2.5), "2.5 is no whole number from 0 on"),
        (json!([4]), "[4] is no whole number from 0 on"),
        (
            json!("4"),
            "\"4\" is a text: a whole number from 0 on is asked for",
        ),
        (
            json!(5_000_000_000_u64),
            "5000000000 is too large: at most 4294967295 is read",
        ),
        (
            json!(u64::MAX),
            "18446744073709551615 is too large: at most 4294967295 is read",
        ),
    ] {
        let facts = of(OwnerKind::CoschedulingPodGroup, json!({"minMember": value}));
        assert_eq!(facts.min, None);
        assert_eq!(
            faults(&facts),
            [format!("spec.minMember of PodGroup train: {told}")]
        );
    }
    let long = of(
        OwnerKind::CoschedulingPodGroup,
        json!({"minMember": "x\n".repeat(900)}),
    );
    let words = faults(&long).join("");
    assert!(words.len() < 300 && !words.contains('\n'), "{words}");
}

#[test]
fn a_pod_group_of_volcano_may_want_so_many_of_each_task() {
    let spec = |min: u32| json!({"minMember": min, "minTaskMember": {"ps": 1, "worker": 4}});
    let facts = of(OwnerKind::VolcanoPodGroup, spec(5));
    assert_eq!(
        (sizes(&facts).0, roles(&facts)),
        (Some(5), vec![("ps", 1), ("worker", 4)])
    );
    assert_eq!(
        roles(&of(OwnerKind::VolcanoPodGroup, spec(3))),
        [],
        "as Volcano itself"
    );
    let tiers = |mode: &str| {
        let spec = json!({"minMember": 4, "networkTopology": {"mode": mode, "highestTierName": "rack"}});
        of(OwnerKind::VolcanoPodGroup, spec).wish.level
    };
    assert_eq!(
        (tiers("hard"), tiers("soft")),
        (level("rack", true), level("rack", false))
    );
    let parts = json!({"minMember": 8, "subGroupPolicy": [
        {"name": "tp", "subGroupSize": 4, "networkTopology": {"mode": "hard", "highestTierName": "rack"}},
    ]});
    let parts = of(OwnerKind::VolcanoPodGroup, parts).wish;
    assert_eq!((parts.level, parts.slice), (level("rack", true), Some(4)));
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
        spec.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        of(OwnerKind::KaiPodGroup, spec)
    };
    let all = tree(
        json!({"topologyConstraint": {"topology": "t", "requiredTopologyLevel": "rack", "preferredTopologyLevel": "host"}}),
    );
    assert_eq!(
        (sizes(&all).0, roles(&all)),
        (Some(6), vec![("decode", 2), ("leader", 1), ("workers", 3)])
    );
    assert_eq!(all.wish.level, level("rack", true));
    let any_two = tree(json!({"minSubGroup": 2}));
    assert_eq!((sizes(&any_two).0, roles(&any_two)), (Some(3), vec![]));
    assert_eq!(
        sizes(&of(OwnerKind::KaiPodGroup, json!({"minMember": 8}))).0,
        Some(8)
    );
}

#[test]
fn of_kais_minimum_and_those_of_its_sub_groups_the_greater_counts_and_is_named() {
    let of_both = |min: u32| {
        let groups = json!([{"name": "a", "minMember": 2}, {"name": "b", "minMember": 4}]);
        let facts = of(
            OwnerKind::KaiPodGroup,
            json!({"minMember": min, "subGroups": groups}),
        );
        (sizes(&facts).0, facts.said.to_string())
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
fn a_leader_worker_set_whose_workers_wait_for_the_leader_is_two_gangs_a_group() {
    let spec =
        |policy: &str| json!({"replicas": 3, "startupPolicy": policy, "leaderWorkerTemplate": {"size": 4}});
    let at_once = of(OwnerKind::LeaderWorkerSet, spec("LeaderCreated"));
    assert_eq!((sizes(&at_once), at_once.apart), ((Some(4), Some(4)), false));
    let apart = of(OwnerKind::LeaderWorkerSet, spec("LeaderReady"));
    assert_eq!(
        (roles(&apart), apart.apart),
        (vec![("leader", 1), ("worker", 3)], true)
    );
    assert_eq!(
        sizes(&of(OwnerKind::LeaderWorkerSet, json!({}))),
        (Some(1), Some(1))
    );
}

fn job_set(more: Value, second: Value) -> Value {
    let mut workers =
        json!({"name": "workers", "replicas": 2, "template": {"spec": {"parallelism": 4, "completions": 4}}});
    add(&mut workers, second);
    let mut spec = json!({"replicatedJobs": [{"name": "driver", "template": {"spec": {}}}, workers]});
    add(&mut spec, more);
    spec
}

fn add(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
}

#[test]
fn a_job_set_is_as_large_as_all_its_jobs() {
    let facts = of(
        OwnerKind::JobSet,
        job_set(
            json!({"startupPolicy": {"startupPolicyOrder": "AnyOrder"}}),
            json!({}),
        ),
    );
    assert_eq!((sizes(&facts), facts.apart), ((Some(9), Some(9)), false));
    assert_eq!(roles(&facts), [("driver", 1), ("workers", 8)]);
    let fewer = of(
        OwnerKind::JobSet,
        json!({"replicatedJobs": [
            {"name": "w", "template": {"spec": {"parallelism": 8, "completions": 3}}},
        ]}),
    );
    assert_eq!(
        sizes(&fewer),
        (Some(3), Some(3)),
        "no more run at once than have to run"
    );
}

#[test]
fn a_job_set_that_starts_in_order_is_a_gang_for_each_replicated_job() {
    let in_order = job_set(
        json!({"startupPolicy": {"startupPolicyOrder": "InOrder"}}),
        json!({}),
    );
    let depends = job_set(
        json!({}),
        json!({"dependsOn": [{"name": "driver", "status": "Ready"}]}),
    );
    for spec in [in_order, depends] {
        let facts = of(OwnerKind::JobSet, spec);
        assert_eq!(
            (facts.apart, roles(&facts)),
            (true, vec![("driver", 1), ("workers", 8)])
        );
    }
}

#[test]
fn the_followers_of_a_replicated_job_are_all_but_the_leaders() {
    let facts = part_of(
        OwnerKind::JobSet,
        "workers/followers",
        job_set(json!({}), json!({})),
    );
    assert_eq!((sizes(&facts), facts.apart), ((Some(6), Some(6)), false));
    let unknown = part_of(
        OwnerKind::JobSet,
        "worker/followers",
        job_set(json!({}), json!({})),
    );
    assert_eq!(
        faults(&unknown),
        [
            "spec.replicatedJobs of JobSet train: no replicated job worker, which its pods name; there are driver, workers; did you mean `workers`?"
        ]
    );
}

#[test]
fn kais_placement_on_any_owner_is_a_wish() {
    let annotated = |name: &str| {
        let object =
            json!({"metadata": {"name": "train", "annotations": {name: "rack"}}, "spec": {"parallelism": 2}});
        read(OwnerKind::Job, "", &object).wish.level
    };
    assert_eq!(
        annotated("kai.scheduler/topology-required-placement"),
        level("rack", true)
    );
    assert_eq!(
        annotated("kai.scheduler/topology-preferred-placement"),
        level("rack", false)
    );
}

#[test]
fn a_training_job_needs_all_its_replicas_unless_it_says_otherwise() {
    let spec = |more: Value| {
        let mut spec = json!({"pytorchReplicaSpecs": {"Master": {}, "Worker": {"replicas": 7}}});
        spec.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        of(OwnerKind::PyTorchJob, spec)
    };
    let all = spec(json!({}));
    assert_eq!(
        (sizes(&all), roles(&all)),
        ((Some(8), Some(8)), vec![("master", 1), ("worker", 7)])
    );
    let fewer =
        spec(json!({"runPolicy": {"schedulingPolicy": {"minAvailable": 5, "scheduleTimeoutSeconds": 20}}}));
    assert_eq!((sizes(&fewer), roles(&fewer)), ((Some(5), Some(8)), vec![]));
    assert_eq!(&*fewer.said, "spec.runPolicy.schedulingPolicy.minAvailable");
    assert_eq!(fewer.wish.arrival, Some(std::time::Duration::from_secs(20)));
    let elastic = spec(json!({"elasticPolicy": {"minReplicas": 2, "maxReplicas": 10}}));
    assert_eq!(
        (sizes(&elastic), roles(&elastic)),
        ((Some(3), Some(8)), vec![("master", 1), ("worker", 2)])
    );
    assert_eq!(elastic.wish.max, Some(11));
    let wrong = spec(
        json!({"runPolicy": {"schedulingPolicy": {"minAvailable": 9}}, "elasticPolicy": {"minReplicas": 4, "maxReplicas": 2}}),
    );
    assert_eq!(
        faults(&wrong),
        [
            "spec.elasticPolicy.minReplicas of PyTorchJob train: 4 is above maxReplicas, which is 2",
            "spec.runPolicy.schedulingPolicy.minAvailable of PyTorchJob train: 9 are needed, but there are 8 pods only",
        ]
    );
}

#[test]
fn the_roles_of_every_training_job_stand_in_a_field_of_their_own() {
    let fields = [
        (OwnerKind::TfJob, "tfReplicaSpecs"),
        (OwnerKind::MpiJob, "mpiReplicaSpecs"),
        (OwnerKind::XgBoostJob, "xgbReplicaSpecs"),
        (OwnerKind::PaddleJob, "paddleReplicaSpecs"),
        (OwnerKind::JaxJob, "jaxReplicaSpecs"),
    ];
    for (kind, field) in fields {
        assert_eq!(
            sizes(&of(kind, json!({field: {"Worker": {"replicas": 3}}}))),
            (Some(3), Some(3)),
            "{kind:?}"
        );
    }
}

#[test]
fn an_mpi_job_may_make_its_launcher_last() {
    let roles_of = |policy: &str, more: Value| {
        let facts = of(
            OwnerKind::MpiJob,
            json!({
                "launcherCreationPolicy": policy, "runPolicy": more,
                "mpiReplicaSpecs": {"Launcher": {"replicas": 1}, "Worker": {"replicas": 2}},
            }),
        );
        (facts.apart, facts.by_role.len())
    };
    assert_eq!(roles_of("AtStartup", json!({})), (false, 2));
    assert_eq!(roles_of("WaitForWorkersReady", json!({})), (true, 2));
    assert_eq!(
        roles_of(
            "WaitForWorkersReady",
            json!({"schedulingPolicy": {"minAvailable": 2}})
        ),
        (true, 2)
    );
}

#[test]
fn a_ray_cluster_needs_its_head_and_the_fewest_workers_of_each_group() {
    let spec = |scales: bool| {
        json!({"enableInTreeAutoscaling": scales, "headGroupSpec": {}, "workerGroupSpecs": [
            {"groupName": "h100", "replicas": 4, "minReplicas": 2, "maxReplicas": 10, "numOfHosts": 2},
            {"groupName": "cpu", "replicas": 1, "minReplicas": 0, "maxReplicas": 4},
            {"groupName": "off", "replicas": 9, "suspend": true},
        ]})
    };
    let fixed = of(OwnerKind::RayCluster, spec(false));
    assert_eq!(
        (sizes(&fixed), roles(&fixed)),
        ((Some(10), Some(10)), vec![("cpu", 1), ("h100", 8), ("head", 1)])
    );
    let scales = of(OwnerKind::RayCluster, spec(true));
    assert_eq!(
        (sizes(&scales), roles(&scales)),
        ((Some(5), None), vec![("h100", 4), ("head", 1)])
    );
    let wrong = json!({"workerGroupSpecs": [{"groupName": "a", "minReplicas": 3, "maxReplicas": 1}]});
    assert_eq!(
        faults(&of(OwnerKind::RayCluster, wrong)),
        ["spec.workerGroupSpecs[a].minReplicas of RayCluster train: 3 is above maxReplicas, which is 1"]
    );
}

#[test]
fn a_job_says_how_many_pods_run_at_once_and_nothing_of_a_minimum() {
    let facts = of(
        OwnerKind::Job,
        json!({"parallelism": 8, "completions": 20, "completionMode": "Indexed"}),
    );
    assert_eq!(sizes(&facts), (None, Some(8)));
    assert_eq!(sizes(&of(OwnerKind::Job, json!({}))).1, Some(1));
}

#[test]
fn every_kind_has_a_place_in_the_api() {
    for kind in KINDS {
        let api = api(kind);
        assert!(!api.versions.is_empty());
        assert_eq!(api.plural, format!("{}s", api.kind.to_ascii_lowercase()));
    }
}

/// JSON of the fields that are looked at, with anything in them.
fn anything() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0..5_u32).prop_map(Value::from),
        prop::sample::select(vec![
            "",
            "w",
            "InOrder",
            "LeaderReady",
            "rack",
            "WaitForWorkersReady"
        ])
        .prop_map(Value::from),
    ];
    let fields = vec![
        "spec",
        "metadata",
        "name",
        "annotations",
        "minMember",
        "minTaskMember",
        "subGroups",
        "minSubGroup",
        "parent",
        "schedulingPolicy",
        "gang",
        "minCount",
        "podGroups",
        "policy",
        "replicatedJobs",
        "replicas",
        "template",
        "parallelism",
        "completions",
        "dependsOn",
        "startupPolicy",
        "startupPolicyOrder",
        "leaderWorkerTemplate",
        "size",
        "pytorchReplicaSpecs",
        "mpiReplicaSpecs",
        "Worker",
        "elasticPolicy",
        "minReplicas",
        "maxReplicas",
        "runPolicy",
        "minAvailable",
        "workerGroupSpecs",
        "groupName",
        "numOfHosts",
        "networkTopology",
        "subGroupPolicy",
        "launcherCreationPolicy",
    ];
    leaf.prop_recursive(6, 60, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(prop::sample::select(fields.clone()), inner, 0..8).prop_map(|map| {
                Value::Object(
                    map.into_iter()
                        .map(|(name, value)| (name.to_owned(), value))
                        .collect(),
                )
            }),
        ]
    })
}

/// Whether an object with this status says that it is over.
fn is_over(kind: OwnerKind, status: &Value) -> bool {
    let object = json!({"metadata": {"name": "train"}, "spec": {}, "status": status});
    read(kind, "", &object).over
}

/// Whether one says so by a condition.
fn says(kind: OwnerKind, condition: &str, holds: &str) -> bool {
    let before = json!({"type": "Created", "status": "True"});
    is_over(
        kind,
        &json!({"conditions": [before, {"type": condition, "status": holds}]}),
    )
}

#[test]
fn an_owner_that_has_ended_is_over_and_one_that_is_started_anew_is_not() {
    let over = [
        (OwnerKind::Job, "Complete"),
        (OwnerKind::Job, "Failed"),
        (OwnerKind::Job, "SuccessCriteriaMet"),
        (OwnerKind::Job, "FailureTarget"),
        (OwnerKind::JobSet, "Completed"),
        (OwnerKind::JobSet, "Failed"),
        (OwnerKind::TfJob, "Succeeded"),
        (OwnerKind::MpiJob, "Succeeded"),
        (OwnerKind::PyTorchJob, "Failed"),
    ];
    for (kind, condition) in over {
        assert!(says(kind, condition, "True"), "{kind:?} {condition}");
        assert!(!says(kind, condition, "False"), "{kind:?} {condition}");
    }
    let not_over = [
        (OwnerKind::Job, "Suspended"),
        (OwnerKind::JobSet, "StartupPolicyInProgress"),
        (OwnerKind::MpiJob, "Restarting"),
        (OwnerKind::MpiJob, "Running"),
        (OwnerKind::LeaderWorkerSet, "Failed"),
    ];
    for (kind, condition) in not_over {
        assert!(!says(kind, condition, "True"), "{kind:?} {condition}");
    }
    assert!(is_over(
        OwnerKind::VolcanoPodGroup,
        &json!({"phase": "Completed"})
    ));
    assert!(!is_over(OwnerKind::VolcanoPodGroup, &json!({"phase": "Running"})));
    assert!(!is_over(OwnerKind::Job, &json!({"phase": "Completed"})));
    assert!(!is_over(OwnerKind::Job, &json!("Complete")));
}

#[test]
fn a_job_is_suspended_while_its_spec_says_so() {
    let read = |kind, spec: Value| read(kind, "", &json!({"spec": spec})).suspended;
    let runs = [
        OwnerKind::PyTorchJob,
        OwnerKind::TfJob,
        OwnerKind::MpiJob,
        OwnerKind::XgBoostJob,
        OwnerKind::PaddleJob,
        OwnerKind::JaxJob,
    ];
    for kind in runs {
        assert!(read(kind, json!({"runPolicy": {"suspend": true}})), "{kind:?}");
        assert!(!read(kind, json!({"runPolicy": {"suspend": false}})), "{kind:?}");
        assert!(!read(kind, json!({"suspend": true})), "{kind:?}");
    }
    for kind in [OwnerKind::Job, OwnerKind::JobSet, OwnerKind::RayCluster] {
        assert!(read(kind, json!({"suspend": true})), "{kind:?}");
        assert!(!read(kind, json!({"suspend": "yes"})), "{kind:?}");
        assert!(!read(kind, json!({})), "{kind:?}");
    }
    assert!(!read(OwnerKind::LeaderWorkerSet, json!({"suspend": true})));
}

proptest! {
    #[test]
    fn no_object_can_make_the_reader_fail(spec in anything(), object in anything(), part in "w?(/followers)?") {
        for kind in KINDS {
            for object in [&object, &json!({"spec": spec, "status": {"conditions": [object]}})] {
                let facts = read(kind, &part, object);
                prop_assert_eq!(&facts, &read(kind, &part, object));
                prop_assert!(facts.by_role.is_sorted());
                if let (Some(min), Some(total)) = (facts.min, facts.total) {
                    prop_assert!(min <= total || !facts.faults.is_empty());
                }
            }
        }
    }
}
