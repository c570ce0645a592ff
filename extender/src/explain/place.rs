//! What a member is told that has a place and that kube-scheduler's own count refuses all the same: nothing as a rule, for its condition is
//! of before it had one; but not where kubelet shows too few devices on its node, for then it is never brought there.

use gantry_api::NodeName;
use gantry_planner::plan::unit;

use crate::request::Request;
use crate::snapshot::{Snapshot, Standing};

/// Why a member does not come to its place on a node.
pub(super) fn note(snapshot: &Snapshot, node: &NodeName, request: &Request) -> Option<String> {
    let Standing::Ours(class) = snapshot.standing(snapshot.find(node.as_str())?) else {
        return None;
    };
    request.asks.iter().find_map(|ask| {
        let (_, pool) = class.pool(ask.resource.as_str())?;
        let healthy = pool.devices.saturating_sub(pool.unhealthy);
        let advertised = pool.advertised? as usize;
        let unit = unit(ask.resource.as_str());
        // Those that are not shown may be ones that nobody has. Its own are not among the free.
        let hidden = healthy.saturating_sub(advertised);
        (hidden > pool.free.len()).then(|| {
            format!("its place is kept on {node}, where kubelet advertises {advertised} of {healthy} healthy {unit}")
        })
    })
}
