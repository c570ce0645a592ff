//! Asks the extender, which has the cluster in memory: over a port that the API server forwards to the leader's pod, or
//! at an address that the user names.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use gantry_extender::ExplainPort;
use gantry_extender::answers::http::UnknownObject;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::runtime::BadInput;

/// Time to reach the extender. After that the cluster is read.
const CONNECT: Duration = Duration::from_secs(3);
/// Time for an answer: a large gang at thousands of nodes takes a part of a second, and others may be asked about before.
const ANSWER: Duration = Duration::from_secs(15);
/// Longest answer that is read.
const LONGEST: usize = 64 * 1024 * 1024;
/// Times that an extender is asked that has too many questions, a second apart.
const ATTEMPTS: u32 = 5;

/// Where the extender answers.
pub(super) enum Extender {
    /// In the pod of the leader, on loopback.
    Pod {
        /// Forwards the port.
        pods: Box<Api<Pod>>,
        /// Pod and port.
        at: ExplainPort,
    },
    /// At an address that the user names.
    Address(SocketAddr),
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// There is no such pod or gang, or it cannot be reported on.
    Question(anyhow::Error),
    /// The user may not forward ports, or the pod is gone.
    NotReachable,
    /// The extender does not answer.
    Extender(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Extender(error.into())
    }
}

impl Extender {
    pub(super) fn in_pod(client: Client, namespace: &str, at: ExplainPort) -> Self {
        Self::Pod { pods: Box::new(Api::namespaced(client, namespace)), at }
    }

    /// The answer at a path.
    pub(super) async fn ask<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        let connecting = tokio::time::timeout(CONNECT, self.connect()).await;
        let mut sender = connecting.context("no connection within 3 s")??;
        tokio::time::timeout(ANSWER, read(&mut sender, path)).await.context("no answer within 15 s")?
    }

    async fn connect(&self) -> Result<http1::SendRequest<Empty<Bytes>>, Failure> {
        match self {
            Self::Pod { pods, at } => {
                let mut forwarder = pods.portforward(&at.pod, &[at.port]).await.map_err(forwarding)?;
                let stream = forwarder.take_stream(at.port).context("the port is not forwarded")?;
                Ok(handshake(stream).await?)
            }
            Self::Address(address) => {
                let stream = TcpStream::connect(address).await;
                Ok(handshake(stream.with_context(|| format!("{address}"))?).await?)
            }
        }
    }
}

/// Why a port cannot be forwarded.
fn forwarding(error: kube::Error) -> Failure {
    match &error {
        kube::Error::Api(status) if matches!(status.code, 403 | 404) => Failure::NotReachable,
        _ => error.into(),
    }
}

async fn handshake<S>(stream: S) -> anyhow::Result<http1::SendRequest<Empty<Bytes>>>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

async fn read<T: DeserializeOwned>(
    sender: &mut http1::SendRequest<Empty<Bytes>>,
    path: &str,
) -> Result<T, Failure> {
    for _ in 0..ATTEMPTS {
        sender.ready().await?;
        let request = Request::get(path).header(header::HOST, "localhost").body(Empty::new())?;
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LONGEST).collect().await;
        let body = body.map_err(|error| anyhow!("the answer cannot be read: {error}"))?.to_bytes();
        let text = || String::from_utf8_lossy(&body).trim().to_owned();
        match status {
            StatusCode::OK => return Ok(serde_json::from_slice(&body).context("another version answers")?),
            StatusCode::TOO_MANY_REQUESTS => tokio::time::sleep(Duration::from_secs(1)).await,
            StatusCode::NOT_FOUND if let Ok(UnknownObject { unknown }) = serde_json::from_slice(&body) => {
                return Err(Failure::Question(BadInput(anyhow!(unknown)).into()));
            }
            StatusCode::UNPROCESSABLE_ENTITY => return Err(Failure::Question(anyhow!(text()))),
            _ => return Err(anyhow!("{status}: {}", text()).into()),
        }
    }
    Err(anyhow!("it has too many questions").into())
}
