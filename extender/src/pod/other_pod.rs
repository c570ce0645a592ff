//! What is kept of a pod that asks for nothing that is watched: what it takes of its node, and what concerns others. Small, for there
//! are many.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::PodUid;
use gantry_gang::needs::{HostPort, PodTerm};
use gantry_gang::protocol::Stage;
use gantry_gang::{Membership, Resources};
use gantry_planner::placement::WrittenRequest;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::reader::Reader;
use super::{SlimPod, membership, stage};
use crate::metadata::MIRROR_ANNOTATION;

/// A pod that asks for nothing that is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherPod {
    /// Its UID.
    pub uid: PodUid,
    /// Its name.
    pub name: Arc<str>,
    /// How far it is, and where.
    pub stage: Stage,
    /// What it takes of its node.
    pub load: Arc<Resources>,
    /// Its namespace, and what concerns others.
    pub profile: Arc<PodProfile>,
    /// `spec.priority`.
    pub priority: i32,
    /// Whether others may be stopped for its gang: its `preemptionPolicy` is not `Never`.
    pub preempts: bool,
    /// When it was created, in seconds since 1970.
    pub created: i64,
    /// It is being deleted.
    pub leaving: bool,
    /// While it is: when it has to be gone, its grace period being over, in seconds since 1970.
    pub ends: Option<i64>,
    /// What it declares of its gang.
    pub membership: Option<Arc<Membership>>,
    /// The annotations that request something of devices, though it asks for none.
    pub written: Arc<WrittenRequest>,
    /// It is part of its node: a static pod, or one of a DaemonSet. Stopped, it would be there again.
    pub stays: bool,
}

/// What of a pod concerns others near it. Pods of one controller share one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct PodProfile {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its labels.
    pub labels: BTreeMap<Arc<str>, Arc<str>>,
    /// Pods it must not share a domain with.
    pub apart_from: Vec<PodTerm>,
    /// The host's ports that it takes.
    pub host_ports: Vec<HostPort>,
}

fn stays(metadata: &ObjectMeta) -> bool {
    let mut owners = metadata.owner_references.iter().flatten();
    let mut annotations = metadata.annotations.iter().flatten();
    owners.any(|owner| matches!(&*owner.kind, "DaemonSet" | "Node"))
        || annotations.any(|(name, _)| name == MIRROR_ANNOTATION)
}

impl Reader {
    pub(super) fn other_pod(&mut self, pod: SlimPod) -> Option<OtherPod> {
        let profile = self.profile_of(&pod);
        let load = pod.spec.load(pod.status.as_ref(), &self.watched);
        Some(OtherPod {
            stays: stays(&pod.metadata),
            written: super::written(&pod.metadata),
            stage: stage(&pod),
            membership: membership(&pod),
            load: self.loads.one(load),
            profile,
            priority: pod.spec.priority,
            preempts: pod.spec.preempts(),
            created: super::seconds(&pod.metadata),
            leaving: pod.metadata.deletion_timestamp.is_some(),
            ends: pod.metadata.deletion_timestamp.map(|time| time.0.as_second()),
            uid: pod.metadata.uid?.into(),
            name: pod.metadata.name.unwrap_or_default().into(),
        })
    }

    pub(super) fn profile_of(&mut self, pod: &SlimPod) -> Arc<PodProfile> {
        let words = &mut self.words;
        let labels = pod.metadata.labels.iter().flatten();
        let profile = PodProfile {
            namespace: words.of(pod.metadata.namespace.as_deref().unwrap_or_default()),
            labels: labels.map(|(key, value)| (words.of(key), words.of(value))).collect(),
            apart_from: pod.spec.apart_from(words),
            host_ports: pod.spec.host_ports(words),
        };
        self.profiles.one(profile)
    }
}
