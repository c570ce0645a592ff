//! Kubeflow's training jobs: roles with replicas, a minimum for the scheduler, and for some an elastic number of workers.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::{Sheet, sum};
use crate::integrations::value::arrival;

const WORKER: &str = "worker";

/// A job with its roles in `field` of its spec.
pub(super) fn job(sheet: &mut Sheet<'_>, field: &str) {
    let roles = sheet.spec(field).and_then(Value::as_object);
    let mut by_role: Vec<(Arc<str>, u32)> = Vec::new();
    for (role, spec) in roles.into_iter().flatten() {
        let place = format!("spec.{field}[{role}].replicas");
        let replicas = sheet.number(&place, spec.get("replicas"), 0).unwrap_or(1);
        by_role.push((role.to_ascii_lowercase().into(), replicas));
    }
    let total = sum(&by_role);
    sheet.facts.total = Some(total);
    let seconds = sheet.count("runPolicy.schedulingPolicy.scheduleTimeoutSeconds", 0);
    let source = "spec.runPolicy.schedulingPolicy.scheduleTimeoutSeconds";
    sheet.facts.options.arrival =
        seconds.and_then(|seconds| arrival(Duration::from_secs(seconds.into()), source));
    let (fewest, most) = elastic(sheet);
    let workers = by_role.iter_mut().find(|(role, _)| &**role == WORKER);
    let mut source = format!("spec.{field}");
    if let Some((_, workers)) = workers {
        let others = total.saturating_sub(*workers);
        sheet.facts.options.max = most.map(|most| others.saturating_add(most));
        if let Some(fewest) = fewest {
            // It counts nodes, the master among them: the operator passes it to torchrun (`PET_NNODES`).
            *workers = fewest.saturating_sub(others).min(*workers);
            source = "spec.elasticPolicy.minReplicas".to_owned();
        }
    }
    let needed = sum(&by_role);
    let minimum = "runPolicy.schedulingPolicy.minAvailable";
    match sheet.count(minimum, 1) {
        Some(min) => {
            // Which roles it is made up of is not declared, unless it is all of them.
            if min >= needed {
                sheet.facts.by_role = by_role;
            }
            sheet.min(Some(min), &format!("spec.{minimum}"));
        }
        None => {
            sheet.facts.by_role = by_role;
            sheet.min(Some(needed), &source);
        }
    }
}

/// Fewest members and most workers of an elastic job: the operator passes the one to torchrun, and scales workers up to the other.
fn elastic(sheet: &mut Sheet<'_>) -> (Option<u32>, Option<u32>) {
    let fewest = sheet.count("elasticPolicy.minReplicas", 0);
    let most = sheet.count("elasticPolicy.maxReplicas", 0);
    if let (Some(fewest), Some(most)) = (fewest, most)
        && fewest > most
    {
        let place = "spec.elasticPolicy.minReplicas";
        sheet.wrong(place, format!("{fewest} is above maxReplicas, which is {most}"));
        return (None, None);
    }
    (fewest, most)
}

/// An MPIJob. Its launcher may be created only when the workers are ready.
pub(super) fn mpi_job(sheet: &mut Sheet<'_>) {
    job(sheet, "mpiReplicaSpecs");
    let waits = sheet.text("launcherCreationPolicy") == Some("WaitForWorkersReady");
    if waits && sheet.facts.by_role.is_empty() {
        // A minimum for all of them cannot be reached by either alone: each role is needed whole.
        let roles = sheet.spec("mpiReplicaSpecs").and_then(Value::as_object);
        for (role, spec) in roles.into_iter().flatten() {
            let place = format!("spec.mpiReplicaSpecs[{role}].replicas");
            let replicas = sheet.number(&place, spec.get("replicas"), 0).unwrap_or(1);
            sheet.facts.by_role.push((role.to_ascii_lowercase().into(), replicas));
        }
    }
    sheet.facts.apart = waits;
}
