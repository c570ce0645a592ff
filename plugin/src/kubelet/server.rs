//! A gRPC server on a unix socket: accepts connections and lets hyper serve them. Ends on `stop`; after
//! `retire` it ends with the last connection.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::body::Body;
use tower::Service;
use tracing::{debug, warn};

/// The pause after a failed accept, e.g. without free file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves `service` on each connection. `retire` ends accepting; `stop` cancels `retire` too, and also shuts
/// the connections down. Returns when all connections have ended.
pub(super) async fn serve<S>(
    listener: UnixListener,
    service: S,
    retire: CancellationToken,
    stop: CancellationToken,
) where
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
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let connection = http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(Whole(stream)), service.clone());
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
struct Whole(UnixStream);

impl AsyncRead for Whole {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Whole {
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
