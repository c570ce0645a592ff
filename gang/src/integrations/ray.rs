//! Ray clusters, whether a RayCluster, a RayJob or a RayService made them: the head and the smallest number of workers of every group
//! are one gang. Workers that the autoscaler adds are members beyond the minimum.

use super::own::Own;
use super::view::OWNER;
use super::{Found, PodView, rank};
use crate::key::Integration;
use crate::membership::OwnerKind;

const CLUSTER: &str = "ray.io/cluster";
const GROUP: &str = "ray.io/group";
const TYPE: &str = "ray.io/node-type";
const REPLICA: &str = "ray.io/worker-group-replica-index";
const HOST: &str = "ray.io/replica-host-index";

/// The role of the head, which is in no group of workers.
pub(super) const HEAD: &str = "head";

/// The gang of a Ray cluster's pod.
pub(super) fn gang<'a>(pod: &PodView<'a>, _: &Own<'a>) -> Option<Found<'a>> {
    let name = pod.label(CLUSTER).filter(|name| !name.is_empty())?;
    let controller = pod.controller.filter(|controller| {
        controller.api_version.starts_with("ray.io/") && controller.kind == "RayCluster"
    })?;
    let mut found =
        Found::of_object(pod, Integration::Ray, OwnerKind::RayCluster, "label ray.io/cluster", name);
    found.incarnation = found.word(OWNER, Some(controller.uid)).into();
    found.role = match pod.label(TYPE) {
        Some("head") => HEAD,
        _ => found.word("label ray.io/group", pod.label(GROUP)),
    };
    // KubeRay numbers the hosts only of replicas that have several. The index of a replica alone, which others have, would put it between
    // the hosts of another group's replica: groups are numbered each by itself.
    let replica = rank::index(pod.label(REPLICA));
    let host = rank::index(pod.label(HOST));
    found.rank = replica.zip(host).and_then(|(replica, host)| rank::within(replica, host));
    Some(found)
}
