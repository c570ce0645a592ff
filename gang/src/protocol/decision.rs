//! The decision of a gang: first while it is being written, then as it stands. What the object shows of it, and how certain that is, is
//! tracked in [`ReservationWrites`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{DecidedReservation, Decision, PodUid};

use super::after;
use super::types::{CommitFailure, Moment, Settings};
use crate::terms::{Repair, Terms};

/// When a decision was made, by its ID: in seconds since 1970, and its number in its process. `None` of an ID that is not ours.
pub(super) fn made_at(decision: &Decision) -> Option<(i64, u64)> {
    let mut parts = decision.id.rsplit('-');
    let number = parts.next()?.parse().ok()?;
    let at = parts.next()?.parse().ok()?;
    Some((at, number))
}

/// A decision that is being written.
#[derive(Debug, Clone)]
pub(super) struct Commit {
    decision: Decision,
    /// The write has ended without success, and the object has not been read since.
    awaits_object: bool,
    /// An earlier write of it may still succeed, though no answer came.
    in_doubt: bool,
    /// How the API server refused it last.
    refused: Option<Arc<str>>,
}

/// What follows from the end of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CommitEnd {
    /// The decision is written.
    Written,
    /// It does not stand and will not: the reservation is of use to others.
    Refused(Arc<str>),
    /// It has to be written again: an earlier write may still succeed.
    Again,
    /// The object has to be read.
    Read,
}

impl Commit {
    pub(super) fn new(decision: Decision) -> Self {
        Self { decision, awaits_object: false, in_doubt: false, refused: None }
    }

    pub(super) fn decision(&self) -> &Decision {
        &self.decision
    }

    pub(super) fn awaits_object(&self) -> bool {
        self.awaits_object
    }

    pub(super) fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }

    pub(super) fn refused(&self) -> Option<&Arc<str>> {
        self.refused.as_ref()
    }

    /// The write has ended.
    pub(super) fn end(&mut self, result: Result<(), CommitFailure>) -> CommitEnd {
        match result {
            Ok(()) => CommitEnd::Written,
            Err(CommitFailure::Refused(why)) if !self.in_doubt => CommitEnd::Refused(why),
            // An earlier write may still succeed, so this one has to: nothing else ends the doubt.
            Err(CommitFailure::Refused(why)) => {
                self.refused = Some(why);
                CommitEnd::Again
            }
            Err(failure) => {
                self.awaits_object = true;
                self.in_doubt |= failure == CommitFailure::Unknown;
                self.refused = None;
                CommitEnd::Read
            }
        }
    }

    /// The same decision is written once more.
    pub(super) fn repeat(&mut self) -> Decision {
        self.awaits_object = false;
        self.decision.clone()
    }
}

/// A shortage of a decided gang: a member of its minimum has no slot.
#[derive(Debug, Clone, Copy)]
struct MissingSince {
    since: Instant,
    /// For longer than a slot is held.
    long: bool,
}

/// A decision that stands.
#[derive(Debug, Clone)]
pub(super) struct StandingDecision {
    id: String,
    min: u32,
    /// The minimums of its roles; `None` for a decision of another process, until the terms are known again.
    by_role: Option<Vec<(Arc<str>, u32)>>,
    /// The repair that its pods declared; a pod that is written later does not change it. `None` as for roles.
    repair: Option<Repair>,
    /// Its minimum was bound once.
    was_bound: bool,
    /// It was bound, and lacks members now.
    short: bool,
    /// Since when fewer members are left than it needs, where that restarts the gang.
    lost_since: Option<Instant>,
    shortage: Option<MissingSince>,
    /// Which gang got the slot of a lost member that is still missing.
    gave_to: Option<Arc<str>>,
    written: ReservationWrites,
    /// By slot of a member that was a spare one: the pods that were lent its devices and have to go.
    evictions: BTreeMap<u32, Eviction>,
}

/// Pods that have to go from the devices of a slot that was a spare one.
#[derive(Debug, Clone)]
struct Eviction {
    pods: BTreeSet<PodUid>,
    /// Since when.
    since: Instant,
    /// Until when they are waited for.
    until: Instant,
}

impl StandingDecision {
    /// The decision that was just written.
    pub(super) fn new(decision: &Decision, terms: Option<&Terms>) -> Self {
        Self {
            id: decision.id.clone(),
            min: decision.min,
            by_role: Some(terms.map(|terms| terms.by_role.clone()).unwrap_or_default()),
            repair: terms.map(|terms| terms.repair),
            was_bound: false,
            short: false,
            lost_since: None,
            shortage: None,
            gave_to: None,
            written: ReservationWrites::new(decision),
            evictions: BTreeMap::new(),
        }
    }

    /// A decision of another process, with the minimum that it has by now.
    pub(super) fn adopted(
        decision: &Decision,
        min: u32,
        terms: Option<&Terms>,
        was_bound: bool,
        short: bool,
    ) -> Self {
        Self {
            min,
            by_role: terms.map(|terms| roles_for(terms, min)),
            was_bound,
            short,
            ..Self::new(decision, terms)
        }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn min(&self) -> u32 {
        self.min
    }

    pub(super) fn by_role(&self) -> Option<&[(Arc<str>, u32)]> {
        self.by_role.as_deref()
    }

    pub(super) fn repair(&self) -> Option<Repair> {
        self.repair
    }

    pub(super) fn was_bound(&self) -> bool {
        self.was_bound
    }

    pub(super) fn gave_to(&self) -> Option<&Arc<str>> {
        self.gave_to.as_ref()
    }

    pub(super) fn written(&self) -> &ReservationWrites {
        &self.written
    }

    pub(super) fn written_mut(&mut self) -> &mut ReservationWrites {
        &mut self.written
    }

    /// What a decision of another process does not state is known once the terms are.
    pub(super) fn complete(&mut self, terms: Option<&Terms>) {
        self.repair = self.repair.or(terms.map(|terms| terms.repair));
        if self.by_role.is_none() {
            self.by_role = terms.map(|terms| roles_for(terms, self.min));
        }
    }

    /// Lowers the minimum, and those of roles, to what an object declares now.
    pub(super) fn lower(&mut self, terms: &Terms) {
        let before = (self.min, self.by_role.clone());
        self.min = self.min.min(terms.min);
        if let Some(by_role) = &mut self.by_role {
            by_role.retain_mut(|(role, min)| {
                let now = terms.by_role.iter().find(|(of, _)| of == role);
                *min = now.map_or(0, |(_, now)| *now).min(*min);
                *min > 0
            });
        }
        if (self.min, &self.by_role) != (before.0, &before.1) {
            // Members that went may have gone for that.
            self.lost_since = None;
        }
    }

    /// It is about other groups of its tree now.
    pub(super) fn take_groups(&mut self, terms: &Terms) {
        self.min = terms.min;
        self.by_role = Some(terms.by_role.clone());
        self.lost_since = None;
    }

    /// Follows whether too few members are left of a gang that `restarts` for that. Whether it restarts now: after `delay`, if the minimum
    /// may just have been lowered. A replacement that comes meanwhile undoes no loss.
    pub(super) fn follow_loss(
        &mut self,
        now: Instant,
        restarts: bool,
        lost: bool,
        delay: Option<Duration>,
    ) -> bool {
        if !restarts {
            self.lost_since = None;
        } else if lost {
            self.lost_since.get_or_insert(now);
        }
        self.lost_since.is_some_and(|since| delay.is_none_or(|delay| now >= after(since, delay)))
    }

    /// When a gang that has lost too many members restarts.
    pub(super) fn restart_due(&self, settings: &Settings) -> Option<Instant> {
        self.lost_since.map(|since| after(since, settings.settle))
    }

    /// Follows whether its minimum is bound. Returns what is new.
    pub(super) fn follow_bound(&mut self, satisfied: bool) -> BoundChange {
        let short = self.was_bound && !satisfied;
        let lost = short && !self.short;
        self.short = short;
        if satisfied && !self.was_bound {
            self.was_bound = true;
            return BoundChange::Bound;
        }
        if lost { BoundChange::Lost } else { BoundChange::None }
    }

    /// Follows whether members of its minimum have no slot. Whether that has just become long: then it is planned again, so that a deadlock
    /// shows.
    pub(super) fn follow_shortage(&mut self, now: Instant, short: bool, settings: &Settings) -> bool {
        if !short {
            self.shortage = None;
            self.gave_to = None;
            return false;
        }
        let shortage = self.shortage.get_or_insert(MissingSince { since: now, long: false });
        let becomes_long = !shortage.long && now >= after(shortage.since, settings.hold);
        shortage.long |= becomes_long;
        becomes_long
    }

    /// When it will have been short for long.
    pub(super) fn shortage_due(&self, settings: &Settings) -> Option<Instant> {
        let shortage = self.shortage.filter(|shortage| !shortage.long)?;
        Some(after(shortage.since, settings.hold))
    }

    pub(super) fn is_short_for_long(&self) -> bool {
        self.shortage.is_some_and(|shortage| shortage.long)
    }

    /// These pods have to go from a slot, and are gone by `ends`, in seconds since 1970, if all of them are terminating.
    /// Returns those that are to be evicted.
    pub(super) fn evict_from(
        &mut self,
        now: Moment,
        settings: &Settings,
        slot: u32,
        pods: &BTreeSet<PodUid>,
        ends: Option<i64>,
    ) -> Vec<PodUid> {
        let begun = self.evictions.get(&slot);
        let new = pods.iter().filter(|pod| begun.is_none_or(|begun| !begun.pods.contains(*pod)));
        let new = new.cloned().collect();
        let since = begun.map_or(now.at, |begun| begun.since);
        // By their own word, and some longer; never for ever.
        let left = ends.map(|ends| Duration::from_secs(ends.saturating_sub(now.unix).max(0).unsigned_abs()));
        let own = left.map(|left| after(now.at, left.saturating_add(settings.evict)));
        let last = after(since, settings.evict.saturating_add(settings.ending));
        let until = own.unwrap_or_else(|| after(since, settings.evict)).min(last);
        self.evictions.insert(slot, Eviction { pods: pods.clone(), since, until });
        new
    }

    /// No pod has to go from a slot. Whether one had.
    pub(super) fn end_eviction(&mut self, slot: u32) -> bool {
        self.evictions.remove(&slot).is_some()
    }

    /// The slots from which pods have to go, and until when they are waited for.
    pub(super) fn evictions(&self) -> impl Iterator<Item = (u32, Instant)> {
        self.evictions.iter().map(|(slot, eviction)| (*slot, eviction.until))
    }

    /// The pods that have to go from slots that were spare ones.
    pub(super) fn evicted(&self) -> impl Iterator<Item = &PodUid> {
        self.evictions.values().flat_map(|eviction| &eviction.pods)
    }

    /// The slot of a lost member went to another gang.
    pub(super) fn set_gave_to(&mut self, gang: &Arc<str>) {
        self.gave_to = Some(Arc::clone(gang));
    }
}

/// What is new about the members that are bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BoundChange {
    None,
    /// The minimum is bound for the first time.
    Bound,
    /// The minimum was bound, and is no longer.
    Lost,
}

/// The minimums of roles by which a gang was decided for so many. Those of other terms are others.
fn roles_for(terms: &Terms, min: u32) -> Vec<(Arc<str>, u32)> {
    if terms.min == min { terms.by_role.clone() } else { Vec::new() }
}

type Reservations = BTreeMap<PodUid, DecidedReservation>;

/// Which member has which reservation, by what was reported last and by what the object showed last. Each change has a revision, which is
/// part of the decision. A reservation that a member got after the decision counts only once the object shows it: a watch that lags, or a
/// write that is on its way, must not make an older state count again.
#[derive(Debug, Clone)]
pub(super) struct ReservationWrites {
    /// What was last reported, to be written.
    reported: Reservations,
    revision: u64,
    /// Since which revision members have the reservations that they have; the others since before this process.
    since: BTreeMap<PodUid, u64>,
    /// What the object showed last.
    shown: Reservations,
    shown_revision: u64,
}

impl ReservationWrites {
    /// A decision that is in the object.
    pub(super) fn new(decision: &Decision) -> Self {
        let reservations = by_pod(decision);
        Self {
            reported: reservations.clone(),
            revision: decision.revision,
            since: BTreeMap::new(),
            shown: reservations,
            shown_revision: decision.revision,
        }
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// This decision is on its way into the object from now on. Sets its revision.
    pub(super) fn report(&mut self, decision: &mut Decision) {
        let reservations = by_pod(decision);
        let next = self.revision + 1;
        let mut moved = false;
        for (uid, reservation) in &reservations {
            let reported = self.reported.get(uid);
            if !reported.is_some_and(|reported| is_same(reported, reservation)) {
                self.since.insert(uid.clone(), next);
                moved = true;
            }
        }
        // A member that has lost its reservation may get it again: an older object shows it already.
        moved |= self.reported.keys().any(|uid| !reservations.contains_key(uid));
        self.since.retain(|uid, _| reservations.contains_key(uid));
        if moved {
            self.revision = next;
        }
        self.reported = reservations;
        decision.revision = self.revision;
    }

    /// The object shows this decision. False if another process has written it over what was reported: then it has to be reported again.
    pub(super) fn observe(&mut self, decision: &Decision) -> bool {
        self.shown_revision = decision.revision;
        // Every write of the status shows it again, and it seldom differs.
        if !shows(&self.shown, decision, |a, b| a == b) {
            self.shown = by_pod(decision);
        }
        let ours = decision.revision < self.revision
            || decision.revision == self.revision && shows(&self.reported, decision, is_same);
        if !ours {
            self.revision = decision.revision;
            self.reported.clear();
        }
        ours
    }

    /// The object is gone, or shows another decision or none: no reservation counts until it shows them again.
    pub(super) fn lose(&mut self) {
        self.shown.clear();
    }

    /// Whether the object shows that a member has this reservation, and no write that is on its way changes that.
    pub(super) fn has(&self, uid: &PodUid, reservation: &DecidedReservation) -> bool {
        let since = self.since.get(uid).copied().unwrap_or_default();
        let has = |all: &Reservations| all.get(uid).is_some_and(|known| is_same(known, reservation));
        has(&self.reported) && has(&self.shown) && self.shown_revision >= since
    }

    /// Whether the object names a member, or may name it soon: the next process may find written what is on its way.
    pub(super) fn names(&self, uid: &PodUid) -> bool {
        self.shown.contains_key(uid) || self.reported.contains_key(uid)
    }
}

fn is_same(a: &DecidedReservation, b: &DecidedReservation) -> bool {
    a.node == b.node && a.devices == b.devices
}

/// The reservations of a decision by the member that has each.
fn by_pod(decision: &Decision) -> Reservations {
    let reservations = decision.reservations.iter();
    reservations.filter_map(|reservation| Some((reservation.pod.clone()?, reservation.clone()))).collect()
}

/// Whether a decision gives exactly these reservations to members.
fn shows(
    reservations: &Reservations,
    decision: &Decision,
    same: impl Fn(&DecidedReservation, &DecidedReservation) -> bool,
) -> bool {
    let mut named = 0;
    let all = decision.reservations.iter().all(|reservation| {
        let known = reservation.pod.as_ref().map(|pod| reservations.get(pod));
        named += usize::from(known.is_some());
        known.is_none_or(|known| known.is_some_and(|known| same(known, reservation)))
    });
    all && named == reservations.len()
}

/// Decisions that are over and that the object may still show; older ones are long overwritten.
#[derive(Debug, Clone, Default)]
pub(super) struct PastDecisions(VecDeque<String>);

impl PastDecisions {
    const MOST: usize = 8;

    /// A decision is over.
    pub(super) fn add(&mut self, id: String) {
        if !self.contains(&id) {
            self.0.push_back(id);
        }
        if self.0.len() > Self::MOST {
            self.0.pop_front();
        }
    }

    /// Whether a decision is over.
    pub(super) fn contains(&self, id: &str) -> bool {
        self.0.iter().any(|known| *known == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slot(node: u8, pod: Option<u8>) -> DecidedReservation {
        DecidedReservation {
            node: format!("n{node}").as_str().into(),
            devices: Vec::new(),
            rank: None,
            ordinal: None,
            role: String::new(),
            spare: false,
            pod_name: String::new(),
            pod: pod.map(|pod| format!("p{pod}").as_str().into()),
        }
    }

    fn decision(slots: &[(u8, Option<u8>)]) -> Decision {
        Decision {
            id: "d".into(),
            revision: 0,
            min: 1,
            domain: String::new(),
            reservations: slots.iter().map(|(node, pod)| slot(*node, *pod)).collect(),
        }
    }

    fn has(written: &ReservationWrites, pod: u8, node: u8) -> bool {
        written.has(&format!("p{pod}").as_str().into(), &slot(node, Some(pod)))
    }

    #[test]
    fn written_members_that_trade_twice_wait_for_the_last() {
        // Two members trade reservations there and back: both wait until the object shows the last trade.
        let mut first = decision(&[(0, Some(0)), (1, Some(1))]);
        let mut written = ReservationWrites::new(&first);
        assert!(has(&written, 0, 0) && has(&written, 1, 1));
        let mut traded = decision(&[(1, Some(0)), (0, Some(1))]);
        written.report(&mut traded);
        assert!(!has(&written, 0, 1) && !has(&written, 0, 0), "the report is on its way");
        let back = first.clone();
        written.report(&mut first);
        assert!(!has(&written, 0, 0), "the trade may still be written");
        assert!(written.observe(&back), "a watch that lags");
        assert!(!has(&written, 0, 0) && !has(&written, 1, 1));
        assert!(written.observe(&traded));
        assert!(!has(&written, 0, 0) && !has(&written, 0, 1), "the last report says otherwise");
        assert!(written.observe(&first));
        assert!(has(&written, 0, 0) && has(&written, 1, 1));
    }

    #[test]
    fn written_member_that_stays_waits_for_no_trade() {
        let mut written = ReservationWrites::new(&decision(&[(0, Some(0)), (1, Some(1)), (2, Some(2))]));
        written.report(&mut decision(&[(1, Some(0)), (0, Some(1)), (2, Some(2))]));
        assert!(has(&written, 2, 2));
        assert!(!has(&written, 0, 1));
    }

    #[test]
    fn written_member_that_returns_to_its_reservation_waits() {
        let first = decision(&[(0, Some(0)), (1, Some(1))]);
        let mut written = ReservationWrites::new(&first);
        written.report(&mut decision(&[(1, Some(1))]));
        assert!(!has(&written, 0, 0), "it is reported without a reservation");
        let mut again = decision(&[(0, Some(0)), (1, Some(1))]);
        written.report(&mut again);
        assert!(written.observe(&first));
        assert!(!has(&written, 0, 0), "the object may still show that it has none");
        assert!(has(&written, 1, 1));
        assert!(written.observe(&again));
        assert!(has(&written, 0, 0));
    }

    #[test]
    fn written_names_members_on_their_way_into_the_object() {
        let mut written = ReservationWrites::new(&decision(&[(0, Some(0))]));
        let mut more = decision(&[(0, Some(0)), (1, Some(1))]);
        assert!(!written.names(&"p1".into()));
        written.report(&mut more);
        assert!(written.names(&"p1".into()), "the write may have come through");
        written.report(&mut decision(&[(0, Some(0))]));
        assert!(!written.names(&"p1".into()));
        assert!(written.observe(&more));
        assert!(written.names(&"p1".into()));
    }

    #[test]
    fn written_late_write_of_earlier_process_is_overwritten() {
        let mut written = ReservationWrites::new(&decision(&[(0, Some(0)), (1, Some(1))]));
        let mut theirs = decision(&[(1, Some(0)), (0, Some(1))]);
        theirs.revision = 1;
        assert!(!written.observe(&theirs));
        assert!(!has(&written, 0, 0));
        let mut ours = decision(&[(0, Some(0)), (1, Some(1))]);
        written.report(&mut ours);
        assert!(ours.revision > theirs.revision);
        assert!(!has(&written, 0, 0));
        assert!(written.observe(&ours));
        assert!(has(&written, 0, 0) && has(&written, 1, 1));
    }

    proptest! {
        #[test]
        fn written_comparison_equals_comparison_of_maps(
            before in prop::collection::btree_map(0..4_u8, 0..3_u8, 0..4),
            now in prop::collection::btree_map(0..4_u8, 0..3_u8, 0..4),
            kept in 0..2_u8,
        ) {
            let slots = |of: &BTreeMap<u8, u8>| {
                let mut slots: Vec<_> = of.iter().map(|(pod, node)| (*node, Some(*pod))).collect();
                slots.extend((0..kept).map(|node| (node, None)));
                decision(&slots)
            };
            let written = by_pod(&slots(&before));
            prop_assert_eq!(shows(&written, &slots(&now), |a, b| a == b), before == now);
            prop_assert!(shows(&written, &slots(&before), is_same));
        }

        /// However late reports are shown: once a member has its reservation, no later state of the object up to the last report has it
        /// anywhere else.
        #[test]
        fn written_reservation_is_not_contradicted_later(
            reported in prop::collection::vec(prop::collection::btree_map(0..3_u8, 0..3_u8, 1..4), 1..6),
            shown in 0..6_usize,
        ) {
            let slots = |of: &BTreeMap<u8, u8>| {
                decision(&of.iter().map(|(pod, node)| (*node, Some(*pod))).collect::<Vec<_>>())
            };
            let mut written = ReservationWrites::new(&slots(&reported[0]));
            let mut states = vec![slots(&reported[0])];
            for places in &reported[1..] {
                let mut next = slots(places);
                written.report(&mut next);
                states.push(next);
            }
            let at = shown.min(states.len() - 1);
            written.observe(&states[at]);
            for (pod, node) in &reported[reported.len() - 1] {
                if has(&written, *pod, *node) {
                    for later in &reported[at..] {
                        prop_assert_eq!(later.get(pod), Some(node));
                    }
                }
            }
        }
    }
}
