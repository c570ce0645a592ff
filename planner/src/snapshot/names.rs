//! Node names and their numbers. A filter looks up every name of the cluster, so the layout serves that: one array of
//! hashes and numbers, one string of all names in the order of their numbers. A lookup touches two cache lines, and
//! names asked for in about the order of their numbers are read almost in sequence.

use foldhash::fast::RandomState;
use gantry_api::NodeName;
use std::hash::BuildHasher;

use super::NodeIx;

/// Node names and numbers.
#[derive(Debug, Clone, Default)]
pub struct Names {
    by_number: Vec<NodeName>,
    /// All names, one after the other.
    text: String,
    /// Where each ends in `text`.
    ends: Vec<u32>,
    /// Open addressing, at most half full; a power of two, or nothing.
    slots: Vec<Slot>,
    hasher: RandomState,
}

/// The upper half of a name's hash and its number, or [`Slot::EMPTY`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slot {
    tag: u32,
    number: u32,
}

impl Slot {
    const EMPTY: Self = Self { tag: 0, number: u32::MAX };
}

impl Names {
    /// The number of a name.
    pub fn get(&self, name: &str) -> Option<NodeIx> {
        let (tag, mut at) = self.place(name);
        loop {
            let slot = *self.slots.get(at)?;
            if slot == Slot::EMPTY {
                return None;
            }
            if slot.tag == tag && self.text_of(slot.number) == Some(name) {
                return Some(NodeIx(slot.number));
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    /// As [`Self::get`], for a name that probably has number `expected`. kube-scheduler lists nodes in much the same
    /// order every time, and a right guess needs no hash.
    pub fn get_expected(&self, name: &str, expected: NodeIx) -> Option<NodeIx> {
        if self.text_of(expected.0) == Some(name) { Some(expected) } else { self.get(name) }
    }

    pub fn name(&self, node: NodeIx) -> Option<&NodeName> {
        self.by_number.get(node.0 as usize)
    }

    /// The number of a name, a new one if it has none.
    pub fn number(&mut self, name: &NodeName) -> NodeIx {
        if let Some(found) = self.get(name.as_str()) {
            return found;
        }
        if self.slots.len() < 2 * (self.by_number.len() + 1) {
            self.slots = vec![Slot::EMPTY; (2 * self.slots.len()).max(64)];
            for number in 0..self.by_number.len() {
                let (tag, at) = self.place(self.by_number[number].as_str());
                self.put(tag, at, number);
            }
        }
        let number = self.by_number.len();
        self.text.push_str(name.as_str());
        self.ends.push(u32::try_from(self.text.len()).unwrap_or(u32::MAX));
        self.by_number.push(name.clone());
        let (tag, at) = self.place(name.as_str());
        self.put(tag, at, number);
        NodeIx(u32::try_from(number).unwrap_or(u32::MAX))
    }

    /// How many numbers were given out.
    pub fn len(&self) -> usize {
        self.by_number.len()
    }

    /// Whether no node was ever known.
    pub fn is_empty(&self) -> bool {
        self.by_number.is_empty()
    }

    /// All names in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (NodeIx, &NodeName)> {
        (0..).map(NodeIx).zip(&self.by_number)
    }

    fn text_of(&self, number: u32) -> Option<&str> {
        let number = number as usize;
        let begin = match number.checked_sub(1) {
            Some(before) => *self.ends.get(before)? as usize,
            None => 0,
        };
        self.text.get(begin..*self.ends.get(number)? as usize)
    }

    #[expect(clippy::cast_possible_truncation, reason = "the two halves of the hash")]
    fn place(&self, name: &str) -> (u32, usize) {
        let hash = self.hasher.hash_one(name);
        let mask = self.slots.len().wrapping_sub(1);
        ((hash >> 32) as u32, hash as usize & mask)
    }

    fn put(&mut self, tag: u32, mut at: usize, number: usize) {
        while self.slots[at] != Slot::EMPTY {
            at = (at + 1) & (self.slots.len() - 1);
        }
        self.slots[at] = Slot { tag, number: u32::try_from(number).unwrap_or(u32::MAX) };
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn names_keep_the_number_they_were_given(names in prop::collection::vec("[a-d]{0,4}", 0..200), other in "[a-e]{0,4}") {
            let mut table = Names::default();
            let mut known: HashMap<String, NodeIx> = HashMap::new();
            prop_assert_eq!(table.get(&other), None);
            for name in names {
                let next = NodeIx(u32::try_from(known.len()).unwrap());
                let number = *known.entry(name.clone()).or_insert(next);
                prop_assert_eq!(table.number(&name.as_str().into()), number);
            }
            prop_assert_eq!(table.len(), known.len());
            for (name, number) in &known {
                prop_assert_eq!(table.get(name), Some(*number));
                prop_assert_eq!(table.name(*number).unwrap().as_str(), name.as_str());
            }
            prop_assert_eq!(table.get(&other), known.get(&other).copied());
            for expected in 0..=u32::try_from(known.len()).unwrap() {
                prop_assert_eq!(table.get_expected(&other, NodeIx(expected)), table.get(&other));
            }
        }
    }
}
