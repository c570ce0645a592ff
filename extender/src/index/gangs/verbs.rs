//! kube-scheduler's calls for members of gangs: the state machine's answer, and the reserved devices granted to the
//! bind in the same step.

use std::sync::Arc;

use gantry_api::placement::GangPlacement;
use gantry_api::{NodeName, PodUid};
use gantry_gang::GangKey;
use gantry_gang::protocol::{Answer, Arrival, Assignment, BindEnd, GangEvent, Offered, Reply};

use crate::index::reservations::Reservations;
use crate::index::{BindError, BindStep, Index, Reserved, Target};
use crate::pod::PodFacts;
use gantry_planner::request::Request;
use gantry_planner::snapshot::NodeIx;

/// Why a member waits that got its reservation after the decision.
const UNWRITTEN: &str = "its reservation is not written to the Gang yet";

/// What a member waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Awaited {
    /// Its gang.
    pub gang: Arc<GangKey>,
    /// Why it cannot get its own reservation, if its gang is decided.
    pub why: Option<Arc<str>>,
}

/// Whether a pod belongs to a gang, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Belongs {
    /// It does.
    Gang,
    /// It does not.
    Single,
    /// The pod is not known: the pod of the call must be read.
    Unknown,
}

impl Index {
    /// Whether a pod belongs to a gang.
    pub fn belongs(&self, uid: &str) -> Belongs {
        let known = self.pods.get(uid);
        let by_itself = known.is_some_and(|pod| self.goes_by_itself(pod));
        if self.gangs.told.contains(uid) && !by_itself {
            return Belongs::Gang;
        }
        match known.is_some() {
            true => Belongs::Single,
            false => Belongs::Unknown,
        }
    }

    /// Whether a pod belongs to no gang, or to a group without a minimum.
    pub(in crate::index) fn goes_by_itself(&self, pod: &PodFacts) -> bool {
        let core = &self.gangs.core;
        let grouped = pod.membership.is_some();
        !grouped || core.gang_of(&pod.uid).is_some() && core.goes_with(&pod.uid).is_none()
    }

    /// The answer of filter for a pod. `offered`: whether a node is among the candidates.
    pub fn answer(&mut self, uid: &PodUid, offered: &dyn Fn(&NodeName) -> bool) -> Answer {
        let event = GangEvent::Filter { pod: uid, offered: Offered(offered) };
        match self.gangs.handle(self.now, event) {
            Reply::Answer(answer) => answer,
            _ => Answer::Single,
        }
    }

    /// The candidates of a call for a member. If they repeatedly lack its own node, the members of its shape are
    /// planned on nodes that were offered.
    pub fn offered(&mut self, uid: &PodUid, nodes: impl Iterator<Item = NodeIx>) {
        let core = &self.gangs.core;
        let gang = core.gang_of(uid).cloned();
        let missed = gang.and_then(|gang| {
            let view = core.view(&gang).filter(|view| view.has_missed_nodes())?;
            let shape = self.gangs.shapes.get(view.shape_of(uid)?)?;
            Some((gang, shape.clone()))
        });
        if let Some((gang, shape)) = missed {
            self.gangs.offers.add(gang, shape, nodes);
        }
    }

    /// Handles a bind: grants devices to a single pod, or to a member of a decided gang. A repeated call gets the same answer.
    /// `request` is the request of a single pod that is not known otherwise.
    ///
    /// # Errors
    /// See [`BindError`]; then nothing is granted.
    pub(in crate::index) fn arrive(
        &mut self,
        target: &Target,
        request: Option<Arc<Request>>,
    ) -> Result<BindStep, BindError> {
        let waits = match self.pods.get(&target.uid) {
            // It is bound already, or elsewhere: there is nothing to wait for.
            Some(pod) => pod.node.is_none(),
            None => true,
        };
        if !waits {
            return self.reserve(target, request).map(BindStep::Single);
        }
        if !self.gangs.leading {
            // Gangs are not known then: a member that waits here must not be taken for a single pod.
            return Err(BindError::Gang("this extender is no longer the leader; try again".into()));
        }
        let event = GangEvent::Arrive { pod: &target.uid, node: &target.node };
        let arrival = match self.gangs.handle(self.now, event) {
            Reply::Arrival(arrival) => arrival,
            _ => Arrival::Single,
        };
        match arrival {
            Arrival::Single => self.reserve(target, request).map(BindStep::Single),
            Arrival::Refuse(why) => Err(BindError::Gang(why.message)),
            Arrival::Wait => self.wait_for(&target.uid),
            Arrival::Go(placed) => match self.reserve_place(target, &placed) {
                Ok(reserved) => Ok(BindStep::Member(reserved)),
                Err(error) => {
                    self.may_move(&target.uid);
                    match error {
                        // The pod that had the devices is still ending, or its end is not certain yet.
                        BindError::NotFree { .. } => Ok(BindStep::Wait(Awaited {
                            gang: placed.gang,
                            why: Some(error.to_string().into()),
                        })),
                        other => Err(other),
                    }
                }
            },
        }
    }

    /// No Binding of a member is being sent: if its reservation is lost, it may get another one.
    pub(in crate::index) fn may_move(&mut self, uid: &PodUid) {
        if self.gangs.leading && !self.reservations.has_bind(uid) {
            self.gangs.handle(self.now, GangEvent::BindEnded { pod: uid, outcome: BindEnd::Failed });
        }
    }

    fn wait_for(&self, uid: &PodUid) -> Result<BindStep, BindError> {
        let gang = self.gangs.core.gang_of(uid).cloned();
        let gang = gang.ok_or_else(|| BindError::UnknownPod(uid.clone()))?;
        let decided = self.gangs.core.view(&gang).is_some_and(|view| view.is_decided());
        let why = decided.then(|| UNWRITTEN.into());
        Ok(BindStep::Wait(Awaited { gang, why }))
    }

    /// A member has waited for the others until its time limit, and the bind fails.
    pub fn gave_up(&mut self, uid: &PodUid) {
        self.gangs.handle(self.now, GangEvent::BarrierTimeout { pod: uid });
    }

    /// The client of a waiting bind has closed the connection.
    pub fn withdraw(&mut self, uid: &PodUid) {
        self.gangs.handle(self.now, GangEvent::Disconnected { pod: uid });
    }

    /// The result of a member's bind.
    pub fn bind_ended(&mut self, uid: &PodUid, end: BindEnd) {
        if end == BindEnd::Gone && self.gangs.told.contains(uid) {
            self.gangs.found_gone.insert(uid.clone(), self.now.at);
        }
        self.gangs.handle(self.now, GangEvent::BindEnded { pod: uid, outcome: end });
    }

    /// Grants exactly the devices of a reservation to the bind of its member.
    fn reserve_place(&mut self, target: &Target, placed: &Assignment) -> Result<Reserved, BindError> {
        let heard = self.heard(target.uid.as_str());
        let request = heard.and_then(|pod| pod.request.clone().ok());
        let request = self.check_pod(target, request)?;
        let Some(request) = request.map(|request| request.of(&self.nodes.resources().managed())) else {
            return Ok(Reserved::AlreadyBound);
        };
        let node = self.node_for(target)?;
        if let Some(repeated) = Reservations::repeat(&mut self.nodes, node, target)? {
            return Ok(repeated);
        }
        let pod = target.uid.as_str();
        let entry = self.nodes.get(node);
        let layouts =
            entry.and_then(|entry| entry.layouts_within(&entry.available(placed, pod)?, &request, pod));
        let layouts = layouts.ok_or_else(|| {
            BindError::not_free(target, "the devices of its reservation are not released yet")
        })?;
        let gang = self.gang_placement(&placed.gang);
        self.reservations.grant(&mut self.nodes, node, target, &request, &layouts, gang)
    }

    /// The part of the fabric of a gang, in short.
    fn gang_placement(&self, gang: &GangKey) -> Option<GangPlacement> {
        let view = self.gangs.core.view(gang)?;
        Some(GangPlacement {
            object: gang.object_name(),
            domain: view.domain().to_string(),
            level: view.compared().and_then(|compared| compared.chosen()).cloned(),
        })
    }

    /// The node of a member's reservation.
    pub(super) fn place_of(&self, gang: &GangKey, uid: &PodUid) -> Option<NodeName> {
        self.gangs.core.view(gang)?.node_of(uid).cloned()
    }
}
