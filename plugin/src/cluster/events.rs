//! Tells people what happened, as Events: what the hand-over noted, on the pods where a person should look into it, and what others
//! say of the Node. The log has it all anyway.

use std::collections::VecDeque;

use gantry_api::{DeviceId, NodeName, names};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::Cluster;
use crate::handover::{Note, PodName};

/// Most Events written in one go: somebody who forges grants must not flood the API server.
const MOST: usize = 20;
/// Most devices named in an Event's text.
const MOST_NAMED: usize = 16;

/// Longest text of an Event in bytes: the API server refuses a longer one.
const MOST_TEXT: usize = 1024;
/// Most texts that are remembered, so that one that comes again is counted and not written anew.
const MOST_TEXTS: usize = 16;

/// Tells of this node.
pub(super) struct Teller {
    client: Client,
    reporter: NodeName,
    /// A recorder counts all Events of one reason as one and keeps the first one's text: each text has its own. Oldest first.
    recorders: VecDeque<(Option<String>, Recorder)>,
    node: ObjectReference,
}

impl Teller {
    pub(super) fn new(client: Client, node: &NodeName) -> Self {
        Self {
            client,
            reporter: node.clone(),
            recorders: VecDeque::new(),
            node: ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(node.to_string()),
                // As kubelet's own Events have it, and as kubectl describe looks for them.
                uid: Some(node.to_string()),
                ..ObjectReference::default()
            },
        }
    }

    /// Writes one Event on the Node, and whether it could be. One that cannot be written is in the log.
    pub(super) async fn tell(&mut self, event: Event) -> bool {
        let published = self.recorder(&event).publish(&event, &self.node).await;
        if let Err(error) = &published {
            debug!(%error, reason = event.reason, note = event.note, "Event not published");
        }
        published.is_ok()
    }

    fn recorder(&mut self, event: &Event) -> Recorder {
        if let Some((_, known)) = self.recorders.iter().find(|(note, _)| *note == event.note) {
            return known.clone();
        }
        let fresh = recorder(self.client.clone(), &self.reporter);
        if self.recorders.len() >= MOST_TEXTS {
            self.recorders.pop_front();
        }
        self.recorders.push_back((event.note.clone(), fresh.clone()));
        fresh
    }
}

fn recorder(client: Client, node: &NodeName) -> Recorder {
    let reporter = Reporter {
        controller: names::PLUGIN.to_owned(),
        instance: Some(node.to_string()),
    };
    Recorder::new(client, reporter)
}

/// Publishes until `shutdown`, and does not wait then for what the API server has not answered.
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
    let recorder = recorder(client, &cluster.node);
    let mut batch = Vec::new();
    while notes.recv_many(&mut batch, 256).await > 0 {
        for (event, pod) in batch.drain(..).filter_map(|note| event(&note)).take(MOST) {
            if let Err(error) = recorder.publish(&event, &reference(&pod)).await {
                debug!(%error, reason = event.reason, pod = pod.name, "Event not published");
            }
        }
    }
}

/// The Event of a note; `None` where nobody has anything to do.
fn event(note: &Note) -> Option<(Event, PodName)> {
    let (pod, reason, action, text) = match note {
        Note::Refused { pod, refusal } => (
            pod,
            "GrantRefused",
            "ReadGrant",
            format!("the annotation {} is ignored: {refusal}", names::GRANT_ANNOTATION),
        ),
        Note::Deviated {
            pod: Some(pod),
            deviation,
        } => (
            pod,
            "AllocationDeviates",
            "Allocate",
            if deviation.granted.is_empty() {
                format!(
                    "kubelet allocated {}, no set of that size was granted",
                    list(&deviation.allocated)
                )
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
    let event = Event {
        type_: EventType::Warning,
        reason: reason.to_owned(),
        note: Some(shorten(text)),
        action: action.to_owned(),
        secondary: None,
    };
    Some((event, pod.clone()))
}

fn shorten(mut text: String) -> String {
    const CUT: &str = " ...";
    if text.len() > MOST_TEXT {
        text.truncate(text.floor_char_boundary(MOST_TEXT - CUT.len()));
        text.push_str(CUT);
    }
    text
}

fn list(devices: &[DeviceId]) -> String {
    let mut names: Vec<&str> = devices.iter().take(MOST_NAMED).map(DeviceId::as_str).collect();
    if devices.len() > MOST_NAMED {
        names.push("...");
    }
    names.join(", ")
}

fn reference(pod: &PodName) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(pod.namespace.clone()),
        name: Some(pod.name.clone()),
        uid: Some(pod.uid.to_string()),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handover::Refusal;

    #[test]
    fn a_refused_grant_says_what_is_wrong_with_it() {
        let note = Note::Refused {
            pod: PodName {
                namespace: "d".into(),
                name: "n".into(),
                uid: "u".into(),
            },
            refusal: Refusal::UnknownDevice {
                device: "GPU-9".into(),
                resource: "nvidia.com/gpu".into(),
            },
        };
        let (event, _) = event(&note).unwrap();
        assert_eq!(
            event.note.unwrap(),
            "the annotation gantry.dev/grant is ignored: device GPU-9 of nvidia.com/gpu is not on this node"
        );
    }

    #[test]
    fn no_event_is_longer_than_the_api_server_takes() {
        let note = Note::Refused {
            pod: PodName {
                namespace: "d".into(),
                name: "n".into(),
                uid: "u".into(),
            },
            refusal: Refusal::UnknownDevice {
                device: "\u{e4}".repeat(4096).as_str().into(),
                resource: "nvidia.com/gpu".into(),
            },
        };
        let (event, _) = event(&note).unwrap();
        assert!(event.note.unwrap().len() <= 1024);
    }
}
