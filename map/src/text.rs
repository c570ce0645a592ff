//! The whole map as text: the parts of the fabric, the nodes of each, alike nodes as one line, the faults below.

use std::fmt::Write as _;

use gantry_api::one_line;

use crate::strip::{FAINT, names, strip, styled};
use crate::{ClusterMap, GpuState, LEGEND, Letters, NodeMap};

/// How a page looks.
#[derive(Debug, Clone, Copy)]
pub struct Page {
    /// Characters in a line.
    pub columns: usize,
    /// Whether there are colors.
    pub color: bool,
    /// Whether alike nodes have a line each.
    pub wide: bool,
}

/// Faults that are listed.
const FAULTS: usize = 20;
/// Longest name of a node that is not truncated.
const NAME: usize = 32;

/// The map as lines of at most the page's width, where the GPUs of a node fit into it.
pub fn text(map: &ClusterMap, letters: &Letters, page: Page) -> String {
    let mut out = String::new();
    let groups = groups(map, letters, page.wide);
    let width = groups.iter().map(|group| group.name.chars().count()).max().unwrap_or(0);
    let mut domain = "";
    for group in &groups {
        if group.first.domain != domain {
            domain = &group.first.domain;
            let _ = writeln!(out, "{}", one_line(domain));
        }
        group.write(&mut out, width, letters, page);
    }
    faults(&mut out, map);
    let _ = writeln!(out, "\n{}", totals(map));
    for line in LEGEND {
        let _ = writeln!(out, "{}", styled(FAINT, line, page.color));
    }
    out
}

/// Nodes of one domain that look the same.
struct Group<'m> {
    first: &'m NodeMap,
    name: String,
    nodes: usize,
}

fn groups<'m>(map: &'m ClusterMap, letters: &Letters, wide: bool) -> Vec<Group<'m>> {
    let mut groups: Vec<(Group<'m>, String)> = Vec::new();
    for node in &map.nodes {
        let look = format!("{}{}{}", strip(node, letters, false), node.model, names(node, letters));
        // A node that wants attention stands by itself.
        let plain = !wide
            && node.not_ready.is_none()
            && node.gpus.iter().all(|gpu| gpu.unhealthy.is_none() && gpu.cordoned.is_none());
        let same = |(group, known): &&mut (Group<'m>, String)| {
            plain && *known == look && group.first.domain == node.domain && group.first.not_ready.is_none()
        };
        match groups.iter_mut().find(same) {
            Some((group, _)) => group.nodes += 1,
            None => groups.push((Group { first: node, name: String::new(), nodes: 1 }, look)),
        }
    }
    let named = groups.into_iter().map(|(mut group, _)| {
        let mut name = one_line(&group.first.name).into_owned();
        if name.chars().count() > NAME {
            name = name.chars().take(NAME - 1).chain(['…']).collect();
        }
        group.name = match group.nodes {
            1 => name,
            nodes => format!("{name} +{} alike", nodes - 1),
        };
        group
    });
    named.collect()
}

impl Group<'_> {
    fn write(&self, out: &mut String, width: usize, letters: &Letters, page: Page) {
        let node = self.first;
        let line = format!("  {:width$}  {}", self.name, strip(node, letters, page.color));
        let plain = format!("  {:width$}  {}", self.name, strip(node, letters, false));
        let mut about = names(node, letters);
        if let Some(reason) = &node.not_ready {
            about = [about, format!("plugin not ready: {reason}")]
                .into_iter()
                .filter(|part| !part.is_empty())
                .collect::<Vec<_>>()
                .join("; ");
        }
        let about = one_line(&about);
        let used = plain.chars().count();
        if about.is_empty() {
            let _ = writeln!(out, "{line}");
        } else if used + 2 + about.chars().count() <= page.columns {
            let _ = writeln!(out, "{line}  {}", styled(FAINT, &about, page.color));
        } else {
            let _ = writeln!(out, "{line}");
            let indent = width + 4;
            for part in wrapped(&about, page.columns.saturating_sub(indent)) {
                let _ = writeln!(out, "{:indent$}{}", "", styled(FAINT, &part, page.color));
            }
        }
    }
}

/// The entries of a list between commas, as many in a line as fit.
fn wrapped(list: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for entry in list.split(", ") {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 2 + entry.chars().count() <= columns => {
                line.push_str(", ");
                line.push_str(entry);
            }
            _ => lines.push(entry.to_owned()),
        }
    }
    lines
}

fn faults(out: &mut String, map: &ClusterMap) {
    let faults = map.nodes.iter().flat_map(|node| {
        let gpus = node.gpus.iter().enumerate();
        gpus.flat_map(move |(index, gpu)| {
            let reasons = gpu.unhealthy.iter().chain(&gpu.cordoned);
            reasons.map(move |reason| (node, index, reason.as_str()))
        })
    });
    let faults: Vec<_> = faults.collect();
    if !faults.is_empty() {
        out.push('\n');
    }
    for (node, index, reason) in faults.iter().take(FAULTS) {
        let _ = writeln!(out, "{}", one_line(&format!("{} GPU {index}: {reason}", node.name)));
    }
    if faults.len() > FAULTS {
        let _ = writeln!(out, "and {} more unhealthy or cordoned GPUs", faults.len() - FAULTS);
    }
}

/// `12 nodes, 96 GPUs: 40 free, 50 held, 2 partly held, 4 unhealthy`
pub fn totals(map: &ClusterMap) -> String {
    let gpus = || map.nodes.iter().flat_map(|node| &node.gpus);
    let counts = GpuState::ALL.iter().filter_map(|state| {
        let count = gpus().filter(|gpu| gpu.state == *state).count();
        (count > 0).then(|| format!("{count} {}", state.words()))
    });
    let counts: Vec<String> = counts.collect();
    let nodes = map.nodes.len();
    let noun = if nodes == 1 { "node" } else { "nodes" };
    format!("{nodes} {noun}, {} GPUs: {}", gpus().count(), counts.join(", "))
}
