//! The cluster as the extender sees it, for a command that looks once and goes: the same watches feed the same index, and nobody carries out
//! what follows.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use gantry_api::ResourceName;
use tokio_util::sync::CancellationToken;

use crate::decide::Options;
use crate::index::{Index, Store};
use crate::lease::Leadership;
use crate::watch::{self, Contact, Feed};
use crate::watched::Watched;

/// Between two looks whether everything is listed.
const LOOK: Duration = Duration::from_millis(20);

/// Lists the cluster of a kubeconfig (or of the pod this runs in) into an index.
///
/// # Errors
/// The kubeconfig cannot be read; the cluster cannot be listed within `limit`: then the log says why.
pub async fn look(
    kubeconfig: Option<&Path>,
    resources: Vec<ResourceName>,
    options: Options,
    limit: Duration,
) -> anyhow::Result<Arc<Store>> {
    let client = crate::connect(kubeconfig).await?;
    let watched = Watched::new(resources);
    let store = Arc::new(Store::new(Index::new(options, &watched, "offline".to_owned())));
    let shutdown = CancellationToken::new();
    let feed = Feed {
        watched,
        store: Arc::clone(&store),
        contact: Contact::new(),
        objects: Arc::default(),
        leadership: Arc::new(Leadership::always()),
    };
    let watching = tokio::spawn(watch::run(client, feed, shutdown.clone()));
    let listed = async {
        while !store.snapshot().synced {
            tokio::time::sleep(LOOK).await;
        }
    };
    let in_time = tokio::time::timeout(limit, listed).await;
    shutdown.cancel();
    watching.await.context("the watches ended badly")?;
    in_time.with_context(|| {
        format!(
            "pods, nodes, GpuNodes and Gangs cannot all be listed within {} s; may you list them, and is Gantry installed?",
            limit.as_secs()
        )
    })?;
    Ok(store)
}
