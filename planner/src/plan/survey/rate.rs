//! How many members each node takes by devices, and at which bandwidth. Works per class of alike nodes.

use std::collections::BTreeSet;

use super::{Counting, Survey, available};
use crate::decide;
use crate::devices::DeviceSet;
use crate::input::Shape;
use crate::layout::Layout;
use crate::snapshot::{Class, NodeIx, Standing};

/// Bandwidths kept apart; the rest counts as the lowest.
const MOST_TIERS: usize = 8;

/// Members of one shape that a class takes.
#[derive(Debug, Clone, Default)]
pub(super) struct OfClass {
    /// Members by devices alone.
    members: u32,
    /// Bandwidth in MB/s of each next member, falling; empty if members exchange nothing.
    reach: Vec<u64>,
}

impl Survey<'_> {
    /// Works out the classes that matter.
    pub(super) fn rate(&mut self) {
        let slots = self.shapes.len();
        for (number, class) in self.input.snapshot.nodes.iter().enumerate() {
            let limits = &self.limits[number * slots..(number + 1) * slots];
            let class = class.0 as usize;
            if limits.iter().all(|limit| *limit == 0) || !self.classes[class].is_empty() {
                continue;
            }
            if let Some(Standing::Ours(of)) = self.input.snapshot.classes.get(class).map(|class| &**class) {
                self.classes[class] =
                    self.shapes.iter().map(|shape| of_class(of, shape, self.counting)).collect();
            }
        }
        self.tiers = (0..slots)
            .map(|slot| {
                let reached = self.classes.iter().filter_map(|class| class.get(slot));
                let mut tiers: BTreeSet<u64> = reached.flat_map(|of| of.reach.iter().copied()).collect();
                tiers.insert(0);
                let mut tiers: Vec<u64> = tiers.into_iter().rev().collect();
                if tiers.len() > MOST_TIERS {
                    tiers.drain(MOST_TIERS - 1..tiers.len() - 1);
                }
                // Where no member is slower than the second slowest, that one counts for all.
                if tiers.len() > 1 && self.all_reach(slot, tiers[tiers.len() - 2]) {
                    tiers.pop();
                }
                tiers
            })
            .collect();
    }

    fn all_reach(&self, slot: usize, tier: u64) -> bool {
        self.classes.iter().filter_map(|class| class.get(slot)).all(|of| {
            of.members as usize == of.reach.len() && of.reach.last().is_none_or(|last| *last >= tier)
        })
    }

    /// How many steps of bandwidth there are.
    pub(in crate::plan) fn tiers(&self) -> usize {
        self.tiers.iter().map(Vec::len).max().unwrap_or(1)
    }

    /// The step at which everything that fits counts.
    pub(in crate::plan) fn lowest_tier(&self) -> usize {
        self.tiers().saturating_sub(1)
    }

    /// Members of a shape that a node takes at the bandwidth of a step or better.
    pub(in crate::plan) fn takes(&self, node: NodeIx, slot: usize, tier: usize) -> u32 {
        let limit = self.limits.get(node.0 as usize * self.shapes.len() + slot);
        let limit = limit.copied().unwrap_or(0);
        if limit == 0 {
            return 0;
        }
        let class = self.input.snapshot.class(node).and_then(|class| self.classes.get(class.0 as usize));
        let Some(of) = class.and_then(|class| class.get(slot)) else {
            return 0;
        };
        let tiers = &self.tiers[slot];
        let members = match tiers.get(tier) {
            Some(least) if tier + 1 < tiers.len() => {
                u32::try_from(of.reach.partition_point(|reach| reach >= least)).unwrap_or(u32::MAX)
            }
            _ => of.members,
        };
        limit.min(members)
    }
}

fn of_class(class: &Class, shape: &Shape, counting: Counting) -> OfClass {
    let mut of = OfClass::default();
    if counting != Counting::Empty && class.not_ready.is_some() {
        return of;
    }
    let mut members = u32::MAX;
    for ask in &shape.request.asks {
        let Some((_, pool)) = class.pool(ask.resource.as_str()) else {
            return of;
        };
        if decide::too_many(pool.max_request, ask).is_some() || ask.devices == 0 {
            return of;
        }
        let free = u32::try_from(available(pool, counting)).unwrap_or(u32::MAX);
        members = members.min(free / ask.devices);
    }
    of.members = if shape.request.asks.is_empty() { 0 } else { members };
    let exchanges = shape.request.asks.iter().any(|ask| ask.most().is_some_and(|(_, devices)| devices > 1));
    if exchanges && counting != Counting::Empty {
        of.reach = reach(class, shape, counting, of.members);
    }
    of
}

/// The bandwidth of each next member, never rising.
fn reach(class: &Class, shape: &Shape, counting: Counting, members: u32) -> Vec<u64> {
    let mut free: Vec<DeviceSet> = class
        .pools
        .iter()
        .map(|pool| if counting == Counting::Open { pool.open.clone() } else { pool.free.clone() })
        .collect();
    let mut reach = Vec::new();
    let mut last = u64::MAX;
    for _ in 0..members {
        let mut least: Option<f64> = None;
        for ask in &shape.request.asks {
            let Some((index, pool)) = class.pool(ask.resource.as_str()) else {
                return reach;
            };
            let cut = class.cut_beside(index);
            let site = class.site(pool, &cut).for_gangs();
            let Some(layout) = Layout::best(site, &free[index], ask) else {
                return reach;
            };
            free[index].remove(&layout.devices);
            least = match (least, layout.gbs) {
                (Some(least), Some(gbs)) => Some(least.min(gbs)),
                (least, gbs) => least.or(gbs),
            };
        }
        let Some(gbs) = least else { return Vec::new() };
        last = last.min(decide::megabytes(gbs));
        reach.push(last);
    }
    reach
}
