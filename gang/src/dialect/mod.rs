//! Reads what pods and their owners say of gangs: one file per convention, asked in the order of [`Dialect`]. Never infers a gang that
//! nobody asked for. Pure.

mod grouped;
mod job;
mod jobset;
mod kubeflow;
mod lws;
mod native;
mod own;
mod owner;
mod rank;
mod ray;
mod slip;
pub(crate) mod value;
mod view;

use std::sync::Arc;

use crate::claim::{Claim, OwnerFacts, OwnerKind, OwnerRef, Size, Wish};
use crate::key::Dialect;
use crate::terms::Fault;

pub use owner::{Api, STATUS, api, read};
pub use value::is_object_name;
pub use view::{Controller, PodView, WorkloadRef, reads};

/// What a pod says of the gang it belongs to; `None` if it belongs to none. The first convention that says something wins; our own
/// annotations on the pod go before its numbers and wishes whichever it is.
pub fn claim(pod: &PodView<'_>) -> Option<Claim> {
    let own = own::read(pod);
    if own.opted_out {
        let stray = own.stray(pod)?;
        return Some(own.over(pod, stray, &[]));
    }
    let mut found = READERS.iter().filter_map(|read| read(pod, &own));
    let first = found.next().or_else(|| own.stray(pod))?;
    let others: Vec<Found<'_>> = found.collect();
    Some(own.over(pod, first, &others))
}

/// The claim once its owner has been read: where each role is a gang of its own ([`OwnerFacts::apart`]), the gang is named after the role.
/// Any other claim stays as it is.
pub fn settle(claim: &Claim, owner: &OwnerFacts) -> Option<Claim> {
    if !owner.apart || claim.role.is_empty() {
        return None;
    }
    let suffix = format!("/{}", claim.role);
    if claim.key.name.ends_with(&suffix) {
        return None;
    }
    let mut settled = claim.clone();
    settled.key.name = format!("{}{suffix}", claim.key.name).into();
    Some(settled)
}

/// The readers, in the order in which they are asked.
const READERS: [Reader; 13] = [
    native::pod_group,
    native::workload,
    own::gang,
    grouped::coscheduling,
    grouped::volcano,
    grouped::koordinator,
    grouped::kueue,
    grouped::kai,
    lws::gang,
    jobset::gang,
    kubeflow::gang,
    ray::gang,
    job::gang,
];

type Reader = for<'a> fn(&PodView<'a>, &own::Own<'a>) -> Option<Found<'a>>;

/// What one convention says of a pod. Whatever of it is free text is short and has a form: annotations and owner references may hold
/// anything.
#[derive(Debug, Clone)]
struct Found<'a> {
    dialect: Dialect,
    name: Arc<str>,
    incarnation: Arc<str>,
    size: Size,
    size_said: &'static str,
    owner: Option<OwnerRef>,
    rank: Option<u32>,
    role: &'a str,
    wish: Wish,
    faults: Vec<Fault>,
}

impl<'a> Found<'a> {
    /// A gang by a mere name that stands at `place`, and nothing more.
    fn named(dialect: Dialect, place: &str, name: &str) -> Self {
        let mut found = Self::new(dialect, name);
        found.hold(value::word(place, name), name);
        found
    }

    /// The gang of an object that `place` names, and that says the rest. Where no object can have that name there is none to be read.
    fn of_object(pod: &PodView<'_>, dialect: Dialect, kind: OwnerKind, place: &str, name: &str) -> Self {
        let mut found = Self::new(dialect, name);
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

    /// A word besides the name that stands at `place`, such as a role: nothing where it is none.
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

    fn new(dialect: Dialect, name: &str) -> Self {
        Self {
            dialect,
            name: name.into(),
            incarnation: "".into(),
            size: Size::Unsaid,
            size_said: "",
            owner: None,
            rank: None,
            role: "",
            wish: Wish::default(),
            faults: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
