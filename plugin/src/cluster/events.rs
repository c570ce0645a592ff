//! Events of the plugin: on the Node, among them a wrong configuration, and on pods with a refused grant or another
//! allocation than granted.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::{DeviceId, NodeName, ObjectMessage, Reason, names};
use gantry_config::source::Report;
use gantry_runtime::chain;
use gantry_runtime::events::{self, EventRecorder, EventWriter, KeptEvents, Message};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{Cluster, RETRY, connect};
use crate::handover::{Note, PodName};

/// Events written at once: forged grants must not flood the API server, nor may the Events of all nodes when it returns.
const BURST: u32 = 20;
/// Events written per second after those.
const PER_SECOND: u32 = 5;
/// Most Events on the Node that wait for an API server that is away: of 16 GPUs, as many as the largest machine has, each with
/// 7 MIG instances, every GPU and every instance becomes unhealthy and recovers. Some hundred KiB.
const MAX_KEPT: usize = 16 * (1 + 7) * 2;
/// Most devices of a set that an Event names; `GpuNode.status.deviations` has all.
const MOST_NAMED: usize = 2;

/// Reports Events on the Node that an API server that is away must not lose: of health and of cordons.
#[derive(Debug, Clone)]
pub(super) struct NodeEvents(mpsc::UnboundedSender<Message>);

impl NodeEvents {
    /// The receiver is for [`write_kept`], which takes Events at once and bounds those that wait.
    pub(super) fn channel() -> (Self, mpsc::UnboundedReceiver<Message>) {
        let (send, messages) = mpsc::unbounded_channel();
        (Self(send), messages)
    }

    /// Has an Event written, now or when the API server responds.
    pub(super) fn report(&self, message: Message) {
        // The writer ends with the daemon only.
        drop(self.0.send(message));
    }
}

/// Writes the Events of [`NodeEvents`] until `shutdown`.
pub(super) async fn write_kept(
    client: Client,
    cluster: Cluster,
    mut messages: mpsc::UnboundedReceiver<Message>,
    shutdown: CancellationToken,
) {
    let mut kept = KeptEvents::new(recorder(client, &cluster.node), MAX_KEPT, BURST, PER_SECOND);
    let node = node(&cluster.node);
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            message = messages.recv() => match message {
                Some(message) => kept.add(node.clone(), message),
                None => return,
            },
            written = kept.write_next() => cluster.observed.events(written),
        }
    }
}

/// Records Events on the Node.
pub(super) struct NodeEventRecorder {
    recorder: EventRecorder,
    node: ObjectReference,
}

impl NodeEventRecorder {
    pub(super) fn new(client: Client, node: &NodeName) -> Self {
        Self { recorder: recorder(client, node), node: self::node(node) }
    }

    /// Writes an Event; returns whether it is there.
    pub(super) async fn record(&mut self, message: Message) -> bool {
        self.recorder.record(self.node.clone(), message).await
    }
}

/// The Node that Events are about.
fn node(name: &NodeName) -> ObjectReference {
    // kubelet's own Events have the name as UID, and kubectl describe looks for that.
    events::cluster_object(("v1", "Node"), name.as_str(), name.as_str())
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
        match writer.take_counts() {
            (_, 1..) => cluster.observed.events(false),
            (1.., 0) => cluster.observed.events(true),
            (0, 0) => {}
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
    let message = Message { reason, action, warning: true, note: ObjectMessage::new(text) };
    Some((message, pod.clone()))
}

fn list(devices: &[DeviceId]) -> String {
    let mut names: Vec<&str> = devices.iter().take(MOST_NAMED).map(DeviceId::as_str).collect();
    if devices.len() > MOST_NAMED {
        names.push("...");
    }
    names.join(", ")
}

/// Shortest interval of two Events, for a file with a changing problem.
const MIN_INTERVAL: Duration = Duration::from_secs(5);

/// Reports until `shutdown`, or until the sender of reports is gone.
pub(crate) async fn report_problems(
    node: NodeName,
    kubeconfig: Option<PathBuf>,
    mut reports: watch::Receiver<Report>,
    shutdown: CancellationToken,
) {
    let report = async {
        let mut reported: Option<Arc<str>> = None;
        let mut recorder: Option<NodeEventRecorder> = None;
        let mut backoff = RETRY;
        loop {
            let report = reports.borrow_and_update().clone();
            if let Some(problem) = report.problem.as_ref().filter(|now| reported.as_ref() != Some(now)) {
                if recorder.is_none() {
                    recorder = connected(&node, kubeconfig.as_deref()).await;
                }
                let message = config_message(problem, report.loads > 0);
                if let Some(recorder) = &mut recorder
                    && recorder.record(message).await
                {
                    reported = report.problem;
                    backoff.reset();
                    tokio::time::sleep(MIN_INTERVAL).await;
                } else {
                    // While the API server was away the problem may have changed or been solved.
                    tokio::time::sleep(backoff.fail()).await;
                }
                continue;
            }
            reported = report.problem;
            if reports.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = report => {}
    }
}

async fn connected(node: &NodeName, kubeconfig: Option<&Path>) -> Option<NodeEventRecorder> {
    match connect(kubeconfig).await {
        Ok(client) => Some(NodeEventRecorder::new(client, node)),
        Err(error) => {
            debug!(error = %chain(&error), "cannot connect to the API server to report the configuration");
            None
        }
    }
}

fn config_message(problem: &str, serves: bool) -> Message {
    let consequence = match serves {
        true => "the last valid configuration stays in effect",
        false => "no GPU is served until it is corrected",
    };
    let note = ObjectMessage::new(format!("{consequence}: {problem}"));
    Message { reason: Reason::ConfigInvalid, action: "ReadConfig", warning: true, note }
}

#[cfg(test)]
mod tests {
    use crate::handover::GrantRefusal;
    use gantry_api::MAX_MESSAGE;

    use super::*;

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
        assert_eq!(message.reason, Reason::GrantRefused);
        assert!(message.note.contains("GPU-9"), "{}", message.note);
    }

    #[test]
    fn config_event_is_bounded() {
        let message = config_message(&"\u{e4}".repeat(4096), false);
        assert_eq!(message.reason, Reason::ConfigInvalid);
        assert!(message.note.len() <= MAX_MESSAGE, "{} bytes", message.note.len());
    }
}
