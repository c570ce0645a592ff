//! Gangs and the index around them, by size of the cluster. Plans alone: `gantry-planner`, bench `plans`.
//! `cargo bench -p gantry-extender --bench gangs`

#![allow(missing_docs, reason = "benchmarks")]

use std::sync::Arc;

use divan::Bencher;
use divan::counter::ItemsCount;
use gantry_api::names;
use gantry_extender::answers;
use gantry_extender::index::{Disruptions, Index};
use gantry_gang::membership::{GangOptions, Size};
use gantry_gang::protocol::{
    BindEnd, GangEvent, Gangs, Member, Moment, Object, Placement, Refusal, Reservation, Settings, ShapeId,
    Stage, Work,
};
use gantry_gang::{GangKey, Integration, Membership};

#[path = "common/live.rs"]
mod live;
use live::{Live, bound, facts, member, pod};

fn main() {
    divan::main();
}

/// Room has grown, and gangs that wait are asked for one after the other, of which none fits: one of so many.
#[divan::bench(args = [100, 1_000, 10_000])]
fn next_of_waiting_gangs(bencher: Bencher<'_, '_>, waiting: u32) {
    let now = Moment { at: std::time::Instant::now(), unix: 1_000 };
    let mut gangs = Gangs::new(Settings { max_gangs: 20_000, ..Settings::default() });
    gangs.handle(now, GangEvent::Synced);
    for number in 0..waiting {
        for member in 0..2 {
            gangs.handle(now, GangEvent::MemberSeen(waiting_member(number, member)));
        }
    }
    let refused = Refusal::DoesNotFit(Box::default());
    let mut room = 0;
    bencher.counter(ItemsCount::new(waiting)).bench_local(|| {
        room += 1;
        while let Some(wanted) = gangs.next(now, room) {
            gangs.handle(now, GangEvent::Planned { gang: &wanted.gang, result: Err(refused.clone()) });
        }
    });
}

/// Something happens to a member of a bound gang of which one is needed, while so many more are on their way.
#[divan::bench(args = [100, 1_000, 5_000])]
fn member_of_an_elastic_gang(bencher: Bencher<'_, '_>, extras: u32) {
    let (mut gangs, now) = decided(1 + extras, 1);
    bencher.bench_local(|| {
        gangs.handle(now, GangEvent::Arrive { pod: &"train-00000-1".into(), node: &"n1".into() })
    });
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
    bencher.with_inputs(object).bench_local_values(|object| {
        gangs.handle(
            now,
            GangEvent::ObjectSeen { namespace: &key.namespace, name: &name, object: Box::new(object) },
        )
    });
}

/// Room has grown, and as many gangs wait as are asked for, for GPUs of one node which others have; a gang of a thousand members has places
/// that it could give back.
#[divan::bench(args = [100, 1_000], sample_count = 10)]
fn gangs_that_wait_beside_extras(bencher: Bencher<'_, '_>, waiting: u32) {
    let mut live = Live::new(126);
    live.show([bound(pod("other", 8), 125)].into_iter());
    live.show((0..1_000).map(|number| member("elastic", number, 1, 1)));
    std::thread::sleep(std::time::Duration::from_millis(1_100));
    live.store.update(|index| index.tick(std::time::Instant::now(), std::time::Instant::now()));
    live.plan();
    live.show((0..waiting).map(|number| {
        let mut pod = member(&format!("waits-{number}"), 0, 1, 1);
        pod["spec"]["nodeSelector"] = serde_json::json!({"kubernetes.io/hostname": "n125"});
        pod
    }));
    std::thread::sleep(std::time::Duration::from_millis(1_100));
    live.store.update(|index| index.tick(std::time::Instant::now(), std::time::Instant::now()));
    live.plan();
    let mut label = 0;
    bencher.counter(ItemsCount::new(waiting)).bench_local(|| {
        label += 1;
        live.store.update(|index| index.node_described(facts(0, label).into()));
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
        let budget = Disruptions { namespace: "web".into(), name: "front".into(), selector: None, allowed };
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
        live.store.update(|index| index.node_applied(&"n0".into(), vec![(names::GPU_RESOURCE.into(), gpus)]));
    });
}

/// Why a pod waits: every node of so many, each full of eight pods, with those that would have to end.
#[divan::bench(args = [500, 5_000], sample_count = 10)]
fn explanation_of_a_pod(bencher: Bencher<'_, '_>, nodes: u32) {
    let mut live = Live::new(nodes);
    live.show((0..nodes * 8).map(|number| bound(pod(&format!("other-{number}"), 1), number / 8)));
    live.show([pod("waits", 4)].into_iter());
    bencher.bench_local(|| answers::pod(&live.store, &[names::GPU_RESOURCE], "ml", "waits"));
}

/// Why a gang of 64 nodes waits at so many nodes, each full of eight pods, with those that would have to end.
#[divan::bench(args = [500, 5_000], sample_count = 10)]
fn explanation_of_a_gang(bencher: Bencher<'_, '_>, nodes: u32) {
    let mut live = Live::new(nodes);
    live.show((0..nodes * 8).map(|number| bound(pod(&format!("other-{number}"), 1), number / 8)));
    live.show((0..64).map(|number| member("waits", number, 64, 8)));
    let queue = live.store.read(Index::gangs_in_line);
    bencher.bench_local(|| answers::gang(&live.store, &queue, "ml", "waits"));
}

/// A decided gang of which those have come and are bound that are needed, and the others are on their way.
fn decided(members: u32, min: u32) -> (Gangs, Moment) {
    let begin = std::time::Instant::now();
    let now = |seconds: u32| Moment {
        at: begin + std::time::Duration::from_secs(seconds.into()),
        unix: 1_000 + i64::from(seconds),
    };
    let mut gangs = Gangs::new(Settings::default());
    gangs.handle(now(0), GangEvent::Synced);
    for number in 0..members {
        let mut member = waiting_member(0, number);
        let membership = Arc::make_mut(&mut member.membership);
        membership.size = Size::Stated { min, total: None };
        gangs.handle(now(0), GangEvent::MemberSeen(member));
    }
    gangs.handle(now(5), GangEvent::Tick);
    let Some(wanted) = gangs.next(now(5), 1) else {
        unreachable!("it wants a plan");
    };
    let places = (0..members).map(|number| Reservation {
        shape: ShapeId(0),
        node: format!("n{number}").as_str().into(),
        devices: vec![(names::GPU_RESOURCE.into(), vec!["GPU-0".into()])],
        rank: Some(number),
        role: "".into(),
        ordinal: Some(number),
        follows: false,
    });
    let placement = Placement { places: places.collect(), ..Placement::default() };
    gangs.handle(now(5), GangEvent::Planned { gang: &wanted.gang, result: Ok(placement) });
    for _ in 0..2 {
        let mut work = Vec::new();
        for number in 0..min {
            let uid = format!("train-00000-{number}").as_str().into();
            let event = GangEvent::Arrive { pod: &uid, node: &format!("n{number}").as_str().into() };
            work.extend(gangs.handle(now(5), event).work);
        }
        for work in work {
            if let Work::Commit { gang, decision } = work {
                gangs.handle(
                    now(5),
                    GangEvent::Committed { gang: &gang, decision: &decision.id, result: Ok(()) },
                );
            }
        }
    }
    for number in 0..min {
        let uid = format!("train-00000-{number}").as_str().into();
        gangs.handle(now(5), GangEvent::BindEnded { pod: &uid, outcome: BindEnd::Bound });
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
        integration: Integration::Annotation,
        incarnation: "".into(),
    };
    let name = format!("train-{gang:05}-{number}");
    Member {
        uid: name.as_str().into(),
        name: name.as_str().into(),
        membership: Arc::new(Membership {
            key,
            size: Size::Stated { min: 2, total: None },
            size_source: "the benchmark",
            owner: None,
            rank: Some(number),
            role: "".into(),
            options: GangOptions::default(),
            creator: None,
            revision: None,
            also: Vec::new(),
            maker: None,
            made_by: None,
            tree: Vec::new(),
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
        rejected: None,
        elsewhere: None,
        preempts: true,
    }
}
