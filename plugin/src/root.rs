//! The driver root: the folders in which distributions keep the driver's libraries, the file of a library, and paths
//! resolved as by a process with this root. Reads links and folders; opens no file.

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

/// The file to load. A path is used as it is. A name is searched below `root`, the driver root as this process
/// sees it, and otherwise left to the dynamic loader. A node with its driver in a folder of its own thus needs
/// no special container runtime.
pub(crate) fn find_library(library: &Path, root: &Path) -> PathBuf {
    let is_name = library.components().count() == 1 && library.is_relative();
    let mut folders = COMMON_FOLDERS.iter().chain(&SPECIAL_FOLDERS).filter(|_| is_name).map(Path::new);
    let below = folders.find_map(|folder| {
        let path = folder.join(library);
        // Links are followed as the driver's own system does, otherwise as this process does.
        let real = resolve(root, &path).map(|real| root.join(real));
        real.or_else(|| Some(root.join(path)).filter(|path| path.exists()))
    });
    below.unwrap_or_else(|| library.to_owned())
}

/// The version in the name of the file that `library` leads to: `libnvidia-ml.so.550.144.03`.
pub(crate) fn version_of(library: &Path) -> Option<String> {
    let real = fs::canonicalize(library).ok()?;
    let (_, version) = real.file_name()?.to_str()?.split_once(".so.")?;
    version.contains('.').then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_name_is_searched_below_driver_root() {
        let root = tempfile::tempdir().unwrap();
        let name = Path::new("libnvidia-ml.so.1");
        assert_eq!(find_library(name, root.path()), name, "the dynamic loader's");
        // Each of these takes precedence over the files before it.
        let rare = ["home/kubernetes/bin/nvidia/lib64", "glibc/lib", "usr/lib", ""];
        for folder in rare.into_iter().chain(["lib64", "usr/lib/x86_64-linux-gnu"]) {
            let folder = root.path().join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(name), "").unwrap();
            assert_eq!(find_library(name, root.path()), folder.join(name));
        }
        let path = Path::new("./libnvidia-ml.so.1");
        assert_eq!(find_library(path, root.path()), path);
    }

    #[test]
    fn library_links_are_followed_inside_driver_root() {
        let root = tempfile::tempdir().unwrap();
        let name = Path::new("libnvidia-ml.so.1");
        for folder in ["usr/lib64", "opt/nvidia"] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let real = root.path().join("opt/nvidia/libnvidia-ml.so.580.1");
        std::fs::write(&real, "").unwrap();
        std::os::unix::fs::symlink(
            "/opt/nvidia/libnvidia-ml.so.580.1",
            root.path().join("usr/lib64").join(name),
        )
        .unwrap();
        assert_eq!(find_library(name, root.path()), real);
    }
}
