//! The daemon and a kubelet over real sockets: registration while kubelet, sockets and directory appear and disappear,
//! and the calls of the device plugin service.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use gantry_api::DeviceHealth;
use support::log::Log;
use support::probes::{awaited, get};
use support::{FakeKubelet, Node, inventory_of, soon, uuid};
use tokio_stream::StreamExt;
use tonic::Code;

#[tokio::test]
async fn resource_is_registered_with_options() {
    let mut node = Node::new(2);
    let mut kubelet = node.kubelet();
    node.boot();
    let registration = kubelet.registration().await;
    assert_eq!(registration.version, "v1beta1");
    assert_eq!(registration.resource_name, "nvidia.com/gpu");
    assert_eq!(registration.endpoint, "nvidia-gpu.sock");
    let options = registration.options.unwrap();
    assert!(options.get_preferred_allocation_available && !options.pre_start_required);
}

#[tokio::test]
async fn no_kubelet_socket_serves_without_registration() {
    let mut node = Node::new(2).with(|args| args.kubelet_socket = Some(String::new()));
    let mut kubelet = node.kubelet();
    node.boot();
    let served = async {
        while !node.socket().exists() {
            tokio::task::yield_now().await;
        }
    };
    soon("the socket", served).await;
    let mut stream = support::Plugin::dial(&node.socket()).await.watch().await;
    let list = soon("a list", stream.next()).await.unwrap().unwrap();
    assert_eq!(list.devices.len(), 2);
    node.stop().await;
    assert!(kubelet.registered_nothing());
}

#[tokio::test]
async fn plugin_registers_when_kubelet_appears() {
    let mut node = Node::new(2);
    node.boot();
    tokio::task::yield_now().await;
    let mut kubelet = node.kubelet();
    kubelet.registration().await;
}

/// Another kubelet root (k0s, microk8s), a wrong directory, or a kubelet that is not started.
#[tokio::test]
async fn missing_kubelet_socket_is_named_with_its_remedy() {
    let mut node = Node::new(2);
    let listen = node.listen();
    node.boot();
    let socket = node.plugins().join("kubelet.sock");
    let waiting = format!(
        "not ready: waiting for kubelet's registration socket {}, which does not exist",
        socket.display()
    );
    let (code, body) = awaited(listen, "/readyz", &waiting).await;
    assert!(code == 503 && body.contains("--device-plugin-dir"), "{body}");
    let mut kubelet = node.kubelet();
    kubelet.registration().await;
    let (_, body) = awaited(listen, "/readyz", "ready\n").await;
    assert_eq!(body.lines().next(), Some("ready"));
}

/// A read-only mount; SELinux and permissions look alike.
#[tokio::test]
async fn unwritable_folder_is_named_with_its_remedy() {
    let mut node = Node::new(2);
    let listen = node.listen();
    let mut kubelet = node.kubelet();
    // Nothing can be bound where a folder with content is.
    std::fs::create_dir_all(node.socket().join("content")).unwrap();
    node.boot();
    let text = format!("not registered with kubelet: cannot create the socket {}", node.socket().display());
    let (code, body) = awaited(listen, "/readyz", &text).await;
    assert_eq!(code, 503, "{body}");
    std::fs::remove_dir_all(node.socket()).unwrap();
    kubelet.registration().await;
}

#[tokio::test]
async fn stale_kubelet_socket_is_retried() {
    let mut node = Node::new(2);
    node.kubelet().kill();
    assert!(node.plugins().join("kubelet.sock").exists());
    node.boot();
    tokio::task::yield_now().await;
    let mut kubelet = node.kubelet();
    kubelet.registration().await;
}

#[tokio::test]
async fn refused_registration_is_retried_and_logged_rarely() {
    let log = Log::default();
    let _here = log.listen();
    let mut node = Node::new(2);
    let mut kubelet = node.kubelet();
    kubelet.refuses(Some("too many resources"));
    node.boot();
    const REFUSALS: usize = 6;
    for _ in 0..REFUSALS {
        kubelet.registration().await;
    }
    // The response to the last but one was read.
    let reported = log.of("too many resources");
    assert!((1..REFUSALS - 1).contains(&reported), "{reported} of {REFUSALS}");
    kubelet.refuses(Some("another reason"));
    // Recorded before an equal reason would be logged again.
    while log.of("another reason") == 0 {
        kubelet.registration().await;
    }
    assert_eq!(log.of("too many resources"), reported);
    kubelet.refuses(None);
    kubelet.registration().await;
}

#[tokio::test]
async fn new_kubelet_gets_registration_on_new_socket() {
    let mut node = Node::new(2);
    let mut kubelet = node.kubelet();
    node.boot();
    kubelet.registration().await;
    for _ in 0..5 {
        let before = std::fs::metadata(node.socket()).unwrap();
        kubelet.kill();
        kubelet = node.kubelet();
        let mut plugin = kubelet.plugin().await;
        let list = soon("a list", plugin.watch().await.next()).await.unwrap().unwrap();
        assert_eq!(list.devices.len(), 2);
        let after = std::fs::metadata(node.socket()).unwrap();
        assert_ne!((before.ino(), before.created().ok()), (after.ino(), after.created().ok()));
    }
}

#[tokio::test]
async fn removed_socket_is_replaced_while_old_stream_lives() {
    let mut node = Node::new(2);
    let mut kubelet = node.kubelet();
    node.boot();
    let mut old = kubelet.plugin().await;
    let mut stream = old.watch().await;
    soon("the first list", stream.next()).await.unwrap().unwrap();
    std::fs::remove_file(node.socket()).unwrap();
    let mut new = kubelet.plugin().await;
    soon("a list", new.watch().await.next()).await.unwrap().unwrap();
    // Kubelet reads the old stream until the new registration; its end would mark the devices unhealthy.
    node.inventory
        .send_replace(Arc::new(inventory_of(2, |gpu| DeviceHealth { healthy: gpu != 0, reason: None })));
    let list = soon("the change", stream.next()).await.unwrap().unwrap();
    assert_eq!(list.devices[0].health, "Unhealthy");
}

/// Kubelet counts a resource's devices as gone after the stream ended, and never connects by itself.
#[tokio::test]
async fn ended_stream_registers_resource_again() {
    let log = Log::default();
    let _here = log.listen();
    let mut node = Node::new(2);
    let listen = node.listen();
    let mut two = inventory_of(2, |_| DeviceHealth { healthy: true, reason: None });
    two.devices[1].resource = "nvidia.com/gpu.shared".into();
    node.inventory.send_replace(Arc::new(two));
    let mut kubelet = node.kubelet();
    node.boot();
    let mut both = [kubelet.registration().await, kubelet.registration().await];
    both.sort_by(|a, b| a.resource_name.cmp(&b.resource_name));
    assert_eq!(
        both.map(|registration| registration.resource_name),
        ["nvidia.com/gpu", "nvidia.com/gpu.shared"]
    );
    let watched = r#"gantry_plugin_list_streams{resource="nvidia.com/gpu.shared"} 1"#;
    awaited(listen, "/metrics", watched).await;
    awaited(listen, "/metrics", r#"list_streams{resource="nvidia.com/gpu"} 1"#).await;
    let socket = std::fs::metadata(node.socket()).unwrap().ino();
    kubelet.watches(false);
    kubelet.hangs_up("nvidia.com/gpu");
    let again = kubelet.registration().await;
    assert_eq!(again.resource_name, "nvidia.com/gpu", "the other one is read");
    assert_eq!(again.endpoint, "nvidia-gpu.sock");
    let lost = "nvidia.com/gpu is registered, but kubelet does not read its device list";
    let (code, body) = awaited(listen, "/readyz", lost).await;
    assert_eq!(code, 503, "{body}");
    assert!(!body.contains("nvidia.com/gpu.shared"), "{body}");
    let (_, metrics) = get(listen, "/metrics").await;
    assert!(metrics.contains(watched), "{metrics}");
    assert!(metrics.contains(r#"list_streams{resource="nvidia.com/gpu"} 0"#), "{metrics}");
    // Accepted but not read: registered once more.
    kubelet.watches(true);
    assert_eq!(kubelet.registration().await.resource_name, "nvidia.com/gpu");
    let (code, _) = awaited(listen, "/readyz", "ready\n").await;
    assert_eq!(code, 200);
    assert_eq!(log.of("kubelet does not read"), 1, "the second time is no news");
    assert_eq!(log.of("kubelet reads the device list again"), 1);
    assert!(kubelet.registered_nothing());
    assert_eq!(std::fs::metadata(node.socket()).unwrap().ino(), socket, "served on");
    node.stop().await;
}

#[tokio::test]
async fn replaced_sockets_leave_no_listener() {
    let mut node = Node::new(2);
    let mut kubelet = node.kubelet();
    node.boot();
    // Kubelet calls nothing on these; it might as well have closed them.
    let mut connections = vec![kubelet.plugin().await];
    for _ in 0..4 {
        std::fs::remove_file(node.socket()).unwrap();
        connections.push(kubelet.plugin().await);
    }
    let one = async {
        while listeners(&node.socket()) != 1 {
            tokio::task::yield_now().await;
        }
    };
    soon("an end of the others", one).await;
}

/// Listening sockets that were bound to this path, whatever the path is now.
fn listeners(path: &std::path::Path) -> usize {
    const LISTENS: &str = "00010000";
    let path = path.to_str().unwrap();
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let of_path = sockets.lines().filter(|line| line.ends_with(path));
    of_path.filter(|line| line.split_whitespace().nth(3) == Some(LISTENS)).count()
}

#[tokio::test]
async fn replaced_directory_is_detected() {
    let mut node = Node::new(2);
    let mut kubelet = node.kubelet();
    node.boot();
    kubelet.registration().await;
    std::fs::rename(node.plugins(), node.directory.path().join("old")).unwrap();
    std::fs::create_dir(node.plugins()).unwrap();
    let mut kubelet = node.kubelet();
    kubelet.registration().await;
}

#[tokio::test]
async fn second_plugin_is_reported_and_socket_taken_back() {
    let log = Log::default();
    let _here = log.listen();
    let mut node = Node::new(2);
    let listen = node.listen();
    let mut kubelet = node.kubelet();
    node.boot();
    kubelet.registration().await;
    // A removed socket is not contention.
    std::fs::remove_file(node.socket()).unwrap();
    kubelet.registration().await;
    assert_eq!(log.of("second device plugin"), 0);
    // With repeated contention kubelet registers both with growing pauses.
    for least in [0, 1, 2] {
        let theirs = node.plugins().join("theirs");
        let _listener = std::os::unix::net::UnixListener::bind(&theirs).unwrap();
        let began = std::time::Instant::now();
        std::fs::rename(&theirs, node.socket()).unwrap();
        kubelet.registration().await;
        assert!(began.elapsed() >= std::time::Duration::from_secs(least));
    }
    assert_eq!(log.of("second device plugin"), 1);
    let (code, body) = awaited(listen, "/readyz", "another program has registered nvidia.com/gpu").await;
    assert_eq!(code, 200, "{body}");
    node.stop().await;
}

#[tokio::test]
async fn missing_directory_is_awaited() {
    let mut node = Node::new(2);
    std::fs::remove_dir(node.plugins()).unwrap();
    node.boot();
    tokio::task::yield_now().await;
    std::fs::create_dir(node.plugins()).unwrap();
    let mut kubelet = node.kubelet();
    kubelet.registration().await;
}

#[tokio::test]
async fn registration_needs_a_device() {
    let mut node = Node::new(2);
    let ready = Arc::clone(&node.inventory.borrow());
    node.inventory.send_replace(Arc::new(gantry_plugin::inventory::Inventory::absent("no library")));
    let mut kubelet = node.kubelet();
    node.boot();
    tokio::task::yield_now().await;
    assert!(!node.socket().exists());
    node.inventory.send_replace(ready);
    kubelet.registration().await;
}

#[tokio::test]
async fn list_is_sent_only_on_change() {
    let mut node = Node::new(2);
    let mut kubelet = node.kubelet();
    node.boot();
    let mut plugin = kubelet.plugin().await;
    let mut stream = plugin.watch().await;
    let first = soon("the first list", stream.next()).await.unwrap().unwrap();
    assert_eq!(first.devices.len(), 2);
    assert!(first.devices.iter().all(|device| device.health == "Healthy"));
    assert_eq!(first.devices[0].topology.as_ref().unwrap().nodes[0].id, 0);
    // An equal inventory, then a changed one: the next message is the change.
    let same = Arc::clone(&node.inventory.borrow());
    node.inventory.send_replace(Arc::new((*same).clone()));
    tokio::task::yield_now().await;
    node.inventory.send_replace(Arc::new(inventory_of(2, |gpu| DeviceHealth {
        healthy: gpu == 0,
        reason: Some("Xid 79".into()),
    })));
    let second = soon("the change", stream.next()).await.unwrap().unwrap();
    let healths: Vec<&str> = second.devices.iter().map(|device| device.health.as_str()).collect();
    assert_eq!(healths, ["Healthy", "Unhealthy"]);
}

/// The fabric manager was not started before the plugin: an operator finds that in the log and in `/readyz`.
#[tokio::test]
async fn fault_before_start_is_logged_and_in_readyz() {
    let log = Log::default();
    let _here = log.listen();
    let mut node = Node::new(8);
    let listen = node.listen();
    let fault = |gpu: u8| match gpu {
        7 => Some("Xid 79: GPU has fallen off the bus".to_owned()),
        0 => None,
        _ => Some("fabric not started: start nvidia-fabricmanager".to_owned()),
    };
    let with_faults =
        inventory_of(8, |gpu| DeviceHealth { healthy: fault(gpu).is_none(), reason: fault(gpu) });
    node.inventory.send_replace(Arc::new(with_faults));
    let mut kubelet = node.kubelet();
    node.boot();
    kubelet.registration().await;
    let line = "degraded: 7 of 8 GPUs unhealthy: GPUs 1, 2, 3, 4, 5, 6: fabric not started: start \
                nvidia-fabricmanager; GPU 7: Xid 79: GPU has fallen off the bus";
    let (code, body) = awaited(listen, "/readyz", line).await;
    assert_eq!(code, 200, "{body}");
    assert_eq!(log.of("unhealthy: fabric not started"), 1, "six GPUs, one line");
    assert_eq!(log.of("unhealthy: Xid 79"), 1);
    node.inventory.send_replace(Arc::new(support::inventory(8)));
    let gone = async {
        while get(listen, "/readyz").await.1.contains("GPUs unhealthy") {
            support::probes::a_moment().await;
        }
    };
    soon("the end of the faults", gone).await;
    assert_eq!(log.of("healthy again"), 1);
    node.stop().await;
}

/// Kubelet writes its checkpoint when it allocates and when it receives a list, not when a pod ends. Restarted with an
/// old checkpoint, it would refuse pods that wait for the freed devices.
#[tokio::test]
async fn list_is_sent_again_after_pod_ended() {
    let mut node = Node::new(2);
    let mut kubelet = node.kubelet();
    let truth = node.truth();
    truth.set("ends", "main", [uuid(0)]);
    truth.set("stays", "main", [uuid(1)]);
    node.boot();
    let mut plugin = kubelet.plugin().await;
    let mut stream = plugin.watch().await;
    let first = soon("the first list", stream.next()).await.unwrap().unwrap();
    truth.was_read(1).await;
    truth.remove("ends");
    let again = soon("the list again", stream.next()).await.unwrap().unwrap();
    assert_eq!(first, again);
}

#[tokio::test]
async fn no_grant_prefers_best_connected_set() {
    let mut node = Node::new(8);
    let mut kubelet = node.kubelet();
    node.boot();
    let mut plugin = kubelet.plugin().await;
    let ids: Vec<String> = (0..8).map(uuid).collect();
    let offered: Vec<&str> = [1, 2, 4, 5, 7].map(|gpu| ids[gpu].as_str()).into();
    plugin.comes_to_prefer(&offered, 2, [uuid(4), uuid(5)].into()).await;
    let chosen = plugin.prefer(&offered, &[&ids[7]], 1).await;
    assert_eq!(chosen, [uuid(7)].into());
}

#[tokio::test]
async fn allocate_serves_exactly_the_requested_set() {
    let mut node = Node::new(4);
    let mut kubelet = node.kubelet();
    node.boot();
    let mut plugin = kubelet.plugin().await;
    let answer = plugin.allocate(&[&uuid(3), &uuid(1)]).await.unwrap();
    assert_eq!(
        answer.envs["NVIDIA_VISIBLE_DEVICES"],
        format!("{},{}", uuid(3), uuid(1)),
        "in the order asked"
    );
    let status = plugin.allocate(&[&uuid(1), "GPU-unknown"]).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("GPU-unknown"), "{}", status.message());
    assert!(!status.message().contains(&uuid(1)), "{}", status.message());
}

#[tokio::test]
async fn requested_unhealthy_device_is_served() {
    let mut node = Node::new(2);
    node.inventory.send_replace(Arc::new(inventory_of(2, |_| DeviceHealth {
        healthy: false,
        reason: Some("Xid 79".into()),
    })));
    let mut kubelet = node.kubelet();
    node.boot();
    let mut plugin = kubelet.plugin().await;
    assert!(plugin.allocate(&[&uuid(0)]).await.is_ok());
}

#[tokio::test]
async fn shutdown_ends_streams_and_removes_socket() {
    let mut node = Node::new(2);
    let mut kubelet = node.kubelet();
    node.boot();
    let mut plugin = kubelet.plugin().await;
    let mut stream = plugin.watch().await;
    soon("the first list", stream.next()).await.unwrap().unwrap();
    node.stop().await;
    assert!(soon("the stream's end", stream.next()).await.is_none_or(|message| message.is_err()));
    assert!(!node.socket().exists());
}

#[tokio::test]
async fn silent_client_does_not_delay_shutdown() {
    let mut node = Node::new(2);
    let mut kubelet = node.kubelet();
    node.boot();
    kubelet.registration().await;
    let _silent = tokio::net::UnixStream::connect(node.socket()).await.unwrap();
    node.stop().await;
}

#[tokio::test]
async fn stopped_plugin_keeps_successor_socket() {
    let mut old = Node::new(2);
    let mut kubelet: FakeKubelet = old.kubelet();
    old.boot();
    kubelet.registration().await;
    let path = old.socket();
    std::fs::remove_file(&path).unwrap();
    let _successor = std::os::unix::net::UnixListener::bind(&path).unwrap();
    old.shutdown.cancel();
    old.stop().await;
    assert!(path.exists());
}
