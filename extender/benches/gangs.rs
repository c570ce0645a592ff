//! Planning whole gangs by size of the cluster. `cargo bench -p gantry-extender --bench gangs`

#![allow(missing_docs, reason = "benchmarks")]

use std::cell::Cell;
use std::sync::Arc;

use divan::Bencher;
use divan::counter::ItemsCount;
use gantry_api::{DeviceId, NodeName, names};
use gantry_extender::devices::DeviceSet;
use gantry_extender::gang::input::{Barred, EFFORT, Exact, PlanInput, Room, Shape};
use gantry_extender::gang::plan::plan;
use gantry_extender::gang::preempt::{Occupant, OccupantPod, preempt};
use gantry_extender::index::Disruptions;
use gantry_extender::kind::Kinds;
use gantry_extender::request::{Ask, Request};
use gantry_extender::snapshot::{Class, ClassIx, NodeIx, Pool, Remembered, Snapshot, Standing};
use gantry_gang::claim::{Size, Wish};
use gantry_gang::protocol::{
    BindEnd, Gangs, Member, Now, Object, Place, Placement, Refused, Settings, ShapeId, Stage, Wanted, Work,
};
use gantry_gang::{Claim, Dialect, Fabric, GangKey, Level, Levels, Needs, NodeFacts, Resources};

#[path = "common/gangs.rs"]
mod common;
#[path = "common/live.rs"]
mod live;
#[path = "common/machines.rs"]
mod machines;
use common::gang;
use live::{Live, bound, facts, member, pod};
use machines::switched;

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
    let occupants = cluster.occupy(pods, gpus);
    let mut wanted = gang(64, 8, None);
    wanted.priority = 10;
    assert!(
        cluster.preempt(&wanted, &occupants) >= 64,
        "somebody goes on every node"
    );
    bencher.bench(|| cluster.preempt(divan::black_box(&wanted), &occupants));
}

/// Gangs a second at 640 nodes, by members of eight GPUs.
#[divan::bench(args = [1, 8, 64])]
fn gangs_on_640_nodes(bencher: Bencher<'_, '_>, members: u32) {
    let cluster = Cluster::new(640);
    let wanted = gang(members, 8, None);
    bencher
        .counter(ItemsCount::new(1u32))
        .bench(|| cluster.plan(divan::black_box(&wanted)));
}

/// Room has grown, and gangs that wait are asked for one after the other, of which none fits: one of so many.
#[divan::bench(args = [100, 1_000, 10_000])]
fn next_of_waiting_gangs(bencher: Bencher<'_, '_>, waiting: u32) {
    let now = Now {
        at: std::time::Instant::now(),
        unix: 1_000,
    };
    let mut gangs = Gangs::new(Settings {
        max_gangs: 20_000,
        ..Settings::default()
    });
    gangs.synced(now);
    for number in 0..waiting {
        for member in 0..2 {
            gangs.member_seen(now, waiting_member(number, member));
        }
    }
    let refused = Refused {
        reason: "no room".into(),
        message: "no room".into(),
        hopeless: false,
    };
    let mut room = 0;
    bencher.counter(ItemsCount::new(waiting)).bench_local(|| {
        room += 1;
        while let Some(wanted) = gangs.next(now, room) {
            gangs.placed(now, &wanted.gang, Err(refused.clone()));
        }
    });
}

/// Something happens to a member of a bound gang of which one is needed, while so many more are on their way.
#[divan::bench(args = [100, 1_000, 5_000])]
fn member_of_an_elastic_gang(bencher: Bencher<'_, '_>, extras: u32) {
    let (mut gangs, now) = decided(1 + extras, 1);
    bencher.bench_local(|| gangs.arrive(now, &"train-00000-1".into(), &"n1".into()));
}

/// The object of a bound gang of a thousand is shown, as it was written.
#[divan::bench]
fn object_of_a_thousand_members(bencher: Bencher<'_, '_>) {
    let (mut gangs, now) = decided(1_000, 1_000);
    let Some((key, status)) = gangs.take_statuses().pop() else {
        unreachable!("it is bound");
    };
    let object = || Object {
        uid: "object".into(),
        resource_version: "1".into(),
        ours: true,
        spec: Ok(gantry_api::GangSpec::default()),
        status: status.clone(),
    };
    let name = key.object_name();
    bencher
        .with_inputs(object)
        .bench_local_values(|object| gangs.object_seen(now, &key.namespace, &name, object));
}

/// Room has grown, and as many gangs wait as are asked for, for GPUs of one node which others have; a gang of a thousand members has places
/// that it could give back.
#[divan::bench(args = [100, 1_000], sample_count = 10)]
fn gangs_that_wait_beside_extras(bencher: Bencher<'_, '_>, waiting: u32) {
    let mut live = Live::new(126);
    live.show([bound(pod("other", 8), 125)].into_iter());
    live.show((0..1_000).map(|number| member("elastic", number, 1, 1)));
    std::thread::sleep(std::time::Duration::from_millis(1_100));
    live.store
        .update(|index| index.tick(std::time::Instant::now(), std::time::Instant::now()));
    live.plan();
    live.show((0..waiting).map(|number| {
        let mut pod = member(&format!("waits-{number}"), 0, 1, 1);
        pod["spec"]["nodeSelector"] = serde_json::json!({"kubernetes.io/hostname": "n125"});
        pod
    }));
    std::thread::sleep(std::time::Duration::from_millis(1_100));
    live.store
        .update(|index| index.tick(std::time::Instant::now(), std::time::Instant::now()));
    live.plan();
    let mut label = 0;
    bencher.counter(ItemsCount::new(waiting)).bench_local(|| {
        label += 1;
        live.store
            .update(|index| index.node_described(facts(0, label).into()));
        live.plan()
    });
}

/// A disruption budget of somebody allows one pod more, then one less, while so many gangs wait.
#[divan::bench(args = [100, 1_000], sample_count = 10)]
fn budget_that_changes_while_gangs_wait(bencher: Bencher<'_, '_>, waiting: u32) {
    let mut live = Live::new(100);
    live.show((0..100).map(|node| bound(pod(&format!("other-{node}"), 8), node)));
    live.show((0..waiting).map(|number| member(&format!("waits-{number}"), 0, 1, 1)));
    live.plan();
    let mut allowed = 0;
    bencher.bench_local(|| {
        allowed = 1 - allowed;
        let budget = Disruptions {
            namespace: "web".into(),
            name: "front".into(),
            selector: None,
            allowed,
        };
        live.store.update(|index| index.budgets_seen(Some(vec![budget])));
        live.plan()
    });
}

/// A snapshot is published while kube-scheduler makes room for so many pods by themselves.
#[divan::bench(args = [0, 100, 1_000])]
fn publication_with_promised_room(bencher: Bencher<'_, '_>, promised: u32) {
    let mut live = Live::new(500);
    live.show((0..promised).map(|number| {
        let mut pod = pod(&format!("waits-{number}"), 1);
        pod["status"]["nominatedNodeName"] = format!("n{}", number % 500).into();
        pod
    }));
    let mut gpus = 7;
    bencher.bench_local(|| {
        gpus = 15 - gpus;
        live.store
            .update(|index| index.node_applied(&"n0".into(), vec![(names::GPU_RESOURCE.into(), gpus)]));
    });
}

/// A pod that fits nowhere asks for a node, while so many members of a bound gang of a thousand, of lower priority, are lost, and a place
/// is kept for each.
#[divan::bench(args = [1, 100, 999])]
fn pod_beside_places_of_lost_members(bencher: Bencher<'_, '_>, lost: u32) {
    let mut live = Live::new(1_000);
    live.show((0..1_000).map(|number| bound(member("low", number, 1_000, 8), number)));
    live.decide("low", 1_000);
    let mut wants = pod("wants", 8);
    wants["spec"]["priority"] = 10.into();
    live.show([wants].into_iter());
    // Their end is seen, so that nothing of theirs is in use any more.
    live.show((0..lost).map(|number| {
        let mut ended = bound(member("low", number, 1_000, 8), number);
        ended["status"]["phase"] = "Failed".into();
        ended
    }));
    let now = std::time::Instant::now();
    live.store.update(|index| {
        for number in 0..lost {
            index.pod_deleted(now, &format!("low-{number}").as_str().into(), None);
        }
        for second in 0..10 {
            let now = now + std::time::Duration::from_secs(second);
            index.tick(now, now);
        }
    });
    let request = Arc::clone(&shape(8).request);
    let find = || {
        live.store
            .read(|index| index.idle_node(&"wants".into(), 10, &request, &|_| true))
    };
    assert!(find().is_some(), "a place is idle");
    bencher.bench_local(find);
}

/// A decided gang of which those have come and are bound that are needed, and the others are on their way.
fn decided(members: u32, min: u32) -> (Gangs, Now) {
    let begin = std::time::Instant::now();
    let now = |seconds: u32| Now {
        at: begin + std::time::Duration::from_secs(seconds.into()),
        unix: 1_000 + i64::from(seconds),
    };
    let mut gangs = Gangs::new(Settings::default());
    gangs.synced(now(0));
    for number in 0..members {
        let mut member = waiting_member(0, number);
        let claim = Arc::make_mut(&mut member.claim);
        claim.size = Size::Stated { min, total: None };
        gangs.member_seen(now(0), member);
    }
    gangs.tick(now(5));
    let Some(wanted) = gangs.next(now(5), 1) else {
        unreachable!("it wants a plan");
    };
    let places = (0..members).map(|number| Place {
        shape: ShapeId(0),
        node: format!("n{number}").as_str().into(),
        devices: vec![(names::GPU_RESOURCE.into(), vec!["GPU-0".into()])],
        rank: Some(number),
        role: "".into(),
        ordinal: Some(number),
        follows: false,
    });
    let placement = Placement {
        places: places.collect(),
        ..Placement::default()
    };
    gangs.placed(now(5), &wanted.gang, Ok(placement));
    for _ in 0..2 {
        for number in 0..min {
            let uid = format!("train-00000-{number}").as_str().into();
            gangs.arrive(now(5), &uid, &format!("n{number}").as_str().into());
        }
        for work in gangs.take_work() {
            if let Work::Commit { gang, decision } = work {
                gangs.committed(now(5), &gang, &decision.id, Ok(()));
            }
        }
    }
    for number in 0..min {
        let uid = format!("train-00000-{number}").as_str().into();
        gangs.bind_ended(now(5), &uid, BindEnd::Bound);
    }
    let bound = gangs.view(&wanted.gang).map(|view| view.phase());
    assert_eq!(bound, Some(gantry_api::GangPhase::Bound));
    (gangs, now(5))
}

/// One of two members of a gang, of one of fifty namespaces.
fn waiting_member(gang: u32, number: u32) -> Member {
    let key = GangKey {
        namespace: format!("team-{:02}", gang % 50).into(),
        name: format!("train-{gang:05}").into(),
        dialect: Dialect::Annotation,
        incarnation: "".into(),
    };
    let name = format!("train-{gang:05}-{number}");
    Member {
        uid: name.as_str().into(),
        name: name.as_str().into(),
        claim: Arc::new(Claim {
            key,
            size: Size::Stated { min: 2, total: None },
            size_said: "the benchmark",
            owner: None,
            rank: Some(number),
            role: "".into(),
            wish: Wish::default(),
            also: Vec::new(),
            maker: None,
            made_by: None,
            faults: Vec::new(),
        }),
        shape: Some(ShapeId(0)),
        asks: [(names::GPU_RESOURCE.into(), 8)].into(),
        holds: Vec::new(),
        priority: 0,
        created: i64::from(gang),
        stage: Stage::Pending,
        leaving: false,
        preempted: false,
        refused: false,
        elsewhere: None,
        preempts: true,
    }
}

/// Racks of 16 nodes of eight GPUs, 20 racks to a block. Two nodes in five are in use, in all ways.
struct Cluster {
    snapshot: Snapshot,
    rooms: Vec<Room>,
    fabric: Fabric,
    shapes: Vec<Shape>,
    ids: Vec<Vec<Option<DeviceId>>>,
}

impl Cluster {
    fn new(nodes: usize) -> Self {
        let kind = Kinds::default().of(&switched());
        let mut snapshot = Snapshot {
            synced: true,
            ..Snapshot::default()
        };
        let mut cluster = Self {
            snapshot: Snapshot::default(),
            rooms: Vec::new(),
            fabric: Fabric::default(),
            shapes: [1, 2, 4, 8].into_iter().map(shape).collect(),
            ids: Vec::new(),
        };
        let mut classes: Vec<Arc<Standing>> = Vec::new();
        for number in 0..nodes {
            let taken = if number % 5 < 2 {
                ((number * 2_654_435_761) >> 7) & 0xff
            } else {
                0
            };
            let free: DeviceSet = (0..8).filter(|gpu| taken >> gpu & 1 == 0).collect();
            let standing = Standing::Ours(Class {
                kind: Arc::clone(&kind),
                pools: vec![Pool {
                    resource: names::GPU_RESOURCE.into(),
                    shape: gantry_extender::shape::Shape::Whole,
                    max_request: None,
                    devices: 8,
                    free: free.clone(),
                    open: free,
                    unhealthy: 0,
                    sick: Vec::new(),
                    leaving: 0,
                    advertised: Some(8),
                }],
                not_ready: None,
                scores: Remembered::default(),
            });
            let known = classes.iter().position(|known| **known == standing);
            let class = known.unwrap_or_else(|| {
                classes.push(Arc::new(standing));
                classes.len() - 1
            });
            snapshot
                .nodes
                .push(ClassIx(u32::try_from(class).unwrap_or(u32::MAX)));
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
            cluster.rooms.push(Room {
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
        let levels = ["block", "rack"].map(|level| Level {
            name: level.into(),
            label: format!("example.com/{level}").into(),
        });
        let facts = cluster.rooms.iter().map(|room| room.facts.as_deref());
        cluster.fabric = Fabric::build(Levels(levels.into()), facts);
        cluster
    }

    /// Puts so many pods of the lowest priority on every node that no gang fits, and names them.
    fn occupy(&mut self, pods: u32, gpus: bool) -> Vec<Occupant> {
        let mut occupants = Vec::new();
        let mut full: Vec<Standing> = Vec::new();
        let share = Resources {
            milli_cpu: if gpus { 1_000 } else { 9_000 },
            pods: 1,
            ..Resources::default()
        };
        for (node, (room, ids)) in (0u32..).zip(self.rooms.iter_mut().zip(&self.ids)) {
            let each = ids.len() / pods as usize;
            for number in 0..pods {
                room.left.sub(&share);
                let held = ids.iter().flatten().skip(number as usize * each).take(each);
                let held: Vec<DeviceId> = held.cloned().collect();
                occupants.push(Occupant {
                    pods: vec![OccupantPod {
                        uid: format!("{node}-{number}").as_str().into(),
                        node: NodeIx(node),
                        devices: match gpus {
                            true => vec![(names::GPU_RESOURCE.into(), held)],
                            false => Vec::new(),
                        },
                        resources: share.clone(),
                    }],
                    priority: 0,
                    since: i64::from(node * pods + number),
                    checkpointed: false,
                    budgets: Vec::new(),
                });
            }
        }
        for standing in self.snapshot.classes.iter() {
            let mut standing = Standing::clone(standing);
            if let Standing::Ours(class) = &mut standing {
                let free: DeviceSet = if gpus { DeviceSet::EMPTY } else { (0..8).collect() };
                class.pools[0].free = free.clone();
                class.pools[0].open = free;
            }
            full.push(standing);
        }
        self.snapshot.classes = Arc::new(full.into_iter().map(Arc::new).collect());
        occupants
    }

    /// The number of pods that would have to go.
    fn preempt(&self, wanted: &Wanted, occupants: &[Occupant]) -> usize {
        let placement = self.on_terrain(|input| preempt(input, wanted, occupants));
        placement.map_or(0, |placement| placement.victims.len())
    }

    /// The number of members placed.
    fn plan(&self, wanted: &Wanted) -> usize {
        self.on_terrain(|input| plan(input, wanted))
            .map_or(0, |placement| placement.places.len())
    }

    fn on_terrain<T>(&self, then: impl FnOnce(&PlanInput<'_>) -> T) -> T {
        let exact = |node: NodeIx| match self.snapshot.standing(node) {
            Standing::Ours(class) => Some(Exact {
                class: class.clone(),
                ids: vec![self.ids.get(node.0 as usize)?.as_slice()],
            }),
            Standing::Foreign { .. } | Standing::Gone => None,
        };
        then(&PlanInput {
            snapshot: &self.snapshot,
            rooms: &self.rooms,
            fabric: &self.fabric,
            shapes: &self.shapes,
            barred: &|_, _| Barred::default(),
            gone: &[],
            exact: &exact,
            effort: &Cell::new(EFFORT),
        })
    }
}

fn shape(gpus: u32) -> Shape {
    Shape {
        request: Arc::new(Request {
            asks: vec![Ask::single(names::GPU_RESOURCE.into(), gpus)],
            order: Vec::new(),
        }),
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
