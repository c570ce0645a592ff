//! A device plugin server on one socket file: bound afresh, retired when another takes its place, stopped with a deadline. It knows
//! nothing of kubelet and registers nothing.

use std::io;
use std::path::Path;
use std::time::Duration;

use gantry_proto::deviceplugin::device_plugin_server::DevicePluginServer;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::server;
use super::service::DevicePluginService;

/// How long a stopping server may take to end its streams. A client that never speaks would otherwise keep it for ever.
const DRAIN: Duration = Duration::from_secs(2);

/// A server on one socket file.
#[derive(Debug)]
pub(super) struct Serving {
    /// Ends the streams too.
    stop: CancellationToken,
    /// Ends the listening: streams that are open go on, and the server ends with the last connection.
    retire: CancellationToken,
    task: JoinHandle<()>,
    inode: Option<u64>,
    /// How many streams of lists are open.
    streams: watch::Receiver<usize>,
}

impl Serving {
    /// Binds a fresh socket at `path`, in the place of what may lie there, and serves on it. `service` ends its streams on `stop`.
    pub(super) fn start(
        path: &Path,
        service: DevicePluginService,
        stop: CancellationToken,
    ) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        let inode = inode(path);
        let streams = service.streams.subscribe();
        let retire = stop.child_token();
        let server = server::serve(
            listener,
            DevicePluginServer::new(service),
            retire.clone(),
            stop.clone(),
        );
        let deadline = stop.clone();
        let task = tokio::spawn(async move {
            let drained = async {
                deadline.cancelled().await;
                tokio::time::sleep(DRAIN).await;
            };
            tokio::select! {
                () = server => {}
                () = drained => debug!("a client kept its connection beyond the deadline"),
            }
        });
        Ok(Self {
            stop,
            retire,
            task,
            inode,
            streams,
        })
    }

    /// Serves nobody new. Whoever is connected stays so.
    pub(super) fn retire(&self) {
        self.retire.cancel();
    }

    /// Ends the streams.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }

    /// Waits until the last connection has ended.
    pub(super) async fn ended(self) {
        if let Err(error) = self.task.await {
            warn!(%error, "device plugin server failed");
        }
    }

    /// Whether its last connection has ended, or it has failed.
    pub(super) fn is_over(&self) -> bool {
        self.task.is_finished()
    }

    /// The inode of its socket, which tells it from another's in its place.
    pub(super) fn inode(&self) -> Option<u64> {
        self.inode
    }

    /// How many streams of lists are open.
    pub(super) fn open(&self) -> usize {
        *self.streams.borrow()
    }

    /// [`Serving::open`], which counts as looked at for [`Serving::streams_change`].
    pub(super) fn streams(&mut self) -> usize {
        *self.streams.borrow_and_update()
    }

    /// Waits until the number of open streams is another one than was last looked at.
    pub(super) async fn streams_change(&mut self) {
        if self.streams.changed().await.is_err() {
            // The server has ended, and has closed its socket, which is looked for elsewhere.
            std::future::pending::<()>().await;
        }
    }
}

/// The inode of what lies at `path`.
pub(super) fn inode(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path)
        .ok()
        .map(|metadata| metadata.ino())
}
