use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::claim::{Claim, Maker, OwnerKind, OwnerRef, Size};
use crate::dialect::{read, settle};
use crate::fabric::Level;
use crate::key::{Dialect, GangKey};

fn levels() -> Levels {
    let level = |name: &str, label: &str| Level {
        name: name.into(),
        label: label.into(),
    };
    Levels(vec![
        level("zone", "topology.kubernetes.io/zone"),
        level("rack", "example.com/rack"),
    ])
}

fn resolved(claims: &[Claim], owner: OwnerState<'_>, object: Option<&GangSpec>) -> Resolved {
    let levels = levels();
    let defaults = Defaults {
        arrival: Duration::from_secs(60),
        repair: Repair::Hold,
        levels: &levels,
    };
    resolve(&Said::by(claims), owner, object, &defaults)
}

fn terms(claims: &[Claim], owner: OwnerState<'_>, object: Option<&GangSpec>) -> Terms {
    match resolved(claims, owner, object) {
        Resolved::Terms(terms) => terms,
        other => panic!("{other:?}"),
    }
}

fn faults(claims: &[Claim], owner: OwnerState<'_>, object: Option<&GangSpec>) -> Vec<String> {
    match resolved(claims, owner, object) {
        Resolved::Invalid(faults) => faults.iter().map(ToString::to_string).collect(),
        other => panic!("{other:?}"),
    }
}

fn not_yet(claims: &[Claim], owner: OwnerState<'_>) -> String {
    match resolved(claims, owner, None) {
        Resolved::NotYet(words) => words.to_string(),
        other => panic!("{other:?}"),
    }
}

fn claim(size: Size) -> Claim {
    Claim {
        key: GangKey {
            namespace: "ml".into(),
            name: "train".into(),
            dialect: Dialect::Annotation,
            incarnation: "".into(),
        },
        size,
        size_said: if size == Size::Unsaid {
            ""
        } else {
            "annotation gantry.dev/gang-min"
        },
        owner: None,
        rank: None,
        role: "".into(),
        wish: Wish::default(),
        also: Vec::new(),
        maker: None,
        made_by: None,
        faults: Vec::new(),
    }
}

fn stated(min: u32) -> Claim {
    claim(Size::Stated { min, total: None })
}

fn of_owner(kind: OwnerKind, size: Size) -> Claim {
    Claim {
        owner: Some(OwnerRef {
            kind,
            namespace: "ml".into(),
            name: "train".into(),
            part: "".into(),
        }),
        ..claim(size)
    }
}

fn wishing(min: u32, wish: Wish) -> Claim {
    Claim { wish, ..stated(min) }
}

fn facts(min: u32, total: Option<u32>) -> OwnerFacts {
    OwnerFacts {
        min: Some(min),
        total,
        said: "spec.minMember".into(),
        ..OwnerFacts::default()
    }
}

fn level(name: &str, required: bool) -> Option<LevelWish> {
    Some(LevelWish {
        level: name.into(),
        required,
    })
}

#[test]
fn the_object_goes_before_the_pods_and_the_pods_before_the_owner() {
    let owner = facts(8, Some(8));
    let read = OwnerState::Read(&owner);
    let unsaid = of_owner(OwnerKind::CoschedulingPodGroup, Size::Unsaid);
    let by_owner = terms(std::slice::from_ref(&unsaid), read, None);
    assert_eq!((by_owner.min, by_owner.total), (8, Some(8)));
    assert_eq!(
        &*by_owner.decided_by,
        "spec.minMember of PodGroup train (scheduling.x-k8s.io)"
    );
    let said = of_owner(
        OwnerKind::CoschedulingPodGroup,
        Size::Stated { min: 6, total: None },
    );
    let by_pods = terms(&[said.clone(), said.clone()], read, None);
    assert_eq!((by_pods.min, by_pods.total), (6, Some(8)));
    assert_eq!(&*by_pods.decided_by, "annotation gantry.dev/gang-min of its pods");
    let object = GangSpec {
        min_member: Some(4),
        ..GangSpec::default()
    };
    let by_object = terms(&[unsaid, said], read, Some(&object));
    assert_eq!(
        (by_object.min, &*by_object.decided_by),
        (4, "minMember of Gang train")
    );
}

#[test]
fn a_number_that_some_pods_say_and_not_others_does_not_undo_what_their_owner_says() {
    let owner = facts(8, None);
    let unsaid = of_owner(OwnerKind::CoschedulingPodGroup, Size::Unsaid);
    let says = |min| of_owner(OwnerKind::CoschedulingPodGroup, Size::Stated { min, total: None });
    for min in [1, 9] {
        assert_eq!(
            faults(
                &[unsaid.clone(), unsaid.clone(), says(min)],
                OwnerState::Read(&owner),
                None
            ),
            [format!(
                "pods: they disagree about how many members are needed: {min}, 8 by spec.minMember of PodGroup train (scheduling.x-k8s.io); all must say the same"
            )]
        );
    }
    let same = terms(&[unsaid.clone(), says(8)], OwnerState::Read(&owner), None);
    assert_eq!(same.min, 8);
    let object = GangSpec {
        min_member: Some(4),
        ..GangSpec::default()
    };
    assert_eq!(
        terms(
            &[unsaid.clone(), says(1)],
            OwnerState::Read(&owner),
            Some(&object)
        )
        .min,
        4
    );
    // Where nobody else says a number, one pod's word is enough.
    let silent = OwnerFacts::default();
    let by_pod = terms(&[unsaid, says(3)], OwnerState::Read(&silent), None);
    assert_eq!(by_pod.min, 3);
}

#[test]
fn what_nobody_says_is_by_default() {
    let terms = terms(&[stated(4)], OwnerState::NotNeeded, None);
    assert_eq!((terms.min, terms.max, terms.total), (4, u32::MAX, None));
    assert_eq!(
        (terms.repair, terms.arrival, terms.level),
        (Repair::Hold, Duration::from_secs(60), None)
    );
}

#[test]
fn what_is_missing_is_waited_for_in_words_that_stay() {
    let unsaid = of_owner(OwnerKind::JobSet, Size::Unsaid);
    assert_eq!(
        not_yet(std::slice::from_ref(&unsaid), OwnerState::Unread),
        "JobSet train was not read yet"
    );
    assert_eq!(
        not_yet(std::slice::from_ref(&unsaid), OwnerState::Missing),
        "JobSet train, which says how many members are needed, does not exist or may not be read"
    );
    let empty = OwnerFacts::default();
    assert_eq!(
        not_yet(&[unsaid], OwnerState::Read(&empty)),
        "JobSet train does not say yet how many members are needed"
    );
    assert_eq!(
        not_yet(&[claim(Size::Unsaid)], OwnerState::NotNeeded),
        "nobody says how many members are needed: set annotation gantry.dev/gang-min on its pods, or minMember of Gang train"
    );
    let said = of_owner(
        OwnerKind::LeaderWorkerSet,
        Size::Stated {
            min: 4,
            total: Some(4),
        },
    );
    assert_eq!(
        not_yet(std::slice::from_ref(&said), OwnerState::Unread),
        "LeaderWorkerSet train was not read yet"
    );
    assert_eq!(
        terms(&[said], OwnerState::Missing, None).min,
        4,
        "the pods say enough"
    );
}

#[test]
fn all_is_as_many_as_there_will_be() {
    let owner = OwnerFacts {
        total: Some(8),
        said: "spec.parallelism".into(),
        ..OwnerFacts::default()
    };
    let all = of_owner(OwnerKind::Job, Size::All);
    let terms = terms(std::slice::from_ref(&all), OwnerState::Read(&owner), None);
    assert_eq!((terms.min, terms.total), (8, Some(8)));
    assert_eq!(
        &*terms.decided_by,
        "annotation gantry.dev/gang-min of its pods: all of Job train"
    );
    let other = of_owner(OwnerKind::Job, Size::Stated { min: 4, total: None });
    assert_eq!(
        faults(&[all, other], OwnerState::Read(&owner), None),
        ["pods: they disagree about how many members are needed: 4, all, which is 8; all must say the same"]
    );
}

#[test]
fn all_of_an_owner_that_never_says_how_many_there_will_be_is_a_fault() {
    let owner = facts(2, None);
    let all = of_owner(OwnerKind::CoschedulingPodGroup, Size::All);
    assert_eq!(
        faults(std::slice::from_ref(&all), OwnerState::Read(&owner), None),
        [
            "annotation gantry.dev/gang-min: `all` needs an owner that says how many there are, and PodGroup train (scheduling.x-k8s.io) does not; write a number"
        ]
    );
    let object = GangSpec {
        min_member: Some(2),
        ..GangSpec::default()
    };
    assert_eq!(terms(&[all], OwnerState::Read(&owner), Some(&object)).min, 2);
}

#[test]
fn members_that_contradict_each_other_are_told_so() {
    let wish = |level_name: &str, slice: u32| Wish {
        level: level(level_name, true),
        slice: Some(slice),
        ..Wish::default()
    };
    let told = faults(
        &[wishing(4, wish("rack", 2)), wishing(8, wish("zone", 4))],
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
    let object = GangSpec {
        min_member: Some(6),
        ..GangSpec::default()
    };
    assert_eq!(
        terms(&[stated(4), stated(8)], OwnerState::NotNeeded, Some(&object)).min,
        6,
        "the object's word ends it"
    );
}

#[test]
fn numbers_that_cannot_be_together_are_told() {
    let wish = Wish {
        max: Some(6),
        slice: Some(3),
        ..Wish::default()
    };
    let owner = facts(8, Some(7));
    let mut claim = wishing(8, wish);
    claim.owner = of_owner(OwnerKind::JobSet, Size::Unsaid).owner;
    assert_eq!(
        faults(&[claim], OwnerState::Read(&owner), None),
        [
            "size: 8 members are needed (annotation gantry.dev/gang-min of its pods), but there may be 6 at most",
            "size: 8 members are needed (annotation gantry.dev/gang-min of its pods), but there will be 7 only",
            "size: slices of 3 members are asked for, but no level in which each is to be; name one",
            "size: slices of 3 members do not make up the 7 that there will be",
            "size: slices of 3 members do not make up the 8 that are needed (annotation gantry.dev/gang-min of its pods)",
        ]
    );
    let object = GangSpec {
        min_member: Some(0),
        arrival_seconds: Some(9999),
        ..GangSpec::default()
    };
    let told = faults(&[stated(4)], OwnerState::NotNeeded, Some(&object));
    assert!(
        told.contains(&"spec.minMember of the Gang: 0 is not from 1 to 20000".to_owned()),
        "{told:?}"
    );
    assert!(
        told.contains(&"spec.arrivalSeconds of the Gang: 9999 is not from 1 to 3600".to_owned()),
        "{told:?}"
    );
}

/// A launcher or a worker that wants slices of two.
fn in_twos(role: &str, size: Size) -> Claim {
    Claim {
        role: role.into(),
        wish: Wish {
            slice: Some(2),
            level: level("rack", true),
            ..Wish::default()
        },
        ..of_owner(OwnerKind::MpiJob, size)
    }
}

/// What a launcher and workers say.
fn mpi(launcher_is_light: bool, size: Size) -> Said {
    let launcher = in_twos("launcher", size);
    let mut said = Said::by([&launcher, &in_twos("worker", size), &in_twos("worker", size)]);
    if launcher_is_light {
        said.lighten(&launcher, true);
    }
    said
}

#[test]
fn slices_are_of_the_members_that_ask_for_devices() {
    let levels = levels();
    let defaults = Defaults {
        arrival: Duration::from_secs(60),
        repair: Repair::Hold,
        levels: &levels,
    };
    let owner = |workers: u32| OwnerFacts {
        by_role: vec![("launcher".into(), 1), ("worker".into(), workers)],
        ..facts(workers + 1, Some(workers + 1))
    };
    let slice =
        |said: &Said, owner: &OwnerFacts| match resolve(said, OwnerState::Read(owner), None, &defaults) {
            Resolved::Terms(terms) => Ok(terms.slice),
            Resolved::Invalid(faults) => Err(faults.iter().map(ToString::to_string).collect::<Vec<_>>()),
            Resolved::NotYet(why) => Err(vec![why.to_string()]),
        };
    let (four, three) = (owner(4), owner(3));
    let unsaid = Size::Unsaid;
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
    let alone = |size: Size| Said::by(&[in_twos("worker", size)]);
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
fn a_level_goes_by_its_name_or_its_label() {
    let with = |name: &str| {
        wishing(
            4,
            Wish {
                level: level(name, true),
                ..Wish::default()
            },
        )
    };
    for name in ["rack", "example.com/rack"] {
        assert_eq!(
            terms(&[with(name)], OwnerState::NotNeeded, None).level,
            level("rack", true)
        );
    }
    assert_eq!(
        faults(&[with("rakc")], OwnerState::NotNeeded, None),
        [
            "annotation gantry.dev/gang-required-level: \"rakc\" is not among the levels given with --fabric; there are zone, rack, node; did you mean `rack`?"
        ]
    );
}

#[test]
fn a_level_that_is_not_known_is_told_with_where_it_stands() {
    let places = |claims: &[Claim], owner: OwnerState<'_>, object: Option<&GangSpec>| {
        let told = faults(claims, owner, object);
        assert_eq!(told.len(), 1, "{told:?}");
        told[0]
            .split_once(": \"rakc\" is not among")
            .unwrap()
            .0
            .to_owned()
    };
    let preferred = Wish {
        level: level("rakc", false),
        ..Wish::default()
    };
    assert_eq!(
        places(&[wishing(4, preferred)], OwnerState::NotNeeded, None),
        "annotation gantry.dev/gang-preferred-level"
    );
    let object: GangSpec = serde_json::from_value(json!({"level": {"name": "rakc"}})).unwrap();
    assert_eq!(
        places(&[stated(4)], OwnerState::NotNeeded, Some(&object)),
        "spec.level of Gang train"
    );
    let hard = json!({"mode": "hard", "highestTierName": "rakc"});
    let objects = [
        (
            OwnerKind::PodGroup,
            json!({"schedulingPolicy": {"gang": {"minCount": 4}}, "schedulingConstraints": {"topology": [{"key": "rakc"}]}}),
            "spec.schedulingConstraints.topology[0].key of PodGroup train",
        ),
        (
            OwnerKind::KaiPodGroup,
            json!({"minMember": 4, "topologyConstraint": {"preferredTopologyLevel": "rakc"}}),
            "spec.topologyConstraint.preferredTopologyLevel of PodGroup train",
        ),
        (
            OwnerKind::VolcanoPodGroup,
            json!({"minMember": 4, "networkTopology": hard}),
            "spec.networkTopology.highestTierName of PodGroup train",
        ),
        (
            OwnerKind::VolcanoPodGroup,
            json!({"minMember": 4, "subGroupPolicy": [{"networkTopology": hard, "subGroupSize": 2}]}),
            "spec.subGroupPolicy[0].networkTopology.highestTierName of PodGroup train",
        ),
    ];
    for (kind, spec, place) in objects {
        let facts = read(kind, "", &json!({"metadata": {"name": "train"}, "spec": spec}));
        let claims = [of_owner(kind, Size::Unsaid)];
        assert_eq!(places(&claims, OwnerState::Read(&facts), None), place);
    }
    let annotation = "kai.scheduler/topology-required-placement";
    let set = json!({"metadata": {"name": "train", "annotations": {annotation: "rakc"}}, "spec": {"leaderWorkerTemplate": {"size": 4}}});
    let facts = read(OwnerKind::LeaderWorkerSet, "", &set);
    let claims = [of_owner(OwnerKind::LeaderWorkerSet, Size::Unsaid)];
    assert_eq!(
        places(&claims, OwnerState::Read(&facts), None),
        format!("annotation {annotation} of LeaderWorkerSet train")
    );
}

#[test]
fn the_node_is_a_level_of_every_fabric_whoever_names_it() {
    for name in ["node", "kubernetes.io/hostname"] {
        let wish = Wish {
            level: level(name, true),
            ..Wish::default()
        };
        let terms = terms(&[wishing(4, wish)], OwnerState::NotNeeded, None);
        assert_eq!(terms.level, level("node", true));
    }
    let native = json!({"spec": {
        "schedulingPolicy": {"gang": {"minCount": 4}},
        "schedulingConstraints": {"topology": [{"key": "kubernetes.io/hostname"}]},
    }});
    let kai = json!({"spec": {
        "minMember": 4, "topologyConstraint": {"requiredTopologyLevel": "kubernetes.io/hostname"},
    }});
    for (kind, object) in [(OwnerKind::PodGroup, native), (OwnerKind::KaiPodGroup, kai)] {
        let facts = read(kind, "", &object);
        let terms = terms(&[of_owner(kind, Size::Unsaid)], OwnerState::Read(&facts), None);
        assert_eq!((terms.min, terms.level), (4, level("node", true)), "{kind:?}");
    }
    let none = Levels::default();
    assert_eq!(
        check::known("kubernetes.io/hostname", &none).as_deref(),
        Some("node")
    );
    assert_eq!(
        check::unknown("rack", &none),
        "\"rack\" is not among the levels given with --fabric; there is node alone"
    );
    let sliced = Wish {
        level: level("node", true),
        slice: Some(2),
        ..Wish::default()
    };
    assert_eq!(
        faults(&[wishing(4, sliced)], OwnerState::NotNeeded, None),
        [
            "size: slices of 2 members are asked for, each on one node: slices are planned for in levels above the node only"
        ]
    );
}

#[test]
fn more_members_than_are_kept_of_a_gang_cannot_be_needed() {
    assert_eq!(
        crate::protocol::Settings::default().max_members,
        20_000,
        "what is told below"
    );
    assert_eq!(terms(&[stated(20_000)], OwnerState::NotNeeded, None).min, 20_000);
    assert_eq!(
        faults(&[stated(20_001)], OwnerState::NotNeeded, None),
        [
            "size: 20001 members are needed (annotation gantry.dev/gang-min of its pods), and a gang has 20000 at most"
        ]
    );
    let group = json!({"spec": {"minMember": 60_000}});
    let facts = read(OwnerKind::VolcanoPodGroup, "", &group);
    let owned = of_owner(OwnerKind::VolcanoPodGroup, Size::Unsaid);
    let told = faults(&[owned], OwnerState::Read(&facts), None);
    assert!(told[0].ends_with("and a gang has 20000 at most"), "{told:?}");
    // That there will be more of which fewer are needed is no fault: those beyond wait.
    let job = json!({"spec": {"parallelism": 50_000}});
    let facts = read(OwnerKind::Job, "", &job);
    let owned = of_owner(OwnerKind::Job, Size::Stated { min: 8, total: None });
    assert_eq!(terms(&[owned], OwnerState::Read(&facts), None).min, 8);
}

#[test]
fn what_another_system_keeps_together_is_followed_where_it_can_be() {
    let hinting = |label: &str, slice: Option<u32>| {
        let hint = Some(Hint {
            label: label.into(),
            slice,
        });
        wishing(
            8,
            Wish {
                hint,
                ..Wish::default()
            },
        )
    };
    let of = |claims: &[Claim]| {
        let terms = terms(claims, OwnerState::NotNeeded, None);
        (terms.level, terms.slice)
    };
    assert_eq!(
        of(&[hinting("example.com/rack", Some(4))]),
        (level("rack", false), Some(4))
    );
    assert_eq!(
        of(&[hinting("example.com/rack", Some(3))]),
        (level("rack", false), None)
    );
    assert_eq!(of(&[hinting("kubernetes.io/hostname", Some(4))]), (None, None));
    assert_eq!(
        of(&[
            hinting("example.com/rack", None),
            hinting("topology.kubernetes.io/zone", None)
        ]),
        (None, None)
    );
}

#[test]
fn a_sub_group_of_kai_that_its_pod_group_does_not_have_is_told() {
    let told = |groups: serde_json::Value, names: &[&str]| {
        let spec = json!({"minMember": 2, "subGroups": groups});
        let facts = read(
            OwnerKind::KaiPodGroup,
            "",
            &json!({"metadata": {"name": "train"}, "spec": spec}),
        );
        let claims: Vec<Claim> = names
            .iter()
            .map(|name| Claim {
                role: (*name).into(),
                ..of_owner(OwnerKind::KaiPodGroup, Size::Unsaid)
            })
            .collect();
        match resolved(&claims, OwnerState::Read(&facts), None) {
            Resolved::Invalid(faults) => faults.iter().map(ToString::to_string).collect(),
            _ => Vec::new(),
        }
    };
    let groups = json!([
        {"name": "prefill"},
        {"name": "leader", "parent": "prefill", "minMember": 1},
        {"name": "workers", "parent": "prefill", "minMember": 1},
        {"name": "spare", "minMember": 0},
    ]);
    // Such as say none are of the whole, and one whose minimum is 0 is there.
    assert_eq!(told(groups.clone(), &["leader", "workers", "spare", ""]), [""; 0]);
    let place = "spec.subGroups of PodGroup train: no sub-group";
    let there = "which its pods name; there are leader, spare, workers";
    assert_eq!(
        told(groups, &["leader", "wrokers", "prefill"]),
        [
            format!("{place} prefill, {there}"),
            format!("{place} wrokers, {there}; did you mean `workers`?")
        ]
    );
    assert_eq!(
        told(json!(null), &["workers"]),
        [format!("{place} workers, which its pods name; there are none")]
    );
    assert_eq!(told(json!([]), &["default", ""]), [""; 0]);
    let many: Vec<serde_json::Value> = (0..3000).map(|i| json!({"name": format!("g{i}")})).collect();
    let names: Vec<String> = (0..5000).map(|i| format!("x{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let faults = told(json!(many), &names);
    assert_eq!(faults.len(), 8);
    assert!(faults.iter().all(|fault| fault.len() < 700), "{faults:?}");
}

#[test]
fn a_leader_without_devices_is_in_no_slice_of_its_group() {
    let slice = |leader_is_light: bool| {
        let of = |role: &str| {
            let hint = Some(Hint {
                label: "example.com/rack".into(),
                slice: Some(2),
            });
            Claim {
                role: role.into(),
                ..wishing(
                    5,
                    Wish {
                        hint,
                        ..Wish::default()
                    },
                )
            }
        };
        let (leader, worker) = (of("leader"), of("worker"));
        let mut said = Said::by([&leader, &worker, &worker, &worker, &worker]);
        if leader_is_light {
            said.lighten(&leader, true);
        }
        let levels = levels();
        let defaults = Defaults {
            arrival: Duration::from_secs(60),
            repair: Repair::Hold,
            levels: &levels,
        };
        match resolve(&said, OwnerState::NotNeeded, None, &defaults) {
            Resolved::Terms(terms) => (terms.level, terms.slice),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(slice(true), (level("rack", false), Some(2)));
    assert_eq!(slice(false), (level("rack", false), None));
}

#[test]
fn where_roles_start_apart_each_is_a_gang_of_its_own() {
    let owner = OwnerFacts {
        by_role: vec![("driver".into(), 1), ("workers".into(), 8)],
        apart: true,
        ..facts(9, Some(9))
    };
    let read = OwnerState::Read(&owner);
    let of = |role: &str, size| Claim {
        role: role.into(),
        ..of_owner(OwnerKind::JobSet, size)
    };
    let (driver, worker) = (of("driver", Size::Unsaid), of("workers", Size::Unsaid));
    let settled = settle(&worker, &owner).unwrap();
    assert_eq!(&*settled.key.name, "train/workers");
    assert_eq!(settle(&settled, &owner), None, "once");
    assert_eq!(
        settle(&worker, &facts(9, None)),
        None,
        "only where they are apart"
    );
    let alone = terms(&[settled], read, None);
    assert_eq!((alone.min, alone.total), (8, Some(8)));
    assert_eq!(
        terms(std::slice::from_ref(&driver), read, None).min,
        1,
        "before they are told apart, what has begun"
    );
    assert_eq!(terms(&[driver, worker], read, None).min, 9);
    let elastic = of("workers", Size::Stated { min: 6, total: None });
    assert_eq!(terms(&[elastic], read, None).min, 6);
    let for_all = of(
        "workers",
        Size::Stated {
            min: 9,
            total: Some(9),
        },
    );
    assert_eq!(
        terms(&[for_all], read, None).min,
        8,
        "no more than there are of the role"
    );
}

#[test]
fn a_gang_can_be_stopped_at_little_loss_only_if_every_member_can() {
    let with = |checkpointed| {
        wishing(
            2,
            Wish {
                checkpointed,
                ..Wish::default()
            },
        )
    };
    let of = |claims: &[Claim]| terms(claims, OwnerState::NotNeeded, None).checkpointed;
    assert!(of(&[with(Some(true)), with(None)]));
    assert!(!of(&[with(Some(true)), with(Some(false))]));
}

fn any_wish() -> impl Strategy<Value = Wish> {
    let level = prop::option::of(prop::sample::select(vec![
        "rack",
        "zone",
        "example.com/rack",
        "x",
        "",
    ]));
    let hint = prop::option::of(prop::sample::select(vec!["example.com/rack", "x"]));
    let number = || prop::option::of(0..5_u32);
    (level, hint, number(), number(), prop::option::of(any::<bool>())).prop_map(
        |(level, hint, slice, max, flag)| Wish {
            level: level.map(|name| LevelWish {
                level: name.into(),
                required: flag == Some(true),
            }),
            hint: hint.map(|label| Hint {
                label: label.into(),
                slice,
            }),
            slice,
            max,
            repair: flag.map(|flag| if flag { Repair::Restart } else { Repair::Ignore }),
            arrival: max.map(|seconds| Duration::from_secs(seconds.into())),
            checkpointed: flag,
        },
    )
}

fn any_claim() -> impl Strategy<Value = Claim> {
    let size = prop_oneof![
        (0..5_u32, prop::option::of(0..5_u32)).prop_map(|(min, total)| Size::Stated { min, total }),
        Just(Size::All),
        Just(Size::Unsaid),
    ];
    let owner = prop::option::of(prop::sample::select(vec![OwnerKind::Job, OwnerKind::JobSet]));
    let role = prop::sample::select(vec!["", "a", "b"]);
    let maker = prop::option::of(prop::sample::select(vec!["left", "right"]));
    let said = (size, owner, role, any_wish(), any::<u32>(), maker);
    said.prop_map(|(size, kind, role, wish, rank, maker)| Claim {
        role: role.into(),
        rank: Some(rank),
        wish,
        maker: maker.map(|name| Maker {
            kind: "Job".into(),
            name: name.into(),
            uid: name.into(),
        }),
        ..kind.map_or_else(|| claim(size), |kind| of_owner(kind, size))
    })
}

fn any_facts() -> impl Strategy<Value = OwnerFacts> {
    let number = || prop::option::of(0..6_u32);
    let by_role = prop::collection::btree_map(prop::sample::select(vec!["a", "b", "c"]), 1..4_u32, 0..3);
    (number(), number(), by_role, any::<bool>(), any_wish()).prop_map(|(min, total, by_role, apart, wish)| {
        OwnerFacts {
            min,
            total,
            by_role: by_role
                .into_iter()
                .map(|(role, count)| (role.into(), count))
                .collect(),
            apart,
            wish,
            ..OwnerFacts::default()
        }
    })
}

proptest! {
    #[test]
    fn neither_order_nor_number_nor_ranks_of_members_make_a_difference(
        claims in prop::collection::vec(any_claim(), 0..6),
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
        let first = resolved(&claims, state, Some(&object));
        let mut others = claims.clone();
        if !claims.is_empty() {
            others.extend(picks.iter().map(|pick| Claim { rank: None, ..claims[pick.index(claims.len())].clone() }));
        }
        others.reverse();
        prop_assert_eq!(&first, &resolved(&others, state, Some(&object)));
        if let Resolved::Terms(terms) = &first {
            prop_assert!(terms.min > 0 && terms.min <= terms.max);
            prop_assert!(terms.total.is_none_or(|total| terms.min <= total));
            // Of a role of which nobody is there yet it is not known whether its members lie anywhere.
            let unseen = owner.by_role.iter().any(|(role, _)| claims.iter().all(|claim| claim.role != *role));
            let fits = |slice: u32| (unseen || terms.min % slice == 0) && slice > 0 && terms.level.is_some();
            prop_assert!(terms.slice.is_none_or(fits));
            let roles: u32 = terms.by_role.iter().map(|(_, count)| count).sum();
            prop_assert!(roles <= terms.min);
        }
        if let Resolved::Invalid(faults) = &first {
            prop_assert!(!faults.is_empty() && faults.is_sorted());
        }
    }

    #[test]
    fn what_pods_no_longer_say_leaves_nothing_behind(
        stay in prop::collection::vec(any_claim(), 1..6),
        go in prop::collection::vec(any_claim(), 0..6),
    ) {
        let mut said = Said::by(stay.iter().chain(&go));
        for claim in &go {
            said.remove(claim);
        }
        prop_assert_eq!(&said, &Said::by(&stay));
        for claim in &stay {
            said.remove(claim);
        }
        prop_assert!(said.is_empty());
    }
}

#[test]
fn each_goes_by_itself_where_the_owner_says_so_and_nobody_says_a_number() {
    let basic = OwnerFacts {
        singles: true,
        ..facts(1, None)
    };
    let owner = || OwnerState::Read(&basic);
    let unsaid = of_owner(OwnerKind::PodGroup, Size::Unsaid);
    assert!(terms(std::slice::from_ref(&unsaid), owner(), None).singles);
    let stated = of_owner(OwnerKind::PodGroup, Size::Stated { min: 2, total: None });
    assert!(!terms(&[stated], owner(), None).singles);
    let object = GangSpec {
        min_member: Some(2),
        ..GangSpec::default()
    };
    assert!(!terms(&[unsaid], owner(), Some(&object)).singles);
}
