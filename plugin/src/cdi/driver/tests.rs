use std::os::unix::fs::symlink;

use super::super::ldcache::tests::cache;
use super::*;

/// A root with these files, and links written as `name -> target`.
fn root(entries: &[&str]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for entry in entries {
        let (name, target) =
            entry.split_once(" -> ").map_or((*entry, None), |(name, target)| (name, Some(target)));
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        match target {
            Some(target) => symlink(target, path).unwrap(),
            None => fs::write(path, "").unwrap(),
        }
    }
    root
}

fn paths(driver: &Driver) -> Vec<&str> {
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
fn linked_folders_give_each_file_once() {
    let root = root(&DEBIAN);
    let driver = Driver::find(root.path(), Some("570.86.15"), false, &Kernel::default());
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
    assert_eq!(reals(&driver.firmware), ["usr/lib/firmware/nvidia/570.86.15/gsp_ga10x.bin"]);
}

#[test]
fn unversioned_libraries_are_included_on_request() {
    let root = root(&DEBIAN);
    let driver = Driver::find(root.path(), Some("570.86.15"), true, &Kernel::default());
    assert!(paths(&driver).contains(&"usr/lib/x86_64-linux-gnu/libOpenCL.so.1.0.0"));
}

#[test]
fn version_is_taken_from_the_only_library() {
    let one = root(&DEBIAN);
    assert_eq!(
        Driver::find(one.path(), None, false, &Kernel::default()).version.as_deref(),
        Some("570.86.15")
    );
    let two = root(&["usr/lib64/libcuda.so.570.86.15", "usr/lib64/libcuda.so.550.54.14"]);
    assert_eq!(Driver::find(two.path(), None, false, &Kernel::default()), Driver::default());
    assert_eq!(
        paths(&Driver::find(two.path(), Some("550.54.14"), false, &Kernel::default())),
        ["usr/lib64/libcuda.so.550.54.14"]
    );
}

#[test]
fn absolute_links_are_resolved_inside_the_root() {
    let root = root(&[
        "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.1",
        "usr/lib/x86_64-linux-gnu/libcuda.so.535.1 -> /etc/alternatives/cuda",
        "etc/alternatives/cuda -> /usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.1",
        "usr/bin/nvidia-smi -> ../../etc/alternatives/smi",
        "etc/alternatives/smi -> /usr/lib/nvidia/current/nvidia-smi",
        "usr/lib/nvidia/current/nvidia-smi",
    ]);
    let driver = Driver::find(root.path(), Some("535.1"), false, &Kernel::default());
    let file = &driver.binaries[0];
    assert_eq!(file.path, Path::new("usr/bin/nvidia-smi"));
    assert_eq!(file.real, Path::new("usr/lib/nvidia/current/nvidia-smi"));
    assert_eq!(
        driver.libraries[0].file.real,
        Path::new("usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.1")
    );
}

#[test]
fn links_do_not_leave_the_root_or_loop() {
    let root = root(&[
        "usr/lib64/libcuda.so.1.2 -> ../../../../../../etc/hostname",
        "usr/lib64/libnvidia-ml.so.1.2 -> libnvidia-ml.so.1.2",
        "usr/bin/nvidia-smi -> /bin/sh",
    ]);
    let driver = Driver::find(root.path(), Some("1.2"), false, &Kernel::default());
    assert!(driver.libraries.is_empty() && driver.binaries.is_empty());
}

#[test]
fn missing_root_has_no_driver() {
    let nowhere = Driver { version: Some("1.2".into()), ..Driver::default() };
    assert_eq!(Driver::find(Path::new("/nowhere/at/all"), Some("1.2"), false, &Kernel::default()), nowhere);
}

/// The mounts, as `path in the container <- path on the host`.
fn mounted(files: &[File]) -> Vec<String> {
    let reported = |file: &File| format!("{} <- {}", file.path.display(), file.real.display());
    files.iter().map(reported).collect()
}

#[test]
fn vulkan_files_are_found_and_mounted_in_etc() {
    let cpu = format!("nvidia_icd.{}.json", std::env::consts::ARCH);
    for folder in ["etc/", "usr/local/share/", "usr/share/", ""] {
        for name in [
            "icd.d/nvidia_icd.json",
            "icd.d/nvidia_layers.json",
            "implicit_layer.d/nvidia_layers.json",
            &format!("icd.d/{cpu}"),
        ] {
            let there = format!("{folder}vulkan/{name}");
            let root = root(&["usr/lib64/libcuda.so.1.2", &there]);
            let driver = Driver::find(root.path(), Some("1.2"), false, &Kernel::default());
            assert_eq!(mounted(&driver.graphics), [format!("etc/vulkan/{name} <- {there}")]);
        }
    }
}

#[test]
fn first_graphics_file_counts_and_link_keeps_name() {
    let root = root(&[
        "usr/lib64/libcuda.so.1.2",
        "etc/vulkan/icd.d/nvidia_icd.json -> /usr/share/vulkan/icd.d/nvidia_icd.json",
        "usr/share/vulkan/icd.d/nvidia_icd.json",
        "vulkan/icd.d/nvidia_icd.json",
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json -> ../../nvidia/egl.json",
        "usr/share/nvidia/egl.json",
    ]);
    let driver = Driver::find(root.path(), Some("1.2"), false, &Kernel::default());
    assert_eq!(
        mounted(&driver.graphics),
        [
            "etc/vulkan/icd.d/nvidia_icd.json <- usr/share/vulkan/icd.d/nvidia_icd.json",
            "usr/share/glvnd/egl_vendor.d/10_nvidia.json <- usr/share/nvidia/egl.json",
        ]
    );
}

#[test]
fn libraries_with_own_versions_come_with_the_driver() {
    let own = [
        "usr/lib64/libcuda.so.570.86.15",
        "usr/lib64/libnvidia-egl-gbm.so.1.1.2",
        "usr/lib64/libnvidia-egl-gbm.so.1 -> libnvidia-egl-gbm.so.1.1.2",
        "usr/lib64/libnvidia-egl-wayland.so.1.1.17",
        "usr/lib64/libnvidia-nvvm70.so.4",
        "usr/lib64/libEGL.so.1.1.0",
    ];
    let driver = Driver::find(root(&own).path(), Some("570.86.15"), false, &Kernel::default());
    assert_eq!(paths(&driver), [own[0], own[1], own[3], own[4]]);
    assert_eq!(driver.libraries[1].links, ["libnvidia-egl-gbm.so.1"]);
}

#[test]
fn libraries_with_own_versions_alone_are_no_driver() {
    // A distribution has this one in a package of its own.
    let root = root(&["usr/lib64/libnvidia-egl-wayland.so.1.1.17"]);
    let driver = Driver::find(root.path(), Some("570.86.15"), false, &Kernel::default());
    assert!(driver.libraries.is_empty(), "it would hide that the driver is missing");
}

#[test]
fn firmware_is_found_where_the_kernel_looks() {
    let kernel = Kernel { release: Some("6.8.0-1".to_owned()), firmware: Some("/opt/firmware".into()) };
    for folder in [
        "opt/firmware",
        "lib/firmware/updates/6.8.0-1",
        "lib/firmware/updates",
        "lib/firmware/6.8.0-1",
        "lib/firmware",
        "usr/lib/firmware/updates",
    ] {
        let there =
            [format!("{folder}/nvidia/1.2/gsp_ga10x.bin"), format!("{folder}/nvidia/1.2/ucodes_gb20x.bin")];
        let other = format!("{folder}/nvidia/1.1/gsp_ga10x.bin");
        let mut files = vec!["usr/lib64/libcuda.so.1.2", &there[0], &there[1], &other];
        if folder.starts_with("usr") {
            files.push("lib -> usr/lib");
        }
        let driver = Driver::find(root(&files).path(), Some("1.2"), false, &kernel);
        assert_eq!(reals(&driver.firmware), there);
    }
}

#[test]
fn configured_firmware_folder_is_read_from_the_kernel() {
    let sys = root(&[]);
    assert_eq!(Kernel::read(sys.path()).firmware, None);
    let parameters = sys.path().join("module/firmware_class/parameters");
    fs::create_dir_all(&parameters).unwrap();
    fs::write(parameters.join("path"), "\n").unwrap();
    assert_eq!(Kernel::read(sys.path()).firmware, None);
    fs::write(parameters.join("path"), "/var/lib/firmware\n").unwrap();
    let kernel = Kernel::read(sys.path());
    assert_eq!(kernel.firmware, Some("/var/lib/firmware".into()));
    assert!(kernel.release.is_some_and(|release| !release.is_empty()));
}

/// The driver below a root with these files and links, and with this cache.
fn find_cached(files: &[&str], cached: &[&str], version: Option<&str>) -> Driver {
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
            let driver = find_cached(&[&cuda, &vdpau, &link], &[], version);
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
        assert_eq!(paths(&find_cached(&files, &[], version)), ["usr/lib64/libcuda.so.1.2"]);
    }
    let files = [
        "usr/lib64/libcuda.so.1.1",
        "glibc/lib/libcuda.so.1.2",
        "home/kubernetes/bin/nvidia/lib64/libcuda.so.1.2",
    ];
    assert_eq!(
        paths(&find_cached(&files, &[], Some("1.2"))),
        ["glibc/lib/libcuda.so.1.2"],
        "the first of them"
    );
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
            paths(&find_cached(&files, &cached, version)),
            ["opt/nvidia/lib/libcuda.so.1.2", "opt/nvidia/lib/libnvidia-ml.so.1.2"]
        );
    }
    let usual = [&files[..], &["usr/lib64/libcuda.so.1.2"]].concat();
    assert_eq!(
        paths(&find_cached(&usual, &cached, Some("1.2"))),
        ["usr/lib64/libcuda.so.1.2"],
        "read only if the driver is nowhere else"
    );
    let other = [&files[..], &["usr/lib64/libcuda.so.1.1"]].concat();
    assert_eq!(
        find_cached(&other, &cached, Some("1.2")).libraries.len(),
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
    assert!(Driver::find(Path::new("/nowhere"), Some("1.2"), false, &Kernel::default()).libraries.is_empty());
}
