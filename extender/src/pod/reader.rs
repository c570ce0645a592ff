//! Reads pods. Equal values are stored once: pods of one controller have the same needs, and a cluster of a hundred
//! thousand pods has few controllers.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

use gantry_gang::{Needs, Resources};

use super::other_pod::{OtherPod, PodProfile};
use super::{PodFacts, SlimPod};
use crate::watched::Watched;

/// Interned values. Unused ones are dropped as the set grows.
#[derive(Debug)]
pub struct Shared<T: ?Sized> {
    known: HashSet<Arc<T>>,
    /// Size at which unused values are dropped next.
    limit: usize,
}

/// Interned texts.
pub type Words = Shared<str>;

/// Size below which nothing is dropped.
const FEW: usize = 1024;

impl<T: ?Sized> Default for Shared<T> {
    fn default() -> Self {
        Self { known: HashSet::new(), limit: FEW }
    }
}

impl<T: ?Sized + Eq + Hash> Shared<T> {
    fn keep(&mut self, value: Arc<T>) -> Arc<T> {
        if self.known.len() >= self.limit {
            self.known.retain(|known| Arc::strong_count(known) > 1);
            self.limit = (self.known.len() * 2).max(FEW);
        }
        self.known.insert(Arc::clone(&value));
        value
    }
}

impl Words {
    /// The interned text.
    pub fn of(&mut self, text: &str) -> Arc<str> {
        match self.known.get(text) {
            Some(known) => Arc::clone(known),
            None => self.keep(text.into()),
        }
    }
}

impl<T: Eq + Hash> Shared<T> {
    /// The interned value.
    pub fn one(&mut self, value: T) -> Arc<T> {
        match self.known.get(&value) {
            Some(known) => Arc::clone(known),
            None => self.keep(Arc::new(value)),
        }
    }
}

/// Reads pods.
#[derive(Debug)]
pub struct Reader {
    pub(super) watched: Watched,
    pub(super) words: Words,
    pub(super) needs: Shared<Needs>,
    pub(super) profiles: Shared<PodProfile>,
    pub(super) loads: Shared<Resources>,
}

/// A parsed pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// A pod that requests watched resources.
    Facts(Box<PodFacts>),
    /// Any other pod.
    OtherPod(Box<OtherPod>),
}

impl Reader {
    /// A reader for the given watched resources.
    pub fn new(watched: Watched) -> Self {
        Self {
            watched,
            words: Words::default(),
            needs: Shared::default(),
            profiles: Shared::default(),
            loads: Shared::default(),
        }
    }

    /// Reads a pod. `None` if it has no UID.
    pub fn read(&mut self, pod: SlimPod) -> Option<Seen> {
        match self.request(&pod) {
            Some(request) => Some(Seen::Facts(Box::new(self.facts(pod, request)?))),
            None => Some(Seen::OtherPod(Box::new(self.other_pod(pod)?))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_one_and_those_that_nobody_has_are_dropped() {
        let mut words = Words::default();
        let kept = words.of("kept");
        assert!(Arc::ptr_eq(&kept, &words.of("kept")));
        for number in 0..10 * FEW {
            words.of(&number.to_string());
        }
        assert!(words.known.len() <= FEW, "{}", words.known.len());
        assert!(Arc::ptr_eq(&kept, &words.of("kept")));
    }
}
