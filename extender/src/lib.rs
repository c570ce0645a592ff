//! The scheduler extender: filter, prioritize and bind over immutable snapshots.
//!
//! ```text
//! kube-scheduler ──HTTP──> server ──> wire (JSON) ──> decide (pure, over a Snapshot)
//!                                 └─> bind ──> index: reserve ──> Binding with the grant ──> index: finish
//! API server ──watch──> watch ──> index (state machine) ──> ledger (pure) ──> Snapshot
//!                                                      └──> explain, wake: Events and pokes for pods that wait
//! ```
//!
//! Pure: `quantity`, `request`, `watched`, `devices`, `shape`, `inventory`, `kind`, `site`, `plan`, `ledger`, `snapshot`, `decide`,
//! `wire`. State without I/O: `index`. I/O: `watch`, `bind`, `explain`, `wake`, `server`.
#![forbid(unsafe_code)]

pub mod args;
pub mod bind;
pub mod decide;
pub mod devices;
pub mod explain;
#[cfg(test)]
mod fixtures;
pub mod gang;
pub mod index;
pub mod inventory;
pub mod kind;
pub mod lease;
pub mod ledger;
pub mod metadata;
pub mod metrics;
pub mod offline;
pub mod plan;
pub mod pod;
pub mod quantity;
pub mod request;
pub mod server;
pub mod service;
pub mod shape;
pub mod site;
pub mod snapshot;
pub mod tls;
pub mod wake;
pub mod watch;
pub mod watched;
pub mod wire;

pub use args::Args;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use gantry_api::ResourceName;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::bind::Binder;
use crate::decide::Options;
use crate::index::{Index, Source, Store};
use crate::metrics::Metrics;
use crate::server::Server;
use crate::service::Service;
use crate::watch::Contact;
use crate::watched::Watched;

/// Longest time to connect to the API server.
const CONNECT: Duration = Duration::from_secs(5);

/// Runs the extender until `shutdown`. Wants a multi-thread runtime; two workers are enough.
///
/// # Errors
/// Options that contradict each other, a kubeconfig that cannot be read, an address that cannot be listened on. An API server that
/// cannot be reached is no error: the extender serves, says that it is not ready, and tries again.
pub async fn run(args: Args, shutdown: CancellationToken) -> anyhow::Result<()> {
    let Args {
        kubeconfig,
        listen,
        resources,
        foreign_nodes,
        policy,
        bind_timeout,
        body_limit,
        stale_after,
    } = args;
    let watched = Watched::new(read_resources(&resources)?);
    let options = Options {
        foreign: foreign_nodes,
        policy,
        ..Options::default()
    };
    let client = connect(kubeconfig.as_deref()).await?;
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("cannot listen on {listen}"))?;
    tracing::info!(address = %listener.local_addr()?, resources = ?watched.named(), ?options, "gantry extender serves");
    let run = format!("{:x}", jiff::Timestamp::now().as_microsecond());
    let store = Arc::new(Store::new(Index::new(options, &watched, run)));
    // Nobody watches Gang objects yet: none is waited for.
    store.update(|index| {
        let now = std::time::Instant::now();
        index.list_begins(now, Source::Gangs);
        index.list_ends(now, Source::Gangs);
    });
    let metrics = Arc::new(Metrics::new());
    let contact = Contact::new();
    let watching = tokio::spawn(watch::run(
        client.clone(),
        watched.clone(),
        Arc::clone(&store),
        Arc::clone(&contact),
        shutdown.clone(),
    ));
    let waiting = tokio::spawn(wake::run(
        client.clone(),
        Arc::clone(&store),
        Arc::clone(&metrics),
        shutdown.clone(),
    ));
    let explaining = tokio::spawn(explain::run(
        client.clone(),
        Arc::clone(&store),
        Arc::clone(&metrics),
        shutdown.clone(),
    ));
    let server = Server {
        service: Service {
            binder: Binder::new(client, Arc::clone(&store), watched.clone(), bind_timeout),
            store,
            watched,
            options,
            metrics,
        },
        contact,
        body_limit: usize::try_from(body_limit)? * 1024 * 1024,
        stale_after,
        drain: bind_timeout,
    };
    let ended = together(server.run(listener, shutdown.clone()), watching, &shutdown).await;
    for task in [waiting, explaining] {
        task.await.context("a task of the extender ended badly")?;
    }
    ended
}

/// Serves as long as the watches run. Neither is of use without the other: answers would grow old without end.
async fn together(
    serving: impl Future<Output = ()>,
    mut watching: JoinHandle<()>,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        () = &mut serving => {
            shutdown.cancel();
            return watching.await.context("the watches ended badly");
        }
        ended = &mut watching => ended,
    };
    let in_order = shutdown.is_cancelled();
    shutdown.cancel();
    serving.await;
    ended.context("the watches ended badly")?;
    anyhow::ensure!(in_order, "the watches ended by themselves");
    Ok(())
}

fn read_resources(written: &[String]) -> anyhow::Result<Vec<ResourceName>> {
    let mut resources: Vec<ResourceName> = Vec::new();
    for name in written.iter().map(|name| name.trim()) {
        let extended = name
            .split_once('/')
            .is_some_and(|(domain, rest)| !domain.is_empty() && !rest.is_empty());
        anyhow::ensure!(
            extended,
            "--resource {name:?}: write a domain and a name, such as nvidia.com/gpu"
        );
        if !resources.iter().any(|known| known.as_str() == name) {
            resources.push(name.into());
        }
    }
    Ok(resources)
}

async fn connect(kubeconfig: Option<&std::path::Path>) -> anyhow::Result<Client> {
    let mut config = match kubeconfig {
        Some(path) => {
            let file =
                Kubeconfig::read_from(path).with_context(|| format!("kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("kubeconfig {}", path.display()))?
        }
        None => Config::incluster().context("no --kubeconfig, and not in a pod of a cluster")?,
    };
    config.read_timeout = Some(watch::SILENCE);
    config.write_timeout = Some(watch::SILENCE);
    config.connect_timeout = Some(CONNECT);
    Client::try_from(config).context("cannot make a client of the API server")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_extender_ends_when_its_watches_do_and_says_so() {
        let ends: [(JoinHandle<()>, &str); 2] = [
            (tokio::spawn(async { panic!("a bug") }), "the watches ended badly"),
            (tokio::spawn(async {}), "the watches ended by themselves"),
        ];
        for (watching, words) in ends {
            let shutdown = CancellationToken::new();
            let error = together(shutdown.cancelled(), watching, &shutdown)
                .await
                .unwrap_err();
            assert_eq!(error.to_string(), words);
            assert!(shutdown.is_cancelled());
        }
        let shutdown = CancellationToken::new();
        let watching = tokio::spawn(shutdown.clone().cancelled_owned());
        shutdown.cancel();
        together(shutdown.cancelled(), watching, &shutdown).await.unwrap();
    }
}
