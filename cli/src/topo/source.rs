//! The source of a command's machine: a file of either form, standard input, or this node's NVML. Used by every
//! subcommand that reads a machine.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use gantry_api::GpuNode;
use gantry_plugin::discover::{self, NvmlOptions};
use gantry_smi::{Hints, ReadError};
use gantry_topology::Machine;
use gantry_topology::bandwidth::known_model;
use gantry_topology::read::{MAX_BYTES, read_object};
use serde::Deserialize;

use super::seen::Seen;
use crate::runtime::BadInput;

/// Options for the source of the machine.
#[derive(Debug, Clone, Args)]
pub(crate) struct SourceArgs {
    /// Read the machine from a machine file (YAML or JSON), a GpuNode or the output of `nvidia-smi topo -m`; - is
    /// standard input
    #[arg(long, value_name = "FILE", conflicts_with = "nvml")]
    from: Option<PathBuf>,

    /// Read this node's machine through NVML (the default)
    #[arg(long)]
    nvml: bool,

    /// GPU model of an `nvidia-smi topo -m` text, which names none; bandwidths depend on it
    #[arg(long, value_name = "NAME", requires = "from", value_parser = NonEmptyStringValueParser::new())]
    model: Option<String>,

    /// Path or name of NVIDIA's management library
    #[arg(long, value_name = "FILE", default_value = "libnvidia-ml.so.1", conflicts_with = "from")]
    nvml_library: PathBuf,

    /// Where /proc is read
    #[arg(long, value_name = "DIR", default_value = "/proc", conflicts_with = "from")]
    proc_root: PathBuf,

    /// Where /sys is read
    #[arg(long, value_name = "DIR", default_value = "/sys", conflicts_with = "from")]
    sys_root: PathBuf,
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
    pub(super) fn seen(&self) -> anyhow::Result<Seen> {
        match &self.from {
            Some(path) => self.read(path).map_err(|error| BadInput(error).into()),
            None => discover::scan(&NvmlOptions {
                library: self.nvml_library.clone(),
                proc_root: self.proc_root.clone(),
                sys_root: self.sys_root.clone(),
            })
            .map(Seen::from)
            .context("cannot read this node's machine; --from FILE reads a machine file or the output of nvidia-smi topo -m"),
        }
    }

    /// Where `/sys` is read, if the machine is this node's.
    pub(crate) fn sys_root(&self) -> Option<&Path> {
        self.from.is_none().then_some(&self.sys_root)
    }

    fn read(&self, path: &Path) -> anyhow::Result<Seen> {
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
pub(super) fn parse(input: impl Read, name: &str, hints: &Hints) -> anyhow::Result<Seen> {
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
