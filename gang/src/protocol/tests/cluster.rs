//! A cluster that misbehaves: pods, devices, objects and writes in flight as they truly are, around the state machine. Every step checks what
//! must always hold.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{Decision, GangPhase, GangStatus, NodeName, PodUid};

use super::world::{claim, key, member, with_rank, with_repair};
use crate::claim::Claim;
use crate::key::GangKey;
use crate::protocol::{
    Answer, Arrival, BindEnd, CommitFailure, Devices, Gangs, Member, Now, Object, Place, Placed, Placement,
    Refused, Settings, SlotChange, Stage, Work,
};
use crate::terms::Repair;

pub(super) const GANGS: [&str; 3] = ["a", "b", "c"];
const NODES: usize = 6;
const GPUS: usize = 2;

/// What happens. Numbers are taken modulo what there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Op {
    Create { gang: usize, gated: bool, gpus: bool },
    Delete(usize),
    Remove(usize),
    Fail(usize),
    Succeed(usize),
    Plan { room: bool, preempt: bool },
    Filter { pod: usize, offered: u8 },
    Bind(usize),
    Withdraw(usize),
    GiveUp(usize),
    Commit(Write),
    Land(usize),
    Read(usize),
    Statuses,
    EndBind { pod: usize, end: End },
    Pass(u64),
    Unfit(usize),
    ReleaseExtras(usize),
    DropObject(usize),
    Restart { landed: bool },
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
    claim: Claim,
    gpus: bool,
    stage: Stage,
    leaving: bool,
    holds: Devices,
    /// Where filter sent it.
    sent: Option<NodeName>,
    /// It waits in bind.
    waits: bool,
    /// It may be bound here.
    going: Option<Placed>,
}

#[derive(Debug, Clone, Default)]
struct Stored {
    exists: bool,
    version: u64,
    status: GangStatus,
}

pub(super) struct Cluster {
    pub(super) gangs: Gangs,
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
    repairs: [Repair; 3],
    mins: [u32; 3],
    ranked: [bool; 3],
    max_gangs: usize,
    processes: u32,
    /// Everything that was said, to hold two runs against one another.
    pub(super) log: Vec<String>,
}

impl Cluster {
    pub(super) fn new(repairs: [Repair; 3], mins: [u32; 3], ranked: [bool; 3], max_gangs: usize) -> Self {
        let mut cluster = Self {
            gangs: Gangs::new(Settings {
                max_gangs,
                ..Settings::default()
            }),
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
            repairs,
            mins,
            ranked,
            processes: 0,
            log: Vec::new(),
        };
        cluster.gangs.synced(cluster.now());
        cluster
    }

    fn now(&self) -> Now {
        Now {
            at: self.start + self.passed,
            unix: 1_000 + i64::try_from(self.passed.as_secs()).unwrap(),
        }
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
                    cluster.gangs.withdraw(cluster.now(), &cluster.uid(at));
                }
            }),
            Op::GiveUp(pod) => self.with_pod(*pod, |cluster, at| {
                if std::mem::take(&mut cluster.pods[at].waits) {
                    cluster.gangs.gave_up(cluster.now(), &cluster.uid(at));
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
                self.gangs.tick(self.now());
            }
            Op::Unfit(node) => {
                let node = format!("n{}", node % NODES);
                self.gangs.unfit(
                    self.now(),
                    &node.as_str().into(),
                    "its GPU has fallen off the bus",
                );
                self.lost_nodes.insert(node);
            }
            Op::ReleaseExtras(gang) => {
                let key = key(GANGS[gang % 3]);
                let view = self.gangs.view(&key);
                let spares: BTreeSet<u32> = view
                    .iter()
                    .flat_map(|view| view.spares())
                    .map(|(_, spare)| spare.slot)
                    .collect();
                let released = self.gangs.release_extras(self.now(), &key, &spares);
                assert_eq!(released as usize, spares.len());
                let view = self.gangs.view(&key);
                let idle: BTreeSet<u32> = view
                    .iter()
                    .flat_map(|view| view.idle())
                    .map(|idle| idle.slot)
                    .collect();
                let given = self
                    .gangs
                    .give_up_idle(self.now(), &key, &idle, &"gang ns/x".into());
                assert_eq!(given as usize, idle.len());
            }
            Op::DropObject(gang) => {
                let name = GANGS[gang % 3];
                self.stored.insert(name, Stored::default());
                self.gangs.object_gone(self.now(), "default", name);
            }
            Op::Restart { landed } => self.restart(*landed),
        }
        self.collect();
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

    fn ended(&self, at: usize) -> bool {
        matches!(self.pods[at].stage, Stage::Succeeded | Stage::Failed)
    }

    fn create(&mut self, gang: usize, gated: bool, gpus: bool) {
        let name = GANGS[gang];
        let of_gang = self.pods.iter().filter(|pod| *pod.claim.key.name == *name);
        if of_gang.clone().count() >= 6 {
            return;
        }
        let mut claim = with_repair(claim(name, self.mins[gang]), self.repairs[gang]);
        if self.ranked[gang] {
            let taken: BTreeSet<u32> = of_gang
                .filter(|pod| !matches!(pod.stage, Stage::Failed))
                .filter_map(|pod| pod.claim.rank)
                .collect();
            let rank = (0..).find(|rank| !taken.contains(rank)).unwrap();
            claim = with_rank(claim, rank);
        }
        self.made += 1;
        self.pods.push(Pod {
            uid: format!("{name}{}", self.made),
            claim,
            gpus,
            stage: if gated {
                Stage::Gated { by_us_alone: true }
            } else {
                Stage::Pending
            },
            leaving: false,
            holds: Vec::new(),
            sent: None,
            waits: false,
            going: None,
        });
        self.see(self.pods.len() - 1);
    }

    fn member(&self, at: usize) -> Member {
        let pod = &self.pods[at];
        let mut member = member(&pod.uid, pod.claim.clone());
        member.stage = pod.stage.clone();
        member.leaving = pod.leaving;
        member.holds = pod.holds.clone();
        member.created = 1_000 + i64::try_from(at).unwrap();
        if !pod.gpus {
            member.shape = None;
            member.asks = [].into();
        }
        member
    }

    fn see(&mut self, at: usize) {
        self.gangs.member_seen(self.now(), self.member(at));
    }

    fn delete(&mut self, at: usize) {
        if matches!(self.pods[at].stage, Stage::Bound(_)) {
            self.pods[at].leaving = true;
            self.see(at);
        } else {
            self.remove(at);
        }
    }

    fn remove(&mut self, at: usize) {
        let pod = self.pods.remove(at);
        let uid: PodUid = pod.uid.as_str().into();
        if pod.going.is_some() {
            self.gangs.bind_ended(self.now(), &uid, BindEnd::Gone);
        }
        self.gangs.member_gone(self.now(), &uid);
        self.gangs.victim_gone(self.now(), &uid);
        self.room += 1;
    }

    fn end(&mut self, at: usize, stage: Stage) {
        if matches!(self.pods[at].stage, Stage::Bound(_)) {
            self.pods[at].stage = stage;
            self.pods[at].holds.clear();
            self.see(at);
            let uid = self.uid(at);
            self.gangs.victim_gone(self.now(), &uid);
            self.room += 1;
        }
    }

    /// Devices that pods hold.
    fn held(&self) -> BTreeMap<String, String> {
        let mut held = BTreeMap::new();
        for pod in &self.pods {
            for id in pod.holds.iter().flat_map(|(_, ids)| ids) {
                let before = held.insert(id.to_string(), pod.uid.clone());
                assert_eq!(before, None, "GPU {id} is granted twice: to {} too", pod.uid);
            }
        }
        held
    }

    fn plan(&mut self, room: bool, preempt: bool) {
        let Some(wanted) = self.gangs.next(self.now(), self.room) else {
            return;
        };
        self.log.push(format!("{wanted:?}"));
        let reserved: BTreeSet<String> = self.reserved.values().map(|(_, gpu)| gpu.clone()).collect();
        let held = self.held();
        let mut victims: Vec<PodUid> = Vec::new();
        if preempt && wanted.must > 0 {
            let other = self.pods.iter().find(|pod| {
                pod.claim.key != *wanted.gang
                    && !pod.leaving
                    && matches!(pod.stage, Stage::Bound(_))
                    && pod.gpus
            });
            if let Some(gang) = other.map(|pod| pod.claim.key.clone()) {
                let all = self.pods.iter().filter(|pod| pod.claim.key == gang && pod.gpus);
                victims.extend(
                    all.filter(|pod| matches!(pod.stage, Stage::Bound(_)) && !pod.leaving)
                        .map(|pod| PodUid::from(pod.uid.as_str())),
                );
            }
        }
        let mut free = Vec::new();
        for node in (0..NODES).map(|node| format!("n{node}")) {
            let excluded =
                self.lost_nodes.contains(&node) || wanted.without.iter().any(|n| *n.as_str() == *node);
            for gpu in (0..GPUS).map(|gpu| format!("{node}-g{gpu}")) {
                let by_victim = held
                    .get(&gpu)
                    .is_some_and(|uid| victims.iter().any(|victim| victim.as_str() == uid));
                let going = self.pods.iter().any(|pod| {
                    let placed = pod.going.as_ref();
                    placed.is_some_and(|placed| placed.devices[0].1[0].as_str() == gpu)
                });
                let open = !held.contains_key(&gpu) && !going || by_victim;
                if !excluded && open && !reserved.contains(&gpu) {
                    free.push((node.clone(), gpu));
                }
            }
        }
        let count = wanted.members.len().min(free.len());
        let enough = count >= wanted.must.max(1) as usize;
        let result = if room && enough {
            let places = wanted
                .members
                .iter()
                .zip(&free)
                .map(|(member, (node, gpu))| Place {
                    shape: member.shape,
                    node: node.as_str().into(),
                    devices: vec![("nvidia.com/gpu".into(), vec![gpu.as_str().into()])],
                    rank: member.rank,
                    role: member.role.clone(),
                    ordinal: None,
                    follows: false,
                });
            Ok(Placement {
                places: places.collect(),
                domain: "cluster".into(),
                victims,
                ..Placement::default()
            })
        } else {
            Err(Refused {
                reason: "no room".into(),
                message: "no room".into(),
                hopeless: false,
            })
        };
        self.gangs.placed(self.now(), &wanted.gang, result);
    }

    fn filter(&mut self, at: usize, offered: u8) {
        if self.pods[at].stage != Stage::Pending || self.pods[at].waits || self.pods[at].going.is_some() {
            return;
        }
        let offers = |node: &NodeName| {
            let number: u32 = node.as_str()[1..].parse().unwrap();
            offered & (1 << number) != 0
        };
        let answer = self.gangs.answer(self.now(), &self.uid(at), &offers);
        self.log.push(format!("{answer:?}"));
        if let Answer::Node(node) = answer {
            assert!(offers(&node), "{node} was not offered");
            self.pods[at].sent = Some(node);
        }
    }

    fn bind(&mut self, at: usize) {
        let pod = &self.pods[at];
        if pod.stage != Stage::Pending || pod.going.is_some() {
            return;
        }
        let Some(node) = pod.sent.clone() else { return };
        let arrival = self.gangs.arrive(self.now(), &self.uid(at), &node);
        self.log.push(format!("{arrival:?}"));
        self.pods[at].waits = arrival == Arrival::Wait;
        match arrival {
            Arrival::Go(placed) => {
                let name = GANGS.iter().find(|name| **name == &*placed.gang.name).unwrap();
                let written = self.stored[name]
                    .status
                    .decision
                    .as_ref()
                    .map(|decision| &*decision.id);
                let view = self.gangs.view(&placed.gang).unwrap();
                let object = &self.stored[name];
                // An object that somebody has deleted is written again from what is known.
                assert!(
                    !object.exists || written == view.decision_id() || self.was_written(view.decision_id()),
                    "{} goes, but {:?} is not written: {written:?}",
                    self.pods[at].uid,
                    view.decision_id(),
                );
                assert_eq!(placed.node, node);
                let decision = object.status.decision.as_ref().filter(|_| object.exists);
                let told = decision.and_then(|decision| {
                    let uid = &*self.pods[at].uid;
                    let slots = decision.slots.iter();
                    slots
                        .clone()
                        .find(|slot| slot.pod.as_ref().is_some_and(|pod| pod.as_str() == uid))
                });
                // Whoever takes over must know of the place, or nobody has it by the object.
                assert!(
                    told.is_none_or(|slot| slot.node == node && slot.devices[0].ids == placed.devices[0].1)
                        && (told.is_some() || decision.is_none()),
                    "{} goes to {node}, and the object says {told:?}",
                    self.pods[at].uid,
                );
                self.pods[at].going = Some(placed);
            }
            Arrival::Refuse(_) => self.pods[at].sent = None,
            Arrival::Wait => {}
            Arrival::Single => assert!(!self.pods[at].gpus, "{} is no single pod", self.pods[at].uid),
        }
    }

    fn was_written(&self, id: Option<&str>) -> bool {
        id.is_some_and(|id| self.log.iter().any(|line| line == &format!("written {id}")))
    }

    fn commit(&mut self, outcome: Write) {
        if self.commits.is_empty() {
            return;
        }
        let (gang, decision, version) = self.commits.remove(0);
        let result = match outcome {
            Write::Done => {
                if self.write(&gang, &decision, version) {
                    Ok(())
                } else {
                    Err(CommitFailure::Conflict)
                }
            }
            Write::Conflict => {
                // Somebody else has written.
                if let Some(stored) = self.stored.get_mut(&*gang.name) {
                    stored.version += 1;
                }
                Err(CommitFailure::Conflict)
            }
            Write::Refused => Err(CommitFailure::Refused("gangs is forbidden".into())),
            Write::Unknown => {
                self.in_flight.push((gang.clone(), decision.clone(), version));
                Err(CommitFailure::Unknown)
            }
        };
        self.gangs.committed(self.now(), &gang, &decision.id, result);
    }

    /// Writes a decision if the object is still of that version.
    fn write(&mut self, gang: &GangKey, decision: &Decision, version: u64) -> bool {
        let Some(stored) = self.stored.get_mut(&*gang.name) else {
            return false;
        };
        if stored.version != version {
            return false;
        }
        stored.exists = true;
        stored.version += 1;
        stored.status.name = gang.name.to_string();
        stored.status.dialect = gang.dialect.as_str().to_owned();
        stored.status.decision = Some(decision.clone());
        self.log.push(format!("written {}", decision.id));
        true
    }

    fn read(&mut self, name: &str) {
        let stored = self.stored[name].clone();
        if stored.exists {
            let object = object(&stored);
            self.gangs.object_seen(self.now(), "default", name, object);
        } else {
            self.gangs.object_gone(self.now(), "default", name);
        }
    }

    fn statuses(&mut self) {
        for (gang, status) in self.gangs.take_statuses() {
            self.log.push(format!("{gang} {status:?}"));
            let Some(stored) = self.stored.get_mut(&*gang.name) else {
                continue;
            };
            if let Some(decision) = &status.decision {
                self.log.push(format!("written {}", decision.id));
            }
            stored.exists = true;
            stored.version += 1;
            stored.status = status;
        }
    }

    fn end_bind(&mut self, at: usize, end: End) {
        let uid = self.uid(at);
        let Some(placed) = self.pods[at].going.take() else {
            return;
        };
        self.pods[at].sent = None;
        let bound = matches!(end, End::Bound | End::UnsureBound);
        if bound {
            self.pods[at].stage = Stage::Bound(placed.node.clone());
            self.pods[at].holds = placed.devices;
            self.held();
        }
        let outcome = match end {
            End::Bound => BindEnd::Bound,
            End::Failed => BindEnd::Failed,
            End::UnsureBound | End::UnsureNot => BindEnd::Unsure,
        };
        self.gangs.bind_ended(self.now(), &uid, outcome);
        if bound {
            self.see(at);
        }
    }

    fn restart(&mut self, landed: bool) {
        for (gang, decision, version) in std::mem::take(&mut self.in_flight) {
            if landed {
                self.write(&gang, &decision, version);
            }
        }
        self.commits.clear();
        self.processes += 1;
        self.gangs = Gangs::new(Settings {
            identity: format!("process{}", self.processes).into(),
            max_gangs: self.max_gangs,
            ..Settings::default()
        });
        self.reserved.clear();
        for pod in &mut self.pods {
            pod.waits = false;
            pod.going = None;
            pod.sent = None;
        }
        for name in GANGS {
            if self.stored[name].exists {
                self.read(name);
            }
        }
        for at in 0..self.pods.len() {
            self.see(at);
        }
        assert_eq!(
            self.gangs.next(self.now(), self.room),
            None,
            "nothing is decided before all is known"
        );
        self.gangs.synced(self.now());
    }

    /// Does what is to be done, but for what a step does.
    fn collect(&mut self) {
        for work in self.gangs.take_work() {
            self.log.push(format!("{work:?}"));
            match work {
                Work::Commit { gang, decision } => {
                    let view = self.gangs.view(&gang).unwrap();
                    let resent = self.in_flight.iter().any(|(_, other, _)| other.id == decision.id);
                    let enough = view.ready() >= decision.min;
                    assert!(
                        enough || resent || self.was_sent(&decision.id),
                        "{gang} is decided too early"
                    );
                    self.log.push(format!("sent {}", decision.id));
                    let version = self.stored[&*gang.name].version;
                    self.commits.push((gang, decision, version));
                }
                Work::Ungate(pods) => {
                    for uid in pods {
                        let found = self.pods.iter().position(|pod| *pod.uid == *uid.as_str());
                        if let Some(at) = found {
                            self.pods[at].stage = Stage::Pending;
                            self.see(at);
                        }
                    }
                }
                Work::Evict { pods, .. } | Work::EvictRest { pods, .. } | Work::Delete { pods, .. } => {
                    for uid in pods {
                        let found = self.pods.iter().position(|pod| *pod.uid == *uid.as_str());
                        if let Some(at) = found {
                            self.delete(at);
                        }
                    }
                }
                Work::Forget { namespace, name } => {
                    if let Some(stored) = self.stored.get_mut(&*name) {
                        stored.exists = false;
                        stored.version += 1;
                        stored.status = GangStatus::default();
                    }
                    self.gangs.object_gone(self.now(), &namespace, &name);
                }
                Work::Wake(_) => {}
                Work::Bind(pods) => {
                    for uid in pods {
                        let node = self.place_of(&uid).expect("a place");
                        let at = self.pods.iter().position(|pod| *pod.uid == *uid.as_str());
                        let at = at.expect("a pod");
                        self.pods[at].sent = Some(node);
                        self.bind(at);
                    }
                }
            }
        }
        for change in self.gangs.take_slot_changes() {
            self.apply(&change);
        }
    }

    fn place_of(&self, uid: &PodUid) -> Option<NodeName> {
        let view = self.gangs.view(self.gangs.gang_of(uid)?)?;
        view.node_of(uid).cloned()
    }

    fn was_sent(&self, id: &str) -> bool {
        self.log.iter().any(|line| line == &format!("sent {id}"))
    }

    fn apply(&mut self, change: &SlotChange) {
        let id = (change.gang.clone(), change.slot);
        match &change.place {
            Some(place) => {
                let gpu = place.devices[0].1[0].to_string();
                self.reserved.insert(id, (place.node.clone(), gpu));
            }
            None => {
                self.reserved.remove(&id);
                self.room += u64::from(!change.bound);
            }
        }
    }

    /// What must hold at any time.
    fn check(&self) {
        let held = self.held();
        let mut gpus: BTreeMap<&str, &(Arc<GangKey>, u32)> = BTreeMap::new();
        for (id, (_, gpu)) in &self.reserved {
            let other = gpus.insert(gpu, id);
            assert_eq!(other, None, "GPU {gpu} is in two slots, one of them {id:?}");
        }
        for view in self.gangs.views() {
            let mut pods = BTreeSet::new();
            for slot in view.slots() {
                let Some(pod) = slot.pod else { continue };
                assert!(pods.insert(pod), "{pod} has two slots");
                let gpu = slot.devices[0].1[0].as_str();
                if let Some(holder) = held.get(gpu) {
                    let own = holder == pod.as_str();
                    let victim = view.phase() == GangPhase::Preempting
                        || self.pods.iter().any(|pod| pod.uid == *holder && pod.leaving);
                    assert!(own || victim, "{gpu} of {pod} is held by {holder}");
                }
            }
            let decided = view.is_decided();
            let bound_by_us = self
                .pods
                .iter()
                .any(|pod| pod.going.is_some() && pod.claim.key == **view.key());
            let restarting = view.phase() == GangPhase::Repairing || view.phase() == GangPhase::Done;
            assert!(
                decided || !bound_by_us || restarting,
                "{} goes, undecided",
                view.key()
            );
        }
        for (gang, _) in self.reserved.keys() {
            assert!(self.gangs.view(gang).is_some(), "{gang} is gone and has slots");
        }
    }

    /// From here on nothing fails, and every gang gets room in turn: gangs that have enough members must get bound.
    pub(super) fn settle(&mut self) {
        self.lost_nodes.clear();
        while let Some(at) = (0..self.pods.len()).find(|at| self.pods[*at].leaving || self.failed(*at)) {
            self.remove(at);
            self.collect();
        }
        for _ in 0..60 {
            for _ in 0..4 {
                self.room += 1;
                self.step(&Op::Plan {
                    room: true,
                    preempt: false,
                });
            }
            for at in 0..self.pods.len() {
                if at >= self.pods.len() {
                    break;
                }
                self.step(&Op::Filter {
                    pod: at,
                    offered: 0xff,
                });
                self.step(&Op::Bind(at));
            }
            while !self.commits.is_empty() {
                self.step(&Op::Commit(Write::Done));
            }
            for gang in 0..3 {
                self.step(&Op::Read(gang));
            }
            while !self.in_flight.is_empty() {
                self.step(&Op::Land(0));
            }
            for at in 0..self.pods.len() {
                self.step(&Op::Bind(at));
                self.step(&Op::EndBind {
                    pod: at,
                    end: End::Bound,
                });
            }
            self.step(&Op::Statuses);
            while let Some(at) = (0..self.pods.len()).find(|at| self.pods[*at].leaving) {
                self.step(&Op::Remove(at));
            }
            self.step(&Op::Pass(10));
        }
    }

    fn failed(&self, at: usize) -> bool {
        self.pods[at].stage == Stage::Failed
    }

    /// Gangs have what they need, or it is not there.
    pub(super) fn check_settled(&self) {
        for view in self.gangs.views() {
            let gang = GANGS.iter().position(|name| **name == *view.key().name).unwrap();
            let free = NODES * GPUS - self.held().len() - self.reserved.len();
            // Nobody here binds members that ask for no devices.
            let needs_none = view.phase() == GangPhase::Binding && !view.is_decided();
            let done = needs_none || matches!(view.phase(), GangPhase::Bound | GangPhase::Done);
            let short = view.exist() < self.mins[gang];
            let no_room = free < view.unplaced();
            assert!(
                done || short || no_room,
                "{} is stuck: {:?}, {} ({} of {}), {free} GPUs are free",
                view.key(),
                view.phase(),
                view.text(),
                view.settled(),
                view.min(),
            );
        }
    }

    /// All pods go, and time passes: nothing may be left.
    pub(super) fn clear(&mut self) {
        while !self.pods.is_empty() {
            self.remove(0);
            self.collect();
        }
        for _ in 0..40 {
            self.step(&Op::Pass(30));
        }
        assert_eq!(self.reserved, BTreeMap::new());
        self.gangs.assert_empty();
    }

    pub(super) fn compare(&mut self, other: &mut Self) {
        self.statuses();
        other.statuses();
        assert_eq!(self.log, other.log);
    }
}

fn object(stored: &Stored) -> Object {
    Object {
        uid: "object".into(),
        resource_version: stored.version.to_string().into(),
        ours: true,
        spec: Ok(gantry_api::GangSpec::default()),
        status: stored.status.clone(),
    }
}
