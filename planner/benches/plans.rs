//! Planning whole gangs by size of the cluster. `cargo bench -p gantry-planner --bench plans`

#![allow(missing_docs, reason = "benchmarks")]

use std::cell::Cell;
use std::sync::Arc;

use divan::Bencher;
use divan::counter::ItemsCount;
use gantry_api::{DeviceId, NodeName, names};
use gantry_gang::protocol::{PlanRequest, ShapeId};
use gantry_gang::{Fabric, Level, Levels, Needs, NodeFacts, Resources};
use gantry_planner::devices::DeviceSet;
use gantry_planner::fixtures::{request, switched};
use gantry_planner::input::{EFFORT, ExactNode, NodeResources, PlacementRules, PlanInput, Shape};
use gantry_planner::kind::Kinds;
use gantry_planner::placement::{PlacementRequest, SetTerms};
use gantry_planner::plan::plan;
use gantry_planner::preempt::{CandidatePod, VictimCandidate, preempt};
use gantry_planner::snapshot::{Class, ClassIx, NodeIx, NodeState, Pool, ScoreCache, Snapshot};
use gantry_topology::LinkClass;

#[path = "common/gangs.rs"]
mod common;
use common::gang;

fn main() {
    divan::main();
}

/// A thousand members on 5,000 nodes, 40,000 GPUs, by GPUs of a member.
#[divan::bench(args = [1, 2, 4, 8])]
fn thousand_members_on_5000_nodes(bencher: Bencher<'_, '_>, gpus: u32) {
    let cluster = Cluster::new(5_000);
    let wanted = gang(1_000, gpus, None);
    bencher.bench(|| cluster.plan(divan::black_box(&wanted)));
}

/// The same with preferences of the pods: NVLink, and the cheapest nodes that have it.
#[divan::bench(args = [2, 4, 8])]
fn thousand_members_with_preferences_on_5000_nodes(bencher: Bencher<'_, '_>, gpus: u32) {
    let mut cluster = Cluster::new(5_000);
    cluster.prefer(&PlacementRequest {
        preferred: SetTerms { link: Some(LinkClass::NvLink), ..SetTerms::default() },
        economy: true,
        ..PlacementRequest::default()
    });
    let wanted = gang(1_000, gpus, None);
    bencher.bench(|| cluster.plan(divan::black_box(&wanted)));
}

/// A leader of one GPU and workers of eight, of which 500 are needed: all fit, and some three thousand do.
#[divan::bench(args = [999, 4_000], sample_count = 10)]
fn leader_and_workers_on_5000_nodes(bencher: Bencher<'_, '_>, workers: u32) {
    let cluster = Cluster::new(5_000);
    let mut wanted = gang(1 + workers, 8, None);
    wanted.members[0].shape = ShapeId(0);
    wanted.must = 500;
    let placed = cluster.plan(&wanted);
    assert!(placed >= 1_000, "{placed} are placed");
    bencher.bench(|| cluster.plan(divan::black_box(&wanted)));
}

/// A thousand members where they do not fit, so that the refusal is worked out.
#[divan::bench]
fn refusal_on_5000_nodes(bencher: Bencher<'_, '_>) {
    let cluster = Cluster::new(5_000);
    let wanted = gang(1_000, 8, Some("rack"));
    bencher.bench(|| cluster.plan(divan::black_box(&wanted)));
}

/// Whose end makes room for a gang of 64 nodes, where pods of lower priority are on all of 5,000: so many on each, that have all of its
/// GPUs between them, or none and nearly all of its CPU.
#[divan::bench(args = [(1, true), (8, true), (20, false)], sample_count = 10)]
fn preemption_on_5000_nodes(bencher: Bencher<'_, '_>, (pods, gpus): (u32, bool)) {
    let mut cluster = Cluster::new(5_000);
    let candidates = cluster.occupy(pods, gpus);
    let mut wanted = gang(64, 8, None);
    wanted.priority = 10;
    assert!(cluster.preempt(&wanted, &candidates) >= 64, "somebody goes on every node");
    bencher.bench(|| cluster.preempt(divan::black_box(&wanted), &candidates));
}

/// Gangs a second at 640 nodes, by members of eight GPUs.
#[divan::bench(args = [1, 8, 64])]
fn gangs_on_640_nodes(bencher: Bencher<'_, '_>, members: u32) {
    let cluster = Cluster::new(640);
    let wanted = gang(members, 8, None);
    bencher.counter(ItemsCount::new(1u32)).bench(|| cluster.plan(divan::black_box(&wanted)));
}

/// Racks of 16 nodes of eight GPUs, 20 racks to a block. Two nodes in five are in use, in all ways.
struct Cluster {
    snapshot: Snapshot,
    rooms: Vec<NodeResources>,
    fabric: Fabric,
    shapes: Vec<Shape>,
    ids: Vec<Vec<Option<DeviceId>>>,
}

impl Cluster {
    fn new(nodes: usize) -> Self {
        let kind = Kinds::default().of(&switched());
        let mut snapshot = Snapshot { synced: true, ..Snapshot::default() };
        let mut cluster = Self {
            snapshot: Snapshot::default(),
            rooms: Vec::new(),
            fabric: Fabric::default(),
            shapes: [1, 2, 4, 8].into_iter().map(shape).collect(),
            ids: Vec::new(),
        };
        let mut classes: Vec<Arc<NodeState>> = Vec::new();
        for number in 0..nodes {
            let taken = if number % 5 < 2 { ((number * 2_654_435_761) >> 7) & 0xff } else { 0 };
            let free: DeviceSet = (0..8).filter(|gpu| taken >> gpu & 1 == 0).collect();
            let state = NodeState::Ours(Class {
                kind: Arc::clone(&kind),
                pools: vec![Pool {
                    resource: names::GPU_RESOURCE.into(),
                    shape: gantry_planner::shape::Shape::Whole,
                    max_request: None,
                    devices: 8,
                    free: free.clone(),
                    open: free,
                    unhealthy: 0,
                    faults: Vec::new(),
                    leaving: 0,
                    reserved: 0,
                    unserved: 0,
                    advertised: Some(8),
                    alignment: None,
                }],
                withheld: None,
                models: Arc::default(),
                cost: 0,
                scores: ScoreCache::default(),
            });
            let known = classes.iter().position(|known| **known == state);
            let class = known.unwrap_or_else(|| {
                classes.push(Arc::new(state));
                classes.len() - 1
            });
            snapshot.nodes.push(ClassIx(u32::try_from(class).unwrap_or(u32::MAX)));
            let name = NodeName::from(format!("gpu-worker-{number:05}.cluster-a.example.internal"));
            Arc::make_mut(&mut snapshot.names).number(&name);
            let allocatable = Resources {
                milli_cpu: 192_000,
                memory: 2 << 40,
                ephemeral: 1 << 40,
                pods: 110,
                ..Resources::default()
            };
            let labels = [
                ("kubernetes.io/hostname", name.as_str().to_owned()),
                ("example.com/rack", format!("rack-{:04}", number / 16)),
                ("example.com/block", format!("block-{:03}", number / 320)),
            ];
            cluster.rooms.push(NodeResources {
                facts: Some(Arc::new(NodeFacts {
                    name: name.as_str().into(),
                    labels: labels.map(|(label, value)| (label.into(), value.into())).into(),
                    allocatable: allocatable.clone(),
                    ..NodeFacts::default()
                })),
                left: allocatable,
            });
            let id = |gpu: usize| Some(format!("GPU-{number:05}-{gpu}").as_str().into());
            cluster.ids.push((0..8).map(id).collect());
        }
        snapshot.classes = Arc::new(classes);
        cluster.snapshot = snapshot;
        let levels = ["block", "rack"]
            .map(|level| Level { name: level.into(), label: format!("example.com/{level}").into() });
        let facts = cluster.rooms.iter().map(|room| room.facts.as_deref());
        cluster.fabric = Fabric::build(Levels(levels.into()), facts);
        cluster
    }

    /// Has the pods of all shapes ask for this.
    fn prefer(&mut self, placement: &PlacementRequest) {
        for shape in &mut self.shapes {
            Arc::make_mut(&mut shape.request).placement = Arc::new(placement.clone());
        }
    }

    /// Puts so many pods of the lowest priority on every node that no gang fits, and names them.
    fn occupy(&mut self, pods: u32, gpus: bool) -> Vec<VictimCandidate> {
        let mut candidates = Vec::new();
        let mut full: Vec<NodeState> = Vec::new();
        let share =
            Resources { milli_cpu: if gpus { 1_000 } else { 9_000 }, pods: 1, ..Resources::default() };
        for (node, (room, ids)) in (0u32..).zip(self.rooms.iter_mut().zip(&self.ids)) {
            let each = ids.len() / pods as usize;
            for number in 0..pods {
                room.left.sub(&share);
                let held = ids.iter().flatten().skip(number as usize * each).take(each);
                let held: Vec<DeviceId> = held.cloned().collect();
                candidates.push(VictimCandidate {
                    pods: vec![CandidatePod {
                        uid: format!("{node}-{number}").as_str().into(),
                        node: NodeIx(node),
                        devices: match gpus {
                            true => vec![(names::GPU_RESOURCE.into(), held)],
                            false => Vec::new(),
                        },
                        numa: Vec::new(),
                        resources: share.clone(),
                        role: 0,
                    }],
                    since: i64::from(node * pods + number),
                    ..VictimCandidate::default()
                });
            }
        }
        for state in self.snapshot.classes.iter() {
            let mut state = NodeState::clone(state);
            if let NodeState::Ours(class) = &mut state {
                let free: DeviceSet = if gpus { DeviceSet::EMPTY } else { (0..8).collect() };
                class.pools[0].free = free.clone();
                class.pools[0].open = free;
            }
            full.push(state);
        }
        self.snapshot.classes = Arc::new(full.into_iter().map(Arc::new).collect());
        candidates
    }

    /// The number of pods that would have to go.
    fn preempt(&self, wanted: &PlanRequest, candidates: &[VictimCandidate]) -> usize {
        let placement = self.on_terrain(|input| preempt(input, wanted, candidates));
        placement.map_or(0, |placement| placement.victims.len())
    }

    /// The number of members placed.
    fn plan(&self, wanted: &PlanRequest) -> usize {
        self.on_terrain(|input| plan(input, wanted)).map_or(0, |placement| placement.places.len())
    }

    fn on_terrain<T>(&self, then: impl FnOnce(&PlanInput<'_>) -> T) -> T {
        let exact = |node: NodeIx| match self.snapshot.node_state(node) {
            NodeState::Ours(class) => {
                Some(ExactNode { class: class.clone(), ids: vec![self.ids.get(node.0 as usize)?.as_slice()] })
            }
            NodeState::Foreign { .. } | NodeState::Gone => None,
        };
        then(&PlanInput {
            snapshot: &self.snapshot,
            rooms: &self.rooms,
            fabric: &self.fabric,
            shapes: &self.shapes,
            barred: &|_, _| PlacementRules::default(),
            gone: &[],
            exact: &exact,
            effort: &Cell::new(EFFORT),
        })
    }
}

fn shape(gpus: u32) -> Shape {
    Shape {
        request: request(gpus),
        needs: Arc::new(Needs {
            resources: Resources {
                milli_cpu: i64::from(gpus) * 8_000,
                memory: i64::from(gpus) << 36,
                pods: 1,
                ..Resources::default()
            },
            ..Needs::default()
        }),
    }
}
