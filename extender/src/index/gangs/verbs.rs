//! kube-scheduler's calls for members of gangs, and the members that are bound without a call.

use std::sync::Arc;

use gantry_api::placement::GangPlacement;
use gantry_api::{NodeName, PodUid};
use gantry_gang::GangKey;
use gantry_gang::protocol::{Answer, Arrival, BindEnd, GangEvent, Gangs, Moment, OfferedNodes, Reply};

use super::GangIndex;
use crate::index::facts::Facts;
use crate::index::{BindError, Target};
use crate::pod::PodFacts;
use gantry_planner::snapshot::NodeIx;

/// Why a member waits that got its reservation after the decision.
const UNWRITTEN: &str = "its reservation is not written to the Gang yet";

/// What a member waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AwaitedGang {
    /// Its gang.
    pub gang: Arc<GangKey>,
    /// Why it cannot get its own reservation, if its gang is decided.
    pub why: Option<Arc<str>>,
}

/// Whether a pod belongs to a gang, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MembershipState {
    /// It does.
    Gang,
    /// It does not.
    Single,
    /// The pod is not known: the pod of the call must be read.
    Unknown,
}

/// A member that kube-scheduler should try again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivatedMember {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// The node of its reservation, as a hint, if the operator wants that.
    pub nominate: Option<NodeName>,
}

/// Whether a pod belongs to no gang, or to a group without a minimum.
pub(in crate::index) fn goes_by_itself(gangs: &Gangs, pod: &PodFacts) -> bool {
    let grouped = pod.membership.is_some();
    !grouped || gangs.gang_of(&pod.uid).is_some() && gangs.goes_with(&pod.uid).is_none()
}

impl GangIndex {
    /// Whether a pod belongs to a gang.
    pub(in crate::index) fn belongs(&self, facts: &Facts, uid: &str) -> MembershipState {
        let known = facts.pods.get(uid);
        let by_itself = known.is_some_and(|pod| goes_by_itself(self.gangs(), pod));
        if self.members.knows(uid) && !by_itself {
            return MembershipState::Gang;
        }
        match known.is_some() {
            true => MembershipState::Single,
            false => MembershipState::Unknown,
        }
    }

    /// The answer of filter for a pod. `offered`: whether a node is among the candidates.
    pub(in crate::index) fn answer(
        &mut self,
        now: Moment,
        uid: &PodUid,
        offered: &dyn Fn(&NodeName) -> bool,
    ) -> Answer {
        let event = GangEvent::Filter { pod: uid, offered: OfferedNodes(offered) };
        match self.machine.handle(now, event) {
            Reply::Answer(answer) => answer,
            _ => Answer::Single,
        }
    }

    /// The candidates of a call for a member. If they repeatedly lack its own node, the members of its shape are
    /// planned on nodes that were offered.
    pub(in crate::index) fn offered(&mut self, uid: &PodUid, nodes: impl Iterator<Item = NodeIx>) {
        let gangs = self.machine.gangs();
        let gang = gangs.gang_of(uid).cloned();
        let missed = gang.and_then(|gang| {
            let view = gangs.view(&gang).filter(|view| view.has_missed_nodes())?;
            let shape = self.shapes.get(view.shape_of(uid)?)?;
            Some((gang, shape.clone()))
        });
        if let Some((gang, shape)) = missed {
            self.offers.add(gang, shape, nodes);
        }
    }

    /// The answer to the bind of a pod that is not on a node.
    ///
    /// # Errors
    /// This process does not decide.
    pub(in crate::index) fn arrive(&mut self, now: Moment, target: &Target) -> Result<Arrival, BindError> {
        if !self.machine.is_leading() {
            // Gangs are not known then: a member that waits here must not be taken for a single pod.
            return Err(BindError::Gang("this extender is no longer the leader; try again".into()));
        }
        let event = GangEvent::Arrive { pod: &target.uid, node: &target.node };
        match self.machine.handle(now, event) {
            Reply::Arrival(arrival) => Ok(arrival),
            _ => Ok(Arrival::Single),
        }
    }

    /// What a member waits for.
    pub(in crate::index) fn awaited(&self, uid: &PodUid) -> Option<AwaitedGang> {
        let gang = self.gangs().gang_of(uid)?;
        let decided = self.gangs().view(gang).is_some_and(|view| view.is_decided());
        Some(AwaitedGang { gang: Arc::clone(gang), why: decided.then(|| UNWRITTEN.into()) })
    }

    /// No Binding of a member is being sent, for its bind has ended so: if its reservation is lost, it may get another one.
    pub(in crate::index) fn may_move(&mut self, facts: &Facts, uid: &PodUid, outcome: BindEnd) {
        if !facts.reservations.has_bind(uid) {
            self.machine.observe(facts.clock.now(), GangEvent::BindEnded { pod: uid, outcome });
        }
    }

    /// The result of a member's bind.
    pub(in crate::index) fn bind_ended(&mut self, now: Moment, uid: &PodUid, end: BindEnd) {
        if end == BindEnd::Gone {
            self.members.note_gone(now.at, uid);
        }
        self.machine.handle(now, GangEvent::BindEnded { pod: uid, outcome: end });
    }

    /// The part of the fabric of a gang, in short.
    pub(in crate::index) fn placement_of(&self, gang: &GangKey) -> Option<GangPlacement> {
        let view = self.gangs().view(gang)?;
        Some(GangPlacement {
            object: gang.object_name(),
            domain: view.domain().to_string(),
            level: view.compared().and_then(|compared| compared.chosen()).cloned(),
        })
    }

    /// How to activate a member; `None` if it is deleted or bound, or belongs to no gang any more.
    pub(in crate::index) fn called(&self, facts: &Facts, uid: &PodUid) -> Option<ActivatedMember> {
        let gang = self.gangs().gang_of(uid)?;
        let pod = facts.pods.get(uid).or_else(|| self.members.reported(uid.as_str()))?;
        if pod.node.is_some() {
            return None;
        }
        let nominate = facts.options.nominate.then(|| self.node_for(gang, uid)).flatten().cloned();
        Some(ActivatedMember { namespace: Arc::clone(&pod.namespace), name: Arc::clone(&pod.name), nominate })
    }

    /// Takes members to activate, at most `limit`, one gang after the other.
    pub(in crate::index) fn take_called(
        &mut self,
        facts: &Facts,
        limit: usize,
    ) -> Vec<(PodUid, ActivatedMember)> {
        let due = self.work.take_called(limit).into_iter();
        due.filter_map(|uid| self.called(facts, &uid).map(|called| (uid, called))).collect()
    }

    /// Takes members of decided gangs to bind although kube-scheduler does not call for them, with the nodes of their reservations.
    pub(in crate::index) fn take_deferred(&mut self, facts: &Facts) -> Vec<Target> {
        let deferred = self.work.take_deferred();
        let target = |uid: PodUid| {
            let node = self.node_for(self.gangs().gang_of(&uid)?, &uid)?.clone();
            let called = self.called(facts, &uid)?;
            Some(Target { namespace: called.namespace.to_string(), name: called.name.to_string(), uid, node })
        };
        deferred.into_iter().filter_map(target).collect()
    }

    /// The node of a member's reservation.
    fn node_for(&self, gang: &GangKey, uid: &PodUid) -> Option<&NodeName> {
        self.gangs().view(gang)?.node_of(uid)
    }
}
