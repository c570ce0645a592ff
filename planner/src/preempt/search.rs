//! The victims of the least loss, by branch and bound.
//!
//! Cases are taken in the order of their bound ([`Relaxation`]). The parts that a bound assumes, completed to what can go
//! together, are a solution if budgets allow them and the gang then fits. A case whose solution costs more than its bound,
//! or that has none, is split by one unit: it goes as a whole, or it stays, or only members beyond its minimum go. The
//! search is over when no case has a lower bound than the best solution. It is exact unless it runs out of steps.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use gantry_gang::protocol::PlanRequest;

use super::loss::Loss;
use super::parts::{BudgetUse, ChosenParts, Parts, budgets_of};
use super::relaxation::{Bound, Fate, Relaxation};
use super::{CandidatePod, ExactInput};
use crate::plan::{fits, plan};
use crate::snapshot::NodeIx;

/// Steps of a plan, by node and in addition to that.
const STEPS_BY_NODE: u64 = 16;
const STEPS: u64 = 2_048;

/// What is decided about a unit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum UnitDecision {
    Goes,
    Stays,
    /// Some of its parts go at most, and only while its minimum stays.
    Partly {
        going: BTreeSet<usize>,
        staying: BTreeSet<usize>,
    },
}

/// Some decisions, and the bound under them.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    loss: Loss,
    /// Cases of equal bounds are taken deepest first.
    depth: Reverse<usize>,
    number: u64,
    assumed: Vec<usize>,
    decided: BTreeMap<usize, UnitDecision>,
}

/// A unit by which a case is split, and one of its open parts.
type Split = (usize, usize);

/// The search among some units.
pub(super) struct Search<'s, 'c, 't, 'a> {
    cluster: &'s ExactInput<'t, 'a>,
    wanted: &'s PlanRequest,
    parts: &'s Parts<'c>,
    /// Whether the gang fits without some parts.
    known: BTreeMap<Vec<usize>, bool>,
    /// Steps that are left.
    steps: &'s mut u64,
}

impl<'s, 'c, 't, 'a> Search<'s, 'c, 't, 'a> {
    pub(super) fn new(
        cluster: &'s ExactInput<'t, 'a>,
        wanted: &'s PlanRequest,
        parts: &'s Parts<'c>,
        steps: &'s mut u64,
    ) -> Self {
        Self { cluster, wanted, parts, known: BTreeMap::new(), steps }
    }

    /// What goes, and whether nothing is better for certain.
    pub(super) fn run(&mut self) -> (Option<ChosenParts>, bool) {
        let fates = self.fates(&BTreeMap::new()).unwrap_or_default();
        let Some(relaxation) = Relaxation::new(self.cluster, self.wanted, self.parts, fates.clone()) else {
            return (None, false);
        };
        let mut best: Option<(Loss, ChosenParts)> = None;
        let mut open = BinaryHeap::new();
        let mut number = 0;
        let mut add = |steps: &mut u64, fates: Option<(Vec<Fate>, Loss)>, decided, depth| {
            let (fates, decided_loss) = fates?;
            let Bound { loss, parts } = relaxation.bound(&fates, steps)?;
            number += 1;
            let loss = loss + decided_loss;
            Some(Reverse(Case { loss, depth: Reverse(depth), number, assumed: parts, decided }))
        };
        open.extend(add(self.steps, Some((fates, Loss::default())), BTreeMap::new(), 0));
        while let Some(Reverse(case)) = open.pop() {
            if best.as_ref().is_some_and(|(loss, _)| *loss <= case.loss) {
                break;
            }
            if *self.steps == 0 {
                return (best.map(|(_, chosen)| chosen), false);
            }
            let split = match self.complete(&case) {
                Err(split) => split,
                Ok(chosen) => {
                    let loss = chosen.loss(self.parts);
                    if best.as_ref().is_some_and(|(known, _)| *known <= loss) {
                        self.costlier(&case, &chosen)
                    } else if self.makes_room(&chosen) {
                        let split = (loss > case.loss).then(|| self.costlier(&case, &chosen)).flatten();
                        best = Some((loss, chosen));
                        split
                    } else {
                        self.helpful(&case, &chosen)
                    }
                }
            };
            let Some(split) = split else { continue };
            for decided in self.split(&case.decided, split) {
                let fates = self.fates(&decided);
                let fates = fates.map(|fates| (fates, self.decided_loss(&decided)));
                let case = add(self.steps, fates, decided, case.depth.0 + 1);
                let worse =
                    |Reverse(case): &Reverse<Case>| best.as_ref().is_some_and(|(loss, _)| *loss <= case.loss);
                open.extend(case.filter(|case| !worse(case)));
            }
        }
        (best.map(|(_, chosen)| chosen), true)
    }

    /// Whether the gang fits without some parts.
    pub(super) fn makes_room(&mut self, chosen: &ChosenParts) -> bool {
        let key = chosen.list();
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        self.count_plan();
        let pods = chosen.pods(self.parts);
        let room = self.cluster.without(&pods, |input| fits(input, self.wanted));
        self.known.insert(key, room);
        room
    }

    fn count_plan(&mut self) {
        let steps = STEPS + STEPS_BY_NODE * self.cluster.nodes() as u64;
        *self.steps = self.steps.saturating_sub(steps);
    }

    /// The nodes of a plan without some pods; `None` if there is none.
    pub(super) fn nodes_without(&mut self, pods: &[&CandidatePod]) -> Option<BTreeSet<NodeIx>> {
        self.count_plan();
        self.cluster.without(pods, |input| {
            let placement = plan(input, self.wanted).ok()?;
            let nodes = placement.places.iter().map(|place| place.node.as_str());
            Some(nodes.filter_map(|node| input.snapshot.find(node)).collect())
        })
    }

    /// What goes for certain.
    fn going(&self, decided: &BTreeMap<usize, UnitDecision>) -> ChosenParts {
        let mut going = ChosenParts::default();
        for (unit, decided) in decided {
            match decided {
                UnitDecision::Goes => going.add_whole(self.parts, *unit),
                UnitDecision::Partly { going: some, .. } => {
                    some.iter().for_each(|part| going.add(self.parts, *part));
                }
                UnitDecision::Stays => {}
            }
        }
        going
    }

    fn decided_loss(&self, decided: &BTreeMap<usize, UnitDecision>) -> Loss {
        self.going(decided).loss(self.parts)
    }

    /// The fate of each part. `None` if budgets forbid what goes.
    fn fates(&self, decided: &BTreeMap<usize, UnitDecision>) -> Option<Vec<Fate>> {
        let going = self.going(decided);
        if going.exceeded(self.parts).is_some() {
            return None;
        }
        let used = going.budgets(self.parts);
        let mut fates = Vec::with_capacity(self.parts.all.len());
        for (number, unit) in self.parts.units.iter().enumerate() {
            let decided = decided.get(&number);
            for part in unit.parts.clone() {
                fates.push(self.fate(number, part, decided, &used));
            }
        }
        Some(fates)
    }

    fn fate(&self, unit: usize, part: usize, decided: Option<&UnitDecision>, used: &BudgetUse) -> Fate {
        let open = |may: bool| if may && used.allows(self.parts, part) { Fate::Open } else { Fate::Stays };
        match decided {
            Some(UnitDecision::Goes) => Fate::Goes,
            Some(UnitDecision::Stays) => Fate::Stays,
            None => open(true),
            Some(UnitDecision::Partly { going, .. }) if going.contains(&part) => Fate::Goes,
            Some(UnitDecision::Partly { staying, .. }) if staying.contains(&part) => Fate::Stays,
            Some(UnitDecision::Partly { going, .. }) => {
                let more: Vec<usize> = going.iter().copied().chain([part]).collect();
                open(ChosenParts::leaves_minimum(self.parts, unit, &more))
            }
        }
    }

    /// What goes and what the bound assumes, completed to what can go together; or the unit to decide on first, if any.
    fn complete(&self, case: &Case) -> Result<ChosenParts, Option<Split>> {
        let mut chosen = self.going(&case.decided);
        for part in &case.assumed {
            chosen.add(self.parts, *part);
        }
        let units: Vec<(usize, Vec<usize>)> =
            chosen.units().map(|(unit, going)| (unit, going.to_vec())).collect();
        for (unit, going) in units {
            let is_whole = going.len() == self.parts.units[unit].parts.len();
            if is_whole && !matches!(case.decided.get(&unit), Some(UnitDecision::Partly { .. }))
                || ChosenParts::leaves_minimum(self.parts, unit, &going)
            {
                continue;
            }
            match case.decided.get(&unit) {
                Some(UnitDecision::Partly { going: decided, .. }) => {
                    let open = going.iter().find(|part| !decided.contains(part));
                    return Err(open.map(|part| (unit, *part)));
                }
                _ => chosen.add_whole(self.parts, unit),
            }
        }
        let Some(budget) = chosen.exceeded(self.parts) else {
            return Ok(chosen);
        };
        let counts = |part: &usize| budgets_of(self.parts, *part).any(|(name, ..)| *name == budget);
        let parts = chosen.list();
        Err(self.open_among(case, parts.into_iter().filter(counts)))
    }

    /// The first part that is not decided on.
    fn open_among(&self, case: &Case, mut parts: impl Iterator<Item = usize>) -> Option<Split> {
        let is_open = |part: &usize| match case.decided.get(&self.parts.all[*part].unit) {
            None => true,
            Some(UnitDecision::Goes | UnitDecision::Stays) => false,
            Some(UnitDecision::Partly { going, staying }) => !going.contains(part) && !staying.contains(part),
        };
        parts.find(is_open).map(|part| (self.parts.all[part].unit, part))
    }

    /// A unit that costs more than the bound assumes.
    fn costlier(&self, case: &Case, chosen: &ChosenParts) -> Option<Split> {
        let is_costlier = |(unit, _): &(usize, &[usize])| {
            let of = &self.parts.units[*unit];
            // A part that is a unit is worth its loss, unless it is on several nodes.
            of.is_elastic() || of.candidate.pods.iter().any(|pod| pod.node != of.candidate.pods[0].node)
        };
        let units: Vec<usize> = chosen.units().filter(is_costlier).map(|(unit, _)| unit).collect();
        let parts = units.into_iter().flat_map(|unit| self.parts.units[unit].parts.clone());
        let assumed = |part: &usize| case.assumed.binary_search(part).is_ok();
        let parts: Vec<usize> = parts.collect();
        self.open_among(case, parts.iter().copied().filter(assumed))
            .or_else(|| self.open_among(case, chosen.list().into_iter()))
    }

    /// A unit whose end would help where what is chosen does not; nothing if no other end helps.
    fn helpful(&mut self, case: &Case, chosen: &ChosenParts) -> Option<Split> {
        let fates = self.fates(&case.decided)?;
        let may_go = |part: &usize| fates[*part] != Fate::Stays;
        let going: Vec<usize> = (0..self.parts.all.len()).filter(may_go).collect();
        let pods: Vec<&CandidatePod> =
            going.iter().flat_map(|part| self.parts.all[*part].pods.iter().copied()).collect();
        let nodes = self.nodes_without(&pods)?;
        let other = |part: &usize| !chosen.contains(self.parts, *part);
        let near = |part: &usize| self.parts.all[*part].pods.iter().any(|pod| nodes.contains(&pod.node));
        let mut others: Vec<usize> = going.iter().copied().filter(other).collect();
        others.sort_by_key(|part| (!near(part), self.parts.all[*part].loss));
        self.open_among(case, others.into_iter()).or_else(|| self.open_among(case, chosen.list().into_iter()))
    }

    /// The cases into which a case is split.
    fn split(
        &self,
        decided: &BTreeMap<usize, UnitDecision>,
        (unit, part): Split,
    ) -> Vec<BTreeMap<usize, UnitDecision>> {
        let with = |new: UnitDecision| {
            let mut decided = decided.clone();
            decided.insert(unit, new);
            decided
        };
        match decided.get(&unit) {
            Some(UnitDecision::Partly { going, staying }) => {
                let more = |set: &BTreeSet<usize>| set.iter().copied().chain([part]).collect();
                vec![
                    with(UnitDecision::Partly { going: more(going), staying: staying.clone() }),
                    with(UnitDecision::Partly { going: going.clone(), staying: more(staying) }),
                ]
            }
            _ if self.parts.units[unit].is_elastic() => {
                let partly = UnitDecision::Partly { going: BTreeSet::new(), staying: BTreeSet::new() };
                vec![with(UnitDecision::Goes), with(partly)]
            }
            _ => vec![with(UnitDecision::Goes), with(UnitDecision::Stays)],
        }
    }
}
