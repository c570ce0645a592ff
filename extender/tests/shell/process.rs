//! One extender: the daemon that `gantry extender` runs, with its client of the API server and its HTTP server, on a
//! network in memory.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::{Args as _, FromArgMatches as _};
use gantry_extender::server::Listeners;
use gantry_extender::watch::SILENCE;
use gantry_extender::{Args, Daemon, ReadOnlyListeners};
use gantry_sim_cluster::api::ApiServer;
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ClientBuilder, ConfigExt as _};
use kube::{Client, Config};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tower::Layer as _;

use crate::net::{Connector, Incoming, Link, Pipe};

/// How often kubelet probes a replica.
const PROBE_EVERY: Duration = Duration::from_secs(2);
/// What a probe may take.
const PROBE: Duration = Duration::from_secs(1);

/// A client of the API server over this link, with the time limits that [`gantry_runtime::connect`] sets.
pub(crate) fn client(api: &Arc<ApiServer>, link: &Link) -> Client {
    let (api, link) = (Arc::clone(api), link.clone());
    let dial = move || {
        let (api, link) = (Arc::clone(&api), link.clone());
        async move {
            let (near, far) = link.open().await?;
            tokio::spawn(async move { api.serve_connection(far).await });
            Ok(near)
        }
    };
    let mut connector = TimeoutConnector::new(Connector::new(dial));
    connector.set_connect_timeout(Some(gantry_runtime::CONNECT));
    connector.set_read_timeout(Some(SILENCE));
    connector.set_write_timeout(Some(SILENCE));
    connector.set_reset_reader_on_write(true);
    let http = legacy::Client::builder(TokioExecutor::new()).build::<_, Body>(connector);
    let config = Config::new("http://api".parse().unwrap());
    ClientBuilder::new(config.base_uri_layer().layer(http), "default").build()
}

/// A running extender.
pub(crate) struct Process {
    pub(crate) name: String,
    /// Between it and the API server.
    pub(crate) to_api: Link,
    /// Between kube-scheduler and it.
    pub(crate) from_scheduler: Link,
    connections: mpsc::UnboundedSender<DuplexStream>,
    shutdown: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
}

impl Process {
    pub(crate) fn start(api: &Arc<ApiServer>, name: String, seed: u64) -> Self {
        let to_api = Link::new(seed);
        let shutdown = CancellationToken::new();
        let (connections, incoming) = Incoming::new();
        let command = Args::augment_args(clap::Command::new("extender"));
        let words =
            ["extender", "--leader-elect", "--gang-hold=60", "--gang-arrival=20", "--bind-timeout=10"];
        let args = Args::from_arg_matches(&command.get_matches_from(words)).unwrap();
        let listeners = Listeners { all: incoming, metrics: None };
        let running = Daemon::new(args).unwrap().run(
            client(api, &to_api),
            listeners,
            ReadOnlyListeners::default(),
            shutdown.clone(),
        );
        Self {
            name,
            to_api,
            from_scheduler: Link::new(!seed),
            connections,
            shutdown,
            task: tokio::spawn(running),
        }
    }

    /// Ends it as a rollout does: what is under way is finished.
    pub(crate) async fn stop(self) {
        self.shutdown.cancel();
        self.task.await.unwrap().unwrap();
    }

    /// Ends it at once: nothing that it sends from now on arrives.
    pub(crate) fn kill(self) {
        self.to_api.take_down();
        self.from_scheduler.take_down();
        self.shutdown.cancel();
        self.task.abort();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    /// Whether kubelet's probe finds it ready.
    async fn is_ready(connections: &mpsc::UnboundedSender<DuplexStream>) -> bool {
        let (mut near, far) = tokio::io::duplex(4096);
        let probe = async {
            connections.send(far).ok()?;
            near.write_all(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.ok()?;
            let mut answer = String::new();
            near.read_to_string(&mut answer).await.ok()?;
            Some(answer.starts_with("HTTP/1.1 200"))
        };
        tokio::time::timeout(PROBE, probe).await == Ok(Some(true))
    }
}

/// The Service in front of the extenders: new connections go to the replica that was found ready last. Connections that
/// exist stay where they are.
#[derive(Clone, Default)]
pub(crate) struct Endpoint(Arc<Mutex<Option<Backend>>>);

/// How a replica is reached.
#[derive(Clone)]
struct Backend {
    link: Link,
    connections: mpsc::UnboundedSender<DuplexStream>,
}

fn refused() -> io::Error {
    io::ErrorKind::ConnectionRefused.into()
}

impl Backend {
    /// A connection from kube-scheduler.
    async fn dial(self) -> io::Result<Pipe> {
        let (near, far) = self.link.open().await?;
        self.connections.send(far).map_err(|_| refused())?;
        Ok(near)
    }
}

impl Endpoint {
    pub(crate) fn connector(&self) -> Connector {
        let endpoint = self.clone();
        Connector::new(move || {
            let current = endpoint.0.lock().unwrap().clone();
            async move { current.ok_or_else(refused)?.dial().await }
        })
    }

    /// Probes a replica for as long as it runs.
    pub(crate) fn probe(&self, process: &Process) {
        let endpoint = self.clone();
        let backend =
            Backend { link: process.from_scheduler.clone(), connections: process.connections.clone() };
        tokio::spawn(async move {
            while !backend.connections.is_closed() {
                if Process::is_ready(&backend.connections).await {
                    *endpoint.0.lock().unwrap() = Some(backend.clone());
                }
                tokio::time::sleep(PROBE_EVERY).await;
            }
        });
    }
}
