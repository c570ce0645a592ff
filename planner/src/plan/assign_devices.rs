//! Chooses the devices of the members on each node: all members of a node at once, through the choice tables, as if
//! they were containers of one pod.

use std::collections::{BTreeMap, HashMap, VecDeque};

use gantry_api::{DeviceId, ResourceName};
use gantry_gang::protocol::Devices;

use super::fill::Run;
use super::survey::{Counting, Survey};
use crate::devices::DeviceSet;
use crate::layout::Layout;
use crate::request::Ask;
use crate::snapshot::NodeIx;

/// The devices of each member of each run, in order.
///
/// # Errors
/// The first node that does not have the devices that its class has.
pub(super) fn assign_devices(survey: &Survey<'_>, runs: &[Run]) -> Result<Vec<Vec<Devices>>, NodeIx> {
    let mut on: BTreeMap<NodeIx, Vec<u32>> = BTreeMap::new();
    for run in runs {
        on.entry(run.node).or_insert_with(|| vec![0; survey.shapes.len()])[run.slot] += run.count;
    }
    let mut laid: HashMap<(NodeIx, usize), VecDeque<Devices>> = HashMap::new();
    for (node, counts) in on {
        for (slot, members) in on_node(survey, node, &counts).ok_or(node)?.into_iter().enumerate() {
            laid.insert((node, slot), members.into());
        }
    }
    runs.iter()
        .map(|run| {
            let members = laid.get_mut(&(run.node, run.slot)).ok_or(run.node)?;
            let count = run.count as usize;
            (members.len() >= count).then(|| members.drain(..count).collect()).ok_or(run.node)
        })
        .collect()
}

/// By shape, the devices of each member on a node.
fn on_node(survey: &Survey<'_>, node: NodeIx, counts: &[u32]) -> Option<Vec<Vec<Devices>>> {
    let exact = (survey.input.exact)(node)?;
    let mut members: Vec<Vec<Devices>> =
        counts.iter().map(|count| vec![Vec::new(); *count as usize]).collect();
    let mut resources: Vec<&ResourceName> = Vec::new();
    for (shape, _) in survey.shapes.iter().zip(counts).filter(|(_, count)| **count > 0) {
        resources.extend(shape.request.asks.iter().map(|ask| &ask.resource));
    }
    resources.sort_unstable();
    resources.dedup();
    for resource in resources {
        let (index, pool) = exact.class.pool(resource.as_str())?;
        let cut = exact.class.cut_beside(index);
        let site = exact.class.site(pool, &cut).for_gangs();
        let (ask, owners) = together(survey, resource, counts)?;
        let open = Layout::best(site, &pool.open, &ask);
        let layout = match survey.counting {
            Counting::Open => open,
            _ => open.or_else(|| Layout::best(site, &pool.free, &ask)),
        }?;
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
    Some(members)
}

/// Index of the shape, number of the member, its blocks.
type Owner = (usize, usize, std::ops::Range<usize>);

/// The members' asks of a resource merged into one, and the owner of each block.
fn together(survey: &Survey<'_>, resource: &ResourceName, counts: &[u32]) -> Option<(Ask, Vec<Owner>)> {
    let mut all = Ask { resource: resource.clone(), devices: 0, blocks: Vec::new(), containers: Vec::new() };
    let mut owners = Vec::new();
    for (slot, (shape, count)) in survey.shapes.iter().zip(counts).enumerate() {
        let Some(ask) = shape.request.asks.iter().find(|ask| ask.resource == *resource) else {
            continue;
        };
        for member in 0..*count as usize {
            let from = all.blocks.len();
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
        for ask in &shape.request.asks {
            let found = class.pool(ask.resource.as_str());
            let Some((_, pool)) = found.filter(|(_, pool)| matches!(pool.shape, crate::shape::Shape::Whole))
            else {
                continue;
            };
            let site = class.site(pool, &[]).for_gangs();
            let free = if self.counting == Counting::Open { &pool.open } else { &pool.free };
            let laid =
                together(self, &ask.resource, &counts).and_then(|(ask, _)| Layout::best(site, free, &ask));
            lost += laid.map_or(0.0, |laid| site.stranded(free, &laid.devices));
        }
        billionths(lost)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "losses lie between -1 and 1 for each resource")]
fn billionths(value: f64) -> i64 {
    (value * 1e9).round() as i64
}
