//! A good choice of victims where the exact search takes too long: what budgets allow together, without every unit that
//! can be spared, the most costly first.

use std::collections::BTreeSet;

use gantry_gang::protocol::PlanRequest;

use super::ExactInput;
use super::parts::{BudgetUse, ChosenParts, Parts};
use super::search::Search;
use crate::snapshot::NodeIx;

/// Nodes looked at to spare units. On a large cluster more victims may go than necessary.
const SPARED: usize = 1 << 19;

/// The greedy choice.
pub(super) struct GreedySearch<'s, 't, 'a> {
    cluster: &'s ExactInput<'t, 'a>,
    wanted: &'s PlanRequest,
    parts: &'s Parts<'s>,
    attempts: usize,
}

impl<'s, 't, 'a> GreedySearch<'s, 't, 'a> {
    pub(super) fn new(
        cluster: &'s ExactInput<'t, 'a>,
        wanted: &'s PlanRequest,
        parts: &'s Parts<'s>,
    ) -> Self {
        Self { cluster, wanted, parts, attempts: SPARED / cluster.nodes().max(1) }
    }

    /// The better of a choice that was `found` and a greedy one; `None` if no set is found that makes room within the
    /// budgets.
    pub(super) fn choose(mut self, found: Option<ChosenParts>) -> Option<ChosenParts> {
        let (cluster, wanted, parts) = (self.cluster, self.wanted, self.parts);
        let mut unlimited = u64::MAX;
        let mut search = Search::new(cluster, wanted, parts, &mut unlimited);
        let mut best = found.map(|found| self.spare(found, &mut search));
        // Units where the gang would go if all went come first.
        let pods: Vec<_> = parts.all.iter().flat_map(|part| part.pods.iter().copied()).collect();
        let near = search.nodes_without(&pods).unwrap_or_default();
        for near in [BTreeSet::new(), near] {
            let mut chosen = self.allowed(&near);
            if !search.makes_room(&chosen) {
                continue;
            }
            let on_plan = search.nodes_without(&chosen.pods(parts)).map(|nodes| self.on(&chosen, &nodes));
            if let Some(fewer) = on_plan.filter(|fewer| search.makes_room(fewer)) {
                chosen = fewer;
            }
            let chosen = self.spare(chosen, &mut search);
            if best.as_ref().is_none_or(|best| chosen.loss(parts) < best.loss(parts)) {
                best = Some(chosen);
            }
        }
        best
    }

    /// As many whole units as the budgets allow together, those with pods on some nodes first; of units that may not go
    /// as a whole what is beyond their minimum.
    fn allowed(&self, before: &BTreeSet<NodeIx>) -> ChosenParts {
        let parts = self.parts;
        let is_before = |unit: &usize| {
            let mut pods = parts.units[*unit].candidate.pods.iter();
            pods.any(|pod| before.contains(&pod.node))
        };
        let mut order: Vec<usize> = (0..parts.units.len()).collect();
        order.sort_by_key(|unit| (!is_before(unit), parts.units[*unit].whole));
        let mut chosen = ChosenParts::default();
        let mut used = BudgetUse::default();
        for unit in order {
            let all = parts.units[unit].parts.clone();
            let mut with_all = used.clone();
            if all.clone().all(|part| with_all.take(parts, part)) {
                used = with_all;
                chosen.add_whole(parts, unit);
                continue;
            }
            let mut going: Vec<usize> = Vec::new();
            for part in all.filter(|_| parts.units[unit].is_elastic()) {
                let more = [going.as_slice(), &[part]].concat();
                if ChosenParts::leaves_minimum(parts, unit, &more) && used.take(parts, part) {
                    going = more;
                }
            }
            going.into_iter().for_each(|part| chosen.add(parts, part));
        }
        chosen
    }

    /// The units of a choice with pods on some nodes.
    fn on(&self, chosen: &ChosenParts, nodes: &BTreeSet<NodeIx>) -> ChosenParts {
        let is_on = |part: &usize| self.parts.all[*part].pods.iter().any(|pod| nodes.contains(&pod.node));
        let units = chosen.units().filter(|(_, going)| going.iter().any(is_on));
        chosen.only(units.map(|(unit, _)| unit))
    }

    /// The choice without what can be spared, the most costly units first, whole stretches at once while that succeeds.
    /// Then only members beyond the minimum go of each gang where they suffice.
    fn spare(&mut self, chosen: ChosenParts, search: &mut Search<'_, '_, '_, '_>) -> ChosenParts {
        let parts = self.parts;
        let mut units: Vec<usize> = chosen.units().map(|(unit, _)| unit).collect();
        units.sort_by_key(|unit| std::cmp::Reverse(parts.units[*unit].whole));
        let mut kept = chosen;
        let (mut at, mut size) = (0, units.len());
        while at < units.len() && self.another() {
            size = size.clamp(1, units.len() - at);
            let fewer: Vec<usize> = units[..at].iter().chain(&units[at + size..]).copied().collect();
            let without = kept.only(fewer.iter().copied());
            if search.makes_room(&without) {
                (kept, units) = (without, fewer);
                size *= 2;
            } else if size == 1 {
                at += 1;
            } else {
                size /= 2;
            }
        }
        for unit in units.into_iter().filter(|unit| parts.units[*unit].is_elastic()) {
            kept = self.shrink(kept, unit, search);
        }
        kept
    }

    /// The choice with as few members of a gang as suffice, if those beyond its minimum do.
    fn shrink(
        &mut self,
        chosen: ChosenParts,
        unit: usize,
        search: &mut Search<'_, '_, '_, '_>,
    ) -> ChosenParts {
        let parts = self.parts;
        let rest = chosen.only(chosen.units().map(|(unit, _)| unit).filter(|other| *other != unit));
        let with = |going: &[usize]| {
            let mut with = rest.clone();
            going.iter().for_each(|part| with.add(parts, *part));
            with
        };
        let nodes = search.nodes_without(&chosen.pods(parts)).unwrap_or_default();
        let mut order: Vec<usize> = parts.units[unit].parts.clone().collect();
        order.sort_by_key(|part| !parts.all[*part].pods.iter().any(|pod| nodes.contains(&pod.node)));
        let mut going: Vec<usize> = Vec::new();
        for part in order {
            let more = [going.as_slice(), &[part]].concat();
            if ChosenParts::leaves_minimum(parts, unit, &more) {
                going = more;
            }
        }
        if !search.makes_room(&with(&going)) {
            return chosen;
        }
        for part in going.clone() {
            let fewer: Vec<usize> = going.iter().copied().filter(|other| *other != part).collect();
            if self.another() && search.makes_room(&with(&fewer)) {
                going = fewer;
            }
        }
        with(&going)
    }

    /// Takes one attempt; false if none is left.
    fn another(&mut self) -> bool {
        let left = self.attempts;
        self.attempts = left.saturating_sub(1);
        left > 0
    }
}
