//! Why a simulated machine could not be changed.

use std::io;
use std::path::PathBuf;

use super::MigRefusal;
use crate::companion::CompanionError;
use crate::names::NAMES;

/// Why a simulated machine could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The folder beside the machine file cannot be used.
    #[error("cannot open {path}")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The state file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The state file cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The state file is no control state.
    #[error("{path}: {problem}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        problem: String,
    },
    /// The machine has no such GPU.
    #[error("the machine has {gpus} GPUs, counted from 0; there is no GPU {gpu}")]
    NoSuchGpu {
        /// The index.
        gpu: u8,
        /// How many there are.
        gpus: usize,
    },
    /// The GPU cannot be cut so.
    #[error("GPU {gpu} cannot be cut so")]
    Mig {
        /// The index.
        gpu: u8,
        /// Why.
        #[source]
        source: MigRefusal,
    },
    /// The entries of `/proc` and `/dev` cannot follow.
    #[error(transparent)]
    Companion(#[from] CompanionError),
    /// No NVML function has this name.
    #[error("NVML has no function {name:?}{}", nearest(.name))]
    NoSuchFunction {
        /// The name.
        name: String,
    },
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
