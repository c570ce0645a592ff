//! Room that is being made for pods by themselves. kube-scheduler keeps pods of lower priority off it until filter refuses the pod that it
//! is for; and filter does, until the last of the devices is given back. They come one after the other, and must not be anybody's
//! meanwhile. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use gantry_api::ResourceName;

use super::{Class, NodeIx};
use crate::request::Request;

/// What a pod that is refused for it is told. Of whom the room is for no word, for that changes.
pub const PROMISED: &str = "node(s) where room is made for a pod of higher priority";

/// Room for one pod.
#[derive(Debug, Clone)]
pub struct Promise {
    /// Where.
    pub node: NodeIx,
    /// The pod's priority. Those of no lower one go where they like.
    pub priority: i32,
    /// What the pod asks for.
    pub request: Arc<Request>,
}

/// Room that is being made, by node: a call asks for each of its nodes.
#[derive(Debug, Clone)]
pub struct Promised(HashMap<NodeIx, Vec<Promise>>);

impl Promised {
    /// `None` for nobody.
    pub fn new(promises: Vec<Promise>) -> Option<Arc<Self>> {
        let mut by_node: HashMap<NodeIx, Vec<Promise>> = HashMap::new();
        for promise in promises {
            by_node.entry(promise.node).or_default().push(promise);
        }
        (!by_node.is_empty()).then(|| Arc::new(Self(by_node)))
    }

    /// Whether a node, of this class, has enough for a pod of a priority beside what is promised to pods of a higher one.
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

fn to_higher(here: &[Promise], priority: i32, resource: &ResourceName) -> usize {
    let higher = here.iter().filter(|promise| promise.priority > priority);
    let asks = higher.flat_map(|promise| &promise.request.asks);
    asks.filter(|ask| ask.resource == *resource)
        .map(|ask| ask.devices as usize)
        .sum()
}
