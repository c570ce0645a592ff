//! Chooses the devices of the members on each node: all members of a node at once, through the choice tables, as if
//! they were containers of one pod.

use std::collections::{BTreeMap, HashMap, VecDeque};

use gantry_api::{DeviceId, ResourceName};
use gantry_gang::protocol::Devices;
use gantry_topology::{GpuSet, NicSet};

use super::devices_left::DevicesLeft;
use super::fill::Run;
use super::rails::{Aim, NodeRails};
use super::survey::{FreeRule, Survey};
use crate::decide::megabytes;
use crate::devices::DeviceSet;
use crate::input::ExactNode;
use crate::layout::Layout;
use crate::numa::Alignment;
use crate::request::{Ask, NumaDemand};
use crate::shape::Shape;
use crate::site::Site;
use crate::snapshot::{Class, ClassIx, NodeIx, Pool};

/// The devices of a plan.
pub(super) struct DeviceAssignment {
    /// Of each member of each run, in order.
    pub(super) devices: Vec<Vec<Devices>>,
    /// The nodes of all members, also of those that have a reservation.
    pub(super) rails: Vec<(NodeIx, NodeRails)>,
    /// The bandwidth of the slowest member, MB/s.
    pub(super) slowest: u64,
}

/// The devices of the members of one node.
struct OnNode {
    /// By shape, of each member.
    members: Vec<Vec<Devices>>,
    /// The whole GPUs among them.
    gpus: GpuSet,
    nics: NicSet,
    /// The bandwidth of the slowest member, GB/s.
    slowest: f64,
}

/// Sets on the rails that are aimed at, by class and numbers of members. Alike nodes get alike devices.
type RailSets = HashMap<(ClassIx, Vec<u32>), Option<DeviceSet>>;

/// Assigns the devices of each member of each run.
///
/// # Errors
/// The first node that does not have the devices that its class has.
pub(super) fn assign_devices(
    survey: &Survey<'_>,
    runs: &[Run],
    aim: &Aim,
) -> Result<DeviceAssignment, NodeIx> {
    let mut on: BTreeMap<NodeIx, Vec<u32>> = BTreeMap::new();
    for run in runs {
        on.entry(run.node).or_insert_with(|| vec![0; survey.shapes.len()])[run.slot] += run.count;
    }
    let mut laid: HashMap<(NodeIx, usize), VecDeque<Devices>> = HashMap::new();
    let mut rails = Vec::with_capacity(on.len() + aim.taken.len());
    for (node, taken) in aim.taken.iter().filter(|(node, _)| !on.contains_key(node)) {
        let nics = survey.class(*node).map_or(NicSet::default(), |class| class.kind.rails(*taken));
        rails.push((*node, NodeRails { gpus: taken.len(), nics }));
    }
    let mut slowest = f64::INFINITY;
    let mut known = RailSets::new();
    for (node, counts) in on {
        let taken = aim.taken.get(&node).copied().unwrap_or_default();
        let on = on_node(survey, node, &counts, (aim, taken), &mut known).ok_or(node)?;
        slowest = slowest.min(on.slowest);
        rails.push((node, NodeRails { gpus: on.gpus.len(), nics: on.nics }));
        for (slot, members) in on.members.into_iter().enumerate() {
            laid.insert((node, slot), members.into());
        }
    }
    let devices: Result<_, NodeIx> = runs
        .iter()
        .map(|run| {
            let members = laid.get_mut(&(run.node, run.slot)).ok_or(run.node)?;
            let count = run.count as usize;
            (members.len() >= count).then(|| members.drain(..count).collect()).ok_or(run.node)
        })
        .collect();
    Ok(DeviceAssignment { devices: devices?, rails, slowest: megabytes(slowest) })
}

/// The devices of the members on a node. `aim`: with the GPUs of members that have a reservation there.
fn on_node(
    survey: &Survey<'_>,
    node: NodeIx,
    counts: &[u32],
    (aim, taken): (&Aim, GpuSet),
    known: &mut RailSets,
) -> Option<OnNode> {
    let exact = (survey.input.exact)(node)?;
    let mut resources: Vec<&ResourceName> = Vec::new();
    for (shape, _) in survey.shapes.iter().zip(counts).filter(|(_, count)| **count > 0) {
        resources.extend(shape.request.asks.iter().map(|ask| &ask.resource));
    }
    resources.sort_unstable();
    resources.dedup();
    if are_one_by_one(&exact.class, resources.iter().copied(), counts.iter().sum()) {
        return one_by_one(survey, &exact, counts, taken);
    }
    let mut members: Vec<Vec<Devices>> =
        counts.iter().map(|count| vec![Vec::new(); *count as usize]).collect();
    let (mut gpus, mut slowest) = (taken, f64::INFINITY);
    for resource in resources {
        let (index, pool) = exact.class.pool(resource.as_str())?;
        let cut = exact.class.cut_beside(index);
        let site = exact.class.site(pool, &cut).for_gangs();
        let (ask, owners) = together(survey, resource, counts)?;
        let open = Layout::best(site, &pool.open, &ask);
        let layout = match survey.counting {
            FreeRule::Open => open,
            _ => open.or_else(|| Layout::best(site, &pool.free, &ask)),
        }?;
        let layout = match pool.shape {
            Shape::Whole => {
                let free = if layout.devices.is_subset(&pool.open) { &pool.open } else { &pool.free };
                let target = aim.rails.of(gpus.len() + layout.devices.len());
                let better = target
                    .filter(|nics| site.kind.rails(gpus | layout.devices.gpus()) != *nics)
                    .and_then(|nics| {
                        let search = || on_rails(site, free, &ask, (nics, gpus), aim.floor);
                        let class = survey.input.snapshot.class(node).filter(|_| gpus.is_empty());
                        let found = match class {
                            Some(class) => {
                                known.entry((class, counts.to_vec())).or_insert_with(search).clone()
                            }
                            None => search(),
                        };
                        Layout::best(site, &found.filter(|found| found.is_subset(free))?, &ask)
                    });
                let layout = better.unwrap_or(layout);
                gpus = gpus | layout.devices.gpus();
                layout
            }
            Shape::Parts(_) => layout,
        };
        slowest = slowest.min(layout.gbs.unwrap_or(f64::INFINITY));
        for (slot, member, blocks) in owners {
            let mut devices = DeviceSet::EMPTY;
            for block in layout.blocks.get(blocks)? {
                devices.add(block);
            }
            let ids = exact.ids.get(index)?;
            let ids: Option<Vec<DeviceId>> =
                devices.iter().map(|device| ids.get(device).cloned().flatten()).collect();
            members.get_mut(slot)?.get_mut(member)?.push((resource.clone(), ids?));
        }
    }
    let nics = exact.class.kind.rails(gpus);
    Some(OnNode { members, gpus, nics, slowest })
}

/// Whether kubelet aligns the devices of so many members in another way than those of one pod with all of their
/// containers: the devices of several resources together, or those of a whole pod.
fn are_one_by_one<'a>(
    class: &Class,
    resources: impl Iterator<Item = &'a ResourceName>,
    members: u32,
) -> bool {
    let alignment = |resource: &ResourceName| class.pool(resource.as_str())?.1.alignment.as_deref();
    let aligned: Vec<&Alignment> = resources.filter_map(alignment).collect();
    aligned.len() > 1 || (members > 1 && aligned.iter().any(|alignment| alignment.is_of_pods()))
}

/// The devices of the members on a node, one member after the other.
fn one_by_one(survey: &Survey<'_>, exact: &ExactNode<'_>, counts: &[u32], taken: GpuSet) -> Option<OnNode> {
    let open = DevicesLeft::of(&exact.class, exact.class.pools.iter().map(|pool| pool.open.clone()));
    let on = assign_in_order(survey, exact, counts, taken, open);
    match survey.counting {
        FreeRule::Open => on,
        _ => on.or_else(|| {
            let free = DevicesLeft::of(&exact.class, exact.class.pools.iter().map(|pool| pool.free.clone()));
            assign_in_order(survey, exact, counts, taken, free)
        }),
    }
}

fn assign_in_order(
    survey: &Survey<'_>,
    exact: &ExactNode<'_>,
    counts: &[u32],
    taken: GpuSet,
    mut left: DevicesLeft<'_>,
) -> Option<OnNode> {
    let mut on = OnNode { members: Vec::new(), gpus: taken, nics: NicSet::default(), slowest: f64::INFINITY };
    for (shape, count) in survey.shapes.iter().zip(counts) {
        let mut members = Vec::with_capacity(*count as usize);
        for _ in 0..*count {
            let mut member: Devices = Vec::new();
            for (ask, (index, layout)) in shape.request.asks.iter().zip(left.assign(&shape.request)?) {
                let ids = exact.ids.get(index)?;
                let ids = layout.devices.iter().map(|device| ids.get(device).cloned().flatten());
                member.push((ask.resource.clone(), ids.collect::<Option<Vec<DeviceId>>>()?));
                on.slowest = on.slowest.min(layout.gbs.unwrap_or(f64::INFINITY));
                if matches!(exact.class.pools.get(index)?.shape, Shape::Whole) {
                    on.gpus = on.gpus | layout.devices.gpus();
                }
            }
            members.push(member);
        }
        on.members.push(members);
    }
    on.nics = exact.class.kind.rails(on.gpus);
    Some(on)
}

/// The best free set for all members of a node that is on some rails together with `taken`, and no slower than `floor`.
/// `None` if there is none, and where kubelet aligns devices: it chooses the NUMA nodes.
fn on_rails(
    site: Site<'_>,
    free: &DeviceSet,
    ask: &Ask,
    (nics, taken): (NicSet, GpuSet),
    floor: u64,
) -> Option<DeviceSet> {
    let accepts = |set: GpuSet| {
        let layout = || Layout::best(site, &DeviceSet::from(set), ask);
        site.kind.rails(taken | set) == nics
            && layout().is_some_and(|layout| layout.gbs.is_none_or(|gbs| megabytes(gbs) >= floor))
    };
    let size = usize::try_from(ask.devices).ok()?;
    let found = match site.alignment {
        Some(_) => None,
        None => site.kind.best_where(free.gpus(), size, site.purpose, accepts),
    };
    found.map(DeviceSet::from)
}

/// Index of the shape, number of the member, its blocks.
type BlockOwner = (usize, usize, std::ops::Range<usize>);

/// The members' asks of a resource merged into one, and the owner of each block.
fn together(survey: &Survey<'_>, resource: &ResourceName, counts: &[u32]) -> Option<(Ask, Vec<BlockOwner>)> {
    let mut all = Ask {
        resource: resource.clone(),
        devices: 0,
        blocks: Vec::new(),
        containers: Vec::new(),
        numa: Vec::new(),
    };
    let mut owners = Vec::new();
    for (slot, (shape, count)) in survey.shapes.iter().zip(counts).enumerate() {
        let Some(ask) = shape.request.asks.iter().find(|ask| ask.resource == *resource) else {
            continue;
        };
        for member in 0..*count as usize {
            let (from, first) = (all.blocks.len(), all.containers.len());
            let none = (0..ask.containers.len()).map(NumaDemand::none);
            let demands: Vec<NumaDemand> =
                if ask.numa.is_empty() { none.collect() } else { ask.numa.clone() };
            all.numa.extend(demands.into_iter().map(|demand| NumaDemand {
                container: demand.container.map(|container| container + first),
                ..demand
            }));
            all.devices = all.devices.checked_add(ask.devices)?;
            all.blocks.extend_from_slice(&ask.blocks);
            all.containers.extend(ask.containers.iter().cloned().map(|mut container| {
                for block in &mut container.blocks {
                    *block += from;
                }
                container
            }));
            owners.push((slot, member, from..all.blocks.len()));
        }
    }
    if all.numa.iter().all(|container| container.needs.is_none()) {
        all.numa.clear();
    }
    Some((all, owners))
}

impl Survey<'_> {
    /// How much of what a node's free devices are good for is lost by so many members of a shape, in billionths. 0
    /// where a GPU has several devices: there the number of free ones is enough.
    pub(super) fn lost(&self, node: NodeIx, slot: usize, members: u32) -> i64 {
        let mut lost = 0.0;
        let (Some(class), Some(shape)) = (self.class(node), self.shapes.get(slot)) else {
            return 0;
        };
        let mut counts = vec![0; self.shapes.len()];
        counts[slot] = members;
        let from =
            |pool: &Pool| if self.counting == FreeRule::Open { pool.open.clone() } else { pool.free.clone() };
        let resources = shape.request.asks.iter().map(|ask| &ask.resource);
        let in_order = are_one_by_one(class, resources, members).then(|| {
            let mut left = DevicesLeft::of(class, class.pools.iter().map(from));
            (0..members).map_while(|_| left.assign(&shape.request)).for_each(drop);
            left.free
        });
        for ask in &shape.request.asks {
            let found = class.pool(ask.resource.as_str());
            let Some((index, pool)) = found.filter(|(_, pool)| matches!(pool.shape, Shape::Whole)) else {
                continue;
            };
            let site = class.site(pool, &[]).for_gangs();
            let free = if self.counting == FreeRule::Open { &pool.open } else { &pool.free };
            let taken = match &in_order {
                Some(left) => left.get(index).map(|left| free - left),
                None => together(self, &ask.resource, &counts)
                    .and_then(|(ask, _)| Layout::best(site, free, &ask))
                    .map(|laid| laid.devices),
            };
            lost += taken.map_or(0.0, |taken| site.stranded(free, &taken));
        }
        billionths(lost)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "losses lie between -1 and 1 for each resource")]
fn billionths(value: f64) -> i64 {
    (value * 1e9).round() as i64
}
