//! kube-scheduler, as it was seen to behave: an active queue, a pool of the unschedulable, back-off, pods assumed on nodes while bind is
//! called for them. Pods rejected by the extender are woken by what happens to themselves and to bound pods and nodes.

mod preempt;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::api::{Change, Pod};
use crate::coverage::Played;
use crate::world::{Event, World};

/// A bind call that was not answered before is given up.
const HTTP_TIMEOUT: u64 = 30_000;
/// The unschedulable are tried again after so long in any case.
const FLUSH: u64 = 300_000;
/// More filter calls for one pod in five seconds are a storm.
const STORM: usize = 80;

/// Where a pod is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// It has scheduling gates.
    Gated,
    Active,
    BackOff {
        attempt: u32,
    },
    Parked {
        by_extender: bool,
        since: u64,
    },
    Assumed {
        node: String,
        call: Option<u64>,
    },
    Bound,
}

#[derive(Debug)]
struct Known {
    pod: Arc<Pod>,
    state: State,
    attempts: u32,
    asked: VecDeque<u64>,
    /// Where room is being made for it.
    nominated: Option<String>,
    /// Who is being stopped for it just now: before that is done it is not tried again.
    stopping: BTreeSet<String>,
}

/// A bind call.
#[derive(Debug)]
struct Call {
    life: u32,
    uid: String,
    run: u32,
    task: Option<u64>,
}

/// The process.
#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    up: bool,
    life: u32,
    /// Offers only some of the nodes at each try.
    samples: bool,
    pods: BTreeMap<String, Known>,
    nodes: BTreeMap<String, u32>,
    inbox: VecDeque<Change>,
    last_watch: u64,
    cycles: bool,
    calls: BTreeMap<u64, Call>,
    next_call: u64,
}

impl World {
    pub(crate) fn start_scheduler(&mut self) {
        if self.scheduler.up {
            return;
        }
        let life = self.scheduler.life + 1;
        let samples = self.is_restless() && self.dice.mille(150);
        self.note(format_args!(
            "kube-scheduler starts, life {life}, samples {samples}"
        ));
        self.scheduler = Scheduler {
            up: true,
            life,
            samples,
            next_call: self.scheduler.next_call,
            nodes: self.api.nodes.clone(),
            ..Scheduler::default()
        };
        let pods: Vec<Arc<Pod>> = self.api.pods.values().cloned().collect();
        for pod in pods {
            self.scheduler_pod(&pod);
        }
        self.after(30_000, Event::Flush { life });
        self.want_cycle();
    }

    pub(crate) fn kill_scheduler(&mut self) {
        if !self.scheduler.up {
            return;
        }
        self.played(Played::SchedulerKilled);
        self.note(format_args!("kube-scheduler is killed"));
        self.scheduler.up = false;
        self.scheduler.life += 1;
        for call in std::mem::take(&mut self.scheduler.calls).into_values() {
            if let Some(task) = call.task {
                self.soon(4, 14, Event::CallHungUp { run: call.run, task });
            }
        }
        self.soon(300, 5_000, Event::SchedulerStarts);
    }

    pub(crate) fn tell_scheduler(&mut self, change: &Change) {
        if !self.scheduler.up
            || !matches!(
                change,
                Change::Pod(_) | Change::PodGone(_) | Change::Node(..) | Change::NodeGone(_)
            )
        {
            return;
        }
        self.scheduler.inbox.push_back(change.clone());
        let at = (self.now + self.dice.range(1, 5)).max(self.scheduler.last_watch);
        self.scheduler.last_watch = at;
        let life = self.scheduler.life;
        self.at(at, Event::SchedulerWatch { life });
    }

    pub(crate) fn scheduler_sees(&mut self, life: u32) {
        if life != self.scheduler.life {
            return;
        }
        match self.scheduler.inbox.pop_front() {
            Some(Change::Pod(pod)) => self.scheduler_pod(&pod),
            Some(Change::PodGone(pod)) => {
                let known = self.scheduler.pods.remove(&pod.uid);
                if known.is_some_and(|known| matches!(known.state, State::Bound | State::Assumed { .. })) {
                    self.wake_parked(true);
                }
            }
            Some(Change::Node(name, gpus)) => {
                self.scheduler.nodes.insert(name, gpus);
                self.wake_parked(true);
            }
            Some(Change::NodeGone(name)) => {
                self.scheduler.nodes.remove(&name);
                self.wake_parked(false);
            }
            _ => {}
        }
    }

    fn scheduler_pod(&mut self, pod: &Arc<Pod>) {
        let uid = pod.uid.clone();
        let known = self.scheduler.pods.get(&uid);
        let was_bound = known.is_some_and(|known| known.state == State::Bound);
        if !pod.is_live() {
            self.scheduler.pods.remove(&uid);
            if was_bound {
                self.wake_parked(true);
            }
            return;
        }
        if pod.node.is_some() {
            let known = self.scheduler.pods.entry(uid).or_insert_with(|| Known::new(pod));
            known.pod = Arc::clone(pod);
            known.state = State::Bound;
            known.nominated = None;
            self.wake_parked(false);
            return;
        }
        match self.scheduler.pods.get_mut(&uid) {
            None => {
                self.scheduler.pods.insert(uid, Known::new(pod));
            }
            Some(known) => {
                known.pod = Arc::clone(pod);
                match known.state {
                    State::Gated if !pod.gates.is_empty() => {}
                    _ if !known.stopping.is_empty() => {}
                    State::Gated
                    | State::Parked {
                        by_extender: true, ..
                    } => known.state = State::Active,
                    _ => {}
                }
            }
        }
        self.want_cycle();
    }

    /// Something happened that may let parked pods go. `more_room`: also those that the scheduler's own count refuses.
    fn wake_parked(&mut self, more_room: bool) {
        for known in self.scheduler.pods.values_mut() {
            if let State::Parked { by_extender, .. } = known.state
                && (by_extender || more_room)
                && known.stopping.is_empty()
            {
                known.state = State::Active;
            }
        }
        self.want_cycle();
    }

    pub(crate) fn flush(&mut self, life: u32) {
        if life != self.scheduler.life {
            return;
        }
        let now = self.now;
        for known in self.scheduler.pods.values_mut() {
            if let State::Parked { since, .. } = known.state
                && since + FLUSH <= now
            {
                known.state = State::Active;
            }
        }
        self.after(30_000, Event::Flush { life });
        self.want_cycle();
    }

    fn want_cycle(&mut self) {
        let active = self
            .scheduler
            .pods
            .values()
            .any(|known| known.state == State::Active);
        if active && self.scheduler.up && !std::mem::replace(&mut self.scheduler.cycles, true) {
            let life = self.scheduler.life;
            self.soon(1, 3, Event::Cycle { life });
        }
    }

    pub(crate) fn back_off_ends(&mut self, life: u32, uid: &str, attempt: u32) {
        if life != self.scheduler.life {
            return;
        }
        if let Some(known) = self.scheduler.pods.get_mut(uid)
            && known.state == (State::BackOff { attempt })
        {
            known.state = State::Active;
            self.want_cycle();
        }
    }

    fn back_off(&mut self, uid: &str) {
        let life = self.scheduler.life;
        let Some(known) = self.scheduler.pods.get_mut(uid) else {
            return;
        };
        known.attempts += 1;
        let attempt = known.attempts;
        known.state = State::BackOff { attempt };
        let wait = 1_000 * (1u64 << u64::from(attempt - 1).min(4)).min(10);
        let uid = uid.to_owned();
        // Rounded up to whole seconds of a common clock.
        let at = (self.now + wait).next_multiple_of(1_000) + self.dice.range(0, 100);
        self.at(at, Event::BackOffEnds { life, uid, attempt });
    }

    /// One pod is scheduled.
    pub(crate) fn cycle(&mut self, life: u32) {
        if life != self.scheduler.life {
            return;
        }
        self.scheduler.cycles = false;
        let next = self
            .scheduler
            .pods
            .values()
            .filter(|known| known.state == State::Active)
            .min_by_key(|known| {
                (
                    std::cmp::Reverse(known.pod.priority),
                    known.pod.created,
                    known.pod.uid.clone(),
                )
            })
            .map(|known| Arc::clone(&known.pod));
        let Some(pod) = next else {
            return;
        };
        self.schedule(&pod);
        self.want_cycle();
    }

    fn schedule(&mut self, pod: &Arc<Pod>) {
        let mut nodes: Vec<String> = self.fitting(pod);
        if nodes.is_empty() {
            let all = self.scheduler.nodes.len();
            let words = format!("0/{all} nodes are available: {all} Insufficient nvidia.com/gpu.");
            self.park(&pod.uid, false, words);
            self.make_room(pod, &[]);
            return;
        }
        let nominated = self.scheduler.pods.get(&pod.uid);
        let nominated = nominated.and_then(|known| known.nominated.clone());
        if let Some(node) = nominated.filter(|node| nodes.contains(node)) {
            // Alone, before all others.
            match self.ask(pod, std::slice::from_ref(&node)) {
                Some(Err(_)) => {}
                Some(Ok(_)) => {
                    self.played(Played::NominatedBound);
                    return self.assume(pod, &node);
                }
                None => return,
            }
        }
        if self.scheduler.samples && self.is_restless() && nodes.len() > 1 {
            let keep = self.dice.index(nodes.len());
            let dropped = self.dice.mille(400);
            nodes = nodes
                .into_iter()
                .enumerate()
                .filter(|(at, _)| *at == keep || !dropped)
                .map(|(_, name)| name)
                .collect();
        }
        let Some(passed) = self.ask(pod, &nodes) else {
            return;
        };
        match &passed {
            Err(words) => {
                self.park(&pod.uid, true, words.clone());
                self.make_room(pod, &nodes);
            }
            Ok(passed) if passed.len() == 1 => self.assume(pod, &passed[0]),
            Ok(passed) => {
                let asked = body(pod, passed);
                let best = self.ask_prioritize(asked.as_bytes(), passed);
                self.assume(pod, &best);
            }
        }
    }

    /// Asks filter about some nodes: which of them pass, or why none does; `None` if there was no answer.
    fn ask(&mut self, pod: &Arc<Pod>, nodes: &[String]) -> Option<Result<Vec<String>, String>> {
        let now = self.now;
        if let Some(known) = self.scheduler.pods.get_mut(&pod.uid) {
            known.asked.push_back(now);
            while known.asked.front().is_some_and(|at| at + 5_000 < now) {
                known.asked.pop_front();
            }
            if known.asked.len() > STORM {
                self.wrong(format!(
                    "a storm: filter is called for pod {} again and again ({})",
                    pod.uid, pod.message
                ));
                return None;
            }
        }
        let asked = body(pod, nodes);
        let Some((run, answer)) = self.ask_filter(asked.as_bytes()) else {
            self.back_off(&pod.uid);
            return None;
        };
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        if answer["Error"].as_str().is_some_and(|error| !error.is_empty()) {
            self.note(format_args!("filter {} at {run}: {}", pod.uid, answer["Error"]));
            self.back_off(&pod.uid);
            return None;
        }
        let passed = answer["NodeNames"].as_array().cloned().unwrap_or_default();
        let passed: Vec<String> = passed
            .iter()
            .filter_map(|name| Some(name.as_str()?.to_owned()))
            .collect();
        self.note(format_args!("filter {} at {run}: {passed:?}", pod.uid));
        if passed.iter().any(|name| !nodes.contains(name)) {
            self.wrong(format!(
                "filter of pod {} names a node that was not offered: {passed:?}",
                pod.uid
            ));
            return None;
        }
        if passed.is_empty() {
            let mut words: BTreeMap<&str, u32> = BTreeMap::new();
            let refused = answer["FailedAndUnresolvableNodes"].as_object();
            for (_, text) in refused.into_iter().flatten() {
                *words.entry(text.as_str().unwrap_or_default()).or_default() += 1;
            }
            let words: Vec<String> = words
                .into_iter()
                .map(|(text, count)| format!("{count} {text}"))
                .collect();
            return Some(Err(words.join(", ")));
        }
        Some(Ok(passed))
    }

    /// Nodes with enough devices by the scheduler's own count.
    fn fitting(&self, pod: &Pod) -> Vec<String> {
        let scheduler = &self.scheduler;
        let fit = scheduler.nodes.keys().filter(|node| {
            let left = scheduler.left_for(pod, node, |_| true);
            left >= i64::from(pod.gpus)
        });
        fit.cloned().collect()
    }

    /// A pod is rejected, and its condition says why, if that has changed.
    fn park(&mut self, uid: &str, by_extender: bool, message: String) {
        let since = self.now;
        let Some(known) = self.scheduler.pods.get_mut(uid) else {
            return;
        };
        known.state = State::Parked { by_extender, since };
        let name = known.pod.name.clone();
        if known.pod.message != message && self.now >= self.stalled {
            self.note(format_args!("pod {uid} is parked: {message}"));
            self.api.change_pod(&name, uid, |pod| pod.message = message);
        }
    }

    /// A pod is assumed on a node, and bind is called.
    fn assume(&mut self, pod: &Arc<Pod>, node: &str) {
        self.scheduler.next_call += 1;
        let call = self.scheduler.next_call;
        if let Some(known) = self.scheduler.pods.get_mut(&pod.uid) {
            known.state = State::Assumed {
                node: node.to_owned(),
                call: Some(call),
            };
        }
        let Some(run) = self.leader() else {
            self.call_failed(&pod.uid);
            return;
        };
        self.scheduler.calls.insert(
            call,
            Call {
                life: self.scheduler.life,
                uid: pod.uid.clone(),
                run,
                task: None,
            },
        );
        self.after(HTTP_TIMEOUT, Event::CallTimesOut { call });
        self.note(format_args!("bind {} to {node} at {run}", pod.uid));
        let task = self.bind_called(run, call, pod, node);
        if let Some(known) = self.scheduler.calls.get_mut(&call) {
            known.task = Some(task);
        }
    }

    pub(crate) fn call_times_out(&mut self, call: u64) {
        if let Some(Call {
            run,
            task: Some(task),
            ..
        }) = self.scheduler.calls.get(&call)
        {
            let (run, task) = (*run, *task);
            self.played(Played::CallTimedOut);
            self.note(format_args!("bind call {call} times out"));
            self.soon(1, 5, Event::CallHungUp { run, task });
            self.call_answered(call, Some("time-out"));
        }
    }

    pub(crate) fn call_answered(&mut self, call: u64, error: Option<&str>) {
        let Some(Call { uid, life, .. }) = self.scheduler.calls.remove(&call) else {
            return;
        };
        if life != self.scheduler.life {
            return;
        }
        let Some(known) = self.scheduler.pods.get_mut(&uid) else {
            return;
        };
        match (&mut known.state, error) {
            (State::Assumed { call: of, .. }, None) if *of == Some(call) => {
                *of = None;
                known.attempts = 0;
            }
            (State::Assumed { call: of, .. }, Some(_)) if *of == Some(call) => self.call_failed(&uid),
            _ => {}
        }
    }

    /// An assumed pod is forgotten: the others may go where it was to be.
    fn call_failed(&mut self, uid: &str) {
        self.back_off(uid);
        self.wake_parked(true);
    }

    /// The calls of an extender that was killed end at once.
    pub(crate) fn calls_end(&mut self, run: u32) {
        let calls: Vec<u64> = self
            .scheduler
            .calls
            .iter()
            .filter(|(_, call)| call.run == run)
            .map(|(number, _)| *number)
            .collect();
        for call in calls {
            let error = Some("EOF".to_owned());
            self.soon(1, 5, Event::CallAnswered { call, error });
        }
    }

    /// Pods that kube-scheduler believes to be bound and that are not, without anybody on the way to bind them.
    pub(crate) fn believed(&self) -> Option<String> {
        let mut stuck = self.scheduler.pods.iter().filter(|(uid, known)| {
            let there = self.api.pod(&known.pod.name, uid);
            matches!(known.state, State::Assumed { call: None, .. })
                && there.is_some_and(|pod| pod.node.is_none())
        });
        stuck.next().map(|(uid, _)| uid.clone())
    }
}

impl Scheduler {
    /// What is left of a node for a pod, by its own count, if of the pods there only some stay. Pods of no lower priority for which room is being made
    /// there count as if they were there.
    fn left_for(&self, pod: &Pod, node: &str, stays: impl Fn(&Pod) -> bool) -> i64 {
        let all = self.nodes.get(node).copied().unwrap_or_default();
        let taken = self.pods.values().filter(|known| {
            let other = &known.pod;
            match known.node() {
                Some(there) => there == node && stays(other),
                None => {
                    let nominated = known.nominated.as_deref() == Some(node);
                    nominated && other.uid != pod.uid && other.priority >= pod.priority
                }
            }
        });
        let taken: u32 = taken.map(|known| known.pod.gpus).sum();
        i64::from(all) - i64::from(taken)
    }
}

/// What kube-scheduler sends for filter and prioritize.
fn body(pod: &Pod, nodes: &[String]) -> String {
    let nodes = serde_json::to_string(nodes).unwrap();
    format!(r#"{{"Pod":{},"Nodes":null,"NodeNames":{nodes}}}"#, pod.text())
}

impl Known {
    /// The node on which it counts.
    fn node(&self) -> Option<&str> {
        match &self.state {
            State::Assumed { node, .. } => Some(node),
            State::Bound => self.pod.node.as_deref(),
            _ => None,
        }
    }

    fn new(pod: &Arc<Pod>) -> Self {
        Self {
            pod: Arc::clone(pod),
            state: match pod.gates.is_empty() {
                true => State::Active,
                false => State::Gated,
            },
            attempts: 0,
            asked: VecDeque::new(),
            nominated: pod.nominated.clone(),
            stopping: BTreeSet::new(),
        }
    }
}
