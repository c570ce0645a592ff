//! Which groups of a tree of groups are needed: of each CompositePodGroup so many children, of each PodGroup so many pods. A group is there
//! as a whole or does not count.

use std::collections::BTreeMap;
use std::sync::Arc;

/// PodGroups that were chosen, each with its minimum.
pub type Selection = BTreeMap<Arc<str>, u32>;

/// Selections of groups that are tried at most.
pub const MOST_SELECTIONS: usize = 32;

/// A tree of groups. PodGroups are its leaves, and the roles of the gang's members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Quorum {
    /// A PodGroup that needs so many pods.
    Pods { role: Arc<str>, min: u32 },
    /// A CompositePodGroup that needs so many of its children.
    Groups { name: Arc<str>, min: u32, children: Vec<Quorum> },
}

impl Quorum {
    /// A CompositePodGroup without children.
    pub fn root(name: &Arc<str>, min: u32) -> Self {
        Self::Groups { name: Arc::clone(name), min, children: Vec::new() }
    }

    /// Adds a PodGroup below CompositePodGroups, which are added as needed: `path` has the name and the minimum of each group below this
    /// one, the PodGroup last.
    pub fn add(&mut self, path: &[(Arc<str>, u32)]) {
        let (Self::Groups { children, .. }, Some(((name, min), rest))) = (self, path.split_first()) else {
            return;
        };
        if rest.is_empty() {
            children.push(Self::Pods { role: Arc::clone(name), min: *min });
            return;
        }
        let is_it = |child: &Self| matches!(child, Self::Groups { name: known, .. } if known == name);
        match children.iter_mut().find(|child| is_it(child)) {
            Some(child) => child.add(rest),
            None => {
                let mut child = Self::root(name, *min);
                child.add(rest);
                children.push(child);
            }
        }
    }

    /// Members that the cheapest selection of groups lacks, where `exist` of each PodGroup are there. `None` if there are too few groups.
    pub fn missing(&self, exist: &impl Fn(&str) -> u32) -> Option<u32> {
        match self {
            Self::Pods { role, min } => Some(min.saturating_sub(exist(role))),
            Self::Groups { min, children, .. } => {
                let mut missing: Vec<u32> =
                    children.iter().filter_map(|child| child.missing(exist)).collect();
                missing.sort_unstable();
                let needed = missing.get(..*min as usize)?;
                Some(needed.iter().fold(0, |sum: u32, count| sum.saturating_add(*count)))
            }
        }
    }

    /// The fewest members that make it whole. `None` if there are too few groups.
    pub fn least(&self) -> Option<u32> {
        self.missing(&|_| 0)
    }

    /// The first CompositePodGroup from the root down that has fewer children than it needs: its name, what it needs, and what it has.
    pub fn short_of_groups(&self) -> Option<(&Arc<str>, u32, usize)> {
        match self {
            Self::Pods { .. } => None,
            Self::Groups { name, min, children } if children.len() < *min as usize => {
                Some((name, *min, children.len()))
            }
            Self::Groups { min, children, .. } => {
                let whole = children.iter().filter(|child| child.least().is_some()).count();
                let short = (whole < *min as usize).then(|| children.iter().find_map(Self::short_of_groups));
                short.flatten()
            }
        }
    }

    /// The minimum of a PodGroup.
    pub fn min_of(&self, role: &str) -> Option<u32> {
        match self {
            Self::Pods { role: name, min } => (**name == *role).then_some(*min),
            Self::Groups { children, .. } => children.iter().find_map(|child| child.min_of(role)),
        }
    }

    /// The PodGroups, with their minimums.
    pub fn leaves(&self) -> Selection {
        let mut leaves = Selection::new();
        self.collect(&mut leaves);
        leaves
    }

    fn collect(&self, leaves: &mut Selection) {
        match self {
            Self::Pods { role, min } => {
                leaves.insert(Arc::clone(role), *min);
            }
            Self::Groups { children, .. } => children.iter().for_each(|child| child.collect(leaves)),
        }
    }

    /// The first [`MOST_SELECTIONS`] ways to choose as many groups as are needed, and no more, of those whose PodGroups are `whole`: those
    /// with the fewest members first. PodGroups of one `kind` stand for one another, so that only the first of them are chosen.
    pub fn selections<K: Ord>(
        &self,
        whole: &impl Fn(&str) -> bool,
        kind: &impl Fn(&str) -> K,
    ) -> Vec<Selection> {
        match self {
            Self::Pods { role, min } if whole(role) => vec![Selection::from([(Arc::clone(role), *min)])],
            Self::Pods { .. } => Vec::new(),
            Self::Groups { min, children, .. } => {
                let options = children.iter().map(|child| Options::of(child, whole, kind));
                let mut options: Vec<Options<K>> =
                    options.filter(|options| !options.ways.is_empty()).collect();
                options.sort_by(|a, b| (a.least, &a.kind).cmp(&(b.least, &b.kind)));
                let mut found = Vec::new();
                choose(&options, *min as usize, &Selection::new(), &mut found);
                found.sort_by_key(members);
                found
            }
        }
    }
}

/// How one child of a group may be chosen.
struct Options<K> {
    /// The fewest members that it takes.
    least: u32,
    /// PodGroups with the same one stand for one another.
    kind: Option<(K, u32)>,
    ways: Vec<Selection>,
}

impl<K: Ord> Options<K> {
    fn of(child: &Quorum, whole: &impl Fn(&str) -> bool, kind: &impl Fn(&str) -> K) -> Self {
        let ways = child.selections(whole, kind);
        let kind = match child {
            Quorum::Pods { role, min } => Some((kind(role), *min)),
            Quorum::Groups { .. } => None,
        };
        Self { least: ways.iter().map(members).min().unwrap_or_default(), kind, ways }
    }
}

/// Members of a selection.
fn members(selection: &Selection) -> u32 {
    selection.values().fold(0, |sum, min| sum.saturating_add(*min))
}

/// Adds to `found` the ways to choose `count` of these children in addition to `chosen`. Where a child is left out, those that stand for it
/// are too.
fn choose<K: Ord>(options: &[Options<K>], count: usize, chosen: &Selection, found: &mut Vec<Selection>) {
    let mut left_out: Option<&(K, u32)> = None;
    for (at, option) in options.iter().enumerate() {
        if count == 0 || options.len() - at < count {
            break;
        }
        if left_out.is_some() && left_out == option.kind.as_ref() {
            continue;
        }
        for way in &option.ways {
            if found.len() >= MOST_SELECTIONS {
                return;
            }
            let mut more = chosen.clone();
            more.extend(way.iter().map(|(role, min)| (Arc::clone(role), *min)));
            choose(&options[at + 1..], count - 1, &more, found);
        }
        left_out = option.kind.as_ref();
    }
    if count == 0 && found.len() < MOST_SELECTIONS {
        found.push(chosen.clone());
    }
}

#[cfg(test)]
mod tests;
