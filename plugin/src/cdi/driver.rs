//! Which files of the driver a container needs: found under the driver's root as this process sees it. Says where they are;
//! nothing of them is opened or run.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::folders;
use crate::root::resolve;

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
/// Where the kernel looks for firmware, but for the folders that [`Kernel`] tells of.
const FIRMWARE: [&str; 4] = [
    "lib/firmware/updates",
    "usr/lib/firmware/updates",
    "lib/firmware",
    "usr/lib/firmware",
];
/// What the names of the driver's firmware begin with: that of system processors, and since R615 that of others.
const FIRMWARE_NAMES: [&str; 2] = ["gsp", "ucodes"];
/// Libraries of the driver that have versions of their own.
const OWN_VERSION: [&str; 3] = [
    "libnvidia-egl-gbm.so",
    "libnvidia-egl-wayland.so",
    "libnvidia-nvvm70.so",
];
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
/// Where distributions keep settings, the first that has one first.
const SETTINGS: [&str; 3] = ["etc", "usr/local/share", "usr/share"];
/// By these OpenGL and OptiX find the driver: where they are among the settings.
const GRAPHICS: [&str; 4] = [
    "glvnd/egl_vendor.d/10_nvidia.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "nvidia/nvoptix.bin",
];
/// By these Vulkan does. Packages of RPM name one after the CPU. Some systems have them at the driver's root (Google Kubernetes Engine); a
/// container has them below `/etc`, wherever they are.
const VULKAN: [&str; 4] = [
    "vulkan/icd.d/nvidia_icd.json",
    "vulkan/icd.d/nvidia_layers.json",
    "vulkan/implicit_layer.d/nvidia_layers.json",
    match cfg!(target_arch = "aarch64") {
        true => "vulkan/icd.d/nvidia_icd.aarch64.json",
        false => "vulkan/icd.d/nvidia_icd.x86_64.json",
    },
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
    /// Firmware of the GPUs.
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

/// What the running kernel says of where it looks for firmware.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kernel {
    /// Its release: a folder of that name has firmware for it alone.
    pub release: Option<String>,
    /// The folder that it was told of, which counts first.
    pub firmware: Option<PathBuf>,
}

impl Kernel {
    /// Asks it; `sys` is where this process sees `/sys`.
    pub fn read(sys: &Path) -> Self {
        let told = fs::read_to_string(sys.join("module/firmware_class/parameters/path"));
        let told = told.unwrap_or_default().trim().to_owned();
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let release = release.trim();
        Self {
            release: (!release.is_empty()).then(|| release.to_owned()),
            firmware: (!told.is_empty()).then(|| told.into()),
        }
    }

    /// The folders in which it looks, below the root.
    fn folders(&self) -> Vec<PathBuf> {
        let own = |folder: &str| Some(Path::new(folder).join(self.release.as_ref()?));
        let folders = FIRMWARE
            .iter()
            .flat_map(|folder| [own(folder), Some(folder.into())]);
        self.firmware.iter().cloned().chain(folders.flatten()).collect()
    }
}

impl Driver {
    /// Every path that is looked for below the root, and every folder that is looked through: what this process must be shown of the host.
    /// But for the folder of firmware that the kernel may have been told of.
    pub fn looked_for() -> impl Iterator<Item = &'static str> {
        let folders = folders::looked_for().chain(PROGRAMS).chain(FIRMWARE);
        folders.chain(SOCKETS).chain(STORAGE).chain(SETTINGS)
    }

    /// Whether any is missing of what GPUDirect Storage reads.
    pub fn lacks_storage(&self) -> bool {
        self.storage.len() < STORAGE.len()
    }

    /// Finds the driver of this version under `root`; without a version, the one whose `libcuda.so` is there. `explicit` asks for
    /// libraries without a version too.
    pub fn find(root: &Path, version: Option<&str>, explicit: bool, kernel: &Kernel) -> Self {
        let (folders, version) = folders::find(root, version);
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
        let suffix = suffix(&version);
        if !libraries.iter().any(|library| is_of(&library.file.path, &suffix)) {
            // Those that have other versions may be there without the driver, and would hide that it is missing.
            libraries.clear();
        }
        libraries.sort();
        let binary = |name: &&str| {
            PROGRAMS
                .iter()
                .find_map(|folder| file(root, Path::new(folder).join(name)))
        };
        let firmware = kernel.folders().into_iter().flat_map(|folder| {
            let folder = folder.join("nvidia").join(&version);
            names(root, &folder)
                .into_iter()
                .filter(|name| FIRMWARE_NAMES.iter().any(|first| name.starts_with(first)))
                .filter(|name| name.ends_with(".bin"))
                .map(move |name| folder.join(name))
        });
        Self {
            libraries,
            binaries: BINARIES.iter().filter_map(binary).collect(),
            sockets: once_each(root, SOCKETS.map(PathBuf::from)),
            firmware: once_each(root, firmware),
            graphics: graphics(root),
            storage,
            version: Some(version),
        }
    }
}

/// What names of the driver's libraries end with.
fn suffix(version: &str) -> String {
    format!(".so.{version}")
}

fn is_of(path: &Path, suffix: &str) -> bool {
    path.to_string_lossy().ends_with(suffix)
}

/// Loader files, each where a container's loaders look for it.
fn graphics(root: &Path) -> Vec<File> {
    let first = |name: &str, folders: &[&str]| {
        let mut paths = folders.iter().map(|folder| Path::new(folder).join(name));
        paths.find_map(|path| file(root, path))
    };
    let settings = GRAPHICS.iter().filter_map(|name| first(name, &SETTINGS));
    let vulkan = VULKAN.iter().filter_map(|name| {
        let real = first(name, &[&SETTINGS[..], &[""]].concat())?.real;
        let path = Path::new("etc").join(name);
        Some(File { path, real })
    });
    let mut files: Vec<File> = vulkan.chain(settings).collect();
    files.sort();
    files
}

/// The driver's libraries in one folder.
fn libraries(root: &Path, folder: &Path, version: &str, explicit: bool) -> Vec<Library> {
    let suffix = suffix(version);
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
        .chain(&OWN_VERSION)
        .flat_map(|wanted| of_stem(wanted))
        .map(|(_, real)| real)
        .filter(|real| !is_of(real, &suffix))
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

/// The names in a folder, in order.
pub(super) fn names(root: &Path, folder: &Path) -> Vec<String> {
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
pub(super) mod tests;
