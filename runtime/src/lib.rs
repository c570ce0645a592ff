//! The way to the API server: by a kubeconfig, or by the pod's service account. Says how long is waited; what fails is told to whoever
//! asked, and tried again there or nowhere. Beside it, what both daemons take and tell alike where they are asked themselves, and how their
//! tasks end.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::panic))]

mod chain;
pub mod exposition;
pub mod listen;
pub mod supervise;

pub use chain::chain;

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

/// Longest time to connect.
pub const CONNECT: Duration = Duration::from_secs(5);

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// A kubeconfig that cannot be read or understood.
    #[error("kubeconfig {} cannot be used", path.display())]
    Kubeconfig {
        /// Its path, or several as they were listed.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: KubeconfigError,
    },
    /// One of several that contradicts those before it.
    #[error("kubeconfig {} does not go with those before it", path.display())]
    Contradiction {
        /// Its path.
        path: PathBuf,
        /// What does not go together.
        #[source]
        source: KubeconfigError,
    },
    /// No kubeconfig, and this is no pod.
    #[error("no service account to reach the API server with; give --kubeconfig outside a pod")]
    InCluster(#[source] InClusterError),
    /// An address or certificates of which no client can be made.
    #[error("the API server's address or certificates cannot be used")]
    Client(#[source] kube::Error),
}

/// A client by this kubeconfig, or by the pod's service account, that takes `silence` on a connection for its end: longer than the server's
/// watches last.
///
/// # Errors
/// A kubeconfig that cannot be read or used; none where this is no pod. That the API server does not answer is no error.
pub async fn connect(kubeconfig: Option<&Path>, silence: Duration) -> Result<Client, ConnectError> {
    Client::try_from(configuration(kubeconfig, silence).await?).map_err(ConnectError::Client)
}

/// Asks the API server whether it is there, by the path `/version`. Whom it forbids that, as hardened clusters do, it has answered.
///
/// # Errors
/// It does not answer, or not as an API server that is ready to.
pub async fn ask(client: &Client) -> Result<(), kube::Error> {
    match client.apiserver_version().await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(()),
        Err(error) => Err(error),
    }
}

async fn configuration(kubeconfig: Option<&Path>, silence: Duration) -> Result<Config, ConnectError> {
    let mut config = match kubeconfig {
        Some(path) => Config::from_custom_kubeconfig(read(path)?, &KubeConfigOptions::default())
            .await
            .map_err(|source| unusable(path, source))?,
        None => Config::incluster().map_err(ConnectError::InCluster)?,
    };
    config.read_timeout = Some(silence);
    config.write_timeout = Some(silence);
    // A pooled connection may have been idle for longer than that when it is used again.
    config.reset_reader_on_write = true;
    config.connect_timeout = Some(CONNECT);
    // The client would send whatever is answered by 429, 503 or 504 again for minutes without a word: a Binding past its time, and an API
    // server that is away would never be noticed. Who asks knows better when to try again, if at all.
    config.default_retry = false;
    Ok(config)
}

/// One kubeconfig, or several as the variable `KUBECONFIG` lists them: those that are there, merged as kubectl merges them.
fn read(paths: &Path) -> Result<Kubeconfig, ConnectError> {
    let one = |path: &Path| Kubeconfig::read_from(path).map_err(|source| unusable(path, source));
    let listed: Vec<PathBuf> = std::env::split_paths(paths)
        .filter(|path| path.exists())
        .collect();
    if paths.exists() || listed.is_empty() {
        return one(paths);
    }
    listed
        .into_iter()
        .try_fold(Kubeconfig::default(), |merged, path| {
            let next = one(&path)?;
            let merged = merged.merge(next);
            merged.map_err(|source| ConnectError::Contradiction { path, source })
        })
}

fn unusable(path: &Path, source: KubeconfigError) -> ConnectError {
    ConnectError::Kubeconfig {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    const SILENCE: Duration = Duration::from_secs(40);

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

    /// The folder of a kubeconfig for this address, and its path.
    fn kubeconfig(address: SocketAddr) -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        let config = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "c", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        });
        std::fs::write(&path, config.to_string()).unwrap();
        (folder, path)
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
        let (_folder, path) = kubeconfig(address);
        (connect(Some(&path), SILENCE).await.unwrap(), asked)
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

    #[tokio::test]
    async fn of_a_list_of_kubeconfigs_the_first_to_name_something_counts() {
        let (_first, first) = kubeconfig("127.0.0.1:1".parse().unwrap());
        let (_second, second) = kubeconfig("127.0.0.1:2".parse().unwrap());
        let list = |paths: &[&Path]| PathBuf::from(std::env::join_paths(paths).unwrap());
        let absent = first.with_file_name("absent");
        for paths in [[&*absent, &*first, &*second], [&*first, &*absent, &*second]] {
            let config = configuration(Some(&list(&paths)), SILENCE).await.unwrap();
            assert_eq!(config.cluster_url.to_string(), "http://127.0.0.1:1/");
        }
        let error = configuration(Some(&list(&[&absent, &absent])), SILENCE)
            .await
            .unwrap_err();
        assert!(error.to_string().starts_with("kubeconfig "), "{error}");
    }

    #[tokio::test]
    async fn silence_counts_from_the_last_request_and_not_from_before_it() {
        let (_folder, path) = kubeconfig("127.0.0.1:1".parse().unwrap());
        let config = configuration(Some(&path), SILENCE).await.unwrap();
        assert_eq!(config.read_timeout, Some(SILENCE));
        assert!(
            config.reset_reader_on_write,
            "a pooled connection is silent until it is used again"
        );
    }
}
