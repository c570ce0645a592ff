//! The map as an SVG picture for a browser: a row per node, a box per GPU, a tooltip on each.

use std::fmt::Write as _;

use gantry_topology::draw::xml_escaped as escaped;

use crate::strip::holders;
use crate::{ClusterMap, GpuMap, GpuState, NodeMap};

const MARGIN: usize = 16;
/// Height of a row, and of a domain's heading.
const ROW: usize = 30;
const BOX: usize = 22;
/// From one GPU to the next, and more where another NUMA node begins.
const STEP: usize = 30;
const NUMA_GAP: usize = 14;
/// Width of a character of a node's name.
const CHARACTER: usize = 8;

/// The map as an SVG document.
pub fn svg(map: &ClusterMap) -> String {
    let names = map.nodes.iter().map(|node| node.name.chars().count());
    let left = MARGIN + CHARACTER * names.max().unwrap_or(0) + 2 * CHARACTER;
    let mut body = String::new();
    let mut y = MARGIN;
    let mut right = left;
    let mut domain = "";
    for node in &map.nodes {
        if node.domain != domain {
            domain = &node.domain;
            text(&mut body, (MARGIN, y + 19), "domain", domain);
            y += ROW;
        }
        text(&mut body, (MARGIN, y + 16), "node", &node.name);
        right = right.max(row(&mut body, node, left, y));
        y += ROW;
    }
    let (width, height) = (right + MARGIN, y + MARGIN);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"GPUs of the cluster\">\n\
         <style>text{{font:13px monospace;fill:#222}}.domain{{font-weight:bold}}.gpu{{font-size:11px;text-anchor:middle}}\
         rect{{stroke:#555}}line{{stroke:#777;stroke-width:2}}</style>\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\" stroke=\"none\"/>\n{body}</svg>\n"
    )
}

/// The GPUs of a node; where they end.
fn row(body: &mut String, node: &NodeMap, left: usize, y: usize) -> usize {
    let numa = |index: usize| node.machine.gpus().get(index).and_then(|gpu| gpu.numa.as_ref());
    let mut x = left;
    for (index, gpu) in node.gpus.iter().enumerate() {
        if index > 0 {
            x += STEP;
            if numa(index) != numa(index - 1) {
                x += NUMA_GAP;
            } else if node.machine.nvlinks_between(index - 1, index) > 0 {
                let (from, to, middle) = (x + BOX - STEP, x, y + BOX / 2);
                // Writing into a String cannot fail.
                let _ = writeln!(body, "<line x1=\"{from}\" y1=\"{middle}\" x2=\"{to}\" y2=\"{middle}\"/>");
            }
        }
        let _ = writeln!(
            body,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{BOX}\" height=\"{BOX}\" rx=\"3\" fill=\"{}\"><title>{}</title></rect>",
            fill(gpu.state),
            escaped(&tooltip(node, index, gpu))
        );
        text(body, (x + BOX / 2, y + 15), "gpu", &index.to_string());
    }
    x + BOX
}

/// Colors that people with color blindness can distinguish.
fn fill(state: GpuState) -> &'static str {
    match state {
        GpuState::Free => "#ffffff",
        GpuState::Held => "#9ecae1",
        GpuState::PartlyHeld => "#deebf7",
        GpuState::Reserved => "#fdd0a2",
        GpuState::Leaving => "#bdbdbd",
        GpuState::Cordoned => "#756bb1",
        GpuState::Unhealthy => "#e6550d",
    }
}

fn tooltip(node: &NodeMap, index: usize, gpu: &GpuMap) -> String {
    let mut text = format!("{} GPU {index}: {}", node.name, gpu.state.words());
    let holders = holders(gpu);
    if !holders.is_empty() {
        text.push_str(&format!(", {}", holders.join(", ")));
    }
    for reason in gpu.unhealthy.iter().chain(&gpu.cordoned) {
        text.push_str(&format!("; {reason}"));
    }
    text
}

fn text(body: &mut String, (x, y): (usize, usize), class: &str, text: &str) {
    let _ = writeln!(body, "<text x=\"{x}\" y=\"{y}\" class=\"{class}\">{}</text>", escaped(text));
}
