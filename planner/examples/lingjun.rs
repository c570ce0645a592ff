//! How many leaves of a real network gangs are spread over: jobs come and go on the tree of a trace, placed by the real planner down to the
//! devices, and for comparison by two simple rules. `cargo run --release -p gantry-planner --example lingjun -- topo.csv [load] [seed]
//! [leave]`
//!
//! `topo.csv` is that of alibaba/alibaba-lingjun-dataset-2023: a host a line with its switches, `ip,DSW,PSW,ASW`; a leaf is an ASW within
//! its PSW. Hosts have eight GPUs behind NVSwitches. Jobs ask for 1, 2, 4, ... 512 GPUs, half as many for four times as many, come at
//! random times (Poisson) and last exponentially long; those that find no place wait, and are tried again in their order whenever a job
//! ends.

#![allow(missing_docs, clippy::print_stdout, reason = "a program, not a library")]

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::sync::Arc;

use anyhow::Context;
use gantry_api::{DeviceId, NodeName, names};
use gantry_gang::{Fabric, Level, Levels, Needs, NodeFacts, Resources};
use gantry_planner::devices::DeviceSet;
use gantry_planner::fixtures::{class_of, pool_of, switched};
use gantry_planner::input::{EFFORT, ExactNode, NodeResources, PlacementRules, PlanInput, Shape};
use gantry_planner::kind::Kinds;
use gantry_planner::plan::plan;
use gantry_planner::request::{Ask, Request};
use gantry_planner::snapshot::{Class, ClassIx, NodeIx, NodeState, Snapshot};

#[path = "../benches/common/gangs.rs"]
mod common;
use common::gang;

/// GPUs of a host.
const GPUS: usize = 8;
/// GPUs of jobs, and how often each: half as many jobs have four times as many.
const SIZES: [(u32, u32); 10] =
    [(1, 226), (2, 160), (4, 113), (8, 80), (16, 57), (32, 40), (64, 28), (128, 20), (256, 14), (512, 10)];
/// Jobs of which the first tenth only fills the cluster.
const JOBS: usize = 5_000;
/// Jobs that wait and are tried when one ends.
const TRIED: usize = 32;

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let path = args.next().context("the path of topo.csv is missing")?;
    let load = args.next().map_or(Ok(0.85), |load| load.parse::<f64>())?;
    let seed = args.next().map_or(Ok(1), |seed| seed.parse::<u64>())?;
    let leave = args.next().is_some_and(|word| word == "leave");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let leaves = Tree::read(&text).with_context(|| path.clone())?;
    println!("load {load}, seed {seed}, {} hosts, {} leaves", leaves.hosts.len(), leaves.count);
    println!("rule                      leaves/fewest   gangs of 2 to 8 hosts in one leaf   waited or left");
    for rule in [Rule::Spread, Rule::BestFit, Rule::Planner, Rule::WithinBlocks] {
        let outcome = play(&leaves, rule, load, seed, leave);
        println!(
            "{:<25} {:>13.3} {:>34.1}% {:>16.1}%",
            rule.as_str(),
            outcome.used / outcome.fewest,
            outcome.one_leaf / outcome.small * 100.0,
            outcome.waited / outcome.jobs * 100.0,
        );
    }
    Ok(())
}

/// How hosts are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// The emptiest hosts, as kube-scheduler scores by itself; of equal ones any.
    Spread,
    /// The leaf with the least room that holds all of it, else the leaves with most room and the last one by best fit.
    BestFit,
    /// The planner with leaves alone.
    Planner,
    /// The planner with the blocks above them too: a gang lies in one block where it can, if that takes more leaves.
    WithinBlocks,
}

impl Rule {
    fn as_str(self) -> &'static str {
        match self {
            Self::Spread => "emptiest hosts",
            Self::BestFit => "best fit by leaf",
            Self::Planner => "Gantry's planner",
            Self::WithinBlocks => "the same, blocks first",
        }
    }
}

/// Leaf and name of every host.
struct Tree {
    hosts: Vec<(usize, String, String)>,
    count: usize,
    /// Hosts of the largest leaf.
    largest: usize,
}

impl Tree {
    fn read(text: &str) -> anyhow::Result<Self> {
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        let mut hosts = Vec::new();
        for (line, row) in text.lines().enumerate().skip(1) {
            let fields: Vec<&str> = row.split(',').collect();
            let [_, _, block, switch] = fields[..] else {
                anyhow::bail!("line {}: {} fields, not 4", line + 1, fields.len());
            };
            let leaf = format!("{block}-{switch}");
            let next = numbers.len();
            let number = *numbers.entry(leaf.clone()).or_insert(next);
            hosts.push((number, block.to_owned(), leaf));
        }
        let mut sizes = vec![0usize; numbers.len()];
        for (leaf, ..) in &hosts {
            sizes[*leaf] += 1;
        }
        Ok(Self { hosts, count: sizes.len(), largest: sizes.into_iter().max().context("no host")? })
    }
}

/// What came of it.
#[derive(Debug, Default)]
struct Outcome {
    jobs: f64,
    waited: f64,
    /// Of gangs of more than one host.
    used: f64,
    fewest: f64,
    /// Gangs of two hosts up to as many as a leaf has.
    small: f64,
    one_leaf: f64,
}

/// Hosts, and the GPUs of each.
type Place = Vec<(usize, DeviceSet)>;

fn play(tree: &Tree, rule: Rule, load: f64, seed: u64, leave: bool) -> Outcome {
    let mut dice = Dice(seed);
    let mut cluster = Cluster::new(tree, rule == Rule::WithinBlocks);
    let mut outcome = Outcome::default();
    let mean = SIZES.iter().map(|(size, often)| f64::from(size * often)).sum::<f64>()
        / SIZES.iter().map(|(_, often)| f64::from(*often)).sum::<f64>();
    let sizes: Vec<u32> = SIZES.iter().flat_map(|(size, often)| (0..*often).map(move |_| *size)).collect();
    let between = mean / (load * (tree.hosts.len() * GPUS) as f64);
    let mut time = 0.0;
    let mut ends: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut running: Vec<Option<Place>> = Vec::new();
    let mut queue: VecDeque<(usize, u32, f64)> = VecDeque::new();
    let mut come = 0;
    let mut next = dice.exponential(between);
    while come < JOBS {
        // Times as whole numbers, so that they have an order.
        let ended = ends.peek().map(|Reverse((at, _))| *at as f64 / 1e9);
        if ended.is_some_and(|ended| ended <= next) {
            let Some(Reverse((_, job))) = ends.pop() else {
                break;
            };
            time = ended.unwrap_or(time);
            if let Some(place) = running[job].take() {
                cluster.give_back(&place);
            }
        } else {
            time = next;
            next += dice.exponential(between);
            let size = sizes[dice.below(sizes.len())];
            queue.push_back((come, size, dice.exponential(1.0)));
            running.push(None);
            come += 1;
        }
        let mut at = 0;
        // Whatever asks for as much as one that has found no place finds none either.
        let mut refused = u32::MAX;
        while at < queue.len().min(TRIED) {
            let (job, size, lasts) = queue[at];
            let found = (size < refused).then(|| cluster.place(rule, size, &mut dice)).flatten();
            let Some(place) = found else {
                refused = refused.min(size);
                if leave {
                    outcome.waited += 1.0;
                    outcome.jobs += 1.0;
                    queue.remove(at);
                } else {
                    at += 1;
                }
                continue;
            };
            queue.remove(at);
            cluster.take(&place);
            if job > JOBS / 10 {
                outcome.count(tree, &place, at > 0 || job + 1 < come);
            }
            running[job] = Some(place);
            ends.push(Reverse((((time + lasts) * 1e9) as u64, job)));
        }
    }
    outcome
}

impl Outcome {
    fn count(&mut self, tree: &Tree, place: &Place, waited: bool) {
        self.jobs += 1.0;
        self.waited += f64::from(u8::from(waited));
        let leaves: BTreeSet<usize> = place.iter().map(|(host, _)| tree.hosts[*host].0).collect();
        let hosts = place.len();
        if hosts > 1 {
            self.used += leaves.len() as f64;
            self.fewest += hosts.div_ceil(tree.largest) as f64;
        }
        if (2..=tree.largest).contains(&hosts) {
            self.small += 1.0;
            self.one_leaf += f64::from(u8::from(leaves.len() == 1));
        }
    }
}

/// The cluster as the planner sees it.
struct Cluster {
    leaf_of: Vec<usize>,
    leaves: Vec<Vec<usize>>,
    snapshot: Snapshot,
    /// By the free GPUs of a host as bits.
    classes: Vec<Class>,
    rooms: Vec<NodeResources>,
    fabric: Fabric,
    shapes: Vec<Shape>,
    ids: Vec<Vec<Option<DeviceId>>>,
}

impl Cluster {
    fn new(tree: &Tree, blocks: bool) -> Self {
        let kind = Kinds::default().of(&switched());
        let class = |mask: usize| {
            let free: DeviceSet = (0..GPUS).filter(|gpu| mask >> gpu & 1 == 1).collect();
            class_of(&kind, pool_of(names::GPU_RESOURCE, gantry_planner::shape::Shape::Whole, GPUS, free))
        };
        let classes: Vec<Class> = (0..1 << GPUS).map(class).collect();
        let standings = classes.iter().cloned().map(|class| Arc::new(NodeState::Ours(class)));
        let mut snapshot =
            Snapshot { synced: true, classes: Arc::new(standings.collect()), ..Snapshot::default() };
        let mut leaves = vec![Vec::new(); tree.count];
        let (mut rooms, mut ids) = (Vec::new(), Vec::new());
        for (host, (leaf, block, name)) in tree.hosts.iter().enumerate() {
            leaves[*leaf].push(host);
            snapshot.nodes.push(ClassIx((1 << GPUS) - 1));
            let node = format!("host-{host:04}");
            Arc::make_mut(&mut snapshot.names).number(&NodeName::from(node.as_str()));
            let allocatable = Resources { pods: 110, ..Resources::default() };
            let labels = [("example.com/block", block), ("example.com/leaf", name)];
            rooms.push(NodeResources {
                facts: Some(Arc::new(NodeFacts {
                    name: node.as_str().into(),
                    labels: labels.map(|(key, value)| (key.into(), value.as_str().into())).into(),
                    allocatable: allocatable.clone(),
                    ..NodeFacts::default()
                })),
                left: allocatable,
            });
            ids.push((0..GPUS).map(|gpu| Some(format!("{host}-{gpu}").as_str().into())).collect());
        }
        let names: &[&str] = if blocks { &["block", "leaf"] } else { &["leaf"] };
        let levels = names
            .iter()
            .map(|level| Level { name: (*level).into(), label: format!("example.com/{level}").into() });
        let facts = rooms.iter().map(|room: &NodeResources| room.facts.as_deref());
        Self {
            leaf_of: tree.hosts.iter().map(|(leaf, ..)| *leaf).collect(),
            leaves,
            fabric: Fabric::build(Levels(levels.collect()), facts),
            snapshot,
            classes,
            rooms,
            shapes: [1, 2, 4, 8].into_iter().map(shape).collect(),
            ids,
        }
    }

    fn free(&self, host: usize) -> u32 {
        self.snapshot.nodes[host].0
    }

    fn take(&mut self, place: &Place) {
        for (host, gpus) in place {
            self.snapshot.nodes[*host].0 &= !bits(gpus);
        }
    }

    fn give_back(&mut self, place: &Place) {
        for (host, gpus) in place {
            self.snapshot.nodes[*host].0 |= bits(gpus);
        }
    }

    fn place(&self, rule: Rule, size: u32, dice: &mut Dice) -> Option<Place> {
        match rule {
            Rule::Planner | Rule::WithinBlocks => self.plan(size),
            Rule::Spread | Rule::BestFit => self.by_rule(rule, size, dice),
        }
    }

    fn plan(&self, size: u32) -> Option<Place> {
        let exact = |node: NodeIx| {
            Some(ExactNode {
                class: self.classes[self.free(node.0 as usize) as usize].clone(),
                ids: vec![self.ids.get(node.0 as usize)?.as_slice()],
            })
        };
        let input = PlanInput {
            snapshot: &self.snapshot,
            rooms: &self.rooms,
            fabric: &self.fabric,
            shapes: &self.shapes,
            barred: &|_, _| PlacementRules::default(),
            gone: &[],
            exact: &exact,
            effort: &Cell::new(EFFORT),
        };
        // Members of eight, or one of fewer.
        let each = size.min(8);
        let placement = plan(&input, &gang(size / each, each, None)).ok()?;
        let mut place: BTreeMap<usize, DeviceSet> = BTreeMap::new();
        for id in placement.places.iter().flat_map(|place| &place.devices).flat_map(|(_, ids)| ids) {
            let (host, gpu) = id.as_str().split_once('-')?;
            let gpus: DeviceSet = [gpu.parse::<usize>().ok()?].into_iter().collect();
            place.entry(host.parse().ok()?).or_insert(DeviceSet::EMPTY).add(&gpus);
        }
        Some(place.into_iter().collect())
    }

    fn by_rule(&self, rule: Rule, size: u32, dice: &mut Dice) -> Option<Place> {
        let each = size.min(8);
        let members = (size / each) as usize;
        let has_room = |host: &usize| self.free(*host).count_ones() >= each;
        let lowest = |host: usize| -> (usize, DeviceSet) {
            let free = self.free(host);
            let gpus = (0..GPUS).filter(|gpu| free >> gpu & 1 == 1);
            (host, gpus.take(each as usize).collect())
        };
        let mut hosts: Vec<usize> = (0..self.rooms.len()).filter(has_room).collect();
        if hosts.len() < members {
            return None;
        }
        if rule == Rule::Spread {
            hosts.sort_by_cached_key(|host| (Reverse(self.free(*host).count_ones()), dice.next()));
            return Some(hosts.into_iter().take(members).map(lowest).collect());
        }
        // The fullest host first, within the leaf with the least room.
        let mut room: Vec<(usize, usize)> = (0..self.leaves.len())
            .map(|leaf| (self.leaves[leaf].iter().filter(|host| has_room(host)).count(), leaf))
            .collect();
        room.sort_unstable();
        let mut place = Vec::new();
        while place.len() < members {
            let left = members - place.len();
            let fitting = room.iter().position(|(room, _)| *room >= left);
            let (_, leaf) = room.remove(fitting.unwrap_or(room.len() - 1));
            let mut hosts: Vec<usize> =
                self.leaves[leaf].iter().copied().filter(|host| has_room(host)).collect();
            hosts.sort_by_key(|host| (self.free(*host).count_ones(), *host));
            place.extend(hosts.into_iter().take(left).map(lowest));
        }
        debug_assert!(place.iter().all(|(host, _)| self.leaf_of[*host] < self.leaves.len()));
        Some(place)
    }
}

fn bits(gpus: &DeviceSet) -> u32 {
    gpus.iter().fold(0, |bits, gpu| bits | 1 << gpu)
}

/// Random numbers that a seed makes again (SplitMix64).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        let unit = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        -mean * (1.0 - unit).ln()
    }
}

fn shape(gpus: u32) -> Shape {
    Shape {
        request: Arc::new(Request {
            asks: vec![Ask::single(names::GPU_RESOURCE.into(), gpus)],
            order: Vec::new(),
            ..Request::default()
        }),
        needs: Arc::new(Needs {
            resources: Resources { pods: 1, ..Resources::default() },
            ..Needs::default()
        }),
    }
}
