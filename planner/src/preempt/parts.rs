//! Victim candidates by what can go alone: a single pod, a whole gang, or each pod of a gang that has more than its
//! minimum.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::loss::Loss;
use super::{CandidatePod, VictimCandidate};

/// What goes together.
#[derive(Debug)]
pub(super) struct Part<'c> {
    pub(super) unit: usize,
    pub(super) pods: Vec<&'c CandidatePod>,
    /// Its first pod's position in the unit.
    pub(super) first: usize,
    /// The loss if nothing else of its unit goes.
    pub(super) loss: Loss,
}

/// A unit, with its parts.
#[derive(Debug)]
pub(super) struct Unit<'c> {
    pub(super) candidate: &'c VictimCandidate,
    pub(super) parts: Range<usize>,
    /// The loss if all of it goes.
    pub(super) whole: Loss,
}

impl Unit<'_> {
    /// Whether pods of it may go while the others stay.
    pub(super) fn is_elastic(&self) -> bool {
        self.candidate.surplus.pods > 0
    }
}

/// All candidates in parts.
#[derive(Debug)]
pub(super) struct Parts<'c> {
    pub(super) units: Vec<Unit<'c>>,
    pub(super) all: Vec<Part<'c>>,
}

impl<'c> Parts<'c> {
    pub(super) fn of(candidates: &[&'c VictimCandidate]) -> Self {
        let mut order: Vec<usize> = (0..candidates.len()).collect();
        let key = |at: &usize| {
            let candidate = candidates[*at];
            (candidate.priority, !candidate.checkpointed, Reverse(candidate.since), candidate.name())
        };
        order.sort_by(|a, b| key(a).cmp(&key(b)));
        let mut first = vec![0; candidates.len()];
        let mut next: u64 = 1;
        for at in order {
            first[at] = next;
            next += candidates[at].pods.len() as u64;
        }
        let mut parts = Self { units: Vec::new(), all: Vec::new() };
        for (unit, (candidate, first)) in candidates.iter().zip(first).enumerate() {
            parts.add(unit, candidate, first);
        }
        parts
    }

    fn add(&mut self, unit: usize, candidate: &'c VictimCandidate, first: u64) {
        let of_pod = |(pod, order): (&CandidatePod, u64)| Loss {
            devices: u32::try_from(pod.count()).unwrap_or(u32::MAX),
            pods: 1,
            gangs: 0,
            needed: 0,
            unsaved: u32::from(!candidate.checkpointed),
            order,
        };
        let pods = candidate.pods.iter().zip(first..);
        let whole = Loss {
            gangs: u32::from(candidate.is_gang),
            needed: u32::try_from(candidate.pods.len()).unwrap_or(u32::MAX),
            ..pods.clone().map(of_pod).sum()
        };
        let from = self.all.len();
        let elastic = candidate.surplus.pods > 0;
        if elastic {
            self.all.extend(pods.enumerate().map(|(first, (pod, order))| Part {
                unit,
                pods: vec![pod],
                first,
                loss: of_pod((pod, order)),
            }));
        } else {
            let pods = candidate.pods.iter().collect();
            self.all.push(Part { unit, pods, first: 0, loss: whole });
        }
        self.units.push(Unit { candidate, parts: from..self.all.len(), whole });
    }
}

/// Some of the parts, all of which go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ChosenParts {
    /// By unit: its parts that go.
    by_unit: BTreeMap<usize, Vec<usize>>,
}

impl ChosenParts {
    pub(super) fn add(&mut self, parts: &Parts<'_>, part: usize) {
        let going = self.by_unit.entry(parts.all[part].unit).or_default();
        if let Err(at) = going.binary_search(&part) {
            going.insert(at, part);
        }
    }

    pub(super) fn add_whole(&mut self, parts: &Parts<'_>, unit: usize) {
        self.by_unit.insert(unit, parts.units[unit].parts.clone().collect());
    }

    /// The same of some units alone.
    pub(super) fn only(&self, units: impl Iterator<Item = usize>) -> Self {
        let of = |unit: usize| Some((unit, self.by_unit.get(&unit)?.clone()));
        Self { by_unit: units.filter_map(of).collect() }
    }

    /// The units that lose a pod, with their parts that go.
    pub(super) fn units(&self) -> impl Iterator<Item = (usize, &[usize])> {
        self.by_unit.iter().map(|(unit, going)| (*unit, going.as_slice()))
    }

    pub(super) fn contains(&self, parts: &Parts<'_>, part: usize) -> bool {
        let going = self.by_unit.get(&parts.all[part].unit);
        going.is_some_and(|going| going.binary_search(&part).is_ok())
    }

    /// All parts, as a key.
    pub(super) fn list(&self) -> Vec<usize> {
        self.by_unit.values().flatten().copied().collect()
    }

    pub(super) fn pods<'c>(&self, parts: &Parts<'c>) -> Vec<&'c CandidatePod> {
        self.by_unit.values().flatten().flat_map(|part| parts.all[*part].pods.iter().copied()).collect()
    }

    pub(super) fn loss(&self, parts: &Parts<'_>) -> Loss {
        let of_unit = |(unit, going): (usize, &[usize])| {
            let of = &parts.units[unit];
            match going.len() == of.parts.len() {
                true => of.whole,
                false => going.iter().map(|part| parts.all[*part].loss).sum(),
            }
        };
        self.units().map(of_unit).sum()
    }

    /// Whether the rest of a unit goes on when these parts of it go.
    pub(super) fn leaves_minimum(parts: &Parts<'_>, unit: usize, going: &[usize]) -> bool {
        let candidate = parts.units[unit].candidate;
        let surplus = &candidate.surplus;
        let of_role = |role: usize| {
            let roles = going.iter().flat_map(|part| &parts.all[*part].pods).map(|pod| pod.role);
            roles.filter(|own| *own == role).count()
        };
        going.len() <= surplus.pods as usize
            && surplus.by_role.iter().enumerate().all(|(role, most)| of_role(role) <= *most as usize)
    }

    /// A budget that does not allow all of it, if there is one.
    pub(super) fn exceeded(&self, parts: &Parts<'_>) -> Option<Arc<str>> {
        let mut used = BudgetUse::default();
        self.list().into_iter().find_map(|part| used.add(parts, part))
    }

    /// What it needs of budgets.
    pub(super) fn budgets(&self, parts: &Parts<'_>) -> BudgetUse {
        let mut used = BudgetUse::default();
        for part in self.list() {
            used.add(parts, part);
        }
        used
    }
}

/// Pods that go, by the budget that they count against.
#[derive(Debug, Clone, Default)]
pub(super) struct BudgetUse(BTreeMap<Arc<str>, u32>);

impl BudgetUse {
    /// Adds a part. Returns a budget that it exceeds.
    fn add(&mut self, parts: &Parts<'_>, part: usize) -> Option<Arc<str>> {
        let mut exceeded = None;
        for (name, allowed, pods) in budgets_of(parts, part) {
            let used = self.0.entry(Arc::clone(name)).or_default();
            *used = used.saturating_add(pods);
            if *used > allowed {
                exceeded = Some(Arc::clone(name));
            }
        }
        exceeded
    }

    /// Adds a part, if the budgets allow it.
    pub(super) fn take(&mut self, parts: &Parts<'_>, part: usize) -> bool {
        let may = self.allows(parts, part);
        if may {
            self.add(parts, part);
        }
        may
    }

    /// Whether a part may go in addition.
    pub(super) fn allows(&self, parts: &Parts<'_>, part: usize) -> bool {
        budgets_of(parts, part).all(|(name, allowed, pods)| {
            self.0.get(name).copied().unwrap_or(0).saturating_add(pods) <= allowed
        })
    }
}

/// The budgets that a part counts against, what each allows, and how many of the pods it covers.
pub(super) fn budgets_of<'p>(
    parts: &'p Parts<'_>,
    part: usize,
) -> impl Iterator<Item = (&'p Arc<str>, u32, u32)> {
    let Part { unit, pods, first, .. } = &parts.all[part];
    let own = *first..first + pods.len();
    parts.units[*unit].candidate.budgets.iter().filter_map(move |budget| {
        let covered = budget.pods.iter().filter(|pod| own.contains(&(**pod as usize))).count();
        (covered > 0).then(|| (&budget.name, budget.allowed, u32::try_from(covered).unwrap_or(u32::MAX)))
    })
}
