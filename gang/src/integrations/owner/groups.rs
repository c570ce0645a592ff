//! PodGroups and Workloads: objects that exist to state how large a gang is.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::{Sheet, sum};
use crate::integrations::value::{MOST_MEMBERS, arrival, number, short, shown, unknown};
use crate::membership::{Disruption, SubGroups};

/// Topology constraints that are read of a PodGroup. Kubernetes 1.37 allows one.
const MOST_LEVELS: usize = 8;

/// Kubernetes' PodGroup. A basic one is no gang: each pod goes by itself.
pub(super) fn pod_group(sheet: &mut Sheet<'_>) {
    policy(sheet, "spec.schedulingPolicy", sheet.spec("schedulingPolicy"), "minCount");
    native(sheet);
}

/// Kubernetes' CompositePodGroup. A basic one needs one of its groups, as a gang with `minGroupCount: 1` does.
pub(super) fn composite_pod_group(sheet: &mut Sheet<'_>) {
    policy(sheet, "spec.schedulingPolicy", sheet.spec("schedulingPolicy"), "minGroupCount");
    sheet.facts.singles = false;
    if sheet.facts.min.is_none() && sheet.facts.faults.is_empty() {
        let words = "it is neither gang nor basic: one of them is asked for";
        sheet.wrong("spec.schedulingPolicy", words);
    }
    native(sheet);
}

/// What both kinds of group have.
fn native(sheet: &mut Sheet<'_>) {
    sheet.facts.never_preempts = sheet.text("preemptionPolicy") == Some("Never");
    sheet.facts.disruption = disruption(sheet);
    sheet.facts.scheduled_whole = conditions(sheet.object).next().is_some();
    sheet.facts.unscheduled = unscheduled(sheet.object);
    sheet.facts.parent = sheet.text("parentCompositePodGroupName").map(|name| short(name).into());
    topology(sheet);
}

/// The topology constraints of a PodGroup, each of which has to hold.
fn topology(sheet: &mut Sheet<'_>) {
    const PLACE: &str = "spec.schedulingConstraints.topology";
    let constraints = sheet.spec("schedulingConstraints.topology").and_then(Value::as_array);
    let Some(constraints) = constraints.filter(|all| !all.is_empty()) else {
        return;
    };
    if constraints.len() > MOST_LEVELS {
        let words = format!("{} constraints are too many: at most {MOST_LEVELS} are read", constraints.len());
        return sheet.wrong(PLACE, words);
    }
    let key = |constraint: &Value| constraint.get("key").and_then(Value::as_str).map(Arc::from);
    let keys: Option<Vec<Arc<str>>> = constraints.iter().map(key).collect();
    match keys.as_deref() {
        Some([key]) => sheet.level(&format!("{PLACE}[0].key"), key, true),
        Some(keys) => {
            sheet.facts.level_source = format!("{PLACE} of {}", sheet.name).into();
            sheet.facts.levels = keys.to_vec();
        }
        None => sheet.wrong(PLACE, "a constraint has no key, or one that is no text"),
    }
}

/// How the pods of a PodGroup may be evicted: a word in `v1alpha2`, later the only field of an object. Single is the default of the API.
fn disruption(sheet: &mut Sheet<'_>) -> Option<Disruption> {
    const MODES: [(&str, Disruption); 4] = [
        ("single", Disruption::Single),
        ("all", Disruption::All),
        ("Pod", Disruption::Single),
        ("PodGroup", Disruption::All),
    ];
    let known = |name: &str| MODES.iter().find(|(known, _)| *known == name).map(|(_, mode)| *mode);
    let (names, known_names): (Vec<&str>, _) = match sheet.spec("disruptionMode") {
        None => return Some(Disruption::Single),
        Some(Value::String(name)) => (vec![name], ["Pod", "PodGroup"]),
        Some(Value::Object(fields)) => {
            let set = fields.iter().filter(|(_, value)| !value.is_null());
            (set.map(|(name, _)| name.as_str()).collect(), ["single", "all"])
        }
        Some(_) => (Vec::new(), ["single", "all"]),
    };
    let words = match names.as_slice() {
        [name] => match known(name).filter(|_| known_names.contains(name)) {
            Some(mode) => return Some(mode),
            None => unknown(&format!("mode {}", shown(name)), name, &known_names),
        },
        _ => format!("exactly one of {} is asked for", known_names.join(" and ")),
    };
    sheet.wrong("spec.disruptionMode", words);
    None
}

/// kube-scheduler's condition on a PodGroup, in Kubernetes 1.37 and in 1.36, and on a CompositePodGroup.
const SCHEDULED: [&str; 3] =
    ["PodGroupInitiallyScheduled", "PodGroupScheduled", "CompositePodGroupInitiallyScheduled"];

/// kube-scheduler's conditions on a group. Without the PodGroup cycle it writes none.
fn conditions(object: &Value) -> impl Iterator<Item = &Value> {
    let conditions = object.pointer("/status/conditions").and_then(Value::as_array);
    let kind = |condition: &Value| Some(condition.get("type")?.as_str()?.to_owned());
    let is_ours = move |condition: &&Value| kind(condition).is_some_and(|kind| SCHEDULED.contains(&&*kind));
    conditions.into_iter().flatten().filter(is_ours)
}

/// Why kube-scheduler does not schedule a group as a whole: its condition on the PodGroup.
fn unscheduled(object: &Value) -> Option<Arc<str>> {
    let field = |condition: &Value, name: &str| Some(condition.get(name)?.as_str()?.to_owned());
    let found = conditions(object)
        .find(|condition| condition.get("status").and_then(Value::as_str) == Some("False"))?;
    Some(field(found, "message").or_else(|| field(found, "reason"))?.into())
}

/// A group of a Workload of Kubernetes 1.35.
pub(super) fn workload(sheet: &mut Sheet<'_>, part: &str) {
    let groups = sheet.spec("podGroups").and_then(Value::as_array);
    let groups: Vec<(&str, &Value)> = groups
        .into_iter()
        .flatten()
        .filter_map(|group| Some((group.get("name")?.as_str()?, group)))
        .collect();
    match groups.iter().find(|(name, _)| *name == part) {
        Some((_, group)) => {
            let place = format!("spec.podGroups[{part}].policy");
            policy(sheet, &place, group.get("policy"), "minCount");
        }
        None => {
            let names: Vec<&str> = groups.iter().map(|(name, _)| *name).collect();
            let words = unknown(&format!("group {part}, which its pods name"), part, &names);
            sheet.wrong("spec.podGroups", words);
        }
    }
}

/// The policy at `place`: a gang's minimum is its field `count`.
fn policy(sheet: &mut Sheet<'_>, place: &str, policy: Option<&Value>, count: &str) {
    let has = |name: &str| policy.and_then(|policy| policy.get(name)).filter(|value| !value.is_null());
    match (has("gang"), has("basic")) {
        (Some(_), Some(_)) => {
            let field = place.rsplit('.').next().unwrap_or(place);
            sheet.wrong(place, format!("{field} is both gang and basic: it is one of them"));
        }
        (Some(gang), None) => {
            let place = format!("{place}.gang.{count}");
            let min = sheet.number(&place, gang.get(count), 1);
            sheet.min(min, &place);
        }
        (None, Some(_)) => {
            sheet.facts.singles = true;
            sheet.min(Some(1), &format!("{place}.basic"));
        }
        (None, None) => {}
    }
}

/// The PodGroup of the coscheduling plugin, and Koordinator's, which has more in annotations.
pub(super) fn coscheduling(sheet: &mut Sheet<'_>) {
    members(sheet);
    let seconds = sheet.count("scheduleTimeoutSeconds", 0);
    let source = "spec.scheduleTimeoutSeconds";
    sheet.facts.options.arrival =
        seconds.and_then(|seconds| arrival(Duration::from_secs(seconds.into()), source));
    let total = sheet
        .object
        .pointer("/metadata/annotations")
        .and_then(|annotations| annotations.get("gang.scheduling.koordinator.sh/total-number")?.as_str());
    if let Some(total) = total {
        let place = format!("annotation gang.scheduling.koordinator.sh/total-number of {}", sheet.name);
        match number(place, total, 1..=MOST_MEMBERS) {
            Ok(total) => sheet.facts.total = Some(total),
            Err(wrong) => sheet.facts.faults.push(wrong),
        }
    }
}

/// `spec.minMember`, where 0 and nothing mean that each pod goes by itself.
fn members(sheet: &mut Sheet<'_>) {
    let field = sheet.spec("minMember").is_some();
    let min = sheet.count("minMember", 0);
    // A number that cannot be read is a fault already, and no 1.
    let min = if field { min.map(|min| min.max(1)) } else { Some(1) };
    sheet.min(min, "spec.minMember");
}

/// Volcano's PodGroup. Its tiers are numbers of its own objects and mean nothing to us; their names may.
pub(super) fn volcano(sheet: &mut Sheet<'_>) {
    members(sheet);
    sub_groups(sheet);
    let tasks = sheet.spec("minTaskMember").and_then(Value::as_object);
    let mut by_role = Vec::new();
    for (task, count) in tasks.into_iter().flatten() {
        if let Some(count) = sheet.number(&format!("spec.minTaskMember[{task}]"), Some(count), 0) {
            by_role.push((Arc::from(task.as_str()), count));
        }
    }
    // Volcano itself looks at the tasks' minimums only where they do not go beyond the whole's.
    if sheet.facts.min.is_some_and(|min| sum(&by_role) <= min) {
        sheet.facts.by_role = by_role;
    }
    if let Some(topology) = sheet.spec("networkTopology")
        && let Some((name, hard)) = tier(topology)
    {
        sheet.level("spec.networkTopology.highestTierName", name, hard);
    }
    let parts = sheet.spec("subGroupPolicy").and_then(Value::as_array);
    if let (None, Some([part])) = (&sheet.facts.options.level, parts.map(Vec::as_slice)) {
        let policy = "spec.subGroupPolicy[0]";
        let size = part.get("subGroupSize").and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok());
        if let Some((name, hard)) = part.get("networkTopology").and_then(tier) {
            sheet.level(&format!("{policy}.networkTopology.highestTierName"), name, hard);
            sheet.facts.options.slice = size.filter(|size| *size > 1);
        }
    }
}

/// The sub-groups that Volcano needs, where they are more members than `spec.minMember`: no fewer run.
fn sub_groups(sheet: &mut Sheet<'_>) {
    let policies = sheet.spec("subGroupPolicy").and_then(Value::as_array);
    let mut needed = 0_u32;
    for (number, policy) in policies.into_iter().flatten().enumerate() {
        let mut count = |field: &str, least| {
            let place = format!("spec.subGroupPolicy[{number}].{field}");
            sheet.number(&place, policy.get(field), least)
        };
        let (size, groups) = (count("subGroupSize", 1), count("minSubGroups", 0));
        if let (Some(size), Some(groups)) = (size, groups) {
            needed = needed.saturating_add(size.saturating_mul(groups));
        }
    }
    if sheet.facts.min.is_some_and(|min| min < needed) {
        sheet.min(Some(needed), "spec.subGroupPolicy");
    }
}

/// The tier that a topology of Volcano names, and whether it must hold.
fn tier(topology: &Value) -> Option<(&str, bool)> {
    let name = topology.get("highestTierName")?.as_str()?;
    let hard = topology.get("mode").and_then(Value::as_str) != Some("soft");
    (!name.is_empty()).then_some((name, hard))
}

/// Grove's PodGang: as many pods of each PodClique as it needs. Those that a scaling group adds are PodGangs of their own.
pub(super) fn grove(sheet: &mut Sheet<'_>) {
    let groups = sheet.spec("podgroups").and_then(Value::as_array);
    for group in groups.into_iter().flatten() {
        let name = group.get("name").and_then(Value::as_str).unwrap_or_default();
        let place = format!("spec.podgroups[{name}].minReplicas");
        if let Some(min) = sheet.number(&place, group.get("minReplicas"), 0) {
            sheet.facts.by_role.push((Arc::from(name), min));
        }
    }
    if !sheet.facts.by_role.is_empty() {
        let min = sum(&sheet.facts.by_role);
        sheet.min(Some(min.max(1)), "spec.podgroups[].minReplicas");
    }
    for (field, required) in [("required", true), ("preferred", false)] {
        let path = format!("topologyConstraint.packConstraint.{field}");
        if let Some(name) = sheet.text(&path) {
            sheet.level(&format!("spec.{path}"), name, required);
            return;
        }
    }
}

/// KAI's PodGroup. Its sub-groups may be a tree; the leaves have pods.
pub(super) fn kai(sheet: &mut Sheet<'_>) {
    let groups = sheet.spec("subGroups").and_then(Value::as_array);
    let groups: Vec<&Value> = groups.into_iter().flatten().collect();
    let text = |group: &Value, field: &str| group.get(field).and_then(Value::as_str).map(str::to_owned);
    let parents: Vec<String> = groups.iter().filter_map(|group| text(group, "parent")).collect();
    let mut names: Vec<Arc<str>> = Vec::new();
    for group in &groups {
        let name = text(group, "name").unwrap_or_default();
        if parents.contains(&name) {
            continue;
        }
        let place = format!("spec.subGroups[{name}].minMember");
        let name: Arc<str> = name.into();
        if let Some(min) = sheet.number(&place, group.get("minMember"), 0) {
            sheet.facts.by_role.push((Arc::clone(&name), min));
        }
        names.push(name);
    }
    names.sort_unstable();
    sheet.facts.sub_groups =
        Some(SubGroups { source: format!("spec.subGroups of {}", sheet.name).into(), names });
    let of_groups = sum(&sheet.facts.by_role);
    let by_groups = sheet.spec("minSubGroup").is_some();
    let min = sheet.count("minMember", 0);
    // KAI's own webhook refuses that, where it is there.
    if by_groups && min.is_some_and(|min| min > 0) {
        let words =
            "minSubGroup is given too: so many pods are needed, or so many sub-groups; remove one of the two";
        sheet.wrong("spec.minMember", words);
    }
    if let Some(min) = min.filter(|_| !by_groups) {
        // KAI reads only those of the sub-groups. The larger of the two numbers holds.
        let source = if of_groups > min { "spec.subGroups" } else { "spec.minMember" };
        sheet.min(Some(min.max(of_groups).max(1)), source);
    } else if by_groups {
        // So many of them, whichever: no more than the smallest is sure to be needed of each, and none by name.
        let wanted = sheet.count("minSubGroup", 1).unwrap_or(u32::MAX);
        let mut counts: Vec<u32> = sheet.facts.by_role.iter().map(|(_, count)| *count).collect();
        counts.sort_unstable();
        let fewest = counts.iter().zip(0..wanted).fold(0_u32, |sum, (count, _)| sum.saturating_add(*count));
        if (counts.len() as u64) > u64::from(wanted) {
            sheet.facts.by_role.clear();
        }
        sheet.min(Some(fewest.max(1)), "spec.minSubGroup");
    } else if of_groups > 0 {
        sheet.min(Some(of_groups), "spec.subGroups");
    } else {
        sheet.min(Some(1), "spec.minMember");
    }
    for (field, required) in [("requiredTopologyLevel", true), ("preferredTopologyLevel", false)] {
        let path = format!("topologyConstraint.{field}");
        if let Some(name) = sheet.text(&path) {
            sheet.level(&format!("spec.{path}"), name, required);
            return;
        }
    }
}
