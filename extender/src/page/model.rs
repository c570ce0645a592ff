//! The cluster as the page shows it: the nodes as `gantry-map` models them, kept up to date by the changes of the index,
//! and the texts that are sent. Alike nodes of a domain are one row.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use gantry_api::placement::ComparedLevel;
use gantry_api::{GangPhase, NodeName, Reason};
use gantry_gang::Levels;
use gantry_map::{GpuState, NodeMap};
use serde::Serialize;

use crate::index::{GangView, MAX_GANGS, MemberView, PlaceView, Revisions, Store};

/// Nodes that are taken from the index under one lock.
const CHUNK: usize = 128;
/// Nodes that are shown at most; further ones are counted.
const MAX_NODES: usize = 20_000;
/// Members and reservations of a gang that are listed at most.
const MAX_MEMBERS: usize = 1000;

/// The condition of the facts as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Condition {
    /// They are complete and current.
    Ready,
    /// They are still being listed; nothing is shown.
    #[default]
    Cold,
    /// The API server does not respond.
    Stale,
    /// Another replica decides; why this one does not.
    Standby(String),
}

impl Condition {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Cold => "cold",
            Self::Stale => "stale",
            Self::Standby(_) => "standby",
        }
    }

    pub(super) fn message(&self) -> String {
        match self {
            Self::Ready => String::new(),
            Self::Cold => {
                "Pods, nodes, GpuNodes and Gangs are still being listed. The map appears once they are."
                    .to_owned()
            }
            Self::Stale => {
                "The API server does not respond. The page shows the last state that is known.".to_owned()
            }
            Self::Standby(why) => {
                format!("{why}. Reservations of gangs that are not decided are known to the leader only.")
            }
        }
    }
}

/// What is sent.
#[derive(Debug, Default)]
pub(super) struct View {
    /// Another one with every change.
    pub(super) version: String,
    pub(super) condition: Condition,
    /// `/api/v1/cluster`
    pub(super) cluster: Bytes,
    /// `/api/v1/gangs`
    pub(super) gangs: Bytes,
}

/// The state behind it.
#[derive(Debug, Default)]
pub(super) struct Model {
    seen: Revisions,
    nodes: BTreeMap<NodeName, Arc<NodeMap>>,
    gangs: (Vec<GangView>, usize),
    condition: Condition,
    refreshed: Option<Instant>,
    number: u64,
    view: Arc<View>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Cluster<'m> {
    version: &'m str,
    state: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
    nodes: usize,
    gpus: usize,
    counts: Counts,
    domains: Vec<Domain<'m>>,
    /// Nodes beyond the most that are shown.
    omitted_nodes: usize,
}

/// GPUs by state; those without are left out.
type Counts = BTreeMap<&'static str, usize>;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Domain<'m> {
    name: &'m str,
    nodes: usize,
    gpus: usize,
    counts: Counts,
    rows: Vec<Row<'m>>,
}

/// Nodes of a domain that look the same.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row<'m> {
    names: Vec<&'m str>,
    #[serde(flatten)]
    look: Look<'m>,
}

#[derive(PartialEq, Eq, Hash, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Look<'m> {
    model: &'m str,
    links: &'m str,
    /// A letter for the state of each GPU.
    gpus: String,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    cordoned: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_ready: Option<&'m str>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Gangs<'m> {
    version: &'m str,
    state: &'static str,
    gangs: Vec<Summary<'m>>,
    omitted_gangs: usize,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary<'m> {
    namespace: &'m str,
    name: &'m str,
    integration: &'m str,
    phase: GangPhase,
    reason: Reason,
    message: &'m str,
    min: u32,
    exist: u32,
    priority: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting_since: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<usize>,
    domain: &'m str,
    has_backfill_reservation: bool,
}

/// A gang with its members and reservations.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct GangReport {
    #[serde(flatten)]
    gang: serde_json::Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    members: Vec<MemberView>,
    reservations: Vec<PlaceView>,
    omitted_members: usize,
    /// Why it is in its domain, by level of the fabric.
    compared: Vec<LevelReport>,
}

/// A level of the fabric, with the texts about its domains.
#[derive(Serialize)]
struct LevelReport {
    level: String,
    domain: String,
    result: String,
    others: Vec<String>,
}

impl Model {
    /// Whether it is older than this.
    pub(super) fn is_due(&self, period: Duration) -> bool {
        self.refreshed.is_none_or(|at| at.elapsed() >= period)
    }

    /// What was computed last.
    pub(super) fn view(&self) -> Arc<View> {
        Arc::clone(&self.view)
    }

    /// A node by its name.
    pub(super) fn node(&self, name: &str) -> Option<Arc<NodeMap>> {
        self.nodes.get(&NodeName::from(name)).cloned()
    }

    /// Frees everything but the count of versions.
    pub(super) fn clear(&mut self) {
        *self = Self { number: self.number, ..Self::default() };
    }

    /// Takes the changes of the index, and computes the texts if something changed.
    pub(super) fn refresh(&mut self, store: &Store, levels: &Levels, condition: Condition, run: &str) {
        let is_cold = condition == Condition::Cold;
        let mut changed = self.condition != condition || self.view.version.is_empty();
        self.condition = condition;
        if is_cold {
            // What was known before a new list may be gone by then.
            changed |= !self.nodes.is_empty();
            (self.seen, self.nodes, self.gangs) = Default::default();
        } else {
            changed |= self.take_nodes(store, levels);
            let gangs = store.read(|index| index.gangs().summaries(MAX_GANGS));
            changed |= gangs != self.gangs;
            self.gangs = gangs;
        }
        self.refreshed = Some(Instant::now());
        if changed {
            self.number += 1;
            self.view = Arc::new(self.write(run));
        }
    }

    /// Whether a node changed.
    fn take_nodes(&mut self, store: &Store, levels: &Levels) -> bool {
        let mut changed = false;
        let (mut from, mut first) = (0, None);
        loop {
            let since = self.seen.nodes;
            let observed = store.read(|index| index.observe_nodes(from, since, CHUNK));
            if observed.revisions.renumbered != self.seen.renumbered {
                // Numbers of nodes changed, perhaps midway: all of them again.
                changed |= !self.nodes.is_empty();
                self.nodes.clear();
                self.seen = Revisions { nodes: 0, renumbered: observed.revisions.renumbered };
                (from, first) = (0, None);
                continue;
            }
            // Changes after the first look are taken the next time.
            let first = *first.get_or_insert(observed.revisions);
            for node in &observed.nodes {
                changed |= match node.to_map(levels) {
                    None => self.nodes.remove(&node.name).is_some(),
                    Some(map) if self.nodes.get(&node.name).is_some_and(|known| **known == map) => false,
                    Some(map) => {
                        self.nodes.insert(node.name.clone(), Arc::new(map));
                        true
                    }
                };
            }
            match observed.next {
                Some(next) => from = next,
                None => {
                    self.seen = first;
                    return changed;
                }
            }
        }
    }

    fn write(&self, run: &str) -> View {
        let version = format!("{run}-{}", self.number);
        let cluster = self.cluster(&version);
        let (gangs, omitted_gangs) = &self.gangs;
        let gangs = Gangs {
            version: &version,
            state: self.condition.name(),
            gangs: gangs.iter().map(summary).collect(),
            omitted_gangs: *omitted_gangs,
        };
        // Values without maps of foreign keys: they can be written.
        let bytes = |written: serde_json::Result<Vec<u8>>| Bytes::from(written.unwrap_or_default());
        let (cluster, gangs) = (bytes(serde_json::to_vec(&cluster)), bytes(serde_json::to_vec(&gangs)));
        View { version, condition: self.condition.clone(), cluster, gangs }
    }

    fn cluster<'m>(&'m self, version: &'m str) -> Cluster<'m> {
        let mut domains: BTreeMap<&str, Domain<'m>> = BTreeMap::new();
        let mut rows: HashMap<(&str, Look<'m>), usize> = HashMap::new();
        let mut counts = Counts::new();
        let shown = || self.nodes.values().take(MAX_NODES);
        for node in shown() {
            let name = node.domain.as_str();
            let domain = domains.entry(name).or_insert_with(|| Domain {
                name,
                nodes: 0,
                gpus: 0,
                counts: Counts::new(),
                rows: Vec::new(),
            });
            domain.nodes += 1;
            domain.gpus += node.gpus.len();
            for gpu in &node.gpus {
                *domain.counts.entry(gpu.state.words()).or_default() += 1;
                *counts.entry(gpu.state.words()).or_default() += 1;
            }
            let look = Look::of(node);
            let row = match is_plain(node) {
                true => *rows.entry((name, look.clone())).or_insert(domain.rows.len()),
                // A node that wants attention stands by itself.
                false => domain.rows.len(),
            };
            match domain.rows.get_mut(row) {
                Some(row) => row.names.push(&node.name),
                None => domain.rows.push(Row { names: vec![&node.name], look }),
            }
        }
        Cluster {
            version,
            state: self.condition.name(),
            message: self.condition.message(),
            nodes: self.nodes.len(),
            gpus: shown().map(|node| node.gpus.len()).sum(),
            counts,
            domains: domains.into_values().collect(),
            omitted_nodes: self.nodes.len().saturating_sub(MAX_NODES),
        }
    }
}

impl<'m> Look<'m> {
    fn of(node: &'m NodeMap) -> Self {
        Self {
            model: &node.model,
            links: &node.links,
            gpus: node.gpus.iter().map(|gpu| letter(gpu.state)).collect(),
            cordoned: node.cordoned,
            not_ready: node.not_ready.as_deref(),
        }
    }
}

/// Whether a node does not want attention.
fn is_plain(node: &NodeMap) -> bool {
    node.not_ready.is_none() && node.gpus.iter().all(|gpu| gpu.unhealthy.is_none() && gpu.cordoned.is_none())
}

/// The letter of a state, as docs/page.md lists them.
const fn letter(state: GpuState) -> char {
    match state {
        GpuState::Free => 'f',
        GpuState::Held => 'h',
        GpuState::PartlyHeld => 'p',
        GpuState::Reserved => 'r',
        GpuState::Leaving => 'l',
        GpuState::Cordoned => 'c',
        GpuState::Unhealthy => 'u',
    }
}

fn summary(gang: &GangView) -> Summary<'_> {
    let waits = gang.phase < GangPhase::Bound;
    Summary {
        namespace: &gang.namespace,
        name: &gang.name,
        integration: gang.integration,
        phase: gang.phase,
        reason: gang.reason,
        message: &gang.message,
        min: gang.min,
        exist: gang.exist,
        priority: gang.priority,
        waiting_since: waits.then_some(gang.waiting_since),
        position: gang.position,
        domain: &gang.domain,
        has_backfill_reservation: gang.has_nodes_kept,
    }
}

fn level_report(level: &ComparedLevel) -> LevelReport {
    LevelReport {
        level: level.level.clone(),
        domain: level.chosen.clone().unwrap_or_default(),
        result: level.to_string(),
        others: level.others.iter().map(ToString::to_string).collect(),
    }
}

/// A gang for `/api/v1/gangs/{namespace}/{name}`.
pub(super) fn gang_report(mut gang: GangView) -> GangReport {
    let omitted_members = gang.members.len().saturating_sub(MAX_MEMBERS);
    gang.members.truncate(MAX_MEMBERS);
    gang.places.truncate(MAX_MEMBERS);
    GangReport {
        gang: serde_json::to_value(summary(&gang)).unwrap_or_default(),
        refused: gang.refused.take(),
        compared: gang.compared.iter().flat_map(|compared| &compared.levels).map(level_report).collect(),
        members: gang.members,
        reservations: gang.places,
        omitted_members,
    }
}
