//! Object metadata as the extender reads it.

use gantry_api::names;
use gantry_api::slim::{self, ReadsAnnotation};
use gantry_gang::integrations;
use gantry_planner::placement;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserializer;

pub(crate) use gantry_api::slim::time;

/// The annotation of pods that kubelet creates from files on its node.
pub(crate) const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// The annotation of volumes that a provisioner has made for a claim.
pub(crate) const PROVISIONED_ANNOTATION: &str = "pv.kubernetes.io/provisioned-by";

/// The grant, what marks static pods and gangs, the cordons of GPUs, and what rules of remediation did to them.
struct Read;

impl ReadsAnnotation for Read {
    fn reads(name: &str) -> bool {
        let whole = [
            names::GRANT_ANNOTATION,
            names::REMEDIATION_ANNOTATION,
            MIRROR_ANNOTATION,
            PROVISIONED_ANNOTATION,
        ];
        whole.contains(&name)
            || name.starts_with(names::CORDON_ANNOTATION_PREFIX)
            || integrations::reads(name)
            || placement::reads(name)
    }
}

/// Reads metadata for `#[serde(deserialize_with)]`.
///
/// # Errors
/// See [`slim::metadata`].
pub(crate) fn read<'de, D: Deserializer<'de>>(reader: D) -> Result<ObjectMeta, D::Error> {
    slim::metadata::<Read, D>(reader)
}
