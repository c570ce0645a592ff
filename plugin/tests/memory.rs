//! The memory of the plugin on a node whose pods are as large as the API server allows. A process of its own, so that
//! nothing else is counted.
#![allow(unsafe_code, reason = "an allocator is unsafe by its trait")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot go on fails")]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gantry_api::{ContainerGrant, ContainerShare, Grant};
use serde_json::json;
use support::{Node, soon, uuid};

/// Memory limit of the plugin in the manifests.
const LIMIT: usize = 64 * 1024 * 1024;
/// What is allocated at most. The program's own pages and the heap's free blocks need the rest.
const BUDGET: usize = LIMIT * 5 / 8;
/// Large pods of the node.
const PODS: usize = 200;
/// Bytes of a large field.
const LARGE: usize = 1_400_000;

/// Counts what the system's allocator hands out.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn count(added: usize, removed: usize) {
    let live = LIVE.fetch_add(added, Ordering::Relaxed) + added;
    PEAK.fetch_max(live, Ordering::Relaxed);
    LIVE.fetch_sub(removed, Ordering::Relaxed);
}

// SAFETY: every call goes unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks may exist for a moment.
        count(size, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// An API server that has only the pods of this node. It sends a large pod in small parts and holds none.
fn serve(pods: Arc<Vec<Pod>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, pods) = (stream.unwrap(), Arc::clone(&pods));
            std::thread::spawn(move || respond(stream, &pods));
        }
    });
    address
}

/// A pod with a large field in the middle.
struct Pod {
    beginning: String,
    filler: &'static str,
    end: String,
}

impl Pod {
    fn new(index: usize, filler: &'static str, grant: &str, requests: &str) -> Self {
        let metadata = json!({
            "name": format!("pod-{index}"), "namespace": "ml", "uid": format!("uid-{index}"),
            "resourceVersion": (index + 1).to_string(), "annotations": {"gantry.dev/grant": grant},
        });
        let beginning = format!(
            r#"{{"metadata":{metadata},"spec":{{"containers":[{{"name":"app","resources":{{"limits":{requests}}},"env":[{{"name":"LARGE","value":""#
        );
        Self { beginning, filler, end: r#""}]}]},"status":{"phase":"Pending"}}"#.to_owned() }
    }

    fn write(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        stream.write_all(self.beginning.as_bytes())?;
        let part = self.filler.repeat(4096 / self.filler.len());
        for _ in 0..LARGE / 4096 {
            stream.write_all(part.as_bytes())?;
        }
        stream.write_all(self.end.as_bytes())
    }
}

/// Responds to one request; the end of the connection is the end of the response.
fn respond(mut stream: TcpStream, pods: &[Pod]) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let request = lines.next().unwrap().unwrap();
    for header in lines {
        if header.unwrap().is_empty() {
            break;
        }
    }
    // The plugin may end before it has read everything.
    let _ = write(&mut stream, &request, pods);
}

fn write(stream: &mut TcpStream, request: &str, pods: &[Pod]) -> std::io::Result<()> {
    let head = |code: &str| {
        format!("HTTP/1.1 {code}\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n")
    };
    if !request.starts_with("GET /api/v1/pods?") {
        stream.write_all(head("404 Not Found").as_bytes())?;
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404});
        return stream.write_all(status.to_string().as_bytes());
    }
    stream.write_all(head("200 OK").as_bytes())?;
    if request.contains("watch=true") {
        for pod in pods {
            stream.write_all(br#"{"type":"MODIFIED","object":"#)?;
            pod.write(stream)?;
            stream.write_all(b"}\n")?;
        }
        std::thread::park();
        return Ok(());
    }
    stream
        .write_all(br#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":["#)?;
    for (index, pod) in pods.iter().enumerate() {
        stream.write_all(if index == 0 { b"" } else { b"," })?;
        pod.write(stream)?;
    }
    stream.write_all(b"]}")
}

/// Pods with large fields, with the largest grants, and with very many requests; the last one is an ordinary pod.
fn pods() -> Vec<Pod> {
    let forged = format!(r#"{{"version":1,"plan":"{}"}}"#, "p".repeat(200 * 1024));
    let one = r#"{"nvidia.com/gpu":"1"}"#;
    let many: Vec<String> = (0..50_000).map(|index| format!(r#""a/{index}":"1""#)).collect();
    let many = format!("{{{}}}", many.join(","));
    let grant = Grant {
        version: Grant::VERSION,
        plan: "plan".to_owned(),
        pod: format!("uid-{PODS}").as_str().into(),
        node: "node-1".into(),
        containers: vec![ContainerGrant {
            name: "app".into(),
            resource: "nvidia.com/gpu".into(),
            share: ContainerShare::Devices(vec![uuid(3).into()]),
        }],
    };
    let large = (0..PODS).map(|index| match index % 20 {
        0 => Pod::new(index, "x", "", &many),
        // Characters that JSON escapes.
        1 => Pod::new(index, r"\u003c", &forged, one),
        _ => Pod::new(index, "x", &forged, one),
    });
    large.chain([Pod::new(PODS, "x", &grant.to_annotation().unwrap(), one)]).collect()
}

/// The plugin once held pages of 500 whole pods: 24 pods of 1.4 MB were more than its memory limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_pods_fit_into_the_memory_limit() {
    let address = serve(Arc::new(pods()));
    let node = Node::new(4);
    let kubeconfig = node.directory.path().join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "c", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    });
    std::fs::write(&kubeconfig, config.to_string()).unwrap();
    let mut node = node.with(|args| {
        args.no_cluster = false;
        args.kubeconfig = Some(kubeconfig);
    });
    let mut kubelet = node.kubelet();
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    node.boot();
    let mut plugin = kubelet.plugin().await;
    let all: Vec<String> = (0..4).map(uuid).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    // The grant of the ordinary pod is followed.
    soon("the granted device", plugin.comes_to_prefer(&all, 1, [uuid(3)].into())).await;
    let peak = PEAK.load(Ordering::Relaxed) - before;
    println!("{} KiB at most, {} KiB at rest", peak / 1024, (LIVE.load(Ordering::Relaxed) - before) / 1024);
    assert!(peak < BUDGET, "{} KiB allocated, {} KiB allowed", peak / 1024, BUDGET / 1024);
    node.stop().await;
}
