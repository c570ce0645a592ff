//! Puts together what pods, their owner and the Gang object say, in the order in which their words count: the object, the pods, the owner.
//! Contradictions are named and never guessed at.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use gantry_api::GangSpec;

use super::{Fault, LevelWish, Repair, Terms, check};
use crate::claim::{Claim, Hint, OwnerFacts, OwnerRef, Size, Wish};
use crate::dialect::value::fault;
use crate::fabric::Levels;

/// Most faults that are told at once.
const TOLD: usize = 8;

/// What is known of the object that says how large a gang is.
#[derive(Debug, Clone, Copy)]
pub enum OwnerState<'a> {
    /// No pod names one.
    NotNeeded,
    /// It was not looked for yet.
    Unread,
    /// It does not exist, its kind is not served, or it may not be read.
    Missing,
    /// What it says.
    Read(&'a OwnerFacts),
}

/// What holds where nobody says anything.
#[derive(Debug, Clone, Copy)]
pub struct Defaults<'a> {
    /// How long members may take to arrive.
    pub arrival: Duration,
    /// What to do when a member is lost.
    pub repair: Repair,
    /// The levels there are.
    pub levels: &'a Levels,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolved {
    /// Terms.
    Terms(Terms),
    /// Something is missing that may yet come. In words that stay the same while it is.
    NotYet(Arc<str>),
    /// It contradicts itself or cannot be followed: sorted, each once.
    Invalid(Vec<Fault>),
}

/// The terms of the gang that all these pods belong to. Neither their order nor how many say the same makes a difference, nor do their ranks.
pub fn resolve<'a>(
    claims: impl IntoIterator<Item = &'a Claim>,
    owner: OwnerState<'_>,
    object: Option<&GangSpec>,
    defaults: &Defaults<'_>,
) -> Resolved {
    let mut faults = BTreeSet::new();
    let said = Said::by(claims, &mut faults);
    let none = OwnerFacts::default();
    let facts = match owner {
        OwnerState::Read(facts) => facts,
        _ => &none,
    };
    faults.extend(facts.faults.iter().cloned());
    let object = object.cloned().unwrap_or_default();
    check::object(&object, &mut faults);
    if matches!(owner, OwnerState::Unread) && faults.is_empty() {
        return Resolved::NotYet(said.missing(owner, facts));
    }
    let of_owner = Share::of(&said, facts);
    let minimum = said.minimum(&object, owner, &of_owner, &mut faults);
    let wishes = said.wishes(&object, &facts.wish, defaults, &mut faults);
    let total = match of_owner.at_most {
        Some(most) => Some(most),
        None => said.total.or(of_owner.total),
    };
    let Some(minimum) = minimum else {
        return match faults.is_empty() {
            true => Resolved::NotYet(said.missing(owner, facts)),
            false => Resolved::Invalid(told(faults)),
        };
    };
    let Minimum { min, decided_by } = minimum;
    check::sizes(min, total, &wishes, &decided_by, &mut faults);
    if !faults.is_empty() {
        return Resolved::Invalid(told(faults));
    }
    let level = wishes.level.or_else(|| {
        wishes.hint.as_ref().map(|hint| LevelWish {
            level: Arc::clone(&hint.label),
            required: false,
        })
    });
    // Another system's slices are followed where they can be.
    let hinted = wishes.hint.and_then(|hint| hint.slice);
    let hinted = hinted.filter(|slice| {
        check::divides(*slice, min) && total.is_none_or(|total| check::divides(*slice, total))
    });
    // The person's word may be less than the sum of what the owner wants of each role.
    let roles: u64 = of_owner.by_role.iter().map(|(_, count)| u64::from(*count)).sum();
    Resolved::Terms(Terms {
        min,
        max: wishes.max.unwrap_or(u32::MAX),
        total,
        by_role: if roles <= u64::from(min) {
            of_owner.by_role
        } else {
            Vec::new()
        },
        level,
        slice: wishes.slice.or(hinted),
        repair: wishes.repair.unwrap_or(defaults.repair),
        arrival: wishes.arrival.unwrap_or(defaults.arrival),
        checkpointed: wishes.checkpointed.unwrap_or(false),
        decided_by,
    })
}

struct Minimum {
    min: u32,
    decided_by: Arc<str>,
}

/// What of the owner's word is about this gang: all of it, or where each role is a gang of its own, that of its role.
struct Share {
    min: Option<u32>,
    total: Option<u32>,
    by_role: Vec<(Arc<str>, u32)>,
    /// The pods' own word may be about more than this gang.
    at_most: Option<u32>,
}

impl Share {
    fn of(said: &Said, facts: &OwnerFacts) -> Self {
        if !facts.apart {
            return Self {
                min: facts.min,
                total: facts.total,
                by_role: facts.by_role.clone(),
                at_most: None,
            };
        }
        // Before its members are told apart, the gang is as large as the roles that have begun.
        let begun: Vec<u32> = facts
            .by_role
            .iter()
            .filter(|(role, _)| said.roles.contains(role))
            .map(|(_, count)| *count)
            .collect();
        let sum =
            (!begun.is_empty()).then(|| begun.iter().fold(0_u32, |sum, count| sum.saturating_add(*count)));
        Self {
            min: sum,
            total: sum,
            by_role: Vec::new(),
            at_most: sum,
        }
    }
}

/// What the pods say, each thing once.
#[derive(Default)]
struct Said {
    stated: BTreeSet<u32>,
    place: &'static str,
    all: bool,
    total: Option<u32>,
    owner: Option<OwnerRef>,
    object_name: String,
    roles: BTreeSet<Arc<str>>,
    wishes: Vec<Wish>,
}

impl Said {
    fn by<'a>(claims: impl IntoIterator<Item = &'a Claim>, faults: &mut BTreeSet<Fault>) -> Self {
        let mut said = Self::default();
        let mut totals = BTreeSet::new();
        let mut owners: BTreeSet<&OwnerRef> = BTreeSet::new();
        for claim in claims {
            faults.extend(claim.faults.iter().cloned());
            match claim.size {
                Size::Stated { min, total } => {
                    said.stated.insert(min);
                    totals.extend(total);
                }
                Size::All => said.all = true,
                Size::Unsaid => {}
            }
            said.place = said.place.max(claim.size_said);
            owners.extend(&claim.owner);
            if said.object_name.is_empty() {
                said.object_name = claim.key.object_name();
            }
            said.roles.insert(Arc::clone(&claim.role));
            if !said.wishes.contains(&claim.wish) {
                said.wishes.push(claim.wish.clone());
            }
        }
        // Which of several comes first must not depend on who came first.
        said.wishes.sort_by_cached_key(|wish| format!("{wish:?}"));
        if totals.len() > 1 {
            faults.insert(disagree("how many members there will be", &totals));
        }
        said.total = totals.first().copied();
        if said.all && owners.len() > 1 {
            let names: BTreeSet<String> = owners.iter().map(|owner| owner.to_string()).collect();
            faults.insert(disagree("whose pods `all` are", &names));
        }
        said.owner = owners.first().map(|owner| (*owner).clone());
        said
    }

    fn minimum(
        &self,
        object: &GangSpec,
        owner: OwnerState<'_>,
        share: &Share,
        faults: &mut BTreeSet<Fault>,
    ) -> Option<Minimum> {
        if let Some(min) = object.min_member {
            return Some(Minimum {
                min,
                decided_by: format!("minMember of Gang {}", self.object_name).into(),
            });
        }
        let owner_name = || {
            self.owner
                .as_ref()
                .map_or_else(String::new, |owner| format!(" of {owner}"))
        };
        if self.stated.len() > 1 {
            faults.insert(disagree("how many members are needed", &self.stated));
        }
        if self.all {
            let all = share.total.or(self.total)?;
            if self.stated.first().is_some_and(|stated| *stated != all) {
                let mut words: BTreeSet<String> = self.stated.iter().map(ToString::to_string).collect();
                words.insert(format!("all, which is {all}"));
                faults.insert(disagree("how many members are needed", &words));
            }
            return Some(Minimum {
                min: all,
                decided_by: format!("{} of its pods: all{}", self.place, owner_name()).into(),
            });
        }
        if let Some(stated) = self.stated.first() {
            return Some(Minimum {
                min: share.at_most.map_or(*stated, |most| most.min(*stated)),
                decided_by: format!("{} of its pods", self.place).into(),
            });
        }
        let OwnerState::Read(facts) = owner else {
            return None;
        };
        Some(Minimum {
            min: share.min?,
            decided_by: format!("{}{}", facts.said, owner_name()).into(),
        })
    }

    /// Why there is no minimum.
    fn missing(&self, owner: OwnerState<'_>, facts: &OwnerFacts) -> Arc<str> {
        match (&self.owner, owner) {
            (Some(name), OwnerState::Unread) => format!("{name} was not read yet").into(),
            (Some(name), OwnerState::Missing) => {
                format!("{name}, which says how many members are needed, does not exist or may not be read").into()
            }
            (Some(name), _) if facts.total.is_none() => {
                format!("{name} does not say yet how many members are needed").into()
            }
            _ => format!(
                "nobody says how many members are needed: set annotation gantry.dev/gang-min on its pods, or minMember of Gang {}",
                self.object_name
            )
            .into(),
        }
    }

    fn wishes(
        &self,
        object: &GangSpec,
        owner: &Wish,
        defaults: &Defaults<'_>,
        faults: &mut BTreeSet<Fault>,
    ) -> Wish {
        let of = |pick: &dyn Fn(&Wish) -> Option<String>| self.wishes.iter().filter_map(pick).collect();
        let mut agreed = |overruled: bool, what: &str, words: BTreeSet<String>| {
            if words.len() > 1 && !overruled {
                faults.insert(disagree(what, &words));
            }
        };
        agreed(
            object.level.is_some(),
            "in which level they are",
            of(&|wish| wish.level.as_ref().map(LevelWish::to_string)),
        );
        agreed(
            object.slice_size.is_some(),
            "what size slices have",
            of(&|wish| wish.slice.map(|slice| slice.to_string())),
        );
        agreed(
            object.max_member.is_some(),
            "how many members there are at most",
            of(&|wish| wish.max.map(|max| max.to_string())),
        );
        agreed(
            object.repair.is_some(),
            "what to do when a member is lost",
            of(&|wish| wish.repair.map(|repair| repair.as_str().to_owned())),
        );
        agreed(
            object.arrival_seconds.is_some(),
            "how long members may take",
            of(&|wish| wish.arrival.map(|time| format!("{time:?}"))),
        );
        // Whoever can be stopped only with all the others cannot be stopped while one of them cannot.
        let checkpointed = self.wishes.iter().filter_map(|wish| wish.checkpointed).min();
        let pods = |pick: fn(&Wish) -> Option<u32>| self.wishes.iter().filter_map(pick).min();
        let mut wish = Wish {
            level: object
                .level
                .as_ref()
                .map(|level| LevelWish {
                    level: level.name.as_str().into(),
                    required: level.required,
                })
                .or_else(|| self.wishes.iter().find_map(|wish| wish.level.clone()))
                .or_else(|| owner.level.clone()),
            hint: None,
            slice: object
                .slice_size
                .or_else(|| pods(|wish| wish.slice))
                .or(owner.slice),
            max: object.max_member.or_else(|| pods(|wish| wish.max)).or(owner.max),
            repair: object
                .repair
                .map(Repair::from)
                .or_else(|| self.wishes.iter().find_map(|wish| wish.repair))
                .or(owner.repair),
            arrival: object
                .arrival_seconds
                .map(|seconds| Duration::from_secs(seconds.into()))
                .or_else(|| self.wishes.iter().find_map(|wish| wish.arrival))
                .or(owner.arrival),
            checkpointed: checkpointed.or(owner.checkpointed),
        };
        match &mut wish.level {
            Some(level) => match check::known(&level.level, defaults.levels) {
                Some(found) => level.level = Arc::clone(&found.name),
                None => {
                    faults.insert(fault("level", check::unknown(&level.level, defaults.levels)));
                }
            },
            None => wish.hint = self.hint(owner, defaults.levels),
        }
        wish
    }

    /// A level that another system keeps to, under our name for it. All that have a hint must have the same.
    fn hint(&self, owner: &Wish, levels: &Levels) -> Option<Hint> {
        let mut hints = self
            .wishes
            .iter()
            .chain([owner])
            .filter_map(|wish| wish.hint.as_ref());
        let first = hints.next()?;
        if hints.any(|hint| hint != first) {
            return None;
        }
        Some(Hint {
            label: Arc::clone(&check::known(&first.label, levels)?.name),
            slice: first.slice,
        })
    }
}

fn disagree<T: Display>(about: &str, words: &BTreeSet<T>) -> Fault {
    let words: Vec<String> = words.iter().take(TOLD).map(ToString::to_string).collect();
    fault(
        "pods",
        format!(
            "they disagree about {about}: {}; all must say the same",
            words.join(", ")
        ),
    )
}

fn told(faults: BTreeSet<Fault>) -> Vec<Fault> {
    faults.into_iter().take(TOLD).collect()
}

#[cfg(test)]
mod tests;
