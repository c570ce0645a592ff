use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::fixtures::{Cluster, bound, bridged, member, pod, switched, target, watched};
use crate::index::{BindGrant, Index};
use gantry_planner::decide::Options;

/// A service over a cluster whose API server nobody plays.
pub(crate) fn service(cluster: &Cluster) -> Service {
    let (mock, api) =
        tower_test::mock::pair::<http::Request<kube::client::Body>, http::Response<kube::client::Body>>();
    drop(api);
    let client = kube::Client::new(mock, "default");
    Service {
        store: Arc::clone(&cluster.store),
        binder: Binder::new(client, Arc::clone(&cluster.store), watched(), Duration::from_secs(1)),
        watched: watched(),
        metrics: Arc::default(),
    }
}

fn cluster() -> Cluster {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged()).add("b", &switched()).add("c", &bridged());
    cluster
}

fn body(pod: &Value, names: &[&str]) -> Vec<u8> {
    serde_json::to_vec(&json!({"Pod": pod, "Nodes": null, "NodeNames": names})).unwrap()
}

fn read(answer: &[u8]) -> Value {
    serde_json::from_slice(answer).unwrap()
}

#[tokio::test]
async fn pod_without_devices_passes_all_nodes_before_synchronization() {
    let cluster = Cluster::cold(Options::default());
    let service = service(&cluster);
    let web = json!({"metadata": {"name": "web", "uid": "w"}, "spec": {"containers": [{"name": "web"}]}});
    let answer = read(&service.filter(&body(&web, &["a", "unknown"])).unwrap());
    assert_eq!(answer["NodeNames"], json!(["a", "unknown"]));
    let answer = read(&service.prioritize(&body(&web, &["a", "unknown"])).unwrap());
    assert_eq!(answer, json!([{"Host": "a", "Score": 0}, {"Host": "unknown", "Score": 0}]));
}

#[tokio::test]
async fn a_cold_cache_decides_nothing() {
    let cluster = Cluster::cold(Options::default());
    let service = service(&cluster);
    let body = body(&pod("p", 2), &["a"]);
    assert!(matches!(service.filter(&body), Err(Refusal::Unavailable(UnavailableReason::Cold))));
    assert!(matches!(service.prioritize(&body), Err(Refusal::Unavailable(UnavailableReason::Cold))));
    let bind = br#"{"PodName":"p","PodNamespace":"default","PodUID":"p","Node":"a"}"#;
    assert!(matches!(service.bind(bind).await, Err(Refusal::Unavailable(UnavailableReason::Cold))));
}

/// kube-scheduler may call before the watch has shown the pod: it is read from the call, and judged like one from the
/// watch.
#[tokio::test]
async fn pod_over_the_memory_limit_is_refused_before_it_is_observed() {
    let cluster = cluster();
    let service = service(&cluster);
    let mut fat = pod("fat", 2);
    let toleration = |number: u32| json!({"key": format!("example.com/{number}"), "operator": "Exists"});
    fat["spec"]["tolerations"] = (0..30_000).map(toleration).collect();
    for (pod, passed) in [(fat, 0), (pod("p", 2), 3)] {
        let answer = read(&service.filter(&body(&pod, &["a", "b", "c"])).unwrap());
        assert_eq!(answer["NodeNames"].as_array().unwrap().len(), passed);
        assert_eq!(answer["FailedAndUnresolvableNodes"].as_object().unwrap().len(), 3 - passed);
    }
}

/// Leadership may end between the check of a call and its decision. What is known of gangs is forgotten then: a member
/// would pass filter alone, and preempt would offer up members of other gangs for it.
#[tokio::test]
async fn former_leader_decides_nothing() {
    let cluster = cluster();
    let service = service(&cluster);
    cluster.pod(&bound(member("low-0", 8, "low", 1), "a", 1, Some("0-7")));
    let mut high = member("high-0", 8, "high", 2);
    high["spec"]["priority"] = 10.into();
    cluster.pod(&high);
    cluster.store.update(Index::stand_down);
    let preempt = serde_json::to_vec(&json!({
        "Pod": high,
        "NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "low-0"}], "NumPDBViolations": 0}},
    }))
    .unwrap();
    let names = body(&high, &["a", "b", "c"]);
    for answer in [service.filter(&names), service.prioritize(&names), service.preempt(&preempt)] {
        assert!(matches!(answer, Err(Refusal::Unavailable(UnavailableReason::Follower))), "{answer:?}");
    }
}

#[tokio::test]
async fn the_winner_is_held_for_the_pod() {
    let cluster = cluster();
    let service = service(&cluster);
    let answer = read(&service.prioritize(&body(&pod("p", 2), &["a", "b", "c"])).unwrap());
    assert_eq!(
        answer,
        json!([{"Host": "a", "Score": 0}, {"Host": "b", "Score": 10}, {"Host": "c", "Score": 0}])
    );
    assert_eq!(cluster.free("b"), "0,1,2,3,4,5,6,7");
    assert_eq!(crate::fixtures::set(&cluster.open("b")).len(), 6);
}

/// What prioritize compared is part of what the bind writes.
#[tokio::test]
async fn placement_names_devices_and_the_nodes_that_lost() {
    let cluster = cluster();
    let service = service(&cluster);
    cluster.pod(&pod("p", 2));
    service.prioritize(&body(&pod("p", 2), &["a", "b", "c"])).unwrap();
    let reserved = cluster.store.update(|index| index.reserve(&target("p", "b"), None)).unwrap();
    let BindGrant::Grant { placement, .. } = reserved else { panic!("no grant: {reserved:?}") };
    insta::assert_snapshot!(serde_json::to_string_pretty(&*placement).unwrap());

    // kube-scheduler calls no prioritize for a single node.
    cluster.pod(&pod("q", 1));
    service.filter(&body(&pod("q", 1), &["a"])).unwrap();
    let reserved = cluster.store.update(|index| index.reserve(&target("q", "a"), None)).unwrap();
    let BindGrant::Grant { placement, .. } = reserved else { panic!("no grant: {reserved:?}") };
    insta::assert_snapshot!(placement.on(&"a".into()), @"a: GPU 0: no GPU outside whole groups is free; leaves GPUs 1,2,3,4,5,6,7 free; splits NVLink pair 0,1. The only node that fits");
}

#[tokio::test]
async fn only_filter_survivor_is_reserved_and_refilter_is_idempotent() {
    let cluster = cluster();
    let service = service(&cluster);
    let first = service.filter(&body(&pod("p", 2), &["a"])).unwrap();
    let open = cluster.open("a");
    assert_eq!(open, "2,3,4,5,6,7");
    assert_eq!(service.filter(&body(&pod("p", 2), &["a"])).unwrap(), first);
    assert_eq!(cluster.open("a"), open);
}

#[tokio::test]
async fn a_simulation_leaves_no_trace() {
    let cluster = cluster();
    let service = service(&cluster);
    let template =
        json!({"metadata": {"name": "template-1"}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}});
    let request = json!({"Pod": pod("p", 2), "Nodes": {"items": [template]}, "NodeNames": null});
    let answer = read(&service.filter(&serde_json::to_vec(&request).unwrap()).unwrap());
    assert_eq!(answer["Nodes"]["items"], json!([template]));
    assert!(cluster.store.snapshot().holds.is_empty());
}

#[tokio::test]
async fn unlisted_scheduler_that_calls_filter_gets_its_gang_placed() {
    let cluster = cluster();
    let service = service(&cluster);
    let mut pods = ["g-0", "g-1"].map(|name| member(name, 8, "g", 2));
    for pod in &mut pods {
        pod["spec"]["schedulerName"] = "gpu-profile".into();
        cluster.pod(pod);
    }
    let ask = || read(&service.filter(&body(&pods[0], &["a", "b", "c"])).unwrap());
    cluster.wait(2);
    ask();
    cluster.wait(2);
    assert_eq!(ask()["NodeNames"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn pod_refused_on_all_nodes_is_unschedulable_until_one_fits() {
    let cluster = cluster();
    let service = service(&cluster);
    service.filter(&body(&pod("p", 9), &["a", "b"])).unwrap();
    assert!(cluster.store.read(|index| index.is_unschedulable("p")));
    service.filter(&body(&pod("p", 2), &["a", "b"])).unwrap();
    assert!(!cluster.store.read(|index| index.is_unschedulable("p")));
}

#[tokio::test]
async fn devices_freed_for_nominated_pod_are_kept_from_lower_priority() {
    // Devices for the preempting pod come free piece by piece. Until all are free, pods of lower priority do
    // not get those that are.
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged());
    let service = service(&cluster);
    let ranked = |name: &str, gpus: u32, priority: i32| {
        let mut pod = pod(name, gpus);
        pod["spec"]["priority"] = json!(priority);
        pod
    };
    let [first, second] = ["0-3", "4-7"].map(|set| bound(pod(set, 4), "a", 1, Some(set)));
    cluster.pod(&first).pod(&second);
    let mut high = ranked("high", 6, 10);
    high["status"]["nominatedNodeName"] = "a".into();
    let low = ranked("low", 2, 0);
    cluster.pod(&high).pod(&low);
    cluster.gone(&first).wait(6);
    let passes =
        |pod: &Value| read(&service.filter(&body(pod, &["a"])).unwrap())["NodeNames"] == json!(["a"]);
    let woken = || {
        let woken = cluster.store.update(|index| index.take_activatable(10));
        woken.iter().map(|(uid, _)| uid.to_string()).collect::<Vec<_>>()
    };
    let answer = read(&service.filter(&body(&low, &["a"])).unwrap());
    assert_eq!(
        answer["FailedAndUnresolvableNodes"]["a"],
        json!("node(s) where pods are preempted for a pod of higher priority")
    );
    assert!(passes(&ranked("equal", 2, 10)));
    assert!(!passes(&high), "it needs six");
    // kube-scheduler takes its nomination back, as it does where no end of others helps.
    high["status"]["nominatedNodeName"] = Value::Null;
    cluster.pod(&high).wait(5);
    assert!(!passes(&low));
    cluster.gone(&second).wait(4);
    assert_eq!(woken(), [""; 0]);
    cluster.wait(2);
    assert_eq!(woken(), ["high"]);
    assert!(passes(&high));
    // Beside it there is enough.
    assert!(passes(&low));
}

#[tokio::test]
async fn what_a_pod_does_not_come_for_is_anybodys_in_the_end() {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged());
    let service = service(&cluster);
    let mut high = pod("high", 8);
    high["spec"]["priority"] = json!(10);
    high["status"]["nominatedNodeName"] = "a".into();
    let low = pod("low", 2);
    cluster.pod(&high).pod(&low);
    let passes = || read(&service.filter(&body(&low, &["a"])).unwrap())["NodeNames"] == json!(["a"]);
    let woken = || cluster.store.update(|index| index.take_activatable(10)).len();
    assert!(!passes());
    high["status"]["nominatedNodeName"] = Value::Null;
    cluster.pod(&high).wait(9);
    assert_eq!((passes(), woken()), (false, 0));
    cluster.wait(2);
    assert_eq!((woken(), passes()), (1, true));
    // Nor when it is gone.
    high["status"]["nominatedNodeName"] = "a".into();
    cluster.pod(&high);
    assert!(!passes());
    cluster.gone(&high);
    assert_eq!((woken(), passes()), (1, true));
}

#[tokio::test]
async fn a_member_is_answered_its_node_and_no_other_or_why_it_waits() {
    let cluster = cluster();
    let service = service(&cluster);
    let pods = [member("p-0", 8, "p", 2), member("p-1", 8, "p", 2)];
    cluster.pod(&pods[0]).wait(2);
    let ask = |pod: &Value| read(&service.filter(&body(pod, &["a", "b", "c"])).unwrap());
    let answer = ask(&pods[0]);
    assert_eq!(answer["NodeNames"], json!([]));
    let texts = answer["FailedAndUnresolvableNodes"].as_object().unwrap();
    let texts: std::collections::BTreeSet<&str> = texts.values().map(|text| text.as_str().unwrap()).collect();
    assert_eq!(texts.len(), 1, "{texts:?}");
    // Again it is told the same, and no change of GPUs wakes it: its gang does.
    assert_eq!(ask(&pods[0]), answer);
    assert!(!cluster.store.read(|index| index.is_unschedulable("p-0")));
    cluster.pod(&pods[1]).wait(2);
    let nodes: Vec<Value> = pods.iter().map(|pod| ask(pod)["NodeNames"].clone()).collect();
    assert!(nodes.iter().all(|names| names.as_array().unwrap().len() == 1), "{nodes:?}");
    assert_ne!(nodes[0], nodes[1]);
    assert_eq!(ask(&pods[0])["NodeNames"], nodes[0]);
    let answer = read(&service.prioritize(&body(&pods[0], &["a", "b", "c"])).unwrap());
    let winner = answer.as_array().unwrap().iter().find(|host| host["Score"] == 10).unwrap();
    assert_eq!(winner["Host"], nodes[0][0]);
    assert!(cluster.store.snapshot().holds.is_empty());
}

#[tokio::test]
async fn a_member_that_the_watch_has_not_shown_is_read_from_the_call() {
    let cluster = cluster();
    let service = service(&cluster);
    let pods = [member("p-0", 8, "p", 2), member("p-1", 8, "p", 2)];
    for pod in &pods {
        service.filter(&body(pod, &["a", "b", "c"])).unwrap();
    }
    let answer = read(&service.filter(&body(&pods[0], &["a", "b", "c"])).unwrap());
    assert_eq!(answer["NodeNames"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn nobody_is_stopped_for_a_member_that_the_watch_has_not_shown() {
    let cluster = cluster();
    let service = service(&cluster);
    cluster.pod(&bound(pod("low", 8), "a", 1, Some("0-7")));
    let body = |pod: Value| {
        let offers = json!({"a": {"Pods": [{"UID": "low"}], "NumPDBViolations": 0}});
        let mut pod = pod;
        pod["spec"]["priority"] = 10.into();
        serde_json::to_vec(&json!({"Pod": pod, "NodeNameToMetaVictims": offers})).unwrap()
    };
    let answer = |pod| read(&service.preempt(&body(pod)).unwrap())["NodeNameToMetaVictims"].clone();
    assert_eq!(answer(member("m-0", 8, "m", 2)), json!({}));
    assert_eq!(answer(pod("high", 8))["a"]["Pods"], json!([{"UID": "low"}]));
}

#[tokio::test]
async fn a_simulation_of_a_member_leaves_no_trace() {
    let cluster = cluster();
    let service = service(&cluster);
    let template =
        json!({"metadata": {"name": "template-1"}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}});
    let request = json!({"Pod": member("p-0", 2, "p", 2), "Nodes": {"items": [template]}, "NodeNames": null});
    let answer = read(&service.filter(&serde_json::to_vec(&request).unwrap()).unwrap());
    assert_eq!(answer["Nodes"]["items"], json!([template]));
    assert!(cluster.store.read(|index| index.gang_view("default", "p")).is_none());
}

/// Two of three gangs are named, those with the earliest end of a reservation. The text stays the same while the reservations
/// do, because kube-scheduler retries a pod at every change of its text.
#[tokio::test]
async fn refusal_says_for_whom_and_until_when_devices_are_reserved() {
    let cluster = Cluster::new(Options::default());
    cluster.add("a", &bridged());
    cluster.pod(&bound(pod("holder", 8), "a", 1, Some("0-7")));
    for (gang, node) in [("g1", "b"), ("g2", "c"), ("g3", "d")] {
        cluster.add(node, &bridged());
        cluster.pod(&member(&format!("{gang}-0"), 8, gang, 1)).wait(3);
    }
    let service = service(&cluster);
    let single = pod("single", 4);
    cluster.pod(&single);
    let ask = || {
        let answer = read(&service.filter(&body(&single, &["a", "b", "c", "d"])).unwrap());
        let text = |node: &str| {
            let kinds = ["FailedNodes", "FailedAndUnresolvableNodes"];
            let texts = kinds.iter().filter_map(|kind| answer[kind][node].as_str());
            texts.map(str::to_owned).next().unwrap()
        };
        ["a", "b", "c", "d"].map(text)
    };
    let texts = ask();
    let reserved = "node(s) with 0 of 8 GPUs free, 4 asked, 8 idle and reserved";
    assert_eq!(texts[0], "node(s) with 0 of 8 GPUs free, 4 asked");
    for (text, gang) in [(&texts[1], "g1"), (&texts[2], "g2")] {
        let until = text.strip_prefix(&format!("{reserved} for gang default/{gang} until 2026-01-01T00:0"));
        assert!(until.is_some_and(|until| until.ends_with('Z')), "{text}");
    }
    assert_eq!(texts[3], reserved);
    cluster.wait(3);
    assert_eq!(ask(), texts);
}

#[tokio::test]
async fn backfill_nodes_admit_single_pods_of_higher_priority_only() {
    let cluster = Cluster::new(Options { patience: Duration::ZERO, ..Options::default() });
    cluster.add("a", &bridged()).add("b", &bridged());
    cluster.pod(&bound(pod("holder", 1), "a", 1, Some("0")));
    let service = service(&cluster);
    cluster.pod(&member("p-0", 8, "p", 2)).pod(&member("p-1", 8, "p", 2)).wait(2).wait(2);
    let mut single = pod("single", 1);
    let ask = |pod: &Value| read(&service.filter(&body(pod, &["a", "b"])).unwrap());
    assert_eq!(
        ask(&single)["FailedAndUnresolvableNodes"],
        json!({
            "a": "node(s) reserved for gang default/p, which waits",
            "b": "node(s) reserved for gang default/p, which waits",
        })
    );
    single["spec"]["priority"] = 1.into();
    assert_eq!(ask(&single)["NodeNames"], json!(["a", "b"]));
    // The gang goes: whoever was refused for it is woken.
    cluster.gone(&member("p-0", 8, "p", 2)).wait(2);
    assert!(cluster.store.snapshot().kept.is_none());
}

#[tokio::test]
async fn an_unreadable_quantity_is_said_on_every_node() {
    let cluster = cluster();
    let mut half = pod("p", 1);
    half["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "500m".into();
    let answer = read(&service(&cluster).filter(&body(&half, &["a", "b"])).unwrap());
    assert_eq!(answer["NodeNames"], json!([]));
    assert_eq!(
        answer["FailedAndUnresolvableNodes"]["b"],
        "node(s) not looked at: container main asks for 500m of nvidia.com/gpu, which is not a whole number of devices"
    );
}

/// Of bridged pairs and NVSwitches, the terms decide which nodes pass. A wrong one is the reason on every node.
#[tokio::test]
async fn terms_of_a_pod_decide_which_nodes_pass() {
    let cluster = cluster();
    let service = service(&cluster);
    let answer = |annotations: Value| {
        let mut pod = pod("p", 4);
        pod["metadata"]["annotations"] = annotations;
        read(&service.filter(&body(&pod, &["a", "b", "c"])).unwrap())
    };
    let linked = answer(json!({"gantry.dev/required-link": "nvlink", "example.com/other": "x"}));
    assert_eq!(linked["NodeNames"], json!(["b"]));
    assert_eq!(
        linked["FailedAndUnresolvableNodes"]["a"],
        "node(s) where no 4 free GPUs share NVLink; the best free 4 is NODE, 24 GB/s"
    );
    let wrong = answer(json!({"gantry.dev/required-link": "nvlik"}));
    assert_eq!(wrong["NodeNames"], json!([]));
    insta::assert_snapshot!(wrong["FailedAndUnresolvableNodes"]["a"].as_str().unwrap(), @r#"node(s) not looked at: annotation gantry.dev/required-link: "nvlik" is none of nvlink, pcie-switch, numa, any; did you mean `nvlink`?"#);
}

/// The Topology Manager of a node's kubelet is published with its machine.
#[tokio::test]
async fn node_whose_kubelet_would_refuse_is_refused() {
    let cluster = Cluster::new(Options::default());
    let mut parts = switched().into_parts();
    for gpu in &mut parts.gpus {
        gpu.numa = Some(if gpu.index < 4 { "0" } else { "1" }.parse().unwrap());
    }
    let machine = gantry_topology::Machine::new(parts).unwrap();
    let mut aligned = crate::fixtures::gpu_node("a", &machine);
    aligned["spec"]["kubelet"] = json!({"policy": "single-numa-node"});
    cluster.inventory(&aligned);
    cluster.add("b", &machine);
    let service = service(&cluster);
    let answer = read(&service.filter(&body(&pod("p", 5), &["a", "b"])).unwrap());
    assert_eq!(answer["NodeNames"], json!(["b"]));
    assert_eq!(
        answer["FailedAndUnresolvableNodes"]["a"],
        "node(s) where the Topology Manager (single-numa-node) would refuse 5 devices: 4 + 4 are free by NUMA node"
    );
    let answer = read(&service.filter(&body(&pod("q", 4), &["a", "b"])).unwrap());
    assert_eq!(answer["NodeNames"], json!(["a", "b"]));
}

/// GPUs are free on the first NUMA node, and CPUs on the second. Free CPUs differ on every node, and alike nodes share one
/// text.
#[tokio::test]
async fn reason_has_requested_and_not_free_cpus() {
    let cluster = Cluster::new(Options::default());
    let mut parts = switched().into_parts();
    for gpu in &mut parts.gpus {
        gpu.numa = Some(if gpu.index < 4 { "0" } else { "1" }.parse().unwrap());
    }
    let mut node = crate::fixtures::gpu_node("a", &gantry_topology::Machine::new(parts).unwrap());
    node["spec"]["kubelet"] = json!({"policy": "restricted"});
    node["status"]["cpus"] = json!([
        {"node": 0, "total": 64, "allocatable": 62, "held": 58},
        {"node": 1, "total": 64, "allocatable": 64, "held": 0},
    ]);
    node["status"]["holders"] = json!([crate::fixtures::holder("a", "other", None, "4-7")]);
    cluster.inventory(&node);
    let service = service(&cluster);
    let mut guaranteed = pod("p", 4);
    let limits = &mut guaranteed["spec"]["containers"][0]["resources"]["limits"];
    limits["cpu"] = "8".into();
    limits["memory"] = "1Gi".into();
    let answer = read(&service.filter(&body(&guaranteed, &["a"])).unwrap());
    assert_eq!(
        answer["FailedAndUnresolvableNodes"]["a"],
        "node(s) where the Topology Manager (restricted) would refuse 4 devices with 8 exclusive CPUs: no NUMA nodes have \
         all free as it requires"
    );
    guaranteed["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "4".into();
    let answer = read(&service.filter(&body(&guaranteed, &["a"])).unwrap());
    assert_eq!(answer["NodeNames"], json!(["a"]));
}

#[tokio::test]
async fn malformed_bodies_are_refused_with_their_place() {
    let cluster = cluster();
    let service = service(&cluster);
    let error = service.filter(b"{\"Pod\": }").unwrap_err().to_string();
    assert_eq!(error, "filter: expected value at line 1 column 9");
    let nodes = br#"{"Pod":{"metadata":{}},"Nodes":{"items":[{"metadata":{"name":1}}]}}"#;
    let error = service.filter(nodes).unwrap_err().to_string();
    assert_eq!(
        error,
        "filter: Nodes.items[0]: invalid type: integer `1`, expected a string at line 1 column 21"
    );
    let bind = br#"{"PodName":"../x","PodNamespace":"default","PodUID":"p","Node":"a"}"#;
    let error = service.bind(bind).await.unwrap_err().to_string();
    assert_eq!(error, "bind: PodName is \"../x\", which is no name");
}

#[tokio::test]
async fn a_bind_that_fails_is_an_answer_with_the_reason() {
    let cluster = cluster();
    cluster.pod(&bound(pod("p", 2), "c", 1, None));
    let bind = br#"{"PodName":"p","PodNamespace":"default","PodUID":"p","Node":"a"}"#;
    let answer = read(&service(&cluster).bind(bind).await.unwrap());
    assert_eq!(answer, json!({"Error": "pod is bound to node c already"}));
}

/// JSON that looks like a request in places.
fn almost() -> impl Strategy<Value = Value> {
    let key = prop::sample::select(vec![
        "Pod",
        "Nodes",
        "NodeNames",
        "metadata",
        "name",
        "uid",
        "spec",
        "containers",
        "initContainers",
        "resources",
        "limits",
        "requests",
        "nvidia.com/gpu",
        "restartPolicy",
        "items",
        "status",
        "allocatable",
        "PodName",
        "PodUID",
        "PodNamespace",
        "Node",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<i64>().prop_map(Value::from),
        prop::sample::select(vec!["a", "b", "8", "-1", "0.5", "1e30", "Always", "\u{0}\"\\"])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 48, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..6).prop_map(|entries| entries
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect()),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn no_body_makes_the_service_panic(value in almost(), pod_like in any::<bool>()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _guard = runtime.enter();
        let cluster = cluster();
        let service = service(&cluster);
        let value = if pod_like {
            json!({"Pod": {"metadata": {"name": "p", "uid": "p"}, "spec": value}, "NodeNames": ["a", "b", "x"]})
        } else {
            value
        };
        let body = serde_json::to_vec(&value).unwrap();
        for answer in [service.filter(&body), service.prioritize(&body)].into_iter().flatten() {
            read(&answer);
        }
        let _ = runtime.block_on(service.bind(&body));
    }
}

#[tokio::test]
async fn a_body_that_is_no_text_is_refused_with_its_verb_and_place() {
    let service = service(&cluster());
    let body = b"{\"Pod\": \"\xff\"}";
    let refused = [
        ("filter", service.filter(body)),
        ("prioritize", service.prioritize(body)),
        ("preempt", service.preempt(body)),
        ("bind", service.bind(body).await),
    ];
    for (verb, answer) in refused {
        let Err(Refusal::Malformed { verb: told, error }) = answer else {
            panic!("{verb}: {answer:?}");
        };
        assert_eq!(told, verb);
        assert!(error.ends_with("from index 9"), "{error}");
    }
}

/// A cluster of two nodes with a gang of two that waits only for its scheduler to ask, and a pod by itself that the same scheduler brings.
fn a_gang_about_to_be_planned() -> (Cluster, Value, Value) {
    let cluster = cluster();
    let mut pods = [member("g-0", 8, "g", 2), member("g-1", 8, "g", 2), pod("single", 2)];
    for pod in &mut pods {
        pod["spec"]["schedulerName"] = "gpu-profile".into();
        cluster.pod(pod);
    }
    cluster.wait(2);
    cluster.store.take_plan_times();
    let [member, _, single] = pods;
    (cluster, member, single)
}

#[tokio::test]
async fn a_pod_by_itself_does_not_wait_for_the_plans_of_gangs() {
    let (cluster, _, single) = a_gang_about_to_be_planned();
    let service = service(&cluster);
    let plans = || cluster.store.take_plan_times().len();
    // Its scheduler is known from here on, and the gang is due; one node is left, which is held.
    service.filter(&body(&single, &["a"])).unwrap();
    service.prioritize(&body(&single, &["a", "b"])).unwrap();
    service.filter(&body(&single, &[])).unwrap();
    assert_eq!(plans(), 0);
    assert!(!cluster.store.snapshot().holds.is_empty(), "it has its hold all the same");
    // Whoever plans was told: it has been asked before it listens, and hears it.
    let shutdown = tokio_util::sync::CancellationToken::new();
    let (store, until) = (Arc::clone(&cluster.store), shutdown.clone());
    let planning = tokio::spawn(async move { store.plan(until).await });
    tokio::time::timeout(Duration::from_secs(10), async {
        while plans() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .expect("the gang is planned");
    shutdown.cancel();
    planning.await.unwrap();
}

#[tokio::test]
async fn a_gang_is_planned_by_the_call_of_its_own_member() {
    let (cluster, member, _) = a_gang_about_to_be_planned();
    service(&cluster).filter(&body(&member, &["a", "b", "c"])).unwrap();
    cluster.wait(2);
    assert!(!cluster.store.take_plan_times().is_empty());
}
