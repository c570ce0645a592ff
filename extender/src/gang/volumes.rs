//! Watches PersistentVolumeClaims and PersistentVolumes, so that gangs are planned on nodes that can reach theirs.
//! Updates the index; decides nothing.

use std::sync::{Arc, Mutex, PoisonError};

use gantry_gang::needs::{NodeTerm, Requirement};
use k8s_openapi::api::core::v1::{
    NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume, PersistentVolumeClaim,
};
use kube::{Api, Client};
use serde::Deserialize;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::listed::{Change, LogTexts, follow};
use crate::index::{Store, Volume, VolumeClaim};
use crate::metadata::PROVISIONED_ANNOTATION;
use crate::object_memory::Kind;
use crate::partial_object::PartialObject;
use crate::pod;

/// Watches until `shutdown`. Without the permission, gangs are planned as if every node could reach their volumes.
pub async fn run(client: Client, store: Arc<Store>, shutdown: CancellationToken) {
    const WITHOUT: &str = "gangs are planned as if their volumes could be reached from every node; manifests/extender.yaml gives that right";
    let claims = follow(
        Api::<PartialObject<PersistentVolumeClaim>>::all(client.clone()),
        (Kind::Claim, store.memory()),
        LogTexts { what: "claims of volumes", without: WITHOUT },
        |claim| {
            let text = |field: &str| claim.spec.get(field)?.as_str().filter(|text| !text.is_empty());
            let waits = || Some(VolumeClaim::Waiting(text("storageClassName")?.into()));
            // A selector chooses among the volumes of the class.
            let any = claim.spec.get("selector").is_none_or(Value::is_null);
            let bound = text("volumeName").map(|volume| VolumeClaim::Bound(volume.into()));
            bound.or_else(|| any.then(waits).flatten())
        },
        |_| None,
        |change| {
            store.update(|index| match change {
                Change::All(claims) => {
                    let claims = claims.into_iter();
                    index.volume_claims_listed(claims.map(|(claim, volume)| (claim, Some(volume))).collect());
                }
                Change::Is(claim, volume) => index.volume_claim_seen(claim, Some(volume)),
                Change::Gone(claim) => index.volume_claim_seen(claim, None),
            });
        },
        shutdown.clone(),
    );
    let words = Mutex::new(pod::TextInterner::default());
    let volumes = follow(
        Api::<PartialObject<PersistentVolume>>::all(client),
        (Kind::Volume, store.memory()),
        LogTexts { what: "volumes", without: WITHOUT },
        |volume| {
            let required = volume.spec.get("nodeAffinity")?.get("required")?;
            let required = NodeSelector::deserialize(required).ok()?;
            let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
            let terms = required.node_selector_terms.iter();
            let terms: Vec<NodeTerm> = terms.map(|term| read(term, &mut words)).collect();
            Some(Volume { reach: Some(Arc::new(terms)), free_of: free_local_class(volume) })
        },
        |_| None,
        |change| {
            store.update(|index| match change {
                Change::All(volumes) => {
                    let volumes = volumes.into_iter();
                    index.volumes_listed(volumes.map(|((_, name), reach)| (name, Some(reach))));
                }
                Change::Is((_, volume), reach) => index.volume_seen(volume, Some(reach)),
                Change::Gone((_, volume)) => index.volume_seen(volume, None),
            });
        },
        shutdown.clone(),
    );
    tokio::join!(claims, volumes);
}

/// The class of a local volume that no claim has and that no provisioner has made.
fn free_local_class(volume: &PartialObject<PersistentVolume>) -> Option<Arc<str>> {
    let spec = |field: &str| volume.spec.get(field).filter(|value| !value.is_null());
    let annotations = volume.metadata.annotations.as_ref();
    let provisioned = annotations.is_some_and(|annotations| annotations.contains_key(PROVISIONED_ANNOTATION));
    let free = spec("local").is_some() && spec("claimRef").is_none() && !provisioned;
    let class = spec("storageClassName")?.as_str().filter(|class| free && !class.is_empty())?;
    Some(class.into())
}

fn read(term: &NodeSelectorTerm, words: &mut pod::TextInterner) -> NodeTerm {
    let mut all = |requirements: &Option<Vec<NodeSelectorRequirement>>| {
        let requirements = requirements.iter().flatten();
        requirements.map(|requirement| read_one(requirement, words)).collect()
    };
    NodeTerm { labels: all(&term.match_expressions), names: all(&term.match_fields) }
}

fn read_one(written: &NodeSelectorRequirement, words: &mut pod::TextInterner) -> Requirement {
    let values = written.values.iter().flatten();
    pod::requirement(&written.key, &written.operator, values, words)
}
