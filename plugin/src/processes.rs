//! Looks for processes of deleted pods in the control groups. Kubelet frees the devices of a force-deleted pod
//! at once, but its processes may run for seconds more. The hand-over keeps these devices in quarantine until
//! the processes are gone.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::PodUid;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::handover::SharedHandover;

/// Interval of scans while a pod is in quarantine. The first scan is immediate: after a graceful deletion the
/// group is already gone.
const SCAN_INTERVAL: Duration = Duration::from_millis(250);
/// How long devices stay in quarantine if no pod's control group is visible: the default grace period of a pod.
const UNKNOWN_TIMEOUT: Duration = Duration::from_secs(30);
/// Pod groups are below `kubepods`, at most this deep below a hierarchy's root (`--cgroup-root`, kind, nested
/// containers).
const MAX_DEPTH: usize = 4;

/// Result of scanning the control groups for one pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessState {
    /// The pod has processes.
    Running,
    /// Other pods have groups; this pod's group is missing or empty.
    Gone,
    /// No pod's group is visible, so nothing is known.
    Unknown,
}

/// Scans for the pods in quarantine until `shutdown`.
pub(crate) async fn watch(cgroup_root: PathBuf, handover: Arc<SharedHandover>, shutdown: CancellationToken) {
    let mut changes = handover.changes();
    let mut since: BTreeMap<PodUid, Instant> = BTreeMap::new();
    loop {
        changes.mark_unchanged();
        let quarantined = handover.quarantined();
        since.retain(|uid, _| quarantined.contains(uid));
        if quarantined.is_empty() {
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = changes.changed() => if changed.is_err() { return },
            }
            continue;
        }
        let root = cgroup_root.clone();
        let scanned = tokio::task::spawn_blocking(move || {
            quarantined
                .into_iter()
                .map(|uid| {
                    let state = scan(&root, uid.as_str());
                    (uid, state)
                })
                .collect::<Vec<_>>()
        });
        for (uid, state) in scanned.await.unwrap_or_default() {
            let began = *since.entry(uid.clone()).or_insert_with(Instant::now);
            debug!(%uid, ?state, "scanned for the processes of a deleted pod");
            match state {
                ProcessState::Running => {}
                ProcessState::Gone => handover.processes_gone(&uid),
                ProcessState::Unknown if began.elapsed() < UNKNOWN_TIMEOUT => {}
                ProcessState::Unknown => {
                    warn!(%uid, root = %cgroup_root.display(), after = ?UNKNOWN_TIMEOUT, "no pod's control group is visible: devices of a deleted pod are freed after a fixed time; check --cgroup-root");
                    handover.processes_gone(&uid);
                }
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(SCAN_INTERVAL) => {}
        }
    }
}

/// Looks for a pod in every hierarchy: one in version 2, one per controller in version 1.
fn scan(root: &Path, uid: &str) -> ProcessState {
    let hierarchies = if root.join("cgroup.controllers").exists() {
        vec![root.to_owned()]
    } else {
        folders(root).collect()
    };
    let mut state = ProcessState::Unknown;
    for hierarchy in hierarchies {
        let mut pods = Vec::new();
        find_pods(&hierarchy, MAX_DEPTH, &mut pods);
        for kubepods in pods {
            state = ProcessState::Gone;
            if find_pod(&kubepods, uid, 2).is_some_and(|pod| is_populated(&pod)) {
                return ProcessState::Running;
            }
        }
    }
    state
}

/// Collects the outermost folders of pod groups: `kubepods` (cgroupfs driver) or `...kubepods.slice` (systemd
/// driver).
fn find_pods(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    for child in folders(folder) {
        let name = child.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with("kubepods") || name.ends_with("kubepods.slice") {
            found.push(child);
        } else if depth > 1 && !name.ends_with(".service") && !name.ends_with(".scope") {
            find_pods(&child, depth - 1, found);
        }
    }
}

/// The group of a pod: `pod<uid>`, or `...pod<uid with underscores>.slice`. Guaranteed pods are one level
/// higher than others.
fn find_pod(folder: &Path, uid: &str, depth: usize) -> Option<PathBuf> {
    let cgroupfs = format!("pod{uid}");
    let systemd = format!("pod{}.slice", uid.replace('-', "_"));
    let children: Vec<PathBuf> = folders(folder).collect();
    let is_pod = |child: &&PathBuf| {
        let name = child.file_name().unwrap_or_default().to_string_lossy();
        name == cgroupfs || name.ends_with(&systemd)
    };
    if let Some(pod) = children.iter().find(is_pod) {
        return Some(pod.clone());
    }
    if depth <= 1 {
        return None;
    }
    children.iter().find_map(|child| find_pod(child, uid, depth - 1))
}

/// Whether a group or one of its descendants has a process. A group that disappears meanwhile has none.
fn is_populated(group: &Path) -> bool {
    if let Ok(events) = fs::read_to_string(group.join("cgroup.events")) {
        return events.lines().any(|line| line.trim() == "populated 1");
    }
    let own =
        fs::read_to_string(group.join("cgroup.procs")).is_ok_and(|processes| !processes.trim().is_empty());
    own || folders(group).any(|child| is_populated(&child))
}

fn folders(folder: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0c9a1f6e-1111-2222-3333-444455556666";

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    #[test]
    fn process_is_found_with_cgroup_v1_and_cgroupfs() {
        let container = format!("pids/kubepods/besteffort/pod{UID}/abc/cgroup.procs");
        let root = tree(&[(&container, "17\n"), ("memory/kubepods/cgroup.procs", "")]);
        assert_eq!(scan(root.path(), UID), ProcessState::Running);
        fs::write(root.path().join(&container), "").unwrap();
        assert_eq!(scan(root.path(), UID), ProcessState::Gone);
    }

    #[test]
    fn process_is_found_with_cgroup_v2_and_systemd() {
        let pod = format!(
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice",
            UID.replace('-', "_")
        );
        let events = format!("{pod}/cgroup.events");
        let root = tree(&[("cgroup.controllers", "pids"), (&events, "populated 1\nfrozen 0\n")]);
        assert_eq!(scan(root.path(), UID), ProcessState::Running);
        fs::write(root.path().join(&events), "populated 0\nfrozen 0\n").unwrap();
        assert_eq!(scan(root.path(), UID), ProcessState::Gone);
    }

    #[test]
    fn kubelet_root_and_nested_slices_are_searched() {
        let nested = format!(
            "system.slice/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{}.slice/cgroup.events",
            UID.replace('-', "_")
        );
        let root = tree(&[("cgroup.controllers", "pids"), (&nested, "populated 1\n")]);
        assert_eq!(scan(root.path(), UID), ProcessState::Running);
        let root = tree(&[(&format!("cpu/node-2/kubepods/pod{UID}/cgroup.procs"), "9\n")]);
        assert_eq!(scan(root.path(), UID), ProcessState::Running);
    }

    #[test]
    fn pod_without_group_is_gone_if_others_have_one() {
        let root = tree(&[("pids/kubepods/burstable/podother/cgroup.procs", "17\n")]);
        assert_eq!(scan(root.path(), UID), ProcessState::Gone);
    }

    #[test]
    fn no_pod_group_gives_unknown() {
        let root = tree(&[("pids/user/cgroup.procs", "17\n")]);
        assert_eq!(scan(root.path(), UID), ProcessState::Unknown);
        assert_eq!(scan(Path::new("/does/not/exist"), UID), ProcessState::Unknown);
    }
}
