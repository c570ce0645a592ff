//! Verifies an archive with gantry's image as a stranger would: from its bytes alone.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use flate2::read::GzDecoder;
use oci_spec::image::{Descriptor, ImageConfiguration, ImageIndex, ImageManifest, MediaType};

use crate::gantry::{PROGRAM, SBOM, USER};
use crate::program::Program;
use crate::{Arch, Entry, Tree, sha256};

/// Bytes that are read of an archive, and of a layer.
const READ_LIMIT: u64 = 1 << 30;

/// Every path of the image but folders; `TRIPLET` stands for the architecture's, `*` for the rest of a name.
const EXPECTED: [&str; 20] = [
    "etc/debian_version",
    "etc/group",
    "etc/ld.so.conf",
    "etc/ld.so.conf.d/TRIPLET.conf",
    "etc/nsswitch.conf",
    "etc/os-release",
    "etc/passwd",
    "lib",
    "lib64",
    PROGRAM,
    "usr/lib/TRIPLET/ld-linux-*",
    "usr/lib/TRIPLET/lib*",
    "usr/lib/ld-linux-*",
    "usr/lib/os-release",
    "usr/lib64/ld-linux-*",
    "usr/share/doc/gantry/LICENSE",
    SBOM,
    "usr/share/doc/*",
    "var/lib/dpkg/status.d/*",
    "usr/share/doc/libgcc-s1",
];

/// What must hold of the whole.
#[derive(Debug, Default)]
pub struct Rules {
    /// Bytes of each image's files, unpacked.
    pub max_bytes: Option<u64>,
    /// Texts that the program must not contain, such as the paths of the machine that built it.
    pub excluded: Vec<String>,
}

/// An image that was found.
#[derive(Debug)]
pub struct FoundImage {
    pub arch: Arch,
    pub name: String,
    /// Digest of its manifest.
    pub digest: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// Bytes of its layers, as they are stored.
    pub stored: u64,
    pub paths: Vec<String>,
}

/// Verifies every image of an archive.
///
/// # Errors
/// Everything that is wrong.
pub fn archive(path: &Path, rules: &Rules) -> Result<Vec<FoundImage>> {
    let blobs = read_archive(path).with_context(|| format!("cannot read {}", path.display()))?;
    let index = blobs.get("index.json").context("there is no index.json: not an OCI archive")?;
    let index: ImageIndex = serde_json::from_slice(index).context("index.json")?;
    ensure!(blobs.contains_key("oci-layout"), "there is no oci-layout: not an OCI archive");
    let mut found = Vec::new();
    for entry in index.manifests() {
        let annotations = entry.annotations().clone().unwrap_or_default();
        let name = annotations.get("io.containerd.image.name").cloned().unwrap_or_default();
        ensure!(!name.is_empty(), "index.json: an image has no name");
        let manifests = match entry.media_type() {
            MediaType::ImageIndex => {
                let index: ImageIndex = serde_json::from_slice(blob(&blobs, entry)?)?;
                index.manifests().clone()
            }
            _ => vec![entry.clone()],
        };
        for manifest in &manifests {
            found.push(image(&blobs, manifest, &name, rules).with_context(|| name.clone())?);
        }
    }
    ensure!(!found.is_empty(), "there is no image in {}", path.display());
    Ok(found)
}

type Blobs = BTreeMap<String, Vec<u8>>;

fn read_archive(path: &Path) -> Result<Blobs> {
    let mut archive = tar::Archive::new(std::fs::File::open(path)?.take(READ_LIMIT));
    let mut blobs = Blobs::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.to_string_lossy().into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        blobs.insert(path, bytes);
    }
    Ok(blobs)
}

/// The bytes of a blob, which are those that its descriptor names.
fn blob<'a>(blobs: &'a Blobs, descriptor: &Descriptor) -> Result<&'a [u8]> {
    let digest = descriptor.as_digest_sha256().context("a digest is not SHA-256")?;
    let bytes = blobs.get(&format!("blobs/sha256/{digest}")).with_context(|| format!("no blob {digest}"))?;
    ensure!(sha256(bytes) == digest, "the blob {digest} has another digest");
    ensure!(descriptor.size() == bytes.len() as u64, "the blob {digest} has another size");
    Ok(bytes)
}

fn image(blobs: &Blobs, descriptor: &Descriptor, name: &str, rules: &Rules) -> Result<FoundImage> {
    let manifest: ImageManifest = serde_json::from_slice(blob(blobs, descriptor)?).context("manifest")?;
    let config: ImageConfiguration =
        serde_json::from_slice(blob(blobs, manifest.config())?).context("configuration")?;
    let arch: Arch = config.architecture().to_string().parse()?;
    let mut wrong = config_faults(&config);

    let mut layers = Layers { epoch: created(&config)?, ..Layers::default() };
    ensure!(
        manifest.layers().len() == config.rootfs().diff_ids().len(),
        "the configuration lists another number of layers"
    );
    for (layer, diff_id) in manifest.layers().iter().zip(config.rootfs().diff_ids()) {
        let stored = blob(blobs, layer)?;
        let tar = match layer.media_type() {
            MediaType::ImageLayer => stored.to_vec(),
            MediaType::ImageLayerGzip => {
                let mut tar = Vec::new();
                GzDecoder::new(stored).take(READ_LIMIT).read_to_end(&mut tar)?;
                tar
            }
            other => bail!("the layers are of type {other}"),
        };
        ensure!(*diff_id == format!("sha256:{}", sha256(&tar)), "a layer is not {diff_id}");
        layers.read(&tar)?;
    }
    let stored = manifest.layers().iter().map(Descriptor::size).sum();
    wrong.append(&mut layers.wrong);
    wrong.extend(tree_faults(&layers.tree, arch, rules)?);
    let bytes = layers.tree.iter().map(|(_, entry)| size(entry)).sum();
    if rules.max_bytes.is_some_and(|max| bytes > max) {
        wrong.push(format!("it has {bytes} bytes, more than {}", rules.max_bytes.unwrap_or_default()));
    }
    if !wrong.is_empty() {
        bail!("the image for {arch}: {}", wrong.join("; "));
    }
    let paths = layers.tree.iter().map(|(path, _)| path.to_owned()).collect();
    let digest = descriptor.digest().to_string();
    Ok(FoundImage { arch, name: name.to_owned(), digest, bytes, stored, paths })
}

fn size(entry: &Entry) -> u64 {
    match entry {
        Entry::File { bytes, .. } => bytes.len() as u64,
        Entry::Folder | Entry::Link(_) => 0,
    }
}

fn created(config: &ImageConfiguration) -> Result<u64> {
    let created = config.created().as_deref().context("the configuration has no time")?;
    Ok(created.parse::<jiff::Timestamp>()?.as_second().try_into()?)
}

fn config_faults(config: &ImageConfiguration) -> Vec<String> {
    let mut wrong = Vec::new();
    let Some(run) = config.config() else {
        return vec!["there is no configuration of containers".to_owned()];
    };
    if run.user().as_deref() != Some(USER) {
        wrong.push(format!("the user is {:?}, expected {USER}", run.user()));
    }
    if run.entrypoint().as_deref() != Some(&[format!("/{PROGRAM}")]) {
        wrong.push(format!("the entry point is {:?}, expected /{PROGRAM}", run.entrypoint()));
    }
    let labels = run.labels().clone().unwrap_or_default();
    for label in ["title", "description", "version", "licenses", "created"] {
        if !labels.contains_key(&format!("org.opencontainers.image.{label}")) {
            wrong.push(format!("the label org.opencontainers.image.{label} is missing"));
        }
    }
    wrong
}

/// The files of all layers, and what is wrong about their headers.
#[derive(Default)]
struct Layers {
    tree: Tree,
    epoch: u64,
    wrong: Vec<String>,
}

impl Layers {
    fn read(&mut self, tar: &[u8]) -> Result<()> {
        for entry in tar::Archive::new(tar).entries()? {
            let mut entry = entry?;
            let path = entry.path()?.to_string_lossy().trim_end_matches('/').to_owned();
            let header = entry.header();
            let mode = header.mode()?;
            if mode & 0o7000 != 0 {
                self.wrong.push(format!("{path} has the mode {mode:o}: it gives rights of others"));
            }
            let kind = header.entry_type();
            if mode & 0o022 != 0 && kind != tar::EntryType::Symlink {
                self.wrong.push(format!("{path} has the mode {mode:o}: others may write it"));
            }
            if (header.uid()?, header.gid()?) != (0, 0) {
                self.wrong.push(format!("{path} does not belong to root"));
            }
            if header.mtime()? != self.epoch {
                self.wrong.push(format!("{path} is not of the image's time"));
            }
            let found = match kind {
                tar::EntryType::Directory => Entry::Folder,
                tar::EntryType::Symlink => {
                    Entry::Link(entry.link_name()?.context("a link without a target")?.display().to_string())
                }
                tar::EntryType::Regular => {
                    let mut bytes = Vec::new();
                    entry.read_to_end(&mut bytes)?;
                    Entry::File { is_executable: mode & 0o111 != 0, bytes }
                }
                other => {
                    self.wrong.push(format!("{path} is neither a file, a folder nor a link: {other:?}"));
                    continue;
                }
            };
            self.tree.add(&path, found)?;
        }
        Ok(())
    }
}

fn tree_faults(tree: &Tree, arch: Arch, rules: &Rules) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    let expected: Vec<String> = EXPECTED.map(|path| path.replace("TRIPLET", arch.triplet())).into();
    for (path, entry) in tree.iter() {
        if *entry != Entry::Folder && !expected.iter().any(|pattern| matches(pattern, path)) {
            wrong.push(format!("{path} is not expected in the image"));
        }
        let is_program = matches!(entry, Entry::File { is_executable: true, .. });
        let is_known = path == PROGRAM || path.contains(".so");
        if is_program && !is_known {
            wrong.push(format!("{path} can be executed; only {PROGRAM} may be"));
        }
    }
    let Some(Entry::File { is_executable: true, bytes }) = tree.get(PROGRAM) else {
        wrong.push(format!("there is no program {PROGRAM}"));
        return Ok(wrong);
    };
    let lacks = Program::read(bytes).context(PROGRAM)?.lacks(tree, arch)?;
    wrong.extend(lacks.iter().map(|lack| format!("{PROGRAM} lacks {lack}")));
    let loader = resolve(tree, arch.loader().trim_start_matches('/'));
    if !matches!(loader, Some(Entry::File { is_executable: true, .. })) {
        wrong.push(format!("there is no loader {}", arch.loader()));
    }
    for text in &rules.excluded {
        if bytes.windows(text.len().max(1)).any(|window| window == text.as_bytes()) {
            wrong.push(format!("{PROGRAM} contains the text {text:?}"));
        }
    }
    match tree.get(SBOM) {
        Some(Entry::File { bytes, .. }) => {
            let sbom: serde_json::Value = serde_json::from_slice(bytes).context(SBOM)?;
            let count = sbom["components"].as_array().map_or(0, Vec::len);
            if count == 0 {
                wrong.push(format!("{SBOM} lists no component"));
            }
        }
        _ => wrong.push(format!("there is no {SBOM}")),
    }
    Ok(wrong)
}

/// Whether a path is a pattern, whose star may stand for anything at its end.
fn matches(pattern: &str, path: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => path.starts_with(start),
        None => pattern == path,
    }
}

/// What is at a path behind symbolic links.
fn resolve<'a>(tree: &'a Tree, path: &str) -> Option<&'a Entry> {
    let mut parts: Vec<String> = path.split('/').rev().map(str::to_owned).collect();
    let mut here: Vec<String> = Vec::new();
    // Each link costs a step, so a loop ends.
    for _ in 0..64 {
        let Some(part) = parts.pop() else { return tree.get(&here.join("/")) };
        match part.as_str() {
            "" | "." => {}
            ".." => drop(here.pop()),
            _ => {
                here.push(part);
                if let Some(Entry::Link(target)) = tree.get(&here.join("/")) {
                    here.pop();
                    if target.starts_with('/') {
                        here.clear();
                    }
                    parts.extend(target.split('/').rev().map(str::to_owned));
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::header;

    #[test]
    fn headers_that_give_rights_are_named() {
        let mut tar = tar::Builder::new(Vec::new());
        let mut add = |path: &str, kind, mode, user| {
            let mut header = header(kind, mode, 5);
            header.set_uid(user);
            tar.append_data(&mut header, path, std::io::empty()).unwrap();
        };
        add("usr/bin/su", tar::EntryType::Regular, 0o4755, 0);
        add("tmp", tar::EntryType::Directory, 0o777, 0);
        add("etc/own", tar::EntryType::Regular, 0o644, 1000);
        add("dev/null", tar::EntryType::Char, 0o644, 0);
        let mut layers = Layers { epoch: 5, ..Layers::default() };
        layers.read(&tar.into_inner().unwrap()).unwrap();
        assert_eq!(
            layers.wrong,
            [
                "usr/bin/su has the mode 4755: it gives rights of others",
                "tmp has the mode 777: others may write it",
                "etc/own does not belong to root",
                "dev/null is neither a file, a folder nor a link: Char",
            ]
        );
    }

    #[test]
    fn loader_is_found_behind_links() {
        let mut tree = Tree::new();
        tree.link("lib64", "usr/lib64").unwrap();
        tree.link("usr/lib64/ld.so", "../lib/x/ld.so").unwrap();
        tree.program("usr/lib/x/ld.so", "").unwrap();
        tree.link("loop", "loop").unwrap();
        assert!(matches!(resolve(&tree, "lib64/ld.so"), Some(Entry::File { .. })));
        assert_eq!(resolve(&tree, "loop"), None);
        assert_eq!(resolve(&tree, "lib64/other"), None);
    }
}
