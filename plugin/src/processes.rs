//! Looks for processes of deleted pods in the control groups. Kubelet frees a force-deleted pod's devices at once, while its
//! process may run on for seconds; the hand-over keeps them apart until this says that it is gone.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::PodUid;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::handover::SharedHandover;

/// Between two looks while somebody is in quarantine. The first look is at once: after a graceful deletion the group is gone.
const LOOK: Duration = Duration::from_millis(250);
/// How long devices stay in quarantine where no control group of any pod can be seen: the default grace period of a pod.
const BLIND: Duration = Duration::from_secs(30);
/// Kubelet's pods lie under `kubepods`, at most this deep below a hierarchy's root (`--cgroup-root`, kind, nested containers).
const DEPTH: usize = 4;

/// What a look at the control groups says of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sight {
    /// It has processes.
    Running,
    /// Pods' groups are there, its own is not, or is empty.
    Gone,
    /// No pod's group can be seen: nothing can be said.
    Blind,
}

/// Watches over the quarantine until `shutdown`.
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
        let looked = tokio::task::spawn_blocking(move || {
            quarantined
                .into_iter()
                .map(|uid| {
                    let sight = look(&root, uid.as_str());
                    (uid, sight)
                })
                .collect::<Vec<_>>()
        });
        for (uid, sight) in looked.await.unwrap_or_default() {
            let began = *since.entry(uid.clone()).or_insert_with(Instant::now);
            debug!(%uid, ?sight, "looked for the processes of a deleted pod");
            match sight {
                Sight::Running => {}
                Sight::Gone => handover.processes_gone(&uid),
                Sight::Blind if began.elapsed() < BLIND => {}
                Sight::Blind => {
                    warn!(%uid, root = %cgroup_root.display(), after = ?BLIND, "no pod's control group can be seen; devices of a deleted pod are freed by time alone");
                    handover.processes_gone(&uid);
                }
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

/// Looks for a pod in every hierarchy: one with version 2, one per controller with version 1.
fn look(root: &Path, uid: &str) -> Sight {
    let hierarchies = if root.join("cgroup.controllers").exists() {
        vec![root.to_owned()]
    } else {
        folders(root).collect()
    };
    let mut sight = Sight::Blind;
    for hierarchy in hierarchies {
        let mut pods = Vec::new();
        find_pods(&hierarchy, DEPTH, &mut pods);
        for kubepods in pods {
            sight = Sight::Gone;
            if find_pod(&kubepods, uid, 2).is_some_and(|pod| is_populated(&pod)) {
                return Sight::Running;
            }
        }
    }
    sight
}

/// Collects the outermost folders that pods lie in: `kubepods` (cgroupfs driver) or `...kubepods.slice` (systemd driver).
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

/// The group of a pod: `pod<uid>`, or `...pod<uid with underscores>.slice`; guaranteed pods lie one level higher than others.
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

/// Whether a group or one below it has a process. A group that goes away meanwhile has none.
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
    fn a_process_is_found_under_version_1_and_cgroupfs() {
        let container = format!("pids/kubepods/besteffort/pod{UID}/abc/cgroup.procs");
        let root = tree(&[(&container, "17\n"), ("memory/kubepods/cgroup.procs", "")]);
        assert_eq!(look(root.path(), UID), Sight::Running);
        fs::write(root.path().join(&container), "").unwrap();
        assert_eq!(look(root.path(), UID), Sight::Gone);
    }

    #[test]
    fn a_process_is_found_under_version_2_and_systemd() {
        let pod = format!(
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice",
            UID.replace('-', "_")
        );
        let events = format!("{pod}/cgroup.events");
        let root = tree(&[
            ("cgroup.controllers", "pids"),
            (&events, "populated 1\nfrozen 0\n"),
        ]);
        assert_eq!(look(root.path(), UID), Sight::Running);
        fs::write(root.path().join(&events), "populated 0\nfrozen 0\n").unwrap();
        assert_eq!(look(root.path(), UID), Sight::Gone);
    }

    #[test]
    fn kubelets_own_root_and_nested_slices_are_searched() {
        let nested = format!(
            "system.slice/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{}.slice/cgroup.events",
            UID.replace('-', "_")
        );
        let root = tree(&[("cgroup.controllers", "pids"), (&nested, "populated 1\n")]);
        assert_eq!(look(root.path(), UID), Sight::Running);
        let root = tree(&[(&format!("cpu/node-2/kubepods/pod{UID}/cgroup.procs"), "9\n")]);
        assert_eq!(look(root.path(), UID), Sight::Running);
    }

    #[test]
    fn a_pod_without_a_group_among_others_is_gone() {
        let root = tree(&[("pids/kubepods/burstable/podother/cgroup.procs", "17\n")]);
        assert_eq!(look(root.path(), UID), Sight::Gone);
    }

    #[test]
    fn where_no_pod_has_a_group_nothing_is_known() {
        let root = tree(&[("pids/user/cgroup.procs", "17\n")]);
        assert_eq!(look(root.path(), UID), Sight::Blind);
        assert_eq!(look(Path::new("/does/not/exist"), UID), Sight::Blind);
    }
}
