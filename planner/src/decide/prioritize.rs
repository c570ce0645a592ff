//! Which of the nodes that passed is best. One winner, because kube-scheduler breaks ties at random and its scale of 0
//! to 10 is too coarse.

use super::{Candidates, Options, Policy};
use crate::devices::DeviceSet;
use crate::kind::Spot;
use crate::layout::{AlignedAsks, Layout, Offer};
use crate::quality::{Quality, QualityPart, QualitySum};
use crate::request::Request;
use crate::snapshot::{Class, NodeIx, NodeState, ScoreKey, Snapshot};
use gantry_api::Placement;
use gantry_api::placement::{ComparedNode, ComparedNodes, Loss};

/// The best node.
#[derive(Debug, Clone, PartialEq)]
pub struct Winner {
    /// Its position among the candidates.
    pub position: u32,
    /// Its number in the snapshot.
    pub node: NodeIx,
    pub score: Score,
    /// The nodes that lost.
    pub compared: ComparedNodes,
}

/// The candidates of one class.
#[derive(Debug, Clone, Copy, Default)]
struct ClassCandidates {
    count: u32,
    /// Positions of two of them.
    first: u32,
    last: u32,
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
    let mut by_class = vec![ClassCandidates::default(); snapshot.classes.len()];
    let mut held = None;
    for (position, node) in known(nodes) {
        if hold.is_some_and(|hold| hold.node == node) {
            held = Some((position, node));
            continue;
        }
        let class = snapshot.class(node);
        if let Some(alike) = class.and_then(|class| by_class.get_mut(class.0 as usize)) {
            if alike.count == 0 {
                alike.first = position;
            }
            alike.count += 1;
            alike.last = position;
        }
    }
    // Thousands of nodes are of few classes: scores are compared by class.
    let score_at = |position: u32, held: &[DeviceSet]| {
        let node = (*nodes.get(position as usize)?)?;
        worth(snapshot, node, request, options.policy, held)
    };
    let scores = by_class.iter().map(|alike| (alike.count > 0).then(|| score_at(alike.first, &[])).flatten());
    let scores: Vec<Option<Score>> = scores.collect();
    // On the held node the pod's own hold must not count against it.
    let held = held
        .zip(hold)
        .and_then(|((position, node), hold)| Some((position, node, score_at(position, &hold.devices)?)));
    let of_held = held.map(|(.., score)| score);
    let score = scores.iter().copied().chain([of_held]).max()??;
    let is_best: Vec<bool> = scores.iter().map(|found| *found == Some(score)).collect();
    let mut best = held.filter(|(.., found)| *found == score).map(|(position, node, _)| (position, node));
    for (position, node) in known(nodes) {
        let class = snapshot.class(node).map(|class| class.0 as usize);
        if !class.and_then(|class| is_best.get(class)).is_some_and(|best| *best)
            || hold.is_some_and(|hold| hold.node == node)
        {
            continue;
        }
        let precedes = |at: u32| candidates.name(position as usize) < candidates.name(at as usize);
        if best.is_none_or(|(at, _)| precedes(at)) {
            best = Some((position, node));
        }
    }
    let (position, node) = best?;
    let fits = by_class.iter().zip(&scores).filter(|(_, score)| score.is_some());
    let fitting = fits.map(|(alike, _)| alike.count).sum::<u32>() + u32::from(held.is_some());
    // The winner is no other.
    let class = snapshot.class(node).filter(|_| held.is_none_or(|(at, ..)| at != position));
    if let Some(alike) = class.and_then(|class| by_class.get_mut(class.0 as usize)) {
        alike.count -= 1;
        if alike.first == position {
            alike.first = alike.last;
        }
    }
    let policy = request.placement.policy.unwrap_or(options.policy);
    let others = others(&by_class, &scores, score, policy, candidates);
    Some(Winner { position, node, score, compared: ComparedNodes { nodes: fitting, others } })
}

/// The candidates that the snapshot has, with their positions.
fn known(nodes: &[Option<NodeIx>]) -> impl Iterator<Item = (u32, NodeIx)> {
    (0..).zip(nodes).filter_map(|(position, node)| Some((position, (*node)?)))
}

/// The best groups of alike nodes.
fn others(
    groups: &[ClassCandidates],
    scores: &[Option<Score>],
    best: Score,
    policy: Policy,
    candidates: &impl Candidates,
) -> Vec<ComparedNode> {
    let rest = groups.iter().zip(scores).filter(|(group, _)| group.count > 0);
    let rest = rest.filter_map(|(group, score)| Some(((*score)?, group.first, group.count)));
    let mut rest: Vec<(Score, u32, u32)> = rest.collect();
    let order = |a: &(Score, u32, u32), b: &(Score, u32, u32)| b.0.cmp(&a.0).then(a.1.cmp(&b.1));
    if rest.len() > Placement::MAX_OTHERS {
        rest.select_nth_unstable_by(Placement::MAX_OTHERS, order);
        rest.truncate(Placement::MAX_OTHERS);
    }
    rest.sort_unstable_by(order);
    rest.into_iter()
        .map(|(score, at, alike)| ComparedNode {
            node: candidates.name(at as usize).into(),
            alike,
            loss: score.loss_to(best, policy),
        })
        .collect()
}

/// The score of a node, where `held` devices are held for this very pod.
fn worth(
    snapshot: &Snapshot,
    node: NodeIx,
    request: &Request,
    policy: Policy,
    held: &[DeviceSet],
) -> Option<Score> {
    let NodeState::Ours(class) = snapshot.node_state(node) else {
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

/// The key under which a score is cached; `None` if the request has several containers or resources, or
/// if CPUs count.
fn question(class: &Class, request: &Request, policy: Policy) -> Option<ScoreKey> {
    let [ask] = &request.asks[..] else {
        return None;
    };
    if !request.placement.is_empty() {
        return None;
    }
    let (index, pool) = class.pool(ask.resource.as_str())?;
    if pool.alignment.as_ref().is_some_and(|alignment| alignment.counts(&ask.numa)) {
        return None;
    }
    (ask.containers.len() == 1).then_some(ScoreKey { pool: index, devices: ask.devices, policy })
}

// The key by which nodes are compared. A larger key is better. Its parts, in order:
//
// 1. **Nodes with an inventory before others.** Nothing is known of the others; they are taken when nothing else is
//    left.
// 2. **Clear of holds.** Devices held for a pod whose bind is on its way are free, but taking them sends that pod
//    elsewhere. They are taken only on a node without others.
// 3. The **model** of the GPUs: the one that stands first in the pod's list.
// 4. **Preferences** of the pod for a link and a bandwidth, as many as are met.
// 5. **Economy**: the cheapest class of nodes, if the pod asks for it.
// 6. **Bandwidth** of the worst-off container with two GPUs or more. The job runs at it for its whole life, and no
//    packing gives it back. In replays of saturated nodes, stranding before bandwidth is worse on every machine.
//    Single GPUs exchange nothing.
// 7. The **link** of that container, where the bandwidth is equal: PCIe switches before a host bridge, that before sockets.
// 8. **Stranded**: how much of what the node's free GPUs are good for is lost. A loose GPU goes before half of a pair,
//    a broken machine before a whole one. Each machine is measured against itself, so that large and small ones
//    compare.
// 9. **Pack**: fewest free GPUs afterwards. Under **spread**, most free GPUs afterwards, and that before 8: nearly
//    every choice strands something, so behind it the policy would have no effect.
// 10. The **name** of the node (outside this key): equal input gives equal decisions.
//
// Bandwidth and loss are compared as whole MB/s and billionths, so that floating-point noise decides nothing.

/// The score of a node for a pod. Larger is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Score {
    clear_of_holds: bool,
    quality: Quality,
    then: i64,
    last: i64,
}

impl Score {
    /// Bandwidth of the worst-off container, MB/s; 0 where nothing is exchanged.
    pub fn megabytes_per_second(&self) -> u64 {
        self.quality.megabytes_per_second
    }

    /// Why a node of this score was not chosen over one of score `best`: the first part of the key that differs.
    fn loss_to(&self, best: Self, policy: Policy) -> Loss {
        let (then, last) = match policy {
            Policy::Pack => (Loss::Stranded, Loss::Emptier),
            Policy::Spread => (Loss::Fuller, Loss::Stranded),
        };
        if self.clear_of_holds != best.clear_of_holds {
            return Loss::Reserved;
        }
        if let Some(part) = self.quality.decided_by(&best.quality) {
            return match part {
                QualityPart::Model => Loss::Model,
                QualityPart::Met => Loss::Preference,
                QualityPart::Cost => Loss::Cost,
                QualityPart::Bandwidth => Loss::Bandwidth {
                    gbs: gbs(self.quality.megabytes_per_second),
                    chosen_gbs: gbs(best.quality.megabytes_per_second),
                },
                QualityPart::Link => Loss::Link,
            };
        }
        if self.then != best.then {
            then
        } else if self.last != best.last {
            last
        } else {
            Loss::Name
        }
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
    let mut gathered = QualitySum::new(&request.placement);
    let cuts: Vec<Vec<Spot>> = request.asks.iter().map(|ask| class.cut_for(ask)).collect();
    let (mut open, mut free) = (Vec::with_capacity(request.asks.len()), Vec::new());
    for (ask, cut) in request.asks.iter().zip(&cuts) {
        let (index, pool) = class.pool(ask.resource.as_str())?;
        let mut devices = pool.open.clone();
        if let Some(own) = own.get(index) {
            devices.add(&(own & &pool.free));
        }
        open.push(devices);
        free.push(Offer { site: class.site(pool, cut), free: &pool.free, ask });
    }
    let open = free.iter().zip(&open).map(|(offer, open)| Offer { free: open, ..*offer });
    let (offers, layouts) = laid(&open.collect::<Vec<_>>(), &free)?;
    let clear_of_holds = offers.iter().zip(&free).all(|(from, free)| !std::ptr::eq(from.free, free.free));
    let (mut lost, mut left) = (0, 0);
    for (offer, layout) in offers.iter().zip(&layouts) {
        gathered.add(offer.site, layout);
        lost += billionths(offer.site.stranded(offer.free, &layout.devices));
        left += i64::try_from(offer.free.len().saturating_sub(layout.devices.len())).unwrap_or(i64::MAX);
    }
    let (then, last) = match request.placement.policy.unwrap_or(policy) {
        Policy::Pack => (-lost, -left),
        Policy::Spread => (left, -lost),
    };
    Some((Score { clear_of_holds, quality: gathered.quality(class), then, last }, layouts))
}

/// The best layout of each ask, out of the open devices where these are enough, else out of the free ones.
fn laid<'a>(open: &[Offer<'a>], free: &[Offer<'a>]) -> Option<(Vec<Offer<'a>>, Vec<Layout>)> {
    if let Some(layouts) = Layout::best_of_all(open) {
        return Some((open.to_vec(), layouts));
    }
    if open.len() == 1 || AlignedAsks::of(free).is_some() {
        return Some((free.to_vec(), Layout::best_of_all(free)?));
    }
    let best = |offer: &Offer<'a>| Some((*offer, Layout::best(offer.site, offer.free, offer.ask)?));
    open.iter().zip(free).map(|(open, free)| best(open).or_else(|| best(free))).collect()
}

#[expect(clippy::cast_possible_truncation, reason = "losses lie between -1 and 1")]
fn billionths(value: f64) -> i64 {
    (value * 1e9).round() as i64
}

/// GB/s, to one decimal.
#[expect(clippy::cast_precision_loss, reason = "bandwidths are far below 2^52 MB/s")]
fn gbs(megabytes: u64) -> f64 {
    (megabytes as f64 / 100.0).round() / 10.0
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
