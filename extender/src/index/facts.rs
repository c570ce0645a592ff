//! The facts of the cluster that decisions are made on: each part in the type that owns it.

use std::sync::Arc;

use gantry_api::{NodeName, PodUid};
use gantry_planner::decide::Options;
use gantry_planner::request::Request;
use gantry_planner::snapshot::{NodeIx, NominatedRequest, NominatedRequests, Snapshot};

use super::disruption_budgets::DisruptionBudgets;
use super::event_clock::EventClock;
use super::list_tracker::ListTracker;
use super::node_resources_table::NodeResourcesTable;
use super::node_table::NodeTable;
use super::pod_store::PodStore;
use super::reservations::{BindError, Reservations, Target};
use super::scheduler_set::SchedulerSet;
use super::unschedulable_queue::UnschedulableQueue;
use super::volume_table::VolumeTable;
use crate::pod::PodFacts;
use crate::watched::WatchedResources;

/// What watches and binds have shown, and what was published of it last.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) options: Options,
    pub(super) clock: EventClock,
    pub(super) lists: ListTracker,
    pub(super) nodes: NodeTable,
    pub(super) pods: PodStore,
    pub(super) reservations: Reservations,
    pub(super) unschedulable: UnschedulableQueue,
    pub(super) resources: NodeResourcesTable,
    pub(super) volumes: VolumeTable,
    pub(super) schedulers: SchedulerSet,
    pub(super) budgets: DisruptionBudgets,
    pub(super) published: Arc<Snapshot>,
}

impl Facts {
    /// No facts. `run` distinguishes the plans of this process from those of an earlier one.
    pub(super) fn new(options: Options, watched: &WatchedResources, run: String) -> Self {
        Self {
            options,
            clock: EventClock::default(),
            lists: ListTracker::default(),
            nodes: NodeTable::new(watched),
            pods: PodStore::default(),
            reservations: Reservations::new(run),
            unschedulable: UnschedulableQueue::default(),
            resources: NodeResourcesTable::default(),
            volumes: VolumeTable::default(),
            schedulers: SchedulerSet::default(),
            budgets: DisruptionBudgets::default(),
            published: Arc::default(),
        }
    }

    /// Adds to a pod's needs the reach of its volumes, and those of its labels that are in terms.
    pub(super) fn complete_needs(&mut self, pod: &mut PodFacts) {
        let volumes = self.volumes.of(pod);
        pod.needs = self.resources.completed(&pod.needs, &pod.profile, volumes);
    }

    /// Nodes that kube-scheduler nominated for single pods, for decisions about others.
    pub(super) fn promised(&self) -> Option<Arc<NominatedRequests>> {
        let managed = self.nodes.resources().managed();
        let promise = |(uid, node): (&PodUid, &NodeName)| {
            let pod = self.pods.get(uid)?;
            let request = pod.request.as_ref().ok()?;
            Some(NominatedRequest {
                node: self.nodes.find(node.as_str())?,
                priority: pod.priority,
                request: request.of(&managed),
            })
        };
        NominatedRequests::new(self.unschedulable.nominated().filter_map(promise).collect())
    }

    /// Whether a nomination ended. Pods that were refused for it may fit now.
    pub(super) fn end_nominations(&mut self) -> bool {
        let nodes = self.unschedulable.take_denominated(self.clock.now().at);
        for node in nodes.iter().filter_map(|node| self.nodes.find(node.as_str())) {
            self.unschedulable.gained(node);
        }
        !nodes.is_empty()
    }

    /// Whether more fits on a node with devices than when this was last called.
    pub(super) fn take_resources_gained(&mut self) -> bool {
        let gained = self.resources.take_gained();
        gained.into_iter().any(|node| self.nodes.has_inventory(node))
    }

    /// The node of a bound pod.
    pub(super) fn node_of(&self, pod: &PodFacts) -> Option<NodeIx> {
        pod.node.as_ref().and_then(|node| self.nodes.find(node.as_str()))
    }

    /// Checks the pod of a bind; what it asks for, or `None` if it is on that node already.
    pub(super) fn check_pod(
        &self,
        target: &Target,
        request: Option<Arc<Request>>,
    ) -> Result<Option<Arc<Request>>, BindError> {
        let Some(pod) = self.pods.get(&target.uid) else {
            let request = request.or_else(|| self.reservations.holds().request(target.uid.as_str()));
            let request = request.ok_or_else(|| BindError::UnknownPod(target.uid.clone()))?;
            return Ok(Some(request));
        };
        if *pod.namespace != *target.namespace || *pod.name != *target.name {
            return Err(BindError::OtherName {
                uid: target.uid.clone(),
                actual: format!("{}/{}", pod.namespace, pod.name),
                asked: format!("{}/{}", target.namespace, target.name),
            });
        }
        match (&pod.node, &pod.request) {
            (Some(node), _) if *node == target.node => Ok(None),
            (Some(node), _) => Err(BindError::BoundElsewhere(node.clone())),
            (None, Ok(request)) => Ok(Some(Arc::clone(request))),
            (None, Err(error)) => Err(BindError::Request(error.to_string())),
        }
    }
}
