//! The verbs of the extender API, each as one step of the index: filter, prioritize, preempt and bind. The
//! response to kube-scheduler and what follows from it are decided on one state.

use std::sync::Arc;
use std::time::Instant;

use gantry_api::placement::ComparedNodes;
use gantry_api::{NodeName, PodUid};
use gantry_gang::protocol::{Answer, Arrival, Assignment, BindEnd, GangEvent};

use super::activation::{self, Activation};
use super::gangs::{available, layouts_within};
use super::reservations::{BindError, BindGrant, Reservations, Target};
use super::unschedulable_queue::{InsufficientPod, UnschedulablePod, is_gated_by_us};
use super::victim_search::VictimSearch;
use super::{ActivatedMember, AwaitedGang, Index, MembershipState};
use crate::object_memory::Refusal;
use crate::pod::PodFacts;
use crate::wire::{CandidateNodes, Offer};
use gantry_planner::decide::{self, Candidates as _, FilterVerdict, ForeignNodes, Options};
use gantry_planner::request::Request;
use gantry_planner::snapshot::{NodeIx, Snapshot};

/// A call of filter, prioritize or preempt about one pod.
pub struct SchedulingCall<'c> {
    /// UID of the pod; empty if the caller does not send it.
    pub uid: &'c str,
    /// Its namespace.
    pub namespace: &'c str,
    /// Its name.
    pub name: &'c str,
    /// `spec.schedulerName`.
    pub scheduler: &'c str,
    /// `spec.priority`.
    pub priority: i32,
    /// What it asks for of the resources that `snapshot` manages.
    pub request: Arc<Request>,
    /// The snapshot to decide on.
    pub snapshot: &'c Snapshot,
    /// Reads the pod from the call, for one that the watch has not shown yet.
    pub read_pod: &'c dyn Fn() -> CalledPod,
}

/// A pod as it is read from a call.
#[derive(Debug, Default)]
pub struct CalledPod {
    /// The pod, if it can be read and requests watched resources.
    pub facts: Option<PodFacts>,
    /// Why it takes too much memory, if it does.
    pub refusal: Option<Refusal>,
}

/// What has to follow a step of the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FollowUp {
    /// Nothing changed.
    Nothing,
    /// The changes are published. The plans that they allow are made later: the caller waits for no plan.
    Publish,
    /// The changes are published and gangs are planned: the step was about a gang.
    Plan,
}

/// Why the index answers no verb now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnavailableReason {
    /// Another replica leads.
    #[error("this extender no longer leads; try again")]
    Follower,
    /// The lists are not complete.
    #[error("the cluster's pods, nodes and GpuNodes are not all listed yet; try again")]
    Cold,
}

/// The next step of a bind.
#[derive(Debug, Clone, PartialEq)]
pub enum BindStep {
    /// The pod belongs to no gang, and this is reserved for it.
    Single(BindGrant),
    /// Its gang is decided, and this is reserved for it. From here on only forward.
    Member(BindGrant),
    /// It waits for its gang: call again when the gang changes.
    Wait(AwaitedGang),
}

/// A pod that was read from the API server because the watch has not shown it yet.
#[derive(Debug)]
pub struct ReadPod {
    /// What it asks for.
    pub request: Arc<Request>,
    /// The pod, if it asks for watched resources.
    pub facts: Option<PodFacts>,
}

impl Index {
    /// Whether verbs are answered.
    ///
    /// # Errors
    /// See [`UnavailableReason`]. Gangs are not known then, and a member must not be taken for a single pod: kube-scheduler would
    /// place it alone, or delete members of other gangs for it.
    pub(super) fn decides(&self) -> Result<(), UnavailableReason> {
        match (self.is_leading(), self.facts.lists.is_synced()) {
            (false, _) => Err(UnavailableReason::Follower),
            (true, false) => Err(UnavailableReason::Cold),
            (true, true) => Ok(()),
        }
    }

    /// Filters the candidates for a pod. `nodes` are their numbers in the snapshot of the call.
    pub(super) fn filter(
        &mut self,
        call: &SchedulingCall<'_>,
        candidates: &CandidateNodes<'_>,
        nodes: &[Option<NodeIx>],
    ) -> (FilterVerdict, FollowUp) {
        let mut read = None;
        if !call.uid.is_empty() {
            let pod = self.read_unknown(call);
            if let Some(refusal) = pod.refusal {
                return (
                    FilterVerdict::all_refused(candidates.len(), refusal.to_string()),
                    FollowUp::Nothing,
                );
            }
            read = pod.facts;
        }
        let mut follow_up = self.record_caller(call);
        let is_simulated = decide::is_simulation(candidates, nodes);
        if !is_simulated && !call.uid.is_empty() {
            let (answer, after) = self.ask_gang(call, read, candidates, nodes);
            follow_up = follow_up.max(after);
            match answer {
                Answer::Single => {}
                Answer::Node(node) => return (only(candidates, &node), follow_up),
                Answer::Wait(why) => {
                    return (
                        FilterVerdict::all_refused(candidates.len(), why.message.to_string()),
                        follow_up,
                    );
                }
            }
        }
        let mut answer = filter_single(self.facts.options, call, call.snapshot, candidates, nodes);
        if answer.passed.is_empty()
            && !answer.simulated
            && let Some(lending) = self.lending(call)
        {
            let lent = filter_single(self.facts.options, call, &lending, candidates, nodes);
            if !lent.passed.is_empty() {
                answer = lent;
            }
        }
        if answer.simulated || call.uid.is_empty() {
            return (answer, follow_up);
        }
        if answer.passed.is_empty() {
            self.gangs.holders(&self.facts).name_in(&mut answer, nodes, self.gangs.reservations());
        }
        let after = self.note_filtered(call, candidates, &answer);
        (answer, follow_up.max(after))
    }

    /// The snapshot of a call as it is for pods that are lent devices; `None` if none are.
    fn lending(&self, call: &SchedulingCall<'_>) -> Option<Snapshot> {
        let lending = self.gangs.lending(&self.facts);
        lending.snapshot_for(call.priority, call.snapshot, self.gangs.reservations())
    }

    /// Records what is answered for a single pod.
    fn note_filtered(
        &mut self,
        call: &SchedulingCall<'_>,
        candidates: &CandidateNodes<'_>,
        answer: &FilterVerdict,
    ) -> FollowUp {
        let uid = PodUid::from(call.uid);
        match answer.passed[..] {
            [] if answer.refused.is_empty() => FollowUp::Nothing,
            [] => {
                let pod = UnschedulablePod {
                    namespace: call.namespace.into(),
                    name: call.name.into(),
                    request: Arc::clone(&call.request),
                    generation: call.snapshot.generation,
                };
                self.add_unschedulable(uid, pod);
                FollowUp::Publish
            }
            // kube-scheduler does not call prioritize for a single node.
            [only] => {
                let compared = ComparedNodes { nodes: 1, others: Vec::new() };
                self.hold_for(&uid, &call.request, candidates.name(only as usize), compared);
                FollowUp::Publish
            }
            _ => match self.facts.unschedulable.remove(&uid) {
                Some(_) => FollowUp::Publish,
                None => FollowUp::Nothing,
            },
        }
    }

    /// The position of the best candidate for a pod, if there is one.
    pub(super) fn prioritize(
        &mut self,
        call: &SchedulingCall<'_>,
        candidates: &CandidateNodes<'_>,
        nodes: &[Option<NodeIx>],
    ) -> (Option<u32>, FollowUp) {
        let is_known = nodes.iter().all(Option::is_some) && !call.uid.is_empty();
        let (answer, follow_up) = match is_known {
            true => {
                let read = self.read_unknown(call).facts;
                self.ask_gang(call, read, candidates, nodes)
            }
            false => (Answer::Single, FollowUp::Nothing),
        };
        match answer {
            Answer::Node(node) => (position(candidates, &node), follow_up),
            Answer::Wait(_) => (None, follow_up),
            Answer::Single => {
                let (request, options) = (&call.request, self.facts.options);
                let prioritize = |snapshot: &Snapshot| {
                    decide::prioritize(snapshot, options, call.uid, request, candidates, nodes)
                };
                let lending = || prioritize(&self.lending(call)?);
                let Some(winner) = prioritize(call.snapshot).or_else(lending) else {
                    return (None, follow_up);
                };
                if !is_known {
                    return (Some(winner.position), follow_up);
                }
                let uid = PodUid::from(call.uid);
                let node = candidates.name(winner.position as usize);
                self.hold_for(&uid, request, node, winner.compared);
                (Some(winner.position), follow_up.max(FollowUp::Publish))
            }
        }
    }

    /// The nodes of kube-scheduler's preemption that help a pod, each with its victims.
    pub(super) fn preempt_single(
        &mut self,
        call: &SchedulingCall<'_>,
        offers: Vec<Offer>,
    ) -> (Vec<Offer>, FollowUp) {
        self.record_caller(call);
        let uid = PodUid::from(call.uid);
        // kube-scheduler may call as soon as the pod exists, and before filter.
        let read = self.read_unknown(call).facts;
        let offers = match self.is_member(call, read).0 {
            true => Vec::new(),
            false => self.preemptable(&uid, &call.request, call.priority, offers),
        };
        (offers, FollowUp::Plan)
    }

    /// Of the nodes that kube-scheduler offers for a pod those that help, each with its victims: see [`VictimSearch`].
    /// A member of a gang is never helped here: gangs are preempted for as a whole. Nor is a pod for which others were
    /// stopped already, while their devices are being released.
    pub fn preemptable(
        &mut self,
        uid: &PodUid,
        request: &Request,
        priority: i32,
        offers: Vec<Offer>,
    ) -> Vec<Offer> {
        if self.gangs.gangs().goes_with(uid).is_some() {
            return Vec::new();
        }
        let search = VictimSearch::new(&self.facts, self.gangs(), request, priority);
        let are_returning = search.comes_free(uid);
        if self.facts.unschedulable.awaits(self.facts.clock.now().at, uid, are_returning) {
            return Vec::new();
        }
        let found = VictimSearch::new(&self.facts, self.gangs(), request, priority).choose(offers);
        if !found.is_empty() {
            self.facts.unschedulable.has_victims(uid);
        }
        found
    }

    /// The next step of a bind: devices are reserved for a single pod, or for a member of a decided gang. A repeated
    /// call gets the same grant. `read` is the pod where neither the watch nor a hold has it.
    ///
    /// # Errors
    /// See [`BindError`]; then nothing is reserved.
    pub(super) fn bind(&mut self, target: &Target, read: Option<ReadPod>) -> Result<BindStep, BindError> {
        let mut request = None;
        if let Some(read) = read {
            request = Some(read.request);
            if let Some(pod) = read.facts {
                self.observe_called(pod);
            }
        }
        self.arrive(target, request)
    }

    /// Handles a bind: grants devices to a single pod, or to a member of a decided gang. A repeated call gets the same answer.
    /// `request` is the request of a single pod that is not known otherwise.
    ///
    /// # Errors
    /// See [`BindError`]; then nothing is granted.
    pub(super) fn arrive(
        &mut self,
        target: &Target,
        request: Option<Arc<Request>>,
    ) -> Result<BindStep, BindError> {
        let waits = match self.facts.pods.get(&target.uid) {
            // It is bound already, or elsewhere: there is nothing to wait for.
            Some(pod) => pod.node.is_none(),
            None => true,
        };
        if !waits {
            return self.reserve(target, request).map(BindStep::Single);
        }
        match self.gangs.arrive(self.facts.clock.now(), target)? {
            Arrival::Single => self.reserve(target, request).map(BindStep::Single),
            Arrival::Refuse(why) => Err(BindError::Gang(why.message)),
            Arrival::Wait => {
                let awaited = self.gangs.awaited(&target.uid);
                awaited.map(BindStep::Wait).ok_or_else(|| BindError::UnknownPod(target.uid.clone()))
            }
            Arrival::Go(placed) => match self.reserve_for_member(target, &placed) {
                Ok(reserved) => Ok(BindStep::Member(reserved)),
                Err(error) => {
                    self.gangs.may_move(&self.facts, &target.uid, BindEnd::NotSent);
                    match error {
                        // The pod that had the devices is still ending, or its end is not certain yet.
                        BindError::NotFree { .. } => Ok(BindStep::Wait(AwaitedGang {
                            gang: placed.gang,
                            why: Some(error.to_string().into()),
                        })),
                        other => Err(other),
                    }
                }
            },
        }
    }

    /// Grants exactly the devices of a reservation to the bind of its member.
    fn reserve_for_member(&mut self, target: &Target, placed: &Assignment) -> Result<BindGrant, BindError> {
        let reported = self.gangs.reported(&target.uid);
        let request = reported.and_then(|pod| pod.request.clone().ok());
        let request = self.facts.check_pod(target, request)?;
        let Some(request) = request.map(|request| request.of(&self.facts.nodes.resources().managed())) else {
            return Ok(BindGrant::AlreadyBound);
        };
        let node = self.node_for(target)?;
        if let Some(repeated) = Reservations::repeat(&mut self.facts.nodes, node, target)? {
            return Ok(repeated);
        }
        let pod = target.uid.as_str();
        let entry = self.facts.nodes.get(node);
        let layouts =
            entry.and_then(|entry| layouts_within(entry, &available(entry, placed, pod)?, &request, pod));
        let layouts = layouts.ok_or_else(|| {
            BindError::not_free(target, "the devices of its reservation are not released yet")
        })?;
        let gang = self.gangs.placement_of(&placed.gang);
        self.facts.reservations.grant(&mut self.facts.nodes, node, target, &request, &layouts, gang)
    }

    /// A member has waited for the others until its time limit, and the bind fails.
    pub fn gave_up(&mut self, uid: &PodUid) {
        self.gangs.handle(self.facts.clock.now(), GangEvent::BarrierTimeout { pod: uid });
    }

    /// The client of a waiting bind has closed the connection.
    pub fn withdraw(&mut self, uid: &PodUid) {
        self.gangs.handle(self.facts.clock.now(), GangEvent::Disconnected { pod: uid });
    }

    /// The result of a member's bind.
    pub fn bind_ended(&mut self, uid: &PodUid, end: BindEnd) {
        self.gangs.bind_ended(self.facts.clock.now(), uid, end);
    }

    /// The answer of filter for a pod. `offered`: whether a node is among the candidates.
    pub fn answer(&mut self, uid: &PodUid, offered: &dyn Fn(&NodeName) -> bool) -> Answer {
        self.gangs.answer(self.facts.clock.now(), uid, offered)
    }

    /// The candidates of a call for a member. If they repeatedly lack its own node, the members of its shape are
    /// planned on nodes that were offered.
    pub fn offered(&mut self, uid: &PodUid, nodes: impl Iterator<Item = NodeIx>) {
        self.gangs.offered(uid, nodes);
    }

    /// Whether a pod belongs to a gang.
    pub fn belongs(&self, uid: &str) -> MembershipState {
        self.gangs.belongs(&self.facts, uid)
    }

    /// A pod that is known from a call of kube-scheduler only: the watch may be behind. It counts for its gang until the watch shows it, but
    /// not for long.
    pub fn observe_called(&mut self, pod: PodFacts) {
        self.gangs.pod_called(&mut self.facts, pod);
    }

    /// How to activate a member; `None` if it is deleted or bound, or belongs to no gang any more.
    pub fn called(&self, uid: &PodUid) -> Option<ActivatedMember> {
        self.gangs.called(&self.facts, uid)
    }

    /// Whether members are to be activated.
    pub fn has_called(&self) -> bool {
        self.gangs.work().has_called()
    }

    /// Takes members to activate, at most `limit`, one gang after the other.
    pub fn take_called(&mut self, limit: usize) -> Vec<(PodUid, ActivatedMember)> {
        self.gangs.take_called(&self.facts, limit)
    }

    /// kube-scheduler should try a member again that was to be bound without it, and is not.
    pub fn bring_again(&mut self, uid: &PodUid) {
        self.gangs.work_mut().call(uid.clone());
    }

    /// Whether members are to be bound although kube-scheduler does not call for them.
    pub fn has_deferred(&self) -> bool {
        self.gangs.work().has_deferred()
    }

    /// Takes members of decided gangs to bind although kube-scheduler does not call for them, with the nodes of their reservations.
    pub fn take_deferred(&mut self) -> Vec<Target> {
        self.gangs.take_deferred(&self.facts)
    }

    fn record_caller(&mut self, call: &SchedulingCall<'_>) -> FollowUp {
        if call.snapshot.schedulers.contains(call.scheduler) {
            return FollowUp::Nothing;
        }
        self.record_scheduler(call.scheduler);
        FollowUp::Publish
    }

    /// What the gang of a pod answers.
    fn ask_gang(
        &mut self,
        call: &SchedulingCall<'_>,
        read: Option<PodFacts>,
        candidates: &CandidateNodes<'_>,
        nodes: &[Option<NodeIx>],
    ) -> (Answer, FollowUp) {
        let (is_member, follow_up) = self.is_member(call, read);
        if !is_member {
            return (Answer::Single, follow_up);
        }
        let uid = PodUid::from(call.uid);
        let offered = |node: &NodeName| position(candidates, node).is_some();
        let answer = self.answer(&uid, &offered);
        if matches!(answer, Answer::Wait(_)) {
            self.offered(&uid, nodes.iter().flatten().copied());
        }
        (answer, FollowUp::Plan)
    }

    /// Reads the pod from the call if the watch has not shown it yet.
    fn read_unknown(&self, call: &SchedulingCall<'_>) -> CalledPod {
        match self.belongs(call.uid) {
            MembershipState::Unknown => (call.read_pod)(),
            MembershipState::Single | MembershipState::Gang => CalledPod::default(),
        }
    }

    /// Whether a pod belongs to a gang. `read` is the pod where the watch has not shown it yet.
    fn is_member(&mut self, call: &SchedulingCall<'_>, read: Option<PodFacts>) -> (bool, FollowUp) {
        match self.belongs(call.uid) {
            MembershipState::Single => (false, FollowUp::Nothing),
            MembershipState::Gang => (true, FollowUp::Nothing),
            MembershipState::Unknown => match read.filter(|pod| pod.membership.is_some()) {
                Some(pod) => {
                    self.observe_called(pod);
                    (true, FollowUp::Plan)
                }
                None => (false, FollowUp::Nothing),
            },
        }
    }

    fn hold_for(&mut self, uid: &PodUid, request: &Arc<Request>, node: &str, compared: ComparedNodes) {
        self.facts.unschedulable.remove(uid);
        self.hold(self.facts.clock.now().at, uid, request, node);
        self.facts.reservations.record_compared(uid, compared);
    }

    /// Holds the best devices of `node` for a pod that kube-scheduler has most likely sent there. Replaces an earlier
    /// hold of the pod.
    pub fn hold(&mut self, now: Instant, uid: &PodUid, request: &Arc<Request>, node: &str) {
        self.facts.reservations.drop_hold(&mut self.facts.nodes, uid);
        let is_bound = self.facts.pods.get(uid).is_some_and(|pod| pod.node.is_some());
        let Some(node) = self.facts.nodes.find(node).filter(|_| !is_bound) else {
            return;
        };
        self.settle_node(node);
        let lent = self.gangs.lending(&self.facts).lent_to(node, uid);
        let choice = (self.facts.options.policy, lent.as_slice());
        self.facts.reservations.hold(now, &mut self.facts.nodes, (uid, node), request, choice);
    }

    /// Reserves devices for the bind of a single pod and writes its grant.
    ///
    /// # Errors
    /// See [`BindError`]; then nothing is reserved.
    pub fn reserve(
        &mut self,
        target: &Target,
        request: Option<Arc<Request>>,
    ) -> Result<BindGrant, BindError> {
        let request = self.facts.check_pod(target, request)?;
        let Some(request) = request.map(|request| request.of(&self.facts.nodes.resources().managed())) else {
            return Ok(BindGrant::AlreadyBound);
        };
        let node = self.node_for(target)?;
        if request.is_empty() {
            return Ok(BindGrant::Plain);
        }
        if !self.facts.nodes.has_inventory(node) {
            return match self.facts.options.foreign {
                ForeignNodes::Allow => Ok(BindGrant::Plain),
                ForeignNodes::Refuse => Err(BindError::ForeignNode(target.node.clone())),
            };
        }
        if let Some(repeated) = Reservations::repeat(&mut self.facts.nodes, node, target)? {
            return Ok(repeated);
        }
        let lent = self.gangs.lending(&self.facts).lent_to(node, &target.uid);
        let nodes = &mut self.facts.nodes;
        let choice = (self.facts.options.policy, lent.as_slice());
        let layouts = self.facts.reservations.choose(nodes, node, target, &request, choice)?;
        self.facts.reservations.grant(nodes, node, target, &request, &layouts, None)
    }

    /// The node of a bind, with its ledger as of now: facts that came since the last snapshot count.
    pub(super) fn node_for(&mut self, target: &Target) -> Result<NodeIx, BindError> {
        let node = self.facts.nodes.find(target.node.as_str());
        let node = node.ok_or_else(|| BindError::no_such_node(target))?;
        self.settle_node(node);
        let exists = self.facts.nodes.get(node).is_some_and(|node| node.advertised().is_some());
        exists.then_some(node).ok_or_else(|| BindError::no_such_node(target))
    }

    /// Whether the Binding of a pod must wait until kubelet has admitted earlier pods of the node.
    pub fn awaits_admission(&self, target: &Target) -> bool {
        let node = self.facts.nodes.find(target.node.as_str()).and_then(|node| self.facts.nodes.get(node));
        node.is_some_and(|node| node.awaits_admission(&target.uid, &self.facts.pods))
    }

    /// Whether a Binding that was sent may be sent once more.
    ///
    /// # Errors
    /// Kubelet reports its devices as those of another pod, or the Gang no longer shows the decision by which it is bound.
    pub fn may_repeat(&mut self, target: &Target) -> Result<(), BindError> {
        if !self.gangs.is_written(&target.uid) {
            return Err(BindError::Gang("the Gang does not show its reservation any more".into()));
        }
        let node = self.facts.nodes.find(target.node.as_str());
        let node = node.ok_or_else(|| BindError::no_such_node(target))?;
        self.settle_node(node);
        let node = self.facts.nodes.get(node);
        node.map_or(Ok(()), |node| Reservations::still_granted(node, target))
    }

    /// Adds a pod that filter refused on every node.
    pub fn add_unschedulable(&mut self, uid: PodUid, pod: UnschedulablePod) {
        self.facts.unschedulable.add(uid, pod);
    }

    /// Whether a pod is in the queue of unschedulable pods.
    pub fn is_unschedulable(&self, uid: &str) -> bool {
        self.facts.unschedulable.contains(uid)
    }

    /// Adds a pod again after its activation failed; its new generation. `None` if there is nothing to activate: it is
    /// gone, bound, or was refused again meanwhile.
    pub fn requeue(&mut self, uid: PodUid, mut pod: UnschedulablePod) -> Option<u64> {
        let waits = self.facts.pods.get(&uid).is_some_and(|pod| pod.node.is_none());
        let generation = self.facts.published.generation;
        pod.generation = generation;
        (waits && self.facts.unschedulable.requeue(uid, pod)).then_some(generation)
    }

    /// Takes a pod that [`Index::requeue`] has added, to activate it once more. `None` if it was scheduled or refused
    /// since, or fits on no node now.
    pub fn take_requeued(&mut self, uid: &PodUid, generation: u64) -> Option<UnschedulablePod> {
        let pod = self.facts.unschedulable.get(uid)?;
        let mut nodes = self.facts.nodes.numbers();
        let may_go = pod.generation == generation
            && nodes
                .any(|node| activation::fits(&self.facts, node, self.facts.pods.priority(uid), &pod.request));
        may_go.then(|| self.facts.unschedulable.remove(uid)).flatten()
    }

    /// Whether devices came free while pods were unschedulable.
    pub fn has_gains(&self) -> bool {
        self.facts.unschedulable.has_gains()
    }

    /// Takes unschedulable pods that were refused before devices came free on a node where they fit now: those of the
    /// highest priority, at most `limit`.
    pub fn take_activatable(&mut self, limit: usize) -> Vec<(PodUid, UnschedulablePod)> {
        let gains = self.facts.unschedulable.take_gains();
        let mut activation = Activation::new(&self.facts, &gains);
        let refused = self.facts.unschedulable.refused_before_gain();
        let fitting = refused.filter(|(uid, pod)| activation.fits(uid, &pod.request));
        let fitting = fitting.map(|(uid, _)| (self.facts.pods.priority(uid), uid.clone()));
        let fitting = fitting.collect();
        self.facts.unschedulable.take_first(fitting, limit, gains)
    }

    /// Pods for which kube-scheduler's own count finds too few devices.
    pub fn insufficient_pods(&self) -> Vec<InsufficientPod> {
        self.facts.unschedulable.insufficient()
    }

    /// Members of gangs that only a scheduling gate of Gantry keeps from kube-scheduler, which therefore reports
    /// nothing about them.
    pub fn gated(&self) -> Vec<PodUid> {
        let others = self.facts.resources.members().into_iter();
        let others = others.filter(|pod| is_gated_by_us(&pod.stage));
        let others = others.map(|pod| pod.uid.clone());
        self.facts.unschedulable.gated().cloned().chain(others).collect()
    }
}

/// Filters the candidates for a single pod over a snapshot.
fn filter_single(
    options: Options,
    call: &SchedulingCall<'_>,
    snapshot: &Snapshot,
    candidates: &CandidateNodes<'_>,
    nodes: &[Option<NodeIx>],
) -> FilterVerdict {
    let SchedulingCall { priority, request, .. } = call;
    let mut answer = decide::filter(snapshot, options, request, candidates, nodes);
    if let Some(kept) = &snapshot.kept
        && *priority <= kept.priority
    {
        answer.keep_off(kept, nodes);
    }
    if let Some(promised) = &snapshot.promised {
        answer.leave_nominated(promised, snapshot, nodes, (*priority, request));
    }
    answer
}

/// One node and no other. The others need no reason: kube-scheduler does not report them then.
fn only(candidates: &CandidateNodes<'_>, node: &NodeName) -> FilterVerdict {
    match position(candidates, node) {
        Some(position) => FilterVerdict { passed: vec![position], ..FilterVerdict::default() },
        None => FilterVerdict::all_refused(
            candidates.len(),
            "its gang's reservation is on a node that was not offered".to_owned(),
        ),
    }
}

fn position(candidates: &CandidateNodes<'_>, node: &NodeName) -> Option<u32> {
    let found = (0..candidates.len()).find(|position| candidates.name(*position) == node.as_str());
    found.and_then(|position| u32::try_from(position).ok())
}
