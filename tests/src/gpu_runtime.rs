//! Acts as NVIDIA's container runtime: in front of runc, it gives a container that asks for all GPUs the driver of its
//! node. Here that is the simulated one: the library where NVML is searched, device nodes, and the PCI tree.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::error::file;
use crate::host::RUNC;
use crate::{Error, Result};

/// What a container asks the runtime for.
const ASKS_FOR_ALL: &str = "NVIDIA_VISIBLE_DEVICES=all";
/// Where the container sees the folder of the machine, which the library reads and the controls write.
const MACHINE: &str = "/run/gantry-sim";

/// Writes the program that containerd starts as its runtime on a node, and returns its path. `hardware` need not exist
/// yet: containers started before have no GPUs.
pub(crate) fn install(folder: &Path, tool: &Path) -> Result<PathBuf> {
    let path = folder.join("gpu-runtime");
    let (tool, hardware) = (tool.display(), folder.join(crate::hardware::FOLDER));
    let script = format!("#!/bin/sh\nexec '{tool}' runtime --hardware '{}' -- \"$@\"\n", hardware.display());
    fs::write(&path, script).map_err(file("write", &path))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).map_err(file("write", &path))?;
    Ok(path)
}

/// Prepares a container that is created, and becomes runc.
///
/// # Errors
/// The container's configuration cannot be read or written, or there is no runc.
pub fn run(hardware: &Path, args: &[String]) -> Result<()> {
    let is_created = args.iter().any(|arg| arg == "create");
    let bundle = args.iter().position(|arg| arg == "--bundle").and_then(|at| args.get(at + 1));
    if let (true, Some(bundle), true) = (is_created, bundle, hardware.exists()) {
        let path = Path::new(bundle).join("config.json");
        let text = fs::read(&path).map_err(file("read", &path))?;
        let mut spec: Value =
            serde_json::from_slice(&text).map_err(|source| Error::Json { path: path.clone(), source })?;
        if add_driver(&mut spec, hardware)? {
            fs::write(&path, spec.to_string()).map_err(file("write", &path))?;
        }
    }
    let source = Command::new(RUNC).args(args).exec();
    Err(Error::Start { program: RUNC.to_owned(), source })
}

/// Adds the driver if the container asks for it; returns whether it does.
fn add_driver(spec: &mut Value, hardware: &Path) -> Result<bool> {
    let Some(env) = spec["process"]["env"].as_array_mut() else { return Ok(false) };
    if !env.iter().any(|variable| variable == ASKS_FOR_ALL) {
        return Ok(false);
    }
    env.push(json!(format!("GANTRY_SIM_MACHINE={MACHINE}/{}", gantry_nvml_sim::MACHINE_FILE)));
    let Some(mounts) = spec["mounts"].as_array_mut() else { return Ok(false) };

    // The whole tree at once: the kernel's own has no folders for other machines' devices.
    let sys = hardware.join("root/sys");
    let groups = sys.join("fs/cgroup");
    fs::create_dir_all(&groups).map_err(file("create", &groups))?;
    if let Some(mount) = mounts.iter_mut().find(|mount| mount["destination"] == "/sys") {
        *mount = bind(&sys, "/sys", &["rbind", "ro"]);
    }
    let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
    let library = gantry_nvml_sim::LIBRARY_NAME;
    mounts.push(bind(&hardware.join(library), &format!("/usr/lib/{triplet}/{library}"), &["bind", "ro"]));
    mounts.push(bind(hardware, MACHINE, &["rbind", "rw"]));
    let dev = hardware.join("root/dev");
    for entry in fs::read_dir(&dev).map_err(file("read", &dev))?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_char_device()) {
            let name = entry.file_name().to_string_lossy().into_owned();
            mounts.push(bind(&entry.path(), &format!("/dev/{name}"), &["bind"]));
        }
    }
    Ok(true)
}

fn bind(source: &Path, destination: &str, options: &[&str]) -> Value {
    json!({ "destination": destination, "type": "bind", "source": source, "options": options })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(visible: &str) -> Value {
        json!({
            "process": { "env": ["PATH=/usr/bin", format!("NVIDIA_VISIBLE_DEVICES={visible}")] },
            "mounts": [{ "destination": "/sys", "type": "sysfs", "source": "sysfs" }],
        })
    }

    #[test]
    fn only_container_that_asks_for_all_gets_the_driver() {
        let hardware = tempfile::tempdir().unwrap();
        fs::create_dir_all(hardware.path().join("root/dev")).unwrap();
        for visible in ["void", "GPU-1"] {
            let mut other = spec(visible);
            assert!(!add_driver(&mut other, hardware.path()).unwrap());
            assert_eq!(other, spec(visible));
        }
        let mut asks = spec("all");
        assert!(add_driver(&mut asks, hardware.path()).unwrap());
        let mounts = asks["mounts"].as_array().unwrap();
        assert_eq!(mounts[0]["type"], "bind");
        let library =
            mounts.iter().find(|mount| mount["destination"].as_str().unwrap().contains("/usr/lib/"));
        assert!(library.unwrap()["destination"].as_str().unwrap().ends_with("libnvidia-ml.so.1"));
    }
}
