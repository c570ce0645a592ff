//! The driver root: the folders in which distributions keep the driver's libraries, and paths resolved as by a
//! process with this root. Reads links and folders; opens no file.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// Where distributions keep libraries, below the root.
pub(crate) const COMMON_FOLDERS: [&str; 10] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib/x86_64-linux-gnu/nvidia/current",
    "lib/aarch64-linux-gnu/nvidia/current",
];
/// Driver folders of some systems: the root itself, Arch, Talos, Bottlerocket, Google's Container-Optimized OS.
/// The first one that has the file counts, and only if the usual folders have none: beside `/usr/lib64`,
/// `/usr/lib` holds 32-bit libraries.
pub(crate) const SPECIAL_FOLDERS: [&str; 7] = [
    "",
    "usr/lib",
    "glibc/lib",
    "usr/local/glibc/usr/lib",
    "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib",
    "aarch64-bottlerocket-linux-gnu/sys-root/usr/lib",
    "home/kubernetes/bin/nvidia/lib64",
];
/// The limit of Linux.
const MAX_LINKS: usize = 40;

/// Resolves `path` below `root`, following links like a process with this root. `None` if nothing is there, or
/// if the path is not Unicode, which no CDI specification can hold.
pub(crate) fn resolve(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut rest: Vec<PathBuf> = reversed(path);
    let mut real = PathBuf::new();
    let mut links = 0;
    while let Some(part) = rest.pop() {
        match part.components().next() {
            Some(Component::Normal(name)) => {
                let next = real.join(name);
                match fs::read_link(root.join(&next)) {
                    Ok(target) if links < MAX_LINKS => {
                        links += 1;
                        rest.extend(reversed(&target));
                    }
                    Ok(_) => return None,
                    Err(_) => real = next,
                }
            }
            Some(Component::ParentDir) => {
                real.pop();
            }
            Some(Component::RootDir) => real.clear(),
            _ => {}
        }
    }
    real.to_str()?;
    fs::symlink_metadata(root.join(&real)).ok().map(|_| real)
}

fn reversed(path: &Path) -> Vec<PathBuf> {
    path.components().rev().map(|part| part.as_os_str().into()).collect()
}
