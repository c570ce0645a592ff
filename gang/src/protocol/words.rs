//! How a gang stands, in words: of each phase, what it waits for or has come to. Words alone, of what is decided elsewhere; they change
//! only when what they say does.

use std::time::Instant;

use gantry_api::GangPhase;

use super::agreed::Agreed;
use super::gang::{Gang, State};
use super::members::{Class, Count};
use super::types::{Blocker, Refusal};
use crate::counted::{are, exist as verb, members};
use crate::integrations::value::cut;
use crate::terms::Repair;

/// Longest reason and message, in bytes.
const REASON: usize = 700;
const MESSAGE: usize = 4096;

/// Words for a gang's standing: in few, and at length.
pub(super) struct Words {
    pub(super) reason: String,
    pub(super) message: String,
}

impl Words {
    fn new(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            reason: short(reason.into(), REASON),
            message: short(message.into(), MESSAGE),
        }
    }

    /// With more to the reason.
    fn and(self, more: &str) -> Self {
        Self::new(self.reason + more, self.message)
    }
}

impl Gang {
    pub(super) fn words_now(&self, now: Instant) -> Words {
        let count = self.members.count();
        let min = self.min();
        if let Some(terms) = self.working_terms().filter(|_| self.goes_singly()) {
            return Words::new(
                "is no gang: each of its pods goes by itself",
                format!("as {} says", terms.decided_by),
            );
        }
        match self.phase(now) {
            GangPhase::Pending => self.words_collecting(now).and(&self.words_elsewhere()),
            GangPhase::Invalid => self.words_invalid(),
            GangPhase::Queued if self.is_kept_gated() => Words::new(
                "waits until its scheduling gates can be removed",
                self.hindered.get(&Blocker::Gates).map_or("", |why| why),
            ),
            GangPhase::Queued => match &self.tries.refused {
                None => Words::new("waits its turn", "it is planned as soon as those before it are"),
                Some(refused) => Words::new(no_room(refused), &*refused.message),
            },
            GangPhase::Backoff => {
                let why = self.tries.pause.as_ref().map_or("", |(_, why)| why);
                Words::new(
                    format!("is tried again soon: {why}"),
                    "the wait doubles with every try that fails",
                )
            }
            GangPhase::Preempting if self.waits_for_the_ending() => Words::new(
                "waits for pods that are ending",
                "all that have to go for it are on their way out, as slowly as their grace periods allow; their devices are kept for it",
            ),
            GangPhase::Preempting => Words::new(
                "waits for pods that have to go for it",
                format!("their devices are kept for it{}", self.why_they_stay()),
            ),
            GangPhase::Reserved => {
                let coming = count.of(Class::Waiting) > 0;
                let message = format!(
                    "{} of {} {} ready to be bound",
                    count.ready().min(min),
                    members(min),
                    are(min)
                );
                let reason = if coming { "has its places" } else { "is on its way" };
                Words::new(reason, message)
            }
            GangPhase::Committing => match self.commit_refused() {
                None => Words::new("is being decided", "the decision is being written"),
                Some(words) => Words::new(
                    format!("cannot be decided: {words}"),
                    "the decision is written again: an earlier write of it may have come through",
                ),
            },
            GangPhase::Binding => self.with_why(
                now,
                "is being bound".to_owned(),
                format!("{} of {min} bound{}", bound(count).min(min), ended_well(count)),
            ),
            GangPhase::Bound => self.words_bound(),
            GangPhase::Degraded => self.words_repairing(now),
            GangPhase::Finished => {
                let message = match count.of(Class::Completed) {
                    0 => "it has no members any more".to_owned(),
                    ended => format!("{ended} of its members ended well"),
                };
                Words::new("has ended", message)
            }
        }
    }

    /// All that have to go for it are on their way out.
    fn waits_for_the_ending(&self) -> bool {
        matches!(&self.state, State::Planned(planned) if planned.all_gone_by().is_some())
    }

    fn words_collecting(&self, now: Instant) -> Words {
        let count = self.members.count();
        let exist = count.exist();
        let back = kept_back(count);
        let terms = match &self.agreed {
            Agreed::Terms(terms) => terms,
            Agreed::Unknown(why) => {
                return Words::new(
                    why.to_string(),
                    format!("{} {}{back}", members(exist), verb(exist)),
                );
            }
            Agreed::Invalid(_) => return self.words_invalid(),
        };
        if self.enough(Count::exist) && self.waits_for_rest(now) {
            let Some(total) = terms.total else {
                return Words::new(
                    format!("{exist} members of several jobs exist"),
                    "they are enough; more may come any moment, and then the jobs have one name for two gangs",
                );
            };
            return Words::new(
                format!("{exist} of {} {}", members(total), verb(total)),
                format!("{} are enough; the rest may come any moment", terms.min),
            );
        }
        if exist >= terms.min {
            let short = terms.by_role.iter().find_map(|(role, min)| {
                let there = self.members.count_of(role).exist();
                let words = || format!("{there} of {} of role {role} {}", members(*min), verb(*min));
                (there < *min).then(words)
            });
            if let Some(reason) = short {
                return Words::new(reason, format!("as {} says{back}", terms.decided_by));
            }
        }
        let mut reason = format!("{exist} of {} {}", members(terms.min), verb(terms.min));
        if let Some(owner) = &terms.unread {
            reason.push_str(&format!(
                "; {owner}, which may start some of its pods before the others, does not exist or may not be read"
            ));
        }
        Words::new(reason, format!("as {} says{back}", terms.decided_by))
    }

    /// That members are another scheduler's to place, if some are.
    fn words_elsewhere(&self) -> String {
        let by = self.members.elsewhere();
        by.map(|(by, count)| format!("; scheduled by {by}: {count}"))
            .collect()
    }

    pub(super) fn words_invalid(&self) -> Words {
        let mut faults: Vec<String> = self.object_fault.iter().map(ToString::to_string).collect();
        if let Agreed::Invalid(of_terms) = &self.agreed {
            faults.extend(of_terms.iter().map(ToString::to_string));
        }
        let first = faults.first().cloned().unwrap_or_default();
        Words::new(format!("is not valid: {first}"), faults.join("; "))
    }

    fn words_bound(&self) -> Words {
        let count = self.members.count();
        let min = self.min();
        let settled = count.settled();
        if settled < min {
            let why = match &self.owner {
                Some(owner) if self.owner_over => format!("{owner} has ended or is gone"),
                Some(owner) if self.owner_suspended => format!("{owner} is suspended"),
                _ => "repair: ignore".to_owned(),
            };
            return Words::new(
                format!("runs with {settled} of {}", members(min)),
                format!("lost members are not replaced ({why})"),
            );
        }
        let bound = format!("{} bound{}", bound(count), ended_well(count));
        let extras = self.members.unplaced().len();
        if extras == 0 {
            return Words::new("is bound", format!("{bound}, {min} needed"));
        }
        let why = match &self.tries.refused {
            _ if self.is_invalid() => {
                let words = self.words_invalid();
                return Words::new(
                    format!("is bound; for more members it {}", words.reason),
                    words.message,
                );
            }
            Some(refused) => format!("is bound; waits for room for more members: {}", refused.reason),
            None => "is bound; more members wait their turn".to_owned(),
        };
        Words::new(why, format!("{bound}, {min} needed, {extras} waiting"))
    }

    /// Words for a decided gang that lacks members, with why those that wait have no place.
    fn with_why(&self, now: Instant, mut reason: String, mut message: String) -> Words {
        let pause = self.tries.pause.as_ref().filter(|(until, _)| now < *until);
        if let State::Decided(decided) = &self.state
            && let Some(to) = &decided.gave_to
        {
            reason.push_str(&format!(
                "; the place of a lost member went to {to}, of higher priority"
            ));
        }
        if self.members.unplaced().is_empty() {
            // Whoever is missing does not wait for a place.
        } else if let Some((_, why)) = pause {
            reason.push_str(&format!("; is tried again soon: {why}"));
        } else if let Some(refused) = &self.tries.refused {
            reason.push_str(&format!("; {}", no_room(refused)));
            message.push_str(&format!("; {}", refused.message));
        }
        Words::new(reason, message)
    }

    /// What keeps pods from being removed that have to go, if anything does.
    pub(super) fn why_they_stay(&self) -> String {
        let in_the_way = [Blocker::Removal, Blocker::Budget];
        let why = in_the_way.iter().filter_map(|what| self.hindered.get(what));
        why.map(|why| format!("; {why}")).collect()
    }

    fn words_repairing(&self, now: Instant) -> Words {
        if let State::Restarting { to, .. } = &self.state {
            let old = self.members.old_present();
            let mut message = format!("members of before that are not gone yet: {old}");
            if let Some(to) = to {
                message.push_str(&format!(
                    "; it gives way to gang {to}: both had lost members, and each held what the other lacked"
                ));
            }
            message.push_str(&self.why_they_stay());
            return Words::new("is being started anew", message);
        }
        let count = self.members.count();
        let min = self.min();
        let lacking = self.missing(Count::settled);
        let kept = self.slots.lost().count();
        let places = match (kept, self.repair()) {
            (0, _) => "no place is kept for them any more".to_owned(),
            (_, Repair::Restart) => "it is started anew".to_owned(),
            (1, _) => "1 place is kept for a replacement".to_owned(),
            (kept, _) => format!("{kept} places are kept for replacements"),
        };
        self.with_why(
            now,
            format!("lacks {lacking} of {}", members(min)),
            format!("{} bound{}; {places}", bound(count), ended_well(count)),
        )
    }
}

/// Cut to `most` bytes.
pub(super) fn short(text: String, most: usize) -> String {
    if text.len() <= most {
        return text;
    }
    cut(text.into(), most).to_string()
}

fn no_room(refused: &Refusal) -> String {
    let how = if refused.hopeless {
        "cannot fit"
    } else {
        "waits for room"
    };
    format!("{how}: {}", refused.reason)
}

/// Members that are bound, without those that have ended.
fn bound(count: &Count) -> u32 {
    count.bound()
}

fn ended_well(count: &Count) -> String {
    match count.of(Class::Completed) {
        0 => String::new(),
        ended => format!(", {ended} ended well"),
    }
}

fn kept_back(count: &Count) -> String {
    let mut more = String::new();
    let foreign = count.of(Class::Foreign);
    if foreign > 0 {
        more.push_str(&format!(
            "; kept back by scheduling gates that Gantry does not remove: {foreign}"
        ));
    }
    let faulty = count.of(Class::Faulty);
    if faulty > 0 {
        more.push_str(&format!("; not valid: {faulty}"));
    }
    more
}
