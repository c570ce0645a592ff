//! A minimum that is lowered once the gang is decided: a job that was made smaller is complete as it is. One that is raised waits for the
//! next start, and so does whatever the pods alone say, for whoever may write one of them must not undo what was promised to the others.

use std::sync::Arc;

use super::gang::{Env, Gang, State};
use super::standing::after;
use crate::terms::{Authority, Repair, Terms};

impl Gang {
    /// The terms, if the minimum in them is the word of an object.
    fn terms_of_object(&self) -> Option<&Arc<Terms>> {
        self.terms().filter(|terms| terms.authority == Authority::Object)
    }

    /// The minimum of a decision, as far as it was not lowered since.
    pub(super) fn lowered(&self, min: u32) -> u32 {
        self.terms_of_object().map_or(min, |terms| terms.min.min(min))
    }

    /// Lowers the minimum that was decided, and those of roles.
    pub(super) fn lower_minimum(&mut self) {
        let Some(terms) = self.terms_of_object().cloned() else {
            return;
        };
        let State::Decided(decided) = &mut self.state else {
            return;
        };
        let before = (decided.min, decided.by_role.clone());
        decided.min = decided.min.min(terms.min);
        if let Some(by_role) = &mut decided.by_role {
            by_role.retain_mut(|(role, min)| {
                let now = terms.by_role.iter().find(|(of, _)| of == role);
                *min = now.map_or(0, |(_, now)| *now).min(*min);
                *min > 0
            });
        }
        if (decided.min, &decided.by_role) != (before.0, &before.1) {
            // Who went may have gone for that.
            decided.lost_since = None;
        }
    }

    /// Whether it has to be started anew, for too few members were left. Where an object says how many are needed it may just have been
    /// lowered: the pods that went for that are seen in one watch, and the object in another. Who comes in place of a lost member meanwhile
    /// undoes no loss.
    pub(super) fn is_to_restart(&mut self, env: &Env<'_>) -> bool {
        let restarts = self.repair() == Repair::Restart && self.is_repaired();
        let lost = restarts && self.lost_too_many();
        let may_be_lowered = self.terms_of_object().is_some();
        let State::Decided(decided) = &mut self.state else {
            return false;
        };
        if !restarts {
            decided.lost_since = None;
        } else if lost {
            decided.lost_since.get_or_insert(env.now.at);
        }
        decided
            .lost_since
            .is_some_and(|since| !may_be_lowered || env.now.at >= after(since, env.settings.settle))
    }
}
