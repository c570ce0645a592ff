//! One member: what is kept of it, and what it counts as. Says nothing of the others.

use std::sync::Arc;
use std::time::Instant;

use crate::protocol::agreed::Says;
use crate::protocol::parked::Kind;
use crate::protocol::types::{Member, Stage};

/// What is kept of a member.
#[derive(Debug, Clone)]
pub(in crate::protocol) struct Kept {
    pub(in crate::protocol) member: Member,
    /// In which life of the gang it came: after a restart those of before do not count.
    pub(in crate::protocol) life: u32,
    /// It ended well in a life before. It counts as long as its pod is there: a controller that makes all of them anew removes it.
    pub(super) carried: bool,
    /// Its slot. [`super::gang::Gang`] sees to it that the slot knows it too.
    pub(in crate::protocol) slot: Option<u32>,
    /// Since when it has it.
    pub(in crate::protocol) tied: Option<Instant>,
    /// Its slot is one whose member comes after its siblings are bound.
    pub(in crate::protocol) follows: bool,
    /// It has come to its place: nobody has to wait for it.
    pub(in crate::protocol) arrived: bool,
    /// It stands at the barrier. One that has come and is not there any more waited for its siblings as long as it may.
    pub(in crate::protocol) here: bool,
    /// How far its binding is.
    pub(in crate::protocol) bind: Bind,
    /// A bind has found it gone before the watch has.
    pub(in crate::protocol) gone: bool,
    /// When the removal of our gate was last asked for.
    pub(in crate::protocol) ungated: Option<Instant>,
    /// Filter has answered it with the node of its slot.
    pub(in crate::protocol) answered: bool,
    /// When it was told to wait, if it was not woken since.
    pub(in crate::protocol) parked: Option<Instant>,
    /// Of what kind the reason is that it was told when it was refused last.
    pub(in crate::protocol) told: Option<Kind>,
    /// It has to go for another gang, which has its devices from then on.
    pub(in crate::protocol) evicted: bool,
    /// What it says counts among the gang's words.
    pub(in crate::protocol) worded: Option<Says>,
}

/// How far the binding of a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::protocol) enum Bind {
    /// Not begun, or failed.
    No,
    /// On its way.
    Going,
    /// Nobody knows how it ended.
    Unsure,
    /// Done, by the word of the binder.
    Done,
}

/// What a member counts as. Each is of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(in crate::protocol) enum Class {
    /// Of a life before.
    Old,
    /// It is being deleted, or has failed.
    Lost,
    /// What it says is wrong.
    Faulty,
    /// Kept back by gates that are not ours.
    Foreign,
    /// Another scheduler is to place it.
    Elsewhere,
    /// It exists, and has no slot.
    Waiting,
    /// It has a slot, and has not arrived.
    Coming,
    /// The same, and it cannot arrive before siblings are bound.
    Following,
    /// It exists and needs no devices.
    Light,
    /// It has come to its place.
    Arrived,
    /// Bound, and without devices.
    LightBound,
    /// Bound.
    Bound,
    /// Ended well.
    Completed,
}

impl Kept {
    pub(in crate::protocol) fn new(member: Member, life: u32) -> Self {
        Self {
            member,
            life,
            carried: false,
            slot: None,
            tied: None,
            follows: false,
            arrived: false,
            here: false,
            bind: Bind::No,
            gone: false,
            ungated: None,
            answered: false,
            parked: None,
            told: None,
            evicted: false,
            worded: None,
        }
    }

    /// Takes what the watch shows of it now. One that was asked to go and then ended well, as programs do that handle TERM, has not done
    /// its part: it is lost like any other that is deleted.
    pub(in crate::protocol) fn update(&mut self, member: Member) {
        let was_asked = self.member.leaving && self.member.stage != Stage::Succeeded;
        self.member = member;
        if was_asked && self.member.stage == Stage::Succeeded {
            self.member.stage = Stage::Failed;
        }
    }

    pub(in crate::protocol) fn class(&self, life: u32) -> Class {
        let light = self.member.shape.is_none();
        let leaving = self.member.leaving || self.gone;
        match &self.member.stage {
            _ if self.life != life => Class::Old,
            Stage::Succeeded => Class::Completed,
            Stage::Failed => Class::Lost,
            _ if leaving => Class::Lost,
            Stage::Bound(_) if light => Class::LightBound,
            Stage::Bound(_) => Class::Bound,
            _ if self.bind == Bind::Done => Class::Bound,
            _ if !self.member.membership.faults.is_empty() => Class::Faulty,
            _ if self.member.elsewhere.is_some() => Class::Elsewhere,
            Stage::Gated { by_us_alone: false } => Class::Foreign,
            _ if light => Class::Light,
            _ if self.slot.is_none() => Class::Waiting,
            _ if self.arrived => Class::Arrived,
            _ if self.follows => Class::Following,
            _ => Class::Coming,
        }
    }

    /// It is of this life, has not ended and is not being deleted.
    pub(in crate::protocol) fn is_alive(&self, life: u32) -> bool {
        is_alive(self.class(life))
    }

    /// It is a pod that has not ended and is not being deleted.
    pub(in crate::protocol) fn lives(&self) -> bool {
        !self.member.leaving && !self.gone && !matches!(self.member.stage, Stage::Succeeded | Stage::Failed)
    }

    /// It is a pod that has not ended, though it may be on its way to.
    pub(in crate::protocol) fn runs(&self) -> bool {
        !self.gone && !matches!(self.member.stage, Stage::Succeeded | Stage::Failed)
    }

    /// Its Binding may exist or come to exist: its slot cannot be given to another.
    pub(in crate::protocol) fn pinned(&self) -> bool {
        self.bind != Bind::No || matches!(self.member.stage, Stage::Bound(_))
    }

    /// The scheduler that is to place it, if it counts as one that does not ask us.
    pub(super) fn placed_by_another(&self, class: Class) -> Option<&Arc<str>> {
        let by = self.member.elsewhere.as_ref();
        by.filter(|_| class == Class::Elsewhere)
    }

    /// It has come, and waits for its siblings elsewhere: in kube-scheduler.
    pub(in crate::protocol) fn is_aside(&self) -> bool {
        self.arrived && !self.here && !self.pinned()
    }

    /// Since when it is waited for at its slot, if it is.
    pub(super) fn idle_since(&self, class: Class) -> Option<Instant> {
        let idle = matches!(class, Class::Coming | Class::Following) && !self.pinned();
        self.tied.filter(|_| idle)
    }

    pub(in crate::protocol) fn come(&mut self) {
        self.arrived = true;
        self.here = true;
    }

    /// It has to come anew.
    pub(in crate::protocol) fn leave(&mut self) {
        self.arrived = false;
        self.here = false;
    }

    pub(super) fn devices(&self) -> u64 {
        self.member.asks.iter().map(|(_, count)| u64::from(*count)).sum()
    }
}

pub(super) fn is_alive(class: Class) -> bool {
    !matches!(class, Class::Old | Class::Lost | Class::Completed)
}
