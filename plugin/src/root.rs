//! The driver's root: the folders below it in which systems keep the driver's libraries, and paths as a process whose root it is would
//! follow them. Looks at links and folders; opens no file.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// Where distributions keep libraries, below the root.
pub(crate) const USUAL: [&str; 10] = [
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
/// Where the driver is on some systems: the root itself, Arch, Talos, Bottlerocket, Google's Container-Optimized OS. The first one that
/// has it counts, and only where the usual ones do not: next to `/usr/lib64`, `/usr/lib` holds libraries of 32 bits.
pub(crate) const RARE: [&str; 7] = [
    "",
    "usr/lib",
    "glibc/lib",
    "usr/local/glibc/usr/lib",
    "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib",
    "aarch64-bottlerocket-linux-gnu/sys-root/usr/lib",
    "home/kubernetes/bin/nvidia/lib64",
];
/// As many as Linux follows.
const MOST_LINKS: usize = 40;

/// The path below `root` that `path` leads to, links followed as a process would whose root it is; `None` if there is nothing,
/// or if the path is not Unicode, which no specification could hold.
pub(crate) fn resolve(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut rest: Vec<PathBuf> = reversed(path);
    let mut real = PathBuf::new();
    let mut links = 0;
    while let Some(part) = rest.pop() {
        match part.components().next() {
            Some(Component::Normal(name)) => {
                let next = real.join(name);
                match fs::read_link(root.join(&next)) {
                    Ok(target) if links < MOST_LINKS => {
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
    path.components()
        .rev()
        .map(|part| part.as_os_str().into())
        .collect()
}
