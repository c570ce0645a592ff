//! Publishes why pods wait where kube-scheduler cannot: its own count reports "Insufficient nvidia.com/gpu", or a
//! scheduling gate of Gantry keeps the pod from it, and no extender is called. One Event per pod and reason, in terms
//! of its gang or of GPUs, stable and bounded.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{MAX_MESSAGE, NodeName, PodUid, Reason, ResourceName};
use gantry_gang::Needs;
use gantry_gang::protocol::{Holder, WaitReason};
use gantry_planner::plan::unit;
use gantry_runtime::events::{Attempt, EventRecorder, Message};
use kube::Client;
use tokio_util::sync::CancellationToken;

use crate::event;
use crate::index::{FitFailure, IgnoredRequest, Index, Store};
use crate::metrics::{Metrics, Outcome};
use gantry_planner::decide;
use gantry_planner::request::Request;
use gantry_planner::snapshot::{ClassIx, NodeIx, NodeState, Snapshot};

/// Period of the checks of waiting pods.
const LOOK: Duration = Duration::from_secs(1);
/// Shortest time between two Events on one pod, however its reason changes.
const QUIET: Duration = Duration::from_secs(60);
/// How long the reason of a gang must be stable before it is published: most gangs are complete by then.
const SETTLED: Duration = Duration::from_secs(5);
/// Events written per check.
const AT_ONCE: usize = 20;
/// Nodes named per reason.
const NAMED: usize = 3;
/// Gangs named that have reserved what is asked for.
const HOLDERS: usize = 2;
/// Resources named where no node offers the requested one.
const OFFERED: usize = 8;
/// Largest edit distance of a name that is suggested.
const NEAR: usize = 4;

/// Publishes Events until `shutdown`.
pub(crate) async fn run(
    client: Client,
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) {
    let mut reported = PublishedNotes::default();
    let mut recorder = event::recorder(client);
    let work = async {
        loop {
            tokio::time::sleep(LOOK).await;
            publish_due(&mut recorder, &store, &metrics, &mut reported, gantry_runtime::now()).await;
        }
    };
    let _: Option<Infallible> = shutdown.run_until_cancelled(work).await;
}

/// Publishes the Events that are due.
async fn publish_due(
    recorder: &mut EventRecorder,
    store: &Store,
    metrics: &Metrics,
    reported: &mut PublishedNotes,
    now: Instant,
) {
    for Notice { pod, message, ignored } in due(store, reported, now) {
        let about = event::pod(&pod.namespace, &pod.name, pod.uid.as_str());
        let event = recorder.event(about, message);
        let outcome = match recorder.attempt(&event, false).await {
            Attempt::Written => "published",
            // The pod is deleted with its namespace.
            Attempt::NamespaceEnds => "failed",
            Attempt::Later(error) | Attempt::Refused(error) => {
                tracing::warn!(pod = %pod.name, namespace = %pod.namespace, error, "cannot publish event");
                reported.missed(&pod.uid);
                if let Some(ignored) = ignored {
                    store.update(|index| index.retry_ignored_request(ignored));
                }
                "failed"
            }
        };
        metrics.events.get_or_create(&Outcome { outcome }).inc();
    }
}

/// A pod for which no extender is called.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Address {
    uid: PodUid,
    namespace: Arc<str>,
    name: Arc<str>,
}

/// Why such a pod waits.
enum Cause {
    /// For its gang.
    Gang(WaitReason),
    /// kube-scheduler's own count finds too few devices for it.
    Devices(Arc<Request>, Arc<Needs>),
    /// The same, although it has a reservation on a node.
    Place(NodeName, Arc<Request>),
}

/// An Event to publish on a pod.
#[derive(Debug)]
struct Notice {
    pod: Address,
    message: Message,
    /// The request without effect that it is about.
    ignored: Option<IgnoredRequest>,
}

/// What was published on pods, and the notes of one snapshot.
#[derive(Default)]
struct PublishedNotes {
    /// What was published on each pod, and when it last was current; `None` if publishing failed.
    pods: HashMap<PodUid, (Instant, Option<String>)>,
    /// Since when the reason of each pod's gang is the same.
    same: HashMap<PodUid, (Instant, String)>,
    /// The snapshot of `notes`.
    generation: u64,
    notes: HashMap<(Arc<Request>, Arc<Needs>), Option<String>>,
}

impl PublishedNotes {
    /// Publishing on a pod failed: it is retried, but not at once.
    fn missed(&mut self, pod: &PodUid) {
        if let Some((_, note)) = self.pods.get_mut(pod) {
            *note = None;
        }
    }

    /// Whether the reason of a pod has been the same for a while.
    fn has_settled(&mut self, pod: &PodUid, gist: &str, now: Instant) -> bool {
        match self.same.get(pod) {
            Some((since, known)) if known == gist => now.saturating_duration_since(*since) >= SETTLED,
            _ => {
                self.same.insert(pod.clone(), (now, gist.to_owned()));
                false
            }
        }
    }

    /// The note for a pod, and the part of it that is published again when it changes.
    fn note(&mut self, store: &Store, snapshot: &Snapshot, cause: &Cause) -> Option<(String, String)> {
        match cause {
            Cause::Gang(why) => Some((why.message.to_string(), gist(why))),
            Cause::Devices(request, needs) => {
                let entry = self.notes.entry((Arc::clone(request), Arc::clone(needs)));
                let note = entry
                    .or_insert_with(|| store.read(|index| why_unplaced(index, snapshot, request, needs)));
                note.clone().map(|note| (note.clone(), note))
            }
            Cause::Place(node, request) => {
                reservation_note(snapshot, node, request).map(|note| (note.clone(), note))
            }
        }
    }
}

/// What of a gang's reason is published again when it changes: its facts only while the gang is invalid.
fn gist(why: &WaitReason) -> String {
    if why.is_invalid() { why.message.to_string() } else { why.reason.to_string() }
}

/// Pods for which no extender is called, each with its cause: for members without a reservation the reason of their
/// gang; for other pods what every node lacks; for a member with a reservation what its node lacks.
fn uncalled(index: &Index) -> Vec<(Address, Cause)> {
    let address = |uid: PodUid| {
        let (namespace, name) = index.pod_address(&uid)?;
        Some(Address { uid, namespace, name })
    };
    let short = index.insufficient_pods().into_iter().filter_map(|short| {
        let pod = index.pod(short.pod.as_str());
        let request = || pod?.request.clone().ok();
        let cause = match index.gangs().why_waits(&short.pod) {
            Some(why) => Cause::Gang(why),
            None => match index.gangs().node_kept_for(&short.pod) {
                Some(node) => Cause::Place(node.clone(), request()?),
                None => Cause::Devices(request()?, Arc::clone(&pod?.needs)),
            },
        };
        Some((address(short.pod)?, cause))
    });
    let gated = index.gated().into_iter().filter_map(|uid| {
        let why = index.gangs().why_waits(&uid)?;
        Some((address(uid)?, Cause::Gang(why)))
    });
    short.chain(gated).collect()
}

/// The Events that are due.
fn due(store: &Store, reported: &mut PublishedNotes, now: Instant) -> Vec<Notice> {
    let snapshot = store.snapshot();
    let uncalled = store.read(uncalled);
    let waiting: HashSet<&PodUid> = uncalled.iter().map(|(pod, _)| &pod.uid).collect();
    reported.pods.retain(|uid, _| waiting.contains(uid));
    reported.same.retain(|uid, _| waiting.contains(uid));
    if reported.generation != snapshot.generation {
        reported.generation = snapshot.generation;
        reported.notes.clear();
    }
    if !snapshot.synced {
        return Vec::new();
    }
    let mut due = ignored(store);
    for (pod, cause) in uncalled {
        if due.len() >= AT_ONCE {
            break;
        }
        if let Some((at, _)) = reported.pods.get(&pod.uid)
            && now.saturating_duration_since(*at) < QUIET
        {
            continue;
        }
        let Some((note, gist)) = reported.note(store, &snapshot, &cause) else {
            continue;
        };
        if !matches!(cause, Cause::Devices(..)) && !reported.has_settled(&pod.uid, &gist, now) {
            continue;
        }
        match reported.pods.get_mut(&pod.uid) {
            Some((at, Some(before))) if *before == gist => *at = now,
            _ => {
                reported.pods.insert(pod.uid.clone(), (now, Some(gist)));
                due.push(notice(pod, &cause, note));
            }
        }
    }
    due
}

/// Requests without effect that are to be published.
fn ignored(store: &Store) -> Vec<Notice> {
    if !store.read(Index::has_ignored_requests) {
        return Vec::new();
    }
    let taken = store.update(|index| index.take_ignored_requests(AT_ONCE / 2)).into_iter();
    let notice = |ignored: IgnoredRequest| {
        let pod = Address {
            uid: ignored.uid.clone(),
            namespace: Arc::clone(&ignored.namespace),
            name: Arc::clone(&ignored.name),
        };
        let message = event::message(Reason::RequestIgnored, true, &ignored.text);
        Notice { pod, message, ignored: Some(ignored) }
    };
    taken.map(notice).collect()
}

fn notice(pod: Address, cause: &Cause, note: String) -> Notice {
    let (reason, warning) = match cause {
        Cause::Gang(why) if why.is_invalid() => (Reason::GangInvalid, true),
        Cause::Gang(_) => (Reason::GangWaiting, false),
        Cause::Devices(..) | Cause::Place(..) => (Reason::GpusUnavailable, true),
    };
    let message = event::message(reason, warning, note);
    Notice { pod, message, ignored: None }
}

/// Why no node can take a pod of this request and these needs: [`note`].
pub(crate) fn why_unplaced(
    index: &Index,
    snapshot: &Snapshot,
    request: &Request,
    needs: &Needs,
) -> Option<String> {
    let holders = index.holders_for(request, needs);
    note(snapshot, request, &holders, &|node| index.misfit(node, needs))
}

/// Why no node can take a pod. First what no node offers at all; then by reason: `node-1, node-2: 0 of 8 GPUs free, 4
/// asked; node-3: 3 of 8 GPUs free, 4 asked`, the nearest miss first; then the gangs that have reserved what is asked for.
/// `None` if it asks for nothing that is managed, and all of it is offered: that is not ours to explain.
///
/// Nodes that labels, taints or volumes rule out are named as such, whatever devices they have.
fn note(
    snapshot: &Snapshot,
    request: &Request,
    holders: &[Holder],
    misfit: &dyn Fn(NodeIx) -> Option<FitFailure>,
) -> Option<String> {
    let mut parts = unoffered(snapshot, request);
    parts.extend(misses(snapshot, request, misfit));
    let mut asks = request.asks.iter();
    if parts.is_empty() {
        return asks
            .any(|ask| snapshot.managed.contains(&ask.resource))
            .then(|| "no node has a Gantry plugin that serves what is asked for".to_owned());
    }
    let named: Vec<String> = holders.iter().take(HOLDERS).map(ToString::to_string).collect();
    let reserved = match holders.len().saturating_sub(HOLDERS) {
        _ if named.is_empty() => String::new(),
        0 => format!("; reserved: {}", named.join(", ")),
        more => format!("; reserved: {}, and for {more} more gangs", named.join(", ")),
    };
    let mut note = String::new();
    for (position, part) in parts.into_iter().enumerate() {
        if note.len() + part.len() + reserved.len() + 10 > MAX_MESSAGE {
            note.push_str("; ...");
            break;
        }
        if position > 0 {
            note.push_str("; ");
        }
        note.push_str(&part);
    }
    note.push_str(&reserved);
    Some(note)
}

/// What is asked for that no node has, with what there is: most often a name that was mistyped, or a GPU that is cut
/// otherwise.
fn unoffered(snapshot: &Snapshot, request: &Request) -> Vec<String> {
    let missing = request.asks.iter().map(|ask| &ask.resource);
    missing
        .filter(|resource| !snapshot.offered.contains(*resource))
        .map(|resource| {
            let offered = snapshot.offered.iter().map(ResourceName::as_str);
            let distance = |name: &&str| strsim::damerau_levenshtein(name, resource.as_str());
            let nearest = offered.clone().min_by_key(distance);
            let near = nearest.filter(|name| distance(name) <= NEAR);
            let near = near.map_or(String::new(), |name| format!(" (nearest name: {name})"));
            let mut names = offered.clone().take(OFFERED).collect::<Vec<_>>().join(", ");
            match snapshot.offered.len().saturating_sub(OFFERED) {
                0 if names.is_empty() => names.push_str("none of NVIDIA's"),
                0 => {}
                more => names.push_str(&format!(" and {more} more")),
            }
            format!("no node offers {resource}{near}; offered are: {names}")
        })
        .collect()
}

fn misses(
    snapshot: &Snapshot,
    request: &Request,
    misfit: &dyn Fn(NodeIx) -> Option<FitFailure>,
) -> Vec<String> {
    // Some classes were in use once.
    let used: HashSet<ClassIx> = snapshot.nodes.iter().copied().collect();
    let lines: Vec<Vec<(usize, String)>> = snapshot
        .classes
        .iter()
        .zip((0..).map(ClassIx))
        .map(|(state, class)| match used.contains(&class) {
            true => lines(state, request),
            false => Vec::new(),
        })
        .collect();
    // Nodes that are ruled out come last.
    let mut reasons: HashMap<String, Nodes<'_>> = HashMap::new();
    for (node, name, _) in snapshot.iter() {
        let lines = snapshot.class(node).and_then(|class| lines.get(class.0 as usize));
        let lines = lines.filter(|lines| !lines.is_empty());
        let mut add = |line: &str, free: Option<usize>| match reasons.get_mut(line) {
            Some((_, nodes)) => nodes.push(name.as_str()),
            None => drop(reasons.insert(line.to_owned(), (free, vec![name.as_str()]))),
        };
        match lines.and_then(|_| misfit(node)) {
            Some(lack) => add(&lack.to_string(), None),
            None => lines.into_iter().flatten().for_each(|(free, line)| add(line, Some(*free))),
        }
    }
    let mut reasons: Vec<(String, Nodes<'_>)> = reasons.into_iter().collect();
    reasons.sort_by(|(a, (a_free, _)), (b, (b_free, _))| b_free.cmp(a_free).then_with(|| a.cmp(b)));
    let part = |(reason, (_, mut nodes)): (String, Nodes<'_>)| {
        nodes.sort_unstable();
        let more = nodes.len().saturating_sub(NAMED);
        let mut part = nodes.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
        if more > 0 {
            part.push_str(&format!(" and {more} more"));
        }
        part.push_str(": ");
        part.push_str(&reason);
        part
    };
    reasons.into_iter().map(part).collect()
}

/// The nodes of one reason, and how many devices are free on each; `None` if they are ruled out before devices count.
type Nodes<'a> = (Option<usize>, Vec<&'a str>);

/// The lines about a class of nodes, each with how many devices are free; none if it serves nothing that is asked for.
fn lines(state: &NodeState, request: &Request) -> Vec<(usize, String)> {
    let NodeState::Ours(class) = state else {
        return Vec::new();
    };
    if let Some(cause) = &class.withheld {
        return vec![(0, cause.to_string())];
    }
    let asks = request.asks.iter();
    asks.filter_map(|ask| {
        let (_, pool) = class.pool(ask.resource.as_str())?;
        let line = match decide::too_many(pool.max_request, ask) {
            Some(miss) => miss.of_one_node(),
            None => decide::node_line(pool, ask.devices),
        };
        Some((pool.free.len(), line))
    })
    .collect()
}

/// Why a member with a reservation on a node is refused by kube-scheduler's own count. `None` as a rule: its condition
/// is older than the reservation. But where kubelet advertises too few devices on the node, the pod never gets there.
fn reservation_note(snapshot: &Snapshot, node: &NodeName, request: &Request) -> Option<String> {
    let NodeState::Ours(class) = snapshot.node_state(snapshot.find(node.as_str())?) else {
        return None;
    };
    request.asks.iter().find_map(|ask| {
        let (_, pool) = class.pool(ask.resource.as_str())?;
        let healthy = pool.devices.saturating_sub(pool.unhealthy);
        let advertised = pool.advertised? as usize;
        let unit = unit(ask.resource.as_str());
        // Devices that are not advertised may be free ones. Its own are not among the free.
        let hidden = healthy.saturating_sub(advertised);
        (hidden > pool.free.len()).then(|| {
            format!("its reservation is on {node}, where kubelet advertises {advertised} of {healthy} healthy {unit}")
        })
    })
}

#[cfg(test)]
mod tests;
