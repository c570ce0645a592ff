//! A cluster that misbehaves: pods, devices, objects and writes in flight as they truly are, around the state machine. Every step checks
//! what must always hold.

mod checks;
mod pods;
mod scheduler;
mod work;
mod writes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{Decision, GangStatus, NodeName, PodUid};

use super::world::key;
use crate::key::GangKey;
use crate::membership::Membership;
use crate::protocol::GangEvent;
use crate::protocol::tests::world::released;
use crate::protocol::{Assignment, Devices, Effects, Gangs, Moment, Reply, Settings, Stage};
use crate::terms::Repair;

pub(super) const GANGS: [&str; 3] = ["a", "b", "c"];
const NODES: usize = 6;
const GPUS: usize = 2;

/// What happens. Numbers are taken modulo what there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Op {
    Create {
        gang: usize,
        gated: bool,
        gpus: bool,
    },
    Delete(usize),
    Remove(usize),
    Fail(usize),
    Succeed(usize),
    Plan {
        room: bool,
        preempt: bool,
    },
    Filter {
        pod: usize,
        offered: u8,
    },
    Bind(usize),
    Withdraw(usize),
    GiveUp(usize),
    Commit(Write),
    Land(usize),
    Read(usize),
    Statuses,
    EndBind {
        pod: usize,
        end: End,
    },
    Pass(u64),
    Unfit(usize),
    ReleaseExtras(usize),
    DropObject(usize),
    Restart {
        landed: bool,
    },
    /// Another pod gets the devices of a spare slot.
    Lend(usize),
    /// Another pod that has lent devices ends.
    Return(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Write {
    Done,
    Conflict,
    Refused,
    /// Nobody answers; the write may still come.
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Bound,
    Failed,
    UnsureBound,
    UnsureNot,
}

#[derive(Debug, Clone)]
struct Pod {
    uid: String,
    membership: Membership,
    gpus: bool,
    stage: Stage,
    leaving: bool,
    holds: Devices,
    /// Where filter sent it.
    sent: Option<NodeName>,
    /// It waits in bind.
    waits: bool,
    /// It may be bound here.
    going: Option<Assignment>,
}

#[derive(Debug, Clone, Default)]
struct Stored {
    exists: bool,
    version: u64,
    status: GangStatus,
}

pub(super) struct Cluster {
    pub(super) gangs: Gangs,
    effects: Effects,
    start: Instant,
    passed: Duration,
    room: u64,
    made: usize,
    pods: Vec<Pod>,
    stored: BTreeMap<&'static str, Stored>,
    commits: Vec<(Arc<GangKey>, Decision, u64)>,
    in_flight: Vec<(Arc<GangKey>, Decision, u64)>,
    reserved: BTreeMap<(Arc<GangKey>, u32), (NodeName, String)>,
    lost_nodes: BTreeSet<String>,
    /// Devices that other pods were lent.
    lent: BTreeSet<String>,
    repairs: [Repair; 3],
    spares: [u32; 3],
    mins: [u32; 3],
    ranked: [bool; 3],
    max_gangs: usize,
    processes: u32,
    /// Everything that was said, to hold two runs against one another.
    pub(super) log: Vec<String>,
}

impl Cluster {
    pub(super) fn new(
        repairs: [Repair; 3],
        spares: [u32; 3],
        mins: [u32; 3],
        ranked: [bool; 3],
        max_gangs: usize,
    ) -> Self {
        let mut cluster = Self {
            gangs: Gangs::new(Settings { max_gangs, ..Settings::default() }),
            effects: Effects::default(),
            max_gangs,
            start: Instant::now(),
            passed: Duration::ZERO,
            room: 1,
            made: 0,
            pods: Vec::new(),
            stored: GANGS.iter().map(|name| (*name, Stored::default())).collect(),
            commits: Vec::new(),
            in_flight: Vec::new(),
            reserved: BTreeMap::new(),
            lost_nodes: BTreeSet::new(),
            lent: BTreeSet::new(),
            repairs,
            spares,
            mins,
            ranked,
            processes: 0,
            log: Vec::new(),
        };
        cluster.handle(GangEvent::Synced);
        cluster
    }

    fn now(&self) -> Moment {
        Moment { at: self.start + self.passed, unix: 1_000 + i64::try_from(self.passed.as_secs()).unwrap() }
    }

    fn handle(&mut self, event: GangEvent<'_>) -> Reply {
        let effects = self.gangs.handle(self.now(), event);
        self.effects.extend(effects)
    }

    pub(super) fn step(&mut self, op: &Op) {
        match op {
            Op::Create { gang, gated, gpus } => self.create(gang % 3, *gated, *gpus),
            Op::Delete(pod) => self.with_pod(*pod, |cluster, at| cluster.delete(at)),
            Op::Remove(pod) => self.with_pod(*pod, |cluster, at| {
                if cluster.pods[at].leaving || cluster.ended(at) {
                    cluster.remove(at);
                }
            }),
            Op::Fail(pod) => self.with_pod(*pod, |cluster, at| cluster.end(at, Stage::Failed)),
            Op::Succeed(pod) => self.with_pod(*pod, |cluster, at| cluster.end(at, Stage::Succeeded)),
            Op::Plan { room, preempt } => self.plan(*room, *preempt),
            Op::Filter { pod, offered } => self.with_pod(*pod, |cluster, at| cluster.filter(at, *offered)),
            Op::Bind(pod) => self.with_pod(*pod, Self::bind),
            Op::Withdraw(pod) => self.with_pod(*pod, |cluster, at| {
                if std::mem::take(&mut cluster.pods[at].waits) {
                    cluster.handle(GangEvent::Disconnected { pod: &cluster.uid(at) });
                }
            }),
            Op::GiveUp(pod) => self.with_pod(*pod, |cluster, at| {
                if std::mem::take(&mut cluster.pods[at].waits) {
                    cluster.handle(GangEvent::BarrierTimeout { pod: &cluster.uid(at) });
                }
            }),
            Op::Commit(write) => self.commit(*write),
            Op::Land(which) => {
                if !self.in_flight.is_empty() {
                    let (gang, decision, version) = self.in_flight.remove(which % self.in_flight.len());
                    self.write(&gang, &decision, version);
                }
            }
            Op::Read(gang) => self.read(GANGS[gang % 3]),
            Op::Statuses => self.statuses(),
            Op::EndBind { pod, end } => self.with_pod(*pod, |cluster, at| cluster.end_bind(at, *end)),
            Op::Pass(seconds) => {
                self.passed += Duration::from_secs(*seconds);
                self.handle(GangEvent::Tick);
            }
            Op::Unfit(node) => {
                let node = format!("n{}", node % NODES);
                self.handle(GangEvent::NodeLost { node: &node.as_str().into() });
                self.lost_nodes.insert(node);
            }
            Op::ReleaseExtras(gang) => {
                let key = key(GANGS[gang % 3]);
                let view = self.gangs.view(&key);
                let spares: BTreeSet<u32> =
                    view.iter().flat_map(|view| view.surplus()).map(|(_, spare)| spare.slot).collect();
                let count = released(self.handle(GangEvent::ReleaseSurplus { gang: &key, slots: &spares }));
                assert_eq!(count as usize, spares.len());
                let view = self.gangs.view(&key);
                let idle: BTreeSet<u32> =
                    view.iter().flat_map(|view| view.orphaned()).map(|idle| idle.slot).collect();
                let given = released(self.handle(GangEvent::ReleaseOrphaned {
                    gang: &key,
                    slots: &idle,
                    to: &"gang ns/x".into(),
                }));
                assert_eq!(given as usize, idle.len());
            }
            Op::DropObject(gang) => {
                self.drop_object("default", GANGS[gang % 3]);
            }
            Op::Restart { landed } => self.restart(*landed),
            Op::Lend(which) => self.lend(*which),
            Op::Return(which) => {
                if let Some(gpu) = self.lent.iter().nth(which % self.lent.len().max(1)).cloned() {
                    self.lent.remove(&gpu);
                }
            }
        }
        self.collect();
        self.report_lent();
        self.check();
    }

    fn with_pod(&mut self, pod: usize, act: impl FnOnce(&mut Self, usize)) {
        if !self.pods.is_empty() {
            act(self, pod % self.pods.len());
        }
    }

    fn uid(&self, at: usize) -> PodUid {
        self.pods[at].uid.as_str().into()
    }

    /// The spare slots: gang, number, GPU, and whether a member has it.
    fn spare_slots(&self) -> Vec<(Arc<GangKey>, u32, String, bool)> {
        let views = self.gangs.views();
        let slots = views.flat_map(|view| view.slots().map(move |slot| (view.key().clone(), slot)));
        let spare = slots.filter(|(_, slot)| slot.spare);
        spare
            .map(|(gang, slot)| (gang, slot.slot, slot.devices[0].1[0].to_string(), slot.pod.is_some()))
            .collect()
    }

    fn lend(&mut self, which: usize) {
        let held = self.held();
        let free = |(_, _, gpu, taken): &(_, _, String, bool)| !taken && !held.contains_key(gpu);
        let free: Vec<_> = self.spare_slots().into_iter().filter(free).collect();
        if let Some((_, _, gpu, _)) = free.get(which % free.len().max(1)) {
            self.lent.insert(gpu.clone());
        }
    }

    /// Reports who has the devices of spare slots that members have now, as the extender does whenever a node changes.
    fn report_lent(&mut self) {
        for (gang, slot, gpu, taken) in self.spare_slots() {
            if taken {
                let lent = self.lent.contains(&gpu);
                let pods =
                    lent.then(|| PodUid::from(format!("borrower-{gpu}").as_str())).into_iter().collect();
                self.handle(GangEvent::SlotHeld { gang: &gang, slot, pods: &pods, ends: None });
                self.collect();
            }
        }
    }
}
