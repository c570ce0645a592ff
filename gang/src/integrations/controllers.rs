//! The workloads whose controllers make gangs of their own: what their pods carry.

use super::own::OwnAnnotations;
use super::value::{self, MOST_MEMBERS, number};
use super::view::OWNER;
use super::{FoundMembership, PodView, rank};
use crate::key::Integration;
use crate::membership::{OwnerKind, Size};

// Kubernetes' own groups: a PodGroup of scheduling.k8s.io (1.36 and later), a Workload (1.35). Both are named in the pod's spec; sizes
// stand in the object.

/// `spec.schedulingGroup.podGroupName`.
pub(super) fn pod_group<'a>(pod: &PodView<'a>, _: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    let name = pod.scheduling_group.filter(|name| !name.is_empty())?;
    let place = "spec.schedulingGroup.podGroupName";
    Some(FoundMembership::of_object(pod, Integration::PodGroup, OwnerKind::PodGroup, place, name))
}

/// `spec.workloadRef`: each group of a Workload is a gang, and each replica of a group.
pub(super) fn workload<'a>(pod: &PodView<'a>, _: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    let workload = pod.workload.filter(|workload| !workload.name.is_empty())?;
    let place = "spec.workloadRef.name";
    let mut found =
        FoundMembership::of_object(pod, Integration::Workload, OwnerKind::Workload, place, workload.name);
    let group = found.word("spec.workloadRef.podGroup", Some(workload.pod_group));
    let replica = found.word("spec.workloadRef.podGroupReplicaKey", workload.replica_key);
    found.name = match replica {
        "" => format!("{}/{group}", found.name),
        _ => format!("{}/{group}/{replica}", found.name),
    }
    .into();
    if let Some(owner) = &mut found.owner {
        owner.part = group.into();
    }
    Some(found)
}

// LeaderWorkerSet: each group, a leader and its workers, is a gang. The groups of one set are replicas of each other and not one gang.

const LWS_NAME: &str = "leaderworkerset.sigs.k8s.io/name";
const LWS_GROUP: &str = "leaderworkerset.sigs.k8s.io/group-index";
const LWS_WORKER: &str = "leaderworkerset.sigs.k8s.io/worker-index";
const LWS_SIZE: &str = "leaderworkerset.sigs.k8s.io/size";
const LWS_REVISION: &str = "leaderworkerset.sigs.k8s.io/template-revision-hash";
const LWS_EXCLUSIVE: &str = "leaderworkerset.sigs.k8s.io/exclusive-topology";
const LWS_SUBGROUP_EXCLUSIVE: &str = "leaderworkerset.sigs.k8s.io/subgroup-exclusive-topology";
const LWS_SUBGROUP_SIZE: &str = "leaderworkerset.sigs.k8s.io/subgroup-size";

/// The two roles, as messages and [`crate::OwnerFacts::by_role`] name them.
pub(super) const LEADER: &str = "leader";
pub(super) const WORKERS: &str = "worker";

/// The gang of a LeaderWorkerSet's pod.
pub(super) fn leader_worker_set<'a>(
    pod: &PodView<'a>,
    _: &OwnAnnotations<'a>,
) -> Option<FoundMembership<'a>> {
    let name = pod.label(LWS_NAME).filter(|name| !name.is_empty())?;
    // The leader's stateful set has the first label and no group; it is no pod. A pod always has both.
    let group = pod.label(LWS_GROUP)?;
    let kind = OwnerKind::LeaderWorkerSet;
    let mut found = FoundMembership::of_object(
        pod,
        Integration::LeaderWorkerSet,
        kind,
        &format!("label {LWS_NAME}"),
        name,
    );
    let group = found.word(&format!("label {LWS_GROUP}"), Some(group));
    found.name = format!("{}-{group}", found.name).into();
    // A group that is recreated from another template is another gang, though it has the same name.
    found.incarnation = found.word(&format!("label {LWS_REVISION}"), pod.label(LWS_REVISION)).into();
    found.rank = rank::index(pod.label(LWS_WORKER));
    found.role = if found.rank == Some(0) { LEADER } else { WORKERS };
    let size = match pod
        .annotation(LWS_SIZE)
        .map(|size| number(format!("annotation {LWS_SIZE}"), size, 1..=MOST_MEMBERS))
    {
        Some(Ok(size)) => size,
        Some(Err(wrong)) => {
            found.faults.push(wrong);
            return Some(found);
        }
        None => return Some(found),
    };
    let mut min = size;
    if let Some(label) = pod.annotation(LWS_EXCLUSIVE).filter(|label| !label.is_empty()) {
        // The workers are made only when the leader has a node, and are pinned to its domain: the leader is a gang of its own, and so are
        // they.
        found.name = format!("{}/{}", found.name, found.role).into();
        found.creator = found.owner.take();
        min = if found.role == LEADER { 1 } else { size.saturating_sub(1).max(1) };
        found.options.hint = value::hint(label, None);
    } else if let Some(label) = pod.annotation(LWS_SUBGROUP_EXCLUSIVE).filter(|label| !label.is_empty()) {
        // Its leader may be one more than the sub-groups have. Where it asks for no devices it is in no slice anyway: that they make up the
        // members is seen when those are known.
        let slice = rank::index(pod.annotation(LWS_SUBGROUP_SIZE)).filter(|sub| *sub > 0);
        found.options.hint = value::hint(label, slice);
    }
    found.size = Size::Stated { min, total: Some(min) };
    found.size_source = "annotation leaderworkerset.sigs.k8s.io/size";
    Some(found)
}

/// The place of a pod among all groups of its set, which may be one gang where something else names it.
pub(super) fn rank_in_set(pod: &PodView<'_>) -> Option<u32> {
    let worker = rank::index(pod.label(LWS_WORKER))?;
    rank::within(rank::index(pod.label(LWS_GROUP)).unwrap_or(0), worker)
}

// JobSet, and what is made of it, such as Kubeflow's TrainJob: one gang per JobSet and restart. Its controller puts all that is needed
// on the pods, but for the number of pods of a job: that stands in the JobSet.

const JOBSET_NAME: &str = "jobset.sigs.k8s.io/jobset-name";
const JOBSET_UID: &str = "jobset.sigs.k8s.io/jobset-uid";
const JOBSET_ATTEMPT: &str = "jobset.sigs.k8s.io/restart-attempt";
const JOBSET_REPLICATED_JOB: &str = "jobset.sigs.k8s.io/replicatedjob-name";
const JOBSET_REPLICAS: &str = "jobset.sigs.k8s.io/replicatedjob-replicas";
pub(super) const JOBSET_EXCLUSIVE: &str = "alpha.jobset.sigs.k8s.io/exclusive-topology";
pub(super) const BY_SELECTOR: &str = "alpha.jobset.sigs.k8s.io/node-selector";

/// What [`crate::membership::OwnerRef::part`] ends with where only the followers of a replicated job are meant.
pub(super) const FOLLOWERS: &str = "/followers";

/// The gang of a JobSet's pod.
pub(super) fn job_set<'a>(pod: &PodView<'a>, _: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    let word = |name| pod.label(name).or_else(|| pod.annotation(name));
    let place = |name| match pod.label(name) {
        Some(_) => format!("label {name}"),
        None => format!("annotation {name}"),
    };
    let name = word(JOBSET_NAME).filter(|name| !name.is_empty())?;
    let mut found =
        FoundMembership::of_object(pod, Integration::JobSet, OwnerKind::JobSet, &place(JOBSET_NAME), name);
    let uid = found.word(&place(JOBSET_UID), word(JOBSET_UID));
    let attempt = found.word(&place(JOBSET_ATTEMPT), word(JOBSET_ATTEMPT).or(Some("0")));
    found.incarnation = if uid.is_empty() { attempt.into() } else { format!("{uid}/{attempt}").into() };
    found.role = found.word(&place(JOBSET_REPLICATED_JOB), word(JOBSET_REPLICATED_JOB));
    let index = rank::completion_index(pod);
    let job = rank::index(
        word("jobset.sigs.k8s.io/job-global-index").or_else(|| word("jobset.sigs.k8s.io/job-index")),
    );
    found.rank = rank::within(job.unwrap_or(0), index.unwrap_or(0)).filter(|_| job.or(index).is_some());
    if let Some(label) = pod.annotation(JOBSET_EXCLUSIVE).filter(|label| !label.is_empty()) {
        found.options.hint = value::hint(label, None);
        if pod.annotation(BY_SELECTOR).is_none() {
            // JobSet's webhook lets the followers of a job in only when its leader has a node, and pins them to the leader's domain: the
            // leaders are one gang, and the followers that come then are another.
            if index == Some(0) {
                found.name = format!("{}/{}/leaders", found.name, found.role).into();
                found.creator = found.owner.take();
                match number(
                    format!("label {JOBSET_REPLICAS}"),
                    word(JOBSET_REPLICAS).unwrap_or("1"),
                    1..=MOST_MEMBERS,
                ) {
                    Ok(jobs) => {
                        found.size = Size::Stated { min: jobs, total: Some(jobs) };
                        found.size_source = "label jobset.sigs.k8s.io/replicatedjob-replicas";
                    }
                    Err(wrong) => found.faults.push(wrong),
                }
                return Some(found);
            }
            found.name = format!("{}/{}{FOLLOWERS}", found.name, found.role).into();
            if let Some(owner) = &mut found.owner {
                owner.part = format!("{}{FOLLOWERS}", found.role).into();
            }
        }
    }
    Some(found)
}

// Kubeflow's training jobs (PyTorchJob, TFJob, MPIJob and the like) and the MPI operator: one gang per job.

const TRAINING_NAME: &str = "training.kubeflow.org/job-name";
const TRAINING_TYPE: &str = "training.kubeflow.org/replica-type";
const TRAINING_ROLE: &str = "training.kubeflow.org/job-role";
const TRAINING_INDEX: &str = "training.kubeflow.org/replica-index";

/// The gang of a training job's pod.
pub(super) fn training_job<'a>(pod: &PodView<'a>, _: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    let name = pod.label(TRAINING_NAME).filter(|name| !name.is_empty())?;
    let kind = training_kind(pod)?;
    let mut found = FoundMembership::of_object(
        pod,
        Integration::Kubeflow,
        kind,
        "label training.kubeflow.org/job-name",
        name,
    );
    // The launcher of an MPIJob is the pod of a Job of its own and does not know the MPIJob's UID: there all go without.
    if let Some(controller) = pod.controller.filter(|_| kind != OwnerKind::MpiJob) {
        found.incarnation = found.word(OWNER, Some(controller.uid)).into();
    }
    let role = pod.label(TRAINING_TYPE).or_else(|| pod.label(TRAINING_ROLE));
    found.role = found.word("label training.kubeflow.org/replica-type", role);
    let index = rank::index(pod.label(TRAINING_INDEX));
    found.rank = match (found.role, kind) {
        ("master" | "chief", _) => Some(0),
        // After the master, if there is one; it is the order that counts.
        ("worker", OwnerKind::PyTorchJob | OwnerKind::TfJob | OwnerKind::XgBoostJob) => {
            index.and_then(|index| index.checked_add(1))
        }
        // A launcher that is a worker too (`runLauncherAsWorker`) is numbered like them, as the first; any other has no number.
        ("launcher", OwnerKind::MpiJob) | ("worker", _) => index,
        _ => None,
    };
    Some(found)
}

fn training_kind(pod: &PodView<'_>) -> Option<OwnerKind> {
    let controller = pod.controller?;
    if controller.api_version.starts_with("kubeflow.org/") {
        return Some(match controller.kind {
            "PyTorchJob" => OwnerKind::PyTorchJob,
            "TFJob" => OwnerKind::TfJob,
            "MPIJob" => OwnerKind::MpiJob,
            "XGBoostJob" => OwnerKind::XgBoostJob,
            "PaddleJob" => OwnerKind::PaddleJob,
            "JAXJob" => OwnerKind::JaxJob,
            _ => return None,
        });
    }
    let launcher = controller.kind == "Job" && pod.label(TRAINING_ROLE) == Some("launcher");
    launcher.then_some(OwnerKind::MpiJob)
}

// Ray clusters, whether a RayCluster, a RayJob or a RayService made them: the head and the smallest number of workers of every group
// are one gang. Workers that the autoscaler adds are members beyond the minimum.

const RAY_CLUSTER: &str = "ray.io/cluster";
const RAY_GROUP: &str = "ray.io/group";
const RAY_TYPE: &str = "ray.io/node-type";
const RAY_REPLICA: &str = "ray.io/worker-group-replica-index";
const RAY_HOST: &str = "ray.io/replica-host-index";

/// The role of the head, which is in no group of workers.
pub(super) const HEAD: &str = "head";

/// The gang of a Ray cluster's pod.
pub(super) fn ray_cluster<'a>(pod: &PodView<'a>, _: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    let name = pod.label(RAY_CLUSTER).filter(|name| !name.is_empty())?;
    let controller = pod.controller.filter(|controller| {
        controller.api_version.starts_with("ray.io/") && controller.kind == "RayCluster"
    })?;
    let mut found = FoundMembership::of_object(
        pod,
        Integration::Ray,
        OwnerKind::RayCluster,
        "label ray.io/cluster",
        name,
    );
    found.incarnation = found.word(OWNER, Some(controller.uid)).into();
    found.role = match pod.label(RAY_TYPE) {
        Some("head") => HEAD,
        _ => found.word("label ray.io/group", pod.label(RAY_GROUP)),
    };
    // KubeRay numbers the hosts only of replicas that have several. The index of a replica alone, which others have, would put it between
    // the hosts of another group's replica: groups are numbered each by itself.
    let replica = rank::index(pod.label(RAY_REPLICA));
    let host = rank::index(pod.label(RAY_HOST));
    found.rank = replica.zip(host).and_then(|(replica, host)| rank::within(replica, host));
    Some(found)
}

// A batch Job with pods that ask to be a gang. No other Job is one: that its pods run at once does not mean that they need each other.

/// The gang of a Job's pod that states a minimum and names no gang.
pub(super) fn job<'a>(pod: &PodView<'a>, own: &OwnAnnotations<'a>) -> Option<FoundMembership<'a>> {
    own.min?;
    let controller = pod
        .controller
        .filter(|controller| controller.kind == "Job" && controller.api_version.starts_with("batch/"))?;
    let mut found = FoundMembership::of_object(pod, Integration::Job, OwnerKind::Job, OWNER, controller.name);
    found.incarnation = found.word(OWNER, Some(controller.uid)).into();
    found.rank = rank::completion_index(pod);
    Some(found)
}
