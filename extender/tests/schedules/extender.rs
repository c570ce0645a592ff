//! Extenders: the real index, service and state machine behind a shell of this file's own, which does what the real shell does with watches,
//! requests, time limits and the Lease, one step at a time.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gantry_api::{Decision, GangPhase, GangStatus, PodUid};
use gantry_extender::bind::Binder;
use gantry_extender::decide::Options;
use gantry_extender::index::{
    self, Admitted, BindError, Index, Outcome, Parked, Reserved, Source, Store, Target,
};
use gantry_extender::kind::Kinds;
use gantry_extender::metrics::Metrics;
use gantry_extender::pod::{Reader, Seen, Words};
use gantry_extender::service::Service;
use gantry_extender::watched::Watched;
use gantry_gang::GangKey;
use gantry_gang::protocol::{BindEnd, CommitFailure, Now, Object, Settings, Work};
use serde_json::json;

use crate::api::{Change, Gang, Pod, Status};
use crate::world::{BEGIN, Event, World};

/// Time limit of a bind.
const BIND: u64 = 20_000;
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
    reader: Reader,
    kinds: Kinds,
    inbox: BTreeMap<Source, Inbox>,
    paused: u64,
    leads_until: u64,
    /// It has read everything since it leads.
    entered: bool,
    contact: u64,
    tasks: BTreeMap<u64, Task>,
    writers: BTreeMap<String, Writer>,
    /// Gang objects, the newest version seen of each.
    objects: BTreeMap<String, Arc<Gang>>,
    /// Binds that wait are about to ask again: a bell rang.
    asks: bool,
    /// They ask again every half second in any case.
    polls: bool,
}

#[derive(Default)]
struct Inbox {
    changes: VecDeque<Change>,
    last: u64,
    open: bool,
}

/// A bind that was called and has not ended.
#[derive(Debug)]
struct Task {
    target: Target,
    /// kube-scheduler's call, as long as it waits for the answer.
    call: Option<u64>,
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
    status: Option<GangStatus>,
    /// The last status that was to be written.
    last: Option<GangStatus>,
    commit: Option<Decision>,
    forget: bool,
    busy: bool,
    /// The object has to be read before anything is written.
    reads: bool,
}

/// A request on its way.
#[derive(Debug)]
pub(crate) struct Request {
    run: u32,
    what: What,
    outcome: Option<Answer>,
}

#[derive(Debug, Clone)]
enum What {
    ReadPod {
        task: u64,
        name: String,
    },
    Bind {
        task: u64,
        target: Target,
        grant: Option<Arc<str>>,
        member: bool,
    },
    Look {
        task: u64,
        name: String,
        after_conflict: bool,
    },
    Create {
        name: String,
    },
    Get {
        name: String,
    },
    Put {
        name: String,
        uid: String,
        over: u64,
        status: Box<GangStatus>,
        decision: Option<String>,
    },
    Remove {
        name: String,
        uid: String,
    },
    Poke {
        pod: PodUid,
        cause: Cause,
    },
    Delete {
        name: String,
        uid: String,
    },
}

#[derive(Debug, Clone)]
enum Cause {
    Freed(Parked),
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
    holder: Option<u32>,
    renewed: u64,
}

fn watched() -> Watched {
    Watched::new(["nvidia.com/gpu".into()])
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
        Some(result)
    }

    /// What the index wants done is begun.
    fn follow_up(&mut self, run: u32) {
        let Some(process) = self.extenders.running.get(&run) else {
            return;
        };
        let store = Arc::clone(&process.store);
        if store.take_plan_times().len() >= 2 {
            self.after(1, Event::PlanMore { run });
        }
        if store.read(Index::has_gains) {
            self.after(100, Event::LookForGains { run });
        }
        let called = store.update(|index| index.take_called(1024));
        for (pod, _) in called {
            self.note(format_args!("{run} wakes {pod}"));
            self.send(
                run,
                What::Poke {
                    pod,
                    cause: Cause::Called,
                },
            );
        }
        let (work, statuses) = store.update(|index| (index.take_work(), index.take_statuses()));
        for work in work {
            self.carry_out(run, work);
        }
        for (key, status) in statuses {
            let name = key.object_name();
            let writer = self.writer(run, &name, &key);
            writer.status = Some(status.clone());
            writer.last = Some(status);
            self.soon(5, 60, Event::WriteGang { run, name });
        }
        self.want_to_ask(run);
    }

    /// Binds that wait ask again, soon.
    fn want_to_ask(&mut self, run: u32) {
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        let waits = process
            .tasks
            .values()
            .any(|task| matches!(task.stage, Stage::Waiting));
        if waits && !std::mem::replace(&mut process.asks, true) {
            self.soon(0, 2, Event::AskAgain { run });
        }
    }

    fn writer(&mut self, run: u32, name: &str, key: &Arc<GangKey>) -> &mut Writer {
        let writer = self.writer_of(run, name);
        writer.key = Some(Arc::clone(key));
        writer
    }

    fn writer_of(&mut self, run: u32, name: &str) -> &mut Writer {
        let process = self.extenders.running.get_mut(&run).unwrap();
        let known = process.objects.get(name).cloned();
        process.writers.entry(name.to_owned()).or_insert_with(|| Writer {
            known,
            ..Writer::default()
        })
    }

    fn carry_out(&mut self, run: u32, work: Work) {
        match work {
            Work::Commit { gang, decision } => {
                let name = gang.object_name();
                self.note(format_args!("{run} decides {name}: {}", decision.id));
                let writer = self.writer(run, &name, &gang);
                writer.commit = Some(decision);
                self.after(0, Event::WriteGang { run, name });
            }
            Work::Forget { name, .. } => {
                let name = name.to_string();
                self.writer_of(run, &name).forget = true;
                self.soon(1, 20, Event::WriteGang { run, name });
            }
            Work::Evict { pods, .. } | Work::Delete { pods, .. } => {
                for uid in pods {
                    let pod = self
                        .api
                        .pods
                        .values()
                        .find(|pod| pod.uid == uid.as_str())
                        .cloned();
                    if let Some(pod) = pod {
                        self.note(format_args!("{run} deletes {uid}"));
                        let (name, uid) = (pod.name.clone(), pod.uid.clone());
                        self.send(run, What::Delete { name, uid });
                    }
                }
            }
            // Woken members are taken elsewhere, and no pod of these has a gate.
            Work::Wake(_) | Work::Ungate(_) => {}
        }
    }

    // Processes.

    pub(crate) fn start_extender(&mut self, slot: usize) {
        if self
            .extenders
            .running
            .values()
            .any(|process| process.slot == slot)
        {
            return;
        }
        self.extenders.runs += 1;
        let run = self.extenders.runs;
        self.note(format_args!("extender {run} starts"));
        let mut index = Index::new(Options::default(), &watched(), format!("r{run}"));
        index.set_gangs(Settings {
            identity: format!("r{run}").into(),
            ..Settings::default()
        });
        index.stand_down();
        let (base, clock) = (self.base, Arc::clone(&self.clock));
        let clock = move || {
            let now = clock.load(Ordering::Relaxed);
            Now {
                at: base + Duration::from_millis(now),
                unix: BEGIN + i64::try_from(now / 1000).unwrap(),
            }
        };
        let store = Arc::new(Store::with_clock(index, Box::new(clock)));
        let service = Service {
            binder: Binder::new(
                crate::client(),
                Arc::clone(&store),
                watched(),
                Duration::from_millis(BIND),
            ),
            store: Arc::clone(&store),
            watched: watched(),
            options: Options::default(),
            metrics: Arc::new(Metrics::new()),
        };
        let process = Process {
            run,
            slot,
            store,
            service,
            reader: Reader::new(watched()),
            kinds: Kinds::default(),
            inbox: BTreeMap::new(),
            paused: 0,
            leads_until: 0,
            entered: false,
            contact: 0,
            tasks: BTreeMap::new(),
            writers: BTreeMap::new(),
            objects: BTreeMap::new(),
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
        self.note(format_args!("extender {run} stands still for {length} ms"));
        if let Some(process) = self.extenders.running.get_mut(&run) {
            process.paused = self.now + length;
        }
    }

    pub(crate) fn calm_extenders(&mut self) {
        let now = self.now;
        for process in self.extenders.running.values_mut() {
            process.paused = process.paused.min(now);
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
        let leader = self
            .extenders
            .running
            .values()
            .find(|process| process.leads(self.now))?;
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
            self.note(format_args!("extender {run} leads"));
            self.begin_term(run, Index::lead);
        }
    }

    /// What is known from before a term counts for nothing: everything is listed anew.
    fn begin_term(&mut self, run: u32, how: impl FnOnce(&mut Index)) {
        if let Some(process) = self.extenders.running.get_mut(&run) {
            process.objects.clear();
            process.writers.clear();
        }
        self.update(run, |index| {
            index.relist();
            how(index);
        });
        for source in Source::ALL {
            if let Some(process) = self.extenders.running.get_mut(&run) {
                let inbox = process.inbox.entry(source).or_default();
                inbox.open = false;
                inbox.changes.clear();
            }
            self.soon(1, 30, Event::Relist { run, source });
        }
    }

    fn lose(&mut self, run: u32) {
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
        if process
            .tasks
            .get(&task)
            .is_some_and(|task| matches!(task.stage, Stage::Waiting | Stage::Reading))
        {
            self.end(run, task, Err("this extender does not lead".to_owned()));
        }
    }

    // Watches.

    pub(crate) fn tell_extenders(&mut self, change: &Change) {
        let source = change.source();
        let runs: Vec<u32> = self.extenders.running.keys().copied().collect();
        for run in runs {
            let lag = self.lag();
            let now = self.now;
            let Some(process) = self.extenders.running.get_mut(&run) else {
                continue;
            };
            let inbox = process.inbox.entry(source).or_default();
            if !inbox.open {
                continue;
            }
            inbox.changes.push_back(change.clone());
            inbox.last = inbox.last.max(now + lag);
            let at = inbox.last;
            self.at(at, Event::Watch { run, source });
        }
    }

    pub(crate) fn watch_brings(&mut self, run: u32, source: Source) {
        if self.is_paused(run, &Event::Watch { run, source }) {
            return;
        }
        let now = self.now;
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        process.contact = now;
        let change = process.inbox.entry(source).or_default().changes.pop_front();
        if let Some(change) = change {
            self.tell(run, &change);
        }
    }

    /// A watch begins with a list.
    pub(crate) fn relist(&mut self, run: u32, source: Source) {
        if self.is_paused(run, &Event::Relist { run, source }) {
            return;
        }
        if self.now < self.stalled {
            self.at(self.stalled + 10, Event::Relist { run, source });
            return;
        }
        let (now, instant) = (self.now, self.instant());
        let objects = self.api.list(source);
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        process.contact = now;
        let inbox = process.inbox.entry(source).or_default();
        inbox.changes.clear();
        inbox.open = true;
        if source == Source::Gangs {
            process.objects.clear();
        }
        self.update(run, |index| index.list_begins(instant, source));
        for object in &objects {
            self.tell(run, object);
        }
        self.update(run, |index| index.list_ends(instant, source));
    }

    pub(crate) fn break_some_watch(&mut self) {
        let runs: Vec<u32> = self.extenders.running.keys().copied().collect();
        if !runs.is_empty() {
            let run = runs[self.dice.index(runs.len())];
            let source = Source::ALL[self.dice.index(Source::ALL.len())];
            self.note(format_args!(
                "the watch of {} breaks at extender {run}",
                source.as_str()
            ));
            if let Some(process) = self.extenders.running.get_mut(&run) {
                let inbox = process.inbox.entry(source).or_default();
                inbox.open = false;
                inbox.changes.clear();
            }
            self.soon(10, 3_000, Event::Relist { run, source });
        }
    }

    fn tell(&mut self, run: u32, change: &Change) {
        let instant = self.instant();
        match change {
            Change::Pod(pod) | Change::PodGone(pod) => {
                let gone = matches!(change, Change::PodGone(_));
                let read = serde_json::from_value(pod.json()).unwrap();
                let Some(process) = self.extenders.running.get_mut(&run) else {
                    return;
                };
                let Some(Seen::Facts(facts)) = process.reader.read(read) else {
                    return;
                };
                self.update(run, |index| {
                    if gone {
                        let uid = facts.uid.clone();
                        index.pod_deleted(instant, &uid, Some(*facts));
                    } else {
                        index.pod_applied(*facts);
                    }
                });
            }
            Change::Node(name, gpus) => {
                let gpus = gpus.to_string();
                let node = json!({"metadata": {"name": name}, "status": {"allocatable":
                    {"nvidia.com/gpu": gpus, "cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "100Gi"}}});
                let node = serde_json::from_value(node).unwrap();
                let facts = index::described(&watched(), &node, &mut Words::default());
                let advertised = index::advertised(&watched(), &node);
                self.update(run, |index| {
                    index.node_applied(&name.as_str().into(), advertised);
                    index.node_described(Arc::new(facts));
                });
            }
            Change::NodeGone(name) => {
                self.update(run, |index| index.node_deleted(name));
            }
            Change::GpuNode(name, object) => {
                let node = serde_json::from_value((**object).clone()).unwrap();
                let Some(process) = self.extenders.running.get_mut(&run) else {
                    return;
                };
                let inventory = index::inventory(&watched(), node, &mut process.kinds).unwrap();
                self.update(run, |index| {
                    index.inventory_applied(&name.as_str().into(), inventory);
                });
            }
            Change::GpuNodeGone(name) => {
                self.update(run, |index| index.inventory_deleted(name));
            }
            Change::Gang(gang) => self.see_gang(run, gang),
            Change::GangGone(name) => {
                if let Some(process) = self.extenders.running.get_mut(&run) {
                    process.objects.remove(name);
                    if let Some(writer) = process.writers.get_mut(name) {
                        writer.known = None;
                    }
                }
                self.update(run, |index| index.gang_object_gone("default", name));
            }
        }
    }

    /// A Gang object, by a watch or an answer.
    fn see_gang(&mut self, run: u32, gang: &Arc<Gang>) {
        if let Some(process) = self.extenders.running.get_mut(&run) {
            let newer = |known: &Arc<Gang>| known.rv < gang.rv;
            if process.objects.get(&gang.name).is_none_or(newer) {
                process.objects.insert(gang.name.clone(), Arc::clone(gang));
            }
            if let Some(writer) = process.writers.get_mut(&gang.name)
                && writer.known.as_ref().is_none_or(newer)
            {
                writer.known = Some(Arc::clone(gang));
            }
        }
        let object = Object {
            uid: gang.uid.as_str().into(),
            resource_version: gang.rv.to_string().into(),
            ours: gang.ours,
            spec: Ok(gang.spec.clone()),
            status: gang.status.clone(),
        };
        self.update(run, |index| index.gang_object_seen("default", &gang.name, object));
    }

    // Time.

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
        if !stalled {
            process.contact = now;
        }
        let contact = base + Duration::from_millis(process.contact);
        self.update(run, |index| index.tick(instant, contact));
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
        let woken = process.store.update(|index| index.take_wakeable(64));
        for (pod, parked) in woken {
            self.note(format_args!("{run} wakes {pod}, for devices came free"));
            self.send(
                run,
                What::Poke {
                    pod,
                    cause: Cause::Freed(parked),
                },
            );
        }
    }

    // The verbs.

    pub(crate) fn ask_filter(&mut self, body: &[u8]) -> Option<(u32, Vec<u8>)> {
        let run = self.leader()?;
        let process = self.extenders.running.get(&run)?;
        let answer = process.service.filter(body).ok()?;
        self.follow_up(run);
        Some((run, answer))
    }

    /// The best of some nodes, by the extender's word.
    pub(crate) fn ask_prioritize(&mut self, body: &[u8], nodes: &[String]) -> String {
        let scores = self.leader().and_then(|run| {
            let answer = self.extenders.running.get(&run)?.service.prioritize(body).ok()?;
            self.follow_up(run);
            serde_json::from_slice::<serde_json::Value>(&answer).ok()
        });
        let scores = scores.unwrap_or_default();
        let score = |node: &String| {
            let found = scores
                .as_array()
                .into_iter()
                .flatten()
                .find(|score| score["Host"] == **node);
            found
                .and_then(|score| score["Score"].as_i64())
                .unwrap_or_default()
        };
        let best = nodes.iter().map(&score).max().unwrap_or_default();
        let best: Vec<&String> = nodes.iter().filter(|node| score(node) == best).collect();
        best[self.dice.index(best.len())].clone()
    }

    pub(crate) fn bind_called(&mut self, run: u32, call: u64, pod: &Arc<Pod>, node: &str) -> u64 {
        self.extenders.next_task += 1;
        let number = self.extenders.next_task;
        let task = Task {
            target: Target {
                uid: pod.uid.as_str().into(),
                namespace: "default".to_owned(),
                name: pod.name.clone(),
                node: node.into(),
            },
            call: Some(call),
            stage: Stage::Reading,
            deadline: self.now + BIND,
        };
        if let Some(process) = self.extenders.running.get_mut(&run) {
            process.tasks.insert(number, task);
        }
        self.admit(run, number, false);
        number
    }

    /// Asks the index what becomes of a bind.
    fn admit(&mut self, run: u32, number: u64, was_read: bool) {
        let Some(task) = self.task(run, number) else {
            return;
        };
        let (target, waited, deadline) = (
            task.target.clone(),
            matches!(task.stage, Stage::Waiting),
            task.deadline,
        );
        let Some(process) = self.extenders.running.get(&run) else {
            return;
        };
        let admitted = process.store.update(|index| index.admit(&target, None));
        match admitted {
            Err(BindError::UnknownPod(_)) if !was_read && !waited => {
                let name = target.name;
                self.send(run, What::ReadPod { task: number, name });
            }
            Err(error) => self.end(run, number, Err(error.to_string())),
            Ok(Admitted::Single(reserved)) => self.begin_writing(run, number, &reserved, false),
            Ok(Admitted::Member(reserved)) => {
                let deadline = self.now + BIND;
                if let Some(task) = self.task(run, number) {
                    task.deadline = deadline;
                }
                self.after(BIND / 3, Event::MemberAnswer { run, task: number });
                self.begin_writing(run, number, &reserved, true);
            }
            Ok(Admitted::Wait(_)) if self.now >= deadline => {
                self.end(run, number, Err("its members did not all come".to_owned()));
            }
            Ok(Admitted::Wait(_)) => {
                if let Some(task) = self.task(run, number) {
                    task.stage = Stage::Waiting;
                }
                if !waited {
                    // It asks twice at least: the gang may have moved between the first and the bell.
                    self.want_to_ask(run);
                }
                let polls = self
                    .extenders
                    .running
                    .get_mut(&run)
                    .is_some_and(|process| std::mem::replace(&mut process.polls, true));
                if !polls {
                    self.after(500, Event::Poll { run });
                }
            }
        }
        self.follow_up_quietly(run);
    }

    /// What follows from a question: not that others ask again, unless there was work.
    fn follow_up_quietly(&mut self, run: u32) {
        let Some(process) = self.extenders.running.get(&run) else {
            return;
        };
        let due = process.store.read(|index| index.has_work() || index.has_called());
        if due {
            self.follow_up(run);
        }
    }

    fn task(&mut self, run: u32, number: u64) -> Option<&mut Task> {
        self.extenders.running.get_mut(&run)?.tasks.get_mut(&number)
    }

    pub(crate) fn ask_again(&mut self, run: u32) {
        if self.is_paused(run, &Event::AskAgain { run }) {
            return;
        }
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        process.asks = false;
        self.ask_all(run);
    }

    pub(crate) fn poll(&mut self, run: u32) {
        if self.is_paused(run, &Event::Poll { run }) {
            return;
        }
        if let Some(process) = self.extenders.running.get_mut(&run) {
            process.polls = false;
        }
        self.ask_all(run);
    }

    fn ask_all(&mut self, run: u32) {
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        let waiting: Vec<u64> = process
            .tasks
            .iter()
            .filter(|(_, task)| matches!(task.stage, Stage::Waiting))
            .map(|(number, _)| *number)
            .collect();
        for number in waiting {
            self.admit(run, number, true);
        }
    }

    fn begin_writing(&mut self, run: u32, number: u64, reserved: &Reserved, member: bool) {
        let grant = match reserved {
            Reserved::AlreadyBound => {
                self.end(run, number, Ok(()));
                return;
            }
            Reserved::Plain => None,
            Reserved::Grant { annotation, .. } => Some(Arc::clone(annotation)),
        };
        if let Some(task) = self.task(run, number) {
            task.stage = Stage::Writing(Writing {
                grant,
                member,
                pause: 200,
            });
        }
        self.post(run, number);
    }

    fn post(&mut self, run: u32, number: u64) {
        let Some(task) = self.task(run, number) else {
            return;
        };
        let Stage::Writing(writing) = &task.stage else {
            return;
        };
        let what = What::Bind {
            task: number,
            target: task.target.clone(),
            grant: writing.grant.clone(),
            member: writing.member,
        };
        self.send(run, what);
    }

    pub(crate) fn retry(&mut self, run: u32, number: u64) {
        if !self.is_paused(run, &Event::Retry { run, task: number }) {
            self.post(run, number);
        }
    }

    /// kube-scheduler must hear something about a member before it gives up.
    pub(crate) fn member_answer(&mut self, run: u32, number: u64) {
        let call = self.task(run, number).and_then(|task| task.call.take());
        if let Some(call) = call {
            let error = Some("no answer in time".to_owned());
            self.soon(1, 3, Event::CallAnswered { call, error });
        }
    }

    pub(crate) fn hung_up(&mut self, run: u32, number: u64) {
        let Some(task) = self.task(run, number) else {
            return;
        };
        task.call = None;
        match &task.stage {
            // It is carried out by a task of its own.
            Stage::Writing(writing) if writing.member => {}
            _ => self.end(run, number, Err("hung up".to_owned())),
        }
    }

    /// A bind has ended, or nobody waits for it any more.
    fn end(&mut self, run: u32, number: u64, result: Result<(), String>) {
        let instant = self.instant();
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        let Some(task) = process.tasks.remove(&number) else {
            return;
        };
        let uid = task.target.uid.clone();
        if let Some(call) = task.call {
            if result.is_ok() {
                self.check_done(&task.target);
            }
            let error = result.as_ref().err().cloned();
            self.note(format_args!("bind {uid}: {result:?}"));
            self.soon(1, 3, Event::CallAnswered { call, error });
        }
        match &task.stage {
            Stage::Reading => {}
            Stage::Waiting => {
                self.update(run, |index| index.withdraw(&uid));
            }
            Stage::Writing(writing) => {
                let granted = writing.grant.is_some();
                let member = writing.member;
                let (outcome, end) = match &result {
                    Ok(()) => (Outcome::Bound, BindEnd::Bound),
                    Err(error) => match error.as_str() {
                        "no answer" | "hung up" => (Outcome::Unsure, BindEnd::Unsure),
                        "gone" => (Outcome::Failed, BindEnd::Gone),
                        "bound by another" => (Outcome::Failed, BindEnd::Unsure),
                        _ => (Outcome::Failed, BindEnd::Failed),
                    },
                };
                if member && granted {
                    self.update(run, |index| index.bind_ended(&uid, end));
                }
                if granted {
                    self.update(run, |index| index.finish(instant, &task.target, outcome));
                }
            }
        }
    }

    /// "Done" is answered only where it is.
    fn check_done(&mut self, target: &Target) {
        let there = self.api.pod(&target.name, target.uid.as_str());
        if there.is_some_and(|pod| pod.node.as_deref() != Some(target.node.as_str())) {
            self.wrong(format!(
                "bind of pod {} is answered as done, and it is not bound",
                target.uid
            ));
        }
    }

    // Requests.

    fn send(&mut self, run: u32, what: What) {
        self.next_request += 1;
        let request = self.next_request;
        let fenced_by_time = match &what {
            What::Bind { target, .. } => !self.is_written_down(target),
            _ => false,
        };
        let gives_up = self.now
            + if matches!(what, What::Bind { .. }) {
                BIND
            } else {
                REQUEST
            };
        self.requests.insert(
            request,
            Request {
                run,
                what,
                outcome: None,
            },
        );
        let mut arrives = self.now + self.dice.range(1, 6);
        if self.is_restless() {
            match self.dice.below(100) {
                // It is lost, and the connection with it.
                0 | 1 => {
                    self.requests
                        .remove(&request)
                        .map(|lost| self.requests.insert(request, lost));
                    self.soon(1, 50, Event::Reply { request, lost: true });
                    return;
                }
                // It is done, and the answer is lost.
                2 | 3 => {
                    self.at(arrives, Event::Execute { request });
                    self.at(arrives + 5, Event::Reply { request, lost: true });
                    return;
                }
                // It is late. What stands in no decision is fenced by nothing but time: see README.md.
                4 => {
                    arrives += if fenced_by_time {
                        self.dice.range(10, 3_000)
                    } else {
                        self.dice.range(10, 40_000)
                    }
                }
                _ => {}
            }
        }
        if arrives < self.stalled {
            arrives = self.stalled + self.dice.range(1, 50);
        }
        self.at(arrives, Event::Execute { request });
        self.at(gives_up, Event::Reply { request, lost: true });
    }

    /// A request is carried out.
    pub(crate) fn execute(&mut self, request: u64) {
        let Some(Request { run, what, .. }) = self.requests.get(&request) else {
            return;
        };
        let (run, what) = (*run, what.clone());
        let alive = self.extenders.running.contains_key(&run);
        let outcome = match &what {
            What::ReadPod { name, .. } | What::Look { name, .. } => {
                Answer::Pod(self.api.pods.get(name).cloned())
            }
            What::Bind {
                target,
                grant,
                member,
                ..
            } => {
                if !alive && !self.is_written_down(target) {
                    // Its connection is gone, and so is what it had not delivered.
                    return;
                }
                self.check_binding(target, grant.as_ref(), *member);
                let status = self.api.bind(
                    &target.name,
                    target.uid.as_str(),
                    target.node.as_str(),
                    grant.as_ref(),
                    self.now,
                );
                let granted = grant.as_deref().unwrap_or_default();
                self.note(format_args!(
                    "Binding of {} to {} with {granted}: {status:?}",
                    target.uid, target.node
                ));
                Answer::Status(status)
            }
            What::Create { name } => {
                let status = self.api.create_gang(name);
                Answer::Gang(status, self.api.gangs.get(name).cloned())
            }
            What::Get { name } => Answer::Gang(Status::Done, self.api.gangs.get(name).cloned()),
            What::Put {
                name,
                uid,
                over,
                status,
                decision,
            } => {
                let done = self.api.write_status(name, uid, *over, status);
                let (what, places) = (decision.as_deref().unwrap_or("status"), Places(status));
                self.note(format_args!(
                    "{run} writes {name} over v{over}, {what},{places}: {done:?}"
                ));
                self.check_decisions();
                Answer::Gang(done, self.api.gangs.get(name).cloned())
            }
            What::Remove { name, uid } => {
                let status = self.api.remove_gang(name, uid);
                Answer::Gang(status, self.api.gangs.get(name).cloned())
            }
            What::Poke { pod, .. } => {
                let found = self
                    .api
                    .pods
                    .values()
                    .find(|known| known.uid == pod.as_str())
                    .cloned();
                Answer::Status(match found {
                    Some(found) => self.api.change_pod(&found.name, &found.uid, |pod| pod.pokes += 1),
                    None => Status::Missing,
                })
            }
            What::Delete { name, uid } => {
                self.delete_pod(name, uid, false);
                Answer::Status(Status::Done)
            }
        };
        if let Some(known) = self.requests.get_mut(&request) {
            known.outcome = Some(outcome);
        }
        self.soon(1, 4, Event::Reply { request, lost: false });
    }

    /// The sender hears how its request ended, or stops to wait.
    pub(crate) fn reply(&mut self, request: u64, lost: bool) {
        let Some(Request { run, .. }) = self.requests.get(&request) else {
            return;
        };
        let run = *run;
        if self.extenders.running.contains_key(&run) && self.is_paused(run, &Event::Reply { request, lost }) {
            return;
        }
        let Some(Request { what, outcome, .. }) = self.requests.get(&request) else {
            return;
        };
        let (what, outcome) = (what.clone(), outcome.clone());
        let executed = outcome.is_some();
        let answer = outcome.filter(|_| !lost);
        if lost && !executed && self.extenders.running.contains_key(&run) {
            // It may be carried out still; nobody will hear of it.
            self.requests.insert(
                request,
                Request {
                    run: 0,
                    what: what.clone(),
                    outcome: None,
                },
            );
        } else {
            self.requests.remove(&request);
        }
        if self.extenders.running.contains_key(&run) {
            self.heard(run, what, answer);
        }
    }

    fn heard(&mut self, run: u32, what: What, answer: Option<Answer>) {
        match what {
            What::ReadPod { task, .. } => self.pod_read(run, task, answer),
            What::Bind { task, target, .. } => match answer {
                Some(Answer::Status(Status::Done)) => self.end(run, task, Ok(())),
                Some(Answer::Status(Status::Missing)) => self.end(run, task, Err("gone".to_owned())),
                answer => {
                    let after_conflict = answer.is_some();
                    if self.task(run, task).is_some() {
                        self.send(
                            run,
                            What::Look {
                                task,
                                name: target.name,
                                after_conflict,
                            },
                        );
                    }
                }
            },
            What::Look {
                task, after_conflict, ..
            } => self.looked(run, task, after_conflict, answer),
            What::Create { name }
            | What::Get { name }
            | What::Put { name, .. }
            | What::Remove { name, .. }
                if !self
                    .extenders
                    .running
                    .get(&run)
                    .is_some_and(|process| process.writers.contains_key(&name)) => {}
            What::Create { name } => {
                let Some(writer) = self.free_writer(run, &name) else {
                    return;
                };
                match answer {
                    Some(Answer::Gang(Status::Done, Some(gang))) => writer.known = Some(gang),
                    _ => writer.reads = true,
                }
                self.soon(1, 30, Event::WriteGang { run, name });
            }
            What::Get { name } => {
                let Some(writer) = self.free_writer(run, &name) else {
                    return;
                };
                match answer {
                    Some(Answer::Gang(_, Some(gang))) => {
                        writer.reads = false;
                        writer.known = None;
                        self.see_gang(run, &gang);
                    }
                    Some(Answer::Gang(_, None)) => {
                        writer.reads = false;
                        writer.known = None;
                        self.update(run, |index| index.gang_object_gone("default", &name));
                    }
                    _ => {}
                }
                self.soon(1, 30, Event::WriteGang { run, name });
            }
            What::Put { name, decision, .. } => self.put_ended(run, name, decision, answer),
            What::Remove { name, .. } => {
                let Some(writer) = self.free_writer(run, &name) else {
                    return;
                };
                if answer.is_some() {
                    writer.forget = false;
                    writer.known = None;
                } else {
                    self.soon(200, 400, Event::WriteGang { run, name });
                }
            }
            What::Poke { pod, cause } => {
                let failed = !matches!(answer, Some(Answer::Status(_)));
                if failed {
                    self.poke_again(run, pod, cause);
                }
            }
            What::Delete { name, uid } => {
                if answer.is_none() {
                    self.send(run, What::Delete { name, uid });
                }
            }
        }
    }

    fn poke_again(&mut self, run: u32, pod: PodUid, cause: Cause) {
        match &cause {
            Cause::Freed(parked) => {
                let parked = parked.clone();
                self.update(run, |index| index.repark(pod.clone(), parked));
            }
            Cause::Called => {}
        }
        self.send(run, What::Poke { pod, cause });
    }

    fn pod_read(&mut self, run: u32, task: u64, answer: Option<Answer>) {
        let Some(known) = self.task(run, task) else {
            return;
        };
        let uid = known.target.uid.clone();
        let Some(Answer::Pod(pod)) = answer else {
            return self.end(run, task, Err("no answer".to_owned()));
        };
        let Some(pod) = pod.filter(|pod| pod.uid == uid.as_str()) else {
            return self.end(run, task, Err("gone".to_owned()));
        };
        let read = serde_json::from_value(pod.json()).unwrap();
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        if let Some(Seen::Facts(facts)) = process.reader.read(read) {
            let request = facts.request.clone().unwrap();
            let target = process.tasks[&task].target.clone();
            process.store.update(|index| index.hear(*facts));
            if pod.gang.is_none() {
                // What it asks for is known by now.
                let admitted = process.store.update(|index| index.admit(&target, Some(request)));
                match admitted {
                    Ok(Admitted::Single(reserved)) => self.begin_writing(run, task, &reserved, false),
                    Ok(_) => self.end(run, task, Err("a gang after all".to_owned())),
                    Err(error) => self.end(run, task, Err(error.to_string())),
                }
                self.follow_up_quietly(run);
                return;
            }
        }
        self.admit(run, task, true);
    }

    /// After a conflict, or no answer: has the pod our Binding?
    fn looked(&mut self, run: u32, task: u64, after_conflict: bool, answer: Option<Answer>) {
        let Some(known) = self.task(run, task) else {
            return;
        };
        let target = known.target.clone();
        let Stage::Writing(writing) = known.stage.clone() else {
            return;
        };
        let deadline = known.deadline;
        let result = match answer {
            Some(Answer::Pod(pod)) => match pod.filter(|pod| pod.uid == target.uid.as_str()) {
                None => Err("gone"),
                Some(pod) => match pod.node.as_deref() {
                    None if after_conflict => Err("rejected"),
                    None => Err("no answer"),
                    Some(node)
                        if node == target.node.as_str()
                            && (writing.grant.is_none() || pod.grant == writing.grant) =>
                    {
                        Ok(())
                    }
                    Some(_) => Err("bound by another"),
                },
            },
            _ => Err("no answer"),
        };
        let again = result == Err("no answer") && writing.member && self.now + writing.pause < deadline;
        if again {
            if let Some(task) = self.task(run, task) {
                task.stage = Stage::Writing(Writing {
                    pause: writing.pause * 2,
                    ..writing
                });
            }
            self.after(writing.pause, Event::Retry { run, task });
        } else {
            self.end(run, task, result.map_err(str::to_owned));
        }
    }

    // Gang objects.

    fn free_writer(&mut self, run: u32, name: &str) -> Option<&mut Writer> {
        let writer = self.extenders.running.get_mut(&run)?.writers.get_mut(name)?;
        writer.busy = false;
        Some(writer)
    }

    /// The next write of a Gang object: first the decision, one request at a time.
    pub(crate) fn write_gang(&mut self, run: u32, name: &str) {
        let event = Event::WriteGang {
            run,
            name: name.to_owned(),
        };
        if self.is_paused(run, &event) {
            return;
        }
        let now = self.now;
        let Some(process) = self.extenders.running.get_mut(&run) else {
            return;
        };
        // Only who leads writes, and it looks before each write.
        if !process.leads(now) {
            return;
        }
        let Some(writer) = process.writers.get_mut(name) else {
            return;
        };
        if writer.busy
            || (writer.commit.is_none() && writer.status.is_none() && !writer.forget && !writer.reads)
        {
            return;
        }
        let name = name.to_owned();
        let known = writer.known.clone();
        let what = match (known, writer.reads) {
            (_, true) => What::Get { name },
            (None, false) => {
                if writer.commit.is_none() && writer.status.is_none() {
                    writer.forget = false;
                    return;
                }
                What::Create { name }
            }
            (Some(known), false) if writer.commit.is_some() => {
                let decision = writer.commit.clone();
                let id = decision.as_ref().map(|decision| decision.id.clone());
                let key = writer.key.clone().unwrap();
                let mut status = writer.last.clone().unwrap_or_default();
                status.name = key.name.to_string();
                status.dialect = key.dialect.as_str().to_owned();
                status.incarnation = key.incarnation.to_string();
                status.phase = GangPhase::Committing;
                status.decision = decision;
                What::Put {
                    name,
                    uid: known.uid.clone(),
                    over: known.rv,
                    status: Box::new(status),
                    decision: id,
                }
            }
            (Some(known), false) if writer.status.is_some() => {
                let status = writer.status.clone().unwrap_or_default();
                What::Put {
                    name,
                    uid: known.uid.clone(),
                    over: known.rv,
                    status: Box::new(status),
                    decision: None,
                }
            }
            (Some(known), false) => What::Remove {
                name,
                uid: known.uid.clone(),
            },
        };
        writer.busy = true;
        self.send(run, what);
    }

    fn put_ended(&mut self, run: u32, name: String, decision: Option<String>, answer: Option<Answer>) {
        let Some(writer) = self.free_writer(run, &name) else {
            return;
        };
        let key = writer.key.clone();
        let result = match answer {
            Some(Answer::Gang(Status::Done, gang)) => {
                writer.known = gang;
                Ok(())
            }
            Some(_) => Err(CommitFailure::Conflict),
            None => Err(CommitFailure::Unknown),
        };
        writer.reads = result.is_err();
        match &decision {
            Some(id) => {
                if writer.commit.as_ref().is_some_and(|commit| commit.id == *id) {
                    writer.commit = None;
                }
            }
            None if result.is_ok() => {
                let written = writer.known.as_ref().map(|known| known.status.clone());
                if writer.status == written {
                    writer.status = None;
                }
            }
            None => {}
        }
        if let (Some(id), Some(key)) = (&decision, key) {
            self.update(run, |index| index.committed(&key, id, result));
        }
        self.soon(1, 100, Event::WriteGang { run, name });
    }
}

impl Process {
    pub(crate) fn view(&self, gang: &str) -> Option<index::GangView> {
        self.store.read(|index| index.gang_view("default", gang))
    }

    /// What became of all devices, how many places are kept, and gangs by phase.
    pub(crate) fn totals(&self) -> (index::Totals, usize, String) {
        self.store.read(|index| {
            let gangs = index.gang_totals();
            (index.totals().1, gangs.places, format!("{:?}", gangs.phases))
        })
    }
}

/// The places of a decision, for the log.
struct Places<'a>(&'a GangStatus);

impl fmt::Display for Places<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = self.0.decision.iter().flat_map(|decision| &decision.slots);
        if self.0.decision.is_none() {
            f.write_str(" no decision")?;
        }
        for slot in slots {
            let pod = slot.pod.as_ref().map_or("nobody", |pod| pod.as_str());
            let ids = slot.devices.iter().flat_map(|devices| &devices.ids);
            write!(f, " {pod}")?;
            for id in ids {
                write!(f, " {id}")?;
            }
            f.write_str(";")?;
        }
        Ok(())
    }
}
