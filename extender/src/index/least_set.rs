//! The cheapest set of a few things that suffices: exact for few, greedy for many.

/// Most things of which all sets are tried.
const MOST: usize = 10;

/// The set of the first `count` numbers that costs least of those that suffice; `None` if not even all of them do. More
/// than [`MOST`] are taken in their order until they suffice, and then spared, the last first, while the rest does.
pub(super) fn least_set<C: Ord>(
    count: usize,
    cost: impl Fn(&[usize]) -> C,
    suffices: impl Fn(&[usize]) -> bool,
) -> Option<Vec<usize>> {
    if count > MOST {
        return greedy(count, suffices);
    }
    let mut best: Option<(C, Vec<usize>)> = None;
    let mut set = Vec::with_capacity(count);
    for chosen in 0u32..1 << count {
        set.clear();
        set.extend((0..count).filter(|at| chosen >> at & 1 == 1));
        let cost = cost(&set);
        // Of equal cost the first in their order.
        let is_less = best.as_ref().is_none_or(|(least, known)| (&cost, &set) < (least, known));
        if is_less && suffices(&set) {
            best = Some((cost, set.clone()));
        }
    }
    best.map(|(_, set)| set)
}

fn greedy(count: usize, suffices: impl Fn(&[usize]) -> bool) -> Option<Vec<usize>> {
    let mut set: Vec<usize> = Vec::new();
    let mut rest = 0..count;
    while !suffices(&set) {
        set.push(rest.next()?);
    }
    for at in (0..set.len()).rev() {
        let spared = set.remove(at);
        if !suffices(&set) {
            set.insert(at, spared);
        }
    }
    Some(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Things of which each costs and is worth as much as its number in `worth`.
    fn least(worth: &[u32], needed: u32) -> Option<Vec<usize>> {
        let sum = |set: &[usize]| set.iter().map(|at| worth[*at]).sum::<u32>();
        least_set(worth.len(), |set| (sum(set), set.len()), |set| sum(set) >= needed)
    }

    #[test]
    fn set_costs_the_least_of_all_that_suffice() {
        assert_eq!(least(&[1, 1, 2, 4], 4), Some(vec![3]));
        assert_eq!(least(&[3, 3, 5], 5), Some(vec![2]));
        assert_eq!(least(&[3, 3, 5], 0), Some(vec![]));
        assert_eq!(least(&[3, 3, 5], 12), None);
    }

    #[test]
    fn many_things_are_taken_in_order_and_spared() {
        let mut worth = vec![1; 20];
        worth[4] = 5;
        assert_eq!(least(&worth, 5), Some(vec![4]));
        assert_eq!(least(&worth, 25), None);
    }
}
