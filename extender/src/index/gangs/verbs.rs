//! What kube-scheduler's calls for members of gangs come to: the state machine's answer, and the devices of the place set aside for the
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
    /// What keeps its own place from it, where its gang is decided.
    pub why: Option<Arc<str>>,
}

/// Whether a pod belongs to a gang, as far as that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Belongs {
    /// It does.
    Gang,
    /// It does not.
    Single,
    /// Nothing is known of the pod: what was sent with the call must say.
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

    /// Whether a pod is of no gang, or of a group of which each goes by itself.
    pub(in crate::index) fn goes_by_itself(&self, pod: &PodFacts) -> bool {
        let core = &self.gangs.core;
        let grouped = pod.membership.is_some();
        !grouped || core.gang_of(&pod.uid).is_some() && core.goes_with(&pod.uid).is_none()
    }

    /// What filter answers for a pod. `offered`: whether a node is among those asked about.
    pub fn answer(&mut self, uid: &PodUid, offered: &dyn Fn(&NodeName) -> bool) -> Answer {
        let event = GangEvent::Filter { pod: uid, offered: Offered(offered) };
        match self.gangs.handle(self.now, event) {
            Reply::Answer(answer) => answer,
            _ => Answer::Single,
        }
    }

    /// The nodes that a call for a member was about. Where its own was not among them, and not for the first time, those of its shape are
    /// planned on nodes that were.
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

    /// A bind has come: sets devices aside for a single pod, or for a member whose gang is decided. Repeated, it answers the same.
    /// `request` is what a single pod asks for where nothing else says so.
    ///
    /// # Errors
    /// See [`BindError`]; then nothing is set aside.
    pub(in crate::index) fn arrive(
        &mut self,
        target: &Target,
        request: Option<Arc<Request>>,
    ) -> Result<BindStep, BindError> {
        let waits = match self.pods.get(&target.uid) {
            // Done already, or elsewhere: there is nothing to wait for.
            Some(pod) => pod.node.is_none(),
            None => true,
        };
        if !waits {
            return self.reserve(target, request).map(BindStep::Single);
        }
        if !self.gangs.leading {
            // Of gangs nothing is known then: a member that waits here must not be taken for a single pod.
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
                        // Whoever had the devices is still on its way out, or its end is not certain yet.
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

    /// No Binding of a member is on its way: if its place is lost, it may have another.
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

    /// A member has waited for its siblings as long as it may, and kube-scheduler is told so.
    pub fn gave_up(&mut self, uid: &PodUid) {
        self.gangs.handle(self.now, GangEvent::BarrierTimeout { pod: uid });
    }

    /// Whoever waited for a bind hung up.
    pub fn withdraw(&mut self, uid: &PodUid) {
        self.gangs.handle(self.now, GangEvent::Disconnected { pod: uid });
    }

    /// How the bind of a member ended.
    pub fn bind_ended(&mut self, uid: &PodUid, end: BindEnd) {
        if end == BindEnd::Gone && self.gangs.told.contains(uid) {
            self.gangs.found_gone.insert(uid.clone(), self.now.at);
        }
        self.gangs.handle(self.now, GangEvent::BindEnded { pod: uid, outcome: end });
    }

    /// Sets the devices of a place aside for the bind of the member that has it: exactly those.
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

    /// Where a gang was placed, in short.
    fn gang_placement(&self, gang: &GangKey) -> Option<GangPlacement> {
        let view = self.gangs.core.view(gang)?;
        Some(GangPlacement {
            object: gang.object_name(),
            domain: view.domain().to_string(),
            level: view.compared().and_then(|compared| compared.chosen()).cloned(),
        })
    }

    /// The node of the place that a member has.
    pub(super) fn place_of(&self, gang: &GangKey, uid: &PodUid) -> Option<NodeName> {
        self.gangs.core.view(gang)?.node_of(uid).cloned()
    }
}
