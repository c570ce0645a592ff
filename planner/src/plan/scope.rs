//! Scopes that hold a gang: the node, the levels of the fabric from the smallest domain up, the cluster; and the bounds
//! that its terms set.

use gantry_gang::protocol::PlanRequest;
use gantry_gang::{DomainIx, Levels};

use super::fill::Anchors;
use super::slices::Slices;
use super::survey::Survey;
use crate::snapshot::NodeIx;

/// What holds a gang, from the narrowest to the widest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    Node,
    /// One domain of a level: an index into the levels.
    Level(usize),
    Cluster,
}

/// One domain of a scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FabricPart {
    Node(NodeIx),
    Domain(DomainIx),
}

/// Where a gang may be, by its terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bounds {
    /// The narrower the better.
    Free,
    /// Within one domain of this scope, or wider if that is not required.
    Within(Scope, bool),
    /// Each slice in one domain of a level, or else without slices if that is not required.
    Sliced(Slices, bool),
    /// A required level that is not configured.
    Unknown,
}

impl Bounds {
    pub(super) fn of(levels: &Levels, wanted: &PlanRequest) -> Self {
        let wish = wanted.terms.level.as_ref();
        let scope = wish.and_then(|wish| find(levels, &wish.level));
        let required = wish.is_some_and(|wish| wish.required);
        match (wish, scope, wanted.terms.slice) {
            (Some(_), None, _) if required => Self::Unknown,
            (_, Some(Scope::Level(level)), Some(size)) if size > 0 => {
                Self::Sliced(Slices { size, level }, required)
            }
            (None, _, Some(size)) if size > 0 && !levels.0.is_empty() => {
                let level = levels.0.len() - 1;
                Self::Sliced(Slices { size, level }, true)
            }
            (_, Some(scope), _) => Self::Within(scope, required),
            (_, None, _) => Self::Free,
        }
    }
}

/// A level by its name or its label.
fn find(levels: &Levels, name: &str) -> Option<Scope> {
    let level = levels.0.iter().position(|level| *level.name == *name || *level.label == *name);
    match (level, name) {
        (Some(level), _) => Some(Scope::Level(level)),
        (None, "node" | "kubernetes.io/hostname") => Some(Scope::Node),
        (None, "cluster") => Some(Scope::Cluster),
        (None, _) => None,
    }
}

/// All scopes up to one, the narrowest first. Levels without labelled nodes are left out.
pub(super) fn scopes(survey: &Survey<'_>, widest: Scope) -> Vec<Scope> {
    let fabric = survey.fabric;
    let known = |level: usize| fabric.domains.iter().any(|domain| domain.level == Some(level));
    let mut scopes = vec![Scope::Node];
    scopes.extend((0..fabric.levels.0.len()).rev().filter(|level| known(*level)).map(Scope::Level));
    scopes.push(Scope::Cluster);
    let end = scopes.iter().position(|scope| *scope == widest);
    // A required level without a domain leaves the node: every node is a domain by itself.
    scopes.truncate(end.map_or(1, |end| end + 1));
    scopes
}

/// The places of a scope. If the gang has members already, only the place that holds them all.
pub(super) fn places(survey: &Survey<'_>, anchors: &Anchors, scope: Scope) -> Vec<FabricPart> {
    let domains = || (0u32..).zip(&survey.fabric.domains);
    match scope {
        Scope::Node => {
            let nodes = 0..u32::try_from(survey.input.snapshot.nodes.len()).unwrap_or(u32::MAX);
            let nodes = nodes.map(NodeIx).filter(|node| anchors.nodes.iter().all(|other| other == node));
            nodes.map(FabricPart::Node).collect()
        }
        Scope::Level(level) => domains()
            .filter(|(number, domain)| domain.level == Some(level) && anchors.all_in(DomainIx(*number)))
            .map(|(number, _)| FabricPart::Domain(DomainIx(number)))
            .collect(),
        Scope::Cluster => domains()
            .filter(|(_, domain)| domain.parent.is_none())
            .map(|(number, _)| FabricPart::Domain(DomainIx(number)))
            .collect(),
    }
}
