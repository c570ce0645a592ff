//! The tasks that write to the cluster, other than binds that kube-scheduler calls for: they work while this process leads, and stop at
//! once when it does no longer. Nothing is decided or written here.

use std::sync::Arc;

use kube::Client;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::bind::Binder;
use crate::gang::events::Events;
use crate::gang::objects::Objects;
use crate::index::Store;
use crate::lease::Leadership;
use crate::metrics::Metrics;
use crate::{announce, bind, explain, gang, wake};

/// What they need.
pub(crate) struct Writers {
    /// Connected.
    pub(crate) client: Client,
    /// Carries out decisions.
    pub(crate) binder: Binder,
    /// What is known of the cluster.
    pub(crate) store: Arc<Store>,
    /// The Gangs that are known to be there.
    pub(crate) objects: Arc<Objects>,
    /// The counters.
    pub(crate) metrics: Arc<Metrics>,
    /// Whether scheduling gates are lifted.
    pub(crate) gates: bool,
    /// The Service that is led here, if any.
    pub(crate) announces: Option<announce::Settings>,
}

impl Writers {
    /// Starts them with each term of `leadership`, until `shutdown`. Comes back too where one of them ended by itself.
    pub(crate) async fn work(self, leadership: Arc<Leadership>, shutdown: CancellationToken) {
        while let Some(term) = shutdown.run_until_cancelled(leadership.entered()).await {
            let until = shutdown.child_token();
            let mut writers = self.start(&until);
            let over = shutdown.run_until_cancelled(leadership.ended(term));
            let fell = tokio::select! {
                _ = over => false,
                Some(_) = writers.join_next() => true,
            };
            until.cancel();
            let mut bad = false;
            while let Some(task) = writers.join_next().await {
                bad |= task.is_err();
            }
            if fell || bad {
                // What it was to do is done by nobody any more: the process ends.
                tracing::error!("a task that writes to the cluster ended by itself");
                return;
            }
        }
    }

    fn start(&self, until: &CancellationToken) -> JoinSet<()> {
        let Self {
            client,
            binder,
            store,
            objects,
            metrics,
            gates,
            announces,
        } = self;
        let (events, mailbox) = Events::new();
        let (orders, taken) = tokio::sync::mpsc::unbounded_channel();
        let mut writers = JoinSet::new();
        if let Some(settings) = announces {
            writers.spawn(announce::run(client.clone(), settings.clone(), until.clone()));
        }
        writers.spawn(wake::run(
            client.clone(),
            Arc::clone(store),
            Arc::clone(metrics),
            until.clone(),
        ));
        writers.spawn(bind::deferred::run(
            binder.clone(),
            events.clone(),
            Arc::clone(metrics),
            until.clone(),
        ));
        writers.spawn(explain::run(
            client.clone(),
            Arc::clone(store),
            Arc::clone(metrics),
            until.clone(),
        ));
        writers.spawn(gang::objects::run(
            client.clone(),
            Arc::clone(store),
            Arc::clone(objects),
            events.clone(),
            Arc::clone(metrics),
            orders,
            until.clone(),
        ));
        writers.spawn(gang::work::run(
            client.clone(),
            Arc::clone(store),
            events,
            Arc::clone(metrics),
            gang::work::Orders { taken, gates: *gates },
            until.clone(),
        ));
        writers.spawn(gang::events::run(
            client.clone(),
            Arc::clone(objects),
            mailbox,
            Arc::clone(metrics),
            until.clone(),
        ));
        writers
    }
}
