//! The real state machine beside the model: each step of the model is played to it as [`GangEvent`]s, and what it keeps and lets go is
//! compared with what the model's extenders know. Only steps that the code takes are followed: it commits as soon as the last member has
//! arrived, so a model state in which all have called is a gang that commits.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{Decision, GangPhase, GangStatus, NodeName, PodUid};
use gantry_gang::integrations::{self, PodView};
use gantry_gang::protocol::{
    Answer, Arrival, CommitFailure, GangEvent, Gangs, Member, Moment, Object, OfferedNodes, Placement,
    Refusal, Reply, Reservation, Settings, ShapeId, Stage, Work,
};
use gantry_gang::{GangKey, Integration};
use stateright::Model;

use crate::cluster::{
    Cluster, GANGS, MEMBERS, PODS, Protocol, Request, Slot, Slots, gang_of, member_of, pod_of,
};
use crate::events::Event;
use crate::extender::{Extender, Mind};

/// What the code does not do in this place.
struct NotTaken;

/// One extender's state machine, and which pods it has been shown: their UIDs.
#[derive(Clone)]
struct Process {
    gangs: Gangs,
    term: u8,
    capacity: u64,
    shown: [u8; PODS],
}

/// The state machines beside a state of the model.
#[derive(Clone)]
struct Replica {
    now: Moment,
    processes: [Option<Process>; 2],
    /// Decisions by what the model knows of them.
    sent: BTreeMap<(u8, u8, Slots), Decision>,
    written: [Option<Decision>; GANGS],
}

fn name(gang: usize) -> String {
    format!("g{gang}")
}

fn key(gang: usize) -> GangKey {
    GangKey {
        namespace: "default".into(),
        name: name(gang).into(),
        integration: Integration::Annotation,
        incarnation: "".into(),
    }
}

fn uid(pod: u8, uid: u8) -> PodUid {
    format!("p{pod}-{uid}").as_str().into()
}

fn node(device: u8) -> NodeName {
    format!("n{device}").as_str().into()
}

fn number(text: &str) -> u8 {
    text.rsplit(['n', '-']).next().unwrap().parse().unwrap()
}

fn devices(device: u8) -> gantry_gang::protocol::Devices {
    vec![("nvidia.com/gpu".into(), vec![format!("d{device}").as_str().into()])]
}

/// The places of a decision, if each has a pod.
fn slots(decision: &Decision) -> Option<Slots> {
    let mut slots = [None; MEMBERS];
    for reservation in &decision.reservations {
        let pod = reservation.pod.as_ref()?;
        slots[reservation.rank? as usize] =
            Some(Slot { device: number(reservation.node.as_str()), uid: number(pod.as_str()) });
    }
    Some([slots[0]?, slots[1]?])
}

/// A pod as the API server has it, or with its Job ended.
fn member(cluster: &Cluster, pod: u8, as_uid: u8) -> Member {
    let annotations: BTreeMap<String, String> =
        [("gantry.dev/gang", name(gang_of(pod))), ("gantry.dev/gang-min", MEMBERS.to_string())]
            .map(|(name, text)| (name.to_owned(), text))
            .into();
    let (name, uid) = (format!("{}-{}", name(gang_of(pod)), member_of(pod)), uid(pod, as_uid));
    let view = PodView {
        namespace: "default",
        name: &name,
        uid: uid.as_str(),
        annotations: Some(&annotations),
        ..PodView::default()
    };
    let mut membership = integrations::membership(&view).unwrap();
    membership.rank = u32::try_from(member_of(pod)).ok();
    let known = cluster.pods[usize::from(pod)];
    Member {
        uid: uid.clone(),
        name: name.as_str().into(),
        membership: Arc::new(membership),
        shape: Some(ShapeId(0)),
        asks: [("nvidia.com/gpu".into(), 1)].into(),
        priority: 0,
        created: 0,
        stage: match known.on {
            _ if known.ended => Stage::Succeeded,
            Some(device) => Stage::Bound(node(device)),
            None => Stage::Pending,
        },
        leaving: false,
        preempted: false,
        refused: false,
        rejected: None,
        elsewhere: None,
        preempts: true,
        holds: known.on.map(devices).unwrap_or_default(),
    }
}

impl Process {
    /// What the model lets happen to an extender reaches the real one here, and nowhere else.
    fn handle(
        &mut self,
        now: Moment,
        sent: &mut BTreeMap<(u8, u8, Slots), Decision>,
        event: GangEvent<'_>,
    ) -> Reply {
        let effects = self.gangs.handle(now, event);
        for work in effects.work {
            if let Work::Commit { gang, decision } = work {
                self.record(sent, &gang, &decision);
            }
        }
        effects.reply
    }

    fn record(&self, sent: &mut BTreeMap<(u8, u8, Slots), Decision>, gang: &GangKey, decision: &Decision) {
        if let Some(slots) = slots(decision) {
            let gang = gang.name[1..].parse().unwrap();
            sent.insert((self.term, gang, slots), decision.clone());
        }
    }

    fn is_committing(&self, gang: usize) -> bool {
        self.gangs.view(&key(gang)).is_some_and(|view| view.phase() == GangPhase::Committing)
    }
}

impl Replica {
    fn new() -> Self {
        Self {
            now: Moment { at: Instant::now(), unix: 1_000 },
            processes: [None, None],
            sent: BTreeMap::new(),
            written: [None, None],
        }
    }

    fn handle(&mut self, extender: u8, event: GangEvent<'_>) -> Reply {
        match &mut self.processes[usize::from(extender)] {
            Some(process) => process.handle(self.now, &mut self.sent, event),
            None => Reply::None,
        }
    }

    /// An extender is shown a pod as it is now. A new pod comes before the one that it replaces goes.
    fn show(&mut self, cluster: &Cluster, extender: u8, pod: u8) {
        let Some(process) = &mut self.processes[usize::from(extender)] else {
            return;
        };
        let known = cluster.pods[usize::from(pod)];
        let before = process.shown[usize::from(pod)];
        let now = if known.ended { before } else { known.uid };
        process.shown[usize::from(pod)] = now;
        self.handle(extender, GangEvent::MemberSeen(member(cluster, pod, now)));
        if before != now {
            self.handle(extender, GangEvent::MemberGone { pod: &uid(pod, before) });
        }
    }

    fn show_gang(&mut self, cluster: &Cluster, extender: u8, gang: usize) {
        (0..MEMBERS).for_each(|member| self.show(cluster, extender, pod_of(gang, member)));
    }

    fn show_object(&mut self, extender: u8, gang: usize) {
        let status = GangStatus {
            name: name(gang),
            integration: Integration::Annotation.as_str().to_owned(),
            decision: self.written[gang].clone(),
            ..GangStatus::default()
        };
        let object = Object {
            uid: "object".into(),
            resource_version: "1".into(),
            ours: true,
            spec: Ok(gantry_api::GangSpec::default()),
            status,
        };
        self.handle(
            extender,
            GangEvent::ObjectSeen { namespace: "default", name: &name(gang), object: Box::new(object) },
        );
    }

    /// The statuses of an extender, as they are written: one that names other members is a decision of the model.
    fn take_statuses(&mut self, extender: u8) {
        if let Some(process) = &mut self.processes[usize::from(extender)] {
            for (gang, status) in process.gangs.take_statuses() {
                if let Some(decision) = status.decision {
                    process.record(&mut self.sent, &gang, &decision);
                }
            }
        }
    }

    /// The extender that waits for the answer to a decision's write.
    fn sender(&self, before: &Cluster, request: Request) -> Option<u8> {
        let Request::Decide { term, gang, slots, doubt, .. } = request else {
            return None;
        };
        (0..2u8).find(|extender| match before.extenders[usize::from(*extender)] {
            Extender::Leader { term: own, minds } => {
                own == term && minds[usize::from(gang)] == Mind::Writing { slots, doubt }
            }
            _ => false,
        })
    }

    fn write_ended(&mut self, before: &Cluster, request: Request, result: Result<(), CommitFailure>) {
        let Request::Decide { term, gang, slots, .. } = request else {
            return;
        };
        let Some(extender) = self.sender(before, request) else {
            return;
        };
        let decision = self.sent[&(term, gang, slots)].clone();
        let at = usize::from(gang);
        let commits =
            self.processes[usize::from(extender)].as_ref().is_some_and(|process| process.is_committing(at));
        if commits {
            let key = key(at);
            self.handle(extender, GangEvent::Committed { gang: &key, decision: &decision.id, result });
        } else if result.is_ok() {
            // A status: the answer shows it.
            self.show_object(extender, at);
        }
    }

    /// Plays a step of the model.
    fn step(&mut self, before: &Cluster, event: Event, after: &Cluster) -> Result<(), NotTaken> {
        match event {
            Event::Acquire(extender) | Event::TakeLease(extender) => {
                let Extender::Leader { term, .. } = after.extenders[usize::from(extender)] else {
                    return Ok(());
                };
                let settings = Settings {
                    identity: format!("r{term}").into(),
                    settle: Duration::ZERO,
                    backoff: Duration::ZERO,
                    ..Settings::default()
                };
                let shown = after.pods.map(|pod| pod.uid);
                let process = Process { gangs: Gangs::new(settings), term, capacity: 0, shown };
                self.processes[usize::from(extender)] = Some(process);
                (0..GANGS).for_each(|gang| self.show_gang(after, extender, gang));
            }
            Event::StepDown(extender) | Event::Crash(extender) => {
                self.processes[usize::from(extender)] = None;
            }
            Event::ReadObject { extender, gang } => {
                let Extender::Leader { minds, .. } = after.extenders[usize::from(extender)] else {
                    self.processes[usize::from(extender)] = None;
                    return Ok(());
                };
                self.show_gang(after, extender, usize::from(gang));
                self.show_object(extender, usize::from(gang));
                if !minds.contains(&Mind::Unread) {
                    self.handle(extender, GangEvent::Synced);
                }
            }
            Event::Plan { extender, gang } => self.plan(after, extender, usize::from(gang)),
            Event::GiveUp { extender, gang } => {
                if self.is_committing(extender, gang) {
                    return Err(NotTaken);
                }
                let key = key(usize::from(gang));
                let slots =
                    self.view_slots(extender, usize::from(gang)).into_iter().map(|(id, ..)| id).collect();
                self.handle(extender, GangEvent::SlotsLost { gang: &key, slots: &slots });
            }
            Event::SeeCallEnd { extender, pod } => {
                let (gang, at) = (gang_of(pod) as u8, usize::from(pod));
                if self.is_committing(extender, gang) {
                    return Err(NotTaken);
                }
                let shown = self.processes[usize::from(extender)].as_ref().map(|process| process.shown[at]);
                // That a Job has ended it is shown with its object only.
                if shown == Some(after.pods[at].uid) || after.pods[at].ended {
                    let shown = shown.unwrap_or_default();
                    self.handle(extender, GangEvent::Disconnected { pod: &uid(pod, shown) });
                } else {
                    self.show(after, extender, pod);
                }
            }
            Event::CallBind { pod, extender } => return self.call(before, after, pod, extender),
            // Before everything is read, nothing is answered.
            Event::Filter { extender, .. } if before.extenders[usize::from(extender)].has_unread() => {
                return Err(NotTaken);
            }
            Event::Filter { pod, extender } => self.filter(after, pod, extender),
            Event::Forget { extender, gang } => self.show_gang(after, extender, usize::from(gang)),
            Event::Execute(request) => self.execute(before, after, request, true),
            Event::LoseAnswer(request) => self.execute(before, after, request, false),
            Event::LoseRequest(request) | Event::StopWaiting(request) => {
                self.write_ended(before, request, Err(CommitFailure::Unknown));
            }
            Event::Refuse(request) => {
                let refused = CommitFailure::Refused("forbidden".into());
                self.write_ended(before, request, Err(refused));
            }
            Event::Finish(gang) => self.written[usize::from(gang)] = None,
            // What happens in the world only.
            Event::TimeOut { .. }
            | Event::Start(_)
            | Event::RestartScheduler
            | Event::WriteObject(_)
            | Event::Delete(_)
            | Event::Commit { .. } => {}
        }
        Ok(())
    }

    fn is_committing(&self, extender: u8, gang: u8) -> bool {
        let process = self.processes[usize::from(extender)].as_ref();
        process.is_some_and(|process| process.is_committing(usize::from(gang)))
    }

    fn plan(&mut self, after: &Cluster, extender: u8, gang: usize) {
        let Extender::Leader { minds, .. } = after.extenders[usize::from(extender)] else {
            return;
        };
        let Mind::Planned { at, .. } = minds[gang] else {
            return;
        };
        let now = self.now;
        let Some(process) = &mut self.processes[usize::from(extender)] else {
            return;
        };
        process.capacity += 1;
        let capacity = process.capacity;
        while let Some(request) = self.processes[usize::from(extender)]
            .as_mut()
            .and_then(|process| process.gangs.next(now, capacity))
        {
            let is_it = *request.gang == key(gang);
            let places = request.members.iter().map(|member| {
                let device = at[member.rank.unwrap() as usize];
                Reservation {
                    shape: member.shape,
                    node: node(device),
                    devices: devices(device),
                    rank: member.rank,
                    role: member.role.clone(),
                    ordinal: None,
                    follows: false,
                }
            });
            let result = match is_it {
                true => Ok(Placement {
                    places: places.collect(),
                    domain: "cluster".into(),
                    ..Placement::default()
                }),
                false => Err(Refusal::DoesNotFit(Box::default())),
            };
            self.handle(extender, GangEvent::Planned { gang: &request.gang, result });
            if is_it {
                break;
            }
        }
    }

    /// Filter answers for pods that the extender knows, and names the model's node.
    fn filter(&mut self, after: &Cluster, pod: u8, extender: u8) {
        let current = after.pods[usize::from(pod)].uid;
        let shown =
            self.processes[usize::from(extender)].as_ref().map(|process| process.shown[usize::from(pod)]);
        if shown == Some(current) {
            let place = after.extenders[usize::from(extender)].answer(pod).unwrap();
            let all = |_: &NodeName| true;
            let answer = self
                .handle(extender, GangEvent::Filter { pod: &uid(pod, current), offered: OfferedNodes(&all) });
            assert_eq!(answer, Reply::Answer(Answer::Node(node(place))), "pod {pod}");
        }
    }

    fn call(&mut self, before: &Cluster, after: &Cluster, pod: u8, extender: u8) -> Result<(), NotTaken> {
        let (gang, at) = (gang_of(pod), usize::from(pod));
        let (Extender::Leader { minds: then, .. }, crate::cluster::Call::Chosen(device)) =
            (before.extenders[usize::from(extender)], before.calls[at])
        else {
            return Ok(());
        };
        let current = after.pods[at].uid;
        let shown = self.processes[usize::from(extender)].as_ref().map(|process| process.shown[at]);
        if shown != Some(current) {
            if matches!(then[gang], Mind::Unread | Mind::Unknown { .. } | Mind::Writing { .. })
                || self.is_committing(extender, gang as u8)
            {
                return Err(NotTaken);
            }
            self.show(after, extender, pod);
        }
        let reply = self.handle(extender, GangEvent::Arrive { pod: &uid(pod, current), node: &node(device) });
        self.take_statuses(extender);
        let Extender::Leader { minds: now, .. } = after.extenders[usize::from(extender)] else {
            return Ok(());
        };
        let waits = reply == Reply::Arrival(Arrival::Wait);
        let goes = matches!(reply, Reply::Arrival(Arrival::Go(_)));
        if before.extenders[usize::from(extender)].has_unread() {
            assert!(!waits && !goes, "{reply:?} to the call for pod {pod} before everything is read");
            return Err(NotTaken);
        }
        let is_as_modelled = match now[gang] {
            Mind::Planned { called, at, .. } => {
                waits == (called[member_of(pod)] == Some(current) && at[member_of(pod)] == device) && !goes
            }
            // A place that is written already does not wait for a sibling's.
            Mind::Writing { .. } | Mind::Unknown { .. } if goes => {
                let written = self.written[gang].as_ref().and_then(slots);
                written.is_some_and(|slots| slots[member_of(pod)] == Slot { device, uid: current })
            }
            Mind::Writing { .. } | Mind::Unknown { .. } => {
                waits == (after.calls[at] == crate::cluster::Call::Open { extender })
            }
            Mind::Decided { slots, .. } => goes == (slots[member_of(pod)] == Slot { device, uid: current }),
            Mind::Unread | Mind::Waiting { .. } | Mind::Over => !goes && !waits,
        };
        assert!(is_as_modelled, "{reply:?} to the call for pod {pod}, {:?}", now[gang]);
        Ok(())
    }

    fn execute(&mut self, before: &Cluster, after: &Cluster, request: Request, answered: bool) {
        match request {
            Request::Decide { term, gang, newest, slots, .. } => {
                let decision = self.sent.get(&(term, gang, slots)).cloned();
                assert!(decision.is_some(), "the code has not sent {request:?}");
                if newest {
                    self.written[usize::from(gang)] = decision;
                }
                self.write_ended(
                    before,
                    request,
                    match (answered, newest) {
                        (false, _) => Err(CommitFailure::Unknown),
                        (true, false) => Err(CommitFailure::Conflict),
                        (true, true) => Ok(()),
                    },
                );
            }
            Request::Bind { pod, uid, .. } => {
                for extender in 0..2u8 {
                    let Extender::Leader { minds, .. } = after.extenders[usize::from(extender)] else {
                        continue;
                    };
                    let shown = self.processes[usize::from(extender)]
                        .as_ref()
                        .map(|process| process.shown[usize::from(pod)]);
                    let decided = matches!(minds[gang_of(pod)], Mind::Decided { .. });
                    if decided && shown == Some(uid) && after.pods[usize::from(pod)].uid == uid {
                        self.show(after, extender, pod);
                    }
                }
            }
        }
    }

    /// The slots of a gang: number, device, pod.
    fn view_slots(&self, extender: u8, gang: usize) -> Vec<(u32, u8, Option<PodUid>)> {
        let process = self.processes[usize::from(extender)].as_ref();
        let view = process.and_then(|process| process.gangs.view(&key(gang)));
        let slots = view.iter().flat_map(|view| view.slots());
        slots.map(|slot| (slot.slot, number(slot.node.as_str()), slot.pod.cloned())).collect()
    }

    /// Compares what each leader knows.
    fn compare(&self, cluster: &Cluster) -> Result<(), String> {
        for extender in 0..2u8 {
            let Extender::Leader { minds, .. } = cluster.extenders[usize::from(extender)] else {
                continue;
            };
            let Some(process) = &self.processes[usize::from(extender)] else {
                return Err(format!("extender {extender} leads in the model only"));
            };
            for (gang, mind) in minds.into_iter().enumerate() {
                let key = key(gang);
                let decided = process.gangs.view(&key).is_some_and(|view| view.is_decided());
                let mut kept: Vec<u8> =
                    self.view_slots(extender, gang).into_iter().map(|(_, device, _)| device).collect();
                kept.sort_unstable();
                let of = |slots: Slots| {
                    let mut devices = slots.map(|slot| slot.device);
                    devices.sort_unstable();
                    devices.to_vec()
                };
                let (expected, is_decided) = match mind {
                    // Before everything is read, it takes over nothing.
                    _ if minds.contains(&Mind::Unread) => continue,
                    Mind::Unread => continue,
                    Mind::Waiting { .. } => (Vec::new(), Some(false)),
                    Mind::Over => (Vec::new(), None),
                    Mind::Planned { mut at, .. } => {
                        at.sort_unstable();
                        (at.to_vec(), Some(false))
                    }
                    // The first decision, or a later one.
                    Mind::Writing { slots, .. } | Mind::Unknown { slots, .. } => (of(slots), None),
                    Mind::Decided { slots, .. } => {
                        self.check_goes(cluster, process, gang, slots)?;
                        (of(slots), Some(true))
                    }
                };
                if kept != expected || is_decided.is_some_and(|expected| expected != decided) {
                    return Err(format!(
                        "extender {extender} has {mind:?} of gang {gang} in the model; it keeps {kept:?}, decided: {decided}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// The members of a decision may be bound, and no others.
    fn check_goes(
        &self,
        cluster: &Cluster,
        process: &Process,
        gang: usize,
        slots: Slots,
    ) -> Result<(), String> {
        for (at, slot) in slots.into_iter().enumerate() {
            let pod = pod_of(gang, at);
            let shown = process.shown[usize::from(pod)];
            if cluster.pods[usize::from(pod)].ended {
                continue;
            }
            let (mut process, mut sent) = (process.clone(), BTreeMap::new());
            let event = GangEvent::Arrive { pod: &uid(pod, shown), node: &node(slot.device) };
            let reply = process.handle(self.now, &mut sent, event);
            if matches!(reply, Reply::Arrival(Arrival::Go(_))) != (shown == slot.uid) {
                return Err(format!("pod {pod} of UID {shown} gets {reply:?} where {slot:?} is decided"));
            }
        }
        Ok(())
    }
}

/// Plays every step from every state that the code reaches. Returns the number of steps.
pub(crate) fn check(protocol: &Protocol) -> Result<usize, String> {
    let first = protocol.init_states().remove(0);
    let mut known: HashSet<Cluster> = [first.clone()].into();
    let mut open: VecDeque<(Cluster, Replica, Vec<Event>)> = [(first, Replica::new(), Vec::new())].into();
    let (mut steps, mut events) = (0, Vec::new());
    while let Some((state, replica, way)) = open.pop_front() {
        events.clear();
        protocol.actions(&state, &mut events);
        for event in &events {
            let Some(next) = protocol.next_state(&state, *event) else {
                continue;
            };
            let mut beside = replica.clone();
            if beside.step(&state, *event, &next).is_err() {
                continue;
            }
            steps += 1;
            let mut way = way.clone();
            way.push(*event);
            beside.compare(&next).map_err(|wrong| format!("{wrong}\nafter {way:?}"))?;
            if known.insert(next.clone()) {
                open.push_back((next, beside, way));
            }
        }
    }
    Ok(steps)
}
