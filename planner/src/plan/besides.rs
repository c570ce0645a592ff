//! Why nodes take too few members: the first resource or rule that each node fails, and what other than devices decides
//! where enough devices are free. Called once it is certain that the gang does not fit.

use std::collections::BTreeMap;

use gantry_gang::{Lack, Misfit};

use super::pack::nodes_of;
use super::scope::{Place, places};
use super::survey::{Survey, available};
use super::words::{Views, unit, unit_of, widest};
use crate::decide::{plugin_not_ready, too_many};
use crate::snapshot::{NodeIx, Standing};

/// Causes named in one text.
const NAMED: usize = 2;
/// Shapes looked at, so that a gang of very many shapes is refused quickly.
const SHAPES: usize = 8;

/// Why the nodes of a place do not take another member.
pub(super) fn reasons(views: &Views<'_, '_>, place: Place) -> Vec<(String, usize)> {
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    for node in nodes_of(views.now, place) {
        for slot in 0..views.now.shapes.len() {
            if let Some(reason) = reason(views, node, slot) {
                *reasons.entry(reason).or_default() += 1;
                break;
            }
        }
    }
    let mut reasons: Vec<(String, usize)> = reasons.into_iter().collect();
    reasons.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    reasons
}

/// Why a node takes no member of a shape; `None` if it does, or has no inventory.
fn reason(views: &Views<'_, '_>, node: NodeIx, slot: usize) -> Option<String> {
    let survey = views.now;
    if survey.takes(node, slot, survey.lowest_tier()) > 0 {
        return None;
    }
    let shape = survey.shapes.get(slot)?;
    let Standing::Ours(class) = survey.input.snapshot.standing(node) else {
        return None;
    };
    if let Some(reason) = &class.not_ready {
        return Some(plugin_not_ready(reason));
    }
    let room = survey.input.rooms.get(node.0 as usize);
    let Some(facts) = room.and_then(|room| room.facts.as_ref()) else {
        return Some("no Node object".to_owned());
    };
    if let Err(misfit) = shape.needs.admits(facts) {
        return Some(misfit.to_string());
    }
    for ask in &shape.request.asks {
        let Some((_, pool)) = class.pool(ask.resource.as_str()) else {
            return Some(format!("does not serve {}", ask.resource));
        };
        if let Some(miss) = too_many(pool.max_request, ask) {
            return Some(miss.of_one_node());
        }
        if available(pool, survey.counting) < ask.devices as usize {
            let healthy = pool.devices.saturating_sub(pool.unhealthy);
            let unit = unit(ask.resource.as_str());
            return Some(if healthy < ask.devices as usize {
                match ask.devices {
                    1 => format!("no healthy {}", unit_of(1, unit)),
                    devices => format!("fewer than {devices} healthy {unit}"),
                }
            } else {
                match ask.devices {
                    1 => format!("no {} free", unit_of(1, unit)),
                    devices => format!("fewer than {devices} {unit} free"),
                }
            });
        }
    }
    if let Err(lack) = survey.left(node)?.fits(&shape.needs.resources) {
        return Some(lack.to_string());
    }
    Some("kept off by other pods' or its own affinity, anti-affinity or host ports".to_owned())
}

/// The cause, other than devices, why nodes take too few members. On the empty cluster the text counts nodes. On the
/// cluster of now it does not, because the counts change all the time and the text must be stable.
pub(super) fn cause(views: &Views<'_, '_>, empty: bool) -> Option<String> {
    let survey = if empty { views.empty } else { views.now };
    let needed = views.demand.first(views.demand.must.max(1));
    let wide = places(views.now, views.anchors, widest(views.bounds));
    let slots = (0..needed.len()).filter(|slot| needed.get(*slot).is_some_and(|needed| *needed > 0));
    slots.take(SHAPES).find_map(|slot| {
        let found: Vec<Found> = wide
            .iter()
            .map(|place| Found::of(survey, *place, slot))
            .filter(|found| found.room >= u64::from(needed[slot]))
            .collect();
        // They would fit: other members of the gang are in the way.
        if found.iter().any(|found| found.takes >= u64::from(needed[slot])) {
            return None;
        }
        let asks = survey
            .shapes
            .get(slot)
            .map_or(&[][..], |shape| &shape.request.asks);
        let unit = match asks {
            [ask] => unit(ask.resource.as_str()),
            _ => "devices",
        };
        words(&found, unit, empty)
    })
}

/// The nodes of a place that have enough devices for a member.
#[derive(Debug, Default)]
struct Found {
    nodes: usize,
    /// Members that the devices suffice for.
    room: u64,
    /// Members that the nodes take.
    takes: u64,
    /// Why some nodes take fewer.
    causes: BTreeMap<String, usize>,
}

impl Found {
    fn of(survey: &Survey<'_>, place: Place, slot: usize) -> Self {
        let mut found = Self::default();
        for node in nodes_of(survey, place) {
            let room = room(survey, node, slot);
            if room == 0 {
                continue;
            }
            let takes = survey.takes(node, slot, survey.lowest_tier());
            found.nodes += 1;
            found.room += u64::from(room);
            found.takes += u64::from(takes.min(room));
            if takes < room
                && let Some(cause) = why(survey, node, slot, takes)
            {
                *found.causes.entry(cause).or_default() += 1;
            }
        }
        found
    }
}

/// Members of a shape that the devices of a node suffice for.
fn room(survey: &Survey<'_>, node: NodeIx, slot: usize) -> u32 {
    let (Some(class), Some(shape)) = (survey.class(node), survey.shapes.get(slot)) else {
        return 0;
    };
    let of_each = shape.request.asks.iter().map(|ask| {
        let pool = class.pool(ask.resource.as_str()).map(|(_, pool)| pool);
        let pool = pool.filter(|pool| too_many(pool.max_request, ask).is_none());
        let devices = pool.map_or(0, |pool| available(pool, survey.counting));
        devices.checked_div(ask.devices as usize).unwrap_or(0)
    });
    let least = of_each.min().filter(|_| class.not_ready.is_none());
    u32::try_from(least.unwrap_or(0)).unwrap_or(u32::MAX)
}

/// Why a node takes no more than so many members.
fn why(survey: &Survey<'_>, node: NodeIx, slot: usize, takes: u32) -> Option<String> {
    let needs = &survey.shapes.get(slot)?.needs;
    let facts = survey.input.rooms.get(node.0 as usize)?.facts.as_ref()?;
    if let Err(misfit) = needs.admits(facts) {
        return Some(match misfit {
            Misfit::Unschedulable => "cordons rule out".to_owned(),
            Misfit::Taint { key, .. } => format!("taint {key} rules out"),
            Misfit::Affinity => "the node selector or affinity rules out".to_owned(),
            Misfit::Volume => "the affinity of a volume rules out".to_owned(),
        });
    }
    let left = survey.left(node)?;
    if left.times(&needs.resources) > takes {
        return Some("pod affinity, anti-affinity or host ports rule out".to_owned());
    }
    // The resource that one more member lacks is the one that the first member too many lacks.
    let mut rest = left.clone();
    (0..takes).for_each(|_| rest.sub(&needs.resources));
    let lack = rest.fits(&needs.resources).err()?;
    Some(format!("{} on", short(&lack)))
}

/// The text for a resource that a node lacks.
pub fn short(lack: &Lack) -> String {
    match lack {
        Lack::Pods => "the number of pods is exhausted".to_owned(),
        Lack::Cpu => "CPU is short".to_owned(),
        Lack::Memory => "memory is short".to_owned(),
        Lack::EphemeralStorage => "ephemeral storage is short".to_owned(),
        Lack::Other(name) => format!("{name} is short"),
    }
}

/// `CPU is short on all 12 nodes that have the GPUs`.
fn words(found: &[Found], unit: &str, counted: bool) -> Option<String> {
    let mut causes: BTreeMap<&str, usize> = BTreeMap::new();
    for (cause, nodes) in found.iter().flat_map(|found| &found.causes) {
        *causes.entry(cause).or_default() += nodes;
    }
    if !counted {
        let causes: Vec<&str> = causes.into_keys().take(NAMED).collect();
        return (!causes.is_empty())
            .then(|| format!("{} nodes that have the {unit} free", causes.join(" and ")));
    }
    let all: usize = found.iter().map(|found| found.nodes).sum();
    let mut causes: Vec<(&str, usize)> = causes.into_iter().collect();
    causes.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
    match (causes.as_slice(), all) {
        ([], _) => None,
        ([(cause, 1)], 1) => Some(format!("{cause} the only node that has the {unit}")),
        ([(cause, nodes)], _) if *nodes == all => {
            Some(format!("{cause} all {all} nodes that have the {unit}"))
        }
        (some, _) => {
            let named: Vec<String> = some
                .iter()
                .take(NAMED)
                .map(|(cause, nodes)| format!("{cause} {nodes}"))
                .collect();
            Some(format!(
                "of {all} nodes that have the {unit} {}",
                named.join(", ")
            ))
        }
    }
}
