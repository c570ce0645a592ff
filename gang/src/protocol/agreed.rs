//! What the members of a gang, its owner and its object say together: terms, or why there are none yet. Kept by what is said, not by who
//! says it, for a thousand members say the same. `terms::resolve` puts it together. How many say it counts only where two jobs give their gangs one name.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gantry_api::{GangSpec, names};

use super::types::Settings;
use crate::claim::{Claim, Maker, OwnerFacts, OwnerRef};
use crate::key::Dialect;
use crate::terms::{Defaults, Fault, OwnerState, Resolved, Terms, resolve};

/// Different words looked at, at most: a gang whose members disagree so much is not valid anyway.
const MAX_WORDS: usize = 1024;
/// Jobs named that give their gangs one name.
const NAMED: usize = 3;

/// What is known of a gang's terms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Agreed {
    /// Everything.
    Terms(Arc<Terms>),
    /// Not enough yet, and why.
    Unknown(Arc<str>),
    /// It contradicts itself, or cannot be followed.
    Invalid(Vec<Fault>),
}

impl Agreed {
    pub(super) fn terms(&self) -> Option<&Arc<Terms>> {
        match self {
            Self::Terms(terms) => Some(terms),
            Self::Unknown(_) | Self::Invalid(_) => None,
        }
    }
}

/// What members say but for their ranks, and how many say so.
#[derive(Debug, Clone, Default)]
pub(super) struct Words {
    said: HashMap<Claim, u32>,
    /// Another thing is said, or one no longer.
    changed: bool,
    /// Several jobs say it.
    mixed: bool,
}

impl Words {
    pub(super) fn add(&mut self, claim: &Claim) {
        let count = self.said.entry(without_rank(claim)).or_default();
        let first = *count == 0;
        *count += 1;
        if first {
            self.changes();
        }
        self.changed |= self.mixed;
    }

    pub(super) fn remove(&mut self, claim: &Claim) {
        let words = without_rank(claim);
        if let Some(count) = self.said.get_mut(&words) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.said.remove(&words);
                self.changes();
            }
            self.changed |= self.mixed;
        }
    }

    fn changes(&mut self) {
        self.changed = true;
        self.mixed = self.makers().len() > 1;
    }

    /// The jobs whose pods say it, and how many each has.
    fn makers(&self) -> BTreeMap<&Maker, u32> {
        let mut makers = BTreeMap::new();
        for (claim, count) in &self.said {
            if let Some(maker) = &claim.maker {
                *makers.entry(maker).or_default() += count;
            }
        }
        makers
    }

    /// The other conventions that name its pods too, in the order in which they would be asked.
    pub(super) fn also(&self) -> BTreeSet<Dialect> {
        self.said
            .keys()
            .flat_map(|claim| claim.also.iter().copied())
            .collect()
    }

    /// Two gangs of one name: the pods of one job alone are as many as are needed, and another job has pods too. Bound together half of each might run. That
    /// both belong together a person can say by how many there may be.
    fn of_one_name(&self, terms: &Terms, spec: Option<&GangSpec>) -> Option<Fault> {
        let said = spec.is_some_and(|spec| spec.min_member.is_some())
            || (terms.min < terms.max && terms.max < u32::MAX);
        if !self.mixed || said {
            return None;
        }
        let makers = self.makers();
        makers.values().any(|count| *count >= terms.min).then(|| {
            let mut names: Vec<String> = makers.keys().take(NAMED).map(ToString::to_string).collect();
            if makers.len() > NAMED {
                names.push("others".to_owned());
            }
            let words = format!(
                "{} give their gangs one name, and one alone has the {} members that it takes: give each a name of its own; or, if they belong together, say how many members there may be ({}), or minMember in the Gang",
                names.join(", "),
                terms.min,
                names::GANG_MAX_ANNOTATION
            );
            Fault { place: "pods".into(), words: words.into() }
        })
    }

    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// The object that says how large the gang is. Of several the first by name, whose word it then is.
    pub(super) fn owner(&self) -> Option<OwnerRef> {
        let owners: BTreeSet<&OwnerRef> = self
            .said
            .keys()
            .filter_map(|claim| claim.owner.as_ref())
            .collect();
        owners.first().map(|owner| (*owner).clone())
    }

    /// Each thing that is said, once, in an order that depends on nothing else.
    fn claims(&self) -> Vec<&Claim> {
        let mut claims: Vec<&Claim> = self.said.keys().collect();
        if claims.len() > 1 {
            claims.sort_by_cached_key(|claim| format!("{claim:?}"));
        }
        claims.truncate(MAX_WORDS);
        claims
    }

    /// What it comes to. While nobody says anything, what was agreed on before stays.
    pub(super) fn agree(
        &self,
        owner: &OwnerKnown,
        spec: Option<&GangSpec>,
        settings: &Settings,
    ) -> Option<Agreed> {
        if self.said.is_empty() {
            return None;
        }
        let owner = match owner {
            _ if self.owner().is_none() => OwnerState::NotNeeded,
            None => OwnerState::Unread,
            Some(None) => OwnerState::Missing,
            Some(Some(facts)) => OwnerState::Read(facts),
        };
        let defaults = Defaults {
            arrival: settings.arrival,
            repair: settings.repair,
            levels: &settings.levels,
        };
        Some(match resolve(self.claims(), owner, spec, &defaults) {
            Resolved::Terms(terms) => match self.of_one_name(&terms, spec) {
                None => Agreed::Terms(Arc::new(terms)),
                Some(fault) => Agreed::Invalid(vec![fault]),
            },
            Resolved::NotYet(why) => Agreed::Unknown(why),
            Resolved::Invalid(faults) => Agreed::Invalid(faults),
        })
    }
}

fn without_rank(claim: &Claim) -> Claim {
    Claim {
        rank: None,
        ..claim.clone()
    }
}

/// An owner, as far as it is known: `None` means not looked up yet, `Some(None)` that it does not exist.
pub(super) type OwnerKnown = Option<Option<Arc<OwnerFacts>>>;
