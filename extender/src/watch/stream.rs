//! Lists and watches a kind of object, and reads of each only the fields of its slim type, into a bounded memory: see
//! [`gantry_runtime::watch`] and [`crate::bounded`].

use std::fmt::Debug;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use futures::io::{AsyncBufRead, AsyncBufReadExt};
use gantry_runtime::watch::{MAX_OBJECT, PAGE, Reader, Selection, watch_with};
use kube::runtime::watcher::{Error, Event};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;

use super::WATCH_SECONDS;
use crate::bounded::{self, Identity, ReadError};
use crate::object_memory::{Kind, ObjectMemory};

/// Text of an object that is received without waiting for other large ones.
const SHORT: usize = 256 * 1024;

/// A kind of object that is read as a stream.
pub(crate) trait StreamedObject:
    kube::Resource + DeserializeOwned + Clone + Debug + Send + 'static
{
    /// What is known of one that is too large: its identity, and what else can be read of its text.
    fn least(identity: Identity, text: &[u8]) -> Self;
}

/// An object from the API server.
#[derive(Debug)]
pub(crate) struct ReceivedObject<K> {
    pub(crate) object: K,
    /// Bytes of memory that it takes; `None` if they are too many, and the object is only what is known at least.
    pub(crate) bytes: Option<usize>,
}

/// All objects, in pages.
pub(crate) fn in_pages() -> Selection {
    Selection { fields: String::new(), renew: WATCH_SECONDS, page: Some(PAGE) }
}

/// The events of a kind: lists, and watches after each, without end. After an error it goes on.
pub(crate) fn events<K: StreamedObject>(
    api: Api<K>,
    kind: Kind,
    memory: Arc<ObjectMemory>,
    selection: Selection,
) -> impl Stream<Item = Result<Event<ReceivedObject<K>>, Error>> + Send + 'static {
    let path = api.resource_url().to_owned();
    watch_with(
        api.into_client(),
        path,
        selection,
        BoundedReader { kind, memory, objects: PhantomData::<fn() -> K> },
    )
}

/// Reads objects of a kind within its limits.
struct BoundedReader<K> {
    kind: Kind,
    memory: Arc<ObjectMemory>,
    objects: PhantomData<fn() -> K>,
}

impl<K: StreamedObject> Reader for BoundedReader<K> {
    type Object = ReceivedObject<K>;

    fn read(&self, text: &[u8]) -> Result<ReceivedObject<K>, serde_json::Error> {
        read(text, self.kind)
    }

    fn read_beginning(&self, text: &[u8]) -> Option<ReceivedObject<K>> {
        Some(least(text))
    }

    fn version(received: &ReceivedObject<K>) -> Option<&str> {
        received.object.meta().resource_version.as_deref()
    }

    fn permits(&self) -> Option<Arc<Semaphore>> {
        Some(self.memory.large())
    }

    fn list_begins(&self) {
        self.memory.list_begins(self.kind);
    }

    fn list_ends(&self) {
        self.memory.list_ends(self.kind);
    }

    fn lists_again(&self) -> bool {
        self.memory.lists_again(self.kind, gantry_runtime::now())
    }
}

fn read<K: StreamedObject>(text: &[u8], kind: Kind) -> Result<ReceivedObject<K>, serde_json::Error> {
    match bounded::read::<K>(text, kind.read_limit()) {
        Ok((object, bytes)) => Ok(ReceivedObject { object, bytes: Some(bytes) }),
        Err(ReadError::Malformed(error)) => Err(error),
        Err(ReadError::TooLarge(_)) => Ok(least(text)),
    }
}

fn least<K: StreamedObject>(text: &[u8]) -> ReceivedObject<K> {
    let identity = Identity::of(text).unwrap_or_default();
    ReceivedObject { object: K::least(identity, text), bytes: None }
}

/// Reads one object; `None` if there is none.
pub(crate) async fn get<K: StreamedObject>(
    client: &Client,
    path: &str,
    kind: Kind,
    memory: &ObjectMemory,
) -> Result<Option<ReceivedObject<K>>, kube::Error> {
    let request = http::Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
    let mut body: Pin<Box<dyn AsyncBufRead + Send>> = match client.request_stream(request).await {
        Ok(body) => Box::pin(body),
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(None),
        Err(error) => return Err(error),
    };
    let (mut text, mut permit) = (Vec::new(), None);
    loop {
        if text.len() > SHORT && permit.is_none() {
            // The semaphore is never closed.
            permit = memory.large().acquire_owned().await.ok();
        }
        let chunk = body.fill_buf().await.map_err(kube::Error::ReadEvents)?;
        if chunk.is_empty() {
            return read(&text, kind).map(Some).map_err(kube::Error::SerdeError);
        }
        if text.len() + chunk.len() > MAX_OBJECT {
            return Ok(Some(least(&text)));
        }
        text.extend_from_slice(chunk);
        let length = chunk.len();
        body.as_mut().consume(length);
    }
}

/// Sends a request and passes over the body of the response, which may be a whole object of any length.
pub(crate) async fn send(client: &Client, request: http::Request<Vec<u8>>) -> Result<(), kube::Error> {
    let mut body = Box::pin(client.request_stream(request).await?);
    loop {
        let length = body.fill_buf().await.map_err(kube::Error::ReadEvents)?.len();
        if length == 0 {
            return Ok(());
        }
        body.as_mut().consume(length);
    }
}
