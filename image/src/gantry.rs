//! The project's image: the program `gantry` on the C library of Debian, and nothing to run beside it.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context, Result, bail};
use oci_spec::image::ConfigBuilder;

use crate::archive::time;
use crate::debian::Package;
use crate::program::Program;
use crate::sbom::{self, Component};
use crate::{Arch, Compression, Image, Layer, Tree};

/// Where the program is.
pub const PROGRAM: &str = "usr/bin/gantry";
/// Where the list of its components is.
pub const SBOM: &str = "usr/share/doc/gantry/sbom.cdx.json";
/// User and group of a container that names none.
pub const USER: &str = "65532:65532";

/// From what an image is made.
pub struct Recipe<'a> {
    pub arch: Arch,
    /// The program, as a file.
    pub program: &'a [u8],
    pub version: &'a str,
    /// The commit.
    pub revision: Option<&'a str>,
    /// Where the sources are.
    pub source: Option<&'a str>,
    /// The project's licence.
    pub license: &'a str,
    /// The crates in the program.
    pub crates: Vec<Component>,
    pub packages: &'a [Package],
    /// Time of every file, in seconds since 1970.
    pub epoch: u64,
    pub compression: Compression,
}

/// An image, and the list of its components as CycloneDX, which it also contains.
///
/// # Errors
/// The program would not start on the packages; a file is there twice.
pub fn image(recipe: Recipe<'_>) -> Result<(Image, Vec<u8>)> {
    let Recipe { arch, version, epoch, compression, .. } = recipe;
    let base = base(recipe.packages)?;
    let program = Program::read(recipe.program).context("the program")?;
    let lacks = program.lacks(&base, arch)?;
    if !lacks.is_empty() {
        bail!(
            "the program would not start in the image: {}. Build it on a system with an older C library, or pin newer \
             packages in image/data/debian.csv",
            lacks.join("; ")
        );
    }

    let mut components = recipe.crates;
    components.extend(recipe.packages.iter().map(Component::of_package));
    let sbom = sbom::document(version, epoch, components)?;
    let mut own = Tree::new();
    own.program(PROGRAM, recipe.program)?;
    own.file(SBOM, sbom.clone())?;
    own.file("usr/share/doc/gantry/LICENSE", recipe.license)?;

    let mut annotations = BTreeMap::new();
    let mut annotate = |key: &str, value: &str| {
        annotations.insert(format!("org.opencontainers.image.{key}"), value.to_owned());
    };
    annotate("title", "gantry");
    annotate("description", "GPU allocation for Kubernetes: device plugin and scheduler extender");
    annotate("version", version);
    annotate("licenses", "Apache-2.0");
    annotate("created", &time(epoch)?);
    recipe.revision.into_iter().for_each(|revision| annotate("revision", revision));
    recipe.source.into_iter().for_each(|source| annotate("source", source));
    let config = ConfigBuilder::default()
        .user(USER)
        .entrypoint(vec![format!("/{PROGRAM}")])
        .env(vec!["PATH=/usr/bin".to_owned()])
        .labels(annotations.clone().into_iter().collect::<HashMap<_, _>>())
        .build()?;
    let layers = vec![
        Layer::new(&base, epoch, compression, "Debian packages, image/data/debian.csv")?,
        Layer::new(&own, epoch, compression, "gantry")?,
    ];
    Ok((Image { arch, epoch, config, annotations, layers }, sbom))
}

/// Everything but the program.
fn base(packages: &[Package]) -> Result<Tree> {
    let mut tree = Tree::new();
    for package in packages {
        for (path, entry) in &package.files {
            tree.add(path, entry.clone())?;
        }
        tree.file(&format!("var/lib/dpkg/status.d/{}", package.name), package.control.as_str())?;
    }
    tree.file("etc/group", "root:x:0:\ngantry:x:65532:\n")?;
    tree.file("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")?;
    tree.file("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")?;
    let passwd = "root:x:0:0:root:/:/nologin\ngantry:x:65532:65532:gantry:/:/nologin\n";
    tree.file("etc/passwd", passwd)?;
    Ok(tree)
}
