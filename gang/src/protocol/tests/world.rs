//! What specifications of gangs are told with: a clock, pods by short names, places.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{Decision, GangPhase, GangStatus, NodeName, PodUid, Reason};

use crate::key::{GangKey, Integration};
use crate::membership::{GangOptions, Membership, OwnerFacts, OwnerKind, OwnerRef, Size};
use crate::protocol::{
    Answer, Arrival, Asks, Effects, GangEvent, Gangs, Member, MemberGroup, Moment, Object, OfferedNodes,
    Placement, PlanRequest, Refusal, Reply, Reservation, Settings, ShapeId, Shortage, SlotChange, Stage,
    Work,
};
use crate::terms::Repair;

/// The machine and what surrounds it.
pub(crate) struct World {
    pub(crate) gangs: Gangs,
    pub(crate) start: Instant,
    pub(crate) passed: Duration,
    pub(crate) room: u64,
    pub(crate) changes: Vec<SlotChange>,
    effects: Effects,
}

pub(crate) fn key(name: &str) -> GangKey {
    GangKey {
        namespace: "default".into(),
        name: name.into(),
        integration: Integration::Annotation,
        incarnation: "".into(),
    }
}

pub(crate) fn membership(gang: &str, min: u32) -> Membership {
    Membership {
        key: key(gang),
        size: Size::Stated { min, total: None },
        size_source: "annotation gantry.dev/gang-min",
        owner: None,
        rank: None,
        role: "".into(),
        options: GangOptions::default(),
        creator: None,
        revision: None,
        also: Vec::new(),
        maker: None,
        made_by: None,
        tree: Vec::new(),
        faults: Vec::new(),
    }
}

/// The PodGroup of the coscheduling plugin that names gang a.
pub(crate) fn pod_group() -> OwnerRef {
    OwnerRef {
        kind: OwnerKind::CoschedulingPodGroup,
        namespace: "default".into(),
        name: "a".into(),
        part: "".into(),
    }
}

/// What a pod says that names [`pod_group`].
pub(crate) fn in_pod_group() -> Membership {
    Membership { size: Size::Undeclared, size_source: "", owner: Some(pod_group()), ..membership("a", 1) }
}

/// What a PodGroup says that wants so many members.
pub(crate) fn wants(min: u32) -> OwnerFacts {
    OwnerFacts { min: Some(min), source: "minMember".into(), ..OwnerFacts::default() }
}

/// The same, of roles.
pub(crate) fn wants_roles(roles: &[(&str, u32)]) -> OwnerFacts {
    OwnerFacts {
        by_role: roles.iter().map(|(role, min)| ((*role).into(), *min)).collect(),
        ..wants(roles.iter().map(|(_, min)| min).sum())
    }
}

/// What a pod of a role says that names [`pod_group`].
pub(crate) fn in_role(role: &str) -> Membership {
    Membership { role: role.into(), ..in_pod_group() }
}

pub(crate) fn asks() -> Asks {
    [("nvidia.com/gpu".into(), 1)].into()
}

/// A pending pod of one GPU.
pub(crate) fn member(uid: &str, membership: Membership) -> Member {
    Member {
        uid: uid.into(),
        name: uid.into(),
        membership: Arc::new(membership),
        shape: Some(ShapeId(0)),
        asks: asks(),
        holds: Vec::new(),
        priority: 0,
        created: 0,
        stage: Stage::Pending,
        leaving: false,
        preempted: false,
        refused: true,
        rejected: None,
        elsewhere: None,
        preempts: true,
    }
}

pub(crate) fn bound(mut member: Member, node: &str) -> Member {
    member.stage = Stage::Bound(node.into());
    member
}

pub(crate) fn leaving(mut member: Member) -> Member {
    member.leaving = true;
    member
}

/// A place of one GPU, which no other place has if its name differs.
/// The object of a gang by annotation goes.
pub(crate) fn forget(name: &str) -> Work {
    Work::DeleteObject { namespace: "default".into(), name: name.into() }
}

pub(crate) fn place(node: &str, gpu: &str) -> Reservation {
    Reservation {
        shape: ShapeId(0),
        node: node.into(),
        devices: vec![("nvidia.com/gpu".into(), vec![gpu.into()])],
        rank: None,
        role: "".into(),
        ordinal: None,
        follows: false,
    }
}

pub(crate) fn refused() -> Refusal {
    Refusal::DoesNotFit(Box::new(shortage()))
}

/// Three members of one GPU.
fn shortage() -> Shortage {
    let members = vec![MemberGroup { count: 3, requests: vec![("GPUs".into(), 1)] }];
    Shortage { members, must: 3, ..Shortage::default() }
}

pub(crate) fn hopeless() -> Refusal {
    Refusal::DoesNotFit(Box::new(Shortage { hopeless: true, ..shortage() }))
}

impl World {
    pub(crate) fn with(settings: Settings) -> Self {
        Self {
            gangs: Gangs::new(settings),
            start: Instant::now(),
            passed: Duration::ZERO,
            room: 1,
            changes: Vec::new(),
            effects: Effects::default(),
        }
    }

    /// Ready to decide.
    pub(crate) fn new() -> Self {
        let mut world = Self::with(Settings::default());
        world.handle(GangEvent::Synced);
        world
    }

    pub(crate) fn now(&self) -> Moment {
        Moment { at: self.start + self.passed, unix: 1_000 + i64::try_from(self.passed.as_secs()).unwrap() }
    }

    pub(crate) fn handle(&mut self, event: GangEvent<'_>) -> Reply {
        let effects = self.gangs.handle(self.now(), event);
        self.effects.extend(effects)
    }

    /// [`pod_group`] is read.
    pub(crate) fn group_says(&mut self, facts: OwnerFacts) {
        self.handle(GangEvent::OwnerSeen { owner: &pod_group(), facts: Some(Arc::new(facts)) });
    }

    /// Time passes in steps, each looked at.
    pub(crate) fn pass(&mut self, seconds: u64) {
        let end = self.passed + Duration::from_secs(seconds);
        while let Some(due) = self.gangs.next_due() {
            let due = due.saturating_duration_since(self.start);
            if due > end {
                break;
            }
            self.passed = due.max(self.passed);
            self.handle(GangEvent::Tick);
        }
        self.passed = end;
        self.handle(GangEvent::Tick);
    }

    pub(crate) fn see(&mut self, member: Member) {
        self.handle(GangEvent::MemberSeen(member));
    }

    /// Members `a0`, `a1`, ... of gang `a` that needs `min` of them.
    pub(crate) fn members(&mut self, gang: &str, count: u32, min: u32) {
        for number in 0..count {
            self.see(member(&format!("{gang}{number}"), membership(gang, min)));
        }
    }

    pub(crate) fn gone(&mut self, uid: &str) {
        self.handle(GangEvent::MemberGone { pod: &uid.into() });
    }

    pub(crate) fn next(&mut self) -> Option<PlanRequest> {
        self.gangs.next(self.now(), self.room)
    }

    /// Plans the next gang: member i on node `n<i>`, from `first` on, GPU `<gang>-g<i>`.
    pub(crate) fn plan(&mut self) -> PlanRequest {
        self.plan_from(0)
    }

    pub(crate) fn plan_from(&mut self, first: usize) -> PlanRequest {
        let wanted = self.next().expect("a gang wants a plan");
        let places = wanted.members.iter().enumerate().map(|(at, member)| {
            let at = at + first;
            Reservation {
                shape: member.shape,
                rank: member.rank,
                role: member.role.clone(),
                ..place(&format!("n{at}"), &format!("{}-g{at}", wanted.gang.name))
            }
        });
        let placement =
            Placement { places: places.collect(), domain: "rack r7".into(), ..Placement::default() };
        self.handle(GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
        wanted
    }

    pub(crate) fn refuse(&mut self) -> PlanRequest {
        let wanted = self.next().expect("a gang wants a plan");
        self.handle(GangEvent::Planned { gang: &wanted.gang, result: Err(refused()) });
        wanted
    }

    pub(crate) fn answer(&mut self, uid: &str) -> Answer {
        answer(self.handle(GangEvent::Filter { pod: &uid.into(), offered: OfferedNodes(&|_| true) }))
    }

    pub(crate) fn answer_within(&mut self, uid: &str, nodes: &[&str]) -> Answer {
        let offered = |node: &NodeName| nodes.contains(&node.as_str());
        answer(self.handle(GangEvent::Filter { pod: &uid.into(), offered: OfferedNodes(&offered) }))
    }

    /// Why a member waits.
    pub(crate) fn waits(&mut self, uid: &str) -> Reason {
        match self.answer(uid) {
            Answer::Wait(why) => why.reason,
            other => panic!("{uid} does not wait: {other:?}"),
        }
    }

    /// The node that a member is sent to.
    pub(crate) fn node(&mut self, uid: &str) -> String {
        match self.answer(uid) {
            Answer::Node(node) => node.to_string(),
            other => panic!("{uid} has no node: {other:?}"),
        }
    }

    /// A member asks filter, and comes to bind with the answer.
    pub(crate) fn come(&mut self, uid: &str) -> Arrival {
        let node = self.node(uid);
        self.arrive(uid, &node)
    }

    pub(crate) fn arrive(&mut self, uid: &str, node: &str) -> Arrival {
        arrival(self.handle(GangEvent::Arrive { pod: &uid.into(), node: &node.into() }))
    }

    pub(crate) fn come_all(&mut self, gang: &str, count: u32) {
        for number in 0..count {
            self.come(&format!("{gang}{number}"));
        }
    }

    /// The decision that is to be written now.
    pub(crate) fn commit(&mut self) -> (Arc<GangKey>, Decision) {
        let work = self.take_work();
        let commits: Vec<_> = work
            .iter()
            .filter_map(|work| match work {
                Work::Commit { gang, decision } => Some((gang.clone(), decision.clone())),
                _ => None,
            })
            .collect();
        assert_eq!(commits.len(), 1, "{work:?}");
        commits.into_iter().next().unwrap()
    }

    /// Writes the decision that is to be written.
    pub(crate) fn write(&mut self) -> Decision {
        let (gang, decision) = self.commit();
        self.handle(GangEvent::Committed { gang: &gang, decision: &decision.id, result: Ok(()) });
        decision
    }

    /// Writes what is to be said of gangs into their objects, as the watch shows them.
    pub(crate) fn write_down(&mut self) {
        for (gang, status) in self.gangs.take_statuses() {
            self.show(&gang.name, status);
        }
    }

    /// Binds a member where its place is, as the watch shows it. A place that it was given after the decision is written down first.
    pub(crate) fn bind(&mut self, uid: &str) -> String {
        let mut come = self.come(uid);
        if come == Arrival::Wait {
            self.write_down();
            come = self.come(uid);
        }
        let Arrival::Go(placed) = come else {
            panic!("{uid} may not go");
        };
        self.handle(GangEvent::BindEnded { pod: &uid.into(), outcome: crate::protocol::BindEnd::Bound });
        let membership = self.gangs.membership_of(&uid.into());
        let mut seen = bound(member(uid, membership), placed.node.as_str());
        seen.holds = placed.devices;
        self.see(seen);
        placed.node.to_string()
    }

    /// A gang of `count` members, of which `min` are needed, all bound; member `a<i>` on node `n<i>`.
    pub(crate) fn bound_gang(&mut self, gang: &str, count: u32, min: u32) {
        self.bound_gang_of(gang, count, &membership(gang, min));
    }

    pub(crate) fn bound_gang_of(&mut self, gang: &str, count: u32, membership: &Membership) {
        for number in 0..count {
            self.see(member(&format!("{gang}{number}"), membership.clone()));
        }
        self.plan();
        self.come_all(gang, count);
        self.write();
        for number in 0..count {
            self.bind(&format!("{gang}{number}"));
        }
        assert_eq!(self.phase(gang), GangPhase::Bound);
        self.take_work();
        self.take_changes();
    }

    pub(crate) fn phase(&self, gang: &str) -> GangPhase {
        self.gangs.view(&key(gang)).expect("a gang").phase()
    }

    /// The message of its pods that wait.
    pub(crate) fn text(&self, gang: &str) -> String {
        self.gangs.view(&key(gang)).expect("a gang").waits().message.to_string()
    }

    /// Why its pods wait.
    pub(crate) fn reason(&self, gang: &str) -> Reason {
        self.gangs.view(&key(gang)).expect("a gang").waits().reason
    }

    pub(crate) fn status(&mut self, gang: &str) -> GangStatus {
        let statuses = self.gangs.take_statuses();
        let found = statuses.into_iter().find(|(of, _)| *of.name == *gang);
        found.expect("a status").1
    }

    pub(crate) fn take_work(&mut self) -> Vec<Work> {
        std::mem::take(&mut self.effects.work)
    }

    pub(crate) fn woken(&mut self) -> Vec<String> {
        let work = self.take_work();
        let woken = work.into_iter().filter_map(|work| match work {
            Work::Activate(pods) => Some(pods),
            _ => None,
        });
        woken.flatten().map(|uid| uid.to_string()).collect()
    }

    pub(crate) fn take_changes(&mut self) -> Vec<SlotChange> {
        let changes = std::mem::take(&mut self.effects.slot_changes);
        self.changes.extend(changes.iter().cloned());
        changes
    }

    /// What is reserved now by all that was ever said: GPUs.
    pub(crate) fn reserved(&mut self) -> Vec<String> {
        self.take_changes();
        let mut reserved = std::collections::BTreeMap::new();
        for change in &self.changes {
            let id = (change.gang.clone(), change.slot);
            match &change.place {
                Some(place) => reserved.insert(id, place.devices[0].1[0].to_string()),
                None => reserved.remove(&id),
            };
        }
        let mut gpus: Vec<String> = reserved.into_values().collect();
        gpus.sort();
        gpus
    }

    /// An object that shows a status.
    pub(crate) fn object(&self, status: GangStatus) -> Object {
        Object {
            uid: "object".into(),
            resource_version: "1".into(),
            ours: true,
            spec: Ok(gantry_api::GangSpec::default()),
            status,
        }
    }

    pub(crate) fn show(&mut self, gang: &str, status: GangStatus) {
        let object = self.object(status);
        let name = key(gang).object_name();
        self.handle(GangEvent::ObjectSeen { namespace: "default", name: &name, object: Box::new(object) });
    }
}

pub(crate) fn arrival(reply: Reply) -> Arrival {
    match reply {
        Reply::Arrival(arrival) => arrival,
        other => panic!("no arrival: {other:?}"),
    }
}

pub(crate) fn answer(reply: Reply) -> Answer {
    match reply {
        Reply::Answer(answer) => answer,
        other => panic!("no answer: {other:?}"),
    }
}

pub(crate) fn released(reply: Reply) -> u32 {
    match reply {
        Reply::Released(count) => count,
        other => panic!("nothing is released: {other:?}"),
    }
}

pub(crate) fn uid(uid: &str) -> PodUid {
    uid.into()
}

pub(crate) fn with_repair(mut membership: Membership, repair: Repair) -> Membership {
    membership.options.repair = Some(repair);
    membership
}

pub(crate) fn with_rank(mut membership: Membership, rank: u32) -> Membership {
    membership.rank = Some(rank);
    membership
}
