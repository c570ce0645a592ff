//! What is looked at of a pod to see whether it belongs to a gang. Borrowed; nothing is decided here.

use std::collections::BTreeMap;
use std::ops::Bound;

use gantry_api::names;

use super::{grouped, own};
use crate::membership::{OwnerKind, OwnerRef};

/// What of a pod may declare that it belongs to a gang.
#[derive(Debug, Clone, Copy, Default)]
pub struct PodView<'a> {
    /// `metadata.namespace`.
    pub namespace: &'a str,
    /// `metadata.name`.
    pub name: &'a str,
    /// `metadata.uid`.
    pub uid: &'a str,
    /// `metadata.labels`; those for which [`reads`] is false need not be there.
    pub labels: Option<&'a BTreeMap<String, String>>,
    /// `metadata.annotations`; those for which [`reads`] is false need not be there.
    pub annotations: Option<&'a BTreeMap<String, String>>,
    /// The owner reference with `controller: true`.
    pub controller: Option<Controller<'a>>,
    /// `spec.schedulingGroup.podGroupName` (Kubernetes 1.36 and later).
    pub scheduling_group: Option<&'a str>,
    /// `spec.workloadRef` (Kubernetes 1.35).
    pub workload: Option<WorkloadRef<'a>>,
}

impl<'a> PodView<'a> {
    pub fn label(&self, name: &str) -> Option<&'a str> {
        self.labels?.get(name).map(String::as_str)
    }

    pub fn annotation(&self, name: &str) -> Option<&'a str> {
        self.annotations?.get(name).map(String::as_str)
    }

    /// An object in the pod's namespace.
    pub(super) fn beside(&self, kind: OwnerKind, name: &str) -> OwnerRef {
        OwnerRef { kind, namespace: self.namespace.into(), name: name.into(), part: "".into() }
    }
}

/// Our domain, as names begin with it.
const OURS: &str = "gantry.dev/";

/// Labels or annotations of our domain, which stand together in the order of names.
pub(super) fn of_ours(words: Option<&BTreeMap<String, String>>) -> impl Iterator<Item = (&str, &str)> {
    let from = (Bound::Included(OURS), Bound::Unbounded);
    let words = words.into_iter().flat_map(move |words| words.range::<str, _>(from));
    let words = words.map(|(name, text)| (name.as_str(), text.as_str()));
    words.take_while(|(name, _)| name.starts_with(OURS))
}

/// Where its name and UID stand.
pub(super) const OWNER: &str = "metadata.ownerReferences";

/// The object that made a pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Controller<'a> {
    /// Group and version, such as `batch/v1`.
    pub api_version: &'a str,
    pub kind: &'a str,
    pub name: &'a str,
    pub uid: &'a str,
}

/// `spec.workloadRef`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkloadRef<'a> {
    /// The Workload.
    pub name: &'a str,
    pub pod_group: &'a str,
    /// Which replica of the group, if there are several.
    pub replica_key: Option<&'a str>,
}

/// Whether a label or annotation of this name is ever looked at. A reader of pods may drop all others.
pub fn reads(name: &str) -> bool {
    match name.split_once('/') {
        None => {
            let templates = own::TEMPLATES.map(|(label, _)| label);
            [grouped::KAI, grouped::COSCHEDULING_OLD, own::REVISION].contains(&name)
                || templates.contains(&name)
        }
        // Not the grant, which is long.
        Some((names::GROUP, _)) => own::KNOWN.contains(&name) || name == names::CHECKPOINTED_ANNOTATION,
        Some((domain, _)) => DOMAINS.contains(&domain),
    }
}

/// The domains of labels and annotations that declare gangs.
const DOMAINS: [&str; 15] = [
    "scheduling.x-k8s.io",
    "pod-group.scheduling.sigs.k8s.io",
    "scheduling.k8s.io",
    "scheduling.volcano.sh",
    "volcano.sh",
    "gang.scheduling.koordinator.sh",
    "kueue.x-k8s.io",
    "kai.scheduler",
    "grove.io",
    "leaderworkerset.sigs.k8s.io",
    "jobset.sigs.k8s.io",
    "alpha.jobset.sigs.k8s.io",
    "training.kubeflow.org",
    "ray.io",
    "batch.kubernetes.io",
];
