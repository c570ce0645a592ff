//! The scheduler loop as an extender and a pod see it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod support;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use gantry_sim_cluster::scheduler::{self, ExtenderConfig, ManagedResource};
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Event, Node};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use serde_json::{Value, json};
use support::{Cluster, gpu_pod, refused_with};
use tokio::net::TcpListener;

type Answer = Box<dyn FnMut(&str, &Value) -> Value + Send>;

/// An extender with scripted responses, which records its requests.
#[derive(Clone)]
struct Script {
    answer: Arc<Mutex<Answer>>,
    asked: Arc<Mutex<Vec<(String, Value)>>>,
}

impl Script {
    fn new(answer: impl FnMut(&str, &Value) -> Value + Send + 'static) -> Self {
        Self { answer: Arc::new(Mutex::new(Box::new(answer))), asked: Arc::default() }
    }

    fn verbs(&self) -> Vec<String> {
        self.asked.lock().unwrap().iter().map(|(verb, _)| verb.clone()).collect()
    }

    async fn serve(self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let script = self.clone();
                let service = service_fn(move |request: Request<Incoming>| {
                    let script = script.clone();
                    async move {
                        let verb = request.uri().path().trim_start_matches('/').to_owned();
                        let body = request.into_body().collect().await.unwrap().to_bytes();
                        let body: Value = serde_json::from_slice(&body).unwrap();
                        script.asked.lock().unwrap().push((verb.clone(), body.clone()));
                        let answer = (script.answer.lock().unwrap())(&verb, &body);
                        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(answer.to_string()))))
                    }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        url
    }
}

/// A cluster with this many GPUs per node, and a scheduler that calls the scripted extender.
async fn cluster(gpus: &[(&str, u32)], script: &Script) -> Cluster {
    cluster_asking(gpus, script.clone().serve().await).await
}

async fn cluster_asking(gpus: &[(&str, u32)], url_prefix: String) -> Cluster {
    let cluster = Cluster::start().await;
    for (name, count) in gpus {
        let amounts = json!({"cpu": "8", "memory": "8Gi", "pods": "10", "nvidia.com/gpu": count.to_string()});
        let node = json!({"metadata": {"name": name}, "status": {"allocatable": amounts}});
        let nodes: Api<Node> = Api::all(cluster.client.clone());
        nodes.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
    }
    let config = ExtenderConfig {
        url_prefix,
        filter_verb: "filter".into(),
        prioritize_verb: "prioritize".into(),
        bind_verb: "bind".into(),
        weight: 100,
        http_timeout: "5s".into(),
        managed_resources: vec![ManagedResource { name: "nvidia.com/gpu".into() }],
    };
    tokio::spawn(scheduler::run(cluster.client.clone(), config, cluster.stop.clone()));
    cluster
}

fn on_a_node(pod: Option<&k8s_openapi::api::core::v1::Pod>) -> bool {
    pod.and_then(|pod| pod.spec.as_ref()).is_some_and(|spec| spec.node_name.is_some())
}

#[tokio::test]
async fn the_extender_filters_scores_and_binds_in_its_wire_form() {
    let script = Script::new(|verb, asked| match verb {
        "filter" => json!({
            "Nodes": null, "NodeNames": ["n1", "n3"], "FailedNodes": {"n2": "n2: broken"}, "FailedAndUnresolvableNodes": null,
            "Error": "",
        }),
        "prioritize" => json!([{"Host": "n1", "Score": 0}, {"Host": "n3", "Score": 10}]),
        _ => json!({"Error": format!("asked for {}", asked["Node"])}),
    });
    let cluster = cluster(&[("n1", 8), ("n2", 8), ("n3", 8)], &script).await;
    let pod = cluster.create(gpu_pod("p", 2)).await;
    cluster.wait("p", refused_with(r#"asked for "n3""#)).await;
    let asked = script.asked.lock().unwrap();
    assert_eq!(asked[0].1["Pod"]["metadata"]["name"], "p");
    assert_eq!(asked[0].1["NodeNames"], json!(["n1", "n2", "n3"]));
    assert_eq!(asked[0].1["Nodes"], Value::Null);
    assert_eq!(asked[1].1["NodeNames"], json!(["n1", "n3"]));
    let bind = json!({"PodName": "p", "PodNamespace": "default", "PodUID": pod.metadata.uid, "Node": "n3"});
    assert_eq!(asked[2].1, bind);
}

#[tokio::test]
async fn condition_and_event_contain_both_refusals() {
    let script = Script::new(|_, asked| {
        let names = asked["NodeNames"].as_array().unwrap();
        let failed: BTreeMap<&str, &str> =
            names.iter().map(|name| (name.as_str().unwrap(), "3 of 8 GPUs free, 4 asked")).collect();
        json!({"NodeNames": [], "FailedNodes": failed})
    });
    let cluster = cluster(&[("n1", 2), ("n2", 8), ("n3", 8)], &script).await;
    cluster.create(gpu_pod("p", 4)).await;
    let text = "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 3 of 8 GPUs free, 4 asked.";
    cluster.wait("p", refused_with(text)).await;
    let events: Api<Event> = Api::namespaced(cluster.client.clone(), "default");
    let config = kube::runtime::watcher::Config::default();
    let mut seen = std::pin::pin!(kube::runtime::watcher(events, config));
    loop {
        use futures::TryStreamExt;
        use kube::runtime::watcher::Event::{Apply, InitApply};
        if let Some(Apply(event) | InitApply(event)) = seen.try_next().await.unwrap() {
            assert_eq!(event.reason.as_deref(), Some("FailedScheduling"));
            assert_eq!(event.message.as_deref(), Some(text));
            break;
        }
    }
}

#[tokio::test]
async fn extender_is_not_called_without_feasible_nodes() {
    let script = Script::new(|_, _| json!({}));
    let cluster = cluster(&[("n1", 2), ("n2", 2)], &script).await;
    cluster.create(gpu_pod("p", 4)).await;
    cluster.wait("p", refused_with("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")).await;
    assert_eq!(script.verbs(), [""; 0]);
}

#[tokio::test]
async fn a_pod_without_gpus_is_bound_without_the_extender() {
    let script = Script::new(|_, _| json!({}));
    let cluster = cluster(&[("n1", 2)], &script).await;
    cluster
        .create(json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "x"}]}}))
        .await;
    cluster.wait("p", on_a_node).await;
    assert_eq!(script.verbs(), [""; 0]);
}

#[tokio::test]
async fn unschedulable_pod_is_retried_after_new_devices() {
    let script = Script::new(|verb, asked| match verb {
        "filter" => json!({"NodeNames": asked["NodeNames"]}),
        _ => json!({"Error": "reached"}),
    });
    let cluster = cluster(&[("n1", 2)], &script).await;
    cluster.create(gpu_pod("p", 4)).await;
    cluster.wait("p", refused_with("Insufficient")).await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let more = json!({"status": {"allocatable": {"nvidia.com/gpu": "8"}}});
    nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(more)).await.unwrap();
    cluster.wait("p", refused_with("reached")).await;
}

#[tokio::test]
async fn an_extender_error_is_retried_without_any_event() {
    let mut calls = 0;
    let script = Script::new(move |verb, asked| {
        calls += 1;
        match verb {
            "filter" if calls == 1 => json!({"Error": "caches are cold"}),
            "filter" => json!({"NodeNames": asked["NodeNames"]}),
            _ => json!({"Error": "second try"}),
        }
    });
    let cluster = cluster(&[("n1", 8)], &script).await;
    cluster.create(gpu_pod("p", 4)).await;
    cluster.wait("p", refused_with("caches are cold")).await;
    cluster.wait("p", refused_with("second try")).await;
}

#[tokio::test]
async fn constant_refusal_is_not_retried() {
    let script = Script::new(|_, _| json!({"NodeNames": [], "FailedNodes": {"n1": "no"}}));
    let cluster = cluster(&[("n1", 8)], &script).await;
    cluster.create(gpu_pod("p", 4)).await;
    cluster.wait("p", refused_with("1 no.")).await;
    // A second pod goes through the whole queue, so the first has had its turn as well.
    cluster.create(gpu_pod("q", 4)).await;
    cluster.wait("q", refused_with("1 no.")).await;
    let about = |name: &str| {
        let asked = script.asked.lock().unwrap();
        asked.iter().filter(|(_, body)| body["Pod"]["metadata"]["name"] == name).count()
    };
    assert!(about("p") <= 2, "the pod's own condition wakes it once: {}", about("p"));
}

#[tokio::test]
async fn unreachable_extender_blocks_only_managed_pods() {
    // A port that was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let cluster = cluster_asking(&[("n1", 8)], format!("http://{free}")).await;
    cluster.create(gpu_pod("p", 1)).await;
    cluster.wait("p", refused_with("Connection refused")).await;
    let plain = json!({"metadata": {"name": "q"}, "spec": {"containers": [{"name": "c", "image": "x"}]}});
    cluster.create(plain).await;
    await_condition(cluster.pods(), "q", on_a_node).await.unwrap();
    let events: Api<Event> = Api::namespaced(cluster.client.clone(), "default");
    assert!(!events.list(&ListParams::default()).await.unwrap().items.is_empty());
}
