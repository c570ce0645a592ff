//! A configuration that a label of the node chooses, and the whole daemon: what is answered and served before there is one, and
//! what people see of one that is wrong.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod sim;
mod support;

use gantry_config::source::Configs;
use gantry_sim_cluster::api::{ApiOptions, ApiServer};
use k8s_openapi::api::core::v1::{ConfigMap, Node as KubeNode};
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use sim::Sim;
use support::door::Door;
use support::probes::{a_moment, awaited, get};
use support::{Node, own_address, soon};
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;

#[tokio::test(flavor = "multi_thread")]
async fn missing_config_serves_only_probes_invalid_one_is_reported() {
    let stop = CancellationToken::new();
    let _end = stop.clone().drop_guard();
    let api = ApiServer::start(&ApiOptions::default(), stop.clone()).await.unwrap();
    let client = api.client().unwrap();
    let node = serde_json::from_value(json!({"metadata": {"name": "node-1"}})).unwrap();
    Api::<KubeNode>::all(client.clone()).create(&PostParams::default(), &node).await.unwrap();
    let maps = Api::<ConfigMap>::namespaced(client.clone(), "default");
    let map = json!({"metadata": {"name": "configs"}, "data": {"default": ""}});
    maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();

    // The API server is away: nobody listens where it is sought.
    let door = own_address();
    let sim = Sim::of("workstation-2x");
    let mut node = Node::new(0);
    let kubeconfig = node.directory.path().join("kubeconfig");
    let behind = api.url();
    std::fs::write(&kubeconfig, api.kubeconfig().replace(&behind, &format!("http://{door}"))).unwrap();
    let listen = node.listen();
    let node = node.with(|args| {
        args.no_cluster = false;
        args.kubeconfig = Some(kubeconfig);
        sim.use_in(args);
        args.config.config_map =
            Some(Configs::ConfigMap { namespace: "default".into(), name: "configs".into() });
    });
    let mut kubelet = node.kubelet();
    let shutdown = CancellationToken::new();
    let daemon = tokio::spawn(gantry_plugin::run(node.args().clone(), shutdown.clone()));
    assert_eq!(get(listen, "/healthz").await.0, 200);
    let (code, body) = awaited(listen, "/readyz", "its watch fails").await;
    assert_eq!(code, 503, "{body}");
    assert!(body.starts_with("not ready: no configuration yet"), "{body}");
    assert!(kubelet.registered_nothing(), "kubelet would give out whole what is to be shared");

    let server = behind.trim_start_matches("http://").parse().unwrap();
    let _open = Door::open(door, server).await;
    let mut plugin = kubelet.plugin().await;
    let mut lists = plugin.watch().await;
    let devices = soon("a list", lists.next()).await.unwrap().unwrap().devices;
    assert_eq!(devices.len(), 2);

    let patch = json!({"data": {"default": "flags: {migStrategy: mixt}"}});
    maps.patch("configs", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    let (code, body) = awaited(listen, "/readyz", "degraded: the configuration is invalid").await;
    assert_eq!(code, 200, "GPUs are served on: {body}");
    assert!(body.contains("mixt"), "{body}");
    let (_, metrics) = get(listen, "/metrics").await;
    assert!(metrics.contains("gantry_plugin_config_refused 1"), "{metrics}");
    let note = warning(&client).await;
    assert!(note.contains("mixt"), "{note}");
    let patch = json!({"data": {"default": ""}});
    maps.patch("configs", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    soon("an end of it", async {
        while get(listen, "/readyz").await.1.contains("configuration") {
            a_moment().await;
        }
    })
    .await;
    shutdown.cancel();
    soon("the daemon's end", daemon).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn config_with_unmet_requirement_keeps_the_last_one() {
    let sim = Sim::of("workstation-2x");
    let mut node = Node::new(0);
    let file = node.directory.path().join("config.yaml");
    std::fs::write(&file, "flags: {plugin: {passDeviceSpecs: true}}\n").unwrap();
    let listen = node.listen();
    let channels = sim.installed.layout.dev.join("nvidia-caps-imex-channels");
    std::fs::remove_dir_all(&channels).unwrap();
    let node = node.with(|args| {
        sim.use_in(args);
        args.config.config_file = Some(file.display().to_string());
    });
    let mut kubelet = node.kubelet();
    let shutdown = CancellationToken::new();
    let daemon = tokio::spawn(gantry_plugin::run(node.args().clone(), shutdown.clone()));
    let mut plugin = kubelet.plugin().await;
    let mut lists = plugin.watch().await;
    let devices = soon("a list", lists.next()).await.unwrap().unwrap().devices;
    assert_eq!(devices.len(), 2);

    std::fs::write(&file, "imex: {channelIDs: [0], required: true}\n").unwrap();
    let (code, body) = awaited(listen, "/readyz", "imex.required is true, but there is no").await;
    assert_eq!(code, 200, "GPUs are served on: {body}");
    let (_, metrics) = get(listen, "/metrics").await;
    assert!(metrics.contains("gantry_plugin_config_refused 1"), "{metrics}");
    let container = plugin.allocate(&[&devices[0].id]).await.unwrap();
    assert!(!container.devices.is_empty(), "the last good one: {container:?}");
    assert!(!container.envs.contains_key("NVIDIA_IMEX_CHANNELS"), "{container:?}");

    std::fs::create_dir_all(&channels).unwrap();
    std::fs::write(channels.join("channel0"), "").unwrap();
    soon("its taking effect", async {
        while !get(listen, "/metrics").await.1.contains("gantry_plugin_config_refused 0") {
            a_moment().await;
        }
    })
    .await;
    shutdown.cancel();
    soon("the daemon's end", daemon).await.unwrap().unwrap();
}

/// The text of the Warning on the Node.
async fn warning(client: &kube::Client) -> String {
    let events = Api::<Event>::all(client.clone());
    let found = async {
        loop {
            let all = events.list(&ListParams::default()).await.unwrap().items;
            let of_config = |event: &Event| event.reason.as_deref() == Some("ConfigInvalid");
            // While the API server was away there was one to tell as well.
            let notes = all.into_iter().filter(of_config).filter_map(|event| event.note);
            if let Some(note) = notes.into_iter().find(|note| note.contains("mixt")) {
                return note;
            }
            a_moment().await;
        }
    };
    soon("the Event", found).await
}
