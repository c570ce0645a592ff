//! Labels as a features file of node-feature-discovery: a line `key=value` for each, sorted.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use super::super::Labels;
use super::WriteError;

/// The text of the file.
pub fn text(labels: &Labels) -> String {
    labels.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
}

/// Replaces the file in one step, or writes to standard output without a path. Missing folders are created. The temporary file is in
/// a folder `.gantry-tmp`, because a file beside the features would be read as features.
///
/// # Errors
/// The operating system's error, with the path.
pub fn write(labels: &Labels, path: Option<&Path>) -> Result<(), WriteError> {
    let text = text(labels);
    let Some(path) = path else {
        return io::stdout().lock().write_all(text.as_bytes()).map_err(WriteError::Output);
    };
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |problem| WriteError::File { path, problem }
    };
    let name =
        path.file_name().ok_or_else(|| failed(path)(io::Error::from(io::ErrorKind::InvalidFilename)))?;
    let beside = path.with_file_name(".gantry-tmp");
    fs::create_dir_all(&beside).map_err(failed(&beside))?;
    let new = beside.join(name);
    let written = fs::write(&new, text)
        .and_then(|()| fs::set_permissions(&new, fs::Permissions::from_mode(0o644)))
        .and_then(|()| fs::rename(&new, path))
        .map_err(failed(path));
    // After a failure the next success removes it.
    let _ = fs::remove_dir(&beside);
    written
}

/// Removes the file `path`, if it exists, unless it is the file `new` by another name.
///
/// # Errors
/// The operating system's error, with the path.
pub fn remove(path: &Path, new: Option<&Path>) -> Result<(), WriteError> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let there = identity(path);
    if there.is_some() && new.is_some_and(|new| identity(new) == there) {
        return Ok(());
    }
    match fs::remove_file(path) {
        Err(problem) if problem.kind() != io::ErrorKind::NotFound => {
            Err(WriteError::Remove { path: path.to_owned(), problem })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::labels::LabelName;

    fn labels(entries: &[(&str, &str)]) -> Labels {
        entries
            .iter()
            .map(|(name, value)| (LabelName::new("nvidia.com", name), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn labels_file_is_replaced_and_leaves_nothing_beside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("features.d/gfd");
        write(&labels(&[("gpu.count", "8"), ("cuda.driver.rev", "")]), Some(&path)).unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            "nvidia.com/cuda.driver.rev=\nnvidia.com/gpu.count=8\n"
        );
        write(&labels(&[("gpu.count", "7")]), Some(&path)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "nvidia.com/gpu.count=7\n");
        let names: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
    }

    #[test]
    fn former_file_is_removed_unless_it_is_the_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gfd");
        let twin = folder.path().join("../").join(folder.path().file_name().unwrap()).join("gfd");
        write(&labels(&[("gpu.count", "8")]), Some(&path)).unwrap();
        remove(&path, Some(&twin)).unwrap();
        assert!(path.exists());
        remove(&path, Some(&folder.path().join("other"))).unwrap();
        assert!(!path.exists());
        remove(&path, None).unwrap();
        let error = remove(folder.path(), None).unwrap_err();
        assert!(error.to_string().contains("still published"), "{error}");
    }

    #[test]
    fn unwritable_file_is_named_and_old_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gfd");
        fs::create_dir_all(path.join("inside")).unwrap();
        let error = write(&labels(&[("gpu.count", "7")]), Some(&path)).unwrap_err();
        assert!(error.to_string().contains("/gfd"), "{error}");
        assert!(path.join("inside").exists());
        assert!(write(&labels(&[]), Some(Path::new("/"))).is_err());
    }
}
