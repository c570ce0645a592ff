//! Continuity of a gang that its owner creates again as a whole: the slots of the incarnation that has ended are kept for the members of
//! the next one. Their time is limited, and what the owner states ends it at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{Continuation, Decision};

use super::super::after;
use super::super::idle_time::IdleDevices;
use super::super::objects::GangSite;
use super::super::slots::Slot;
use super::super::types::{Moment, Settings};
use super::status::time;
use crate::key::GangKey;
use crate::membership::{OwnerKind, OwnerRef};

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
    pub(super) succession: Box<Succession>,
    pub(super) slots: Vec<Slot>,
    pub(super) idle: IdleDevices,
    pub(super) site: GangSite,
}

impl Continuations {
    /// Reservations that were kept are kept no longer.
    pub(super) fn ended(&mut self, end: End) {
        let count = match end {
            End::Expired => &mut self.expired,
            End::Owner => &mut self.ended,
            End::Lost => &mut self.lost,
            End::Unsuitable => &mut self.unsuitable,
        };
        *count += 1;
    }
}

impl Succession {
    /// The slots of the incarnation of a decision are kept, because its owner creates the members again.
    pub(super) fn new(
        of: Option<Decision>,
        owner: &OwnerRef,
        uid: &Arc<str>,
        priority: i32,
        hold: Duration,
    ) -> Self {
        let of = Arc::new(of.unwrap_or_else(no_decision));
        Self { of, owner: owner.clone(), uid: Arc::clone(uid), priority, hold, shown_end: None }
    }

    /// The same as an earlier process reported it for a gang. `None` if no such owner exists.
    pub(super) fn shown(
        gang: &GangKey,
        shown: &Continuation,
        of: &Arc<Decision>,
        now: Moment,
        settings: &Settings,
    ) -> Option<Self> {
        // A forged time is no longer than the operator's ceiling.
        let most = settings.ceilings.restart_hold;
        let left = shown.until.as_ref().map(|until| until.0.as_second().saturating_sub(now.unix).max(0));
        let left = left.map(|left| Duration::from_secs(left.unsigned_abs()).min(most));
        Some(Self {
            of: Arc::clone(of),
            owner: owner_of(gang, shown)?,
            uid: shown.owner_uid.as_str().into(),
            priority: shown.priority,
            hold: settings.restart_hold.min(most),
            shown_end: left.map(|left| after(now.at, left)),
        })
    }

    pub(super) fn owner(&self) -> &OwnerRef {
        &self.owner
    }

    pub(super) fn decision_id(&self) -> &str {
        &self.of.id
    }

    pub(super) fn of(&self) -> &Arc<Decision> {
        &self.of
    }

    pub(super) fn priority(&self) -> i32 {
        self.priority
    }

    pub(super) fn hold(&self) -> Duration {
        self.hold
    }

    /// When slots that are idle since then are released.
    pub(super) fn end(&self, since: Instant) -> Instant {
        self.shown_end.unwrap_or_else(|| after(since, self.hold))
    }

    /// Whether another object with the name of the owner exists now.
    pub(super) fn is_replaced_by(&self, uid: &str) -> bool {
        !uid.is_empty() && !self.uid.is_empty() && *uid != *self.uid
    }

    /// What the object shows of it.
    pub(super) fn continuation(&self, until: Option<i64>) -> Continuation {
        Continuation {
            owner_kind: self.owner.kind.as_shown().to_owned(),
            owner_name: self.owner.name.to_string(),
            owner_uid: self.uid.to_string(),
            until: until.map(time),
            priority: self.priority,
        }
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
