//! Random sequences of everything that can happen: what must always hold, holds; what is possible comes to be; nothing leaks; two runs say
//! the same.

use proptest::prelude::*;

use super::cluster::{Cluster, End, Op, Write};
use crate::terms::Repair;

fn op() -> impl Strategy<Value = Op> {
    let pod = 0..16_usize;
    prop_oneof![
        8 => (0..3_usize, prop::bool::weighted(0.2), prop::bool::weighted(0.9))
            .prop_map(|(gang, gated, gpus)| Op::Create { gang, gated, gpus }),
        1 => pod.clone().prop_map(Op::Delete),
        1 => pod.clone().prop_map(Op::Remove),
        1 => pod.clone().prop_map(Op::Fail),
        1 => pod.clone().prop_map(Op::Succeed),
        6 => (prop::bool::weighted(0.9), prop::bool::weighted(0.3))
            .prop_map(|(room, preempt)| Op::Plan { room, preempt }),
        12 => (pod.clone(), prop_oneof![4 => Just(0xff_u8), 1 => any::<u8>()])
            .prop_map(|(pod, offered)| Op::Filter { pod, offered }),
        14 => pod.clone().prop_map(Op::Bind),
        1 => pod.clone().prop_map(Op::Withdraw),
        2 => pod.clone().prop_map(Op::GiveUp),
        5 => prop_oneof![6 => Just(Write::Done), 1 => Just(Write::Conflict), 1 => Just(Write::Refused),
            1 => Just(Write::Unknown)]
            .prop_map(Op::Commit),
        1 => (0..4_usize).prop_map(Op::Land),
        2 => (0..3_usize).prop_map(Op::Read),
        2 => Just(Op::Statuses),
        8 => (
            pod,
            prop_oneof![
                6 => Just(End::Bound),
                1 => Just(End::Failed),
                1 => Just(End::UnsureBound),
                1 => Just(End::UnsureNot)
            ]
        )
            .prop_map(|(pod, end)| Op::EndBind { pod, end }),
        2 => prop_oneof![4 => 1..5_u64, 1 => 30..200_u64].prop_map(Op::Pass),
        1 => (0..6_usize).prop_map(Op::Unfit),
        1 => (0..3_usize).prop_map(Op::ReleaseExtras),
        1 => (0..3_usize).prop_map(Op::DropObject),
        1 => any::<bool>().prop_map(|landed| Op::Restart { landed }),
        2 => (0..4_usize).prop_map(Op::Lend),
        1 => (0..4_usize).prop_map(Op::Return),
    ]
}

fn repair() -> impl Strategy<Value = Repair> {
    prop::sample::select(vec![Repair::Hold, Repair::Restart, Repair::Ignore])
}

fn cases() -> ProptestConfig {
    ProptestConfig {
        cases: std::env::var("PROPTEST_CASES").map_or(300, |cases| cases.parse().unwrap()),
        max_shrink_iters: 20_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn whatever_happens_the_invariants_hold(
        ops in prop::collection::vec(op(), 1..160),
        repairs in [repair(), repair(), repair()],
        spares in [0..3_u32, 0..3_u32, 0..1_u32],
        mins in [1..5_u32, 1..5_u32, 1..5_u32],
        ranked in any::<[bool; 3]>(),
        // Room for one of the three gangs, for two of them, or for all.
        max_gangs in prop::sample::select(vec![2_usize, 4, 10]),
    ) {
        // Spare slots for replacements, where none is replaced, are a contradiction.
        let spares = [0, 1, 2].map(|gang| if repairs[gang] == Repair::Ignore { 0 } else { spares[gang] });
        let mut cluster = Cluster::new(repairs, spares, mins, ranked, max_gangs);
        let mut twin = Cluster::new(repairs, spares, mins, ranked, max_gangs);
        for op in &ops {
            cluster.step(op);
            twin.step(op);
        }
        cluster.compare(&mut twin);
        cluster.settle();
        cluster.check_settled();
        cluster.clear();
    }
}
