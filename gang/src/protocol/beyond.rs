//! Pods that are one too many: of a gang that is as large as may be, or of one gang more than are looked at. They wait in line, each
//! namespace in its own, and come in as others go, a few at a time. No namespace takes what is left for the others. Decides nothing about a
//! gang.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use gantry_api::PodUid;

use super::Gangs;
use super::gang::Gang;
use super::gangs::Belongs;
use super::parked::Kind;
use super::types::{Member, Now, Stage};
use crate::key::GangKey;

/// Pods that come in at a time, at most: each is as much work as one that the watch shows.
const AT_ONCE: usize = 1_000;

/// Who waits to be looked at, and how many gangs of each namespace are.
#[derive(Debug, Clone, Default)]
pub(super) struct Line {
    waiting: BTreeMap<Arc<GangKey>, Waiting>,
    /// Of each pod its gang, and its number there.
    pods: HashMap<PodUid, (Arc<GangKey>, u64)>,
    /// Gangs that are not looked at, of each namespace in the order in which they came.
    lines: BTreeMap<Arc<str>, BTreeMap<u64, Arc<GangKey>>>,
    /// Gangs that are looked at, or have to be, and may have room for pods that wait.
    open: BTreeSet<Arc<GangKey>>,
    /// How many gangs of each namespace are looked at.
    kept: BTreeMap<Arc<str>, usize>,
    /// Numbers given so far.
    numbers: u64,
}

/// Pods that wait for one gang.
#[derive(Debug, Clone, Default)]
struct Waiting {
    members: BTreeMap<u64, Member>,
    /// Its number in its namespace's line, if it is in it.
    turn: Option<u64>,
}

impl Line {
    /// A pod that waits, as it is now. It keeps its turn.
    fn put(&mut self, member: Member, in_line: bool) {
        let uid = member.uid.clone();
        let known = self.pods.get(&uid).cloned();
        let number = match known {
            Some((key, number)) if *key == member.membership.key => number,
            _ => {
                self.remove(&uid);
                self.numbers += 1;
                self.numbers
            }
        };
        let key = match self.waiting.get_key_value(&member.membership.key) {
            Some((key, _)) => Arc::clone(key),
            None => Arc::new(member.membership.key.clone()),
        };
        let waiting = self.waiting.entry(Arc::clone(&key)).or_default();
        waiting.members.insert(number, member);
        self.pods.insert(uid, (Arc::clone(&key), number));
        if in_line {
            self.line_up(&key, number);
        }
    }

    fn line_up(&mut self, key: &Arc<GangKey>, number: u64) {
        if let Some(waiting) = self.waiting.get_mut(key)
            && waiting.turn.is_none()
        {
            waiting.turn = Some(number);
            let line = self.lines.entry(key.namespace.clone()).or_default();
            line.insert(number, Arc::clone(key));
        }
    }

    fn leave_line(&mut self, key: &GangKey) {
        let turn = self.waiting.get_mut(key).and_then(|waiting| waiting.turn.take());
        if let Some(turn) = turn
            && let Some(line) = self.lines.get_mut(&key.namespace)
        {
            line.remove(&turn);
            if line.is_empty() {
                self.lines.remove(&key.namespace);
            }
        }
    }

    /// A pod waits no longer. Whether it did.
    pub(super) fn remove(&mut self, uid: &PodUid) -> bool {
        let Some((key, number)) = self.pods.remove(uid) else {
            return false;
        };
        let Some(waiting) = self.waiting.get_mut(&key) else {
            return true;
        };
        waiting.members.remove(&number);
        if waiting.members.is_empty() {
            self.leave_line(&key);
            self.waiting.remove(&key);
            self.open.remove(&key);
        }
        true
    }

    /// A gang is looked at from now on.
    pub(super) fn made(&mut self, key: &Arc<GangKey>) {
        *self.kept.entry(key.namespace.clone()).or_default() += 1;
        self.leave_line(key);
        self.may_have_room(key);
    }

    /// A gang is not looked at any more. Whoever waits for it waits for it to be looked at again.
    pub(super) fn ended(&mut self, key: &Arc<GangKey>) {
        if let Some(count) = self.kept.get_mut(&key.namespace) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.kept.remove(&key.namespace);
            }
        }
        self.open.remove(key);
        let first = self
            .waiting
            .get(key)
            .and_then(|waiting| waiting.members.keys().next().copied());
        if let Some(first) = first {
            self.line_up(key, first);
        }
    }

    /// A gang that pods wait for may have room for one of them.
    pub(super) fn may_have_room(&mut self, key: &Arc<GangKey>) {
        if self.waiting.contains_key(key) {
            self.open.insert(Arc::clone(key));
        }
    }

    fn kept(&self, namespace: &str) -> usize {
        self.kept.get(namespace).copied().unwrap_or_default()
    }

    fn first_of(&self, key: &GangKey) -> Option<&Member> {
        self.waiting.get(key)?.members.values().next()
    }
}

impl Gangs {
    /// Whether one more gang of a namespace may be looked at: never more of one than could come of all others besides.
    pub(super) fn has_share(&self, namespace: &str) -> bool {
        let left = self.settings.max_gangs.saturating_sub(self.gangs.len());
        self.beyond.kept(namespace) < left
    }

    /// A gang is decided, by its object: it is looked at however many there are, for what is decided is brought to its end.
    fn is_decided(&self, key: &GangKey) -> bool {
        let name = (key.namespace.clone(), Arc::from(key.object_name()));
        self.objects
            .get(&name)
            .is_some_and(|known| known.has_decided(key))
    }

    /// Whether a gang that is not looked at may be from now on.
    pub(super) fn may_begin(&self, key: &GangKey) -> bool {
        self.has_share(&key.namespace) || self.is_decided(key)
    }

    /// A pod is one too many, and waits.
    pub(super) fn put_beyond(&mut self, member: &Member) {
        let made = self.gangs.contains_key(&member.membership.key);
        let text = if made {
            let most = self.settings.max_members;
            format!("its gang has {most} members, and no more are looked at: it is when there are fewer")
        } else if self.gangs.len() >= self.settings.max_gangs {
            let most = self.settings.max_gangs;
            format!("more than {most} gangs are there: its own is looked at when there are fewer")
        } else {
            format!(
                "namespace {} has its share of the {} gangs that are looked at: this one is when it has fewer, in the order in which they came",
                member.membership.key.namespace, self.settings.max_gangs
            )
        };
        let text = match self.of_pod.get(&member.uid) {
            Some(Belongs::Beyond(before)) if **before == *text => Arc::clone(before),
            _ => text.into(),
        };
        self.of_pod.insert(member.uid.clone(), Belongs::Beyond(text));
        self.beyond.put(member.clone(), !made);
    }

    /// Lets pods in that wait, as far as there is room for them now. Whether there may be more.
    pub(super) fn let_in(&mut self, now: Now) -> bool {
        for _ in 0..AT_ONCE {
            let Some(member) = self.next_beyond() else {
                return false;
            };
            self.member_seen(now, member);
        }
        true
    }

    fn next_beyond(&mut self) -> Option<Member> {
        while let Some(key) = self.beyond.open.first().cloned() {
            let room = match self.gangs.get(&key) {
                Some(gang) => gang.members.len() < self.settings.max_members,
                None => self.may_begin(&key),
            };
            if room && let Some(member) = self.beyond.first_of(&key) {
                return Some(member.clone());
            }
            self.beyond.open.remove(&key);
        }
        // The namespace that has fewest.
        let lines = self.beyond.lines.iter();
        let (_, line) = lines
            .filter(|(namespace, _)| self.has_share(namespace))
            .min_by_key(|(namespace, _)| self.beyond.kept(namespace))?;
        let key = line.values().next()?;
        self.beyond.first_of(key).cloned()
    }
}

impl Gang {
    /// A member was told until now that its gang was one too many, and may show so yet.
    pub(super) fn note_was_beyond(&mut self, uid: &PodUid) {
        let parked = |member: &Member| member.refused && member.stage == Stage::Pending;
        if self.members.get(uid).is_some_and(|kept| parked(&kept.member)) {
            self.parked.note(Kind::Beyond);
            self.members.change(uid, |kept| kept.told = Some(Kind::Beyond));
        }
    }
}

#[cfg(test)]
impl Line {
    pub(super) fn assert_empty(&self) {
        let Self {
            waiting,
            pods,
            lines,
            open,
            kept,
            ..
        } = self;
        assert!(
            waiting.is_empty() && pods.is_empty() && lines.is_empty() && open.is_empty() && kept.is_empty(),
            "{self:?}"
        );
    }
}
