//! Why a gang fits or does not, level by level: as values that `gantry explain` prints, and in words for the Gang and the pods' conditions.

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write;
use std::sync::Arc;

use gantry_api::names;
use gantry_gang::protocol::{Refused, Wanted};
use serde::Serialize;

use super::choose;
use super::demand::{Counts, Demand};
use super::fill::Anchors;
use super::pack::nodes_of;
use super::scope::{Bounds, Place, Scope, places, scopes};
use super::skew::Skew;
use super::survey::{Survey, available};
use crate::decide::{plugin_not_ready, too_many};
use crate::gang::terrain::Shape;
use crate::snapshot::{NodeIx, Standing};

/// Why a gang fits or does not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// What is to be placed: `8 members of 4 GPUs`.
    pub members: String,
    /// Members that must be placed, or none is.
    pub must: u32,
    /// What was tried, the narrowest first.
    pub levels: Vec<Tried>,
    /// It would not fit if nothing else were there.
    pub hopeless: bool,
}

/// One level of the fabric.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Tried {
    /// The level: `node`, the name of one of the configuration, `cluster`.
    pub level: Arc<str>,
    /// How many domains of the level there are.
    pub domains: usize,
    /// The domain where most members fit.
    pub best: Arc<str>,
    /// How many fit there now, each shape by itself.
    pub fits: u32,
    /// How many would if nothing else were there.
    pub empty: u32,
    /// How many are wanted.
    pub wanted: u32,
    /// What there is of the devices asked for, by resource.
    pub devices: Vec<Stock>,
    /// Why its nodes do not take more members, and how many nodes for each reason, most first.
    pub reasons: Vec<(String, usize)>,
}

/// Devices of a resource in one domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stock {
    /// The resource in words: `GPUs` or its name.
    pub resource: String,
    /// Free now.
    pub free: usize,
    /// Healthy.
    pub healthy: usize,
    /// All.
    pub total: usize,
    /// What the members that are wanted ask for together.
    pub asked: u64,
}

/// What is looked at for an explanation.
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

impl Explanation {
    pub(super) fn of(views: &Views<'_, '_>) -> Self {
        let demand = views.demand;
        let counts = demand.first(demand.most);
        let mut levels: Vec<Tried> = Vec::new();
        for scope in scopes(views.now, widest(views.bounds)) {
            levels.extend(Tried::of(views, scope, &counts));
        }
        // Each shape by itself: what does not even fit so is hopeless for sure. Where members mind each other that says little.
        let hopeless = levels.iter().all(|level| level.empty < demand.must)
            || views.empty.minds() && choose(views.empty, views.anchors, demand, views.bounds).is_none();
        Self {
            members: members(views.now, &counts),
            must: demand.must,
            levels,
            hopeless,
        }
    }
}

impl Tried {
    fn of(views: &Views<'_, '_>, scope: Scope, counts: &Counts) -> Option<Self> {
        let survey = views.now;
        let slots = counts.len();
        let (now, empty) = (
            survey.sums(survey.lowest_tier()),
            views.empty.sums(views.empty.lowest_tier()),
        );
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
        let all_empty = places
            .iter()
            .map(|place| takes(views.empty, &empty, *place))
            .max();
        Some(Self {
            level: level_name(survey, scope),
            domains,
            best: name(best).into(),
            fits: takes(survey, &now, best),
            empty: all_empty.unwrap_or(0),
            wanted: counts.iter().sum(),
            devices: stock(survey, best, counts),
            reasons: reasons(views, best),
        })
    }
}

/// The name of a scope.
pub(super) fn level_name(survey: &Survey<'_>, scope: Scope) -> Arc<str> {
    match scope {
        Scope::Node => "node".into(),
        Scope::Level(level) => survey
            .fabric
            .levels
            .0
            .get(level)
            .map_or_else(|| "".into(), |level| Arc::clone(&level.name)),
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
            let unit = unit(ask.resource.as_str());
            let unit = if ask.devices == 1 && unit == "GPUs" {
                "GPU"
            } else {
                unit
            };
            format!("{} {unit}", ask.devices)
        })
        .collect();
    words.join(" with ")
}

fn unit(resource: &str) -> &str {
    if resource == names::GPU_RESOURCE {
        "GPUs"
    } else {
        resource
    }
}

fn stock(survey: &Survey<'_>, place: Place, counts: &Counts) -> Vec<Stock> {
    let mut resources: BTreeMap<&str, u64> = BTreeMap::new();
    for (shape, count) in survey.shapes.iter().zip(counts) {
        for ask in &shape.request.asks {
            *resources.entry(ask.resource.as_str()).or_default() +=
                u64::from(ask.devices) * u64::from(*count);
        }
    }
    let nodes = nodes_of(survey, place);
    let of = |(resource, asked): (&str, u64)| {
        let pools = nodes
            .iter()
            .filter_map(|node| survey.class(*node)?.pool(resource));
        let mut stock = Stock {
            resource: unit(resource).to_owned(),
            free: 0,
            healthy: 0,
            total: 0,
            asked,
        };
        for (_, pool) in pools {
            stock.free += available(pool, survey.counting);
            stock.healthy += pool.devices.saturating_sub(pool.unhealthy);
            stock.total += pool.devices;
        }
        stock
    };
    resources.into_iter().map(of).collect()
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

/// Why a node takes no member of a shape; `None` if it does, or is none of ours.
fn reason(views: &Views<'_, '_>, node: NodeIx, slot: usize) -> Option<String> {
    let survey = views.now;
    if survey.takes(node, slot, survey.lowest_tier()) > 0 {
        return None;
    }
    let shape = survey.shapes.get(slot)?;
    let Standing::Ours(class) = survey.terrain.snapshot.standing(node) else {
        return None;
    };
    if let Some(reason) = &class.not_ready {
        return Some(plugin_not_ready(reason));
    }
    let room = survey.terrain.rooms.get(node.0 as usize);
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
                format!("fewer than {} healthy {unit}", ask.devices)
            } else {
                format!("fewer than {} {unit} free", ask.devices)
            });
        }
    }
    if let Err(lack) = survey.left(node)?.fits(&shape.needs.resources) {
        return Some(lack.to_string());
    }
    Some("kept off by other pods' or its own affinity, anti-affinity or host ports".to_owned())
}

/// The refusal.
pub(super) fn refused(views: &Views<'_, '_>, wanted: &Wanted) -> Refused {
    let demand = views.demand;
    let survey = views.now;
    if views.bounds == Bounds::Unknown {
        let level = wanted.terms.level.as_ref().map_or("", |wish| &wish.level);
        let levels: Vec<&str> = survey.fabric.levels.0.iter().map(|level| &*level.name).collect();
        let known = if levels.is_empty() {
            "none is configured".to_owned()
        } else {
            levels.join(", ")
        };
        let reason: Arc<str> = format!("{level} is no level of the fabric (levels: {known})").into();
        return Refused {
            message: Arc::clone(&reason),
            reason,
            hopeless: true,
        };
    }
    let explanation = Explanation::of(views);
    let all = members(survey, &demand.first(demand.most));
    // Members beyond the minimum come one by one: where no more must be placed, not one can be.
    let (who, verb, together) = match demand.must {
        _ if demand.most == 1 => (all, "does not fit", ""),
        0 => (format!("none of {all}"), "fits", ""),
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
        return Refused {
            message: format!("{reason}: {explanation}").into(),
            reason: reason.into(),
            hopeless,
        };
    }
    let reason = if explanation.hopeless {
        format!("{who} {verb} {together}{within} even if it were empty")
    } else {
        format!("{who} {verb} {together}{within}")
    };
    Refused {
        message: format!("{reason}: {explanation}").into(),
        reason: reason.into(),
        hopeless: explanation.hopeless,
    }
}

/// The constraint without which it would fit: how evenly members must lie.
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

impl fmt::Display for Explanation {
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

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if &*self.level == "cluster" {
            f.write_str("cluster: ")?;
        } else {
            write!(f, "best {} of {}: {}: ", self.level, self.domains, self.best)?;
        }
        write!(f, "{} of {} fit", self.fits, self.wanted)?;
        if self.empty < self.wanted {
            write!(f, ", {} if nothing else were there", self.empty)?;
        }
        let mut stock = String::new();
        for of in &self.devices {
            // Writing into a String cannot fail.
            let _ = write!(
                stock,
                ", {} {} asked, {} free, {} healthy of {}",
                of.asked, of.resource, of.free, of.healthy, of.total
            );
            let asked = usize::try_from(of.asked).unwrap_or(usize::MAX);
            if self.fits < self.wanted && of.free < asked && asked <= of.healthy {
                let _ = write!(stock, ", {} more would have to come free", asked - of.free);
            }
        }
        f.write_str(&stock)?;
        if !self.reasons.is_empty() {
            let reasons: Vec<String> = self
                .reasons
                .iter()
                .take(4)
                .map(|(reason, nodes)| format!("{nodes} {reason}"))
                .collect();
            write!(f, " (nodes: {})", reasons.join(", "))?;
        }
        Ok(())
    }
}
