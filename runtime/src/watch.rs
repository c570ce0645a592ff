//! Lists and watches objects of the API server in bounded memory. A response is split into its objects while it
//! arrives: the text of only one object is held, and only its parsed form is passed on. kube's watcher holds a page of
//! 500 objects twice before it parses the first one.

use std::borrow::Cow;
use std::io;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use futures::stream::{self, Stream};
use futures::{AsyncBufRead, AsyncBufReadExt};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta};
use kube::api::{ListParams, WatchParams};
use kube::core::{Request, Status};
use kube::runtime::watcher::{Error, Event};
use kube::{Client, Resource};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most bytes of one object as JSON. etcd stores 1.5 MiB at most; a character takes six bytes where JSON escapes it.
pub const MAX_OBJECT: usize = 12 * 1024 * 1024;
/// Most bytes of a list without its objects.
const MAX_FRAME: usize = 64 * 1024;
/// A larger buffer is freed after its object.
const REUSED: usize = 256 * 1024;
/// Bytes by which a large buffer grows: doubling would need up to twice the memory.
const GROWTH: usize = 1024 * 1024;
/// Bytes of an object that is too large which the error repeats: they name it.
const BEGINNING: usize = 300;
/// Objects of one page. It bounds the work of the API server; here pages are not held.
pub const PAGE: u32 = 500;

/// The objects to list and watch.
#[derive(Debug, Clone)]
pub struct Selection {
    /// Field selector; empty for all objects.
    pub fields: String,
    /// Seconds after which a watch is renewed.
    pub renew: u32,
    /// Objects of one page of a list; `None` for all at once. Of custom resources, the API server takes several times as long for each
    /// later page as for the first.
    pub page: Option<u32>,
}

/// How objects are read, and what is done about lists.
pub trait Reader: Send + 'static {
    /// What is made of an object.
    type Object: Send;

    /// Reads the text of an object.
    ///
    /// # Errors
    /// It cannot be parsed: its list or watch fails.
    fn read(&self, text: &[u8]) -> Result<Self::Object, serde_json::Error>;

    /// Reads what is known of an object whose text is longer than [`MAX_OBJECT`], from its beginning. `None`: its list or
    /// watch fails.
    fn read_beginning(&self, text: &[u8]) -> Option<Self::Object>;

    /// The version of an object.
    fn version(object: &Self::Object) -> Option<&str>;

    /// A permit for a long object; held until it is read.
    fn permits(&self) -> Option<Arc<Semaphore>> {
        None
    }

    /// A list begins.
    fn list_begins(&self) {}

    /// A list is complete.
    fn list_ends(&self) {}

    /// Whether the objects are to be listed again when a watch has ended.
    fn lists_again(&self) -> bool {
        false
    }
}

/// Parses objects of a type.
struct Parser<K>(PhantomData<fn() -> K>);

impl<K: Resource + DeserializeOwned + Send + 'static> Reader for Parser<K> {
    type Object = K;

    fn read(&self, text: &[u8]) -> Result<K, serde_json::Error> {
        serde_json::from_slice(text)
    }

    fn read_beginning(&self, _: &[u8]) -> Option<K> {
        None
    }

    fn version(object: &K) -> Option<&str> {
        object.meta().resource_version.as_deref()
    }
}

/// Lists the objects of all namespaces, watches them, and lists them again where the watch has lost events. Does not
/// end. After an error, the next poll tries again; the caller pauses before it. An object that cannot be parsed fails
/// its list or watch, and everything is listed again: no object is passed over.
pub fn watch<K>(
    client: Client,
    selection: Selection,
) -> impl Stream<Item = Result<Event<K>, Error>> + Send + 'static
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Send + 'static,
{
    watch_with(client, K::url_path(&(), None), selection, Parser::<K>(PhantomData))
}

/// The same for the objects of a path, read by `reader`.
pub fn watch_with<R: Reader>(
    client: Client,
    path: String,
    selection: Selection,
    reader: R,
) -> impl Stream<Item = Result<Event<R::Object>, Error>> + Send + 'static {
    let watcher = Watcher { client, requests: Request::new(path), selection, state: State::Start, reader };
    stream::unfold(watcher, |mut watcher| async {
        let event = watcher.next().await;
        Some((event, watcher))
    })
}

struct Watcher<R> {
    client: Client,
    requests: Request,
    selection: Selection,
    state: State,
    reader: R,
}

enum State {
    /// Nothing is known.
    Start,
    /// The page with this token is due; `None` for the first one.
    Page(Option<String>),
    /// A page arrives.
    Listing(Response),
    /// A watch from this version is due.
    Listed(String),
    /// The events after this version arrive.
    Watching(String, Response),
}

/// A list without its objects.
#[derive(Deserialize)]
struct Frame {
    metadata: ListMeta,
}

impl<R: Reader> Watcher<R> {
    async fn next(&mut self) -> Result<Event<R::Object>, Error> {
        loop {
            // An error leaves this state unless it sets another one.
            match std::mem::replace(&mut self.state, State::Start) {
                State::Start => {
                    self.state = State::Page(None);
                    self.reader.list_begins();
                    return Ok(Event::Init);
                }
                State::Page(token) => {
                    let page = self.list(token).await.map_err(Error::InitialListFailed)?;
                    self.state = State::Listing(page);
                }
                State::Listing(mut page) => {
                    let object = page.next(&mut self.reader, read).await;
                    if let Some(object) = object.map_err(Error::InitialListFailed)? {
                        self.state = State::Listing(page);
                        return Ok(Event::InitApply(object));
                    }
                    let list: Frame = parse(&page.splitter.frame).map_err(Error::InitialListFailed)?;
                    let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
                    if let Some(token) = filled(list.metadata.continue_) {
                        self.state = State::Page(Some(token));
                        continue;
                    }
                    let version = filled(list.metadata.resource_version).ok_or(Error::NoResourceVersion)?;
                    self.state = State::Listed(version);
                    self.reader.list_ends();
                    return Ok(Event::InitDone);
                }
                State::Listed(_) if self.reader.lists_again() => {}
                State::Listed(version) => match self.start_watch(&version).await {
                    Ok(events) => self.state = State::Watching(version, events),
                    Err(error) => {
                        if !matches!(&error, kube::Error::Api(status) if status.code == 410) {
                            self.state = State::Listed(version);
                        }
                        return Err(Error::WatchStartFailed(error));
                    }
                },
                State::Watching(version, mut events) => match events.next(&mut self.reader, read_event).await
                {
                    Ok(Some(Change::Bookmark(version))) => self.state = State::Watching(version, events),
                    Ok(Some(Change::Event(version, event))) => {
                        let version = version.filter(|version| !version.is_empty());
                        self.state = State::Watching(version.ok_or(Error::NoResourceVersion)?, events);
                        return Ok(event);
                    }
                    Ok(Some(Change::Failed(status))) => {
                        if status.code != 410 {
                            self.state = State::Listed(version);
                        }
                        return Err(Error::WatchError(status));
                    }
                    Ok(None) => self.state = State::Listed(version),
                    Err(error) => {
                        // A connection that ended has lost no event; an unreadable one is not sent again.
                        if matches!(&error, kube::Error::ReadEvents(error) if error.kind() != TOO_LARGE) {
                            self.state = State::Listed(version);
                        }
                        return Err(Error::WatchFailed(error));
                    }
                },
            }
        }
    }

    async fn list(&mut self, token: Option<String>) -> Result<Response, kube::Error> {
        let mut parameters = ListParams::default().fields(&self.selection.fields);
        parameters.limit = self.selection.page;
        parameters.continue_token = token;
        let request = self.requests.list(&parameters).map_err(kube::Error::BuildRequest)?;
        Response::of(&self.client, request, Splitter::of_list()).await
    }

    async fn start_watch(&mut self, version: &str) -> Result<Response, kube::Error> {
        let parameters = WatchParams::default().fields(&self.selection.fields).timeout(self.selection.renew);
        let request = self.requests.watch(&parameters, version).map_err(kube::Error::BuildRequest)?;
        Response::of(&self.client, request, Splitter::of_stream()).await
    }
}

/// A line of a watch.
enum Change<O> {
    /// Nothing has changed up to this version.
    Bookmark(String),
    /// An event, and the version that it leads to.
    Event(Option<String>, Event<O>),
    Failed(Box<Status>),
}

fn parse<'t, T: Deserialize<'t>>(text: &'t [u8]) -> Result<T, kube::Error> {
    serde_json::from_slice(text).map_err(kube::Error::SerdeError)
}

/// Reads an object. One of which only the beginning is there is what its reader makes of that.
fn read<R: Reader>(reader: &R, text: &[u8], is_cut: bool) -> Result<R::Object, kube::Error> {
    if !is_cut {
        return reader.read(text).map_err(kube::Error::SerdeError);
    }
    reader.read_beginning(text).ok_or_else(|| {
        let beginning = String::from_utf8_lossy(&text[..text.len().min(BEGINNING)]);
        let problem = format!("more than {MAX_OBJECT} bytes of JSON in one object: {beginning} ...");
        kube::Error::ReadEvents(io::Error::new(TOO_LARGE, problem))
    })
}

fn read_event<R: Reader>(reader: &R, text: &[u8], is_cut: bool) -> Result<Change<R::Object>, kube::Error> {
    #[derive(Deserialize)]
    struct Line<'t> {
        #[serde(rename = "type", borrow)]
        kind: Cow<'t, str>,
        #[serde(borrow)]
        object: &'t RawValue,
    }
    #[derive(Deserialize)]
    struct Bookmark {
        metadata: ObjectMeta,
    }
    const OBJECT: &[u8] = b"\"object\":";
    let (kind, object) = if is_cut {
        // The API server writes the type first.
        let at = text.windows(OBJECT.len()).position(|window| window == OBJECT);
        let (head, object) = text.split_at(at.map_or(0, |at| at + OBJECT.len()));
        let head = String::from_utf8_lossy(&head[..head.len().min(64)]);
        (Cow::from(if head.contains("DELETED") { "DELETED" } else { "MODIFIED" }), object)
    } else {
        let Line { kind, object } = parse(text)?;
        (kind, object.get().as_bytes())
    };
    match kind.as_ref() {
        "ERROR" => return Ok(Change::Failed(parse(object)?)),
        "BOOKMARK" => {
            let bookmark: Bookmark = parse(object)?;
            return Ok(Change::Bookmark(bookmark.metadata.resource_version.unwrap_or_default()));
        }
        _ => {}
    }
    let object = read(reader, object, is_cut)?;
    let version = R::version(&object).map(str::to_owned);
    let event = if kind == "DELETED" { Event::Delete(object) } else { Event::Apply(object) };
    Ok(Change::Event(version, event))
}

/// A response as it arrives.
struct Response {
    body: Pin<Box<dyn AsyncBufRead + Send>>,
    splitter: Splitter,
    /// Held while a long object arrives.
    permit: Option<OwnedSemaphorePermit>,
}

impl Response {
    async fn of(
        client: &Client,
        request: http::Request<Vec<u8>>,
        splitter: Splitter,
    ) -> Result<Self, kube::Error> {
        let body = client.request_stream(request).await?;
        Ok(Self { body: Box::pin(body), splitter, permit: None })
    }

    /// The next object; `None` at the end.
    async fn next<R: Reader, T>(
        &mut self,
        reader: &mut R,
        read: fn(&R, &[u8], bool) -> Result<T, kube::Error>,
    ) -> Result<Option<T>, kube::Error> {
        loop {
            if self.splitter.object.len() > REUSED
                && self.permit.is_none()
                && let Some(permits) = reader.permits()
            {
                // The semaphore is never closed.
                self.permit = permits.acquire_owned().await.ok();
            }
            let chunk = self.body.fill_buf().await.map_err(kube::Error::ReadEvents)?;
            if chunk.is_empty() {
                return Ok(None);
            }
            let (used, object) = self.splitter.split(chunk).map_err(kube::Error::ReadEvents)?;
            let object = object.map(|(text, is_cut)| read(reader, text, is_cut)).transpose();
            self.body.consume_unpin(used);
            if let Some(object) = object? {
                self.splitter.free_object();
                self.permit = None;
                return Ok(Some(object));
            }
        }
    }
}

const TOO_LARGE: io::ErrorKind = io::ErrorKind::FileTooLarge;

/// Splits JSON text into objects.
struct Splitter {
    /// Nesting of the text around the objects: none in a stream, two in a list.
    level: usize,
    depth: usize,
    /// Whether the text at `level` is a list of objects.
    in_list: bool,
    in_text: bool,
    /// Whether the last character is a backslash that escapes the next one.
    is_escape: bool,
    /// The beginning of the current object.
    object: Vec<u8>,
    is_complete: bool,
    /// The object is longer than [`MAX_OBJECT`]: the rest of it is passed over.
    is_cut: bool,
    /// The text around the objects.
    frame: Vec<u8>,
}

impl Splitter {
    /// For objects one after the other.
    fn of_stream() -> Self {
        Self {
            level: 0,
            depth: 0,
            in_list: true,
            in_text: false,
            is_escape: false,
            object: Vec::new(),
            is_complete: false,
            is_cut: false,
            frame: Vec::new(),
        }
    }

    /// For the objects of a list that is a field of one object, such as `items`.
    fn of_list() -> Self {
        Self { level: 2, in_list: false, ..Self::of_stream() }
    }

    /// Frees the text of the last object.
    fn free_object(&mut self) {
        if std::mem::take(&mut self.is_complete) {
            self.is_cut = false;
            self.object.clear();
            self.object.shrink_to(REUSED);
        }
    }

    /// Reads `input` to its end, or to the end of an object. Returns the number of bytes read, and the object: its text,
    /// and whether that is only the beginning.
    #[expect(clippy::type_complexity, reason = "an object is its text and whether that is cut")]
    fn split(&mut self, input: &[u8]) -> Result<(usize, Option<(&[u8], bool)>), io::Error> {
        self.free_object();
        let mut at = 0;
        while at < input.len() && !self.is_complete {
            if self.is_inside() {
                let length = self.pass_over(&input[at..]);
                self.store_object(&input[at..at + length]);
                at += length;
            } else {
                self.read_around(input[at])?;
                at += 1;
            }
        }
        Ok((at, self.is_complete.then_some((self.object.as_slice(), self.is_cut))))
    }

    /// Reads the inside of an object, to its end or to that of `input`. Returns the number of bytes read.
    fn pass_over(&mut self, input: &[u8]) -> usize {
        for (at, byte) in input.iter().enumerate() {
            match byte {
                _ if self.is_escape => self.is_escape = false,
                b'\\' => self.is_escape = self.in_text,
                b'"' => self.in_text = !self.in_text,
                _ if self.in_text => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == self.level {
                        self.is_complete = true;
                        return at + 1;
                    }
                }
                _ => {}
            }
        }
        input.len()
    }

    /// Reads a character around the objects, up to the first of each.
    fn read_around(&mut self, byte: u8) -> Result<(), io::Error> {
        let is_between = self.in_list && self.depth == self.level;
        if self.in_text {
            self.in_text = self.is_escape || byte != b'"';
            self.is_escape = !self.is_escape && byte == b'\\';
        } else {
            match byte {
                b'"' => self.in_text = true,
                b'{' | b'[' if is_between => {
                    self.depth += 1;
                    self.store_object(&[byte]);
                    return Ok(());
                }
                b'{' | b'[' => {
                    self.depth += 1;
                    if self.depth == self.level {
                        self.in_list = byte == b'[';
                    }
                }
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        match is_between && self.depth == self.level {
            true => Ok(()),
            false => self.store_frame(byte),
        }
    }

    fn is_inside(&self) -> bool {
        self.in_list && self.depth > self.level
    }

    fn store_object(&mut self, bytes: &[u8]) {
        let fits = bytes.len().min(MAX_OBJECT - self.object.len());
        self.is_cut |= fits < bytes.len();
        if self.object.len() + fits > self.object.capacity() && self.object.len() > GROWTH {
            self.object.reserve_exact(fits.max(GROWTH));
        }
        self.object.extend_from_slice(&bytes[..fits]);
    }

    fn store_frame(&mut self, byte: u8) -> Result<(), io::Error> {
        if self.frame.len() >= MAX_FRAME {
            let problem = format!("more than {MAX_FRAME} bytes of JSON around the objects of a list");
            return Err(io::Error::new(TOO_LARGE, problem));
        }
        self.frame.push(byte);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use http::Response;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::client::Body;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use tower_test::mock;

    use super::*;
    use crate::chain;

    /// The objects of `text` that arrives in chunks of `size` bytes, and the text around them.
    fn split(mut splitter: Splitter, text: &str, size: usize) -> (Vec<Value>, String) {
        let mut objects = Vec::new();
        for mut chunk in text.as_bytes().chunks(size) {
            while !chunk.is_empty() {
                let (used, object) = splitter.split(chunk).unwrap();
                objects.extend(object.map(|(object, _)| serde_json::from_slice(object).unwrap()));
                chunk = &chunk[used..];
            }
        }
        (objects, String::from_utf8(splitter.frame).unwrap())
    }

    fn json() -> impl Strategy<Value = Value> {
        let text = r#"[a\\"{}\[\]\n,:ä]{0,6}"#;
        let leaf = prop_oneof![Just(json!(null)), Just(json!(-1.5e3)), text.prop_map(Value::from)];
        leaf.prop_recursive(4, 32, 4, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(text, inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn objects_are_split_whatever_their_text_and_chunks(
            values in prop::collection::vec(json(), 0..4),
            size in 1_usize..40,
        ) {
            let objects: Vec<Value> = values.into_iter().map(|value| json!({"value": value})).collect();
            let list = json!({"kind": "List", "metadata": {"resourceVersion": "7 []{}"}, "items": objects});
            for text in [list.to_string(), serde_json::to_string_pretty(&list).unwrap()] {
                let (found, frame) = split(Splitter::of_list(), &text, size);
                prop_assert_eq!(&found, &objects);
                let frame: Frame = serde_json::from_str(&frame).unwrap();
                prop_assert_eq!(frame.metadata.resource_version.unwrap(), "7 []{}");
            }
            let lines: String = objects.iter().map(|object| format!("{object}\n")).collect();
            prop_assert_eq!(split(Splitter::of_stream(), &lines, size).0, objects);
        }
    }

    #[test]
    fn object_over_the_limit_is_an_error_that_names_it() {
        let mut splitter = Splitter::of_list();
        let begin = br#"{"items": [{"metadata": {"name": "large", "text": ""#;
        assert_eq!(splitter.split(begin).unwrap(), (begin.len(), None));
        let text = vec![b'x'; 64 * 1024];
        for _ in 0..2 * MAX_OBJECT / text.len() {
            assert_eq!(splitter.split(&text).unwrap(), (text.len(), None));
        }
        assert!(splitter.object.capacity() <= MAX_OBJECT + GROWTH);
        let (used, object) = splitter.split(br#""}}, {"metadata": {}}]}"#).unwrap();
        let (object, is_cut) = object.unwrap();
        assert_eq!((used, object.len(), is_cut), (3, MAX_OBJECT, true));
        let error = read(&Parser::<ConfigMap>(PhantomData), object, is_cut).unwrap_err();
        assert!(chain(&error).contains(r#"{"name": "large""#), "{error}");
        // The next one is read.
        assert_eq!(
            splitter.split(br#", {"metadata": {}}]}"#).unwrap().1,
            Some((&br#"{"metadata": {}}"#[..], false))
        );
    }

    #[test]
    fn buffer_of_a_large_object_is_freed() {
        let mut splitter = Splitter::of_stream();
        let large = json!({"text": "x".repeat(4 * REUSED)}).to_string();
        assert!(splitter.split(large.as_bytes()).unwrap().1.is_some());
        assert!(splitter.split(b"{").unwrap().1.is_none());
        assert!(splitter.object.capacity() <= REUSED);
    }

    #[test]
    fn arbitrary_text_cannot_panic() {
        for text in ["}}}]", "]}{{[\"", "\\\\\"", "[[{}]]", "{\"items\":[[{}]]}", "\u{0}{"] {
            for splitter in [Splitter::of_list(), Splitter::of_stream()] {
                let mut splitter = splitter;
                let _ = splitter.split(text.as_bytes());
            }
        }
    }

    fn object(name: &str, version: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "resourceVersion": version}})
    }

    fn event(kind: &str, object: &Value) -> String {
        format!("{}\n", json!({"type": kind, "object": object}))
    }

    fn list(metadata: &Value, items: &[Value]) -> String {
        json!({"kind": "ConfigMapList", "apiVersion": "v1", "metadata": metadata, "items": items}).to_string()
    }

    fn gone() -> Value {
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410})
    }

    /// The events and errors of a watch whose requests get these responses, and the queries.
    async fn watched(responses: Vec<(u16, String)>) -> (Vec<String>, Vec<String>) {
        let (service, mut api) = mock::pair::<http::Request<Body>, Response<Body>>();
        let server = tokio::spawn(async move {
            let mut queries = Vec::new();
            for (code, text) in responses {
                let (request, send) = api.next_request().await.unwrap();
                queries.push(request.uri().query().unwrap_or_default().to_owned());
                let body = Body::from(text.into_bytes());
                send.send_response(Response::builder().status(code).body(body).unwrap());
            }
            queries
        });
        let selection = Selection { fields: "spec.nodeName=n".to_owned(), renew: 30, page: Some(PAGE) };
        let mut events = std::pin::pin!(watch::<ConfigMap>(Client::new(service, "default"), selection));
        let mut seen = Vec::new();
        // The service is closed after the last response.
        loop {
            let name = |object: ConfigMap| object.metadata.name.unwrap_or_default();
            seen.push(match events.next().await.unwrap() {
                Ok(Event::Init) => "Init".to_owned(),
                Ok(Event::InitApply(object)) => format!("InitApply {}", name(object)),
                Ok(Event::InitDone) => "InitDone".to_owned(),
                Ok(Event::Apply(object)) => format!("Apply {}", name(object)),
                Ok(Event::Delete(object)) => format!("Delete {}", name(object)),
                Err(Error::WatchStartFailed(kube::Error::Service(_))) => break,
                Err(Error::InitialListFailed(kube::Error::Service(_))) => break,
                Err(Error::InitialListFailed(_)) => "InitialListFailed".to_owned(),
                Err(Error::WatchStartFailed(_)) => "WatchStartFailed".to_owned(),
                Err(Error::WatchError(_)) => "WatchError".to_owned(),
                Err(Error::WatchFailed(_)) => "WatchFailed".to_owned(),
                Err(Error::NoResourceVersion) => "NoResourceVersion".to_owned(),
            });
        }
        (seen, server.await.unwrap())
    }

    #[tokio::test]
    async fn pages_are_listed_and_then_watched_from_their_version() {
        let events = [
            event("ADDED", &object("c", "8")),
            event(
                "BOOKMARK",
                &json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"resourceVersion": "12"}}),
            ),
            event("DELETED", &object("a", "14")),
        ];
        let (seen, queries) = watched(vec![
            (200, list(&json!({"resourceVersion": "7", "continue": "more"}), &[object("a", "1")])),
            (200, list(&json!({"resourceVersion": "7"}), &[object("b", "2")])),
            (200, events.concat()),
            (200, String::new()),
        ])
        .await;
        assert_eq!(seen, ["Init", "InitApply a", "InitApply b", "InitDone", "Apply c", "Delete a"]);
        let with = |query: &str, part: &str| query.split('&').any(|found| found == part);
        assert!(with(&queries[0], "limit=500") && !queries[0].contains("continue"), "{queries:?}");
        assert!(with(&queries[1], "continue=more"), "{queries:?}");
        assert!(with(&queries[2], "watch=true") && with(&queries[2], "timeoutSeconds=30"), "{queries:?}");
        assert!(with(&queries[2], "resourceVersion=7") && with(&queries[3], "resourceVersion=14"));
        assert!(queries.iter().all(|query| with(query, "fieldSelector=spec.nodeName%3Dn")), "{queries:?}");
    }

    #[tokio::test]
    async fn expired_version_leads_to_a_new_list() {
        let all = || (200, list(&json!({"resourceVersion": "7"}), &[]));
        let (seen, _) =
            watched(vec![all(), (200, event("ERROR", &gone())), all(), (410, gone().to_string()), all()])
                .await;
        let list = ["Init", "InitDone"];
        assert_eq!(seen, [&list[..], &["WatchError"], &list, &["WatchStartFailed"], &list].concat());
    }

    #[tokio::test]
    async fn unreadable_object_leads_to_a_new_list() {
        let broken = json!({"metadata": {"name": 7}});
        let (seen, _) = watched(vec![
            (200, list(&json!({"resourceVersion": "7"}), &[object("a", "1"), broken.clone()])),
            (200, list(&json!({"resourceVersion": "7"}), &[])),
            (200, event("ADDED", &broken)),
            (200, r#"{"items": [{"metadata""#.to_owned()),
            (200, list(&json!({}), &[])),
        ])
        .await;
        assert_eq!(
            seen,
            [
                "Init",
                "InitApply a",
                "InitialListFailed",
                "Init",
                "InitDone",
                "WatchFailed",
                "Init",
                "InitialListFailed",
                "Init",
                "NoResourceVersion",
                "Init",
            ]
        );
    }

    #[tokio::test]
    async fn failed_watch_continues_from_its_version() {
        let error = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500});
        let (seen, queries) = watched(vec![
            (200, list(&json!({"resourceVersion": "7"}), &[])),
            (503, error.to_string()),
            (200, format!("{}{}", event("ADDED", &object("a", "9")), event("ERROR", &error))),
            // The connection ends within an event.
            (200, r#"{"type": "ADDED", "obj"#.to_owned()),
            (200, String::new()),
        ])
        .await;
        assert_eq!(seen, ["Init", "InitDone", "WatchStartFailed", "Apply a", "WatchError"]);
        let last = queries.iter().skip(3);
        assert!(last.clone().count() == 2 && last.clone().all(|query| query.contains("resourceVersion=9")));
    }
}
