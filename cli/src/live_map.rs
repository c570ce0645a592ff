//! The map of a cluster, kept up to date by watches of GpuNodes, Gangs, and, where the fabric has levels, Nodes.

use futures::{FutureExt as _, Stream, StreamExt as _};
use gantry_api::{Gang, GpuNode};
use gantry_gang::Levels;
use gantry_map::ClusterMap;
use gantry_runtime::chain;
use k8s_openapi::api::core::v1::Node;
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch_all};
use kube::{Api, Client, Resource};
use tokio::sync::watch;

/// Objects of one request: a GpuNode with many devices is large.
pub(crate) const LIST: u32 = 50;

/// The latest error of each watch, until it works again.
type Troubles = [Option<String>; 3];

/// The map of a cluster that changes.
pub(crate) struct LiveMap {
    gpu_nodes: Store<GpuNode>,
    gangs: Store<Gang>,
    nodes: Option<Store<PartialObjectMeta<Node>>>,
    fabric: Levels,
    /// Changes with every object.
    troubles: watch::Receiver<Troubles>,
}

impl LiveMap {
    /// Starts to watch, until the runtime ends.
    pub(crate) fn watch(client: Client, fabric: Levels) -> Self {
        let (send, troubles) = watch::channel(Troubles::default());
        let config = || watcher::Config::default().page_size(LIST);
        let all = watch_all(Api::<GpuNode>::all(client.clone()), config());
        let gpu_nodes = follow(send.clone(), 0, "GpuNodes", all);
        let all = watch_all(Api::<Gang>::all(client.clone()), config());
        let gangs = follow(send.clone(), 1, "Gangs", all);
        let nodes = (!fabric.0.is_empty()).then(|| {
            let all = watch_all(Api::<PartialObjectMeta<Node>>::all(client), config());
            follow(send, 2, "nodes", all)
        });
        Self { gpu_nodes, gangs, nodes, fabric, troubles }
    }

    /// Waits until something changed.
    pub(crate) async fn changed(&mut self) {
        if self.troubles.changed().await.is_err() {
            // The tasks have ended, which they do with the runtime.
            std::future::pending::<()>().await;
        }
    }

    /// Changes until now are not reported by [`LiveMap::changed`].
    pub(crate) fn mark_seen(&mut self) {
        self.troubles.mark_unchanged();
    }

    /// What cannot be watched now.
    pub(crate) fn trouble(&self) -> Option<String> {
        let troubles: Vec<String> = self.troubles.borrow().iter().flatten().cloned().collect();
        (!troubles.is_empty()).then(|| troubles.join("; "))
    }

    /// The map; `None` until everything is listed.
    pub(crate) fn map(&self) -> Option<ClusterMap> {
        let is_listed = self.gpu_nodes.wait_until_ready().now_or_never().is_some()
            && self.gangs.wait_until_ready().now_or_never().is_some()
            && self.nodes.as_ref().is_none_or(|nodes| nodes.wait_until_ready().now_or_never().is_some());
        if !is_listed {
            return None;
        }
        let gpu_nodes: Vec<GpuNode> = self.gpu_nodes.state().iter().map(|node| (**node).clone()).collect();
        let gangs: Vec<Gang> = self.gangs.state().iter().map(|gang| (**gang).clone()).collect();
        Some(ClusterMap::of(&gpu_nodes, &gangs, |name| {
            let Some(nodes) = &self.nodes else {
                return String::new();
            };
            let node = nodes.get(&ObjectRef::new(name));
            let labels = node.as_ref().and_then(|node| node.metadata.labels.as_ref());
            self.fabric.path_of(|label| Some(labels?.get(label)?.as_str()))
        }))
    }
}

/// Keeps the objects of a kind, and reports each change. A failed watch is tried again.
fn follow<K>(
    send: watch::Sender<Troubles>,
    number: usize,
    kind: &'static str,
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + Send + Sync + 'static,
{
    let (store, writer) = reflector::store();
    let mut events = events.default_backoff().reflect(writer).boxed();
    tokio::spawn(async move {
        while let Some(event) = events.next().await {
            let trouble = event.err().map(|error| format!("{kind} cannot be watched: {}", chain(&error)));
            send.send_modify(|troubles| {
                if let Some(known) = troubles.get_mut(number) {
                    *known = trouble;
                }
            });
        }
    });
    store
}
