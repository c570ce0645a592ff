//! The memory that watched objects take: bounded for one object, for each namespace and in all. An object beyond a
//! limit is refused: nothing, or only what it holds already, is kept of it, and an Event on it states why. Every client
//! that may create objects in one namespace would otherwise decide when the extender runs out of memory.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gantry_api::Reason;
use gantry_runtime::events::{self, EventWriter};
use kube::Client;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::event;
use crate::metrics::{Metrics, Outcome};

/// `--object-memory`, in MiB, unless it is set.
pub const DEFAULT_MIB: u32 = 160;
const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
/// What a namespace may always have, from a part of the memory that larger ones may not use.
const SMALL: usize = 256 * KIB;
/// Refused objects that are remembered, to report each once.
const REMEMBERED: usize = 4096;
/// Before refused objects are listed again because others have gone.
const AGAIN: Duration = Duration::from_secs(120);
/// Reports that may wait to be written as Events. More are counted only.
const REPORTS: usize = 256;
/// Events that are written at once, and after those per second.
const EVENTS_AT_ONCE: u32 = 20;
const EVENTS_PER_SECOND: u32 = 5;
/// Bytes that have to be released before the allocator is to return them.
const WORTH_A_SWEEP: usize = 4 * MIB;

/// The kinds of object that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Pods.
    Pod,
    /// Nodes.
    Node,
    /// GpuNodes.
    GpuNode,
    /// Gangs.
    Gang,
    /// PodDisruptionBudgets.
    Budget,
    /// PersistentVolumeClaims.
    Claim,
    /// PersistentVolumes.
    Volume,
    /// Objects that state the size of a gang.
    Owner,
}

impl Kind {
    /// API version and kind.
    fn api(self) -> (&'static str, &'static str) {
        match self {
            Self::Pod => ("v1", "Pod"),
            Self::Node => ("v1", "Node"),
            Self::GpuNode => ("gantry.dev/v1alpha1", "GpuNode"),
            Self::Gang => ("gantry.dev/v1alpha1", "Gang"),
            Self::Budget => ("policy/v1", "PodDisruptionBudget"),
            Self::Claim => ("v1", "PersistentVolumeClaim"),
            Self::Volume => ("v1", "PersistentVolume"),
            Self::Owner => ("", "owner"),
        }
    }

    /// Most bytes that are kept of one object.
    fn limit(self) -> usize {
        match self {
            Self::Pod => 64 * KIB,
            Self::Budget | Self::Claim | Self::Volume => 16 * KIB,
            Self::Node => 128 * KIB,
            Self::Owner => 32 * KIB,
            // A Gang has the decision about thousands of members, a GpuNode hundreds of devices and their holders.
            Self::Gang => 8 * MIB,
            Self::GpuNode => 2 * MIB,
        }
    }

    /// Most bytes that may be read of one object before the limit of what is kept applies.
    pub(crate) fn read_limit(self) -> usize {
        match self {
            Self::GpuNode | Self::Gang => 8 * MIB,
            // A template of a pod, of which little is kept.
            Self::Owner => MIB,
            _ => 512 * KIB,
        }
    }

    /// Bytes that are kept of an object of so many bytes as it is read.
    fn kept(self, read: usize) -> usize {
        match self {
            // The name of its volume.
            Self::Claim => 256 + read / 16,
            // Of the JSON values of a device little is kept.
            Self::GpuNode => 1024 + read / 4,
            // The index has a copy.
            Self::Budget | Self::Gang => 2 * read,
            Self::Pod | Self::Node | Self::Volume | Self::Owner => read,
        }
    }

    /// Whether users of a namespace create such objects.
    fn is_shared(self) -> bool {
        !matches!(self, Self::Node | Self::GpuNode)
    }
}

/// An object, as Events refer to it.
#[derive(Debug, Clone)]
pub(crate) struct ObjectRef {
    pub(crate) kind: Kind,
    /// API version and kind, for objects of [`Kind::Owner`].
    pub(crate) api: Option<(String, String)>,
    /// Empty for an object without a namespace.
    pub(crate) namespace: Arc<str>,
    pub(crate) name: Arc<str>,
    pub(crate) uid: Arc<str>,
}

impl ObjectRef {
    /// An object as the API server sent it.
    pub(crate) fn of(kind: Kind, object: &impl kube::Resource) -> Self {
        let meta = object.meta();
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
        Self {
            kind,
            api: None,
            namespace: text(&meta.namespace),
            name: text(&meta.name),
            uid: text(&meta.uid),
        }
    }

    /// API version and kind.
    pub(crate) fn api(&self) -> (&str, &str) {
        self.api.as_ref().map_or(self.kind.api(), |(version, kind)| (version, kind))
    }

    /// What it is counted under: the persistent volumes of all namespaces are one of their own.
    fn account(&self) -> &str {
        match self.kind {
            Kind::Volume => "persistent volumes",
            _ => &self.namespace,
        }
    }
}

/// Why an object is not kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// What is refused, such as `Pod a`.
    what: Arc<str>,
    limit: Limit,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Limit {
    /// Of one object, in bytes.
    Object(usize),
    /// Of its namespace.
    Namespace(Arc<str>, usize),
    /// Of all.
    Total(usize),
}

impl Refusal {
    /// The reason of the Event.
    pub(crate) fn reason(&self) -> Reason {
        match self.limit {
            Limit::Object(_) => Reason::ObjectTooLarge,
            Limit::Namespace(..) => Reason::NamespaceTooLarge,
            Limit::Total(_) => Reason::ObjectMemoryFull,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = &self.what;
        match &self.limit {
            Limit::Object(limit) => write!(
                f,
                "{what} is not read: it takes more than {} KiB; shorten its labels, affinity, tolerations or lists",
                limit / KIB
            ),
            Limit::Namespace(namespace, limit) => write!(
                f,
                "{what} is not read: the objects of namespace {namespace} take {} MiB, the limit; delete some",
                limit / MIB
            ),
            Limit::Total(limit) => write!(
                f,
                "{what} is not read: all objects take {} MiB, the limit; raise --object-memory and the memory limit",
                limit / MIB
            ),
        }
    }
}

/// The limits, in bytes.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// One namespace.
    namespace: usize,
    /// All namespaces.
    shared: usize,
    /// For namespaces below [`SMALL`], once `shared` is full.
    reserve: usize,
    /// For what has to be known of refused objects.
    least: usize,
    /// Nodes and GpuNodes.
    cluster: usize,
}

impl Limits {
    /// Of so many bytes in all: three fifths for the objects of namespaces, a tenth in reserve for small ones, a
    /// twentieth for refused objects, the rest for nodes.
    fn of(total: usize) -> Self {
        let (shared, reserve, least) = (total / 10 * 6, total / 10, total / 20);
        Self { namespace: shared / 4, shared, reserve, least, cluster: total - shared - reserve - least }
    }
}

/// A part of the memory with a limit of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pool {
    Shared,
    Cluster,
    Least,
}

impl Pool {
    /// The pool of an object that is kept whole.
    fn of(kind: Kind) -> Self {
        if kind.is_shared() { Self::Shared } else { Self::Cluster }
    }
}

#[derive(Debug)]
struct Entry {
    pool: Pool,
    account: Arc<str>,
    bytes: usize,
    /// The list in which it was last named.
    list: u32,
}

/// What is kept of a namespace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes.
    pub bytes: usize,
    /// Objects that are refused now.
    pub refused: usize,
}

type Key = (Kind, Arc<str>);

#[derive(Debug)]
struct State {
    limits: Limits,
    objects: HashMap<Key, Entry>,
    accounts: BTreeMap<Arc<str>, Usage>,
    /// Bytes of each pool.
    used: [usize; 3],
    /// By kind, the number of its list.
    lists: HashMap<Kind, u32>,
    refused: HashMap<Key, (Arc<str>, Refusal)>,
    refusals: u64,
    /// Objects have gone since refused ones were last listed again.
    has_gained: bool,
    /// When each kind was last listed again for that.
    listed_again: HashMap<Kind, Instant>,
    /// Bytes released since the last sweep.
    released: usize,
    reports: mpsc::Sender<(ObjectRef, Refusal)>,
}

/// The bytes that are kept of all watched objects.
#[derive(Debug)]
pub struct ObjectMemory {
    state: Mutex<State>,
    reports: Mutex<Option<mpsc::Receiver<(ObjectRef, Refusal)>>>,
    large: Arc<Semaphore>,
}

/// Bytes kept by namespace: the largest, and the rest as `other`.
pub type Largest = Vec<(String, Usage)>;

impl ObjectMemory {
    /// Keeps so many bytes.
    pub fn new(bytes: usize) -> Self {
        let (reports, reported) = mpsc::channel(REPORTS);
        let state = State {
            limits: Limits::of(bytes),
            objects: HashMap::new(),
            accounts: BTreeMap::new(),
            used: [0; 3],
            lists: HashMap::new(),
            refused: HashMap::new(),
            refusals: 0,
            has_gained: false,
            listed_again: HashMap::new(),
            released: 0,
            reports,
        };
        let large = Arc::new(Semaphore::new(1));
        Self { state: Mutex::new(state), reports: Mutex::new(Some(reported)), large }
    }

    /// Keeps so many MiB.
    pub fn of_mib(mib: u32) -> Self {
        Self::new(usize::try_from(mib).unwrap_or(usize::MAX / MIB).saturating_mul(MIB))
    }

    /// Taken while a large object is received: only one is at a time, of all watches.
    pub(crate) fn large(&self) -> Arc<Semaphore> {
        Arc::clone(&self.large)
    }

    /// The refused objects, for the task that writes Events.
    pub(crate) fn take_reports(&self) -> Option<mpsc::Receiver<(ObjectRef, Refusal)>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an object of so many bytes, in place of an earlier version of it.
    ///
    /// # Errors
    /// It is beyond a limit. Then the earlier version is not kept either.
    pub(crate) fn keep(&self, about: &ObjectRef, bytes: usize) -> Result<(), Refusal> {
        self.lock().keep(about, bytes, Pool::of(about.kind))
    }

    /// Keeps an object of so many bytes, `None` if it was too large to be read. A refused one is reported.
    ///
    /// # Errors
    /// It is beyond a limit. Then the earlier version is not kept either.
    pub(crate) fn admit(&self, about: &ObjectRef, bytes: Option<usize>) -> Result<(), Refusal> {
        let kept = match bytes {
            Some(bytes) => self.keep(about, about.kind.kept(bytes)),
            None => Err(Self::too_large(about)),
        };
        kept.inspect_err(|refusal| self.refuse(about, refusal.clone()))
    }

    /// Keeps what has to be known of a refused object, such as the devices of a running pod. The limit of its namespace
    /// does not apply, but one for all such objects. False if that is reached.
    pub(crate) fn keep_least(&self, about: &ObjectRef, bytes: usize) -> bool {
        self.lock().keep(about, bytes, Pool::Least).is_ok()
    }

    /// Why an object is refused that was too large to be read.
    pub(crate) fn too_large(about: &ObjectRef) -> Refusal {
        Refusal { what: what(about), limit: Limit::Object(about.kind.limit()) }
    }

    /// Reports an object as refused, once.
    pub(crate) fn refuse(&self, about: &ObjectRef, refusal: Refusal) {
        self.lock().refuse(about, refusal);
    }

    /// An object is gone, or nothing is kept of it.
    pub(crate) fn release(&self, kind: Kind, uid: &str) {
        let mut state = self.lock();
        let key = (kind, Arc::from(uid));
        state.has_gained |= state.release(&key);
        state.forget_refusal(&key);
    }

    /// A list of a kind begins.
    pub(crate) fn list_begins(&self, kind: Kind) {
        *self.lock().lists.entry(kind).or_default() += 1;
    }

    /// A list of a kind is complete: what it did not name is gone.
    pub(crate) fn list_ends(&self, kind: Kind) {
        let mut state = self.lock();
        let list = state.lists.get(&kind).copied().unwrap_or_default();
        let gone = state.objects.iter().filter(|(key, entry)| key.0 == kind && entry.list != list);
        let gone: Vec<Key> = gone.map(|(key, _)| key.clone()).collect();
        for key in gone {
            state.has_gained |= state.release(&key);
        }
    }

    /// Whether a kind has to be listed again: objects were refused, and others have gone since.
    pub(crate) fn lists_again(&self, kind: Kind, now: Instant) -> bool {
        let mut state = self.lock();
        let rests = state.listed_again.get(&kind).is_some_and(|last| now.duration_since(*last) < AGAIN);
        // An object that is too large by itself fits no better.
        let fits_later = |(key, (_, refusal)): (&Key, &(Arc<str>, Refusal))| {
            let later = key.0 == kind && !matches!(refusal.limit, Limit::Object(_));
            later.then(|| key.clone())
        };
        let again: Vec<Key> = state.refused.iter().filter_map(fits_later).collect();
        if !state.has_gained || rests || again.is_empty() {
            return false;
        }
        state.listed_again.insert(kind, now);
        for key in &again {
            state.forget_refusal(key);
        }
        state.has_gained = false;
        true
    }

    /// Why a pod is refused, if it is.
    pub(crate) fn refusal_of_pod(&self, uid: &str) -> Option<Refusal> {
        let state = self.lock();
        state.refused.get(&(Kind::Pod, Arc::from(uid))).map(|(_, refusal)| refusal.clone())
    }

    /// Why a pod that no watch has shown yet would be refused.
    pub(crate) fn would_refuse(&self, about: &ObjectRef, bytes: usize) -> Option<Refusal> {
        self.lock().check(about, bytes, Pool::of(about.kind)).err()
    }

    /// Counts what was read of an object and is not kept: until the next sweep it may be among the interned values.
    pub(crate) fn dropped(&self, bytes: usize) {
        let mut state = self.lock();
        state.released = state.released.saturating_add(bytes);
    }

    /// Whether so much was released that the allocator is to return it.
    pub(crate) fn take_worth_a_sweep(&self) -> bool {
        let mut state = self.lock();
        let worth = state.released >= WORTH_A_SWEEP;
        if worth {
            state.released = 0;
        }
        worth
    }

    /// The namespaces that take most, at most `count`, and the rest as `other`; objects without a namespace as
    /// `cluster`.
    pub fn largest(&self, count: usize) -> Largest {
        let state = self.lock();
        let named = |name: &str| match name {
            "" => "cluster".to_owned(),
            name => name.to_owned(),
        };
        let mut all: Largest = state.accounts.iter().map(|(name, usage)| (named(name), *usage)).collect();
        all.sort_by(|(a_name, a), (b_name, b)| b.bytes.cmp(&a.bytes).then_with(|| a_name.cmp(b_name)));
        let mut other = Usage::default();
        for (_, usage) in all.split_off(count.min(all.len())) {
            other.bytes += usage.bytes;
            other.refused += usage.refused;
        }
        all.push(("other".to_owned(), other));
        all
    }

    /// Bytes that may be kept in all, and how many objects were refused so far.
    pub fn limit_and_refusals(&self) -> (usize, u64) {
        let state = self.lock();
        let Limits { shared, reserve, least, cluster, .. } = state.limits;
        (shared + reserve + least + cluster, state.refusals)
    }
}

impl Default for ObjectMemory {
    fn default() -> Self {
        Self::of_mib(DEFAULT_MIB)
    }
}

impl State {
    fn check(&self, about: &ObjectRef, bytes: usize, pool: Pool) -> Result<(), Refusal> {
        let refused = |limit| Err(Refusal { what: what(about), limit });
        let limits = &self.limits;
        if bytes > about.kind.limit() {
            return refused(Limit::Object(about.kind.limit()));
        }
        let limit = match pool {
            Pool::Cluster => limits.cluster,
            Pool::Least => limits.least,
            Pool::Shared => {
                let has = self.accounts.get(about.account()).map_or(0, |usage| usage.bytes) + bytes;
                if has > limits.namespace {
                    return refused(Limit::Namespace(about.account().into(), limits.namespace));
                }
                limits.shared + if has <= SMALL { limits.reserve } else { 0 }
            }
        };
        match self.used[pool as usize] + bytes > limit {
            true => refused(Limit::Total(limit)),
            false => Ok(()),
        }
    }

    fn keep(&mut self, about: &ObjectRef, bytes: usize, pool: Pool) -> Result<(), Refusal> {
        let key = (about.kind, Arc::clone(&about.uid));
        self.release(&key);
        self.check(about, bytes, pool)?;
        if pool != Pool::Least {
            self.forget_refusal(&key);
        }
        let account = match self.accounts.get_key_value(about.account()) {
            Some((known, _)) => Arc::clone(known),
            None => Arc::from(about.account()),
        };
        self.accounts.entry(Arc::clone(&account)).or_default().bytes += bytes;
        self.used[pool as usize] += bytes;
        let list = self.lists.get(&about.kind).copied().unwrap_or_default();
        self.objects.insert(key, Entry { pool, account, bytes, list });
        Ok(())
    }

    /// Whether the object was kept.
    fn release(&mut self, key: &Key) -> bool {
        let Some(Entry { pool, account, bytes, .. }) = self.objects.remove(key) else {
            return false;
        };
        self.used[pool as usize] -= bytes;
        self.released += bytes;
        self.change(&account, |usage| usage.bytes -= bytes);
        true
    }

    fn change(&mut self, account: &Arc<str>, change: impl FnOnce(&mut Usage)) {
        let usage = self.accounts.entry(Arc::clone(account)).or_default();
        change(usage);
        if *usage == Usage::default() {
            self.accounts.remove(account);
        }
    }

    fn refuse(&mut self, about: &ObjectRef, refusal: Refusal) {
        let key = (about.kind, Arc::clone(&about.uid));
        let is_new = self.refused.get(&key).is_none_or(|(_, known)| *known != refusal);
        if !is_new {
            return;
        }
        self.refusals += 1;
        self.forget_refusal(&key);
        if self.refused.len() >= REMEMBERED {
            return;
        }
        let account = Arc::from(about.account());
        self.change(&account, |usage| usage.refused += 1);
        // Of too many only some have an Event; the metrics count all.
        let _ = self.reports.try_send((about.clone(), refusal.clone()));
        self.refused.insert(key, (account, refusal));
    }

    fn forget_refusal(&mut self, key: &Key) {
        if let Some((account, _)) = self.refused.remove(key) {
            self.change(&account, |usage| usage.refused -= 1);
        }
    }
}

/// Writes an Event on each refused object that is reported, until `shutdown`.
pub(crate) async fn report(
    client: Client,
    memory: Arc<ObjectMemory>,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) {
    let Some(mut reports) = memory.take_reports() else {
        return;
    };
    let mut writer = EventWriter::new(event::recorder(client), EVENTS_AT_ONCE, EVENTS_PER_SECOND);
    loop {
        let until = writer.due().unwrap_or_else(|| tokio::time::Instant::now() + Duration::from_secs(1));
        let reported = tokio::time::timeout_at(until, reports.recv());
        let Some(reported) = shutdown.run_until_cancelled(reported).await else {
            break;
        };
        if let Ok(Some((about, refusal))) = reported {
            let message = event::message(refusal.reason(), true, refusal.to_string());
            let object = match &*about.namespace {
                "" => events::cluster_object(about.api(), &about.name, &about.uid),
                namespace => events::object(about.api(), namespace, &about.name, &about.uid),
            };
            tracing::warn!(namespace = %about.namespace, "{refusal}");
            writer.write(object, message).await;
        }
        writer.retry().await;
        let (published, failed) = writer.take_counts();
        for (outcome, count) in [("published", published), ("failed", failed)] {
            metrics.events.get_or_create(&Outcome { outcome }).inc_by(count);
        }
    }
    // For the next term of leadership.
    *memory.reports.lock().unwrap_or_else(PoisonError::into_inner) = Some(reports);
}

fn what(about: &ObjectRef) -> Arc<str> {
    format!("{} {}", about.api().1, about.name).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(kind: Kind, namespace: &str, name: &str) -> ObjectRef {
        ObjectRef { kind, api: None, namespace: namespace.into(), name: name.into(), uid: name.into() }
    }

    /// Limits of 6,000,000 in all, 1,500,000 per namespace and 1,000,000 in reserve.
    fn memory() -> ObjectMemory {
        ObjectMemory::new(10_000_000)
    }

    /// Fills a namespace with pods until one is refused; how many it has.
    fn fill(memory: &ObjectMemory, namespace: &str) -> usize {
        (0..)
            .take_while(|number| {
                memory.keep(&about(Kind::Pod, namespace, &format!("{namespace}-{number}")), 60_000).is_ok()
            })
            .count()
    }

    #[test]
    fn object_over_its_limit_is_refused_with_its_earlier_version() {
        let memory = memory();
        let pod = about(Kind::Pod, "ml", "a");
        memory.keep(&pod, 1_000).unwrap();
        let refusal = memory.keep(&pod, 64 * KIB + 1).unwrap_err();
        assert_eq!(refusal.reason(), Reason::ObjectTooLarge);
        assert_eq!(
            refusal.to_string(),
            "Pod a is not read: it takes more than 64 KiB; shorten its labels, affinity, tolerations or lists"
        );
        assert_eq!(memory.largest(9), [("other".to_owned(), Usage::default())]);
    }

    #[test]
    fn namespace_gets_its_share_and_small_ones_the_reserve() {
        let memory = memory();
        for namespace in ["a", "b", "c"] {
            assert_eq!(fill(&memory, namespace), 25, "{namespace}");
        }
        let refusal = memory.keep(&about(Kind::Pod, "a", "x"), 60_000).unwrap_err();
        assert_eq!(refusal.reason(), Reason::NamespaceTooLarge);
        fill(&memory, "d");
        // All is taken; a small namespace still has its part, and nodes theirs.
        let honest = about(Kind::Pod, "honest", "pod");
        memory.keep(&honest, 10_000).unwrap();
        memory.keep(&about(Kind::Node, "", "n"), 100_000).unwrap();
        let many = (0..1_000).filter(|number| {
            memory.keep(&about(Kind::Pod, &format!("small-{number}"), &format!("s{number}")), 60_000).is_ok()
        });
        assert!(many.count() < 20, "the reserve is bounded too");
    }

    #[test]
    fn least_of_a_refused_object_is_kept_beyond_its_namespace() {
        let memory = memory();
        fill(&memory, "a");
        let pod = about(Kind::Pod, "a", "bound");
        memory.keep(&pod, 60_000).unwrap_err();
        assert!(memory.keep_least(&pod, 1_000));
    }

    #[test]
    fn list_releases_what_it_does_not_name() {
        let memory = memory();
        memory.list_begins(Kind::Pod);
        memory.keep(&about(Kind::Pod, "a", "stays"), 1_000).unwrap();
        memory.keep(&about(Kind::Pod, "a", "goes"), 1_000).unwrap();
        memory.list_ends(Kind::Pod);
        memory.list_begins(Kind::Pod);
        memory.keep(&about(Kind::Pod, "a", "stays"), 2_000).unwrap();
        memory.list_ends(Kind::Pod);
        assert_eq!(memory.largest(1)[0], ("a".to_owned(), Usage { bytes: 2_000, refused: 0 }));
        memory.release(Kind::Pod, "stays");
        assert_eq!(memory.largest(1).len(), 1);
    }

    #[test]
    fn refused_objects_are_listed_again_once_others_are_gone() {
        let memory = memory();
        let now = Instant::now();
        fill(&memory, "a");
        let pod = about(Kind::Pod, "a", "late");
        let refusal = memory.keep(&pod, 60_000).unwrap_err();
        memory.refuse(&pod, refusal.clone());
        memory.refuse(&pod, refusal.clone());
        assert_eq!(memory.limit_and_refusals().1, 1, "reported once");
        assert_eq!(memory.refusal_of_pod("late"), Some(refusal));
        assert!(!memory.lists_again(Kind::Pod, now));
        memory.release(Kind::Pod, "a-0");
        assert!(memory.lists_again(Kind::Pod, now));
        assert!(!memory.lists_again(Kind::Pod, now));
        memory.keep(&pod, 60_000).unwrap();
        assert_eq!(memory.refusal_of_pod("late"), None);
    }
}
