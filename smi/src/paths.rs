//! Infers the PCIe class that an `NV#` cell hides. Paths in a tree are ultrametric: if two GPUs see a third device at
//! different distances, they see each other at the farther one. Other pairs are bounded by paths over other devices and
//! by NUMA.

use gantry_topology::{IdList, Link, PathClass, PathMatrix};

use crate::TopoText;

/// The path class of every pair: as printed, or inferred.
pub(crate) fn infer(text: &TopoText) -> PathMatrix {
    let size = text.links().len();
    let mut known: Vec<Vec<Option<PathClass>>> = text
        .links()
        .iter()
        .map(|row| {
            row.iter()
                .map(|link| match link {
                    Link::Pcie(class) => Some(*class),
                    Link::Itself | Link::NvLink(_) => None,
                })
                .collect()
        })
        .collect();
    while let Some(found) = deduce(&known) {
        known = found;
    }
    let bounds = bounds(&known);
    let across = farthest_name(text);
    let nodes = nodes(text);
    PathMatrix::from_fn(size, |row, column| {
        get(&known, row, column).unwrap_or_else(|| {
            let within = if same_numa_node(text, &nodes, row, column) { PathClass::Node } else { across };
            get(&bounds, row, column).map_or(within, |bound| bound.min(within))
        })
    })
}

fn get(known: &[Vec<Option<PathClass>>], a: usize, b: usize) -> Option<PathClass> {
    known.get(a).and_then(|row| row.get(b)).copied().flatten()
}

/// The name of a path across sockets in this text.
fn farthest_name(text: &TopoText) -> PathClass {
    let old = text.links().iter().flatten().any(|link| *link == Link::Pcie(PathClass::Soc));
    if old { PathClass::Soc } else { PathClass::Sys }
}

/// Equal for the two names of one distance.
fn rank(class: PathClass) -> PathClass {
    if class == PathClass::Soc { PathClass::Sys } else { class }
}

/// One round: infers every unknown pair that some third device sees at two different distances. In a real machine that
/// is not quite a tree, the third devices may disagree; the majority decides, and the farther class in a tie. `None` if
/// nothing was inferred.
fn deduce(known: &[Vec<Option<PathClass>>]) -> Option<Vec<Vec<Option<PathClass>>>> {
    let mut next = known.to_vec();
    let mut found = false;
    for (a, row) in next.iter_mut().enumerate() {
        for (b, cell) in row.iter_mut().enumerate() {
            if a == b || cell.is_some() {
                continue;
            }
            let mut votes = [0usize; PathClass::ALL.len()];
            for third in 0..known.len() {
                if let (Some(from_a), Some(from_b)) = (get(known, a, third), get(known, b, third))
                    && rank(from_a) != rank(from_b)
                {
                    let farther = from_a.max(from_b);
                    if let Some(votes) = PathClass::ALL
                        .iter()
                        .position(|class| *class == farther)
                        .and_then(|index| votes.get_mut(index))
                    {
                        *votes += 1;
                    }
                }
            }
            let best = PathClass::ALL.into_iter().zip(votes).max_by_key(|(class, votes)| (*votes, *class));
            if let Some((class, 1..)) = best {
                *cell = Some(class);
                found = true;
            }
        }
    }
    found.then_some(next)
}

/// Upper bounds: in a tree, a pair is no farther than the farthest step of any path between them over known pairs.
fn bounds(known: &[Vec<Option<PathClass>>]) -> Vec<Vec<Option<PathClass>>> {
    let mut bounds = known.to_vec();
    for via in 0..known.len() {
        let onward = bounds.get(via).cloned().unwrap_or_default();
        for row in &mut bounds {
            let Some(there) = row.get(via).copied().flatten() else {
                continue;
            };
            for (cell, step) in row.iter_mut().zip(&onward) {
                if let Some(step) = step {
                    let farthest = there.max(*step);
                    *cell = Some(cell.map_or(farthest, |known| known.min(farthest)));
                }
            }
        }
    }
    bounds
}

/// The NUMA nodes of a GPU, as far as they locate it.
struct Nodes {
    /// Whether there is a single one.
    one: bool,
    /// Whether another GPU has none of them.
    distinct: bool,
}

/// The nodes by GPU. Lists are compared once, by their ranges: a text may hold many long ones.
fn nodes(text: &TopoText) -> Vec<Nodes> {
    let lists: Vec<Vec<(u32, u32)>> =
        text.gpus().iter().map(|gpu| gpu.numa.as_ref().map(IdList::ranges).unwrap_or_default()).collect();
    let of_list = |own: &Vec<(u32, u32)>| Nodes {
        one: matches!(own.as_slice(), [(from, to)] if from == to),
        distinct: lists.iter().any(|other| !other.is_empty() && are_apart(own, other)),
    };
    lists.iter().map(of_list).collect()
}

/// Whether no number is in both of two ascending lists of ranges.
fn are_apart(a: &[(u32, u32)], b: &[(u32, u32)]) -> bool {
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    while let (Some((from_a, to_a)), Some((from_b, to_b))) = (a.peek(), b.peek()) {
        if to_a < from_b {
            a.next();
        } else if to_b < from_a {
            b.next();
        } else {
            return false;
        }
    }
    true
}

/// Whether two GPUs are certainly on one NUMA node: both have the same single one, or none but the same CPUs. If the
/// memory of GPUs counts as nodes too, each GPU of a socket has several (`0,2-17`): they are one if the CPUs are the
/// same and other GPUs have other nodes.
fn same_numa_node(text: &TopoText, nodes: &[Nodes], a: usize, b: usize) -> bool {
    let (Some(gpu_a), Some(gpu_b), Some(nodes)) = (text.gpus().get(a), text.gpus().get(b), nodes.get(a))
    else {
        return false;
    };
    let same_cpus = gpu_a.cpus.is_some() && gpu_a.cpus == gpu_b.cpus;
    match (&gpu_a.numa, &gpu_b.numa) {
        (Some(numa_a), Some(numa_b)) => numa_a == numa_b && (nodes.one || same_cpus && nodes.distinct),
        (None, None) => same_cpus,
        _ => false,
    }
}
