//! Whose word counts, of the Gang object, the pods and their owner, and what is told where they contradict each other.

use super::super::*;
use super::{facts, faults, level, of_owner, stated, terms, wishing};
use crate::membership::{Membership, OwnerKind, Size};

#[test]
fn minimum_precedence_is_object_then_pods_then_owner() {
    let owner = facts(8, Some(8));
    let read = OwnerState::Read(&owner);
    let unsaid = of_owner(OwnerKind::CoschedulingPodGroup, Size::Undeclared);
    let by_owner = terms(std::slice::from_ref(&unsaid), read, None);
    assert_eq!((by_owner.min, by_owner.total), (8, Some(8)));
    assert_eq!(&*by_owner.decided_by, "spec.minMember of PodGroup train (scheduling.x-k8s.io)");
    let declared = of_owner(OwnerKind::CoschedulingPodGroup, Size::Stated { min: 6, total: None });
    let by_pods = terms(&[declared.clone(), declared.clone()], read, None);
    assert_eq!((by_pods.min, by_pods.total), (6, Some(8)));
    assert_eq!(&*by_pods.decided_by, "annotation gantry.dev/gang-min of its pods");
    let object = GangSpec { min_member: Some(4), ..GangSpec::default() };
    let by_object = terms(&[unsaid, declared], read, Some(&object));
    assert_eq!((by_object.min, &*by_object.decided_by), (4, "minMember of Gang train"));
}

#[test]
fn minimum_on_some_pods_does_not_override_the_owner() {
    let owner = facts(8, None);
    let unsaid = of_owner(OwnerKind::CoschedulingPodGroup, Size::Undeclared);
    let says = |min| of_owner(OwnerKind::CoschedulingPodGroup, Size::Stated { min, total: None });
    for min in [1, 9] {
        assert_eq!(
            faults(&[unsaid.clone(), unsaid.clone(), says(min)], OwnerState::Read(&owner), None),
            [format!(
                "pods: they disagree about how many members are needed: {min}, 8 by spec.minMember of PodGroup train (scheduling.x-k8s.io); all must say the same"
            )]
        );
    }
    let same = terms(&[unsaid.clone(), says(8)], OwnerState::Read(&owner), None);
    assert_eq!(same.min, 8);
    let object = GangSpec { min_member: Some(4), ..GangSpec::default() };
    assert_eq!(terms(&[unsaid.clone(), says(1)], OwnerState::Read(&owner), Some(&object)).min, 4);
    // Where nobody else says a number, one pod's word is enough.
    let silent = OwnerFacts::default();
    let by_pod = terms(&[unsaid, says(3)], OwnerState::Read(&silent), None);
    assert_eq!(by_pod.min, 3);
}

#[test]
fn what_nobody_says_is_by_default() {
    let terms = terms(&[stated(4)], OwnerState::NotNeeded, None);
    assert_eq!((terms.min, terms.max, terms.total), (4, u32::MAX, None));
    assert_eq!((terms.repair, terms.arrival, terms.level), (Repair::Hold, Duration::from_secs(60), None));
}

#[test]
fn members_that_contradict_each_other_are_told_so() {
    let options = |level_name: &str, slice: u32| GangOptions {
        level: level(level_name, true),
        slice: Some(slice),
        ..GangOptions::default()
    };
    let told = faults(
        &[wishing(4, options("rack", 2)), wishing(8, options("zone", 4))],
        OwnerState::NotNeeded,
        None,
    );
    assert_eq!(
        told,
        [
            "pods: they disagree about how many members are needed: 4, 8; all must say the same",
            "pods: they disagree about in which level they are: rack (required), zone (required); all must say the same",
            "pods: they disagree about what size slices have: 2, 4; all must say the same",
        ]
    );
    let object = GangSpec { min_member: Some(6), ..GangSpec::default() };
    assert_eq!(
        terms(&[stated(4), stated(8)], OwnerState::NotNeeded, Some(&object)).min,
        6,
        "the object's word ends it"
    );
}

#[test]
fn gang_is_checkpointed_only_if_every_member_is() {
    let with = |checkpointed| wishing(2, GangOptions { checkpointed, ..GangOptions::default() });
    let of = |memberships: &[Membership]| terms(memberships, OwnerState::NotNeeded, None).checkpointed;
    assert!(of(&[with(Some(true)), with(None)]));
    assert!(!of(&[with(Some(true)), with(Some(false))]));
}

#[test]
fn values_above_the_ceilings_are_lowered_and_named() {
    use crate::integrations::value::arrival;

    let ceilings = Ceilings {
        arrival: Duration::from_secs(120),
        required_levels: Some(vec!["zone".into()]),
        ..Ceilings::default()
    };
    let lowered = |memberships: &[Membership], owner: OwnerState<'_>, object: Option<&GangSpec>| {
        let levels = super::levels();
        let declared = PodDeclarations::by(memberships);
        match resolve(&declared, owner, object, &super::defaults(&levels, &ceilings)) {
            TermsResolution::Terms(terms) => {
                let words: Vec<String> = terms.lowered.iter().map(ToString::to_string).collect();
                (terms.arrival.as_secs(), terms.level, words)
            }
            other => panic!("{other:?}"),
        }
    };
    let asks = |seconds, name: &str| {
        let time = arrival(Duration::from_secs(seconds), "annotation gantry.dev/gang-arrival-seconds");
        wishing(4, GangOptions { arrival: time, level: level(name, true), ..GangOptions::default() })
    };
    assert_eq!(
        lowered(&[asks(120, "zone")], OwnerState::NotNeeded, None),
        (120, level("zone", true), Vec::new())
    );
    let too_much = (
        120,
        level("rack", false),
        vec![
            "annotation gantry.dev/gang-arrival-seconds: 121 s is above the operator's limit of 120 s (--gang-arrival-max); 120 s applies".to_owned(),
            "annotation gantry.dev/gang-required-level: the operator does not let gangs require rack (--gang-required-levels has zone); it is preferred".to_owned(),
        ],
    );
    assert_eq!(lowered(&[asks(121, "rack")], OwnerState::NotNeeded, None), too_much);
    // By its label, too.
    assert_eq!(lowered(&[asks(121, "example.com/rack")], OwnerState::NotNeeded, None), too_much);
    let object = GangSpec { arrival_seconds: Some(3600), ..GangSpec::default() };
    let (seconds, _, words) = lowered(&[stated(4)], OwnerState::NotNeeded, Some(&object));
    assert_eq!(seconds, 120);
    insta::assert_snapshot!(words.join("\n"), @"spec.arrivalSeconds of Gang train: 3600 s is above the operator's limit of 120 s (--gang-arrival-max); 120 s applies");
    let mut facts = facts(4, None);
    facts.options.arrival = arrival(Duration::from_secs(7200), "spec.scheduleTimeoutSeconds");
    let memberships = [of_owner(OwnerKind::CoschedulingPodGroup, Size::Undeclared)];
    let (_, _, words) = lowered(&memberships, OwnerState::Read(&facts), None);
    assert!(
        words[0].starts_with(
            "spec.scheduleTimeoutSeconds of PodGroup train (scheduling.x-k8s.io): 7200 s is above"
        ),
        "{words:?}"
    );
}
