//! Continuity of a gang that its owner creates again as a whole: the slots of the incarnation that has ended are kept for the members of
//! the next one. Their time is limited, and what the owner states ends it at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{Continuation, Decision, PodUid};

use super::super::idle_time::IdleTime;
use super::super::members::Count;
use super::super::objects::{GangSite, Known};
use super::super::slots::Slot;
use super::super::types::{Now, Placement, Settings};
use super::super::{Env, after};
use super::status::time;
use super::{Barrier, Gang, State, UNUSED_HOLDS};
use crate::key::GangKey;
use crate::membership::{OwnerKind, OwnerRef};
use crate::terms::Repair;

/// How reservations that were kept for a next incarnation ended, each counted since the process began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Continuations {
    /// Reservations of a gang were kept.
    pub kept: u64,
    /// The next incarnation took them.
    pub continued: u64,
    /// Their time was over.
    pub expired: u64,
    /// The owner has ended, is suspended or gone, or wants no such gang any more.
    pub ended: u64,
    /// They were lost, or gangs of higher priority took them.
    pub lost: u64,
    /// The next incarnation asks for other devices, or was placed elsewhere.
    pub unsuitable: u64,
}

/// Why kept reservations are released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum End {
    Expired,
    Owner,
    Lost,
    Unsuitable,
}

/// Why, and how long, the slots of an incarnation that has ended are kept.
#[derive(Debug, Clone)]
pub(in super::super) struct Succession {
    /// The decision of that incarnation: the object shows it, with the slots that are kept, until the next one is decided.
    of: Arc<Decision>,
    /// The owner that creates the members again.
    owner: OwnerRef,
    /// Its UID, if that is known.
    uid: Arc<str>,
    /// The priority of the members that are gone.
    priority: i32,
    /// How long slots are kept since they are idle.
    hold: Duration,
    /// When they are released by what an earlier process reported.
    shown_end: Option<Instant>,
}

/// What is handed to a gang that continues another.
#[derive(Debug)]
pub(in super::super) struct Inheritance {
    succession: Box<Succession>,
    slots: Vec<Slot>,
    held: IdleTime,
    unused: IdleTime,
    site: GangSite,
}

impl Succession {
    pub(super) fn owner(&self) -> &OwnerRef {
        &self.owner
    }

    pub(super) fn decision_id(&self) -> &str {
        &self.of.id
    }

    pub(super) fn of(&self) -> &Arc<Decision> {
        &self.of
    }
}

impl Gang {
    /// The incarnation that the slots are kept from, while they are and until the next one is decided.
    pub(super) fn succession(&self) -> Option<&Succession> {
        match &self.state {
            State::Awaiting(succession) => Some(succession),
            State::Reserved(_) => self.continues.as_deref(),
            _ => None,
        }
    }

    /// Its slots are kept for the next incarnation.
    pub(in super::super) fn is_awaiting(&self) -> bool {
        matches!(self.state, State::Awaiting(_))
    }

    /// The priority that its reservations have.
    pub(super) fn priority(&self) -> i32 {
        let own = self.members().priority();
        match &self.state {
            State::Awaiting(succession) => own.max(succession.priority),
            _ => own,
        }
    }

    /// Whether its owner creates members of it that are lost: it is not over, and there is to be such a gang.
    pub(super) fn is_recreated(&self) -> bool {
        let facts = self.agreement.creator_facts();
        let there_are = facts.is_none_or(|facts| {
            let group = facts.groups.zip(self.key.group_index());
            group.is_none_or(|(groups, index)| index < groups) && facts.wanted != Some(0)
        });
        there_are && self.agreement.finished_owner().is_none() && self.agreement.suspended_owner().is_none()
    }

    /// Why its slots are kept now that no member is left, if they are.
    pub(super) fn begin_succession(&self) -> Option<Box<Succession>> {
        let State::Decided(_) = &self.state else {
            return None;
        };
        let terms = self.agreement.working_terms()?;
        let facts = self.agreement.creator_facts()?;
        let owner = self.agreement.creator()?;
        let kept = self.is_recreated() && self.repair() != Repair::Ignore && self.has_member_slots();
        (kept && !terms.restart_hold.is_zero()).then(|| {
            Box::new(Succession {
                of: Arc::new(self.decision().unwrap_or_else(no_decision)),
                owner: owner.clone(),
                uid: facts.uid.clone(),
                priority: self.bound_priority,
                hold: terms.restart_hold,
                shown_end: None,
            })
        })
    }

    /// Keeps the slots for the next incarnation.
    pub(super) fn keep_for_next(&mut self, env: &mut Env<'_>, succession: Box<Succession>) {
        let kept = self.site.clone();
        self.begin_incarnation_keeping_slots(false, env.now.at);
        self.site = kept;
        self.waiting_since = env.now.unix;
        self.begin_awaiting(env, succession);
    }

    /// The slots are kept for the next incarnation from now on.
    pub(super) fn begin_awaiting(&mut self, env: &mut Env<'_>, succession: Box<Succession>) {
        self.state = State::Awaiting(succession);
        env.continuations.kept += 1;
    }

    /// When kept slots are released; `None` while a pod of the incarnation before still has one.
    pub(super) fn succession_ends(&self, settings: &Settings) -> Option<Instant> {
        let State::Awaiting(succession) = &self.state else {
            return None;
        };
        if self.slots().has_leaving() {
            return None;
        }
        let since = self.slots().iter().map(|(_, slot)| slot.since()).max()?;
        let end = succession.shown_end.unwrap_or_else(|| after(since, succession.hold));
        let all = self.held.reaches(settings.hold.saturating_mul(UNUSED_HOLDS));
        Some(all.map_or(end, |all| all.min(end)))
    }

    /// The same in seconds since 1970.
    pub(super) fn succession_ends_at(&self, now: Now, settings: &Settings) -> Option<i64> {
        let left = self.succession_ends(settings)?.saturating_duration_since(now.at);
        // Rounded, so that it stays the same from one moment to the next.
        let left = left.as_secs() + u64::from(left.subsec_millis() >= 500);
        Some(now.unix.saturating_add(i64::try_from(left).unwrap_or(i64::MAX)))
    }

    /// What the object shows of it.
    pub(super) fn continuation(&self, until: Option<i64>) -> Option<Continuation> {
        let succession = self.succession()?;
        Some(Continuation {
            owner_kind: succession.owner.kind.as_shown().to_owned(),
            owner_name: succession.owner.name.to_string(),
            owner_uid: succession.uid.to_string(),
            until: until.map(time),
            priority: succession.priority,
        })
    }

    /// Whether the owner does not create the members again.
    fn is_succession_void(&self, succession: &Succession) -> bool {
        let replaced = self.agreement.creator_facts().is_some_and(|facts| {
            !facts.uid.is_empty() && !succession.uid.is_empty() && facts.uid != succession.uid
        });
        replaced || !self.is_recreated()
    }

    /// Follows a gang that waits for its next incarnation. Whether it does not any more.
    pub(super) fn step_awaiting(&mut self, env: &mut Env<'_>) -> bool {
        let State::Awaiting(succession) = &self.state else {
            return false;
        };
        let void = self.is_succession_void(succession);
        self.release_unwanted();
        let expired = self.succession_ends(env.settings).is_some_and(|end| env.now.at >= end);
        let end = match self.slots().is_empty() {
            _ if void => Some(End::Owner),
            true => Some(End::Lost),
            false => expired.then_some(End::Expired),
        };
        if let Some(end) = end {
            self.end_succession(env, end);
            return true;
        }
        if self.count().alive() == 0 {
            return false;
        }
        self.ungate(env);
        if !self.is_complete(env.now.at) || self.slots().has_leaving() {
            return false;
        }
        self.take_over(env);
        true
    }

    /// It has as many members as it needs, and none more is waited for.
    fn is_complete(&self, now: Instant) -> bool {
        let complete = self.agreement.terms().is_some() && self.enough(Count::exist);
        complete && !self.waits_for_rest(now) && !self.is_kept_gated()
    }

    /// Releases slots for which the owner creates no member any more, the last ranks first.
    fn release_unwanted(&mut self) {
        let Some(facts) = self.agreement.creator_facts().cloned() else {
            return;
        };
        let failed = |slot: &Slot| slot.rank().is_some_and(|rank| facts.failed_ranks.contains(rank));
        let mut kept: Vec<(Option<u32>, u32)> = Vec::new();
        let mut gone: Vec<u32> = Vec::new();
        for (id, slot) in self.slots().iter() {
            if failed(slot) { gone.push(id) } else { kept.push((slot.rank(), id)) }
        }
        let wanted = facts.wanted.map_or(usize::MAX, |wanted| wanted as usize);
        // A spare one has no rank.
        kept.sort_unstable_by_key(|(rank, id)| (rank.is_none(), *rank, *id));
        gone.extend(kept.into_iter().skip(wanted).map(|(_, id)| id));
        for id in gone {
            self.roster.release(id);
        }
    }

    /// The members of the next incarnation take the slots that are kept for them.
    fn take_over(&mut self, env: &mut Env<'_>) {
        let mut filled: Vec<PodUid> = self.roster.fill(env.now.at);
        if !self.enough(Count::placed) {
            // Their template has changed, and they ask for the same devices.
            filled.extend(self.roster.fill_alike(env.now.at));
        }
        if !self.enough(Count::placed) {
            self.end_succession(env, End::Unsuitable);
            return;
        }
        self.roster.release_kept();
        let placement = Placement { domain: self.site.domain.clone(), ..Placement::default() };
        let (ready, arrival) = (self.count().ready(), self.arrival(env.settings));
        let barrier = Barrier::new(env.now.at, &placement, ready, arrival, env.settings);
        let before = std::mem::replace(&mut self.state, State::Reserved(barrier));
        if let State::Awaiting(succession) = before {
            self.continues = Some(succession);
        }
        self.attempts.succeed(false);
        env.continuations.continued += 1;
        self.activate(env, filled);
    }

    /// Releases what is kept for the next incarnation; its members, if any exist, are planned like those of any other gang.
    pub(in super::super) fn end_succession(&mut self, env: &mut Env<'_>, end: End) {
        if !self.is_awaiting() {
            return;
        }
        let count = match end {
            End::Expired => &mut env.continuations.expired,
            End::Owner => &mut env.continuations.ended,
            End::Lost => &mut env.continuations.lost,
            End::Unsuitable => &mut env.continuations.unsuitable,
        };
        *count += 1;
        // A gang that kept devices idle is remembered for as long: that it did counts against the next incarnation.
        let linger = match &self.state {
            State::Awaiting(succession) if end == End::Expired => succession.hold.max(env.settings.linger),
            _ => env.settings.linger,
        };
        self.release_all();
        self.held.follow(env.now.at, false);
        self.site = GangSite::default();
        self.agreement.retain_owners(false, None);
        self.state = match self.count().alive() {
            0 => State::Over { until: after(env.now.at, linger) },
            _ => State::Open,
        };
    }

    /// Whether it is over, and kept devices idle lately.
    pub(in super::super) fn was_idle(&self, now: Instant) -> bool {
        matches!(self.state, State::Over { .. }) && !self.held.spent(now).is_zero()
    }

    /// How long it kept devices idle, which counts against the gang that continues it.
    pub(in super::super) fn take_idle_time(&mut self) -> IdleTime {
        std::mem::take(&mut self.held)
    }

    /// An earlier incarnation kept devices idle.
    pub(in super::super) fn set_idle_time(&mut self, held: IdleTime) {
        self.held = held;
    }

    /// Whether it may take the slots that another incarnation keeps.
    pub(in super::super) fn may_continue(&self, now: Instant) -> bool {
        let open = matches!(self.state, State::Open) && self.slots().is_empty() && !self.are_independent();
        open && self.is_complete(now)
    }

    /// Whether it may hand its slots to a gang that continues it.
    pub(in super::super) fn may_hand_over(&self) -> bool {
        self.is_awaiting() && self.count().alive() == 0 && !self.slots().has_leaving()
    }

    /// Hands its slots to a gang that continues it. It is over then.
    pub(in super::super) fn hand_over(&mut self, env: &Env<'_>) -> Option<Inheritance> {
        let over = State::Over { until: after(env.now.at, env.settings.linger) };
        let succession = match std::mem::replace(&mut self.state, over) {
            State::Awaiting(succession) => succession,
            before => {
                self.state = before;
                return None;
            }
        };
        self.held.follow(env.now.at, false);
        let slots = self.slots().iter().map(|(_, slot)| slot.clone()).collect();
        self.release_all();
        self.agreement.retain_owners(false, None);
        Some(Inheritance {
            succession,
            slots,
            held: std::mem::take(&mut self.held),
            unused: std::mem::take(&mut self.unused),
            site: std::mem::take(&mut self.site),
        })
    }

    /// Takes the slots of the gang that it continues.
    pub(in super::super) fn continue_from(&mut self, inheritance: Inheritance) {
        self.remember_past(inheritance.succession.of.id.clone());
        for slot in inheritance.slots {
            self.roster.add_kept(slot);
        }
        (self.held, self.unused) = (inheritance.held, inheritance.unused);
        self.site = inheritance.site;
        self.agreement.retain_owners(true, None);
        self.state = State::Awaiting(inheritance.succession);
    }

    /// Keeps the slots that an earlier process kept for the next incarnation. False if the object does not show that it did.
    pub(super) fn resume_succession(
        &mut self,
        env: &Env<'_>,
        known: &Known,
        decision: &Arc<Decision>,
        slots: Vec<Slot>,
    ) -> bool {
        let Some(shown) = known.continuation() else {
            return false;
        };
        let Some(owner) = owner_of(&self.key, shown) else {
            return false;
        };
        self.release_all();
        self.remember_past(decision.id.clone());
        for slot in slots {
            let id = self.roster.add_kept(slot);
            self.roster.slots_mut().doubt(id);
        }
        self.roster.slots_mut().keep_spares(env.now.at);
        // A forged time is no longer than the operator's ceiling.
        let most = env.settings.ceilings.restart_hold;
        let left = shown.until.as_ref().map(|until| until.0.as_second().saturating_sub(env.now.unix).max(0));
        let left = left.map(|left| Duration::from_secs(left.unsigned_abs()).min(most));
        self.site = known.site();
        self.waiting_since = known.waiting_since().unwrap_or(self.waiting_since);
        self.agreement.retain_owners(true, Some(owner.clone()));
        self.state = State::Awaiting(Box::new(Succession {
            of: Arc::clone(decision),
            owner,
            uid: shown.owner_uid.as_str().into(),
            priority: shown.priority,
            hold: env.settings.restart_hold.min(most),
            shown_end: left.map(|left| after(env.now.at, left)),
        }));
        true
    }
}

/// The owner that an object names.
fn owner_of(key: &GangKey, shown: &Continuation) -> Option<OwnerRef> {
    let kind = OwnerKind::creator_named(&shown.owner_kind)?;
    let legal = crate::integrations::is_object_name(&shown.owner_name);
    legal.then(|| OwnerRef {
        kind,
        namespace: key.namespace.clone(),
        name: shown.owner_name.as_str().into(),
        part: "".into(),
    })
}

fn no_decision() -> Decision {
    Decision { id: String::new(), revision: 0, min: 0, domain: String::new(), reservations: Vec::new() }
}
