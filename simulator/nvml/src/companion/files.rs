//! Files, folders, links and device nodes under one root, each written down in a list, so that they can be taken away again
//! without touching anything else.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};

use super::CompanionError;

/// The list of what was laid down, at the root.
const LIST: &str = ".gantry-companion";

/// The list of the entries that change while the machine runs.
const CHANGING_LIST: &str = ".gantry-companion-mig";

/// The content of a regular file that stands for a device node.
pub const MARK: &str = "stands for a character device";

/// Lays things down under a root.
pub(super) struct Files {
    root: PathBuf,
    /// Name of the list.
    list: &'static str,
    /// What was made, in order, relative to the root.
    made: Vec<PathBuf>,
    /// Folders known to be there.
    folders: BTreeSet<PathBuf>,
    /// Whether device nodes could be made so far.
    pub(super) device_nodes: bool,
}

impl Files {
    /// Begins at `root`, from which whatever was laid down before is removed.
    pub(super) fn begin(root: &Path) -> Result<Self, CompanionError> {
        fs::create_dir_all(root).map_err(|source| failed("create", root, source))?;
        remove(root)?;
        Ok(Self::on(root, LIST))
    }

    /// Begins to write the changing entries again; unchanged ones are left alone.
    pub(super) fn again(root: &Path) -> Self {
        Self::on(root, CHANGING_LIST)
    }

    fn on(root: &Path, list: &'static str) -> Self {
        Self { root: root.to_owned(), list, made: Vec::new(), folders: BTreeSet::new(), device_nodes: true }
    }

    /// Takes away what an earlier laying down of the changing entries made and this one did not, and writes the list.
    pub(super) fn replace(mut self) -> Result<(), CompanionError> {
        let list_path = self.root.join(self.list);
        let earlier = read_list(&list_path)?.unwrap_or_default();
        let mut kept: BTreeSet<PathBuf> = self.made.iter().cloned().collect();
        kept.extend(self.folders.iter().cloned());
        take_away(&self.root, earlier.iter().filter(|path| !kept.contains(*path)).rev())?;
        // A folder that was there already is ours only if an earlier list names it.
        let ours = earlier.into_iter().filter(|path| self.folders.contains(path));
        let made = std::mem::take(&mut self.made);
        self.made = ours.chain(made).collect();
        self.finish()
    }

    /// Writes the list. Without it nothing can be removed.
    pub(super) fn finish(self) -> Result<(), CompanionError> {
        let mut list = Vec::new();
        for path in &self.made {
            list.extend_from_slice(path.as_os_str().as_bytes());
            list.push(b'\n');
        }
        let path = self.root.join(self.list);
        fs::write(&path, list).map_err(|source| failed("write", &path, source))
    }

    pub(super) fn folder(&mut self, path: impl AsRef<Path>) -> Result<(), CompanionError> {
        let path = path.as_ref();
        if path.as_os_str().is_empty() || self.folders.contains(path) {
            return Ok(());
        }
        if let Some(above) = path.parent() {
            self.folder(above)?;
        }
        let full = self.root.join(path);
        match fs::create_dir(&full) {
            Ok(()) => self.made.push(path.to_owned()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(failed("create", &full, source)),
        }
        self.folders.insert(path.to_owned());
        Ok(())
    }

    pub(super) fn file(&mut self, path: impl AsRef<Path>, content: &str) -> Result<(), CompanionError> {
        let full = self.place_for(path.as_ref())?;
        if fs::read_to_string(&full).is_ok_and(|there| there == content) {
            return Ok(());
        }
        fs::write(&full, content).map_err(|source| failed("write", &full, source))
    }

    /// A file of one line.
    pub(super) fn line(
        &mut self,
        path: impl AsRef<Path>,
        content: impl std::fmt::Display,
    ) -> Result<(), CompanionError> {
        self.file(path, &format!("{content}\n"))
    }

    /// A symbolic link, `target` relative to the link's folder.
    pub(super) fn link(&mut self, path: impl AsRef<Path>, target: &Path) -> Result<(), CompanionError> {
        let full = self.place_for(path.as_ref())?;
        symlink(target, &full).map_err(|source| failed("link", &full, source))
    }

    /// A character device, or where the system does not allow one, a regular file with [`MARK`].
    pub(super) fn device(
        &mut self,
        path: impl AsRef<Path>,
        major: u32,
        minor: u32,
    ) -> Result<(), CompanionError> {
        let full = self.place_for(path.as_ref())?;
        if self.list == CHANGING_LIST && full.exists() {
            return Ok(());
        }
        if self.device_nodes {
            match make_node(&full, major, minor) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => self.device_nodes = false,
                Err(source) => return Err(failed("create", &full, source)),
            }
        }
        fs::write(&full, format!("{MARK} {major}:{minor}\n")).map_err(|source| failed("write", &full, source))
    }

    fn place_for(&mut self, path: &Path) -> Result<PathBuf, CompanionError> {
        if let Some(folder) = path.parent() {
            self.folder(folder)?;
        }
        self.made.push(path.to_owned());
        Ok(self.root.join(path))
    }
}

/// Takes away what was laid down under `root`, and nothing else. A root without a list is left as it is.
///
/// # Errors
/// When something cannot be removed.
pub fn remove(root: &Path) -> Result<(), CompanionError> {
    for name in [CHANGING_LIST, LIST] {
        let list_path = root.join(name);
        let Some(made) = read_list(&list_path)? else {
            continue;
        };
        take_away(root, made.iter().rev())?;
        fs::remove_file(&list_path).map_err(|source| failed("remove", &list_path, source))?;
    }
    Ok(())
}

/// Whether something is laid down under `root`.
pub(crate) fn is_laid_down(root: &Path) -> bool {
    root.join(LIST).exists()
}

/// The paths of a list, in the order they were made; nothing if there is no list.
fn read_list(path: &Path) -> Result<Option<Vec<PathBuf>>, CompanionError> {
    let list = match fs::read(path) {
        Ok(list) => list,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(failed("read", path, source)),
    };
    let lines = list.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    Ok(Some(lines.map(|line| PathBuf::from(std::ffi::OsStr::from_bytes(line))).collect()))
}

/// Removes paths below `root`, in the order given.
fn take_away<'a>(root: &Path, paths: impl Iterator<Item = &'a PathBuf>) -> Result<(), CompanionError> {
    for path in paths.filter(|path| stays_below(path)) {
        let full = root.join(path);
        let removed = match fs::symlink_metadata(&full) {
            Ok(found) if found.is_dir() => fs::remove_dir(&full),
            Ok(_) => fs::remove_file(&full),
            Err(error) => Err(error),
        };
        match removed {
            Ok(()) => {}
            // Already removed, or another program keeps something in this folder.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {}
            Err(source) => return Err(failed("remove", &full, source)),
        }
    }
    Ok(())
}

/// Whether a path from the list leads nowhere but below the root.
fn stays_below(path: &Path) -> bool {
    path.components().all(|part| matches!(part, Component::Normal(_)))
}

fn make_node(path: &Path, major: u32, minor: u32) -> io::Result<()> {
    let text = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `text` is a C string that lives through the call.
    let result = unsafe { libc::mknod(text.as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(major, minor)) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> CompanionError {
    CompanionError { action, path: path.to_owned(), source }
}
