//! Tells people what happened, as Events: what the hand-over noted, on the pods where a person should look into it, and what others
//! say of the Node. The log has it all anyway.

use std::collections::VecDeque;
use std::time::Duration;

use gantry_api::{DeviceId, NodeName, names};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{Cluster, Pauses};
use crate::handover::{Note, PodName};

/// Most Events written in one batch, so that forged grants cannot flood the API server.
const MOST: usize = 20;
/// Most devices named in an Event's text.
const MOST_NAMED: usize = 16;

/// Longest text of an Event in bytes: the API server refuses a longer one.
const MOST_TEXT: usize = 1024;
/// Most texts that are remembered, so that a repeated one is counted instead of written again.
const MOST_TEXTS: usize = 16;
/// How often at most an Event is sent that the API server does not take just now.
const TRIES: usize = 5;
/// After this time it is not sent again: others wait behind it.
const PATIENCE: Duration = Duration::from_secs(10);

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
        let published = publish_one(&self.recorder(&event), &event, &self.node).await;
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

/// Writes an Event. An API server that has too much to do, or is away for a moment, is asked again a few times.
async fn publish_one(recorder: &Recorder, event: &Event, of: &ObjectReference) -> Result<(), kube::Error> {
    let begun = Instant::now();
    let mut pauses = Pauses::default();
    for _ in 1..TRIES {
        match recorder.publish(event, of).await {
            Err(error) if may_pass(&error) && begun.elapsed() < PATIENCE => {
                debug!(%error, reason = event.reason, "Event not published yet");
                tokio::time::sleep(pauses.next()).await;
            }
            published => return published,
        }
    }
    recorder.publish(event, of).await
}

/// Whether an error may be gone in a moment.
fn may_pass(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(answer) => matches!(answer.code, 429 | 503 | 504),
        kube::Error::HyperError(_) | kube::Error::Service(_) => true,
        _ => false,
    }
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
            if let Err(error) = publish_one(&recorder, &event, &reference(&pod)).await {
                debug!(%error, reason = event.reason, pod = pod.name, "Event not published");
            }
        }
    }
}

/// The Event of a note; `None` if no action is needed.
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;
    use tower_test::mock;

    use super::*;
    use crate::handover::GrantRefusal;

    /// Whether an Event is told to an API server that answers with these codes, one after the other and the last for ever, and how
    /// often it is sent. 0: a connection that breaks.
    async fn told(codes: &'static [u16]) -> (bool, usize) {
        let (service, mut api) = mock::pair::<Request<Body>, Response<Body>>();
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Some((request, send)) = api.next_request().await {
                let at = counted.fetch_add(1, Ordering::SeqCst).min(codes.len() - 1);
                let answer = match codes[at] {
                    201 => request.into_body().collect_bytes().await.unwrap(),
                    0 => {
                        send.send_error("connection reset");
                        continue;
                    }
                    code => json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code})
                        .to_string()
                        .into(),
                };
                let answer = Body::from(answer.to_vec());
                send.send_response(Response::builder().status(codes[at]).body(answer).unwrap());
            }
        });
        let mut teller = Teller::new(Client::new(service, "default"), &"node-1".into());
        let event = Event {
            type_: EventType::Warning,
            reason: "GpuUnhealthy".to_owned(),
            note: None,
            action: "CheckHealth".to_owned(),
            secondary: None,
        };
        (teller.tell(event).await, asked.load(Ordering::SeqCst))
    }

    #[tokio::test]
    async fn rejected_event_is_retried_a_few_times() {
        assert_eq!(told(&[201]).await, (true, 1));
        assert_eq!(told(&[429, 503, 504, 201]).await, (true, 4));
        assert_eq!(told(&[0, 201]).await, (true, 2), "a connection that breaks");
        assert_eq!(told(&[503]).await, (false, TRIES));
        assert_eq!(told(&[403, 201]).await, (false, 1), "it stays forbidden");
    }

    #[test]
    fn a_refused_grant_says_what_is_wrong_with_it() {
        let note = Note::Refused {
            pod: PodName {
                namespace: "d".into(),
                name: "n".into(),
                uid: "u".into(),
            },
            refusal: GrantRefusal::UnknownDevice {
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
            refusal: GrantRefusal::UnknownDevice {
                device: "\u{e4}".repeat(4096).as_str().into(),
                resource: "nvidia.com/gpu".into(),
            },
        };
        let (event, _) = event(&note).unwrap();
        assert!(event.note.unwrap().len() <= 1024);
    }
}
