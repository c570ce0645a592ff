//! Why a gang fits or does not, level by level: as values that `gantry explain` prints, and as text for the Gang and
//! its pods' conditions.

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write;
use std::sync::Arc;

use gantry_api::names;
use gantry_gang::protocol::{PlanRequest, Refusal};
use gantry_gang::{InsufficientResource, Misfit};
use serde::Serialize;

use super::choose;
use super::demand::{Counts, Demand};
use super::fill::Anchors;
use super::pack::nodes_of;
use super::scope::{Bounds, Place, Scope, places, scopes};
use super::skew::Skew;
use super::survey::{Survey, available};
use crate::decide::{plugin_not_ready, too_many};
use crate::input::Shape;
use crate::snapshot::{NodeIx, Standing};

/// Causes named in one text.
const NAMED: usize = 2;
/// Shapes looked at, so that a gang of very many shapes is refused quickly.
const SHAPES: usize = 8;

/// Why a gang fits or does not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// What is to be placed: `8 members of 4 GPUs`.
    pub members: String,
    /// The minimum to be placed.
    pub must: u32,
    /// What was tried, the narrowest first.
    pub levels: Vec<LevelDiagnosis>,
    /// It would not fit on an empty cluster.
    pub hopeless: bool,
}

/// One level of the fabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LevelDiagnosis {
    /// The level: `node`, the name of one of the configuration, `cluster`.
    pub level: Arc<str>,
    /// How many domains of the level there are.
    pub domains: usize,
    /// The domain where most members fit.
    pub best: Arc<str>,
    /// How many fit there now, each shape by itself.
    pub fits: u32,
    /// How many would fit on an empty cluster.
    pub empty: u32,
    /// How many are wanted.
    pub wanted: u32,
    /// The minimum; 0 where each member is useful by itself.
    pub must: u32,
    /// Counts of the devices asked for, by resource.
    pub devices: Vec<DeviceCounts>,
    /// Why its nodes take no more members, with the number of nodes for each reason, most first.
    pub reasons: Vec<(String, usize)>,
}

/// Counts of a resource's devices in one domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceCounts {
    /// `GPUs` or the resource's name.
    pub resource: String,
    /// Free now.
    pub free: usize,
    /// Healthy.
    pub healthy: usize,
    /// All.
    pub total: usize,
    /// Asked for by the minimum together; by one member where each is useful by itself.
    pub asked: u64,
}

/// What an explanation looks at.
pub(super) struct Views<'s, 'a> {
    pub(super) now: &'s Survey<'a>,
    pub(super) empty: &'s Survey<'a>,
    pub(super) anchors: &'s Anchors,
    pub(super) demand: &'s Demand<'s>,
    pub(super) bounds: Bounds,
}

/// The widest scope that a gang may lie in.
pub(super) fn widest(bounds: Bounds) -> Scope {
    match bounds {
        Bounds::Within(scope, true) => scope,
        _ => Scope::Cluster,
    }
}

impl Diagnosis {
    pub(super) fn of(views: &Views<'_, '_>) -> Self {
        let demand = views.demand;
        let counts = demand.first(demand.most);
        let mut levels: Vec<LevelDiagnosis> = Vec::new();
        for scope in scopes(views.now, widest(views.bounds)) {
            levels.extend(LevelDiagnosis::of(views, scope, &counts));
        }
        // Each shape by itself: what does not fit so can never fit. With rules among members a choice on the empty
        // cluster decides.
        let hopeless = levels.iter().all(|level| level.empty < demand.must)
            || views.empty.minds() && choose(views.empty, views.anchors, demand, views.bounds).is_none();
        Self { members: members(views.now, &counts), must: demand.must, levels, hopeless }
    }
}

impl LevelDiagnosis {
    fn of(views: &Views<'_, '_>, scope: Scope, counts: &Counts) -> Option<Self> {
        let survey = views.now;
        let slots = counts.len();
        let (now, empty) = (survey.sums(survey.lowest_tier()), views.empty.sums(views.empty.lowest_tier()));
        let takes = |survey: &Survey<'_>, sums: &[u32], place: Place| -> u32 {
            let of = |slot: usize| match place {
                Place::Node(node) => survey.takes(node, slot, survey.lowest_tier()),
                Place::Domain(domain) => sums.get(domain.0 as usize * slots + slot).copied().unwrap_or(0),
            };
            (0..slots).map(|slot| of(slot).min(counts[slot])).sum()
        };
        let places = places(survey, views.anchors, scope);
        let name = |place: Place| match place {
            Place::Node(node) => survey.name(node),
            Place::Domain(domain) => survey.domain(domain).map_or("", |domain| &domain.name),
        };
        let best = places.iter().copied().min_by(|a, b| {
            let key = |place: Place| {
                std::cmp::Reverse((takes(survey, &now, place), takes(views.empty, &empty, place)))
            };
            key(*a).cmp(&key(*b)).then_with(|| name(*a).cmp(name(*b)))
        })?;
        let domains = match scope {
            Scope::Node => {
                let ours = places
                    .iter()
                    .filter(|place| matches!(place, Place::Node(node) if survey.class(*node).is_some()));
                ours.count()
            }
            Scope::Level(_) | Scope::Cluster => places.len(),
        };
        let all_empty = places.iter().map(|place| takes(views.empty, &empty, *place)).max();
        Some(Self {
            level: level_name(survey, scope),
            domains,
            best: name(best).into(),
            fits: takes(survey, &now, best),
            empty: all_empty.unwrap_or(0),
            wanted: counts.iter().sum(),
            must: views.demand.must,
            devices: stock(survey, best, &views.demand.first(views.demand.must.max(1))),
            reasons: reasons(views, best),
        })
    }
}

impl LevelDiagnosis {
    /// The number of members that `asked` is for, if that is not all of them.
    pub fn asked_for(&self) -> &'static str {
        match self.must {
            0 if self.wanted > 1 => " for one",
            must if 0 < must && must < self.wanted => " for those needed",
            _ => "",
        }
    }
}

/// The name of a scope.
pub(super) fn level_name(survey: &Survey<'_>, scope: Scope) -> Arc<str> {
    match scope {
        Scope::Node => "node".into(),
        Scope::Level(level) => {
            survey.fabric.levels.0.get(level).map_or_else(|| "".into(), |level| Arc::clone(&level.name))
        }
        Scope::Cluster => "cluster".into(),
    }
}

/// `8 members of 4 GPUs`, `1 member of 8 GPUs and 16 of 1 GPU`.
pub(super) fn members(survey: &Survey<'_>, counts: &Counts) -> String {
    let mut parts: Vec<String> = Vec::new();
    for (shape, count) in survey.shapes.iter().zip(counts).filter(|(_, count)| **count > 0) {
        let noun = match (parts.is_empty(), count) {
            (true, 1) => " member",
            (true, _) => " members",
            (false, _) => "",
        };
        parts.push(format!("{count}{noun} of {}", asked(shape)));
    }
    match parts.pop() {
        Some(last) if parts.is_empty() => last,
        Some(last) => format!("{} and {last}", parts.join(", ")),
        None => "no members".to_owned(),
    }
}

fn asked(shape: &Shape) -> String {
    let asks = shape.request.asks.iter();
    let words: Vec<String> = asks
        .map(|ask| {
            let unit = unit_of(ask.devices, unit(ask.resource.as_str()));
            format!("{} {unit}", ask.devices)
        })
        .collect();
    words.join(" with ")
}

/// The unit of a resource's devices.
pub fn unit(resource: &str) -> &str {
    if resource == names::GPU_RESOURCE { "GPUs" } else { resource }
}

/// The unit for a number.
fn unit_of(devices: u32, unit: &str) -> &str {
    match (devices, unit) {
        (1, "GPUs") => "GPU",
        _ => unit,
    }
}

fn stock(survey: &Survey<'_>, place: Place, counts: &Counts) -> Vec<DeviceCounts> {
    let mut resources: BTreeMap<&str, u64> = BTreeMap::new();
    for (shape, count) in survey.shapes.iter().zip(counts) {
        for ask in &shape.request.asks {
            *resources.entry(ask.resource.as_str()).or_default() +=
                u64::from(ask.devices) * u64::from(*count);
        }
    }
    let nodes = nodes_of(survey, place);
    let of = |(resource, asked): (&str, u64)| {
        let pools = nodes.iter().filter_map(|node| survey.class(*node)?.pool(resource));
        let mut stock =
            DeviceCounts { resource: unit(resource).to_owned(), free: 0, healthy: 0, total: 0, asked };
        for (_, pool) in pools {
            stock.free += available(pool, survey.counting);
            stock.healthy += pool.devices.saturating_sub(pool.unhealthy);
            stock.total += pool.devices;
        }
        stock
    };
    resources.into_iter().map(of).collect()
}

/// The refusal.
pub(super) fn refused(views: &Views<'_, '_>, wanted: &PlanRequest) -> Refusal {
    let demand = views.demand;
    let survey = views.now;
    if views.bounds == Bounds::Unknown {
        let level = wanted.terms.level.as_ref().map_or("", |wish| &wish.level);
        let levels: Vec<&str> = survey.fabric.levels.0.iter().map(|level| &*level.name).collect();
        let known = if levels.is_empty() { "none is configured".to_owned() } else { levels.join(", ") };
        let reason: Arc<str> = format!("{level} is no level of the fabric (levels: {known})").into();
        return Refusal { message: Arc::clone(&reason), reason, hopeless: true };
    }
    let explanation = Diagnosis::of(views);
    let all = members(survey, &demand.first(demand.most));
    // Surplus members come one by one: with no minimum left, not a single one fits.
    let (who, verb, together) = match demand.must {
        _ if demand.most == 1 => (all, "does not fit", ""),
        0 | 1 => (format!("none of {all}"), "fits", ""),
        must if must < demand.most => (format!("{must} of {all}"), "do not fit", "together "),
        _ => (all, "do not fit", "together "),
    };
    let within = match views.bounds {
        Bounds::Within(Scope::Cluster, _)
        | Bounds::Free
        | Bounds::Within(_, false)
        | Bounds::Sliced(_, false) => "in the cluster".to_owned(),
        Bounds::Within(scope, true) => format!("within one {}", level_name(survey, scope)),
        Bounds::Sliced(slices, true) => format!(
            "in slices of {} that each lie within one {}",
            slices.size,
            level_name(survey, Scope::Level(slices.level))
        ),
        Bounds::Unknown => String::new(),
    };
    if let Some(skew) = uneven(views) {
        let (hopeless, even) = match explanation.hopeless {
            false => (false, ""),
            true => (true, " even if it were empty"),
        };
        let reason = format!(
            "{who} {verb} {together}{within}{even} as their topologySpreadConstraints ask: no {} may have more than {} above the one with the fewest",
            skew.key, skew.max
        );
        return Refusal {
            message: format!("{reason}: {explanation}").into(),
            reason: reason.into(),
            hopeless,
        };
    }
    let even = if explanation.hopeless { " even if it were empty" } else { "" };
    let cause = cause(views, explanation.hopeless);
    let cause = cause.map_or_else(String::new, |cause| format!(": {cause}"));
    let reason = format!("{who} {verb} {together}{within}{even}{cause}");
    Refusal {
        message: format!("{reason}: {explanation}").into(),
        reason: reason.into(),
        hopeless: explanation.hopeless,
    }
}

/// The spread constraint without which the gang would fit.
fn uneven<'v>(views: &'v Views<'_, '_>) -> Option<&'v Skew> {
    let skews = &views.now.skews;
    let fits = |without: Arc<[Skew]>| {
        let survey = views.now.with_skews(without);
        choose(&survey, views.anchors, views.demand, views.bounds).is_some()
    };
    if skews.is_empty() || !fits(Arc::default()) {
        return None;
    }
    let alone = |skew: &&Skew| !fits([Skew::clone(skew)].into());
    skews.iter().find(alone).or_else(|| skews.first())
}

/// Why the nodes of a place do not take another member.
fn reasons(views: &Views<'_, '_>, place: Place) -> Vec<(String, usize)> {
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
fn cause(views: &Views<'_, '_>, empty: bool) -> Option<String> {
    let survey = if empty { views.empty } else { views.now };
    let needed = views.demand.first(views.demand.must.max(1));
    let wide = places(views.now, views.anchors, widest(views.bounds));
    let slots = (0..needed.len()).filter(|slot| needed.get(*slot).is_some_and(|needed| *needed > 0));
    slots.take(SHAPES).find_map(|slot| {
        let found: Vec<PlaceCauses> = wide
            .iter()
            .map(|place| PlaceCauses::of(survey, *place, slot))
            .filter(|found| found.room >= u64::from(needed[slot]))
            .collect();
        // They would fit: other members of the gang are in the way.
        if found.iter().any(|found| found.takes >= u64::from(needed[slot])) {
            return None;
        }
        let asks = survey.shapes.get(slot).map_or(&[][..], |shape| &shape.request.asks);
        let unit = match asks {
            [ask] => unit(ask.resource.as_str()),
            _ => "devices",
        };
        cause_text(&found, unit, empty)
    })
}

/// The nodes of a place that have enough devices for a member.
#[derive(Debug, Default)]
struct PlaceCauses {
    nodes: usize,
    /// Members that the devices suffice for.
    room: u64,
    /// Members that the nodes take.
    takes: u64,
    /// Why some nodes take fewer.
    causes: BTreeMap<String, usize>,
}

impl PlaceCauses {
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
                && let Some(cause) = cause_on(survey, node, slot, takes)
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
fn cause_on(survey: &Survey<'_>, node: NodeIx, slot: usize, takes: u32) -> Option<String> {
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
pub fn short(lack: &InsufficientResource) -> String {
    match lack {
        InsufficientResource::Pods => "the number of pods is exhausted".to_owned(),
        InsufficientResource::Cpu => "CPU is short".to_owned(),
        InsufficientResource::Memory => "memory is short".to_owned(),
        InsufficientResource::EphemeralStorage => "ephemeral storage is short".to_owned(),
        InsufficientResource::Other(name) => format!("{name} is short"),
    }
}

/// `CPU is short on all 12 nodes that have the GPUs`.
fn cause_text(found: &[PlaceCauses], unit: &str, counted: bool) -> Option<String> {
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
            let named: Vec<String> =
                some.iter().take(NAMED).map(|(cause, nodes)| format!("{cause} {nodes}")).collect();
            Some(format!("of {all} nodes that have the {unit} {}", named.join(", ")))
        }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, level) in self.levels.iter().rev().enumerate() {
            if number > 0 {
                f.write_str("; ")?;
            }
            level.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for LevelDiagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if &*self.level == "cluster" {
            f.write_str("cluster: ")?;
        } else {
            write!(f, "best {} of {}: {}: ", self.level, self.domains, self.best)?;
        }
        write!(f, "{} of {} fit", self.fits, self.wanted)?;
        if 0 < self.must && self.must < self.wanted {
            write!(f, ", {} needed", self.must)?;
        }
        if self.empty < self.wanted {
            write!(f, ", {} if nothing else were there", self.empty)?;
        }
        let mut stock = String::new();
        for of in &self.devices {
            // Writing into a String cannot fail.
            let _ = write!(
                stock,
                ", {} {} asked{}, {} free, {} healthy of {}",
                of.asked,
                of.resource,
                self.asked_for(),
                of.free,
                of.healthy,
                of.total
            );
            let asked = usize::try_from(of.asked).unwrap_or(usize::MAX);
            if self.fits < self.must.max(1) && of.free < asked && asked <= of.healthy {
                let _ = write!(stock, ", {} more would have to come free", asked - of.free);
            }
        }
        f.write_str(&stock)?;
        if !self.reasons.is_empty() {
            let reasons: Vec<String> =
                self.reasons.iter().take(4).map(|(reason, nodes)| format!("{nodes} {reason}")).collect();
            write!(f, " (nodes: {})", reasons.join(", "))?;
        }
        Ok(())
    }
}
