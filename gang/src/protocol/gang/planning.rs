//! What is asked of the planner for a gang, and what it can give back to others: computed from its members and slots. Changes nothing.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gantry_api::PodUid;

use super::super::members::{Class, Count, TrackedMember};
use super::super::plan_queue::Urgency;
use super::super::slots::{Holder, Slot};
use super::super::types::{Devices, MemberRequest, PlanRequest, ShapeId, Sibling};
use super::{Gang, State};
use crate::membership::Revision;
use crate::quorum::{MOST_SELECTIONS, Quorum};
use crate::terms::Rails;

/// What the planner is asked for; `None` if the terms are not known. Of a tree of groups it is asked for the groups that are needed, or once
/// those are decided for one more group: for the first in the request itself, for others that may do instead in [`PlanRequest::others`].
pub(super) fn plan_request(gang: &Gang) -> Option<PlanRequest> {
    let request = request_of_all(gang)?;
    let Some(quorum) = request.terms.quorum.clone() else {
        return Some(request);
    };
    let choices = match &gang.state {
        State::Decided(_) if request.completes => return Some(request),
        State::Decided(_) => further_groups(gang, &quorum, &request),
        _ if !request.terms.by_role.is_empty() => return Some(request),
        _ if gang.minimum().missing(Count::settled) == 0 => groups_beside_ended(gang, &quorum, &request),
        _ => first_groups(gang, &quorum, &request),
    };
    let mut choices = choices.into_iter();
    let first = choices.next();
    Some(match first {
        Some(first) => PlanRequest { others: choices.collect(), ..first },
        None => request,
    })
}

/// The selections of groups of which enough members exist.
fn first_groups(gang: &Gang, quorum: &Quorum, request: &PlanRequest) -> Vec<PlanRequest> {
    let mut shapes: BTreeMap<&str, Vec<ShapeId>> = BTreeMap::new();
    for member in &request.members {
        shapes.entry(&*member.role).or_default().push(member.shape);
    }
    shapes.values_mut().for_each(|shapes| shapes.sort_unstable());
    let settled = |role: &str| gang.members().count_of(role).settled();
    let is_whole = |role: &str| {
        let wait = shapes.get(role).map_or(0, Vec::len);
        let exist = settled(role).saturating_add(u32::try_from(wait).unwrap_or(u32::MAX));
        quorum.min_of(role).is_some_and(|min| exist >= min)
    };
    let kind = |role: &str| (settled(role), shapes.get(role).cloned().unwrap_or_default());
    let selections = quorum.selections(&is_whole, &kind).into_iter();
    let requests = selections.map(|chosen| {
        let missing = chosen.iter().map(|(role, min)| min.saturating_sub(settled(role)));
        let must = missing.fold(0, u32::saturating_add);
        let members = request.members.iter().filter(|member| chosen.contains_key(&member.role));
        let spares = request.spares.iter().filter(|spare| chosen.contains_key(&spare.role));
        PlanRequest {
            terms: Arc::new(request.terms.of_groups(&chosen)),
            members: members.cloned().collect(),
            spares: spares.cloned().collect(),
            must,
            ..request.clone()
        }
    });
    requests.collect()
}

/// Further groups of a gang without a decision that lacks no member, because as many groups as it needs have ended well.
fn groups_beside_ended(gang: &Gang, quorum: &Quorum, request: &PlanRequest) -> Vec<PlanRequest> {
    let settled = |role: &str| gang.members().count_of(role).settled();
    let is_settled = |role: &str| quorum.min_of(role).is_some_and(|min| settled(role) >= min);
    let ended = quorum.selections(&is_settled, &|role| role.to_owned()).into_iter().next();
    let terms =
        ended.map_or_else(|| Arc::clone(&request.terms), |chosen| Arc::new(request.terms.of_groups(&chosen)));
    further_groups(gang, quorum, &PlanRequest { terms, ..request.clone() })
}

/// The members that wait of groups that are whole, or else each further group that can be whole: all of it or none.
fn further_groups(gang: &Gang, quorum: &Quorum, request: &PlanRequest) -> Vec<PlanRequest> {
    // A pod that was bound past the extender is no member, but its group has it: the rest of the group completes it.
    let missing = |role: &str| {
        let count = gang.members().count_of(role);
        let there = count.placed().saturating_add(count.of(Class::Stray));
        quorum.min_of(role).unwrap_or_default().saturating_sub(there)
    };
    let of = |is: &dyn Fn(&str) -> bool, must: u32| {
        let members = request.members.iter().filter(|member| is(&member.role));
        PlanRequest { members: members.cloned().collect(), spares: Vec::new(), must, ..request.clone() }
    };
    let surplus = of(&|role| missing(role) == 0, request.must);
    if !surplus.members.is_empty() {
        return vec![surplus];
    }
    let roles: BTreeSet<&Arc<str>> = request.members.iter().map(|member| &member.role).collect();
    let lacks = |group: &PlanRequest| (group.must as usize).saturating_sub(group.members.len());
    let groups = || roles.iter().map(|role| of(&|of| *of == ***role, missing(role)));
    let whole: Vec<PlanRequest> = groups().filter(|group| lacks(group) == 0).take(MOST_SELECTIONS).collect();
    if whole.is_empty() {
        // Nothing is placed of a group that is not whole. The refusal states what the nearest one lacks.
        return groups().min_by_key(lacks).into_iter().collect();
    }
    whole
}

fn request_of_all(gang: &Gang) -> Option<PlanRequest> {
    let terms = gang.agreement.working_terms()?.clone();
    let mut members: Vec<(u64, i64, MemberRequest)> = Vec::new();
    for uid in gang.members().unplaced() {
        let Some(member) = gang.members().get(uid) else {
            continue;
        };
        let pod = member.pod();
        let Some(shape) = pod.shape.filter(|_| gang.may_arrive(member)) else {
            continue;
        };
        let request = MemberRequest {
            uid: uid.clone(),
            shape,
            rank: pod.membership.rank,
            role: pod.membership.role.clone(),
        };
        members.push((rank_order(request.rank), pod.created, request));
    }
    members.sort_by(|(a_rank, a_created, a), (b_rank, b_created, b)| {
        (a_rank, a_created, &a.uid).cmp(&(b_rank, b_created, &b.uid))
    });
    let mut members: Vec<MemberRequest> = members.into_iter().map(|(_, _, member)| member).collect();
    let revision = next_revision(gang);
    let mut must = match &gang.state {
        State::Decided(_) => 0,
        _ => gang.minimum().missing(Count::settled),
    };
    if gang.urgency() == Urgency::Surplus && !revision.is_empty() {
        // Other members go first. Those of the next revision go together, or half of it would keep devices for ever.
        let is_next = |member: &MemberRequest| revision.contains(&member.uid);
        if members.iter().all(is_next) {
            must = u32::try_from(members.len()).unwrap_or(u32::MAX).min(gang.may_grow());
        }
        members.retain(|member| must > 0 || !is_next(member));
    }
    truncate_to_max(gang, &mut members);
    let completes = gang.urgency() == Urgency::Incomplete;
    if completes {
        truncate_to_missing(gang, &mut members);
    }
    let devices =
        |devices: &Devices| if terms.rails == Rails::Any { Devices::new() } else { devices.clone() };
    let slots = gang.slots().iter().filter(|(_, slot)| *slot.holder() != Holder::Spare);
    let slots = slots.map(|(_, slot)| Sibling {
        node: slot.node().clone(),
        shape: slot.shape(),
        rank: slot.rank(),
        ordinal: slot.ordinal(),
        devices: devices(slot.devices()),
    });
    let mut placed: Vec<_> = slots.collect();
    if placed.is_empty() {
        placed = bound_siblings(gang);
    }
    Some(PlanRequest {
        gang: gang.key.clone(),
        terms,
        spares: spare_requests(gang, &members),
        members,
        must,
        completes,
        placed,
        without: gang.attempts.excluded().iter().cloned().collect(),
        priority: gang.members().priority(),
        resumes: gang.attempts.resumes(),
        others: Vec::new(),
    })
}

/// The spare reservations that are planned with these members: each as large as the largest of its role. A gang that is decided gets those
/// that it lacks.
fn spare_requests(gang: &Gang, members: &[MemberRequest]) -> Vec<MemberRequest> {
    let wanted = gang.spares_wanted().unwrap_or_default();
    let mut largest: BTreeMap<&Arc<str>, (u64, ShapeId)> = BTreeMap::new();
    let mut note = |role, devices: u64, shape| {
        let known = largest.entry(role).or_insert((devices, shape));
        *known = (*known).max((devices, shape));
    };
    match &gang.state {
        _ if wanted == 0 => {}
        State::Open => {
            for member in members {
                let pod = gang.members().get(&member.uid).map(TrackedMember::pod);
                let devices = pod.map_or(0, |pod| pod.asks.iter().map(|(_, count)| u64::from(*count)).sum());
                note(&member.role, devices, member.shape);
            }
        }
        State::Decided(_) if gang.lacks_spares() => {
            for (_, slot) in gang.slots().iter().filter(|(_, slot)| *slot.holder() != Holder::Spare) {
                let member = slot.holder().pod().and_then(|uid| gang.members().get(uid));
                let shape = slot.shape().or_else(|| member.and_then(|member| member.pod().shape));
                if let Some(shape) = shape {
                    note(slot.role(), slot.device_count(), shape);
                }
            }
        }
        _ => {}
    }
    let mut requests = Vec::new();
    for (role, (_, shape)) in largest {
        let missing = wanted.saturating_sub(gang.spares_of(role));
        let spare = MemberRequest { uid: "".into(), shape, rank: None, role: role.clone() };
        requests.extend(std::iter::repeat_n(spare, missing));
    }
    requests
}

/// The same so that the gang is whole then: no fewer than are missing of its minimum.
pub(super) fn to_be_whole(gang: &Gang, request: PlanRequest) -> PlanRequest {
    PlanRequest { must: gang.minimum().missing(Count::placed), ..request }
}

/// What would make a gang whole that is in a deadlock: it has been short of its minimum for long, has the members for it and was refused.
/// With it, whether it would not fit on an empty cluster. `None` of a gang that goes on without the missing members.
pub(super) fn deadlock(gang: &Gang) -> Option<(PlanRequest, bool)> {
    let decided = gang.decided()?;
    let refusal = gang.attempts.refusal()?;
    if !decided.is_short_for_long() || !gang.is_short() || !gang.is_repaired() {
        return None;
    }
    let request = to_be_whole(gang, plan_request(gang)?);
    (request.members.len() >= request.must as usize).then_some((request, refusal.is_hopeless()))
}

/// Members without a slot whose Deployment or StatefulSet has members of other revisions only: those of a rollout.
pub(super) fn next_revision(gang: &Gang) -> BTreeSet<PodUid> {
    let incarnation = gang.members().incarnation();
    let mut next: Vec<(&PodUid, &Revision)> = Vec::new();
    for uid in gang.members().unplaced() {
        let revision = gang.members().get(uid).and_then(|member| member.pod().membership.revision.as_ref());
        next.extend(revision.map(|revision| (uid, revision)));
    }
    if next.is_empty() {
        return BTreeSet::new();
    }
    let mut placed: BTreeMap<&Arc<str>, BTreeSet<&Arc<str>>> = BTreeMap::new();
    let members = gang.members().iter();
    for member in
        members.filter(|member| member.is_of(incarnation) && member.lives() && member.slot().is_some())
    {
        if let Some(revision) = &member.pod().membership.revision {
            placed.entry(&revision.of).or_default().insert(&revision.hash);
        }
    }
    let is_next = |revision: &Revision| {
        placed.get(&revision.of).is_some_and(|revisions| !revisions.contains(&revision.hash))
    };
    next.into_iter().filter(|(_, revision)| is_next(revision)).map(|(uid, _)| uid.clone()).collect()
}

/// Members that are bound without a slot of ours.
fn bound_siblings(gang: &Gang) -> Vec<Sibling> {
    let incarnation = gang.members().incarnation();
    let bound = gang.members().iter().filter(|member| {
        let counts = member.is_of(incarnation) && member.pod().shape.is_some();
        counts && member.lives()
    });
    bound
        .filter_map(|member| {
            Some(Sibling {
                node: member.bound_node()?.clone(),
                shape: member.pod().shape,
                rank: member.pod().membership.rank,
                ordinal: None,
                devices: member.pod().holds.clone(),
            })
        })
        .collect()
}

/// Leaves out members beyond the maximum, the last ones first, but none that the minimum of a role needs.
fn truncate_to_max(gang: &Gang, members: &mut Vec<MemberRequest>) {
    let most = gang.may_grow() as usize;
    if members.len() <= most {
        return;
    }
    let mut missing: BTreeMap<Arc<str>, u32> = BTreeMap::new();
    for member in members.iter() {
        let missing_of = || gang.minimum().missing_of(&member.role, Count::placed);
        missing.entry(member.role.clone()).or_insert_with(missing_of);
    }
    let needed: usize = missing.values().map(|count| *count as usize).sum();
    let mut surplus = most.saturating_sub(needed);
    members.retain(|member| {
        let missing = missing.entry(member.role.clone()).or_default();
        if *missing > 0 {
            *missing -= 1;
            true
        } else if surplus > 0 {
            surplus -= 1;
            true
        } else {
            false
        }
    });
}

/// Leaves out of each kind more members than are missing of its role, or of any: what is missing goes before others that wait, and the rest
/// after them. Members that a role misses come first.
fn truncate_to_missing(gang: &Gang, members: &mut Vec<MemberRequest>) {
    let of_roles = gang.minimum().missing_of_roles(Count::placed);
    let of_any = gang.minimum().missing(Count::placed).saturating_sub(of_roles);
    let mut kinds: BTreeMap<(Arc<str>, ShapeId), u32> = BTreeMap::new();
    let mut others = Vec::new();
    for member in std::mem::take(members) {
        let count = kinds.entry((member.role.clone(), member.shape)).or_default();
        *count += 1;
        let of_role = gang.minimum().missing_of(&member.role, Count::placed);
        if *count <= of_role {
            members.push(member);
        } else if *count - of_role <= of_any {
            others.push(member);
        }
    }
    members.append(&mut others);
}

/// Members without a rank come last.
fn rank_order(rank: Option<u32>) -> u64 {
    rank.map_or(u64::MAX, u64::from)
}

/// Whether the gang may have [`surplus`] slots; cheap.
pub(super) fn may_have_surplus(gang: &Gang) -> bool {
    let begun = matches!(gang.state, State::Reserved(_) | State::Decided(_));
    begun && gang.minimum().is_exceeded() && !gang.preempts() && !gang.members().on_the_way().is_empty()
}

/// Slots of members beyond the minimum that are not at the barrier nor being bound, in the order in which they are given back: members that
/// have not arrived first, then the last rank. None while the gang waits for victims: their devices are of no use to others. None that is
/// in the decision: the next process would keep it, and another gang has it by then. A slice is given back as a whole or not at all.
pub(super) fn surplus(gang: &Gang) -> Vec<u32> {
    if !may_have_surplus(gang) || !gang.minimum().knows_roles() {
        return Vec::new();
    }
    let is_decided = |member: &TrackedMember| {
        let decided = gang.decided();
        decided.is_some_and(|decided| decided.written().names(&member.pod().uid))
    };
    let on_the_way = gang.members().on_the_way().iter();
    let mut idle: Vec<&TrackedMember> = on_the_way
        .filter_map(|uid| gang.members().get(uid))
        .filter(|member| !member.is_at_barrier() && !member.is_pinned() && !is_decided(member))
        .collect();
    idle.sort_by(|a, b| {
        let last = |member: &TrackedMember| {
            let pod = member.pod();
            let rank = rank_order(pod.membership.rank);
            (member.has_arrived(), Reverse((rank, pod.created)))
        };
        let order = last(a).cmp(&last(b));
        order.then_with(|| b.pod().uid.cmp(&a.pod().uid))
    });
    let mut surplus = gang.count().placed().saturating_sub(gang.minimum().total);
    let mut of_role: BTreeMap<&str, u32> = BTreeMap::new();
    let mut slots = Vec::new();
    for member in idle {
        let role = &*member.pod().membership.role;
        let of_role = of_role.entry(role).or_insert_with(|| {
            let placed = gang.members().count_of(role).placed();
            placed.saturating_sub(gang.minimum().of_role(role))
        });
        if surplus > 0
            && *of_role > 0
            && let Some(id) = member.slot()
        {
            surplus -= 1;
            *of_role -= 1;
            slots.push(id);
        }
    }
    in_whole_slices(gang, in_whole_groups(gang, slots))
}

/// Those of some slots that leave no group of a tree of groups in part: one that was not chosen is given back as a whole or not at all.
fn in_whole_groups(gang: &Gang, mut slots: Vec<u32>) -> Vec<u32> {
    let terms = gang.agreement.working_terms();
    let Some(quorum) = terms.and_then(|terms| terms.quorum.as_ref()) else {
        return slots;
    };
    let role = |id: &u32| gang.slots().get(*id).map(Slot::role);
    let mut given: BTreeMap<&Arc<str>, u32> = BTreeMap::new();
    for role in slots.iter().filter_map(role) {
        *given.entry(role).or_default() += 1;
    }
    let whole = |role: &Arc<str>| {
        let given = given.get(role).copied().unwrap_or_default();
        let left = gang.members().count_of(role).placed().saturating_sub(given);
        left == 0 || quorum.min_of(role).is_none_or(|min| left >= min)
    };
    slots.retain(|id| role(id).is_some_and(whole));
    slots
}

/// Those of some slots that make up whole slices.
fn in_whole_slices(gang: &Gang, mut slots: Vec<u32>) -> Vec<u32> {
    let terms = gang.agreement.working_terms();
    if terms.is_none_or(|terms| terms.slice.is_none()) {
        return slots;
    }
    let among: BTreeSet<u32> = slots.iter().copied().collect();
    let others = gang.slots().iter().filter(|(id, _)| !among.contains(id));
    let broken: BTreeSet<Option<u32>> = others.map(|(id, _)| slice_of(gang, id)).collect();
    slots.retain(|id| {
        let slice = slice_of(gang, *id);
        slice.is_some() && !broken.contains(&slice)
    });
    slots
}

/// The slice of a slot, where the gang has slices and the slot's number is known.
pub(super) fn slice_of(gang: &Gang, slot: u32) -> Option<u32> {
    let size = gang.agreement.working_terms()?.slice?;
    let slot = gang.slots().get(slot)?;
    slot.ordinal().or(slot.rank())?.checked_div(size)
}
