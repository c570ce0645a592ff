//! Whether this machine can run pods, and the system packages that the test bed borrows.
//! It only looks and installs packages; it starts nothing of the cluster.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{Error, Result};

/// Why no cluster can run on this machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this machine cannot run pods: {0}")]
pub struct Unsupported(pub String);

/// A program the cluster needs, where it may lie, and the Debian package that has it.
const NEEDED: [(&str, &str, &str); 6] = [
    ("runc", "/usr/sbin/runc", "runc"),
    ("bridge (CNI)", "/usr/lib/cni/bridge", "containernetworking-plugins"),
    ("busybox", "/bin/busybox", "busybox-static"),
    ("iptables", "/usr/sbin/iptables", "iptables"),
    ("ip", "/usr/sbin/ip", "iproute2"),
    ("unshare", "/usr/bin/unshare", "util-linux"),
];

/// Where the CNI plugins lie.
pub(crate) const CNI_PLUGINS: &str = "/usr/lib/cni";
/// The container runtime's path.
pub(crate) const RUNC: &str = "/usr/sbin/runc";
/// The statically linked busybox that becomes the pods' image.
pub(crate) const BUSYBOX: &str = "/bin/busybox";

/// Checks whether this machine can run pods: root, namespaces, mounts, cgroups, Go.
///
/// # Errors
/// [`Unsupported`] names the first missing requirement.
pub fn supported() -> std::result::Result<(), Unsupported> {
    let no = |why: &str| Err(Unsupported(why.to_owned()));
    if !cfg!(target_os = "linux") {
        return no("not Linux");
    }
    if !rustix::process::geteuid().is_root() {
        return no("not root, which mounts and network namespaces need");
    }
    if !missing().is_empty() && !Path::new("/usr/bin/apt-get").exists() {
        return Err(Unsupported(format!("{} missing, and no apt-get to install it", missing().join(", "))));
    }
    let go = Command::new("go").arg("version").stdin(Stdio::null()).stdout(Stdio::null()).status();
    if !go.is_ok_and(|status| status.success()) {
        return no("no Go toolchain to build Kubernetes with");
    }
    let namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc"];
    let trial = "mount -t tmpfs none /run && ip link add gantry0 type bridge && ip link add v0 type veth peer name v1";
    let output = Command::new("unshare").args(namespaces).args(["/bin/sh", "-c", trial]).output();
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr);
            return Err(Unsupported(format!("no mounts or bridges in new namespaces: {}", why.trim())));
        }
        Err(source) => return Err(Unsupported(format!("unshare: {source}"))),
    }
    if hierarchies().is_empty() {
        return no("no writable cgroup hierarchy under /sys/fs/cgroup");
    }
    Ok(())
}

/// Installs the missing system packages.
///
/// # Errors
/// Names the package that could not be installed, and why.
pub(crate) fn install_missing() -> Result<()> {
    match missing() {
        missing if missing.is_empty() => Ok(()),
        missing => install(&missing),
    }
}

/// Installs packages of the system.
///
/// # Errors
/// Names the package that could not be installed, and why.
pub(crate) fn install(missing: &[&str]) -> Result<()> {
    eprint_line(&format!("installing {}", missing.join(", ")));
    let mut update = Command::new("apt-get");
    update.args(["update", "--quiet=2"]);
    let mut install = Command::new("apt-get");
    install
        .args(["install", "--quiet=2", "--yes", "--no-install-recommends"])
        .args(missing)
        .env("DEBIAN_FRONTEND", "noninteractive");
    for mut command in [update, install] {
        let output = command.output().map_err(|source| Error::Start { program: "apt-get".into(), source })?;
        if !output.status.success() {
            return Err(Error::Command {
                command: format!("{command:?}"),
                status: output.status,
                stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            });
        }
    }
    Ok(())
}

/// The mounted cgroup hierarchies a node gets a group in: every version 1 controller, or the unified one.
pub(crate) fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root.to_path_buf()];
    }
    let Ok(entries) = std::fs::read_dir(root) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| !path.is_symlink() && path.join("cgroup.procs").exists())
        .collect();
    found.sort();
    found
}

fn missing() -> Vec<&'static str> {
    NEEDED.iter().filter(|(_, path, _)| !Path::new(path).exists()).map(|(_, _, package)| *package).collect()
}

/// Prints progress to the terminal.
#[allow(clippy::print_stderr, reason = "progress of a command that takes minutes")]
pub(crate) fn eprint_line(line: &str) {
    eprintln!("{line}");
}
