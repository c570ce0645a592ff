use proptest::prelude::*;

use super::*;
use crate::key::Integration;

fn key(namespace: &str, name: &str) -> GangKey {
    GangKey {
        namespace: namespace.into(),
        name: name.into(),
        integration: Integration::Annotation,
        incarnation: "".into(),
    }
}

/// Gangs as `namespace/name priority since devices`, and the names in their order.
fn ordered(gangs: &[(&str, &str, i32, i64, u64)], held: &[(&str, u64)], now: i64) -> Vec<String> {
    let keys: Vec<GangKey> = gangs.iter().map(|gang| key(gang.0, gang.1)).collect();
    let waiting: Vec<WaitingGang<'_>> = gangs
        .iter()
        .zip(&keys)
        .map(|(&(_, _, priority, since, devices), key)| WaitingGang { key, priority, since, devices })
        .collect();
    let held = held.iter().map(|(namespace, devices)| (Arc::from(*namespace), *devices)).collect();
    order(&waiting, &held, now).into_iter().map(|at| keys[at].name.to_string()).collect()
}

#[test]
fn priority_goes_before_age() {
    let gangs = [("a", "old", 0, 10, 8), ("a", "urgent", 5, 90, 8), ("a", "older", 0, 5, 8)];
    assert_eq!(ordered(&gangs, &[], 100), ["urgent", "older", "old"]);
}

#[test]
fn namespaces_take_turns_by_what_they_hold() {
    let gangs =
        [("big", "b1", 0, 1, 8), ("big", "b2", 0, 2, 8), ("small", "s1", 0, 3, 8), ("small", "s2", 0, 4, 8)];
    assert_eq!(ordered(&gangs, &[], 100), ["b1", "s1", "b2", "s2"]);
    assert_eq!(ordered(&gangs, &[("big", 16)], 100), ["s1", "s2", "b1", "b2"]);
}

#[test]
fn what_a_higher_priority_gets_counts_for_the_lower_ones() {
    let gangs = [("a", "a-urgent", 1, 1, 64), ("a", "a1", 0, 2, 8), ("b", "b1", 0, 3, 8)];
    assert_eq!(ordered(&gangs, &[], 100), ["a-urgent", "b1", "a1"]);
}

#[test]
fn overdue_gang_of_a_large_namespace_goes_before_a_small_one() {
    // An old gang in a namespace with many devices does not starve.
    let gangs = [("big", "b1", 0, 0, 8), ("big", "b2", 0, 1, 8), ("small", "s1", 0, 5, 1)];
    let held = [("big", 1000)];
    assert_eq!(ordered(&gangs, &held, OVERDUE), ["s1", "b1", "b2"]);
    // One of a namespace at a time: the second waits for its share as before.
    assert_eq!(ordered(&gangs, &held, OVERDUE + 3), ["b1", "s1", "b2"]);
}

proptest! {
    #[test]
    fn order_lists_each_gang_once_whatever_the_input_order(
        gangs in proptest::collection::vec((0u8..4, 0i32..3, 0i64..3000, 1u64..100), 0..30),
        held in proptest::collection::btree_map(0u8..4, 0u64..500, 0..4),
        now in 0i64..4000,
        turn in 0usize..30,
    ) {
        let keys: Vec<GangKey> = gangs
            .iter()
            .enumerate()
            .map(|(at, gang)| key(&format!("ns{}", gang.0), &format!("gang{at}")))
            .collect();
        let held: BTreeMap<Arc<str>, u64> =
            held.iter().map(|(namespace, devices)| (format!("ns{namespace}").into(), *devices)).collect();
        let waiting: Vec<WaitingGang<'_>> = gangs
            .iter()
            .zip(&keys)
            .map(|(&(_, priority, since, devices), key)| WaitingGang { key, priority, since, devices })
            .collect();
        let found: Vec<&GangKey> = order(&waiting, &held, now).iter().map(|&at| waiting[at].key).collect();
        let mut turned = waiting.clone();
        if !turned.is_empty() {
            let by = turn % turned.len();
            turned.rotate_left(by);
        }
        let again: Vec<&GangKey> = order(&turned, &held, now).iter().map(|&at| turned[at].key).collect();
        prop_assert_eq!(&found, &again);
        let mut all = found.clone();
        all.sort_unstable();
        all.dedup();
        prop_assert_eq!(all.len(), waiting.len());
        let priority = |key: &GangKey| waiting.iter().find(|gang| gang.key == key).map(|gang| gang.priority);
        prop_assert!(found.windows(2).all(|pair| priority(pair[0]) >= priority(pair[1])));
        // Within one namespace and priority the older goes first.
        for (at, gang) in found.iter().enumerate() {
            for later in &found[at + 1..] {
                let [a, b] = [gang, later].map(|key| waiting.iter().find(|gang| gang.key == *key).unwrap());
                if a.key.namespace == b.key.namespace && a.priority == b.priority {
                    prop_assert!((a.since, a.key) <= (b.since, b.key));
                }
            }
        }
    }
}
