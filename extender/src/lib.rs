//! The scheduler extender: filter, prioritize, bind and preempt over immutable snapshots.
//!
//! ```text
//! kube-scheduler ──HTTP──> server ──> wire (JSON) ──> gantry_planner::decide (pure, over a Snapshot)
//!                                 └─> bind ──> index: reserve ──> Binding with the grant ──> index: finish
//! API server ──watch──> watch ──> index (state machine) ──> ledger (pure) ──> Snapshot
//!                                                      └──> explain, activate: Events and activation of waiting pods
//! ```
//!
//! Decisions are made in `gantry-planner`. Pure here: `watched`, `ledger`, `wire`. State without I/O: `index`. I/O:
//! `watch`, `bind`, `explain`, `assigned`, `activate`, `server`, `page`, `answers`, `webhook`, `tls`, `lease`, `announce`, `gang::objects`, `gang::work`,
//! `remediation`. The decisions of `remediation` and `webhook` are pure.
#![forbid(unsafe_code)]

pub(crate) mod activate;
pub(crate) mod announce;
pub mod answers;
pub mod args;
pub(crate) mod assigned;
pub mod bind;
pub(crate) mod bounded;
mod daemon;
pub(crate) mod event;
pub mod eviction;
pub(crate) mod explain;
#[cfg(test)]
mod fixtures;
pub mod gang;
pub mod gpu_node;
pub mod gpu_reset;
pub(crate) mod http_guard;
pub mod index;
pub mod lease;
pub(crate) mod ledger;
pub(crate) mod metadata;
pub mod metrics;
pub(crate) mod mig_drain;
pub mod object_memory;
pub mod offline;
pub(crate) mod page;
pub(crate) mod partial_object;
pub(crate) mod per_node;
pub mod pod;
pub mod published;
pub(crate) mod remediation;
pub mod server;
pub mod service;
pub(crate) mod slow_members;
pub(crate) mod tls;
pub mod watch;
pub mod watched;
pub mod webhook;
pub mod wire;
pub(crate) mod writers;

pub use args::Args;
pub use daemon::{Daemon, ReadOnlyListeners};
pub use published::{ExplainPort, PublishedSettings};

use std::net::SocketAddr;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::server::Listeners;
use crate::watch::SILENCE;

/// Runs the extender until `shutdown`. Wants a multi-thread runtime; two workers are enough.
///
/// # Errors
/// Options that contradict each other, a kubeconfig or TLS file that cannot be read, an address that cannot be listened
/// on. An API server that cannot be reached is no error: the extender serves, reports that it is not ready, and tries
/// again.
pub async fn run(args: Args, shutdown: CancellationToken) -> anyhow::Result<()> {
    let kubeconfig = args.kubeconfig.clone();
    let (all, metrics) = (args.listen, args.metrics_listen);
    let (page, explain) = (args.page_listen, args.explain_listen);
    let webhook = args.webhook.webhook_listen;
    let daemon = Daemon::new(args)?;
    let client = gantry_runtime::connect(kubeconfig.as_deref(), SILENCE).await?;
    let listeners = Listeners { all: listen(all)?, metrics: metrics.map(listen).transpose()? };
    let read_only = ReadOnlyListeners {
        page: page.map(listen).transpose()?,
        explain: explain.map(listen).transpose()?,
        webhook: webhook.map(listen).transpose()?,
    };
    daemon.run(client, listeners, read_only, shutdown).await
}

fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    gantry_runtime::listen::bind(address).with_context(|| format!("cannot listen on {address}"))
}
