//! Roles and sub-groups: those that are not there, and those that are gangs of their own.

use serde_json::json;

use super::super::*;
use super::{facts, of_owner, resolved, terms};
use crate::integrations::{read, settle};
use crate::membership::{Membership, OwnerKind, Size};

#[test]
fn a_sub_group_of_kai_that_its_pod_group_does_not_have_is_told() {
    let told = |groups: serde_json::Value, names: &[&str]| {
        let spec = json!({"minMember": 2, "subGroups": groups});
        let facts = read(OwnerKind::KaiPodGroup, "", &json!({"metadata": {"name": "train"}, "spec": spec}));
        let memberships: Vec<Membership> = names
            .iter()
            .map(|name| Membership {
                role: (*name).into(),
                ..of_owner(OwnerKind::KaiPodGroup, Size::Undeclared)
            })
            .collect();
        match resolved(&memberships, OwnerState::Read(&facts), None) {
            TermsResolution::Invalid(faults) => faults.iter().map(ToString::to_string).collect(),
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
        [format!("{place} prefill, {there}"), format!("{place} wrokers, {there}; did you mean `workers`?")]
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
fn where_roles_start_apart_each_is_a_gang_of_its_own() {
    let owner = OwnerFacts {
        by_role: vec![("driver".into(), 1), ("workers".into(), 8)],
        apart: true,
        ..facts(9, Some(9))
    };
    let read = OwnerState::Read(&owner);
    let of = |role: &str, size| Membership { role: role.into(), ..of_owner(OwnerKind::JobSet, size) };
    let (driver, worker) = (of("driver", Size::Undeclared), of("workers", Size::Undeclared));
    let settled = settle(&worker, &owner).unwrap();
    assert_eq!(&*settled.key.name, "train/workers");
    assert_eq!(settle(&settled, &owner), None, "once");
    assert_eq!(settle(&worker, &facts(9, None)), None, "only where they are apart");
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
    let for_all = of("workers", Size::Stated { min: 9, total: Some(9) });
    assert_eq!(terms(&[for_all], read, None).min, 8, "no more than there are of the role");
}
