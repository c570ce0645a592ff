//! Incarnations of a gang: where one ends and the next begins, and how a process continues the one that an earlier process decided. Members
//! of different incarnations never count together.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{DecidedReservation, Decision, GangPhase, NodeName, PodUid};

use super::super::attempts::Attempts;
use super::super::barrier::Barrier;
use super::super::decision::StandingDecision;
use super::super::idle_time::IdleTime;
use super::super::members::{Class, Count, Members, TrackedMember};
use super::super::objects::{GangSite, KnownObject};
use super::super::slots::Slot;
use super::super::types::{Member, Moment, Placement, Settings, Stage};
use super::super::{Env, after};
use super::decided_groups::decided_groups;
use super::succession::{End, Inheritance, Succession};
use super::{Gang, State};
use crate::terms::Repair;

/// Where an incarnation ends and the next begins.
impl Gang {
    /// No member is left, and none has ended well whose pod still exists: the next member begins an incarnation.
    pub(super) fn has_ended(&self) -> bool {
        let none = self.count().alive() == 0;
        none && (self.count().of(Class::Completed) == 0 || self.members().is_abandoned())
    }

    pub(super) fn end_incarnation(&mut self, env: &mut Env<'_>) {
        if let Some(succession) = self.begin_succession() {
            self.keep_for_next(env, succession);
            return;
        }
        self.begin_incarnation(false);
        self.state = State::Over { until: after(env.now.at, env.settings.linger) };
    }

    /// Releases everything that belongs to this incarnation. If the next one `continues` it, the work that is done is carried over.
    pub(super) fn begin_incarnation(&mut self, continues: bool) {
        self.agreement.retain_owners(false, None);
        self.roster.release_all();
        self.begin_incarnation_with_slots(continues);
    }

    /// The same, and the slots are kept for it, spare ones like the others.
    pub(super) fn begin_incarnation_keeping_slots(&mut self, continues: bool, now: Instant) {
        self.roster.slots_mut().keep_spares(now);
        self.begin_incarnation_with_slots(continues);
    }

    fn begin_incarnation_with_slots(&mut self, continues: bool) {
        if let Some(id) = self.decision_id().map(str::to_owned) {
            self.past.add(id);
        }
        self.roster.begin_incarnation(continues);
        self.activation.clear();
        self.agreement.forget_members();
        self.agreement.choose(None);
        self.attempts = Attempts::default();
        self.all_evicted = false;
        self.lost_to_eviction = false;
        self.bound_at = None;
        self.continues = None;
        self.site = GangSite::default();
        let completed = |member: &TrackedMember| self.members().class(member) == Class::Completed;
        for uid in self.members().uids(completed) {
            self.count_declaration(&uid);
        }
    }

    /// Begins a new incarnation with these members.
    fn begin_incarnation_with(&mut self, with: &[PodUid], continues: bool, now: Instant) {
        self.begin_incarnation(continues);
        let incarnation = self.members().incarnation();
        for uid in with {
            self.roster.members_mut().change(uid, |member| member.set_incarnation(incarnation));
            self.follow(uid, now);
        }
    }

    /// Begins the next incarnation, after one that is done, with these members; the others are of the one before.
    pub(super) fn begin_next_incarnation(&mut self, with: &[PodUid], now: Moment, settings: &Settings) {
        self.begin_incarnation_with(with, false, now.at);
        self.state = State::Open;
        self.waiting_since = now.unix;
        self.settle_until = after(now.at, settings.settle);
    }

    /// Begins the next incarnation, after one that is done, with those that are alive.
    pub(super) fn begin_next_with_living(&mut self, env: &Env<'_>) {
        let incarnation = self.members().incarnation();
        let alive = self.members().uids(|member| member.is_alive(incarnation));
        self.begin_next_incarnation(&alive, env.now, env.settings);
    }

    /// As many members have ended well as are needed, and no other has a slot or is on a node. Such an incarnation may be followed by
    /// another under the same name, where only the name or an object that stays identifies the gang.
    fn is_done(&self) -> bool {
        let count = self.count();
        let idle = count.of(Class::Bound) == 0 && self.members().on_the_way().is_empty();
        let may = matches!(self.state, State::Open | State::Decided(_)) && self.key.incarnation.is_empty();
        may && idle
            && count.of(Class::Completed) > 0
            && self.minimum().is_met(|count: &Count| count.of(Class::Completed))
    }

    /// Whether members that wait are of another incarnation than those that have ended well: other controllers created them.
    pub(super) fn is_next_incarnation(&self) -> bool {
        self.is_done()
            && self.waits_beside_light()
            && self.members().have_new_controllers()
            && self.members().came_after_completed()
            // Where more may exist than are needed, they may be some of those.
            && self.lacks_none(0)
    }

    /// Some living members are not of those that run without devices.
    fn waits_beside_light(&self) -> bool {
        let count = self.count();
        count.alive() > count.of(Class::Light) + count.of(Class::LightBound)
    }

    /// Whether a new member is the first of the next incarnation, though its controller is not known: all of the one before are done.
    pub(super) fn begins_next_incarnation(&self, pod: &Member) -> bool {
        let waits = matches!(pod.stage, Stage::Pending | Stage::Gated { .. }) && !pod.leaving;
        let alone = self.count().alive() == 0 && pod.membership.made_by.is_none();
        waits && alone && self.is_done() && self.lacks_none(self.members().most())
    }

    /// None is missing of as many as there may be, where that is declared, or else of `most`: a new member replaces none.
    fn lacks_none(&self, most: u32) -> bool {
        let terms = self.agreement.working_terms();
        let declared = terms.and_then(|terms| (terms.max < u32::MAX).then_some(terms.max).or(terms.total));
        self.count().of(Class::Completed) >= declared.unwrap_or(most)
    }
}

/// Continuity where the owner creates the gang again as a whole: its slots are kept for the members of the next incarnation.
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
            State::Awaiting(succession) => own.max(succession.priority()),
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
            let (priority, hold) = (self.bound_priority, terms.restart_hold);
            Box::new(Succession::new(self.decision(), owner, &facts.uid, priority, hold))
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
        Some(self.idle.kept_until(succession.end(since), settings))
    }

    /// The same in seconds since 1970.
    pub(super) fn succession_ends_at(&self, now: Moment, settings: &Settings) -> Option<i64> {
        let left = self.succession_ends(settings)?.saturating_duration_since(now.at);
        // Rounded, so that it stays the same from one moment to the next.
        let left = left.as_secs() + u64::from(left.subsec_millis() >= 500);
        Some(now.unix.saturating_add(i64::try_from(left).unwrap_or(i64::MAX)))
    }

    /// Whether the owner does not create the members again.
    fn is_succession_void(&self, succession: &Succession) -> bool {
        let facts = self.agreement.creator_facts();
        let replaced = facts.is_some_and(|facts| succession.is_replaced_by(&facts.uid));
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
    pub(super) fn is_complete(&self, now: Instant) -> bool {
        let complete = self.has_minimum();
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
        if !self.minimum().is_met(Count::placed) {
            // Their template has changed, and they ask for the same devices.
            filled.extend(self.roster.fill_alike(env.now.at));
        }
        if !self.minimum().is_met(Count::placed) {
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
        env.continuations.ended(end);
        // A gang that kept devices idle is remembered for as long: that it did counts against the next incarnation.
        let linger = match &self.state {
            State::Awaiting(succession) if end == End::Expired => succession.hold().max(env.settings.linger),
            _ => env.settings.linger,
        };
        self.release_all();
        self.idle.follow_kept(env.now.at, false);
        self.site = GangSite::default();
        self.agreement.retain_owners(false, None);
        self.state = match self.count().alive() {
            0 => State::Over { until: after(env.now.at, linger) },
            _ => State::Open,
        };
    }

    /// Whether it is over, and kept devices idle lately.
    pub(in super::super) fn was_idle(&self, now: Instant) -> bool {
        matches!(self.state, State::Over { .. }) && self.idle.has_kept(now)
    }

    /// How long it kept devices idle, which counts against the gang that continues it.
    pub(in super::super) fn take_idle_time(&mut self) -> IdleTime {
        self.idle.take_kept()
    }

    /// An earlier incarnation kept devices idle.
    pub(in super::super) fn set_idle_time(&mut self, held: IdleTime) {
        self.idle.set_kept(held);
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
        self.idle.follow_kept(env.now.at, false);
        let slots = self.slots().iter().map(|(_, slot)| slot.clone()).collect();
        self.release_all();
        self.agreement.retain_owners(false, None);
        Some(Inheritance {
            succession,
            slots,
            idle: std::mem::take(&mut self.idle),
            site: std::mem::take(&mut self.site),
        })
    }

    /// Takes the slots of the gang that it continues.
    pub(in super::super) fn continue_from(&mut self, inheritance: Inheritance) {
        self.past.add(inheritance.succession.decision_id().to_owned());
        for slot in inheritance.slots {
            self.roster.add_kept(slot);
        }
        self.idle = inheritance.idle;
        self.site = inheritance.site;
        self.agreement.retain_owners(true, None);
        self.state = State::Awaiting(inheritance.succession);
    }

    /// Keeps the slots that an earlier process kept for the next incarnation. False if the object does not show that it did.
    pub(super) fn resume_succession(
        &mut self,
        env: &Env<'_>,
        known: &KnownObject,
        decision: &Arc<Decision>,
        slots: Vec<Slot>,
    ) -> bool {
        let shown = known.continuation();
        let succession =
            shown.and_then(|shown| Succession::shown(&self.key, shown, decision, env.now, env.settings));
        let Some(succession) = succession else {
            return false;
        };
        self.release_all();
        self.past.add(decision.id.clone());
        for slot in slots {
            let id = self.roster.add_kept(slot);
            self.roster.slots_mut().doubt(id);
        }
        self.roster.slots_mut().keep_spares(env.now.at);
        self.site = known.site();
        self.waiting_since = known.waiting_since().unwrap_or(self.waiting_since);
        self.agreement.retain_owners(true, Some(succession.owner().clone()));
        self.state = State::Awaiting(Box::new(succession));
        true
    }
}

/// How a process continues what the object shows. Only the object and the pods show it: a decision stands as long as one of the members it
/// names does.
impl Gang {
    /// The object shows a decision, or none.
    pub(in super::super) fn follow_decision(&mut self, env: &mut Env<'_>, known: &KnownObject) {
        if !env.synced {
            return;
        }
        let decision = known
            .decision()
            .filter(|decision| known.is_about(&self.key) && !self.past.contains(&decision.id))
            .map(Arc::clone);
        match (&mut self.state, decision) {
            (State::Committing(commit), Some(decision)) if *commit.decision() == *decision => self.decide(),
            (State::Committing(_), None) => self.object_shows_no_decision(env),
            (State::Decided(decided), shown) => match shown.filter(|shown| shown.id == decided.id()) {
                Some(shown) => {
                    if !decided.written_mut().observe(&shown) {
                        self.reported.forget_decision();
                    }
                    self.compare_reported(known, &shown);
                }
                // Our decision stands; whatever overwrote it is overwritten again. Members wait until the object shows it.
                None => {
                    decided.written_mut().lose();
                    self.reported.forget();
                }
            },
            (_, Some(decision)) => self.adopt(env, known, &decision),
            (State::Open, None) => {
                let is_about = known.is_about(&self.key);
                if is_about {
                    self.leave_behind(env, known, None);
                }
                self.continue_waiting(known);
                if is_about && self.is_bound_without_slots() {
                    self.bound_at = self.bound_at.or(known.bound_at());
                }
            }
            (_, None) => {}
        }
    }

    fn compare_reported(&mut self, known: &KnownObject, shown: &Decision) {
        let version = (self.decision_id().map(str::to_owned), self.slots().version());
        let mut reported = std::mem::take(&mut self.reported);
        reported.compare(known, shown, &version, || self.decision());
        self.reported = reported;
    }

    /// A gang that waited when the process before ended goes on waiting: its age counts in the queue, its failed attempts in how long it
    /// waits after the next one, and what its victims leave is its own.
    fn continue_waiting(&mut self, known: &KnownObject) {
        let Some(since) = known.waiting_since().filter(|_| known.is_about(&self.key)) else {
            return;
        };
        let of_then = self.members().iter().any(|member| member.pod().created <= since);
        if !self.reported.is_anything() && of_then {
            self.waiting_since = self.waiting_since.min(since);
            let preempting = known.phase() == GangPhase::Preempting;
            self.attempts.resume(known.failed_attempts(), preempting);
        }
    }

    /// Takes over a decision that this process has not made.
    fn adopt(&mut self, env: &mut Env<'_>, known: &KnownObject, decision: &Arc<Decision>) {
        let devices = env.devices;
        let key = self.key.clone();
        let is_free = |reservation: &DecidedReservation| {
            let mut ids = reservation.devices.iter().flat_map(|devices| &devices.ids);
            ids.all(|id| {
                let holder = devices.holder(&reservation.node, id);
                holder.is_none_or(|holder| *holder == key)
            })
        };
        self.leave_behind(env, known, Some(decision));
        let incarnation = self.members().incarnation();
        // Members that have ended well, that another scheduler has bound or that wait have no slot in it, and belong to it all the same.
        let was_there = |member: &TrackedMember| {
            (member.is_alive(incarnation) || member.class(incarnation) == Class::Completed)
                && known.bound_at().is_some_and(|bound| member.pod().created <= bound)
        };
        let of_then = |uid: &PodUid| {
            let member = self.members().get(uid);
            member.is_some_and(|member| member.is_of(incarnation))
        };
        let stands =
            decision.pods().chain(known.unreserved()).any(of_then) || self.members().iter().any(was_there);
        if known.continuation().is_some() {
            let free = decision.reservations.iter().filter(|reservation| is_free(reservation));
            let slots = free.map(|reservation| Slot::decided(reservation, env.now.at)).collect();
            if self.resume_succession(env, known, decision, slots) {
                return;
            }
        }
        if !stands {
            // None of the members that it was about is left: the present ones are of another incarnation.
            self.past.add(decision.id.clone());
            self.reported.forget();
            return;
        }
        // A member that it names and that has ended well was bound by it.
        let has_ended = |uid: &PodUid| {
            self.members().get(uid).is_some_and(|member| member.class(incarnation) == Class::Completed)
        };
        let begun = self.members().iter().any(TrackedMember::is_pinned) || decision.pods().any(has_ended);
        if !begun && !decision.reservations.iter().all(is_free) {
            // The write came late, and its devices have gone to others meanwhile. No member is bound by it, so none is to be.
            self.past.add(decision.id.clone());
            self.reported.forget();
            return;
        }
        if known.is_restarting() {
            self.resume_restart(env, known, decision);
            return;
        }
        self.release_all();
        let most = u32::try_from(env.settings.max_members).unwrap_or(u32::MAX);
        let (before, since) = (known.completed_by_role(), decision.pods().collect());
        self.roster.members_mut().complete_before(known.completed(), before, &since, most);
        if self.agreement.has_tree() {
            let quorum = self.agreement.resolved().and_then(|terms| terms.quorum.clone());
            let groups = decided_groups(quorum.as_deref(), decision, known.completed_by_role());
            self.agreement.choose(Some(groups));
        }
        let of_object = self.terms_of_object();
        let min = of_object.map_or(decision.min, |terms| terms.min.min(decision.min));
        self.roster.members_mut().raise_most(known.members().min(most));
        let short = known.phase() == GangPhase::Degraded;
        let terms = self.agreement.resolved().map(|terms| &**terms);
        let decided = StandingDecision::adopted(decision, min, terms, known.bound_at().is_some(), short);
        self.state = State::Decided(Box::new(decided));
        self.agreement.retain_owners(true, None);
        self.bound_priority = self.members().priority();
        self.attempts.resume_decided(known.failed_attempts());
        self.site = known.site();
        self.bound_at = known.bound_at();
        self.waiting_since = known.waiting_since().unwrap_or(self.waiting_since);
        for reservation in &decision.reservations {
            self.adopt_reservation(reservation, is_free(reservation), env.now.at);
        }
        let bound = |member: &TrackedMember| member.slot().is_none() && member.bound_node().is_some();
        for uid in self.members().uids(bound) {
            self.follow(&uid, env.now.at);
        }
        let spares: Vec<u32> = self.slots().spares().map(|(id, _)| id).collect();
        for id in self.slots().kept().iter().copied().chain(spares).collect::<Vec<_>>() {
            self.roster.slots_mut().doubt(id);
        }
        let coming: Vec<PodUid> = self.members().on_the_way().iter().cloned().collect();
        self.activate(env, coming);
        self.begin_next_if_all_done(env, known);
    }

    fn adopt_reservation(&mut self, reservation: &DecidedReservation, is_free: bool, now: Instant) {
        let member = reservation.pod.as_ref().and_then(|uid| self.members().get(uid));
        let class = member.map(|member| self.members().class(member));
        let is_bound_here = |member: &TrackedMember| {
            let here: Option<&NodeName> = member.bound_node().filter(|node| **node == reservation.node);
            here.is_some() && member.lives()
        };
        let bound_here = member.is_some_and(is_bound_here);
        if class == Some(Class::Completed) || !is_free && !bound_here {
            return;
        }
        let holds = matches!(
            class,
            Some(
                Class::Waiting
                    | Class::Bound
                    | Class::Coming
                    | Class::Following
                    | Class::Arrived
                    | Class::Lost
            )
        );
        let member = member.filter(|member| holds && member.slot().is_none());
        let member = member.map(|member| member.pod().uid.clone());
        let slot = Slot::decided(reservation, now);
        let Some(uid) = member else {
            self.roster.add_kept(slot);
            return;
        };
        let id = self.roster.add(slot, &uid, now);
        if bound_here {
            self.roster.set_bound(id, &uid, now);
        }
        self.follow(&uid, now);
    }

    /// The process before had begun to delete all members: those that existed then still have to go.
    fn resume_restart(&mut self, env: &Env<'_>, known: &KnownObject, decision: &Decision) {
        let named: BTreeSet<&PodUid> = decision.pods().collect();
        let is_new = |member: &TrackedMember| {
            let before = known.bound_at().is_some_and(|bound| member.pod().created <= bound);
            !named.contains(&member.pod().uid) && !before
        };
        let new = self.members().uids(is_new);
        self.begin_incarnation_with(&new, true, env.now.at);
        self.past.add(decision.id.clone());
        self.state = State::Restarting {
            again: env.now.at,
            of: Some(Arc::new(decision.clone())),
            to: None,
            keeps: None,
        };
    }

    /// Leaves behind members that had ended well before the incarnation began that the object is about: the process before did not count
    /// them, and what its decision does not name has not ended since. Members without devices are in no decision: of those only the older
    /// ones are left behind.
    fn leave_behind(&mut self, env: &Env<'_>, known: &KnownObject, decision: Option<&Decision>) {
        let fresh = matches!(self.state, State::Open) && !self.reported.is_anything();
        let count = self.count();
        // A member that another scheduler has bound is in no decision: it may have ended since the last status.
        let past_us = decision.is_none() && count.of(Class::Bound) > 0;
        let none = past_us || count.of(Class::Completed) == 0;
        if !fresh || none || !self.key.incarnation.is_empty() {
            return;
        }
        let mut named: BTreeSet<&PodUid> = decision.into_iter().flat_map(Decision::pods).collect();
        named.extend(known.unreserved());
        let before = ended_before(self.members(), &named, known.completed());
        if before.is_empty() {
            return;
        }
        let with = self.members().uids(|member| !before.contains(&member.pod().uid));
        self.begin_incarnation_with(&with, false, env.now.at);
    }

    /// The process before saw all of an incarnation done, and the waiting members came later: nothing else distinguishes them from it.
    fn begin_next_if_all_done(&mut self, env: &Env<'_>, known: &KnownObject) {
        let came = self.is_done() && self.waits_beside_light() && self.members().have_no_controllers();
        if known.phase() == GangPhase::Finished && came && self.lacks_none(known.members()) {
            self.begin_next_with_living(env);
        }
    }
}

/// Members that had ended well before an incarnation: all but the `completed` first ones of those that are not `named` by its decision.
/// Members without devices are among them if they are older than the last of those.
fn ended_before(members: &Members, named: &BTreeSet<&PodUid>, completed: u32) -> BTreeSet<PodUid> {
    let incarnation = members.incarnation();
    let continues =
        |member: &&TrackedMember| member.is_alive(incarnation) || named.contains(&member.pod().uid);
    let controllers: BTreeSet<&Arc<str>> = members
        .iter()
        .filter(continues)
        .filter_map(|member| member.pod().membership.made_by.as_ref())
        .collect();
    let (mut counted, mut others, mut light) = (0_u32, Vec::new(), Vec::new());
    for member in members.iter() {
        let pod = member.pod();
        if member.class(incarnation) != Class::Completed || named.contains(&pod.uid) {
            continue;
        }
        let at = (pod.created, pod.uid.clone());
        let controller = pod.membership.made_by.as_ref();
        let of_this = controller.is_some_and(|controller| controllers.contains(controller));
        match pod.shape {
            None if of_this => {}
            None => light.push(at),
            Some(_) => {
                counted = counted.saturating_add(1);
                others.extend((!of_this).then_some(at));
            }
        }
    }
    others.sort_unstable();
    others.truncate(counted.saturating_sub(completed) as usize);
    let Some((newest, _)) = others.last() else {
        return BTreeSet::new();
    };
    light.retain(|(created, _)| created <= newest);
    others.into_iter().chain(light).map(|(_, uid)| uid).collect()
}
