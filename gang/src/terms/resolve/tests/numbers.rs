//! How many members are needed: what is waited for until it is known, and numbers that cannot be.

use serde_json::json;

use super::super::*;
use super::{facts, faults, membership, not_yet, of_owner, stated, terms, wishing};
use crate::integrations::read;
use crate::membership::{OwnerKind, Size};

#[test]
fn what_is_missing_is_waited_for_in_words_that_stay() {
    let unsaid = of_owner(OwnerKind::JobSet, Size::Undeclared);
    assert_eq!(not_yet(std::slice::from_ref(&unsaid), OwnerState::Unread), "JobSet train was not read yet");
    assert_eq!(
        not_yet(std::slice::from_ref(&unsaid), OwnerState::Missing),
        "JobSet train, which declares how many members are needed, does not exist or may not be read (it is read as jobset.x-k8s.io/v1, v1alpha2)"
    );
    let empty = OwnerFacts::default();
    assert_eq!(
        not_yet(&[unsaid], OwnerState::Read(&empty)),
        "JobSet train does not declare yet how many members are needed"
    );
    assert_eq!(
        not_yet(&[membership(Size::Undeclared)], OwnerState::NotNeeded),
        "the number of members needed is not declared: set annotation gantry.dev/gang-min on its pods, or minMember of Gang train"
    );
    let declared = of_owner(OwnerKind::LeaderWorkerSet, Size::Stated { min: 4, total: Some(4) });
    assert_eq!(
        not_yet(std::slice::from_ref(&declared), OwnerState::Unread),
        "LeaderWorkerSet train was not read yet"
    );
    assert_eq!(terms(&[declared], OwnerState::Missing, None).min, 4, "the pods say enough");
}

#[test]
fn all_is_as_many_as_there_will_be() {
    let owner = OwnerFacts { total: Some(8), source: "spec.parallelism".into(), ..OwnerFacts::default() };
    let all = of_owner(OwnerKind::Job, Size::All);
    let terms = terms(std::slice::from_ref(&all), OwnerState::Read(&owner), None);
    assert_eq!((terms.min, terms.total), (8, Some(8)));
    assert_eq!(&*terms.decided_by, "annotation gantry.dev/gang-min of its pods: all of Job train");
    let other = of_owner(OwnerKind::Job, Size::Stated { min: 4, total: None });
    assert_eq!(
        faults(&[all, other], OwnerState::Read(&owner), None),
        ["pods: they disagree about how many members are needed: 4, all, which is 8; all must say the same"]
    );
}

#[test]
fn minimum_all_without_a_total_of_the_owner_is_a_fault() {
    let owner = facts(2, None);
    let all = of_owner(OwnerKind::CoschedulingPodGroup, Size::All);
    assert_eq!(
        faults(std::slice::from_ref(&all), OwnerState::Read(&owner), None),
        [
            "annotation gantry.dev/gang-min: `all` needs an owner that says how many there are, and PodGroup train (scheduling.x-k8s.io) does not; write a number"
        ]
    );
    let object = GangSpec { min_member: Some(2), ..GangSpec::default() };
    assert_eq!(terms(&[all], OwnerState::Read(&owner), Some(&object)).min, 2);
}

#[test]
fn numbers_that_cannot_be_together_are_told() {
    let options = GangOptions { max: Some(6), slice: Some(3), ..GangOptions::default() };
    let owner = facts(8, Some(7));
    let mut membership = wishing(8, options);
    membership.owner = of_owner(OwnerKind::JobSet, Size::Undeclared).owner;
    assert_eq!(
        faults(&[membership], OwnerState::Read(&owner), None),
        [
            "size: 8 members are needed (annotation gantry.dev/gang-min of its pods), but there may be 6 at most",
            "size: 8 members are needed (annotation gantry.dev/gang-min of its pods), but there will be 7 only",
            "size: slices of 3 members are asked for, but no level in which each is to be; name one",
            "size: slices of 3 members do not make up the 7 that there will be",
            "size: slices of 3 members do not make up the 8 that are needed (annotation gantry.dev/gang-min of its pods)",
        ]
    );
    let object = GangSpec { min_member: Some(0), arrival_seconds: Some(9999), ..GangSpec::default() };
    let told = faults(&[stated(4)], OwnerState::NotNeeded, Some(&object));
    assert!(told.contains(&"spec.minMember of the Gang: 0 is not from 1 to 20000".to_owned()), "{told:?}");
    assert!(
        told.contains(&"spec.arrivalSeconds of the Gang: 9999 is not from 1 to 3600".to_owned()),
        "{told:?}"
    );
}

#[test]
fn gang_object_decides_over_rails_of_pods() {
    let taking = |rails| wishing(2, GangOptions { rails: Some(rails), ..GangOptions::default() });
    assert_eq!(terms(&[stated(2)], OwnerState::NotNeeded, None).rails, Rails::Same, "by default");
    assert_eq!(terms(&[taking(Rails::Any)], OwnerState::NotNeeded, None).rails, Rails::Any);
    let both = [taking(Rails::Any), taking(Rails::RequireSame)];
    assert_eq!(
        faults(&both, OwnerState::NotNeeded, None),
        ["pods: they disagree about which rails they take: any, same (required); all must say the same"]
    );
    let object = GangSpec { rails: Some(gantry_api::GangRails::RequireSame), ..GangSpec::default() };
    assert_eq!(terms(&both, OwnerState::NotNeeded, Some(&object)).rails, Rails::RequireSame);
}

#[test]
fn spares_are_agreed_on_bounded_and_contradict_ignore() {
    let asking = |spares| wishing(2, GangOptions { spares: Some(spares), ..GangOptions::default() });
    assert_eq!(terms(&[stated(2)], OwnerState::NotNeeded, None).spares, 0, "by default");
    assert_eq!(terms(&[asking(3)], OwnerState::NotNeeded, None).spares, 3);
    let both = [asking(1), asking(2)];
    assert_eq!(
        faults(&both, OwnerState::NotNeeded, None),
        ["pods: they disagree about how many spare reservations they have: 1, 2; all must say the same"]
    );
    let object = GangSpec { spares: Some(2), ..GangSpec::default() };
    assert_eq!(terms(&both, OwnerState::NotNeeded, Some(&object)).spares, 2);
    // The operator's limit is 8 by default.
    let lowered = terms(&[asking(9)], OwnerState::NotNeeded, None);
    assert_eq!(lowered.spares, 8);
    assert_eq!(
        lowered.lowered[0].to_string(),
        "annotation gantry.dev/gang-spares: 9 is above the operator's limit of 8 (--gang-spares-max); 8 applies"
    );
    let object = GangSpec { spares: Some(65), ..GangSpec::default() };
    assert_eq!(
        faults(&[stated(2)], OwnerState::NotNeeded, Some(&object)),
        ["spec.spares of the Gang: 65 is not from 0 to 64"]
    );
    let mut ignoring = asking(1);
    ignoring.options.repair = Some(crate::terms::Repair::Ignore);
    assert_eq!(
        faults(&[ignoring.clone()], OwnerState::NotNeeded, None),
        [
            "annotation gantry.dev/gang-spares: 1 spare reservations are for replacements of lost members, and by gantry.dev/gang-repair `ignore` none is replaced; write 0, or another repair"
        ]
    );
    ignoring.options.spares = Some(0);
    assert_eq!(terms(&[ignoring], OwnerState::NotNeeded, None).spares, 0);
}

#[test]
fn more_members_than_are_kept_of_a_gang_cannot_be_needed() {
    assert_eq!(crate::protocol::Settings::default().max_members, 20_000, "what is told below");
    assert_eq!(terms(&[stated(20_000)], OwnerState::NotNeeded, None).min, 20_000);
    assert_eq!(
        faults(&[stated(20_001)], OwnerState::NotNeeded, None),
        [
            "size: 20001 members are needed (annotation gantry.dev/gang-min of its pods), and a gang has 20000 at most"
        ]
    );
    let group = json!({"spec": {"minMember": 60_000}});
    let facts = read(OwnerKind::VolcanoPodGroup, "", &group);
    let owned = of_owner(OwnerKind::VolcanoPodGroup, Size::Undeclared);
    let told = faults(&[owned], OwnerState::Read(&facts), None);
    insta::assert_snapshot!(told.join("\n"), @"size: 60000 members are needed (spec.minMember of PodGroup train (scheduling.volcano.sh)), and a gang has 20000 at most");
    // That there will be more of which fewer are needed is no fault: those beyond wait.
    let job = json!({"spec": {"parallelism": 50_000}});
    let facts = read(OwnerKind::Job, "", &job);
    let owned = of_owner(OwnerKind::Job, Size::Stated { min: 8, total: None });
    assert_eq!(terms(&[owned], OwnerState::Read(&facts), None).min, 8);
}

#[test]
fn pods_are_singles_if_owner_sets_it_and_no_minimum_is_stated() {
    let basic = OwnerFacts { singles: true, ..facts(1, None) };
    let owner = || OwnerState::Read(&basic);
    let unsaid = of_owner(OwnerKind::PodGroup, Size::Undeclared);
    assert!(terms(std::slice::from_ref(&unsaid), owner(), None).singles);
    let stated = of_owner(OwnerKind::PodGroup, Size::Stated { min: 2, total: None });
    assert!(!terms(&[stated], owner(), None).singles);
    let object = GangSpec { min_member: Some(2), ..GangSpec::default() };
    assert!(!terms(&[unsaid], owner(), Some(&object)).singles);
}
