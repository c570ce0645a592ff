//! Parked pods show the reason they were told last until something wakes them, which may take minutes. Those whose reason is of another
//! kind by now are woken: late enough for it to be settled, seldom, and a few at a time, for it is only for people. Counts alone wake
//! nobody. Those that go by themselves after all are let go at once.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{GangPhase, PodUid};

use super::agreed::Agreed;
use super::gang::{Env, Gang};
use super::members::{Class, Kept};
use super::standing::after;
use super::types::Stage;
use super::waking::BEING_TOLD;

/// A reason that holds for less is not worth a word.
const SETTLED: Duration = Duration::from_secs(1);
/// Between two times that members of a gang are woken for this.
const BETWEEN: Duration = Duration::from_secs(5);
/// Members woken at a time: those that have somewhere to go are woken by the same hand.
const AT_ONCE: usize = 64;

/// Of what kind a reason is; what it counts is not part of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Its size is not known, for this reason.
    Unknown(Arc<str>),
    /// It was planned, and there was no room.
    NoRoom(GangPhase),
    /// What the phase says.
    Phase(GangPhase),
    /// It was one gang, or its pod one member, too many.
    Beyond,
}

/// What parked members of a gang were told.
#[derive(Debug, Clone, Default)]
pub(super) struct Parked {
    /// Kinds told to members that may still show them.
    told: BTreeSet<Kind>,
    /// When those that show another kind than holds are woken.
    due: Option<Instant>,
    /// When that was done last.
    last: Option<Instant>,
    let_go: LetGo,
}

/// Whether those that go each by itself were let go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum LetGo {
    /// They are members of a gang, as far as is known.
    #[default]
    No,
    /// Some were just being told to wait: those are woken then once more.
    Again(Instant),
    Done,
}

impl Parked {
    /// A member may show a reason of this kind.
    pub(super) fn note(&mut self, kind: Kind) {
        self.told.insert(kind);
    }

    pub(super) fn due(&self) -> Option<Instant> {
        match self.let_go {
            LetGo::Again(at) => Some(self.due.map_or(at, |due| due.min(at))),
            LetGo::No | LetGo::Done => self.due,
        }
    }
}

/// Whether a gang says in this phase why there was no room for it, or for more of it.
fn says_why(phase: GangPhase) -> bool {
    matches!(
        phase,
        GangPhase::Queued | GangPhase::Binding | GangPhase::Bound | GangPhase::Degraded
    )
}

impl Gang {
    fn kind(&self, now: Instant) -> Kind {
        match (self.phase(now), &self.agreed) {
            (GangPhase::Pending, Agreed::Unknown(why)) => Kind::Unknown(why.clone()),
            (phase, _) if self.tries.refused.is_some() && says_why(phase) => Kind::NoRoom(phase),
            (phase, _) => Kind::Phase(phase),
        }
    }

    /// A member was told to wait; `told`: for the reason that holds for its gang.
    pub(super) fn note_parked(&mut self, uid: &PodUid, now: Instant, told: bool) {
        let Some(kept) = self.members.get(uid) else { return };
        let known = kept.told.as_ref() == Some(&self.reason);
        if kept.parked.is_none_or(|at| now >= after(at, SETTLED)) {
            self.members.change(uid, |kept| kept.parked = Some(now));
        }
        if told && !known {
            let reason = self.reason.clone();
            self.parked.told.insert(reason.clone());
            self.members.change(uid, |kept| kept.told = Some(reason));
        }
    }

    /// Wakes pods that were kept back as members of a gang when it turns out that each goes by itself. Nothing else lets them be placed, so
    /// all are woken at once, also those that another process told to wait.
    pub(super) fn let_go(&mut self, env: &mut Env<'_>) {
        let now = env.now.at;
        let first = match self.parked.let_go {
            _ if !self.goes_singly() => {
                self.parked.let_go = LetGo::No;
                return;
            }
            LetGo::Done => return,
            LetGo::Again(at) if now < at => return,
            LetGo::Again(_) => false,
            LetGo::No => true,
        };
        let life = self.members.life();
        let waits = |kept: &&Kept| {
            let told = kept.parked.is_some() || first && kept.member.refused;
            told && kept.member.stage == Stage::Pending && kept.class(life) == Class::Waiting
        };
        let kept_back = self.members.iter().filter(waits);
        let kept_back: Vec<PodUid> = kept_back.map(|kept| kept.member.uid.clone()).collect();
        for uid in &kept_back {
            self.members.change(uid, |kept| kept.told = None);
        }
        self.parked.let_go = match self.call(env, kept_back) {
            true => LetGo::Again(after(now, BEING_TOLD)),
            false => LetGo::Done,
        };
    }

    /// Brings up to date what holds, and wakes members that show something else, if it is time.
    pub(super) fn follow_parked(&mut self, env: &mut Env<'_>) {
        let now = env.now.at;
        self.reason = self.kind(now);
        if self.parked.told.iter().all(|kind| *kind == self.reason) {
            self.parked.due = None;
            return;
        }
        let next = self.parked.last.map(|last| after(last, BETWEEN));
        let settled = after(now, SETTLED);
        let due = *self
            .parked
            .due
            .get_or_insert(next.map_or(settled, |next| next.max(settled)));
        if now < due || !env.synced {
            return;
        }
        self.parked.due = None;
        let preempts = self.preempts();
        let life = self.members.life();
        let waits = |kept: &Kept| {
            let class = kept.class(life);
            kept.member.stage == Stage::Pending
                && (class == Class::Waiting || preempts && matches!(class, Class::Coming | Class::Following))
        };
        let mut left = BTreeSet::new();
        let mut woken = Vec::new();
        let mut moot = Vec::new();
        for kept in self.members.iter() {
            match &kept.told {
                None => {}
                Some(kind) if *kind == self.reason => {
                    left.insert(kind.clone());
                }
                Some(_) if !waits(kept) => moot.push(kept.member.uid.clone()),
                Some(_) if woken.len() < AT_ONCE => woken.push(kept.member.uid.clone()),
                Some(kind) => {
                    left.insert(kind.clone());
                }
            }
        }
        // Those that have a place by now were woken for it.
        for uid in woken.iter().chain(&moot) {
            self.members.change(uid, |kept| kept.told = None);
        }
        self.parked.told = left;
        if self.parked.told.iter().any(|kind| *kind != self.reason) {
            self.parked.due = Some(after(now, BETWEEN));
        }
        if !woken.is_empty() {
            self.parked.last = Some(now);
            self.call(env, woken);
        }
    }
}
