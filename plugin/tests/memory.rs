//! The memory of the plugin on a node whose pods are as large as the API server allows. A process of its own, so that
//! nothing else is counted.
#![allow(unsafe_code, reason = "an allocator is unsafe by its trait")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]
#![allow(clippy::print_stdout, reason = "the measured numbers")]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use gantry_api::{ContainerGrant, ContainerShare, DeviceHealth, Grant};
use gantry_plugin::inventory::{Device, Inventory};
use serde_json::json;
use support::{Node, pairs, soon, uuid};
use tokio::sync::Mutex;

/// Memory limit of the plugin in the manifests.
const LIMIT: usize = 64 * 1024 * 1024;
/// What is allocated at most. The rest is for free blocks of the heap; the kernel can reclaim the program's own pages.
const BUDGET: usize = LIMIT * 3 / 4;
/// Large pods of the node.
const PODS: usize = 200;
/// Bytes of a large field, and of the parts in which it is sent.
const LARGE: usize = 1_400_000;
const PART: usize = 14_000;
/// Time to send all pods to a plugin without optimisation on a machine under load.
const LONG: Duration = Duration::from_secs(300);

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
        let part = self.filler.repeat(PART / self.filler.len());
        for _ in 0..LARGE / PART {
            stream.write_all(part.as_bytes())?;
        }
        stream.write_all(self.end.as_bytes())?;
        SENT.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Pods that were sent in a list or a watch.
static SENT: AtomicUsize = AtomicUsize::new(0);
/// Bytes of the last status that was written.
static STATUS: AtomicUsize = AtomicUsize::new(0);

/// Responds to one request; the end of the connection is the end of the response.
fn respond(mut stream: TcpStream, pods: &[Pod]) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut request = String::new();
    reader.read_line(&mut request).unwrap();
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).unwrap();
        if let Some(value) = header.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if header.trim().is_empty() {
            break;
        }
    }
    std::io::copy(&mut reader.take(length), &mut std::io::sink()).unwrap();
    if request.contains("/node-1/status?") {
        STATUS.store(usize::try_from(length).unwrap(), Ordering::SeqCst);
    }
    // The plugin may end before it has read everything.
    let _ = write(&mut stream, &request, pods);
}

fn write(stream: &mut TcpStream, request: &str, pods: &[Pod]) -> std::io::Result<()> {
    let head = |code: &str| {
        format!("HTTP/1.1 {code}\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n")
    };
    if request.starts_with("PATCH ") {
        stream.write_all(head("200 OK").as_bytes())?;
        let object =
            json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "node-1"}});
        return stream.write_all(object.to_string().as_bytes());
    }
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

/// The tests run one after the other.
static ALONE: Mutex<()> = Mutex::const_new(());

/// A node in the cluster of an API server with these pods.
fn node(pods: Vec<Pod>, gpus: u8) -> Node {
    let address = serve(Arc::new(pods));
    let node = Node::new(gpus);
    let kubeconfig = node.directory.path().join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "c", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    });
    std::fs::write(&kubeconfig, config.to_string()).unwrap();
    node.with(|args| {
        args.no_cluster = false;
        args.kubeconfig = Some(kubeconfig);
    })
}

/// Starts to measure. The result has what is allocated in addition: at most, and now.
fn measure() -> impl Fn() -> [usize; 2] {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    move || [&PEAK, &LIVE].map(|count| (count.load(Ordering::Relaxed) - before) / 1024)
}

fn assert_within_budget([peak, now]: [usize; 2]) {
    println!("{peak} KiB at most, {now} KiB now");
    assert!(peak < BUDGET / 1024, "{peak} KiB allocated, {} KiB allowed", BUDGET / 1024);
}

/// The plugin once held pages of 500 whole pods: 24 pods of 1.4 MB were more than its memory limit.
#[tokio::test]
async fn large_pods_fit_into_the_memory_limit() {
    let _alone = ALONE.lock().await;
    let mut node = node(pods(), 4);
    let mut kubelet = node.kubelet();
    let allocated = measure();
    node.boot();
    let mut plugin = kubelet.plugin().await;
    let sent = async {
        // The list, and the same again in the watch.
        while SENT.load(Ordering::SeqCst) <= 2 * PODS {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LONG, sent).await.unwrap();
    let all: Vec<String> = (0..4).map(uuid).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    // The grant of the ordinary pod is followed.
    soon("the granted device", plugin.comes_to_prefer(&all, 1, [uuid(3)].into())).await;
    assert_within_budget(allocated());
    node.stop().await;
}

/// Replicas of each of eight GPUs on a node with the most devices.
const REPLICAS: u16 = (gantry_config::MOST_DEVICES / 8) as u16;

/// Eight GPUs with the most replicas.
fn largest_inventory() -> Inventory {
    let device = |gpu: u8, replica: u16| Device {
        id: format!("{}::{replica}", uuid(gpu)).into(),
        resource: "nvidia.com/gpu".into(),
        gpu,
        nvml_index: Some(gpu),
        uuid: uuid(gpu),
        health: DeviceHealth { healthy: true, reason: None },
        minor: Some(gpu.into()),
        numa: Some(u32::from(gpu) / 4),
        slice: None,
        replica: Some(replica),
    };
    let devices = (0..8).flat_map(|gpu| (0..REPLICAS).map(move |replica| device(gpu, replica)));
    Inventory::ready(pairs(8), devices.collect())
}

#[tokio::test]
async fn largest_inventory_fits_into_the_memory_limit() {
    let _alone = ALONE.lock().await;
    let mut node = node(Vec::new(), 8);
    let mut kubelet = node.kubelet();
    // One reader of the list: what it decodes is counted too.
    kubelet.watches(false);
    let allocated = measure();
    node.inventory.send_replace(Arc::new(largest_inventory()));
    node.boot();
    let mut plugin = kubelet.plugin().await;
    soon("a status", async {
        while STATUS.load(Ordering::SeqCst) < 8 * usize::from(REPLICAS) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let list = soon("a list", plugin.watch().await.message()).await.unwrap().unwrap();
    assert_eq!(list.devices.len(), 8 * usize::from(REPLICAS));
    drop(list);
    println!("a status of {} KiB", STATUS.load(Ordering::SeqCst) / 1024);
    assert_within_budget(allocated());
    node.stop().await;
}
