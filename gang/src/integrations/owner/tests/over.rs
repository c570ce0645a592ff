//! Owners that have ended, or are suspended.

use super::*;

/// Whether an object with this status says that it is over.
fn is_over(kind: OwnerKind, status: &Value) -> bool {
    let object = json!({"metadata": {"name": "train"}, "spec": {}, "status": status});
    read(kind, "", &object).over
}

fn says(kind: OwnerKind, condition: &str, holds: &str) -> bool {
    let before = json!({"type": "Created", "status": "True"});
    is_over(kind, &json!({"conditions": [before, {"type": condition, "status": holds}]}))
}

#[test]
fn owner_is_over_when_ended_and_not_while_restarting() {
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
    // A worker that kubelet evicted makes an MPIJob say so, and its launcher is tried again.
    let failed = json!([{"type": "Failed", "status": "True", "reason": "MPIJobEvicted"}]);
    assert!(!is_over(OwnerKind::MpiJob, &json!({"conditions": failed})));
    let at = json!({"conditions": failed, "completionTime": "2026-01-02T03:04:05Z"});
    assert!(is_over(OwnerKind::MpiJob, &at));
    assert!(is_over(OwnerKind::VolcanoPodGroup, &json!({"phase": "Completed"})));
    assert!(!is_over(OwnerKind::VolcanoPodGroup, &json!({"phase": "Running"})));
    for (phase, over) in [("Completing", true), ("Failed", true), ("Restarting", false), ("Aborted", false)] {
        let status = json!({"state": {"phase": phase}});
        assert_eq!(is_over(OwnerKind::VolcanoJob, &status), over, "{phase}");
        assert!(!is_over(OwnerKind::RayCluster, &status), "{phase}");
    }
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
    // A command resumes it.
    let volcano =
        |phase| super::read(OwnerKind::VolcanoJob, "", &json!({"status": {"state": {"phase": phase}}}));
    assert!(volcano("Aborted").suspended && !volcano("Restarting").suspended);
}
