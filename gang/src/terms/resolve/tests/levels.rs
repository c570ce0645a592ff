//! In which level members are to be: by its name or its label, by what another system keeps together, and those that are not known.

use serde_json::json;

use super::super::*;
use super::{faults, level, of_owner, stated, terms, wishing};
use crate::integrations::read;
use crate::membership::{Membership, OwnerKind, Size};

#[test]
fn a_level_goes_by_its_name_or_its_label() {
    let with = |name: &str| wishing(4, GangOptions { level: level(name, true), ..GangOptions::default() });
    for name in ["rack", "example.com/rack"] {
        assert_eq!(terms(&[with(name)], OwnerState::NotNeeded, None).level, level("rack", true));
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
    let places = |memberships: &[Membership], owner: OwnerState<'_>, object: Option<&GangSpec>| {
        let told = faults(memberships, owner, object);
        assert_eq!(told.len(), 1, "{told:?}");
        told[0].split_once(": \"rakc\" is not among").unwrap().0.to_owned()
    };
    let preferred = GangOptions { level: level("rakc", false), ..GangOptions::default() };
    assert_eq!(
        places(&[wishing(4, preferred)], OwnerState::NotNeeded, None),
        "annotation gantry.dev/gang-preferred-level"
    );
    let object: GangSpec = serde_json::from_value(json!({"level": {"name": "rakc"}})).unwrap();
    assert_eq!(places(&[stated(4)], OwnerState::NotNeeded, Some(&object)), "spec.level of Gang train");
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
        let memberships = [of_owner(kind, Size::Undeclared)];
        assert_eq!(places(&memberships, OwnerState::Read(&facts), None), place);
    }
    let annotation = "kai.scheduler/topology-required-placement";
    let set = json!({"metadata": {"name": "train", "annotations": {annotation: "rakc"}}, "spec": {"leaderWorkerTemplate": {"size": 4}}});
    let facts = read(OwnerKind::LeaderWorkerSet, "", &set);
    let memberships = [of_owner(OwnerKind::LeaderWorkerSet, Size::Undeclared)];
    assert_eq!(
        places(&memberships, OwnerState::Read(&facts), None),
        format!("annotation {annotation} of LeaderWorkerSet train")
    );
}

#[test]
fn the_node_is_a_level_of_every_fabric_whoever_names_it() {
    for name in ["node", "kubernetes.io/hostname"] {
        let options = GangOptions { level: level(name, true), ..GangOptions::default() };
        let terms = terms(&[wishing(4, options)], OwnerState::NotNeeded, None);
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
        let terms = terms(&[of_owner(kind, Size::Undeclared)], OwnerState::Read(&facts), None);
        assert_eq!((terms.min, terms.level), (4, level("node", true)), "{kind:?}");
    }
    let none = Levels::default();
    assert_eq!(known("kubernetes.io/hostname", &none).as_deref(), Some("node"));
    assert_eq!(
        unknown("rack", &none),
        "\"rack\" is not among the levels given with --fabric; there is node alone"
    );
    assert_eq!(
        unknown("topology.kubernetes.io/zone", &none),
        "\"topology.kubernetes.io/zone\" is not among the levels given with --fabric; there is node alone; the operator adds it with the item zone (docs/gangs-placement.md)"
    );
    let sliced = GangOptions { level: level("node", true), slice: Some(2), ..GangOptions::default() };
    assert_eq!(
        faults(&[wishing(4, sliced)], OwnerState::NotNeeded, None),
        [
            "size: slices of 2 members are asked for, each on one node: slices are planned for in levels above the node only"
        ]
    );
}

#[test]
fn topology_hint_of_another_system_is_followed_if_possible() {
    let hinting = |label: &str, slice: Option<u32>| {
        let hint = Some(TopologyHint { label: label.into(), slice });
        wishing(8, GangOptions { hint, ..GangOptions::default() })
    };
    let of = |memberships: &[Membership]| {
        let terms = terms(memberships, OwnerState::NotNeeded, None);
        (terms.level, terms.slice)
    };
    assert_eq!(of(&[hinting("example.com/rack", Some(4))]), (level("rack", false), Some(4)));
    assert_eq!(of(&[hinting("example.com/rack", Some(3))]), (level("rack", false), None));
    assert_eq!(of(&[hinting("kubernetes.io/hostname", Some(4))]), (None, None));
    assert_eq!(
        of(&[hinting("example.com/rack", None), hinting("topology.kubernetes.io/zone", None)]),
        (None, None)
    );
}

#[test]
fn the_narrowest_of_several_required_levels_holds() {
    let of = |keys: [&str; 2]| {
        let topology = keys.map(|key| json!({"key": key}));
        let spec = json!({"schedulingPolicy": {"gang": {"minCount": 4}}, "schedulingConstraints": {"topology": topology}});
        read(OwnerKind::PodGroup, "", &json!({"metadata": {"name": "train"}, "spec": spec}))
    };
    let memberships = [of_owner(OwnerKind::PodGroup, Size::Undeclared)];
    for (keys, narrowest) in [
        (["zone", "example.com/rack"], "rack"),
        (["rack", "zone"], "rack"),
        (["kubernetes.io/hostname", "zone"], "node"),
    ] {
        let facts = of(keys);
        assert_eq!(terms(&memberships, OwnerState::Read(&facts), None).level, level(narrowest, true));
    }
    let told = faults(&memberships, OwnerState::Read(&of(["rack", "zoen"])), None);
    insta::assert_snapshot!(told.join("\n"), @r#"spec.schedulingConstraints.topology of PodGroup train: "zoen" is not among the levels given with --fabric; there are zone, rack, node; did you mean `zone`?"#);
}
