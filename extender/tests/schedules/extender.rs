//! Extenders: the real index, service and state machine behind a shell of this file's own, which does what the real shell does with
//! watches, requests, time limits and the Lease, one step at a time.

mod actions;
mod calls;
mod objects;
mod read;
mod requests;
mod watches;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gantry_api::{Decision, GangPhase, GangStatus, NodeName, PodUid, ResourceName};
use gantry_extender::bind::Binder;
use gantry_extender::index::{
    self, BindError, BindGrant, BindStep, Index, Outcome, ReadPod, Source, Store, Target, UnschedulablePod,
};
use gantry_extender::metrics::Metrics;
use gantry_extender::pod::{ParsedPod, PodFacts, Reader, TextInterner};
use gantry_extender::service::Service;
use gantry_extender::watched::WatchedResources;
use gantry_gang::protocol::{BindEnd, CommitFailure, Moment, Object, Settings, WatchedOwner, Work};
use gantry_gang::{GangKey, NodeFacts, OwnerRef, integrations};
use gantry_planner::decide::Options;
use gantry_planner::inventory::Inventory;
use gantry_planner::kind::Kinds;
use serde_json::{Value, json};

pub(crate) use actions::Action;
use read::read_node;
pub(crate) use read::{read_gpu_node, read_pod};

use crate::api::{Change, Gang, Gate, Pod, Status};
use crate::coverage::Played;
use crate::world::{BEGIN, Event, World};

/// Time limit of a bind.
pub(crate) const BIND: u64 = 20_000;
/// Time limit of any other request.
const REQUEST: u64 = 10_000;
/// The Lease: how long it is good for, and how long a leader that cannot renew it goes on.
const LEASE: u64 = 15_000;
const RENEWED: u64 = 10_000;

/// One process.
pub(crate) struct Process {
    pub(crate) run: u32,
    slot: usize,
    store: Arc<Store>,
    service: Service,
    inbox: BTreeMap<Source, Inbox>,
    /// What it has listed, or is listing, since its term began.
    listed: BTreeSet<Source>,
    paused: u64,
    leads_until: u64,
    /// It has read everything since it leads.
    entered: bool,
    contact: u64,
    /// The last request before its term of leadership, or after the one before: those who wait for answers end with that, but for binds.
    term_began: u64,
    tasks: BTreeMap<u64, Task>,
    writers: BTreeMap<String, Writer>,
    /// What is being done to pods.
    actions: BTreeMap<(String, Action), actions::Open>,
    /// Gang objects, the newest version seen of each.
    objects: BTreeMap<String, Arc<Gang>>,
    /// The phase of each gang by its last status.
    phases: BTreeMap<String, GangPhase>,
    /// What the owners of gangs were last told to say.
    owners: HashMap<OwnerRef, Option<Value>>,
    /// Binds that wait are about to ask again: they were notified.
    asks: bool,
    /// They ask again every half second in any case.
    polls: bool,
}

#[derive(Default)]
struct Inbox {
    /// With the moment at which each has come.
    changes: VecDeque<(u64, Change)>,
    last: u64,
    open: bool,
    /// Until when its watch cache is behind, and by how many milliseconds.
    behind: (u64, u64),
}

/// A bind that was called and has not ended.
#[derive(Debug)]
struct Task {
    target: Target,
    /// kube-scheduler's call, as long as it waits for the answer.
    call: Option<u64>,
    /// Nobody called: the extender binds a member that had come and left.
    own: bool,
    stage: Stage,
    deadline: u64,
}

#[derive(Debug, Clone)]
enum Stage {
    Reading,
    Waiting,
    Writing(Writing),
}

#[derive(Debug, Clone)]
struct Writing {
    grant: Option<Arc<str>>,
    member: bool,
    pause: u64,
}

/// Writes one Gang object.
#[derive(Debug, Default)]
struct Writer {
    key: Option<Arc<GangKey>>,
    known: Option<Arc<Gang>>,
    status: Option<Arc<GangStatus>>,
    commit: Option<Decision>,
    forget: bool,
    busy: bool,
    /// The object has to be read before anything is written.
    reads: bool,
    /// The decision whose write has failed, or may have.
    doubt: Option<String>,
    /// Nothing before that time; a decision that has not failed yet does not wait.
    due: u64,
    failed: u32,
    /// The time at which it looks again.
    waits_for: u64,
}

/// A request on its way.
#[derive(Debug)]
pub(crate) struct Request {
    /// Who waits for the answer.
    run: u32,
    /// Who sent it, and when.
    by: u32,
    sent: u64,
    what: What,
    /// After that the API server drops it.
    limit: u64,
    /// It never arrives.
    lost: bool,
    outcome: Option<Answer>,
}

#[derive(Debug, Clone)]
enum What {
    ReadPod { task: u64, name: String },
    Bind { task: u64, target: Target, grant: Option<Arc<str>>, member: bool },
    Look { task: u64, name: String, after_conflict: bool },
    Create { name: String },
    Get { name: String },
    Put { name: String, uid: String, over: u64, status: Arc<GangStatus>, decision: Option<String> },
    Remove { name: String, uid: String },
    Poke { pod: PodUid, cause: Cause },
    Action { name: String, uid: String, action: Action },
}

#[derive(Debug, Clone)]
enum Cause {
    Freed(UnschedulablePod),
    Called,
}

#[derive(Debug, Clone)]
enum Answer {
    Status(Status),
    Pod(Option<Arc<Pod>>),
    Gang(Status, Option<Arc<Gang>>),
}

/// All processes and the Lease.
#[derive(Default)]
pub(crate) struct Extenders {
    pub(crate) running: BTreeMap<u32, Process>,
    runs: u32,
    next_task: u64,
    /// How long a member waits for its siblings, in ms.
    pub(crate) barrier: u64,
    holder: Option<u32>,
    renewed: u64,
    /// Who has seen which pods bound.
    knew: HashSet<(u32, String)>,
    /// Pods that a process has seen bound, and that its present change shows to be gone.
    pub(crate) gone: BTreeSet<(u32, String)>,
    /// The nodes for which binds of pods were last called at a process.
    arrived: HashMap<(u32, String), NodeName>,
    /// Decisions, by the process that made them, that may be written though no answer came.
    pub(crate) doubted: HashSet<(u32, String)>,
}

impl Extenders {
    pub(crate) fn knew(&self, run: u32, pod: &str) -> bool {
        self.knew.contains(&(run, pod.to_owned()))
    }

    /// Whether a bind of a pod was called at a process.
    pub(crate) fn has_arrived(&self, run: u32, pod: &str) -> bool {
        self.bind_node(run, pod).is_some()
    }

    /// The node for which a bind of a pod was last called at a process.
    pub(crate) fn bind_node(&self, run: u32, pod: &str) -> Option<&NodeName> {
        self.arrived.get(&(run, pod.to_owned()))
    }

    /// The watch cache of an extender is behind.
    pub(crate) fn fall_behind(&mut self, run: u32, source: Source, by: u64, until: u64) {
        if let Some(process) = self.running.get_mut(&run) {
            process.inbox(source).behind = (until, by);
        }
    }
}

thread_local! {
    // Nobody reads them.
    static METRICS: Arc<Metrics> = Arc::new(Metrics::new());
}

fn watched() -> WatchedResources {
    WatchedResources::new(["nvidia.com/gpu".into()])
}

impl Process {
    fn leads(&self, now: u64) -> bool {
        self.entered && now < self.leads_until && now >= self.paused
    }
}

impl World {
    /// Changes the index of a process, then sees to what follows.
    fn update<R>(&mut self, run: u32, change: impl FnOnce(&mut Index) -> R) -> Option<R> {
        let process = self.extenders.running.get(&run)?;
        let result = process.store.update(change);
        self.follow_up(run);
        self.extenders.gone.clear();
        Some(result)
    }

    /// What the index wants done is begun.
    fn follow_up(&mut self, run: u32) {
        let Some(process) = self.extenders.running.get(&run) else {
            return;
        };
        let store = Arc::clone(&process.store);
        if store.read(Index::has_unplanned) {
            self.after(1, Event::PlanMore { run });
        }
        if store.read(Index::has_gains) {
            self.after(100, Event::LookForGains { run });
        }
        if store.read(Index::has_called) {
            for (pod, _) in store.update(|index| index.take_called(1024)) {
                self.note(format_args!("{run} wakes {pod}"));
                let cause = Cause::Called;
                self.send(run, What::Poke { pod, cause });
            }
        }
        if store.read(Index::has_deferred) {
            for target in store.update(Index::take_deferred) {
                self.note(format_args!("{run} binds {} by itself", target.uid));
                self.begin_bind(run, target, None);
            }
        }
        if store.read(Index::has_work) {
            self.begin_work(run, &store);
        }
        self.want_to_ask(run);
    }

    fn begin_work(&mut self, run: u32, store: &Store) {
        let (work, statuses) = store.update(|index| (index.take_work(), index.take_statuses()));
        for work in work {
            self.carry_out(run, work);
        }
        for (key, status) in statuses {
            let name = key.object_name();
            self.note_phase(run, &name, status.phase);
            let writer = self.writer(run, &name, &key);
            writer.status = Some(Arc::new(status));
            self.soon(0, 2, Event::WriteGang { run, name });
        }
    }

    fn note_phase(&mut self, run: u32, gang: &str, phase: GangPhase) {
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        let before = match phase {
            GangPhase::Finished => process.phases.remove(gang),
            _ => process.phases.insert(gang.to_owned(), phase),
        };
        if let Some(before) = before.filter(|before| *before != phase) {
            self.coverage.add_transition(before, phase);
        }
    }

    /// Binds that wait ask again, soon.
    fn want_to_ask(&mut self, run: u32) {
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        let waits = process.tasks.values().any(|task| matches!(task.stage, Stage::Waiting));
        if waits && !std::mem::replace(&mut process.asks, true) {
            self.soon(0, 2, Event::AskAgain { run });
        }
    }

    fn carry_out(&mut self, run: u32, work: Work) {
        self.check_listed(run, &work);
        match work {
            Work::Commit { gang, decision } => {
                let name = gang.object_name();
                self.played(Played::Decided);
                self.note(format_args!("{run} decides {name}: {}", decision.id));
                self.check_arrived(run, &gang.name, &decision);
                let writer = self.writer(run, &name, &gang);
                writer.commit = Some(decision);
                self.after(0, Event::WriteGang { run, name });
            }
            Work::DeleteObject { name, .. } => {
                let name = name.to_string();
                let writer = self.writer_of(run, &name);
                writer.status = None;
                writer.forget = true;
                self.soon(1, 20, Event::WriteGang { run, name });
            }
            Work::Ungate(pods) => self.order(run, &pods, &Action::Ungate),
            Work::Evict { pods, by } => {
                self.check_victims(run, &pods, &by.name);
                self.order(run, &pods, &Action::Evict(by));
            }
            Work::EvictRest { pods, of, to } => {
                if let Some(to) = to {
                    self.check_way(run, &of.name, &to.name);
                }
                self.order(run, &pods, &Action::EvictRest(of));
            }
            Work::Delete { pods, .. } => self.order(run, &pods, &Action::Delete),
            // Woken members are taken elsewhere.
            Work::Activate(_) | Work::Bind(_) => {}
        }
    }

    // Processes.

    pub(crate) fn start_extender(&mut self, slot: usize) {
        if self.extenders.running.values().any(|process| process.slot == slot) {
            return;
        }
        self.extenders.runs += 1;
        let run = self.extenders.runs;
        self.note(format_args!("extender {run} starts"));
        let mut index = Index::new(Options::default(), &watched(), format!("r{run}"));
        index.set_gangs(Settings {
            identity: format!("r{run}").into(),
            hold: Duration::from_millis(self.plan.hold),
            ..Settings::default()
        });
        if self.plan.stops() {
            index.budgets_seen(Some(Vec::new()));
        }
        index.stand_down();
        let (base, clock) = (self.base, Arc::clone(&self.clock));
        let clock = move || {
            let now = clock.load(Ordering::Relaxed);
            Moment { at: base + Duration::from_millis(now), unix: BEGIN + i64::try_from(now / 1000).unwrap() }
        };
        let store = Arc::new(Store::with_clock(index, Box::new(clock)));
        let service = Service {
            binder: Binder::new(crate::client(), Arc::clone(&store), watched(), Duration::from_millis(BIND)),
            store: Arc::clone(&store),
            watched: watched(),
            metrics: METRICS.with(Arc::clone),
        };
        let process = Process {
            run,
            slot,
            store,
            service,
            inbox: BTreeMap::new(),
            listed: BTreeSet::new(),
            paused: 0,
            leads_until: 0,
            entered: false,
            contact: 0,
            term_began: 0,
            tasks: BTreeMap::new(),
            writers: BTreeMap::new(),
            actions: BTreeMap::new(),
            objects: BTreeMap::new(),
            phases: BTreeMap::new(),
            owners: HashMap::new(),
            asks: false,
            polls: false,
        };
        self.extenders.running.insert(run, process);
        for source in Source::ALL {
            self.soon(1, 30, Event::Relist { run, source });
        }
        self.soon(20, 200, Event::Elect { run });
        self.soon(500, 1_000, Event::Tick { run });
    }

    pub(crate) fn kill_extender(&mut self) {
        let runs: Vec<u32> = self.extenders.running.keys().copied().collect();
        if runs.is_empty() {
            return;
        }
        let run = runs[self.dice.index(runs.len())];
        self.played(Played::ExtenderKilled);
        self.note(format_args!("extender {run} is killed"));
        if let Some(process) = self.extenders.running.remove(&run) {
            self.soon(500, 6_000, Event::ExtenderStarts { slot: process.slot });
        }
        self.calls_end(run);
    }

    /// A process stands still for a while, as one does whose machine is overloaded. What it has sent goes on its way.
    pub(crate) fn pause_extender(&mut self) {
        let runs: Vec<u32> = self.extenders.running.keys().copied().collect();
        if runs.is_empty() {
            return;
        }
        let run = runs[self.dice.index(runs.len())];
        let length = self.dice.range(1_000, 30_000);
        self.played(Played::ExtenderPaused);
        self.note(format_args!("extender {run} stands still for {length} ms"));
        if let Some(process) = self.extenders.running.get_mut(&run) {
            process.paused = self.now + length;
        }
    }

    /// Whether a process stands still; then the event comes when it goes on.
    fn is_paused(&mut self, run: u32, event: &Event) -> bool {
        let Some(process) = self.extenders.running.get(&run) else {
            return true;
        };
        if process.paused > self.now {
            let at = process.paused;
            self.at(at, event.clone());
            return true;
        }
        false
    }

    /// The process that answers kube-scheduler.
    pub(crate) fn leader(&self) -> Option<u32> {
        let leader = self.extenders.running.values().find(|process| process.leads(self.now))?;
        Some(leader.run)
    }

    pub(crate) fn elect(&mut self, run: u32) {
        if self.is_paused(run, &Event::Elect { run }) {
            return;
        }
        self.after(2_000, Event::Elect { run });
        let now = self.now;
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        if process.leads_until > 0 && now >= process.leads_until {
            self.lose(run);
        }
        if now < self.stalled {
            return;
        }
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        if self.extenders.holder == Some(run) && process.leads_until > 0 {
            self.extenders.renewed = now;
            process.leads_until = now + RENEWED;
            return;
        }
        let over = now >= self.extenders.renewed + LEASE;
        if self.extenders.holder.is_none() || over || self.extenders.holder == Some(run) {
            self.extenders.holder = Some(run);
            self.extenders.renewed = now;
            process.leads_until = now + RENEWED;
            process.entered = true;
            self.played(Played::TookOver);
            self.note(format_args!("extender {run} leads"));
            self.begin_term(run, Index::lead);
        }
    }

    /// What is known from before a term counts for nothing: everything is listed anew.
    fn begin_term(&mut self, run: u32, how: impl FnOnce(&mut Index)) {
        if let Some(process) = self.extenders.running.get_mut(&run) {
            process.term_began = self.next_request;
            process.listed.clear();
            process.objects.clear();
            process.phases.clear();
            process.writers.clear();
            process.actions.clear();
        }
        self.update(run, |index| {
            index.relist();
            how(index);
        });
        for source in Source::ALL {
            if let Some(process) = self.extenders.running.get_mut(&run) {
                let inbox = process.inbox(source);
                inbox.open = false;
                inbox.changes.clear();
            }
            self.soon(1, 30, Event::Relist { run, source });
        }
    }

    fn lose(&mut self, run: u32) {
        self.played(Played::LostLead);
        self.note(format_args!("extender {run} leads no more"));
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        process.leads_until = 0;
        process.entered = false;
        let tasks: Vec<u64> = process.tasks.keys().copied().collect();
        self.begin_term(run, Index::stand_down);
        // Calls that wait are dropped; some ask once more before.
        if self.dice.mille(500) {
            self.ask_all(run);
        }
        for task in tasks {
            self.abandon(run, task);
        }
    }

    /// A bind is given up because the process leads no more. What is being written is.
    fn abandon(&mut self, run: u32, task: u64) {
        let Some(process) = self.extenders.running.get(&run) else {
            return;
        };
        if process.tasks.get(&task).is_some_and(|task| matches!(task.stage, Stage::Waiting | Stage::Reading))
        {
            self.end(run, task, Err("this extender does not lead".to_owned()));
        }
    }

    // Watches.

    pub(crate) fn tick(&mut self, run: u32) {
        if self.is_paused(run, &Event::Tick { run }) {
            return;
        }
        self.after(1_000, Event::Tick { run });
        let (now, instant, base) = (self.now, self.instant(), self.base);
        let stalled = now < self.stalled;
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        // A watch that fails leaves the facts as old as its last good moment.
        if !stalled && process.inbox.values().all(|inbox| inbox.open) {
            process.contact = now;
        }
        let contact = base + Duration::from_millis(process.contact);
        self.update(run, |index| index.tick(instant, contact));
        if !stalled {
            self.tell_owners(run);
        }
    }

    /// What the owners of gangs say comes to an extender with its ticks: in another watch than their pods, and later.
    fn tell_owners(&mut self, run: u32) {
        let Some(process) = self.extenders.running.get(&run) else {
            return;
        };
        for WatchedOwner { owner, unread } in process.store.read(Index::watched_owners) {
            let object = self.owner_object(&owner);
            let Some(process) = self.extenders.running.get_mut(&run) else {
                return;
            };
            let told = process.owners.insert(owner.clone(), object.clone());
            if unread || told.as_ref() != Some(&object) {
                let facts =
                    object.map(|object| Arc::new(integrations::read(owner.kind, &owner.part, &object)));
                self.update(run, |index| index.owner_seen(&owner, facts));
            }
        }
    }

    pub(crate) fn plan_more(&mut self, run: u32) {
        if !self.is_paused(run, &Event::PlanMore { run }) {
            self.update(run, |_| ());
        }
    }

    pub(crate) fn look_for_gains(&mut self, run: u32) {
        if self.is_paused(run, &Event::LookForGains { run }) {
            return;
        }
        let Some(process) = self.extenders.running.get(&run) else {
            return;
        };
        let woken = process.store.update(|index| index.take_activatable(64));
        for (pod, parked) in woken {
            self.note(format_args!("{run} wakes {pod}, for devices came free"));
            self.send(run, What::Poke { pod, cause: Cause::Freed(parked) });
        }
    }

    // The verbs.
}

impl Process {
    pub(crate) fn view(&self, gang: &str) -> Option<index::GangView> {
        self.store.read(|index| index.gang_view("default", gang))
    }

    /// Whether nothing is left to be listed since its term began.
    pub(crate) fn has_listed(&self) -> bool {
        Source::ALL.iter().all(|source| self.listed.contains(source))
    }

    /// Whether a pod is about to be evicted for a gang.
    pub(crate) fn evicts(&self, pod: &str) -> bool {
        self.actions.keys().any(|(uid, action)| match action {
            Action::Evict(by) => {
                uid == pod && self.store.read(|index| index.gangs().waits_for(by, &pod.into()))
            }
            _ => false,
        })
    }

    /// What became of all devices, how many places are kept, and gangs by phase.
    pub(crate) fn totals(&self) -> (index::Totals, usize, String) {
        self.store.read(|index| {
            let gangs = index.gang_totals();
            (index.totals().1, gangs.places, format!("{:?}", gangs.phases))
        })
    }
}
