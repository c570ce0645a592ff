//! Groups that a person names on the pods, for a scheduler of another project: coscheduling, Volcano, Koordinator, Kueue, KAI.

use std::time::Duration;

use super::own::OwnAnnotations;
use super::value::{self, fault, shown};
use super::{FoundMembership, PodView, rank};
use crate::key::Integration;
use crate::membership::{OwnerKind, Size, TopologyHint};

/// Label of the coscheduling plugin.
const COSCHEDULING: &str = "scheduling.x-k8s.io/pod-group";
/// The same in its first versions, and in Koordinator: it names a PodGroup of scheduling.sigs.k8s.io.
pub(super) const COSCHEDULING_OLD: &str = "pod-group.scheduling.sigs.k8s.io";
/// Labels of its very first version, which knew no PodGroup object. Others (RoleBasedGroup) name one of scheduling.x-k8s.io by the first
/// alone.
const COSCHEDULING_NAME: &str = "pod-group.scheduling.sigs.k8s.io/name";
const COSCHEDULING_MIN: &str = "pod-group.scheduling.sigs.k8s.io/min-available";

/// The coscheduling plugin of scheduler-plugins.
pub(super) fn coscheduling<'a>(pod: &PodView<'a>, _: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    let named = |label| pod.label(label).filter(|name| !name.is_empty());
    let by = |label, kind| Some((label, named(label)?, kind));
    let group = by(COSCHEDULING, OwnerKind::CoschedulingPodGroup)
        .or_else(|| by(COSCHEDULING_OLD, OwnerKind::KoordinatorPodGroup));
    if let Some((label, name, kind)) = group {
        let place = format!("label {label}");
        return Some(FoundMembership::of_object(pod, Integration::Coscheduling, kind, &place, name));
    }
    let name = named(COSCHEDULING_NAME)?;
    let place = format!("label {COSCHEDULING_NAME}");
    if pod.label(COSCHEDULING_MIN).is_none() {
        let kind = OwnerKind::CoschedulingPodGroup;
        return Some(FoundMembership::of_object(pod, Integration::Coscheduling, kind, &place, name));
    }
    let mut found = FoundMembership::named(Integration::Coscheduling, &place, name);
    found.states("label pod-group.scheduling.sigs.k8s.io/min-available", pod.label(COSCHEDULING_MIN));
    Some(found)
}

const VOLCANO: &str = "scheduling.volcano.sh/group-name";
const VOLCANO_OLD: &str = "scheduling.k8s.io/group-name";
const VOLCANO_MIN: &str = "scheduling.volcano.sh/group-min-member";

/// Volcano. Its Jobs name their PodGroup after themselves and their UID, so a recreated Job is another gang.
pub(super) fn volcano<'a>(pod: &PodView<'a>, _: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    let named = |annotation| pod.annotation(annotation).filter(|name| !name.is_empty());
    let by = |annotation| Some((annotation, named(annotation)?));
    let (place, name) = by(VOLCANO).or_else(|| by(VOLCANO_OLD))?;
    let place = format!("annotation {place}");
    let mut found =
        FoundMembership::of_object(pod, Integration::Volcano, OwnerKind::VolcanoPodGroup, &place, name);
    found.states("annotation scheduling.volcano.sh/group-min-member", pod.annotation(VOLCANO_MIN));
    found.role = found.word("annotation volcano.sh/task-spec", pod.annotation("volcano.sh/task-spec"));
    found.rank =
        rank::index(pod.annotation("volcano.sh/task-index").or_else(|| pod.label("volcano.sh/task-index")));
    Some(found)
}

const KOORDINATOR: &str = "gang.scheduling.koordinator.sh/name";
const KOORDINATOR_MIN: &str = "gang.scheduling.koordinator.sh/min-available";
const KOORDINATOR_TOTAL: &str = "gang.scheduling.koordinator.sh/total-number";
const KOORDINATOR_WAIT: &str = "gang.scheduling.koordinator.sh/waiting-time";

/// Koordinator's annotations. Its mode, groups and match policy are not followed: docs/gangs-recognition.md states what
/// holds instead.
pub(super) fn koordinator<'a>(pod: &PodView<'a>, _: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    let name = pod.annotation(KOORDINATOR).filter(|name| !name.is_empty())?;
    let mut found =
        FoundMembership::named(Integration::Koordinator, &format!("annotation {KOORDINATOR}"), name);
    found.states("annotation gang.scheduling.koordinator.sh/min-available", pod.annotation(KOORDINATOR_MIN));
    let stated = pod.annotation(KOORDINATOR_TOTAL);
    let stated = found.read(&format!("annotation {KOORDINATOR_TOTAL}"), stated);
    if let Size::Stated { total, .. } = &mut found.size {
        *total = stated;
    }
    if let Some(text) = pod.annotation(KOORDINATOR_WAIT) {
        match duration(text) {
            Some(wait) => {
                found.options.arrival =
                    value::arrival(wait, "annotation gang.scheduling.koordinator.sh/waiting-time");
            }
            None => found.faults.push(fault(
                format!("annotation {KOORDINATOR_WAIT}"),
                format!("{} is no time such as 90s, 5m or 1h30m", shown(text)),
            )),
        }
    }
    Some(found)
}

const KUEUE: &str = "kueue.x-k8s.io/pod-group-name";
const KUEUE_TOTAL: &str = "kueue.x-k8s.io/pod-group-total-count";

/// Kueue's groups of plain pods. Kueue itself puts the pods of servers (StatefulSets, Deployments), and pods that are made one after the
/// other, into groups and marks them: they are no gang.
pub(super) fn kueue<'a>(pod: &PodView<'a>, _: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    // Since 0.18 the annotation, which may be longer, goes before the label.
    let named = |name: Option<&'a str>| name.filter(|name| !name.is_empty());
    let (what, name) = match named(pod.annotation(KUEUE)) {
        Some(name) => ("annotation", name),
        None => ("label", named(pod.label(KUEUE))?),
    };
    let one_by_one = ["kueue.x-k8s.io/pod-group-serving", "kueue.x-k8s.io/pod-group-fast-admission"];
    if one_by_one.iter().any(|name| pod.annotation(name) == Some("true")) {
        return None;
    }
    let mut found = FoundMembership::named(Integration::Kueue, &format!("{what} {KUEUE}"), name);
    found.states("annotation kueue.x-k8s.io/pod-group-total-count", pod.annotation(KUEUE_TOTAL));
    if let Size::Stated { min, total } = &mut found.size {
        *total = Some(*min);
    }
    found.rank = rank::index(pod.label("kueue.x-k8s.io/pod-group-pod-index"));
    Some(found)
}

/// Where Kueue's topology-aware scheduling puts a pod's set. It has bound the pods to that by node selectors itself, so it is no more than
/// a hint.
pub(super) fn kueue_topology(pod: &PodView<'_>) -> Option<TopologyHint> {
    let level = |name| pod.annotation(name).filter(|label: &&str| !label.is_empty());
    if let Some(label) = level("kueue.x-k8s.io/podset-slice-required-topology") {
        let size = rank::index(pod.annotation("kueue.x-k8s.io/podset-slice-size"));
        return value::hint(label, size.filter(|size| *size > 0));
    }
    let label = level("kueue.x-k8s.io/podset-required-topology")
        .or_else(|| level("kueue.x-k8s.io/podset-preferred-topology"))?;
    value::hint(label, None)
}

/// KAI's annotation, which has no domain.
pub(super) const KAI: &str = "pod-group-name";

/// KAI, whose pod-grouper names the PodGroup on every pod.
pub(super) fn kai<'a>(pod: &PodView<'a>, _: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    let name = pod.annotation(KAI).filter(|name| !name.is_empty())?;
    let mut found = FoundMembership::of_object(
        pod,
        Integration::Kai,
        OwnerKind::KaiPodGroup,
        "annotation pod-group-name",
        name,
    );
    let group = pod.label("kai.scheduler/subgroup-name");
    found.role = found.word("label kai.scheduler/subgroup-name", group);
    Some(found)
}

const GROVE: &str = "grove.io/podgang";
const GROVE_CLIQUE: &str = "grove.io/podclique";
const GROVE_INDEX: &str = "grove.io/podclique-pod-index";

/// Grove, whose operator names the PodGang on every pod that may be scheduled: the base PodGang of a replica of a PodCliqueSet, or one that
/// a scaling group has added.
pub(super) fn grove<'a>(pod: &PodView<'a>, _: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    let name = pod.label(GROVE).filter(|name| !name.is_empty())?;
    let place = format!("label {GROVE}");
    let mut found = FoundMembership::of_object(pod, Integration::Grove, OwnerKind::PodGang, &place, name);
    found.role = found.word(&format!("label {GROVE_CLIQUE}"), pod.label(GROVE_CLIQUE));
    // Each PodClique numbers its own pods.
    found.rank = rank::index(pod.label(GROVE_INDEX));
    Some(found)
}

/// A time as Go writes it: `90s`, `1h30m`, `500ms`.
fn duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut sum = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        let unit = rest[digits..]
            .find(|c: char| c.is_ascii_digit())
            .map_or(&rest[digits..], |end| &rest[digits..digits + end]);
        let seconds = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        sum = sum.checked_add(Duration::try_from_secs_f64(number * seconds).ok()?)?;
        rest = &rest[digits + unit.len()..];
    }
    (!text.is_empty()).then_some(sum)
}
