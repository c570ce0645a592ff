//! Where NVML is loaded from. Looks whether files are there; loads nothing.

use std::path::{Path, PathBuf};

/// Where distributions keep libraries, as NVIDIA's plugin looks through them.
const FOLDERS: [&str; 6] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
];

/// The file to load: a path as it is; a name as it is found below `root`, where this process sees the driver's root, and else for the
/// dynamic loader to find. So a node whose driver is in a folder of its own needs no container runtime that knows of it.
pub fn find(library: &Path, root: &Path) -> PathBuf {
    let is_name = library.components().count() == 1 && library.is_relative();
    let below = FOLDERS
        .iter()
        .map(|folder| root.join(folder).join(library))
        .find(|path| is_name && path.exists());
    below.unwrap_or_else(|| library.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_for_below_the_drivers_root_and_a_path_is_not() {
        let root = tempfile::tempdir().unwrap();
        let name = Path::new("libnvidia-ml.so.1");
        assert_eq!(find(name, root.path()), name, "the dynamic loader's");
        for folder in ["lib64", "usr/lib/x86_64-linux-gnu"] {
            let folder = root.path().join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(name), "").unwrap();
            assert_eq!(find(name, root.path()), folder.join(name));
        }
        let path = Path::new("./libnvidia-ml.so.1");
        assert_eq!(find(path, root.path()), path);
    }
}
