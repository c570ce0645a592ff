//! The logs of Gantry's daemons: all of them while a scenario fails, because its cluster is gone before the operator can
//! look, and the lines of one that a scenario waits for.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::Result;
use gantry_e2e::{Daemon, until};

use crate::pods::RUN_LIMIT;

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

/// The log of one daemon from a moment on.
pub(crate) struct Log {
    path: PathBuf,
    start: u64,
}

impl Log {
    /// The log of a daemon from now on.
    pub(crate) fn of(daemon: &Daemon) -> Self {
        let path = daemon.log().to_owned();
        let start = path.metadata().map_or(0, |file| file.len());
        Self { path, start }
    }

    /// Its lines.
    pub(crate) fn text(&self) -> Result<String> {
        Ok(read_from(&self.path, self.start)?)
    }

    /// Waits until it contains these words.
    pub(crate) async fn has(&self, words: &str) -> Result<()> {
        let found = until(format!("log line {words:?}"), RUN_LIMIT, async || {
            let text = self.text().map_err(|error| format!("{error:#}"))?;
            if text.contains(words) { Ok(()) } else { Err(text) }
        });
        Ok(found.await?)
    }
}

fn read_from(path: &Path, start: u64) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
