//! `gantry choose`: which GPUs of a machine a job of some size would get, and why. The same tables decide as in the
//! daemons; it reads a machine and changes nothing.

use std::collections::BTreeMap;

use anyhow::anyhow;
use clap::Args;
use gantry_topology::{Choice, GpuSet, Machine, Purpose, Table};
use serde::Serialize;

use crate::runtime::{BadInput, print};
use crate::topo::source::SourceArgs;
use crate::visible::Visible;

/// Options of `gantry choose`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
JSON (--json), stable fields: gpus (indices), bandwidth_gbs (B: what a collective over them reaches, ring model; 0 for one GPU),
cut_gbs (what no algorithm can exceed), quality (B against the best as many GPUs reach on the empty machine), remainder (R: what
the rest is still good for, 0 to 1), nics (on the same PCIe switches), numa, reason, left_out (unhealthy GPUs: gpu and reason;
empty for a machine file, which has no health).

Examples:
  gantry choose --from machine.yaml --size 4
  gantry choose --from topo.txt --size 3 --free 0,2,3,6,7 --must 2
  gantry choose --size 2 --gang --json         of this node, through NVML

Exit codes: 0 chosen, 1 fewer GPUs are free than asked, 2 bad input.")]
pub(crate) struct ChooseArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// How many GPUs the job needs
    #[arg(long, value_name = "K", value_parser = size)]
    size: usize,

    /// GPUs that are free, such as 0,2,3 or 0-3; unhealthy ones are left out [default: all but those with MIG on]
    #[arg(long, value_name = "LIST")]
    free: Option<GpuSet>,

    /// GPUs that must be among those chosen
    #[arg(long, value_name = "LIST", default_value = "")]
    must: GpuSet,

    /// The job is a member of a gang over several nodes: prefer a NIC for every GPU
    #[arg(long)]
    gang: bool,

    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

fn size(text: &str) -> Result<usize, String> {
    let most = gantry_topology::machine::MAX_GPUS;
    text.parse().map_err(|_| format!("write a whole number, 1 to {most}"))
}

/// Runs `gantry choose`.
///
/// # Errors
/// When the machine cannot be read, what is asked contradicts it, or fewer GPUs are free than asked.
pub(crate) fn run(args: &ChooseArgs) -> anyhow::Result<()> {
    let seen = args.source.seen()?;
    let output = output(args, &seen.machine, &seen.withheld)?;
    print(&output)
}

/// Everything that goes to standard output. `withheld`: the GPUs that are not allocated, each with the reason.
fn output(args: &ChooseArgs, machine: &Machine, withheld: &BTreeMap<u8, String>) -> anyhow::Result<Visible> {
    let asked = checked(args, machine, withheld).map_err(BadInput)?;
    let left_out: Vec<SkippedGpu> = withheld
        .iter()
        .filter(|(gpu, _)| asked.contains(usize::from(**gpu)))
        .map(|(gpu, reason)| SkippedGpu { gpu: usize::from(*gpu), reason: reason.clone() })
        .collect();
    let free = asked - left_out.iter().map(|left_out| left_out.gpu).collect();
    let purpose = if args.gang { Purpose::GangMember } else { Purpose::Local };
    let table = Table::build(machine);
    let choice = table.best_with(free, args.must, args.size, purpose).ok_or_else(|| {
        let (size, there) = (args.size, free.len());
        let which = if free.is_empty() { String::new() } else { format!(": {free}") };
        let with_mig = with_mig(machine);
        let with_mig =
            if with_mig.is_empty() { String::new() } else { format!("; MIG is enabled on {with_mig}") };
        let unhealthy: String = left_out
            .iter()
            .map(|SkippedGpu { gpu, reason }| format!("; GPU {gpu} is left out: {reason}"))
            .collect();
        anyhow!("{size} GPUs are asked, but only {there} are free{which}{with_mig}{unhealthy}")
    })?;
    let answer = Answer { left_out, ..Answer::new(machine, &table, &choice) };
    let answer = if args.json { serde_json::to_string_pretty(&answer)? + "\n" } else { answer.text() };
    Ok(Visible::new(&answer))
}

/// The GPUs with MIG enabled, which are used through their instances only.
fn with_mig(machine: &Machine) -> GpuSet {
    let gpus = machine.gpus().iter();
    gpus.filter(|gpu| gpu.mig.as_ref().is_some_and(|mig| mig.enabled))
        .map(|gpu| usize::from(gpu.index))
        .collect()
}

/// The free GPUs, healthy or not, or what of the request contradicts the machine or itself.
fn checked(args: &ChooseArgs, machine: &Machine, withheld: &BTreeMap<u8, String>) -> anyhow::Result<GpuSet> {
    let all = GpuSet::all(machine);
    if all.is_empty() {
        return Err(anyhow!("the machine has no GPU"));
    }
    let whole = all - with_mig(machine);
    let free = args.free.unwrap_or(whole);
    let there = match machine.gpus().len() {
        1 => "allowed is 0".to_owned(),
        gpus => format!("allowed are 0 to {}", gpus - 1),
    };
    for (option, set) in [("--free", free), ("--must", args.must)] {
        if let Some(unknown) = (set - all).lowest() {
            return Err(anyhow!("{option}: the machine has no GPU {unknown}; {there}"));
        }
        if let Some(gpu) = (set - whole).lowest() {
            let allowed = if whole.is_empty() {
                "no GPU of the machine is whole".to_owned()
            } else {
                format!("allowed are {whole}")
            };
            return Err(anyhow!(
                "{option}: MIG is enabled on GPU {gpu}, which is allocated in instances only; {allowed}"
            ));
        }
    }
    if let Some(held) = (args.must - free).lowest() {
        return Err(anyhow!("--must: GPU {held} is not free; free are {free}"));
    }
    let mut unhealthy = withheld.iter().filter(|(gpu, _)| args.must.contains(usize::from(**gpu)));
    if let Some((gpu, reason)) = unhealthy.next() {
        return Err(anyhow!("--must: GPU {gpu} is not free: {reason}"));
    }
    if args.size == 0 {
        return Err(anyhow!("--size: 0 GPUs are nothing to choose; allowed are 1 to {}", free.len().max(1)));
    }
    if args.must.len() > args.size {
        let must = args.must;
        return Err(anyhow!("--must: {must} are more than --size {}; name at most as many", args.size));
    }
    Ok(free)
}

/// The output; its fields are those of the JSON.
#[derive(Debug, Serialize)]
struct Answer {
    gpus: Vec<usize>,
    bandwidth_gbs: f64,
    cut_gbs: f64,
    quality: f64,
    remainder: f64,
    nics: Vec<String>,
    numa: Vec<String>,
    reason: String,
    left_out: Vec<SkippedGpu>,
}

/// A GPU that is not free because it is unhealthy.
#[derive(Debug, Serialize)]
struct SkippedGpu {
    gpu: usize,
    reason: String,
}

impl Answer {
    fn new(machine: &Machine, table: &Table, choice: &Choice) -> Self {
        let millionths = |value: f64| (value * 1e6).round() / 1e6;
        let nics = table.near_nics(choice.gpus);
        let mut numa: Vec<String> = Vec::new();
        for gpu in choice.gpus.iter().filter_map(|gpu| machine.gpus().get(gpu)) {
            let node = gpu.numa.as_ref().map(ToString::to_string);
            numa.extend(node.filter(|node| !numa.contains(node)));
        }
        Self {
            gpus: choice.gpus.iter().collect(),
            bandwidth_gbs: choice.bandwidth_gbs,
            cut_gbs: choice.cut_gbs,
            quality: millionths(choice.quality(table)),
            remainder: millionths(choice.remainder),
            nics: nics
                .into_iter()
                .filter_map(|nic| machine.nics().get(nic))
                .map(|nic| nic.device.as_ref().unwrap_or(&nic.name).clone())
                .collect(),
            numa,
            reason: choice.reason(table),
            left_out: Vec::new(),
        }
    }

    fn text(&self) -> String {
        let none = |list: &[String]| {
            if list.is_empty() { "-".to_owned() } else { list.join(", ") }
        };
        let gpus: Vec<String> = self.gpus.iter().map(ToString::to_string).collect();
        let bandwidth = if self.gpus.len() > 1 {
            format!(
                "{} GB/s, {:.0} % of the best of this size; at most {} GB/s by any algorithm",
                self.bandwidth_gbs,
                self.quality * 100.0,
                self.cut_gbs
            )
        } else {
            "- (one GPU exchanges nothing)".to_owned()
        };
        let lines = [
            ("GPUs", gpus.join(", ")),
            ("bandwidth", bandwidth),
            ("remainder", format!("{:.1} % of what the empty machine offers", self.remainder * 100.0)),
            ("near NICs", none(&self.nics)),
            ("NUMA nodes", none(&self.numa)),
            ("why", self.reason.clone()),
        ];
        let left_out = self.left_out.iter();
        let left_out =
            left_out.map(|SkippedGpu { gpu, reason }| ("left out", format!("GPU {gpu}: {reason}")));
        lines.into_iter().chain(left_out).map(|(name, value)| format!("{name:<11} {value}\n")).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        choose: ChooseArgs,
    }

    fn machine() -> Machine {
        let text = include_str!("../../topology/fixtures/topologies/a40-8gpu-4bridgepairs-2nic.txt");
        gantry_smi::read_machine(text).unwrap()
    }

    #[test]
    fn control_characters_in_names_are_escaped() {
        let file =
            r#"{"gpus": [{"index": 0}], "nics": [{"name": "ib0\u001b[2J"}], "paths": ["X PIX", "PIX X"]}"#;
        let machine = gantry_topology::read(file).unwrap();
        let text = choose_of(&machine, "--size 1").unwrap();
        insta::assert_snapshot!(text, @r"
        GPUs        0
        bandwidth   - (one GPU exchanges nothing)
        remainder   0.0 % of what the empty machine offers
        near NICs   ib0\u001b[2J
        NUMA nodes  -
        why         GPU 0: the only one free; leaves none free
        ");
        let json: serde_json::Value =
            serde_json::from_str(&choose_of(&machine, "--size 1 --json").unwrap()).unwrap();
        assert_eq!(json["nics"][0], "ib0\u{1b}[2J");
    }

    /// The output of `gantry choose`, or its error and whether that is bad input.
    fn choose(options: &str) -> Result<String, (String, bool)> {
        choose_of(&machine(), options)
    }

    fn choose_of(machine: &Machine, options: &str) -> Result<String, (String, bool)> {
        let words = std::iter::once("choose").chain(options.split_whitespace());
        let args = Cli::try_parse_from(words).map_err(|error| (error.to_string(), true))?.choose;
        output(&args, machine, &BTreeMap::new())
            .map(|output| output.to_string())
            .map_err(|error| (gantry_runtime::chain(error.as_ref()), error.is::<BadInput>()))
    }

    #[test]
    fn gpus_with_mig_enabled_are_not_chosen() {
        let text = include_str!("../../simulator/machines/dgx-a100-mig.yaml");
        let machine = gantry_topology::read(text).unwrap();
        let chosen = choose_of(&machine, "--size 4 --json").unwrap();
        let chosen: serde_json::Value = serde_json::from_str(&chosen).unwrap();
        assert_eq!(chosen["gpus"], serde_json::json!([0, 1, 2, 3]));
        for (options, message, bad) in [
            ("--size 5", "5 GPUs are asked, but only 4 are free: 0,1,2,3; MIG is enabled on 4,5,6,7", false),
            (
                "--size 2 --free 3-5",
                "--free: MIG is enabled on GPU 4, which is allocated in instances only; allowed are 0,1,2,3",
                true,
            ),
            (
                "--size 2 --must 6",
                "--must: MIG is enabled on GPU 6, which is allocated in instances only; allowed are 0,1,2,3",
                true,
            ),
        ] {
            assert_eq!(choose_of(&machine, options).unwrap_err(), (message.to_owned(), bad), "{options}");
        }
    }

    #[test]
    fn text_names_gpus_and_reason() {
        insta::assert_snapshot!(choose("--size 3 --free 0,1,2,3,4").unwrap(), @r"
        GPUs        0, 1, 2
        bandwidth   24 GB/s, 100 % of the best of this size; at most 24 GB/s by any algorithm
        remainder   16.7 % of what the empty machine offers
        near NICs   -
        NUMA nodes  0
        why         GPUs 0,1,2: over PCIe within one socket, 24 GB/s, the most that 3 GPUs of this machine reach; leaves GPUs 3,4 free; splits NVLink pair 2,3
        ");
        insta::assert_snapshot!(choose("--size 1 --free 0,1,3,6,7").unwrap(), @r"
        GPUs        3
        bandwidth   - (one GPU exchanges nothing)
        remainder   41.7 % of what the empty machine offers
        near NICs   -
        NUMA nodes  0
        why         GPU 3: splits no group that is whole; leaves GPUs 0,1,6,7 free
        ");
    }

    #[test]
    fn json_has_stable_fields() {
        insta::assert_snapshot!(choose("--size 2 --must 5 --gang --json").unwrap(), @r#"
        {
          "gpus": [
            4,
            5
          ],
          "bandwidth_gbs": 48.0,
          "cut_gbs": 48.0,
          "quality": 1.0,
          "remainder": 0.75,
          "nics": [],
          "numa": [
            "1"
          ],
          "reason": "GPUs 4,5: over NVLink, 48 GB/s, the most that 2 GPUs of this machine reach; leaves GPUs 0,1,2,3,6,7 free; splits socket 4,5,6,7",
          "left_out": []
        }
        "#);
    }

    #[test]
    fn too_few_free_gpus_is_an_error() {
        assert_eq!(
            choose("--size 3 --free 0,4").unwrap_err(),
            ("3 GPUs are asked, but only 2 are free: 0,4".to_owned(), false)
        );
    }

    #[test]
    fn contradictory_options_are_bad_input() {
        for (options, message) in [
            ("--size 2 --free 0,9", "--free: the machine has no GPU 9; allowed are 0 to 7"),
            ("--size 2 --must 8", "--must: the machine has no GPU 8; allowed are 0 to 7"),
            ("--size 2 --free 0,1 --must 2", "--must: GPU 2 is not free; free are 0,1"),
            ("--size 0", "--size: 0 GPUs are nothing to choose; allowed are 1 to 8"),
            ("--size 1 --must 0,1", "--must: 0,1 are more than --size 1; name at most as many"),
        ] {
            assert_eq!(choose(options).unwrap_err(), (message.to_owned(), true), "{options}");
        }
        let (message, bad) = choose("--size 2 --free 0,x").unwrap_err();
        assert!(bad);
        insta::assert_snapshot!(message, @r#"
        error: invalid value '0,x' for '--free <LIST>': "x" is no GPU index; write indices and ranges with commas, such as 0,2,3 or 0-3

        For more information, try '--help'.
        "#);
    }

    /// The GpuNode of a node with a lost GPU: the plugin offers it as unhealthy, and no pod gets it.
    #[test]
    fn unhealthy_gpus_are_left_out_with_their_reason() {
        let withheld = BTreeMap::from([(0, "GPU lost".to_owned()), (5, "Xid 79".to_owned())]);
        let choose = |options: &str| {
            let words = std::iter::once("choose").chain(options.split_whitespace());
            let args = Cli::try_parse_from(words).unwrap().choose;
            output(&args, &machine(), &withheld)
                .map(|output| output.to_string())
                .map_err(|error| error.to_string())
        };
        let text = choose("--size 6").unwrap();
        insta::assert_snapshot!(text, @r"
        GPUs        1, 2, 3, 4, 6, 7
        bandwidth   16 GB/s, 100 % of the best of this size; at most 24 GB/s by any algorithm
        remainder   0.0 % of what the empty machine offers
        near NICs   -
        NUMA nodes  0, 1
        why         GPUs 1,2,3,4,6,7: over PCIe across sockets, 16 GB/s, the most that 6 GPUs of this machine reach; leaves none free
        left out    GPU 0: GPU lost
        left out    GPU 5: Xid 79
        ");
        let text = choose("--size 2 --free 0-3 --json").unwrap();
        let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(answer["left_out"], serde_json::json!([{"gpu": 0, "reason": "GPU lost"}]));
        assert_eq!(
            choose("--size 4 --free 0-3").unwrap_err(),
            "4 GPUs are asked, but only 3 are free: 1,2,3; GPU 0 is left out: GPU lost"
        );
        assert_eq!(choose("--size 2 --must 5").unwrap_err(), "--must: GPU 5 is not free: Xid 79");
    }
}
