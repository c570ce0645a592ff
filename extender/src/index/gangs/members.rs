//! Facts for the state machine of gangs: pods as members, owners, Gang objects. What is known of pods is kept elsewhere; here is how it is
//! told.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{Decision, Grant, PodUid, ResourceName};
use gantry_gang::protocol::{
    Asks, BindEnd, Devices, GangEvent, Member, Object, ShapeId, Stage, WatchedOwner,
};
use gantry_gang::{GangKey, Membership, OwnerFacts, OwnerRef};

use super::GangIndex;
use crate::index::{Index, Source};
use crate::pod::{OtherPod, PodFacts};
use gantry_planner::request::{Ask, Request};

/// How long a pod that only kube-scheduler has reported counts as existing. The watch shows it in milliseconds, or never.
const REPORTED_FOR: Duration = Duration::from_secs(15);

/// The source of a pod's node where no scheduler bound it.
const NODE_NAME: &str = "spec.nodeName";

/// Time for which a deleted pod is remembered: a call of kube-scheduler about it may still arrive, because its
/// own watch may be behind ours.
const DEPARTED: Duration = Duration::from_secs(60);

/// A pod that the watch has not shown.
#[derive(Debug)]
pub(super) struct ReportedPod {
    pub(super) pod: Arc<PodFacts>,
    until: Instant,
}

impl GangIndex {
    /// Whether a pod that only kube-scheduler has reported asks for a resource.
    pub(in crate::index) fn ask_for(&self, resource: &ResourceName) -> bool {
        let mut reported = self.reported.values();
        reported.any(|reported| reported.pod.devices(resource.as_str()) > 0)
    }
}

impl Index {
    /// A pod that is known from a call of kube-scheduler only: the watch may be behind. It counts for its gang until the watch shows it, but
    /// not for long.
    pub fn hear(&mut self, mut pod: PodFacts) {
        let known = self.pods.contains(&pod.uid) || self.gangs.departed.contains_key(&pod.uid);
        if known || pod.membership.is_none() || !self.gangs.leading {
            return;
        }
        // Without this it would have another shape than equal pods that the watch has shown.
        self.complete_needs(&mut pod);
        let reported = ReportedPod { until: self.now.at + REPORTED_FOR, pod: Arc::new(pod) };
        self.tell_pod(&Arc::clone(&reported.pod));
        self.gangs.reported.insert(reported.pod.uid.clone(), reported);
    }

    /// A pod that lost its gang's annotation and is bound or being bound still belongs to that gang: other members run
    /// with it.
    pub(in crate::index) fn keep_membership(&self, uid: &PodUid, membership: &mut Option<Arc<Membership>>) {
        if membership.is_none() {
            *membership = self.gangs.core.bound_membership(uid).cloned();
        }
    }

    /// The watch shows the deletion of a pod. A later call does not bring it back: devices would be reserved and pods evicted for it.
    pub(in crate::index) fn depart(&mut self, uid: &PodUid) {
        let claims = self.pods.get(uid).is_some_and(|pod| pod.membership.is_some());
        if claims || self.gangs.told.contains(uid) {
            self.gangs.departed.insert(uid.clone(), self.now.at);
        }
    }

    /// Members that binds found deleted before `since` and that the watch still shows.
    pub(in crate::index) fn gone_before(&self, since: Instant) -> impl Iterator<Item = PodUid> {
        let found = self.gangs.found_gone.iter();
        found.filter(move |(_, at)| **at < since).map(|(uid, _)| uid.clone())
    }

    /// A pod that filter was called about and that the watch has not shown.
    pub(super) fn heard(&self, uid: &str) -> Option<&Arc<PodFacts>> {
        self.gangs.reported.get(uid).map(|reported| &reported.pod)
    }

    /// An owner that defines the size of a gang; `None` if there is none of the name.
    pub fn owner_seen(&mut self, owner: &OwnerRef, facts: Option<Arc<OwnerFacts>>) {
        if self.gangs.owners.insert(owner.clone(), facts.clone()).is_none() {
            // From here on its gangs may be victims.
            self.gangs.unprotected();
        }
        if self.gangs.leading {
            self.gangs.handle(self.now, GangEvent::OwnerSeen { owner, facts });
        }
    }

    /// The owners that define the sizes of gangs: those to watch.
    pub fn watched_owners(&self) -> Vec<WatchedOwner> {
        self.gangs.core.watched_owners()
    }

    /// A Gang object was seen.
    pub fn gang_object_seen(&mut self, namespace: &str, name: &str, object: Object) {
        self.lists.observe(Source::Gangs, &format!("{namespace}/{name}"));
        if self.gangs.leading {
            self.gangs.handle(
                self.now,
                GangEvent::ObjectSeen { namespace, name, object: Box::new(object.clone()) },
            );
        }
        let at: (Arc<str>, Arc<str>) = (namespace.into(), name.into());
        let before = self.gangs.objects.get(&at);
        if object.status.decision.as_ref() != before.and_then(|before| before.status.decision.as_ref()) {
            // A member waits until its reservation is written.
            let written = GangKey::of_status(&at.0, &object.status);
            self.gangs.moved.extend(written.map(Arc::new));
        }
        self.gangs.objects.insert(at, object);
    }

    /// A Gang object was deleted.
    pub fn gang_object_gone(&mut self, namespace: &str, name: &str) {
        let key = (Arc::from(namespace), Arc::from(name));
        self.gangs.objects.remove(&key);
        // Also for an object that was not known: a waiting bind needs the event.
        if self.gangs.leading {
            self.gangs.handle(self.now, GangEvent::ObjectGone { namespace, name });
        }
    }

    /// A list of Gang objects is complete.
    pub(in crate::index) fn gangs_listed(&mut self, seen: &HashSet<Arc<str>>) {
        let gone: Vec<(Arc<str>, Arc<str>)> = self
            .gangs
            .objects
            .keys()
            .filter(|(namespace, name)| !seen.contains(&*format!("{namespace}/{name}")))
            .cloned()
            .collect();
        for (namespace, name) in gone {
            self.gang_object_gone(&namespace, &name);
        }
    }

    /// A list of all pods is complete: members that it does not contain are deleted.
    pub(in crate::index) fn members_listed(&mut self, seen: &HashSet<Arc<str>>) {
        let gone: Vec<PodUid> = self
            .gangs
            .told
            .iter()
            .filter(|uid| !seen.contains(uid.as_str()) && !self.gangs.reported.contains_key(*uid))
            .cloned()
            .collect();
        for uid in gone {
            self.tell_gone(&uid);
        }
        self.gangs.seen_waiting.retain(|uid| seen.contains(uid.as_str()));
    }

    /// A pod is on its node from now on.
    pub(in crate::index) fn pod_came(&mut self, pod: &PodFacts) {
        if pod.is_live() && !pod.leaving {
            self.gangs.reclaim.candidate_came(pod.priority);
        }
    }

    /// A pod as the state machine sees it.
    pub(in crate::index) fn tell_pod(&mut self, pod: &PodFacts) {
        self.gangs.reported.remove(&pod.uid);
        self.tell_ends(&pod.uid, pod.ends);
        let Some(membership) = &pod.membership else {
            self.tell_single(&pod.uid, pod.terminal);
            return;
        };
        // Its request cannot be read: filter refuses it on every node, and its gang waits for a readable member.
        let Ok(request) = &pod.request else {
            self.tell_single(&pod.uid, pod.terminal);
            return;
        };
        let managed = request.of(&self.nodes.resources().managed());
        let asks: Asks = managed.asks.iter().map(|ask| (ask.resource.clone(), ask.devices)).collect();
        let shape = (!managed.is_empty()).then(|| self.shape(request, pod));
        let grant = grant_of(pod);
        let elsewhere = match &pod.node {
            Some(_) if grant.is_some() || self.is_known_member(pod, membership) => None,
            // It was created with a node, as far as this process knows.
            Some(_) => Some(self.schedulers.unknown_scheduler_of(pod).unwrap_or_else(|| NODE_NAME.into())),
            None => self.schedulers.unknown_scheduler_of(pod),
        };
        self.tell(Member {
            uid: pod.uid.clone(),
            name: Arc::clone(&pod.name),
            membership: Arc::clone(membership),
            shape,
            asks,
            holds: granted(grant.as_ref(), &managed),
            priority: pod.priority,
            preempts: pod.preempts,
            created: pod.created(),
            stage: pod.stage.clone(),
            leaving: pod.leaving,
            preempted: pod.preempted,
            refused: pod.refused,
            rejected: pod.rejected.clone(),
            elsewhere,
        });
        if let Some(said) = pod.said.as_ref().filter(|_| self.gangs.leading) {
            self.gangs.handle(self.now, GangEvent::SchedulerMessage { pod: &pod.uid, message: said });
        }
    }

    /// Whether a pod that is bound without a grant waited for a scheduler before, as this process or an earlier one knows.
    fn is_known_member(&self, pod: &PodFacts, membership: &Membership) -> bool {
        self.gangs.seen_waiting.contains(&pod.uid) || self.is_named(pod, membership)
    }

    /// Whether the object of a decided gang shows the reservation of a member. True for any other pod.
    pub(in crate::index) fn is_written(&self, uid: &PodUid) -> bool {
        let gang = self.gangs.core.goes_with(uid).and_then(|gang| self.gangs.core.view(gang));
        gang.is_none_or(|gang| gang.is_written(uid))
    }

    /// Records that a pod waits to be scheduled.
    pub(in crate::index) fn note_waiting(&mut self, pod: &PodFacts) {
        let waits = pod.node.is_none() && pod.membership.is_some();
        if waits && self.schedulers.unknown_scheduler_of(pod).is_none() {
            self.gangs.seen_waiting.insert(pod.uid.clone());
        }
    }

    /// Whether the object of a pod's gang names it as a member that is bound: in its decision, or as one without a reservation.
    fn is_named(&self, pod: &PodFacts, membership: &Membership) -> bool {
        let key = &membership.key;
        let object = self.gangs.objects.get(&(Arc::clone(&key.namespace), key.object_name().into()));
        let Some(status) = object.map(|object| &object.status) else {
            return false;
        };
        let mut named = status.decision.iter().flat_map(Decision::pods).chain(&status.unreserved);
        named.any(|uid| *uid == pod.uid)
    }

    /// Reports bound pods without a grant again: the decision that names them may have been read after them.
    fn tell_ungranted(&mut self) {
        let ungranted =
            |pod: &&Arc<PodFacts>| pod.membership.is_some() && pod.node.is_some() && grant_of(pod).is_none();
        let pods: Vec<Arc<PodFacts>> = self.pods.iter().filter(ungranted).cloned().collect();
        for pod in pods {
            self.tell_pod(&pod);
        }
    }

    /// A pod that requests no devices, as the state machine sees it.
    pub(in crate::index) fn tell_other_pod(&mut self, pod: &OtherPod) {
        self.tell_ends(&pod.uid, pod.ends);
        let Some(membership) = &pod.membership else {
            let ended = matches!(pod.stage, Stage::Succeeded | Stage::Failed);
            self.tell_single(&pod.uid, ended);
            return;
        };
        self.tell(Member {
            uid: pod.uid.clone(),
            name: Arc::clone(&pod.name),
            membership: Arc::clone(membership),
            shape: None,
            asks: Asks::default(),
            holds: Devices::new(),
            priority: pod.priority,
            preempts: pod.preempts,
            created: pod.created,
            stage: pod.stage.clone(),
            leaving: pod.leaving,
            preempted: false,
            refused: false,
            rejected: None,
            // It counts from its creation, whichever scheduler binds it.
            elsewhere: None,
        });
    }

    /// A pod is being deleted. Reported for any pod: a gang may wait for its end.
    fn tell_ends(&mut self, uid: &PodUid, ends: Option<i64>) {
        if let Some(ends) = ends.filter(|_| self.gangs.leading) {
            self.gangs.handle(self.now, GangEvent::VictimTerminating { pod: uid, by: ends });
        }
    }

    /// A pod is gone.
    pub(in crate::index) fn tell_gone(&mut self, uid: &PodUid) {
        self.gangs.seen_waiting.remove(uid);
        self.gangs.reported.remove(uid);
        self.gangs.found_gone.remove(uid);
        self.gangs.called.shift_remove(uid);
        if self.gangs.told.remove(uid) {
            self.gangs.handle(self.now, GangEvent::MemberGone { pod: uid });
        }
        if self.gangs.leading {
            // Reported for any pod: a gang may wait for its end.
            self.gangs.handle(self.now, GangEvent::VictimGone { pod: uid });
        }
    }

    /// A pod no longer belongs to a gang.
    fn tell_single(&mut self, uid: &PodUid, ended: bool) {
        if ended || self.gangs.told.contains(uid) {
            self.tell_gone(uid);
        }
    }

    fn tell(&mut self, member: Member) {
        if !self.gangs.leading {
            return;
        }
        let ended = matches!(member.stage, Stage::Succeeded | Stage::Failed);
        let uid = member.uid.clone();
        self.gangs.told.insert(uid.clone());
        self.gangs.handle(self.now, GangEvent::MemberSeen(member));
        if ended {
            self.gangs.handle(self.now, GangEvent::VictimGone { pod: &uid });
        }
    }

    /// Gives the state machine everything again.
    pub(super) fn tell_all(&mut self) {
        let now = self.now;
        let GangIndex { core, effects, owners, objects, .. } = &mut self.gangs;
        for (owner, facts) in &*owners {
            let facts = facts.clone();
            effects.extend(core.handle(now, GangEvent::OwnerSeen { owner, facts }));
        }
        for ((namespace, name), object) in &*objects {
            let event = GangEvent::ObjectSeen { namespace, name, object: Box::new(object.clone()) };
            effects.extend(core.handle(now, event));
        }
        self.tell_pods();
    }

    /// Lists must be complete again before gangs are decided.
    pub(in crate::index) fn unsync_gangs(&mut self) {
        if std::mem::take(&mut self.gangs.synced) && self.gangs.leading {
            self.start_over();
        }
    }

    /// Gives the state machine what follows from the facts since the last time.
    pub(in crate::index) fn settle_gangs(&mut self) {
        if self.gangs.shapes.manage(self.nodes.resources().managed()) && self.gangs.leading {
            self.tell_pods();
        }
        if self.gangs.leading && self.is_synced() && !std::mem::replace(&mut self.gangs.synced, true) {
            self.tell_ungranted();
            self.tell_unsure();
            self.gangs.handle(self.now, GangEvent::Synced);
        }
        let overdue = self.gangs.reclaim.take_overdue(self.now.unix);
        let end = self.end_nominations();
        if self.take_resources_gained() || end || overdue {
            self.gangs.gained();
        }
        self.collect_gangs();
    }

    /// Reports Bindings that an earlier term of leadership may still be sending: their members keep the reservations of the decision.
    fn tell_unsure(&mut self) {
        for uid in self.reservations.pods_with_binds() {
            self.gangs.handle(self.now, GangEvent::BindEnded { pod: &uid, outcome: BindEnd::Unsure });
        }
    }

    /// Reports all pods again.
    pub(super) fn tell_pods(&mut self) {
        for pod in self.pods.sorted().iter().filter(|pod| pod.membership.is_some()) {
            self.tell_pod(pod);
        }
        for pod in self.resources.members() {
            self.tell_other_pod(&pod);
        }
    }

    /// Advances the time of gangs.
    pub(in crate::index) fn tick_gangs(&mut self) {
        let now = self.now;
        let departed = &mut self.gangs.departed;
        departed.retain(|_, since| now.at.saturating_duration_since(*since) < DEPARTED);
        let over = self.gangs.reported.iter();
        let over: BTreeSet<PodUid> =
            over.filter(|(_, reported)| reported.until <= now.at).map(|(uid, _)| uid.clone()).collect();
        for uid in over {
            self.tell_gone(&uid);
        }
        let wanted = self.gangs.core.watched_owners().into_iter();
        let read: HashSet<OwnerRef> =
            wanted.filter_map(|wanted| (!wanted.unread).then_some(wanted.owner)).collect();
        self.gangs.owners.retain(|owner, _| read.contains(owner));
        self.sweep_shapes();
        if self.gangs.leading {
            self.gangs.handle(self.now, GangEvent::Tick);
        }
        let troubled: Vec<_> = self.gangs.troubled.keys().copied().collect();
        self.gangs.suspects.extend(troubled);
        let GangIndex { without_numa, places, suspects, .. } = &mut self.gangs;
        suspects.extend(without_numa.keys().filter_map(|slot| places.get(slot)));
        self.follow_deadlock();
        self.check_holders();
        self.gangs.backfill.tick();
        self.gangs.reclaim.tick(now.at, &self.published);
    }

    fn shape(&mut self, request: &Arc<Request>, pod: &PodFacts) -> ShapeId {
        self.gangs.shapes.of(request, &pod.needs)
    }

    fn sweep_shapes(&mut self) {
        if !self.gangs.shapes.are_many() {
            return;
        }
        let mut used: HashSet<ShapeId> = self
            .nodes
            .iter()
            .flat_map(|(_, node)| node.occupancy().gang_reservations())
            .filter_map(|place| place.shape)
            .collect();
        let heard = self.gangs.reported.values().map(|reported| &reported.pod);
        let pods: Vec<Arc<PodFacts>> =
            self.pods.iter().chain(heard).filter(|pod| pod.membership.is_some()).cloned().collect();
        for pod in pods {
            if let Ok(request) = &pod.request {
                used.insert(self.gangs.shapes.of(request, &pod.needs));
            }
        }
        self.gangs.shapes.sweep(&used);
    }
}

/// The grant of a bound pod, if it has one for its node.
fn grant_of(pod: &PodFacts) -> Option<Grant> {
    Grant::parse(pod.grant.as_deref()?, &pod.uid, pod.node.as_ref()?).ok()
}

/// What a bound pod was granted of each resource; empty unless that is all that it requests. A grant may name no devices, where it cannot
/// tell containers apart, or may have been edited: it is no reservation of a member then.
fn granted(grant: Option<&Grant>, request: &Request) -> Devices {
    let Some(grant) = grant else {
        return Devices::new();
    };
    let of = |ask: &Ask| {
        let held: Vec<_> = grant.held(ask.resource.as_str()).into_iter().collect();
        (held.len() == ask.devices as usize).then(|| (ask.resource.clone(), held))
    };
    let all: Option<Devices> = request.asks.iter().map(of).collect();
    all.unwrap_or_default()
}
