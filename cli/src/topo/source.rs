//! The source of a command's machine: a file of either form, standard input, or this node's NVML. Used by every
//! subcommand that reads a machine. With the machine come the faults of its GPUs, as far as the source reports them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use gantry_api::{DeviceStatus, GpuNode};
use gantry_smi::{Hints, ReadError};
use gantry_topology::bandwidth::{guessed, known_model};
use gantry_topology::mig::{Catalogue, check_machine};
use gantry_topology::read::{MAX_BYTES, read_object};
use gantry_topology::{Gpu, Machine};
use serde::{Deserialize, Serialize};

#[cfg(target_os = "linux")]
use super::node::NodeArgs;
use crate::runtime::BadInput;

/// Options for the source of the machine.
#[derive(Debug, Clone, Args)]
pub(crate) struct SourceArgs {
    /// Read the machine from a machine file (YAML or JSON), a GpuNode or the output of `nvidia-smi topo -m`; - is
    /// standard input
    #[arg(long, value_name = "FILE")]
    #[cfg_attr(not(target_os = "linux"), arg(required = true))]
    from: Option<PathBuf>,

    /// GPU model of an `nvidia-smi topo -m` text, which names none; bandwidths depend on it
    #[arg(long, value_name = "NAME", requires = "from", value_parser = NonEmptyStringValueParser::new())]
    model: Option<String>,

    #[cfg(target_os = "linux")]
    #[command(flatten)]
    node: NodeArgs,
}

impl SourceArgs {
    /// Reads the machine.
    ///
    /// # Errors
    /// The file, line and column, as [`BadInput`]; or NVML's error.
    pub(crate) fn machine(&self) -> anyhow::Result<Machine> {
        Ok(self.seen()?.machine)
    }

    /// Reads the machine, and the faults of its GPUs if the source reports them.
    ///
    /// # Errors
    /// As [`SourceArgs::machine`].
    pub(crate) fn seen(&self) -> anyhow::Result<SourceData> {
        match &self.from {
            Some(path) => self.read(path).map_err(|error| BadInput(error).into()),
            #[cfg(target_os = "linux")]
            None => self.node.seen(),
            #[cfg(not(target_os = "linux"))]
            None => Err(BadInput(anyhow!("--from is missing: NVML is read on Linux only")).into()),
        }
    }

    /// Where `/sys` is read, if the machine is this node's.
    #[cfg(target_os = "linux")]
    pub(crate) fn sys_root(&self) -> Option<&Path> {
        self.from.is_none().then(|| self.node.sys_root())
    }

    fn read(&self, path: &Path) -> anyhow::Result<SourceData> {
        if let Some(Err(nearest)) = self.model.as_deref().map(known_model) {
            let nearest = nearest.map_or(String::new(), |name| format!("; did you mean {name}?"));
            tracing::warn!(
                "--model {:?}: its rates are unknown and are guessed from its links{nearest}",
                self.model.as_deref().unwrap_or_default()
            );
        }
        let hints = Hints { model: self.model.clone() };
        if path == Path::new("-") {
            return parse(io::stdin().lock(), "standard input", &hints);
        }
        let name = path.display().to_string();
        let file = File::open(path).with_context(|| format!("cannot open {name}"))?;
        parse(file, &name, &hints)
    }
}

/// Reads a machine from a stream; `name` is its name in messages.
pub(super) fn parse(input: impl Read, name: &str, hints: &Hints) -> anyhow::Result<SourceData> {
    // Two bytes a character in a file written by Windows; one more byte shows that there are too many.
    let limit = 2 * u64::try_from(MAX_BYTES).unwrap_or(u64::MAX / 4) + 4;
    let mut bytes = Vec::new();
    input.take(limit).read_to_end(&mut bytes).with_context(|| format!("cannot read {name}"))?;
    let text = decode(bytes).with_context(|| format!("cannot read {name}"))?;
    let text = text.trim_start_matches('\u{feff}');
    if let Some(form) = form(text).with_context(|| name.to_owned())? {
        if let Some(model) = hints.model.clone() {
            return Err(ReadError::NeedlessModel { model }).with_context(|| name.to_owned());
        }
        return Ok(read_node(text, form).with_context(|| name.to_owned())?.into());
    }
    let machine = gantry_smi::read(text, hints).with_context(|| name.to_owned())?;
    Ok(machine.into())
}

/// Forms in which a cluster gives its nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Node,
    List,
}

/// The kind of an object.
#[derive(Deserialize)]
struct Head {
    kind: String,
}

/// Several nodes, as `kubectl get gpunodes -o yaml` prints them.
#[derive(Deserialize)]
struct Nodes {
    items: Vec<GpuNode>,
}

/// Whether a text is the output of `kubectl get gpunode` with `-o yaml` or `-o json`. A machine file has no `kind`.
///
/// # Errors
/// It is an object of another kind.
fn form(text: &str) -> anyhow::Result<Option<Form>> {
    let form = |kind: &str| match kind.trim_matches(['"', '\'']) {
        "GpuNode" => Ok(Some(Form::Node)),
        "List" | "GpuNodeList" => Ok(Some(Form::List)),
        other => Err(anyhow!(
            "this is an object of kind {other}; give a GpuNode, such as of `kubectl get gpunode NODE -o yaml`"
        )),
    };
    if text.trim_start().starts_with('{')
        && let Ok(head) = serde_json::from_str::<Head>(text)
    {
        return form(&head.kind);
    }
    let kind = |line: &str| line.strip_prefix("kind:").map(|kind| kind.trim().to_owned());
    if let Some(outermost) = text.lines().find_map(kind) {
        return form(&outermost);
    }
    let indented = text.lines().find_map(|line| kind(line.trim()));
    Ok(indented.and_then(|kind| form(&kind).ok().flatten()))
}

fn read_node(text: &str, form: Form) -> anyhow::Result<GpuNode> {
    if form == Form::Node {
        return read_object(text).context("no GpuNode");
    }
    let Nodes { mut items } = read_object(text).context("no list of GpuNodes")?;
    match (items.pop(), items.len()) {
        (Some(only), 0) => Ok(only),
        (None, _) => Err(anyhow!("the list holds no GpuNode; is the name right?")),
        (Some(last), others) => {
            let names = items.iter().chain([&last]);
            let names: Vec<&str> = names.filter_map(|node| node.metadata.name.as_deref()).collect();
            Err(anyhow!(
                "the list holds {} GpuNodes ({}); give one, such as of `kubectl get gpunode {} -o yaml`",
                others + 1,
                names.join(", "),
                names.first().unwrap_or(&"NODE")
            ))
        }
    }
}

/// The text of a file: UTF-8, or UTF-16 with the byte order mark of the Windows shell.
fn decode(bytes: Vec<u8>) -> anyhow::Result<String> {
    let wide = |unit: fn([u8; 2]) -> u16| {
        let units = bytes.chunks_exact(2).skip(1).map(|pair| match *pair {
            [a, b] => unit([a, b]),
            _ => 0,
        });
        char::decode_utf16(units)
            .collect::<Result<String, _>>()
            .map_err(|error| anyhow!("neither UTF-8 nor UTF-16: {error}"))
    };
    match bytes.as_slice() {
        [0xff, 0xfe, ..] => wide(u16::from_le_bytes),
        [0xfe, 0xff, ..] => wide(u16::from_be_bytes),
        _ => String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            anyhow!("no text: byte {} is no UTF-8", at + 1)
        }),
    }
}

/// The data of a source.
#[derive(Debug)]
pub(crate) struct SourceData {
    pub(crate) machine: Machine,
    /// Faults, by GPU; `None` if the source does not report health.
    pub(super) complaints: Option<BTreeSet<Complaint>>,
    /// The GPUs that are not allocated as a whole, each with the reason.
    pub(crate) withheld: BTreeMap<u8, String>,
}

/// A fault of a GPU or of a MIG device on it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct Complaint {
    /// Index of the GPU.
    pub(super) gpu: u8,
    /// Profile of the MIG device; `None` for the whole GPU.
    pub(super) profile: Option<String>,
    /// The fault, for people.
    pub(super) reason: String,
    /// Start of the fault, if known.
    pub(super) since: Option<String>,
}

/// Contradictions in a machine (MIG instances that the GPU's product does not allow), and guesses in the report.
pub(super) fn warnings(machine: &Machine) -> Vec<String> {
    let checked = check_machine(&Catalogue::built_in(), machine);
    let cannot_be = checked.err().map(|error| error.to_string());
    cannot_be.into_iter().chain(guess(machine)).collect()
}

/// A warning that bandwidths are guesses, if the model of a GPU is unknown.
fn guess(machine: &Machine) -> Option<String> {
    let guessed = guessed(machine);
    let unknown = guessed.iter().map(|index| machine.gpus().get(usize::from(*index)));
    let models: BTreeSet<&str> = unknown.flatten().filter_map(|gpu| gpu.model.as_deref()).collect();
    let models: Vec<&str> = models.into_iter().collect();
    if guessed.is_empty() || machine.gpus().len() < 2 {
        return None;
    }
    let why = match models.as_slice() {
        [] => {
            "the GPU model is unknown; set --model for a topology text, or `model` of a GPU in a machine file"
                .to_owned()
        }
        models => format!("the rates of {} are unknown", models.join(", ")),
    };
    Some(format!("bandwidths are a guess from the number of links: {why}"))
}

impl From<Machine> for SourceData {
    fn from(machine: Machine) -> Self {
        Self { machine, complaints: None, withheld: BTreeMap::new() }
    }
}

/// The health that a node's plugin reports, quarantines of earlier runs included.
impl From<GpuNode> for SourceData {
    fn from(node: GpuNode) -> Self {
        let status = node.status.unwrap_or_default();
        let machine = node.spec.machine;
        let since = |device: &DeviceStatus, reason: &str| {
            let uuid = machine.gpus().iter().find(|gpu| gpu.index == device.gpu)?.uuid.as_ref()?;
            // The reason of a link fault ends in the number of links down, which the stored reason does not contain.
            let is_stored = |stored: &str| {
                let rest = reason.strip_prefix(stored);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("; "))
            };
            let of_gpu =
                |fault: &&gantry_api::GpuFault| fault.gpu == uuid.as_str() && is_stored(&fault.reason);
            Some(status.faults.iter().find(of_gpu)?.since.0.to_string())
        };
        let complaint = |device: &DeviceStatus| {
            let reason = device.health.reason.clone();
            let reason = reason.unwrap_or_else(|| "unhealthy, for an unknown reason".to_owned());
            Complaint {
                gpu: device.gpu,
                profile: device.slice.as_ref().map(|slice| slice.profile.clone()),
                since: since(device, &reason),
                reason,
            }
        };
        let unhealthy = status.devices.iter().filter(|device| !device.health.healthy);
        let mut complaints: BTreeSet<Complaint> = unhealthy.map(complaint).collect();
        let whole = complaints.iter().filter(|complaint| complaint.profile.is_none());
        let mut withheld: BTreeMap<u8, String> =
            whole.map(|complaint| (complaint.gpu, complaint.reason.clone())).collect();
        let has_device = |gpu: u8| status.devices.iter().any(|device| device.gpu == gpu);
        // A node without any device may have a plugin that has just started.
        let unserved =
            machine.gpus().iter().filter(|gpu| !status.devices.is_empty() && !has_device(gpu.index));
        withheld.extend(unserved.map(|gpu| (gpu.index, "the node's plugin does not serve it".to_owned())));
        // A link fault has the number of links already.
        let links = machine.links_down().into_iter();
        let links: Vec<_> =
            links.filter(|(gpu, _)| complaints.iter().all(|known| known.gpu != *gpu)).collect();
        let link = |(gpu, reason)| Complaint { gpu, profile: None, reason, since: None };
        complaints.extend(links.into_iter().map(link));
        // What the machine does not show, such as links of all GPUs that are down. It does show why clocks are held down.
        let degraded = status.problems.iter().filter(|problem| !problem.cause.starts_with("throttled"));
        for problem in degraded {
            let of_problem = |gpu: &&Gpu| gpu.uuid.as_ref().is_some_and(|uuid| uuid.as_str() == problem.gpu);
            let gpu = machine.gpus().iter().find(of_problem).map(|gpu| gpu.index);
            let Some(gpu) = gpu.filter(|gpu| complaints.iter().all(|known| known.gpu != *gpu)) else {
                continue;
            };
            let (reason, since) = (problem.cause.clone(), Some(problem.since.0.to_string()));
            complaints.insert(Complaint { gpu, profile: None, reason, since });
        }
        Self { machine, complaints: Some(complaints), withheld }
    }
}
