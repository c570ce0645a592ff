use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::{MOST_SELECTIONS, Quorum, Selection};

fn pods(role: &str, min: u32) -> Quorum {
    Quorum::Pods { role: role.into(), min }
}

fn groups(name: &str, min: u32, children: Vec<Quorum>) -> Quorum {
    Quorum::Groups { name: name.into(), min, children }
}

fn roles(selections: &[Selection]) -> Vec<Vec<&str>> {
    selections.iter().map(|chosen| chosen.keys().map(|role| &**role).collect()).collect()
}

#[test]
fn paths_make_a_tree() {
    let mut tree = Quorum::root(&"root".into(), 2);
    tree.add(&[("a".into(), 4)]);
    tree.add(&[("inner".into(), 1), ("b".into(), 2)]);
    tree.add(&[("inner".into(), 1), ("c".into(), 1)]);
    let inner = groups("inner", 1, vec![pods("b", 2), pods("c", 1)]);
    assert_eq!(tree, groups("root", 2, vec![pods("a", 4), inner]));
    assert_eq!((tree.least(), tree.short_of_groups()), (Some(5), None));
    assert_eq!((tree.min_of("b"), tree.min_of("inner")), (Some(2), None));
}

#[test]
fn group_that_has_too_few_children_is_named() {
    let inner = groups("inner", 3, vec![pods("b", 2), pods("c", 1)]);
    let tree = groups("root", 2, vec![pods("a", 4), inner]);
    assert_eq!(tree.least(), None);
    assert_eq!(tree.short_of_groups(), Some((&"inner".into(), 3, 2)));
    assert_eq!(groups("root", 2, vec![pods("a", 4)]).short_of_groups(), Some((&"root".into(), 2, 1)));
}

#[test]
fn pod_groups_of_one_kind_stand_for_one_another() {
    let tree = groups("root", 2, vec![pods("a", 2), pods("b", 2), pods("c", 2), pods("d", 1)]);
    let same = tree.selections(&|_| true, &|_| 0);
    assert_eq!(roles(&same), [vec!["a", "d"], vec!["a", "b"]]);
    let other = tree.selections(&|role| role != "d", &|role| role.to_owned());
    assert_eq!(roles(&other), [["a", "b"], ["a", "c"], ["b", "c"]]);
}

#[test]
fn selections_of_many_groups_are_bounded() {
    let names: Vec<String> = (0..256).map(|number| format!("g{number:03}")).collect();
    let tree = groups("root", 128, names.iter().map(|name| pods(name, 1)).collect());
    let found = tree.selections(&|_| true, &|role| role.to_owned());
    assert_eq!(found.len(), MOST_SELECTIONS);
    assert!(found.iter().all(|chosen| chosen.len() == 128));
}

/// Whether a tree is whole if exactly these PodGroups are.
fn is_whole(tree: &Quorum, there: &BTreeSet<&str>) -> bool {
    match tree {
        Quorum::Pods { role, .. } => there.contains(&**role),
        Quorum::Groups { min, children, .. } => {
            children.iter().filter(|child| is_whole(child, there)).count() >= *min as usize
        }
    }
}

const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

/// A tree of two or three levels with up to six PodGroups.
fn any_tree() -> impl Strategy<Value = Quorum> {
    let leaf = (0..3_usize, 1..4_u32);
    (prop::collection::vec(leaf, 1..=NAMES.len()), [1..4_u32, 1..3, 1..3]).prop_map(|(leaves, mins)| {
        let mut tree = Quorum::root(&"root".into(), mins[0]);
        for ((at, min), name) in leaves.into_iter().zip(NAMES) {
            let leaf = (name.into(), min);
            match at {
                0 => tree.add(&[leaf]),
                _ => tree.add(&[(format!("inner{at}").as_str().into(), mins[at]), leaf]),
            }
        }
        tree
    })
}

proptest! {
    /// Against all subsets of the PodGroups.
    #[test]
    fn selections_are_the_least_whole_subsets(tree in any_tree(), exist in prop::collection::btree_set(0..6_usize, 0..=6)) {
        let leaves = tree.leaves();
        let names: Vec<&str> = leaves.keys().map(|role| &**role).collect();
        let exist: BTreeSet<&str> = exist.into_iter().filter_map(|at| names.get(at).copied()).collect();
        let subsets = (0..1_u32 << names.len()).map(|bits| -> BTreeSet<&str> {
            names.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1).map(|(_, name)| *name).collect()
        });
        let whole: Vec<BTreeSet<&str>> =
            subsets.filter(|subset| subset.is_subset(&exist) && is_whole(&tree, subset)).collect();
        let least: BTreeSet<BTreeSet<&str>> = whole
            .iter()
            .filter(|subset| subset.iter().all(|name| {
                let mut fewer = (*subset).clone();
                fewer.remove(name);
                !is_whole(&tree, &fewer)
            }))
            .cloned()
            .collect();
        let found = tree.selections(&|role| exist.contains(role), &|role| role.to_owned());
        prop_assume!(least.len() <= MOST_SELECTIONS);
        let sets: Vec<BTreeSet<&str>> =
            found.iter().map(|chosen| chosen.keys().map(|role| &**role).collect()).collect();
        // Each once.
        prop_assert_eq!(sets.iter().collect::<BTreeSet<_>>().len(), sets.len());
        prop_assert_eq!(sets.iter().cloned().collect::<BTreeSet<_>>(), least);
        let members = |chosen: &Selection| chosen.values().sum::<u32>();
        prop_assert!(found.is_sorted_by_key(members));
    }

    /// Against all subsets of the PodGroups.
    #[test]
    fn missing_is_that_of_the_cheapest_subset(tree in any_tree(), exist in prop::collection::vec(0..4_u32, 6)) {
        let leaves = tree.leaves();
        let exist: BTreeMap<&str, u32> = leaves.keys().map(|role| &**role).zip(exist).collect();
        let names: Vec<&str> = exist.keys().copied().collect();
        let cost = |name: &str| leaves[name].saturating_sub(exist[name]);
        let cheapest = (0..1_u32 << names.len())
            .map(|bits| -> BTreeSet<&str> {
                names.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1).map(|(_, name)| *name).collect()
            })
            .filter(|subset| is_whole(&tree, subset))
            .map(|subset| subset.into_iter().map(cost).sum::<u32>())
            .min();
        prop_assert_eq!(tree.missing(&|role| exist.get(role).copied().unwrap_or_default()), cheapest);
        prop_assert_eq!(tree.least().is_none(), tree.short_of_groups().is_some());
    }
}
