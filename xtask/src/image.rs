//! The image: the program as it is shipped, for each architecture, in one archive.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;
use gantry_image::check::{self, FoundImage, Rules};
use gantry_image::{Arch, Archive, Compression, debian, gantry, sbom};

use crate::ci::cache;
use crate::program::{self, Platform};
use crate::run::{output, root, target};

/// Bytes that an image may have, unpacked.
const MAX_BYTES: u64 = 40 << 20;

/// Options of `cargo xtask image`.
#[derive(Args)]
pub(crate) struct ImageArgs {
    /// Architecture, amd64 or arm64; repeat it for an archive with both [default: that of this machine]
    #[arg(long = "arch", value_name = "ARCH")]
    arches: Vec<Arch>,
    /// Program to put into the image, built already [default: build it]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Archive to write, or the folder for it [default: image/ of the target directory]
    #[arg(long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// Name of the image, with its tag
    #[arg(long, default_value = concat!("docker.io/library/gantry:", env!("CARGO_PKG_VERSION")))]
    name: String,
    /// Address of the sources, for the label
    #[arg(long, value_name = "URL")]
    source: Option<String>,
    /// Only verify this archive
    #[arg(long, value_name = "ARCHIVE", conflicts_with_all = ["arches", "binary", "output", "source"])]
    check: Option<PathBuf>,
}

/// Builds an archive, or verifies one, and prints what is in it.
pub(crate) fn run_task(args: &ImageArgs) -> Result<()> {
    let (path, found) = match &args.check {
        Some(path) => (path.clone(), verify(path)?),
        None => build(args)?,
    };
    for image in &found {
        println!(
            "{} for {}: {} bytes, {} stored, {}",
            image.name, image.arch, image.bytes, image.stored, image.digest
        );
    }
    if args.check.is_some() {
        found.iter().flat_map(|image| &image.paths).for_each(|path| println!("  {path}"));
    }
    let bytes = fs::metadata(&path)?.len();
    println!("{}: {bytes} bytes", path.display());
    Ok(())
}

/// Verifies an archive as a release needs it.
fn verify(archive: &Path) -> Result<Vec<FoundImage>> {
    let mut excluded = vec![root().display().to_string()];
    excluded.extend(std::env::var("HOME").ok().filter(|home| home.len() > 1).map(|home| format!("{home}/")));
    check::archive(archive, &Rules { max_bytes: Some(MAX_BYTES), excluded })
}

fn build(args: &ImageArgs) -> Result<(PathBuf, Vec<FoundImage>)> {
    let arches = match &args.arches[..] {
        [] => vec![Arch::host()?],
        some => some.to_vec(),
    };
    ensure!(args.binary.is_none() || arches.len() == 1, "--binary is one program: name one --arch");
    let names: Vec<&str> = arches.iter().map(|arch| arch.name()).collect();
    let version = env!("CARGO_PKG_VERSION");
    let path = args.output.clone().map_or_else(|| Ok(target()?.join("image")), anyhow::Ok)?;
    let path = match path.extension() {
        Some(_) => path,
        None => path.join(format!("gantry-{version}-{}.tar", names.join("-"))),
    };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }

    let (revision, epoch) = (program::revision(), epoch()?);
    let license = fs::read_to_string(root().join("LICENSE")).context("LICENSE")?;
    let mut images = Vec::new();
    for arch in arches {
        let program = match &args.binary {
            Some(binary) => binary.clone(),
            None => program::build(Platform::Linux(arch))?,
        };
        let program = fs::read(&program).with_context(|| format!("cannot read {}", program.display()))?;
        let packages = debian::packages(arch, &cache()?.join("packages"))?;
        let (image, components) = gantry::image(gantry::Recipe {
            arch,
            program: &program,
            version,
            revision: revision.as_deref(),
            source: args.source.as_deref(),
            license: &license,
            crates: sbom::crates(&root(), arch)?,
            packages: &packages,
            epoch,
            compression: Compression::Gzip,
        })?;
        let list = path.with_file_name(format!("gantry-{version}-{arch}.cdx.json"));
        fs::write(&list, components).with_context(|| format!("cannot write {}", list.display()))?;
        images.push(image);
    }
    let mut archive = Archive::new();
    archive.add(&args.name, &images)?;
    archive.write(&path)?;
    let found = verify(&path)?;
    Ok((path, found))
}

/// Builds and verifies the archive of a release, with all architectures.
pub(crate) fn release(archive: &Path, source: Option<String>) -> Result<()> {
    let name = format!("docker.io/library/gantry:{}", env!("CARGO_PKG_VERSION"));
    let output = Some(archive.to_path_buf());
    let args = ImageArgs { arches: Arch::ALL.to_vec(), binary: None, output, name, source, check: None };
    build(&args).map(drop)
}

/// The time of all files: `$SOURCE_DATE_EPOCH`, or that of the commit, or 1970.
pub(crate) fn epoch() -> Result<u64> {
    if let Ok(epoch) = std::env::var("SOURCE_DATE_EPOCH") {
        return epoch
            .parse()
            .with_context(|| format!("SOURCE_DATE_EPOCH is {epoch:?}, expected seconds since 1970"));
    }
    let time = output(Command::new("git").current_dir(root()).args(["log", "-1", "--format=%ct"]));
    Ok(time.ok().and_then(|time| time.trim().parse().ok()).unwrap_or_default())
}
