//! Which files of the driver a container needs: found under the driver's root as this process sees it. Says where they are;
//! nothing is opened or run.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Where distributions keep libraries.
const LIBRARIES: [&str; 8] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
];
/// Where distributions keep programs.
const PROGRAMS: [&str; 6] = [
    "usr/local/sbin",
    "usr/local/bin",
    "usr/sbin",
    "usr/bin",
    "sbin",
    "bin",
];
const BINARIES: [&str; 7] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
];
/// What a container speaks with the driver's daemons by.
const SOCKETS: [&str; 5] = [
    "run/nvidia-persistenced/socket",
    "run/nvidia-fabricmanager/socket",
    "var/run/nvidia-persistenced/socket",
    "var/run/nvidia-fabricmanager/socket",
    "tmp/nvidia-mps",
];
const FIRMWARE: [&str; 2] = ["lib/firmware/nvidia", "usr/lib/firmware/nvidia"];
/// Libraries without the driver's version in their names, on request.
const EXPLICIT: [&str; 11] = [
    "libEGL.so",
    "libGL.so",
    "libGLESv1_CM.so",
    "libGLESv2.so",
    "libGLX.so",
    "libGLdispatch.so",
    "libOpenCL.so",
    "libOpenGL.so",
    "libnvidia-api.so",
    "libnvidia-egl-xcb.so",
    "libnvidia-egl-xlib.so",
];
/// GPUDirect Storage's settings, and the database it looks disks up in.
const STORAGE: [&str; 2] = ["etc/cufile.json", "run/udev"];
/// As many as Linux follows.
const MOST_LINKS: usize = 40;
/// By these graphics loaders find the driver.
const GRAPHICS: [&str; 7] = [
    "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
    "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
    "usr/share/vulkan/icd.d/nvidia_icd.json",
    "usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
    "etc/vulkan/icd.d/nvidia_icd.json",
    "usr/share/nvidia/nvoptix.bin",
];

/// The driver's files, sorted, each once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Driver {
    /// Its version; `None` where nothing tells.
    pub version: Option<String>,
    /// Shared libraries.
    pub libraries: Vec<Library>,
    /// Programs.
    pub binaries: Vec<File>,
    /// Unix sockets, or folders of them.
    pub sockets: Vec<File>,
    /// Firmware of the GPUs' system processors.
    pub firmware: Vec<File>,
    /// Loader files of OpenGL, Vulkan and OptiX.
    pub graphics: Vec<File>,
    /// What GPUDirect Storage reads.
    pub storage: Vec<File>,
}

/// A file below the driver's root; its paths have no slash in front.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct File {
    /// Where it is looked for: where a container has it.
    pub path: PathBuf,
    /// Where it is, links followed: what is mounted.
    pub real: PathBuf,
}

/// A shared library.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Library {
    /// The file.
    pub file: File,
    /// The names in its folder that lead to it (`libcuda.so`, `libcuda.so.1`).
    pub links: Vec<String>,
}

impl Driver {
    /// Every path that is looked for below the root, and every folder that is looked through: what this process must be shown of the host.
    pub fn looked_for() -> impl Iterator<Item = &'static str> {
        let folders = LIBRARIES.into_iter().chain(PROGRAMS).chain(FIRMWARE);
        folders.chain(SOCKETS).chain(STORAGE).chain(GRAPHICS)
    }

    /// Whether any is missing of what GPUDirect Storage reads.
    pub fn lacks_storage(&self) -> bool {
        self.storage.len() < STORAGE.len()
    }

    /// Finds the driver of this version under `root`; without a version, the one whose `libcuda.so` is there. `explicit` asks for
    /// libraries without a version too.
    pub fn find(root: &Path, version: Option<&str>, explicit: bool) -> Self {
        let folders: BTreeSet<PathBuf> = LIBRARIES
            .iter()
            .filter_map(|folder| resolve(root, Path::new(folder)))
            .collect();
        let version = version
            .map(str::to_owned)
            .or_else(|| folders.iter().find_map(|folder| version_of(root, folder)));
        let storage = once_each(root, STORAGE.map(PathBuf::from));
        let Some(version) = version else {
            return Self {
                storage,
                ..Self::default()
            };
        };
        let mut libraries: Vec<Library> = folders
            .iter()
            .flat_map(|folder| [folder.clone(), folder.join("vdpau")])
            .flat_map(|folder| libraries(root, &folder, &version, explicit))
            .collect();
        libraries.sort();
        let binary = |name: &&str| {
            PROGRAMS
                .iter()
                .find_map(|folder| file(root, Path::new(folder).join(name)))
        };
        let firmware = FIRMWARE.iter().flat_map(|folder| {
            let folder = Path::new(folder).join(&version);
            names(root, &folder)
                .into_iter()
                .filter(|name| name.starts_with("gsp") && name.ends_with(".bin"))
                .map(move |name| folder.join(name))
        });
        Self {
            libraries,
            binaries: BINARIES.iter().filter_map(binary).collect(),
            sockets: once_each(root, SOCKETS.map(PathBuf::from)),
            firmware: once_each(root, firmware),
            graphics: once_each(root, GRAPHICS.map(PathBuf::from)),
            storage,
            version: Some(version),
        }
    }
}

/// The driver's libraries in one folder.
fn libraries(root: &Path, folder: &Path, version: &str, explicit: bool) -> Vec<Library> {
    let suffix = format!(".so.{version}");
    let names = names(root, folder);
    let of_stem = |wanted: &str| -> Vec<(String, PathBuf)> {
        names
            .iter()
            .filter(|name| stem(name) == wanted)
            .filter_map(|name| Some((name.clone(), resolve(root, &folder.join(name))?)))
            .collect()
    };
    let library = |path: PathBuf, real: PathBuf| {
        let own = path.file_name().unwrap_or_default().to_owned();
        let same = of_stem(stem(&own.to_string_lossy()));
        let links = same
            .into_iter()
            .filter(|(name, target)| *target == real && own != name.as_str());
        Library {
            links: links.map(|(name, _)| name).collect(),
            file: File { path, real },
        }
    };
    let versioned = names
        .iter()
        .filter(|name| name.ends_with(&suffix))
        .filter_map(|name| Some((folder.join(name), resolve(root, &folder.join(name))?)));
    // One library may have several names: it is mounted as what the links lead to.
    let unversioned: BTreeSet<PathBuf> = EXPLICIT
        .iter()
        .filter(|_| explicit)
        .flat_map(|wanted| of_stem(wanted))
        .map(|(_, real)| real)
        .filter(|real| !real.to_string_lossy().ends_with(&suffix))
        .collect();
    versioned
        .chain(unversioned.into_iter().map(|real| (real.clone(), real)))
        .map(|(path, real)| library(path, real))
        .collect()
}

/// `libcuda.so.570.86.15` without the version: `libcuda.so`.
fn stem(name: &str) -> &str {
    name.find(".so").map_or(name, |end| &name[..end + ".so".len()])
}

/// The version in the name of the CUDA driver library.
fn version_of(root: &Path, folder: &Path) -> Option<String> {
    let names = names(root, folder);
    let mut versions = names
        .iter()
        .filter_map(|name| name.strip_prefix("libcuda.so."))
        .filter(|version| {
            version.contains('.') && version.bytes().all(|byte| byte == b'.' || byte.is_ascii_digit())
        });
    let version = versions.next()?;
    // Two at once are a driver half replaced: neither is known to be the one that runs.
    versions.next().is_none().then(|| version.to_owned())
}

fn file(root: &Path, path: PathBuf) -> Option<File> {
    let real = resolve(root, &path)?;
    Some(File { path, real })
}

/// Those that exist, each under its real path: several may lead to one file.
fn once_each(root: &Path, paths: impl IntoIterator<Item = PathBuf>) -> Vec<File> {
    let found: BTreeSet<PathBuf> = paths
        .into_iter()
        .filter_map(|path| resolve(root, &path))
        .collect();
    found
        .into_iter()
        .map(|real| File {
            path: real.clone(),
            real,
        })
        .collect()
}

/// The path below `root` that `path` leads to, links followed as a process would whose root it is; `None` if there is nothing,
/// or if the path is not Unicode, which no specification could hold.
fn resolve(root: &Path, path: &Path) -> Option<PathBuf> {
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

/// The names in a folder, in order.
fn names(root: &Path, folder: &Path) -> Vec<String> {
    let Some(real) = resolve(root, folder) else {
        return Vec::new();
    };
    let entries = fs::read_dir(root.join(real)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A root with these files, and links written as `name -> target`.
    fn root(entries: &[&str]) -> tempfile::TempDir {
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
}
