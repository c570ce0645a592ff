//! Starts the tasks that write to the cluster without a call of kube-scheduler. They run while this process leads, and
//! stop at once when its term ends.

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
use crate::mig_drain::{ClusterDrains, MigDrainer};
use crate::remediation::{Remediation, Remediator};
use crate::slow_members::SlowMemberSettings;
use crate::{activate, announce, bind, explain, gang, object_memory, slow_members};

/// What the tasks need.
pub(crate) struct Writers {
    /// Client of the API server.
    pub(crate) client: Client,
    /// Carries out decisions.
    pub(crate) binder: Binder,
    /// The state of the cluster.
    pub(crate) store: Arc<Store>,
    /// The newest versions of Gang objects.
    pub(crate) objects: Arc<Objects>,
    /// The counters.
    pub(crate) metrics: Arc<Metrics>,
    /// Whether scheduling gates are removed.
    pub(crate) gates: bool,
    /// The rules of remediation, if there are any.
    pub(crate) remediation: Option<Remediation>,
    /// How members of gangs are compared, if they are.
    pub(crate) slow_members: Option<SlowMemberSettings>,
    /// The GPUs that are to be drained for MIG layouts.
    pub(crate) mig_drains: Arc<ClusterDrains>,
    /// The Service that points to the leader, if any.
    pub(crate) announces: Option<announce::Settings>,
}

impl Writers {
    /// Runs the tasks in each term of `leadership`, until `shutdown`. Returns as well if one of them ends unexpectedly.
    pub(crate) async fn work(self, leadership: Arc<Leadership>, shutdown: CancellationToken) {
        while let Some(term) = shutdown.run_until_cancelled(leadership.entered()).await {
            let until = shutdown.child_token();
            let mut writers = self.start(&until);
            let over = shutdown.run_until_cancelled(leadership.ended(term));
            let has_failed = tokio::select! {
                // A shutdown ends the tasks as well: it is looked at first.
                biased;
                _ = over => false,
                Some(_) = writers.join_next() => true,
            };
            until.cancel();
            let mut bad = false;
            while let Some(task) = writers.join_next().await {
                bad |= task.is_err();
            }
            if has_failed || bad {
                // Its work would not be done any more: the process exits.
                tracing::error!("a task that writes to the cluster ended unexpectedly");
                return;
            }
        }
    }

    fn start(&self, until: &CancellationToken) -> JoinSet<()> {
        let Self { client, binder, store, objects, metrics, gates, .. } = self;
        let Self { remediation, slow_members, mig_drains, announces, .. } = self;
        let (events, mailbox) = Events::new();
        let (orders, taken) = tokio::sync::mpsc::unbounded_channel();
        let mut writers = JoinSet::new();
        if let Some(settings) = announces {
            writers.spawn(announce::run(client.clone(), settings.clone(), until.clone()));
        }
        if let Some(remediation) = remediation {
            let (store, metrics) = (Arc::clone(store), Arc::clone(metrics));
            let remediator = Remediator::new(client.clone(), store, remediation.clone(), metrics);
            writers.spawn(remediator.run(until.clone()));
        }
        let (drains, drainer_metrics) = (Arc::clone(mig_drains), Arc::clone(metrics));
        let drainer = MigDrainer::new(client.clone(), Arc::clone(store), drains, drainer_metrics);
        writers.spawn(drainer.run(until.clone()));
        if let Some(settings) = slow_members {
            let (store, metrics) = (Arc::clone(store), Arc::clone(metrics));
            writers.spawn(slow_members::run(settings.clone(), store, events.clone(), metrics, until.clone()));
        }
        writers.spawn(activate::run(client.clone(), Arc::clone(store), Arc::clone(metrics), until.clone()));
        writers.spawn(bind::deferred::run(
            binder.clone(),
            events.clone(),
            Arc::clone(metrics),
            until.clone(),
        ));
        let memory = Arc::clone(store.memory());
        writers.spawn(object_memory::report(client.clone(), memory, Arc::clone(metrics), until.clone()));
        writers.spawn(explain::run(client.clone(), Arc::clone(store), Arc::clone(metrics), until.clone()));
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
