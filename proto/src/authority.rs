//! Accepts clients that send the path of a unix socket as `:authority`.
//!
//! grpc-go and C-core name a server on a unix socket by its percent-encoded path. That is no authority by RFC 3986, and h2
//! resets such a stream; a server on a unix socket does not need the value. Kubelet sends `localhost`. The first request of a
//! connection decides: with a valid authority all bytes pass unchanged, otherwise the header blocks are written again with
//! another authority.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::uri::Authority;
use loona_hpack::{Decoder, Encoder};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// What a client sends before its first frame.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Length of a frame's header.
const HEAD: usize = 9;
/// Longest payload of a frame: the protocol's default, which the servers do not raise.
const MAX_PAYLOAD: usize = 16_384;
/// Longest header block. The requests of kubelet's APIs have some hundred bytes.
const MAX_BLOCK: usize = 64 << 10;
/// Bytes read at once.
const CHUNK: usize = 8 << 10;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;
const PRIORITY: u8 = 32;
/// The authority in place of one that is none.
const REPLACEMENT: &[u8] = b"localhost";

/// A server's connection on which the authority of requests may be any text.
pub struct AnyAuthority<S> {
    stream: S,
    filter: Option<Filter>,
    /// Bytes for the server that it has not read.
    ready: Vec<u8>,
}

/// Reads the client's bytes until the first request, or rewrites them all.
struct Filter {
    /// Bytes of the client that are not processed.
    raw: Vec<u8>,
    has_preface: bool,
    decoder: Decoder<'static>,
    /// Present once a request had an invalid authority.
    encoder: Option<Encoder<'static>>,
    block: Option<Block>,
}

/// A header block that has not ended.
struct Block {
    stream: [u8; 4],
    flags: u8,
    fragments: Vec<u8>,
    /// The frames as the client sent them.
    frames: Vec<u8>,
}

/// Why a filter passes everything from now on.
struct PassOn;

impl<S> AnyAuthority<S> {
    /// The connection `stream`, of which nothing has been read.
    pub fn new(stream: S) -> Self {
        let filter = Filter {
            raw: Vec::new(),
            has_preface: false,
            decoder: Decoder::new(),
            encoder: None,
            block: None,
        };
        Self { stream, filter: Some(filter), ready: Vec::new() }
    }

    /// Processes bytes of the client.
    fn receive(&mut self, bytes: &[u8]) {
        let Some(filter) = &mut self.filter else {
            self.ready.extend_from_slice(bytes);
            return;
        };
        filter.raw.extend_from_slice(bytes);
        if filter.process(&mut self.ready).is_err() {
            self.pass_on();
        }
    }

    /// Passes what is held back, and everything after it. The server judges it.
    fn pass_on(&mut self) {
        if let Some(filter) = self.filter.take() {
            if let Some(block) = filter.block {
                self.ready.extend_from_slice(&block.frames);
            }
            self.ready.extend_from_slice(&filter.raw);
        }
    }
}

impl Filter {
    /// Moves whole frames to `ready`.
    fn process(&mut self, ready: &mut Vec<u8>) -> Result<(), PassOn> {
        if !self.has_preface {
            let length = self.raw.len().min(PREFACE.len());
            if self.raw.get(..length) != PREFACE.get(..length) {
                return Err(PassOn);
            }
            if length < PREFACE.len() {
                return Ok(());
            }
            ready.extend(self.raw.drain(..length));
            self.has_preface = true;
        }
        while let Some(head) = self.raw.first_chunk::<HEAD>() {
            let [a, b, c, kind, flags, stream @ ..] = *head;
            let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            if length > MAX_PAYLOAD {
                return Err(PassOn);
            }
            if self.raw.len() < HEAD + length {
                return Ok(());
            }
            let frame: Vec<u8> = self.raw.drain(..HEAD + length).collect();
            let fragment = match (kind, &self.block) {
                (HEADERS, None) => fragment(frame.get(HEAD..).unwrap_or_default(), flags),
                (CONTINUATION, Some(block)) if block.stream == stream => frame.get(HEAD..),
                (HEADERS | CONTINUATION, _) | (_, Some(_)) => None,
                _ => {
                    ready.extend_from_slice(&frame);
                    continue;
                }
            };
            let block = self.block.get_or_insert_with(|| Block {
                stream,
                flags,
                fragments: Vec::new(),
                frames: Vec::new(),
            });
            block.frames.extend_from_slice(&frame);
            block.fragments.extend_from_slice(fragment.ok_or(PassOn)?);
            if block.fragments.len() > MAX_BLOCK {
                return Err(PassOn);
            }
            if flags & END_HEADERS != 0 {
                self.end_block(ready)?;
            }
        }
        Ok(())
    }

    /// Moves the header block to `ready`, with another authority if its own is none.
    fn end_block(&mut self, ready: &mut Vec<u8>) -> Result<(), PassOn> {
        let fragments = self.block.as_ref().map(|block| block.fragments.as_slice()).ok_or(PassOn)?;
        let mut headers = self.decoder.decode(fragments).map_err(|_| PassOn)?;
        let mut authorities = headers.iter_mut().filter(|(name, _)| name == b":authority");
        let invalid = authorities.find(|(_, value)| Authority::try_from(value.as_slice()).is_err());
        let is_valid = match invalid {
            Some((_, value)) => {
                *value = REPLACEMENT.to_vec();
                false
            }
            None => true,
        };
        if is_valid && self.encoder.is_none() {
            return Err(PassOn);
        }
        let encoder = self.encoder.get_or_insert_with(Encoder::new);
        let encoded = encoder.encode(headers.iter().map(|(name, value)| (name.as_slice(), value.as_slice())));
        let block = self.block.take().ok_or(PassOn)?;
        let mut chunks = encoded.chunks(MAX_PAYLOAD).peekable();
        let mut kind = HEADERS;
        while let Some(chunk) = chunks.next() {
            let ends = if chunks.peek().is_none() { END_HEADERS } else { 0 };
            let ends_stream = if kind == HEADERS { block.flags & END_STREAM } else { 0 };
            // At most MAX_PAYLOAD, which 24 bits hold.
            let [_, length @ ..] = (chunk.len() as u32).to_be_bytes();
            ready.extend_from_slice(&length);
            ready.extend_from_slice(&[kind, ends | ends_stream]);
            ready.extend_from_slice(&block.stream);
            ready.extend_from_slice(chunk);
            kind = CONTINUATION;
        }
        Ok(())
    }
}

/// The header block fragment of a HEADERS frame, without padding and priority.
fn fragment(payload: &[u8], flags: u8) -> Option<&[u8]> {
    let payload = if flags & PADDED == 0 {
        payload
    } else {
        let (padding, rest) = payload.split_first()?;
        rest.get(..rest.len().checked_sub(usize::from(*padding))?)?
    };
    if flags & PRIORITY == 0 { Some(payload) } else { payload.get(5..) }
}

impl<S: AsyncRead + Unpin> AsyncRead for AnyAuthority<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if !this.ready.is_empty() {
                let count = this.ready.len().min(buffer.remaining());
                buffer.put_slice(this.ready.get(..count).unwrap_or_default());
                this.ready.drain(..count);
                return Poll::Ready(Ok(()));
            }
            if this.filter.is_none() {
                return Pin::new(&mut this.stream).poll_read(context, buffer);
            }
            let mut chunk = [0; CHUNK];
            let mut read = ReadBuf::new(&mut chunk);
            match Pin::new(&mut this.stream).poll_read(context, &mut read) {
                Poll::Ready(Ok(())) if read.filled().is_empty() => {
                    this.pass_on();
                    if this.ready.is_empty() {
                        return Poll::Ready(Ok(()));
                    }
                }
                Poll::Ready(Ok(())) => this.receive(read.filled()),
                other => return other,
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AnyAuthority<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

impl<S: Connected> Connected for AnyAuthority<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: [u8; HEAD] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

    fn headers(authority: &str) -> Vec<(Vec<u8>, Vec<u8>)> {
        let text = |name: &str, value: &str| (name.as_bytes().to_vec(), value.as_bytes().to_vec());
        vec![
            text(":method", "POST"),
            text(":path", "/v1beta1.DevicePlugin/GetDevicePluginOptions"),
            text(":authority", authority),
            text("te", "trailers"),
        ]
    }

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let [_, length @ ..] = (payload.len() as u32).to_be_bytes();
        [&length[..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    }

    /// A connection with one request per authority, as the client sends it.
    fn connection(authorities: &[&str]) -> Vec<u8> {
        let mut encoder = Encoder::new();
        let mut bytes = [&PREFACE[..], &SETTINGS].concat();
        for (number, authority) in authorities.iter().enumerate() {
            let headers = headers(authority);
            let block = encoder.encode(headers.iter().map(|(name, value)| (&name[..], &value[..])));
            let stream = 2 * number as u8 + 1;
            bytes.extend(frame(HEADERS, END_HEADERS, stream, &block));
            bytes.extend(frame(0, END_STREAM, stream, b"\0\0\0\0\0"));
        }
        bytes
    }

    /// What the server reads if the client's bytes come in pieces of `size`.
    fn passed(bytes: &[u8], size: usize) -> Vec<u8> {
        let mut connection = AnyAuthority::new(());
        bytes.chunks(size).for_each(|piece| connection.receive(piece));
        connection.pass_on();
        connection.ready
    }

    /// The authority of each request that the server reads.
    fn authorities(mut bytes: &[u8]) -> Vec<String> {
        let mut decoder = Decoder::new();
        let mut found = Vec::new();
        bytes = &bytes[PREFACE.len()..];
        while let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() {
            let length = usize::from(head[1]) << 8 | usize::from(head[2]);
            if head[3] == HEADERS {
                let headers = decoder.decode(&rest[..length]).unwrap();
                assert_eq!(headers.len(), 4);
                let authority = headers.into_iter().find(|(name, _)| name == b":authority").unwrap().1;
                found.push(String::from_utf8(authority).unwrap());
            }
            bytes = &rest[length..];
        }
        found
    }

    #[test]
    fn kubelets_bytes_pass_unchanged() {
        let bytes = connection(&["localhost", "localhost"]);
        for size in [1, 7, 33, 4096] {
            assert_eq!(passed(&bytes, size), bytes, "{size}");
        }
    }

    /// grpc-go and C-core name a server on a unix socket by its path.
    #[test]
    fn path_as_authority_is_replaced_in_every_request() {
        let path = "%2Fvar%2Flib%2Fkubelet%2Fdevice-plugins%2Fnvidia-gpu.sock";
        let bytes = connection(&[path, path, "localhost", "/a b"]);
        for size in [1, 7, 33, 4096] {
            assert_eq!(authorities(&passed(&bytes, size)), ["localhost"; 4], "{size}");
        }
    }

    #[test]
    fn padded_prioritised_and_continued_blocks_are_read() {
        let headers = headers("%2Frun%2Fa.sock");
        let block = Encoder::new().encode(headers.iter().map(|(name, value)| (&name[..], &value[..])));
        let (first, second) = block.split_at(10);
        let padded = [&[3][..], &[0, 0, 0, 0, 16], first, &[0; 3]].concat();
        let bytes = [
            &PREFACE[..],
            &SETTINGS,
            &frame(HEADERS, PADDED | PRIORITY | END_STREAM, 1, &padded),
            &frame(CONTINUATION, END_HEADERS, 1, second),
        ]
        .concat();
        assert_eq!(authorities(&passed(&bytes, 5)), ["localhost"]);
    }

    /// The server refuses what is no HTTP/2; nothing is held back or repeated.
    #[test]
    fn other_bytes_pass_unchanged() {
        let long = [&PREFACE[..], &[0xff; 40]].concat();
        let torn = [&PREFACE[..], &frame(HEADERS, PADDED | END_HEADERS, 1, &[200, 1, 2])].concat();
        let wrong = [&PREFACE[..], &frame(HEADERS, END_HEADERS, 1, &[0xff; 30])].concat();
        let mixed = [&PREFACE[..], &frame(HEADERS, 0, 1, &[0x82]), &frame(0, 0, 1, b"x")].concat();
        for bytes in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), Vec::new(), long, torn, wrong, mixed] {
            for size in [1, 64] {
                assert_eq!(passed(&bytes, size), bytes);
            }
        }
    }
}
