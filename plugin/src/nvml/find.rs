//! Finds the NVML library file. Checks whether files exist; loads nothing.

use std::path::{Path, PathBuf};

use crate::root::{COMMON_FOLDERS, SPECIAL_FOLDERS, resolve};

/// The file to load. A path is used as it is. A name is searched below `root`, the driver root as this process
/// sees it, and otherwise left to the dynamic loader. A node with its driver in a folder of its own thus needs
/// no special container runtime.
pub fn find(library: &Path, root: &Path) -> PathBuf {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_name_is_searched_below_driver_root() {
        let root = tempfile::tempdir().unwrap();
        let name = Path::new("libnvidia-ml.so.1");
        assert_eq!(find(name, root.path()), name, "the dynamic loader's");
        // Each of these takes precedence over the files before it.
        let rare = ["home/kubernetes/bin/nvidia/lib64", "glibc/lib", "usr/lib", ""];
        for folder in rare.into_iter().chain(["lib64", "usr/lib/x86_64-linux-gnu"]) {
            let folder = root.path().join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(name), "").unwrap();
            assert_eq!(find(name, root.path()), folder.join(name));
        }
        let path = Path::new("./libnvidia-ml.so.1");
        assert_eq!(find(path, root.path()), path);
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
        assert_eq!(find(name, root.path()), real);
    }
}
