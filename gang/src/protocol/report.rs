//! What was last reported about a gang: the status in its object, the message for its pods, and the reasons that refused pods show.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{Decision, GangPhase, GangStatus, PodUid};

use super::members::{Class, Members, TrackedMember};
use super::objects::KnownObject;
use super::types::{Settings, Stage, Work};
use super::{Env, after};

/// A reason that holds for less is not reported.
const SETTLED: Duration = Duration::from_secs(1);
/// Between two times that members of a gang are activated to show another reason.
const BETWEEN: Duration = Duration::from_secs(5);
/// Members that are activated at a time for that.
const AT_ONCE: usize = 64;

/// The kind of a reason: what it counts is not part of it, except how many members exist.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ReasonKind {
    /// The size is not known, for this reason.
    Unknown(Arc<str>),
    /// It was planned and refused, in this phase.
    Refused(GangPhase),
    /// Members are missing: so many exist, and so many are kept from arriving.
    Pending { exist: u32, withheld: u32 },
    /// What the phase states.
    Phase(GangPhase),
}

/// The status that was last reported, so that it is reported again only when it has changed.
#[derive(Debug, Clone, Default)]
pub(super) struct LastReported {
    status: Option<GangStatus>,
    /// The ID of the decision and the version of the slots from which it was made.
    decision: Option<(Option<String>, u64)>,
    /// The object has shown it.
    shown: bool,
}

impl LastReported {
    /// What was reported is lost: it has to be reported again.
    pub(super) fn forget(&mut self) {
        self.status = None;
    }

    /// Another process has written other reservations over those that were reported.
    pub(super) fn forget_decision(&mut self) {
        self.decision = None;
    }

    pub(super) fn is_anything(&self) -> bool {
        self.status.is_some()
    }

    /// Takes a status over, made from this decision and version of the slots. `None` if it was reported already, else whether the decision
    /// in it was.
    pub(super) fn replace(&mut self, status: &GangStatus, version: (Option<String>, u64)) -> Option<bool> {
        let same_decision = self.decision.as_ref() == Some(&version);
        if same_decision && self.status.as_ref() == Some(status) {
            return None;
        }
        self.status = Some(status.clone());
        self.decision = Some(version);
        self.shown = false;
        Some(same_decision)
    }

    /// Compares what the object shows of the decision that stands with what was last reported. That may still be on its way. Once the
    /// object has shown it, whatever overwrites it, such as a late write of an earlier process, is overwritten again: members wait for what
    /// the object does not show.
    pub(super) fn compare(
        &mut self,
        known: &KnownObject,
        shown: &Decision,
        version: &(Option<String>, u64),
        decision: impl FnOnce() -> Option<Decision>,
    ) {
        if self.decision.as_ref() != Some(version) {
            // A newer status follows in any case.
            return;
        }
        let Some(status) = &self.status else { return };
        if known.shows(status) && decision().as_ref() == Some(shown) {
            self.shown = true;
        } else if self.shown {
            self.forget();
        }
    }
}

/// The reasons that refused members show. kube-scheduler shows the last one until something activates the pod, which may take minutes.
/// Members that show a reason of another kind than holds are activated: late enough for it to be settled, seldom, and a few at a time, for
/// only people read it. Of counts only that of existing members activates others. Members that are independent pods after all are activated at once.
#[derive(Debug, Clone)]
pub(super) struct ShownReasons {
    /// The kind that holds.
    current: ReasonKind,
    /// Kinds that members may show.
    shown: BTreeSet<ReasonKind>,
    /// When members that show another kind than holds are activated.
    due: Option<Instant>,
    /// When that was done last.
    last: Option<Instant>,
    independent: IndependentActivation,
}

/// Whether the members of a group of independent pods were activated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IndependentActivation {
    /// They are members of a gang, as far as is known.
    No,
    /// Some were just being refused: those are activated then once more.
    Again(Instant),
    Done,
}

impl ShownReasons {
    pub(super) fn new() -> Self {
        Self {
            current: ReasonKind::Phase(GangPhase::Pending),
            shown: BTreeSet::new(),
            due: None,
            last: None,
            independent: IndependentActivation::No,
        }
    }

    pub(super) fn due(&self) -> Option<Instant> {
        match self.independent {
            IndependentActivation::Again(at) => Some(self.due.map_or(at, |due| due.min(at))),
            IndependentActivation::No | IndependentActivation::Done => self.due,
        }
    }

    /// A member was refused; `current`: for the reason that holds for its gang.
    pub(super) fn refused(&mut self, members: &mut Members, uid: &PodUid, now: Instant, current: bool) {
        let Some(member) = members.get(uid) else { return };
        let known = member.reported() == Some(&self.current);
        if member.refused_at().is_none_or(|at| now >= after(at, SETTLED)) {
            members.change(uid, |member| member.set_refused(Some(now)));
        }
        if current && !known {
            self.shown.insert(self.current.clone());
            let kind = self.current.clone();
            members.change(uid, |member| member.set_reported(Some(kind)));
        }
    }

    /// The members to be activated when it turns out that they are independent pods; `None` if none is due. All at once, also those that
    /// another process refused: nothing else lets them be placed.
    pub(super) fn independent_due(
        &mut self,
        members: &mut Members,
        now: Instant,
        are_independent: bool,
    ) -> Option<Vec<PodUid>> {
        let first = match self.independent {
            _ if !are_independent => {
                self.independent = IndependentActivation::No;
                return None;
            }
            IndependentActivation::Done => return None,
            IndependentActivation::Again(at) if now < at => return None,
            IndependentActivation::Again(_) => false,
            IndependentActivation::No => true,
        };
        let waits = |member: &TrackedMember| {
            let refused = member.refused_at().is_some() || first && member.pod().refused;
            refused && member.pod().stage == Stage::Pending && members.class(member) == Class::Waiting
        };
        let refused = members.uids(waits);
        for uid in &refused {
            members.change(uid, |member| member.set_reported(None));
        }
        Some(refused)
    }

    /// Independent pods were activated; `early`: some were just being refused.
    pub(super) fn independent_activated(&mut self, now: Instant, early: bool) {
        self.independent = match early {
            true => IndependentActivation::Again(after(now, PARKING)),
            false => IndependentActivation::Done,
        };
    }

    /// This kind of reason holds now. Returns the members to be activated because they show another, if it is time.
    pub(super) fn follow(
        &mut self,
        members: &mut Members,
        now: Instant,
        current: ReasonKind,
        synced: bool,
        preempts: bool,
    ) -> Vec<PodUid> {
        self.current = current;
        if self.shown.iter().all(|kind| *kind == self.current) {
            self.due = None;
            return Vec::new();
        }
        let next = self.last.map(|last| after(last, BETWEEN));
        let settled = after(now, SETTLED);
        let next = next.map_or(settled, |next| next.max(settled));
        if now < *self.due.get_or_insert(next) || !synced {
            return Vec::new();
        }
        self.due = None;
        let waits = |member: &TrackedMember| {
            let class = members.class(member);
            member.pod().stage == Stage::Pending
                && (class == Class::Waiting || preempts && matches!(class, Class::Coming | Class::Following))
        };
        let mut left = BTreeSet::new();
        let mut activated = Vec::new();
        let mut obsolete = Vec::new();
        for member in members.iter() {
            match member.reported() {
                None => {}
                Some(kind) if *kind == self.current => {
                    left.insert(kind.clone());
                }
                Some(_) if !waits(member) => obsolete.push(member.pod().uid.clone()),
                Some(_) if activated.len() < AT_ONCE => activated.push(member.pod().uid.clone()),
                Some(kind) => {
                    left.insert(kind.clone());
                }
            }
        }
        // Members that have a slot by now were activated for it.
        for uid in activated.iter().chain(&obsolete) {
            members.change(uid, |member| member.set_reported(None));
        }
        self.shown = left;
        if self.shown.iter().any(|kind| *kind != self.current) {
            self.due = Some(after(now, BETWEEN));
        }
        if !activated.is_empty() {
            self.last = Some(now);
        }
        activated
    }
}

// Activates members that have a node to go to: those that kube-scheduler holds as unschedulable, and once more those that do not arrive.

/// So long after a pod was refused kube-scheduler holds it as unschedulable for certain.
const PARKING: Duration = Duration::from_secs(2);

/// The longest wait before members that do not arrive are activated again.
const MAX_INTERVAL: Duration = Duration::from_secs(300);

/// When members that do not arrive are activated once more.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Activation {
    /// When, and how long after that again.
    next: Option<(Instant, Duration)>,
}

/// Activates members. Whether some of them may not be unschedulable yet: of a pod that is just being refused kube-scheduler drops the
/// event.
pub(super) fn activate(env: &mut Env<'_>, members: &mut Members, uids: Vec<PodUid>) -> bool {
    let now = env.now.at;
    let mut early = false;
    for uid in &uids {
        members.change(uid, |member| {
            let refused = member.refused_at().filter(|at| now < after(*at, PARKING));
            member.set_refused(refused);
            early |= refused.is_some();
        });
    }
    if !uids.is_empty() {
        env.work.push(Work::Activate(uids));
    }
    early
}

impl Activation {
    pub(super) fn due(&self) -> Option<Instant> {
        self.next.map(|(at, _)| at)
    }

    pub(super) fn clear(&mut self) {
        self.next = None;
    }

    /// Activates members that have a node to go to now, and once more later if they do not arrive. Members that kube-scheduler has not
    /// refused are in its queue: a write for each would only be a burden.
    pub(super) fn activate(&mut self, env: &mut Env<'_>, members: &mut Members, mut uids: Vec<PodUid>) {
        if uids.is_empty() {
            return;
        }
        let first = env.settings.requeue;
        self.next = Some((after(env.now.at, first), first));
        uids.retain(|uid| {
            let member = members.get(uid);
            member.is_some_and(|member| member.refused_at().is_some() || member.pod().refused)
        });
        if activate(env, members, uids) {
            self.next = Some((after(env.now.at, PARKING), first / 2));
        }
    }

    /// Activates members soon: the next call may offer other nodes.
    pub(super) fn hasten(&mut self, now: Instant, settings: &Settings) {
        let soon = after(now, settings.requeue / 10);
        if self.next.is_none_or(|(at, _)| at > soon) {
            self.next = Some((soon, settings.requeue));
        }
    }

    /// Activates members that have not arrived, if it is time.
    pub(super) fn repeat(&mut self, env: &mut Env<'_>, members: &mut Members) {
        let Some((at, interval)) = self.next else { return };
        if env.now.at < at {
            return;
        }
        let on_the_way = members.on_the_way().iter();
        let late: Vec<&TrackedMember> = on_the_way
            .filter_map(|uid| members.get(uid))
            .filter(|member| !member.has_arrived() && !member.is_pinned())
            .collect();
        if late.is_empty() {
            self.next = None;
            return;
        }
        // A member that was activated and not refused since is in the queue, unless the event was lost or a plugin refused it.
        let lost = interval >= env.settings.requeue;
        let refused: Vec<PodUid> = late
            .into_iter()
            .filter(|member| member.refused_at().is_some() || lost && member.pod().refused)
            .map(|member| member.pod().uid.clone())
            .collect();
        let next = interval.saturating_mul(2).min(MAX_INTERVAL);
        self.next = Some((after(env.now.at, next), next));
        activate(env, members, refused);
    }
}
