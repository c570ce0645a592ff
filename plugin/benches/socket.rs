//! Latency of responses to kubelet, start time and memory of the daemon. A plain program, because it measures two ends
//! of a socket and whole processes: `cargo bench -p gantry-plugin --bench socket`.
//!
//! Measurements of the binary (exec to Register, resident memory) need `GANTRY_BINARY`, built with --release: `cargo
//! build --release -p gantry && GANTRY_BINARY=target/release/gantry cargo bench -p gantry-plugin --bench socket`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_api::{ContainerGrant, ContainerShare, Grant};
use gantry_plugin::handover::{ContainerRequest, Devices, Handover, ObservedPod, Request, WaitFor};
use gantry_plugin::inventory::{Device, Inventory, Slice};
use gantry_proto::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Empty,
    PreferredAllocationRequest,
};
use gantry_topology::choice::Table;
use support::{FakeKubelet, Node, Plugin, inventory, uuid};
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;

const CALLS: usize = 2_000;
const WARM_UP: usize = 200;
const CALLERS: u8 = 8;
const STARTS: usize = 50;
const RESTARTS: usize = 30;

fn main() {
    // Cargo passes --bench; any other argument is an error.
    println!("{:<52} {:>10} {:>10} {:>10}", "", "p50", "p99", "max");
    in_process();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(over_the_socket());
    runtime.block_on(many_devices());
    match std::env::var_os("GANTRY_BINARY") {
        Some(binary) => runtime.block_on(whole_process(Path::new(&binary))),
        None => println!("set GANTRY_BINARY to a release build for exec to Register and resident memory"),
    }
}

/// `GetPreferredAllocation` without the socket: all devices offered, four known pods with grants of two GPUs each.
fn in_process() {
    let whole = inventory(8);
    let pods: Vec<ObservedPod> = (0..4).map(|pod| granted(pod, &[2 * pod, 2 * pod + 1])).collect();
    for (what, size) in [("granted pair", 2), ("no grant, best 3 of what is left", 3), ("no grant, 8", 8)] {
        ask(what, &whole, pods.clone(), size);
    }
    ask("2 of 80 replicas", &replicas(), Vec::new(), 2);
    ask("2 of 56 slices", &slices(), Vec::new(), 2);
}

fn ask(what: &str, inventory: &Inventory, pods: Vec<ObservedPod>, size: usize) {
    let mut handover = Handover::new("node-1".into());
    handover.inventory(inventory);
    handover.table(Some(Arc::new(Table::build(&inventory.machine))));
    handover.sync(pods);
    let request = [Request {
        resource: "nvidia.com/gpu".into(),
        offered: inventory.devices.iter().map(|device| device.id.clone()).collect(),
        must: Devices::new(),
        size,
    }];
    let times = measure(CALLS, || {
        std::hint::black_box(handover.prefer(std::hint::black_box(&request), WaitFor::default()));
    });
    report(&format!("GetPreferredAllocation in process, {what}"), times);
}

fn granted(pod: u8, gpus: &[u8]) -> ObservedPod {
    let uid = format!("uid-{pod}");
    let grant = Grant {
        version: Grant::VERSION,
        plan: format!("plan-{pod}"),
        pod: uid.as_str().into(),
        node: "node-1".into(),
        containers: vec![ContainerGrant {
            name: "app".into(),
            resource: "nvidia.com/gpu".into(),
            share: ContainerShare::Devices(gpus.iter().map(|gpu| uuid(*gpu).into()).collect()),
        }],
    };
    ObservedPod {
        uid: uid.as_str().into(),
        namespace: "default".into(),
        name: format!("pod-{pod}"),
        created: 0,
        revision: pod.into(),
        grant: Some(grant.to_annotation().unwrap()),
        requests: vec![ContainerRequest {
            container: "app".into(),
            resource: "nvidia.com/gpu".into(),
            count: gpus.len(),
        }],
        started: false,
    }
}

/// The request with all devices free, with GPUs shared by ten or split into seven slices.
async fn many_devices() {
    for (what, inventory) in [("replicas", replicas()), ("slices", slices())] {
        let ids: Vec<String> = inventory.devices.iter().map(|device| device.id.to_string()).collect();
        let (directory, shutdown, daemon) = daemon(inventory);
        let mut kubelet = FakeKubelet::start(&directory);
        let mut plugin = kubelet.plugin().await;
        for size in [1, 2] {
            let request = PreferredAllocationRequest {
                container_requests: vec![ContainerPreferredAllocationRequest {
                    available_device_ids: ids.clone(),
                    must_include_device_ids: Vec::new(),
                    allocation_size: size,
                }],
            };
            let mut times = Vec::new();
            for _ in 0..WARM_UP + CALLS {
                let request = request.clone();
                let began = Instant::now();
                plugin.client.get_preferred_allocation(request).await.unwrap();
                times.push(began.elapsed());
            }
            let what = format!("GetPreferredAllocation, {size} of {} {what}", ids.len());
            report(&what, times.split_off(WARM_UP));
        }
        shutdown.cancel();
        daemon.join().unwrap();
    }
}

/// Eight GPUs, each shared by ten.
fn replicas() -> Inventory {
    inventory_with(10, |device, k| {
        device.id = format!("{}::{k}", device.uuid).into();
        device.replica = Some(k);
    })
}

/// Eight GPUs with seven slices each.
fn slices() -> Inventory {
    inventory_with(7, |device, k| {
        device.uuid = format!("MIG-{}-{k}", device.uuid);
        device.id = device.uuid.as_str().into();
        let start = u8::try_from(k).unwrap();
        device.slice = Some(Arc::new(Slice {
            index: start,
            gpu_instance: u32::from(start) + 7,
            compute_instance: 0,
            profile: "1g.10gb".to_owned(),
            start,
            size: 1,
            caps: None,
        }));
    })
}

/// Eight GPUs with `each` devices on every one.
fn inventory_with(each: u16, change: impl Fn(&mut Device, u16)) -> Inventory {
    let whole = inventory(8);
    let devices = whole.devices.iter().flat_map(|device| {
        (0..each).map(|k| {
            let mut device = device.clone();
            change(&mut device, k);
            device
        })
    });
    Inventory::ready(Arc::clone(&whole.machine), devices.collect())
}

/// A daemon on its own thread, as in its own process: its directory, and its shutdown token.
fn daemon(inventory: Inventory) -> (PathBuf, CancellationToken, std::thread::JoinHandle<()>) {
    let (send, receive) = std::sync::mpsc::channel();
    let daemon = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut node = Node::new(8);
            node.inventory.send_replace(Arc::new(inventory));
            node.boot();
            send.send((node.plugins(), node.shutdown.clone())).unwrap();
            node.shutdown.clone().cancelled().await;
            node.stop().await;
        });
    });
    let (directory, shutdown) = receive.recv().unwrap();
    (directory, shutdown, daemon)
}

/// Kubelet's calls. The daemon has its own thread, as in its own process.
async fn over_the_socket() {
    let (directory, shutdown, daemon) = daemon(inventory(8));
    let mut kubelet = FakeKubelet::start(&directory);
    let mut plugin = kubelet.plugin().await;
    let mut stream = plugin.watch().await;
    stream.next().await.unwrap().unwrap();
    let mut times = Vec::new();
    for _ in 0..WARM_UP + CALLS {
        let began = Instant::now();
        plugin.client.get_device_plugin_options(Empty {}).await.unwrap();
        times.push(began.elapsed());
    }
    report("floor: GetDevicePluginOptions", times.split_off(WARM_UP));
    for count in [1, 8] {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest { device_ids: (0..count).map(uuid).collect() }],
        };
        let mut times = Vec::new();
        for _ in 0..WARM_UP + CALLS {
            let request = request.clone();
            let began = Instant::now();
            plugin.client.allocate(request).await.unwrap();
            times.push(began.elapsed());
        }
        report(&format!("Allocate, {count} ids"), times.split_off(WARM_UP));
    }
    concurrently(&plugin).await;
    for size in [1, 4, 8] {
        let request = PreferredAllocationRequest {
            container_requests: vec![ContainerPreferredAllocationRequest {
                available_device_ids: (0..8).map(uuid).collect(),
                must_include_device_ids: Vec::new(),
                allocation_size: size,
            }],
        };
        let mut times = Vec::new();
        for _ in 0..WARM_UP + CALLS {
            let request = request.clone();
            let began = Instant::now();
            plugin.client.get_preferred_allocation(request).await.unwrap();
            times.push(began.elapsed());
        }
        report(&format!("GetPreferredAllocation, {size} of 8"), times.split_off(WARM_UP));
    }
    let mut times = Vec::new();
    for _ in 0..RESTARTS {
        kubelet.kill();
        tokio::time::sleep(Duration::from_millis(20)).await;
        let began = Instant::now();
        kubelet = FakeKubelet::start(&directory);
        kubelet.registration().await;
        times.push(began.elapsed());
    }
    report("kubelet.sock recreated to Register", times);
    shutdown.cancel();
    daemon.join().unwrap();
}

/// Allocate by several concurrent callers, each with one call at a time.
async fn concurrently(plugin: &Plugin) {
    let began = Instant::now();
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let mut client = plugin.client.clone();
            tokio::spawn(async move {
                let request = AllocateRequest {
                    container_requests: vec![ContainerAllocateRequest { device_ids: vec![uuid(caller)] }],
                };
                let mut times = Vec::with_capacity(CALLS);
                for _ in 0..CALLS {
                    let request = request.clone();
                    let began = Instant::now();
                    client.allocate(request).await.unwrap();
                    times.push(began.elapsed());
                }
                times
            })
        })
        .collect();
    let mut times = Vec::new();
    for caller in callers {
        times.extend(caller.await.unwrap());
    }
    let rate = times.len() as f64 / began.elapsed().as_secs_f64();
    report(&format!("Allocate, {CALLERS} callers at once"), times);
    println!("{:<52} {rate:>8.0}/s", "  in all");
}

/// The binary as on a node, with simulated GPUs.
async fn whole_process(binary: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("../simulator/machines/dgx-a100.yaml");
    let simulated = gantry_nvml_sim::install(&machine, &folder.path().join("gpus")).unwrap();
    let library = simulated.library;
    let root = folder.path().join("gpus/root");
    let plugins = folder.path().join("device-plugins");
    std::fs::create_dir(&plugins).unwrap();
    let mut times = Vec::new();
    for _ in 0..STARTS {
        let mut kubelet = FakeKubelet::start(&plugins);
        let began = Instant::now();
        let child = spawn(binary, &library, &root, &plugins);
        kubelet.registration().await;
        times.push(began.elapsed());
        end(child);
    }
    report("exec to Register, 8 GPUs", times);

    let mut kubelet = FakeKubelet::start(&plugins);
    let child = spawn(binary, &library, &root, &plugins);
    let mut plugin: Plugin = kubelet.plugin().await;
    let mut stream = plugin.watch().await;
    let list = stream.next().await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    println!("{:<52} {:>10}", "resident at rest, 30 s after start", resident(&child));
    let ids: Vec<String> = list.devices.iter().map(|device| device.id.clone()).collect();
    for call in 0..13_000 {
        let some = &ids[..1 + call % ids.len()];
        let some: Vec<&str> = some.iter().map(String::as_str).collect();
        if call % 2 == 0 {
            plugin.allocate(&some).await.unwrap();
        } else {
            let offered: Vec<&str> = ids.iter().map(String::as_str).collect();
            plugin.prefer(&offered, &[], i32::try_from(some.len()).unwrap()).await;
        }
    }
    println!("{:<52} {:>10}", "resident after 13,000 calls", resident(&child));
    end(child);
}

fn spawn(binary: &Path, library: &Path, root: &Path, plugins: &Path) -> Child {
    Command::new(binary)
        .args(["plugin", "--no-cluster", "--listen=127.0.0.1:0"])
        .arg("--nvml-library")
        .arg(library)
        .arg("--proc-root")
        .arg(root.join("proc"))
        .arg("--sys-root")
        .arg(root.join("sys"))
        .arg("--container-dev-root")
        .arg(root.join("dev"))
        .arg("--device-plugin-dir")
        .arg(plugins)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn resident(child: &Child) -> String {
    let status = std::fs::read_to_string(PathBuf::from(format!("/proc/{}/status", child.id()))).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    let kilobytes: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    format!("{:.1} MB", kilobytes * 1024.0 / 1e6)
}

fn measure(calls: usize, mut call: impl FnMut()) -> Vec<Duration> {
    for _ in 0..WARM_UP {
        call();
    }
    (0..calls)
        .map(|_| {
            let began = Instant::now();
            call();
            began.elapsed()
        })
        .collect()
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: f64| {
        let position = (times.len() as f64 * share) as usize;
        text(times[position.min(times.len() - 1)])
    };
    println!("{what:<52} {:>10} {:>10} {:>10}", at(0.5), at(0.99), at(1.0));
}

fn text(time: Duration) -> String {
    let micros = time.as_secs_f64() * 1e6;
    if micros < 1_000.0 { format!("{micros:.1} us") } else { format!("{:.2} ms", micros / 1e3) }
}
