//! All reachable states as a graph, to ask what a checker of safety cannot: can the good end be reached from everywhere, if from
//! there on nothing fails?

use std::collections::HashMap;

use stateright::Model;

use crate::cluster::{Cluster, Protocol};
use crate::events::Event;

/// A state from which the good end cannot be reached without a further fault, with the way there.
pub(crate) fn stranded(protocol: &Protocol) -> Option<(Vec<Event>, Cluster)> {
    let mut numbers: HashMap<Cluster, u32> = HashMap::new();
    let mut states: Vec<Cluster> = protocol.init_states();
    // By state: how it was reached first.
    let mut ways: Vec<Option<(u32, Event)>> = vec![None];
    // Edges that need no fault, by their end.
    let mut into: Vec<(u32, u32)> = Vec::new();
    numbers.insert(states[0].clone(), 0);
    let mut at = 0;
    let mut events = Vec::new();
    while at < states.len() {
        let state = states[at].clone();
        let from = u32::try_from(at).unwrap();
        events.clear();
        protocol.actions(&state, &mut events);
        for event in &events {
            let Some(next) = protocol.next_state(&state, *event) else {
                continue;
            };
            let fresh = u32::try_from(states.len()).unwrap();
            let number = *numbers.entry(next).or_insert_with_key(|next| {
                states.push(next.clone());
                ways.push(Some((from, *event)));
                fresh
            });
            if !event.is_fault() {
                into.push((number, from));
            }
        }
        at += 1;
    }
    drop(numbers);
    into.sort_unstable();
    let mut good: Vec<bool> = states.iter().map(Cluster::is_done).collect();
    let mut open: Vec<u32> =
        (0u32..).zip(&good).filter(|(_, good)| **good).map(|(number, _)| number).collect();
    while let Some(number) = open.pop() {
        let first = into.partition_point(|(end, _)| *end < number);
        for (_, from) in into[first..].iter().take_while(|(end, _)| *end == number) {
            if !std::mem::replace(&mut good[*from as usize], true) {
                open.push(*from);
            }
        }
    }
    let found = good.iter().position(|good| !good)?;
    let mut way = Vec::new();
    let mut back = found;
    while let Some((from, event)) = ways[back] {
        way.push(event);
        back = from as usize;
    }
    way.reverse();
    Some((way, states[found].clone()))
}
