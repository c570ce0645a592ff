//! The labels that terms of pods select by. Other labels of a pod never matter to a decision.

use std::collections::BTreeSet;
use std::sync::Arc;

use gantry_gang::Needs;
use gantry_gang::needs::{PodTerm, Requirement};

/// Labels that are kept without looking for unused ones.
pub(super) const MIN_LABELS: usize = 64;

/// The labels in terms of required affinity, anti-affinity and spreading, of any pod of late.
#[derive(Debug, Default)]
pub(super) struct TermLabels {
    labels: BTreeSet<Arc<str>>,
    /// How many there were when they were last collected from the pods.
    collected: usize,
    changed: bool,
}

impl TermLabels {
    /// Adds the labels in the anti-affinity of a pod.
    pub(super) fn add_terms(&mut self, terms: &[PodTerm]) {
        self.add(selectors(terms));
    }

    /// Adds the labels in all terms of a pod.
    pub(super) fn add_needs(&mut self, needs: &Needs) {
        self.add(all_selectors(needs));
    }

    fn add<'t>(&mut self, selectors: impl Iterator<Item = &'t Vec<Requirement>>) {
        for required in selectors.flatten() {
            if !self.labels.contains(&required.key) {
                self.labels.insert(Arc::clone(&required.key));
                self.changed = true;
            }
        }
    }

    pub(super) fn contains(&self, label: &str) -> bool {
        self.labels.contains(label)
    }

    /// Whether the labels that are in no term any more may be the larger half: where each job has a label of its own
    /// they would grow without end.
    pub(super) fn may_be_unused(&self) -> bool {
        self.labels.len() > MIN_LABELS.max(self.collected * 2)
    }

    /// Replaces the labels by those of all pods that exist.
    pub(super) fn replace(&mut self, current: Self) {
        self.changed |= current.labels.len() < self.labels.len();
        self.labels = current.labels;
        self.collected = self.labels.len();
    }

    /// Whether labels changed since this was last called.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.labels.len()
    }
}

/// The selectors of terms.
fn selectors(terms: &[PodTerm]) -> impl Iterator<Item = &Vec<Requirement>> {
    terms.iter().map(|term| &term.selector)
}

/// The selectors in the needs of a pod.
fn all_selectors(needs: &Needs) -> impl Iterator<Item = &Vec<Requirement>> {
    let terms = selectors(&needs.apart_from).chain(selectors(&needs.together_with));
    terms.chain(needs.spread.iter().map(|spread| &spread.selector))
}
