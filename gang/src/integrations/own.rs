//! Our own annotations: a gang by name, and what the user states of a gang of any convention. Strict: what cannot be followed to the letter
//! is a fault, and the pod waits until it is mended.

use std::sync::Arc;
use std::time::Duration;

use gantry_api::names;

use super::value::{self, fault, number};
use super::view::of_ours;
use super::{FoundMembership, PodView, grouped};
use crate::key::{GangKey, Integration};
use crate::membership::{GangOptions, JobRef, Membership, OwnerKind, OwnerRef, Revision, Size};
use crate::terms::{Fault, Rails, Repair, TopologyRequest};

/// Ranks need not be consecutive.
const LARGEST_RANK: u32 = 100_000;

/// Longest name and UID of a job that made a pod: Kubernetes has none that are longer.
const MAKER: usize = 253;

/// What our annotations on a pod state.
#[derive(Debug, Clone, Default)]
pub(super) struct OwnAnnotations<'a> {
    /// It is to be no member of any gang.
    pub(super) opted_out: bool,
    /// The gang's name.
    pub(super) gang: Option<&'a str>,
    /// Members that are useful only together.
    pub(super) min: Option<Min>,
    rank: Option<u32>,
    /// The two annotations about rails: whether each has `same`.
    rails: DeclaredRails,
    options: GangOptions,
    faults: Vec<Fault>,
    /// The first annotation that only makes sense on a pod of a gang.
    speaks_of_gang: Option<&'a str>,
}

/// What the annotations about rails have; `true`: `same`.
#[derive(Debug, Clone, Copy, Default)]
struct DeclaredRails {
    preferred: Option<bool>,
    required: Option<bool>,
}

/// A minimum as a person writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Min {
    Number(u32),
    All,
}

/// The gang that is named by our annotation.
pub(super) fn gang<'a>(_: &PodView<'a>, own: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    let name = own.gang?;
    // What is wrong with it is reported with the rest of ours.
    Some(match value::name(name) {
        Ok(()) => FoundMembership::new(Integration::Annotation, name),
        Err(_) => FoundMembership::new(Integration::Annotation, &value::stand_in(name)),
    })
}

/// Reads our annotations.
pub(super) fn read<'a>(pod: &PodView<'a>) -> OwnAnnotations<'a> {
    let mut own = OwnAnnotations::default();
    for (name, text) in of_ours(pod.annotations) {
        own.take(name, text);
    }
    if own.opted_out {
        return own.none_alone();
    }
    let both = [names::GANG_REQUIRED_LEVEL_ANNOTATION, names::GANG_PREFERRED_LEVEL_ANNOTATION];
    if both.iter().all(|name| pod.annotation(name).is_some()) {
        own.faults.push(fault(
            format!("annotation {}", both[0]),
            format!("{} is given too: a gang has one level; remove one of the two", both[1]),
        ));
    }
    own.options.rails = match own.rails {
        DeclaredRails { preferred: Some(false), required: Some(true) } => {
            own.faults.push(fault(
                format!("annotation {}", names::GANG_RAILS_ANNOTATION),
                format!(
                    "`any` contradicts {}, which is `same`; remove one of the two",
                    names::GANG_REQUIRED_RAILS_ANNOTATION
                ),
            ));
            None
        }
        DeclaredRails { required: Some(true), .. } => Some(Rails::RequireSame),
        DeclaredRails { preferred, .. } => {
            preferred.map(|is_same| if is_same { Rails::Same } else { Rails::Any })
        }
    };
    own
}

impl<'a> OwnAnnotations<'a> {
    fn take(&mut self, name: &'a str, text: &'a str) {
        let place = || format!("annotation {name}");
        let count = || number(place(), text, 1..=value::MOST_MEMBERS);
        match name {
            names::GANG_ANNOTATION if text == "none" => {
                self.opted_out = true;
                return;
            }
            names::GANG_ANNOTATION => {
                self.gang = Some(text);
                if let Err(words) = value::name(text) {
                    self.faults.push(fault(place(), words));
                }
            }
            names::GANG_MIN_ANNOTATION if text == "all" => self.min = Some(Min::All),
            names::GANG_MIN_ANNOTATION => {
                let min = number(place(), text, 1..=value::MOST_MEMBERS).map_err(|mut wrong| {
                    wrong.words =
                        format!("{}, or `all` where the owner says how many there are", wrong.words).into();
                    wrong
                });
                self.min = self.keep(min).map(Min::Number);
            }
            names::GANG_MAX_ANNOTATION => self.options.max = self.keep(count()),
            names::GANG_SLICE_ANNOTATION => self.options.slice = self.keep(count()),
            names::GANG_SPARES_ANNOTATION => {
                self.options.spares = self.keep(number(place(), text, 0..=value::MOST_SPARES));
            }
            names::GANG_RANK_ANNOTATION => {
                self.rank = self.keep(number(place(), text, 0..=LARGEST_RANK));
            }
            names::GANG_ARRIVAL_ANNOTATION => {
                let seconds = self.keep(number(place(), text, 1..=3600));
                self.options.arrival = seconds.and_then(|seconds| {
                    value::arrival(
                        Duration::from_secs(seconds.into()),
                        "annotation gantry.dev/gang-arrival-seconds",
                    )
                });
            }
            names::GANG_RESTART_HOLD_ANNOTATION => {
                let seconds = self.keep(number(place(), text, 0..=3600));
                self.options.restart_hold = seconds.map(|seconds| Duration::from_secs(seconds.into()));
            }
            names::GANG_REQUIRED_LEVEL_ANNOTATION | names::GANG_PREFERRED_LEVEL_ANNOTATION => {
                match value::level(text) {
                    Ok(level) => {
                        self.options.level = Some(TopologyRequest {
                            level,
                            required: name == names::GANG_REQUIRED_LEVEL_ANNOTATION,
                        });
                    }
                    Err(words) => self.faults.push(fault(place(), words)),
                }
            }
            names::GANG_RAILS_ANNOTATION | names::GANG_REQUIRED_RAILS_ANNOTATION => {
                let is_same = match text {
                    "same" => Some(true),
                    "any" => Some(false),
                    _ => {
                        self.faults.push(fault(place(), value::not_one_of(text, &["same", "any"])));
                        None
                    }
                };
                match name {
                    names::GANG_RAILS_ANNOTATION => self.rails.preferred = is_same,
                    _ => self.rails.required = is_same,
                }
            }
            names::GANG_REPAIR_ANNOTATION => {
                self.options.repair =
                    Repair::ALL.iter().find(|(word, _)| *word == text).map(|(_, repair)| *repair);
                if self.options.repair.is_none() {
                    let words = Repair::ALL.map(|(word, _)| word);
                    self.faults.push(fault(place(), value::not_one_of(text, &words)));
                }
            }
            names::CHECKPOINTED_ANNOTATION => {
                match text {
                    "true" | "false" => self.options.checkpointed = Some(text == "true"),
                    _ => self.faults.push(fault(place(), value::not_one_of(text, &["true", "false"]))),
                }
                // It makes sense of any pod.
                return;
            }
            _ => return,
        }
        self.speaks_of_gang = self.speaks_of_gang.or(Some(name));
    }

    /// The pod is to be of no gang: whatever else is stated of its gang contradicts that, right or wrong.
    fn none_alone(self) -> Self {
        let wrong = self.speaks_of_gang.map(|more| {
            fault(
                format!("annotation {}", names::GANG_ANNOTATION),
                format!("`none` keeps the pod out of every gang, and {more} only makes sense on a pod of a gang: remove one of the two"),
            )
        });
        Self {
            opted_out: true,
            speaks_of_gang: self.speaks_of_gang,
            faults: wrong.into_iter().collect(),
            ..Self::default()
        }
    }

    fn keep<T>(&mut self, read: Result<T, Fault>) -> Option<T> {
        read.map_err(|wrong| self.faults.push(wrong)).ok()
    }

    /// A pod of no gang with an annotation that only makes sense on a pod of a gang: it must not be scheduled unnoticed.
    pub(super) fn stray<'b>(&self, pod: &PodView<'b>) -> Option<FoundMembership<'b>> {
        self.speaks_of_gang?;
        let mut found = FoundMembership::new(Integration::Annotation, pod.name);
        found.incarnation = pod.uid.into();
        if !self.opted_out {
            found.faults.push(fault(
                "annotations".to_owned(),
                format!(
                    "{} are there, but the pod belongs to no gang: name one with {}, or remove them",
                    "gantry.dev/gang-*",
                    names::GANG_ANNOTATION
                ),
            ));
        }
        Some(found)
    }

    /// What the first convention found, and what the user states on top of it.
    pub(super) fn over(
        self,
        pod: &PodView<'_>,
        first: FoundMembership<'_>,
        others: &[FoundMembership<'_>],
    ) -> Membership {
        let made_by = made_by(pod, &first, others);
        let mut faults = self.faults;
        faults.extend(first.faults);
        let has_name_only = first.incarnation.is_empty();
        let by_name = first.owner.is_none() && first.incarnation.is_empty();
        let mut owner = first.owner;
        let mut role = first.role;
        let size = match (self.min, first.size) {
            (None, size) => size,
            (Some(Min::Number(min)), Size::Stated { total, .. }) => Size::Stated { min, total },
            (Some(Min::Number(min)), _) => Size::Stated { min, total: None },
            (Some(Min::All), Size::Stated { total: Some(total), .. }) => {
                Size::Stated { min: total, total: Some(total) }
            }
            (Some(Min::All), _) => {
                // A PodGroup states how many are needed; the job that makes them states how many there are.
                let with_owner = others.iter().filter(|other| other.owner.is_some());
                let makes_pods = |found: &&FoundMembership<'_>| {
                    found.owner.as_ref().is_some_and(|owner| owner.kind.makes_pods())
                };
                let job = with_owner.clone().find(makes_pods);
                let other = match &owner {
                    Some(owner) if owner.kind.makes_pods() => None,
                    Some(_) => job,
                    None => job.or_else(|| with_owner.clone().next()),
                };
                if let Some(other) = other {
                    owner = other.owner.clone();
                    // Its roles are what that owner counts.
                    role = other.role;
                }
                if owner.is_none() {
                    faults.push(fault(
                        format!("annotation {}", names::GANG_MIN_ANNOTATION),
                        "`all` needs an owner that says how many there are, such as a Job or a JobSet; write a number".to_owned(),
                    ));
                }
                Size::All
            }
        };
        let options = GangOptions {
            level: self.options.level.or(first.options.level),
            hint: first.options.hint.or_else(|| grouped::kueue_topology(pod)),
            slice: self.options.slice.or(first.options.slice),
            max: self.options.max.or(first.options.max),
            rails: self.options.rails,
            spares: self.options.spares,
            repair: self.options.repair.or(first.options.repair),
            arrival: self.options.arrival.or(first.options.arrival),
            restart_hold: self.options.restart_hold,
            checkpointed: self.options.checkpointed.or(first.options.checkpointed),
        };
        faults.sort_unstable();
        faults.dedup();
        faults.truncate(value::MOST_FAULTS);
        let creator = first.creator.or_else(|| creator(pod, owner.as_ref(), others));
        Membership {
            key: GangKey {
                namespace: Arc::from(pod.namespace),
                name: first.name,
                integration: first.integration,
                incarnation: first.incarnation,
            },
            size,
            size_source: match self.min {
                Some(_) => "annotation gantry.dev/gang-min",
                None => first.size_source,
            },
            owner,
            creator,
            rank: self
                .rank
                .or(first.rank)
                .or_else(|| others.iter().find_map(|other| other.rank_among_all(pod)))
                .or_else(|| super::rank::of(pod)),
            role: role.into(),
            options,
            // A Job is a gang because this convention asks for it: it is none of its own.
            also: others
                .iter()
                .map(|other| other.integration)
                .filter(|integration| *integration != Integration::Job)
                .collect(),
            revision: has_name_only.then(|| revision(pod)).flatten(),
            maker: by_name.then(|| maker(pod, others)).flatten(),
            made_by,
            tree: Vec::new(),
            faults,
        }
    }
}

/// The recognised object that creates the pod, where another one states the size of its gang, or none does.
fn creator(pod: &PodView<'_>, owner: Option<&OwnerRef>, others: &[FoundMembership<'_>]) -> Option<OwnerRef> {
    if owner.is_some_and(|owner| owner.kind.makes_pods()) {
        return None;
    }
    let mut owners = others.iter().filter_map(|other| other.owner.as_ref());
    let recognised = owners.find(|owner| owner.kind.makes_pods()).cloned();
    recognised.or_else(|| {
        let job = pod.controller.filter(|made| made.kind == "Job")?;
        let (group, _) = job.api_version.split_once('/')?;
        let kind = match group {
            // The pods of a Job that another recognised object makes are found by that object.
            "batch" => OwnerKind::Job,
            "batch.volcano.sh" => OwnerKind::VolcanoJob,
            _ => return None,
        };
        value::is_object_name(job.name).then(|| pod.beside(kind, job.name))
    })
}

/// Labels of the pods of Deployments, and of Rollouts of Argo, with the hash of their template.
pub(super) const TEMPLATES: [(&str, &str); 2] =
    [("pod-template-hash", "Deployment"), ("rollouts-pod-template-hash", "Rollout")];
/// The same of a StatefulSet's.
pub(super) const REVISION: &str = "controller-revision-hash";

/// The revision of the Deployment, Rollout or StatefulSet that has the pod's template.
fn revision(pod: &PodView<'_>) -> Option<Revision> {
    let made = pod.controller.filter(|made| made.api_version.starts_with("apps/"))?;
    let (kind, name, hash) = match made.kind {
        "ReplicaSet" => {
            let of = TEMPLATES.iter().find_map(|(label, kind)| {
                let hash = pod.label(label).filter(|hash| !hash.is_empty())?;
                Some((*kind, made.name.strip_suffix(hash)?.strip_suffix('-')?, hash))
            });
            of?
        }
        "StatefulSet" => ("StatefulSet", made.name, pod.label(REVISION)?),
        _ => return None,
    };
    let cut = |text: &str| value::truncate(text.into(), MAKER);
    Some(Revision { of: cut(&format!("{kind} {name}")), hash: cut(hash) })
}

/// The UID of what made a pod: of the whole, where it makes jobs or pods in several parts.
fn made_by(
    pod: &PodView<'_>,
    first: &FoundMembership<'_>,
    others: &[FoundMembership<'_>],
) -> Option<Arc<str>> {
    if !first.incarnation.is_empty() {
        return None;
    }
    // The launcher of an MPIJob is the pod of a Job of its own: of the whole its pods know the name alone.
    let of_mpi = |found: &FoundMembership<'_>| {
        let owner = found.owner.as_ref();
        owner.is_some_and(|owner| owner.kind == OwnerKind::MpiJob)
    };
    if of_mpi(first) || others.iter().any(of_mpi) {
        return None;
    }
    match others.iter().find(|other| !other.incarnation.is_empty()) {
        // That is the revision of a template.
        Some(set) if set.integration == Integration::LeaderWorkerSet => None,
        Some(job) => Some(whole(&job.incarnation)),
        None => {
            let uid = pod.controller.map(|made| made.uid).filter(|uid| !uid.is_empty());
            uid.map(|uid| value::truncate(uid.into(), MAKER))
        }
    }
}

/// What stands for the whole in a name or UID that has parts.
fn whole(text: &str) -> Arc<str> {
    text.split('/').next().unwrap_or_default().into()
}

/// The job that made a pod, or the StatefulSet: the whole, where it makes jobs or pods in several parts. Of a Deployment there is nothing
/// to distinguish: what makes its pods changes with every rollout.
fn maker(pod: &PodView<'_>, others: &[FoundMembership<'_>]) -> Option<JobRef> {
    if let Some(job) = others.iter().find(|other| !other.incarnation.is_empty()) {
        return (job.integration != Integration::LeaderWorkerSet).then(|| JobRef {
            kind: match job.integration {
                Integration::Kubeflow | Integration::Ray => pod.controller.map_or("job", |made| made.kind),
                integration => integration.as_str(),
            }
            .into(),
            name: whole(&job.name),
            uid: whole(&job.incarnation),
        });
    }
    // Each group of a LeaderWorkerSet has a StatefulSet of its own.
    let grouped = others.iter().any(|other| other.integration == Integration::LeaderWorkerSet);
    let job = pod.controller.filter(|made| {
        let group = match made.kind {
            "Job" => "batch/",
            "StatefulSet" if !grouped => "apps/",
            _ => return false,
        };
        made.api_version.starts_with(group)
    })?;
    Some(JobRef {
        kind: job.kind.into(),
        name: value::truncate(job.name.into(), MAKER),
        uid: value::truncate(job.uid.into(), MAKER),
    })
}

/// Every annotation of ours that only makes sense on a pod of a gang.
pub(super) const KNOWN: [&str; 13] = [
    names::GANG_ANNOTATION,
    names::GANG_MIN_ANNOTATION,
    names::GANG_MAX_ANNOTATION,
    names::GANG_REQUIRED_LEVEL_ANNOTATION,
    names::GANG_PREFERRED_LEVEL_ANNOTATION,
    names::GANG_SLICE_ANNOTATION,
    names::GANG_RAILS_ANNOTATION,
    names::GANG_REQUIRED_RAILS_ANNOTATION,
    names::GANG_SPARES_ANNOTATION,
    names::GANG_REPAIR_ANNOTATION,
    names::GANG_ARRIVAL_ANNOTATION,
    names::GANG_RESTART_HOLD_ANNOTATION,
    names::GANG_RANK_ANNOTATION,
];
