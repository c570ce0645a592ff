//! Kubeflow's jobs.

use super::*;

#[test]
fn training_job_minimum_is_all_replicas_unless_stated() {
    let spec = |more: Value| {
        let mut spec = json!({"pytorchReplicaSpecs": {"Master": {}, "Worker": {"replicas": 7}}});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        of(OwnerKind::PyTorchJob, spec)
    };
    let all = spec(json!({}));
    assert_eq!((sizes(&all), roles(&all)), ((Some(8), Some(8)), vec![("master", 1), ("worker", 7)]));
    let fewer =
        spec(json!({"runPolicy": {"schedulingPolicy": {"minAvailable": 5, "scheduleTimeoutSeconds": 20}}}));
    assert_eq!((sizes(&fewer), roles(&fewer)), ((Some(5), Some(8)), vec![]));
    assert_eq!(&*fewer.source, "spec.runPolicy.schedulingPolicy.minAvailable");
    assert_eq!(fewer.options.arrival.map(|it| it.time), Some(std::time::Duration::from_secs(20)));
    let elastic = spec(json!({"elasticPolicy": {"minReplicas": 2, "maxReplicas": 10}}));
    assert_eq!((sizes(&elastic), roles(&elastic)), ((Some(2), Some(8)), vec![("master", 1), ("worker", 1)]));
    assert_eq!(elastic.options.max, Some(11));
    let whole = spec(json!({"elasticPolicy": {"minReplicas": 8, "maxReplicas": 8}}));
    assert_eq!((sizes(&whole), roles(&whole)), ((Some(8), Some(8)), vec![("master", 1), ("worker", 7)]));
    let lofty = spec(json!({"elasticPolicy": {"minReplicas": 9}}));
    assert_eq!(sizes(&lofty), (Some(8), Some(8)));
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
fn training_job_roles_are_read_from_the_field_of_each_kind() {
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
    assert_eq!(roles_of("WaitForWorkersReady", json!({"schedulingPolicy": {"minAvailable": 2}})), (true, 2));
}
