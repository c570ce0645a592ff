//! Chooses how many members go where: with the most of what they prefer, in the narrowest scope that holds them, at the
//! highest bandwidth inside the nodes, with the least left over.

use std::cell::{OnceCell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use gantry_api::placement::ComparedFabric;
use gantry_gang::DomainIx;

use super::compare::{Choice, ComparisonBasis};
use super::demand::{Counts, Demand};
use super::fill::{Anchors, Filler, Run};
use super::pack::{Packing, State, leveled, nodes_of, pack};
use super::scope::{Bounds, FabricPart, Scope, places, scopes};
use super::slices::{Slices, by_slices, ordinals};
use super::survey::Survey;
use crate::snapshot::NodeIx;

/// Domains with equally little left over for which the filling is compared.
const MOST_FILLED: usize = 8;
/// Domains tried for several shapes.
const MOST_PACKED: usize = 64;
/// Nodes looked at over all mixes of shapes that meet the minimum, with a lower bound on the number of mixes.
const MIXED: usize = 1 << 17;
const FEWEST_MIXES: usize = 8;

/// What choices are compared by. Smaller is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) members: Reverse<u32>,
    /// How much is had of what the members prefer, from 0, the most.
    pub(super) grade: usize,
    /// Width of the scope, from 0.
    pub(super) width: usize,
    /// The step of quality, from the best.
    pub(super) tier: usize,
}

impl Rank {
    /// The best for so many members.
    pub(super) fn best(members: u32) -> Self {
        Self { members: Reverse(members), grade: 0, width: 0, tier: 0 }
    }
}

/// A choice.
#[derive(Debug)]
pub(super) struct RunChoice {
    pub(super) rank: Rank,
    pub(super) runs: Vec<Run>,
    /// The domains that it was compared with, if they are to be recorded.
    pub(super) compared: Option<ComparedFabric>,
}

/// What filled domains are compared by. Smaller is better.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FillKey {
    /// By level, the widest first: in how many domains members are.
    pub(super) breadth: Vec<usize>,
    /// Room for more members.
    pub(super) over: u32,
    /// Free devices.
    pub(super) loose: u32,
    /// Nodes used, and the most members on one.
    pub(super) nodes: usize,
    pub(super) largest: u32,
}

/// A choice for several shapes, with its runs.
struct PackedChoice {
    chosen: RunChoice,
    place: FabricPart,
}

/// Chooses within one survey.
pub(super) struct Chooser<'s, 'a> {
    pub(super) survey: &'s Survey<'a>,
    pub(super) anchors: &'s Anchors,
    /// Whether the domains that are compared are recorded.
    records: bool,
    loose: Vec<u32>,
    /// By step of quality: members of each shape that each domain takes, once they are asked for.
    sums: Vec<OnceCell<Vec<u32>>>,
    /// By class and number of members: what those take from later pods on a node.
    lost: RefCell<HashMap<(u32, u32), i64>>,
}

impl<'s, 'a> Chooser<'s, 'a> {
    pub(super) fn new(survey: &'s Survey<'a>, anchors: &'s Anchors) -> Self {
        Self {
            survey,
            anchors,
            records: false,
            loose: survey.loose(),
            sums: vec![OnceCell::new(); survey.tiers()],
            lost: RefCell::default(),
        }
    }

    /// The same, which records the domains that it compares.
    pub(super) fn recording(self, records: bool) -> Self {
        Self { records, ..self }
    }

    /// The best choice: as many members as fit; `None` if the minimum does not fit.
    pub(super) fn choose(&self, demand: &Demand<'_>, bounds: Bounds) -> Option<RunChoice> {
        match bounds {
            Bounds::Unknown => None,
            Bounds::Free => self.within(demand, Scope::Cluster, None),
            Bounds::Within(scope, true) => self.within(demand, scope, None),
            // A required level or slices may hold fewer, but together.
            Bounds::Within(scope, false) => {
                self.within(demand, scope, None).or_else(|| self.within(demand, Scope::Cluster, None))
            }
            Bounds::Sliced(slices, required) => self
                .within(demand, Scope::Cluster, Some(slices))
                .or_else(|| (!required).then(|| self.within(demand, Scope::Cluster, None))?),
        }
    }

    fn within(&self, demand: &Demand<'_>, widest: Scope, slices: Option<Slices>) -> Option<RunChoice> {
        let scopes = scopes(self.survey, widest);
        // One shape in whole slices is split exactly; everything else slice by slice.
        if let Some(slices) = slices
            && (demand.shapes.len() > 1 || self.survey.relates() || !self.anchors.is_empty())
        {
            return self.slice_by_slice(demand, slices, scopes.len());
        }
        if demand.shapes.len() == 1 && !self.survey.relates() {
            let most = self.most(&scopes, demand.most, slices);
            if most < demand.must.max(1) {
                return None;
            }
            let chosen = self.one_shape(&scopes, most, slices);
            if chosen.is_none() {
                self.survey.give_up();
            }
            return chosen;
        }
        let grounds = scopes.iter().map(|scope| places(self.survey, self.anchors, *scope));
        let grounds: Vec<Vec<FabricPart>> = grounds.collect();
        let (packed, counts) = self.several_shapes(demand, &grounds)?;
        let PackedChoice { mut chosen, place } = packed;
        let state = State::of(self.survey);
        let packing = self.packing(chosen.rank.tier, &state);
        chosen.runs = leveled(packing, place, &counts, chosen.runs);
        if self.records {
            let Rank { width, tier, .. } = chosen.rank;
            let by = ComparisonBasis::Shapes(&counts);
            chosen.compared = Some(self.compare(&Choice {
                scopes: &scopes[..=width],
                place,
                tier,
                runs: &chosen.runs,
                by,
            }));
        }
        Some(chosen)
    }

    /// Several shapes: all members, or the minimum and as many more as fit.
    fn several_shapes(
        &self,
        demand: &Demand<'_>,
        grounds: &[Vec<FabricPart>],
    ) -> Option<(PackedChoice, Counts)> {
        let all = demand.first(demand.most);
        if let Some(packed) = self.shapes(grounds, &all) {
            return Some((packed, all));
        }
        let least = demand.least();
        let nodes = self.survey.input.snapshot.nodes.len();
        let tries = (MIXED / nodes.max(1)).max(FEWEST_MIXES);
        let step = least.len().div_ceil(tries).max(1);
        let is_complete = step == 1 && !demand.has_more_mixes(&least);
        let packed =
            least.into_iter().step_by(step).find_map(|counts| Some((self.shapes(grounds, &counts)?, counts)));
        if packed.is_none() && !is_complete {
            self.survey.give_up();
        }
        let (mut packed, mut counts) = packed?;
        // More members while they fit, shape by shape in the order of ranks.
        let all = demand.all();
        for slot in 0..counts.len() {
            let open = demand.most.saturating_sub(counts.iter().sum());
            let base = counts.clone();
            most_that(open.min(all[slot].saturating_sub(base[slot])), |more| {
                let mut tried = base.clone();
                tried[slot] += more;
                let better = self.shapes(grounds, &tried);
                let fits = better.is_some();
                if let Some(better) = better {
                    (packed, counts) = (better, tried);
                }
                fits
            });
        }
        Some((packed, counts))
    }

    fn packing<'p>(&'p self, tier: usize, state: &'p State) -> Packing<'p, 'a> {
        Packing { survey: self.survey, tier, loose: &self.loose, anchors: self.anchors, state }
    }

    /// All members that may be placed, or the minimum.
    fn slice_by_slice(&self, demand: &Demand<'_>, slices: Slices, width: usize) -> Option<RunChoice> {
        let counts = [demand.most, demand.must].map(|count| demand.first(count));
        // Other members may fit in other slices.
        self.survey.give_up();
        counts.iter().find_map(|counts| {
            let members = ordinals(demand.wanted, demand.pick(counts));
            (0..self.survey.tiers()).find_map(|tier| {
                let state = State::of(self.survey);
                let packing = self.packing(tier, &state);
                let runs = by_slices(packing, self.sums(tier)?, slices, &members)?;
                let rank = self.rank(counts.iter().sum(), width, tier);
                Some(RunChoice { rank, runs, compared: None })
            })
        })
    }

    /// The most members of the only shape that fit within one place of the widest scope.
    fn most(&self, scopes: &[Scope], members: u32, slices: Option<Slices>) -> u32 {
        let lowest = self.survey.lowest_tier();
        let filler = slices.map(|slices| (slices, self.filler(lowest)));
        // A wider scope that excludes nodes without labels may hold fewer.
        let scopes = scopes.iter().rev();
        let places = scopes.flat_map(|scope| places(self.survey, self.anchors, *scope));
        let mut most = 0;
        for place in places {
            let takes = match (&filler, place) {
                (Some((slices, filler)), FabricPart::Domain(domain)) => {
                    filler.takes_sliced(domain, *slices, members)
                }
                _ => self.takes(place, 0, lowest),
            };
            most = most.max(takes.min(members));
            if most == members {
                break;
            }
        }
        most
    }

    fn rank(&self, members: u32, width: usize, tier: usize) -> Rank {
        Rank { members: Reverse(members), grade: self.survey.grade(tier), width, tier }
    }

    /// Members of each shape that each domain takes at a step of quality.
    fn sums(&self, tier: usize) -> Option<&[u32]> {
        Some(self.sums.get(tier)?.get_or_init(|| self.survey.sums(tier)))
    }

    pub(super) fn takes(&self, place: FabricPart, slot: usize, tier: usize) -> u32 {
        match place {
            FabricPart::Node(node) => self.survey.takes(node, slot, tier),
            FabricPart::Domain(domain) => {
                let sum = self
                    .sums(tier)
                    .and_then(|sums| sums.get(domain.0 as usize * self.survey.shapes.len() + slot));
                sum.copied().unwrap_or(0)
            }
        }
    }

    pub(super) fn filler(&self, tier: usize) -> Filler<'_, 'a> {
        Filler::new(self.survey, 0, &self.loose, self.anchors, |node| self.survey.takes(node, 0, tier))
    }

    /// Places so many members of the only shape.
    fn one_shape(&self, scopes: &[Scope], members: u32, slices: Option<Slices>) -> Option<RunChoice> {
        let mut fillers: Vec<Option<Filler<'_, 'a>>> = (0..self.survey.tiers()).map(|_| None).collect();
        let grades = self.survey.grades().iter();
        for (grade, width) in grades.flat_map(|grade| (0..scopes.len()).map(move |width| (grade, width))) {
            let places = places(self.survey, self.anchors, scopes[width]);
            for tier in grade.clone() {
                let filler = &mut fillers[tier];
                let mut found: Vec<(u32, u32, DomainIx)> = Vec::new();
                let mut nodes = Vec::new();
                for place in &places {
                    if self.takes(*place, 0, tier) < members {
                        continue;
                    }
                    match *place {
                        FabricPart::Node(node) => nodes.push(node),
                        FabricPart::Domain(domain) => {
                            let over = self.takes(*place, 0, self.survey.lowest_tier()) - members;
                            found.push((over, self.loose[domain.0 as usize], domain));
                        }
                    }
                }
                let rank = self.rank(members, width, tier);
                if let Some(node) = self.best_node(&nodes, members) {
                    let runs = vec![Run { node, slot: 0, count: members }];
                    let by = ComparisonBasis::OneShape { members, slices, filled: &[] };
                    let place = FabricPart::Node(node);
                    let choice = Choice { scopes: &scopes[..=width], place, tier, runs: &runs, by };
                    let compared = self.records.then(|| self.compare(&choice));
                    return Some(RunChoice { rank, runs, compared });
                }
                if found.is_empty() {
                    continue;
                }
                let filler = filler.get_or_insert_with(|| self.filler(tier));
                if let Some(slices) = slices {
                    found.retain(|(_, _, domain)| filler.takes_sliced(*domain, slices, members) >= members);
                }
                found.sort_unstable();
                let best = found.first().map(|(over, loose, _)| (*over, *loose));
                // Parts with parts of their own are also compared by how many of those are used.
                let broad = found.iter().any(|(_, _, domain)| self.has_parts(*domain));
                let candidates =
                    found.iter().take_while(|(over, loose, _)| broad || best == Some((*over, *loose)));
                let filled = candidates.take(MOST_FILLED).filter_map(|(over, loose, domain)| {
                    let mut filler = filler.clone();
                    match slices {
                        Some(slices) => filler.fill_sliced(*domain, slices, members)?,
                        None => filler.fill_level(*domain, members)?,
                    }
                    let runs = filler.runs;
                    let key = FillKey {
                        breadth: self.breadth(&runs),
                        over: *over,
                        loose: *loose,
                        nodes: runs.len(),
                        largest: runs.iter().map(|run| run.count).max().unwrap_or(0),
                    };
                    Some(((key, *domain), runs))
                });
                let mut keys: Vec<(FillKey, DomainIx)> = Vec::new();
                let mut best: Option<(usize, Vec<Run>)> = None;
                for (key, runs) in filled {
                    if best.as_ref().is_none_or(|(best, _)| key.0 < keys[*best].0) {
                        best = Some((keys.len(), runs));
                    }
                    keys.push(key);
                }
                if let Some((best, runs)) = best {
                    let by = ComparisonBasis::OneShape { members, slices, filled: &keys };
                    let place = FabricPart::Domain(keys[best].1);
                    let choice = Choice { scopes: &scopes[..=width], place, tier, runs: &runs, by };
                    let compared = self.records.then(|| self.compare(&choice));
                    return Some(RunChoice { rank, runs, compared });
                }
            }
        }
        None
    }

    fn has_parts(&self, domain: DomainIx) -> bool {
        self.survey.domain(domain).is_some_and(|of| !of.children.is_empty())
    }

    /// By level, the widest first: in how many domains members are.
    fn breadth(&self, runs: &[Run]) -> Vec<usize> {
        let mut used: Vec<BTreeSet<DomainIx>> = vec![BTreeSet::new(); self.survey.fabric.levels.0.len()];
        for run in runs {
            let mut at = self.survey.fabric.of_node.get(run.node.0 as usize).copied();
            while let Some((number, domain)) =
                at.and_then(|number| Some((number, self.survey.domain(number)?)))
            {
                if let Some(used) = domain.level.and_then(|level| used.get_mut(level)) {
                    used.insert(number);
                }
                at = domain.parent;
            }
        }
        used.iter().map(BTreeSet::len).collect()
    }

    /// Of nodes that take all members: the most preferred one, then the one that loses least, then the fullest, then
    /// the one in the fullest domains.
    fn best_node(&self, nodes: &[NodeIx], members: u32) -> Option<NodeIx> {
        let keys: Vec<_> = nodes.iter().map(|node| self.node_key(*node, members)).collect();
        let best = keys.iter().min()?;
        let equal = nodes.iter().zip(&keys).filter(|(_, key)| *key == best);
        equal.map(|(node, _)| *node).min_by(|a, b| {
            self.around(*a).cmp(self.around(*b)).then_with(|| self.survey.name(*a).cmp(self.survey.name(*b)))
        })
    }

    /// How much the only shape prefers a node, what members take from later pods there, and its free devices.
    pub(super) fn node_key(&self, node: NodeIx, members: u32) -> (Reverse<i64>, i64, u32) {
        let class = self.survey.input.snapshot.class(node).map_or(u32::MAX, |class| class.0);
        let mut known = self.lost.borrow_mut();
        let lost = *known.entry((class, members)).or_insert_with(|| self.survey.lost(node, 0, members));
        (Reverse(self.survey.likes(node, 0)), lost, self.survey.free_devices(node))
    }

    /// Free devices in the domains of a node, the smallest domain first.
    pub(super) fn around(&self, node: NodeIx) -> impl Iterator<Item = u32> {
        let smallest = self.survey.fabric.of_node.get(node.0 as usize).copied();
        let path = smallest.into_iter().flat_map(|smallest| self.survey.fabric.path(smallest));
        path.filter_map(|domain| self.loose.get(domain.0 as usize).copied())
    }

    /// Places so many members of each shape.
    fn shapes(&self, grounds: &[Vec<FabricPart>], counts: &Counts) -> Option<PackedChoice> {
        let asked = self.requested(counts);
        let grades = self.survey.grades().iter();
        for (grade, width) in grades.flat_map(|grade| (0..grounds.len()).map(move |width| (grade, width))) {
            let places = &grounds[width];
            for tier in grade.clone() {
                let fits = |place: &&FabricPart| {
                    (0..counts.len()).all(|slot| self.takes(**place, slot, tier) >= counts[slot])
                        && asked <= self.free(**place)
                };
                let over = |place: FabricPart| self.left_over(place, counts, tier);
                let name = |place: FabricPart| match place {
                    FabricPart::Node(node) => (self.survey.name(node), DomainIx(0)),
                    FabricPart::Domain(domain) => ("", domain),
                };
                let mut found: Vec<(u64, FabricPart)> =
                    places.iter().filter(fits).map(|place| (over(*place), *place)).collect();
                found.sort_by(|a, b| a.0.cmp(&b.0).then_with(|| name(a.1).cmp(&name(b.1))));
                let state = State::of(self.survey);
                let packing = self.packing(tier, &state);
                found.retain(|(_, place)| self.may_be_even(*place, counts, tier));
                let packed = found
                    .iter()
                    .take(MOST_PACKED)
                    .find_map(|(_, place)| Some((*place, pack(packing, *place, counts)?)));
                if packed.is_none() && found.len() > MOST_PACKED {
                    self.survey.give_up();
                }
                if let Some((place, runs)) = packed {
                    let rank = self.rank(counts.iter().sum(), width, tier);
                    let chosen = RunChoice { rank, runs, compared: None };
                    return Some(PackedChoice { chosen, place });
                }
            }
        }
        None
    }

    /// Devices that so many members of each shape request.
    pub(super) fn requested(&self, counts: &Counts) -> u64 {
        let requested = counts.iter().zip(&self.survey.shapes).map(|(count, shape)| {
            let devices: u64 = shape.request.asks.iter().map(|ask| u64::from(ask.devices)).sum();
            u64::from(*count) * devices
        });
        requested.sum()
    }

    /// Members that a place takes beyond these, each shape by itself.
    pub(super) fn left_over(&self, place: FabricPart, counts: &Counts, tier: usize) -> u64 {
        let over = |slot: usize| self.takes(place, slot, tier).saturating_sub(counts[slot]);
        (0..counts.len()).map(|slot| u64::from(over(slot))).sum()
    }

    /// Free devices in a place, of all resources that the gang asks for.
    pub(super) fn free(&self, place: FabricPart) -> u64 {
        u64::from(match place {
            FabricPart::Node(node) => self.survey.free_devices(node),
            FabricPart::Domain(domain) => self.loose.get(domain.0 as usize).copied().unwrap_or(0),
        })
    }

    /// Whether the spread constraints may allow members within one place.
    fn may_be_even(&self, place: FabricPart, counts: &Counts, tier: usize) -> bool {
        let mut skews = self.survey.skews.iter().filter(|skew| counts[skew.slot] > 0).peekable();
        if skews.peek().is_none() {
            return true;
        }
        let nodes = nodes_of(self.survey, place);
        skews.all(|skew| {
            skew.may_hold(counts[skew.slot], nodes.iter().copied(), |node, slot| {
                self.survey.takes(node, slot, tier)
            })
        })
    }
}

/// The largest number that fits, by bisection, if every smaller number fits too. Otherwise a number that fits while the
/// next does not, never below the result of counting up.
pub(super) fn most_that(most: u32, mut fit: impl FnMut(u32) -> bool) -> u32 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = high - (high - low) / 2;
        if fit(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_that_fit_are_found_in_few_tries() {
        for fitting in 0..=1_000 {
            let mut tries = 0;
            let found = most_that(1_000, |count| {
                tries += 1;
                count <= fitting
            });
            assert_eq!(found, fitting);
            assert!(tries <= 10, "{tries}");
        }
        assert_eq!(most_that(0, |_| unreachable!()), 0);
    }

    #[test]
    fn what_is_found_is_no_less_than_by_counting_up() {
        for pattern in 0u32..1 << 8 {
            let fits = |count: u32| count == 0 || pattern >> (count - 1) & 1 == 1;
            let found = most_that(8, fits);
            assert!(fits(found) && (found == 8 || !fits(found + 1)));
            let counted = (1..=8).take_while(|count| fits(*count)).count();
            assert!(found as usize >= counted);
        }
    }
}
