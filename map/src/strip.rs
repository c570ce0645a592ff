//! A node as one line: its GPUs in boxes, NVLinks between neighbours, NUMA nodes apart, a letter for each holder.

use std::collections::BTreeMap;

use crate::{ClusterMap, GpuMap, GpuState, Hold, NodeMap};

/// Explains the marks, one line each.
pub const LEGEND: [&str; 3] = [
    "[0 a] held by a   [1?a] granted to a   [2+a] shared, part is free   [3 ·] free",
    "[4~a] reserved for gang a   [5!a] a is deleted, its processes may still run   [6 x] unhealthy   [7 /] cordoned",
    "═ several NVLinks to the neighbour   ─ one   │ another NUMA node",
];

/// The letter of each holder, in order of appearance. A pod of a gang has its gang's.
#[derive(Debug, Clone, Default)]
pub struct Letters(BTreeMap<String, usize>);

impl Letters {
    /// Gives a letter to each holder that has none.
    pub fn learn(&mut self, map: &ClusterMap) {
        for name in map.nodes.iter().flat_map(|node| &node.gpus).flat_map(holders) {
            let next = self.0.len();
            self.0.entry(name).or_insert(next);
        }
    }

    fn number(&self, holder: &str) -> usize {
        self.0.get(holder).copied().unwrap_or(0)
    }

    /// `a` to `z`, then `A` to `Z`, then again.
    fn letter(&self, holder: &str) -> char {
        let number = self.number(holder) % 52;
        ('a'..='z').chain('A'..='Z').nth(number).unwrap_or('a')
    }
}

/// The holders of a GPU, as they are called: `namespace/gang`, `namespace/pod`.
pub(crate) fn holders(gpu: &GpuMap) -> Vec<String> {
    let pods =
        gpu.pods.iter().map(|pod| format!("{}/{}", pod.namespace, pod.gang.as_ref().unwrap_or(&pod.name)));
    let mut holders: Vec<String> = pods.chain(gpu.reserved_for.clone()).collect();
    holders.dedup();
    holders
}

/// The holders on a node as they are called, by GPU.
pub fn all_holders(node: &NodeMap) -> Vec<String> {
    node.gpus.iter().flat_map(holders).collect()
}

/// The holders on a node in the order of their letters.
fn holders_on(node: &NodeMap, letters: &Letters) -> Vec<String> {
    let mut holders = all_holders(node);
    holders.sort_by_key(|holder| letters.number(holder));
    holders.dedup();
    holders
}

/// `a default/train, b research/eval`, without the namespace `default`.
pub fn names(node: &NodeMap, letters: &Letters) -> String {
    let names = holders_on(node, letters);
    let names = names.iter().map(|holder| {
        let name = holder.strip_prefix("default/").unwrap_or(holder);
        format!("{} {name}", letters.letter(holder))
    });
    names.collect::<Vec<_>>().join(", ")
}

/// SGR parameters of holders, in turn.
const HOLDERS: [&str; 6] = ["30;42", "30;46", "30;45", "30;44", "30;43", "30;47"];
pub(crate) const FAINT: &str = "2";
const BAD: &str = "1;31";
const WITHHELD: &str = "30;41";
const TURNED: &str = "7";

/// The GPUs of a node in a line, in color on request.
pub fn strip(node: &NodeMap, letters: &Letters, color: bool) -> String {
    let mut line = String::new();
    for (index, gpu) in node.gpus.iter().enumerate() {
        if index > 0 {
            line.push_str(tie(node, index));
        }
        let (mark, letter, look) = cell(gpu, letters);
        let cell = format!("[{index}{mark}{letter}]");
        line.push_str(&styled(look, &cell, color));
    }
    line
}

/// Words in a look, or bare.
pub(crate) fn styled(look: &str, words: &str, color: bool) -> String {
    if color { format!("\x1b[{look}m{words}\x1b[0m") } else { words.to_owned() }
}

/// What stands between GPU `index` and the one before it.
fn tie(node: &NodeMap, index: usize) -> &'static str {
    let numa = |index: usize| node.machine.gpus().get(index).and_then(|gpu| gpu.numa.clone());
    if numa(index) != numa(index - 1) {
        return " │ ";
    }
    match node.machine.nvlinks_between(index - 1, index) {
        0 => " ",
        1 => "─",
        _ => "═",
    }
}

fn cell(gpu: &GpuMap, letters: &Letters) -> (char, char, &'static str) {
    let holder = holders(gpu).into_iter().next();
    let letter = holder.as_deref().map(|holder| letters.letter(holder));
    let look = holder.as_deref().map_or(FAINT, |holder| HOLDERS[letters.number(holder) % HOLDERS.len()]);
    match gpu.state {
        GpuState::Unhealthy => letter.map_or((' ', 'x', BAD), |letter| ('x', letter, WITHHELD)),
        GpuState::Cordoned => letter.map_or((' ', '/', FAINT), |letter| ('/', letter, WITHHELD)),
        GpuState::Leaving => ('!', letter.unwrap_or(' '), WITHHELD),
        GpuState::Held if gpu.pods.iter().all(|pod| pod.hold == Hold::Granted) => {
            ('?', letter.unwrap_or(' '), TURNED)
        }
        GpuState::Held => (' ', letter.unwrap_or(' '), look),
        GpuState::PartlyHeld => ('+', letter.unwrap_or(' '), look),
        GpuState::Reserved => ('~', letter.unwrap_or(' '), TURNED),
        GpuState::Free => (' ', '·', FAINT),
    }
}
