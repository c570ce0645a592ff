//! Reads the objects that state how large a gang is and whether it is over, and names the APIs that serve them. Strict: a value that
//! makes no sense is a fault of the object, not a guess of ours.

mod groups;
mod jobs;
mod training;

use std::sync::Arc;

use serde_json::Value;

use super::value::{MOST_FAULTS, fault, short, shown};
use crate::membership::{OwnerFacts, OwnerKind};
use crate::terms::TopologyRequest;

/// Where the API server has a kind of object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Api {
    /// Groups and versions to try, the best first: the first that is served is the one.
    pub versions: &'static [(&'static str, &'static str)],
    pub kind: &'static str,
    /// Its plural, as in paths.
    pub plural: &'static str,
}

/// Where the API server has a kind of object.
pub fn api(kind: OwnerKind) -> Api {
    const KUBERNETES: &str = "scheduling.k8s.io";
    const KUBEFLOW: &[(&str, &str)] = &[("kubeflow.org", "v1")];
    let (versions, kind, plural): (&'static [(&'static str, &'static str)], _, _) = match kind {
        OwnerKind::PodGroup => (
            &[
                (KUBERNETES, "v1"),
                (KUBERNETES, "v1beta1"),
                (KUBERNETES, "v1alpha3"),
                (KUBERNETES, "v1alpha2"),
            ],
            "PodGroup",
            "podgroups",
        ),
        OwnerKind::CompositePodGroup => (
            &[(KUBERNETES, "v1"), (KUBERNETES, "v1beta1"), (KUBERNETES, "v1alpha3")],
            "CompositePodGroup",
            "compositepodgroups",
        ),
        OwnerKind::Workload => (&[(KUBERNETES, "v1alpha1")], "Workload", "workloads"),
        OwnerKind::CoschedulingPodGroup => (&[("scheduling.x-k8s.io", "v1alpha1")], "PodGroup", "podgroups"),
        OwnerKind::KoordinatorPodGroup => {
            (&[("scheduling.sigs.k8s.io", "v1alpha1")], "PodGroup", "podgroups")
        }
        OwnerKind::VolcanoPodGroup => (&[("scheduling.volcano.sh", "v1beta1")], "PodGroup", "podgroups"),
        OwnerKind::KaiPodGroup => (&[("scheduling.run.ai", "v2alpha2")], "PodGroup", "podgroups"),
        OwnerKind::PodGang => (&[("scheduler.grove.io", "v1alpha1")], "PodGang", "podgangs"),
        OwnerKind::LeaderWorkerSet => {
            (&[("leaderworkerset.x-k8s.io", "v1")], "LeaderWorkerSet", "leaderworkersets")
        }
        OwnerKind::JobSet => {
            (&[("jobset.x-k8s.io", "v1"), ("jobset.x-k8s.io", "v1alpha2")], "JobSet", "jobsets")
        }
        OwnerKind::PyTorchJob => (KUBEFLOW, "PyTorchJob", "pytorchjobs"),
        OwnerKind::TfJob => (KUBEFLOW, "TFJob", "tfjobs"),
        OwnerKind::MpiJob => (&[("kubeflow.org", "v2beta1"), ("kubeflow.org", "v1")], "MPIJob", "mpijobs"),
        OwnerKind::XgBoostJob => (KUBEFLOW, "XGBoostJob", "xgboostjobs"),
        OwnerKind::PaddleJob => (KUBEFLOW, "PaddleJob", "paddlejobs"),
        OwnerKind::JaxJob => (KUBEFLOW, "JAXJob", "jaxjobs"),
        OwnerKind::RayCluster => (&[("ray.io", "v1"), ("ray.io", "v1alpha1")], "RayCluster", "rayclusters"),
        OwnerKind::VolcanoJob => (&[("batch.volcano.sh", "v1alpha1")], "Job", "jobs"),
        OwnerKind::Job => (&[("batch", "v1")], "Job", "jobs"),
    };
    Api { versions, kind, plural }
}

/// What an object states, or a part of it ([`crate::OwnerRef::part`]). Anything may stand in the object: what cannot be read is a fault.
pub fn read(kind: OwnerKind, part: &str, object: &Value) -> OwnerFacts {
    let mut sheet = Sheet::of(kind, object);
    sheet.facts.over = is_over(kind, object);
    sheet.facts.suspended = is_suspended(kind, object);
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str);
    sheet.facts.uid = uid.map(short).unwrap_or_default().into();
    match kind {
        OwnerKind::PodGroup => groups::pod_group(&mut sheet),
        OwnerKind::CompositePodGroup => groups::composite_pod_group(&mut sheet),
        OwnerKind::Workload => groups::workload(&mut sheet, part),
        OwnerKind::CoschedulingPodGroup | OwnerKind::KoordinatorPodGroup => groups::coscheduling(&mut sheet),
        OwnerKind::VolcanoPodGroup => groups::volcano(&mut sheet),
        OwnerKind::KaiPodGroup => groups::kai(&mut sheet),
        OwnerKind::PodGang => groups::grove(&mut sheet),
        OwnerKind::LeaderWorkerSet => jobs::leader_worker_set(&mut sheet),
        OwnerKind::JobSet => jobs::job_set(&mut sheet, part),
        OwnerKind::PyTorchJob => training::job(&mut sheet, "pytorchReplicaSpecs"),
        OwnerKind::TfJob => training::job(&mut sheet, "tfReplicaSpecs"),
        OwnerKind::MpiJob => training::mpi_job(&mut sheet),
        OwnerKind::XgBoostJob => training::job(&mut sheet, "xgbReplicaSpecs"),
        OwnerKind::PaddleJob => training::job(&mut sheet, "paddleReplicaSpecs"),
        OwnerKind::JaxJob => training::job(&mut sheet, "jaxReplicaSpecs"),
        OwnerKind::RayCluster => jobs::ray_cluster(&mut sheet),
        OwnerKind::VolcanoJob => jobs::volcano_job(&mut sheet),
        OwnerKind::Job => jobs::job(&mut sheet),
    }
    sheet.done()
}

/// An object while it is read.
struct Sheet<'a> {
    object: &'a Value,
    /// `PodGroup train`.
    name: String,
    facts: OwnerFacts,
}

impl<'a> Sheet<'a> {
    fn of(kind: OwnerKind, object: &'a Value) -> Self {
        let name = object.pointer("/metadata/name").and_then(Value::as_str);
        let mut sheet = Self {
            object,
            name: format!("{} {}", api(kind).kind, name.unwrap_or_default()),
            facts: OwnerFacts::default(),
        };
        sheet.kai_placement();
        sheet
    }

    /// The job-wide placement that KAI reads from any owner.
    fn kai_placement(&mut self) {
        let annotation = |name: &str| {
            let annotations = self.object.pointer("/metadata/annotations")?;
            annotations.get(name)?.as_str().filter(|level| !level.is_empty())
        };
        for (name, required) in [
            ("kai.scheduler/topology-required-placement", true),
            ("kai.scheduler/topology-preferred-placement", false),
        ] {
            if let Some(level) = annotation(name) {
                self.level(&format!("annotation {name}"), level, required);
                return;
            }
        }
    }

    /// A level to be held to, or rather held to, that stands at `path`.
    fn level(&mut self, path: &str, name: &str, required: bool) {
        self.facts.level_source = format!("{path} of {}", self.name).into();
        self.facts.options.level = Some(TopologyRequest { level: name.into(), required });
    }

    /// A value of `spec` by its path with dots.
    fn spec(&self, path: &str) -> Option<&'a Value> {
        let mut value = self.object.get("spec")?;
        for step in path.split('.') {
            value = value.get(step)?;
        }
        Some(value).filter(|value| !value.is_null())
    }

    /// A text of `spec`.
    fn text(&self, path: &str) -> Option<&'a str> {
        self.spec(path)?.as_str().filter(|text| !text.is_empty())
    }

    /// A whole number of `spec` from `least` on; absent is none.
    fn count(&mut self, path: &str, least: u32) -> Option<u32> {
        self.number(&format!("spec.{path}"), self.spec(path), least)
    }

    /// A whole number from `least` on that stands at `path`; absent is none.
    fn number(&mut self, path: &str, value: Option<&Value>, least: u32) -> Option<u32> {
        let value = value.filter(|value| !value.is_null())?;
        let words = match (value.as_u64().map(u32::try_from), value) {
            (Some(Ok(number)), _) if number >= least => return Some(number),
            (Some(Err(_)), _) => format!("{value} is too large: at most {} is read", u32::MAX),
            (_, Value::String(text)) => {
                let text = shown(text);
                format!("{text} is a text: a whole number from {least} on is asked for")
            }
            _ => format!("{} is no whole number from {least} on", short(&value.to_string())),
        };
        self.wrong(path, words);
        None
    }

    fn wrong(&mut self, path: &str, words: impl Into<Arc<str>>) {
        let place = format!("{path} of {}", self.name);
        self.facts.faults.push(fault(place, words));
    }

    /// The minimum, and where it stands.
    fn min(&mut self, min: Option<u32>, source: &str) {
        self.facts.min = min;
        self.facts.source = source.into();
    }

    /// What every object is held to.
    fn done(mut self) -> OwnerFacts {
        self.facts.wanted = self.facts.wanted.or(self.facts.total);
        if let (Some(min), Some(total)) = (self.facts.min, self.facts.total)
            && min > total
        {
            let source = self.facts.source.to_string();
            self.wrong(&source, format!("{min} are needed, but there are {total} pods only"));
        }
        self.facts.by_role.retain(|(_, count)| *count > 0);
        self.facts.by_role.sort_unstable();
        self.facts.faults.sort_unstable();
        self.facts.faults.dedup();
        self.facts.faults.truncate(MOST_FAULTS);
        self.facts
    }
}

/// The sum of all roles.
fn sum(by_role: &[(Arc<str>, u32)]) -> u32 {
    by_role.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count))
}

// Whether an owner has finished, or is suspended: its lost pods are not recreated then, or not before it resumes. Only a final state
// counts as finished, not a run that its controller restarts.

/// What of an owner's status is read: all the rest need not be kept.
pub const STATUS: [&str; 5] = ["phase", "state", "conditions", "completionTime", "failedIndexes"];

/// Conditions that report an owner as finished while they are `True`.
fn conditions(kind: OwnerKind) -> &'static [&'static str] {
    match kind {
        // The last two come first: from then on its controller only removes pods.
        OwnerKind::Job => &["Complete", "Failed", "SuccessCriteriaMet", "FailureTarget"],
        OwnerKind::JobSet => &["Completed", "Failed"],
        OwnerKind::PyTorchJob
        | OwnerKind::TfJob
        | OwnerKind::MpiJob
        | OwnerKind::XgBoostJob
        | OwnerKind::PaddleJob
        | OwnerKind::JaxJob => &["Succeeded", "Failed"],
        OwnerKind::PodGroup
        | OwnerKind::CompositePodGroup
        | OwnerKind::Workload
        | OwnerKind::CoschedulingPodGroup
        | OwnerKind::KoordinatorPodGroup
        | OwnerKind::VolcanoPodGroup
        | OwnerKind::KaiPodGroup
        | OwnerKind::PodGang
        | OwnerKind::LeaderWorkerSet
        | OwnerKind::RayCluster
        | OwnerKind::VolcanoJob => &[],
    }
}

/// Phases that report an owner as finished.
fn phases(kind: OwnerKind) -> &'static [&'static str] {
    match kind {
        OwnerKind::VolcanoPodGroup => &["Completed"],
        // In the phases that lead to an end its controller only removes pods.
        OwnerKind::VolcanoJob => &["Completing", "Completed", "Terminating", "Terminated", "Failed"],
        _ => &[],
    }
}

/// The phase of an object.
fn phase(kind: OwnerKind, object: &Value) -> Option<&str> {
    let place = match kind {
        OwnerKind::VolcanoJob => "/status/state/phase",
        _ => "/status/phase",
    };
    object.pointer(place)?.as_str()
}

/// Whether the object's status reports it as finished. What cannot be read does not count.
fn is_over(kind: OwnerKind, object: &Value) -> bool {
    let Some(status) = object.get("status") else {
        return false;
    };
    if phase(kind, object).is_some_and(|phase| phases(kind).contains(&phase)) {
        return true;
    }
    let all = status.get("conditions").and_then(Value::as_array);
    all.into_iter().flatten().any(|condition| {
        let field = |name: &str| condition.get(name).and_then(Value::as_str);
        let reported = field("type").filter(|name| conditions(kind).contains(name));
        // An MPIJob that lost a worker by eviction reports `Failed` too, and goes on: it has ended once it has a completion time.
        let goes_on =
            kind == OwnerKind::MpiJob && reported == Some("Failed") && status.get("completionTime").is_none();
        reported.is_some() && !goes_on && field("status") == Some("True")
    })
}

/// Whether the object states that it is to be suspended: its controller removes the pods, and recreates them once it is not. So Kueue
/// takes a job back that has to go for another.
fn is_suspended(kind: OwnerKind, object: &Value) -> bool {
    let field = match kind {
        OwnerKind::Job | OwnerKind::JobSet | OwnerKind::RayCluster => "/spec/suspend",
        OwnerKind::PyTorchJob
        | OwnerKind::TfJob
        | OwnerKind::MpiJob
        | OwnerKind::XgBoostJob
        | OwnerKind::PaddleJob
        | OwnerKind::JaxJob => "/spec/runPolicy/suspend",
        // A command resumes a job that was aborted.
        OwnerKind::VolcanoJob => return matches!(phase(kind, object), Some("Aborting" | "Aborted")),
        OwnerKind::PodGroup
        | OwnerKind::CompositePodGroup
        | OwnerKind::Workload
        | OwnerKind::CoschedulingPodGroup
        | OwnerKind::KoordinatorPodGroup
        | OwnerKind::VolcanoPodGroup
        | OwnerKind::KaiPodGroup
        | OwnerKind::PodGang
        | OwnerKind::LeaderWorkerSet => return false,
    };
    object.pointer(field).and_then(Value::as_bool) == Some(true)
}

#[cfg(test)]
mod tests;
