//! The explanation of a choice, for logs, events and the command line.

use super::surroundings::Group;
use super::{Choice, Purpose, Table};
use crate::bandwidth::gbs;
use crate::set::GpuSet;

impl Choice {
    /// The explanation of the choice, one line: its links, its bandwidth, the remaining GPUs.
    pub fn reason(&self, table: &Table) -> String {
        let left = self.free - self.gpus;
        let mut text = match self.gpus.len() {
            0 => return "no GPU was asked for".to_owned(),
            1 => format!("{}: {}", named(self.gpus), single(self, table)),
            _ => format!("{}: {}", named(self.gpus), joined(self, table)),
        };
        if left.is_empty() {
            text.push_str("; leaves none free");
        } else {
            text.push_str(&format!("; leaves {} free", named(left)));
        }
        for (position, group) in broken(self, table).iter().enumerate() {
            let word = if position == 0 { "; splits" } else { " and" };
            text.push_str(&format!("{word} {} {}", group.what, group.gpus));
        }
        for (gpu, lacks) in self.gpus.iter().filter_map(|gpu| Some((gpu, table.degradations.get(gpu)?))) {
            let lacks: Vec<String> = lacks.iter().map(ToString::to_string).collect();
            if !lacks.is_empty() {
                text.push_str(&format!("; GPU {gpu}: {}", lacks.join(", ")));
            }
        }
        text
    }
}

/// `GPU 5`, `GPUs 4,5`.
fn named(gpus: GpuSet) -> String {
    let noun = if gpus.len() == 1 { "GPU" } else { "GPUs" };
    format!("{noun} {gpus}")
}

fn single(choice: &Choice, table: &Table) -> String {
    let degraded = table.surroundings.degraded_of(choice.free);
    if !degraded.is_empty() && (degraded & choice.gpus).is_empty() {
        return format!("better than {}, free but degraded", named(degraded));
    }
    let best = if choice.free.len() == 1 {
        "the only one free"
    } else if table.surroundings.groups().is_empty() {
        "all are alike"
    } else if broken(choice, table).is_empty() {
        "splits no group that is whole"
    } else {
        "no GPU outside whole groups is free"
    };
    best.to_owned()
}

fn joined(choice: &Choice, table: &Table) -> String {
    let size = choice.gpus.len();
    let how = links(choice.gpus, table);
    let best = gbs(table.best_bandwidth(size));
    // A search may miss better sets.
    let most_free = if table.is_exhaustive() { "the most that is free" } else { "the most found free" };
    let rank = if choice.bandwidth_gbs >= best && table.is_exhaustive() {
        format!("the most that {size} GPUs of this machine reach")
    } else if choice.bandwidth_gbs >= best {
        format!("the most found for {size} GPUs of this machine")
    } else if choice.gpus == choice.free {
        format!("all that is free ({best} GB/s on the empty machine)")
    } else {
        format!("{most_free} ({best} GB/s on the empty machine)")
    };
    let nics = table.near_nics(choice.gpus).len();
    let nics = if choice.purpose == Purpose::GangMember && nics > 0 {
        format!(", {nics} NICs on the same PCIe switches")
    } else {
        String::new()
    };
    format!("{how}, {} GB/s, {rank}{nics}", choice.bandwidth_gbs)
}

/// The links of a collective over the set.
fn links(set: GpuSet, table: &Table) -> String {
    let links = &table.links;
    let nvlink = links.ring(set) > links.pcie_ring(set);
    let smallest = table
        .surroundings
        .groups()
        .iter()
        .filter(|group| set.is_subset(group.gpus))
        .min_by_key(|group| group.gpus.len());
    if nvlink && links.lowest_switch_links(set) > 0 {
        "over NVSwitch".to_owned()
    } else if nvlink && set.len() == 2 {
        "over NVLink".to_owned()
    } else if nvlink {
        "on NVLink rings".to_owned()
    } else {
        let within = match smallest {
            _ if links.crosses_sockets(set) => " across sockets".to_owned(),
            Some(group) => format!(" within one {}", group.what),
            None => String::new(),
        };
        let without = if links.is_peer_to_peer(set) { "" } else { " without peer-to-peer" };
        format!("over PCIe{within}{without}")
    }
}

/// The groups that were whole among the free GPUs and are taken in part; of nested ones the smallest.
fn broken(choice: &Choice, table: &Table) -> Vec<Group> {
    let broken: Vec<Group> = table
        .surroundings
        .groups()
        .iter()
        .filter(|group| group.gpus.is_subset(choice.free) && !group.gpus.is_subset(choice.gpus))
        .filter(|group| !(group.gpus & choice.gpus).is_empty())
        .copied()
        .collect();
    let inner = |outer: &Group| {
        broken.iter().any(|group| group.gpus != outer.gpus && group.gpus.is_subset(outer.gpus))
    };
    broken.iter().filter(|group| !inner(group)).copied().collect()
}
