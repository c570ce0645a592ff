//! What is read of each kind of object.

mod groups;
mod over;
mod training;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{api, read};
use crate::membership::{OwnerFacts, OwnerKind};
use crate::terms::TopologyRequest;

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
    for kind in OwnerKind::ALL {
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
    facts.by_role.iter().map(|(role, count)| (&**role, *count)).collect()
}

fn faults(facts: &OwnerFacts) -> Vec<String> {
    facts.faults.iter().map(ToString::to_string).collect()
}

fn level(name: &str, required: bool) -> Option<TopologyRequest> {
    Some(TopologyRequest { level: name.into(), required })
}

#[test]
fn leader_worker_set_leader_ready_makes_two_gangs_per_group() {
    // Workers that wait for a ready leader cannot be in one gang with it.
    let spec =
        |policy: &str| json!({"replicas": 3, "startupPolicy": policy, "leaderWorkerTemplate": {"size": 4}});
    let at_once = of(OwnerKind::LeaderWorkerSet, spec("LeaderCreated"));
    assert_eq!((sizes(&at_once), at_once.apart), ((Some(4), Some(4)), false));
    let apart = of(OwnerKind::LeaderWorkerSet, spec("LeaderReady"));
    assert_eq!((roles(&apart), apart.apart), (vec![("leader", 1), ("worker", 3)], true));
    assert_eq!(sizes(&of(OwnerKind::LeaderWorkerSet, json!({}))), (Some(1), Some(1)));
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
        job_set(json!({"startupPolicy": {"startupPolicyOrder": "AnyOrder"}}), json!({})),
    );
    assert_eq!((sizes(&facts), facts.apart), ((Some(9), Some(9)), false));
    assert_eq!(roles(&facts), [("driver", 1), ("workers", 8)]);
    let fewer = of(
        OwnerKind::JobSet,
        json!({"replicatedJobs": [
            {"name": "w", "template": {"spec": {"parallelism": 8, "completions": 3}}},
        ]}),
    );
    assert_eq!(sizes(&fewer), (Some(3), Some(3)), "no more run at once than have to run");
}

#[test]
fn job_set_started_in_order_has_one_gang_per_replicated_job() {
    let in_order = job_set(json!({"startupPolicy": {"startupPolicyOrder": "InOrder"}}), json!({}));
    let depends = job_set(json!({}), json!({"dependsOn": [{"name": "driver", "status": "Ready"}]}));
    for spec in [in_order, depends] {
        let facts = of(OwnerKind::JobSet, spec);
        assert_eq!((facts.apart, roles(&facts)), (true, vec![("driver", 1), ("workers", 8)]));
    }
}

#[test]
fn the_followers_of_a_replicated_job_are_all_but_the_leaders() {
    let facts = part_of(OwnerKind::JobSet, "workers/followers", job_set(json!({}), json!({})));
    assert_eq!((sizes(&facts), facts.apart), ((Some(6), Some(6)), false));
    let unknown = part_of(OwnerKind::JobSet, "worker/followers", job_set(json!({}), json!({})));
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
        read(OwnerKind::Job, "", &object).options.level
    };
    assert_eq!(annotated("kai.scheduler/topology-required-placement"), level("rack", true));
    assert_eq!(annotated("kai.scheduler/topology-preferred-placement"), level("rack", false));
}

#[test]
fn ray_cluster_minimum_is_head_plus_fewest_workers_per_group() {
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
    assert_eq!((sizes(&scales), roles(&scales)), ((Some(5), None), vec![("h100", 4), ("head", 1)]));
    let wrong = json!({"workerGroupSpecs": [{"groupName": "a", "minReplicas": 3, "maxReplicas": 1}]});
    assert_eq!(
        faults(&of(OwnerKind::RayCluster, wrong)),
        ["spec.workerGroupSpecs[a].minReplicas of RayCluster train: 3 is above maxReplicas, which is 1"]
    );
}

#[test]
fn volcano_job_is_as_large_as_its_tasks() {
    let tasks = json!([{"name": "ps", "replicas": 1}, {"name": "worker", "replicas": 3}]);
    let facts = of(OwnerKind::VolcanoJob, json!({"minAvailable": 2, "tasks": tasks}));
    assert_eq!((sizes(&facts), facts.wanted), ((Some(2), Some(4)), Some(4)));
    let facts = of(OwnerKind::VolcanoJob, json!({"tasks": tasks}));
    assert_eq!(sizes(&facts), (Some(4), Some(4)));
    let wrong = of(OwnerKind::VolcanoJob, json!({"tasks": [{"name": "a", "replicas": "two"}]}));
    let expected =
        "spec.tasks[a].replicas of Job train: \"two\" is a text: a whole number from 0 on is asked for";
    assert_eq!(faults(&wrong), [expected]);
}

#[test]
fn job_parallelism_gives_the_total_and_no_minimum() {
    let facts = of(OwnerKind::Job, json!({"parallelism": 8, "completions": 20, "completionMode": "Indexed"}));
    assert_eq!(sizes(&facts), (None, Some(8)));
    assert_eq!(sizes(&of(OwnerKind::Job, json!({}))).1, Some(1));
}

#[test]
fn every_kind_has_a_place_in_the_api() {
    for kind in OwnerKind::ALL {
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
        prop::sample::select(vec!["", "w", "InOrder", "LeaderReady", "rack", "WaitForWorkersReady"])
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
        "disruptionMode",
        "schedulingConstraints",
        "topology",
        "parentCompositePodGroupName",
    ];
    leaf.prop_recursive(6, 60, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(prop::sample::select(fields.clone()), inner, 0..8).prop_map(|map| {
                Value::Object(map.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
            }),
        ]
    })
}

proptest! {
    #[test]
    fn no_object_can_make_the_reader_fail(spec in anything(), object in anything(), part in "w?(/followers)?") {
        for kind in OwnerKind::ALL {
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
