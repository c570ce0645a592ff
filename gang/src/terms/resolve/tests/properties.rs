//! What holds whatever members and their owner say.

use proptest::prelude::*;

use super::super::*;
use super::{membership, of_owner, resolved};
use crate::membership::{JobRef, Membership, OwnerKind, Size};

fn any_wish() -> impl Strategy<Value = GangOptions> {
    let level = prop::option::of(prop::sample::select(vec!["rack", "zone", "example.com/rack", "x", ""]));
    let hint = prop::option::of(prop::sample::select(vec!["example.com/rack", "x"]));
    let number = || prop::option::of(0..5_u32);
    (level, hint, number(), number(), prop::option::of(any::<bool>())).prop_map(
        |(level, hint, slice, max, flag)| GangOptions {
            level: level.map(|name| TopologyRequest { level: name.into(), required: flag == Some(true) }),
            hint: hint.map(|label| TopologyHint { label: label.into(), slice }),
            slice,
            max,
            spares: slice,
            rails: flag.map(|flag| if flag { Rails::RequireSame } else { Rails::Any }),
            repair: flag.map(|flag| if flag { Repair::Restart } else { Repair::Ignore }),
            arrival: max.map(|seconds| ArrivalTime {
                time: Duration::from_secs(seconds.into()),
                source: "annotation",
            }),
            restart_hold: max.map(|seconds| Duration::from_secs(seconds.into())),
            checkpointed: flag,
        },
    )
}

fn any_claim() -> impl Strategy<Value = Membership> {
    let size = prop_oneof![
        (0..5_u32, prop::option::of(0..5_u32)).prop_map(|(min, total)| Size::Stated { min, total }),
        Just(Size::All),
        Just(Size::Undeclared),
    ];
    let owner = prop::option::of(prop::sample::select(vec![OwnerKind::Job, OwnerKind::JobSet]));
    let role = prop::sample::select(vec!["", "a", "b"]);
    let maker = prop::option::of(prop::sample::select(vec!["left", "right"]));
    let declared = (size, owner, role, any_wish(), any::<u32>(), maker);
    declared.prop_map(|(size, kind, role, options, rank, maker)| Membership {
        role: role.into(),
        rank: Some(rank),
        options,
        maker: maker.map(|name| JobRef { kind: "Job".into(), name: name.into(), uid: name.into() }),
        ..kind.map_or_else(|| membership(size), |kind| of_owner(kind, size))
    })
}

fn any_facts() -> impl Strategy<Value = OwnerFacts> {
    let number = || prop::option::of(0..6_u32);
    let by_role = prop::collection::btree_map(prop::sample::select(vec!["a", "b", "c"]), 1..4_u32, 0..3);
    (number(), number(), by_role, any::<bool>(), any_wish()).prop_map(
        |(min, total, by_role, apart, options)| OwnerFacts {
            min,
            total,
            by_role: by_role.into_iter().map(|(role, count)| (role.into(), count)).collect(),
            apart,
            options,
            ..OwnerFacts::default()
        },
    )
}

proptest! {
    #[test]
    fn terms_do_not_depend_on_order_count_or_ranks_of_members(
        memberships in prop::collection::vec(any_claim(), 0..6),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        owner in any_facts(),
        state in 0..4_u8,
        min in prop::option::of(0..6_u32),
    ) {
        let state = match state {
            0 => OwnerState::NotNeeded,
            1 => OwnerState::Unread,
            2 => OwnerState::Missing,
            _ => OwnerState::Read(&owner),
        };
        let object = GangSpec { min_member: min, ..GangSpec::default() };
        let first = resolved(&memberships, state, Some(&object));
        let mut others = memberships.clone();
        if !memberships.is_empty() {
            others.extend(picks.iter().map(|pick| Membership { rank: None, ..memberships[pick.index(memberships.len())].clone() }));
        }
        others.reverse();
        prop_assert_eq!(&first, &resolved(&others, state, Some(&object)));
        if let TermsResolution::Terms(terms) = &first {
            prop_assert!(terms.min > 0 && terms.min <= terms.max);
            prop_assert!(terms.total.is_none_or(|total| terms.min <= total));
            // Of a role of which nobody is there yet it is not known whether its members lie anywhere.
            let unseen = owner.by_role.iter().any(|(role, _)| memberships.iter().all(|membership| membership.role != *role));
            let fits = |slice: u32| (unseen || terms.min % slice == 0) && slice > 0 && terms.level.is_some();
            prop_assert!(terms.slice.is_none_or(fits));
            let roles: u32 = terms.by_role.iter().map(|(_, count)| count).sum();
            prop_assert!(roles <= terms.min);
        }
        if let TermsResolution::Invalid(faults) = &first {
            prop_assert!(!faults.is_empty() && faults.is_sorted());
        }
    }

    #[test]
    fn what_pods_no_longer_say_leaves_nothing_behind(
        stay in prop::collection::vec(any_claim(), 1..6),
        go in prop::collection::vec(any_claim(), 0..6),
    ) {
        let mut declared = PodDeclarations::by(stay.iter().chain(&go));
        for membership in &go {
            declared.remove(membership);
        }
        prop_assert_eq!(&declared, &PodDeclarations::by(&stay));
        for membership in &stay {
            declared.remove(membership);
        }
        prop_assert!(declared.is_empty());
    }
}
