//! Pods as members of gangs: which of them the state machine knows, and what it receives of them. What else is known of pods is kept
//! elsewhere.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{Grant, PodUid, ResourceName};
use gantry_gang::protocol::{Asks, Devices, GangEvent, Member, Moment, Stage};
use gantry_gang::{Membership, Needs};

use super::machine::Machine;
use super::objects::GangObjects;
use super::shapes::Shapes;
use super::work::WorkQueue;
use crate::index::facts::Facts;
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
struct ReportedPod {
    pod: Arc<PodFacts>,
    until: Instant,
}

/// The pods that are, or were, members of gangs.
#[derive(Debug, Default)]
pub(super) struct MemberTable {
    /// Pods that the state machine knows.
    known: BTreeSet<PodUid>,
    /// Pods that waited for a scheduler that calls the extender, also while another process led: they are members, whichever
    /// client binds them.
    seen_waiting: BTreeSet<PodUid>,
    /// Pods that only kube-scheduler has reported.
    reported: HashMap<PodUid, ReportedPod>,
    /// Members that the watch has shown as deleted, with the time.
    departed: HashMap<PodUid, Instant>,
    /// Members that a bind found deleted and the watch still shows, with the time.
    found_gone: HashMap<PodUid, Instant>,
}

impl MemberTable {
    /// Whether the state machine knows a pod.
    pub(super) fn knows(&self, uid: &str) -> bool {
        self.known.contains(uid)
    }

    /// A pod that filter was called about and that the watch has not shown.
    pub(super) fn reported(&self, uid: &str) -> Option<&Arc<PodFacts>> {
        self.reported.get(uid).map(|reported| &reported.pod)
    }

    /// The pods that only kube-scheduler has reported.
    pub(super) fn all_reported(&self) -> impl Iterator<Item = &Arc<PodFacts>> {
        self.reported.values().map(|reported| &reported.pod)
    }

    /// The needs of pods that only kube-scheduler has reported.
    pub(super) fn reported_needs(&self) -> impl Iterator<Item = &Needs> {
        self.all_reported().map(|pod| &*pod.needs)
    }

    /// Whether a pod that only kube-scheduler has reported asks for a resource.
    pub(super) fn ask_for(&self, resource: &ResourceName) -> bool {
        self.all_reported().any(|pod| pod.devices(resource.as_str()) > 0)
    }

    /// The watch shows the deletion of a pod. A later call does not bring it back: devices would be reserved and pods evicted for it.
    pub(super) fn depart(&mut self, now: Instant, uid: &PodUid, is_member: bool) {
        if is_member || self.known.contains(uid) {
            self.departed.insert(uid.clone(), now);
        }
    }

    /// Whether the watch has shown the deletion of a pod.
    pub(super) fn has_departed(&self, uid: &PodUid) -> bool {
        self.departed.contains_key(uid)
    }

    /// A bind found a member deleted.
    pub(super) fn note_gone(&mut self, now: Instant, uid: &PodUid) {
        if self.known.contains(uid) {
            self.found_gone.insert(uid.clone(), now);
        }
    }

    /// Members that binds found deleted before `since` and that the watch still shows.
    pub(super) fn gone_before(&self, since: Instant) -> impl Iterator<Item = PodUid> {
        let found = self.found_gone.iter();
        found.filter(move |(_, at)| **at < since).map(|(uid, _)| uid.clone())
    }

    /// Records that a pod waits for a scheduler that calls the extender.
    pub(super) fn note_waiting(&mut self, uid: &PodUid) {
        self.seen_waiting.insert(uid.clone());
    }

    /// Forgets the pods that a complete list does not name. Returns the members among them.
    pub(super) fn missing_from(&mut self, listed: &HashSet<Arc<str>>) -> Vec<PodUid> {
        self.seen_waiting.retain(|uid| listed.contains(uid.as_str()));
        let known = self.known.iter();
        let gone = known.filter(|uid| !listed.contains(uid.as_str()) && !self.reported.contains_key(*uid));
        gone.cloned().collect()
    }

    /// Lets time pass. Returns the pods that only kube-scheduler has reported, and not lately.
    pub(super) fn expire(&mut self, now: Instant) -> BTreeSet<PodUid> {
        self.departed.retain(|_, since| now.saturating_duration_since(*since) < DEPARTED);
        let over = self.reported.iter().filter(|(_, reported)| reported.until <= now);
        over.map(|(uid, _)| uid.clone()).collect()
    }

    /// Forgets what the state machine knows of pods, and what only kube-scheduler and binds have shown.
    pub(super) fn restart(&mut self) {
        self.known.clear();
        self.reported.clear();
        self.found_gone.clear();
    }

    /// Namespace and name of a pod that is known.
    pub(super) fn address_of(&self, facts: &Facts, uid: &PodUid) -> Option<(Arc<str>, Arc<str>)> {
        if let Some(pod) = facts.pods.get(uid).or_else(|| self.reported(uid.as_str())) {
            return Some((Arc::clone(&pod.namespace), Arc::clone(&pod.name)));
        }
        match facts.resources.member(uid) {
            Some(pod) => Some((Arc::clone(&pod.profile.namespace), Arc::clone(&pod.name))),
            None => {
                let preemptible = facts.resources.preemptible(uid)?;
                Some((Arc::clone(&preemptible.profile.namespace), Arc::clone(&preemptible.pod.name)))
            }
        }
    }

    /// How many deleted members are remembered.
    #[cfg(test)]
    pub(super) fn departed(&self) -> usize {
        self.departed.len()
    }
}

/// Reports pods to the state machine.
#[derive(Debug)]
pub(super) struct PodReporter<'a> {
    pub(super) machine: &'a mut Machine,
    pub(super) members: &'a mut MemberTable,
    pub(super) shapes: &'a mut Shapes,
    pub(super) objects: &'a GangObjects,
    pub(super) work: &'a mut WorkQueue,
    pub(super) facts: &'a Facts,
}

impl PodReporter<'_> {
    fn now(&self) -> Moment {
        self.facts.clock.now()
    }

    /// A pod that is known from a call of kube-scheduler only: the watch may be behind. It counts for its gang until the watch shows it, but
    /// not for long.
    pub(super) fn report_called(&mut self, pod: PodFacts) {
        let reported = ReportedPod { until: self.now().at + REPORTED_FOR, pod: Arc::new(pod) };
        self.report(&Arc::clone(&reported.pod));
        self.members.reported.insert(reported.pod.uid.clone(), reported);
    }

    /// A pod as the state machine sees it.
    pub(super) fn report(&mut self, pod: &PodFacts) {
        self.members.reported.remove(&pod.uid);
        self.report_end(&pod.uid, pod.ends);
        let Some(membership) = &pod.membership else {
            self.report_single(&pod.uid, pod.terminal);
            return;
        };
        // Its request cannot be read: filter refuses it on every node, and its gang waits for a readable member.
        let Ok(request) = &pod.request else {
            self.report_single(&pod.uid, pod.terminal);
            return;
        };
        let managed = request.of(&self.facts.nodes.resources().managed());
        let asks: Asks = managed.asks.iter().map(|ask| (ask.resource.clone(), ask.devices)).collect();
        let shape = (!managed.is_empty()).then(|| self.shapes.of(request, &pod.needs));
        let grant = grant_of(pod);
        let elsewhere = match &pod.node {
            Some(_) if grant.is_some() || self.is_known_member(pod, membership) => None,
            // It was created with a node, as far as this process knows.
            Some(_) => {
                Some(self.facts.schedulers.unknown_scheduler_of(pod).unwrap_or_else(|| NODE_NAME.into()))
            }
            None => self.facts.schedulers.unknown_scheduler_of(pod),
        };
        self.report_member(Member {
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
        if let Some(message) = &pod.scheduler_message {
            self.machine.observe(self.now(), GangEvent::SchedulerMessage { pod: &pod.uid, message });
        }
    }

    /// Whether a pod that is bound without a grant waited for a scheduler before, as this process or an earlier one knows.
    fn is_known_member(&self, pod: &PodFacts, membership: &Membership) -> bool {
        self.members.seen_waiting.contains(&pod.uid) || self.objects.names_member(&membership.key, &pod.uid)
    }

    /// Reports bound pods without a grant again: the decision that names them may have been read after them.
    pub(super) fn report_ungranted(&mut self) {
        let ungranted =
            |pod: &&Arc<PodFacts>| pod.membership.is_some() && pod.node.is_some() && grant_of(pod).is_none();
        let pods: Vec<Arc<PodFacts>> = self.facts.pods.iter().filter(ungranted).cloned().collect();
        for pod in pods {
            self.report(&pod);
        }
    }

    /// Reports all pods again.
    pub(super) fn report_all(&mut self) {
        for pod in self.facts.pods.sorted().iter().filter(|pod| pod.membership.is_some()) {
            self.report(pod);
        }
        for pod in self.facts.resources.members() {
            self.report_other(&pod);
        }
    }

    /// A pod that requests no devices, as the state machine sees it.
    pub(super) fn report_other(&mut self, pod: &OtherPod) {
        self.report_end(&pod.uid, pod.ends);
        let Some(membership) = &pod.membership else {
            let ended = matches!(pod.stage, Stage::Succeeded | Stage::Failed);
            self.report_single(&pod.uid, ended);
            return;
        };
        self.report_member(Member {
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
    fn report_end(&mut self, uid: &PodUid, ends: Option<i64>) {
        if let Some(ends) = ends {
            self.machine.observe(self.now(), GangEvent::VictimTerminating { pod: uid, by: ends });
        }
    }

    /// A pod is gone.
    pub(super) fn report_gone(&mut self, uid: &PodUid) {
        self.members.seen_waiting.remove(uid);
        self.members.reported.remove(uid);
        self.members.found_gone.remove(uid);
        self.work.forget(uid);
        if self.members.known.remove(uid) {
            self.machine.handle(self.now(), GangEvent::MemberGone { pod: uid });
        }
        // Reported for any pod: a gang may wait for its end.
        self.machine.observe(self.now(), GangEvent::VictimGone { pod: uid });
    }

    /// A pod no longer belongs to a gang.
    fn report_single(&mut self, uid: &PodUid, ended: bool) {
        if ended || self.members.known.contains(uid) {
            self.report_gone(uid);
        }
    }

    fn report_member(&mut self, member: Member) {
        if !self.machine.is_leading() {
            return;
        }
        let ended = matches!(member.stage, Stage::Succeeded | Stage::Failed);
        let uid = member.uid.clone();
        self.members.known.insert(uid.clone());
        self.machine.handle(self.now(), GangEvent::MemberSeen(member));
        if ended {
            self.machine.handle(self.now(), GangEvent::VictimGone { pod: &uid });
        }
    }
}

/// The grant of a bound pod, if it has one for its node.
fn grant_of(pod: &PodFacts) -> Option<Grant> {
    Grant::parse(pod.grant.as_deref()?, &pod.uid, pod.node.as_ref()?).ok()
}

/// What a bound pod was granted of each resource; empty unless that is all that it requests. A grant may name no devices, where it cannot
/// distinguish containers, or may have been edited: it is no reservation of a member then.
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
