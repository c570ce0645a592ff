//! A device plugin server on one socket file: bound to a new socket, retired when another server replaces it,
//! stopped with a deadline. Independent of kubelet.

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

/// Time limit for streams to end, because a silent client would keep its stream for ever.
const DRAIN: Duration = Duration::from_secs(2);

/// A server on one socket file.
#[derive(Debug)]
pub(super) struct Serving {
    /// Ends the streams and the server.
    stop: CancellationToken,
    /// Ends accepting: open streams continue, and the server ends with the last connection.
    retire: CancellationToken,
    task: JoinHandle<()>,
    inode: Option<u64>,
    /// Number of open streams.
    streams: watch::Receiver<usize>,
}

impl Serving {
    /// Binds a new socket at `path`, replacing any file there, and serves on it. `service` ends its streams on
    /// `stop`.
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

    /// Stops accepting. Connections stay open.
    pub(super) fn retire(&self) {
        self.retire.cancel();
    }

    /// Ends the streams.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }

    /// Waits until the last connection ended.
    pub(super) async fn ended(self) {
        if let Err(error) = self.task.await {
            warn!(%error, "device plugin server failed");
        }
    }

    /// Whether the last connection ended, or the server failed.
    pub(super) fn is_over(&self) -> bool {
        self.task.is_finished()
    }

    /// The inode of its socket, which distinguishes it from another socket at the path.
    pub(super) fn inode(&self) -> Option<u64> {
        self.inode
    }

    /// Number of open streams.
    pub(super) fn open(&self) -> usize {
        *self.streams.borrow()
    }

    /// [`Serving::open`], and marks the number as seen for [`Serving::streams_change`].
    pub(super) fn streams(&mut self) -> usize {
        *self.streams.borrow_and_update()
    }

    /// Waits until the number of open streams differs from the one seen last.
    pub(super) async fn streams_change(&mut self) {
        if self.streams.changed().await.is_err() {
            // The server ended and closed its socket, which is detected elsewhere.
            std::future::pending::<()>().await;
        }
    }
}

/// The inode of the file at `path`.
pub(super) fn inode(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path)
        .ok()
        .map(|metadata| metadata.ino())
}
