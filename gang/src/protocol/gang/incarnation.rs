//! Incarnations of a gang: where one ends and the next begins, and how a process continues the one that an earlier process decided. Members
//! of different incarnations never count together.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use gantry_api::{DecidedReservation, Decision, GangPhase, NodeName, PodUid};

use super::super::attempts::Attempts;
use super::super::decision::Decided;
use super::super::members::{Class, Count, TrackedMember};
use super::super::objects::{GangSite, Known};
use super::super::slots::Slot;
use super::super::types::{Member, Now, Settings, Stage};
use super::super::{Env, after};
use super::{Gang, State};
use crate::quorum::Selection;

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
            self.remember_past(id);
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
    pub(super) fn begin_next_incarnation(&mut self, with: &[PodUid], now: Now, settings: &Settings) {
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
            && self.enough(|count: &Count| count.of(Class::Completed))
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

/// How a process continues what the object shows. Only the object and the pods show it: a decision stands as long as one of the members it
/// names does.
impl Gang {
    /// The object shows a decision, or none.
    pub(in super::super) fn follow_decision(&mut self, env: &mut Env<'_>, known: &Known) {
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

    fn compare_reported(&mut self, known: &Known, shown: &Decision) {
        let version = (self.decision_id().map(str::to_owned), self.slots().version());
        let mut reported = std::mem::take(&mut self.reported);
        reported.compare(known, shown, &version, || self.decision());
        self.reported = reported;
    }

    /// A gang that waited when the process before ended goes on waiting: its age counts in the queue, its failed attempts in how long it
    /// waits after the next one, and what its victims leave is its own.
    fn continue_waiting(&mut self, known: &Known) {
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
    fn adopt(&mut self, env: &mut Env<'_>, known: &Known, decision: &Arc<Decision>) {
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
            self.remember_past(decision.id.clone());
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
            self.remember_past(decision.id.clone());
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
        self.choose_decided_groups(decision, known.completed_by_role());
        let of_object = self.terms_of_object();
        let min = of_object.map_or(decision.min, |terms| terms.min.min(decision.min));
        self.roster.members_mut().raise_most(known.members().min(most));
        let short = known.phase() == GangPhase::Degraded;
        let terms = self.agreement.resolved().map(|terms| &**terms);
        let decided = Decided::adopted(decision, min, terms, known.bound_at().is_some(), short);
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

    /// The groups of a tree of groups that a decision was about: those with as many reservations, or members that have ended
    /// well, as they need, or else those with the most.
    fn choose_decided_groups(&mut self, decision: &Decision, completed: &BTreeMap<String, u32>) {
        if !self.agreement.has_tree() {
            return;
        }
        let mut reserved: BTreeMap<&str, u32> = BTreeMap::new();
        for reservation in &decision.reservations {
            *reserved.entry(reservation.role.as_str()).or_default() += 1;
        }
        for (role, completed) in completed {
            let count = reserved.entry(role).or_default();
            *count = count.saturating_add(*completed);
        }
        let quorum = self.agreement.resolved().and_then(|terms| terms.quorum.clone());
        let min_of = |role: &str| quorum.as_ref().and_then(|quorum| quorum.min_of(role));
        let is_whole = |role: &str| min_of(role) <= reserved.get(role).copied();
        let is_of_decision = |selection: &Selection| {
            selection.values().fold(0, |sum: u32, min| sum.saturating_add(*min)) == decision.min
        };
        let selections = |of: &dyn Fn(&str) -> bool| -> Vec<Selection> {
            let all = quorum.as_ref().map(|quorum| quorum.selections(&of, &|role| role.to_owned()));
            all.into_iter().flatten().filter(is_of_decision).collect()
        };
        let covered = |selection: &Selection| {
            let counts =
                selection.iter().map(|(role, min)| reserved.get(&**role).map_or(0, |count| *count.min(min)));
            counts.fold(0, u32::saturating_add)
        };
        let placed = |selection: &Selection| {
            decision
                .reservations
                .iter()
                .filter(|reservation| selection.contains_key(&*reservation.role))
                .count()
        };
        // A lost member may have no reservation. Where counts are equal, a group that is placed was decided later than one that has ended.
        let with_most = || {
            let all = selections(&|_| true).into_iter();
            all.min_by_key(|selection| Reverse((covered(selection), placed(selection))))
        };
        let same = selections(&is_whole).into_iter().next().or_else(with_most);
        // Too few groups have pods now, a minimum may have changed since, or pods of other groups are seen later. A member may have
        // ended well and its reservation still be written.
        let of_reserved = || {
            let counts = reserved.iter().map(|(role, count)| {
                let count = min_of(role).map_or(*count, |min| min.min(*count));
                ((*role).into(), count)
            });
            counts.collect()
        };
        self.agreement.choose(Some(same.unwrap_or_else(of_reserved)));
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
    fn resume_restart(&mut self, env: &Env<'_>, known: &Known, decision: &Decision) {
        let named: BTreeSet<&PodUid> = decision.pods().collect();
        let is_new = |member: &TrackedMember| {
            let before = known.bound_at().is_some_and(|bound| member.pod().created <= bound);
            !named.contains(&member.pod().uid) && !before
        };
        let new = self.members().uids(is_new);
        self.begin_incarnation_with(&new, true, env.now.at);
        self.remember_past(decision.id.clone());
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
    fn leave_behind(&mut self, env: &Env<'_>, known: &Known, decision: Option<&Decision>) {
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
        let incarnation = self.members().incarnation();
        let continues =
            |member: &&TrackedMember| member.is_alive(incarnation) || named.contains(&member.pod().uid);
        let controllers: BTreeSet<&Arc<str>> = self
            .members()
            .iter()
            .filter(continues)
            .filter_map(|member| member.pod().membership.made_by.as_ref())
            .collect();
        let (mut counted, mut others, mut light) = (0_u32, Vec::new(), Vec::new());
        for member in self.members().iter() {
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
        others.truncate(counted.saturating_sub(known.completed()) as usize);
        let Some((newest, _)) = others.last() else { return };
        light.retain(|(created, _)| created <= newest);
        let before: BTreeSet<PodUid> = others.into_iter().chain(light).map(|(_, uid)| uid).collect();
        let with = self.members().uids(|member| !before.contains(&member.pod().uid));
        self.begin_incarnation_with(&with, false, env.now.at);
    }

    /// The process before saw all of an incarnation done, and the members that wait now came later: nothing else tells them from it.
    fn begin_next_if_all_done(&mut self, env: &Env<'_>, known: &Known) {
        let came = self.is_done() && self.waits_beside_light() && self.members().have_no_controllers();
        if known.phase() == GangPhase::Finished && came && self.lacks_none(known.members()) {
            self.begin_next_with_living(env);
        }
    }
}
