//! A device plugin server on one socket file: bound to a new socket, retired when another server replaces it,
//! stopped with a deadline. It accepts connections and lets hyper serve them.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use gantry_proto::AnyAuthority;
use gantry_proto::deviceplugin::device_plugin_server::DevicePluginServer;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::body::Body;
use tower::Service;
use tracing::{debug, warn};

use super::service::DevicePluginService;

/// Time limit for streams to end, because a silent client would keep its stream for ever.
const DRAIN: Duration = Duration::from_secs(2);

/// A server on one socket file.
#[derive(Debug)]
pub(super) struct SocketServer {
    /// Ends the streams and the server.
    stop: CancellationToken,
    /// Ends accepting: open streams continue, and the server ends with the last connection.
    retire: CancellationToken,
    task: JoinHandle<()>,
    inode: Option<u64>,
    /// Number of open streams.
    streams: watch::Receiver<usize>,
}

impl SocketServer {
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
        let server = serve(listener, DevicePluginServer::new(service), retire.clone(), stop.clone());
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
        Ok(Self { stop, retire, task, inode, streams })
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

    /// [`SocketServer::open`], and marks the number as seen for [`SocketServer::streams_change`].
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
    std::fs::symlink_metadata(path).ok().map(|metadata| metadata.ino())
}

/// The pause after a failed accept, e.g. without free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves `service` on each connection. `retire` ends accepting; `stop` cancels `retire` too, and also shuts
/// the connections down. Returns when all connections have ended.
async fn serve<S>(listener: UnixListener, service: S, retire: CancellationToken, stop: CancellationToken)
where
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    let service = TowerToHyperService::new(service);
    let connections = TaskTracker::new();
    let graceful = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            () = retire.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "cannot accept a connection of kubelet");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let connection = http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(AnyAuthority::new(UnvectoredStream(stream))), service.clone());
        let connection = graceful.watch(connection);
        connections.spawn(async move {
            if let Err(error) = connection.await {
                debug!(%error, "a connection ended");
            }
        });
    }
    drop(listener);
    connections.close();
    tokio::select! {
        () = stop.cancelled() => graceful.shutdown().await,
        () = connections.wait() => {}
    }
}

/// A stream without vectored writes. With them, h2 writes each message of 256 bytes or more separately, which
/// costs a system call per response; copying messages of up to 1 KiB costs far less.
struct UnvectoredStream(UnixStream);

impl AsyncRead for UnvectoredStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for UnvectoredStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        false
    }
}
