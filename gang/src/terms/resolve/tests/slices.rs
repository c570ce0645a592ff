//! Slices: of the members that ask for devices.

use super::super::*;
use super::{by_default, facts, level, of_owner, wishing};
use crate::membership::{Membership, OwnerKind, Size};

/// A launcher or a worker that wants slices of two.
fn in_twos(role: &str, size: Size) -> Membership {
    Membership {
        role: role.into(),
        options: GangOptions { slice: Some(2), level: level("rack", true), ..GangOptions::default() },
        ..of_owner(OwnerKind::MpiJob, size)
    }
}

/// What a launcher and workers say.
fn mpi(launcher_is_light: bool, size: Size) -> PodDeclarations {
    let launcher = in_twos("launcher", size);
    let mut declared = PodDeclarations::by([&launcher, &in_twos("worker", size), &in_twos("worker", size)]);
    if launcher_is_light {
        declared.lighten(&launcher, true);
    }
    declared
}

#[test]
fn slices_are_of_the_members_that_ask_for_devices() {
    let owner = |workers: u32| OwnerFacts {
        by_role: vec![("launcher".into(), 1), ("worker".into(), workers)],
        ..facts(workers + 1, Some(workers + 1))
    };
    let slice = |declared: &PodDeclarations, owner: &OwnerFacts| match by_default(
        declared,
        OwnerState::Read(owner),
        None,
    ) {
        TermsResolution::Terms(terms) => Ok(terms.slice),
        TermsResolution::Invalid(faults) => Err(faults.iter().map(ToString::to_string).collect::<Vec<_>>()),
        TermsResolution::NotYet(why) => Err(vec![why.to_string()]),
    };
    let (four, three) = (owner(4), owner(3));
    let unsaid = Size::Undeclared;
    assert_eq!(slice(&mpi(true, unsaid), &four), Ok(Some(2)));
    assert_eq!(
        slice(&mpi(true, unsaid), &three),
        Err(vec![
            "size: slices of 2 members do not make up the 3 with devices of the 4 that are needed (spec.minMember of MPIJob train)".to_owned(),
            "size: slices of 2 members do not make up the 3 with devices of the 4 that there will be".to_owned(),
        ])
    );
    // A launcher that asks for devices is one of them.
    assert!(slice(&mpi(false, unsaid), &four).is_err());
    assert_eq!(slice(&mpi(false, unsaid), &three), Ok(Some(2)));
    // Before it is there nobody knows, and where it is to be no member it never is.
    let alone = |size: Size| PodDeclarations::by(&[in_twos("worker", size)]);
    assert_eq!(slice(&alone(unsaid), &four), Ok(Some(2)));
    assert_eq!(slice(&alone(unsaid), &three), Ok(Some(2)));
    let stated = Size::Stated { min: 4, total: None };
    assert_eq!(slice(&alone(stated), &four), Ok(Some(2)));
    // Four of whom one is the launcher are three that lie anywhere.
    assert_eq!(
        slice(&mpi(true, stated), &four),
        Err(vec!["size: slices of 2 members do not make up the 3 with devices of the 4 that are needed (annotation gantry.dev/gang-min of its pods)".to_owned()])
    );
    let mut gone = mpi(true, unsaid);
    gone.lighten(&in_twos("launcher", unsaid), false);
    assert!(slice(&gone, &four).is_err(), "nothing is left behind");
}

#[test]
fn a_leader_without_devices_is_in_no_slice_of_its_group() {
    let slice = |leader_is_light: bool| {
        let of = |role: &str| {
            let hint = Some(TopologyHint { label: "example.com/rack".into(), slice: Some(2) });
            Membership { role: role.into(), ..wishing(5, GangOptions { hint, ..GangOptions::default() }) }
        };
        let (leader, worker) = (of("leader"), of("worker"));
        let mut declared = PodDeclarations::by([&leader, &worker, &worker, &worker, &worker]);
        if leader_is_light {
            declared.lighten(&leader, true);
        }
        match by_default(&declared, OwnerState::NotNeeded, None) {
            TermsResolution::Terms(terms) => (terms.level, terms.slice),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(slice(true), (level("rack", false), Some(2)));
    assert_eq!(slice(false), (level("rack", false), None));
}
