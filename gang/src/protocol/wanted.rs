//! What is asked of the planner for a gang: for whom places are wanted, and for how many at least. Places nobody.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Gangs;
use super::gang::{Gang, State};
use super::members::Count;
use super::order::Urgency;
use super::types::{MemberRequest, PlanRequest, ShapeId, Sibling, Stage};
use crate::key::GangKey;

impl Gang {
    /// What is asked of the planner.
    pub(super) fn wanted(&self) -> Option<PlanRequest> {
        let terms = self.working_terms()?.clone();
        let mut members: Vec<(Option<u32>, i64, MemberRequest)> = Vec::new();
        for uid in self.members.unplaced() {
            let Some(kept) = self.members.get(uid) else {
                continue;
            };
            let Some(shape) = kept.member.shape.filter(|_| self.may_come(kept)) else {
                continue;
            };
            let wanted = MemberRequest {
                uid: uid.clone(),
                shape,
                rank: kept.member.membership.rank,
                role: kept.member.membership.role.clone(),
            };
            members.push((wanted.rank, kept.member.created, wanted));
        }
        members.sort_by(|(a_rank, a_created, a), (b_rank, b_created, b)| {
            let a_rank = a_rank.map_or(u64::MAX, u64::from);
            let b_rank = b_rank.map_or(u64::MAX, u64::from);
            (a_rank, a_created, &a.uid).cmp(&(b_rank, b_created, &b.uid))
        });
        let mut members: Vec<MemberRequest> = members.into_iter().map(|(_, _, member)| member).collect();
        self.cut_to_max(&mut members);
        let completes = self.urgency() == Urgency::Incomplete;
        if completes {
            self.cut_to_missing(&mut members);
        }
        let must = match &self.state {
            State::Decided(_) => 0,
            _ => self.missing(Count::settled),
        };
        let mut placed: Vec<_> = self
            .slots
            .iter()
            .map(|(_, slot)| Sibling {
                node: slot.node.clone(),
                shape: slot.shape,
                rank: slot.rank,
                ordinal: slot.ordinal,
            })
            .collect();
        if placed.is_empty() {
            placed = self.bound_places();
        }
        Some(PlanRequest {
            gang: self.key.clone(),
            terms,
            members,
            must,
            completes,
            placed,
            without: self.tries.without.iter().cloned().collect(),
            priority: self.members.priority(),
            resumes: self.tries.resumes,
        })
    }

    /// The same so that it is whole then: not less than it lacks of its minimum.
    pub(super) fn to_be_whole(&self, wanted: PlanRequest) -> PlanRequest {
        PlanRequest {
            must: self.missing(Count::placed),
            ..wanted
        }
    }

    /// Members that are bound without a slot of ours.
    fn bound_places(&self) -> Vec<Sibling> {
        let life = self.members.life();
        self.members
            .iter()
            .filter(|kept| kept.life == life && kept.member.shape.is_some() && kept.lives())
            .filter_map(|kept| match &kept.member.stage {
                Stage::Bound(node) => Some(Sibling {
                    node: node.clone(),
                    shape: kept.member.shape,
                    rank: kept.member.membership.rank,
                    ordinal: None,
                }),
                _ => None,
            })
            .collect()
    }

    /// Leaves out members beyond the maximum, the last ones first, but none that the minimum of a role needs.
    fn cut_to_max(&self, members: &mut Vec<MemberRequest>) {
        let room = self.may_grow() as usize;
        if members.len() <= room {
            return;
        }
        let mut short: BTreeMap<Arc<str>, u32> = BTreeMap::new();
        for member in members.iter() {
            short
                .entry(member.role.clone())
                .or_insert_with(|| self.missing_of(&member.role, Count::placed));
        }
        let needed: usize = short.values().map(|count| *count as usize).sum();
        let mut spare = room.saturating_sub(needed);
        members.retain(|member| {
            let short = short.entry(member.role.clone()).or_default();
            if *short > 0 {
                *short -= 1;
                true
            } else if spare > 0 {
                spare -= 1;
                true
            } else {
                false
            }
        });
    }

    /// Leaves out of each kind more members than the gang lacks of its role, or of any: what it lacks goes before others that wait, and the
    /// rest after them. Those that a role lacks come first.
    fn cut_to_missing(&self, members: &mut Vec<MemberRequest>) {
        let of_roles = self.missing_of_roles(Count::placed);
        let of_any = self.missing(Count::placed).saturating_sub(of_roles);
        let mut kinds: BTreeMap<(Arc<str>, ShapeId), u32> = BTreeMap::new();
        let mut others = Vec::new();
        for member in std::mem::take(members) {
            let count = kinds.entry((member.role.clone(), member.shape)).or_default();
            *count += 1;
            let of_role = self.missing_of(&member.role, Count::placed);
            if *count <= of_role {
                members.push(member);
            } else if *count - of_role <= of_any {
                others.push(member);
            }
        }
        members.append(&mut others);
    }
}

impl Gangs {
    /// What the planner would be asked for a gang now; `None` if its terms are not known.
    pub fn wanted(&self, key: &GangKey) -> Option<PlanRequest> {
        self.gangs.get(key)?.wanted()
    }
}
