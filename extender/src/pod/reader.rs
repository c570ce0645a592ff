//! Reads pods. What many of them share is kept once: pods of one controller have the same needs, and a cluster has a hundred thousand
//! pods but few controllers.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

use gantry_gang::{Needs, Resources};

use super::other_pod::{OtherPod, PodProfile};
use super::{PodFacts, SlimPod};
use crate::watched::Watched;

/// Values kept once. Those that nobody else has are dropped as the set grows.
#[derive(Debug)]
pub struct Shared<T: ?Sized> {
    known: HashSet<Arc<T>>,
    /// As many as there may be before those that nobody else has are looked for.
    limit: usize,
}

/// Texts kept once.
pub type Words = Shared<str>;

/// Fewest values before any are dropped.
const FEW: usize = 1024;

impl<T: ?Sized> Default for Shared<T> {
    fn default() -> Self {
        Self {
            known: HashSet::new(),
            limit: FEW,
        }
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
    /// The text, shared with all that have the same.
    pub fn of(&mut self, text: &str) -> Arc<str> {
        match self.known.get(text) {
            Some(known) => Arc::clone(known),
            None => self.keep(text.into()),
        }
    }
}

impl<T: Eq + Hash> Shared<T> {
    /// The value, shared with all that have the same.
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

/// A pod that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// It asks for resources that are watched.
    Facts(Box<PodFacts>),
    /// Any other.
    OtherPod(Box<OtherPod>),
}

impl Reader {
    /// Reads pods by what is watched.
    pub fn new(watched: Watched) -> Self {
        Self {
            watched,
            words: Words::default(),
            needs: Shared::default(),
            profiles: Shared::default(),
            loads: Shared::default(),
        }
    }

    /// Reads a pod; `None` for one without a UID.
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
