//! What both daemons share: access to the API server and a check of its policies, back-off, Events, HTTP endpoints,
//! listen addresses, supervision of tasks, and watches in bounded memory.
#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::panic))]

mod backoff;
mod chain;
pub mod events;
pub mod http;
pub mod listen;
mod log_throttle;
pub mod memory;
pub mod policies;
pub mod supervise;
pub mod watch;

pub use backoff::Backoff;
pub use chain::chain;
pub use log_throttle::LogThrottle;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

/// The commit that this program was built from, if the build knew it.
pub const COMMIT: Option<&str> = option_env!("GANTRY_COMMIT");

/// Longest time to connect.
pub const CONNECT: Duration = Duration::from_secs(5);

/// The time by the clock of the async runtime. A test that pauses this clock pauses all that is measured by it.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Why no client can be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// A kubeconfig that cannot be read or parsed.
    #[error("kubeconfig {} cannot be used", path.display())]
    Kubeconfig {
        /// Its path, or the list of paths.
        path: PathBuf,
        /// The fault.
        #[source]
        source: KubeconfigError,
    },
    /// A kubeconfig of a list that cannot be merged with the ones before it.
    #[error("kubeconfig {} cannot be merged with the ones before it", path.display())]
    Contradiction {
        /// Its path.
        path: PathBuf,
        /// The contradiction.
        #[source]
        source: KubeconfigError,
    },
    /// The kubeconfig has no such context.
    #[error("kubeconfig {} has no context {context:?}; it has {known}", path.display())]
    Context {
        /// Its path, or the list of paths.
        path: PathBuf,
        /// The context that was named.
        context: String,
        /// Its contexts.
        known: String,
    },
    /// A context was named, and there is no kubeconfig.
    #[error("context {0:?} needs a kubeconfig, and there is none; give --kubeconfig")]
    NoKubeconfig(String),
    /// There is no kubeconfig, and the process does not run in a pod.
    #[error("no kubeconfig, and no service account of a pod; give --kubeconfig")]
    NoCluster,
    /// The service account of the pod cannot be used.
    #[error("the service account of this pod cannot be used")]
    InCluster(#[source] InClusterError),
    /// The address or the certificates are not valid.
    #[error("the API server's address or certificates cannot be used")]
    Client(#[source] kube::Error),
}

/// A client from this kubeconfig or from the pod's service account. A connection that is silent for `silence` counts as broken; that must be
/// longer than the server's watches last.
///
/// # Errors
/// The kubeconfig cannot be used, or there is none outside a pod. An API server that does not respond is not an error.
pub async fn connect(kubeconfig: Option<&Path>, silence: Duration) -> Result<Client, ConnectError> {
    connect_to(kubeconfig, None, silence).await
}

/// As [`connect`], by this context of the kubeconfig in place of its current one. The client's default namespace is
/// that of the context.
///
/// # Errors
/// As [`connect`], and if the kubeconfig has no such context.
pub async fn connect_to(
    kubeconfig: Option<&Path>,
    context: Option<&str>,
    silence: Duration,
) -> Result<Client, ConnectError> {
    Client::try_from(configuration(kubeconfig, context, silence).await?).map_err(ConnectError::Client)
}

/// The names of a kubeconfig's contexts.
///
/// # Errors
/// The kubeconfig cannot be read.
pub fn contexts(kubeconfig: &Path) -> Result<Vec<String>, ConnectError> {
    Ok(read(kubeconfig)?.contexts.into_iter().map(|context| context.name).collect())
}

/// Checks that the API server responds, by the path `/version`. Hardened clusters forbid that path: 403 is a response too.
///
/// # Errors
/// It does not respond, or responds that it is not ready.
pub async fn check_api_server(client: &Client) -> Result<(), kube::Error> {
    match client.apiserver_version().await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(()),
        Err(error) => Err(error),
    }
}

async fn configuration(
    kubeconfig: Option<&Path>,
    context: Option<&str>,
    silence: Duration,
) -> Result<Config, ConnectError> {
    let mut config = match (kubeconfig, context) {
        (Some(path), context) => {
            let contents = read(path)?;
            if let Some(context) = context
                && !contents.contexts.iter().any(|known| known.name == context)
            {
                let known: Vec<&str> = contents.contexts.iter().map(|known| known.name.as_str()).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                return Err(ConnectError::Context {
                    path: path.to_owned(),
                    context: context.to_owned(),
                    known,
                });
            }
            let options =
                KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
            Config::from_custom_kubeconfig(contents, &options)
                .await
                .map_err(|source| unusable(path, source))?
        }
        (None, Some(context)) => return Err(ConnectError::NoKubeconfig(context.to_owned())),
        (None, None) => Config::incluster().map_err(|error| match error {
            InClusterError::ReadEnvironmentVariable(_) => ConnectError::NoCluster,
            error => ConnectError::InCluster(error),
        })?,
    };
    config.read_timeout = Some(silence);
    config.write_timeout = Some(silence);
    // A pooled connection may have been idle for longer when it is used again.
    config.reset_reader_on_write = true;
    config.connect_timeout = Some(CONNECT);
    // kube would silently repeat for minutes what gets 429, 503 or 504: a Binding past its deadline, and no caller would notice that the API
    // server is away. Each caller has its own rule for retries.
    config.default_retry = false;
    Ok(config)
}

/// One kubeconfig, or a list as in the variable `KUBECONFIG`: the files that exist, merged as kubectl merges them.
fn read(paths: &Path) -> Result<Kubeconfig, ConnectError> {
    let one = |path: &Path| Kubeconfig::read_from(path).map_err(|source| unusable(path, source));
    let listed: Vec<PathBuf> = std::env::split_paths(paths).filter(|path| path.exists()).collect();
    if paths.exists() || listed.is_empty() {
        return one(paths);
    }
    listed.into_iter().try_fold(Kubeconfig::default(), |merged, path| {
        let next = one(&path)?;
        let merged = merged.merge(next);
        merged.map_err(|source| ConnectError::Contradiction { path, source })
    })
}

fn unusable(path: &Path, source: KubeconfigError) -> ConnectError {
    ConnectError::Kubeconfig { path: path.to_owned(), source }
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

    /// Serves one connection: 429 for the first of all requests, a version for the others.
    async fn respond(mut stream: TcpStream, requests: Arc<AtomicUsize>) {
        let mut request = Vec::new();
        while let Ok(1..) = stream.read_buf(&mut request).await {
            if !request.ends_with(b"\r\n\r\n") {
                continue;
            }
            request.clear();
            let (status, body) = match requests.fetch_add(1, Ordering::SeqCst) {
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
            let response = format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
            );
            stream.write_all(response.as_bytes()).await.unwrap();
        }
    }

    /// A kubeconfig for this address: its folder and its path.
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

    /// A client of an API server that responds with 429 once, and the number of its requests.
    async fn refused_once() -> (Client, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&requests);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(respond(stream, Arc::clone(&counted)));
            }
        });
        let (_folder, path) = kubeconfig(address);
        (connect(Some(&path), SILENCE).await.unwrap(), requests)
    }

    #[tokio::test]
    async fn refused_request_is_not_repeated_by_the_client() {
        let (client, requests) = refused_once().await;
        let refused = client.apiserver_version().await.unwrap_err();
        assert!(matches!(&refused, kube::Error::Api(status) if status.code == 429), "{refused}");
        assert_eq!(requests.load(Ordering::SeqCst), 1);
        client.apiserver_version().await.unwrap();
        assert_eq!(requests.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn first_kubeconfig_of_a_list_wins() {
        let (_first, first) = kubeconfig("127.0.0.1:1".parse().unwrap());
        let (_second, second) = kubeconfig("127.0.0.1:2".parse().unwrap());
        let list = |paths: &[&Path]| PathBuf::from(std::env::join_paths(paths).unwrap());
        let absent = first.with_file_name("absent");
        for paths in [[&*absent, &*first, &*second], [&*first, &*absent, &*second]] {
            let config = configuration(Some(&list(&paths)), None, SILENCE).await.unwrap();
            assert_eq!(config.cluster_url.to_string(), "http://127.0.0.1:1/");
        }
        let error = configuration(Some(&list(&[&absent, &absent])), None, SILENCE).await.unwrap_err();
        assert!(matches!(error, ConnectError::Kubeconfig { .. }), "{error}");
    }

    #[tokio::test]
    async fn context_selects_cluster_and_namespace() {
        let (_folder, path) = kubeconfig("127.0.0.1:1".parse().unwrap());
        let mut config: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let more = |list: &str, item: serde_json::Value, config: &mut serde_json::Value| {
            config[list].as_array_mut().unwrap().push(item);
        };
        let cluster = serde_json::json!({"name": "d", "cluster": {"server": "http://127.0.0.1:2"}});
        more("clusters", cluster, &mut config);
        let context =
            serde_json::json!({"name": "d", "context": {"cluster": "d", "user": "c", "namespace": "ml"}});
        more("contexts", context, &mut config);
        std::fs::write(&path, config.to_string()).unwrap();
        for (context, address, namespace) in [(None, "1", "default"), (Some("d"), "2", "ml")] {
            let config = configuration(Some(&path), context, SILENCE).await.unwrap();
            assert_eq!(config.cluster_url.to_string(), format!("http://127.0.0.1:{address}/"));
            assert_eq!(config.default_namespace, namespace);
        }
        assert_eq!(contexts(&path).unwrap(), ["c", "d"]);
        let unknown = configuration(Some(&path), Some("e"), SILENCE).await.unwrap_err();
        assert_eq!(
            unknown.to_string(),
            format!("kubeconfig {} has no context \"e\"; it has c, d", path.display())
        );
        let without = configuration(None, Some("e"), SILENCE).await.unwrap_err();
        assert!(matches!(without, ConnectError::NoKubeconfig(context) if context == "e"));
    }

    #[tokio::test]
    async fn silence_counts_from_the_last_request() {
        let (_folder, path) = kubeconfig("127.0.0.1:1".parse().unwrap());
        let config = configuration(Some(&path), None, SILENCE).await.unwrap();
        assert_eq!(config.read_timeout, Some(SILENCE));
        assert!(config.reset_reader_on_write, "a pooled connection is silent until it is used again");
    }
}
