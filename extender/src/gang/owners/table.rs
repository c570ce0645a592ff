//! Which owners are wanted and what is known of each: what to watch, whom to ask the API server about, and what is news. A state machine
//! without I/O or clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_gang::protocol::WatchedOwner;
use gantry_gang::{OwnerFacts, OwnerKind, OwnerRef, integrations};
use serde_json::Value;

/// How long a kind is watched on after the last gang that needed it: the next one is soon there.
const LINGER: Duration = Duration::from_secs(300);
/// Before an owner that could not be read is asked for again.
const AGAIN: Duration = Duration::from_secs(1);

/// An object: its kind, namespace and name.
pub(super) type Place = (OwnerKind, Arc<str>, Arc<str>);

/// What is known of an owner, by part.
pub(super) type Told = Vec<(OwnerRef, Option<Arc<OwnerFacts>>)>;

/// See the head of the module.
#[derive(Debug, Default)]
pub(super) struct OwnerTable {
    owners: BTreeMap<Place, Owner>,
    kinds: BTreeMap<OwnerKind, Kind>,
}

#[derive(Debug, Default)]
struct Owner {
    parts: BTreeSet<Arc<str>>,
    known: Known,
    /// What was last told of it is what it says, and not that it is not there.
    read: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Nothing since it was wanted, or since the last list began.
    #[default]
    Nothing,
    /// The API server is being asked.
    Asked,
    /// The API server could not answer; it is asked again then.
    Failed(Instant),
    /// What it is, or that it is not.
    Told,
}

#[derive(Debug)]
struct Kind {
    state: State,
    /// Since when no gang has needed it.
    idle: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Its first list is not complete.
    Listing,
    /// Its watch goes on.
    Live,
    /// It is not served, or may not be read.
    Absent,
}

/// Kinds to begin and to end watching.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    pub(super) begin: Vec<OwnerKind>,
    pub(super) end: Vec<OwnerKind>,
}

impl OwnerTable {
    /// Other owners are wanted.
    pub(super) fn want(&mut self, now: Instant, wanted: Vec<WatchedOwner>) -> (Changes, Told) {
        let mut parts: BTreeMap<Place, (BTreeSet<Arc<str>>, bool)> = BTreeMap::new();
        for WatchedOwner { owner, unread } in wanted {
            let place = (owner.kind, owner.namespace, owner.name);
            let (parts, any_unread) = parts.entry(place).or_default();
            parts.insert(owner.part);
            *any_unread |= unread;
        }
        self.owners.retain(|place, _| parts.contains_key(place));
        let mut changes = Changes::default();
        let mut told = Told::new();
        for (place, (parts, unread)) in parts {
            let kind = self.kinds.entry(place.0).or_insert_with(|| {
                changes.begin.push(place.0);
                Kind { state: State::Listing, idle: None }
            });
            kind.idle = None;
            let absent = kind.state == State::Absent;
            let owner = self.owners.entry(place.clone()).or_default();
            // It was told, and has been forgotten since, for no gang went by it for a moment.
            let forgotten = unread && owner.known == Known::Told;
            if owner.parts == parts && !forgotten {
                continue;
            }
            // Objects are not kept: what another part of it says has to be asked.
            let new = forgotten || parts.difference(&owner.parts).next().is_some();
            owner.parts = parts;
            if absent {
                owner.tell(&place, None, &mut told);
            } else if new && owner.known == Known::Told {
                owner.known = Known::Nothing;
            }
        }
        for (kind, state) in &mut self.kinds {
            let needed = self.owners.keys().any(|(needed, ..)| needed == kind);
            if !needed && now.duration_since(*state.idle.get_or_insert(now)) >= LINGER {
                changes.end.push(*kind);
            }
        }
        self.kinds.retain(|kind, _| !changes.end.contains(kind));
        (changes, told)
    }

    /// Owners that no list or watch has brought: the API server is to be asked for them now.
    pub(super) fn ask(&mut self, now: Instant) -> Vec<Place> {
        let mut places = Vec::new();
        for (place, owner) in &mut self.owners {
            let live = self.kinds.get(&place.0).is_some_and(|kind| kind.state == State::Live);
            let due = match owner.known {
                Known::Nothing => true,
                Known::Failed(until) => now >= until,
                Known::Asked | Known::Told => false,
            };
            if live && due {
                owner.known = Known::Asked;
                places.push(place.clone());
            }
        }
        places
    }

    /// How asking ended: `Err` if nobody knows. What a watch has brought in the meantime is newer.
    pub(super) fn answered(
        &mut self,
        now: Instant,
        place: &Place,
        object: Result<Option<Value>, ()>,
    ) -> Told {
        let mut told = Told::new();
        if let Some(owner) = self.owners.get_mut(place).filter(|owner| owner.known == Known::Asked) {
            match object {
                Ok(object) => owner.tell(place, object.as_ref(), &mut told),
                Err(()) => owner.known = Known::Failed(now + AGAIN),
            }
        }
        told
    }

    /// A list or watch brought an object.
    pub(super) fn seen(&mut self, place: &Place, object: &Value) -> Told {
        self.tell(place, Some(object))
    }

    /// A watch brought the end of an object.
    pub(super) fn gone(&mut self, place: &Place) -> Told {
        self.tell(place, None)
    }

    fn tell(&mut self, place: &Place, object: Option<&Value>) -> Told {
        let mut told = Told::new();
        if let Some(owner) = self.owners.get_mut(place) {
            owner.tell(place, object, &mut told);
        }
        told
    }

    /// A list begins: what it does not bring is to be asked for.
    pub(super) fn list_begins(&mut self, kind: OwnerKind) {
        for (_, owner) in self.owners.iter_mut().filter(|(place, _)| place.0 == kind) {
            owner.known = Known::Nothing;
        }
    }

    /// A list is complete.
    pub(super) fn list_ends(&mut self, kind: OwnerKind) {
        self.set(kind, State::Live);
    }

    /// A kind is not served, or may not be read: none of its objects exists for us but those that were read before. They are not gone for
    /// that: a right may be missing for a moment.
    pub(super) fn absent(&mut self, kind: OwnerKind) -> Told {
        self.set(kind, State::Absent);
        let mut told = Told::new();
        let owners = self.owners.iter_mut().filter(|(place, _)| place.0 == kind);
        for (place, owner) in owners.filter(|(_, owner)| !owner.read) {
            owner.tell(place, None, &mut told);
        }
        told
    }

    fn set(&mut self, kind: OwnerKind, state: State) {
        if let Some(kind) = self.kinds.get_mut(&kind) {
            kind.state = state;
        }
    }
}

impl Owner {
    fn tell(&mut self, (kind, namespace, name): &Place, object: Option<&Value>, told: &mut Told) {
        self.known = Known::Told;
        self.read = object.is_some();
        for part in &self.parts {
            let owner = OwnerRef {
                kind: *kind,
                namespace: Arc::clone(namespace),
                name: Arc::clone(name),
                part: Arc::clone(part),
            };
            let facts = object.map(|object| Arc::new(integrations::read(*kind, part, object)));
            told.push((owner, facts));
        }
    }
}
