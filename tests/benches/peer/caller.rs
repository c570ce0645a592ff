//! The caller whose calls are timed. It encodes a request once, reads the response to its end and checks its status,
//! and does nothing else: on two cores the work of a full client would be the larger part of every number.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use gantry_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Empty,
    PreferredAllocationRequest,
};
use h2::client::SendRequest;
use http::Request;
use prost::Message;
use prost::bytes::{BufMut, Bytes, BytesMut};
use tokio::net::UnixStream;

/// A connection, on which any number of calls may be under way at once.
#[derive(Clone)]
pub(crate) struct Caller {
    sender: SendRequest<Bytes>,
}

/// A call, ready to be sent any number of times.
pub(crate) struct Call {
    head: Request<()>,
    body: Bytes,
}

impl Caller {
    /// Connects to a plugin's socket.
    pub(crate) async fn dial(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).await?;
        let (sender, connection) = h2::client::handshake(stream).await?;
        // Its end shows as a failure of the calls.
        tokio::spawn(async { drop(connection.await) });
        Ok(Self { sender })
    }

    /// Makes one call, from the request's first byte to the status behind the answer.
    pub(crate) async fn call(&self, call: &Call) -> Result<()> {
        let mut sender = self.sender.clone().ready().await?;
        let (answer, mut stream) = sender.send_request(call.head.clone(), false)?;
        stream.send_data(call.body.clone(), true)?;
        let mut body = answer.await?.into_body();
        let mut length = 0;
        while let Some(part) = body.data().await {
            let part = part?;
            body.flow_control().release_capacity(part.len())?;
            length += part.len();
        }
        let trailers = body.trailers().await?.context("an answer without a status")?;
        let status = trailers.get("grpc-status").map(http::HeaderValue::as_bytes);
        ensure!(status == Some(b"0"), "refused: {trailers:?}");
        ensure!(length >= PREFIX, "an answer without a message");
        Ok(())
    }
}

/// What stands before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;

impl Call {
    pub(crate) fn options() -> Result<Self> {
        Self::new("GetDevicePluginOptions", &Empty {})
    }

    pub(crate) fn allocate(ids: &[String]) -> Result<Self> {
        let container = ContainerAllocateRequest { device_ids: ids.to_vec() };
        let container_requests = vec![container];
        Self::new("Allocate", &AllocateRequest { container_requests })
    }

    pub(crate) fn prefer(offered: &[String], size: usize) -> Result<Self> {
        let container = ContainerPreferredAllocationRequest {
            available_device_ids: offered.to_vec(),
            must_include_device_ids: Vec::new(),
            allocation_size: i32::try_from(size)?,
        };
        let container_requests = vec![container];
        Self::new("GetPreferredAllocation", &PreferredAllocationRequest { container_requests })
    }

    fn new(method: &str, message: &impl Message) -> Result<Self> {
        let length = message.encoded_len();
        let mut body = BytesMut::with_capacity(PREFIX + length);
        body.put_u8(0);
        body.put_u32(u32::try_from(length)?);
        message.encode(&mut body)?;
        let head = Request::post(format!("http://localhost/v1beta1.DevicePlugin/{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())?;
        Ok(Self { head, body: body.freeze() })
    }
}
