//! Watches a config file or a folder of them. A mounted ConfigMap changes by swapping a link two steps away (`..data`), so every folder on
//! the path is watched. After an event the file is read again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures::StreamExt;
use inotify::{EventStream, Inotify, WatchMask};
use rustix::fs::OFlags;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::Sighting;
use crate::read::MAX_BYTES;

/// Interval for reading without an event: a folder may not have existed when the watch began.
const RECHECK: Duration = Duration::from_secs(5);
/// Pause after an event, in which a writer replaces further files.
const SETTLE: Duration = Duration::from_millis(50);
/// How long a file must stay empty before that is accepted. Editors and programs empty a file before they write it, and the defaults
/// would be in effect for that moment.
const EMPTIED: Duration = Duration::from_secs(1);
/// Most links that are followed from one path.
const MOST_LINKS: usize = 16;

/// Sends the content of the path of `changes` whenever it differs from `last`, until `shutdown`.
pub(super) async fn follow(
    mut changes: PathChanges,
    mut last: Option<Sighting>,
    sightings: mpsc::Sender<Sighting>,
    shutdown: CancellationToken,
) {
    let mut doubt = Doubt::default();
    loop {
        changes.arm();
        let sighting = see(&changes.path, Pipes::Refused);
        let wait = doubt.about(&sighting, last.as_ref(), Instant::now());
        if wait.is_none() && last.as_ref() != Some(&sighting) {
            last = Some(sighting.clone());
            if sightings.send(sighting).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = sightings.closed() => return,
            () = changes.next() => {}
            () = over(wait) => {}
        }
    }
}

/// Decides whether an empty file is about to be written.
#[derive(Debug, Default)]
pub(super) struct Doubt {
    since: Option<Instant>,
}

impl Doubt {
    /// How long to wait before the file, `seen` after `last`, is read again; `None`: the content is accepted.
    pub(super) fn about(
        &mut self,
        seen: &Sighting,
        last: Option<&Sighting>,
        now: Instant,
    ) -> Option<Duration> {
        let emptied = seen.is_empty() && last.is_none_or(|last| !last.is_empty());
        if !emptied {
            self.since = None;
            return None;
        }
        let accepted = *self.since.get_or_insert(now) + EMPTIED;
        Some(accepted.saturating_duration_since(now)).filter(|wait| !wait.is_zero())
    }
}

/// Waits for this time, or forever without one.
pub(super) async fn over(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}

/// Whether the file may be a pipe, which is read until the other side closes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pipes {
    /// Allowed: the caller can block.
    Read,
    /// Refused: reading would block, and a second read would find it empty.
    Refused,
}

/// The content of a file.
pub(super) fn see(path: &Path, pipes: Pipes) -> Sighting {
    Sighting {
        source: path.display().to_string(),
        text: text(path, pipes).map_err(|error| error.to_string()),
    }
}

/// The text of a file up to the limit of a configuration. Devices are not opened, which alone can have effects.
pub(super) fn text(path: &Path, pipes: Pipes) -> io::Result<String> {
    let metadata = std::fs::metadata(path)?;
    if is_null(&metadata) {
        return Ok(String::new());
    }
    readable(&metadata, pipes)?;
    let waits = match pipes {
        Pipes::Read => OFlags::empty(),
        Pipes::Refused => OFlags::NONBLOCK,
    };
    let flags = i32::try_from((waits | OFlags::NOCTTY).bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    // The file may have been replaced since the first check.
    readable(&file.metadata()?, pipes)?;
    let most = u64::try_from(MAX_BYTES).unwrap_or(u64::MAX);
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_BYTES {
        return Err(io::Error::other(format!("it is longer than {MAX_BYTES} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8"))
}

/// Whether this is /dev/null, which NVIDIA's config-manager links to for the empty configuration. Linux numbers it 1:3.
fn is_null(metadata: &Metadata) -> bool {
    let number = metadata.rdev();
    metadata.file_type().is_char_device() && (rustix::fs::major(number), rustix::fs::minor(number)) == (1, 3)
}

/// Whether the path leads to a file that stays empty.
pub(super) fn stays_empty(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| is_null(&metadata))
}

/// Refuses everything but regular files, and pipes where allowed.
fn readable(metadata: &Metadata, pipes: Pipes) -> io::Result<()> {
    let kind = metadata.file_type();
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_fifo() && pipes == Pipes::Read => return Ok(()),
        () if kind.is_fifo() => "a pipe (FIFO)",
        () if kind.is_dir() => "a folder",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(io::Error::other(format!(
        "it is {what}; a config file is a regular file, a link to one, or /dev/null for an empty one"
    )))
}

/// The files of a folder by name, each with its text or its read error, which matters only if the file is chosen. Folders and hidden
/// files, which a mounted ConfigMap has, are skipped.
pub(super) fn list(folder: &Path) -> io::Result<BTreeMap<String, Result<String, String>>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if name.starts_with('.') || !entry.path().is_file() {
            continue;
        }
        let text = text(&entry.path(), Pipes::Refused);
        files.insert(name, text.map_err(|error| error.to_string()));
    }
    Ok(files)
}

/// Waits for changes of a path.
pub(super) struct PathChanges {
    path: PathBuf,
    events: Option<EventStream<[u8; 4096]>>,
    hangup: Option<Signal>,
}

impl PathChanges {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, events: None, hangup: signal(SignalKind::hangup()).ok() }
    }

    /// Renews the watches. Call it before reading, so that no change is missed.
    pub(super) fn arm(&mut self) {
        self.events = open(&self.path)
            .inspect_err(
                |error| debug!(path = %self.path.display(), %error, "cannot watch, looking every 5 s"),
            )
            .ok();
    }

    /// Waits until the path may have changed.
    pub(super) async fn next(&mut self) {
        let event = async {
            match &mut self.events {
                Some(events) => {
                    events.next().await;
                }
                None => std::future::pending().await,
            }
        };
        let hangup = async {
            match &mut self.hangup {
                Some(signal) => {
                    signal.recv().await;
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = event => tokio::time::sleep(SETTLE).await,
            () = hangup => info!(path = %self.path.display(), "SIGHUP: reading the configuration again"),
            () = tokio::time::sleep(RECHECK) => {}
        }
    }
}

fn open(path: &Path) -> io::Result<EventStream<[u8; 4096]>> {
    let inotify = Inotify::init()?;
    let changes = WatchMask::CLOSE_WRITE
        | WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::MOVE
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR;
    for folder in folders(path) {
        // A missing folder shows in its parent or at the next read.
        let _ = inotify.watches().add(folder, changes);
    }
    inotify.into_event_stream([0; 4096])
}

/// Every folder on the way to the content of `path`.
fn folders(path: &Path) -> BTreeSet<PathBuf> {
    let mut folders = BTreeSet::new();
    let mut at = path.to_owned();
    for _ in 0..MOST_LINKS {
        let parent = match at.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        folders.insert(parent.clone());
        if at.is_dir() {
            folders.insert(at.clone());
        }
        match std::fs::read_link(&at) {
            Ok(target) => at = parent.join(target),
            Err(_) => break,
        }
    }
    folders
}
