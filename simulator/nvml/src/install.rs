//! Puts a simulated machine into a folder: the library, its machine file, and the roots of the entries beside it.

use std::io;
use std::path::{Path, PathBuf};

use gantry_topology::{Machine, Mig};

use crate::companion::{self, CompanionError, Layout};
use crate::control::{ControlError, Controller};
use crate::facts::Facts;

/// Name of the machine file that a library looks for beside itself.
pub const MACHINE_FILE: &str = "machine.yaml";
/// Name the library is installed under, the one NVML clients ask for.
pub const LIBRARY_NAME: &str = "libnvidia-ml.so.1";
/// Folder of the entries of `/proc`, `/sys` and `/dev`.
pub(crate) const ROOT_FOLDER: &str = "root";
/// Name the library is built under.
const BUILT_NAME: &str = "libgantry_nvml_sim.so";
/// Environment variable that names the built library, where it does not lie near the executable.
const LIBRARY_VARIABLE: &str = "GANTRY_NVML_SIM";

/// Why a simulated machine could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The built library is nowhere near the executable.
    #[error(
        "cannot find {BUILT_NAME}; looked for {}; build it with `cargo build -p gantry-nvml-sim` \
         or name it in {LIBRARY_VARIABLE}",
        .looked_for.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    LibraryNotFound { looked_for: Vec<PathBuf> },
    /// A file cannot be read or written.
    #[error("cannot {action} {path}")]
    File {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The machine file is wrong.
    #[error("{path}: {problem}")]
    Machine { path: PathBuf, problem: String },
    /// The entries beside the library cannot be laid down.
    #[error(transparent)]
    Companion(#[from] CompanionError),
    /// The controls cannot be taken.
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// A simulated machine with all that goes with it, ready for clients.
pub struct InstalledMachine {
    /// The library to load.
    pub library: PathBuf,
    /// The machine file it reads.
    pub machine_file: PathBuf,
    /// What the library reports of the machine.
    pub facts: Facts,
    /// The entries of `/proc`, `/sys` and `/dev`.
    pub layout: Layout,
    /// Changes the machine.
    pub controller: Controller,
}

/// A simulated machine without the entries beside NVML.
pub struct PlacedMachine {
    /// The library to load.
    pub library: PathBuf,
    /// The machine file it reads.
    pub machine_file: PathBuf,
    /// What the library reports of the machine.
    pub facts: Facts,
    /// Changes the machine.
    pub controller: Controller,
}

/// Installs the machine of `machine_file` into `folder`: `libnvidia-ml.so.1`, `machine.yaml`, and under `root/` the folders
/// `proc`, `sys` and `dev`. Doing it again replaces what was there.
///
/// # Errors
/// When the library cannot be found, the machine file is wrong, or the folder cannot be written.
pub fn install(machine_file: &Path, folder: &Path) -> Result<InstalledMachine, InstallError> {
    let text = std::fs::read_to_string(machine_file).map_err(|source| InstallError::File {
        action: "read",
        path: machine_file.to_owned(),
        source,
    })?;
    install_text(&text, machine_file, folder)
}

/// As [`install`], from the text of a machine file; `origin` names it in errors.
pub fn install_text(text: &str, origin: &Path, folder: &Path) -> Result<InstalledMachine, InstallError> {
    let placed = place(text, origin, folder)?;
    let root = folder.join(ROOT_FOLDER);
    let layout = companion::lay_down(&placed.facts, &root)?;
    // What was changed in this folder before still holds.
    let state = placed.controller.state()?;
    let layouts: Vec<Option<&Mig>> = placed.facts.gpus.iter().map(|gpu| state.layout(gpu)).collect();
    companion::apply_layouts(&placed.facts, &layouts, &root)?;
    Ok(InstalledMachine {
        library: placed.library,
        machine_file: placed.machine_file,
        facts: placed.facts,
        layout,
        controller: placed.controller,
    })
}

/// As [`install_text`], but the library and the machine file alone: all that a client of NVML needs.
pub fn place(text: &str, origin: &Path, folder: &Path) -> Result<PlacedMachine, InstallError> {
    let wrong = |problem: String| InstallError::Machine { path: origin.to_owned(), problem };
    let machine: Machine = serde_saphyr::from_str(text).map_err(|error| wrong(error.to_string()))?;
    let facts = Facts::of(&machine).map_err(|error| wrong(error.to_string()))?;

    let file_error = |action, path: &Path| {
        let path = path.to_owned();
        move |source| InstallError::File { action, path, source }
    };
    std::fs::create_dir_all(folder).map_err(file_error("create", folder))?;
    let built = library_path()?;
    let library = folder.join(LIBRARY_NAME);
    // Renamed into place: a copy over a library that is in use would pull it from under its users. Never a link either:
    // the loader takes two names of one file for one library.
    let fresh = folder.join(format!("{LIBRARY_NAME}.new"));
    std::fs::copy(&built, &fresh).map_err(file_error("write", &fresh))?;
    std::fs::rename(&fresh, &library).map_err(file_error("write", &library))?;
    let machine_file = folder.join(MACHINE_FILE);
    std::fs::write(&machine_file, text).map_err(file_error("write", &machine_file))?;
    Ok(PlacedMachine { library, machine_file, facts, controller: Controller::attach(folder)? })
}

/// The built library: where `GANTRY_NVML_SIM` points, else near the current executable.
///
/// # Errors
/// When it is in none of the places.
pub fn library_path() -> Result<PathBuf, InstallError> {
    if let Some(path) = std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
        return Ok(PathBuf::from(path));
    }
    let executable = std::env::current_exe().map_err(|source| InstallError::File {
        action: "find",
        path: PathBuf::from("the current executable"),
        source,
    })?;
    let beside = executable.parent().unwrap_or(Path::new("."));
    let looked_for: Vec<PathBuf> = [".", "deps", "..", "../deps", "../lib/gantry"]
        .iter()
        .map(|place| beside.join(place).join(BUILT_NAME))
        .collect();
    newest(&looked_for).ok_or(InstallError::LibraryNotFound { looked_for })
}

/// The file last changed: cargo leaves an older copy in one of two places, depending on what was built last.
fn newest(paths: &[PathBuf]) -> Option<PathBuf> {
    let dated = paths.iter().filter_map(|path| {
        let changed = std::fs::metadata(path).ok()?.modified().ok()?;
        Some((changed, path))
    });
    dated.max_by_key(|(changed, _)| *changed).map(|(_, path)| path.clone())
}
