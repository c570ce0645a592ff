//! Events of the plugin: on the Node, and on pods whose grant or allocation the user should look into.

use gantry_api::{DeviceId, NodeName, Reason, names};
use gantry_runtime::events::{self, EventRecorder, EventWriter, Message};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::Cluster;
use crate::handover::{Note, PodName};

/// Events of pods written at once: a user who forges grants must not flood the API server.
const BURST: u32 = 20;
/// Events of pods written per second after those.
const PER_SECOND: u32 = 5;
/// Most devices named in an Event.
const MOST_NAMED: usize = 16;

/// Records Events on the Node.
pub(super) struct NodeEventRecorder {
    recorder: EventRecorder,
    node: ObjectReference,
}

impl NodeEventRecorder {
    pub(super) fn new(client: Client, node: &NodeName) -> Self {
        Self {
            recorder: recorder(client, node),
            // kubelet's own Events have the name as UID, and kubectl describe looks for that.
            node: events::cluster_object(("v1", "Node"), node.as_str(), node.as_str()),
        }
    }

    /// Writes an Event; returns whether it is there.
    pub(super) async fn record(&mut self, message: Message) -> bool {
        self.recorder.record(self.node.clone(), message).await
    }
}

fn recorder(client: Client, node: &NodeName) -> EventRecorder {
    EventRecorder::new(client, names::PLUGIN, node.as_str())
}

/// Writes the Events of `notes` until `shutdown`, without waiting then for responses of the API server.
pub(super) async fn publish(
    client: Client,
    cluster: Cluster,
    notes: mpsc::Receiver<Note>,
    shutdown: CancellationToken,
) {
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = follow(client, cluster, notes) => {}
    }
}

async fn follow(client: Client, cluster: Cluster, mut notes: mpsc::Receiver<Note>) {
    let mut writer = EventWriter::new(recorder(client, &cluster.node), BURST, PER_SECOND);
    loop {
        let due = writer.due();
        tokio::select! {
            note = notes.recv() => {
                let Some(note) = note else { return };
                if let Some((message, pod)) = message(&note) {
                    let pod = events::object(("v1", "Pod"), &pod.namespace, &pod.name, pod.uid.as_str());
                    writer.write(pod, message).await;
                }
            }
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => writer.retry().await,
        }
    }
}

/// The Event of a note and its pod; `None` if the user has nothing to do.
fn message(note: &Note) -> Option<(Message, PodName)> {
    let (pod, reason, action, text) = match note {
        Note::Refused { pod, refusal } => (
            pod,
            Reason::GrantRefused,
            "ReadGrant",
            format!("the annotation {} is ignored: {refusal}", names::GRANT_ANNOTATION),
        ),
        Note::Deviated { pod: Some(pod), deviation } => (
            pod,
            Reason::AllocationDeviates,
            "Allocate",
            if deviation.granted.is_empty() {
                format!("kubelet allocated {}, no set of that size was granted", list(&deviation.allocated))
            } else {
                format!(
                    "kubelet allocated {}, granted was {}",
                    list(&deviation.allocated),
                    list(&deviation.granted)
                )
            },
        ),
        Note::Deviated { pod: None, .. }
        | Note::Swapped { .. }
        | Note::Quarantined { .. }
        | Note::Released { .. } => return None,
    };
    let message = Message { reason, action, warning: true, note: text };
    Some((message, pod.clone()))
}

fn list(devices: &[DeviceId]) -> String {
    let mut names: Vec<&str> = devices.iter().take(MOST_NAMED).map(DeviceId::as_str).collect();
    if devices.len() > MOST_NAMED {
        names.push("...");
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handover::GrantRefusal;

    #[test]
    fn refused_grant_names_its_fault() {
        let note = Note::Refused {
            pod: PodName { namespace: "d".into(), name: "n".into(), uid: "u".into() },
            refusal: GrantRefusal::UnknownDevice {
                device: "GPU-9".into(),
                resource: "nvidia.com/gpu".into(),
            },
        };
        let (message, _) = message(&note).unwrap();
        assert_eq!(
            message.note,
            "the annotation gantry.dev/grant is ignored: device GPU-9 of nvidia.com/gpu is not on this node"
        );
    }
}
