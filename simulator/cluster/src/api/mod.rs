//! An in-memory API server: the part of Kubernetes' HTTP API that the daemons' clients use, exactly as they expect it.
//! No authentication, no admission beyond a few defaults, no persistence; loopback only.

mod discovery;
mod error;
mod events;
mod kinds;
pub(crate) mod meta;
mod objects;
mod pods;
mod request;
mod selector;
mod server;
mod store;
mod table;
mod view;
mod watch;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use kinds::Kind;
use objects::Objects;
use server::Service;
use store::Store;

/// The version of Kubernetes that this cluster behaves like.
pub const KUBERNETES_VERSION: &str = "v1.36.2";

/// A running API server. It ends when its token is cancelled.
#[derive(Debug)]
pub struct ApiServer {
    address: SocketAddr,
    objects: Arc<Objects>,
}

/// What may be set.
#[derive(Debug, Clone)]
pub struct ApiOptions {
    /// Writes that are remembered for watches.
    pub history: usize,
    /// How often a watch that allows it gets a bookmark.
    pub bookmark_every: Duration,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self { history: 4096, bookmark_every: Duration::from_secs(15) }
    }
}

impl ApiServer {
    /// Starts a server on a free port of loopback, with the namespaces that every cluster has.
    ///
    /// # Errors
    /// No port can be had.
    pub async fn start(options: &ApiOptions, stop: CancellationToken) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let objects = Arc::new(Objects { store: Store::new(options.history) });
        seed(&objects);
        let service = Arc::new(Service {
            objects: Arc::clone(&objects),
            bookmark_every: options.bookmark_every,
            stop: stop.clone(),
        });
        tokio::spawn(serve(listener, service, stop));
        Ok(Self { address, objects })
    }

    /// `http://127.0.0.1:PORT`
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A kubeconfig for it, as text.
    pub fn kubeconfig(&self) -> String {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "gantry-demo", "cluster": {"server": self.url()}}],
            "users": [{"name": "anyone", "user": {}}],
            "contexts": [{"name": "gantry-demo", "context": {"cluster": "gantry-demo", "user": "anyone", "namespace": "default"}}],
            "current-context": "gantry-demo",
        });
        // JSON is YAML.
        format!("{config:#}\n")
    }

    /// A client of it.
    ///
    /// # Errors
    /// The client's constructor failed, which does not happen for a loopback address.
    pub fn client(&self) -> Result<kube::Client, ClientError> {
        let url = self.url().parse()?;
        let mut config = kube::Config::new(url);
        config.proxy_url = None;
        // Without retries, so that the caller sees every refusal.
        config.default_retry = false;
        Ok(kube::Client::try_from(config)?)
    }

    /// How many writes there were: a cheap sign of life or of rest.
    pub fn revision(&self) -> u64 {
        *self.objects.store.revisions().borrow()
    }
}

/// Why no client could be made.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is no URL.
    #[error("API server address")]
    Address(#[from] http::uri::InvalidUri),
    /// The client could not be set up.
    #[error("API client")]
    Client(#[from] kube::Error),
}

fn seed(objects: &Objects) {
    let Some(kind) = Kind::find("", "v1", "namespaces") else {
        return;
    };
    for name in ["default", "kube-system", "kube-node-lease", "gantry-system"] {
        let namespace = json!({"metadata": {"name": name}, "status": {"phase": "Active"}});
        if let Err(error) = objects.create(kind, "", namespace, false) {
            tracing::error!(%error, name, "namespace not created");
        }
    }
}

async fn serve(listener: TcpListener, service: Arc<Service>, stop: CancellationToken) {
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "connection not accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Small answers must not wait for more to send.
        let _ = stream.set_nodelay(true);
        let service = Arc::clone(&service);
        let stop = stop.clone();
        connections.spawn(async move {
            let answer = service_fn(move |request| {
                let service = Arc::clone(&service);
                async move { Ok::<_, std::convert::Infallible>(service.answer(request).await) }
            });
            let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
            tokio::select! {
                result = connection => if let Err(error) = result {
                    tracing::trace!(%error, "connection ended");
                },
                () = stop.cancelled() => {}
            }
        });
    }
    connections.close();
    connections.wait().await;
}
