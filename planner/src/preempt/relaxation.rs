//! The least loss that could make room: a lower bound, and the parts of units whose end it assumes.
//!
//! Each node by itself has a frontier: for every number of members the cheapest pods that would have to go. The cheapest
//! combination over nodes that holds the minimum is the bound. It ignores budgets, rules among pods, and that a gang on
//! several nodes ends everywhere; whether the gang then fits is for the caller to verify.

use std::collections::BTreeMap;

use gantry_api::ResourceName;
use gantry_gang::Resources;
use gantry_gang::protocol::PlanRequest;

use super::loss::Loss;
use super::parts::{Part, Parts};
use super::{CandidatePod, ExactInput};
use crate::plan::Capacity;
use crate::snapshot::{NodeIx, NodeState};

/// Resources that are counted: up to four of devices, and pods, CPU, memory, ephemeral storage.
const DEVICES: usize = 4;
const DIMENSIONS: usize = DEVICES + 4;
type Amounts = [i64; DIMENSIONS];

/// Numbers of members of several shapes that are distinguished; more count as members of the smallest shape.
const MOST_COUNTS: usize = 1 << 11;
/// Choices that a combination remembers, over all nodes.
const MOST_CHOICES: usize = 1 << 23;
/// Sets of pods of one node with different effects.
const MOST_SETS: usize = 512;
/// Numbers of members by shape that one node could take.
const MOST_HOSTED: usize = 512;

/// What the end of a part frees on a node, and costs there.
#[derive(Debug)]
struct Item {
    part: usize,
    frees: Amounts,
    loss: Loss,
}

/// Members that a node takes once some open parts are gone.
#[derive(Debug)]
struct HostOption {
    members: Vec<u32>,
    loss: Loss,
    parts: Vec<usize>,
}

/// A node that could take members.
#[derive(Debug)]
struct Site {
    /// Numbers of members by shape, each with what they need beyond what is free.
    hosted: Vec<(Vec<u32>, Amounts)>,
    items: Vec<Item>,
    /// Its frontier before anything is decided.
    frontier: Vec<HostOption>,
}

/// What is decided about a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Open,
    Goes,
    Stays,
}

/// A bound, and the open parts whose end it assumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bound {
    pub(super) loss: Loss,
    pub(super) parts: Vec<usize>,
}

/// The nodes, and what is needed of them.
#[derive(Debug)]
pub(super) struct Relaxation {
    sites: Vec<Site>,
    /// Sites, by set of nodes of which one has to hold all members.
    grounds: Vec<Vec<usize>>,
    counts: CountTable,
    /// What is decided before the search begins.
    fates: Vec<Fate>,
}

impl Relaxation {
    /// `None` if the gang fits nowhere, or where there is too much to count.
    pub(super) fn new(
        cluster: &ExactInput<'_, '_>,
        wanted: &PlanRequest,
        parts: &Parts<'_>,
        fates: Vec<Fate>,
    ) -> Option<Self> {
        let pods: Vec<&CandidatePod> = parts.all.iter().flat_map(|part| part.pods.iter().copied()).collect();
        let mut capacity = cluster.without(&pods, |input| Capacity::of(input, wanted))?;
        capacity.raise_to(&Capacity::of(cluster.input, wanted)?);
        let scale = Scale::of(cluster, &capacity)?;
        let counts = CountTable::of(&scale.mixes)?;
        let mut sites: BTreeMap<NodeIx, Site> = BTreeMap::new();
        for node in capacity.grounds.iter().flatten() {
            if !sites.contains_key(node)
                && let Some(hosted) = scale.hosted(cluster, &capacity, *node, &counts.most)?
            {
                sites.insert(*node, Site { hosted, items: Vec::new(), frontier: Vec::new() });
            }
        }
        for (number, part) in parts.all.iter().enumerate() {
            add_items(&mut sites, number, part, parts, &scale, cluster);
        }
        let number: BTreeMap<NodeIx, usize> = sites.keys().copied().zip(0..).collect();
        let of_ground =
            |ground: &Vec<NodeIx>| ground.iter().filter_map(|node| number.get(node).copied()).collect();
        let grounds: Vec<Vec<usize>> = capacity.grounds.iter().map(of_ground).collect();
        let largest = grounds.iter().map(Vec::len).max().unwrap_or(0);
        if largest.saturating_mul(counts.len()) > MOST_CHOICES {
            return None;
        }
        let mut sites: Vec<Site> = sites.into_values().collect();
        for site in &mut sites {
            site.frontier = site.frontier(&fates)?;
        }
        Some(Self { sites, grounds, counts, fates })
    }

    /// The bound under decisions; `None` if nothing open makes room. Adds to `steps` what it takes.
    pub(super) fn bound(&self, fates: &[Fate], steps: &mut u64) -> Option<Bound> {
        let differs = |site: &Site| site.items.iter().any(|item| fates[item.part] != self.fates[item.part]);
        let mut changed: BTreeMap<usize, Vec<HostOption>> = BTreeMap::new();
        for (number, site) in self.sites.iter().enumerate().filter(|(_, site)| differs(site)) {
            changed.insert(number, site.frontier(fates)?);
        }
        let frontier = |site: usize| changed.get(&site).unwrap_or(&self.sites[site].frontier).as_slice();
        let bounds = self.grounds.iter().filter_map(|ground| {
            let frontiers: Vec<&[HostOption]> = ground.iter().map(|site| frontier(*site)).collect();
            let options: usize = frontiers.iter().map(|frontier| frontier.len()).sum();
            *steps = steps.saturating_add((options * self.counts.len()) as u64);
            self.counts.combine(&frontiers)
        });
        bounds.min_by_key(|bound| bound.loss)
    }
}

impl Site {
    /// The least loss by number of members; `None` if too many sets of pods have different effects.
    fn frontier(&self, fates: &[Fate]) -> Option<Vec<HostOption>> {
        let mut useful: Amounts = [0; DIMENSIONS];
        for (_, lacks) in &self.hosted {
            useful.iter_mut().zip(lacks).for_each(|(useful, lacks)| *useful = (*useful).max(*lacks));
        }
        self.frontier_of(fates, &useful).or_else(|| {
            // Devices alone.
            useful[DEVICES..].fill(0);
            self.frontier_of(fates, &useful)
        })
    }

    fn frontier_of(&self, fates: &[Fate], useful: &Amounts) -> Option<Vec<HostOption>> {
        let capped = |a: &Amounts, b: &Amounts| {
            let mut sum = *a;
            for ((sum, more), most) in sum.iter_mut().zip(b).zip(useful) {
                *sum = sum.saturating_add(*more).min(*most);
            }
            sum
        };
        let gone = self.items.iter().filter(|item| fates[item.part] == Fate::Goes);
        let base = gone.fold([0; DIMENSIONS], |base, item| capped(&base, &item.frees));
        // By effect: the least loss, and the last item of the set, each with the set before it.
        let mut sets: BTreeMap<Amounts, (Loss, Option<usize>)> = [(base, (Loss::default(), None))].into();
        let mut links: Vec<(usize, Option<usize>)> = Vec::new();
        for item in self.items.iter().filter(|item| fates[item.part] == Fate::Open) {
            let more: Vec<(Amounts, Loss, Option<usize>)> = sets
                .iter()
                .map(|(frees, (loss, last))| (capped(frees, &item.frees), *loss + item.loss, *last))
                .collect();
            for (frees, loss, last) in more {
                if sets.get(&frees).is_none_or(|(known, _)| loss < *known) {
                    links.push((item.part, last));
                    sets.insert(frees, (loss, Some(links.len() - 1)));
                }
            }
            if sets.len() > MOST_SETS {
                return None;
            }
        }
        let parts_of = |mut last: Option<usize>| {
            let mut parts = Vec::new();
            while let Some((part, before)) = last.and_then(|last| links.get(last)) {
                parts.push(*part);
                last = *before;
            }
            parts
        };
        let mut frontier: Vec<HostOption> = Vec::new();
        // The most members first: fewer count only at a lower loss.
        for (members, lacks) in self.hosted.iter().rev() {
            let enough = |frees: &Amounts| {
                let mut each = frees.iter().zip(lacks).zip(useful);
                each.all(|((frees, lacks), useful)| frees >= lacks.min(useful))
            };
            let sets = sets.iter().filter(|(frees, _)| enough(frees));
            let Some((_, (loss, last))) = sets.min_by_key(|(_, (loss, _))| *loss) else {
                continue;
            };
            let better = |known: &HostOption| {
                known.loss <= *loss && known.members.iter().zip(members).all(|(known, own)| known >= own)
            };
            if !frontier.iter().any(better) {
                frontier.push(HostOption { members: members.clone(), loss: *loss, parts: parts_of(*last) });
            }
        }
        Some(frontier)
    }
}

/// Adds what a part frees on each site. On several sites each has its share of the loss.
fn add_items(
    sites: &mut BTreeMap<NodeIx, Site>,
    number: usize,
    part: &Part<'_>,
    parts: &Parts<'_>,
    scale: &Scale<'_>,
    cluster: &ExactInput<'_, '_>,
) {
    let mut by_node: BTreeMap<NodeIx, (Amounts, Loss)> = BTreeMap::new();
    for pod in part.pods.iter().filter(|pod| sites.contains_key(&pod.node)) {
        let (frees, loss) = by_node.entry(pod.node).or_default();
        for (frees, more) in frees.iter_mut().zip(scale.frees(cluster, pod)) {
            *frees += more;
        }
        *loss += Loss {
            devices: u32::try_from(pod.count()).unwrap_or(u32::MAX),
            pods: 1,
            needed: u32::from(!parts.units[part.unit].is_elastic()),
            unsaved: u32::from(!parts.units[part.unit].candidate.checkpointed),
            ..Loss::default()
        };
    }
    let alone = by_node.len() == 1;
    for (node, (frees, loss)) in by_node {
        if let Some(site) = sites.get_mut(&node) {
            let loss = if alone { part.loss } else { loss };
            site.items.push(Item { part: number, frees, loss });
        }
    }
}

/// What members of each shape need, as amounts.
struct Scale<'w> {
    resources: Vec<&'w ResourceName>,
    needs: Vec<Amounts>,
    mixes: Vec<Vec<u32>>,
    /// Shapes are not distinguished.
    is_joint: bool,
}

impl<'w> Scale<'w> {
    /// `None` if the shapes ask for too many resources.
    fn of<'a: 'w>(cluster: &ExactInput<'_, 'a>, capacity: &Capacity) -> Option<Self> {
        let shapes: Vec<_> =
            capacity.shapes.iter().map(|shape| cluster.input.shape(*shape)).collect::<Option<_>>()?;
        let asks = shapes.iter().flat_map(|shape| &shape.request.asks);
        let mut resources: Vec<&ResourceName> = asks.map(|ask| &ask.resource).collect();
        resources.sort();
        resources.dedup();
        if resources.len() > DEVICES {
            return None;
        }
        let mut needs: Vec<Amounts> = Vec::new();
        for shape in shapes {
            let devices = resources.iter().map(|resource| shape.request.devices(resource.as_str()));
            let devices: Vec<i64> = devices.map(i64::from).collect();
            needs.push(amounts(&devices, &shape.needs.resources));
        }
        let mut scale = Self { resources, needs, mixes: capacity.mixes.clone(), is_joint: false };
        if CountTable::of(&scale.mixes).is_none() {
            let least = scale.needs.iter().copied().reduce(|mut least, needs| {
                least.iter_mut().zip(needs).for_each(|(least, needs)| *least = (*least).min(needs));
                least
            });
            scale.needs = vec![least?];
            scale.mixes = vec![vec![capacity.mixes.first()?.iter().sum()]];
            scale.is_joint = true;
        }
        Some(scale)
    }

    /// The numbers of members that a node could take, the fewest first, each with what it lacks for them. `None` if
    /// they are too many; nothing if the node takes none.
    #[expect(clippy::type_complexity, reason = "one caller")]
    fn hosted(
        &self,
        cluster: &ExactInput<'_, '_>,
        capacity: &Capacity,
        node: NodeIx,
        most: &[u32],
    ) -> Option<Option<Vec<(Vec<u32>, Amounts)>>> {
        let takes = (0..capacity.shapes.len()).map(|slot| capacity.takes(node, slot));
        let takes: Vec<u32> = match self.is_joint {
            true => vec![takes.fold(0, u32::saturating_add)],
            false => takes.collect(),
        };
        let takes: Vec<u32> = takes.iter().zip(most).map(|(takes, most)| *takes.min(most)).collect();
        let Some(free) = self.free(cluster, node).filter(|_| takes.iter().any(|takes| *takes > 0)) else {
            return Some(None);
        };
        let mut all: Vec<Vec<u32>> = vec![Vec::new()];
        for takes in takes {
            all = all
                .into_iter()
                .flat_map(|members| (0..=takes).map(move |more| [members.as_slice(), &[more]].concat()))
                .collect();
            if all.len() > MOST_HOSTED {
                return None;
            }
        }
        let lacks = |members: &[u32]| {
            let mut lacks: Amounts = [0; DIMENSIONS];
            for (need, members) in self.needs.iter().zip(members) {
                for (lacks, need) in lacks.iter_mut().zip(need) {
                    *lacks = lacks.saturating_add(need.saturating_mul(i64::from(*members)));
                }
            }
            for (lacks, free) in lacks.iter_mut().zip(free) {
                // What is not asked for fits though less than nothing is left.
                *lacks = if *lacks > 0 { lacks.saturating_sub(free).max(0) } else { 0 };
            }
            lacks
        };
        let some = all.into_iter().filter(|members| members.iter().any(|members| *members > 0));
        Some(Some(some.map(|members| (members.clone(), lacks(&members))).collect()))
    }

    /// What is free on a node now.
    fn free(&self, cluster: &ExactInput<'_, '_>, node: NodeIx) -> Option<Amounts> {
        let class = match (cluster.exact.get(&node), cluster.input.snapshot.node_state(node)) {
            (Some(exact), _) => &exact.class,
            (None, NodeState::Ours(class)) => class,
            (None, NodeState::Foreign { .. } | NodeState::Gone) => return None,
        };
        let free = |resource: &&ResourceName| {
            let pool = class.pool(resource.as_str());
            pool.map_or(0, |(_, pool)| i64::try_from(pool.free.len()).unwrap_or(i64::MAX))
        };
        let devices: Vec<i64> = self.resources.iter().map(free).collect();
        Some(amounts(&devices, &cluster.input.rooms.get(node.0 as usize)?.left))
    }

    /// What the end of a pod frees on its node.
    fn frees(&self, cluster: &ExactInput<'_, '_>, pod: &CandidatePod) -> Amounts {
        let returned = cluster.exact.get(&pod.node).map(|exact| super::returned(exact, pod));
        let mut devices = vec![0; self.resources.len()];
        for (resource, set) in returned.into_iter().flatten() {
            if let Some(at) = self.resources.iter().position(|known| *known == resource) {
                devices[at] += i64::try_from(set.len()).unwrap_or(i64::MAX);
            }
        }
        amounts(&devices, &pod.resources)
    }
}

fn amounts(devices: &[i64], resources: &Resources) -> Amounts {
    let mut amounts = [0; DIMENSIONS];
    amounts.iter_mut().zip(devices).for_each(|(amount, devices)| *amount = *devices);
    let Resources { milli_cpu, memory, ephemeral, pods, others: _ } = resources;
    amounts[DEVICES..].copy_from_slice(&[*pods, *milli_cpu, *memory, *ephemeral]);
    amounts
}

/// Every number of members by shape, up to the most of each.
#[derive(Debug)]
struct CountTable {
    most: Vec<u32>,
    /// All numbers, each after those that are smaller.
    all: Vec<Vec<u32>>,
    /// The numbers of which one is needed.
    goals: Vec<usize>,
}

impl CountTable {
    /// `None` if there are too many.
    fn of(mixes: &[Vec<u32>]) -> Option<Self> {
        let first = mixes.first()?;
        let mut most = vec![0; first.len()];
        for mix in mixes {
            most.iter_mut().zip(mix).for_each(|(most, count)| *most = (*most).max(*count));
        }
        let mut all: Vec<Vec<u32>> = vec![Vec::new()];
        for most in &most {
            if all.len().saturating_mul(*most as usize + 1) > MOST_COUNTS {
                return None;
            }
            all = all
                .into_iter()
                .flat_map(|counts| (0..=*most).map(move |more| [counts.as_slice(), &[more]].concat()))
                .collect();
        }
        let mut table = Self { most, all, goals: Vec::new() };
        table.goals = mixes.iter().map(|mix| table.index(mix)).collect();
        Some(table)
    }

    fn len(&self) -> usize {
        self.all.len()
    }

    fn index(&self, counts: &[u32]) -> usize {
        counts
            .iter()
            .zip(&self.most)
            .fold(0, |index, (count, most)| index * (*most as usize + 1) + *count as usize)
    }

    /// The index of what is still needed once some members are hosted.
    fn less(&self, index: usize, hosted: &[u32]) -> usize {
        let counts = self.all[index].iter().zip(hosted).zip(&self.most);
        counts.fold(0, |index, ((count, hosted), most)| {
            index * (*most as usize + 1) + count.saturating_sub(*hosted) as usize
        })
    }

    /// The cheapest combination that hosts one of the goals.
    fn combine(&self, frontiers: &[&[HostOption]]) -> Option<Bound> {
        let mut least: Vec<Option<Loss>> = vec![None; self.len()];
        least[0] = Some(Loss::default());
        let mut choices: Vec<u16> = vec![0; self.len() * frontiers.len()];
        for (frontier, choices) in frontiers.iter().zip(choices.chunks_mut(self.len())) {
            // What is needed less of comes before, and is not changed by this node yet.
            for needed in (1..self.len()).rev() {
                for (choice, hosting) in (1u16..).zip(*frontier) {
                    let Some(before) = least[self.less(needed, &hosting.members)] else { continue };
                    let loss = before + hosting.loss;
                    if least[needed].is_none_or(|known| loss < known) {
                        least[needed] = Some(loss);
                        choices[needed] = choice;
                    }
                }
            }
        }
        let goals = self.goals.iter().filter_map(|goal| Some((least[*goal]?, *goal)));
        let (loss, mut needed) = goals.min()?;
        let mut parts = Vec::new();
        for (frontier, choices) in frontiers.iter().zip(choices.chunks(self.len())).rev() {
            if let Some(hosting) = usize::from(choices[needed]).checked_sub(1).and_then(|at| frontier.get(at))
            {
                parts.extend(&hosting.parts);
                needed = self.less(needed, &hosting.members);
            }
        }
        parts.sort_unstable();
        parts.dedup();
        Some(Bound { loss, parts })
    }
}
