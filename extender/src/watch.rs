//! Sends the events of four watches and the time to the index. Retries forever with a short back-off: scheduling has to
//! resume as soon as the API server is back.

mod api_health;
mod steady;

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::{BoxStream, SelectAll};
use gantry_api::{NodeName, ResourceName};
use gantry_gang::NodeFacts;
use gantry_gang::protocol::Object;
use gantry_runtime::chain;
use kube::runtime::watcher as watch;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

pub use api_health::ApiHealth;

use crate::gang::objects::{Name, Objects, PartialGang};
use crate::index::{self, Index, PartialGpuNode, SlimNode, Source, Store};
use crate::lease::Leadership;
use crate::pod::{Reader, Seen, SlimPod, Words};
use crate::watched::Watched;
use gantry_planner::inventory::Inventory;
use gantry_planner::kind::Kinds;

/// Longest duration of one watch call. A dead connection is detected soon after its end.
pub const WATCH_SECONDS: u32 = 30;
/// Longest time without a byte from the API server. Watches end before that, so that silence means a dead connection.
pub const SILENCE: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 15);
/// Period of the health checks of the API server, and of the ticks of the index.
const TICK: Duration = Duration::from_secs(1);
/// Most events applied in one step, so that verbs never wait long for it.
const BATCH: usize = 256;

/// One event of a watch, parsed for the index.
enum WatchEvent {
    Pod(Seen),
    PodGone(Seen),
    Node(NodeName, Vec<(ResourceName, u32)>, Arc<NodeFacts>),
    NodeGone(String),
    GpuNode(NodeName, Box<Inventory>),
    GpuNodeGone(String),
    Gang(Name, Box<Object>),
    GangGone(Name),
    Begins(Source),
    Ends(Source),
    /// The kind is not defined, so there are no objects of it.
    Undefined(Source),
}

impl WatchEvent {
    fn apply(self, now: Instant, index: &mut Index) {
        match self {
            Self::Pod(Seen::Facts(pod)) => index.pod_applied(*pod),
            Self::Pod(Seen::OtherPod(pod)) => index.other_pod_applied(*pod),
            Self::PodGone(Seen::Facts(pod)) => {
                let uid = pod.uid.clone();
                index.pod_deleted(now, &uid, Some(*pod));
            }
            Self::PodGone(Seen::OtherPod(pod)) => index.other_pod_gone(&pod.uid),
            Self::Node(name, advertised, facts) => {
                index.node_applied(&name, advertised);
                index.node_described(facts);
            }
            Self::NodeGone(name) => index.node_deleted(&name),
            Self::GpuNode(name, inventory) => index.inventory_applied(&name, *inventory),
            Self::GpuNodeGone(name) => index.inventory_deleted(&name),
            Self::Gang(name, object) => index.gang_object_seen(&name.namespace, &name.name, *object),
            Self::GangGone(name) => index.gang_object_gone(&name.namespace, &name.name),
            Self::Begins(source) => index.list_begins(now, source),
            Self::Ends(source) => index.list_ends(now, source),
            Self::Undefined(source) => {
                index.list_begins(now, source);
                index.list_ends(now, source);
            }
        }
    }
}

/// What the watches need.
#[derive(Clone)]
pub struct Watches {
    /// The watched resources.
    pub watched: Watched,
    /// Where the events go.
    pub store: Arc<Store>,
    /// Records how old the facts are.
    pub health: Arc<ApiHealth>,
    /// The newest versions of Gang objects.
    pub objects: Arc<Objects>,
    /// Whether this process leads.
    pub leadership: Arc<Leadership>,
}

/// Watches until `shutdown`.
pub async fn run(client: Client, watches: Watches, shutdown: CancellationToken) {
    let (store, health) = (Arc::clone(&watches.store), Arc::clone(&watches.health));
    let mut heartbeat =
        tokio::spawn(beat(client.clone(), Arc::clone(&store), Arc::clone(&health), shutdown.clone()));
    let watching = watches.run(&client, &shutdown);
    tokio::select! {
        () = watching => {
            // It ends by the same token.
            let _ = heartbeat.await;
        }
        // It panicked: the age of the facts is unknown without it.
        _ = &mut heartbeat => {}
    }
}

impl Watches {
    async fn run(&self, client: &Client, shutdown: &CancellationToken) {
        let kinds = Arc::default();
        let work = async {
            loop {
                let term = self.leadership.term();
                // The previous leader may have written until its term ended, so facts from before are discarded. A
                // follower is kept up to date all the same, and expensive results are kept.
                self.objects.clear();
                self.store.update(|index| {
                    index.relist();
                    match term {
                        // Also if the end of the previous term was missed.
                        Some(_) => {
                            index.stand_down();
                            index.lead();
                        }
                        None => index.stand_down(),
                    }
                });
                if let Some(term) = term {
                    self.leadership.enter(term);
                }
                tokio::select! {
                    _ = self.leadership.changed(term) => {}
                    () = self.follow(client, &kinds) => return,
                }
            }
        };
        shutdown.run_until_cancelled(work).await;
    }

    /// Sends events to the index, beginning with new lists.
    async fn follow(&self, client: &Client, kinds: &Arc<Mutex<Kinds>>) {
        let mut news = self.streams(client, kinds).ready_chunks(BATCH);
        while let Some(batch) = news.next().await {
            let listed = batch.iter().any(|event| matches!(event, WatchEvent::Ends(Source::GpuNodes)));
            self.store.update(|index| {
                let now = Instant::now();
                for event in batch {
                    event.apply(now, index);
                }
            });
            if listed {
                kinds.lock().unwrap_or_else(PoisonError::into_inner).forget_unused();
            }
        }
    }

    fn streams(
        &self,
        client: &Client,
        kinds: &Arc<Mutex<Kinds>>,
    ) -> SelectAll<BoxStream<'static, WatchEvent>> {
        let Self { watched, health, objects, .. } = self;
        let mut all = SelectAll::new();
        let mut reader = Reader::new(watched.clone());
        let pods = Api::<SlimPod>::all(health.observing(client, Source::Pods));
        all.push(read(pods, Source::Pods, health, move |pod, gone| {
            let pod = reader.read(pod)?;
            Some(if gone { WatchEvent::PodGone(pod) } else { WatchEvent::Pod(pod) })
        }));
        let (wanted, mut words) = (watched.clone(), Words::default());
        let nodes = Api::<SlimNode>::all(health.observing(client, Source::Nodes));
        all.push(read(nodes, Source::Nodes, health, move |node, gone| {
            let name = node.name_any();
            Some(if gone {
                WatchEvent::NodeGone(name)
            } else {
                let facts = index::described(&wanted, &node, &mut words);
                WatchEvent::Node(name.into(), index::advertised(&wanted, &node), Arc::new(facts))
            })
        }));
        let (wanted, kinds) = (watched.clone(), Arc::clone(kinds));
        let gpu_nodes = Api::<PartialGpuNode>::all(health.observing(client, Source::GpuNodes));
        all.push(read(gpu_nodes, Source::GpuNodes, health, move |node, gone| {
            let name = node.name_any();
            if gone {
                return Some(WatchEvent::GpuNodeGone(name));
            }
            // The choice table of a new kind of machine is built here, outside the lock of the index.
            let mut kinds = kinds.lock().unwrap_or_else(PoisonError::into_inner);
            let inventory = index::inventory(&wanted, node, &mut kinds)?;
            Some(WatchEvent::GpuNode(name.into(), Box::new(inventory)))
        }));
        let (objects, listed) = (Arc::clone(objects), Arc::clone(objects));
        let gangs = Api::<PartialGang>::all(health.observing(client, Source::Gangs));
        let gangs = read(gangs, Source::Gangs, health, move |gang, gone| {
            let (name, object) = gang.read()?;
            if gone {
                return objects.gone(&name, &object.uid).then_some(WatchEvent::GangGone(name));
            }
            let newest = objects.saw(&name, object);
            Some(WatchEvent::Gang(name, Box::new(newest)))
        });
        // A list replaces what is known: after a restore of etcd it shows older versions.
        let gangs = gangs.inspect(move |event| {
            if matches!(event, WatchEvent::Begins(_)) {
                listed.clear();
            }
        });
        all.push(gangs.boxed());
        all
    }
}

/// The events of one watch. Errors are logged and retried. An object that cannot be parsed fails its list or watch, and
/// everything is listed again: nothing is decided without it.
fn read<K>(
    api: Api<K>,
    source: Source,
    health: &Arc<ApiHealth>,
    mut news: impl FnMut(K, bool) -> Option<WatchEvent> + Send + 'static,
) -> BoxStream<'static, WatchEvent>
where
    K: kube::Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let config = watcher::Config::default().timeout(WATCH_SECONDS);
    let health = Arc::clone(health);
    // The last error: one that persists is logged once.
    let mut said: Option<String> = None;
    steady::steady(move || watch(api.clone(), config.clone()))
        .filter_map(move |event| {
            match &event {
                // No object yet.
                Ok(Event::Init) => {}
                Ok(_) => {
                    said = None;
                    health.watch_works(source, Instant::now());
                }
                Err(error) if source == Source::Gangs && is_undefined(error) => {
                    health.watch_works(source, Instant::now());
                }
                Err(_) => health.watch_failed(source),
            }
            let found = match event {
                Ok(Event::Init) => Some(WatchEvent::Begins(source)),
                Ok(Event::InitDone) => Some(WatchEvent::Ends(source)),
                Ok(Event::Apply(object) | Event::InitApply(object)) => news(object, false),
                Ok(Event::Delete(object)) => news(object, true),
                Err(error) => {
                    let undefined = source == Source::Gangs && is_undefined(&error);
                    let error = chain(&error);
                    if said.as_ref() == Some(&error) {
                        tracing::debug!(source = source.as_str(), %error, "watch failed again");
                    } else if undefined {
                        tracing::warn!("Gangs are not defined here; apply manifests/crds.yaml");
                    } else {
                        tracing::warn!(source = source.as_str(), %error, "watch failed, trying again");
                    }
                    said = Some(error);
                    undefined.then_some(WatchEvent::Undefined(source))
                }
            };
            futures::future::ready(found)
        })
        .boxed()
}

/// Whether an object cannot be created because its namespace is being deleted. That is no failure: its subject is
/// deleted as well.
pub fn is_ending(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 403 && status.message.contains("is being terminated"))
}

/// Whether the kind is not defined in the API server. Then there are no Gangs, and a cluster without the CRD works as
/// before.
fn is_undefined(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404)
}

/// Checks the health of the API server, and lets time pass in the index.
async fn beat(client: Client, store: Arc<Store>, health: Arc<ApiHealth>, shutdown: CancellationToken) {
    loop {
        let answer = tokio::time::timeout(TICK, gantry_runtime::check_api_server(&client)).await;
        let now = Instant::now();
        if let Ok(Ok(())) = answer {
            health.answered(now);
        }
        if let Some(last) = health.last() {
            store.update(|index| index.tick(now, last));
        }
        if shutdown.run_until_cancelled(tokio::time::sleep(TICK)).await.is_none() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
