//! The cluster as the extender knows it: a state machine that is fed what the watches bring and what binds do, and publishes immutable
//! [`Snapshot`]s. One writer at a time holds it; no I/O, no clock: time is an argument.
//!
//! ```text
//! pods, nodes, GpuNodes (watch.rs) ─┐                      ┌─> Snapshot ─> filter, prioritize, explain
//! binds in flight, holds (binds.rs) ┴─> Index ─> ledger ───┤
//! ticks, API contact (watch.rs) ────────────────────────── └─> gained GPUs ─> wake parked pods
//! ```

mod binds;
mod budgets;
mod classes;
mod compact;
mod entry;
mod gangs;
mod inspect;
mod lists;
mod managed;
mod read;
mod reserve;
mod room;
mod schedulers;
mod store;
mod victims;
mod volumes;
mod waiting;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{NodeName, PodUid, ResourceName};
use gantry_gang::protocol::{Now, Settings};

pub use binds::Outcome;
pub use budgets::{Disruptions, LooseBudget};
pub use entry::Totals;
pub use gangs::{
    Admitted, Awaited, Belongs, Called, GangReport, GangStanding, GangTotals, GangView, MemberView,
    PlaceView, PlacesKept, Said, Trial,
};
pub use inspect::{Bound, NodeReport, PodReport};
pub use lists::Source;
pub use read::{LooseGpuNode, SlimNode, advertised, described, inventory};
pub use reserve::{BindError, Reserved, Target};
pub use store::{Clock, Store, system_clock};
pub use waiting::{Parked, Short};

use crate::decide::{ForeignNodes, Options};
use crate::inventory::Inventory;
use crate::ledger::FaultKind;
use crate::pod::PodFacts;
use crate::snapshot::{ClassIx, Names, NodeIx, Snapshot, Standing};
use crate::watched::Watched;
use classes::Classes;
use entry::Entry;

/// How long the devices of a pod that vanished without its end being seen stay taken, at least. Kubelet hands them out again at
/// once, while the process may live on: it died up to 2.5 s later in trials with an ignored SIGTERM; the plugin's own word, which takes
/// over from there, lags by up to 1 s.
pub const QUARANTINE: Duration = Duration::from_secs(5);
/// How long after the API server has answered nobody for a while: a plugin tries again after 5 s at the latest, writes within 1 s, and its
/// word is there 3 s later.
pub const QUARANTINE_AFTER_A_GAP: Duration = Duration::from_secs(10);
/// Contact is made every second; a pause that long means that plugins may not have been able to write.
const GAP: Duration = Duration::from_secs(3);
/// How long at most, while the plugin says that it does not know the truth. Such a node is not used much longer than that.
pub const QUARANTINE_WITHOUT_TRUTH: Duration = Duration::from_secs(300);
/// How long GPUs are held for a pod between prioritize and bind.
pub const HOLD: Duration = Duration::from_secs(30);
/// How long a bind whose outcome is unknown, or whose pod is gone, keeps its devices, unless the pod shows the outcome before. The API
/// server gives up on a request after 60 s.
pub const UNSURE: Duration = Duration::from_secs(65);

/// The state. See the head of this module.
#[derive(Debug)]
pub struct Index {
    options: Options,
    managed: managed::Managed,
    names: Arc<Names>,
    entries: Vec<Entry>,
    pods: HashMap<PodUid, Arc<PodFacts>>,
    classes: Classes,
    slots: Vec<ClassIx>,
    binds: binds::Binds,
    waiting: waiting::Waiting,
    relists: HashMap<Source, lists::Relist>,
    synced: HashSet<Source>,
    dirty: Vec<NodeIx>,
    changed: bool,
    generation: u64,
    faults: HashMap<FaultKind, u64>,
    rooms: room::Rooms,
    volumes: volumes::Volumes,
    gangs: gangs::State,
    schedulers: schedulers::Schedulers,
    /// `None` while they are not known. Where nobody follows them there are none.
    budgets: Option<Vec<Disruptions>>,
    /// The time it was told last, and when it was told both clocks.
    now: Now,
    origin: Now,
    /// When contact was made last, and since when without a gap.
    contact: Option<(Instant, Instant)>,
    published: Arc<Snapshot>,
}

impl Index {
    /// An empty index. `run` tells this process's plans from those of one before it.
    pub fn new(options: Options, watched: &Watched, run: String) -> Self {
        let begin = Now {
            at: Instant::now(),
            unix: 0,
        };
        let settings = Settings {
            identity: run.as_str().into(),
            ..Settings::default()
        };
        Self {
            options,
            managed: managed::Managed::new(watched),
            names: Arc::default(),
            entries: Vec::new(),
            pods: HashMap::new(),
            classes: Classes::new(),
            slots: Vec::new(),
            binds: binds::Binds::new(run),
            waiting: waiting::Waiting::default(),
            relists: HashMap::new(),
            synced: HashSet::new(),
            dirty: Vec::new(),
            changed: true,
            generation: 0,
            faults: HashMap::new(),
            rooms: room::Rooms::default(),
            volumes: volumes::Volumes::default(),
            gangs: gangs::State::new(settings),
            schedulers: schedulers::Schedulers::default(),
            budgets: Some(Vec::new()),
            now: begin,
            origin: begin,
            contact: None,
            published: Arc::default(),
        }
    }

    /// A pod that asks for watched resources was seen.
    pub fn pod_applied(&mut self, pod: PodFacts) {
        self.seen(Source::Pods, pod.uid.as_str());
        self.take_pod(pod);
    }

    /// Takes a pod as it is now. It need not be there any more: only what the API server sent counts as seen while pods are listed.
    fn take_pod(&mut self, mut pod: PodFacts) {
        self.keep_claim(&pod.uid, &mut pod.claim);
        self.room_pod(&mut pod);
        let uid = pod.uid.clone();
        let before = self.pods.get(&uid).cloned();
        if before.as_deref() == Some(&pod) {
            return;
        }
        if let Some(node) = &pod.node {
            let node = self.node(node);
            self.binds.settled(&uid, &mut self.entries, &mut self.dirty);
            self.drop_hold(&uid);
            self.waiting.forget(&uid);
            if let Some(entry) = self.entries.get_mut(node.0 as usize) {
                entry.pods.retain(|known| *known != uid);
                if !pod.terminal {
                    entry.pods.push(uid.clone());
                }
            }
            self.dirty.push(node);
            if before.as_ref().is_none_or(|before| before.node.is_none()) {
                self.pod_came(&pod);
            }
        }
        self.tell_pod(&pod);
        if pod.terminal {
            self.waiting.forget(&uid);
            self.drop_hold(&uid);
            self.pods.remove(&uid);
            return;
        }
        if self.elsewhere(&pod).is_some() {
            self.waiting.forget(&uid);
        } else {
            let by_itself = self.goes_by_itself(&pod);
            self.waiting.observe(self.now.at, &pod, by_itself);
        }
        self.pods.insert(uid, Arc::new(pod));
    }

    /// A pod was deleted. `last` is its last state, if the watch brought it.
    pub fn pod_deleted(&mut self, now: Instant, uid: &PodUid, last: Option<PodFacts>) {
        self.moment(now);
        if let Some(last) = last.filter(|last| last.uid == *uid) {
            self.take_pod(last);
        }
        self.depart(uid);
        self.tell_gone(uid);
        self.room_gone(uid);
        self.waiting.forget(uid);
        self.drop_hold(uid);
        self.binds.deleted(now, uid, &mut self.entries, &mut self.dirty);
        let Some(pod) = self.pods.get(uid).cloned() else {
            return;
        };
        if let Some(node) = pod.node.as_ref().and_then(|node| self.names.get(node.as_str())) {
            // What it held by the newest facts, while it is still among the pods.
            self.refresh(node);
            if let Some(entry) = self.entries.get_mut(node.0 as usize) {
                entry.remove_pod(now, &pod);
            }
            self.dirty.push(node);
        }
        self.pods.remove(uid);
    }

    /// A node was seen, with what kubelet advertises of the watched resources.
    pub fn node_applied(&mut self, name: &NodeName, advertised: Vec<(ResourceName, u32)>) {
        self.seen(Source::Nodes, name.as_str());
        let node = self.node(name);
        if let Some(entry) = self.entries.get_mut(node.0 as usize)
            && entry.advertised.as_ref() != Some(&advertised)
        {
            let before = entry.advertised.as_deref().unwrap_or_default();
            self.changed |= self.managed.advertised(before, &advertised);
            entry.advertised = Some(advertised);
            self.dirty.push(node);
            self.forget_resources();
        }
    }

    /// A node was deleted.
    pub fn node_deleted(&mut self, name: &str) {
        if let Some(node) = self.names.get(name)
            && let Some(entry) = self.entries.get_mut(node.0 as usize)
        {
            let before = entry.advertised.take().unwrap_or_default();
            self.changed |= self.managed.advertised(&before, &[]);
            self.node_gone(node);
            self.dirty.push(node);
            self.forget_resources();
        }
    }

    /// A GpuNode was seen.
    pub fn inventory_applied(&mut self, name: &NodeName, inventory: Inventory) {
        self.seen(Source::GpuNodes, name.as_str());
        let node = self.node(name);
        if let Some(entry) = self.entries.get_mut(node.0 as usize)
            && entry.inventory.as_ref() != Some(&inventory)
        {
            self.changed |= self.managed.published(entry.inventory.as_ref(), Some(&inventory));
            let before = entry.inventory.as_ref();
            if before.is_none_or(|before| inventory.counts_otherwise(before)) {
                self.gangs.reshaped();
            }
            if before.is_none_or(|before| inventory.serves_otherwise(before)) {
                // Devices go by other numbers now: whether some came free cannot be seen from the account, and what is held by
                // number would be taken for other devices.
                self.waiting.gained(node);
                self.binds.drop_holds_on(node);
                self.changed = true;
            }
            entry.inventory = Some(inventory);
            self.dirty.push(node);
            self.forget_resources();
        }
    }

    /// A GpuNode was deleted.
    pub fn inventory_deleted(&mut self, name: &str) {
        if let Some(node) = self.names.get(name)
            && let Some(entry) = self.entries.get_mut(node.0 as usize)
        {
            self.changed |= self.managed.published(entry.inventory.as_ref(), None);
            if entry.inventory.take().is_some() {
                self.gangs.reshaped();
            }
            self.dirty.push(node);
            self.forget_resources();
        }
    }

    /// Resources that no node has any more are managed no longer than pods ask for them.
    fn forget_resources(&mut self) {
        if !self.managed.is_outdated() {
            return;
        }
        let (pods, gangs) = (&self.pods, &self.gangs);
        let asked = |resource: &ResourceName| {
            let mut all = pods.values().map(|pod| &**pod).chain(gangs.heard());
            all.any(|pod| pod.devices(resource.as_str()) > 0)
        };
        self.changed |= self.managed.forget(asked);
    }

    /// Lets time pass. `contact` is when the API server last answered: devices of vanished pods are given free only by facts newer
    /// than the quarantine.
    pub fn tick(&mut self, now: Instant, contact: Instant) {
        self.moment(now);
        self.tick_gangs();
        self.forget_resources();
        let steady = self.note_contact(contact);
        for (number, entry) in (0..).zip(&mut self.entries) {
            if entry.forget_left(now, contact, steady) {
                self.dirty.push(NodeIx(number));
            }
        }
        let never = self
            .binds
            .expire(now, contact, &self.pods, &mut self.entries, &mut self.dirty);
        for uid in never {
            self.may_move(&uid);
        }
        for uid in self.binds.expired_holds(now) {
            self.drop_hold(&uid);
        }
    }

    /// Since when contact has been made without a gap.
    fn note_contact(&mut self, contact: Instant) -> Instant {
        let steady = match self.contact {
            Some((last, since)) if contact.saturating_duration_since(last) <= GAP => since,
            _ => contact,
        };
        self.contact = Some((contact, steady));
        steady
    }

    /// Works out what has changed and makes a new snapshot if anything a decision looks at did; whether it did.
    pub fn publish(&mut self) -> bool {
        self.settle_rooms();
        self.settle_gangs();
        self.work_out();
        self.look_at_places();
        self.work_out();
        self.keep_for_the_head();
        self.changed |= self.waiting.take_promised();
        if !std::mem::take(&mut self.changed) {
            return false;
        }
        self.compact();
        self.generation += 1;
        self.waiting.published(self.generation);
        self.published = Arc::new(Snapshot {
            generation: self.generation,
            synced: self.is_synced(),
            managed: self.managed.managed(),
            offered: self.managed.offered(),
            names: Arc::clone(&self.names),
            nodes: self.slots.clone(),
            classes: self.classes.shared(),
            holds: self.binds.holds(),
            kept: self.kept(),
            promised: self.promised(),
            schedulers: self.schedulers.all(),
        });
        true
    }

    /// The snapshot that was published last.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.published
    }

    fn is_synced(&self) -> bool {
        self.synced.len() == Source::ALL.len()
    }

    fn work_out(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty);
        dirty.sort_unstable();
        dirty.dedup();
        for node in dirty {
            self.refresh(node);
        }
    }

    /// The pod of a UID.
    pub fn pod(&self, uid: &str) -> Option<&Arc<PodFacts>> {
        self.pods.get(uid)
    }

    /// Pods, and what became of all devices, for metrics.
    pub fn totals(&self) -> (usize, Totals) {
        let mut totals = Totals::default();
        for entry in &self.entries {
            totals.add(entry);
        }
        (self.pods.len(), totals)
    }

    /// How many intents could not be followed so far, by fault.
    pub fn faults(&self) -> &HashMap<FaultKind, u64> {
        &self.faults
    }

    /// Works out one node's account and class.
    fn refresh(&mut self, node: NodeIx) {
        let Some(entry) = self.entries.get_mut(node.0 as usize) else {
            return;
        };
        let before: Vec<_> = entry
            .account
            .pools
            .iter()
            .map(|balance| balance.free.clone())
            .collect();
        for fault in entry.settle(&self.pods) {
            *self.faults.entry(fault.kind).or_default() += 1;
            tracing::warn!(node = %entry.name, fault = ?fault.kind, "{}", fault.words);
        }
        let lingered = if entry.has_idle() {
            entry.lingering.len()
        } else {
            0
        };
        entry.mark_lingering(self.now.at);
        let left = lingered > entry.lingering.len();
        let standing = entry.standing(&self.binds.held_on(node));
        let opens = matches!(standing, Standing::Foreign { .. })
            && self.options.foreign == ForeignNodes::Allow
            && !self
                .slots
                .get(node.0 as usize)
                .is_some_and(|class| self.classes.is_foreign(*class));
        if opens || entry.gained(&before) {
            self.waiting.gained(node);
            self.gangs.gained();
        }
        if !entry.places.is_empty() {
            self.gangs.suspects.insert(node);
        }
        if left {
            self.idles(node);
        }
        let class = self.classes.of(standing);
        if let Some(slot) = self.slots.get_mut(node.0 as usize)
            && *slot != class
        {
            *slot = class;
            self.changed = true;
        }
    }

    fn node(&mut self, name: &NodeName) -> NodeIx {
        if let Some(known) = self.names.get(name.as_str()) {
            return known;
        }
        let number = Arc::make_mut(&mut self.names).number(name);
        self.entries.push(Entry::new(name.clone()));
        self.slots.push(Classes::GONE);
        self.changed = true;
        number
    }

    fn drop_hold(&mut self, uid: &PodUid) {
        if let Some(node) = self.binds.drop_hold(uid) {
            self.dirty.push(node);
            self.changed = true;
        }
    }
}

#[cfg(test)]
mod tests;
