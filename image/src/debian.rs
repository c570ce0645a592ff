//! The Debian packages of which the image takes the C library: pinned by version and SHA-256, and fetched once.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use lzma_rust2::XzReader;

use crate::{Arch, Entry, sha256};

const PINNED: &str = include_str!("../data/debian.csv");

/// Names another mirror: `http://HOST/debian`.
const MIRROR_VARIABLE: &str = "GANTRY_DEBIAN_MIRROR";
/// Tried in this order. The second keeps versions that the first has replaced.
const MIRRORS: [&str; 2] =
    ["http://deb.debian.org/debian", "http://snapshot.debian.org/archive/debian/20261125T000000Z"];

/// Bytes of a package, and of what is unpacked of it: several times what any has.
const PACKAGE_LIMIT: u64 = 32 << 20;
const UNPACKED_LIMIT: u64 = 256 << 20;
/// KiB that the decompressor may use.
const XZ_MEMORY: u32 = 128 << 10;

/// What the image has of each package; `TRIPLET` stands for the architecture's. Programs find NVML's and their own
/// libraries through the folder of `TRIPLET`, and NVIDIA's container runtime does by `etc/debian_version`.
const WANTED: [(&str, &[&str]); 4] = [
    ("base-files", &["etc/debian_version", "etc/os-release", "lib", "lib64", "usr/lib/os-release"]),
    ("gcc-14-base", &["usr/share/doc/gcc-14-base/copyright"]),
    (
        "libc6",
        &[
            "etc/ld.so.conf.d/TRIPLET.conf",
            "usr/lib/TRIPLET/ld-linux-aarch64.so.1",
            "usr/lib/TRIPLET/ld-linux-x86-64.so.2",
            "usr/lib/TRIPLET/libc.so.6",
            "usr/lib/TRIPLET/libdl.so.2",
            "usr/lib/TRIPLET/libm.so.6",
            "usr/lib/TRIPLET/libnss_dns.so.2",
            "usr/lib/TRIPLET/libnss_files.so.2",
            "usr/lib/TRIPLET/libpthread.so.0",
            "usr/lib/TRIPLET/libresolv.so.2",
            "usr/lib/TRIPLET/librt.so.1",
            "usr/lib/ld-linux-aarch64.so.1",
            "usr/lib64/ld-linux-x86-64.so.2",
            "usr/share/doc/libc6/copyright",
        ],
    ),
    ("libgcc-s1", &["usr/lib/TRIPLET/libgcc_s.so.1", "usr/share/doc/libgcc-s1"]),
];

/// A line of the list of packages.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PinnedPackage {
    name: String,
    version: String,
    arch: Arch,
    path: String,
    sha256: String,
}

/// A package, with what the image has of it.
#[derive(Debug, Clone)]
pub struct Package {
    pub name: String,
    pub version: String,
    pub arch: Arch,
    pub sha256: String,
    /// Its description as dpkg keeps it; scanners read it to find the package.
    pub control: String,
    /// By path, without a leading slash.
    pub files: BTreeMap<String, Entry>,
}

/// The packages for an architecture, fetched into the folder `cache` where they are missing there.
///
/// # Errors
/// A package is on no mirror, is another one than the pinned one, or lacks a file.
pub fn packages(arch: Arch, cache: &Path) -> Result<Vec<Package>> {
    fs::create_dir_all(cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let all = pinned(PINNED)?;
    let wanted = all.iter().filter(|pinned| pinned.arch == arch);
    wanted
        .map(|pinned| {
            let bytes = fetch(pinned, cache)?;
            unpack(pinned, &bytes).with_context(|| format!("the package {}", pinned.path))
        })
        .collect()
}

fn pinned(list: &str) -> Result<Vec<PinnedPackage>> {
    let lines = list.lines().enumerate().filter(|(_, line)| !line.starts_with('#'));
    lines
        .map(|(number, line)| {
            let fields: Vec<&str> = line.split(',').collect();
            let [name, version, arch, path, sha256] = fields[..] else {
                bail!("image/data/debian.csv, line {}: {} fields, expected 5", number + 1, fields.len());
            };
            let is_digest = sha256.len() == 64 && sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
            ensure!(is_digest, "image/data/debian.csv, line {}: {sha256:?} is no SHA-256", number + 1);
            let arch = arch.parse().with_context(|| format!("image/data/debian.csv, line {}", number + 1))?;
            let own = str::to_owned;
            let (name, version, path, sha256) = (own(name), own(version), own(path), own(sha256));
            Ok(PinnedPackage { name, version, arch, path, sha256 })
        })
        .collect()
}

/// The bytes of a package, from the cache or a mirror.
fn fetch(pinned: &PinnedPackage, cache: &Path) -> Result<Vec<u8>> {
    let kept = cache.join(format!("{}.deb", pinned.sha256));
    if let Ok(bytes) = fs::read(&kept)
        && sha256(&bytes) == pinned.sha256
    {
        return Ok(bytes);
    }
    let named = std::env::var(MIRROR_VARIABLE).ok();
    let mirrors = named.as_deref().map_or(MIRRORS.to_vec(), |mirror| vec![mirror]);
    let mut failures = Vec::new();
    for mirror in mirrors {
        let address = format!("{}/{}", mirror.trim_end_matches('/'), pinned.path);
        match download(&address) {
            Ok(bytes) if sha256(&bytes) == pinned.sha256 => {
                // Renamed into place: other processes use the same folder.
                let part = cache.join(format!("{}.{}.part", pinned.sha256, std::process::id()));
                fs::write(&part, &bytes).with_context(|| format!("cannot write {}", part.display()))?;
                fs::rename(&part, &kept).with_context(|| format!("cannot write {}", kept.display()))?;
                return Ok(bytes);
            }
            Ok(bytes) => failures.push(format!("{address}: SHA-256 is {}", sha256(&bytes))),
            Err(error) => failures.push(format!("{address}: {error:#}")),
        }
    }
    bail!(
        "cannot fetch {} {} for {}: {}. If Debian has replaced the version, pin the new one in image/data/debian.csv; \
         {MIRROR_VARIABLE} names another mirror",
        pinned.name,
        pinned.version,
        pinned.arch,
        failures.join("; ")
    )
}

fn download(address: &str) -> Result<Vec<u8>> {
    let mut response = ureq::get(address).call()?;
    Ok(response.body_mut().with_config().limit(PACKAGE_LIMIT).read_to_vec()?)
}

fn unpack(pinned: &PinnedPackage, bytes: &[u8]) -> Result<Package> {
    let wanted = WANTED.iter().find(|(name, _)| *name == pinned.name);
    let (_, wanted) = wanted.with_context(|| format!("{} is not used by the image", pinned.name))?;
    let triplet = pinned.arch.triplet();
    let wanted: Vec<String> = wanted.iter().map(|path| path.replace("TRIPLET", triplet)).collect();

    let mut archive = ar::Archive::new(bytes);
    let (mut control, mut files) = (None, BTreeMap::new());
    while let Some(member) = archive.next_entry() {
        let member = member?;
        match member.header().identifier() {
            b"control.tar.xz" => control = control_file(decompress(member))?,
            b"data.tar.xz" => files = select(decompress(member), &wanted)?,
            _ => {}
        }
    }
    let control = control.context("there is no control file in it, packed by xz")?;
    for (field, expected) in [
        ("Package", pinned.name.as_str()),
        ("Version", &pinned.version),
        ("Architecture", pinned.arch.name()),
    ] {
        let line = format!("{field}: {expected}");
        let is_there = control.lines().any(|there| there == line);
        ensure!(is_there, "its control file does not have the line {line:?}");
    }
    let absent = wanted.iter().find(|path| !files.contains_key(*path) && is_expected(path, pinned.arch));
    if let Some(path) = absent {
        bail!("there is no {path} in it");
    }
    let PinnedPackage { name, version, arch, sha256, .. } = pinned.clone();
    Ok(Package { name, version, arch, sha256, control, files })
}

/// Whether a file of the list exists for this architecture: the loaders differ.
fn is_expected(path: &str, arch: Arch) -> bool {
    let of_amd64 = path.contains("x86-64") || path == "lib64";
    let of_arm64 = path.contains("ld-linux-aarch64");
    !(of_amd64 && arch != Arch::Amd64 || of_arm64 && arch != Arch::Arm64)
}

fn decompress(member: impl Read) -> tar::Archive<impl Read> {
    tar::Archive::new(XzReader::new_mem_limit(member, false, XZ_MEMORY).take(UNPACKED_LIMIT))
}

fn control_file(mut archive: tar::Archive<impl Read>) -> Result<Option<String>> {
    for entry in archive.entries()? {
        let mut entry = entry?;
        if plain_path(&entry)? == "control" {
            let mut text = String::new();
            entry.read_to_string(&mut text)?;
            return Ok(Some(text));
        }
    }
    Ok(None)
}

/// Packages write `./usr/lib`.
fn plain_path(entry: &tar::Entry<'_, impl Read>) -> Result<String> {
    Ok(entry.path()?.to_string_lossy().trim_start_matches("./").to_owned())
}

fn select(mut archive: tar::Archive<impl Read>, wanted: &[String]) -> Result<BTreeMap<String, Entry>> {
    let mut files = BTreeMap::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = plain_path(&entry)?;
        if !wanted.contains(&path) {
            continue;
        }
        let found = match entry.header().entry_type() {
            tar::EntryType::Symlink => {
                let target = entry.link_name()?.context("a link without a target")?;
                Entry::Link(target.to_string_lossy().into_owned())
            }
            tar::EntryType::Regular => {
                let is_executable = entry.header().mode()? & 0o100 != 0;
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes)?;
                Entry::File { is_executable, bytes }
            }
            other => bail!("{path} is neither a file nor a symbolic link: {other:?}"),
        };
        files.insert(path, found);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use lzma_rust2::{XzOptions, XzWriter};

    use super::*;
    use crate::Tree;

    fn xz(bytes: &[u8]) -> Vec<u8> {
        let mut writer = XzWriter::new(Vec::new(), XzOptions::with_preset(0)).unwrap();
        writer.write_all(bytes).unwrap();
        writer.finish().unwrap()
    }

    fn tar_of(files: &[(&str, &str)]) -> Vec<u8> {
        let mut tree = Tree::new();
        for (path, text) in files {
            tree.file(path, *text).unwrap();
        }
        tree.link("usr/share/doc/libgcc-s1", "gcc-14-base").unwrap();
        tree.to_tar(0).unwrap()
    }

    fn deb(control: &str, data: &[(&str, &str)]) -> Vec<u8> {
        let mut archive = ar::Builder::new(Vec::new());
        for (name, bytes) in [
            ("debian-binary", b"2.0\n".to_vec()),
            ("control.tar.xz", xz(&tar_of(&[("control", control)]))),
            ("data.tar.xz", xz(&tar_of(data))),
        ] {
            let header = ar::Header::new(name.as_bytes().to_vec(), bytes.len() as u64);
            archive.append(&header, bytes.as_slice()).unwrap();
        }
        archive.into_inner().unwrap()
    }

    const CONTROL: &str = "Package: libgcc-s1\nVersion: 1\nArchitecture: amd64\n";
    const LIBRARY: &str = "usr/lib/x86_64-linux-gnu/libgcc_s.so.1";

    fn libgcc(sha256: &str) -> PinnedPackage {
        PinnedPackage {
            name: "libgcc-s1".to_owned(),
            version: "1".to_owned(),
            arch: Arch::Amd64,
            path: "pool/libgcc.deb".to_owned(),
            sha256: sha256.to_owned(),
        }
    }

    #[test]
    fn package_gives_only_wanted_files() {
        let bytes = deb(CONTROL, &[(LIBRARY, "machine code"), ("usr/bin/sh", "no")]);
        let package = unpack(&libgcc(""), &bytes).unwrap();
        assert_eq!(package.control, CONTROL);
        let library = Entry::File { is_executable: false, bytes: b"machine code".to_vec() };
        assert_eq!(package.files[LIBRARY], library);
        assert_eq!(package.files["usr/share/doc/libgcc-s1"], Entry::Link("gcc-14-base".to_owned()));
        assert_eq!(package.files.len(), 2);
    }

    #[test]
    fn unexpected_package_is_refused() {
        let absent = unpack(&libgcc(""), &deb(CONTROL, &[])).unwrap_err().to_string();
        assert!(absent.contains(LIBRARY), "{absent}");
        let other = CONTROL.replace("Version: 1", "Version: 2");
        let other = unpack(&libgcc(""), &deb(&other, &[(LIBRARY, "")])).unwrap_err().to_string();
        assert!(other.contains("\"Version: 1\""), "{other}");
        assert!(unpack(&libgcc(""), b"!<arch>\n").is_err());
        assert!(unpack(&libgcc(""), b"no archive").is_err());
    }

    #[test]
    fn kept_package_is_used_only_if_it_is_the_pinned_one() {
        let cache = tempfile::tempdir().unwrap();
        let bytes = deb(CONTROL, &[(LIBRARY, "")]);
        let digest = sha256(&bytes);
        let kept = cache.path().join(format!("{digest}.deb"));
        fs::write(&kept, &bytes).unwrap();
        assert_eq!(fetch(&libgcc(&digest), cache.path()).unwrap(), bytes);
    }

    #[test]
    fn list_has_the_same_packages_for_each_architecture() {
        let all = pinned(PINNED).unwrap();
        for arch in Arch::ALL {
            let names: Vec<&str> =
                all.iter().filter(|pinned| pinned.arch == arch).map(|pinned| pinned.name.as_str()).collect();
            assert_eq!(names, WANTED.map(|(name, _)| name));
        }
        for wrong in ["libc6,1,amd64,path", "libc6,1,riscv,path,00", "libc6,1,amd64,path,00"] {
            assert!(pinned(wrong).is_err(), "{wrong}");
        }
    }
}
