//! What is said with the API server: the pods of this node with their grants come in, the node's account and Events go out.
//! Nothing here is needed to serve kubelet; an API server that is away is waited for.

mod condition;
mod config;
mod earlier;
mod events;
mod pods;
mod publish;
mod quarantine;
mod status;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gantry_api::NodeName;
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::warn;

use crate::handover::{Desk, Note};
use crate::inventory::{Inventory, Sickbay};
use crate::observe::Observed;

pub(crate) use config::tell_of_problems;

/// Longest time without a byte from the API server. Watches are renewed before that, so that silence means a dead connection.
const SILENCE: Duration = Duration::from_secs(40);
/// Longest time to connect.
const CONNECT: Duration = Duration::from_secs(5);

/// The cluster side of the daemon.
#[derive(Debug, Clone)]
pub struct Cluster {
    /// This node.
    pub node: NodeName,
    /// Kubeconfig; `None` for the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// The devices.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// Who gets which.
    pub desk: Arc<Desk>,
    /// Readiness.
    pub observed: Arc<Observed>,
    /// What is wrong with the GPUs.
    pub sickbay: Sickbay,
}

impl Cluster {
    /// Follows pods and publishes until `shutdown`.
    pub async fn run(self, notes: mpsc::Receiver<Note>, shutdown: CancellationToken) {
        let mut pauses = Pauses::default();
        let client = loop {
            match connect(self.kubeconfig.as_deref()).await {
                Ok(client) => break client,
                Err(error) => {
                    self.observed.cluster(false);
                    let pause = pauses.next();
                    warn!(
                        error = &error as &dyn std::error::Error,
                        ?pause,
                        "no way to the API server, trying again"
                    );
                    tokio::select! {
                        () = shutdown.cancelled() => return,
                        () = tokio::time::sleep(pause) => {}
                    }
                }
            }
        };
        let tasks = TaskTracker::new();
        tasks.spawn(pods::follow(client.clone(), self.clone(), shutdown.clone()));
        tasks.spawn(events::publish(
            client.clone(),
            self.clone(),
            notes,
            shutdown.clone(),
        ));
        tasks.spawn(quarantine::keep(client.clone(), self.clone(), shutdown.clone()));
        tasks.spawn(condition::publish(client.clone(), self.clone(), shutdown.clone()));
        tasks.spawn(publish::Publisher::new(client, self).run(shutdown));
        tasks.close();
        tasks.wait().await;
    }
}

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("kubeconfig {} cannot be used", path.display())]
    Kubeconfig {
        path: PathBuf,
        #[source]
        source: kube::config::KubeconfigError,
    },
    #[error("no service account to reach the API server with; give --kubeconfig outside a pod")]
    InCluster(#[source] kube::config::InClusterError),
    #[error("the API server's address or certificates cannot be used")]
    Client(#[source] kube::Error),
}

/// A client by this kubeconfig, or by the pod's service account.
pub(crate) async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ConnectError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let wrap = |source| ConnectError::Kubeconfig {
                path: path.to_owned(),
                source,
            };
            let file = Kubeconfig::read_from(path).map_err(wrap)?;
            kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .map_err(wrap)?
        }
        None => kube::Config::incluster().map_err(ConnectError::InCluster)?,
    };
    config.read_timeout = Some(SILENCE);
    config.write_timeout = Some(SILENCE);
    // A pooled connection may have been idle for longer than that when it is used again.
    config.reset_reader_on_write = true;
    config.connect_timeout = Some(CONNECT);
    Client::try_from(config).map_err(ConnectError::Client)
}

/// Growing pauses between attempts, from a tenth of a second to five seconds.
#[derive(Debug)]
struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Self(Self::FIRST)
    }
}

impl Pauses {
    const FIRST: Duration = Duration::from_millis(100);
    const LAST: Duration = Duration::from_secs(5);

    fn next(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(Self::LAST);
        pause
    }

    fn reset(&mut self) {
        self.0 = Self::FIRST;
    }
}
