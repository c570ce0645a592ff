//! Reads what pods and their owners declare of gangs: one file per convention, tried in the order of [`Integration`]. Never infers a gang
//! that is not declared. Pure.

mod controllers;
mod grouped;
mod own;
mod owner;
mod rank;
pub(crate) mod value;
mod view;

use std::sync::Arc;

use crate::key::Integration;
use crate::membership::{GangOptions, Membership, OwnerFacts, OwnerKind, OwnerRef, Size};
use crate::terms::Fault;

pub use owner::{Api, STATUS, api, read};
pub use value::{is_object_name, not_one_of, shown};
pub use view::{Controller, PodView, WorkloadRef, reads};

/// What a pod declares of the gang it belongs to; `None` if it belongs to none. The first convention that finds a gang wins; our own
/// annotations on the pod go before its numbers and wishes whichever it is.
pub fn membership(pod: &PodView<'_>) -> Option<Membership> {
    let own = own::read(pod);
    if own.opted_out {
        let stray = own.stray(pod)?;
        return Some(own.over(pod, stray, &[]));
    }
    let mut found = READERS.iter().filter_map(|read| read(pod, &own));
    let first = found.next().or_else(|| own.stray(pod))?;
    let others: Vec<FoundMembership<'_>> = found.collect();
    Some(own.over(pod, first, &others))
}

/// The claim once its owner has been read: where each role is a gang of its own ([`OwnerFacts::apart`]), the gang is named after the role.
/// Any other claim stays as it is.
pub fn settle(membership: &Membership, owner: &OwnerFacts) -> Option<Membership> {
    if !owner.apart || membership.role.is_empty() {
        return None;
    }
    let suffix = format!("/{}", membership.role);
    if membership.key.name.ends_with(&suffix) {
        return None;
    }
    let mut settled = membership.clone();
    settled.key.name = format!("{}{suffix}", membership.key.name).into();
    Some(settled)
}

/// The claim of a pod whose PodGroup belongs to a tree of groups, from the root down to the PodGroup: the tree is one gang, and the PodGroup
/// a role in it.
pub fn in_tree(membership: &Membership, tree: Vec<OwnerRef>) -> Option<Membership> {
    let (root, group) = (tree.first()?, tree.last()?);
    if membership.tree == tree || tree.len() < 2 {
        return None;
    }
    let mut settled = membership.clone();
    // A PodGroup may have the same name.
    settled.key.name = format!("{}/{}", api(root.kind).kind, root.name).into();
    settled.role = Arc::clone(&group.name);
    settled.tree = tree;
    Some(settled)
}

/// The readers, in the order in which they are asked.
const READERS: [Reader; 14] = [
    controllers::pod_group,
    controllers::workload,
    own::gang,
    grouped::coscheduling,
    grouped::volcano,
    grouped::koordinator,
    grouped::kueue,
    grouped::kai,
    grouped::grove,
    controllers::leader_worker_set,
    controllers::job_set,
    controllers::training_job,
    controllers::ray_cluster,
    controllers::job,
];

type Reader = for<'a> fn(&PodView<'a>, &own::OwnAnnotations<'a>) -> Option<FoundMembership<'a>>;

/// What one convention finds on a pod. Whatever of it is free text is short and has a form: annotations and owner references may hold
/// anything.
#[derive(Debug, Clone)]
struct FoundMembership<'a> {
    integration: Integration,
    name: Arc<str>,
    incarnation: Arc<str>,
    size: Size,
    size_source: &'static str,
    owner: Option<OwnerRef>,
    /// The object that creates the pod, where it does not state the size of this gang.
    creator: Option<OwnerRef>,
    rank: Option<u32>,
    role: &'a str,
    options: GangOptions,
    faults: Vec<Fault>,
}

impl<'a> FoundMembership<'a> {
    /// A gang by a mere name that stands at `place`, and nothing more.
    fn named(integration: Integration, place: &str, name: &str) -> Self {
        let mut found = Self::new(integration, name);
        found.hold(value::word(place, name), name);
        found
    }

    /// The gang of an object that `place` names, and that states the rest. Where no object can have that name there is none to be read.
    fn of_object(
        pod: &PodView<'_>,
        integration: Integration,
        kind: OwnerKind,
        place: &str,
        name: &str,
    ) -> Self {
        let mut found = Self::new(integration, name);
        found.hold(value::object_name(place, api(kind).kind, name), name);
        found.owner = found.faults.is_empty().then(|| pod.beside(kind, name));
        found
    }

    fn hold(&mut self, legal: Result<(), Fault>, name: &str) {
        if let Err(wrong) = legal {
            self.faults.push(wrong);
            self.name = value::stand_in(name).into();
        }
    }

    /// A word at `place` in addition to the name, such as a role: nothing where it is none.
    fn word(&mut self, place: &str, text: Option<&'a str>) -> &'a str {
        let text = text.unwrap_or_default();
        match value::word(place, text) {
            Ok(()) => text,
            Err(_) if text.is_empty() => text,
            Err(wrong) => {
                self.faults.push(wrong);
                ""
            }
        }
    }

    /// A minimum that stands on the pod, if it does.
    fn states(&mut self, place: &'static str, text: Option<&str>) {
        if let Some(min) = self.read(place, text) {
            self.size = Size::Stated { min, total: None };
            self.size_source = place;
        }
    }

    /// A number of members; absent is none, anything else that is no number is a fault.
    fn read(&mut self, place: &str, text: Option<&str>) -> Option<u32> {
        let read: Result<u32, Fault> = value::number(place, text?, 1..=value::MOST_MEMBERS);
        read.map_err(|wrong| self.faults.push(wrong)).ok()
    }

    /// The pod's place by a convention that was passed over. What names a gang seldom has an order of its own: the controller that makes
    /// the pods has.
    fn rank_among_all(&self, pod: &PodView<'_>) -> Option<u32> {
        match self.integration {
            Integration::LeaderWorkerSet => controllers::rank_in_set(pod),
            _ => self.rank,
        }
    }

    fn new(integration: Integration, name: &str) -> Self {
        Self {
            integration,
            name: name.into(),
            incarnation: "".into(),
            size: Size::Undeclared,
            size_source: "",
            owner: None,
            creator: None,
            rank: None,
            role: "",
            options: GangOptions::default(),
            faults: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
