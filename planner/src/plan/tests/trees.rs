//! Trees of groups: any selection of as many groups as are needed will do.

use std::collections::BTreeMap;
use std::sync::Arc;

use gantry_gang::protocol::PlanRequest;
use gantry_gang::quorum::{Quorum, Selection};
use proptest::prelude::*;

use super::ALL;
use super::world::{World, gang};

/// A PodGroup of so many members of 4 or of 8 GPUs.
#[derive(Debug, Clone, Copy)]
struct GroupCase {
    members: u32,
    gpus: u32,
}

/// Nodes of 8 GPUs, all or half of them free, and a tree of which `min` groups are needed.
#[derive(Debug, Clone)]
struct TreeCase {
    full: u32,
    half: u32,
    groups: Vec<GroupCase>,
    min: u32,
}

fn any_tree() -> impl Strategy<Value = TreeCase> {
    let group = (1..5_u32, prop::sample::select(vec![4, 8]));
    let group = group.prop_map(|(members, gpus)| GroupCase { members, gpus });
    (0..5_u32, 0..4_u32, prop::collection::vec(group, 1..5), 1..4_u32).prop_map(
        |(full, half, groups, min)| {
            let min = min.min(u32::try_from(groups.len()).unwrap());
            TreeCase { full, half, groups, min }
        },
    )
}

impl TreeCase {
    fn build(&self) -> (World, PlanRequest) {
        let mut world = World::new();
        for number in 0..self.full {
            world.node("z/r", &format!("full{number}"), ALL);
        }
        for number in 0..self.half {
            world.node("z/r", &format!("half{number}"), "0,1,2,3");
        }
        let shapes = BTreeMap::from([(4, world.shape(4)), (8, world.shape(8))]);
        let counts: Vec<_> = self.groups.iter().map(|group| (group.members, shapes[&group.gpus])).collect();
        let mut all = gang(&counts);
        let roles = (0..).zip(&self.groups).flat_map(|(at, group)| (0..group.members).map(move |_| at));
        for (member, group) in all.members.iter_mut().zip(roles) {
            member.role = format!("g{group}").into();
        }
        let mut quorum = Quorum::root(&"tree".into(), self.min);
        for (at, group) in self.groups.iter().enumerate() {
            quorum.add(&[(format!("g{at}").into(), group.members)]);
        }
        let gpus = |role: &str| self.groups[role[1..].parse::<usize>().unwrap()].gpus;
        let quorum = Arc::new(quorum);
        let of = |chosen: Selection| {
            let mut terms = (*all.terms).clone();
            terms.quorum = Some(Arc::clone(&quorum));
            let terms = Arc::new(terms.of_groups(&chosen));
            let members = all.members.iter().filter(|member| chosen.contains_key(&member.role));
            PlanRequest { members: members.cloned().collect(), must: terms.min, terms, ..all.clone() }
        };
        let mut choices = quorum.selections(&|_| true, &gpus).into_iter().map(of);
        let first = choices.next().unwrap();
        (world, PlanRequest { others: choices.collect(), ..first })
    }

    /// Whether any `min` groups fit, by trying all.
    fn fits(&self) -> bool {
        (0..1_u32 << self.groups.len()).filter(|bits| bits.count_ones() == self.min).any(|bits| {
            let chosen = self.groups.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1);
            let count = |gpus| -> u32 {
                let of_size = chosen.clone().filter(|(_, group)| group.gpus == gpus);
                of_size.map(|(_, group)| group.members).sum()
            };
            let (large, small) = (count(8), count(4));
            large <= self.full && small <= 2 * (self.full - large) + self.half
        })
    }
}

proptest! {
    #[test]
    fn tree_is_placed_if_any_selection_fits(case in any_tree()) {
        let (world, wanted) = case.build();
        let planned = world.plan(&wanted);
        prop_assert_eq!(planned.is_ok(), case.fits(), "{:?}", planned);
        let Ok(placement) = planned else {
            return Ok(());
        };
        // As many groups as are needed, each as a whole.
        let mut placed: BTreeMap<&str, u32> = BTreeMap::new();
        for place in &placement.places {
            *placed.entry(&place.role).or_default() += 1;
        }
        prop_assert_eq!(placed.len(), case.min as usize);
        for (role, count) in placed {
            prop_assert_eq!(count, case.groups[role[1..].parse::<usize>().unwrap()].members);
        }
        let choice = wanted.into_choice(&placement);
        prop_assert_eq!(choice.members.len(), placement.places.len());
    }
}
