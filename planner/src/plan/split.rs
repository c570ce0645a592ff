//! Splits a number of members among parts (domains or nodes) of limited room: the fewest parts, then the least room
//! left over in those, preferably in parts in use; or level over all parts. Numbers only.

use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// Members that it takes.
    pub(super) room: u32,
    /// None of it is in use.
    pub(super) fresh: bool,
}

/// Work of the exact search, in words of bit sets. Beyond it the last part is the smallest that holds the rest.
const MOST_WORK: usize = 1 << 21;

/// Members by part; `None` if all parts together are too small. Of parts with equal room the earlier are taken first.
pub(super) fn split(parts: &[Part], members: u32) -> Option<Vec<u32>> {
    let mut given = vec![0; parts.len()];
    if members == 0 {
        return Some(given);
    }
    // The largest first; ties in the order given.
    let mut by_room: BTreeMap<std::cmp::Reverse<u32>, Vec<usize>> = BTreeMap::new();
    for (index, part) in parts.iter().enumerate().filter(|(_, part)| part.room > 0) {
        by_room.entry(std::cmp::Reverse(part.room)).or_default().push(index);
    }
    let groups: Vec<(u32, Vec<usize>)> =
        by_room.into_iter().map(|(std::cmp::Reverse(room), parts)| (room, parts)).collect();
    let fewest = fewest(&groups, members)?;
    let taken = exact(&groups, members, fewest).unwrap_or_else(|| tight(&groups, members));
    let mut chosen: Vec<usize> = Vec::with_capacity(fewest);
    for ((_, parts), count) in groups.iter().zip(taken) {
        chosen.extend(parts.iter().take(count));
    }
    let mut over = 0u64;
    for &index in &chosen {
        given[index] = parts[index].room;
        over += u64::from(parts[index].room);
    }
    // No chosen part is as small as what is left over, or it could be dropped.
    let mut over = u32::try_from(over.saturating_sub(u64::from(members))).unwrap_or(u32::MAX);
    chosen.sort_by_key(|&index| (parts[index].fresh, std::cmp::Reverse(index)));
    for index in chosen {
        let less = over.min(given[index].saturating_sub(1));
        given[index] -= less;
        over -= less;
    }
    Some(given)
}

/// Members over all parts, as level as their rooms allow; `None` if all together are too small. An unused or earlier
/// part gets the remainder.
pub(super) fn level(parts: &[Part], count: u32) -> Option<Vec<u32>> {
    if parts.is_empty() {
        return (count == 0).then(Vec::new);
    }
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|&at| parts[at].room);
    let mut left = count;
    let mut found = None;
    for (full, &at) in order.iter().enumerate() {
        let others = u32::try_from(order.len() - full).unwrap_or(u32::MAX);
        let room = parts[at].room;
        if u64::from(room) * u64::from(others) >= u64::from(left) {
            found = Some((left / others, left % others));
            break;
        }
        // It is full below the level of the others.
        left -= room;
    }
    let (height, more) = found?;
    let mut given: Vec<u32> = parts.iter().map(|part| part.room.min(height)).collect();
    let mut open: Vec<usize> = (0..parts.len()).filter(|&at| parts[at].room > height).collect();
    open.sort_by_key(|&at| (!parts[at].fresh, at));
    for at in open.into_iter().take(more as usize) {
        given[at] += 1;
    }
    Some(given)
}

/// The fewest parts that hold the members.
fn fewest(groups: &[(u32, Vec<usize>)], members: u32) -> Option<usize> {
    let mut left = members;
    let mut count = 0;
    for (room, parts) in groups {
        let needed = left.div_ceil(*room) as usize;
        if needed <= parts.len() {
            return Some(count + needed);
        }
        count += parts.len();
        left -= room * u32::try_from(parts.len()).unwrap_or(u32::MAX);
    }
    None
}

/// Number of parts of each group, so that `count` parts leave as little room as can be. `None` if that is too much
/// work.
///
/// A part falls short of the largest by some amount; `count` of the largest would leave `slack`. Bit sets keep, group
/// by group, which sums of shortfalls up to `slack` are reachable with how many parts.
fn exact(groups: &[(u32, Vec<usize>)], members: u32, count: usize) -> Option<Vec<usize>> {
    let largest = groups.first()?.0;
    let slack = u64::from(largest) * u64::try_from(count).ok()? - u64::from(members);
    let slack = usize::try_from(slack).ok()?;
    let words = slack / 64 + 1;
    let items: usize = groups.iter().map(|(_, parts)| parts.len().min(count)).sum();
    if items.checked_mul(count)?.checked_mul(words)? > MOST_WORK {
        return None;
    }
    // reached[n] are the shortfalls that n parts can have, before each group.
    let mut reached = vec![vec![0u64; words]; count + 1];
    reached[0][0] = 1;
    let mut before = Vec::with_capacity(groups.len());
    for (room, parts) in groups {
        let short = (largest - room) as usize;
        before.push(reached.clone());
        if short > slack {
            continue;
        }
        for _ in 0..parts.len().min(count) {
            for n in (0..count).rev() {
                let (low, high) = reached.split_at_mut(n + 1);
                shift_into(&mut high[0], &low[n], short);
            }
        }
    }
    let mut short = (0..=slack).rev().find(|&short| has(&reached[count], short))?;
    let mut left = count;
    let mut taken = vec![0; groups.len()];
    for (group, (room, parts)) in groups.iter().enumerate().rev() {
        let each = (largest - room) as usize;
        let most = parts.len().min(left);
        let take = (0..=most)
            .find(|&take| take * each <= short && has(&before[group][left - take], short - take * each))?;
        taken[group] = take;
        left -= take;
        short -= take * each;
    }
    Some(taken)
}

fn has(set: &[u64], bit: usize) -> bool {
    set.get(bit / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1)
}

/// `into |= from << by`, cut off at the end.
fn shift_into(into: &mut [u64], from: &[u64], by: usize) {
    let (words, bits) = (by / 64, by % 64);
    for at in (words..into.len()).rev() {
        let mut word = from[at - words] << bits;
        if bits > 0 && at > words {
            word |= from[at - words - 1] >> (64 - bits);
        }
        into[at] |= word;
    }
}

/// The largest parts, the last as small as the rest allows.
fn tight(groups: &[(u32, Vec<usize>)], members: u32) -> Vec<usize> {
    let mut taken = vec![0; groups.len()];
    let mut left = members;
    for (group, (room, parts)) in groups.iter().enumerate() {
        let whole = (left / room) as usize;
        taken[group] = whole.min(parts.len());
        left -= room * u32::try_from(taken[group]).unwrap_or(u32::MAX);
        if left == 0 {
            break;
        }
        // From here on one part is enough: the smallest that holds the rest.
        let spare = |at: &usize| groups[*at].1.len() > taken[*at];
        let last = (0..groups.len()).rev().find(|at| groups[*at].0 >= left && spare(at));
        if let Some(last) = last {
            taken[last] += 1;
            break;
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parts(rooms: &[u32]) -> Vec<Part> {
        rooms.iter().map(|&room| Part { room, fresh: false }).collect()
    }

    #[test]
    fn a_broken_part_that_fits_exactly_goes_before_a_fresh_one() {
        let mut parts = parts(&[8, 8, 3]);
        parts[0].fresh = true;
        parts[1].fresh = true;
        assert_eq!(split(&parts, 3).unwrap(), [0, 0, 3]);
        assert_eq!(split(&parts, 11).unwrap(), [8, 0, 3]);
    }

    #[test]
    fn what_is_left_over_is_left_where_something_is_broken_already() {
        let mut parts = parts(&[8, 8, 7]);
        parts[0].fresh = true;
        parts[1].fresh = true;
        assert_eq!(split(&parts, 14).unwrap(), [8, 0, 6]);
    }

    #[test]
    fn parts_that_are_too_small_together_take_nothing() {
        assert_eq!(split(&parts(&[3, 2]), 6), None);
        assert_eq!(split(&[], 1), None);
        assert_eq!(split(&[], 0), Some(vec![]));
    }

    #[test]
    fn a_thousand_members_are_split_among_hundreds_of_parts() {
        let rooms: Vec<u32> = (0..313).map(|at| if at % 5 == 0 { 11 } else { 16 }).collect();
        let given = split(&parts(&rooms), 1000).unwrap();
        assert_eq!(given.iter().sum::<u32>(), 1000);
        assert_eq!(given.iter().filter(|given| **given > 0).count(), 63);
        let over: u32 =
            given.iter().zip(&rooms).filter(|(given, _)| **given > 0).map(|(given, room)| room - given).sum();
        // 60 of 16 and 3 of 11 leave 7 over less 60 * 16 + 3 * 11 - 1000 < 0: the best is 62 of 16 and one of 11.
        assert_eq!(over, 3);
    }

    /// Every subset.
    fn oracle(rooms: &[u32], members: u32) -> Option<(u32, u32)> {
        (0u32..1 << rooms.len())
            .filter_map(|subset| {
                let sum: u32 = (0..rooms.len()).filter(|at| subset >> at & 1 == 1).map(|at| rooms[at]).sum();
                (sum >= members).then(|| (subset.count_ones(), sum - members))
            })
            .min()
    }

    /// Every way to give each part at least one: the least difference of the most and the fewest.
    fn level_oracle(rooms: &[u32], left: u32, most: u32, least: u32) -> Option<u32> {
        let Some((room, rest)) = rooms.split_first() else {
            return (left == 0).then_some(most - least);
        };
        (1..=left.min(*room))
            .filter_map(|give| level_oracle(rest, left - give, most.max(give), least.min(give)))
            .min()
    }

    #[test]
    fn who_is_not_fresh_gets_less_and_then_the_last() {
        let mut parts = parts(&[18, 18, 18]);
        parts[1].fresh = true;
        parts[2].fresh = true;
        assert_eq!(level(&parts, 50).unwrap(), [16, 17, 17]);
        assert_eq!(level(&parts, 49).unwrap(), [16, 17, 16]);
        assert_eq!(level(&parts, 55), None);
        assert_eq!(level(&[], 0), Some(vec![]));
    }

    proptest! {
        #[test]
        fn no_way_over_the_same_parts_is_more_level(
            rooms in prop::collection::vec((1u32..8, any::<bool>()), 1..6),
            more in 0u32..40,
        ) {
            let parts: Vec<Part> = rooms.iter().map(|&(room, fresh)| Part { room, fresh }).collect();
            let rooms: Vec<u32> = rooms.iter().map(|(room, _)| *room).collect();
            let count = u32::try_from(rooms.len()).unwrap() + more;
            let given = level(&parts, count);
            let oracle = level_oracle(&rooms, count, 0, u32::MAX);
            prop_assert_eq!(given.is_some(), oracle.is_some());
            let Some(given) = given else { return Ok(()) };
            prop_assert_eq!(given.iter().sum::<u32>(), count);
            prop_assert!(given.iter().zip(&rooms).all(|(given, room)| given <= room));
            prop_assert_eq!(Some(given.iter().max().unwrap() - given.iter().min().unwrap()), oracle);
        }

        #[test]
        fn the_fewest_parts_with_the_least_left_over(
            rooms in prop::collection::vec((0u32..9, any::<bool>()), 0..10),
            members in 0u32..40,
        ) {
            let parts: Vec<Part> = rooms.iter().map(|&(room, fresh)| Part { room, fresh }).collect();
            let rooms: Vec<u32> = rooms.iter().map(|(room, _)| *room).collect();
            let given = split(&parts, members);
            prop_assert_eq!(given.is_some(), oracle(&rooms, members).is_some());
            let Some(given) = given else { return Ok(()) };
            prop_assert_eq!(given.iter().sum::<u32>(), members);
            prop_assert!(given.iter().zip(&rooms).all(|(given, room)| given <= room));
            let used = given.iter().zip(&rooms).filter(|(given, _)| **given > 0);
            let over: u32 = used.clone().map(|(given, room)| room - given).sum();
            prop_assert_eq!(Some((u32::try_from(used.count()).unwrap(), over)), oracle(&rooms, members));
        }

        #[test]
        fn without_the_search_it_is_the_fewest_too(rooms in prop::collection::vec(1u32..9, 1..10), members in 1u32..40) {
            let parts = parts(&rooms);
            let mut by_room: BTreeMap<std::cmp::Reverse<u32>, Vec<usize>> = BTreeMap::new();
            for (index, part) in parts.iter().enumerate() {
                by_room.entry(std::cmp::Reverse(part.room)).or_default().push(index);
            }
            let groups: Vec<_> = by_room.into_iter().map(|(room, parts)| (room.0, parts)).collect();
            if let Some(fewest) = fewest(&groups, members) {
                let taken = tight(&groups, members);
                prop_assert_eq!(taken.iter().sum::<usize>(), fewest);
                let sum: u32 = taken.iter().zip(&groups).map(|(count, (room, _))| u32::try_from(*count).unwrap() * room).sum();
                prop_assert!(sum >= members);
            }
        }
    }
}
