//! Finds the folders with the driver's libraries, below the driver's root as this process sees it, where NVIDIA's container toolkit looks
//! too. Reads the dynamic loader's cache if necessary, and no other file.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::driver::names;
use super::ldcache;
use crate::root::{COMMON_FOLDERS, SPECIAL_FOLDERS, resolve};

/// Read last: it has folders that the operator configured.
const CACHE: &str = "etc/ld.so.cache";
/// Longest cache that is read. That of a workstation has a few hundred KiB.
const MAX_BYTES: u64 = 8 << 20;
/// The prefix of the CUDA driver library.
const CUDA: &str = "libcuda.so.";

/// Every path that may be searched, below the root.
pub(super) fn looked_for() -> impl Iterator<Item = &'static str> {
    COMMON_FOLDERS.into_iter().chain(SPECIAL_FOLDERS).chain([CACHE])
}

/// The folders with libraries, each once under its real path, and the version of the driver: the requested one, otherwise that of the
/// first folder with a driver.
pub(super) fn find(root: &Path, version: Option<&str>) -> (Vec<PathBuf>, Option<String>) {
    let mut folders: Vec<PathBuf> = Vec::new();
    for folder in COMMON_FOLDERS.iter().filter_map(|folder| resolve(root, Path::new(folder))) {
        if !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    let of_driver = |folder: &PathBuf| match version {
        Some(version) => resolve(root, &folder.join(format!("{CUDA}{version}"))).map(|_| version.to_owned()),
        None => version_of(root, folder),
    };
    if let Some(version) = folders.iter().find_map(of_driver) {
        return (folders, Some(version));
    }
    let rare = SPECIAL_FOLDERS.iter().filter_map(|folder| resolve(root, Path::new(folder)));
    // Both are searched only as far as necessary.
    let others = rare.chain(std::iter::once_with(|| cached(root)).flatten());
    for folder in others {
        if let Some(version) = of_driver(&folder) {
            folders.push(folder);
            return (folders, Some(version));
        }
    }
    (folders, version.map(str::to_owned))
}

/// The folders of the CUDA driver library by the loader's cache.
fn cached(root: &Path) -> Vec<PathBuf> {
    let bytes = resolve(root, Path::new(CACHE)).and_then(|path| read(&root.join(path)));
    let paths = bytes.as_deref().and_then(|bytes| ldcache::paths(bytes, CUDA));
    let folders = paths.into_iter().flatten().filter_map(Path::parent);
    folders.filter_map(|folder| resolve(root, folder)).collect()
}

/// The content of a regular file that is not longer than a cache.
fn read(path: &Path) -> Option<Vec<u8>> {
    let metadata = fs::metadata(path).ok()?;
    if !metadata.is_file() || metadata.len() > MAX_BYTES {
        return None;
    }
    let mut bytes = Vec::new();
    let file = File::open(path).ok()?;
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// The version in the name of the CUDA driver library.
fn version_of(root: &Path, folder: &Path) -> Option<String> {
    let names = names(root, folder);
    let mut versions = names.iter().filter_map(|name| name.strip_prefix(CUDA)).filter(|version| {
        version.contains('.') && version.bytes().all(|byte| byte == b'.' || byte.is_ascii_digit())
    });
    let version = versions.next()?;
    // Two versions are a driver half replaced: the running one is unknown.
    versions.next().is_none().then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::super::driver::tests::{paths, root};
    use super::super::driver::{Driver, Kernel};
    use super::super::ldcache::tests::cache;

    /// The driver below a root with these files and links, and with this cache.
    fn find(files: &[&str], cached: &[&str], version: Option<&str>) -> Driver {
        let root = root(files);
        if !cached.is_empty() {
            let entries = cached.iter().map(|path| (0x0303, *path));
            fs::create_dir_all(root.path().join("etc")).unwrap();
            fs::write(root.path().join("etc/ld.so.cache"), cache(&entries.collect::<Vec<_>>())).unwrap();
        }
        Driver::find(root.path(), version, false, &Kernel::default())
    }

    #[test]
    fn libraries_are_found_where_nvidias_toolkit_looks() {
        for folder in [
            "",
            "lib/x86_64-linux-gnu/nvidia/current/",
            "lib/aarch64-linux-gnu/nvidia/current/",
            "usr/lib/",
            "glibc/lib/",
            "usr/local/glibc/usr/lib/",
            "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/",
            "aarch64-bottlerocket-linux-gnu/sys-root/usr/lib/",
            "home/kubernetes/bin/nvidia/lib64/",
        ] {
            let cuda = format!("{folder}libcuda.so.570.86.15");
            let vdpau = format!("{folder}vdpau/libvdpau_nvidia.so.570.86.15");
            let link = format!("{folder}libcuda.so.1 -> libcuda.so.570.86.15");
            for version in [None, Some("570.86.15")] {
                let driver = find(&[&cuda, &vdpau, &link], &[], version);
                assert_eq!(driver.version.as_deref(), Some("570.86.15"), "{folder}");
                assert_eq!(paths(&driver), [cuda.as_str(), vdpau.as_str()], "{folder}");
                assert_eq!(driver.libraries[0].links, ["libcuda.so.1"], "{folder}");
            }
        }
    }

    #[test]
    fn rare_folder_counts_only_without_usual_driver() {
        // Where /usr/lib64 is, /usr/lib has libraries of 32 bits.
        let files = ["usr/lib64/libcuda.so.1.2", "usr/lib/libcuda.so.1.2", "libcuda.so.1.2"];
        for version in [None, Some("1.2")] {
            assert_eq!(paths(&find(&files, &[], version)), ["usr/lib64/libcuda.so.1.2"]);
        }
        let files = [
            "usr/lib64/libcuda.so.1.1",
            "glibc/lib/libcuda.so.1.2",
            "home/kubernetes/bin/nvidia/lib64/libcuda.so.1.2",
        ];
        assert_eq!(paths(&find(&files, &[], Some("1.2"))), ["glibc/lib/libcuda.so.1.2"], "the first of them");
    }

    #[test]
    fn folder_known_only_to_the_loader_cache_is_searched() {
        let files = [
            "opt/nvidia/lib/libcuda.so.1.2",
            "opt/nvidia/lib/libcuda.so.1 -> libcuda.so.1.2",
            "opt/nvidia/lib/libnvidia-ml.so.1.2",
            "opt/other/libnvidia-ml.so.1.2",
            "link -> /opt/nvidia",
        ];
        let cached = ["/link/lib/libcuda.so.1", "/opt/other/libnvidia-ml.so.1", "/nowhere/libcuda.so.1"];
        for version in [None, Some("1.2")] {
            assert_eq!(
                paths(&find(&files, &cached, version)),
                ["opt/nvidia/lib/libcuda.so.1.2", "opt/nvidia/lib/libnvidia-ml.so.1.2"]
            );
        }
        let usual = [&files[..], &["usr/lib64/libcuda.so.1.2"]].concat();
        assert_eq!(
            paths(&find(&usual, &cached, Some("1.2"))),
            ["usr/lib64/libcuda.so.1.2"],
            "read only if the driver is nowhere else"
        );
        let other = [&files[..], &["usr/lib64/libcuda.so.1.1"]].concat();
        assert_eq!(
            find(&other, &cached, Some("1.2")).libraries.len(),
            2,
            "another driver's is left over there"
        );
    }

    #[test]
    fn cache_does_not_lead_out_of_the_root() {
        let root = root(&["usr/lib64/libc.so.6"]);
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("libcuda.so.1.2"), "").unwrap();
        let path = format!("/../../../../../../../..{}/libcuda.so.1", outside.path().display());
        fs::create_dir_all(root.path().join("etc")).unwrap();
        fs::write(root.path().join("etc/ld.so.cache"), cache(&[(0x0303, &path)])).unwrap();
        assert!(Driver::find(root.path(), Some("1.2"), false, &Kernel::default()).libraries.is_empty());
        assert!(
            Driver::find(Path::new("/nowhere"), Some("1.2"), false, &Kernel::default()).libraries.is_empty()
        );
    }
}
