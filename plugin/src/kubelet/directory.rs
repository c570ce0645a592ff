//! Watches kubelet's device plugin directory: kubelet's socket coming back, our own going away, the directory itself missing
//! or replaced. Says that something moved; what to do about it is the endpoints' business.

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

use crate::handover::SharedHandover;
use crate::recurring::Recurring;

/// Looked at this often even if no event comes: an event may be lost (queue overflow, a parent that did not exist).
const RECHECK: Duration = Duration::from_secs(2);

/// What the directory looks like. Endpoints compare it with what they last acted on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct View {
    /// Counts the kubelet sockets seen: a new number is a new kubelet. 0 before the first.
    pub kubelet: u64,
    /// Whether kubelet's socket is there now.
    pub present: bool,
    /// Counts everything that came or went, so that endpoints look after their own socket.
    pub touched: u64,
}

/// The watcher.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    kubelet: Option<PathBuf>,
    views: watch::Sender<View>,
    handover: Arc<SharedHandover>,
    socket: Option<Identity>,
    directory: Option<Identity>,
}

/// Tells a file from its successor of the same name. Inode numbers are used again at once, hence the times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    born: Option<SystemTime>,
}

impl Identity {
    fn of(path: &Path) -> Option<Self> {
        std::fs::symlink_metadata(path)
            .ok()
            .map(|metadata| Self::from(&metadata))
    }
}

impl From<&Metadata> for Identity {
    fn from(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            born: metadata.created().ok(),
        }
    }
}

impl Directory {
    /// A watcher of `path`, and of the socket `kubelet`, which is there as a rule, and the views it will publish.
    pub fn new(
        path: PathBuf,
        kubelet: Option<PathBuf>,
        handover: Arc<SharedHandover>,
    ) -> (Self, watch::Receiver<View>) {
        let (views, receiver) = watch::channel(View::default());
        let watcher = Self {
            path,
            kubelet,
            views,
            handover,
            socket: None,
            directory: None,
        };
        (watcher, receiver)
    }

    /// Watches until `shutdown`.
    pub async fn watch(mut self, shutdown: CancellationToken) {
        let mut first = true;
        let mut unwatched = Recurring::default();
        loop {
            // The watch is set before the look, so that nothing between the two is missed.
            let mut events = match self.open() {
                Ok(events) => {
                    unwatched.over();
                    Some(events)
                }
                Err(error) => {
                    if unwatched.tells(&error.to_string(), Instant::now()) {
                        warn!(directory = %self.path.display(), %error, "cannot watch the device plugin directory, looking every 2 s");
                    }
                    None
                }
            };
            self.directory = Identity::of(&self.path);
            self.look(false, first);
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
                            self.look(self.names_kubelet(event.mask, event.name.as_deref()), false);
                            false
                        }
                        Some(Err(error)) => {
                            warn!(%error, "reading directory events failed, watching anew");
                            true
                        }
                        None => true,
                    },
                    () = tokio::time::sleep(RECHECK) => {
                        self.look(false, false);
                        events.is_none()
                    }
                };
                if replaced || Identity::of(&self.path) != self.directory {
                    debug!(directory = %self.path.display(), "the directory came, went or was replaced");
                    break;
                }
            }
        }
    }

    /// Watches the directory if it is there, and its parent for its coming and going.
    fn open(&self) -> io::Result<EventStream<[u8; 4096]>> {
        let inotify = Inotify::init()?;
        let changes = WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::MOVE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        let parent = self
            .path
            .parent()
            .map(|parent| inotify.watches().add(parent, changes));
        let own = inotify.watches().add(&self.path, changes);
        match (own, parent) {
            (Err(error), Some(Err(_)) | None) => Err(error),
            _ => inotify.into_event_stream([0; 4096]),
        }
    }

    /// Compares the directory with what was last seen and publishes the difference.
    fn look(&mut self, created: bool, first: bool) {
        let socket = self.kubelet.as_deref().and_then(Identity::of);
        // Where the file system tells no time of birth, an inode may be its own successor: then the event decides.
        let renewed = socket
            .is_some_and(|identity| Some(identity) != self.socket || (created && identity.born.is_none()));
        self.socket = socket;
        self.views.send_modify(|view| {
            view.touched += 1;
            view.present = socket.is_some();
            if renewed {
                view.kubelet += 1;
            }
        });
        if renewed && !first {
            info!("kubelet's registration socket is there");
            self.handover.kubelet_restarted();
        }
    }

    /// Whether an event is the coming of kubelet's socket.
    fn names_kubelet(&self, mask: EventMask, name: Option<&OsStr>) -> bool {
        let kubelet = self.kubelet.as_deref().and_then(Path::file_name);
        mask.intersects(EventMask::CREATE | EventMask::MOVED_TO) && kubelet.is_some() && name == kubelet
    }
}
