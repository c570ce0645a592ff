//! Why a gang goes where it goes: at each level up to the one of which one domain holds it, the domains that were
//! compared and why the best of the others lost. Looks at each domain once, and at a few closely.

use std::cmp::{Ordering, Reverse};

use gantry_api::placement::{ComparedDomain, ComparedFabric, ComparedLevel, DomainLoss};
use gantry_gang::DomainIx;

use super::choose::{Chooser, FillKey};
use super::demand::Counts;
use super::diagnosis::level_name;
use super::fill::{Filler, Run};
use super::scope::{FabricPart, Scope, places};
use super::slices::Slices;
use crate::quality::{Quality, QualityPart};
use crate::snapshot::NodeIx;

/// What was chosen, and what it was compared by.
pub(super) struct Choice<'c> {
    /// The scopes that were tried, the narrowest first; a place of the last one was chosen.
    pub(super) scopes: &'c [Scope],
    pub(super) place: FabricPart,
    /// The step of quality.
    pub(super) tier: usize,
    pub(super) runs: &'c [Run],
    pub(super) by: ComparisonBasis<'c>,
}

/// How places of a scope were compared.
pub(super) enum ComparisonBasis<'c> {
    /// Members of the only shape. With the domains that were filled.
    OneShape { members: u32, slices: Option<Slices>, filled: &'c [(FillKey, DomainIx)] },
    /// Members of several shapes, or with rules among them.
    Shapes(&'c Counts),
}

impl ComparisonBasis<'_> {
    /// Members of a shape.
    fn members_of(&self, slot: usize) -> u32 {
        match self {
            Self::OneShape { members, .. } => *members,
            Self::Shapes(counts) => counts.get(slot).copied().unwrap_or(0),
        }
    }
}

/// Why a place lost, before its values are worked out.
#[derive(Debug, Clone, Copy)]
enum LossReason {
    TooFew {
        fits: u32,
    },
    Devices {
        requested: u64,
    },
    Rules,
    Slower {
        slot: usize,
    },
    /// Members would have less of what they prefer.
    Preferred {
        slot: usize,
    },
    /// One of the domains that were filled.
    Filled(usize),
    /// A node that holds all members.
    Node,
    /// What is left over decides.
    LeftOver(i64),
}

/// A place that lost. The first of two lost less.
#[derive(Debug, Clone, Copy)]
struct Loser {
    order: (u8, i64, i64, i64),
    place: FabricPart,
    why: LossReason,
}

/// Places that are as good as the chosen one by bandwidth and were looked at closely; the same that were not; slower
/// ones; those with less of what members prefer; those that hold the members by number only; those that are too small.
const CLOSE: u8 = 0;
const FAR: u8 = 1;
const SLOWER: u8 = 2;
const PREFERRED: u8 = 3;
const RULES: u8 = 4;
const SMALL: u8 = 5;

/// Counts members that places take in whole slices.
struct SliceCounter<'s, 'a> {
    slices: Slices,
    lowest: Filler<'s, 'a>,
    /// At the step of quality of the choice.
    tier: Filler<'s, 'a>,
    /// At the last step at which as much is had of what members prefer.
    floor: Filler<'s, 'a>,
}

fn number(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl<'a> Chooser<'_, 'a> {
    /// Compares the choice with the other places of each scope.
    pub(super) fn compare(&self, choice: &Choice<'_>) -> ComparedFabric {
        let members = choice.runs.iter().fold(0u32, |sum, run| sum.saturating_add(run.count));
        let sliced = match choice.by {
            ComparisonBasis::OneShape { slices: Some(slices), .. } => Some(SliceCounter {
                slices,
                lowest: self.filler(self.survey.lowest_tier()),
                tier: self.filler(choice.tier),
                floor: self.filler(self.floor(choice.tier)),
            }),
            _ => None,
        };
        let last = choice.scopes.len().saturating_sub(1);
        let levels = choice.scopes.iter().enumerate();
        let levels = levels.map(|(at, scope)| {
            let chosen = (at == last).then_some(choice.place);
            self.compare_scope(choice, *scope, chosen, sliced.as_ref())
        });
        ComparedFabric::new(members, levels.collect())
    }

    fn compare_scope(
        &self,
        choice: &Choice<'_>,
        scope: Scope,
        chosen: Option<FabricPart>,
        sliced: Option<&SliceCounter<'_, 'a>>,
    ) -> ComparedLevel {
        let mut places = places(self.survey, self.anchors, scope);
        if scope == Scope::Node {
            places.retain(
                |place| matches!(place, FabricPart::Node(node) if self.survey.class(*node).is_some()),
            );
        }
        let (mut holding, mut best) = (0u32, Vec::with_capacity(ComparedFabric::MAX_OTHERS + 1));
        for place in &places {
            if chosen == Some(*place) {
                holding += 1;
                continue;
            }
            let loser = self.loser(choice, *place, chosen.is_some(), sliced);
            holding += u32::from(loser.order.0 < RULES);
            self.keep(&mut best, loser);
        }
        let name = |place: FabricPart| match place {
            FabricPart::Node(node) => self.survey.name(node).to_owned(),
            FabricPart::Domain(domain) => self.survey.fabric.words(domain),
        };
        let others = best
            .into_iter()
            .map(|loser| ComparedDomain { domain: name(loser.place), ..self.loss(choice, loser) });
        ComparedLevel {
            level: level_name(self.survey, scope).to_string(),
            domains: count(places.len()),
            holding,
            used: self.used(choice.runs, scope),
            chosen: chosen.map(name),
            others: others.collect(),
        }
    }

    /// Why a place was not chosen. `is_level`: another place of its scope was.
    fn loser(
        &self,
        choice: &Choice<'_>,
        place: FabricPart,
        is_level: bool,
        sliced: Option<&SliceCounter<'_, 'a>>,
    ) -> Loser {
        let (order, why) = match &choice.by {
            ComparisonBasis::OneShape { members, filled, .. } => {
                self.loser_of_one(choice, place, (*members, *filled), is_level, sliced)
            }
            ComparisonBasis::Shapes(counts) => self.loser_of_several(choice, place, counts, is_level),
        };
        Loser { order, place, why }
    }

    fn loser_of_one(
        &self,
        choice: &Choice<'_>,
        place: FabricPart,
        (members, filled): (u32, &[(FillKey, DomainIx)]),
        is_level: bool,
        sliced: Option<&SliceCounter<'_, 'a>>,
    ) -> ((u8, i64, i64, i64), LossReason) {
        let lowest = self.survey.lowest_tier();
        let takes = |tier: usize| match (sliced, place) {
            (Some(sliced), FabricPart::Domain(domain)) => {
                let filler = match tier {
                    _ if tier == lowest => &sliced.lowest,
                    _ if tier == choice.tier => &sliced.tier,
                    _ => &sliced.floor,
                };
                filler.takes_sliced(domain, sliced.slices, members)
            }
            _ => self.takes(place, 0, tier),
        };
        let fits = takes(lowest);
        if fits < members {
            return ((SMALL, -number(fits), 0, 0), LossReason::TooFew { fits });
        }
        if takes(self.floor(choice.tier)) < members {
            return (
                (PREFERRED, -number(self.slowest(place, 0, members)), 0, 0),
                LossReason::Preferred { slot: 0 },
            );
        }
        if !is_level {
            return ((RULES, 0, 0, 0), LossReason::Rules);
        }
        if takes(choice.tier) < members {
            let slowest = number(self.slowest(place, 0, members));
            return ((SLOWER, -slowest, 0, 0), LossReason::Slower { slot: 0 });
        }
        match place {
            FabricPart::Node(node) => {
                let (likes, lost, free) = self.node_key(node, members);
                ((CLOSE, likes.0.saturating_neg(), lost, number(free)), LossReason::Node)
            }
            FabricPart::Domain(domain) => match filled.iter().position(|(_, of)| *of == domain) {
                Some(at) => {
                    let better = filled.iter().filter(|(key, of)| (key, of) < (&filled[at].0, &domain));
                    ((CLOSE, number(better.count()), 0, 0), LossReason::Filled(at))
                }
                None => {
                    let over = number(self.takes(place, 0, lowest)) - number(members);
                    let loose = number(self.free(place));
                    ((FAR, over, loose, number(domain.0)), LossReason::LeftOver(over))
                }
            },
        }
    }

    fn loser_of_several(
        &self,
        choice: &Choice<'_>,
        place: FabricPart,
        counts: &Counts,
        is_level: bool,
    ) -> ((u8, i64, i64, i64), LossReason) {
        let slots = 0..counts.len();
        let fits = |tier: usize| slots.clone().all(|slot| self.takes(place, slot, tier) >= counts[slot]);
        let lowest = self.survey.lowest_tier();
        if !fits(lowest) {
            let each = slots.map(|slot| self.takes(place, slot, lowest).min(counts[slot]));
            let fits = each.fold(0u32, u32::saturating_add);
            return ((SMALL, -number(fits), 0, 0), LossReason::TooFew { fits });
        }
        let requested = self.requested(counts);
        if requested > self.free(place) {
            return ((SMALL, -number(counts.iter().sum::<u32>()), 0, 0), LossReason::Devices { requested });
        }
        let floor = self.floor(choice.tier);
        if let Some(slot) = slots.clone().find(|slot| self.takes(place, *slot, floor) < counts[*slot]) {
            let slowest = number(self.slowest(place, slot, counts[slot]));
            return ((PREFERRED, -slowest, 0, 0), LossReason::Preferred { slot });
        }
        if !is_level {
            return ((RULES, 0, 0, 0), LossReason::Rules);
        }
        let slower = slots.clone().find(|slot| self.takes(place, *slot, choice.tier) < counts[*slot]);
        if let Some(slot) = slower {
            let slowest = number(self.slowest(place, slot, counts[slot]));
            return ((SLOWER, -slowest, 0, 0), LossReason::Slower { slot });
        }
        let over = number(self.left_over(place, counts, choice.tier));
        let own = number(self.left_over(choice.place, counts, choice.tier));
        // Places before the chosen one were tried.
        match over.cmp(&own).then_with(|| self.by_name(place, choice.place)) {
            Ordering::Less => ((RULES, over, 0, 0), LossReason::Rules),
            Ordering::Equal | Ordering::Greater => ((CLOSE, over, 0, 0), LossReason::LeftOver(over)),
        }
    }

    /// Keeps a loser if it is among the best.
    fn keep(&self, best: &mut Vec<Loser>, loser: Loser) {
        // Most places of a large fabric lost to all that are kept: one comparison shows it.
        let is_full = best.len() == ComparedFabric::MAX_OTHERS;
        if is_full && best.last().is_some_and(|last| self.order(&loser, last).is_ge()) {
            return;
        }
        let at = best.iter().position(|known| self.order(&loser, known).is_lt()).unwrap_or(best.len());
        best.insert(at, loser);
        best.truncate(ComparedFabric::MAX_OTHERS);
    }

    fn order(&self, one: &Loser, other: &Loser) -> Ordering {
        let around = || match (one.why, one.place, other.place) {
            (LossReason::Node, FabricPart::Node(one), FabricPart::Node(other)) => {
                self.around(one).cmp(self.around(other))
            }
            _ => Ordering::Equal,
        };
        one.order.cmp(&other.order).then_with(around).then_with(|| self.by_name(one.place, other.place))
    }

    fn by_name(&self, one: FabricPart, other: FabricPart) -> Ordering {
        match (one, other) {
            (FabricPart::Node(one), FabricPart::Node(other)) => {
                self.survey.name(one).cmp(self.survey.name(other))
            }
            _ => one.cmp(&other),
        }
    }

    /// The reason with its values. The domain is left empty.
    fn loss(&self, choice: &Choice<'_>, loser: Loser) -> ComparedDomain {
        let of = |reason, values: Option<(i64, i64)>| ComparedDomain {
            domain: String::new(),
            reason,
            value: values.map(|(value, _)| value),
            chosen_value: values.map(|(_, chosen)| chosen),
            level: None,
        };
        let members = match &choice.by {
            ComparisonBasis::OneShape { members, .. } => *members,
            ComparisonBasis::Shapes(counts) => counts.iter().sum(),
        };
        match loser.why {
            LossReason::TooFew { fits } => of(DomainLoss::Members, Some((number(fits), number(members)))),
            LossReason::Devices { requested } => {
                of(DomainLoss::Devices, Some((number(self.free(loser.place)), number(requested))))
            }
            LossReason::Rules => of(DomainLoss::Rules, None),
            LossReason::Slower { slot } => {
                let slowest = |place| number(self.slowest(place, slot, choice.by.members_of(slot)));
                let values = (slowest(loser.place), slowest(choice.place));
                let equally_preferred =
                    |there: Quality, own: &Quality| Quality { preferences: own.preferences, ..there };
                let worst = self.worst_of_both(choice, loser, slot);
                match worst.and_then(|(there, own)| equally_preferred(there, &own).decided_by(&own)) {
                    Some(QualityPart::Link) => of(DomainLoss::Link, None),
                    // Whole slices may need slower members than the fastest of a domain.
                    _ => of(DomainLoss::Bandwidth, Some(values).filter(|(there, chosen)| there < chosen)),
                }
            }
            LossReason::Preferred { slot } => {
                let worst = self.worst_of_both(choice, loser, slot);
                let reason = match worst.and_then(|(there, own)| there.decided_by(&own)) {
                    Some(QualityPart::Model) => DomainLoss::Model,
                    Some(QualityPart::Cost) => DomainLoss::Cost,
                    _ => DomainLoss::Preference,
                };
                of(reason, None)
            }
            LossReason::LeftOver(over) => {
                let (own, loose) = match &choice.by {
                    ComparisonBasis::OneShape { .. } => {
                        let takes = self.takes(choice.place, 0, self.survey.lowest_tier());
                        let loose = (number(self.free(loser.place)), number(self.free(choice.place)));
                        (number(takes) - number(members), loose)
                    }
                    ComparisonBasis::Shapes(counts) => {
                        (number(self.left_over(choice.place, counts, choice.tier)), (0, 0))
                    }
                };
                match (over == own, loose.0 == loose.1) {
                    (false, _) => of(DomainLoss::LeftOver, Some((over, own))),
                    (true, false) => of(DomainLoss::FreeDevices, Some(loose)),
                    (true, true) => of(DomainLoss::Name, None),
                }
            }
            LossReason::Filled(at) => {
                let ComparisonBasis::OneShape { filled, .. } = &choice.by else {
                    return of(DomainLoss::Name, None);
                };
                let own = filled.iter().find(|(_, domain)| FabricPart::Domain(*domain) == choice.place);
                match (filled.get(at), own) {
                    (Some((there, _)), Some((own, _))) => self.difference(there, own),
                    _ => of(DomainLoss::Name, None),
                }
            }
            LossReason::Node => {
                let (FabricPart::Node(there), FabricPart::Node(own)) = (loser.place, choice.place) else {
                    return of(DomainLoss::Name, None);
                };
                let (here, chosen) = (self.node_key(there, members), self.node_key(own, members));
                let around = || self.around(there).zip(self.around(own)).find(|(a, b)| a != b);
                if here.0 != chosen.0 {
                    of(DomainLoss::Preference, Some((here.0.0, chosen.0.0)))
                } else if here.1 != chosen.1 {
                    of(DomainLoss::Stranded, Some((here.1, chosen.1)))
                } else if here.2 != chosen.2 {
                    of(DomainLoss::FreeDevices, Some((number(here.2), number(chosen.2))))
                } else if let Some((there, own)) = around() {
                    of(DomainLoss::Surroundings, Some((number(there), number(own))))
                } else {
                    of(DomainLoss::Name, None)
                }
            }
        }
    }

    /// The first difference of two domains that were filled.
    fn difference(&self, there: &FillKey, own: &FillKey) -> ComparedDomain {
        let broader =
            there.breadth.iter().zip(&own.breadth).enumerate().find(|(_, (there, own))| there != own);
        let (reason, values) = if let Some((_, (there, own))) = broader {
            (DomainLoss::Parts, (number(*there), number(*own)))
        } else if there.over != own.over {
            (DomainLoss::LeftOver, (number(there.over), number(own.over)))
        } else if there.loose != own.loose {
            (DomainLoss::FreeDevices, (number(there.loose), number(own.loose)))
        } else if there.nodes != own.nodes {
            (DomainLoss::Nodes, (number(there.nodes), number(own.nodes)))
        } else if there.largest != own.largest {
            (DomainLoss::Uneven, (number(there.largest), number(own.largest)))
        } else {
            (DomainLoss::Name, (0, 0))
        };
        let is_named = reason == DomainLoss::Name;
        let level = broader.and_then(|(level, _)| self.survey.fabric.levels.0.get(level));
        ComparedDomain {
            domain: String::new(),
            reason,
            value: (!is_named).then_some(values.0),
            chosen_value: (!is_named).then_some(values.1),
            level: level.map(|level| level.name.to_string()),
        }
    }

    /// The last step of quality at which as much is had of what members prefer.
    fn floor(&self, tier: usize) -> usize {
        self.survey.grades().get(self.survey.grade(tier)).map_or(tier, |grade| grade.end - 1)
    }

    /// The quality of the worst member of a shape in the place of a loser and in the chosen one.
    fn worst_of_both(&self, choice: &Choice<'_>, loser: Loser, slot: usize) -> Option<(Quality, Quality)> {
        let worst = |place| self.worst(place, slot, choice.by.members_of(slot));
        worst(loser.place).zip(worst(choice.place))
    }

    /// The bandwidth of the worst of so many members of a shape in a place, if the best are taken; MB/s.
    fn slowest(&self, place: FabricPart, slot: usize, members: u32) -> u64 {
        self.worst(place, slot, members).map_or(0, |worst| worst.megabytes_per_second)
    }

    /// The quality of the worst of so many members of a shape in a place, if the best are taken.
    fn worst(&self, place: FabricPart, slot: usize, members: u32) -> Option<Quality> {
        let mut reached: Vec<Quality> = match place {
            FabricPart::Node(node) => self.survey.reached(node, slot).to_vec(),
            FabricPart::Domain(domain) => {
                let nodes = self.survey.fabric.nodes_in(domain).into_iter();
                nodes.flat_map(|node| self.survey.reached(NodeIx(node), slot)).copied().collect()
            }
        };
        let last = (members as usize).checked_sub(1).filter(|last| *last < reached.len())?;
        Some(*reached.select_nth_unstable_by_key(last, |reach| Reverse(*reach)).1)
    }

    /// How many domains of a scope the runs are in.
    fn used(&self, runs: &[Run], scope: Scope) -> u32 {
        let domain = |run: &Run| match scope {
            Scope::Node => Some(run.node.0),
            Scope::Level(level) => Some(self.survey.fabric.of_node_at(run.node.0, level)?.0),
            Scope::Cluster => Some(0),
        };
        let mut used: Vec<u32> = runs.iter().filter_map(domain).collect();
        used.sort_unstable();
        used.dedup();
        count(used.len())
    }
}
