//! What Gantry's daemons wrote while a scenario went wrong: its cluster is gone before anybody can look.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Lines shown of each log.
const LINES: usize = 40;

/// How long the daemons' logs are by now.
pub(crate) struct Logs(BTreeMap<PathBuf, u64>);

impl Logs {
    /// Those of the cluster in `folder`.
    pub(crate) fn of(folder: &Path) -> Self {
        Self(lengths(folder).collect())
    }

    /// The last lines that each of them got since.
    pub(crate) fn since(&self, folder: &Path) -> String {
        let mut told = String::new();
        for (path, length) in lengths(folder) {
            // A log that became shorter was started again.
            let before = self.0.get(&path).copied().filter(|before| *before <= length);
            let text = read_from(&path, before.unwrap_or(0)).unwrap_or_else(|error| error.to_string());
            let lines: Vec<&str> = text.lines().collect();
            let last = &lines[lines.len().saturating_sub(LINES)..];
            if !last.is_empty() {
                let _ = write!(told, "\n--- {}\n{}", path.display(), last.join("\n"));
            }
        }
        told
    }
}

/// The logs of Gantry's daemons, and their lengths in bytes.
fn lengths(folder: &Path) -> impl Iterator<Item = (PathBuf, u64)> {
    let sandboxes = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut logs: Vec<(PathBuf, u64)> = sandboxes
        .filter_map(|sandbox| std::fs::read_dir(sandbox.path().join("log")).ok())
        .flatten()
        .flatten()
        .filter(|log| log.file_name().to_string_lossy().starts_with("gantry-"))
        .filter_map(|log| Some((log.path(), log.metadata().ok()?.len())))
        .collect();
    logs.sort();
    logs.into_iter()
}

fn read_from(path: &Path, start: u64) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
