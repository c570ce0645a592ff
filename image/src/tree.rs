//! The files of a layer, in the order of their paths.

use std::collections::{BTreeMap, btree_map};
use std::io::Write as _;

use anyhow::{Context, Result, ensure};
use flate2::GzBuilder;

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    Folder,
    File {
        is_executable: bool,
        bytes: Vec<u8>,
    },
    /// A symbolic link, with its target.
    Link(String),
}

/// Files by path, without a leading slash. All belong to root, and only their owner may write them.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    entries: BTreeMap<String, Entry>,
}

impl Tree {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn file(&mut self, path: &str, bytes: impl Into<Vec<u8>>) -> Result<()> {
        self.add(path, Entry::File { is_executable: false, bytes: bytes.into() })
    }

    pub fn program(&mut self, path: &str, bytes: impl Into<Vec<u8>>) -> Result<()> {
        self.add(path, Entry::File { is_executable: true, bytes: bytes.into() })
    }

    pub fn link(&mut self, path: &str, target: &str) -> Result<()> {
        self.add(path, Entry::Link(target.to_owned()))
    }

    pub fn folder(&mut self, path: &str) -> Result<()> {
        self.add(path, Entry::Folder)
    }

    /// Adds an entry and the folders above it.
    ///
    /// # Errors
    /// The path is not plain, or something else is there already.
    pub fn add(&mut self, path: &str, entry: Entry) -> Result<()> {
        let is_plain = path.split('/').all(|part| !matches!(part, "" | "." | ".."));
        ensure!(is_plain, "the path {path:?} is not relative and plain");
        for (end, _) in path.match_indices('/') {
            let above = self.entries.entry(path[..end].to_owned()).or_insert(Entry::Folder);
            ensure!(*above == Entry::Folder, "{path}: {} is not a folder", &path[..end]);
        }
        match self.entries.entry(path.to_owned()) {
            btree_map::Entry::Vacant(free) => drop(free.insert(entry)),
            btree_map::Entry::Occupied(present) => {
                ensure!(*present.get() == entry, "{path} is in the layer twice, with different content");
            }
        }
        Ok(())
    }

    pub fn get(&self, path: &str) -> Option<&Entry> {
        self.entries.get(path)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(path, entry)| (path.as_str(), entry))
    }

    /// As a tar archive compressed by gzip.
    ///
    /// # Errors
    /// A path is too long for a tar archive.
    pub fn to_gzip(&self, epoch: u64) -> Result<Vec<u8>> {
        gzip(&self.to_tar(epoch)?)
    }

    /// As a tar archive; every file was changed last at `epoch`, in seconds since 1970.
    pub(crate) fn to_tar(&self, epoch: u64) -> Result<Vec<u8>> {
        let mut tar = tar::Builder::new(Vec::new());
        for (path, entry) in &self.entries {
            let (kind, mode) = match entry {
                Entry::Folder => (tar::EntryType::Directory, 0o755),
                Entry::File { is_executable: true, .. } => (tar::EntryType::Regular, 0o755),
                Entry::File { is_executable: false, .. } => (tar::EntryType::Regular, 0o644),
                Entry::Link(_) => (tar::EntryType::Symlink, 0o777),
            };
            let mut header = header(kind, mode, epoch);
            match entry {
                Entry::Folder => tar.append_data(&mut header, format!("{path}/"), std::io::empty()),
                Entry::File { bytes, .. } => {
                    header.set_size(bytes.len().try_into().context("a file is too large")?);
                    tar.append_data(&mut header, path, bytes.as_slice())
                }
                Entry::Link(target) => tar.append_link(&mut header, path, target),
            }
            .with_context(|| format!("cannot pack {path}"))?;
        }
        Ok(tar.into_inner()?)
    }
}

/// Compresses. A builder of default values writes neither time nor name.
pub(crate) fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut gzip = GzBuilder::new().write(Vec::new(), flate2::Compression::best());
    gzip.write_all(bytes)?;
    Ok(gzip.finish()?)
}

/// A header of nothing but its arguments.
pub(crate) fn header(kind: tar::EntryType, mode: u32, epoch: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    header.set_mtime(epoch);
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_sorted_whatever_their_order() {
        let mut one = Tree::new();
        one.file("etc/b", "1").unwrap();
        one.program("etc/a", "2").unwrap();
        one.link("lib", "usr/lib").unwrap();
        let mut other = Tree::new();
        other.link("lib", "usr/lib").unwrap();
        other.program("etc/a", "2").unwrap();
        other.file("etc/b", "1").unwrap();
        assert_eq!(one.to_tar(7).unwrap(), other.to_tar(7).unwrap());
        assert_ne!(one.to_tar(7).unwrap(), one.to_tar(8).unwrap());
        let paths: Vec<&str> = one.iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["etc", "etc/a", "etc/b", "lib"]);
    }

    #[test]
    fn contradictory_entries_are_refused() {
        let mut tree = Tree::new();
        tree.file("etc/passwd", "root").unwrap();
        tree.file("etc/passwd", "root").unwrap();
        assert!(tree.file("etc/passwd", "other").is_err());
        assert!(tree.file("etc/passwd/x", "").is_err());
        for path in ["/etc", "etc/../x", "etc//x", "./x", ""] {
            assert!(tree.file(path, "").is_err(), "{path}");
        }
    }
}
