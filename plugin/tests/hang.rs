//! A driver that hangs under the whole daemon: the device list and the probes while no call returns, and once calls
//! return again.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;
mod support;

use std::time::Duration;

use gantry_plugin::WatchdogTiming;
use gantry_proto::deviceplugin::ListAndWatchResponse;
use sim::Sim;
use support::probes::{a_moment, awaited, get};
use support::{Node, soon};
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

/// A call takes long enough to count as hanging, and returns before the test times out.
const SLOW: Duration = Duration::from_secs(6);
/// Stands for a minute. Longer than the wait for an event, which is not a hang.
const SILENT: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread")]
async fn hanging_driver_marks_devices_until_it_responds() {
    let sim = Sim::of("workstation-2x");
    let mut node = Node::new(0);
    let listen = node.listen();
    let node = node.with(|args| {
        sim.use_in(args);
    });
    let mut kubelet = node.kubelet();
    let timing = WatchdogTiming {
        check: Duration::from_millis(50),
        silent_after: SILENT,
        restart_after: Duration::from_secs(3600),
    };
    let shutdown = CancellationToken::new();
    let daemon = gantry_plugin::run_with(node.args().clone(), timing, shutdown.clone());
    let daemon = tokio::spawn(daemon);
    let mut plugin = kubelet.plugin().await;
    let mut lists = plugin.watch().await;
    comes(&mut lists, ["Healthy"; 2]).await;

    let controller = &sim.installed.controller;
    controller.slow_call("nvmlEventSetWait_v2", SLOW).unwrap();
    comes(&mut lists, ["Unhealthy"; 2]).await;
    let (code, body) =
        awaited(listen, "/readyz", "NVML hangs: nvmlEventSetWait_v2 has not returned for more than 2 s")
            .await;
    assert_eq!(code, 503, "{body}");
    assert_eq!(get(listen, "/healthz").await.0, 200, "it may come back");
    assert_eq!(get(listen, "/settledz").await.0, 503, "another process may be better off");
    let metric = format!("gantry_plugin_gpu_unhealthy{{gpu=\"{}\",cause=\"nvml\"}} 1", sim.uuid(0));
    let (_, metrics) = get(listen, "/metrics").await;
    assert!(metrics.contains(&metric), "{metrics}");
    // Devices that kubelet allocates are served meanwhile.
    let id = sim.uuid(0);
    let container = plugin.allocate(&[id]).await.unwrap();
    assert_eq!(container.envs["NVIDIA_VISIBLE_DEVICES"], id);

    controller.clear_rule("nvmlEventSetWait_v2").unwrap();
    comes(&mut lists, ["Healthy"; 2]).await;
    soon("readiness", async {
        while get(listen, "/readyz").await.0 != 200 {
            a_moment().await;
        }
    })
    .await;
    let (_, metrics) = get(listen, "/metrics").await;
    assert!(!metrics.contains(&metric), "{metrics}");
    shutdown.cancel();
    soon("the daemon's end", daemon).await.unwrap().unwrap();
}

/// Waits for a list with devices in these states.
async fn comes(lists: &mut Streaming<ListAndWatchResponse>, wanted: [&str; 2]) {
    let coming = async {
        loop {
            let list = lists.next().await.unwrap().unwrap();
            let states = list.devices.iter().map(|device| device.health.as_str());
            if states.eq(wanted) {
                return;
            }
        }
    };
    soon(&format!("a list of devices that are {wanted:?}"), coming).await;
}
