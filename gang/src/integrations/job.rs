//! A batch Job with pods that ask to be a gang. No other Job is one: that its pods run at once does not mean that they need each other.

use super::own::Own;
use super::view::OWNER;
use super::{Found, PodView, rank};
use crate::key::Integration;
use crate::membership::OwnerKind;

/// The gang of a Job's pod that says a minimum and names no gang.
pub(super) fn gang<'a>(pod: &PodView<'a>, own: &Own<'a>) -> Option<Found<'a>> {
    own.min?;
    let controller = pod
        .controller
        .filter(|controller| controller.kind == "Job" && controller.api_version.starts_with("batch/"))?;
    let mut found = Found::of_object(pod, Integration::Job, OwnerKind::Job, OWNER, controller.name);
    found.incarnation = found.word(OWNER, Some(controller.uid)).into();
    found.rank = rank::completion_index(pod);
    Some(found)
}
