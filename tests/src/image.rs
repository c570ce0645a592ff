//! The images of the nodes, as there is no registry: a busybox for pods, one that sleeps, for pod sandboxes, and on
//! request Gantry's own and kube-scheduler's, so that the daemons run as pods.

use std::path::Path;
use std::{fs, process};

use gantry_image::gantry::Recipe;
use gantry_image::{Arch, Archive, Compression, ConfigBuilder, Image, Layer, Tree, debian, gantry, sbom};

use crate::components::{Components, cache_root};
use crate::error::file;
use crate::host::BUSYBOX;
use crate::{Error, Result};

/// The image for pods. The name must begin with a registry for the container runtime interface to find it.
pub const BUSYBOX_IMAGE: &str = "docker.io/library/gantry-busybox:1";
/// The image of every pod's sandbox container.
pub(crate) const PAUSE_IMAGE: &str = "docker.io/library/gantry-pause:1";
/// Gantry's own, as chart and manifests name it.
const GANTRY_IMAGE: &str = concat!("docker.io/library/gantry:", env!("CARGO_PKG_VERSION"));
/// kube-scheduler's, as the chart names it with `scheduler.own.image.tag=test`.
pub const SCHEDULER_IMAGE: &str = "registry.k8s.io/kube-scheduler:test";

const APPLETS: [&str; 18] = [
    "sh", "sleep", "cat", "ls", "env", "echo", "id", "stat", "find", "grep", "wc", "true", "false", "kill",
    "ip", "touch", "cut", "wget",
];

/// Writes the images as one OCI archive that `ctr images import` reads. With the program `gantry`, those of the daemons
/// are among them.
pub(crate) fn write(archive: &Path, program: Option<&Path>, components: &Components) -> Result<()> {
    let mut images = Archive::new();
    let mut add_all = || -> anyhow::Result<()> {
        let arch = Arch::host()?;
        let busybox = layer(&busybox()?)?;
        for (name, command) in
            [(BUSYBOX_IMAGE, &["/bin/sh"][..]), (PAUSE_IMAGE, &["/bin/sleep", "2147483647"])]
        {
            images.add(name, &[image(arch, command, vec![busybox.clone()])?])?;
        }
        let Some(program) = program else { return Ok(()) };
        images.add(GANTRY_IMAGE, &[own(arch, program)?])?;
        let mut tree = Tree::new();
        tree.program("bin/kube-scheduler", fs::read(components.path("kube-scheduler"))?)?;
        images.add(SCHEDULER_IMAGE, &[image(arch, &["/bin/kube-scheduler"], vec![layer(&tree)?])?])
    };
    add_all().and_then(|()| images.write(archive)).map_err(Error::Image)
}

/// Writes Gantry's own image alone.
pub(crate) fn write_own(archive: &Path, program: &Path) -> Result<()> {
    let mut images = Archive::new();
    let added = Arch::host().and_then(|arch| images.add(GANTRY_IMAGE, &[own(arch, program)?]));
    added.and_then(|()| images.write(archive)).map_err(Error::Image)
}

/// The project's image with the program as it is tested, but without what a debugger reads: that is most of it.
fn own(arch: Arch, program: &Path) -> anyhow::Result<Image> {
    let stripped = tempfile::NamedTempFile::new()?;
    let status = process::Command::new("strip").arg("-o").arg(stripped.path()).arg(program).status()?;
    anyhow::ensure!(status.success(), "strip {}: {status}", program.display());
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let license = fs::read_to_string(project.join("LICENSE"))?;
    let packages = debian::packages(arch, &cache_root().join("packages"))?;
    let (image, _) = gantry::image(Recipe {
        arch,
        program: &fs::read(stripped.path())?,
        version: env!("CARGO_PKG_VERSION"),
        revision: None,
        source: None,
        license: &license,
        crates: sbom::crates(&project, arch)?,
        packages: &packages,
        epoch: 0,
        compression: Compression::None,
    })?;
    Ok(image)
}

/// The system's statically linked busybox, and a link per applet that tests use.
fn busybox() -> anyhow::Result<Tree> {
    let path = Path::new(BUSYBOX);
    let mut tree = Tree::new();
    tree.program("bin/busybox", fs::read(path).map_err(file("read", path))?)?;
    for folder in ["tmp", "dev", "proc", "sys"] {
        tree.folder(folder)?;
    }
    tree.file("etc/passwd", "root:x:0:0:root:/:/bin/sh\n")?;
    // Samples start it, and NVIDIA's runtime would mount it.
    tree.program("bin/nvidia-smi", "#!/bin/sh\nexec sleep 60\n")?;
    for applet in APPLETS {
        tree.link(&format!("bin/{applet}"), "busybox")?;
    }
    Ok(tree)
}

fn layer(tree: &Tree) -> anyhow::Result<Layer> {
    Layer::new(tree, 0, Compression::None, "tests")
}

fn image(arch: Arch, command: &[&str], layers: Vec<Layer>) -> anyhow::Result<Image> {
    let command: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
    let config = ConfigBuilder::default().cmd(command).env(vec!["PATH=/bin".to_owned()]).build()?;
    Ok(Image { arch, epoch: 0, config, annotations: [].into(), layers })
}
