//! A snapshot of the device nodes that exist, so that no call of kubelet reads a file.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{major, minor};

/// Nodes that every GPU container needs if they exist: the control device, unified memory, mode setting.
const CONTROL: [&str; 4] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];
/// The only import/export memory channel that NVIDIA's plugin uses.
pub(crate) const IMEX_CHANNEL: &str = "nvidia-caps-imex-channels/channel0";
/// Folders of `/dev` with device nodes of GPUs.
const FOLDERS: [&str; 4] = ["nvidia-caps", "nvidia-caps-imex-channels", "infiniband", "dri"];

/// The device nodes of GPUs and related devices, by their names under `/dev`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nodes(BTreeMap<String, Facts>);

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
        Self(nodes)
    }

    /// The properties of one node.
    pub fn get(&self, name: &str) -> Option<&Facts> {
        self.0.get(name)
    }

    /// Whether a node of this name exists.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
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
        self.0
            .range(prefix.to_owned()..)
            .map(|(name, _)| name.as_str())
            .take_while(move |name| name.starts_with(prefix))
    }
}

impl FromIterator<(String, Facts)> for Nodes {
    fn from_iter<I: IntoIterator<Item = (String, Facts)>>(nodes: I) -> Self {
        Self(nodes.into_iter().collect())
    }
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
}
