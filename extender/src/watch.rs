//! Sends the events of four watches and the time to the index. Retries forever with a short back-off: scheduling has to
//! resume as soon as the API server is back.

mod api_health;
mod coalesced;
mod steady;
pub(crate) mod stream;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::stream::{BoxStream, SelectAll};
use futures::{Stream, StreamExt};
use gantry_api::{NodeName, PodUid, ResourceName};
use gantry_gang::NodeFacts;
use gantry_gang::protocol::Object;
use gantry_runtime::chain;
use gantry_runtime::watch::{PAGE, Selection};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

pub use api_health::ApiHealth;

use crate::gang::objects::{Name, Objects, PartialGang};
use crate::index::{self, Index, PartialGpuNode, SlimNode, Source, Store};
use crate::lease::Leadership;
use crate::metrics::Metrics;
use crate::mig_drain::ClusterDrains;
use crate::object_memory::{Kind, ObjectMemory, ObjectRef};
use crate::pod::{ParsedPod, Reader, SlimPod, TextInterner};
use crate::remediation::ClusterHealth;
use crate::slow_members::ClusterClocks;
use crate::watch::stream::{ReceivedObject, StreamedObject};
use crate::watched::WatchedResources;
use gantry_gang::Fault;
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
/// Bytes of a refused Gang without a decision.
const LEAST_GANG: usize = 512;

/// Reads a stream in a task of its own, which ends with the stream.
fn apart(mut stream: BoxStream<'static, WatchEvent>) -> BoxStream<'static, WatchEvent> {
    let (send, mut receive) = mpsc::channel(BATCH);
    let task = AbortOnDropHandle::new(tokio::spawn(async move {
        while let Some(event) = stream.next().await
            && send.send(event).await.is_ok()
        {}
    }));
    futures::stream::poll_fn(move |context| {
        let _ = &task;
        receive.poll_recv(context)
    })
    .boxed()
}

/// One event of a watch, parsed for the index.
enum WatchEvent {
    Pod(ParsedPod),
    PodGone(ParsedPod),
    /// A pod that is refused, and of which nothing is kept.
    PodRefused(PodUid),
    /// A pod of which nothing can be read: it stays as it is known.
    PodAsBefore(PodUid),
    Node(NodeName, Vec<(ResourceName, u32)>, Arc<NodeFacts>, Option<Arc<str>>),
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
            Self::Pod(ParsedPod::Facts(pod)) => index.pod_applied(*pod),
            Self::Pod(ParsedPod::OtherPod(pod)) => index.other_pod_applied(*pod),
            Self::PodGone(ParsedPod::Facts(pod)) => {
                let uid = pod.uid.clone();
                index.pod_deleted(now, &uid, Some(*pod));
            }
            Self::PodGone(ParsedPod::OtherPod(pod)) => index.other_pod_gone(&pod.uid),
            Self::PodRefused(uid) => index.pod_deleted(now, &uid, None),
            Self::PodAsBefore(uid) => index.pod_unread(&uid),
            Self::Node(name, advertised, facts, mark) => {
                index.node_applied(&name, advertised);
                index.node_described(facts);
                index.node_marked(&name, mark);
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
    pub watched: WatchedResources,
    /// Where the events go.
    pub store: Arc<Store>,
    /// Records how old the facts are.
    pub health: Arc<ApiHealth>,
    /// The newest versions of Gang objects.
    pub objects: Arc<Objects>,
    /// Whether this process leads.
    pub leadership: Arc<Leadership>,
    /// Counts coalesced changes.
    pub metrics: Arc<Metrics>,
    /// Where the health of GPUs is kept for rules of remediation, if there are any.
    pub(crate) gpu_health: Option<Arc<ClusterHealth>>,
    /// Where the clocks of GPUs are kept, if members of gangs are compared.
    pub(crate) gpu_clocks: Option<Arc<ClusterClocks>>,
    /// Where the GPUs are kept that are to be drained for MIG layouts.
    pub(crate) mig_drains: Arc<ClusterDrains>,
    /// How much is read.
    pub extent: Extent,
}

/// How much of a cluster is read, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Extent {
    /// All of it, in pages, as a daemon reads it.
    Paged,
    /// All of it, as fast as possible: each kind is listed at once and read by a task of its own.
    AtOnce,
    /// One node, its pods and all Gangs, as fast as possible.
    OfNode(NodeName),
}

impl Extent {
    /// What is selected of a kind.
    fn of(&self, kind: Kind) -> Selection {
        let fields = match (self, kind) {
            (Self::OfNode(node), Kind::Pod) => format!("spec.nodeName={node}"),
            (Self::OfNode(node), Kind::Node | Kind::GpuNode) => format!("metadata.name={node}"),
            _ => String::new(),
        };
        let page = (*self == Self::Paged).then_some(PAGE);
        Selection { fields, renew: WATCH_SECONDS, page }
    }
}

/// Watches until `shutdown`.
pub async fn run(client: Client, watches: Watches, shutdown: CancellationToken) {
    let reader = Arc::new(Mutex::new(Reader::new(watches.watched.clone())));
    let heartbeat = beat(client.clone(), watches.clone(), Arc::clone(&reader), shutdown.clone());
    let mut heartbeat = tokio::spawn(heartbeat);
    let watching = watches.run(&client, &reader, &shutdown);
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
    async fn run(&self, client: &Client, reader: &Arc<Mutex<Reader>>, shutdown: &CancellationToken) {
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
                    () = self.follow(client, reader, &kinds) => return,
                }
            }
        };
        shutdown.run_until_cancelled(work).await;
    }

    /// Sends events to the index, beginning with new lists.
    async fn follow(&self, client: &Client, reader: &Arc<Mutex<Reader>>, kinds: &Arc<Mutex<Kinds>>) {
        let mut news = self.streams(client, reader, kinds).ready_chunks(BATCH);
        while let Some(batch) = news.next().await {
            let listed = batch.iter().any(|event| matches!(event, WatchEvent::Ends(Source::GpuNodes)));
            self.store.update(|index| {
                let now = gantry_runtime::now();
                for event in batch {
                    event.apply(now, index);
                }
            });
            if listed {
                let gpu_nodes: HashSet<NodeName> = self.store.read(Index::nodes_with_inventory);
                self.gpu_health.iter().for_each(|health| health.retain(&gpu_nodes));
                self.gpu_clocks.iter().for_each(|clocks| clocks.retain(&gpu_nodes));
                self.mig_drains.retain(&gpu_nodes);
                kinds.lock().unwrap_or_else(PoisonError::into_inner).forget_unused();
            }
        }
    }

    fn streams(
        &self,
        client: &Client,
        reader: &Arc<Mutex<Reader>>,
        kinds: &Arc<Mutex<Kinds>>,
    ) -> SelectAll<BoxStream<'static, WatchEvent>> {
        let Self { watched, health, objects, store, .. } = self;
        let mut all = SelectAll::new();
        let (reader, memory) = (Arc::clone(reader), Arc::clone(store.memory()));
        let pods = Api::<SlimPod>::all(health.observing(client, Source::Pods));
        all.push(self.read(self.events(pods, Kind::Pod), Source::Pods, move |pod, gone| {
            let mut reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
            pod_event(&mut reader, &memory, pod, gone)
        }));
        let (wanted, mut words, memory) =
            (watched.clone(), TextInterner::default(), Arc::clone(store.memory()));
        let nodes = Api::<SlimNode>::all(health.observing(client, Source::Nodes));
        all.push(self.read(self.events(nodes, Kind::Node), Source::Nodes, move |node, gone| {
            let name = node.object.name_any();
            let about = ObjectRef::of(Kind::Node, &node.object);
            if gone {
                memory.release(Kind::Node, &about.uid);
                words.sweep();
                return Some(WatchEvent::NodeGone(name));
            }
            if memory.admit(&about, node.bytes).is_err() {
                return Some(WatchEvent::NodeGone(name));
            }
            let facts = index::described(&wanted, &node.object, &mut words);
            let (advertised, mark) = (index::advertised(&wanted, &node.object), index::mark(&node.object));
            Some(WatchEvent::Node(name.into(), advertised, Arc::new(facts), mark))
        }));
        let (wanted, kinds, memory) = (watched.clone(), Arc::clone(kinds), Arc::clone(store.memory()));
        let (gpu_health, gpu_clocks) = (self.gpu_health.clone(), self.gpu_clocks.clone());
        let mig_drains = Arc::clone(&self.mig_drains);
        let gpu_nodes = Api::<PartialGpuNode>::all(health.observing(client, Source::GpuNodes));
        let gpu_nodes =
            coalesced::coalesced(self.events(gpu_nodes, Kind::GpuNode), Arc::clone(&self.metrics));
        all.push(self.read(gpu_nodes, Source::GpuNodes, move |node, gone| {
            let name = node.object.name_any();
            let about = ObjectRef::of(Kind::GpuNode, &node.object);
            if gone {
                memory.release(Kind::GpuNode, &about.uid);
                let known = name.as_str().into();
                gpu_health.iter().for_each(|health| health.forget(&known));
                gpu_clocks.iter().for_each(|clocks| clocks.forget(&known));
                mig_drains.forget(&known);
                return Some(WatchEvent::GpuNodeGone(name));
            }
            let mut object = node.object;
            if memory.admit(&about, node.bytes).is_err() {
                // Its GPUs are not given out, like those of a node that cannot be read.
                (object.spec, object.status) = (Box::default(), None);
            }
            let known = name.as_str().into();
            gpu_health.iter().for_each(|health| health.observe(&known, &object));
            gpu_clocks.iter().for_each(|clocks| clocks.observe(&known, &object));
            mig_drains.observe(&known, &object);
            // The choice table of a new kind of machine is built here, outside the lock of the index.
            let mut kinds = kinds.lock().unwrap_or_else(PoisonError::into_inner);
            let inventory = index::inventory(&wanted, object, &mut kinds)?;
            Some(WatchEvent::GpuNode(name.into(), Box::new(inventory)))
        }));
        let (objects, listed) = (Arc::clone(objects), Arc::clone(objects));
        let memory = Arc::clone(store.memory());
        let gangs = Api::<PartialGang>::all(health.observing(client, Source::Gangs));
        let gangs = self.read(self.events(gangs, Kind::Gang), Source::Gangs, move |gang, gone| {
            let about = ObjectRef::of(Kind::Gang, &gang.object);
            let (name, mut object) = gang.object.read()?;
            if gone {
                memory.release(Kind::Gang, &about.uid);
                return objects.gone(&name, &object.uid).then_some(WatchEvent::GangGone(name));
            }
            if let Err(refusal) = memory.admit(&about, gang.bytes) {
                let place = format!("Gang {}", name.name);
                object.spec = Err(Fault { place: place.into(), words: refusal.to_string().into() });
                // A decision is only written by an extender, and completed whatever else the object has.
                let has_decision = object.status.decision.is_some();
                let least = gang.bytes.filter(|_| has_decision).unwrap_or(LEAST_GANG);
                if !memory.keep_least(&about, least) || !has_decision {
                    object.status = Default::default();
                }
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
        match self.extent {
            Extent::Paged => all,
            Extent::AtOnce | Extent::OfNode(_) => all.into_iter().map(apart).collect(),
        }
    }

    /// The events of one watch, which pauses after errors.
    fn events<K: StreamedObject>(
        &self,
        api: Api<K>,
        kind: Kind,
    ) -> impl Stream<Item = Result<Event<ReceivedObject<K>>, watcher::Error>> + Send + 'static {
        steady::steady(stream::events(api, kind, Arc::clone(self.store.memory()), self.extent.of(kind)))
    }

    /// What the events of one watch mean. Errors are logged and retried. An object that cannot be parsed fails its list or watch,
    /// and everything is listed again: nothing is decided without it.
    fn read<K: StreamedObject>(
        &self,
        events: impl Stream<Item = Result<Event<ReceivedObject<K>>, watcher::Error>> + Send + 'static,
        source: Source,
        mut news: impl FnMut(ReceivedObject<K>, bool) -> Option<WatchEvent> + Send + 'static,
    ) -> BoxStream<'static, WatchEvent> {
        let health = Arc::clone(&self.health);
        // The last error: one that persists is logged once.
        let mut reported: Option<String> = None;
        events
            .filter_map(move |event| {
                match &event {
                    // No object yet.
                    Ok(Event::Init) => {}
                    Ok(_) => {
                        reported = None;
                        health.watch_works(source, gantry_runtime::now());
                    }
                    Err(error) if source == Source::Gangs && is_undefined(error) => {
                        health.watch_works(source, gantry_runtime::now());
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
                        if reported.as_ref() == Some(&error) {
                            tracing::debug!(source = source.as_str(), %error, "watch failed again");
                        } else if undefined {
                            tracing::warn!("Gangs are not defined here; apply manifests/crds.yaml");
                        } else {
                            tracing::warn!(source = source.as_str(), %error, "watch failed, trying again");
                        }
                        reported = Some(error);
                        undefined.then_some(WatchEvent::Undefined(source))
                    }
                };
                futures::future::ready(found)
            })
            .boxed()
    }
}

/// What a pod means for the index. Of a refused pod that runs, its devices are kept.
fn pod_event(
    reader: &mut Reader,
    memory: &ObjectMemory,
    pod: ReceivedObject<SlimPod>,
    gone: bool,
) -> Option<WatchEvent> {
    let about = ObjectRef::of(Kind::Pod, &pod.object);
    let uid = PodUid::from(pod.object.metadata.uid.as_deref()?);
    let is_bound = pod.object.node().is_some();
    let seen = reader.read(pod.object)?;
    let weight = seen.weight();
    if gone {
        memory.release(Kind::Pod, &about.uid);
        memory.dropped(weight);
        return Some(if pod.bytes.is_some() {
            WatchEvent::PodGone(seen)
        } else {
            WatchEvent::PodRefused(uid)
        });
    }
    if weight == 0 && pod.bytes.is_some() {
        memory.release(Kind::Pod, &about.uid);
        return Some(WatchEvent::Pod(seen));
    }
    if memory.admit(&about, pod.bytes.map(|_| weight)).is_ok() {
        return Some(WatchEvent::Pod(seen));
    }
    memory.dropped(weight);
    let least = seen.into_least();
    let weight = least.weight();
    if weight > 0 && memory.keep_least(&about, weight) {
        return Some(WatchEvent::Pod(least));
    }
    // What holds nothing need not be known. What cannot be read any more may hold devices as before.
    Some(if is_bound || pod.bytes.is_none() {
        WatchEvent::PodAsBefore(uid)
    } else {
        WatchEvent::PodRefused(uid)
    })
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

/// Checks the health of the API server, lets time pass in the index, and returns the memory of objects that are gone.
async fn beat(client: Client, watches: Watches, reader: Arc<Mutex<Reader>>, shutdown: CancellationToken) {
    let Watches { store, health, .. } = watches;
    loop {
        let answer = tokio::time::timeout(TICK, gantry_runtime::check_api_server(&client)).await;
        let now = gantry_runtime::now();
        if let Ok(Ok(())) = answer {
            health.answered(now);
        }
        if let Some(last) = health.last() {
            store.update(|index| index.tick(now, last));
        }
        if store.memory().take_worth_a_sweep() {
            store.update(Index::sweep);
            reader.lock().unwrap_or_else(PoisonError::into_inner).sweep();
            gantry_runtime::memory::trim();
        }
        if shutdown.run_until_cancelled(tokio::time::sleep(TICK)).await.is_none() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
