//! Devices that kube-scheduler frees for nominated pods. kube-scheduler keeps pods of lower priority off them until
//! filter refuses the nominated pod; and filter does so until the last device is returned. Devices return one by one
//! and must not go to other pods meanwhile.

use std::collections::HashMap;
use std::sync::Arc;

use gantry_api::ResourceName;

use super::{Class, NodeIx};
use crate::request::Request;

/// The text for a pod that is refused because of it. It does not name the nominated pod, because that changes.
pub const NOMINATED: &str = "node(s) where room is made for a pod of higher priority";

/// The request of one nominated pod.
#[derive(Debug, Clone)]
pub struct NominatedRequest {
    /// Where.
    pub node: NodeIx,
    /// The pod's priority. Pods of the same or a higher one are not kept off.
    pub priority: i32,
    /// What the pod asks for.
    pub request: Arc<Request>,
}

/// Requests of nominated pods by node: a call looks at each of its nodes.
#[derive(Debug, Clone)]
pub struct NominatedRequests(HashMap<NodeIx, Vec<NominatedRequest>>);

impl NominatedRequests {
    /// `None` without any.
    pub fn new(promises: Vec<NominatedRequest>) -> Option<Arc<Self>> {
        let mut by_node: HashMap<NodeIx, Vec<NominatedRequest>> = HashMap::new();
        for promise in promises {
            by_node.entry(promise.node).or_default().push(promise);
        }
        (!by_node.is_empty()).then(|| Arc::new(Self(by_node)))
    }

    /// Whether a node of this class holds a pod of a priority in addition to the nominated pods of higher priority.
    pub fn leaves(&self, node: NodeIx, class: &Class, priority: i32, request: &Request) -> bool {
        let Some(here) = self.0.get(&node) else {
            return true;
        };
        request.asks.iter().all(|ask| {
            let promised = to_higher(here, priority, &ask.resource);
            let pool = class.pool(ask.resource.as_str());
            promised == 0 || pool.is_none_or(|(_, pool)| pool.free.len() >= promised + ask.devices as usize)
        })
    }
}

fn to_higher(here: &[NominatedRequest], priority: i32, resource: &ResourceName) -> usize {
    let higher = here.iter().filter(|promise| promise.priority > priority);
    let asks = higher.flat_map(|promise| &promise.request.asks);
    asks.filter(|ask| ask.resource == *resource).map(|ask| ask.devices as usize).sum()
}
