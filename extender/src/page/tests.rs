use futures::StreamExt as _;
use gantry_planner::decide::Options;
use gantry_topology::GpuSet;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use super::*;
use crate::fixtures::{
    Cluster, bound, bridged, cut_node, gpu_node, holder, member, pod, quarantined, shared_node, switched,
};
use crate::index::Source;

/// A page, and an API server that answers every read of a pod with this.
fn serving_with(cluster: &Cluster, pod: Value) -> Arc<PageServer> {
    let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
        let pod = pod.to_string();
        async move { Ok::<_, Infallible>(http::Response::new(kube::client::Body::from(pod.into_bytes()))) }
    });
    let leadership = Leadership::always();
    leadership.enter(leadership.term().unwrap());
    let health = ApiHealth::new();
    health.answered(Instant::now());
    let page = Page {
        store: Arc::clone(&cluster.store),
        client: Client::new(service, "default"),
        health,
        leadership: Arc::new(leadership),
        metrics: Arc::default(),
        levels: Levels::parse("rack=example.com/rack").unwrap(),
        stale_after: Duration::from_secs(15),
        hosts: vec!["gpus.example.com".to_owned()],
        run: "run".to_owned(),
    };
    PageServer::new(page, CancellationToken::new())
}

fn serving(cluster: &Cluster) -> Arc<PageServer> {
    serving_with(cluster, Value::Null)
}

async fn request(serving: &Arc<PageServer>, path: &str, host: &str) -> Response {
    let request = http::Request::get(path).header("host", host).body(Body::empty()).unwrap();
    serving.router().oneshot(request).await.unwrap()
}

async fn text_of(response: Response) -> (u16, String) {
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(bytes.to_vec()).unwrap())
}

async fn get(serving: &Arc<PageServer>, path: &str) -> (u16, String) {
    text_of(request(serving, path, "127.0.0.1:8012").await).await
}

async fn read(serving: &Arc<PageServer>, path: &str) -> Value {
    let (status, text) = get(serving, path).await;
    assert_eq!(status, 200, "{path}: {text}");
    serde_json::from_str(&text).unwrap()
}

/// The page computes at most once a second.
async fn later() {
    tokio::time::sleep(PERIOD + Duration::from_millis(20)).await;
}

#[tokio::test]
async fn cold_index_is_reported_and_shows_nothing() {
    let cluster = Cluster::cold(Options::default());
    cluster.add("a", &bridged());
    let serving = serving(&cluster);
    let map = read(&serving, "/api/v1/cluster").await;
    assert_eq!((&map["state"], &map["nodes"], &map["domains"]), (&json!("cold"), &json!(0), &json!([])));
    insta::assert_snapshot!(map["message"].as_str().unwrap(), @"Pods, nodes, GpuNodes and Gangs are still being listed. The map appears once they are.");
    let (status, text) = get(&serving, "/api/v1/nodes/a").await;
    assert_eq!(status, 503);
    insta::assert_snapshot!(text, @"Pods, nodes, GpuNodes and Gangs are still being listed. The map appears once they are.");
    for source in Source::ALL {
        cluster.list(source, |cluster| {
            if matches!(source, Source::Nodes | Source::GpuNodes) {
                cluster.add("a", &bridged());
            }
        });
    }
    later().await;
    let map = read(&serving, "/api/v1/cluster").await;
    assert_eq!((&map["state"], &map["nodes"]), (&json!("ready"), &json!(1)));
}

#[tokio::test]
async fn map_shows_every_state_and_collapses_alike_nodes() {
    let cluster = Cluster::new(Options::default());
    for name in ["a", "b", "c"] {
        cluster.add(name, &bridged());
    }
    cluster.add("d", &switched());
    // One pod that kubelet has reported, one that is only granted, one that is deleted and may still run.
    cluster.pod(&bound(pod("held", 2), "d", 1, Some("0,1")));
    cluster.pod(&bound(pod("granted", 1), "d", 2, Some("2")));
    let mut node = gpu_node("d", &switched());
    node["status"]["holders"] =
        json!([holder("d", "held", Some("held"), "0,1"), quarantined(holder("d", "old", Some("old"), "3"))]);
    node["status"]["devices"][4]["healthy"] = false.into();
    node["status"]["devices"][4]["reason"] = "Xid 79: GPU has fallen off the bus".into();
    cluster.inventory(&node);
    let serving = serving(&cluster);
    let map = read(&serving, "/api/v1/cluster").await;
    let rows = map["domains"][0]["rows"].as_array().unwrap();
    assert_eq!(rows[0]["names"], json!(["a", "b", "c"]), "{map}");
    assert_eq!(rows[1]["names"], json!(["d"]));
    assert!(rows[1]["gpus"].as_str().unwrap().starts_with("hhhluf"), "{map}");
    assert_eq!(map["counts"]["unhealthy"], 1);
    let node = read(&serving, "/api/v1/nodes/d").await;
    assert_eq!(node["gpus"][0]["pods"][0]["hold"], "held");
    assert_eq!(node["gpus"][2]["pods"][0]["hold"], "granted");
    assert_eq!(node["gpus"][3]["pods"][0]["name"], "old");
    assert_eq!(node["gpus"][4]["unhealthy"], "Xid 79: GPU has fallen off the bus");
    let pairs = node["pairs"].as_array().unwrap();
    let gpus = switched().gpus().len();
    assert_eq!(pairs.len(), gpus * (gpus - 1) / 2);
    let machine = switched();
    let rate = f64::from(gantry_topology::Rates::of(&machine).pair(&machine, 0, 1).effective) / 1e3;
    assert_eq!((&pairs[0]["link"], &pairs[0]["gbs"]), (&json!(machine.link(0, 1).to_string()), &json!(rate)));
}

/// The operator cordons a GPU by an annotation with its UUID.
fn cordon(node: &mut Value, gpu: usize) {
    let uuid = crate::fixtures::device(node["metadata"]["name"].as_str().unwrap(), gpu);
    node["spec"]["machine"]["gpus"][gpu]["uuid"] = uuid.clone().into();
    node["metadata"]["annotations"][format!("{}{uuid}", gantry_api::names::CORDON_ANNOTATION_PREFIX)] =
        "fan".into();
}

/// The map of the page must equal that of `gantry map`, which is made of GpuNodes.
#[tokio::test]
async fn map_of_the_index_equals_that_of_gpu_nodes() {
    let cluster = Cluster::new(Options::default());
    let mut whole = gpu_node("a", &bridged());
    whole["status"]["holders"] = json!([holder("a", "p", Some("p"), "0,3")]);
    let mut shared = shared_node("b", &bridged(), "nvidia.com/gpu.shared", 2);
    shared["status"]["devices"][3]["healthy"] = false.into();
    shared["status"]["devices"][3]["reason"] = "lost".into();
    let mut cut = cut_node("c", &bridged(), "nvidia.com/mig-1g.10gb", 1, &[(0, 0), (0, 1), (2, 4)]);
    // Cordons: of a held GPU, of one that the plugin has published as cordoned, and of one with a fault in addition.
    cordon(&mut whole, 0);
    cordon(&mut shared, 5);
    cordon(&mut cut, 0);
    let fail = |node: &mut Value, index: &dyn Fn(&Value) -> bool, reason: &str| {
        for device in
            node["status"]["devices"].as_array_mut().unwrap().iter_mut().filter(|device| index(device))
        {
            device["healthy"] = false.into();
            device["reason"] = reason.into();
        }
    };
    fail(&mut shared, &|device| device["gpu"] == 5, "cordoned: fan");
    fail(&mut cut, &|device| device["id"] == "MIG-c-0-0", "cordoned: fan");
    fail(&mut cut, &|device| device["id"] == "MIG-c-0-1", "Xid 48");
    let nodes = [whole, shared, cut];
    for node in &nodes {
        cluster.node(node["metadata"]["name"].as_str().unwrap(), 8).inventory(node);
    }
    cluster.pod(&bound(pod("p", 2), "a", 1, Some("0,3")));
    let serving = serving(&cluster);
    let objects: Vec<gantry_api::GpuNode> = nodes
        .into_iter()
        .map(|mut node| {
            node["apiVersion"] = "gantry.dev/v1alpha1".into();
            node["kind"] = "GpuNode".into();
            serde_json::from_value(node).unwrap()
        })
        .collect();
    let expected = gantry_map::ClusterMap::of(&objects, &[], |_| String::new());
    let state = |node: &str, gpu: usize| expected.node(node).unwrap().gpus[gpu].state;
    assert_eq!([state("a", 0), state("b", 5)], [gantry_map::GpuState::Cordoned; 2]);
    assert_eq!(state("c", 0), gantry_map::GpuState::Unhealthy);
    for node in &expected.nodes {
        let shown = read(&serving, &format!("/api/v1/nodes/{}", node.name)).await;
        assert_eq!(shown["gpus"], serde_json::to_value(&node.gpus).unwrap(), "{}", node.name);
        assert_eq!(shown["freeGpus"], node.free_gpus);
    }
}

#[tokio::test]
async fn version_changes_only_with_what_is_shown() {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged());
    let serving = serving(&cluster);
    let version = async || read(&serving, "/api/v1/cluster").await["version"].clone();
    let first = version().await;
    cluster.wait(3);
    cluster.inventory(&gpu_node("a", &bridged()));
    later().await;
    assert_eq!(version().await, first, "nothing changed");
    cluster.pod(&bound(pod("p", 2), "a", 1, Some("0,3")));
    later().await;
    let second = version().await;
    assert_ne!(second, first);
    cluster.store.update(|index| {
        index.node_deleted("a");
        index.inventory_deleted("a");
    });
    later().await;
    let map = read(&serving, "/api/v1/cluster").await;
    assert_eq!((&map["nodes"], &map["domains"]), (&json!(0), &json!([])));
    assert_ne!(map["version"], second);
}

/// Numbers of nodes are used again after many nodes came and went; the page must not keep the ones that are gone.
#[tokio::test]
async fn renumbered_nodes_are_read_again() {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged());
    let serving = serving(&cluster);
    assert_eq!(read(&serving, "/api/v1/cluster").await["nodes"], 1);
    for number in 0..600 {
        let name = format!("short-lived-{number}");
        cluster.add(&name, &bridged());
        if number == 100 {
            later().await;
            assert_eq!(read(&serving, "/api/v1/cluster").await["nodes"], 2);
        }
        cluster.store.update(|index| {
            index.node_deleted(&name);
            index.inventory_deleted(&name);
        });
    }
    later().await;
    let map = read(&serving, "/api/v1/cluster").await;
    assert_eq!(map["domains"][0]["rows"][0]["names"], json!(["a"]), "{map}");
}

#[tokio::test]
async fn domain_and_cordon_follow_the_node_object() {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged());
    let serving = serving(&cluster);
    let row = async || read(&serving, "/api/v1/cluster").await["domains"][0].clone();
    assert_eq!(row().await["name"], "rack (no label)");
    let facts = gantry_gang::NodeFacts {
        name: "a".into(),
        labels: [("example.com/rack".into(), "r7".into())].into(),
        unschedulable: true,
        ..Default::default()
    };
    cluster.store.update(|index| index.node_described(Arc::new(facts)));
    later().await;
    let domain = row().await;
    assert_eq!(
        (&domain["name"], &domain["rows"][0]["gpus"]),
        (&json!("rack r7"), &json!("cccccccc")),
        "{domain}"
    );
    assert_eq!(domain["rows"][0]["cordoned"], true);
}

#[tokio::test]
async fn gangs_state_why_they_wait() {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged());
    for number in 0..2 {
        cluster.pod(&member(&format!("train-{number}"), 8, "train", 2));
    }
    cluster.wait(2);
    let serving = serving(&cluster);
    let gangs = read(&serving, "/api/v1/gangs").await;
    let gang = &gangs["gangs"][0];
    assert_eq!(
        (&gang["name"], &gang["phase"], &gang["position"]),
        (&json!("train"), &json!("Queued"), &json!(1)),
        "{gangs}"
    );
    let why = gang["message"].as_str().unwrap();
    insta::assert_snapshot!(why, @"needs 16 GPUs as 2x8; an empty cluster holds 1");
    let gang = read(&serving, "/api/v1/gangs/default/train").await;
    assert_eq!((&gang["message"], gang["members"].as_array().unwrap().len()), (&json!(why), 2), "{gang}");
    let pod = read(&serving, "/api/v1/pods/default/train-0").await;
    assert_eq!(pod["gang"], "default/train");
    insta::assert_snapshot!(pod["waits"]["message"].as_str().unwrap(), @"gang default/train: CannotFit: needs 16 GPUs as 2x8; an empty cluster holds 1");
    let (status, text) = get(&serving, "/api/v1/gangs/default/%3Cscript%3E").await;
    assert_eq!(status, 404);
    insta::assert_snapshot!(text, @r#"no gang is called "<script>" in namespace "default""#);
}

#[tokio::test]
async fn pod_shows_its_placement_or_why_it_waits() {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged());
    cluster.pod(&bound(pod("p", 2), "a", 1, Some("0,3"))).pod(&pod("waits", 12));
    let placement = json!({"devices": ["GPUs 0,3 of a: 2 NVLinks"], "compared": {"nodes": 2, "others": [
        {"node": "b", "alike": 1, "loss": {"reason": "Bandwidth", "gbs": 10.0, "chosenGbs": 20.0}}]}});
    let object = |uid: &str| {
        json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {"name": "p", "namespace": "default", "uid": uid,
            "annotations": {"gantry.dev/placement": placement.to_string()}}})
    };
    let bound = read(&serving_with(&cluster, object("p")), "/api/v1/pods/default/p").await["bound"].clone();
    assert_eq!((&bound["node"], &bound["words"]), (&json!("a"), &json!("GPU 0,3")));
    assert_eq!(bound["placement"]["devices"][0], "GPUs 0,3 of a: 2 NVLinks");
    assert_eq!(bound["placement"]["others"][0], "b: 10 instead of 20 GB/s");
    let values = &bound["placement"]["values"][0];
    assert_eq!((&values["loss"]["gbs"], &values["loss"]["chosenGbs"]), (&json!(10.0), &json!(20.0)));
    let other = read(&serving_with(&cluster, object("another")), "/api/v1/pods/default/p").await;
    assert_eq!(other["bound"]["unexplained"], "the pod is gone", "{other}");
    let waits = read(&serving(&cluster), "/api/v1/pods/default/waits").await;
    insta::assert_snapshot!(waits["waits"]["message"].as_str().unwrap(), @"a: 6 of 8 GPUs free, 12 asked");
    let (status, text) = get(&serving(&cluster), "/api/v1/pods/default/none").await;
    assert_eq!(status, 404);
    insta::assert_snapshot!(text, @r#"no pod "none" in namespace "default" asks for GPUs that Gantry manages"#);
}

/// Reads of pods go to the API server: they are few, however often the page is asked.
#[tokio::test]
async fn reads_of_pods_are_limited() {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged()).pod(&bound(pod("p", 2), "a", 1, Some("0,3")));
    let serving = serving(&cluster);
    let mut codes = Vec::new();
    for _ in 0..20 {
        codes.push(get(&serving, "/api/v1/pods/default/p").await.0);
    }
    assert!(codes.contains(&200) && codes.contains(&429), "{codes:?}");
    let (status, _) = get(&serving, "/api/v1/cluster").await;
    assert_eq!(status, 200, "the map is not concerned");
}

#[tokio::test]
async fn requests_are_limited() {
    let serving = serving(&Cluster::new(Options::default()));
    let mut codes = Vec::new();
    for _ in 0..400 {
        codes.push(request(&serving, "/page.css", "localhost").await.status().as_u16());
    }
    assert!(codes[..100].iter().all(|code| *code == 200));
    assert!(codes.contains(&429));
}

#[tokio::test]
async fn page_loads_its_own_files_and_serves_known_names() {
    let serving = serving(&Cluster::new(Options::default()));
    for (path, kind, content) in FILES {
        let response = request(&serving, path, "[::1]:80").await;
        let header = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
        assert_eq!(header("content-type"), kind);
        assert!(header("content-security-policy").starts_with("default-src 'none'"));
        assert_eq!(header("x-content-type-options"), "nosniff");
        let addresses = content.replace("http://www.w3.org/2000/svg", "");
        assert!(
            !addresses.contains("//cdn") && !addresses.contains("http://") && !addresses.contains("https://"),
            "{path}"
        );
        for unsafe_way in
            ["innerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", " onclick="]
        {
            assert!(!content.contains(unsafe_way), "{path}: {unsafe_way}");
        }
    }
    for (host, expected) in [
        ("127.0.0.1:8012", 200),
        ("localhost", 200),
        ("gpus.example.com:443", 200),
        ("rebound.example.net:8012", 403),
        ("", 403),
    ] {
        assert_eq!(request(&serving, "/", host).await.status(), expected, "{host}");
    }
    let (status, _) = get(&serving, "/../etc/passwd").await;
    assert_eq!(status, 404);
    let post =
        http::Request::post("/api/v1/cluster").header("host", "localhost").body(Body::empty()).unwrap();
    assert_eq!(serving.router().oneshot(post).await.unwrap().status(), 405);
}

/// Names and reasons of others are data: JSON escapes them, and the response is of no type that a browser runs.
#[tokio::test]
async fn hostile_texts_are_data() {
    let cluster = Cluster::new(Options::default());
    let name = "<img src=x onerror=alert(1)>\u{202e}\"";
    let mut node = gpu_node(name, &bridged());
    node["status"]["devices"][0]["healthy"] = false.into();
    node["status"]["devices"][0]["reason"] = "</script><script>alert(2)</script>".into();
    cluster.node(name, 8).inventory(&node);
    let serving = serving(&cluster);
    let response = request(&serving, "/api/v1/cluster", "localhost").await;
    assert_eq!(response.headers()["content-type"], "application/json");
    let map: Value = serde_json::from_str(&text_of(response).await.1).unwrap();
    assert_eq!(map["domains"][0]["rows"][0]["names"][0], name);
    let encoded: String = form_encoded(name);
    let node = read(&serving, &format!("/api/v1/nodes/{encoded}")).await;
    assert_eq!(node["gpus"][0]["unhealthy"], "</script><script>alert(2)</script>");
    for path in ["/api/v1/nodes/%", "/api/v1/nodes/%ff", "/api/v1/pods/a/b/c", "/api/v1/pods//"] {
        let (status, _) = get(&serving, path).await;
        assert!((400..500).contains(&status), "{path}: {status}");
    }
}

fn form_encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

#[tokio::test]
async fn stream_names_each_new_version_once() {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged());
    let serving = serving(&cluster);
    let response = request(&serving, "/events", "localhost").await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut stream = response.into_body().into_data_stream();
    let first = stream.next().await.unwrap().unwrap();
    let map = read(&serving, "/api/v1/cluster").await;
    let expected = format!("data: {{\"version\":{},\"state\":\"ready\"}}\n\n", map["version"]);
    assert_eq!(first, expected);
    let quiet = tokio::time::timeout(Duration::from_millis(2500), stream.next()).await;
    assert!(quiet.is_err(), "nothing changed");
    // Many changes are one message.
    for number in 0..20 {
        cluster.add(&format!("n{number}"), &bridged());
    }
    let began = Instant::now();
    let second = tokio::time::timeout(Duration::from_secs(5), stream.next()).await.unwrap().unwrap().unwrap();
    assert_ne!(second, first);
    assert!(tokio::time::timeout(Duration::from_millis(1500), stream.next()).await.is_err(), "one message");
    assert!(began.elapsed() < Duration::from_secs(8));
    assert_eq!(serving.page.metrics.page_streams.get(), 1);
    serving.shutdown.cancel();
    assert!(tokio::time::timeout(Duration::from_secs(2), stream.next()).await.unwrap().is_none());
    drop(stream);
    assert_eq!(serving.page.metrics.page_streams.get(), 0);
}

#[tokio::test]
async fn streams_are_limited_and_returned() {
    let serving = serving(&Cluster::new(Options::default()));
    let mut open = Vec::new();
    for _ in 0..STREAMS {
        open.push(request(&serving, "/events", "localhost").await);
    }
    assert!(open.iter().all(|response| response.status() == 200));
    assert_eq!(request(&serving, "/events", "localhost").await.status(), 503);
    open.pop();
    assert_eq!(request(&serving, "/events", "localhost").await.status(), 200);
}

/// 5,000 nodes of 100 racks with every second GPU pattern: the text stays below a megabyte, a change costs little, and no
/// lock is held for longer than a chunk takes.
#[tokio::test]
async fn five_thousand_nodes_are_a_bounded_page() {
    let cluster = Cluster::new(Options::default());
    let machine = switched();
    for number in 0..5000 {
        let name = format!("node-{number:04}");
        let mut node = gpu_node(&name, &machine);
        let held: GpuSet = (0..8).filter(|gpu| number >> gpu & 1 == 1).collect();
        let pod_name = format!("pod-{number}");
        node["status"]["holders"] = json!([holder(&name, &pod_name, Some(&pod_name), &held.to_string())]);
        let facts = gantry_gang::NodeFacts {
            name: name.as_str().into(),
            labels: [("example.com/rack".into(), format!("r{}", number / 50).into())].into(),
            ..Default::default()
        };
        cluster.store.update(|index| index.node_described(Arc::new(facts)));
        cluster.inventory(&node);
        let count = u32::try_from(held.len()).unwrap();
        if count > 0 {
            cluster.pod(&bound(pod(&pod_name, count), &name, 1, None));
        }
    }
    let serving = serving(&cluster);
    let began = Instant::now();
    let (status, text) = get(&serving, "/api/v1/cluster").await;
    let first = began.elapsed();
    assert!(status == 200 && text.len() < 1_000_000, "{status}, {} bytes", text.len());
    let map: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(map["domains"].as_array().unwrap().len(), 100);
    cluster.pod(&bound(pod("one", 1), "node-0000", 1, Some("0")));
    later().await;
    let began = Instant::now();
    let (_, changed) = get(&serving, "/api/v1/cluster").await;
    assert_ne!(changed, text);
    eprintln!("first {first:?}, after one change {:?}, {} bytes", began.elapsed(), text.len());
    let observed = cluster.store.read(|index| index.observe_nodes(0, 0, 10));
    assert_eq!((observed.nodes.len(), observed.next), (10, Some(10)));
}
