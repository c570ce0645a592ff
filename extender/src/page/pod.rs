//! A pod's decision for `/api/v1/pods/{namespace}/{name}`: where it is and why, or why it waits.

use std::sync::Arc;
use std::time::Duration;

use gantry_api::placement::ComparedNode;
use gantry_api::{DeviceId, NodeName, Placement, Reason, names};
use gantry_runtime::chain;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use serde::Serialize;

use crate::explain;
use crate::index::{PodObservation, Store};
use crate::pod::PodFacts;

/// Longest time to read a pod's annotation.
const READ: Duration = Duration::from_secs(3);

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodReport {
    namespace: Arc<str>,
    name: Arc<str>,
    /// What it asks for: `4 nvidia.com/gpu`.
    asks: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    gang: Option<Arc<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bound: Option<BoundReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    waits: Option<Waits>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BoundReport {
    node: NodeName,
    devices: Vec<DeviceId>,
    /// The devices as text: `GPU 0-3`.
    words: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    placement: Option<PlacementReport>,
    /// Why there is no placement.
    #[serde(skip_serializing_if = "Option::is_none")]
    unexplained: Option<String>,
}

/// The annotation `gantry.dev/placement`, with its texts.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PlacementReport {
    devices: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compared: Option<String>,
    others: Vec<String>,
    /// The same with the numbers that were compared.
    values: Vec<ComparedNode>,
    /// Where the gang of a member was placed, and why there.
    #[serde(skip_serializing_if = "Option::is_none")]
    gang: Option<String>,
}

/// Why a pod is not bound.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Waits {
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<Reason>,
    message: String,
    /// The node of its reservation.
    #[serde(skip_serializing_if = "Option::is_none")]
    reserved_on: Option<NodeName>,
}

/// The report about a pod. Reads the annotation of one that is bound from the API server.
pub(super) async fn report(store: &Store, client: &Client, found: PodObservation) -> PodReport {
    let PodObservation { pod, bound, gang, waits, reserved_on, other_scheduler } = found;
    let asks = match &pod.request {
        Ok(request) => {
            let asks = request.asks.iter().map(|ask| format!("{} {}", ask.devices, ask.resource));
            asks.collect::<Vec<_>>().join(", ")
        }
        Err(error) => error.to_string(),
    };
    let (bound, waits) = match bound {
        Some(bound) => {
            let (placement, unexplained) = match placement(client, &pod).await {
                Ok(placement) => (Some(placement), None),
                Err(why) => (None, Some(why)),
            };
            let (node, devices, words) = (bound.node, bound.devices, bound.words);
            (Some(BoundReport { node, devices, words, placement, unexplained }), None)
        }
        None => {
            let (reason, message) = match (waits, other_scheduler) {
                (_, Some(scheduler)) => {
                    (None, format!("scheduler {scheduler:?} places it, which does not call Gantry"))
                }
                (Some(waits), None) => (Some(waits.reason), waits.message.to_string()),
                (None, None) => (None, unplaced(store, &pod)),
            };
            (None, Some(Waits { reason, message, reserved_on }))
        }
    };
    PodReport {
        namespace: Arc::clone(&pod.namespace),
        name: Arc::clone(&pod.name),
        asks,
        gang: gang.map(|gang| gang.to_string().into()),
        bound,
        waits,
    }
}

/// Why a pod without a gang is not bound, by the snapshot.
fn unplaced(store: &Store, pod: &PodFacts) -> String {
    match &pod.request {
        Err(error) => format!("it is not placed: {error}"),
        Ok(request) => {
            let snapshot = store.snapshot();
            store
                .read(|index| explain::why_unplaced(index, &snapshot, request, &pod.needs))
                .unwrap_or_else(|| "it asks for no devices that Gantry manages".to_owned())
        }
    }
}

/// The annotation of a pod, or why there is none.
async fn placement(client: &Client, pod: &PodFacts) -> Result<PlacementReport, String> {
    let api = Api::<Pod>::namespaced(client.clone(), &pod.namespace);
    let read = tokio::time::timeout(READ, api.get_metadata_opt(&pod.name)).await;
    let read = read.map_err(|_| "the API server does not respond".to_owned())?;
    let found = read.map_err(|error| format!("the pod cannot be read: {}", chain(&error)))?;
    let found = found.filter(|found| found.metadata.uid.as_deref() == Some(pod.uid.as_str()));
    let annotations = found.ok_or("the pod is gone")?.metadata.annotations.unwrap_or_default();
    let text = annotations.get(names::PLACEMENT_ANNOTATION);
    let text = text.ok_or_else(|| format!("the pod has no annotation {}", names::PLACEMENT_ANNOTATION))?;
    let placement: Placement = serde_json::from_str(text)
        .map_err(|error| format!("annotation {} cannot be read: {error}", names::PLACEMENT_ANNOTATION))?;
    // Users may write annotations of their pods.
    let placement = Placement::new(placement.devices, placement.compared).of_gang(placement.gang);
    let Placement { devices, compared, gang } = placement;
    let others = compared.iter().flat_map(|compared| &compared.others);
    Ok(PlacementReport {
        devices,
        others: others.map(ToString::to_string).collect(),
        compared: compared.as_ref().map(ToString::to_string),
        gang: gang.map(|gang| match &gang.level {
            Some(level) => {
                let next = level.others.first().map(|next| format!("; next {next}")).unwrap_or_default();
                format!("{gang}: {level}{next}")
            }
            None => gang.to_string(),
        }),
        values: compared.map(|compared| compared.others).unwrap_or_default(),
    })
}
