//! Why a gang fits or does not: level by level, as values that `gantry explain` prints, and as the facts of a refusal.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_api::names;
use gantry_gang::protocol::{
    DeviceShortage, IdleReservations, LargestNode, MemberGroup, MemberRule, Obstacle, Obstacles, PlanRequest,
    ReasonScope, Refusal, Shortage, SkewFailure, SkewLimit, WithheldNodes, WithheldReason,
};
use serde::{Deserialize, Serialize};

use super::choose;
use super::choose::most_that;
use super::demand::{Counts, Demand};
use super::fill::Anchors;
use super::pack::nodes_of;
use super::rules::Rules;
use super::scope::{Bounds, FabricPart, Scope, places, scopes};
use super::skew::Skew;
use super::survey::{FreeRule, Survey, available};
use crate::decide::{judge, too_many};
use crate::input::Shape;
use crate::snapshot::{NodeIx, NodeState};

/// The name of the widest scope.
const CLUSTER: &str = "cluster";
/// Shapes looked at, so that a gang of very many shapes is refused quickly.
const SHAPES: usize = 8;
/// Nodes looked at over all mixes of so many members, with bounds on the number of mixes.
const MIXED: usize = 1 << 14;
const FEWEST_MIXES: usize = 2;
const MOST_MIXES: usize = 64;

/// Why a gang fits or does not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelDiagnosis {
    /// The level: `node`, the name of one of the configuration, `cluster`.
    pub level: Arc<str>,
    /// How many domains of the level there are.
    pub domains: usize,
    /// The domain where most members fit.
    pub best: Arc<str>,
    /// How many fit there together now: towards the minimum, as long as that does not fit.
    pub fits: u32,
    /// How many would fit together on an empty cluster, counted in the same way.
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceCounts {
    /// `GPUs` or the resource's name.
    pub resource: String,
    /// Free now.
    pub free: usize,
    /// Idle, and reserved for gangs or for pods that are being bound.
    pub reserved: usize,
    pub healthy: usize,
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
        let scopes = scopes(views.now, widest(views.bounds)).into_iter();
        let levels = scopes.filter_map(|scope| LevelDiagnosis::of(views, scope, &counts)).collect();
        Self { members: members(views.now, &counts), must: demand.must, levels, hopeless: is_hopeless(views) }
    }
}

/// Whether the minimum cannot fit on an empty cluster.
fn is_hopeless(views: &Views<'_, '_>) -> bool {
    let fits = |survey: &Survey<'_>| choose(survey, views.anchors, views.demand, views.bounds);
    views.demand.must > 0 && views.empty.refutes(fits)
}

/// The most members that fit together, and their nodes. Of too few those that count towards the minimum.
fn together(survey: &Survey<'_>, views: &Views<'_, '_>, bounds: Bounds) -> (u32, Vec<NodeIx>) {
    let demand = views.demand;
    let fit = |demand: &Demand<'_>| {
        let chosen = choose(survey, views.anchors, demand, bounds)?;
        Some((chosen.rank.members.0, chosen.runs.iter().map(|run| run.node).collect()))
    };
    if let Some(found) = fit(demand) {
        return found;
    }
    let nodes = survey.input.snapshot.nodes.len().max(1);
    let mixes = (MIXED / nodes).clamp(FEWEST_MIXES, MOST_MIXES);
    let mut most = (0, Vec::new());
    most_that(demand.must.max(1) - 1, |count| {
        let mut mixes = demand.towards(count, mixes, |slot| survey.size(slot)).into_iter();
        let found = mixes.find_map(|counts| fit(&demand.part(&counts)));
        let fits = found.is_some();
        most = found.unwrap_or(std::mem::take(&mut most));
        fits
    });
    most
}

impl LevelDiagnosis {
    fn of(views: &Views<'_, '_>, scope: Scope, counts: &Counts) -> Option<Self> {
        let survey = views.now;
        let places = places(survey, views.anchors, scope);
        let name = |place: FabricPart| match place {
            FabricPart::Node(node) => survey.name(node),
            FabricPart::Domain(domain) => survey.domain(domain).map_or("", |domain| &domain.name),
        };
        let (fullest, by_shape) = fullest(views, &places, counts, &name)?;
        let bounds = match (views.bounds, scope) {
            (sliced @ Bounds::Sliced(_, true), Scope::Cluster) => sliced,
            (_, scope) => Bounds::Within(scope, true),
        };
        // One shape without rules among members fits as often as each node takes it.
        let is_simple = counts.len() == 1 && !survey.relates() && !matches!(bounds, Bounds::Sliced(..));
        let (best, fits, empty) = if is_simple {
            (fullest, by_shape.0, by_shape.1)
        } else {
            let (fits, nodes) = together(survey, views, bounds);
            let holds = |place: &FabricPart| match place {
                FabricPart::Node(own) => nodes.iter().all(|node| node == own),
                FabricPart::Domain(domain) => nodes.iter().all(|node| survey.lies_in(*node, *domain)),
            };
            let best = places.iter().copied().find(|place| !nodes.is_empty() && holds(place));
            (best.unwrap_or(fullest), fits, together(views.empty, views, bounds).0)
        };
        let domains = match scope {
            Scope::Node => {
                let ours = places
                    .iter()
                    .filter(|place| matches!(place, FabricPart::Node(node) if survey.class(*node).is_some()));
                ours.count()
            }
            Scope::Level(_) | Scope::Cluster => places.len(),
        };
        Some(Self {
            level: level_name(survey, scope),
            domains,
            best: name(best).into(),
            fits,
            empty,
            wanted: counts.iter().sum(),
            must: views.demand.must,
            devices: stock(survey, best, views.demand),
            reasons: reasons(views, best),
        })
    }
}

/// The place where most members fit, each shape by itself: how many, and how many fit in the best place of an empty
/// cluster.
fn fullest<'n>(
    views: &Views<'_, '_>,
    places: &[FabricPart],
    counts: &Counts,
    name: &impl Fn(FabricPart) -> &'n str,
) -> Option<(FabricPart, (u32, u32))> {
    let slots = counts.len();
    let sums = |survey: &Survey<'_>| survey.sums(survey.lowest_tier());
    let (now, empty) = (sums(views.now), sums(views.empty));
    let takes = |survey: &Survey<'_>, sums: &[u32], place: FabricPart| -> u32 {
        let of = |slot: usize| match place {
            FabricPart::Node(node) => survey.takes(node, slot, survey.lowest_tier()),
            FabricPart::Domain(domain) => sums.get(domain.0 as usize * slots + slot).copied().unwrap_or(0),
        };
        (0..slots).map(|slot| of(slot).min(counts[slot])).sum()
    };
    let key = |place: FabricPart| (takes(views.now, &now, place), takes(views.empty, &empty, place));
    let best =
        places.iter().copied().max_by(|a, b| key(*a).cmp(&key(*b)).then_with(|| name(*b).cmp(name(*a))))?;
    let most = places.iter().map(|place| takes(views.empty, &empty, *place)).max();
    Some((best, (takes(views.now, &now, best), most.unwrap_or(0))))
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

pub(super) fn level_name(survey: &Survey<'_>, scope: Scope) -> Arc<str> {
    match scope {
        Scope::Node => "node".into(),
        Scope::Level(level) => {
            survey.fabric.levels.0.get(level).map_or_else(|| "".into(), |level| Arc::clone(&level.name))
        }
        Scope::Cluster => CLUSTER.into(),
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

/// Devices of a place on nodes that any member may go to.
fn stock(survey: &Survey<'_>, place: FabricPart, demand: &Demand<'_>) -> Vec<DeviceCounts> {
    let (counts, all) = (demand.first(demand.must.max(1)), demand.all());
    let mut resources: BTreeMap<&str, u64> = BTreeMap::new();
    for (shape, count) in survey.shapes.iter().zip(&counts) {
        for ask in &shape.request.asks {
            *resources.entry(ask.resource.as_str()).or_default() +=
                u64::from(ask.devices) * u64::from(*count);
        }
    }
    let mut nodes = nodes_of(survey, place);
    nodes.retain(|node| survey.admits(*node, &all));
    let of = |(resource, asked): (&str, u64)| {
        let pools = nodes.iter().filter_map(|node| survey.class(*node)?.pool(resource));
        let mut stock = DeviceCounts {
            resource: unit(resource).to_owned(),
            free: 0,
            reserved: 0,
            healthy: 0,
            total: 0,
            asked,
        };
        for (_, pool) in pools {
            stock.free += available(pool, survey.counting);
            stock.reserved += pool.reserved;
            stock.healthy += pool.devices.saturating_sub(pool.unhealthy);
            stock.total += pool.devices;
        }
        stock
    };
    resources.into_iter().map(of).collect()
}

pub(super) fn refused(views: &Views<'_, '_>, wanted: &PlanRequest) -> Refusal {
    let survey = views.now;
    if views.bounds == Bounds::Unknown {
        let level = wanted.terms.level.as_ref().map_or_else(|| "".into(), |level| Arc::clone(&level.level));
        let known = survey.fabric.levels.0.iter().map(|level| Arc::clone(&level.name)).collect();
        return Refusal::UnknownLevel { level, known };
    }
    let hopeless = is_hopeless(views);
    let survey_of = |fits_not: &dyn Fn(&Views<'_, '_>) -> bool| {
        // With slices a part by itself shows nothing.
        let parts =
            if matches!(views.bounds, Bounds::Sliced(..)) { Vec::new() } else { views.demand.parts() };
        parts.into_iter().take(SHAPES).find_map(|(role, counts)| {
            let part = views.demand.part(&counts);
            fits_not(&Views { demand: &part, ..*views }).then_some((role, part))
        })
    };
    // The part that does not fit even by itself is what is missing.
    let part = match hopeless {
        true => survey_of(&is_hopeless),
        false => survey_of(&|views: &Views<'_, '_>| {
            choose(views.now, views.anchors, views.demand, views.bounds).is_none()
        }),
    };
    let shortage = match &part {
        Some((role, part)) => {
            let shortage = shortage(&Views { demand: part, ..*views }, wanted, hopeless);
            Shortage { part: Some(Arc::clone(role)), ..shortage }
        }
        None => shortage(views, wanted, hopeless),
    };
    Refusal::DoesNotFit(Box::new(shortage))
}

fn shortage(views: &Views<'_, '_>, wanted: &PlanRequest, hopeless: bool) -> Shortage {
    let survey = views.now;
    let counts = views.demand.first(views.demand.most);
    let groups = survey.shapes.iter().zip(&counts).filter(|(_, count)| **count > 0);
    let within = match views.bounds {
        Bounds::Within(Scope::Cluster, _)
        | Bounds::Free
        | Bounds::Within(_, false)
        | Bounds::Sliced(_, false)
        | Bounds::Unknown => ReasonScope::Cluster,
        Bounds::Within(scope, true) => ReasonScope::OneOf(level_name(survey, scope)),
        Bounds::Sliced(slices, true) => {
            ReasonScope::SlicesOf { size: slices.size, level: level_name(survey, Scope::Level(slices.level)) }
        }
    };
    let on = if hopeless { views.empty } else { survey };
    let skew = uneven(views, on);
    let rule = if skew.is_none() { binding_rule(views, on) } else { None };
    let scope = scopes(survey, widest(views.bounds)).pop();
    let widest = scope.and_then(|scope| LevelDiagnosis::of(views, scope, &counts));
    let short = |of: &&DeviceCounts| usize::try_from(of.asked).is_ok_and(|asked| of.free < asked);
    let devices =
        widest.as_ref().and_then(|level| level.devices.iter().find(short).or(level.devices.first()));
    let best = widest.as_ref().filter(|level| &*level.level != CLUSTER).map(|level| Arc::clone(&level.best));
    let fits_if = |counting: FreeRule| {
        let survey = Survey::new(survey.input, wanted, &views.demand.shapes, counting);
        survey.is_some_and(|survey| choose(&survey, views.anchors, views.demand, views.bounds).is_some())
    };
    Shortage {
        part: None,
        members: groups
            .map(|(shape, count)| MemberGroup {
                count: *count,
                requests: shape
                    .request
                    .asks
                    .iter()
                    .map(|ask| (unit(ask.resource.as_str()).into(), ask.devices))
                    .collect(),
            })
            .collect(),
        must: views.demand.must,
        within,
        best: best.unwrap_or_default(),
        fits: widest.as_ref().map_or(0, |level| level.fits),
        empty: widest.as_ref().map_or(0, |level| level.empty),
        devices: devices.map(|of| DeviceShortage {
            unit: of.resource.as_str().into(),
            free: of.free,
            reserved: of.reserved,
            healthy: of.healthy,
            total: of.total,
            requested: of.asked,
        }),
        obstacles: if skew.is_none() && rule.is_none() { obstacles(views, hopeless) } else { None },
        largest: if hopeless { largest(views, &views.demand.first(views.demand.must)) } else { None },
        withheld: if hopeless {
            None
        } else {
            withheld(views, &counts).filter(|_| fits_if(FreeRule::Served))
        },
        reserved: (!hopeless && survey.has_reserved() && fits_if(FreeRule::Unreserved))
            .then(IdleReservations::default),
        skew,
        rule,
        hopeless,
    }
}

/// The node with most devices, where even that has too few for one member.
fn largest(views: &Views<'_, '_>, counts: &Counts) -> Option<LargestNode> {
    let survey = views.empty;
    let asks = survey.shapes.iter().zip(counts).filter(|(_, count)| **count > 0);
    asks.flat_map(|(shape, _)| &shape.request.asks).find_map(|ask| {
        let classes = survey.input.snapshot.nodes.iter().enumerate().filter_map(|(number, _)| {
            survey.class(NodeIx(u32::try_from(number).ok()?))?.pool(ask.resource.as_str())
        });
        let (devices, healthy) = classes.fold((0, 0), |(devices, healthy), (_, pool)| {
            let here = pool.devices.saturating_sub(pool.unhealthy);
            (pool.devices.max(devices), here.max(healthy))
        });
        let asked = ask.devices as usize;
        (healthy < asked).then(|| LargestNode {
            unit: unit(ask.resource.as_str()).into(),
            requested: ask.devices,
            devices,
            healthy,
        })
    })
}

/// The nodes that members may go to and that give out nothing, by the most frequent cause.
fn withheld(views: &Views<'_, '_>, counts: &Counts) -> Option<WithheldNodes> {
    let survey = views.now;
    let mut causes: BTreeMap<&WithheldReason, usize> = BTreeMap::new();
    for (number, _) in (0u32..).zip(&survey.input.snapshot.nodes) {
        let node = NodeIx(number);
        let cause = survey.class(node).and_then(|class| class.withheld.as_ref());
        if let Some(cause) = cause.filter(|_| survey.admits(node, counts)) {
            *causes.entry(cause).or_default() += 1;
        }
    }
    let nodes = causes.values().sum();
    let (cause, _) = causes.into_iter().max_by(|a, b| a.1.cmp(&b.1).then_with(|| b.0.cmp(a.0)))?;
    Some(WithheldNodes { cause: cause.clone(), nodes })
}

/// The spread constraint without which the gang would fit on the cluster of `survey`, and what of it fails.
fn uneven(views: &Views<'_, '_>, survey: &Survey<'_>) -> Option<SkewLimit> {
    let skews = &survey.skews;
    let fits = |without: Arc<[Skew]>| {
        let survey = survey.with_skews(without);
        choose(&survey, views.anchors, views.demand, views.bounds).is_some()
    };
    if skews.is_empty() || !fits(Arc::default()) {
        return None;
    }
    let alone = |skew: &&Skew| !fits([Skew::clone(skew)].into());
    let labelless = skews.iter().find(|skew| !skew.has_label());
    let skew = labelless.or_else(|| skews.iter().find(alone)).or_else(|| skews.first())?;
    let key: Arc<str> = skew.key.as_ref().into();
    if skew.width() == 0 {
        return Some(SkewLimit { key, fails: SkewFailure::NoDomain });
    }
    let min_domains =
        skew.too_few_domains().map(|wanted| SkewFailure::MinDomains { wanted, exist: skew.width() });
    // It would hold without the number of domains.
    let of_domains = min_domains.filter(|_| {
        let loose =
            skews.iter().map(|of| if of.key == skew.key { of.with_any_domains() } else { of.clone() });
        fits(loose.collect())
    });
    Some(SkewLimit { key, fails: of_domains.unwrap_or(SkewFailure::MaxSkew(skew.max)) })
}

/// The rule among the members without which the gang would fit on the cluster of `survey`.
fn binding_rule(views: &Views<'_, '_>, survey: &Survey<'_>) -> Option<MemberRule> {
    let fits = |change: &dyn Fn(&mut Rules)| {
        let mut survey = survey.with_skews(Arc::clone(&survey.skews));
        change(&mut survey.rules);
        choose(&survey, views.anchors, views.demand, views.bounds).is_some()
    };
    let near = survey.rules.near.first();
    let together = near.filter(|_| fits(&|rules| rules.near.clear()));
    let together = together.map(|near| MemberRule::Together(near.key.as_ref().into()));
    together
        .or_else(|| (survey.rules.keeps_apart() && fits(&Rules::allow_sharing)).then_some(MemberRule::Apart))
}

/// Why the nodes of a place do not take another member.
fn reasons(views: &Views<'_, '_>, place: FabricPart) -> Vec<(String, usize)> {
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
    let NodeState::Ours(class) = survey.input.snapshot.node_state(node) else {
        return None;
    };
    if let Some(cause) = &class.withheld {
        return Some(cause.to_string());
    }
    let known = survey.input.rooms.get(node.0 as usize);
    let Some(facts) = known.and_then(|known| known.facts.as_ref()) else {
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
    if survey.device_obstacle(node, slot, room(survey, node, slot)).is_some()
        && let Err(refusal) = judge(class, &shape.request)
    {
        return Some(refusal.of_one_node());
    }
    Some("kept off by other pods' or its own affinity, anti-affinity or host ports".to_owned())
}

/// What, other than devices, keeps too many members off nodes. On the cluster of now nodes are not counted: their
/// numbers change all the time.
fn obstacles(views: &Views<'_, '_>, empty: bool) -> Option<Obstacles> {
    let survey = if empty { views.empty } else { views.now };
    let needed = views.demand.first(views.demand.must.max(1));
    let wide = places(views.now, views.anchors, widest(views.bounds));
    let slots = (0..needed.len()).filter(|slot| needed.get(*slot).is_some_and(|needed| *needed > 0));
    slots.take(SHAPES).find_map(|slot| {
        let found: Vec<PlaceObstacles> = wide
            .iter()
            .map(|place| PlaceObstacles::of(survey, *place, slot))
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
        let mut obstacles: BTreeMap<Obstacle, usize> = BTreeMap::new();
        let each = found.iter().flat_map(|found| &found.obstacles);
        each.for_each(|(obstacle, nodes)| *obstacles.entry(obstacle.clone()).or_default() += nodes);
        let mut obstacles: Vec<(Obstacle, usize)> = obstacles.into_iter().collect();
        if empty {
            obstacles.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        } else {
            obstacles.iter_mut().for_each(|(_, nodes)| *nodes = 0);
        }
        let nodes = empty.then(|| found.iter().map(|found| found.nodes).sum());
        (!obstacles.is_empty()).then(|| Obstacles { unit: unit.into(), nodes, found: obstacles })
    })
}

/// The nodes of a place that have enough devices for a member.
#[derive(Debug, Default)]
struct PlaceObstacles {
    nodes: usize,
    /// Members that the devices suffice for.
    room: u64,
    /// Members that the nodes take.
    takes: u64,
    /// What keeps members off some nodes.
    obstacles: BTreeMap<Obstacle, usize>,
}

impl PlaceObstacles {
    fn of(survey: &Survey<'_>, place: FabricPart, slot: usize) -> Self {
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
                && let Some(obstacle) = obstacle_on(survey, node, slot, (takes, room))
            {
                *found.obstacles.entry(obstacle).or_default() += 1;
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
    let least = of_each.min().filter(|_| class.withheld.is_none());
    u32::try_from(least.unwrap_or(0)).unwrap_or(u32::MAX)
}

/// Why a node takes no more than so many members, although its devices suffice for `room`.
fn obstacle_on(
    survey: &Survey<'_>,
    node: NodeIx,
    slot: usize,
    (takes, room): (u32, u32),
) -> Option<Obstacle> {
    let needs = &survey.shapes.get(slot)?.needs;
    let facts = survey.input.rooms.get(node.0 as usize)?.facts.as_ref()?;
    if let Err(misfit) = needs.admits(facts) {
        return Some(misfit.into());
    }
    let left = survey.left(node)?;
    if left.times(&needs.resources) > takes {
        return Some(survey.device_obstacle(node, slot, room).unwrap_or(Obstacle::OtherPods));
    }
    // The resource that one more member lacks is the one that the first member too many lacks.
    let mut rest = left.clone();
    (0..takes).for_each(|_| rest.sub(&needs.resources));
    rest.fits(&needs.resources).err().map(Obstacle::Resource)
}
