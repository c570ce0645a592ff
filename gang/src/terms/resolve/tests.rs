//! What the words of a gang come to: one file per concern, and what they share.

mod levels;
mod numbers;
mod properties;
mod roles;
mod slices;
mod words;

use super::*;
use crate::fabric::Level;
use crate::key::{GangKey, Integration};
use crate::membership::{Membership, OwnerKind, OwnerRef, Size};

fn levels() -> Levels {
    let level = |name: &str, label: &str| Level { name: name.into(), label: label.into() };
    Levels(vec![level("zone", "topology.kubernetes.io/zone"), level("rack", "example.com/rack")])
}

fn resolved(memberships: &[Membership], owner: OwnerState<'_>, object: Option<&GangSpec>) -> TermsResolution {
    by_default(&PodDeclarations::by(memberships), owner, object)
}

/// What is said comes to this where the rest is by default.
fn by_default(
    declared: &PodDeclarations,
    owner: OwnerState<'_>,
    object: Option<&GangSpec>,
) -> TermsResolution {
    let levels = levels();
    let ceilings = Ceilings::default();
    resolve(declared, owner, object, &defaults(&levels, &ceilings))
}

fn defaults<'a>(levels: &'a Levels, ceilings: &'a Ceilings) -> Defaults<'a> {
    Defaults {
        arrival: Duration::from_secs(60),
        restart_hold: Duration::from_secs(120),
        repair: Repair::Hold,
        levels,
        ceilings,
    }
}

fn terms(memberships: &[Membership], owner: OwnerState<'_>, object: Option<&GangSpec>) -> Terms {
    match resolved(memberships, owner, object) {
        TermsResolution::Terms(terms) => terms,
        other => panic!("{other:?}"),
    }
}

fn faults(memberships: &[Membership], owner: OwnerState<'_>, object: Option<&GangSpec>) -> Vec<String> {
    match resolved(memberships, owner, object) {
        TermsResolution::Invalid(faults) => faults.iter().map(ToString::to_string).collect(),
        other => panic!("{other:?}"),
    }
}

fn not_yet(memberships: &[Membership], owner: OwnerState<'_>) -> String {
    match resolved(memberships, owner, None) {
        TermsResolution::NotYet(words) => words.to_string(),
        other => panic!("{other:?}"),
    }
}

fn membership(size: Size) -> Membership {
    Membership {
        key: GangKey {
            namespace: "ml".into(),
            name: "train".into(),
            integration: Integration::Annotation,
            incarnation: "".into(),
        },
        size,
        size_source: if size == Size::Undeclared { "" } else { "annotation gantry.dev/gang-min" },
        owner: None,
        rank: None,
        role: "".into(),
        options: GangOptions::default(),
        creator: None,
        revision: None,
        also: Vec::new(),
        maker: None,
        made_by: None,
        tree: Vec::new(),
        faults: Vec::new(),
    }
}

fn stated(min: u32) -> Membership {
    membership(Size::Stated { min, total: None })
}

fn of_owner(kind: OwnerKind, size: Size) -> Membership {
    Membership {
        owner: Some(OwnerRef { kind, namespace: "ml".into(), name: "train".into(), part: "".into() }),
        ..membership(size)
    }
}

fn wishing(min: u32, options: GangOptions) -> Membership {
    Membership { options, ..stated(min) }
}

fn facts(min: u32, total: Option<u32>) -> OwnerFacts {
    OwnerFacts { min: Some(min), total, source: "spec.minMember".into(), ..OwnerFacts::default() }
}

fn level(name: &str, required: bool) -> Option<TopologyRequest> {
    Some(TopologyRequest { level: name.into(), required })
}
