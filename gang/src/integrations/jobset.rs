//! JobSet, and what is made of it, such as Kubeflow's TrainJob: one gang per JobSet and restart. Its controller puts all that is needed
//! on the pods, but for the number of pods of a job: that stands in the JobSet.

use super::own::Own;
use super::value::{self, MOST_MEMBERS, number};
use super::{Found, PodView, rank};
use crate::key::Integration;
use crate::membership::{OwnerKind, Size};

const NAME: &str = "jobset.sigs.k8s.io/jobset-name";
const UID: &str = "jobset.sigs.k8s.io/jobset-uid";
const ATTEMPT: &str = "jobset.sigs.k8s.io/restart-attempt";
const REPLICATED_JOB: &str = "jobset.sigs.k8s.io/replicatedjob-name";
const REPLICAS: &str = "jobset.sigs.k8s.io/replicatedjob-replicas";
pub(super) const EXCLUSIVE: &str = "alpha.jobset.sigs.k8s.io/exclusive-topology";
pub(super) const BY_SELECTOR: &str = "alpha.jobset.sigs.k8s.io/node-selector";

/// What [`crate::membership::OwnerRef::part`] ends with where only the followers of a replicated job are meant.
pub(super) const FOLLOWERS: &str = "/followers";

/// The gang of a JobSet's pod.
pub(super) fn gang<'a>(pod: &PodView<'a>, _: &Own<'a>) -> Option<Found<'a>> {
    let word = |name| pod.label(name).or_else(|| pod.annotation(name));
    let place = |name| match pod.label(name) {
        Some(_) => format!("label {name}"),
        None => format!("annotation {name}"),
    };
    let name = word(NAME).filter(|name| !name.is_empty())?;
    let mut found = Found::of_object(pod, Integration::JobSet, OwnerKind::JobSet, &place(NAME), name);
    let uid = found.word(&place(UID), word(UID));
    let attempt = found.word(&place(ATTEMPT), word(ATTEMPT).or(Some("0")));
    found.incarnation = if uid.is_empty() { attempt.into() } else { format!("{uid}/{attempt}").into() };
    found.role = found.word(&place(REPLICATED_JOB), word(REPLICATED_JOB));
    let index = rank::completion_index(pod);
    let job = rank::index(
        word("jobset.sigs.k8s.io/job-global-index").or_else(|| word("jobset.sigs.k8s.io/job-index")),
    );
    found.rank = rank::within(job.unwrap_or(0), index.unwrap_or(0)).filter(|_| job.or(index).is_some());
    if let Some(label) = pod.annotation(EXCLUSIVE).filter(|label| !label.is_empty()) {
        found.options.hint = value::hint(label, None);
        if pod.annotation(BY_SELECTOR).is_none() {
            // JobSet's webhook lets the followers of a job in only when its leader has a node, and pins them to the leader's domain: the
            // leaders are one gang, and the followers that come then are another.
            if index == Some(0) {
                found.name = format!("{}/{}/leaders", found.name, found.role).into();
                found.owner = None;
                match number(format!("label {REPLICAS}"), word(REPLICAS).unwrap_or("1"), 1..=MOST_MEMBERS) {
                    Ok(jobs) => {
                        found.size = Size::Stated { min: jobs, total: Some(jobs) };
                        found.size_said = "label jobset.sigs.k8s.io/replicatedjob-replicas";
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
