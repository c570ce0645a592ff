//! The connection to the API server: reads the pods of this node with their grants, publishes the node's status and
//! Events. Kubelet is served without it; the daemon waits for an API server that is away.

mod condition;
mod cordons;
mod events;
mod mig_layouts;
mod numa;
mod pods;
mod previous_status;
mod publish;
mod quarantine;
mod status;

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{NodeName, names};
use gantry_runtime::supervise::{TaskFailure, Tasks};
use gantry_runtime::{Backoff, ConnectError, chain, policies};
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::handover::{Note, SharedHandover};
use crate::inventory::{Diagnoses, Inventory};
use crate::observe::Observations;
use gantry_runtime::LogThrottle;

use events::NodeEvents;
pub(crate) use events::report_problems;

/// Longest time without data from the API server. Watches are renewed earlier, so silence means a dead connection.
const READ_TIMEOUT: Duration = Duration::from_secs(40);

/// Pauses between attempts to reach the API server. With jitter, for all nodes lose it at the same time.
const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5)).with_jitter();

/// The cluster side of the daemon.
#[derive(Debug, Clone)]
pub struct Cluster {
    pub node: NodeName,
    /// Kubeconfig; `None` for the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// Kubeconfig for the pods; `None` to read them with the other one.
    pub pod_kubeconfig: Option<PathBuf>,
    /// Kubelet's configuration file, if its Topology Manager is to be published.
    pub kubelet_config: Option<PathBuf>,
    /// Where `/sys` is read.
    pub sys_root: PathBuf,
    /// File with MIG layouts, if GPUs are to be brought to one.
    pub mig_layouts: Option<PathBuf>,
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// What kubelet is offered of it.
    pub offered: watch::Receiver<Arc<Inventory>>,
    /// Selects the devices of each pod.
    pub handover: Arc<SharedHandover>,
    pub observed: Arc<Observations>,
    /// Problems of the GPUs.
    pub diagnoses: Diagnoses,
}

impl Cluster {
    /// Follows pods and publishes until `shutdown`.
    ///
    /// # Errors
    /// When one of the tasks panicked; all tasks end then.
    pub async fn run(
        self,
        notes: mpsc::Receiver<Note>,
        shutdown: CancellationToken,
    ) -> Result<(), TaskFailure> {
        let connected = self.connected(self.kubeconfig.as_deref());
        let Some(client) = shutdown.run_until_cancelled(connected).await else {
            return Ok(());
        };
        let mut tasks = Tasks::new(shutdown.clone());
        let (drains, drain) = watch::channel(None);
        tasks.spawn(check_policies(client.clone(), Arc::clone(&self.observed), shutdown.clone()));
        tasks.spawn(pods::follow(client.clone(), self.clone(), shutdown.clone()));
        tasks.spawn(events::publish(client.clone(), self.clone(), notes, shutdown.clone()));
        let (events, messages) = NodeEvents::channel();
        tasks.spawn(events::write_kept(client.clone(), self.clone(), messages, shutdown.clone()));
        tasks.spawn(cordons::follow(client.clone(), self.clone(), events.clone(), shutdown.clone()));
        tasks.spawn(quarantine::keep(client.clone(), self.clone(), events.clone(), shutdown.clone()));
        if let Some(file) = self.mig_layouts.clone() {
            tasks.spawn(mig_layouts::follow(client.clone(), self.clone(), (file, drains), shutdown.clone()));
        }
        tasks.spawn(condition::publish(client.clone(), self.clone(), events, shutdown.clone()));
        tasks.spawn(publish::Publisher::new(client, self, drain).run(shutdown));
        tasks.join_all().await
    }

    /// A client from this kubeconfig, or from the pod's service account, as soon as that can be used.
    async fn connected(&self, kubeconfig: Option<&Path>) -> Client {
        let mut backoff = RETRY;
        let mut unreached = LogThrottle::default();
        loop {
            match connect(kubeconfig).await {
                Ok(client) => return client,
                Err(error) => {
                    self.observed.cluster(false);
                    let pause = backoff.fail();
                    if unreached.should_log(&chain(&error), Instant::now()) {
                        warn!(
                            error = %chain(&error),
                            ?pause,
                            "cannot connect to the API server, trying again"
                        );
                    }
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }
}

async fn check_policies(client: Client, observed: Arc<Observations>, shutdown: CancellationToken) {
    let following =
        policies::follow(client, &names::PLUGIN_POLICIES, |count| observed.missing_policies(count));
    let _: Option<Infallible> = shutdown.run_until_cancelled(following).await;
}

/// A client from this kubeconfig, or from the pod's service account.
pub(crate) async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ConnectError> {
    gantry_runtime::connect(kubeconfig, READ_TIMEOUT).await
}
