//! `gantry topo`: a machine's links, NUMA nodes and NICs, as text, JSON or a picture. Reads a file or NVML, and
//! writes a machine file on request.

mod json;
#[cfg(target_os = "linux")]
mod node;
mod report;
pub(crate) mod source;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::Args;
use gantry_topology::read::to_yaml;
use gantry_topology::{Machine, draw};

use source::{SourceArgs, SourceData};

use crate::runtime::{BadInput, print};
use crate::screen::Screen;
use crate::visible::Visible;

/// Options of `gantry topo`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
JSON (--json), stable fields: gpus[], nics[], matrix (GPU x GPU, link names as nvidia-smi writes them, X on the diagonal),
bandwidth_gbs (GPU x GPU, GB/s in one direction, 0 on the diagonal), nic_matrix (GPU x NIC),
health[] (faults of GPUs; null if the source does not report them),
warnings[] (contradictions in the machine; guessed bandwidths).
gpus[].mig has enabled and instances[] (profile, start, size, devices[]); null if the GPU does not support MIG.

Examples:
  gantry topo                                  this node, through NVML
  kubectl get gpunode NODE -o yaml | gantry topo --from -
                                               a node of the cluster, with its faults
  nvidia-smi topo -m | gantry topo --from -    the output of nvidia-smi
  gantry topo --svg > node.svg                 a picture for a browser
  gantry topo --dot | dot -Tpng > node.png     a graph for Graphviz
  gantry topo --from topo.txt --model A100 --machine-file node.yaml")]
pub(crate) struct TopoArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// Print the matrix of all links too, as nvidia-smi topo -m prints it: wide
    #[arg(long)]
    matrix: bool,

    /// Print JSON instead of text
    #[arg(long, group = "form")]
    json: bool,

    /// Print an SVG picture instead of text: GPUs and NICs in their NUMA nodes, links with class and GB/s
    #[arg(long, group = "form")]
    svg: bool,

    /// Print a Graphviz graph instead of text: devices, and links with class and GB/s
    #[arg(long, group = "form")]
    dot: bool,

    /// Write the machine to this file too, as YAML, or as JSON if its name ends in .json; - prints it instead of
    /// anything else
    #[arg(long, value_name = "OUT")]
    machine_file: Option<PathBuf>,
}

/// Width of the picture where `COLUMNS` names none.
const COLUMNS: usize = 80;

/// Runs `gantry topo`.
///
/// # Errors
/// When the machine cannot be read, or an output cannot be written.
pub(crate) fn run(args: &TopoArgs) -> anyhow::Result<()> {
    let seen = args.source.seen()?;
    let output = output(args, &seen, Screen::of_stdout(COLUMNS))?;
    print(&output)
}

/// Everything that goes to standard output; writes the machine file.
fn output(args: &TopoArgs, seen: &SourceData, screen: Screen) -> anyhow::Result<Visible> {
    let machine = &seen.machine;
    match &args.machine_file {
        // A machine file without GPUs cannot be read.
        Some(_) if machine.gpus().is_empty() => {
            return Err(
                BadInput(anyhow!("no GPU is known of this node, so there is no machine to write")).into()
            );
        }
        Some(path) if path == Path::new("-") => return Ok(Visible::new(&to_yaml(machine)?)),
        Some(path) => write_machine_file(machine, path)?,
        None => {}
    }
    if args.json {
        return Ok(Visible::new(&json::document(seen)?));
    }
    if args.svg {
        return Ok(Visible::new(&draw::svg(machine)));
    }
    if args.dot {
        return Ok(Visible::new(&draw::dot(machine)));
    }
    let report = report::report(seen, screen, args.matrix);
    Ok(if screen.color { Visible::colored(&report) } else { Visible::new(&report) })
}

fn write_machine_file(machine: &Machine, path: &Path) -> anyhow::Result<()> {
    let json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
    let text = if json {
        let mut text = serde_json::to_string_pretty(machine)?;
        text.push('\n');
        text
    } else {
        to_yaml(machine)?
    };
    std::fs::write(path, text).with_context(|| format!("cannot write machine file {}", path.display()))
}

#[cfg(test)]
mod tests;
