//! Which of the nodes that passed is best. One winner, because kube-scheduler breaks ties at random and its scale of 0
//! to 10 is too coarse.

use super::{Candidates, Options, Policy, Score, score};
use crate::devices::DeviceSet;
use crate::request::Request;
use crate::snapshot::{Class, NodeIx, ScoreKey, Snapshot, Standing};

/// The best node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Winner {
    /// Its position among the candidates.
    pub position: u32,
    /// Its number in the snapshot.
    pub node: NodeIx,
    /// Its score.
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
