//! What is left of a node while members get their devices one after the other, as kubelet admits them.

use std::borrow::Cow;

use crate::devices::DeviceSet;
use crate::kind::Spot;
use crate::layout::{Layout, Offer};
use crate::numa::Alignment;
use crate::request::Request;
use crate::site::Site;
use crate::snapshot::Class;

/// The devices, the CPUs and the memory of a node that no member has.
#[derive(Debug, Clone)]
pub(super) struct DevicesLeft<'c> {
    pub(super) class: &'c Class,
    /// By pool.
    pub(super) free: Vec<DeviceSet>,
    /// How kubelet aligns the devices, by pool; with the CPUs and the memory that are left.
    pub(super) alignments: Vec<Option<Cow<'c, Alignment>>>,
}

impl<'c> DevicesLeft<'c> {
    /// All that a node has, with these free devices of each pool.
    pub(super) fn of(class: &'c Class, free: impl Iterator<Item = DeviceSet>) -> Self {
        let alignments = class.pools.iter().map(|pool| pool.alignment.as_deref().map(Cow::Borrowed));
        Self { class, free: free.collect(), alignments: alignments.collect() }
    }

    /// The layout of each ask of a member, with the number of its pool. It is taken. `None` if the member does not fit.
    pub(super) fn assign(&mut self, request: &Request) -> Option<Vec<(usize, Layout)>> {
        let cuts: Vec<Vec<Spot>> = request.asks.iter().map(|ask| self.class.cut_for(ask)).collect();
        let each = request.asks.iter().zip(&cuts).map(|(ask, cut)| {
            let (index, pool) = self.class.pool(ask.resource.as_str())?;
            let alignment = self.alignments.get(index)?.as_deref();
            let site = Site { alignment, ..self.class.site(pool, cut).for_gangs() };
            Some((index, Offer { site, free: self.free.get(index)?, ask }))
        });
        let each = each.collect::<Option<Vec<_>>>()?;
        let (indices, offers): (Vec<usize>, Vec<Offer<'_>>) = each.into_iter().unzip();
        let layouts = Layout::best_of_all(&offers)?;
        let left = Offer::numa_left(&offers, &layouts);
        for (index, layout) in indices.iter().zip(&layouts) {
            self.free.get_mut(*index)?.remove(&layout.devices);
        }
        // Only CPUs and memory change the alignments.
        if let Some(left) = left {
            for alignment in self.alignments.iter_mut().flatten() {
                *alignment = Cow::Owned(alignment.with_left(&left));
            }
        }
        Some(indices.into_iter().zip(layouts).collect())
    }
}
