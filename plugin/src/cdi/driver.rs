//! Finds the driver's files that a container needs, below the driver's root as this process sees it. None of them is opened or run.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::ldcache;
use crate::root::{COMMON_FOLDERS, SPECIAL_FOLDERS, resolve};

/// Where distributions keep programs.
const PROGRAMS: [&str; 6] = ["usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin"];
const BINARIES: [&str; 7] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
];
/// The sockets of the driver's daemons.
const SOCKETS: [&str; 5] = [
    "run/nvidia-persistenced/socket",
    "run/nvidia-fabricmanager/socket",
    "var/run/nvidia-persistenced/socket",
    "var/run/nvidia-fabricmanager/socket",
    "tmp/nvidia-mps",
];
/// Where the kernel looks for firmware, in addition to the folders of [`Kernel`].
const FIRMWARE: [&str; 4] =
    ["lib/firmware/updates", "usr/lib/firmware/updates", "lib/firmware", "usr/lib/firmware"];
/// The prefixes of the driver's firmware files: of system processors, and since R615 of others.
const FIRMWARE_NAMES: [&str; 2] = ["gsp", "ucodes"];
/// Libraries of the driver with versions of their own.
const OWN_VERSION: [&str; 3] = ["libnvidia-egl-gbm.so", "libnvidia-egl-wayland.so", "libnvidia-nvvm70.so"];
/// Libraries without the driver's version in their names, which are mounted on request.
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
/// The settings of GPUDirect Storage, and its database of disks.
const STORAGE: [&str; 2] = ["etc/cufile.json", "run/udev"];
/// Where distributions keep settings; the first folder with a file counts.
const SETTINGS: [&str; 3] = ["etc", "usr/local/share", "usr/share"];
/// The files by which OpenGL and OptiX find the driver, below a folder of settings.
const GRAPHICS: [&str; 4] = [
    "glvnd/egl_vendor.d/10_nvidia.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "nvidia/nvoptix.bin",
];
/// The files by which Vulkan finds the driver. RPM packages name one after the CPU. Google Kubernetes Engine has them at the driver's
/// root; containers always have them below `/etc`.
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
    /// Its version; `None` if unknown.
    pub version: Option<String>,
    pub libraries: Vec<Library>,
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

/// A file below the driver's root; its paths do not begin with a slash.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct File {
    /// Its path in a container.
    pub path: PathBuf,
    /// Its path with links resolved, which is mounted.
    pub real: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Library {
    pub file: File,
    /// The links in its folder that lead to it (`libcuda.so`, `libcuda.so.1`).
    pub links: Vec<String>,
}

/// Where the running kernel looks for firmware.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kernel {
    /// Its release, which names a folder with firmware for this kernel alone.
    pub release: Option<String>,
    /// The configured folder, which counts first.
    pub firmware: Option<PathBuf>,
}

impl Kernel {
    /// Reads both; `sys` is where this process sees `/sys`.
    pub fn read(sys: &Path) -> Self {
        let configured = fs::read_to_string(sys.join("module/firmware_class/parameters/path"));
        let configured = configured.unwrap_or_default().trim().to_owned();
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let release = release.trim();
        Self {
            release: (!release.is_empty()).then(|| release.to_owned()),
            firmware: (!configured.is_empty()).then(|| configured.into()),
        }
    }

    /// The folders, below the root.
    fn folders(&self) -> Vec<PathBuf> {
        let own = |folder: &str| Some(Path::new(folder).join(self.release.as_ref()?));
        let folders = FIRMWARE.iter().flat_map(|folder| [own(folder), Some(folder.into())]);
        self.firmware.iter().cloned().chain(folders.flatten()).collect()
    }
}

impl Driver {
    /// Every path and folder below the root that is searched: what must be mounted for this process. The configured folder of firmware is
    /// not among them.
    pub fn looked_for() -> impl Iterator<Item = &'static str> {
        let folders = searched_folders().chain(PROGRAMS).chain(FIRMWARE);
        folders.chain(SOCKETS).chain(STORAGE).chain(SETTINGS)
    }

    /// Whether a file of GPUDirect Storage is missing.
    pub fn lacks_storage(&self) -> bool {
        self.storage.len() < STORAGE.len()
    }

    /// Finds the driver of this version under `root`; without a version, the one of the `libcuda.so` there. `explicit` includes libraries
    /// without a version.
    pub fn find(root: &Path, version: Option<&str>, explicit: bool, kernel: &Kernel) -> Self {
        let (folders, version) = find_folders(root, version);
        let storage = once_each(root, STORAGE.map(PathBuf::from));
        let Some(version) = version else {
            return Self { storage, ..Self::default() };
        };
        let mut libraries: Vec<Library> = folders
            .iter()
            .flat_map(|folder| [folder.clone(), folder.join("vdpau")])
            .flat_map(|folder| libraries(root, &folder, &version, explicit))
            .collect();
        let suffix = suffix(&version);
        if !libraries.iter().any(|library| is_of(&library.file.path, &suffix)) {
            // Libraries with other versions may exist without the driver, and would hide that it is missing.
            libraries.clear();
        }
        libraries.sort();
        let binary =
            |name: &&str| PROGRAMS.iter().find_map(|folder| file(root, Path::new(folder).join(name)));
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

/// The libraries of the driver with its version in their names that a container cannot do without.
const VERSIONED: [&str; 2] = [CUDA, "libnvidia-ml.so."];

/// The driver's libraries below a root, compared with the running driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum InstalledDriver {
    /// No library of any version is found.
    #[default]
    Nothing,
    /// Libraries of the running version.
    Same,
    /// Libraries of other versions only.
    Other(BTreeSet<String>),
    /// No library of any version is found any more.
    Removed,
    /// A driver that is installed or replaced in part: these libraries of the running version cannot be used.
    Partial(Vec<UnusableLibrary>),
}

/// A library of the driver that cannot be used in the running version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnusableLibrary {
    /// Its name with the running version.
    pub name: String,
    pub flaw: Flaw,
    /// The other versions of it.
    pub others: BTreeSet<String>,
}

/// Why a library cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    Missing,
    /// It is a link, and the file that it leads to is missing.
    Dangling,
    /// It is an empty file, or none.
    Empty,
}

impl InstalledDriver {
    /// What this reading means after an earlier one. A root that never had a library may be one that this process does not see.
    pub fn after(self, earlier: Option<&Self>) -> Self {
        match (self, earlier) {
            (Self::Nothing, Some(earlier)) if *earlier != Self::Nothing => Self::Removed,
            (now, _) => now,
        }
    }

    /// Compares the libraries below `root` with `version`.
    pub fn of(root: &Path, version: &str) -> Self {
        let common = COMMON_FOLDERS.iter().chain(&SPECIAL_FOLDERS).map(PathBuf::from);
        let folders: BTreeSet<PathBuf> = common.filter_map(|folder| resolve(root, &folder)).collect();
        let mut libraries = VERSIONED.map(|prefix| Search::new(prefix, version));
        let cached = std::iter::once_with(|| cached(root)).flatten();
        for folder in folders.into_iter().chain(cached) {
            for library in libraries.iter_mut().filter(|library| !library.found) {
                library.look(root, &folder);
            }
            if libraries.iter().all(|library| library.found) {
                return Self::Same;
            }
            // A folder of the whole system has thousands of files and is listed only if the running version is in none
            // before it.
            let names = names(root, &folder);
            for library in &mut libraries {
                library.note_versions(&names);
            }
        }
        let [cuda, ..] = &libraries;
        // Programs that compute need no NVML.
        let are_right = cuda.found && libraries.iter().all(|library| library.found || library.is_missing());
        let others: BTreeSet<String> =
            libraries.iter().flat_map(|library| library.others.iter().cloned()).collect();
        let have_trace = libraries.iter().any(|library| library.found || library.flaw.is_some());
        match (are_right, have_trace) {
            (true, _) => Self::Same,
            (false, true) => Self::Partial(libraries.into_iter().filter_map(Search::lacking).collect()),
            (false, false) if others.is_empty() => Self::Nothing,
            (false, false) => Self::Other(others),
        }
    }
}

/// The search for one library of the driver.
struct Search<'v> {
    prefix: &'static str,
    /// The running version.
    version: &'v str,
    found: bool,
    /// Why the name of the running version cannot be used where it is.
    flaw: Option<Flaw>,
    others: BTreeSet<String>,
}

impl<'v> Search<'v> {
    fn new(prefix: &'static str, version: &'v str) -> Self {
        Self { prefix, version, found: false, flaw: None, others: BTreeSet::new() }
    }

    fn name(&self) -> String {
        format!("{}{}", self.prefix, self.version)
    }

    /// Looks for the running version in one folder.
    fn look(&mut self, root: &Path, folder: &Path) {
        let path = folder.join(self.name());
        let real = resolve(root, &path);
        match real.and_then(|real| fs::metadata(root.join(real)).ok()) {
            Some(facts) if facts.is_file() && facts.len() > 0 => self.found = true,
            Some(_) => self.flaw = Some(Flaw::Empty),
            None if fs::symlink_metadata(root.join(&path)).is_ok() => self.flaw = Some(Flaw::Dangling),
            None => {}
        }
    }

    /// Notes the other versions among these names.
    fn note_versions(&mut self, names: &[String]) {
        let versions = names.iter().filter_map(|name| name.strip_prefix(self.prefix));
        let others = versions.filter(|version| is_version(version) && *version != self.version);
        self.others.extend(others.map(str::to_owned));
    }

    fn is_missing(&self) -> bool {
        !self.found && self.flaw.is_none() && self.others.is_empty()
    }

    /// What is wrong with it, if anything is.
    fn lacking(self) -> Option<UnusableLibrary> {
        let (name, flaw) = (self.name(), self.flaw.unwrap_or(Flaw::Missing));
        (!self.found).then_some(UnusableLibrary { name, flaw, others: self.others })
    }
}

/// Whether the end of a library's name is a version of the driver and not of an interface, such as `1`.
fn is_version(text: &str) -> bool {
    text.contains('.') && text.bytes().all(|byte| byte == b'.' || byte.is_ascii_digit())
}

/// The suffix of the driver's libraries.
fn suffix(version: &str) -> String {
    format!(".so.{version}")
}

fn is_of(path: &Path, suffix: &str) -> bool {
    path.to_string_lossy().ends_with(suffix)
}

/// Loader files, with the paths at which a container's loaders look for them.
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
        let links = same.into_iter().filter(|(name, target)| *target == real && own != name.as_str());
        Library { links: links.map(|(name, _)| name).collect(), file: File { path, real } }
    };
    let versioned = names
        .iter()
        .filter(|name| name.ends_with(&suffix))
        .filter_map(|name| Some((folder.join(name), resolve(root, &folder.join(name))?)));
    // A library with several names is mounted as the target of the links.
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

/// The files that exist, each once under its real path.
fn once_each(root: &Path, paths: impl IntoIterator<Item = PathBuf>) -> Vec<File> {
    let found: BTreeSet<PathBuf> = paths.into_iter().filter_map(|path| resolve(root, &path)).collect();
    found.into_iter().map(|real| File { path: real.clone(), real }).collect()
}

/// The names in a folder, in order.
fn names(root: &Path, folder: &Path) -> Vec<String> {
    let Some(real) = resolve(root, folder) else {
        return Vec::new();
    };
    let entries = fs::read_dir(root.join(real)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Read last: it has folders that the operator configured.
const CACHE: &str = "etc/ld.so.cache";
/// Longest cache that is read. That of a workstation has a few hundred KiB.
const MAX_BYTES: u64 = 8 << 20;
/// The prefix of the CUDA driver library.
const CUDA: &str = "libcuda.so.";

/// Every path that may be searched, below the root.
fn searched_folders() -> impl Iterator<Item = &'static str> {
    COMMON_FOLDERS.into_iter().chain(SPECIAL_FOLDERS).chain([CACHE])
}

/// The folders with libraries, each once under its real path, and the version of the driver: the requested one, otherwise that of the
/// first folder with a driver.
fn find_folders(root: &Path, version: Option<&str>) -> (Vec<PathBuf>, Option<String>) {
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
    let file = fs::File::open(path).ok()?;
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// The version in the name of the CUDA driver library.
fn version_of(root: &Path, folder: &Path) -> Option<String> {
    let names = names(root, folder);
    let mut versions =
        names.iter().filter_map(|name| name.strip_prefix(CUDA)).filter(|version| is_version(version));
    let version = versions.next()?;
    // Two versions are a driver half replaced: the running one is unknown.
    versions.next().is_none().then(|| version.to_owned())
}

#[cfg(test)]
mod tests;
