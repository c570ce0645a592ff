use std::os::unix::fs::symlink;

use super::*;

/// A root with these files, and links written as `name -> target`.
pub(in crate::cdi) fn root(entries: &[&str]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for entry in entries {
        let (name, target) = entry
            .split_once(" -> ")
            .map_or((*entry, None), |(name, target)| (name, Some(target)));
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        match target {
            Some(target) => symlink(target, path).unwrap(),
            None => fs::write(path, "").unwrap(),
        }
    }
    root
}

pub(in crate::cdi) fn paths(driver: &Driver) -> Vec<&str> {
    let paths = driver.libraries.iter().map(|library| &library.file.path);
    paths.map(|path| path.to_str().unwrap()).collect()
}

fn reals(files: &[File]) -> Vec<&str> {
    files.iter().map(|file| file.real.to_str().unwrap()).collect()
}

const DEBIAN: [&str; 13] = [
    "usr/lib/x86_64-linux-gnu/libcuda.so.570.86.15",
    "usr/lib/x86_64-linux-gnu/libcuda.so.1 -> libcuda.so.570.86.15",
    "usr/lib/x86_64-linux-gnu/libcuda.so -> libcuda.so.1",
    "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.86.15",
    "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 -> libnvidia-ml.so.570.86.15",
    "usr/lib/x86_64-linux-gnu/vdpau/libvdpau_nvidia.so.570.86.15",
    "usr/lib/x86_64-linux-gnu/libc.so.6",
    "usr/lib/x86_64-linux-gnu/libOpenCL.so.1.0.0",
    "lib -> usr/lib",
    "usr/bin/nvidia-smi",
    "bin -> usr/bin",
    "run/nvidia-persistenced/socket",
    "usr/lib/firmware/nvidia/570.86.15/gsp_ga10x.bin",
];

#[test]
fn a_debian_root_gives_each_file_once_though_folders_are_links() {
    let root = root(&DEBIAN);
    let driver = Driver::find(root.path(), Some("570.86.15"), false);
    assert_eq!(
        paths(&driver),
        [
            "usr/lib/x86_64-linux-gnu/libcuda.so.570.86.15",
            "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.86.15",
            "usr/lib/x86_64-linux-gnu/vdpau/libvdpau_nvidia.so.570.86.15",
        ]
    );
    assert_eq!(driver.libraries[0].links, ["libcuda.so", "libcuda.so.1"]);
    assert_eq!(reals(&driver.binaries), ["usr/bin/nvidia-smi"]);
    assert_eq!(reals(&driver.sockets), ["run/nvidia-persistenced/socket"]);
    assert_eq!(
        reals(&driver.firmware),
        ["usr/lib/firmware/nvidia/570.86.15/gsp_ga10x.bin"]
    );
}

#[test]
fn libraries_without_a_version_come_on_request() {
    let root = root(&DEBIAN);
    let driver = Driver::find(root.path(), Some("570.86.15"), true);
    assert!(paths(&driver).contains(&"usr/lib/x86_64-linux-gnu/libOpenCL.so.1.0.0"));
}

#[test]
fn the_version_is_read_off_the_library_if_it_is_the_only_one() {
    let one = root(&DEBIAN);
    assert_eq!(
        Driver::find(one.path(), None, false).version.as_deref(),
        Some("570.86.15")
    );
    let two = root(&["usr/lib64/libcuda.so.570.86.15", "usr/lib64/libcuda.so.550.54.14"]);
    assert_eq!(Driver::find(two.path(), None, false), Driver::default());
    assert_eq!(
        paths(&Driver::find(two.path(), Some("550.54.14"), false)),
        ["usr/lib64/libcuda.so.550.54.14"]
    );
}

#[test]
fn links_with_a_slash_in_front_are_followed_inside_the_root() {
    let root = root(&[
        "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.1",
        "usr/lib/x86_64-linux-gnu/libcuda.so.535.1 -> /etc/alternatives/cuda",
        "etc/alternatives/cuda -> /usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.1",
        "usr/bin/nvidia-smi -> ../../etc/alternatives/smi",
        "etc/alternatives/smi -> /usr/lib/nvidia/current/nvidia-smi",
        "usr/lib/nvidia/current/nvidia-smi",
    ]);
    let driver = Driver::find(root.path(), Some("535.1"), false);
    let file = &driver.binaries[0];
    assert_eq!(file.path, Path::new("usr/bin/nvidia-smi"));
    assert_eq!(file.real, Path::new("usr/lib/nvidia/current/nvidia-smi"));
    assert_eq!(
        driver.libraries[0].file.real,
        Path::new("usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.1")
    );
}

#[test]
fn no_link_leads_out_of_the_root_or_for_ever() {
    let root = root(&[
        "usr/lib64/libcuda.so.1.2 -> ../../../../../../etc/hostname",
        "usr/lib64/libnvidia-ml.so.1.2 -> libnvidia-ml.so.1.2",
        "usr/bin/nvidia-smi -> /bin/sh",
    ]);
    let driver = Driver::find(root.path(), Some("1.2"), false);
    assert!(driver.libraries.is_empty() && driver.binaries.is_empty());
}

#[test]
fn a_root_that_is_not_there_has_no_driver() {
    let nowhere = Driver {
        version: Some("1.2".into()),
        ..Driver::default()
    };
    assert_eq!(
        Driver::find(Path::new("/nowhere/at/all"), Some("1.2"), false),
        nowhere
    );
}
