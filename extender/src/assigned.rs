//! Publishes on each pod which devices it was granted, and why this node. The annotation of the Binding has the same,
//! so an Event that cannot be written in time is dropped.

use std::sync::Arc;
use std::time::Duration;

use gantry_api::{Placement, Reason};
use gantry_runtime::events::EventWriter;
use kube::Client;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::event;
use crate::index::Target;
use crate::metrics::{Metrics, Outcome};

/// Placements that wait to be published.
const WAITING: usize = 512;
/// Events written at once, and per second after those: binds come in bursts, and the API server has other work then.
const BURST: u32 = 256;
const PER_SECOND: u32 = 20;
/// Longest wait between two looks at the Events that are due.
const LOOK: Duration = Duration::from_secs(1);

/// A pod that was bound, and why there.
type AssignedPod = (Target, Arc<Placement>);

/// Queues placements.
#[derive(Debug, Clone)]
pub(crate) struct Assignments(Sender<AssignedPod>);

/// The receiving end of [`Assignments`].
#[derive(Debug)]
pub(crate) struct Mailbox(Receiver<AssignedPod>);

impl Assignments {
    pub(crate) fn new() -> (Self, Mailbox) {
        let (sender, receiver) = channel(WAITING);
        (Self(sender), Mailbox(receiver))
    }

    /// Queues the placement of a pod whose Binding exists.
    pub(crate) fn publish(&self, target: &Target, placement: &Arc<Placement>) {
        // If the queue is full it is dropped: the annotation states the same.
        let _ = self.0.try_send((target.clone(), Arc::clone(placement)));
    }
}

#[cfg(test)]
impl Mailbox {
    /// What has come so far, one at a time.
    pub(crate) fn next(&mut self) -> Option<AssignedPod> {
        self.0.try_recv().ok()
    }
}

/// Writes Events until `shutdown`.
pub(crate) async fn run(
    client: Client,
    mut mailbox: Mailbox,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) {
    let mut writer = EventWriter::new(event::recorder(client), BURST, PER_SECOND);
    loop {
        let look = Instant::now() + LOOK;
        let until = writer.due().map_or(look, |due| due.min(look));
        // A writer that is full takes no more: the queue then drops what comes.
        let next = async {
            match writer.is_full() {
                true => std::future::pending().await,
                false => mailbox.0.recv().await,
            }
        };
        let Some(received) = shutdown.run_until_cancelled(tokio::time::timeout_at(until, next)).await else {
            return;
        };
        match received {
            Ok(None) => return,
            Ok(Some((target, placement))) => {
                let pod = event::pod(&target.namespace, &target.name, target.uid.as_str());
                let note = placement.on(&target.node);
                writer.write(pod, event::message(Reason::GpusAssigned, false, note)).await;
            }
            Err(_) => {}
        }
        writer.retry().await;
        let (published, failed) = writer.take_counts();
        for (outcome, count) in [("published", published), ("failed", failed)] {
            metrics.events.get_or_create(&Outcome { outcome }).inc_by(count);
        }
    }
}
