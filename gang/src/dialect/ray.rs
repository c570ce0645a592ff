//! Ray clusters, whether a RayCluster, a RayJob or a RayService made them: the head and the smallest number of workers of every group
//! are one gang. Workers that the autoscaler adds are members beyond the minimum.

use super::own::Own;
use super::view::OWNER;
use super::{Found, PodView, rank};
use crate::claim::OwnerKind;
use crate::key::Dialect;

const CLUSTER: &str = "ray.io/cluster";
const GROUP: &str = "ray.io/group";
const TYPE: &str = "ray.io/node-type";

/// The role of the head, which is in no group of workers.
pub(super) const HEAD: &str = "head";

/// The gang of a Ray cluster's pod.
pub(super) fn gang<'a>(pod: &PodView<'a>, _: &Own<'a>) -> Option<Found<'a>> {
    let name = pod.label(CLUSTER).filter(|name| !name.is_empty())?;
    let controller = pod.controller.filter(|controller| {
        controller.api_version.starts_with("ray.io/") && controller.kind == "RayCluster"
    })?;
    let mut found = Found::of_object(
        pod,
        Dialect::Ray,
        OwnerKind::RayCluster,
        "label ray.io/cluster",
        name,
    );
    found.incarnation = found.word(OWNER, Some(controller.uid)).into();
    found.role = match pod.label(TYPE) {
        Some("head") => HEAD,
        _ => found.word("label ray.io/group", pod.label(GROUP)),
    };
    // Only groups whose replicas are of several hosts number them.
    let replica = rank::index(
        pod.label("ray.io/worker-group-replica-index")
            .or_else(|| pod.label("ray.io/replica-index")),
    );
    let host = rank::index(pod.label("ray.io/host-index"));
    found.rank = replica
        .zip(host)
        .and_then(|(replica, host)| rank::within(replica, host));
    Some(found)
}
