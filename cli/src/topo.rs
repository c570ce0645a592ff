//! `gantry topo`: a machine's matrix, links, NUMA nodes and NICs, for people and for scripts. Reads a file or NVML, decides
//! nothing and changes nothing but the machine file it is asked to write.

mod json;
mod report;
mod seen;
pub(crate) mod source;
pub(crate) mod visible;

use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::Args;
use gantry_topology::Machine;
use gantry_topology::read::to_yaml;

use seen::Seen;
use source::SourceArgs;
use visible::visible;

use crate::runtime::BadInput;

/// Options of `gantry topo`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
JSON (--json), stable fields: gpus[], nics[], matrix (GPU x GPU, link names as nvidia-smi writes them, X on the diagonal),
bandwidth_gbs (GPU x GPU, GB/s in one direction, 0 on the diagonal), nic_matrix (GPU x NIC),
health[] (what is wrong with GPUs; null where that is not told),
warnings[] (what the machine says that cannot be; that bandwidths are a guess).
gpus[].mig has enabled and instances[] (profile, start, size, devices[]); null where the GPU cannot be cut.

Examples:
  gantry topo                                  this node, through NVML
  kubectl get gpunode NODE -o yaml | gantry topo --from -
                                               a node of the cluster, and what is wrong with it
  nvidia-smi topo -m | gantry topo --from -    what the tool printed
  gantry topo --from topo.txt --model A100 --machine-file node.yaml")]
pub(crate) struct TopoArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// Print JSON instead of text
    #[arg(long)]
    json: bool,

    /// Write the machine to this file too, as YAML, or as JSON if its name ends in .json; - prints it instead of anything else
    #[arg(long, value_name = "OUT")]
    machine_file: Option<PathBuf>,
}

/// Runs `gantry topo`.
///
/// # Errors
/// When the machine cannot be read, or an output cannot be written.
pub(crate) fn run(args: &TopoArgs) -> anyhow::Result<()> {
    let seen = args.source.seen()?;
    let output = output(args, &seen, Screen::of_stdout())?;
    match io::stdout().lock().write_all(output.as_bytes()) {
        // `gantry topo | head` is no failure.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}

/// What the output is shown on.
#[derive(Debug, Clone, Copy)]
struct Screen {
    columns: usize,
    color: bool,
}

impl Screen {
    /// Colours only on a terminal that has them, and if nobody objects (<https://no-color.org>).
    fn of_stdout() -> Self {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let columns = std::env::var("COLUMNS")
            .ok()
            .and_then(|columns| columns.parse().ok());
        Self {
            columns: columns.unwrap_or(100),
            color: io::stdout().is_terminal() && !set("NO_COLOR") && !dumb,
        }
    }
}

/// Everything that goes to standard output; writes the machine file.
fn output(args: &TopoArgs, seen: &Seen, screen: Screen) -> anyhow::Result<String> {
    let machine = &seen.machine;
    match &args.machine_file {
        // Nobody would read it back.
        Some(_) if machine.gpus().is_empty() => {
            return Err(BadInput(anyhow!(
                "no GPU is known of this node, so there is no machine to write"
            ))
            .into());
        }
        Some(path) if path == Path::new("-") => return Ok(visible(&to_yaml(machine)?, false)),
        Some(path) => write_machine_file(machine, path)?,
        None => {}
    }
    if args.json {
        return Ok(visible(&json::document(seen)?, false));
    }
    Ok(visible(&report::report(seen, screen), screen.color))
}

fn write_machine_file(machine: &Machine, path: &Path) -> anyhow::Result<()> {
    let json = path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
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
