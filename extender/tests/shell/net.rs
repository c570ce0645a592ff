//! A network in memory. A connection is a pair of pipes with a relay between them, which carries bytes late, holds them
//! back, or ends the connection in the middle of a message. What speaks over it is the real HTTP of both sides.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use gantry_runtime::http::Listen;
use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf};
use tokio::sync::{Mutex, mpsc, watch};

use crate::dice::Dice;

/// Bytes that a pipe holds before its writer waits.
const PIPE: usize = 64 * 1024;
/// Bytes that the relay carries at once.
const CHUNK: usize = 16 * 1024;

/// What happens between two parties.
#[derive(Debug, Clone, Copy, Default)]
struct Condition {
    latency: Duration,
    /// Bytes wait, and so do new connections: as if packets were lost.
    silent: bool,
    /// New connections are refused.
    down: bool,
    /// Counts the times that all connections were ended.
    cuts: u64,
}

/// The way between two parties.
#[derive(Debug, Clone)]
pub(crate) struct Link {
    condition: Arc<watch::Sender<Condition>>,
    /// Each connection has a latency of its own, so that a watch is ahead of an answer or behind it.
    lags: Option<Arc<std::sync::Mutex<Dice>>>,
}

impl Link {
    /// One without faults and without latency.
    pub(crate) fn sound() -> Self {
        Self { condition: Arc::new(watch::Sender::new(Condition::default())), lags: None }
    }

    pub(crate) fn new(seed: u64) -> Self {
        Self { lags: Some(Arc::new(std::sync::Mutex::new(Dice::new(seed)))), ..Self::sound() }
    }

    /// The latency of the next connection.
    fn lag(&self) -> Duration {
        let lag = |dice: &Arc<std::sync::Mutex<Dice>>| {
            let mut dice = dice.lock().unwrap();
            let most = [2, 20, 400][dice.index(3)];
            Duration::from_millis(dice.below(most))
        };
        self.lags.as_ref().map_or(Duration::ZERO, lag)
    }

    pub(crate) fn set_latency(&self, latency: Duration) {
        self.condition.send_modify(|condition| condition.latency = latency);
    }

    pub(crate) fn set_silent(&self, silent: bool) {
        self.condition.send_modify(|condition| condition.silent = silent);
    }

    /// Ends all connections, with what is under way in them.
    pub(crate) fn cut(&self) {
        self.condition.send_modify(|condition| condition.cuts += 1);
    }

    /// Ends all connections, and refuses others.
    pub(crate) fn take_down(&self) {
        self.condition.send_modify(|condition| {
            condition.cuts += 1;
            condition.down = true;
        });
    }

    /// Ends what was done to it. Bytes that were held back arrive now.
    pub(crate) fn heal(&self) {
        self.condition.send_modify(|condition| {
            *condition = Condition { cuts: condition.cuts, ..Condition::default() };
        });
    }

    /// A new connection: the client's end, and the server's.
    ///
    /// # Errors
    /// The link is down.
    pub(crate) async fn open(&self) -> io::Result<(Pipe, DuplexStream)> {
        let mut condition = self.condition.subscribe();
        let now = *condition.wait_for(|condition| !condition.silent).await.map_err(io::Error::other)?;
        if now.down {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let (client, near) = tokio::io::duplex(PIPE);
        let (far, server) = tokio::io::duplex(PIPE);
        tokio::spawn(relay(near, far, condition, self.lag()));
        Ok((Pipe(client), server))
    }
}

async fn relay(
    near: DuplexStream,
    far: DuplexStream,
    mut condition: watch::Receiver<Condition>,
    lag: Duration,
) {
    let cuts = condition.borrow_and_update().cuts;
    let (from_client, to_client) = tokio::io::split(near);
    let (from_server, to_server) = tokio::io::split(far);
    let there = carry(from_client, to_server, condition.clone(), lag);
    let back = carry(from_server, to_client, condition.clone(), lag);
    tokio::select! {
        _ = async { tokio::join!(there, back) } => {}
        _ = condition.wait_for(|condition| condition.cuts != cuts) => {}
    }
}

async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut condition: watch::Receiver<Condition>,
    lag: Duration,
) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    loop {
        let count = from.read(&mut chunk).await?;
        let now = *condition.wait_for(|condition| !condition.silent).await.map_err(io::Error::other)?;
        let latency = lag + now.latency;
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        if count == 0 {
            return to.shutdown().await;
        }
        to.write_all(&chunk[..count]).await?;
    }
}

/// The client's end of a connection.
#[derive(Debug)]
pub(crate) struct Pipe(DuplexStream);

impl Connection for Pipe {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for Pipe {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, to)
    }
}

impl AsyncWrite for Pipe {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

type Dialled = Pin<Box<dyn Future<Output = io::Result<TokioIo<Pipe>>> + Send>>;

/// How an HTTP client connects; the address does not matter.
#[derive(Clone)]
pub(crate) struct Connector(Arc<dyn Fn() -> Dialled + Send + Sync>);

impl Connector {
    pub(crate) fn new<F>(dial: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = io::Result<Pipe>> + Send + 'static,
    {
        Self(Arc::new(move || {
            let dialling = dial();
            Box::pin(async move { Ok(TokioIo::new(dialling.await?)) })
        }))
    }
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Pipe>;
    type Error = io::Error;
    type Future = Dialled;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Dialled {
        (self.0)()
    }
}

/// Where a server in this network gets its connections from.
#[derive(Debug)]
pub(crate) struct Incoming(Mutex<mpsc::UnboundedReceiver<DuplexStream>>);

impl Incoming {
    /// It, and where to send the server's ends of connections.
    pub(crate) fn new() -> (mpsc::UnboundedSender<DuplexStream>, Self) {
        let (connections, incoming) = mpsc::unbounded_channel();
        (connections, Self(Mutex::new(incoming)))
    }
}

impl Listen for Incoming {
    type Stream = DuplexStream;

    async fn accept(&self) -> io::Result<DuplexStream> {
        match self.0.lock().await.recv().await {
            Some(stream) => Ok(stream),
            None => std::future::pending().await,
        }
    }

    fn address(&self) -> io::Result<SocketAddr> {
        Ok(([127, 0, 0, 1], 8010).into())
    }
}
