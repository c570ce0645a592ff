//! What there is to tell of gangs whose objects are not there yet: it is told as soon as they are. Bounded; writes nothing.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::{Message, Name, WAITING};

/// By gang, the last of each reason in the order in which they came, and until when.
#[derive(Debug, Default)]
pub(super) struct Early(BTreeMap<Name, (Vec<Message>, Instant)>);

impl Early {
    /// Keeps a message. There are few reasons, so there are few of one gang.
    pub(super) fn add(&mut self, name: Name, message: Message, until: Instant) {
        if self.0.len() >= WAITING && !self.0.contains_key(&name) {
            return;
        }
        let (messages, end) = self.0.entry(name).or_insert_with(|| (Vec::new(), until));
        messages.retain(|known| known.reason != message.reason);
        messages.push(message);
        *end = until;
    }

    /// The gangs of which there is something to tell.
    pub(super) fn names(&self) -> impl Iterator<Item = &Name> {
        self.0.keys()
    }

    /// Takes what there is to tell of a gang.
    pub(super) fn take(&mut self, name: &Name) -> Vec<Message> {
        self.0
            .remove(name)
            .map(|(messages, _)| messages)
            .unwrap_or_default()
    }

    /// Leaves out what nobody can be told: the object was never made, or is gone, and the next of the name is another gang.
    pub(super) fn forget(&mut self, now: Instant) {
        self.0.retain(|_, (_, until)| now < *until);
    }
}
