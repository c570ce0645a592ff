//! The cgroups that the nodes' kubelets put their pods in, one group per node in every hierarchy.
//! They are the only things a cluster makes outside its folder and its namespaces.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::file;
use crate::host::hierarchies;
use crate::wait::until;
use crate::{Error, Result};

/// Makes `/<cluster>/<node>` in every hierarchy and returns that path.
pub(super) fn create(cluster: &str, node: &str) -> Result<String> {
    for hierarchy in hierarchies() {
        let mut parent = hierarchy;
        for part in [cluster, node] {
            let group = parent.join(part);
            fs::create_dir_all(&group).map_err(file("create", &group))?;
            inherit_cpuset(&parent, &group)?;
            parent = group;
        }
    }
    Ok(format!("/{cluster}/{node}"))
}

/// Removes the cluster's groups, once the processes in them are gone.
pub(super) async fn remove(cluster: &str) -> Result<()> {
    for hierarchy in hierarchies() {
        let group = hierarchy.join(cluster);
        if !group.exists() {
            continue;
        }
        // A killed process stays in its group until the kernel has let go of its memory.
        until(format!("removal of {}", group.display()), Duration::from_secs(20), async || {
            remove_tree(&group)
        })
        .await?;
    }
    Ok(())
}

/// A new cpuset group of version 1 is empty, and takes no process until it is filled.
fn inherit_cpuset(parent: &Path, group: &Path) -> Result<()> {
    for name in ["cpuset.cpus", "cpuset.mems"] {
        let (from, to) = (parent.join(name), group.join(name));
        if let (Ok(wanted), Ok(present)) = (fs::read_to_string(&from), fs::read_to_string(&to))
            && present.trim().is_empty()
        {
            fs::write(&to, wanted).map_err(file("write", &to))?;
        }
    }
    Ok(())
}

fn remove_tree(group: &Path) -> std::result::Result<(), Error> {
    let read = |group: &PathBuf| fs::read_dir(group).map_err(file("read", group));
    let path = group.to_path_buf();
    for entry in read(&path)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(group).map_err(file("remove", group))
}
