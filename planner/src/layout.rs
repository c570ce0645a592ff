//! The devices of a pod on one machine: a set for every block of every ask. Pure. What a set is worth is the pool's
//! [`Site`]'s matter.

use gantry_api::{ContainerGrant, ContainerShare, DeviceId};
use gantry_topology::{GpuSet, LinkClass};

use crate::decide::megabytes;
use crate::devices::DeviceSet;
use crate::numa::{Admission, NumaNode, PodAlignment};
use crate::placement::SetTerms;
use crate::request::{Ask, ContainerAsk};
use crate::shape::Shape;
use crate::site::Site;

/// The devices of one ask on one machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// All devices the pod holds for its life.
    pub devices: DeviceSet,
    /// The devices of each block of [`Ask::blocks`].
    pub blocks: Vec<DeviceSet>,
    /// Bandwidth in GB/s of the worst-off group: the least over containers with two GPUs or more, none part of another.
    /// `None` if no container exchanges anything.
    pub gbs: Option<f64>,
    /// The least class of what carries the collectives of these groups; `None` as for `gbs`.
    pub class: Option<LinkClass>,
}

/// What a node has for one ask of a pod.
#[derive(Debug, Clone, Copy)]
pub struct Offer<'a> {
    pub site: Site<'a>,
    pub free: &'a DeviceSet,
    pub ask: &'a Ask,
}

/// The asks of a pod that kubelet aligns together.
pub struct AlignedAsks<'a> {
    pub alignment: PodAlignment<'a>,
    /// Their places among the offers.
    places: Vec<usize>,
    /// The free devices of each.
    pub free: Vec<&'a DeviceSet>,
}

impl<'a> AlignedAsks<'a> {
    /// Those of `offers`; `None` if kubelet aligns one ask at most.
    pub fn of(offers: &[Offer<'a>]) -> Option<Self> {
        if offers.len() < 2 {
            return None;
        }
        let each = offers.iter().enumerate();
        let aligned = each.filter_map(|(place, offer)| Some((place, (offer.site.alignment?, offer.ask))));
        let (places, aligned): (Vec<usize>, Vec<_>) = aligned.unzip();
        let alignment = (aligned.len() > 1).then(|| PodAlignment::joint(&aligned)).flatten()?;
        let free = places.iter().filter_map(|place| offers.get(*place)).map(|offer| offer.free);
        Some(Self { alignment, free: free.collect(), places })
    }

    /// These of `offers`.
    pub fn offers<'o>(&self, offers: &'o [Offer<'a>]) -> impl Iterator<Item = &'o Offer<'a>> {
        self.places.iter().filter_map(|place| offers.get(*place))
    }

    /// The devices of the blocks of each; `None` if one has no layout.
    fn blocks<'l>(&self, layout: impl Fn(usize) -> Option<&'l Layout>) -> Option<Vec<&'l [DeviceSet]>> {
        self.places.iter().map(|place| Some(&layout(*place)?.blocks[..])).collect()
    }

    /// Whether kubelet admits the pod where the asks have these layouts, by their places among the offers.
    fn are_admitted<'l>(&self, layout: impl Fn(usize) -> Option<&'l Layout>) -> bool {
        self.blocks(layout).is_some_and(|blocks| self.alignment.admits(&self.free, &blocks))
    }
}

impl Offer<'_> {
    /// Whether kubelet admits a pod with these layouts.
    pub fn are_admitted(offers: &[Self], layouts: &[Layout]) -> bool {
        if let Some(aligned) = AlignedAsks::of(offers) {
            return aligned.are_admitted(|place| layouts.get(place));
        }
        offers.iter().zip(layouts).all(|(offer, layout)| {
            let alignment = offer.site.alignment;
            alignment.is_none_or(|known| known.admits(offer.free, offer.ask, &layout.blocks))
        })
    }

    /// The CPUs and the memory that are left of the NUMA nodes with these layouts; `None` if they are not counted.
    pub fn numa_left(offers: &[Self], layouts: &[Layout]) -> Option<Vec<NumaNode>> {
        if let Some(aligned) = AlignedAsks::of(offers) {
            let blocks = aligned.blocks(|place| layouts.get(place))?;
            return aligned.alignment.left(&aligned.free, &blocks).filter(|left| !left.is_empty());
        }
        let mut each = offers.iter().zip(layouts).filter_map(|(offer, layout)| {
            let alignment = offer.site.alignment.filter(|known| known.counts(&offer.ask.numa))?;
            PodAlignment::single(alignment, offer.ask).left(&[offer.free], &[&layout.blocks])
        });
        each.next()
    }
}

impl Layout {
    /// The best layout of each ask of a pod; `None` if one does not fit, or if kubelet's Topology Manager refuses all
    /// sets of devices that the pod can have of them.
    pub fn best_of_all(offers: &[Offer<'_>]) -> Option<Vec<Self>> {
        let best = |offer: &Offer<'_>| Self::best(offer.site, offer.free, offer.ask);
        let Some(aligned) = AlignedAsks::of(offers) else {
            return offers.iter().map(best).collect();
        };
        let mut layouts: Vec<Option<Self>> = offers.iter().map(best).collect();
        if !aligned.are_admitted(|place| layouts.get(place)?.as_ref()) {
            let sites = aligned.offers(offers).map(|offer| offer.site).collect();
            let asks = aligned.alignment.asks().collect();
            match Search::new(sites, asks).layouts(&aligned.alignment, &aligned.free) {
                Some(found) => {
                    for (place, layout) in aligned.places.iter().zip(found) {
                        if let Some(known) = layouts.get_mut(*place) {
                            *known = Some(layout);
                        }
                    }
                }
                None if aligned.alignment.refuses() => return None,
                None => {}
            }
        }
        layouts.into_iter().collect()
    }

    /// The best layout of `ask` within `free`; `None` if it does not fit.
    ///
    /// The best one for the worst-off container wins, then the best one for the whole pod. Two ways are tried first: the
    /// best set for the whole pod, split among its containers; and the best set for each container, the largest first.
    /// Where a better layout may exist, it is searched for ([`JointSearch`]). If kubelet's Topology Manager refuses both, the
    /// containers are assigned one after the other, as kubelet does.
    pub fn best(site: Site<'_>, free: &DeviceSet, ask: &Ask) -> Option<Self> {
        let devices = usize::try_from(ask.devices).ok()?;
        if devices == 0 || devices > free.len() {
            return None;
        }
        let groups = groups(ask);
        let admitted = |layout: &Self| {
            site.alignment.is_none_or(|alignment| alignment.admits(free, ask, &layout.blocks))
        };
        let terms = match groups.iter().filter(|group| !group.nested).collect::<Vec<_>>()[..] {
            [only] => &only.terms,
            _ => &SetTerms::default(),
        };
        let whole = site.best_meeting(free, devices, terms).or_else(|| site.best(free, devices));
        let together = whole.and_then(|whole| Self::lay(site, &whole, ask, &groups)).filter(admitted);
        let in_order = || Self::in_order_of_admission(site, free, ask);
        if groups.iter().filter(|group| !group.nested).count() < 2 {
            return together.or_else(in_order);
        }
        let apart = Self::lay(site, free, ask, &groups).filter(admitted);
        let rated = |layout: Self| (layout.worth(site), layout);
        let best = match (apart.map(rated), together.map(rated)) {
            (Some(apart), Some(together)) if apart.0 > together.0 => Some(apart),
            (apart, together) => together.or(apart),
        };
        let (worth, best) = best.unzip();
        let better = JointSearch::of(site, free, &groups).and_then(|joint| joint.better_than(worth));
        better.and_then(|sets| Self::of_sets(site, sets, ask, &groups)).or(best).or_else(in_order)
    }

    /// The bandwidth of the worst-off container, then that of the whole pod, MB/s.
    fn worth(&self, site: Site<'_>) -> (u64, u64) {
        (self.gbs.map_or(u64::MAX, megabytes), site.bandwidth(&self.devices).map_or(0, megabytes))
    }

    fn lay(site: Site<'_>, from: &DeviceSet, ask: &Ask, groups: &[Group]) -> Option<Self> {
        let mut left = from.clone();
        let outer = groups.iter().filter(|group| !group.nested).map(|group| {
            let devices = site.best_meeting(&left, group.devices, &group.terms)?;
            left.remove(&devices);
            Some(devices)
        });
        let sets = outer.collect::<Option<Vec<DeviceSet>>>()?;
        Self::of_sets(site, sets, ask, groups)
    }

    /// The layout with these devices for each group that is not part of another.
    fn of_sets(site: Site<'_>, sets: Vec<DeviceSet>, ask: &Ask, groups: &[Group]) -> Option<Self> {
        let mut blocks = vec![DeviceSet::EMPTY; ask.blocks.len()];
        for (group, devices) in groups.iter().filter(|group| !group.nested).zip(sets) {
            split(site, devices, group, groups, ask, &mut blocks)?;
        }
        Some(Self::of(site, blocks, groups))
    }

    /// Devices of the NUMA nodes with which kubelet aligns each container, one container after the other.
    fn in_order_of_admission(site: Site<'_>, free: &DeviceSet, ask: &Ask) -> Option<Self> {
        let alignment = PodAlignment::single(site.alignment?, ask);
        Search::new(vec![site], vec![ask]).layouts(&alignment, &[free])?.pop()
    }

    fn of(site: Site<'_>, blocks: Vec<DeviceSet>, groups: &[Group]) -> Self {
        let mut gbs: Option<f64> = None;
        let mut class: Option<LinkClass> = None;
        for group in groups.iter().filter(|group| !group.nested && group.devices > 1) {
            let devices = union(group.blocks.iter().filter_map(|&block| blocks.get(block)));
            if let Some(reached) = site.bandwidth(&devices) {
                gbs = Some(gbs.map_or(reached, |least| least.min(reached)));
                let joined = site.class(&devices);
                class = Some(class.map_or(joined, |least| least.min(joined)));
            }
        }
        Self { devices: union(&blocks), blocks, gbs, class }
    }

    /// The grant of each container, with the IDs of the pool's devices; `None` if the pool has no such device.
    ///
    /// Empty where a container takes both devices that init containers left and new ones: neither form of a share can
    /// express that. The plugin then chooses by topology, and the ledger counts what the pod asks for.
    pub fn grants(&self, ask: &Ask, devices: &[Option<DeviceId>]) -> Option<Vec<ContainerGrant>> {
        let mixed = |container: &ContainerAsk| container.any_of_held > 0 && !container.blocks.is_empty();
        if ask.containers.iter().any(mixed) {
            return Some(Vec::new());
        }
        let grant = |container: &ContainerAsk| {
            let share = if container.any_of_held > 0 {
                ContainerShare::AnyOfHeld(container.any_of_held)
            } else {
                let blocks = container.blocks.iter().filter_map(|&block| self.blocks.get(block));
                let all = union(blocks);
                let ids = all.iter().map(|device| devices.get(device).cloned().flatten());
                let mut ids = ids.collect::<Option<Vec<_>>>()?;
                ids.sort_unstable();
                ContainerShare::Devices(ids)
            };
            Some(ContainerGrant { name: container.name.to_string(), resource: ask.resource.clone(), share })
        };
        ask.containers.iter().map(grant).collect()
    }
}

/// Sets of GPUs looked at in one search: enough for every layout on eight GPUs.
const MOST_SETS: u32 = 1 << 11;

/// The search for disjoint sets of whole GPUs, one for each group of containers that use theirs together. Complete on
/// machines of up to eight GPUs.
struct JointSearch<'s> {
    site: Site<'s>,
    free: GpuSet,
    groups: Vec<&'s Group>,
    /// The most that [`Layout::worth`] can be.
    bound: (u64, u64),
    best: Option<((u64, u64), Vec<GpuSet>)>,
    sets: u32,
}

impl<'s> JointSearch<'s> {
    /// `None` where sets are not compared by bandwidth alone: parts of GPUs, an order of models, kubelet's alignment.
    fn of(site: Site<'s>, free: &DeviceSet, groups: &'s [Group]) -> Option<Self> {
        let groups: Vec<&Group> = groups.iter().filter(|group| !group.nested).collect();
        let is_plain = matches!(site.shape, Shape::Whole) && site.alignment.is_none();
        if !is_plain || groups.iter().any(|group| !group.terms.models.is_empty()) {
            return None;
        }
        let most = |size: usize| site.best(free, size).and_then(|set| site.bandwidth(&set)).map(megabytes);
        let mut bound = (u64::MAX, most(groups.iter().map(|group| group.devices).sum())?);
        // The largest come first.
        for alike in groups.chunk_by(|a, b| a.devices == b.devices).filter(|alike| alike[0].devices > 1) {
            bound.0 = bound.0.min(most(alike[0].devices)?);
        }
        Some(Self { site, free: free.gpus(), groups, bound, best: None, sets: MOST_SETS })
    }

    /// The sets of the best layout, if it is better than `known`.
    fn better_than(mut self, known: Option<(u64, u64)>) -> Option<Vec<DeviceSet>> {
        if known.is_some_and(|known| known >= self.bound) {
            return None;
        }
        self.best = known.map(|known| (known, Vec::new()));
        self.search(self.free, u64::MAX, &mut Vec::new());
        let (_, sets) = self.best.filter(|(_, sets)| !sets.is_empty())?;
        Some(sets.into_iter().map(DeviceSet::from).collect())
    }

    /// Chooses the sets of the groups after those in `chosen`. The worst-off of those has `worst`.
    fn search(&mut self, left: GpuSet, worst: u64, chosen: &mut Vec<GpuSet>) {
        let Some(group) = self.groups.get(chosen.len()).copied() else {
            let worth = (worst, megabytes(self.site.kind.bandwidth(self.free - left)));
            if self.best.as_ref().is_none_or(|(best, _)| worth > *best) {
                self.best = Some((worth, chosen.clone()));
            }
            return;
        };
        // Alike groups are interchangeable.
        let before =
            chosen.len().checked_sub(1).and_then(|last| Some((self.groups.get(last)?, chosen.get(last)?)));
        let after = before.filter(|(other, _)| other.is_like(group)).map(|(_, set)| *set);
        for set in left.subsets(group.devices) {
            if self.sets == 0 || self.best.as_ref().is_some_and(|(best, _)| *best >= self.bound) {
                return;
            }
            self.sets -= 1;
            if after.is_some_and(|after| set <= after) || !self.site.meets(&set.into(), &group.terms) {
                continue;
            }
            let own = if set.len() > 1 { megabytes(self.site.kind.bandwidth(set)) } else { u64::MAX };
            let worst = worst.min(own);
            if self.best.as_ref().is_some_and(|(best, _)| worst < best.0) {
                continue;
            }
            chosen.push(set);
            self.search(left - set, worst, chosen);
            chosen.pop();
        }
    }
}

fn union<'a>(blocks: impl IntoIterator<Item = &'a DeviceSet>) -> DeviceSet {
    blocks.into_iter().fold(DeviceSet::EMPTY, |mut all, block| {
        all.add(block);
        all
    })
}

/// The most sets that are tried for the containers of a pod.
const MAX_ATTEMPTS: usize = 256;

/// The search for sets that kubelet admits, for one container after the other, in its order.
struct Search<'s> {
    /// By resource.
    sites: Vec<Site<'s>>,
    asks: Vec<&'s Ask>,
    attempts: usize,
}

impl<'s> Search<'s> {
    fn new(sites: Vec<Site<'s>>, asks: Vec<&'s Ask>) -> Self {
        // Kubelet's admission decides.
        let sites = sites.into_iter().map(|site| Site { alignment: None, ..site });
        Self { sites: sites.collect(), asks, attempts: MAX_ATTEMPTS }
    }

    /// The first layouts found, by resource.
    fn layouts(mut self, alignment: &PodAlignment<'_>, free: &[&DeviceSet]) -> Option<Vec<Layout>> {
        let admission = alignment.admission(free)?;
        let empty = |ask: &&Ask| vec![DeviceSet::EMPTY; ask.blocks.len()];
        let mut blocks: Vec<Vec<DeviceSet>> = self.asks.iter().map(empty).collect();
        if !self.assign_next(&admission, &mut blocks) {
            return None;
        }
        let each = self.sites.iter().zip(&self.asks).zip(blocks);
        Some(each.map(|((site, ask), blocks)| Layout::of(*site, blocks, &groups(ask))).collect())
    }

    /// Assigns the containers that are not admitted yet; whether kubelet admits all of them.
    fn assign_next(&mut self, admission: &Admission<'_>, blocks: &mut [Vec<DeviceSet>]) -> bool {
        let containers = admission.containers();
        containers.is_empty() || self.assign(admission, &containers, 0, blocks)
    }

    /// Assigns devices of `resource` and of those after it to the next container, and then the containers after it. A
    /// container on several NUMA nodes has the best set of these. If a later container is refused then, it has other
    /// numbers of devices of each of them.
    fn assign(
        &mut self,
        admission: &Admission<'_>,
        containers: &[Option<&ContainerAsk>],
        resource: usize,
        blocks: &mut [Vec<DeviceSet>],
    ) -> bool {
        let (Some(container), Some(ask)) = (containers.get(resource), self.asks.get(resource)) else {
            return self.admit(admission, containers, blocks);
        };
        let Some(container) = container else {
            return self.assign(admission, containers, resource + 1, blocks);
        };
        let (Some(offered), Some(site)) = (admission.offered(resource), self.sites.get(resource)) else {
            return false;
        };
        let assigned = blocks.get(resource).map_or(&[][..], |blocks| blocks);
        // The other blocks of the container are those of init containers.
        let is_new = |block: &&usize| assigned.get(**block).is_some_and(DeviceSet::is_empty);
        let Some(new) = container.blocks.iter().find(is_new).copied() else {
            return self.attempt() && self.assign(admission, containers, resource + 1, blocks);
        };
        let place = |blocks: &mut [Vec<DeviceSet>], set: DeviceSet| {
            if let Some(block) = blocks.get_mut(resource).and_then(|blocks| blocks.get_mut(new)) {
                *block = set;
            }
        };
        for set in candidates(*site, &offered, ask, container, new) {
            if !self.attempt() {
                break;
            }
            place(blocks, set);
            if self.assign(admission, containers, resource + 1, blocks) {
                return true;
            }
        }
        place(blocks, DeviceSet::EMPTY);
        false
    }

    /// Admits the next container with the devices of its blocks, and assigns the containers after it.
    fn admit(
        &mut self,
        admission: &Admission<'_>,
        containers: &[Option<&ContainerAsk>],
        blocks: &mut [Vec<DeviceSet>],
    ) -> bool {
        let mut devices = Vec::with_capacity(containers.len());
        for ((container, site), blocks) in containers.iter().zip(&self.sites).zip(blocks.iter()) {
            let set = container.map_or(DeviceSet::EMPTY, |container| container.devices_of(blocks));
            if container.is_some_and(|container| !site.meets_all(&set, &container.terms)) {
                return false;
            }
            devices.push(set);
        }
        let mut next = admission.clone();
        next.admit(&devices) && self.assign_next(&next, blocks)
    }

    /// Whether there is an attempt left. Takes it.
    fn attempt(&mut self) -> bool {
        let left = self.attempts.checked_sub(1);
        self.attempts = left.unwrap_or(0);
        left.is_some()
    }
}

/// Sets for a new block of a container, out of the devices of each NUMA node that it is aligned with.
fn candidates(
    site: Site<'_>,
    offered: &[DeviceSet],
    ask: &Ask,
    container: &ContainerAsk,
    block: usize,
) -> Vec<DeviceSet> {
    let size = ask.blocks.get(block).map_or(0, |size| *size as usize);
    let all = union(offered);
    let best = match container.blocks.len() {
        1 => site.best_meeting(&all, size, &container.terms),
        _ => site.best(&all, size),
    };
    let filled = offered.iter().filter(|node| node.len() < size).filter_map(|node| {
        let rest = site.best(&(&all - node), size - node.len())?;
        Some(&rest | node)
    });
    let parts = |counts: Vec<usize>| {
        let parts = offered.iter().zip(counts).map(|(node, count)| match count {
            0 => Some(DeviceSet::EMPTY),
            count => site.best(node, count),
        });
        Some(union(&parts.collect::<Option<Vec<DeviceSet>>>()?))
    };
    let divided = divisions(offered, size).into_iter().filter_map(parts);
    best.into_iter().chain(filled).chain(divided).collect()
}

/// The numbers of devices of each NUMA node that are `size` together, some of them; none if there is one node.
fn divisions(offered: &[DeviceSet], size: usize) -> Vec<Vec<usize>> {
    let mut divisions = Vec::new();
    if offered.len() > 1 {
        divide(offered, size, &mut Vec::new(), &mut divisions);
    }
    divisions
}

/// The most numbers of devices by NUMA node that are tried for one container.
const MAX_DIVISIONS: usize = 64;

fn divide(offered: &[DeviceSet], left: usize, chosen: &mut Vec<usize>, divisions: &mut Vec<Vec<usize>>) {
    let Some((first, rest)) = offered.split_first() else {
        if left == 0 {
            divisions.push(chosen.clone());
        }
        return;
    };
    let elsewhere: usize = rest.iter().map(DeviceSet::len).sum();
    for count in left.saturating_sub(elsewhere)..=left.min(first.len()) {
        if divisions.len() == MAX_DIVISIONS {
            return;
        }
        chosen.push(count);
        divide(rest, left - count, chosen, divisions);
        chosen.pop();
    }
}

/// Blocks that one container holds at once, which should be close together.
#[derive(Debug)]
struct Group {
    /// Indices into [`Ask::blocks`], ascending.
    blocks: Vec<usize>,
    devices: usize,
    /// Part of another group.
    nested: bool,
    /// What the devices must be.
    terms: SetTerms,
}

impl Group {
    fn is_like(&self, other: &Self) -> bool {
        self.devices == other.devices && self.terms == other.terms
    }
}

/// Every distinct group, the largest first. Kubelet's reuse makes them nested or apart, never crossing.
fn groups(ask: &Ask) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for container in &ask.containers {
        let mut blocks = container.blocks.clone();
        blocks.sort_unstable();
        if !blocks.is_empty() && groups.iter().all(|group| group.blocks != blocks) {
            let devices: u32 = blocks.iter().filter_map(|&block| ask.blocks.get(block)).sum();
            groups.push(Group {
                devices: usize::try_from(devices).unwrap_or(usize::MAX),
                blocks,
                nested: false,
                terms: container.terms.clone(),
            });
        }
    }
    groups.sort_by(|a, b| b.devices.cmp(&a.devices).then_with(|| a.blocks.cmp(&b.blocks)));
    for inner in 0..groups.len() {
        let nested =
            (0..groups.len()).any(|outer| outer != inner && contains(&groups[outer], &groups[inner]));
        groups[inner].nested = nested;
    }
    groups
}

fn contains(outer: &Group, inner: &Group) -> bool {
    inner.blocks.len() < outer.blocks.len() && inner.blocks.iter().all(|block| outer.blocks.contains(block))
}

/// Splits a group's devices among its blocks: the best part for the largest inner group first, then the next. What no
/// inner group has is one block.
fn split(
    site: Site<'_>,
    devices: DeviceSet,
    group: &Group,
    groups: &[Group],
    ask: &Ask,
    blocks: &mut [DeviceSet],
) -> Option<()> {
    let mut left = devices;
    let mut open = group.blocks.clone();
    for inner in groups.iter().filter(|inner| contains(group, inner)) {
        // A group inside one already split off was split with it.
        if !inner.blocks.iter().all(|block| open.contains(block)) {
            continue;
        }
        let part = site.best(&left, inner.devices)?;
        left.remove(&part);
        open.retain(|block| !inner.blocks.contains(block));
        split(site, part, inner, groups, ask, blocks)?;
    }
    for block in open {
        let size = usize::try_from(*ask.blocks.get(block)?).ok()?;
        let part = site.best(&left, size)?;
        left.remove(&part);
        *blocks.get_mut(block)? = part;
    }
    Some(())
}

#[cfg(test)]
mod tests;
