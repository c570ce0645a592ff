//! A node as one line: its GPUs in boxes, NVLinks between neighbours, NUMA nodes apart, a letter for each pod. Pure text; colours
//! are the screen's.

use std::collections::BTreeMap;

use super::screen::{Look, Screen};
use super::sight::{GpuSight, Hold, NodeSight, Sight};

/// Explains the marks.
pub(super) const LEGEND: [&str; 2] = [
    "[0 a] GPU 0 held by pod a   [1 ·] free   [2 x] unhealthy   [3!a] kept back: pod a is gone, its processes are not",
    "═ several NVLinks to the neighbour   ─ one   │ another NUMA node",
];

/// Looks of pods, in turn.
const PODS: [Look; 6] = [
    Look("30;42"),
    Look("30;46"),
    Look("30;45"),
    Look("30;44"),
    Look("30;43"),
    Look("30;47"),
];

/// The letter of each pod, given in order of appearance and kept.
#[derive(Debug, Clone, Default)]
pub(super) struct Letters(BTreeMap<String, usize>);

impl Letters {
    /// Gives a letter to every pod in sight.
    pub(super) fn learn(&mut self, sight: &Sight) {
        for pod in sight
            .nodes
            .iter()
            .flat_map(|node| &node.gpus)
            .filter_map(|gpu| gpu.pod.as_ref())
        {
            let next = self.0.len();
            self.0.entry(pod.clone()).or_insert(next);
        }
    }

    fn of(&self, pod: &str) -> (char, Look) {
        let number = self.0.get(pod).copied().unwrap_or(0);
        let letter = ('a'..='z').nth(number % 26).unwrap_or('a');
        (
            letter,
            PODS.get(number % PODS.len()).copied().unwrap_or(Look::PLAIN),
        )
    }
}

/// One line per node.
pub(super) fn strips(sight: &Sight, letters: &Letters, screen: Screen) -> Vec<String> {
    let width = sight
        .nodes
        .iter()
        .map(|node| node.name.chars().count())
        .max()
        .unwrap_or(0);
    sight
        .nodes
        .iter()
        .map(|node| format!("  {:width$}  {}", node.name, strip(node, letters, screen)))
        .collect()
}

fn strip(node: &NodeSight, letters: &Letters, screen: Screen) -> String {
    let mut line = String::new();
    for (index, gpu) in node.gpus.iter().enumerate() {
        if index > 0 {
            line.push_str(tie(node, index));
        }
        line.push_str(&cell(index, gpu, letters, screen));
    }
    let mut pods: Vec<&String> = node.gpus.iter().filter_map(|gpu| gpu.pod.as_ref()).collect();
    pods.sort_by_key(|pod| letters.0.get(*pod));
    pods.dedup();
    let names: Vec<String> = pods
        .iter()
        .map(|pod| format!("{} {pod}", letters.of(pod).0))
        .collect();
    if !names.is_empty() {
        line.push_str("  ");
        line.push_str(&screen.styled(Look::FAINT, names.join(", ")));
    }
    line
}

/// What stands between GPU `index` and the one before it.
fn tie(node: &NodeSight, index: usize) -> &'static str {
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

fn cell(index: usize, gpu: &GpuSight, letters: &Letters, screen: Screen) -> String {
    let (mark, letter, look) = match (&gpu.pod, gpu.hold, &gpu.sick) {
        (Some(pod), Hold::Quarantined, _) => ('!', letters.of(pod).0, Look("30;41")),
        (Some(pod), Hold::Granted, _) => ('?', letters.of(pod).0, Look("7")),
        (Some(pod), _, Some(_)) => ('x', letters.of(pod).0, Look("30;41")),
        (Some(pod), _, None) => {
            let (letter, look) = letters.of(pod);
            (' ', letter, look)
        }
        (None, _, Some(_)) => (' ', 'x', Look::BAD),
        (None, _, None) => (' ', '·', Look::FAINT),
    };
    screen.styled(look, format!("[{index}{mark}{letter}]"))
}

#[cfg(test)]
mod tests {
    use gantry_topology::Machine;

    use super::*;

    fn node(name: &str, file: &str, holds: &[(usize, &str, Hold)], sick: &[usize]) -> NodeSight {
        let machine: Machine = serde_saphyr::from_str(file).unwrap();
        let mut gpus = vec![GpuSight::default(); machine.gpus().len()];
        for (gpu, pod, hold) in holds {
            gpus[*gpu].pod = Some((*pod).to_owned());
            gpus[*gpu].hold = *hold;
        }
        for gpu in sick {
            gpus[*gpu].sick = Some("Xid 79".into());
        }
        NodeSight {
            name: name.into(),
            machine,
            gpus,
        }
    }

    #[test]
    fn nodes_are_drawn_with_links_holders_and_sick_gpus() {
        let sight = Sight {
            nodes: vec![
                node(
                    "a40",
                    include_str!("../../../simulator/machines/a40-8x-bridged.yaml"),
                    &[
                        (0, "pair", Hold::Held),
                        (1, "pair", Hold::Held),
                        (4, "new", Hold::Granted),
                    ],
                    &[3],
                ),
                node(
                    "dgx1",
                    include_str!("../../../simulator/machines/dgx1-v100.yaml"),
                    &[(0, "quad", Hold::Quarantined), (3, "quad", Hold::Held)],
                    &[3],
                ),
            ],
        };
        let mut letters = Letters::default();
        letters.learn(&sight);
        let screen = Screen {
            terminal: false,
            columns: 100,
        };
        insta::assert_snapshot!(strips(&sight, &letters, screen).join("\n"), @r"
          a40   [0 a]═[1 a] [2 ·]═[3 x] │ [4?b]═[5 ·] [6 ·]═[7 ·]  a pair, b new
          dgx1  [0!c]─[1 ·]═[2 ·]═[3xc] │ [4 ·]─[5 ·]═[6 ·]═[7 ·]  c quad
        ");
        let colored = Screen {
            terminal: true,
            ..screen
        };
        let text = strips(&sight, &letters, colored).join("\n");
        assert!(text.contains("\x1b[1;31m[3 x]\x1b[0m"), "{text:?}");
    }
}
