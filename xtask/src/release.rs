//! Everything that a release has, in one folder: the public pipeline only signs and uploads what is there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use gantry_image::{Arch, Tree, sha256};

use crate::image;
use crate::program::{self, Platform};
use crate::run::{root, run, target};
use crate::site;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Options of `cargo xtask release`.
#[derive(Args)]
pub(crate) struct ReleaseArgs {
    /// Tag of the release, which must be that of the version; its changes must have a date in CHANGELOG.md
    #[arg(long)]
    tag: Option<String>,
    /// Folder to write [default: release/ of the target directory]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Address of the sources, for the image's label
    #[arg(long, value_name = "URL")]
    source: Option<String>,
    /// Registry that the image is pushed to, such as ghcr.io/example: the packed chart and manifests name the image
    /// there. A release with --tag needs it
    #[arg(long, value_name = "REGISTRY", value_parser = registry)]
    registry: Option<String>,
}

/// A registry, with or without a path in it.
fn registry(text: &str) -> Result<String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c);
    let mut parts = text.split('/');
    let host = parts.next().unwrap_or_default();
    let (name, port) = host.split_once(':').unwrap_or((host, "443"));
    ensure!(
        (name.contains('.') || name == "localhost")
            && name.chars().all(plain)
            && port.parse::<u16>().is_ok()
            && parts.all(|part| !part.is_empty() && part.chars().all(plain)),
        "{text:?} is no registry; write a host and a path in lower case, such as ghcr.io/example"
    );
    Ok(text.to_owned())
}

/// Builds and verifies a release, and pushes nothing.
pub(crate) fn run_task(args: &ReleaseArgs) -> Result<()> {
    let changes = fs::read_to_string(root().join("CHANGELOG.md")).context("CHANGELOG.md")?;
    let notes = notes(&changes, args.tag.as_deref())?;
    let registry = args.registry.as_deref();
    ensure!(
        args.tag.is_none() || registry.is_some(),
        "--tag needs --registry: without it the chart would pull the image docker.io/library/gantry"
    );
    let chart = fs::read_to_string(root().join("charts/gantry/Chart.yaml")).context("Chart.yaml")?;
    same_version(&chart)?;
    let folder = args.output.clone().map_or_else(|| Ok(target()?.join("release")), anyhow::Ok)?;
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    ensure!(
        fs::read_dir(&folder)?.next().is_none(),
        "{} is not empty: a release must contain nothing of another; remove it, or name another folder by --output",
        folder.display()
    );

    image::release(&folder.join(format!("gantry-{VERSION}-image.tar")), args.source.clone())?;
    for platform in Platform::ALL {
        let program = program::build(platform)?;
        let path = folder.join(file_of(platform));
        fs::copy(&program, &path).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let epoch = image::epoch()?;
    plugin_of_kubectl(&folder, epoch, args.source.as_deref())?;
    manual(&folder, epoch)?;
    let chart = folder.join(format!("gantry-{VERSION}.tgz"));
    pack(&root().join("charts/gantry"), "gantry", epoch, registry, &chart)?;
    let manifests = folder.join(format!("gantry-{VERSION}-manifests.tgz"));
    pack(&root().join("manifests"), "manifests", epoch, registry, &manifests)?;
    fs::write(folder.join("NOTES.md"), notes)?;
    let site = target()?.join("site");
    site::build(&site)?;
    pack(&site, "site", epoch, None, &folder.join(format!("gantry-{VERSION}-site.tgz")))?;
    sums(&folder)?;
    println!("{} is complete; nothing was pushed", folder.display());
    Ok(())
}

/// Builds a release twice, the second time from nothing, and compares all files: every build of a release must give the
/// same files.
pub(crate) fn reproduce() -> Result<()> {
    let (programs, builds) = (target()?.join("image"), target()?.join("two-releases"));
    let sums = |name: &str| {
        for folder in [&programs, &builds.join(name)] {
            if folder.exists() {
                fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
            }
        }
        let output = Some(builds.join(name));
        run_task(&ReleaseArgs { tag: None, output, source: None, registry: None })?;
        fs::read_to_string(builds.join(name).join("SHA256SUMS")).context("SHA256SUMS")
    };
    let (first, second) = (sums("first")?, sums("second")?);
    let differ: Vec<&str> =
        first.lines().filter(|line| !second.lines().any(|other| other == *line)).collect();
    ensure!(differ.is_empty(), "two builds of the release differ:\n{}", differ.join("\n"));
    Ok(())
}

/// The name of the program of a release.
fn file_of(platform: Platform) -> String {
    format!("gantry-{VERSION}-{}-{}{}", platform.os(), platform.arch(), platform.suffix())
}

/// An archive per platform with the program as `kubectl-gantry`, and krew's manifest, which names them by checksum.
fn plugin_of_kubectl(folder: &Path, epoch: u64, source: Option<&str>) -> Result<()> {
    let mut platforms = String::new();
    for platform in Platform::ALL {
        let name = format!("kubectl-gantry-{VERSION}-{}-{}.tar.gz", platform.os(), platform.arch());
        let program = folder.join(file_of(platform));
        let mut tree = Tree::new();
        tree.program(
            &format!("kubectl-gantry{}", platform.suffix()),
            fs::read(&program).with_context(|| program.display().to_string())?,
        )?;
        tree.file("LICENSE", fs::read(root().join("LICENSE")).context("LICENSE")?)?;
        let bytes = tree.to_gzip(epoch)?;
        platforms += &krew_platform(source, platform, &name, &sha256(&bytes));
        fs::write(folder.join(&name), bytes).with_context(|| name.clone())?;
    }
    let manifest =
        KREW.replace("VERSION", VERSION).replace("SOURCE", source.unwrap_or(NO_SOURCE)) + &platforms;
    fs::write(folder.join(format!("gantry-{VERSION}-krew.yaml")), manifest).context("krew.yaml")
}

/// krew's manifest without its platforms.
const KREW: &str = include_str!("../data/krew.yaml");
/// The address of the sources where --source does not name it: such a manifest works with `--archive` only.
const NO_SOURCE: &str = "https://example.com/gantry";

fn krew_platform(source: Option<&str>, platform: Platform, archive: &str, sum: &str) -> String {
    let source = source.unwrap_or(NO_SOURCE);
    let (os, arch, suffix) = (platform.os(), platform.arch(), platform.suffix());
    format!(
        "    - selector: {{matchLabels: {{os: {os}, arch: {arch}}}}}\n      \
           uri: {source}/releases/download/v{VERSION}/{archive}\n      \
           sha256: {sum}\n      \
           bin: kubectl-gantry{suffix}\n"
    )
}

/// The manual pages, by the program of this machine.
fn manual(folder: &Path, epoch: u64) -> Result<()> {
    let program = folder.join(file_of(Platform::Linux(Arch::host()?)));
    let pages = target()?.join("man");
    if pages.exists() {
        fs::remove_dir_all(&pages).with_context(|| format!("cannot remove {}", pages.display()))?;
    }
    run(Command::new(program).env_clear().arg("man").arg(&pages))?;
    pack(&pages, "man1", epoch, None, &folder.join(format!("gantry-{VERSION}-man.tgz")))
}

/// The section of the version in CHANGELOG.md.
fn notes(changes: &str, tag: Option<&str>) -> Result<String> {
    if let Some(tag) = tag {
        ensure!(
            tag == format!("v{VERSION}"),
            "the tag is {tag:?}, expected v{VERSION}, the version of Cargo.toml"
        );
    }
    let heading = format!("## [{VERSION}]");
    let from = changes.find(&heading).with_context(|| format!("CHANGELOG.md has no section {heading}"))?;
    let section = &changes[from..];
    let (title, text) = section.split_once('\n').unwrap_or((section, ""));
    if tag.is_some() && !title.chars().any(|c| c.is_ascii_digit() && title.ends_with(c)) {
        bail!("CHANGELOG.md: {title:?} has no date; write it before the release");
    }
    let end = text.find("\n## ").unwrap_or(text.len());
    Ok(text[..end].trim().to_owned() + "\n")
}

/// Checks that the chart is of this version.
fn same_version(chart: &str) -> Result<()> {
    for key in ["version", "appVersion"] {
        let line = format!("{key}: {VERSION}");
        ensure!(chart.lines().any(|found| found == line), "charts/gantry/Chart.yaml has no line {line:?}");
    }
    Ok(())
}

/// Packs a folder under another name, as `helm package` does. Its image is named in the registry.
fn pack(folder: &Path, name: &str, epoch: u64, registry: Option<&str>, archive: &Path) -> Result<()> {
    let mut tree = Tree::new();
    add(&mut tree, folder, name, registry)?;
    let bytes = tree.to_gzip(epoch)?;
    fs::write(archive, bytes).with_context(|| format!("cannot write {}", archive.display()))
}

fn add(tree: &mut Tree, folder: &Path, name: &str, registry: Option<&str>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let path = format!("{name}/{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            add(tree, &entry.path(), &path, registry)?;
            continue;
        }
        let mut bytes = fs::read(entry.path())?;
        if let (Some(registry), true) = (registry, path.ends_with(".yaml")) {
            let text = String::from_utf8(bytes).with_context(|| path.clone())?;
            bytes = in_registry(&text, registry).into_bytes();
        }
        tree.file(&path, bytes)?;
    }
    Ok(())
}

/// The text of a file of the chart or of the manifests, with the image in a registry.
fn in_registry(text: &str, registry: &str) -> String {
    text.replace("image:\n  repository: gantry\n", &format!("image:\n  repository: {registry}/gantry\n"))
        .replace(&format!(" image: gantry:{VERSION}\n"), &format!(" image: {registry}/gantry:{VERSION}\n"))
}

/// Writes SHA256SUMS of all other files.
fn sums(folder: &Path) -> Result<()> {
    let mut lines = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        lines.push(format!("{}  {name}\n", sha256(&fs::read(entry.path())?)));
    }
    lines.sort_by(|one, other| one[64..].cmp(&other[64..]));
    fs::write(folder.join("SHA256SUMS"), lines.concat()).context("SHA256SUMS")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_the_section_of_the_version() {
        let changes = format!(
            "# Changelog\n\n## [9.9.9] - x\nno\n## [{VERSION}] - 2026-12-01\n\n- yes\n\n## [0.0.1] - y\nold\n"
        );
        assert_eq!(notes(&changes, Some(&format!("v{VERSION}"))).unwrap(), "- yes\n");
        let undated = changes.replace("2026-12-01", "unreleased");
        assert_eq!(notes(&undated, None).unwrap(), "- yes\n");
        let refused = notes(&undated, Some(&format!("v{VERSION}"))).unwrap_err().to_string();
        assert_eq!(
            refused,
            format!("CHANGELOG.md: \"## [{VERSION}] - unreleased\" has no date; write it before the release")
        );
        let refused = notes(&changes, Some("v9.9.9")).unwrap_err().to_string();
        assert!(refused.contains(&format!("expected v{VERSION}")), "{refused}");
        assert!(notes("# Changelog\n", None).is_err());
    }

    #[test]
    fn chart_has_the_version_of_the_workspace() {
        let chart = fs::read_to_string(root().join("charts/gantry/Chart.yaml")).unwrap();
        same_version(&chart).unwrap();
        assert!(same_version("version: 9.9.9\nappVersion: 9.9.9\n").is_err());
    }

    #[test]
    fn manifest_of_krew_names_each_archive() {
        let platform = krew_platform(
            Some("https://host/gantry"),
            Platform::Macos(Arch::Arm64),
            "kubectl-gantry.tar.gz",
            "abc",
        );
        let manifest = KREW.replace("VERSION", VERSION).replace("SOURCE", "https://host/gantry") + &platform;
        let manifest: serde_json::Value = serde_saphyr::from_str(&manifest).unwrap();
        assert_eq!(manifest["kind"], "Plugin");
        assert_eq!(manifest["metadata"]["name"], "gantry");
        assert_eq!(manifest["spec"]["version"], format!("v{VERSION}"));
        let platform = &manifest["spec"]["platforms"][0];
        let uri = format!("https://host/gantry/releases/download/v{VERSION}/kubectl-gantry.tar.gz");
        assert_eq!(platform["uri"], uri);
        assert_eq!((&platform["sha256"], &platform["bin"]), (&"abc".into(), &"kubectl-gantry".into()));
        let selector = &platform["selector"]["matchLabels"];
        assert_eq!((&selector["os"], &selector["arch"]), (&"darwin".into(), &"arm64".into()));
    }

    /// A chart without the registry would pull an image of another project from docker.io.
    #[test]
    fn packed_files_name_the_image_in_the_registry() {
        let values = fs::read_to_string(root().join("charts/gantry/values.yaml")).unwrap();
        let packed: serde_json::Value =
            serde_saphyr::from_str(&in_registry(&values, "ghcr.io/example")).unwrap();
        assert_eq!(packed["image"]["repository"], "ghcr.io/example/gantry");
        let mut images = 0;
        for entry in fs::read_dir(root().join("manifests")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                continue;
            }
            let text = in_registry(&fs::read_to_string(&path).unwrap(), "ghcr.io/example");
            for line in text.lines().filter(|line| line.contains(" image: ") && line.contains("gantry")) {
                assert_eq!(line.trim_start(), format!("image: ghcr.io/example/gantry:{VERSION}"));
                images += 1;
            }
        }
        assert_eq!(images, 6, "extender, plugin, resets and the own scheduler");
    }

    #[test]
    fn registry_is_a_host_with_a_path() {
        for good in ["ghcr.io/example", "registry.example:5000", "localhost:5000/a/b"] {
            assert_eq!(registry(good).unwrap(), good);
        }
        for bad in ["", "gantry", "https://ghcr.io/example", "ghcr.io/Example", "ghcr.io/", "a.b:x"] {
            let refused = registry(bad).unwrap_err().to_string();
            assert!(refused.contains(&format!("{bad:?} is no registry")), "{refused}");
        }
    }

    #[test]
    fn packed_chart_does_not_depend_on_the_machine() {
        let folder = tempfile::tempdir().unwrap();
        let archives = ["one", "two"].map(|name| {
            let path = folder.path().join(name);
            pack(&root().join("charts/gantry"), "gantry", 5, Some("ghcr.io/example"), &path).unwrap();
            fs::read(path).unwrap()
        });
        assert_eq!(archives[0], archives[1]);
        fs::remove_file(folder.path().join("two")).unwrap();
        sums(folder.path()).unwrap();
        let sums = fs::read_to_string(folder.path().join("SHA256SUMS")).unwrap();
        assert_eq!(sums, format!("{}  one\n", sha256(&archives[0])));
    }
}
