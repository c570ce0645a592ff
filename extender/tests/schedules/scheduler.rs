//! kube-scheduler, as it was seen to behave: an active queue, a pool of the unschedulable, back-off, pods assumed on nodes while bind is
//! called for them. Pods rejected by the extender are woken by what happens to themselves and to bound pods and nodes.

mod calls;
mod cycle;
mod preempt;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::api::{Change, Pod};
use crate::coverage::Played;
use crate::world::{Event, World};

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
        self.note(format_args!("kube-scheduler starts, life {life}, samples {samples}"));
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
            || !matches!(change, Change::Pod(_) | Change::PodGone(_) | Change::Node(..) | Change::NodeGone(_))
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
                    State::Gated | State::Parked { by_extender: true, .. } => known.state = State::Active,
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
        let active = self.scheduler.pods.values().any(|known| known.state == State::Active);
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
