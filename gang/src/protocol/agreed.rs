//! What the members of a gang, its owner and its object say together: terms, or why there are none yet. `terms::resolve` puts it together,
//! anew only when another thing is said: a thousand members say the same.

use std::sync::Arc;

use gantry_api::{GangSpec, names};

use super::types::Settings;
use crate::key::Integration;
use crate::membership::{Membership, OwnerFacts, OwnerRef};
use crate::terms::{Defaults, Fault, OwnerState, Resolved, Said, Terms, resolve};

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

/// What a member says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Says {
    pub(super) membership: Arc<Membership>,
    /// It has ended well: of two jobs that give their gangs one name it is in nobody's way.
    pub(super) ended: bool,
    /// It asks for no devices: no slice has it.
    pub(super) light: bool,
}

/// What members say, and whether that is another thing than was last agreed on.
#[derive(Debug, Clone, Default)]
pub(super) struct Words {
    said: Said,
    changed: bool,
}

impl Words {
    pub(super) fn add(&mut self, says: &Says) {
        self.changed |= self.said.add(&says.membership);
        if says.ended {
            self.changed |= self.said.end(&says.membership);
        }
        self.follow_light(says, true);
        // How many say it counts only where two jobs give their gangs one name.
        self.changed |= self.said.is_mixed();
    }

    pub(super) fn remove(&mut self, says: &Says) {
        if says.ended {
            self.changed |= self.said.unend(&says.membership);
        }
        self.follow_light(says, false);
        self.changed |= self.said.remove(&says.membership);
        self.changed |= self.said.is_mixed();
    }

    /// How many ask for no devices counts in slices.
    fn follow_light(&mut self, says: &Says, more: bool) {
        self.changed |= says.light || self.said.has_light(&says.membership.role);
        if says.light {
            self.said.lighten(&says.membership, more);
        }
    }

    /// The other conventions that name its pods too, in the order in which they would be asked.
    pub(super) fn also(&self) -> impl Iterator<Item = Integration> {
        self.said.also()
    }

    /// Two gangs of one name: several jobs have pods, and more than are needed. Bound together half of each might run. That they belong
    /// together a person can say by how many there may be.
    fn of_one_name(&self, terms: &Terms, spec: Option<&GangSpec>) -> Option<Fault> {
        (self.is_unsaid_mix(terms, spec) && self.said.made() > terms.min).then(|| {
            let (makers, count) = self.said.makers();
            let mut names: Vec<String> = makers.take(NAMED).map(ToString::to_string).collect();
            if count > NAMED {
                names.push("others".to_owned());
            }
            let words = format!(
                "{} give their gangs one name, and have more than the {} members that it takes: give each a name of its own; or, if they belong together, say how many members there may be ({}), or minMember in the Gang",
                names.join(", "),
                terms.min,
                names::GANG_MAX_ANNOTATION
            );
            Fault { place: "pods".into(), words: words.into() }
        })
    }

    /// Several jobs have pods that have not ended, and nobody says that they belong together.
    pub(super) fn is_unsaid_mix(&self, terms: &Terms, spec: Option<&GangSpec>) -> bool {
        let said = spec.is_some_and(|spec| spec.min_member.is_some())
            || (terms.min < terms.max && terms.max < u32::MAX);
        self.said.is_mixed() && !said
    }

    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// The object that says how large the gang is. Of several the first by name, whose word it then is.
    pub(super) fn owner(&self) -> Option<&OwnerRef> {
        self.said.owner()
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
        Some(match resolve(&self.said, owner, spec, &defaults) {
            Resolved::Terms(terms) => match self.of_one_name(&terms, spec) {
                None => Agreed::Terms(Arc::new(terms)),
                Some(fault) => Agreed::Invalid(vec![fault]),
            },
            Resolved::NotYet(why) => Agreed::Unknown(why),
            Resolved::Invalid(faults) => Agreed::Invalid(faults),
        })
    }
}

/// An owner, as far as it is known: `None` means not looked up yet, `Some(None)` that it does not exist.
pub(super) type OwnerKnown = Option<Option<Arc<OwnerFacts>>>;
