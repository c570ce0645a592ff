//! The complete table of messages, for review: what users read of a gang and its pods in each state.

use std::fmt::Write as _;
use std::sync::Arc;

use gantry_api::MAX_MESSAGE;

use super::world::{key, pod_group};
use crate::needs::Misfit;
use crate::protocol::reasons::{
    Cause, DeviceShortage, Failure, Holder, IdleReservations, LargestNode, MemberGroup, MemberRule,
    MissingReservations, NoRepair, Obstacle, Obstacles, RailShortage, ReasonScope, Refusal, Shortage,
    SkewFailure, SkewLimit, UncountedMembers, Validity, WaitReason, WithheldNodes, WithheldReason,
    restart_note,
};
use crate::resources::InsufficientResource;
use crate::terms::Fault;

fn text(text: &str) -> Arc<str> {
    text.into()
}

fn fault(words: &str) -> Fault {
    Fault { place: text("annotation gantry.dev/gang-min"), words: text(words) }
}

fn group(count: u32, gpus: u32) -> MemberGroup {
    MemberGroup { count, requests: vec![(text("GPUs"), gpus)] }
}

fn devices(free: usize, healthy: usize, total: usize, requested: u64) -> Option<DeviceShortage> {
    Some(DeviceShortage { unit: text("GPUs"), free, reserved: 0, healthy, total, requested })
}

/// 4 members of 3 GPUs, of which 2 fit.
fn shortage() -> Shortage {
    Shortage {
        members: vec![group(4, 3)],
        must: 4,
        fits: 2,
        empty: 4,
        devices: devices(10, 16, 16, 12),
        ..Shortage::default()
    }
}

fn obstacles(nodes: Option<usize>, found: &[(Obstacle, usize)]) -> Option<Obstacles> {
    Some(Obstacles { unit: text("GPUs"), nodes, found: found.to_vec() })
}

fn skew(fails: SkewFailure) -> Option<SkewLimit> {
    Some(SkewLimit { key: text("zone"), fails })
}

fn largest(devices: usize, healthy: usize) -> Shortage {
    let largest = Some(LargestNode { unit: text("GPUs"), requested: 9, devices, healthy });
    Shortage { hopeless: true, fits: 0, empty: 0, largest, ..shortage() }
}

fn withheld(cause: WithheldReason) -> Shortage {
    Shortage { withheld: Some(WithheldNodes { cause, nodes: 2 }), ..shortage() }
}

fn reserved(holders: &[(&str, usize, Option<i64>)]) -> Shortage {
    let holder = |(gang, devices, until): &(&str, usize, Option<i64>)| Holder {
        gang: text(gang),
        devices: *devices,
        until: *until,
    };
    let mut shortage = shortage();
    shortage.devices.as_mut().unwrap().reserved = 6;
    Shortage {
        reserved: Some(IdleReservations { holders: holders.iter().map(holder).collect() }),
        ..shortage
    }
}

fn shortages() -> Vec<Shortage> {
    let rack = || ReasonScope::OneOf(text("rack"));
    let cpu = || Obstacle::Resource(InsufficientResource::Cpu);
    vec![
        shortage(),
        Shortage { within: rack(), best: text("r7"), ..shortage() },
        Shortage { within: ReasonScope::SlicesOf { size: 2, level: text("rack") }, ..shortage() },
        Shortage { members: vec![group(1, 8)], must: 1, fits: 0, devices: devices(1, 8, 8, 8), ..shortage() },
        Shortage { must: 2, fits: 1, devices: devices(5, 16, 16, 6), ..shortage() },
        Shortage { must: 0, fits: 0, devices: devices(2, 16, 16, 3), ..shortage() },
        Shortage { devices: devices(14, 14, 16, 12), ..shortage() },
        Shortage { devices: devices(8, 10, 16, 12), ..shortage() },
        Shortage { members: vec![group(1, 8), group(16, 1)], must: 17, ..shortage() },
        Shortage {
            members: vec![MemberGroup { count: 2, requests: vec![(text("GPUs"), 8), (text("rdma/hca"), 1)] }],
            must: 2,
            fits: 1,
            ..shortage()
        },
        Shortage {
            obstacles: obstacles(None, &[(cpu(), 0), (Misfit::Unschedulable.into(), 0)]),
            devices: devices(16, 16, 16, 12),
            ..shortage()
        },
        Shortage { skew: skew(SkewFailure::MaxSkew(1)), ..shortage() },
        Shortage {
            skew: skew(SkewFailure::MinDomains { wanted: 4, exist: 3 }),
            hopeless: true,
            ..shortage()
        },
        Shortage { rule: Some(MemberRule::Together(text("zone"))), hopeless: true, empty: 2, ..shortage() },
        Shortage { rule: Some(MemberRule::Apart), ..shortage() },
        Shortage { skew: skew(SkewFailure::NoDomain), hopeless: true, empty: 0, ..shortage() },
        Shortage { part: Some(text("big")), members: vec![group(1, 9)], must: 1, ..largest(8, 7) },
        Shortage { part: Some(text("")), members: vec![group(2, 9)], must: 2, ..largest(16, 8) },
        Shortage { part: Some(text("big")), members: vec![group(2, 8)], must: 2, fits: 1, ..shortage() },
        withheld(WithheldReason::ByPlugin(text("NotRegistered"))),
        withheld(WithheldReason::ByMark(text("the driver is upgraded (label a/b)"))),
        reserved(&[]),
        reserved(&[("ml/first", 6, Some(1_800_000_000))]),
        reserved(&[("ml/first", 6, None), ("ml/second", 2, None), ("ml/third", 1, None)]),
        Shortage { hopeless: true, empty: 3, within: rack(), ..shortage() },
        Shortage { hopeless: true, empty: 0, obstacles: obstacles(Some(4), &[(cpu(), 4)]), ..shortage() },
        Shortage {
            hopeless: true,
            empty: 0,
            obstacles: obstacles(
                Some(9),
                &[
                    (Misfit::Taint { key: text("dedicated"), value: text("") }.into(), 5),
                    (Obstacle::OtherPods, 3),
                    (Obstacle::PlacementTerms, 2),
                    (Obstacle::TopologyManager, 2),
                    (Misfit::Volume.into(), 1),
                ],
            ),
            ..shortage()
        },
        Shortage {
            hopeless: true,
            obstacles: obstacles(Some(1), &[(Misfit::Affinity.into(), 1)]),
            ..shortage()
        },
    ]
}

fn refusals() -> Vec<Refusal> {
    let gang = Arc::new(key("before"));
    let mut all = vec![
        Refusal::TooFewMembers { must: 2, exist: 1 },
        Refusal::UnknownRequest,
        Refusal::UnknownLevel { level: text("row"), known: vec![text("zone"), text("rack")] },
        Refusal::UnknownLevel { level: text("row"), known: Vec::new() },
        Refusal::NodesReserved { gang: gang.clone() },
        Refusal::RailsTaken(Box::new(RailShortage {
            members: vec![group(4, 4)],
            best: Some((text("NICs 0-3"), 2)),
        })),
        Refusal::RailsTaken(Box::new(RailShortage { members: vec![group(4, 4)], best: None })),
        Refusal::PodsTerminating,
        Refusal::Overtaken { device: "GPU-1".into(), node: "n1".into(), by: Some(gang) },
        Refusal::PlanTooSmall,
        Refusal::PlanEvicts,
        Refusal::DecisionTooLarge { members: 3000, each: 500, most: 2800 },
    ];
    all.extend(shortages().into_iter().map(|shortage| Refusal::DoesNotFit(Box::new(shortage))));
    all
}

fn failures() -> Vec<Failure> {
    let report = Some(text("node(s) didn't match pod topology spread constraints"));
    vec![
        Failure::NodesNotOffered(None),
        Failure::NodesNotOffered(report.clone()),
        Failure::NotArrived { arrived: 3, min: 4, scheduler: None },
        Failure::NotArrived { arrived: 0, min: 1, scheduler: report },
        Failure::VictimsStayed(vec![text("pod v1: it cannot be evicted yet: budget web")]),
        Failure::EvictedInVain,
        Failure::DecisionRejected(text("gangs is forbidden")),
        Failure::LateSurplus,
    ]
}

fn causes() -> Vec<Cause> {
    let refused = || MissingReservations::Refused(Refusal::DoesNotFit(Box::new(shortage())));
    let uncounted = UncountedMembers {
        gated: Some((text("example.com/quota"), 1)),
        rejected: Some((text("a-1"), text("persistentvolumeclaim \"data\" not found"), 2)),
        invalid: 2,
        elsewhere: vec![(text("volcano"), 3)],
    };
    let none = UncountedMembers::default;
    let source = || text("annotation gantry.dev/gang-min of its pods");
    let budget = || vec![text("pod v1: it cannot be evicted yet: budget web")];
    let gang = || Arc::new(key("other"));
    let lost = |kept, restarts, gave_to, rest| Cause::MembersLost {
        missing: 1,
        min: 4,
        bound: 3,
        completed: 0,
        kept,
        restarts,
        gave_to,
        rest,
    };
    let more = |total| Cause::WaitingForMoreMembers { exist: 3, total, min: 2, uncounted: none() };
    let members = |unread, uncounted| Cause::WaitingForMembers {
        exist: 1,
        min: 2,
        source: source(),
        unread,
        uncounted,
    };
    let mut all = vec![
        Cause::New,
        Cause::NotAGang { source: source() },
        Cause::UnknownSize { why: text("PodGroup a was not read yet"), exist: 1, uncounted: none() },
        members(None, none()),
        members(Some(pod_group()), uncounted.clone()),
        more(Some(4)),
        more(None),
        Cause::MembersWithheld { exist: 4, min: 4, uncounted: uncounted.clone() },
        Cause::MembersWithheld {
            exist: 4,
            min: 4,
            uncounted: UncountedMembers { rejected: None, ..uncounted },
        },
        Cause::WaitingForRole { role: text("ps"), exist: 0, min: 1, source: source(), uncounted: none() },
        Cause::Invalid(vec![fault("`x` is no whole number from 1 to 20000")]),
        Cause::Invalid(vec![fault("`x` is no whole number from 1 to 20000"), fault("a"), fault("b")]),
        Cause::GatesStay(text("pods is forbidden")),
        Cause::WaitingForTurn,
        Cause::WaitingForVictims { blocked: Vec::new() },
        Cause::WaitingForVictims { blocked: budget() },
        Cause::VictimsTerminating,
        Cause::WaitingForArrival { arrived: 1, min: 4, domain: text("rack r7") },
        Cause::WritingDecision,
        Cause::DecisionRejected(text("gangs is forbidden")),
        Cause::Binding { bound: 1, min: 4, rest: MissingReservations::None },
        Cause::Binding { bound: 1, min: 4, rest: refused() },
        Cause::Bound { bound: 3, min: 4, completed: 1 },
        Cause::WaitingForSurplus { bound: 4, waiting: 2, rest: MissingReservations::Turn },
        Cause::WaitingForSurplus { bound: 4, waiting: 2, rest: refused() },
        Cause::WaitingForSurplus {
            bound: 4,
            waiting: 2,
            rest: MissingReservations::Invalid(vec![fault("is 0")]),
        },
        lost(1, false, None, MissingReservations::None),
        lost(2, false, None, MissingReservations::None),
        lost(1, true, None, MissingReservations::None),
        lost(0, false, Some(text("gang ns/b")), MissingReservations::Backoff(Failure::NodesNotOffered(None))),
        lost(0, false, None, refused()),
        Cause::Restarting { old: 2, to: None, blocked: budget() },
        Cause::Restarting { old: 2, to: Some(gang()), blocked: Vec::new() },
        Cause::Finished { completed: 0 },
        Cause::Finished { completed: 4 },
    ];
    for why in [NoRepair::OwnerFinished(pod_group()), NoRepair::OwnerSuspended(pod_group()), NoRepair::Policy]
    {
        all.push(Cause::BelowMinimum { settled: 1, min: 2, why });
    }
    all.extend(refusals().into_iter().map(Cause::Refused));
    all.extend(failures().into_iter().map(Cause::Backoff));
    all
}

#[test]
fn every_cause_has_a_reason_and_a_bounded_message() {
    let mut table = String::new();
    for cause in causes() {
        let (reason, message) = cause.of_gang();
        let pods = cause.of_pods(&key("a"), None);
        assert!(message.len() <= MAX_MESSAGE && pods.message.len() <= MAX_MESSAGE, "{message}");
        let stable = pods.message.split_once(": ").unwrap().1.split_once(": ").unwrap().1.to_owned();
        let detail = message.strip_prefix(&stable).unwrap_or(&message).to_owned();
        writeln!(table, "{reason}: {stable} | {}", detail.trim_start_matches("; ")).unwrap();
    }
    insta::assert_snapshot!(table);
}

#[test]
fn every_text_about_a_member_is_bounded() {
    let (gang, node) = (key("a"), "n1".into());
    let waits = [
        WaitReason::node_not_offered(&gang, &node),
        WaitReason::reserved_elsewhere(&gang, &node),
        WaitReason::bound_elsewhere(&gang, &node),
        WaitReason::terminating(&gang),
        WaitReason::invalid_member(&gang, &fault("`x` is no number")),
        Cause::New.of_pods(&gang, Some("Coscheduling names its pods too and is ignored")),
    ];
    let mut table = String::new();
    for why in waits {
        assert!(why.message.len() <= MAX_MESSAGE, "{}", why.message);
        writeln!(table, "{}", why.message).unwrap();
    }
    for validity in [
        Validity::Valid { source: text("spec.gangPolicy of PodGroup a") },
        Validity::Lowered(vec![fault("900 s is above the limit"), fault("rack is preferred")]),
        Validity::Invalid(vec![fault("is 0")]),
        Validity::Unknown(text("PodGroup a was not read yet")),
        Validity::MinimumChanged { from: 4, to: 2, by_object: true },
        Validity::RepairChanged { from: "hold", to: "restart" },
        Validity::InvalidMember(format!("pod a1: {}", fault("is 0"))),
    ] {
        let (reason, message) = validity.state();
        assert!(message.len() <= MAX_MESSAGE, "{message}");
        writeln!(table, "Valid, {reason}: {message}").unwrap();
    }
    writeln!(table, "{}\n{}", restart_note(&gang, None), restart_note(&gang, Some(&key("b")))).unwrap();
    insta::assert_snapshot!(table);
}
