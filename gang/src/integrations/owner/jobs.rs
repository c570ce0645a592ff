//! LeaderWorkerSets, JobSets, Ray clusters, batch Jobs and those of Volcano: as many pods as they make.

use std::sync::Arc;

use serde_json::Value;

use super::{Sheet, sum};
use crate::integrations::controllers::{BY_SELECTOR, FOLLOWERS, HEAD, JOBSET_EXCLUSIVE, LEADER, WORKERS};
use crate::integrations::value::unknown;
use crate::membership::Ranks;

/// A group of a LeaderWorkerSet.
pub(super) fn leader_worker_set(sheet: &mut Sheet<'_>) {
    let size = sheet.count("leaderWorkerTemplate.size", 1).unwrap_or(1);
    sheet.facts.by_role = vec![(LEADER.into(), 1), (WORKERS.into(), size - 1)];
    sheet.facts.total = Some(size);
    sheet.min(Some(size), "spec.leaderWorkerTemplate.size");
    // The workers are made when the leader is ready, and so cannot wait for each other.
    sheet.facts.apart = sheet.text("startupPolicy") == Some("LeaderReady");
    // Each group is a gang of its own.
    sheet.facts.groups = Some(sheet.count("replicas", 0).unwrap_or(1));
}

/// A batch Job: it states how many pods run at once, but not how many are needed.
pub(super) fn job(sheet: &mut Sheet<'_>) {
    let running = at_once(sheet, "spec", sheet.object.get("spec"));
    let failed = sheet.object.pointer("/status/failedIndexes").and_then(Value::as_str);
    sheet.facts.failed_ranks = failed.map(Ranks::read).unwrap_or_default();
    // An index that has failed for good (`backoffLimitPerIndex`) has no pod again.
    let completions = sheet.spec("completions").and_then(Value::as_u64);
    let left = completions
        .and_then(|all| u32::try_from(all).ok())
        .map_or(u32::MAX, |all| all.saturating_sub(sheet.facts.failed_ranks.count()));
    sheet.facts.total = Some(running);
    sheet.facts.wanted = Some(running.min(left));
    sheet.facts.source = "spec.parallelism".into();
}

/// A Job of Volcano: as many pods as its tasks have, of which `minAvailable` are needed, by default all.
pub(super) fn volcano_job(sheet: &mut Sheet<'_>) {
    let tasks = sheet.spec("tasks").and_then(Value::as_array);
    let mut by_role = Vec::new();
    for task in tasks.into_iter().flatten() {
        let name = task.get("name").and_then(Value::as_str).unwrap_or_default();
        let place = format!("spec.tasks[{name}].replicas");
        by_role.push((name.into(), sheet.number(&place, task.get("replicas"), 0).unwrap_or(1)));
    }
    let total = sum(&by_role);
    sheet.facts.total = Some(total);
    let least = sheet.count("minAvailable", 0).filter(|least| *least > 0);
    sheet.min(least.or(Some(total)), "spec.minAvailable");
}

/// Pods of a Job that run at once.
fn at_once(sheet: &mut Sheet<'_>, place: &str, spec: Option<&Value>) -> u32 {
    let field = |name: &str| spec.and_then(|spec| spec.get(name));
    let parallelism = sheet.number(&format!("{place}.parallelism"), field("parallelism"), 0);
    let completions = sheet.number(&format!("{place}.completions"), field("completions"), 0);
    parallelism.unwrap_or(1).min(completions.unwrap_or(u32::MAX))
}

/// All of a JobSet, or the followers of one of its replicated jobs.
pub(super) fn job_set(sheet: &mut Sheet<'_>, part: &str) {
    let jobs = sheet.spec("replicatedJobs").and_then(Value::as_array);
    let exclusive = |annotations: Option<&Value>| {
        annotations.is_some_and(|all| all.get(JOBSET_EXCLUSIVE).is_some() && all.get(BY_SELECTOR).is_none())
    };
    let mut apart = exclusive(sheet.object.pointer("/metadata/annotations"));
    let mut followers = Vec::new();
    for job in jobs.into_iter().flatten() {
        let name = job.get("name").and_then(Value::as_str).unwrap_or_default();
        let place = format!("spec.replicatedJobs[{name}]");
        let replicas = sheet.number(&format!("{place}.replicas"), job.get("replicas"), 0).unwrap_or(1);
        let each = at_once(sheet, &format!("{place}.template.spec"), job.pointer("/template/spec"));
        let role: Arc<str> = name.into();
        sheet.facts.by_role.push((role.clone(), replicas.saturating_mul(each)));
        followers.push((role, replicas.saturating_mul(each.saturating_sub(1))));
        let waits = job.get("dependsOn").and_then(Value::as_array);
        apart |= waits.is_some_and(|waits| !waits.is_empty());
        apart |= exclusive(job.pointer("/template/metadata/annotations"));
    }
    let all = "spec.replicatedJobs";
    if let Some(role) = part.strip_suffix(FOLLOWERS) {
        sheet.facts.by_role.clear();
        let found = followers.iter().find(|(name, _)| **name == *role).map(|(_, count)| *count);
        if found.is_none() {
            let names: Vec<&str> = followers.iter().map(|(name, _)| &**name).collect();
            let words = unknown(&format!("replicated job {role}, which its pods name"), role, &names);
            sheet.wrong(all, words);
        }
        sheet.facts.total = found;
        sheet.min(found, &format!("{all}[{role}]"));
        return;
    }
    apart |= sheet.text("startupPolicy.startupPolicyOrder") == Some("InOrder");
    let total = sum(&sheet.facts.by_role);
    sheet.facts.apart = apart && sheet.facts.by_role.len() > 1;
    sheet.facts.total = Some(total);
    sheet.min(Some(total), all);
}

/// A Ray cluster: its head and the fewest workers of each group.
pub(super) fn ray_cluster(sheet: &mut Sheet<'_>) {
    let scales = sheet.spec("enableInTreeAutoscaling").and_then(Value::as_bool) == Some(true);
    let groups = sheet.spec("workerGroupSpecs").and_then(Value::as_array);
    let mut by_role = vec![(Arc::from(HEAD), 1)];
    let mut wanted = 1_u32;
    for group in groups.into_iter().flatten() {
        let name = group.get("groupName").and_then(Value::as_str).unwrap_or_default();
        let mut field = |field: &str| {
            let place = format!("spec.workerGroupSpecs[{name}].{field}");
            sheet.number(&place, group.get(field), 0)
        };
        let (fewest, most) = (field("minReplicas").unwrap_or(0), field("maxReplicas").unwrap_or(u32::MAX));
        let (replicas, hosts) =
            (field("replicas").unwrap_or(fewest), field("numOfHosts").unwrap_or(1).max(1));
        if fewest > most {
            let place = format!("spec.workerGroupSpecs[{name}].minReplicas");
            sheet.wrong(&place, format!("{fewest} is above maxReplicas, which is {most}"));
            continue;
        }
        if group.get("suspend").and_then(Value::as_bool) == Some(true) {
            continue;
        }
        let asked = replicas.clamp(fewest, most);
        wanted = wanted.saturating_add(asked.saturating_mul(hosts));
        let needed = if scales { fewest } else { asked };
        by_role.push((Arc::from(name), needed.saturating_mul(hosts)));
    }
    let needed = sum(&by_role);
    sheet.facts.by_role = by_role;
    sheet.facts.wanted = Some(wanted);
    sheet.facts.total = (!scales).then_some(needed);
    let field = if scales { "minReplicas" } else { "replicas" };
    sheet.min(Some(needed), &format!("spec.workerGroupSpecs[].{field}"));
}
