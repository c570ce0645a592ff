//! The world: a clock, what is going to happen, and everybody in it. One thing happens at a time; which, the seed says.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gantry_extender::index::Source;

use crate::api::Api;
use crate::coverage::{Coverage, Played};
use crate::dice::Dice;
use crate::evictions::Evictions;
use crate::extender::{Action, BIND, Extenders, Request};
use crate::hostile::{Hostile, Snapshot};
use crate::jobs::Jobs;
use crate::kubelet::Kubelets;
use crate::scheduler::Scheduler;
use crate::waiting::Waits;

/// When everything begins, in seconds since 1970.
pub(crate) const BEGIN: i64 = 1_767_225_600;

/// No schedule has so many steps, unless something goes round and round.
const MOST: u64 = 40_000;

/// What will happen.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// A watch brings its next change to an extender.
    Watch {
        run: u32,
        source: Source,
    },
    /// A watch of an extender breaks and begins anew with a list.
    Relist {
        run: u32,
        source: Source,
    },
    /// The same for kube-scheduler, which has one queue for both of its watches.
    SchedulerWatch {
        life: u32,
    },
    SchedulerStarts,
    Cycle {
        life: u32,
    },
    BackOffEnds {
        life: u32,
        uid: String,
        attempt: u32,
    },
    Flush {
        life: u32,
    },
    /// kube-scheduler stops a pod for another.
    StopVictim {
        life: u32,
        name: String,
        uid: String,
        by: String,
    },
    CallTimesOut {
        call: u64,
    },
    CallAnswered {
        call: u64,
        error: Option<String>,
    },
    /// kube-scheduler's socket of a call is seen to be closed.
    CallHungUp {
        run: u32,
        task: u64,
    },
    ExtenderStarts {
        slot: usize,
    },
    Elect {
        run: u32,
    },
    Tick {
        run: u32,
    },
    AskAgain {
        run: u32,
    },
    Poll {
        run: u32,
    },
    LookForGains {
        run: u32,
    },
    PlanMore {
        run: u32,
    },
    WriteGang {
        run: u32,
        name: String,
    },
    /// Something is to be done to a pod for a gang, or is to be tried again.
    Action {
        run: u32,
        uid: String,
        action: Action,
    },
    Retry {
        run: u32,
        task: u64,
    },
    MemberAnswer {
        run: u32,
        task: u64,
    },
    /// A request reaches the API server.
    Execute {
        request: u64,
    },
    /// Its sender hears how it ended, or stops to wait.
    Reply {
        request: u64,
        lost: bool,
    },
    /// Kubelet of a node looks at what is to do.
    Kubelet {
        node: usize,
    },
    Running {
        node: usize,
        uid: String,
    },
    Publish {
        node: usize,
    },
    NodeIsBack {
        node: usize,
    },
    Collect {
        node: usize,
    },
    /// Controllers look at their pods.
    Control,
    /// Something may go wrong.
    Trouble,
    Heal {
        node: usize,
        gpu: usize,
    },
    /// A device that a GpuNode did not list is listed again.
    Unhide {
        node: usize,
        gpu: usize,
    },
    /// etcd is kept as it is, and is put back to that later.
    Snapshot,
    Restore,
    /// Garbage collection removes pods that no controller knows.
    CollectOrphans,
}

/// What was seen to be wrong.
#[derive(Debug, Clone)]
pub(crate) struct Wrong(pub(crate) String);

/// What happened: when, hashed; as text only where somebody wants to read it.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) hash: u64,
    pub(crate) lines: Option<Vec<String>>,
}

impl Log {
    fn note(&mut self, now: u64, what: fmt::Arguments<'_>) {
        self.mix(now);
        if let Some(lines) = &mut self.lines {
            lines.push(format!("{:>7}.{:03} {what}", now / 1000, now % 1000));
        }
    }

    /// Two schedules that differ soon do so in the times of what happens, for these are drawn.
    fn mix(&mut self, number: u64) {
        self.hash = (self.hash ^ number).wrapping_mul(0x0100_0000_01b3);
    }
}

/// How a schedule is drawn.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Whether anything fails.
    pub(crate) troubled: bool,
    /// Milliseconds during which things fail and jobs come.
    pub(crate) restless: u64,
    /// Whether some gangs' pods have scheduling gates.
    pub(crate) gates: bool,
    /// Whether gangs and pods of higher priority have others stopped.
    pub(crate) preemption: bool,
    /// Whether gangs ask for a spare reservation.
    pub(crate) spares: bool,
    /// Whether members of gangs are in trees of groups.
    pub(crate) trees: bool,
    /// Whether filter is called for the members of trees with the nodes of every placement.
    pub(crate) placements: bool,
    /// Whether some controllers make replacements minutes after the loss.
    pub(crate) slow_owners: bool,
    /// Whether members beyond the minimum have volumes that are not there for minutes.
    pub(crate) late_volumes: bool,
    /// Milliseconds for which a lost member's place is kept, and a gang may be short until it gives way.
    pub(crate) hold: u64,
    /// What else goes on in the cluster.
    pub(crate) hostile: Hostile,
}

impl Plan {
    /// Whether the extenders may have pods stopped for others.
    pub(crate) fn stops(&self) -> bool {
        self.preemption || self.is_short_of_patience()
    }

    /// Whether gangs may give way soon. Lost nodes stay away longer then, so that some have to.
    pub(crate) fn is_short_of_patience(&self) -> bool {
        self.hold < 600_000
    }
}

/// Everybody.
pub(crate) struct World {
    pub(crate) now: u64,
    pub(crate) base: Instant,
    /// What the extenders' clocks show.
    pub(crate) clock: Arc<AtomicU64>,
    queue: BTreeMap<(u64, u64), Event>,
    events: u64,
    pub(crate) steps: u64,
    pub(crate) dice: Dice,
    pub(crate) log: Log,
    pub(crate) coverage: Coverage,
    pub(crate) api: Api,
    /// Until then the API server answers nobody.
    pub(crate) stalled: u64,
    pub(crate) requests: BTreeMap<u64, Request>,
    pub(crate) next_request: u64,
    pub(crate) scheduler: Scheduler,
    pub(crate) extenders: Extenders,
    pub(crate) kubelets: Kubelets,
    pub(crate) jobs: Jobs,
    pub(crate) evictions: Evictions,
    pub(crate) waits: Waits,
    /// Pods that another scheduler has bound, and that no Gang lists as such.
    pub(crate) bound_unlisted: BTreeSet<String>,
    /// Gangs that were written as finished while their job was not.
    pub(crate) finished_early: BTreeSet<String>,
    /// What etcd is put back to.
    pub(crate) snapshot: Option<Snapshot>,
    /// When it was.
    pub(crate) restored: Option<u64>,
    pub(crate) plan: Plan,
    pub(crate) wrong: Option<Wrong>,
}

impl World {
    pub(crate) fn new(seed: u64, plan: Plan, keep_log: bool) -> Self {
        let mut world = Self {
            now: 0,
            base: Instant::now(),
            clock: Arc::default(),
            queue: BTreeMap::new(),
            events: 0,
            steps: 0,
            dice: Dice::new(seed),
            log: Log { hash: 0xcbf2_9ce4_8422_2325, lines: keep_log.then(Vec::new) },
            coverage: Coverage::default(),
            api: Api::default(),
            stalled: 0,
            requests: BTreeMap::new(),
            next_request: 0,
            scheduler: Scheduler::default(),
            extenders: Extenders::default(),
            kubelets: Kubelets::default(),
            jobs: Jobs::default(),
            evictions: Evictions::default(),
            waits: Waits::default(),
            bound_unlisted: BTreeSet::new(),
            finished_early: BTreeSet::new(),
            snapshot: None,
            restored: None,
            plan,
            wrong: None,
        };
        world.draw_nodes();
        world.draw_jobs();
        world.extenders.barrier = match world.dice.mille(500) {
            true => BIND,
            // As short as if kube-scheduler were slow, or had many others to bring.
            false => world.dice.range(100, 3_000),
        };
        let second = world.dice.mille(600);
        world.at(0, Event::ExtenderStarts { slot: 0 });
        if second {
            let after = world.dice.range(0, 3_000);
            world.at(after, Event::ExtenderStarts { slot: 1 });
        }
        world.at(world.dice.clone().range(0, 3_000), Event::SchedulerStarts);
        world.at(0, Event::Control);
        world.at(500, Event::Trouble);
        world.plan_restore();
        world.tell_watchers();
        world
    }

    pub(crate) fn note(&mut self, what: fmt::Arguments<'_>) {
        self.log.note(self.now, what);
    }

    pub(crate) fn played(&mut self, played: Played) {
        self.coverage.add(played);
    }

    /// Something is wrong; the first counts.
    pub(crate) fn wrong(&mut self, what: String) {
        self.note(format_args!("WRONG: {what}"));
        self.wrong.get_or_insert(Wrong(what));
    }

    pub(crate) fn at(&mut self, at: u64, event: Event) {
        self.events += 1;
        self.queue.insert((at.max(self.now), self.events), event);
    }

    pub(crate) fn after(&mut self, delay: u64, event: Event) {
        self.at(self.now + delay, event);
    }

    pub(crate) fn soon(&mut self, first: u64, last: u64, event: Event) {
        let delay = self.dice.range(first, last);
        self.after(delay, event);
    }

    pub(crate) fn is_restless(&self) -> bool {
        self.plan.troubled && self.now < self.plan.restless
    }

    /// The moment by the extenders' clocks.
    pub(crate) fn instant(&self) -> Instant {
        self.base + Duration::from_millis(self.now)
    }

    /// The next thing happens. False if nothing will, or it would be after `until`, or something was wrong.
    pub(crate) fn step(&mut self, until: u64) -> bool {
        if self.wrong.is_some() {
            return false;
        }
        let Some((&(at, number), _)) = self.queue.first_key_value() else {
            return false;
        };
        if at > until {
            return false;
        }
        let Some(event) = self.queue.remove(&(at, number)) else {
            return false;
        };
        self.now = at;
        self.log.mix(at ^ (number << 32));
        self.clock.store(at, Ordering::Relaxed);
        self.steps += 1;
        if self.steps > MOST {
            let views = self.views();
            self.wrong(format!("there is no end: {event:?}\n{views}"));
        }
        self.happens(event);
        self.tell_watchers();
        true
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Watch { run, source } => self.watch_brings(run, source),
            Event::Relist { run, source } => self.relist(run, source),
            Event::SchedulerWatch { life } => self.scheduler_sees(life),
            Event::SchedulerStarts => self.start_scheduler(),
            Event::Cycle { life } => self.cycle(life),
            Event::BackOffEnds { life, uid, attempt } => self.back_off_ends(life, &uid, attempt),
            Event::Flush { life } => self.flush(life),
            Event::StopVictim { life, name, uid, by } => self.stop_victim(life, &name, &uid, &by),
            Event::CallTimesOut { call } => self.call_times_out(call),
            Event::CallAnswered { call, error } => self.call_answered(call, error.as_deref()),
            Event::CallHungUp { run, task } => self.hung_up(run, task),
            Event::ExtenderStarts { slot } => self.start_extender(slot),
            Event::Elect { run } => self.elect(run),
            Event::Tick { run } => self.tick(run),
            Event::AskAgain { run } => self.ask_again(run),
            Event::Poll { run } => self.poll(run),
            Event::LookForGains { run } => self.look_for_gains(run),
            Event::PlanMore { run } => self.plan_more(run),
            Event::WriteGang { run, name } => self.write_gang(run, &name),
            Event::Action { run, uid, action } => self.try_deed(run, &uid, &action),
            Event::Retry { run, task } => self.retry(run, task),
            Event::MemberAnswer { run, task } => self.member_answer(run, task),
            Event::Execute { request } => self.execute(request),
            Event::Reply { request, lost } => self.reply(request, lost),
            Event::Kubelet { node } => self.kubelet(node),
            Event::Running { node, uid } => self.running(node, &uid),
            Event::Publish { node } => self.publish(node),
            Event::NodeIsBack { node } => self.node_is_back(node),
            Event::Collect { node } => self.collect(node),
            Event::Control => self.control(),
            Event::Trouble => self.trouble(),
            Event::Heal { node, gpu } => self.heal(node, gpu),
            Event::Unhide { node, gpu } => self.unhide(node, gpu),
            Event::Snapshot => self.take_snapshot(),
            Event::Restore => self.restore(),
            Event::CollectOrphans => self.collect_orphans(),
        }
    }

    /// What was written goes out to those who watch: in order within a source, each source at its own pace.
    fn tell_watchers(&mut self) {
        for change in std::mem::take(&mut self.api.changes) {
            self.tell_extenders(&change);
            self.tell_scheduler(&change);
            self.tell_kubelets(&change);
        }
    }

    /// How long a watch takes to bring a change: mostly milliseconds.
    pub(crate) fn lag(&mut self) -> u64 {
        let slow = self.is_restless() && self.dice.mille(20);
        if slow { self.dice.range(50, 3_000) } else { self.dice.range(1, 8) }
    }

    /// What may go wrong by itself, now and then.
    fn trouble(&mut self) {
        if !self.is_restless() {
            self.calm();
            return;
        }
        let pause = self.dice.range(200, 6_000);
        self.after(pause, Event::Trouble);
        self.hostile_acts();
        match self.dice.below(13) {
            0 | 1 => self.kill_extender(),
            2 => self.pause_extender(),
            3 => self.kill_scheduler(),
            4 | 5 => self.delete_some_pod(),
            6 => self.lose_node(),
            11 if self.plan.is_short_of_patience() => (0..2).for_each(|_| self.lose_node()),
            7 => self.break_gpu(),
            8 => self.stall(),
            9 => self.touch_some_gang(),
            10 => self.break_some_watch(),
            12 => self.restart_some_job(),
            _ => {}
        }
    }

    fn stall(&mut self) {
        let length = match self.dice.below(3) {
            0 => self.dice.range(100, 2_000),
            1 => self.dice.range(2_000, 9_000),
            _ => self.dice.range(9_000, 25_000),
        };
        self.stalled = self.stalled.max(self.now + length);
        self.played(Played::Stall);
        self.note(format_args!("the API server stalls for {length} ms"));
    }

    fn touch_some_gang(&mut self) {
        let names: Vec<String> = self.api.gangs.keys().cloned().collect();
        if !names.is_empty() {
            let name = &names[self.dice.index(names.len())];
            self.played(Played::GangTouched);
            self.note(format_args!("somebody writes gang object {name}"));
            self.api.touch_gang(name);
        }
    }

    /// From here on nothing new fails; what is broken is mended. A stall goes on to its end, and so does the sleep of an extender: what its
    /// watches have brought meanwhile comes when it wakes.
    fn calm(&mut self) {
        self.note(format_args!("calm"));
        self.rival_gives_up();
        self.calm_nodes();
    }

    /// Everything is deleted, and nothing is made anew.
    pub(crate) fn close(&mut self) {
        self.jobs.closed = true;
        self.plan.troubled = false;
        self.note(format_args!("everything is deleted"));
        let pods: Vec<(String, String)> =
            self.api.pods.values().map(|pod| (pod.name.clone(), pod.uid.clone())).collect();
        for (name, uid) in pods {
            self.delete_pod(&name, &uid, false);
        }
        self.tell_watchers();
    }

    /// Nothing is left of what was.
    pub(crate) fn is_empty(&self) -> bool {
        if !self.api.pods.is_empty() || !self.api.gangs.is_empty() {
            return false;
        }
        let all: u32 = self.kubelets.all.iter().map(|kubelet| kubelet.gpus()).sum();
        let free = self.leader().and_then(|run| {
            let (totals, places, _) = self.extenders.running.get(&run)?.totals();
            Some(totals.free == all as usize && places == 0)
        });
        free == Some(true)
    }
}
