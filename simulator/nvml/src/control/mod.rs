//! Changing a simulated machine while it runs. The machine file's folder has `control.yaml`, the readable state (in
//! YAML's JSON form), and `control.shm`, which counts calls and wakes waiting processes. Any number of libraries and
//! controllers may share them, in one process or many. A change takes effect from the next call on, and reaches an
//! event wait that is already blocked.

mod block;
mod controller;
mod mig;
mod state;

use std::io;
use std::path::{Path, PathBuf};

use gantry_topology::Mig;

use crate::companion::{self, CompanionError};
use crate::facts::Facts;
use crate::install::ROOT_FOLDER;
use crate::names::NAMES;

pub(crate) use block::Block;
pub use controller::{Calls, Controller};
pub use mig::{AppliedLayout, MigChange, MigRefusal, Piece, PieceError, apply};
pub(crate) use mig::{compute_room, placements_of, slices_of};
pub use state::{
    Activity, ComputeMode, Driver, Ecc, Event, EventKind, FabricState, FabricStep, GpuState, MAX_EVENTS,
    PageRetirement, Process, Recovery, ReportedFacts, RowRemapping, Rule, State,
};

/// Name of the file that holds the state.
pub const STATE_FILE: &str = "control.yaml";
/// Name of the file that counts calls and changes.
pub const BLOCK_FILE: &str = "control.shm";

/// Why a simulated machine could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The folder beside the machine file cannot be used.
    #[error("cannot open {path}")]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The state file cannot be read.
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The state file cannot be written.
    #[error("cannot write {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The state file is no control state.
    #[error("{path}: {problem}")]
    Parse { path: PathBuf, problem: String },
    /// The machine has no such GPU.
    #[error("the machine has {gpus} GPUs, counted from 0; there is no GPU {gpu}")]
    NoSuchGpu { gpu: u8, gpus: usize },
    /// The GPU cannot be cut so.
    #[error("GPU {gpu} cannot be cut so")]
    Mig {
        gpu: u8,
        #[source]
        source: MigRefusal,
    },
    /// The entries of `/proc` and `/dev` cannot follow.
    #[error(transparent)]
    Companion(#[from] CompanionError),
    /// No NVML function has this name.
    #[error("NVML has no function {name:?}{}", nearest(.name))]
    NoSuchFunction { name: String },
}

/// A hint for a mistyped name: the versions NVML has of what stands there.
fn nearest(name: &str) -> String {
    let stem = name.split("_v").next().unwrap_or(name);
    let alike: Vec<&str> = NAMES
        .iter()
        .copied()
        .filter(|known| known.eq_ignore_ascii_case(name) || (stem.len() > 8 && known.starts_with(stem)))
        .take(3)
        .collect();
    if alike.is_empty() { String::new() } else { format!("; near it are {}", alike.join(", ")) }
}

/// Reads the state in `folder`; a missing file is the default state.
///
/// # Errors
/// When the file cannot be read or is no control state.
pub(crate) fn read_state(folder: &Path) -> Result<State, ControlError> {
    let path = folder.join(STATE_FILE);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(State::default()),
        Err(source) => return Err(ControlError::Read { path, source }),
    };
    parse(&text).map_err(|problem| ControlError::Parse { path, problem })
}

/// Reads a state as it is written here, which every client does at every change, or else as it was written by hand.
fn parse(text: &str) -> Result<State, String> {
    serde_json::from_str(text).or_else(|_| serde_saphyr::from_str(text)).map_err(|error| error.to_string())
}

/// Changes the state of `machine` as a whole; other processes wait meanwhile. The entries of `/proc` and `/dev` follow
/// a changed MIG layout. After the return, the next NVML call sees the change.
///
/// # Errors
/// When the state cannot be read or written, or `change` refuses; then nothing has changed.
pub(crate) fn update<T>(
    machine: &Path,
    block: &Block,
    change: impl FnOnce(&mut State) -> Result<T, ControlError>,
) -> Result<T, ControlError> {
    let folder = machine.parent().unwrap_or(Path::new("."));
    let lock = block.lock().map_err(|source| ControlError::Open { path: folder.join(BLOCK_FILE), source })?;
    let before = read_state(folder)?;
    let mut state = before.clone();
    let answer = change(&mut state)?;
    write_state(folder, &state)?;
    let followed = if before.layouts() == state.layouts() { Ok(()) } else { follow(machine, &state) };
    drop(lock);
    block.announce_change();
    followed.map(|()| answer)
}

/// Brings the entries beside the library in line with the MIG layouts, where such entries were laid down.
fn follow(machine: &Path, state: &State) -> Result<(), ControlError> {
    let root = machine.parent().unwrap_or(Path::new(".")).join(ROOT_FOLDER);
    if !companion::is_laid_down(&root) {
        return Ok(());
    }
    let facts = Facts::read(machine)
        .map_err(|error| ControlError::Parse { path: machine.to_owned(), problem: error.to_string() })?;
    let layouts: Vec<Option<&Mig>> = facts.gpus.iter().map(|gpu| state.layout(gpu)).collect();
    Ok(companion::apply_layouts(&facts, &layouts, &root)?)
}

fn write_state(folder: &Path, state: &State) -> Result<(), ControlError> {
    let path = folder.join(STATE_FILE);
    // JSON is YAML too, and read many times faster.
    let text = serde_json::to_string_pretty(state)
        .map_err(|error| ControlError::Parse { path: path.clone(), problem: error.to_string() })?;
    let fresh: PathBuf = folder.join(format!("{STATE_FILE}.new"));
    std::fs::write(&fresh, text)
        .and_then(|()| std::fs::rename(&fresh, &path))
        .map_err(|source| ControlError::Write { path, source })
}

#[cfg(test)]
mod tests;
