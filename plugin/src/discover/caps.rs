//! Capability nodes of MIG instances: which `/dev/nvidia-caps/nvidia-capN` opens which instance. The driver
//! publishes the minor numbers in `/proc`, in one file or in one file per instance.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::InstanceAt;

/// Minor numbers of capability nodes.
#[derive(Debug, Default)]
pub(super) struct Caps {
    /// By access file as in `mig-minors`, e.g. `gpu0/gi2/ci0/access`.
    minors: BTreeMap<String, u32>,
    /// `/proc/driver/nvidia/capabilities`.
    folder: PathBuf,
}

impl Caps {
    pub(super) fn at(proc_root: &Path) -> Self {
        let driver = proc_root.join("driver");
        let listed = fs::read_to_string(driver.join("nvidia-caps/mig-minors")).unwrap_or_default();
        Self { minors: parse_list(&listed), folder: driver.join("nvidia/capabilities") }
    }

    /// The minor numbers of a GPU instance and one of its compute instances; `None` unless both are known.
    pub(super) fn of(&self, at: InstanceAt) -> Option<[u32; 2]> {
        let InstanceAt { gpu_minor: gpu, gpu_instance: gi, compute_instance: ci } = at;
        let of_gi = self.minor(&format!("gpu{gpu}/gi{gi}/access"), &format!("gpu{gpu}/mig/gi{gi}/access"))?;
        let of_ci = self.minor(
            &format!("gpu{gpu}/gi{gi}/ci{ci}/access"),
            &format!("gpu{gpu}/mig/gi{gi}/ci{ci}/access"),
        )?;
        Some([of_gi, of_ci])
    }

    fn minor(&self, name: &str, file: &str) -> Option<u32> {
        let own = || {
            let text = fs::read_to_string(self.folder.join(file)).ok()?;
            parse_own(&text)
        };
        self.minors.get(name).copied().or_else(own)
    }
}

/// `mig-minors`: a name and a number per line.
fn parse_list(text: &str) -> BTreeMap<String, u32> {
    text.lines()
        .filter_map(|line| {
            let (name, minor) = line.trim().rsplit_once(' ')?;
            Some((name.trim().to_owned(), minor.parse().ok()?))
        })
        .collect()
}

/// An `access` file: contains the line `DeviceFileMinor: 30`.
fn parse_own(text: &str) -> Option<u32> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == "DeviceFileMinor")
        .and_then(|(_, minor)| minor.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(gpu_minor: u32, gpu_instance: u32, compute_instance: u32) -> InstanceAt {
        InstanceAt { gpu_minor, gpu_instance, compute_instance }
    }

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join("driver").join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn minors_are_read_from_list() {
        let root = tempfile::tempdir().unwrap();
        let list = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu3/gi1/access 417\n";
        write(root.path(), "nvidia-caps/mig-minors", list);
        let caps = Caps::at(root.path());
        assert_eq!(caps.of(at(0, 1, 0)), Some([12, 13]));
        assert_eq!(caps.of(at(0, 1, 1)), None, "no such compute instance");
        assert_eq!(caps.of(at(3, 1, 0)), None, "half a pair opens nothing");
    }

    #[test]
    fn minors_are_read_per_instance_without_list() {
        let root = tempfile::tempdir().unwrap();
        let access =
            |minor: u32| format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
        write(root.path(), "nvidia/capabilities/gpu2/mig/gi7/access", &access(66));
        write(root.path(), "nvidia/capabilities/gpu2/mig/gi7/ci0/access", &access(67));
        let caps = Caps::at(root.path());
        assert_eq!(caps.of(at(2, 7, 0)), Some([66, 67]));
        assert_eq!(Caps::at(Path::new("/nonexistent")).of(at(2, 7, 0)), None);
    }
}
