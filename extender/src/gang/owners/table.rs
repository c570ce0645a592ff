//! The wanted owners and what is known of each: which kinds to watch, which owners to read, and what has changed. A state
//! machine without I/O or clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_gang::protocol::WatchedOwner;
use gantry_gang::{OwnerFacts, OwnerKind, OwnerRef, integrations};
use serde_json::Value;

/// Time for which a kind is watched after its last gang has ended: another one may follow soon.
const LINGER: Duration = Duration::from_secs(300);
/// Pause before an owner that could not be read is read again.
const AGAIN: Duration = Duration::from_secs(1);

/// The kind, namespace and name of an object.
pub(super) type OwnerKey = (OwnerKind, Arc<str>, Arc<str>);

/// The facts of an owner, by part; `None` if it does not exist.
pub(super) type Updates = Vec<(OwnerRef, Option<Arc<OwnerFacts>>)>;

/// The wanted owners.
#[derive(Debug, Default)]
pub(super) struct OwnerTable {
    owners: BTreeMap<OwnerKey, Owner>,
    kinds: BTreeMap<OwnerKind, Kind>,
}

#[derive(Debug, Default)]
struct Owner {
    parts: BTreeSet<Arc<str>>,
    known: LookupState,
    /// The last update has its facts, and does not report it missing.
    read: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum LookupState {
    /// Nothing since it was first wanted, or since the last list began.
    #[default]
    Nothing,
    /// A request for it is running.
    Requested,
    /// It could not be read, and is read again at that time.
    Failed(Instant),
    /// Its facts, or that it does not exist.
    Published,
}

#[derive(Debug)]
struct Kind {
    state: State,
    /// The time since which no gang needs it.
    idle: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Its first list is not complete.
    Listing,
    /// It is watched.
    Live,
    /// The API server does not serve it, or forbids to read it.
    Absent,
}

/// Kinds to begin and to end watching.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct WatchChanges {
    pub(super) begin: Vec<OwnerKind>,
    pub(super) end: Vec<OwnerKind>,
}

impl OwnerTable {
    /// Sets the wanted owners.
    pub(super) fn want(&mut self, now: Instant, wanted: Vec<WatchedOwner>) -> (WatchChanges, Updates) {
        let mut parts: BTreeMap<OwnerKey, (BTreeSet<Arc<str>>, bool)> = BTreeMap::new();
        for WatchedOwner { owner, unread } in wanted {
            let place = (owner.kind, owner.namespace, owner.name);
            let (parts, any_unread) = parts.entry(place).or_default();
            parts.insert(owner.part);
            *any_unread |= unread;
        }
        self.owners.retain(|place, _| parts.contains_key(place));
        let mut changes = WatchChanges::default();
        let mut updates = Updates::new();
        for (place, (parts, unread)) in parts {
            let kind = self.kinds.entry(place.0).or_insert_with(|| {
                changes.begin.push(place.0);
                Kind { state: State::Listing, idle: None }
            });
            kind.idle = None;
            let absent = kind.state == State::Absent;
            let owner = self.owners.entry(place.clone()).or_default();
            // Its facts were published and then dropped, because no gang needed them for a moment.
            let forgotten = unread && owner.known == LookupState::Published;
            if owner.parts == parts && !forgotten {
                continue;
            }
            // Objects are not kept: for another part the object must be read again.
            let new = forgotten || parts.difference(&owner.parts).next().is_some();
            owner.parts = parts;
            if absent {
                owner.publish(&place, None, &mut updates);
            } else if new && owner.known == LookupState::Published {
                owner.known = LookupState::Nothing;
            }
        }
        for (kind, state) in &mut self.kinds {
            let needed = self.owners.keys().any(|(needed, ..)| needed == kind);
            if !needed && now.duration_since(*state.idle.get_or_insert(now)) >= LINGER {
                changes.end.push(*kind);
            }
        }
        self.kinds.retain(|kind, _| !changes.end.contains(kind));
        (changes, updates)
    }

    /// The owners to read now, because no list or watch contained them.
    pub(super) fn take_unread(&mut self, now: Instant) -> Vec<OwnerKey> {
        let mut places = Vec::new();
        for (place, owner) in &mut self.owners {
            let live = self.kinds.get(&place.0).is_some_and(|kind| kind.state == State::Live);
            let due = match owner.known {
                LookupState::Nothing => true,
                LookupState::Failed(until) => now >= until,
                LookupState::Requested | LookupState::Published => false,
            };
            if live && due {
                owner.known = LookupState::Requested;
                places.push(place.clone());
            }
        }
        places
    }

    /// The result of a request; `Err` if it is unknown. An event of a watch in the meantime is newer.
    pub(super) fn read_ended(
        &mut self,
        now: Instant,
        place: &OwnerKey,
        object: Result<Option<Value>, ()>,
    ) -> Updates {
        let mut updates = Updates::new();
        if let Some(owner) = self.owners.get_mut(place).filter(|owner| owner.known == LookupState::Requested)
        {
            match object {
                Ok(object) => owner.publish(place, object.as_ref(), &mut updates),
                Err(()) => owner.known = LookupState::Failed(now + AGAIN),
            }
        }
        updates
    }

    /// A list or watch contains an object.
    pub(super) fn seen(&mut self, place: &OwnerKey, object: &Value) -> Updates {
        self.publish(place, Some(object))
    }

    /// A watch reports the deletion of an object.
    pub(super) fn gone(&mut self, place: &OwnerKey) -> Updates {
        self.publish(place, None)
    }

    fn publish(&mut self, place: &OwnerKey, object: Option<&Value>) -> Updates {
        let mut updates = Updates::new();
        if let Some(owner) = self.owners.get_mut(place) {
            owner.publish(place, object, &mut updates);
        }
        updates
    }

    /// A list begins. Owners that it does not contain are read afterwards.
    pub(super) fn list_begins(&mut self, kind: OwnerKind) {
        for (_, owner) in self.owners.iter_mut().filter(|(place, _)| place.0 == kind) {
            owner.known = LookupState::Nothing;
        }
    }

    /// A list is complete.
    pub(super) fn list_ends(&mut self, kind: OwnerKind) {
        self.set(kind, State::Live);
    }

    /// The API server does not serve a kind, or forbids to read it. Objects that were read before keep their facts, because
    /// a right may be missing for a moment only; all others count as missing.
    pub(super) fn absent(&mut self, kind: OwnerKind) -> Updates {
        self.set(kind, State::Absent);
        let mut updates = Updates::new();
        let owners = self.owners.iter_mut().filter(|(place, _)| place.0 == kind);
        for (place, owner) in owners.filter(|(_, owner)| !owner.read) {
            owner.publish(place, None, &mut updates);
        }
        updates
    }

    fn set(&mut self, kind: OwnerKind, state: State) {
        if let Some(kind) = self.kinds.get_mut(&kind) {
            kind.state = state;
        }
    }
}

impl Owner {
    fn publish(&mut self, (kind, namespace, name): &OwnerKey, object: Option<&Value>, updates: &mut Updates) {
        self.known = LookupState::Published;
        self.read = object.is_some();
        for part in &self.parts {
            let owner = OwnerRef {
                kind: *kind,
                namespace: Arc::clone(namespace),
                name: Arc::clone(name),
                part: Arc::clone(part),
            };
            let facts = object.map(|object| Arc::new(integrations::read(*kind, part, object)));
            updates.push((owner, facts));
        }
    }
}
