//! Kubeflow's training jobs (PyTorchJob, TFJob, MPIJob and the like) and the MPI operator: one gang per job.

use super::own::Own;
use super::view::OWNER;
use super::{Found, PodView, rank};
use crate::key::Integration;
use crate::membership::OwnerKind;

const NAME: &str = "training.kubeflow.org/job-name";
const TYPE: &str = "training.kubeflow.org/replica-type";
const ROLE: &str = "training.kubeflow.org/job-role";
const INDEX: &str = "training.kubeflow.org/replica-index";

/// The gang of a training job's pod.
pub(super) fn gang<'a>(pod: &PodView<'a>, _: &Own<'a>) -> Option<Found<'a>> {
    let name = pod.label(NAME).filter(|name| !name.is_empty())?;
    let kind = kind(pod)?;
    let mut found =
        Found::of_object(pod, Integration::Kubeflow, kind, "label training.kubeflow.org/job-name", name);
    // The launcher of an MPIJob is the pod of a Job of its own and does not know the MPIJob's UID: there all go without.
    if let Some(controller) = pod.controller.filter(|_| kind != OwnerKind::MpiJob) {
        found.incarnation = found.word(OWNER, Some(controller.uid)).into();
    }
    let role = pod.label(TYPE).or_else(|| pod.label(ROLE));
    found.role = found.word("label training.kubeflow.org/replica-type", role);
    let index = rank::index(pod.label(INDEX));
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

fn kind(pod: &PodView<'_>) -> Option<OwnerKind> {
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
    let launcher = controller.kind == "Job" && pod.label(ROLE) == Some("launcher");
    launcher.then_some(OwnerKind::MpiJob)
}
