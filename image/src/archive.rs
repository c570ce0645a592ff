//! OCI images and the archive that holds them, as containerd, docker, podman and skopeo read it.

use std::collections::{BTreeMap, HashMap};
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use oci_spec::image::{
    Config, Descriptor, Digest, History, HistoryBuilder, ImageConfigurationBuilder, ImageIndexBuilder,
    ImageManifestBuilder, MediaType, Os, PlatformBuilder, RootFsBuilder,
};

use crate::tree::{gzip, header};
use crate::{Arch, Tree, sha256};

/// The annotation by which containerd names an image.
const NAME_ANNOTATION: &str = "io.containerd.image.name";
/// The annotation by which other tools name it in a layout: the part behind the colon.
const REFERENCE_ANNOTATION: &str = "org.opencontainers.image.ref.name";

/// Whether layers are compressed: for a registry, or for a node on the same machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    Gzip,
    None,
}

/// A layer as it is stored.
#[derive(Debug, Clone)]
pub struct Layer {
    media_type: MediaType,
    bytes: Vec<u8>,
    /// Digest of the layer before compression.
    diff_id: String,
    history: History,
}

impl Layer {
    /// A layer with the files of `tree`, all of the time `epoch` in seconds since 1970. `made_by` is one line about it.
    ///
    /// # Errors
    /// A path is too long for a tar archive.
    pub fn new(tree: &Tree, epoch: u64, compression: Compression, made_by: &str) -> Result<Self> {
        let tar = tree.to_tar(epoch)?;
        let diff_id = digest_name(&tar);
        let (media_type, bytes) = match compression {
            Compression::None => (MediaType::ImageLayer, tar),
            Compression::Gzip => (MediaType::ImageLayerGzip, gzip(&tar)?),
        };
        let history =
            HistoryBuilder::default().created(time(epoch)?).created_by(made_by.to_owned()).build()?;
        Ok(Self { media_type, bytes, diff_id, history })
    }
}

/// An image for one architecture.
#[derive(Debug, Clone)]
pub struct Image {
    pub arch: Arch,
    /// When it was made, in seconds since 1970.
    pub epoch: u64,
    /// What a container of it runs, and as whom.
    pub config: Config,
    pub annotations: BTreeMap<String, String>,
    pub layers: Vec<Layer>,
}

/// Images in an OCI layout.
#[derive(Debug, Default)]
pub struct Archive {
    /// By digest.
    blobs: BTreeMap<String, Vec<u8>>,
    index: Vec<Descriptor>,
}

impl Archive {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an image under a full name such as `docker.io/library/gantry:0.1.0`: one per architecture.
    ///
    /// # Errors
    /// A part cannot be written as JSON.
    pub fn add(&mut self, name: &str, images: &[Image]) -> Result<()> {
        let manifests = images.iter().map(|image| self.manifest(image)).collect::<Result<Vec<_>>>()?;
        let mut entry = match <[Descriptor; 1]>::try_from(manifests) {
            Ok([single]) => single,
            Err(several) => {
                let index = ImageIndexBuilder::default()
                    .schema_version(2u32)
                    .media_type(MediaType::ImageIndex)
                    .manifests(several)
                    .build()?;
                self.json(MediaType::ImageIndex, &index)?
            }
        };
        let reference = name.rsplit_once(':').map_or(name, |(_, tag)| tag);
        entry.set_annotations(Some(HashMap::from([
            (NAME_ANNOTATION.to_owned(), name.to_owned()),
            (REFERENCE_ANNOTATION.to_owned(), reference.to_owned()),
        ])));
        self.index.push(entry);
        Ok(())
    }

    /// Writes the archive. A file that is there already is replaced once the new one is complete.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let index = ImageIndexBuilder::default()
            .schema_version(2u32)
            .media_type(MediaType::ImageIndex)
            .manifests(self.index.clone())
            .build()?;
        let part = path.with_extension("part");
        let target =
            std::fs::File::create(&part).with_context(|| format!("cannot create {}", part.display()))?;
        let mut tar = tar::Builder::new(std::io::BufWriter::new(target));
        let mut append = |path: &str, bytes: &[u8]| -> Result<()> {
            let mut header = header(tar::EntryType::Regular, 0o644, 0);
            header.set_size(bytes.len().try_into().context("a blob is too large")?);
            Ok(tar.append_data(&mut header, path, bytes)?)
        };
        append("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        append("index.json", &json(&index)?)?;
        for (digest, blob) in &self.blobs {
            append(&format!("blobs/sha256/{digest}"), blob)?;
        }
        tar.into_inner()?.flush()?;
        std::fs::rename(&part, path).with_context(|| format!("cannot write {}", path.display()))
    }

    fn manifest(&mut self, image: &Image) -> Result<Descriptor> {
        let ids: Vec<String> = image.layers.iter().map(|layer| layer.diff_id.clone()).collect();
        let history: Vec<History> = image.layers.iter().map(|layer| layer.history.clone()).collect();
        let config = ImageConfigurationBuilder::default()
            .created(time(image.epoch)?)
            .architecture(image.arch.oci())
            .os(Os::Linux)
            .config(image.config.clone())
            .rootfs(RootFsBuilder::default().typ("layers").diff_ids(ids).build()?)
            .history(history)
            .build()?;
        let config = self.json(MediaType::ImageConfig, &config)?;
        let layers = image
            .layers
            .iter()
            .map(|layer| self.blob(layer.media_type.clone(), layer.bytes.clone()))
            .collect::<Result<Vec<_>>>()?;
        let manifest = ImageManifestBuilder::default()
            .schema_version(2u32)
            .media_type(MediaType::ImageManifest)
            .config(config)
            .layers(layers)
            .annotations(image.annotations.clone().into_iter().collect::<HashMap<_, _>>())
            .build()?;
        let mut manifest = self.json(MediaType::ImageManifest, &manifest)?;
        let platform = PlatformBuilder::default().architecture(image.arch.oci()).os(Os::Linux).build()?;
        manifest.set_platform(Some(platform));
        Ok(manifest)
    }

    fn json(&mut self, media_type: MediaType, value: &impl serde::Serialize) -> Result<Descriptor> {
        self.blob(media_type, json(value)?)
    }

    fn blob(&mut self, media_type: MediaType, bytes: Vec<u8>) -> Result<Descriptor> {
        let digest: Digest = digest_name(&bytes).parse()?;
        let size = bytes.len().try_into().context("a blob is too large")?;
        self.blobs.insert(digest.digest().to_owned(), bytes);
        Ok(Descriptor::new(media_type, size, digest))
    }
}

fn digest_name(bytes: &[u8]) -> String {
    format!("sha256:{}", sha256(bytes))
}

/// A time as OCI and CycloneDX write it.
pub(crate) fn time(epoch: u64) -> Result<String> {
    let seconds = i64::try_from(epoch).context("the time is too large")?;
    Ok(jiff::Timestamp::from_second(seconds)?.to_string())
}

/// As JSON, with the keys of every object in order: the types have hash maps.
fn json(value: &impl serde::Serialize) -> Result<Vec<u8>> {
    let mut value = serde_json::to_value(value)?;
    value.sort_all_objects();
    Ok(serde_json::to_vec(&value)?)
}
