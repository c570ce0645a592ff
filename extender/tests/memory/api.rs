//! An API server over HTTP/1.1 that writes objects as it generates them: it never has a large one in memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::tcp::OwnedWriteHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub(crate) const PODS: &str = "/api/v1/pods";
pub(crate) const NODES: &str = "/api/v1/nodes";
pub(crate) const GPU_NODES: &str = "/apis/gantry.dev/v1alpha1/gpunodes";
pub(crate) const GANGS: &str = "/apis/gantry.dev/v1alpha1/gangs";
pub(crate) const BUDGETS: &str = "/apis/policy/v1/poddisruptionbudgets";
pub(crate) const CLAIMS: &str = "/api/v1/persistentvolumeclaims";
pub(crate) const VOLUMES: &str = "/api/v1/persistentvolumes";
const KINDS: [&str; 7] = [PODS, NODES, GPU_NODES, GANGS, BUDGETS, CLAIMS, VOLUMES];

/// An object with one text in it repeated: `before`, `item` for each number with `#` in its place, `after`.
#[derive(Debug, Clone)]
pub(crate) struct Object {
    before: String,
    item: String,
    count: usize,
    after: String,
    name: String,
}

impl Object {
    /// An object in which the only element of a list, the only entry of a map or the only character of a text is `@`,
    /// which stands for many items.
    pub(crate) fn new(object: &Value, item: &str, count: usize) -> Self {
        let text = object.to_string();
        let lists = text.contains("[\"@\"]");
        let mark = if text.contains("{\"@\":0}") {
            "\"@\":0"
        } else if lists {
            "\"@\""
        } else {
            "@"
        };
        let (before, after) = text.split_once(mark).unwrap_or((&text, ""));
        let name = object["metadata"]["namespace"].as_str().unwrap_or_default().to_owned()
            + "/"
            + object["metadata"]["name"].as_str().unwrap();
        let count = if after.is_empty() { 0 } else { count };
        Self { before: before.into(), item: item.into(), count, after: after.into(), name }
    }

    pub(crate) fn plain(object: &Value) -> Self {
        Self::new(object, "", 0)
    }

    async fn write(&self, version: usize, to: &mut Chunks) -> std::io::Result<()> {
        let metadata = format!("\"metadata\":{{\"resourceVersion\":\"{version}\",");
        to.text(&self.before.replacen("\"metadata\":{", &metadata, 1)).await?;
        for number in 0..self.count {
            if number > 0 {
                to.text(",").await?;
            }
            to.text(&self.item.replace('#', &number.to_string())).await?;
        }
        to.text(&self.after).await
    }
}

/// A chunked body.
struct Chunks {
    to: BufWriter<OwnedWriteHalf>,
    chunk: String,
}

impl Chunks {
    async fn text(&mut self, text: &str) -> std::io::Result<()> {
        self.chunk.push_str(text);
        if self.chunk.len() > 16 * 1024 { self.flush().await } else { Ok(()) }
    }

    async fn flush(&mut self) -> std::io::Result<()> {
        if !self.chunk.is_empty() {
            self.to.write_all(format!("{:x}\r\n{}\r\n", self.chunk.len(), self.chunk).as_bytes()).await?;
            self.chunk.clear();
        }
        self.to.flush().await
    }

    async fn end(mut self) -> std::io::Result<()> {
        self.flush().await?;
        self.to.write_all(b"0\r\n\r\n").await?;
        self.to.flush().await
    }
}

type Change = (&'static str, &'static str, Arc<Object>);

/// The changes; the version of one is its position from 1.
#[derive(Default)]
struct Log {
    changes: Vec<Change>,
    /// Versions up to this one are compacted.
    compacted: usize,
}

impl Log {
    /// Watches that are further behind list again, as those of etcd do after a compaction.
    const MOST: usize = 16_384;

    fn push(&mut self, change: Change) -> usize {
        self.changes.push(change);
        let excess = self.changes.len().saturating_sub(Self::MOST);
        self.changes.drain(..excess);
        self.compacted += excess;
        self.newest()
    }

    fn newest(&self) -> usize {
        self.compacted + self.changes.len()
    }

    /// The change after a version; `Err` if it is compacted, and `Ok(None)` if it is not there yet.
    fn after(&self, version: usize) -> Result<Option<Change>, ()> {
        let position = version.checked_sub(self.compacted).ok_or(())?;
        Ok(self.changes.get(position).cloned())
    }
}

pub(crate) struct Api {
    pub(crate) url: String,
    objects: Mutex<BTreeMap<(&'static str, String), Arc<Object>>>,
    log: Mutex<Log>,
    newest: watch::Sender<usize>,
    /// Bodies of Events and Bindings.
    written: Mutex<Vec<Value>>,
}

impl Api {
    pub(crate) async fn start() -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let api = Arc::new(Self {
            url: format!("http://{}", listener.local_addr().unwrap()),
            objects: Mutex::default(),
            log: Mutex::default(),
            newest: watch::Sender::default(),
            written: Mutex::default(),
        });
        let server = Arc::clone(&api);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = Arc::clone(&server);
                tokio::spawn(async move { server.serve(stream).await });
            }
        });
        api
    }

    pub(crate) fn set(&self, path: &'static str, object: Object) {
        let object = Arc::new(object);
        let mut objects = self.objects.lock().unwrap();
        let before = objects.insert((path, object.name.clone()), Arc::clone(&object));
        self.changed((path, if before.is_some() { "MODIFIED" } else { "ADDED" }, object));
    }

    pub(crate) fn delete(&self, path: &'static str, keep: impl Fn(&str) -> bool) {
        let mut objects = self.objects.lock().unwrap();
        for (_, object) in objects.extract_if(.., |(of, name), _| *of == path && !keep(name)) {
            self.changed((path, "DELETED", object));
        }
    }

    /// Called with the objects locked: a list and its version are of one moment.
    fn changed(&self, change: Change) {
        let newest = self.log.lock().unwrap().push(change);
        self.newest.send_replace(newest);
    }

    pub(crate) fn written(&self, kind: &str) -> Vec<Value> {
        self.written.lock().unwrap().iter().filter(|body| body["kind"] == kind).cloned().collect()
    }

    async fn serve(&self, stream: TcpStream) -> Option<()> {
        let (read, write) = stream.into_split();
        let (mut read, mut write) = (BufReader::new(read), BufWriter::new(write));
        loop {
            let (mut head, mut length) = (String::new(), 0);
            read.read_line(&mut head).await.ok().filter(|read| *read > 0)?;
            loop {
                let mut line = String::new();
                read.read_line(&mut line).await.ok().filter(|read| *read > 0)?;
                if line == "\r\n" {
                    break;
                }
                if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().ok()?;
                }
            }
            let mut body = vec![0; length];
            read.read_exact(&mut body).await.ok()?;
            let mut words = head.split(' ');
            let (method, target) = (words.next()?, words.next()?);
            let (path, query) = target.split_once('?').unwrap_or((target, ""));
            let kind = KINDS.into_iter().find(|kind| *kind == path);
            if let (Some(kind), "GET") = (kind, method) {
                write.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n").await.ok()?;
                let mut to = Chunks { to: write, chunk: String::new() };
                let version = query.split('&').find_map(|part| part.strip_prefix("resourceVersion="));
                if query.contains("watch=true") {
                    self.watch(kind, version?.parse().ok()?, &mut to).await.ok()?;
                } else {
                    self.list(kind, &mut to).await.ok()?;
                }
                // One list or watch for each connection.
                return to.end().await.ok();
            }
            let of_path = |path: &str| {
                let (namespace, name) = path.strip_prefix("/api/v1/namespaces/")?.split_once("/pods/")?;
                self.objects.lock().unwrap().get(&(PODS, format!("{namespace}/{name}"))).cloned()
            };
            if let Some(object) = of_path(path).filter(|_| method == "GET") {
                write.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n").await.ok()?;
                let mut to = Chunks { to: write, chunk: String::new() };
                let version = *self.newest.borrow();
                object.write(version, &mut to).await.ok()?;
                return to.end().await.ok();
            }
            let (status, answer) = if path == "/version" {
                let fields = [
                    "major",
                    "minor",
                    "gitVersion",
                    "gitCommit",
                    "gitTreeState",
                    "buildDate",
                    "goVersion",
                    "compiler",
                    "platform",
                ];
                (200, fields.into_iter().map(|field| (field.to_owned(), Value::from("1"))).collect())
            } else if method == "POST" {
                let body: Value = serde_json::from_slice(&body).ok()?;
                self.written.lock().unwrap().push(body.clone());
                let bound = body["kind"] == "Binding";
                (
                    201,
                    if bound {
                        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})
                    } else {
                        body
                    },
                )
            } else {
                (
                    404,
                    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 404, "message": "none"}),
                )
            };
            let answer = answer.to_string();
            let head = format!(
                "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                answer.len()
            );
            write.write_all(head.as_bytes()).await.ok()?;
            write.write_all(answer.as_bytes()).await.ok()?;
            write.flush().await.ok()?;
        }
    }

    async fn list(&self, kind: &'static str, to: &mut Chunks) -> std::io::Result<()> {
        let (version, objects): (usize, Vec<Arc<Object>>) = {
            let objects = self.objects.lock().unwrap();
            let of_kind = objects.iter().filter(|((of, _), _)| *of == kind);
            (*self.newest.borrow(), of_kind.map(|(_, object)| Arc::clone(object)).collect())
        };
        let head = r#"{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":""#;
        to.text(&format!("{head}{version}\"}},\"items\":[")).await?;
        for (number, object) in objects.iter().enumerate() {
            if number > 0 {
                to.text(",").await?;
            }
            object.write(version, to).await?;
        }
        to.text("]}").await
    }

    async fn watch(&self, kind: &'static str, mut version: usize, to: &mut Chunks) -> std::io::Result<()> {
        to.flush().await?;
        let mut newest = self.newest.subscribe();
        loop {
            let change = self.log.lock().unwrap().after(version);
            match change {
                Ok(Some((of, change, object))) => {
                    version += 1;
                    if of == kind {
                        to.text(&format!("{{\"type\":\"{change}\",\"object\":")).await?;
                        object.write(version, to).await?;
                        to.text("}\n").await?;
                        to.flush().await?;
                    }
                }
                Ok(None) => {
                    let change = newest.wait_for(|newest| *newest > version);
                    if tokio::time::timeout(std::time::Duration::from_secs(20), change).await.is_err() {
                        return Ok(());
                    }
                }
                Err(()) => {
                    let gone = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired"});
                    return to.text(&format!("{{\"type\":\"ERROR\",\"object\":{gone}}}\n")).await;
                }
            }
        }
    }
}
