//! The order of ranks where the convention itself has none: the completion index of a Job, the ordinal of a StatefulSet's pod or a
//! plain one's. Ranks are an order; they need not be consecutive.

use super::PodView;

/// Annotation, and since Kubernetes 1.28 label, of the pods of Indexed Jobs.
pub(super) const COMPLETION_INDEX: &str = "batch.kubernetes.io/job-completion-index";

/// Between the ranks of one part and the next, where parts have an order and pods an order in them. More than a part has pods.
const PART: u32 = 100_000;

/// The rank by what Kubernetes itself numbers.
pub(super) fn of(pod: &PodView<'_>) -> Option<u32> {
    completion_index(pod).or_else(|| {
        let numbered = match pod.controller {
            None => true,
            Some(controller) => controller.kind == "StatefulSet",
        };
        numbered.then(|| ordinal(pod.name)).flatten()
    })
}

/// The completion index of a Job's pod.
pub(super) fn completion_index(pod: &PodView<'_>) -> Option<u32> {
    index(pod.label(COMPLETION_INDEX).or_else(|| pod.annotation(COMPLETION_INDEX)))
}

/// An index that a controller wrote; none if it is not one.
pub(super) fn index(text: Option<&str>) -> Option<u32> {
    let text = text?;
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}

/// The place of a pod in a part that itself has a place.
pub(super) fn within(part: u32, index: u32) -> Option<u32> {
    if index >= PART {
        return None;
    }
    part.checked_mul(PART)?.checked_add(index)
}

/// `3` of `train-3`.
fn ordinal(name: &str) -> Option<u32> {
    let (_, number) = name.rsplit_once('-')?;
    // Longer numbers are hashes, not ordinals.
    index(Some(number).filter(|number| number.len() <= 5))
}
