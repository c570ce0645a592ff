//! Room that kube-scheduler makes for pods by themselves: from when it has others stopped for one it counts the pod on that node, against
//! pods of no higher priority. A gang planned on what comes free there could not be brought, and the pod would be refused for it. Decides
//! nothing.

use gantry_planner::input::Exact;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::decide;
use crate::devices::DeviceSet;
use crate::index::Index;
use crate::request::Request;
use crate::snapshot::NodeIx;

impl Index {
    /// The nodes where room is made for pods by themselves of some priority or more, without what those will take.
    pub(super) fn beside_nominated(&self, priority: i32) -> BTreeMap<NodeIx, Exact<'_>> {
        let mut pods: Vec<_> = self
            .unschedulable
            .nominated()
            .filter_map(|(uid, node)| Some((self.pods.get(uid)?, self.nodes.find(node.as_str())?)))
            .filter(|(pod, _)| pod.priority >= priority)
            .collect();
        pods.sort_unstable_by_key(|(pod, _)| (Reverse(pod.priority), &pod.uid));
        let mut nodes: BTreeMap<NodeIx, Exact<'_>> = BTreeMap::new();
        for (pod, node) in pods {
            let Some(exact) = nodes.remove(&node).or_else(|| self.exact(node)) else {
                continue;
            };
            let left = match &pod.request {
                Ok(request) => self.without(&exact, &request.of(&self.nodes.resources().managed())),
                Err(_) => exact,
            };
            nodes.insert(node, left);
        }
        nodes
    }

    /// A node without what a pod takes of it: where it fits the best for it; and before that everything there that it can use, up to what
    /// it wants.
    fn without<'a>(&self, node: &Exact<'a>, request: &Request) -> Exact<'a> {
        let layouts = decide::judge(&node.class, request)
            .ok()
            .and_then(|()| decide::score(&node.class, request, &[], self.options.policy));
        let mut left = node.clone();
        for (number, ask) in request.asks.iter().enumerate() {
            let pools = &mut left.class.pools;
            let Some(pool) = pools.iter_mut().find(|pool| pool.resource == ask.resource) else {
                continue;
            };
            let taken: DeviceSet = match layouts.as_ref().and_then(|(_, layouts)| layouts.get(number)) {
                Some(layout) => layout.devices.clone(),
                None => pool.free.iter().take(ask.devices as usize).collect(),
            };
            pool.free.remove(&taken);
            pool.open.remove(&taken);
        }
        left
    }
}
