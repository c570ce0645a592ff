//! A snapshot of the device nodes that exist, so that no call of kubelet reads a file.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::{fmt, fs};

use rustix::fs::{major, minor};

/// Nodes that every GPU container needs if they exist: the control device, unified memory, mode setting.
const CONTROL: [&str; 4] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];
/// The only import/export memory channel that NVIDIA's plugin uses.
pub(crate) const IMEX_CHANNEL: &str = "nvidia-caps-imex-channels/channel0";
/// Folders of `/dev` with device nodes of GPUs.
const FOLDERS: [&str; 4] = ["nvidia-caps", "nvidia-caps-imex-channels", "infiniband", "dri"];

/// The device nodes of GPUs and related devices, by their names under `/dev`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nodes {
    nodes: BTreeMap<String, Facts>,
    /// Major numbers of NVIDIA's drivers, by the name in `/proc/devices`; empty if unknown.
    majors: BTreeMap<String, u32>,
}

/// Why a node does not lead to its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeFlaw {
    /// There is no node of this name.
    Missing,
    /// It is a file of another type.
    NotDevice,
    /// The kernel has no driver of this name.
    NoDriver(&'static str),
    /// It has the numbers of another device.
    OtherNumbers { found: (u32, u32), expected: (u32, u32) },
}

impl fmt::Display for NodeFlaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("is missing on the node"),
            Self::NotDevice => f.write_str("is no character device on the node"),
            Self::NoDriver(driver) => {
                write!(f, "has no driver on the node: /proc/devices does not list {driver}")
            }
            Self::OtherNumbers { found, expected } => write!(
                f,
                "is the device {}:{} on the node and not {}:{}, which the driver has",
                found.0, found.1, expected.0, expected.1
            ),
        }
    }
}

/// The properties of a device node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Major and minor number; `None` if it is no character device, as in a simulated machine.
    pub numbers: Option<(u32, u32)>,
    /// Permission bits.
    pub mode: u32,
    /// Owning group.
    pub gid: u32,
}

impl Nodes {
    /// The nodes under these directories. The first directory with a name counts; an unreadable one has none.
    pub fn read(directories: &[&Path]) -> Self {
        let mut nodes = BTreeMap::new();
        for directory in directories {
            add(&mut nodes, directory, "", |name| name.starts_with("nvidia") || name == "gdrdrv");
            for folder in FOLDERS {
                add(&mut nodes, &directory.join(folder), &format!("{folder}/"), |_| true);
            }
        }
        Self { nodes, majors: BTreeMap::new() }
    }

    /// With the major numbers of the drivers; `proc` is where this process sees `/proc`.
    #[must_use]
    pub fn with_majors(self, proc: &Path) -> Self {
        let list = fs::read_to_string(proc.join("devices")).unwrap_or_default();
        Self { majors: majors(&list), ..self }
    }

    /// The properties of one node.
    pub fn get(&self, name: &str) -> Option<&Facts> {
        self.nodes.get(name)
    }

    /// Whether a node of this name exists.
    pub fn has(&self, name: &str) -> bool {
        self.nodes.contains_key(name)
    }

    /// Why a container could not use the node of this name.
    pub fn flaw(&self, name: &str) -> Option<NodeFlaw> {
        let Some(facts) = self.get(name) else {
            return Some(NodeFlaw::Missing);
        };
        let (drivers, expected_minor) = driver_of(name)?;
        let Some((major, minor)) = facts.numbers else {
            // A simulated machine has files in place of all nodes.
            let mut others = self.nodes.iter().filter(|(name, _)| name.starts_with("nvidia"));
            return others.any(|(_, facts)| facts.numbers.is_some()).then_some(NodeFlaw::NotDevice);
        };
        let expected_major = drivers.iter().find_map(|driver| self.majors.get(*driver).copied());
        match (expected_major, drivers) {
            // A driver with one name is listed under it whenever its module is loaded.
            (None, [driver]) if !self.majors.is_empty() => Some(NodeFlaw::NoDriver(driver)),
            _ => {
                let (found, expected) = ((major, minor), (expected_major.unwrap_or(major), expected_minor));
                (found != expected).then_some(NodeFlaw::OtherNumbers { found, expected })
            }
        }
    }

    /// The control nodes that exist.
    pub fn control(&self) -> impl Iterator<Item = &'static str> + '_ {
        CONTROL.into_iter().filter(|name| self.has(name))
    }

    /// Whether an import/export memory channel exists.
    pub fn has_imex_channel(&self) -> bool {
        self.has(IMEX_CHANNEL)
    }

    /// The nodes with names that begin with `prefix`.
    pub fn starting(&self, prefix: &'static str) -> impl Iterator<Item = &str> {
        self.nodes
            .range(prefix.to_owned()..)
            .map(|(name, _)| name.as_str())
            .take_while(move |name| name.starts_with(prefix))
    }
}

impl FromIterator<(String, Facts)> for Nodes {
    fn from_iter<I: IntoIterator<Item = (String, Facts)>>(nodes: I) -> Self {
        Self { nodes: nodes.into_iter().collect(), majors: BTreeMap::new() }
    }
}

/// The names that the driver of a node has in `/proc/devices`, by version of the driver, and the node's minor number.
fn driver_of(name: &str) -> Option<(&'static [&'static str], u32)> {
    const OF_GPUS: &[&str] = &["nvidia", "nvidia-frontend"];
    const CONTROL_MINOR: u32 = 255;
    match name {
        "nvidiactl" => Some((&["nvidiactl", "nvidia", "nvidia-frontend"], CONTROL_MINOR)),
        "nvidia-uvm" => Some((&["nvidia-uvm"], 0)),
        _ => match name.strip_prefix("nvidia-caps/nvidia-cap") {
            Some(minor) => Some((&["nvidia-caps"], minor.parse().ok()?)),
            None => Some((OF_GPUS, name.strip_prefix("nvidia")?.parse().ok()?)),
        },
    }
}

/// The character devices of NVIDIA's drivers in `/proc/devices`.
fn majors(list: &str) -> BTreeMap<String, u32> {
    let characters = list.lines().take_while(|line| !line.starts_with("Block devices"));
    characters
        .filter_map(|line| line.trim().split_once(' '))
        .filter(|(_, name)| name.starts_with("nvidia"))
        .filter_map(|(major, name)| Some((name.to_owned(), major.parse().ok()?)))
        .collect()
}

fn add(nodes: &mut BTreeMap<String, Facts>, directory: &Path, prefix: &str, wanted: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let Some(name) = entry.file_name().to_str().filter(|name| wanted(name)).map(str::to_owned) else {
            continue;
        };
        if let Ok(metadata) = fs::metadata(entry.path())
            && !metadata.is_dir()
        {
            let number = metadata.rdev();
            let facts = Facts {
                numbers: metadata.file_type().is_char_device().then(|| (major(number), minor(number))),
                mode: metadata.mode() & 0o777,
                gid: metadata.gid(),
            };
            nodes.entry(format!("{prefix}{name}")).or_insert(facts);
        }
    }
}

/// Name of a GPU's own node.
pub(crate) fn gpu_node(minor: u32) -> String {
    format!("nvidia{minor}")
}

/// Name of the node of a GPU instance or compute instance.
pub(crate) fn capability_node(minor: u32) -> String {
    format!("nvidia-caps/nvidia-cap{minor}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_read_from_folders_and_first_directory_counts() {
        let (own, driver) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let touch = |root: &tempfile::TempDir, name: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        for name in ["nvidiactl", "null", "infiniband/uverbs0", "infiniband/uverbs10"] {
            touch(&own, name);
        }
        for name in ["nvidia-uvm", "nvidia-caps/nvidia-cap3", IMEX_CHANNEL] {
            touch(&driver, name);
        }
        let nodes = Nodes::read(&[own.path(), driver.path(), Path::new("/nowhere")]);
        assert_eq!(nodes.control().collect::<Vec<_>>(), ["nvidiactl", "nvidia-uvm"]);
        assert!(nodes.has(&capability_node(3)) && nodes.has_imex_channel());
        assert!(!nodes.has("null") && !nodes.has("nvidia-caps"));
        assert_eq!(
            nodes.starting("infiniband/uverbs").collect::<Vec<_>>(),
            ["infiniband/uverbs0", "infiniband/uverbs10"]
        );
        assert_eq!(nodes.get("nvidiactl").unwrap().numbers, None);
    }

    #[test]
    fn character_device_has_its_numbers() {
        let mut found = BTreeMap::new();
        add(&mut found, Path::new("/dev"), "", |name| name == "null");
        assert_eq!(found["null"].numbers, Some((1, 3)));
    }

    /// A stale node, a file that a container created in the place of a node, a module that was unloaded.
    #[test]
    fn node_that_is_not_its_device_has_a_flaw() {
        let character = |numbers| Facts { numbers, mode: 0o666, gid: 0 };
        let nodes = |majors: &str, nodes: &[(&str, Option<(u32, u32)>)]| Nodes {
            nodes: nodes.iter().map(|(name, numbers)| ((*name).to_owned(), character(*numbers))).collect(),
            majors: super::majors(majors),
        };
        const LISTS: [&str; 2] = [
            "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n511 nvidia-uvm\n509 nvidia-caps\n",
            "Character devices:\n195 nvidia-frontend\n511 nvidia-uvm\n509 nvidia-caps\n\nBlock devices:\n7 nvidia-uvm\n",
        ];
        let cap = "nvidia-caps/nvidia-cap12";
        let right = [
            ("nvidiactl", Some((195, 255))),
            ("nvidia-uvm", Some((511, 0))),
            ("nvidia2", Some((195, 2))),
            (cap, Some((509, 12))),
        ];
        for list in LISTS.into_iter().chain([""]) {
            let nodes = nodes(list, &right);
            assert!(right.iter().all(|(name, _)| nodes.flaw(name).is_none()), "{list}");
            assert_eq!(nodes.flaw("nvidia3"), Some(NodeFlaw::Missing));
        }
        let wrong = |name: &str, numbers| {
            let mut with = right.to_vec();
            with.retain(|(known, _)| *known != name);
            with.push((name, numbers));
            nodes(LISTS[0], &with).flaw(name).map(|flaw| flaw.to_string()).unwrap_or_default()
        };
        insta::assert_snapshot!(wrong("nvidia-uvm", None), @"is no character device on the node");
        insta::assert_snapshot!(wrong("nvidia-uvm", Some((499, 0))), @"is the device 499:0 on the node and not 511:0, which the driver has");
        insta::assert_snapshot!(wrong("nvidia2", Some((195, 3))), @"is the device 195:3 on the node and not 195:2, which the driver has");
        insta::assert_snapshot!(wrong(cap, Some((509, 13))), @"is the device 509:13 on the node and not 509:12, which the driver has");
        let unloaded = nodes("Character devices:\n195 nvidia\n", &right);
        assert_eq!(unloaded.flaw("nvidia-uvm"), Some(NodeFlaw::NoDriver("nvidia-uvm")));
        assert_eq!(unloaded.flaw("nvidia2"), None);
        let simulated = nodes(LISTS[0], &[("nvidiactl", None), ("nvidia-uvm", None)]);
        assert_eq!(simulated.flaw("nvidia-uvm"), None);
    }
}
