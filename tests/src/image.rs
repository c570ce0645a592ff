//! Two hand-made OCI images, as there is no registry: a busybox for pods, and one that sleeps, for pod sandboxes.
//! Both hold one layer: the system's statically linked busybox and a link per applet that tests use.

use std::fs::{self, File};
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::Result;
use crate::error::file;
use crate::host::BUSYBOX;

/// The image for pods. The name must begin with a registry for the container runtime interface to find it.
pub const BUSYBOX_IMAGE: &str = "docker.io/library/gantry-busybox:1";
/// The image of every pod's sandbox container.
pub(crate) const PAUSE_IMAGE: &str = "docker.io/library/gantry-pause:1";

const APPLETS: [&str; 18] = [
    "sh", "sleep", "cat", "ls", "env", "echo", "id", "stat", "find", "grep", "wc", "true", "false", "kill",
    "ip", "touch", "cut", "wget",
];

/// Writes both images as one OCI archive that `ctr images import` reads.
pub(crate) fn write(archive: &Path) -> Result<()> {
    let layer = layer()?;
    let mut blobs = vec![layer.clone()];
    let mut manifests = Vec::new();
    let pause = json!(["/bin/sleep", "2147483647"]);
    for (name, command) in [(BUSYBOX_IMAGE, json!(["/bin/sh"])), (PAUSE_IMAGE, pause)] {
        let config = serialise(&json!({
            "architecture": architecture(),
            "os": "linux",
            "config": { "Entrypoint": null, "Cmd": command, "Env": ["PATH=/bin"] },
            "rootfs": { "type": "layers", "diff_ids": [digest(&layer)] },
        }));
        let manifest = serialise(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        }));
        let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        if let Some(entry) = entry.as_object_mut() {
            entry.insert("annotations".into(), json!({ "io.containerd.image.name": name }));
        }
        manifests.push(entry);
        blobs.extend([config, manifest]);
    }
    let index = serialise(&json!({ "schemaVersion": 2, "manifests": manifests }));

    let target = File::create(archive).map_err(file("create", archive))?;
    let mut tar = tar::Builder::new(target);
    let mut add =
        |path: &str, bytes: &[u8]| append(&mut tar, path, 0o644, bytes).map_err(file("write", archive));
    add("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    add("index.json", &index)?;
    for blob in &blobs {
        add(&digest(blob).replace("sha256:", "blobs/sha256/"), blob)?;
    }
    tar.finish().map_err(file("write", archive))
}

/// The file system of both images as a tar. Times are zero, so equal input gives equal digests.
fn layer() -> Result<Vec<u8>> {
    let path = Path::new(BUSYBOX);
    let busybox = fs::read(path).map_err(file("read", path))?;
    let mut tar = tar::Builder::new(Vec::new());
    let put = |tar: &mut tar::Builder<Vec<u8>>| {
        for folder in ["bin/", "etc/", "tmp/", "dev/", "proc/", "sys/"] {
            let mut header = header(tar::EntryType::Directory, 0o755, 0);
            tar.append_data(&mut header, folder, std::io::empty())?;
        }
        append(tar, "bin/busybox", 0o755, &busybox)?;
        append(tar, "etc/passwd", 0o644, b"root:x:0:0:root:/:/bin/sh\n")?;
        for applet in APPLETS {
            let mut header = header(tar::EntryType::Symlink, 0o777, 0);
            tar.append_link(&mut header, format!("bin/{applet}"), "busybox")?;
        }
        tar.finish()
    };
    put(&mut tar).map_err(file("pack", path))?;
    tar.into_inner().map_err(file("pack", path))
}

fn header(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header
}

fn append<W: std::io::Write>(
    tar: &mut tar::Builder<W>,
    path: &str,
    mode: u32,
    bytes: &[u8],
) -> std::io::Result<()> {
    let mut header = header(tar::EntryType::Regular, mode, u64::try_from(bytes.len()).unwrap_or(u64::MAX));
    tar.append_data(&mut header, path, bytes)
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn serialise(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn descriptor(media_type: &str, bytes: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": digest(bytes), "size": bytes.len() })
}

fn digest(bytes: &[u8]) -> String {
    let hash = Sha256::digest(bytes);
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_known_bytes_is_the_published_one() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(digest(b""), empty);
    }
}
