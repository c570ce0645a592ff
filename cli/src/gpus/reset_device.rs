//! `gantry reset-device`: what the pod of `gantry reset gpu` does on the node. Runs the driver's own nvidia-smi in the driver's
//! root; if that fails, reports the processes that have a GPU open.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use clap::Args;
use gantry_topology::GpuUuid;

use crate::runtime::print;
use crate::visible::Visible;

/// Where nvidia-smi is searched in the driver's root.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Processes that an error names.
const SHOWN: usize = 8;

/// Options of `gantry reset-device`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ResetDeviceArgs {
    /// The driver's root as this process sees it
    #[arg(long, value_name = "DIR", default_value = "/")]
    driver_root: PathBuf,

    /// The GPUs that are reset together
    #[arg(value_name = "UUID", required = true)]
    gpus: Vec<GpuUuid>,
}

/// Runs `gantry reset-device`.
///
/// # Errors
/// nvidia-smi cannot be run, or does not reset the GPUs.
pub(crate) fn reset_device(args: &ResetDeviceArgs) -> anyhow::Result<()> {
    let root = args.driver_root.display().to_string();
    // The process does nothing else.
    std::os::unix::fs::chroot(&args.driver_root)
        .and_then(|()| std::env::set_current_dir("/"))
        .with_context(|| format!("cannot enter the driver's root {root}"))?;
    let gpus: Vec<&str> = args.gpus.iter().map(GpuUuid::as_str).collect();
    let mut smi = Command::new("nvidia-smi");
    smi.args(["--gpu-reset", "-i", &gpus.join(",")]).env_clear().env("PATH", PATH);
    let output = smi.output().with_context(|| format!("cannot run nvidia-smi of the driver in {root}"))?;
    let printed = [output.stdout, output.stderr].concat();
    print(&Visible::new(&String::from_utf8_lossy(&printed)))?;
    if output.status.success() {
        return Ok(());
    }
    let users = users(Path::new("/proc"));
    let shown = users.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match users.len() {
        0 => bail!("nvidia-smi failed: {}", output.status),
        1..=SHOWN => bail!("nvidia-smi failed: {}; GPUs are open in {shown}", output.status),
        all => {
            bail!("nvidia-smi failed: {}; GPUs are open in {shown} and {} more", output.status, all - SHOWN)
        }
    }
}

/// The processes that have the device node of a GPU open, as far as they can be read.
fn users(proc: &Path) -> Vec<String> {
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<(u32, String)> = Vec::new();
    for process in entries(proc) {
        let name = process.file_name().unwrap_or_default().to_string_lossy();
        let Ok(pid) = name.parse::<u32>() else {
            continue;
        };
        let mut files = entries(&process.join("fd")).filter_map(|file| fs::read_link(file).ok());
        if files.any(|file| is_gpu(&file)) {
            let command = fs::read_to_string(process.join("comm")).unwrap_or_default();
            found.push((pid, command.trim().to_owned()));
        }
    }
    found.sort();
    found.into_iter().map(|(pid, command)| format!("{command} (pid {pid})")).collect()
}

/// Whether it is the device node of a GPU: `/dev/nvidia3`, not `/dev/nvidiactl`.
fn is_gpu(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let number = name.strip_prefix("nvidia").unwrap_or_default();
    file.starts_with("/dev") && !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// nvidia-smi says only that a GPU is in use: the error names the programs to stop.
    #[test]
    fn processes_with_an_open_gpu_are_named() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, command, files) in [
            ("77", "dcgm-exporter", ["/dev/nvidiactl", "/dev/nvidia3"]),
            ("9", "nvidia-persiste", ["/dev/null", "/dev/nvidia0"]),
            ("5", "cat", ["/dev/nvidiactl", "/dev/nvidia-uvm"]),
            ("self", "gantry", ["/dev/nvidia1", "/dev/nvidia2"]),
        ] {
            let folder = proc.path().join(pid);
            fs::create_dir_all(folder.join("fd")).unwrap();
            fs::write(folder.join("comm"), format!("{command}\n")).unwrap();
            for (number, file) in files.iter().enumerate() {
                symlink(file, folder.join("fd").join(number.to_string())).unwrap();
            }
        }
        assert_eq!(users(proc.path()), ["nvidia-persiste (pid 9)", "dcgm-exporter (pid 77)"]);
        assert_eq!(users(&proc.path().join("none")), Vec::<String>::new());
    }
}
