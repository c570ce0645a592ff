//! Why a gang fits or does not, level by level: as values that `gantry explain` prints, and as text for the Gang and
//! its pods' conditions.

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write;
use std::sync::Arc;

use gantry_api::names;
use gantry_gang::protocol::{Refused, Wanted};
use serde::Serialize;

use super::demand::{Counts, Demand};
use super::fill::Anchors;
use super::pack::nodes_of;
use super::scope::{Bounds, Place, Scope, places, scopes};
use super::skew::Skew;
use super::survey::{Survey, available};
use super::{besides, choose};
use crate::input::Shape;

/// Why a gang fits or does not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// What is to be placed: `8 members of 4 GPUs`.
    pub members: String,
    /// The minimum to be placed.
    pub must: u32,
    /// What was tried, the narrowest first.
    pub levels: Vec<Tried>,
    /// It would not fit on an empty cluster.
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
    /// How many would fit on an empty cluster.
    pub empty: u32,
    /// How many are wanted.
    pub wanted: u32,
    /// The minimum; 0 where each member is useful by itself.
    pub must: u32,
    /// Counts of the devices asked for, by resource.
    pub devices: Vec<Stock>,
    /// Why its nodes take no more members, with the number of nodes for each reason, most first.
    pub reasons: Vec<(String, usize)>,
}

/// Counts of a resource's devices in one domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stock {
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

impl Explanation {
    pub(super) fn of(views: &Views<'_, '_>) -> Self {
        let demand = views.demand;
        let counts = demand.first(demand.most);
        let mut levels: Vec<Tried> = Vec::new();
        for scope in scopes(views.now, widest(views.bounds)) {
            levels.extend(Tried::of(views, scope, &counts));
        }
        // Each shape by itself: what does not fit so can never fit. With rules among members a choice on the empty
        // cluster decides.
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
            must: views.demand.must,
            devices: stock(survey, best, &views.demand.first(views.demand.must.max(1))),
            reasons: besides::reasons(views, best),
        })
    }
}

impl Tried {
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
            let unit = unit_of(ask.devices, unit(ask.resource.as_str()));
            format!("{} {unit}", ask.devices)
        })
        .collect();
    words.join(" with ")
}

/// The unit of a resource's devices.
pub fn unit(resource: &str) -> &str {
    if resource == names::GPU_RESOURCE {
        "GPUs"
    } else {
        resource
    }
}

/// The unit for a number.
pub(super) fn unit_of(devices: u32, unit: &str) -> &str {
    match (devices, unit) {
        (1, "GPUs") => "GPU",
        _ => unit,
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
        return Refused {
            message: format!("{reason}: {explanation}").into(),
            reason: reason.into(),
            hopeless,
        };
    }
    let even = if explanation.hopeless {
        " even if it were empty"
    } else {
        ""
    };
    let cause = besides::cause(views, explanation.hopeless);
    let cause = cause.map_or_else(String::new, |cause| format!(": {cause}"));
    let reason = format!("{who} {verb} {together}{within}{even}{cause}");
    Refused {
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
