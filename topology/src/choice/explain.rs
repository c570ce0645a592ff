//! A choice in words, for logs, events and the command line. Says only what the table knows; decides nothing.

use super::{Choice, Table};
use crate::bandwidth::gbs;
use crate::set::GpuSet;

/// One line: how the set is joined, what it reaches, what it leaves.
pub(super) fn reason(choice: &Choice, table: &Table) -> String {
    let left = choice.free - choice.gpus;
    let mut text = match choice.gpus.len() {
        0 => return "no GPU was asked for".to_owned(),
        1 => format!("GPU {}: {}", choice.gpus, single(choice, table)),
        _ => format!("GPUs {}: {}", choice.gpus, joined(choice, table)),
    };
    if left.is_empty() {
        text.push_str("; leaves none free");
    } else {
        text.push_str(&format!("; leaves {left}"));
        let broken: Vec<String> = broken_groups(choice, table)
            .iter()
            .map(|group| format!("{{{group}}}"))
            .collect();
        if !broken.is_empty() {
            text.push_str(&format!(", breaking {}", broken.join(" ")));
        }
    }
    text
}

fn single(choice: &Choice, table: &Table) -> String {
    let groups = table.surroundings.groups();
    let whole = |group: &&GpuSet| group.is_subset(choice.free) && !(**group & choice.gpus).is_empty();
    if groups.is_empty() {
        "all GPUs are alike".to_owned()
    } else if groups.iter().any(|group| whole(&group)) {
        "the rest is left best connected this way".to_owned()
    } else {
        "breaks no group that is whole".to_owned()
    }
}

fn joined(choice: &Choice, table: &Table) -> String {
    let size = choice.gpus.len();
    let how = links(choice.gpus, table);
    let best = gbs(table.best_bandwidth(size));
    let rank = if choice.bandwidth_gbs >= best {
        format!("the best {size} GPUs of this machine can do")
    } else if choice.gpus == choice.free {
        format!("all that is free; {best} GB/s on the empty machine")
    } else {
        format!("the best that is free; {best} GB/s on the empty machine")
    };
    format!("{how}, {} GB/s, {rank}", choice.bandwidth_gbs)
}

/// What carries a collective over the set.
fn links(set: GpuSet, table: &Table) -> String {
    let links = &table.links;
    let nvlink = links.ring(set) > links.pcie_ring(set);
    if nvlink && links.lowest_switch_links(set) > 0 {
        return "joined by NVSwitch".to_owned();
    }
    if nvlink && set.len() == 2 {
        return "joined by NVLink".to_owned();
    }
    if nvlink {
        return "on NVLink rings".to_owned();
    }
    let island = table
        .surroundings
        .groups()
        .iter()
        .any(|group| set.is_subset(*group));
    match (links.crosses_sockets(set), island) {
        (true, _) => "over PCIe across sockets".to_owned(),
        (false, true) => "over PCIe within one group".to_owned(),
        (false, false) => "over PCIe".to_owned(),
    }
}

/// The groups that were whole among the free GPUs and are taken in part; of nested ones the smallest.
fn broken_groups(choice: &Choice, table: &Table) -> Vec<GpuSet> {
    let broken: Vec<GpuSet> = table
        .surroundings
        .groups()
        .iter()
        .filter(|group| group.is_subset(choice.free) && !group.is_subset(choice.gpus))
        .filter(|group| !(**group & choice.gpus).is_empty())
        .copied()
        .collect();
    broken
        .iter()
        .filter(|group| {
            !broken
                .iter()
                .any(|inner| inner != *group && inner.is_subset(**group))
        })
        .copied()
        .collect()
}
