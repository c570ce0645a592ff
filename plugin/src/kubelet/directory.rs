//! Watches kubelet's device plugin directory: kubelet's socket, our own sockets, and the directory itself.
//! Publishes that something changed; the endpoints act on it.

use std::ffi::OsStr;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures::StreamExt;
use inotify::{EventMask, EventStream, Inotify, WatchMask};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::access;
use crate::handover::SharedHandover;
use crate::observe::Observations;
use gantry_runtime::LogThrottle;

/// Interval of checks without events: an event may be lost (queue overflow, a parent that did not exist).
const RECHECK: Duration = Duration::from_secs(2);

/// State of the directory. Endpoints compare it with the state that they last acted on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct View {
    /// Number of kubelet sockets seen so far: a new number means a new kubelet. 0 before the first.
    pub kubelet: u64,
    /// Whether kubelet's socket exists now.
    pub present: bool,
    /// Number of changes, so that endpoints check their own sockets.
    pub changes: u64,
}

#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    kubelet: Option<PathBuf>,
    views: watch::Sender<View>,
    handover: Arc<SharedHandover>,
    observed: Arc<Observations>,
    socket: Option<Identity>,
    directory: Option<Identity>,
    missing_log: LogThrottle,
    /// Since when something is missing.
    missing_since: Option<Instant>,
}

/// Distinguishes a file from its successor of the same name. Inode numbers are reused at once, so times are
/// compared too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    created: Option<SystemTime>,
}

impl Identity {
    fn of(path: &Path) -> Option<Self> {
        std::fs::symlink_metadata(path).ok().map(|metadata| Self::from(&metadata))
    }
}

impl From<&Metadata> for Identity {
    fn from(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino(), created: metadata.created().ok() }
    }
}

impl Directory {
    /// A watcher of `path` and of the socket `kubelet`, usually in it, and the views that it publishes.
    pub fn new(
        path: PathBuf,
        kubelet: Option<PathBuf>,
        handover: &Arc<SharedHandover>,
        observed: &Arc<Observations>,
    ) -> (Self, watch::Receiver<View>) {
        let (views, receiver) = watch::channel(View::default());
        let watcher = Self {
            path,
            kubelet,
            views,
            handover: Arc::clone(handover),
            observed: Arc::clone(observed),
            socket: None,
            directory: None,
            missing_log: LogThrottle::default(),
            missing_since: None,
        };
        (watcher, receiver)
    }

    /// Watches until `shutdown`.
    pub async fn watch(mut self, shutdown: CancellationToken) {
        let mut first = true;
        let mut watch_log = LogThrottle::default();
        loop {
            // The watch is set before the check, so that no change in between is missed.
            let mut events = match self.open() {
                Ok(events) => {
                    watch_log.reset();
                    Some(events)
                }
                Err(error) => {
                    if watch_log.should_log(&error.to_string(), Instant::now()) {
                        warn!(directory = %self.path.display(), %error, "cannot watch the device plugin directory; checking it every 2 s");
                    }
                    None
                }
            };
            self.directory = Identity::of(&self.path);
            self.check(false, first);
            first = false;
            loop {
                let next = async {
                    match &mut events {
                        Some(events) => events.next().await,
                        None => std::future::pending().await,
                    }
                };
                let replaced = tokio::select! {
                    () = shutdown.cancelled() => return,
                    event = next => match event {
                        Some(Ok(event)) => {
                            self.check(self.names_kubelet(event.mask, event.name.as_deref()), false);
                            false
                        }
                        Some(Err(error)) => {
                            warn!(%error, "reading directory events failed, watching the directory again");
                            true
                        }
                        None => true,
                    },
                    () = tokio::time::sleep(RECHECK) => {
                        self.check(false, false);
                        events.is_none()
                    }
                };
                if replaced || Identity::of(&self.path) != self.directory {
                    debug!(directory = %self.path.display(), "the device plugin directory appeared, disappeared or was replaced");
                    break;
                }
            }
        }
    }

    /// Watches the directory if it exists, and its parent for changes of the directory.
    fn open(&self) -> io::Result<EventStream<[u8; 4096]>> {
        let inotify = Inotify::init()?;
        let changes = WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::MOVE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        let parent = self.path.parent().map(|parent| inotify.watches().add(parent, changes));
        let own = inotify.watches().add(&self.path, changes);
        match (own, parent) {
            (Err(error), Some(Err(_)) | None) => Err(error),
            _ => inotify.into_event_stream([0; 4096]),
        }
    }

    /// Compares the directory with its last state and publishes changes.
    fn check(&mut self, is_created: bool, first: bool) {
        let socket = self.kubelet.as_deref().and_then(Identity::of);
        // Without creation times in the file system a new socket may look like the old one: then the event
        // decides.
        let renewed = socket.is_some_and(|identity| {
            Some(identity) != self.socket || (is_created && identity.created.is_none())
        });
        self.socket = socket;
        self.report_missing(first);
        self.views.send_modify(|view| {
            view.changes += 1;
            view.present = socket.is_some();
            if renewed {
                view.kubelet += 1;
            }
        });
        if renewed && !first {
            info!("kubelet's registration socket appeared");
            self.handover.kubelet_restarted();
        }
    }

    /// Reports what is missing before resources can be registered. A restart of kubelet takes a moment and is not logged.
    fn report_missing(&mut self, first: bool) {
        let missing = self.kubelet.as_deref().and_then(|kubelet| access::missing(&self.path, kubelet));
        match &missing {
            Some(missing) => {
                let since = *self.missing_since.get_or_insert_with(Instant::now);
                let lasts = first || since.elapsed() >= RECHECK;
                if lasts && self.missing_log.should_log(missing, Instant::now()) {
                    warn!("{missing}");
                }
            }
            None => {
                self.missing_since = None;
                self.missing_log.reset();
            }
        }
        self.observed.kubelet(missing);
    }

    /// Whether an event is the creation of kubelet's socket.
    fn names_kubelet(&self, mask: EventMask, name: Option<&OsStr>) -> bool {
        let kubelet = self.kubelet.as_deref().and_then(Path::file_name);
        mask.intersects(EventMask::CREATE | EventMask::MOVED_TO) && kubelet.is_some() && name == kubelet
    }
}
