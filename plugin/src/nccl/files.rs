//! The topology files on disk: one for each set of GPUs that a container holds. Kubelet mounts them, also when it starts
//! a container again, so a file stays as long as a container holds its GPUs.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::Topology;
use crate::allocate::Access;
use crate::cdi::replace;
use crate::handover::Listing;
use crate::inventory::Inventory;

/// Shortest life of a file: kubelet lists a container some time after it was allocated, and init containers never.
const LEAST_AGE: Duration = Duration::from_hours(1);
/// Files that are kept at most in addition to those of listed containers.
const MOST_UNLISTED: usize = 256;
/// Interval for looking at the files without a change.
const PERIOD: Duration = Duration::from_mins(1);

const PREFIX: &str = "gpus-";
const SUFFIX: &str = ".xml";

/// The folder with the files, under the same path on the host and in this process.
#[derive(Debug, Clone)]
pub struct TopologyFiles {
    root: PathBuf,
}

impl TopologyFiles {
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Path of the file of some GPUs.
    pub fn path(&self, gpus: &BTreeSet<u8>) -> PathBuf {
        let indices: Vec<String> = gpus.iter().map(u8::to_string).collect();
        self.root.join(format!("{PREFIX}{}{SUFFIX}", indices.join("-")))
    }

    /// Writes the file of some GPUs, and renews its age. `None` if their positions are unknown.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, topology: &Topology, gpus: &BTreeSet<u8>) -> io::Result<Option<PathBuf>> {
        let Some(text) = topology.xml(gpus) else {
            return Ok(None);
        };
        let path = self.path(gpus);
        if fs::read(&path).is_ok_and(|there| there == text.as_bytes()) {
            fs::File::options().write(true).open(&path)?.set_modified(SystemTime::now())?;
        } else {
            fs::create_dir_all(&self.root)?;
            replace(&path, &text)?;
        }
        Ok(Some(path))
    }

    /// Removes the files of GPUs that no listed container holds together, once they are old or too many.
    pub fn tidy(&self, held: &BTreeSet<BTreeSet<u8>>, now: SystemTime) {
        let kept: BTreeSet<PathBuf> = held.iter().map(|gpus| self.path(gpus)).collect();
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let ours = entries.map(|entry| entry.path()).filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(PREFIX) && name.ends_with(SUFFIX) && !kept.contains(path)
        });
        let age = |path: &Path| {
            let written = fs::metadata(path).and_then(|facts| facts.modified()).ok();
            written.and_then(|written| now.duration_since(written).ok()).unwrap_or_default()
        };
        let mut ours: Vec<(Duration, PathBuf)> = ours.map(|path| (age(&path), path)).collect();
        ours.sort();
        for (position, (age, path)) in ours.iter().enumerate() {
            if *age < LEAST_AGE && position < MOST_UNLISTED {
                continue;
            }
            match fs::remove_file(path) {
                Ok(()) => debug!(path = %path.display(), "NCCL topology file removed"),
                Err(error) => {
                    warn!(path = %path.display(), %error, "an NCCL topology file cannot be removed");
                }
            }
        }
    }
}

/// The sets of whole GPUs that containers hold.
fn held(inventory: &Inventory, listing: &Listing) -> BTreeSet<BTreeSet<u8>> {
    let of = |ids: &BTreeSet<gantry_api::DeviceId>| {
        Topology::gpus(inventory.devices.iter().filter(|device| ids.contains(&device.id)))
    };
    listing.0.values().map(of).filter(|gpus| !gpus.is_empty()).collect()
}

/// Keeps the files of the containers that kubelet lists, and writes those that are missing, as after a restart of the
/// node. `listings` are kubelet's; the first value is none.
pub async fn maintain(
    files: TopologyFiles,
    mut listings: watch::Receiver<Listing>,
    inventory: watch::Receiver<Arc<Inventory>>,
    access: watch::Receiver<Arc<Access>>,
    shutdown: CancellationToken,
) {
    let mut is_listed = false;
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = listings.changed() => match changed {
                Ok(()) => is_listed = true,
                Err(_) => return,
            },
            () = tokio::time::sleep(PERIOD) => {}
        }
        if !is_listed {
            continue;
        }
        let held = held(&inventory.borrow(), &listings.borrow_and_update());
        let topology = access.borrow().topology.clone();
        let files = files.clone();
        let work = move || {
            let missing = held.iter().filter(|gpus| !files.path(gpus).exists());
            for (gpus, topology) in missing.zip(std::iter::repeat(topology.as_ref())) {
                let Some(topology) = topology else { break };
                if let Err(error) = files.write(topology, gpus) {
                    warn!(path = %files.path(gpus).display(), %error, "an NCCL topology file cannot be written again");
                }
            }
            files.tidy(&held, SystemTime::now());
        };
        // It fails only when the runtime ends.
        let _ = tokio::task::spawn_blocking(work).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(root: &Path) -> Vec<String> {
        let entries = fs::read_dir(root).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Files of held sets stay whatever their age; others for an hour, and no more than the limit.
    #[test]
    fn unheld_files_are_removed_when_old_or_too_many() {
        let folder = tempfile::tempdir().unwrap();
        let files = TopologyFiles::at(folder.path());
        let set = |gpus: &[u8]| gpus.iter().copied().collect::<BTreeSet<u8>>();
        for gpus in [&[0, 1][..], &[2], &[10]] {
            fs::write(files.path(&set(gpus)), "").unwrap();
        }
        fs::write(folder.path().join("other.xml"), "").unwrap();
        let held = BTreeSet::from([set(&[0, 1])]);
        files.tidy(&held, SystemTime::now());
        assert_eq!(names(folder.path()), ["gpus-0-1.xml", "gpus-10.xml", "gpus-2.xml", "other.xml"]);
        files.tidy(&held, SystemTime::now() + LEAST_AGE);
        assert_eq!(names(folder.path()), ["gpus-0-1.xml", "other.xml"]);
        for gpus in 0..=u8::MAX {
            for pair in [set(&[gpus]), set(&[gpus, 100, 101])] {
                fs::write(files.path(&pair), "").unwrap();
            }
        }
        files.tidy(&held, SystemTime::now());
        assert_eq!(names(folder.path()).len(), MOST_UNLISTED + 2);
    }
}
