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
use std::time::{Duration, Instant};

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
use crate::recurring::{Recurring, chain};

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
        let mut unreached = Recurring::default();
        let client = loop {
            match connect(self.kubeconfig.as_deref()).await {
                Ok(client) => break client,
                Err(error) => {
                    self.observed.cluster(false);
                    let pause = pauses.next();
                    if unreached.tells(&chain(&error), Instant::now()) {
                        warn!(
                            error = &error as &dyn std::error::Error,
                            ?pause,
                            "no way to the API server, trying again"
                        );
                    }
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
    // The client would send whatever is answered by 429, 503 or 504 again for minutes without a word: an API server that is away
    // would never be noticed. Who asks knows better when to try again.
    config.default_retry = false;
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// Answers everything that comes over one connection: the first of all requests by 429, the others with a version.
    async fn answer(mut stream: TcpStream, asked: Arc<AtomicUsize>) {
        let mut request = Vec::new();
        while let Ok(1..) = stream.read_buf(&mut request).await {
            if !request.ends_with(b"\r\n\r\n") {
                continue;
            }
            request.clear();
            let (status, body) = match asked.fetch_add(1, Ordering::SeqCst) {
                0 => (
                    "429 Too Many Requests",
                    r#"{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "TooManyRequests", "message": "later", "code": 429}"#,
                ),
                _ => (
                    "200 OK",
                    r#"{"major": "1", "minor": "1", "gitVersion": "", "gitCommit": "", "gitTreeState": "", "buildDate": "", "goVersion": "", "compiler": "", "platform": ""}"#,
                ),
            };
            let length = body.len();
            let answer = format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
            );
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    }

    /// A client of an API server that answers by 429 once, and how often that was asked.
    async fn refused_once() -> (Client, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, Arc::clone(&counted)));
            }
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        let config = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "c", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        });
        std::fs::write(&path, config.to_string()).unwrap();
        (connect(Some(&path)).await.unwrap(), asked)
    }

    #[tokio::test]
    async fn what_the_api_server_refuses_is_told_and_not_sent_again_unasked() {
        let (client, asked) = refused_once().await;
        let refused = client.apiserver_version().await.unwrap_err();
        assert!(
            matches!(&refused, kube::Error::Api(status) if status.code == 429),
            "{refused}"
        );
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        client.apiserver_version().await.unwrap();
        assert_eq!(asked.load(Ordering::SeqCst), 2);
    }
}
