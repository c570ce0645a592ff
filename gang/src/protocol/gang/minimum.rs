//! The minimum of a gang against the members that it has: how many are missing, of the whole and of each role.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::members::{Class, Count, Members};
use crate::quorum::Quorum;

/// The minimum that holds now, and the members that count for it.
#[derive(Clone, Copy)]
pub(super) struct Minimum<'a> {
    /// Of the whole; 0 while it is not known.
    pub(super) total: u32,
    /// Of roles that have one; `None` while that is not known.
    pub(super) by_role: Option<&'a [(Arc<str>, u32)]>,
    /// The groups of a tree of groups.
    pub(super) groups: Option<&'a Quorum>,
    /// It is open which of the groups are needed.
    pub(super) groups_are_open: bool,
    pub(super) members: &'a Members,
}

impl<'a> Minimum<'a> {
    /// Whether the minimums of roles are known.
    pub(super) fn knows_roles(&self) -> bool {
        self.by_role.is_some()
    }

    fn roles(&self) -> &'a [(Arc<str>, u32)] {
        self.by_role.unwrap_or_default()
    }

    /// The minimum of a role; 0 where there is none.
    pub(super) fn of_role(&self, role: &str) -> u32 {
        let found = self.roles().iter().find(|(of, _)| **of == *role);
        found.map_or(0, |(_, min)| *min)
    }

    /// The groups, while it is open which of them are needed.
    pub(super) fn open_groups(&self) -> Option<&'a Quorum> {
        self.groups.filter(|_| self.groups_are_open)
    }

    /// How many of what `count` counts are missing: of the minimum, and of the minimums of roles.
    pub(super) fn missing(&self, count: impl Fn(&Count) -> u32) -> u32 {
        if let Some(groups) = self.open_groups() {
            return groups.missing(&|role| count(&self.members.count_of(role))).unwrap_or(u32::MAX);
        }
        let total = self.total.saturating_sub(count(self.members.count()));
        total.max(self.missing_of_roles(count))
    }

    /// How many are missing of the minimums of roles, all together.
    pub(super) fn missing_of_roles(&self, count: impl Fn(&Count) -> u32) -> u32 {
        let roles = self.roles().iter().map(|(role, min)| {
            let there = count(&self.members.count_of(role));
            min.saturating_sub(there)
        });
        roles.fold(0, u32::saturating_add)
    }

    /// How many are missing of the minimum of a role.
    pub(super) fn missing_of(&self, role: &str, count: impl Fn(&Count) -> u32) -> u32 {
        self.of_role(role).saturating_sub(count(&self.members.count_of(role)))
    }

    /// Whether there are as many of what `count` counts as are needed.
    pub(super) fn is_met(&self, count: impl Fn(&Count) -> u32) -> bool {
        self.total > 0 && self.missing(count) == 0
    }

    /// Whether fewer members than needed are left, even if all that exist get a slot.
    pub(super) fn is_out_of_reach(&self) -> bool {
        self.missing(|count| count.exist() + count.kept_back()) > 0
    }

    /// Whether more members have slots than are needed.
    pub(super) fn is_exceeded(&self) -> bool {
        self.total > 0 && self.members.count().placed() > self.total
    }

    /// Whether too few exist without `gated`, members by their role.
    pub(super) fn needs_gated(&self, gated: &BTreeMap<&Arc<str>, u32>) -> bool {
        let all = gated.values().fold(0, |sum: u32, count| sum.saturating_add(*count));
        let is_role_short = |(role, gated): (&&Arc<str>, &u32)| {
            let exist = self.members.count_of(role).exist();
            *gated > exist.saturating_sub(self.of_role(role))
        };
        all > self.members.count().exist().saturating_sub(self.total) || gated.iter().any(is_role_short)
    }

    /// Whether some members of a group have slots, and it needs more.
    pub(super) fn is_group_in_part(&self, role: &str) -> bool {
        let placed = self.members.count_of(role).placed();
        placed > 0 && self.groups.and_then(|groups| groups.min_of(role)).is_some_and(|min| placed < min)
    }

    /// All members of a role have ended well, and the gang has as many as it needs: none can be lost any more.
    pub(super) fn is_role_over(&self, role: &str) -> bool {
        let count = self.members.count_of(role);
        let is_whole = match self.of_role(role) {
            0 => self.is_met(Count::settled),
            _ => self.missing_of_roles(Count::settled) == 0,
        };
        let completed = count.of(Class::Completed);
        count.alive() == 0 && count.of(Class::Lost) == 0 && completed > 0 && is_whole
    }

    /// No member of a role has a slot, and the gang has as many as it needs without it: a spare slot would only be in the way of those that
    /// wait.
    pub(super) fn is_role_unneeded(&self, role: &str) -> bool {
        self.is_met(Count::settled) && self.members.count_of(role).with_slots() == 0
    }
}
