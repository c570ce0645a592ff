//! A machine's entries of `/proc`, `/sys` and `/dev`, written below a root of the caller's choice, which clients read
//! instead of `/`. Never touches the real ones.

mod caps;
mod dev;
mod files;
mod proc;
mod sysfs;
mod tree;

use std::io;
use std::path::{Path, PathBuf};

use gantry_topology::Mig;

use crate::facts::Facts;
use files::Files;

pub(crate) use files::is_laid_down;
pub use files::{MARK, remove};
pub use tree::{Endpoint, Misfit, Tree, class_between};

/// What was laid down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The root.
    pub root: PathBuf,
    /// Stands for `/proc`.
    pub proc: PathBuf,
    /// Stands for `/sys`.
    pub sys: PathBuf,
    /// Stands for `/dev`.
    pub dev: PathBuf,
    /// Whether `dev` holds character devices; if not, it holds regular files that say what they stand for.
    pub device_nodes: bool,
    /// Pairs of devices with a path class that no PCI tree can show. NVML still reports the class of the machine file.
    pub misfits: Vec<Misfit>,
}

/// Why the entries could not be laid down or removed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {path}")]
pub struct CompanionError {
    /// What was tried.
    pub action: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// Lays down the entries of a machine under `root`, in place of any laid down there before.
///
/// # Errors
/// When something cannot be written.
pub fn lay_down(facts: &Facts, root: &Path) -> Result<Layout, CompanionError> {
    let tree = Tree::of(facts);
    let mut files = Files::begin(root)?;
    proc::write(&mut files, facts)?;
    sysfs::write(&mut files, facts, &tree)?;
    dev::write(&mut files, facts)?;
    caps::write(&mut files)?;
    let device_nodes = files.device_nodes;
    files.finish()?;
    let cuts: Vec<Option<&Mig>> = facts.gpus.iter().map(|gpu| gpu.mig.as_ref()).collect();
    follow_cuts(facts, &cuts, root)?;
    Ok(Layout {
        root: root.to_owned(),
        proc: root.join("proc"),
        sys: root.join("sys"),
        dev: root.join("dev"),
        device_nodes,
        misfits: tree.misfits,
    })
}

/// Brings the entries of MIG instances under `root` in line with `cuts`, the cut of each GPU by its index.
pub(crate) fn follow_cuts(facts: &Facts, cuts: &[Option<&Mig>], root: &Path) -> Result<(), CompanionError> {
    let mut files = Files::again(root);
    caps::write_instances(&mut files, facts, cuts)?;
    files.replace()
}

impl Layout {
    /// Takes away what was laid down.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub fn remove(&self) -> Result<(), CompanionError> {
        remove(&self.root)
    }
}

#[cfg(test)]
mod tests;
