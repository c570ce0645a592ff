//! Changing a simulated machine while it runs. Beside the machine file lie `control.yaml`, the state a person can read, and
//! `control.shm`, which counts calls and wakes those who wait. Any number of libraries and controllers may share them, in one
//! process or many: a change holds from the next call on, and reaches an event wait that is already blocked.

mod block;
mod controller;
mod state;

use std::io;
use std::path::{Path, PathBuf};

pub(crate) use block::Block;
pub use controller::{Calls, ControlError, Controller};
pub use state::{
    Driver, Ecc, Event, EventKind, GpuState, MAX_EVENTS, Process, Remapped, Retired, Rule, State,
};

/// Name of the file that holds the state.
pub const STATE_FILE: &str = "control.yaml";
/// Name of the file that counts calls and changes.
pub const BLOCK_FILE: &str = "control.shm";

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
    serde_saphyr::from_str(&text).map_err(|error| ControlError::Parse {
        path,
        problem: error.to_string(),
    })
}

fn write_state(folder: &Path, state: &State) -> Result<(), ControlError> {
    let path = folder.join(STATE_FILE);
    let text = serde_saphyr::to_string(state).map_err(|error| ControlError::Parse {
        path: path.clone(),
        problem: error.to_string(),
    })?;
    let fresh: PathBuf = folder.join(format!("{STATE_FILE}.new"));
    std::fs::write(&fresh, text)
        .and_then(|()| std::fs::rename(&fresh, &path))
        .map_err(|source| ControlError::Write { path, source })
}

#[cfg(test)]
mod tests;
