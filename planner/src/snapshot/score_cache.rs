//! A cache of the scores of one class. A class does not change, so its scores do not either.

use std::hash::{Hash, Hasher};
use std::sync::{Mutex, PoisonError};

use crate::decide::{Policy, Score};

/// Scores kept per class. Pods ask for few different numbers of devices.
const KEPT: usize = 8;

/// What a score depends on other than the class, for a pod with one container and one resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreKey {
    /// Number of the pool.
    pub pool: usize,
    /// Devices asked for.
    pub devices: u32,
    /// Which of equally fast nodes to take.
    pub policy: Policy,
}

/// Scores of one class. Not part of the equality of classes.
#[derive(Debug, Default)]
pub struct ScoreCache(Mutex<Vec<(ScoreKey, Option<Score>)>>);

impl ScoreCache {
    /// The cached score of a question, worked out the first time.
    pub fn get_or(&self, question: ScoreKey, work_out: impl FnOnce() -> Option<Score>) -> Option<Score> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, score)) = known.iter().find(|(asked, _)| *asked == question) {
            return *score;
        }
        drop(known);
        let score = work_out();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() < KEPT {
            known.push((question, score));
        }
        score
    }
}

impl Clone for ScoreCache {
    /// A clone may become another class, so it starts empty.
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for ScoreCache {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for ScoreCache {}

impl Hash for ScoreCache {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_worked_out_once_and_no_other_is_taken_for_it() {
        let remembered = ScoreCache::default();
        let question = ScoreKey { pool: 0, devices: 2, policy: Policy::Pack };
        assert_eq!(remembered.get_or(question, || None), None);
        assert_eq!(remembered.get_or(question, || unreachable!("it was asked before")), None);
        for other in [
            ScoreKey { pool: 1, ..question },
            ScoreKey { devices: 3, ..question },
            ScoreKey { policy: Policy::Spread, ..question },
        ] {
            let mut asked = false;
            remembered.get_or(other, || {
                asked = true;
                None
            });
            assert!(asked);
        }
    }
}
