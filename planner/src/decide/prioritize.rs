//! Which of the nodes that passed is best. One winner, because kube-scheduler breaks ties at random and its scale of 0
//! to 10 is too coarse.

use super::{Candidates, Options, Policy};
use crate::devices::DeviceSet;
use crate::layout::Layout;
use crate::request::Request;
use crate::snapshot::{Class, NodeIx, ScoreKey, Snapshot, Standing};

/// The best node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Winner {
    /// Its position among the candidates.
    pub position: u32,
    /// Its number in the snapshot.
    pub node: NodeIx,
    pub score: Score,
}

/// The best of `candidates`, found at `nodes` of the snapshot, for pod `uid` that asks `request`. `None` if no node with an inventory
/// fits: among foreign nodes kube-scheduler's own scores decide.
pub fn prioritize(
    snapshot: &Snapshot,
    options: Options,
    uid: &str,
    request: &Request,
    candidates: &impl Candidates,
    nodes: &[Option<NodeIx>],
) -> Option<Winner> {
    let hold = snapshot.holds.get(uid);
    let mut by_class: Vec<Option<Option<Score>>> = vec![None; snapshot.classes.len()];
    let mut best: Option<Winner> = None;
    for (position, node) in (0u32..).zip(nodes) {
        let Some(node) = *node else {
            continue;
        };
        let Some(class_ix) = snapshot.class(node) else {
            continue;
        };
        let found = match hold {
            // On the held node the pod's own hold must not count against it.
            Some(hold) if hold.node == node => worth(snapshot, node, request, options.policy, &hold.devices),
            _ => match by_class.get_mut(class_ix.0 as usize) {
                Some(known) => {
                    *known.get_or_insert_with(|| worth(snapshot, node, request, options.policy, &[]))
                }
                None => None,
            },
        };
        let Some(found) = found else {
            continue;
        };
        let better = match &best {
            None => true,
            Some(best) => {
                found > best.score
                    || (found == best.score
                        && candidates.name(position as usize) < candidates.name(best.position as usize))
            }
        };
        if better {
            best = Some(Winner { position, node, score: found });
        }
    }
    best
}

/// The score of a node, where `held` devices are held for this very pod.
fn worth(
    snapshot: &Snapshot,
    node: NodeIx,
    request: &Request,
    policy: Policy,
    held: &[DeviceSet],
) -> Option<Score> {
    let Standing::Ours(class) = snapshot.standing(node) else {
        return None;
    };
    if !held.is_empty() {
        let own: Vec<DeviceSet> = class.pools.iter().zip(held).map(|(pool, held)| pool.own(held)).collect();
        return score(class, request, &own, policy).map(|(score, _)| score);
    }
    let work_out = || score(class, request, &[], policy).map(|(score, _)| score);
    match question(class, request, policy) {
        Some(question) => class.scores.get_or(question, work_out),
        None => work_out(),
    }
}

/// The key under which a score is cached; `None` if the request has several containers or resources.
fn question(class: &Class, request: &Request, policy: Policy) -> Option<ScoreKey> {
    let [ask] = &request.asks[..] else {
        return None;
    };
    let (pool, _) = class.pool(ask.resource.as_str())?;
    (ask.containers.len() == 1).then_some(ScoreKey { pool, devices: ask.devices, policy })
}

// The key by which nodes are compared. A larger key is better. Its parts, in order:
//
// 1. **Nodes with an inventory before others.** Nothing is known of the others; they are taken when nothing else is
//    left.
// 2. **Clear of holds.** Devices held for a pod whose bind is on its way are free, but taking them sends that pod
//    elsewhere. They are taken only on a node without others.
// 3. **Bandwidth** of the worst-off container with two GPUs or more. The job runs at it for its whole life, and no
//    packing gives it back. In replays of saturated nodes, stranding before bandwidth is worse on every machine.
//    Single GPUs exchange nothing.
// 4. **Stranded**: how much of what the node's free GPUs are good for is lost. A loose GPU goes before half of a pair,
//    a broken machine before a whole one. Each machine is measured against itself, so that large and small ones
//    compare.
// 5. **Pack**: fewest free GPUs afterwards. Under **spread**, most free GPUs afterwards, and that before 4: nearly
//    every choice strands something, so behind it the policy would have no effect.
// 6. The **name** of the node (outside this key): equal input gives equal decisions.
//
// Bandwidth and loss are compared as whole MB/s and billionths, so that floating-point noise decides nothing.

/// The score of a node for a pod. Larger is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Score {
    clear_of_holds: bool,
    megabytes_per_second: u64,
    then: i64,
    last: i64,
}

impl Score {
    /// Bandwidth of the worst-off container, MB/s; 0 where nothing is exchanged.
    pub fn megabytes_per_second(&self) -> u64 {
        self.megabytes_per_second
    }
}

/// The score of a class for a pod and the layout of each ask; `None` if the pod does not fit. `own` are devices held
/// for this very pod, by pool.
pub fn score(
    class: &Class,
    request: &Request,
    own: &[DeviceSet],
    policy: Policy,
) -> Option<(Score, Vec<Layout>)> {
    let mut total = Score { clear_of_holds: true, megabytes_per_second: 0, then: 0, last: 0 };
    let (mut lost, mut left) = (0, 0);
    let mut layouts = Vec::with_capacity(request.asks.len());
    let mut least: Option<f64> = None;
    for ask in &request.asks {
        let (index, pool) = class.pool(ask.resource.as_str())?;
        let cut = class.cut_beside(index);
        let site = class.site(pool, &cut);
        let mut open = pool.open.clone();
        if let Some(own) = own.get(index) {
            open.add(&(own & &pool.free));
        }
        let (from, layout) = match Layout::best(site, &open, ask) {
            Some(layout) => (&open, layout),
            None => {
                total.clear_of_holds = false;
                (&pool.free, Layout::best(site, &pool.free, ask)?)
            }
        };
        if let Some(gbs) = layout.gbs {
            least = Some(least.map_or(gbs, |least| least.min(gbs)));
        }
        lost += billionths(site.stranded(from, &layout.devices));
        left += i64::try_from(from.len().saturating_sub(layout.devices.len())).unwrap_or(i64::MAX);
        layouts.push(layout);
    }
    total.megabytes_per_second = least.map_or(0, megabytes);
    (total.then, total.last) = match policy {
        Policy::Pack => (-lost, -left),
        Policy::Spread => (left, -lost),
    };
    Some((total, layouts))
}

#[expect(clippy::cast_possible_truncation, reason = "losses lie between -1 and 1")]
fn billionths(value: f64) -> i64 {
    (value * 1e9).round() as i64
}

/// Whole MB/s: the noise of floating point must not decide.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "bandwidths are positive and far below 2^63 MB/s"
)]
pub fn megabytes(gbs: f64) -> u64 {
    (gbs * 1e3).round() as u64
}
