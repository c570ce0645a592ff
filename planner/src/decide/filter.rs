//! Which nodes fit a pod, and why the others do not. A node fits if every device that the pod asks for is free. Devices
//! held between prioritize and bind only count in the score.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use gantry_api::{ResourceName, names};
use gantry_gang::protocol::{Holder, WithheldReason};
use gantry_topology::LinkClass;

use super::{Candidates, ForeignNodes, Options};
use crate::kind::Spot;
use crate::layout::{AlignedAsks, Layout, Offer};
use crate::placement::SetTerms;
use crate::request::{Ask, NumaNeeds, Request};
use crate::shape::Shape;
use crate::site::Site;
use crate::snapshot::{
    BackfillReservation, Class, NOMINATED, NodeIx, NodeState, NominatedRequests, Pool, Snapshot,
};

/// The verdict, by position among the candidates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FilterVerdict {
    /// Nodes that fit.
    pub passed: Vec<u32>,
    /// Nodes that do not fit, each with the number of its reason.
    pub refused: Vec<(u32, u32)>,
    /// The reasons. Alike nodes share one, so that kube-scheduler counts them together.
    pub reasons: Vec<String>,
    /// By number of the reason: counts of nodes where idle devices are reserved.
    pub reserved: Vec<(u32, PoolShortage)>,
    /// A candidate is a node object that the snapshot does not have: the question is a simulation.
    pub simulated: bool,
}

/// Filters `candidates`, found at `nodes` of the snapshot, for a pod that asks `request`.
pub fn filter(
    snapshot: &Snapshot,
    options: Options,
    request: &Request,
    candidates: &impl Candidates,
    nodes: &[Option<NodeIx>],
) -> FilterVerdict {
    let mut answer = FilterVerdict { passed: Vec::with_capacity(nodes.len()), ..FilterVerdict::default() };
    // By class: not judged yet, fits, or the number of the reason.
    let mut by_class: Vec<Option<Result<(), u32>>> = vec![None; snapshot.classes.len()];
    for (position, node) in (0u32..).zip(nodes) {
        let verdict = match node.and_then(|node| snapshot.class(node)) {
            Some(class) => match by_class.get(class.0 as usize).copied().flatten() {
                Some(known) => known,
                None => {
                    let state = snapshot.classes.get(class.0 as usize);
                    let verdict = state.map_or(Ok(()), |state| judge_state(state, options, request));
                    let verdict = verdict.map_err(|refusal| answer.refuse(refusal));
                    if let Some(slot) = by_class.get_mut(class.0 as usize) {
                        *slot = Some(verdict);
                    }
                    verdict
                }
            },
            None => {
                answer.simulated = answer.simulated || candidates.are_objects();
                judge_unknown(request, candidates, position as usize).map_err(|reason| answer.reason(reason))
            }
        };
        match verdict {
            Ok(()) => answer.passed.push(position),
            Err(reason) => answer.refused.push((position, reason)),
        }
    }
    answer
}

impl FilterVerdict {
    /// The same reason for every candidate.
    pub fn all_refused(candidates: usize, reason: String) -> Self {
        let candidates = u32::try_from(candidates).unwrap_or(u32::MAX);
        Self {
            refused: (0..candidates).map(|position| (position, 0)).collect(),
            reasons: vec![reason],
            ..Self::default()
        }
    }

    /// Every candidate passes.
    pub fn all_passed(candidates: usize) -> Self {
        Self { passed: (0..u32::try_from(candidates).unwrap_or(u32::MAX)).collect(), ..Self::default() }
    }

    /// Refuses nodes that passed and are in a backfill reservation. `nodes` are the candidates' numbers.
    pub fn keep_off(&mut self, kept: &BackfillReservation, nodes: &[Option<NodeIx>]) {
        self.refuse_where(nodes, |node| kept.has(node), || kept.words());
    }

    /// Refuses nodes that passed and do not hold the pod in addition to the nominated pods of higher priority.
    pub fn leave_nominated(
        &mut self,
        promised: &NominatedRequests,
        snapshot: &Snapshot,
        nodes: &[Option<NodeIx>],
        (priority, request): (i32, &Request),
    ) {
        let is_promised = |node| match snapshot.node_state(node) {
            NodeState::Ours(class) => !promised.leaves(node, class, priority, request),
            NodeState::Foreign { .. } | NodeState::Gone => false,
        };
        self.refuse_where(nodes, is_promised, || NOMINATED.to_owned());
    }

    /// The refusals because of too few free devices on nodes where idle ones are reserved: position among
    /// [`Self::refused`], node, resource. `nodes` are the candidates' numbers.
    pub fn short_of_reserved<'f>(
        &'f self,
        nodes: &'f [Option<NodeIx>],
    ) -> impl Iterator<Item = (usize, NodeIx, &'f ResourceName)> {
        let shortages: HashMap<u32, &PoolShortage> =
            self.reserved.iter().map(|(reason, shortage)| (*reason, shortage)).collect();
        let refused = self.refused.iter().enumerate();
        refused.filter_map(move |(refusal, (position, reason))| {
            let shortage = shortages.get(reason)?;
            let node = nodes.get(*position as usize).copied().flatten()?;
            Some((refusal, node, &shortage.resource))
        })
    }

    /// Adds to refusals of [`Self::short_of_reserved`], by their positions, gangs that have reserved devices there.
    pub fn name_holders(&mut self, holders: &BTreeMap<usize, Vec<Holder>>) {
        for (refusal, holders) in holders {
            let Some((_, reason)) = self.refused.get(*refusal).copied() else {
                continue;
            };
            let shortage = self.reserved.iter().find(|(short, _)| *short == reason);
            let text = shortage.map(|(_, shortage)| format!("node(s) with {}", shortage.naming(holders)));
            if let Some(named) = text.map(|text| self.reason(text)) {
                self.refused[*refusal].1 = named;
            }
        }
    }

    /// Refuses nodes that passed and for which `is_off` holds.
    fn refuse_where(
        &mut self,
        nodes: &[Option<NodeIx>],
        is_off: impl Fn(NodeIx) -> bool,
        why: impl FnOnce() -> String,
    ) {
        let is_off = |position: &mut u32| {
            let node = nodes.get(*position as usize).copied().flatten();
            node.is_some_and(&is_off)
        };
        let off: Vec<u32> = self.passed.extract_if(.., is_off).collect();
        if !off.is_empty() {
            let reason = self.reason(why());
            self.refused.extend(off.into_iter().map(|position| (position, reason)));
        }
    }

    /// The number of a reason.
    fn refuse(&mut self, refusal: ClassRefusal) -> u32 {
        let (text, shortage) = match refusal {
            ClassRefusal::Unknown(text) => (text.to_owned(), None),
            ClassRefusal::Node(NodeRefusal::Short(shortage)) if shortage.reserved > 0 => {
                (format!("node(s) with {shortage}"), Some(shortage))
            }
            ClassRefusal::Node(refusal) => (refusal.of_nodes(), None),
        };
        let number = self.reason(text);
        if let Some(shortage) = shortage
            && self.reserved.iter().all(|(known, _)| *known != number)
        {
            self.reserved.push((number, shortage));
        }
        number
    }

    fn reason(&mut self, reason: String) -> u32 {
        let position = self.reasons.iter().position(|known| *known == reason).unwrap_or_else(|| {
            self.reasons.push(reason);
            self.reasons.len() - 1
        });
        u32::try_from(position).unwrap_or(u32::MAX)
    }
}

/// Why the nodes of a class do not fit a pod.
enum ClassRefusal {
    /// They have no inventory: the text.
    Unknown(&'static str),
    Node(NodeRefusal),
}

fn judge_state(state: &NodeState, options: Options, request: &Request) -> Result<(), ClassRefusal> {
    match state {
        NodeState::Gone => Err(ClassRefusal::Unknown(UNKNOWN_NODE)),
        NodeState::Foreign { .. } => match options.foreign {
            ForeignNodes::Allow => Ok(()),
            ForeignNodes::Refuse => Err(ClassRefusal::Unknown(FOREIGN_NODE)),
        },
        NodeState::Ours(class) => judge(class, request).map_err(ClassRefusal::Node),
    }
}

/// Whether a node of a class fits a pod, or why not.
pub fn judge(class: &Class, request: &Request) -> Result<(), NodeRefusal> {
    if let Some(cause) = &class.withheld {
        return Err(NodeRefusal::Withheld(cause.clone()));
    }
    let mut is_particular = false;
    for ask in &request.asks {
        let Some((_, pool)) = class.pool(ask.resource.as_str()) else {
            return Err(NodeRefusal::NotServed(ask.resource.clone()));
        };
        if let Some(miss) = too_many(pool.max_request, ask) {
            return Err(miss);
        }
        if pool.free.len() < ask.devices as usize {
            return Err(NodeRefusal::Short(PoolShortage::of(pool, ask.devices)));
        }
        is_particular |=
            pool.alignment.is_some() || ask.containers.iter().any(|container| !container.terms.is_empty());
    }
    if is_particular { judge_sets(class, request) } else { Ok(()) }
}

/// Whether enough free devices meet what a pod asks of them, and what kubelet's Topology Manager does.
fn judge_sets(class: &Class, request: &Request) -> Result<(), NodeRefusal> {
    let cuts: Vec<Vec<Spot>> = request.asks.iter().map(|ask| class.cut_for(ask)).collect();
    let offers = request.asks.iter().zip(&cuts).filter_map(|(ask, cut)| {
        let (_, pool) = class.pool(ask.resource.as_str())?;
        Some(Offer { site: class.site(pool, cut), free: &pool.free, ask })
    });
    let offers: Vec<Offer<'_>> = offers.collect();
    if Layout::best_of_all(&offers).is_some() {
        return Ok(());
    }
    let alone = offers.iter().find(|offer| Layout::best(offer.site, offer.free, offer.ask).is_none());
    let pool = |ask: &Ask| class.pool(ask.resource.as_str()).map(|(_, pool)| pool);
    match alone.and_then(|offer| Some((offer, pool(offer.ask)?))) {
        Some((offer, pool)) => Err(unmet(offer.site, pool, offer.ask)),
        None => Err(unmet_together(&offers)),
    }
}

/// Why kubelet's Topology Manager refuses the devices of several resources together, each of which it takes by itself.
fn unmet_together(offers: &[Offer<'_>]) -> NodeRefusal {
    let Some(aligned) = AlignedAsks::of(offers) else {
        return NodeRefusal::Unmet("the free devices cannot be divided as the pod asks".to_owned());
    };
    let (alignment, free) = (&aligned.alignment, &aligned.free);
    let asks = alignment.asks().cloned().map(|mut ask| {
        for container in &mut ask.numa {
            container.needs = NumaNeeds::default();
        }
        ask
    });
    let asks: Vec<Ask> = asks.collect();
    let without_numa = aligned.offers(offers).zip(&asks).map(|(offer, ask)| Offer { ask, ..*offer });
    let without_numa: Vec<Offer<'_>> = without_numa.collect();
    match Layout::best_of_all(&without_numa) {
        Some(_) => {
            NodeRefusal::Cpus { refusal: alignment.refusal_by_numa(free), free: alignment.free_by_node(free) }
        }
        None => NodeRefusal::Unmet(alignment.refusal(free)),
    }
}

/// Why enough free devices do not meet what a pod asks of them, or what kubelet's Topology Manager does: the first
/// container that cannot have its devices by itself, and what is free instead.
fn unmet(site: Site<'_>, pool: &Pool, ask: &Ask) -> NodeRefusal {
    if let Some(alignment) = site.alignment.filter(|alignment| alignment.counts(&ask.numa)) {
        if let Some(refusal) = alignment.refusal_by_cores(ask) {
            return NodeRefusal::Unmet(refusal);
        }
        let without_numa = Ask { numa: Vec::new(), ..ask.clone() };
        if Layout::best(site, &pool.free, &without_numa).is_some() {
            return NodeRefusal::Cpus {
                refusal: alignment.refusal_by_numa(&pool.free, ask),
                free: alignment.free_by_node(&pool.free),
            };
        }
    }
    for container in &ask.containers {
        let size = container.devices(&ask.blocks) as usize;
        if site.best_meeting(&pool.free, size, &container.terms).is_some() {
            continue;
        }
        if let Some(alignment) = site.alignment
            && alignment.aligned(&pool.free, size).is_none()
        {
            return NodeRefusal::Unmet(alignment.refusal(&pool.free, size));
        }
        return NodeRefusal::Unmet(lacking(site, pool, size, &container.terms));
    }
    NodeRefusal::Unmet(match site.alignment {
        Some(alignment) => alignment.refusal(&pool.free, ask.devices as usize),
        None => "the free devices cannot be divided among the containers as they ask".to_owned(),
    })
}

/// What of the terms of one container is not free, and what is free instead.
fn lacking(site: Site<'_>, pool: &Pool, size: usize, terms: &SetTerms) -> String {
    if !terms.models.is_empty() {
        let is_asked = |device: &usize| terms.models.iter().any(|model| site.is_of_model(*device, model));
        let of_models = pool.free.iter().filter(is_asked).count();
        if of_models < size {
            let models: Vec<&str> = terms.models.iter().map(|model| &**model).collect();
            let there = site.models.first().map_or("unknown", |model| &**model);
            return format!(
                "{of_models} of {size} GPUs free of {} (the GPUs are {there})",
                models.join(", ")
            );
        }
    }
    let devices = if matches!(pool.shape, Shape::Whole) { "GPUs" } else { "devices" };
    let wanted = match (terms.link, terms.gbs) {
        (Some(LinkClass::NvLink), None) => "share NVLink".to_owned(),
        (Some(LinkClass::PcieSwitch), None) => "are below one PCIe host bridge".to_owned(),
        (Some(_), None) => "are on one NUMA node".to_owned(),
        (None, Some(gbs)) => format!("reach {gbs} GB/s"),
        (Some(class), Some(gbs)) => format!("are joined by {class} or better and reach {gbs} GB/s"),
        (None, None) => "are aligned".to_owned(),
    };
    let best = site.best(&pool.free, size).and_then(|best| site.described(&best));
    let what = if size == 2 { "pair".to_owned() } else { format!("{size}") };
    let instead = match best {
        Some(best) => format!("the best free {what} is {best}"),
        None => "MIG devices have no links to each other".to_owned(),
    };
    format!("no {size} free {devices} {wanted}; {instead}")
}

/// Whether a container asks for more than `max`, the most that kubelet gives to one container. Kubelet would fail the
/// pod for good.
pub fn too_many(max: Option<u32>, ask: &Ask) -> Option<NodeRefusal> {
    let max = max?;
    let (container, asked) = ask.most()?;
    (asked > max).then(|| NodeRefusal::TooMany {
        resource: ask.resource.clone(),
        max,
        container: container.to_owned(),
        asked,
    })
}

/// A node that the snapshot does not have. An object is invented by a simulation: empty, with only its count known. A
/// name alone is a new node: it is refused until its plugin has published it.
fn judge_unknown(request: &Request, candidates: &impl Candidates, position: usize) -> Result<(), String> {
    if !candidates.are_objects() {
        return Err(UNKNOWN_NODE.to_owned());
    }
    for ask in &request.asks {
        let advertised = candidates.advertised(position, ask.resource.as_str()).unwrap_or(0);
        if advertised < ask.devices {
            return Err(too_small(&ask.resource, advertised, ask.devices));
        }
    }
    Ok(())
}

// Texts of refusals, in GPUs, for `kubectl describe pod`. kube-scheduler groups and counts equal texts and retries a
// pod whenever its text changes. So a text has no node names, durations or counters, and is the same for alike nodes. The
// time at which a reservation ends does not move.

/// A node that the snapshot does not have.
const UNKNOWN_NODE: &str = "node(s) not known to Gantry yet";
/// A node without an inventory, where policy forbids those.
const FOREIGN_NODE: &str = "node(s) without a Gantry plugin";

/// Unhealthy GPUs named in one text.
const NAMED: usize = 4;

/// Why a node with an inventory does not fit a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeRefusal {
    /// It gives out no device.
    Withheld(WithheldReason),
    /// It does not serve the resource at all.
    NotServed(ResourceName),
    /// A container asks for more than kubelet gives to one.
    TooMany {
        resource: ResourceName,
        /// The most a container may have.
        max: u32,
        container: String,
        asked: u32,
    },
    /// Too few devices are free.
    Short(PoolShortage),
    /// Enough devices are free, but not as the pod or kubelet's Topology Manager requires them: the text.
    Unmet(String),
    /// Enough devices are free, but kubelet's Topology Manager refuses the pod for its exclusive CPUs.
    Cpus {
        refusal: String,
        /// What is free on each NUMA node.
        free: String,
    },
}

impl NodeRefusal {
    /// A text that follows kube-scheduler's count: "2 node(s) with 3 of 8 GPUs free, 4 asked".
    fn of_nodes(&self) -> String {
        match self {
            Self::Withheld(cause) => format!("node(s) whose {cause}"),
            Self::NotServed(resource) => format!("node(s) without {resource}"),
            Self::TooMany { .. } => format!("node(s) where {}", self.of_one_node()),
            Self::Short(counts) => format!("node(s) with {counts}"),
            Self::Unmet(words) => format!("node(s) where {words}"),
            Self::Cpus { refusal, .. } => {
                format!("node(s) where {refusal}: no NUMA nodes have all free as it requires")
            }
        }
    }

    /// A text that follows the name of one node.
    pub fn of_one_node(&self) -> String {
        match self {
            Self::Withheld(cause) => cause.to_string(),
            Self::NotServed(resource) => format!("does not serve {resource}"),
            Self::TooMany { resource, max, container, asked } => {
                format!("{resource} gives a container {max} at most, container {container} asks for {asked}")
            }
            Self::Short(counts) => counts.to_string(),
            Self::Unmet(words) => words.clone(),
            Self::Cpus { refusal, free } => format!("{refusal}: {free}"),
        }
    }
}

/// The text for a simulated node that is too small.
fn too_small(resource: &ResourceName, advertised: u32, asked: u32) -> String {
    let unit = if resource.as_str() == names::GPU_RESOURCE { "GPUs" } else { resource.as_str() };
    format!("node(s) with {advertised} {unit}, {asked} asked")
}

/// Counts of a pool, and what other than pods takes the rest: `3 of 8 GPUs free, 4 asked, 1 unhealthy (GPU 3: Xid 79)`.
/// Devices that are not whole GPUs have the name of their resource: `2 of 56 nvidia.com/mig-1g.10gb free, 4 asked`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolShortage {
    pub resource: ResourceName,
    /// `GPUs`, or the resource.
    unit: String,
    pub free: usize,
    pub devices: usize,
    pub asked: u32,
    pub unhealthy: usize,
    /// Unhealthy GPUs with their faults, a few of them.
    faults: Vec<String>,
    /// Idle, and reserved for gangs or for pods that are being bound.
    pub reserved: usize,
    /// Of pods that are gone, whose processes may still run.
    pub leaving: usize,
}

impl PoolShortage {
    fn of(pool: &Pool, asked: u32) -> Self {
        let unit = match pool.shape {
            Shape::Whole if pool.resource.as_str() == names::GPU_RESOURCE => "GPUs",
            _ => pool.resource.as_str(),
        };
        let faults = pool.faults.iter();
        let mut faults: Vec<String> =
            faults.take(NAMED).map(|fault| format!("GPU {}: {}", fault.gpu, fault.reason)).collect();
        if pool.faults.len() > NAMED {
            faults.push("...".to_owned());
        }
        Self {
            resource: pool.resource.clone(),
            unit: unit.to_owned(),
            free: pool.free.len(),
            devices: pool.devices,
            asked,
            unhealthy: pool.unhealthy,
            faults,
            reserved: pool.reserved,
            leaving: pool.leaving,
        }
    }
}

impl PoolShortage {
    /// The counts, with gangs that have reserved some of the idle devices.
    fn naming(&self, holders: &[Holder]) -> String {
        let Self { unit, free, devices, asked, unhealthy, faults, reserved, leaving, .. } = self;
        let mut text = format!("{free} of {devices} {unit} free, {asked} asked");
        match faults.is_empty() {
            _ if *unhealthy == 0 => {}
            true => text
                .push_str(&format!(", {unhealthy} unhealthy (what the plugin publishes contradicts itself)")),
            false => text.push_str(&format!(", {unhealthy} unhealthy ({})", faults.join("; "))),
        }
        if *reserved > 0 {
            text.push_str(&format!(", {reserved} idle and reserved"));
            match holders {
                [] => {}
                [holder] if holder.devices == *reserved => {
                    text.push_str(&format!(" for {}", holder.gang_and_limit()));
                }
                holders => {
                    let named: Vec<String> = holders.iter().map(ToString::to_string).collect();
                    text.push_str(&format!(" ({})", named.join(", ")));
                }
            }
        }
        if *leaving > 0 {
            text.push_str(&format!(", {leaving} not yet released by deleted pods"));
        }
        text
    }
}

impl fmt::Display for PoolShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.naming(&[]))
    }
}

/// The text about a node in the Event of a pod that kube-scheduler's own count refuses. If enough devices are free
/// here, kubelet advertises fewer, or kube-scheduler counts pods that the index has not seen.
pub fn node_line(pool: &Pool, asked: u32) -> String {
    let mut text = PoolShortage::of(pool, asked).to_string();
    if pool.free.len() >= asked as usize
        && let Some(advertised) = pool.advertised.filter(|advertised| *advertised as usize != pool.devices)
    {
        text.push_str(&format!(", kubelet advertises {advertised}"));
    }
    text
}
