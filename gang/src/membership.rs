//! What a pod, and the object it belongs to, declare about its gang: as read, before it is interpreted. `integration` reads it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::key::{GangKey, Integration};
use crate::terms::{Fault, Rails, Repair, TopologyRequest};

/// What a pod declares of the gang it belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Membership {
    pub key: GangKey,
    /// What the pod itself states of the minimum.
    pub size: Size,
    /// Where the pod states that, for people: `annotation gantry.dev/gang-min`; empty if it does not.
    pub size_source: &'static str,
    /// The object that states the rest: the minimum where the pod does not, members in all, wishes. `None` if there is none to read.
    pub owner: Option<OwnerRef>,
    /// The pod's place in the order of ranks, from 0, if it has one.
    pub rank: Option<u32>,
    /// The recognised object that creates the pod, if that is another than [`Self::owner`].
    pub creator: Option<OwnerRef>,
    /// Its role, such as `launcher` or `worker`; empty where there is only one.
    pub role: Arc<str>,
    /// What it requests in addition.
    pub options: GangOptions,
    /// Other conventions that name the pod too, and were not asked.
    pub also: Vec<Integration>,
    /// Which revision of its template the pod is of, where nothing else distinguishes the gang from one of another revision.
    pub revision: Option<Revision>,
    /// The job that made the pod, where its gang goes by a mere name: two jobs may have hit on the same.
    pub maker: Option<JobRef>,
    /// UID of what made the pod; of the whole, where that makes its pods in parts. It distinguishes one run of a job from the next.
    /// `None` where no controller created it, where the whole is not known, and where it distinguishes the gang from others anyway
    /// ([`GangKey::incarnation`]).
    pub made_by: Option<Arc<str>>,
    /// The tree of groups that its PodGroup belongs to: from the root CompositePodGroup down to the PodGroup. Empty if there is none, or it
    /// is not known yet.
    pub tree: Vec<OwnerRef>,
    /// What is wrong with its declaration. Such a pod is not scheduled until it is mended.
    pub faults: Vec<Fault>,
}

/// The revision of the template of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision {
    /// What has the template, such as `Deployment head`.
    pub of: Arc<str>,
    /// The hash of the template.
    pub hash: Arc<str>,
}

/// A job with pods that use a gang name chosen by the user.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobRef {
    /// What it is, such as `Job`.
    pub kind: Arc<str>,
    pub name: Arc<str>,
    pub uid: Arc<str>,
}

impl fmt::Display for JobRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

/// What a pod states of its gang's minimum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Size {
    /// A number.
    Stated {
        /// Members that are useful only together.
        min: u32,
        /// Members there will be, if that is stated.
        total: Option<u32>,
    },
    /// As many as the owner states.
    All,
    /// Nothing: the owner, or the Gang object, states it.
    Undeclared,
}

/// An object that states how large a gang is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerRef {
    pub kind: OwnerKind,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
    /// A part of it, such as the group of a Workload or of a Ray cluster; empty if it is the whole.
    pub part: Arc<str>,
}

impl fmt::Display for OwnerRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let api = crate::integrations::api(self.kind);
        if !self.part.is_empty() {
            write!(f, "{} in ", self.part)?;
        }
        write!(f, "{} {}", api.kind, self.name)?;
        match (api.kind, api.versions) {
            // There are five kinds of that name.
            ("PodGroup", [(group, _), ..]) => write!(f, " ({group})"),
            ("Job", [(group, _), ..]) if *group != "batch" => write!(f, " ({group})"),
            _ => Ok(()),
        }
    }
}

/// The kinds of object that state how large a gang is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OwnerKind {
    /// scheduling.k8s.io PodGroup.
    PodGroup,
    /// scheduling.k8s.io CompositePodGroup, which has PodGroups and other CompositePodGroups.
    CompositePodGroup,
    /// scheduling.k8s.io Workload.
    Workload,
    /// scheduling.x-k8s.io PodGroup.
    CoschedulingPodGroup,
    /// scheduling.sigs.k8s.io PodGroup: Koordinator's, and the coscheduling plugin's of former versions.
    KoordinatorPodGroup,
    /// scheduling.volcano.sh PodGroup.
    VolcanoPodGroup,
    /// scheduling.run.ai PodGroup.
    KaiPodGroup,
    /// scheduler.grove.io PodGang.
    PodGang,
    /// leaderworkerset.x-k8s.io LeaderWorkerSet.
    LeaderWorkerSet,
    /// jobset.x-k8s.io JobSet.
    JobSet,
    /// kubeflow.org PyTorchJob.
    PyTorchJob,
    /// kubeflow.org TFJob.
    TfJob,
    /// kubeflow.org MPIJob.
    MpiJob,
    /// kubeflow.org XGBoostJob.
    XgBoostJob,
    /// kubeflow.org PaddleJob.
    PaddleJob,
    /// kubeflow.org JAXJob.
    JaxJob,
    /// ray.io RayCluster.
    RayCluster,
    /// batch.volcano.sh Job.
    VolcanoJob,
    /// batch Job.
    Job,
}

impl OwnerKind {
    /// Every kind.
    pub const ALL: [Self; 19] = [
        Self::PodGroup,
        Self::CompositePodGroup,
        Self::Workload,
        Self::CoschedulingPodGroup,
        Self::KoordinatorPodGroup,
        Self::VolcanoPodGroup,
        Self::KaiPodGroup,
        Self::PodGang,
        Self::LeaderWorkerSet,
        Self::JobSet,
        Self::PyTorchJob,
        Self::TfJob,
        Self::MpiJob,
        Self::XgBoostJob,
        Self::PaddleJob,
        Self::JaxJob,
        Self::RayCluster,
        Self::VolcanoJob,
        Self::Job,
    ];

    /// Whether its controller makes the pods, and so knows how many there will be. For the others a user or a controller states how many
    /// are needed.
    pub fn makes_pods(self) -> bool {
        !matches!(
            self,
            Self::PodGroup
                | Self::CompositePodGroup
                | Self::Workload
                | Self::CoschedulingPodGroup
                | Self::KoordinatorPodGroup
                | Self::VolcanoPodGroup
                | Self::KaiPodGroup
                | Self::PodGang
        )
    }

    /// The versions of its API that are read, for messages: an object that is served in another one cannot be read.
    pub fn versions(self) -> String {
        let versions = crate::integrations::api(self).versions;
        let group = versions.first().map_or("", |(group, _)| *group);
        let versions: Vec<&str> = versions.iter().map(|(_, version)| *version).collect();
        format!("it is read as {group}/{}", versions.join(", "))
    }

    /// Its name in a status: `JobSet`, or with the API group where another kind has the same name, `Job.batch.volcano.sh`.
    pub fn as_shown(self) -> &'static str {
        match self {
            Self::VolcanoJob => "Job.batch.volcano.sh",
            _ => crate::integrations::api(self).kind,
        }
    }

    /// The kind with that name in a status whose controller creates pods.
    pub fn creator_named(name: &str) -> Option<Self> {
        let mut creators = Self::ALL.into_iter().filter(|kind| kind.makes_pods());
        creators.find(|kind| kind.as_shown() == name)
    }

    /// Whether such an object may state that some of its pods are made only when others are ready or have ended ([`OwnerFacts::apart`]),
    /// though the pods themselves state how many there are.
    pub fn may_start_apart(self) -> bool {
        matches!(self, Self::LeaderWorkerSet | Self::JobSet | Self::MpiJob)
    }
}

/// What such an object states.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct OwnerFacts {
    /// Members that are useful only together; of a CompositePodGroup: groups.
    pub min: Option<u32>,
    /// Members there will be.
    pub total: Option<u32>,
    /// How many of them are of each role at least, where that is stated. Sorted by role.
    pub by_role: Vec<(Arc<str>, u32)>,
    /// The sub-groups that there are, where a pod that names another is wrong.
    pub sub_groups: Option<SubGroups>,
    /// Members of one role are made only when those of another are ready or have ended, so that each role is a gang of its own:
    /// [`crate::integrations::settle`] returns its name.
    pub apart: bool,
    /// Its pods are no gang: each goes by itself.
    pub singles: bool,
    /// Where the minimum stands, for people: `spec.minMember`.
    pub source: Arc<str>,
    /// What it requests in addition.
    pub options: GangOptions,
    /// The levels that it requires, if they are several: it has to be within one domain of each.
    pub levels: Vec<Arc<str>>,
    /// The CompositePodGroup that it belongs to.
    pub parent: Option<Arc<str>>,
    /// Where the level that it wishes stands, for people: `spec.networkTopology.highestTierName of PodGroup train`.
    pub level_source: Arc<str>,
    /// It has ended, well or not: members that are lost now are not recreated.
    pub over: bool,
    /// It is suspended: lost members are not recreated before it resumes.
    pub suspended: bool,
    /// No pod is preempted for it, whatever its pods allow.
    pub never_preempts: bool,
    /// How its pods may be evicted for others, where it states that.
    pub disruption: Option<Disruption>,
    /// kube-scheduler schedules all pods of it in one cycle: it has written its condition.
    pub scheduled_whole: bool,
    /// Why kube-scheduler does not schedule it as a whole, in its words.
    pub unscheduled: Option<Arc<str>>,
    /// `metadata.uid`.
    pub uid: Arc<str>,
    /// Members that its controller keeps at present, where that is stated: it creates no more than these.
    pub wanted: Option<u32>,
    /// How many groups it has, where each is a gang of its own: those with a larger index are not created again.
    pub groups: Option<u32>,
    /// Ranks that have failed for good: their members are not created again.
    pub failed_ranks: Ranks,
    /// What is wrong with it.
    pub faults: Vec<Fault>,
}

/// How the pods of a group may be evicted for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Disruption {
    /// Each pod by itself, below the minimum too.
    Single,
    /// All pods together.
    All,
}

impl OwnerFacts {
    /// Members that are left where some ranks have failed for good.
    pub fn left(&self) -> Option<u32> {
        self.wanted.filter(|_| !self.failed_ranks.is_empty())
    }
}

/// Ranks, as sorted intervals that do not touch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Ranks(Vec<(u32, u32)>);

impl Ranks {
    /// Intervals that are kept at most: an owner may state anything.
    const MOST: usize = 4096;

    /// Reads indexes as a Job states them: `1,3-5,7`. Reading ends at the first part that is no interval.
    pub fn read(text: &str) -> Self {
        let mut intervals: Vec<(u32, u32)> = Vec::new();
        for part in text.split(',').take(Self::MOST) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>()) else {
                break;
            };
            let follows = intervals.last().is_none_or(|(_, before)| first > *before);
            if first > last || !follows {
                break;
            }
            intervals.push((first, last));
        }
        Self(intervals)
    }

    /// Whether a rank is among them.
    pub fn contains(&self, rank: u32) -> bool {
        let after = self.0.partition_point(|(first, _)| *first <= rank);
        after.checked_sub(1).and_then(|at| self.0.get(at)).is_some_and(|(_, last)| rank <= *last)
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.0.iter().fold(0, |sum: u32, (first, last)| sum.saturating_add(last - first).saturating_add(1))
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The sub-groups that an owner has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct SubGroups {
    /// Where they stand, for people: `spec.subGroups of PodGroup train`.
    pub source: Arc<str>,
    /// Their names, sorted.
    pub names: Vec<Arc<str>>,
}

/// What a gang requests in addition to its size. The pod has precedence over its owner, and the Gang object over both.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct GangOptions {
    /// The level of the fabric that should hold it.
    pub level: Option<TopologyRequest>,
    /// What another system keeps together by its own means.
    pub hint: Option<TopologyHint>,
    /// Members that come in slices of this size, each in one domain of the level.
    pub slice: Option<u32>,
    /// Members at most.
    pub max: Option<u32>,
    /// Whether members take the same rails on every node.
    pub rails: Option<Rails>,
    /// Spare reservations, of each role.
    pub spares: Option<u32>,
    /// What to do when a member is lost.
    pub repair: Option<Repair>,
    /// How long its members may take to arrive once it has a place.
    pub arrival: Option<ArrivalTime>,
    /// How long its reservations are kept while its owner creates all members again.
    pub restart_hold: Option<Duration>,
    /// It can be stopped at little loss: a hint for the choice of victims.
    pub checkpointed: Option<bool>,
}

/// How long members may take to arrive, and what states it: an annotation, or a field of the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArrivalTime {
    pub time: Duration,
    pub source: &'static str,
}

/// What another system keeps together by its own means: where the label makes a known level, and no other is requested, the gang is
/// rather laid along it; else it means nothing to us.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopologyHint {
    /// The node label.
    pub label: Arc<str>,
    /// Members that come in slices of this size, each in one domain.
    pub slice: Option<u32>,
}
